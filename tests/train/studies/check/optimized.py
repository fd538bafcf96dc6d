"""Measuring programs compiled with some optimization: that of a large model computes for longer than it compiles."""

from __future__ import annotations

from mupax.presets.optimizers import OPTIMIZERS
from mupax.train.core import optimizer
from mupax.train.studies.check import observables
from mupax.train.studies.check.check import Series

OPTIONS = {"xla_backend_optimization_level": 1, "xla_llvm_disable_expensive_passes": True}


def optimized(series: Series) -> Series:
    """The series, whose largest model `tests/conftest.py` would have compiled without optimization."""
    last = series.definitions[-1]
    tx = optimizer.build(series.config, last.specs)
    still_steps = OPTIMIZERS[series.config.name].still_steps
    series._programs[-1] = observables.program(last, tx, OPTIONS, still_steps)
    return series
