"""`python -m train check MODEL`: measure what a preset does as one size grows, and hold it against theory.

Takes the structure of a named model (norm, activation, positions, biases, grouped heads, ties) at small sizes, grows one
of them over a few doublings, trains every size for ten steps from several seeds on one batch, and fits log-log slopes.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Sequence

from mupax import terminal

AXES = ("head_dim", "heads", "depth", "width", "mlp", "kv_heads")
RATES = {"adam": 2e-3, "adamw": 2e-3, "sgd": 0.2, "momentum": 0.05, "muon": 2e-3, "lion": 1e-3}
"""Peak rates at which ten steps move the small base model visibly and stay in its linear regime."""

CONSTANTS = ("alpha_a", "alpha_l", "gamma0", "beta0")


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    made = argparse.ArgumentParser(
        prog="python -m train check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "model",
        nargs="?",
        default="lm-proxy",
        metavar="MODEL",
        help="a model of `python -m zoo`, for its structure (lm-proxy)",
    )
    made.add_argument(
        "--preset", "--preset.name", default="mup", metavar="NAME", help="a preset of `python -m presets` (mup)"
    )
    for name in CONSTANTS:
        made.add_argument(
            f"--preset.{name.replace('_', '-')}", dest=name, type=float, metavar="X", help="a constant of the preset"
        )
    made.add_argument(
        "--constants",
        "--preset.constants",
        action="extend",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="any other constant of the preset, such as s=0.5",
    )
    made.add_argument(
        "--grow",
        choices=AXES,
        default="head_dim",
        help="which size grows (head_dim); width doubles heads and head_dim in turn",
    )
    made.add_argument("--optimizer", "--optimizer.name", default="adam", choices=list(RATES), help="whose rates (adam)")
    made.add_argument(
        "--peak-lr",
        "--optimizer.peak-lr",
        dest="peak_lr",
        type=float,
        metavar="X",
        help="rate at base size; by optimizer unless given",
    )
    made.add_argument("--sizes", type=int, default=4, metavar="N", help="how many sizes, each twice the one before (4)")
    made.add_argument("--seeds", type=int, default=4, metavar="N", help="initializations per size (4)")
    made.add_argument("--json", metavar="PATH", help="write verdict and slopes as JSON")
    made.add_argument("--figure", metavar="PATH", help="draw every observable against size (PNG)")
    made.add_argument("--dry-run", action="store_true", help="print the sizes and what theory expects; measure nothing")
    return made


def main(argv: Sequence[str]) -> int:
    """Run the check: 0 when every slope is as predicted and healthy, 1 when one is not, 2 on bad input."""
    try:
        args = parser().parse_args(list(argv))
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2
    return run(args)


def run(args: argparse.Namespace) -> int:
    """Measure, judge, print, write."""
    from mupax import presets
    from mupax.presets import constants
    from mupax.presets.analysis.verdicts import refuse_uneven
    from mupax.train.config.run import OptimizerConfig
    from mupax.train.studies.check import check, models, report, theory
    from mupax.zoo import build, configs

    if args.sizes < 2 or args.seeds < 1:
        raise configs.ConfigError("a slope needs --sizes of at least 2 and --seeds of at least 1")
    started = time.monotonic()
    given = constants.read(args.constants, {name: getattr(args, name) for name in CONSTANTS})
    grown = models.series(configs.get(args.model), args.grow, args.sizes)
    preset = presets.get(args.preset, **given)
    if not preset.baseless:
        preset = presets.get(args.preset, base=grown[0].base_sizes(), **given)
    optimizer = OptimizerConfig(
        name=args.optimizer, peak_lr=args.peak_lr or RATES[args.optimizer], schedule="constant", eps=1e-12
    )
    definitions = [build.definition(config) for config in grown]
    refuse_uneven(preset, definitions[-1].sizes, args.optimizer)
    if args.dry_run:
        for config in grown:
            print(f"width {config.width}, {config.num_heads} heads of {config.heads_dim}, depth {config.depth}")
        for (name, step), slope in theory.of(preset, definitions[0], definitions[-1], args.optimizer).items():
            print(
                f"{name} after {step}: theory says {slope.slope:+.2f}" + (f", {slope.trouble}" if slope.trouble else "")
            )
        return 0
    findings = check.study(definitions, preset, optimizer, models.batch(grown[0]), args.seeds)
    seconds = time.monotonic() - started

    title = f"{args.model} under {preset.name}, {args.optimizer}, growing {args.grow} {args.sizes - 1} times twofold ({seconds:.0f} s)"
    report.show(terminal.console(), findings, title)
    about = {
        "model": args.model,
        "preset": preset.name,
        "constants": given,
        "optimizer": args.optimizer,
        "peak_lr": optimizer.peak_lr,
        "grow": args.grow,
        "seeds": args.seeds,
        "sizes": [dataclasses.asdict(config) for config in grown],
    }
    if args.json:
        report.write_json(args.json, findings, about)
    if args.figure:
        report.figure(args.figure, findings, [2.0**i for i in range(args.sizes)], f"{args.grow} / smallest", title)
    return 0 if check.passes(findings) else 1
