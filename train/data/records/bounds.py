"""Limits on the unpacked size of a file, record or image (`data.limits`), and their errors.

`pages` reads the unpacked sizes of a Parquet column from the headers of its pages.
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
"""Number of bytes that are read first for the header of a page. More are read if they are few."""
_LARGEST_HEADER = 1 << 22
"""Largest header of a page, in bytes. The statistics in a header may contain complete values."""
_DICTIONARY_PAGE = 2
_COPYING = frozenset({2, 7, 8})
"""Parquet encodings whose values may be much longer than their bytes on disk.

These are PLAIN_DICTIONARY, DELTA_BYTE_ARRAY and RLE_DICTIONARY. Their values refer to a dictionary
or to an earlier value.
"""

WINDOW_BYTES = 64 * 2**20
"""Unpacked bytes over which `limits.ratio` (unpacked bytes per byte on disk) is checked.

Content that unpacks to less is always accepted.
"""


class Page(NamedTuple):
    """Header of a page of a Parquet column."""

    unpacked: int
    """Size in bytes after unpacking."""
    packed: int
    """Size in bytes on disk."""
    is_dictionary: bool
    values: int
    """Number of values. 0 for a dictionary."""
    copies: bool
    """True if the values refer to a dictionary or to earlier values.

    Unpacked values may then be much longer than the page.
    """


class PageError(ValueError):
    """Error for bytes that are not the header of a Parquet page."""


def pages(file: BinaryIO, start: int, size: int) -> Iterator[Page]:
    """Yield the headers of a column chunk's pages, up to the first that cannot be read.

    No error is raised for an unreadable header: pyarrow raises one when it reads the values.

    Args:
        start: Position of the first page in bytes.
        size: Number of bytes of all pages with their headers.
    """
    # The footer may state wrong sizes on purpose. A reader allocates the sizes in the page headers,
    # so these are the ones to check.
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
                # The size of a header is unknown, so read more if it did not end.
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
    """Return the page header that a decoded `PageHeader` struct of parquet.thrift describes.

    The result is `None` if the type or a size is missing, or a size is negative.

    Args:
        fields: Values of the struct by the field numbers of parquet.thrift.
    """
    page_type = fields.get(1)
    unpacked = fields.get(2)
    packed = fields.get(3)
    if type(page_type) is not int or type(unpacked) is not int or type(packed) is not int:
        return None
    # A negative size would send the next seek backwards, and the loop would not end.
    if min(unpacked, packed) < 0:
        return None

    # Field 5 is a DataPageHeader, field 8 a DataPageHeaderV2.
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
    return Page(unpacked, packed, page_type == _DICTIONARY_PAGE, values, encoding in _COPYING)


class _Reader:
    """Decoder of a struct in Thrift's compact protocol, the format of Parquet's page headers.

    Its methods raise `IndexError` if there are too few bytes, and `PageError` for bytes that are
    not such a struct.
    """

    def __init__(self, content: bytes) -> None:
        self._content = content
        self.position = 0

    def struct(self) -> dict[int, Any]:
        """Read a struct and return the values of its fields by field number."""
        fields: dict[int, Any] = {}
        number = 0
        while (head := self._byte()) != 0:
            # The upper 4 bits are the difference to the previous field's number. 0 means that the
            # number follows.
            step = head >> 4
            number = number + step if step else self._signed()
            fields[number] = self._value(head & 15)
        return fields

    def _byte(self) -> int:
        byte = self._content[self.position]
        self.position += 1
        return byte

    def _unsigned(self) -> int:
        """Read an unsigned integer of 7 bits per byte. Raise `PageError` after 10 bytes."""
        number = 0
        # 64 bits need at most 10 bytes.
        for shift in range(0, 70, 7):
            byte = self._byte()
            number |= (byte & 127) << shift
            if byte < 128:
                return number
        raise PageError("a number without end")

    def _signed(self) -> int:
        """Read a signed integer in zigzag encoding."""
        number = self._unsigned()
        return (number >> 1) ^ -(number & 1)

    def _value(self, field_type: int) -> Any:
        """Read a value and return it. Doubles, strings and lists are skipped and return `None`.

        Args:
            field_type: Number of the value's type in the protocol.

        Raises:
            PageError: The protocol has no such type.
        """
        match field_type:
            case 1 | 2:  # true and false
                return field_type == 1
            case 3:
                return self._byte()
            case 4 | 5 | 6:
                return self._signed()
            case 7:  # a double
                self._skip(8)
            case 8:  # bytes
                self._skip(self._unsigned())
            case 9 | 10:  # a list or set
                head = self._byte()
                count = head >> 4
                count = self._unsigned() if count == 15 else count
                for _ in range(count):
                    self._value(head & 15)
            case 12:
                return self.struct()
            case _:
                raise PageError(f"a field of kind {field_type}")
        return None

    def _skip(self, count: int) -> None:
        """Skip some bytes. Raise `IndexError` if there are fewer."""
        self.position += count
        if self.position > len(self._content):
            raise IndexError


class LimitError(DataError):
    """Error of a file, record or image that exceeds `data.limits`. The message names the flag."""


def too_packed(place: str, unpacked: int, packed: int, limits: LimitsConfig) -> LimitError:
    """Return the error for content that unpacks to much more than its size on disk.

    Args:
        place: Name of the file, for the message.
        unpacked: Number of bytes that were unpacked so far.
        packed: Number of bytes on disk from which these bytes were unpacked.
    """
    needed = _rounded_up(unpacked / max(1, packed))
    return LimitError(
        f"{place} unpacks to {gib(unpacked)} from {gib(packed)}, more than {limits.ratio} times "
        "as much, and may be made to fill the memory or the disk. "
        f"If you trust it, write --data.limits.ratio {needed}"
    )


def too_long(place: str, size: int, limits: LimitsConfig) -> LimitError:
    """Return the error of a record that is larger than `data.limits.record_mib`.

    Args:
        place: File and line or row, for the message.
        size: Number of bytes of the record that were read so far.
    """
    needed = _rounded_up(size / 2**20)
    return LimitError(
        f"{place} is {gib(size)} long or longer, and a record may have {limits.record_mib} MiB. "
        f"Cut it into several, or write --data.limits.record-mib {needed} or more"
    )


def too_many_pixels(
    place: str, width: int, height: int, weight: float, limits: LimitsConfig
) -> LimitError:
    """Return the error of an image that has more pixels than `data.limits.megapixels`.

    Args:
        place: Name of the file, for the message.
        width: Width in pixels.
        height: Height in pixels.
        weight: Memory that decoding one pixel takes in this image format, relative to PNG (1).
    """
    needed = megapixels(width * height, weight)
    weight_note = "" if weight == 1 else f", which count {weight:g} times in this format"
    return LimitError(
        f"{place} has {width} x {height} pixels{weight_note}, and an image may have "
        f"{limits.megapixels} million. Scale it down, or write --data.limits.megapixels {needed}"
    )


def megapixels(pixels: int, weight: float) -> int:
    """Return the `data.limits.megapixels` that an image needs, rounded up.

    Args:
        weight: Memory that decoding one pixel takes in this image format, relative to PNG (1).
    """
    return _rounded_up(pixels * weight / 1e6)


def _rounded_up(number: float) -> int:
    """Return a larger whole number with at most two digits other than zeros, such as 130 for 123.4.

    Messages suggest it as a limit.
    """
    step = 10 ** max(0, len(str(int(number))) - 2)
    return (int(number) // step + 1) * step


class BoundedStream(io.RawIOBase):
    """Stream of a compressed file's unpacked content, with a limit on the compression ratio.

    Reading raises `LimitError` if about `WINDOW_BYTES` (64 MiB) of the content come from fewer than
    1 / `limits.ratio` as many bytes of the file. So a file that unpacks to terabytes is noticed.

    Args:
        unpacked: Binary stream that unpacks `packed`.
        packed: Open file, whose position tells how many of its bytes were used.
        place: Name of the file, for the message.
    """

    def __init__(self, unpacked: Any, packed: Any, place: str, limits: LimitsConfig) -> None:
        self._unpacked = unpacked
        self._packed = packed
        self._place = place
        self._limits = limits
        self._window = 0  # unpacked bytes since the last measurement
        self._used = 0  # position in the packed file at the last measurement

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
    """Raise an error for content that unpacks to much more than its size on disk.

    Args:
        place: Name of the file, for the message.
        unpacked: Number of bytes that were unpacked so far.
        packed: Number of bytes on disk from which these bytes were unpacked.

    Raises:
        LimitError: `unpacked` is more than `WINDOW_BYTES` (64 MiB), and more than `limits.ratio`
            times `packed`.
    """
    if unpacked > max(WINDOW_BYTES, limits.ratio * packed):
        raise too_packed(place, unpacked, packed, limits)


def size_of(file: Any) -> int:
    """Return the size of an open file in bytes, without moving its position."""
    position = file.tell()
    size = file.seek(0, os.SEEK_END)
    file.seek(position)
    return size
