"""Text files of a corpus: their split into training and evaluation, and pieces of large files.

The hash of a file's relative path decides the side of the split ("train" or "eval"), so a file is
on the same side on every machine.
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
from mupax.train.data.interface import DataError, unreadable
from mupax.train.data.records import contents
from mupax.train.data.records.broken import BrokenLog

Split = Literal["train", "eval"]
EVAL_SHARE = 0.08
"""Share of the files or records that is for evaluation."""
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
"""Bytes of a file that are held in memory at once."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """Bytes [start, stop) of a text file, small enough to be read at once.

    All of them are on one side of the split, training or evaluation.

    Attributes:
        ends: True if the document ends with this piece. Only a large file has several pieces on one
            side.
        is_utf8: True if the tokenizer reads characters. Text that is not UTF-8 is then broken.
        broken: Log that counts broken text, or raises its error. Text with a NUL byte is always
            broken.
    """

    path: Path
    start: int
    stop: int
    ends: bool = True
    is_utf8: bool = False
    broken: BrokenLog = dataclasses.field(default_factory=BrokenLog, compare=False)

    def read(self) -> list[tuple[bytes, bool]]:
        """Read the piece. Return a list of one pair: its bytes, and whether the document ends.

        A byte order mark of UTF-8 is removed. The list is empty for an empty document, and for a
        broken document that is left out. A broken piece of a document with several pieces is an
        empty text, so that the document still ends.

        Raises:
            DataError: The file is gone or has become shorter, or the text is broken and is not left
                out.
        """
        data = read_bytes(self.path, self.start, self.stop)
        if len(data) != self.stop - self.start:
            raise DataError(
                f"{self.path} became shorter while it was read; "
                "start again when nothing writes to it"
            )
        problem = self._problem(data)
        if problem is not None:
            offset, reason = problem
            place = f"{self.path} line {self._line(data, offset)}"
            error = DataError(f"{place} {reason}")
            self.broken.add(f"{self.path} {self.start}", "text", place, error)
            # If the document has other pieces, an empty piece keeps its `ends`, so that the
            # document still ends there.
            return [(b"", self.ends)] if self._is_part else []
        if self.start == 0:
            data = data.removeprefix(codecs.BOM_UTF8)
        return [(data, self.ends)] if data or self._is_part else []

    @property
    def _is_part(self) -> bool:
        """True if the document may have other pieces."""
        return self.start > 0 or not self.ends

    def _problem(self, data: bytes) -> tuple[int, str] | None:
        """Return what makes a piece broken, or `None` for a piece that can be used.

        A piece is broken if it has a NUL byte or, with `is_utf8`, a byte that is not UTF-8.

        Args:
            data: Bytes of the piece, as read from the file.

        Returns:
            Index of the first such byte in `data`, and the rest of a sentence that describes it.
        """
        zero = data.find(b"\0")
        if zero >= 0:
            advice = "Repair it, or take the file out of the folder"
            return zero, f"is not text: it has a NUL byte. {advice}"
        if self.is_utf8:
            try:
                data.decode()
            except UnicodeDecodeError as error:
                # A few bytes around the error let a user find the place in an editor.
                near = data[max(0, error.start - 20) : error.start + 10]
                advice = "convert the file, or train on bytes (data.tokenizer bytes)"
                return error.start, f"is not UTF-8 near {near!r}; {advice}"
        return None

    def _line(self, data: bytes, offset: int) -> int:
        """Return the number of the line that contains byte `offset` of the piece.

        Lines are counted from 1 at the beginning of the file.

        Args:
            data: Bytes of the piece, as read from the file.
            offset: Index of a byte in `data`.
        """
        lines = 1 + data.count(b"\n", 0, offset)
        for start in range(0, self.start, _PIECE_BYTES):
            block = read_bytes(self.path, start, min(start + _PIECE_BYTES, self.start))
            lines += block.count(b"\n")
        return lines


def side(name: str | bytes) -> Split:
    """Return whether a file or record is for training or for evaluation, by its hash.

    About 8 % are for evaluation.

    Args:
        name: Relative path of the file, or text of the record.
    """
    return "eval" if rank(name) < EVAL_SHARE else "train"


def rank(name: str | bytes) -> float:
    """Return the BLAKE2 hash of a path or text as a number in [0, 1)."""
    # File names on Linux are bytes, which may not be UTF-8.
    content = name.encode(errors="surrogateescape") if isinstance(name, str) else name
    digest = hashlib.blake2b(content, digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def python_files(library: Path | None = None) -> list[tuple[str, Path]]:
    """Return (relative path, file) of every module of the standard library, sorted.

    Tests and installed packages are left out, and so are files that an installation writes, because
    they contain the paths of the build.

    Args:
        library: Folder of the standard library. Default: the one of the running Python.

    Raises:
        DataError: The folder has no Python sources.
    """
    library = library or Path(sysconfig.get_path("stdlib"))
    modules = []
    for folder, subfolders, names in os.walk(library):
        # `os.walk` descends only into the folders that stay in this list.
        subfolders[:] = [name for name in subfolders if _has_modules(name)]
        for name in names:
            if name.endswith(".py") and not name.startswith(_MADE_BY_INSTALLATION):
                path = Path(folder, name)
                modules.append((path.relative_to(library).as_posix(), path))
    if not modules:
        raise DataError(
            f"no sources of the Python standard library in {library}; "
            "use a Python installed with them"
        )
    # `os.walk` lists in the order of the file system, which differs between machines.
    return sorted(modules)


def _has_modules(folder: str) -> bool:
    """Return whether a folder of this name has modules of the standard library."""
    return folder not in _NOT_LIBRARY and not folder.startswith("config-")


def read_bytes(path: Path, start: int, stop: int) -> bytes:
    """Return bytes [start, stop) of a file, or fewer if the file ends before `stop`.

    Raises:
        DataError: The file is missing or may not be read.
        ReadError: The disk or the bucket does not answer.
    """
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read(stop - start)
    except OSError as error:
        raise unreadable(f"cannot read {path}: {error.strerror}", error) from error


def text_pieces(
    files: list[tuple[str, Path]], sides: Mapping[str, str], is_utf8: bool, broken: BrokenLog
) -> dict[str, list[Piece]]:
    """Divide a user's text files into pieces for training and pieces for evaluation.

    A file is for one of both, by the hash of its path, unless its name tells which (`sides`). A
    single file whose name does not tell is cut at a line end, and its last tenth is for evaluation.
    Empty files are left out.

    Args:
        files: Pairs of a relative path and a file.
        sides: "train" or "eval" for each file whose name tells it, by relative path.
        is_utf8: True if text that is not UTF-8 is broken (`Piece`).
        broken: Log of broken text (`Piece`).

    Returns:
        Pieces under the keys "train" and "eval".
    """
    # An empty file has no document, and must not be the only one of its side.
    files = [(name, path) for name, path in files if path.stat().st_size]
    if len(files) == 1 and files[0][0] not in sides:
        _, path = files[0]
        size = path.stat().st_size
        # At a line end, or both sides would share a line.
        cut = _after_line(path, size - size // 10, size)
        return {
            "train": _pieces(path, 0, cut, is_utf8, broken),
            "eval": _pieces(path, cut, size, is_utf8, broken),
        }
    for_eval = names_for_eval([name for name, _ in files if name not in sides])
    pieces: dict[str, list[Piece]] = {"train": [], "eval": []}
    for name, path in files:
        side_by_hash = "eval" if name in for_eval else "train"
        size = path.stat().st_size
        pieces[sides.get(name, side_by_hash)] += _pieces(path, 0, size, is_utf8, broken)
    return pieces


def is_broken(path: Path, is_utf8: bool, broken: BrokenLog) -> bool:
    """Return whether a text file has a NUL byte or a wrong encoding, and add it to the log.

    A file that is empty or larger than 16 MiB is not read, and the result is `False`.

    Args:
        is_utf8: True if text that is not UTF-8 is broken (`Piece`).
        broken: Log of broken text. It raises the error if broken text is not left out.
    """
    size = path.stat().st_size
    if not 0 < size <= _PIECE_BYTES:
        return False
    return not Piece(path, 0, size, True, is_utf8, broken).read()


def names_for_eval(names: list[str]) -> set[str]:
    """Return the names of the files that are for evaluation, by the hash of the name.

    About 8 % are. If all of several files would be for training, or all for evaluation, the one
    with the hash nearest to the bound goes to the other side. A single file is for training.
    """
    # Without a file on one side there would be nothing to train on, or to evaluate.
    ranked = sorted(names, key=rank)
    for_eval = {name for name in names if side(name) == "eval"}
    if not for_eval:
        for_eval = set(ranked[:1])
    if len(for_eval) == len(names):
        for_eval -= set(ranked[-1:])
    return for_eval


def _pieces(
    path: Path, start: int, stop: int, is_utf8: bool = False, broken: BrokenLog | None = None
) -> list[Piece]:
    """Cut bytes [start, stop) of a file at line ends into pieces of about `_PIECE_BYTES`."""
    cuts = [start]
    while stop - cuts[-1] > _PIECE_BYTES:
        cuts.append(_after_line(path, cuts[-1] + _PIECE_BYTES, stop))
    if cuts[-1] < stop:
        cuts.append(stop)
    log = broken or BrokenLog()
    pieces = []
    for first, last in itertools.pairwise(cuts):
        pieces.append(Piece(path, first, last, last == stop, is_utf8, log))
    return pieces


def _after_line(path: Path, near: int, stop: int) -> int:
    """Return the position at which to cut a text: the first start of a line after byte `near`.

    Only the next `_PIECE_BYTES` bytes are searched, and none from `stop` on. If no line starts
    there, the result is the first byte from `near` on that begins a UTF-8 character.
    """
    block = read_bytes(path, near, min(near + _PIECE_BYTES, stop))
    line = block.find(b"\n") + 1
    # A line end that is the last byte would leave an empty piece after it.
    if line and near + line < stop:
        return near + line
    # Bytes 10xxxxxx continue a UTF-8 character.
    for i, byte in enumerate(block[:4]):
        if byte & 0xC0 != 0x80:
            return near + i
    return near


def content_digest(files: list[tuple[str, Path]]) -> str:
    """Return a digest of the relative paths and the contents of files in the given order.

    All files are read completely, so they should be few.

    Args:
        files: Pairs of a relative path and a file.
    """
    parts: list[str | bytes] = []
    for name, path in files:
        parts += [name, path.read_bytes()]
    return cache.digest(*parts)


def stat_digest(files: list[tuple[str, Path]]) -> str:
    """Return a digest of the absolute paths, sizes, times and inodes of files in the given order.

    No file is read.

    Args:
        files: Pairs of a name, which is not used, and a file.
    """
    stamps = [f"{path.absolute()}:{contents.stamp(path)}" for _, path in files]
    return cache.digest(*stamps)
