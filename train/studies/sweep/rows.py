"""Rows of a sweep, one for each finished point: points.jsonl, and points.jsonl.gz for a study that is kept compressed."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import gzip
import json
import math
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import xxhash

from mupax import disk
from mupax.errors import MupaxError

FILE_NAME = "points.jsonl"
COMPRESSED_NAME = f"{FILE_NAME}.gz"


_NUMBER, _NONE = (int, float), type(None)
_KINDS: dict[str, tuple[type, ...]] = {
    "key": (str,), "command": (str,), "loss": (*_NUMBER, _NONE), "eval_loss": (*_NUMBER, _NONE), "diverged_at": (int, _NONE),
    "curve": (list,), "steps": (int,), "seconds": _NUMBER, "how": (str,),
}  # fmt: skip


class RowsError(MupaxError):
    """A file of rows that is not as it was written. The text says what to do with it."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One finished point.

    Attributes:
        key: of its config (`key_of`).
        command: what trains it alone; "" where no recipe has its name.
        loss: mean training loss (nats per target) over the last tenth of the steps, inf where it diverged.
        eval_loss: loss on the evaluation examples after the last step; None where it was not asked for or diverged.
        diverged_at: first step whose loss or gradient was not finite, from 1; None where all were.
        curve: training loss, means over at most `CURVE_POINTS` equal parts of the run, inf from where it diverged.
        steps: optimizer steps.
        seconds: of its steps, those before an interruption left out; where several trained together its share.
        how: together with others in one program, or in turn.
    """

    key: str
    command: str
    loss: float
    eval_loss: float | None
    diverged_at: int | None
    curve: tuple[float, ...]
    steps: int
    seconds: float
    how: Literal["together", "in turn"]

    @property
    def diverged(self) -> bool:
        """Whether a loss or gradient was not finite."""
        return self.diverged_at is not None

    @property
    def final_loss(self) -> float:
        """Evaluation loss after the last step, or the training loss of a point that was not evaluated."""
        return self.loss if self.eval_loss is None else self.eval_loss

    def to_json(self) -> dict[str, Any]:
        """The row as plain values; null stands for what is not finite."""
        loss, *curve = (
            value if math.isfinite(value) else None for value in (self.loss, *self.curve)
        )
        return {**dataclasses.asdict(self), "loss": loss, "curve": curve}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Row:
        """The inverse of `to_json`; raises ValueError where it is of nothing that this gives."""
        wrong = [name for name, kinds in _KINDS.items() if type(fields.get(name)) not in kinds]
        wrong += sorted(fields.keys() - _KINDS.keys())
        if wrong or any(type(value) not in (*_NUMBER, _NONE) for value in fields["curve"]):
            raise ValueError(f"{(wrong or ['curve'])[0]} is of another kind")
        loss, *curve = (
            math.inf if value is None else value for value in (fields["loss"], *fields["curve"])
        )
        return cls(**{**fields, "loss": loss, "curve": tuple(curve)})


class Rows(dict[str, Row]):
    """Rows of a sweep by key, and their file.

    A row is on disk when `add` returns. If a machine died in the middle of a line, that half line
    is removed. Every line has a digest of its row; lines of older versions have none. The rows of
    `COMPRESSED_NAME` are read first, and new rows go to `FILE_NAME`.

    Args:
        folder: Folder of the sweep, which exists.
        note: Called with a line about rows without a digest.

    Raises:
        RowsError: A line is not as it was written.
        DiskError: The disk cannot read the file.
    """

    def __init__(self, folder: Path, note: Callable[[str], None] = lambda text: None) -> None:
        self.path = folder / FILE_NAME
        text = disk.read_bytes(self.path) if disk.status(self.path) else b""
        *complete, rest = text.split(b"\n")
        if rest:
            os.truncate(self.path, len(text) - len(rest))
        super().__init__()
        older = self._read(_compressed_lines(folder), folder / COMPRESSED_NAME)
        older += self._read(complete, self.path)
        if older:
            note(
                f"{older} rows of {self.path.name} were written without a digest by an older version: taken as they are"
            )

    def _read(self, lines: Sequence[bytes], path: Path) -> int:
        """Add the rows of a file's lines, and return how many have no digest."""
        older = 0
        for number, line in enumerate(lines, start=1):
            try:
                fields = disk.json_object(line, "the line")
                digest = fields.pop("digest", None)
                if digest not in (None, _digest(fields)):
                    raise ValueError("the line does not have the digest it names")
                row = Row.from_json(fields)
            except ValueError as error:
                raise RowsError(
                    f"{path} line {number} is not as it was written ({error}); remove the line, and its point is trained "
                    "again"
                ) from error
            older += digest is None
            self[row.key] = row
        return older

    def has(self, key: str, *, evaluated: bool) -> bool:
        """Whether a point is done, and evaluated where that is wanted and can be.

        Args:
            key: of the point (`key_of`).
            evaluated: whether it wants an evaluation loss; a point that diverged can have none.
        """
        row = self.get(key)
        return row is not None and (row.diverged or row.eval_loss is not None or not evaluated)

    def add(self, row: Row) -> None:
        """Write a finished point."""
        fields = row.to_json()
        line = json.dumps({**fields, "digest": _digest(json.loads(json.dumps(fields)))}) + "\n"
        try:
            with self.path.open("ab", buffering=0) as file:
                end = os.fstat(file.fileno()).st_size
                try:
                    if file.write(line.encode()) < len(line):
                        raise OSError(errno.EIO, "only a part of a line was written")
                    os.fsync(file.fileno())
                except OSError:  # half a row would spoil the file
                    with contextlib.suppress(OSError):
                        os.ftruncate(file.fileno(), end)
                    raise
        except OSError as error:
            raise disk.DiskError(
                f"could not write {self.path}: {error.strerror}; the rows in it are whole, and the same command goes on"
            ) from error
        self[row.key] = row


def _digest(fields: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(fields, sort_keys=True).encode())


def has_rows(folder: Path) -> bool:
    """Return whether a folder has rows of a sweep, compressed or not."""
    return (folder / FILE_NAME).is_file() or (folder / COMPRESSED_NAME).is_file()


def _compressed_lines(folder: Path) -> list[bytes]:
    """Return the complete lines of `COMPRESSED_NAME`, none without that file."""
    path = folder / COMPRESSED_NAME
    if not disk.status(path):
        return []
    content = disk.read_bytes(path)
    try:
        return gzip.decompress(content).splitlines()
    except (OSError, EOFError, zlib.error) as error:
        raise RowsError(f"{path} is damaged ({error}); write it again by `gzip`") from error
