"""User's own files as lanes of a stream: complete files, and about as much text in every lane.

`sources/streams.py` makes lanes of these documents.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from typing import Any

from mupax.train.data.records import corpus
from mupax.train.data.records.splits import FileParts
from mupax.train.data.streams.lanes import Chunk

MOST_LANES = 64
"""Largest number of lanes."""
_UNEVEN = 1.1
"""Largest size of a lane, as a multiple of an even share. Otherwise fewer lanes are made.

With uneven lanes, a small one would have read all of its text before the others.
"""
_CHUNK_BYTES = 1 << 18


class FileDocuments:
    """Documents of files, one file after the other, of one side of the split.

    A position is [file, part, number of documents of the part].

    Args:
        side: Side of the split, train or eval.
    """

    def __init__(self, files: Sequence[FileParts], side: str) -> None:
        self._files = files
        self._side = side

    def after(self, position: Any) -> Iterator[tuple[Chunk, Any]]:
        """Yield chunks of the documents after a position, each with the position after it.

        Args:
            position: Position that came with a chunk. None is the beginning.
        """
        first_file, first_part, first = position or (0, 0, 0)
        for i in range(first_file, len(self._files)):
            readers = (reader for side, reader in self._files[i].parts() if side == self._side)
            for j, reader in enumerate(readers):
                if j >= first_part:
                    yield from _chunks(reader(), i, j, first)
                    first = 0
            first_part = 0


def _chunks(
    documents: Chunk, file: int, part: int, first: int
) -> Iterator[tuple[Chunk, list[int]]]:
    """Yield the documents of a part from number `first` on, in chunks of about `_CHUNK_BYTES`.

    Each chunk comes with the position after it (`FileDocuments`). The last one has the position of
    the next part, and may be empty.
    """
    chunk: Chunk = []
    size = 0
    for count, (content, ends) in enumerate(documents[first:], first + 1):
        chunk.append((content, ends))
        size += len(content)
        # The last chunk of a part comes below, with the position of the next part.
        if size >= _CHUNK_BYTES and count < len(documents):
            yield chunk, [file, part, count]
            chunk = []
            size = 0
    yield chunk, [file, part + 1, 0]


def lanes(files: Sequence[FileParts], batch_size: int) -> list[list[FileParts]]:
    """Return the files of each lane, in the order of a hash of their names.

    The number of lanes divides the batch size and 64. It is the largest for which no lane has more
    than 1.1 times an even share of the bytes, or 1.

    Args:
        files: Files of one side of the split.
    """
    sizes = {file.name: file.path.stat().st_size for file in files}
    total = sum(sizes.values())
    largest_first = sorted(files, key=lambda file: (-sizes[file.name], file.name))
    divisor = math.gcd(batch_size, MOST_LANES)
    for count in range(divisor, 1, -1):
        if divisor % count:
            continue
        # Greedy: each file, the largest first, goes to the smallest lane, so that lanes become
        # even.
        heap = [(0, i) for i in range(count)]
        by_lane: list[list[FileParts]] = [[] for _ in range(count)]
        for file in largest_first:
            size, i = heapq.heappop(heap)
            by_lane[i].append(file)
            heapq.heappush(heap, (size + sizes[file.name], i))

        largest, _ = max(heap)
        if largest * count <= _UNEVEN * total:
            return [_shuffled(lane) for lane in by_lane]
    return [_shuffled(files)]


def _shuffled(files: Sequence[FileParts]) -> list[FileParts]:
    """Return files in the order of a hash, because neighbours in a folder may be alike."""
    return sorted(files, key=lambda file: (corpus.rank(file.name), file.name))
