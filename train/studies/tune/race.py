"""Which points of a search are worse than another by more than what seeds do, so that they need no more seeds.

Seed s starts every point alike and all points see the same batches, so what a seed does to all of them is no noise of a
difference. A loss is taken as point + seed + e, and sigma, the spread of e, is estimated from all points with two seeds or more:
the residual mean square of the additive fit, over the better half of them (eight at least), since bad points are
noisier. A point is dropped where some other is better on the n seeds that both have by more
than t(1 - ERROR / looks, freedom) * sigma * sqrt(2 / n) in the mean, looks being how many such comparisons one point can meet in
the whole search. By Bonferroni's inequality the best point is dropped in at most ERROR of all searches where e is normal and of one
spread. Without an estimate of sigma nothing is dropped but what diverges.

A noisier point than most is dropped more easily than that, one near an edge of stability, say.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from scipy.special import stdtrit

ERROR = 0.05
"""Share of searches in which the best point may be dropped."""
LEAST = 8
"""Points that the spread of the noise is estimated from, where there are so many."""


@dataclasses.dataclass(frozen=True)
class Elimination:
    """Elimination of points by their losses so far.

    Attributes:
        means: of each point without what its seeds do, float [P]; inf where a seed diverged, nan where none was trained.
        dropped: index of the point that each is worse than, int [P]; its own where a seed diverged, -1 where it stays.
        sigma: spread of a loss that neither point nor seed explains; nan where it is not known.
        freedom: degrees of freedom of the estimate.
        critical: what a mean difference over n seeds must exceed, times sqrt(n); inf where sigma is not known.
    """

    means: np.ndarray
    dropped: np.ndarray
    sigma: float
    freedom: int
    critical: float

    @property
    def stays(self) -> np.ndarray:
        """Points not dropped, bool [P]."""
        return self.dropped < 0

    @property
    def best(self) -> int:
        """Index of the point with the lowest mean."""
        return int(np.argmin(np.where(np.isfinite(self.means), self.means, np.inf)))


def race(losses: np.ndarray, looks: int) -> Elimination:
    """How points stand after the seeds that they have.

    Args:
        losses: float [P, S], inf where it diverged, nan where it was not trained; a point's seeds are the first ones.
        looks: comparisons that one point can meet in the whole search: most points times most seeds.
    """
    trained, finite = ~np.isnan(losses), np.isfinite(losses)
    diverged = np.any(trained & ~finite, axis=1)
    used = finite & ~diverged[:, None]
    means, sigma, freedom = _additive(losses, used)
    several = np.nonzero(used.sum(axis=1) > 1)[0]
    if (
        len(several) > LEAST
    ):  # residuals do not know which means are low: choosing by the mean does not make sigma smaller
        better = several[
            np.argsort(means[several], kind="stable")[: max(LEAST, math.ceil(len(several) / 2))]
        ]
        _, sigma, freedom = _additive(losses[better], used[better])
    means = np.where(diverged, np.inf, means)
    critical = (
        math.sqrt(2) * sigma * float(stdtrit(freedom, 1 - ERROR / looks)) if freedom else math.inf
    )
    dropped = np.where(diverged, np.arange(len(losses)), -1)
    if freedom:
        pairs = used[:, None] & used[None]  # [P, P, S]
        count = pairs.sum(axis=2)
        values = np.where(used, losses, 0.0)
        worse = ((values[:, None] - values[None]) * pairs).sum(axis=2) / np.sqrt(
            np.maximum(count, 1)
        )  # mean * sqrt(n)
        beaten = (worse > critical).any(axis=1)
        dropped = np.where(beaten, worse.argmax(axis=1), dropped)
    return Elimination(means, dropped, sigma, freedom, critical)


def _additive(losses: np.ndarray, used: np.ndarray) -> tuple[np.ndarray, float, int]:
    """Means of the points [P] without the effects of seeds, spread of the residuals and their degrees of freedom."""
    point, seed = np.nonzero(used)
    means = np.full(len(losses), np.nan)
    if not len(point):
        return means, math.nan, 0
    own = np.unique(point)
    seeds = int(seed.max()) + 1
    design = np.zeros((len(point), len(own) + seeds - 1))
    design[np.arange(len(point)), np.searchsorted(own, point)] = 1.0
    later = seed > 0
    design[np.nonzero(later)[0], len(own) + seed[later] - 1] = 1.0
    values = losses[point, seed]
    solution, _, rank, _ = np.linalg.lstsq(design, values, rcond=None)
    effects = np.concatenate([[0.0], solution[len(own) :]])
    means[own] = np.round(
        solution[: len(own)] + effects.mean(), 10
    )  # equal losses have equal means
    freedom = len(point) - int(rank)
    residual = float(((values - design @ solution) ** 2).sum())
    return means, math.sqrt(residual / freedom) if freedom > 0 else math.nan, max(freedom, 0)
