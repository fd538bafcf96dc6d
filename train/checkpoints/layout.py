"""Layout of checkpoints in their folder, and the manifest that says what is in each.

A checkpoint without a complete manifest does not count. Neither do checkpoints that are being
written or deleted, nor those that were set aside as damaged.

| | folders can be renamed (`RenameCommit`) | buckets, some mounts (`MarkerCommit`) |
|---|---|---|
| while it is written | STEP.saving | STEP, and an empty file STEP.saving |
| complete | renamed to STEP | STEP with its manifest, which is written last |
| while it is deleted | renamed to STEP.deleting | STEP without its manifest, which goes first |
| set aside | moved to set-aside/ | damaged.json in it |

The manifest holds config.json as it was, with the name of the run, and two lists of digests
(xxh3_128, which finds accidents and is no signature):

* Every array has a digest of each shard, taken from memory when it was saved. What is loaded is
  compared with what was in memory, on any mesh.
* Every file has its size and a digest, taken from the disk. Damage is found before anything is
  loaded, and without building the model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import xxhash

from mupax import MupaxError, disk
from mupax.disk import JsonError, copy, delete_tree, is_remote, read_json, remove_tree

FORMAT = "mupax-checkpoint-3"
_FIELDS = {
    "mupax-checkpoint-1": {"step", "data", "arrays", "files"},
    "mupax-checkpoint-2": {"step", "data", "record", "arrays", "files"},
    FORMAT: {"step", "data", "record", "assets", "arrays", "files"},
}
"""Fields of manifest.json in each format. A new field needs a new format number and a line here."""

QUARANTINE = "set-aside"
"""Folder of checkpoints that were found damaged."""
SAVING = ".saving"
DELETING = ".deleting"
MANIFEST = "manifest.json"
DAMAGED = "damaged.json"
"""File that marks a checkpoint as damaged where its folder cannot be moved to set-aside/."""
ASSETS = "assets"
ASSETS_RECORD = "assets.json"
_OLD = ".folder"
_NEW = ".renamed"
PROBES = (_OLD, _NEW)
"""Test folders of `renames_folders`. A killed process may leave them in a workdir."""

_TEMPORARY_ERRORS = (
    errno.EIO,
    errno.ESTALE,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.ENOMEM,
    errno.ETIMEDOUT,
    errno.EROFS,
    errno.EACCES,
)
"""Error numbers from which `renames_folders` does not conclude that folders cannot be renamed.

They may pass, as when the disk is full. A save reports an error that lasts."""


class DamagedError(MupaxError):
    """Checkpoint that is not what was saved. The text names the file or array."""


class ForeignError(MupaxError):
    """Checkpoint of another run or of a newer version. It may be good, so it is not quarantined."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """Contents of a checkpoint, with a digest of each file and array shard.

    Attributes:
        step: Optimizer steps done, which is the checkpoint's name too.
        data: Facts of the training data, such as `name` and `digest`.
        record: Content of config.json. Empty in the first format.
        arrays: `shape`, `dtype` and `shards` by array name. A shard is a list of its index
            ([start, stop] along each axis) and its digest.
        files: `[size in bytes, digest]` by the path inside the checkpoint.
        assets: `[size in bytes, digest]` of the tokenizer and other files outside of the
            checkpoint (`assets.py`), by the path inside the workdir. Empty in older formats.
    """

    step: int
    data: dict[str, Any]
    arrays: dict[str, dict[str, Any]]
    files: dict[str, list[Any]]
    record: dict[str, Any] = dataclasses.field(default_factory=dict)
    assets: dict[str, list[Any]] = dataclasses.field(default_factory=dict)

    @property
    def run(self) -> str | None:
        """Name of the run, or `None` in a manifest without one."""
        return self.record.get("run")


def write(folder: Path, manifest: Manifest) -> None:
    """Write a manifest with its digest into manifest.json of its checkpoint, atomically.

    The arrays and files of the checkpoint must already be there.

    Args:
        folder: Folder of the checkpoint (`written_at`), whose name may end in `.saving`.
    """
    body = dataclasses.asdict(manifest)
    content = {"format": FORMAT, "digest": _digest_of(body), "manifest": body}
    disk.write_whole(folder / MANIFEST, json.dumps(content))


def read(folder: Path, run: str | None = None) -> Manifest:
    """Return the manifest of a checkpoint after checking its digest and its form.

    Args:
        run: Name of the run that the checkpoint must be of. By default, and for a manifest without
            a name, any run will do.

    Raises:
        DamagedError: At two reads the manifest is missing, edited, of another form, or of another
            step than the folder's name.
        ForeignError: The checkpoint is of another run, or in a format of another version.
        DiskError: The disk cannot be read.
    """
    try:
        manifest = _read(folder)
    except DamagedError:  # a single bad read may be a passing failure of the disk
        manifest = _read(folder)
    if None not in (run, manifest.run) and manifest.run != run:
        raise ForeignError(
            f"checkpoint {folder} is of another run ({manifest.run}; the one in this workdir is "
            f"{run}); nothing was "
            "changed: move it away, or give the workdir that it is from"
        )
    return manifest


def _read(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint after checking its digest, form and step in one read.

    Raises:
        DamagedError: The manifest is missing, edited, of another form or of another step.
        ForeignError: The manifest has the format of another version.
        DiskError: The disk cannot be read.
    """
    path = folder / MANIFEST
    if disk.status(path) is None:
        raise DamagedError(f"{MANIFEST} is missing")
    try:
        content = read_json(path)
    except JsonError as error:
        raise DamagedError(f"{MANIFEST}: {str(error).removeprefix(f'{path}: ')}") from error
    body = content.get("manifest")
    name = str(content.get("format"))
    if name not in _FIELDS:
        readable = ", ".join(_FIELDS)
        if re.fullmatch(r"mupax-checkpoint-\d{1,9}", name):
            raise ForeignError(
                f"checkpoint {folder} has the format {name}, and this version reads {readable}; "
                "nothing was "
                "changed: go on with the version that wrote it, or a newer one"
            )
        raise DamagedError(
            f"{MANIFEST} has format {disk.shown(name)}; this version reads {readable}"
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
    # A folder that is being saved or was set aside may have another name than the step.
    if folder.name.isdigit() and manifest.step != int(folder.name):
        raise DamagedError(f"{MANIFEST} is of step {manifest.step}")
    return manifest


def _digest_of(body: Mapping[str, Any]) -> str:
    # Sorted, because the order of keys is no part of what a manifest says.
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())


def _check_form(manifest: Manifest) -> None:
    """Refuse a manifest with impossible values.

    The digest is no signature, so a stranger's manifest may carry a right digest of anything: paths
    outside of the checkpoint, or shards outside of their arrays.

    Raises:
        TypeError, ValueError, AttributeError, KeyError: A value has another form.
    """
    has_objects = isinstance(manifest.data, dict) and isinstance(manifest.record, dict)
    if type(manifest.step) is not int or not has_objects or not manifest.files:
        raise ValueError("step, data, record or files")

    for path, (size, digest) in [*manifest.files.items(), *manifest.assets.items()]:
        parts = PurePosixPath(path)
        leads_outside = parts.is_absolute() or ".." in parts.parts
        if leads_outside or type(size) is not int or not isinstance(digest, str):
            raise ValueError(f"the file {path[:60]!a}")

    folder = f"{ASSETS}/"
    if not all(path.startswith(folder) for path in manifest.assets):
        raise ValueError(f"an asset outside {folder}")
    if manifest.assets and not any(path.endswith(f"/{ASSETS_RECORD}") for path in manifest.assets):
        raise ValueError(f"assets without {ASSETS_RECORD}")

    for name, entry in manifest.arrays.items():
        for index, _ in entry["shards"]:
            for size, (start, stop) in zip(entry["shape"], index, strict=True):
                if not 0 <= start <= stop <= size:
                    raise ValueError(f"the array {name[:60]!a}")


class Shard(NamedTuple):
    """One shard of an array, in host memory."""

    name: str
    index: tuple[tuple[int, int], ...]
    """Start and stop of the shard along each axis of its array."""
    data: np.ndarray


def by_name(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by the names they have on disk: keys joined by dots."""
    import jax

    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        leaves[jax.tree_util.keystr(path, simple=True, separator=".")] = leaf
    return leaves


def host_shards(arrays: Mapping[str, Any]) -> list[Shard]:
    """Return host copies of the shards that this process saves.

    Of several replicas of a shard only the first is saved, by the process that holds it.

    Args:
        arrays: Arrays on devices by their names on disk.
    """
    saved: list[tuple[str, Any]] = []
    for name, array in arrays.items():
        for shard in array.addressable_shards:
            if shard.replica_id == 0:
                saved.append((name, shard))
    # All copies begin at once. Orbax, which saves the same arrays next, finds them on the host.
    for _, shard in saved:
        shard.data.copy_to_host_async()
    shards: list[Shard] = []
    for name, shard in saved:
        index = _index(shard.index, arrays[name].shape)
        shards.append(Shard(name, index, np.asarray(shard.data)))
    return shards


def describe_arrays(
    arrays: Mapping[str, Any], shards: Sequence[Shard]
) -> dict[str, dict[str, Any]]:
    """Return shape, dtype and shards of each array by name, as a manifest lists them.

    All arrays are listed, but only shards of this process, each as its index and its digest.

    Args:
        arrays: All arrays of the state by their names on disk (`by_name`).
        shards: Shards that this process saves (`host_shards`).
    """
    entries: dict[str, dict[str, Any]] = {}
    for name, array in arrays.items():
        entries[name] = {"shape": list(array.shape), "dtype": str(array.dtype), "shards": []}
    digests = in_threads(array_digest, [shard.data for shard in shards])
    for shard, digest in zip(shards, digests, strict=True):
        index = [list(bounds) for bounds in shard.index]
        entries[shard.name]["shards"].append([index, digest])
    return entries


def array_digest(data: np.ndarray) -> str:
    """Return xxh3_128 of an array's bytes in C order, in hexadecimal."""
    # Viewed as uint8, because Python's buffer protocol cannot describe bfloat16.
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)


def check_loaded(arrays: Mapping[str, Any], saved: Mapping[str, dict[str, Any]]) -> list[str]:
    """Return the names of loaded arrays that are not as they were saved.

    The mesh may differ from that of the save. A saved shard is compared only if this process holds
    the whole array, or a loaded shard that covers the saved one.

    Args:
        arrays: Loaded arrays by their names on disk.
        saved: Arrays of the manifest, which have all of these names.
    """
    parts: list[np.ndarray] = []
    expected: list[tuple[str, str]] = []
    for name, array in arrays.items():
        for index, digest in saved[name]["shards"]:
            part = _part(array, index)
            if part is not None:
                parts.append(part)
                expected.append((name, digest))
    wrong: set[str] = set()
    digests = in_threads(array_digest, parts)
    for (name, saved_digest), digest in zip(expected, digests, strict=True):
        if digest != saved_digest:
            wrong.add(name)
    return sorted(wrong)


def _part(array: Any, index: Sequence[Sequence[int]]) -> np.ndarray | None:
    """Return the part of an array at `index`, copied to the host.

    Return `None` if this process holds neither the whole array nor all of the part in one shard.

    Args:
        index: Start and stop along each axis, as `Shard.index` has them.
    """
    if array.is_fully_addressable:
        return np.asarray(array)[tuple(slice(*bounds) for bounds in index)]
    for shard in array.addressable_shards:
        slices: list[slice] = []
        shard_index = _index(shard.index, array.shape)
        for (start, stop), (low, high) in zip(index, shard_index, strict=True):
            if low <= start and stop <= high:
                slices.append(slice(start - low, stop - low))
        if len(slices) == len(index):
            return np.asarray(shard.data)[tuple(slices)]
    return None


def _index(slices: Sequence[slice], shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return start and stop of slices of an array of this shape."""
    return tuple(bounds.indices(size)[:2] for bounds, size in zip(slices, shape, strict=True))


def in_threads(function: Callable[..., Any], *columns: Iterable[Any]) -> list[Any]:
    """Return `list(map(function, *columns))`, computed in eight threads.

    Hashing and reading files release Python's global lock, so such calls run in parallel.
    """
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(function, *columns))


class RenameCommit:
    """Operations on the folders of checkpoints, on a file system that can rename folders.

    A checkpoint is written as STEP.saving, and committed by renaming the folder to STEP. Process 0
    alone calls the methods that change something.

    Args:
        folder: Folder `WORKDIR/checkpoints`.
    """

    renames = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def context(self) -> Any:
        """Return the orbax context in which arrays are saved: uncompressed, and atomically."""
        from orbax.checkpoint import v1 as ocp

        # Uncompressed: weights hardly shrink, and compression would take CPU time from training.
        # Without replica-parallel saving, orbax writes replica 0 of each shard. That is the replica
        # of which `host_shards` takes the digest.
        saving = ocp.options.ArrayOptions.Saving(use_compression=False, use_replica_parallel=False)
        modes = ocp.options.AtomicityMode
        mode = modes.ATOMIC_RENAME if self.renames else modes.COMMIT_FILE
        return ocp.Context(
            array_options=ocp.options.ArrayOptions(saving=saving),
            atomicity_options=ocp.options.AtomicityOptions(mode=mode),
        )

    def written_at(self, step: int) -> Path:
        """Return the path of the folder that the arrays are written into: STEP.saving."""
        return self.folder / f"{step}{SAVING}"

    def begin(self, step: int) -> None:
        """Prepare a save of a step: delete what an earlier save has left at `written_at(step)`."""
        remove_tree(self.written_at(step))

    def abandon(self, step: int) -> None:
        """Delete what a failed save of a step has written, with the temporary folders of orbax."""
        # Orbax has a temporary folder with a longer name until its save has ended.
        for path in self.folder.glob(f"{step}{SAVING}*"):
            remove_tree(path)

    def publish(self, step: int) -> None:
        """Commit a checkpoint that has its manifest, by renaming STEP.saving to STEP."""
        self.written_at(step).replace(self.folder / str(step))
        # Without this a power cut may bring back the old name.
        disk.sync_folder(self.folder)

    def delete(self, step: int) -> None:
        """Delete a checkpoint. Its folder is renamed to STEP.deleting before files are deleted.

        Raises:
            OSError: The checkpoint, or a part of it, cannot be deleted.
        """
        # Renamed first: a half-deleted checkpoint under its own name would look damaged.
        doomed = self.folder / f"{step}{DELETING}"
        (self.folder / str(step)).replace(doomed)
        delete_tree(doomed)

    def half_deleted(self) -> list[int]:
        """Return the steps of checkpoints that were not deleted completely."""
        return _steps_with_ending(self.folder, DELETING)

    def delete_half(self, step: int) -> None:
        """Delete what is left of a checkpoint that was not deleted completely.

        Raises:
            OSError: A file cannot be deleted.
        """
        delete_tree(self.folder / f"{step}{DELETING}")

    def move(self, step: int, target: Path) -> None:
        """Move a checkpoint to `target`, outside of the folder, and flush the move to the disk.

        Args:
            target: Path of the checkpoint afterwards. Nothing is there yet.

        Raises:
            OSError: The checkpoint cannot be moved, and is still in the folder.
        """
        target.parent.mkdir(parents=True, exist_ok=True)
        (self.folder / str(step)).replace(target)
        # The new place first: a power cut between the two must not lose the checkpoint.
        disk.sync_folder(target.parent)
        disk.sync_folder(self.folder)

    def clear(self, name: str) -> None:
        """Delete the entry that an interrupted save or deletion has left, such as STEP.saving."""
        remove_tree(self.folder / name)

    def quarantine(self, step: int, problem: str) -> Path:
        """Quarantine a damaged checkpoint, so that it is no longer used: move it to set-aside/.

        Where folders cannot be renamed, it stays in place and gets a file damaged.json.

        Args:
            problem: Damage in one line. It is recorded only in damaged.json.

        Returns:
            New folder of the checkpoint, or the file damaged.json.

        Raises:
            OSError: The folder cannot be moved or marked.
        """
        quarantine = self.folder / QUARANTINE
        target = quarantine / str(step)
        number = 0
        while target.exists():  # an earlier checkpoint of this step was damaged, too
            number += 1
            target = quarantine / f"{step}.{number}"
        quarantine.mkdir(exist_ok=True)
        return (self.folder / str(step)).replace(target)

    def restore_quarantined(self, checkpoint: Path, step: int) -> None:
        """Undo `quarantine`: move the checkpoint back to STEP, or delete its damaged.json.

        Args:
            checkpoint: Folder of the checkpoint, as `quarantined` lists it.
            step: Step of the checkpoint. No other checkpoint of this step may exist.
        """
        if checkpoint.parent.name == QUARANTINE:
            checkpoint.replace(self.folder / str(step))
        else:
            (checkpoint / DAMAGED).unlink()


class MarkerCommit(RenameCommit):
    """Operations on checkpoint folders that cannot be renamed, as in a bucket.

    A checkpoint is committed by its manifest, which is written last.
    """

    renames = False

    def written_at(self, step: int) -> Path:
        return self.folder / str(step)

    def begin(self, step: int) -> None:
        remove_tree(self.written_at(step))  # such as a damaged checkpoint of the same step
        self.folder.mkdir(parents=True, exist_ok=True)
        self._marker(step).write_text("")

    def abandon(self, step: int) -> None:
        self.clear(self._marker(step).name)

    def publish(self, step: int) -> None:
        self._marker(step).unlink(missing_ok=True)

    def delete(self, step: int) -> None:
        # The marker first: without it, a kill would leave a folder that looks damaged.
        self._marker(step).write_text("")
        (self.folder / str(step) / MANIFEST).unlink(missing_ok=True)
        self.delete_half(step)

    def half_deleted(self) -> list[int]:
        steps = _steps_with_ending(self.folder, SAVING)
        return [step for step in steps if disk.status(self.folder / str(step) / MANIFEST) is None]

    def delete_half(self, step: int) -> None:
        delete_tree(self.folder / str(step))
        # The marker last: it says that the folder is half deleted.
        delete_tree(self._marker(step))

    def move(self, step: int, target: Path) -> None:
        source = self.folder / str(step)
        for name in disk.names(source):
            if name != MANIFEST:
                copy(source / name, target / name)
        # The manifest last: it makes the target a checkpoint.
        copy(source / MANIFEST, target / MANIFEST)
        self.delete(step)

    def clear(self, name: str) -> None:
        # With its manifest the checkpoint is complete, and only the marker was left.
        checkpoint = self.folder / name.partition(".")[0]
        if disk.status(checkpoint / MANIFEST) is None:
            remove_tree(checkpoint)
        remove_tree(self.folder / name)

    def quarantine(self, step: int, problem: str) -> Path:
        mark = self.folder / str(step) / DAMAGED
        disk.write_whole(mark, json.dumps({"step": step, "problem": problem}) + "\n")
        return mark

    def _marker(self, step: int) -> Path:
        """Return the path of STEP.saving, an empty file that exists during a save or deletion."""
        return self.folder / f"{step}{SAVING}"


def _steps_with_ending(folder: Path, ending: str) -> list[int]:
    """Return the steps of a folder's entries whose name is a step plus `ending`, as 500.saving."""
    steps: list[int] = []
    for name in disk.names(folder):
        step = name.removesuffix(ending)
        if name.endswith(ending) and step.isdigit():
            steps.append(int(step))
    return steps


def counts(checkpoint: Path) -> bool:
    """Return whether a folder is a checkpoint in use: with a manifest, and not quarantined.

    The manifest is not read.
    """
    return disk.status(checkpoint / MANIFEST) is not None and not is_quarantined(checkpoint)


def is_quarantined(checkpoint: Path) -> bool:
    """Return whether a checkpoint is quarantined: it is in set-aside/ or has a damaged.json."""
    is_moved = checkpoint.parent.name == QUARANTINE
    return is_moved or disk.status(checkpoint / DAMAGED) is not None


def is_being_saved(checkpoint: Path) -> bool:
    """Return whether a file STEP.saving exists beside a checkpoint that has no manifest.

    If folders cannot be renamed, such a checkpoint is being written or deleted, or a kill left it.
    """
    marker = checkpoint.with_name(f"{checkpoint.name}{SAVING}")
    return disk.status(marker) is not None and disk.status(checkpoint / MANIFEST) is None


def quarantined(folder: Path) -> list[Path]:
    """Return the quarantined checkpoints: all entries of set-aside/, then those marked in place.

    Args:
        folder: Folder `WORKDIR/checkpoints`.
    """
    marked: list[Path] = []
    for name in disk.names(folder):
        if name.isdigit() and is_quarantined(folder / name):
            marked.append(folder / name)
    moved = [folder / QUARANTINE / name for name in disk.names(folder / QUARANTINE)]
    return moved + marked


def renames_folders(path: Path) -> bool:
    """Return whether folders can be renamed in `path`, by renaming a small test folder there.

    Make `path` if it is missing. The result is False in a bucket and in some mounted buckets. It is
    True if the test fails by an error that may pass, such as a full disk (`_TEMPORARY_ERRORS`).
    """
    if is_remote(path):
        return False
    try:
        path.mkdir(parents=True, exist_ok=True)
        _remove_probes(path)
        (path / _OLD).mkdir()
        # A checkpoint holds files, so the test is whether a file in the folder moves with it.
        (path / _OLD / DAMAGED).touch()
        (path / _OLD).replace(path / _NEW)
        return (path / _NEW / DAMAGED).is_file()
    except OSError as error:
        return error.errno in _TEMPORARY_ERRORS
    finally:
        _remove_probes(path)


def _remove_probes(path: Path) -> None:
    for name in PROBES:
        folder = path / name
        with contextlib.suppress(OSError):
            (folder / DAMAGED).unlink(missing_ok=True)
            folder.rmdir()


def locks_files(file: Path) -> bool:
    """Return whether a file can be locked (flock), by locking it and releasing the lock.

    Make the file if it is missing. True also if another process has locked it. Files cannot be
    locked in a bucket, mounted or not, nor on some network file systems.
    """
    if is_remote(file):
        return False
    with file.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True  # another process has locked it
        except OSError:
            return False
    return True


def missing_capabilities(path: Path, file: Path) -> list[str]:
    """Return a line for each of two abilities that a file system lacks: renames and file locks.

    Each line also says what the run does instead. For a bucket the list is empty.

    Args:
        path: Folder, in which a probe is made and removed.
        file: File in the folder that a run locks; made if missing.
    """
    if is_remote(path):
        return []
    lines: list[str] = []
    if not renames_folders(path):
        lines.append("renaming folders (a checkpoint is written where it stays)")
    if not locks_files(file):
        lines.append(
            "file locks (an owner file keeps other runs out, unless they start in the same second)"
        )
    return lines
