"""Rows of a preset's table: `Rule` has a power law (`Power`) per column, `Scales` their values.

The algebra is the abc-parametrization of Tensor Programs IV (Yang & Hu): a parameter acts as
multiplier * w, starts with standard deviation init_std and trains at learning rate lr. A factor can
move between w and its multiplier without changing training (`Rule.moved`). A form says where these
factors are kept:

| form               | multiplier of a matrix or embedding | multiplier of the readout    |
|--------------------|-------------------------------------|------------------------------|
| plain              | 1                                   | 1                            |
| readout-multiplier | 1                                   | such that init_std is 1      |
| mean-field         | such that init_std is 1             | such that init_std is 1      |
| table-9            | such that the SGD lr is 1           | such that the SGD lr is 1    |

Sources: Tensor Programs V, Table 3 (plain), Table 8 (readout-multiplier) and Table 9 (table-9);
Bordelon et al. 2024, section 2.1 (mean-field).

The entries are powers of the sizes, relative to the base. Exceptions: the patch embedding keeps its
own multiplier in plain and readout-multiplier, because its fan-in D_in is finite. Gains and biases
move in table-9 only. In mean-field, queries and keys have std N^(1 - alpha_a), as in the paper
(`Rule.mean_field`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from typing import Literal, get_args

from mupax.presets.optimizers import Family
from mupax.presets.roles import VECTORS, ParamSpec, PresetError, Role

SYMBOLS = {
    "embed": "D",
    "heads": "H",
    "kv_heads": "K",
    "head_dim": "N",
    "mlp": "F",
    "layers": "L",
    "patch": "D_in",
    "memory": "D_e",
    "representation": "D_r",
    "encoder_layers": "L_e",
    "value_dim": "N_v",
    "experts": "E",
    "active": "a",
    "expert_dim": "m",
}
"""Letters for axes in printed rules, as in the papers."""

Exponents = tuple[tuple[str, float], ...]
"""Exponents of the axes in a product: pairs (axis, exponent), sorted by axis."""

Decay = Literal["coupled", "independent"]
"""Kind of weight decay: w -= lr * wd * w (coupled) or w -= wd * w (independent)."""

Form = Literal["plain", "readout-multiplier", "mean-field", "table-9"]
FORMS: tuple[Form, ...] = get_args(Form)

Number = float | tuple[float, ...]
"""Value of a parameter, or one value per layer of a stacked parameter.

Only measured tables have values per layer.
"""


@dataclasses.dataclass(frozen=True)
class Power:
    """Power law in the sizes of a model.

    Its value is coefficient * product over axes of (size / base size) ** exponent. It is symbolic:
    it can be printed, multiplied or taken to a limit before any size is known.

    Attributes:
        coefficient: Value at base size.
        exponents: Exponent of each axis, sorted by axis and without zeros.
        clips: Pairs (exponents, power). Each adds a factor min(1, x) ** power, where x is the
            product of size ** exponent. x has absolute sizes, not ratios. The factor is divided by
            its value at base size, so that the law is still `coefficient` there.
    """

    coefficient: float = 1.0
    exponents: Exponents = ()
    clips: tuple[tuple[Exponents, float], ...] = ()

    def __mul__(self, other: Power | float) -> Power:
        if not isinstance(other, Power):
            return Power(self.coefficient * other, self.exponents, self.clips)

        coefficient = self.coefficient * other.coefficient
        if not (other.exponents or other.clips):
            return Power(coefficient, self.exponents, self.clips)
        return Power(
            coefficient,
            _collected(self.exponents + other.exponents),
            _collected(self.clips + other.clips),
        )

    # `constants.beta0 * ONE` has the number on the left.
    __rmul__ = __mul__

    def __pow__(self, exponent: float) -> Power:
        exponents = _scaled(self.exponents, exponent)
        clips = _scaled(self.clips, exponent)
        return Power(self.coefficient**exponent, exponents, clips)

    def __truediv__(self, other: Power | float) -> Power:
        if isinstance(other, Power):
            return self * other**-1
        return self * (1.0 / other)

    def renamed(self, axis_name: str, new_name: str) -> Power:
        """Return the law with one axis replaced by another.

        Args:
            axis_name: Axis to replace, such as `layers`.
            new_name: Axis to write instead, such as `encoder_layers`.
        """
        exponents = _renamed(self.exponents, axis_name, new_name)
        clips = []
        for inner, power in self.clips:
            clips.append((_renamed(inner, axis_name, new_name), power))
        return Power(self.coefficient, exponents, tuple(clips))

    def growth(self, axes: Mapping[str, float]) -> float:
        """Return the exponent x for which the law grows as t^x, if its axes grow as powers of t.

        Args:
            axes: Power of t with which each axis grows. Axes that are not in it stay fixed.
        """
        clipped: float = 0
        for inner, power in self.clips:
            # A clip min(1, x) ends at 1 if x grows, so only a shrinking x counts.
            clipped += power * min(0.0, _slope(inner, axes))
        return _slope(self.exponents, axes) + clipped

    def __call__(
        self, ratios: Mapping[str, float], base: Mapping[str, float] | None = None
    ) -> float:
        """Evaluate the law. The value is exactly `coefficient` if every ratio is 1.

        Args:
            ratios: Size divided by base size, by axis.
            base: Base size by axis, which only clips read. An axis that is not in it has base 1.

        Raises:
            PresetError: `ratios` lacks an axis of the law.
        """
        value = self.coefficient
        for axis_name, exponent in self.exponents:
            value *= _ratio(axis_name, ratios) ** exponent

        base = base or {}
        for inner, power in self.clips:
            # Without a base the law is absolute, where every base size is 1.
            at_base = math.prod(base.get(name, 1) ** exponent for name, exponent in inner)
            growth = math.prod(_ratio(name, ratios) ** exponent for name, exponent in inner)
            # Divide by the clip at base size, so that the value there is the coefficient.
            value *= (min(1.0, at_base * growth) / min(1.0, at_base)) ** power
        return value

    def __str__(self) -> str:
        factors = []
        if self.exponents:
            factors.append(_text(self.exponents))
        for inner, power in self.clips:
            clip = f"min(1, {_text(inner)})"
            if power != 1:
                clip += f"^{power:g}"
            factors.append(clip)

        if self.coefficient != 1 or not factors:
            factors.insert(0, f"{self.coefficient:g}")
        return " ".join(factors)


# Cached because a table multiplies the same few laws for every parameter.
@functools.lru_cache(4096)
def _collected(terms: tuple) -> tuple:
    """Merge pairs (key, exponent) of equal keys by adding their exponents.

    The result is sorted and has no exponents of zero.
    """
    total: dict = {}
    for key, exponent in terms:
        total[key] = total.get(key, 0.0) + exponent

    # Sums such as 0.1 + 0.2 - 0.3 miss zero by rounding.
    nonzero = []
    for key, exponent in total.items():
        if abs(exponent) > 1e-12:
            nonzero.append((key, exponent))
    # Sorted, so that laws that are equal compare equal whatever the order of their factors.
    return tuple(sorted(nonzero))


def _scaled(terms: tuple, factor: float) -> tuple:
    """Multiply the exponents of pairs (key, exponent) by a factor. Zeros are left out."""
    scaled = []
    for key, exponent in terms:
        # 0 times an exponent leaves no term, so that equal laws compare equal.
        if exponent * factor:
            scaled.append((key, exponent * factor))
    return tuple(scaled)


def _renamed(exponents: Exponents, axis_name: str, new_name: str) -> Exponents:
    """Replace an axis in exponents by another one. Exponents of one axis are added up."""
    terms = []
    for name, exponent in exponents:
        if name == axis_name:
            name = new_name
        terms.append((name, exponent))
    return _collected(tuple(terms))


def _ratio(axis_name: str, ratios: Mapping[str, float]) -> float:
    """Look up one axis's ratio of size to base size.

    Raises:
        PresetError: `ratios` lacks the axis.
    """
    if axis_name not in ratios:
        raise PresetError(
            f"the rule needs the size of axis {axis_name!r}; the sizes given are {dict(ratios)}"
        )
    return ratios[axis_name]


def _slope(exponents: Exponents, axes: Mapping[str, float]) -> float:
    """Return the exponent x for which a product of axes grows as t^x.

    Args:
        exponents: Exponents of the axes in the product.
        axes: Power of t with which each axis grows. Axes that are not in it stay fixed.
    """
    total: float = 0
    for axis_name, exponent in exponents:
        total += exponent * axes.get(axis_name, 0.0)
    return total


def _text(exponents: Exponents) -> str:
    """Return a product of axes for printing, such as "D^-1 L"."""
    factors = []
    for axis_name, exponent in exponents:
        factor = SYMBOLS.get(axis_name, axis_name)
        if exponent != 1:
            factor += f"^{exponent:g}"
        factors.append(factor)
    return " ".join(factors)


ONE = Power()


def axis(name: str) -> Power:
    """Return the power law that is the ratio size / base size of one axis."""
    return Power(1.0, ((name, 1.0),))


def product(axis_names: Iterable[str]) -> Power:
    """Return the power law that is the product of the ratios size / base size of several axes.

    `product(spec.fan_in)` is a matrix's fan-in divided by its fan-in at base size.
    """
    law = ONE
    for name in axis_names:
        law = law * axis(name)
    return law


def at_most_one(power: Power) -> Power:
    """Return the power law min(1, x), divided by its value at base size.

    x is a product of absolute sizes with the exponents of `power`. So the law becomes constant
    where x crosses 1, whatever the base. The coefficient and the clips of `power` are ignored.
    """
    return Power(1.0, (), ((power.exponents, 1.0),))


def changed(**constants: tuple[float | str | None, float | str | None]) -> dict[str, float | str]:
    """Return the constants that differ from their defaults, by name.

    Presets print them (`Preset.choices`).

    Args:
        **constants: Pairs (value, default). A value `None` is left out.
    """
    choices = {}
    for name, (value, default) in constants.items():
        if value is not None and value != default:
            choices[name] = value
    return choices


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scales:
    """Values of one parameter under a preset at given sizes.

    A field is one number, or a tuple with one number per layer. `Preset.factors` returns values
    relative to those at the base.

    Attributes:
        multiplier: Factor on the parameter in the forward pass.
        init_std: Initial standard deviation. For a gain, its initial value.
        lr: Factor on the optimizer's peak learning rate.
        eps: Factor on the optimizer's eps.
        weight_decay: Factor on the optimizer's weight decay.
    """

    multiplier: Number = 1.0
    init_std: Number = 1.0
    lr: Number = 1.0
    eps: Number = 1.0
    weight_decay: Number = 1.0

    def times(self, other: Scales) -> Scales:
        """Return the product with other values, field by field.

        Neither may have values per layer.
        """
        products = {}
        for field in dataclasses.fields(self):
            products[field.name] = getattr(self, field.name) * getattr(other, field.name)
        return Scales(**products)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """Row of a preset's table: how one kind of parameter scales with the model's sizes.

    Each column is a power law in the ratios of sizes to base sizes.

    Attributes:
        multiplier: Forward multiplier.
        init_std: Initial standard deviation. For a gain, its initial value.
        sgd: Learning rate under SGD, with or without momentum.
        adam: Learning rate under Adam, AdamW and Lion.
        muon: Learning rate under Muon. `None` if Muon leaves the parameter to Adam.
        eps: Adam's eps.
        decays: Whether weight decay applies.
        decay: Share of w that weight decay subtracts at each step. Independent weight decay is this
            column. Coupled weight decay is this column divided by the learning rate.
        init_constant: The source's own constant on the initial std at base size.
        mean_field: Extra factor on the multiplier in the mean-field form, where `init_std` is
            divided by it.
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
        """Return the learning rate column that an optimizer family uses.

        Lion uses Adam's column. So does Muon for a parameter that it leaves to Adam.
        """
        # Lion takes the sign of a momentum: entries of its steps are of the same order as Adam's.
        muon = self.muon
        if muon is None:
            muon = self.adam
        columns = {"sgd": self.sgd, "adam": self.adam, "lion": self.adam, "muon": muon}
        return columns[family]

    def eps_of(self, family: Family) -> Power:
        """Return the power law of eps under an optimizer family.

        It is 1 for SGD, Lion and the matrices of Muon, whose eps does not scale.
        """
        left_to_adam = family == "muon" and self.muon is None
        if family == "adam" or left_to_adam:
            return self.eps
        # SGD and Lion have no eps, and the eps of Muon's orthogonalization does not matter.
        return ONE

    def moved(self, theta: Power) -> Rule:
        """Return the rule with part of the weight moved into the multiplier, which trains the same.

        The multiplier becomes `theta` times larger, and the weight w becomes w / theta. The other
        columns change so that training does not. `Rule.decay` stays, because it is a share of w.
        """
        # All steps must shrink with w. The gradient with respect to w / theta is theta times
        # larger, which SGD's learning rate must undo as well.
        muon = self.muon
        if muon is not None:
            muon = muon / theta
        return dataclasses.replace(
            self,
            multiplier=self.multiplier * theta,
            init_std=self.init_std / theta,
            sgd=self.sgd / theta**2,
            adam=self.adam / theta,
            muon=muon,
            eps=self.eps * theta,
        )

    def renamed(self, axis_name: str, new_name: str) -> Rule:
        """Return the rule with one axis replaced by another in every column.

        Args:
            axis_name: Axis to replace, such as `layers`.
            new_name: Axis to write instead, such as `encoder_layers`.
        """
        columns = {}
        for column, value in vars(self).items():
            if isinstance(value, Power):
                columns[column] = value.renamed(axis_name, new_name)
        return dataclasses.replace(self, **columns)

    def times(
        self, *, sgd: Power | float = 1.0, adam: Power | float = 1.0, eps: Power | float = 1.0
    ) -> Rule:
        """Return the rule with some columns multiplied by a factor.

        Args:
            sgd: Factor on the learning rate under SGD.
            adam: Factor on the learning rates under Adam, Lion and Muon.
            eps: Factor on Adam's eps, 1 by default.
        """
        # Muon's steps have a fixed size, as Adam's: one factor serves both.
        muon = self.muon
        if muon is not None:
            muon = muon * adam
        return dataclasses.replace(
            self,
            sgd=self.sgd * sgd,
            adam=self.adam * adam,
            muon=muon,
            eps=self.eps * eps,
        )

    def with_constants(self, spec: ParamSpec, constants: Mapping[str, float]) -> Rule:
        """Return the rule multiplied by the constants of the parameter's group.

        A `decays` constant of 0 turns weight decay off.

        Args:
            spec: Declaration of the parameter, whose group selects the constants.
            constants: Values by name, such as "rates.readout" (`mupax.presets.constants`).
        """
        rates = constant_power("rates", spec, constants)
        stds = constant_power("stds", spec, constants)
        multipliers = constant_power("multipliers", spec, constants)
        decays = constant_power("decays", spec, constants)
        eps = constant_power("eps", spec, constants)
        if rates == stds == multipliers == decays == eps == ONE:
            return self

        with_rates = self.times(sgd=rates, adam=rates, eps=eps)
        return dataclasses.replace(
            with_rates,
            multiplier=self.multiplier * multipliers,
            init_std=self.init_std * stds,
            decays=self.decays and decays.coefficient > 0,
            # The decay is a share of w, so constants of learning rates do not change it.
            decay=self.decay * decays,
        )

    def factors(
        self, ratios: Mapping[str, float], base: Mapping[str, float], family: Family, decay: Decay
    ) -> Scales:
        """Evaluate every column at a size, relative to the base.

        The weight decay is 0 if it does not apply to the parameter (`decays`).

        Args:
            ratios: Size divided by base size, by axis.
            base: Base size by axis. Only columns with a clip (`at_most_one`) read it.
            family: Optimizer family, which chooses the columns of learning rate and eps.
            decay: "coupled" if the optimizer subtracts lr * weight_decay * w, "independent" if it
                subtracts weight_decay * w.
        """
        lr_law = self.lr(family)
        eps_law = self.eps_of(family)

        lr = lr_law(ratios, base)
        weight_decay = 0.0
        if self.decays:
            weight_decay = self.decay(ratios, base)
            if decay == "coupled":
                # lr * weight_decay is then the decay column.
                weight_decay /= lr
        return Scales(
            multiplier=self.multiplier(ratios, base),
            init_std=self.init_std(ratios, base),
            lr=lr,
            eps=eps_law(ratios, base),
            weight_decay=weight_decay,
        )


TIED = "tied_readout"
"""Group name by which constants refer to a readout that shares the token embedding's array.

It is a name of its own because a tied readout has the fan-in of the base in its multiplier and a
readout with its own array does not.
"""
EVERY = "all"
"""Group name by which constants refer to every group at once."""


def parts(constant_name: str) -> tuple[str, str, str]:
    """Split a constant's name, COLUMN.GROUP or COLUMN.GROUP^AXIS, into column, group and axis.

    The axis is empty if the constant is a factor and not an exponent.
    """
    column, _, group = constant_name.partition(".")
    group, _, axis_name = group.partition("^")
    return column, group, axis_name


def names(spec: ParamSpec) -> set[str]:
    """Return the group names by which constants refer to a parameter.

    A matrix or embedding can also be named by its role alone: "query" for "block.query". Every
    parameter has the name "all", and a tied readout also "tied_readout".
    """
    if spec.tied:
        return {spec.group, TIED, EVERY}
    if spec.role in VECTORS:
        return {spec.group, EVERY}
    return {spec.group, spec.role.value, EVERY}


def constant(column: str, spec: ParamSpec, constants: Mapping[str, float]) -> float:
    """Return the product of the constants that apply to one column of a parameter, 1 if none does.

    Args:
        column: Key of `mupax.presets.constants.COLUMNS`.
        spec: Declaration of the parameter, whose group and role select the constants.
        constants: Factors by name, "COLUMN.GROUP". Exponents ("COLUMN.GROUP^AXIS") are not read.
    """
    # Sorted, because the order of a set differs between processes, and with it the last bit of the
    # product.
    ordered = sorted(names(spec))
    return math.prod(constants.get(f"{column}.{name}", 1.0) for name in ordered)


def constant_power(column: str, spec: ParamSpec, constants: Mapping[str, float]) -> Power:
    """Return the factor that constants put on one column of a parameter, as a power law.

    Args:
        column: Key of `mupax.presets.constants.COLUMNS`.
        spec: Declaration of the parameter, whose group and role select the constants.
        constants: Factors by "COLUMN.GROUP" and exponents by "COLUMN.GROUP^AXIS".
    """
    law = Power(constant(column, spec, constants))
    # Most presets have no exponents, and this runs for every column of every parameter.
    if not any("^" in name for name in constants):
        return law

    for group in sorted(names(spec)):
        prefix = f"{column}.{group}^"
        for name, exponent in constants.items():
            if name.startswith(prefix):
                axis_name = name.removeprefix(prefix)
                law = law * axis(axis_name) ** exponent
    return law


def theta(rule: Rule, spec: ParamSpec, form: Form) -> Power:
    """Return the factor by which a rule's multiplier must grow to bring the rule into another form.

    A form says where factors are kept, in the weight or in its multiplier (table at the top of this
    file). `rule.moved(theta(rule, spec, form))` is the rule in that form: it trains the same.

    Args:
        rule: Rule of one parameter, in any form. Not that of a tied readout (`ParamSpec.tied`).
    """
    if form == "table-9":
        # SGD's learning rate is divided by theta^2, which leaves 1.
        return rule.sgd**0.5
    if spec.role in VECTORS:
        return ONE

    if form == "mean-field":
        # Stored entries then start at std 1, those of q and k at N^(1 - alpha_a) (2405.15712).
        return rule.init_std * rule.mean_field
    if form == "readout-multiplier" and spec.role is Role.READOUT:
        return rule.init_std
    if spec.role is Role.PATCH_EMBEDDING:
        # Its fan-in is finite, so its multiplier need not be 1.
        return ONE
    return ONE / rule.multiplier
