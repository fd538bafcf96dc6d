"""Compiler flags of `train/parallel/hardware.py`, one by one and together, and others that people set, against none: losses and time of steps.

    python -m scripts.bench.step.xla_flags [RECIPE] [--rounds 10] [--json out.json] [--flag NAME=VALUE ...] [--one-core]

runs the recipe's step on the devices at hand, on random data. `--flag` tries flags that are in neither table.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tyro.conf import Positional

from mupax.command_line import Switch
from mupax.train.config.recipes import RECIPES
from mupax.train.config.run import Config
from mupax.train.core.program import Program, assemble
from mupax.train.parallel.hardware import FLAGS, Flag, Value
from mupax.train.parallel.sharding import abstract_batch
from scripts import harness
from scripts.bench.in_turns import compared, in_turns, one_core

LOSSES = 3
HALF = "--model.compute.dtype bfloat16"
"""On a CPU another choice, of which the loss differs by rounding."""

_MAXTEXT = "github.com/AI-Hypercomputer/maxtext, scripts of Llama 2 on H100"
_SCRIPTS = "in public training scripts; xla/debug_options_flags.cc"
_OPTIONS = "xla/debug_options_flags.cc"
TRIALS: dict[str, tuple[Flag, ...]] = {
    "gpu": (
        Flag(
            "xla_gpu_enable_triton_gemm",
            False,
            "products by cuBLAS alone, where XLA times Triton's too",
            _MAXTEXT,
        ),
        Flag(
            "xla_gpu_triton_gemm_any",
            True,
            "products by Triton wherever it has one, with what surrounds them fused",
            "docs.jax.dev/en/latest/gpu_performance_tips.html",
        ),
        Flag(
            "xla_gpu_autotune_level",
            0,
            "kernels are not chosen by timing: the same at every start, of bits and of speed",
            "xla/debug_options_flags.cc, 4 by default",
        ),
        Flag(
            "xla_gpu_exhaustive_tiling_search",
            True,
            "Triton's tiles chosen among all, for a longer start",
            _SCRIPTS,
        ),
        Flag("xla_gpu_enable_command_buffer", "", "no CUDA graphs, which take memory", _SCRIPTS),
        Flag(
            "xla_gpu_enable_while_loop_double_buffering",
            True,
            "loops over layers two at a time, so no copies",
            _MAXTEXT,
        ),
        Flag(
            "xla_gpu_enable_highest_priority_async_stream",
            True,
            "collectives before products",
            _MAXTEXT,
        ),
    ),
    "cpu": (
        Flag(
            "xla_cpu_prefer_vector_width",
            512,
            "loops of 512 bits where the default is 256",
            _OPTIONS,
        ),
        Flag("xla_cpu_use_onednn", True, "products by oneDNN in place of Eigen", _OPTIONS),
        Flag(
            "xla_cpu_experimental_onednn_custom_call",
            True,
            "oneDNN's products with what surrounds them",
            _OPTIONS,
        ),
        Flag("xla_cpu_use_xnnpack", True, "products by XNNPACK in place of Eigen", _OPTIONS),
        Flag(
            "xla_cpu_enable_fast_math", True, "sums in any order, no care for infinities", _OPTIONS
        ),
        Flag(
            "xla_cpu_enable_concurrency_optimized_scheduler",
            False,
            "operations in an order for memory",
            _OPTIONS,
        ),
        Flag(
            "xla_cpu_copy_insertion_use_region_analysis",
            True,
            "fewer copies of what is written in place",
            _OPTIONS,
        ),
    ),
}
"""Backend to flags that people set and runs do not. Of GPUs sources disagree (MaxText sets products by cuBLAS alone, JAX's page those by
Triton, NVIDIA's images neither), XLA chooses among both by timing, and no GPU was at hand to tell; docs/evidence/performance.md has CPUs:
each came to. They are known to the compiler."""


def random_batch(program: Program) -> Any:
    """A batch of the recipe's shapes."""
    random, config = np.random.default_rng(0), program.config
    classes = getattr(config.model, "vocab_size", None) or getattr(config.model, "num_classes", 0)
    batch: dict[str, np.ndarray] = {}
    for name, leaf in abstract_batch(config.model, config.data.batch_size).items():
        if leaf.dtype == np.int32:
            batch[name] = random.integers(0, classes, leaf.shape, np.int32)
        else:
            batch[name] = (
                np.ones(leaf.shape, np.float32)
                if name == "weights"
                else random.random(leaf.shape, np.float32)
            )
    return program.train_feed().shard_batch(batch)


def stepper(program: Program, options: Mapping[str, Any]) -> tuple[Callable[[], None], list[float]]:
    """A function that makes a step and waits for it, and the losses of the first steps."""
    step = program.trace_train().lower().compile(compiler_options=dict(options))
    state, numbers, batch = program.initial_state(), program.step_inputs(), random_batch(program)
    losses: list[float] = []

    def once() -> None:
        nonlocal state
        state, metrics = step(state, numbers, batch)
        loss = float(metrics["loss"])
        jax.block_until_ready(state)
        if len(losses) < LOSSES:
            losses.append(loss)

    return once, losses


def measured(config: Config, extra: Mapping[str, Value], rounds: int) -> dict[str, Any]:
    """Losses and time of every set of flags over those of none."""
    program = assemble(config)
    platform = jax.devices()[0].platform
    ours, trials = (
        {flag.name: flag.value for flag in table.get(platform, ())} for table in (FLAGS, TRIALS)
    )
    each = {name: {name: value} for name, value in (ours | trials | dict(extra)).items()}
    sets = {"none": {}, **each, **({"all": ours} if len(ours) > 1 else {})}
    steppers = {name: stepper(program, options) for name, options in sets.items()}
    if platform == "cpu":
        steppers[HALF] = stepper(assemble(_in_half(config)), {})
    seconds = in_turns({name: once for name, (once, _) in steppers.items()}, rounds)
    plain = steppers.pop("none")[1]
    comparisons = {}
    for name, (_, losses) in steppers.items():
        against = compared({name: seconds[name], "none": seconds["none"]}, name)
        difference = max(abs(a - b) / abs(b) for a, b in zip(losses, plain, strict=True))
        comparisons[name] = {"losses": losses, "largest_difference": difference, "time": against}
    return {
        "recipe": config.recipe,
        "batch_size": config.data.batch_size,
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "jax": jax.__version__,
        "losses": plain,
        "sets": comparisons,
    }


def _in_half(config: Config) -> Config:
    compute = replace(config.model.compute, dtype="bfloat16")
    return replace(config, model=replace(config.model, compute=compute))


def _flag(text: str) -> tuple[str, Value]:
    name, _, value = text.partition("=")
    if value in ("true", "false"):
        return name, value == "true"
    return name, int(value) if value.lstrip("-").isdigit() else value


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    recipe: Positional[str] = "lm-tiny"
    batch_size: int | None = None
    """Batch size; that of the recipe by default."""
    rounds: int = 10
    """Turns of three steps each."""
    flag: tuple[str, ...] = ()
    """More flags to try."""
    tolerance: float = 0.0001
    """Largest relative difference of losses."""
    json: Path | None = None
    """Also write the numbers here."""
    one_core: Switch = False
    """Keep the process on one core."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; returns 0, or 1 where a flag changes a loss by more than a float32 sum's order does."""
    args = harness.parse(Options, argv)
    harness.check_names([args.recipe], RECIPES)
    if args.one_core:
        one_core()
    config = RECIPES[args.recipe]()
    if args.batch_size:
        config = replace(config, data=replace(config.data, batch_size=args.batch_size))
    record = measured(config, dict(map(_flag, args.flag)), args.rounds)
    for name, one in record["sets"].items():
        print(
            f"{name}: {one['time']['ratio']['none']:.3f} of the time without, losses differ by {one['largest_difference']:.1e}"
        )
    print(json.dumps(record))
    if args.json is not None:
        args.json.write_text(json.dumps(record, indent=2) + "\n")
    return int(
        any(
            one["largest_difference"] > args.tolerance
            for name, one in record["sets"].items()
            if name != HALF
        )
    )


if __name__ == "__main__":
    sys.exit(main())
