"""How checkpoints lie in their folder, and the manifest of each: what must be in it, bitwise.

What is not whole yet, what is being deleted and what was set aside do not count. A checkpoint without its whole manifest does
not exist.

Where folders can be renamed (`RenameCommit`), a checkpoint is written as STEP.saving and gets its name when it is whole; one that
is deleted loses its name first; a damaged one is moved to set-aside/. In a bucket, and in some that are mounted, they cannot
(`MarkerCommit`): a checkpoint is written where it stays, and its manifest, which comes last and goes first, makes it one. An empty
file STEP.saving says that it is being written or deleted, and damaged.json in it that it was set aside.

It holds config.json as it then was, with the name of the run, and two lists of digests (xxh3_128, which finds accidents and
is no signature). Every array has one of each shard, taken from memory when it was saved: what comes back is compared with
what was there, whatever mesh it comes back to. Every file has its size and one, taken from the disk after the arrays were
read back from it: damage is found before anything is loaded, without building the model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import xxhash

from mupax import disk
from mupax.disk import JsonError, copy, delete_tree, is_remote, read_json, remove_tree
from mupax.errors import MupaxError

FORMAT = "mupax-checkpoint-3"
_FIELDS = {
    "mupax-checkpoint-1": {"step", "data", "arrays", "files"},
    "mupax-checkpoint-2": {"step", "data", "record", "arrays", "files"},
    FORMAT: {"step", "data", "record", "assets", "arrays", "files"},
}
"""Format to its fields. A new one gets another number and a line here."""

SET_ASIDE, SAVING, DELETING = "set-aside", ".saving", ".deleting"
MANIFEST, DAMAGED = "manifest.json", "damaged.json"
ASSETS = "assets"
ASSETS_RECORD = "assets.json"
_OLD, _NEW = ".folder", ".renamed"
PROBES = (_OLD, _NEW)
"""What a kill may leave of `renames_folders`."""

_UNWELL = (
    errno.EIO,
    errno.ESTALE,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.ENOMEM,
    errno.ETIMEDOUT,
    errno.EROFS,
    errno.EACCES,
)
"""What a disk says that could rename a folder at a better time; saving says it again."""


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
    disk.write_whole(
        folder / MANIFEST,
        json.dumps({"format": FORMAT, "digest": _digest_of(body), "manifest": body}),
    )


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
    if disk.status(folder / MANIFEST) is None:
        raise DamagedError(f"{MANIFEST} is missing")
    try:
        content = read_json(folder / MANIFEST)
    except JsonError as error:
        raise DamagedError(
            f"{MANIFEST}: {str(error).removeprefix(f'{folder / MANIFEST}: ')}"
        ) from error
    body, name = content.get("manifest"), str(content.get("format"))
    if name not in _FIELDS:
        if re.fullmatch(r"mupax-checkpoint-\d{1,9}", name):
            raise ForeignError(
                f"checkpoint {folder} has the format {name}, and this version reads {', '.join(_FIELDS)}; nothing was "
                "changed: go on with the version that wrote it, or a newer one"
            )
        raise DamagedError(
            f"{MANIFEST} has format {disk.shown(name)}; this version reads {', '.join(_FIELDS)}"
        )
    if not isinstance(body, dict) or content.get("digest") != _digest_of(body):
        raise DamagedError(f"{MANIFEST} does not have the digest it names")
    try:
        if body.keys() != _FIELDS[name]:
            raise ValueError("its fields")
        manifest = Manifest(**body)
        _check_form(manifest)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise DamagedError(
            f"{MANIFEST} has another form than this version's: {error!s:.200}"
        ) from error
    if folder.name.isdigit() and manifest.step != int(folder.name):
        raise DamagedError(f"{MANIFEST} is of step {manifest.step}")
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
        if (
            parts.is_absolute()
            or ".." in parts.parts
            or type(size) is not int
            or not isinstance(digest, str)
        ):
            raise ValueError(f"the file {path[:60]!a}")
    folder = f"{ASSETS}/"
    if not all(path.startswith(folder) for path in manifest.assets):
        raise ValueError(f"an asset outside {folder}")
    if manifest.assets and not any(path.endswith(f"/{ASSETS_RECORD}") for path in manifest.assets):
        raise ValueError(f"assets without {ASSETS_RECORD}")
    for name, entry in manifest.arrays.items():
        axes = [
            (size, axis)
            for index, _ in entry["shards"]
            for size, axis in zip(entry["shape"], index, strict=True)
        ]
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
    first = [
        (name, a.shape, s)
        for name, a in arrays.items()
        for s in a.addressable_shards
        if s.replica_id == 0
    ]
    for _, _, shard in first:
        shard.data.copy_to_host_async()  # all at once; what is saved next finds them on the host
    return [
        Shard(name, _index(shard.index, shape), np.asarray(shard.data))
        for name, shape, shard in first
    ]


def describe_arrays(
    arrays: Mapping[str, Any], shards: Sequence[Shard]
) -> dict[str, dict[str, Any]]:
    """The manifest's list of arrays, with the shards of this process.

    Args:
        arrays: all of the state by their names on disk (`by_name`).
        shards: those that this process saves (`host_shards`).
    """
    entries = {
        name: {"shape": list(a.shape), "dtype": str(a.dtype), "shards": []}
        for name, a in arrays.items()
    }
    for shard, digest in zip(
        shards, in_threads(array_digest, [shard.data for shard in shards]), strict=True
    ):
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
    local = [
        (name, part, digest)
        for name, i, digest in shards
        if (part := _part(arrays[name], i)) is not None
    ]
    loaded = in_threads(array_digest, [part for _, part, _ in local])
    return sorted(
        {name for (name, _, saved), digest in zip(local, loaded, strict=True) if digest != saved}
    )


def _part(array: Any, index: Sequence[Sequence[int]]) -> np.ndarray | None:
    """The part of an array where a saved shard lay; None where this process does not hold it."""
    if array.is_fully_addressable:
        return np.asarray(array)[tuple(slice(*axis) for axis in index)]
    for shard in array.addressable_shards:
        axes = list(zip(index, _index(shard.index, array.shape), strict=True))
        if all(low <= start and stop <= high for (start, stop), (low, high) in axes):
            return np.asarray(shard.data)[
                tuple(slice(start - low, stop - low) for (start, stop), (low, _) in axes)
            ]
    return None


def _index(slices: Sequence[slice], shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return tuple(each.indices(size)[:2] for each, size in zip(slices, shape, strict=True))


def in_threads(function: Callable[..., Any], *columns: Iterable[Any]) -> list[Any]:
    """A call for every row. Hashing and reading files run outside Python's lock."""
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(function, *columns))


class RenameCommit:
    """Commit of a checkpoint by renaming its folder, on a disk. Process 0 alone calls what changes something.

    Args:
        folder: of the checkpoints.
    """

    renames = True

    def context(self) -> Any:
        """How orbax writes arrays: uncompressed, each shard by its first holder; what ends a save is a new name, or a file.

        Weights hardly shrink, and packing them would take the cores from training. The first holder's copy is what is digested.
        """
        from orbax.checkpoint import v1 as ocp

        options = ocp.options
        saving = options.ArrayOptions.Saving(use_compression=False, use_replica_parallel=False)
        mode = (
            options.AtomicityMode.ATOMIC_RENAME
            if self.renames
            else options.AtomicityMode.COMMIT_FILE
        )
        arrays, ending = options.ArrayOptions(saving=saving), options.AtomicityOptions(mode=mode)
        return ocp.Context(array_options=arrays, atomicity_options=ending)

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def written_at(self, step: int) -> Path:
        """Where the arrays of a checkpoint are written."""
        return self.folder / f"{step}{SAVING}"

    def begin(self, step: int) -> None:
        """Make room for a checkpoint."""
        remove_tree(self.written_at(step))

    def abandon(self, step: int) -> None:
        """Delete what a failed save has written."""
        for left in self.folder.glob(f"{step}{SAVING}*"):
            remove_tree(left)

    def publish(self, step: int) -> None:
        """Give a checkpoint that has its manifest its name."""
        self.written_at(step).replace(self.folder / str(step))
        disk.sync_folder(self.folder)

    def delete(self, step: int) -> None:
        """Delete a checkpoint; half deleted, it does not look like one.

        Raises:
            OSError: it cannot be deleted, or not all of it.
        """
        doomed = self.folder / f"{step}{DELETING}"
        (self.folder / str(step)).replace(doomed)
        delete_tree(doomed)

    def half_deleted(self) -> list[int]:
        """Return the steps of checkpoints that were not deleted completely."""
        names = [name for name in disk.names(self.folder) if name.endswith(DELETING)]
        return [int(step) for name in names if (step := name.removesuffix(DELETING)).isdigit()]

    def delete_half(self, step: int) -> None:
        """Delete what is left of a checkpoint that was not deleted completely.

        Raises:
            OSError: it cannot be deleted.
        """
        delete_tree(self.folder / f"{step}{DELETING}")

    def move(self, step: int, target: Path) -> None:
        """Move a checkpoint out of the folder.

        Args:
            step: of the checkpoint.
            target: where it is a checkpoint afterwards; nothing is there yet.

        Raises:
            OSError: it cannot be moved, and is where it was.
        """
        target.parent.mkdir(parents=True, exist_ok=True)
        (self.folder / str(step)).replace(target)
        disk.sync_folder(target.parent)
        disk.sync_folder(self.folder)

    def clear(self, name: str) -> None:
        """Delete what an interrupted save or deletion has left, STEP.something."""
        remove_tree(self.folder / name)

    def set_aside(self, step: int, problem: str) -> Path:
        """Put a damaged checkpoint out of the way; gives what marks it.

        Args:
            step: of the checkpoint.
            problem: what is wrong with it, in a line; recorded where the folder cannot be moved.

        Raises:
            OSError: it cannot be moved or marked.
        """
        aside = self.folder / SET_ASIDE
        names = (str(step) if number == 0 else f"{step}.{number}" for number in itertools.count())
        target = next(aside / name for name in names if not (aside / name).exists())
        aside.mkdir(exist_ok=True)
        return (self.folder / str(step)).replace(target)

    def take_back(self, aside: Path, step: int) -> None:
        """Let one that was set aside count again.

        Args:
            aside: its folder, as `layout.aside` lists it.
            step: the name it gets back; no checkpoint has it now.
        """
        if aside.parent.name == SET_ASIDE:
            aside.replace(self.folder / str(step))
        else:
            (aside / DAMAGED).unlink()


class MarkerCommit(RenameCommit):
    """Commit of a checkpoint by a manifest that is written last, where no folder can be renamed, as in a bucket."""

    renames = False

    def written_at(self, step: int) -> Path:
        return self.folder / str(step)

    def begin(self, step: int) -> None:
        remove_tree(self.written_at(step))  # a damaged one, whose successor this is
        self.folder.mkdir(parents=True, exist_ok=True)
        self._marker(step).write_text("")

    def abandon(self, step: int) -> None:
        self.clear(self._marker(step).name)

    def publish(self, step: int) -> None:
        self._marker(step).unlink(missing_ok=True)

    def delete(self, step: int) -> None:
        self._marker(step).write_text("")
        (self.folder / str(step) / MANIFEST).unlink(missing_ok=True)
        self.delete_half(step)

    def half_deleted(self) -> list[int]:
        names = [name for name in disk.names(self.folder) if name.endswith(SAVING)]
        steps = [int(step) for name in names if (step := name.removesuffix(SAVING)).isdigit()]
        return [step for step in steps if disk.status(self.folder / str(step) / MANIFEST) is None]

    def delete_half(self, step: int) -> None:
        delete_tree(self.folder / str(step))
        delete_tree(self._marker(step))

    def move(self, step: int, target: Path) -> None:
        source = self.folder / str(step)
        for name in disk.names(source):
            if name != MANIFEST:  # which comes last, and makes it a checkpoint
                copy(source / name, target / name)
        copy(source / MANIFEST, target / MANIFEST)
        self.delete(step)

    def clear(self, name: str) -> None:
        checkpoint = self.folder / name.partition(".")[0]
        if disk.status(checkpoint / MANIFEST) is None:
            remove_tree(checkpoint)
        remove_tree(self.folder / name)

    def set_aside(self, step: int, problem: str) -> Path:
        mark = self.folder / str(step) / DAMAGED
        disk.write_whole(mark, json.dumps({"step": step, "problem": problem}) + "\n")
        return mark

    def _marker(self, step: int) -> Path:
        return self.folder / f"{step}{SAVING}"


def counts(checkpoint: Path) -> bool:
    """Whether a folder is a checkpoint: it has its manifest and was not set aside."""
    return disk.status(checkpoint / MANIFEST) is not None and not is_aside(checkpoint)


def is_aside(checkpoint: Path) -> bool:
    """Whether it was set aside."""
    return checkpoint.parent.name == SET_ASIDE or disk.status(checkpoint / DAMAGED) is not None


def is_being_saved(checkpoint: Path) -> bool:
    """Return True for a folder in which a checkpoint is being written or deleted, where folders cannot be renamed."""
    marker = checkpoint.with_name(f"{checkpoint.name}{SAVING}")
    return disk.status(marker) is not None and disk.status(checkpoint / MANIFEST) is None


def aside(folder: Path) -> list[Path]:
    """The checkpoints of a folder that were set aside."""
    marked = [
        path for name in disk.names(folder) if name.isdigit() and is_aside(path := folder / name)
    ]
    return [*map((folder / SET_ASIDE).joinpath, disk.names(folder / SET_ASIDE)), *marked]


def renames_folders(path: Path) -> bool:
    """Whether a folder can be renamed in this one: not in a bucket, nor in every one that is mounted."""
    if is_remote(path):
        return False
    try:
        path.mkdir(parents=True, exist_ok=True)
        _remove_probes(path)
        (path / _OLD).mkdir()
        (path / _OLD / DAMAGED).touch()
        (path / _OLD).replace(path / _NEW)
        return (path / _NEW / DAMAGED).is_file()
    except OSError as error:
        return error.errno in _UNWELL
    finally:
        _remove_probes(path)


def _remove_probes(path: Path) -> None:
    for folder in map(path.joinpath, PROBES):
        with contextlib.suppress(OSError):
            (folder / DAMAGED).unlink(missing_ok=True)
            folder.rmdir()


def locks_files(file: Path) -> bool:
    """Whether a file, made if missing, can be locked: not in a bucket, mounted or not, nor on some network file systems."""
    if is_remote(file):
        return False
    with file.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
    return True


def lacks(path: Path, file: Path) -> list[str]:
    """What a folder of this machine cannot do, and what a run does instead: a line each, none for a bucket.

    Args:
        path: the folder, in which a probe is made and removed.
        file: in it, made if missing: what a run locks.
    """
    if is_remote(path):
        return []
    texts = {
        "renaming folders (a checkpoint is written where it stays)": renames_folders(path),
        "file locks (an owner file keeps other runs out, unless they start in the same second)": locks_files(
            file
        ),
    }
    return [text for text, can in texts.items() if not can]
