"""Cache of keys and values, so that a decoder's next token costs one position.

All shapes are static. L layers, B batch, K key heads, S longest context, N head dimension, H query
heads, G query heads per key head, T new positions, Q queries of a key head (G x T). Heads stand
before positions, so that a product with the keys of one head reads memory in order.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mupax.zoo.layers.linear import softcapped
from mupax.zoo.transformer import TransformerConfig


class Cache(NamedTuple):
    """Keys and values of all layers, valid at positions 0 to length - 1.

    Later positions can hold any numbers. Attention masks them.
    """

    keys: jax.Array
    """[L, B, K, S, N], already rotated if positions are rotary."""
    values: jax.Array
    """[L, B, K, S, N]. Their N can differ from that of the keys."""
    length: jax.Array
    """int32 [], or int32 [B] if sequences of a batch have different lengths."""

    def put(self, layer: jax.Array | int, k_BTKN: jax.Array, v_BTKN: jax.Array) -> Cache:
        """Return the cache with T more positions of one layer, written from `length` on.

        The positions must fit into the cache, otherwise they overwrite earlier ones without an
        error. `length` does not change. The caller increases it once all layers are written.

        Args:
            layer: Index of the layer, from 0.
            k_BTKN: Keys, already rotated if positions are rotary.
            v_BTKN: Values, [B, T, K, N].
        """

        def updated(cached_LBKSN: jax.Array, new_BTKN: jax.Array) -> jax.Array:
            new_LBKTN = new_BTKN.swapaxes(1, 2)[None].astype(cached_LBKSN.dtype)
            # All start indices must have one dtype, and a plain 0 would be int64 under
            # JAX_ENABLE_X64.
            zero = jnp.int32(0)
            layer_index = jnp.asarray(layer, jnp.int32)
            if self.length.ndim == 0:
                start = (layer_index, zero, zero, self.length, zero)
                return jax.lax.dynamic_update_slice(cached_LBKSN, new_LBKTN, start)

            # One slice per sequence is written in place. A scatter of all sequences at once would
            # copy the cache on CPU.
            for row in range(new_BTKN.shape[0]):
                start = (layer_index, jnp.int32(row), zero, self.length[row], zero)
                row_LBKTN = new_LBKTN[:, row : row + 1]
                cached_LBKSN = jax.lax.dynamic_update_slice(cached_LBKSN, row_LBKTN, start)
            return cached_LBKSN

        keys = updated(self.keys, k_BTKN)
        values = updated(self.values, v_BTKN)
        return self._replace(keys=keys, values=values)

    def attend(
        self,
        layer: jax.Array | int,
        q_BTHN: jax.Array,
        bias_HTS: jax.Array | None = None,
        *,
        window: int | None = None,
        cap: float | None = None,
    ) -> jax.Array:
        """Return causal attention of T queries at the positions from `length` on, [B, T, H, N].

        A query sees all cached positions up to its own. `put` must have written the keys and values
        of the T queries already, while `length` is still the number of positions before them. The
        softmax is in float32.

        Args:
            layer: Index of the layer, from 0.
            q_BTHN: Queries, multiplied by the logit scale and rotated in the same way as the keys.
            bias_HTS: Bias added to logits, for all S positions of the cache.
            window: Number of positions that a query sees, including its own. Default: all.
            cap: Soft cap of the logits, applied before the bias. Default: none.
        """
        batch, length, heads, size = q_BTHN.shape
        k_BKSN = self.keys[layer]
        v_BKSN = self.values[layer]
        kv_heads, source = k_BKSN.shape[1:3]

        # All queries that share a key head are rows of one product, which reads its keys only once.
        q_BTKGN = q_BTHN.reshape(batch, length, kv_heads, -1, size)
        q_BKQN = q_BTKGN.transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, size)
        logits_BKQS = jnp.einsum(
            "bkqn,bksn->bkqs", q_BKQN, k_BKSN, preferred_element_type=jnp.float32
        )

        start = self.length
        if start.ndim > 0:
            # [B, 1, 1, 1, 1], which broadcasts against the logits.
            start = start[:, None, None, None, None]
        query_positions = start + jnp.arange(length)[:, None]
        mask = jnp.arange(source) <= query_positions
        if window is not None:
            mask &= jnp.arange(source) > query_positions - window

        logits_BKQS = softcapped(logits_BKQS, cap)
        logits_BKGTS = logits_BKQS.reshape(batch, kv_heads, -1, length, source)
        if bias_HTS is not None:
            logits_BKGTS = logits_BKGTS + bias_HTS.reshape(kv_heads, -1, length, source)
        masked_BKGTS = jnp.where(mask, logits_BKGTS, jnp.finfo(jnp.float32).min)
        weights_BKGTS = jax.nn.softmax(masked_BKGTS, axis=-1)
        weights_BKQS = weights_BKGTS.reshape(batch, kv_heads, -1, source).astype(v_BKSN.dtype)

        y_BKQN = jnp.einsum("bkqs,bksn->bkqn", weights_BKQS, v_BKSN)
        y_BKGTN = y_BKQN.reshape(batch, kv_heads, -1, length, v_BKSN.shape[-1])
        y_BTKGN = y_BKGTN.transpose(0, 3, 1, 2, 4)
        return y_BTKGN.reshape(batch, length, heads, -1).astype(q_BTHN.dtype)


def empty(config: TransformerConfig, batch: int) -> Cache:
    """Return a cache of zeros with length 0 for a decoder, in the dtype of its products.

    Args:
        config: Config of the decoder. S is its size of the axis "position".
        batch: Number of sequences B that are decoded at the same time.
    """
    context = config.sizes()["position"]
    key_size = config.heads_dim
    value_size = config.value_dim or key_size
    dtype = jnp.dtype(config.compute.dtype)
    shape = (config.depth, batch, config.kv_heads, context)
    keys = jnp.zeros((*shape, key_size), dtype)
    values = jnp.zeros((*shape, value_size), dtype)
    return Cache(keys, values, jnp.int32(0))
