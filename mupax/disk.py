"""Files and folders on this machine or in a bucket (gs://): paths, reading with retries, writing.

A read that fails is tried again for half a minute, so that a slow disk is not taken for damage.
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

from mupax import MupaxError, MupaxFailure

ADDRESS = re.compile(r"(?:\w+:)?([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
"""Beginning of an address, such as `gs://`. A prefix such as `text:` may stand before it."""

_PLAIN = re.compile(r"[\w./=,+@ -]*", re.ASCII)
"""Pattern of a path that orbax and tensorstore take unchanged."""
_PATTERN = re.compile(r"[#?\[\]*]")
"""Characters that a path in a bucket must not have. `gs://bucket/*` would name every run there."""
_OPEN_FOLDERS = Path("/proc/self/fd")
"""Folder in which Linux lists this process's open files and folders by file descriptor."""
_FIRST_NUMBER = 300
"""Lowest file descriptor that `_stand_in` gives a folder, far above those of the system."""
_NUMBERS = 600
"""Number of file descriptors for `_stand_in`. They stay below 1,024, a process's usual limit."""
_LINK = "plainly-named"
"""Name of the symbolic link that `_stand_in` makes on systems without /proc."""
_STAND_IN = re.compile(rf"(?:{_OPEN_FOLDERS}/\d+|/[^\s\"']*/{_LINK})/")
"""Pattern of a folder that `_stand_in` made, in the text of a message."""

PATIENCE_S = 30.0
"""Seconds for which a failed read is tried again."""
_PAUSES_S = (0.1, 5.0)
"""First and longest pause between two tries. Each pause is twice the one before."""
_LARGEST_FILE = 64 * 2**20
"""Maximum size of a JSON file, in bytes."""
DEEPEST = 100
"""Maximum nesting of lists and objects in a JSON or YAML file. Python reads them recursively."""
_LONGEST_NAME = 255
"""Maximum length of a file's name in bytes, on every common disk."""
_DIGITS = 60
"""Maximum number of digits of an integer in a JSON file. Python cannot convert very long ones."""
_NESTED = re.compile(r"os_error_code='(\d+)'")
"""Pattern of the system's error number in a message of tensorstore."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a disk that is full, or of a quota or file-size limit that is reached."""
ABSENT = (FileNotFoundError, NotADirectoryError)
"""Exceptions for a file that does not exist."""

T = TypeVar("T")


class PathError(MupaxError):
    """Error about a path or address that mupax cannot use. The text says what to write instead."""


def path_of(word: str | Path) -> Path:
    """Return the path that a word of the command line means. A path is returned unchanged.

    Args:
        word: Path, in which `~` is the home folder, or address `gs://bucket/folder`.

    Raises:
        PathError: The address is no `gs://bucket/folder`, it has a character of a pattern, or the
            package for gs:// is not installed.
    """
    if not isinstance(word, str):
        return word
    match = ADDRESS.match(word)
    if match is None:
        return Path(word).expanduser()

    has_prefix = match.start(1) > 0
    is_empty = not word.removeprefix("gs://").strip("/")
    if match[1] != "gs" or has_prefix or is_empty:
        raise PathError(
            f"{word} is no gs://bucket/folder, the one kind of address that is read and written"
        )
    special = _PATTERN.search(word)
    if special is not None:
        raise PathError(
            f"{word} has {special[0]} in it, which libraries for buckets take for a pattern or a "
            "version; write a place without # ? [ ] *"
        )
    from mupax import buckets, extras

    extras.require("gcs", word, PathError)
    return buckets.path_of(word)


def is_remote(path: Path) -> bool:
    """Return True if the path is in a bucket.

    A bucket has no folders to create or rename and no locks. A file in it is written as a whole.
    """
    return not isinstance(path, Path)


@contextlib.contextmanager
def plainly_named(path: Path) -> Iterator[str]:
    """Yield a name of a path that orbax and tensorstore accept. The name is valid while entered.

    If a local path has unusual characters, its folder is replaced by a path with plain characters
    that leads to the same folder. The last part stays. Nothing on disk is renamed.

    Raises:
        OSError: The path's folder does not exist or cannot be opened.
    """
    if is_remote(path):
        yield str(path)
        return
    path = path.absolute()
    # Orbax takes brackets for a pattern, and `gs:/` anywhere for a bucket. Tensorstore takes a
    # backslash for a slash, and refuses bytes that are not UTF-8. Both resolve `..` without
    # following links.
    if _PLAIN.fullmatch(str(path)) and ".." not in path.parts:
        yield str(path)
        return
    with _stand_in(path.parent) as folder:
        yield f"{folder}/{path.name}"


def lasting_name(folder: Path) -> Path:
    """Return a path to an existing folder that storage libraries accept until the process ends.

    If the folder's own path has unusual characters, the result is another path to the folder with
    plain characters only. A folder in a bucket is returned unchanged.
    """
    if is_remote(folder):
        return folder
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    if _PLAIN.fullmatch(folder.name):
        return Path(stack.enter_context(plainly_named(folder)))
    # The folder's own name is unusual. Naming a path inside gives the folder itself a stand-in.
    return Path(stack.enter_context(plainly_named(folder / "inside"))).parent


@contextlib.contextmanager
def _stand_in(folder: Path) -> Iterator[Path]:
    """Yield another path to a folder, with plain characters only. It is valid while entered.

    The path is that of an open file descriptor in /proc/self/fd. On systems without /proc it is a
    temporary symbolic link.
    """
    if _OPEN_FOLDERS.is_dir():
        number = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        # Orbax compares the paths of a run's processes. The number therefore follows from the
        # folder's path: the first free one from `start` on.
        start = _FIRST_NUMBER + zlib.crc32(os.fsencode(folder)) % _NUMBERS
        with contextlib.suppress(OSError):  # the process may be limited to lower file numbers
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
    """Return a library's message without the folders that `plainly_named` put into paths."""
    return _STAND_IN.sub("", text)


def storage_url(name: str) -> str:
    """Return the percent-encoded URL by which tensorstore opens a path.

    Args:
        name: Name of the path, as `plainly_named` yields it.
    """
    if "://" not in name:
        return f"file://{urllib.parse.quote(name)}"
    scheme, _, path = name.partition("://")
    return f"{scheme}://{urllib.parse.quote(path)}"


def remove_tree(folder: Path) -> None:
    """Delete a file, or a folder with its contents. Errors are ignored: what remains is left."""
    if is_remote(folder):
        with contextlib.suppress(OSError):
            folder.rmtree(missing_ok=True)  # pyright: ignore[reportAttributeAccessIssue]
    elif folder.is_dir():
        shutil.rmtree(folder, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            folder.unlink()


def delete_tree(folder: Path) -> None:
    """Delete a file, or a folder with its contents. It may be absent.

    If something cannot be deleted, the rest is deleted before the error is raised.

    Raises:
        OSError: Something cannot be deleted.
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


def links_outside(folder: Path, names: Iterable[str]) -> dict[str, Path]:
    """Return the files of a folder that are links to a file outside of the folder, with targets.

    Links into the cache of the Hugging Face hub do not count as outside.

    Args:
        folder: Folder that may be a stranger's, with links to the user's files. A folder in a
            bucket has no links.
        names: Names of the files to look at, relative to the folder.
    """
    if is_remote(folder):
        return {}
    real_folder = folder.resolve()
    outside: dict[str, Path] = {}
    for name in names:
        target = (folder / name).resolve()
        # The hub's cache keeps files in models--ORG--NAME/blobs and links to them.
        cache_folder = target.parent.parent.name
        is_in_cache = target.parent.name == "blobs" and cache_folder.startswith("models--")
        if not target.is_relative_to(real_folder) and not is_in_cache:
            outside[name] = target
    return outside


def copy(source: Path, target: Path) -> None:
    """Copy a file, or every file below a folder. Either path may be in a bucket.

    Missing folders are made, and existing files are overwritten. Empty folders are left out.

    Args:
        target: Path of the copy itself, and not a folder to copy into.

    Raises:
        OSError: There is no source, or a folder or file cannot be read or written.
    """
    files = [source] if source.is_file() else _files_below(source)
    for file in files:
        destination = target if file == source else target / file.relative_to(source).as_posix()
        if not is_remote(destination):
            destination.parent.mkdir(parents=True, exist_ok=True)
        with file.open("rb") as reader, destination.open("wb") as writer:
            shutil.copyfileobj(reader, writer, 2**20)


def _files_below(folder: Path) -> list[Path]:
    """Return every file below a folder, in its subfolders too.

    Raises:
        OSError: There is no such folder, or it or a subfolder cannot be read.
    """
    files = []
    if is_remote(folder):
        files = [file for file in folder.rglob("*") if file.is_file()]
        # A bucket has no empty folders.
        if not files:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
        return files

    def stop(error: OSError) -> NoReturn:
        raise error

    # Not `rglob`, which leaves out a folder that cannot be read.
    for parent, _, names in os.walk(folder, onerror=stop):
        paths = [Path(parent, name) for name in names]
        files += [path for path in paths if path.is_file()]
    return files


def user_folder() -> Path:
    """Return the folder of the user's settings and tuned presets.

    This is MUPAX_HOME if it is set, otherwise `mupax` in XDG_CONFIG_HOME or ~/.config. The folder
    is not created.
    """
    home = os.environ.get("MUPAX_HOME")
    if home:
        return Path(home).expanduser()
    config_home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(config_home) / "mupax"


class DiskError(MupaxFailure):
    """A failure to read or write a disk. The text names the path and the system's error."""


class JsonError(MupaxError):
    """A file that holds no valid JSON object. The text names the file and what is wrong with it."""


class Patience:
    """Callable that reads from a disk and tries again, with pauses, if the disk has an error.

    Args:
        note: Function that prints a line for the user. It is called once, at the first error. The
            default prints on standard error.
        seconds: Time for which a read is tried again. The default is `PATIENCE_S`.
    """

    def __init__(
        self, note: Callable[[str], None] | None = None, seconds: float | None = None
    ) -> None:
        self._note = note or _print_on_stderr
        self._seconds = PATIENCE_S if seconds is None else seconds
        self._was_noted = False
        self._lock = threading.Lock()

    def __call__(self, read: Callable[[], T], target: str | Path) -> T:
        """Call `read` until it succeeds, and return its value.

        Args:
            read: Function that may be called many times.
            target: Noun or path that a message names as unreadable.

        Raises:
            FileNotFoundError, NotADirectoryError: The file does not exist. This is not retried.
            DiskError: The disk still has an error after the last try.
            Exception: Any error of `read` that is no error of the system. This is not retried.
        """
        deadline: float | None = None
        pause = _PAUSES_S[0]
        while True:
            try:
                return read()
            except Exception as error:
                cause = system_error(error)
                if cause is None or isinstance(cause, ABSENT):
                    raise
                if deadline is None:
                    deadline = time.monotonic() + self._seconds
                if time.monotonic() + pause > deadline:
                    raise DiskError(
                        f"{target} cannot be read: {cause.strerror} (tried for {self._seconds:.0f} "
                        "s); nothing was changed: see to the disk, then write the same command "
                        "again"
                    ) from error
                self._note_once(f"{target} cannot be read: {cause.strerror}")
            time.sleep(pause)
            pause = min(2 * pause, _PAUSES_S[1])

    def _note_once(self, problem: str) -> None:
        """Print a problem and the time for which it is retried, unless one was printed before."""
        # Several threads may read through one object.
        with self._lock:
            if not self._was_noted:
                self._note(f"{problem}; trying again for {self._seconds:.0f} s")
            self._was_noted = True


def _print_on_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def system_error(error: Exception) -> OSError | None:
    """Return the system's error behind an exception of Python or tensorstore, or `None`.

    The returned error has a text (`strerror`).
    """
    code = _NESTED.search(str(error))
    if code is not None:
        number = int(code[1])
        return OSError(number, os.strerror(number))
    if not isinstance(error, OSError):
        return None
    if error.strerror:
        return error
    return OSError(error.errno or 0, str(error))


def status(path: Path) -> os.stat_result | None:
    """Return the `stat` result of a file or folder, or `None` if it does not exist.

    Disk errors are retried for 30 seconds.

    Raises:
        DiskError: The disk cannot be read.
    """
    # `Path.exists` may hide a disk error.
    try:
        return Patience()(path.stat, path)
    except ABSENT:
        return None


def names(folder: Path) -> list[str]:
    """Return the sorted names of a folder's entries, or `[]` if there is no such folder.

    Disk errors are retried for 30 seconds.

    Raises:
        DiskError: The disk cannot be read.
    """
    # `Path.glob` may hide a disk error.
    try:
        return sorted(Patience()(lambda: [path.name for path in folder.iterdir()], folder))
    except ABSENT:
        return []


def read_bytes(path: Path) -> bytes:
    """Read a file. Disk errors are retried for 30 seconds.

    Raises:
        FileNotFoundError, NotADirectoryError: The file does not exist.
        DiskError: The disk cannot be read.
    """
    return Patience()(path.read_bytes, path)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file, with the checks of `json_object`.

    Disk errors are retried for 30 seconds.

    Raises:
        JsonError: The path is no regular file, the file is larger than 64 MiB, or it holds no valid
            object.
        DiskError: The disk cannot be read.
    """
    entry = status(path)
    # Reading a pipe or a device might never end.
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
    """Write a file atomically: even after a power failure it is complete, old or new.

    Text is encoded as UTF-8. An existing file is replaced. The folder must exist. A file in a
    bucket, and a pipe or device such as /dev/stdout, are written directly.

    Raises:
        DiskError: The disk cannot be written.
    """
    temporary = hidden_beside(path, ".partial")
    try:
        if isinstance(content, str):
            content = content.encode()
        # A bucket writes whole objects itself. A pipe or /dev/stdout cannot be replaced by a file.
        if is_remote(path) or (path.exists() and not path.is_file()):
            path.write_bytes(content)
            return
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            # Before the rename, or a power failure could leave the new name without content.
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise DiskError(f"{path} cannot be written: {error.strerror or error}") from error


def hidden_beside(path: Path, ending: str) -> Path:
    """Return the path of a hidden temporary file in the same folder: `.NAME` plus the ending.

    A digest replaces the name if the result would be longer than 255 bytes. Nothing is created.

    Args:
        ending: Suffix of the hidden name, such as `.partial`.
    """
    # Most file systems limit a name to 255 bytes.
    name = f".{path.name}{ending}"
    if len(os.fsencode(name)) > _LONGEST_NAME:
        name = f".{hashlib.sha256(os.fsencode(path.name)).hexdigest()[:32]}{ending}"
    return path.with_name(name)


def sync_folder(folder: Path) -> None:
    """Force a folder's list of entries to the disk (`fsync`), after a rename for example.

    Do nothing for a folder in a bucket.
    """
    if is_remote(folder):
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def json_text(value: Any, indent: int | None = None) -> str:
    """Return a value as strict JSON, with null in place of every number that is not finite.

    Args:
        value: Value of plain types, as `json.dumps` takes it.
        indent: Spaces per level. By default all is on one line.
    """
    # Python would write NaN and Infinity, words that are no JSON and that `json_object` refuses.
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    """Return a value with `None` in place of every float in it that is not finite."""
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def json_object(content: bytes, name: str) -> dict[str, Any]:
    """Parse a JSON object from an untrusted source, with limits on its nesting and numbers.

    Args:
        name: Name of the content, with which a message begins.

    Raises:
        JsonError: The content is no JSON object, is nested deeper than `DEEPEST`, or has an
            infinite number, NaN or an integer of more than 60 digits.
    """
    try:
        value = json.loads(content, parse_int=_integer, parse_float=_real, parse_constant=_constant)
    except RecursionError as error:
        raise JsonError(f"{name}: not JSON that can be read: nested too deep") from error
    except ValueError as error:
        raise JsonError(f"{name}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise JsonError(f"{name}: not a JSON object")
    if nested_deeper(value, DEEPEST):
        raise JsonError(f"{name}: not JSON that can be read: nested deeper than {DEEPEST} levels")
    return value


def nested_deeper(value: Any, levels: int) -> bool:
    """Return True if lists and dicts are nested more than `levels` deep.

    Args:
        value: Value that a parser of JSON or YAML returned.
        levels: Number of levels that is still allowed. A list without lists has one level.
    """
    # A loop over levels, because recursion would fail on the values that this check is for.
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


def _integer(digits: str) -> int:
    """Convert the digits of a JSON integer. Raise ValueError if there are too many."""
    if len(digits) > _DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _real(digits: str) -> float:
    """Convert a JSON number with a fraction or exponent. Raise ValueError if it overflows."""
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"the number {digits[:_DIGITS]} is beyond all that can be stored")
    return number


def _constant(name: str) -> NoReturn:
    """Raise ValueError for NaN, Infinity or -Infinity, which Python's JSON parser would accept."""
    raise ValueError(f"{name} is no number")


def shown(value: Any) -> str:
    """Return a value as ASCII text for a message, cut to 60 characters."""
    text = ascii(value)
    if len(text) <= 60:
        return text
    return f"{text[:57]}..."
