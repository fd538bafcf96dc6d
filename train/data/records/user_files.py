"""A user's own files: text, JSON lines, Parquet and files of token ids, one or a folder, mixed; `splits` has their sides."""

from __future__ import annotations

import codecs
import shlex
from pathlib import Path
from typing import Literal, NamedTuple

from mupax.train.config.data import DEFAULT_LIMITS, LimitsConfig
from mupax.train.data import cache
from mupax.train.data.chats.records import ChatLines, ChatTable
from mupax.train.data.interface import DataError
from mupax.train.data.records import corpus, ids, listing, split_names
from mupax.train.data.records.bounds import LimitError
from mupax.train.data.records.broken import BrokenLog
from mupax.train.data.records.ids import IdFile
from mupax.train.data.records.lines import DamagedError, Lines
from mupax.train.data.records.tables import Table

Named = list[tuple[str, Path]]
_SNIFF_BYTES = 1 << 13
_CHECKED_BYTES = 1 << 26
"""Of plain text, of which broken files are left out before the others are split, so that no side has broken files alone."""
_LISTED = 8
_LINES = (".jsonl", ".ndjson", ".json")
_UNREAD = (".arrow", ".csv", ".feather", ".tsv")
_PACKED = (".gz", ".zst", ".bz2", ".xz")
_WIDE_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
"""Beginnings of text of wide characters, the longer ones first: one of UTF-32 begins with one of UTF-16."""


class Files(NamedTuple):
    """A user's files by how they are read, each with its path in the folder."""

    text: Named
    records: list[tuple[str, Lines | Table]]
    ids: list[tuple[str, IdFile]]
    sides: dict[str, Literal["train", "eval"]]
    """Side of each file whose name, or folder's name, tells it."""
    marked: list[str]
    """Plain text that begins with a mark of UTF-8."""
    broken: BrokenLog
    """What was left out as broken."""
    is_utf8: bool
    """Whether the tokenizer reads characters."""

    def every(self) -> Named:
        """(relative path, file) of all, sorted."""
        return sorted(
            [*self.text, *((name, file.path) for name, file in (*self.records, *self.ids))]
        )

    def reading(self) -> list[str]:
        """Return how the files are read, as far as that is not how they always were read.

        What was packed by other rules has another key in the cache.
        """
        facts = [f"{name} is for {side}" for name, side in sorted(self.sides.items())]
        facts += [f"{name} has a mark" for name, _ in self.text if name in self.marked]
        facts += [f"{name} has {file.dtype.str}" for name, file in self.ids if not file.is_usual]
        if self.broken.skip:
            facts.append("broken entries are left out")
        return facts


def files(
    path: Path,
    kind: str,
    field: str,
    vocab_size: int | None,
    note: cache.Note,
    *,
    skip_broken: bool = False,
    is_utf8: bool = False,
    limits: LimitsConfig = DEFAULT_LIMITS,
) -> Files:
    """Return the files that can be read, of a file or a folder, with the split that their names tell.

    Args:
        path: of the file or folder.
        kind: "text" reads plain text, records and ids, "records" the last two, "chat" records that hold messages.
        field: of records, whose text is a document.
        vocab_size: of the tokenizer that made files of ids; None where none is named, and they are not read.
        note: told which files are left out and why, how the others are split, and which are not read as plain text.
        skip_broken: whether broken files and records are left out.
        is_utf8: whether text that is not UTF-8 is broken.
        limits: bounds on records; larger ones are broken.

    Raises:
        DataError: there is no such path, nothing in it that can be read, or more in files that cannot; or a file is damaged,
            unless such are left out.
    """
    left_out: dict[str, str] = {}
    if path.is_file():
        every = [(path.name, path)]
    elif path.is_dir():
        every, left_out = listing.files_below(path)
    else:
        raise DataError(
            f"no file or folder {path}; write data.name as {kind}:PATH, with the path of your {kind}"
        )
    read = Files([], [], [], {}, [], BrokenLog(skip_broken, limits), is_utf8)
    refused, not_text = _placed(read, every, field, vocab_size, kind)
    if skip_broken and _size(read.text) <= _CHECKED_BYTES:
        sound_text = [
            (name, file)
            for name, file in read.text
            if not corpus.is_broken(file, is_utf8, read.broken)
        ]
        read = read._replace(text=sound_text)
    left_out |= {
        name: error.reason
        for name, _, error in (*refused, *not_text)
        if isinstance(error, _NotTextError)
    }
    read_size = _size(read.every())
    refused_size = _size([(name, file) for name, file, _ in refused])
    if refused and (read_size == 0 or (refused_size >= read_size and not skip_broken)):
        _, _, error = max(refused, key=lambda entry: entry[1].stat().st_size)
        raise DataError(str(error)) from error
    if read_size == 0:
        reasons = (
            [f"it {reason}" for reason in left_out.values()]
            if path.is_file()
            else listing.summary(left_out)
        )
        not_text_files = [(name, file) for name, file, _ in not_text]
        raise DataError(_nothing(path, kind, not_text_files, [*reasons, *read.broken.summary()]))
    read, lines = _split(read, str(path))
    for line in (*listing.summary(left_out), *lines):
        note(f"{path}: {line}")
    if read.records:
        note(
            f"reading the field {field!r} of {_listed([(name, file.path) for name, file in read.records])}"
        )
    for name, file in read.ids:
        note(f"reading {name} as {file.size:,} token ids ({file.dtype})")
    return read


_Unread = tuple[str, Path, Exception]
"""Path in the folder, file, and why it is not read."""


def _placed(
    read: Files, every: Named, field: str, vocab_size: int | None, kind: str
) -> tuple[list[_Unread], list[_Unread]]:
    """Put every file where it belongs. Return the files that hold nothing of the data, and those that are none of what is read.

    The README of a folder of records is not what is to be learned, and a package.json among sources need not stop a run.

    Raises:
        DataError: a file is damaged, unless such are left out, or has ids of a width that cannot be told.
    """
    refused: list[_Unread] = []
    not_text: list[_Unread] = []
    for name, file in every:
        try:
            _place(read, name, file, field, vocab_size, kind)
        except (DamagedError, LimitError) as error:
            read.broken.add(str(file), "file", str(file), error)
            refused.append((name, file, error))
        except _RefusedError as error:
            refused.append((name, file, error))
        except _NotTextError as error:
            not_text.append((name, file, error))
    if kind != "text":
        not_text += [(name, file, _NotTextError("is plain text")) for name, file in read.text]
        read.text.clear()
    return refused, not_text


def _split(read: Files, place: str) -> tuple[Files, list[str]]:
    """Return the files with the sides that names tell, without those that are then not used, and lines for the user.

    Records and ids may have a split of their own: plain text beside them, such as a README.md, does not undo it.
    """
    text = [name for name, _ in read.text]
    data_files = [name for name, _ in (*read.records, *read.ids)]
    complete = split_names.file_split([*text, *data_files], place)
    groups = [text, data_files] if text and data_files and complete is None else []
    splits = [complete, *(split_names.file_split(group, place) for group in groups)]
    told = [split for split in splits if split is not None]
    lines = []
    if not told and split_names.tells_some([*text, *data_files]):
        lines.append(
            "some names tell training and evaluation parts, and others none, so the split is by hash; "
            "to split by name, give every file or every folder one"
        )
    unused: set[str] = set()
    sides: dict[str, Literal["train", "eval"]] = {}
    for split in told:
        lines.append(split.line)
        lines += listing.summary(dict.fromkeys(split.outside, "stands beside the split"))
        unused.update(split.unused, split.outside)
        sides |= split.sides
    used = read._replace(
        text=[entry for entry in read.text if entry[0] not in unused],
        records=[entry for entry in read.records if entry[0] not in unused],
        ids=[entry for entry in read.ids if entry[0] not in unused],
        sides=sides,
    )
    return used, lines


class _NotTextError(Exception):
    """A file that is none of what can be read.

    Args:
        reason: for a list of such files.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class _RefusedError(_NotTextError):
    """A file of a kind that is read, which holds no records or ids of the data.

    Args:
        reason: for a list of such files.
        message: for the user, where it is the only file.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(reason)
        self.args = (message,)


def _place(
    read: Files, name: str, file: Path, field: str, vocab_size: int | None, kind: str
) -> None:
    """Put a file where it belongs.

    Raises:
        DamagedError: it cannot be unpacked.
        LimitError: it is larger than a limit.
        ids.WidthError: it has ids of a width that cannot be told.
        _RefusedError: it is of a kind that is read, and holds nothing of the data.
        _NotTextError: it is none of what can be read.
    """
    suffix = _format(file)
    of_lines, of_tables = (ChatLines, ChatTable) if kind == "chat" else (Lines, Table)
    try:
        if suffix in _LINES:
            if file.suffix.lower() in _LINES:
                _check_coding(file, corpus.read_bytes(file, 0, _SNIFF_BYTES))
            lines = of_lines(file, field, read.broken)
            lines.first()
            read.records.append((name, lines))
        elif suffix == ".parquet":
            read.records.append((name, of_tables(file, field, read.broken)))
        elif suffix in _UNREAD:
            raise _RefusedError(
                f"{suffix} is not read: write JSON lines or Parquet", _plain_text_of(file)
            )
        elif suffix in ids.SUFFIXES and vocab_size is not None:
            read.ids.append((name, ids.opened(file, vocab_size)))
        else:
            beginning = _beginning_of_text(file)
            read.text.append((name, file))
            if beginning.startswith(codecs.BOM_UTF8):
                read.marked.append(name)
    except (DamagedError, LimitError, ids.WidthError):
        raise
    except OSError as error:
        raise _RefusedError(
            f"cannot be read: {error.strerror}", f"cannot read {file}: {error.strerror}"
        ) from error
    except DataError as error:
        cause = error.__cause__
        if isinstance(cause, OSError):
            raise _RefusedError(f"cannot be read: {cause.strerror}", str(error)) from error
        # JSON files need not be lines: one list, say, which is read whole or not at all.
        if suffix == ".json" and "no JSON" in str(error):
            raise _RefusedError("holds no JSON lines", _plain_text_of(file)) from error
        reason = (
            "holds no ids of the tokenizer"
            if suffix in ids.SUFFIXES
            else f"has no text in the field {field!r}"
        )
        raise _RefusedError(reason, str(error)) from error


def _beginning_of_text(file: Path) -> bytes:
    """Return the first bytes of plain text.

    Raises:
        _NotTextError: it is no plain text of bytes or UTF-8.
        DataError: it cannot be read.
    """
    beginning = corpus.read_bytes(file, 0, _SNIFF_BYTES)
    suffix = file.suffix.lower()
    if suffix not in ids.SUFFIXES:
        _check_coding(file, beginning)
    if suffix in (*_PACKED, ".zip"):
        raise _NotTextError("is compressed, and no file of records: unpack it")
    if beginning == codecs.BOM_UTF8:
        raise _NotTextError("is empty")
    if b"\0" in beginning:
        raise _NotTextError("has NUL bytes, so it is no plain text")
    return beginning


def _check_coding(file: Path, beginning: bytes) -> None:
    """Raise _RefusedError for text of wide characters."""
    wide = _wide(beginning)
    if wide is not None:
        advice = f"is {wide}, not UTF-8: convert it by `iconv -f {wide} -t UTF-8`"
        raise _RefusedError(advice, f"{file} {advice}")


def _wide(beginning: bytes) -> str | None:
    """Return the name of a coding of wide characters that a text begins in, or `None` for all other text."""
    for mark, coding in _WIDE_MARKS.items():
        if beginning.startswith(mark):
            return coding
    # Without a mark every second byte of most texts is 0, and no other one.
    for zero_places, text_places, coding in ((1, 0, "UTF-16LE"), (0, 1, "UTF-16BE")):
        upper = beginning[zero_places::2]
        lower = beginning[text_places::2]
        if (
            len(upper) >= 8
            and 0 not in lower
            and 2 * upper.count(0) > len(upper)
            and min(lower) >= 9
        ):
            return coding
    return None


def _nothing(path: Path, kind: str, not_text: Named, reasons: list[str]) -> str:
    """Return the error of a path of which nothing can be read."""
    if any(file.suffix.lower() in ids.SUFFIXES for _, file in not_text):
        return (
            f"{path} has no {kind} in it: NUL bytes in {_listed(not_text)}; if these are token ids, write --data.tokenizer "
            "with the path of the tokenizer.json that made them, or ids:SIZE, how many tokens it has"
        )
    why = f": {'; '.join(reasons)}" if reasons else ""
    if kind == "chat":
        return (
            f"{path} has no conversations in it{why}; chat:PATH takes .jsonl (or .gz, .zst of it) and .parquet with a field of "
            "messages"
        )
    if kind == "records":
        return f"{path} has no records in it{why}; records:PATH takes .jsonl (or .gz, .zst of it) and .parquet, text:PATH plain text"
    return f"{path} has no text in it{why}; text:PATH takes a UTF-8 text file or a folder of text files"


def _format(path: Path) -> str:
    """The suffix that tells the format, without that of a compression."""
    return Path(path.stem if path.suffix.lower() in _PACKED else path.name).suffix.lower()


def _size(named: Named) -> int:
    return sum(file.stat().st_size for _, file in named)


def _listed(named: Named) -> str:
    names = ", ".join(name for name, _ in named[:_LISTED])
    return names if len(named) <= _LISTED else f"{names} and {len(named) - _LISTED} more"


def _plain_text_of(path: Path) -> str:
    """What to say of a file of records that are not read: how to write them as JSON lines, or as text."""
    advice = (
        f"{path} holds records that are not read as they are; write them as JSON lines or Parquet"
    )
    if _format(path) != ".json":
        return advice
    unpack = {".gz": "gzip -dc", ".zst": "zstd -dc", ".bz2": "bzip2 -dc", ".xz": "xz -dc"}.get(
        path.suffix.lower(), "cat"
    )
    program = "import json, sys; x = json.load(sys.stdin); [print(json.dumps(row)) for row in ([x] if type(x) is dict else x)]"
    return f'{advice}, by\n{unpack} {shlex.quote(str(path))} | python -c "{program}" > {path.name.partition(".")[0]}.jsonl'
