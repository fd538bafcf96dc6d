"""One part of a ring (`mupax.zoo.layers.ring`) by plain operations, for every platform: a tile of queries at a time."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from mupax.zoo.layers.ring.ring import Part, Residuals

TILE = 1024
"""Most queries that plain products look at one part of the keys with at a time."""


def _forward(
    q_BHTN: jax.Array, k_BKSN: jax.Array, v_BKSN: jax.Array, causal: bool, *segments: jax.Array
) -> tuple[jax.Array, jax.Array]:
    kv_heads = k_BKSN.shape[1]

    def tile(
        start: jax.Array, q_BKGTN: jax.Array, *segments_BKGT: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        logits_BKGTS = _logits(
            q_BKGTN, k_BKSN, start if causal else None, *segments_BKGT, *segments[1:]
        )
        most_BKGT = jnp.max(logits_BKGTS, axis=-1)
        weights_BKGTS = jnp.exp(logits_BKGTS - most_BKGT[..., None])
        sum_BKGT = jnp.sum(weights_BKGTS, axis=-1)
        y_BKGTN = _einsum("bkgts,bksn->bkgtn", weights_BKGTS.astype(v_BKSN.dtype), v_BKSN)
        return y_BKGTN / sum_BKGT[..., None], most_BKGT + jnp.log(sum_BKGT)

    starts, tiles = _tiles(kv_heads, q_BHTN, *_of_heads(segments, q_BHTN))
    return tuple(_whole(x) for x in jax.lax.map(lambda of: tile(*of), (starts, *tiles)))  # pyright: ignore


def _backward(
    residuals: Residuals, gradient_BHTN: jax.Array, causal: bool, *segments: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    q_BHTN, k_BKSN, v_BKSN, y_BHTN, lse_BHT = residuals
    kind = q_BHTN.dtype

    def tile(dkv: Any, of: Any) -> tuple[Any, jax.Array]:
        start, q_BKGTN, lse_BKGT, dy_BKGTN, along_BKGT, *segments_BKGT = of
        logits_BKGTS = _logits(
            q_BKGTN, k_BKSN, start if causal else None, *segments_BKGT, *segments[1:]
        )
        weights_BKGTS = jnp.exp(logits_BKGTS - lse_BKGT[..., None])
        dv_BKSN = _einsum("bkgts,bkgtn->bksn", weights_BKGTS.astype(kind), dy_BKGTN)
        slope_BKGTS = weights_BKGTS * (
            _einsum("bkgtn,bksn->bkgts", dy_BKGTN, v_BKSN) - along_BKGT[..., None]
        )
        dk_BKSN = _einsum("bkgts,bkgtn->bksn", slope_BKGTS.astype(kind), q_BKGTN)
        dq_BKGTN = _einsum("bkgts,bksn->bkgtn", slope_BKGTS.astype(kind), k_BKSN)
        return (dkv[0] + dk_BKSN, dkv[1] + dv_BKSN), dq_BKGTN

    along_BHT = jnp.sum(y_BHTN.astype(jnp.float32) * gradient_BHTN.astype(jnp.float32), axis=-1)
    rows = q_BHTN, lse_BHT, gradient_BHTN, along_BHT, *_of_heads(segments, q_BHTN)
    starts, tiles = _tiles(k_BKSN.shape[1], *rows)
    nothing = jnp.zeros(k_BKSN.shape, jnp.float32)
    dkv, dq = jax.lax.scan(tile, (nothing, nothing), (starts, *tiles))
    return (_whole(dq), *dkv)


_einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def _logits(
    q_BKGTN: jax.Array,
    k_BKSN: jax.Array,
    start: jax.Array | None,
    queries_BKGT: jax.Array | None = None,
    keys_B1S: jax.Array | None = None,
) -> jax.Array:
    """Logits, hidden after each query where the first one has the position `start` among the keys, and in other segments."""
    logits_BKGTS = _einsum("bkgtn,bksn->bkgts", q_BKGTN, k_BKSN)
    if start is not None:
        mask_TS = jnp.arange(k_BKSN.shape[2]) <= start + jnp.arange(q_BKGTN.shape[3])[:, None]
        logits_BKGTS = jnp.where(mask_TS, logits_BKGTS, jnp.finfo(jnp.float32).min)
    if queries_BKGT is not None and keys_B1S is not None:
        same_BKGTS = queries_BKGT[..., None] == keys_B1S[:, None, :, None]
        logits_BKGTS = jnp.where(same_BKGTS, logits_BKGTS, jnp.finfo(jnp.float32).min)
    return logits_BKGTS


def _of_heads(segments: tuple[jax.Array, ...], q_BHTN: jax.Array) -> list[jax.Array]:
    """The segments of queries [B, 1, T], where there are any, as rows of every head [B, H, T]."""
    return [jnp.broadcast_to(x_B1T, q_BHTN.shape[:3]) for x_B1T in segments[:1]]


def _tiles(kv_heads: int, *arrays: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
    """Where tiles begin, and arrays [B, H, T, ...] as tiles [tiles, B, K, G, tile, ...]."""
    batch, heads, length = arrays[0].shape[:3]
    count = next(n for n in range(math.ceil(length / TILE), length + 1) if length % n == 0)
    shape = batch, kv_heads, heads // kv_heads, count, length // count
    return length // count * jnp.arange(count), [
        jnp.moveaxis(x.reshape(*shape, *x.shape[3:]), 3, 0) for x in arrays
    ]


def _whole(tiles: jax.Array) -> jax.Array:
    """[tiles, B, K, G, tile, ...] as [B, H, T, ...]."""
    count, batch, kv_heads, groups, size, *rest = tiles.shape
    return jnp.moveaxis(tiles, 0, 3).reshape(batch, kv_heads * groups, count * size, *rest)


PART = Part(_forward, _backward)
"""The operations as a part."""
