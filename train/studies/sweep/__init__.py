"""Many points of learning rates, seeds, constants and sizes, with one compilation per shape."""
