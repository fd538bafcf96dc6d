"""How far the best learning rate drifts as the size doubles, what not tuning costs, and how sure both are.

Intervals are 95 % and come from a bootstrap over seeds, paired over sizes: each resample takes the same seeds at every size,
so that what a seed does to all sizes alike is no noise of the drift. A bootstrap of S values is too narrow for small S, by
sqrt((S-1)/S) in its spread and by using a normal quantile where Student's is meant; so the half-width is
t(0.975, S-1) * sqrt(S/(S-1)) times the standard deviation of the resamples, which for a mean is exactly Student's interval
(13 standard errors for two seeds, 4.3 for three). One seed has no interval. What all seeds share, the order of the data and
the parabola's own bias on a grid of half octaves, is not in it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from scipy.special import stdtrit

from mupax.train.studies.transfer.fit import OCTAVE, Curve, Fit, fit, parabola

TOLERANCE = 0.15
"""Octaves per doubling that count as no drift, and the half-width of an interval that decides."""
RESAMPLES = 1000
FAILED = 0.025
"""Share of resamples without a minimum from which on a price has no interval."""

Resampled = tuple[np.ndarray, np.ndarray, np.ndarray]


def finite(value: float, digits: int = 6) -> float | None:
    """The value rounded, or None where it is not finite.

    Args:
        value: any number.
        digits: after the point.
    """
    return round(float(value), digits) if math.isfinite(value) else None


@dataclasses.dataclass(frozen=True)
class Interval:
    """An estimate and its 95 % interval; infinite where nothing bounds it."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half the width of the interval."""
        return (self.high - self.low) / 2

    def to_json(self, digits: int = 6) -> dict[str, float | None]:
        """Rounded ends and value; None where not finite."""
        return {name: finite(value, digits) for name, value in dataclasses.asdict(self).items()}

    def meets(self, low: float, high: float) -> bool:
        """Whether the interval has a point of [low, high].

        Args:
            low: its lower end.
            high: its upper end, itself included.
        """
        return self.low <= high and self.high >= low


@dataclasses.dataclass(frozen=True)
class Analysis:
    """What the curves of one study say.

    Attributes:
        seeds: that the fits use, the same at every size.
        fits: per size.
        optima: log2 of the best rate per size; nan where its fit has trouble.
        drift: octaves per doubling of the size, by least squares over the sizes that have an optimum.
        prices: per size, the loss at the smallest size's best rate over that at its own; nan where it is not known.
        worse: (size, log2 rate, how much worse) where a size is worse than the one before it, at rates within an octave of
            the smallest size's best.
        compared: how many neighbouring sizes and rates `worse` was sought among.
    """

    sizes: tuple[int, ...]
    seeds: int
    fits: tuple[Fit, ...]
    optima: tuple[Interval, ...]
    drift: Interval
    prices: tuple[Interval, ...]
    worse: tuple[tuple[int, float, Interval], ...]
    compared: int

    @property
    def verdict(self) -> Literal["transfers", "drifts", "undecided"]:
        """transfers: the drift is known to `TOLERANCE` and can be 0 up to it; drifts: its interval leaves 0 out; else undecided.

        Without an optimum at the largest and the smallest size nothing is said to transfer.
        """
        if not math.isfinite(self.drift.value):
            return "undecided"
        ends = not (self.fits[0].trouble or self.fits[-1].trouble)
        if ends and self.drift.half_width <= TOLERANCE and self.drift.meets(-TOLERANCE, TOLERANCE):
            return "transfers"
        return "undecided" if self.drift.meets(0, 0) else "drifts"


def analyse(sizes: Sequence[int], curves: Sequence[Curve]) -> Analysis:
    """The fit of every size, with intervals on the optima, the drift and the prices.

    Args:
        sizes: what grows, increasing.
        curves: of each size.
    """
    seeds = _paired_seeds(curves)
    fits = tuple(fit(curve, seeds) for curve in curves)
    drawn = np.random.default_rng(0).integers(0, max(seeds, 1), (RESAMPLES, max(seeds, 1)))
    resampled = [_resampled(curve, f, drawn) for curve, f in zip(curves, fits, strict=True)]
    fitted = [i for i, f in enumerate(fits) if not f.trouble]
    drift = Interval(math.nan, -math.inf, math.inf)
    if len(fitted) > 1:
        doublings = np.log2(np.asarray(sizes, float))[fitted]
        centred = doublings - doublings.mean()
        slope = centred / (centred @ centred)  # weights of the optima whose sum is the least-squares slope
        resamples = sum((s * resampled[i][0] for s, i in zip(slope, fitted, strict=True)), np.zeros(RESAMPLES))
        drift = _interval(float(slope @ [fits[i].optimum for i in fitted]), resamples, seeds)
    prices = tuple(
        _price(c, fits[0], f, resampled[0], r, drawn) for c, f, r in zip(curves, fits, resampled, strict=True)
    )
    optima = tuple(_interval(f.optimum, r[0], seeds) for f, r in zip(fits, resampled, strict=True))
    return Analysis(tuple(sizes), seeds, fits, optima, drift, prices, *_worse(sizes, curves, fits[0]))


def _paired_seeds(curves: Sequence[Curve]) -> int:
    """Seeds, counted from the first, that every size has at every rate of its window."""
    shortest = min(curve.losses.shape[1] for curve in curves)
    together = np.concatenate([~np.isnan(curve.losses[curve.window(), :shortest]) for curve in curves]).all(axis=0)
    return shortest if together.all() else int(np.argmin(together))


def widening(seeds: int) -> float:
    """Standard deviations of the resamples in a half-width; see the module's text."""
    return float(stdtrit(seeds - 1, 0.975)) * math.sqrt(seeds / (seeds - 1)) if seeds > 1 else math.inf


def _interval(value: float, resamples: np.ndarray, seeds: int, lowest: float = -math.inf) -> Interval:
    good = resamples[np.isfinite(resamples)]
    if not math.isfinite(value) or seeds < 2 or len(good) < (1 - FAILED) * len(resamples):
        return Interval(value, lowest, math.inf)
    half = widening(seeds) * float(good.std())
    return Interval(value, max(lowest, value - half), value + half)


def _resampled(curve: Curve, f: Fit, drawn: np.ndarray) -> Resampled:
    """Vertex, loss and curvature of each resample [B]; loss and curvature nan where it has no minimum, all where `f` has none."""
    if f.trouble:
        nothing = np.full(len(drawn), np.nan)
        return nothing, nothing, nothing
    means = curve.losses[np.isin(curve.x, f.used)][:, drawn].mean(axis=2).T
    vertex, loss, curvature = parabola(np.asarray(f.used), means)
    # A nearly flat resample has its vertex anywhere, one that opens downwards beyond its lower end: what is known is that it
    # lies near the window.
    low, high = f.used[0] - OCTAVE, f.used[-1] + OCTAVE
    ends = np.where(means[:, 0] < means[:, -1], low, high)
    return np.where(np.isnan(vertex), ends, np.clip(vertex, low, high)), loss, curvature


def _price(
    curve: Curve, base: Fit, own: Fit, base_resampled: Resampled, own_resampled: Resampled, drawn: np.ndarray
) -> Interval:
    """Loss at the base's best rate over the least loss: on the parabola within its rates, else between measured rates."""
    if base.trouble or own.trouble or not curve.x[0] <= base.optimum <= curve.x[-1]:
        return Interval(math.nan, -math.inf, math.inf)
    if own.used[0] <= base.optimum <= own.used[-1]:
        price = own.curvature * (base.optimum - own.optimum) ** 2
        spread = own_resampled[2] * (base_resampled[0] - own_resampled[0]) ** 2
        return _interval(price, spread, drawn.shape[1], 0.0)
    upper = int(np.searchsorted(curve.x, base.optimum))
    pair = [max(upper - 1, 0), upper]
    seeds = int((~np.isnan(curve.losses[pair])).all(axis=0).sum())
    at = np.interp(base.optimum, curve.x[pair], curve.losses[pair, :seeds].mean(axis=1))
    if not np.isfinite(at):
        return Interval(math.inf, math.inf, math.inf)
    own_drawn = drawn[:, :seeds] % seeds  # seeds added later exist only near the minimum
    lower, higher = curve.losses[pair][:, own_drawn].mean(axis=2)
    x = np.clip(base_resampled[0], *curve.x[pair])
    spread = lower + (higher - lower) * (x - curve.x[pair[0]]) / (curve.x[pair[1]] - curve.x[pair[0]])
    return _interval(float(at) - own.loss, spread - own_resampled[1], seeds, 0.0)


def _worse(
    sizes: Sequence[int], curves: Sequence[Curve], base: Fit
) -> tuple[tuple[tuple[int, float, Interval], ...], int]:
    """Where a size is worse than the one before it, and how many sizes and learning rates were compared."""
    worse, compared = [], 0
    for size, before, after in zip(sizes[1:], curves, curves[1:], strict=False):
        for x in np.intersect1d(before.x, after.x):
            small, large = before.losses[before.x == x][0], after.losses[after.x == x][0]
            mask = ~np.isnan(small + large)
            near = abs(x - base.optimum) <= OCTAVE  # never, where the base has no optimum
            if not near or np.isinf(small[: before.first]).any() or not mask.any():
                continue
            compared += 1
            with np.errstate(invalid="ignore"):  # two seeds that diverged
                change = large[mask] - small[mask]
                mean, seeds = float(change.mean()), len(change)
            if not np.isfinite(change).all():
                worse.append((size, float(x), Interval(math.inf, math.inf, math.inf)))
            elif mean > 0:
                half = stdtrit(seeds - 1, 0.975) * change.std(ddof=1) / math.sqrt(seeds) if seeds > 1 else math.inf
                worse.append((size, float(x), Interval(mean, mean - float(half), mean + float(half))))
    return tuple(worse), compared
