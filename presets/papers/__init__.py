"""Presets of the papers, one file per source: its table, and the function that makes the preset.

The arguments of such a function are the preset's constants. `PRESETS` has all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
from collections.abc import Iterable, Mapping
from typing import Any

from mupax.mappings import LazyRegistry
from mupax.presets.preset import Preset
from mupax.presets.roles import PresetError


def _import_sp():
    from mupax.presets.papers.standard import sp

    return sp


def _import_mup():
    from mupax.presets.papers.infinite_limits import mup

    return mup


def _import_mup_half():
    from mupax.presets.papers.infinite_limits import mup_half

    return mup_half


def _import_depth_mup():
    from mupax.presets.papers.infinite_limits import depth_mup

    return depth_mup


def _import_completep():
    from mupax.presets.papers.completep import completep

    return completep


def _import_ntk():
    from mupax.presets.papers.effective_theory import ntk

    return ntk


def _import_hybrid():
    from mupax.presets.papers.effective_theory import hybrid

    return hybrid


def _import_maximal_update():
    from mupax.presets.papers.effective_theory import maximal_update

    return maximal_update


def _import_u_mup():
    from mupax.presets.papers.unit import u_mup

    return u_mup


def _import_spectral():
    from mupax.presets.papers.spectral import spectral

    return spectral


def _import_sp_layerwise():
    from mupax.presets.papers.layerwise import sp_layerwise

    return sp_layerwise


# Functions and not names of modules, so that a search for references finds every preset.
PRESETS: LazyRegistry[..., Preset] = LazyRegistry(
    {
        "sp": _import_sp,
        "mup": _import_mup,
        "mup-half": _import_mup_half,
        "depth-mup": _import_depth_mup,
        "completep": _import_completep,
        "ntk": _import_ntk,
        "hybrid": _import_hybrid,
        "maximal-update": _import_maximal_update,
        "u-mup": _import_u_mup,
        "spectral": _import_spectral,
        "sp-layerwise": _import_sp_layerwise,
    }
)
"""Functions that make a preset from its constants, by the preset's name.

To add a preset, write its function in a file of this folder, and add an import and a line here.
"""

ALIASES = {"standard": "sp"}
"""Other names of presets in papers and older files. mupax itself does not write them."""

CONSTANT_FLAGS = ("alpha_a", "alpha_l", "gamma0", "beta0")
"""Constants that have a flag of their own."""


def read_constants(pairs: Iterable[str], flags: Mapping[str, float | str | None]) -> dict[str, Any]:
    """Return the constants of a command line by name. Values of `pairs` stay texts.

    Args:
        pairs: Texts NAME=VALUE. A hyphen in NAME is read as an underscore.
        flags: Values of the flags in `CONSTANT_FLAGS`. `None` is a flag that was left out.

    Raises:
        PresetError: A text is not NAME=VALUE, or a constant is given twice, in `pairs` or by a flag
            and a pair.
    """
    values: dict[str, Any] = {key: value for key, value in flags.items() if value is not None}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        name = name.strip().replace("-", "_")
        value = value.strip()
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
    """Return a preset in its absolute form.

    Args:
        preset: Name in `PRESETS`.
        constants: Values by name. A number may be given as a text. Constants of parameter groups
            are named COLUMN.GROUP.

    Raises:
        PresetError: The preset has no such constant, or a value is not allowed.
    """
    if not constants:
        return PRESETS[preset]()
    from mupax.presets.constants import read
    from mupax.presets.papers.choices import listed

    parameters = inspect.signature(PRESETS[preset]).parameters
    named, groups = read(constants)
    checked: dict[str, float | str] = {}
    for name, value in named.items():
        if name not in parameters:
            raise PresetError(_unknown_constant(preset, name))
        # Annotations are texts here: "float", "str" or "str | None".
        if str(parameters[name].annotation).startswith("str"):
            checked[name] = str(value)
        else:
            checked[name] = _number(preset, name, value, parameters[name].default)
    listed(preset, **checked)
    absolute = PRESETS[preset](**checked)
    if not groups:
        return absolute
    return dataclasses.replace(absolute, constants=groups, choices={**absolute.choices, **groups})


def _unknown_constant(preset: str, name: str) -> str:
    """Return the error message for a constant that a preset does not have.

    The message lists the preset's constants and the presets that have this one.
    """
    owners = []
    for other, function in PRESETS.items():
        if name in inspect.signature(function).parameters:
            owners.append(other)
    hint = f"; {name} is a constant of {', '.join(owners)}" if owners else ""
    parameters = inspect.signature(PRESETS[preset]).parameters
    return f"{preset} takes {', '.join(parameters) or 'no constants'}, not {name}{hint}"


def _number(preset: str, name: str, value: Any, default: Any) -> float:
    """Return a constant as a finite number.

    Args:
        preset: Name of the preset, for the message.
        name: Name of the constant, for the message.
        default: Number that the message gives as an example.

    Raises:
        PresetError: The value is not a finite number.
    """
    # float(True) is 1.0, which nobody means.
    number = math.nan
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError, ValueError):
            number = float(value)
    if not math.isfinite(number):
        raise PresetError(
            f"{preset}: {name}={value} is not a finite number; "
            f"write one, such as {name}={default:g}"
        )
    return number
