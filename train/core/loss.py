"""Cross-entropy of a model's readout, for a few tokens or columns at a time where all logits at once would be large.

N tokens of one device, D width, V vocabulary or classes. A chunk's logits exist once: gradients are taken with them, in the
forward pass, and the backward pass only scales them by the loss's cotangent (as Hsu et al. 2024, arXiv 2410.10989). On a
mesh every device works on its own tokens, and its own part of the vocabulary where that is split: what is summed over
devices for every chunk is two numbers per token, and gradients are summed once, after the last chunk.

Each way to compute a readout's cross-entropy takes some of a device; the loss, the search and the plan read here how much, and
which way `auto` is.

Estimates from sizes alone, of loss and gradients of one microbatch; the figures they were held against are in docs/evidence/performance.md.
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
"""Logits of one chunk on one device: on CPU what its caches hold, elsewhere half a gigabyte of float32."""
LEAST_ROWS = 1024
"""Tokens that a chunk has at least: the readout's gradient is read and written once per chunk, which more tokens pay for."""
PART_LOGITS = 2**26
"""Logits of one part of the vocabulary on one device: a quarter of a gigabyte of float32."""
LANES = 128
Kind = Literal["plain", "chunked", "vocab"]


class ReadoutShape(NamedTuple):
    """Sizes of a readout and of its targets on one device."""

    rows: int
    """Targets of one microbatch."""
    columns: int
    """Of the vocabulary or classes."""
    width: int
    itemsize: int
    """Bytes of a number of its products."""
    platform: str
    kind: str
    """`jax.Device.device_kind`."""
    room: int | None = None
    """Bytes that it may take while the step's peak stays as it is: what a layer's backward pass takes after it."""

    @property
    def balance(self) -> float:
        """FLOPs that a device computes in the time that it takes a byte of main memory."""
        from mupax.train.parallel import chips

        chip = chips.of_kind(self.kind) or chips.CHIPS["v5e"]
        return chip.peak_flops / chip.hbm_bandwidth

    @property
    def chunk(self) -> int:
        """Tokens of one chunk, at most rows, in chunks as even as can be."""
        target = max(CHUNK_LOGITS[self.platform] // self.columns, LEAST_ROWS)
        return math.ceil(self.rows / math.ceil(self.rows / target))

    @property
    def parts(self) -> list[slice]:
        """The columns of each part of the vocabulary, as even as whole registers allow."""
        size = (
            math.ceil(self.columns / math.ceil(self.rows * self.columns / PART_LOGITS) / LANES)
            * LANES
        )
        return [
            slice(start, min(start + size, self.columns)) for start in range(0, self.columns, size)
        ]


@dataclasses.dataclass(frozen=True)
class LossImplementation:
    """One implementation of the loss, with its memory and its time."""

    kind: Kind
    memory: Mapping[str, int]
    """Bytes while it is computed, by what they hold."""
    traffic: float
    """Bytes of main memory read and written beside no product."""
    after: int = 0
    """Bytes that remain during the backward pass of the layers."""
    again: float = 0.0
    """FLOPs of logits that are computed twice."""
    parts: int = 1
    """That tokens or the vocabulary are cut into."""
    exp_parts: int = 0
    """Parts of the vocabulary whose exponentials are kept between the two passes over them."""

    @property
    def bytes(self) -> int:
        """In all."""
        return sum(self.memory.values())


def way(work: ReadoutShape, kind: Kind, exp_parts: int | None = None) -> LossImplementation:
    """Return an implementation of this kind, with its memory and time.

    Logits are written and read in both passes, the readout read and its gradient added to once a chunk: 16.9 GB plain and 41 GB
    chunked of lm-8b at 1 x 4096 tokens, by the TPU compiler. By parts of the vocabulary exponentials are kept, too, and the
    features and their gradient read for every part: 8 M cycles more than plain there, at 1.5 GHz 4.4 GB.

    Args:
        work: on one device.
        kind: of loss.
        exp_parts: parts of the vocabulary whose exponentials are kept; as many as there is room for unless given.
    """
    logits, matrix, features = (
        work.rows * work.columns,
        work.width * work.columns,
        work.rows * work.width,
    )
    if kind == "vocab":
        return _by_parts(work, exp_parts)
    chunks = math.ceil(work.rows / work.chunk) if kind == "chunked" else 1
    memory = {
        "logits": math.ceil(work.rows / chunks) * work.columns * (4 + work.itemsize),
        "gradient of the features": features * work.itemsize,
        "readout, whole": matrix * work.itemsize,
        "readout's gradient, whole": matrix * 4,
    }
    return LossImplementation(
        kind, memory, 20.0 * logits + 12.0 * chunks * matrix, after=matrix * 4, parts=chunks
    )


def _by_parts(work: ReadoutShape, exp_parts: int | None) -> LossImplementation:
    cuts, part = work.parts, work.parts[0].stop
    memory = {
        "logits of a part": work.rows * part * 4,
        "exponentials": 0,
        "gradient of the features": work.rows * work.width * 4,
        "readout, a part and its gradient": work.width * part * (4 + work.itemsize),
    }
    each = work.rows * part * work.itemsize
    if exp_parts is None:
        free = len(cuts) * each if work.room is None else work.room - sum(memory.values())
        exp_parts = max(0, min(free // each, len(cuts)))
    memory["exponentials"] = exp_parts * each
    logits = work.rows * work.columns
    traffic = (
        26.0 * logits + 12.0 * work.width * work.columns + 10.0 * len(cuts) * work.rows * work.width
    )
    again = 2.0 * (len(cuts) - exp_parts) * work.rows * part * work.width
    return LossImplementation(
        "vocab", memory, traffic, again=again, parts=len(cuts), exp_parts=exp_parts
    )


def above(work: ReadoutShape, one: LossImplementation) -> int:
    """Bytes by which a way raises the step's peak.

    Args:
        work: of the step.
        one: way to do it.
    """
    return max(0, one.bytes - (work.room or 0), one.after)


def options(work: ReadoutShape) -> list[LossImplementation]:
    """Return what `auto` may be, the best first: on TPU what raises the step's peak the least, of those that raise it as little the fastest.

    All logits where they are no more than a chunk. On CPU and GPU chunks otherwise: on CPU they are faster
    (docs/evidence/performance.md), on GPU nothing was measured.
    """
    if work.chunk == work.rows:
        return [way(work, "plain")]
    if work.platform != "tpu":
        return [way(work, "chunked")]
    ways = [way(work, kind) for kind in get_args(Kind)]
    return sorted(ways, key=lambda one: (above(work, one), one.traffic + one.again / work.balance))


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

    Args:
        readout_inputs: of the model, features [B, D] or [B, T, D].
        targets: int32, one per feature vector.
        weights: float32, 0 where a target does not count; no gradient is taken with respect to them.
        how: plain keeps all logits; chunked never does, and computes them for a few tokens at a time; vocab for a part of the
            vocabulary (`mupax.train.core.cross_entropy.vocabulary`). auto is the first of `options`.
        reference: of the initial model where the output is centred; no gradient flows through it.
        labels: as `cross_entropy_from_logits`; all logits are kept then.
        z_loss: float32 [], what logsumexp(logits)^2 of every target that counts is taken times and added to the loss
            (Chowdhery et al. 2022, PaLM, section 5); None adds nothing.
        metrics: by name, those to sum besides the loss; each has a `total`.
        layout: how arrays lie on devices.
    """
    axes = ("embed", "vocab" if targets.ndim == 2 else "classes")
    plan = _plan(readout_inputs, targets, axes, layout)
    how = "plain" if labels is not None else how
    option = options(plan.work)[0] if how == "auto" else way(plan.work, how)
    if option.kind == "plain" or not plan.scattered:
        readout_inputs = readout_inputs._replace(weight=layout.gather(readout_inputs.weight, axes))
        reference = reference and reference._replace(weight=layout.gather(reference.weight, axes))
    if option.kind == "plain":
        logits = readout_inputs.logits(layout)
        if reference is not None:
            logits = logits - jax.lax.stop_gradient(reference.logits(layout))
        return cross_entropy_from_logits(logits, targets, weights, labels, z_loss, metrics)
    plan = dataclasses.replace(
        plan,
        by_vocab=option.kind == "vocab",
        exp_parts=option.exp_parts if readout_inputs.cap is None else 0,
        metrics=metrics,
    )
    return _in_parts(
        plan, LossInputs(readout_inputs, reference, targets, jax.lax.stop_gradient(weights), z_loss)
    )


def cross_entropy_from_logits(
    logits: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    labels: jax.Array | None = None,
    z_loss: jax.Array | None = None,
    metrics: Mapping[str, Metric] = NO_METRICS,
) -> LossSums:
    """Return the summed cross-entropy (nats) and the sums of metrics, of logits that exist already.

    Args:
        logits: [B, V] or [B, T, V].
        targets, weights: as `cross_entropy` takes them.
        labels: distributions that the loss is taken to in place of the targets, float32 of the logits' shape.
        z_loss, metrics: as `cross_entropy` takes them.
    """
    statistics = token_statistics(logits, targets, labels, with_rank=reads_ranks(metrics))
    return sums_of(statistics, weights, metrics, z_loss)


def token_statistics(
    logits: jax.Array,
    targets: jax.Array,
    labels: jax.Array | None = None,
    *,
    with_rank: bool = True,
) -> TokenStatistics:
    """Return the statistics of targets, of logits that exist already.

    Args:
        logits, targets, labels: as `cross_entropy_from_logits` takes them.
        with_rank: also count the ranks of the targets.
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
    """Arrays that `cross_entropy` works on: of all devices, or the part of one."""

    readout_inputs: ReadoutInputs
    reference: ReadoutInputs | None
    targets: jax.Array
    weights: jax.Array
    z_loss: jax.Array | None


@dataclasses.dataclass(frozen=True, eq=False)
class _Plan:
    """How the work lies on devices."""

    layout: Layout
    """Devices and their mesh."""
    work: ReadoutShape
    """What one device does."""
    tokens: Axes
    """Logical axes of the targets."""
    vocab: str | None
    """Logical axis of the vocabulary, None where it is whole."""
    summed: tuple[str, ...]
    """Mesh axes that split tokens: gradients of the readout are summed over them."""
    scattered: tuple[str, ...]
    """Those among them that split the readout's rows: each device keeps its own rows of the sum."""
    shared: tuple[str, ...]
    """The others over whose devices the readout's gradient is summed."""
    over_vocab: tuple[str, ...]
    """Mesh axes that split the vocabulary."""
    metrics: Mapping[str, Metric] = dataclasses.field(default_factory=dict)
    """Metrics to sum besides the loss."""
    by_vocab: bool = False
    """Whether parts are of the vocabulary, not of the tokens."""
    exp_parts: int = 0
    """Of those parts, how many keep their exponentials."""

    @property
    def rows(self) -> int:
        """Tokens of one device."""
        return self.work.rows


def _plan(
    readout_inputs: ReadoutInputs, targets: jax.Array, axes: tuple[str, str], layout: Layout
) -> _Plan:
    width, vocab = readout_inputs.features.shape[-1], readout_inputs.weight.shape[1]
    # An axis that does not divide its dimension stays whole, as do mesh axes that split tokens already.
    tokens = tuple(
        axis if size % layout.num_shards(axis) == 0 else None
        for axis, size in zip(("batch", "sequence"), targets.shape, strict=False)
    )
    summed = tuple(name for axis in tokens for name in layout.mesh_axes(axis))
    rows = targets.size // math.prod(layout.num_shards(axis) for axis in tokens)
    scattered, shared = layout.readout(axes, width, summed)
    column = (
        None
        if vocab % layout.num_shards(axes[1]) or set(layout.mesh_axes(axes[1])) & set(summed)
        else axes[1]
    )
    columns, itemsize = vocab // layout.num_shards(column), readout_inputs.features.dtype.itemsize
    work = ReadoutShape(
        rows, columns, width, itemsize, layout.platform, layout.device_kind, layout.room
    )
    return _Plan(layout, work, tokens, column, summed, scattered, shared, layout.mesh_axes(column))


def _on_devices(
    plan: _Plan, inputs: LossInputs, with_grads: bool
) -> tuple[LossSums, ReadoutInputs | None]:
    """Return the sums and the gradients of the loss, of all devices. Every array is given and returned whole."""
    if plan.by_vocab:
        from mupax.train.core.cross_entropy.vocabulary import on_one
    else:
        from mupax.train.core.cross_entropy.chunks import on_one

    def local(inputs: LossInputs) -> tuple[LossSums, ReadoutInputs | None]:
        return on_one(plan, inputs, with_grads)

    inputs = inputs._replace(readout_inputs=_in_product_type(inputs.readout_inputs))
    if inputs.reference is not None:
        inputs = inputs._replace(reference=_in_product_type(inputs.reference))
    token_axes: Any = plan.tokens
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


def _in_product_type(readout_inputs: ReadoutInputs) -> ReadoutInputs:
    return readout_inputs._replace(
        weight=readout_inputs.weight.astype(readout_inputs.features.dtype)
    )


def _axes_of(plan: _Plan, readout_inputs: ReadoutInputs) -> Any:
    """Return the logical axes of every array that a readout's inputs have, as `ReadoutInputs`."""
    axes = {
        "features": (*plan.tokens, None),
        "weight": ("embed" if plan.scattered else None, plan.vocab),
        "scale": (),
        "bias": (plan.vocab,),
        "cap": (),
    }
    present = {
        name: axes[name] for name, array in readout_inputs._asdict().items() if array is not None
    }
    absent = dict.fromkeys(ReadoutInputs._fields)
    return ReadoutInputs(**{**absent, **present})


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_parts(plan: _Plan, inputs: LossInputs) -> LossSums:
    sums, _ = _on_devices(plan, inputs, with_grads=False)
    return sums


def _forward(plan: _Plan, inputs: LossInputs) -> tuple[LossSums, ReadoutInputs]:
    sums, grads = _on_devices(plan, inputs, with_grads=True)
    assert grads is not None
    # Of the types of the arrays that they are the gradients of: the weight was cast to the products' type before.
    cast = jax.tree.map(
        lambda grad, x: grad.astype(x.dtype), grads, inputs.readout_inputs._replace(cap=None)
    )
    no_slope = (
        None if inputs.readout_inputs.cap is None else jnp.zeros_like(inputs.readout_inputs.cap)
    )
    return sums, cast._replace(cap=no_slope)


def _backward(plan: _Plan, grads: ReadoutInputs, cotangent: LossSums) -> tuple[LossInputs]:
    readout_grads = jax.tree.map(lambda grad: (cotangent.loss * grad).astype(grad.dtype), grads)
    return (LossInputs(readout_grads, reference=None, targets=None, weights=None, z_loss=None),)  # pyright: ignore[reportArgumentType]


_in_parts.defvjp(_forward, _backward)
