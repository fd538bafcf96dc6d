"""Search over constants: points in rounds, seeds for the best of them, and the winner's comparison.

* **First point**: the run itself. All later losses are compared with it.
* **New points** are spread over the ranges at first. Later rounds ask the surrogate.
* **Seeds.** Every point trains to its end from the first seed. Points that the elimination
  (`race.py`) has not dropped get one seed after another.
* **Winner**: the lowest mean among the points with all seeds. It meets the start on seeds that the
  search has not used.

What comes next depends on the rows so far alone. A search that was stopped therefore asks for the
same points again, and trains none twice.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from mupax.train.config.run import Config
from mupax.train.studies.sweep import grids
from mupax.train.studies.sweep.rows import Row
from mupax.train.studies.transfer.drift import Interval
from mupax.train.studies.transfer.study import Runner
from mupax.train.studies.tune import surrogate
from mupax.train.studies.tune.over import Constant, Point, with_point
from mupax.train.studies.tune.race import Elimination, race

FRESH = 100
"""First seed of the comparison of best point and start at the end. The search uses lower seeds."""
SPREAD = 2
"""Number of points per constant that are spread over the ranges before the surrogate chooses."""

Run = tuple[Point, int]
"""Training run of a search: a point and a seed from 0."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a search.

    Attributes:
        points: Number of points, the start included.
        batch: Number of new points in a round.
        seeds: Number of seeds of a point that is never dropped.
        confirm: Number of fresh seeds on which the best point and the start are compared at the
            end. The start is the run with no constant changed.
        minutes: Most minutes of training, all runs together.
        seed: Seed of the random numbers that choose the points.
    """

    points: int = 64
    batch: int = 8
    seeds: int = 3
    confirm: int = 5
    minutes: float = 45.0
    seed: int = 0


@dataclasses.dataclass
class Search:
    """State of a search: the chosen points and the rows of their finished runs.

    Attributes:
        config: Run from which the search starts.
        constants: Constants that are searched.
        limits: Limits of the search.
        points: Points chosen in all rounds, the start first.
        rows: Row of every finished run, runs on fresh seeds included.
        stopped: Reason why the search asks for no more points. Empty before.
    """

    config: Config
    constants: tuple[Constant, ...]
    limits: Limits
    points: list[Point] = dataclasses.field(default_factory=list)
    rows: dict[Run, Row] = dataclasses.field(default_factory=dict)
    stopped: str = ""

    def config_of(self, run: Run) -> Config:
        """Return the complete config of a run: `config` with the point's constants and the seed.

        The batches are the same for all seeds.

        Args:
            run: Point and seed from 0, which is added to the seed of `config`.
        """
        point, seed = run
        config = with_point(self.config, self.constants, point)
        # Seeds count from the run's own, so the start at seed 0 is the run itself.
        return grids.point(config, config.optimizer.peak_lr, config.seed + seed)

    @property
    def start(self) -> Point:
        """Point at which no constant differs from `config`: step 0 of every constant."""
        return (0,) * len(self.constants)

    @property
    def seconds(self) -> float:
        """Training time of all rows, in seconds."""
        return sum(row.seconds for row in self.rows.values())

    @property
    def losses(self) -> np.ndarray:
        """Losses, float [points, seeds]. inf where a run diverged, NaN where it was not trained.

        Seeds of the comparison at the end (`fresh_seeds`) are left out.
        """
        seeds = range(self.limits.seeds)
        losses = [self.losses_of(point, seeds) for point in self.points]
        return np.array(losses, float).reshape(len(self.points), self.limits.seeds)

    def losses_of(self, point: Point, seeds: Iterable[int]) -> list[float]:
        """Return a point's losses, evaluation losses if the runs are evaluated.

        A loss is inf where a run diverged, NaN where it was not trained.
        """
        losses = []
        for seed in seeds:
            row = self.rows.get((point, seed))
            if row is None:
                losses.append(math.nan)
            elif row.diverged:
                losses.append(math.inf)
            else:
                losses.append(row.final_loss)
        return losses

    @property
    def fresh_seeds(self) -> range:
        """Seeds on which winner and start are compared at the end. The search uses none of them."""
        # The winner was chosen by its losses on earlier seeds, so these are partly low by luck.
        return range(FRESH, FRESH + self.limits.confirm)

    def race(self) -> Elimination:
        """Return the comparison of all points by their losses, and which of them are dropped.

        It is computed at every call.
        """
        # Bonferroni counts the whole search, so the error does not depend on when one looks.
        return race(self.losses, self.limits.points * self.limits.seeds)

    @property
    def winner(self) -> Point:
        """Best point: the lowest mean loss among points that are not dropped and have most seeds.

        It is the start if no such point has a finite mean.
        """
        standing = self.race()
        num_seeds = self._num_seeds()
        # A stopped search may not have given any point all seeds.
        max_seeds = max(num_seeds[standing.stays], default=0)
        # A mean over fewer seeds may be the lowest by luck.
        complete = standing.stays & (num_seeds == max_seeds)
        means = np.where(complete, standing.means, np.inf)
        if not np.isfinite(means).any():
            return self.start
        return self.points[int(np.argmin(means))]

    def _num_seeds(self) -> np.ndarray:
        """Return the number of trained seeds of every point, [points]."""
        return (~np.isnan(self.losses)).sum(axis=1)

    def difference(self) -> Interval | None:
        """Return the best point's loss less that of the unchanged run, with its 95 % interval.

        The losses are those of the fresh seeds, which the search has not used. The result is `None`
        with fewer than two fresh seeds, or if one is not trained or diverged.
        """
        winner = np.array(self.losses_of(self.winner, self.fresh_seeds))
        start = np.array(self.losses_of(self.start, self.fresh_seeds))
        # inf - inf: a seed diverged at both points.
        with np.errstate(invalid="ignore"):
            differences = winner - start
        if len(differences) < 2 or not np.isfinite(differences).all():
            return None
        return Interval.of_mean(differences)

    def next_runs(self) -> list[Run]:
        """Return the runs to train next, and add their new points to `points`.

        When the search has tried its points, or the minutes do not suffice for another round,
        `stopped` is set. Points that were not trained are then removed from `points`. The last
        round trains the best point and the start again, on fresh seeds, to compare them. If the
        start itself is the best point, this round is left out. The list is empty when nothing is
        left to train.
        """
        if not self.stopped:
            runs = self._next_search_runs()
            if runs and self._has_time(runs):
                return runs
            if runs:
                self.stopped = f"the {self.limits.minutes:g} minutes would not hold another round"
                # Points of a round that is not trained do not belong to the search.
                self.points = [point for point in self.points if (point, 0) in self.rows]

        winner = self.winner
        if winner == self.start:
            # The start needs no comparison with itself.
            return []
        fresh_runs = []
        for point in (winner, self.start):
            for seed in self.fresh_seeds:
                if (point, seed) not in self.rows:
                    fresh_runs.append((point, seed))
        return fresh_runs

    def _has_time(self, runs: Sequence[Run]) -> bool:
        """Return True if the minutes left suffice for these runs and the comparison at the end.

        The time of a run is taken as the mean of all finished runs.
        """
        # Without a row the mean is 0, so that the first round always has time.
        mean_seconds = self.seconds / max(len(self.rows), 1)
        # The comparison of winner and start must fit, or the search ends without a result.
        remaining_runs = len(runs) + 2 * self.limits.confirm
        return self.seconds + mean_seconds * remaining_runs <= 60 * self.limits.minutes

    def _next_search_runs(self) -> list[Run]:
        """Return one more seed of the points that are not dropped, or the first seed of new points.

        New points are chosen once every point that is not dropped has all its seeds. They are added
        to `points`. The list is empty at the end of the search, and `stopped` then says why.
        """
        if self.points:
            num_seeds = self._num_seeds()
            needs_seeds = self.race().stays & (num_seeds < self.limits.seeds)
            if needs_seeds.any():
                # One seed at a time, so that points are dropped early.
                seed = int(num_seeds[needs_seeds].min())
                indices = np.nonzero(needs_seeds & (num_seeds == seed))[0]
                return [(self.points[index], seed) for index in indices]

        remaining = self.limits.points - len(self.points)
        if remaining <= 0:
            self.stopped = f"all {self.limits.points} points are tried"
            return []
        points = self._new_points(min(remaining, self.limits.batch))
        if not points:
            self.stopped = "no point of the ranges was found that is not tried"
        self.points += points
        return [(point, 0) for point in points]

    def _new_points(self, count: int) -> list[Point]:
        """Return up to `count` points that are not in `points` yet.

        The start comes first, then points spread over the ranges, until there are `SPREAD` per
        constant. Later points are chosen by the surrogate.
        """
        first = [] if self.points else [self.start]
        tried = len(self.points) + len(first)
        if tried > SPREAD * len(self.constants):
            means = self.race().means
            return surrogate.ask(self.constants, self.points, means, count, self.limits.seed)
        # The start is a point but no term of the sequence, hence tried - 1.
        spread = surrogate.spread(self.constants, tried - 1, count - len(first), self.limits.seed)
        # Two terms of the sequence may round to the same grid point.
        distinct = dict.fromkeys(first + spread)
        return [point for point in distinct if point not in self.points]


def measure(
    search: Search,
    run: Runner,
    watch: Callable[[Search, Sequence[Run]], None] = lambda search, runs: None,
) -> None:
    """Train the runs of a search, round by round, until it asks for no more.

    Args:
        search: Search whose points and rows are completed in place.
        run: Function that trains configs, or has their rows from before. It returns the rows in
            the same order.
        watch: Called before each round with the search and the runs of the round.
    """
    runs = search.next_runs()
    while runs:
        watch(search, runs)
        rows = run([search.config_of(item) for item in runs])
        for item, row in zip(runs, rows, strict=True):
            search.rows[item] = row
        runs = search.next_runs()
