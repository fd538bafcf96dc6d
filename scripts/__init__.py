"""Thin commands: figures, benchmarks, measured data. `python -m scripts.NAME`."""
