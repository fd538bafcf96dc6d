"""What theory expects of every observable (observables.py): `presets.analysis.limits` for the growth of a series of models.

Finite sizes stray from exponents. How far, on rules known to be right, was measured once by `scripts/check/allowances.py` and
lies in `allowances.json`; a measured slope may stray by that and `_MARGIN` more, in the direction it was seen to.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import statistics
from collections.abc import Collection, Mapping
from pathlib import Path

from mupax.presets import EMBEDDINGS, Preset, PresetError
from mupax.presets.analysis.limits import Limit
from mupax.presets.rule import axis
from mupax.train.studies.check import groups, observables
from mupax.zoo.definition import Definition

STEPS = (0, 1, 3, 10)
"""Optimizer steps after which observables are read."""
ALLOWANCES = Path(__file__).with_name("allowances.json")
NO_LIMIT = " without a limit"
"""Marks the allowances of rules under which something explodes as this size grows."""
TIED = " tied"
"""Marks what a tied readout adds to the allowances of a study."""
ENCODED = " with an encoder"
"""Marks the allowances of decoders whose blocks have a third branch, attention to an encoder."""
_MARGIN = {"weight": 0.04, "movement": 0.08}
"""Room around theory and the measured allowance, by kind of observable; 0.12 for all others."""
_GROWS = 0.01
"""An exponent above this is growth."""
_FIRST_GRADIENT = ((0, "gradient"), (1, "movement"), (1, "update query"), (1, "update key"))
"""What is made of the gradient at initialization and nothing later (step, kind): then nothing is aligned yet."""
LAZY = "lazy"
"""Trouble that a person can ask for: features that move less and less, the limit of the neural tangent."""


@dataclasses.dataclass(frozen=True)
class Expected:
    """What theory says of one observable: its exponent, how far finite sizes may stray, and whether that is healthy.

    Attributes:
        slope: exponent in the grown size.
        below: how much less a measured slope may be.
        above: how much more.
        trouble: what a practitioner should hear of the table where the exponent itself is bad: explodes, vanishes, frozen, lazy,
            heads collapse, eps dominates or fades; None where it is fine.
        roles: the weights whose steps theory blames for the trouble.
        base: what it is at the smallest size, a movement over the peak learning rate; None where theory has no number.
    """

    slope: float
    below: float = 0.15
    above: float = 0.15
    trouble: str | None = None
    roles: tuple[str, ...] = ()
    base: float | None = None

    @property
    def low(self) -> float:
        """Least slope that agrees."""
        return self.slope - self.below

    @property
    def high(self) -> float:
        """Greatest slope that agrees."""
        return self.slope + self.above


def growth(first: Mapping[str, int], last: Mapping[str, int]) -> tuple[dict[str, float], float]:
    """Exponent of every axis that grows, and the factor by which the fastest one does; raises PresetError where none does.

    Args:
        first, last: size of every logical axis of the smallest and of the largest model.
    """
    logs = {
        axis: math.log2(last[axis] / size)
        for axis, size in first.items()
        if last.get(axis, size) != size
    }
    if not logs or max(logs.values()) <= 0:
        raise PresetError(
            f"no size grows from {dict(first)} to {dict(last)}; give the check models of growing size"
        )
    fastest = max(logs.values())
    return {axis: value / fastest for axis, value in logs.items()}, 2.0**fastest


def of(
    preset: Preset,
    first: Definition,
    last: Definition,
    optimizer: str,
    *,
    strict: bool = False,
    accept: Collection[str] = (),
) -> dict[tuple[str, int], Expected]:
    """Expectation per (observable, step).

    Args:
        preset: the rules that are meant to hold.
        first: the smallest model of the series.
        last: the largest.
        optimizer: whose updates.
        strict: without margins and allowances, to measure the latter.
        accept: `LAZY`, of a preset whose source wants that (`Preset.vanishing` has "features"), as far as it does.

    Raises:
        PresetError: no size grows, or what is to be accepted is not what the preset's source wants.
    """
    if LAZY in accept and "features" not in preset.vanishing:
        raise PresetError(
            f"{preset.name} wants no lazy limit: its `vanishing` names no features; leave --accept lazy out"
        )
    shared = {"experts", "mlp"} <= first.sizes.keys()
    part = "shared experts" if shared else "experts" if "experts" in first.sizes else ""
    exponents, factor = growth(first.sizes, last.sizes)
    # In a model without attention that of the theory grows with the width, evenly.
    evenly = (
        {}
        if "heads" in first.sizes
        else dict.fromkeys(("heads", "kv_heads"), exponents.get("embed", 0.0))
    )
    family = preset.family(optimizer)
    tied, encoded = first.tied_readout is not None, "encoder_layers" in first.sizes

    def limit_of(chosen: Preset) -> Limit:
        return Limit(chosen, family, {**exponents, **evenly}, tied=tied, part=part)

    def with_smaller_logits(exponent: float) -> Preset:
        return preset.with_logits(preset.logits * axis("head_dim") ** -exponent)

    limit = limit_of(preset)
    late = _slopes(preset, first, limit)
    # At initialization the backward signal of q and k is not aligned with the values, up to N^1/2 less: logits that much smaller
    # say what follows from it. It aligns slowly, and what reaches the stream through attention starts small: changes may
    # be anywhere from a whole N^1/2 less to what theory says in the end.
    lost = (limit.aligned - limit.n / 2) / limit.n if limit.n else 0.0
    slower = with_smaller_logits(lost)
    slowest = with_smaller_logits(0.5)
    slower_limit = limit_of(slower)
    first_gradient = _slopes(slower, first, slower_limit, aligned=False)
    early = _slopes(slowest, first, limit_of(slowest), aligned=False)
    through_logits = _through_logits(slower_limit, factor)
    worst = max(
        (slope for (_, step), slope in late.items() if step > 0 and slope > _GROWS), default=0.0
    )
    allowed = (
        {}
        if strict
        else _allowed(f"{family} {_grown_size(exponents, encoded)}", explodes=worst > 0, tied=tied)
    )
    wrong = {
        key: str(trouble) for key, trouble in groups.troubles(preset, first.specs, limit).items()
    }
    of_base = groups.wrong_base(preset, first.specs, first.sizes, optimizer)
    wrong |= {key: f"wrong base ({ratio:.3g} times)" for key, ratio in of_base.items()}
    numbers = groups.at_base(preset, first.specs, first.sizes, optimizer)
    collapse = limit.x(preset.vanishing["attention"]) if "attention" in preset.vanishing else 0.0
    if abs(limit.attention) > _GROWS and not collapse - _GROWS < limit.attention < 0:
        wrong["attention", 0] = "heads collapse" if limit.attention < 0 else "explodes"
    # Scores that vanish leave gates of 1/2; at first a chosen expert's is above it, and so is by as much what SGD does to that expert.
    gates = (
        gates_fall(first.sizes, last.sizes)
        if part and family == "sgd" and limit.random("router") < -_GROWS
        else 0.0
    )
    expected, gains = {}, (f"movement/{groups.QUERY_GAIN}", 1)
    for (name, step), slope in late.items():
        kind = name.partition("/")[0]
        margin = 0.0 if strict else _MARGIN.get(kind, 0.12)
        below, above = allowed.get(allowance(name, step), (0.0, 0.0))
        if (step, kind) in _FIRST_GRADIENT:
            slope = first_gradient[name, step]
        elif step > 0:
            feels_alignment = family == "sgd" or name.startswith(
                ("change logits", "change residual")
            )
            slow = early[name, step] if feels_alignment else slope
            below, above = below + max(0.0, slope - slow), above + max(0.0, slow - slope)
        grows = step > 0 and slope > _GROWS
        if grows or step > 1:
            # What explodes soon leaves the regime in which it grows by a power law, and so does what trains beside it.
            below += slope if grows else worst
        trouble, roles = (
            ("explodes", _blamed(name, limit)) if grows else (wrong.get((name, step)), ())
        )
        trouble = None if trouble in accept else trouble
        if name == "update attention" and gains in late:
            # A QK-norm gain's step changes each logit by N terms of either sign; where rates are small it is what is seen.
            below += max(
                0.0, slope - (limit.logits + late[gains] + limit.q + limit.k + limit.n / 2)
            )
        if (
            (step, kind) == (0, "gradient")
            and "block.norm_gain" in name
            and not name.endswith("/mlp_norm")
        ):
            # The zoo's norms before an MLP are told by their name; of a user's own norms any may be attention's.
            below = max(below, through_logits)
        if name.startswith("movement/block.expert_"):
            below += gates
        if name == "change embedding":  # a sum of power laws
            moves = _embedding_moves(preset, first, limit)
            below += max(moves, default=0.0) - min(moves, default=0.0)
        if name == "contact logit" and limit.layers:
            # The stream's size squared is a sum of two power laws, embedding and branches; between them the slope of the
            # embedding's share is that of neither.
            above += abs(limit.embedded - limit.contribution - limit.layers / 2)
        absolute = (
            kind in ("weight", "attention")
            if step == 0
            else kind == "movement" and family in ("adam", "lion")
        )
        base = numbers.get((name, step)) if absolute else None
        expected[name, step] = Expected(slope, margin + below, margin + above, trouble, roles, base)
    if preset.zero_readout and not tied:  # a tied table is never zero
        return {key: one for key, one in expected.items() if not _waits_for_readout(*key)}
    return expected


def _through_logits(limit: Limit, factor: float) -> float:
    """Return how far the first gradient of attention's norm gain falls below its exponent over this growth.

    It is a sum of what comes back through values and through queries and keys. At the base, whose logits are q.k N^-1/2, the
    three parts are of one size in long contexts (in one of T positions the mean squares of the last two are 1 - 1.64 / H_T of
    the first's, where H_T = 1 + 1/2 + ... + 1/T). Until values and backward signal are aligned, the parts through logits fall
    as N^(1/2 - alpha_A) beside the first, so the mean square is 1 + 2 m^(-2 gap) in the longest context, and 1 + 1.06 m^(-2 gap)
    in one of 16. There the slope from 1 to 8 is -0.144 by this sum; measured -0.139 [-0.18, -0.10] under `mup`, and under
    `mup-half`, whose gap is 0, +0.005. The norm before the MLP has +0.007.

    Args:
        limit: at initialization, where nothing is aligned yet.
        factor: by which the size grows.
    """
    effective = {
        name: limit.gradient[name] - limit.x(limit.rows[name].multiplier)
        for name in ("value", "query")
    }
    gap = effective["value"] - effective["query"]
    if gap <= _GROWS:
        return 0.0
    return math.log2(3 / (1 + 2 * factor ** (-2 * gap))) / 2 / math.log2(factor)


def gates_fall(first: Mapping[str, int], last: Mapping[str, int]) -> float:
    """Octaves per doubling by which the mean sigmoid gate of a token's experts falls at most, to 1/2 from where scores are Normal(0, 1).

    Args:
        first, last: size of every logical axis of the smallest and of the largest model.
    """
    share, normal = first["active"] / first["experts"], statistics.NormalDist()
    best = normal.pdf(normal.inv_cdf(1 - share)) / share if share < 1 else 0.0
    return math.log2(2 / (1 + math.exp(-best))) / math.log2(growth(first, last)[1])


def allowance(observable: str, step: int) -> str:
    """Name of an observable's allowance: one for all parts of a group, such as the norms of a block.

    Args:
        observable: of `mupax.train.studies.check.observables`.
        step: after which it is read.
    """
    return f"{'/'.join(observable.split('/')[:2])} @{step}"


def _waits_for_readout(name: str, step: int) -> bool:
    """Whether a readout that starts at zero leaves this at zero: nothing else has a gradient before its first step."""
    kind, _, group = name.partition("/")
    if step == 0:
        return name in ("logits", "weight/readout") or (
            kind == "gradient" and not group.startswith("readout")
        )
    return step == 1 and name != "change logits" and not group.startswith("readout")


def _grown_size(exponents: Mapping[str, float], encoded: bool) -> str:
    """Which allowance applies: depth (of a decoder, with its encoder's or alone), head_dim, heads, or width for anything else that widens."""
    if "layers" in exponents:
        return f"depth{ENCODED}" if encoded else "depth"
    if "encoder_layers" in exponents:
        return "encoder_depth"
    alone = {"head_dim", "heads"} & exponents.keys()
    return alone.pop() if len(alone) == 1 else "width"


def _embedding_moves(preset: Preset, definition: Definition, limit: Limit) -> list[float]:
    """Exponents of what moves the (decoder's) stream's input: tables, the patches' matrix and its bias."""
    # Of these parameters alone: the slopes of all others would be worked out for nothing.
    specs = {
        name: spec
        for name, spec in definition.specs.items()
        if EMBEDDINGS & {spec.role, spec.of} and spec.part == ""
    }
    of_weights = groups.slopes(preset, specs, limit)
    return [slope for (name, _), slope in of_weights.items() if name.startswith("movement/")]


def _blamed(name: str, limit: Limit) -> tuple[str, ...]:
    """The weights behind an observable that grows."""
    if (what := name.partition(" ")[2]) in ("query", "key", "embedding"):
        return (what,)
    moved = {
        "update attention": "attention logits",
        "change residual": "stream",
        "change logits": "output",
    }
    return limit.moved_by(moved[name]) if name in moved else ()


def _slopes(
    preset: Preset, definition: Definition, limit: Limit, *, aligned: bool = True
) -> dict[tuple[str, int], float]:
    start = {
        "embedding": limit.embedded,
        "query": limit.q,
        "key": limit.k,
        "attention": limit.attention,
        "variance over heads": 2 * limit.spread,
        "contribution": limit.contribution,
        "logits": limit.random("readout"),
    }
    if definition.tied_readout is not None:
        start["contact logit"] = limit.contact
    features, output = limit.features, limit.d_output
    if "encoder_layers" in definition.sizes:
        # What its encoder changes reaches the decoder by branches that are independent of it.
        encoder = limit.of("encoder")
        cross = limit.of("cross")
        start[observables.CROSS] = cross.branch + cross.random("attention out", cross.v)
        features = max(features, limit.branch + limit.layers / 2 - limit.stream + encoder.features)
        output = max(output, encoder.d_output)
    change = {
        "change embedding": max(
            _embedding_moves(preset, definition, limit), default=limit.step("embedding")
        ),
        "update query": limit.dq,
        "update key": limit.dk,
        "update attention": limit.d_attention,
        "change logits": output,
        "change residual": features + limit.stream,
    }
    slopes = {(name, 0): slope for name, slope in start.items()}
    slopes |= {(name, step): slope for name, slope in change.items() for step in STEPS[1:]}
    return slopes | groups.slopes(preset, definition.specs, limit, aligned=aligned)


@functools.cache
def _allowed(study: str, *, explodes: bool, tied: bool) -> dict[str, tuple[float, float]]:
    studies = json.loads(ALLOWANCES.read_text())["allowances"]
    if explodes and study + NO_LIMIT in studies:
        study += NO_LIMIT
    return studies.get(study, {}) | (studies.get(study + TIED, {}) if tied else {})
