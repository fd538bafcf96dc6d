"""Findings of the coordinate check: log-log slopes of every observable, held against theory.

A finding has two verdicts. One is on the program: it does what the preset's table (initial std,
learning rate and eps of every parameter) says if slopes agree with theory in every layer and the
value at the smallest size is right. The other is on the table: it is good if theory foretells no
trouble (`Expected.trouble`). A check with a bad table fails, even if the program does what the
table says.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from mupax.train.studies.check.observables import LOSS
from mupax.train.studies.check.theory import Expected

LAYERS = "{}, by layer"
"""Template that turns an observable's name into the name of its values layer by layer."""
ENDS = "{}, least and most"
"""Template for the name of an observable's least and greatest value over layers."""
_MOVES = 0.1
"""Measured slope above which an observable counts as growing."""
_LAYER_MARGIN = {"gradient": 0.4}
"""Distance by which the band of slopes is wider, at both ends, for a single layer, by kind."""
_DEFAULT_LAYER_MARGIN = 0.15
_BASE = math.log(1.25)
"""Greatest |log(measured / expected)| that passes at the smallest size.

Small models have few entries, so their root mean squares are noisy.
"""
_NARROW = 0.1
"""Greatest distance of a slope from its band at which a failure counts as narrow.

A check whose failures are all narrow is repeated with more seeds.
"""
_FAR = 0.25
"""Distance of a slope from its band above which an interval that meets the band decides nothing.

Mistakes in a rule are of 1/4 or more. With two seeds, an interval is 18 standard deviations wide, so
that it may meet the band whatever the slope is. Such a check is repeated with more seeds, too.
"""
_FLOOR = 1e-30
"""Smallest value in a logarithm, in place of an exact zero."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One observable at one step, measured and judged.

    Attributes:
        observable: Name, as in `mupax.train.studies.check.observables`.
        step: Number of optimizer steps taken.
        slope: Mean over seeds of the log-log slope. NaN if all values are zero.
        low: Lower end of the slope's 95 % interval over seeds.
        high: Upper end of the same interval.
        values: Geometric mean over seeds, one value per size.
        expected: Theory of this observable at this step.
        layer: Layer that deviates from theory, such as "layer 7". `None` if no layer does.
        base: Measured value divided by the expected one, at the smallest size. For a movement
            (change of a parameter) this ratio is divided by the median ratio of all movements. 1 if
            theory has no number or a value is zero.
        drops_smallest: True if the slope and its interval are fitted without the smallest size.
        seeds: Number of initializations of every size, 0 if not recorded.
        diverges: True if the loss of every size rises above its start, or is not finite. Slopes
            then say little about rules: the learning rate is too high.
    """

    observable: str
    step: int
    slope: float
    low: float
    high: float
    values: tuple[float, ...]
    expected: Expected
    layer: str | None = None
    base: float = 1.0
    drops_smallest: bool = False
    seeds: int = 0
    diverges: bool = False

    @property
    def agrees(self) -> bool:
        """True if the measurement agrees with theory: the program does what the table says.

        The table is that of the preset: initial std, learning rate and eps of every parameter. The
        slope's interval has to meet the band of theory in every layer, and the value at the
        smallest size has to be right within a factor of 1.25. An interval that is NaN meets no
        band.
        """
        # log, because half and twice the expected value are equally wrong.
        return self.is_in_band and self.layer is None and abs(math.log(self.base)) <= _BASE

    @property
    def is_in_band(self) -> bool:
        """True if the slope's interval meets the band of theory. False for a NaN."""
        return self.low <= self.expected.high and self.high >= self.expected.low

    @property
    def fails_narrowly(self) -> bool:
        """True if a slope at most 0.1 outside its band is all that is wrong.

        A check has about a hundred intervals, and with few seeds some are too narrow by chance.
        Narrow failures are therefore decided by more seeds.
        """
        is_slope_alone = self.layer is None and abs(math.log(self.base)) <= _BASE
        if self.ok or self.trouble or not is_slope_alone:
            return False
        # NaN is not near: comparisons with it are false.
        return self.expected.low - _NARROW <= self.slope <= self.expected.high + _NARROW

    @property
    def is_undecided(self) -> bool:
        """True if a slope more than 1/4 outside its band has an interval that still meets the band.

        The seeds are too few to tell whether the program does what the table says.
        """
        below = self.slope < self.expected.low - _FAR
        above = self.slope > self.expected.high + _FAR
        return self.is_in_band and (below or above)

    @property
    def trouble(self) -> str | None:
        """Fault that theory foretells of the preset's table, such as "vanishes", or `None`.

        "explodes" with a positive expected slope counts only if the measured slope is above 0.1.
        """
        foretold_growth = self.expected.slope > 0 and self.expected.trouble == "explodes"
        # `not >`, so that a NaN slope (all zeros) counts as no growth.
        if foretold_growth and not self.slope > _MOVES:
            return None
        return self.expected.trouble

    @property
    def ok(self) -> bool:
        """True if the measurement agrees with theory and theory foretells no trouble."""
        return self.agrees and not self.trouble

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles of parameters whose steps theory blames for the trouble. Empty without trouble."""
        return self.expected.roles if self.trouble else ()

    @property
    def verdict(self) -> str:
        """Verdict in words, for reports.

        It is "as predicted" (and says so if the smallest size was left out) or the trouble if the
        measurement agrees with theory. It is "zero" (at initialization) or "frozen" (in training)
        if all values are 0. Otherwise it is "contradicts theory", with the layer or the ratio at
        the smallest size if one of these is wrong.
        """
        if self.agrees:
            without = " without the smallest size" if self.drops_smallest else ""
            return self.trouble or f"as predicted{without}"
        if not any(self.values):
            return "frozen" if self.step else "zero"

        if self.layer:
            return f"contradicts theory in {self.layer}"
        if abs(math.log(self.base)) > _BASE:
            growth = "" if self.is_in_band else "in its growth, and "
            return f"contradicts theory ({growth}{self.base:.2g} times at the smallest size)"
        return "contradicts theory"


class _SlopeFit(NamedTuple):
    """Log-log slopes over sizes.

    Attributes:
        mean: Mean over seeds, [...]. NaN if all values are zero.
        half_width: Half of the 95 % interval over seeds, [...]. 0 with one seed.
        typical: Geometric mean over seeds of the values, [sizes, ...].
    """

    mean: np.ndarray
    half_width: np.ndarray
    typical: np.ndarray


def judge(
    measured: Mapping[str, np.ndarray],
    sizes: Sequence[float],
    expected: Mapping[tuple[str, int], Expected],
) -> list[Finding]:
    """Return a finding for every observable and step that theory speaks of.

    Args:
        measured: Observable to values [sizes, seeds, steps + 1], from `Series.measure`.
        sizes: Grown size of each definition, or its ratio to the smallest.
        expected: (observable, step) to theory, from `mupax.train.studies.check.theory.of`.
    """
    x = np.log2(np.asarray(sizes, np.float64))
    # Centered sizes make the slope x.y / x.x, without an intercept.
    centered_x = x - x.mean()
    base_ratios = _base_ratios(measured, expected)
    diverges = _diverges(measured)

    findings = []
    for name, values in measured.items():
        for step in range(values.shape[2]):
            if (name, step) not in expected:
                continue

            theory = expected[name, step]
            fit = _fit(centered_x, values[:, :, step])
            finding = Finding(
                observable=name,
                step=step,
                slope=float(fit.mean),
                low=float(fit.mean - fit.half_width),
                high=float(fit.mean + fit.half_width),
                values=tuple(map(float, fit.typical)),
                expected=theory,
                seeds=values.shape[1],
                diverges=diverges,
            )
            if step == 0 and not finding.is_in_band:
                finding = _without_smallest(finding, x, values[:, :, step])
            # `agrees` does not see the base ratio yet, so layers are compared whenever the slope
            # agrees.
            if finding.agrees:
                layer = _outlier(centered_x, name, step, measured, theory)
                finding = dataclasses.replace(finding, layer=layer)
            base = base_ratios.get((name, step), 1.0)
            findings.append(dataclasses.replace(finding, base=base))
    return findings


def _diverges(measured: Mapping[str, np.ndarray]) -> bool:
    """Return whether the loss of every size is above its start after some step, or not finite.

    The loss is the mean over seeds. Return False if it was not measured, as in whole runs.
    """
    if LOSS not in measured:
        return False
    mean_loss = measured[LOSS].mean(axis=1)
    falls = np.all(mean_loss <= mean_loss[:, :1], axis=1)  # False with a NaN
    return not falls.any()


def _without_smallest(finding: Finding, x: np.ndarray, values: np.ndarray) -> Finding:
    """Return the finding with the slope fitted without the smallest size, if that slope is in band.

    Otherwise, and with fewer than three sizes, return the finding unchanged. The new slope itself
    has to be in the band, not only its interval. The reason: effects of finite size fall faster
    than the power law, while a wrong rule is as wrong between the largest sizes. Used for values at
    initialization alone, because observables that explode in training level off at large sizes.

    Args:
        x: log2 of the sizes, [sizes].
        values: Values [sizes, seeds] of the finding's observable and step.
    """
    if len(x) < 3:
        return finding
    fit = _fit(x[1:] - x[1:].mean(), values[1:])
    slope = float(fit.mean)
    if not finding.expected.low <= slope <= finding.expected.high:
        return finding
    half_width = float(fit.half_width)
    return dataclasses.replace(
        finding,
        slope=slope,
        low=slope - half_width,
        high=slope + half_width,
        drops_smallest=True,
    )


def _fit(x: np.ndarray, values: np.ndarray) -> _SlopeFit:
    """Fit log2 of the values against log2 of the size, seed by seed.

    Args:
        x: log2 of the sizes, centered, [sizes].
        values: Values [sizes, seeds, ...], not negative.
    """
    has_signal = np.any(values, axis=(0, 1))
    y = np.log2(np.maximum(values, _FLOOR))
    # Without this a row of zeros would have the slope 0 of the floor and agree with a flat theory.
    slopes = np.where(has_signal, np.tensordot(x, y, 1) / (x @ x), math.nan)

    seeds = len(slopes)
    if seeds > 1:
        half_width = slopes.std(axis=0, ddof=1) * _half_width_in_deviations(seeds)
    else:
        # One seed has no spread, so its slope must lie inside of the band itself.
        half_width = np.zeros(slopes.shape[1:])
    return _SlopeFit(slopes.mean(axis=0), half_width, has_signal * 2.0 ** y.mean(axis=1))


@functools.cache
def _half_width_in_deviations(seeds: int) -> float:
    """Return the half-width of the 95 % interval of a mean over seeds.

    Its unit is the standard deviation over seeds (Student's t).
    """
    return float(stats.t.ppf(0.975, seeds - 1)) / math.sqrt(seeds)


def _outlier(
    x: np.ndarray, name: str, step: int, measured: Mapping[str, np.ndarray], expected: Expected
) -> str | None:
    """Return "layer N" for the layer whose slope is farthest outside the band of theory.

    Return `None` if all layers are in the band or no layers can be compared. The band is wider for
    single layers (`_LAYER_MARGIN`). If only the least and the greatest layer were recorded, return
    "one layer" in place of "layer N".

    Args:
        x: log2 of the sizes, centered, [sizes].
        step: Number of optimizer steps taken.
        expected: Theory of the observable at this step.
    """
    by_layer = measured.get(LAYERS.format(name))
    ends = measured.get(ENDS.format(name))
    if by_layer is not None:
        layers = by_layer
    elif ends is not None and expected.base is not None:
        # If theory has no value at the smallest size, layers may differ with depth, and so may the
        # least and the greatest of them.
        layers = ends
    else:
        return None

    fit = _fit(x, layers[:, :, step])
    # A single layer has fewer entries than the mean over all, so its slope strays farther.
    margin = _LAYER_MARGIN.get(name.partition("/")[0], _DEFAULT_LAYER_MARGIN)
    above_low = fit.mean + fit.half_width >= expected.low - margin
    below_high = fit.mean - fit.half_width <= expected.high + margin
    inside = below_high & above_low
    if inside.all():
        return None

    if ends is not None:
        return "one layer"
    distance = np.abs(fit.mean - expected.slope)
    # A frozen layer has a slope of NaN. It counts as the worst layer.
    distance = np.where(np.isnan(fit.mean), math.inf, distance)
    return f"layer {np.argmax(np.where(inside, -1, distance))}"


def _base_ratios(
    measured: Mapping[str, np.ndarray], expected: Mapping[tuple[str, int], Expected]
) -> dict[tuple[str, int], float]:
    """Return measured / expected values at the smallest size, by (observable, step).

    Observables for which theory has no number, and those with an exact zero, are left out. The
    ratios of movements (changes of parameters) are divided by their median, because a factor that
    all movements share comes from the optimizer and not from the preset.
    """
    ratios: dict[tuple[str, int], float] = {}
    for (name, step), theory in expected.items():
        if not theory.base or name not in measured or step >= measured[name].shape[2]:
            continue
        smallest = measured[name][0, :, step]
        # An exact zero has no log, and its row is judged as frozen.
        if np.all(smallest > 0):
            ratios[name, step] = float(np.exp(np.mean(np.log(smallest)))) / theory.base

    movements = []
    for (name, _), ratio in ratios.items():
        if name.startswith("movement"):
            movements.append(ratio)
    # A factor that all movements share comes from the optimizer and is no fault of the table.
    typical = float(np.median(movements)) if movements else 1.0
    for name, step in ratios:
        if name.startswith("movement"):
            ratios[name, step] /= typical
    return ratios


def needs_seeds(findings: Sequence[Finding]) -> bool:
    """Return True if more seeds could change whether a check passes (`check.measure_and_judge`).

    Either the check fails and every failure is narrow, or it passes and a slope is undecided.
    """
    failures = [finding for finding in findings if not finding.ok]
    if failures:
        return all(finding.fails_narrowly for finding in failures)
    return any(finding.is_undecided for finding in findings)


def passes(findings: Sequence[Finding]) -> bool:
    """Return True if all findings agree with theory and theory foretells no trouble.

    A check without findings does not pass.
    """
    # all([]) is true, and a check that measured nothing proves nothing.
    return bool(findings) and all(finding.ok for finding in findings)
