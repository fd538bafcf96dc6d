"""Cross-entropy of a model's readout, for a few tokens or columns at a time where all logits at once would be large.

N tokens of one device, D width, V vocabulary or classes. A chunk's logits exist once: gradients are taken with them, in the
forward pass, and the backward pass only scales them by the loss's cotangent (as Hsu et al. 2024, arXiv 2410.10989). On a
mesh every device works on its own tokens, and its own part of the vocabulary where that is split: what is summed over
devices for every chunk is two numbers per token, and gradients are summed once, after the last chunk.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mupax.train.core.costs import losses
from mupax.zoo import partition
from mupax.zoo.families import CrossEntropy
from mupax.zoo.layers.linear import Reading

if TYPE_CHECKING:
    from mupax.zoo.experts.routing import Routing


class Sums(NamedTuple):
    """Totals over the targets that count, float32 []."""

    loss: jax.Array
    correct: jax.Array
    weight: jax.Array
    routing: Routing | None = None
    """What routers did, times the weight but for counts; None without experts."""


def cross_entropy(
    reading: Reading,
    targets: jax.Array,
    weights: jax.Array,
    *,
    how: CrossEntropy = "auto",
    reference: Reading | None = None,
    labels: jax.Array | None = None,
) -> Sums:
    """Summed cross-entropy (nats), number correct and number of targets.

    Args:
        reading: of the model, features [B, D] or [B, T, D].
        targets: int32, one per feature vector.
        weights: float32, 0 where a target does not count; no gradient is taken with respect to them.
        how: plain keeps all logits; chunked never does, and computes them for a few tokens at a time; vocab for a part of the
            vocabulary (`mupax.train.core.vocabulary`). auto is the first of `costs.losses.options`.
        reference: of the initial model where the output is centred; no gradient flows through it.
        labels: as `of_logits`; all logits are kept then.
    """
    axes = ("embed", "vocab" if targets.ndim == 2 else "classes")
    plan = _plan(reading, targets, axes)
    how = "plain" if labels is not None else how
    way = losses.options(plan.work)[0] if how == "auto" else losses.way(plan.work, how)
    if way.kind == "plain" or not plan.scattered:
        gather = partition.current().gather
        reading = reading._replace(weight=gather(reading.weight, axes))
        reference = reference and reference._replace(weight=gather(reference.weight, axes))
    if way.kind == "plain":
        logits = reading.logits()
        if reference is not None:
            logits = logits - jax.lax.stop_gradient(reference.logits())
        return of_logits(logits, targets, weights, labels)
    return _in_parts(
        dataclasses.replace(plan, by_vocab=way.kind == "vocab", kept=way.kept if reading.cap is None else 0),
        reading,
        reference,
        targets,
        jax.lax.stop_gradient(weights),
    )


def of_logits(logits: jax.Array, targets: jax.Array, weights: jax.Array, labels: jax.Array | None = None) -> Sums:
    """Summed cross-entropy (nats), number correct and number of targets, of logits that exist already.

    Args:
        logits: [B, V] or [B, T, V].
        targets, weights: as `cross_entropy` takes them.
        labels: distributions that the loss is taken to in place of the targets, float32 of the logits' shape.
    """
    if labels is None:
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    else:
        nll = optax.softmax_cross_entropy(logits, labels)
    hits = jnp.argmax(logits, axis=-1) == targets
    return Sums(jnp.sum(nll * weights), jnp.sum(hits * weights), jnp.sum(weights))


@dataclasses.dataclass(frozen=True, eq=False)
class _Plan:
    """How the work lies on devices."""

    work: losses.Work
    """What one device does."""
    tokens: partition.Axes
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
    by_vocab: bool = False
    """Whether parts are of the vocabulary, not of the tokens."""
    kept: int = 0
    """Of those parts, how many keep their exponentials."""

    @property
    def rows(self) -> int:
        """Tokens of one device."""
        return self.work.rows


def _plan(reading: Reading, targets: jax.Array, axes: tuple[str, str]) -> _Plan:
    width, vocab, layout = reading.features.shape[-1], reading.weight.shape[1], partition.current()
    # An axis that does not divide its dimension stays whole, as do mesh axes that split tokens already.
    tokens = tuple(
        axis if size % layout.ways(axis) == 0 else None
        for axis, size in zip(("batch", "sequence"), targets.shape, strict=False)
    )
    summed = tuple(name for axis in tokens for name in layout.names(axis))
    rows = targets.size // math.prod(layout.ways(axis) for axis in tokens)
    scattered, shared = layout.readout(axes, width, summed)
    column = None if vocab % layout.ways(axes[1]) or set(layout.names(axes[1])) & set(summed) else axes[1]
    columns, itemsize = vocab // layout.ways(column), reading.features.dtype.itemsize
    work = losses.Work(rows, columns, width, itemsize, layout.platform, layout.kind, layout.room)
    return _Plan(work, tokens, column, summed, scattered, shared, layout.names(column))


def _on_devices(
    plan: _Plan, reading: Reading, reference: Reading | None, targets: jax.Array, weights: jax.Array, with_grads: bool
) -> tuple[Sums, Reading | None]:
    """Sums, and gradients of the loss, of all devices; every array is given and returned whole."""
    rows = "embed" if plan.scattered else None
    axes = {
        "features": (*plan.tokens, None),
        "weight": (rows, plan.vocab),
        "scale": (),
        "bias": (plan.vocab,),
        "cap": (),
    }
    readings = [one._replace(weight=one.weight.astype(one.features.dtype)) for one in (reading, reference) if one]
    # Flat, and without what a reading does not have, as the layout wants to be told of every array.
    given = [(name, x) for one in readings for name, x in one._asdict().items() if x is not None]
    trained = reading._replace(cap=None)
    returned = [name for name, x in trained._asdict().items() if x is not None] if with_grads else []

    def local(targets: jax.Array, weights: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        parts = jax.tree.unflatten(jax.tree.structure(readings), arrays)
        start = parts[1] if len(parts) > 1 else None
        if plan.by_vocab:
            from mupax.train.core.vocabulary import on_one
        else:
            on_one = _on_one
        sums, grads = on_one(plan, parts[0], start, targets, weights, with_grads)
        return (*sums[:3], *(getattr(grads, name) for name in returned))

    outputs = ((), (), (), *(axes[name] for name in returned))
    inputs = (plan.tokens, plan.tokens, *(axes[name] for name, _ in given))
    local = partition.current().local(local, inputs, outputs)
    loss, correct, weight, *grads = local(targets, weights, *(x for _, x in given))
    if not with_grads:
        return Sums(loss, correct, weight), None
    cast = {n: g.astype(getattr(reading, n).dtype) for n, g in zip(returned, grads, strict=True)}
    no_slope = None if reading.cap is None else jnp.zeros_like(reading.cap)
    return Sums(loss, correct, weight), reading._replace(**cast, cap=no_slope)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_parts(plan: _Plan, reading: Reading, reference: Reading | None, targets: jax.Array, weights: jax.Array) -> Sums:
    return _on_devices(plan, reading, reference, targets, weights, False)[0]


def _backward(plan: _Plan, grads: Reading, cotangent: Sums) -> Any:
    return jax.tree.map(lambda g: (cotangent.loss * g).astype(g.dtype), grads), None, None, None


_in_parts.defvjp(functools.partial(_on_devices, with_grads=True), _backward)


def _on_one(
    plan: _Plan, reading: Reading, reference: Reading | None, targets: jax.Array, weights: jax.Array, with_grads: bool
) -> tuple[Sums, Reading | None]:
    """The same on one device: its chunks one after the other, then sums over devices."""
    chunks = math.ceil(plan.rows / plan.work.chunk)
    reading = reading._replace(weight=partition.all_gather(reading.weight, plan.scattered, 0))
    if reference is not None:
        reference = reference._replace(weight=partition.all_gather(reference.weight, plan.scattered, 0))

    def cut(x: jax.Array, *trailing: int) -> jax.Array:
        """All tokens in chunks; what fills up the last one counts nothing."""
        x = jnp.pad(
            x.reshape(plan.rows, *trailing), [(0, chunks * plan.work.chunk - plan.rows), *[(0, 0)] * len(trailing)]
        )
        return x.reshape(chunks, plan.work.chunk, *trailing)

    def add(total: tuple[Sums, Reading | None], part: tuple[Any, ...]) -> tuple[Any, jax.Array | None]:
        features, fixed, labels, counts = part
        start = None if reference is None else reference._replace(features=fixed)
        sums, grads = _of_chunk(plan, reading._replace(features=features), start, labels, counts, with_grads)
        if grads is None:
            return jax.tree.map(jnp.add, total, (sums, None)), None
        return jax.tree.map(jnp.add, total, (sums, grads._replace(features=None))), grads.features  # pyright: ignore

    width, zero = reading.features.shape[-1], jnp.float32(0)
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), reading._replace(features=None, cap=None))  # pyright: ignore
    total = (Sums(zero, zero, zero), nothing if with_grads else None)
    fixed = None if reference is None else cut(reference.features, width)
    (sums, found), by_chunk = jax.lax.scan(
        add, total, (cut(reading.features, width), fixed, cut(targets), cut(weights))
    )
    sums = _psum(sums, plan.summed)
    if by_chunk is None:
        return sums, None
    features = by_chunk.reshape(-1, width)[: plan.rows].reshape(reading.features.shape)
    weight = partition.reduce_scatter(_psum(found.weight, plan.shared), plan.scattered, 0)
    scale, bias = _psum((_psum(found.scale, plan.over_vocab), found.bias), plan.summed)
    return sums, Reading(_psum(features, plan.over_vocab), weight, scale, bias)


def _of_chunk(
    plan: _Plan,
    reading: Reading,
    reference: Reading | None,
    targets_N: jax.Array,
    weights_N: jax.Array,
    with_grads: bool,
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
    nll_N = jnp.log(exp_N) + top_N - label_N
    # The first of the largest, as argmax has it: all logits are equal where a readout starts at zero.
    first_N = jnp.min(jnp.where(logits_NV == top_N[:, None], column_NV, jnp.iinfo(jnp.int32).max), axis=1)
    first_N = jax.lax.pmin(first_N, plan.over_vocab) if plan.over_vocab else first_N
    sums = Sums(jnp.sum(nll_N * weights_N), jnp.sum((first_N == targets_N) * weights_N), jnp.sum(weights_N))
    if not with_grads:
        return sums, None
    slope_NV = reading.uncapped((exp_NV / exp_N[:, None] - label_NV) * weights_N[:, None], own_NV)
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
