"""What theory expects of every observable (observables.py): `presets.analysis.limits` for the growth of a series of models.

Finite sizes stray from exponents. How far, on rules known to be right, was measured once by `scripts/allowances.py` and
lies in `allowances.json`; a measured slope may stray by that and `_MARGIN` more, in the direction it was seen to.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path

from mupax.presets import EMBEDDINGS, VECTORS, ParamSpec, Preset, PresetError, Role
from mupax.presets.analysis.limits import SPECS, Limit
from mupax.presets.power import axis
from mupax.zoo.definition import Definition

STEPS = (0, 1, 3, 10)
"""Optimizer steps after which observables are read."""
ALLOWANCES = Path(__file__).with_name("allowances.json")
NO_LIMIT = " without a limit"
"""Marks the allowances of rules under which something explodes as this size grows."""
TIED = " tied"
"""Marks what a tied readout adds to the allowances of a study."""
_MARGIN = {"weight": 0.04, "movement": 0.08}
"""Room around theory and the measured allowance, by kind of observable; 0.12 for all others."""
_GROWS = 0.01
"""An exponent above this is growth."""
_FIRST_GRADIENT = ((0, "gradient"), (1, "movement"), (1, "update query"), (1, "update key"))
"""What is made of the gradient at initialization and nothing later (step, kind): then nothing is aligned yet."""
_ROLES = {spec.role: name for name, spec in SPECS.items() if spec.role is not Role.TOKEN_EMBEDDING}


@dataclasses.dataclass(frozen=True)
class Expected:
    """What theory says of one observable: its exponent, how far finite sizes may stray, and whether that is healthy.

    Attributes:
        slope: exponent in the grown size.
        below: how much less a measured slope may be.
        above: how much more.
        trouble: what a practitioner should hear where the exponent itself is bad, such as "explodes"; None where it is fine.
        roles: the weights whose steps theory blames for the trouble.
    """

    slope: float
    below: float = 0.15
    above: float = 0.15
    trouble: str | None = None
    roles: tuple[str, ...] = ()


def growth(first: Mapping[str, int], last: Mapping[str, int]) -> tuple[dict[str, float], float]:
    """Exponent of every axis that grows, and the factor by which the fastest one does; raises PresetError where none does."""
    logs = {axis: math.log2(last[axis] / size) for axis, size in first.items() if last.get(axis, size) != size}
    if not logs or max(logs.values()) <= 0:
        raise PresetError(f"no size grows from {dict(first)} to {dict(last)}; give the check models of growing size")
    fastest = max(logs.values())
    return {axis: value / fastest for axis, value in logs.items()}, 2.0**fastest


def of(
    preset: Preset, first: Definition, last: Definition, optimizer: str, *, strict: bool = False
) -> dict[tuple[str, int], Expected]:
    """Expectation per (observable, step).

    Args:
        preset: the rules that are meant to hold.
        first: the smallest model of the series.
        last: the largest.
        optimizer: whose updates.
        strict: without margins and allowances, to measure the latter.
    """
    exponents, _ = growth(first.sizes, last.sizes)
    family = preset.family(optimizer)
    tied = first.tied_readout is not None
    limit = Limit(preset, family, exponents, tied=tied)
    late = _slopes(preset, first, limit)
    # At initialization the backward signal of q and k is not aligned with the values, up to N^1/2 less: logits that much smaller
    # say what follows from it. It aligns slowly, and what reaches the stream through attention starts small: changes may
    # be anywhere from a whole N^1/2 less to what theory says in the end.
    lost = (limit.aligned - limit.n / 2) / limit.n if limit.n else 0.0
    first_gradient, early = (
        _slopes(slower, first, Limit(slower, family, exponents, tied=tied))
        for slower in (dataclasses.replace(preset, logits=preset.logits * axis("head_dim") ** -x) for x in (lost, 0.5))
    )
    worst = max((slope for (_, step), slope in late.items() if step > 0 and slope > _GROWS), default=0.0)
    allowed = {} if strict else _allowed(f"{family} {_grown_size(exponents)}", explodes=worst > 0, tied=tied)
    expected = {}
    for (name, step), slope in late.items():
        kind = name.partition("/")[0]
        margin = 0.0 if strict else _MARGIN.get(kind, 0.12)
        below, above = allowed.get(f"{name} @{step}", (0.0, 0.0))
        if (step, kind) in _FIRST_GRADIENT:
            slope = first_gradient[name, step]
        elif step > 0:
            feels_alignment = family == "sgd" or name.startswith(("change logits", "change residual"))
            slow = early[name, step] if feels_alignment else slope
            below, above = below + max(0.0, slope - slow), above + max(0.0, slow - slope)
        grows = step > 0 and slope > _GROWS
        if grows or step > 1:
            # What explodes soon leaves the regime in which it grows by a power law, and so does what trains beside it.
            below += slope if grows else worst
        trouble, roles = ("explodes", _blamed(name, limit)) if grows else (None, ())
        if name == "contact logit" and limit.layers:
            # The stream's size squared is a sum of two power laws, embedding and branches; between them the slope of the
            # embedding's share is that of neither.
            above += abs(limit.embedded - limit.contribution - limit.layers / 2)
        expected[name, step] = Expected(slope, margin + below, margin + above, trouble, roles)
    if preset.zero_readout and not tied:  # a tied table is never zero
        return {key: one for key, one in expected.items() if not _waits_for_readout(*key)}
    return expected


def _waits_for_readout(name: str, step: int) -> bool:
    """Whether a readout that starts at zero leaves this at zero: nothing else has a gradient before its first step."""
    kind, _, group = name.partition("/")
    if step == 0:
        return name in ("logits", "weight/readout") or (kind == "gradient" and not group.startswith("readout"))
    return step == 1 and name != "change logits" and not group.startswith("readout")


def _grown_size(exponents: Mapping[str, float]) -> str:
    """Which allowance applies: depth, head_dim, heads, or width for anything else that widens."""
    if "layers" in exponents:
        return "depth"
    alone = {"head_dim", "heads"} & exponents.keys()
    return alone.pop() if len(alone) == 1 else "width"


def _blamed(name: str, limit: Limit) -> tuple[str, ...]:
    """The weights behind an observable that grows."""
    if (what := name.partition(" ")[2]) in ("query", "key", "embedding"):
        return (what,)
    moved = {"update attention": "attention logits", "change residual": "stream", "change logits": "output"}
    return limit.moved_by(moved[name]) if name in moved else ()


def _slopes(preset: Preset, definition: Definition, limit: Limit) -> dict[tuple[str, int], float]:
    start = {
        "embedding": limit.embedded,
        "query": limit.q,
        "key": limit.k,
        "attention": limit.attention,
        "variance over heads": 2 * limit.attention,
        "contribution": limit.contribution,
        "logits": limit.random("readout"),
    }
    if definition.tied_readout is not None:
        start["contact logit"] = limit.contact
    change = {
        "change embedding": limit.step("embedding"),
        "update query": limit.dq,
        "update key": limit.dk,
        "update attention": limit.d_attention,
        "change logits": limit.d_output,
        "change residual": limit.features + limit.stream,
    }
    slopes = {(name, 0): slope for name, slope in start.items()}
    slopes |= {(name, step): slope for name, slope in change.items() for step in STEPS[1:]}
    for spec in definition.specs.values():
        slopes |= _weights(preset, spec, limit)
    return slopes


def _weights(preset: Preset, spec: ParamSpec, limit: Limit) -> dict[tuple[str, int], float]:
    """Initial size, movement and gradient of one parameter group; what theory has no word for is left out."""
    row, family = preset.row(spec), limit.family
    slopes: dict[tuple[str, int], float] = {}
    if spec.role is not Role.BIAS:
        slopes[f"weight/{spec.group}", 0] = limit.x(row.multiplier * row.init_std)
    name = "embedding" if spec.role in EMBEDDINGS else _ROLES.get(spec.role)
    gradient = limit.gradient[name] if name is not None else _vector_gradient(spec, limit)
    if family in ("adam", "lion"):
        slopes[f"movement/{spec.group}", 1] = limit.x(row.multiplier * row.lr(family))
    elif name is not None:
        slopes[f"movement/{spec.group}", 1] = limit.step(name)
    elif gradient is not None and family == "sgd":
        slopes[f"movement/{spec.group}", 1] = limit.x(row.multiplier * row.lr(family)) + gradient
    if gradient is not None:
        slopes[f"gradient/{spec.group}", 0] = gradient - limit.x(row.eps_of(family))
    return slopes


def _vector_gradient(spec: ParamSpec, limit: Limit) -> float | None:
    """Exponent of a gain's or bias' gradient: that of the matrix beside it, whose input has entries Theta(1)."""
    of_matrix = {name: limit.gradient[name] - limit.x(limit.rows[name].multiplier) for name in SPECS}
    if spec.role not in VECTORS or (spec.role is Role.NORM_GAIN and spec.of in (Role.QUERY, Role.KEY)):
        return None  # gains of q, k: summed over heads, more or less aligned, theory gives a band and no exponent
    if spec.role is Role.NORM_GAIN and limit.tied and abs(limit.contact) > 0.01:
        # Summed over tokens in concert as far as softmax believes the input token: p E_t . E_t, a sum of squares. Where its
        # logit grows or falls p goes to a constant as no power law does: 0.62, 0.91, 0.99, 1.00 under `sp` growing head_dim
        # from 64 to 512, a slope of +0.22, and the gain's gradient has -0.31 and -0.35 in place of -1/2.
        return None
    if not spec.in_block:
        if spec.of is Role.READOUT:
            return 0.0
        return of_matrix["embedding"] if spec.of in EMBEDDINGS else limit.weight("readout")
    if spec.of in (Role.ATTENTION_OUT, Role.MLP_OUT):
        return of_matrix["MLP out"] - limit.hidden
    if spec.role is Role.BIAS and spec.of in _ROLES:
        return of_matrix[_ROLES[spec.of]]
    return max(of_matrix["value"], of_matrix["MLP in"])


@functools.cache
def _allowed(study: str, *, explodes: bool, tied: bool) -> dict[str, tuple[float, float]]:
    studies = json.loads(ALLOWANCES.read_text())["allowances"]
    if explodes and study + NO_LIMIT in studies:
        study += NO_LIMIT
    return studies.get(study, {}) | (studies.get(study + TIED, {}) if tied else {})
