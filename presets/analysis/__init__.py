"""What a preset does as a size grows: limits, verdicts and the printed table."""
