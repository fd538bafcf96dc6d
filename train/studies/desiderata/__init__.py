"""Measurement of which dimensions of a transformer can grow alone, operation by operation."""
