"""Attention by XLA with dimensions as they are, so that devices may split any of them.

B batch, T query and S key positions, H heads, K key heads, G queries of each, N head dimension.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mupax.zoo.layers.cpu_attention import within
from mupax.zoo.layers.linear import softcapped


def attend(
    q_BTHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    *,
    causal: bool,
    window: int | None = None,
    cap: float | None = None,
    segments_BT: jax.Array | None = None,
) -> jax.Array:
    """Attention [B, T, H, N].

    Args:
        q_BTHN, k_BSKN, v_BSKN, causal, window, cap, segments_BT: as `kernels.attend`.
    """
    mask_B1TS = None if segments_BT is None else within(segments_BT)[:, None]
    if cap is None:
        how = {"is_causal": causal, "local_window_size": None if window is None else (window - 1, 0)}
        return jax.nn.dot_product_attention(
            q_BTHN, k_BSKN, v_BSKN, None, mask_B1TS, scale=1.0, **how, implementation="xla"
        )
    (*lead, heads, size), kv_heads = q_BTHN.shape, k_BSKN.shape[2]
    q_BTKGN = q_BTHN.reshape(*lead, kv_heads, heads // kv_heads, size)
    logits_BKGTS = jnp.einsum("btkgn,bskn->bkgts", q_BTKGN, k_BSKN, preferred_element_type=jnp.float32)
    logits_BKGTS = softcapped(logits_BKGTS, cap)
    if causal:
        shape = logits_BKGTS.shape[-2:]
        mask_TS = jnp.tri(*shape, dtype=bool)
        mask_TS = mask_TS if window is None else mask_TS & ~jnp.tri(*shape, k=-window, dtype=bool)
        logits_BKGTS = jnp.where(mask_TS, logits_BKGTS, jnp.finfo(jnp.float32).min)
    if mask_B1TS is not None:
        logits_BKGTS = jnp.where(mask_B1TS[:, None], logits_BKGTS, jnp.finfo(jnp.float32).min)
    weights_BKGTS = jax.nn.softmax(logits_BKGTS, axis=-1).astype(v_BSKN.dtype)
    return jnp.einsum("bkgts,bskn->btkgn", weights_BKGTS, v_BSKN).reshape(q_BTHN.shape)
