"""What theory expects of single parameters, their names in a report, and what it has no word for.

An observable of weights is `what/label`. A label is the parameter's group (`ParamSpec.group`), and its own part of the name
where a group has several: the gate of a SwiGLU is not its up projection, and a root mean square over both would hide it.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Collection, Mapping

import numpy as np

from mupax.presets import EMBEDDINGS, VECTORS, ParamSpec, Preset, Role
from mupax.presets.analysis.health import Column, Health, Trouble
from mupax.presets.analysis.limits import Limit
from mupax.presets.roles import BIASES
from mupax.presets.rule import Number

COLUMNS: dict[tuple[str, int], Column] = {
    ("weight", 0): "init_std",
    ("movement", 1): "lr",
    ("gradient", 0): "eps",
}
"""What is observed of a parameter, at which step, and the column of its row that sets it."""
ROUNDING = 1e-4
"""Share of other gradients below which one is float32's rounding: the largest seen was 3e-7."""
QUERY_GAIN = "block.query.norm_gain"
"""Label of the gain of a QK-norm."""


def labels(specs: Mapping[str, ParamSpec]) -> dict[str, str]:
    """Parameter name to its label: block.query, block.mlp_in/gate."""
    members: dict[str, list[str]] = {}
    for name, spec in specs.items():
        members.setdefault(spec.group, []).append(name)
    return {
        name: group if len(names) == 1 else f"{group}/{_part(name, names)}"
        for group, names in members.items()
        for name in names
    }


def _part(name: str, names: Collection[str]) -> str:
    """The words of a dotted name that the others do not all have."""
    shared = set.intersection(*(set(each.split(".")) for each in names))
    return ".".join(word for word in name.split(".") if word not in shared)


def slopes(
    preset: Preset, specs: Mapping[str, ParamSpec], limit: Limit, *, aligned: bool = True
) -> dict[tuple[str, int], float]:
    """Exponents of initial size, movement and gradient over eps of every parameter; what theory has no word for is left out.

    Args:
        preset: the table.
        specs: of the model's parameters.
        limit: of the table.
        aligned: heads' gradients of a gain that they share have one sign, as they get in training; at initialization they have not.
    """
    exponents: dict[tuple[str, int], float] = {}
    normed = any(spec.role is Role.NORM_GAIN and spec.of is Role.KEY for spec in specs.values())
    for name, label in labels(specs).items():
        spec = specs[name]
        if spec.moved_by_loads:
            continue
        row, family, of = preset.row(spec), limit.family, limit.names.get(spec.role)
        if spec.role not in BIASES:
            exponents[f"weight/{label}", 0] = limit.x(row.multiplier * row.init_std)
        rate, change = (
            limit.x(row.multiplier * row.lr(family)),
            gradient(spec, limit, preset, aligned=aligned),
        )
        if spec.role is Role.BIAS and spec.of is Role.KEY and normed:
            # Softmax ignores what all keys have in common, but for the norm between: what is left has the exponent of no sum.
            change = None
        if family == "muon" and of is not None and limit.orthogonal(of):
            exponents[f"movement/{label}", 1] = limit.of(spec.part).step(of)
        elif family != "sgd" and not (family == "muon" and row.muon is not None):
            exponents[f"movement/{label}", 1] = rate
        elif family == "sgd" and change is not None:
            exponents[f"movement/{label}", 1] = rate + change
        if change is not None:
            exponents[f"gradient/{label}", 0] = change - limit.x(row.eps_of(family))
    return exponents


def troubles(
    preset: Preset, specs: Mapping[str, ParamSpec], limit: Limit
) -> dict[tuple[str, int], Trouble]:
    """(observable, step) of a parameter to what is wrong with the column of its row that sets it.

    Args:
        preset: the table.
        specs: of the model's parameters.
        limit: which sizes grow, under which optimizer.
    """
    health = Health(preset, limit, lambda spec, of: gradient(spec, of, preset))
    wrong = health.troubles(specs.values())
    return {
        (f"{what}/{label}", step): wrong[specs[name].group, column]
        for name, label in labels(specs).items()
        for (what, step), column in COLUMNS.items()
        if (specs[name].group, column) in wrong
    }


def at_base(
    preset: Preset, specs: Mapping[str, ParamSpec], sizes: Mapping[str, int], optimizer: str
) -> dict[tuple[str, int], float]:
    """What the table gives these sizes: a weight's initial size, its first step over the peak rate, eps, and attention logits.

    Args:
        preset: the table.
        specs: of the model's parameters.
        sizes: of the model.
        optimizer: whose rates.
    """
    numbers: dict[tuple[str, int], float] = {}
    stds: dict[Role, float] = {}
    for name, label in labels(specs).items():
        scales = preset.scales(specs[name], sizes, optimizer)
        multiplier, std = _of_middle_layer(scales.multiplier), _of_middle_layer(scales.init_std)
        lr, eps = _of_middle_layer(scales.lr), _of_middle_layer(scales.eps)
        if not specs[name].part:
            stds[specs[name].role] = (
                multiplier * std * math.prod(sizes[axis] for axis in specs[name].fan_in) ** 0.5
            )
        numbers[f"weight/{label}", 0] = multiplier * std
        numbers[f"movement/{label}", 1] = multiplier * lr
        numbers[f"gradient/{label}", 0] = eps
    if Role.QUERY in stds and Role.KEY in stds and not preset.key_as_query:
        normed = any(
            spec.role is Role.NORM_GAIN and spec.of is Role.QUERY for spec in specs.values()
        )
        entries = 1.0 if normed else stds[Role.QUERY] * stds[Role.KEY]
        numbers["attention", 0] = entries * preset.logit_scale(sizes) * sizes["head_dim"] ** 0.5
    return numbers


def _of_middle_layer(scale: Number) -> float:
    """Return the median of numbers per layer, which only measured presets have, or the one number of all."""
    return statistics.median(scale) if isinstance(scale, tuple) else scale


def wrong_base(
    preset: Preset, specs: Mapping[str, ParamSpec], sizes: Mapping[str, int], optimizer: str
) -> dict[tuple[str, int], float]:
    """Where a table relative to a base is not what it is at the base, on the model that should be it: how many times too large.

    Arguments as `at_base`; the sizes are those of the smallest model.

    Args:
        preset, specs, optimizer: as in `at_base`.
        sizes: of the smallest model.
    """
    if preset.base is None:
        return {}
    own_base = {axis: sizes[axis] for axis in preset.base if axis in sizes}
    if own_base == preset.base:
        return {}
    there = dataclasses.replace(preset, base=own_base)
    numbers, right = (at_base(one, specs, sizes, optimizer) for one in (preset, there))
    # Multipliers and stds at the base are fan-ins of the base: what must be 1 is the ratio.
    return {
        key: x / right[key]
        for key, x in numbers.items()
        if right[key] and abs(x / right[key] - 1) > 0.01
    }


def not_judged(
    specs: Mapping[str, ParamSpec], expected: Collection[tuple[str, int]]
) -> tuple[str, ...]:
    """The observables of parameters that theory says nothing about; a bias starts at zero whatever its std.

    Args:
        specs: of the model's parameters.
        expected: the (observable, step) that theory speaks of.
    """
    return tuple(
        f"{what}/{label}"
        for name, label in labels(specs).items()
        for (what, step) in COLUMNS
        if (f"{what}/{label}", step) not in expected
        and not (what == "weight" and specs[name].role in BIASES)
    )


def without_rounding(measured: dict[str, np.ndarray], specs: Mapping[str, ParamSpec]) -> None:
    """Leave out gradients of shared biases that are nothing but rounding.

    A bias that all channels share is taken away by a LayerNorm's mean, so that its gradient is exactly 0 in theory, and
    1e-7 of others' when it is computed. Its steps are of no consequence, and there is no exponent to judge.

    Args:
        measured: observable to its values, changed in place.
        specs: of the model's parameters.
    """
    names = labels(specs)
    gradients = [
        x[:, :, 0]
        for name, x in measured.items()
        if name.startswith("gradient/") and "," not in name
    ]
    typical = float(np.median([np.median(x) for x in gradients])) if gradients else 0.0
    for name, spec in specs.items():
        key = f"gradient/{names[name]}"
        if spec.shared and spec.role is Role.BIAS and key in measured:
            values = measured[key]
            if values.any() and values.max() < ROUNDING * typical:
                del measured[key]


def gradient(
    spec: ParamSpec, limit: Limit, preset: Preset, *, aligned: bool = True
) -> float | None:
    """Exponent of a parameter's gradient as stored, at unit gradient of the output; None where theory has no word for it.

    Args:
        spec: of the parameter.
        limit: which sizes grow.
        preset: the table.
        aligned: after some steps; at initialization the heads that share a gain add up as independent terms do.
    """
    own = limit.x(preset.row(spec).multiplier)
    if spec.part == "encoder" and not aligned:
        # Its signal is a sum over the decoder's blocks, of branches that are independent at first (and add up in concert later).
        own += limit.branch + limit.layers / 2 - limit.stream
    if (
        spec.role is Role.NORM_GAIN
        and spec.of not in (Role.QUERY, Role.KEY)
        and limit.tied
        and abs(limit.contact) > 0.01
    ):
        # Summed over tokens in concert as far as softmax believes the input token: p E_t . E_t, a sum of squares. Where its
        # logit grows or falls p goes to a constant as no power law does: 0.62, 0.91, 0.99, 1.00 under `sp` growing head_dim
        # from 64 to 512, a slope of +0.22, and the gain's gradient has -0.31 and -0.35 in place of -1/2.
        return None
    limit = limit.of(spec.part)
    of = "embedding" if spec.role in EMBEDDINGS else limit.names.get(spec.role)
    effective = limit.effective_gradient
    if of is not None:
        return effective[of] + own + (limit.unaligned if of == "router" and not aligned else 0.0)
    if spec.role in VECTORS:
        vector = _vector(spec, limit, effective, aligned)
    else:
        # A matrix of a block that is applied along a growing axis, as a Mixer's MLP over patches is to every channel: its
        # sums have terms of the size of other entries' gradients. Of other matrices theory has no word.
        vector = _of_stream(limit, effective) if spec.shared and spec.in_block else None
    return None if vector is None else vector + own + _summed(spec, limit, aligned)


def _summed(spec: ParamSpec, limit: Limit, aligned: bool) -> float:
    """Return what the axes along which a parameter is shared add: n gradients in concert, and n^1/2 at initialization.

    Measured on a Mixer of 64 to 512 channels: 0.50 at initialization, 0.65 after a step, 0.82 after three, 1.03 after ten.
    """
    shared = sum(limit.growth.get(axis, 0.0) for axis in spec.shared)
    return shared if aligned else shared / 2


def _of_stream(limit: Limit, effective: Mapping[str, float]) -> float:
    """Return the exponent of the gradient of what the stream reads or is read by, at an input of entries Theta(1)."""
    return max(effective["value"], effective["MLP in"], effective.get("shared in", -math.inf))


def _vector(
    spec: ParamSpec, limit: Limit, effective: Mapping[str, float], aligned: bool
) -> float | None:
    """The same of a gain or bias: that of the matrix beside it, whose input has entries Theta(1)."""
    if spec.role is Role.RELATIVE_BIAS:
        # That of a logit: a sum over a head's values, and over the blocks that share a table.
        of_logit = (
            effective["query"]
            - limit.logits
            - limit.k
            - (0.0 if aligned else limit.aligned - limit.n / 2)
        )
        return of_logit + (0.0 if spec.stacked else limit.layers if aligned else limit.layers / 2)
    if spec.role is Role.NORM_GAIN and spec.of in (Role.QUERY, Role.KEY):
        # q_n k_n times the logit's gradient, a sum over the heads that share the gain.
        shared = 0.0 if {"heads", "kv_heads"} & set(spec.axes) else limit.growth.get("heads", 0.0)
        return effective["query"] - limit.k + (shared if aligned else shared / 2)
    if not spec.in_block:
        if spec.of is Role.READOUT:
            return 0.0
        return effective["embedding"] if spec.of in EMBEDDINGS else limit.weight("readout")
    if spec.of in (Role.ATTENTION_OUT, Role.MLP_OUT):
        return effective["attention out"] - limit.v
    if spec.of is Role.EXPERT_OUT:
        return effective["MLP out"] - limit.hidden
    if spec.role is Role.BIAS and spec.of in limit.names:
        return effective[limit.names[spec.of]]
    if spec.part == "cross":  # the norm that queries alone read
        return effective["query"]
    if limit.routed and (
        limit.active or limit.growth.get("expert_dim") != limit.growth.get("embed")
    ):
        return None  # of the norm before experts: a sum over them that is independent at first (measured, a^-0.47) and aligned later
    return _of_stream(limit, effective)
