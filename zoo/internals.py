"""What happens inside a model: activations by name, for probes. The models themselves record nothing and pay nothing.

Shapes: L layers, B batch, T and S positions, H heads, K key heads, N head dimension, D width.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

LAYERED = ("residual", "contribution", "query", "key", "attention")
"""Activations with a leading layer axis in what `internals` returns."""


def internals(model: Any, inputs: jax.Array) -> dict[str, jax.Array]:
    """Activations of one forward pass.

    Args:
        model: a zoo model, or any NNX model. One with a method `internals(inputs)` says itself what it shows.
        inputs: what the model is called with.

    Returns:
        For a zoo model `embedding` [B, T, D], and per layer `residual` [L, B, T, D] (after the block), `contribution`
        (what the block added), `query` [L, B, T, H, N], `key` [L, B, S, K, N], `attention` [L, B, H, T, S] (logits as
        they enter the softmax, before any mask); for every model `logits`, its output.
    """
    if hasattr(model, "internals"):
        return {"logits": model(inputs), **model.internals(inputs)}
    if not hasattr(model, "block"):
        return {"logits": model(inputs)}
    graph, stacked = nnx.split(model.block)

    def layer(h_BTD: jax.Array, state: nnx.State) -> tuple[jax.Array, dict[str, jax.Array]]:
        block = nnx.merge(graph, state)
        q_BTHN, k_BSKN, _ = block.attention.heads(block.attention_norm(h_BTD))
        groups = q_BTHN.shape[2] // k_BSKN.shape[2]
        logits_BHTS = jnp.einsum("bthn,bshn->bhts", q_BTHN, jnp.repeat(k_BSKN, groups, axis=2))
        out_BTD = block(h_BTD)
        return out_BTD, {
            "residual": out_BTD,
            "contribution": out_BTD - h_BTD,
            "query": q_BTHN,
            "key": k_BSKN,
            "attention": block.attention.logit_scale[...] * logits_BHTS,
        }

    embedding = model.embed(inputs)
    _, found = jax.lax.scan(layer, embedding, stacked)
    return {"embedding": embedding, **found, "logits": model(inputs)}
