"""Folders made whole or not at all: written under a temporary name, put on the disk, marked complete, and renamed last.

    out is missing        written to .OUT.making beside it, which is renamed
    out is empty          written to OUT/.making, whose entries are moved up while the mark of OUT says that it is not complete
    out is in a bucket    written on this machine and copied, or written in place, under the same mark

A command that is killed leaves a temporary folder or a mark that is not complete. The next command that makes the same folder
deletes what is left, unless the first one still runs: `LOCK` tells.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from mupax import disk, terminal
from mupax.disk import copy, is_remote, remove_tree
from mupax.errors import MupaxError
from mupax.train.checkpoints import lock, workdir
from mupax.train.checkpoints.layout import locks_files
from mupax.train.checkpoints.workdir import MARK, HalfMadeError

LOCK = ".mupax-making"
"""File in a folder while a command makes it, deleted last of all (`finish`)."""
PART = ".making"
"""Temporary folder, inside an empty one; ending of one that lies beside the folder to come."""
_HALF_MARK = f".{MARK}.partial"
"""What a kill leaves of a mark that is being written."""
_LAST = ("model.safetensors.index.json", "model.json", "config.json")
"""Files by which programs take a folder for a model, in the order in which they come, behind all others."""
_SCRATCH = "mupax-scratch-"
_RUNNING_S = 60.0
"""Age from which a folder of `scratch` without a process is deleted: a new one is not locked yet."""


class OutError(MupaxError):
    """A folder that cannot be made. The text says why."""


def is_made(out: Path, command: Sequence[str]) -> bool:
    """Refuse a folder that cannot be written to, before work is spent. Return True if this very command has just made it.

    The second is so after a kill in the last moment, when the folder was complete and the command had not said so.

    Args:
        command: words of the command, as `making` takes them.

    Raises:
        OutError: the folder holds something, or cannot be made.
        HalfMadeError: another command makes it now.
    """
    if out.exists() and not out.is_dir():
        raise OutError(f"--out {out} is no folder; give another one")
    if not is_remote(out) and out.is_symlink() and not out.exists():
        raise OutError(f"--out {out} is a link to nothing; give another folder")
    mark = workdir.read_mark(out)
    if mark is not None and mark["complete"] and disk.status(out / LOCK) is not None:
        with _locked(out, out):
            remove_tree(out / PART)
            (out / LOCK).unlink(missing_ok=True)
        if mark["command"] == shlex.join(command):
            terminal.note(
                f"{out} is complete: the command that made it was ended when all was written"
            )
            return True
    if mark is not None and mark["complete"] and mark["command"] == shlex.join(command):
        raise OutError(
            f"--out {out} is complete: this command has made it; give another folder to make it again"
        )
    if mark is not None and mark["complete"]:
        raise OutError(f"--out {out} is not an empty folder; give another one")
    _check_own(out, () if mark is None else mark["names"])
    _check_not_running(out)
    if is_remote(out):
        return False
    parent = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise OutError(f"--out {out}: cannot write into {parent}; give another folder")
    return False


def _check_not_running(out: Path) -> None:
    """Refuse a folder that another command makes now, before work is spent."""
    places = [out] if is_remote(out) else [out, _sibling(out)]
    for folder in places:
        if disk.status(folder / LOCK) is not None:
            with _locked(folder, out):
                pass


@contextlib.contextmanager
def making(out: Path, command: Sequence[str], in_bucket: Sequence[str] = ()) -> Iterator[Path]:
    """Yield a folder to write into, which is `out` and complete when the block ends, and deleted when the block fails.

    Args:
        out: missing, empty, or left by a command that was killed (`is_made`).
        command: words to write again after a kill.
        in_bucket: names that the block writes straight into a folder of a bucket; otherwise the block writes a folder of
            this machine, which is copied.

    Raises:
        HalfMadeError: another command makes the folder now.
        OutError: something else came into the folder meanwhile.
        DiskError: the disk is full or does not take the folder.
    """
    try:
        if not is_remote(out):
            with _made_here(out, command) as staging:
                yield staging
        elif in_bucket:
            with _made_in_place(out, command, in_bucket):
                yield out
        else:
            with scratch() as folder:
                yield folder
                with _made_in_place(out, command, disk.names(folder)):
                    _copy_entries(folder, out)
    except OSError as error:
        if error.errno not in disk.NO_ROOM:
            raise
        raise disk.DiskError(
            f"{out} cannot be written: {error.strerror}. What was written of it is deleted; make room, then write the "
            "same command again"
        ) from error


def finish(out: Path) -> None:
    """Note that a command has told the user all. After a kill before this, `is_made` knows that nothing is left to do."""
    if not is_remote(out):
        (out / LOCK).unlink(missing_ok=True)


@contextlib.contextmanager
def _made_here(out: Path, command: Sequence[str]) -> Iterator[Path]:
    """Make a folder of this machine in a temporary one, beside it or inside it."""
    inside = out.exists()
    sibling = _sibling(out)
    staging = out / PART if inside else sibling
    locked = out if inside else sibling
    locked.mkdir(parents=True, exist_ok=True)
    with _locked(locked, out):
        if inside and disk.status(sibling) is not None:
            with _locked(sibling, out):
                _delete_temporary(sibling, out)
                remove_tree(sibling)
        try:
            _delete_temporary(staging, out)
            _delete_half(out)
            workdir.write_mark(locked, command, complete=False)
            staging.mkdir(exist_ok=True)
            yield staging
            _sync(staging)
            if inside:
                _move_up(staging, out, command)
            else:
                workdir.write_mark(staging, command, complete=True)
                _rename(staging, out, command)
        except BaseException:
            _clean_up(staging, out, locked)
            raise
        remove_tree(staging)


def _clean_up(staging: Path, out: Path, locked: Path) -> None:
    """Delete what a command has made that fails. What cannot be deleted is deleted by the next command."""
    for pause in (0.0, 0.2, 1.0):  # threads of a library may write a little longer
        time.sleep(pause)
        with contextlib.suppress(OSError, MupaxError):
            _delete_temporary(staging, out)
            _delete_half(out)
        if disk.names(staging) in ([], [LOCK]):
            break
    with contextlib.suppress(OSError):
        remove_tree(locked / LOCK)
        staging.rmdir()


@contextlib.contextmanager
def _made_in_place(out: Path, command: Sequence[str], names: Sequence[str]) -> Iterator[None]:
    """Make a folder of a bucket, in which nothing can be renamed: the mark alone says whether it is complete."""
    with _locked(out, out):
        _delete_half(out)
        workdir.write_mark(out, command, names, complete=False)
        try:
            yield
        except BaseException:
            with contextlib.suppress(OSError, MupaxError):
                _delete_half(out)
            raise
        workdir.write_mark(out, command, names, complete=True)


def _sibling(out: Path) -> Path:
    """Return the temporary folder of one that is missing, on the same file system."""
    return disk.hidden_beside(out.absolute(), PART)


@contextlib.contextmanager
def _locked(folder: Path, out: Path) -> Iterator[None]:
    """Keep a folder that is being made for this process alone.

    Raises:
        HalfMadeError: another process has it, or has renamed it just now.
    """
    in_use = f"--out {out} is being made by another command; wait for it or stop it, or give another folder"
    with contextlib.ExitStack() as stack:
        if is_remote(folder) or not locks_files(folder / LOCK):
            try:
                stack.enter_context(lock.workdir_lock(folder, LOCK))
            except lock.WorkdirError as error:
                raise HalfMadeError(
                    in_use if "is in use" in str(error) else f"--out {out}: {error}"
                ) from error
        else:
            file = stack.enter_context((folder / LOCK).open("a"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise HalfMadeError(in_use) from error
        if disk.status(folder / LOCK) is None:
            raise HalfMadeError(in_use)
        yield


def _delete_temporary(staging: Path, out: Path) -> None:
    """Delete what a killed command has left in its temporary folder, but for the lock that this process holds.

    Raises:
        OutError: no command has made the temporary folder.
    """
    names = [name for name in disk.names(staging) if name != LOCK]
    marks = [folder / MARK for folder in (staging, out)]
    if all(disk.status(mark) is None for mark in marks) and any(
        name != _HALF_MARK for name in names
    ):
        raise OutError(
            f"{staging} is where --out {out} is to be made, and holds {names[0]}; move it away"
        )
    for name in names:
        if name != MARK:
            remove_tree(staging / name)
    # The mark goes last: it says that the folder was made by a command.
    if [name for name in disk.names(staging) if name not in (LOCK, MARK)] == []:
        remove_tree(staging / MARK)


def _delete_half(out: Path) -> None:
    """Delete what a killed command has made of a folder. What the mark does not name stays."""
    mark = workdir.read_mark(out)
    if mark is None or mark["complete"]:
        return
    _check_own(out, mark["names"])
    for name in mark["names"]:
        remove_tree(out / name)
    remove_tree(out / MARK)


def _check_own(out: Path, names: Iterable[str]) -> None:
    """Refuse a folder that holds something else than a killed command has left."""
    made_names = {*names, MARK, _HALF_MARK, LOCK, PART}
    foreign = [name for name in disk.names(out) if name not in made_names]
    if foreign and disk.status(out / MARK) is None:
        raise OutError(f"--out {out} is not an empty folder; give another one")
    if foreign:
        raise OutError(
            f"--out {out} holds {foreign[0]}, in addition to what a command has left that was ended; "
            "move it away, or give another folder"
        )


def _move_up(staging: Path, out: Path, command: Sequence[str]) -> None:
    """Move what was made into its folder, which is not complete until all of it is there."""
    names = [name for name in disk.names(staging) if name not in (LOCK, MARK)]
    workdir.write_mark(out, command, names, complete=False)
    for name in sorted(names, key=_rank):
        if (out / name).exists():
            raise OutError(f"{out / name} has come meanwhile; move it away, or give another folder")
        try:
            (staging / name).replace(out / name)
        except OSError as error:
            if error.errno in disk.NO_ROOM:
                raise
            copy(staging / name, out / name)  # a folder, in a bucket that is mounted
    disk.sync_folder(out)
    workdir.write_mark(out, command, names, complete=True)


def _rename(staging: Path, out: Path, command: Sequence[str]) -> None:
    """Give a complete folder its name; where no folder can be renamed, move what is in it."""
    if out.exists():
        raise OutError(f"{out} has come meanwhile; move it away, or give another folder")
    try:
        staging.replace(out)
        disk.sync_folder(out.absolute().parent)
    except OSError as error:
        if error.errno in disk.NO_ROOM or not staging.exists():
            raise
        out.mkdir()
        _move_up(staging, out, command)
        remove_tree(staging)


def _copy_entries(folder: Path, out: Path) -> None:
    """Copy what is in a folder of this machine into a bucket, the files that make it a model last."""
    for name in sorted(disk.names(folder), key=_rank):
        copy(folder / name, out / name)


def _rank(name: str) -> int:
    return _LAST.index(name) if name in _LAST else -1


def _sync(folder: Path) -> None:
    """Put all files below a folder, and the lists of their names, on the disk."""
    for path in [*folder.rglob("*"), folder]:
        if path.is_dir() or path.is_file():
            disk.sync_folder(path)


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Yield an empty folder of this machine, deleted at the end; one that a killed process has left is deleted first."""
    root = Path(tempfile.gettempdir())
    for name in disk.names(root):
        if name.startswith(_SCRATCH):
            _delete_abandoned(root / name)
    holder = Path(tempfile.mkdtemp(prefix=_SCRATCH))
    folder = holder / "files"
    try:
        with (holder / LOCK).open("a") as file:
            with contextlib.suppress(
                OSError
            ):  # no locks there: then nobody deletes what a kill leaves
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            folder.mkdir()
            yield folder
    finally:
        remove_tree(holder)


def _delete_abandoned(holder: Path) -> None:
    """Delete a folder of `scratch` whose process has ended. A running process holds its lock."""
    with contextlib.suppress(OSError):
        status = holder.stat()
        if status.st_uid != os.getuid() or time.time() - status.st_mtime < _RUNNING_S:
            return
        with (holder / LOCK).open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_tree(holder)
