"""Attention with padding hidden and biases on logits, where `kernels.attend` has neither.

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
    """Return attention [B, T, H, N], by XLA if there is a mask or a bias, else by the implementation that `kernels.attend` chooses.

    Args:
        q_BTHN: queries, with the logit scale.
        k_BSKN: keys; H is a multiple of K.
        v_BSKN: values.
        causal: query t sees keys 0..t, else all.
        mask_BS: bool, keys that are no padding; at least one of an example.
        bias_HTS: added to logits, float32.
        implementation: as `kernels.attend`.
        block: as `kernels.attend`.
        layout: as `kernels.attend`.

    Raises:
        ConfigError: a named kernel has no mask or bias.
    """
    if (values := v_BSKN.shape[-1]) != q_BTHN.shape[-1]:
        masks = {"causal": causal, "mask_BS": mask_BS, "bias_HTS": bias_HTS}
        wide = kernels.widened(q_BTHN, k_BSKN, v_BSKN)
        return attend(*wide, **masks, implementation=implementation, block=block, layout=layout)[
            ..., :values
        ]
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
            f"model.compute.attention {implementation}: the kernel hides no padding and adds no relative positions; write auto or xla"
        )
    k_BSKN = layout.constrain(k_BSKN, ("batch", None, "kv_heads", None))
    v_BSKN = layout.constrain(v_BSKN, ("batch", None, "kv_heads", None))
    if kernels.merges_heads(layout):
        return merged_attention(
            q_BTHN, k_BSKN, v_BSKN, causal=causal, mask_BS=mask_BS, bias_HTS=bias_HTS
        )
    mask_B1TS = None if mask_BS is None else mask_BS[:, None, None, :]
    bias_BHTS = None if bias_HTS is None else jnp.broadcast_to(bias_HTS, (1, *bias_HTS.shape))
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
