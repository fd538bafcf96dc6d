"""Shares of the documents, tokenized from the end by processes that would wait for the one that packs them all.

Documents come in parts, a list of them each: a file, or what of its records is read at once.

    FOLDER/shares/train-160-176.npz    ids of parts 160 to 175, and of each document how many they are
    FOLDER/shares/train-160-176.lock   held by the process that tokenizes them; a killed one frees it

The process that packs all goes through the parts in order, takes a share that is whole, and waits for none: one that is
not whole yet it tokenizes by itself. So whatever becomes of the others, what it writes is the same.
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
"""Of a share at least: of a large file cut into pieces these have 256 MiB."""
_MOST = 4096
_TAIL_BYTES = 4096


class Document(NamedTuple):
    """A document, or a piece of one, on its way into the packed file."""

    text: bytes
    """Empty where there are ids already."""
    text_bytes: int
    """How many those are or were; of a file of ids how many ids."""
    ends: bool
    """Whether a document ends with it."""
    ids: np.ndarray | None = None
    """With the separator, where it is tokenized already."""
    by_others: bool = False
    """Whether another process has tokenized it for this one."""
    quoted: Mapping[str, int] | None = None
    """How often special tokens stand in its text, where another process has counted them."""


Part = list[Document]


def steps(parts: Iterator[Part], size: int) -> Iterator[list[Part]]:
    """The parts in lists of so much text each; the last one may have less.

    Args:
        parts: in order.
        size: bytes of a list at least.
    """
    step, total = [], 0
    for part in parts:
        step.append(part)
        total += sum(document.text_bytes for document in part)
        if total >= size:
            yield step
            step, total = [], 0
    if step:
        yield step


def encoded(step: list[Document], tokenizer: Encoder) -> list[np.ndarray]:
    """The ids of each document, the separator with them where it ends.

    Args:
        step: documents that are tokenized at once.
        tokenizer: encodes those that are not tokenized yet.
    """
    separator = np.array([tokenizer.separator])
    fresh = iter(tokenizer.encode([document.text for document in step if document.ids is None]))
    return [
        np.append(next(fresh), separator[: each.ends]) if each.ids is None else each.ids
        for each in step
    ]


def quoted(step: list[Document], tokenizer: Encoder) -> dict[str, int]:
    """Return how often special tokens stand in the texts of documents.

    Args:
        step: documents.
        tokenizer: counts in those that are not tokenized yet.
    """
    total = Counter()
    for document in step:
        total.update(
            tokenizer.quoted(document.text) if document.ids is None else document.quoted or {}
        )
    return dict(total)


def in_order(documents: Any, side: str, first: int, folder: Path, dtype: str) -> Iterator[Part]:
    """The parts from `first` on, tokenized where a share has them.

    Args:
        documents: of one side of the split.
        side: its name.
        first: where a killed pass stopped.
        folder: of the packed corpus; a share that is used up is removed.
        dtype: of the ids.
    """
    while first < len(documents):
        start, stop = _bounds(first, len(documents))
        path = folder / FOLDER / f"{side}-{start}-{stop}.npz"
        share = _read(path, stop - start, dtype)
        for i in range(first, stop):
            yield share[i - start] if share else documents_of(documents[i])
        path.unlink(missing_ok=True)
        first = stop


def pack(
    documents: Mapping[str, Any], tokenizer: Encoder, folder: Path, dtype: str, step_bytes: int
) -> None:
    """Tokenizes shares, the last ones first, until there are none before those of the process that packs all.

    Args:
        documents: of both sides.
        tokenizer: encodes them.
        folder: of the packed corpus.
        dtype: of the ids.
        step_bytes: of text that is tokenized at once.

    Raises:
        OSError: the disk is full, or the other process is done and has removed the shares.
        DataError: a document cannot be read.
    """
    for side in reversed([*documents]):
        start = len(documents[side])
        while start and not (folder / "manifest.json").exists():
            start, stop = _bounds(start - 1, len(documents[side]))
            if start <= _position(folder / f"{side}.jsonl"):
                break
            path = folder / FOLDER / f"{side}-{start}-{stop}.npz"
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.with_suffix(".lock").open("a") as lock, contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not path.exists():
                    parts = (documents_of(documents[side][i]) for i in range(start, stop))
                    _write(path, parts, tokenizer, dtype, step_bytes)


def _bounds(i: int, count: int) -> tuple[int, int]:
    """First part of the share of part `i`, and the first after it; the same for every process."""
    size = max(_PARTS, -(-count // _MOST))
    return i - i % size, min(i - i % size + size, count)


def documents_of(contents: list[tuple[bytes | np.ndarray, bool]]) -> Part:
    """The documents of (text as bytes or ids as an array, whether a document ends with it)."""
    return [
        Document(content, len(content), ends)
        if isinstance(content, bytes)
        else Document(b"", len(content), ends, content)
        for content, ends in contents
    ]


def _position(progress: Path) -> int:
    """How many parts the process that packs all has done, by its last whole line."""
    with (
        contextlib.suppress(OSError, IndexError, KeyError, disk.JsonError),
        progress.open("rb") as file,
    ):
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        return int(
            disk.json_object(file.read().rpartition(b"\n")[0].splitlines()[-1], "a line")[
                "documents"
            ]
        )
    return 0


def _write(
    path: Path, parts: Iterator[Part], tokenizer: Encoder, dtype: str, step_bytes: int
) -> None:
    """A share, which others see when it is whole."""
    ids = [np.zeros(0, dtype)]
    facts = []
    sizes = []
    quotes = []
    for step in steps(parts, step_bytes):
        documents = [document for part in step for document in part]
        tokens = encoded(documents, tokenizer)
        ids += [each.astype(dtype) for each in tokens]
        facts += [
            (len(part), each.text_bytes, each.ends)
            for part, each in zip(tokens, documents, strict=True)
        ]
        sizes += map(len, step)
        quotes += [quoted([document], tokenizer) for document in documents]
    part = path.with_suffix(f".{socket.gethostname()}.{os.getpid()}.part")
    with part.open("wb") as file:
        np.savez(
            file,
            ids=np.concatenate(ids),
            facts=np.array(facts, np.int64).reshape(-1, 3),
            sizes=np.array(sizes),
            quoted=np.array(json.dumps(quotes)),
        )
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def _read(path: Path, count: int, dtype: str) -> list[Part] | None:
    """The parts of a share; None where there is none, or not as it was written (the file has checksums)."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            ids, facts, sizes = arrays["ids"], arrays["facts"], arrays["sizes"]
            quotes = json.loads(str(arrays["quoted"]))
    except Exception:  # numpy and zipfile raise whatever the damage makes of them
        return None
    if (
        ids.dtype != dtype
        or len(sizes) != count
        or facts.shape != (sizes.sum(), 3)
        or facts[:, 0].sum() != len(ids)
    ):
        return None
    tokens = np.split(ids, np.cumsum(facts[:, 0]))
    facts = zip(tokens, facts, quotes, strict=False)  # after the last cut nothing is left
    documents = (
        Document(b"", int(size), bool(ends), part, True, counts)
        for part, (_, size, ends), counts in facts
    )
    return [list(itertools.islice(documents, int(size))) for size in sizes]
