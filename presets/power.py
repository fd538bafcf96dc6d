"""Power laws in the logical sizes: the arithmetic of every preset's table.

A `Power` is coefficient * product over axes of m_axis^exponent with m_axis = size / base size. It stays symbolic until
sizes are given, so a rule can be evaluated, printed, or taken to a limit without running anything.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Iterable, Mapping

from mupax.presets.roles import PresetError

SYMBOLS = {
    "embed": "D", "heads": "H", "kv_heads": "K", "head_dim": "N", "mlp": "F", "layers": "L", "patch": "D_in",
    "memory": "D_e", "representation": "D_r", "encoder_layers": "L_e", "value_dim": "N_v",
    "experts": "E", "active": "a", "expert_dim": "m",
}  # fmt: skip
"""Letters for axes in printed rules, after the papers."""

Exponents = tuple[tuple[str, float], ...]


@dataclasses.dataclass(frozen=True)
class Power:
    """coefficient * prod_axis m_axis ** exponent; immutable, exponents sorted by axis and never zero.

    `clips` are further factors min(1, prod_axis size ** exponent) ** power of *sizes*; each counts as its value over its
    value at base size, so that the whole is still the coefficient at the base.
    """

    coefficient: float = 1.0
    exponents: Exponents = ()
    clips: tuple[tuple[Exponents, float], ...] = ()

    def __mul__(self, other: Power | float) -> Power:
        if not isinstance(other, Power):
            return dataclasses.replace(self, coefficient=self.coefficient * other)
        return Power(
            self.coefficient * other.coefficient,
            _collected(self.exponents + other.exponents),
            _collected(self.clips + other.clips),
        )

    __rmul__ = __mul__

    def __pow__(self, exponent: float) -> Power:
        exponents = tuple((axis, e * exponent) for axis, e in self.exponents if e * exponent)
        clips = tuple((inner, power * exponent) for inner, power in self.clips if power * exponent)
        return Power(self.coefficient**exponent, exponents, clips)

    def __truediv__(self, other: Power | float) -> Power:
        return self * (other**-1 if isinstance(other, Power) else 1.0 / other)

    def renamed(self, before: str, after: str) -> Power:
        """The same law in another axis.

        Args:
            before: axis of the law.
            after: what stands in its place.
        """

        def moved(exponents: Exponents) -> Exponents:
            return _collected(tuple((after if axis == before else axis, e) for axis, e in exponents))

        clips = tuple((moved(inner), power) for inner, power in self.clips)
        return Power(self.coefficient, moved(self.exponents), clips)

    def growth(self, axes: Mapping[str, float]) -> float:
        """The exponent of t as t -> infinity where each axis grows as t ** axes[axis] and the others stay."""

        def slope(exponents: Exponents) -> float:
            return sum(e * axes.get(axis, 0.0) for axis, e in exponents)

        return slope(self.exponents) + sum(power * min(0.0, slope(inner)) for inner, power in self.clips)

    def __call__(self, ratios: Mapping[str, float], base: Mapping[str, float] | None = None) -> float:
        """The value at m_axis = ratios[axis]. Exactly the coefficient where every ratio is 1.

        Args:
            ratios: size over base size of every axis.
            base: base sizes, for clips; an axis not in it has base 1.

        Raises:
            PresetError: an axis of the rule has no ratio.
        """
        value = self.coefficient
        for axis, exponent in self.exponents:
            value *= _ratio(axis, ratios) ** exponent
        for inner, power in self.clips:
            at_base = math.prod((base or {}).get(axis, 1) ** e for axis, e in inner)
            at_size = at_base * math.prod(_ratio(axis, ratios) ** e for axis, e in inner)
            value *= (min(1.0, at_size) / min(1.0, at_base)) ** power
        return value

    def __str__(self) -> str:
        parts = [f"min(1, {_text(inner)})" + (f"^{power:g}" if power != 1 else "") for inner, power in self.clips]
        if self.exponents:
            parts.insert(0, _text(self.exponents))
        if self.coefficient != 1 or not parts:
            parts.insert(0, f"{self.coefficient:g}")
        return " ".join(parts)


def _collected(terms: tuple) -> tuple:
    """Exponents of equal keys added up, sorted, zeros dropped."""
    total: dict = {}
    for key, exponent in terms:
        total[key] = total.get(key, 0.0) + exponent
    return tuple(sorted((key, e) for key, e in total.items() if abs(e) > 1e-12))


def _ratio(axis: str, ratios: Mapping[str, float]) -> float:
    if axis not in ratios:
        raise PresetError(f"the rule needs the size of axis {axis!r}; the sizes given are {dict(ratios)}")
    return ratios[axis]


def _text(exponents: Exponents) -> str:
    return " ".join(
        f"{SYMBOLS.get(axis, axis)}^{exponent:g}" if exponent != 1 else SYMBOLS.get(axis, axis)
        for axis, exponent in exponents
    )


ONE = Power()


def axis(name: str) -> Power:
    """m_name, the ratio of one axis' size to its base size."""
    return Power(1.0, ((name, 1.0),))


def product(names: Iterable[str]) -> Power:
    """The product of several axes' ratios; `product(spec.fan_in)` is m_in."""
    return functools.reduce(operator.mul, (axis(name) for name in names), ONE)


def at_most_one(power: Power) -> Power:
    """min(1, power), evaluated at sizes, not at ratios."""
    return Power(1.0, (), ((power.exponents, 1.0),))


def changed(**constants: tuple[float | str | None, float | str | None]) -> dict[str, float | str]:
    """Constants that are not their defaults, each (value, default), as `Preset.choices` has them."""
    return {name: value for name, (value, default) in constants.items() if value is not None and value != default}
