"""Theory of single parameters: labels for reports, and exponents of size, movement and gradient.

An observable of a parameter is "kind/label", such as "movement/block.mlp_in/gate". The label is the
parameter's group (`ParamSpec.group`). If the group has several parameters, the label also has the
words of the name that tell them apart, because a root mean square over a SwiGLU's gate and up
projection together would hide the gate.
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
"""Map from (kind of observable, step) to the column of a preset's table that sets its value."""
ROUNDING = 1e-4
"""Ratio to the median gradient below which a gradient counts as float32 rounding error.

The largest ratio of a rounding error that was seen is 3e-7.
"""
QUERY_GAIN = "block.query.norm_gain"
"""Label of the gain with which a QK-norm scales queries."""


def labels(specs: Mapping[str, ParamSpec]) -> dict[str, str]:
    """Return the label of every parameter, such as "block.query" or "block.mlp_in/gate"."""
    members: dict[str, list[str]] = {}
    for name, spec in specs.items():
        members.setdefault(spec.group, []).append(name)

    label_of = {}
    for group, names in members.items():
        for name in names:
            label_of[name] = group if len(names) == 1 else f"{group}/{_part(name, names)}"
    return label_of


def _part(name: str, names: Collection[str]) -> str:
    """Return the words of a dotted name that some of `names` lack, joined by dots."""
    word_sets = []
    for member in names:
        word_sets.append(set(member.split(".")))
    common_words = set.intersection(*word_sets)
    return ".".join(word for word in name.split(".") if word not in common_words)


def slopes(
    preset: Preset, specs: Mapping[str, ParamSpec], limit: Limit, *, aligned: bool = True
) -> dict[tuple[str, int], float]:
    """Return theory's exponents for every parameter, by (observable, step).

    A quantity with exponent x grows as t^x, where t is the size that grows. For each parameter
    there are up to three: its initial size ("weight/LABEL", 0), its first step ("movement/LABEL",
    1), and the ratio of its gradient to the optimizer's eps ("gradient/LABEL", 0). Observables that
    the theory does not cover are left out.

    Args:
        limit: Limit in which t grows, with the optimizer's family.
        aligned: Whether the terms of sums over heads have one sign, as they do in training. `False`
            gives the exponents at initialization, where the terms are independent.
    """
    exponents: dict[tuple[str, int], float] = {}
    has_key_norm = _has_norm_of(Role.KEY, specs)

    for name, label in labels(specs).items():
        spec = specs[name]
        # Such a bias is updated by expert loads and not by a gradient, so no rule of the preset
        # sets its step.
        if spec.moved_by_loads:
            continue
        row = preset.row(spec)
        # Biases start at exactly zero, which has no log-log slope.
        if spec.role not in BIASES:
            exponents[f"weight/{label}", 0] = limit.x(row.multiplier * row.init_std)

        gradient_exponent = gradient(spec, limit, preset, aligned=aligned)
        if spec.role is Role.BIAS and spec.of is Role.KEY and has_key_norm:
            # Softmax ignores a term that is the same for all keys. A norm of the keys makes this
            # bias act differently on each key, and that effect has no single exponent.
            gradient_exponent = None

        movement = _movement(spec, limit, preset, gradient_exponent)
        if movement is not None:
            exponents[f"movement/{label}", 1] = movement
        if gradient_exponent is not None:
            eps = limit.x(row.eps_of(limit.family))
            exponents[f"gradient/{label}", 0] = gradient_exponent - eps
    return exponents


def _has_norm_of(role: Role, specs: Mapping[str, ParamSpec]) -> bool:
    """Return whether the model has a QK-norm of `role`, which is `Role.QUERY` or `Role.KEY`."""
    return any(spec.role is Role.NORM_GAIN and spec.of is role for spec in specs.values())


def _movement(
    spec: ParamSpec, limit: Limit, preset: Preset, gradient_exponent: float | None
) -> float | None:
    """Return the exponent of a parameter's first step, multiplier included, or `None` if unknown.

    Under SGD it is unknown if `gradient_exponent` is `None`. Under Muon it is unknown for matrices
    that Muon orthogonalizes but the theory does not cover.

    Args:
        gradient_exponent: Exponent of the parameter's stored gradient. Only SGD's step depends on
            the gradient's size.
    """
    row = preset.row(spec)
    family = limit.family
    rate = limit.x(row.multiplier * row.lr(family))
    # Muon orthogonalizes hidden matrices only. All other parameters take Adam's step.
    matrix = limit.names.get(spec.role)

    if family == "muon" and matrix is not None and limit.orthogonal(matrix):
        return limit.of(spec.part).step(matrix)
    if family == "sgd":
        # SGD's step is the gradient times the learning rate, so its exponent is unknown if the
        # gradient's is.
        return None if gradient_exponent is None else rate + gradient_exponent
    if family == "muon" and row.muon is not None:
        return None
    return rate


def troubles(
    preset: Preset, specs: Mapping[str, ParamSpec], limit: Limit
) -> dict[tuple[str, int], Trouble]:
    """Return the faults that theory finds in a preset's table, by (observable, step).

    A fault is an initial std, learning rate or eps of a parameter whose exponent is wrong, such as
    an update that vanishes. Numbers without a fault have no entry.

    Args:
        limit: Limit in which the table is judged.
    """
    health = Health(preset, limit, lambda spec, lim: gradient(spec, lim, preset))
    row_troubles = health.troubles(specs.values())

    by_observable = {}
    for name, label in labels(specs).items():
        for (kind, step), column in COLUMNS.items():
            row_column = (specs[name].group, column)
            if row_column in row_troubles:
                by_observable[f"{kind}/{label}", step] = row_troubles[row_column]
    return by_observable


def at_base(
    preset: Preset, specs: Mapping[str, ParamSpec], sizes: Mapping[str, int], optimizer: str
) -> dict[tuple[str, int], float]:
    """Return the values that a preset predicts for a model of these sizes, by (observable, step).

    A check compares them with measurements of its smallest model, which is the preset's base. The
    step is 0 for initialization and 1 for the first optimizer step. For each parameter, with its
    label from `labels`, the result has:

    * ("weight/LABEL", 0): initial size of its entries, multiplier included.
    * ("movement/LABEL", 1): size of its first step, multiplier included, divided by the peak
      learning rate, for optimizers whose steps are as large as the rate (Adam and Lion).
    * ("gradient/LABEL", 0): factor on eps.

    It also has ("attention", 0), the initial std of attention logits, unless the model has no
    attention or the preset starts keys as queries. If a preset has a number per layer, the median
    over layers is used.

    Args:
        sizes: Size of every logical axis of the model.
    """
    numbers: dict[tuple[str, int], float] = {}
    output_stds: dict[Role, float] = {}
    for name, label in labels(specs).items():
        spec = specs[name]
        scales = preset.scales(spec, sizes, optimizer)
        multiplier = _of_middle_layer(scales.multiplier)
        std = _of_middle_layer(scales.init_std)

        if not spec.part:
            fan_in = math.prod(sizes[axis] for axis in spec.fan_in)
            # Std of one output for inputs of unit variance, a sum over fan_in independent terms.
            output_stds[spec.role] = multiplier * std * fan_in**0.5
        numbers[f"weight/{label}", 0] = multiplier * std
        numbers[f"movement/{label}", 1] = multiplier * _of_middle_layer(scales.lr)
        numbers[f"gradient/{label}", 0] = _of_middle_layer(scales.eps)

    has_attention = Role.QUERY in output_stds and Role.KEY in output_stds
    # If keys start as queries, a token's logit with itself is a sum of squares, and this product of
    # independent stds does not hold.
    if has_attention and not preset.key_as_query:
        is_normed = _has_norm_of(Role.QUERY, specs)
        # A QK-norm makes entries of unit size, whatever the matrices are.
        entries = 1.0 if is_normed else output_stds[Role.QUERY] * output_stds[Role.KEY]
        numbers["attention", 0] = entries * preset.logit_scale(sizes) * sizes["head_dim"] ** 0.5
    return numbers


def _of_middle_layer(scale: Number) -> float:
    """Return the median of a tuple with a number per layer, or a single number unchanged."""
    return statistics.median(scale) if isinstance(scale, tuple) else scale


def wrong_base(
    preset: Preset, specs: Mapping[str, ParamSpec], sizes: Mapping[str, int], optimizer: str
) -> dict[tuple[str, int], float]:
    """Return the factors by which a preset's numbers are wrong because its base is another model.

    A factor is the number under the preset's own base, divided by the number with `sizes` as base.
    Keys are (observable, step) as for `at_base`. Numbers that agree to 1 % are left out. The result
    is empty for a preset without a base or with the right one.

    Args:
        sizes: Size of every logical axis of the smallest model of a check, which should be the
            base.
    """
    if preset.base is None:
        return {}
    # A base may name axes that this model lacks, such as experts; they change nothing here.
    model_base = {}
    for axis in preset.base:
        if axis in sizes:
            model_base[axis] = sizes[axis]
    if model_base == preset.base:
        return {}

    right_preset = dataclasses.replace(preset, base=model_base)
    numbers = at_base(preset, specs, sizes, optimizer)
    right_numbers = at_base(right_preset, specs, sizes, optimizer)
    ratios = {}
    for key, number in numbers.items():
        # Even under the right base these numbers are not 1 (an initial std is often fan_in^-1/2),
        # so ratios are judged.
        right_number = right_numbers[key]
        if right_number and abs(number / right_number - 1) > 0.01:
            ratios[key] = number / right_number
    return ratios


def not_judged(
    specs: Mapping[str, ParamSpec], expected: Collection[tuple[str, int]]
) -> tuple[str, ...]:
    """Return the names of the parameters' observables for which theory has no exponent.

    Initial sizes of biases are left out, because biases start at zero.

    Args:
        expected: (observable, step) pairs for which theory has an exponent.
    """
    names = []
    for name, label in labels(specs).items():
        for kind, step in COLUMNS:
            is_bias_start = kind == "weight" and specs[name].role in BIASES
            if (f"{kind}/{label}", step) not in expected and not is_bias_start:
                names.append(f"{kind}/{label}")
    return tuple(names)


def without_rounding(measured: dict[str, np.ndarray], specs: Mapping[str, ParamSpec]) -> None:
    """Delete from `measured` the gradients of shared biases that are nothing but rounding.

    A shared bias, such as one that all channels share, can be removed again by the mean of a
    LayerNorm. In theory its gradient is then exactly 0, and in float32 it is 1e-7 times that of
    other parameters. Such a gradient has no effect and no exponent to measure.

    A gradient is deleted if its largest value is below `ROUNDING` times the median of all gradients
    at step 0. Gradients that are all exactly zero stay.

    Args:
        measured: Observable to values [sizes, seeds, steps + 1]. Changed in place.
    """
    label_of = labels(specs)
    medians = []
    for name, values in measured.items():
        # Names with a comma are layer by layer.
        if name.startswith("gradient/") and "," not in name:
            medians.append(np.median(values[:, :, 0]))
    typical = float(np.median(medians)) if medians else 0.0

    for name, spec in specs.items():
        key = f"gradient/{label_of[name]}"
        if spec.shared and spec.role is Role.BIAS and key in measured:
            values = measured[key]
            # Values that are all exactly zero stay, because "frozen" is a finding.
            if values.any() and values.max() < ROUNDING * typical:
                del measured[key]


def gradient(
    spec: ParamSpec, limit: Limit, preset: Preset, *, aligned: bool = True
) -> float | None:
    """Return the exponent x of a parameter's stored gradient, which grows as t^x.

    t is the size that grows, and the loss has a gradient of order 1 with respect to the output.
    Return `None` if the theory does not cover the parameter.

    Args:
        aligned: Whether the terms of sums over heads have one sign, as they do in training. `False`
            gives the exponent at initialization, where the terms are independent.
    """
    # dL/dw = m dL/d(m w): the stored gradient has the multiplier once more.
    stored = limit.x(preset.row(spec).multiplier)
    if spec.part == "encoder" and not aligned:
        # The encoder's backward signal is a sum over the decoder's blocks. Its terms are
        # independent at initialization and get one sign in training.
        stored += limit.branch + limit.layers / 2 - limit.stream

    is_stream_gain = spec.role is Role.NORM_GAIN and spec.of not in (Role.QUERY, Role.KEY)
    if is_stream_gain and limit.tied and abs(limit.contact) > 0.01:
        # With a tied readout this gradient has a term p E_t * E_t for each token t, where E_t is
        # the token's embedding and p its softmax probability. If the token's logit grows or falls,
        # p goes to a constant and follows no power law. Measured under `sp`, as head_dim grows from
        # 64 to 512: p is 0.62, 0.91, 0.99 and 1.00, a slope of +0.22, and slopes of the gain's
        # gradient are -0.31 and -0.35 in place of -1/2.
        return None

    limit = limit.of(spec.part)
    effective = limit.effective_gradient
    matrix = "embedding" if spec.role in EMBEDDINGS else limit.names.get(spec.role)
    if matrix is not None:
        unaligned = limit.unaligned if matrix == "router" and not aligned else 0.0
        return effective[matrix] + stored + unaligned

    exponent: float | None = None
    if spec.role in VECTORS:
        exponent = _vector(spec, limit, effective, aligned)
    elif spec.shared and spec.in_block:
        # A matrix that its block applies once for each index of a growing axis, such as a Mixer's
        # MLP over patches, which acts on every channel. Each term of its gradient is as large as
        # the gradient of a matrix that reads the stream. The theory does not cover other matrices.
        exponent = _of_stream(effective)
    if exponent is None:
        return None
    return exponent + stored + _summed(spec, limit, aligned)


def _summed(spec: ParamSpec, limit: Limit, aligned: bool) -> float:
    """Return the exponent that sharing a parameter along growing axes adds to its gradient.

    The gradient is a sum over the n indices of these axes. n terms of one sign add up to n, and
    independent terms, as at initialization, to n^1/2. On a Mixer of 64 to 512 channels this
    exponent was measured as 0.50 at initialization, 0.65 after one step, 0.82 after three and 1.03
    after ten.

    Args:
        aligned: Whether the n terms have one sign, as they do in training.
    """
    shared = sum(limit.growth.get(axis, 0.0) for axis in spec.shared)
    # Independent gradients add up as the root of their number.
    return shared if aligned else shared / 2


def _of_stream(effective: Mapping[str, float]) -> float:
    """Return the exponent of the gradient of a matrix that reads the residual stream.

    The entries of its inputs are Theta(1).

    Args:
        effective: Exponents of gradients with respect to weights times multipliers, by the matrix's
            name in `Limit`.
    """
    return max(effective["value"], effective["MLP in"], effective.get("shared in", -math.inf))


def _vector(
    spec: ParamSpec, limit: Limit, effective: Mapping[str, float], aligned: bool
) -> float | None:
    """Return the exponent x of the gradient of a gain or bias, which grows as t^x.

    t is the size that grows. The exponent follows from that of the matrix that reads the vector's
    output or makes its input, with inputs of entries Theta(1). Return `None` if the theory does not
    cover the parameter.

    Args:
        spec: Parameter, one of `VECTORS`.
        limit: Limit of the table, for the part of the model that has the parameter.
        effective: Exponents of gradients with respect to weights times multipliers, by the matrix's
            name in `Limit`.
        aligned: Whether the terms of sums over heads have one sign, as they do in training. `False`
            gives the exponent at initialization, where the terms are independent.
    """
    if spec.role is Role.RELATIVE_BIAS:
        # The gradient of a logit is a sum over a head's values, and over the blocks that share one
        # table.
        unaligned = 0.0 if aligned else limit.aligned - limit.n / 2
        logit = effective["query"] - limit.logits - limit.k - unaligned
        over_blocks = 0.0
        if not spec.stacked:
            over_blocks = limit.layers if aligned else limit.layers / 2
        return logit + over_blocks

    if spec.role is Role.NORM_GAIN and spec.of in (Role.QUERY, Role.KEY):
        # q_n k_n times the logit's gradient, summed over the heads that share the gain.
        has_gain_per_head = bool({"heads", "kv_heads"} & set(spec.axes))
        shared = 0.0 if has_gain_per_head else limit.growth.get("heads", 0.0)
        return effective["query"] - limit.k + (shared if aligned else shared / 2)

    if not spec.in_block:
        if spec.of is Role.READOUT:
            # A readout's bias adds to the logits themselves, whose gradient is Theta(1).
            return 0.0
        return effective["embedding"] if spec.of in EMBEDDINGS else limit.weight("readout")

    if spec.of in (Role.ATTENTION_OUT, Role.MLP_OUT):
        return effective["attention out"] - limit.v
    if spec.of is Role.EXPERT_OUT:
        return effective["MLP out"] - limit.hidden
    if spec.role is Role.BIAS and spec.of in limit.names:
        return effective[limit.names[spec.of]]
    if spec.part == "cross":
        # Only queries read the norm before cross-attention.
        return effective["query"]

    experts_grow_alone = limit.growth.get("expert_dim") != limit.growth.get("embed")
    if limit.routed and (limit.active or experts_grow_alone):
        # The gradient of the norm before experts is a sum over the active experts. Its terms are
        # independent at first (measured: active^-0.47) and get one sign in training, so it has no
        # single exponent.
        return None
    return _of_stream(effective)
