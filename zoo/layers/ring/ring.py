"""Ring attention (Liu et al. 2023, arXiv 2310.01889), for devices that split positions.

Every device holds one part of the keys and values at a time. It attends to this part, combines the
result with those of earlier parts by their log-sum-exp, and meanwhile sends the part on to the next
device. Segments of keys travel with them. The backward pass runs the ring again, and the gradients
of keys and values travel one step behind them.

With a causal mask, devices at the beginning would soon have no keys left to see. Positions are
therefore in zig-zag: of 2D parts, device d of D holds parts d and 2D-1-d. At every step all devices
then multiply equally much, and nothing that the mask hides.

B batch, T query and S key positions, H heads, K key heads, N head dimension. Heads stand before
positions.
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
from mupax.zoo.partition import Axes, Layout


class Segments(NamedTuple):
    """Documents of queries and keys. A query sees only keys of its own document."""

    queries_B1T: jax.Array
    """int32 [B, 1, T]."""
    keys_B1S: jax.Array
    """int32 [B, 1, S]."""


class Residuals(NamedTuple):
    """Arrays that the gradients of attention need."""

    q_BHTN: jax.Array
    k_BKSN: jax.Array
    v_BKSN: jax.Array
    y_BHTN: jax.Array
    """Outputs."""
    lse_BHT: jax.Array
    """Log of the softmax sums, over all keys that the queries have seen."""


class Part(NamedTuple):
    """Implementation of attention to one part of the keys, which `ring` applies to each part."""

    forward: Callable[..., tuple[jax.Array, jax.Array]]
    """Function (q, k, v, causal, segments or None) -> (outputs, log-sum-exp).

    Outputs are [B, H, T, N], log-sum-exps [B, H, T]. A query that sees no key of the part has a
    log-sum-exp far below all others, so that the part adds nothing to its sum.
    """
    backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
    """Function (residuals, gradient of y, causal, segments or None) -> gradients of q, k and v.

    The residuals' outputs and log-sum-exps are those over all parts.
    """


class _Keys(NamedTuple):
    """Keys, values and segments of one device's positions, which are sent around the ring."""

    k_BKSN: jax.Array
    v_BKSN: jax.Array
    segments_B1S: jax.Array | None


class _Queries(NamedTuple):
    """Queries of a device and their segments, which are not sent to other devices."""

    q_BHTN: jax.Array
    segments_B1T: jax.Array | None


class _SeenQueries(NamedTuple):
    """Queries of a device in the backward pass, with their results and the results' gradient.

    Outputs and log-sum-exps are those over all keys.
    """

    q_BHTN: jax.Array
    y_BHTN: jax.Array
    lse_BHT: jax.Array
    gradient_BHTN: jax.Array
    segments_B1T: jax.Array | None


class _Saved(NamedTuple):
    """Arrays that the forward pass keeps for the backward pass.

    All are those of this device. Outputs and log-sum-exps are over all keys.
    """

    q_BHTN: jax.Array
    k_BKSN: jax.Array
    v_BKSN: jax.Array
    segments_B1T: jax.Array | None
    y_BHTN: jax.Array
    lse_BHT: jax.Array


class _Output(NamedTuple):
    """Result of attention to some of the keys, which `_combined` joins with that of other keys."""

    y_BHTN: jax.Array
    """Outputs. float32 once results are joined."""
    lse_BHT: jax.Array
    """Log of the softmax sums over the same keys."""


def ring(
    mesh_axes: tuple[str, ...],
    part: Part,
    causal: bool,
    qkv: Sequence[jax.Array],
    segments_BT: jax.Array | None = None,
) -> jax.Array:
    """Return attention [B, T, H, N] of this device's queries to all keys, inside `shard_map`.

    Args:
        mesh_axes: Mesh axes that split positions, with at least 2 devices.
        part: Implementation of attention to one part of the keys.
        causal: Whether a query sees only keys up to its own. Positions must then be in the order
            that the function `zigzag` gives them.
        qkv: Queries (which include the logit scale), keys and values at this device's positions,
            [B, T, heads, N].
        segments_BT: Documents of this device's positions, int32. Default: one document.
    """
    segments_B1T = None
    if segments_BT is not None:
        segments_B1T = segments_BT[:, None]
    q_BTHN, k_BSKN, v_BSKN = qkv
    q_BHTN = jnp.swapaxes(q_BTHN, 1, 2)
    k_BKSN = jnp.swapaxes(k_BSKN, 1, 2)
    v_BKSN = jnp.swapaxes(v_BSKN, 1, 2)
    y_BHTN: Any = _attended(mesh_axes, part, causal, q_BHTN, k_BKSN, v_BKSN, segments_B1T)
    return jnp.swapaxes(y_BHTN, 1, 2)


def zigzag(*arrays: jax.Array, layout: Layout, back: bool = False) -> list[jax.Array]:
    """Return arrays [B, T, ...] with positions moved into zig-zag, or moved back from it.

    Of 2D parts of T, device d of D usually holds parts 2d and 2d+1. In zig-zag it holds parts d and
    2D-1-d, in this order. 2D must divide T.

    Args:
        *arrays: Arrays of two to four dimensions. Devices split B and T, and heads (the third of
            four dimensions).
        layout: Layout of the arrays on devices, with at least 2 parts of "sequence".
        back: Move from zig-zag to the usual order instead.
    """
    mesh_axes = layout.mesh_axes("sequence")
    num_devices = layout.num_shards("sequence")
    # In both orders every device holds one even and one odd part. Two permutations, one of even and
    # one of odd parts, therefore move everything.
    owners = []
    for index in range(2 * num_devices):
        owner = index
        if index >= num_devices:
            owner = 2 * num_devices - 1 - index
        owners.append(owner)
    even_route = [(device, owners[2 * device]) for device in range(num_devices)]
    odd_route = [(device, owners[2 * device + 1]) for device in range(num_devices)]
    if back:
        even_route = [(source, target) for target, source in even_route]
        odd_route = [(source, target) for target, source in odd_route]

    def local(x: jax.Array) -> jax.Array:
        device_is_odd = jax.lax.axis_index(mesh_axes) % 2

        def swapped_on_odd_devices(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
            # The first part of an odd device in zig-zag is an odd part. This maps (first, second)
            # to (even, odd), and back.
            return jnp.where(device_is_odd, y, x), jnp.where(device_is_odd, x, y)

        even, odd = jnp.split(x, 2, axis=1)
        if back:
            even, odd = swapped_on_odd_devices(even, odd)
        even = jax.lax.ppermute(even, mesh_axes, even_route)
        odd = jax.lax.ppermute(odd, mesh_axes, odd_route)
        if not back:
            even, odd = swapped_on_odd_devices(even, odd)
        return jnp.concatenate([even, odd], axis=1)

    moved = []
    for x in arrays:
        batch = "batch" if x.shape[0] % layout.num_shards("batch") == 0 else None
        axes: Axes = (batch, "sequence", None)[: x.ndim]
        if x.ndim == 4:
            axes = (batch, "sequence", "heads", None)
        moved.append(layout.local(local, (axes,), axes)(x))
    return moved


def zigzag_layout(layout: Layout) -> Layout:
    """Return a shallow copy of the layout with `zigzag` set to True.

    A stack whose causal attention is a ring moves positions into zig-zag order once, and not in
    every layer. Its layers then take positions for rotary embeddings from this layout.
    """
    zigzag_copy = copy.copy(layout)
    zigzag_copy.zigzag = True
    return zigzag_copy


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attended(
    mesh_axes: tuple[str, ...],
    part: Part,
    causal: bool,
    q_BHTN: jax.Array,
    k_BKSN: jax.Array,
    v_BKSN: jax.Array,
    segments_B1T: jax.Array | None,
) -> jax.Array:
    y_BHTN, _ = _forward(mesh_axes, part, causal, q_BHTN, k_BKSN, v_BKSN, segments_B1T)
    return y_BHTN


def _forward(
    mesh_axes: tuple[str, ...],
    part: Part,
    causal: bool,
    q_BHTN: jax.Array,
    k_BKSN: jax.Array,
    v_BKSN: jax.Array,
    segments_B1T: jax.Array | None,
) -> tuple[jax.Array, _Saved]:
    """Return ring attention of this device's queries, and the arrays for the backward pass.

    If `causal`, positions must be in zig-zag. `mesh_axes` must have two devices or more.
    """
    num_devices = jax.lax.axis_size(mesh_axes)
    queries = _Queries(q_BHTN, segments_B1T)
    own_keys = _Keys(k_BKSN, v_BKSN, segments_B1T)
    later_queries = jax.tree.map(lambda x: _parts(x, causal)[-1], queries)

    def accumulate(totals: list[_Output], keys: _Keys, step: jax.Array | int) -> list[_Output]:
        """Return `totals` combined with attention to the keys of another device.

        Args:
            totals: Attention to the keys of all earlier steps, for each part of the queries.
            keys: Keys of the device that is `step` devices before this one in the ring.
            step: Distance to that device, int32 [].
        """

        def all_queries_see_first_part() -> list[_Output]:
            first_part = jax.tree.map(lambda x: _parts(x, causal)[0], keys)
            output = _attend(part, queries, first_part, masked=False)
            outputs = _output_parts(output, causal)
            return [_combined(old, new) for old, new in zip(totals, outputs, strict=True)]

        def later_queries_see_both_parts() -> list[_Output]:
            output = _attend(part, later_queries, keys, masked=False)
            return [totals[0], _combined(totals[1], output)]

        # Without a mask all positions are a single part.
        if not causal:
            return all_queries_see_first_part()
        # The keys' device has a smaller index than this one, unless the ring has wrapped around.
        comes_from_before = jax.lax.axis_index(mesh_axes) >= step
        return jax.lax.cond(
            comes_from_before, all_queries_see_first_part, later_queries_see_both_parts
        )

    def ring_step(
        carry: tuple[list[_Output], _Keys], step: jax.Array
    ) -> tuple[tuple[list[_Output], _Keys], None]:
        totals, keys = carry
        totals = accumulate(totals, keys, step)
        return (totals, _sent(keys, mesh_axes)), None

    own_output = _attend(part, queries, own_keys, masked=causal)
    own_output = own_output._replace(y_BHTN=own_output.y_BHTN.astype(jnp.float32))
    totals = _output_parts(own_output, causal)
    # The last step is outside of the loop, because its keys are sent to no one.
    carry = (totals, _sent(own_keys, mesh_axes))
    (totals, keys), _ = jax.lax.scan(ring_step, carry, jnp.arange(1, num_devices - 1))
    totals = accumulate(totals, keys, num_devices - 1)

    y_BHTN = jnp.concatenate([total.y_BHTN for total in totals], axis=2)
    lse_BHT = jnp.concatenate([total.lse_BHT for total in totals], axis=2)
    # The backward pass needs the outputs and their log-sum-exp. A remat policy that keeps both runs
    # the forward ring only once.
    y_BHTN = checkpoint_name(y_BHTN.astype(q_BHTN.dtype), SAVED)
    lse_BHT = checkpoint_name(lse_BHT, SAVED)
    return y_BHTN, _Saved(q_BHTN, k_BKSN, v_BKSN, segments_B1T, y_BHTN, lse_BHT)


def _backward(
    mesh_axes: tuple[str, ...],
    part: Part,
    causal: bool,
    saved: _Saved,
    gradient_BHTN: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    """Return the gradients of this device's queries, keys and values. Segments have none."""
    num_devices = jax.lax.axis_size(mesh_axes)
    segments_B1T = saved.segments_B1T
    own_keys = _Keys(saved.k_BKSN, saved.v_BKSN, segments_B1T)
    queries = _SeenQueries(saved.q_BHTN, saved.y_BHTN, saved.lse_BHT, gradient_BHTN, segments_B1T)
    later_queries = jax.tree.map(lambda x: _parts(x, causal)[-1], queries)

    def accumulate(dq: Any, dkv: Any, keys: _Keys, step: jax.Array | int) -> tuple[Any, Any]:
        """Return `dq` and `dkv` plus the gradients of attention to another device's keys.

        Args:
            dq: Gradients of the queries, a list of their parts.
            dkv: Gradients of keys and of values, each a list of their parts.
            keys: Keys of the device that is `step` devices before this one in the ring.
            step: Distance to that device, int32 [].
        """
        dk, dv = dkv

        def all_queries_see_first_part() -> tuple[Any, Any]:
            first_part = jax.tree.map(lambda x: _parts(x, causal)[0], keys)
            new_dq, new_dk, new_dv = _gradients(part, queries, first_part, masked=False)
            total_dq = _plus(dq, _parts(new_dq, causal))
            return total_dq, [_plus(dk, [new_dk]), _plus(dv, [new_dv])]

        def later_queries_see_both_parts() -> tuple[Any, Any]:
            new_dq, new_dk, new_dv = _gradients(part, later_queries, keys, masked=False)
            new_dk_parts = _parts(new_dk, causal)
            new_dv_parts = _parts(new_dv, causal)
            total_dq = [dq[0], dq[1] + new_dq]
            return total_dq, [_plus(dk, new_dk_parts), _plus(dv, new_dv_parts)]

        if not causal:
            return all_queries_see_first_part()
        comes_from_before = jax.lax.axis_index(mesh_axes) >= step
        return jax.lax.cond(
            comes_from_before, all_queries_see_first_part, later_queries_see_both_parts
        )

    def ring_step(carry: tuple[Any, Any, _Keys], step: jax.Array) -> tuple[Any, None]:
        dq, dkv, keys = carry
        # Gradients of keys and values are sent one step behind the keys, so that sending them
        # overlaps with products, too.
        dq, dkv = accumulate(dq, _sent(dkv, mesh_axes), keys, step)
        return (dq, dkv, _sent(keys, mesh_axes)), None

    own_gradients = _gradients(part, queries, own_keys, masked=causal)
    dq, *dkv = [_parts(x, causal) for x in own_gradients]
    carry = (dq, dkv, _sent(own_keys, mesh_axes))
    (dq, dkv, keys), _ = jax.lax.scan(ring_step, carry, jnp.arange(1, num_devices - 1))
    dq, dkv = accumulate(dq, _sent(dkv, mesh_axes), keys, num_devices - 1)
    # One more step brings the gradients to the device that holds their keys and values.
    dk, dv = _sent(dkv, mesh_axes)

    dtype = saved.q_BHTN.dtype
    dq_BHTN = jnp.concatenate(dq, axis=2).astype(dtype)
    dk_BKSN = jnp.concatenate(dk, axis=2).astype(dtype)
    dv_BKSN = jnp.concatenate(dv, axis=2).astype(dtype)
    return dq_BHTN, dk_BKSN, dv_BKSN, None


_attended.defvjp(_forward, _backward)


def _attend(part: Part, queries: _Queries, keys: _Keys, *, masked: bool) -> _Output:
    """Return attention of queries to one part of the keys.

    Args:
        queries: Queries of this device, or only those of its second part in zig-zag.
        keys: Keys of any one device, or only those of its first part in zig-zag.
        masked: Whether query t sees keys 0..t only, with both counted from the first in the
            arguments.
    """
    segments = _paired(queries.segments_B1T, keys.segments_B1S)
    y_BHTN, lse_BHT = part.forward(queries.q_BHTN, keys.k_BKSN, keys.v_BKSN, masked, segments)
    return _Output(y_BHTN, lse_BHT)


def _gradients(part: Part, queries: _SeenQueries, keys: _Keys, *, masked: bool) -> list[jax.Array]:
    """Return the gradients of queries, keys and values for the result of `_attend`, in float32."""
    residuals = Residuals(queries.q_BHTN, keys.k_BKSN, keys.v_BKSN, queries.y_BHTN, queries.lse_BHT)
    segments = _paired(queries.segments_B1T, keys.segments_B1S)
    cotangents = part.backward(residuals, queries.gradient_BHTN, masked, segments)
    return [cotangent.astype(jnp.float32) for cotangent in cotangents]


def _sent(arrays: Any, mesh_axes: tuple[str, ...]) -> Any:
    """Send arrays to the next device of the ring. Return those of the previous device.

    Call inside `shard_map`, on all devices of the ring.
    """
    num_devices = jax.lax.axis_size(mesh_axes)
    route = [(device, (device + 1) % num_devices) for device in range(num_devices)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, mesh_axes, route), arrays)


def _parts(x: jax.Array, causal: bool) -> list[jax.Array]:
    """Split x along positions, its third axis, into two halves if causal. Otherwise return [x].

    The halves are a device's two parts in zig-zag. Queries of the first part see the first part of
    earlier devices' keys. Queries of the second part see every first part, and the second part of
    later devices' keys.
    """
    if not causal:
        return [x]
    return jnp.split(x, 2, axis=2)


def _output_parts(output: _Output, causal: bool) -> list[_Output]:
    """Split an output along positions, into two halves if causal, as `_parts` splits an array."""
    y_parts = _parts(output.y_BHTN, causal)
    lse_parts = _parts(output.lse_BHT, causal)
    return [_Output(y, lse) for y, lse in zip(y_parts, lse_parts, strict=True)]


def _paired(
    query_segments_B1T: jax.Array | None, key_segments_B1S: jax.Array | None
) -> Segments | None:
    """Return the segments of queries and keys as one value, or `None` without segments."""
    if query_segments_B1T is None or key_segments_B1S is None:
        return None
    return Segments(query_segments_B1T, key_segments_B1S)


def _plus(totals: list[jax.Array], terms: list[jax.Array]) -> list[jax.Array]:
    """Return the totals with term i added to total i. There may be fewer terms than totals."""
    sums = list(totals)
    for index, term in enumerate(terms):
        sums[index] = sums[index] + term
    return sums


def _combined(total: _Output, new: _Output) -> _Output:
    """Return the attention to two sets of keys together, computed from the attention to each."""
    lse_BHT = jnp.logaddexp(total.lse_BHT, new.lse_BHT)
    total_weight_BHT1 = jnp.exp(total.lse_BHT - lse_BHT)[..., None]
    new_weight_BHT1 = jnp.exp(new.lse_BHT - lse_BHT)[..., None]
    y_BHTN = total_weight_BHT1 * total.y_BHTN + new_weight_BHT1 * new.y_BHTN.astype(jnp.float32)
    return _Output(y_BHTN, lse_BHT)
