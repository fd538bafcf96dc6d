"""JAX's Pallas kernels for TPUs (splash attention): complete, and as one part of a ring.

T query and S key positions, H heads, K key heads, N head dimension, L the 128 lanes of a vector.
Queries already include every scale of the logits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from mupax.zoo.layers.linear import SAVED
from mupax.zoo.layers.ring.ring import Part, Residuals, Segments

Kernel = splash.SplashAttentionKernel
SegmentIds = splash.SegmentIds | None


def forward(
    kernel: Kernel,
    q_HTN: jax.Array,
    k_KSN: jax.Array,
    v_KSN: jax.Array,
    segments: SegmentIds = None,
) -> tuple[jax.Array, jax.Array]:
    """Return outputs [H, T, N] and the log of the softmax sums [H, T] of one example.

    Args:
        kernel: Kernel for a mask and block sizes (`make_splash_mha`).
        q_HTN: Queries. T and S are multiples of 128.
        k_KSN: Keys. H is a multiple of K.
        v_KSN: Values, [K, S, N].
        segments: Documents of queries and keys. Default: one document.
    """
    # The kernel writes a position's log-sum-exp into all 128 lanes. JAX's own function slices one
    # lane out of the result, for which the TPU compiler first writes all lanes again, transposed,
    # in the backward pass of every layer. Here the trace is cut off right after the kernel. All
    # lanes but the first are set to zero and then summed, which the compiler does while it reads
    # them, with the same bits (docs/evidence/performance.md has what it saves).
    arguments = (kernel.fwd_mask_info, q_HTN, k_KSN, v_KSN, segments)
    library_forward = functools.partial(_library, kernel.kwargs, True)
    program = jax.make_jaxpr(library_forward)(*arguments)
    (kernel_call,) = [
        equation for equation in program.eqns if equation.primitive.name == "pallas_call"
    ]
    shortened = program.jaxpr.replace(outvars=kernel_call.outvars[-2:])
    run = jaxpr_as_fun(ClosedJaxpr(shortened, program.consts))
    y_HTN, lse_HTL = run(*jax.tree.leaves(arguments))
    is_first_lane = jax.lax.broadcasted_iota(jnp.int32, lse_HTL.shape, 2) == 0
    return y_HTN, jnp.where(is_first_lane, lse_HTL, 0).sum(axis=-1)


def backward(
    kernel: Kernel, residuals: Residuals, gradient_HTN: jax.Array, segments: SegmentIds = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of queries, keys and values of one example.

    Args:
        kernel: Kernel of the forward pass (`make_splash_mha`).
        residuals: Inputs and results of the forward pass, without a batch axis. In a ring, outputs
            and log-sum-exps are those over all keys, not only over these.
        gradient_HTN: Gradient of the outputs, [H, T, N].
        segments: Documents of queries and keys. Default: one document.
    """
    q_HTN, k_KSN, v_KSN, y_HTN, lse_HT = residuals
    # The order is that of JAX's private function. `None` stands for attention sinks.
    library_residuals = (
        q_HTN,
        k_KSN,
        v_KSN,
        segments,
        None,
        y_HTN,
        lse_HT,
        kernel.dq_mask_info,
        kernel.dkv_mask_info,
    )
    options = {name: value for name, value in kernel.kwargs.items() if name != "save_residuals"}
    gradients = splash._splash_attention_bwd(  # pyright: ignore
        False, res=library_residuals, do=gradient_HTN, **options
    )
    return gradients[3:6]


@jax.jit
def attention(
    kernel: Kernel,
    q_HTN: jax.Array,
    k_KSN: jax.Array,
    v_KSN: jax.Array,
    segments: SegmentIds = None,
) -> jax.Array:
    """Return splash attention [H, T, N] of one example.

    For gradients, outputs and log-sum-exps have the checkpoint name `SAVED`.

    Args:
        kernel, q_HTN, k_KSN, v_KSN, segments: Same as in `forward`.
    """
    return _attended(kernel, q_HTN, k_KSN, v_KSN, segments)


def _library(options: dict[str, Any], lse: bool, mask: Any, *arrays: Any) -> Any:
    """Run the forward pass of JAX's splash kernel.

    Return the outputs. With `lse`, return the outputs and the log-sum-exps.

    Args:
        options: Keyword arguments of the kernel, `Kernel.kwargs`.
        mask: Mask of the kernel's forward pass, `Kernel.fwd_mask_info`.
        *arrays: Queries, keys, values and segments (or `None`), as in `forward`.
    """
    options = options | {"save_residuals": lse, "residual_checkpoint_name": None}
    return splash._splash_attention_forward(mask, *arrays, None, **options)  # pyright: ignore


@jax.custom_vjp
def _attended(
    kernel: Kernel, q_HTN: jax.Array, k_KSN: jax.Array, v_KSN: jax.Array, segments: SegmentIds
) -> jax.Array:
    return _library(kernel.kwargs, False, kernel.fwd_mask_info, q_HTN, k_KSN, v_KSN, segments)


def _attended_forward(
    kernel: Kernel, q_HTN: jax.Array, k_KSN: jax.Array, v_KSN: jax.Array, segments: SegmentIds
) -> tuple[jax.Array, tuple[Kernel, SegmentIds, Residuals]]:
    y_HTN, lse_HT = forward(kernel, q_HTN, k_KSN, v_KSN, segments)
    y_HTN = checkpoint_name(y_HTN, SAVED)
    lse_HT = checkpoint_name(lse_HT, SAVED)
    return y_HTN, (kernel, segments, Residuals(q_HTN, k_KSN, v_KSN, y_HTN, lse_HT))


def _attended_backward(
    saved: tuple[Kernel, SegmentIds, Residuals], gradient_HTN: jax.Array
) -> tuple[None, jax.Array, jax.Array, jax.Array, None]:
    kernel, segments, residuals = saved
    dq_HTN, dk_KSN, dv_KSN = backward(kernel, residuals, gradient_HTN, segments)
    return None, dq_HTN, dk_KSN, dv_KSN, None


_attended.defvjp(_attended_forward, _attended_backward)


def part(blocks: Callable[..., splash.BlockSizes], interpret: bool) -> Part:
    """Return an implementation of attention to one part of a ring's keys by splash kernels.

    Args:
        blocks: Function (number of queries, number of keys, causal=) -> block sizes.
        interpret: Run the kernels as ordinary operations, on any platform.
    """

    def make_kernel(q_BHTN: jax.Array, k_BKSN: jax.Array, causal: bool) -> Kernel:
        heads = q_BHTN.shape[1]
        length = q_BHTN.shape[2]
        source = k_BKSN.shape[2]
        shape = (length, source)
        mask = masks.CausalMask(shape) if causal else masks.FullMask(shape)
        return splash.make_splash_mha(
            masks.MultiHeadMask([mask] * heads),
            block_sizes=blocks(length, source, causal=causal),
            head_shards=1,
            q_seq_shards=1,
            interpret=interpret,
        )

    def part_forward(
        q_BHTN: jax.Array,
        k_BKSN: jax.Array,
        v_BKSN: jax.Array,
        causal: bool,
        segments: Segments | None,
    ) -> tuple[jax.Array, jax.Array]:
        segment_ids = _segment_ids(segments)
        kernel = make_kernel(q_BHTN, k_BKSN, causal)
        by_example = jax.vmap(forward, (None, 0, 0, 0, 0))
        return by_example(kernel, q_BHTN, k_BKSN, v_BKSN, segment_ids)

    def part_backward(
        residuals: Residuals, gradient_BHTN: jax.Array, causal: bool, segments: Segments | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        segment_ids = _segment_ids(segments)
        kernel = make_kernel(residuals.q_BHTN, residuals.k_BKSN, causal)
        by_example = jax.vmap(backward, (None, 0, 0, 0))
        return by_example(kernel, residuals, gradient_BHTN, segment_ids)

    return Part(part_forward, part_backward)


def _segment_ids(segments: Segments | None) -> SegmentIds:
    """Return segments as the kernels' `SegmentIds`, [B, T] and [B, S], or `None` without any."""
    if segments is None:
        return None
    return splash.SegmentIds(segments.queries_B1T[:, 0], segments.keys_B1S[:, 0])
