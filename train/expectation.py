"""What theory expects of every observable of `train.probes`: `presets.limits` evaluated for the growth of a series of models.

Finite sizes stray from exponents. How far, on rules known to be right, was measured once by `scripts/allowances.py` and
lies in `allowances.json`; a measured slope may stray by that and `MARGIN` more, in the direction it was seen to.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path

from presets import ParamSpec, Preset, PresetError, Role
from presets.limits import SPECS, Limit
from train.check import STEPS, Expected
from zoo.definition import Definition

ALLOWANCES = Path(__file__).with_name("allowances.json")
MARGIN = {"weight": 0.04, "movement": 0.08, "gradient": 0.12}
"""Room around theory and the measured allowance, by kind of observable; `CHANGE_MARGIN` for activations."""

CHANGE_MARGIN = 0.12

_ROLES = {spec.role: name for name, spec in SPECS.items() if spec.role is not Role.TOKEN_EMBEDDING}
_EMBEDDINGS = (Role.TOKEN_EMBEDDING, Role.PATCH_EMBEDDING, Role.POSITION)


def growth(first: Mapping[str, int], last: Mapping[str, int]) -> tuple[dict[str, float], float]:
    """Exponent of every axis that grows, and the factor by which the fastest one does.

    Raises:
        PresetError: nothing grows.
    """
    logs = {axis: math.log2(last[axis] / size) for axis, size in first.items() if last.get(axis, size) != size}
    if not logs or max(logs.values()) <= 0:
        raise PresetError(f"no size grows from {dict(first)} to {dict(last)}; give the check models of growing size")
    fastest = max(logs.values())
    return {axis: value / fastest for axis, value in logs.items()}, 2.0**fastest


def label(exponents: Mapping[str, float]) -> str:
    """Which allowance applies: head_dim, heads, depth, or width for anything else that widens."""
    if "layers" in exponents:
        return "depth"
    return {(True, False): "head_dim", (False, True): "heads"}.get(
        ("head_dim" in exponents, "heads" in exponents), "width"
    )


def of(
    preset: Preset, first: Definition, last: Definition, optimizer: str, *, strict: bool = False
) -> dict[tuple[str, int], Expected]:
    """Expectation per (observable, step).

    Args:
        preset: the rules that are meant to hold.
        first: the smallest model of the series; `last` the largest.
        last: the largest.
        optimizer: whose updates.
        strict: without allowances, to measure them.
    """
    exponents, _ = growth(first.sizes, last.sizes)
    slopes = _slopes(preset, first, exponents, optimizer)
    allowed = {} if strict else _allowances().get(f"{preset.family(optimizer)} {label(exponents)}", {})
    found = {}
    for (name, step), (slope, trouble) in slopes.items():
        margin = MARGIN.get(name.partition("/")[0], CHANGE_MARGIN)
        below, above = allowed.get(f"{name} @{step}", (0.0, 0.0))
        found[name, step] = Expected(slope, margin + below, margin + above, trouble)
    return found


def _slopes(
    preset: Preset, definition: Definition, exponents: Mapping[str, float], optimizer: str
) -> dict[tuple[str, int], tuple[float, str | None]]:
    limit = Limit(preset, preset.family(optimizer), exponents)
    start = {
        "embedding": limit.embedded,
        "query": limit.q,
        "key": limit.k,
        "attention": limit.attention,
        "variance over heads": 2 * limit.attention,
        "contribution": limit.contribution,
        "logits": limit.random("readout"),
    }
    change = {
        "change embedding": limit.step("embedding"),
        "change query": limit.dq,
        "change key": limit.dk,
        "change attention": limit.d_attention,
        "change logits": limit.d_output,
        "change residual": limit.features + limit.stream,
    }
    found: dict[tuple[str, int], tuple[float, str | None]] = {(name, 0): (x, _trouble(x)) for name, x in start.items()}
    for step in STEPS[1:]:
        found |= {(name, step): (x, _trouble(x)) for name, x in change.items()}
    for spec in definition.specs.values():
        found |= _weights(preset, spec, limit, exponents, optimizer)
    return found


def _weights(
    preset: Preset, spec: ParamSpec, limit: Limit, exponents: Mapping[str, float], optimizer: str
) -> dict[tuple[str, int], tuple[float, str | None]]:
    """Initial size, movement and gradient of one parameter group; what theory has no word for is left out."""
    row, family = preset.row(spec), preset.family(optimizer)
    found: dict[tuple[str, int], tuple[float, str | None]] = {}
    if spec.role is not Role.BIAS:
        start = (row.multiplier * row.init_std).growth(exponents)
        found[f"weight/{spec.group}", 0] = (start, None)
    name = "embedding" if spec.role in _EMBEDDINGS else _ROLES.get(spec.role)
    if family in ("adam", "lion"):
        moved = (row.multiplier * row.lr(family)).growth(exponents)
    elif name is not None:
        moved = limit.step(name)
    else:
        return found
    found |= {(f"movement/{spec.group}", step): (moved, None) for step in (1, STEPS[-1])}
    if name is not None and spec.role is not Role.POSITION:
        eps = row.eps_of(family).growth(exponents) if family == "adam" else 0.0
        over = limit.gradient[name] - eps
        found[f"gradient/{spec.group}", 0] = (over, "vanishes under eps" if family == "adam" and over < -0.01 else None)
    return found


def _trouble(exponent: float) -> str | None:
    return "explodes" if exponent > 0.01 else None


@functools.cache
def _allowances() -> dict[str, dict[str, tuple[float, float]]]:
    return json.loads(ALLOWANCES.read_text())["allowances"] if ALLOWANCES.exists() else {}
