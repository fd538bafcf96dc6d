"""Cross-entropy by chunks of tokens: a chunk's logits exist once, and gradients are taken with them (`mupax.train.core.loss`).

Suffixes: N tokens of a chunk, V vocabulary or classes.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from mupax.zoo.collectives import all_gather, reduce_scatter
from mupax.zoo.layers.linear import Reading

Sums = tuple[jax.Array, ...]
"""Loss, number correct and number of targets, and with a z-loss what that is of, float32 []."""


def on_one(
    plan: Any,
    reading: Reading,
    reference: Reading | None,
    targets: jax.Array,
    weights: jax.Array,
    with_grads: bool,
    z_loss: jax.Array | None = None,
) -> tuple[Sums, Reading | None]:
    """Loss, number correct and of targets, and gradients of this device's part: chunks one after the other, then sums over devices.

    Args:
        plan: of the loss: rows of a device, and the mesh axes that split the vocabulary and what is gathered.
        reading: features and readout, parts.
        reference: of the centred model, where there is one.
        targets, weights: of this device's examples, [B, T] or [B].
        with_grads: whether gradients are wanted, too.
        z_loss: weight of the squared log-partition in the loss; with one its sum, before the weight, is a fourth number.
    """
    chunks = math.ceil(plan.rows / plan.work.chunk)
    reading = reading._replace(weight=all_gather(reading.weight, plan.scattered, 0))
    if reference is not None:
        reference = reference._replace(weight=all_gather(reference.weight, plan.scattered, 0))

    def cut(x: jax.Array, *trailing: int) -> jax.Array:
        """All tokens in chunks; what fills up the last one counts nothing."""
        x = jnp.pad(
            x.reshape(plan.rows, *trailing), [(0, chunks * plan.work.chunk - plan.rows), *[(0, 0)] * len(trailing)]
        )
        return x.reshape(chunks, plan.work.chunk, *trailing)

    def add(total: tuple[Sums, Reading | None], part: tuple[Any, ...]) -> tuple[Any, jax.Array | None]:
        features, fixed, labels, counts = part
        start = None if reference is None else reference._replace(features=fixed)
        sums, grads = _of_chunk(plan, reading._replace(features=features), start, labels, counts, with_grads, z_loss)
        if grads is None:
            return jax.tree.map(jnp.add, total, (sums, None)), None
        return jax.tree.map(jnp.add, total, (sums, grads._replace(features=None))), grads.features  # pyright: ignore

    width, zero = reading.features.shape[-1], jnp.float32(0)
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), reading._replace(features=None, cap=None))  # pyright: ignore
    total = ((zero,) * (3 if z_loss is None else 4), nothing if with_grads else None)
    fixed = None if reference is None else cut(reference.features, width)
    (sums, total_grads), by_chunk = jax.lax.scan(
        add, total, (cut(reading.features, width), fixed, cut(targets), cut(weights))
    )
    sums = _psum(sums, plan.summed)
    if by_chunk is None:
        return sums, None
    features = by_chunk.reshape(-1, width)[: plan.rows].reshape(reading.features.shape)
    weight = reduce_scatter(_psum(total_grads.weight, plan.shared), plan.scattered, 0)
    scale, bias = _psum((_psum(total_grads.scale, plan.over_vocab), total_grads.bias), plan.summed)
    return sums, Reading(_psum(features, plan.over_vocab), weight, scale, bias)


def _of_chunk(
    plan: Any,
    reading: Reading,
    reference: Reading | None,
    targets_N: jax.Array,
    weights_N: jax.Array,
    with_grads: bool,
    z_loss: jax.Array | None,
) -> tuple[Sums, Reading | None]:
    """The same of one chunk; gradients are those of this device's part of the vocabulary."""
    own_NV = logits_NV = reading.logits()
    if reference is not None:
        logits_NV = logits_NV - reference.logits()
    columns = logits_NV.shape[1]
    offset = columns * jax.lax.axis_index(plan.over_vocab) if plan.over_vocab else 0
    column_NV = jax.lax.broadcasted_iota(jnp.int32, logits_NV.shape, 1) + offset
    label_NV = column_NV == targets_N[:, None]
    top_N = jnp.max(logits_NV, axis=1)
    top_N = jax.lax.pmax(top_N, plan.over_vocab) if plan.over_vocab else top_N
    exp_NV = jnp.exp(logits_NV - top_N[:, None])
    exp_N, label_N = _psum(
        (jnp.sum(exp_NV, axis=1), jnp.sum(jnp.where(label_NV, logits_NV, 0), axis=1)), plan.over_vocab
    )
    partition_N = jnp.log(exp_N) + top_N
    nll_N = partition_N - label_N
    # The first of the largest, as argmax has it: all logits are equal where a readout starts at zero.
    first_N = jnp.min(jnp.where(logits_NV == top_N[:, None], column_NV, jnp.iinfo(jnp.int32).max), axis=1)
    first_N = jax.lax.pmin(first_N, plan.over_vocab) if plan.over_vocab else first_N
    sums = jnp.sum(nll_N * weights_N), jnp.sum((first_N == targets_N) * weights_N), jnp.sum(weights_N)
    if z_loss is not None:
        z = jnp.sum(jnp.square(partition_N) * weights_N)
        sums = sums[0] + z_loss * z, *sums[1:], z
    if not with_grads:
        return sums, None
    probability_NV = exp_NV / exp_N[:, None]
    if z_loss is not None:  # d logsumexp^2 = 2 logsumexp softmax
        probability_NV = probability_NV * (1 + 2 * z_loss * partition_N)[:, None]
    slope_NV = reading.uncapped((probability_NV - label_NV) * weights_N[:, None], own_NV)
    bias = None if reading.bias is None else jnp.sum(slope_NV, axis=0)
    slope_NV = slope_NV.astype(reading.features.dtype)
    product = functools.partial(jax.lax.dot_general, preferred_element_type=jnp.float32)
    features = product(slope_NV, reading.weight, (((1,), (1,)), ((), ())))
    weight = product(reading.features, slope_NV, (((0,), (0,)), ((), ())))
    scale = None
    if reading.scale is not None:
        scale = jnp.sum(features * reading.features)
        features, weight = reading.scale * features, reading.scale * weight
    return sums, Reading(features.astype(reading.features.dtype), weight, scale, bias)


def _psum(tree: Any, names: tuple[str, ...]) -> Any:
    return jax.lax.psum(tree, names) if names else tree
