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
    z: jax.Array | None = None
    """Squared log-partitions, before their weight; None without a z-loss. No gradient flows through it: the loss has them, too."""


def cross_entropy(
    reading: Reading,
    targets: jax.Array,
    weights: jax.Array,
    *,
    how: CrossEntropy = "auto",
    reference: Reading | None = None,
    labels: jax.Array | None = None,
    z_loss: jax.Array | None = None,
) -> Sums:
    """Summed cross-entropy (nats), number correct and number of targets.

    Args:
        reading: of the model, features [B, D] or [B, T, D].
        targets: int32, one per feature vector.
        weights: float32, 0 where a target does not count; no gradient is taken with respect to them.
        how: plain keeps all logits; chunked never does, and computes them for a few tokens at a time; vocab for a part of the
            vocabulary (`mupax.train.core.cross_entropy.vocabulary`). auto is the first of `costs.losses.options`.
        reference: of the initial model where the output is centred; no gradient flows through it.
        labels: as `of_logits`; all logits are kept then.
        z_loss: float32 [], what logsumexp(logits)^2 of every target that counts is taken times and added to the loss
            (Chowdhery et al. 2022, PaLM, section 5); None adds nothing.
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
        return of_logits(logits, targets, weights, labels, z_loss)
    plan = dataclasses.replace(
        plan, by_vocab=way.kind == "vocab", exp_parts=way.exp_parts if reading.cap is None else 0
    )
    return _in_parts(plan, _Inputs(reading, reference, targets, jax.lax.stop_gradient(weights), z_loss))


def of_logits(
    logits: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    labels: jax.Array | None = None,
    z_loss: jax.Array | None = None,
) -> Sums:
    """Summed cross-entropy (nats), number correct and number of targets, of logits that exist already.

    Args:
        logits: [B, V] or [B, T, V].
        targets, weights: as `cross_entropy` takes them.
        labels: distributions that the loss is taken to in place of the targets, float32 of the logits' shape.
        z_loss: as `cross_entropy` takes it.
    """
    if labels is None:
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    else:
        nll = optax.softmax_cross_entropy(logits, labels)
    hits = jnp.argmax(logits, axis=-1) == targets
    sums = Sums(jnp.sum(nll * weights), jnp.sum(hits * weights), jnp.sum(weights))
    if z_loss is None:
        return sums
    z = jnp.sum(jnp.square(jax.nn.logsumexp(logits, axis=-1)) * weights)
    return sums._replace(loss=sums.loss + z_loss * z, z=jax.lax.stop_gradient(z))


class _Inputs(NamedTuple):
    """Arrays of `cross_entropy`, whole."""

    reading: Reading
    reference: Reading | None
    targets: jax.Array
    weights: jax.Array
    z_loss: jax.Array | None


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
    exp_parts: int = 0
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


def _on_devices(plan: _Plan, inputs: _Inputs, with_grads: bool) -> tuple[Sums, Reading | None]:
    """Sums, and gradients of the loss, of all devices; every array is given and returned whole."""
    reading, reference, targets, weights, z_loss = inputs
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
    leaves = [(name, x) for one in readings for name, x in one._asdict().items() if x is not None]
    factors = [] if z_loss is None else [z_loss]
    trained = reading._replace(cap=None)
    returned = [name for name, x in trained._asdict().items() if x is not None] if with_grads else []

    def local(targets: jax.Array, weights: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        z_loss, arrays = (arrays[0], arrays[1:]) if factors else (None, arrays)
        parts = jax.tree.unflatten(jax.tree.structure(readings), arrays)
        start = parts[1] if len(parts) > 1 else None
        if plan.by_vocab:
            from mupax.train.core.cross_entropy.vocabulary import on_one
        else:
            from mupax.train.core.cross_entropy.chunks import on_one
        sums, grads = on_one(plan, parts[0], start, targets, weights, with_grads, z_loss)
        return (*sums, *(getattr(grads, name) for name in returned))

    outputs = (*[()] * (3 + len(factors)), *(axes[name] for name in returned))
    entries = (plan.tokens, plan.tokens, *[()] * len(factors), *(axes[name] for name, _ in leaves))
    local = partition.current().local(local, entries, outputs)
    loss, correct, weight, *grads = local(targets, weights, *factors, *(x for _, x in leaves))
    z, grads = (grads[0], grads[1:]) if factors else (None, grads)
    sums = Sums(loss, correct, weight, z=z)
    if not with_grads:
        return sums, None
    cast = {n: g.astype(getattr(reading, n).dtype) for n, g in zip(returned, grads, strict=True)}
    no_slope = None if reading.cap is None else jnp.zeros_like(reading.cap)
    return sums, reading._replace(**cast, cap=no_slope)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_parts(plan: _Plan, inputs: _Inputs) -> Sums:
    return _on_devices(plan, inputs, False)[0]


def _backward(plan: _Plan, grads: Reading, cotangent: Sums) -> tuple[tuple[Any, ...]]:
    return (_Inputs._make([jax.tree.map(lambda g: (cotangent.loss * g).astype(g.dtype), grads), *[None] * 4]),)


_in_parts.defvjp(functools.partial(_on_devices, with_grads=True), _backward)
