"""What the vision transforms are worth, and what fine-tuning is: the numbers of docs/vision.md and docs/own_images.md."""
