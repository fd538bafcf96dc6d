"""`mupax plan score FORECAST PLACE`: a forecast, or a plan, against the run that came."""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from tyro import conf

from mupax import command_line, terminal
from mupax.train.checkpoints import workdir
from mupax.train.config.record import differences, run_config, text_of, to_json
from mupax.train.config.run import Config
from mupax.train.run.report import metrics
from mupax.train.studies.forecast import points, record
from mupax.train.studies.forecast.points import ELSEWHERE, METRICS
from mupax.train.studies.forecast.record import ForecastError
from mupax.train.studies.sweep.grids import at_rate
from mupax.train.studies.sweep.losses import LAST
from mupax.train.studies.sweep.rows import FILE_NAME

PROG = "mupax plan score"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """A forecast, or a plan, against the run that came: inside or outside its intervals, and how far off."""

    forecast: Annotated[conf.Positional[Path], conf.arg(metavar="FORECAST")]
    """What `transfer --predict` or `plan --out` wrote."""
    place: Annotated[conf.Positional[Path], conf.arg(metavar="WORKDIR|FOLDER")]
    """The run's workdir, or a folder of rows that has it."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came.

    Attributes:
        loss: as the forecast means it; inf where the run diverged.
        seed: of the run.
        began: when it began; None where nothing says so.
    """

    loss: float
    seed: int
    began: datetime.datetime | None


def main(argv: Sequence[str]) -> int:
    """Compares and prints: 0 where every outcome is inside its 90 % interval, else 1; raises ForecastError as `outcomes`."""
    args = command_line.parse(Score, PROG, argv)
    content = record.read(args.forecast)
    runs = outcomes(content, args.place)
    scored = [score(content, outcome) for outcome in runs]
    for outcome, one in zip(runs, scored, strict=True):
        loss = content["prediction"]["loss"]
        where = "inside" if one["inside90"] else "outside"
        half = "inside" if one["inside50"] else "outside"
        terminal.say(
            f"seed {outcome.seed}: loss {outcome.loss:.4f} against {loss['value']:.4f}, {one['error']:+.2%}; {where} the 90 % interval "
            f"{loss['low90']:.4f} to {loss['high90']:.4f}, {half} the 50 % one ({METRICS[content['metric']]})"
        )
    if any(outcome.began is None for outcome in runs):
        terminal.say(
            "caution: rows carry no date; that they came after the forecast is for the history of both files to show"
        )
    return 0 if all(one["inside90"] for one in scored) else 1


def score(content: dict[str, Any], outcome: Outcome) -> dict[str, Any]:
    """What came beside what was said, as JSON has it.

    Args:
        content: the forecast.
        outcome: of its run.
    """
    loss = content["prediction"]["loss"]
    finite = math.isfinite(outcome.loss)
    return {
        "loss": round(outcome.loss, 6) if finite else None,
        "seed": outcome.seed,
        "error": round(outcome.loss / loss["value"] - 1, 6) if finite else math.inf,
        "inside90": bool(loss["low90"] <= outcome.loss <= loss["high90"]),
        "inside50": bool(loss["low50"] <= outcome.loss <= loss["high50"]),
    }


def outcomes(content: dict[str, Any], place: Path) -> list[Outcome]:
    """Every run of the forecast that a place has, at least one.

    Args:
        content: the forecast.
        place: a workdir, or a folder of rows.

    Raises:
        ForecastError: the run is another one, is not done, or began before the forecast; or no row is of it.
        WorkdirError, PointsError: there is no run and are no rows.
    """
    runs = (
        of_points(content, points.load([place]))
        if (place / FILE_NAME).is_file()
        else [_of_run(content, place)]
    )
    if not runs:
        raise ForecastError(
            f"{place} has no row of the run that is forecast; train `{content['command']}`"
        )
    date = datetime.datetime.fromisoformat(content["date"])
    for outcome in runs:
        if outcome.began is not None and outcome.began < date:
            raise ForecastError(
                f"{place} began at {outcome.began:%Y-%m-%d %H:%M:%S} UTC, before the forecast of {date:%Y-%m-%d %H:%M:%S}, which is "
                "none of it; train the run anew in another --workdir"
            )
    return runs


def other(content: dict[str, Any], config: Config) -> Iterator[tuple[str, Any, Any]]:
    """Fields in which a run is not the one that is forecast, with both values; seeds and what changes nothing learnt left out.

    Args:
        content: the forecast.
        config: of the run.
    """
    fields = differences(to_json(record.config_of(content).resolved()), to_json(config.resolved()))
    for name, goal, came in fields:
        same = name in ("seed", "data.seed") or (
            name == "optimizer.peak_lr" and math.isclose(goal, came, rel_tol=1e-6)
        )
        if not same and not name.startswith(ELSEWHERE):
            yield name, goal, came


def _of_run(content: dict[str, Any], place: Path) -> Outcome:
    run_record = workdir.read_record(place)
    config = run_config(run_record)
    if differing := list(other(content, config)):
        name, goal, came = differing[0]
        more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
        raise ForecastError(
            f"{place} is not the run that is forecast: {name} is {text_of(came)}, not {text_of(goal)}{more}; the forecast has its command"
        )
    rows = metrics.read(place / metrics.FILE_NAME)
    losses = [row["loss"] for row in rows if "loss" in row]
    evaluated = next(
        (row["eval_loss"] for row in rows if row["step"] == config.steps and "eval_loss" in row),
        None,
    )
    if len(losses) < config.steps or (content["metric"] == "evaluation" and evaluated is None):
        raise ForecastError(
            f"{place} is not done: {len(losses)} of {config.steps} steps; finish it with --resume"
        )
    last = [math.inf if loss is None else loss for loss in losses[-max(1, len(losses) // LAST) :]]
    loss = evaluated if content["metric"] == "evaluation" else float(np.mean(last))
    return Outcome(math.inf if loss is None else float(loss), config.seed, _began(place))


def _began(place: Path) -> datetime.datetime | None:
    """When the oldest file of a workdir was written, which is soon after its start."""
    times = [path.stat().st_mtime for path in place.rglob("*") if path.is_file()]
    return datetime.datetime.fromtimestamp(min(times), datetime.UTC) if times else None


def of_points(content: dict[str, Any], studies: Sequence[points.Points]) -> list[Outcome]:
    """Every row of the run that is forecast, at most.

    Args:
        content: the forecast.
        studies: rows by preset.
    """
    return [
        Outcome(float(setting.losses[at, column]), seed, None)
        for each in studies
        if each.metric == content["metric"]
        for setting in each.settings
        for at, x in enumerate(setting.x)
        if not any(other(content, at_rate(setting.config, 2.0 ** float(x))))
        for column, seed in enumerate(setting.seeds)
        if not np.isnan(setting.losses[at, column])
    ]
