"""How XLA compiles for CPUs in tests. Imports no JAX: `conftest.py` needs it before."""

from __future__ import annotations

from importlib.metadata import version

LEVEL = "--xla_backend_optimization_level"
_OLDER_EMITTER = version("jaxlib").startswith("0.10.")
"""Later versions have one emitter of fusions, and end the process where they do not know an option."""
QUICKLY = (
    f"{LEVEL}=0",
    *(["--xla_cpu_use_fusion_emitters=false", "--xla_llvm_force_inline_before_split=false"] if _OLDER_EMITTER else []),
    "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_disable_hlo_passes=cpu-parallel-task-assigner",
)
"""Hundreds of small programs that run for milliseconds: compiled without LLVM's optimizations, by XLA's older and simpler emitter
of fusions, in one piece and for one thread each, they take a third of the processor time. `make core` has XLA as users have it."""
FUSIONS_OF_USERS = {"xla_cpu_use_fusion_emitters": True} if _OLDER_EMITTER else {}
"""Options of one compilation: the older emitter rounds as the fusions of each program happen to fall."""
