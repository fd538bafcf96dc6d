"""Compare compiler flags with none: losses and time of a recipe's step.

    python -m scripts.bench.step.xla_flags [RECIPE] [--rounds 10] [--json out.json]
        [--flag NAME=VALUE ...] [--one-core]

Flags are those of `train/parallel/hardware.py`, one by one and together, and others that people set
(`TRIALS`). `--flag` tries flags that are in neither table. The step runs on the devices of this
machine, on random data.
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
"""Number of first steps whose losses are compared."""
HALF = "--model.compute.dtype bfloat16"
"""Name of an additional run, in bfloat16, on CPUs only. Its loss differs by rounding."""

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
"""Flags that people set and runs do not, by backend. The compiler knows all of them.

Sources disagree on GPUs: MaxText sets products by cuBLAS alone, JAX's page those by Triton,
NVIDIA's images neither. XLA chooses between both by timing, and no GPU was at hand to measure.
docs/evidence/performance.md has the result on CPUs.
"""


def random_batch(program: Program) -> Any:
    """Return a random batch of a run's shapes on its devices."""
    random = np.random.default_rng(0)
    config = program.config
    classes = getattr(config.model, "vocab_size", None) or getattr(config.model, "num_classes", 0)
    batch: dict[str, np.ndarray] = {}
    for name, leaf in abstract_batch(config.model, config.data.batch_size).items():
        if leaf.dtype == np.int32:
            batch[name] = random.integers(0, classes, leaf.shape, np.int32)
        elif name == "weights":
            batch[name] = np.ones(leaf.shape, np.float32)
        else:
            batch[name] = random.random(leaf.shape, np.float32)
    return program.train_feed().shard_batch(batch)


def stepper(program: Program, options: Mapping[str, Any]) -> tuple[Callable[[], None], list[float]]:
    """Compile a run's step and return a function that takes one step, and a list of losses.

    The function waits for its step. The list holds the losses of the first `LOSSES` steps.

    Args:
        options: Values of compiler flags by name, as of `compile(compiler_options=...)`.
    """
    step = program.trace_train().lower().compile(compiler_options=dict(options))
    state = program.initial_state()
    step_inputs = program.step_inputs()
    batch = random_batch(program)
    losses: list[float] = []

    def take_step() -> None:
        nonlocal state
        state, metrics = step(state, step_inputs, batch)
        loss = float(metrics["loss"])
        # The loss is ready before the state is updated.
        jax.block_until_ready(state)
        if len(losses) < LOSSES:
            losses.append(loss)

    return take_step, losses


def measured(config: Config, extra: Mapping[str, Value], rounds: int) -> dict[str, Any]:
    """Return losses and times of every set of flags, and their ratios to those without flags.

    Args:
        extra: Values by name of flags that are neither in `FLAGS` nor in `TRIALS`.
    """
    program = assemble(config)
    platform = jax.devices()[0].platform
    ours = {flag.name: flag.value for flag in FLAGS.get(platform, ())}
    trials = {flag.name: flag.value for flag in TRIALS.get(platform, ())}

    sets: dict[str, dict[str, Value]] = {"none": {}}
    for name, value in (ours | trials | dict(extra)).items():
        sets[name] = {name: value}
    if len(ours) > 1:
        sets["all"] = ours

    steppers = {name: stepper(program, options) for name, options in sets.items()}
    if platform == "cpu":
        steppers[HALF] = stepper(assemble(_in_half(config)), {})
    seconds = in_turns({name: step for name, (step, _) in steppers.items()}, rounds)

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
    """Return the run with products in bfloat16."""
    compute = replace(config.model.compute, dtype="bfloat16")
    return replace(config, model=replace(config.model, compute=compute))


def _flag(text: str) -> tuple[str, Value]:
    """Return the name and value of a flag that is written NAME=VALUE."""
    name, _, value = text.partition("=")
    if value in ("true", "false"):
        return name, value == "true"
    if value.lstrip("-").isdigit():
        return name, int(value)
    return name, value


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    recipe: Positional[str] = "lm-tiny"
    batch_size: int | None = None
    """Number of examples in a batch, by default the recipe's."""
    rounds: int = 10
    """Turns of each set of flags, of three steps each."""
    flag: tuple[str, ...] = ()
    """More flags to try."""
    tolerance: float = 0.0001
    """Largest relative difference of losses that is taken for rounding."""
    json: Path | None = None
    """Also write the result here."""
    one_core: Switch = False
    """Keep the process on one core."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, report and return 0, or 1 if a flag changes a loss by more than `--tolerance`."""
    args = harness.parse(Options, argv)
    harness.check_names([args.recipe], RECIPES)
    if args.one_core:
        one_core()
    config = RECIPES[args.recipe]()
    if args.batch_size:
        config = replace(config, data=replace(config.data, batch_size=args.batch_size))
    record = measured(config, dict(map(_flag, args.flag)), args.rounds)
    differs = False
    for name, result in record["sets"].items():
        difference = result["largest_difference"]
        ratio = result["time"]["ratio"]["none"]
        print(f"{name}: {ratio:.3f} of the time without, losses differ by {difference:.1e}")
        if name != HALF and difference > args.tolerance:
            differs = True
    print(json.dumps(record))
    if args.json is not None:
        args.json.write_text(json.dumps(record, indent=2) + "\n")
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
