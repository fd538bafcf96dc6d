"""Cross-entropy by chunks of tokens, on one device (`chunked` in `mupax.train.core.loss`).

Shapes: N tokens of a chunk, D width, V vocabulary or classes of this device.
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
    """Arrays of the tokens of one chunk, or of all chunks with the chunks as first dimension."""

    features: jax.Array
    reference: jax.Array | None
    """Features of the initial model, whose logits are subtracted if the output is centred.

    `None` if the output is not centred.
    """
    targets: jax.Array
    weights: jax.Array


def loss_on_device(
    plan: Any, inputs: Any, with_grads: bool
) -> tuple[LossSums, ReadoutInputs | None]:
    """Return the loss sums over all devices, and gradients of this device's readout inputs.

    Chunks of tokens run one after another. The gradients are those of features, weight, scale and
    bias, and `None` without `with_grads`. They are complete: already summed over the devices, for
    this device's tokens and its part of the readout. Call this inside `shard_map` if the plan names
    mesh axes.

    Args:
        plan: `loss.LossPlan`, the distribution of the loss over devices.
        inputs: `loss.LossInputs` of this device, with targets and weights [B, T] or [B].
    """
    absent: Any = None
    width = inputs.readout_inputs.features.shape[-1]
    chunk_size = plan.shape.chunk
    num_chunks = math.ceil(plan.rows / chunk_size)

    readout_inputs = inputs.readout_inputs
    weight = all_gather(readout_inputs.weight, plan.scatter_mesh_axes, 0)
    readout_inputs = readout_inputs._replace(weight=weight)
    reference = inputs.reference
    if reference is not None:
        reference_weight = all_gather(reference.weight, plan.scatter_mesh_axes, 0)
        reference = reference._replace(weight=reference_weight)

    def split(array: jax.Array, *trailing: int) -> jax.Array:
        # The last chunk is padded with zeros: a target of weight 0 does not count.
        padding = (0, num_chunks * chunk_size - plan.rows)
        no_padding = [(0, 0)] * len(trailing)
        padded = jnp.pad(array.reshape(plan.rows, *trailing), [padding, *no_padding])
        return padded.reshape(num_chunks, chunk_size, *trailing)

    def add_chunk(
        total: tuple[LossSums, ReadoutInputs | None], chunk: _Chunk
    ) -> tuple[Any, jax.Array | None]:
        sums, grads = total
        chunk_inputs = readout_inputs._replace(features=chunk.features)
        chunk_reference = None
        if reference is not None:
            chunk_reference = reference._replace(features=chunk.reference)
        statistics, chunk_grads = _chunk_loss(
            plan, chunk_inputs, chunk_reference, chunk, with_grads, inputs.z_loss
        )
        chunk_sums = sums_of(statistics, chunk.weights, plan.metrics, inputs.z_loss)
        sums = jax.tree.map(jnp.add, sums, chunk_sums)
        if chunk_grads is None:
            return (sums, None), None

        # Gradients of the readout are added up. Those of the features are kept chunk by chunk.
        grads = jax.tree.map(jnp.add, grads, chunk_grads._replace(features=absent))
        return (sums, grads), chunk_grads.features

    zero_grads = None
    if with_grads:
        readout = readout_inputs._replace(features=absent, cap=None)
        zero_grads = jax.tree.map(lambda array: jnp.zeros(array.shape, jnp.float32), readout)
    tokens = _Chunk(
        features=split(readout_inputs.features, width),
        reference=None if reference is None else split(reference.features, width),
        targets=split(inputs.targets),
        weights=split(inputs.weights),
    )
    zeros = (no_sums(plan.metrics, inputs.z_loss), zero_grads)
    (sums, grads), feature_grads = jax.lax.scan(add_chunk, zeros, tokens)
    sums = _psum(sums, plan.token_mesh_axes)
    if grads is None or feature_grads is None:
        return sums, None

    features = feature_grads.reshape(-1, width)[: plan.rows]
    features = features.reshape(readout_inputs.features.shape)
    weight = _psum(grads.weight, plan.reduce_mesh_axes)
    weight = reduce_scatter(weight, plan.scatter_mesh_axes, 0, layout=plan.layout)
    scale = _psum(grads.scale, plan.vocab_mesh_axes)
    scale, bias = _psum((scale, grads.bias), plan.token_mesh_axes)
    features = _psum(features, plan.vocab_mesh_axes)
    return sums, ReadoutInputs(features, weight, scale, bias)


def _chunk_loss(
    plan: Any,
    readout_inputs: ReadoutInputs,
    reference: ReadoutInputs | None,
    chunk: _Chunk,
    with_grads: bool,
    z_loss: jax.Array | None,
) -> tuple[TokenStatistics, ReadoutInputs | None]:
    """Return statistics of a chunk's tokens, and gradients of the readout inputs.

    The statistics are over the whole vocabulary, and without weights. The gradients are of the
    weighted sum of the loss, z-loss included. They are not summed over devices: they come from this
    device's part of the vocabulary only. They are `None` without `with_grads`.
    """
    targets_N = chunk.targets
    own_NV = readout_inputs.logits(plan.layout)
    logits_NV = own_NV
    if reference is not None:
        logits_NV = logits_NV - reference.logits(plan.layout)

    num_columns = logits_NV.shape[1]
    offset = 0
    if plan.vocab_mesh_axes:
        offset = num_columns * jax.lax.axis_index(plan.vocab_mesh_axes)
    column_NV = jax.lax.broadcasted_iota(jnp.int32, logits_NV.shape, 1) + offset
    label_NV = column_NV == targets_N[:, None]

    top_N = jnp.max(logits_NV, axis=1)
    if plan.vocab_mesh_axes:
        top_N = jax.lax.pmax(top_N, plan.vocab_mesh_axes)
    exp_NV = jnp.exp(logits_NV - top_N[:, None])
    exp_N = jnp.sum(exp_NV, axis=1)
    label_N = jnp.sum(jnp.where(label_NV, logits_NV, 0), axis=1)
    # One collective per chunk reduces both sums.
    exp_N, label_N = _psum((exp_N, label_N), plan.vocab_mesh_axes)
    partition_N = jnp.log(exp_N) + top_N

    # Take the first of the largest logits, as argmax does. A readout that is initialized to zero
    # makes all logits equal.
    no_column = jnp.iinfo(jnp.int32).max
    top_column_NV = jnp.where(logits_NV == top_N[:, None], column_NV, no_column)
    first_N = jnp.min(top_column_NV, axis=1)
    if plan.vocab_mesh_axes:
        first_N = jax.lax.pmin(first_N, plan.vocab_mesh_axes)

    statistics = TokenStatistics(
        loss=partition_N - label_N, log_partition=partition_N, correct=first_N == targets_N
    )
    if reads_ranks(plan.metrics):
        rank_N = count_ranks(logits_NV, label_N, column_NV, targets_N)
        statistics = statistics._replace(counted_rank=_psum(rank_N, plan.vocab_mesh_axes))
    if not with_grads:
        return statistics, None

    probability_NV = exp_NV / exp_N[:, None]
    if z_loss is not None:
        # The gradient of logsumexp^2 is 2 * logsumexp * softmax.
        probability_NV = probability_NV * (1 + 2 * z_loss * partition_N)[:, None]
    slope_NV = (probability_NV - label_NV) * chunk.weights[:, None]
    slope_NV = readout_inputs.uncapped(slope_NV, own_NV)
    return statistics, _readout_gradients(readout_inputs, slope_NV)


def _readout_gradients(readout_inputs: ReadoutInputs, slope_NV: jax.Array) -> ReadoutInputs:
    """Return gradients of features, weight, scale and bias from those of the uncapped logits.

    The gradient of a scale or bias that the readout does not have is `None`.

    Args:
        readout_inputs: Features of a chunk, [N, D], and the readout.
        slope_NV: Gradient of the loss with respect to the logits before their soft cap, float32.
    """
    features_ND = readout_inputs.features
    bias_V = None if readout_inputs.bias is None else jnp.sum(slope_NV, axis=0)

    slope_NV = slope_NV.astype(features_ND.dtype)
    product = functools.partial(jax.lax.dot_general, preferred_element_type=jnp.float32)
    features = product(slope_NV, readout_inputs.weight, (((1,), (1,)), ((), ())))
    weight = product(features_ND, slope_NV, (((0,), (0,)), ((), ())))

    scale = None
    if readout_inputs.scale is not None:
        scale = jnp.sum(features * features_ND)
        features = readout_inputs.scale * features
        weight = readout_inputs.scale * weight
    return ReadoutInputs(features.astype(features_ND.dtype), weight, scale, bias_V)


def _psum(tree: Any, mesh_axes: tuple[str, ...]) -> Any:
    """Sum a tree of arrays over devices along mesh axes. Without axes, return it unchanged."""
    return jax.lax.psum(tree, mesh_axes) if mesh_axes else tree
