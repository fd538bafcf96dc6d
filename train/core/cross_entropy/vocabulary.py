"""Cross-entropy by parts of the vocabulary, where the readout is large and split over devices: a part is gathered at a time.

The other way to cut what `mupax.train.core.loss` computes; suffixes are those there. Each part's gradient is complete, so
that it is summed and scattered beside the next part's products, and none is ever added to in memory. Between the two
passes over the parts exp(logit - largest of the part) is kept in the type of products, to which the slope is rounded
before its products in any case: no logit is computed twice, and the sums are taken before rounding. It is so of as many parts
as there is room for (`costs.losses`); logits of the others are computed again.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mupax.train.config.metrics import TokenStatistics
from mupax.train.core.state import LossSums, count_ranks, reads_ranks, sums_of
from mupax.zoo.collectives import all_gather, reduce_scatter
from mupax.zoo.layers.linear import ReadoutInputs


class _Part(NamedTuple):
    """Logits of a part of the vocabulary."""

    logits_NV: jax.Array
    """Less those of the reference, float32."""
    own_NV: jax.Array
    """The model's own, float32."""
    weight_DV: jax.Array
    """Part of the readout that they are of."""


def on_one(plan: Any, inputs: Any, with_grads: bool) -> tuple[LossSums, ReadoutInputs | None]:
    """Return the sums over all devices, and the gradients of this device's part, as `chunks.on_one`.

    Args:
        plan: of the loss: rows of a device, the mesh axes that split the vocabulary and what is gathered, and the metrics.
        inputs: `loss.LossInputs` of this device: targets and weights [B, T] or [B].
        with_grads: whether gradients are computed, too.
    """
    readout_inputs, reference, z_loss = inputs.readout_inputs, inputs.reference, inputs.z_loss
    features_ND = readout_inputs.features.reshape(plan.rows, -1)
    targets_N = inputs.targets.reshape(-1)
    weights_N = inputs.weights.reshape(-1)
    columns = readout_inputs.weight.shape[1]
    offset = columns * jax.lax.axis_index(plan.over_vocab) if plan.over_vocab else 0
    cuts = plan.work.parts

    def several(reduced: Any, x: Any) -> Any:
        return reduced(x, plan.over_vocab) if plan.over_vocab else x

    def part(of: ReadoutInputs, cut: slice, after: jax.Array | None = None) -> ReadoutInputs:
        """Return the readout of a part of the vocabulary; with `after` it is gathered again, once that exists."""
        weight_DV = of.weight[:, cut]
        if after is not None:
            weight_DV, _ = jax.lax.optimization_barrier((weight_DV, after))
        weight_DV = all_gather(weight_DV, plan.scattered, 0)
        bias_V = None if of.bias is None else of.bias[cut]
        x_ND = features_ND if of is readout_inputs else of.features.reshape(plan.rows, -1)
        return ReadoutInputs(x_ND, weight_DV, of.scale, bias_V, cap=of.cap)

    def read_part(cut: slice, after: jax.Array | None = None) -> _Part:
        read = part(readout_inputs, cut, after)
        own_NV = logits_NV = read.logits(plan.layout)
        if reference is not None:
            logits_NV = logits_NV - part(reference, cut, after).logits(plan.layout)
        return _Part(logits_NV, own_NV, read.weight)

    def column(cut: slice) -> jax.Array:
        return offset + cut.start + jnp.arange(cut.stop - cut.start)

    def label(cut: slice) -> jax.Array:
        return column(cut) == targets_N[:, None]

    tops, exp_sums, labels, befores, exps = [], [], [], [], []
    for cut in cuts:
        if tops:  # one after the other
            recent = (exp_sums, labels, befores, *([exps] if len(exps) == len(tops) else []))
            features_ND, *done = jax.lax.optimization_barrier(
                (features_ND, *(each[-1] for each in recent))
            )
            for each, x in zip(recent, done, strict=True):
                each[-1] = x
        logits_NV = read_part(cut).logits_NV
        top_N = jnp.max(logits_NV, axis=1)
        exp_NV = jnp.exp(logits_NV - top_N[:, None])
        tops.append(top_N)
        exp_sums.append(jnp.sum(exp_NV, axis=1))
        labels.append(jnp.sum(jnp.where(label(cut), logits_NV, 0), axis=1))
        # How many as large are before the target, which then is not the first of the largest, as argmax has it: a sum like
        # the others is taken with them, where an argmax reads all logits again.
        before_NV = (logits_NV == top_N[:, None]) & (column(cut) < targets_N[:, None])
        befores.append(jnp.sum(before_NV.astype(jnp.float32), axis=1))
        if len(exps) < plan.exp_parts:
            exps.append(exp_NV.astype(features_ND.dtype))
    top_N = several(jax.lax.pmax, functools.reduce(jnp.maximum, tops))
    shares = [jnp.exp(top - top_N) for top in tops]
    exp_N, label_N = several(
        jax.lax.psum, (sum(s * e for s, e in zip(shares, exp_sums, strict=True)), sum(labels))
    )
    earlier_N = sum(
        jnp.where(top == top_N, before, 0) for top, before in zip(tops, befores, strict=True)
    )
    hit_N = (label_N == top_N) & (several(jax.lax.psum, earlier_N) == 0)
    partition_N = jnp.log(exp_N) + top_N
    statistics = TokenStatistics(
        loss=partition_N - label_N, log_partition=partition_N, correct=hit_N
    )
    if reads_ranks(plan.metrics):
        # The target's logit is known after all parts alone, so that logits are computed once more, as for gradients.
        rank_N = jnp.zeros(targets_N.shape, jnp.int32)
        after_N = label_N
        for cut in cuts:  # one after the other, so that logits of one part exist at a time
            logits_NV = read_part(cut, after_N).logits_NV
            rank_N += count_ranks(logits_NV, label_N, column(cut), targets_N)
            after_N = rank_N
        statistics = statistics._replace(counted_rank=several(jax.lax.psum, rank_N))
    sums = sums_of(statistics, weights_N, plan.metrics, z_loss)
    sums = jax.lax.psum(sums, plan.summed) if plan.summed else sums
    if not with_grads:
        return sums, None
    product = functools.partial(jax.lax.dot_general, preferred_element_type=jnp.float32)
    back_ND, rows, biases, slope_NV = jnp.zeros(features_ND.shape, jnp.float32), [], [], top_N
    for cut, exp_NV, share_N in itertools.zip_longest(cuts, exps, shares):
        if len(rows) > 1:  # no more than two gradients are on their way
            features_ND, rows[-2] = jax.lax.optimization_barrier((features_ND, rows[-2]))
        own_NV = weight_DV = None
        if exp_NV is None:
            again = read_part(cut, slope_NV)
            own_NV = again.own_NV
            weight_DV = again.weight_DV
            probability_NV = jnp.exp(again.logits_NV - top_N[:, None]) / exp_N[:, None]
        else:
            probability_NV = exp_NV.astype(jnp.float32) * (share_N / exp_N)[:, None]
        if z_loss is not None:  # d logsumexp^2 = 2 logsumexp softmax
            probability_NV = probability_NV * (1 + 2 * z_loss * partition_N)[:, None]
        slope_NV = probability_NV - label(cut)
        slope_NV = slope_NV * weights_N[:, None]
        slope_NV = (
            slope_NV if own_NV is None else readout_inputs.uncapped(slope_NV, own_NV)
        )  # no exponentials of capped ones are kept
        bias = [] if readout_inputs.bias is None else [jnp.sum(slope_NV, axis=0)]
        slope_NV = jax.lax.optimization_barrier(slope_NV.astype(features_ND.dtype))
        weight_DV = part(readout_inputs, cut, slope_NV).weight if weight_DV is None else weight_DV
        back_ND += product(slope_NV, weight_DV, (((1,), (1,)), ((), ())))
        row_DV = product(features_ND, slope_NV, (((0,), (0,)), ((), ())))
        # One part after the other: else the compiler adds up at the end, with every part's slope and product in memory.
        done = back_ND, row_DV, features_ND, exp_N, *bias
        back_ND, row_DV, features_ND, exp_N, *bias = jax.lax.optimization_barrier(done)
        biases += bias
        row_DV = jax.lax.psum(row_DV, plan.shared) if plan.shared else row_DV
        rows.append(reduce_scatter(row_DV, plan.scattered, 0, layout=plan.layout))
    # Before the layers: else the compiler takes the last products and sums with it through their loop, with what they are of.
    back_ND, *rows = jax.lax.optimization_barrier((back_ND, *rows))
    back_ND, weight_DV = several(jax.lax.psum, back_ND), jnp.concatenate(rows, axis=1)
    scale, bias = None, None
    if readout_inputs.bias is not None:
        bias = (
            jax.lax.psum(jnp.concatenate(biases), plan.summed)
            if plan.summed
            else jnp.concatenate(biases)
        )
    if readout_inputs.scale is not None:
        scale = jnp.sum(back_ND * features_ND)
        scale = jax.lax.psum(scale, plan.summed) if plan.summed else scale
        back_ND, weight_DV = readout_inputs.scale * back_ND, readout_inputs.scale * weight_DV
    features = back_ND.astype(features_ND.dtype).reshape(readout_inputs.features.shape)
    return sums, ReadoutInputs(features, weight_DV, scale, bias)
