"""Folder of prepared data, and locks that let several processes share it.

The folder is `MUPAX_DATA`, or the user's cache folder. Everything in it may be deleted: it is made
again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from mupax import MupaxError, disk
from mupax.disk import copy, is_remote, remove_tree
from mupax.train.config.checks import check_local
from mupax.train.data.interface import DataError

Note = Callable[[str], None]
PATIENCE_S = 5.0
"""Seconds that a waiting process gives the preparing one before it helps."""


def root() -> Path:
    """Return the cache folder: `MUPAX_DATA`, or the user's cache folder for mupax.

    It may not exist yet.

    Raises:
        ConfigError: `MUPAX_DATA` is an address, such as gs://bucket.
    """
    path = os.environ.get("MUPAX_DATA")
    if path:
        check_local("MUPAX_DATA", path)
        return Path(path).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "mupax"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mupax"


def data_sets(data_dir: str | None) -> Path:
    """Return the folder of prepared data sets: data.data_dir, or "tfds" in the cache folder.

    It may not exist yet.

    Raises:
        ConfigError: The folder is an address, such as gs://bucket.
    """
    check_local("data.data_dir", data_dir)
    return Path(data_dir).expanduser() if data_dir else root() / "tfds"


def fetched(folder: Path, note: Note) -> Path:
    """Return a folder on this machine: the folder itself, or a cached copy if it is in a bucket.

    Data sets need a local copy because they read from positions within their files.

    Args:
        folder: Local or remote folder. A new copy is made if the name, size or time of a file
            changed.
        note: Function that takes one line of text about what is fetched or waited for.
    """
    if not is_remote(folder):
        return folder
    files: list[tuple[str, int, int]] = []
    for file in folder.rglob("*"):
        files.append((str(file), file.stat().st_size, file.stat().st_mtime_ns))
    files.sort()

    target = root() / "fetched" / digest(*map(str, files)) / folder.name
    if target.is_dir():
        return target
    with lock(target.parent, "fetched", note):
        # Another process may have made the copy meanwhile.
        if not target.is_dir():
            total_bytes = sum(size for _, size, _ in files)
            note(f"fetching {folder}, {total_bytes / 2**20:.1f} MiB")
            # Renamed when it is complete, because an existing folder counts as fetched.
            part = target.with_name(f"{target.name}.part")
            remove_tree(part)
            copy(folder, part)
            part.replace(target)
    return target


def prepare_again(name: str) -> str:
    """Return a sentence for an error message: delete the damaged folder and prepare it again.

    Args:
        name: Name of the data set, as `mupax data prepare` takes it.
    """
    return f"Delete that folder and prepare it again (mupax data prepare {name})"


@contextlib.contextmanager
def whole(folder: Path, name: str) -> Iterator[None]:
    """Turn an error that a damaged data set causes inside the `with` block into a `DataError`.

    Every exception counts as damage, such as those of TFDS, protobuf and array_record, and that of
    a missing file. Two kinds pass unchanged: errors of mupax, and errors of the disk other than a
    missing file.

    Args:
        folder: Folder of the prepared data set, for the message.
        name: Name of the data set, as `mupax data prepare` takes it.

    Raises:
        DataError: The folder is damaged. The message has the command that prepares it again.
    """
    try:
        yield
    except MupaxError:
        raise
    except Exception as error:
        # An error of the disk does not show that the files are damaged.
        if isinstance(error, OSError) and not isinstance(error, disk.ABSENT):
            raise
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise DataError(f"{folder} is damaged: {reason}. {prepare_again(name)}") from error


def folder(path: Path) -> Path:
    """Make the folder if needed, check that it can be written, and return it.

    Raises:
        DataError: The folder cannot be made or written.
        DiskError: The disk is full.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "no permission")
    except OSError as error:
        message = (
            f"cannot write prepared data to {path}: {error.strerror}. "
            "Set MUPAX_DATA (or data.data_dir) to a folder you can write to"
        )
        if error.errno in disk.NO_ROOM:
            raise disk.DiskError(message) from error
        raise DataError(message) from error
    return path


@contextlib.contextmanager
def lock(
    base: Path, name: str, note: Note, meanwhile: Callable[[], None] | None = None
) -> Iterator[None]:
    """Hold the lock file `base/NAME.lock` while the `with` block runs.

    With it, one process prepares data while others wait, in one run or in several. A lock is freed
    if its process is killed. Hosts without a common file system have no common lock, and each
    prepares its own copy.

    Args:
        base: Folder of the lock file. It is made if needed.
        name: Name of the data that is prepared.
        note: Function that takes one line of text when this process must wait.
        meanwhile: Function that helps the preparing process. It is called once if the lock is not
            free within `PATIENCE_S`. After it, this process waits for the lock.

    Raises:
        DataError: The folder cannot be written, or its file system has no locks.
    """
    with (folder(base) / f"{name}.lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            note(f"waiting for another process to prepare {name}")
            if meanwhile is not None and not _locked_within(file, PATIENCE_S):
                meanwhile()
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            raise DataError(
                f"the file system of {base} has no locks ({error.strerror}), so processes could prepare the "
                "same data at once. Set MUPAX_DATA to a folder on a disk of this machine"
            ) from error
        yield


def _locked_within(file: IO[str], seconds: float) -> bool:
    """Try to take the exclusive lock of a file for up to `seconds`. Return whether it worked."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        # `flock` has no time limit, so the lock is tried again and again.
        time.sleep(0.05)
    return False


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file so that readers see the old file or the new one, never a part.

    Raises:
        DiskError: The disk is full or fails.
    """
    disk.write_whole(path, json.dumps(value, indent=1))


def delete_incomplete(data_set: Path) -> None:
    """Delete the incomplete folders that TFDS left when a preparation of the data set was killed.

    They are named `incomplete.XXXXXX_VERSION`. The caller must hold the data set's lock, so that no
    running preparation loses its folder.

    Args:
        data_set: Folder of one version of the data set. The incomplete folders are next to it.
    """
    for name in disk.names(data_set.parent):
        if name.startswith("incomplete.") and name.endswith(f"_{data_set.name}"):
            remove_tree(data_set.parent / name)


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file, or None if there is no file or it holds no object."""
    with contextlib.suppress(disk.JsonError):
        return disk.read_json(path)


def remembered(name: str, compute: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Return named numbers, such as reference losses, from the cache on disk.

    Numbers that are not there are computed and cached. Numbers that cannot be written to the cache
    are still returned. Nothing is locked, so processes that call this at once all compute.

    Args:
        name: Name of the cache file without its suffix. It must be different for every input on
            which the numbers depend, so it usually contains a digest of them.
        compute: Function that returns the numbers by name. It is called only if they are not
            cached. All must be floats: with a whole number (int) they are computed each time.
    """
    path = root() / "references" / f"{name}.json"
    numbers = read_json(path)
    if numbers is None or not all(isinstance(value, float) for value in numbers.values()):
        numbers = compute()
        # The cache may have been prepared by others, so that this user may only read it.
        with contextlib.suppress(DataError, disk.DiskError):
            write_json(folder(path.parent) / path.name, numbers)
    return numbers


def digest(*parts: str | bytes) -> str:
    """Return 16 hexadecimal digits of SHA-256 over the parts in their order.

    The lengths of the parts count, so that "ab", "c" and "a", "bc" have different digests.
    """
    total = hashlib.sha256()
    for part in parts:
        # Names of files may have bytes that are not UTF-8.
        data = part.encode(errors="surrogateescape") if isinstance(part, str) else part
        # The lengths keep parts such as ab, c and a, bc apart.
        total.update(len(data).to_bytes(8, "little"))
        total.update(data)
    return total.hexdigest()[:16]
