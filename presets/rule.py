"""`Rule`: one row of a preset's table as power laws, and `Scales`: the numbers it gives one parameter.

The algebra is abc-parametrization (Yang & Hu, Tensor Programs IV): a parameter acts as multiplier * w, starts with
std init_std, and trains at lr. `Rule.moved` is its symmetry: a form says where multipliers sit, and changing it never changes
training.

| form               | multiplier of a matrix or embedding | of the readout | source                                   |
|--------------------|-------------------------------------|----------------|------------------------------------------|
| plain              | 1                                   | 1              | Tensor Programs V, Table 3               |
| readout-multiplier | 1                                   | its whole scale| Tensor Programs V, Table 8               |
| mean-field         | its whole scale, std 1              | the same       | Bordelon et al. 2024, section 2.1        |
| table-9            | what makes every SGD rate the same  | the same       | Tensor Programs V, Table 9               |

The patch embedding keeps its D_in^-1/2 in the first two (D_in is finite). Gains and biases move in table-9 only.
In the mean-field form queries and keys have std N^(1-alpha_a), as in the paper (`Rule.mean_field`).

Power laws in the logical sizes are the arithmetic of every preset's table.

A `Power` is coefficient * product over axes of m_axis^exponent with m_axis = size / base size. It stays symbolic until
sizes are given, so a rule can be evaluated, printed, or taken to a limit without running anything.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Iterable, Mapping
from typing import Literal, get_args

from mupax.presets.optimizers import Family
from mupax.presets.roles import VECTORS, ParamSpec, PresetError, Role

SYMBOLS = {
    "embed": "D", "heads": "H", "kv_heads": "K", "head_dim": "N", "mlp": "F", "layers": "L", "patch": "D_in",
    "memory": "D_e", "representation": "D_r", "encoder_layers": "L_e", "value_dim": "N_v",
    "experts": "E", "active": "a", "expert_dim": "m",
}  # fmt: skip
"""Letters for axes in printed rules, after the papers."""

Exponents = tuple[tuple[str, float], ...]

Decay = Literal["coupled", "independent"]
Form = Literal["plain", "readout-multiplier", "mean-field", "table-9"]
FORMS: tuple[Form, ...] = get_args(Form)

Number = float | tuple[float, ...]
"""One number, or one per layer of a stacked parameter (only measured tables have the latter)."""


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
            return Power(self.coefficient * other, self.exponents, self.clips)
        if not (other.exponents or other.clips):
            return Power(self.coefficient * other.coefficient, self.exponents, self.clips)
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
            return _collected(
                tuple((after if axis == before else axis, e) for axis, e in exponents)
            )

        clips = tuple((moved(inner), power) for inner, power in self.clips)
        return Power(self.coefficient, moved(self.exponents), clips)

    def growth(self, axes: Mapping[str, float]) -> float:
        """The exponent of t as t -> infinity where each axis grows as t ** axes[axis] and the others stay."""
        clipped: float = 0
        for inner, power in self.clips:
            clipped += power * min(0.0, _slope(inner, axes))
        return _slope(self.exponents, axes) + clipped

    def __call__(
        self, ratios: Mapping[str, float], base: Mapping[str, float] | None = None
    ) -> float:
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
        parts = [
            f"min(1, {_text(inner)})" + (f"^{power:g}" if power != 1 else "")
            for inner, power in self.clips
        ]
        if self.exponents:
            parts.insert(0, _text(self.exponents))
        if self.coefficient != 1 or not parts:
            parts.insert(0, f"{self.coefficient:g}")
        return " ".join(parts)


@functools.lru_cache(4096)  # a table multiplies the same few laws for every parameter
def _collected(terms: tuple) -> tuple:
    """Return exponents of equal keys added up, sorted, without zeros."""
    total: dict = {}
    for key, exponent in terms:
        total[key] = total.get(key, 0.0) + exponent
    return tuple(sorted((key, e) for key, e in total.items() if abs(e) > 1e-12))


def _ratio(axis: str, ratios: Mapping[str, float]) -> float:
    if axis not in ratios:
        raise PresetError(
            f"the rule needs the size of axis {axis!r}; the sizes given are {dict(ratios)}"
        )
    return ratios[axis]


def _slope(exponents: Exponents, axes: Mapping[str, float]) -> float:
    """Return the exponent of a product of axes, each of which grows as `axes` says."""
    total: float = 0
    for axis, exponent in exponents:
        total += exponent * axes.get(axis, 0.0)
    return total


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
    return {
        name: value
        for name, (value, default) in constants.items()
        if value is not None and value != default
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scales:
    """Numbers for one parameter. `lr`, `eps`, `weight_decay` multiply the optimizer's; `init_std` is absolute."""

    multiplier: Number = 1.0
    init_std: Number = 1.0
    lr: Number = 1.0
    eps: Number = 1.0
    weight_decay: Number = 1.0

    def times(self, other: Scales) -> Scales:
        """Columnwise product."""
        return Scales(
            **{
                f.name: getattr(self, f.name) * getattr(other, f.name)
                for f in dataclasses.fields(self)
            }
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """One row of a preset's table: how each column scales, as power laws.

    Attributes:
        multiplier: forward multiplier.
        init_std: initial standard deviation (of a gain: its value).
        sgd: learning rate under SGD and momentum.
        adam: learning rate under Adam, AdamW and Lion.
        muon: learning rate under Muon; None where the parameter stays on Adam.
        eps: Adam's eps.
        decays: whether weight decay applies at all.
        decay: independent weight decay; the coupled one is this over the learning rate, so that lr*wd is `decay`.
        init_constant: a source's own constant on the initial std at base size.
        mean_field: what the mean-field form has in the multiplier beyond multiplier * init_std.
    """

    multiplier: Power = ONE
    init_std: Power = ONE
    sgd: Power = ONE
    adam: Power = ONE
    muon: Power | None = None
    eps: Power = ONE
    decays: bool = True
    decay: Power = ONE
    init_constant: float = 1.0
    mean_field: Power = ONE

    def lr(self, family: Family) -> Power:
        """The learning rate's column of an optimizer family."""
        muon = self.adam if self.muon is None else self.muon
        return {"sgd": self.sgd, "adam": self.adam, "lion": self.adam, "muon": muon}[family]

    def eps_of(self, family: Family) -> Power:
        """Adam's eps scales; Muon's orthogonalization, SGD and Lion have none that matters."""
        on_adam = family == "adam" or (family == "muon" and self.muon is None)
        return self.eps if on_adam else ONE

    def moved(self, theta: Power) -> Rule:
        """The same training with multiplier theta times larger: std/theta, SGD lr/theta^2, other lr/theta, eps*theta."""
        return dataclasses.replace(
            self,
            multiplier=self.multiplier * theta,
            init_std=self.init_std / theta,
            sgd=self.sgd / theta**2,
            adam=self.adam / theta,
            muon=None if self.muon is None else self.muon / theta,
            eps=self.eps * theta,
        )

    def renamed(self, before: str, after: str) -> Rule:
        """The rule with one axis in place of another in every column.

        Args:
            before: axis of the rule.
            after: what stands in its place.
        """
        columns = {
            name: x.renamed(before, after) for name, x in vars(self).items() if isinstance(x, Power)
        }
        return dataclasses.replace(self, **columns)

    def times(
        self, *, sgd: Power | float = 1.0, adam: Power | float = 1.0, eps: Power | float = 1.0
    ) -> Rule:
        """The rule with factors on some columns; `adam` goes on Muon's rate too.

        Args:
            sgd: on the rate of SGD.
            adam: on those of Adam, Lion and Muon.
            eps: on Adam's eps.
        """
        return dataclasses.replace(
            self,
            sgd=self.sgd * sgd,
            adam=self.adam * adam,
            muon=None if self.muon is None else self.muon * adam,
            eps=self.eps * eps,
        )

    def with_constants(self, spec: ParamSpec, constants: Mapping[str, float]) -> Rule:
        """The rule with the constants of the spec's group (`mupax.presets.constants`).

        Args:
            spec: the parameter's declaration.
            constants: COLUMN.GROUP to a factor.
        """
        columns = ("rates", "stds", "multipliers", "decays", "eps")
        by = {column: constant_power(column, spec, constants) for column in columns}
        if set(by.values()) == {ONE}:
            return self
        return dataclasses.replace(
            self.times(sgd=by["rates"], adam=by["rates"], eps=by["eps"]),
            multiplier=self.multiplier * by["multipliers"],
            init_std=self.init_std * by["stds"],
            decays=self.decays and by["decays"].coefficient > 0,
            decay=self.decay * by["decays"],
        )

    def factors(
        self, ratios: Mapping[str, float], base: Mapping[str, float], family: Family, decay: Decay
    ) -> Scales:
        """Every column at these ratios of size to base size.

        Args:
            ratios: size over base size of every axis.
            base: base size of every axis, for clips.
            family: of the optimizer.
            decay: coupled (the pull is lr * weight decay) or independent.
        """
        lr = self.lr(family)(ratios, base)
        wd = self.decay(ratios, base) / (lr if decay == "coupled" else 1.0) if self.decays else 0.0
        return Scales(
            multiplier=self.multiplier(ratios, base),
            init_std=self.init_std(ratios, base),
            lr=lr,
            eps=self.eps_of(family)(ratios, base),
            weight_decay=wd,
        )


def constant(column: str, spec: ParamSpec, constants: Mapping[str, float]) -> float:
    """What the constants multiply one of the spec's columns by.

    Args:
        column: one of `mupax.presets.constants.COLUMNS`.
        spec: the parameter's declaration.
        constants: COLUMN.GROUP to a factor.
    """
    return math.prod(constants.get(f"{column}.{name}", 1.0) for name in names(spec))


def constant_power(column: str, spec: ParamSpec, constants: Mapping[str, float]) -> Power:
    """Return what the constants multiply one of the spec's columns by, as a power law in the sizes.

    Args:
        column: one of `mupax.presets.constants.COLUMNS`.
        spec: the parameter's declaration.
        constants: COLUMN.GROUP to a factor, COLUMN.GROUP^AXIS to an exponent.
    """
    law = Power(constant(column, spec, constants))
    if not any("^" in name for name in constants):
        return law
    for name in sorted(names(spec)):
        prefix = f"{column}.{name}^"
        for key, exponent in constants.items():
            if key.startswith(prefix):
                law = law * axis(key.removeprefix(prefix)) ** exponent
    return law


TIED = "tied_readout"
"""Constants' name of a readout that shares the embedding's table. Its multiplier has the base's fan-in, one with a table has not."""
EVERY = "all"
"""Constants' name of every group."""


def parts(constant: str) -> tuple[str, str, str]:
    """Return column, group and axis of a constant's name; the axis is empty where the constant is a factor."""
    column, _, group = constant.partition(".")
    group, _, axis_name = group.partition("^")
    return column, group, axis_name


def names(spec: ParamSpec) -> set[str]:
    """What constants call the spec's group; of a matrix its role will do."""
    if spec.tied:
        return {spec.group, TIED, EVERY}
    return {spec.group, EVERY} if spec.role in VECTORS else {spec.group, spec.role.value, EVERY}


def theta(rule: Rule, spec: ParamSpec, form: Form) -> Power:
    """How much larger the multiplier of `rule` is in `form`: the theta of `Rule.moved`.

    Args:
        rule: the untied row, in whatever form its author wrote it.
        spec: the parameter.
        form: where the multiplier shall be.
    """
    if form == "table-9":
        return rule.sgd**0.5
    if spec.role in VECTORS:
        return ONE
    whole = rule.init_std
    match form:
        case "mean-field":
            return whole * rule.mean_field
        case "readout-multiplier" if spec.role is Role.READOUT:
            return whole
        case _ if spec.role is Role.PATCH_EMBEDDING:
            return ONE
    return ONE / rule.multiplier
