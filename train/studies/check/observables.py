"""Measurements inside a model during its first steps, with one compiled program per model size.

Presets, learning rates, seeds and the number of steps are data to the program. An observable is a
positive number per (seed, step) or per (seed, step, layer): a root mean square over entries and
batch. Its name is "kind" or "kind/label", where the label of a parameter is its group, such as
`block.query` (`mupax.train.studies.check.groups`).

Three observables are measured in the way that theory speaks of them. A finite batch and a finite
width would hide them otherwise:

* **Gradients at a unit gradient of the output.** The loss is that of f - f_initial, so that every
  class has probability 1/V before the first step. Otherwise the gradient has a second term, through
  p - 1/V, which is proportional to the initial logits. Under `mup` these vanish as D^-1/2, so the
  term is an effect of finite width. It does not average out over tokens, while the gradient of M
  random targets falls as M^-1/2. For the last norm's gain the two terms are W^2 and W M^-1/2 (W:
  entries of the readout, 1/8 at width 64). The slope fell from -0.30 at 128 tokens to -0.90 at
  4,096, where theory says 0.
* **Changes of logits along the targets.** Theory's exponent is that of gradient times step. One
  step moves the target's logit by D terms of one sign, and the V - 1 other logits of a token by D
  terms of either sign. The root mean square over all logits falls as D^-1/2 once V is above the
  width.
* **Lookup tables in the rows that were read.** A batch of M tokens moves at most M of V rows.

Shapes: L layers, B batch, T and S positions, H heads, K key heads, N head dimension, D width,
V outputs.
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

from mupax.mappings import drop_keys
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
"""Name of the observable that is cross-attention's contribution to the residual stream.

It is reported apart from the contribution of the whole block, so that a wrong scale of this branch
shows under its own name.
"""
LOSS = "loss"
"""Name of the mean loss over targets, which theory says nothing about. It shows divergence."""
_BY_LAYER = (*_BY_OWN_WEIGHTS, "contribution", CROSS)
"""Activations that are recorded layer by layer. A preset sets their size at initialization."""
LOOKED_UP = frozenset({Role.TOKEN_EMBEDDING, Role.POSITION, Role.RELATIVE_BIAS})
"""Roles of tables that a batch reads in some rows only."""
ROW_AXES = frozenset({"vocab", "position", "source", "distance", "input", "output", "classes"})
"""Axes that count the rows of lookup tables. Their sizes stay constant in every limit."""


def program(
    definition: Definition,
    tx: optax.GradientTransformationExtraArgs,
    options: dict[str, Any] | None = None,
    still_steps: int = 0,
) -> Callable[..., dict[str, np.ndarray]]:
    """Return a function that trains on one batch and measures a model before and after every step.

    The function compiles at its first call. Its arguments are a seed (uint32 []), step inputs
    (`reference` is not used), initial standard deviations by parameter, the batch, and the number
    of steps. It returns NumPy float32 [steps + 1] or [steps + 1, L] by observable.

    Args:
        options: XLA compiler options of the initialization and of the step.
        still_steps: Number of first updates that only fill the optimizer's state and move no
            parameter. They are not counted as steps, so that step 1 moves parameters.
    """

    @functools.partial(jax.jit, compiler_options=options)
    def begin(seed: jax.Array, stds: Arrays) -> TrainState:
        params = definition.initialize(seed, stds, normals)
        return TrainState(jnp.zeros([], jnp.int32), params, tx.init(params))

    @jax.jit
    def forward(params: Arrays, factors: Factors, batch: Batch) -> Arrays:
        return internals(
            definition.model(params, factors.multiplier, factors.forward), **_model_inputs(batch)
        )

    @functools.partial(jax.jit, compiler_options=options)
    def step(
        state: TrainState, initial: Arrays, start: Arrays, inputs: StepInputs, batch: Batch
    ) -> tuple[TrainState, Arrays, Arrays]:
        """Measure the model, then take one optimizer step.

        Return the state after the step, the updated `start`, and the observables before the step.

        Args:
            initial: Parameters before the first step, from which movements are measured.
            start: Activations before the first step, and masks of the rows of lookup tables that
                were read in any earlier step. At step 0 the present activations replace them.
        """
        factors = inputs.factors
        now = forward(state.params, factors, batch)
        # Taken out first, because `start` is replaced by activations alone below.
        rows_read = {name: start[name] for name in _rows_read(definition, state.params)}
        started = {}
        for name, x in now.items():
            started[name] = jnp.where(state.step == 0, x, start[name])
        start = started

        # The reference must be these initial parameters, which the caller's inputs do not know.
        centered = inputs._replace(reference=initial)
        grads, sums = gradients(definition, state.params, centered, dict(batch), 1)

        model = definition.model(state.params, factors.multiplier, factors.forward)
        is_tied = definition.tied_readout is not None
        stats = _activations(model, now, start, _model_inputs(batch), is_tied)
        stats["change logits"] = along_targets(now["logits"] - start["logits"], batch)
        stats[LOSS] = sums.loss / sums.weight
        read_now = _rows_read(definition, grads)
        weights = _Weights(initial, state.params, grads)
        stats |= _weights(definition, factors, weights, rows_read, read_now)

        # Rows are collected over all steps: under a readout that starts at zero, tables have no
        # gradient at the first step.
        start |= {name: rows_read[name] | mask for name, mask in read_now.items()}
        updates, opt_state = tx.update(
            grads, state.opt_state, state.params, factors=factors, hyper=inputs.hyper
        )
        new_params: Any = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, new_params, opt_state), start, stats

    def measure(
        seed: np.ndarray, inputs: StepInputs, stds: Arrays, batch: Batch, steps: int
    ) -> dict[str, np.ndarray]:
        state = begin(seed, stds)
        # Copied to the device once. Otherwise every call of `step` would copy the host arrays
        # again.
        inputs, batch = jax.device_put((inputs, dict(batch)))
        initial = state.params
        schedule = inputs.hyper.schedule

        # The first step replaces these zeros by its own activations.
        shapes = forward.eval_shape(initial, inputs.factors, batch)
        start = {}
        for name, leaf in shapes.items():
            start[name] = jnp.zeros(leaf.shape, leaf.dtype)
        for name, mask in _rows_read(definition, initial).items():
            start[name] = jnp.zeros_like(mask)

        records = []
        for count in range(-still_steps, steps + 1):
            # Updates that move nothing use the learning rate of step 0, so they use up no schedule.
            hyper = inputs.hyper._replace(schedule=schedule[max(count, 0)])
            now = inputs._replace(hyper=hyper)
            state, start, record = step(state, initial, start, now, batch)
            if count >= 0:
                records.append(record)
        # Read once at the end, because a read at every step would wait for the device.
        fetched = jax.device_get(records)
        stacked = {}
        for name in fetched[0]:
            stacked[name] = np.stack([record[name] for record in fetched])
        return stacked

    return measure


def _model_inputs(batch: Batch) -> dict[str, Any]:
    """Return the batch without targets and weights: the arrays that the model is called with."""
    return drop_keys(batch, ("targets", "weights"))


def _activations(model: Any, now: Arrays, start: Arrays, inputs: Batch, tied: bool) -> Arrays:
    """Return root mean squares of activations and of their changes, and a variance over heads.

    The key "X" is the activation X, and "change X" its change since initialization. Queries, keys
    and attention logits have "update X" in place of "change X": their change through their own
    weights alone, where present weights act on the inputs before training. Cross-attention has
    neither. "variance over heads" is that of the attention logits, if there are several heads.
    Values are float32 [], or [layers] for the activations in `_BY_LAYER`.

    With a tied readout, "logits" leaves out the logit of the input token itself. The key "contact
    logit" has this one. At initialization it is proportional to E_t . h / rms(h), with the token's
    embedding E_t and the stream h = E_t + other terms. It is a sum of D squares (D is the width),
    where every other logit is a sum of D products of either sign. It is therefore D^1/2 times
    larger: of order one under `mup`, whose other logits vanish as D^-1/2, and D^1/2 under `ntk`.

    Args:
        now: Activations of this step, from `internals`.
        start: Activations before the first step, by the same names.
        inputs: Arrays that the model is called with.
        tied: Whether the readout is tied to the embedding.
    """
    stats = {}
    for name, x in now.items():
        stats[name] = by_layer(x) if name in _BY_LAYER else rms(x)

    if tied:
        token_ids = inputs.get("decoder_inputs", inputs["inputs"])
        contact_BTV = jnp.arange(now["logits"].shape[-1]) == token_ids[..., None]
        stats["logits"] = rms(now["logits"], ~contact_BTV)
        stats["contact logit"] = rms(now["logits"], contact_BTV)

    for name, x in now.items():
        if name not in (*_BY_OWN_WEIGHTS, CROSS):
            stats[f"change {name}"] = rms(x - start[name])

    if "query" in now:
        # The present weights act on the initial inputs, because a change of the stream below would
        # hide what these weights do.
        graph, blocks = nnx.split(model.block)
        moved = jax.lax.map(
            lambda layer: _attention(nnx.merge(graph, layer[0]), layer[1]),
            (blocks, start["attended"]),
        )
        for name in _BY_OWN_WEIGHTS:
            stats[f"update {name}"] = rms(moved[name] - start[name])

    if "attention" in now and now["attention"].shape[2] > 1:
        stats["variance over heads"] = jnp.mean(jnp.var(now["attention"], axis=2))
    return stats


class _Weights(NamedTuple):
    """Stored parameters before the first step and now, and gradients of the loss, by name."""

    initial: Arrays
    params: Arrays
    grads: Arrays


def _rows_read(definition: Definition, grads: Arrays) -> Arrays:
    """Return masks of the rows of lookup tables, and of a readout bias's entries, with a gradient.

    Masks are bool [rows, 1], or [entries] for a bias, under the name "rows/PARAMETER".

    A gradient other than zero tells which rows the batch reads. This test works for every model:
    the parameter names of a user's model are unknown, and its encoder, its decoder or both may read
    the token table. A table that is also the readout has a gradient in every row, and then all rows
    count as read.
    """
    read_by_table: Arrays = {}
    for name, spec in definition.specs.items():
        row_axes = [index for index, axis in enumerate(spec.axes) if axis in ROW_AXES]
        looked_up = spec.role in LOOKED_UP and not spec.fan_in
        # A readout bias has no gradient before training at an output whose share of the targets is
        # exactly 1/V, the probability that a uniform softmax gives it.
        is_readout_bias = spec.role is Role.BIAS and spec.of is Role.READOUT
        if (looked_up or is_readout_bias) and row_axes and name in grads:
            # The axis of layers keeps its size: blocks of a stack have tables of their own.
            width_axes = []
            for index, axis in enumerate(spec.axes):
                if index not in row_axes and axis not in spec.copies:
                    width_axes.append(index)
            read_by_table[f"rows/{name}"] = jnp.any(
                grads[name] != 0, axis=tuple(width_axes), keepdims=True
            )
    return read_by_table


def _weights(
    definition: Definition, factors: Factors, weights: _Weights, rows_read: Arrays, read_now: Arrays
) -> Arrays:
    """Return root mean squares of every parameter's effective weight, movement and gradient.

    Their names are "weight/LABEL", "movement/LABEL" and "gradient/LABEL". Weight and movement
    (since initialization) include the multiplier. The gradient is divided by the parameter's factor
    on eps. Values are float32 [], or [layers] for stacked parameters.

    Args:
        rows_read: Masks of rows that had a gradient at any earlier step, from `_rows_read`.
            Movements are root mean squares over these rows.
        read_now: Masks of rows that have a gradient now. Gradients are root mean squares over these
            rows.
    """
    acting = multiplied(weights.params, factors.multiplier)
    initial = multiplied(weights.initial, factors.multiplier)
    stats: Arrays = {}
    for name, label in groups.labels(definition.specs).items():
        # Adam compares a gradient's size with eps, so only their ratio matters.
        gradient = weights.grads[name] / rows(factors.eps[name], weights.grads[name])
        movement = acting[name] - initial[name]
        measure = by_layer if definition.specs[name].stacked else rms
        stats[f"weight/{label}"] = measure(acting[name], None)
        stats[f"movement/{label}"] = measure(movement, rows_read.get(f"rows/{name}"))
        stats[f"gradient/{label}"] = measure(gradient, read_now.get(f"rows/{name}"))
    return stats


def along_targets(change: jax.Array, batch: Batch) -> jax.Array:
    """Return how far the targets' logits rise or fall against the mean of all logits, float32 [].

    The result is the absolute value of the weighted mean over targets. It is the observable "change
    logits".

    Args:
        change: Change of the logits, [B, V] or [B, T, V].
        batch: Batch with "targets" and "weights", [B] or [B, T].
    """
    of_targets = jnp.take_along_axis(change, batch["targets"][..., None], axis=-1)[..., 0]
    # Softmax ignores a shift of all logits, so only the rise above their mean counts.
    raised = of_targets - jnp.mean(change, axis=-1)
    return jnp.abs(jnp.sum(raised * batch["weights"])) / jnp.sum(batch["weights"])


def by_layer(x: jax.Array, where: jax.Array | None = None) -> jax.Array:
    """Return the root mean square over the entries of every layer, float32 [layers].

    Args:
        x: Array [layers, ...].
        where: Mask as for `rms`, with the same first axis as `x`. `None` counts all entries.
    """
    if where is None:
        return jax.vmap(rms)(x)
    return jax.vmap(rms)(x, where)


def rms(x: jax.Array, where: jax.Array | None = None) -> jax.Array:
    """Return the root mean square over all entries, or over those where a mask is true, float32 [].

    Args:
        where: Mask that broadcasts to the shape of `x`. `None` counts all entries. A mask that is
            false everywhere gives 0.
    """
    squares = jnp.square(x.astype(jnp.float32))
    if where is None:
        return jnp.sqrt(jnp.mean(squares))
    # A mask that is false everywhere gives 0, which is judged as frozen, and not 0 / 0.
    # The count must be of entries, and the mask may have axes of size 1.
    mask = jnp.broadcast_to(where, squares.shape)
    return jnp.sqrt(jnp.sum(squares, where=mask) / jnp.maximum(jnp.sum(mask), 1))


def internals(model: Any, inputs: jax.Array, **extra: jax.Array) -> Arrays:
    """Return the activations of one forward pass, by name.

    Every model has `logits`, its output. A model with `embed`, `block` and `read` (and `begin`, if
    blocks take more than the stream) also has:

    | name           | shape           | meaning                                               |
    |----------------|-----------------|-------------------------------------------------------|
    | `embedding`    | [B, T, D]       | stream before the first block                         |
    | `residual`     | [L, B, T, D]    | stream after each block                               |
    | `contribution` | [L, B, T, D]    | change of the stream by each block                    |
    | `CROSS`        | [L, B, T, D]    | output of cross-attention, if the block has it        |
    | `attended`     | [L, B, T, D]    | input of q, k and v, if the block has `attention`     |
    | `query`        | [L, B, T, H, N] | queries, if the block has `attention`                 |
    | `key`          | [L, B, S, K, N] | keys, if the block has `attention`                    |
    | `attention`    | [L, B, H, T, S] | logits of the softmax before any mask                 |

    Args:
        model: Model of the zoo, or any NNX model. The method `internals(inputs)` of a model, if it
            has one, returns its activations in place of these.
        **extra: Further arguments of an encoder-decoder: its padding mask and the inputs of the
            decoder, whose activations are returned.
    """
    if hasattr(model, "internals"):
        return {"logits": model(inputs, **extra), **model.internals(inputs)}
    if not all(hasattr(model, part) for part in ("embed", "block", "read")):
        return {"logits": model(inputs, **extra)}
    context: tuple[Any, ...] = ()
    if hasattr(model, "begin"):
        embedding, context = model.begin(inputs, **extra)
    else:
        embedding = model.embed(inputs)
    graph, stacked = nnx.split(model.block)
    # Models with two kinds of attention repeat a pattern of layers.
    period = getattr(model.block, "period", 1)

    def layer(h_BTD: jax.Array, state: nnx.State, place: int) -> tuple[jax.Array, Arrays]:
        block = nnx.merge(graph, state)
        if period != 1:
            block = block.at(place)
        out_BTD = block(h_BTD, *context)

        activations = {"residual": out_BTD, "contribution": out_BTD - h_BTD}
        if hasattr(block, "attention"):
            activations["attended"] = block.attention_norm(h_BTD)
            activations |= _attention(block, activations["attended"])
        if hasattr(block, "cross"):
            activations[CROSS] = _cross(block, h_BTD, activations["attended"], *context)
        return out_BTD, activations

    depth = jax.tree.leaves(stacked)[0].shape[0]
    out_BTD, layer_activations = over_layers(layer, embedding, stacked, depth, period)
    return {"embedding": embedding, **layer_activations, "logits": model.read(out_BTD)}


def _cross(
    block: Any,
    h_BTD: jax.Array,
    attended_BTD: jax.Array,
    memory_BSD: jax.Array,
    mask_BS: Any,
    bias: Any,
) -> jax.Array:
    """Return the branch of cross-attention that a block adds to the stream, [B, T, D].

    The branch has the block's residual scale. Cross-attention reads the stream after
    self-attention, which is computed here, too.

    Args:
        h_BTD: Stream before the block, [B, T, D].
        attended_BTD: Input of self-attention, after its norm, [B, T, D].
        memory_BSD: Output of the encoder, [B, S, D].
        mask_BS: True at positions of the encoder that are not padding.
        bias: Relative position bias of self-attention, or `None`.
    """
    h_BTD = block.add_branch(h_BTD, 0, block.attention(attended_BTD, None, bias))
    # Added to a stream of zeros, `add_branch` returns only the scaled branch.
    zeros_BTD = jnp.zeros_like(h_BTD)
    out_BTD = block.cross(block.cross_norm(h_BTD), memory_BSD, mask_BS)
    return block.add_branch(zeros_BTD, 1, out_BTD)


def _attention(block: Any, attended_BTD: jax.Array) -> Arrays:
    """Return the arrays `query`, `key` and `attention` of a block, by name, as in `internals`.

    Args:
        attended_BTD: Input of self-attention, after its norm, [B, T, D].
    """
    q_BTHN, k_BSKN, _ = block.attention.heads(attended_BTD)
    groups = q_BTHN.shape[2] // k_BSKN.shape[2]
    logits_BHTS = jnp.einsum("bthn,bshn->bhts", q_BTHN, jnp.repeat(k_BSKN, groups, axis=2))
    return {
        "query": q_BTHN,
        "key": k_BSKN,
        "attention": block.attention.logit_scale[...] * logits_BHTS,
    }
