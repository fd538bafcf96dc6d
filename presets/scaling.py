"""Power laws in the logical sizes: the arithmetic of every preset's table.

A `Power` is coefficient * product over axes of m_axis^exponent with m_axis = size / base size. It stays symbolic until
sizes are given, so a rule can be evaluated, printed, or taken to a limit without running anything.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

from presets.roles import PresetError

SYMBOLS = {"embed": "D", "heads": "H", "kv_heads": "K", "head_dim": "N", "mlp": "F", "layers": "L", "patch": "D_in"}
"""Letters for axes in printed rules, after the papers."""


@dataclasses.dataclass(frozen=True)
class Power:
    """coefficient * prod_axis m_axis ** exponent; immutable, exponents sorted by axis and never zero."""

    coefficient: float = 1.0
    exponents: tuple[tuple[str, float], ...] = ()

    def __mul__(self, other: Power | float) -> Power:
        if not isinstance(other, Power):
            return Power(self.coefficient * other, self.exponents)
        total = dict(self.exponents)
        for axis, exponent in other.exponents:
            total[axis] = total.get(axis, 0.0) + exponent
        kept = tuple(sorted((axis, e) for axis, e in total.items() if abs(e) > 1e-12))
        return Power(self.coefficient * other.coefficient, kept)

    __rmul__ = __mul__

    def __pow__(self, exponent: float) -> Power:
        kept = tuple((axis, e * exponent) for axis, e in self.exponents if e * exponent)
        return Power(self.coefficient**exponent, kept)

    def __truediv__(self, other: Power | float) -> Power:
        return self * (other**-1 if isinstance(other, Power) else 1.0 / other)

    def exponent(self, axis: str) -> float:
        """The power of m_axis; 0 where it does not appear."""
        return dict(self.exponents).get(axis, 0.0)

    def __call__(self, ratios: Mapping[str, float]) -> float:
        """The value at m_axis = ratios[axis]. Exactly the coefficient where every ratio is 1.

        Raises:
            PresetError: an axis of the rule has no ratio.
        """
        value = self.coefficient
        for axis, exponent in self.exponents:
            if axis not in ratios:
                raise PresetError(f"the rule needs the size of axis {axis!r}; the sizes given are {dict(ratios)}")
            value *= ratios[axis] ** exponent
        return value

    def __str__(self) -> str:
        parts = [f"{SYMBOLS.get(axis, axis)}^{exponent:g}" if exponent != 1 else SYMBOLS.get(axis, axis)
                 for axis, exponent in self.exponents]  # fmt: skip
        if self.coefficient != 1 or not parts:
            parts.insert(0, f"{self.coefficient:g}")
        return " ".join(parts)


ONE = Power()


def axis(name: str) -> Power:
    """m_name, the ratio of one axis' size to its base size."""
    return Power(1.0, ((name, 1.0),))


def product(names: Iterable[str]) -> Power:
    """The product of several axes' ratios; `product(spec.fan_in)` is m_in."""
    return math.prod((axis(name) for name in names), start=ONE)
