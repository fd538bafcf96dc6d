"""Measuring programs compiled with some optimization: those of many tests compute for longer than they compile."""

from __future__ import annotations

import jax

from mupax.train.studies.check.check import Series

OPTIONS = {"xla_backend_optimization_level": 1, "xla_llvm_disable_expensive_passes": True}


def optimized(series: Series) -> Series:
    """The series, whose programs `tests/conftest.py` would have compiled without optimization."""
    series._programs = [jax.jit(program.__wrapped__, compiler_options=OPTIONS) for program in series._programs]
    return series
