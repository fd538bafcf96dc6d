"""Where a user's words lead: to folders of this machine as pathlib has them, or to a bucket (gs://) with the same methods."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from mupax.errors import MupaxError

ADDRESS = re.compile(r"(?:\w+:)?([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
"""The beginning of an address; text:, images: and measured: may stand before it."""


class PathError(MupaxError):
    """A place that cannot be read or written. The text says what to write instead."""


def path_of(word: str | Path) -> Path:
    """The path that a user's word means; `~` is the home folder. A path is what it is.

    Raises:
        PathError: an address of a kind that is not read here, or gs:// without the package for it.
    """
    if not isinstance(word, str):
        return word
    if not (match := ADDRESS.match(word)):
        return Path(word).expanduser()
    if match[1] != "gs" or match.start(1) or not word.removeprefix("gs://").strip("/"):
        raise PathError(f"{word} is no gs://bucket/folder, the one kind of address that is read and written")
    if importlib.util.find_spec("gcsfs") is None:
        raise PathError(f"{word} needs the package gcsfs; run `pip install 'mupax[gcs]'`")
    from mupax import buckets

    return buckets.path_of(word)


def is_remote(path: Path) -> bool:
    """Whether the path is in a bucket: no folders to make or rename, no locks, files written whole or not at all."""
    return not isinstance(path, Path)


def url(path: Path) -> str:
    """The path as tensorstore has it."""
    return str(path) if is_remote(path) else f"file://{path.absolute()}"


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


@contextlib.contextmanager
def delivered(folder: Path) -> Iterator[Path]:
    """A folder to write into: the one asked for, or one on this machine that is copied to the bucket in the end."""
    if not is_remote(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="mupax-") as temporary:
        local = Path(temporary) / folder.name
        local.mkdir()
        yield local
        copy(local, folder)


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
