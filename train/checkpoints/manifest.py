"""The manifest of a checkpoint: what must be in it, bitwise. A checkpoint without its whole manifest does not exist.

It holds config.json as it then was, with the name of the run, and two lists of digests (xxh3_128, which finds accidents and
is no signature). Every array has one of each shard, taken from memory when it was saved: what comes back is compared with
what was there, whatever mesh it comes back to. Every file has its size and one, taken from the disk after the arrays were
read back from it: damage is found before anything is loaded, without building the model.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import xxhash

from mupax import disk
from mupax.disk import JsonError, read_json
from mupax.errors import MupaxError
from mupax.train.checkpoints.layout import ASSETS, ASSETS_RECORD
from mupax.train.checkpoints.layout import MANIFEST as NAME

FORMAT = "mupax-checkpoint-3"
_FIELDS = {
    "mupax-checkpoint-1": {"step", "data", "arrays", "files"},
    "mupax-checkpoint-2": {"step", "data", "record", "arrays", "files"},
    FORMAT: {"step", "data", "record", "assets", "arrays", "files"},
}
"""Format to its fields. A new one gets another number and a line here."""


class DamagedError(MupaxError):
    """A checkpoint that is not what was saved. The text names the file or array."""


class ForeignError(MupaxError):
    """A checkpoint of another run or of a newer version, which may be whole: it is refused, and stays where it is."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        step: optimizer steps done, which is the checkpoint's name too.
        data: the data's facts.
        record: what config.json held, where the run has one; empty in the first format.
        arrays: name to shape, dtype and shards, each an index with its digest.
        files: path inside the checkpoint to size in bytes and digest.
        assets: path inside the workdir to size in bytes and digest (`assets.py`); empty in older formats.
    """

    step: int
    data: dict[str, Any]
    arrays: dict[str, dict[str, Any]]
    files: dict[str, list[Any]]
    record: dict[str, Any] = dataclasses.field(default_factory=dict)
    assets: dict[str, list[Any]] = dataclasses.field(default_factory=dict)

    @property
    def run(self) -> str | None:
        """Name of the run; None where it has none."""
        return self.record.get("run")


def write(folder: Path, manifest: Manifest) -> None:
    """Write the manifest whole or not at all.

    Args:
        folder: of the checkpoint, whose arrays and files are already there.
        manifest: what later reads are compared with.
    """
    body = dataclasses.asdict(manifest)
    disk.write_whole(folder / NAME, json.dumps({"format": FORMAT, "digest": _digest_of(body), "manifest": body}))


def read(folder: Path, run: str | None = None) -> Manifest:
    """The manifest of a checkpoint, itself verified.

    Args:
        folder: of the checkpoint.
        run: whose it must be, where the manifest names one; any unless given.

    Raises:
        DamagedError: missing, edited, of another step than the folder's name says, or of another form; twice.
        ForeignError: of another run, or in a format of another version.
        DiskError: the disk cannot read it.
    """
    try:
        manifest = _read(folder)
    except DamagedError:  # damage is what two reads agree on
        manifest = _read(folder)
    if None not in (run, manifest.run) and manifest.run != run:
        raise ForeignError(
            f"checkpoint {folder} is of another run ({manifest.run}; the one in this workdir is {run}); nothing was "
            "changed: move it away, or give the workdir that it is from"
        )
    return manifest


def _read(folder: Path) -> Manifest:
    if disk.status(folder / NAME) is None:
        raise DamagedError(f"{NAME} is missing")
    try:
        content = read_json(folder / NAME)
    except JsonError as error:
        raise DamagedError(f"{NAME}: {str(error).removeprefix(f'{folder / NAME}: ')}") from error
    body, name = content.get("manifest"), str(content.get("format"))
    if name not in _FIELDS:
        if re.fullmatch(r"mupax-checkpoint-\d{1,9}", name):
            raise ForeignError(
                f"checkpoint {folder} has the format {name}, and this version reads {', '.join(_FIELDS)}; nothing was "
                "changed: go on with the version that wrote it, or a newer one"
            )
        raise DamagedError(f"{NAME} has format {disk.shown(name)}; this version reads {', '.join(_FIELDS)}")
    if not isinstance(body, dict) or content.get("digest") != _digest_of(body):
        raise DamagedError(f"{NAME} does not have the digest it names")
    try:
        if body.keys() != _FIELDS[name]:
            raise ValueError("its fields")
        manifest = Manifest(**body)
        _check_form(manifest)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise DamagedError(f"{NAME} has another form than this version's: {error!s:.200}") from error
    if folder.name.isdigit() and manifest.step != int(folder.name):
        raise DamagedError(f"{NAME} is of step {manifest.step}")
    return manifest


def _digest_of(body: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())


def _check_form(manifest: Manifest) -> None:
    """A manifest of a stranger may carry a right digest of anything."""
    objects = isinstance(manifest.data, dict) and isinstance(manifest.record, dict)
    if type(manifest.step) is not int or not objects or not manifest.files:
        raise ValueError("step, data, record or files")
    for path, (size, digest) in [*manifest.files.items(), *manifest.assets.items()]:
        parts = PurePosixPath(path)
        if parts.is_absolute() or ".." in parts.parts or type(size) is not int or not isinstance(digest, str):
            raise ValueError(f"the file {path[:60]!a}")
    folder = f"{ASSETS}/"
    if not all(path.startswith(folder) for path in manifest.assets):
        raise ValueError(f"an asset outside {folder}")
    if manifest.assets and not any(path.endswith(f"/{ASSETS_RECORD}") for path in manifest.assets):
        raise ValueError(f"assets without {ASSETS_RECORD}")
    for name, entry in manifest.arrays.items():
        axes = [(size, axis) for index, _ in entry["shards"] for size, axis in zip(entry["shape"], index, strict=True)]
        if not all(0 <= start <= stop <= size for size, (start, stop) in axes):
            raise ValueError(f"the array {name[:60]!a}")


# Arrays


class Shard(NamedTuple):
    """One shard of an array, in host memory."""

    name: str
    index: tuple[tuple[int, int], ...]
    """Start and stop of each axis: where it lies in its array."""
    data: np.ndarray


def by_name(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by the names they have on disk: keys joined by dots."""
    import jax

    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def host_shards(arrays: Mapping[str, Any]) -> list[Shard]:
    """The shards that this process saves, copied to the host; each part of an array on one process only."""
    first = [(name, a.shape, s) for name, a in arrays.items() for s in a.addressable_shards if s.replica_id == 0]
    for _, _, shard in first:
        shard.data.copy_to_host_async()  # all at once; what is saved next finds them on the host
    return [Shard(name, _index(shard.index, shape), np.asarray(shard.data)) for name, shape, shard in first]


def describe_arrays(arrays: Mapping[str, Any], shards: Sequence[Shard]) -> dict[str, dict[str, Any]]:
    """The manifest's list of arrays, with the shards of this process.

    Args:
        arrays: all of the state by their names on disk (`by_name`).
        shards: those that this process saves (`host_shards`).
    """
    entries = {name: {"shape": list(a.shape), "dtype": str(a.dtype), "shards": []} for name, a in arrays.items()}
    for shard, digest in zip(shards, in_threads(array_digest, [shard.data for shard in shards]), strict=True):
        entries[shard.name]["shards"].append([[list(axis) for axis in shard.index], digest])
    return entries


def array_digest(data: np.ndarray) -> str:
    """xxh3_128 of an array's bytes in C order, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)


def check_loaded(arrays: Mapping[str, Any], saved: Mapping[str, dict[str, Any]]) -> list[str]:
    """Names of loaded arrays that are not those that were saved, as far as this process holds them.

    The mesh may be another: a saved shard is looked for inside the array, or inside one of its shards that lie here.

    Args:
        arrays: as they were loaded, by their names on disk.
        saved: the manifest's `arrays`, which has all of these names.
    """
    shards = [(name, *shard) for name in arrays for shard in saved[name]["shards"]]
    local = [(name, part, digest) for name, i, digest in shards if (part := _part(arrays[name], i)) is not None]
    loaded = in_threads(array_digest, [part for _, part, _ in local])
    return sorted({name for (name, _, saved), digest in zip(local, loaded, strict=True) if digest != saved})


def _part(array: Any, index: Sequence[Sequence[int]]) -> np.ndarray | None:
    """The part of an array where a saved shard lay; None where this process does not hold it."""
    if array.is_fully_addressable:
        return np.asarray(array)[tuple(slice(*axis) for axis in index)]
    for shard in array.addressable_shards:
        axes = list(zip(index, _index(shard.index, array.shape), strict=True))
        if all(low <= start and stop <= high for (start, stop), (low, high) in axes):
            return np.asarray(shard.data)[tuple(slice(start - low, stop - low) for (start, stop), (low, _) in axes)]
    return None


def _index(slices: Sequence[slice], shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return tuple(each.indices(size)[:2] for each, size in zip(slices, shape, strict=True))


def in_threads(function: Callable[..., Any], *columns: Iterable[Any]) -> list[Any]:
    """A call for every row. Hashing and reading files run outside Python's lock."""
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(function, *columns))
