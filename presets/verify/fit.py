"""Growth of values from one dump to the next: exponents that the values have and should have.

A dump holds the values that a training program gives each parameter at one size. Values are
compared as training depends on them, so that it does not matter where a multiplier is (Tensor
Programs IV; `Rule.moved`):

| quantity | value                                       |
|----------|---------------------------------------------|
| start    | multiplier * std                            |
| rate     | multiplier * lr, under SGD multiplier^2 * lr |
| eps      | eps / multiplier                            |
| pull     | lr * wd, the share of w that decays per step |
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from mupax.presets.optimizers import Family
from mupax.presets.roles import AXES, BIASES, VECTORS, PresetError, Role
from mupax.presets.rule import Decay, Power, Rule
from mupax.presets.verify.axes import Model
from mupax.presets.verify.formats.dump import Entry
from mupax.presets.verify.sizes import Parameter

Quantity = Literal["start", "rate", "eps", "pull"]
QUANTITIES: tuple[Quantity, ...] = get_args(Quantity)
GROWING = ("embed", "head_dim", "heads", "layers", "mlp", "kv_heads", "memory", "encoder_layers")
"""Axes that may grow from one dump to the next.

Power laws are written in the width if the width grows. Otherwise they are written in the axis that
grows fastest, the first in this order if several are equally fast.
"""
TOLERANCE = 0.1
"""Largest difference between two exponents that counts as zero. Real mistakes are 1/4 or more."""
_WORDS = {"embed": "width", "layers": "depth", "encoder_layers": "depth"}
_SAME_SIZE = 1.001
"""Largest ratio of two sizes that counts as no growth."""
_ROUNDED_MLP = 1.34
"""Change of MLP size over width up to which it is rounding. From 4 to 3 it is 1.33."""
_POWERS = (0.5, 1.0)
"""Powers of 1/size by which presets scale attention logits and residual branches."""
_ROOM = 0.05
"""Largest difference of an exponent from that of a factor."""
_ROOM_OF_STD = 0.2
"""The same for an exponent of initial stds, which have noise if they are measured."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrowthSeries:
    """Models of different sizes whose axes grow as powers of one size t.

    Attributes:
        models: Smallest model, the base, then the others.
        growth: Power of t with which each axis grows, by axis. An axis that stays has no entry.
        t: Size of every model on the axis `axis`, divided by the base's size.
        axis: Axis whose growth is t.
    """

    models: Sequence[Model]
    growth: Mapping[str, float]
    t: Sequence[float]
    axis: str

    @property
    def word(self) -> str:
        """Word for what grows, such as "width"."""
        return _WORDS.get(self.axis, self.axis)

    @property
    def limit(self) -> str:
        """Key of `analysis.model.LIMITS` for this growth: "depth", "head_dim" or "heads"."""
        if self.axis in ("layers", "encoder_layers"):
            return "depth"
        return "head_dim" if self.growth.get("head_dim") else "heads"

    @property
    def growth_in_step(self) -> dict[str, float]:
        """The field `growth`, with an MLP that grows as the width if only rounding differs.

        Hidden sizes are rounded, as 8/3 of the width to multiples of 256. Values are compared with
        laws at the true sizes. Limits are those of growth in step, because rounding does not go on.
        """
        growth = dict(self.growth)
        base, *larger = self.models
        if "embed" in growth and all(_in_step(_ratios(base, model)) for model in larger):
            growth["mlp"] = growth["embed"]
        return growth

    @property
    def grown(self) -> str:
        """Growing axes with their factors at the last model, as text, such as "embed x4, heads x4".

        Key-value heads, `memory` and encoder layers are left out.
        """
        texts = []
        for axis, exponent in self.growth.items():
            if axis in GROWING[:5]:
                texts.append(f"{axis} x{self.t[-1] ** exponent:.3g}")
        return ", ".join(texts)

    def exponent(self, logs: Sequence[float]) -> float:
        """Return the exponent x for which t^x fits a growing value best.

        It is a least squares fit of the logarithms, forced to be exact at the base.

        Args:
            logs: Logarithm of the value at each model divided by that at the base. The first is 0.
        """
        log_t = [math.log(t) for t in self.t]
        covariance = sum(x * y for x, y in zip(log_t, logs, strict=True))
        return covariance / sum(x * x for x in log_t)


def lines(models: Sequence[Model], family: Family) -> list[GrowthSeries]:
    """Sort models into growth series from the smallest one, a series for each direction of growth.

    Two models are in one direction if their axes grow with the same exponents relative to each
    other, for example the width alone or the depth alone.

    Args:
        family: Optimizer family, which says how a multiplier enters learning rates.

    Raises:
        PresetError: There is one model alone, two models have the same sizes, or a model is larger
            than the smallest on one axis and smaller on another.
    """
    if len(models) < 2:
        raise PresetError(
            f"{models[0].dump.source} is one model, and growth shows between two; "
            "give a second file, at another width or depth"
        )

    # Files may come in any order, so the smallest model is the base.
    base, *larger = sorted(models, key=_total_size)
    # For all models together, so that a slow drift of the MLP's ratio does not split one line.
    in_step = all(_in_step(_ratios(base, model)) for model in larger)
    directions: dict[tuple[float, ...], list[Model]] = {}
    for model in larger:
        direction = _direction(base, model, in_step=in_step)
        directions.setdefault(direction, []).append(model)
    return [_series(base, members, family) for members in directions.values()]


def _total_size(model: Model) -> int:
    return math.prod(model.sizes.get(axis, 1) for axis in GROWING)


def _direction(base: Model, model: Model, *, in_step: bool) -> tuple[float, ...]:
    """Return the exponent with which each axis of `GROWING` grows, relative to the fastest axis.

    Exponents are rounded to 0.1. Models with equal results are in one growth series.

    Args:
        in_step: Whether the MLP counts as growing as the width does.

    Raises:
        PresetError: Both models have the same sizes, or an axis of `model` is smaller than the
            base's.
    """
    ratios = _ratios(base, model)
    if in_step:
        ratios["mlp"] = ratios["embed"]
    smallest = min(ratios, key=ratios.__getitem__)
    if ratios[smallest] < 0.999:
        raise PresetError(
            f"{model.dump.source} has less {smallest} than {base.dump.source} "
            f"({model.sizes[smallest]}, {base.sizes[smallest]}) and more of another; "
            "dump one size that grows at a time"
        )
    fastest = max(ratios.values())
    if fastest < _SAME_SIZE:
        raise PresetError(
            f"{model.dump.source} and {base.dump.source} have the same sizes; "
            "dump the model at another width or depth"
        )
    # Sizes are rounded to whole numbers, so models along one line have nearly the same exponents.
    exponents = []
    for ratio in ratios.values():
        exponents.append(round(math.log(ratio) / math.log(fastest), 1))
    return tuple(exponents)


def _in_step(ratios: Mapping[str, float]) -> bool:
    """Return whether the MLP grows as the width does, but for rounding.

    Args:
        ratios: Size in the model divided by the base's, by axis.
    """
    # Where only one of them grows, that is meant.
    if min(ratios["mlp"], ratios["embed"]) < _SAME_SIZE:
        return max(ratios["mlp"], ratios["embed"]) < _SAME_SIZE
    ratio = ratios["mlp"] / ratios["embed"]
    return 1 / _ROUNDED_MLP < ratio < _ROUNDED_MLP


def _ratios(base: Model, model: Model) -> dict[str, float]:
    """Return the size of each axis in `GROWING`, divided by the base's size, by axis.

    In a model without blocks heads grow as the width does, and layers do not grow.
    """
    ratios = {}
    for axis in GROWING:
        ratios[axis] = model.sizes.get(axis, 1) / base.sizes.get(axis, 1)
    has_blocks = any(parameter.spec.in_block for parameter in base.parameters.values())
    if not has_blocks:
        # A model without blocks has no heads: their sizes are only defaults.
        ratios["heads"] = ratios["embed"]
        ratios["kv_heads"] = ratios["embed"]
        ratios["layers"] = 1.0
        ratios["encoder_layers"] = 1.0
    return ratios


def _series(base: Model, larger: Sequence[Model], family: Family) -> GrowthSeries:
    """Make the growth series of a base and of larger models in one direction from the base."""
    ratios = _ratios(base, larger[-1])
    axis = _fastest_axis(ratios)
    unit = math.log(ratios[axis])
    growth = {}
    for name, ratio in ratios.items():
        if ratio > _SAME_SIZE:
            growth[name] = math.log(ratio) / unit
    models = _with_factors([base, *larger], family)
    t = [model.sizes.get(axis, 1) / base.sizes.get(axis, 1) for model in models]
    return GrowthSeries(models=models, growth=growth, t=t, axis=axis)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Factor:
    """Factor of the forward pass.

    Attributes:
        field: Field of `Dump` that has the factor.
        axis: Axis in whose powers presets scale the factor.
        alike: Roles of the matrices that may hold the factor. Each has the role of a matrix whose
            initial size and learning rate grow alike under all presets if neither holds it.
        as_multiplier: Whether a multiplier of these matrices is the factor whatever their stds and
            learning rates are. Multipliers of queries may be those of all matrices.
    """

    field: Literal["attention", "branch"]
    axis: str
    alike: Mapping[Role, Role]
    as_multiplier: bool


_FACTORS = (
    _Factor(
        field="branch",
        axis="layers",
        alike={Role.ATTENTION_OUT: Role.VALUE, Role.MLP_OUT: Role.MLP_IN},
        as_multiplier=True,
    ),
    # Queries or keys may hold the factor of their products.
    _Factor(
        field="attention", axis="head_dim", alike={Role.QUERY: Role.VALUE}, as_multiplier=False
    ),
    _Factor(field="attention", axis="head_dim", alike={Role.KEY: Role.VALUE}, as_multiplier=False),
)


def _with_factors(models: Sequence[Model], family: Family) -> list[Model]:
    """Return models whose factors on attention and branches are not in values of matrices.

    The matrices' multipliers are divided by such a factor, and `Dump.attention` or `Dump.branch` is
    multiplied by it, where one that is not given counts as 1. Models whose matrices hold no factor
    are returned unchanged.

    A factor on residual branches may be a multiplier of their last matrices, and one on attention
    logits a multiplier of queries. Both may also be in the initial stds and learning rates of these
    matrices, which then train alike (Tensor Programs IV; `Rule.moved`).

    Args:
        models: Models of one growth series, the base first.
    """
    result = list(models)
    for factor in _FACTORS:
        result = _with_one_factor(result, factor, family)
    return result


def _with_one_factor(models: list[Model], factor: _Factor, family: Family) -> list[Model]:
    base = models[0]
    names = [name for name, p in base.parameters.items() if p.spec.role in factor.alike]
    result = [_times(base, (), factor, 1.0)]
    for model in models[1:]:
        size = model.sizes.get(factor.axis, 1) / base.sizes.get(factor.axis, 1)
        if size < _SAME_SIZE or not names:
            return models
        powers = {_power(name, base, model, math.log(size), factor, family) for name in names}
        power = powers.pop()
        # A factor is in all of these matrices, or in none.
        if powers or power is None:
            return models
        biases = _scaled_biases(base, model, math.log(size) * power, factor, family)
        result.append(_times(model, [*names, *biases], factor, size**-power))
    return result


def _times(model: Model, names: Sequence[str], factor: _Factor, value: float) -> Model:
    """Return the model with a factor moved from the multipliers of parameters to its own field."""
    parameters = dict(model.parameters)
    for name in names:
        entry = parameters[name].entry
        entry = dataclasses.replace(entry, multiplier=entry.multiplier / value)
        parameters[name] = dataclasses.replace(parameters[name], entry=entry)
    moved = value * (getattr(model.dump, factor.field) or 1.0)
    dump = dataclasses.replace(model.dump, **{factor.field: moved})
    return dataclasses.replace(model, dump=dump, parameters=parameters)


def _power(
    name: str, base: Model, model: Model, log_size: float, factor: _Factor, family: Family
) -> float | None:
    """Return the power of 1/size with which a matrix holds a factor, or `None` if it holds none.

    Args:
        log_size: Logarithm of the factor's axis over the base's.
    """
    growth = _growth(name, base, model, family)
    if factor.as_multiplier:
        power = _nearest(growth.multiplier / log_size, _ROOM)
        if power is not None:
            return power

    role = factor.alike[base.parameters[name].spec.role]
    for like_name, parameter in base.parameters.items():
        if parameter.spec.role is role:
            alike = _growth(like_name, base, model, family)
            power = _nearest((growth.start - alike.start) / log_size, _ROOM_OF_STD)
            rate = (growth.rate - alike.rate) / _times_in_rate(family) / log_size
            return power if power == _nearest(rate, _ROOM) else None
    return None


def _nearest(exponent: float, room: float) -> float | None:
    """Return the power of `_POWERS` with which a value falls, or `None`. NaN is near to none."""
    for power in _POWERS:
        if abs(exponent + power) <= room:
            return power
    return None


def _scaled_biases(
    base: Model, model: Model, fall: float, factor: _Factor, family: Family
) -> list[str]:
    """Return the biases of matrices with a factor whose own learning rates hold it as well.

    Args:
        fall: Logarithm of the factor, with a positive sign.
    """
    other_rates: list[float] = []
    rates: dict[str, float] = {}
    for name, parameter in base.parameters.items():
        spec = parameter.spec
        if spec.role not in VECTORS or not spec.in_block:
            continue
        rate = _growth(name, base, model, family).rate
        if spec.role in BIASES and spec.of in factor.alike:
            rates[name] = rate
        else:
            other_rates.append(rate)
    expected = -_times_in_rate(family) * fall
    names = []
    for name, rate in rates.items():
        if any(abs(rate - usual - expected) <= _ROOM * fall for usual in other_rates):
            names.append(name)
    return names


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Growth:
    """Logarithms of one parameter's values over those of the base. NaN if a value is unknown."""

    multiplier: float
    start: float
    rate: float


def _growth(name: str, base: Model, model: Model, family: Family) -> _Growth:
    first = base.parameters[name].entry
    last = model.parameters[name].entry
    multiplier = math.log(last.multiplier / first.multiplier)
    return _Growth(
        multiplier=multiplier,
        start=multiplier + _log_ratio(first.std, last.std),
        rate=_times_in_rate(family) * multiplier + _log_ratio(first.lr, last.lr),
    )


def _times_in_rate(family: Family) -> float:
    """Return how often a multiplier enters a step. SGD's gradient has it as well."""
    return 2.0 if family == "sgd" else 1.0


def _log_ratio(first: float | None, last: float | None) -> float:
    return math.log(last / first) if first and last else math.nan


def _fastest_axis(ratios: Mapping[str, float]) -> str:
    """Return the axis in which power laws are written.

    It is the width if the width grows, else the axis of the largest ratio, the first of equals.

    Args:
        ratios: Size in the model divided by the base's, by axis.
    """
    if ratios["embed"] > _SAME_SIZE:
        return "embed"
    # `max` returns the first of equals. Rounding makes equals of 4 and 4.0000001.
    return max(GROWING, key=lambda axis: round(math.log(ratios[axis]), 6))


def observed(
    entry: Entry, family: Family, decay: Decay, multiplier: float = 1.0
) -> dict[Quantity, float | None]:
    """Return a parameter's value of each quantity, as training depends on it.

    Quantities are "start" (multiplier * std), "rate" (multiplier * lr), "eps" (eps / multiplier)
    and "pull" (lr * wd). `None` stands for an unknown value.

    Args:
        entry: Values that the dump gives the parameter.
        family: Optimizer family. The rate under "sgd" has the multiplier twice.
        decay: "coupled" if weight decay is multiplied by the learning rate.
        multiplier: Further factor on the parameter's output, such as that of a tied readout.
    """
    factor = entry.multiplier * multiplier
    # SGD's gradient of w has the multiplier once, and the forward pass has it again.
    rate_factor = factor ** _times_in_rate(family)
    return {
        "start": _product(factor, entry.std),
        "rate": _product(rate_factor, entry.lr),
        "eps": _product(1 / factor, entry.eps),
        # The share of w that one step subtracts, whichever way the code writes it.
        "pull": entry.wd if decay == "independent" else _product(entry.lr, entry.wd),
    }


def _product(first: float | None, second: float | None) -> float | None:
    if first is None or second is None:
        return None
    return first * second


def expected(rule: Rule, family: Family) -> dict[Quantity, Power]:
    """Return a preset's power law of each quantity for one parameter, to compare with `observed`.

    Args:
        rule: Row of the preset's table for the parameter.
        family: Optimizer family. "eps" is in the result only if Adam trains the parameter.
    """
    multiplier = rule.multiplier
    rate_factor = multiplier**2 if family == "sgd" else multiplier
    laws: dict[Quantity, Power] = {
        "start": multiplier * rule.init_std,
        "rate": rate_factor * rule.lr(family),
        "pull": rule.decay,
    }
    left_to_adam = family == "muon" and rule.muon is None
    if family == "adam" or left_to_adam:
        laws["eps"] = rule.eps / multiplier
    return laws


def value(power: Power, model: Model, parameter: Parameter | None = None) -> float:
    """Return the value of a power law at a model's sizes, with 1 as the base size of every axis.

    Args:
        model: Model whose sizes are used. An axis that the model does not have has size 1.
        parameter: Parameter whose own sizes replace those of the model.
    """
    # A law may name an axis that this model lacks. The size 1 leaves it out of the product.
    sizes: dict[str, float] = {**dict.fromkeys(AXES, 1), **model.sizes}
    if parameter is not None:
        sizes.update(parameter.sizes)
    return power(sizes)
