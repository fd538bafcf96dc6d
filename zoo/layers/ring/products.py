"""Attention to one part of a ring's keys (`mupax.zoo.layers.ring`) by plain matrix products.

B batch, T query and S key positions, H heads, K key heads, G query heads per key head, N head
dimension, C number of tiles, t queries of a tile. Heads stand before positions.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mupax.zoo.layers.ring.ring import Part, Residuals, Segments

TILE = 1024
"""Largest number of queries whose logits are in memory at a time."""

_HIDDEN = jnp.finfo(jnp.float32).min
"""Logit of a key that a query does not see."""

_einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


class _ForwardTile(NamedTuple):
    """Queries of one tile (a range of queries). With a leading axis of tiles, a loop's input."""

    start: jax.Array
    """Position of the first query, int32 []."""
    q_BKGtN: jax.Array
    segments_BKGt: jax.Array | None


class _BackwardTile(NamedTuple):
    """Queries of one tile, and their part of the outputs' gradient, for the backward pass.

    With a leading axis of tiles, it is the input of a loop.
    """

    start: jax.Array
    """Position of the first query, int32 []."""
    q_BKGtN: jax.Array
    lse_BKGt: jax.Array
    gradient_BKGtN: jax.Array
    dot_BKGt: jax.Array
    """Inner product of every query's output and the gradient of this output."""
    segments_BKGt: jax.Array | None


def _forward(
    q_BHTN: jax.Array,
    k_BKSN: jax.Array,
    v_BKSN: jax.Array,
    causal: bool,
    segments: Segments | None,
) -> tuple[jax.Array, jax.Array]:
    def attend(tile: _ForwardTile) -> tuple[jax.Array, jax.Array]:
        logits_BKGtS = _logits(tile, k_BKSN, causal, segments)
        max_BKGt = jnp.max(logits_BKGtS, axis=-1)
        weights_BKGtS = jnp.exp(logits_BKGtS - max_BKGt[..., None])
        sum_BKGt = jnp.sum(weights_BKGtS, axis=-1)
        y_BKGtN = _einsum("bkgts,bksn->bkgtn", weights_BKGtS.astype(v_BKSN.dtype), v_BKSN)
        return y_BKGtN / sum_BKGt[..., None], max_BKGt + jnp.log(sum_BKGt)

    kv_heads = k_BKSN.shape[1]
    segments_BHT = _segments_of_heads(segments, q_BHTN)
    starts_C = _starts(q_BHTN)
    tiles = _ForwardTile(
        starts_C, _split(q_BHTN, kv_heads), _split_segments(segments_BHT, kv_heads)
    )
    y_CBKGtN, lse_CBKGt = jax.lax.map(attend, tiles)
    return _joined(y_CBKGtN), _joined(lse_CBKGt)


def _backward(
    residuals: Residuals, gradient_BHTN: jax.Array, causal: bool, segments: Segments | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    q_BHTN, k_BKSN, v_BKSN, y_BHTN, lse_BHT = residuals
    dtype = q_BHTN.dtype

    def differentiate(
        totals: tuple[jax.Array, jax.Array], tile: _BackwardTile
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        total_dk_BKSN, total_dv_BKSN = totals
        gradient_BKGtN = tile.gradient_BKGtN
        logits_BKGtS = _logits(tile, k_BKSN, causal, segments)
        weights_BKGtS = jnp.exp(logits_BKGtS - tile.lse_BKGt[..., None])
        dv_BKSN = _einsum("bkgts,bkgtn->bksn", weights_BKGtS.astype(dtype), gradient_BKGtN)
        # The softmax's gradient is weights * (dweights - sum over keys of weights * dweights), and
        # that sum is the inner product of the outputs and their gradient.
        dweights_BKGtS = _einsum("bkgtn,bksn->bkgts", gradient_BKGtN, v_BKSN)
        dlogits_BKGtS = weights_BKGtS * (dweights_BKGtS - tile.dot_BKGt[..., None])
        dk_BKSN = _einsum("bkgts,bkgtn->bksn", dlogits_BKGtS.astype(dtype), tile.q_BKGtN)
        dq_BKGtN = _einsum("bkgts,bksn->bkgtn", dlogits_BKGtS.astype(dtype), k_BKSN)
        return (total_dk_BKSN + dk_BKSN, total_dv_BKSN + dv_BKSN), dq_BKGtN

    kv_heads = k_BKSN.shape[1]
    products_BHTN = y_BHTN.astype(jnp.float32) * gradient_BHTN.astype(jnp.float32)
    dot_BHT = jnp.sum(products_BHTN, axis=-1)
    segments_BHT = _segments_of_heads(segments, q_BHTN)
    starts_C = _starts(q_BHTN)
    tiles = _BackwardTile(
        starts_C,
        _split(q_BHTN, kv_heads),
        _split(lse_BHT, kv_heads),
        _split(gradient_BHTN, kv_heads),
        _split(dot_BHT, kv_heads),
        _split_segments(segments_BHT, kv_heads),
    )
    zeros_BKSN = jnp.zeros(k_BKSN.shape, jnp.float32)
    totals, dq_CBKGtN = jax.lax.scan(differentiate, (zeros_BKSN, zeros_BKSN), tiles)
    dk_BKSN, dv_BKSN = totals
    return _joined(dq_CBKGtN), dk_BKSN, dv_BKSN


def _logits(
    tile: _ForwardTile | _BackwardTile,
    k_BKSN: jax.Array,
    causal: bool,
    segments: Segments | None,
) -> jax.Array:
    """Return the logits of a tile, float32 [B, K, G, t, S], with hidden keys at `_HIDDEN`.

    Hidden are keys after the query (if causal) and keys of other segments.
    """
    q_BKGtN = tile.q_BKGtN
    logits_BKGtS = _einsum("bkgtn,bksn->bkgts", q_BKGtN, k_BKSN)
    if causal:
        num_keys = k_BKSN.shape[2]
        tile_size = q_BKGtN.shape[3]
        key_positions_S = jnp.arange(num_keys)
        query_positions_t1 = tile.start + jnp.arange(tile_size)[:, None]
        mask_tS = key_positions_S <= query_positions_t1
        logits_BKGtS = jnp.where(mask_tS, logits_BKGtS, _HIDDEN)
    if segments is not None and tile.segments_BKGt is not None:
        query_segments_BKGt1 = tile.segments_BKGt[..., None]
        key_segments_B111S = segments.keys_B1S[:, None, :, None]
        same_BKGtS = query_segments_BKGt1 == key_segments_B111S
        logits_BKGtS = jnp.where(same_BKGtS, logits_BKGtS, _HIDDEN)
    return logits_BKGtS


def _segments_of_heads(segments: Segments | None, q_BHTN: jax.Array) -> jax.Array | None:
    """Return the queries' segments repeated for every head, [B, H, T]. `None` without segments."""
    if segments is None:
        return None
    return jnp.broadcast_to(segments.queries_B1T, q_BHTN.shape[:3])


def _num_tiles(length: int) -> int:
    """Return the smallest number of equal tiles of at most `TILE` queries."""
    count = math.ceil(length / TILE)
    while length % count:
        count += 1
    return count


def _starts(q_BHTN: jax.Array) -> jax.Array:
    """Return the position of the first query of every tile, int32 [C]."""
    length = q_BHTN.shape[2]
    num_tiles = _num_tiles(length)
    return length // num_tiles * jnp.arange(num_tiles)


def _split(x: jax.Array, kv_heads: int) -> jax.Array:
    """Return [B, H, T, ...] as tiles [C, B, K, G, t, ...]."""
    batch, heads, length, *rest = x.shape
    num_tiles = _num_tiles(length)
    groups = heads // kv_heads
    x_BKGCt = x.reshape(batch, kv_heads, groups, num_tiles, length // num_tiles, *rest)
    return jnp.moveaxis(x_BKGCt, 3, 0)


def _split_segments(segments_BHT: jax.Array | None, kv_heads: int) -> jax.Array | None:
    """Return the queries' segments as tiles, or `None` without segments."""
    if segments_BHT is None:
        return None
    return _split(segments_BHT, kv_heads)


def _joined(tiles: jax.Array) -> jax.Array:
    """Return tiles [C, B, K, G, t, ...] as [B, H, T, ...]."""
    num_tiles, batch, kv_heads, groups, tile_size, *rest = tiles.shape
    x_BKGCt = jnp.moveaxis(tiles, 0, 3)
    return x_BKGCt.reshape(batch, kv_heads * groups, num_tiles * tile_size, *rest)


PART = Part(_forward, _backward)
"""Attention to one part of a ring's keys by plain matrix products, on any platform."""
