"""Packed text that grows while it is read. A corpus is divided into lanes, each a share of its files in a fixed order.

    FOLDER/train-3-of-8.bin      ids of the lane's documents in order, each document ended by the separator
    FOLDER/train-3-of-8.jsonl    a line after every step: how far it is, and where its documents go on
    FOLDER/train-3-of-8.lock     held by the process that does a step

What a lane holds is a function of its documents alone: who tokenizes it, when, and after how many kills makes no difference.
"""

from __future__ import annotations

import bisect
import contextlib
import fcntl
import json
import os
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from mupax import disk
from mupax.train.data import cache
from mupax.train.data.interface import DataError, reading
from mupax.train.data.text import packing, shares
from mupax.train.data.text.tokenizer import Encoder

_FIRST_BYTES, _STEP_BYTES = 1 << 18, 1 << 22
"""Of text in a lane's first steps, so that training begins soon, and in later ones, which are an eighth of what is done."""
POLL_S = 0.05
"""How often it is looked whether another process is done."""
_NOTE_SECONDS = 10.0

Chunk = list[tuple[bytes | np.ndarray, bool]]
"""(Text as bytes or ids as an array, whether a document ends with it) of some documents."""


class Documents(Protocol):
    """The documents of a lane, in order."""

    def after(self, position: Any) -> Iterator[tuple[Chunk, Any]]:
        """Chunks from a position on (None: from the first), each with the position after it, which JSON can hold."""
        ...


class Step(NamedTuple):
    """A line of progress: what the lane has after a step."""

    tokens: int
    text_bytes: int
    crc: int
    """Of the step's ids as bytes."""
    ended: bool
    """Whether there are no more documents."""
    position: Any
    quoted: dict[str, int] | None = None
    """How often each special token stands in the texts of this step; None where an older version did it."""


class StreamShard:
    """One shard of a corpus: its share of the files, in a fixed order, and the tokens that are made of them so far.

    Args:
        path: of its files, without their endings; its folder is there.
        documents: that it is made of.
        encoder: tokenizes them.
    """

    def __init__(self, path: Path, documents: Documents, encoder: Encoder) -> None:
        self._bin, self._lines, self._lock = (
            path.with_name(f"{path.name}.{end}") for end in ("bin", "jsonl", "lock")
        )
        self._documents, self._encoder = documents, encoder
        self._dtype = np.dtype(packing.id_type(encoder))
        self._steps: list[Step] = []
        self._intact: list[bool] = []
        self._at = 0
        self._reader: Iterator[tuple[Chunk, Any]] | None = None
        self._reader_at: Any = None
        self._mutex = threading.Lock()

    @property
    def tokens(self) -> int:
        """How many there are by now, as far as this process knows."""
        return self._steps[-1].tokens if self._steps else 0

    @property
    def ended(self) -> bool:
        """Whether no more will come."""
        return bool(self._steps) and self._steps[-1].ended

    def first(self, tokens: int, note: cache.Note) -> packing.PackedCorpus:
        """The lane's beginning up to the step that has so many tokens, or all of it.

        Args:
            tokens: at least.
            note: told what takes long.

        Raises:
            DataError, ReadError: as `until`.
        """
        self.until(tokens, note)
        steps = self._steps[
            : bisect.bisect_left(self._steps, tokens, key=lambda step: step.tokens) + 1
        ]
        digest = cache.digest(*(f"{step.tokens} {step.crc}" for step in steps))
        quoted = sum((Counter(step.quoted or {}) for step in steps), Counter())
        return packing.PackedCorpus(
            self.read(0, steps[-1].tokens), steps[-1].text_bytes, digest, dict(quoted)
        )

    def until(self, tokens: int, note: cache.Note) -> None:
        """Returns when there are so many tokens, or all that there will be.

        Args:
            tokens: from the lane's first.
            note: told what takes long.

        Raises:
            DataError: a document cannot be read, or the cache not be written.
            ReadError: what is read is elsewhere, and does not answer.
        """
        noted = time.monotonic()
        while self.tokens < tokens and not self.ended:
            if not self.grow():
                time.sleep(POLL_S)
            if time.monotonic() - noted > _NOTE_SECONDS:
                noted = time.monotonic()
                note(
                    f"tokenizing {self._bin.stem}: {self.tokens:,} of the {tokens:,} tokens that training waits for"
                )

    def grow(self) -> bool:
        """Takes what other processes have done, or else does one more step; no where another one is doing that."""
        try:
            with self._mutex, self._lock.open("a") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    self._refresh()
                    return False
                if not self._refresh() and not self.ended:
                    self._pack()
                return True
        except OSError as error:
            raise DataError(
                f"cannot write {self._bin}: {error.strerror or error}. Make room (what is done is kept), or set MUPAX_DATA "
                "to a folder on a disk of this machine"
            ) from error

    def read(self, start: int, stop: int) -> np.ndarray:
        """Ids [start, stop), as far as they are there.

        Args:
            start, stop: within the lane's tokens.

        Raises:
            DataError: the file is not what was written.
        """
        first = bisect.bisect_right(self._steps, start, key=lambda step: step.tokens)
        for i in range(
            first,
            min(
                len(self._steps),
                bisect.bisect_left(self._steps, stop, key=lambda step: step.tokens) + 1,
            ),
        ):
            if not self._intact[i]:
                begin = self._steps[i - 1].tokens if i else 0
                self._intact[i] = (
                    zlib.crc32(self._ids(begin, self._steps[i].tokens).tobytes())
                    == self._steps[i].crc
                )
                if not self._intact[i]:
                    raise DataError(
                        f"{self._bin} is not what was written; delete {self._lines}, and it is made again"
                    )
        return self._ids(start, stop)

    def _ids(self, start: int, stop: int) -> np.ndarray:
        return np.fromfile(
            self._bin, self._dtype, stop - start, offset=start * self._dtype.itemsize
        )

    def _refresh(self) -> bool:
        """Takes in the lines that are new, as far as the file has their tokens; whether there are some."""
        if not self._lines.exists():
            self._steps, self._intact, self._at = [], [], 0
            return False
        before = len(self._steps)
        size = self._bin.stat().st_size // self._dtype.itemsize if self._bin.exists() else 0
        with self._lines.open("rb") as lines:
            lines.seek(self._at)
            for line in lines:
                with contextlib.suppress(disk.JsonError, TypeError):
                    step = Step(**disk.json_object(line, "a line"))
                    if line.endswith(b"\n") and self.tokens <= step.tokens <= size:
                        self._intact.append(False)
                        self._steps.append(step)
                        self._at += len(line)
                        continue
                break
        return len(self._steps) > before

    def _pack(self) -> None:
        """Does the step after the last, the lock held."""
        done = self._steps[-1] if self._steps else Step(0, 0, 0, False, None)
        position = done.position
        if self._reader is None or self._reader_at != position:
            self._reader = self._documents.after(position)
        reader, self._reader = self._reader, None  # one that fails is not asked again
        size = min(max(done.text_bytes // 8, _FIRST_BYTES), _STEP_BYTES)
        documents, total, ended = [], 0, False
        while total < size and not ended:
            with reading():
                chunk, position = next(reader, (None, position))
            ended = chunk is None
            documents += shares.documents_of(chunk or [])
            total += sum(len(content) for content, _ in chunk or [])
        ids = np.concatenate(
            [np.zeros(0, self._dtype), *shares.encoded(documents, self._encoder)]
        ).astype(self._dtype)
        tokens = done.tokens + len(ids)
        text_bytes = done.text_bytes + sum(each.text_bytes + each.ends for each in documents)
        quoted = shares.quoted(documents, self._encoder)
        step = Step(tokens, text_bytes, zlib.crc32(ids.tobytes()), ended, position, quoted)
        _write(self._bin, done.tokens * self._dtype.itemsize, ids.tobytes())
        self._at = _write(self._lines, self._at, f"{json.dumps(step._asdict())}\n".encode())
        self._intact.append(True)  # before the step: a thread that reads takes no lock
        self._steps.append(step)
        self._reader, self._reader_at = reader, position


def _write(path: Path, start: int, content: bytes) -> int:
    """Writes what the file then ends with, from byte `start` on; the size that it has then."""
    with path.open("ab") as file:
        file.truncate(start)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return start + len(content)
