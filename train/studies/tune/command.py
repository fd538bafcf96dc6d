"""`mupax tune RECIPE --over lr,readout.lr,...`: search many constants of a run together.

`over.py` reads the constants, `search.py` chooses the points and `report.py` shows the result.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro import conf

from mupax import command_line, extras, terminal
from mupax.command_line import Repeated, Switch
from mupax.terminal import counted
from mupax.train.config import cli, joint
from mupax.train.config.checks import at_least, check_outputs, note_warmup
from mupax.train.config.run import Config
from mupax.zoo.configs import ConfigError

if TYPE_CHECKING:
    from mupax.train.studies.tune.over import Constant
    from mupax.train.studies.tune.search import Limits

MAX_POINTS = 1000
"""Most points of a search."""
MAX_SEEDS = 100
"""Greatest number of seeds of a point.

Seeds from 100 on are used for the comparison of the best point with the unchanged run at the end.
"""
STRUCTURAL = ("b1", "b2", "momentum", "clip_norm")
"""Fields of the optimizer that are constants of the program: each value is compiled anew."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tune:
    """Search many constants of a run together for the lowest loss.

    A model of the losses so far chooses points in rounds. All points train to their end on the same
    batches, usually with one compilation. A point gets further seeds until another point is better
    by more than seeds explain. The best point then meets the run as it stands on fresh seeds.
    Constants per parameter group are factors at the preset's base: tune there, on the small model,
    and give the tuned preset to the large one.

    FOLDER gets points.jsonl, tune.json and tune.png; the same command goes on where it was stopped.
    What is not listed here is a flag of the recipe (`mupax train RECIPE --help`) and holds for
    every point.
    """

    recipe: Annotated[conf.Positional[str], conf.arg(metavar="RECIPE|FILE")]
    """A recipe of `mupax train --help`, or a config file; `--config FILE` says the same."""
    over: Annotated[Repeated, conf.arg(metavar="NAME,NAME=LOW:HIGH,...")]
    """Constants to search: lr, weight_decay, GROUP.lr, GROUP.std, GROUP.multiplier, GROUP.decay,
    attention.multiplier, gamma0, ..."""
    points: Annotated[int, conf.arg(metavar="N")] = 64
    """Number of points to try. The first is the run as it stands."""
    batch: Annotated[int, conf.arg(metavar="N")] = 8
    """Number of new points in a round."""
    seeds: Annotated[int, conf.arg(metavar="N")] = 3
    """Number of initializations of a point that is never dropped."""
    confirm: Annotated[int, conf.arg(metavar="N")] = 5
    """Number of fresh initializations on which the best point meets the start; 0 leaves this
    comparison out."""
    minutes: Annotated[float, conf.arg(metavar="M")] = 45.0
    """Most minutes of training, all points together."""
    how: Literal["auto", "together", "in-turn"] = "auto"
    """Training of points together or one after another, as in `mupax sweep`."""
    no_eval: Switch = False
    """Minimize the training loss, mean over the last tenth of the steps, and not the evaluation
    loss."""
    out: Annotated[str | None, conf.arg(metavar="FOLDER")] = None
    """Folder for all files; runs/tune-RECIPE unless given."""
    json: Annotated[str | None, conf.arg(metavar="PATH")] = None
    """File for the record of the search; FOLDER/tune.json unless given."""
    save_tuned: Annotated[str | None, conf.arg(metavar="NAME")] = None
    """Save the best point as the tuned preset PRESET:NAME."""
    dry_run: Switch = False
    """List constants, ranges and cost; train nothing."""

    def __post_init__(self) -> None:
        at_least("--", self, 1, "batch", "seeds")
        at_least("--", self, 3, "points")
        at_least("--", self, 0, "confirm")
        if self.confirm == 1:
            raise ConfigError("--confirm 1: one seed has no interval; write 0, or at least 2")
        if self.points > MAX_POINTS or self.seeds > MAX_SEEDS:
            raise ConfigError(
                f"--points {self.points}, --seeds {self.seeds}: "
                f"write at most {MAX_POINTS} points and {MAX_SEEDS} seeds"
            )
        if not self.minutes > 0:
            raise ConfigError(f"--minutes is {self.minutes}; write a number above 0")

    @property
    def limits(self) -> Limits:
        """Limits of the search, from the flags."""
        from mupax.train.studies.tune.search import Limits

        return Limits(
            points=self.points,
            batch=self.batch,
            seeds=self.seeds,
            confirm=self.confirm,
            minutes=self.minutes,
        )


def main(argv: Sequence[str]) -> int:
    """Run `mupax tune`: search, print the result, and write record and picture. Return 0.

    With `--dry-run` constants, ranges and cost are only listed.

    Args:
        argv: Words of the command line after `mupax tune`.

    Raises:
        UsageError: A flag is unknown or has a wrong value. Nothing is trained.
        ConfigError: A constant, a range or the run is wrong. Nothing is trained.
        PresetError: The preset does not take a constant. Nothing is trained.
        NoMinimum: The search is done, but `--save-tuned` has no point to save.
        SystemExit: A signal stopped the training. The code is 128 plus its number.
    """
    from mupax.train.studies.sweep import sweep
    from mupax.train.studies.tune import over

    args, recipe_flags = command_line.parse_known(Tune, "mupax tune", cli.with_file_first(argv))
    # After the words are parsed, so that `--help` works without the extra.
    extras.require("tune", "mupax tune")
    if "--workdir" in recipe_flags or "--resume" in recipe_flags:
        raise ConfigError(
            "a search has --out in place of --workdir, and goes on by itself without --resume"
        )

    recipe = cli.recipe_of_points(args.recipe)
    parsed = cli.parse(args.recipe, recipe, recipe_flags, command_line.flags(Tune))
    cli.refuse_session_flags("mupax tune", parsed)
    # A recipe may have a workdir, and all points would share it.
    config = dataclasses.replace(parsed.config, workdir=None)
    constants = over.parse(_words(args.over), config)
    if args.save_tuned:
        from mupax.train.studies.transfer import tuned

        tuned.check_before_training(args.save_tuned, config)

    note = joint.rates_note([config])
    if note:
        terminal.say(note)
    if args.dry_run:
        # Called for its errors alone: a run that no search can train is refused.
        sweep.grouped([config], {})
        _dry_run(args, config, constants)
        return 0

    note_warmup(config.steps, config.scaled_optimizer.warmup_steps)
    return _run(args, config, constants, shlex.join(["mupax", "tune", *argv]))


def _words(texts: Sequence[str]) -> list[str]:
    """Return the comma-separated words of all `--over` texts, stripped and without empty ones."""
    words = []
    for text in texts:
        # Several `--over` act like one with commas. Empty words, as after a last comma, are
        # dropped.
        for word in text.split(","):
            if word.strip():
                words.append(word.strip())
    return words


def _dry_run(args: Tune, config: Config, constants: Sequence[Constant]) -> None:
    """Print the constants with their ranges, and the cost of the search."""
    rows = [["constant", "flag", "from", "to", "start"]]
    for constant in constants:
        rows.append([constant.word, f"--{constant.flag}", *constant.cells()])
    print(terminal.table(rows))
    terminal.say(
        f"{counted(args.points, 'point')} of "
        f"{counted(config.steps, 'step')}, {args.batch} at once, "
        f"1 to {counted(args.seeds, 'seed')} each, then {args.confirm} fresh seeds of the best and "
        f"of the start; at most {args.minutes:g} minutes of training"
    )

    structural = []
    for constant in constants:
        _, _, field = constant.flag.partition(".")
        if field in STRUCTURAL:
            structural.append(constant.word)
    if structural:
        terminal.say(f"note: every value of {', '.join(structural)} compiles a program of its own")


def _run(args: Tune, config: Config, constants: tuple[Constant, ...], command: str) -> int:
    """Search, write the record and the picture, and print the result. Return 0.

    `--save-tuned` also writes a tuned preset.

    Args:
        command: Command line of this search, for the record.

    Raises:
        NoMinimum: `--save-tuned` has no point to save. All other files are written.
    """
    from mupax.train.studies.report import write_json
    from mupax.train.studies.sweep import sweep
    from mupax.train.studies.tune import report
    from mupax.train.studies.tune.search import Search, measure

    check_outputs(args, "json")
    folder = Path(args.out or f"runs/tune-{cli.name_of(args.recipe)}")
    search = Search(config, constants, args.limits)
    table = report.SearchTable(terminal.console(), search, evaluated=not args.no_eval)
    # The table closes before the engine, whose message on a signal then stands below it.
    with sweep.engine(folder, args.how, evaluated=not args.no_eval) as engine, table:
        measure(search, lambda configs: engine.run(configs, table), table.begin_round)

    content = report.summary(search, command)
    path = write_json(args.json or folder / "tune.json", content)
    picture = folder / "tune.png"
    report.draw(picture, search, [constant["importance"] for constant in content["constants"]])
    report.report_of(content, table.metric).show()
    terminal.say(f"record in {path}, picture in {picture}")

    if args.save_tuned:
        from mupax.train.studies.transfer import tuned

        saved_path, use = report.save(args.save_tuned, search, content, command)
        terminal.say(tuned.saved_message(saved_path, use))
    return 0
