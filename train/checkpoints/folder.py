"""Folder of a run's checkpoints: list, verify, publish, delete and quarantine them.

`Checkpoints` saves and restores by these functions. The commands that read a run use them, too.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from mupax import MupaxError, MupaxFailure, disk
from mupax.disk import plainly_named, remove_tree, storage_url, without_stand_ins
from mupax.train.checkpoints import layout
from mupax.train.checkpoints.layout import (
    DamagedError,
    ForeignError,
    Manifest,
    MarkerCommit,
    RenameCommit,
    counts,
    is_quarantined,
    quarantined,
)
from mupax.train.config import sections
from mupax.train.config.sections import CheckpointConfig, Measured

_ENDING_S = 5.0
"""Longest time, in seconds, to wait for the threads of a failed save to end.

A thread that still writes after the failed save is deleted would make its files again."""
_STATE = "state"
"""Folder of the arrays inside a checkpoint."""

CHECKPOINTS = "checkpoints"
"""Folder of a workdir that holds the checkpoints."""
_AGAIN_S = 0.2
"""Seconds until a file that looks damaged is read again."""
# Bytes that are read and hashed at a time. One MiB stays in a core's cache; with 16 MiB at a time
# reading and hashing take five times as long.
_BLOCK = 2**20


def quiet() -> None:
    """Silence log messages and warnings of orbax and tensorstore in this process.

    Orbax logs every save, and a failure with a traceback of each of its threads. Tensorstore warns
    about event loops that have ended.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", "coroutine '.*' was never awaited", RuntimeWarning)
    # Install the hook once per process. Every run in the process calls `quiet`.
    if getattr(sys.unraisablehook, "func", None) is not _unraisable:
        sys.unraisablehook = partial(_unraisable, sys.unraisablehook)


def _unraisable(previous_hook: Callable[[Any], Any], unraisable: Any) -> None:
    """Pass an unraisable error to the previous hook, unless its message is known to be harmless.

    `quiet` installs this function as `sys.unraisablehook`.
    """
    known_messages = ("Event loop is closed", "Encountered error while reading array")
    if not str(unraisable.exc_value).startswith(known_messages):
        previous_hook(unraisable)


def end_threads() -> None:
    """End orbax' threads after a failed save, and wait up to 5 seconds for them.

    Orbax lets them wait for minutes for files that will not come. The interpreter joins these
    threads at its end, so the process would hang after its error message. No other save may run in
    this process meanwhile.
    """
    from orbax.checkpoint._src.futures import future

    # No public interface reaches the threads of a `save_async` that has raised.
    threads = []
    for thread in threading.enumerate():
        if isinstance(thread, future._SignalingThread):
            threads.append(thread)
    for thread in threads:
        thread.cancel()
        future.set_signals(thread._receive_signals, operation_id=thread._operation_id)
    deadline = time.monotonic() + _ENDING_S
    for thread in threads:
        # Not `thread.join`: orbax' class overrides it to raise the error of the thread.
        threading.Thread.join(thread, max(0.0, deadline - time.monotonic()))


def loaded(checkpoint: Path, abstract: Any) -> Any:
    """Load the arrays of a checkpoint with orbax, into the shardings of `abstract`.

    If a run has several processes, all of them must call this together.

    Args:
        checkpoint: Folder of a checkpoint whose files are verified.
        abstract: Tree of shapes, dtypes and shardings that fits the checkpoint.

    Raises:
        OSError: The disk cannot read the arrays. Orbax would report that there is no checkpoint.
    """
    from orbax.checkpoint import v1 as ocp

    try:
        with plainly_named(checkpoint) as name:
            return ocp.load(name, abstract)
    except Exception as error:
        # If orbax cannot read a file, it raises a ValueError, an OSError or a plain `Exception`. An
        # error of any other class has another cause.
        is_from_orbax = isinstance(error, ValueError | OSError) or type(error) is Exception
        if not is_from_orbax:
            raise
        text = without_stand_ins(str(error)).splitlines()[0][:200]
        raise disk.system_error(error) or OSError(errno.EIO, text) from error


def metadata(checkpoint: Path) -> Any:
    """Return the tree of shapes and dtypes of a checkpoint's arrays, read by orbax."""
    from orbax.checkpoint import v1 as ocp

    with plainly_named(checkpoint) as name:
        return ocp.metadata(name).metadata


def reason(error: Exception, folder: Path) -> str:
    """Return why a save failed, in one line of at most 300 characters.

    Args:
        error: Error of the save. Orbax' messages have hundreds of lines, of which one is kept.
        folder: Folder of the checkpoints, which is cut out of paths in the message.
    """
    cause = disk.system_error(error)
    if cause is not None:
        text = str(cause.strerror)
    elif isinstance(error, MupaxFailure):
        text = str(error)
    else:
        text = f"{type(error).__name__}: {error}"
    return without_stand_ins(text).replace(f"{folder}/", "").splitlines()[0][:300]


def damaged_arrays(folder: Path, arrays: Mapping[str, dict[str, Any]]) -> list[str]:
    """Return the names of arrays whose files hold other values than were saved.

    The files are read without a model and without devices. An array counts as damaged only if it
    also differs in a second read.

    Args:
        folder: Folder of one checkpoint, such as `checkpoints/500`.
        arrays: Arrays as the manifest lists them (`describe_arrays`).

    Raises:
        DiskError: The disk cannot be read.
    """
    with plainly_named(folder) as name:
        return _damaged_arrays(folder, storage_url(f"{name}/{_STATE}/"), arrays)


def _damaged_arrays(folder: Path, base: str, arrays: Mapping[str, dict[str, Any]]) -> list[str]:
    """Return the names of arrays whose files at the URL `base` hold other values than were saved.

    An array counts as damaged only if it also differs in a second read.

    Args:
        folder: Folder of the checkpoint, which only messages name.
        arrays: Arrays as the manifest lists them (`describe_arrays`).

    Raises:
        DiskError: The disk cannot be read.
    """
    import tensorstore as ts

    patience = disk.Patience()

    def is_as_saved(name: str, context: ts.Context) -> bool:
        entry = arrays[name]
        spec = {"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"}}
        try:
            stored = ts.open(spec, open=True, context=context).result()
            if list(stored.shape) != entry["shape"]:
                return False
            for index, digest in entry["shards"]:
                slices = tuple(slice(*axis) for axis in index)
                if layout.array_digest(stored[slices].read().result()) != digest:
                    return False
            return True
        except Exception as error:
            # Tensorstore raises errors of many types for damaged files. An error of the disk itself
            # is no damage, and `patience` tries again.
            if isinstance(disk.system_error(error), (*disk.ABSENT, type(None))):
                return False
            raise

    def patiently(name: str, context: ts.Context) -> bool:
        return patience(lambda: is_as_saved(name, context), folder)

    suspects = list(arrays)
    for _ in range(2):
        context = ts.Context()  # a new cache, so that the second read asks the disk again
        good = layout.in_threads(patiently, suspects, [context] * len(suspects))
        suspects = [name for name, ok in zip(suspects, good, strict=True) if not ok]
    return suspects


def check_storage(folder: Path, name: str) -> None:
    """Write a small array into a folder and read it back, with the libraries that save checkpoints.

    Args:
        name: Name of a subfolder that is made for the array and deleted at the end.

    Raises:
        OSError: The array that is read differs, or its files are not in the folder.
        Exception: Any error of tensorstore.
    """
    import numpy as np
    import tensorstore as ts

    probe = folder / name
    remove_tree(probe)
    try:
        with plainly_named(probe) as plain_name:
            kvstore = {"driver": "ocdbt", "base": storage_url(f"{plain_name}/"), "path": "array/"}
            spec = {"driver": "zarr3", "kvstore": kvstore}
            new = {**spec, "metadata": {"shape": [8], "data_type": "uint8"}}
            content = np.arange(8, dtype=np.uint8)
            array = ts.open(new, create=True).result()
            array.write(content).result()
            # A new context has its own cache, so that tensorstore has to read the files again.
            reopened = ts.open(spec, open=True, context=ts.Context()).result()
            stored = reopened.read().result()
        if not np.array_equal(stored, content) or "manifest.ocdbt" not in disk.names(probe):
            raise OSError(errno.EIO, "what was written is not what is read")
    finally:
        remove_tree(probe)


class WorkdirError(MupaxError):
    """Folder that a run must not write into, or run that cannot go on. The text says what to do."""


class CheckpointFolder:
    """Folder WORKDIR/checkpoints with its checkpoints by step.

    Process 0 alone changes the folder.

    Args:
        config: Settings that say which checkpoints are kept. A `keep_every` of an earlier part of
            the run, in config.json, still keeps the checkpoints which that part saved.
        log: Function that prints a line for the user.
        renames: Whether folders can be renamed on this file system (`layout.py`).

    Attributes:
        folder: Folder `WORKDIR/checkpoints`.
        layout: Operations on the folders of checkpoints (`layout.py`).
    """

    def __init__(
        self,
        workdir: Path,
        config: CheckpointConfig,
        log: Callable[[str], None],
        renames: bool = True,
    ) -> None:
        self.folder = workdir / CHECKPOINTS
        self._config = config
        self._log = log
        self.layout = RenameCommit(self.folder) if renames else MarkerCommit(self.folder)
        self._restored: set[Path] = set()
        """Folders that were once restored from quarantine."""
        self._undeleted: dict[int, str] = {}
        """Steps of checkpoints that could not be deleted, with the reasons."""
        self.record: dict[str, Any] = {}
        """Content of config.json, which goes into manifests."""
        self.assets: dict[str, list[Any]] = {}
        """Size and digest of the run's assets (`assets.write`), which go into manifests."""

    @property
    def latest(self) -> int | None:
        """Step of the newest checkpoint on disk, or `None` if there is none."""
        return max(steps(self.folder), default=None)

    def publish(self, manifest: Manifest) -> None:
        """Commit a checkpoint whose arrays are written, and delete those that need not be kept.

        The manifest is written before the checkpoint gets its name, and older checkpoints are
        deleted last, so that a kill at any time leaves a complete checkpoint. If a folder STEP is
        there already, and folders can be renamed, it is quarantined.

        Raises:
            DiskError, OSError: The checkpoint cannot be committed.
        """
        layout.write(self.layout.written_at(manifest.step), manifest)
        # The folder may exist, for example because somebody copied it here. A rename cannot replace
        # a folder that is not empty.
        if self.layout.renames and (self.folder / str(manifest.step)).exists():
            self.quarantine(manifest.step, "another was saved")
        self.layout.publish(manifest.step)
        self.prune()  # raises nothing: the new checkpoint is good whatever happens to an older one

    def prune(self) -> None:
        """Delete the checkpoints that no setting keeps, and the remains of half-deleted ones.

        If a checkpoint cannot be deleted, a line is printed and the next save tries again. No error
        is raised if the disk fails.
        """
        failed: dict[int, str] = {}
        try:
            for step in self.leaving():
                try:
                    self.layout.delete(step)
                except (OSError, disk.DiskError) as error:
                    failed[step] = reason(error, self.folder)
            for step in self.layout.half_deleted():
                if step in failed:
                    continue
                try:
                    self.layout.delete_half(step)
                except (OSError, disk.DiskError) as error:
                    failed[step] = reason(error, self.folder)
        except (OSError, disk.DiskError) as error:
            self._log(f"no checkpoint is deleted for now: {reason(error, self.folder)}")
            return
        for step, cause in failed.items():
            # Once for each reason, not at every save.
            if self._undeleted.get(step) != cause:
                self._log(
                    f"caution: the older checkpoint {self.folder / str(step)} cannot be deleted: "
                    f"{cause}; newer ones are saved all the same, and deleting it is tried again "
                    "at every save"
                )
        self._undeleted = failed

    def leaving(self, record: Mapping[str, Any] | None = None) -> list[int]:
        """Return the steps of the checkpoints that no setting keeps, oldest first.

        `prune` deletes these checkpoints.

        Args:
            record: Content of config.json, whose `segments` have the settings of the run's parts
                before a resume. By default the record of this run.
        """
        saved = steps(self.folder)
        parts = sections.run_parts(self.record if record is None else record, self._config)
        staying = sections.staying(saved, self.measured(saved), parts)
        return [step for step in saved if step not in staying]

    def measured(self, saved: list[int]) -> Measured:
        """Return the evaluation metrics that the checkpoints of these steps hold, by step.

        Empty in this class, whose checkpoints hold none. `RankedFolder` reads them.
        """
        return {}

    def quarantine(self, step: int, problem: str) -> None:
        """Quarantine a damaged checkpoint, and print a line that says which one is used instead.

        The checkpoint is moved to set-aside/, or marked where folders cannot be renamed.

        Args:
            problem: Damage in one line, which is printed.

        Raises:
            DiskError: The checkpoint can neither be moved nor marked. The text names the damage and
                the checkpoint before it.
        """
        try:
            mark = self.layout.quarantine(step, problem).relative_to(self.folder.parent)
        except (OSError, disk.DiskError) as error:
            # A failure, after which `--restart` tries again, and no bad input as a WorkdirError is.
            remaining_steps = [saved for saved in steps(self.folder) if saved != step]
            advice = "see to the disk, then write the same command again"
            if remaining_steps:
                advice += f", which goes back to checkpoint {remaining_steps[-1]}"
            raise disk.DiskError(
                f"checkpoint {step} is damaged ({problem}) and cannot be set aside: "
                f"{reason(error, self.folder)}; {advice}"
            ) from error
        latest = self.latest
        fallback = "no other is left"
        if latest is not None:
            fallback = f"going back to checkpoint {latest}"
        self._log(f"checkpoint {step} is damaged: {problem}; set aside as {mark}, {fallback}")

    def tidy(self) -> None:
        """Delete what interrupted saves left, and quarantine folders without a manifest.

        If no checkpoint is left then, restore the good ones among those in quarantine.

        Raises:
            WorkdirError: There are checkpoints, and all are damaged.
            DiskError: The disk cannot be read, or a folder cannot be quarantined.
        """
        if not self.folder.is_dir():
            return
        names = disk.names(self.folder)
        for name in names:
            if name.partition(".")[0].isdigit() and "." in name:
                self.layout.clear(name)
        for name in names:
            path = self.folder / name
            # `clear` may have deleted the folder.
            if not name.isdigit() or not disk.status(path):
                continue
            if disk.status(path / layout.MANIFEST) is None and not is_quarantined(path):
                self.quarantine(int(name), f"{layout.MANIFEST} is missing")
        if self.newest() is None and quarantined(self.folder):
            raise self.none_good()

    def newest(self) -> int | None:
        """Return the step of the newest checkpoint, or `None` if there is no good one.

        If no checkpoint is left outside of quarantine, those in quarantine are verified again. The
        good ones are restored, each at most once, with a printed line: a disk that fails for a
        while makes good checkpoints look damaged.
        """
        if self.latest is not None:
            return self.latest
        for path in quarantined(self.folder):
            name = path.name.partition(".")[0]
            if not name.isdigit() or path in self._restored:
                continue
            step = int(name)
            is_moved = path != self.folder / name
            if is_moved and disk.status(self.folder / name) is not None:
                continue
            try:
                is_good = verified(path).step == step
            except (DamagedError, ForeignError):
                continue
            if is_good:
                shown = path.relative_to(self.folder)
                self.layout.restore_quarantined(path, step)
                # Restore each checkpoint once. One that passes `verified` but cannot be loaded is
                # quarantined again, and would otherwise be restored and tried without end.
                self._restored.add(path)
                self._log(f"checkpoint {step}, set aside as {shown}, is whole: taken back")
        return self.latest

    def none_good(self) -> WorkdirError:
        """Return the error for a run whose checkpoints are all damaged. It lists the quarantine."""
        names = ", ".join(path.name for path in quarantined(self.folder))
        return WorkdirError(
            f"no good checkpoint is left in {self.folder}; those set aside ({names}) were read "
            "again and are damaged. Nothing was "
            "overwritten: put a copy of a good one there, or start again with another --workdir"
        )


def steps(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder, oldest first.

    A checkpoint has a manifest and is not quarantined as damaged.
    """
    candidates = []
    for name in disk.names(folder):
        # Leave out a name such as 007: `str` of its step, 7, names another folder.
        if name.isascii() and name.isdigit() and str(int(name)) == name:
            candidates.append(int(name))
    return sorted(step for step in candidates if counts(folder / str(step)))


def wrong_entry(record: Mapping[str, Any]) -> str | None:
    """Return the name of the first entry of a run's config.json with a wrong type, or `None`.

    The entry `config` is required. Other entries may be missing, as in older versions. Values
    inside of `config` are not checked.

    Args:
        record: Content of config.json, or its copy in a manifest. It is not trusted.
    """
    if not isinstance(record.get("config"), dict):
        return "config"
    if not isinstance(record.get("run", ""), str):
        return "run"
    if not isinstance(record.get("segments", []), list):
        return "segments"
    for name in ("data", "versions", "xla"):
        if not isinstance(record.get(name), dict | None):
            return name
    return None


def newest_record(folder: Path) -> dict[str, Any]:
    """Return the copy of a run's config.json in the newest manifest that has a valid one.

    Args:
        folder: Folder `WORKDIR/checkpoints`.

    Returns:
        Content of config.json, or an empty dictionary if no readable manifest holds a valid copy.
    """
    for step in reversed(steps(folder)):
        try:
            record = layout.read(folder / str(step)).record
        except (DamagedError, ForeignError):
            continue
        if record and wrong_entry(record) is None:
            return record
    return {}


def file_digests(checkpoint: Path, process: int, count: int) -> dict[str, list[Any]]:
    """Return size in bytes and digest of the files that one process wrote.

    Args:
        checkpoint: Folder of the checkpoint, with the arrays of all processes in it.
        process: Number of the process, from 0. Process 0 also gets the files that are in no
            process' folder.
        count: Number of processes that have saved the checkpoint together.

    Returns:
        Size and digest by the file's path inside the checkpoint.
    """
    writers = {f"ocdbt.process_{index}": index for index in range(count)}
    names = []
    for path in sorted(checkpoint.rglob("*")):
        if not path.is_file():
            continue
        relative = path.relative_to(checkpoint)
        process_folders = [part for part in relative.parts if part in writers]
        writer = writers[process_folders[0]] if process_folders else 0
        if writer == process:
            names.append(str(relative))
    digests = layout.in_threads(_file_digest, [checkpoint / name for name in names])
    return dict(zip(names, digests, strict=True))


def _file_digest(path: Path) -> list[Any]:
    """Return a file's size in bytes and its digest."""
    hasher = xxhash.xxh3_128()
    size = 0
    with path.open("rb") as file:
        # Drop the file from the page cache, so that the disk is read and not the written pages.
        # `posix_fadvise` is missing on macOS, and fails for a file in a bucket.
        with contextlib.suppress(AttributeError, OSError):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while block := file.read(_BLOCK):
            hasher.update(block)
            size += len(block)
    return [size, hasher.hexdigest()]


def file_problems(
    checkpoint: Path,
    manifest: Manifest,
    share: tuple[int, int] = (0, 1),
    *,
    read_contents: bool = True,
) -> list[str]:
    """Return what is wrong with the files of a checkpoint, one line per damaged file.

    A file counts as damaged only if it also differs from the manifest in a second read.

    Args:
        share: Index and count: every count-th file is read, from that index on. By default all.
        read_contents: Compare sizes and digests. False compares sizes alone.

    Raises:
        DiskError: The disk cannot be read.
    """
    patience = disk.Patience()

    def compare(name: str) -> str | None:
        path = checkpoint / name
        size, digest = manifest.files[name]
        try:
            # Not `stat`, because a link could lead to a file outside of the checkpoint.
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode):
                return f"{name} is missing"
            if status.st_size != size:
                return f"{name} has {status.st_size} bytes, not {size}"
            if read_contents and _file_digest(path) != [size, digest]:
                return f"{name} has other contents than were written"
        except disk.ABSENT:
            return f"{name} is missing"
        return None

    def find_problem(name: str) -> str | None:
        if patience(lambda: compare(name), checkpoint / name) is None:
            return None
        time.sleep(_AGAIN_S)
        return patience(lambda: compare(name), checkpoint / name)

    index, count = share
    names = list(manifest.files)[index::count]
    return [line for line in layout.in_threads(find_problem, names) if line]


def verified(checkpoint: Path, run: str | None = None) -> Manifest:
    """Read the manifest of a checkpoint, and compare all of its files with the manifest.

    Args:
        run: Name of the run that the checkpoint must be of; by default any.

    Raises:
        DamagedError: The manifest or a file is not as it was written. The text names the first
            files, and the arrays that cannot be read from them.
        ForeignError: The checkpoint is of another run, or of a newer version.
        DiskError: The disk cannot be read.
    """
    manifest = layout.read(checkpoint, run)
    problems = file_problems(checkpoint, manifest)
    if problems:
        raise DamagedError(describe_damage(checkpoint, manifest, problems))
    return manifest


def describe_damage(checkpoint: Path, manifest: Manifest, problems: list[str]) -> str:
    """Return a line for an error: the first damaged files, and the first arrays that they spoil.

    Args:
        problems: Lines of `file_problems` for this checkpoint.
    """
    arrays = damaged_arrays(checkpoint, manifest.arrays)
    text = first_of(problems)
    if arrays:
        text += f", which spoils {first_of(arrays)}"
    return text


def first_of(problems: list[str], between: str = ", ") -> str:
    """Join the first three of some lines or names, and add how many more there are.

    Args:
        between: Text between two of the lines; a comma and a space by default.
    """
    text = between.join(problems[:3])
    if len(problems) > 3:
        text += f"{between}and {len(problems) - 3} more"
    return text
