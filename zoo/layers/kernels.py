"""Attention softmax(q k) v, and the choice among its implementations.

These are cuDNN flash (GPU), splash (a Pallas kernel, TPU), a ring over devices that split
positions, and XLA's products. On CPU, batch and heads are merged into one dimension R, the layout
that CPUs like best, and causal attention is computed tile by tile.

The kernels do not return their logits, so a run that measures the largest ones computes them beside
the attention, in blocks of queries and keys (`largest_logits`).

B batch, T query and S key positions, P parts of the positions that devices split, H heads, K key
heads, G query heads per key head, N head dimension. Queries already include every scale of the
logits. The softmax is in float32.
"""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from mupax.zoo.families import AttentionName, ConfigError
from mupax.zoo.layers.linear import SAVED, softcapped
from mupax.zoo.partition import LANES, ONE_DEVICE, Layout

TILE = 64
"""Fewest queries in a tile of `tiled_attention`. Smaller tiles cost more than masked products."""
MAX_TILES = 8
"""Largest number of tiles in `tiled_attention`. Every tile is compiled separately."""

ArrayOrShape = jax.Array | jax.ShapeDtypeStruct

AUTO: dict[str, tuple[AttentionName, ...]] = {"tpu": ("ring", "splash"), "gpu": ("cudnn", "ring")}
"""Implementations that auto tries by platform, in order, before XLA.

On GPUs cuDNN comes before the ring: devices that split positions exchange them for heads, and the
kernel then sees all positions at once.
"""

RING = 4096
"""Fewest positions per device for which `compute.attention` auto takes a ring on TPU.

The time that a ring saves grows with the square of the number of positions, and the cost of
combining its parts only linearly. Both are equal at about 2000 positions per device on v5p and 2800
on v5e (lm-8b at 131,072 and 32,768 tokens).
"""

_HIDDEN = jnp.finfo(jnp.float32).min
"""Logit of a key that a query does not see."""


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
    """Return attention [B, T, H, N], computed by two products over all queries and keys.

    Batch and heads are one dimension of these products.

    Args:
        q_BTHN: Queries, which already include the logit scale.
        k_BSKN: Keys. H is a multiple of K.
        v_BSKN: Values, [B, S, K, N].
        causal: `True` lets query t see keys 0..t, `False` all keys.
        window: Number of keys that a query sees, its own and those before it. Default: all. Only
            read if `causal`.
        cap: Soft cap of the logits, applied before the bias. Default: none.
        mask_BS: bool, `True` at keys that queries may see. Default: all.
        bias_HTS: Bias added to the logits of every example. Default: none.
        segments_BT: Document of each position, int32. Positions see only their own document.
            Needs T = S. Default: one document.
    """
    heads = q_BTHN.shape[2]
    q_RTN, k_RSN, v_RSN = _merge_batch_and_heads(q_BTHN, k_BSKN, v_BSKN)
    logits_RTS = jnp.einsum("btn,bsn->bts", q_RTN, k_RSN, preferred_element_type=jnp.float32)
    logits_RTS = softcapped(logits_RTS, cap)
    if bias_HTS is not None:
        logits_BHTS = logits_RTS.reshape(-1, *bias_HTS.shape) + bias_HTS
        logits_RTS = logits_BHTS.reshape(logits_RTS.shape)

    if mask_BS is not None:
        mask_R1S = jnp.repeat(mask_BS, heads, axis=0)[:, None]
        logits_RTS = jnp.where(mask_R1S, logits_RTS, _HIDDEN)
    if segments_BT is not None:
        segments_RT = jnp.repeat(segments_BT, heads, axis=0)
        logits_RTS = jnp.where(_same_segment(segments_RT), logits_RTS, _HIDDEN)
    if causal:
        _, queries, keys = logits_RTS.shape
        logits_RTS = jnp.where(_causal_mask(queries, keys, window), logits_RTS, _HIDDEN)

    weights_RTS = jax.nn.softmax(logits_RTS, axis=-1).astype(v_RSN.dtype)
    y_RTN = jnp.einsum("bts,bsn->btn", weights_RTS, v_RSN)
    return _split_batch_and_heads(y_RTN, heads)


def tiled_attention(
    q_BTHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    *,
    window: int | None = None,
    cap: float | None = None,
    segments_BT: jax.Array | None = None,
) -> jax.Array:
    """Return causal attention [B, T, H, N], computed by tiles of queries.

    A tile is a range of queries. It is not multiplied with keys that none of its queries sees. The
    backward pass recomputes its attention weights. Tiles are plain operations under
    `jax.checkpoint`, so derivatives of every kind and order work.

    Args:
        q_BTHN, k_BSKN, v_BSKN, window, cap, segments_BT: Same as in `merged_attention`.
    """
    heads = q_BTHN.shape[2]
    q_RTN, k_RSN, v_RSN = _merge_batch_and_heads(q_BTHN, k_BSKN, v_BSKN)
    length = q_RTN.shape[1]
    # The loop over tiles is unrolled when it is traced, so the number of tiles is limited.
    tile_size = max(TILE, -(-length // MAX_TILES))
    segments_RT = None
    if segments_BT is not None:
        segments_RT = jnp.repeat(segments_BT, heads, axis=0)

    policy = jax.checkpoint_policies.save_only_these_names(SAVED)
    outputs = []
    for start in range(0, length, tile_size):
        tile = functools.partial(
            _tile,
            start=start,
            tile_size=tile_size,
            window=window,
            cap=cap,
            segments_RT=segments_RT,
        )
        recomputed_tile = jax.checkpoint(tile, policy=policy)
        outputs.append(recomputed_tile(q_RTN, k_RSN, v_RSN))
    y_RTN = jnp.concatenate(outputs, axis=1)
    return _split_batch_and_heads(y_RTN, heads)


def _tile(
    q_RTN: jax.Array,
    k_RSN: jax.Array,
    v_RSN: jax.Array,
    *,
    start: int,
    tile_size: int,
    window: int | None,
    cap: float | None,
    segments_RT: jax.Array | None,
) -> jax.Array:
    """Return causal attention of queries start to start + tile_size, [R, tile_size, N].

    The last tile can have fewer queries. The arguments have all T queries and S keys, and segments
    for all R.
    """
    stop = start + tile_size
    first_key = 0
    if window is not None:
        first_key = max(0, start - window + 1)
    q_RTN = q_RTN[:, start:stop]
    k_RSN = k_RSN[:, first_key:stop]
    v_RSN = v_RSN[:, first_key:stop]

    # The axis of keys comes before that of queries. Reductions over keys are then elementwise
    # operations on vectors of queries.
    logits_RST = jnp.einsum("rsn,rtn->rst", k_RSN, q_RTN, preferred_element_type=jnp.float32)
    logits_RST = softcapped(logits_RST, cap)
    key_S1 = first_key + jnp.arange(k_RSN.shape[1])[:, None]
    query_T = start + jnp.arange(q_RTN.shape[1])
    mask_ST = key_S1 <= query_T
    if window is not None:
        mask_ST &= key_S1 > query_T - window
    if segments_RT is not None:
        key_segments_RS = segments_RT[:, first_key:stop]
        query_segments_RT = segments_RT[:, start:stop]
        mask_ST &= key_segments_RS[:, :, None] == query_segments_RT[:, None, :]
    logits_RST = jnp.where(mask_ST, logits_RST, _HIDDEN)

    # The softmax's maximum and sum and the unnormalized outputs have the name `SAVED`, so that a
    # remat policy can keep them and need not run the products of a tile again.
    max_R1T = jax.lax.stop_gradient(jnp.max(logits_RST, axis=1, keepdims=True))
    max_R1T = checkpoint_name(max_R1T, SAVED)
    weights_RST = jnp.exp(logits_RST - max_R1T)
    y_RTN = jnp.einsum(
        "rst,rsn->rtn", weights_RST.astype(v_RSN.dtype), v_RSN, preferred_element_type=jnp.float32
    )
    sum_RT1 = checkpoint_name(jnp.sum(weights_RST, axis=1)[..., None], SAVED)
    y_RTN = checkpoint_name(y_RTN, SAVED)
    return (y_RTN / sum_RT1).astype(v_RSN.dtype)


def _same_segment(segments_BT: jax.Array) -> jax.Array:
    """Return a mask, bool [B, T, T], that is True for pairs of positions of the same document."""
    return segments_BT[:, :, None] == segments_BT[:, None, :]


def _causal_mask(queries: int, keys: int, window: int | None) -> jax.Array:
    """Return a mask, bool [T, S], that is True for keys that a query sees.

    Args:
        window: Number of keys that a query sees, its own and those before it. `None` is all keys up
            to its own.
    """
    mask_TS = jnp.tri(queries, keys, dtype=bool)
    if window is not None:
        mask_TS &= ~jnp.tri(queries, keys, k=-window, dtype=bool)
    return mask_TS


def _merge_batch_and_heads(
    q_BTHN: jax.Array, k_BSKN: jax.Array, v_BSKN: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return queries [R, T, N] and keys and values [R, S, N], with R = B * H.

    A key head is repeated for each query head that reads it.
    """
    groups = q_BTHN.shape[2] // k_BSKN.shape[2]

    def merged(x: jax.Array, repeats: int) -> jax.Array:
        if repeats > 1:
            x = jnp.repeat(x, repeats, axis=2)
        batch, length, heads, size = x.shape
        return x.swapaxes(1, 2).reshape(batch * heads, length, size)

    return merged(q_BTHN, 1), merged(k_BSKN, groups), merged(v_BSKN, groups)


def _split_batch_and_heads(y_RTN: jax.Array, heads: int) -> jax.Array:
    """Return [R, T, N] as [B, T, H, N]."""
    rows, length, size = y_RTN.shape
    y_BHTN = y_RTN.reshape(rows // heads, heads, length, size)
    return y_BHTN.swapaxes(1, 2)


def widened(*heads_BTHN: jax.Array) -> list[jax.Array]:
    """Return the arrays padded with zeros to the largest head dimension among them.

    Kernels need queries, keys and values of one size. The zeros change no product.

    Args:
        *heads_BTHN: Queries, keys and values, [B, T, heads, N], whose N can differ.
    """
    largest = max(x_BTHN.shape[-1] for x_BTHN in heads_BTHN)
    padded = []
    for x_BTHN in heads_BTHN:
        padding = (0, largest - x_BTHN.shape[-1])
        padded.append(jnp.pad(x_BTHN, ((0, 0), (0, 0), (0, 0), padding)))
    return padded


def attend(
    q_BTHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    *,
    causal: bool,
    window: int | None = None,
    cap: float | None = None,
    implementation: AttentionName = "auto",
    block: int | None = None,
    segments_BT: jax.Array | None = None,
    layout: Layout = ONE_DEVICE,
) -> jax.Array:
    """Return attention [B, T, H, N] by the named implementation.

    Args:
        q_BTHN: Queries, which already include the logit scale.
        k_BSKN: Keys. H is a multiple of K.
        v_BSKN: Values. Their N can differ from that of the keys.
        causal: `True` lets query t see keys 0..t, `False` all keys.
        window: Number of keys that a query sees, its own and those before it. Default: all. Only
            with `causal`.
        cap: Soft cap of the logits (`softcapped`). Default: none.
        implementation: Name of an implementation, or auto for the one that `chosen` returns.
        block: Positions on a side of a splash block. Default: the chip's own (`flash.block_of`).
        segments_BT: Document of each position, int32. Positions see only their own document.
            Needs T = S. Default: one document.
        layout: Layout of the arrays on the devices that this is compiled for.

    Raises:
        ConfigError: If the named implementation cannot compute this attention.
    """
    value_size = v_BSKN.shape[-1]
    # The implementations need one head size for queries, keys and values. `widened` pads with
    # zeros, which change no product.
    if value_size != q_BTHN.shape[-1]:
        q_BTHN, k_BSKN, v_BSKN = widened(q_BTHN, k_BSKN, v_BSKN)
        y_BTHN = attend(
            q_BTHN,
            k_BSKN,
            v_BSKN,
            causal=causal,
            window=window,
            cap=cap,
            implementation=implementation,
            block=block,
            segments_BT=segments_BT,
            layout=layout,
        )
        return y_BTHN[..., :value_size]

    has_segments = segments_BT is not None
    implementation = chosen(
        implementation, q_BTHN, k_BSKN, causal, window, cap, has_segments, layout=layout
    )
    # If devices split the positions, every device keeps its own queries. Ring attention also keeps
    # the keys and values split. All other implementations gather them.
    source = "sequence" if implementation == "ring" else None
    k_BSKN = layout.constrain(k_BSKN, ("batch", source, "kv_heads", None))
    v_BSKN = layout.constrain(v_BSKN, ("batch", source, "kv_heads", None))

    if implementation == "xla":
        return _xla_attention(
            q_BTHN,
            k_BSKN,
            v_BSKN,
            causal=causal,
            window=window,
            cap=cap,
            segments_BT=segments_BT,
            layout=layout,
        )

    # Imported only here, because models whose attention is XLA's do not need the kernels.
    from mupax.zoo.layers import flash

    if implementation == "cudnn":
        return flash.cudnn_attention(
            q_BTHN, k_BSKN, v_BSKN, causal=causal, segments_BT=segments_BT, layout=layout
        )
    if implementation == "ring":
        return flash.ring_attention(
            q_BTHN,
            k_BSKN,
            v_BSKN,
            causal=causal,
            block=block,
            segments_BT=segments_BT,
            layout=layout,
        )
    return flash.splash_attention(
        q_BTHN,
        k_BSKN,
        v_BSKN,
        causal=causal,
        window=window,
        cap=cap,
        block=block,
        segments_BT=segments_BT,
        layout=layout,
    )


def _xla_attention(
    q_BTHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    *,
    causal: bool,
    window: int | None,
    cap: float | None,
    segments_BT: jax.Array | None,
    layout: Layout,
) -> jax.Array:
    """Return attention [B, T, H, N] by XLA's products, of queries that already include the scale.

    It is computed in tiles of queries if `tiled` returns True, otherwise with batch and heads
    merged into one dimension if `merges_heads` returns True, otherwise with dimensions as they are.
    """
    if tiled(causal, q_BTHN.shape[1], layout=layout):
        return tiled_attention(
            q_BTHN, k_BSKN, v_BSKN, window=window, cap=cap, segments_BT=segments_BT
        )
    if merges_heads(layout):
        return merged_attention(
            q_BTHN, k_BSKN, v_BSKN, causal=causal, window=window, cap=cap, segments_BT=segments_BT
        )
    return split_attention(
        q_BTHN, k_BSKN, v_BSKN, causal=causal, window=window, cap=cap, segments_BT=segments_BT
    )


def split_attention(
    q_BTHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    *,
    causal: bool,
    window: int | None = None,
    cap: float | None = None,
    segments_BT: jax.Array | None = None,
) -> jax.Array:
    """Return attention [B, T, H, N] by XLA, with batch, positions and heads as separate dimensions.

    Devices can split every one of them.

    Args:
        q_BTHN, k_BSKN, v_BSKN, causal, window, cap, segments_BT: Same as in `attend`.
    """
    mask_B1TS = None
    if segments_BT is not None:
        mask_B1TS = _same_segment(segments_BT)[:, None]

    # jax.nn.dot_product_attention has no soft cap.
    if cap is None:
        local_window = None if window is None else (window - 1, 0)
        return jax.nn.dot_product_attention(
            q_BTHN,
            k_BSKN,
            v_BSKN,
            None,
            mask_B1TS,
            scale=1.0,
            is_causal=causal,
            local_window_size=local_window,
            implementation="xla",
        )

    batch, length, heads, size = q_BTHN.shape
    kv_heads = k_BSKN.shape[2]
    q_BTKGN = q_BTHN.reshape(batch, length, kv_heads, heads // kv_heads, size)
    logits_BKGTS = jnp.einsum(
        "btkgn,bskn->bkgts", q_BTKGN, k_BSKN, preferred_element_type=jnp.float32
    )
    logits_BKGTS = softcapped(logits_BKGTS, cap)
    if causal:
        mask_TS = _causal_mask(length, k_BSKN.shape[1], window)
        logits_BKGTS = jnp.where(mask_TS, logits_BKGTS, _HIDDEN)
    if mask_B1TS is not None:
        mask_B11TS = mask_B1TS[:, None]
        logits_BKGTS = jnp.where(mask_B11TS, logits_BKGTS, _HIDDEN)
    weights_BKGTS = jax.nn.softmax(logits_BKGTS, axis=-1).astype(v_BSKN.dtype)
    y_BTKGN = jnp.einsum("bkgts,bskn->btkgn", weights_BKGTS, v_BSKN)
    return y_BTKGN.reshape(q_BTHN.shape)


def tiled(causal: bool, length: int, *, layout: Layout = ONE_DEVICE) -> bool:
    """Return whether XLA computes attention in tiles of queries (`tiled_attention`).

    It does if attention is causal, has more than `TILE` queries, and `merges_heads` is True.

    Args:
        causal: Whether query t sees keys 0..t only.
        length: Number of queries, `q_BTHN.shape[1]`.
        layout: Layout of the arrays, `ONE_DEVICE` by default.
    """
    return causal and length > TILE and merges_heads(layout)


def merges_heads(layout: Layout) -> bool:
    """Return whether XLA's attention merges batch and heads into one dimension.

    It does on a CPU, if devices split neither heads nor positions. `merged_attention` and
    `tiled_attention` then compute it.
    """
    if layout.platform != "cpu":
        return False
    return all(layout.num_shards(axis) == 1 for axis in ("sequence", "heads", "kv_heads"))


def chosen(
    implementation: AttentionName,
    q_BTHN: ArrayOrShape,
    k_BSKN: ArrayOrShape,
    causal: bool,
    window: int | None = None,
    cap: float | None = None,
    apart: bool = False,
    *,
    layout: Layout = ONE_DEVICE,
) -> AttentionName:
    """Return the name of the implementation that computes an attention.

    With auto, it is the first one of the platform in `AUTO` that can compute the attention, and
    "xla" if none can. On TPU, auto takes a ring only from `RING` positions per device on.

    Args:
        implementation, q_BTHN, k_BSKN, causal, window, cap, apart, layout: Same as in `why_not`.
            `implementation` can also be auto. Any other name is returned.

    Raises:
        ConfigError: If the named implementation cannot compute the attention. The message has the
            reason.
    """
    if implementation != "auto":
        reason = why_not(implementation, q_BTHN, k_BSKN, causal, window, cap, apart, layout=layout)
        if reason is not None:
            raise ConfigError(
                f"model.compute.attention {implementation}: {reason}; write auto or xla"
            )
        return implementation

    is_short = q_BTHN.shape[1] < RING * layout.num_shards("sequence")
    for name in AUTO.get(layout.platform, ()):
        # With few positions per device, combining a ring's parts costs more than it saves.
        if name == "ring" and layout.platform == "tpu" and is_short:
            continue
        reason = why_not(name, q_BTHN, k_BSKN, causal, window, cap, apart, layout=layout)
        if reason is None:
            return name
    return "xla"


def why_not(
    implementation: AttentionName,
    q_BTHN: ArrayOrShape,
    k_BSKN: ArrayOrShape,
    causal: bool,
    window: int | None = None,
    cap: float | None = None,
    apart: bool = False,
    *,
    layout: Layout = ONE_DEVICE,
) -> str | None:
    """Return the reason why an implementation cannot compute an attention, or `None` if it can.

    Args:
        implementation: Name of an implementation. xla can always compute it.
        q_BTHN: Queries, of which only shape and dtype are read.
        k_BSKN: Keys, of which only the shape is read.
        causal: Whether query t sees keys 0..t only.
        window: Number of keys that a query sees. `None`: no window.
        cap: Soft cap of the logits. `None`: no cap.
        apart: Whether positions see only their own document.
        layout: Layout of the arrays on the devices that this is compiled for.
    """
    if cap is not None and implementation in ("ring", "cudnn"):
        return f"it has no cap of logits, and model.attention_softcap is {cap}"
    if implementation == "ring":
        return _why_not_ring(q_BTHN, k_BSKN, causal, window, layout)
    if implementation == "splash":
        return _why_not_splash(q_BTHN, k_BSKN, layout)
    if implementation == "cudnn":
        return _why_not_cudnn(q_BTHN, causal, window, apart, layout)
    return None


def _why_not_ring(
    q_BTHN: ArrayOrShape, k_BSKN: ArrayOrShape, causal: bool, window: int | None, layout: Layout
) -> str | None:
    length = q_BTHN.shape[1]
    shards = layout.num_shards("sequence")
    # With a causal mask every device holds two parts of the positions (zig-zag).
    parts = 2 * shards if causal else shards
    unit = LANES if layout.platform == "tpu" else 1
    if window is not None:
        return f"parts of keys go round whole, and model.window {window} hides most of them"
    if shards == 1:
        return "it is for positions that devices split, and mesh.sequence is 1"
    if length % (parts * unit) or k_BSKN.shape[1] != length:
        return f"{length} positions are not {parts} parts of a multiple of {unit}"
    return None


def _why_not_splash(q_BTHN: ArrayOrShape, k_BSKN: ArrayOrShape, layout: Layout) -> str | None:
    length = q_BTHN.shape[1]
    shards = layout.num_shards("sequence")
    if layout.platform != "tpu":
        return f"the kernel is for TPUs, and this is compiled for {layout.platform}"
    if length % (LANES * shards) or k_BSKN.shape[1] % LANES:
        return f"a device's {length // shards} positions are not a multiple of {LANES}"
    return None


def _why_not_cudnn(
    q_BTHN: ArrayOrShape, causal: bool, window: int | None, apart: bool, layout: Layout
) -> str | None:
    _, length, heads, size = q_BTHN.shape
    if window is not None:
        return f"it is not taken with a window, and model.window is {window}"
    if layout.platform != "gpu":
        return f"the kernel is for GPUs, and this is compiled for {layout.platform}"
    if q_BTHN.dtype not in (jnp.bfloat16, jnp.float16):
        return f"the kernel is for bfloat16, and model.compute.dtype is {q_BTHN.dtype}"
    if apart and length % 2:
        return f"its mask of documents is for an even number of positions, not {length}"

    # Major compute capabilities of the GPUs that this is compiled for, which may be on other
    # machines.
    generations = []
    for capability in layout.capabilities:
        # GPUs of other vendors report names such as gfx90a.
        if not re.fullmatch(r"\d+\.\d+", capability):
            return f"the kernel is NVIDIA's, and a GPU of the mesh is a {capability}"
        generations.append(int(capability.split(".")[0]))
    generation = min(generations, default=8)
    if generation < 8:
        return "the kernel needs compute capability 8.0 or later"

    largest_size = 256 if generation >= 9 else 128
    if size % 8 or size > largest_size:
        return f"the head dimension {size} is not a multiple of 8 up to {largest_size}"
    shards = layout.num_shards("sequence")
    device_heads = heads // layout.num_shards("heads")
    if causal and device_heads % shards:
        return (
            f"split positions are exchanged for heads, and {shards} do not divide a device's "
            f"{device_heads}"
        )
    return None


LOGITS_BLOCK = 256
"""Number of queries, and of keys, whose logits `largest_logits` has in memory at a time."""


def largest_logits(
    q_BTHN: jax.Array,
    k_BSKN: jax.Array,
    *,
    causal: bool,
    window: int | None = None,
    mask_BS: jax.Array | None = None,
    segments_BT: jax.Array | None = None,
    block: int = LOGITS_BLOCK,
    layout: Layout = ONE_DEVICE,
) -> jax.Array:
    """Return the largest logit of every head over the batch and all visible pairs, float32 [H].

    An attention logit is logit_scale * q k. The soft cap and the relative-position bias of an
    attention are not part of it: both come after the product, and a cap would hide its growth. Only
    pairs that the softmax sees are counted.

    No gradient flows through the result. Under manual FSDP the maximum is over this device's
    examples only. A head without a visible pair has -inf.

    Args:
        q_BTHN: Queries, which already include the logit scale.
        k_BSKN: Keys. H is a multiple of K.
        causal: `True` lets query t see keys 0..t, `False` all keys. Needs T = S.
        window: Number of keys that a query sees, its own and those before it. Default: all. Only
            read if `causal`.
        mask_BS: bool, `True` at keys that queries may see. Default: all.
        segments_BT: Document of each position, int32. Positions see only their own document. Needs
            T = S. Default: one document.
        block: Number of queries, and of keys, of one product.
        layout: Layout of the arrays on the devices that this is compiled for.
    """
    # A measurement must not train the model, nor keep activations for a backward pass.
    q_BTHN = jax.lax.stop_gradient(q_BTHN)
    k_BSKN = jax.lax.stop_gradient(k_BSKN)
    k_BSKN = layout.constrain(k_BSKN, ("batch", None, "kv_heads", None))
    batch, length, heads, size = q_BTHN.shape
    num_keys, kv_heads = k_BSKN.shape[1:3]
    # Every block contains queries of all sequence shards, so that each device computes with its
    # own.
    parts = layout.num_shards("sequence")
    if length % parts:
        parts = 1
    part_length = length // parts
    q_BPTKGN = q_BTHN.reshape(batch, parts, part_length, kv_heads, heads // kv_heads, size)
    position_PT = layout.positions(length).reshape(parts, part_length)
    position_S = layout.positions(num_keys)
    segments_BPT = None
    if segments_BT is not None:
        segments_BPT = segments_BT.reshape(batch, parts, part_length)

    query_block = min(block, part_length)
    key_block = min(block, num_keys)

    def largest_of_block(query_start: jax.Array | int, key_start: jax.Array | int) -> jax.Array:
        """Return the largest logits of one block of queries and keys, float32 [B, P, K, G]."""

        def queries(x: jax.Array, axis: int) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, query_start, query_block, axis)

        def keys(x: jax.Array, axis: int) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, key_start, key_block, axis)

        logits_BPKGTS = jnp.einsum(
            "bptkgn,bskn->bpkgts",
            queries(q_BPTKGN, 2),
            keys(k_BSKN, 1),
            preferred_element_type=jnp.float32,
        )
        visible_BPTS = jnp.ones((1, 1, 1, 1), bool)
        if causal:
            query_PT1 = queries(position_PT, 1)[:, :, None]
            key_S = keys(position_S, 0)
            visible_BPTS &= key_S <= query_PT1
            if window is not None:
                visible_BPTS &= key_S > query_PT1 - window
        if mask_BS is not None:
            visible_BPTS &= keys(mask_BS, 1)[:, None, None, :]
        if segments_BT is not None and segments_BPT is not None:
            key_segments_B11S = keys(segments_BT, 1)[:, None, None, :]
            visible_BPTS &= queries(segments_BPT, 2)[..., None] == key_segments_B11S
        visible_BP11TS = visible_BPTS[:, :, None, None]
        return jnp.max(logits_BPKGTS, axis=(-2, -1), initial=-jnp.inf, where=visible_BP11TS)

    in_order = parts == 1 and not layout.zigzag
    pairs = _visible_blocks(
        _starts(part_length, query_block),
        _starts(num_keys, key_block),
        block=query_block,
        causal=causal and in_order,
        window=window,
        key_block=key_block,
    )
    if len(pairs) == 1:
        largest_BPKG = largest_of_block(*pairs[0])
    else:

        def add_block(largest_BPKG: jax.Array, starts: jax.Array) -> tuple[jax.Array, None]:
            return jnp.maximum(largest_BPKG, largest_of_block(starts[0], starts[1])), None

        # Devices split examples and parts. Reducing these once, after the loop, communicates once.
        nothing_BPKG = jnp.full((batch, parts, *q_BPTKGN.shape[3:5]), -jnp.inf, jnp.float32)
        largest_BPKG, _ = jax.lax.scan(add_block, nothing_BPKG, jnp.array(pairs, jnp.int32))
    return jnp.max(largest_BPKG, axis=(0, 1)).reshape(heads)


def _starts(length: int, block: int) -> list[int]:
    """Return the first positions of blocks of `block` positions that cover `length` positions.

    The last block may overlap with the one before it, which changes no maximum over blocks.
    """
    return [min(start, length - block) for start in range(0, length, block)]


def _visible_blocks(
    query_starts: list[int],
    key_starts: list[int],
    *,
    block: int,
    key_block: int,
    causal: bool,
    window: int | None,
) -> list[tuple[int, int]]:
    """Return the first query and first key of every pair of blocks with a visible pair in it.

    Args:
        query_starts: First query of each block of `block` queries.
        key_starts: First key of each block of `key_block` keys.
        causal: Whether queries see no later keys. `False` keeps all pairs of blocks.
        window: Number of keys that a query sees. `None`: no window.
    """
    pairs = []
    for query_start in query_starts:
        last_query = query_start + block - 1
        for key_start in key_starts:
            last_key = key_start + key_block - 1
            is_later = key_start > last_query
            is_too_early = window is not None and last_key <= query_start - window
            if causal and (is_later or is_too_early):
                continue
            pairs.append((query_start, key_start))
    return pairs
