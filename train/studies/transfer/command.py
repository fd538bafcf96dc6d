"""`python -m train transfer RECIPE --grow head_dim=16,32,64,128`: does the best learning rate stay as the model grows?

Trains the recipe's model at each size over a grid of learning rates, half octaves apart, from several seeds on the same
batches; fits each size's best rate, and reports how far it drifts as the size doubles, what not tuning the larger sizes
costs, and whether bigger is better near the transferred rate. --compare puts other presets beside, --control one that should
drift. The grid grows until every minimum lies inside, seeds are added until the drift is known to 0.15 octaves per doubling
or --minutes of training end. The preset is relative to the smallest size unless --preset.base is given.

FOLDER gets points.jsonl, transfer.json, transfer.html and a PNG per axis; the same command goes on where it was stopped.
What is not listed here is a flag of the recipe (`python -m train RECIPE --help`) and holds for every point.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mupax import terminal

if TYPE_CHECKING:
    from rich.console import Console

    from mupax.train.config.run import Config, PresetConfig
    from mupax.train.studies.transfer.study import Runner, Study


def parser() -> argparse.ArgumentParser:
    """The command's own flags."""
    made = argparse.ArgumentParser(
        prog="python -m train transfer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("recipe", metavar="RECIPE", help="a recipe of `python -m train --help`")
    made.add_argument(
        "--grow",
        action="append",
        required=True,
        metavar="AXIS=N,N,...",
        help="what grows alone: head_dim, heads, width, depth or mlp; may come several times, each is a study",
    )
    made.add_argument(
        "--compare",
        nargs="+",
        default=[],
        metavar="PRESET",
        help="other presets side by side; constants after commas: depth-mup,alpha_l=1",
    )
    made.add_argument("--control", metavar="PRESET", help="a preset that should drift, to hold the others against")
    made.add_argument("--seeds", type=int, default=3, metavar="N", help="initializations at every rate (3)")
    made.add_argument("--max-seeds", type=int, default=8, metavar="N", help="initializations near the minima (8)")
    made.add_argument("--minutes", type=float, default=20.0, metavar="M", help="training time of one study (20)")
    made.add_argument("--out", type=Path, metavar="FOLDER", help="where everything goes (runs/transfer-RECIPE)")
    made.add_argument(
        "--how", default="auto", choices=["auto", "together", "in-turn"], help="as `python -m train sweep` (auto)"
    )
    made.add_argument(
        "--save-tuned",
        metavar="NAME",
        help="save the smallest size's best rate as --preset PRESET:NAME; NAME may be the path of a .json",
    )
    return made


def main(argv: Sequence[str]) -> int:
    """Run a study: 0 when it is done, whatever it found, 2 on bad input, 130 or 143 stopped by a signal."""
    try:
        args, rest = parser().parse_known_args(list(argv))
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2
    return execute(args, rest, "python -m train transfer " + shlex.join(argv))


def execute(args: argparse.Namespace, rest: Sequence[str], command: str, run: Runner | None = None) -> int:
    """Measure, judge, print, write.

    Args:
        args: of `parser`.
        rest: flags of the recipe.
        command: that was written, for the record.
        run: trains points; the sweep engine in the folder unless given.

    Raises:
        ConfigError, PresetError, UsageError: what does not fit.
    """
    from mupax.train.studies.transfer import study as transfer

    config, dry = _recipe(args, rest)
    limits = transfer.Limits(seeds=args.seeds, max_seeds=args.max_seeds, minutes=args.minutes)
    studies, control = plans(args, rest, config)
    if args.save_tuned:
        from mupax.train.studies.transfer import tuned as transfer_tuned

        transfer_tuned.check_name(args.save_tuned, config.preset.name)
    if dry:
        _dry_run(studies, limits)
        return 0

    from mupax.train.parallel.signals import StopRequest
    from mupax.train.studies.sweep import work
    from mupax.train.studies.transfer import shared as transfer_shared

    console = terminal.console()
    folder = args.out or Path("runs") / f"transfer-{args.recipe}"
    folder.mkdir(parents=True, exist_ok=True)
    studies = transfer_shared.shared(studies)
    if any(study.trained != study.configs for study in studies):
        console.print("where presets give a model the same numbers its points are trained once", style="dim")
    with StopRequest() as stop:
        stop.defer()
        try:
            runner = run or _engine(folder, args.how, console, stop)
            measured = transfer.measure(studies, runner, limits, lambda line: console.print(line, style="dim"))
        except work.Stopped:
            name = stop.received.name if stop.received else "a signal"
            console.print(f"stopped by {name}; what was trained is saved, and the same command goes on")
            return stop.exit_code
    return _report(args, folder, measured, control, command, console, _label(config.preset))


def plans(args: argparse.Namespace, rest: Sequence[str], config: Config) -> tuple[list[Study], str | None]:
    """The studies, axis by axis and preset by preset, and the control's label.

    Raises:
        ConfigError, PresetError: a size, preset or constant that does not fit.
    """
    from mupax.train.config import sizes
    from mupax.train.studies.transfer import study as transfer
    from mupax.zoo.configs import ConfigError

    based = any(word.partition("=")[0] == "--preset.base" for word in rest)
    base = config.preset.base if based else None
    main_label = _label(config.preset)
    asked = {main_label: dataclasses.replace(config.preset, base=base)}
    named = {_label(entry): entry for entry in (_entry(text, base) for text in args.compare)}
    asked = named if main_label in named else {**asked, **named}
    control = None
    if args.control:
        entry = _entry(args.control, base)
        control = _label(entry)
        asked.setdefault(control, entry)
    axes = [sizes.parse(text) for text in args.grow]
    if len({axis for axis, _ in axes}) < len(axes):
        raise ConfigError("--grow names an axis twice; write all its sizes at once, as head_dim=16,32,64")
    return [
        transfer.plan(config, axis, grown, preset, label) for axis, grown in axes for label, preset in asked.items()
    ], control


def _recipe(args: argparse.Namespace, rest: Sequence[str]) -> tuple[Config, bool]:
    from mupax.train.config import cli
    from mupax.zoo.configs import ConfigError

    if "--workdir" in rest or "--resume" in rest:
        raise ConfigError("a study has --out in place of --workdir, and goes on by itself without --resume")
    found = cli.parse(args.recipe, cli.recipe(args.recipe), rest, [*parser()._option_string_actions])
    return dataclasses.replace(found.config, workdir=None), found.dry_run


def _entry(text: str, base: str | None) -> PresetConfig:
    from mupax.train.config.run import PresetConfig

    name, *constants = (part.strip() for part in text.split(","))
    return PresetConfig(name=name, base=base, constants=tuple(constants))


def _label(preset: PresetConfig) -> str:
    from mupax.train.config.tuned import CONSTANTS

    flags = [f"{name}={getattr(preset, name):g}" for name in CONSTANTS if getattr(preset, name) is not None]
    return " ".join([preset.name, *flags, *preset.constants])


def _dry_run(studies: Sequence[Study], limits: Any) -> None:
    for study in studies:
        widths = ", ".join(
            f"{size} (width {config.model.sizes()['embed']})"
            for size, config in zip(study.sizes, study.configs, strict=True)
        )
        print(f"{study.label}, {study.axis} {widths}, base {study.configs[0].preset.base}")
        print(
            f"  5 rates or more a size, {limits.seeds} to {limits.max_seeds} seeds, {study.configs[0].steps} steps, "
            f"at most {limits.minutes:g} minutes of training"
        )


def _engine(folder: Path, how: Any, console: Console, stop: Any) -> Runner:
    from mupax.train.studies.sweep import sweep
    from mupax.train.studies.sweep.rows import Row
    from mupax.train.studies.sweep.table import Table

    engine = sweep.Sweep(folder, how=how, evaluated=False, stop=lambda: stop.received is not None)

    def run(configs: Sequence[Config]) -> list[Row]:
        labels = [
            f"{c.preset.name} width {c.model.sizes()['embed']} depth {c.model.sizes()['layers']}" for c in configs
        ]
        with Table(console, labels, "training loss", lambda row: row.loss) as table:
            return engine.run(configs, table)

    return run


def _report(
    args: argparse.Namespace,
    folder: Path,
    measured: Sequence[Any],
    control: str | None,
    command: str,
    console: Console,
    main_label: str,
) -> int:
    from mupax.train.config.record import to_json
    from mupax.train.studies.transfer import figure, report

    judged = [(each, analysis) for each in measured if (analysis := each.analysis()) is not None]
    unjudged = [each for each in measured if each.analysis() is None]
    for each in unjudged:
        console.print(f"{each.study.label} in {each.study.axis}: {each.stopped}", markup=False)
    if not judged:
        return 1
    config = measured[0].study.configs[0]
    units = config.data.batch_size * config.model.units
    about = {
        "title": f"Does the learning rate of {args.recipe} transfer?",
        "command": command,
        "recipe": args.recipe,
        "data": config.data.name,
        "steps": config.steps,
        "batch": config.data.batch_size,
        f"{config.model.unit}s seen by a point": f"{config.steps * units:,}",
        "optimizer": config.optimizer.name,
        "config": to_json(config),
    }
    figures: dict[str, Path] = {}
    for axis in dict.fromkeys(each.study.axis for each, _ in judged):
        figures[axis] = folder / f"{axis}.png"
        of_axis = [(each, analysis) for each, analysis in judged if each.study.axis == axis]
        what = (
            f"{args.recipe}, {config.optimizer.name}, {config.steps} steps: loss against learning rate as {axis} grows"
        )
        figure.draw(figures[axis], of_axis, what)
    report.show(console, judged, control)
    report.write_json(folder / "transfer.json", report.to_json(judged, control, about))
    report.write_html(folder / "transfer.html", judged, control, figures, about)
    console.print(f"report in {folder / 'transfer.html'}", markup=False, soft_wrap=True)
    if args.save_tuned:
        from mupax.train.studies.transfer import tuned as transfer_tuned

        path, use = transfer_tuned.save(args.save_tuned, main_label, judged, command)
        console.print(f"saved {path}; train with --preset {use}", markup=False, soft_wrap=True)
    return 0
