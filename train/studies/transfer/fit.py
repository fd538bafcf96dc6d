"""The best learning rate of one size from noisy losses on a grid of rates: a weighted parabola near the least one.

It goes, in log2 rate, through the seeds' mean losses within an octave of the grid's best, or through those of its neighbours
where the grid is coarser. The grid and the parabola are symmetric where real losses are steeper above the optimum, so it lies
up to a tenth or two of an octave too low; at sizes whose curves have one shape, alike.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

from mupax.train.studies.sweep.grids import power

STEP = 0.5
"""Octaves between neighbouring rates of a study's grid."""
OCTAVE = 1.0
"""The fit takes rates this near to the best one of the grid, in octaves."""
REACH = 1.5
"""The weights (tricube) reach zero at this distance from the fitted optimum, in octaves; on a coarse grid further out."""
UNEVEN = 1.5
"""A rate this many of the best one's gaps away is still next to it: grids as 0.001, 0.003, 0.01 are not even."""
STEEP = 5.0
"""A rate whose excess loss is so many times the median one in the window lies past the edge of stability, on no parabola."""
NOISE = (
    "its losses near the best rate are not convex",
    "the fitted minimum lies outside the rates that trained",
)
"""Troubles of a fit that more seeds may end."""
ROUNDS = 6
"""How often the weights of a parabola go to its vertex."""
SIDES = 2
"""Rates wanted on either side of the best one, where they are `STEP` apart; one where they are further."""


@dataclasses.dataclass(frozen=True)
class Curve:
    """Losses of one size.

    Attributes:
        x: log2 of the rates [R], increasing; of a study, multiples of `STEP`.
        losses: [R, S], inf where a seed diverged, nan where it was not run.
        first: seeds by which rates are chosen; those after them were only run near the minimum.
    """

    x: np.ndarray
    losses: np.ndarray
    first: int
    _fits: dict[int, Fit] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Fits by number of seeds, kept because a study asks for them in every round."""

    @functools.cached_property
    def mean(self) -> np.ndarray:
        """Mean over the first seeds that each rate has [R]; inf where one of them diverged."""
        return np.nanmean(self.losses[:, : self.first], axis=1)

    @functools.cached_property
    def best(self) -> int:
        """Index of the rate with the least mean, of the first where every rate diverged."""
        return int(np.argmin(np.where(np.isfinite(self.mean), self.mean, np.inf)))

    @functools.cached_property
    def gap(self) -> float:
        """Octaves from the best rate to the one next to it; `STEP` where there is no other."""
        return float(min(np.abs(np.delete(self.x, self.best) - self.x[self.best]), default=STEP))

    def window(self) -> np.ndarray:
        """Rates that the fit takes, bool [R]; none where every rate diverged.

        Chosen from the first seeds alone, so that seeds added later do not move it.
        """
        return self._window

    @functools.cached_property
    def _window(self) -> np.ndarray:
        mean, best = self.mean, self.best
        if not np.isfinite(mean).any():
            return np.zeros(len(mean), bool)
        near = (
            np.abs(self.x - self.x[best]) <= max(OCTAVE, UNEVEN * self.gap) + 1e-9
        ) & np.isfinite(mean)
        excess = mean - mean[best]
        above = excess[near & (excess > 0)]
        steep = STEEP * np.median(above) if above.size else np.inf
        return near & (excess <= steep)

    def missing(self, step: float = STEP) -> list[float]:
        """Rates (log2) to add until the best one has its neighbours on either side, `step` octaves apart.

        Beyond one that diverged none is wanted.
        """
        mean, best = self.mean, self.x[self.best]
        if not np.isfinite(mean).any():
            return [float(self.x[0]) - step * n for n in range(1, 2 * SIDES + 1)]
        rates = []
        for side in (-1, 1):
            for n in range(1, (SIDES if step <= STEP + 1e-9 else 1) + 1):
                rate = float(best + side * n * step)
                measured = mean[np.abs(self.x - rate) <= (UNEVEN - 1) * step + 1e-9]
                if not len(measured):
                    rates.append(rate)
                elif not np.isfinite(measured).all():
                    break
        return rates


@dataclasses.dataclass(frozen=True)
class Fit:
    """A size's minimum.

    Attributes:
        optimum: log2 of the best rate; nan where there is `trouble`.
        loss: at it.
        curvature: loss per octave squared (half the second derivative).
        used: log2 of the rates in the fit.
        trouble: why there is no optimum; empty where there is one.
        missing: log2 of the rates to add where the grid ends or is too coarse beside the best one.
    """

    optimum: float
    loss: float
    curvature: float
    used: tuple[float, ...]
    trouble: str = ""
    missing: tuple[float, ...] = ()

    @property
    def why(self) -> str:
        """The trouble, and the rates that may end it."""
        rates = ", ".join(power(2.0**x) for x in self.missing)
        return f"{self.trouble}; train at {rates} too" if rates else self.trouble


def projection(x: np.ndarray, centre: float) -> np.ndarray:
    """Return the linear map from losses to the coefficients of their weighted parabola [3, n].

    The parabola is c + b * u + a * u^2 of u = x - centre, and the rows are those of c, b and a.

    Args:
        x: log2 of the rates [n], increasing, at least three.
        centre: where the tricube weights are greatest.
    """
    # Three rates have weight wherever the centre is.
    reach = max(REACH, REACH * float((x[2:] - x[:-2]).max()))
    u = x - centre
    weight = np.clip(1 - np.abs(u / reach) ** 3, 0, None) ** 3
    powers = np.array((np.ones_like(u), u, u * u))
    weighted = powers * weight
    return np.linalg.solve(weighted @ powers.T, weighted)


def parabola(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """Return vertex, loss there and curvature of a weighted parabola; nan where it opens downwards.

    The weights are centred at the vertex, which is found by going there a few times from the least point.

    Args:
        x: log2 of the rates [n], increasing, at least three.
        y: losses [n], finite.
    """
    centre = float(x[np.argmin(y)])
    vertex = loss = curvature = math.nan
    for _ in range(ROUNDS):
        c, b, a = (float(value) for value in projection(x, centre) @ y)
        if a <= 0:
            return math.nan, math.nan, math.nan
        offset = -b / (2 * a)
        vertex = centre + offset
        loss = c + b * offset + a * offset**2
        curvature = a
        centre = float(np.clip(vertex, x[0], x[-1]))
    return vertex, loss, curvature


def fit(curve: Curve, seeds: int) -> Fit:
    """Return the minimum of a size's curve, from its first `seeds` seeds.

    Args:
        curve: of the size.
        seeds: counted from the first, whose mean is fitted.
    """
    if seeds not in curve._fits:
        curve._fits[seeds] = _fitted(curve, seeds)
    return curve._fits[seeds]


def _fitted(curve: Curve, seeds: int) -> Fit:
    window = curve.window()
    trained = window & np.isfinite(curve.losses[:, :seeds]).all(axis=1)
    used = tuple(float(x) for x in curve.x[trained])
    nothing = (math.nan, math.nan, math.nan, used)
    if not window.any():
        return Fit(*nothing, "every rate diverged")
    if missing := curve.missing(curve.gap):
        return Fit(*nothing, "its best rate is at the end of the grid", tuple(missing))
    if len(used) < 3:
        between = tuple(float(curve.x[curve.best] + side * curve.gap / 2) for side in (-1, 1))
        return Fit(
            *nothing, "fewer than three rates near the best one trained from every seed", between
        )
    mean = curve.losses[trained, :seeds].mean(axis=1)
    vertex, loss, curvature = parabola(curve.x[trained], mean)
    if math.isnan(curvature) or not used[0] <= vertex <= used[-1]:
        return Fit(*nothing, NOISE[0] if math.isnan(curvature) else NOISE[1])
    return Fit(vertex, loss, curvature, used)
