"""Benchmarks of a training step and its parts: one implementation against others."""
