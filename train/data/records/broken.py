"""Broken files and records of a user's data: the first is named in an error, or all are left out and counted (data.on_broken)."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mupax import disk
from mupax.train.config.data import DEFAULT_LIMITS, LimitsConfig
from mupax.train.data import cache
from mupax.train.data.interface import DataError

_LISTED = 8


class BrokenPart(NamedTuple):
    """Broken entries of one part of a file."""

    unit: str
    """`record`, `text` or `file`."""
    count: int
    places: list[str]
    """File and line of the first ones."""
    reason: str
    """Error of the first one."""


class BrokenLog:
    """The broken entries that were found so far, by the part of a file that they are in.

    A part may be read several times, by several processes, and in an earlier run: it counts once.

    Args:
        skip: whether broken entries are left out; otherwise the first one raises.
        limits: bounds on entries; one that passes them is broken.
    """

    def __init__(self, skip: bool = False, limits: LimitsConfig = DEFAULT_LIMITS) -> None:
        self.skip = skip
        self.limits = limits
        self._parts: dict[str, BrokenPart] = {}
        self._path: Path | None = None

    @property
    def count(self) -> int:
        """Number of entries that were left out."""
        return sum(part.count for part in self._parts.values())

    def keep_in(self, key: str) -> None:
        """Keep the log in the cache, and take in what was found before.

        Args:
            key: names the data and how they are read.
        """
        self._path = cache.root() / "broken" / f"{key}.jsonl"
        new_parts = self._parts
        self._parts = {}
        if self._path.exists():
            for line in self._path.read_bytes().splitlines():
                with contextlib.suppress(
                    disk.JsonError, KeyError, TypeError
                ):  # a line that a killed process began
                    fields = disk.json_object(line, "a line")
                    name = fields.pop("part")
                    self._parts[name] = BrokenPart(**fields)
        for name, part in new_parts.items():
            self._keep(name, part)

    @contextlib.contextmanager
    def part(self, name: str, unit: str) -> Iterator[Tally]:
        """Count the broken entries of a part of a file while the block reads it.

        Args:
            name: of the part: its file, and where it begins.
            unit: name of one entry.
        """
        tally = Tally(self.skip)
        yield tally
        if tally.count:
            self._keep(name, BrokenPart(unit, tally.count, tally.places, tally.reason))

    def add(self, name: str, unit: str, place: str, error: DataError) -> None:
        """Leave a part of a file out, or raise its error.

        Args:
            name, unit: as `part` takes them.
            place: file and line, for the user.
            error: reason, with the name of the file.

        Raises:
            DataError: broken entries are not left out; the text is the error's and names the flag that does it.
        """
        with self.part(name, unit) as tally:
            tally.add(place, error)

    def summary(self) -> list[str]:
        """Return a line per unit: how many entries were left out, and the first of them by name."""
        lines = []
        for unit in sorted({part.unit for part in self._parts.values()}):
            parts = [
                self._parts[name] for name in sorted(self._parts) if self._parts[name].unit == unit
            ]
            count = sum(part.count for part in parts)
            places = [*dict.fromkeys(place for part in parts for place in part.places)][:_LISTED]
            more = f" and {count - len(places):,} more" if count > len(places) else ""
            plural = "s" if count > 1 else ""
            shown = ", ".join(places)
            lines.append(
                f"left out, as broken: {count:,} {unit}{plural}: {shown}{more} (the first: {parts[0].reason})"
            )
        return lines

    def _keep(self, name: str, part: BrokenPart) -> None:
        if self._parts.get(name) == part:
            return
        self._parts[name] = part
        if self._path is not None:
            cache.folder(self._path.parent)
            with self._path.open("ab") as file:
                file.write(json.dumps({"part": name, **part._asdict()}).encode() + b"\n")


class Tally:
    """The broken entries of one part of a file while it is read."""

    def __init__(self, skip: bool) -> None:
        self._skip = skip
        self.count = 0
        self.places: list[str] = []
        self.reason = ""

    def add(self, place: str, error: DataError) -> None:
        """Count a broken entry, or raise its error with the flag that leaves such entries out."""
        if not self._skip:
            raise DataError(
                f"{error}, or add --data.on-broken skip to leave out what is broken"
            ) from error
        self.leave_out(place, str(error).removeprefix(f"{place} "))

    def leave_out(self, place: str, reason: str) -> None:
        """Count an entry that is left out under any flag."""
        self.count += 1
        self.reason = self.reason or reason
        if len(self.places) < _LISTED:
            self.places.append(place)
