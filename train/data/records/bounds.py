"""Bounds on what a file may unpack to (`data.limits`): streams that keep them, and the error that names the flag."""

from __future__ import annotations

import io
import os
from typing import Any

from mupax.memory import gib
from mupax.train.config.data import LimitsConfig
from mupax.train.data.interface import DataError

WINDOW_BYTES = 64 * 2**20
"""Unpacked bytes over which the ratio is measured. What unpacks to less is never too much."""


class LimitError(DataError):
    """A file, record or image that is larger than a limit of `data.limits`. The text names the flag that raises the limit."""


def too_packed(place: str, unpacked: int, packed: int, limits: LimitsConfig) -> LimitError:
    """Return the error of content that unpacks to much more than its size on disk.

    Args:
        place: file, for the message.
        unpacked: bytes, as far as they were read.
        packed: bytes on disk that they come from.
        limits: bounds that were passed.
    """
    needed = _rounded_up(unpacked / max(1, packed))
    return LimitError(
        f"{place} unpacks to {gib(unpacked)} from {gib(packed)}, more than {limits.ratio} times as much, and may be made to fill "
        f"the memory or the disk. If you trust it, write --data.limits.ratio {needed}"
    )


def too_long(place: str, size: int, limits: LimitsConfig) -> LimitError:
    """Return the error of a record that is larger than a record may be.

    Args:
        place: file and line or row, for the message.
        size: bytes of it, as far as they were read.
        limits: bounds that were passed.
    """
    needed = _rounded_up(size / 2**20)
    return LimitError(
        f"{place} is {gib(size)} long or longer, and a record may have {limits.record_mib} MiB. Cut it into several, or write "
        f"--data.limits.record-mib {needed} or more"
    )


def too_many_pixels(place: str, width: int, height: int, weight: float, limits: LimitsConfig) -> LimitError:
    """Return the error of an image that has more pixels than an image may have.

    Args:
        place: file, for the message.
        width, height: pixels on the sides.
        weight: times as much memory as a pixel takes in this format, compared with PNG.
        limits: bounds that were passed.
    """
    needed = _rounded_up(width * height * weight / 1e6)
    more = "" if weight == 1 else f", which count {weight:g} times in this format"
    return LimitError(
        f"{place} has {width} x {height} pixels{more}, and an image may have {limits.megapixels} million. Scale it down, or write "
        f"--data.limits.megapixels {needed}"
    )


def _rounded_up(number: float) -> int:
    """Return the next number above that has two digits and zeros."""
    step = 10 ** max(0, len(str(int(number))) - 2)
    return (int(number) // step + 1) * step


class BoundedStream(io.RawIOBase):
    """The unpacked content of a file, read as long as it is not too many times as large as the file itself.

    Args:
        unpacked: binary stream that unpacks `packed`.
        packed: the file, whose position tells how much of it was used.
        place: file, for the message.
    """

    def __init__(self, unpacked: Any, packed: Any, place: str, limits: LimitsConfig) -> None:
        self._unpacked = unpacked
        self._packed = packed
        self._place = place
        self._limits = limits
        self._window = 0  # bytes since the last measurement
        self._used = 0  # position in the packed file at that time

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self._unpacked.read(len(buffer))
        count = len(content)
        buffer[:count] = content
        self._window += count
        if self._window >= WINDOW_BYTES:
            position = self._packed.tell()
            packed = position - self._used
            if self._window > self._limits.ratio * packed:
                raise too_packed(self._place, self._window, packed, self._limits)
            self._used = position
            self._window = 0
        return count


def check_ratio(place: str, unpacked: int, packed: int, limits: LimitsConfig) -> None:
    """Refuse content that unpacks to much more than its size on disk.

    Args:
        place: file, for the message.
        unpacked: bytes of all that was read so far.
        packed: bytes on disk that they come from.

    Raises:
        LimitError: `unpacked` is more than `WINDOW_BYTES`, and more than the ratio allows.
    """
    if unpacked > max(WINDOW_BYTES, limits.ratio * packed):
        raise too_packed(place, unpacked, packed, limits)


def size_of(file: Any) -> int:
    """Return the bytes of an open file."""
    position = file.tell()
    size = file.seek(0, os.SEEK_END)
    file.seek(position)
    return size
