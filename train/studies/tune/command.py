"""`mupax tune RECIPE --over lr,readout.lr,...`: the constants of a run that end lowest, found and confirmed."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro import conf

from mupax import command_line, extras, terminal
from mupax.command_line import Repeated, Switch
from mupax.train.config import cli
from mupax.train.config.checks import at_least, note_warmup
from mupax.train.config.run import Config
from mupax.zoo.configs import ConfigError

if TYPE_CHECKING:
    from mupax.train.studies.tune.over import Constant
    from mupax.train.studies.tune.search import Limits

MOST = 1000
"""Points that a search may be asked for; seeds are held below those of the comparison at the end."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tune:
    """The constants of a run that end lowest, searched together.

    Points are asked for in rounds, of a model of the losses so far, and trained to their end on the same batches with one
    compilation; a point gets further seeds until it is worse than another by more than seeds explain. The best one then meets
    the run as it stands on fresh seeds. Constants per parameter group are factors at the preset's base: tune there, on the
    small model, and give the tuned preset to the large one.

    FOLDER gets points.jsonl, tune.json and tune.png; the same command goes on where it was stopped.
    What is not listed here is a flag of the recipe (`mupax train RECIPE --help`) and holds for every point.
    """

    recipe: Annotated[conf.Positional[str], conf.arg(metavar="RECIPE|FILE")]
    """A recipe of `mupax train --help`, or a config file; `--config FILE` says the same."""
    over: Annotated[Repeated, conf.arg(metavar="NAME,NAME=LOW:HIGH,...")]
    """What to search: lr, weight_decay, GROUP.lr, GROUP.std, GROUP.multiplier, GROUP.decay, attention.multiplier, gamma0, ..."""
    points: Annotated[int, conf.arg(metavar="N")] = 64
    """Points to try, the run as it stands among them."""
    batch: Annotated[int, conf.arg(metavar="N")] = 8
    """Points asked for at once."""
    seeds: Annotated[int, conf.arg(metavar="N")] = 3
    """Initializations of a point that is never dropped."""
    confirm: Annotated[int, conf.arg(metavar="N")] = 5
    """Fresh initializations of the best point and of the start; 0 compares them by the search alone."""
    minutes: Annotated[float, conf.arg(metavar="M")] = 45.0
    """Training time of all."""
    how: Literal["auto", "together", "in-turn"] = "auto"
    """As `mupax sweep`."""
    no_eval: Switch = False
    """Search the training loss, mean over the last tenth of the steps, in place of the evaluation loss."""
    out: Annotated[str | None, conf.arg(metavar="FOLDER")] = None
    """Where everything goes; runs/tune-RECIPE unless given."""
    json: Annotated[str | None, conf.arg(metavar="PATH")] = None
    """Write what was found; FOLDER/tune.json unless given."""
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
        if self.points > MOST or self.seeds > 100:
            raise ConfigError(
                f"--points {self.points}, --seeds {self.seeds}: write at most {MOST} points and 100 seeds"
            )
        if not self.minutes > 0:
            raise ConfigError(f"--minutes is {self.minutes}; write a number above 0")

    @property
    def limits(self) -> Limits:
        """What the search may use."""
        from mupax.train.studies.tune.search import Limits

        return Limits(
            points=self.points,
            batch=self.batch,
            seeds=self.seeds,
            confirm=self.confirm,
            minutes=self.minutes,
        )


def main(argv: Sequence[str]) -> int:
    """Tunes: 0 when the search is over, whatever it found, 128 + its number stopped by a signal.

    Raises:
        UsageError, ConfigError, PresetError: what does not fit, before anything is trained.
    """
    from mupax.train.studies.sweep import sweep
    from mupax.train.studies.tune import over

    args, rest = command_line.parse_known(Tune, "mupax tune", cli.with_file_first(argv))
    extras.require("tune", "mupax tune")
    if "--workdir" in rest or "--resume" in rest:
        raise ConfigError(
            "a search has --out in place of --workdir, and goes on by itself without --resume"
        )
    config = cli.parse(
        args.recipe, cli.recipe_of_points(args.recipe), rest, command_line.flags(Tune)
    ).config
    config = dataclasses.replace(config, workdir=None)
    words = [word.strip() for text in args.over for word in text.split(",") if word.strip()]
    constants = over.parse(words, config)
    if args.save_tuned:
        from mupax.train.studies.transfer import tuned

        tuned.check_before_training(args.save_tuned, config)
    if args.dry_run:
        sweep.grouped([config], {})  # refuses what a search would refuse
        _dry_run(args, config, constants)
        return 0
    note_warmup(config.steps, config.scaled_optimizer.warmup_steps)
    return _run(args, config, constants, shlex.join(["mupax", "tune", *argv]))


def _dry_run(args: Tune, config: Config, constants: Sequence[Constant]) -> None:
    rows = [["constant", "flag", "from", "to", "start"]]
    rows += [[c.word, f"--{c.flag}", *c.cells()] for c in constants]
    print(terminal.table(rows))
    terminal.say(
        f"{args.points} points of {config.steps} steps, {args.batch} at once, 1 to {args.seeds} seeds each, then {args.confirm} "
        f"fresh seeds of the best and of the start; at most {args.minutes:g} minutes of training"
    )
    if structural := [
        c.word
        for c in constants
        if c.flag.partition(".")[2] in ("b1", "b2", "momentum", "clip_norm")
    ]:
        terminal.say(f"note: every value of {', '.join(structural)} compiles a program of its own")


def _run(args: Tune, config: Config, constants: tuple[Constant, ...], command: str) -> int:
    from mupax.train.studies.report import write_json
    from mupax.train.studies.sweep import sweep
    from mupax.train.studies.tune import report
    from mupax.train.studies.tune.search import Search, measure

    folder = Path(args.out or f"runs/tune-{cli.name_of(args.recipe)}")
    search = Search(config, constants, args.limits)
    table = report.SearchTable(terminal.console(), search, evaluated=not args.no_eval)
    with sweep.engine(folder, args.how, evaluated=not args.no_eval) as engine, table:
        measure(search, lambda configs: engine.run(configs, table), table.round)
    content = report.summary(search, command)
    path = write_json(args.json or folder / "tune.json", content)
    picture = folder / "tune.png"
    report.draw(picture, search, [constant["importance"] for constant in content["constants"]])
    report.report_of(content, table.metric).show()
    terminal.say(f"record in {path}, picture in {picture}")
    if args.save_tuned:
        from mupax.train.studies.transfer import tuned

        saved, word = report.save(args.save_tuned, search, content, command)
        terminal.say(tuned.saved_message(saved, word))
    return 0
