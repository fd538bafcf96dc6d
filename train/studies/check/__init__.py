"""The coordinate check: what a preset does as one size grows, measured and held against theory."""
