"""Theory of what a preset does as a size grows: limits, verdicts, and tables of them."""
