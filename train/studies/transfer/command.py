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
from mupax.presets import PresetError, horizon
from mupax.presets.papers import CONSTANT_FLAGS
from mupax.presets.roles import RUN_AXES
from mupax.train.config import cli, sizes
from mupax.train.config.preset import preset_of
from mupax.train.config.run import PresetConfig
from mupax.zoo.configs import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from mupax.train.config.run import Config
    from mupax.train.parallel.signals import StopRequest
    from mupax.train.studies.transfer.study import Measured, Runner, Study


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
    """What grows alone: head_dim, heads, width, depth, mlp, kv_heads, batch (at the same tokens) or tokens; each is a study."""
    compare: Annotated[tuple[str, ...], conf.arg(metavar="PRESET ...")] = ()
    """Other presets side by side; constants after commas: depth-mup,alpha_l=1. A joint rule is the recipe's preset under it."""
    control: Annotated[str | None, conf.arg(metavar="PRESET")] = None
    """A preset that should drift, to hold the others against; where batch or tokens grow, none."""
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

    def __post_init__(self) -> None:
        if self.seeds < 1 or self.max_seeds < self.seeds:
            raise ConfigError(f"--seeds {self.seeds} and --max-seeds {self.max_seeds}: write 1 <= seeds <= max-seeds")
        if not self.minutes > 0:
            raise ConfigError(f"--minutes is {self.minutes}; write a number above 0")


def main(argv: Sequence[str]) -> int:
    """Runs a study: 0 when it is done, whatever it shows, 128 + its number stopped by a signal; raises as `execute`."""
    args, rest = command_line.parse_known(Transfer, "python -m train transfer", argv)
    return execute(args, rest, "python -m train transfer " + shlex.join(argv))


def execute(args: Transfer, rest: Sequence[str], command: str, run: Runner | None = None) -> int:
    """Measure, judge, print, write; 0 when done, whatever it shows. Raises MupaxError for what does not fit.

    Args:
        args: flags of the command.
        rest: flags of the recipe.
        command: that was written, for the record.
        run: trains points; the sweep engine in the folder unless given.
    """
    from mupax.train.studies.transfer import study, tuned

    if "--workdir" in rest or "--resume" in rest:
        raise ConfigError("a study has --out in place of --workdir, and goes on by itself without --resume")
    recipe = cli.parse(args.recipe, cli.recipe(args.recipe), rest, command_line.flags(Transfer))
    config = dataclasses.replace(recipe.config, workdir=None)
    relative = any(word.partition("=")[0] == "--preset.base" for word in rest)
    studies, control = _planned(args, config, config.preset.base if relative else None)
    if args.save_tuned:
        tuned.check_name(args.save_tuned, config.preset.name)
    if recipe.dry_run:
        _dry_run(studies, args)
        return 0

    from mupax.train.parallel.signals import StopRequest
    from mupax.train.studies.sweep.work import Stopped

    console = terminal.console()
    folder = args.out or Path("runs") / f"transfer-{args.recipe}"
    folder.mkdir(parents=True, exist_ok=True)
    studies = shared(studies)
    if any(one.trained != one.configs for one in studies):
        console.print("where presets give a model the same numbers its points are trained once", style="dim")
    with terminal.lasting(), StopRequest() as stop:
        stop.defer()
        try:
            runner = run or _engine(folder, args.how, console, stop)
            limits: Any = {"seeds": args.seeds, "max_seeds": args.max_seeds, "minutes": args.minutes}
            measured = study.measure(studies, runner, lambda line: console.print(line, style="dim"), **limits)
        except Stopped:
            name = stop.received.name if stop.received else "a signal"
            console.print(f"stopped by {name}; what was trained is saved, and the same command goes on")
            return stop.exit_code
    return _report(args, folder, measured, control, command, _label(config.preset))


def shared(studies: Sequence[Study]) -> list[Study]:
    """The studies, their points under `sp`, or under the preset of an earlier study, where that changes no number.

    Every relative preset is `sp` at its base, a preset without a depth rule is `sp` at every depth, and `mup` and `mup-half` are
    one rule where heads grow. Such a point is trained once, under the name that comes first, and serves all.
    """
    import jax
    import numpy as np

    from mupax.train.core.factors import init_stds, resolve
    from mupax.zoo.definition import definition

    seen: list[tuple[Config, list[np.ndarray]]] = []

    def numbers(config: Config) -> list[np.ndarray]:
        """All that a preset decides in a run, and its optimizer; none where it has no rule for this one."""
        try:
            preset, model = preset_of(config), definition(config.model)
            factors = resolve(preset, model, config.optimizer.name, config.optimizer.decay)
        except PresetError:
            return []
        decided = (factors, init_stds(preset, model), repr(config.scaled_optimizer))
        return [np.asarray(leaf) for leaf in jax.tree.leaves(decided)]

    def first(config: Config) -> Config:
        """The first of `sp`, `seen` and the config itself that trains as it does; is added to `seen`."""
        plain = dataclasses.replace(config, preset=PresetConfig(name="sp", base=config.preset.base))
        ours = numbers(config)
        for other, its in [(plain, numbers(plain)), *seen] if ours else ():
            same_run = dataclasses.replace(other, preset=config.preset, optimizer=config.optimizer) == config
            if same_run and len(ours) == len(its) and all(map(np.array_equal, ours, its)):
                return other
        seen.append((config, ours))
        return config

    return [dataclasses.replace(study, trained=tuple(map(first, study.configs))) for study in studies]


def _planned(args: Transfer, config: Config, base: str | None) -> tuple[list[Study], str | None]:
    """The studies, axis by axis and preset by preset, and the control's label."""
    from mupax.train.studies.transfer import study as transfer

    main = dataclasses.replace(config.preset, base=base)

    def preset(text: str) -> PresetConfig:
        if text in horizon.RULES:
            return dataclasses.replace(main, joint=horizon.rule(text).name)
        name, *values = (part.strip() for part in text.split(","))
        return PresetConfig(name=name, base=base, constants=tuple(values), joint=main.joint)

    presets = {_label(other): other for other in map(preset, args.compare)}
    if _label(main) not in presets:
        presets = {_label(main): main, **presets}
    control = preset(args.control) if args.control else None
    if control is not None:
        presets.setdefault(_label(control), control)
    axes = [sizes.parse(text, (*sizes.AXES, *RUN_AXES)) for text in args.grow]
    if len({axis for axis, _ in axes}) < len(axes):
        raise ConfigError("--grow names an axis twice; write all its sizes at once, as head_dim=16,32,64")
    studies = [transfer.plan(config, axis, grown, one, name) for axis, grown in axes for name, one in presets.items()]
    return studies, None if control is None else _label(control)


def _label(preset: PresetConfig) -> str:
    flags = [f"{name}={getattr(preset, name):g}" for name in CONSTANT_FLAGS if getattr(preset, name) is not None]
    rule = [f"joint={preset.joint}"] if preset.joint != "none" else []
    return " ".join([preset.name, *flags, *preset.constants, *rule])


def _dry_run(studies: Sequence[Study], args: Transfer) -> None:
    for study in studies:
        models = zip(study.sizes, study.configs, strict=True)
        widths = ", ".join(f"{size} (width {config.model.sizes()['embed']})" for size, config in models)
        print(f"{study.label}, {study.axis} {widths}, base {study.configs[0].preset.base}")
        print(
            f"  5 rates or more a size, {args.seeds} to {args.max_seeds} seeds, {study.configs[0].steps} steps, "
            f"at most {args.minutes:g} minutes of training"
        )


def _engine(folder: Path, how: Literal["auto", "together", "in-turn"], console: Console, stop: StopRequest) -> Runner:
    from mupax.train.studies.sweep.sweep import Row, Sweep
    from mupax.train.studies.sweep.table import Table

    engine = Sweep(folder, how=how, evaluated=False, stop=lambda: stop.received is not None)

    def run(configs: Sequence[Config]) -> list[Row]:
        models = [(config.preset.name, config.model.sizes()) for config in configs]
        labels = [f"{name} width {size['embed']} depth {size['layers']}" for name, size in models]
        with Table(console, labels, "training loss", lambda row: row.loss) as table:
            return engine.run(configs, table)

    return run


def _report(
    args: Transfer, folder: Path, measured: Sequence[Measured], control: str | None, command: str, label: str
) -> int:
    from mupax.train.config.record import to_json
    from mupax.train.studies.transfer import report, tuned

    judged = []
    for one in measured:
        if (analysis := one.analysis()) is None:
            print(f"{one.study.label} in {one.study.axis}: {one.stopped}")
        else:
            judged.append((one, analysis))
    if not judged:
        return 1
    config = measured[0].study.configs[0]
    about = {
        "title": f"Does the learning rate of {args.recipe} transfer?",
        "command": command,
        "recipe": args.recipe,
        "data": config.data.name,
        "steps": config.steps,
        "batch": config.data.batch_size,
        f"{config.model.unit}s seen by a point": f"{config.steps * config.data.batch_size * config.model.units:,}",
        "optimizer": config.optimizer.name,
        "config": to_json(config),
    }
    report.show(judged, control)
    print(f"report in {report.write(folder, judged, control, about)}")
    if args.save_tuned:
        path, use = tuned.save(args.save_tuned, label, judged, command)
        print(f"saved {path}; train with --preset {use}")
    return 0
