"""What vision transforms, tuned constants and fine-tuning are worth: the numbers of docs/vision.md and docs/own_images.md."""
