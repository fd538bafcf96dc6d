"""Folders that a command makes whole or not at all, such as `mupax convert --out FOLDER`.

The content is written under a temporary name, put on the disk, marked complete (`workdir.MARK`) and
renamed last:

    target is missing      written to .TARGET.making beside it, which is renamed
    target is empty        written to TARGET/.making, whose entries are moved up while the mark of
                           TARGET says that it is not complete
    target in a bucket     written on this machine and copied, or written in place, under that mark

A command that is killed leaves a temporary folder, or a mark that is not complete. The next command
that makes the same folder deletes what is left, unless the first one still runs (`LOCK`).
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

from mupax import MupaxError, disk, terminal
from mupax.disk import copy, is_remote, remove_tree
from mupax.train.checkpoints import lock, workdir
from mupax.train.checkpoints.layout import locks_files
from mupax.train.checkpoints.workdir import MARK, HalfMadeError

LOCK = ".mupax-making"
"""File in a folder while a command makes it. `finish` deletes the file when all is done."""
PART = ".making"
"""Name of the temporary folder in an empty target. The one beside a missing target ends in it."""
_HALF_MARK = f".{MARK}.partial"
"""Temporary file of a mark (`workdir.MARK`) while it is written. A kill may leave it."""
_LAST = ("model.safetensors.index.json", "model.json", "config.json")
"""Files by which other programs recognize a model's folder. They are moved last, in this order."""
_SCRATCH = "mupax-scratch-"
_RUNNING_S = 60.0
"""Age in seconds from which an unlocked temporary folder of `scratch` counts as abandoned.

A younger one may belong to a process that has not locked it yet."""


class OutError(MupaxError):
    """Error for a folder (`--out`) that a command cannot make. The text says why."""


def is_made(target: Path, command: Sequence[str]) -> bool:
    """Check that a command can make a folder, before work is spent on it.

    If a complete folder still has its lock file, because its command was killed before `finish`,
    the lock file and the temporary folder in it are deleted.

    Args:
        command: Words of the command, as `making` takes them.

    Returns:
        True if this very command made the folder and was killed before `finish`. The user is told
        that the folder is complete, and nothing is left to do. Otherwise False: the folder is still
        to be made.

    Raises:
        OutError: The folder is complete, holds something else, or cannot be made.
        HalfMadeError: Another command is making the folder.
    """
    if target.exists() and not target.is_dir():
        raise OutError(f"--out {target} is no folder; give another one")
    if not is_remote(target) and target.is_symlink() and not target.exists():
        raise OutError(f"--out {target} is a link to nothing; give another folder")
    mark = workdir.read_mark(target)
    if mark is not None and mark["complete"]:
        is_same_command = mark["command"] == shlex.join(command)
        if disk.status(target / LOCK) is not None:
            with _locked(target, target):
                remove_tree(target / PART)
                (target / LOCK).unlink(missing_ok=True)
            if is_same_command:
                terminal.note(
                    f"{target} is complete: the command that made it was ended when all was written"
                )
                return True
        if is_same_command:
            raise OutError(
                f"--out {target} is complete: this command has made it; give another folder to "
                "make it again"
            )
        raise OutError(f"--out {target} is not an empty folder; give another one")

    _check_own(target, () if mark is None else mark["names"])
    _check_not_running(target)
    if is_remote(target):
        return False
    # Find the nearest parent folder that exists. The folders below it will be made.
    parent = target.absolute()
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise OutError(f"--out {target}: cannot write into {parent}; give another folder")
    return False


def _check_not_running(target: Path) -> None:
    """Refuse a folder that a running command is making, in place or in a temporary folder.

    Raises:
        HalfMadeError: A running command has locked one of the two.
    """
    places = [target] if is_remote(target) else [target, _sibling(target)]
    for folder in places:
        if disk.status(folder / LOCK) is not None:
            with _locked(folder, target):
                pass


@contextlib.contextmanager
def making(target: Path, command: Sequence[str], in_bucket: Sequence[str] = ()) -> Iterator[Path]:
    """Yield a folder to write into. Its entries become the complete `target` when the block ends.

    If the block fails, what it wrote is deleted. The lock file of a folder on this machine stays
    until `finish`.

    Args:
        target: Folder that is missing, empty, or left by a command that was killed (`is_made`).
        command: Words that the user is told to write again after a kill.
        in_bucket: Names that the block writes straight into `target` if that is in a bucket. By
            default the block writes a folder of this machine, which is then copied to the bucket.

    Raises:
        HalfMadeError: Another command is making the folder.
        OutError: Something else has come into the folder meanwhile.
        DiskError: The disk is full or cannot write the folder.
    """
    try:
        if not is_remote(target):
            with _made_here(target, command) as staging:
                yield staging
        elif in_bucket:
            with _made_in_place(target, command, in_bucket):
                yield target
        else:
            with scratch() as folder:
                yield folder
                # Copied at the end, so the bucket's folder is incomplete only for a short time.
                with _made_in_place(target, command, disk.names(folder)):
                    _copy_entries(folder, target)
    except OSError as error:
        # The advice below fits a full disk. The text of any other error says more.
        if error.errno not in disk.NO_ROOM:
            raise
        raise disk.DiskError(
            f"{target} cannot be written: {error.strerror}. What was written of it is deleted; "
            "make room, then write the same command again"
        ) from error


def finish(target: Path) -> None:
    """Delete the lock file of a complete folder, when the command has printed that it is done.

    After a kill before this, `is_made` finds the lock file and knows that nothing is left to do. A
    folder in a bucket has no lock file any more, and is not changed.
    """
    if not is_remote(target):
        (target / LOCK).unlink(missing_ok=True)


@contextlib.contextmanager
def _made_here(target: Path, command: Sequence[str]) -> Iterator[Path]:
    """Yield a temporary folder whose entries become `target` on this machine when the block ends.

    It is inside `target` if `target` exists, and otherwise beside it. First delete what a killed
    command has left. If the block fails, what it wrote is deleted.
    """
    inside = target.exists()
    sibling = _sibling(target)
    if inside:
        staging = target / PART
        locked = target
    else:
        staging = sibling
        locked = sibling
    locked.mkdir(parents=True, exist_ok=True)
    with _locked(locked, target):
        if inside and disk.status(sibling) is not None:
            with _locked(sibling, target):
                _delete_temporary(sibling, target)
                remove_tree(sibling)
        try:
            _delete_temporary(staging, target)
            _delete_half(target)
            # Before anything else: the mark shows the next command that it may delete the rest.
            workdir.write_mark(locked, command, complete=False)
            staging.mkdir(exist_ok=True)
            yield staging
            # The content must be on the disk before the mark says that the folder is complete.
            _sync(staging)
            if inside:
                _move_up(staging, target, command)
            else:
                # Mark the folder as complete before the rename. From the rename on, other commands
                # see the folder, and would refuse it if the mark said that it is incomplete.
                workdir.write_mark(staging, command, complete=True)
                _rename(staging, target, command)
        except BaseException:
            _clean_up(staging, target, locked)
            raise
        remove_tree(staging)


def _clean_up(staging: Path, target: Path, locked: Path) -> None:
    """Delete what a failed command has written, and its lock file, in up to three tries.

    Errors are ignored: the next command deletes what is left.

    Args:
        staging: Temporary folder that the command has written into.
        locked: Folder whose lock file the command holds.
    """
    for pause in (0.0, 0.2, 1.0):  # threads of a library may write a little longer
        time.sleep(pause)
        with contextlib.suppress(OSError, MupaxError):
            _delete_temporary(staging, target)
            _delete_half(target)
        if disk.names(staging) in ([], [LOCK]):
            break
    with contextlib.suppress(OSError):
        remove_tree(locked / LOCK)
        staging.rmdir()


@contextlib.contextmanager
def _made_in_place(target: Path, command: Sequence[str], names: Sequence[str]) -> Iterator[None]:
    """Lock a folder in a bucket, and mark it incomplete while the block writes `names` into it.

    First delete what a killed command has left. The folder is marked complete when the block ends.
    If the block fails, the entries `names` are deleted.
    """
    with _locked(target, target):
        _delete_half(target)
        workdir.write_mark(target, command, names, complete=False)
        try:
            yield
        except BaseException:
            # The mark stays if this fails, and the next command deletes the rest.
            with contextlib.suppress(OSError, MupaxError):
                _delete_half(target)
            raise
        workdir.write_mark(target, command, names, complete=True)


def _sibling(target: Path) -> Path:
    """Return the path of the hidden temporary folder beside `target`. Nothing is created."""
    return disk.hidden_beside(target.absolute(), PART)


@contextlib.contextmanager
def _locked(folder: Path, target: Path) -> Iterator[None]:
    """Hold the lock file of a folder that is being made, so that no other command makes it.

    Args:
        folder: Folder to lock, which may be a temporary one.
        target: Folder that the command makes in the end, for the message.

    Raises:
        HalfMadeError: Another process has the lock or has just renamed the folder, or the folder
            cannot be locked.
    """
    in_use = (
        f"--out {target} is being made by another command; wait for it or stop it, or give another "
        "folder"
    )
    with contextlib.ExitStack() as stack:
        if is_remote(folder) or not locks_files(folder / LOCK):
            try:
                stack.enter_context(lock.workdir_lock(folder, LOCK))
            except lock.WorkdirError as error:
                text = in_use if "is in use" in str(error) else f"--out {target}: {error}"
                raise HalfMadeError(text) from error
        else:
            file = stack.enter_context((folder / LOCK).open("a"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise HalfMadeError(in_use) from error
        # The lock is of an open file. If the other process has renamed its folder meanwhile, this
        # process has locked a file that is no longer here.
        if disk.status(folder / LOCK) is None:
            raise HalfMadeError(in_use)
        yield


def _delete_temporary(staging: Path, target: Path) -> None:
    """Delete what a killed or failed command has left in its temporary folder, the mark last.

    The lock file stays, because this process holds it.

    Raises:
        OutError: The temporary folder is not of a command: it has no mark.
    """
    names = [name for name in disk.names(staging) if name != LOCK]
    marks = [folder / MARK for folder in (staging, target)]
    has_mark = any(disk.status(mark) is not None for mark in marks)
    has_content = any(name != _HALF_MARK for name in names)
    if has_content and not has_mark:
        raise OutError(
            f"{staging} is where --out {target} is to be made, and holds {names[0]}; move it away"
        )
    for name in names:
        if name != MARK:
            remove_tree(staging / name)
    # The mark goes last: it says that the folder was made by a command.
    remaining = [name for name in disk.names(staging) if name not in (LOCK, MARK)]
    if not remaining:
        remove_tree(staging / MARK)


def _delete_half(target: Path) -> None:
    """Delete the entries that the mark of an incomplete folder names, and then the mark.

    A complete folder and a folder without a mark are not changed.

    Raises:
        OutError: The folder also holds entries that the mark does not name.
    """
    mark = workdir.read_mark(target)
    if mark is None or mark["complete"]:
        return
    _check_own(target, mark["names"])
    for name in mark["names"]:
        remove_tree(target / name)
    remove_tree(target / MARK)


def _check_own(target: Path, names: Iterable[str]) -> None:
    """Refuse a folder that holds something that no killed command has left.

    Args:
        names: Entries that the mark of the folder names.

    Raises:
        OutError: The folder has another entry than these, the mark, the lock and temporary ones.
    """
    made_names = {*names, MARK, _HALF_MARK, LOCK, PART}
    foreign = [name for name in disk.names(target) if name not in made_names]
    if foreign and disk.status(target / MARK) is None:
        raise OutError(f"--out {target} is not an empty folder; give another one")
    if foreign:
        raise OutError(
            f"--out {target} holds {foreign[0]}, in addition to what a command has left that was "
            "ended; move it away, or give another folder"
        )


def _move_up(staging: Path, target: Path, command: Sequence[str]) -> None:
    """Move the entries of a temporary folder into `target`, and then mark `target` as complete.

    A file system that cannot rename them gets copies.

    Raises:
        OutError: An entry of that name is already in `target`.
    """
    names = [name for name in disk.names(staging) if name not in (LOCK, MARK)]
    # With the names, so that the next command can delete what a kill leaves of them.
    workdir.write_mark(target, command, names, complete=False)
    for name in sorted(names, key=_rank):
        if (target / name).exists():
            raise OutError(
                f"{target / name} has come meanwhile; move it away, or give another folder"
            )
        try:
            (staging / name).replace(target / name)
        except OSError as error:
            if error.errno in disk.NO_ROOM:
                raise
            # For example, some mounted buckets cannot rename folders.
            copy(staging / name, target / name)
    # The entries are on the disk before the mark says that they are complete.
    disk.sync_folder(target)
    workdir.write_mark(target, command, names, complete=True)


def _rename(staging: Path, target: Path, command: Sequence[str]) -> None:
    """Rename a complete folder to `target`. If it cannot be renamed, move its entries.

    Raises:
        OutError: There is a `target` already.
    """
    if target.exists():
        raise OutError(f"{target} has come meanwhile; move it away, or give another folder")
    try:
        staging.replace(target)
        disk.sync_folder(target.absolute().parent)
    except OSError as error:
        # If the staging folder is gone, the rename succeeded and only `sync_folder` failed.
        if error.errno in disk.NO_ROOM or not staging.exists():
            raise
        target.mkdir()
        _move_up(staging, target, command)
        remove_tree(staging)


def _copy_entries(folder: Path, target: Path) -> None:
    """Copy the entries of a folder into a bucket. The files of `_LAST`, as config.json, go last."""
    for name in sorted(disk.names(folder), key=_rank):
        copy(folder / name, target / name)


def _rank(name: str) -> int:
    """Return a sort key that puts the names in `_LAST`, in their order, behind all others (-1)."""
    return _LAST.index(name) if name in _LAST else -1


def _sync(folder: Path) -> None:
    """Flush a folder and every file and folder below it to the disk (fsync)."""
    for path in [*folder.rglob("*"), folder]:
        if path.is_dir() or path.is_file():
            disk.sync_folder(path)


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Yield an empty temporary folder of this machine, and delete it when the block ends.

    First delete the temporary folders that killed processes of this user have left.
    """
    root = Path(tempfile.gettempdir())
    for name in disk.names(root):
        if name.startswith(_SCRATCH):
            _delete_abandoned(root / name)
    holder = Path(tempfile.mkdtemp(prefix=_SCRATCH))
    folder = holder / "files"
    try:
        with (holder / LOCK).open("a") as file:
            # If files cannot be locked here, `_delete_abandoned` fails at its lock, too. It then
            # never deletes the folder, not even after a kill.
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            folder.mkdir()
            yield folder
    finally:
        remove_tree(holder)


def _delete_abandoned(holder: Path) -> None:
    """Delete a folder of `scratch` whose process has ended.

    A folder stays if a running process holds its lock, if it is another user's, or if it was
    changed less than `_RUNNING_S` seconds ago. Errors of the disk are ignored.
    """
    with contextlib.suppress(OSError):
        status = holder.stat()
        # All users share the folder of temporary files. Each may delete only what they own.
        if status.st_uid != os.getuid() or time.time() - status.st_mtime < _RUNNING_S:
            return
        with (holder / LOCK).open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_tree(holder)
