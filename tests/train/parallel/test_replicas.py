"""Copies of arrays on several devices: one bit that differs is found by its array's name, by one program for any values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mupax.train.parallel import replicas

pytestmark = pytest.mark.core

MESH = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "fsdp"))


def placed(value: Any, *spec: str | None) -> jax.Array:
    return jax.device_put(value, NamedSharding(MESH, PartitionSpec(*spec)))


def tree() -> dict[str, Any]:
    """Arrays that are whole on every device, or split over four and copied over two."""
    return {
        "count": placed(np.int32(7)),
        "half": placed(jnp.arange(12, dtype=jnp.bfloat16).reshape(3, 4), None, "fsdp"),
        "key": placed(np.arange(2, dtype=np.uint32)),
        "on": placed(np.array([True, False])),
        "small": placed(np.arange(8, dtype=np.int8)),
        "weight": placed(np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6), "fsdp"),
    }


def with_flipped_bit(array: jax.Array, device: int, place: int) -> jax.Array:
    """Return an array of which one device's part has another last bit somewhere."""
    parts = [np.array(shard.data) for shard in array.addressable_shards]
    parts[device].reshape(-1)[place : place + 1].view(np.uint8)[0] ^= 1
    devices = [shard.device for shard in array.addressable_shards]
    single = [jax.device_put(part, to) for part, to in zip(parts, devices, strict=True)]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, single)


def difference(arrays: dict[str, Any]) -> str:
    named = replicas.by_name(arrays)
    return replicas.difference(
        named, [{"host": "a", "sums": replicas.checksums(list(named.values()))}]
    )


@pytest.mark.parametrize(
    ("name", "place"),
    [("count", 0), ("half", 2), ("key", 1), ("on", 1), ("small", 5), ("weight", 3)],
)
def test_one_bit_of_one_copy_is_found_by_name(name: str, place: int) -> None:
    arrays = tree()
    assert difference(arrays) == ""
    for device in (0, 7):
        problem = difference({**arrays, name: with_flipped_bit(arrays[name], device, place)})
        assert problem.startswith(f"{name} differs between two devices of process 0 (a)")


def test_numbers_that_changed_places_are_found() -> None:
    arrays = tree()
    parts = [np.array(shard.data) for shard in arrays["key"].addressable_shards]
    parts[3] = parts[3][::-1].copy()
    single = [
        jax.device_put(part, shard.device)
        for part, shard in zip(parts, arrays["key"].addressable_shards, strict=True)
    ]
    swapped = jax.make_array_from_single_device_arrays((2,), arrays["key"].sharding, single)
    assert "key" in difference({**arrays, "key": swapped})


def test_a_difference_between_processes_names_both() -> None:
    arrays = {"weight": tree()["weight"]}
    sums = replicas.checksums(list(arrays.values()))
    # As the second of two processes, which has the last four devices, would send them.
    mine, other = (
        {device: row for device, row in sums.items() if (int(device) >= 4) == half}
        for half in (False, True)
    )
    other["6"] = [other["6"][0] + 1]

    class Remote:
        def __init__(self, device: Any) -> None:
            self.id, self.process_index = device.id, int(device.id >= 4)

    class Spread:
        shape = arrays["weight"].shape

        class sharding:
            @staticmethod
            def devices_indices_map(shape: tuple[int, ...]) -> dict[Any, Any]:
                indices = arrays["weight"].sharding.devices_indices_map(shape)
                return {Remote(device): index for device, index in indices.items()}

    parts = [{"host": "a", "sums": mine}, {"host": "b", "sums": other}]
    spread: Any = {"weight": Spread()}
    assert (
        replicas.difference(spread, parts)
        == "weight on process 1 (b) has other bits than on process 0 (a)"
    )


def test_sums_are_compiled_once_for_all_values() -> None:
    arrays = list(tree().values())
    replicas.checksums(arrays)
    program = replicas._program(arrays[0].sharding.mesh, tuple(a.sharding.spec for a in arrays))
    replicas.checksums([a * a.dtype.type(2) if a.dtype == jnp.float32 else a for a in arrays])
    assert program._cache_size() == 1
