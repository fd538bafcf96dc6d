"""One part of a ring (`mupax.zoo.layers.ring`) by the Pallas kernels for TPUs, whose outputs have their log-sum-exp."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from mupax.zoo.layers.ring.ring import Kept, Part


def part(blocks: Callable[..., splash.BlockSizes], interpret: bool) -> Part:
    """The kernels as a part.

    Args:
        blocks: (queries, keys, causal=) to the sizes of a kernel's blocks.
        interpret: run them as ordinary operations, on any platform.
    """

    def kernel(q_BHTN: jax.Array, k_BKSN: jax.Array, causal: bool) -> Any:
        shape = q_BHTN.shape[2], k_BKSN.shape[2]
        mask = masks.CausalMask(shape) if causal else masks.FullMask(shape)
        return splash.make_splash_mha(
            masks.MultiHeadMask([mask] * q_BHTN.shape[1]), block_sizes=blocks(*shape, causal=causal),
            head_shards=1, q_seq_shards=1, save_residuals=True, interpret=interpret,
        )  # fmt: skip

    def forward(q_BHTN: jax.Array, k_BKSN: jax.Array, v_BKSN: jax.Array, causal: bool) -> tuple[jax.Array, jax.Array]:
        y_BHTN, (lse_BHT,) = jax.vmap(kernel(q_BHTN, k_BKSN, causal))(q_BHTN, k_BKSN, v_BKSN)
        return y_BHTN, lse_BHT

    def backward(kept: Kept, gradient_BHTN: jax.Array, causal: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
        made = kernel(kept[0], kept[1], causal)
        static = {name: value for name, value in made.kwargs.items() if name != "save_residuals"}

        def one(kept: Kept, gradient_HTN: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            # The kernel's own rule, where outputs and log-sum-exp over all keys are those over its keys.
            q_HTN, k_KSN, v_KSN, y_HTN, lse_HT = kept
            residuals = q_HTN, k_KSN, v_KSN, None, None, y_HTN, lse_HT, made.dq_mask_info, made.dkv_mask_info
            found = splash._splash_attention_bwd(False, res=residuals, do=gradient_HTN, **static)  # pyright: ignore
            return found[3:6]

        return jax.vmap(one)(kept, gradient_BHTN)

    return Part(forward, backward)
