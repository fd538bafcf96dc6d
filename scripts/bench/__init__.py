"""Benchmarks of time and memory.

`python -m scripts.bench NAME` measures one and writes docs/evidence/performance.md.
"""
