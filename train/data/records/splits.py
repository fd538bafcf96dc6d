"""Parts of a user's files by the side of the split, and functions that read the parts.

Names of files or folders tell the side (`split_names`). Otherwise a text is split by the hash of
its file's path, a record by the hash of its text, and ids by their file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mupax.train.data.records import corpus
from mupax.train.data.records.ids import IdFile
from mupax.train.data.records.lines import Lines
from mupax.train.data.records.tables import Table
from mupax.train.data.records.user_files import Files

SIDES = ("train", "eval")
Reader = Callable[[], list[tuple[Any, bool]]]
"""Function that reads a part. It returns (text as bytes or ids as an array, whether a document ends
with it) for each document of the part."""


class FileParts(NamedTuple):
    """Parts of one file, with the side of the split of each."""

    name: str
    """Path in the folder."""
    path: Path
    sides: set[str]
    """Sides of the split that the file may have parts of."""
    parts: Callable[[], Iterator[tuple[str, Reader]]]
    """Function that yields the parts in order, each with its side. The file is searched for parts
    while they are yielded."""


class Parts(Sequence[list[tuple[Any, bool]]]):
    """Sequence of the parts of one side (`packing.Documents`). Indexing reads a part from disk."""

    def __init__(self, readers: list[Reader]) -> None:
        self._readers = readers

    def __len__(self) -> int:
        return len(self._readers)

    def __getitem__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, i: int
    ) -> list[tuple[Any, bool]]:
        return self._readers[i]()


def sides(files: Files) -> dict[str, Parts]:
    """Return the parts of both sides of the split.

    Files of lines, compressed or not, are read once to find where their parts begin. Of a table,
    the metadata and texts that refer to a dictionary or to another text are read.

    Args:
        files: Result of `user_files.files`.

    Returns:
        Parts by side, "train" and "eval".

    Raises:
        DataError: A file is damaged, a line is too long or a file unpacks to too much, and broken
            entries are not left out.
    """
    readers: dict[str, list[Reader]] = {side: [] for side in SIDES}
    for file in by_file(files):
        for side, reader in file.parts():
            readers[side].append(reader)
    return {side: Parts(readers[side]) for side in SIDES}


def by_file(files: Files) -> list[FileParts]:
    """Return the parts of each file, in the order in which the files are packed.

    Args:
        files: Result of `user_files.files`.
    """
    texts = _text_parts(files)
    # Files of ids are split among themselves, apart from plain text.
    for_eval = corpus.names_for_eval([name for name, _ in files.ids if name not in files.sides])
    file_parts = []
    for name, path in files.text:
        parts = texts[path]
        file_parts.append(FileParts(name, path, _sides_of(parts), parts.__iter__))
    for name, records in files.records:
        side = files.sides.get(name)
        sides_of_file = {side} if side else {*SIDES}
        parts = partial(_record_parts, records, side)
        file_parts.append(FileParts(name, records.path, sides_of_file, parts))
    for name, id_file in files.ids:
        parts = _id_parts(id_file, _train_size(files, name, id_file, for_eval))
        file_parts.append(FileParts(name, id_file.path, _sides_of(parts), parts.__iter__))
    return file_parts


def _sides_of(parts: list[tuple[str, Reader]]) -> set[str]:
    """Return the sides of the split that have some of the parts."""
    return {side for side, _ in parts}


def _text_parts(files: Files) -> dict[Path, list[tuple[str, Reader]]]:
    """Return the parts of each file of plain text, training parts first."""
    parts: dict[Path, list[tuple[str, Reader]]] = {path: [] for _, path in files.text}
    if not files.text:
        return parts
    pieces = corpus.text_pieces(files.text, files.sides, files.is_utf8, files.broken)
    for side, side_pieces in pieces.items():
        for piece in side_pieces:
            parts[piece.path].append((side, piece.read))
    return parts


def _train_size(files: Files, name: str, file: IdFile, for_eval: set[str]) -> int:
    """Return the number of ids at the beginning of a file that are for training.

    It is 0 or the size of the file. The only file of ids, without a side in its name, has its last
    tenth for evaluation.

    Args:
        for_eval: Names of the files of ids that are for evaluation by hash.
    """
    if name in files.sides:
        return file.size if files.sides[name] == "train" else 0
    if len(files.ids) == 1:
        # No other file of ids could be for evaluation, so the last tenth of this one is.
        return file.size - file.size // 10
    return 0 if name in for_eval else file.size


def _id_parts(file: IdFile, train_size: int) -> list[tuple[str, Reader]]:
    """Return the parts of a file of ids, training parts first.

    Args:
        train_size: Number of ids at the beginning that are for training (`_train_size`).
    """
    parts: list[tuple[str, Reader]] = []
    for start, stop in file.parts(0, train_size):
        parts.append(("train", partial(_read_ids, file, start, stop)))
    for start, stop in file.parts(train_size, file.size):
        parts.append(("eval", partial(_read_ids, file, start, stop)))
    return parts


def _record_parts(file: Lines | Table, side: str | None) -> Iterator[tuple[str, Reader]]:
    """Yield the parts of a file of records, on one side or on both.

    Args:
        side: Side that the file's name tells. `None` if the hash of a record tells its side. Then
            every part is yielded once for each side.
    """
    for part in file.parts():
        if side is not None:
            yield side, partial(_read_records, file, part, None)
            continue
        # A part may have records of both sides, so it is read once for each side.
        for hash_side in SIDES:
            yield hash_side, partial(_read_records, file, part, hash_side)


def _read_records(file: Any, part: Any, side: str | None) -> list[tuple[bytes, bool]]:
    """Return (text, True) for each text of a part that is on a side, or for all texts for `None`.

    Empty texts are left out.

    Args:
        file: `Lines` or `Table` that contains the part.
        part: Part from `file.parts()`.
    """
    texts = file.read(part)
    chosen = []
    for text in texts:
        if text and side in (None, corpus.side(text)):
            chosen.append((text, True))
    return chosen


def _read_ids(file: IdFile, start: int, stop: int) -> list[tuple[np.ndarray, bool]]:
    """Return the ids from `start` to `stop` - 1 of a file, as the only entry of a list.

    The ids already contain a separator after every document. The entry therefore says `False`: no
    document ends with it (`Reader`).
    """
    return [(file.read(start, stop), False)]
