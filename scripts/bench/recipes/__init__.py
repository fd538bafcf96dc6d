"""Accuracy of the recipe for a small folder of images beside other programs, in equal time."""
