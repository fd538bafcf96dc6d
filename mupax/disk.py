"""Files and folders, of this machine or of a bucket (gs://): where a user's words lead, and what is there read and written.

An unwell disk is given half a minute and never taken for damage, and JSON of anyone does no harm.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import stat
import sys
import tempfile
import threading
import time
import urllib.parse
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from mupax.errors import MupaxError, MupaxFailure

ADDRESS = re.compile(r"(?:\w+:)?([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
"""The beginning of an address; text:, images: and measured: may stand before it."""

_PLAIN = re.compile(r"[\w./=,+@ -]*", re.ASCII)
"""A path that storage libraries take as it is."""
_PATTERN = re.compile(r"[#?\[\]*]")
"""What must not be in the name of a place in a bucket. Deleting `gs://bucket/*` would delete every other run there too."""
_OPEN_FOLDERS = Path("/proc/self/fd")
"""Where Linux has the open folders of this process by their numbers."""
_FIRST_NUMBER = 300
_NUMBERS = 600
"""Numbers that open folders get: below 1,024, the usual limit of a process."""
_LINK = "plainly-named"
_STAND_IN = re.compile(rf"(?:{_OPEN_FOLDERS}/\d+|/[^\s\"']*/{_LINK})/")
"""What `plainly_named` puts in place of a folder."""

PATIENCE_S = 30.0
"""How long an operation is tried again."""
_PAUSES_S = (0.1, 5.0)
"""The first pause and the longest; each is twice the one before it."""
_LARGEST_FILE = 64 * 2**20
DEEPEST = 100
"""Levels of lists and objects in one another that a file may have. Python's functions for them go as deep as they do."""
_LONGEST_NAME = 255
"""Bytes of a file's name at most, on every common disk."""
_DIGITS = 60
"""Of a whole number at most; a longer one is none of ours, and some of Python's conversions refuse it."""
_NESTED = re.compile(r"os_error_code='(\d+)'")
"""How tensorstore names the error of the system that it met."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers of errors that say that a disk takes nothing more, which is no fault of what was asked for."""
ABSENT = (FileNotFoundError, NotADirectoryError)
"""Errors that say that there is nothing, which is no fault of a disk."""

T = TypeVar("T")


class PathError(MupaxError):
    """A place that cannot be read or written. The text says what to write instead."""


def path_of(word: str | Path) -> Path:
    """The path that a user's word means; `~` is the home folder. A path is what it is.

    Raises:
        PathError: an address of a kind that is not read here, a bucket's that would be read as a pattern, or gs:// without
            the package for it.
    """
    if not isinstance(word, str):
        return word
    if not (match := ADDRESS.match(word)):
        return Path(word).expanduser()
    if match[1] != "gs" or match.start(1) or not word.removeprefix("gs://").strip("/"):
        raise PathError(
            f"{word} is no gs://bucket/folder, the one kind of address that is read and written"
        )
    if taken := _PATTERN.search(word):
        raise PathError(
            f"{word} has {taken[0]} in it, which libraries for buckets take for a pattern or a version; write a place without "
            "# ? [ ] *"
        )
    from mupax import buckets, extras

    extras.require("gcs", word, PathError)
    return buckets.path_of(word)


def is_remote(path: Path) -> bool:
    """Return whether the path is in a bucket: no folders to make or rename, no locks, files written whole or not at all."""
    return not isinstance(path, Path)


@contextlib.contextmanager
def plainly_named(path: Path) -> Iterator[str]:
    """Name a path so that orbax and tensorstore take the name as it is. The name is good while entered.

    Orbax takes brackets for a pattern, and `gs:/` anywhere for a bucket. Tensorstore takes a backslash for a slash, and no
    bytes that are not UTF-8. Both resolve `..` without looking at links. For such a path another way to its folder is named.
    What is on disk keeps its own name.

    Args:
        path: its folder exists.

    Raises:
        OSError: its folder cannot be opened.
    """
    if is_remote(path):
        yield str(path)
        return
    path = path.absolute()
    if _PLAIN.fullmatch(str(path)) and ".." not in path.parts:
        yield str(path)
        return
    with _stand_in(path.parent) as folder:
        yield f"{folder}/{path.name}"


def lasting_name(folder: Path) -> Path:
    """Return a name of a folder as `plainly_named` makes it, good until the process ends.

    Args:
        folder: exists.
    """
    if is_remote(folder):
        return folder
    inside = folder if _PLAIN.fullmatch(folder.name) else folder / "inside"
    naming = contextlib.ExitStack()
    named = Path(naming.enter_context(plainly_named(inside)))
    atexit.register(naming.close)
    return named if inside == folder else named.parent


@contextlib.contextmanager
def _stand_in(folder: Path) -> Iterator[Path]:
    """Make another way to a folder, without odd characters, while entered.

    Orbax compares the paths of a run's processes. The number of the open folder therefore follows from its path: the first one free
    from there on, far above those that are given out by themselves.
    """
    if _OPEN_FOLDERS.is_dir():
        number = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        start = _FIRST_NUMBER + zlib.crc32(os.fsencode(folder)) % _NUMBERS
        with contextlib.suppress(OSError):  # a process may be given fewer numbers
            opened = number
            number = fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, start)
            os.close(opened)
        try:
            yield _OPEN_FOLDERS / str(number)
        finally:
            os.close(number)
        return
    with tempfile.TemporaryDirectory(prefix="mupax-") as temporary:
        link = Path(temporary) / _LINK
        link.symlink_to(folder, target_is_directory=True)
        yield link


def without_stand_ins(text: str) -> str:
    """Return a library's message without the folders that `plainly_named` made up."""
    return _STAND_IN.sub("", text)


def storage_url(name: str) -> str:
    """Return the URL by which tensorstore opens what `plainly_named` has named, percent-encoded."""
    if "://" not in name:
        return f"file://{urllib.parse.quote(name)}"
    scheme, _, path = name.partition("://")
    return f"{scheme}://{urllib.parse.quote(path)}"


def remove_tree(folder: Path) -> None:
    """Delete a folder and what is in it, or a file. What cannot be deleted stays."""
    if is_remote(folder):
        with contextlib.suppress(OSError):
            folder.rmtree(missing_ok=True)  # pyright: ignore[reportAttributeAccessIssue]
    elif folder.is_dir():
        shutil.rmtree(folder, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            folder.unlink()


def delete_tree(folder: Path) -> None:
    """Delete a folder and what is in it, or a file. What can be deleted is gone if something cannot.

    Raises:
        OSError: something cannot be deleted.
    """
    try:
        if is_remote(folder):
            folder.rmtree(missing_ok=True)  # pyright: ignore[reportAttributeAccessIssue]
        elif folder.is_dir():
            shutil.rmtree(folder)
        else:
            folder.unlink(missing_ok=True)
    except OSError:
        remove_tree(folder)
        raise


@contextlib.contextmanager
def at_hand(path: Path) -> Iterator[Path]:
    """The path itself, or a copy on this machine of a file or folder in a bucket, for a library that reads only files."""
    if not is_remote(path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="mupax-") as temporary:
        local = Path(temporary) / path.name
        copy(path, local)
        yield local


def links_outside(folder: Path, names: Iterable[str]) -> dict[str, Path]:
    """Return the files of a folder that are links to what is outside of it, each with its target.

    A folder of a stranger may link to any file of the user's. Links into the cache of the Hugging Face hub, which has its
    files in `models--ORG--NAME/blobs`, count as inside.

    Args:
        folder: on this machine; one in a bucket has no links.
        names: of files in it.
    """
    if is_remote(folder):
        return {}
    real = folder.resolve()
    leaving = {}
    for name in names:
        target = (folder / name).resolve()
        is_of_hub = target.parent.name == "blobs" and target.parent.parent.name.startswith(
            "models--"
        )
        if not target.is_relative_to(real) and not is_of_hub:
            leaving[name] = target
    return leaving


def copy(source: Path, target: Path) -> None:
    """Copy a file, or every file below a folder; between a bucket and this machine too."""
    files = [source] if source.is_file() else [file for file in source.rglob("*") if file.is_file()]
    for file in files:
        to = target if file == source else target / file.relative_to(source).as_posix()
        if not is_remote(to):
            to.parent.mkdir(parents=True, exist_ok=True)
        with file.open("rb") as read, to.open("wb") as write:
            shutil.copyfileobj(read, write, 2**20)


def user_folder() -> Path:
    """Return the folder of the user's own settings and tuned presets: MUPAX_HOME, or `mupax` in the configuration folder."""
    if path := os.environ.get("MUPAX_HOME"):
        return Path(path).expanduser()
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "mupax"


class DiskError(MupaxFailure):
    """A disk that cannot be read or written. The text says what it would not do and how to go on."""


class JsonError(MupaxError):
    """A file that holds no JSON object. The text says which, and what is wrong with it."""


class Patience:
    """Calls what reads a disk, again with pauses where the disk has an error, and says so once.

    Args:
        note: told; a line on standard error unless given.
        seconds: how long it tries; `PATIENCE_S` unless given.
    """

    def __init__(
        self, note: Callable[[str], None] | None = None, seconds: float | None = None
    ) -> None:
        self._note = note or (lambda text: print(text, file=sys.stderr, flush=True))
        self._seconds, self._told, self._lock = (
            PATIENCE_S if seconds is None else seconds,
            False,
            threading.Lock(),
        )

    def __call__(self, read: Callable[[], T], what: str | Path) -> T:
        """What `read` returns.

        Args:
            read: may be called many times.
            what: it reads, for messages.

        Raises:
            FileNotFoundError, NotADirectoryError: there is nothing, which is no fault of the disk.
            DiskError: the disk still has an error after all that time.
        """
        until, pause = None, _PAUSES_S[0]
        while True:
            try:
                return read()
            except Exception as error:
                cause = system_error(error)
                if cause is None or isinstance(cause, ABSENT):
                    raise
                until = time.monotonic() + self._seconds if until is None else until
                if time.monotonic() + pause > until:
                    raise DiskError(
                        f"{what} cannot be read: {cause.strerror} (tried for {self._seconds:.0f} s); nothing was changed: "
                        "see to the disk, then write the same command again"
                    ) from error
                with self._lock:
                    if not self._told:
                        self._note(
                            f"{what} cannot be read: {cause.strerror}; trying again for {self._seconds:.0f} s"
                        )
                    self._told = True
            time.sleep(pause)
            pause = min(2 * pause, _PAUSES_S[1])


def system_error(error: Exception) -> OSError | None:
    """The system's error behind one of Python or tensorstore; None where it is of another kind."""
    if code := _NESTED.search(str(error)):
        return OSError(int(code[1]), os.strerror(int(code[1])))
    if isinstance(error, OSError):
        return error if error.strerror else OSError(error.errno or 0, str(error))
    return None


def status(path: Path) -> os.stat_result | None:
    """What the disk says of a path; None where nothing is there. `Path.exists` takes an unwell disk for that too."""
    try:
        return Patience()(path.stat, path)
    except ABSENT:
        return None


def names(folder: Path) -> list[str]:
    """Names of what is in a folder, in order; none where there is no folder. `Path.glob` finds nothing on an unwell disk."""
    try:
        return sorted(Patience()(lambda: [path.name for path in folder.iterdir()], folder))
    except ABSENT:
        return []


def read_bytes(path: Path) -> bytes:
    """Raises FileNotFoundError, NotADirectoryError, DiskError."""
    return Patience()(path.read_bytes, path)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        JsonError: no such file, too large, or not an object.
        DiskError: the disk cannot read it.
    """
    entry = status(path)
    if entry is None or not stat.S_ISREG(entry.st_mode):
        raise JsonError(f"{path}: no such file")
    if entry.st_size > _LARGEST_FILE:
        raise JsonError(
            f"{path}: larger than {_LARGEST_FILE // 2**20} MiB, which no JSON of a model is"
        )
    try:
        return json_object(read_bytes(path), str(path))
    except ABSENT as error:
        raise JsonError(f"{path}: no such file") from error


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all, also where the power goes.

    Raises:
        DiskError: the disk does not take it.
    """
    temporary = hidden_beside(path, ".partial")
    try:
        content = content.encode() if isinstance(content, str) else content
        # An object is there when all of it is; a pipe or /dev/stdout has nothing to be replaced.
        if is_remote(path) or (path.exists() and not path.is_file()):
            path.write_bytes(content)
            return
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise DiskError(f"{path} cannot be written: {error.strerror or error}") from error


def hidden_beside(path: Path, ending: str) -> Path:
    """Return a hidden name beside a file, for what becomes the file when it is whole.

    Args:
        ending: of the hidden name. Where its name and the ending are too long for a disk, a digest stands for the name.
    """
    name = f".{path.name}{ending}"
    if len(os.fsencode(name)) > _LONGEST_NAME:
        name = f".{hashlib.sha256(os.fsencode(path.name)).hexdigest()[:32]}{ending}"
    return path.with_name(name)


def sync_folder(folder: Path) -> None:
    """Put a folder's list of names on the disk."""
    if is_remote(folder):
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def json_object(content: bytes, what: str) -> dict[str, Any]:
    """A JSON object whose numbers are finite and have a bounded number of digits.

    Args:
        content: of a file or line.
        what: it is, for messages.

    Raises:
        JsonError: it is none.
    """
    try:
        value = json.loads(content, parse_int=_whole, parse_float=_real, parse_constant=_constant)
    except RecursionError as error:
        raise JsonError(f"{what}: not JSON that can be read: nested too deep") from error
    except ValueError as error:
        raise JsonError(f"{what}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise JsonError(f"{what}: not a JSON object")
    if nested_deeper(value, DEEPEST):
        raise JsonError(f"{what}: not JSON that can be read: nested deeper than {DEEPEST} levels")
    return value


def nested_deeper(value: Any, levels: int) -> bool:
    """Return whether lists and objects lie in one another more than so many levels deep.

    Args:
        value: as JSON or YAML has it.
        levels: the most that are not too many.
    """
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(levels):
        inner: list[Any] = []
        for container in level:
            members = container.values() if isinstance(container, dict) else container
            inner.extend(member for member in members if isinstance(member, dict | list))
        if not inner:
            return False
        level = inner
    return True


def _whole(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _real(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise ValueError(f"the number {digits[:_DIGITS]} is beyond all that can be stored")
    return number


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def shown(value: Any) -> str:
    """A value in a message: short, and without characters that a terminal would obey."""
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
