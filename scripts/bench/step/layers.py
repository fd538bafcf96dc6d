"""Compare a training step with unrolled layers, with a scan, and with fused projections.

    python -m scripts.bench.step.layers [--model lm|vit] [--rounds 20] [--json FILE.json]

Measures the time of a step and the time to compile.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from mupax.train.core.program import assemble
from mupax.zoo.configs import ComputeConfig
from scripts import harness
from scripts.bench import in_turns
from scripts.bench.pytorch.step import MODELS, batches_of, jax_step

WAYS = {
    "unrolled": ComputeConfig(layers="unrolled", projections="separate"),
    "scan": ComputeConfig(layers="scan", projections="separate"),
    "unrolled_fused": ComputeConfig(layers="unrolled", projections="fused"),
}
"""Compute settings that are compared, by name."""


def measure(name: str, rounds: int, *, tiny: bool = False) -> dict[str, Any]:
    """Return times and ratios of one model, and the seconds to compile each step."""
    steps = {}
    compile_s = {}
    now = in_turns.clock()
    for way, compute in WAYS.items():
        program = assemble(MODELS[name](compute, tiny=tiny), jax.devices()[:1])
        began = now()
        steps[way] = jax_step(program, batches_of(program, 2))
        compile_s[way] = round(now() - began, 2)
    return {
        "model": name,
        "compile_s": compile_s,
        **in_turns.compared(in_turns.in_turns(steps, rounds), "unrolled"),
    }


@dataclass(frozen=True)
class Options(in_turns.Timing):
    """Flags of the command."""

    model: str = "all"
    """Model to measure, lm, vit or all."""
    rounds: int = 20


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the chosen models, report the results and return the exit code 0."""
    args = in_turns.parse(Options, argv)
    harness.check_names([args.model], [*MODELS, "all"])
    names = list(MODELS) if args.model == "all" else [args.model]
    results = [measure(name, args.rounds, tiny=args.tiny) for name in names]
    for result in results:
        print(f"{result['model']}: unrolled takes {result['ratio']['scan']:.3f} of the scan's time")
    in_turns.report("layers", results, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
