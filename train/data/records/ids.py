"""Files of token ids: nanoGPT's .bin (ids of 16 bits, without a header), llm.c's .bin (with one), and .npy of whole numbers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from mupax.train.data.interface import DataError

SUFFIXES = (".bin", ".npy")
_PART_IDS = 1 << 23
_LLM_C = {20240520: "<u2", 20240801: "<u4"}
"""The first number of llm.c's headers, and what follows them."""
_LLM_C_BYTES = 1024


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

    def read(self, start: int, stop: int) -> np.ndarray:
        """Ids [start, stop) as int64.

        Args:
            start, stop: within the file's ids.

        Raises:
            DataError: the file became shorter, or has an id that the vocabulary has not.
        """
        with self.path.open("rb") as file:
            file.seek(self.offset + start * self.dtype.itemsize)
            ids = np.frombuffer(file.read((stop - start) * self.dtype.itemsize), self.dtype).astype(np.int64)
        if len(ids) != stop - start:
            raise DataError(f"{self.path} became shorter while it was read; start again when nothing writes to it")
        if (wrong := np.flatnonzero((ids < 0) | (ids >= self.vocab_size))).size:
            raise DataError(
                f"{self.path} has the id {ids[wrong[0]]} at place {start + wrong[0]} (read as {self.dtype}), and the tokenizer "
                f"has {self.vocab_size}; write data.tokenizer as the one that made the file, or take the file out"
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
        vocab_size: of the tokenizer that made it. Without a header an id has 16 bits, or 32 where the vocabulary needs them.

    Raises:
        DataError: it is no file of ids, or not of this vocabulary.
    """
    with path.open("rb") as file:
        if path.suffix.lower() == ".npy":
            try:
                version = np.lib.format.read_magic(file)
                read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                shape, _, dtype = read(file)
            except ValueError as error:
                raise DataError(f"{path} is no .npy of NumPy: {error}") from error
            if len(shape) != 1 or dtype.kind not in "iu":
                raise DataError(f"{path} is an array {shape} of {dtype}; token ids are one row of whole numbers")
            offset = file.tell()
        else:
            if path.with_suffix(".idx").is_file():
                raise DataError(f"{path} has an index beside it, as Megatron's; write its ids alone as a .npy")
            kind = _LLM_C.get(int.from_bytes(file.read(4), "little"))
            offset = _LLM_C_BYTES if kind else 0
            dtype = np.dtype(kind or ("<u2" if vocab_size <= 1 << 16 else "<u4"))
    size, rest = divmod(path.stat().st_size - offset, dtype.itemsize)
    if rest:
        raise DataError(f"{path} is no row of ids of {dtype.itemsize} bytes: {rest} are left over")
    ids = IdFile(path, dtype, offset, size, vocab_size)
    ids.read(0, min(size, 1024))
    return ids
