"""A search over constants: points in rounds, seeds for those that may be the best, and the winner against the start.

The first point is the run itself. A round of points spread over the ranges begins, later rounds are asked of the surrogate. Every
point is trained to its end from the first seed; then seed after seed those that the race has not dropped. What comes next is a
function of the rows so far alone, so a search that was stopped asks for the same points again and trains none twice.
The winner, lowest in the mean among those that have all seeds, meets the start on seeds that the search has not seen.
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
from mupax.train.studies.tune.over import Constant, Point, applied
from mupax.train.studies.tune.race import Elimination, race

FRESH = 100
"""First of the seeds on which the winner meets the start; the search has those below."""
SPREAD = 2
"""Points per constant that are spread over the ranges before the surrogate is asked."""

Run = tuple[Point, int]
"""A point and a seed, from 0."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What a search may use.

    Attributes:
        points: that are tried, the start included.
        batch: of them asked at once.
        seeds: of a point that is never dropped.
        confirm: fresh seeds for the winner and the start.
        minutes: of training in all.
        seed: of the points asked.
    """

    points: int = 64
    batch: int = 8
    seeds: int = 3
    confirm: int = 5
    minutes: float = 45.0
    seed: int = 0


@dataclasses.dataclass
class Search:
    """A search and the rows that it has so far.

    Attributes:
        config: the run that it starts from.
        constants: what is searched.
        limits: what it may use.
        points: asked so far, the start first.
        rows: of the runs that are trained.
        stopped: why it asks for no more; empty while it does.
    """

    config: Config
    constants: tuple[Constant, ...]
    limits: Limits
    points: list[Point] = dataclasses.field(default_factory=list)
    rows: dict[Run, Row] = dataclasses.field(default_factory=dict)
    stopped: str = ""

    def config_of(self, run: Run) -> Config:
        """The config of a run."""
        point, seed = run
        config = applied(self.config, self.constants, point)
        return grids.point(config, config.optimizer.peak_lr, config.seed + seed)

    @property
    def start(self) -> Point:
        """The run itself."""
        return (0,) * len(self.constants)

    @property
    def seconds(self) -> float:
        """Seconds of training so far."""
        return sum(row.seconds for row in self.rows.values())

    @property
    def losses(self) -> np.ndarray:
        """Float [points, seeds]; inf where one diverged, nan where it was not trained."""
        each = [self.losses_of(point, range(self.limits.seeds)) for point in self.points]
        return np.array(each, float).reshape(len(self.points), self.limits.seeds)

    def losses_of(self, point: Point, seeds: Iterable[int]) -> list[float]:
        """Return a point's losses; inf where it diverged, nan where it was not trained."""
        rows = [self.rows.get((point, seed)) for seed in seeds]
        return [
            math.nan if row is None else math.inf if row.diverged else row.final_loss
            for row in rows
        ]

    @property
    def fresh_seeds(self) -> range:
        """Seeds on which the winner meets the start."""
        return range(FRESH, FRESH + self.limits.confirm)

    def race(self) -> Elimination:
        """How the points stand."""
        return race(self.losses, self.limits.points * self.limits.seeds)

    @property
    def winner(self) -> Point:
        """The point with the lowest mean among those that stay with the most seeds."""
        standing, trained = self.race(), (~np.isnan(self.losses)).sum(axis=1)
        most = max(
            (n for n, stays in zip(trained, standing.stays, strict=True) if stays), default=0
        )
        means = np.where(standing.stays & (trained == most), standing.means, np.inf)
        return self.points[int(np.argmin(means))] if np.isfinite(means).any() else self.start

    def difference(self) -> Interval | None:
        """Loss of the winner less that of the start on fresh seeds, with its 95 % interval; None before there are two."""
        winner, start = (
            np.array(self.losses_of(point, self.fresh_seeds)) for point in (self.winner, self.start)
        )
        with np.errstate(invalid="ignore"):  # two seeds that diverged
            apart = winner - start
        return Interval.of_mean(apart) if len(apart) > 1 and np.isfinite(apart).all() else None

    def next_runs(self) -> list[Run]:
        """Runs to train next; none when the search is over, and then `stopped` says why."""
        if not self.stopped and (runs := self._next()):
            mean = self.seconds / max(len(self.rows), 1)
            if (
                self.seconds + mean * (len(runs) + 2 * self.limits.confirm)
                <= 60 * self.limits.minutes
            ):
                return runs
            self.stopped = f"the {self.limits.minutes:g} minutes would not hold another round"
            self.points = [point for point in self.points if (point, 0) in self.rows]
        pair = dict.fromkeys([self.winner, self.start])
        fresh = self.fresh_seeds if len(pair) == 2 else ()
        return [run for point in pair for seed in fresh if (run := (point, seed)) not in self.rows]

    def _next(self) -> list[Run]:
        """What the search itself wants: seeds of points that stay, then new points."""
        if self.points:
            trained, stays = (~np.isnan(self.losses)).sum(axis=1), self.race().stays
            open_to_seeds = stays & (trained < self.limits.seeds)
            if open_to_seeds.any():
                seed = int(trained[open_to_seeds].min())
                return [
                    (self.points[i], seed) for i in np.nonzero(open_to_seeds & (trained == seed))[0]
                ]
        if (left := self.limits.points - len(self.points)) <= 0:
            self.stopped = f"all {self.limits.points} points are tried"
            return []
        points = self._new_points(min(left, self.limits.batch))
        if not points:
            self.stopped = "every point of the ranges is tried"
        self.points += points
        return [(point, 0) for point in points]

    def _new_points(self, count: int) -> list[Point]:
        """New points: the start, then spread ones, then those of the surrogate."""
        first = [] if self.points else [self.start]
        tried = len(self.points) + len(first)
        if tried <= SPREAD * len(self.constants):
            each = surrogate.spread(self.constants, tried - 1, count - len(first), self.limits.seed)
            return [point for point in dict.fromkeys(first + each) if point not in self.points]
        return surrogate.ask(
            self.constants, self.points, self.race().means, count, self.limits.seed
        )


def measure(
    search: Search, run: Runner, watch: Callable[[Search, Sequence[Run]], None] = lambda *_: None
) -> None:
    """Train what a search asks for until it asks for no more.

    Args:
        search: to complete.
        run: trains runs, or has their rows from before.
        watch: called before each round with the search and what it will train.
    """
    while runs := search.next_runs():
        watch(search, runs)
        for each, row in zip(runs, run([search.config_of(each) for each in runs]), strict=True):
            search.rows[each] = row
