"""A search on the terminal: the constants with their ranges, what they were and what is best so far, and a bar for the round."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from rich.console import Console
from rich.table import Table as RichTable

from mupax.train.config.run import Config
from mupax.train.studies.sweep.rows import Row
from mupax.train.studies.sweep.table import Table
from mupax.train.studies.tune.search import Run, Search


class Board(Table):
    """Shows a search while entered; a line per finished run where the terminal cannot draw.

    Args:
        console: where.
        search: what it shows.
        metric: what a loss is, such as "training loss".
        value: of a row, that number.
    """

    def __init__(self, console: Console, search: Search, metric: str, value: Callable[[Row], float]) -> None:
        self._search = search  # which `table` shows from the first
        super().__init__(console, [], metric, value)

    def __exit__(self, *error: object) -> None:
        """Leave the table out where the search ended: `report.told` prints the constants below its answer."""
        self._live.stop()
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
            numbers = (constant.low, constant.high, constant.own, constant.value(step))
            table.add_row(constant.word, *(f"{number:.4g}" for number in numbers))
        return table
