"""Look at presets. `python -m presets` lists them; with a word it does more.

`table PRESET --model NAME` shows a preset at work, `limits PRESET` says what each size does on its way to infinity,
`compare A B ...` puts such verdicts side by side, `tuned` lists presets whose rate a study found, with their evidence.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import sys
from collections.abc import Sequence
from typing import Any

from mupax import presets, terminal
from mupax.presets import Preset, constants
from mupax.presets.analysis import table, verdicts
from mupax.presets.rule import FAMILIES

CONSTANTS = ("alpha_a", "alpha_l", "gamma0", "beta0")


@terminal.quiet_in_pipes
def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code (0 done, 2 bad input with one message on stderr)."""
    try:
        args = _parser().parse_args(argv)
        return {"table": _table, "limits": _limits, "compare": _compare, "tuned": _tuned}.get(args.command, _list)(args)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2
    except ValueError as error:
        if not type(error).__module__.startswith("mupax."):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m presets", description="Parameterization presets and their tables.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.add_parser("list", help="name and one line of every preset (what no command does)")

    shown = commands.add_parser("table", help="every parameter's factors under a preset", description=_table.__doc__)
    shown.add_argument("preset", metavar="PRESET", help=f"{', '.join(presets.PRESETS)}, or measured:PATH")
    shown.add_argument("--model", required=True, metavar="NAME", help="a model of `python -m zoo`")
    shown.add_argument(
        "--base", metavar="NAME", help="the model factors are relative to; without it the absolute form, base 1"
    )
    shown.add_argument("--decay", default="coupled", choices=["coupled", "independent"], help="how weight decay enters")
    shown.add_argument("--form", choices=presets.FORMS, help="where multipliers sit")
    shown.add_argument("--absolute", action="store_true", help="values (base constant x factor), not factors")
    shown.add_argument("--rules", action="store_true", help="the power laws in m = size / base size, not their values")

    limit = commands.add_parser(
        "limits", help="what each size does on its way to infinity", description=_limits.__doc__
    )
    limit.add_argument("preset", metavar="PRESET", help=", ".join(presets.PRESETS))
    several = commands.add_parser(
        "compare", help="verdicts of several presets side by side", description=_compare.__doc__
    )
    several.add_argument(
        "presets", metavar="PRESET", nargs="+", help="names of presets, each with its default constants"
    )
    several.add_argument(
        "--summary", action="store_true", help="one row per preset: each verdict with what shows it most"
    )
    several.add_argument("--markdown", action="store_true", help="a Markdown table")

    studied = commands.add_parser(
        "tuned", help="presets with tuned numbers, and their evidence", description=_tuned.__doc__
    )
    studied.add_argument("name", nargs="?", metavar="PRESET:NAME", help="say everything about one")
    studied.add_argument("--json", action="store_true", help="print JSON")

    for command in (shown, limit, several):
        command.add_argument(
            "--optimizer", default="adam", metavar="NAME", help=f"{', '.join(FAMILIES)} (default adam)"
        )
        command.add_argument("--json", action="store_true", help="print JSON")
    for command in (shown, limit):
        for name in CONSTANTS:
            flag = name.replace("_", "-")
            command.add_argument(
                f"--{flag}", f"--preset.{flag}", dest=name, type=float, metavar="X", help="a constant of the preset"
            )
        command.add_argument(
            "--constants",
            "--preset.constants",
            "--constant",
            action="extend",
            nargs="+",
            default=[],
            metavar="NAME=VALUE",
            help="any other constant, such as s=0.5 or eps_scope=everywhere",
        )
    return parser


def _list(args: argparse.Namespace) -> int:
    del args
    print(
        terminal.table([[name, (inspect.getdoc(make) or "").splitlines()[0]] for name, make in presets.PRESETS.items()])
    )
    return 0


def _table(args: argparse.Namespace) -> int:
    """One row per parameter group: its forward multiplier, initial std, learning rate, eps and weight decay.

    Factors are relative to the base (1 where the model is the base); --absolute shows values instead.
    """
    from mupax.zoo import configs

    model = configs.get(args.model)
    preset = _preset(args, configs.get(args.base).base_sizes() if args.base else None)
    sizes, tied = model.sizes(), {name: factor.spec for name, factor in model.factors().items() if factor.spec}
    specs = {**dict(sorted(model.parameters().items())), **tied}
    if args.rules:
        found: list[dict[str, Any]] = [dict(row) for row in table.rule_rows(preset, specs, args.optimizer)]
    else:
        found = table.rows(preset, specs, sizes, args.optimizer, args.decay, absolute=args.absolute)
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    print(terminal.wrapped(f"{args.model} under {preset.describe()}, {args.optimizer}, {args.decay} decay"))
    print()
    print(table.text(found))
    print()
    print(terminal.wrapped(table.forward_text(preset, sizes)))
    for caution in preset.cautions(sizes, args.optimizer):
        print(terminal.wrapped(f"caution: {caution}"))
    return 0


def _limits(args: argparse.Namespace) -> int:
    """What activations, logits, updates, gradients and decay do as head_dim, heads or depth grow: exponent and verdict.

    Computed from the preset's rules alone, for a pre-norm transformer.
    """
    preset = _preset(args, None)
    if args.json:
        found = verdicts.verdicts(preset, args.optimizer)
        print(
            json.dumps(
                {row: {limit: dataclasses.asdict(e) for limit, e in at.items()} for row, at in found.items()}, indent=2
            )
        )
        return 0
    what = "size^exponent of each observable as one size grows, the ratios of widths fixed"
    print(terminal.wrapped(f"{preset.describe()}, {args.optimizer}: {what}"))
    print()
    print(terminal.table(verdicts.limits_rows(preset, args.optimizer)))
    return 0


def _compare(args: argparse.Namespace) -> int:
    """What is not stable in some of the presets, side by side: a row per growing size and observable."""
    named = [presets.get(name) for name in args.presets]
    rows = (verdicts.summary_rows if args.summary else verdicts.compare_rows)(named, args.optimizer)
    if args.json:
        print(json.dumps([dict(zip(rows[0], row, strict=True)) for row in rows[1:]], indent=2))
        return 0
    print(verdicts.markdown(rows) if args.markdown else terminal.table(rows, keys=1 if args.summary else 2))
    return 0


def _tuned(args: argparse.Namespace) -> int:
    """Presets whose base, constants and optimizer a study found best: the rate, what it was found on, how it transfers.

    `python -m train RECIPE --preset PRESET:NAME` uses one. Those in the folder `tuned` here are listed too.
    """
    from mupax.presets.tuned import find as tuned

    found = [tuned.find(args.name)] if args.name else [tuned.load(path) for path in tuned.files().values()]
    if args.json:
        listed = [dataclasses.asdict(each) for each in found]
        print(json.dumps(listed[0] if args.name else listed, indent=2))
    elif args.name:
        print(tuned.described(found[0]))
    elif found:
        print(terminal.table([[each.use, tuned.summary(each)] for each in found]))
    else:
        print("no preset is tuned yet; `python -m train transfer ... --save-tuned NAME` makes one")
    return 0


def _preset(args: argparse.Namespace, base: dict[str, int] | None) -> Preset:
    given: dict[str, Any] = constants.read(args.constants, {name: getattr(args, name) for name in CONSTANTS})
    return presets.get(args.preset, base=base, form=getattr(args, "form", None), **given)


if __name__ == "__main__":
    sys.exit(main())
