"""What to measure inside a model while it takes its first steps: compiled once per size, for all presets, seeds and numbers of steps.

Every observable is a positive number per (seed, step), or per (seed, step, layer): a root mean square over entries and batch.
Names are `what` or `what/label`, a parameter's label being its group such as `block.query` (`mupax.train.studies.check.groups`).

Three things are measured where theory speaks of them, because a finite batch and a finite width would hide them:

* **Gradients at a unit gradient of the output.** The loss is of f - f_initial, so that every class has probability 1/V before
  the first step. Otherwise the gradient has a second term, through p - 1/V, which is proportional to the logits at the start.
  Under `mup` those vanish as D^-1/2, so the term is one of finite widths. It does not average out over tokens, while the
  gradient of M random targets does, as M^-1/2. Of the last norm's gain the two are W^2 and W M^-1/2 (W: entries of the
  readout, 1/8 at width 64): the slope fell from -0.30 at 128 tokens to -0.90 at 4,096, where theory says 0.
* **Changes of logits along the targets.** Theory's exponent is that of gradient times step. One step moves the target's logit
  by D terms of one sign, and the V - 1 other logits of a token by D terms of either sign: their root mean square falls as
  D^-1/2 as soon as V is above the width.
* **Tables that are looked up, in the rows that were read.** A batch of M tokens moves at most M of V rows.

Shapes: L layers, B batch, T and S positions, H heads, K key heads, N head dimension, D width, V outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from mupax.presets.roles import Role
from mupax.train.core.factors import Factors
from mupax.train.core.optimizer import rows
from mupax.train.core.state import TrainState
from mupax.train.core.step import StepInputs, gradients
from mupax.train.studies.check import groups
from mupax.zoo.definition import Arrays, Definition, multiplied, normals
from mupax.zoo.layers.stack import over_layers

Batch = Mapping[str, Any]
_BY_OWN_WEIGHTS = ("query", "key", "attention")
CROSS = "contribution/block.cross.attention_out"
"""What attention to an encoder adds to the stream: of its own, so that a wrong scale of this branch has a name."""
_BY_LAYER = (*_BY_OWN_WEIGHTS, "contribution", CROSS)
"""What `internals` has an axis of layers of, first, and a table sets at initialization."""
LOOKED_UP = frozenset({Role.TOKEN_EMBEDDING, Role.POSITION, Role.RELATIVE_BIAS})
"""Roles of tables of which a batch reads some rows."""
ROW_AXES = frozenset({"vocab", "position", "source", "distance", "input", "output", "classes"})
"""Axes of such tables that count rows; a preset never lets them grow."""


def program(
    definition: Definition,
    tx: optax.GradientTransformationExtraArgs,
    options: dict[str, Any] | None = None,
    still_steps: int = 0,
) -> Callable[..., dict[str, np.ndarray]]:
    """One model's measuring program: presets, rates, the seed and the number of steps are data to what is compiled at its first call.

    It trains on one batch, measuring before the first step and after every one: from a seed of the initialization (uint32 []),
    factors and hyperparameters (`run.reference` is not used), initial standard deviations, the batch and a number of steps to
    float32 [steps + 1] or [steps + 1, L] by observable.

    Args:
        definition: the model.
        tx: the optimizer chain.
        options: of XLA, for these compilations.
        still_steps: number of first updates by which the optimizer moves nothing. They are taken and not counted, so that
            step 1 is the first that moves.
    """

    @functools.partial(jax.jit, compiler_options=options)
    def begin(seed: jax.Array, stds: Arrays) -> TrainState:
        params = definition.initialize(seed, stds, normals)
        return TrainState(jnp.zeros([], jnp.int32), params, tx.init(params))

    @jax.jit
    def forward(params: Arrays, factors: Factors, batch: Batch) -> Arrays:
        return internals(
            definition.model(params, factors.multiplier, factors.forward), **_read(batch)
        )

    @functools.partial(jax.jit, compiler_options=options)
    def step(
        state: TrainState, initial: Arrays, start: Arrays, run: StepInputs, batch: Batch
    ) -> tuple[TrainState, Arrays, Arrays]:
        factors, now = run.factors, forward(state.params, run.factors, batch)
        rows_read = {name: start[name] for name in _rows_read(definition, state.params)}
        start = {name: jnp.where(state.step == 0, x, start[name]) for name, x in now.items()}
        centered = run._replace(reference=initial)
        grads, _sums = gradients(definition, state.params, centered, dict(batch), 1)
        model = definition.model(state.params, factors.multiplier, factors.forward)
        stats = _activations(model, now, start, _read(batch), definition.tied_readout is not None)
        stats["change logits"] = along_targets(now["logits"] - start["logits"], batch)
        read_now = _rows_read(definition, grads)
        stats |= _weights(
            definition, factors, _Weights(initial, state.params, grads), rows_read, read_now
        )
        # Rows that have been read so far: of those whose first gradient waits for a readout that starts at zero, too.
        start |= {name: rows_read[name] | mask for name, mask in read_now.items()}
        updates, opt_state = tx.update(
            grads, state.opt_state, state.params, factors=factors, hyper=run.hyper
        )
        new: Any = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, new, opt_state), start, stats

    def measure(
        seed: np.ndarray, run: StepInputs, stds: Arrays, batch: Batch, steps: int
    ) -> dict[str, np.ndarray]:
        state, (run, batch) = begin(seed, stds), jax.device_put((run, dict(batch)))
        initial, schedule, records = state.params, run.hyper.schedule, []
        # Of the first step they are what it computes itself.
        shapes = forward.eval_shape(initial, run.factors, batch)
        start = {name: jnp.zeros(of.shape, of.dtype) for name, of in shapes.items()}
        start |= {
            name: jnp.zeros_like(mask) for name, mask in _rows_read(definition, initial).items()
        }
        for count in range(-still_steps, steps + 1):
            now = run._replace(hyper=run.hyper._replace(schedule=schedule[max(count, 0)]))
            state, start, record = step(state, initial, start, now, batch)
            if count >= 0:
                records.append(record)
        fetched = jax.device_get(records)
        return {name: np.stack([record[name] for record in fetched]) for name in fetched[0]}

    return measure


def _read(batch: Batch) -> dict[str, Any]:
    """What of a batch the model is called with."""
    return {name: x for name, x in batch.items() if name not in ("targets", "weights")}


def _activations(model: Any, now: Arrays, start: Arrays, read: Batch, tied: bool) -> Arrays:
    """Activations `X`, what changed since initialization, and the variance of attention logits over heads.

    `change X` is the whole change; for queries, keys and attention logits `update X` is that through their own weights alone.
    With a readout tied to the embedding `logits` leaves out the input token's own, and `contact logit` is that one: at
    initialization a E_t . h / rms(h) with h = E_t + other terms is a sum of D squares, where every other logit is a sum of D
    products of either sign. It is D^1/2 times larger: of order one under `mup`, whose other logits vanish as D^-1/2, and
    D^1/2 under `ntk`.
    """
    out = {name: (by_layer if name in _BY_LAYER else rms)(x) for name, x in now.items()}
    if tied:
        contact_BTV = (
            jnp.arange(now["logits"].shape[-1])
            == read.get("decoder_inputs", read["inputs"])[..., None]
        )
        out |= {
            "logits": rms(now["logits"], ~contact_BTV),
            "contact logit": rms(now["logits"], contact_BTV),
        }
    out |= {
        f"change {name}": rms(x - start[name])
        for name, x in now.items()
        if name not in (*_BY_OWN_WEIGHTS, CROSS)
    }
    if "query" in now:
        # What they owe to their own weights, at the inputs they had: the stream below moves too, and would hide it.
        graph, blocks = nnx.split(model.block)
        moved = jax.lax.map(
            lambda layer: _attention(nnx.merge(graph, layer[0]), layer[1]),
            (blocks, start["attended"]),
        )
        out |= {f"update {name}": rms(moved[name] - start[name]) for name in _BY_OWN_WEIGHTS}
    if "attention" in now and now["attention"].shape[2] > 1:
        out["variance over heads"] = jnp.mean(jnp.var(now["attention"], axis=2))
    return out


class _Weights(NamedTuple):
    """Parameters as they are stored, before the first step and now, and gradients of the loss."""

    initial: Arrays
    params: Arrays
    grads: Arrays


def _rows_read(definition: Definition, grads: Arrays) -> Arrays:
    """Return which rows of each looked-up table, and entries of a readout's bias, have a gradient.

    They are bool [rows, 1], or [entries] of a bias, under the name "rows/PARAMETER".

    The gradient tells it of every model: one of a user's own has no names that we know, and its token table may be read by
    an encoder, a decoder or both. A row that the batch does not read has a gradient of exactly zero. A table that is also the
    readout has a gradient in every row, and an optimizer moves every row: then all rows are judged.
    """
    read_by_table: Arrays = {}
    for name, spec in definition.specs.items():
        row_axes = [index for index, axis in enumerate(spec.axes) if axis in ROW_AXES]
        looked_up = spec.role in LOOKED_UP and not spec.fan_in
        # An output whose target comes exactly as often as chance has it leaves its bias without a first gradient.
        of_outputs = spec.role is Role.BIAS and spec.of is Role.READOUT
        if (looked_up or of_outputs) and row_axes and name in grads:
            # The axis of layers keeps its size: blocks of a stack have tables of their own.
            width_axes = [
                i
                for i, axis in enumerate(spec.axes)
                if i not in row_axes and axis not in spec.copies
            ]
            read_by_table[f"rows/{name}"] = jnp.any(
                grads[name] != 0, axis=tuple(width_axes), keepdims=True
            )
    return read_by_table


def _weights(
    definition: Definition, factors: Factors, weights: _Weights, rows_read: Arrays, read_now: Arrays
) -> Arrays:
    """Return per label the weight as it acts, multiplier included, its movement, and its gradient over the eps factor.

    Args:
        weights: before the first step and now.
        rows_read: rows that had a gradient at any step so far, by `_rows_read`'s names. Movement is judged on these.
        read_now: rows that have a gradient now. Gradients are judged on these.
    """
    acting = multiplied(weights.params, factors.multiplier)
    began = multiplied(weights.initial, factors.multiplier)
    stats: Arrays = {}
    for name, label in groups.labels(definition.specs).items():
        gradient = weights.grads[name] / rows(factors.eps[name], weights.grads[name])
        columns = {
            "weight": (acting[name], None),
            "movement": (acting[name] - began[name], rows_read.get(f"rows/{name}")),
            "gradient": (gradient, read_now.get(f"rows/{name}")),
        }
        measure = by_layer if definition.specs[name].stacked else rms
        for column, (array, where) in columns.items():
            stats[f"{column}/{label}"] = measure(array, where)
    return stats


def along_targets(change: jax.Array, batch: Batch) -> jax.Array:
    """Return how far the targets' logits rose above the mean of all, averaged over the targets that count: float32 [], positive.

    Args:
        change: of logits, [B, V] or [B, T, V].
        batch: its targets and weights.
    """
    raised = jnp.take_along_axis(change, batch["targets"][..., None], axis=-1)[..., 0] - jnp.mean(
        change, axis=-1
    )
    return jnp.abs(jnp.sum(raised * batch["weights"])) / jnp.sum(batch["weights"])


def by_layer(x: jax.Array, where: jax.Array | None = None) -> jax.Array:
    """Return the root mean square of every layer, which are the first axis: float32 [layers].

    Args:
        x: of any shape.
        where: as `rms` takes it, with the same first axis.
    """
    if where is None:
        return jax.vmap(rms)(x)
    return jax.vmap(rms)(x, where)


def rms(x: jax.Array, where: jax.Array | None = None) -> jax.Array:
    """Root mean square over all entries, or those where a mask is true, float32 [].

    Args:
        x: of any shape.
        where: of x's shape, or one that broadcasts to it.
    """
    squares = jnp.square(x.astype(jnp.float32))
    if where is None:
        return jnp.sqrt(jnp.mean(squares))
    # A mask that is false everywhere gives 0, which is judged as frozen, and not 0 / 0.
    mask = jnp.broadcast_to(where, squares.shape)
    return jnp.sqrt(jnp.sum(squares, where=mask) / jnp.maximum(jnp.sum(mask), 1))


def internals(model: Any, inputs: jax.Array, **extra: jax.Array) -> Arrays:
    """Activations of one forward pass.

    Args:
        model: a zoo model, or any NNX model. One with a method `internals(inputs)` is asked instead.
        inputs: what the model is called with.
        **extra: the same, by name: of an encoder-decoder, whose decoder is looked at, its padding and the decoder's inputs.

    Returns:
        For a model with `embed`, `block` and `read` (and `begin`, where blocks take more than the stream): `embedding` [B, T, D],
        and per layer `residual` [L, B, T, D] (after the block), `contribution` (what the block added) and, where it attends to an
        encoder, `CROSS`; where the block has
        `attention` also `attended` [L, B, T, D] (input of q, k, v), `query` [L, B, T, H, N], `key` [L, B, S, K, N], `attention`
        [L, B, H, T, S] (logits as they enter the softmax, before any mask). For every model `logits`, its output.
    """
    if hasattr(model, "internals"):
        return {"logits": model(inputs, **extra), **model.internals(inputs)}
    if not all(hasattr(model, part) for part in ("embed", "block", "read")):
        return {"logits": model(inputs, **extra)}
    embedding, context = (
        model.begin(inputs, **extra) if hasattr(model, "begin") else (model.embed(inputs), ())
    )
    graph, stacked = nnx.split(model.block)

    period = getattr(model.block, "period", 1)

    def layer(h_BTD: jax.Array, state: nnx.State, place: int) -> tuple[jax.Array, Arrays]:
        block = nnx.merge(graph, state)
        block = block if period == 1 else block.at(place)
        out_BTD = block(h_BTD, *context)
        here = {"residual": out_BTD, "contribution": out_BTD - h_BTD}
        if hasattr(block, "attention"):
            here["attended"] = block.attention_norm(h_BTD)
            here |= _attention(block, here["attended"])
        if hasattr(block, "cross"):
            here[CROSS] = _cross(block, h_BTD, here["attended"], *context)
        return out_BTD, here

    depth = jax.tree.leaves(stacked)[0].shape[0]
    out_BTD, by_layer = over_layers(layer, embedding, stacked, depth, period)
    return {"embedding": embedding, **by_layer, "logits": model.read(out_BTD)}


def _cross(
    block: Any,
    h_BTD: jax.Array,
    attended_BTD: jax.Array,
    memory_BSD: jax.Array,
    mask_BS: Any,
    bias: Any,
) -> jax.Array:
    h_BTD = block.add_branch(h_BTD, 0, block.attention(attended_BTD, None, bias))
    return block.add_branch(
        jnp.zeros_like(h_BTD), 1, block.cross(block.cross_norm(h_BTD), memory_BSD, mask_BS)
    )


def _attention(block: Any, attended_BTD: jax.Array) -> Arrays:
    q_BTHN, k_BSKN, _ = block.attention.heads(attended_BTD)
    groups = q_BTHN.shape[2] // k_BSKN.shape[2]
    logits_BHTS = jnp.einsum("bthn,bshn->bhts", q_BTHN, jnp.repeat(k_BSKN, groups, axis=2))
    return {
        "query": q_BTHN,
        "key": k_BSKN,
        "attention": block.attention.logit_scale[...] * logits_BHTS,
    }
