"""Comparison of the copies of arrays that several processes hold, such as parameters.

Every device sums the bit patterns of its parts of the arrays, in one compiled program without
communication. Copies of a part must have equal sums. A drift of one bit in one copy is found, and
no array leaves its device.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def by_name(tree: Any) -> dict[str, jax.Array]:
    """Return the leaves of a tree by their path, keys joined by dots."""
    leaves: dict[str, jax.Array] = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        leaves[jax.tree_util.keystr(path, simple=True, separator=".")] = leaf
    return leaves


def checksums(arrays: Sequence[jax.Array]) -> dict[str, list[int]]:
    """Return a checksum per array on each device of this process, by the device's id.

    A checksum is a sum of the bit patterns of the device's part of the array, modulo 2^32.

    Args:
        arrays: At least one array, all with a `NamedSharding` on one mesh. The list of each device
            has one checksum per array, in this order.
    """
    shardings = []
    for array in arrays:
        if isinstance(array.sharding, NamedSharding):
            shardings.append(array.sharding)
    assert len(shardings) == len(arrays), "an array that is not on the mesh"
    program = _program(shardings[0].mesh, tuple(sharding.spec for sharding in shardings))
    sums = program(list(arrays))
    rows: dict[str, list[int]] = {}
    for shard in sums.addressable_shards:
        rows[str(shard.device.id)] = np.asarray(shard.data)[0].tolist()
    return rows


@functools.lru_cache(maxsize=4)
def _program(mesh: Mesh, specs: tuple[PartitionSpec, ...]) -> Any:
    """Return a jitted function that maps arrays to checksums, uint32 [devices, arrays].

    Each device computes its own row, without communication. The function is kept for later calls,
    because a run compares its arrays at every save.
    """

    def local(arrays: list[jax.Array]) -> jax.Array:
        return jnp.stack([_sum(array) for array in arrays])[None]

    rows = PartitionSpec(mesh.axis_names)
    return jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(list(specs),), out_specs=rows, check_vma=False)
    )


def _sum(array: jax.Array) -> jax.Array:
    """Return the sum modulo 2^32 of all bit patterns, each times an odd factor for its position.

    A change of one pattern always changes the sum.
    """
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    size = array.dtype.itemsize
    # An entry of eight bytes becomes two patterns of four bytes along a new axis.
    pattern = {1: jnp.uint8, 2: jnp.uint16}.get(size, jnp.uint32)
    bits = jax.lax.bitcast_convert_type(array, pattern).astype(jnp.uint32)
    place = jnp.zeros(bits.shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(bits.ndim)):
        place += jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis) * np.uint32(stride % 2**32)
        stride *= bits.shape[axis]
    # An odd factor is invertible modulo 2^32: one changed pattern always changes the sum.
    return jnp.sum(bits * (2 * place + 1), dtype=jnp.uint32)


def difference(arrays: Mapping[str, jax.Array], parts: Sequence[Mapping[str, Any]]) -> str:
    """Return a sentence about the first array whose copies differ, or "" if all are equal.

    Args:
        arrays: Arrays on one mesh by name, in the order of `checksums`.
        parts: For each process, its `host` and its `sums` (`checksums`).
    """
    sums: dict[str, list[int]] = {}
    for part in parts:
        sums.update(part["sums"])
    for number, (name, array) in enumerate(arrays.items()):
        # Every device with a copy of a part is compared with the first device that holds the part.
        first_holders: dict[Any, Any] = {}
        for device, index in array.sharding.devices_indices_map(array.shape).items():
            bounds = zip(index, array.shape, strict=True)
            place = tuple(axis.indices(size) for axis, size in bounds)
            first = first_holders.setdefault(place, device)
            if sums[str(first.id)][number] != sums[str(device.id)][number]:
                return _describe(name, device, first, parts)
    return ""


def _describe(name: str, device: Any, first: Any, parts: Sequence[Mapping[str, Any]]) -> str:
    """Return the sentence about two devices that hold different copies of an array.

    Args:
        device: `jax.Device` whose copy differs from that of the device `first`.
        first: `jax.Device` that it was compared with.
        parts: One mapping per process, in the order of their numbers, with its `host`.
    """
    process = f"process {device.process_index} ({parts[device.process_index]['host']})"
    if device.process_index == first.process_index:
        return f"{name} differs between two devices of {process}, {first.id} and {device.id}"
    first_process = f"process {first.process_index} ({parts[first.process_index]['host']})"
    return f"{name} on {process} has other bits than on {first_process}"
