"""Tokenizing and packing: documents to two flat files of token ids, for training and evaluation.

    FOLDER/train.bin, eval.bin       ids of all documents in order, each ended by the separator
    FOLDER/train.jsonl, eval.jsonl   progress of that file, a line after every step
    FOLDER/manifest.json             written last: counts and digests of both files

One process writes these files. If it is killed, the next one continues after the last step that has
a complete line. Processes that wait for the writer tokenize documents from the end (`shares`), and
the writer takes their ids. The files do not depend on the number of processes.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeGuard

import numpy as np

from mupax import disk
from mupax.terminal import counted
from mupax.train.data import cache
from mupax.train.data.interface import DataError
from mupax.train.data.text import shares
from mupax.train.data.text.tokenizer import Encoder

SIDES = ("train", "eval")
_FORMAT = 1
_STEP_BYTES = 1 << 22
"""Number of bytes of text that are tokenized and written at once, about."""
_CHECKED_BYTES = 1 << 26
"""Largest file of ids, in bytes, whose digest is checked when it is opened."""
_NOTE_SECONDS = 10.0
_DTYPES = {"<u1": 8, "<u2": 16, "<u4": 32}
"""Number of bits of each NumPy type that ids are stored in, smallest first."""
_NOTHING = {"dtype": "", "documents": 0, "tokens": 0, "text_bytes": 0, "steps": [], "digest": ""}
"""Facts about a file of ids before its first step.

Facts that are read from disk must have these fields, with values of these types.
"""
_STEP = {"documents": 0, "tokens": 0, "text_bytes": 0, "digest": "", "step": 0}
"""Fields of a line of progress, to check the types of their values.

They are totals after the step, and in `step` the number of ids of the step.
"""


Documents = Mapping[str, Any]
"""Documents of a corpus, under the keys "train" and "eval", as a sequence of parts each.

A part is a list of pairs: a text as bytes or ids as an array, and True if a document ends with it.
It is read from disk when the sequence is indexed. Ids contain their separators.
"""


class PackedCorpus(NamedTuple):
    """Training text or evaluation text of a corpus as token ids."""

    tokens: np.ndarray
    """Ids of all documents, one after the other, uint8, uint16 or uint32 [count].

    For a packed corpus in the cache, the array is mapped from disk.
    """
    text_bytes: int
    """Bytes of text of these ids. The end of a document counts as one byte."""
    digest: str
    """Digest of the ids."""
    quoted: dict[str, int] | None = None
    """How often the text contains each special token. `None` if an older version packed it."""


def prepared(
    key: str, documents: Callable[[], Documents], tokenizer: Encoder, note: cache.Note
) -> dict[str, PackedCorpus]:
    """Return the packed training and evaluation text of a corpus, under "train" and "eval".

    They are taken from the cache, or tokenized and packed now. If another process is packing the
    corpus, this process helps it and waits. A damaged corpus in the cache is packed again.

    Args:
        key: Name in the cache that identifies the content of the corpus.
        documents: Function that returns the documents. It is called only if the corpus has to be
            packed.
        note: Function that prints a line for the user before and during work that takes long.

    Raises:
        DataError: The cache cannot be written, or a document cannot be read.
        DiskError: The disk is full.
    """
    name = f"{key}-{tokenizer.key}{tokenizer.variant}"
    folder = cache.root() / "packed" / name
    # First try without the lock: most runs find a finished corpus, perhaps on a read-only disk.
    corpus, _ = _open(folder, tokenizer)
    if corpus is not None:
        _delete_progress(folder)
        return corpus

    with cache.lock(folder.parent, name, note, lambda: _help(documents(), tokenizer, folder)):
        # Another process may have packed the corpus while this one waited.
        corpus, problem = _open(folder, tokenizer)
        if corpus is None:
            if problem:
                note(f"{problem}; preparing it again")
                # Otherwise helpers would take the corpus for finished and tokenize nothing.
                (folder / "manifest.json").unlink()
            note(f"tokenizing and packing {key} in {folder}")
            try:
                _pack(documents(), tokenizer, cache.folder(folder), note)
            except OSError as error:
                message = (
                    f"cannot write {folder}: {error.strerror}. "
                    "Make room (what is done is kept), or set MUPAX_DATA"
                )
                # A full disk is the machine's fault, and a DataError would blame the data.
                if error.errno in disk.NO_ROOM:
                    raise disk.DiskError(message) from error
                raise DataError(message) from error
            corpus, problem = _open(folder, tokenizer)
    if corpus is None:
        raise DataError(
            f"{problem} just after it was prepared; "
            "is the disk full or shared by hosts that see it late?"
        )
    return corpus


def _delete_progress(folder: Path) -> None:
    """Delete the files with the progress of packing, if a killed process left them behind.

    Args:
        folder: Folder of a corpus with a manifest, so that it is packed completely.
    """
    with contextlib.suppress(OSError):  # the cache may be read-only
        for side in SIDES:
            (folder / f"{side}.jsonl").unlink(missing_ok=True)


def _help(documents: Documents, tokenizer: Encoder, folder: Path) -> None:
    """Tokenize some of the documents for another process, which packs the corpus (`shares.pack`).

    Errors of the disk are ignored.
    """
    # The process that packs reports an error of the disk.
    with contextlib.suppress(OSError):
        shares.pack(documents, tokenizer, folder, id_type(tokenizer), _STEP_BYTES)


def _pack(documents: Documents, tokenizer: Encoder, folder: Path, note: cache.Note) -> None:
    """Tokenize all documents and write the files of the packed corpus into `folder`.

    What a killed process has done is kept. The manifest is written last. Then the files with the
    progress and those of helping processes are deleted.
    """
    sides = {}
    for side in SIDES:
        sides[side] = _pack_side(documents[side], side, tokenizer, folder, note)
    quoted = {side: facts.pop("quoted") for side, facts in sides.items()}
    manifest = {
        "format": _FORMAT,
        "tokenizer": tokenizer.key,
        "vocab_size": tokenizer.vocab_size,
        "quoted": quoted,
        "sides": sides,
    }
    # The manifest is written last: a corpus that has one is complete.
    cache.write_json(folder / "manifest.json", manifest)
    for side in SIDES:
        (folder / f"{side}.jsonl").unlink(missing_ok=True)
    # A helper may still write a share, which nobody reads any more.
    shutil.rmtree(folder / shares.FOLDER, ignore_errors=True)


def _pack_side(
    documents: Any, side: str, tokenizer: Encoder, folder: Path, note: cache.Note
) -> dict[str, Any]:
    """Tokenize the training or the evaluation documents into one file, and return its facts.

    After every step of about 4 MiB of text, the ids and a line of progress are written. What a
    killed process has done is kept and counts.

    Args:
        documents: Sequence of parts of the documents (`Documents`).
        side: "train" or "eval", the name of the file without suffix.

    Returns:
        Facts for the manifest: `dtype` of the ids, `documents` (number of parts), `tokens`,
        `text_bytes`, `steps` (number of tokens of each step), `digest` of the ids, and `quoted`
        (how often the text contains each special token).
    """
    dtype = id_type(tokenizer)
    itemsize = np.dtype(dtype).itemsize
    path = folder / f"{side}.bin"
    shared_parts = 0
    last_note = time.monotonic()
    # Opened to append, so that a pass that was killed goes on.
    with path.open("ab") as file, path.with_suffix(".jsonl").open("a+b") as lines:
        facts = {**_resumed(lines, file.tell() // itemsize), "dtype": dtype}
        # Ids after the last complete line are written again.
        file.truncate(facts["tokens"] * itemsize)

        parts = shares.in_order(documents, side, facts["documents"], folder, dtype)
        for step in shares.steps(parts, _STEP_BYTES):
            contents = list(itertools.chain.from_iterable(step))
            ids = shares.encoded(contents, tokenizer)
            # The empty array is for a step of empty documents, which has nothing to concatenate.
            block = np.concatenate([np.zeros(0, dtype), *ids]).astype(dtype)
            for part in step:
                shared_parts += any(document.by_others for document in part)

            # The ids are on disk before the line that vouches for them.
            _write(file, block.tobytes())
            step_bytes = sum(document.text_bytes + document.ends for document in contents)
            totals = {
                "documents": facts["documents"] + len(step),
                "tokens": facts["tokens"] + len(block),
                "text_bytes": facts["text_bytes"] + step_bytes,
                "digest": _next_digest(facts["digest"], block),
            }
            quoted = shares.quoted(contents, tokenizer)
            line = json.dumps({**totals, "step": len(block), "quoted": quoted})
            _write(lines, f"{line}\n".encode())

            facts.update(totals)
            facts["quoted"] = _added(facts["quoted"], quoted)
            facts["steps"].append(len(block))
            if time.monotonic() - last_note > _NOTE_SECONDS:
                last_note = time.monotonic()
                note(
                    f"tokenizing {side}: {facts['documents']:,} of {len(documents):,} parts, "
                    f"{counted(facts['tokens'], 'token', ',')}"
                )
    if shared_parts:
        note(f"other processes tokenized {shared_parts:,} of {len(documents):,} parts of {side}")
    return facts


def id_type(tokenizer: Encoder) -> str:
    """Return the smallest NumPy type that holds every id of a tokenizer, such as "<u2"."""
    return next(dtype for dtype, bits in _DTYPES.items() if tokenizer.vocab_size <= 1 << bits)


def _write(file: BinaryIO, content: bytes) -> None:
    """Append bytes to an open file, and wait until they are on disk."""
    file.write(content)
    file.flush()
    # Without fsync a machine that dies may keep the line and lose its ids.
    os.fsync(file.fileno())


def _resumed(lines: BinaryIO, tokens: int) -> dict[str, Any]:
    """Read the progress of a killed process. Return the facts after its last valid line.

    Lines after the last valid one are cut off the file.

    Args:
        lines: Open file with a line for every step.
        tokens: Number of ids in the file of ids. A line that counts more is not valid.
    """
    facts = {**_NOTHING, "steps": [], "quoted": {}}
    end = 0
    lines.seek(0)
    for line in lines:
        try:
            step = disk.json_object(line, "a line")
        except disk.JsonError:
            break
        quoted = step.pop("quoted", None)
        # A line without its end was cut off by a crash.
        if not line.endswith(b"\n") or not isinstance(quoted, dict):
            break
        if _field_types(step) != _field_types(_STEP):
            break
        # The disk may have kept a line and lost its ids, or lost a line in the middle.
        if not (facts["tokens"] + step["step"] == step["tokens"] <= tokens):
            break
        facts["steps"].append(step.pop("step"))
        facts.update(step)
        facts["quoted"] = _added(facts["quoted"], quoted)
        end += len(line)
    lines.truncate(end)
    return facts


def _added(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
    """Return the sum of two dicts of counts. Names with a sum of 0 are left out."""
    return dict(Counter(first) + Counter(second))


def _is_complete(facts: Any) -> TypeGuard[dict[str, Any]]:
    """Return whether facts about a file of ids have the fields of `_NOTHING` and their types."""
    if not isinstance(facts, dict) or _field_types(facts) != _field_types(_NOTHING):
        return False
    return facts["dtype"] in _DTYPES


def _field_types(fields: dict[str, Any]) -> dict[str, type]:
    return {name: type(value) for name, value in fields.items()}


def _next_digest(previous: str, block: np.ndarray) -> str:
    """Return the digest of all ids after a step, given the digest before it and the step's ids.

    It is a SHA-256 of both, in hexadecimal.
    """
    # Each digest includes the one before, so a resumed pass need not read the ids of earlier steps.
    return hashlib.sha256(previous.encode() + block.astype("<u4").tobytes()).hexdigest()


def _open(folder: Path, tokenizer: Encoder) -> tuple[dict[str, PackedCorpus] | None, str]:
    """Open the training and evaluation text of a packed corpus.

    The sizes of the files are always checked. The digest of a file is checked if it has at most
    `_CHECKED_BYTES`.

    Returns:
        Both texts under "train" and "eval", and "". For a corpus that cannot be used, `None` and a
        message that says why. Without a manifest, so before a corpus is packed, `None` and "".
    """
    path = folder / "manifest.json"
    if not path.exists():
        return None, ""
    manifest = cache.read_json(path) or {}
    if manifest.get("format") != _FORMAT or manifest.get("tokenizer") != tokenizer.key:
        return None, f"{path} is not a manifest of this version"
    sides = manifest.get("sides")
    if not isinstance(sides, dict) or not all(_is_complete(sides.get(side)) for side in SIDES):
        return None, f"{path} is damaged"

    corpus = {}
    for side in SIDES:
        facts = sides[side]
        file = folder / f"{side}.bin"
        size = facts["tokens"] * np.dtype(facts["dtype"]).itemsize
        if not file.exists() or file.stat().st_size != size:
            return None, f"{file} does not have its {size:,} bytes"
        # A file of no bytes cannot be mapped.
        tokens = np.memmap(file, facts["dtype"], "r") if size else np.zeros(0, facts["dtype"])
        if size <= _CHECKED_BYTES and not _intact(tokens, facts):
            return None, f"{file} is not what was written"
        # Older versions did not count quoted tokens.
        counts = (manifest.get("quoted") or {}).get(side)
        corpus[side] = PackedCorpus(tokens, facts["text_bytes"], facts["digest"], counts)
    return corpus, ""


def _intact(tokens: np.ndarray, facts: dict[str, Any]) -> bool:
    """Return whether ids have the digest that their facts in the manifest record."""
    digest = ""
    start = 0
    for count in facts["steps"]:
        digest = _next_digest(digest, tokens[start : start + count])
        start += count
    return digest == facts["digest"]
