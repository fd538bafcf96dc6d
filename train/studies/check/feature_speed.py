"""The feature speed formula: how fast features move at a given moment, and why, exactly and from one batch.

    ‖df_v/dt‖ = sum_{l <= v} η_l ‖∇_l‖² / (cos θ_v ‖b_v‖)        (Chizat and Netrapalli 2023, arXiv 2311.18718)

for layers f_v = layer_v(w_v, f_{v-1}) and the flow dw_l/dt = -η_l ∇_l; b_v is dLoss/df_v, θ_v the angle between df_v/dt
and -b_v (the backward-feature angle). For another optimizer with update u_l, η_l ‖∇_l‖² becomes η_l <∇_l, u_l>. It holds
because every path from w_l, l <= v, to the loss leads through f_v; a weight that acts twice breaks it.
One backward pass gives every ∇_l and b_v, one JVP every df_v/dt; nothing is a finite difference.

Time is in units of the rates (a step of SGD at peak_lr 1 is one), losses in nats, norms are Frobenius over the whole batch.
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
"""(weights, output of the layer before) to its own output: an array, or a tree of them that is one vector."""
Flow = Callable[[Any], Any]
"""Gradients to velocities dw/dt of the same structure, such as -η ∇."""
Batch = Mapping[str, Any]


class Speeds(NamedTuple):
    """One moment of a chain of V layers and a readout under a flow. float32; v counts layers, l layers and readout."""

    loss: jax.Array
    feature: jax.Array
    """‖f_v‖, [V]."""
    speed: jax.Array
    """‖df_v/dt‖, [V]."""
    backward: jax.Array
    """‖b_v‖, [V]."""
    cosine: jax.Array
    """cos θ_v, [V]; not a number where a feature stands still."""
    contribution: jax.Array
    """-<∇_l, dw_l/dt> = η_l <∇_l, u_l>, what layer l takes off the loss per unit of time, [V + 1]."""
    entries: jax.Array
    """Numbers in f_v, batch and positions included: m of the desiderata, [V]."""

    @property
    def feature_rms(self) -> jax.Array:
        """Signal propagation asks for Θ(1), [V]."""
        return self.feature / jnp.sqrt(self.entries)

    @property
    def speed_rms(self) -> jax.Array:
        """Feature learning asks for Θ(1) at the last layer, [V]."""
        return self.speed / jnp.sqrt(self.entries)

    @property
    def loss_decay(self) -> jax.Array:
        """|dLoss/dt| in nats, Θ(1) if loss decays, []. Balanced contributions: each layer has an equal part."""
        return jnp.sum(self.contribution, axis=-1)


def measure(
    layers: Sequence[Layer],
    loss: Layer,
    params: Any,
    inputs: Any,
    flow: Flow,
    parts: Callable[[Any], list] = list,
) -> tuple[Speeds, Any]:
    """Every quantity of the formula, and the gradients. Pure: jit it, or vmap it over seeds.

    Args:
        layers: V of them, each seeing only the one before; the first takes the input.
        loss: from the readout's weights and the last feature, [].
        params: floating-point arrays.
        inputs: of the first layer.
        flow: gradients (a tree like `params`) to velocities.
        parts: such a tree to V + 1: every layer's and the readout's.
    """

    def forward(params: Any, deltas: Sequence[Any]) -> tuple[jax.Array, list[Any]]:
        x, features, (*weights, readout) = inputs, [], parts(params)
        for layer, w, delta in zip(layers, weights, deltas, strict=True):
            x = layer(w, x)
            x = x if delta is None else jax.tree.map(jnp.add, x, delta)
            features.append(x)
        return loss(readout, x), features

    shapes = jax.eval_shape(lambda p: forward(p, [None] * len(layers))[1], params)
    # A zero added to what each layer gives: its gradient is the backward signal there.
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    (value, features), (grads, signals) = jax.value_and_grad(forward, argnums=(0, 1), has_aux=True)(
        params, zeros
    )
    velocities = flow(grads)
    _, speeds = jax.jvp(lambda p: forward(p, zeros)[1], (params,), (velocities,))
    dots = jnp.stack([-dot(df, b) for df, b in zip(speeds, signals, strict=True)])
    speed, backward = jnp.stack([norm(df) for df in speeds]), jnp.stack([norm(b) for b in signals])
    return Speeds(
        loss=value,
        feature=jnp.stack([norm(f) for f in features]),
        speed=speed,
        backward=backward,
        cosine=dots / (speed * backward),
        contribution=jnp.stack(
            [-dot(g, w) for g, w in zip(parts(grads), parts(velocities), strict=True)]
        ),
        entries=jnp.asarray(
            [sum(x.size for x in jax.tree.leaves(f)) for f in features], jnp.float32
        ),
    ), grads


def dot(a: Any, b: Any) -> jax.Array:
    """Inner product of two trees, float32 []. Products and sums, so that no matrix unit rounds them.

    Args:
        a, b: of one structure, with leaves of equal shapes.
    """
    parts = jax.tree.map(lambda x, y: jnp.sum(x.astype(jnp.float32) * y.astype(jnp.float32)), a, b)
    return jax.tree.reduce(jnp.add, parts, jnp.float32(0))


def norm(a: Any) -> jax.Array:
    """Frobenius norm of a tree, float32 []."""
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
    """`measure` for a model of the zoo: layers are the embedding and each block, with norm and readout last.

    An encoder-decoder is a chain, too, once a feature is the pair of both streams: embeddings, encoder's blocks, decoder's blocks.
    The last block's feature is the decoder's stream alone.

    Args:
        definition: of a ViT, an untied decoder or encoder-decoder, or any model with `embed(inputs)`, `block` (one module whose
            parameters are stacked along "layers") and `read(h)`.
        params: where to measure.
        factors: multipliers of the forward pass.
        batch: `inputs`, `targets`, `weights` (see `mupax.train.core.step`).
        flow: gradients by name to velocities by name.
        centered: the output is f - f at initialization, and this is initialization.

    Returns:
        The speeds (feature 0 is the embedding, feature i what block i gives), and the gradients by name.

    Raises:
        PresetError: a tied readout (`refuse_tied`), relative positions, or a model that is not made of these parts.
    """
    refuse_tied(definition)

    def bound(own: Arrays, index: int | None = None, stack: str = "block.") -> Any:
        multipliers, forward = dict(factors.multiplier), dict(factors.forward)
        if index is not None:
            # One layer of the stack, as a stack of one.
            layer = {name for name in own if definition.specs[name].stacked}
            own = {name: w[None] if name in layer else w for name, w in own.items()}
            multipliers |= {name: multipliers[name][index : index + 1] for name in layer}
            forward |= {
                name: x[index : index + 1] for name, x in forward.items() if name.startswith(stack)
            }
        return definition.model({**params, **own}, multipliers, forward)

    def one(stacked: Any) -> Any:
        graph, state = nnx.split(stacked)
        return nnx.merge(graph, jax.tree.map(lambda w: w[0], state))

    def block(index: int, own: Arrays, h_BTD: jax.Array) -> jax.Array:
        own_block = one(bound(own, index).block)
        return (own_block.at(index) if getattr(own_block, "period", 1) > 1 else own_block)(h_BTD)

    def embeddings(own: Arrays, batch: Batch) -> tuple[jax.Array, jax.Array]:
        model = bound(own)
        table = model.token if model.encoder.token is None else model.encoder.token
        return model.encoder.first(table, batch["inputs"]), model.embed(batch["decoder_inputs"])

    def encoder_block(
        index: int, own: Arrays, streams: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        (e_BSD, h_BTD), model = streams, bound(own, index, "encoder.block.")
        e_BSD = one(model.encoder.block)(e_BSD, batch["input_mask"] > 0, None)
        last = index == definition.sizes["encoder_layers"] - 1
        return model.encoder.norm(e_BSD) if last else e_BSD, h_BTD

    def decoder_block(index: int, own: Arrays, streams: tuple[jax.Array, jax.Array]) -> Any:
        memory_BSD, h_BTD = streams
        h_BTD = one(bound(own, index).block)(h_BTD, memory_BSD, batch["input_mask"] > 0, None)
        return h_BTD if index == definition.sizes["layers"] - 1 else (memory_BSD, h_BTD)

    def loss(own: Arrays, h_BTD: jax.Array) -> jax.Array:
        logits = bound(own).read(h_BTD)
        logits = logits - jax.lax.stop_gradient(logits) if centered else logits
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return jnp.sum(nll * batch["weights"]) / jnp.sum(batch["weights"])

    parts = functools.partial(split, definition)
    if hasattr(model := bound({}), "begin"):
        if model.relative_bias is not None:
            raise PresetError(
                "a table of relative positions acts in every block of its stack, so no feature carries its whole effect and the "
                "formula does not hold; write positions=rotary (--model.positions rotary) to measure"
            )
        encoder = [
            functools.partial(encoder_block, index)
            for index in range(definition.sizes["encoder_layers"])
        ]
        decoder = [
            functools.partial(decoder_block, index) for index in range(definition.sizes["layers"])
        ]
        return measure([embeddings, *encoder, *decoder], loss, params, batch, flow, parts)
    if "layers" not in definition.sizes or not all(
        callable(getattr(model, part, None)) for part in ("embed", "block", "read")
    ):
        raise PresetError(
            "the model cannot be taken apart into layers; give it the methods embed(inputs) and read(h), and a module "
            "`block` whose parameters are stacked along 'layers' (or call feature_speed.measure with layers of your own)"
        )
    blocks = [functools.partial(block, index) for index in range(definition.sizes["layers"])]
    layers = [lambda own, inputs: bound(own).embed(inputs), *blocks]
    return measure(layers, loss, params, batch["inputs"], flow, parts)


def refuse_tied(definition: Definition) -> None:
    """Raises PresetError where the readout shares the token embedding's table: the formula does not hold for it."""
    if definition.tied_readout is not None:
        raise PresetError(
            "the readout is tied to the token embedding, which then acts both before every block and after the last: "
            "no feature carries its whole effect and the formula does not hold; write tied=False (--model.no-tied) to measure"
        )


def chain(definition: Definition) -> list[dict[str, int | None]]:
    """Parameters of every layer by name, with the layer's index in its stack or None outside: embedding, blocks, norm and readout.

    Of an encoder-decoder both embeddings are one layer, as they may share a table, and the encoder's last norm is its last block's.
    """
    embed, encoder, block, memory, read = [], [], [], [], []
    for name, spec in definition.specs.items():
        of_encoder = spec.part == "encoder"
        if spec.stacked:
            (encoder if of_encoder else block).append(name)
        elif (
            spec.role in EMBEDDINGS or spec.of in EMBEDDINGS or "embedding_norm" in name.split(".")
        ):
            embed.append(name)
        else:
            (memory if of_encoder else read).append(name)
    stacks: list[list[dict[str, int | None]]] = [
        [dict.fromkeys(names, index) for index in range(definition.sizes[axis])] if names else []
        for names, axis in ((encoder, "encoder_layers"), (block, "layers"))
    ]
    if memory:
        stacks[0][-1] |= dict.fromkeys(memory)
    return [dict.fromkeys(embed), *stacks[0], *stacks[1], dict.fromkeys(read)]


def split(definition: Definition, arrays: Arrays) -> list[Arrays]:
    """Arrays by name as a list over the layers of `chain`.

    Args:
        definition: of the model.
        arrays: a parameter's name to an array whose first axis is layers where it is stacked.
    """
    return [
        {
            name: arrays[name] if index is None else arrays[name][index]
            for name, index in layer.items()
        }
        for layer in chain(definition)
    ]
