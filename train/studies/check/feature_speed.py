"""Feature speed formula: how fast features move at a given moment, exactly and from one batch.

    ‖df_v/dt‖ = sum_{l <= v} η_l ‖∇_l‖² / (cos θ_v ‖b_v‖)

The formula is from Chizat and Netrapalli 2023 (arXiv 2311.18718). The feature f_v = layer_v(w_v,
f_{v-1}) is the output of layer v. Weights w_l with gradients ∇_l follow the flow dw_l/dt = -η_l
∇_l. The backward signal b_v is dLoss/df_v, and the angle θ_v lies between df_v/dt and -b_v. For
another optimizer with update u_l, η_l ‖∇_l‖² becomes η_l <∇_l, u_l>. The formula holds because
every path from w_l, l <= v, to the loss leads through f_v. It fails for a weight that acts in two
layers.

One backward pass gives every ∇_l and b_v, and one JVP every df_v/dt. There are no finite
differences. Time is in units of the learning rates (a step of SGD at peak_lr 1 is one), losses are
in nats, and norms are Frobenius norms over the whole batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from mupax.presets import EMBEDDINGS, PresetError
from mupax.train.core.factors import Factors
from mupax.zoo.definition import Arrays, Definition

Layer = Callable[[Any, Any], Any]
"""Function (weights, input) -> output of a layer. Input and output are pytrees of arrays."""
Flow = Callable[[Any], Any]
"""Function from gradients to velocities dw/dt of the same structure, such as -η ∇."""
Batch = Mapping[str, Any]


class Speeds(NamedTuple):
    """Speeds at one moment of training of a chain of V layers and a readout, float32.

    A feature is the output of a layer for the whole batch. Norms are Frobenius norms. Time is in
    units of the learning rate: a step of SGD at peak_lr 1 takes one unit.
    """

    loss: jax.Array
    feature: jax.Array
    """Norm of each feature, [V]."""
    speed: jax.Array
    """Norm of each feature's time derivative, [V]."""
    backward: jax.Array
    """Norm of the gradient of the loss with respect to each feature, [V]."""
    cosine: jax.Array
    """Cosine of the angle between a feature's time derivative and minus the gradient there, [V].

    NaN where a feature stands still.
    """
    contribution: jax.Array
    """Fall of the loss per unit of time by the weights of each layer and the readout, [V + 1]."""
    entries: jax.Array
    """Number of entries of each feature, including batch and positions, [V]."""

    @property
    def feature_rms(self) -> jax.Array:
        """RMS of each feature, [V]. The desideratum "signal propagation" asks for Θ(1)."""
        return self.feature / jnp.sqrt(self.entries)

    @property
    def speed_rms(self) -> jax.Array:
        """RMS of each feature's time derivative, [V].

        The desideratum "feature learning" asks for Θ(1) at the last layer.
        """
        return self.speed / jnp.sqrt(self.entries)

    @property
    def loss_decay(self) -> jax.Array:
        """Fall of the loss per unit of time, in nats, [].

        The desideratum "loss decay" asks for Θ(1), and "balance" for equal parts by layer.
        """
        return jnp.sum(self.contribution, axis=-1)


def measure(
    layers: Sequence[Layer],
    loss: Layer,
    params: Any,
    inputs: Any,
    flow: Flow,
    parts: Callable[[Any], list] = list,
) -> tuple[Speeds, Any]:
    """Measure how fast the output of every layer changes when weights follow a flow.

    The function is pure: it can be compiled by `jax.jit`, or mapped over seeds by `jax.vmap`.

    Args:
        layers: V functions (weights, input) -> output. The first takes `inputs`, each other the
            output of the layer before.
        loss: Function (weights of the readout, output of the last layer) -> loss, [].
        flow: Function from gradients (a pytree like `params`) to the velocities dw/dt of the
            weights, a pytree of the same structure.
        parts: Function that splits a pytree like `params` into V + 1 parts: the weights of every
            layer, then those of the readout. By default the pytree is a sequence of these parts.

    Returns:
        The speeds, and the gradients of the loss, a pytree like `params`.
    """

    def forward(params: Any, deltas: Sequence[Any]) -> tuple[jax.Array, list[Any]]:
        *weights, readout = parts(params)
        x = inputs
        features = []
        for layer, w, delta in zip(layers, weights, deltas, strict=True):
            x = layer(w, x)
            if delta is not None:
                # `tree.map`, because a feature of an encoder-decoder is a pair of streams.
                x = jax.tree.map(jnp.add, x, delta)
            features.append(x)
        return loss(readout, x), features

    shapes = jax.eval_shape(lambda p: forward(p, [None] * len(layers))[1], params)
    # A zero is added to the output of each layer. Its gradient is the backward signal there.
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    value_and_gradients = jax.value_and_grad(forward, argnums=(0, 1), has_aux=True)
    (value, features), (grads, signals) = value_and_gradients(params, zeros)

    velocities = flow(grads)
    # One JVP along the whole flow: df_v/dt sums over all weights before v at once.
    _, speeds = jax.jvp(lambda p: forward(p, zeros)[1], (params,), (velocities,))
    dots = jnp.stack([-dot(df, b) for df, b in zip(speeds, signals, strict=True)])
    speed = jnp.stack([norm(df) for df in speeds])
    backward = jnp.stack([norm(b) for b in signals])
    feature = jnp.stack([norm(f) for f in features])
    # 0 / 0 stays NaN on purpose: a feature that stands still has no angle.
    cosine = dots / (speed * backward)
    contributions = []
    for g, w in zip(parts(grads), parts(velocities), strict=True):
        # w = -lr u, so the minus makes a fall of the loss positive.
        contributions.append(-dot(g, w))
    contribution = jnp.stack(contributions)
    entries = []
    for f in features:
        entries.append(sum(x.size for x in jax.tree.leaves(f)))
    measured = Speeds(
        loss=value,
        feature=feature,
        speed=speed,
        backward=backward,
        cosine=cosine,
        contribution=contribution,
        entries=jnp.asarray(entries, jnp.float32),
    )
    return measured, grads


def dot(a: Any, b: Any) -> jax.Array:
    """Return the inner product of two pytrees with equal structure, float32 [].

    It is computed by elementwise products and sums, because matrix units may round their inputs.
    """
    products = jax.tree.map(
        lambda x, y: jnp.sum(x.astype(jnp.float32) * y.astype(jnp.float32)), a, b
    )
    return jax.tree.reduce(jnp.add, products, jnp.float32(0))


def norm(a: Any) -> jax.Array:
    """Return the Frobenius norm of a pytree, float32 []."""
    return jnp.sqrt(dot(a, a))


def of_model(
    definition: Definition,
    params: Arrays,
    factors: Factors,
    batch: Batch,
    flow: Flow,
    *,
    centered: bool = False,
) -> tuple[Speeds, Arrays]:
    """Measure how fast the output of every block changes, and return the gradients by name, too.

    Layers are the embedding and each block; the last norm belongs to the readout. Entry 0 of each
    speed is for the embedding, and entry i for the output of block i, counted from 1. An
    encoder-decoder is a chain, too: its layers are the embeddings, the encoder's blocks and the
    decoder's blocks, and the output of a layer is the pair of both streams. The output of the last
    layer is the decoder's stream alone.

    Args:
        definition: Definition of a ViT, an untied decoder or encoder-decoder, or any model with
            `embed(inputs)`, `block` (a module whose parameters are stacked along "layers") and
            `read(h)`.
        batch: `inputs`, `targets` and `weights` (see `mupax.train.core.step`), and for an
            encoder-decoder `decoder_inputs` and `input_mask`, too.
        flow: Function from gradients by name to the velocities dw/dt of the weights by name.
        centered: Whether the output is f(w) - f(w0). `params` must then be w0, the initial
            parameters.

    Raises:
        PresetError: The readout is tied, an encoder-decoder has relative positions, or the model
            lacks `embed`, `block`, `read` or an axis "layers".
    """
    refuse_tied(definition)

    def bound(weights: Arrays, index: int | None = None, stack: str = "block.") -> Any:
        """Return the model with `weights` in place of its own parameters of these names.

        With an `index` the weights are those of one layer, and the model gets a stack of one layer.
        Multipliers and the forward factors of `stack` are cut to that layer.

        Args:
            index: Index of the layer in its stack. `None` for weights outside of stacks.
            stack: Prefix of the names of the stack's forward factors.
        """
        multipliers = dict(factors.multiplier)
        forward = dict(factors.forward)
        if index is not None:
            # NNX blocks are stacks, so one layer is bound as a stack of length 1.
            layer_weights = dict(weights)
            for name, w in weights.items():
                if definition.specs[name].stacked:
                    layer_weights[name] = w[None]
                    multipliers[name] = multipliers[name][index : index + 1]
            weights = layer_weights
            for name, x in forward.items():
                if name.startswith(stack):
                    # Forward factors of the other stack (encoder or decoder) keep their own length.
                    forward[name] = x[index : index + 1]
        return definition.model({**params, **weights}, multipliers, forward)

    def first_layer(stacked: Any) -> Any:
        graph, state = nnx.split(stacked)
        return nnx.merge(graph, jax.tree.map(lambda w: w[0], state))

    def embed(weights: Arrays, inputs: jax.Array) -> jax.Array:
        return bound(weights).embed(inputs)

    def block(index: int, weights: Arrays, h_BTD: jax.Array) -> jax.Array:
        layer = first_layer(bound(weights, index).block)
        if getattr(layer, "period", 1) > 1:
            # Blocks may alternate between kinds of attention, and a stack of one layer has lost the
            # layer's index.
            layer = layer.at(index)
        return layer(h_BTD)

    def embed_both(weights: Arrays, batch: Batch) -> tuple[jax.Array, jax.Array]:
        model = bound(weights)
        # An encoder without a table of its own shares the decoder's.
        table = model.token if model.encoder.token is None else model.encoder.token
        return model.encoder.first(table, batch["inputs"]), model.embed(batch["decoder_inputs"])

    def encoder_block(
        index: int, weights: Arrays, streams: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        e_BSD, h_BTD = streams
        model = bound(weights, index, "encoder.block.")
        e_BSD = first_layer(model.encoder.block)(e_BSD, batch["input_mask"] > 0, None)
        if index == definition.sizes["encoder_layers"] - 1:
            # The last norm ends the encoder, because every decoder block reads its result.
            e_BSD = model.encoder.norm(e_BSD)
        return e_BSD, h_BTD

    def decoder_block(index: int, weights: Arrays, streams: tuple[jax.Array, jax.Array]) -> Any:
        memory_BSD, h_BTD = streams
        layer = first_layer(bound(weights, index).block)
        h_BTD = layer(h_BTD, memory_BSD, batch["input_mask"] > 0, None)
        is_last = index == definition.sizes["layers"] - 1
        # After the last block nothing reads the encoder's output, so it is no part of the last
        # feature.
        return h_BTD if is_last else (memory_BSD, h_BTD)

    def loss(weights: Arrays, h_BTD: jax.Array) -> jax.Array:
        logits = bound(weights).read(h_BTD)
        if centered:
            # At initialization the centered output is 0, but its gradient is that of f.
            logits = logits - jax.lax.stop_gradient(logits)
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return jnp.sum(nll * batch["weights"]) / jnp.sum(batch["weights"])

    parts = functools.partial(split, definition)
    model = bound({})
    is_encoder_decoder = hasattr(model, "begin")
    if is_encoder_decoder:
        _refuse_relative_positions(model)
        encoder_depth = definition.sizes["encoder_layers"]
        encoder = []
        for index in range(encoder_depth):
            encoder.append(functools.partial(encoder_block, index))
        depth = definition.sizes["layers"]
        decoder = [functools.partial(decoder_block, index) for index in range(depth)]
        return measure([embed_both, *encoder, *decoder], loss, params, batch, flow, parts)

    _refuse_other_parts(definition, model)
    blocks = []
    for index in range(definition.sizes["layers"]):
        blocks.append(functools.partial(block, index))
    return measure([embed, *blocks], loss, params, batch["inputs"], flow, parts)


def _refuse_relative_positions(model: Any) -> None:
    """Raise PresetError if the model has a table of relative positions."""
    if model.relative_bias is not None:
        raise PresetError(
            "a table of relative positions acts in every block of its stack, so no feature carries "
            "its whole effect and the formula does not hold; write positions=rotary "
            "(--model.positions rotary) to measure"
        )


def _refuse_other_parts(definition: Definition, model: Any) -> None:
    """Raise PresetError if the model has no embedding, stacked blocks and readout."""
    has_parts = all(callable(getattr(model, part, None)) for part in ("embed", "block", "read"))
    if "layers" not in definition.sizes or not has_parts:
        raise PresetError(
            "the model cannot be taken apart into layers; give it the methods embed(inputs) and "
            "read(h), and a module `block` whose parameters are stacked along 'layers' (or call "
            "feature_speed.measure with layers of your own)"
        )


def refuse_tied(definition: Definition) -> None:
    """Raise PresetError if the readout is tied to the embedding, whose table then acts twice."""
    if definition.tied_readout is not None:
        raise PresetError(
            "the readout is tied to the token embedding, which then acts both before every block "
            "and after the last: no feature carries its whole effect and the formula does not "
            "hold; write tied=False (--model.no-tied) to measure"
        )


def chain(definition: Definition) -> list[dict[str, int | None]]:
    """Return the parameters of every layer: embedding, blocks, and last norm with readout.

    A layer is a dict from the names of its parameters to the index of the layer in its stack, or to
    `None` for a parameter outside of stacks. Both embeddings of an encoder-decoder are one layer,
    because they may share a table. The encoder's last norm belongs to its last block.
    """
    embed = []
    encoder = []
    block = []
    memory = []
    read = []
    for name, spec in definition.specs.items():
        is_encoder = spec.part == "encoder"
        is_embedding = spec.role in EMBEDDINGS or spec.of in EMBEDDINGS
        if spec.stacked:
            (encoder if is_encoder else block).append(name)
        # The embedding's norm has the same role as the last norm, so only its name tells the two
        # apart.
        elif is_embedding or "embedding_norm" in name.split("."):
            embed.append(name)
        else:
            (memory if is_encoder else read).append(name)

    encoder_layers: list[dict[str, int | None]] = []
    if encoder:
        depth = definition.sizes["encoder_layers"]
        encoder_layers = [dict.fromkeys(encoder, index) for index in range(depth)]
    layers: list[dict[str, int | None]] = []
    if block:
        depth = definition.sizes["layers"]
        layers = [dict.fromkeys(block, index) for index in range(depth)]
    if memory:
        # `None` as index: the encoder's last norm is outside of the stack.
        encoder_layers[-1] |= dict.fromkeys(memory)
    return [dict.fromkeys(embed), *encoder_layers, *layers, dict.fromkeys(read)]


def split(definition: Definition, arrays: Arrays) -> list[Arrays]:
    """Return the arrays of every layer of `chain`, by parameter name.

    Args:
        arrays: Arrays by parameter name. The first axis is layers for a stacked parameter.
    """
    layers = []
    for layer in chain(definition):
        layer_arrays = {}
        for name, index in layer.items():
            layer_arrays[name] = arrays[name] if index is None else arrays[name][index]
        layers.append(layer_arrays)
    return layers
