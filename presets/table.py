"""A preset as a table: one row per parameter of a model, as plain data and as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from presets.preset import Decay, Preset
from presets.roles import ParamSpec

COLUMNS = ("multiplier", "init_std", "lr", "eps", "weight_decay")


def rows(
    preset: Preset,
    specs: Mapping[str, ParamSpec],
    sizes: Mapping[str, int],
    optimizer: str = "adam",
    decay: Decay = "coupled",
    *,
    absolute: bool = False,
) -> list[dict[str, Any]]:
    """One dictionary per parameter: name, role, shape and the five columns.

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
            "shape": [sizes[axis] for axis in spec.axes],
            **dataclasses.asdict(evaluate(spec, sizes, optimizer, decay)),
        }
        for name, spec in specs.items()
    ]


def forward_rows(preset: Preset, sizes: Mapping[str, int]) -> dict[str, float]:
    """What multiplies activations: attention logits and residual branches."""
    return {"logits": preset.logit_scale(sizes), "branch": preset.residual_scale(sizes, 0, "attention")[1]}


def rule_rows(preset: Preset, specs: Mapping[str, ParamSpec], optimizer: str = "adam") -> list[dict[str, str]]:
    """The rules behind the numbers, as power laws in m = size / base size, one row per distinct parameter group."""
    from presets.preset import FAMILIES

    found: dict[str, dict[str, str]] = {}
    for spec in specs.values():
        rule = preset.row(spec)
        found[spec.group] = {
            "group": spec.group,
            "fan_in": "*".join(spec.fan_in),
            "multiplier": str(rule.multiplier),
            "init_std": str(rule.init_std),
            "lr": str(rule.lr(FAMILIES[optimizer])),
            "eps": str(rule.eps),
            "decays": "yes" if rule.decays else "no",
        }
    return list(found.values())


def text(table: list[dict[str, Any]]) -> str:
    """Rows as aligned columns; numbers to four digits."""
    if not table:
        return ""
    cells = [list(table[0])] + [[_cell(value) for value in row.values()] for row in table]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    left = {i for i, name in enumerate(table[0]) if name in ("name", "role", "shape", "group", "fan_in")}
    return "\n".join(
        "  ".join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in cells
    )


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return "x".join(map(str, value)) or "scalar"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
