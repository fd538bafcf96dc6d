"""Tokenizing and packing: documents to one flat file of token ids per side of the split, in resumable steps.

    FOLDER/train.bin, eval.bin   ids of all documents in order, each document ended by the separator
    FOLDER/train.jsonl, ...      how far that side is: a line after every step
    FOLDER/manifest.json         written last: counts and digests of both sides

A killed pass goes on at the last step: the file is cut back to what the lines vouch for. One process writes these files; others
that wait for it for long pack documents from the end (`shares`), which it takes over. What is written is the same.
"""

from __future__ import annotations

import contextlib
import hashlib
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
from mupax.train.data import cache
from mupax.train.data.interface import DataError
from mupax.train.data.text import shares
from mupax.train.data.text.tokenizer import Encoder

SIDES = ("train", "eval")
_FORMAT = 1
_STEP_BYTES = 1 << 22
_CHECKED_BYTES = 1 << 26
_NOTE_SECONDS = 10.0
_DTYPES = {"<u1": 8, "<u2": 16, "<u4": 32}
_NOTHING = {"dtype": "", "documents": 0, "tokens": 0, "text_bytes": 0, "steps": [], "digest": ""}
_STEP = {"documents": 0, "tokens": 0, "text_bytes": 0, "digest": "", "step": 0}
"""A line of progress: what is done with this step, and the ids of the step."""


Documents = Mapping[str, Any]
"""Side to a sequence of parts, each read when it is taken: a list of (text as bytes or ids as an array, whether a document ends
with it). Ids have their separators with them."""


class PackedCorpus(NamedTuple):
    """Training or evaluation side of a packed corpus."""

    tokens: np.ndarray
    """All ids, [count], uint8, uint16 or uint32, mapped from disk."""
    text_bytes: int
    """Bytes of text these stand for; the end of a document counts as one."""
    digest: str
    """Of the ids, step by step."""
    quoted: dict[str, int] | None = None
    """How often each special token stands in the text; None where an older version has packed it."""


def prepared(
    key: str, documents: Callable[[], Documents], tokenizer: Encoder, note: cache.Note
) -> dict[str, PackedCorpus]:
    """The packed corpus `key`, from the cache or made now.

    Args:
        key: names the corpus and its content.
        documents: called only if it must be made; returns the documents of each side.
        tokenizer: encodes them.
        note: told what takes time.

    Raises:
        DataError: the cache cannot be written, or a document cannot be read.
    """
    name = f"{key}-{tokenizer.key}{tokenizer.variant}"
    folder = cache.root() / "packed" / name
    opened, _ = _open(folder, tokenizer)
    if opened is not None:
        with contextlib.suppress(OSError):  # a cache that may only be read
            for side in SIDES:
                (folder / f"{side}.jsonl").unlink(
                    missing_ok=True
                )  # left by a kill just after the manifest
        return opened
    with cache.lock(folder.parent, name, note, lambda: _help(documents(), tokenizer, folder)):
        opened, wrong = _open(folder, tokenizer)
        if opened is None:
            if wrong:
                note(f"{wrong}; preparing it again")
                (folder / "manifest.json").unlink()
            note(f"tokenizing and packing {key} in {folder}")
            try:
                _pack(documents(), tokenizer, cache.folder(folder), note)
            except OSError as error:
                message = f"cannot write {folder}: {error.strerror}. Make room (what is done is kept), or set MUPAX_DATA"
                if error.errno in disk.NO_ROOM:
                    raise disk.DiskError(message) from error
                raise DataError(message) from error
            opened, wrong = _open(folder, tokenizer)
    if opened is None:
        raise DataError(
            f"{wrong} just after it was prepared; is the disk full or shared by hosts that see it late?"
        )
    return opened


def _help(documents: Documents, tokenizer: Encoder, folder: Path) -> None:
    """Packs shares of the documents while another process packs all; what is wrong with the disk that one will say."""
    with contextlib.suppress(OSError):
        shares.pack(documents, tokenizer, folder, id_type(tokenizer), _STEP_BYTES)


def _pack(documents: Documents, tokenizer: Encoder, folder: Path, note: cache.Note) -> None:
    """Tokenizes both sides into `folder`; goes on where a killed pass stopped."""
    sides = {side: _pack_side(documents[side], side, tokenizer, folder, note) for side in SIDES}
    quoted = {side: facts.pop("quoted") for side, facts in sides.items()}
    manifest = {
        "format": _FORMAT,
        "tokenizer": tokenizer.key,
        "vocab_size": tokenizer.vocab_size,
        "quoted": quoted,
        "sides": sides,
    }
    cache.write_json(folder / "manifest.json", manifest)
    for side in SIDES:
        (folder / f"{side}.jsonl").unlink(missing_ok=True)
    shutil.rmtree(folder / shares.FOLDER, ignore_errors=True)


def _pack_side(
    documents: Any, side: str, tokenizer: Encoder, folder: Path, note: cache.Note
) -> dict[str, Any]:
    dtype = id_type(tokenizer)
    path, itemsize, shared = folder / f"{side}.bin", np.dtype(dtype).itemsize, 0
    noted = time.monotonic()
    with path.open("ab") as file, path.with_suffix(".jsonl").open("a+b") as lines:
        done = {**_resumed(lines, file.tell() // itemsize), "dtype": dtype}
        file.truncate(done["tokens"] * itemsize)
        for step in shares.steps(
            shares.in_order(documents, side, done["documents"], folder, dtype), _STEP_BYTES
        ):
            contents = [document for part in step for document in part]
            block = np.concatenate(
                [np.zeros(0, dtype), *shares.encoded(contents, tokenizer)]
            ).astype(dtype)
            shared += sum(any(each.by_others for each in part) for part in step)
            _write(file, block.tobytes())
            line = {
                "documents": done["documents"] + len(step),
                "tokens": done["tokens"] + len(block),
                "text_bytes": done["text_bytes"]
                + sum(each.text_bytes + each.ends for each in contents),
                "digest": _next_digest(done["digest"], block),
            }
            quoted = shares.quoted(contents, tokenizer)
            _write(
                lines, f"{json.dumps({**line, 'step': len(block), 'quoted': quoted})}\n".encode()
            )
            done.update(line)
            done["quoted"] = _added(done["quoted"], quoted)
            done["steps"].append(len(block))
            if time.monotonic() - noted > _NOTE_SECONDS:
                noted = time.monotonic()
                note(
                    f"tokenizing {side}: {done['documents']:,} of {len(documents):,} parts, {done['tokens']:,} tokens"
                )
    if shared:
        note(f"other processes tokenized {shared:,} of {len(documents):,} parts of {side}")
    return done


def id_type(tokenizer: Encoder) -> str:
    """The smallest type that holds every id, as numpy writes it."""
    return next(dtype for dtype, bits in _DTYPES.items() if tokenizer.vocab_size <= 1 << bits)


def _write(file: BinaryIO, content: bytes) -> None:
    file.write(content)
    file.flush()
    os.fsync(file.fileno())


def _resumed(lines: BinaryIO, tokens: int) -> dict[str, Any]:
    """What the whole lines vouch for, as far as the file has their tokens; the others are cut off."""
    done = {**_NOTHING, "steps": [], "quoted": {}}
    end = 0
    lines.seek(0)
    for line in lines:
        try:
            step = disk.json_object(line, "a line")
        except disk.JsonError:
            break
        quoted = step.pop("quoted", None)
        whole = line.endswith(b"\n") and _kinds(step) == _kinds(_STEP) and isinstance(quoted, dict)
        if not (whole and done["tokens"] + step["step"] == step["tokens"] <= tokens):
            break
        done["steps"].append(step.pop("step"))
        done.update(step)
        done["quoted"] = _added(done["quoted"], quoted)
        end += len(line)
    lines.truncate(end)
    return done


def _added(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
    return dict(Counter(first) + Counter(second))


def _whole(state: Any) -> TypeGuard[dict[str, Any]]:
    """Whether this is a side's progress with every field in its place."""
    return (
        isinstance(state, dict) and _kinds(state) == _kinds(_NOTHING) and state["dtype"] in _DTYPES
    )


def _kinds(fields: dict[str, Any]) -> dict[str, type]:
    return {name: type(value) for name, value in fields.items()}


def _next_digest(previous: str, block: np.ndarray) -> str:
    return hashlib.sha256(previous.encode() + block.astype("<u4").tobytes()).hexdigest()


def _open(folder: Path, tokenizer: Encoder) -> tuple[dict[str, PackedCorpus] | None, str]:
    """Both sides of a packed corpus, or None and what is wrong with it ("" where it was never finished).

    Sizes are always checked, contents where that takes no time.
    """
    path = folder / "manifest.json"
    if not path.exists():
        return None, ""
    manifest = cache.read_json(path)
    sides = (manifest or {}).get("sides")
    if (
        manifest is None
        or manifest.get("format") != _FORMAT
        or manifest.get("tokenizer") != tokenizer.key
    ):
        return None, f"{path} is not a manifest of this version"
    if not isinstance(sides, dict) or not all(_whole(sides.get(side)) for side in SIDES):
        return None, f"{path} is damaged"
    opened = {}
    for side in SIDES:
        facts, file = sides[side], folder / f"{side}.bin"
        size = facts["tokens"] * np.dtype(facts["dtype"]).itemsize
        if not file.exists() or file.stat().st_size != size:
            return None, f"{file} does not have its {size:,} bytes"
        # A file of no bytes cannot be mapped.
        tokens = np.memmap(file, facts["dtype"], "r") if size else np.zeros(0, facts["dtype"])
        if size <= _CHECKED_BYTES and not _intact(tokens, facts):
            return None, f"{file} is not what was written"
        counts = (manifest.get("quoted") or {}).get(side)
        opened[side] = PackedCorpus(tokens, facts["text_bytes"], facts["digest"], counts)
    return opened, ""


def _intact(tokens: np.ndarray, facts: dict[str, Any]) -> bool:
    digest, start = "", 0
    for count in facts["steps"]:
        digest = _next_digest(digest, tokens[start : start + count])
        start += count
    return digest == facts["digest"]
