"""`mupax plan score FORECAST PLACE`: compare a forecast, or a plan, with its finished run."""

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
from mupax.terminal import counted
from mupax.train.checkpoints import workdir
from mupax.train.config.record import differences, run_config, text_of, to_json
from mupax.train.config.run import Config
from mupax.train.run.report import metrics
from mupax.train.studies.forecast import points, record
from mupax.train.studies.forecast.points import ELSEWHERE, METRICS
from mupax.train.studies.forecast.record import ForecastError
from mupax.train.studies.sweep.grids import at_rate
from mupax.train.studies.sweep.losses import LAST
from mupax.train.studies.sweep.rows import has_rows

PROG = "mupax plan score"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """Compare a forecast, or a plan, with its finished run.

    Prints whether the loss lies inside the 90 and 50 % intervals, and how far off it is.
    """

    forecast: Annotated[conf.Positional[Path], conf.arg(metavar="FORECAST")]
    """File that `transfer --predict` or `plan --out` wrote."""
    place: Annotated[conf.Positional[Path], conf.arg(metavar="WORKDIR|FOLDER")]
    """The run's workdir, or a folder of rows that has the run."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of a finished run whose loss was forecast.

    Attributes:
        loss: Loss by the forecast's metric, inf if the run diverged.
        seed: Seed of the run.
        began: UTC time of the oldest file of the run's workdir. `None` for a row, which has none.
    """

    loss: float
    seed: int
    began: datetime.datetime | None


def main(argv: Sequence[str]) -> int:
    """Run `mupax plan score`: compare a forecast with every finished run that it is for.

    Each line has the loss of a run, its error, and whether it lies inside the forecast's intervals.

    Returns:
        0 if every outcome is inside its 90 % interval, otherwise 1.

    Raises:
        ForecastError: The file is no forecast, or `outcomes` refuses the runs.
    """
    args = command_line.parse(Score, PROG, argv)
    content = record.read(args.forecast)
    runs = outcomes(content, args.place)
    scores = [score(content, outcome) for outcome in runs]
    loss = content["prediction"]["loss"]
    for outcome, scored in zip(runs, scores, strict=True):
        wide = "inside" if scored["inside90"] else "outside"
        narrow = "inside" if scored["inside50"] else "outside"
        terminal.say(
            f"seed {outcome.seed}: loss {outcome.loss:.4f} against {loss['value']:.4f}, "
            f"{scored['error']:+.2%}; {wide} the 90 % interval "
            f"{loss['low90']:.4f} to {loss['high90']:.4f}, "
            f"{narrow} the 50 % one ({METRICS[content['metric']]})"
        )
    if any(outcome.began is None for outcome in runs):
        terminal.say(
            "caution: rows carry no date, so nothing here shows that they came after the "
            "forecast; compare the dates of both files, such as by `git log FILE`"
        )
    return 0 if all(scored["inside90"] for scored in scores) else 1


def score(content: dict[str, Any], outcome: Outcome) -> dict[str, Any]:
    """Return a run's loss and seed as plain values, with its error against the forecast.

    `error` is the relative difference of the run's loss from the forecast's median. If the run
    diverged, `error` is inf and `loss` is `None`. `inside90` and `inside50` are True if the loss
    lies inside the 90 or 50 % interval.

    Args:
        content: Forecast, from `record.read`.
        outcome: Result of the run that was forecast.
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
    """Return the results of the finished runs in `place` that a forecast is for, at least one.

    Runs may differ from the forecast's run in seeds and in fields without an effect on training.

    Args:
        content: Forecast, from `record.read`.
        place: Workdir of one finished run, or folder of rows of a study.

    Raises:
        ForecastError: The workdir has another run, or one that is not done or began before the
            forecast. It is also raised if no row of a folder is of the run.
        WorkdirError: The place has neither a run nor rows.
        PointsError: The rows cannot be read as runs.
    """
    if has_rows(place):
        runs = of_points(content, points.load([place]))
    else:
        runs = [_of_workdir(content, place)]
    if not runs:
        raise ForecastError(
            f"{place} has no row of the run that is forecast; train `{content['command']}`"
        )
    date = datetime.datetime.fromisoformat(content["date"])
    for outcome in runs:
        if outcome.began is not None and outcome.began < date:
            raise ForecastError(
                f"{place} began at {outcome.began:%Y-%m-%d %H:%M:%S} UTC, "
                f"before the forecast was made at {date:%Y-%m-%d %H:%M:%S}, so it cannot test "
                f"the forecast; train the run again in another --workdir"
            )
    return runs


def other_fields(content: dict[str, Any], config: Config) -> Iterator[tuple[str, Any, Any]]:
    """Yield the fields in which a run differs from the run of a forecast.

    Seeds do not count, and neither do fields without an effect on training, such as mesh and
    logging (`ELSEWHERE`). Peak rates may differ by 1e-6 of their value.

    Args:
        content: Forecast, from `record.read`.
        config: Config that the finished run was trained with.

    Yields:
        (name, value in the forecast, value of the run) of each field.
    """
    # Resolved, so that a default and the same value written out are equal.
    expected = to_json(record.config_of(content).resolved())
    for name, goal, actual in differences(expected, to_json(config.resolved())):
        if name in ("seed", "data.seed") or name.startswith(ELSEWHERE):
            continue
        # Rows have log2 of their rate, which gives the rate back only nearly.
        if name == "optimizer.peak_lr" and math.isclose(goal, actual, rel_tol=1e-6):
            continue
        yield name, goal, actual


def _of_workdir(content: dict[str, Any], place: Path) -> Outcome:
    """Return the result of the run in a workdir, with the kind of loss that was forecast.

    The loss is the evaluation loss after the last step, or the mean training loss over the last
    1 / `LAST` of the steps.

    Raises:
        ForecastError: The run is another one, or is not done.
    """
    config = run_config(workdir.read_record(place))
    differing = list(other_fields(content, config))
    if differing:
        name, goal, actual = differing[0]
        suffix = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
        raise ForecastError(
            f"{place} is not the run that is forecast: {name} is {text_of(actual)}, "
            f"not {text_of(goal)}{suffix}; train `{content['command']}`"
        )

    rows = metrics.read(place / metrics.FILE_NAME)
    losses = []
    for row in rows:
        if "loss" in row:
            losses.append(row["loss"])
    evaluated: float | None = None
    for row in rows:
        # The forecast is of the loss after the last step, and not of the best on the way.
        if row["step"] == config.steps and "eval_loss" in row:
            # A loss that is not finite is null in metrics.jsonl.
            evaluated = math.inf if row["eval_loss"] is None else row["eval_loss"]
            break
    by_evaluation = content["metric"] == "evaluation"
    if len(losses) < config.steps or (by_evaluation and evaluated is None):
        raise ForecastError(
            f"{place} is not done: {len(losses)} of "
            f"{counted(config.steps, 'step')}; finish it with --resume"
        )

    if evaluated is not None and by_evaluation:
        loss = evaluated
    else:
        last = losses[-max(1, len(losses) // LAST) :]
        loss = np.mean([math.inf if value is None else value for value in last])
    return Outcome(float(loss), config.seed, _began(place))


def _began(place: Path) -> datetime.datetime | None:
    """Return the UTC modification time of the oldest file of a workdir, or `None` without files.

    It is taken as the time at which the run began.
    """
    times = []
    for path in place.rglob("*"):
        if path.is_file():
            times.append(path.stat().st_mtime)
    return datetime.datetime.fromtimestamp(min(times), datetime.UTC) if times else None


def of_points(content: dict[str, Any], studies: Sequence[points.Points]) -> list[Outcome]:
    """Return the results of all rows whose run is that of a forecast, one per seed.

    Studies whose kind of loss (training or evaluation) is not that of the forecast are left out.

    Args:
        content: Forecast, from `record.read`.
        studies: Rows of finished points, one entry per preset.
    """
    matching = []
    for study in studies:
        # A training loss cannot be held against a forecast of an evaluation loss.
        if study.metric != content["metric"]:
            continue
        for setting in study.settings:
            matching += _of_setting(content, setting)
    return matching


def _of_setting(content: dict[str, Any], setting: points.Setting) -> list[Outcome]:
    """Return the result of every trained seed of a setting at the forecast's learning rate.

    The list is empty if the setting is of another run or has no row at that rate.

    Args:
        content: Forecast, from `record.read`.
        setting: Losses of one run at several learning rates, from several seeds.
    """
    matching = []
    for x, losses in zip(setting.x, setting.losses, strict=True):
        # A study may have the run at many rates, of which one is forecast.
        run = at_rate(setting.config, 2.0 ** float(x))
        if any(other_fields(content, run)):
            continue
        for seed, loss in zip(setting.seeds, losses, strict=False):
            if not np.isnan(loss):
                matching.append(Outcome(float(loss), seed, None))
    return matching
