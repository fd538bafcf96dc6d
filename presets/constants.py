"""Constants of parameter groups: factors that tuning finds for a group, on top of a preset's rule.

A constant is named COLUMN.GROUP, such as `rates.readout`. The column is a scaled quantity
(`COLUMNS`). `rates.readout` 4 is four times the learning rate at every size. The preset's rule
still says how the learning rate scales.

Groups have the names that `mupax presets table` shows. For a matrix the role is enough: `query` is
`block.query`. `tied_readout` is a readout that shares the embedding's array (it also counts as
`readout`), and `all` is every group. Only `decays` scales lr*wd: `rates` leaves it unchanged.

A published source may scale a value by another power of a size than the preset does.
`stds.mlp_out^layers` -0.5 is a further factor (layers / layers of the base)^-0.5. It is 1 at the
base.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any

from mupax.presets.roles import AXES, BIASES, VECTORS, ParamSpec, PresetError, Role
from mupax.presets.rule import EVERY, TIED, names, parts

COLUMNS = {
    "rates": "learning rate",
    "stds": "initial standard deviation; of a gain, its value",
    "multipliers": "forward multiplier",
    "decays": "weight decay",
    "eps": "Adam's eps",
}
"""Scaled quantity, in words, by the first part of a constant's name, COLUMN.GROUP."""

_MAY_BE_ZERO = ("decays", "stds")
"""Columns that accept 0: no weight decay, or matrices that start at 0."""

_PREFIXES = ("", "block.", "encoder.", "encoder.block.", "block.cross.")


def _group_names() -> tuple[str, ...]:
    """Return every name that a parameter group can have, such as "block.query" or "readout"."""
    endings = [role.value for role in Role]
    for owner in Role:
        for role in Role:
            if role in VECTORS:
                endings.append(f"{owner.value}.{role.value}")

    groups = []
    for prefix in _PREFIXES:
        groups += [f"{prefix}{ending}" for ending in endings]
    return (*groups, TIED, EVERY)


GROUPS = _group_names()
"""Every name that a parameter group can have."""


def read(constants: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, float]]:
    """Split constants into the preset's own and those of parameter groups.

    Args:
        constants: Values by name. A column may also hold a mapping from group to value, as in
            `{"rates": {"readout": 4}}`.

    Returns:
        The preset's own constants as they are, and the constants of groups by "COLUMN.GROUP" as
        numbers.

    Raises:
        PresetError: A constant of a group has an unknown column or group, or a value that the
            column cannot have.
    """
    flat: dict[str, Any] = {}
    for name, value in constants.items():
        # An empty mapping is kept. The preset then refuses the name as an unknown constant.
        if name in COLUMNS and isinstance(value, Mapping) and value:
            for group, number in value.items():
                flat[f"{name}.{group}"] = number
        else:
            flat[name] = value

    # Only constants of groups have a dot in their name.
    preset_constants = {}
    groups = {}
    for name, value in flat.items():
        if "." in name:
            groups[name] = _number(name, value)
        else:
            preset_constants[name] = value
    return preset_constants, groups


def _number(name: str, value: Any) -> float:
    """Check the name and value of one group's constant and return the value as a float.

    A factor is from 1e-30 to 1e30, or 0 for `decays` and `stds`. An exponent ("COLUMN.GROUP^AXIS")
    is any finite number.

    Raises:
        PresetError: The column, group or axis is unknown, or the value is out of range.
    """
    column, group, axis = parts(name)
    if column not in COLUMNS:
        owner, _, last = name.rpartition(".")
        if last in COLUMNS:
            # "readout.rates" is most likely meant as "rates.readout".
            candidates = [f"{last}.{owner}"]
        else:
            # The column is unknown. Suggest a column of the same group.
            candidates = [f"{word}.{group}" for word in COLUMNS]
        raise PresetError(f"no constant is named {name!r}; {_nearest(name, candidates)}")
    if group not in GROUPS:
        hint = _nearest(group, GROUPS)
        raise PresetError(f"{name}: no parameter group is named {group!r}; {hint}")

    number = _float_or_nan(value)
    if axis:
        # An exponent may be negative, which a factor may not.
        if axis not in AXES:
            raise PresetError(f"{name}: no logical axis is named {axis!r}; {_nearest(axis, AXES)}")
        if not math.isfinite(number):
            raise PresetError(f"{name}={value}: write an exponent, such as {name}=-0.5")
        return number

    # Numbers of this range neither overflow nor underflow in float32.
    if 1e-30 <= number <= 1e30:
        return number
    if number == 0 and column in _MAY_BE_ZERO:
        return number
    zero = "0, or " if column in _MAY_BE_ZERO else ""
    raise PresetError(f"{name}={value}: write {zero}a number from 1e-30 to 1e30, such as {name}=2")


def _float_or_nan(value: Any) -> float:
    """Return the value as a float, or nan if it is a bool or cannot be converted."""
    # float(True) would be 1.
    if isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def means_something(constant: str, specs: Iterable[ParamSpec]) -> bool:
    """Return whether a constant of a parameter group would change anything in a model.

    The result is false if the model lacks the group, or if the constant has no effect on it, such
    as `stds` on biases. It is true for every constant of the group `all`. The value of the constant
    is not looked at.

    Args:
        constant: Name of the constant, COLUMN.GROUP, such as `rates.readout`.
        specs: Declarations of the model's parameters, including a tied readout.
    """
    try:
        # The value does not matter: only names are checked here.
        check({constant: 1.0}, specs, "")
    except PresetError:
        return False
    return True


def check(constants: Mapping[str, float], specs: Iterable[ParamSpec], preset: str) -> None:
    """Raise an error for constants of parameter groups that change nothing in a model.

    Constants of the group `all` are accepted unchecked.

    Args:
        constants: Values by name, `COLUMN.GROUP` or `COLUMN.GROUP^AXIS`.
        specs: Declarations of the model's parameters, including a tied readout.
        preset: Name of the preset, for the message.

    Raises:
        PresetError: The model lacks the group, two constants name one group, or the constant has no
            effect on the group, such as `stds` on biases.
    """
    groups = {spec.group: spec for spec in specs}
    specs_by_name = {}
    for spec in groups.values():
        for name in names(spec):
            specs_by_name[name] = spec

    for constant in constants:
        column, group, _ = parts(constant)
        if group == EVERY:
            continue
        spec = specs_by_name.get(group)
        if spec is None:
            hint = _nearest(group, groups)
            raise PresetError(f"{constant}: the model has no parameters {group!r}; {hint}")

        ending = constant.removeprefix(f"{column}.{group}")
        full_name = f"{column}.{spec.group}{ending}"
        # `tied_readout` may stand beside `readout`, because their factors multiply.
        if group not in (spec.group, TIED) and full_name in constants:
            raise PresetError(f"{constant} and {full_name} name one group; write one of them")

        reason = _reason_without_effect(column, spec, preset)
        if reason is not None:
            raise PresetError(f"{constant} changes nothing: {reason}")


def _reason_without_effect(column: str, spec: ParamSpec, preset: str) -> str | None:
    """Return the reason why a column's constant cannot change a parameter, or `None` if it can."""
    if spec.tied and column != "multipliers":
        owner = Role.TOKEN_EMBEDDING.value
        return f"a tied readout has only a multiplier of its own; write {column}.{owner}"
    if column == "stds" and spec.role in BIASES:
        return "biases start at 0"
    if column == "decays" and spec.role in VECTORS:
        return f"{preset} does not decay gains and biases"
    return None


def _nearest(name: str, candidates: Iterable[str]) -> str:
    """Return "did you mean ...?" with the most similar candidate, however different it is."""
    # A cutoff of 0 always gives a candidate.
    matches = difflib.get_close_matches(name, [*candidates], n=1, cutoff=0)
    return f"did you mean {matches[0]!r}?"
