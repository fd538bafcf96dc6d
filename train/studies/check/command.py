"""`python -m train check MODEL`: measure what a preset does as one size grows, and hold it against theory."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from tyro import conf

from mupax import command_line, terminal
from mupax.command_line import Switch
from mupax.presets.optimizers import OPTIMIZERS
from mupax.train.config.cli import ConstantFlags


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check(ConstantFlags):
    """What a preset does as one size grows, measured and held against theory.

    Takes the structure of a named model (norm, activation, positions, biases, grouped heads, ties) at small sizes, grows one
    of them over a few doublings, trains every size for ten steps from several seeds on one batch, and fits log-log slopes.
    """

    model: Annotated[conf.Positional[str], conf.arg(metavar="MODEL")] = "lm-proxy"
    """A model of `python -m zoo`, for its structure."""
    preset: Annotated[str, conf.arg(aliases=("--preset.name",), metavar="NAME")] = "mup"
    """A preset of `python -m presets`."""
    grow: Literal["head_dim", "heads", "depth", "width", "mlp", "kv_heads"] = "head_dim"
    """Which size grows; width doubles heads and head_dim in turn."""
    optimizer: Annotated[str, conf.arg(aliases=("--optimizer.name",), metavar="NAME")] = "adam"
    """Whose rates."""
    peak_lr: Annotated[float | None, conf.arg(aliases=("--optimizer.peak-lr",), metavar="X")] = None
    """Rate at base size; by optimizer unless given."""
    sizes: Annotated[int, conf.arg(metavar="N")] = 4
    """How many sizes, each twice the one before."""
    seeds: Annotated[int, conf.arg(metavar="N")] = 4
    """Initializations per size."""
    json: Annotated[str | None, conf.arg(metavar="PATH")] = None
    """Write verdict and slopes as JSON."""
    figure: Annotated[str | None, conf.arg(metavar="PATH")] = None
    """Draw every observable against size (PNG)."""
    dry_run: Switch = False
    """Print the sizes and what theory expects; measure nothing."""


def main(argv: Sequence[str]) -> int:
    """Measures, judges, prints, writes: 0 when every slope is as predicted and healthy, 1 when one is not."""
    args = command_line.parse(Check, "python -m train check", argv)
    from mupax import presets
    from mupax.presets.analysis.limits import refuse_uneven
    from mupax.train.config.sections import OptimizerConfig
    from mupax.train.studies.check import check, report, theory
    from mupax.zoo import configs
    from mupax.zoo.definition import definition

    if args.sizes < 2 or args.seeds < 1:
        raise configs.ConfigError("a slope needs --sizes of at least 2 and --seeds of at least 1")
    started = time.monotonic()
    constants, grown = args.values(), check.grow(configs.get(args.model), args.grow, args.sizes)
    preset = presets.get(args.preset, **constants)
    if not preset.baseless:
        preset = presets.get(args.preset, base=grown[0].base_sizes(), **constants)
    optimizer = OptimizerConfig(name=args.optimizer, schedule="constant", eps=1e-12)
    optimizer = dataclasses.replace(optimizer, peak_lr=args.peak_lr or OPTIMIZERS[optimizer.name].check_lr)
    definitions = [definition(config) for config in grown]
    refuse_uneven(preset, definitions[-1].sizes, args.optimizer)
    if args.dry_run:
        for config in grown:
            print(f"width {config.width}, {config.num_heads} heads of {config.heads_dim}, depth {config.depth}")
        for (name, step), slope in theory.of(preset, definitions[0], definitions[-1], args.optimizer).items():
            trouble = f", {slope.trouble}" if slope.trouble else ""
            print(f"{name} after {step}: theory says {slope.slope:+.2f}{trouble}")
        return 0
    findings = check.study(definitions, preset, optimizer, check.batch(grown[0]), args.seeds)
    grew = f"growing {args.grow} {args.sizes - 1} times twofold ({time.monotonic() - started:.0f} s)"
    title = f"{args.model} under {preset.name}, {args.optimizer}, {grew}"
    report.show(terminal.console(), findings, title)
    about = {
        "model": args.model,
        "preset": preset.name,
        "constants": constants,
        "optimizer": args.optimizer,
        "peak_lr": optimizer.peak_lr,
        "grow": args.grow,
        "seeds": args.seeds,
        "sizes": [dataclasses.asdict(config) for config in grown],
    }
    if args.json:
        Path(args.json).write_text(json.dumps(report.to_json(findings, about), indent=2) + "\n")
    if args.figure:
        report.figure(args.figure, findings, [2.0**i for i in range(args.sizes)], f"{args.grow} / smallest", title)
    return 0 if check.passes(findings) else 1
