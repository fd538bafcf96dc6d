"""Warnings about evaluation documents and files that are also in the training part.

The user is told their number. The data is not changed.
"""

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
"""Largest training part that is searched, in tokens. A larger one would take too long to read."""
_MOST_EVAL_TOKENS = 1 << 27
"""Largest evaluation part whose documents are searched for, in tokens. They are held in memory."""
_BLOCK_TOKENS = 1 << 24
_BLOCK_BYTES = 1 << 24
_KEY_TOKENS = 4
"""Number of tokens at either end of a document from which its hash key is computed."""


def report(sides: Mapping[str, PackedCorpus], separator: int, note: cache.Note) -> None:
    """Tell the user how many evaluation documents are also training documents.

    Documents are compared token by token. A corpus that is too large is not searched. The counts
    are cached on disk.

    Args:
        sides: Packed training and evaluation text of a corpus, under "train" and "eval".
        separator: Id that ends every document of the corpus.
        note: Function that prints a line for the user. It is called only if there are copies.
    """
    train = sides["train"]
    held_out = sides["eval"]
    if len(train.tokens) > _MOST_TOKENS or len(held_out.tokens) > _MOST_EVAL_TOKENS:
        return

    def count() -> dict[str, float]:
        copies, documents = _copies(train.tokens, held_out.tokens, separator)
        return {"copies": float(copies), "documents": float(documents)}

    # Counting reads the complete corpus, so the result is cached.
    key = cache.digest(train.digest, held_out.digest)
    numbers = cache.remembered(f"copies-{key}", count)
    copies = int(numbers["copies"])
    documents = int(numbers["documents"])
    if copies:
        note(
            f"caution: {copies:,} of {documents:,} evaluation documents are also in the training "
            "part, word for word; take them out of one part, or evaluation is too good"
        )


def _copies(train: np.ndarray, held_out: np.ndarray, separator: int) -> tuple[int, int]:
    """Count the evaluation documents that are also training documents.

    Args:
        train: Ids of all training documents, one after the other.
        held_out: Ids of all evaluation documents, one after the other.

    Returns:
        Number of evaluation documents with a copy in training, and number of all evaluation
        documents. Empty documents do not count.
    """
    starts, stops = _documents(held_out, separator)
    bounds = zip(starts.tolist(), stops.tolist(), strict=True)
    held_out_counts = Counter(held_out[start:stop].tobytes() for start, stop in bounds)
    held_out_keys = np.unique(_keys(held_out, starts, stops))

    train_starts, train_stops = _documents(train, separator)
    # A document with several copies in the training part counts once.
    copies: set[bytes] = set()
    for first in range(0, len(train_starts), _BLOCK_TOKENS):
        block_starts = train_starts[first : first + _BLOCK_TOKENS]
        block_stops = train_stops[first : first + _BLOCK_TOKENS]
        # Keys are cheap hashes, so only documents with an equal key are compared token by token.
        has_equal_key = np.isin(_keys(train, block_starts, block_stops), held_out_keys)
        for i in np.flatnonzero(has_equal_key).tolist():
            content = train[block_starts[i] : block_stops[i]].tobytes()
            if content in held_out_counts:
                copies.add(content)
    num_copies = sum(held_out_counts[content] for content in copies)
    return num_copies, len(starts)


def _documents(tokens: np.ndarray, separator: int) -> tuple[np.ndarray, np.ndarray]:
    """Find the documents of a packed text.

    Args:
        tokens: Ids of all documents, one after the other.

    Returns:
        Index of the first token of each document, and of its separator, int64 [documents] each.
        Empty documents are left out.
    """
    ends = []
    for start in range(0, len(tokens), _BLOCK_TOKENS):
        block = tokens[start : start + _BLOCK_TOKENS]
        ends.append(np.flatnonzero(block == separator) + start)
    stops = np.concatenate([np.zeros(0, np.int64), *ends, [len(tokens)]]).astype(np.int64)
    starts = np.concatenate([[0], stops[:-1] + 1])
    has_tokens = stops > starts
    return starts[has_tokens], stops[has_tokens]


def _keys(tokens: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Return a cheap hash of each document, uint64 [documents]. Equal documents have equal hashes.

    The hash is made of the document's length and of the `_KEY_TOKENS` tokens at either end, so
    different documents may have equal hashes, too.

    Args:
        starts: Index of the first token of each document.
        stops: Index of the token after the last of each document.
    """
    # 2^64 over the golden ratio, an odd number that spreads keys over all bits.
    factor = np.uint64(0x9E3779B97F4A7C15)
    keys = (stops - starts).astype(np.uint64)
    for i in range(_KEY_TOKENS):
        # A document of fewer than `_KEY_TOKENS` tokens counts its end more than once. That is
        # harmless, because its copies count the same tokens as often.
        first_tokens = tokens[np.minimum(starts + i, stops - 1)]
        keys = keys * factor + first_tokens.astype(np.uint64)
        last_tokens = tokens[np.maximum(stops - 1 - i, starts)]
        keys = keys * factor + last_tokens.astype(np.uint64)
    return keys


def report_files(
    train: Sequence[FileParts], held_out: Sequence[FileParts], note: cache.Note
) -> None:
    """Tell the user how many evaluation files have the same content as a training file.

    Files are compared by digest. Only files of equal size are read.

    Args:
        train: Files from which training text is read. Some may also have evaluation text.
        held_out: Files from which evaluation text is read. A file that may also have training text
            is not counted.
        note: Function that prints a line for the user. It is called only if there are copies.
    """
    by_size: dict[int, list[Path]] = {}
    for file in train:
        by_size.setdefault(file.path.stat().st_size, []).append(file.path)
    only_held_out = []
    for file in held_out:
        if file.sides == {"eval"}:
            only_held_out.append(file.path)
    copies = 0
    for path in only_held_out:
        equal_size = by_size.get(path.stat().st_size, [])
        if equal_size:
            digest = _digest(path)
            copies += any(_digest(train_path) == digest for train_path in equal_size)
    if copies:
        note(
            f"caution: {copies:,} of {len(only_held_out):,} evaluation files are also in the "
            "training part, byte for byte; take them out of one part, or evaluation is too good"
        )


def _digest(path: Path) -> bytes:
    """Return the BLAKE2 digest of a file's content."""
    total = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            total.update(block)
    return total.digest()
