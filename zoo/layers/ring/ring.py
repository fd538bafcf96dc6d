"""Attention where devices split positions: keys and values go round in a ring, and every device looks at each part in turn.

As Liu et al. 2023 (arXiv 2310.01889): a device holds one part of the keys at a time, whose softmax is put to the others' by its
log-sum-exp, and sends it on beside its own products. Queries that see only keys before them would leave the first devices
idle: device d of D takes parts d and 2D-1-d of 2D, of which every step then has the same number to multiply (zig-zag), and
none that a mask hides. The backward pass runs the ring again, the gradients of keys and values going round with them. Segments of
keys go round beside their keys.

B batch, T query and S key positions, H heads, K key heads, G queries of each, N head dimension.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from mupax.zoo.layers.linear import SAVED
from mupax.zoo.partition import Layout

Residuals = tuple[jax.Array, ...]
"""Queries, keys, values, outputs and log-sum-exp: what gradients need."""


class Part(NamedTuple):
    """Attention of some queries to some keys, forward and backward. Arrays have heads before positions."""

    forward: Callable[..., tuple[jax.Array, jax.Array]]
    """(queries, keys, values, causal, *segments) to outputs [B, H, T, N] and the log of the softmax's sum [B, H, T].

    Segments are none, or those of queries and of keys, int32 [B, 1, T] and [B, 1, S]. What a query sees nothing of has a log that
    is lower than any that it sees, so that it adds nothing to a sum.
    """
    backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
    """(residuals, gradient, causal, *segments) to gradients of queries, keys and values, by outputs and log-sum-exp over all keys there are."""


def ring(
    names: tuple[str, ...],
    part: Part,
    causal: bool,
    qkv: Sequence[jax.Array],
    segments_BT: jax.Array | None = None,
) -> jax.Array:
    """Attention [B, T, H, N] of this device's queries to all keys; inside of `shard_map`.

    Args:
        names: mesh axes that split positions, which lie in zig-zag where causal.
        part: how queries attend to one part of the keys.
        causal: a query sees only keys up to its own.
        qkv: queries with the logit scale, keys and values, [B, T, heads, N], this device's positions of each.
        segments_BT: int32, of those positions, which see one another where theirs is the same; all unless given.
    """
    segments = (
        () if segments_BT is None else (segments_BT[:, None],)
    )  # heads before positions, as the others
    heads_first = (jnp.swapaxes(x, 1, 2) for x in qkv)
    return jnp.swapaxes(_attended(names, part, causal, *heads_first, *segments), 1, 2)


def zigzag(*arrays: jax.Array, layout: Layout, back: bool = False) -> list[jax.Array]:
    """Return arrays [B, T, ...] in zig-zag, parts d and 2D-1-d of T on device d in place of 2d and 2d+1; or bring them back.

    Args:
        arrays: whole, of two to four dimensions; devices split B and T, and heads where there are four.
        layout: how they lie on devices.
        back: from zig-zag to the order of positions.
    """
    names, ways = layout.mesh_axes("sequence"), layout.num_shards("sequence")
    # Even parts and odd ones: of each kind a device has one before and one after.
    to = [part if part < ways else 2 * ways - 1 - part for part in range(2 * ways)]
    routes = [[(device, to[2 * device + which]) for device in range(ways)] for which in (0, 1)]
    if back:
        routes = [[(there, here) for here, there in route] for route in routes]

    def local(x: jax.Array) -> jax.Array:
        odd = jax.lax.axis_index(names) % 2

        def by_kind(halves: list[jax.Array]) -> list[jax.Array]:
            return [jnp.where(odd, halves[1 - i], halves[i]) for i in (0, 1)]

        halves = jnp.split(x, 2, axis=1)
        halves = by_kind(halves) if back else halves
        halves = [
            jax.lax.ppermute(half, names, route) for half, route in zip(halves, routes, strict=True)
        ]
        return jnp.concatenate(halves if back else by_kind(halves), axis=1)

    def moved(x: jax.Array) -> jax.Array:
        batch = "batch" if x.shape[0] % layout.num_shards("batch") == 0 else None
        axes = (
            (batch, "sequence", "heads", None)
            if x.ndim == 4
            else (batch, "sequence", None)[: x.ndim]
        )
        return layout.local(local, (axes,), axes)(x)

    return [moved(x) for x in arrays]


def zigzag_layout(layout: Layout) -> Layout:
    """Return the same layout with positions in zig-zag, for a stack whose attention goes in a ring.

    Only rotary positions ask where positions lie.
    """
    moved = copy.copy(layout)
    moved.zigzag = True
    return moved


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attended(names: tuple[str, ...], part: Part, causal: bool, *arrays: jax.Array) -> jax.Array:
    return _forward(names, part, causal, *arrays)[0]


def _forward(
    names: tuple[str, ...], part: Part, causal: bool, *arrays: jax.Array
) -> tuple[jax.Array, Residuals]:
    (q_BHTN, *mine), ways = arrays, jax.lax.axis_size(names)
    rows = (
        q_BHTN,
        *mine[2:],
    )  # queries and, where there are segments, theirs, which those of keys are before any is sent
    later = [_parts(x, causal)[-1] for x in rows]

    def attend(rows: Any, kv: Any, masked: bool = False) -> tuple[jax.Array, jax.Array]:
        (q_BHTN, *segments), (k_BKSN, v_BKSN, *key_segments) = rows, kv
        return part.forward(q_BHTN, k_BKSN, v_BKSN, masked, *segments, *key_segments)

    def accumulate(totals: Any, kv: Any, step: jax.Array | int) -> Any:
        def before() -> Any:
            first, *_ = zip(*(_parts(x, causal) for x in kv), strict=True)
            y_BHTN, lse_BHT = attend(rows, first)
            more = zip(_parts(y_BHTN, causal), _parts(lse_BHT, causal), strict=True)
            return [_sum(total, one) for total, one in zip(totals, more, strict=True)]

        def behind() -> Any:
            return [totals[0], _sum(totals[1], attend(later, kv))]

        return (
            jax.lax.cond(jax.lax.axis_index(names) >= step, before, behind) if causal else before()
        )

    def onward(carry: Any, step: jax.Array) -> tuple[Any, None]:
        totals, kv = carry
        return (accumulate(totals, kv, step), _sent(kv, names)), None

    y_BHTN, lse_BHT = attend(rows, mine, causal)
    totals = list(
        zip(_parts(y_BHTN.astype(jnp.float32), causal), _parts(lse_BHT, causal), strict=True)
    )
    (totals, kv), _ = jax.lax.scan(onward, (totals, _sent(mine, names)), jnp.arange(1, ways - 1))
    y_BHTN, lse_BHT = (
        jnp.concatenate(x, axis=2) for x in zip(*accumulate(totals, kv, ways - 1), strict=True)
    )
    y_BHTN, lse_BHT = (
        checkpoint_name(y_BHTN.astype(q_BHTN.dtype), SAVED),
        checkpoint_name(lse_BHT, SAVED),
    )
    return y_BHTN, (*arrays, y_BHTN, lse_BHT)


def _backward(
    names: tuple[str, ...], part: Part, causal: bool, residuals: Residuals, gradient_BHTN: jax.Array
) -> tuple[jax.Array | None, ...]:
    ways, (q_BHTN, *mine, y_BHTN, lse_BHT) = jax.lax.axis_size(names), residuals
    rows = q_BHTN, y_BHTN, lse_BHT, gradient_BHTN, *mine[2:]
    later = [_parts(x, causal)[-1] for x in rows]

    def gradients(rows: Any, kv: Any, masked: bool = False) -> list[list[jax.Array]]:
        (q_BHTN, y_BHTN, lse_BHT, gradient_BHTN, *segments), (k_BKSN, v_BKSN, *key_segments) = (
            rows,
            kv,
        )
        whole = q_BHTN, k_BKSN, v_BKSN, y_BHTN, lse_BHT
        cotangents = part.backward(whole, gradient_BHTN, masked, *segments, *key_segments)
        return [[x.astype(jnp.float32)] for x in cotangents]

    def accumulate(dq: Any, dkv: Any, kv: Any, step: jax.Array | int) -> Any:
        """Gradients of queries, and of keys and values, by parts."""

        def before() -> Any:
            first, *_ = zip(*(_parts(x, causal) for x in kv), strict=True)
            (more,), *more_dkv = gradients(rows, first)
            return _plus(dq, _parts(more, causal)), [
                _plus(x, one) for x, one in zip(dkv, more_dkv, strict=True)
            ]

        def behind() -> Any:
            (more,), *more_dkv = gradients(later, kv)
            more_dkv = [_parts(one, causal) for (one,) in more_dkv]
            return [dq[0], dq[1] + more], [
                _plus(x, one) for x, one in zip(dkv, more_dkv, strict=True)
            ]

        return (
            jax.lax.cond(jax.lax.axis_index(names) >= step, before, behind) if causal else before()
        )

    # Gradients of keys and values follow a step behind them, so that they, too, are sent beside products.
    def onward(carry: Any, step: jax.Array) -> tuple[Any, None]:
        dq, dkv, kv = carry
        return (*accumulate(dq, _sent(dkv, names), kv, step), _sent(kv, names)), None

    dq, *dkv = (_parts(x, causal) for (x,) in gradients(rows, mine, causal))
    (dq, dkv, kv), _ = jax.lax.scan(onward, (dq, dkv, _sent(mine, names)), jnp.arange(1, ways - 1))
    dq, dkv = accumulate(dq, _sent(dkv, names), kv, ways - 1)
    cotangents = (jnp.concatenate(x, axis=2).astype(q_BHTN.dtype) for x in (dq, *_sent(dkv, names)))
    return *cotangents, *(None for _ in mine[2:])  # segments have no gradient


_attended.defvjp(_forward, _backward)


def _sent(parts: Any, names: tuple[str, ...]) -> Any:
    """Arrays that the device before had."""
    ways = jax.lax.axis_size(names)
    route = [(device, (device + 1) % ways) for device in range(ways)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, names, route), parts)


def _parts(x: jax.Array, causal: bool) -> list[jax.Array]:
    """A device's two parts of positions, [B, H, T / 2, ...]; one without a mask.

    Its earlier part sees the earlier parts of devices before it, its later one every earlier part and the later ones behind.
    """
    return jnp.split(x, 2, axis=2) if causal else [x]


def _plus(sums: list[jax.Array], more: list[jax.Array]) -> list[jax.Array]:
    """Sums with what there is more of the first of them."""
    return [*(x + one for x, one in zip(sums, more, strict=False)), *sums[len(more) :]]


def _sum(total: Any, more: Any) -> tuple[jax.Array, jax.Array]:
    """Outputs in float32 and log-sum-exp over two sets of keys."""
    (y_BHTN, lse_BHT), (other_BHTN, other_BHT) = total, more
    sum_BHT = jnp.logaddexp(lse_BHT, other_BHT)
    old, new = (jnp.exp(one_BHT - sum_BHT)[..., None] for one_BHT in (lse_BHT, other_BHT))
    return old * y_BHTN + new * other_BHTN.astype(jnp.float32), sum_BHT
