"""JAX's Pallas kernels for TPUs: attention of an example, its parts with their log-sum-exp, and a part of a ring by them.

The kernel writes a position's log-sum-exp into all 128 lanes. JAX's own function slices one out, for which the TPU compiler first
writes all of them again, transposed, in every layer's backward pass. Here all but one are set to zero and the lanes are summed, which
it does as it reads them, with the same bits (what that is worth: docs/evidence/performance.md).

T query and S key positions, H heads, K key heads, N head dimension. Any scale is already in q.
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
from mupax.zoo.layers.ring.ring import Part, Residuals

Kernel = splash.SplashAttentionKernel
Segments = splash.SegmentIds | None


def forward(
    kernel: Kernel, q_HTN: jax.Array, k_KSN: jax.Array, v_KSN: jax.Array, segments: Segments = None
) -> tuple[jax.Array, jax.Array]:
    """Outputs [H, T, N] and the log of the softmax's sum [H, T].

    Args:
        kernel: of a mask and blocks (`make_splash_mha`).
        q_HTN, k_KSN, v_KSN: queries, keys, values.
        segments: of what sees one another; all unless given.
    """
    arrays = kernel.fwd_mask_info, q_HTN, k_KSN, v_KSN, segments
    program = jax.make_jaxpr(functools.partial(_library, kernel.kwargs, True))(*arrays)
    (call,) = (equation for equation in program.eqns if equation.primitive.name == "pallas_call")
    whole = program.jaxpr.replace(outvars=call.outvars[-2:])
    y_HTN, lanes_HTL = jaxpr_as_fun(ClosedJaxpr(whole, program.consts))(*jax.tree.leaves(arrays))
    first = jax.lax.broadcasted_iota(jnp.int32, lanes_HTL.shape, 2) == 0
    return y_HTN, jnp.where(first, lanes_HTL, 0).sum(axis=-1)


def backward(
    kernel: Kernel, residuals: Residuals, gradient_HTN: jax.Array, segments: Segments = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of queries, keys and values, by the log-sum-exp that is kept, which may be of more keys than these.

    Args:
        kernel, segments: as of `forward`.
        residuals: its arguments and what came of them.
        gradient_HTN: of outputs.
    """
    q_HTN, k_KSN, v_KSN, y_HTN, lse_HT = residuals
    res = (
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
    gradients = splash._splash_attention_bwd(False, res=res, do=gradient_HTN, **options)  # pyright: ignore
    return gradients[3:6]


@jax.jit
def attention(
    kernel: Kernel, q_HTN: jax.Array, k_KSN: jax.Array, v_KSN: jax.Array, segments: Segments = None
) -> jax.Array:
    """Outputs [H, T, N]; outputs and log-sum-exp have `SAVED` as name for what is kept for gradients.

    Args:
        kernel, q_HTN, k_KSN, v_KSN, segments: as of `forward`.
    """
    return _attended(kernel, q_HTN, k_KSN, v_KSN, segments)


def _library(options: dict[str, Any], lse: bool, mask: Any, *arrays: Any) -> Any:
    """JAX's forward function: outputs alone, or with their log-sum-exp."""
    options = options | {"save_residuals": lse, "residual_checkpoint_name": None}
    return splash._splash_attention_forward(mask, *arrays, None, **options)  # pyright: ignore


@jax.custom_vjp
def _attended(
    kernel: Kernel, q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments
) -> jax.Array:
    return _library(kernel.kwargs, False, kernel.fwd_mask_info, q, k, v, segments)


def _fwd(
    kernel: Kernel, q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments
) -> tuple[jax.Array, Any]:
    y_HTN, lse_HT = (checkpoint_name(x, SAVED) for x in forward(kernel, q, k, v, segments))
    return y_HTN, (kernel, segments, (q, k, v, y_HTN, lse_HT))


def _gradients(residuals: Any, gradient_HTN: jax.Array) -> tuple[Any, ...]:
    kernel, segments, arrays = residuals
    return None, *backward(kernel, arrays, gradient_HTN, segments), None


_attended.defvjp(_fwd, _gradients)


def part(blocks: Callable[..., splash.BlockSizes], interpret: bool) -> Part:
    """The kernels as a part.

    Args:
        blocks: (queries, keys, causal=) to the sizes of a kernel's blocks.
        interpret: run them as ordinary operations, on any platform.
    """

    def kernel(q_BHTN: jax.Array, k_BKSN: jax.Array, causal: bool) -> Kernel:
        shape = q_BHTN.shape[2], k_BKSN.shape[2]
        mask = masks.CausalMask(shape) if causal else masks.FullMask(shape)
        return splash.make_splash_mha(
            masks.MultiHeadMask([mask] * q_BHTN.shape[1]), block_sizes=blocks(*shape, causal=causal),
            head_shards=1, q_seq_shards=1, interpret=interpret,
        )  # fmt: skip

    def apart(segments: tuple[jax.Array, ...]) -> Segments:
        """Of queries and keys [B, 1, T], as the kernel takes them."""
        return splash.SegmentIds(*(x_B1T[:, 0] for x_B1T in segments)) if segments else None

    def forwards(
        q_BHTN: jax.Array, k_BKSN: jax.Array, v_BKSN: jax.Array, causal: bool, *segments: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        arrays = q_BHTN, k_BKSN, v_BKSN, apart(segments)
        return jax.vmap(forward, (None, 0, 0, 0, 0))(kernel(q_BHTN, k_BKSN, causal), *arrays)

    def backwards(
        residuals: Residuals, gradient_BHTN: jax.Array, causal: bool, *segments: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        arrays = residuals, gradient_BHTN, apart(segments)
        return jax.vmap(backward, (None, 0, 0, 0))(
            kernel(residuals[0], residuals[1], causal), *arrays
        )

    return Part(forwards, backwards)
