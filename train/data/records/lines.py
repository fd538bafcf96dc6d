"""Documents from JSON lines, plain or compressed (.gz, .zst, .bz2, .xz): one field of each line."""

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
from mupax.train.data.interface import DataError, ReadError, is_system_error, unreadable
from mupax.train.data.records import bounds
from mupax.train.data.records.broken import BrokenLog

_PART_BYTES = 1 << 24
"""Number of bytes after which a part ends, at the next line end. A part is read at once."""
_BLOCK_BYTES = 1 << 20
_SHOWN = 60
_LISTED = 8
_TRIED_LINES = 50
"""Number of first lines that are tried. If none is a record, the file is no file of records."""


class DamagedError(DataError):
    """Error of a file that is cut off or damaged, so that it cannot be unpacked."""


class Part(NamedTuple):
    """Range of complete lines that is read at once. Bytes are those of the unpacked content."""

    start: int
    """Position of the first byte."""
    size: int
    """Number of bytes."""
    line: int
    """Number of the first line, from 1."""


@dataclasses.dataclass
class Lines:
    """File of JSON lines, read part by part. A part is a range of lines.

    A compressed file is unpacked once if its parts are read in order. Reading an earlier part
    unpacks it again from the beginning.

    Args:
        field: Name of the field whose text is the document.
        broken: Log that counts lines that cannot be used, or raises their error.
    """

    path: Path
    field: str
    broken: BrokenLog = dataclasses.field(default_factory=BrokenLog)
    _stack: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)
    _stream: Any = None
    _position: int = 0
    """Number of bytes of the unpacked content that were read from `_stream`."""
    _size: int | None = None
    """Number of bytes of the unpacked content. `None` before `parts` has read the file."""

    def first(self) -> None:
        """Check that at least one of the first `_TRIED_LINES` lines is a record with text.

        If none is, raise the error of the first line that is not blank. A file that begins with a
        JSON list over several lines has no records. A file of blank lines raises nothing.

        Raises:
            DataError: No line is a record, or the file cannot be read or unpacked.
        """
        first_error = None
        limit = self._line_limit
        with _opened(self.path, self.broken.limits) as stream, _checked(self.path):
            number = 1
            # One byte above the limit shows that a line is too long.
            while line := _unmarked(stream.readline(limit + 1)):
                if not line.strip():
                    number += 1
                    continue
                if len(line) > limit:
                    error = bounds.too_long(self._place(number), len(line), self.broken.limits)
                    first_error = first_error or error
                    if not line.endswith(b"\n") and not self._skip_line(stream):
                        break
                else:
                    try:
                        self.text(line, number)
                        return
                    except DataError as error:
                        first_error = first_error or error
                    is_list = line.lstrip().startswith(b"[") and not line.rstrip().endswith(b"]")
                    # The line begins a JSON list and does not end it. The next lines belong to the
                    # list, so none is a record.
                    if is_list:
                        break
                if number >= _TRIED_LINES:
                    break
                number += 1
        if first_error is not None:
            raise first_error

    @property
    def _line_limit(self) -> int:
        """Largest number of bytes of a line."""
        return self.broken.limits.record_mib * 2**20

    def _place(self, number: int) -> str:
        """Return the name of a line for messages."""
        return f"{self.path} line {number}"

    @staticmethod
    def _skip_line(stream: Any) -> bool:
        """Read the rest of a line. Return `False` if the file ends before the line does."""
        while block := stream.readline(_BLOCK_BYTES):
            if block.endswith(b"\n"):
                return True
        return False

    def parts(self) -> Iterator[Part]:
        """Read the file, and yield the ranges of lines into which it is divided.

        A line that is too long is in no range, and neither is the rest of a damaged file. They are
        logged in `broken`, or raise their error.

        Raises:
            DataError: A line is too long or the file is damaged, and broken entries are not left
                out.
        """
        start = 0  # first byte of the current part
        line = 1  # number of the first line of the part
        lines = 0  # number of complete lines of the part
        line_start = 0  # first byte of the line that has not ended yet
        is_long = False  # whether the line that has not ended yet is too long
        position = 0
        try:
            with _opened(self.path, self.broken.limits) as stream, _checked(self.path):
                while block := stream.read(_BLOCK_BYTES):
                    first_end = block.find(b"\n") + 1
                    line_size = position + (first_end or len(block)) - line_start
                    # The line has become too long, so the part ends before it.
                    if line_size > self._line_limit and not is_long:
                        is_long = True
                        place = self._place(line + lines)
                        error = bounds.too_long(place, line_size, self.broken.limits)
                        self.broken.add(place, "record", place, error)
                        if line_start > start:
                            yield Part(start, line_start - start, line)
                        start = line_start
                        line += lines
                        lines = 0
                    counted_from = 0
                    # The line that is too long ends in this block, so a part begins after it.
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
            position = line_start  # the rest is an incomplete line
        # The last line may have no line end.
        stop = start if is_long else position
        if stop > start:
            yield Part(start, stop - start, line)
        self._size = stop
        self._close_at_end()

    def read(self, part: Part) -> list[bytes]:
        """Return the texts of a part in order. Blank and broken lines are left out.

        A damaged part that is left out has no texts.

        Raises:
            DataError: The file is damaged or a line is no JSON object with text in the field, and
                broken entries are not left out.
        """
        try:
            content = self._content(part)
            texts = []
            with self.broken.part(f"{self.path} {part.start}", "record") as tally:
                # Not `splitlines`, which also cuts at a lone carriage return. In JSON that is white
                # space.
                for number, line in enumerate(content.split(b"\n"), part.line):
                    if not line.strip():
                        continue
                    try:
                        texts.append(self.text(line, number))
                    except DataError as error:
                        tally.add(f"{self.path} line {number}", error)
            return texts
        except (DataError, ReadError):
            self.close()
            raise

    def _content(self, part: Part) -> bytes:
        """Return the unpacked bytes of a part, or no bytes for a damaged part that is left out.

        Raises:
            DataError: The file has become shorter, or is damaged and not left out.
        """
        try:
            if self._position > part.start or self._stream is None:
                self.close()
                # A compressed stream cannot go back, so an earlier part is unpacked from the
                # beginning.
                self._stream = self._stack.enter_context(_opened(self.path, self.broken.limits))
            with _checked(self.path):
                self._skip_to(part.start)
                content = self._stream.read(part.size)
        except (DamagedError, bounds.LimitError) as error:
            self.close()
            place = f"{self.path} from line {part.line} on"
            self.broken.add(f"{self.path} {part.start}", "file", place, error)
            return b""
        self._position += len(content)
        if len(content) != part.size:
            raise DataError(
                f"{self.path} became shorter while it was read; "
                "start again when nothing writes to it"
            )
        self._close_at_end()
        return _unmarked(content) if part.start == 0 else content

    def _skip_to(self, position: int) -> None:
        """Read and drop the unpacked content before byte `position`, or all if it ends earlier."""
        while self._position < position:
            block = self._stream.read(min(_BLOCK_BYTES, position - self._position))
            if not block:
                return
            self._position += len(block)

    def text(self, line: bytes, number: int) -> bytes:
        """Return the document of a line, in UTF-8.

        Args:
            number: Number of the line, from 1, for the message.

        Raises:
            DataError: The line is no JSON object, or has no valid text in the field (`content_of`).
        """
        where = self._place(number)
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # deeply nested JSON recurses
            shown = line[:_SHOWN].decode(errors="replace")
            raise DataError(
                f"{where} is no JSON: {shown!r} ({error}). Repair or remove the line"
            ) from error
        if not isinstance(row, dict):
            raise DataError(
                f"{where} is no JSON object; "
                f"write each document as {{{json.dumps(self.field)}: ...}}"
            )
        return self.content(row, where)

    def content(self, row: dict[str, Any], where: str) -> bytes:
        """Return the document of a record, the text of its field `self.field`, in UTF-8.

        Args:
            where: File and line of the record, for the message.

        Raises:
            DataError: The field has no text (`content_of`).
        """
        texts = [name for name in row if isinstance(row[name], str)]
        if self.field not in row and isinstance(row.get("messages"), list):
            raise DataError(
                f"{where} has no field {self.field!r} but messages of a chat; "
                "write data.name chat:PATH"
            )
        if self.field in row and row[self.field] is None:
            raise DataError(f"{where} has null in {self.field!r}; repair or remove it")
        return content_of(row.get(self.field), where, self.field, texts)

    def _close_at_end(self) -> None:
        """Close the file if all of it was read."""
        # A corpus may have more files than a process may have open at once.
        if self._position == self._size:
            self.close()

    def close(self) -> None:
        """Close the file. The next `read` opens it again."""
        self._stack.close()
        self._stream = None
        self._position = 0

    def __del__(self) -> None:
        self.close()


def content_of(value: Any, where: str, field: str, text_fields: list[str]) -> bytes:
    """Check that the value of a record's field is text, and return it in UTF-8.

    Args:
        value: Value of the field. `None` if the record does not have the field.
        where: File and line or row, for the message.
        field: Name of the field, for the message.
        text_fields: Names of the fields that have text, for the advice in the message.

    Raises:
        DataError: The value is no text, or has half of a surrogate pair or a NUL character, which
            separates documents.
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
    """Return the end of the message about a record without text in the field.

    Args:
        text_fields: Names of the record's fields that have text, which the user may have meant.
    """
    if not text_fields:
        return "repair or remove it"
    alternatives = f" (or {', '.join(text_fields[1:_LISTED])})" if text_fields[1:] else ""
    return f"write --data.field {shlex.quote(text_fields[0])}{alternatives}"


def _unmarked(content: bytes) -> bytes:
    """Return the content without the byte order mark that some editors put before UTF-8."""
    return content.removeprefix(codecs.BOM_UTF8)


@contextlib.contextmanager
def _opened(path: Path, limits: LimitsConfig) -> Iterator[IO[bytes]]:
    """Context manager of a stream that reads a file's content, unpacked as its suffix says.

    Reading raises `LimitError` if the content unpacks to more than the limits allow.
    """
    with contextlib.ExitStack() as stack:
        with _checked(path):
            file = stack.enter_context(path.open("rb"))
            unpacked = unpacked_stream(file, path.suffix.lower())
            if unpacked is not file:
                stack.enter_context(unpacked)
                bounded = bounds.BoundedStream(unpacked, file, str(path), limits)
                # `io` reads the lines, because pyarrow's streams cannot.
                stream = stack.enter_context(io.BufferedReader(bounded, _BLOCK_BYTES))
            elif is_remote(path):
                # The `readline` of a file in a bucket takes no limit.
                bounded = bounds.BoundedStream(file, file, str(path), limits)
                stream = stack.enter_context(io.BufferedReader(bounded, _BLOCK_BYTES))
            else:
                stream = file
        yield stream


@contextlib.contextmanager
def _checked(path: Path) -> Iterator[None]:
    """Context manager that turns an error of reading or unpacking into an error of mupax.

    Raises:
        DamagedError: The content is damaged.
        DataError: The file is missing or may not be read.
        ReadError: The disk or the bucket does not answer.
    """
    try:
        yield
    except (OSError, EOFError, lzma.LZMAError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        if is_system_error(error):
            raise unreadable(f"cannot read {path}: {error.strerror}", error) from error
        raise DamagedError(
            f"cannot read {path}: {error}. It may be damaged or cut off; fetch it again"
        ) from error


def unpacked_stream(file: Any, suffix: str) -> Any:
    """Return a stream of the unpacked content, or the file itself if it is not compressed."""
    match suffix:
        case ".gz":
            return gzip.GzipFile("", "rb", fileobj=file)  # "": `file` need not have a name
        case ".bz2":
            return bz2.BZ2File(file)
        case ".xz":
            return lzma.LZMAFile(file)
        case ".zst":
            import pyarrow

            return pyarrow.CompressedInputStream(file, "zstd")
        case _:
            return file
