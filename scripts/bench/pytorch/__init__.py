"""Benchmarks against PyTorch: models, steps and runs as in mupax."""
