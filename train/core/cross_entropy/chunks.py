"""Cross-entropy by chunks of tokens: a chunk's logits exist once, and gradients are taken with them (`mupax.train.core.loss`).

Suffixes: N tokens of a chunk, V vocabulary or classes.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mupax.train.config.metrics import TokenStatistics
from mupax.train.core.state import LossSums, count_ranks, no_sums, reads_ranks, sums_of
from mupax.zoo.collectives import all_gather, reduce_scatter
from mupax.zoo.layers.linear import ReadoutInputs


class _Chunk(NamedTuple):
    """Tokens of a chunk, or all of them with the chunks as a first dimension."""

    features: jax.Array
    reference: jax.Array | None
    """Features of the reference."""
    targets: jax.Array
    weights: jax.Array


def on_one(plan: Any, inputs: Any, with_grads: bool) -> tuple[LossSums, ReadoutInputs | None]:
    """Return the sums over all devices, and the gradients of this device's part: chunks one after the other.

    Args:
        plan: of the loss: rows of a device, the mesh axes that split the vocabulary and what is gathered, and the metrics.
        inputs: `loss.LossInputs` of this device: targets and weights [B, T] or [B].
        with_grads: whether gradients are computed, too.
    """
    chunks = math.ceil(plan.rows / plan.work.chunk)
    readout_inputs, reference = inputs.readout_inputs, inputs.reference
    readout_inputs = readout_inputs._replace(
        weight=all_gather(readout_inputs.weight, plan.scattered, 0)
    )
    if reference is not None:
        reference = reference._replace(weight=all_gather(reference.weight, plan.scattered, 0))

    def cut(x: jax.Array, *trailing: int) -> jax.Array:
        """All tokens in chunks; what fills up the last one counts nothing."""
        x = jnp.pad(
            x.reshape(plan.rows, *trailing),
            [(0, chunks * plan.work.chunk - plan.rows), *[(0, 0)] * len(trailing)],
        )
        return x.reshape(chunks, plan.work.chunk, *trailing)

    def add(
        total: tuple[LossSums, ReadoutInputs | None], chunk: _Chunk
    ) -> tuple[Any, jax.Array | None]:
        sums, grads = total
        read = readout_inputs._replace(features=chunk.features)
        start = None if reference is None else reference._replace(features=chunk.reference)
        statistics, of_chunk = _of_chunk(plan, read, start, chunk, with_grads, inputs.z_loss)
        sums = jax.tree.map(
            jnp.add, sums, sums_of(statistics, chunk.weights, plan.metrics, inputs.z_loss)
        )
        if of_chunk is None:
            return (sums, None), None
        grads = jax.tree.map(jnp.add, grads, of_chunk._replace(features=None))  # pyright: ignore[reportArgumentType]
        return (sums, grads), of_chunk.features

    width = readout_inputs.features.shape[-1]
    grads = None
    if with_grads:
        readout = readout_inputs._replace(features=None, cap=None)  # pyright: ignore[reportArgumentType]
        grads = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), readout)
    tokens = _Chunk(
        features=cut(readout_inputs.features, width),
        reference=None if reference is None else cut(reference.features, width),
        targets=cut(inputs.targets),
        weights=cut(inputs.weights),
    )
    start = (no_sums(plan.metrics, inputs.z_loss), grads)
    (sums, grads), by_chunk = jax.lax.scan(add, start, tokens)
    sums = _psum(sums, plan.summed)
    if grads is None or by_chunk is None:
        return sums, None
    features = by_chunk.reshape(-1, width)[: plan.rows].reshape(readout_inputs.features.shape)
    weight = reduce_scatter(_psum(grads.weight, plan.shared), plan.scattered, 0, layout=plan.layout)
    scale, bias = _psum((_psum(grads.scale, plan.over_vocab), grads.bias), plan.summed)
    return sums, ReadoutInputs(_psum(features, plan.over_vocab), weight, scale, bias)


def _of_chunk(
    plan: Any,
    readout_inputs: ReadoutInputs,
    reference: ReadoutInputs | None,
    chunk: _Chunk,
    with_grads: bool,
    z_loss: jax.Array | None,
) -> tuple[TokenStatistics, ReadoutInputs | None]:
    """Return the statistics of a chunk's tokens, and the gradients of this device's part of the vocabulary."""
    targets_N, weights_N = chunk.targets, chunk.weights
    own_NV = logits_NV = readout_inputs.logits(plan.layout)
    if reference is not None:
        logits_NV = logits_NV - reference.logits(plan.layout)
    columns = logits_NV.shape[1]
    offset = columns * jax.lax.axis_index(plan.over_vocab) if plan.over_vocab else 0
    column_NV = jax.lax.broadcasted_iota(jnp.int32, logits_NV.shape, 1) + offset
    label_NV = column_NV == targets_N[:, None]
    top_N = jnp.max(logits_NV, axis=1)
    top_N = jax.lax.pmax(top_N, plan.over_vocab) if plan.over_vocab else top_N
    exp_NV = jnp.exp(logits_NV - top_N[:, None])
    exp_N, label_N = _psum(
        (jnp.sum(exp_NV, axis=1), jnp.sum(jnp.where(label_NV, logits_NV, 0), axis=1)),
        plan.over_vocab,
    )
    partition_N = jnp.log(exp_N) + top_N
    # The first of the largest, as argmax has it: all logits are equal where a readout starts at zero.
    first_N = jnp.min(
        jnp.where(logits_NV == top_N[:, None], column_NV, jnp.iinfo(jnp.int32).max), axis=1
    )
    first_N = jax.lax.pmin(first_N, plan.over_vocab) if plan.over_vocab else first_N
    statistics = TokenStatistics(
        loss=partition_N - label_N, log_partition=partition_N, correct=first_N == targets_N
    )
    if reads_ranks(plan.metrics):
        rank_N = count_ranks(logits_NV, label_N, column_NV, targets_N)
        statistics = statistics._replace(counted_rank=_psum(rank_N, plan.over_vocab))
    if not with_grads:
        return statistics, None
    probability_NV = exp_NV / exp_N[:, None]
    if z_loss is not None:  # d logsumexp^2 = 2 logsumexp softmax
        probability_NV = probability_NV * (1 + 2 * z_loss * partition_N)[:, None]
    slope_NV = readout_inputs.uncapped((probability_NV - label_NV) * weights_N[:, None], own_NV)
    bias = None if readout_inputs.bias is None else jnp.sum(slope_NV, axis=0)
    slope_NV = slope_NV.astype(readout_inputs.features.dtype)
    product = functools.partial(jax.lax.dot_general, preferred_element_type=jnp.float32)
    features = product(slope_NV, readout_inputs.weight, (((1,), (1,)), ((), ())))
    weight = product(readout_inputs.features, slope_NV, (((0,), (0,)), ((), ())))
    scale = None
    if readout_inputs.scale is not None:
        scale = jnp.sum(features * readout_inputs.features)
        features, weight = readout_inputs.scale * features, readout_inputs.scale * weight
    return statistics, ReadoutInputs(
        features.astype(readout_inputs.features.dtype), weight, scale, bias
    )


def _psum(tree: Any, names: tuple[str, ...]) -> Any:
    return jax.lax.psum(tree, names) if names else tree
