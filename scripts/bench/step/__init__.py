"""A training step and its parts, each way against the others."""
