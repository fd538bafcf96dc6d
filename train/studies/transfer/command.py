"""`python -m train transfer RECIPE --grow head_dim=16,32,64,128`: does the best learning rate stay as the model grows?"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro import conf

from mupax import command_line, terminal
from mupax.command_line import Repeated
from mupax.presets.papers import CONSTANT_FLAGS
from mupax.train.config import cli, sizes
from mupax.train.config.run import PresetConfig
from mupax.zoo.configs import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from mupax.train.config.run import Config
    from mupax.train.studies.transfer.study import Runner, Study


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transfer:
    """Whether the best learning rate stays as the model grows.

    Trains the recipe's model at each size over a grid of learning rates, half octaves apart, from several seeds on the same
    batches; fits each size's best rate, and reports how far it drifts as the size doubles, what not tuning the larger sizes
    costs, and whether bigger is better near the transferred rate. --compare puts other presets beside, --control one that
    should drift. The grid grows until every minimum lies inside, seeds are added until the drift is known to 0.15 octaves per
    doubling or --minutes of training end. The preset is relative to the smallest size unless --preset.base is given.

    FOLDER gets points.jsonl, transfer.json, transfer.html and a PNG per axis; the same command goes on where it was stopped.
    What is not listed here is a flag of the recipe (`python -m train RECIPE --help`) and holds for every point.
    """

    recipe: Annotated[conf.Positional[str], conf.arg(metavar="RECIPE")]
    """A recipe of `python -m train --help`."""
    grow: Annotated[Repeated, conf.arg(metavar="AXIS=N,N,...")]
    """What grows alone: head_dim, heads, width, depth or mlp; each is a study."""
    compare: Annotated[tuple[str, ...], conf.arg(metavar="PRESET ...")] = ()
    """Other presets side by side; constants after commas: depth-mup,alpha_l=1."""
    control: Annotated[str | None, conf.arg(metavar="PRESET")] = None
    """A preset that should drift, to hold the others against."""
    seeds: Annotated[int, conf.arg(metavar="N")] = 3
    """Initializations at every rate."""
    max_seeds: Annotated[int, conf.arg(metavar="N")] = 8
    """Initializations near the minima."""
    minutes: Annotated[float, conf.arg(metavar="M")] = 20.0
    """Training time of one study."""
    out: Annotated[Path | None, conf.arg(metavar="FOLDER")] = None
    """Where everything goes; runs/transfer-RECIPE unless given."""
    how: Literal["auto", "together", "in-turn"] = "auto"
    """As `python -m train sweep`."""
    save_tuned: Annotated[str | None, conf.arg(metavar="NAME")] = None
    """Save the smallest size's best rate as --preset PRESET:NAME; NAME may be the path of a .json."""


def main(argv: Sequence[str]) -> int:
    """Runs a study: 0 when it is done, whatever it shows, 130 or 143 stopped by a signal; raises as `execute`."""
    args, rest = command_line.parse_known(Transfer, "python -m train transfer", argv)
    return execute(args, rest, "python -m train transfer " + shlex.join(argv))


def execute(args: Transfer, rest: Sequence[str], command: str, run: Runner | None = None) -> int:
    """Measure, judge, print, write.

    Args:
        args: flags of the command.
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


def plans(args: Transfer, rest: Sequence[str], config: Config) -> tuple[list[Study], str | None]:
    """The studies, axis by axis and preset by preset, and the control's label.

    Raises:
        ConfigError, PresetError: a size, preset or constant that does not fit.
    """
    from mupax.train.studies.transfer import study as transfer

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


def _recipe(args: Transfer, rest: Sequence[str]) -> tuple[Config, bool]:
    if "--workdir" in rest or "--resume" in rest:
        raise ConfigError("a study has --out in place of --workdir, and goes on by itself without --resume")
    found = cli.parse(args.recipe, cli.recipe(args.recipe), rest, command_line.flags(Transfer))
    return dataclasses.replace(found.config, workdir=None), found.dry_run


def _entry(text: str, base: str | None) -> PresetConfig:
    name, *given = (part.strip() for part in text.split(","))
    return PresetConfig(name=name, base=base, constants=tuple(given))


def _label(preset: PresetConfig) -> str:
    flags = [f"{name}={getattr(preset, name):g}" for name in CONSTANT_FLAGS if getattr(preset, name) is not None]
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
    args: Transfer,
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
