"""A user's own files by format: plain text, JSON lines, Parquet and files of token ids.

`splits` divides these files into parts for training and for evaluation.
"""

from __future__ import annotations

import codecs
import shlex
from pathlib import Path
from typing import Literal, NamedTuple

from mupax.train.config.data import DEFAULT_LIMITS, LimitsConfig
from mupax.train.data import cache
from mupax.train.data.chats.records import ChatLines, ChatTable
from mupax.train.data.interface import DataError, ReadError, may_pass
from mupax.train.data.records import corpus, ids, listing, split_names
from mupax.train.data.records.bounds import LimitError
from mupax.train.data.records.broken import BrokenLog
from mupax.train.data.records.ids import IdFile
from mupax.train.data.records.lines import DamagedError, Lines
from mupax.train.data.records.tables import Table

Named = list[tuple[str, Path]]
_SNIFF_BYTES = 1 << 13
"""Number of bytes at the beginning of a file that are read to find its format."""
_CHECKED_BYTES = 1 << 26
"""Largest total size of plain text, in bytes, that is read to find broken files before the split.

Otherwise all files of one side of the split could be broken. Of larger text, this many bytes are
read to find text that is not UTF-8.
"""
_BLOCK_BYTES = 1 << 20
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
"""Byte order marks of texts that are not UTF-8. Longer marks come first, because a mark of UTF-32
begins with a mark of UTF-16."""


class Files(NamedTuple):
    """A user's files by format. All paths in it are relative to the user's folder.

    Attributes:
        text: Files of plain text, as pairs of a relative path and a path.
        records: Files of JSON lines or Parquet, as pairs of a relative path and a reader.
        ids: Files of token ids, as pairs of a relative path and a reader.
    """

    text: Named
    records: list[tuple[str, Lines | Table]]
    ids: list[tuple[str, IdFile]]
    sides: dict[str, Literal["train", "eval"]]
    """Side ("train" or "eval") of each file whose own or folder's name tells it, by its path."""
    marked: list[str]
    """Relative paths of plain text that begins with the byte order mark of UTF-8."""
    broken: BrokenLog
    """Log of the files, texts and records that are left out because they cannot be used."""
    is_utf8: bool
    """True if the tokenizer reads characters, so that text must be UTF-8."""

    def every(self) -> Named:
        """Return (relative path, file) of all files, sorted."""
        files = list(self.text)
        files += [(name, records.path) for name, records in self.records]
        files += [(name, id_file.path) for name, id_file in self.ids]
        return sorted(files)

    def reading(self) -> list[str]:
        """Return texts that say in which ways these files are read otherwise than by old versions.

        Such ways are a split by name, a byte order mark that is removed, an unusual width of ids,
        and broken entries that are left out. The texts are part of the corpus's key in the cache.
        So a corpus that an older version packed keeps its key if none of them applies.
        """
        facts = [f"{name} is for {side}" for name, side in sorted(self.sides.items())]
        marks = []
        for name, _ in self.text:
            if name in self.marked:
                marks.append(f"{name} has a mark")
        facts += marks
        unusual = []
        for name, file in self.ids:
            if not file.is_usual:
                unusual.append(f"{name} has {file.dtype.str}")
        facts += unusual
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
    """Find a user's files, sort them by format, and split them if their names say how.

    Args:
        kind: Formats to read: "text" for plain text, records and ids, "records" for records and
            ids, "chat" for records that contain messages.
        field: Name of the field of records whose text is a document.
        vocab_size: Vocabulary size of the tokenizer that made files of ids. `None` if files of ids
            are not read.
        note: Function that prints a line for the user about files that are left out, the split,
            files that are not plain text, and text that is not UTF-8.
        skip_broken: True if broken files and records are left out.
        is_utf8: True if text that is not UTF-8 is broken.
        limits: Limits on records. Larger records are broken.

    Raises:
        DataError: The path does not exist, or has more unreadable than readable content, a file is
            damaged and not left out, ids have an ambiguous width, or names have different words for
            the same part of the split (`val`, `dev`).
        ReadError: The disk or the bucket does not answer.
    """
    left_out: dict[str, str] = {}
    if path.is_file():
        candidates = [(path.name, path)]
    elif path.is_dir():
        candidates, left_out = listing.files_below(path)
    else:
        raise DataError(
            f"no file or folder {path}; "
            f"write data.name as {kind}:PATH, with the path of your {kind}"
        )
    result = Files([], [], [], {}, [], BrokenLog(skip_broken, limits), is_utf8)
    refused, not_text = _place_files(result, candidates, field, vocab_size, kind)
    if skip_broken and _size(result.text) <= _CHECKED_BYTES:
        intact_text = []
        for name, file in result.text:
            if not corpus.is_broken(file, is_utf8, result.broken):
                intact_text.append((name, file))
        result = result._replace(text=intact_text)
    for unread in (*refused, *not_text):
        if isinstance(unread.error, _NotTextError):
            left_out[unread.name] = unread.error.reason

    read_size = _size(result.every())
    _check_sizes(read_size, refused, skip_broken)
    if read_size == 0:
        if path.is_file():
            reasons = [f"it {reason}" for reason in left_out.values()]
        else:
            reasons = listing.summary(left_out)
        not_text_files = [(unread.name, unread.file) for unread in not_text]
        reasons += result.broken.summary()
        raise DataError(_no_content_message(path, kind, not_text_files, reasons))

    result, lines = _split(result, str(path))
    for line in (*listing.summary(left_out), *lines):
        note(f"{path}: {line}")
    if result.records:
        record_files = [(name, records.path) for name, records in result.records]
        note(f"reading the field {field!r} of {_listed(record_files)}")
    for name, id_file in result.ids:
        note(f"reading {name} as {id_file.size:,} token ids ({id_file.dtype})")
    # With a tokenizer that reads characters, such text is broken, and ends the run or is counted.
    other_coding = [] if is_utf8 else _other_coding(result.text)
    if other_coding:
        note(
            f"{path}: not UTF-8, and read byte by byte as it is: {_listed(other_coding)}; if this "
            "is Latin-1, `iconv -f LATIN1 -t UTF-8` converts it"
        )
    return result


def _other_coding(files: Named) -> Named:
    """Return the text files that are not UTF-8, among the first `_CHECKED_BYTES` of all text."""
    result = []
    budget = _CHECKED_BYTES
    for name, file in files:
        stop = min(budget, file.stat().st_size)
        budget -= stop
        if not _is_utf8(file, stop):
            result.append((name, file))
    return result


def _is_utf8(file: Path, stop: int) -> bool:
    """Return whether bytes [0, stop) of a file are UTF-8.

    The last character may be cut at `stop`, but not at the end of the file.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for start in range(0, stop, _BLOCK_BYTES):
            decoder.decode(corpus.read_bytes(file, start, min(start + _BLOCK_BYTES, stop)))
        if stop == file.stat().st_size:
            # Without `final`, the decoder would wait for the rest of a last character forever.
            decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


class _Unread(NamedTuple):
    """File that is not read.

    Attributes:
        name: Path relative to the user's folder.
        error: Error that says why.
    """

    name: str
    file: Path
    error: Exception


def _check_sizes(read_size: int, refused: list[_Unread], skip_broken: bool) -> None:
    """Raise an error if files that cannot be used have at least as many bytes as the files in use.

    If broken files are left out, the error is raised only if no file is in use.

    Args:
        read_size: Total size of the files in use, in bytes.
        refused: Files of a known format that cannot be used.
        skip_broken: True if broken files are left out.

    Raises:
        DataError: The message is that of the largest refused file.
    """
    if not refused:
        return
    # Unreadable files that are the smaller part of the data are only left out.
    refused_size = _size([(unread.name, unread.file) for unread in refused])
    if read_size == 0 or (refused_size >= read_size and not skip_broken):
        largest = max(refused, key=lambda unread: unread.file.stat().st_size)
        raise DataError(str(largest.error)) from largest.error


def _place_files(
    result: Files, candidates: Named, field: str, vocab_size: int | None, kind: str
) -> tuple[list[_Unread], list[_Unread]]:
    """Add every file to the list of its format in `result`.

    `field`, `vocab_size` and `kind` are arguments of `files`. A file that is damaged and left out
    is also logged.

    Args:
        candidates: Pairs of a relative path and a file.

    Returns:
        Files of a known format that cannot be used, and files of other formats.

    Raises:
        DataError: A file is damaged and not left out, or has ids of ambiguous width.
    """
    # Errors are collected, so that a README among records or a package.json among sources stops no
    # run.
    refused: list[_Unread] = []
    not_text: list[_Unread] = []
    for name, file in candidates:
        try:
            _place_file(result, name, file, field, vocab_size, kind)
        except (DamagedError, LimitError) as error:
            result.broken.add(str(file), "file", str(file), error)
            refused.append(_Unread(name, file, error))
        except _RefusedError as error:
            refused.append(_Unread(name, file, error))
        except _NotTextError as error:
            not_text.append(_Unread(name, file, error))
    if kind != "text":
        for name, file in result.text:
            not_text.append(_Unread(name, file, _NotTextError("is plain text")))
        result.text.clear()
    return refused, not_text


def _split(result: Files, place: str) -> tuple[Files, list[str]]:
    """Split files by their names, if possible (`split_names`).

    Args:
        result: All files by format, before the split.

    Returns:
        Files in use, and lines for the user about the split. With a split by name, `sides` of the
        files is set, and files of an unused test part or outside the split are removed. Otherwise
        all files stay, and `sides` is empty.
    """
    text = [name for name, _ in result.text]
    data_files = [name for name, _ in (*result.records, *result.ids)]
    splits = [split_names.file_split([*text, *data_files], place)]
    if splits[0] is None and text and data_files:
        # Records and ids may have a split by name, even if plain text next to them, such as a
        # README.md, has none.
        splits.append(split_names.file_split(text, place))
        splits.append(split_names.file_split(data_files, place))
    told_splits = [split for split in splits if split is not None]

    lines = []
    if not told_splits and split_names.tells_some([*text, *data_files]):
        lines.append(
            "some names tell training and evaluation parts, and others none, so the split is by "
            "hash; to split by name, give every file or every folder one"
        )
    unused: set[str] = set()
    sides: dict[str, Literal["train", "eval"]] = {}
    for split in told_splits:
        lines.append(split.line)
        lines += listing.summary(
            dict.fromkeys(
                split.outside, "outside of the folders and files to train and evaluate on"
            )
        )
        unused.update(split.unused, split.outside)
        sides |= split.sides
    used = result._replace(
        text=[entry for entry in result.text if entry[0] not in unused],
        records=[entry for entry in result.records if entry[0] not in unused],
        ids=[entry for entry in result.ids if entry[0] not in unused],
        sides=sides,
    )
    return used, lines


class _NotTextError(Exception):
    """Error for a file that is in none of the formats that are read.

    Args:
        reason: Rest of a sentence about the file, such as "is empty", for the list of files that
            are left out.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class _RefusedError(_NotTextError):
    """Error for a file of a known format that cannot be used, such as JSON lines without the field.

    Args:
        reason: Rest of a sentence about the file, for the list of files that are left out.
        message: Message of the error that is raised if such files are the larger part of the data.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(reason)
        self.args = (message,)


def _place_file(
    result: Files, name: str, file: Path, field: str, vocab_size: int | None, kind: str
) -> None:
    """Find the format of a file, and add the file to the list of that format in `result`.

    Args:
        result: Files by format, to which the file is added.
        name: Name of the file in these lists, its path relative to the user's folder.
        field: Field of records whose text is a document.
        vocab_size: Vocabulary size of the tokenizer that made files of ids. With `None`, .bin and
            .npy are tried as plain text.
        kind: "text", "records" or "chat", as for `files`. Only "chat" reads records differently.

    Raises:
        DamagedError: The file is compressed and cannot be unpacked.
        LimitError: The file exceeds a limit.
        ids.WidthError: The file has ids of ambiguous width.
        _RefusedError: The format is known, but the file cannot be used: it cannot be opened, is in
            UTF-16 or UTF-32, has no text in `field`, or has no ids of the tokenizer. Or the format
            is CSV, TSV, Arrow or Feather.
        _NotTextError: The file is none of records, ids and plain text.
        ReadError: The disk or the bucket does not answer. The file is not left out, because the
            run would then train on other data.
    """
    suffix = _format(file)
    try:
        if suffix in _LINES:
            # The encoding of a compressed text can be checked only after it is unpacked.
            if file.suffix.lower() in _LINES:
                _check_coding(file, corpus.read_bytes(file, 0, _SNIFF_BYTES))
            lines_type = ChatLines if kind == "chat" else Lines
            lines = lines_type(file, field, result.broken)
            # `first` raises an error if none of the first lines is a record. The file is then not
            # read.
            lines.first()
            result.records.append((name, lines))
        elif suffix == ".parquet":
            table_type = ChatTable if kind == "chat" else Table
            result.records.append((name, table_type(file, field, result.broken)))
        elif suffix in _UNREAD:
            raise _RefusedError(
                f"{suffix} is not read: write JSON lines or Parquet", _records_advice(file)
            )
        elif suffix in ids.SUFFIXES and vocab_size is not None:
            result.ids.append((name, ids.opened(file, vocab_size)))
        else:
            beginning = _beginning_of_text(file)
            result.text.append((name, file))
            if beginning.startswith(codecs.BOM_UTF8):
                result.marked.append(name)
    except (DamagedError, LimitError, ids.WidthError):  # subclasses of DataError, caught below
        raise
    except OSError as error:
        message = f"cannot read {file}: {error.strerror}"
        if may_pass(error):
            raise ReadError(message) from error
        raise _RefusedError(f"cannot be read: {error.strerror}", message) from error
    except DataError as error:
        cause = error.__cause__
        if isinstance(cause, OSError):
            raise _RefusedError(f"cannot be read: {cause.strerror}", str(error)) from error
        # A .json may have one JSON list over several lines, which is not read.
        if suffix == ".json" and "no JSON" in str(error):
            raise _RefusedError("holds no JSON lines", _records_advice(file)) from error
        reason = f"has no text in the field {field!r}"
        if suffix in ids.SUFFIXES:
            reason = "holds no ids of the tokenizer"
        raise _RefusedError(reason, str(error)) from error


def _beginning_of_text(file: Path) -> bytes:
    """Check that a file begins as plain text, and return its first 8 KiB.

    Raises:
        _NotTextError: The file is no plain text.
        _RefusedError: The file is text in another encoding than UTF-8.
        DataError: The file is missing or may not be read.
        ReadError: The disk or the bucket does not answer.
    """
    beginning = corpus.read_bytes(file, 0, _SNIFF_BYTES)
    suffix = file.suffix.lower()
    if suffix not in ids.SUFFIXES:
        _check_coding(file, beginning)
    if suffix in (*_PACKED, ".zip"):
        raise _NotTextError("is compressed, and no file of records: unpack it")
    # An editor may write a byte order mark even into an empty file.
    if beginning == codecs.BOM_UTF8:
        raise _NotTextError("is empty")
    # With byte tokens, NUL is the separator of documents.
    if b"\0" in beginning:
        raise _NotTextError("has NUL bytes, so it is no plain text")
    return beginning


def _check_coding(file: Path, beginning: bytes) -> None:
    """Raise `_RefusedError` for text in UTF-16 or UTF-32, with the command that converts it.

    Args:
        file: Path for the message. The file is not read.
        beginning: First bytes of the file, enough to see zeros in every second place.
    """
    encoding = _wide_encoding(beginning)
    if encoding is not None:
        advice = f"is {encoding}, not UTF-8: convert it by `iconv -f {encoding} -t UTF-8`"
        raise _RefusedError(advice, f"{file} {advice}")


def _wide_encoding(beginning: bytes) -> str | None:
    """Return the name of the encoding of a text in UTF-16 or UTF-32, or `None` for other text."""
    for mark, encoding in _WIDE_MARKS.items():
        if beginning.startswith(mark):
            return encoding
    if _looks_wide(beginning[0::2], beginning[1::2]):
        return "UTF-16LE"
    if _looks_wide(beginning[1::2], beginning[0::2]):
        return "UTF-16BE"
    return None


def _looks_wide(lower: bytes, upper: bytes) -> bool:
    """Return whether a text may be UTF-16, from its bytes in even and in odd places.

    Most upper bytes of a text in Latin letters are 0, and no lower bytes are.

    Args:
        lower: Bytes that would be the lower bytes of the characters.
        upper: Bytes that would be the upper bytes of the characters.
    """
    if len(upper) < 8 or 0 in lower:
        return False
    # 9 is the tab. A binary file may also have zeros in half of its bytes, but usually has control
    # characters below 9.
    return 2 * upper.count(0) > len(upper) and min(lower) >= 9


def _no_content_message(path: Path, kind: str, not_text: Named, reasons: list[str]) -> str:
    """Return the message for a path without a readable file.

    Args:
        kind: Formats that were read (`files`).
        not_text: Files that are not plain text. If one is a .bin or .npy, the message says how
            token ids are read.
        reasons: Sentences that say which files were left out and why.
    """
    if any(file.suffix.lower() in ids.SUFFIXES for _, file in not_text):
        return (
            f"{path} has no {kind} in it: NUL bytes in {_listed(not_text)}; if these are token "
            "ids, write --data.tokenizer with the path of the tokenizer.json that made them, or "
            "ids:SIZE, how many tokens it has"
        )
    reason = f": {'; '.join(reasons)}" if reasons else ""
    if kind == "chat":
        return (
            f"{path} has no conversations in it{reason}; "
            "chat:PATH takes .jsonl (or .gz, .zst of it) and .parquet with a field of messages"
        )
    if kind == "records":
        return (
            f"{path} has no records in it{reason}; "
            "records:PATH takes .jsonl (or .gz, .zst of it) and .parquet, text:PATH plain text"
        )
    return (
        f"{path} has no text in it{reason}; "
        "text:PATH takes a UTF-8 text file or a folder of text files"
    )


def _format(path: Path) -> str:
    """Return the suffix that tells the format of a file, such as ".jsonl" for data.jsonl.gz."""
    is_packed = path.suffix.lower() in _PACKED
    name = path.stem if is_packed else path.name
    return Path(name).suffix.lower()


def _size(named: Named) -> int:
    """Return the total size of some files in bytes."""
    return sum(file.stat().st_size for _, file in named)


def _listed(named: Named) -> str:
    """Return the names of the first eight files, and the number of the remaining ones."""
    names = ", ".join(name for name, _ in named[:_LISTED])
    if len(named) <= _LISTED:
        return names
    return f"{names} and {len(named) - _LISTED} more"


def _records_advice(path: Path) -> str:
    """Return a message that advises to write a file of records as JSON lines or Parquet.

    For a .json, compressed or not, the message has a shell command that converts it.
    """
    advice = (
        f"{path} holds records that are not read as they are; write them as JSON lines or Parquet"
    )
    if _format(path) != ".json":
        return advice
    unpackers = {".gz": "gzip -dc", ".zst": "zstd -dc", ".bz2": "bzip2 -dc", ".xz": "xz -dc"}
    unpack = unpackers.get(path.suffix.lower(), "cat")
    program = (
        "import json, sys; x = json.load(sys.stdin); "
        "[print(json.dumps(row)) for row in ([x] if type(x) is dict else x)]"
    )
    result = f"{path.name.partition('.')[0]}.jsonl"
    return f'{advice}, by\n{unpack} {shlex.quote(str(path))} | python -c "{program}" > {result}'
