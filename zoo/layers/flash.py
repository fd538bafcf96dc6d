"""Flash attention kernels on devices that split batch, heads and positions.

These are cuDNN's kernel, splash (a Pallas kernel), and a ring that applies either splash or plain
products to one part of the keys at a time. Used by `kernels.attend`.

B batch, T query and S key positions, H heads, K key heads, N head dimension. Queries already
include every scale of the logits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mupax.zoo.partition import LANES, ONE_DEVICE, Axes, Layout

BLOCK = 512
"""Default side of a splash block: the number of queries, and of keys, that are read at a time."""
BLOCKS = {"TPU v6 lite": 1024}
"""Larger sides of a splash block for some chips, in positions, by `jax.Device.device_kind`.

The number of FLOPs that a kernel does per byte of keys and values equals the side of its block. If
it is below the FLOPs that the chip can do per byte of memory traffic (560 on v6e, at most 330 on
other chips), the kernel waits for memory.
"""

FUSED = 2048
"""Side of a splash block, in positions, from which a single kernel computes all gradients.

With smaller blocks, one kernel computes the gradient of queries and another those of keys and
values. A single kernel saves two products of seven, as in MaxText's settings. It writes the
gradients of queries once per block of keys, which with blocks of 1024 costs 3 % of a step's cycles
on v5e.
"""


def block_of(length: int, kind: str, limit: int | None = None, *, causal: bool) -> int:
    """Return the number of queries or keys that a splash kernel reads at a time.

    It is the largest multiple of 128 within the limit that divides the length, or 128 if none does.

    Args:
        length: Number of positions on one device, a multiple of 128.
        kind: `jax.Device.device_kind` of the chip.
        limit: Largest result. Default: the chip's own (`BLOCKS`), at most half of the length if
            causal.
        causal: Whether query t sees keys 0..t only.
    """
    largest = limit
    if not largest:
        # Blocks that a causal mask hides are skipped. With a single block per side, there would be
        # none to skip.
        useful_length = length // 2 if causal else length
        largest = min(BLOCKS.get(kind, BLOCK), useful_length)
    sizes = [size for size in range(LANES, largest + 1, LANES) if length % size == 0]
    return max(sizes, default=LANES)


def cudnn_attention(
    q_BTHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    *,
    causal: bool,
    segments_BT: jax.Array | None = None,
    layout: Layout = ONE_DEVICE,
) -> jax.Array:
    """Return attention [B, T, H, N] by cuDNN's flash kernel.

    Every device computes its own batch and heads. If devices split positions and `causal` is True,
    their number must divide the number of heads on a device.

    Args:
        q_BTHN: Queries, bfloat16 or float16. N is a multiple of 8, at most 128 before Hopper and
            256 from Hopper on.
        k_BSKN: Keys, [B, S, K, N]. H is a multiple of K.
        v_BSKN: Values, [B, S, K, N].
        causal: `True` lets query t see keys 0..t, `False` all keys.
        segments_BT: Index of the document of each position, int32. Positions see only their own
            document. The kernel gets a mask of all pairs, which it reads from memory. Default: one
            document.
        layout: Layout of the arrays, `ONE_DEVICE` by default.
    """
    # The kernel's causal mask begins at position 0. Devices that split positions therefore exchange
    # them for heads: each computes a part of its heads at all positions.
    exchanged_axes = layout.mesh_axes("sequence") if causal else ()

    def local(
        q_BTHN: jax.Array, k_BSKN: jax.Array, v_BSKN: jax.Array, *segments: jax.Array
    ) -> jax.Array:
        if exchanged_axes:
            return _cudnn_by_heads(q_BTHN, k_BSKN, v_BSKN, segments, exchanged_axes)
        mask = _segment_mask(*segments)
        return _cudnn(q_BTHN, k_BSKN, v_BSKN, mask, causal=causal)

    segments, segment_axes = _segments(segments_BT)
    return _on_devices(layout, local, (q_BTHN, k_BSKN, v_BSKN), segments, segment_axes)


def _cudnn(
    q_BTHN: jax.Array, k_BSKN: jax.Array, v_BSKN: jax.Array, mask: jax.Array | None, *, causal: bool
) -> jax.Array:
    """Return attention of one device's arrays by cuDNN's kernel, without a further logit scale."""
    return jax.nn.dot_product_attention(
        q_BTHN,
        k_BSKN,
        v_BSKN,
        mask=mask,
        scale=1.0,
        is_causal=causal,
        implementation="cudnn",
    )


def _cudnn_by_heads(
    q_BTHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    segments: tuple[jax.Array, ...],
    mesh_axes: tuple[str, ...],
) -> jax.Array:
    """Return causal attention of one device's positions, computed by heads instead of positions.

    Devices exchange queries, so that each has all positions of a part of the heads. Each slices the
    keys and values of these heads. Results are exchanged back. Call inside `shard_map`.

    Args:
        q_BTHN: Queries at this device's T positions, with all of its heads, and the logit scale in
            them. The number of devices divides H.
        k_BSKN: Keys at all S positions. S is T times the number of devices.
        v_BSKN: Values, [B, S, K, N].
        segments: Document indices of queries [B, T] and of keys [B, S], or an empty tuple.
        mesh_axes: Mesh axes that split positions, over which queries and results are exchanged.
    """
    num_devices = jax.lax.axis_size(mesh_axes)
    device = jax.lax.axis_index(mesh_axes)
    if k_BSKN.shape[2] % num_devices:
        groups = q_BTHN.shape[2] // k_BSKN.shape[2]
        k_BSKN = jnp.repeat(k_BSKN, groups, axis=2)
        v_BSKN = jnp.repeat(v_BSKN, groups, axis=2)
    kv_heads = k_BSKN.shape[2] // num_devices

    mask = None
    if segments:
        # After the exchange queries are at all positions, as the keys are.
        _, key_segments_BS = segments
        mask = _segment_mask(key_segments_BS, key_segments_BS)
    q_BSHN = jax.lax.all_to_all(q_BTHN, mesh_axes, split_axis=2, concat_axis=1, tiled=True)
    k_BSKN = jax.lax.dynamic_slice_in_dim(k_BSKN, device * kv_heads, kv_heads, axis=2)
    v_BSKN = jax.lax.dynamic_slice_in_dim(v_BSKN, device * kv_heads, kv_heads, axis=2)
    y_BSHN = _cudnn(q_BSHN, k_BSKN, v_BSKN, mask, causal=True)
    return jax.lax.all_to_all(y_BSHN, mesh_axes, split_axis=1, concat_axis=2, tiled=True)


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
    """Return attention [B, T, H, N] by splash, JAX's Pallas kernel for TPUs.

    Every device computes its own batch, queries and heads, with the keys of all positions.

    Args:
        q_BTHN: Queries. T is a multiple of 128 on every device.
        k_BSKN: Keys. S is a multiple of 128.
        v_BSKN: Values, [B, S, K, N].
        causal: `True` lets query t see keys 0..t, on whichever device they are, `False` all keys.
        window: Number of keys that a query sees, its own and those before it. Default: all. Only
            with `causal`. Blocks that the window hides are skipped.
        cap: Soft cap of the logits. Default: none.
        block: Positions on a side of a block. Default: the chip's own (`block_of`).
        segments_BT: Document of each position, int32. Positions see only their own document.
            Default: one document.
        interpret: Run the kernel as ordinary operations, on any platform.
        layout: Layout of the arrays, `ONE_DEVICE` by default.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as library
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    from mupax.zoo.layers.ring import splash

    length = q_BTHN.shape[1]
    source = k_BSKN.shape[1]
    shards = layout.num_shards("sequence")
    device_heads = q_BTHN.shape[2] // layout.num_shards("heads")
    block_sizes = _block_sizes(
        length // shards, source, kind=layout.device_kind, limit=block, causal=causal
    )
    # A causal mask depends on the query's position, so every device has a part of the mask.
    query_axis = "sequence" if causal else None
    query_shards = shards if causal else 1
    if window is not None:
        mask = masks.LocalMask((length, source), (window - 1, 0), 0)
    elif causal:
        mask = masks.CausalMask((length, source))
    else:
        mask = masks.FullMask((length // shards, source))
    kernel = library.make_splash_mha(
        masks.MultiHeadMask([mask] * device_heads),
        block_sizes=block_sizes,
        head_shards=1,
        q_seq_shards=query_shards,
        interpret=interpret,
        attn_logits_soft_cap=cap,
    )

    # The kernel's leaves describe its mask block by block. They enter as arguments, because inside
    # of `local` every device needs the rows of its own queries.
    mask_arrays, structure = jax.tree.flatten(kernel)
    mask_axes: list[Axes] = []
    for array in mask_arrays:
        if array.ndim == 1:
            mask_axes.append((query_axis,))
        else:
            mask_axes.append((None, query_axis, None))
    segments, segment_axes = _segments(segments_BT)

    def local(
        q_BTHN: jax.Array, k_BSKN: jax.Array, v_BSKN: jax.Array, *extra: jax.Array
    ) -> jax.Array:
        kernel = jax.tree.unflatten(structure, extra[len(segments) :])
        segment_ids = None
        if segments:
            segment_ids = library.SegmentIds(*extra[: len(segments)])
        q_BHTN = q_BTHN.swapaxes(1, 2)
        k_BKSN = k_BSKN.swapaxes(1, 2)
        v_BKSN = v_BSKN.swapaxes(1, 2)
        attention = jax.vmap(splash.attention, (None, 0, 0, 0, 0))
        y_BHTN = attention(kernel, q_BHTN, k_BKSN, v_BKSN, segment_ids)
        return y_BHTN.swapaxes(1, 2)

    return _on_devices(
        layout,
        local,
        (q_BTHN, k_BSKN, v_BSKN),
        (*segments, *mask_arrays),
        (*segment_axes, *mask_axes),
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
    """Return attention [B, T, H, N] where devices split positions and send keys round a ring.

    Every device begins with the queries, keys and values of its own positions, and receives those
    of the others in turn (`mupax.zoo.layers.ring`). Attention to each part of the keys is computed
    by splash on TPU, and by plain matrix products elsewhere. T and S are equal. With D devices that
    split positions, T is a multiple of 2D if causal, otherwise of D, and on TPU of 128 times that.

    Args:
        q_BTHN, k_BSKN, v_BSKN, causal, block, segments_BT, interpret, layout: Same as in
            `splash_attention`.
    """
    from mupax.zoo.layers.ring import products, ring

    part = products.PART
    if layout.platform == "tpu" or interpret:
        from mupax.zoo.layers.ring import splash

        block_sizes = functools.partial(_block_sizes, kind=layout.device_kind, limit=block)
        part = splash.part(block_sizes, interpret)

    def local(
        q_BTHN: jax.Array, k_BSKN: jax.Array, v_BSKN: jax.Array, *segments: jax.Array
    ) -> jax.Array:
        mesh_axes = layout.mesh_axes("sequence")
        return ring.ring(mesh_axes, part, causal, (q_BTHN, k_BSKN, v_BSKN), *segments)

    def attended(
        q_BTHN: jax.Array, k_BSKN: jax.Array, v_BSKN: jax.Array, *segments: jax.Array
    ) -> jax.Array:
        segment_axes: list[Axes] = [("batch", "sequence")] * len(segments)
        qkv = (q_BTHN, k_BSKN, v_BSKN)
        return _on_devices(layout, local, qkv, segments, segment_axes, source="sequence")

    arrays = _with_heads_alike(layout, q_BTHN, k_BSKN, v_BSKN)
    if segments_BT is not None:
        arrays = (*arrays, segments_BT)
    # A stack whose layout is in zig-zag has moved its positions already.
    if not causal or layout.zigzag:
        return attended(*arrays)
    arrays = ring.zigzag(*arrays, layout=layout)
    y_BTHN = attended(*arrays)
    (y_BTHN,) = ring.zigzag(y_BTHN, layout=layout, back=True)
    return y_BTHN


def _block_sizes(length: int, source: int, *, kind: str, limit: int | None, causal: bool) -> Any:
    """Return the `BlockSizes` of a splash kernel, for its forward and backward pass.

    Args:
        length: Number of queries, a multiple of 128.
        source: Number of keys, a multiple of 128.
        kind: `jax.Device.device_kind` of the chip.
        limit: Largest side of a block. Default: the chip's own (`block_of`).
        causal: Whether query t sees keys 0..t only.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import BlockSizes

    block_q = block_of(length, kind, limit, causal=causal)
    block_kv = block_of(source, kind, limit, causal=causal)
    compute_block_kv = min(block_kv, BLOCK)
    # The fused kernel computes the gradients of queries with those of keys and values, and has no
    # blocks of its own for them.
    fused = block_kv >= FUSED
    dq_block_q = None
    dq_block_kv = None
    if not fused:
        dq_block_q = block_q
        dq_block_kv = block_kv
    return BlockSizes(
        block_q=block_q,
        block_kv=block_kv,
        block_kv_compute=compute_block_kv,
        block_q_dkv=block_q,
        block_kv_dkv=block_kv,
        block_kv_dkv_compute=compute_block_kv,
        use_fused_bwd_kernel=fused,
        block_q_dq=dq_block_q,
        block_kv_dq=dq_block_kv,
    )


def _segment_mask(
    query_segments_BT: jax.Array | None = None, key_segments_BS: jax.Array | None = None
) -> jax.Array | None:
    """Return a mask of keys in the query's document, bool [B, 1, T, S]. `None` without segments."""
    if query_segments_BT is None or key_segments_BS is None:
        return None
    mask_BTS = query_segments_BT[:, :, None] == key_segments_BS[:, None, :]
    return mask_BTS[:, None]


def _segments(segments_BT: jax.Array | None) -> tuple[tuple[jax.Array, ...], tuple[Axes, ...]]:
    """Return the document indices of queries and of keys, and the logical axes of both arrays.

    Both are `segments_BT`, of which devices split the queries' positions, but not the keys'. The
    two tuples are empty if `segments_BT` is `None`.
    """
    if segments_BT is None:
        return (), ()
    return (segments_BT, segments_BT), (("batch", "sequence"), ("batch", None))


def _on_devices(
    layout: Layout,
    local: Callable[..., jax.Array],
    qkv: Sequence[jax.Array],
    extra: Sequence[jax.Array] = (),
    extra_axes: Sequence[Axes] = (),
    source: str | None = None,
) -> jax.Array:
    """Call a function on every device with its own batch, queries and heads.

    The compiler cannot split the kernels by itself.

    Args:
        layout: Layout of the arrays. A batch that it does not divide is not split.
        local: Function (queries, keys, values, *extra) of one device's arrays -> outputs.
        qkv: Queries [B, T, H, N], keys and values [B, S, K, N].
        extra: Further arguments of `local`.
        extra_axes: Logical axes of the arrays in `extra`.
        source: Logical axis of key positions. `None`: every device gets all of them.
    """
    q_BTHN, k_BSKN, v_BSKN = _with_heads_alike(layout, *qkv)
    batch = "batch" if q_BTHN.shape[0] % layout.num_shards("batch") == 0 else None
    query_axes = (batch, "sequence", "heads", None)
    key_axes = (batch, source, "heads", None)
    axes_of_extra = []
    for axes in extra_axes:
        axes_of_extra.append(tuple(batch if axis == "batch" else axis for axis in axes))
    on_devices = layout.local(local, (query_axes, key_axes, key_axes, *axes_of_extra), query_axes)
    return on_devices(q_BTHN, k_BSKN, v_BSKN, *extra)


def _with_heads_alike(
    layout: Layout, q_BTHN: jax.Array, k_BSKN: jax.Array, v_BSKN: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return queries, keys and values such that devices split query heads and key heads alike.

    If devices cannot split key heads, or split them along other mesh axes than query heads, keys
    and values are repeated, so that every query head has a key head of its own.
    """
    groups = q_BTHN.shape[2] // k_BSKN.shape[2]
    divides = k_BSKN.shape[2] % layout.num_shards("kv_heads") == 0
    if not divides or layout.mesh_axes("kv_heads") != layout.mesh_axes("heads"):
        k_BSKN = jnp.repeat(k_BSKN, groups, axis=2)
        v_BSKN = jnp.repeat(v_BSKN, groups, axis=2)
    return q_BTHN, k_BSKN, v_BSKN
