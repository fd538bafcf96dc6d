"""Files of token ids: .bin of nanoGPT (16 bits, no header), .bin of llm.c, and .npy of integers.

A .bin without a header does not tell the width of its ids. Ids of 32 or 64 bits are recognized by
their upper halves, which are all 0.
"""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import IO

import numpy as np

from mupax.train.data.interface import DataError

SUFFIXES = (".bin", ".npy")
_PART_IDS = 1 << 23
"""Number of ids of a file that are read at once."""
_LLM_C = {20240520: "<u2", 20240801: "<u4"}
"""Type of the ids by the first number of llm.c's header."""
_LLM_C_BYTES = 1024
"""Size of llm.c's header."""
_SAMPLES = 16
"""Number of positions in a file that are read to find the width of its ids."""
_SAMPLE_BYTES = 1 << 15
_CHECKED_IDS = 1024
"""Ids at the beginning of a file that are checked when it is opened."""
_LARGEST_HEADER = 10_000
"""Largest header of a .npy in bytes. NumPy refuses a longer header, too."""
_ENOUGH = 64
"""Number of ids from which on it is no accident that the upper halves of all are 0."""


class WidthError(DataError):
    """Error for a file without a header that may have n ids, or n/2 ids of twice as many bits."""


@dataclasses.dataclass(frozen=True)
class IdFile:
    """File of token ids. Separators between its documents are among the ids.

    `opened` makes it, after a check of the header and the first ids.

    Attributes:
        path: Path of the .bin or .npy.
        dtype: Type of an id in the file.
        offset: Number of bytes before the first id.
        size: Number of ids.
        vocab_size: Vocabulary size. Every id must be below it.
    """

    path: Path
    dtype: np.dtype
    offset: int
    size: int
    vocab_size: int

    @property
    def is_usual(self) -> bool:
        """True if the type of an id is in a header, or is the default for a file without one.

        Otherwise the content of the file has shown that ids are wider (`opened`).
        """
        has_header = self.offset > 0
        return has_header or self.dtype.str == default_width(self.vocab_size)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return ids [start, stop) of the file as int64.

        Raises:
            DataError: The file has become shorter, or an id is not in the vocabulary.
        """
        with self.path.open("rb") as file:
            file.seek(self.offset + start * self.dtype.itemsize)
            content = file.read((stop - start) * self.dtype.itemsize)
        ids = np.frombuffer(content, self.dtype).astype(np.int64)
        if len(ids) != stop - start:
            raise DataError(
                f"{self.path} became shorter while it was read; "
                "start again when nothing writes to it"
            )
        invalid = np.flatnonzero((ids < 0) | (ids >= self.vocab_size))
        if invalid.size:
            first = invalid[0]
            advice = "write data.tokenizer as the one that made the file"
            if self.path.suffix.lower() != ".npy":
                advice += ", save ids of another width as .npy"
            raise DataError(
                f"{self.path} has the id {ids[first]} at place {start + first} "
                f"(read as {self.dtype}), and the tokenizer has {self.vocab_size}; "
                f"{advice}, or take the file out"
            )
        return ids

    def parts(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Divide the range [start, stop) of ids into consecutive ranges of at most `_PART_IDS`.

        Returns:
            Pairs (start, stop), each small enough for one call of `read`.
        """
        return [(i, min(i + _PART_IDS, stop)) for i in range(start, stop, _PART_IDS)]


def opened(path: Path, vocab_size: int) -> IdFile:
    """Return a file of ids, after reading its header and checking its first ids.

    Args:
        path: Path of a .npy. A file with any other suffix is read as a .bin.
        vocab_size: Vocabulary size of the tokenizer that made the ids. Without a header an id has
            16 bits, or 32 if the vocabulary needs them, unless the content shows wider ids.

    Raises:
        DataError: The header is damaged, the size of the file is no whole number of ids, or the
            file has ids of another vocabulary or of ambiguous width.
    """
    with path.open("rb") as file:
        is_array = path.suffix.lower() == ".npy"
        offset, dtype = _array_type(path, file) if is_array else _bin_type(path, file, vocab_size)
    size, remainder = divmod(path.stat().st_size - offset, dtype.itemsize)
    if remainder:
        raise DataError(
            f"{path} is no row of ids of {dtype.itemsize} bytes: {remainder} are left over"
        )
    ids = IdFile(path, dtype, offset, size, vocab_size)
    ids.read(0, min(size, _CHECKED_IDS))
    return ids


def _array_type(path: Path, file: IO[bytes]) -> tuple[int, np.dtype]:
    """Read the header of a .npy. Return the byte at which the first id begins, and an id's type.

    Raises:
        DataError: The file is no .npy, or its array is not one row of integers.
    """
    try:
        shape, _, dtype = array_header(file)
    except ValueError as error:
        raise DataError(f"{path} is no .npy of NumPy: {error}") from error
    if len(shape) != 1 or dtype.kind not in "iu":
        raise DataError(
            f"{path} is an array {shape} of {dtype}; token ids are one row of whole numbers"
        )
    return file.tell(), dtype


def _bin_type(path: Path, file: IO[bytes], vocab_size: int) -> tuple[int, np.dtype]:
    """Return the byte at which the first id of a .bin begins, and the type of an id.

    The header of llm.c is recognized by its first number. Any other file has no header.

    Raises:
        DataError: An .idx file is next to the .bin, or the width of its ids is ambiguous.
    """
    if path.with_suffix(".idx").is_file():
        raise DataError(
            f"{path} has an index beside it, as Megatron's; write its ids alone as a .npy"
        )
    first_number = int.from_bytes(file.read(4), "little")
    if first_number in _LLM_C:
        return _LLM_C_BYTES, np.dtype(_LLM_C[first_number])
    return 0, np.dtype(_width(path, default_width(vocab_size)))


def array_header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Read the header of a .npy file and leave the stream at the first value.

    Returns:
        Shape of the array, whether it is in Fortran order, and its dtype.

    Raises:
        ValueError: The file is no .npy of NumPy, or its header is longer than 10,000 bytes.
    """
    version = np.lib.format.read_magic(stream)
    width = 2 if version == (1, 0) else 4
    # The header begins with its length. NumPy would read a header of any length.
    size = stream.read(width)
    length = int.from_bytes(size, "little")
    if len(size) < width or length > _LARGEST_HEADER:
        raise ValueError(f"its header has {length:,} bytes")
    header = io.BytesIO(size + stream.read(length))
    # NumPy parses the header as a Python literal, which may raise any of these errors.
    parser_errors = (SyntaxError, TypeError, KeyError, RecursionError, MemoryError)
    try:
        if width == 2:
            return np.lib.format.read_array_header_1_0(header)
        return np.lib.format.read_array_header_2_0(header)
    except parser_errors as error:
        raise ValueError(f"its header cannot be read: {error!s:.200}") from error


def default_width(vocab_size: int) -> str:
    """Return the NumPy type of an id in a file without a header: "<u2" or "<u4"."""
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


def _width(path: Path, dtype: str) -> str:
    """Return the NumPy type of the ids in a file without a header, "<u2", "<u4" or "<u8".

    Samples of the file are read. If every second number of 16 bits is 0, the ids have 32 bits, and
    likewise for 64 bits.

    Args:
        dtype: Type of an id unless the content shows wider ids, "<u2" or "<u4".

    Raises:
        WidthError: All upper halves are 0, but the file is too short to tell.
    """
    # Ids of 64 bits are first recognized as ids of 32 bits, then as ids of 64 bits.
    for wider in ("<u4", "<u8"):
        itemsize = np.dtype(dtype).itemsize
        if itemsize >= np.dtype(wider).itemsize or path.stat().st_size % (2 * itemsize):
            continue
        # Ids are little-endian, so the second half of an id is the upper one.
        halves = _sampled(path, 2 * itemsize).view(dtype).reshape(-1, 2)
        lower_is_zero = not halves[:, 0].any()
        upper_is_zero = not halves[:, 1].any()
        if lower_is_zero or not upper_is_zero:  # only zeros, or ids of this width
            return dtype
        if len(halves) < _ENOUGH:
            bits = 8 * itemsize
            raise WidthError(
                f"{path} has a 0 in every second place of {bits} bits: {2 * len(halves)} ids of "
                f"{bits} bits, or {len(halves)} of {2 * bits}; "
                "save them as .npy, which says their type"
            )
        dtype = wider
    return dtype


def _sampled(path: Path, itemsize: int) -> np.ndarray:
    """Read 32 KiB from each of about 16 evenly spread positions of a file. Return all as uint8.

    Args:
        itemsize: Bytes of an item. The positions are multiples of this number.
    """
    size = path.stat().st_size
    step = max(_SAMPLE_BYTES, size // _SAMPLES)
    starts = range(0, size, step - step % itemsize)
    blocks = []
    with path.open("rb") as file:
        for start in starts:
            file.seek(start)
            blocks.append(file.read(_SAMPLE_BYTES))
    return np.frombuffer(b"".join(blocks), np.uint8)
