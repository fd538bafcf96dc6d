"""A sweep on the terminal: a table of rates by sizes that fills as points finish, and a bar with the time left.

Where the terminal cannot draw, a line per finished point.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Self

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table as RichTable
from rich.text import Text

from mupax.train.config.run import Config
from mupax.train.run.report.progress import duration
from mupax.train.studies.sweep.grids import power
from mupax.train.studies.sweep.rows import Row
from mupax.train.studies.sweep.work import SweepCallback
from mupax.zoo import families

METRICS = ("training loss", "evaluation loss")
"""What a point's loss is called, without and with an evaluation after its last step."""


class LiveTable(SweepCallback):
    """Shows a sweep while entered. A command prints its conclusion, and then the table by `show`.

    Args:
        console: where.
        columns: a word for every point besides its learning rate and seed: its size.
        evaluated: whether a cell shows the evaluation loss.
    """

    def __init__(self, console: Console, columns: Sequence[str], *, evaluated: bool) -> None:
        self._console = console
        self._columns = list(columns)
        self._evaluated = evaluated
        self.metric = METRICS[evaluated]
        self._configs: Sequence[Config] = ()
        self._rows: dict[int, Row] = {}
        self._losses: dict[int, float] = {}
        """Of every point in training or done."""
        self._shares: dict[int, float] = {}
        """Of every point's steps, those that are done."""
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[points]} points"), TimeRemainingColumn(),
            console=console,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=None, points="")
        # A table taller than the terminal is cut at its end, so the bar comes first.
        self._live = Live(
            console=console,
            get_renderable=lambda: Group(self._bar, self.table()),
            refresh_per_second=4,
            transient=True,
        )

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def show(self) -> None:
        """Print the table of what is trained."""
        if self._rows:
            self.note(f"{self.metric}, mean over seeds")
            self._console.print(self.table())

    def value(self, row: Row) -> float:
        """Return what a cell shows of a finished point."""
        return row.final_loss if self._evaluated else row.loss

    def begin(self, configs: Sequence[Config], done: dict[int, Row]) -> None:
        self._configs, self._rows = configs, dict(done)
        self._losses = {point: self.value(row) for point, row in done.items()}
        left = sum(_cost(config) for i, config in enumerate(configs) if i not in done)
        self._bar.update(self._task, total=left, points=f"{len(done)}/{len(configs)}")
        if done:
            self.note(f"{len(done)} of {len(configs)} points are done already")

    def note(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, highlight=False)

    def training(self, points: Sequence[int], step: int, losses: np.ndarray) -> None:
        self._losses |= {point: float(loss) for point, loss in zip(points, losses, strict=True)}
        for point in points:
            self._reached(point, step / self._configs[point].steps)
        self._bar.update(self._task, description=f"step {step}")

    def finished(self, point: int, row: Row) -> None:
        self._rows[point], self._losses[point], config = row, self.value(row), self._configs[point]
        self._reached(point, 1.0)
        done = f"{len(self._rows)}/{len(self._configs)}"
        self._bar.update(self._task, points=done)
        if not self._console.is_terminal:
            what = f"{self._columns[point]}  lr {power(config.optimizer.peak_lr)}  seed {config.seed}".strip()
            loss = f"{self.metric} {self.value(row):.4f}"
            outcome = f"diverged at step {row.diverged_at}" if row.diverged else loss
            self.note(f"{done}  {what}: {outcome}  ({duration(row.seconds)})")

    def _reached(self, point: int, share: float) -> None:
        self._bar.advance(
            self._task, (share - self._shares.get(point, 0.0)) * _cost(self._configs[point])
        )
        self._shares[point] = share

    def table(self) -> RichTable:
        """Learning rates down, sizes across, mean over seeds in the cells; the lowest of each size stands out."""
        columns = list(dict.fromkeys(self._columns))
        losses = {
            i: loss if math.isfinite(loss) else math.inf for i, loss in dict(self._losses).items()
        }
        places: dict[tuple[float, str], list[int]] = defaultdict(list)
        for i, config in enumerate(self._configs):
            places[config.optimizer.peak_lr, self._columns[i]].append(i)
        means = {
            place: float(np.mean([losses[i] for i in own if i in losses] or [math.nan]))
            for place, own in places.items()
        }
        best = {
            c: min(
                (m for (_, c_), m in means.items() if c_ == c and math.isfinite(m)), default=None
            )
            for c in columns
        }
        table = RichTable(box=None, pad_edge=False)
        for column in ("rate", *(column or "loss" for column in columns)):
            table.add_column(column, justify="right")
        for lr in sorted({config.optimizer.peak_lr for config in self._configs}):
            words = [Text(power(lr))]
            for column in columns:
                mean, final = (
                    means.get((lr, column), math.nan),
                    all(i in self._rows for i in places[lr, column]),
                )
                text = "" if math.isnan(mean) else "diverged" if math.isinf(mean) else f"{mean:.4f}"
                words.append(
                    Text(
                        text, style="bold green" if mean == best[column] else "" if final else "dim"
                    )
                )
            table.add_row(*words)
        return table


def _cost(config: Config) -> float:
    """FLOPs of a point, by which the time left is estimated."""
    return (
        families.train_flops(config.model)
        * config.data.batch_size
        * config.model.units
        * config.steps
    )
