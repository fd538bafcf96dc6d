"""Which files are a text corpus, and which side of the split each is on. Reads no text but to find split points.

`python_corpus` is the standard library of the running Python: its modules with their docstrings, and the pydoc topics.
A file is for evaluation when the hash of its relative path says so, so the same file is on the same side everywhere.
"""

from __future__ import annotations

import codecs
import dataclasses
import hashlib
import itertools
import os
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from mupax.train.data import cache
from mupax.train.data.interface import DataError
from mupax.train.data.records import contents
from mupax.train.data.records.broken import BrokenLog

Split = Literal["train", "eval"]
EVAL_SHARE = 0.08
_NOT_LIBRARY = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "lib-dynload",
    "__pycache__",
}
_MADE_BY_INSTALLATION = ("_sysconfigdata", "_sysconfig_vars", "sitecustomize", "usercustomize")
_PIECE_BYTES = 1 << 24


@dataclasses.dataclass(frozen=True)
class Piece:
    """Bytes [start, stop) of a file, all on one side of the split.

    Attributes:
        ends: whether the document ends here; only a large file has more than one piece to a side.
        is_utf8: whether the tokenizer reads characters, so that other bytes are broken text.
        broken: decides on broken text, and counts it.
    """

    path: Path
    start: int
    stop: int
    ends: bool = True
    is_utf8: bool = False
    broken: BrokenLog = dataclasses.field(default_factory=BrokenLog, compare=False)

    def read(self) -> list[tuple[bytes, bool]]:
        """Return the piece's bytes, without a mark of UTF-8 at the file's beginning, and `ends`: all that it has.

        Raises:
            DataError: the file is gone, is shorter than it was, or is no text, unless such is left out.
        """
        data = read_bytes(self.path, self.start, self.stop)
        if len(data) != self.stop - self.start:
            raise DataError(
                f"{self.path} became shorter while it was read; start again when nothing writes to it"
            )
        wrong = self._wrong(data)
        if wrong is not None:
            offset, reason = wrong
            place = f"{self.path} line {self._line(data, offset)}"
            error = DataError(f"{place} {reason}")
            self.broken.add(f"{self.path} {self.start}", "text", place, error)
            # The end of a document whose other pieces are read stays where it is.
            return [(b"", self.ends)] if self._is_part else []
        if self.start == 0:
            data = data.removeprefix(codecs.BOM_UTF8)
        return [(data, self.ends)] if data or self._is_part else []

    @property
    def _is_part(self) -> bool:
        """Return whether the document may have other pieces."""
        return self.start > 0 or not self.ends

    def _wrong(self, data: bytes) -> tuple[int, str] | None:
        """Return where the first byte that is no text is, and what is wrong with it; `None` if all is well."""
        zero = data.find(b"\0")
        if zero >= 0:
            return (
                zero,
                "is not text: it has a NUL byte. Repair it, or take the file out of the folder",
            )
        if self.is_utf8:
            try:
                data.decode()
            except UnicodeDecodeError as error:
                near = data[max(0, error.start - 20) : error.start + 10]
                advice = "convert the file, or use data.tokenizer bytes"
                return error.start, f"is not UTF-8 near {near!r}; {advice}"
        return None

    def _line(self, data: bytes, offset: int) -> int:
        """Return the line of the file, from 1, that byte `offset` of the piece is in."""
        lines = 1 + data.count(b"\n", 0, offset)
        for start in range(0, self.start, _PIECE_BYTES):
            lines += read_bytes(self.path, start, min(start + _PIECE_BYTES, self.start)).count(
                b"\n"
            )
        return lines


def side(name: str | bytes) -> Split:
    """The side of the split that a file of this relative path, or a record of this text, is on: 8 % are for evaluation, by BLAKE2."""
    return "eval" if rank(name) < EVAL_SHARE else "train"


def rank(name: str | bytes) -> float:
    """The hash of a path or text, in [0, 1)."""
    content = name.encode(errors="surrogateescape") if isinstance(name, str) else name
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") / 2**64


def python_files(library: Path | None = None) -> list[tuple[str, Path]]:
    """(relative path, file) of every module of the standard library, sorted by relative path.

    Tests, installed packages and files that an installation writes for itself (they hold its build paths) are left out.

    Raises:
        DataError: the standard library has no sources here.
    """
    library = library or Path(sysconfig.get_path("stdlib"))
    modules = []
    for folder, subfolders, names in os.walk(library):
        subfolders[:] = [
            name
            for name in subfolders
            if name not in _NOT_LIBRARY and not name.startswith("config-")
        ]
        for name in names:
            if name.endswith(".py") and not name.startswith(_MADE_BY_INSTALLATION):
                path = Path(folder, name)
                modules.append((path.relative_to(library).as_posix(), path))
    if not modules:
        raise DataError(
            f"no sources of the Python standard library in {library}; use a Python installed with them"
        )
    return sorted(modules)


def read_bytes(path: Path, start: int, stop: int) -> bytes:
    """Bytes [start, stop) of a file, fewer where it ends.

    Args:
        path: of the file.
        start, stop: in bytes.

    Raises:
        DataError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read(stop - start)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def text_pieces(
    files: list[tuple[str, Path]], sides: Mapping[str, str], is_utf8: bool, broken: BrokenLog
) -> dict[str, list[Piece]]:
    """Return the two sides of a user's text, pieces of files each.

    Files go by the hash of their path, unless their names tell the side. A single file is cut at a line end, and its last tenth
    is for evaluation.

    Args:
        files: relative path and file of each.
        sides: `train` or `eval` by relative path, where names tell it.
        is_utf8, broken: as `Piece` has them.
    """
    files = [(name, path) for name, path in files if path.stat().st_size]
    if len(files) == 1 and files[0][0] not in sides:
        path, size = files[0][1], files[0][1].stat().st_size
        cut = _after_line(path, size - size // 10, size)
        return {
            "train": _pieces(path, 0, cut, is_utf8, broken),
            "eval": _pieces(path, cut, size, is_utf8, broken),
        }
    for_eval = names_for_eval([name for name, _ in files if name not in sides])
    pieces: dict[str, list[Piece]] = {"train": [], "eval": []}
    for name, path in files:
        side_by_hash = "eval" if name in for_eval else "train"
        pieces[sides.get(name, side_by_hash)] += _pieces(
            path, 0, path.stat().st_size, is_utf8, broken
        )
    return pieces


def is_broken(path: Path, is_utf8: bool, broken: BrokenLog) -> bool:
    """Return whether a plain text of one piece is broken, and is left out.

    Args:
        path: of the text.
        is_utf8, broken: as `Piece` has them.
    """
    size = path.stat().st_size
    return 0 < size <= _PIECE_BYTES and not Piece(path, 0, size, True, is_utf8, broken).read()


def names_for_eval(names: list[str]) -> set[str]:
    """Which of several files are for evaluation, by their hash; where that leaves a side empty, the nearest one fills it."""
    ranked = sorted(names, key=rank)
    for_eval = {name for name in names if side(name) == "eval"} or set(ranked[:1])
    return for_eval - set(ranked[-1:]) if len(for_eval) == len(names) else for_eval


def _pieces(
    path: Path, start: int, stop: int, is_utf8: bool = False, broken: BrokenLog | None = None
) -> list[Piece]:
    """Return [start, stop) of a file, cut at line ends into parts small enough to hold in memory."""
    cuts = [start]
    while stop - cuts[-1] > _PIECE_BYTES:
        cuts.append(_after_line(path, cuts[-1] + _PIECE_BYTES, stop))
    cuts = [*cuts, stop] if cuts[-1] < stop else cuts
    log = broken or BrokenLog()
    return [Piece(path, a, b, b == stop, is_utf8, log) for a, b in itertools.pairwise(cuts)]


def _after_line(path: Path, near: int, stop: int) -> int:
    """The first line start after `near`; the next character where no line ends in the next piece."""
    after = read_bytes(path, near, min(near + _PIECE_BYTES, stop))
    line = after.find(b"\n") + 1
    if line and near + line < stop:
        return near + line
    # No line ends here: cut between two UTF-8 characters at least (bytes 10xxxxxx continue one).
    return near + next((i for i, byte in enumerate(after[:4]) if byte & 0xC0 != 0x80), 0)


def content_digest(files: list[tuple[str, Path]]) -> str:
    """Digest of names and contents: small corpora."""
    return cache.digest(*(part for name, path in files for part in (name, path.read_bytes())))


def stat_digest(files: list[tuple[str, Path]]) -> str:
    """Digest of paths, sizes, times and inodes: tells at once whether a large corpus may have changed."""
    return cache.digest(*(f"{path.absolute()}:{contents.stamp(path)}" for _, path in files))
