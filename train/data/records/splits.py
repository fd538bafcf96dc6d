"""Division of a user's files into parts for training and for evaluation, and their readers.

A part is a range of a file that is read at once. The sides of the split are "train" and "eval".
Names of files or folders may decide the side (`split_names`). Otherwise the hash of the file's path
decides for plain text and for ids, and the hash of its text decides for a record.
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
"""Function that reads a part of a file from disk.

It returns a pair for each document of the part, or piece of a document: the text as bytes or the
ids as an array, and True if the document ends with it.
"""


class FileParts(NamedTuple):
    """Parts of one file (ranges that are read at once), for training and for evaluation."""

    name: str
    """Path relative to the folder of the data."""
    path: Path
    sides: set[str]
    """Sides for which the file may have text, "train" or "eval" or both."""
    parts: Callable[[], Iterator[tuple[str, Reader]]]
    """Function that yields, for each part in order, its side and a function that reads it.

    A file of records is searched for parts while they are yielded.
    """


class Parts(Sequence[list[tuple[Any, bool]]]):
    """Sequence of all parts for training, or of all for evaluation. Indexing reads a part.

    An item is a list of documents, as `Reader` returns it. `packing.Documents` has one such
    sequence per side.
    """

    def __init__(self, readers: list[Reader]) -> None:
        self._readers = readers

    def __len__(self) -> int:
        return len(self._readers)

    def __getitem__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, i: int
    ) -> list[tuple[Any, bool]]:
        return self._readers[i]()


def sides(files: Files) -> dict[str, Parts]:
    """Divide a user's files into parts for training and parts for evaluation.

    Files of JSON lines, compressed or not, are read once to find where their parts begin. Of a
    Parquet file, only the metadata is read, and texts that refer to a dictionary or to another
    text.

    Args:
        files: Result of `user_files.files`.

    Returns:
        Parts under the keys "train" and "eval". Indexing them reads a part from disk.

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
    """Divide each file into parts, and return the files in the order in which they are packed.

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
    """Return the sides ("train", "eval") that occur in a list of parts of a file."""
    return {side for side, _ in parts}


def _text_parts(files: Files) -> dict[Path, list[tuple[str, Reader]]]:
    """Return (side, reader) of each part of each plain-text file, training parts first."""
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

    A file is for training or for evaluation as a whole, so the result is the number of its ids or
    0. Only if there is a single file of ids, and its name does not tell, its last tenth is for
    evaluation.

    Args:
        name: Path of the file relative to the folder.
        for_eval: Names of the files of ids that are for evaluation by hash.
    """
    if name in files.sides:
        return file.size if files.sides[name] == "train" else 0
    if len(files.ids) == 1:
        # No other file of ids could be for evaluation, so the last tenth of this one is.
        return file.size - file.size // 10
    return 0 if name in for_eval else file.size


def _id_parts(file: IdFile, train_size: int) -> list[tuple[str, Reader]]:
    """Return (side, reader) of each part of a file of ids, training parts first.

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
    """Yield (side, reader) of each part of a file of records.

    Args:
        side: "train" or "eval" if the file's name decides the side. `None` if the hash of each
            record decides. Then every part is yielded twice: a part may have records of both sides,
            and each reader returns those of one side.
    """
    for part in file.parts():
        if side is not None:
            yield side, partial(_read_records, file, part, None)
            continue
        # A part may have records of both sides, so it is read once for each side.
        for hash_side in SIDES:
            yield hash_side, partial(_read_records, file, part, hash_side)


def _read_records(file: Any, part: Any, side: str | None) -> list[tuple[bytes, bool]]:
    """Read the texts of a part of a file of records, and return (text, True) for each.

    True says that the document ends with the text. Empty texts are left out.

    Args:
        file: `Lines` or `Table` that contains the part.
        part: Part from `file.parts()`.
        side: "train" or "eval" for the texts that belong there by their hash. `None` for all texts.
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
