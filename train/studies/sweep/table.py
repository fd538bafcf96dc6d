"""A sweep on the terminal: a table of rates by sizes that fills as points finish, and a bar.

If the console is no terminal, `LiveTable` prints a line per finished point instead.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table as RichTable
from rich.text import Text

from mupax.terminal import USUAL_WIDTH
from mupax.train.config.run import Config
from mupax.train.run.report.progress import duration
from mupax.train.studies.sweep.grids import power
from mupax.train.studies.sweep.rows import Row
from mupax.train.studies.sweep.work import SweepCallback
from mupax.zoo import families

METRICS = ("training loss", "evaluation loss")
"""Names of a point's loss without and with an evaluation after its last step."""


_CELL = len("diverged")
"""Width of the widest loss. No rate is wider."""


class _Cell(NamedTuple):
    """Position in the table: a learning rate and the label of a column."""

    peak_lr: float
    column: str


class LiveTable(SweepCallback):
    """Context manager that shows a table of losses and a progress bar while a sweep trains.

    Both are erased at its exit, so that a command can print its conclusion first and then the table
    by `show`. On a console that is no terminal it prints a line per finished point instead.

    Args:
        console: Console that the table is drawn on, which may be no terminal.
        columns: Label of each point's column, in the order of the points: its size and what else
            sets it apart from points of the same learning rate.
        evaluated: True if cells show the evaluation loss, False if they show the training loss.
    """

    def __init__(self, console: Console, columns: Sequence[str], *, evaluated: bool) -> None:
        self._console = console
        self._columns = list(columns)
        self._evaluated = evaluated
        self.metric = METRICS[evaluated]
        self._configs: Sequence[Config] = ()
        self._rows: dict[int, Row] = {}
        self._losses: dict[int, float] = {}
        """Last loss of each point in training or done."""
        self._shares: dict[int, float] = {}
        """Share of its steps that each point has done."""
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[points]} points"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bar.add_task("", total=None, points="")
        # A table taller than the terminal is cut at its end, so the bar comes first.
        self._live = Live(
            console=console,
            get_renderable=lambda: Group(self._bar, *self._legend_and_tables()),
            refresh_per_second=4,
            # Removed at the end, because `show` prints the table below the conclusion.
            transient=True,
        )

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def show(self) -> None:
        """Print the name of the loss and the table, or nothing if no point has finished."""
        if self._rows:
            self.note(f"{self.metric}, mean over seeds")
            self._console.print(*self._legend_and_tables(), sep="\n")

    def value(self, row: Row) -> float:
        """Return the loss of a finished point that the table shows.

        It is the evaluation loss if the points are evaluated, otherwise the training loss.
        """
        return row.final_loss if self._evaluated else row.loss

    def begin(self, configs: Sequence[Config], done: dict[int, Row]) -> None:
        self._configs = configs
        self._rows = dict(done)
        self._losses = {point: self.value(row) for point, row in done.items()}
        costs = []
        for point, config in enumerate(configs):
            if point not in done:
                costs.append(_cost(config))
        total_cost = sum(costs)
        self._bar.update(self._task, total=total_cost, points=f"{len(done)}/{len(configs)}")
        if done:
            self.note(f"{len(done)} of {len(configs)} points are done already")

    def note(self, text: str) -> None:
        """Print a line above the live table, where it is not erased."""
        self._console.print(text, highlight=False)

    def training(self, points: Sequence[int], step: int, losses: np.ndarray) -> None:
        for point, loss in zip(points, losses, strict=True):
            self._losses[point] = float(loss)
        for point in points:
            self._advance_to(point, step / self._configs[point].steps)
        self._bar.update(self._task, description=f"step {step}")

    def finished(self, point: int, row: Row) -> None:
        self._rows[point] = row
        self._losses[point] = self.value(row)
        self._advance_to(point, 1.0)
        progress = f"{len(self._rows)}/{len(self._configs)}"
        self._bar.update(self._task, points=progress)
        # On a terminal the live table shows the same.
        if self._console.is_terminal:
            return

        config = self._configs[point]
        rate = power(config.optimizer.peak_lr)
        name = f"{self._columns[point]}  lr {rate}  seed {config.seed}".strip()
        outcome = f"{self.metric} {self.value(row):.4f}"
        if row.diverged:
            outcome = f"diverged at step {row.diverged_at}"
        self.note(f"{progress}  {name}: {outcome}  ({duration(row.seconds)})")

    def _advance_to(self, point: int, share: float) -> None:
        """Record that a point has done this share of its steps, and advance the bar by the FLOPs.

        Args:
            share: Fraction of the point's steps that are done, from 0 to 1.
        """
        new_share = share - self._shares.get(point, 0.0)
        # In FLOPs, because a step of a large size takes longer than one of a small size.
        self._bar.advance(self._task, new_share * _cost(self._configs[point]))
        self._shares[point] = share

    def _legend_and_tables(self) -> list[Text | RichTable]:
        """Return the columns as one table, or a legend and tables that are narrow enough.

        If labels are too long for one table, columns are numbered, and the legend above has a line
        for each number. Columns that still do not fit are in further tables below.
        """
        # A pipe has no width, and its reader most likely a terminal's.
        width = min(self._console.width, USUAL_WIDTH)
        if self._console.is_terminal:
            width = self._console.width
        heads = {column: column or "loss" for column in dict.fromkeys(self._columns)}
        if _table_width(list(heads.values())) <= width:
            return [self._table(heads)]

        legend: list[Text | RichTable] = []
        if max(map(len, heads)) > _CELL:
            heads = {column: f"({number})" for number, column in enumerate(heads, 1)}
            legend = [Text(f"{head} {column}") for column, head in heads.items()]
        tables: list[Text | RichTable] = []
        block: dict[str, str] = {}
        for column, head in heads.items():
            if block and _table_width([*block.values(), head]) > width:
                tables.append(self._table(block))
                block = {}
            block[column] = head
        return [*legend, *tables, self._table(block)]

    def _table(self, heads: dict[str, str]) -> RichTable:
        """Return a table: learning rates down, columns across, mean losses in the cells.

        The lowest finite loss of a column is bold. Any other cell is dim until all of its points
        are finished.

        Args:
            heads: Label of each column to the text at its head.
        """
        points_of: dict[_Cell, list[int]] = defaultdict(list)
        for point, config in enumerate(self._configs):
            points_of[_Cell(config.optimizer.peak_lr, self._columns[point])].append(point)
        means = self._mean_losses(points_of)
        lowest = {column: _lowest(means, column) for column in heads}

        table = RichTable(box=None, pad_edge=False)
        table.add_column("rate", justify="right")
        for head in heads.values():
            table.add_column(head, justify="right")
        for peak_lr in sorted({config.optimizer.peak_lr for config in self._configs}):
            texts = [Text(power(peak_lr))]
            for column in heads:
                cell = _Cell(peak_lr, column)
                mean = means.get(cell, math.nan)
                style = ""
                # `lowest` is `None` in a column without a finite loss, which equals no mean.
                if mean == lowest[column]:
                    style = "bold green"
                elif not all(point in self._rows for point in points_of[cell]):
                    style = "dim"
                texts.append(Text(_mean_text(mean), style=style))
            table.add_row(*texts)
        return table

    def _mean_losses(self, points_of: dict[_Cell, list[int]]) -> dict[_Cell, float]:
        """Return the mean last loss of each cell, over its points that have one.

        The mean is inf if a point diverged, and nan before the first loss.

        Args:
            points_of: Indices of the points of each cell.
        """
        means = {}
        # `Live` draws in a thread of its own, while a point may be added to `_losses`.
        last_losses = dict(self._losses)
        for cell, points in points_of.items():
            losses = []
            for point in points:
                if point in last_losses:
                    losses.append(last_losses[point])
            finite_losses = [loss if math.isfinite(loss) else math.inf for loss in losses]
            means[cell] = float(np.mean(finite_losses or [math.nan]))
        return means


def _table_width(heads: Sequence[str]) -> int:
    """Return the width of a table with these heads, at most: a gap and a cell for each column."""
    return _CELL + sum(2 + max(_CELL, len(head)) for head in heads)


def _lowest(means: dict[_Cell, float], column: str) -> float | None:
    """Return the lowest finite mean of a column, or `None` without one."""
    finite_means = []
    for cell, mean in means.items():
        if cell.column == column and math.isfinite(mean):
            finite_means.append(mean)
    return min(finite_means, default=None)


def _mean_text(mean: float) -> str:
    """Return the text of a cell: "" for nan, "diverged" for inf, otherwise four decimals."""
    if math.isnan(mean):
        return ""
    if math.isinf(mean):
        return "diverged"
    return f"{mean:.4f}"


def _cost(config: Config) -> float:
    """Return the training FLOPs of a point, by which the bar estimates the time left."""
    flops_per_unit = families.train_flops(config.model)
    return flops_per_unit * config.data.batch_size * config.model.units * config.steps
