"""Command `mupax sweep RECIPE`: train many runs that differ in rate, seed, constants or size.

A sweep ends with the best learning rate, its uncertainty, and the command to type next.
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
from mupax.terminal import counted
from mupax.train.config import cli, joint, sizes
from mupax.train.config.checks import at_least, check_outputs, note_warmup
from mupax.train.studies.sweep import grids
from mupax.train.studies.sweep.grids import Planned, power
from mupax.zoo.configs import ConfigError

if TYPE_CHECKING:
    from mupax.train.config.run import Config
    from mupax.train.studies.report import Step
    from mupax.train.studies.sweep.rows import Row
    from mupax.train.studies.sweep.table import LiveTable
    from mupax.train.studies.transfer.drift import Analysis
    from mupax.train.studies.transfer.study import Measured

MOST_POINTS = 2000
"""Number of points above which a grid is taken for a mistake."""
LEAST_RATES = 3
"""Least number of learning rates of which one can have a rate with a higher loss on each side."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """Train many runs that differ in learning rate, seed, constants or size, as one command.

    Points that differ in numbers alone (rate, decay, warm-up, seed, constants of the preset) are
    trained with one compilation; a size compiles once. Every point sees the same batches in the
    same order. The same command goes on where it was stopped. What is not listed here is a flag of
    the recipe (`mupax train RECIPE --help`) and holds for every point.
    """

    recipe: Annotated[conf.Positional[str], conf.arg(metavar="RECIPE|FILE")]
    """A recipe of `mupax train --help`, or a config file; `--config FILE` says the same."""
    lr: Annotated[str | None, conf.arg(metavar="GRID")] = None
    """Peak learning rates: 2^-12:2^-4:9, or numbers with commas; the recipe's unless given."""
    seeds: Annotated[int, conf.arg(metavar="N")] = 1
    """Number of initializations per point."""
    sizes: Annotated[str | None, conf.arg(metavar="AXIS=N,...")] = None
    """Models: width=64,128,256, head_dim=, heads=, depth= or mlp=."""
    vary: Annotated[Repeated, conf.arg(metavar="FLAG=GRID")] = ()
    """Any other flag of the recipe with its values, as preset.gamma0=0.5,1,2."""
    how: Literal["auto", "together", "in-turn"] = "auto"
    """together: all points of a shape at once. in-turn: one after another. auto: together, but on a
    CPU what a trial shows to be faster, which may be several points side by side."""
    no_eval: Switch = False
    """Do not evaluate after the last step."""
    judge: Literal["training", "evaluation"] = "training"
    """Loss that the best rate makes lowest. training: mean over the last tenth of the steps.
    evaluation: after the last step, for runs whose examples repeat."""
    out: Annotated[str | None, conf.arg(metavar="FOLDER")] = None
    """Folder for rows and summary; runs/sweep-RECIPE unless given."""
    json: Annotated[str | None, conf.arg(metavar="PATH")] = None
    """File for the command and all rows; FOLDER/sweep.json unless given."""
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
    """Run `mupax sweep`: train the points, print the answer, and write rows and summary. Return 0.

    With `--dry-run` the points are only listed.

    Raises:
        UsageError, ConfigError, PresetError: Flags do not fit together, or the grid has more than
            `MOST_POINTS` points.
        NoMinimum: Every point is trained, but `--save-tuned` has no best rate to save.
        SystemExit: A signal stopped the sweep. The code is 128 plus its number.
    """
    # Words that are no flags of a sweep are flags of the recipe.
    args, rest = command_line.parse_known(Sweep, "mupax sweep", cli.with_file_first(argv))
    grid = points(args, rest)
    if args.save_tuned:
        # A wrong name should not be noticed after hours of training.
        from mupax.train.studies.transfer import tuned

        tuned.check_before_training(args.save_tuned, grid[0].config)
        # A tuned preset has one value of every constant.
        if len({point.varied for point in grid}) > 1:
            raise ConfigError(
                f"--save-tuned {args.save_tuned}: the sweep varied more than rate, seed and size; "
                "sweep one choice"
            )
        count = len(_rates_of_a_choice(grid))
        if count < LEAST_RATES:
            raise ConfigError(
                f"--save-tuned {args.save_tuned}: a best rate lies between others, and the sweep "
                f"has {count}; write --lr with at least {LEAST_RATES} rates, as 2^-8:2^-4:5"
            )
    note = joint.rates_note(point.config for point in grid)
    if note:
        # First, because every line and table from here on has these rates.
        terminal.say(note)
    if args.dry_run:
        _dry_run(grid)
        return 0
    config = grid[0].config
    note_warmup(config.steps, config.scaled_optimizer.warmup_steps)
    _run(args, grid, shlex.join(["mupax", "sweep", *argv]))
    return 0


def points(args: Sweep, rest: Sequence[str]) -> list[Planned]:
    """Return every point of a sweep: all combinations of `--vary`, sizes, rates and seeds.

    The order is that of nested loops, with the seeds innermost.

    Args:
        rest: Further words of the command line, flags of the recipe for every point.

    Raises:
        ConfigError, PresetError: A value does not fit, there are more than `MOST_POINTS` points, or
            `rest` has `--workdir` or `--resume`.
        UsageError: A flag is unknown, or one that says what to do with a single run.
    """
    recipe = cli.recipe_of_points(args.recipe)
    if "--workdir" in rest or "--resume" in rest:
        raise ConfigError(
            "a sweep has --out in place of --workdir, and goes on by itself without --resume"
        )
    axis = ""
    axis_sizes: tuple[int, ...] = (0,)
    if args.sizes:
        axis, axis_sizes = sizes.parse(args.sizes)

    grid: list[Planned] = []
    varied_flags = [_flag_values(text) for text in args.vary]
    if args.lr:
        _refuse_second_rate(rest, args.vary)
    for choice in itertools.product(*varied_flags):
        words = list(rest)
        labels = []
        for flag, value in choice:
            words += [f"--{flag}", value]
            # The section is left out: "gamma0 0.5" for preset.gamma0.
            labels.append(f"{flag.partition('.')[2] or flag} {value}")
        varied = " ".join(labels)
        parsed = cli.parse(args.recipe, recipe, words, command_line.flags(Sweep))
        cli.refuse_session_flags("mupax sweep", parsed)
        # A recipe may have a workdir, and all points would share it.
        config = dataclasses.replace(parsed.config, workdir=None)

        rates = grids.parse(args.lr) if args.lr else (config.optimizer.peak_lr,)
        if min(rates) <= 0:
            raise ConfigError(
                f"--lr {args.lr}: {min(rates):g} trains nothing; write learning rates above 0"
            )
        for size, rate, seed in itertools.product(axis_sizes, rates, range(args.seeds)):
            model = config.model
            label = varied
            if axis:
                model = sizes.grown(model, axis, size)
                label = f"{axis} {size} {varied}".strip()
            run = dataclasses.replace(config, model=model)
            grid.append(Planned(size, varied, label, grids.point(run, rate, config.seed + seed)))
        # Within the loop, so that a mistake in a grid ends before millions of configs are made.
        if len(grid) > MOST_POINTS:
            raise ConfigError(f"these are more than {MOST_POINTS} points; write a coarser grid")
    return grid


def _refuse_second_rate(words: Sequence[str], varied: Sequence[str]) -> None:
    """Raise ConfigError if a flag or a `--vary` sets the peak rate that `--lr` sets for each point.

    Args:
        words: Words of the command line that are no flags of a sweep.
    """
    for text in (*words, *varied):
        name = text.lstrip("-").partition("=")[0].strip().replace("_", "-")
        if name == "optimizer.peak-lr":
            raise ConfigError(
                "--lr and optimizer.peak-lr both say the learning rate of a point; "
                "write one of them"
            )


def _rates_of_a_choice(grid: Sequence[Planned]) -> set[float]:
    """Return the learning rates of the first choice of `--vary`, of which the best one is found.

    Rates that are themselves a choice, as by `--vary optimizer.peak-lr=0.01,0.02`, are not compared.
    """
    first = grid[0].varied
    return {point.config.optimizer.peak_lr for point in grid if point.varied == first}


def _flag_values(text: str) -> list[tuple[str, str]]:
    """Return (flag, value) for each value of a `--vary` text such as `preset.gamma0=0.5,1,2`.

    The flag has no leading dashes. Values with a colon are a grid (`grids.parse`).

    Raises:
        ConfigError: `text` is not FLAG=VALUES, or values with a colon are not a valid grid.
    """
    flag, equals, values = (part.strip() for part in text.lstrip("-").partition("="))
    if not (flag and equals and values):
        raise ConfigError(f"--vary {text!r}: write FLAG=VALUE,VALUE, as preset.gamma0=0.5,1,2")
    # Other values than grids may be words, as in optimizer.name=adam,muon.
    if ":" in values:
        return [(flag, f"{value:.10g}") for value in grids.parse(values)]
    return [(flag, value.strip()) for value in values.split(",")]


def _dry_run(grid: Sequence[Planned]) -> None:
    """Print the points, learning rates, seeds, parameters and steps of each program to compile."""
    from mupax.train.studies.sweep.sweep import grouped

    groups = grouped([point.config for point in grid], {})
    terminal.say(f"{counted(len(grid), 'point')} in {counted(len(groups), 'program')}")
    for group in groups.values():
        labels: dict[str, None] = {}
        rates = set()
        seeds = set()
        for index, _ in group:
            point = grid[index]
            if point.label:
                labels[point.label] = None
            rates.add(point.config.optimizer.peak_lr)
            seeds.add(point.config.seed)
        first_index, program = group[0]
        first = grid[first_index].config
        terminal.say(
            f"  {', '.join(labels) or first.recipe}: {counted(len(group), 'point')}, "
            f"rates {' '.join(map(power, sorted(rates)))}, "
            f"seeds {' '.join(map(str, sorted(seeds)))}, "
            f"{counted(program.definition.count(), 'parameter', ',')}, "
            f"{counted(first.steps, 'step')}"
        )


def _run(args: Sweep, grid: Sequence[Planned], command: str) -> None:
    """Train the points, print a command to type next and a table of losses, and write sweep.json.

    If the learning rate varies, the best one is printed first and sweep.png is drawn.
    `--save-tuned` draws sweep.png and writes a tuned preset.

    Args:
        command: Command as it was typed, for the record.

    Raises:
        NoMinimum: `--save-tuned` has no best rate to save. All other files are written.
    """
    from mupax.train.studies import report
    from mupax.train.studies.sweep import sweep
    from mupax.train.studies.sweep.table import LiveTable

    check_outputs(args, "json")
    folder = Path(args.out or f"runs/sweep-{cli.name_of(args.recipe)}")
    evaluated = not args.no_eval
    with sweep.engine(folder, args.how, evaluated=evaluated) as engine:
        labels = [point.label for point in grid]
        table = LiveTable(terminal.console(), labels, evaluated=evaluated)
        with table:
            rows = engine.run([point.config for point in grid], table)

    answer_lines: list[str] = []
    studies: list[tuple[Measured, Analysis]] = []
    varies_rate = len(_rates_of_a_choice(grid)) > 1
    if varies_rate or args.save_tuned:
        axis = (args.sizes or "").partition("=")[0].strip()
        studies = judged(grid, _rows_by_loss(rows, args.judge), axis)
    if varies_rate:
        has_sizes = len(studies[0][1].sizes) > 1
        answer_lines = answers(studies, args.judge, grown=has_sizes)
    report.Report(answer_lines, [_next_step(grid, rows, table)]).show()
    table.show()

    content = {"command": command, "points": _points_json(grid, rows)}
    path = report.write_json(args.json or folder / "sweep.json", content)
    terminal.say(f"rows in {path}")
    if studies:
        _write_studies(args, [point.config for point in grid], studies, folder, command)


def _rows_by_loss(rows: Sequence[Row], judge: str) -> list[Row]:
    """Return rows whose field `loss` is the loss to judge by.

    Args:
        judge: "training" to return the rows unchanged, or "evaluation" to replace `loss` by the
            evaluation loss. A row without an evaluation loss keeps its training loss.
    """
    if judge == "training":
        return list(rows)
    return [dataclasses.replace(row, loss=row.final_loss) for row in rows]


def _next_step(grid: Sequence[Planned], rows: Sequence[Row], table: LiveTable) -> Step:
    """Return the report's next step: the command that trains the point of the lowest loss alone.

    The loss is the one that `table` shows. If the point has no command, its label is shown. If
    every point diverged, the step is to sweep smaller rates.
    """
    from mupax.train.studies.report import Step

    # `table.value` is the loss that the table shows, so this step names the table's best point.
    losses = [table.value(row) for row in rows]
    lowest = min(losses)
    if not math.isfinite(lowest):
        return Step("Next: sweep smaller learning rates, because every point diverged")
    best = losses.index(lowest)
    sentence = f"Next: train the point of the lowest {table.metric}, {lowest:.4f}, alone"
    return Step(sentence, rows[best].command or grid[best].label)


def _points_json(grid: Sequence[Planned], rows: Sequence[Row]) -> list[dict[str, object]]:
    """Return label, peak rate, seed and all fields of the row of each point, for sweep.json."""
    content = []
    for point, row in zip(grid, rows, strict=True):
        fields = {
            "what": point.label,
            "peak_lr": point.config.optimizer.peak_lr,
            "seed": point.config.seed,
        }
        content.append({**fields, **row.to_json()})
    return content


def _write_studies(
    args: Sweep,
    configs: Sequence[Config],
    studies: Sequence[tuple[Measured, Analysis]],
    folder: Path,
    command: str,
) -> None:
    """Draw the loss against the learning rate in sweep.png, and save the preset of `--save-tuned`.

    Args:
        command: Command as it was typed, for the record.

    Raises:
        NoMinimum: `--save-tuned` has no best rate to save. The picture is written.
    """
    from mupax.train.studies.transfer import figure, tuned

    picture = folder / "sweep.png"
    title = picture_title(args.recipe, configs)
    figure.draw(picture, studies, title, figure.LOSSES[args.judge])
    terminal.say(f"picture in {picture}")
    if args.save_tuned:
        label = studies[0][0].study.label
        path, word = tuned.save(args.save_tuned, label, studies, command, args.judge)
        terminal.say(tuned.saved_message(path, word))


def picture_title(recipe: str, configs: Sequence[Config]) -> str:
    """Return the title of a sweep's picture: recipe, optimizer and number of steps.

    The optimizer or the steps are left out if the points differ in them.
    """
    parts = [recipe]
    optimizers = {config.optimizer.name for config in configs}
    if len(optimizers) == 1:
        parts += optimizers
    lengths = {config.steps for config in configs}
    if len(lengths) == 1:
        parts.append(counted(configs[0].steps, "step"))
    return f"{', '.join(parts)}: loss against learning rate"


def answers(studies: Sequence[tuple[Measured, Analysis]], loss: str, *, grown: bool) -> list[str]:
    """Return the lines that answer a sweep: the best learning rate for every choice of `--vary`.

    If sizes grew, the first line of each choice says whether to keep the learning rate as the size
    grows, and a line per size follows.

    Args:
        studies: Study of each choice of `--vary`, with its analysis, from `judged`.
        loss: Loss that is judged, "training" or "evaluation".
        grown: True if the sweep has at least 2 sizes.
    """
    lines: list[str] = []
    for measured, analysis in studies:
        name = f"With {measured.study.label}: " if len(studies) > 1 else ""
        size_lines = []
        for index in range(len(analysis.sizes)):
            size_lines.append(_best_rate(measured, analysis, index, loss, grown=grown))
        if not grown:
            lines.append(f"{name}{size_lines[0]}")
            continue

        from mupax.train.studies.transfer.conclusion import conclusion

        lines.append(f"{name}{conclusion(measured, analysis)}")
        lines += [f"  {line}" for line in size_lines]
    return lines


def _best_rate(
    measured: Measured, analysis: Analysis, index: int, loss: str, *, grown: bool
) -> str:
    """Return a sentence with the best learning rate of one size, its interval and the loss there.

    Without a best rate the sentence says why, and which rates to add.

    Args:
        index: Index of the size in `analysis.sizes`.
        loss: Loss that is judged, "training" or "evaluation".
        grown: True to name the size in the sentence.
    """
    fitted = analysis.fits[index]
    size = f" at {measured.study.axis} {analysis.sizes[index]}" if grown else ""
    if fitted.trouble:
        return f"No best learning rate{size} by {loss} loss: {fitted.why}."
    rate = 2.0**fitted.optimum
    half_width = analysis.optima[index].half_width
    accuracy = "one seed, so no interval"
    if math.isfinite(half_width):
        accuracy = f"known to ± {half_width:.2f} octaves"
    return (
        f"Best learning rate{size}: 2^{fitted.optimum:.2f} = {rate:.3g} ({accuracy}), "
        f"{loss} loss there {fitted.loss:.4f}."
    )


def judged(
    points: Sequence[Planned], rows: Sequence[Row], axis: str
) -> list[tuple[Measured, Analysis]]:
    """Fit the best learning rate of every size, for each choice of `--vary` as a study of its own.

    Args:
        rows: Row of each point, in the same order. Their field `loss` is judged.
        axis: Size that grew, one of `mupax.train.config.sizes.AXES`, or "" without one.
    """
    from mupax.train.studies.transfer.drift import analyse

    studies = []
    for varied in dict.fromkeys(point.varied for point in points):
        study_points = []
        study_rows = []
        for point, row in zip(points, rows, strict=True):
            if point.varied == varied:
                study_points.append(point)
                study_rows.append(row)
        measured = _measured(study_points, study_rows, axis)
        studies.append((measured, analyse(measured.study.sizes, measured.curves)))
    return studies


def _measured(points: Sequence[Planned], rows: Sequence[Row], axis: str) -> Measured:
    """Return points as a finished study, whose best learning rates can then be fitted.

    The points differ only in size, rate and seed. If no size grows, the study's axis is the width,
    with the model's width as its only size.
    """
    from mupax.train.studies.transfer.fit import STEP
    from mupax.train.studies.transfer.study import Measured, Study

    study_sizes = sorted({point.size for point in points})
    # A study counts its seeds from 0.
    first_seed = min(point.config.seed for point in points)
    configs: dict[int, Config] = {}
    rows_by_point = {}
    most_seeds = 0
    for point, row in zip(points, rows, strict=True):
        configs.setdefault(point.size, point.config)
        # Not rounded, because the rates of a sweep need not be half octaves apart.
        rate = math.log2(point.config.optimizer.peak_lr) / STEP
        seed = point.config.seed - first_seed
        rows_by_point[study_sizes.index(point.size), rate, seed] = row
        most_seeds = max(most_seeds, seed + 1)

    widths = []
    size_configs = []
    for size in study_sizes:
        config = configs[size]
        # Without a size that grows, the study has the model's width.
        widths.append(size or config.model.sizes()["embed"])
        size_configs.append(config)
    study = Study(
        label=f"{points[0].config.preset.name} {points[0].varied}".strip(),
        axis=axis or "width",
        sizes=tuple(widths),
        configs=tuple(size_configs),
    )
    return Measured(study, most_seeds, rows_by_point)
