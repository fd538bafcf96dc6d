"""Parameterization presets: how initialization, multipliers and rates scale with a transformer's sizes. Pure Python.

In Python::

    preset = presets.get("mup", base={"head_dim": 32, "heads": 4, "embed": 128, "mlp": 512, "layers": 4})
    preset.scales(spec, sizes, optimizer="adam")    # multiplier, init_std, lr, eps, weight_decay of one parameter
    preset.logit_scale(sizes)                       # what attention logits are multiplied by
    preset.residual_scale(sizes, layer, "mlp")      # (skip, branch)
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Protocol

from mupax.presets.papers import ALIASES, PRESETS, make
from mupax.presets.preset import Preset
from mupax.presets.roles import AXES, EMBEDDINGS, VECTORS, ParamSpec, PresetError, Role
from mupax.presets.rule import FORMS, Decay, Form, Power, Rule, Scales


def get(
    name: str,
    *,
    base: Mapping[str, int] | Sized | str | None = None,
    form: Form | None = None,
    zero_readout: bool = False,
    **constants: float | str | Mapping[str, float],
) -> Preset:
    """The named preset, relative to a base.

    Args:
        name: one of `PRESETS`; PRESET:NAME, tuned (`mupax.presets.tuned.find`), whose base, form and constants hold unless given; or a
            file of measured scales: `measured:PATH`, or a path that ends in .json.
        base: size of each axis at which every factor is 1: a mapping, a text such as "embed=64,layers=2", or what says its own by
            `base_sizes()`, as a model's config does; None is the absolute form.
        form: where multipliers sit (`rule`); the preset's native form unless given.
        zero_readout: start the readout at zero.
        **constants: the preset's own, such as `alpha_l=0.5`; a text of a number will do. Those of parameter groups by column, such
            as `rates={"readout": 4}` (`constants`).

    Raises:
        PresetError: no such preset, constant, axis, form or file.
    """
    if not isinstance(name, str):
        raise PresetError(
            f"a preset is named by a text, not {name!r}; the presets are {', '.join(PRESETS)}"
        )
    name, base = ALIASES.get(name, name), _sizes(base)
    if name.partition(":")[0] in PRESETS and ":" in name:
        from mupax.presets.tuned import find as tuned

        study = tuned.find(name)
        base, form = base or study.base, form or study.form
        name, constants = study.preset, {**study.constants, **constants}
    if name.startswith("measured:") or name.endswith(".json"):
        from mupax.presets.tuned import measured

        path, words = (
            name.removeprefix("measured:"),
            [*constants, *(["zero_readout"] if zero_readout else [])],
        )
        if words:
            raise PresetError(
                f"measured scales take no constants, not {words[0]}; they are all in {path}"
            )
        preset = measured.measured(measured.load(path))
    elif name in PRESETS:
        preset = make(name, constants)
    else:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        choices = f"the presets are {', '.join(PRESETS)}, or measured:PATH of a file; --plugin MODULE adds one of your own"
        raise PresetError(f"no preset is named {name!r}; {hint}{choices}")
    if zero_readout and "stds.readout" in preset.constants:
        raise PresetError(
            "stds.readout changes nothing: the readout starts at zero; leave one of the two out"
        )
    if form is not None:
        preset = preset.with_form(form)
    if preset.baseless and base is not None:
        leave = "leave the base out (base=None, --preset.base None)"
        raise PresetError(f"{preset.name} has no base: its numbers are absolute; {leave}")
    return dataclasses.replace(preset, base=base, zero_readout=zero_readout)


class Sized(Protocol):
    """What says the sizes that a parameterization takes to infinity, such as `mupax.zoo.get("gpt2")`."""

    def base_sizes(self) -> dict[str, int]: ...


def _sizes(base: Mapping[str, int] | Sized | str | None) -> dict[str, int] | None:
    """The base's sizes by axis, however they are written."""
    if base is None:
        return None
    if isinstance(base, str):
        parts = [part.partition("=") for part in base.split(",")]
        if not all(equals and size.strip().isdecimal() for _, equals, size in parts):
            raise PresetError(
                f"base {base!r} is no sizes, and presets know no models; write base='embed=64,layers=2', or "
                f"base=mupax.zoo.get({base.partition(',')[0]!r}) of a model of mupax"
            )
        sizes = {axis.strip(): int(size) for axis, _, size in parts}
    elif hasattr(base, "base_sizes"):
        sizes = base.base_sizes()  # pyright: ignore
    elif isinstance(base, Mapping):
        sizes = dict(base)
    else:
        raise PresetError(
            f"base is a {type(base).__name__}; write its sizes, such as base={{'embed': 64, 'layers': 2}}, or give a config "
            "that has base_sizes()"
        )
    for axis, size in sizes.items():
        if axis not in AXES or isinstance(size, str) or not size >= 1:
            near = difflib.get_close_matches(axis, AXES, n=1) if axis not in AXES else []
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise PresetError(
                f"base {axis}={size}: write a logical axis ({', '.join(AXES)}) and a size of at least 1{hint}"
            )
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
