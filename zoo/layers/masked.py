"""Attention that hides padding and adds biases to logits, which `kernels.attend` cannot.

B batch, T query and S key positions, H heads, K key heads, N head dimension.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mupax.zoo.families import AttentionName, ConfigError
from mupax.zoo.layers import kernels
from mupax.zoo.layers.kernels import merged_attention
from mupax.zoo.partition import ONE_DEVICE, Layout


def attend(
    q_BTHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    *,
    causal: bool,
    mask_BS: jax.Array | None = None,
    bias_HTS: jax.Array | None = None,
    implementation: AttentionName = "auto",
    block: int | None = None,
    layout: Layout = ONE_DEVICE,
) -> jax.Array:
    """Return attention [B, T, H, N], with padding hidden and a bias added to logits.

    With a mask or a bias it is computed by XLA, otherwise by `kernels.attend`.

    Args:
        q_BTHN: Queries, which already include the logit scale.
        k_BSKN: Keys. H is a multiple of K.
        v_BSKN: Values. Their N can differ from that of the keys.
        causal: `True` lets query t see keys 0..t, `False` all keys.
        mask_BS: bool, `True` at keys that are not padding. Every example has at least one. Default:
            all.
        bias_HTS: Bias added to logits, float32. Default: none.
        implementation: Implementation by name, as in `kernels.attend`.
        block: Positions on a side of a splash block, as in `kernels.attend`.
        layout: Layout of the arrays on devices, `ONE_DEVICE` by default.

    Raises:
        ConfigError: If there is a mask or a bias and `implementation` is neither auto nor xla.
    """
    value_size = v_BSKN.shape[-1]
    # The kernels need one head size for queries, keys and values. `widened` pads with zeros, which
    # change no product.
    if value_size != q_BTHN.shape[-1]:
        q_BTHN, k_BSKN, v_BSKN = kernels.widened(q_BTHN, k_BSKN, v_BSKN)
        y_BTHN = attend(
            q_BTHN,
            k_BSKN,
            v_BSKN,
            causal=causal,
            mask_BS=mask_BS,
            bias_HTS=bias_HTS,
            implementation=implementation,
            block=block,
            layout=layout,
        )
        return y_BTHN[..., :value_size]

    if mask_BS is None and bias_HTS is None:
        return kernels.attend(
            q_BTHN,
            k_BSKN,
            v_BSKN,
            causal=causal,
            implementation=implementation,
            block=block,
            layout=layout,
        )
    if implementation not in ("auto", "xla"):
        raise ConfigError(
            f"model.compute.attention {implementation}: the kernel hides no padding and adds no "
            "relative positions; write auto or xla"
        )

    k_BSKN = layout.constrain(k_BSKN, ("batch", None, "kv_heads", None))
    v_BSKN = layout.constrain(v_BSKN, ("batch", None, "kv_heads", None))
    if kernels.merges_heads(layout):
        return merged_attention(
            q_BTHN, k_BSKN, v_BSKN, causal=causal, mask_BS=mask_BS, bias_HTS=bias_HTS
        )

    mask_B1TS = None
    if mask_BS is not None:
        mask_B1TS = mask_BS[:, None, None, :]
    bias_BHTS = None
    if bias_HTS is not None:
        bias_BHTS = jnp.broadcast_to(bias_HTS, (1, *bias_HTS.shape))
    return jax.nn.dot_product_attention(
        q_BTHN,
        k_BSKN,
        v_BSKN,
        bias_BHTS,
        mask_B1TS,
        scale=1.0,
        is_causal=causal,
        implementation="xla",
    )
