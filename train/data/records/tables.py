"""Documents from Parquet: a column of text, read by parts of its row groups, split by content as lines are."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from mupax.train.data.interface import DataError
from mupax.train.data.records import lines
from mupax.train.data.records.broken import BrokenLog

_PART_BYTES = 1 << 24


class Part(NamedTuple):
    """Rows [start, stop) of a row group, which begins at row `first` of the file."""

    group: int
    start: int
    stop: int
    first: int


@dataclasses.dataclass
class Table:
    """A Parquet file.

    Args:
        path: of the file.
        field: column whose text is the document.
        broken: decides on rows without text, and counts them.

    Raises:
        DataError: when it is made: it is damaged, or has no such column of text.
    """

    path: Path
    field: str
    broken: BrokenLog = dataclasses.field(default_factory=BrokenLog)
    kind: ClassVar[str] = "text"
    """What the column has."""
    _group: int | None = None
    _column: Any = None

    def __post_init__(self) -> None:
        with self._opened() as table:
            columns = {column.name: column.type for column in table.schema_arrow}
        texts = [name for name, column in columns.items() if self.holds(column)]
        if self.field not in texts:
            kind = f"{self.kind} but {columns[self.field]} in" if self.field in columns else "column"
            advice = f"write --data.field {shlex.quote(texts[0])}" if texts else f"its columns are {', '.join(columns)}"
            more = f" (or {', '.join(texts[1:])})" if texts[1:] else ""
            raise DataError(f"{self.path} has no {kind} {self.field!r}; {advice}{more}")

    @staticmethod
    def holds(column: Any) -> bool:
        """Whether a column of this type has documents."""
        import pyarrow

        column = column.value_type if pyarrow.types.is_dictionary(column) else column
        return pyarrow.types.is_string(column) or pyarrow.types.is_large_string(column)

    def content(self, value: Any, where: str) -> bytes:
        """The document of a row.

        Args:
            value: of the column.
            where: file and row, for the error.
        """
        if value is None:
            raise DataError(f"{where} has null in {self.field!r}; repair or remove it")
        return lines.content_of(value, where, self.field, [])

    def parts(self) -> list[Part]:
        """The file in parts small enough to be tokenized at once."""
        parts, first = [], 0
        with self._opened() as table:
            column = table.schema_arrow.names.index(self.field)
            for group in range(table.num_row_groups):
                facts = table.metadata.row_group(group)
                rows, size = facts.num_rows, facts.column(column).total_uncompressed_size
                step = max(1, rows // max(1, size // _PART_BYTES))
                parts += [Part(group, i, min(i + step, rows), first) for i in range(0, rows, step)]
                first += rows
        return parts

    def read(self, part: Part) -> list[bytes]:
        """Return the texts of a part, in order.

        Raises:
            DataError: the file is damaged, or a row has no text, unless such are left out.
        """
        first = part.first + part.start
        if self._group != part.group:
            try:
                with self._opened() as table:
                    self._column = table.read_row_group(part.group, columns=[self.field]).column(0)
            except lines.DamagedError as error:
                rows = f"rows {first} to {part.first + part.stop - 1}"
                self.broken.add(f"{self.path} {first}", "file", f"{self.path} {rows}", error)
                return []
            self._group = part.group
        rows = self._column.slice(part.start, part.stop - part.start).to_pylist()
        texts = []
        with self.broken.part(f"{self.path} {first}", "record") as tally:
            for number, row in enumerate(rows, first):
                where = f"{self.path} row {number}"
                try:
                    texts.append(self.content(row, where))
                except DataError as error:
                    tally.add(where, error)
        return texts

    @contextlib.contextmanager
    def _opened(self) -> Iterator[Any]:
        import pyarrow
        from pyarrow import parquet

        try:
            with self.path.open("rb") as file, parquet.ParquetFile(file) as table:
                yield table
        except (OSError, pyarrow.ArrowException) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise DataError(f"cannot read {self.path}: {error.strerror}") from error
            reason = str(error).splitlines()[0]
            raise lines.DamagedError(
                f"cannot read {self.path}: {reason.rstrip('.')}. It may be damaged or cut off; fetch it again"
            ) from error
