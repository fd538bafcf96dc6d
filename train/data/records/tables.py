"""Documents from Parquet files: one column of text, decoded few rows at a time."""

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
from mupax.train.data.interface import DataError, ReadError, is_system_error, unreadable
from mupax.train.data.records import bounds, lines
from mupax.train.data.records.broken import BrokenLog, Tally

_PART_BYTES = 1 << 24
"""Approximate size of the text of a part in bytes. A part is a range of rows, tokenized at once."""
_BATCH_ROWS = (4096, 1024, 256, 64, 16, 4, 1)
"""Numbers of rows that may be decoded at once."""
# The size of a page is known only from its header, which costs a request to a bucket. Without it,
# few rows are decoded at a time.
_REMOTE_ROWS = 64
"""Number of rows that are decoded at once from a bucket."""
_BATCH_BYTES = 1 << 27
"""Largest size of the rows that are decoded at once, in bytes."""
_LARGEST_PAGE = 1 << 28
"""Largest unpacked page in bytes. A page is always unpacked at once, in memory.

A page may be larger if its unpacked size is at most `limits.ratio` / 10 times its size on disk.
"""
_ROW_BYTES = 8
"""Bytes that a row counts in addition to its text when it is compared with limits.

Billions of empty rows fit into a few bytes on disk, and need memory.
"""
_LISTED = 8


class Part(NamedTuple):
    """Rows [start, stop) of row group `group`, counted from the start of the group."""

    group: int
    start: int
    stop: int
    first: int
    """Row of the file at which the row group begins."""


@dataclasses.dataclass
class Table:
    """Parquet file with a column of documents, read part by part. A part is a range of rows.

    Args:
        field: Name of the column. The text of each row is a document.
        broken: Log that counts rows that cannot be used, or raises their error.

    Raises:
        DataError: The file is damaged, or has no such column of text.
    """

    path: Path
    field: str
    broken: BrokenLog = dataclasses.field(default_factory=BrokenLog)
    kind: ClassVar[str] = "text"
    """Word for what the column must have, in error messages."""
    _cursor: _Cursor | None = None
    _counted: set[Part] = dataclasses.field(default_factory=set)
    """Parts that were read, whose bytes are summed in `_unpacked` and `_packed`."""
    _unpacked: int = 0
    """Unpacked bytes of the parts that were read, to check the compression ratio."""
    _packed: int = 0
    """Bytes on disk of the parts that were read."""
    _copied: dict[int, int] = dataclasses.field(default_factory=dict)
    """Result of `copied_bytes` for each row group."""

    def __post_init__(self) -> None:
        with explained(self.path), opened(self.path) as table:
            columns = {}
            for column in table.schema_arrow:
                columns[column.name] = column.type
        texts = [name for name, column in columns.items() if self.holds(column)]
        if self.field in texts:
            return

        missing = "column"
        if self.field in columns:
            missing = f"{self.kind} but {columns[self.field]!s:.200} in"
        if texts:
            advice = f"write --data.field {shlex.quote(texts[0])}"
        else:
            advice = f"its columns are {', '.join([*columns][:_LISTED])}"
        alternatives = f" (or {', '.join(texts[1:_LISTED])})" if texts[1:] else ""
        raise DataError(f"{self.path} has no {missing} {self.field!r}; {advice}{alternatives}")

    @staticmethod
    def holds(column: Any) -> bool:
        """Return whether a column of this Arrow type has strings, plain or in a dictionary."""
        import pyarrow

        if pyarrow.types.is_dictionary(column):
            column = column.value_type
        return pyarrow.types.is_string(column) or pyarrow.types.is_large_string(column)

    def content(self, value: Any, where: str) -> bytes:
        """Return the document of a row, in UTF-8.

        Args:
            value: Value of the column in this row.
            where: File and row of the value, for the message.

        Raises:
            DataError: The value is null or no text (`lines.content_of`).
        """
        if value is None:
            raise DataError(f"{where} has null in {self.field!r}; repair or remove it")
        return lines.content_of(value, where, self.field, [])

    def parts(self) -> list[Part]:
        """Divide the file into ranges of rows, each small enough to be tokenized at once.

        If the file is damaged, the row groups from the damaged one on are in no range. They are
        logged in `broken`, or raise their error.

        Raises:
            DataError: The file is damaged, or pages or texts unpack to much more than their size on
                disk, and broken files are not left out.
        """
        parts: list[Part] = []
        first = 0
        try:
            with explained(self.path), opened(self.path) as table:
                column = table.schema_arrow.names.index(self.field)
                for group in range(table.num_row_groups):
                    metadata = table.metadata.row_group(group)
                    num_rows = metadata.num_rows
                    size = metadata.column(column).total_uncompressed_size
                    # Rows are divided as if their texts were equally long.
                    step = max(1, num_rows // max(1, size // _PART_BYTES))
                    # The metadata count a text of a dictionary once, however many rows have it.
                    copied = copied_bytes(self.path, self.field, group, self.broken.limits)
                    # Kept for the cursor, which would otherwise have to decode all copies again.
                    self._copied[group] = copied
                    if copied > bounds.WINDOW_BYTES:
                        step = max(1, num_rows * _PART_BYTES // (copied + size))
                    for start in range(0, num_rows, step):
                        parts.append(Part(group, start, min(start + step, num_rows), first))
                    first += num_rows
        except (lines.DamagedError, bounds.LimitError) as error:
            place = f"{self.path} from row {first} on"
            self.broken.add(f"{self.path} cut", "file", place, error)
        finally:
            self._close()
        return parts

    def read(self, part: Part) -> list[bytes]:
        """Return the texts of a part in order, without the rows that are left out as broken.

        A damaged part that is left out has no texts.

        Raises:
            DataError: The file is damaged or a row has no text or is too long, and broken entries
                are not left out.
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
            # The next part must not go on from a failed reader, so it opens the file again.
            self._close()
            rows = f"rows {first} to {part.first + part.stop - 1}"
            self.broken.add(f"{self.path} {first}", "file", f"{self.path} {rows}", error)
            return []
        except (DataError, ReadError):
            self._close()
            raise
        return texts

    def _batches(self, part: Part) -> Iterator[tuple[Any, np.ndarray]]:
        """Yield the rows of a part in batches: an Arrow array, and the bytes of text of each row.

        If parts are read in order, no row is decoded twice.

        Raises:
            DamagedError: The file cannot be read.
            LimitError: The parts read so far unpack to much more than their size on disk.
        """
        cursor = self._cursor
        if cursor is None or cursor.group != part.group or cursor.row > part.start:
            self._close()
            copied = self._copied.get(part.group)
            cursor = _Cursor(self.path, self.field, part.group, self.broken.limits, copied)
            self._cursor = cursor
        cursor.skip_to(part.start)

        # A part that is read again must not count twice in the ratio.
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
        # Only now, so that a part whose reading failed is counted when it is read again.
        self._counted.add(part)

    def _texts(self, batch: Any, sizes: np.ndarray, first: int, tally: Tally) -> list[bytes]:
        """Return the texts of some rows, without broken rows.

        A row without text or with a text that is too long is broken. It is added to `tally`, which
        counts it or raises its error.

        Args:
            batch: Arrow array of the rows, from `_Cursor.take`.
            sizes: Bytes of text of each row, [rows].
            first: Number of the first row in the file.
            tally: Count of the rows that are left out.
        """
        limit = self.broken.limits.record_mib * 2**20
        # Rows of a large batch become Python objects one by one, to save memory.
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
    """Measure the decoded size, in bytes, of the rows of a row group that may hold copied texts.

    A copied text is stored as a reference to a dictionary, or to the text before it, so it may be
    much longer than its bytes on disk. The metadata of the file does not have its size. Therefore
    rows from the first on are decoded, as many as may be copies, and are checked against the
    limits. The result is 0 without copies, and for a file in a bucket, where pages are not checked.

    Args:
        group: Number of the row group, from 0.
        limits: Limits on what the pages and the copied texts unpack to.

    Raises:
        DamagedError: The file cannot be read.
        LimitError: A page or the copies unpack to much more than their size on disk.
    """
    with contextlib.closing(_Cursor(path, field, group, limits)) as cursor:
        copied = 0
        while cursor.row < cursor.copied_rows:
            rows = cursor.take(cursor.copied_rows - cursor.row)
            sizes = decoded_sizes(rows)
            copied += int(sizes.sum()) + _ROW_BYTES * len(sizes)
            bounds.check_ratio(f"{path} row group {group}", copied, cursor.packed_bytes, limits)
    return copied


def check_columns(path: Path, limits: LimitsConfig) -> None:
    """Raise an error for a Parquet file with a column that unpacks to too much.

    Pages of a file in a bucket are not checked.

    Raises:
        DamagedError: The file cannot be read.
        LimitError: A column unpacks to much more than its size on disk.
    """
    with explained(path), opened(path) as table:
        groups = table.num_row_groups
        names = table.schema_arrow.names
    for group in range(groups):
        for name in names:
            copied_bytes(path, name, group, limits)


class _Cursor:
    """Reader of one column of a row group that decodes few rows at a time.

    Args:
        group: Number of the row group, from 0.
        copied: Result of `copied_bytes` for the group. `None` if it is unknown.

    Attributes:
        row: Number of the next row that `take` returns, from 0 within the row group.
        rows: Number of rows of the row group.
        packed_bytes: Bytes of the column in this row group on disk.
        copied_rows: Number of rows, from the first on, that `copied_bytes` decodes: as many as are
            stored as references to a dictionary or to earlier texts. 0 if none is.

    Raises:
        DamagedError: The file cannot be read.
        LimitError: A page unpacks to much more than its size on disk.
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
        """Check the column's pages, choose how many rows to decode at once, and start to read it.

        Sets `rows`, `packed_bytes` and `copied_rows`. Pages of a file in a bucket are not checked.

        Raises:
            LimitError: A page unpacks to much more than its size on disk.
        """
        file = self._stack.enter_context(self._path.open("rb"))
        with opened(self._path) as table:
            metadata = table.metadata
        row_group = metadata.row_group(self.group)
        self.rows = row_group.num_rows
        columns = [row_group.column(number) for number in range(row_group.num_columns)]
        # A nested column may have several leaves.
        leaves = [column for column in columns if _is_in(column.path_in_schema, field)]
        # A damaged file may declare negative sizes, which would lift the limit of the ratio.
        self.packed_bytes = sum(max(0, column.total_compressed_size) for column in leaves)
        is_nested = any(column.path_in_schema != field for column in leaves)

        self.copied_rows = 0
        batch_rows = _BATCH_ROWS[0]
        for column in leaves:
            headers = None
            if is_remote(self._path):  # every header of a page would be a request
                batch_rows = _REMOTE_ROWS
            else:
                headers = self._headers(file, column, limits)
                copied_values = sum(page.values for page in headers if page.copies)
                self.copied_rows = max(self.copied_rows, copied_values)
            if is_nested:
                values = max(0, column.num_values)
                bounds.check_ratio(str(self._path), _ROW_BYTES * values, self.packed_bytes, limits)
                # Headers count values, and a row may have any number of them. So all rows may be
                # copies.
                self.copied_rows = self.rows if self.copied_rows else 0
            elif headers is not None:
                batch_rows = _rows_at_once(headers, copied)

        dictionaries = None
        if is_nested:
            # A nested value may refer to its dictionary thousands of times, so only its indices are
            # decoded.
            dictionaries = [column.path_in_schema for column in leaves]
            nested_rows = _BATCH_ROWS[1] * self.rows // max(1, leaves[0].num_values)
            batch_rows = min(batch_rows, max(1, nested_rows))
        self.copied_rows = min(self.copied_rows, self.rows)
        table = self._stack.enter_context(opened(self._path, dictionaries))
        batches = table.iter_batches(
            batch_rows, row_groups=[self.group], columns=[field], use_threads=False
        )
        self._batches = iter(batches)

    def _headers(self, file: Any, column: Any, limits: LimitsConfig) -> list[bounds.Page]:
        """Return the headers of a column's pages, up to the first that cannot be read.

        Args:
            column: Metadata of a leaf column of the row group.

        Raises:
            LimitError: A page or all pages unpack to much more than their size on disk.
        """
        start = column.data_page_offset
        if column.has_dictionary_page:
            start = column.dictionary_page_offset
        headers = []
        unpacked = 0
        for page in bounds.pages(file, start, column.total_compressed_size):
            # A page above `_LARGEST_PAGE` may use only a tenth of the allowed ratio, because a page
            # is unpacked at once.
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
        """Return the next rows as an Arrow array of 1 to `count` rows, and advance by them.

        Raises:
            DamagedError: The row group has fewer rows than the file says, or cannot be read.
        """
        if self._pending is None or not len(self._pending):
            with explained(self._path):
                batch = next(self._batches, None)
            if batch is None:
                raise lines.DamagedError(
                    f"cannot read {self._path}: row group {self.group} has fewer rows than it says"
                )
            self._pending = batch.column(0)
        # Slices of Arrow share memory, so the remaining rows are kept without a copy.
        rows = self._pending[:count]
        self._pending = self._pending[len(rows) :]
        self.row += len(rows)
        return rows

    def skip_to(self, row: int) -> None:
        """Decode and drop the rows before row `row` of the row group."""
        while self.row < row:
            self.take(row - self.row)

    def close(self) -> None:
        """Close the file."""
        self._stack.close()
        self._batches = iter(())
        self._pending = None


def _rows_at_once(headers: list[bounds.Page], copied: int | None) -> int:
    """Return the number of rows of a column that can be decoded at once, one of `_BATCH_ROWS`.

    It is the largest for which the rows certainly take at most `_BATCH_BYTES`, or else 1.

    Args:
        headers: Headers of the pages of the column.
        copied: Result of `copied_bytes`, the decoded size of the rows that may hold copied texts.
            `None` if it is unknown.
    """
    max_rows = _BATCH_ROWS[0]
    if any(page.copies for page in headers) and (copied is None or copied > _BATCH_BYTES):
        # Every row may be a copy of the longest text.
        longest = max(page.unpacked for page in headers)
        max_rows = max(1, min(max_rows, _BATCH_BYTES // max(1, longest)))
    data_pages = [page for page in headers if not page.is_dictionary]
    for count in _BATCH_ROWS:
        if count <= max_rows and _max_bytes(data_pages, count) <= _BATCH_BYTES:
            return count
    return 1


def _max_bytes(pages: list[bounds.Page], count: int) -> int:
    """Return the largest total size of pages that `count` consecutive rows can lie in, in bytes.

    It bounds the unpacked size of any `count` consecutive rows.
    """
    max_size = 0
    first = 0  # first page of a window that ends at `page`
    size = 0
    rows = 0
    for page in pages:
        size += page.unpacked
        rows += page.values
        # The fewest rows that touch every page of the window: all rows of its inner pages, one of
        # the first page and one of the last. If these exceed `count`, the first page leaves the
        # window.
        while first < len(pages) and rows - pages[first].values - page.values + 2 > count:
            size -= pages[first].unpacked
            rows -= pages[first].values
            first += 1
        max_size = max(max_size, size, page.unpacked)
    return max_size


def _is_in(leaf: str, field: str) -> bool:
    """Return whether a leaf column, given by its path in the schema, belongs to column `field`."""
    return leaf == field or leaf.startswith(f"{field}.")


def decoded_sizes(array: Any) -> np.ndarray:
    """Return the decoded size of each row in bytes of text, int64 [rows].

    Each value in a list counts `_ROW_BYTES` in addition to its text. A number counts `_ROW_BYTES`.

    Args:
        array: Arrow array of texts or numbers, or of lists and structs of these.
    """
    import pyarrow
    from pyarrow import compute

    types = pyarrow.types
    arrow_type = array.type
    if types.is_dictionary(arrow_type):
        sizes = decoded_sizes(array.dictionary)
        # A null has no entry in the dictionary, so it counts like the first entry.
        indices = np.asarray(array.indices.fill_null(0))
        return sizes[indices] if len(sizes) else np.zeros(len(indices), np.int64)
    if types.is_list(arrow_type) or types.is_large_list(arrow_type):
        offsets = np.asarray(array.offsets).astype(np.int64)
        # A slice shares the values of its parent, so only those within its offsets count.
        values = array.values[offsets[0] : offsets[-1]]
        value_sizes = decoded_sizes(values) + _ROW_BYTES
        cumulative = np.concatenate([[0], np.cumsum(value_sizes)])
        return np.diff(cumulative[offsets - offsets[0]])
    if types.is_struct(arrow_type):
        total = np.zeros(len(array), np.int64)
        for number in range(arrow_type.num_fields):
            total = total + decoded_sizes(array.field(number))
        return total
    is_text = types.is_string(arrow_type) or types.is_large_string(arrow_type)
    if is_text or types.is_binary(arrow_type):
        lengths: Any = compute.call_function("binary_length", [array])
        return np.asarray(lengths.fill_null(0)).astype(np.int64)
    return np.full(len(array), _ROW_BYTES, np.int64)


@contextlib.contextmanager
def opened(path: Path, dictionaries: list[str] | None = None) -> Iterator[Any]:
    """Context manager that opens a Parquet file as a `pyarrow.parquet.ParquetFile`.

    Args:
        dictionaries: Schema paths of leaf columns that are read as Arrow dictionary arrays.
            Default: none.
    """
    from pyarrow import parquet

    with (
        path.open("rb") as file,
        # pre_buffer would read whole column chunks into memory.
        parquet.ParquetFile(file, read_dictionary=dictionaries, pre_buffer=False) as table,
    ):
        yield table


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Context manager that turns an error of pyarrow into an error of mupax.

    Raises:
        DamagedError: The content is damaged.
        DataError: The file is missing or may not be read.
        ReadError: The disk or the bucket does not answer.
    """
    import pyarrow

    try:
        yield
    except (OSError, pyarrow.ArrowException) as error:
        if is_system_error(error):
            raise unreadable(f"cannot read {path}: {error.strerror}", error) from error
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise lines.DamagedError(
            f"cannot read {path}: {reason.rstrip('.')}. "
            "It may be damaged or cut off; fetch it again"
        ) from error
