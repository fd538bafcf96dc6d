"""Documents from JSON lines, plain or compressed (.gz, .zst, .bz2, .xz): a field of each line, split by its content.

A line is for evaluation when the hash of its text says so, so the same text is on the same side in every file and order.
"""

from __future__ import annotations

import bz2
import codecs
import contextlib
import dataclasses
import gzip
import io
import json
import lzma
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from mupax.disk import is_remote
from mupax.train.config.data import LimitsConfig
from mupax.train.data.interface import DataError
from mupax.train.data.records import bounds
from mupax.train.data.records.broken import BrokenLog

_PART_BYTES = 1 << 24
_BLOCK_BYTES = 1 << 20
_SHOWN = 60
_LISTED = 8
_TRIED_LINES = 50
"""Lines of which one must be a record, or the file holds none."""


class DamagedError(DataError):
    """A file that is cut off or damaged, so that it cannot be unpacked."""


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
        broken: decides on lines that are no records, and counts them.
    """

    path: Path
    field: str
    broken: BrokenLog = dataclasses.field(default_factory=BrokenLog)
    _stack: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)
    _stream: Any = None
    _at: int = 0
    _size: int | None = None

    def first(self) -> None:
        """Raise DataError unless one of the first lines is a record, so that the others are broken ones.

        A file whose first line begins a JSON list that goes on behind it has no lines that count.
        """
        first_error = None
        limit = self._line_limit
        with _opened(self.path, self.broken.limits) as stream, _whole(self.path):
            number = 1
            while line := _unmarked(stream.readline(limit + 1)):
                if not line.strip():
                    number += 1
                    continue
                if len(line) > limit:
                    first_error = first_error or bounds.too_long(
                        self._place(number), len(line), self.broken.limits
                    )
                    if not line.endswith(b"\n") and not self._ends(stream):
                        break
                else:
                    try:
                        self.text(line, number)
                        return
                    except DataError as error:
                        first_error = first_error or error
                    is_list = line.lstrip().startswith(b"[") and not line.rstrip().endswith(b"]")
                    if is_list:
                        break
                if number >= _TRIED_LINES:
                    break
                number += 1
        if first_error is not None:
            raise first_error

    @property
    def _line_limit(self) -> int:
        """Bytes that a line may have."""
        return self.broken.limits.record_mib * 2**20

    def _place(self, number: int) -> str:
        return f"{self.path} line {number}"

    @staticmethod
    def _ends(stream: Any) -> bool:
        """Read up to the end of a line that was begun; return whether anything may follow."""
        while block := stream.readline(_BLOCK_BYTES):
            if block.endswith(b"\n"):
                return True
        return False

    def parts(self) -> Iterator[Part]:
        """Yield the file cut at line ends, part by part as it is read. Lines that are too long are in no part.

        Raises:
            DataError: a line is too long, or the file is damaged, unless such are left out.
        """
        start = 0  # of the part that is being read
        line = 1  # number of its first line
        lines = 0  # whole lines of it
        line_start = 0  # of the line that has not ended yet
        is_long = False  # whether that line is too long
        position = 0
        try:
            with _opened(self.path, self.broken.limits) as stream, _whole(self.path):
                while block := stream.read(_BLOCK_BYTES):
                    first_end = block.find(b"\n") + 1
                    line_size = position + (first_end or len(block)) - line_start
                    if line_size > self._line_limit and not is_long:
                        is_long = True
                        place = self._place(line + lines)
                        self.broken.add(
                            place,
                            "record",
                            place,
                            bounds.too_long(place, line_size, self.broken.limits),
                        )
                        if line_start > start:
                            yield Part(start, line_start - start, line)
                        start = line_start
                        line += lines
                        lines = 0
                    counted_from = 0
                    if is_long and first_end:
                        is_long = False
                        start = position + first_end
                        line += 1
                        counted_from = first_end
                    if first_end:
                        end = block.rfind(b"\n") + 1
                        lines += block.count(b"\n", counted_from, end)
                        line_start = position + end
                    if line_start - start >= _PART_BYTES:
                        yield Part(start, line_start - start, line)
                        start = line_start
                        line += lines
                        lines = 0
                    position += len(block)
        except (DamagedError, bounds.LimitError) as error:
            place = f"{self.path} from line {line + lines} on"
            self.broken.add(f"{self.path} cut", "file", place, error)
            position = line_start  # behind it is half of a line
        stop = start if is_long else position
        if stop > start:
            yield Part(start, stop - start, line)
        self._size = stop
        self._close_at_end()

    def read(self, part: Part) -> list[bytes]:
        """Return the texts of a part, in order; lines of white space are left out.

        Raises:
            DataError: the file is damaged, or a line is no JSON object with text in the field, unless such are left out.
        """
        try:
            content = self._content(part)
            texts = []
            with self.broken.part(f"{self.path} {part.start}", "record") as tally:
                for number, line in enumerate(content.split(b"\n"), part.line):
                    if not line.strip():
                        continue
                    try:
                        texts.append(self.text(line, number))
                    except DataError as error:
                        tally.add(f"{self.path} line {number}", error)
            return texts
        except DataError:
            self.close()
            raise

    def _content(self, part: Part) -> bytes:
        """Return the bytes of a part; nothing if the file is damaged there and damage is left out."""
        try:
            if self._at > part.start or self._stream is None:
                self.close()
                self._stream = self._stack.enter_context(_opened(self.path, self.broken.limits))
            with _whole(self.path):
                while self._at < part.start and (
                    skipped := self._stream.read(min(_BLOCK_BYTES, part.start - self._at))
                ):
                    self._at += len(skipped)
                content = self._stream.read(part.size)
        except (DamagedError, bounds.LimitError) as error:
            self.close()
            self.broken.add(
                f"{self.path} {part.start}", "file", f"{self.path} from line {part.line} on", error
            )
            return b""
        self._at += len(content)
        if len(content) != part.size:
            raise DataError(
                f"{self.path} became shorter while it was read; start again when nothing writes to it"
            )
        self._close_at_end()
        return _unmarked(content) if part.start == 0 else content

    def text(self, line: bytes, number: int) -> bytes:
        """The text of a line.

        Args:
            line: of JSON.
            number: of the line, from 1, for the error.

        Raises:
            DataError: it is no JSON object, or has no text in the field; the text says what to write instead.
        """
        where = self._place(number)
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            shown = line[:_SHOWN].decode(errors="replace")
            raise DataError(
                f"{where} is no JSON: {shown!r} ({error}). Repair or remove the line"
            ) from error
        if not isinstance(row, dict):
            raise DataError(
                f"{where} is no JSON object; write each document as {{{json.dumps(self.field)}: ...}}"
            )
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
            raise DataError(
                f"{where} has no field {self.field!r} but messages of a chat; write data.name chat:PATH"
            )
        if self.field in row and row[self.field] is None:
            raise DataError(f"{where} has null in {self.field!r}; repair or remove it")
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
        raise DataError(f"{where} has {kind} {field!r}; {_advice(text_fields)}")
    if "\0" in value:
        raise DataError(f"{where} has a NUL character in its text; remove it")
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where} has half of a surrogate pair in its text: {error}. Repair or remove it"
        ) from error


def _advice(text_fields: list[str]) -> str:
    """Return what to do about a record without text in the field."""
    if not text_fields:
        return "repair or remove it"
    more = f" (or {', '.join(text_fields[1:_LISTED])})" if text_fields[1:] else ""
    return f"write --data.field {shlex.quote(text_fields[0])}{more}"


def _unmarked(content: bytes) -> bytes:
    """Return the content without the mark that some editors put before UTF-8."""
    return content.removeprefix(codecs.BOM_UTF8)


@contextlib.contextmanager
def _opened(path: Path, limits: LimitsConfig) -> Iterator[IO[bytes]]:
    """Open the content of a file, unpacked as far as its limits allow."""
    with contextlib.ExitStack() as stack:
        with _whole(path):
            file = stack.enter_context(path.open("rb"))
            unpacked = _unpacked(file, path.suffix.lower())
            if unpacked is not file:
                stack.enter_context(unpacked)
                bounded = bounds.BoundedStream(unpacked, file, str(path), limits)
                # Lines are read by io: pyarrow's own streams have none.
                stream = stack.enter_context(io.BufferedReader(bounded, _BLOCK_BYTES))
            elif is_remote(path):  # files in buckets read lines of any length alone
                stream = stack.enter_context(
                    io.BufferedReader(
                        bounds.BoundedStream(file, file, str(path), limits), _BLOCK_BYTES
                    )
                )
            else:
                stream = file
        yield stream


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[None]:
    """Turn what unpacking makes of a damaged file into an error of the data.

    Raises:
        DamagedError: the content is damaged.
        DataError: the file cannot be read.
    """
    try:
        yield
    except (OSError, EOFError, lzma.LZMAError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        if isinstance(error, OSError) and error.errno is not None:
            raise DataError(f"cannot read {path}: {error.strerror}") from error
        raise DamagedError(
            f"cannot read {path}: {error}. It may be damaged or cut off; fetch it again"
        ) from error


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

            return pyarrow.CompressedInputStream(file, "zstd")
        case _:
            return file
