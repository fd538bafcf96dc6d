"""Exact copies of evaluation documents or files in the training part: they are counted for the user, and stay where they are."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from mupax.train.data import cache
from mupax.train.data.records.splits import FileParts
from mupax.train.data.text.packing import PackedCorpus

_MOST_TOKENS = 1 << 30
"""Of the training part; a larger one would be read for too long."""
_MOST_EVAL_TOKENS = 1 << 27
"""Of the evaluation part, whose documents are held in memory."""
_BLOCK_TOKENS = 1 << 24
_BLOCK_BYTES = 1 << 24
_KEY_TOKENS = 4
"""Tokens at either end of a document that are compared before the document is."""


def report(sides: Mapping[str, PackedCorpus], separator: int, note: cache.Note) -> None:
    """Tell the user how many evaluation documents are also in the training part, token by token.

    Args:
        sides: both sides of a packed corpus.
        separator: id that ends every document.
        note: told the number, if there are such documents.
    """
    train = sides["train"]
    held_out = sides["eval"]
    if len(train.tokens) > _MOST_TOKENS or len(held_out.tokens) > _MOST_EVAL_TOKENS:
        return

    def count() -> dict[str, float]:
        copies, documents = _copies(train.tokens, held_out.tokens, separator)
        return {"copies": float(copies), "documents": float(documents)}

    numbers = cache.remembered(f"copies-{cache.digest(train.digest, held_out.digest)}", count)
    copies = int(numbers["copies"])
    documents = int(numbers["documents"])
    if copies:
        note(
            f"caution: {copies:,} of {documents:,} evaluation documents are also in the training part, word for word; "
            "take them out of one part, or evaluation is too good"
        )


def _copies(train: np.ndarray, held_out: np.ndarray, separator: int) -> tuple[int, int]:
    """Return how many evaluation documents are also training documents, and how many there are; empty ones do not count."""
    starts, stops = _documents(held_out, separator)
    held_out_counts: dict[bytes, int] = Counter(
        held_out[start:stop].tobytes()
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)
    )
    keys = np.unique(_keys(held_out, starts, stops))
    train_starts, train_stops = _documents(train, separator)
    copies: set[bytes] = set()
    for first in range(0, len(train_starts), _BLOCK_TOKENS):
        block = slice(first, first + _BLOCK_TOKENS)
        alike = np.isin(_keys(train, train_starts[block], train_stops[block]), keys)
        for i in np.flatnonzero(alike).tolist():
            content = train[train_starts[first + i] : train_stops[first + i]].tobytes()
            if content in held_out_counts:
                copies.add(content)
    return sum(held_out_counts[content] for content in copies), len(starts)


def _documents(tokens: np.ndarray, separator: int) -> tuple[np.ndarray, np.ndarray]:
    """Return where documents begin and end (their separators left out), int64 [documents] each."""
    blocks = range(0, len(tokens), _BLOCK_TOKENS)
    ends = [
        np.flatnonzero(tokens[start : start + _BLOCK_TOKENS] == separator) + start
        for start in blocks
    ]
    stops = np.concatenate([np.zeros(0, np.int64), *ends, [len(tokens)]]).astype(np.int64)
    starts = np.concatenate([[0], stops[:-1] + 1])
    has_tokens = stops > starts
    return starts[has_tokens], stops[has_tokens]


def _keys(tokens: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Return a number per document that equal documents share, uint64 [documents]: of its length and of tokens at its ends."""
    keys = (stops - starts).astype(np.uint64)
    for i in range(_KEY_TOKENS):
        for places in (np.minimum(starts + i, stops - 1), np.maximum(stops - 1 - i, starts)):
            keys = keys * np.uint64(0x9E3779B97F4A7C15) + tokens[places].astype(np.uint64)
    return keys


def report_files(
    train: Sequence[FileParts], held_out: Sequence[FileParts], note: cache.Note
) -> None:
    """Tell the user how many evaluation files are also training files, byte by byte. Files of one size alone are read.

    Args:
        train, held_out: files of each side; one with both is no copy of itself.
        note: told the number, if there are such files.
    """
    by_size: dict[int, list[Path]] = {}
    for file in train:
        by_size.setdefault(file.path.stat().st_size, []).append(file.path)
    only_held_out = [file.path for file in held_out if file.sides == {"eval"}]
    copies = 0
    for path in only_held_out:
        alike = by_size.get(path.stat().st_size, [])
        if alike:
            digest = _digest(path)
            copies += any(_digest(other) == digest for other in alike)
    if copies:
        note(
            f"caution: {copies:,} of {len(only_held_out):,} evaluation files are also in the training part, byte for byte; "
            "take them out of one part, or evaluation is too good"
        )


def _digest(path: Path) -> bytes:
    total = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            total.update(block)
    return total.digest()
