"""The folder of prepared data, and how several processes share it.

`MUPAX_DATA` names it; otherwise it is the user's cache folder. Everything in it can be deleted: it is made again.
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

from mupax import disk
from mupax.disk import copy, is_remote, remove_tree
from mupax.errors import MupaxError
from mupax.train.config.checks import check_local
from mupax.train.data.interface import DataError

Note = Callable[[str], None]
PATIENCE_S = 5.0
"""What is prepared sooner needs no help."""


def root() -> Path:
    """MUPAX_DATA, or the user's cache folder for mupax."""
    if path := os.environ.get("MUPAX_DATA"):
        check_local("MUPAX_DATA", path)
        return Path(path).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "mupax"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mupax"


def data_sets(data_dir: str | None) -> Path:
    """data.data_dir, or the folder of data sets in the cache: where one that is made here is kept."""
    check_local("data.data_dir", data_dir)
    return Path(data_dir).expanduser() if data_dir else root() / "tfds"


def fetched(folder: Path, note: Note) -> Path:
    """A folder of this machine, or its copy in the cache of one in a bucket: of files that are read from places within.

    Args:
        folder: copied again where the name, size or time of a file in it is another.
        note: told what is fetched, and that another process does it.
    """
    if not is_remote(folder):
        return folder
    files = sorted(
        (str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in folder.rglob("*")
    )
    target = root() / "fetched" / digest(*map(str, files)) / folder.name
    if not target.is_dir():
        with lock(target.parent, "fetched", note):
            if not target.is_dir():
                note(f"fetching {folder}, {sum(size for _, size, _ in files) / 2**20:.1f} MiB")
                part = target.with_name(f"{target.name}.part")
                remove_tree(part)
                copy(folder, part)
                part.replace(target)
    return target


def prepare_again(name: str) -> str:
    """What to do about a data set whose folder is damaged."""
    return f"Delete that folder and prepare it again (mupax data prepare {name})"


@contextlib.contextmanager
def whole(folder: Path, name: str) -> Iterator[None]:
    """Turns what TFDS, protobuf and array_record make of damaged files of a data set into an error of the data.

    Args:
        folder: of the data set.
        name: of the data set.

    Raises:
        DataError: in place of any error that is not one of the disk or of this project.
    """
    try:
        yield
    except MupaxError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and not isinstance(error, disk.ABSENT):
            raise
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise DataError(f"{folder} is damaged: {reason}. {prepare_again(name)}") from error


def folder(path: Path) -> Path:
    """The path, with a folder that can be written.

    Raises:
        DataError: it cannot be made or written.
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
    """Holds the lock NAME.lock of a folder; a second process waits for the first one, and a killed one frees it.

    This is how one process prepares while others wait, whether they belong to one run or to several. Hosts that share
    no file system share no lock, and each prepares its own copy.

    Args:
        base: folder, made if it is not there.
        name: of what is prepared.
        note: told that this process waits.
        meanwhile: called once by a process that has waited for seconds, to help the one that prepares.

    Raises:
        DataError: the folder cannot be written, or its file system has no locks.
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
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(0.05)
    return False


def write_json(path: Path, value: Any) -> None:
    """Writes JSON so that readers see the old file or the new one, never a part.

    Args:
        path: in a folder that exists.
        value: what the file then holds.

    Raises:
        DiskError: the disk does not take it.
    """
    disk.write_whole(path, json.dumps(value, indent=1))


def delete_incomplete(data_set: Path) -> None:
    """Delete what killed preparations of a data set have left beside it. The caller holds the data set's lock.

    Args:
        data_set: folder of the data set's version, beside which TFDS writes `incomplete.XXXXXX_VERSION`.
    """
    for name in disk.names(data_set.parent):
        if name.startswith("incomplete.") and name.endswith(f"_{data_set.name}"):
            remove_tree(data_set.parent / name)


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None when there is no file, or no whole object in it."""
    with contextlib.suppress(disk.JsonError):
        return disk.read_json(path)


def remembered(name: str, compute: Callable[[], dict[str, float]]) -> dict[str, float]:
    """The numbers kept under this name in the cache, or computed now and kept, if the cache can be written.

    Args:
        name: of the file, without its ending; it must tell apart everything that the numbers depend on.
        compute: gives them by their names; called where they are not kept yet.
    """
    path = root() / "references" / f"{name}.json"
    numbers = read_json(path)
    if numbers is None or not all(isinstance(value, float) for value in numbers.values()):
        numbers = compute()
        with contextlib.suppress(
            DataError, disk.DiskError
        ):  # one that others prepared and we may only read
            write_json(folder(path.parent) / path.name, numbers)
    return numbers


def digest(*parts: str | bytes) -> str:
    """16 hexadecimal digits that name these parts: SHA-256 over each part's length and content."""
    total = hashlib.sha256()
    for part in parts:
        # Names of files may have bytes that are no UTF-8.
        data = part.encode(errors="surrogateescape") if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "little"))
        total.update(data)
    return total.hexdigest()[:16]
