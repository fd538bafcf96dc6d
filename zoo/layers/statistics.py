"""Measurements of residual blocks: routing statistics and the largest attention logits.

Attention kernels do not return their logits, so the largest ones are computed beside them, in
blocks of queries and keys. An attention logit is logit_scale * q k. The soft cap and the
relative-position bias of an attention are not part of it: both come after the product, and a cap
would hide its growth. Only pairs that the softmax sees are counted.

B batch, T query and S key positions, P parts of the positions that devices split, H heads, K key
heads, G query heads per key head, N head dimension.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from mupax.zoo.partition import ONE_DEVICE, Layout

if TYPE_CHECKING:
    from mupax.zoo.experts.routing import Routing

BLOCK = 256
"""Number of queries, and of keys, whose logits exist at the same time."""


class BlockStatistics(NamedTuple):
    """Measurements of a block or, with a leading axis of layers, of all blocks.

    `run_stack` reduces `routing` over the blocks.
    """

    routing: Routing | None = None
    """Routing statistics. `None` without experts."""
    attention_logits: dict[str, jax.Array] | None = None
    """Largest attention logit of each head by attention, float32 [H]. `None` if not measured.

    The keys are the names of a block's attentions, "attention" and "cross".
    """


NO_STATISTICS = BlockStatistics()
"""Statistics of blocks that measure nothing and have no experts."""


def largest_logits(
    q_BTHN: jax.Array,
    k_BSKN: jax.Array,
    *,
    causal: bool,
    window: int | None = None,
    mask_BS: jax.Array | None = None,
    segments_BT: jax.Array | None = None,
    block: int = BLOCK,
    layout: Layout = ONE_DEVICE,
) -> jax.Array:
    """Return the largest logit of every head over the batch and all visible pairs, float32 [H].

    No gradient flows through the result. Under manual FSDP it is over this device's examples. A
    head without a visible pair has -inf.

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
    """Return the first positions of blocks that cover a length.

    The last block may overlap with the one before it, which changes no maximum.
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
    """Return the first query and key of every pair of blocks that a causal mask leaves.

    Args:
        query_starts: First query of each block of `block` queries.
        key_starts: First key of each block of `key_block` keys.
        causal: `False` keeps all pairs.
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
