"""The manifest of a checkpoint: what must be in it, to the bit. A checkpoint without its whole manifest does not exist.

It holds two lists. Every array has a digest of each shard, taken from memory when it was saved: what comes back is compared
with what was there, whatever mesh it comes back to. Every file has its size and digest, taken from the disk after the
arrays were read back from it: damage is found before anything is loaded, without building the model. Digests are xxh3_128,
which finds accidents; they are no signature.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import xxhash

from zoo.tensorfile import TensorFileError, read_json

NAME = "manifest.json"
FORMAT = "mupax-checkpoint-1"
STATE = "state"
"""Folder of the arrays inside a checkpoint."""

_BLOCK = 2**24
_THREADS = 8

Index = tuple[tuple[int, int], ...]
"""Start and stop of each axis: where a shard lies in its array."""


class DamagedError(ValueError):
    """A checkpoint that is not what was saved. The text names the file or array."""


class Shard(NamedTuple):
    """One shard of an array, in host memory."""

    name: str
    index: Index
    data: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        step: optimizer steps done, which is the checkpoint's name too.
        data: the data's facts.
        arrays: name to shape, dtype and shards, each an index with its digest.
        files: path inside the checkpoint to size in bytes and digest.
    """

    step: int
    data: dict[str, Any]
    arrays: dict[str, dict[str, Any]]
    files: dict[str, list[Any]]

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(size for size, _ in self.files.values())


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
    with ThreadPoolExecutor(_THREADS) as pool:
        digests = list(pool.map(digest, (shard.data for shard in shards)))
    found = {name: {"shape": list(a.shape), "dtype": str(a.dtype), "shards": []} for name, a in arrays.items()}
    for shard, value in zip(shards, digests, strict=True):
        found[shard.name]["shards"].append([[list(axis) for axis in shard.index], value])
    return found


def digest(data: np.ndarray) -> str:
    """xxh3_128 of an array's bytes in C order, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)


def digest_files(folder: Path, paths: Iterable[str]) -> dict[str, list[Any]]:
    """Size and digest of files, by their paths inside the folder."""
    paths = list(paths)
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(paths, pool.map(lambda path: _digest_file(folder / path), paths), strict=True))


def files_of(folder: Path, process: int, count: int) -> list[str]:
    """The files that one process digests: those it wrote; process 0 those that no process' folder holds, too."""
    own = {f"ocdbt.process_{i}": i for i in range(count)}
    paths = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
    return [str(p) for p in paths if next((own[part] for part in p.parts if part in own), 0) == process]


def write(folder: Path, manifest: Manifest) -> None:
    """Write the manifest whole or not at all."""
    body = dataclasses.asdict(manifest)
    text = json.dumps({"format": FORMAT, "digest": _digest_of(body), "manifest": body})
    temporary = folder / f".{NAME}.partial"
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / NAME)
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Put a folder's list of names on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint, itself verified.

    Raises:
        DamagedError: missing, edited, of another step than the folder's name says, or not one of this version's.
    """
    if not (folder / NAME).is_file():
        raise DamagedError(f"{NAME} is missing")
    try:
        whole = read_json(folder / NAME)
    except TensorFileError as error:
        raise DamagedError(f"{NAME}: {str(error).removeprefix(f'{folder / NAME}: ')}") from error
    if whole.get("format") != FORMAT:
        raise DamagedError(f"{NAME} has format {whole.get('format')!r:.40}; this version reads {FORMAT}")
    body = whole.get("manifest")
    if not isinstance(body, dict) or whole.get("digest") != _digest_of(body):
        raise DamagedError(f"{NAME} does not have the digest it names")
    try:
        found = Manifest(**body)
        _check_form(found)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise DamagedError(f"{NAME} has another form than this version's: {error!s:.200}") from error
    if folder.name.isdigit() and found.step != int(folder.name):
        raise DamagedError(f"{NAME} is of step {found.step}")
    return found


def check_files(folder: Path, manifest: Manifest, part: tuple[int, int] = (0, 1)) -> list[str]:
    """What is wrong with the files, one line each; nothing where all is as it was written.

    Args:
        folder: of the checkpoint.
        manifest: its manifest.
        part: index and count, to look at every count-th file only.
    """
    wanted = dict(list(manifest.files.items())[part[0] :: part[1]])
    with ThreadPoolExecutor(_THREADS) as pool:
        found = pool.map(lambda item: _file_problem(folder / item[0], *item[1]), wanted.items())
        return [f"{path} {problem}" for path, problem in zip(wanted, found, strict=True) if problem]


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
                digest(stored[_slices(index)].read().result()) == value for index, value in entry["shards"]
            )
        except (ValueError, OSError, RuntimeError):  # whatever tensorstore says about it
            return False

    with ThreadPoolExecutor(_THREADS) as pool:
        return [n for n, ok in zip(arrays, pool.map(same, arrays, arrays.values()), strict=True) if not ok]


def check_loaded(arrays: Mapping[str, Any], manifest: Manifest) -> list[str]:
    """Names of loaded arrays that are not those that were saved, as far as this process holds them.

    The mesh may be another: a saved shard is looked for inside the array, or inside one of its shards that lie here.
    """
    checked: list[tuple[str, np.ndarray, str]] = []
    for name, array in arrays.items():
        parts = list(_held(array))
        for index, value in manifest.arrays[name]["shards"]:
            part = next((part for part in parts if _inside(index, part.index)), None)
            if part is not None:
                at = tuple(slice(a - p, b - p) for (a, b), (p, _) in zip(index, part.index, strict=True))
                checked.append((name, part.data[at], value))
    with ThreadPoolExecutor(_THREADS) as pool:
        same = pool.map(lambda each: digest(each[1]) == each[2], checked)
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


def _digest_of(body: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())


def _digest_file(path: Path) -> list[Any]:
    hasher, size = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            hasher.update(block)
            size += len(block)
    return [size, hasher.hexdigest()]


def _file_problem(path: Path, size: int, value: str) -> str | None:
    try:
        if path.is_symlink() or not path.is_file():
            return "is missing"
        if path.stat().st_size != size:
            return f"has {path.stat().st_size} bytes, not {size}"
        return None if _digest_file(path) == [size, value] else "has other contents than were written"
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def _check_form(manifest: Manifest) -> None:
    """A manifest of a stranger may carry a right digest of anything."""
    if type(manifest.step) is not int or not isinstance(manifest.data, dict) or not manifest.files:
        raise ValueError("step, data or files")
    for path, (size, value) in manifest.files.items():
        parts = PurePosixPath(path)
        if parts.is_absolute() or ".." in parts.parts or type(size) is not int or not isinstance(value, str):
            raise ValueError(f"the file {path[:60]!a}")
    for name, entry in manifest.arrays.items():
        axes = [(size, axis) for index, _ in entry["shards"] for size, axis in zip(entry["shape"], index, strict=True)]
        if not all(0 <= start <= stop <= size for size, (start, stop) in axes):
            raise ValueError(f"the array {name[:60]!a}")
