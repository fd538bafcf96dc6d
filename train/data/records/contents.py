"""Digests of the contents of files. A file is read again only if it may have changed.

    MUPAX_DATA/contents/NAME.jsonl   a line per file: path, size, times, inode, digest of content

A file may change with the same size and modification time (`cp -p`, `rsync -t`, `touch -r`, or an
editor within a tick of the clock). A program cannot set the change time, so change time and inode
are compared, too. If one of them differs, the content is read. So a copy or a `touch` does not
change the digest.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from mupax import disk
from mupax.disk import is_remote
from mupax.terminal import counted
from mupax.train.data import cache
from mupax.train.data.interface import DataError, ReadError, unreadable

_BLOCK_BYTES = 1 << 20
_THREADS = 4
_TICK_NS = 2 * 10**9
"""Longest tick of a file system's clock in nanoseconds. Times within one tick look equal."""
_NOTED_BYTES = 1 << 30
"""Number of bytes to read from which on the user is told that reading takes time."""

Stamp = list[int]
"""Size in bytes, modification time, change time (both in nanoseconds) and inode of a file.

A file with an equal stamp is assumed to be unchanged.
"""


def digest(files: Sequence[Path], note: cache.Note) -> str:
    """Return a digest of the paths and contents of files.

    A file is read only if its size, times or inode have changed since the last call. The digests of
    contents are cached on disk.

    Args:
        files: Files in an order that is always the same. A file in a bucket is represented by its
            size and time.
        note: Function that prints a line for the user if at least 1 GiB is read.

    Raises:
        DataError: A file is missing or may not be read.
        ReadError: The disk or the bucket does not answer.
    """
    local = [path for path in files if not is_remote(path)]
    names = [str(path.absolute()) for path in local]
    record = cache.root() / "contents" / f"{cache.digest(*names)}.jsonl"
    recorded = _read(record)
    stamps = {name: stamp(path) for name, path in zip(names, local, strict=True)}
    current = {}
    for name, (recorded_stamp, content) in recorded.items():
        if stamps.get(name) == recorded_stamp:
            current[name] = content

    changed = [name for name in names if name not in current]
    changed_bytes = sum(stamps[name][0] for name in changed)
    if changed_bytes >= _NOTED_BYTES:
        note(f"reading {counted(len(changed), 'file')}, to see whether they have changed")
    if changed:
        with ThreadPool(min(_THREADS, len(changed))) as pool:
            digests = pool.map(_content_digest, changed, chunksize=8)
        current |= dict(zip(changed, digests, strict=True))
        # Files changed within the last clock tick are not recorded: another change in the same tick
        # would leave the stamp equal.
        settled = time.time_ns() - _TICK_NS
        entries = []
        for name in names:
            if stamps[name][2] < settled:
                entries.append((name, stamps[name], current[name]))
        _write(record, entries)

    parts = []
    for path in files:
        name = str(path.absolute())
        content = _remote_mark(path) if is_remote(path) else current[name]
        parts += [name, content]
    return cache.digest(*parts)


def stamp(path: Path) -> Stamp:
    """Return the size, modification time, change time and inode of a file (`Stamp`).

    If the stamp is not the same as before, the file may have changed.

    Raises:
        DataError: The file has vanished since it was listed, or may not be read.
        ReadError: The disk or the bucket does not answer.
    """
    stat = _status(path)
    return [
        stat.st_size,
        stat.st_mtime_ns,
        getattr(stat, "st_ctime_ns", 0),
        getattr(stat, "st_ino", 0),
    ]


def _remote_mark(path: Path) -> str:
    """Return the size and modification time of a file in a bucket as "SIZE:TIME".

    This text stands for a digest of the content, which would have to be downloaded.
    """
    stat = _status(path)
    return f"{stat.st_size}:{stat.st_mtime_ns}"


def _status(path: Path) -> Any:
    """Return the `stat` result of a file. Raise `DataError` or `ReadError` if there is none."""
    try:
        return path.stat()
    except OSError as error:
        raise _unreadable(str(path), error) from error


def _unreadable(name: str, error: OSError) -> DataError | ReadError:
    """Return the error for a listed file that cannot be read."""
    advice = "see to the file or its disk, then write the same command again"
    if isinstance(error, disk.ABSENT):  # it was there when the files were listed
        advice = "write the same command again when nothing moves or deletes the files"
    return unreadable(f"cannot read {name}: {error.strerror or error}; {advice}", error)


def _content_digest(name: str) -> str:
    """Return the BLAKE2 digest of a file's content.

    Raises:
        DataError: The file is missing or may not be read.
        ReadError: The disk does not answer.
    """
    total = hashlib.blake2b(digest_size=16)
    try:
        with open(name, "rb") as file:
            while block := file.read(_BLOCK_BYTES):
                total.update(block)
    except OSError as error:  # a file may vanish between listing and reading
        raise _unreadable(name, error) from error
    return total.hexdigest()


def _read(record: Path) -> dict[str, tuple[Stamp, str]]:
    """Return the recorded stamp and content digest of each file, by its path.

    Reading stops at the first damaged line. The result is empty if there is no record.

    Args:
        record: JSON lines that an earlier call of `digest` wrote.
    """
    recorded: dict[str, tuple[Stamp, str]] = {}
    with contextlib.suppress(OSError, disk.JsonError, KeyError), record.open("rb") as file:
        for line in file:
            fields = disk.json_object(line, "a line")
            recorded[fields["path"]] = (fields["stamp"], fields["content"])
    return recorded


def _write(record: Path, entries: Sequence[tuple[str, Stamp, str]]) -> None:
    """Write the stamps and content digests of files for the next run. Ignore errors of writing.

    Args:
        record: JSON lines file in the cache, which is replaced by the entries.
        entries: Path, stamp and content digest of each file.
    """
    with contextlib.suppress(DataError, OSError):
        cache.folder(record.parent)
        # Write to a temporary name, so that no other process reads half a record.
        part = record.with_name(f"{record.name}.{os.getpid()}.part")
        with part.open("w") as file:
            for name, file_stamp, content in entries:
                line = json.dumps({"path": name, "stamp": file_stamp, "content": content})
                file.write(f"{line}\n")
        part.replace(record)
