"""The folder of a run's checkpoints: which there are, whether their files are whole, how one comes to count, is deleted or set aside.

What saving or loading failed of is said in a line. Orbax says it in hundreds: each of its threads with a traceback of its own.
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

from mupax import disk
from mupax.disk import plainly_named, remove_tree, storage_url, without_stand_ins
from mupax.errors import MupaxError, MupaxFailure
from mupax.train.checkpoints import layout
from mupax.train.checkpoints.layout import (
    DamagedError,
    ForeignError,
    Manifest,
    MarkerCommit,
    RenameCommit,
    aside,
    counts,
    is_aside,
)
from mupax.train.config import sections
from mupax.train.config.sections import CheckpointConfig, Measured

_ENDING_S = 5.0
"""How long threads of a failed save may take to end: what they still write would come back after it is deleted."""
_STATE = "state"  # folder of the arrays inside a checkpoint

CHECKPOINTS = "checkpoints"
_AGAIN_S = 0.2  # until a file that looks damaged is read again
_BLOCK = (
    2**20
)  # stays in a core's cache: reading and hashing 16 MiB at a time takes five times as long


def quiet() -> None:
    """Keep from the terminal what orbax tells of every save and failure, and tensorstore to an event loop that has ended."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", "coroutine '.*' was never awaited", RuntimeWarning)
    if getattr(sys.unraisablehook, "func", None) is not _unraisable:
        sys.unraisablehook = partial(_unraisable, sys.unraisablehook)


def _unraisable(before: Callable[[Any], Any], what: Any) -> None:
    if not str(what.exc_value).startswith(
        ("Event loop is closed", "Encountered error while reading array")
    ):
        before(what)


def end_threads() -> None:
    """End the threads of a save that has failed. Orbax lets them wait for minutes for files that will not come.

    The interpreter joins these threads at its end, so that a process would hang which has said why it failed. Nobody else
    may save meanwhile.
    """
    from orbax.checkpoint._src.futures import future

    # No public interface reaches the threads of a `save_async` that has raised.
    threads = [
        thread for thread in threading.enumerate() if isinstance(thread, future._SignalingThread)
    ]
    for thread in threads:
        thread.cancel()
        future.set_signals(thread._receive_signals, operation_id=thread._operation_id)
    until = time.monotonic() + _ENDING_S
    for thread in threads:
        # Its own `join` raises what the thread has failed of.
        threading.Thread.join(thread, max(0.0, until - time.monotonic()))


def loaded(checkpoint: Path, abstract: Any) -> Any:
    """The arrays of a checkpoint whose files are verified, by orbax.

    Args:
        checkpoint: its folder.
        abstract: what to load, which fits.

    Raises:
        OSError: the disk cannot read it. Orbax says then that there is no checkpoint, or another one.
    """
    from orbax.checkpoint import v1 as ocp

    try:
        with plainly_named(checkpoint) as name:
            return ocp.load(name, abstract)
    except Exception as error:
        if (
            not isinstance(error, ValueError | OSError) and type(error) is not Exception
        ):  # which is what orbax raises
            raise
        text = without_stand_ins(str(error)).splitlines()[0][:200]
        raise disk.system_error(error) or OSError(errno.EIO, text) from error


def metadata(checkpoint: Path) -> Any:
    """Return the arrays of a checkpoint without their values: a tree of shapes and types, by orbax."""
    from orbax.checkpoint import v1 as ocp

    with plainly_named(checkpoint) as name:
        return ocp.metadata(name).metadata


def reason(error: Exception, folder: Path) -> str:
    """Why a save failed, in a line.

    Args:
        error: of it.
        folder: of the checkpoints, whose paths may be longer than what happened.
    """
    cause = disk.system_error(error)
    text = f"{type(error).__name__}: {error}"
    if cause is not None or isinstance(error, MupaxFailure):
        text = str(cause.strerror if cause else error)
    return without_stand_ins(text).replace(f"{folder}/", "").splitlines()[0][:300]


def damaged_arrays(folder: Path, arrays: Mapping[str, dict[str, Any]]) -> list[str]:
    """Names of the arrays whose files hold something else at two reads, made without a model or devices.

    Args:
        folder: of the checkpoint.
        arrays: as its manifest has them (`describe_arrays`).

    Raises:
        DiskError: the disk cannot read them.
    """
    with plainly_named(folder) as name:
        return _damaged_arrays(folder, storage_url(f"{name}/{_STATE}/"), arrays)


def _damaged_arrays(folder: Path, base: str, arrays: Mapping[str, dict[str, Any]]) -> list[str]:
    """Do what `damaged_arrays` does, by the URL of the arrays."""
    import tensorstore as ts

    patience = disk.Patience()

    def same(name: str, entry: Mapping[str, Any], context: Any) -> bool:
        spec = {"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"}}
        try:
            stored = ts.open(spec, open=True, context=context).result()
            return list(stored.shape) == entry["shape"] and all(
                layout.array_digest(stored[tuple(slice(*axis) for axis in index)].read().result())
                == digest
                for index, digest in entry["shards"]
            )
        except Exception as error:  # whatever the library makes of damage
            if isinstance(disk.system_error(error), (*disk.ABSENT, type(None))):
                return False
            raise

    wrong = list(arrays)
    for context in (ts.Context(), ts.Context()):  # each with a cache of its own
        look = partial(same, context=context)
        good = layout.in_threads(
            lambda name, look=look: patience(lambda: look(name, arrays[name]), folder), wrong
        )
        wrong = [name for name, ok in zip(wrong, good, strict=True) if not ok]
    return wrong


def check_storage(folder: Path, name: str) -> None:
    """Write an array into a folder and read it back, by the libraries that save checkpoints there.

    Args:
        folder: exists.
        name: of what is written in it, and deleted again.

    Raises:
        OSError: something else is read than was written, or nothing is where it should be.
        Exception: whatever tensorstore raises.
    """
    import numpy as np
    import tensorstore as ts

    probe = folder / name
    remove_tree(probe)
    try:
        with plainly_named(probe) as named:
            kvstore = {"driver": "ocdbt", "base": storage_url(f"{named}/"), "path": "array/"}
            spec = {"driver": "zarr3", "kvstore": kvstore}
            content = np.arange(8, dtype=np.uint8)
            array = ts.open(
                {**spec, "metadata": {"shape": [8], "data_type": "uint8"}}, create=True
            ).result()
            array.write(content).result()
            again = ts.open(spec, open=True, context=ts.Context()).result().read().result()
        if not np.array_equal(again, content) or "manifest.ocdbt" not in disk.names(probe):
            raise OSError(errno.EIO, "what was written is not what is read")
    finally:
        remove_tree(probe)


class WorkdirError(MupaxError):
    """A folder this run must not write into, or a run it cannot continue. The text says what to write instead."""


class CheckpointFolder:
    """Checkpoints on disk by their steps. Process 0 alone changes what is in it.

    Args:
        workdir: folder of the run.
        config: which checkpoints stay.
        note: prints what was found damaged and what was done about it.
        renames: whether folders can be renamed there (`layout.py`).
    """

    def __init__(
        self,
        workdir: Path,
        config: CheckpointConfig,
        note: Callable[[str], None],
        renames: bool = True,
    ) -> None:
        self.folder = workdir / CHECKPOINTS
        self._config = config
        self._note = note
        self.layout = RenameCommit(self.folder) if renames else MarkerCommit(self.folder)
        self._taken_back: set[Path] = set()
        self._undeleted: dict[int, str] = {}
        self.record: dict[str, Any] = {}
        """What config.json holds: goes into manifests."""
        self.assets: dict[str, list[Any]] = {}
        """The run's assets with size and digest (`assets.write`): goes into manifests."""

    @property
    def latest(self) -> int | None:
        """Step of the newest checkpoint."""
        return max(steps(self.folder), default=None)

    def publish(self, content: Manifest) -> None:
        """Let a checkpoint whose arrays are written count, by its manifest, and only then delete those that do not stay."""
        layout.write(self.layout.written_at(content.step), content)
        # One without a manifest, copied here by somebody.
        if self.layout.renames and (self.folder / str(content.step)).exists():
            self.set_aside(content.step, "another was saved")
        self.layout.publish(content.step)
        self.prune()  # raises nothing: the new checkpoint is whole whatever becomes of an older one

    def prune(self) -> None:
        """Delete the checkpoints that do not stay. One that cannot be deleted is noted, and tried again at the next save."""
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
            self._note(f"no checkpoint is deleted for now: {reason(error, self.folder)}")
            return
        for step, cause in failed.items():
            if self._undeleted.get(step) != cause:
                self._note(
                    f"caution: the older checkpoint {self.folder / str(step)} cannot be deleted: {cause}; newer ones "
                    "are saved all the same, and deleting it is tried again at every save"
                )
        self._undeleted = failed

    def leaving(self, record: Mapping[str, Any] | None = None) -> list[int]:
        """Return the steps of the checkpoints that do not stay, oldest first.

        Args:
            record: content of config.json to decide by; the present one unless given.
        """
        saved = steps(self.folder)
        parts = sections.run_parts(self.record if record is None else record, self._config)
        stay = sections.staying(saved, self.measured(saved), parts)
        return [step for step in saved if step not in stay]

    def measured(self, saved: list[int]) -> Measured:
        """Return the evaluations that checkpoints hold."""
        return {}

    def set_aside(self, step: int, problem: str) -> None:
        """Put a damaged checkpoint out of the way, and say so.

        Args:
            step: of the checkpoint.
            problem: what is wrong with it.

        Raises:
            WorkdirError: it cannot be moved.
        """
        try:
            mark = self.layout.set_aside(step, problem).relative_to(self.folder.parent)
        except OSError as error:
            raise WorkdirError(
                f"checkpoint {step} is damaged ({problem}) and cannot be moved: {error.strerror}"
            ) from error
        then = (
            "no other is left" if self.latest is None else f"going back to checkpoint {self.latest}"
        )
        self._note(f"checkpoint {step} is damaged: {problem}; set aside as {mark}, {then}")

    def tidy(self) -> None:
        """Remove what interrupted saves left, set aside what has no manifest."""
        if not self.folder.is_dir():
            return
        names = disk.names(self.folder)
        for name in names:
            if name.partition(".")[0].isdigit() and "." in name:
                self.layout.clear(name)
        for name in names:
            path = self.folder / name
            if (
                name.isdigit()
                and disk.status(path)
                and disk.status(path / layout.MANIFEST) is None
                and not is_aside(path)
            ):
                self.set_aside(int(name), f"{layout.MANIFEST} is missing")
        if self.newest() is None and aside(self.folder):
            raise self.none_good()

    def newest(self) -> int | None:
        """Step of the newest checkpoint; where there is none, of those set aside that are whole, which are taken back."""
        if self.latest is not None:
            return self.latest
        for path in aside(self.folder):
            step, shown = path.name.partition(".")[0], path.relative_to(self.folder)
            moved = path != self.folder / step
            if (
                not step.isdigit()
                or path in self._taken_back
                or (moved and disk.status(self.folder / step) is not None)
            ):
                continue
            try:
                whole = verified(path).step == int(step)
            except (DamagedError, ForeignError):
                continue
            if whole:
                self.layout.take_back(path, int(step))
                self._taken_back.add(
                    path
                )  # once: what is whole and cannot be loaded comes here again
                self._note(f"checkpoint {step}, set aside as {shown}, is whole: taken back")
        return self.latest

    def none_good(self) -> WorkdirError:
        """The error of a run whose checkpoints are all damaged, those set aside too."""
        return WorkdirError(
            f"no good checkpoint is left in {self.folder}; those set aside "
            f"({', '.join(path.name for path in aside(self.folder))}) were read again and are damaged. Nothing was "
            "overwritten: put a copy of a good one there, or start again with another --workdir"
        )


def steps(folder: Path) -> list[int]:
    """Steps of the checkpoints in a folder, oldest first: those that have a manifest and were not set aside."""
    candidates = [
        int(name)
        for name in disk.names(folder)
        if name.isascii() and name.isdigit() and str(int(name)) == name
    ]
    return sorted(step for step in candidates if counts(folder / str(step)))


def newest_record(folder: Path) -> dict[str, Any]:
    """What config.json held when the newest checkpoint of a folder was saved; empty where no manifest says it."""
    for step in reversed(steps(folder)):
        try:
            if record := layout.read(folder / str(step)).record:
                return record
        except (DamagedError, ForeignError):
            continue
    return {}


def file_digests(checkpoint: Path, process: int, count: int) -> dict[str, list[Any]]:
    """Size in bytes and digest of the files that one process wrote, by their paths inside the checkpoint.

    Args:
        checkpoint: its folder, with the arrays of all processes in it.
        process: from 0; process 0 also does the files that no process' folder holds.
        count: of processes.
    """
    writers = {f"ocdbt.process_{i}": i for i in range(count)}
    paths = [
        path.relative_to(checkpoint) for path in sorted(checkpoint.rglob("*")) if path.is_file()
    ]
    mine = [
        str(p)
        for p in paths
        if next((writers[part] for part in p.parts if part in writers), 0) == process
    ]
    return dict(
        zip(
            mine, layout.in_threads(_file_digest, [checkpoint / path for path in mine]), strict=True
        )
    )


def _file_digest(path: Path) -> list[Any]:
    hasher, size = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        with contextlib.suppress(
            AttributeError, OSError
        ):  # no such call, or no file of this machine
            os.posix_fadvise(
                file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED
            )  # from the disk, not from memory
        while block := file.read(_BLOCK):
            hasher.update(block)
            size += len(block)
    return [size, hasher.hexdigest()]


def file_problems(
    checkpoint: Path, content: Manifest, part: tuple[int, int] = (0, 1), *, contents: bool = True
) -> list[str]:
    """What is wrong with the files at two reads, one line each; nothing where all is as it was written.

    Args:
        checkpoint: its folder.
        content: its manifest.
        part: index and count, to look at every count-th file only.
        contents: read the files too, not their sizes alone.

    Raises:
        DiskError: the disk cannot read them.
    """
    patience = disk.Patience()

    def look(name: str) -> str | None:
        path, (size, digest) = checkpoint / name, content.files[name]
        try:
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode):
                return f"{name} is missing"
            if status.st_size != size:
                return f"{name} has {status.st_size} bytes, not {size}"
            if contents and _file_digest(path) != [size, digest]:
                return f"{name} has other contents than were written"
        except disk.ABSENT:
            return f"{name} is missing"
        return None

    def problem(name: str) -> str | None:
        if patience(lambda: look(name), checkpoint / name) is None:
            return None
        time.sleep(_AGAIN_S)
        return patience(lambda: look(name), checkpoint / name)

    return [
        line for line in layout.in_threads(problem, list(content.files)[part[0] :: part[1]]) if line
    ]


def verified(checkpoint: Path, run: str | None = None) -> Manifest:
    """The manifest of a checkpoint whose files are all as they were written.

    Args:
        checkpoint, run: as `read` of the manifest takes them.

    Raises:
        DamagedError: they are not; the text names the first files, and the arrays that cannot be read from them.
        ForeignError, DiskError: as `read` of the manifest.
    """
    content = layout.read(checkpoint, run)
    if problems := file_problems(checkpoint, content):
        raise DamagedError(damage(checkpoint, content, problems))
    return content


def damage(checkpoint: Path, content: Manifest, problems: list[str]) -> str:
    """The first problems of the files, and the arrays that they no longer hold, in a line.

    Args:
        checkpoint, content: its folder and manifest.
        problems: from `file_problems`.
    """
    arrays = damaged_arrays(checkpoint, content.arrays)
    return first_of(problems) + (f", which spoils {first_of(arrays)}" if arrays else "")


def first_of(problems: list[str], between: str = ", ") -> str:
    """The first three in a line, and how many more there are.

    Args:
        problems: or names, a line each.
        between: what joins them.
    """
    return between.join(problems[:3]) + (
        f"{between}and {len(problems) - 3} more" if len(problems) > 3 else ""
    )
