"""The zoo's transformers cut into their mappings: what each gives, with zeros to add and inputs to hold.

B batch, T and S positions, H heads, K key heads, N head dimension, D width, F hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from mupax.zoo.definition import Arrays
from mupax.zoo.layers.linear import GATES, biased, project

Batch = Mapping[str, Any]
Hold = Callable[[Any], Any]
"""Applied to what a mapping reads, such as `jax.lax.stop_gradient`."""


class Cutting:
    """A block's forward pass by mappings; `outputs` has what each gave.

    Args:
        zeros: by mapping, added to it.
        hold: applied to what a mapping reads.
        masked: a causal model sees no later positions.
        label: before every name, as "encoder ".
    """

    def __init__(self, zeros: Arrays, hold: Hold, *, masked: bool, label: str) -> None:
        self.zeros, self.hold, self.masked, self.label = zeros, hold, masked, label
        self.outputs: Arrays = {}

    def mapping(self, name: str, x: jax.Array) -> jax.Array:
        """x with its zeros, kept.

        Args:
            name: of the mapping in its stack.
            x: what it gives.
        """
        name = self.label + name
        self.outputs[name] = x + self.zeros[name] if name in self.zeros else x
        return self.outputs[name]

    def attended(
        self, attention: Any, heads: tuple[jax.Array, ...], bias_HTS: jax.Array | None = None, part: str = ""
    ) -> jax.Array:
        """What an attention writes, [B, T, D].

        Args:
            attention: the module of one layer.
            heads: its queries, keys and values.
            bias_HTS: added to logits.
            part: before the names of its mappings, as "cross ".
        """
        q_BTHN, k_BSKN, v_BSKN = (self.mapping(part + name, x) for name, x in zip("qkv", heads, strict=True))
        groups = q_BTHN.shape[2] // k_BSKN.shape[2]
        k_BSHN, v_BSHN = (jnp.repeat(x, groups, axis=2) for x in (k_BSKN, v_BSKN))
        logits_BHTS = attention.logit_scale[...] * jnp.einsum("bthn,bshn->bhts", q_BTHN, k_BSHN)
        logits_BHTS = self.mapping(f"{part}logits", logits_BHTS)
        if bias_HTS is not None:
            logits_BHTS = logits_BHTS + bias_HTS
        if attention.causal and self.masked:
            mask_TS = jnp.tri(*logits_BHTS.shape[-2:], dtype=bool)
            logits_BHTS = jnp.where(mask_TS, logits_BHTS, jnp.finfo(jnp.float32).min)
        weights_BHTS = self.mapping(f"{part}softmax", jax.nn.softmax(logits_BHTS))
        o_BTHN = self.mapping(f"{part}o", jnp.einsum("bhts,bshn->bthn", self.hold(weights_BHTS), v_BSHN))
        out_BTD = biased(project(self.hold(o_BTHN), attention.out[...], inputs=2), attention.out_bias)
        return self.mapping(f"{part}attention out", out_BTD)

    def written(self, mlp: Any, x_BTD: jax.Array) -> jax.Array:
        """What an MLP writes, [B, T, D].

        Args:
            mlp: the module of one layer.
            x_BTD: the stream after its norm.
        """
        act_BTF = up_BTF = self.mapping("MLP in", biased(project(x_BTD, mlp.up[...]), mlp.up_bias))
        if mlp.gate is not None:
            act_BTF = GATES[mlp.activation](biased(project(x_BTD, mlp.gate[...]), mlp.gate_bias)) * up_BTF
        elif mlp.activation == "relu":
            act_BTF = jax.nn.relu(up_BTF)
        else:
            act_BTF = jax.nn.gelu(up_BTF, approximate=mlp.activation != "gelu_exact")
        act_BTF = self.mapping("activation", act_BTF)
        return self.mapping("MLP out", biased(project(self.hold(act_BTF), mlp.down[...]), mlp.down_bias))

    def block(
        self, block: Any, h_BTD: jax.Array, bias_HTS: jax.Array | None, memory_BSD: jax.Array | None
    ) -> jax.Array:
        """The stream after a block of the zoo.

        Args:
            block: of one layer.
            h_BTD: the stream before it.
            bias_HTS: of relative positions.
            memory_BSD: what its cross-attention reads; None without one.
        """
        heads = block.attention.heads(self.hold(block.attention_norm(h_BTD)))
        h_BTD, branch = block.added(h_BTD, 0, self.attended(block.attention, heads, bias_HTS)), 1
        if memory_BSD is not None:
            queries = block.cross.queries(self.hold(block.cross_norm(h_BTD)))
            heads = (queries, *block.cross.keys(self.hold(memory_BSD)))
            h_BTD, branch = block.added(h_BTD, 1, self.attended(block.cross, heads, part="cross ")), 2
        return block.added(h_BTD, branch, self.written(block.mlp, self.hold(block.mlp_norm(h_BTD))))


def forward(model: Any, batch: Batch, zeros: Arrays, hold: Hold, *, masked: bool = True) -> tuple[jax.Array, Arrays]:
    """The loss, mean over tokens, and what all mappings give: those of blocks with an axis of layers first.

    Args:
        model: of the zoo's transformers; an encoder-decoder without padding.
        batch: `inputs`, `targets`, and `decoder_inputs` where there is an encoder.
        zeros: by mapping, added to it in every layer.
        hold: applied to what a mapping reads.
        masked: a causal model sees no later positions.
    """
    outputs: Arrays = {}

    def stack(
        block: Any,
        embedding: jax.Array,
        bias_HTS: jax.Array | None = None,
        memory_BSD: jax.Array | None = None,
        label: str = "",
    ) -> jax.Array:
        graph, stacked = nnx.split(block)
        ends = {f"{label}embedding", f"{label}stream"}
        own = {name: x for name, x in zeros.items() if name.startswith("encoder ") == bool(label) and name not in ends}

        def layer(h_BTD: jax.Array, of: tuple[nnx.State, Arrays]) -> tuple[jax.Array, Arrays]:
            cutting = Cutting(of[1], hold, masked=masked, label=label)
            return cutting.block(nnx.merge(graph, of[0]), h_BTD, bias_HTS, memory_BSD), cutting.outputs

        embedding = embedding + zeros.get(f"{label}embedding", 0.0)
        h_BTD, each = jax.lax.scan(layer, embedding, (stacked, own))
        h_BTD = h_BTD + zeros.get(f"{label}stream", 0.0)
        outputs.update({**each, f"{label}embedding": embedding, f"{label}stream": h_BTD})
        return h_BTD

    encoder, tokens = getattr(model, "encoder", None), batch["inputs"]
    if encoder is None:
        stream = stack(model.block, model.embed(tokens))
    else:
        source = encoder.first(model.token if encoder.token is None else encoder.token, tokens)
        e_BSD = stack(encoder.block, source, encoder.bias(*[tokens.shape[1]] * 2), label="encoder ")
        tokens = batch["decoder_inputs"]
        bias_HTT = model.bias(*[tokens.shape[1]] * 2)
        stream = stack(model.block, model.embed(tokens), bias_HTT, encoder.norm(e_BSD))
    nll = optax.softmax_cross_entropy_with_integer_labels(model.read(stream), batch["targets"])
    return jnp.mean(nll), outputs
