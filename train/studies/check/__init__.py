"""Coordinate check: effects of a preset as one size grows, measured and held against theory."""
