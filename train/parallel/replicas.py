"""Arrays that several processes hold copies of, compared bit by bit: parameters, counters of the optimizer, seeds, the step.

Every device sums the bit patterns of its parts of the arrays, in one compiled program without communication. Parts that lie on
several processes must have equal sums. A drift of one bit in one of them is found, and nothing of an array leaves its device.
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
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def checksums(arrays: Sequence[jax.Array]) -> dict[str, list[int]]:
    """Return a sum for each array's part on each device of this process, by the device's id.

    Args:
        arrays: all on one mesh.
    """
    shardings = [array.sharding for array in arrays if isinstance(array.sharding, NamedSharding)]
    assert len(shardings) == len(arrays), "an array that is not on the mesh"
    program = _program(shardings[0].mesh, tuple(sharding.spec for sharding in shardings))
    sums = program(list(arrays))
    return {
        str(shard.device.id): np.asarray(shard.data)[0].tolist()
        for shard in sums.addressable_shards
    }


@functools.lru_cache(maxsize=4)
def _program(mesh: Mesh, specs: tuple[PartitionSpec, ...]) -> Any:
    """Return the compiled sums: arrays -> uint32 [devices, arrays], a row on every device."""

    def local(arrays: list[jax.Array]) -> jax.Array:
        return jnp.stack([_sum(array) for array in arrays])[None]

    rows = PartitionSpec(mesh.axis_names)
    return jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(list(specs),), out_specs=rows, check_vma=False)
    )


def _sum(array: jax.Array) -> jax.Array:
    """Return the sum of all bit patterns modulo 2^32, each times an odd number of its place. Equal arrays have equal sums."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    size = array.dtype.itemsize
    # Eight bytes become two patterns of four along a new axis.
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
    """Return which array differs on which process, in words; "" if all copies are equal.

    Args:
        arrays: by name, all on one mesh.
        parts: of every process, its `host` and its `sums` (`checksums`).
    """
    sums = {device: row for part in parts for device, row in part["sums"].items()}
    for number, (name, array) in enumerate(arrays.items()):
        first: dict[Any, Any] = {}
        for device, index in array.sharding.devices_indices_map(array.shape).items():
            place = tuple(axis.indices(size) for axis, size in zip(index, array.shape, strict=True))
            before = first.setdefault(place, device)
            if sums[str(before.id)][number] != sums[str(device.id)][number]:
                return _described(name, device, before, parts)
    return ""


def _described(name: str, device: Any, before: Any, parts: Sequence[Mapping[str, Any]]) -> str:
    def holder(owner: Any) -> str:
        return f"process {owner.process_index} ({parts[owner.process_index]['host']})"

    if device.process_index == before.process_index:
        return (
            f"{name} differs between two devices of {holder(device)}, {before.id} and {device.id}"
        )
    return f"{name} on {holder(device)} has other bits than on {holder(before)}"
