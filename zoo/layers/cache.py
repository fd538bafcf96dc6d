"""Keys and values of what a decoder has read, so that its next token costs one position. All shapes are static.

L layers, B batch, K key heads, S longest context, N head dimension, H query heads, T new positions. Heads stand before
positions: a product with the keys of one head then reads memory in order.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mupax.zoo.layers.linear import softcapped
from mupax.zoo.transformer import TransformerConfig


class Cache(NamedTuple):
    """Positions 0 to length - 1 hold what was read; the rest is whatever lies there, and no query sees it."""

    keys: jax.Array
    """[L, B, K, S, N], rotated where positions are rotary."""
    values: jax.Array
    """[L, B, K, S, N], or of a size of their own."""
    length: jax.Array
    """int32 [], or int32 [B] where sequences that are read side by side have lengths of their own."""

    def put(self, layer: jax.Array | int, k_BTKN: jax.Array, v_BTKN: jax.Array) -> Cache:
        """The cache with T positions more from `length` on, which must fit; `length` stays.

        Args:
            layer: whose they are, from 0.
            k_BTKN: keys, rotated where positions are rotary.
            v_BTKN: values.
        """

        def updated(all_LBKSN: jax.Array, new_BTKN: jax.Array) -> jax.Array:
            new_LBKTN = new_BTKN.swapaxes(1, 2)[None].astype(all_LBKSN.dtype)
            zero = jnp.int32(0)  # a plain 0 is an int64 under JAX_ENABLE_X64
            layer_index = jnp.asarray(layer, jnp.int32)
            if self.length.ndim == 0:
                start = (layer_index, zero, zero, self.length, zero)
                return jax.lax.dynamic_update_slice(all_LBKSN, new_LBKTN, start)
            # A slice per sequence is written in place. A scatter of all at once would copy the cache on CPU.
            for row in range(new_BTKN.shape[0]):
                start = (layer_index, jnp.int32(row), zero, self.length[row], zero)
                all_LBKSN = jax.lax.dynamic_update_slice(
                    all_LBKSN, new_LBKTN[:, row : row + 1], start
                )
            return all_LBKSN

        return self._replace(keys=updated(self.keys, k_BTKN), values=updated(self.values, v_BTKN))

    def attend(
        self,
        layer: jax.Array | int,
        q_BTHN: jax.Array,
        bias_HTS: jax.Array | None = None,
        *,
        window: int | None = None,
        cap: float | None = None,
    ) -> jax.Array:
        """softmax(q.k) v of T queries, at the positions from `length` on, over everything up to each of them.

        Their own keys and values are in the cache already. Logits are taken as they are; softmax is in float32.

        Args:
            layer: whose keys and values they see, from 0.
            q_BTHN: queries, with the logit scale, and rotated as the keys are.
            bias_HTS: added to logits, of all positions there is room for.
            window: positions that a query sees, its own the last of them; all before it unless given.
            cap: of logits, before what is added to them.
        """
        batch, length, heads, size = q_BTHN.shape
        k_BKSN, v_BKSN = self.keys[layer], self.values[layer]
        kv_heads, source = k_BKSN.shape[1:3]
        # The G queries that share a key head, side by side (Q is G x T): one product reads its keys once.
        q_BTKGN = q_BTHN.reshape(batch, length, kv_heads, -1, size)
        q_BKQN = q_BTKGN.transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, size)
        logits_BKQS = jnp.einsum(
            "bkqn,bksn->bkqs", q_BKQN, k_BKSN, preferred_element_type=jnp.float32
        )
        # [], or [B, 1, 1, 1, 1] beside the logits where every sequence has its own.
        before = self.length[:, None, None, None, None] if self.length.ndim else self.length
        positions = before + jnp.arange(length)[:, None]
        mask = jnp.arange(source) <= positions
        if window is not None:
            mask &= jnp.arange(source) > positions - window
        logits_BKGTS = softcapped(logits_BKQS, cap).reshape(batch, kv_heads, -1, length, source)
        if bias_HTS is not None:
            logits_BKGTS = logits_BKGTS + bias_HTS.reshape(kv_heads, -1, length, source)
        weights_BKGTS = jax.nn.softmax(
            jnp.where(mask, logits_BKGTS, jnp.finfo(jnp.float32).min), axis=-1
        )
        weights_BKQS = weights_BKGTS.reshape(batch, kv_heads, -1, source).astype(v_BKSN.dtype)
        y_BKQN = jnp.einsum("bkqs,bksn->bkqn", weights_BKQS, v_BKSN)
        y_BKGTN = y_BKQN.reshape(batch, kv_heads, -1, length, v_BKSN.shape[-1])
        return (
            y_BKGTN.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, -1).astype(q_BTHN.dtype)
        )


def empty(config: TransformerConfig, batch: int) -> Cache:
    """A cache with nothing read.

    Args:
        config: of the decoder; S is its context.
        batch: B, sequences read side by side.
    """
    shape, size = (
        (config.depth, batch, config.kv_heads, config.sizes()["position"]),
        config.heads_dim,
    )
    dtype = jnp.dtype(config.compute.dtype)
    keys, values = (jnp.zeros((*shape, n), dtype) for n in (size, config.value_dim or size))
    return Cache(keys, values, jnp.int32(0))
