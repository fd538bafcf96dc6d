"""Theory of every observable of the coordinate check, as models of a series grow.

Exponents come from `mupax.presets.analysis.limits`. At finite sizes measured slopes differ from
exponents: `scripts/check/allowances.py` measured by how much, under presets that are right, and
wrote `allowances.json`. A slope passes within this allowance plus a margin (`_MARGIN`).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import statistics
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from mupax.presets import EMBEDDINGS, Preset, PresetError
from mupax.presets.analysis.limits import Limit
from mupax.presets.optimizers import Family
from mupax.presets.rule import axis
from mupax.train.studies.check import groups, observables
from mupax.zoo.definition import Definition

STEPS = (0, 1, 3, 10)
"""Numbers of optimizer steps after which observables are read."""
ALLOWANCES = Path(__file__).with_name("allowances.json")
NO_LIMIT = " without a limit"
"""Suffix of keys of `allowances.json` for presets under which something explodes with size."""
TIED = " tied"
"""Suffix of keys of `allowances.json` for models with a tied readout.

These allowances are added to those under the key without the suffix, or replace them.
"""
ENCODED = " with an encoder"
"""Suffix of keys of `allowances.json` for decoders whose blocks also attend to an encoder."""
_MARGIN = {"weight": 0.04, "movement": 0.08}
"""Distance from theory that a slope may have in addition to the allowance, by kind."""
_DEFAULT_MARGIN = 0.12
# Exponents come from sums of floats, so an exact 0 may come out as rounding.
_GROWS = 0.01
"""Exponent above which an observable counts as growing with size."""
_MOST_POSITIONS = 512
"""Largest number of positions for which squared attention weights are summed.

Models without the axis "position" are taken to have this number.
"""
_FIRST_GRADIENT = ((0, "gradient"), (1, "movement"), (1, "update query"), (1, "update key"))
"""(step, kind) of observables that depend on no gradient but the one at initialization.

Values and backward signals are not yet aligned there, so these observables have exponents of their
own.
"""
LAZY = "lazy"
"""Name of the trouble that a user may accept: features move less in larger models (NTK limit)."""

ObservableStep = tuple[str, int]
"""Name of an observable, and the number of optimizer steps after which it is read."""


@dataclasses.dataclass(frozen=True)
class Expected:
    """Theory of one observable: its exponent, the band of slopes that pass, and its trouble.

    Attributes:
        slope: Exponent in the grown size.
        below: Distance by which a measured slope may be less than `slope`.
        above: Distance by which a measured slope may be greater than `slope`.
        trouble: Fault of the preset that theory foretells: "explodes", "vanishes", "frozen",
            "lazy", "heads collapse", "eps dominates", "eps fades" or words on a wrong base. `None`
            without a fault.
        roles: Roles of the weights whose steps theory blames for the trouble.
        base: Value at the smallest size; for a movement, divided by the peak learning rate. `None`
            if theory has no number.
    """

    slope: float
    below: float = 0.15
    above: float = 0.15
    trouble: str | None = None
    roles: tuple[str, ...] = ()
    base: float | None = None

    @property
    def low(self) -> float:
        """Least measured slope that still agrees with theory: `slope` - `below`."""
        return self.slope - self.below

    @property
    def high(self) -> float:
        """Greatest measured slope that still agrees with theory: `slope` + `above`."""
        return self.slope + self.above


def is_lazy(expected: Mapping[ObservableStep, Expected]) -> bool:
    """Return True if theory says that the residual stream changes less as the model grows.

    Theory's exponent then holds to first order in the change, so it can only be measured at a small
    learning rate (`check.peak_lr`).
    """
    change = expected.get(("change residual", STEPS[1]))
    return change is not None and change.slope < -_GROWS


def growth(first: Mapping[str, int], last: Mapping[str, int]) -> tuple[dict[str, float], float]:
    """Return the exponent of every axis whose size changes, and the growth factor of the fastest.

    Exponents are relative to the fastest axis, which has 1.

    Args:
        first: Size of every logical axis of the smallest model.
        last: Size of every logical axis of the largest model.

    Raises:
        PresetError: No axis grows.
    """
    octaves = {}
    for axis_name, size in first.items():
        if last.get(axis_name, size) != size:
            octaves[axis_name] = math.log2(last[axis_name] / size)
    if not octaves or max(octaves.values()) <= 0:
        raise PresetError(
            f"no size grows from {dict(first)} to {dict(last)}; "
            f"give the check models of growing size"
        )

    # Slopes are fitted against the fastest axis, so every other axis is a power of it.
    fastest = max(octaves.values())
    exponents = {axis_name: value / fastest for axis_name, value in octaves.items()}
    return exponents, 2.0**fastest


def of(
    preset: Preset,
    first: Definition,
    last: Definition,
    optimizer: str,
    *,
    strict: bool = False,
    accept: Collection[str] = (),
) -> dict[ObservableStep, Expected]:
    """Return theory's exponent, band, troubles and value for every observable and step it covers.

    If the preset starts an untied readout at zero, observables that are zero for this reason are
    left out.

    Args:
        preset: Rules that the models are meant to follow.
        first: Definition of the smallest model of the series.
        last: Definition of the largest model of the series.
        optimizer: Name of the optimizer, such as "adam".
        strict: Whether bands are without margins and allowances. The script that measures the
            allowances uses it.
        accept: Troubles that are not reported. Only `LAZY` is possible, and only for a preset whose
            `vanishing` names "features", because its paper wants a lazy limit.

    Raises:
        PresetError: No size grows, or `accept` has `LAZY` for a preset whose `vanishing` does not
            name "features".
    """
    # Otherwise the flag would hide a wrong rule of a preset that should learn features.
    if LAZY in accept and "features" not in preset.vanishing:
        raise PresetError(
            f"{preset.name} wants no lazy limit: its `vanishing` names no features; "
            f"leave --accept lazy out"
        )

    theory = _derive_theory(preset, first, last, optimizer, strict=strict, accept=accept)
    expected = {}
    for name, step in theory.slopes:
        expected[name, step] = theory.expected(name, step)

    # A tied table is never zero.
    if preset.zero_readout and first.tied_readout is None:
        # An exact zero has no log, so these rows could only be judged as "zero" or "frozen".
        remaining = {}
        for key, value in expected.items():
            if not _waits_for_readout(*key):
                remaining[key] = value
        return remaining
    return expected


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Theory:
    """Exponents, allowances and troubles of one preset as a series of models grows.

    A "drop" is the distance by which a slope at finite sizes lies below its exponent. A "first
    gradient" is the gradient at initialization.

    Attributes:
        definition: Smallest model.
        slopes: Exponents in the limit, where values and backward signals are aligned.
        first_gradient_slopes: Exponents of first gradients and of the steps that they cause.
        unaligned_slopes: Least exponents of changes before values and backward signals are aligned.
        allowances: Name of an allowance to how far a slope may lie (below, above) its exponent.
        fastest_growth: Greatest exponent of any observable that grows in training, 0 if none grows.
        gain_drop: Drop of the first gradient of the norm gain before attention (`_gain_drop`).
        concentration_drop: Drop of the first gradient of a key's bias (`_concentration_drop`).
        attention_drop: Drop of first gradients that come back through attention, if attention
            logits are larger than 1 at the smallest size (`_attention_drop`).
        gate_drop: Drop of movements of experts, from sigmoid gates that fall (`gates_fall`).
        troubles: Words for the faults of the preset's table.
        numbers: Values that the table gives at the smallest size.
    """

    preset: Preset
    definition: Definition
    family: Family
    limit: Limit
    slopes: Mapping[ObservableStep, float]
    first_gradient_slopes: Mapping[ObservableStep, float]
    unaligned_slopes: Mapping[ObservableStep, float]
    allowances: Mapping[str, tuple[float, float]]
    fastest_growth: float
    gain_drop: float
    concentration_drop: float
    attention_drop: float
    gate_drop: float
    troubles: Mapping[ObservableStep, str]
    numbers: Mapping[ObservableStep, float]
    strict: bool
    accept: Collection[str]

    def expected(self, name: str, step: int) -> Expected:
        """Return exponent, band, trouble and value of one observable after `step` optimizer steps.

        A change in training with a positive exponent has the trouble "explodes".
        """
        kind = name.partition("/")[0]
        slope = self.slopes[name, step]
        if (step, kind) in _FIRST_GRADIENT:
            slope = self.first_gradient_slopes[name, step]
        # At step 0 growth may be wanted (the first gradient, a logit); only changes can explode.
        grows = step > 0 and slope > _GROWS

        trouble = self.troubles.get((name, step))
        roles: tuple[str, ...] = ()
        if grows:
            trouble = "explodes"
            roles = _blamed_roles(name, self.limit)
        if trouble in self.accept:
            trouble = None

        margin = 0.0 if self.strict else _MARGIN.get(kind, _DEFAULT_MARGIN)
        below, above = self._room(name, step, slope, grows=grows)
        base = self._base(name, step)
        return Expected(slope, margin + below, margin + above, trouble, roles, base)

    def _room(self, name: str, step: int, slope: float, *, grows: bool) -> tuple[float, float]:
        """Return how far a measured slope may lie below and above its exponent.

        Both distances are at least 0. They allow for effects of finite size, and do not include the
        margin that `expected` adds.

        Args:
            slope: Exponent of the observable according to theory.
            grows: True if the observable is a change whose exponent `slope` counts as growth.
        """
        kind = name.partition("/")[0]
        below, above = self.allowances.get(allowance(name, step), (0.0, 0.0))

        if step > 0 and (step, kind) not in _FIRST_GRADIENT:
            # Such a change is a sum of aligned and unaligned terms. An attention logit changes by N
            # terms, of which only a share of about tokens^-1/2 is aligned, because one step of a
            # weight serves all pairs of tokens. With 512 tokens the slope was -0.55 from head_dim
            # 16 to 32 and -0.08 from 128 to 256, where theory says 0 for aligned and -1/2 for
            # unaligned terms.
            is_sum = name.startswith(("change logits", "change residual", "update attention"))
            slowest = slope
            if self.family == "sgd" or is_sum:
                slowest = self.unaligned_slopes[name, step]
            below = below + max(0.0, slope - slowest)
            above = above + max(0.0, slowest - slope)

        # An explosion soon leaves the regime in which it grows by a power law. So do other
        # observables of the same training.
        if grows:
            below += slope
        elif step > 1:
            below += self.fastest_growth

        # Only a model with a QK-norm has this row.
        gain_movement = (f"movement/{groups.QUERY_GAIN}", 1)
        if name == "update attention" and gain_movement in self.slopes:
            # The step of a QK-norm's gain changes each logit by N terms of either sign, N^-1/2 of
            # the change by queries and keys. Under `u-mup` this was the change that was measured: a
            # slope of -0.47, where theory says 0.
            limit = self.limit
            by_gain = limit.logits + self.slopes[gain_movement] + limit.q + limit.k + limit.n / 2
            below += max(0.0, slope - by_gain)

        # In the zoo only the norm before an MLP is named mlp_norm. In a user's own model any norm
        # may be the one before attention.
        is_block_gain = "block.norm_gain" in name and not name.endswith("/mlp_norm")
        if (step, kind) == (0, "gradient") and is_block_gain:
            below = max(below, self.gain_drop)

        if (step, kind) == (0, "gradient") and name.endswith("key.bias"):
            below += self.concentration_drop

        # An encoder's gradients all come back through values and keys of cross-attention, and
        # through values, queries and keys of its own later blocks, a sum as in `_gain_drop`.
        if (step, kind) == (0, "gradient") and "/encoder." in name:
            below = max(below, self.gain_drop)

        # Under SGD a movement is as large as the gradient.
        is_gradient = (step, kind) == (0, "gradient")
        is_first_step = (step, kind) == (1, "movement") and self.family == "sgd"
        if (is_gradient or is_first_step) and _comes_through_attention(name):
            below += self.attention_drop

        if name.startswith("movement/block.expert_"):
            below += self.gate_drop

        if name == "change embedding":
            # The log-log slope of a sum of power laws lies between the least and the greatest
            # exponent.
            moves = _embedding_moves(self.preset, self.definition, self.limit)
            below += max(moves, default=0.0) - min(moves, default=0.0)

        if name == "contact logit" and self.limit.layers:
            # The stream's mean square is a sum of two power laws, of the embedding and of the
            # branches. At finite depth the measured slope lies between those of the two.
            limit = self.limit
            above += abs(limit.embedded - limit.contribution - limit.layers / 2)
        return below, above

    def _base(self, name: str, step: int) -> float | None:
        """Return the value that the table gives at the smallest size, or `None` if it gives none.

        The table gives a value for initial weights and attention logits, and for the movement of
        parameters under Adam and Lion.
        """
        kind = name.partition("/")[0]
        if step == 0:
            has_number = kind in ("weight", "attention")
        else:
            # SGD's step is proportional to the gradient, whose value theory does not give.
            has_number = kind == "movement" and self.family in ("adam", "lion")
        return self.numbers.get((name, step)) if has_number else None


def _derive_theory(
    preset: Preset,
    first: Definition,
    last: Definition,
    optimizer: str,
    *,
    strict: bool,
    accept: Collection[str],
) -> _Theory:
    """Return exponents, allowances and troubles of a preset. The arguments are those of `of`."""
    exponents, factor = growth(first.sizes, last.sizes)
    family = preset.family(optimizer)
    is_tied = first.tied_readout is not None
    part = _expert_part(first)

    # A copy, because `_grown_size` must not see heads that the model lacks.
    limit_growth = dict(exponents)
    if "heads" not in first.sizes:
        # The theory has attention even if the model has none. Its heads then grow with the width.
        limit_growth |= dict.fromkeys(("heads", "kv_heads"), exponents.get("embed", 0.0))

    def limit_of(chosen: Preset) -> Limit:
        return Limit(chosen, family, limit_growth, tied=is_tied, part=part)

    def with_smaller_logits(exponent: float) -> Preset:
        return preset.with_logits(preset.logits * axis("head_dim") ** -exponent)

    limit = limit_of(preset)
    slopes = _slopes(preset, first, limit)

    # At initialization the backward signal of q and k is not aligned with the values, and is
    # smaller by up to N^1/2. Logits that are smaller by the same factor have the same effect. The
    # signal aligns slowly, and attention adds little to the stream at first. So the exponents of
    # changes may lie anywhere between that of logits smaller by N^1/2 and that of the limit.
    lost_alignment = (limit.aligned - limit.n / 2) / limit.n if limit.n else 0.0
    unaligned_preset = with_smaller_logits(lost_alignment)
    # `lost_alignment` is an exponent of head_dim, because `with_logits` scales logits by powers of
    # head_dim.
    unaligned_limit = limit_of(unaligned_preset)
    slowest_preset = with_smaller_logits(0.5)
    slowest_limit = limit_of(slowest_preset)

    fastest_growth = 0.0
    for (_, step), slope in slopes.items():
        if step > 0 and slope > _GROWS:
            fastest_growth = max(fastest_growth, slope)

    allowances: Mapping[str, tuple[float, float]] = {}
    if not strict:
        grown_size = _grown_size(exponents, encoded="encoder_layers" in first.sizes)
        allowances = _allowances(
            f"{family} {grown_size}", explodes=fastest_growth > 0, tied=is_tied
        )

    numbers = groups.at_base(preset, first.specs, first.sizes, optimizer)
    gate_drop = 0.0
    if part and family == "sgd" and limit.random("router") < -_GROWS:
        # Router scores that vanish leave gates of sigmoid(0) = 1/2. At small sizes the gate of a
        # chosen expert is above 1/2, and the step that SGD gives this expert is larger by the same
        # factor.
        gate_drop = gates_fall(first.sizes, last.sizes)

    return _Theory(
        preset=preset,
        definition=first,
        family=family,
        limit=limit,
        slopes=slopes,
        first_gradient_slopes=_slopes(unaligned_preset, first, unaligned_limit, aligned=False),
        unaligned_slopes=_slopes(slowest_preset, first, slowest_limit, aligned=False),
        allowances=allowances,
        fastest_growth=fastest_growth,
        gain_drop=_gain_drop(unaligned_limit, factor, numbers),
        concentration_drop=_concentration_drop(numbers, limit.attention, factor),
        attention_drop=_attention_drop(
            numbers, limit.attention, factor, first.sizes.get("position", _MOST_POSITIONS)
        ),
        gate_drop=gate_drop,
        troubles=_troubles(preset, first, limit, optimizer),
        numbers=numbers,
        strict=strict,
        accept=accept,
    )


def _expert_part(definition: Definition) -> str:
    """Return the argument `part` of `Limit` that says which experts a model has.

    It is "shared experts" if the model has experts and a dense MLP, "experts" if it has experts
    alone, and "" without experts.
    """
    if {"experts", "mlp"} <= definition.sizes.keys():
        return "shared experts"
    return "experts" if "experts" in definition.sizes else ""


def _troubles(
    preset: Preset, definition: Definition, limit: Limit, optimizer: str
) -> dict[ObservableStep, str]:
    """Return words on each fault of a preset: wrong exponents, base, or attention logits.

    Keys are the observables that show the fault.
    """
    words = {}
    for key, trouble in groups.troubles(preset, definition.specs, limit).items():
        words[key] = str(trouble)
    base_ratios = groups.wrong_base(preset, definition.specs, definition.sizes, optimizer)
    for key, ratio in base_ratios.items():
        words[key] = f"wrong base ({ratio:.3g} times)"

    # A source may let attention logits vanish on purpose, up to an exponent.
    allowed_collapse = 0.0
    if "attention" in preset.vanishing:
        allowed_collapse = limit.x(preset.vanishing["attention"])
    is_allowed = allowed_collapse - _GROWS < limit.attention < 0
    if abs(limit.attention) > _GROWS and not is_allowed:
        words["attention", 0] = "heads collapse" if limit.attention < 0 else "explodes"
    return words


def _gain_drop(limit: Limit, factor: float, numbers: Mapping[ObservableStep, float]) -> float:
    """Return by how much a slope at finite sizes lies below theory, for the norm before attention.

    The slope is that of the gradient of this norm's gain at initialization. The drop is 0 unless
    the parts of the gradient that come back through attention logits fall.

    The gradient is a sum of parts that come back through values, queries and keys. At the base,
    whose logits are q.k N^-1/2 (N: head dimension), the three parts are equally large in long
    contexts. (In a context of T positions, the mean squares of the parts through queries and keys
    are 1 - 1.64 / H_T times that of values, with H_T = 1 + 1/2 + ... + 1/T.) Until values and
    backward signal are aligned, the parts through queries and keys fall as N^-gap relative to
    values, with gap = alpha_A - 1/2 for logits q.k N^-alpha_A. At m times the base the mean square
    is 1 + 2 m^(-2 gap) in the longest context and 1 + 1.06 m^(-2 gap) in one of 16. Logits that are
    s times as large make the parts through them s times as large.

    From m = 1 to 8 with gap = 1/2, the root of the mean square in a context of 16 has the slope
    -0.144. Under `mup` it was measured as -0.139 [-0.18, -0.10]; under `mup-half`, whose gap is 0,
    as +0.005. The norm before the MLP has +0.007. The drop that is returned is that of the longest
    context, where it is greatest (0.211 for this example).

    Args:
        limit: Limit at initialization, where nothing is aligned.
        factor: Growth of the fastest axis, such as 8.
        numbers: Values at the smallest size. That of attention logits is s; an s below 1 counts as
            1.
    """
    # `limit.gradient` is that of stored weights. Divided by the multiplier it is that of weights
    # times multiplier.
    value = limit.gradient["value"] - limit.x(limit.rows["value"].multiplier)
    query = limit.gradient["query"] - limit.x(limit.rows["query"].multiplier)
    gap = value - query
    if gap <= _GROWS:
        return 0.0
    logits = 2 * max(1.0, numbers.get(("attention", 0), 1.0)) ** 2
    fall = math.log2((1 + logits) / (1 + logits * factor ** (-2 * gap)))
    return fall / 2 / math.log2(factor)


def _concentration_drop(
    numbers: Mapping[ObservableStep, float], exponent: float, factor: float
) -> float:
    """Return by how much a slope at finite sizes lies below theory, for the bias of keys.

    The slope is that of this bias's gradient at initialization. The drop is 0 unless attention
    logits fall as the model grows.

    The gradient is a sum over positions, each weighted by its attention, of terms of either sign.
    (A bias that is the same for all keys changes attention only through their positions.) The sum
    is therefore proportional to the root of the sum of squared attention weights. With many
    positions and normal logits of standard deviation s, this root is e^(s^2 / 2) times that of even
    attention. Under `mup` s is 1 at the smallest size and falls as N^-1/2 (N: head dimension). With
    512 positions the slope was -0.89 up to head_dim 64 (theory -1/2), and -0.65 with logits of a
    quarter of the size.

    Args:
        numbers: Values at the smallest size. That of attention logits is s.
        exponent: Exponent of the attention logits at initialization, -1/2 for head_dim under `mup`.
        factor: Growth of the fastest axis, such as 8.
    """
    if exponent >= -_GROWS:
        return 0.0
    deviation = numbers.get(("attention", 0), 1.0)
    fall = deviation**2 * (1 - factor ** (2 * exponent))
    return fall * math.log2(math.e) / 2 / math.log2(factor)


def _comes_through_attention(name: str) -> bool:
    """Return whether a gradient at initialization comes back through attention, if only in part.

    Args:
        name: Name of an observable of the parameter, such as "gradient/block.value".
    """
    group = name.partition("/")[2]
    is_of_attention = group.startswith(
        ("block.query", "block.key", "block.value", "block.attention_out")
    )
    is_before = group.startswith(("block.norm_gain", "token_embedding", "position", "patch"))
    return is_of_attention or (is_before and not name.endswith("/mlp_norm"))


def _attention_drop(
    numbers: Mapping[ObservableStep, float], exponent: float, factor: float, positions: int
) -> float:
    """Return by how much slopes at finite sizes lie below theory, for gradients via attention.

    The slopes are those of gradients at initialization. The drop is 0 unless attention logits fall
    as the model grows and are larger than 1 at the smallest size.

    Outputs of attention, and the gradients of values, are sums over positions, each weighted by its
    attention. If the terms of all positions are independent, the sums are proportional to the root
    of the sum of squared attention weights, which falls with the logits. If the terms are equal,
    the sums do not fall. Slopes lie between the two. As `lm-proxy` grows from head_dim 16 to 64
    under `mup`, the slope of the values' gradient was -0.13 with logits times c_a = 1, -0.26 with
    c_a = 2 and -0.33 with c_a = 4. The effect of logits of size 1 is among the allowances, so only
    the excess over it is returned.

    Args:
        numbers: Values at the smallest size. That of attention logits is their standard deviation.
        exponent: Exponent of the attention logits at initialization, -1/2 for head_dim under `mup`.
        factor: Growth of the fastest axis, such as 8.
        positions: Number of positions. Larger numbers count as `_MOST_POSITIONS`.
    """
    deviation = numbers.get(("attention", 0), 1.0)
    if exponent >= -_GROWS or deviation <= 1:
        return 0.0

    def fall(start: float) -> float:
        smaller = _squared_attentions(start * factor**exponent, positions)
        return math.log2(_squared_attentions(start, positions) / smaller) / 2 / math.log2(factor)

    return max(0.0, fall(deviation) - fall(1.0))


@functools.cache
def _squared_attentions(deviation: float, positions: int) -> float:
    """Return the sum over all queries and keys of squared causal attention weights.

    The sum is an average over random logits.

    Args:
        deviation: Standard deviation of the logits, which are normal and independent.
        positions: Number of positions. Larger numbers count as `_MOST_POSITIONS`.
    """
    import numpy as np

    count = min(positions, _MOST_POSITIONS)
    logits = deviation * np.random.default_rng(0).normal(size=(256, count))
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    # Position t attends to positions 0 to t. A row of logits serves for all of them.
    sums = np.cumsum(weights, axis=1)
    squares = np.cumsum(weights**2, axis=1)
    return float(np.mean(squares / sums**2) * count)


def gates_fall(first: Mapping[str, int], last: Mapping[str, int]) -> float:
    """Return the log2 by which the mean sigmoid gate of active experts falls per doubling in size.

    A gate is the sigmoid of a router score. This is the most that gates can fall: from router
    scores of Normal(0, 1) in the smallest model to scores of 0 in the largest, where every gate is
    1/2.

    Args:
        first: Size of every logical axis of the smallest model, "experts" and "active" among them.
        last: Size of every logical axis of the largest model.

    Raises:
        PresetError: No axis grows.
    """
    active_share = first["active"] / first["experts"]
    normal = statistics.NormalDist()
    mean_score = 0.0
    if active_share < 1:
        # Mean of the largest scores, those of the active experts.
        mean_score = normal.pdf(normal.inv_cdf(1 - active_share)) / active_share
    return math.log2(2 / (1 + math.exp(-mean_score))) / math.log2(growth(first, last)[1])


def allowance(observable: str, step: int) -> str:
    """Return the key of an observable in `allowances.json`, such as "gradient/block.norm_gain @0".

    All parameters of a group, such as the norms of a block, share one allowance.

    Args:
        observable: Name from `mupax.train.studies.check.observables`.
        step: Number of optimizer steps taken.
    """
    # "gradient/block.norm_gain/mlp_norm" keeps kind and group, and drops the part of the group.
    group = "/".join(observable.split("/")[:2])
    return f"{group} @{step}"


def _waits_for_readout(name: str, step: int) -> bool:
    """Return whether an observable is exactly zero if the readout starts at zero.

    With such a readout only the readout has a gradient before the first step.
    """
    kind, _, group = name.partition("/")
    is_readout = group.startswith("readout")
    if step == 0:
        return name in ("logits", "weight/readout") or (kind == "gradient" and not is_readout)
    # The first step moves the readout alone, so all other changes begin at the second step.
    return step == 1 and name != "change logits" and not is_readout


def _grown_size(exponents: Mapping[str, float], *, encoded: bool) -> str:
    """Return the name of the size that grows, under which `allowances.json` has allowances.

    It is "depth" if the decoder's depth grows (with the suffix `ENCODED` if the model has an
    encoder), "encoder_depth" if only the encoder's depth grows, "head_dim" or "heads" if that axis
    grows without the other, and "width" for all other growth.

    Args:
        exponents: Exponent of every axis that grows, from `growth`.
        encoded: True if the model has an encoder in addition to its decoder.
    """
    if "layers" in exponents:
        return f"depth{ENCODED}" if encoded else "depth"
    if "encoder_layers" in exponents:
        return "encoder_depth"
    attention_axes = {"head_dim", "heads"} & exponents.keys()
    return attention_axes.pop() if len(attention_axes) == 1 else "width"


def _embedding_moves(preset: Preset, definition: Definition, limit: Limit) -> list[float]:
    """Return exponents of the movements of the parameters that embed a model's inputs.

    These are token and position tables, the matrix of patches and its bias. Tables of an encoder
    are left out.
    """
    # Slopes of all other parameters would be computed for nothing.
    embedding_specs = {}
    for name, spec in definition.specs.items():
        if EMBEDDINGS & {spec.role, spec.of} and spec.part == "":
            embedding_specs[name] = spec
    slopes = groups.slopes(preset, embedding_specs, limit)
    movements = []
    for (name, _), slope in slopes.items():
        if name.startswith("movement/"):
            movements.append(slope)
    return movements


def _blamed_roles(name: str, limit: Limit) -> tuple[str, ...]:
    """Return roles of the weights whose steps make an observable grow; () if theory names none."""
    activation = name.partition(" ")[2]
    if activation in ("query", "key", "embedding"):
        return (activation,)

    quantities = {
        "update attention": "attention logits",
        "change residual": "stream",
        "change logits": "output",
    }
    return limit.moved_by(quantities[name]) if name in quantities else ()


class _DecoderChange(NamedTuple):
    """Exponents of the changes of a decoder's features and output, with its encoder's effect."""

    features: float
    output: float


def _slopes(
    preset: Preset, definition: Definition, limit: Limit, *, aligned: bool = True
) -> dict[ObservableStep, float]:
    """Return theory's exponent of every observable at every step.

    Args:
        aligned: Whether the terms of a gradient's sum over heads have one sign, as they do in
            training. `False` gives exponents at initialization, where the terms are independent.
    """
    slopes = {
        ("embedding", 0): limit.embedded,
        ("query", 0): limit.q,
        ("key", 0): limit.k,
        ("attention", 0): limit.attention,
        ("variance over heads", 0): 2 * limit.spread,
        ("contribution", 0): limit.contribution,
        ("logits", 0): limit.random("readout"),
    }
    if definition.tied_readout is not None:
        # Only under a tied readout does the input token's own logit have E_t . E_t, the squared
        # norm of its embedding.
        slopes["contact logit", 0] = limit.contact
    change = _DecoderChange(limit.features, limit.d_output)
    if "encoder_layers" in definition.sizes:
        cross = limit.of("cross")
        slopes[observables.CROSS, 0] = cross.branch + cross.random("attention out", cross.v)
        change = _change_with_encoder(limit)

    embedding_moves = _embedding_moves(preset, definition, limit)
    changes = {
        "change embedding": max(embedding_moves, default=limit.step("embedding")),
        "update query": limit.dq,
        "update key": limit.dk,
        "update attention": limit.d_attention,
        "change logits": change.output,
        "change residual": change.features + limit.stream,
    }
    for name, slope in changes.items():
        for step in STEPS[1:]:
            slopes[name, step] = slope
    return slopes | groups.slopes(preset, definition.specs, limit, aligned=aligned)


def _change_with_encoder(limit: Limit) -> _DecoderChange:
    """Return exponents of the changes of a decoder whose encoder changes, too.

    Changes of the encoder reach the decoder through its cross-attention branches. These branches
    are independent of the changes, so over the layers the contributions add up like random numbers.
    """
    encoder = limit.of("encoder")
    # Independent branches add up as the root of their number, hence layers / 2.
    by_encoder = limit.branch + limit.layers / 2 - limit.stream + encoder.features
    return _DecoderChange(max(limit.features, by_encoder), max(limit.d_output, encoder.d_output))


@functools.cache
def _allowances(study: str, *, explodes: bool, tied: bool) -> dict[str, tuple[float, float]]:
    """Return how far slopes may lie (below, above) their exponents, by name from `allowance`.

    These are the measured effects of finite size. The result is empty for an optimizer and size
    that were not measured.

    Args:
        study: Optimizer family and grown size, such as "adam head_dim".
        explodes: Whether something explodes under the preset. Allowances that were measured under
            such presets are used then, if there are any.
        tied: Whether the readout shares the embedding's table.
    """
    studies = json.loads(ALLOWANCES.read_text())["allowances"]
    if explodes and study + NO_LIMIT in studies:
        study += NO_LIMIT
    allowances = dict(studies.get(study, {}))
    if tied:
        allowances |= studies.get(study + TIED, {})
    return allowances
