"""Attention on a CPU: batch and heads merged into one dimension R, the layout that CPUs like best; causal attention in tiles.

B batch, T query and S key positions, H heads, K key heads, N head dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from mupax.zoo.layers.linear import softcapped

SAVED = "attention"
"""Name by which a remat policy may keep what a flash kernel's gradient needs: its output and the softmax's norm."""

TILE, MOST = 64, 8
"""Fewest queries of a tile, where masked products cost less than tiles do, and most tiles, each of which is compiled."""


def merged_attention(
    q_BTHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    *,
    causal: bool,
    window: int | None = None,
    cap: float | None = None,
    mask_BS: jax.Array | None = None,
    bias_HTS: jax.Array | None = None,
    segments_BT: jax.Array | None = None,
) -> jax.Array:
    """Attention [B, T, H, N] by whole products.

    Args:
        q_BTHN: queries, with the logit scale.
        k_BSKN: keys; H is a multiple of K.
        v_BSKN: values.
        causal: query t sees keys 0..t, else all.
        window: causal alone: of those the last so many.
        cap: of logits, before what is added to them.
        mask_BS: bool, keys that any query sees; all unless given.
        bias_HTS: added to logits.
        segments_BT: int32, of as many queries as keys, which see one another where theirs is the same; all unless given.
    """
    heads = q_BTHN.shape[2]

    def products(q_RTN: jax.Array, k_RSN: jax.Array, v_RSN: jax.Array) -> jax.Array:
        logits_RTS = softcapped(jnp.einsum("btn,bsn->bts", q_RTN, k_RSN, preferred_element_type=jnp.float32), cap)
        if bias_HTS is not None:
            logits_RTS = (logits_RTS.reshape(-1, *bias_HTS.shape) + bias_HTS).reshape(logits_RTS.shape)
        if mask_BS is not None:
            mask_R1S = jnp.repeat(mask_BS, heads, axis=0)[:, None]
            logits_RTS = jnp.where(mask_R1S, logits_RTS, jnp.finfo(jnp.float32).min)
        if segments_BT is not None:
            segments_RT = jnp.repeat(segments_BT, heads, axis=0)
            logits_RTS = jnp.where(within(segments_RT), logits_RTS, jnp.finfo(jnp.float32).min)
        if causal:
            mask_TS = jnp.tri(*logits_RTS.shape[1:], dtype=bool)
            if window is not None:
                mask_TS &= ~jnp.tri(*logits_RTS.shape[1:], k=-window, dtype=bool)
            logits_RTS = jnp.where(mask_TS, logits_RTS, jnp.finfo(jnp.float32).min)
        weights_RTS = jax.nn.softmax(logits_RTS, axis=-1).astype(v_RSN.dtype)
        return jnp.einsum("bts,bsn->btn", weights_RTS, v_RSN)

    return _in_rows(products, q_BTHN, k_BSKN, v_BSKN)


def tiled_attention(
    q_BTHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    *,
    window: int | None = None,
    cap: float | None = None,
    segments_BT: jax.Array | None = None,
) -> jax.Array:
    """Attention in which query t sees keys 0..t, by tiles of queries: keys that none of a tile's sees are never multiplied.

    The gradient computes each tile's weights anew. Plain operations under `jax.checkpoint`: derivatives of any kind and
    order go through.

    Args:
        q_BTHN, k_BSKN, v_BSKN, window, cap, segments_BT: as `merged_attention`.
    """

    def tiles(q_RTN: jax.Array, k_RSN: jax.Array, v_RSN: jax.Array) -> jax.Array:
        length, policy = q_RTN.shape[1], jax.checkpoint_policies.save_only_these_names(SAVED)
        count = max(TILE, -(-length // MOST))
        segments_RT = None if segments_BT is None else jnp.repeat(segments_BT, q_BTHN.shape[2], axis=0)
        same = functools.partial(_tile, count=count, window=window, cap=cap, segments_RT=segments_RT)
        tile = [functools.partial(same, start=start) for start in range(0, length, count)]
        return jnp.concatenate([jax.checkpoint(one, policy=policy)(q_RTN, k_RSN, v_RSN) for one in tile], axis=1)

    return _in_rows(tiles, q_BTHN, k_BSKN, v_BSKN)


def _tile(
    q_RTN: jax.Array,
    k_RSN: jax.Array,
    v_RSN: jax.Array,
    *,
    start: int,
    count: int,
    window: int | None,
    cap: float | None,
    segments_RT: jax.Array | None,
) -> jax.Array:
    """The outputs of `count` queries, or those there are, from `start` on: [R, count, N]."""
    q_RTN = q_RTN[:, start : start + count]
    first = 0 if window is None else max(0, start - window + 1)
    k_RSN, v_RSN = (x_RSN[:, first : start + count] for x_RSN in (k_RSN, v_RSN))
    # Keys before queries: sums and maxima over keys then run along vectors of queries.
    logits_RST = softcapped(jnp.einsum("rsn,rtn->rst", k_RSN, q_RTN, preferred_element_type=jnp.float32), cap)
    key_S1, query_T = first + jnp.arange(k_RSN.shape[1])[:, None], start + jnp.arange(q_RTN.shape[1])
    mask_ST = key_S1 <= query_T
    if window is not None:
        mask_ST &= key_S1 > query_T - window
    if segments_RT is not None:
        keys_RS, queries_RT = (segments_RT[:, i : start + count] for i in (first, start))
        mask_ST &= keys_RS[:, :, None] == queries_RT[:, None, :]
    logits_RST = jnp.where(mask_ST, logits_RST, jnp.finfo(jnp.float32).min)
    most_R1T = checkpoint_name(jax.lax.stop_gradient(jnp.max(logits_RST, axis=1, keepdims=True)), SAVED)
    weights_RST = jnp.exp(logits_RST - most_R1T)
    y_RTN = jnp.einsum("rst,rsn->rtn", weights_RST.astype(v_RSN.dtype), v_RSN, preferred_element_type=jnp.float32)
    sum_RT1 = checkpoint_name(jnp.sum(weights_RST, axis=1)[..., None], SAVED)
    return (checkpoint_name(y_RTN, SAVED) / sum_RT1).astype(v_RSN.dtype)


def within(segments_BT: jax.Array) -> jax.Array:
    """Which positions are of one segment, bool [B, T, T]."""
    return segments_BT[:, :, None] == segments_BT[:, None, :]


def _in_rows(core: Callable[..., jax.Array], q_BTHN: jax.Array, k_BSKN: jax.Array, v_BSKN: jax.Array) -> jax.Array:
    batch, length, heads, size = q_BTHN.shape
    groups = heads // k_BSKN.shape[2]

    def rows(x: jax.Array, repeat: int) -> jax.Array:
        """[B, T, H, N] to [R, T, N]."""
        x = jnp.repeat(x, repeat, axis=2) if repeat > 1 else x
        return x.swapaxes(1, 2).reshape(batch * heads, x.shape[1], size)

    y_RTN = core(rows(q_BTHN, 1), rows(k_BSKN, groups), rows(v_BSKN, groups))
    return y_RTN.reshape(batch, heads, length, size).swapaxes(1, 2)
