"""softmax(q.k) v by the fastest implementation there is: cuDNN flash on GPU, splash (Pallas) on TPU, tiles of XLA on CPU.

B batch, T query and S key positions, H heads, K key heads, N head dimension. Logits are taken as they are: any scale is
already in q. Softmax is in float32.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from mupax.zoo import partition
from mupax.zoo.families import AttentionName, ConfigError
from mupax.zoo.layers.cpu_attention import SAVED, TILE, merged_attention, tiled_attention

LANES = 128
"""Positions that a splash kernel works on at least at once."""

BLOCK, BLOCKS = 512, {"TPU v6 lite": 1024}
"""Positions on a side of a splash block, and device kinds where it is larger: a side is as many products per byte of keys and
values, and where that is less than the chip's FLOPs per byte of main memory (v6e: 560, others up to 330) the kernel waits."""

FUSED = 2048
"""Side from which the gradients of queries, keys and values are one kernel, as in MaxText's settings: two products of seven less,
but queries' gradients are written once per block of keys, which blocks of 1024 cost 3 % of a step's cycles on v5e."""


def block_of(length: int, kind: str, wanted: int | None = None, *, causal: bool) -> int:
    """Positions on a side of a splash block: the most that divide all of them, at most as many as wanted.

    Args:
        length: positions of one device; a multiple of 128.
        kind: `jax.Device.device_kind`.
        wanted: at most so many; the chip's own unless given, and half of the positions where a mask hides the other half.
        causal: whether one does.
    """
    most = wanted or min(BLOCKS.get(kind, BLOCK), length // 2 if causal else length)
    return max((size for size in range(LANES, most + 1, LANES) if length % size == 0), default=LANES)


def attend(
    q_BTHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    *,
    causal: bool,
    implementation: AttentionName = "auto",
    block: int | None = None,
) -> jax.Array:
    """Attention [B, T, H, N] by the named implementation, on whatever devices are being compiled for.

    Args:
        q_BTHN: queries, with the logit scale.
        k_BSKN: keys; H is a multiple of K.
        v_BSKN: values.
        causal: query t sees keys 0..t, else all.
        implementation: auto takes the first that can of splash, cudnn and xla.
        block: positions on a side of a splash block; the chip's own unless given.

    Raises:
        ConfigError: the named one cannot do this; the text says why.
    """
    layout = partition.current()
    if implementation == "auto":
        kernels: tuple[AttentionName, ...] = ("splash", "cudnn", "xla")
        implementation = next(name for name in kernels if not why_not(name, q_BTHN, k_BSKN, causal))
    elif reason := why_not(implementation, q_BTHN, k_BSKN, causal):
        raise ConfigError(f"model.compute.attention {implementation}: {reason}; write auto or xla")
    if implementation == "splash":
        return splash_attention(q_BTHN, k_BSKN, v_BSKN, causal=causal, block=block)
    if implementation == "cudnn":
        return cudnn_attention(q_BTHN, k_BSKN, v_BSKN, causal=causal)
    if layout.platform == "cpu" and all(layout.ways(axis) == 1 for axis in ("sequence", "heads", "kv_heads")):
        if causal and q_BTHN.shape[1] > TILE:
            return tiled_attention(q_BTHN, k_BSKN, v_BSKN)
        return merged_attention(q_BTHN, k_BSKN, v_BSKN, causal=causal)
    return jax.nn.dot_product_attention(q_BTHN, k_BSKN, v_BSKN, scale=1.0, is_causal=causal, implementation="xla")


def why_not(implementation: AttentionName, q_BTHN: jax.Array, k_BSKN: jax.Array, causal: bool) -> str | None:
    """Why this implementation cannot attend here; None where it can.

    Args:
        implementation: that is asked about; xla always can.
        q_BTHN: queries, of which shape and dtype count.
        k_BSKN: keys, of which the shape does.
        causal: whether a query sees only the keys up to its own.
    """
    layout, size = partition.current(), q_BTHN.shape[-1]
    platform, ways = layout.platform, layout.ways("sequence")
    match implementation:
        case "splash":
            if platform != "tpu":
                return f"the kernel is for TPUs, and this is compiled for {platform}"
            if q_BTHN.shape[1] % (LANES * ways) or k_BSKN.shape[1] % LANES:
                return f"a device's {q_BTHN.shape[1] // ways} positions are not a multiple of {LANES}"
        case "cudnn":
            if platform != "gpu":
                return f"the kernel is for GPUs, and this is compiled for {platform}"
            if q_BTHN.dtype not in (jnp.bfloat16, jnp.float16):
                return f"the kernel is for bfloat16, and model.compute.dtype is {q_BTHN.dtype}"
            capabilities = {str(d.compute_capability) for d in jax.local_devices() if d.platform == "gpu"}
            if foreign := next((name for name in capabilities if not re.fullmatch(r"\d+\.\d+", name)), None):
                return f"the kernel is NVIDIA's, and a GPU here is a {foreign}"
            generation = min((int(name.split(".")[0]) for name in capabilities), default=8)
            if generation < 8:
                return "the kernel needs compute capability 8.0 or later"
            most = 256 if generation >= 9 else 128
            if size % 8 or size > most:
                return f"the head dimension {size} is not a multiple of 8 up to {most}"
            heads = q_BTHN.shape[2] // layout.ways("heads")
            if causal and heads % ways:
                return f"split positions are exchanged for heads, and {ways} do not divide a device's {heads}"
    return None


def cudnn_attention(q_BTHN: jax.Array, k_BSKN: jax.Array, v_BSKN: jax.Array, *, causal: bool) -> jax.Array:
    """Attention by cuDNN's flash kernel, on every device's own batch and heads.

    Args:
        q_BTHN: queries, bfloat16 or float16; N a multiple of 8 up to 128, from Hopper on 256.
        k_BSKN: keys.
        v_BSKN: values.
        causal: query t sees keys 0..t. The kernel's mask begins at position 0: a device of split positions attends for a
            part of its heads at all of them.
    """
    cudnn = functools.partial(jax.nn.dot_product_attention, scale=1.0, is_causal=causal, implementation="cudnn")
    names = partition.current().names("sequence") if causal else ()

    def local(q_BTHN: jax.Array, k_BSKN: jax.Array, v_BSKN: jax.Array) -> jax.Array:
        if not names:
            return cudnn(q_BTHN, k_BSKN, v_BSKN)
        ways, place = jax.lax.axis_size(names), jax.lax.axis_index(names)
        if k_BSKN.shape[2] % ways:
            groups = q_BTHN.shape[2] // k_BSKN.shape[2]
            k_BSKN, v_BSKN = (jnp.repeat(x_BSKN, groups, axis=2) for x_BSKN in (k_BSKN, v_BSKN))
        heads = k_BSKN.shape[2] // ways
        mine = (jax.lax.dynamic_slice_in_dim(x_BSKN, place * heads, heads, axis=2) for x_BSKN in (k_BSKN, v_BSKN))
        y_BTHN = cudnn(jax.lax.all_to_all(q_BTHN, names, split_axis=2, concat_axis=1, tiled=True), *mine)
        return jax.lax.all_to_all(y_BTHN, names, split_axis=1, concat_axis=2, tiled=True)

    return _on_devices(local, (q_BTHN, k_BSKN, v_BSKN))


def splash_attention(
    q_BTHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    *,
    causal: bool,
    block: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """The Pallas kernel for TPUs, on every device's own batch, queries and heads, with all keys of those heads.

    Args:
        q_BTHN: queries; T a multiple of 128 on every device.
        k_BSKN: keys; S a multiple of 128.
        v_BSKN: values.
        causal: query t sees keys 0..t, whichever device it lies on.
        block: positions on a side of a block; the chip's own unless given.
        interpret: run the kernel as ordinary operations, on any platform.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    layout, length, source = partition.current(), q_BTHN.shape[1], k_BSKN.shape[1]
    shards = layout.ways("sequence")
    kind = layout.mesh.devices.flat[0].device_kind
    block_q, block_kv = (block_of(n, kind, block, causal=causal) for n in (length // shards, source))
    fused = block_kv >= FUSED
    blocks = splash.BlockSizes(
        block_q=block_q, block_kv=block_kv, block_kv_compute=min(block_kv, BLOCK), block_q_dkv=block_q,
        block_kv_dkv=block_kv, block_kv_dkv_compute=min(block_kv, BLOCK), use_fused_bwd_kernel=fused,
        block_q_dq=None if fused else block_q, block_kv_dq=None if fused else block_kv,
    )  # fmt: skip
    # What the kernel knows of its mask, block by block: where a mask depends on the query, a device gets its own rows.
    axis = "sequence" if causal else None
    mask = masks.CausalMask((length, source)) if causal else masks.FullMask((length // shards, source))
    kernel = splash.make_splash_mha(
        masks.MultiHeadMask([mask] * (q_BTHN.shape[2] // layout.ways("heads"))), block_sizes=blocks,
        head_shards=1, q_seq_shards=shards if causal else 1, residual_checkpoint_name=SAVED, interpret=interpret,
    )  # fmt: skip
    arrays, structure = jax.tree.flatten(kernel)
    axes = tuple((axis,) if x.ndim == 1 else (None, axis, None) for x in arrays)

    def local(q_BTHN: jax.Array, k_BSKN: jax.Array, v_BSKN: jax.Array, *arrays: jax.Array) -> jax.Array:
        run = jax.vmap(jax.tree.unflatten(structure, arrays))
        return run(q_BTHN.swapaxes(1, 2), k_BSKN.swapaxes(1, 2), v_BSKN.swapaxes(1, 2)).swapaxes(1, 2)

    return _on_devices(local, (q_BTHN, k_BSKN, v_BSKN), arrays, axes)


def _on_devices(
    local: Callable[..., jax.Array],
    qkv: tuple[jax.Array, jax.Array, jax.Array],
    others: Sequence[jax.Array] = (),
    others_axes: tuple[partition.Axes, ...] = (),
) -> jax.Array:
    """A kernel that the compiler cannot split, on every device's own batch, queries and heads."""
    q_BTHN, k_BSKN, v_BSKN = qkv
    layout = partition.current()
    if k_BSKN.shape[2] % layout.ways("kv_heads") or layout.names("kv_heads") != layout.names("heads"):
        # Key heads lie otherwise than the queries that use them: give every query head its own.
        groups = q_BTHN.shape[2] // k_BSKN.shape[2]
        k_BSKN, v_BSKN = (jnp.repeat(x_BSKN, groups, axis=2) for x_BSKN in (k_BSKN, v_BSKN))
    batch = "batch" if q_BTHN.shape[0] % layout.ways("batch") == 0 else None
    queries, keys = (batch, "sequence", "heads", None), (batch, None, "heads", None)
    return layout.local(local, (queries, keys, keys, *others_axes), queries)(q_BTHN, k_BSKN, v_BSKN, *others)
