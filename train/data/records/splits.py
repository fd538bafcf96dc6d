"""Which side of the split each part of a user's files is on, and what reads it.

Names of files or folders tell it, as `split_names` has them. Where they do not, text goes by the hash of its file's path, a
record by the hash of its text, ids by their file.
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
"""Reads a part: (text as bytes or ids as an array, whether a document ends with it) of each of its documents."""


class FileParts(NamedTuple):
    """What a file holds."""

    name: str
    """Its path in the folder."""
    path: Path
    sides: set[str]
    """Of the split, that any of it may be on."""
    parts: Callable[[], Iterator[tuple[str, Reader]]]
    """Its parts in order, each with its side; they are looked for as they are asked for."""


class Parts(Sequence[list[tuple[Any, bool]]]):
    """Parts of one side, as `packing.Documents` has them; each is read when it is taken."""

    def __init__(self, readers: list[Reader]) -> None:
        self._readers = readers

    def __len__(self) -> int:
        return len(self._readers)

    def __getitem__(self, i: int) -> list[tuple[Any, bool]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._readers[i]()


def sides(read: Files) -> dict[str, Parts]:
    """The two sides of the split. Compressed records are read once to find their parts.

    Args:
        read: as `files` gave them.

    Raises:
        DataError: a file is damaged.
    """
    readers: dict[str, list[Reader]] = {side: [] for side in SIDES}
    for file in by_file(read):
        for side, reader in file.parts():
            readers[side].append(reader)
    return {side: Parts(readers[side]) for side in SIDES}


def by_file(read: Files) -> list[FileParts]:
    """The files one by one, in the order in which they are packed.

    Args:
        read: as `files` gave them.
    """
    pieces = (
        corpus.text_pieces(read.text, read.sides, read.is_utf8, read.broken) if read.text else {}
    )
    of_text: dict[Path, list[tuple[str, Reader]]] = {file: [] for _, file in read.text}
    for side, on_side in pieces.items():
        for piece in on_side:
            of_text[piece.path].append((side, piece.read))
    for_eval = corpus.names_for_eval([name for name, _ in read.ids if name not in read.sides])

    def of_ids(name: str, file: IdFile) -> list[tuple[str, Reader]]:
        if name in read.sides:
            cut = file.size if read.sides[name] == "train" else 0
        elif len(read.ids) == 1:
            cut = file.size - file.size // 10
        else:
            cut = file.size if name not in for_eval else 0
        each = zip(SIDES, (file.parts(0, cut), file.parts(cut, file.size)), strict=True)
        return [(side, partial(_ids, file, *part)) for side, parts in each for part in parts]

    def of_records(file: Lines | Table, side: str | None) -> Iterator[tuple[str, Reader]]:
        for part in file.parts():
            for each in (side,) if side else SIDES:
                yield each, partial(_records, file, part, None if side else each)

    rest = [(name, file.path, of_ids(name, file)) for name, file in read.ids]
    entries = [*((name, file, of_text[file]) for name, file in read.text), *rest]
    listed = {
        name: FileParts(name, file, {side for side, _ in parts}, parts.__iter__)
        for name, file, parts in entries
    }
    for name, file in read.records:
        side = read.sides.get(name)
        listed[name] = FileParts(
            name, file.path, {side} if side else {*SIDES}, partial(of_records, file, side)
        )
    return [listed[name] for name, _ in (*read.text, *read.records, *read.ids)]


def _records(file: Any, part: Any, side: str | None) -> list[tuple[bytes, bool]]:
    texts = file.read(part)
    return [(text, True) for text in texts if text and side in (None, corpus.side(text))]


def _ids(file: IdFile, start: int, stop: int) -> list[tuple[np.ndarray, bool]]:
    return [(file.read(start, stop), False)]
