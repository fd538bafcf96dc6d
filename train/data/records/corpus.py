"""Which files are a text corpus, and which side of the split each is on. Reads no text but to find split points.

`python_corpus` is the standard library of the running Python: its modules with their docstrings, and the pydoc topics.
A file is for evaluation when the hash of its relative path says so, so the same file is on the same side everywhere.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
import shlex
import sysconfig
from pathlib import Path
from typing import Literal

from mupax.train.data import cache
from mupax.train.data.interface import DataError

Split = Literal["train", "eval"]
EVAL_SHARE = 0.08
_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib-dynload", "__pycache__"}
_MADE_BY_INSTALLATION = ("_sysconfigdata", "_sysconfig_vars", "sitecustomize", "usercustomize")
_PIECE_BYTES = 1 << 24
_SNIFF_BYTES = 1 << 13
_LISTED = 8
_UNPACK = {".gz": "gzip -dc", ".zst": "zstd -dc", ".bz2": "bzip2 -dc", ".xz": "xz -dc"}
# Formats of records, a field of which may be text, and how Python reads the records where a line of it does.
_RECORDS = {
    ".jsonl": "map(json.loads, sys.stdin)",
    ".ndjson": "map(json.loads, sys.stdin)",
    ".json": "json.load(sys.stdin)",
}
_RECORDS |= dict.fromkeys((".arrow", ".csv", ".feather", ".parquet", ".tsv"), "")


@dataclasses.dataclass(frozen=True)
class Piece:
    """Bytes [start, stop) of a file, all on one side of the split.

    `ends` says that the document ends here; only a large file has more than one piece to a side.
    """

    path: Path
    start: int
    stop: int
    ends: bool = True

    def read(self) -> tuple[bytes, bool]:
        """The piece's bytes, and `ends`.

        Raises:
            DataError: the file is gone, is shorter than it was, or is no text (it has a NUL byte).
        """
        data = _read(self.path, self.start, self.stop)
        if len(data) != self.stop - self.start:
            raise DataError(f"{self.path} became shorter while it was read; start again when nothing writes to it")
        if b"\0" in data:
            raise DataError(f"{self.path} is not text: it has a NUL byte. Take it out of the folder")
        return data, self.ends


def side(relative_path: str) -> Split:
    """The side of the split that a file is on: 8 % of paths, by BLAKE2 hash, are for evaluation."""
    return "eval" if rank(relative_path) < EVAL_SHARE else "train"


def rank(relative_path: str) -> float:
    """The hash of a path, in [0, 1)."""
    return int.from_bytes(hashlib.blake2b(relative_path.encode(), digest_size=8).digest(), "big") / 2**64


def python_files(library: Path | None = None) -> list[tuple[str, Path]]:
    """(relative path, file) of every module of the standard library, sorted by relative path.

    Tests, installed packages and files that an installation writes for itself (they hold its build paths) are left out.

    Raises:
        DataError: the standard library has no sources here.
    """
    library = library or Path(sysconfig.get_path("stdlib"))
    modules = []
    for folder, subfolders, names in os.walk(library):
        subfolders[:] = [name for name in subfolders if name not in _NOT_LIBRARY and not name.startswith("config-")]
        for name in names:
            if name.endswith(".py") and not name.startswith(_MADE_BY_INSTALLATION):
                path = Path(folder, name)
                modules.append((path.relative_to(library).as_posix(), path))
    if not modules:
        raise DataError(f"no sources of the Python standard library in {library}; use a Python installed with them")
    return sorted(modules)


def text_files(path: Path, note: cache.Note) -> list[tuple[str, Path]]:
    """(relative path, file) of a text file, or of every one in a folder (hidden ones left out), sorted.

    Args:
        path: of the file or folder.
        note: told which files are left out, for they hold records or NUL bytes.

    Raises:
        DataError: there is no such path, no text in it, or more in records than in plain text.
    """
    if path.is_file():
        every = [(path.name, path)]
    elif path.is_dir():
        files = ((file.relative_to(path), file) for file in path.rglob("*") if file.is_file())
        every = sorted((r.as_posix(), file) for r, file in files if not any(p.startswith(".") for p in r.parts))
    else:
        raise DataError(f"no file or folder {path}; write data.name as text:PATH, with the path of your text")
    # The README of a folder of records is not what is to be learned, a package.json among sources need not stop a run.
    text, records, binary = [], [], []
    for name, file in every:
        if _format(file) in _RECORDS:
            records.append((name, file))
        else:
            (binary if b"\0" in _read(file, 0, _SNIFF_BYTES) else text).append((name, file))
    if records and _size(records) >= _size(text):
        raise DataError(_plain_text_of(max((file for _, file in records), key=lambda file: file.stat().st_size)))
    if not _size(text):
        why = f": NUL bytes in {_listed(binary)}" if binary else ""
        raise DataError(f"{path} has no text in it{why}; text:PATH takes a UTF-8 text file or a folder of text files")
    if records or binary:
        note(f"left out of {path}, as not plain text: {_listed(sorted(records + binary))}")
    return text


def _format(path: Path) -> str:
    """The suffix that tells the format, without that of a compression."""
    return Path(path.stem if path.suffix.lower() in _UNPACK else path.name).suffix.lower()


def _size(files: list[tuple[str, Path]]) -> int:
    return sum(file.stat().st_size for _, file in files)


def _listed(files: list[tuple[str, Path]]) -> str:
    names = ", ".join(name for name, _ in files[:_LISTED])
    return names if len(files) <= _LISTED else f"{names} and {len(files) - _LISTED} more"


def _plain_text_of(path: Path) -> str:
    """What to say of a file of records: how to write their text to a file of its own."""
    advice = f"{path} holds records, and text:PATH takes plain text; write the text in them to a .txt file"
    if not (rows := _RECORDS[_format(path)]):
        return advice
    unpack = _UNPACK.get(path.suffix.lower(), "cat")
    program = f"import json, sys; [print(row['text']) for row in {rows}]"
    return (
        f'{advice}, by\n{unpack} {shlex.quote(str(path))} | python -c "{program}" > {path.name.partition(".")[0]}.txt'
    )


def _read(path: Path, start: int, stop: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read(stop - start)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def text_pieces(files: list[tuple[str, Path]]) -> dict[str, list[Piece]]:
    """The two sides of a user's text, pieces of files each.

    Files go by the hash of their path; where that leaves a side empty, the file with the nearest hash fills it. A
    single file is cut at a line end, and its last tenth is for evaluation.
    """
    files = [(name, path) for name, path in files if path.stat().st_size]
    if len(files) == 1:
        path, size = files[0][1], files[0][1].stat().st_size
        cut = _after_line(path, size - size // 10, size)
        return {"train": _pieces(path, 0, cut), "eval": _pieces(path, cut, size)}
    ranked = sorted(files, key=lambda item: rank(item[0]))
    for_eval = {name for name, _ in files if side(name) == "eval"} or {ranked[0][0]}
    if len(for_eval) == len(files):
        for_eval.remove(ranked[-1][0])
    sides: dict[str, list[Piece]] = {"train": [], "eval": []}
    for name, path in files:
        sides["eval" if name in for_eval else "train"] += _pieces(path, 0, path.stat().st_size)
    return sides


def _pieces(path: Path, start: int, stop: int) -> list[Piece]:
    """[start, stop) of a file, cut at line ends into parts small enough to hold in memory."""
    cuts = [start]
    while stop - cuts[-1] > _PIECE_BYTES:
        cuts.append(_after_line(path, cuts[-1] + _PIECE_BYTES, stop))
    cuts = [*cuts, stop] if cuts[-1] < stop else cuts
    return [Piece(path, a, b, ends=b == stop) for a, b in itertools.pairwise(cuts)]


def _after_line(path: Path, near: int, stop: int) -> int:
    """The first line start after `near`; the next character where no line ends in the next piece."""
    after = _read(path, near, min(near + _PIECE_BYTES, stop))
    line = after.find(b"\n") + 1
    if line and near + line < stop:
        return near + line
    # No line ends here: cut between two UTF-8 characters at least (bytes 10xxxxxx continue one).
    return near + next((i for i, byte in enumerate(after[:4]) if byte & 0xC0 != 0x80), 0)


def content_digest(files: list[tuple[str, Path]]) -> str:
    """Digest of names and contents: small corpora."""
    return cache.digest(*(part for name, path in files for part in (name, path.read_bytes())))


def stat_digest(files: list[tuple[str, Path]]) -> str:
    """Digest of paths, sizes and modification times: tells at once whether a large corpus changed."""
    stats = ((path.absolute(), path.stat()) for _, path in files)
    return cache.digest(*(f"{path}:{stat.st_size}:{stat.st_mtime_ns}" for path, stat in stats))
