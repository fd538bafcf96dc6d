"""Documents from JSON lines, plain or compressed (.gz, .zst, .bz2, .xz): a field of each line, split by its content.

A line is for evaluation when the hash of its text says so, so the same text is on the same side in every file and order.
"""

from __future__ import annotations

import bz2
import contextlib
import dataclasses
import gzip
import io
import itertools
import json
import lzma
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from mupax.train.data.interface import DataError

_PART_BYTES = 1 << 24
_BLOCK_BYTES = 1 << 20
_SHOWN = 60
_LISTED = 8


class Part(NamedTuple):
    """Whole lines of a file: so many bytes from `start`, where line `line` begins (from 1)."""

    start: int
    size: int
    line: int


@dataclasses.dataclass
class Lines:
    """A file of JSON lines, read part by part; in order nothing is unpacked twice.

    Args:
        path: of the file.
        field: whose text is the document.
    """

    path: Path
    field: str
    _stack: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)
    _stream: Any = None
    _at: int = 0
    _size: int | None = None

    def first(self) -> None:
        """Raises DataError where the first line is no JSON object with the field."""
        with _opened(self.path) as stream, _whole(self.path):
            for number, line in enumerate(iter(stream.readline, b""), 1):  # files in buckets have no more
                if line.strip():
                    self.text(line, number)
                    return

    def parts(self) -> Iterator[Part]:
        """The file cut at line ends, part by part as it is read."""
        start, size, line, lines = 0, 0, 1, 0
        with _opened(self.path) as stream, _whole(self.path):
            for block in itertools.chain(iter(lambda: stream.read(_BLOCK_BYTES), b""), [b""]):
                end = block.rfind(b"\n") + 1
                if (size + end >= _PART_BYTES and end) or not block:
                    lines += block.count(b"\n", 0, end)
                    if size + end:
                        yield Part(start, size + end, line)
                    start, line, size, lines = start + size + end, line + lines, 0, 0
                else:
                    end = 0
                size, lines = size + len(block) - end, lines + block.count(b"\n", end)
        self._size = start
        self._close_at_end()

    def read(self, part: Part) -> list[bytes]:
        """The texts of a part, in order; lines of white space are left out.

        Raises:
            DataError: the file is damaged, or a line is no JSON object with text in the field.
        """
        try:
            if self._at > part.start or self._stream is None:
                self.close()
                self._stream = self._stack.enter_context(_opened(self.path))
            with _whole(self.path):
                while self._at < part.start and (
                    skipped := self._stream.read(min(_BLOCK_BYTES, part.start - self._at))
                ):
                    self._at += len(skipped)
                content = self._stream.read(part.size)
            self._at += len(content)
            if len(content) != part.size:
                raise DataError(f"{self.path} became shorter while it was read; start again when nothing writes to it")
            self._close_at_end()
            texts = enumerate(content.split(b"\n"), part.line)
            return [self.text(line, number) for number, line in texts if line.strip()]
        except DataError:
            self.close()
            raise

    def text(self, line: bytes, number: int) -> bytes:
        """The text of a line.

        Args:
            line: of JSON.
            number: of the line, from 1, for the error.

        Raises:
            DataError: it is no JSON object, or has no text in the field; the text says what to write instead.
        """
        where = f"{self.path} line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            shown = line[:_SHOWN].decode(errors="replace")
            raise DataError(f"{where} is no JSON: {shown!r} ({error}). Repair or remove the line") from error
        if not isinstance(row, dict):
            raise DataError(f"{where} is no JSON object; write each document as {{{json.dumps(self.field)}: ...}}")
        return self.content(row, where)

    def content(self, row: dict[str, Any], where: str) -> bytes:
        """The document of a record.

        Args:
            row: the JSON object.
            where: file and line, for the error.

        Raises:
            DataError: as `content_of`.
        """
        texts = [name for name in row if isinstance(row[name], str)]
        if self.field not in row and isinstance(row.get("messages"), list):
            raise DataError(f"{where} has no field {self.field!r} but messages of a chat; write data.name chat:PATH")
        return content_of(row.get(self.field), where, self.field, texts)

    def _close_at_end(self) -> None:
        """Closes the file when all of it is read: a corpus may have more files than a process may open."""
        if self._at == self._size:
            self.close()

    def close(self) -> None:
        """Closes the file."""
        self._stack.close()
        self._stream, self._at = None, 0

    def __del__(self) -> None:
        self.close()


def content_of(value: Any, where: str, field: str, text_fields: list[str]) -> bytes:
    """The text of a record, in UTF-8.

    Args:
        value: of the field; None where there is none.
        where: file and line or row, for the error.
        field: its name.
        text_fields: names of fields that have text.

    Raises:
        DataError: it is no text, has a NUL character, which separates documents, or half of a surrogate pair.
    """
    if not isinstance(value, str):
        kind = "no field" if value is None else f"no text but {type(value).__name__} in"
        advice = f"write --data.field {shlex.quote(text_fields[0])}" if text_fields else "repair or remove it"
        more = f" (or {', '.join(text_fields[1:_LISTED])})" if text_fields[1:] else ""
        raise DataError(f"{where} has {kind} {field!r}; {advice}{more}")
    if "\0" in value:
        raise DataError(f"{where} has a NUL character in its text; remove it")
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where} has half of a surrogate pair in its text: {error}. Repair or remove it") from error


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """The content of a file, unpacked."""
    with contextlib.ExitStack() as stack:
        with _whole(path):
            file = stack.enter_context(path.open("rb"))
            stream = stack.enter_context(_unpacked(file, path.suffix.lower()))
        yield stream


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[None]:
    """Turns what unpacking makes of a damaged file into an error of the data."""
    try:
        yield
    except (OSError, EOFError, lzma.LZMAError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"cannot read {path}: {error}. It may be damaged or cut off; fetch it again") from error


def _unpacked(file: Any, suffix: str) -> Any:
    match suffix:
        case ".gz":
            return gzip.GzipFile("", "rb", fileobj=file)  # a file in a bucket has no name
        case ".bz2":
            return bz2.BZ2File(file)
        case ".xz":
            return lzma.LZMAFile(file)
        case ".zst":
            import pyarrow

            # Its lines are read by io: pyarrow's own streams have none.
            return io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"), _BLOCK_BYTES)
        case _:
            return file
