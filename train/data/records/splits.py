"""Which side of the split each part of a user's files is on, and what reads it.

Text goes by the hash of its file's path, a record by the hash of its text, ids by their file; where names of records or ids say
`train` and `eval`, `val` or `test`, those are the sides.
"""

from __future__ import annotations

import re
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
_TRAIN = {"train", "training"}
_EVAL = {"val", "valid", "validation", "dev", "eval", "test"}
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
    pieces = corpus.text_pieces(read.text) if read.text else {}
    of_text: dict[Path, list[tuple[str, Reader]]] = {file: [] for _, file in read.text}
    for side, on_side in pieces.items():
        for piece in on_side:
            of_text[piece.path].append((side, piece.read))
    by_name = _by_name([name for name, _ in (*read.records, *read.ids)])
    for_eval = corpus.names_for_eval([name for name, _ in read.ids])

    def of_ids(name: str, file: IdFile) -> list[tuple[str, Reader]]:
        cut = file.size if name not in for_eval else 0
        if by_name is not None:
            cut = file.size if by_name[name] == "train" else 0
        elif len(read.ids) == 1:
            cut = file.size - file.size // 10
        each = zip(SIDES, (file.parts(0, cut), file.parts(cut, file.size)), strict=True)
        return [(side, partial(_ids, file, *part)) for side, parts in each for part in parts]

    def of_records(file: Lines | Table, side: str | None) -> Iterator[tuple[str, Reader]]:
        for part in file.parts():
            for each in (side,) if side else SIDES:
                yield each, partial(_records, file, part, None if side else each)

    rest = [(name, file.path, of_ids(name, file)) for name, file in read.ids]
    entries = [*((name, file, of_text[file]) for name, file in read.text), *rest]
    listed = {name: FileParts(name, file, {side for side, _ in parts}, parts.__iter__) for name, file, parts in entries}
    for name, file in read.records:
        side = None if by_name is None else by_name[name]
        listed[name] = FileParts(name, file.path, {side} if side else {*SIDES}, partial(of_records, file, side))
    return [listed[name] for name, _ in (*read.text, *read.records, *read.ids)]


def _by_name(names: list[str]) -> dict[str, str] | None:
    """The side of each file by a word in its name or first folder; None where names tell no two sides."""
    words = {name: set(re.split(r"[^a-z]+", f"{name.split('/')[0]} {Path(name).name}".lower())) for name in names}
    named = {name: "eval" if terms & _EVAL and not terms & _TRAIN else "train" for name, terms in words.items()}
    telling = any(terms & _TRAIN for terms in words.values())
    return named if telling and set(named.values()) == {"train", "eval"} else None


def _records(file: Any, part: Any, side: str | None) -> list[tuple[bytes, bool]]:
    texts = file.read(part)
    return [(text, True) for text in texts if text and side in (None, corpus.side(text))]


def _ids(file: IdFile, start: int, stop: int) -> list[tuple[np.ndarray, bool]]:
    return [(file.read(start, stop), False)]
