"""Files of token ids: nanoGPT's .bin (16 bits an id, no header), llm.c's .bin (with a header), and .npy of whole numbers.

A .bin without a header does not say how wide its ids are. Ids of 32 or 64 bits are seen by their upper halves, which are all 0.
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
_LLM_C = {20240520: "<u2", 20240801: "<u4"}
"""The first number of llm.c's headers, and what follows them."""
_LLM_C_BYTES = 1024
_SAMPLES = 16
"""Places in a file that are looked at to see how wide its ids are."""
_SAMPLE_BYTES = 1 << 15
_LARGEST_HEADER = 10_000
"""Bytes of a .npy header; NumPy reads no longer one."""
_ENOUGH = 64
"""Ids whose upper halves are all 0 by no accident."""


class WidthError(DataError):
    """Ids of 16 or 32 bits, or half as many of twice as many bits: the file does not say."""


@dataclasses.dataclass(frozen=True)
class IdFile:
    """Ids of a file, documents and separators as they stand; `opened` makes it.

    Attributes:
        path: of the file.
        dtype: of an id.
        offset: where the first one begins.
        size: how many there are.
        vocab_size: what each must be below.
    """

    path: Path
    dtype: np.dtype
    offset: int
    size: int
    vocab_size: int

    @property
    def is_usual(self) -> bool:
        """True if ids have the width that such a file has unless its content says otherwise."""
        has_type = self.offset > 0  # in the header
        return has_type or self.dtype.str == default_width(self.vocab_size)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Ids [start, stop) as int64.

        Args:
            start, stop: within the file's ids.

        Raises:
            DataError: the file became shorter, or has an id that the vocabulary has not.
        """
        with self.path.open("rb") as file:
            file.seek(self.offset + start * self.dtype.itemsize)
            ids = np.frombuffer(file.read((stop - start) * self.dtype.itemsize), self.dtype).astype(
                np.int64
            )
        if len(ids) != stop - start:
            raise DataError(
                f"{self.path} became shorter while it was read; start again when nothing writes to it"
            )
        if (wrong := np.flatnonzero((ids < 0) | (ids >= self.vocab_size))).size:
            save = (
                ", save ids of another width as .npy" if self.path.suffix.lower() != ".npy" else ""
            )
            raise DataError(
                f"{self.path} has the id {ids[wrong[0]]} at place {start + wrong[0]} (read as {self.dtype}), and the tokenizer "
                f"has {self.vocab_size}; write data.tokenizer as the one that made the file{save}, or take the file out"
            )
        return ids

    def parts(self, start: int, stop: int) -> list[tuple[int, int]]:
        """[start, stop) in parts small enough to hold in memory.

        Args:
            start, stop: within the file's ids.
        """
        return [(i, min(i + _PART_IDS, stop)) for i in range(start, stop, _PART_IDS)]


def opened(path: Path, vocab_size: int) -> IdFile:
    """What a file of ids holds, by its header; the first ids are looked at.

    Args:
        path: of a .bin or .npy.
        vocab_size: of the tokenizer that made it. Without a header an id has 16 bits, or 32 where the vocabulary needs them,
            unless the file shows that its ids are wider.

    Raises:
        DataError: it is no file of ids, or not of this vocabulary, or of a width that cannot be told.
    """
    with path.open("rb") as file:
        if path.suffix.lower() == ".npy":
            try:
                shape, _, dtype = array_header(file)
            except ValueError as error:
                raise DataError(f"{path} is no .npy of NumPy: {error}") from error
            if len(shape) != 1 or dtype.kind not in "iu":
                raise DataError(
                    f"{path} is an array {shape} of {dtype}; token ids are one row of whole numbers"
                )
            offset = file.tell()
        else:
            if path.with_suffix(".idx").is_file():
                raise DataError(
                    f"{path} has an index beside it, as Megatron's; write its ids alone as a .npy"
                )
            kind = _LLM_C.get(int.from_bytes(file.read(4), "little"))
            offset = _LLM_C_BYTES if kind else 0
            dtype = np.dtype(kind or _width(path, default_width(vocab_size)))
    size, rest = divmod(path.stat().st_size - offset, dtype.itemsize)
    if rest:
        raise DataError(f"{path} is no row of ids of {dtype.itemsize} bytes: {rest} are left over")
    ids = IdFile(path, dtype, offset, size, vocab_size)
    ids.read(0, min(size, 1024))
    return ids


def array_header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Return the shape, whether the order is Fortran's, and the type of a .npy file, whose stream is then at its first value.

    Raises:
        ValueError: it is no .npy file of NumPy, or its header is longer than NumPy writes one.
    """
    version = np.lib.format.read_magic(stream)
    width = 2 if version == (1, 0) else 4
    size = stream.read(width)
    length = int.from_bytes(size, "little")
    if len(size) < width or length > _LARGEST_HEADER:
        raise ValueError(f"its header has {length:,} bytes")
    header = io.BytesIO(size + stream.read(length))
    read = (
        np.lib.format.read_array_header_1_0 if width == 2 else np.lib.format.read_array_header_2_0
    )
    try:
        return read(header)
    except (
        SyntaxError,
        TypeError,
        KeyError,
        RecursionError,
        MemoryError,
    ) as error:  # NumPy parses it as Python
        raise ValueError(f"its header cannot be read: {error!s:.200}") from error


def default_width(vocab_size: int) -> str:
    """Return the type of an id in a file without a header, as numpy writes it."""
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


def _width(path: Path, dtype: str) -> str:
    """Return the type of the ids of a file without a header.

    Args:
        path: of the file.
        dtype: type that an id has unless the file shows another one.

    Raises:
        WidthError: the upper halves seem to be 0, but the file is too short to tell.
    """
    for wider in ("<u4", "<u8"):
        itemsize = np.dtype(dtype).itemsize
        if itemsize >= np.dtype(wider).itemsize or path.stat().st_size % (2 * itemsize):
            continue
        halves = _sampled(path, 2 * itemsize).view(dtype).reshape(-1, 2)
        lower_is_zero = not halves[:, 0].any()
        upper_is_zero = not halves[:, 1].any()
        if lower_is_zero or not upper_is_zero:  # nothing but zeros, or ids of this width
            return dtype
        if len(halves) < _ENOUGH:
            raise WidthError(
                f"{path} has a 0 in every second place of {8 * itemsize} bits: {2 * len(halves)} ids of {8 * itemsize} bits, or "
                f"{len(halves)} of {16 * itemsize}; save them as .npy, which says their type"
            )
        dtype = wider
    return dtype


def _sampled(path: Path, itemsize: int) -> np.ndarray:
    """Return bytes from places all over a file, each a whole number of items."""
    size = path.stat().st_size
    step = max(_SAMPLE_BYTES, size // _SAMPLES)
    starts = range(0, size, step - step % itemsize)
    with path.open("rb") as file:
        blocks = []
        for start in starts:
            file.seek(start)
            blocks.append(file.read(_SAMPLE_BYTES))
    return np.frombuffer(b"".join(blocks), np.uint8)
