"""One file a source: the paper's table in its docstring and one pure function under it. `PRESETS` names them all.

A function's arguments are the preset's constants, and its signature says which it takes and of what type.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Iterable, Mapping
from typing import Any

from mupax.presets.preset import Preset
from mupax.presets.roles import PresetError
from mupax.table import LazyRegistry


def _import_limits():
    from mupax.presets.papers import infinite_limits

    return infinite_limits


def _import_effective_theory():
    from mupax.presets.papers import effective_theory

    return effective_theory


def _import_sp():
    from mupax.presets.papers.standard import sp

    return sp


def _import_completep():
    from mupax.presets.papers.completep import completep

    return completep


def _import_u_mup():
    from mupax.presets.papers.unit import u_mup

    return u_mup


def _import_spectral():
    from mupax.presets.papers.spectral import spectral

    return spectral


def _import_sp_layerwise():
    from mupax.presets.papers.layerwise import sp_layerwise

    return sp_layerwise


PRESETS: LazyRegistry[..., Preset] = LazyRegistry(
    {
        "sp": _import_sp,
        "mup": lambda: _import_limits().mup,
        "mup-half": lambda: _import_limits().mup_half,
        "depth-mup": lambda: _import_limits().depth_mup,
        "completep": _import_completep,
        "ntk": lambda: _import_effective_theory().ntk,
        "hybrid": lambda: _import_effective_theory().hybrid,
        "maximal-update": lambda: _import_effective_theory().maximal_update,
        "u-mup": _import_u_mup,
        "spectral": _import_spectral,
        "sp-layerwise": _import_sp_layerwise,
    }
)
"""Name to what imports the function that makes the preset from its constants. To add one, write the function in a file here
and a line."""

ALIASES = {"standard": "sp"}
"""Other names of presets, as papers and older files have them; nothing here writes them."""

CONSTANT_FLAGS = ("alpha_a", "alpha_l", "gamma0", "beta0")
"""Constants that have a flag of their own."""


def read_constants(pairs: Iterable[str], flags: Mapping[str, float | str | None]) -> dict[str, Any]:
    """NAME=VALUE texts as a dictionary, beside constants that have flags of their own; alpha-l is alpha_l.

    Args:
        pairs: the texts.
        flags: constant to its flag's value; None where the flag was left out.

    Raises:
        PresetError: a text without "=", or a constant given twice.
    """
    values: dict[str, Any] = {name: value for name, value in flags.items() if value is not None}
    for pair in pairs:
        name, equals, value = (part.strip() for part in pair.partition("="))
        name = name.replace("-", "_")
        if not (equals and name and value):
            raise PresetError(
                f"the constant {pair!r}: write NAME=VALUE, such as s=0.5 or eps_scope=everywhere"
            )
        if name in values:
            raise PresetError(
                f"the constant {name} is given twice, as {values[name]} and {value}; write it once"
            )
        values[name] = value
    return values


def make(preset: str, constants: Mapping[str, Any]) -> Preset:
    """The preset in its absolute form.

    Args:
        preset: a name in `PRESETS`.
        constants: name to number or text; a text of a number will do. Those of parameter groups are named COLUMN.GROUP.

    Raises:
        PresetError: the preset has no such constant, or a value cannot be one.
    """
    if not constants:
        return PRESETS[preset]()
    from mupax.presets.constants import read
    from mupax.presets.papers.choices import listed

    parameters = inspect.signature(PRESETS[preset]).parameters
    constants, groups = read(constants)
    checked: dict[str, float | str] = {}
    for name, value in constants.items():
        if name not in parameters:
            owners = [
                other
                for other, make in PRESETS.items()
                if name in inspect.signature(make).parameters
            ]
            hint = f"; {name} is a constant of {', '.join(owners)}" if owners else ""
            raise PresetError(
                f"{preset} takes {', '.join(parameters) or 'no constants'}, not {name}{hint}"
            )
        # Annotations are texts here: "float", "str" or "str | None".
        words = str(parameters[name].annotation).startswith("str")
        checked[name] = (
            str(value) if words else _number(preset, name, value, parameters[name].default)
        )
    listed(preset, **checked)
    absolute = PRESETS[preset](**checked)
    return (
        dataclasses.replace(absolute, constants=groups, choices={**absolute.choices, **groups})
        if groups
        else absolute
    )


def _number(preset: str, name: str, value: Any, default: Any) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise PresetError(
            f"{preset}: {name}={value} is not a finite number; write one, such as {name}={default:g}"
        )
    return number
