"""A user's own files: text, JSON lines, Parquet and files of token ids, one or a folder, mixed; `splits` has their sides."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import NamedTuple

from mupax.train.data import cache
from mupax.train.data.chats.records import ChatLines, ChatTable
from mupax.train.data.interface import DataError
from mupax.train.data.records import corpus, ids
from mupax.train.data.records.ids import IdFile
from mupax.train.data.records.lines import Lines
from mupax.train.data.records.tables import Table

Named = list[tuple[str, Path]]
_SNIFF_BYTES = 1 << 13
_LISTED = 8
_LINES = (".jsonl", ".ndjson", ".json")
_UNREAD = (".arrow", ".csv", ".feather", ".tsv")
_PACKED = (".gz", ".zst", ".bz2", ".xz")


class Files(NamedTuple):
    """A user's files by how they are read, each with its path in the folder."""

    text: Named
    records: list[tuple[str, Lines | Table]]
    ids: list[tuple[str, IdFile]]

    def every(self) -> Named:
        """(relative path, file) of all, sorted."""
        return sorted([*self.text, *((name, file.path) for name, file in (*self.records, *self.ids))])


def files(path: Path, kind: str, field: str, vocab_size: int | None, note: cache.Note) -> Files:
    """What can be read of a file, or of every file in a folder (hidden ones left out).

    Args:
        path: of the file or folder.
        kind: "text" reads plain text, records and ids, "records" the last two, "chat" records that hold messages.
        field: of records, whose text is a document.
        vocab_size: of the tokenizer that made files of ids; None where none is named, and they are not read.
        note: told which files are left out, and which are not read as plain text.

    Raises:
        DataError: there is no such path, nothing in it that can be read, or more in files that cannot.
    """
    if path.is_file():
        every = [(path.name, path)]
    elif path.is_dir():
        below = ((file.relative_to(path), file) for file in path.rglob("*") if file.is_file())
        every = sorted((r.as_posix(), file) for r, file in below if not any(p.startswith(".") for p in r.parts))
    else:
        raise DataError(f"no file or folder {path}; write data.name as {kind}:PATH, with the path of your {kind}")
    # The README of a folder of records is not what is to be learned, a package.json among sources need not stop a run.
    read, refused, binary = Files([], [], []), {}, []
    for name, file in every:
        try:
            _place(read, name, file, field, vocab_size, kind)
        except DataError as error:
            refused[name] = (file, error)
        except _NotTextError:
            binary.append((name, file))
    if kind != "text":
        binary, read = [*binary, *read.text], read._replace(text=[])
    unread = [(name, file) for name, (file, _) in refused.items()]
    if unread and _size(unread) >= _size(read.every()):
        raise max(refused.values(), key=lambda item: item[0].stat().st_size)[1]
    if not _size(read.every()):
        raise DataError(_nothing(path, kind, binary))
    if left_out := sorted([*unread, *binary]):
        note(f"left out of {path}, as {'not plain text' if kind == 'text' else 'no records'}: {_listed(left_out)}")
    if read.records:
        note(f"reading the field {field!r} of {_listed([(name, file.path) for name, file in read.records])}")
    for name, file in read.ids:
        note(f"reading {name} as {file.size:,} token ids ({file.dtype})")
    return read


class _NotTextError(Exception):
    """A file that is none of what can be read."""


def _place(read: Files, name: str, file: Path, field: str, vocab_size: int | None, kind: str) -> None:
    """Puts a file where it belongs; raises DataError where it is of a kind that is read, and cannot be."""
    suffix = _format(file)
    of_lines, of_tables = (ChatLines, ChatTable) if kind == "chat" else (Lines, Table)
    if suffix in _LINES:
        lines = of_lines(file, field)
        try:
            lines.first()
        except DataError as error:
            # JSON files need not be lines: one list, say, which is read whole or not at all.
            raise DataError(_plain_text_of(file)) if suffix == ".json" and "no JSON" in str(error) else error from error
        read.records.append((name, lines))
    elif suffix == ".parquet":
        read.records.append((name, of_tables(file, field)))
    elif suffix in _UNREAD:
        raise DataError(_plain_text_of(file))
    elif suffix in ids.SUFFIXES and vocab_size is not None:
        read.ids.append((name, ids.opened(file, vocab_size)))
    elif b"\0" in corpus.read_bytes(file, 0, _SNIFF_BYTES):
        raise _NotTextError
    else:
        read.text.append((name, file))


def _nothing(path: Path, kind: str, left_out: Named) -> str:
    """What to say where nothing can be read."""
    if any(file.suffix.lower() in ids.SUFFIXES for _, file in left_out):
        return (
            f"{path} has no {kind} in it: NUL bytes in {_listed(left_out)}; if these are token ids, write --data.tokenizer "
            "with the path of the tokenizer.json that made them, or ids:SIZE, how many tokens it has"
        )
    if kind == "chat":
        return f"{path} has no conversations in it; chat:PATH takes .jsonl (or .gz, .zst of it) and .parquet with a field of messages"
    if kind == "records":
        return f"{path} has no records in it; records:PATH takes .jsonl (or .gz, .zst of it) and .parquet, text:PATH plain text"
    why = f": NUL bytes in {_listed(left_out)}" if left_out else ""
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
    advice = f"{path} holds records that are not read as they are; write them as JSON lines or Parquet"
    if _format(path) != ".json":
        return advice
    unpack = {".gz": "gzip -dc", ".zst": "zstd -dc", ".bz2": "bzip2 -dc", ".xz": "xz -dc"}.get(
        path.suffix.lower(), "cat"
    )
    program = "import json, sys; x = json.load(sys.stdin); [print(json.dumps(row)) for row in ([x] if type(x) is dict else x)]"
    return (
        f'{advice}, by\n{unpack} {shlex.quote(str(path))} | python -c "{program}" > {path.name.partition(".")[0]}.jsonl'
    )
