"""A user's own files as lanes: each has whole files, of about as much text as any other's."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from typing import Any

from mupax.train.data.records import corpus
from mupax.train.data.records.splits import FileParts
from mupax.train.data.streams.lanes import Chunk

MOST_LANES = 64
_UNEVEN = 1.1
"""The largest lane beside an even share, above which fewer lanes are made: a small one is through its text sooner."""
_CHUNK_BYTES = 1 << 18


class FileDocuments:
    """The documents of files, one after the other, of one side of the split. A position is [file, part, documents of it].

    Args:
        files: in order.
        side: of the split.
    """

    def __init__(self, files: Sequence[FileParts], side: str) -> None:
        self._files, self._side = files, side

    def after(self, position: Any) -> Iterator[tuple[Chunk, Any]]:
        """Chunks of the documents behind a position, and the position after each.

        Args:
            position: as the chunk before has it; None at the beginning.
        """
        first_file, first_part, first = position or (0, 0, 0)
        for i in range(first_file, len(self._files)):
            readers = (reader for side, reader in self._files[i].parts() if side == self._side)
            for j, reader in enumerate(readers):
                if j >= first_part:
                    yield from _chunks(reader(), i, j, first)
                    first = 0
            first_part = 0


def _chunks(documents: Chunk, file: int, part: int, first: int) -> Iterator[tuple[Chunk, Any]]:
    chunk, size = [], 0
    for count, (content, ends) in enumerate(documents[first:], first + 1):
        chunk.append((content, ends))
        size += len(content)
        if size >= _CHUNK_BYTES and count < len(documents):
            yield chunk, [file, part, count]
            chunk, size = [], 0
    yield chunk, [file, part + 1, 0]


def lanes(files: Sequence[FileParts], batch_size: int) -> list[list[FileParts]]:
    """Files by lane, in the order of a hash of their names; as many lanes as divide the batch and are about even.

    Args:
        files: of one side of the split.
        batch_size: over all processes.
    """
    sizes = {file.name: file.path.stat().st_size for file in files}
    even, divisor = sum(sizes.values()), math.gcd(batch_size, MOST_LANES)
    for count in (n for n in range(divisor, 1, -1) if divisor % n == 0):
        shares = [(0, i) for i in range(count)]
        of: list[list[FileParts]] = [[] for _ in range(count)]
        for file in sorted(files, key=lambda file: (-sizes[file.name], file.name)):
            size, i = heapq.heappop(shares)
            of[i].append(file)
            heapq.heappush(shares, (size + sizes[file.name], i))
        if max(shares)[0] * count <= _UNEVEN * even:
            return [_shuffled(lane) for lane in of]
    return [_shuffled(files)]


def _shuffled(files: Sequence[FileParts]) -> list[FileParts]:
    """In an order that is no order of the names: what stands together in a folder may be alike."""
    return sorted(files, key=lambda file: (corpus.rank(file.name), file.name))
