"""Estimate one point of `scripts.bench.pytorch.gpu_mfu` by the compiler alone, without a GPU.

    python -m scripts.bench.pytorch.gpu_estimate h100 gpt2 32 --variant '{"remat": "dots"}'

Prints memory and the least time of a step, as one line of JSON. `gpu_mfu` prints these beside what
it measured on a GPU of the same kind, so that each machine corrects the estimates. A process of its
own is needed because JAX must not take the GPU here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tyro.conf import Positional

from mupax.command_line import Switch
from mupax.train.pods import topology
from scripts import harness


def estimate(
    chip: str, model: str, batch_size: int, variant: dict[str, Any], *, tiny: bool
) -> dict[str, Any]:
    """Compile a training step for one GPU, and return its memory and its least time.

    Args:
        chip: Name of the GPU in `chips.GPUS`, such as "h100".
        model: Name of the model, as `mupax.zoo.configs.get` takes it.
        batch_size: Number of sequences or images in a step.
        variant: Fields of `ComputeConfig`.
        tiny: Use a small model in place of the named one.

    Returns:
        `peak_bytes`; `least_step_s`, a lower bound on the seconds of a step; `bound`, what sets the
        lower bound; and `problems` of the compiled step.
    """
    name = f"{chip}:1"
    topology.ready(name)  # before JAX is imported
    from mupax.train.pods.compiled import compile_for
    from scripts.bench.pytorch.gpu_point import config_of

    config = config_of(model, batch_size, variant, tiny=tiny)
    report = compile_for(config, name).report()
    roofline = report["roofline"]
    return {
        "peak_bytes": report["peak_bytes_per_device"],
        "least_step_s": roofline["step_seconds"],
        "bound": roofline["bound"],
        "problems": report["problems"],
    }


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    chip: Positional[str]
    model: Positional[str]
    batch_size: Positional[int]
    variant: str = "{}"
    """Fields of the model's compute section, as a JSON object."""
    tiny: Switch = False
    """Use a small model."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the estimate and return the exit code 0."""
    args = harness.parse(Options, argv)
    variant = json.loads(args.variant)
    print(json.dumps(estimate(args.chip, args.model, args.batch_size, variant, tiny=args.tiny)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
