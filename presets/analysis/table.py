"""A preset as a table: one row per parameter of a model, as plain data and as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mupax import terminal
from mupax.presets import constants
from mupax.presets.papers import choices
from mupax.presets.preset import Preset
from mupax.presets.roles import CROSSED, ENCODER, OWN, ParamSpec, Stack
from mupax.presets.rule import Decay


def rows(
    preset: Preset,
    specs: Mapping[str, ParamSpec],
    sizes: Mapping[str, int],
    optimizer: str = "adam",
    decay: Decay = "coupled",
    *,
    absolute: bool = False,
) -> list[dict[str, Any]]:
    """One dictionary per parameter: name, role, group (by which it has constants), shape and the five columns.

    Args:
        preset: what to tabulate.
        specs: name to declaration.
        sizes: size of every logical axis.
        optimizer: whose lr and eps.
        decay: coupled or independent weight decay.
        absolute: values (base constant x factor) in place of factors relative to the base.
    """
    evaluate = preset.scales if absolute else preset.factors
    return [
        {
            "name": name,
            "role": spec.role.value,
            "group": spec.group,
            "shape": [sizes[axis] for axis in spec.axes],
            **dataclasses.asdict(evaluate(spec, sizes, optimizer, decay)),
        }
        for name, spec in specs.items()
    ]


def forward_text(preset: Preset, sizes: Mapping[str, int]) -> str:
    """Return what multiplies activations, in a sentence.

    It has the scale of attention logits, and those of residual branches and skips in the first and last block of every stack:
    of a model without heads and without blocks nothing.

    Args:
        preset: The preset of the forward pass.
        sizes: Size of every logical axis of the model.
    """
    parts = []
    if "head_dim" in sizes:
        parts.append(f"attention logits x {preset.logit_scale(sizes):.4g}")
    if ENCODER.axis in sizes:
        parts.append(f"of the encoder {_branches(preset, sizes, ENCODER)}")
        parts.append(f"of the decoder {_branches(preset, sizes, CROSSED)}")
        return "; ".join(parts)
    if OWN.axis in sizes:
        parts.append(_branches(preset, sizes, OWN))
    return ", ".join(parts)


def _branches(preset: Preset, sizes: Mapping[str, int], stack: Stack) -> str:
    blocks = range(sizes[stack.axis])
    scales = [
        preset.residual_scale(sizes, layer, branch, stack)
        for layer in blocks
        for branch in stack.branches
    ]
    (skip, branch), (last_skip, last_branch) = scales[0], scales[-1]
    if set(scales) == {(1.0, branch)}:
        return f"every residual branch x {branch:.4g}"
    return (
        f"residual branches x {branch:.4g} (first attention) to {last_branch:.4g} (last MLP), "
        f"skips x {skip:.4g} to {last_skip:.4g}"
    )


def rule_rows(
    preset: Preset, specs: Mapping[str, ParamSpec], optimizer: str = "adam"
) -> list[dict[str, Any]]:
    """The rules behind the numbers, as power laws in m = size / base size, one row per distinct parameter group.

    Args:
        preset: whose rules.
        specs: parameter to its declaration; of a group that has several one is shown.
        optimizer: whose rates and eps.
    """
    family, rules = (
        preset.family(optimizer),
        {spec.group: (spec, preset.row(spec)) for spec in specs.values()},
    )
    return [
        {
            "group": group,
            "fan_in": "*".join(spec.fan_in),
            "multiplier": str(rule.multiplier),
            "init_std": str(rule.init_std),
            "lr": str(rule.lr(family)),
            "eps": str(rule.eps_of(family)),
            "decays": "yes" if rule.decays else "no",
        }
        for group, (spec, rule) in rules.items()
    ]


def constants_text(preset: str, defaults: Mapping[str, Any]) -> str:
    """What a preset takes, a line a constant, and under it the values that sources disagree on.

    Args:
        preset: its name.
        defaults: constant to its default.
    """
    lines = []
    for constant, default in defaults.items():
        lines.append(f"{constant}, {cell(default)} unless given")
        for choice in choices.of(preset, constant):
            text = f"{cell(choice.value)}: {choice.rule}. {choice.source}: {choice.status}."
            lines.append(terminal.wrapped(f"  {text}"))
    of_groups = ", ".join(f"{column}.GROUP" for column in constants.COLUMNS)
    return "\n".join(
        [
            *lines,
            terminal.wrapped(f"and of parameter groups {of_groups}, factors of 1 unless given"),
        ]
    )


def text(table: list[dict[str, Any]]) -> str:
    """Rows as columns for the terminal or pipe, numbers to four digits."""
    if not table:
        return ""
    columns = [column for column in table[0] if column != "role"]
    cells = [columns, *([cell(row[column]) for column in columns] for row in table)]
    return terminal.table(cells, left=("name", "shape", "group", "fan_in", "holds"))


def cell(value: Any) -> str:
    """A value as a table shows it: a shape as 2x3, one number per layer as first..last, others to four digits."""
    if isinstance(value, list):
        return "x".join(map(str, value)) or "scalar"
    if isinstance(value, tuple):  # one number per layer: first and last
        return f"{value[0]:.4g}..{value[-1]:.4g}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
