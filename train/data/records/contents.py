"""Digests of files' contents, read again only where a file may have changed.

A file may change with the same size and modification time (`cp -p`, `rsync -t`, `touch -r`, an editor within a tick of the clock).
The change time and the inode tell: a program cannot set the change time. Where one of these differs from what was recorded,
the content is read, so that a copy or a `touch` alone names the same content.

    MUPAX_DATA/contents/NAME.jsonl   a line per file: path, size, times and inode, and the digest of its content
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

from mupax import disk
from mupax.disk import is_remote
from mupax.train.data import cache
from mupax.train.data.interface import DataError

_BLOCK_BYTES = 1 << 20
_THREADS = 4
_TICK_NS = 2 * 10**9
_NOTED_BYTES = 1 << 30
"""Of content that is read, from which on a line says so."""

Stamp = list[int]
"""Size, modification time, change time and inode."""


def digest(files: Sequence[Path], note: cache.Note) -> str:
    """Return a digest of paths and contents.

    Args:
        files: in an order that is always the same. Of one in a bucket, the size and time stand for the content.
        note: told if much is read.

    Raises:
        DataError: a file cannot be read.
    """
    local = [path for path in files if not is_remote(path)]
    names = [str(path.absolute()) for path in local]
    record = cache.root() / "contents" / f"{cache.digest(*names)}.jsonl"
    recorded = _read(record)
    stamps = {name: stamp(path) for name, path in zip(names, local, strict=True)}
    current = {
        name: content for name, (before, content) in recorded.items() if stamps.get(name) == before
    }
    changed = [name for name in names if name not in current]
    if sum(stamps[name][0] for name in changed) >= _NOTED_BYTES:
        note(f"reading {len(changed)} files, to see whether they have changed")
    if changed:
        with ThreadPool(min(_THREADS, len(changed))) as pool:
            current |= dict(
                zip(changed, pool.map(_content_digest, changed, chunksize=8), strict=True)
            )
        # A file that is changed again within a tick of the clock would keep its stamp.
        settled = time.time_ns() - _TICK_NS
        entries = [
            (name, stamps[name], current[name]) for name in names if stamps[name][2] < settled
        ]
        _write(record, entries)
    parts = []
    for path in files:
        name = str(path.absolute())
        parts += [name, _remote_mark(path) if is_remote(path) else current[name]]
    return cache.digest(*parts)


def stamp(path: Path) -> Stamp:
    """Return what tells that a file may have changed, without reading it."""
    stat = path.stat()
    return [
        stat.st_size,
        stat.st_mtime_ns,
        getattr(stat, "st_ctime_ns", 0),
        getattr(stat, "st_ino", 0),
    ]


def _remote_mark(path: Path) -> str:
    stat = path.stat()
    return f"{stat.st_size}:{stat.st_mtime_ns}"


def _content_digest(name: str) -> str:
    total = hashlib.blake2b(digest_size=16)
    try:
        with open(name, "rb") as file:
            while block := file.read(_BLOCK_BYTES):
                total.update(block)
    except OSError as error:
        raise DataError(f"cannot read {name}: {error.strerror}") from error
    return total.hexdigest()


def _read(record: Path) -> dict[str, tuple[Stamp, str]]:
    """Return the recorded stamp and digest of each file; nothing of what is damaged or missing."""
    recorded: dict[str, tuple[Stamp, str]] = {}
    with contextlib.suppress(OSError, disk.JsonError, KeyError), record.open("rb") as file:
        for line in file:
            fields = disk.json_object(line, "a line")
            recorded[fields["path"]] = (fields["stamp"], fields["content"])
    return recorded


def _write(record: Path, entries: Sequence[tuple[str, Stamp, str]]) -> None:
    """Record the digests, unless the cache is one that may only be read."""
    with contextlib.suppress(DataError, OSError):
        cache.folder(record.parent)
        part = record.with_name(f"{record.name}.{os.getpid()}.part")
        with part.open("w") as file:
            for name, file_stamp, content in entries:
                file.write(
                    json.dumps({"path": name, "stamp": file_stamp, "content": content}) + "\n"
                )
        part.replace(record)
