"""What the recipe for a small folder of images is worth beside other programs, in equal seconds."""
