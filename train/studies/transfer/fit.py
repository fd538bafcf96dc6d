"""Fit of one size's best learning rate: a weighted parabola through losses on a grid of rates.

The parabola goes, in log2 of the rate, through the seeds' mean losses within an octave of the
grid's best rate. On a coarser grid it goes through those of the best rate's neighbours. Real losses
are steeper above the optimum, while the grid and the parabola are symmetric, so the vertex lies up
to a tenth or two of an octave too low. Sizes whose curves have one shape share this bias.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

from mupax.train.studies.sweep.grids import power

STEP = 0.5
"""Octaves between neighbouring rates of a study's grid."""
OCTAVE = 1.0
"""Greatest distance of a rate in the fit from the best rate of the grid, in octaves."""
REACH = 1.5
"""Least distance from the fitted optimum at which the tricube weights are zero, in octaves."""
UNEVEN = 1.5
"""Distance from the best rate within which others are its neighbours, in multiples of the gap.

The gap is `Curve.gap`. The factor is above 1 because a grid may be uneven: 0.001, 0.003, 0.01.
"""
STEEP = 5.0
"""Greatest excess loss of a rate in the fit, in multiples of the median excess near the best rate.

The excess is the loss less that of the best rate. A rate with a greater loss lies past the edge of
stability and on no parabola.
"""
NOISE = (
    "its losses near the best rate are not convex",
    "the fitted minimum lies outside the rates that trained",
)
"""Texts of `Fit.trouble` for a curve without a minimum that more seeds may give one."""
ROUNDS = 6
"""Number of fits of a parabola, each with weights centred at the vertex of the fit before."""
SIDES = 2
"""Number of rates to measure on either side of the best one; 1 on grids coarser than `STEP`."""


@dataclasses.dataclass(frozen=True)
class Curve:
    """Losses of one size at a grid of learning rates.

    Attributes:
        x: log2 of the rates [R], increasing. In a study, multiples of `STEP`.
        losses: Losses [R, S], inf where a seed diverged, NaN where it was not run.
        first: Number of first columns of `losses` whose mean tells the best rate. Later seeds are
            trained only near the minimum.
    """

    x: np.ndarray
    losses: np.ndarray
    first: int
    _fits: dict[int, Fit] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Fits by number of seeds. A study asks for them in every round."""

    @functools.cached_property
    def mean(self) -> np.ndarray:
        """Mean loss of each rate over the seeds that it has, [R]. inf where one of them diverged.

        Only the first `first` seeds count.
        """
        return np.nanmean(self.losses[:, : self.first], axis=1)

    @functools.cached_property
    def best(self) -> int:
        """Index of the rate with the least mean. 0 if every rate diverged."""
        return int(np.argmin(np.where(np.isfinite(self.mean), self.mean, np.inf)))

    @functools.cached_property
    def gap(self) -> float:
        """Octaves from the best rate to the nearest other rate; `STEP` if there is no other."""
        other_rates = np.delete(self.x, self.best)
        distances = np.abs(other_rates - self.x[self.best])
        return float(min(distances, default=STEP))

    def window(self) -> np.ndarray:
        """Return a mask of the rates near the best one, to which a parabola is fitted, bool [R].

        All are false if every rate diverged. The mask depends on the first `first` seeds alone, so
        that later seeds do not move it.
        """
        return self._window

    @functools.cached_property
    def _window(self) -> np.ndarray:
        mean = self.mean
        is_finite = np.isfinite(mean)
        if not is_finite.any():
            return np.zeros(len(mean), bool)

        distance = np.abs(self.x - self.x[self.best])
        # 1e-9, so that a rate exactly an octave away is in despite rounding.
        near = (distance <= max(OCTAVE, UNEVEN * self.gap) + 1e-9) & is_finite
        excess = mean - mean[self.best]
        positive = excess[near & (excess > 0)]
        steep = STEEP * np.median(positive) if positive.size else np.inf
        return near & (excess <= steep)

    def missing(self, step: float = STEP) -> list[float]:
        """Return the rates to add so that the best rate has measured neighbours on either side.

        These are two on each side for steps up to `STEP`, otherwise one. Beyond a rate that
        diverged none is added. If every rate diverged, four rates below the smallest are returned.

        Args:
            step: Distance between neighbours, in octaves.

        Returns:
            log2 of the rates; empty if none is missing.
        """
        mean = self.mean
        if not np.isfinite(mean).any():
            # Every rate diverged, so the search goes on below the smallest one.
            return [float(self.x[0]) - step * n for n in range(1, 2 * SIDES + 1)]

        best = self.x[self.best]
        neighbours = SIDES if step <= STEP + 1e-9 else 1
        rates = []
        for side in (-1, 1):
            for n in range(1, neighbours + 1):
                rate = float(best + side * n * step)
                measured = mean[np.abs(self.x - rate) <= (UNEVEN - 1) * step + 1e-9]
                if not len(measured):
                    rates.append(rate)
                # Rates beyond one that diverged would most likely diverge, too.
                elif not np.isfinite(measured).all():
                    break
        return rates


@dataclasses.dataclass(frozen=True)
class Fit:
    """Best learning rate of one size: the minimum of a parabola that is fitted to its losses.

    `optimum`, `loss` and `curvature` are NaN if there is `trouble`.

    Attributes:
        optimum: log2 of the best learning rate.
        loss: Loss at the optimum.
        curvature: Loss per octave squared (half the second derivative).
        used: log2 of the rates in the fit.
        trouble: Why there is no optimum. Empty if there is one.
        missing: log2 of the rates to add if the grid ends or is too coarse near the best rate.
    """

    optimum: float
    loss: float
    curvature: float
    used: tuple[float, ...]
    trouble: str = ""
    missing: tuple[float, ...] = ()

    @property
    def why(self) -> str:
        """Reason why there is no optimum, and the rates to train at to find one.

        Empty if there is an optimum.
        """
        rates = ", ".join(power(2.0**x) for x in self.missing)
        return f"{self.trouble}; train at {rates} too" if rates else self.trouble


def projection(x: np.ndarray, centre: float) -> np.ndarray:
    """Return the linear map from losses to the coefficients of their weighted parabola, [3, n].

    The parabola is c + b * u + a * u^2 with u = x - centre. The rows of the map are c, b and a.
    Rates beyond `REACH` octaves from the centre have no weight. On a coarse grid the reach grows.

    Args:
        x: log2 of the rates [n], increasing, at least three.
        centre: Centre of the tricube weights, in log2 of the rate.
    """
    # On a coarse grid the reach grows, so that three rates have weight wherever the centre is.
    reach = max(REACH, REACH * float((x[2:] - x[:-2]).max()))
    # Powers of x itself would make the normal matrix ill-conditioned.
    u = x - centre
    weight = np.clip(1 - np.abs(u / reach) ** 3, 0, None) ** 3
    powers = np.array((np.ones_like(u), u, u * u))
    weighted = powers * weight
    return np.linalg.solve(weighted @ powers.T, weighted)


def parabola(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """Return vertex, loss at the vertex, and curvature of a weighted parabola through losses.

    The curvature is half the second derivative. All three are NaN if the parabola opens downwards.
    The weights are centred at the vertex, which is found by a few iterations from the rate with the
    least loss.

    Args:
        x: log2 of the rates [n], increasing, at least three.
        y: Losses [n], finite.
    """
    centre = float(x[np.argmin(y)])
    vertex = math.nan
    loss = math.nan
    curvature = math.nan
    for _ in range(ROUNDS):
        c, b, a = map(float, projection(x, centre) @ y)
        if a <= 0:
            return math.nan, math.nan, math.nan
        offset = -b / (2 * a)
        vertex = centre + offset
        loss = c + b * offset + a * offset**2
        curvature = a
        # Without the clip a far vertex would leave no rate with weight, and the solve is singular.
        centre = float(np.clip(vertex, x[0], x[-1]))
    return vertex, loss, curvature


def fit(curve: Curve, seeds: int) -> Fit:
    """Return the minimum of a parabola through a curve, or a `Fit` with `trouble` if it has none.

    The result is cached in the curve for each number of seeds.

    Args:
        seeds: Number of seeds whose mean is fitted, counted from the first. At least 1.
    """
    if seeds not in curve._fits:
        curve._fits[seeds] = _fitted(curve, seeds)
    return curve._fits[seeds]


def _fitted(curve: Curve, seeds: int) -> Fit:
    """Fit a parabola to the rates of a curve's window at which all `seeds` seeds trained.

    The result has `trouble` and no optimum if every rate diverged, all losses are equal, the best
    rate is at the end of the grid, fewer than three rates are left, or the parabola has no minimum
    between the rates.
    """
    window = curve.window()
    # A rate at which a later seed diverged leaves the fit but stays in the window.
    trained = window & np.isfinite(curve.losses[:, :seeds]).all(axis=1)
    used = tuple(float(x) for x in curve.x[trained])

    def without_optimum(trouble: str, missing: Sequence[float] = ()) -> Fit:
        return Fit(math.nan, math.nan, math.nan, used, trouble, tuple(missing))

    if not window.any():
        return without_optimum("every rate diverged")
    finite = curve.mean[np.isfinite(curve.mean)]
    # The first of equal losses counts as the best one, and is at the end of every grid.
    if len(finite) > 1 and finite.min() == finite.max():
        return without_optimum("every rate that trained has the same loss")
    missing = curve.missing(curve.gap)
    if missing:
        return without_optimum("its best rate is at the end of the grid", missing)
    if len(used) < 3:
        best = curve.x[curve.best]
        between = [float(best + side * curve.gap / 2) for side in (-1, 1)]
        return without_optimum(
            "fewer than three rates near the best one trained from every seed", between
        )

    mean = curve.losses[trained, :seeds].mean(axis=1)
    vertex, loss, curvature = parabola(curve.x[trained], mean)
    not_convex, outside = NOISE
    if math.isnan(curvature):
        return without_optimum(not_convex)
    if not used[0] <= vertex <= used[-1]:
        return without_optimum(outside)
    return Fit(vertex, loss, curvature, used)
