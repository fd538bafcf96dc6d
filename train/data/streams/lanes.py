"""Lanes of a stream: token ids on disk that grow while they are read. A lane is a share of files.

    FOLDER/train-3-of-8.bin      ids of the lane's documents in order, each ended by the separator
    FOLDER/train-3-of-8.jsonl    one line per step of tokenizing: size and position so far
    FOLDER/train-3-of-8.lock     held by the process that does a step

The content of a lane is a function of its documents alone. It does not matter which process
tokenizes them, when, or how often processes are killed.
"""

from __future__ import annotations

import bisect
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
from mupax.train.data.interface import DataError, reading, unreadable
from mupax.train.data.text import packing, shares
from mupax.train.data.text.tokenizer import Encoder

_FIRST_BYTES = 1 << 18
"""Smallest size of a tokenizing step, in bytes of text. First steps are small to begin soon."""
_STEP_BYTES = 1 << 22
"""Largest size of a tokenizing step, in bytes of text. A step is an eighth of the text so far."""
POLL_S = 0.05
"""Seconds to wait before looking again at a lane that another process tokenizes."""
_NOTE_SECONDS = 10.0

Chunk = list[tuple[bytes | np.ndarray, bool]]
"""List of documents or pieces of documents.

Each is a pair: the text as bytes or the ids as an array, and True if a document ends with it.
"""


class Documents(Protocol):
    """Documents of a lane (a share of a corpus's files), in a fixed order."""

    def after(self, position: Any) -> Iterator[tuple[Chunk, Any]]:
        """Yield lists of the documents after a position, each with the position at its end.

        Args:
            position: Position that an earlier call yielded. None begins with the first document.
                Positions are values that JSON can hold.
        """
        ...


class Step(NamedTuple):
    """Record of one step of tokenizing a lane, which is a line of the lane's .jsonl file."""

    tokens: int
    """Number of tokens of the lane so far."""
    text_bytes: int
    """Bytes of text of the lane so far."""
    crc: int
    """CRC-32 of the bytes of this step's ids."""
    ended: bool
    """True if there are no more documents."""
    position: Any
    """Position after this step's documents (`Documents.after`), from which the next step begins."""
    quoted: dict[str, int] | None = None
    """How often this step's texts contain each special token. None if an older version did it."""


class StreamShard:
    """Lane of a stream: the documents of a share of its files, and the tokens made of them so far.

    Several threads and several processes may read and tokenize a lane at once.

    Args:
        path: Path of the lane's files without their suffixes, in a folder that exists.
    """

    def __init__(self, path: Path, documents: Documents, encoder: Encoder) -> None:
        self._bin = path.with_name(f"{path.name}.bin")
        self._lines = path.with_name(f"{path.name}.jsonl")
        self._lock = path.with_name(f"{path.name}.lock")
        self._documents = documents
        self._encoder = encoder
        self._dtype = np.dtype(packing.id_type(encoder))
        self._steps: list[Step] = []
        # True for each step whose ids in the file are known to have the right checksum.
        self._intact: list[bool] = []
        # Number of bytes of the .jsonl file whose lines are in `_steps`.
        self._lines_bytes = 0
        self._reader: Iterator[tuple[Chunk, Any]] | None = None
        self._reader_position: Any = None
        # Threads share the steps and the reader of this object, which the file's lock does not
        # guard.
        self._mutex = threading.Lock()

    @property
    def tokens(self) -> int:
        """Number of tokens in the steps that this process has done or read from the files."""
        return self._steps[-1].tokens if self._steps else 0

    @property
    def ended(self) -> bool:
        """True if the last step that this process has done or read was the end of the documents."""
        return bool(self._steps) and self._steps[-1].ended

    def first(self, tokens: int, note: cache.Note) -> packing.PackedCorpus:
        """Return the beginning of the lane, with at least a given number of tokens.

        It ends with the first step of tokenizing after which the lane has so many tokens. Tokens
        that are missing are waited for, or made here if no other process makes them.

        Args:
            tokens: Fewest tokens to return. A lane that ends earlier is returned completely.
            note: Function that takes one line of text about work that takes long.

        Raises:
            DataError: A document is damaged, or the cache may not be written.
            ReadError: The source of the documents or the disk of the cache does not answer, or that
                disk is full.
        """
        self.until(tokens, note)
        last = bisect.bisect_left(self._steps, tokens, key=lambda step: step.tokens)
        steps = self._steps[: last + 1]
        # The digest is made of the steps' checksums and not of the ids, so that no file is read for
        # it.
        digest = cache.digest(*(f"{step.tokens} {step.crc}" for step in steps))
        quoted = sum((Counter(step.quoted or {}) for step in steps), Counter())
        ids = self.read(0, steps[-1].tokens)
        return packing.PackedCorpus(ids, steps[-1].text_bytes, digest, dict(quoted))

    def until(self, tokens: int, note: cache.Note) -> None:
        """Wait until the lane has this many tokens or has ended. Tokenize if no other process does.

        Args:
            tokens: Number of tokens, counted from the start of the lane.
            note: Function that takes one line of text about work that takes long.

        Raises:
            DataError: A document is damaged, or the cache may not be written.
            ReadError: The source of the documents or the disk of the cache does not answer, or that
                disk is full.
        """
        noted = time.monotonic()
        while self.tokens < tokens and not self.ended:
            if not self.grow():
                time.sleep(POLL_S)
            if time.monotonic() - noted > _NOTE_SECONDS:
                noted = time.monotonic()
                note(
                    f"tokenizing {self._bin.stem}: {self.tokens:,} of the {tokens:,} tokens that "
                    "training waits for"
                )

    def grow(self) -> bool:
        """Add tokens to the lane: those that other processes have made, or else one step made here.

        Returns:
            False if another process is tokenizing a step, so that the caller should try again
            later. Otherwise True, also if the lane has ended.

        Raises:
            DataError: A document is damaged, or the cache may not be written.
            ReadError: The source of the documents or the disk of the cache does not answer, or that
                disk is full.
        """
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
            message = (
                f"cannot write {self._bin}: {error.strerror or error}. Make room (what is done is "
                "kept), or set MUPAX_DATA to a folder on a disk of this machine"
            )
            raise unreadable(message, error) from error

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return the ids from `start` to `stop` - 1 of the lane, as far as they are on disk.

        Their type is `packing.id_type` of the encoder. Nothing is tokenized. The checksum of each
        step of tokenizing is compared when the step is first read.

        Raises:
            DataError: The ids have another checksum than the ids that were written.
        """
        first = bisect.bisect_right(self._steps, start, key=lambda step: step.tokens)
        last = bisect.bisect_left(self._steps, stop, key=lambda step: step.tokens)
        for i in range(first, min(len(self._steps), last + 1)):
            if not self._intact[i]:
                self._check(i)
        return self._ids(start, stop)

    def _check(self, i: int) -> None:
        """Compare the checksum of the ids of step i with the recorded one. Store the result.

        Raises:
            DataError: The ids have another checksum.
        """
        begin = self._steps[i - 1].tokens if i else 0
        ids = self._ids(begin, self._steps[i].tokens)
        self._intact[i] = zlib.crc32(ids.tobytes()) == self._steps[i].crc
        if not self._intact[i]:
            raise DataError(
                f"{self._bin} is not what was written; delete {self._lines}, and it is made again"
            )

    def _ids(self, start: int, stop: int) -> np.ndarray:
        """Return the ids from `start` to `stop` - 1 of the file, without a check.

        There are fewer if the file ends before.
        """
        offset = start * self._dtype.itemsize
        return np.fromfile(self._bin, self._dtype, stop - start, offset=offset)

    def _refresh(self) -> bool:
        """Read the records of steps that other processes have done. Return whether there were any.

        Reading stops at a line that is incomplete or whose tokens are not in the .bin file. If the
        .jsonl file is gone, all steps are forgotten, and the lane begins anew.
        """
        if not self._lines.exists():
            self._steps = []
            self._intact = []
            self._lines_bytes = 0
            return False

        before = len(self._steps)
        tokens_in_file = 0
        if self._bin.exists():
            tokens_in_file = self._bin.stat().st_size // self._dtype.itemsize
        with self._lines.open("rb") as lines:
            lines.seek(self._lines_bytes)
            for line in lines:
                # A process that was killed may have left half a line, or a line without its tokens.
                try:
                    step = Step(**disk.json_object(line, "a line"))
                    is_valid = self.tokens <= step.tokens <= tokens_in_file
                except (disk.JsonError, TypeError):
                    break
                if not line.endswith(b"\n") or not is_valid:
                    break
                self._intact.append(False)
                self._steps.append(step)
                self._lines_bytes += len(line)
        return len(self._steps) > before

    def _pack(self) -> None:
        """Do one step: tokenize the next documents, and append their ids and a record to the files.

        The caller must hold the lock of the lane. The last step may have no documents.
        """
        done = self._steps[-1] if self._steps else Step(0, 0, 0, False, None)
        position = done.position
        if self._reader is None or self._reader_position != position:
            # Another process, or an earlier run, has done the steps up to here.
            self._reader = self._documents.after(position)
        reader = self._reader
        # A reader that fails below must not be asked again.
        self._reader = None

        size = min(max(done.text_bytes // 8, _FIRST_BYTES), _STEP_BYTES)
        documents = []
        total = 0
        ended = False
        while total < size and not ended:
            with reading():
                chunk, position = next(reader, (None, position))
            ended = chunk is None
            documents += shares.documents_of(chunk or [])
            total += sum(len(content) for content, _ in chunk or [])

        encoded = shares.encoded(documents, self._encoder)
        ids = np.concatenate([np.zeros(0, self._dtype), *encoded]).astype(self._dtype)
        text_bytes = done.text_bytes + sum(
            document.text_bytes + document.ends for document in documents
        )
        step = Step(
            tokens=done.tokens + len(ids),
            text_bytes=text_bytes,
            crc=zlib.crc32(ids.tobytes()),
            ended=ended,
            position=position,
            quoted=shares.quoted(documents, self._encoder),
        )

        # The tokens come first: a line whose tokens are missing is not read.
        _write(self._bin, done.tokens * self._dtype.itemsize, ids.tobytes())
        line = f"{json.dumps(step._asdict())}\n".encode()
        self._lines_bytes = _write(self._lines, self._lines_bytes, line)
        # Append here first: a reading thread takes no lock, and looks up an entry for every step.
        self._intact.append(True)
        self._steps.append(step)
        self._reader = reader
        self._reader_position = position


def _write(path: Path, start: int, content: bytes) -> int:
    """Write `content` at byte `start` of a file, drop what came after, and return the new size.

    The content is on disk when this returns.
    """
    with path.open("ab") as file:
        file.truncate(start)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return start + len(content)
