"""T5's relative positions (Raffel et al. 2019, 1910.10683, section 2.1): distances in buckets, each with a bias per head.

T query and S key positions, H heads, K buckets.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp


def buckets(
    queries: int, keys: int, *, count: int, longest: int, bidirectional: bool, start: jax.Array | int = 0
) -> jax.Array:
    """The row of a table for every pair, int32 [T, S].

    Distances below half of a direction's rows have one each; further ones share rows on a logarithmic scale up to `longest`.

    Args:
        queries: T.
        keys: S, from position 0.
        count: rows, K.
        longest: distance from which all share the last row.
        bidirectional: whether keys after a query have rows of their own, half of them; else they are as at distance 0.
        start: position of the first query.
    """
    after_TS = jnp.arange(keys)[None, :] - (start + jnp.arange(queries))[:, None]
    first_TS = jnp.where(after_TS > 0, count // 2, 0) if bidirectional else jnp.zeros_like(after_TS)
    rows = count // 2 if bidirectional else count
    distance_TS = jnp.abs(after_TS) if bidirectional else jnp.maximum(-after_TS, 0)
    exact = rows // 2
    share_TS = jnp.log(jnp.maximum(distance_TS, exact).astype(jnp.float32) / exact) / math.log(longest / exact)
    far_TS = jnp.minimum(exact + (share_TS * (rows - exact)).astype(jnp.int32), rows - 1)
    return first_TS + jnp.where(distance_TS < exact, distance_TS, far_TS)


def bias(table_KH: jax.Array, row_TS: jax.Array) -> jax.Array:
    """What attention logits get added, float32 [H, T, S].

    Args:
        table_KH: a number per bucket and head.
        row_TS: from `buckets`.
    """
    return jnp.moveaxis(table_KH.astype(jnp.float32)[row_TS], -1, 0)
