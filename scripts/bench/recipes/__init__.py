"""What the first runs' recipes and data are worth."""
