"""Both verdicts of the coordinate check: does the program do what its table says, and is the table any good.

Log-log slopes of every observable, in every layer, and its value at the smallest size, are held against theory. What is
wrong with a table by theory (`Expected.trouble`) counts where the program does what the table says as where it does not.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import stats

from mupax.train.studies.check.theory import Expected

LAYERS, ENDS = "{}, by layer", "{}, least and most"
"""Names of an observable layer by layer, and in the layers where it is least and most."""
_MOVES = 0.1
"""A slope above this is seen to grow."""
_LAYER = {"gradient": 0.4}
"""How much farther than a root mean square over layers that of one may stray, by kind of observable; 0.15 for all others."""
_BASE = math.log(1.25)
"""How far a ratio may lie from 1 at the smallest size, whose entries are finitely many."""
_FLOOR = 1e-30
"""Stands for an exact zero in a logarithm."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One observable at one step, measured and judged.

    Attributes:
        observable: name, as in `mupax.train.studies.check.observables`.
        step: optimizer steps taken.
        slope: mean over seeds of the log-log slope; `low` and `high` its 95 % interval. Not a number where all is zero.
        values: geometric mean over seeds at every size.
        expected: by theory.
        layer: the one that does something else, such as "layer 7"; None where all do the same.
        base: measured over what theory expects at the smallest size; 1 where it has no number.
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

    @property
    def agrees(self) -> bool:
        """Whether the program does what the table says: the interval meets the band of theory, in every layer, from the right base.

        An interval that is not a number meets none.
        """
        inside = self.low <= self.expected.high and self.high >= self.expected.low
        return inside and self.layer is None and abs(math.log(self.base)) <= _BASE

    @property
    def trouble(self) -> str | None:
        """What is wrong with the table, by theory; of what should grow by it only what is seen to. None where nothing is."""
        foretold = self.expected.slope > 0 and self.expected.trouble == "explodes"
        return self.expected.trouble if self.slope > _MOVES or not foretold else None

    @property
    def ok(self) -> bool:
        """Agrees with theory, and is no trouble."""
        return self.agrees and not self.trouble

    @property
    def roles(self) -> tuple[str, ...]:
        """Whose steps theory blames for the trouble."""
        return self.expected.roles if self.trouble else ()

    @property
    def verdict(self) -> str:
        """A word for a person."""
        if self.agrees:
            return self.trouble or "as predicted"
        if any(self.values):
            off = abs(math.log(self.base)) > _BASE
            where = (
                f" in {self.layer}"
                if self.layer
                else f" ({self.base:.2g} times at the smallest size)"
                if off
                else ""
            )
            return f"contradicts theory{where}"
        return "frozen" if self.step else "zero"


def judge(
    measured: Mapping[str, np.ndarray],
    sizes: Sequence[float],
    expected: Mapping[tuple[str, int], Expected],
) -> list[Finding]:
    """Log-log slopes of every observable that theory speaks of, with 95 % intervals over seeds, and what it says of each.

    Args:
        measured: from `Series.measure`.
        sizes: the grown size (or its ratio to the smallest), one per definition.
        expected: from `mupax.train.studies.check.theory.of`.
    """
    x = np.log2(np.asarray(sizes, np.float64))
    base = _at_base(measured, expected)
    findings = []
    for name, values in measured.items():
        for step in (step for step in range(values.shape[2]) if (name, step) in expected):
            mean, half, typical = _fit(x - x.mean(), values[:, :, step])
            of, ends = expected[name, step], (float(mean - half), float(mean + half))
            finding = Finding(name, step, float(mean), *ends, tuple(map(float, typical)), of)
            if finding.agrees:
                finding = dataclasses.replace(
                    finding, layer=_outlier(x - x.mean(), name, step, measured, of)
                )
            findings.append(dataclasses.replace(finding, base=base.get((name, step), 1.0)))
    return findings


def _fit(x: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean over seeds of the slope of values [sizes, seeds, ...], half its 95 % interval, [...], and the geometric mean, [sizes, ...].

    The slope is not a number where all is zero.
    """
    something = np.any(values, axis=(0, 1))
    y = np.log2(np.maximum(values, _FLOOR))
    slopes = np.where(something, np.tensordot(x, y, 1) / (x @ x), math.nan)
    seeds = len(slopes)
    half = slopes.std(axis=0, ddof=1) * _halves(seeds) if seeds > 1 else np.zeros(slopes.shape[1:])
    return slopes.mean(axis=0), half, something * 2.0 ** y.mean(axis=1)


@functools.cache
def _halves(seeds: int) -> float:
    """Half a 95 % interval of a mean over seeds, in standard deviations of one."""
    return float(stats.t.ppf(0.975, seeds - 1)) / math.sqrt(seeds)


def _outlier(
    x: np.ndarray, name: str, step: int, measured: Mapping[str, np.ndarray], expected: Expected
) -> str | None:
    """The layer whose slope is the farthest from theory and outside its band; None where none is."""
    by_layer, ends = (measured.get(layers.format(name)) for layers in (LAYERS, ENDS))
    layers = ends if by_layer is None else by_layer
    if layers is None or (
        layers is ends and expected.base is None
    ):  # what has a number is the same in all layers
        return None
    mean, half, _ = _fit(x, layers[:, :, step])
    room = _LAYER.get(name.partition("/")[0], 0.15)
    inside = (mean - half <= expected.high + room) & (mean + half >= expected.low - room)
    if inside.all():
        return None
    beyond = np.where(inside, -1, np.where(np.isnan(mean), math.inf, np.abs(mean - expected.slope)))
    return f"layer {np.argmax(beyond)}" if ends is None else "one layer"


def _at_base(
    measured: Mapping[str, np.ndarray], expected: Mapping[tuple[str, int], Expected]
) -> dict[tuple[str, int], float]:
    """Measured over expected at the smallest size, where theory has a number; of movements relative to the others'."""
    ratios: dict[tuple[str, int], float] = {}
    for (name, step), one in expected.items():
        if not one.base or name not in measured or step >= measured[name].shape[2]:
            continue
        first = measured[name][0, :, step]
        if np.all(first > 0):
            ratios[name, step] = float(np.exp(np.mean(np.log(first)))) / one.base
    moved = [ratio for (name, _), ratio in ratios.items() if name.startswith("movement")]
    peak = float(np.median(moved)) if moved else 1.0
    return {
        key: ratio / peak if key[0].startswith("movement") else ratio
        for key, ratio in ratios.items()
    }


def passes(findings: Sequence[Finding]) -> bool:
    """Both verdicts: the program does what its table says, and by the table nothing goes wrong."""
    return bool(findings) and all(finding.ok for finding in findings)
