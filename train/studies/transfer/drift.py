"""Drift of the best learning rate as the size doubles, the price of not retuning, and intervals.

The best rate of a size from S seeds is, to first order, the mean of S numbers: each seed's own best
rate, read from the slope of its losses at the vertex of the mean's parabola. Their scatter gives
the standard error, with S - 1 degrees of freedom. The drift is a weighted sum of such means, one
per size. Its interval is that of Welch and Satterthwaite: each size has its own scatter, and the
degrees of freedom of all sizes count. Three seeds at four sizes have about six and not two.

Sizes are taken as independent. A seed gives models of different sizes different weights, and in the
published studies the effect of a seed at one size says nothing about its effect at another
(`python -m scripts.studies.verdicts` prints the correlation). If the effects were alike, intervals
would be too wide, not too narrow. `docs/evidence/transfer.md` has the simulated coverage of 3, 5
and 8 seeds.

One seed has no interval. An interval leaves out what all seeds share: the order of the data, and
the bias of a parabola on a grid of half octaves.
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
"""Upper quantile of a two-sided interval of 98 %.

A verdict ends a study before its last seed only if this interval gives the same one as that of
95 %. A look after every seed is one more chance to be wrong. With 95 % a drift of 0.30 would be
called `transfers` in 6 % of the noisier studies.
"""
MOST_SEEDS = 200
"""Greatest number of seeds in all that a report proposes to decide a verdict."""


@dataclasses.dataclass(frozen=True)
class Interval:
    """Estimate with its 95 % interval. Ends are infinite if nothing bounds the estimate."""

    value: float
    low: float
    high: float

    @classmethod
    def of_mean(cls, values: np.ndarray) -> Interval:
        """Return the mean of independent values [n] with its interval by Student's t.

        One value has an infinite interval.
        """
        seeds = len(values)
        half_width = math.inf
        if seeds > 1:
            half_width = stdtrit(seeds - 1, CONFIDENCE) * values.std(ddof=1) / math.sqrt(seeds)
        return _interval(float(values.mean()), float(half_width))

    @property
    def half_width(self) -> float:
        """Half the width of the interval."""
        return (self.high - self.low) / 2

    def to_json(self, digits: int = 6) -> dict[str, float | None]:
        """Return `value`, `low` and `high` by name, rounded; `None` for one that is not finite.

        Args:
            digits: Number of decimals, 6 by default.
        """
        rounded = {}
        for name, value in dataclasses.asdict(self).items():
            rounded[name] = finite(value, digits)
        return rounded

    def meets(self, low: float, high: float) -> bool:
        """Return True if the interval overlaps [low, high]."""
        return self.low <= high and self.high >= low


@dataclasses.dataclass(frozen=True)
class Scatter:
    """Uncertainty of one size's best learning rate and curvature, from the spread between seeds.

    Attributes:
        optimum: Standard deviation of one seed's best rate, in octaves. NaN without a fit or with
            one seed.
        curvature: Half-width of the 95 % interval of the curvature, divided by the curvature. NaN
            without a fit or with one seed.
    """

    optimum: float
    curvature: float


@dataclasses.dataclass(frozen=True)
class Analysis:
    """Result of a transfer study: the best learning rate of every size, and its drift with size.

    Attributes:
        sizes: Sizes of the axis that grows, the smallest first.
        seeds: Number of seeds in the fits, the same at every size.
        fits: Minimum of every size.
        optima: log2 of every size's best learning rate. NaN if the fit found none.
        drift: Slope of the best rate in octaves per doubling of the size, by least squares over the
            sizes with an optimum.
        prices: Price of not retuning each size: its loss at the smallest size's best rate less its
            loss at its own best rate, in nats. NaN if unknown. It may be infinite if a seed
            diverged.
        worse: (size, log2 of the rate, increase of the loss) wherever a size has a greater loss
            than the next smaller size at the same rate. Only rates within an octave of the smallest
            size's best one are compared. The increase is in nats, infinite if a seed diverged.
        compared: Number of pairs (size, rate) that were compared for `worse`.
        scatters: Spread between the seeds of every size.
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
        """Verdict on the drift of the best learning rate: "transfers", "drifts" or "undecided".

        `judge` derives it from the drift and its interval. The verdict is "undecided" if noise
        hides the curves (`unclear_sizes`) at more than half of the sizes with an optimum. If the
        smallest or the largest size has no optimum, "transfers" becomes "undecided".
        """
        if self._is_hidden(self.seeds):
            return "undecided"
        verdict = judge(self.drift.value, self.drift.low, self.drift.high)
        # The sizes between would span too few doublings to vouch for the whole range.
        if verdict == "transfers" and (self.fits[0].trouble or self.fits[-1].trouble):
            return "undecided"
        return verdict

    @property
    def settled(self) -> bool:
        """True if the verdict is decided, and the 98 % interval of the drift gives the same one."""
        if self.verdict == "undecided":
            return False
        _, deviations = _slope_terms(self.sizes, self.fits, self.scatters)
        half_width = _half_width(deviations, self.seeds, EARLY)
        return self._judge(half_width, self.seeds) == self.verdict

    def unclear_sizes(self, seeds: int | None = None) -> int:
        """Return the number of sizes with an optimum at which noise hides the curve of the losses.

        There the 95 % interval of the curvature contains 0. The vertex is a ratio with the
        curvature below, so its true interval has no ends (Fieller 1954), and the scatter between
        seeds understates it. One such size still leaves the drift to the others.

        Args:
            seeds: Number of seeds for which intervals are predicted; those of the fits by default.
        """
        shrinking = math.sqrt(self.seeds / (seeds or self.seeds))
        return sum(scatter.curvature * shrinking >= 1 for scatter in self.scatters)

    def _is_hidden(self, seeds: int) -> bool:
        """Return whether noise hides the curves of most sizes with an optimum, by so many seeds."""
        fitted = sum(not fitted_curve.trouble for fitted_curve in self.fits)
        return 2 * self.unclear_sizes(seeds) > fitted

    def _judge(self, half_width: float, seeds: int) -> Verdict:
        """Return the verdict for an interval of this half-width, in octaves per doubling.

        Args:
            seeds: Number of seeds that the interval is of.
        """
        if self._is_hidden(seeds):
            return "undecided"
        drift = self.drift.value
        return judge(drift, drift - half_width, drift + half_width)

    def seeds_to_decide(self) -> int | None:
        """Return the number of further seeds that would decide the verdict.

        The drift and the spread between seeds are assumed to stay as they are. The number is 0 if
        the verdict is decided already. Return `None` if the smallest or largest size has no
        optimum, there are fewer than two seeds, or more than `MOST_SEEDS` seeds would be needed.
        """
        if self.fits[0].trouble or self.fits[-1].trouble or self.seeds < 2:
            return None
        _, deviations = _slope_terms(self.sizes, self.fits, self.scatters)
        for seeds in range(self.seeds, MOST_SEEDS + 1):
            if self._judge(_half_width(deviations, seeds), seeds) != "undecided":
                return seeds - self.seeds
        return None


def analyse(sizes: Sequence[int], curves: Sequence[Curve]) -> Analysis:
    """Fit the best learning rate of every size, and measure how it drifts as the size grows.

    The drift, and what it costs not to retune, have 95 % intervals. All sizes use the same number
    of seeds (`_paired_seeds`).

    Args:
        sizes: Sizes of the axis that grows, the smallest first.
        curves: Losses of each size, in the order of `sizes`.
    """
    seeds = _paired_seeds(curves)
    fits = tuple(fit(curve, seeds) for curve in curves)
    scatters = []
    optima = []
    for curve, fitted_curve in zip(curves, fits, strict=True):
        scatter = _scatter(curve, fitted_curve, seeds)
        half_width = _half_width(np.array([scatter.optimum]), seeds)
        scatters.append(scatter)
        optima.append(_interval(fitted_curve.optimum, half_width))
    prices = []
    for i, curve in enumerate(curves):
        prices.append(_price(i, curve, fits, scatters, seeds))
    worse, compared = _worse(sizes, curves, fits[0])
    return Analysis(
        sizes=tuple(sizes),
        seeds=seeds,
        fits=fits,
        optima=tuple(optima),
        drift=_drift(sizes, fits, scatters, seeds),
        prices=tuple(prices),
        worse=worse,
        compared=compared,
        scatters=tuple(scatters),
    )


def _paired_seeds(curves: Sequence[Curve]) -> int:
    """Return the number of seeds that all sizes have at all fitted rates, counted from the first.

    The fitted rates of a size are those near its best one (`Curve.window`).
    """
    shortest = min(curve.losses.shape[1] for curve in curves)
    is_run = []
    for curve in curves:
        is_run.append(~np.isnan(curve.losses[curve.window(), :shortest]))
    by_seed = np.concatenate(is_run).all(axis=0)
    # `argmin` finds the first seed that some rate lacks, which ends the count.
    return shortest if by_seed.all() else int(np.argmin(by_seed))


def _scatter(curve: Curve, fitted_curve: Fit, seeds: int) -> Scatter:
    """Return the uncertainty of a size's best rate and curvature, from the spread between seeds.

    The slope of a seed's losses at the vertex of the mean parabola tells how far that seed's own
    vertex lies. The noise that levels and slopes of the seeds do not explain gives the uncertainty
    of the curvature. Both values are NaN without an optimum or with one seed.
    """
    if fitted_curve.trouble or seeds < 2:
        return Scatter(math.nan, math.nan)
    x = np.asarray(fitted_curve.used)
    losses = curve.losses[np.isin(curve.x, fitted_curve.used), :seeds]
    # At the vertex the mean's slope is 0, so a seed's slope tells how far its own vertex lies.
    _, slope_map, curvature_map = projection(x, fitted_curve.optimum)
    optima = -(slope_map @ losses) / (2 * fitted_curve.curvature)
    # Seeds differ in their level and their slope. The rest is noise of single runs.
    deviations = losses - losses.mean(axis=1, keepdims=True)
    lines = np.stack([np.ones_like(x), x - x.mean()], axis=1)
    residuals = deviations - lines @ np.linalg.lstsq(lines, deviations, rcond=None)[0]
    # Two numbers are fitted per seed, and the mean over seeds takes up one seed.
    freedom = (len(x) - 2) * (seeds - 1)
    variance = float((residuals**2).sum()) / freedom
    curvature_variance = variance * float(curvature_map @ curvature_map) / seeds
    error = math.sqrt(curvature_variance) / fitted_curve.curvature
    # The vertex is slope over curvature. The second-order term of this ratio counts if noise makes
    # the curvature uncertain.
    spread = float(optima.std(ddof=1)) * math.sqrt(1 + 3 * error**2)
    return Scatter(spread, float(stdtrit(freedom, CONFIDENCE)) * error)


def _half_width(deviations: np.ndarray, seeds: int, quantile: float = CONFIDENCE) -> float:
    """Return the half-width of an interval of a sum of independent means.

    The degrees of freedom are those of Welch and Satterthwaite. The result is infinite with one
    seed or an unknown deviation.

    Args:
        deviations: Standard deviation of one seed in each term of the sum, weights included, [n].
        quantile: Upper quantile of the interval; that of a two-sided 95 % interval by default.
    """
    if seeds < 2 or not np.isfinite(deviations).all():
        return math.inf
    variances = deviations**2 / seeds
    total = float(variances.sum())
    if total == 0:
        return 0.0
    # Welch and Satterthwaite: n terms of equal variance have n (seeds - 1) degrees of freedom. If
    # one term dominates there are about seeds - 1.
    freedom = total**2 / float((variances**2).sum()) * (seeds - 1)
    return float(stdtrit(freedom, quantile)) * math.sqrt(total)


def _interval(value: float, half_width: float) -> Interval:
    """Return the interval around a value. Its ends are infinite if the half-width is not finite."""
    if not math.isfinite(half_width):
        return Interval(value, -math.inf, math.inf)
    return Interval(value, value - half_width, value + half_width)


def _slope_terms(
    sizes: Sequence[int], fits: Sequence[Fit], scatters: Sequence[Scatter]
) -> tuple[float, np.ndarray]:
    """Return the slope of log2 of the best rate per doubling of the size, and terms of its error.

    Sizes without an optimum are left out. At least two sizes must have one.

    Returns:
        Least-squares slope in octaves per doubling, and for each size with an optimum its weight in
        the slope times the standard deviation of one seed's best rate.
    """
    fitted = []
    for index, fitted_curve in enumerate(fits):
        if not fitted_curve.trouble:
            fitted.append(index)
    doublings = np.log2(np.asarray(sizes, float))[fitted]
    centred = doublings - doublings.mean()
    # Least squares as a weighted sum of optima, for which Welch and Satterthwaite's rule is made.
    weights = centred / (centred @ centred)
    slope = float(weights @ [fits[index].optimum for index in fitted])
    return slope, weights * [scatters[index].optimum for index in fitted]


def _drift(
    sizes: Sequence[int], fits: Sequence[Fit], scatters: Sequence[Scatter], seeds: int
) -> Interval:
    """Return the drift of the best rate in octaves per doubling of the size, with its interval.

    With fewer than two optima the value is NaN and the interval infinite.
    """
    if sum(not fitted_curve.trouble for fitted_curve in fits) < 2:
        return Interval(math.nan, -math.inf, math.inf)
    slope, deviations = _slope_terms(sizes, fits, scatters)
    return _interval(slope, _half_width(deviations, seeds))


def _price(
    index: int, curve: Curve, fits: Sequence[Fit], scatters: Sequence[Scatter], seeds: int
) -> Interval:
    """Return the price of not retuning a size, in nats, with its 95 % interval.

    The price is the size's loss at the smallest size's best learning rate less its loss at its own
    best rate. It is read from the size's fitted parabola if the rate lies within the fitted rates,
    otherwise from measured losses (`_measured_price`). The lower end of the interval is at least 0.
    If either size has no optimum or the rate lies outside the size's grid, the price is NaN and its
    interval infinite. In all other cases the price of the smallest size is 0.

    Args:
        index: Index among all sizes of the size of `curve`; 0 is the smallest.
        fits: Fits of all sizes, the smallest first.
        scatters: Scatters of all sizes, in the same order.
    """
    base = fits[0]
    own = fits[index]
    if base.trouble or own.trouble or not curve.x[0] <= base.optimum <= curve.x[-1]:
        return Interval(math.nan, -math.inf, math.inf)
    # The smallest size is the reference and pays nothing by definition.
    if index == 0:
        return Interval(0.0, 0.0, 0.0)
    if not own.used[0] <= base.optimum <= own.used[-1]:
        return _measured_price(curve, base, own, scatters[0], seeds)
    # price = a u^2: the linear term is 0 at the size's own vertex.
    octaves = base.optimum - own.optimum
    price = own.curvature * octaves**2
    deviations = np.array([scatters[0].optimum, scatters[index].optimum])
    half_width = _half_width(deviations, seeds)
    if not math.isfinite(half_width):
        return Interval(price, 0.0, math.inf)
    least = max(0.0, abs(octaves) - half_width)
    most = abs(octaves) + half_width
    # The errors of distance and curvature are independent, so each end adds their squares (Zou and
    # Donner 2008).
    bend = price * scatters[index].curvature
    low = price - math.hypot(price - own.curvature * least**2, bend)
    high = price + math.hypot(own.curvature * most**2 - price, bend)
    return Interval(price, max(0.0, low), high)


def _measured_price(
    curve: Curve, base: Fit, own: Fit, base_scatter: Scatter, seeds: int
) -> Interval:
    """Return the price of not retuning a size, in nats, by interpolation of measured losses.

    `_price` uses it if the smallest size's best learning rate lies outside of the size's fitted
    rates. The loss there is interpolated between the nearest measured rate on each side. The price
    is infinite if a seed diverged at either of these two rates.

    Args:
        curve: Losses of the size whose price is wanted.
        base: Fit of the smallest size, whose best rate is priced.
        own: Fit of the size whose price is wanted.
        base_scatter: Scatter between the seeds of the smallest size.
    """
    upper = int(np.searchsorted(curve.x, base.optimum))
    pair = [max(upper - 1, 0), upper]
    # Seeds that were added later exist only near the minimum.
    common = min(seeds, int((~np.isnan(curve.losses[pair])).all(axis=0).sum()))
    losses = curve.losses[pair, :common]
    # If a seed diverged at one of the two rates, the price is infinite.
    if not np.isfinite(losses).all():
        return Interval(math.inf, math.inf, math.inf)
    left, right = curve.x[pair]
    share = (base.optimum - left) / (right - left)
    interpolated = losses[0] + share * (losses[1] - losses[0])
    loss_map, _, _ = projection(np.asarray(own.used), own.optimum)
    least = loss_map @ curve.losses[np.isin(curve.x, own.used), :seeds]
    price = float(interpolated.mean() - least.mean())
    if common < 2:
        return Interval(price, 0.0, math.inf)
    differences = interpolated - least[:common]
    by_loss = _half_width(np.array([differences.std(ddof=1)]), common)
    slope = float(losses[1].mean() - losses[0].mean()) / float(right - left)
    by_rate = abs(slope) * _half_width(np.array([base_scatter.optimum]), seeds)
    # The errors of the loss and of the rate are independent.
    half_width = math.hypot(by_loss, by_rate)
    return Interval(price, max(0.0, price - half_width), price + half_width)


def _worse(
    sizes: Sequence[int], curves: Sequence[Curve], base: Fit
) -> tuple[tuple[tuple[int, float, Interval], ...], int]:
    """Return where a size has a greater loss than the next smaller one, as `Analysis.worse`.

    The mean losses of two neighbouring sizes are compared at the same rates and seeds. Rates at
    which one of the first seeds of the smaller size diverged are left out. At all others a seed
    that diverged at the larger size alone counts as an infinite increase, and one that diverged at
    the smaller size is left out.

    Args:
        base: Fit of the smallest size. Rates within an octave of its optimum are compared.

    Returns:
        Entries of `Analysis.worse`, and the number of pairs (size, rate) that were compared.
    """
    worse: list[tuple[int, float, Interval]] = []
    compared = 0
    for size, smaller, larger in zip(sizes[1:], curves, curves[1:], strict=False):
        for x in np.intersect1d(smaller.x, larger.x):
            # The distance is NaN, and no rate is near, if the base has no optimum.
            is_near = abs(x - base.optimum) <= OCTAVE
            old = smaller.losses[smaller.x == x][0]
            new = larger.losses[larger.x == x][0]
            is_run = ~np.isnan(old + new)
            if not is_near or np.isinf(old[: smaller.first]).any() or not is_run.any():
                continue

            compared += 1
            if np.any(np.isinf(new[is_run]) & np.isfinite(old[is_run])):
                worse.append((size, float(x), Interval(math.inf, math.inf, math.inf)))
                continue
            # A seed that diverged at the smaller size has no difference to average.
            is_finite = np.isfinite(old) & np.isfinite(new)
            change = new[is_finite] - old[is_finite]
            if change.size and change.mean() > 0:
                worse.append((size, float(x), Interval.of_mean(change)))
    return tuple(worse), compared
