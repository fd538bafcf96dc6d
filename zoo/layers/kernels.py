"""softmax(q.k) v by the fastest implementation there is: cuDNN flash on GPU, splash (Pallas) on TPU, tiles of XLA on CPU, a ring.

B batch, T query and S key positions, H heads, K key heads, G queries of each, N head dimension. Logits are taken as they are: any scale is
already in q. Softmax is in float32.

On a CPU, batch and heads are merged into one dimension R, the layout that CPUs like best, and causal attention is computed in tiles.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from mupax.zoo.families import AttentionName, ConfigError
from mupax.zoo.layers.linear import SAVED, softcapped
from mupax.zoo.partition import LANES, ONE_DEVICE, Layout

TILE, MOST = 64, 8
"""Fewest queries of a tile, where masked products cost less than tiles do, and most tiles, each of which is compiled."""

Shaped = jax.Array | jax.ShapeDtypeStruct

AUTO: dict[str, tuple[AttentionName, ...]] = {"tpu": ("ring", "splash"), "gpu": ("cudnn", "ring")}
"""What auto tries, by platform, before XLA. On a GPU heads are exchanged for positions where they can be: whole kernels."""

RING = 4096
"""Positions of one device from which auto takes a ring on TPU: what a step of it saves grows with their square, what it costs to put
its parts together with their number; the two are equal at about 2000 on v5p and 2800 on v5e (lm-8b at 131,072 and 32,768 tokens)."""


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
    """Attention [B, T, H, N] by whole products.

    Args:
        q_BTHN: queries, with the logit scale.
        k_BSKN: keys; H is a multiple of K.
        v_BSKN: values.
        causal: query t sees keys 0..t, else all.
        window: causal alone: of those the last so many.
        cap: of logits, before what is added to them.
        mask_BS: bool, keys that any query sees; all unless given.
        bias_HTS: added to logits.
        segments_BT: int32, of as many queries as keys, which see one another where theirs is the same; all unless given.
    """
    heads = q_BTHN.shape[2]

    def products(q_RTN: jax.Array, k_RSN: jax.Array, v_RSN: jax.Array) -> jax.Array:
        logits_RTS = softcapped(
            jnp.einsum("btn,bsn->bts", q_RTN, k_RSN, preferred_element_type=jnp.float32), cap
        )
        if bias_HTS is not None:
            logits_RTS = (logits_RTS.reshape(-1, *bias_HTS.shape) + bias_HTS).reshape(
                logits_RTS.shape
            )
        if mask_BS is not None:
            mask_R1S = jnp.repeat(mask_BS, heads, axis=0)[:, None]
            logits_RTS = jnp.where(mask_R1S, logits_RTS, jnp.finfo(jnp.float32).min)
        if segments_BT is not None:
            segments_RT = jnp.repeat(segments_BT, heads, axis=0)
            logits_RTS = jnp.where(within(segments_RT), logits_RTS, jnp.finfo(jnp.float32).min)
        if causal:
            mask_TS = jnp.tri(*logits_RTS.shape[1:], dtype=bool)
            if window is not None:
                mask_TS &= ~jnp.tri(*logits_RTS.shape[1:], k=-window, dtype=bool)
            logits_RTS = jnp.where(mask_TS, logits_RTS, jnp.finfo(jnp.float32).min)
        weights_RTS = jax.nn.softmax(logits_RTS, axis=-1).astype(v_RSN.dtype)
        return jnp.einsum("bts,bsn->btn", weights_RTS, v_RSN)

    return _in_rows(products, q_BTHN, k_BSKN, v_BSKN)


def tiled_attention(
    q_BTHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    *,
    window: int | None = None,
    cap: float | None = None,
    segments_BT: jax.Array | None = None,
) -> jax.Array:
    """Attention in which query t sees keys 0..t, by tiles of queries: keys that none of a tile's sees are never multiplied.

    The gradient computes each tile's weights anew. Plain operations under `jax.checkpoint`: derivatives of any kind and
    order go through.

    Args:
        q_BTHN, k_BSKN, v_BSKN, window, cap, segments_BT: as `merged_attention`.
    """

    def tiles(q_RTN: jax.Array, k_RSN: jax.Array, v_RSN: jax.Array) -> jax.Array:
        length, policy = q_RTN.shape[1], jax.checkpoint_policies.save_only_these_names(SAVED)
        count = max(TILE, -(-length // MOST))
        segments_RT = (
            None if segments_BT is None else jnp.repeat(segments_BT, q_BTHN.shape[2], axis=0)
        )
        same = functools.partial(
            _tile, count=count, window=window, cap=cap, segments_RT=segments_RT
        )
        tile = [functools.partial(same, start=start) for start in range(0, length, count)]
        return jnp.concatenate(
            [jax.checkpoint(one, policy=policy)(q_RTN, k_RSN, v_RSN) for one in tile], axis=1
        )

    return _in_rows(tiles, q_BTHN, k_BSKN, v_BSKN)


def _tile(
    q_RTN: jax.Array,
    k_RSN: jax.Array,
    v_RSN: jax.Array,
    *,
    start: int,
    count: int,
    window: int | None,
    cap: float | None,
    segments_RT: jax.Array | None,
) -> jax.Array:
    """The outputs of `count` queries, or those there are, from `start` on: [R, count, N]."""
    q_RTN = q_RTN[:, start : start + count]
    first = 0 if window is None else max(0, start - window + 1)
    k_RSN, v_RSN = (x_RSN[:, first : start + count] for x_RSN in (k_RSN, v_RSN))
    # Keys before queries: sums and maxima over keys then run along vectors of queries.
    logits_RST = softcapped(
        jnp.einsum("rsn,rtn->rst", k_RSN, q_RTN, preferred_element_type=jnp.float32), cap
    )
    key_S1, query_T = (
        first + jnp.arange(k_RSN.shape[1])[:, None],
        start + jnp.arange(q_RTN.shape[1]),
    )
    mask_ST = key_S1 <= query_T
    if window is not None:
        mask_ST &= key_S1 > query_T - window
    if segments_RT is not None:
        keys_RS, queries_RT = (segments_RT[:, i : start + count] for i in (first, start))
        mask_ST &= keys_RS[:, :, None] == queries_RT[:, None, :]
    logits_RST = jnp.where(mask_ST, logits_RST, jnp.finfo(jnp.float32).min)
    most_R1T = checkpoint_name(
        jax.lax.stop_gradient(jnp.max(logits_RST, axis=1, keepdims=True)), SAVED
    )
    weights_RST = jnp.exp(logits_RST - most_R1T)
    y_RTN = jnp.einsum(
        "rst,rsn->rtn", weights_RST.astype(v_RSN.dtype), v_RSN, preferred_element_type=jnp.float32
    )
    sum_RT1 = checkpoint_name(jnp.sum(weights_RST, axis=1)[..., None], SAVED)
    return (checkpoint_name(y_RTN, SAVED) / sum_RT1).astype(v_RSN.dtype)


def within(segments_BT: jax.Array) -> jax.Array:
    """Which positions are of one segment, bool [B, T, T]."""
    return segments_BT[:, :, None] == segments_BT[:, None, :]


def _in_rows(
    core: Callable[..., jax.Array], q_BTHN: jax.Array, k_BSKN: jax.Array, v_BSKN: jax.Array
) -> jax.Array:
    batch, length, heads, size = q_BTHN.shape
    groups = heads // k_BSKN.shape[2]

    def rows(x: jax.Array, repeat: int) -> jax.Array:
        """[B, T, H, N] to [R, T, N]."""
        x = jnp.repeat(x, repeat, axis=2) if repeat > 1 else x
        return x.swapaxes(1, 2).reshape(batch * heads, x.shape[1], size)

    y_RTN = core(rows(q_BTHN, 1), rows(k_BSKN, groups), rows(v_BSKN, groups))
    return y_RTN.reshape(batch, heads, length, size).swapaxes(1, 2)


def widened(*heads_BTHN: jax.Array) -> list[jax.Array]:
    """Queries, keys and values with zeros, which change no product, up to the largest head dimension of them."""
    most = max(x.shape[-1] for x in heads_BTHN)
    return [jnp.pad(x, (*((0, 0),) * 3, (0, most - x.shape[-1]))) for x in heads_BTHN]


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
        q_BTHN: queries, with the logit scale.
        k_BSKN: keys; H is a multiple of K.
        v_BSKN: values.
        causal: query t sees keys 0..t, else all.
        window: causal alone: of those the last so many.
        cap: of logits (`softcapped`); None: they are as they are.
        implementation: as `chosen`.
        block: positions on a side of a splash block; the chip's own unless given.
        segments_BT: int32, of as many queries as keys, which see one another where theirs is the same; all unless given.
        layout: how arrays lie on the devices that are compiled for.

    Raises:
        ConfigError: as `chosen`.
    """
    options: dict[str, Any] = {"window": window, "cap": cap, "segments_BT": segments_BT}
    on_devices: dict[str, Any] = {"causal": causal, "segments_BT": segments_BT, "layout": layout}
    if (values := v_BSKN.shape[-1]) != q_BTHN.shape[-1]:
        wide = widened(q_BTHN, k_BSKN, v_BSKN)
        y_BTHN = attend(
            *wide, window=window, cap=cap, implementation=implementation, block=block, **on_devices
        )
        return y_BTHN[..., :values]
    apart = segments_BT is not None
    implementation = chosen(
        implementation, q_BTHN, k_BSKN, causal, window, cap, apart, layout=layout
    )
    # Where positions are split, every device keeps its queries, and but for a ring gathers all keys and values.
    source = "sequence" if implementation == "ring" else None
    k_BSKN = layout.constrain(k_BSKN, ("batch", source, "kv_heads", None))
    v_BSKN = layout.constrain(v_BSKN, ("batch", source, "kv_heads", None))
    if implementation != "xla":
        from mupax.zoo.layers import flash

        if implementation == "cudnn":
            return flash.cudnn_attention(q_BTHN, k_BSKN, v_BSKN, **on_devices)
        if implementation == "ring":
            return flash.ring_attention(q_BTHN, k_BSKN, v_BSKN, block=block, **on_devices)
        return flash.splash_attention(
            q_BTHN, k_BSKN, v_BSKN, window=window, cap=cap, block=block, **on_devices
        )
    if tiled(causal, q_BTHN.shape[1], layout=layout):
        return tiled_attention(q_BTHN, k_BSKN, v_BSKN, **options)
    if merges_heads(layout):
        return merged_attention(q_BTHN, k_BSKN, v_BSKN, causal=causal, **options)
    return split_attention(q_BTHN, k_BSKN, v_BSKN, causal=causal, **options)


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
    """Return attention [B, T, H, N] by XLA with dimensions as they are, so that devices may split any of them.

    Args:
        q_BTHN, k_BSKN, v_BSKN, causal, window, cap, segments_BT: as `attend`.
    """
    mask_B1TS = None if segments_BT is None else within(segments_BT)[:, None]
    if cap is None:
        how = {
            "is_causal": causal,
            "local_window_size": None if window is None else (window - 1, 0),
        }
        return jax.nn.dot_product_attention(
            q_BTHN, k_BSKN, v_BSKN, None, mask_B1TS, scale=1.0, **how, implementation="xla"
        )
    (*lead, heads, size), kv_heads = q_BTHN.shape, k_BSKN.shape[2]
    q_BTKGN = q_BTHN.reshape(*lead, kv_heads, heads // kv_heads, size)
    logits_BKGTS = jnp.einsum(
        "btkgn,bskn->bkgts", q_BTKGN, k_BSKN, preferred_element_type=jnp.float32
    )
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


def tiled(causal: bool, length: int, *, layout: Layout = ONE_DEVICE) -> bool:
    """Return whether attention by XLA goes in tiles of queries (`tiled_attention`).

    Args:
        causal: query t sees keys 0..t.
        length: queries.
        layout: as `attend`.
    """
    return causal and length > TILE and merges_heads(layout)


def merges_heads(layout: Layout) -> bool:
    """Return whether batch and heads can be one dimension: on a CPU that splits neither heads nor positions."""
    return layout.platform == "cpu" and all(
        layout.num_shards(axis) == 1 for axis in ("sequence", "heads", "kv_heads")
    )


def chosen(
    implementation: AttentionName,
    q_BTHN: Shaped,
    k_BSKN: Shaped,
    causal: bool,
    window: int | None = None,
    cap: float | None = None,
    apart: bool = False,
    *,
    layout: Layout = ONE_DEVICE,
) -> AttentionName:
    """Return the implementation that attends: the named one, or with auto the first of the platform's that can (`AUTO`).

    Args:
        implementation, q_BTHN, k_BSKN, causal, window, cap, apart, layout: as `why_not`.

    Raises:
        ConfigError: the named one cannot do this; the text says why.
    """
    sight = {"causal": causal, "window": window, "cap": cap, "apart": apart, "layout": layout}
    if implementation == "auto":
        able: tuple[AttentionName, ...] = (*AUTO.get(layout.platform, ()), "xla")
        if layout.platform == "tpu" and q_BTHN.shape[1] < RING * layout.num_shards("sequence"):
            able = able[able.index("ring") + 1 :]
        return next(name for name in able if not why_not(name, q_BTHN, k_BSKN, **sight))
    if reason := why_not(implementation, q_BTHN, k_BSKN, **sight):
        raise ConfigError(f"model.compute.attention {implementation}: {reason}; write auto or xla")
    return implementation


def why_not(
    implementation: AttentionName,
    q_BTHN: Shaped,
    k_BSKN: Shaped,
    causal: bool,
    window: int | None = None,
    cap: float | None = None,
    apart: bool = False,
    *,
    layout: Layout = ONE_DEVICE,
) -> str | None:
    """Return why this implementation cannot attend, or None if it can.

    Args:
        implementation: that is asked about; xla always can.
        q_BTHN: queries, of which shape and dtype count.
        k_BSKN: keys, of which the shape does.
        causal: whether a query sees only the keys up to its own.
        window: of those how many; None: all.
        cap: of logits; None: there is none.
        apart: whether documents of one window do not see one another.
        layout: as `attend`.
    """
    size = q_BTHN.shape[-1]
    platform, ways = layout.platform, layout.num_shards("sequence")
    if cap is not None and implementation in ("ring", "cudnn"):
        return f"it has no cap of logits, and model.attention_softcap is {cap}"
    match implementation:
        case "ring":
            # Causal, a device has two parts of as many.
            parts, unit = ways * (2 if causal else 1), LANES if platform == "tpu" else 1
            if window is not None:
                return f"parts of keys go round whole, and model.window {window} hides most of them"
            if ways == 1:
                return "it is for positions that devices split, and mesh.sequence is 1"
            if q_BTHN.shape[1] % (parts * unit) or k_BSKN.shape[1] != q_BTHN.shape[1]:
                return f"{q_BTHN.shape[1]} positions are not {parts} parts of a multiple of {unit}"
        case "splash":
            if platform != "tpu":
                return f"the kernel is for TPUs, and this is compiled for {platform}"
            if q_BTHN.shape[1] % (LANES * ways) or k_BSKN.shape[1] % LANES:
                return (
                    f"a device's {q_BTHN.shape[1] // ways} positions are not a multiple of {LANES}"
                )
        case "cudnn":
            if window is not None:
                return f"it is not taken with a window, and model.window is {window}"
            if platform != "gpu":
                return f"the kernel is for GPUs, and this is compiled for {platform}"
            if q_BTHN.dtype not in (jnp.bfloat16, jnp.float16):
                return f"the kernel is for bfloat16, and model.compute.dtype is {q_BTHN.dtype}"
            if apart and q_BTHN.shape[1] % 2:
                return f"its mask of documents is for an even number of positions, not {q_BTHN.shape[1]}"
            capabilities = {
                str(d.compute_capability) for d in jax.local_devices() if d.platform == "gpu"
            }
            if foreign := next(
                (name for name in capabilities if not re.fullmatch(r"\d+\.\d+", name)), None
            ):
                return f"the kernel is NVIDIA's, and a GPU here is a {foreign}"
            generation = min((int(name.split(".")[0]) for name in capabilities), default=8)
            if generation < 8:
                return "the kernel needs compute capability 8.0 or later"
            most = 256 if generation >= 9 else 128
            if size % 8 or size > most:
                return f"the head dimension {size} is not a multiple of 8 up to {most}"
            heads = q_BTHN.shape[2] // layout.num_shards("heads")
            if causal and heads % ways:
                return f"split positions are exchanged for heads, and {ways} do not divide a device's {heads}"
    return None
