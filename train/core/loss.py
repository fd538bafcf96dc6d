"""Cross-entropy of a model's readout, computed in chunks where all logits at once would be large.

Three implementations exist: `plain` forms all logits, `chunked` those of a few tokens at a time
(`train/core/cross_entropy/chunks.py`), and `vocab` those of a part of the vocabulary at a time
(`train/core/cross_entropy/vocabulary.py`).

A chunk's logits are computed once. The forward pass already takes the gradients of the chunk, and
the backward pass only multiplies them by the loss's cotangent (as in Hsu et al. 2024,
arXiv 2410.10989). On a mesh every device works on its own tokens, and on its own part of the
vocabulary if the vocabulary is split. For every chunk two numbers per token are summed over
devices. Gradients are summed once, after the last chunk.

Every implementation has an estimate of its memory and time, from sizes alone, for the loss and
gradients of one microbatch. The loss, the mesh search and the plan use it to choose what `auto` is.
docs/evidence/performance.md has the measurements that the estimates were compared with.

Shapes: N tokens of one device, D width, V vocabulary or classes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from mupax.train.config.metrics import NO_METRICS, Metric, TokenStatistics
from mupax.train.core.state import LossSums, count_ranks, no_sums, reads_ranks, sums_of
from mupax.zoo.families import CrossEntropy
from mupax.zoo.layers.linear import ReadoutInputs
from mupax.zoo.partition import ONE_DEVICE, Axes, Layout

CHUNK_LOGITS = {"cpu": 2**21, "gpu": 2**27, "tpu": 2**27}
"""Number of logits of one chunk on one device, by platform.

On CPU they fit its caches. Elsewhere they are half a gigabyte of float32.
"""
LEAST_ROWS = 1024
"""Smallest number of tokens in a chunk.

The readout's gradient is read and written once per chunk, so more tokens per chunk cost less.
"""
PART_LOGITS = 2**26
"""Number of logits of one part of the vocabulary on one device: 256 MiB of float32."""
LANES = 128
"""Multiple to which the columns of a part are rounded: the width of a TPU's vector register."""
Kind = Literal["plain", "chunked", "vocab"]


class ReadoutShape(NamedTuple):
    """Sizes of a readout and of its targets on one device."""

    rows: int
    """Number of targets of one microbatch."""
    columns: int
    """Number of vocabulary entries or classes."""
    width: int
    itemsize: int
    """Bytes of one number in the dtype of the products."""
    platform: str
    device_kind: str
    """`jax.Device.device_kind`."""
    room: int | None = None
    """Bytes that the loss may take without raising the step's peak memory.

    They are the bytes that the backward pass of a layer needs afterwards. `None` if unknown.
    """

    @property
    def balance(self) -> float:
        """FLOPs that the device computes in the time in which it moves one byte of main memory.

        A device that `chips.CHIPS` does not have counts as a TPU v5e.
        """
        # Imported only here, because most losses never ask for a chip's balance.
        from mupax.train.parallel import chips

        chip = chips.of_kind(self.device_kind) or chips.CHIPS["v5e"]
        return chip.peak_flops / chip.hbm_bandwidth

    @property
    def chunk(self) -> int:
        """Number of tokens of one chunk, at most `rows`, such that chunks are as even as can be."""
        target = max(CHUNK_LOGITS[self.platform] // self.columns, LEAST_ROWS)
        num_chunks = math.ceil(self.rows / target)
        return math.ceil(self.rows / num_chunks)

    @property
    def parts(self) -> list[slice]:
        """Columns of each part of the vocabulary, as even as multiples of `LANES` allow."""
        num_parts = math.ceil(self.rows * self.columns / PART_LOGITS)
        size = math.ceil(self.columns / num_parts / LANES) * LANES
        slices = []
        for start in range(0, self.columns, size):
            slices.append(slice(start, min(start + size, self.columns)))
        return slices


@dataclasses.dataclass(frozen=True)
class LossImplementation:
    """One implementation of the loss, with estimates of its memory and time."""

    kind: Kind
    memory: Mapping[str, int]
    """Bytes in use during the computation, by what they hold."""
    traffic: float
    """Bytes of main memory that are read and written while no matrix product runs."""
    after: int = 0
    """Bytes that remain in use during the backward pass of the layers."""
    again: float = 0.0
    """FLOPs of logits that are computed a second time."""
    parts: int = 1
    """Number of chunks of tokens or parts of the vocabulary."""
    exp_parts: int = 0
    """Number of parts of the vocabulary whose exponentials are kept for the second pass."""

    @property
    def bytes(self) -> int:
        """Sum of `memory`."""
        return sum(self.memory.values())


def way(shape: ReadoutShape, kind: Kind, exp_parts: int | None = None) -> LossImplementation:
    """Return an implementation of this kind, with estimates of its memory and time.

    Args:
        exp_parts: Number of parts of the vocabulary whose exponentials are kept, read for `vocab`
            alone. Default: as many as fit into `shape.room`, or all if that is `None`.
    """
    if kind == "vocab":
        return _by_parts(shape, exp_parts)

    logits = shape.rows * shape.columns
    matrix = shape.width * shape.columns
    features = shape.rows * shape.width
    num_chunks = math.ceil(shape.rows / shape.chunk) if kind == "chunked" else 1
    chunk_rows = math.ceil(shape.rows / num_chunks)
    memory = {
        "logits": chunk_rows * shape.columns * (4 + shape.itemsize),
        "gradient of the features": features * shape.itemsize,
        "readout, whole": matrix * shape.itemsize,
        "readout's gradient, whole": matrix * 4,
    }
    # Logits are written and read in both passes. The readout is read, and its gradient added to,
    # once per chunk. For lm-8b at 1 x 4096 tokens, the TPU compiler reports 16.9 GB of traffic for
    # plain and 41 GB for chunked.
    traffic = 20.0 * logits + 12.0 * num_chunks * matrix
    return LossImplementation(kind, memory, traffic, after=matrix * 4, parts=num_chunks)


def _by_parts(shape: ReadoutShape, exp_parts: int | None) -> LossImplementation:
    """Return the implementation by parts of the vocabulary (`way`)."""
    num_parts = len(shape.parts)
    part_columns = shape.parts[0].stop
    memory = {
        "logits of a part": shape.rows * part_columns * 4,
        "exponentials": 0,
        "gradient of the features": shape.rows * shape.width * 4,
        "readout, a part and its gradient": shape.width * part_columns * (4 + shape.itemsize),
    }
    bytes_per_part = shape.rows * part_columns * shape.itemsize
    if exp_parts is None:
        if shape.room is None:
            exp_parts = num_parts
        else:
            free = shape.room - sum(memory.values())
            exp_parts = max(0, min(free // bytes_per_part, num_parts))
    memory["exponentials"] = exp_parts * bytes_per_part

    # Exponentials are written and read, and the features and their gradient are read for every
    # part. For lm-8b at 1 x 4096 tokens, the TPU compiler reports 8 M cycles more than for plain,
    # in which a v5e at 1.5 GHz moves 4.4 GB.
    logits = shape.rows * shape.columns
    logit_bytes = 26.0 * logits
    readout_bytes = 12.0 * shape.width * shape.columns
    feature_bytes = 10.0 * num_parts * shape.rows * shape.width
    traffic = logit_bytes + readout_bytes + feature_bytes
    recomputed = 2.0 * (num_parts - exp_parts) * shape.rows * part_columns * shape.width
    return LossImplementation(
        "vocab", memory, traffic, again=recomputed, parts=num_parts, exp_parts=exp_parts
    )


def above(shape: ReadoutShape, implementation: LossImplementation) -> int:
    """Return the bytes by which an implementation raises the step's peak memory.

    Args:
        shape: Sizes of the step's readout. A `room` of `None` counts as 0 bytes.
        implementation: Implementation of that readout's loss (`way`).
    """
    during = implementation.bytes - (shape.room or 0)
    return max(0, during, implementation.after)


def options(shape: ReadoutShape) -> list[LossImplementation]:
    """Return the implementations that `auto` may choose, the best first.

    If all logits fit in one chunk, the only option is `plain`. Otherwise, on CPU and GPU, the only
    option is `chunked`. On TPU the options are sorted by how much they raise the step's peak
    memory, and among equals by time.
    """
    if shape.chunk == shape.rows:
        return [way(shape, "plain")]
    if shape.platform != "tpu":
        # On CPU chunks are faster (docs/evidence/performance.md). On GPU nothing was measured.
        return [way(shape, "chunked")]

    def cost(implementation: LossImplementation) -> tuple[int, float]:
        # FLOPs are counted as the bytes that main memory moves in the same time.
        time_in_bytes = implementation.traffic + implementation.again / shape.balance
        return above(shape, implementation), time_in_bytes

    # Memory comes first: a slower loss still trains, one that does not fit does not.
    return sorted((way(shape, kind) for kind in get_args(Kind)), key=cost)


def cross_entropy(
    readout_inputs: ReadoutInputs,
    targets: jax.Array,
    weights: jax.Array,
    *,
    how: CrossEntropy = "auto",
    reference: ReadoutInputs | None = None,
    labels: jax.Array | None = None,
    z_loss: jax.Array | None = None,
    metrics: Mapping[str, Metric] = NO_METRICS,
    layout: Layout = ONE_DEVICE,
) -> LossSums:
    """Return the summed cross-entropy (nats) of a readout, and the sums of metrics.

    The loss includes the z-loss. The readout matrix is gathered from the devices that split it.

    Args:
        readout_inputs: Features [B, D] or [B, T, D] and readout matrix [D, V] of the model.
        targets: int32, one per feature vector.
        weights: float32, 0 where a target does not count. No gradient flows through them.
        how: `plain` forms all logits. `chunked` never does, and forms those of a few tokens at a
            time. `vocab` forms those of a part of the vocabulary at a time
            (`mupax.train.core.cross_entropy.vocabulary`). `auto` is the first of `options`.
        reference: Readout inputs of the initial model if the output is centred. No gradient flows
            through them.
        labels: Distributions as in `cross_entropy_from_logits`. With labels, the implementation is
            `plain`.
        z_loss: float32 []. The loss of every target that counts gets z_loss * logsumexp(logits)^2
            added (Chowdhery et al. 2022, PaLM, section 5). `None` adds nothing. No gradient flows
            through it.
        metrics: Metrics to sum in addition to the loss, by name. Each has a `total`.
    """
    # Chunks compute the gradient of one target per token, and not of a distribution.
    if labels is not None:
        how = "plain"
    axes = ("embed", "vocab" if targets.ndim == 2 else "classes")
    plan = _plan(readout_inputs, targets, axes, layout)
    implementation = options(plan.shape)[0] if how == "auto" else way(plan.shape, how)

    # In chunks a split readout is gathered inside of `shard_map`, which also splits its gradient.
    if implementation.kind == "plain" or not plan.scatter_mesh_axes:
        weight = layout.gather(readout_inputs.weight, axes)
        readout_inputs = readout_inputs._replace(weight=weight)
        if reference is not None:
            reference = reference._replace(weight=layout.gather(reference.weight, axes))

    if implementation.kind == "plain":
        logits = readout_inputs.logits(layout)
        if reference is not None:
            logits = logits - jax.lax.stop_gradient(reference.logits(layout))
        return cross_entropy_from_logits(logits, targets, weights, labels, z_loss, metrics)

    plan = dataclasses.replace(
        plan,
        by_vocab=implementation.kind == "vocab",
        # The slope of a soft cap needs the logits themselves, so no exponentials are kept.
        exp_parts=implementation.exp_parts if readout_inputs.cap is None else 0,
        metrics=metrics,
    )
    weights = jax.lax.stop_gradient(weights)
    return _in_parts(plan, LossInputs(readout_inputs, reference, targets, weights, z_loss))


def cross_entropy_from_logits(
    logits: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    labels: jax.Array | None = None,
    z_loss: jax.Array | None = None,
    metrics: Mapping[str, Metric] = NO_METRICS,
) -> LossSums:
    """Return the summed cross-entropy (nats) of given logits, and the sums of metrics.

    The loss includes the z-loss.

    Args:
        logits: float32 [B, V] or [B, T, V].
        targets: int32, one per vector of logits.
        weights: float32 of the targets' shape, 0 where a target does not count. No gradient flows
            through them.
        labels: Distributions, float32 of the logits' shape, that replace the targets in the loss.
            Metrics still use the targets. `None` uses the targets for both.
        z_loss: Weight of the squared log-partition, as in `cross_entropy`.
        metrics: Metrics to sum in addition to the loss, by name. Each has a `total`.
    """
    # Weights are data, and the implementations in parts have no gradient of them.
    weights = jax.lax.stop_gradient(weights)
    z_loss = jax.lax.stop_gradient(z_loss)
    statistics = token_statistics(logits, targets, labels, with_rank=reads_ranks(metrics))
    return sums_of(statistics, weights, metrics, z_loss)


def token_statistics(
    logits: jax.Array,
    targets: jax.Array,
    labels: jax.Array | None = None,
    *,
    with_rank: bool = True,
) -> TokenStatistics:
    """Return loss, log-partition, correctness and rank of every target, from given logits.

    Correct means that the target is the first of the largest logits. The rank is `None` without
    `with_rank`.

    Args:
        logits: float32 [B, V] or [B, T, V].
        targets: int32, one per vector of logits.
        labels: Distributions, float32 of the logits' shape, that replace the targets in the loss.
            `None` uses the targets.
        with_rank: Also count the ranks of the targets.
    """
    if labels is None:
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    else:
        loss = optax.softmax_cross_entropy(logits, labels)
    log_partition = jax.nn.logsumexp(logits, axis=-1)
    correct = jnp.argmax(logits, axis=-1) == targets
    if not with_rank:
        return TokenStatistics(loss, log_partition, correct)

    label_logits = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    ranks = count_ranks(logits, label_logits, jnp.arange(logits.shape[-1]), targets)
    return TokenStatistics(loss, log_partition, correct, ranks)


class LossInputs(NamedTuple):
    """Arrays that the loss reads: global arrays or, inside `shard_map`, the part of one device.

    Each field is described at the argument of `cross_entropy` with the same name.
    """

    readout_inputs: ReadoutInputs
    reference: ReadoutInputs | None
    targets: jax.Array
    weights: jax.Array
    z_loss: jax.Array | None


@dataclasses.dataclass(frozen=True, eq=False)
class LossPlan:
    """Distribution of the loss over devices, and the metrics that are summed with it."""

    layout: Layout
    shape: ReadoutShape
    """Sizes on one device."""
    token_axes: Axes
    """Logical axes of the targets."""
    vocab_axis: str | None
    """Logical axis of the vocabulary. `None` if the vocabulary is not split."""
    token_mesh_axes: tuple[str, ...]
    """Mesh axes that split tokens. The loss is summed over them."""
    scatter_mesh_axes: tuple[str, ...]
    """Mesh axes that split tokens and the readout's rows.

    The readout's gradient is reduce-scattered over them.
    """
    reduce_mesh_axes: tuple[str, ...]
    """Remaining mesh axes over which the readout's gradient is summed."""
    vocab_mesh_axes: tuple[str, ...]
    """Mesh axes that split the vocabulary."""
    metrics: Mapping[str, Metric] = dataclasses.field(default_factory=dict)
    """Metrics to sum in addition to the loss."""
    by_vocab: bool = False
    """`True` for parts of the vocabulary, `False` for chunks of tokens."""
    exp_parts: int = 0
    """Number of parts of the vocabulary whose exponentials are kept."""

    @property
    def rows(self) -> int:
        """Number of tokens of one device."""
        return self.shape.rows


def _plan(
    readout_inputs: ReadoutInputs, targets: jax.Array, axes: tuple[str, str], layout: Layout
) -> LossPlan:
    """Return the distribution of a loss over the devices of a layout, without metrics.

    Args:
        readout_inputs: Inputs of the loss, before the readout matrix is gathered.
        targets: Targets of all devices, [B, T] or [B].
        axes: Logical axes of the rows and columns of the readout matrix.
    """
    width = readout_inputs.features.shape[-1]
    columns = readout_inputs.weight.shape[1]

    # A logical axis that does not divide its dimension is not split.
    split = []
    for axis, size in zip(("batch", "sequence"), targets.shape, strict=False):
        if size % layout.num_shards(axis) == 0:
            split.append(axis)
        else:
            split.append(None)
    token_axes = tuple(split)
    token_mesh_axes = []
    for axis in token_axes:
        token_mesh_axes += layout.mesh_axes(axis)
    token_mesh_axes = tuple(token_mesh_axes)
    scatter_mesh_axes, reduce_mesh_axes = layout.readout(axes, width, token_mesh_axes)

    # Mesh axes that already split tokens cannot split the vocabulary, too.
    vocab_axis = axes[1]
    uneven = columns % layout.num_shards(vocab_axis) != 0
    if uneven or set(layout.mesh_axes(vocab_axis)) & set(token_mesh_axes):
        vocab_axis = None

    shape = ReadoutShape(
        rows=targets.size // math.prod(layout.num_shards(axis) for axis in token_axes),
        columns=columns // layout.num_shards(vocab_axis),
        width=width,
        itemsize=readout_inputs.features.dtype.itemsize,
        platform=layout.platform,
        device_kind=layout.device_kind,
        room=layout.room,
    )
    return LossPlan(
        layout=layout,
        shape=shape,
        token_axes=token_axes,
        vocab_axis=vocab_axis,
        token_mesh_axes=token_mesh_axes,
        scatter_mesh_axes=scatter_mesh_axes,
        reduce_mesh_axes=reduce_mesh_axes,
        vocab_mesh_axes=layout.mesh_axes(vocab_axis),
    )


def _on_devices(
    plan: LossPlan, inputs: LossInputs, with_grads: bool
) -> tuple[LossSums, ReadoutInputs | None]:
    """Return the loss sums over all devices, and the gradients of the readout inputs.

    Arguments and results are global arrays. The gradients are `None` without `with_grads`.
    """
    if plan.by_vocab:
        from mupax.train.core.cross_entropy.vocabulary import loss_on_device
    else:
        from mupax.train.core.cross_entropy.chunks import loss_on_device

    def local(inputs: LossInputs) -> tuple[LossSums, ReadoutInputs | None]:
        return loss_on_device(plan, inputs, with_grads)

    inputs = inputs._replace(readout_inputs=_with_product_dtype(inputs.readout_inputs))
    if inputs.reference is not None:
        inputs = inputs._replace(reference=_with_product_dtype(inputs.reference))

    token_axes: Any = plan.token_axes
    scalar_axes: Any = ()
    input_axes = LossInputs(
        readout_inputs=_axes_of(plan, inputs.readout_inputs),
        reference=None if inputs.reference is None else _axes_of(plan, inputs.reference),
        targets=token_axes,
        weights=token_axes,
        z_loss=None if inputs.z_loss is None else scalar_axes,
    )
    sums_axes = jax.tree.map(lambda _: (), no_sums(plan.metrics, inputs.z_loss))
    grads_axes = input_axes.readout_inputs._replace(cap=None) if with_grads else None
    return plan.layout.local(local, (input_axes,), (sums_axes, grads_axes))(inputs)


def _with_product_dtype(readout_inputs: ReadoutInputs) -> ReadoutInputs:
    """Cast the readout matrix to the dtype of the features, in which products are computed."""
    weight = readout_inputs.weight.astype(readout_inputs.features.dtype)
    return readout_inputs._replace(weight=weight)


def _axes_of(plan: LossPlan, readout_inputs: ReadoutInputs) -> Any:
    """Return the logical axes of every array in `readout_inputs`, as a `ReadoutInputs`."""
    axes = {
        "features": (*plan.token_axes, None),
        "weight": ("embed" if plan.scatter_mesh_axes else None, plan.vocab_axis),
        "scale": (),
        "bias": (plan.vocab_axis,),
        "cap": (),
    }
    present = {}
    for name, array in readout_inputs._asdict().items():
        if array is not None:
            present[name] = axes[name]
    absent = dict.fromkeys(ReadoutInputs._fields)
    return ReadoutInputs(**{**absent, **present})


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_parts(plan: LossPlan, inputs: LossInputs) -> LossSums:
    """Return the loss sums over all devices, in chunks of tokens or parts of the vocabulary."""
    sums, _ = _on_devices(plan, inputs, with_grads=False)
    return sums


def _forward(plan: LossPlan, inputs: LossInputs) -> tuple[LossSums, ReadoutInputs]:
    """Return the loss sums, and gradients of the readout inputs as residuals of `_backward`."""
    sums, grads = _on_devices(plan, inputs, with_grads=True)
    assert grads is not None
    # `custom_vjp` requires gradients in the dtypes of the arrays. The weight was already cast to
    # the dtype of the products.
    arrays = inputs.readout_inputs._replace(cap=None)
    grads = jax.tree.map(lambda grad, array: grad.astype(array.dtype), grads, arrays)
    if inputs.readout_inputs.cap is not None:
        grads = grads._replace(cap=jnp.zeros_like(inputs.readout_inputs.cap))
    return sums, grads


def _backward(plan: LossPlan, grads: ReadoutInputs, cotangent: LossSums) -> tuple[LossInputs]:
    """Return the gradients of the readout inputs times the cotangent of the loss.

    All other inputs have the gradient `None`.
    """
    # Only the loss is differentiated; `LossSums` stops the gradients of its other sums.
    readout_grads = jax.tree.map(lambda grad: (cotangent.loss * grad).astype(grad.dtype), grads)
    input_grads = LossInputs(
        readout_grads,
        reference=None,
        targets=None,  # pyright: ignore[reportArgumentType]
        weights=None,  # pyright: ignore[reportArgumentType]
        z_loss=None,
    )
    return (input_grads,)


_in_parts.defvjp(_forward, _backward)
