"""Constants of parameter groups: what tuning finds for one group, as factors on its base numbers. How it scales stays the rule's.

`rates.readout` 4 is four times the learning rate in every size. A group is named as `mupax presets table` shows it; a role of
matrices will do: `query` is `block.query`. The pull lr*wd is scaled by `decays` alone: a rate does not change it.
`tied_readout` is a readout that shares the embedding's table, beside `readout`; `all` is every group.

A published source may scale a number by another power of a size than the preset does. `stds.mlp_out^layers` -0.5 is a further
factor (layers / layers of the base)^-0.5; at the base it is 1.
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
"""Word before the dot, and what it scales. A decay may be 0, which turns it off, and a deviation, which starts matrices at 0."""
_MAY_BE_ZERO = ("decays", "stds")

_VECTORS = [f"{of.value}.{role.value}" for of in Role for role in Role if role in VECTORS]
_WHERE = ("", "block.", "encoder.", "encoder.block.", "block.cross.")
GROUPS = (
    *(f"{where}{name}" for where in _WHERE for name in (*(role.value for role in Role), *_VECTORS)),
    TIED,
    EVERY,
)
"""Every name that a group can have."""


def read(constants: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, float]]:
    """A preset's own constants, and those of groups, whose names have a dot.

    Args:
        constants: name to value; a column of `COLUMNS` may also hold group to number.

    Raises:
        PresetError: no such column or group, or a value that cannot be one.
    """
    flat: dict[str, Any] = {}
    for name, value in constants.items():
        several = value.items() if name in COLUMNS and isinstance(value, Mapping) else ()
        flat |= {f"{name}.{group}": number for group, number in several} or {name: value}
    groups = {name: _number(name, value) for name, value in flat.items() if "." in name}
    return {name: value for name, value in flat.items() if "." not in name}, groups


def _number(name: str, value: Any) -> float:
    column, group, axis = parts(name)
    if column not in COLUMNS:
        owner, _, last = name.rpartition(".")
        turned = [f"{last}.{owner}"] if last in COLUMNS else [f"{word}.{group}" for word in COLUMNS]
        raise PresetError(f"no constant is named {name!r}; {_nearest(name, turned)}")
    if group not in GROUPS:
        raise PresetError(
            f"{name}: no parameter group is named {group!r}; {_nearest(group, GROUPS)}"
        )
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if axis:
        if axis not in AXES:
            raise PresetError(f"{name}: no logical axis is named {axis!r}; {_nearest(axis, AXES)}")
        if not math.isfinite(number):
            raise PresetError(f"{name}={value}: write an exponent, such as {name}=-0.5")
        return number
    if not (
        1e-30 <= number <= 1e30 or (number == 0 and column in _MAY_BE_ZERO)
    ):  # as float32 has them
        zero = "0, or " if column in _MAY_BE_ZERO else ""
        raise PresetError(
            f"{name}={value}: write {zero}a number from 1e-30 to 1e30, such as {name}=2"
        )
    return number


def means_something(constant: str, specs: Iterable[ParamSpec]) -> bool:
    """Return whether a constant's group is one of a model's, with a number of its own for that column.

    Args:
        constant: its name.
        specs: of the model, with that of a tied readout.
    """
    try:
        check({constant: 1.0}, specs, "")
    except PresetError:
        return False
    return True


def check(constants: Mapping[str, float], specs: Iterable[ParamSpec], preset: str) -> None:
    """Whether every constant does something in a model.

    Args:
        constants: of groups.
        specs: of the model, with that of a tied readout.
        preset: its name, for the message.

    Raises:
        PresetError: a group that the model does not have, that is named twice, or whose number is none of its own.
    """
    groups = {spec.group: spec for spec in specs}
    by_name = {name: spec for spec in groups.values() for name in names(spec)}
    for constant in constants:
        column, group, _ = parts(constant)
        if group == EVERY:
            continue
        if (spec := by_name.get(group)) is None:
            raise PresetError(
                f"{constant}: the model has no parameters {group!r}; {_nearest(group, groups)}"
            )
        other = f"{column}.{spec.group}{constant.removeprefix(f'{column}.{group}')}"
        if group not in (spec.group, TIED) and other in constants:
            raise PresetError(f"{constant} and {other} name one group; write one of them")
        why = None
        if spec.tied and column != "multipliers":
            why = f"a tied readout has only a multiplier of its own; write {column}.{Role.TOKEN_EMBEDDING.value}"
        elif column == "stds" and spec.role in BIASES:
            why = "biases start at 0"
        elif column == "decays" and spec.role in VECTORS:
            why = f"{preset} does not decay gains and biases"
        if why:
            raise PresetError(f"{constant} changes nothing: {why}")


def _nearest(name: str, candidates: Iterable[str]) -> str:
    return f"did you mean {difflib.get_close_matches(name, [*candidates], n=1, cutoff=0)[0]!r}?"
