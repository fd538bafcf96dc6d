"""Cross-entropy by parts of the vocabulary, on one device (`vocab` in `mupax.train.core.loss`).

It is for readouts that are large and split over devices: one part is gathered at a time. The first
pass over the parts computes the loss, the second the gradients. Each part's gradient is complete
after its product, so it is reduce-scattered while the next part's products run, and no gradient is
accumulated in memory.

Between the passes exp(logit - largest logit of the part) is kept in the dtype of the products, so
that no logit is computed twice. This rounding costs nothing: the slope is rounded to that dtype
before its products in any case, and the sums are taken before rounding. As many parts keep their
exponentials as `ReadoutShape.room` allows. The others compute their logits again.

Shapes: N tokens of one device, D width, V vocabulary of one part.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mupax.train.config.metrics import TokenStatistics
from mupax.train.core.state import LossSums, count_ranks, reads_ranks, sums_of
from mupax.zoo.collectives import all_gather, reduce_scatter
from mupax.zoo.layers.linear import ReadoutInputs


class _PartLogits(NamedTuple):
    """Logits of one part of the vocabulary."""

    logits_NV: jax.Array
    """Logits that the loss reads, float32.

    If the output is centred, the logits of the initial model are already subtracted.
    """
    own_NV: jax.Array
    """Logits of the model itself, before the initial model's are subtracted, float32."""
    weight_DV: jax.Array
    """Gathered part of the readout matrix."""


class _PartSums(NamedTuple):
    """Results of the first pass for one part of the vocabulary."""

    exp_N: jax.Array
    """Sum of exp(logit - largest logit of the part)."""
    label_N: jax.Array
    """Logit of the target if the part has it, otherwise 0."""
    before_N: jax.Array
    """Number of classes before the target whose logit is the largest of the part."""
    exp_NV: jax.Array | None
    """exp(logit - largest logit of the part) if it is kept for the second pass."""


@dataclasses.dataclass(frozen=True)
class _DeviceLoss:
    """Inputs of the loss on this device."""

    plan: Any
    """`mupax.train.core.loss.LossPlan`."""
    inputs: Any
    """`mupax.train.core.loss.LossInputs`."""
    features_ND: jax.Array
    """Features, which pass through optimization barriers to order the parts."""
    targets_N: jax.Array
    weights_N: jax.Array
    offset: Any
    """Index of this device's first column in the whole vocabulary."""

    def readout_part(
        self, source: ReadoutInputs, part: slice, after: jax.Array | None = None
    ) -> ReadoutInputs:
        """Return features, and the readout of a part of the vocabulary gathered from all devices.

        Args:
            source: Readout inputs of the model or of the initial model (`inputs.reference`).
            part: Columns of the part in this device's share of the readout matrix, such as 0:128.
            after: Array that the compiler has to compute before the part is gathered. `None` leaves
                the order to the compiler.
        """
        weight_DV = source.weight[:, part]
        if after is not None:
            weight_DV, _ = jax.lax.optimization_barrier((weight_DV, after))
        weight_DV = all_gather(weight_DV, self.plan.scatter_mesh_axes, 0)
        bias_V = None if source.bias is None else source.bias[part]
        features_ND = self.features_ND
        if source is not self.inputs.readout_inputs:
            features_ND = source.features.reshape(self.plan.rows, -1)
        return ReadoutInputs(features_ND, weight_DV, source.scale, bias_V, cap=source.cap)

    def part_logits(self, part: slice, after: jax.Array | None = None) -> _PartLogits:
        """Return the logits of a part of the vocabulary, and the gathered readout matrix.

        If the output is centred, the logits of the initial model are subtracted.

        Args:
            after: Array that the compiler has to compute before the part is gathered. `None` leaves
                the order to the compiler.
        """
        readout = self.readout_part(self.inputs.readout_inputs, part, after)
        own_NV = readout.logits(self.plan.layout)
        logits_NV = own_NV
        if self.inputs.reference is not None:
            reference = self.readout_part(self.inputs.reference, part, after)
            logits_NV = logits_NV - reference.logits(self.plan.layout)
        return _PartLogits(logits_NV, own_NV, readout.weight)

    def column(self, part: slice) -> jax.Array:
        """Return the indices of a part's columns in the whole vocabulary, int32 [V]."""
        return self.offset + part.start + jnp.arange(part.stop - part.start)

    def label(self, part: slice) -> jax.Array:
        """Return a mask that is true at the column of each token's target, bool [N, V]."""
        return self.column(part) == self.targets_N[:, None]


def loss_on_device(
    plan: Any, inputs: Any, with_grads: bool
) -> tuple[LossSums, ReadoutInputs | None]:
    """Return the loss sums over all devices, and gradients of this device's readout inputs.

    Parts of the vocabulary run one after another. The gradients are those of features, weight,
    scale and bias, and `None` without `with_grads`. They are complete: already summed over the
    devices, for this device's tokens and its part of the readout. Call this inside `shard_map` if
    the plan names mesh axes.

    Args:
        plan: `loss.LossPlan`, the distribution of the loss over devices.
        inputs: `loss.LossInputs` of this device, with targets and weights [B, T] or [B].
    """
    features_ND = inputs.readout_inputs.features.reshape(plan.rows, -1)
    targets_N = inputs.targets.reshape(-1)
    weights_N = inputs.weights.reshape(-1)
    offset = 0
    if plan.vocab_mesh_axes:
        columns = inputs.readout_inputs.weight.shape[1]
        offset = columns * jax.lax.axis_index(plan.vocab_mesh_axes)
    loss = _DeviceLoss(plan, inputs, features_ND, targets_N, weights_N, offset)

    loss, tops, part_sums = _first_pass(loss)
    top_N = _reduce(jax.lax.pmax, functools.reduce(jnp.maximum, tops), plan.vocab_mesh_axes)
    shares = [jnp.exp(part_top_N - top_N) for part_top_N in tops]
    exp_N = sum(share_N * part.exp_N for share_N, part in zip(shares, part_sums, strict=True))
    label_N = sum(part.label_N for part in part_sums)
    exp_N, label_N = _reduce(jax.lax.psum, (exp_N, label_N), plan.vocab_mesh_axes)

    # Among equal logits argmax takes the first, so a target is correct only if no class before it
    # has the same logit.
    earlier_N = sum(
        jnp.where(part_top_N == top_N, part.before_N, 0)
        for part_top_N, part in zip(tops, part_sums, strict=True)
    )
    is_top_N = label_N == top_N
    correct_N = is_top_N & (_reduce(jax.lax.psum, earlier_N, plan.vocab_mesh_axes) == 0)
    partition_N = jnp.log(exp_N) + top_N
    statistics = TokenStatistics(
        loss=partition_N - label_N, log_partition=partition_N, correct=correct_N
    )
    if reads_ranks(plan.metrics):
        rank_N = _count_ranks(loss, label_N)
        statistics = statistics._replace(
            counted_rank=_reduce(jax.lax.psum, rank_N, plan.vocab_mesh_axes)
        )
    sums = sums_of(statistics, weights_N, plan.metrics, inputs.z_loss)
    sums = _reduce(jax.lax.psum, sums, plan.token_mesh_axes)
    if not with_grads:
        return sums, None

    exps = [part.exp_NV for part in part_sums]
    return sums, _gradients(loss, exps, shares, top_N, exp_N, partition_N)


def _first_pass(loss: _DeviceLoss) -> tuple[_DeviceLoss, list[jax.Array], list[_PartSums]]:
    """Return each token's largest logit in every part of the vocabulary, and the part's sums.

    The first result is `loss` with features that pass through a barrier after each part, so that
    the compiler runs the parts in order.
    """
    tops: list[jax.Array] = []
    part_sums: list[_PartSums] = []
    for part in loss.plan.shape.parts:
        if part_sums:
            # The barrier makes a part wait for the part before it, so that the logits of only one
            # part are in memory.
            features_ND, part_sums[-1] = jax.lax.optimization_barrier(
                (loss.features_ND, part_sums[-1])
            )
            loss = dataclasses.replace(loss, features_ND=features_ND)

        logits_NV = loss.part_logits(part).logits_NV
        top_N = jnp.max(logits_NV, axis=1)
        exp_NV = jnp.exp(logits_NV - top_N[:, None])
        exp_N = jnp.sum(exp_NV, axis=1)
        label_N = jnp.sum(jnp.where(loss.label(part), logits_NV, 0), axis=1)
        # An argmax would read all logits again. The compiler takes this sum in one pass with the
        # others.
        before_NV = (logits_NV == top_N[:, None]) & (loss.column(part) < loss.targets_N[:, None])
        before_N = jnp.sum(before_NV.astype(jnp.float32), axis=1)
        kept_exp_NV = None
        if len(part_sums) < loss.plan.exp_parts:
            kept_exp_NV = exp_NV.astype(loss.features_ND.dtype)
        tops.append(top_N)
        part_sums.append(_PartSums(exp_N, label_N, before_N, kept_exp_NV))
    return loss, tops, part_sums


def _count_ranks(loss: _DeviceLoss, label_N: jax.Array) -> jax.Array:
    """Count this device's classes that rank before each target (`count_ranks`), int32 [N].

    The target's logit is known only after all parts, so all logits are computed again.

    Args:
        label_N: Logits of the targets, also of those whose class another device has.
    """
    rank_N = jnp.zeros(loss.targets_N.shape, jnp.int32)
    after_N = label_N
    for part in loss.plan.shape.parts:
        # A part waits for the part before it, so that the logits of one part exist at a time.
        logits_NV = loss.part_logits(part, after_N).logits_NV
        rank_N += count_ranks(logits_NV, label_N, loss.column(part), loss.targets_N)
        after_N = rank_N
    return rank_N


def _gradients(
    loss: _DeviceLoss,
    exps: list[jax.Array | None],
    shares: list[jax.Array],
    top_N: jax.Array,
    exp_N: jax.Array,
    partition_N: jax.Array,
) -> ReadoutInputs:
    """Return the gradients of this device's features, weight, scale and bias (`loss_on_device`).

    Args:
        loss: Inputs of the loss on this device.
        exps: exp(logit - largest logit of the part) of each part, [N, V]. `None` if it is not kept.
        shares: exp(largest logit of the part - top_N) of each part, [N].
        top_N: Largest logit of the whole vocabulary, over all devices that split it.
        exp_N: Sum of exp(logit - top_N) over the whole vocabulary.
        partition_N: Log-partition of the whole vocabulary, log(exp_N) + top_N.
    """
    plan = loss.plan
    readout_inputs = loss.inputs.readout_inputs
    z_loss = loss.inputs.z_loss
    features_ND = loss.features_ND
    product = functools.partial(jax.lax.dot_general, preferred_element_type=jnp.float32)

    feature_grads_ND = jnp.zeros(features_ND.shape, jnp.float32)
    weight_grads = []
    bias_grads = []
    slope_NV = top_N
    for part, exp_NV, share_N in zip(plan.shape.parts, exps, shares, strict=True):
        if len(weight_grads) > 1:
            # The barrier lets the devices reduce at most two weight gradients at a time.
            features_ND, weight_grads[-2] = jax.lax.optimization_barrier(
                (features_ND, weight_grads[-2])
            )
            loss = dataclasses.replace(loss, features_ND=features_ND)

        part_logits = None
        if exp_NV is None:
            part_logits = loss.part_logits(part, slope_NV)
            probability_NV = jnp.exp(part_logits.logits_NV - top_N[:, None]) / exp_N[:, None]
        else:
            probability_NV = exp_NV.astype(jnp.float32) * (share_N / exp_N)[:, None]
        if z_loss is not None:
            # The gradient of logsumexp^2 is 2 * logsumexp * softmax.
            probability_NV = probability_NV * (1 + 2 * z_loss * partition_N)[:, None]
        slope_NV = probability_NV - loss.label(part)
        slope_NV = slope_NV * loss.weights_N[:, None]
        if part_logits is not None:
            # With a soft cap no exponentials are kept, so the logits are always recomputed and
            # `uncapped` gets them.
            slope_NV = readout_inputs.uncapped(slope_NV, part_logits.own_NV)
        bias_V = [] if readout_inputs.bias is None else [jnp.sum(slope_NV, axis=0)]

        slope_NV = jax.lax.optimization_barrier(slope_NV.astype(features_ND.dtype))
        if part_logits is not None:
            weight_DV = part_logits.weight_DV
        else:
            weight_DV = loss.readout_part(readout_inputs, part, slope_NV).weight
        feature_grads_ND += product(slope_NV, weight_DV, (((1,), (1,)), ((), ())))
        weight_grad_DV = product(features_ND, slope_NV, (((0,), (0,)), ((), ())))

        # Without this barrier the compiler adds up at the end, with the slope and product of every
        # part in memory.
        finished = (feature_grads_ND, weight_grad_DV, features_ND, exp_N, *bias_V)
        feature_grads_ND, weight_grad_DV, features_ND, exp_N, *bias_V = (
            jax.lax.optimization_barrier(finished)
        )
        loss = dataclasses.replace(loss, features_ND=features_ND)
        bias_grads += bias_V
        weight_grad_DV = _reduce(jax.lax.psum, weight_grad_DV, plan.reduce_mesh_axes)
        weight_grads.append(
            reduce_scatter(weight_grad_DV, plan.scatter_mesh_axes, 0, layout=plan.layout)
        )

    # Without this barrier the compiler moves the last products and sums, and the arrays that they
    # read, into the loop over the layers.
    feature_grads_ND, *weight_grads = jax.lax.optimization_barrier(
        (feature_grads_ND, *weight_grads)
    )
    feature_grads_ND = _reduce(jax.lax.psum, feature_grads_ND, plan.vocab_mesh_axes)
    weight_grad = jnp.concatenate(weight_grads, axis=1)
    bias_grad = None
    if readout_inputs.bias is not None:
        bias_grad = _reduce(jax.lax.psum, jnp.concatenate(bias_grads), plan.token_mesh_axes)
    scale_grad = None
    if readout_inputs.scale is not None:
        scale_grad = jnp.sum(feature_grads_ND * features_ND)
        scale_grad = _reduce(jax.lax.psum, scale_grad, plan.token_mesh_axes)
        feature_grads_ND = readout_inputs.scale * feature_grads_ND
        weight_grad = readout_inputs.scale * weight_grad
    feature_grads = feature_grads_ND.astype(features_ND.dtype)
    feature_grads = feature_grads.reshape(readout_inputs.features.shape)
    return ReadoutInputs(feature_grads, weight_grad, scale_grad, bias_grad)


def _reduce(collective: Any, tree: Any, mesh_axes: tuple[str, ...]) -> Any:
    """Apply `jax.lax.psum` or `pmax` over mesh axes. Without axes, return the tree unchanged."""
    return collective(tree, mesh_axes) if mesh_axes else tree
