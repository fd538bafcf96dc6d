"""Digests of what a checkpoint holds: of arrays in memory, of arrays read back from its files, and of the files.

xxh3_128 finds accidents; it is no signature. Hashing runs in threads, outside Python's lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

STATE = "state"
"""Folder of the arrays inside a checkpoint."""

THREADS = 8
_BLOCK = 2**20  # stays in a core's cache: reading and hashing 16 MiB at a time takes five times as long

Index = tuple[tuple[int, int], ...]
"""Start and stop of each axis: where a shard lies in its array."""


class Shard(NamedTuple):
    """One shard of an array, in host memory."""

    name: str
    index: Index
    data: np.ndarray


def named(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by the names they have on disk: keys joined by dots."""
    import jax

    def key(entry: Any) -> str:
        return str(getattr(entry, "key", getattr(entry, "name", getattr(entry, "idx", entry))))

    return {".".join(map(key, path)): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def host_shards(arrays: Mapping[str, Any]) -> list[Shard]:
    """The shards that this process saves, copied to the host; each part of an array on one process only."""
    kept = [(name, a.shape, s) for name, a in arrays.items() for s in a.addressable_shards if s.replica_id == 0]
    for _, _, shard in kept:
        shard.data.copy_to_host_async()  # all at once; what is saved next finds them on the host
    return [Shard(name, _index(shard.index, shape), np.asarray(shard.data)) for name, shape, shard in kept]


def describe(arrays: Mapping[str, Any], shards: Sequence[Shard]) -> dict[str, dict[str, Any]]:
    """The manifest's list of arrays, with the shards of this process."""
    with ThreadPoolExecutor(THREADS) as pool:
        digests = list(pool.map(of_array, (shard.data for shard in shards)))
    found = {name: {"shape": list(a.shape), "dtype": str(a.dtype), "shards": []} for name, a in arrays.items()}
    for shard, value in zip(shards, digests, strict=True):
        found[shard.name]["shards"].append([[list(axis) for axis in shard.index], value])
    return found


def of_array(data: np.ndarray) -> str:
    """xxh3_128 of an array's bytes in C order, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)


def of_file(path: Path) -> list[Any]:
    """Size and digest of a file."""
    hasher, size = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            hasher.update(block)
            size += len(block)
    return [size, hasher.hexdigest()]


def of_files(folder: Path, paths: Iterable[str]) -> dict[str, list[Any]]:
    """Size and digest of files, by their paths inside the folder."""
    paths = list(paths)
    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(paths, pool.map(lambda path: of_file(folder / path), paths), strict=True))


def files_of(folder: Path, process: int, count: int) -> list[str]:
    """The files that one process digests: those it wrote; process 0 those that no process' folder holds, too."""
    own = {f"ocdbt.process_{i}": i for i in range(count)}
    paths = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
    return [str(p) for p in paths if next((own[part] for part in p.parts if part in own), 0) == process]


def check_stored(folder: Path, arrays: Mapping[str, dict[str, Any]]) -> list[str]:
    """Read arrays back from a checkpoint's files, without a model or devices, and name those that differ."""
    import tensorstore as ts

    base = f"file://{folder.absolute()}/{STATE}/"
    context = ts.Context()

    def same(name: str, entry: Mapping[str, Any]) -> bool:
        spec = {"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"}}
        try:
            stored = ts.open(spec, open=True, context=context).result()
            return list(stored.shape) == entry["shape"] and all(
                of_array(stored[_slices(index)].read().result()) == value for index, value in entry["shards"]
            )
        except Exception:  # whatever the library makes of damage
            return False

    with ThreadPoolExecutor(THREADS) as pool:
        return [n for n, ok in zip(arrays, pool.map(same, arrays, arrays.values()), strict=True) if not ok]


def check_loaded(arrays: Mapping[str, Any], saved: Mapping[str, dict[str, Any]]) -> list[str]:
    """Names of loaded arrays that are not those that were saved, as far as this process holds them.

    The mesh may be another: a saved shard is looked for inside the array, or inside one of its shards that lie here.
    """
    checked: list[tuple[str, np.ndarray, str]] = []
    for name, array in arrays.items():
        parts = list(_held(array))
        for index, value in saved[name]["shards"]:
            part = next((part for part in parts if _inside(index, part.index)), None)
            if part is not None:
                at = tuple(slice(a - p, b - p) for (a, b), (p, _) in zip(index, part.index, strict=True))
                checked.append((name, part.data[at], value))
    with ThreadPoolExecutor(THREADS) as pool:
        same = pool.map(lambda each: of_array(each[1]) == each[2], checked)
        return sorted({each[0] for each, ok in zip(checked, same, strict=True) if not ok})


def _held(array: Any) -> Iterator[Shard]:
    if array.is_fully_addressable:
        yield Shard("", tuple((0, size) for size in array.shape), np.asarray(array))
    else:
        for shard in array.addressable_shards:
            yield Shard("", _index(shard.index, array.shape), np.asarray(shard.data))


def _inside(index: Sequence[Sequence[int]], outer: Index) -> bool:
    return all(low <= a and b <= high for (a, b), (low, high) in zip(index, outer, strict=True))


def _index(slices: Sequence[slice], shape: Sequence[int]) -> Index:
    return tuple(each.indices(size)[:2] for each, size in zip(slices, shape, strict=True))


def _slices(index: Sequence[Sequence[int]]) -> tuple[slice, ...]:
    return tuple(slice(*axis) for axis in index)
