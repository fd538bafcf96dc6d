"""Division of a user's own files among the lanes of a stream, and the documents of each lane.

A lane is a share of the files, tokenized on its own. It has complete files, and about as much text
as every other lane. `sources/streams.py` makes a stream of them.
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
"""Largest number of lanes of a stream, each a share of its files."""
_UNEVEN = 1.1
"""Largest size of a lane, as a multiple of the mean size. Fewer lanes are made if one is larger.

With uneven lanes, a small lane would end long before the others, and its text would be repeated.
"""
_CHUNK_BYTES = 1 << 18


class FileDocuments:
    """Training documents, or evaluation documents, of some files in order.

    A position in them is [index of the file, index of the part of the file, number of documents of
    the part that come before]. A part is a range of a file that is read at once.

    Args:
        files: Files in the order in which they are read.
        side: "train" for the training documents, "eval" for the evaluation documents.
    """

    def __init__(self, files: Sequence[FileParts], side: str) -> None:
        self._files = files
        self._side = side

    def after(self, position: Any) -> Iterator[tuple[Chunk, Any]]:
        """Yield lists of the documents after a position, each with the position at its end.

        Args:
            position: Position that an earlier call yielded. None is the beginning.
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
    """Yield the documents of a part in lists of about `_CHUNK_BYTES`, each with its end position.

    The last list may be empty. Its position is the beginning of the next part.

    Args:
        documents: All documents of the part, including those before `first`.
        file: Index of the file, for the positions (`FileDocuments`).
        part: Index of the part, for the positions.
        first: Index of the first document to yield.
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
    """Divide files among the lanes of a stream. Return the files of each lane in order.

    The number of lanes divides the batch size and 64. It is the largest for which no lane has more
    than 1.1 times the mean size in bytes, or else 1. The order of files is that of a hash of their
    names.

    Args:
        files: All files with training text, or all files with evaluation text.
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
    """Return files in the order of a hash of their names, because neighbours may be alike."""
    return sorted(files, key=lambda file: (corpus.rank(file.name), file.name))
