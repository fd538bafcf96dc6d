"""Where a user's words lead: to folders of this machine as pathlib has them, or to a bucket (gs://) with the same methods."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import urllib.parse
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from mupax.errors import MupaxError

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
        raise PathError(f"{word} is no gs://bucket/folder, the one kind of address that is read and written")
    if taken := _PATTERN.search(word):
        raise PathError(
            f"{word} has {taken[0]} in it, which libraries for buckets take for a pattern or a version; write a place without "
            "# ? [ ] *"
        )
    from mupax import buckets, extras

    extras.require("gcs", word, PathError)
    return buckets.path_of(word)


def is_remote(path: Path) -> bool:
    """Whether the path is in a bucket: no folders to make or rename, no locks, files written whole or not at all."""
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
        is_of_hub = target.parent.name == "blobs" and target.parent.parent.name.startswith("models--")
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
