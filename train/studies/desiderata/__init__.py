"""Measurement of which dimensions of a transformer can be scaled, mapping by mapping."""
