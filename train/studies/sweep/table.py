"""A sweep on the terminal: a table of rates by sizes that fills as points finish, and a bar with the time left.

Where the terminal cannot draw, a line per finished point.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Sequence
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
from mupax.train.studies.sweep.work import Watcher
from mupax.zoo import flops

_TALLEST = 30
"""Rows of the live table beyond which only the bar is drawn; the whole table comes at the end."""


class Table(Watcher):
    """Shows a sweep while entered.

    Args:
        console: where.
        columns: a word for every point besides its learning rate and seed: its size.
        metric: what a cell shows, such as "training loss".
        value: of a row, that number.
    """

    def __init__(self, console: Console, columns: Sequence[str], metric: str, value: Callable[[Row], float]) -> None:
        self._console, self._columns, self._metric, self._value = console, list(columns), metric, value
        self._configs: Sequence[Config] = ()
        self._rows: dict[int, Row] = {}
        self._training: dict[int, tuple[float, float]] = {}
        """Loss and share of its steps of every point in training."""
        self._done = 0.0
        self._began = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("points"),
            TextColumn("{task.fields[left]}"), console=console,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=None, left="")
        self._live = Live(console=console, get_renderable=self._renderable, refresh_per_second=4, transient=True)

    def __enter__(self) -> Table:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()
        if self._rows:
            self._console.print(f"{self._metric}, mean over seeds", highlight=False)
            self._console.print(self.table())

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
        self._done += _cost(self._configs[point])
        self._bar.update(self._task, completed=len(self._rows))
        if not self._console.is_terminal:
            config = self._configs[point]
            what = f"{self._columns[point]}  lr {power(config.optimizer.peak_lr)}  seed {config.seed}".strip()
            outcome = (
                f"diverged at step {row.diverged_at}" if row.diverged else f"{self._metric} {self._value(row):.4f}"
            )
            self.note(f"{len(self._rows)}/{len(self._configs)}  {what}: {outcome}  ({duration(row.seconds)})")

    def table(self) -> RichTable:
        """Learning rates down, sizes across, mean over seeds in the cells; the lowest of each size stands out."""
        columns, cells = list(dict.fromkeys(self._columns)), self._cells()
        table = RichTable(box=None, pad_edge=False)
        for column in ("rate", *(column or "loss" for column in columns)):
            table.add_column(column, justify="right")
        best = {c: min((mean for (_, c_), (mean, _) in cells.items() if c_ == c), default=math.inf) for c in columns}
        for lr in sorted({config.optimizer.peak_lr for config in self._configs}):
            words = [Text(power(lr))]
            for column in columns:
                mean, final = cells.get((lr, column), (math.nan, False))
                text = "" if math.isnan(mean) else "diverged" if math.isinf(mean) else f"{mean:.4f}"
                style = "bold green" if mean == best[column] and math.isfinite(mean) else "" if final else "dim"
                words.append(Text(text, style=style))
            table.add_row(*words)
        return table

    def _cells(self) -> dict[tuple[Hashable, str], tuple[float, bool]]:
        """(learning rate, size) to the mean of the losses so far, and whether all of them are final."""
        values: dict[tuple[Hashable, str], list[float]] = {}
        final: dict[tuple[Hashable, str], bool] = {}
        for i, config in enumerate(self._configs):
            place = config.optimizer.peak_lr, self._columns[i]
            value = self._value(self._rows[i]) if i in self._rows else self._training.get(i, (None,))[0]
            final[place] = final.get(place, True) and i in self._rows
            if value is not None:
                values.setdefault(place, []).append(value if math.isfinite(value) else math.inf)
        return {place: (float(np.mean(losses)), final[place]) for place, losses in values.items()}

    def _left(self) -> str:
        left = sum(_cost(config) for i, config in enumerate(self._configs) if i not in self._rows)
        now = sum(share * _cost(self._configs[i]) for i, (_, share) in self._training.items())
        done = self._done + now
        return f"{duration((time.monotonic() - self._began) / done * (left - now))} left" if done else ""

    def _renderable(self) -> Any:
        rates = {config.optimizer.peak_lr for config in self._configs}
        return Group(self.table(), self._bar) if 0 < len(rates) <= _TALLEST else self._bar


def _cost(config: Config) -> float:
    """FLOPs of a point, by which the time left is estimated."""
    return flops.train_flops(config.model) * config.data.batch_size * config.model.units * config.steps
