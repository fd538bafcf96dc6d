"""Constants of presets: which each takes, and whether what a person wrote can be one. Types come from the preset's own signature."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mupax.presets.roles import PresetError

Constants = dict[str, float | str]
FLAGS = ("alpha_a", "alpha_l", "gamma0", "beta0")
"""Those that have a flag of their own."""


def read(pairs: Iterable[str], flags: Mapping[str, float | str | None] | None = None) -> dict[str, Any]:
    """NAME=VALUE texts as a dictionary, beside constants that have flags of their own; alpha-l is alpha_l.

    Args:
        pairs: the texts.
        flags: constant to its flag's value; None where the flag was left out.

    Raises:
        PresetError: a text without "=", or a constant given twice.
    """
    values: dict[str, Any] = {name: value for name, value in (flags or {}).items() if value is not None}
    for pair in pairs:
        name, equals, value = (part.strip() for part in pair.partition("="))
        name = name.replace("-", "_")
        if not (equals and name and value):
            raise PresetError(f"the constant {pair!r}: write NAME=VALUE, such as s=0.5 or eps_scope=everywhere")
        if name in values:
            raise PresetError(f"the constant {name} is given twice, as {values[name]} and {value}; write it once")
        values[name] = value
    return values


def check(preset: str, values: Mapping[str, Any], makers: Mapping[str, Callable[..., Any]]) -> Constants:
    """The constants as the preset takes them: texts of numbers as numbers.

    Args:
        preset: a name in `makers`.
        values: constant to number or text.
        makers: preset name to the function that makes it.

    Raises:
        PresetError: the preset has no such constant, or the value is not a finite number where it must be.
    """
    known = inspect.signature(makers[preset]).parameters
    checked: Constants = {}
    for name, value in values.items():
        if name not in known:
            others = [other for other, make in makers.items() if name in inspect.signature(make).parameters]
            hint = f"; {name} is a constant of {', '.join(others)}" if others else ""
            raise PresetError(f"{preset} takes {', '.join(known) or 'no constants'}, not {name}{hint}")
        # Annotations are texts here: "float", "str" or "str | None".
        words = str(known[name].annotation).startswith("str")
        checked[name] = str(value) if words else _number(preset, name, value, known[name].default)
    return checked


def _number(preset: str, name: str, value: Any, default: Any) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise PresetError(f"{preset}: {name}={value} is not a finite number; write one, such as {name}={default:g}")
    return number
