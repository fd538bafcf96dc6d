"""How checkpoints lie in their folder: what is not whole yet, what is being deleted and what was set aside do not count.

Where folders can be renamed (`Renamed`), a checkpoint is written as STEP.saving and gets its name when it is whole; one that
is deleted loses its name first; a damaged one is moved to set-aside/. In a bucket, and in some that are mounted, they cannot
(`InPlace`): a checkpoint is written where it stays, and its manifest, which comes last and goes first, makes it one. An empty
file STEP.saving says that it is being written or deleted, and damaged.json in it that it was set aside.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
from pathlib import Path
from typing import Any

from mupax import disk
from mupax.paths import copy, delete_tree, is_remote, remove_tree

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


class Renamed:
    """A folder on a disk. Process 0 alone calls what changes something.

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
        mode = options.AtomicityMode.ATOMIC_RENAME if self.renames else options.AtomicityMode.COMMIT_FILE
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


class InPlace(Renamed):
    """A folder in which no folder can be renamed."""

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
    marked = [path for name in disk.names(folder) if name.isdigit() and is_aside(path := folder / name)]
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
        "file locks (an owner file keeps other runs out, unless they start in the same second)": locks_files(file),
    }
    return [text for text, can in texts.items() if not can]
