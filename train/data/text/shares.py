"""Help of waiting processes for the process that packs a corpus.

A corpus is a sequence of parts. A part is a list of documents that is read at once, such as a file.
A share is a range of at least 16 parts. One process tokenizes and packs the parts in order
(`packing`). Processes that wait for it tokenize shares from the end, and leave their ids on disk:

    FOLDER/shares/train-160-176.npz    ids of parts 160 to 175, and the number of ids per document
    FOLDER/shares/train-160-176.lock   held by the process that tokenizes these parts

When the packing process comes to a share that is finished, it takes the ids. It tokenizes the parts
of any other share itself. So the packed corpus does not depend on the helping processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mupax import disk
from mupax.train.data.text.tokenizer import Encoder

FOLDER = "shares"
_PARTS = 16
"""Smallest number of parts in a share. 16 pieces of a large file are 256 MiB."""
_MOST_SHARES = 4096
_TAIL_BYTES = 4096
"""Number of bytes at the end of a file with the progress of packing that contain its last line."""


class Document(NamedTuple):
    """Document, or piece of a document, that is to be packed: as text, or already as ids."""

    text: bytes
    """Text in UTF-8. Empty if `ids` are present."""
    text_bytes: int
    """Bytes of the text. For a file of ids, the number of ids."""
    ends: bool
    """True if this is the last piece of its document."""
    ids: np.ndarray | None = None
    """Ids of a tokenized document, with its separator. `None` before it is tokenized."""
    by_others: bool = False
    """True if another process tokenized the document."""
    quoted: Mapping[str, int] | None = None
    """How often the text contains each special token, if another process counted it."""


Part = list[Document]


def steps(parts: Iterator[Part], size: int) -> Iterator[list[Part]]:
    """Group consecutive parts into lists that have at least `size` bytes of text each.

    The last list may have less.

    Args:
        parts: Parts in order, each a list of documents.
        size: Smallest size of a list in bytes.
    """
    step = []
    step_bytes = 0
    for part in parts:
        step.append(part)
        step_bytes += sum(document.text_bytes for document in part)
        if step_bytes >= size:
            yield step
            step = []
            step_bytes = 0
    if step:
        yield step


def encoded(step: list[Document], tokenizer: Encoder) -> list[np.ndarray]:
    """Tokenize documents. Return the ids of each, with the separator if the document ends.

    The ids of a document that has `ids` are returned unchanged. The integer types of the arrays may
    differ, and are not yet that of the packed file.
    """
    separator = np.array([tokenizer.separator])
    texts = []
    for document in step:
        if document.ids is None:
            texts.append(document.text)
    text_ids = iter(tokenizer.encode(texts))
    ids = []
    for document in step:
        if document.ids is None:
            ids.append(np.append(next(text_ids), separator[: document.ends]))
        else:
            ids.append(document.ids)
    return ids


def quoted(step: list[Document], tokenizer: Encoder) -> dict[str, int]:
    """Return how often the texts of documents contain each special token, by token.

    Args:
        tokenizer: Tokenizer that counts. The count of a document that is tokenized already is taken
            from the document.
    """
    total = Counter()
    for document in step:
        if document.ids is None:
            total.update(tokenizer.quoted(document.text))
        else:
            total.update(document.quoted or {})
    return dict(total)


def in_order(documents: Any, side: str, first: int, folder: Path, dtype: str) -> Iterator[Part]:
    """Yield the parts of a text in order, as ids where a helping process has tokenized them.

    All other parts are read from disk as text. The file of a share is deleted after its last part.

    Args:
        documents: Sequence of the parts of the training or evaluation text (`packing.Documents`).
        side: "train" or "eval", with which the names of the files begin.
        first: Index of the first part to yield. It is above 0 after a process was killed.
        folder: Folder of the packed corpus. The shares are in the folder `FOLDER` in it.
        dtype: NumPy type of the ids. A share of another type is not used.
    """
    while first < len(documents):
        start, stop = _bounds(first, len(documents))
        path = folder / FOLDER / f"{side}-{start}-{stop}.npz"
        share = _read(path, stop - start, dtype)
        for i in range(first, stop):
            yield share[i - start] if share else documents_of(documents[i])
        # Delete each share once it is read: all shares of a corpus take as much disk as the corpus.
        path.unlink(missing_ok=True)
        first = stop


def pack(
    documents: Mapping[str, Any], tokenizer: Encoder, folder: Path, dtype: str, step_bytes: int
) -> None:
    """Tokenize shares for the packing process, the last share first, until it has reached them.

    A share is a range of parts. A share that exists or that another process has locked is skipped.

    Args:
        documents: Sequence of parts under "train" and "eval" (`packing.Documents`).
        folder: Folder of the packed corpus, with the progress of the packing process.
        dtype: NumPy type of the ids in the shares.
        step_bytes: Bytes of text that are tokenized at once.

    Raises:
        OSError: The disk is full, or the packing process is done and has removed the shares.
        DataError: A document cannot be read.
    """
    # The packing process begins with the first part of the first side, so helpers begin at the end.
    for side in reversed([*documents]):
        start = len(documents[side])
        while start and not (folder / "manifest.json").exists():
            start, stop = _bounds(start - 1, len(documents[side]))
            # The packing process has reached this share, and tokenizes it itself.
            if start <= _position(folder / f"{side}.jsonl"):
                break
            path = folder / FOLDER / f"{side}-{start}-{stop}.npz"
            path.parent.mkdir(parents=True, exist_ok=True)
            # The operating system frees the lock of a killed process.
            with path.with_suffix(".lock").open("a") as lock, contextlib.suppress(BlockingIOError):
                # A share that another process has locked is skipped.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not path.exists():
                    parts = (documents_of(documents[side][i]) for i in range(start, stop))
                    _write(path, parts, tokenizer, dtype, step_bytes)


def _bounds(i: int, count: int) -> tuple[int, int]:
    """Return the range of parts (first, end) of the share that contains part `i`.

    The range is the same in every process.

    Args:
        count: Number of all parts of the training or evaluation text.
    """
    size = max(_PARTS, -(-count // _MOST_SHARES))
    start = i - i % size
    return start, min(start + size, count)


def documents_of(contents: list[tuple[bytes | np.ndarray, bool]]) -> Part:
    """Return the contents of a part as `Document` objects.

    Args:
        contents: Pairs of a text as bytes or ids as an array, and whether a document ends with it.
    """
    documents = []
    for content, ends in contents:
        if isinstance(content, bytes):
            documents.append(Document(content, len(content), ends))
        else:
            documents.append(Document(b"", len(content), ends, content))
    return documents


def _position(progress: Path) -> int:
    """Return the number of parts that the packing process has written so far.

    It is 0 if there is no file, no complete line in it, or if its last line is damaged.

    Args:
        progress: File to which the packing process adds a line after every step.
    """
    unreadable = (OSError, IndexError, KeyError, disk.JsonError)
    with contextlib.suppress(*unreadable), progress.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - _TAIL_BYTES))
        # A line that is being written has no end yet.
        complete, _, _ = file.read().rpartition(b"\n")
        last_line = complete.splitlines()[-1]
        return int(disk.json_object(last_line, "a line")["documents"])
    return 0


def _write(
    path: Path, parts: Iterator[Part], tokenizer: Encoder, dtype: str, step_bytes: int
) -> None:
    """Tokenize the parts of a share and write them to a file, which appears when it is complete.

    Args:
        dtype: NumPy type of the ids in the file.
        step_bytes: Bytes of text that are tokenized at once.
    """
    ids = [np.zeros(0, dtype)]
    facts = []
    sizes = []
    quotes = []
    for step in steps(parts, step_bytes):
        documents = list(itertools.chain.from_iterable(step))
        tokens = encoded(documents, tokenizer)
        for document, document_ids in zip(documents, tokens, strict=True):
            ids.append(document_ids.astype(dtype))
            facts.append((len(document_ids), document.text_bytes, document.ends))
            quotes.append(quoted([document], tokenizer))
        sizes += [len(part) for part in step]

    # Hosts may share the folder, so a process id alone is not unique.
    temporary = path.with_suffix(f".{socket.gethostname()}.{os.getpid()}.part")
    with temporary.open("wb") as file:
        np.savez(
            file,
            ids=np.concatenate(ids),
            facts=np.array(facts, np.int64).reshape(-1, 3),
            sizes=np.array(sizes),
            quoted=np.array(json.dumps(quotes)),
        )
        file.flush()
        os.fsync(file.fileno())
    # Atomic: a reader sees the complete share or none.
    temporary.replace(path)


def _read(path: Path, count: int, dtype: str) -> list[Part] | None:
    """Read the tokenized parts of a share. Return `None` if the share is missing or damaged.

    Args:
        path: File of the share. The format has checksums.
        count: Number of parts that the share must have.
        dtype: NumPy type that the ids must have.
    """
    try:
        # A pickle would run code of whoever can write to a shared cache.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            ids = arrays["ids"]
            facts = arrays["facts"]
            sizes = arrays["sizes"]
            quotes = json.loads(str(arrays["quoted"]))
    except Exception:  # a damaged file may raise any error
        return None
    if ids.dtype != dtype or len(sizes) != count or facts.shape != (sizes.sum(), 3):
        return None
    if facts[:, 0].sum() != len(ids):
        return None

    tokens = np.split(ids, np.cumsum(facts[:, 0]))
    # `np.split` returns an empty array after the last cut, for which there is no document.
    documents = []
    for document_ids, (_, text_bytes, ends), counts in zip(tokens, facts, quotes, strict=False):
        documents.append(Document(b"", int(text_bytes), bool(ends), document_ids, True, counts))
    remaining = iter(documents)
    return [list(itertools.islice(remaining, int(size))) for size in sizes]
