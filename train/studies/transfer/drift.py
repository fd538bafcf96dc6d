"""How far the best learning rate drifts as the size doubles, what not retuning costs, and how sure both are.

The best rate of a size from S seeds is, to first order, the mean of S numbers: each seed's own best rate, read from the slope
of its losses at the vertex of the mean's parabola. Their scatter gives the standard error, with S - 1 degrees of freedom.
The drift is a weighted sum of such means, one per size. Its interval is that of Welch and Satterthwaite: each size has its own
scatter, and the degrees of freedom of all sizes count, so that three seeds at four sizes have about six and not two.

Sizes are taken as independent. A seed gives models of different sizes different weights, and in the published studies what a
seed does at one size says nothing of another (`python -m scripts.studies.verdicts` prints the correlation). Were it alike at all
sizes, the intervals would be too wide and not too narrow. `docs/evidence/transfer.md` has the coverage of 3, 5 and 8 seeds, simulated.

One seed has no interval. An interval leaves out what all seeds share: the order of the data, and the bias of a parabola on a
grid of half octaves.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from scipy.special import stdtrit

from mupax.presets.tuned.judgement import BOUND, TOLERANCE, Verdict, judge
from mupax.train.studies.report import finite
from mupax.train.studies.transfer.fit import OCTAVE, Curve, Fit, fit, projection

__all__ = ["BOUND", "CONFIDENCE", "TOLERANCE", "Analysis", "Interval", "Scatter", "analyse"]

CONFIDENCE = 0.975
"""Upper quantile of a two-sided interval of 95 %."""
EARLY = 0.99
"""The same for a verdict that ends a study before its last seed. A look after every seed is one chance more to be wrong, so an
early end needs an interval of 98 %: with 95 % a drift of 0.30 would be called `transfers` in 6 % of the noisier studies."""
MOST_SEEDS = 200
"""Seeds beyond which none are proposed."""


@dataclasses.dataclass(frozen=True)
class Interval:
    """An estimate and its 95 % interval; infinite where nothing bounds it."""

    value: float
    low: float
    high: float

    @classmethod
    def of_mean(cls, values: np.ndarray) -> Interval:
        """Return the mean of independent values [n] with its interval."""
        seeds = len(values)
        half = (
            stdtrit(seeds - 1, CONFIDENCE) * values.std(ddof=1) / math.sqrt(seeds)
            if seeds > 1
            else math.inf
        )
        return _interval(float(values.mean()), float(half))

    @property
    def half_width(self) -> float:
        """Half the width of the interval."""
        return (self.high - self.low) / 2

    def to_json(self, digits: int = 6) -> dict[str, float | None]:
        """Return rounded ends and value, None where not finite."""
        return {name: finite(value, digits) for name, value in dataclasses.asdict(self).items()}

    def meets(self, low: float, high: float) -> bool:
        """Return whether the interval has a point of [low, high]."""
        return self.low <= high and self.high >= low


@dataclasses.dataclass(frozen=True)
class Scatter:
    """Differences between the seeds of one size.

    Attributes:
        optimum: standard deviation of one seed's best rate, in octaves; nan where the size has no fit or one seed.
        curvature: relative 95 % half-width of the curvature that all seeds give; nan as above.
    """

    optimum: float
    curvature: float


@dataclasses.dataclass(frozen=True)
class Analysis:
    """Fits, drift, prices and verdict of one study's curves.

    Attributes:
        seeds: seeds that the fits use, the same at every size.
        fits: per size.
        optima: log2 of the best rate per size; nan where its fit has trouble.
        drift: octaves per doubling of the size, by least squares over the sizes that have an optimum.
        prices: per size, the loss at the smallest size's best rate over that at its own; nan where it is not known.
        worse: (size, log2 rate, how much worse) where a size is worse than the one before it, at rates within an octave of
            the smallest size's best.
        compared: how many neighbouring sizes and rates `worse` was sought among.
        scatters: per size.
    """

    sizes: tuple[int, ...]
    seeds: int
    fits: tuple[Fit, ...]
    optima: tuple[Interval, ...]
    drift: Interval
    prices: tuple[Interval, ...]
    worse: tuple[tuple[int, float, Interval], ...]
    compared: int
    scatters: tuple[Scatter, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """The verdict of `judge`. Nothing transfers without an optimum at the smallest and at the largest size."""
        verdict = judge(self.drift.value, self.drift.low, self.drift.high)
        if verdict == "transfers" and (self.fits[0].trouble or self.fits[-1].trouble):
            return "undecided"
        return verdict

    @property
    def settled(self) -> bool:
        """True if an interval of 98 % gives the same verdict, so that no more seeds are needed."""
        if self.verdict == "undecided":
            return False
        _, deviations = _slope_terms(self.sizes, self.fits, self.scatters)
        half = _half_width(deviations, self.seeds, EARLY)
        return (
            judge(self.drift.value, self.drift.value - half, self.drift.value + half)
            == self.verdict
        )

    def seeds_to_decide(self) -> int | None:
        """Return the number of further seeds that would decide if drift and scatter stayed as they are.

        None where the ends have no optimum, or where more than `MOST_SEEDS` would be needed.
        """
        if self.fits[0].trouble or self.fits[-1].trouble or self.seeds < 2:
            return None
        _, deviations = _slope_terms(self.sizes, self.fits, self.scatters)
        for seeds in range(self.seeds, MOST_SEEDS + 1):
            half = _half_width(deviations, seeds)
            if (
                judge(self.drift.value, self.drift.value - half, self.drift.value + half)
                != "undecided"
            ):
                return seeds - self.seeds
        return None


def analyse(sizes: Sequence[int], curves: Sequence[Curve]) -> Analysis:
    """Fit every size, and return the fits with intervals on the optima, the drift and the prices.

    Args:
        sizes: what grows, increasing.
        curves: of each size.
    """
    seeds = _paired_seeds(curves)
    fits = tuple(fit(curve, seeds) for curve in curves)
    scatters = tuple(
        _scatter(curve, fitted_curve, seeds)
        for curve, fitted_curve in zip(curves, fits, strict=True)
    )
    optima = tuple(
        _interval(fitted_curve.optimum, _half_width(np.array([scatter.optimum]), seeds))
        for fitted_curve, scatter in zip(fits, scatters, strict=True)
    )
    drift = _drift(sizes, fits, scatters, seeds)
    prices = tuple(
        _price(index, curves[index], fits, scatters, seeds) for index in range(len(fits))
    )
    worse, compared = _worse(sizes, curves, fits[0])
    return Analysis(tuple(sizes), seeds, fits, optima, drift, prices, worse, compared, scatters)


def _paired_seeds(curves: Sequence[Curve]) -> int:
    """Return how many seeds, counted from the first, every size has at every rate of its window."""
    shortest = min(curve.losses.shape[1] for curve in curves)
    together = np.concatenate(
        [~np.isnan(curve.losses[curve.window(), :shortest]) for curve in curves]
    ).all(axis=0)
    return shortest if together.all() else int(np.argmin(together))


def _scatter(curve: Curve, fitted_curve: Fit, seeds: int) -> Scatter:
    """Return how the seeds of a size differ, from their slopes at the vertex and from what no slope explains."""
    if fitted_curve.trouble or seeds < 2:
        return Scatter(math.nan, math.nan)
    x = np.asarray(fitted_curve.used)
    losses = curve.losses[np.isin(curve.x, fitted_curve.used), :seeds]
    _, slope_map, curvature_map = projection(x, fitted_curve.optimum)
    optima = -(slope_map @ losses) / (2 * fitted_curve.curvature)
    # What differs between seeds beside their level and their slope is noise of single runs.
    apart = losses - losses.mean(axis=1, keepdims=True)
    lines = np.stack([np.ones_like(x), x - x.mean()], axis=1)
    rest = apart - lines @ np.linalg.lstsq(lines, apart, rcond=None)[0]
    freedom = (len(x) - 2) * (seeds - 1)
    variance = float((rest**2).sum()) / freedom
    error = (
        math.sqrt(variance * float(curvature_map @ curvature_map) / seeds) / fitted_curve.curvature
    )
    # A vertex is a ratio. Its second-order term counts where noise makes the parabola nearly flat.
    spread = float(optima.std(ddof=1)) * math.sqrt(1 + 3 * error**2)
    return Scatter(spread, float(stdtrit(freedom, CONFIDENCE)) * error)


def _half_width(deviations: np.ndarray, seeds: int, quantile: float = CONFIDENCE) -> float:
    """Return the half-width of a sum of independent means, by Welch and Satterthwaite.

    Args:
        deviations: standard deviation of one seed in each term, weights included.
        seeds: of every mean.
        quantile: upper one of the interval; a two-sided 95 % by default.
    """
    if seeds < 2 or not np.isfinite(deviations).all():
        return math.inf
    variances = deviations**2 / seeds
    total = float(variances.sum())
    if total == 0:
        return 0.0
    freedom = total**2 / float((variances**2).sum()) * (seeds - 1)
    return float(stdtrit(freedom, quantile)) * math.sqrt(total)


def _interval(value: float, half: float) -> Interval:
    return (
        Interval(value, value - half, value + half)
        if math.isfinite(half)
        else Interval(value, -math.inf, math.inf)
    )


def _slope_terms(
    sizes: Sequence[int], fits: Sequence[Fit], scatters: Sequence[Scatter]
) -> tuple[float, np.ndarray]:
    """Return the least-squares slope of the optima per doubling, and one seed's standard deviation in each of its terms."""
    fitted = [index for index, fitted_curve in enumerate(fits) if not fitted_curve.trouble]
    doublings = np.log2(np.asarray(sizes, float))[fitted]
    centred = doublings - doublings.mean()
    weights = centred / (centred @ centred)
    slope = float(weights @ [fits[index].optimum for index in fitted])
    return slope, weights * [scatters[index].optimum for index in fitted]


def _drift(
    sizes: Sequence[int], fits: Sequence[Fit], scatters: Sequence[Scatter], seeds: int
) -> Interval:
    if sum(not fitted_curve.trouble for fitted_curve in fits) < 2:
        return Interval(math.nan, -math.inf, math.inf)
    slope, deviations = _slope_terms(sizes, fits, scatters)
    return _interval(slope, _half_width(deviations, seeds))


def _price(
    index: int, curve: Curve, fits: Sequence[Fit], scatters: Sequence[Scatter], seeds: int
) -> Interval:
    """Return the loss at the smallest size's best rate over that at the size's own.

    It is read from the size's parabola within its rates, else between measured rates. Its interval is not below zero.
    """
    base = fits[0]
    own = fits[index]
    if base.trouble or own.trouble or not curve.x[0] <= base.optimum <= curve.x[-1]:
        return Interval(math.nan, -math.inf, math.inf)
    if index == 0:
        return Interval(0.0, 0.0, 0.0)
    if not own.used[0] <= base.optimum <= own.used[-1]:
        return _measured_price(curve, base, own, scatters[0], seeds)
    octaves = base.optimum - own.optimum
    price = own.curvature * octaves**2
    half = _half_width(np.array([scatters[0].optimum, scatters[index].optimum]), seeds)
    if not math.isfinite(half):
        return Interval(price, 0.0, math.inf)
    least = max(0.0, abs(octaves) - half)
    most = abs(octaves) + half
    # The errors of distance and curvature are independent: each end adds their squares (Zou and Donner 2008).
    bend = price * scatters[index].curvature
    low = price - math.hypot(price - own.curvature * least**2, bend)
    high = price + math.hypot(own.curvature * most**2 - price, bend)
    return Interval(price, max(0.0, low), high)


def _measured_price(
    curve: Curve, base: Fit, own: Fit, base_scatter: Scatter, seeds: int
) -> Interval:
    """Return the price where the smallest size's best rate lies beside the parabola: between two measured rates."""
    upper = int(np.searchsorted(curve.x, base.optimum))
    pair = [max(upper - 1, 0), upper]
    # Seeds that were added later exist only near the minimum.
    common = min(seeds, int((~np.isnan(curve.losses[pair])).all(axis=0).sum()))
    losses = curve.losses[pair, :common]
    if not np.isfinite(losses).all():
        return Interval(math.inf, math.inf, math.inf)
    share = (base.optimum - curve.x[pair[0]]) / (curve.x[pair[1]] - curve.x[pair[0]])
    there = losses[0] + share * (losses[1] - losses[0])
    loss_map, _, _ = projection(np.asarray(own.used), own.optimum)
    least = loss_map @ curve.losses[np.isin(curve.x, own.used), :seeds]
    price = float(there.mean() - least.mean())
    if common < 2:
        return Interval(price, 0.0, math.inf)
    apart = there - least[:common]
    by_loss = _half_width(np.array([apart.std(ddof=1)]), common)
    slope = float(losses[1].mean() - losses[0].mean()) / float(curve.x[pair[1]] - curve.x[pair[0]])
    by_rate = abs(slope) * _half_width(np.array([base_scatter.optimum]), seeds)
    half = math.hypot(by_loss, by_rate)
    return Interval(price, max(0.0, price - half), price + half)


def _worse(
    sizes: Sequence[int], curves: Sequence[Curve], base: Fit
) -> tuple[tuple[tuple[int, float, Interval], ...], int]:
    """Return where a size is worse than the one before it, and how many sizes and learning rates were compared."""
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
            if not np.isfinite(change).all():
                worse.append((size, float(x), Interval(math.inf, math.inf, math.inf)))
            elif change.mean() > 0:
                worse.append((size, float(x), Interval.of_mean(change)))
    return tuple(worse), compared
