"""Parameterization presets: how initialization, multipliers and learning rates scale with a model.

Presets need no JAX::

    base = {"head_dim": 32, "heads": 4, "embed": 128, "mlp": 512, "layers": 4}
    preset = presets.get("mup", base=base)
    # multiplier, init_std, lr, eps and weight_decay of one parameter
    preset.scales(spec, sizes, optimizer="adam")
    # factor on attention logits
    preset.logit_scale(sizes)
    # (skip, branch) of a residual branch
    preset.residual_scale(sizes, layer, "mlp")
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from mupax.presets.papers import ALIASES, PRESETS
from mupax.presets.preset import Preset
from mupax.presets.roles import AXES, EMBEDDINGS, VECTORS, ParamSpec, PresetError, Role
from mupax.presets.rule import FORMS, Decay, Form, Power, Rule, Scales

CONSTANT_FLAGS = ("alpha_a", "alpha_l", "gamma0", "beta0")
"""Constants of presets that have a command-line flag of their own."""


def get(
    name: str,
    *,
    base: Mapping[str, int] | Sized | str | None = None,
    form: Form | None = None,
    zero_readout: bool = False,
    **constants: float | str | Mapping[str, float],
) -> Preset:
    """Return the preset of this name, relative to a base.

    Args:
        name: Key of `PRESETS`; PRESET:NAME for a tuned preset (`mupax.presets.tuned.find`), which
            sets base, form and constants unless they are passed; or a file of measured scales, as
            `measured:PATH` or as a path that ends in .json.
        base: Size of each axis at which every factor is 1: a mapping, a text such as
            "embed=64,layers=2", or an object with `base_sizes()`, such as a model's config. By
            default factors are absolute.
        form: Placement of the multipliers (`mupax.presets.rule`). The default is the preset's
            native form.
        zero_readout: `True` starts the readout at zero.
        **constants: Constants of the preset, such as `alpha_l=0.5` (or "0.5"), and constants of
            parameter groups, such as `rates={"readout": 4}` (`mupax.presets.constants`).

    Raises:
        PresetError: No preset, constant, axis, form or file fits the arguments, or two arguments
            contradict each other.
    """
    if not isinstance(name, str):
        choices = ", ".join(PRESETS)
        raise PresetError(f"a preset is named by a text, not {name!r}; the presets are {choices}")
    name = ALIASES.get(name, name)
    base = _sizes(base)

    # Checked against PRESETS because `measured:PATH` has a colon, too.
    if ":" in name and name.partition(":")[0] in PRESETS:
        # Imported late: only tuned presets read the files of studies.
        from mupax.presets.tuned import find as tuned

        study = tuned.find(name)
        base = base or study.base
        form = form or study.form
        name = study.preset
        # A constant of the caller replaces the study's.
        constants = {**study.constants, **constants}

    if name.startswith("measured:") or name.endswith(".json"):
        preset = _measured(name.removeprefix("measured:"), [*constants], zero_readout)
    elif name in PRESETS and not constants:
        preset = PRESETS[name]()
    elif name in PRESETS:
        # Imported late: most runs set no constants.
        from mupax.presets.papers.choices import make

        preset = make(name, constants)
    else:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise PresetError(
            f"no preset is named {name!r}; {hint}the presets are {', '.join(PRESETS)}, or "
            "measured:PATH of a file; --plugin MODULE adds one of your own"
        )

    if zero_readout and "stds.readout" in preset.constants:
        raise PresetError(
            "stds.readout changes nothing: the readout starts at zero; leave one of the two out"
        )
    if form is not None:
        preset = preset.with_form(form)
    if preset.baseless and base is not None:
        raise PresetError(
            f"{preset.name} has no base: its numbers are absolute; "
            "leave the base out (base=None, --preset.base None)"
        )
    return dataclasses.replace(preset, base=base, zero_readout=zero_readout)


def read_constants(pairs: Iterable[str], flags: Mapping[str, float | str | None]) -> dict[str, Any]:
    """Collect the constants of a preset from the command line, as a mapping from name to value.

    Args:
        pairs: Texts NAME=VALUE. A hyphen in NAME is read as an underscore. VALUE stays a text.
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


class Sized(Protocol):
    """Object whose `base_sizes()` returns a size for each logical axis.

    `mupax.zoo.get("gpt2")` is an example.
    """

    def base_sizes(self) -> dict[str, int]: ...


def _measured(path: str, constants: list[str], zero_readout: bool) -> Preset:
    """Load the preset of a file of measured scales. Such a preset takes no options.

    Args:
        constants: Names of the constants that the caller passed.

    Raises:
        PresetError: A constant or `zero_readout` is set.
    """
    # Imported late: most presets are tables and read no file.
    from mupax.presets.tuned import measured

    settings = [*constants]
    if zero_readout:
        settings.append("zero_readout")
    if settings:
        raise PresetError(
            f"measured scales take no constants, not {settings[0]}; they are all in {path}"
        )
    return measured.measured(measured.load(path))


def _sizes(base: Mapping[str, int] | Sized | str | None) -> dict[str, int] | None:
    """Convert the argument `base` of `get` to sizes by axis. `None` is returned as it is.

    A text is parsed. An object with a method `base_sizes()` is asked for its sizes.

    Raises:
        PresetError: The base is of another type, an axis is not in `AXES`, or a size is below 1.
    """
    if base is None:
        return None
    if isinstance(base, str):
        sizes = _parsed_sizes(base)
    elif hasattr(base, "base_sizes"):
        sizes = base.base_sizes()  # pyright: ignore
    elif isinstance(base, Mapping):
        sizes = dict(base)
    else:
        raise PresetError(
            f"base is a {type(base).__name__}; write its sizes, such as "
            "base={'embed': 64, 'layers': 2}, or give a config that has base_sizes()"
        )

    for axis, size in sizes.items():
        is_axis = axis in AXES
        if is_axis and not isinstance(size, str) and size >= 1:
            continue
        hint = ""
        if not is_axis:
            near = difflib.get_close_matches(axis, AXES, n=1)
            if near:
                hint = f"; did you mean {near[0]!r}?"
        axes = ", ".join(AXES)
        raise PresetError(
            f"base {axis}={size}: write a logical axis ({axes}) and a size of at least 1{hint}"
        )
    return sizes


def _parsed_sizes(text: str) -> dict[str, int]:
    """Parse a text such as "embed=64,layers=2" into sizes by axis. Axis names are not checked.

    Raises:
        PresetError: A part of the text is not AXIS=INTEGER.
    """
    sizes = {}
    for part in text.split(","):
        axis, equals, size = part.partition("=")
        if not equals or not size.strip().isdecimal():
            first_word = text.partition(",")[0]
            raise PresetError(
                f"base {text!r} is no sizes, and presets know no models; "
                "write base='embed=64,layers=2', or "
                f"base=mupax.zoo.get({first_word!r}) of a model of mupax"
            )
        sizes[axis.strip()] = int(size)
    return sizes


__all__ = [
    "ALIASES",
    "AXES",
    "EMBEDDINGS",
    "FORMS",
    "PRESETS",
    "VECTORS",
    "Decay",
    "Form",
    "ParamSpec",
    "Power",
    "Preset",
    "PresetError",
    "Role",
    "Rule",
    "Scales",
    "get",
]
