"""Rows of a sweep, one for each finished point, and the file points.jsonl that has them.

A study that is kept may have its rows compressed, in points.jsonl.gz.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import gzip
import json
import math
import os
import re
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import xxhash

from mupax import MupaxError, disk, terminal

FILE_NAME = "points.jsonl"
COMPRESSED_NAME = f"{FILE_NAME}.gz"

_NONE = type(None)
_FIELD_TYPES: dict[str, tuple[type, ...]] = {
    "key": (str,),
    "command": (str,),
    "loss": (int, float, _NONE),
    "eval_loss": (int, float, _NONE),
    "diverged_at": (int, _NONE),
    "curve": (list,),
    "steps": (int,),
    "seconds": (int, float),
    "how": (str,),
}
"""Fields of a row in a file, and the types that each may have."""
_CURVE_TYPES = (int, float, _NONE)
_NONFINITE = re.compile(rb'"eval_loss": (NaN|-?Infinity)')
"""Pattern of an evaluation loss that older versions wrote as NaN or Infinity, which JSON lacks."""


class RowsError(MupaxError):
    """Error of a file of rows that is damaged or was changed. The text says how to repair it."""


@dataclasses.dataclass(frozen=True)
class Row:
    """Result of one finished point.

    Attributes:
        key: Digest of the config fields and data that determine the training (`key_of`).
        command: Command that trains the point alone; "" if no recipe has its name.
        loss: Mean training loss over the last tenth of the steps, in nats per target; inf if the
            point diverged.
        eval_loss: Loss on the evaluation examples after the last step; `None` if the point diverged
            or was not evaluated.
        diverged_at: First step, from 1, whose loss or gradient was not finite. If only the
            evaluation was not finite, it is the last step. `None` if everything was finite.
        curve: Training loss, as means over at most `CURVE_POINTS` equal parts of the run; inf from
            the part in which the point diverged.
        steps: Number of optimizer steps.
        seconds: Time of the steps since the last interruption. Points that trained at the same time
            have an equal share of it each.
        how: "together" with other points in one program, or "in turn".
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
        """True if a loss, gradient or the evaluation was not finite."""
        return self.diverged_at is not None

    @property
    def final_loss(self) -> float:
        """Evaluation loss after the last step, or the training loss without an evaluation."""
        return self.loss if self.eval_loss is None else self.eval_loss

    def to_json(self) -> dict[str, Any]:
        """Return the fields of the row as plain values.

        Infinite or NaN values of `loss` and `curve` become `None`.
        """
        fields = dataclasses.asdict(self)
        fields["loss"] = _finite_or_none(self.loss)
        fields["curve"] = [_finite_or_none(loss) for loss in self.curve]
        return fields

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Row:
        """Return the row that `to_json` made `fields` from.

        Raises:
            ValueError: A field is absent, has another type, or does not belong to a row.
        """
        # `type` and not `isinstance`, which would take True for a number.
        wrong = []
        for name, types in _FIELD_TYPES.items():
            if type(fields.get(name)) not in types:
                wrong.append(name)
        wrong += sorted(fields.keys() - _FIELD_TYPES.keys())
        if not wrong and any(type(loss) not in _CURVE_TYPES for loss in fields["curve"]):
            wrong = ["curve"]
        if wrong:
            raise ValueError(f"{wrong[0]} is of another kind")

        eval_loss = fields["eval_loss"]
        if eval_loss is not None and not math.isfinite(eval_loss):
            # An older version wrote it so, of a point that had diverged at its last step.
            diverged = {"loss": None, "eval_loss": None, "diverged_at": fields["steps"]}
            fields = {**fields, **diverged}
        loss = _number_or_inf(fields["loss"])
        curve = tuple(_number_or_inf(value) for value in fields["curve"])
        return cls(**{**fields, "loss": loss, "curve": curve})


def _fields(line: bytes) -> dict[str, Any]:
    """Return the fields of a row from its line in a file.

    A line of an older version may have an evaluation loss of NaN or Infinity, which is no JSON.

    Raises:
        JsonError: The line is no JSON object.
    """
    match = _NONFINITE.search(line)
    if match is None:
        return disk.json_object(line, "the line")
    strict = line.replace(match[0], b'"eval_loss": null', 1)
    return {**disk.json_object(strict, "the line"), "eval_loss": float(match[1])}


def _finite_or_none(value: float) -> float | None:
    """Return a finite loss unchanged, and `None` for inf or NaN, which JSON lacks."""
    return value if math.isfinite(value) else None


def _number_or_inf(value: float | None) -> float:
    """Return `value` unchanged, and inf for `None`: the inverse of `_finite_or_none`."""
    return math.inf if value is None else value


class Rows(dict[str, Row]):
    """Rows of a sweep by key, and their file.

    A row is on disk when `add` returns. If a machine died in the middle of a line, that half line
    is removed from the file. Every line has a digest of its row; lines of older versions have none.
    The rows of `COMPRESSED_NAME` are read first, and new rows go to `FILE_NAME`.

    Args:
        folder: Existing folder of the sweep, which may have no rows yet.
        log: Called with a line about rows without a digest.

    Raises:
        RowsError: A line is not as it was written.
        DiskError: The disk cannot read the file.
    """

    def __init__(self, folder: Path, log: Callable[[str], None] = lambda line: None) -> None:
        super().__init__()
        self.path = folder / FILE_NAME
        content = disk.read_bytes(self.path) if disk.status(self.path) else b""
        # Behind the last line end there is nothing, unless a write was cut short.
        *lines, half_line = content.split(b"\n")
        if half_line:
            # Cut off, or the next row would be appended to the half line.
            os.truncate(self.path, len(content) - len(half_line))

        # Compressed rows first, because a newer row of the same point replaces them.
        without_digest = self._read(_compressed_lines(folder), folder / COMPRESSED_NAME)
        without_digest += self._read(lines, self.path)
        if without_digest:
            name = self.path.name
            written = terminal.counted(
                without_digest, f"row of {name} was written", plural=f"rows of {name} were written"
            )
            log(f"{written} without a digest by an older version: taken as they are")

    def _read(self, lines: Sequence[bytes], path: Path) -> int:
        """Add the rows of a file's lines to this dict, and return the number without a digest.

        A later row of a point replaces an earlier one.

        Raises:
            RowsError: A line is no row, or does not match its digest.
        """
        without_digest = 0
        for number, line in enumerate(lines, start=1):
            try:
                fields = _fields(line)
                digest = fields.pop("digest", None)
                if digest is not None and digest != _digest(fields):
                    raise ValueError("the line does not have the digest it names")
                row = Row.from_json(fields)
            except ValueError as error:
                raise RowsError(
                    f"{path} line {number} is not as it was written ({error}); remove the line, "
                    "and its point is trained again"
                ) from error
            if digest is None:
                without_digest += 1
            # A point that was trained again, such as for its evaluation loss, has a second row,
            # which counts.
            self[row.key] = row
        return without_digest

    def has(self, key: str, *, evaluated: bool) -> bool:
        """Return True if a point has a row that is complete, so that it need not train again.

        Args:
            key: Key of the point (`key_of`).
            evaluated: True if the row needs an evaluation loss. The row of a point that diverged
                never has one and is finished without.
        """
        row = self.get(key)
        if row is None:
            return False
        # A diverged point counts as finished, or it would train again at every start.
        return row.diverged or row.eval_loss is not None or not evaluated

    def add(self, row: Row) -> None:
        """Append a row to the file, wait until it is on disk, and add it to this dict.

        Raises:
            DiskError: The disk cannot write. The file is as before.
        """
        fields = row.to_json()
        # The digest must be that of the fields after JSON, where tuples are lists.
        digest = _digest(json.loads(json.dumps(fields)))
        line = json.dumps({**fields, "digest": digest}) + "\n"
        try:
            self._append(line.encode())
        except OSError as error:
            raise disk.DiskError(
                f"could not write {self.path}: {error.strerror}; the rows in it are whole, and the "
                "same command goes on"
            ) from error
        self[row.key] = row

    def _append(self, line: bytes) -> None:
        """Append a line to the file, or leave the file as it was and raise OSError."""
        # Unbuffered, so that a full disk raises here and not at close.
        with self.path.open("ab", buffering=0) as file:
            end = os.fstat(file.fileno()).st_size
            try:
                if file.write(line) < len(line):
                    raise OSError(errno.EIO, "only a part of a line was written")
                # `add` promises that the row is on disk. The point's checkpoint is deleted right
                # after.
                os.fsync(file.fileno())
            except OSError:
                # Half a line would spoil the file for the next row.
                with contextlib.suppress(OSError):
                    os.ftruncate(file.fileno(), end)
                raise


def _digest(fields: dict[str, Any]) -> str:
    """Return the digest of a row, which does not depend on the order of its fields."""
    return xxhash.xxh3_64_hexdigest(json.dumps(fields, sort_keys=True).encode())


def has_rows(folder: Path) -> bool:
    """Return True if a folder has rows of a sweep, compressed or not."""
    return (folder / FILE_NAME).is_file() or (folder / COMPRESSED_NAME).is_file()


def _compressed_lines(folder: Path) -> list[bytes]:
    """Return the lines of `COMPRESSED_NAME`, or none without that file.

    Raises:
        RowsError: The file is damaged.
    """
    path = folder / COMPRESSED_NAME
    # `Path.is_file` may hide a disk error, which `status` raises.
    if not disk.status(path):
        return []
    content = disk.read_bytes(path)
    try:
        return gzip.decompress(content).splitlines()
    except (OSError, EOFError, zlib.error) as error:
        raise RowsError(f"{path} is damaged ({error}); write it again by `gzip`") from error
