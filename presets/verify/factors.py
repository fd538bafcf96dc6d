"""Factors of the forward pass that code writes as values of matrices.

A factor on residual branches may be a multiplier of their last matrices, and one on attention
logits a multiplier of queries. Both may also be in the initial stds and learning rates of these
matrices, which then train alike (Tensor Programs IV; `Rule.moved`). Each is judged as the factor.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

from mupax.presets.optimizers import Family
from mupax.presets.roles import BIASES, VECTORS, Role
from mupax.presets.verify.axes import Model

_POWERS = (0.5, 1.0)
"""Powers of 1/size by which presets scale attention logits and residual branches."""
_ROOM = 0.05
"""Largest difference of an exponent from that of a factor."""
_ROOM_OF_STD = 0.2
"""The same for an exponent of initial stds, which have noise if they are measured."""
_GROWS = 1.001
"""Smallest ratio of two sizes that counts as growth."""


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


def with_factors(models: Sequence[Model], family: Family) -> list[Model]:
    """Return models whose factors on attention and branches are not in values of matrices.

    The matrices' multipliers are divided by such a factor, and `Dump.attention` or `Dump.branch` is
    multiplied by it, where one that is not given counts as 1. Models whose matrices hold no factor
    are returned unchanged.

    Args:
        models: Models of one growth series, the base first.
        family: Optimizer family.
    """
    result = list(models)
    for factor in _FACTORS:
        result = _with_factor(result, factor, family)
    return result


def _with_factor(models: list[Model], factor: _Factor, family: Family) -> list[Model]:
    base = models[0]
    names = [name for name, p in base.parameters.items() if p.spec.role in factor.alike]
    result = [_times(base, (), factor, 1.0)]
    for model in models[1:]:
        size = model.sizes.get(factor.axis, 1) / base.sizes.get(factor.axis, 1)
        if size < _GROWS or not names:
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
    own = value * (getattr(model.dump, factor.field) or 1.0)
    dump = dataclasses.replace(model.dump, **{factor.field: own})
    return dataclasses.replace(model, dump=dump, parameters=parameters)


def _power(
    name: str, base: Model, model: Model, log_size: float, factor: _Factor, family: Family
) -> float | None:
    """Return the power of 1/size with which a matrix holds a factor, or `None` if it holds none.

    Args:
        log_size: Logarithm of the factor's axis over the base's.
    """
    own = _growth(name, base, model, family)
    if factor.as_multiplier:
        power = _nearest(own.multiplier / log_size, _ROOM)
        if power is not None:
            return power

    role = factor.alike[base.parameters[name].spec.role]
    for other, parameter in base.parameters.items():
        if parameter.spec.role is role:
            alike = _growth(other, base, model, family)
            power = _nearest((own.start - alike.start) / log_size, _ROOM_OF_STD)
            rate = (own.rate - alike.rate) / _times_in_rate(family) / log_size
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
    others: list[float] = []
    own: dict[str, float] = {}
    for name, parameter in base.parameters.items():
        spec = parameter.spec
        if spec.role not in VECTORS or not spec.in_block:
            continue
        rate = _growth(name, base, model, family).rate
        if spec.role in BIASES and spec.of in factor.alike:
            own[name] = rate
        else:
            others.append(rate)
    expected = -_times_in_rate(family) * fall
    names = []
    for name, rate in own.items():
        if any(abs(rate - other - expected) <= _ROOM * fall for other in others):
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
