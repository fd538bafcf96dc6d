"""Output of a search: live table, report, record as JSON, picture and tuned preset."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table as RichTable
from scipy.special import stdtrit

from mupax.terminal import counted
from mupax.train.config import record
from mupax.train.config.run import Config
from mupax.train.run.report.plotting import BLUE, GREY, INK, ORANGE
from mupax.train.studies.report import Report, Section, Step, finite
from mupax.train.studies.sweep.rows import Row
from mupax.train.studies.sweep.table import LiveTable
from mupax.train.studies.transfer import tuned
from mupax.train.studies.transfer.drift import CONFIDENCE
from mupax.train.studies.transfer.report import provenance
from mupax.train.studies.tune import surrogate
from mupax.train.studies.tune.over import STEPS_PER_OCTAVE, Constant
from mupax.train.studies.tune.race import ERROR, Elimination
from mupax.train.studies.tune.search import Run, Search

TOP = 0.9
"""Share of the points, counted from the best, whose losses lie within the y axis of a picture.

The other points are drawn on the upper edge.
"""
ACROSS = 4
"""Number of panels side by side."""
MAX_CONFIRM = 100
"""Greatest number of fresh seeds that a report proposes for `--confirm`."""
LEAST_SAVED = 3
"""Least number of points of a search whose best point is saved as a tuned preset."""
END_STEPS = 2
"""Grid steps from an end of a range within which a best value counts as at the end."""


class SearchTable(LiveTable):
    """Context manager that shows the best values of a search in a live table while it trains.

    On a console that is no terminal it prints a line for every finished run instead.

    Args:
        search: Search that is shown. The table reads its points and rows as they are added.
        evaluated: True if the losses are evaluation losses, False if they are training losses.
    """

    def __init__(self, console: Console, search: Search, *, evaluated: bool) -> None:
        # Set before `super()`, because `Live` calls `table` already when it is made.
        self._search = search
        super().__init__(console, [], evaluated=evaluated)

    def __exit__(self, *error: object) -> None:
        """End the live table. After an error, print heading and table if any run is finished.

        Without an error nothing is printed, because the report has the same constants.
        """
        super().__exit__(*error)
        if error[0] is not None and self._search.rows:
            self.note(self.heading())
            self._console.print(self.table())

    def begin_round(self, search: Search, runs: Sequence[Run]) -> None:
        """Set the names of the runs that are trained next, "point N", for lines of finished runs.

        N is the index of the point in the search.
        """
        self._columns = [f"point {search.points.index(point)}" for point, _ in runs]

    def begin(self, configs: Sequence[Config], done: dict[int, Row]) -> None:
        # Every round is a sweep of its own, whose bar begins at zero.
        self._shares.clear()
        self._bar.reset(self._task, description=self.heading())
        # A search that was stopped asks for its old rounds again, and their runs all have rows.
        if len(done) < len(configs):
            super().begin(configs, done)

    def training(self, points: Sequence[int], step: int, losses: np.ndarray) -> None:
        super().training(points, step, losses)
        self._bar.update(self._task, description=self.heading())

    def heading(self) -> str:
        """Return a line of text on the search so far, for the progress bar.

        It has the number of trained points and the mean losses of the best point and of the start,
        the run with no constant changed. Before the first finite loss it has only the number of
        points.
        """
        search = self._search
        standing = search.race()
        tried = int(np.isfinite(standing.means).sum())
        if not tried:
            return counted(len(search.points), "point")
        trained = (~np.isnan(search.losses[:, 0])).sum()
        best = standing.means[standing.best]
        start = standing.means[0]
        return (
            f"{trained}/{counted(search.limits.points, 'point')}, "
            f"best {best:.4f}, start {start:.4f}"
        )

    def table(self) -> RichTable:
        """Return a table with a row for every constant: its range, its start and the best value."""
        search = self._search
        table = RichTable(box=None, pad_edge=False)
        table.add_column("constant", overflow="ellipsis", no_wrap=True, max_width=34)
        for column in ("from", "to", "start", "best"):
            table.add_column(column, justify="right")
        for constant, step in zip(search.constants, search.winner, strict=True):
            table.add_row(constant.word, *constant.cells(), f"{constant.value(step):.4g}")
        return table


def summary(search: Search, command: str) -> dict[str, Any]:
    """Return the record of a finished search as plain values for tune.json.

    Args:
        command: Command line of the search, which the record holds.
    """
    standing = search.race()
    winner = search.winner
    difference = search.difference()
    shares = surrogate.importance(search.constants, search.points, standing.means)
    constants = []
    for constant, step, share in zip(search.constants, winner, shares, strict=True):
        constants.append(_constant_json(constant, step, share))
    winner_losses = search.losses_of(winner, search.fresh_seeds)
    start_losses = search.losses_of(search.start, search.fresh_seeds)
    return {
        "command": command,
        "stopped": search.stopped,
        "constants": constants,
        "noise": {"sigma": finite(standing.sigma, 6), "freedom": standing.freedom, "error": ERROR},
        "runs": int((~np.isnan(search.losses)).sum()),
        "runs_without_dropping": len(search.points) * search.limits.seeds,
        "runs_of_an_octave_grid": _octave_grid_points(search.constants) * search.limits.seeds,
        "train_seconds": round(search.seconds, 1),
        "winner": record.command_of(search.config_of((winner, 0))),
        "fresh_seeds": {
            "winner": [finite(loss) for loss in winner_losses],
            "start": [finite(loss) for loss in start_losses],
        },
        "winner_less_start": None if difference is None else difference.to_json(),
        "points": _points_json(search, standing),
        "versions": provenance(),
    }


def _constant_json(constant: Constant, step: int, share: float) -> dict[str, Any]:
    """Return a constant's range, start, winner's value and importance as plain values for JSON.

    Args:
        step: Grid step of the winner, 0 for the start.
        share: Importance, from 0 to 1.
    """
    return {
        "word": constant.word,
        "flag": constant.flag,
        "low": constant.low,
        "high": constant.high,
        "start": constant.start,
        "winner": constant.value(step),
        "importance": round(share, 4),
    }


def _points_json(search: Search, standing: Elimination) -> list[dict[str, Any]]:
    """Return each point's values, losses, mean and a better point's index as values for JSON.

    The index `worse_than` is `None` for a point that was not dropped.
    """
    losses = search.losses
    points = []
    for index, point in enumerate(search.points):
        pairs = zip(search.constants, point, strict=True)
        trained = losses[index][~np.isnan(losses[index])]
        better = int(standing.dropped[index])
        points.append(
            {
                "values": [constant.value(step) for constant, step in pairs],
                "losses": [finite(loss) for loss in trained.tolist()],
                "mean": finite(standing.means[index], 6),
                "worse_than": better if better >= 0 else None,
            }
        )
    return points


def _octave_grid_points(constants: Sequence[Constant]) -> int:
    """Return the number of points of a full grid over all ranges with one point per octave."""
    counts = []
    for constant in constants:
        low, high = constant.steps
        counts.append(max(1, round((high - low) / STEPS_PER_OCTAVE)) + 1)
    return math.prod(counts)


def report_of(content: dict[str, Any], metric: str) -> Report:
    """Return the report of a search: answer, next command, and constants by importance.

    Args:
        content: Record of the search, from `summary`.
        metric: Name of the loss, such as "evaluation loss".
    """
    steps = []
    if not _start_is_best(content) and not _start_is_better(content):
        steps.append(Step("Next: train the best point", content["winner"]))

    rows = [["constant", "from", "to", "start", "best", "importance"]]
    for constant in sorted(content["constants"], key=lambda constant: -constant["importance"]):
        numbers = []
        for name in ("low", "high", "start", "winner"):
            numbers.append(f"{constant[name]:.4g}")
        rows.append([constant["word"], *numbers, f"{constant['importance']:.0%}"])

    share = content["runs"] / content["runs_without_dropping"]
    noise = content["noise"]["sigma"]
    noise_text = "unknown" if noise is None else f"{noise:.4f}"
    lines = [
        *_end_notes(content),
        f"{counted(len(content['points']), 'point')} in "
        f"{counted(content['runs'], 'run')}, {share:.2f} "
        f"of all seeds; ended: {content['stopped']}",
        f"noise of a run beside its seed's: {noise_text}",
    ]
    table = Section(rows, lines=lines, left=("constant",))
    return Report([answer(content, metric)], steps, [table])


def answer(content: dict[str, Any], metric: str) -> str:
    """Return a sentence: take the best point, keep the start, or not decided, and why.

    The start is the run with no constant changed.

    Args:
        content: Record of the search, from `summary`.
        metric: Name of the loss, such as "evaluation loss".
    """
    if _all_diverged(content):
        return (
            f"No best point: all {len(content['points'])} points diverged, the start too; "
            "search smaller rates."
        )
    if _start_is_best(content):
        return (
            f"Keep the start: nothing better than the start was found "
            f"in {counted(len(content['points']), 'point')}."
        )
    winner = content["fresh_seeds"]["winner"]
    start = content["fresh_seeds"]["start"]
    difference = content["winner_less_start"]
    if not winner:
        return (
            "Not decided: the best point has met the start on no fresh seeds; "
            "--confirm 5 trains them."
        )
    if difference is None:
        return (
            f"Not decided by a difference: on {len(winner)} fresh seeds the best point "
            f"diverged {winner.count(None)} times, the start {start.count(None)}."
        )

    value = difference["value"]
    low = difference["low"]
    high = difference["high"]
    place = "below" if value < 0 else "above"
    seeds = (
        f"on {len(winner)} fresh seeds its {metric} ends {abs(value):.4f} nats {place} the start, "
        f"difference [{low:+.4f}, {high:+.4f}]"
    )
    # Only an interval without zero decides.
    if high < 0:
        return f"Take the best point: {seeds}."
    if low > 0:
        return f"Keep the start: the best point is worse, {seeds}."
    more_seeds = _fresh_seeds_to_decide(value, high - value, len(winner))
    if more_seeds:
        return f"Not decided: {seeds}; --confirm {more_seeds} would probably decide it."
    return f"Not decided: {seeds}; more fresh seeds would hardly decide it."


def _start_is_best(content: dict[str, Any]) -> bool:
    """Return True if no constant of the best point differs from the unchanged run.

    Args:
        content: Record of the search, from `summary`.
    """
    return all(constant["winner"] == constant["start"] for constant in content["constants"])


def _all_diverged(content: dict[str, Any]) -> bool:
    """Return True if no point of a search has a finite loss.

    Args:
        content: Record of the search, from `summary`.
    """
    return all(point["mean"] is None for point in content["points"])


def _start_is_better(content: dict[str, Any]) -> bool:
    """Return True if the best point is worse than the start on the fresh seeds.

    Its interval lies above zero, or more of its seeds diverged.

    Args:
        content: Record of the search, from `summary`.
    """
    difference = content["winner_less_start"]
    if difference is not None:
        return difference["low"] > 0
    fresh = content["fresh_seeds"]
    return fresh["winner"].count(None) > fresh["start"].count(None)


def _fresh_seeds_to_decide(value: float, half_width: float, seeds: int) -> int:
    """Return the number of fresh seeds that would decide which of two points has the lower loss.

    The difference and the spread between seeds are assumed to stay as they are. The number includes
    the `seeds` that are trained. Return 0 if more than `MAX_CONFIRM` would be needed.

    Args:
        value: Mean difference of the losses of the best point and the unchanged run.
        half_width: Half the width of the 95 % interval of `value`, from `seeds` seeds.
        seeds: Number of fresh seeds that are trained, at least 2.
    """
    # Half an interval is Student's quantile times deviation / sqrt(seeds).
    deviation = half_width * math.sqrt(seeds) / float(stdtrit(seeds - 1, CONFIDENCE))
    # More seeds narrow the mean, and also lower Student's quantile.
    for count in range(seeds + 1, MAX_CONFIRM + 1):
        if float(stdtrit(count - 1, CONFIDENCE)) * deviation / math.sqrt(count) < abs(value):
            return count
    return 0


def draw(path: Path, search: Search, shares: list[float]) -> None:
    """Write a PNG with a panel of mean loss against value for every constant.

    Diverged points and the worst tenth are drawn at the upper edge. An existing file is replaced.

    Args:
        shares: Importance of every constant, from 0 to 1, in the order of `search.constants`.
    """
    from matplotlib.figure import Figure

    standing = search.race()
    is_finite = np.isfinite(standing.means)
    means = standing.means[is_finite]
    top = float(np.quantile(means, TOP)) if means.size else 1.0
    least = float(means.min()) if means.size else 0.0
    # Points far above the others, and diverged ones, are drawn at the edge, which lies above the
    # other points even if all losses are equal.
    edge = top + (0.05 * (top - least) or 0.01)
    heights = np.where(is_finite, np.minimum(standing.means, edge), edge)

    count = len(search.constants)
    rows = -(-count // ACROSS)
    columns = min(count, ACROSS)
    figure = Figure(figsize=(max(4.0, 2.9 * columns), 2.7 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, sharey=True, squeeze=False)
    best = search.points.index(search.winner)
    for index, panel in enumerate(panels.flat):
        if index >= count:
            panel.set_visible(False)
            continue
        constant = search.constants[index]
        values = np.array([constant.value(point[index]) for point in search.points])
        _draw_panel(panel, constant, values, heights, standing.stays, best)
        panel.set_title(
            f"{constant.word}, importance {shares[index]:.0%}", fontsize=9, loc="left", color=INK
        )
    panels[0][0].set_ylabel("loss (nats), mean over seeds", fontsize=9)
    figure.supxlabel(
        "ring: the best; dashed: the start; grey: dropped before its last seed",
        fontsize=8,
        x=0.01,
        ha="left",
    )
    figure.savefig(path, dpi=130)


def _draw_panel(
    panel: Any,
    constant: Constant,
    values: np.ndarray,
    heights: np.ndarray,
    stays: np.ndarray,
    best: int,
) -> None:
    """Draw the losses of all points over their values of one constant.

    Dropped points are faint, the winner has a ring, and a dashed line is at the start.

    Args:
        panel: `Axes` of matplotlib.
        values: Values of the constant, [P]. The start is the first point.
        heights: Heights of the points in the panel, [P]: their losses, cut at the upper edge.
        stays: Mask of the points that were not dropped, bool [P].
        best: Index of the winner in `values`.
    """
    # A constant near 1, such as b1, is searched in octaves of its distance from 1.
    if constant.near_one:
        x = np.log2(1 - values)
        label = "log2(1 - value)"
    else:
        # A start of 0, such as no weight decay, has no log. It is drawn an octave below the rest.
        positive = values[values > 0]
        least = positive.min() if positive.size else 1.0
        x = np.log2(np.where(values > 0, values, least / 2))
        label = "log2(value)" if values[0] > 0 else "log2(value), 0 at the left end"
    panel.plot(x[~stays], heights[~stays], "o", ms=3, color=GREY, alpha=0.45)
    panel.plot(x[stays], heights[stays], "o", ms=4, color=BLUE)
    panel.plot(x[best], heights[best], "o", ms=8, mfc="none", mec=ORANGE, mew=1.6)
    panel.axvline(x[0], color="#888888", linewidth=1, linestyle=(0, (4, 3)), zorder=0)
    panel.set_xlabel(label, fontsize=8)
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(colors="#444444", labelsize=8)


def save(name: str, search: Search, content: dict[str, Any], command: str) -> tuple[Path, str]:
    """Save the best point as a tuned preset. Return its path and the argument of `--preset`.

    An existing file is replaced.

    Args:
        name: Name of the preset, or the path of a file PRESET.NAME.json.
        content: Record of the search, from `summary`.
        command: Command line of the search, which the file records.

    Raises:
        NoMinimum: There is no best point, the start is better than it on the fresh seeds, or fewer
            points are trained than a tuned preset lists.
        PresetError, ConfigError: The name is refused by `tuned.check_name`.
    """
    count = len(search.points)
    trouble = ""
    if _all_diverged(content):
        trouble = "every point diverged"
    elif _start_is_better(content):
        trouble = "the best point is worse than the start on fresh seeds"
    elif count < LEAST_SAVED:
        trouble = f"it has {counted(count, 'point')}, and needs {LEAST_SAVED}; write more --minutes"
    if trouble:
        raise tuned.NoMinimum(f"the search has no point to save: {trouble}")
    standing = search.race()
    config = search.config_of((search.winner, 0))
    rates = []
    for point in search.points:
        rates.append(search.config_of((point, 0)).optimizer.peak_lr)
    # A tuned preset lists its evidence by learning rate, whatever was searched.
    by_rate = np.argsort(rates, kind="stable")
    num_seeds = (~np.isnan(search.losses)).sum(axis=1)
    no_interval = {"value": None, "low": None, "high": None}
    names = ("word", "flag", "low", "high", "start", "winner", "importance")
    constants = []
    for constant in content["constants"]:
        constants.append({key: constant[key] for key in names})
    evidence = {
        "sizes": [dict(config.model.base_sizes())],
        "seeds": int(num_seeds.max()),
        "log2_lr": [round(math.log2(rates[index]), 5) for index in by_rate],
        "loss": [finite(float(standing.means[index]), 5) for index in by_rate],
        "log2_optimum": {
            "value": round(math.log2(config.optimizer.peak_lr), 5),
            "low": None,
            "high": None,
        },
        "transfer": [],
        "search": {
            "constants": constants,
            "runs": content["runs"],
            "minutes": search.limits.minutes,
            "train_seconds": content["train_seconds"],
            "fresh_seeds": search.limits.confirm,
            "winner_less_start": content["winner_less_start"] or no_interval,
        },
    }
    return tuned.write(name, config, config.optimizer.peak_lr, evidence, command)


def _end_notes(content: dict[str, Any]) -> list[str]:
    """Return a note with the constants whose winning value is near an end of its range, or []."""
    ends = []
    for searched in content["constants"]:
        fields = {field.name: searched[field.name] for field in dataclasses.fields(Constant)}
        if _is_at_end(Constant(**fields), searched["winner"]):
            ends.append(f"{searched['word']} {searched['winner']:.4g}")
    if not ends:
        return []
    return [f"note: the best point is at the end of a range: {', '.join(ends)}; search a wider one"]


def _is_at_end(constant: Constant, value: float) -> bool:
    """Return True if a value is within `END_STEPS` grid steps of an end of the constant's range.

    A value of 0 or less is at no end.
    """
    if value <= 0:
        return False
    position = constant.octaves(value)
    ends = [constant.octaves(end) for end in (constant.low, constant.high)]
    return min(abs(position - end) for end in ends) <= END_STEPS / STEPS_PER_OCTAVE
