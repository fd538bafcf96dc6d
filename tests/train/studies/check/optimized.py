"""Measuring programs compiled with some optimization: that of a large model computes for longer than it compiles."""

from __future__ import annotations

import jax

from mupax.train.studies.check.check import Series

OPTIONS = {"xla_backend_optimization_level": 1, "xla_llvm_disable_expensive_passes": True}


def optimized(series: Series) -> Series:
    """The series, whose largest model `tests/conftest.py` would have compiled without optimization."""
    series._programs[-1] = jax.jit(series._programs[-1].__wrapped__, compiler_options=OPTIONS)
    return series
