"""A search on the terminal and its result: ranges of the constants and what is best so far, then a record as JSON, a picture and a preset."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table as RichTable
from scipy.special import stdtrit

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
from mupax.train.studies.tune.over import STEPS
from mupax.train.studies.tune.race import ERROR
from mupax.train.studies.tune.search import Run, Search

TOP = 0.9
"""Share of the points, the best ones, that a picture's axis of losses shows; the others lie on its upper edge."""
ACROSS = 4
"""Panels side by side."""


class SearchTable(LiveTable):
    """Live table of a search while entered; a line per finished run where the terminal cannot draw.

    Args:
        console: where.
        search: what it shows.
        evaluated: whether losses are those of an evaluation.
    """

    def __init__(self, console: Console, search: Search, *, evaluated: bool) -> None:
        self._search = search  # which `table` shows from the first
        super().__init__(console, [], evaluated=evaluated)

    def __exit__(self, *error: object) -> None:
        """Leave the table out where the search ended: the report has the constants below its answer."""
        super().__exit__(*error)
        if error[0] is not None and self._search.rows:
            self.note(self.heading())
            self._console.print(self.table())

    def round(self, search: Search, runs: Sequence[Run]) -> None:
        """What is trained next.

        Args:
            search: whose.
            runs: of a round.
        """
        self._columns = [f"point {search.points.index(point)}" for point, _ in runs]

    def begin(self, configs: Sequence[Config], done: dict[int, Row]) -> None:
        self._shares.clear()
        self._bar.reset(self._task, description=self.heading())
        if len(done) < len(configs):
            super().begin(configs, done)

    def training(self, points: Sequence[int], step: int, losses: np.ndarray) -> None:
        super().training(points, step, losses)
        self._bar.update(self._task, description=self.heading())

    def heading(self) -> str:
        """How far the search is, in a line."""
        search = self._search
        losses, standing = search.losses, search.race()
        tried = int(np.isfinite(standing.means).sum())
        if not tried:
            return f"{len(search.points)} points"
        start, best = standing.means[0], standing.means[standing.best]
        return f"{(~np.isnan(losses[:, 0])).sum()}/{search.limits.points} points, best {best:.4f}, start {start:.4f}"

    def table(self) -> RichTable:
        """The constants down; range, start and the best so far across."""
        table, search = RichTable(box=None, pad_edge=False), self._search
        table.add_column("constant", overflow="ellipsis", no_wrap=True, max_width=34)
        for column in ("from", "to", "start", "best"):
            table.add_column(column, justify="right")
        for constant, step in zip(search.constants, search.winner, strict=True):
            table.add_row(constant.word, *constant.cells(), f"{constant.value(step):.4g}")
        return table


def summary(search: Search, command: str) -> dict[str, Any]:
    """Everything about a search, as plain values.

    Args:
        search: that is over.
        command: that was written.
    """
    standing, losses, points = search.race(), search.losses, search.points
    shares = surrogate.importance(search.constants, points, standing.means)
    winner, difference = search.winner, search.difference()
    fresh = {
        name: [finite(loss) for loss in search.losses_of(point, search.fresh_seeds)]
        for name, point in (("winner", winner), ("start", search.start))
    }
    runs = int((~np.isnan(losses)).sum())
    octaves = [
        max(1, round((high - low) / STEPS)) + 1 for low, high in (c.steps for c in search.constants)
    ]
    return {
        "command": command,
        "stopped": search.stopped,
        "constants": [
            {
                "word": c.word, "flag": c.flag, "low": c.low, "high": c.high, "start": c.own, "winner": c.value(step),
                "importance": round(share, 4),
            }
            for c, step, share in zip(search.constants, winner, shares, strict=True)
        ],
        "noise": {"sigma": finite(standing.sigma, 6), "freedom": standing.freedom, "error": ERROR},
        "runs": runs,
        "runs_without_dropping": len(points) * search.limits.seeds,
        "runs_of_an_octave_grid": math.prod(octaves) * search.limits.seeds,
        "train_seconds": round(search.seconds, 1),
        "winner": record.command_of(search.config_of((winner, 0))),
        "fresh_seeds": fresh,
        "winner_less_start": None if difference is None else difference.to_json(),
        "points": [
            {
                "values": [c.value(step) for c, step in zip(search.constants, point, strict=True)],
                "losses": [finite(x) for x in each.tolist() if not math.isnan(x)],
                "mean": finite(mean, 6),
                "worse_than": int(other) if other >= 0 else None,
            }
            for point, each, mean, other in zip(points, losses, standing.means, standing.dropped, strict=True)
        ],
        "versions": provenance(),
    }  # fmt: skip


def report_of(content: dict[str, Any], metric: str) -> Report:
    """Return the answer, what to type next, the constants with the most important first, and how they were found.

    Args:
        content: of `summary`.
        metric: what a loss is.
    """
    steps = (
        [] if _start_is_best(content) else [Step("Next: train the best point", content["winner"])]
    )
    rows = [["constant", "from", "to", "start", "best", "importance"]]
    for constant in sorted(content["constants"], key=lambda constant: -constant["importance"]):
        numbers = [f"{constant[name]:.4g}" for name in ("low", "high", "start", "winner")]
        rows.append([constant["word"], *numbers, f"{constant['importance']:.0%}"])
    noise = content["noise"]["sigma"]
    lines = [
        f"{len(content['points'])} points in {content['runs']} runs, {content['runs'] / content['runs_without_dropping']:.2f} "
        f"of all seeds; ended: {content['stopped']}",
        f"noise of a run beside its seed's: {'unknown' if noise is None else f'{noise:.4f}'}",
    ]
    table = Section(rows, lines=[*_ends(content), *lines], left=("constant",))
    return Report([answer(content, metric)], steps, [table])


def answer(content: dict[str, Any], metric: str) -> str:
    """Return whether to take the best point or to keep the start, in plain words.

    Args:
        content: of `summary`.
        metric: what a loss is.
    """
    if _start_is_best(content):
        return f"Keep the start: nothing better than the start was found in {len(content['points'])} points."
    winner = content["fresh_seeds"]["winner"]
    start = content["fresh_seeds"]["start"]
    apart = content["winner_less_start"]
    if not winner:
        return "Not decided: the best point has met the start on no fresh seeds; --confirm 5 trains them."
    if apart is None:
        return (
            f"Not decided by a difference: on {len(winner)} fresh seeds the best point diverged {winner.count(None)} times, "
            f"the start {start.count(None)}."
        )
    value = apart["value"]
    place = "below" if value < 0 else "above"
    ends = f"ends {abs(value):.4f} nats {place} the start, difference [{apart['low']:+.4f}, {apart['high']:+.4f}]"
    seeds = f"on {len(winner)} fresh seeds its {metric} {ends}"
    if apart["high"] < 0:
        return f"Take the best point: {seeds}."
    if apart["low"] > 0:
        return f"Keep the start: the best point is worse, {seeds}."
    more = _fresh_seeds_to_decide(value, apart["high"] - value, len(winner))
    advice = (
        f"--confirm {more} would probably decide it"
        if more
        else "more fresh seeds would hardly decide it"
    )
    return f"Not decided: {seeds}; {advice}."


def _start_is_best(content: dict[str, Any]) -> bool:
    return all(constant["winner"] == constant["start"] for constant in content["constants"])


def _fresh_seeds_to_decide(value: float, half: float, seeds: int) -> int:
    """Return the fresh seeds after which a difference would leave zero out if it stayed as it is; 0 for more than 100."""
    deviation = half * math.sqrt(seeds) / float(stdtrit(seeds - 1, CONFIDENCE))
    for count in range(seeds + 1, 101):
        if float(stdtrit(count - 1, CONFIDENCE)) * deviation / math.sqrt(count) < abs(value):
            return count
    return 0


def draw(path: Path, search: Search, shares: list[float]) -> None:
    """Write a PNG of loss against every constant: faint points were dropped, the ringed one won, the line is the start.

    Args:
        path: of the picture.
        search: that is over.
        shares: importance of each constant.
    """
    from matplotlib.figure import Figure

    standing, count = search.race(), len(search.constants)
    means = standing.means[np.isfinite(standing.means)]
    top = float(np.quantile(means, TOP)) if means.size else 1.0
    pad = 0.05 * (top - float(means.min() if means.size else 0.0)) or 0.01
    shown = np.where(np.isfinite(standing.means), np.minimum(standing.means, top + pad), top + pad)
    rows, columns = -(-count // ACROSS), min(count, ACROSS)
    figure = Figure(figsize=(max(4.0, 2.9 * columns), 2.7 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for at, panel in enumerate(panels.flat):
        if at >= count:
            panel.set_visible(False)
            continue
        constant = search.constants[at]
        values = np.array([constant.value(point[at]) for point in search.points])
        x = np.log2(1 - values if constant.near_one else np.maximum(values, 1e-30))
        panel.plot(x[~standing.stays], shown[~standing.stays], "o", ms=3, color=GREY, alpha=0.45)
        panel.plot(x[standing.stays], shown[standing.stays], "o", ms=4, color=BLUE)
        best = search.points.index(search.winner)
        panel.plot(x[best], shown[best], "o", ms=8, mfc="none", mec=ORANGE, mew=1.6)
        panel.axvline(x[0], color="#888888", linewidth=1, linestyle=(0, (4, 3)), zorder=0)
        panel.set_title(
            f"{constant.word}, importance {shares[at]:.0%}", fontsize=9, loc="left", color=INK
        )
        panel.set_xlabel("log2(1 - value)" if constant.near_one else "log2(value)", fontsize=8)
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(colors="#444444", labelsize=8)
    panels[0][0].set_ylabel("loss (nats), mean over seeds", fontsize=9)
    figure.supxlabel(
        "ring: the best; dashed: the start; grey: dropped before its last seed",
        fontsize=8,
        x=0.01,
        ha="left",
    )
    figure.savefig(path, dpi=130)


def save(name: str, search: Search, content: dict[str, Any], command: str) -> tuple[Path, str]:
    """Write the winner as a tuned preset, and give its path and what `--preset` takes.

    Args:
        name: of it, or the path of a file PRESET.NAME.json.
        search: that is over.
        content: its `summary`.
        command: that was written.
    """
    standing, config = search.race(), search.config_of((search.winner, 0))
    rates = [search.config_of((point, 0)).optimizer.peak_lr for point in search.points]
    order = np.argsort(rates, kind="stable")
    trained = (~np.isnan(search.losses)).sum(axis=1)
    evidence = {
        "sizes": [dict(config.model.base_sizes())],
        "seeds": int(trained.max()),
        "log2_lr": [round(math.log2(rates[i]), 5) for i in order],
        "loss": [finite(float(standing.means[i]), 5) for i in order],
        "log2_optimum": {
            "value": round(math.log2(config.optimizer.peak_lr), 5),
            "low": None,
            "high": None,
        },
        "transfer": [],
        "search": {
            "constants": [
                {
                    key: c[key]
                    for key in ("word", "flag", "low", "high", "start", "winner", "importance")
                }
                for c in content["constants"]
            ],
            "runs": content["runs"],
            "minutes": search.limits.minutes,
            "train_seconds": content["train_seconds"],
            "fresh_seeds": search.limits.confirm,
            "winner_less_start": content["winner_less_start"]
            or {"value": None, "low": None, "high": None},
        },
    }
    return tuned.write(name, config, config.optimizer.peak_lr, evidence, command)


def _ends(content: dict[str, Any]) -> list[str]:
    """A line where the winner has a number from the end of a range: the best may lie beyond."""
    ends = [
        f"{c['word']} {c['winner']:.4g}"
        for c in content["constants"]
        if min(
            abs(math.log2(c["winner"] / c[end])) if c["winner"] > 0 else 1.0
            for end in ("low", "high")
        )
        <= 2 / STEPS
    ]
    return (
        [f"note: the best point is at the end of a range: {', '.join(ends)}; search a wider one"]
        if ends
        else []
    )
