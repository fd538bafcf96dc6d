"""Elimination of a search's points: a point is dropped if another is better by more than noise.

Seed s starts every point alike, and all points see the same batches. What a seed does to all points
is therefore no noise of a difference between two points. A loss is modelled as point + seed + e,
with independent e of one spread sigma.

* **sigma** is the root of the residual mean square of the additive fit, over the better half of the
  points with two seeds or more (at least `LEAST` points), because bad points are noisier.
* **Rule.** A point is dropped if another point is better, on the n seeds that both have, by more
  than t(1 - ERROR / looks, freedom) * sigma * sqrt(2 / n) in the mean. `looks` is the number of
  such comparisons that one point can meet in the whole search.
* **Error.** By Bonferroni's inequality the best point is dropped in at most a share `ERROR` of all
  searches if e is normal and of one spread. A point that is noisier than most, such as one near
  an edge of stability, is dropped more easily.

Without an estimate of sigma only diverged points are dropped.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

ERROR = 0.05
"""Share of searches in which the best point may be dropped."""
LEAST = 8
"""Least number of points from which sigma is estimated, if so many have two seeds."""


@dataclasses.dataclass(frozen=True)
class Elimination:
    """Result of comparing a search's P points: their means, and which of them are dropped.

    Attributes:
        means: Means of the points without the effects of their seeds, float [P]. inf where a seed
            diverged, NaN where no seed was trained.
        dropped: Index of a better point for each dropped point, int [P]. A diverged point has its
            own index. -1 where the point stays.
        sigma: Standard deviation of what neither point nor seed explains of a loss. NaN if unknown.
        freedom: Degrees of freedom of sigma.
        critical: sqrt(n) times the least mean difference over n seeds by which a point is dropped.
            inf if sigma is unknown.
    """

    means: np.ndarray
    dropped: np.ndarray
    sigma: float
    freedom: int
    critical: float

    @property
    def stays(self) -> np.ndarray:
        """Mask of the points that are not dropped, bool [P]."""
        return self.dropped < 0

    @property
    def best(self) -> int:
        """Index of the point with the lowest finite mean, 0 if there is none."""
        return int(np.argmin(np.where(np.isfinite(self.means), self.means, np.inf)))


def race(losses: np.ndarray, looks: int) -> Elimination:
    """Compare all points of a search by their losses, and decide which are dropped.

    Args:
        losses: Losses of P points from S seeds, float [P, S]. inf where a seed diverged, NaN where
            it was not trained. A point that has n seeds has the first n.
        looks: Number of comparisons that one point can meet in the whole search: number of points
            times number of seeds.
    """
    trained = ~np.isnan(losses)
    finite = np.isfinite(losses)
    diverged = np.any(trained & ~finite, axis=1)
    # A point that diverged on one seed is bad, and its other seeds would only widen sigma.
    used = finite & ~diverged[:, None]
    effects = _fit_effects(losses, used)
    sigma = effects.sigma
    freedom = effects.freedom

    several = np.nonzero(used.sum(axis=1) > 1)[0]
    if len(several) > LEAST:
        # Normal residuals are independent of the means, so choosing by the mean does not shrink
        # sigma.
        order = np.argsort(effects.means[several], kind="stable")
        better = several[order[: max(LEAST, math.ceil(len(several) / 2))]]
        better_effects = _fit_effects(losses[better], used[better])
        sigma = better_effects.sigma
        freedom = better_effects.freedom

    means = np.where(diverged, np.inf, effects.means)
    # A diverged point is dropped even if no point beats it, so its entry is its own index.
    dropped = np.where(diverged, np.arange(len(losses)), -1)
    if not freedom:
        return Elimination(means, dropped, sigma, freedom, critical=math.inf)

    # sqrt(2): a difference of two losses has twice the variance of one.
    critical = math.sqrt(2) * sigma * float(stdtrit(freedom, 1 - ERROR / looks))
    pairs_PPS = used[:, None] & used[None]
    count_PP = pairs_PPS.sum(axis=2)
    # Zeros in place of inf and NaN, because 0 * inf in the product below is NaN.
    values = np.where(used, losses, 0.0)
    differences_PPS = (values[:, None] - values[None]) * pairs_PPS
    # The sum over n seeds divided by sqrt(n) is the mean times sqrt(n).
    worse_PP = differences_PPS.sum(axis=2) / np.sqrt(np.maximum(count_PP, 1))
    beaten = (worse_PP > critical).any(axis=1)
    dropped = np.where(beaten, worse_PP.argmax(axis=1), dropped)
    return Elimination(means, dropped, sigma, freedom, critical)


class _Effects(NamedTuple):
    """Additive fit of the losses of P points: point + seed + residual.

    Attributes:
        means: Means of the points without the effects of seeds, [P]. NaN for a point without seeds.
        sigma: Standard deviation of the residuals. NaN without degrees of freedom.
        freedom: Degrees of freedom of sigma.
    """

    means: np.ndarray
    sigma: float
    freedom: int


def _fit_effects(losses: np.ndarray, used: np.ndarray) -> _Effects:
    """Fit losses of P points from S seeds, [P, S], as point + seed by least squares.

    Args:
        used: Mask of the losses that are fitted, bool [P, S].
    """
    point, seed = np.nonzero(used)
    means = np.full(len(losses), np.nan)
    if not len(point):
        return _Effects(means, math.nan, 0)

    # One column per point, then one per seed but the first, whose effect is 0.
    fitted_points = np.unique(point)
    num_points = len(fitted_points)
    # Seeds of a point are the first ones, so the largest index tells their number.
    num_seeds = int(seed.max()) + 1
    design = np.zeros((len(point), num_points + num_seeds - 1))
    design[np.arange(len(point)), np.searchsorted(fitted_points, point)] = 1.0
    later = seed > 0
    design[np.nonzero(later)[0], num_points + seed[later] - 1] = 1.0

    values = losses[point, seed]
    solution, _, rank, _ = np.linalg.lstsq(design, values, rcond=None)
    seed_effects = np.concatenate([[0.0], solution[num_points:]])
    # Rounded, so that points of equal losses have equal means.
    means[fitted_points] = np.round(solution[:num_points] + seed_effects.mean(), 10)

    # Not the number of columns: points without common seeds make columns dependent.
    freedom = len(point) - int(rank)
    residual = float(((values - design @ solution) ** 2).sum())
    sigma = math.sqrt(residual / freedom) if freedom > 0 else math.nan
    return _Effects(means, sigma, max(freedom, 0))
