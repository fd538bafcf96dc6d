"""Flash kernels on devices that split batch, heads and positions: cuDNN's, splash (Pallas), and a ring of either's parts.

B batch, T query and S key positions, H heads, K key heads, N head dimension. Any scale is already in q.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mupax.zoo.partition import LANES, ONE_DEVICE, Axes, Layout

BLOCK, BLOCKS = 512, {"TPU v6 lite": 1024}
"""Positions on a side of a splash block, and device kinds where it is larger: a side is as many products per byte of keys and
values, and where that is less than the chip's FLOPs per byte of main memory (v6e: 560, others up to 330) the kernel waits."""

FUSED = 2048
"""Side from which the gradients of queries, keys and values are one kernel, as in MaxText's settings: two products of seven less,
but queries' gradients are written once per block of keys, which blocks of 1024 cost 3 % of a step's cycles on v5e."""


def block_of(length: int, kind: str, limit: int | None = None, *, causal: bool) -> int:
    """Positions on a side of a splash block: the most that divide all of them, at most as many as wanted.

    Args:
        length: positions of one device; a multiple of 128.
        kind: `jax.Device.device_kind`.
        limit: at most so many; the chip's own unless given, and half of the positions where a mask hides the other half.
        causal: whether one does.
    """
    most = limit or min(BLOCKS.get(kind, BLOCK), length // 2 if causal else length)
    return max(
        (size for size in range(LANES, most + 1, LANES) if length % size == 0), default=LANES
    )


def cudnn_attention(
    q_BTHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    *,
    causal: bool,
    segments_BT: jax.Array | None = None,
    layout: Layout = ONE_DEVICE,
) -> jax.Array:
    """Return attention by cuDNN's flash kernel, on every device's own batch and heads.

    Args:
        q_BTHN: queries, bfloat16 or float16; N a multiple of 8 up to 128, from Hopper on 256.
        k_BSKN: keys.
        v_BSKN: values.
        causal: query t sees keys 0..t. The kernel's mask begins at position 0: a device of split positions attends for a
            part of its heads at all of them.
        segments_BT: int32, of what sees one another; the kernel takes them as a mask of all pairs, which it reads from memory.
        layout: how arrays lie on devices.
    """
    cudnn = functools.partial(
        jax.nn.dot_product_attention, scale=1.0, is_causal=causal, implementation="cudnn"
    )
    names = layout.mesh_axes("sequence") if causal else ()

    def local(
        q_BTHN: jax.Array, k_BSKN: jax.Array, v_BSKN: jax.Array, *segments: jax.Array
    ) -> jax.Array:
        if not names:
            return cudnn(q_BTHN, k_BSKN, v_BSKN, mask=_mask(*segments))
        ways, place = jax.lax.axis_size(names), jax.lax.axis_index(names)
        if k_BSKN.shape[2] % ways:
            groups = q_BTHN.shape[2] // k_BSKN.shape[2]
            k_BSKN, v_BSKN = (jnp.repeat(x_BSKN, groups, axis=2) for x_BSKN in (k_BSKN, v_BSKN))
        heads = k_BSKN.shape[2] // ways
        mine = (
            jax.lax.dynamic_slice_in_dim(x_BSKN, place * heads, heads, axis=2)
            for x_BSKN in (k_BSKN, v_BSKN)
        )
        mask = _mask(*segments[1:], *segments[1:])  # of whole positions, as keys are
        y_BTHN = cudnn(
            jax.lax.all_to_all(q_BTHN, names, split_axis=2, concat_axis=1, tiled=True),
            *mine,
            mask=mask,
        )
        return jax.lax.all_to_all(y_BTHN, names, split_axis=1, concat_axis=2, tiled=True)

    return _on_devices(layout, local, (q_BTHN, k_BSKN, v_BSKN), *_segments(segments_BT))


def splash_attention(
    q_BTHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    *,
    causal: bool,
    window: int | None = None,
    cap: float | None = None,
    block: int | None = None,
    segments_BT: jax.Array | None = None,
    interpret: bool = False,
    layout: Layout = ONE_DEVICE,
) -> jax.Array:
    """Return attention by the Pallas kernel for TPUs, on every device's own batch, queries and heads, with all keys of those heads.

    Args:
        q_BTHN: queries; T a multiple of 128 on every device.
        k_BSKN: keys; S a multiple of 128.
        v_BSKN: values.
        causal: query t sees keys 0..t, whichever device it lies on.
        window: causal alone: of those the last so many; blocks that it hides are skipped.
        cap: of logits.
        block: positions on a side of a block; the chip's own unless given.
        segments_BT: int32, of what sees one another.
        interpret: run the kernel as ordinary operations, on any platform.
        layout: how arrays lie on devices.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as library
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    from mupax.zoo.layers.ring import splash

    length, source = q_BTHN.shape[1], k_BSKN.shape[1]
    shards = layout.num_shards("sequence")
    blocks = _blocks(length // shards, source, kind=layout.device_kind, limit=block, causal=causal)
    # What the kernel knows of its mask, block by block: where a mask depends on the query, a device gets its own rows.
    axis = "sequence" if causal else None
    mask = (
        masks.CausalMask((length, source)) if causal else masks.FullMask((length // shards, source))
    )
    if window is not None:
        mask = masks.LocalMask((length, source), (window - 1, 0), 0)
    kernel = library.make_splash_mha(
        masks.MultiHeadMask([mask] * (q_BTHN.shape[2] // layout.num_shards("heads"))), block_sizes=blocks,
        head_shards=1, q_seq_shards=shards if causal else 1, interpret=interpret, attn_logits_soft_cap=cap,
    )  # fmt: skip
    arrays, structure = jax.tree.flatten(kernel)
    axes = tuple((axis,) if x.ndim == 1 else (None, axis, None) for x in arrays)

    segments, segments_axes = _segments(segments_BT)

    def local(
        q_BTHN: jax.Array, k_BSKN: jax.Array, v_BSKN: jax.Array, *extra: jax.Array
    ) -> jax.Array:
        kernel = jax.tree.unflatten(structure, extra[len(segments) :])
        apart = library.SegmentIds(*extra[: len(segments)]) if segments else None
        heads_first = (x.swapaxes(1, 2) for x in (q_BTHN, k_BSKN, v_BSKN))
        return jax.vmap(splash.attention, (None, 0, 0, 0, 0))(kernel, *heads_first, apart).swapaxes(
            1, 2
        )

    return _on_devices(
        layout, local, (q_BTHN, k_BSKN, v_BSKN), (*segments, *arrays), (*segments_axes, *axes)
    )


def ring_attention(
    q_BTHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    *,
    causal: bool,
    block: int | None = None,
    segments_BT: jax.Array | None = None,
    interpret: bool = False,
    layout: Layout = ONE_DEVICE,
) -> jax.Array:
    """Return attention where devices split positions, of which each holds its own: keys go round (`mupax.zoo.layers.ring`).

    Args:
        q_BTHN, k_BSKN, v_BSKN, causal, block, segments_BT, interpret, layout: as `splash_attention`, whose kernel looks at each part on
            TPU; plain products elsewhere. Segments go round with keys.
    """
    from mupax.zoo.layers.ring import products, ring

    part = products.PART
    if layout.platform == "tpu" or interpret:
        from mupax.zoo.layers.ring import splash

        part = splash.part(
            functools.partial(_blocks, kind=layout.device_kind, limit=block), interpret
        )

    def local(
        q_BTHN: jax.Array, k_BSKN: jax.Array, v_BSKN: jax.Array, *segments: jax.Array
    ) -> jax.Array:
        return ring.ring(
            layout.mesh_axes("sequence"), part, causal, (q_BTHN, k_BSKN, v_BSKN), *segments
        )

    def attended(*arrays: jax.Array) -> jax.Array:
        axes: tuple[Axes, ...] = tuple(("batch", "sequence") for _ in arrays[3:])
        return _on_devices(layout, local, arrays[:3], arrays[3:], axes, source="sequence")

    arrays = (
        *_heads_alike(layout, q_BTHN, k_BSKN, v_BSKN),
        *(() if segments_BT is None else (segments_BT,)),
    )
    if not causal or layout.zigzag:
        return attended(*arrays)
    y_BTHN = attended(*ring.zigzag(*arrays, layout=layout))
    return ring.zigzag(y_BTHN, layout=layout, back=True)[0]


def _blocks(length: int, source: int, *, kind: str, limit: int | None, causal: bool) -> Any:
    """Blocks of a splash kernel for so many queries and keys."""
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import BlockSizes

    block_q, block_kv = (block_of(n, kind, limit, causal=causal) for n in (length, source))
    fused = block_kv >= FUSED
    return BlockSizes(
        block_q=block_q, block_kv=block_kv, block_kv_compute=min(block_kv, BLOCK), block_q_dkv=block_q,
        block_kv_dkv=block_kv, block_kv_dkv_compute=min(block_kv, BLOCK), use_fused_bwd_kernel=fused,
        block_q_dq=None if fused else block_q, block_kv_dq=None if fused else block_kv,
    )  # fmt: skip


def _mask(
    queries_BT: jax.Array | None = None, keys_BS: jax.Array | None = None
) -> jax.Array | None:
    """Which keys are of a query's segment, bool [B, 1, T, S]; None where all are seen."""
    return (
        None
        if queries_BT is None or keys_BS is None
        else (queries_BT[:, :, None] == keys_BS[:, None, :])[:, None]
    )


def _segments(segments_BT: jax.Array | None) -> tuple[tuple[jax.Array, ...], tuple[Axes, ...]]:
    """Segments of queries and of keys, and how they lie; nothing where all see one another."""
    if segments_BT is None:
        return (), ()
    return (segments_BT, segments_BT), (("batch", "sequence"), ("batch", None))


def _on_devices(
    layout: Layout,
    local: Callable[..., jax.Array],
    qkv: Sequence[jax.Array],
    extra: Sequence[jax.Array] = (),
    extra_axes: tuple[Axes, ...] = (),
    source: str | None = None,
) -> jax.Array:
    """Run a kernel that the compiler cannot split on every device's own batch, queries and heads."""
    q_BTHN, k_BSKN, v_BSKN = _heads_alike(layout, *qkv)
    batch = "batch" if q_BTHN.shape[0] % layout.num_shards("batch") == 0 else None
    queries, keys = (batch, "sequence", "heads", None), (batch, source, "heads", None)
    extra_axes = tuple(
        tuple(batch if axis == "batch" else axis for axis in axes) for axes in extra_axes
    )
    return layout.local(local, (queries, keys, keys, *extra_axes), queries)(
        q_BTHN, k_BSKN, v_BSKN, *extra
    )


def _heads_alike(
    layout: Layout, q_BTHN: jax.Array, k_BSKN: jax.Array, v_BSKN: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return queries, keys and values whose heads lie alike: where they would not, every query head has its own key head."""
    groups = q_BTHN.shape[2] // k_BSKN.shape[2]
    if k_BSKN.shape[2] % layout.num_shards("kv_heads") or layout.mesh_axes(
        "kv_heads"
    ) != layout.mesh_axes("heads"):
        k_BSKN, v_BSKN = (jnp.repeat(x_BSKN, groups, axis=2) for x_BSKN in (k_BSKN, v_BSKN))
    return q_BTHN, k_BSKN, v_BSKN
