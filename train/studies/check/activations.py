"""What happens inside a model: activations by name, for probes. The models themselves record nothing and pay nothing.

Shapes: L layers, B batch, T and S positions, H heads, K key heads, N head dimension, D width.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


def internals(model: Any, inputs: jax.Array) -> dict[str, jax.Array]:
    """Activations of one forward pass.

    Args:
        model: a zoo model, or any NNX model. One with a method `internals(inputs)` is asked instead.
        inputs: what the model is called with.

    Returns:
        For a model with `embed`, `block` and `read`: `embedding` [B, T, D], and per layer `residual` [L, B, T, D] (after the
        block) and `contribution` (what the block added); where the block has `attention` also `attended` [L, B, T, D]
        (input of q, k, v), `query` [L, B, T, H, N], `key` [L, B, S, K, N], `attention` [L, B, H, T, S] (logits as they
        enter the softmax, before any mask). For every model `logits`, its output.
    """
    if hasattr(model, "internals"):
        return {"logits": model(inputs), **model.internals(inputs)}
    if not all(hasattr(model, part) for part in ("embed", "block", "read")):
        return {"logits": model(inputs)}
    graph, stacked = nnx.split(model.block)

    def layer(h_BTD: jax.Array, state: nnx.State) -> tuple[jax.Array, dict[str, jax.Array]]:
        block = nnx.merge(graph, state)
        out_BTD = block(h_BTD)
        here = {"residual": out_BTD, "contribution": out_BTD - h_BTD}
        if hasattr(block, "attention"):
            here["attended"] = block.attention_norm(h_BTD)
            here |= _attention(block, here["attended"])
        return out_BTD, here

    embedding = model.embed(inputs)
    out_BTD, by_layer = jax.lax.scan(layer, embedding, stacked)
    return {"embedding": embedding, **by_layer, "logits": model.read(out_BTD)}


def attention_of(model: Any, attended_LBTD: jax.Array) -> dict[str, jax.Array]:
    """Queries, keys and attention logits of every layer for given inputs of the attention matrices (`attended`)."""
    graph, stacked = nnx.split(model.block)
    return jax.lax.map(lambda layer: _attention(nnx.merge(graph, layer[0]), layer[1]), (stacked, attended_LBTD))


def _attention(block: Any, attended_BTD: jax.Array) -> dict[str, jax.Array]:
    q_BTHN, k_BSKN, _ = block.attention.heads(attended_BTD)
    groups = q_BTHN.shape[2] // k_BSKN.shape[2]
    logits_BHTS = jnp.einsum("bthn,bshn->bhts", q_BTHN, jnp.repeat(k_BSKN, groups, axis=2))
    return {"query": q_BTHN, "key": k_BSKN, "attention": block.attention.logit_scale[...] * logits_BHTS}
