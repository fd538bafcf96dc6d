"""A preset as a table with one row per parameter of a model, as plain data and as text.

`mupax presets table` and `mupax presets constants` print these texts.
"""

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
    """Return a table of a preset's values, one row per parameter.

    Columns are name, role, group (`ParamSpec.group`, the name by which constants refer to it),
    shape and the fields of `Scales`.

    Args:
        specs: Declarations of the model's parameters, by name.
        sizes: Size of every logical axis of the model.
        optimizer: Name in `mupax.presets.optimizers.OPTIMIZERS`.
        decay: Kind of weight decay that the column `weight_decay` is for.
        absolute: Whether to return absolute values, base value * factor. The default is factors,
            which are 1 at the base.

    Raises:
        PresetError: The preset has no rule for the optimizer, or a size is missing.
    """
    evaluate = preset.scales if absolute else preset.factors
    table = []
    for name, spec in specs.items():
        row = {
            "name": name,
            "role": spec.role.value,
            "group": spec.group,
            "shape": [sizes[axis] for axis in spec.axes],
        }
        scales = evaluate(spec, sizes, optimizer, decay)
        table.append(row | dataclasses.asdict(scales))
    return table


def forward_text(preset: Preset, sizes: Mapping[str, int]) -> str:
    """Return a sentence with the factors that the preset puts into the forward pass.

    They are the factor on attention logits and those on residual branches and skips. If the latter
    differ between blocks, the first and last of each stack are given. The text is empty for a model
    without heads and blocks.

    Args:
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
    """Return the factors on residual branches and skips of one stack as text.

    The text has one number if all branches have the same factor and skips have the factor 1.
    Otherwise it has the factors of the first and the last branch.
    """
    scales = []
    for layer in range(sizes[stack.axis]):
        for branch in stack.branches:
            scales.append(preset.residual_scale(sizes, layer, branch, stack))
    first_skip, first_branch = scales[0]
    last_skip, last_branch = scales[-1]
    # Only presets with a rule per layer, such as `u-mup`, have scales that differ.
    if set(scales) == {(1.0, first_branch)}:
        return f"every residual branch x {first_branch:.4g}"
    return (
        f"residual branches x {first_branch:.4g} (first attention) "
        f"to {last_branch:.4g} (last MLP), "
        f"skips x {first_skip:.4g} to {last_skip:.4g}"
    )


def rule_rows(
    preset: Preset, specs: Mapping[str, ParamSpec], optimizer: str = "adam"
) -> list[dict[str, Any]]:
    """Return one row per parameter group: its rules as power laws in m = size / base size.

    All entries are texts: "group", "fan_in", "multiplier", "init_std", "lr", "eps" and "decays"
    (yes or no).

    Args:
        specs: Declarations by parameter name. The last parameter of a group stands for the group.
        optimizer: Name in `mupax.presets.optimizers.OPTIMIZERS`.

    Raises:
        PresetError: The preset has no rule for the optimizer.
    """
    family = preset.family(optimizer)
    groups = {spec.group: (spec, preset.row(spec)) for spec in specs.values()}
    table = []
    for group, (spec, rule) in groups.items():
        row = {
            "group": group,
            "fan_in": "*".join(spec.fan_in),
            "multiplier": str(rule.multiplier),
            "init_std": str(rule.init_std),
            "lr": str(rule.lr(family)),
            "eps": str(rule.eps_of(family)),
            "decays": "yes" if rule.decays else "no",
        }
        table.append(row)
    return table


def constants_text(preset: str, defaults: Mapping[str, Any]) -> str:
    """Return text on a preset's constants: each default, and its values with their sources.

    Args:
        preset: Name in `mupax.presets.papers.PRESETS`.
        defaults: Default of each of the preset's constants, by name.
    """
    lines = []
    for constant, default in defaults.items():
        lines.append(f"{constant}, {cell(default)} unless given")
        for choice in choices.described(preset, constant):
            text = f"{cell(choice.value)}: {choice.rule}. {choice.source}: {choice.status}."
            lines.append(terminal.wrapped(f"  {text}"))
    columns = ", ".join(f"{column}.GROUP" for column in constants.COLUMNS)
    of_groups = f"and of parameter groups {columns}, factors of 1 unless given"
    lines.append(terminal.wrapped(of_groups))
    return "\n".join(lines)


def text(table: list[dict[str, Any]]) -> str:
    """Return a table's rows as text in aligned columns, with numbers to four digits.

    The column "role" is left out. No rows give an empty text.

    Args:
        table: Rows, each a mapping from column to value, such as `rows` or `rule_rows` returns.
    """
    if not table:
        return ""
    columns = [column for column in table[0] if column != "role"]
    cells = [columns]
    for row in table:
        cells.append([cell(row[column]) for column in columns])
    return terminal.table(cells, left=("name", "shape", "group", "fan_in", "holds"))


def cell(value: Any) -> str:
    """Return one value of a table as text, with numbers to four digits.

    A list is a shape, written as 2x3, or "scalar" if empty. A tuple has one value per layer,
    written as first..last.
    """
    if isinstance(value, list):
        return "x".join(map(str, value)) or "scalar"
    if isinstance(value, tuple):
        # A tuple has one value per layer.
        return f"{value[0]:.4g}..{value[-1]:.4g}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
