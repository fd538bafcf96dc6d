"""A block cut into its mappings: what each gives, how fast it moves by its own weights, and the backward signal there.

Exact and from one batch: backward signals are gradients of zeros that are added to every mapping (one VJP), own speeds one JVP of
the same program with every mapping's inputs held fixed. What they should be as one dimension grows is computed by
`mupax.presets.analysis.desiderata`.

L layers, B batch, T and S positions, H heads, N head dimension, D width, F hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from mupax.presets.analysis.desiderata import NAMES
from mupax.train.core.factors import Factors
from mupax.zoo.definition import Arrays, Definition
from mupax.zoo.layers.linear import biased, project

Batch = Mapping[str, Any]


class Mappings(NamedTuple):
    """One model at one moment; by mapping, root mean squares over all layers, tokens and entries, float32 []."""

    signal: Arrays
    speed: Arrays
    """Of every mapping by its own weights alone, with an equal part of the loss's decay from every weight and layer."""
    backward: Arrays
    parts: Arrays
    """rate ‖∇‖² of every weight under the preset's own rates, by name, all layers together."""


def cut(
    block: Any, h_BTD: jax.Array, zeros: Arrays, hold: Callable[[Any], Any], *, masked: bool = True
) -> tuple[jax.Array, Arrays]:
    """The stream after a block of the zoo, and what its mappings give.

    Args:
        block: an `mupax.zoo.layers.block.Block` of one layer.
        h_BTD: the stream before it.
        zeros: added to the mappings of these names.
        hold: applied to what a mapping reads, such as `jax.lax.stop_gradient`.
        masked: a causal model sees no later positions.
    """
    seen: Arrays = {}

    def mapping(name: str, x: jax.Array) -> jax.Array:
        seen[name] = x + zeros[name] if name in zeros else x
        return seen[name]

    attention, mlp = block.attention, block.mlp
    q_BTHN, k_BSKN, v_BSKN = attention.heads(hold(block.attention_norm(h_BTD)))
    q_BTHN, k_BSKN, v_BSKN = mapping("q", q_BTHN), mapping("k", k_BSKN), mapping("v", v_BSKN)
    groups = q_BTHN.shape[2] // k_BSKN.shape[2]
    k_BSHN, v_BSHN = (jnp.repeat(x, groups, axis=2) for x in (k_BSKN, v_BSKN))
    logits = mapping("logits", attention.logit_scale[...] * jnp.einsum("bthn,bshn->bhts", q_BTHN, k_BSHN))
    if attention.causal and masked:
        logits = jnp.where(jnp.tri(*logits.shape[-2:], dtype=bool), logits, jnp.finfo(jnp.float32).min)
    weights_BHTS = mapping("softmax", jax.nn.softmax(logits))
    o_BTHN = mapping("o", jnp.einsum("bhts,bshn->bthn", hold(weights_BHTS), v_BSHN))
    out_BTD = biased(project(hold(o_BTHN), attention.out[...], inputs=2), attention.out_bias)
    h_BTD = block.added(h_BTD, 0, mapping("attention out", out_BTD))
    x_BTD = hold(block.mlp_norm(h_BTD))
    act_BTF = up_BTF = mapping("MLP in", biased(project(x_BTD, mlp.up[...]), mlp.up_bias))
    if mlp.gate is not None:
        act_BTF = jax.nn.silu(biased(project(x_BTD, mlp.gate[...]), mlp.gate_bias)) * up_BTF
    elif mlp.activation == "relu":
        act_BTF = jax.nn.relu(up_BTF)
    else:
        act_BTF = jax.nn.gelu(up_BTF, approximate=mlp.activation != "gelu_exact")
    act_BTF = mapping("activation", act_BTF)
    out_BTD = mapping("MLP out", biased(project(hold(act_BTF), mlp.down[...]), mlp.down_bias))
    return block.added(h_BTD, 1, out_BTD), seen


def forward(
    model: Any, batch: Batch, zeros: Arrays, hold: Callable[[Any], Any], *, masked: bool = True
) -> tuple[jax.Array, Arrays]:
    """The loss, mean over tokens, and what all mappings give: those of blocks with an axis of layers first.

    Args:
        model: of the zoo's transformers.
        batch: `inputs`, `targets`.
        zeros: by mapping, added to it in every layer.
        hold, masked: as `cut`.
    """
    graph, stacked = nnx.split(model.block)
    embedding = model.embed(batch["inputs"]) + zeros.get("embedding", 0.0)
    of_blocks = {name: zero for name, zero in zeros.items() if name not in ("embedding", "stream")}

    def layer(h_BTD: jax.Array, own: tuple[nnx.State, Arrays]) -> tuple[jax.Array, Arrays]:
        return cut(nnx.merge(graph, own[0]), h_BTD, own[1], hold, masked=masked)

    h_BTD, seen = jax.lax.scan(layer, embedding, (stacked, of_blocks))
    stream = h_BTD + zeros.get("stream", 0.0)
    nll = optax.softmax_cross_entropy_with_integer_labels(model.read(stream), batch["targets"])
    return jnp.mean(nll), {**seen, "embedding": embedding, "stream": stream}


def measure(definition: Definition, params: Arrays, factors: Factors, batch: Batch, *, masked: bool = True) -> Mappings:
    """All of a model where it stands. Pure: jit it, or map it over seeds.

    Args:
        definition: a transformer of the zoo with a readout of its own.
        params: where to measure.
        factors: multipliers, and the rates of SGD that `parts` are under.
        batch: `inputs`, `targets`.
        masked: as `cut`.
    """

    def loss(params: Arrays, zeros: Arrays, hold: Callable[[Any], Any] = lambda x: x) -> tuple[jax.Array, Arrays]:
        model = definition.model(params, factors.multiplier, factors.forward)
        return forward(model, batch, zeros, hold, masked=masked)

    shapes = jax.eval_shape(lambda p: loss(p, {})[1], params)
    zeros = {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in shapes.items()}
    (gradients, signals), seen = jax.grad(loss, argnums=(0, 1), has_aux=True)(params, zeros)
    layers = definition.sizes["layers"]
    flow, parts = {}, {}
    for name, g in gradients.items():
        stacked = definition.specs[name].stacked
        squares = jnp.sum(g.reshape(layers if stacked else 1, -1) ** 2, axis=1)
        moves = name in NAMES or name == "block.mlp.gate"
        rate = jnp.where(squares > 0, 1 / (layers if stacked else 1) / squares, 0.0) * moves
        flow[name] = -g * rate.reshape(-1, *[1] * (g.ndim - 1)) if stacked else -g * rate[0]
        if name in NAMES:
            parts[NAMES[name]] = jnp.sum(factors.lr[name] * squares)
    _, speeds = jax.jvp(lambda p: loss(p, {}, jax.lax.stop_gradient)[1], (params,), (flow,))
    seen["branches"] = (seen["stream"] - seen["embedding"]) / _rms(seen["stream"])
    signal, speed, backward = (jax.tree.map(_rms, dict(x)) for x in (seen, speeds, signals))
    return Mappings(signal, speed, backward, parts)


def _rms(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32))))
