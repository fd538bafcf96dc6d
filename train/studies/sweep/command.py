"""`mupax sweep RECIPE`: many runs that differ in learning rate, seed, constants or size, as one command.

A sweep ends with the answer: the best learning rate and how sure it is, then what to type next.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro import conf

from mupax import command_line, terminal
from mupax.command_line import Repeated, Switch
from mupax.train.config import cli, sizes
from mupax.train.config.checks import at_least, note_warmup
from mupax.train.studies.sweep import grids
from mupax.train.studies.sweep.grids import Planned, power
from mupax.zoo.configs import ConfigError

if TYPE_CHECKING:
    from mupax.train.config.run import Config
    from mupax.train.studies.sweep.rows import Row
    from mupax.train.studies.transfer.drift import Analysis
    from mupax.train.studies.transfer.study import Measured

MOST_POINTS = 2000


def answers(studies: Sequence[tuple[Measured, Analysis]], loss: str, *, grown: bool) -> list[str]:
    """Return a line per setting: its best learning rate, or where sizes grew whether to keep it.

    Args:
        studies: every setting of the sweep as a study of its sizes.
        loss: the loss that is judged, "training" or "evaluation".
        grown: whether the sweep has several sizes.
    """
    lines: list[str] = []
    for measured, analysis in studies:
        name = f"With {measured.study.label}: " if len(studies) > 1 else ""
        lines_of_sizes = [
            _best_rate(measured, analysis, index, loss, grown=grown)
            for index in range(len(analysis.sizes))
        ]
        if not grown:
            lines.append(f"{name}{lines_of_sizes[0]}")
            continue
        from mupax.train.studies.transfer.conclusion import conclusion

        lines.append(f"{name}{conclusion(measured, analysis)}")
        lines += [f"  {line}" for line in lines_of_sizes]
    return lines


def _best_rate(
    measured: Measured, analysis: Analysis, index: int, loss: str, *, grown: bool
) -> str:
    """Return the best rate of one size with its interval, or why it has none and which rates to add."""
    fitted = analysis.fits[index]
    where = f" at {measured.study.axis} {analysis.sizes[index]}" if grown else ""
    if fitted.trouble:
        return f"No best learning rate{where} by {loss} loss: {fitted.why}."
    half = analysis.optima[index].half_width
    rate = f"{power(2.0**fitted.optimum)} = {2.0**fitted.optimum:.3g}"
    accuracy = (
        f"known to ± {half:.2f} octaves" if math.isfinite(half) else "one seed, so no interval"
    )
    return f"Best learning rate{where}: {rate} ({accuracy}), {loss} loss there {fitted.loss:.4f}."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """Many runs that differ in learning rate, seed, constants or size, as one command.

    Points that differ in numbers alone (rate, decay, warm-up, seed, constants of the preset) are trained with one
    compilation; a size compiles once. Every point sees the same batches in the same order. The same command goes on where it
    was stopped. What is not listed here is a flag of the recipe (`mupax train RECIPE --help`) and holds for every point.
    """

    recipe: Annotated[conf.Positional[str], conf.arg(metavar="RECIPE|FILE")]
    """A recipe of `mupax train --help`, or a config file; `--config FILE` says the same."""
    lr: Annotated[str | None, conf.arg(metavar="GRID")] = None
    """Peak rates: 2^-12:2^-4:9, or numbers with commas; the recipe's unless given."""
    seeds: Annotated[int, conf.arg(metavar="N")] = 1
    """Initializations per point."""
    sizes: Annotated[str | None, conf.arg(metavar="AXIS=N,...")] = None
    """Models: width=64,128,256, head_dim=, heads=, depth= or mlp=."""
    vary: Annotated[Repeated, conf.arg(metavar="FLAG=GRID")] = ()
    """Any other flag of the recipe with its values, as preset.gamma0=0.5,1,2."""
    how: Literal["auto", "together", "in-turn"] = "auto"
    """All points of a shape at once, one after another, or what a trial shows to be faster, on a CPU some side by side."""
    no_eval: Switch = False
    """Do not evaluate after the last step."""
    judge: Literal["training", "evaluation"] = "training"
    """The loss that is least at the best rate: of training, over the last tenth of the steps, or where examples repeat of evaluation."""
    out: Annotated[str | None, conf.arg(metavar="FOLDER")] = None
    """Where rows and the summary go; runs/sweep-RECIPE unless given."""
    json: Annotated[str | None, conf.arg(metavar="PATH")] = None
    """Write all rows and what they were made of; FOLDER/sweep.json unless given."""
    save_tuned: Annotated[str | None, conf.arg(metavar="NAME")] = None
    """Save the smallest size's best rate as the tuned preset PRESET:NAME."""
    dry_run: Switch = False
    """List the points and their programs; train nothing."""

    def __post_init__(self) -> None:
        at_least("--", self, 1, "seeds")
        if self.no_eval and self.judge == "evaluation":
            raise command_line.UsageError(
                "--judge evaluation needs what --no-eval leaves out; write one of them"
            )


def main(argv: Sequence[str]) -> int:
    """Sweeps: 0 when every point has its row, 1 when `--save-tuned` has no best rate to save, 128 + its number stopped by a signal.

    Raises:
        UsageError, ConfigError, PresetError: what does not fit, or more points than anyone means.
    """
    args, rest = command_line.parse_known(Sweep, "mupax sweep", cli.with_file_first(argv))
    grid = points(args, rest)
    if args.save_tuned:
        from mupax.train.studies.transfer import tuned

        tuned.check_before_training(args.save_tuned, grid[0].config)
        if len({point.varied for point in grid}) > 1:
            raise ConfigError(
                f"--save-tuned {args.save_tuned}: the sweep varied more than rate, seed and size; sweep one choice"
            )
    if args.dry_run:
        _dry_run(grid)
        return 0
    note_warmup(grid[0].config.steps, grid[0].config.scaled_optimizer.warmup_steps)
    return _run(args, grid, shlex.join(["mupax", "sweep", *argv]))


def points(args: Sweep, rest: Sequence[str]) -> list[Planned]:
    """Every point; raises as `main`.

    Args:
        args: the sweep's flags.
        rest: flags of a run, for every point.
    """
    recipe = cli.recipe_of_points(args.recipe)
    if "--workdir" in rest or "--resume" in rest:
        raise ConfigError(
            "a sweep has --out in place of --workdir, and goes on by itself without --resume"
        )
    axis, grown = sizes.parse(args.sizes) if args.sizes else ("", (0,))
    grid: list[Planned] = []
    for choices in itertools.product(*map(_varied, args.vary)):
        words = [word for flag, value in choices for word in (f"--{flag}", value)]
        config = cli.parse(args.recipe, recipe, [*rest, *words], command_line.flags(Sweep)).config
        config = dataclasses.replace(config, workdir=None)
        label = " ".join(f"{flag.partition('.')[2] or flag} {value}" for flag, value in choices)
        rates = grids.parse(args.lr) if args.lr else (config.optimizer.peak_lr,)
        if min(rates) <= 0:
            raise ConfigError(
                f"--lr {args.lr}: {min(rates):g} trains nothing; write learning rates above 0"
            )
        for size, lr, seed in itertools.product(grown, rates, range(args.seeds)):
            model = sizes.grown(config.model, axis, size) if axis else config.model
            point = grids.point(dataclasses.replace(config, model=model), lr, config.seed + seed)
            grid.append(
                Planned(size, label, f"{axis} {size} {label}".strip() if axis else label, point)
            )
        if len(grid) > MOST_POINTS:
            raise ConfigError(f"these are more than {MOST_POINTS} points; write a coarser grid")
    return grid


def _varied(text: str) -> list[tuple[str, str]]:
    """The flag with each of its values."""
    flag, equals, values = (part.strip() for part in text.lstrip("-").partition("="))
    if not (flag and equals and values):
        raise ConfigError(f"--vary {text!r}: write FLAG=VALUE,VALUE, as preset.gamma0=0.5,1,2")
    if ":" in values:
        return [(flag, f"{value:.10g}") for value in grids.parse(values)]
    return [(flag, value.strip()) for value in values.split(",")]


def _dry_run(grid: Sequence[Planned]) -> None:
    from mupax.train.studies.sweep.sweep import grouped

    groups = grouped([point.config for point in grid], {}).values()
    terminal.say(f"{len(grid)} points in {len(groups)} program{'s' * (len(groups) > 1)}")
    for group in groups:
        labels, configs = (
            dict.fromkeys(grid[i].label for i, _ in group),
            [grid[i].config for i, _ in group],
        )
        rates, seeds = (
            sorted({c.optimizer.peak_lr for c in configs}),
            sorted({c.seed for c in configs}),
        )
        terminal.say(
            f"  {', '.join(filter(None, labels)) or configs[0].recipe}: {len(group)} points, "
            f"rates {' '.join(map(grids.power, rates))}, seeds {' '.join(map(str, seeds))}, "
            f"{group[0][1].definition.count():,} parameters, {configs[0].steps} steps"
        )


def _run(args: Sweep, grid: Sequence[Planned], command: str) -> int:
    from mupax.train.studies import report
    from mupax.train.studies.sweep import sweep
    from mupax.train.studies.sweep.table import LiveTable

    folder = Path(args.out or f"runs/sweep-{cli.name_of(args.recipe)}")
    configs = [point.config for point in grid]
    with sweep.engine(folder, args.how, evaluated=not args.no_eval) as engine:
        table = LiveTable(
            terminal.console(), [point.label for point in grid], evaluated=not args.no_eval
        )
        with table:
            rows = engine.run(configs, table)
    varies_rate = len({config.optimizer.peak_lr for config in configs}) > 1
    studies: list[tuple[Measured, Analysis]] = []
    if varies_rate or args.save_tuned:
        losses = [row.loss if args.judge == "training" else row.final_loss for row in rows]
        judged_rows = [
            dataclasses.replace(row, loss=loss) for row, loss in zip(rows, losses, strict=True)
        ]
        studies = judged(grid, judged_rows, (args.sizes or "").partition("=")[0].strip())
    answered = (
        answers(studies, args.judge, grown=len(studies[0][1].sizes) > 1) if varies_rate else []
    )
    best = min(range(len(rows)), key=lambda index: table.value(rows[index]))
    sentence = (
        f"Next: train the point of the lowest {table.metric}, {table.value(rows[best]):.4f}, alone"
    )
    report.Report(answered, [report.Step(sentence, rows[best].command or grid[best].label)]).show()
    table.show()
    points = [
        {
            "what": p.label,
            "peak_lr": p.config.optimizer.peak_lr,
            "seed": p.config.seed,
            **row.to_json(),
        }
        for p, row in zip(grid, rows, strict=True)
    ]
    path = report.write_json(
        args.json or folder / "sweep.json", {"command": command, "points": points}
    )
    terminal.say(f"rows in {path}")
    if studies:
        _study(args, grid[0].config, studies, folder, command)
    return 0


def _study(
    args: Sweep,
    config: Config,
    studies: Sequence[tuple[Measured, Analysis]],
    folder: Path,
    command: str,
) -> None:
    """Draw the picture of loss against rate, and save the tuned preset."""
    from mupax.train.studies.transfer import figure, tuned

    title = (
        f"{args.recipe}, {config.optimizer.name}, {config.steps} steps: loss against learning rate"
    )
    figure.draw(folder / "sweep.png", studies, title, figure.LOSSES[args.judge])
    terminal.say(f"picture in {folder / 'sweep.png'}")
    if args.save_tuned:
        path, word = tuned.save(
            args.save_tuned, studies[0][0].study.label, studies, command, args.judge
        )
        terminal.say(tuned.saved_message(path, word))


def judged(
    points: Sequence[Planned], rows: Sequence[Row], axis: str
) -> list[tuple[Measured, Analysis]]:
    """Every combination of what was varied beside rate, seed and size, as a study of its sizes.

    Args:
        points: of the sweep.
        rows: theirs.
        axis: what grew; "" where nothing did.
    """
    from mupax.train.studies.transfer.drift import analyse
    from mupax.train.studies.transfer.fit import STEP
    from mupax.train.studies.transfer.study import Measured, Study

    studies = []
    for varied in dict.fromkeys(point.varied for point in points):
        own = [
            (point, row) for point, row in zip(points, rows, strict=True) if point.varied == varied
        ]
        sizes = sorted({point.size for point, _ in own})
        first = min(point.config.seed for point, _ in own)
        configs = {point.size: point.config for point, _ in reversed(own)}
        measured = {
            (
                sizes.index(point.size),
                math.log2(point.config.optimizer.peak_lr) / STEP,
                point.config.seed - first,
            ): row
            for point, row in own
        }
        label = f"{own[0][0].config.preset.name} {varied}".strip()
        widths = tuple(size or configs[size].model.sizes()["embed"] for size in sizes)
        study = Study(
            label=label,
            axis=axis or "width",
            sizes=widths,
            configs=tuple(configs[size] for size in sizes),
        )
        whole = Measured(study, 1 + max(seed for _, _, seed in measured), measured)
        studies.append((whole, analyse(study.sizes, whole.curves)))
    return studies
