"""A sweep on the terminal: a table of rates by sizes that fills as points finish, and a bar with the time left.

Where the terminal cannot draw, a line per finished point.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Hashable, Sequence
from types import TracebackType
from typing import Any

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table as RichTable
from rich.text import Text

from mupax.train.config.grids import power
from mupax.train.config.run import Config
from mupax.train.run.report.progress import duration
from mupax.train.studies.sweep.rows import Row

_TALLEST = 30
"""Rows of the live table beyond which only the bar is drawn; the whole table comes at the end."""


class Table:
    """Shows a sweep while entered.

    Args:
        console: where.
        columns: of every point, what it is told apart by beside its rate and seed, as a word: its size.
        metric: what a cell shows, such as "training loss".
        value: of a row, that number.
    """

    def __init__(self, console: Console, columns: Sequence[str], metric: str, value: Callable[[Row], float]) -> None:
        self._console, self._columns, self._metric, self._value = console, list(columns), metric, value
        self._configs: Sequence[Config] = ()
        self._rows: dict[int, Row] = {}
        self._training: dict[int, tuple[float, float]] = {}
        """Loss and share of its steps of every point in training."""
        self._work = self._did = 0.0
        self._began = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("points"),
            TextColumn("{task.fields[left]}"), console=console,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=None, left="")
        self._live = Live(console=console, get_renderable=self._drawn, refresh_per_second=4, transient=True)

    def __enter__(self) -> Table:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
        if self._rows:
            self._console.print(f"{self._metric}, mean over seeds", highlight=False)
            self._console.print(self.table())

    # What a sweep tells its watcher

    def begin(self, configs: Sequence[Config], done: dict[int, Row]) -> None:
        """All points, and those that have a row already."""
        self._configs, self._rows = configs, dict(done)
        self._bar.update(self._task, total=len(configs), completed=len(done))
        if done:
            self.note(f"{len(done)} of {len(configs)} points are done already")

    def note(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, highlight=False)

    def training(self, points: Sequence[int], step: int, losses: np.ndarray) -> None:
        """Losses of the points in training."""
        share = step / self._configs[points[0]].steps
        self._training |= {point: (float(loss), share) for point, loss in zip(points, losses, strict=True)}
        self._bar.update(self._task, description=f"step {step}", left=self._left())

    def finished(self, point: int, row: Row) -> None:
        """A point has its row."""
        self._rows[point] = row
        self._training.pop(point, None)
        self._did += _cost(self._configs[point])
        self._bar.update(self._task, completed=len(self._rows))
        if not self._console.is_terminal:
            config = self._configs[point]
            what = f"{self._columns[point]}  lr {power(config.optimizer.peak_lr)}  seed {config.seed}".strip()
            said = f"diverged at step {row.diverged_at}" if row.diverged else f"{self._metric} {self._value(row):.4f}"
            self.note(f"{len(self._rows)}/{len(self._configs)}  {what}: {said}  ({duration(row.seconds)})")

    def table(self) -> RichTable:
        """Rates down, sizes across, mean over seeds in the cells; the lowest of each size stands out."""
        found = RichTable(box=None, pad_edge=False)
        columns = list(dict.fromkeys(self._columns))
        found.add_column("rate", justify="right")
        for column in columns:
            found.add_column(column or "loss", justify="right")
        cells = self._cells()
        best = {
            column: min((mean for (_, c), (mean, _) in cells.items() if c == column), default=math.inf)
            for column in columns
        }
        for lr in sorted({config.optimizer.peak_lr for config in self._configs}):
            words = [Text(power(lr))]
            for column in columns:
                mean, whole = cells.get((lr, column), (math.nan, False))
                text = "" if math.isnan(mean) else "diverged" if math.isinf(mean) else f"{mean:.4f}"
                style = "bold green" if mean == best[column] and math.isfinite(mean) else "" if whole else "dim"
                words.append(Text(text, style=style))
            found.add_row(*words)
        return found

    def _cells(self) -> dict[tuple[Hashable, str], tuple[float, bool]]:
        """(rate, size) to the mean of what is known of it, and whether all of it is final."""
        values: dict[tuple[Hashable, str], list[float]] = {}
        final: dict[tuple[Hashable, str], bool] = {}
        for i, config in enumerate(self._configs):
            place = config.optimizer.peak_lr, self._columns[i]
            value = self._value(self._rows[i]) if i in self._rows else self._training.get(i, (None,))[0]
            final[place] = final.get(place, True) and i in self._rows
            if value is not None:
                values.setdefault(place, []).append(value if math.isfinite(value) else math.inf)
        return {place: (float(np.mean(found)), final[place]) for place, found in values.items()}

    def _left(self) -> str:
        left = sum(_cost(config) for i, config in enumerate(self._configs) if i not in self._rows)
        now = sum(share * _cost(self._configs[i]) for i, (_, share) in self._training.items())
        done = self._did + now
        return f"{duration((time.monotonic() - self._began) / done * (left - now))} left" if done else ""

    def _drawn(self) -> Any:
        rates = {config.optimizer.peak_lr for config in self._configs}
        return Group(self.table(), self._bar) if 0 < len(rates) <= _TALLEST else self._bar


def _cost(config: Config) -> float:
    """FLOPs of a point, by which the time left is told."""
    from mupax.zoo import flops

    model = dataclasses.replace(config.model)
    per_batch = config.data.batch_size * model.units
    return flops.train_flops(model) * per_batch * config.steps
