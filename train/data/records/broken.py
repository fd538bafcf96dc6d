"""Log of the broken entries of a user's data: files, texts and records that cannot be used.

By `data.on_broken`, the first broken entry raises an error ("stop"), or all broken entries are left
out and counted ("skip").
"""

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
    """Count of the broken entries in one part of a file, a range that is read at once."""

    unit: str
    """Name of one entry: `record`, `text` or `file`."""
    count: int
    places: list[str]
    """File and line of the first `_LISTED` entries."""
    reason: str
    """Message of the first entry's error, without the place."""


class BrokenLog:
    """Log of the broken entries that were found: files, texts and records that cannot be used.

    Entries are counted by the part of a file (a range that is read at once) that contains them. A
    part may be read several times, by several processes, and in an earlier run. Its entries count
    once.

    Args:
        skip: True if broken entries are left out. Otherwise the first one raises its error.
        limits: Limits on entries. An entry that exceeds them is broken.
        names_flag: True if errors advise to add --data.on-broken skip. False for data that ignores
            this option.
    """

    def __init__(
        self,
        skip: bool = False,
        limits: LimitsConfig = DEFAULT_LIMITS,
        *,
        names_flag: bool = True,
    ) -> None:
        self.skip = skip
        self._names_flag = names_flag
        self.limits = limits
        self._parts: dict[str, BrokenPart] = {}
        self._path: Path | None = None

    @property
    def count(self) -> int:
        """Number of entries that were left out."""
        return sum(part.count for part in self._parts.values())

    def keep_in(self, key: str) -> None:
        """Store the log in a file of the cache, to which new entries are added from now on.

        Entries that an earlier run left in this file are loaded, so that they count even if this
        run does not read them again. Entries that the log already has are written, too.

        Args:
            key: Name of the file, which identifies the data and the settings under which it is
                read.
        """
        self._path = cache.root() / "broken" / f"{key}.jsonl"
        new_parts = self._parts
        self._parts = {}
        if self._path.exists():
            for line in self._path.read_bytes().splitlines():
                # A killed process may leave an incomplete line.
                with contextlib.suppress(disk.JsonError, KeyError, TypeError):
                    fields = disk.json_object(line, "a line")
                    name = fields.pop("part")
                    self._parts[name] = BrokenPart(**fields)
        for name, part in new_parts.items():
            self._keep(name, part)

    @contextlib.contextmanager
    def part(self, name: str, unit: str) -> Iterator[Tally]:
        """Context manager that counts the broken entries of a part of a file while it is read.

        The count is logged at the end of the block, unless the block raises an error.

        Args:
            name: Name that identifies the part: its file and its first byte or row.
            unit: Name of one entry, such as "record".
        """
        tally = Tally(self.skip, names_flag=self._names_flag)
        yield tally
        if tally.count:
            self._keep(name, BrokenPart(unit, tally.count, tally.places, tally.reason))

    def add(self, name: str, unit: str, place: str, error: DataError) -> None:
        """Log one broken entry as left out, or raise its error if broken entries are not left out.

        Args:
            name: Name that identifies the part of the file that contains the entry (`part`).
            unit: Name of one entry, such as "record".
            place: File and line of the entry, for the summary.
            error: Error of the entry. Its message contains the name of the file.

        Raises:
            DataError: The log was made with `skip` false. The message is that of `error`, usually
                with the advice to add --data.on-broken skip.
        """
        with self.part(name, unit) as tally:
            tally.add(place, error)

    def summary(self) -> list[str]:
        """Return lines for the user, one for each kind of broken entry, such as "record".

        A line has the number of entries, the places of the first eight and the first reason.
        """
        by_unit: dict[str, list[BrokenPart]] = {}
        for name in sorted(self._parts):
            part = self._parts[name]
            by_unit.setdefault(part.unit, []).append(part)

        lines = []
        for unit, parts in sorted(by_unit.items()):
            count = sum(part.count for part in parts)
            # A dict, because several parts may have the same place, which is listed once.
            places: dict[str, None] = {}
            for part in parts:
                places |= dict.fromkeys(part.places)
            listed = [*places][:_LISTED]
            remainder = f" and {count - len(listed):,} more" if count > len(listed) else ""
            plural = "s" if count > 1 else ""
            lines.append(
                f"left out, as broken: {count:,} {unit}{plural}: {', '.join(listed)}{remainder} "
                f"(the first: {parts[0].reason})"
            )
        return lines

    def _keep(self, name: str, part: BrokenPart) -> None:
        """Add the count of a part to the log and to the log's file in the cache, if there is one.

        Nothing is added if the log already has an equal count for the part.
        """
        # A part that is read again gives the same entries, which are logged already.
        if self._parts.get(name) == part:
            return
        self._parts[name] = part
        if self._path is not None:
            cache.folder(self._path.parent)
            # Appended, because several processes may log into one file.
            with self._path.open("ab") as file:
                file.write(json.dumps({"part": name, **part._asdict()}).encode() + b"\n")


class Tally:
    """Counter of the broken entries of one part of a file while the part is read.

    Args:
        skip: True if broken entries are left out. Otherwise the first one raises its error.
        names_flag: True if errors advise to add --data.on-broken skip.

    Attributes:
        count: Number of entries that were left out.
        places: File and line of the first eight entries that were left out.
        reason: Reason for the first of them. Empty if there is none.
    """

    def __init__(self, skip: bool, *, names_flag: bool = True) -> None:
        self._skip = skip
        self._names_flag = names_flag
        self.count = 0
        self.places: list[str] = []
        self.reason = ""

    def add(self, place: str, error: DataError) -> None:
        """Count a broken entry as left out, or raise its error if broken entries are not left out.

        Args:
            place: Name of the entry, such as its file and line, for the summary.

        Raises:
            DataError: The tally was made with `skip` false. The message is that of `error` and,
                with `names_flag`, the advice to add --data.on-broken skip.
        """
        if not self._skip:
            if not self._names_flag:
                raise error
            raise DataError(
                f"{error}, or add --data.on-broken skip to leave out what is broken"
            ) from error
        self.leave_out(place, str(error).removeprefix(f"{place} "))

    def leave_out(self, place: str, reason: str) -> None:
        """Count an entry as left out, whatever `skip` is. No error is raised.

        Args:
            place: Name of the entry, such as its file and line, for the summary.
            reason: Rest of a sentence that begins with the place, such as "has null in 'text'".
        """
        self.count += 1
        self.reason = self.reason or reason
        if len(self.places) < _LISTED:
            self.places.append(place)
