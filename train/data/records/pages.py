"""Headers of the pages of a Parquet column: what each unpacks to, before any is unpacked.

The sizes in a file's footer may be wrong on purpose; those in the pages' own headers are what a reader makes room for. Headers
are structs of Thrift's compact protocol (parquet.thrift, `PageHeader`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

_HEADER_BYTES = 1 << 12
_LARGEST_HEADER = 1 << 22
"""Statistics in a header may hold whole values."""
_DICTIONARY_PAGE = 2
_COPYING = frozenset({2, 7, 8})
"""Encodings whose values may be much longer than what stands for them: PLAIN_DICTIONARY, DELTA_BYTE_ARRAY, RLE_DICTIONARY."""


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
    if type(kind) is not int or type(unpacked) is not int or type(packed) is not int or min(unpacked, packed) < 0:
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
