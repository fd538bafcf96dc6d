"""Optimized measuring programs, for large models that compute for longer than they compile."""

from __future__ import annotations

from mupax.presets.optimizers import OPTIMIZERS
from mupax.train.core import optimizer
from mupax.train.studies.check import observables
from mupax.train.studies.check.check import Series

OPTIONS = {"xla_backend_optimization_level": 1, "xla_llvm_disable_expensive_passes": True}


def optimized(series: Series) -> Series:
    """Optimize the program of the largest model, which `tests/conftest.py` forbids otherwise."""
    last = series.definitions[-1]
    tx = optimizer.build(series.config, last.specs)
    still_steps = OPTIMIZERS[series.config.name].still_steps
    series._programs[-1] = observables.program(last, tx, OPTIONS, still_steps)
    return series
