"""Figures of the infinite limit in time."""
