"""Bounds on what a file may unpack to (`data.limits`): streams that keep them, and the error that names the flag.

Pages of a Parquet column say in their headers what each unpacks to, before any is unpacked.

The sizes in a file's footer may be wrong on purpose; those in the pages' own headers are what a reader makes room for. Headers
are structs of Thrift's compact protocol (parquet.thrift, `PageHeader`).
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

from mupax.memory import gib
from mupax.train.config.data import LimitsConfig
from mupax.train.data.interface import DataError

_HEADER_BYTES = 1 << 12
_LARGEST_HEADER = 1 << 22
"""Statistics in a header may hold whole values."""
_DICTIONARY_PAGE = 2
_COPYING = frozenset({2, 7, 8})
"""Encodings whose values may be much longer than what stands for them: PLAIN_DICTIONARY, DELTA_BYTE_ARRAY, RLE_DICTIONARY."""

WINDOW_BYTES = 64 * 2**20
"""Unpacked bytes over which the ratio is measured. What unpacks to less is never too much."""


class Page(NamedTuple):
    """The header of a page."""

    unpacked: int
    """Bytes."""
    packed: int
    """Bytes on disk."""
    is_dictionary: bool
    values: int
    """Values in it; 0 of a dictionary."""
    copies: bool
    """Whether its values refer to a dictionary or to values before them."""


class PageError(ValueError):
    """Bytes that are no header of a page."""


def pages(file: BinaryIO, start: int, size: int) -> Iterator[Page]:
    """Yield the headers of a column chunk's pages. What cannot be read as one ends them: the reader of values then says so.

    Args:
        start: where the first page begins.
        size: bytes of all pages with their headers.
    """
    position = start
    while position < start + size:
        length = _HEADER_BYTES
        while True:
            file.seek(position)
            reader = _Reader(file.read(length))
            try:
                fields = reader.struct()
                break
            except (IndexError, RecursionError):
                length *= 16
                if length > _LARGEST_HEADER:
                    return
            except PageError:
                return
        page = _page(fields)
        if page is None:
            return
        yield page
        position += reader.position + page.packed


def _page(fields: dict[int, Any]) -> Page | None:
    kind = fields.get(1)
    unpacked = fields.get(2)
    packed = fields.get(3)
    if (
        type(kind) is not int
        or type(unpacked) is not int
        or type(packed) is not int
        or min(unpacked, packed) < 0
    ):
        return None
    first_version = fields.get(5)
    second_version = fields.get(8)
    values = 0
    encoding = None
    if isinstance(first_version, dict):
        values = first_version.get(1, 0)
        encoding = first_version.get(2)
    elif isinstance(second_version, dict):
        values = second_version.get(1, 0)
        encoding = second_version.get(4)
    return Page(unpacked, packed, kind == _DICTIONARY_PAGE, values, encoding in _COPYING)


class _Reader:
    """Reader of Thrift's compact protocol; IndexError says that there are too few bytes."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self.position = 0

    def struct(self) -> dict[int, Any]:
        """Return the fields of a struct by their numbers."""
        fields: dict[int, Any] = {}
        number = 0
        while (head := self._byte()) != 0:
            step = head >> 4
            number = number + step if step else self._whole()
            fields[number] = self._value(head & 15)
        return fields

    def _byte(self) -> int:
        byte = self._content[self.position]
        self.position += 1
        return byte

    def _unsigned(self) -> int:
        number = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            number |= (byte & 127) << shift
            if byte < 128:
                return number
        raise PageError("a number without end")

    def _whole(self) -> int:
        number = self._unsigned()
        return (number >> 1) ^ -(number & 1)

    def _value(self, kind: int) -> Any:
        match kind:
            case 1 | 2:  # true and false
                return kind == 1
            case 3:
                return self._byte()
            case 4 | 5 | 6:
                return self._whole()
            case 7:
                self._skip(8)
            case 8:
                self._skip(self._unsigned())
            case 9 | 10:
                head = self._byte()
                count = head >> 4
                count = self._unsigned() if count == 15 else count
                for _ in range(count):
                    self._value(head & 15)
            case 12:
                return self.struct()
            case _:
                raise PageError(f"a field of kind {kind}")
        return None

    def _skip(self, count: int) -> None:
        self.position += count
        if self.position > len(self._content):
            raise IndexError


class LimitError(DataError):
    """A file, record or image that is larger than a limit of `data.limits`. The text names the flag that raises the limit."""


def too_packed(place: str, unpacked: int, packed: int, limits: LimitsConfig) -> LimitError:
    """Return the error of content that unpacks to much more than its size on disk.

    Args:
        place: file, for the message.
        unpacked: bytes, as far as they were read.
        packed: bytes on disk that they come from.
        limits: bounds that were passed.
    """
    needed = _rounded_up(unpacked / max(1, packed))
    return LimitError(
        f"{place} unpacks to {gib(unpacked)} from {gib(packed)}, more than {limits.ratio} times as much, and may be made to fill "
        f"the memory or the disk. If you trust it, write --data.limits.ratio {needed}"
    )


def too_long(place: str, size: int, limits: LimitsConfig) -> LimitError:
    """Return the error of a record that is larger than a record may be.

    Args:
        place: file and line or row, for the message.
        size: bytes of it, as far as they were read.
        limits: bounds that were passed.
    """
    needed = _rounded_up(size / 2**20)
    return LimitError(
        f"{place} is {gib(size)} long or longer, and a record may have {limits.record_mib} MiB. Cut it into several, or write "
        f"--data.limits.record-mib {needed} or more"
    )


def too_many_pixels(
    place: str, width: int, height: int, weight: float, limits: LimitsConfig
) -> LimitError:
    """Return the error of an image that has more pixels than an image may have.

    Args:
        place: file, for the message.
        width, height: pixels on the sides.
        weight: times as much memory as a pixel takes in this format, compared with PNG.
        limits: bounds that were passed.
    """
    needed = _rounded_up(width * height * weight / 1e6)
    more = "" if weight == 1 else f", which count {weight:g} times in this format"
    return LimitError(
        f"{place} has {width} x {height} pixels{more}, and an image may have {limits.megapixels} million. Scale it down, or write "
        f"--data.limits.megapixels {needed}"
    )


def _rounded_up(number: float) -> int:
    """Return the next number above that has two digits and zeros."""
    step = 10 ** max(0, len(str(int(number))) - 2)
    return (int(number) // step + 1) * step


class BoundedStream(io.RawIOBase):
    """The unpacked content of a file, read as long as it is not too many times as large as the file itself.

    Args:
        unpacked: binary stream that unpacks `packed`.
        packed: the file, whose position tells how much of it was used.
        place: file, for the message.
    """

    def __init__(self, unpacked: Any, packed: Any, place: str, limits: LimitsConfig) -> None:
        self._unpacked = unpacked
        self._packed = packed
        self._place = place
        self._limits = limits
        self._window = 0  # bytes since the last measurement
        self._used = 0  # position in the packed file at that time

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self._unpacked.read(len(buffer))
        count = len(content)
        buffer[:count] = content
        self._window += count
        if self._window >= WINDOW_BYTES:
            position = self._packed.tell()
            packed = position - self._used
            if self._window > self._limits.ratio * packed:
                raise too_packed(self._place, self._window, packed, self._limits)
            self._used = position
            self._window = 0
        return count


def check_ratio(place: str, unpacked: int, packed: int, limits: LimitsConfig) -> None:
    """Refuse content that unpacks to much more than its size on disk.

    Args:
        place: file, for the message.
        unpacked: bytes of all that was read so far.
        packed: bytes on disk that they come from.

    Raises:
        LimitError: `unpacked` is more than `WINDOW_BYTES`, and more than the ratio allows.
    """
    if unpacked > max(WINDOW_BYTES, limits.ratio * packed):
        raise too_packed(place, unpacked, packed, limits)


def size_of(file: Any) -> int:
    """Return the bytes of an open file."""
    position = file.tell()
    size = file.seek(0, os.SEEK_END)
    file.seek(position)
    return size
