"""Documents from Parquet: a column of text, read in batches of few rows, split by content as lines are."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from mupax.disk import is_remote
from mupax.train.config.data import LimitsConfig
from mupax.train.data.interface import DataError
from mupax.train.data.records import bounds, lines
from mupax.train.data.records.broken import BrokenLog, Tally

_PART_BYTES = 1 << 24
_BATCH_ROWS = (4096, 1024, 256, 64, 16, 4, 1)
_REMOTE_ROWS = 64
_BATCH_BYTES = 1 << 27
"""Rows are decoded in fewer at a time where more could have more bytes."""
_LARGEST_PAGE = 1 << 28
"""A page is unpacked as a whole. A larger one has to be in a file of its size: a tenth of what the ratio allows."""
_ROW_BYTES = 8
"""What a row counts beside its text: billions of empty ones fit into a few bytes."""
_LISTED = 8


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
    _cursor: _Cursor | None = None
    _counted: set[Part] = dataclasses.field(default_factory=set)
    """Parts that `_unpacked` and `_packed` count."""
    _unpacked: int = 0
    _packed: int = 0
    _copied: dict[int, int] = dataclasses.field(default_factory=dict)
    """Result of `copied_bytes` for row groups."""

    def __post_init__(self) -> None:
        with explained(self.path), opened(self.path) as table:
            columns = {column.name: column.type for column in table.schema_arrow}
        texts = [name for name, column in columns.items() if self.holds(column)]
        if self.field not in texts:
            kind = (
                f"{self.kind} but {columns[self.field]!s:.200} in"
                if self.field in columns
                else "column"
            )
            named = ", ".join([*columns][:_LISTED])
            advice = (
                f"write --data.field {shlex.quote(texts[0])}"
                if texts
                else f"its columns are {named}"
            )
            more = f" (or {', '.join(texts[1:_LISTED])})" if texts[1:] else ""
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
        """Return the file in parts small enough to be tokenized at once.

        Raises:
            LimitError: pages or texts are much larger than what the file has of them, unless such a file is left out.
        """
        parts: list[Part] = []
        first = 0
        try:
            with explained(self.path), opened(self.path) as table:
                column = table.schema_arrow.names.index(self.field)
                for group in range(table.num_row_groups):
                    facts = table.metadata.row_group(group)
                    rows = facts.num_rows
                    size = facts.column(column).total_uncompressed_size
                    step = max(1, rows // max(1, size // _PART_BYTES))
                    decoded = copied_bytes(self.path, self.field, group, self.broken.limits)
                    self._copied[group] = decoded
                    if decoded > bounds.WINDOW_BYTES:
                        step = max(1, rows * _PART_BYTES // (decoded + size))
                    parts += [
                        Part(group, start, min(start + step, rows), first)
                        for start in range(0, rows, step)
                    ]
                    first += rows
        except (lines.DamagedError, bounds.LimitError) as error:
            rows = f"{self.path} from row {first} on"
            self.broken.add(f"{self.path} cut", "file", rows, error)
        finally:
            self._close()
        return parts

    def read(self, part: Part) -> list[bytes]:
        """Return the texts of a part, in order.

        Raises:
            DataError: the file is damaged, or a row has no text or is too long, unless such are left out.
        """
        first = part.first + part.start
        texts: list[bytes] = []
        try:
            with self.broken.part(f"{self.path} {first}", "record") as tally:
                number = first
                for batch, sizes in self._batches(part):
                    texts += self._texts(batch, sizes, number, tally)
                    number += len(batch)
        except (lines.DamagedError, bounds.LimitError) as error:
            self._close()
            rows = f"rows {first} to {part.first + part.stop - 1}"
            self.broken.add(f"{self.path} {first}", "file", f"{self.path} {rows}", error)
            return []
        except DataError:
            self._close()
            raise
        return texts

    def _batches(self, part: Part) -> Iterator[tuple[Any, np.ndarray]]:
        """Yield the rows of a part in arrays, each with the bytes of its rows. Parts in their order are decoded once."""
        cursor = self._cursor
        if cursor is None or cursor.group != part.group or cursor.row > part.start:
            self._close()
            copied = self._copied.get(part.group)
            cursor = self._cursor = _Cursor(
                self.path, self.field, part.group, self.broken.limits, copied
            )
        cursor.skip_to(part.start)
        is_new = part not in self._counted
        if is_new:
            self._packed += cursor.packed_bytes * (part.stop - part.start) // max(1, cursor.rows)
        while cursor.row < part.stop:
            batch = cursor.take(part.stop - cursor.row)
            sizes = decoded_sizes(batch)
            if is_new:
                self._unpacked += int(sizes.sum()) + _ROW_BYTES * len(sizes)
                bounds.check_ratio(str(self.path), self._unpacked, self._packed, self.broken.limits)
            yield batch, sizes
        self._counted.add(part)

    def _texts(self, batch: Any, sizes: np.ndarray, first: int, tally: Tally) -> list[bytes]:
        """Return the texts of rows. A row without text or with too long a one is counted, or raises its error.

        Args:
            batch: array of rows.
            sizes: bytes of each.
            first: number of the first one in the file.
            tally: of what is left out.
        """
        limit = self.broken.limits.record_mib * 2**20
        is_small = int(sizes.sum()) <= limit
        values = batch.to_pylist() if is_small else batch
        texts = []
        for number, value in enumerate(values, first):
            where = f"{self.path} row {number}"
            try:
                if not is_small:
                    size = int(sizes[number - first])
                    if size > limit:
                        raise bounds.too_long(where, size, self.broken.limits)
                    value = value.as_py()
                texts.append(self.content(value, where))
            except DataError as error:
                tally.add(where, error)
        return texts

    def _close(self) -> None:
        """Close the file, if it is open."""
        if self._cursor is not None:
            self._cursor.close()
        self._cursor = None

    def __del__(self) -> None:
        self._close()


def copied_bytes(path: Path, field: str, group: int, limits: LimitsConfig) -> int:
    """Return the bytes of the texts of a row group that are copies: of a dictionary, or of the text before them.

    All pages and these texts are checked against the limits.

    Args:
        group: number of the row group.

    Raises:
        DamagedError: the file cannot be read.
        LimitError: a page or these texts are much larger than what the file has of them.
    """
    with contextlib.closing(_Cursor(path, field, group, limits)) as cursor:
        decoded = 0
        while cursor.row < cursor.copied_rows:
            sizes = decoded_sizes(cursor.take(cursor.copied_rows - cursor.row))
            decoded += int(sizes.sum()) + _ROW_BYTES * len(sizes)
            bounds.check_ratio(f"{path} row group {group}", decoded, cursor.packed_bytes, limits)
    return decoded


def check_columns(path: Path, limits: LimitsConfig) -> None:
    """Refuse a file of which some column unpacks to much more than its size on disk.

    Raises:
        DamagedError: the file cannot be read.
        LimitError: a column is much larger than what the file has of it.
    """
    with explained(path), opened(path) as table:
        groups = table.num_row_groups
        names = table.schema_arrow.names
    for group in range(groups):
        for name in names:
            copied_bytes(path, name, group, limits)


class _Cursor:
    """A place in a row group, of which a column is decoded few rows at a time.

    Args:
        group: number of the row group.
        limits: bounds on its pages.
        copied: bytes of the texts in `copied_rows`, where they are known.

    Attributes:
        row: of the row group, the next that is taken.
        rows: of the row group.
        packed_bytes: of the column on disk.
        copied_rows: the first rows, which may be much longer than what the file has of them.

    Raises:
        DamagedError: the file cannot be read.
        LimitError: a page unpacks to much more than its size on disk.
    """

    def __init__(
        self, path: Path, field: str, group: int, limits: LimitsConfig, copied: int | None = None
    ) -> None:
        self._path = path
        self._stack = contextlib.ExitStack()
        self.group = group
        self.row = 0
        self._pending: Any = None
        try:
            with explained(path):
                self._open(field, limits, copied)
        except BaseException:
            self._stack.close()
            raise

    def _open(self, field: str, limits: LimitsConfig, copied: int | None) -> None:
        file = self._stack.enter_context(self._path.open("rb"))
        with opened(self._path) as table:
            metadata = table.metadata
        facts = metadata.row_group(self.group)
        self.rows = facts.num_rows
        columns = [facts.column(number) for number in range(facts.num_columns)]
        leaves = [column for column in columns if _is_in(column.path_in_schema, field)]
        self.packed_bytes = sum(max(0, column.total_compressed_size) for column in leaves)
        is_nested = any(column.path_in_schema != field for column in leaves)
        # A nested value may refer to its dictionary thousands of times: its numbers alone are decoded.
        dictionaries = [column.path_in_schema for column in leaves] if is_nested else None
        self.copied_rows = 0
        batch_rows = _BATCH_ROWS[0]
        for column in leaves:
            if is_remote(self._path):  # every header of a page would be a request
                headers = None
                batch_rows = _REMOTE_ROWS
            else:
                headers = self._headers(file, column, limits)
                self.copied_rows = max(
                    self.copied_rows, sum(page.values for page in headers if page.copies)
                )
            if is_nested:
                values = max(0, column.num_values)
                bounds.check_ratio(str(self._path), _ROW_BYTES * values, self.packed_bytes, limits)
                self.copied_rows = self.rows if self.copied_rows else 0
            elif headers is not None:
                batch_rows = _rows_at_once(headers, copied)
        if is_nested:
            batch_rows = min(
                batch_rows, max(1, _BATCH_ROWS[1] * self.rows // max(1, leaves[0].num_values))
            )
        self.copied_rows = min(self.copied_rows, self.rows)
        table = self._stack.enter_context(opened(self._path, dictionaries))
        batches = table.iter_batches(
            batch_rows, row_groups=[self.group], columns=[field], use_threads=False
        )
        self._batches = iter(batches)

    def _headers(self, file: Any, column: Any, limits: LimitsConfig) -> list[bounds.Page]:
        """Return the headers of a leaf column's pages, after they were checked."""
        start = (
            column.dictionary_page_offset if column.has_dictionary_page else column.data_page_offset
        )
        headers = []
        unpacked = 0
        for page in bounds.pages(file, start, column.total_compressed_size):
            largest = max(_LARGEST_PAGE, limits.ratio * page.packed // 10)
            if page.unpacked > largest:
                raise bounds.too_packed(
                    f"a page of {self._path}", 10 * page.unpacked, page.packed, limits
                )
            unpacked += page.unpacked
            headers.append(page)
        bounds.check_ratio(str(self._path), unpacked, column.total_compressed_size, limits)
        return headers

    def take(self, count: int) -> Any:
        """Return the next rows as an array: at most `count`, and as few as one."""
        if self._pending is None or not len(self._pending):
            with explained(self._path):
                batch = next(self._batches, None)
            if batch is None:
                raise lines.DamagedError(
                    f"cannot read {self._path}: row group {self.group} has fewer rows than it says"
                )
            self._pending = batch.column(0)
        rows = self._pending[:count]
        self._pending = self._pending[len(rows) :]
        self.row += len(rows)
        return rows

    def skip_to(self, row: int) -> None:
        """Leave out the rows before one."""
        while self.row < row:
            self.take(row - self.row)

    def close(self) -> None:
        """Close the file."""
        self._stack.close()
        self._batches = iter(())
        self._pending = None


def _rows_at_once(headers: list[bounds.Page], copied: int | None) -> int:
    """Return how many rows of a column can be decoded at once, in whatever way texts are spread over its pages.

    Args:
        copied: bytes of all texts that are copies, where they are known.
    """
    most = _BATCH_ROWS[0]
    if any(page.copies for page in headers) and (copied is None or copied > _BATCH_BYTES):
        longest = max(page.unpacked for page in headers)
        most = max(1, min(most, _BATCH_BYTES // max(1, longest)))
    data = [page for page in headers if not page.is_dictionary]
    for count in _BATCH_ROWS:
        if count <= most and _most_bytes(data, count) <= _BATCH_BYTES:
            return count
    return 1


def _most_bytes(data: list[bounds.Page], count: int) -> int:
    """Return the bytes of the pages that `count` rows in a row can be in, at most."""
    most = 0
    first = 0
    size = 0
    rows = 0
    for page in data:
        size += page.unpacked
        rows += page.values
        # One row of the first page and one of the last are enough to need both.
        while first < len(data) and rows - data[first].values - page.values + 2 > count:
            size -= data[first].unpacked
            rows -= data[first].values
            first += 1
        most = max(most, size, page.unpacked)
    return most


def _is_in(leaf: str, field: str) -> bool:
    return leaf == field or leaf.startswith(f"{field}.")


def decoded_sizes(array: Any) -> np.ndarray:
    """Return the bytes of text in each row, int64 [rows]; a value of a list counts `_ROW_BYTES` more.

    Args:
        array: of texts, of numbers, or of lists and structs of them.
    """
    import pyarrow
    from pyarrow import compute

    kind = array.type
    if pyarrow.types.is_dictionary(kind):
        sizes = decoded_sizes(array.dictionary)
        indices = np.asarray(array.indices.fill_null(0))
        return sizes[indices] if len(sizes) else np.zeros(len(indices), np.int64)
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        offsets = np.asarray(array.offsets).astype(np.int64)
        values = array.values[offsets[0] : offsets[-1]]
        before = np.concatenate([[0], np.cumsum(decoded_sizes(values) + _ROW_BYTES)])
        return np.diff(before[offsets - offsets[0]])
    if pyarrow.types.is_struct(kind):
        fields = [decoded_sizes(array.field(number)) for number in range(kind.num_fields)]
        return sum(fields, np.zeros(len(array), np.int64))
    binary = (pyarrow.types.is_string, pyarrow.types.is_large_string, pyarrow.types.is_binary)
    if any(test(kind) for test in binary):
        lengths: Any = compute.call_function("binary_length", [array])
        return np.asarray(lengths.fill_null(0)).astype(np.int64)
    return np.full(len(array), _ROW_BYTES, np.int64)


@contextlib.contextmanager
def opened(path: Path, dictionaries: list[str] | None = None) -> Iterator[Any]:
    """Open a Parquet file; the block gets the `ParquetFile`.

    Args:
        dictionaries: leaf columns that are read as numbers of a dictionary.
    """
    from pyarrow import parquet

    with (
        path.open("rb") as file,
        parquet.ParquetFile(file, read_dictionary=dictionaries, pre_buffer=False) as table,
    ):
        yield table


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn what pyarrow makes of a damaged file into an error of the data.

    Raises:
        DamagedError: the content is damaged.
        DataError: the file cannot be read.
    """
    import pyarrow

    try:
        yield
    except (OSError, pyarrow.ArrowException) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise DataError(f"cannot read {path}: {error.strerror}") from error
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise lines.DamagedError(
            f"cannot read {path}: {reason.rstrip('.')}. It may be damaged or cut off; fetch it again"
        ) from error
