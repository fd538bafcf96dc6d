"""Training runs of a CSV or JSONL file, whoever trained them: sizes, tokens, rates and losses.

Columns are found by name, or by `--columns parameters=N tokens=D*1e9`. An export of Weights &
Biases has this form: a row per run, and a column for each field of its config and its summary.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mupax import MupaxError, disk
from mupax.terminal import counted, nearest

ENDINGS = (".csv", ".tsv", ".jsonl", ".ndjson")
"""Ends of the names of files that are tables."""
SAME_RATE = 1 / 16
"""Width, in octaves, of bins of learning rates. Rates in one bin count as the same rate."""
SAME_LOSS = 1e-6
"""Relative difference up to which the losses of two rows count as equal."""
SUFFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
"""Factor of the letter behind a number such as 22.7B."""
POSITIVE = ("parameters", "tokens", "flops", "peak_lr", "batch_sequences")
"""Columns whose numbers must be above 0, because the law takes their logs."""


class TableError(MupaxError):
    """Error of a table that no law can be fitted to. The text says where and what to write."""


@dataclasses.dataclass(frozen=True)
class Column:
    """Description of a column that a table of runs may have, such as tokens or loss.

    Attributes:
        name: Name in `--columns`.
        meaning: Description with the unit, for messages.
        min_median: Smallest plausible median of the column. A smaller one means a wrong unit.
        max_median: Largest plausible median of the column. A larger one means a wrong unit.
        hint: Advice for messages on the usual mistake behind a median outside of the bounds.
    """

    name: str
    meaning: str
    min_median: float
    max_median: float
    hint: str = ""


COLUMNS = {
    column.name: column
    for column in (
        Column(
            "parameters",
            "trainable numbers of the model, without embeddings where its source counts so",
            1e4,
            1e13,
            hint="a count in millions or billions is written parameters=NAME*1e6 or *1e9",
        ),
        Column(
            "tokens",
            "tokens that the run saw",
            1e5,
            1e16,
            hint="a count in millions or billions is written tokens=NAME*1e6 or *1e9",
        ),
        Column(
            "flops",
            "training FLOPs, in place of parameters and tokens",
            1e12,
            1e30,
            hint="petaFLOP/s-days are written flops=NAME*8.64e19",
        ),
        Column(
            "peak_lr",
            "peak learning rate",
            1e-7,
            1e2,
            hint="a log2 or log10 of the rate is not read; write the rate itself",
        ),
        Column(
            "batch_sequences",
            "sequences of a batch",
            1,
            3e4,
            hint="a batch in tokens is written batch_sequences=NAME/LENGTH, with the length of a "
            "sequence",
        ),
        Column(
            "loss",
            "loss at the end in nats per token",
            1e-3,
            15,
            hint="a loss in bits is written loss=NAME*0.6931; a perplexity is not read",
        ),
        Column(
            "weight_decay",
            "weight decay; the lowest loss over its values counts",
            0,
            1e3,
        ),
        Column(
            "seed",
            "seed of the run; runs that differ in nothing else are averaged",
            -math.inf,
            math.inf,
        ),
    )
}
"""Columns of a table that are read, by name."""


@dataclasses.dataclass(frozen=True)
class RunTable:
    """Table of M training runs, one for each model, number of tokens, learning rate and batch.

    Rows of the file that differ only in the seed are averaged. Of several weight decays, the one
    with the lowest loss is taken.

    Attributes:
        source: Name of the file.
        digest: sha256 of the file.
        values: Numbers of the runs [M] by name in `COLUMNS`, for the columns that the file has.
            Loss, seed and weight decay are not among them.
        log_loss: Natural log of the loss, as a mean over seeds [M]; inf for runs that diverged.
        seeds: Number of seeds over which each `log_loss` is averaged [M].
        seed_deviation: Standard deviation of the log of the loss from seed to seed; `None` if no
            run has two seeds.
        decay: Weight decay of each run [M]; `None` without that column.
        rows: Number of rows that were read.
        notes: Sentences on rows that were left out or put together.
    """

    source: str
    digest: str
    values: Mapping[str, np.ndarray]
    log_loss: np.ndarray
    seeds: np.ndarray
    seed_deviation: float | None
    decay: np.ndarray | None
    rows: int
    notes: tuple[str, ...]

    def subset(self, chosen: np.ndarray) -> RunTable:
        """Return the table with some of its runs.

        Args:
            chosen: bool [M], True for runs to keep.
        """
        values = {}
        for name, column in self.values.items():
            values[name] = column[chosen]
        decay = None if self.decay is None else self.decay[chosen]
        return dataclasses.replace(
            self,
            values=values,
            log_loss=self.log_loss[chosen],
            seeds=self.seeds[chosen],
            decay=decay,
        )


def is_table(path: str | Path) -> bool:
    """Return True if a path ends in .csv, .tsv, .jsonl or .ndjson. The file is not opened."""
    return str(path).lower().endswith(ENDINGS)


def read(path: Path, columns: Sequence[str] = ()) -> RunTable:
    """Read the runs of a file, average each over its seeds, and keep its best weight decay.

    Args:
        path: CSV (a line of names first), TSV, or JSONL (an object per line).
        columns: Words such as `tokens=D*1e9`: a name in `COLUMNS`, the name of the column in the
            file, and a factor that converts the file's unit into that of `COLUMNS`. By default the
            file has the names and units of `COLUMNS`.

    Raises:
        TableError: The file has no rows or lacks a column, a cell is no number, the numbers of a
            column are too large or too small for its unit, no loss is finite, or two rows of the
            same run and seed have different losses.
        JsonError: A line of a JSONL file is no JSON object.
        DiskError: The file cannot be read.
    """
    content = disk.read_bytes(path)
    parsed = _parse(path, content)
    if not parsed.rows:
        raise TableError(f"{path} has no row behind its line of names; write a row for each run")
    sources = _sources(path, parsed.names, columns)
    values = {}
    for name, source in sources.items():
        values[name] = _numbers(path, parsed, name, source)
    for name, column in values.items():
        _check_unit(path, COLUMNS[name], column, sources[name].text)
    return _merged(path, hashlib.sha256(content).hexdigest(), values, parsed.lines)


class _Source(NamedTuple):
    """Name of a file's column, and the factor that turns its numbers into the unit of `COLUMNS`."""

    text: str
    factor: float


class _Parsed(NamedTuple):
    """Content of a file, before its numbers are read.

    Attributes:
        names: Names of the columns.
        rows: Cells of each row by name.
        lines: Number of the line, from 1, on which each row begins.
    """

    names: list[str]
    rows: list[dict[str, Any]]
    lines: list[int]


def _parse(path: Path, content: bytes) -> _Parsed:
    """Return the content of a file, by the format of the file's ending.

    Raises:
        TableError: The content is not UTF-8 text or no valid CSV.
        JsonError: A line of a JSONL file is no JSON object.
    """
    try:
        # A CSV file of a spreadsheet may begin with a byte order mark.
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TableError(
            f"{path} is not UTF-8 text at byte {error.start}; write it as CSV or JSONL"
        ) from error
    if path.suffix.lower() in (".jsonl", ".ndjson"):
        return _parse_jsonl(path, text)
    return _parse_csv(path, text)


def _parse_jsonl(path: Path, text: str) -> _Parsed:
    """Return the names of all fields in the order of their first row, and the rows.

    Blank lines are skipped.

    Raises:
        JsonError: A line is no JSON object.
    """
    rows = []
    lines = []
    # Not `splitlines`, which also cuts at characters that a text of JSON may have.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            rows.append(disk.json_object(line.encode(), f"{path}, line {number}"))
            lines.append(number)
    names: dict[str, None] = {}
    for row in rows:
        names.update(dict.fromkeys(row))
    return _Parsed(list(names), rows, lines)


def _parse_csv(path: Path, text: str) -> _Parsed:
    """Return the names in the first line, and the rows below it as dicts of text by name.

    Blank lines are skipped.

    Raises:
        TableError: The CSV is invalid, a name occurs twice, or a row has too few or too many
            fields.
    """
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    # `newline=""`, because the reader itself handles line ends inside of quotes.
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    records = []
    lines = []
    line = 1  # on which the next record begins
    try:
        for record in reader:
            if record:
                records.append(record)
                lines.append(line)
            # A cell in quotes may have line ends, so a record may end some lines below.
            line = reader.line_num + 1
    except csv.Error as error:
        raise TableError(
            f"{path}, line {line}: {error}; write a CSV file with a line of names"
        ) from error
    names = records[0] if records else []
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise TableError(f"{path} has two columns {repeated[0]!r}; rename one of them")
    rows = []
    for record, line in zip(records[1:], lines[1:], strict=True):
        if len(record) != len(names):
            raise TableError(
                f"{path}, line {line} has not the {len(names)} fields of the line of names"
            )
        rows.append(dict(zip(names, record, strict=True)))
    return _Parsed(names, rows, lines[1:])


def _sources(path: Path, names: Sequence[str], words: Sequence[str]) -> dict[str, _Source]:
    """Return which column of the file each column in `COLUMNS` is read from.

    It is the column of the same name, unless a word of `--columns` names another.

    Args:
        names: Names of the file's columns, in their order in the file.
        words: Words of `--columns`, such as `tokens=D*1e9`.

    Raises:
        TableError: A word is invalid, or the file lacks a column that is named or required.
    """
    sources = {name: _Source(name, 1.0) for name in COLUMNS if name in names}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or name not in COLUMNS:
            raise TableError(
                f"--columns {word}: write NAME=COLUMN with a NAME of {', '.join(COLUMNS)}"
                f"{nearest(name, COLUMNS)}"
            )
        sources[name] = _source(word, text, names)

    # A table may have FLOPs in place of a size and a length.
    has_flops_alone = "flops" in sources and not {"parameters", "tokens"} & sources.keys()
    required = ("loss",) if has_flops_alone else ("parameters", "tokens", "loss")
    absent = [name for name in required if name not in sources]
    if absent:
        raise TableError(
            f"{path} has no column {absent[0]} ({COLUMNS[absent[0]].meaning}); name it with "
            f"--columns {absent[0]}=COLUMN, of: {', '.join(names)}"
        )
    for name, source in sources.items():
        if source.text not in names:
            raise TableError(
                f"--columns {name}={source.text}: {path} has no column {source.text!r}, "
                f"only {', '.join(names)}{nearest(source.text, names)}"
            )
    return sources


def _source(word: str, text: str, names: Sequence[str]) -> _Source:
    """Return the file's column and factor that a text such as `D*1e9` or `batch_tokens/2048` names.

    Args:
        word: Complete word of `--columns`, for messages.
        text: Part behind the `=`.
        names: Names of the file's columns, which may have `*` or `/` themselves.

    Raises:
        TableError: The factor is not a number above 0.
    """
    # A column may be named "a/b" itself, so the whole text is tried first.
    if text in names:
        return _Source(text, 1.0)
    match = re.fullmatch(r"(.+)([*/])([^*/]+)", text)
    if match is None:
        return _Source(text, 1.0)
    try:
        factor = float(match[3])
    except ValueError:
        factor = 0.0
    if not (math.isfinite(factor) and factor > 0):
        raise TableError(
            f"--columns {word}: {match[3]} is no factor; write a number, as tokens=D*1e9"
        )
    return _Source(match[1], factor if match[2] == "*" else 1 / factor)


def _numbers(path: Path, parsed: _Parsed, name: str, source: _Source) -> np.ndarray:
    """Return the numbers of a column for all rows, in the unit of `COLUMNS`, float64 [rows].

    Args:
        name: Name of the column in `COLUMNS`, such as tokens.

    Raises:
        TableError: A cell is no number, or one that the column cannot have (`_is_valid`).
    """
    numbers = []
    for row, line in zip(parsed.rows, parsed.lines, strict=True):
        cell = row.get(source.text)
        number = _number(cell)
        if not _is_valid(name, number):
            raise TableError(
                f"{path}, line {line}: {source.text} is {cell!r}, "
                f"which is no {COLUMNS[name].meaning}; mend the row or leave it out"
            )
        numbers.append(number)
    return np.array(numbers, float) * source.factor


def _is_valid(name: str, number: float | None) -> bool:
    """Return True if a number read from a cell is valid in the column called `name`.

    `None`, a cell without a number, is never valid. Only a loss may be nan, for a diverged run.
    Columns in `POSITIVE` need a number above 0.
    """
    if number is None:
        return False
    if name == "loss":
        return True
    if not math.isfinite(number):
        return False
    return number > 0 or name not in POSITIVE


def _number(value: Any) -> float | None:
    """Return a cell such as 1e9, 1,000, 22.7B or nan as a number, or `None` if it has none.

    The texts "inf" and "diverged" become nan.
    """
    # A bool is an int in Python, but no number of a table.
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return float(value)
    if value is None:
        return None
    # Spreadsheets write 1,000,000 and Python 1_000_000.
    text = str(value).strip().replace(",", "").replace("_", "").lower()
    if text in ("nan", "inf", "-inf", "infinity", "diverged"):
        return math.nan
    match = re.fullmatch(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)([kmbt]?)", text)
    if match is None:
        return None
    return float(match[1]) * SUFFIXES[match[2]]


def _check_unit(path: Path, column: Column, numbers: np.ndarray, text: str) -> None:
    """Raise an error for a column whose median is implausible, so that its unit must be wrong.

    Args:
        text: Name of the column in the file, for messages.

    Raises:
        TableError: The median is outside of the bounds, no loss is finite, or a loss is not above
            0.
    """
    finite = numbers[np.isfinite(numbers)]
    if column.name == "loss" and not finite.size:
        raise TableError(
            f"{path}: no loss in {text} is finite; write the loss at the end of each run"
        )
    if column.name == "loss" and not (finite > 0).all():
        raise TableError(f"{path}: {text} has a loss that is not above 0; write nats per token")
    # The median, because a few diverged runs may have any loss.
    median = float(np.median(finite))
    if not column.min_median <= median <= column.max_median:
        raise TableError(
            f"{path}: the median of {text} is {median:.4g}, which cannot be {column.meaning}; "
            f"{column.hint}"
        )


class _Run(NamedTuple):
    """Rows of a table that differ only in their seed, averaged to one run.

    Runs are ordered by their loss, and at equal loss by their first row.

    Attributes:
        log_loss: Natural log of the loss, as a mean over seeds; inf if a seed diverged.
        first_row: Index of the run's first row in the file.
        seeds: Number of seeds.
    """

    log_loss: float
    first_row: int
    seeds: int


def _merged(
    path: Path, digest: str, values: dict[str, np.ndarray], lines: Sequence[int]
) -> RunTable:
    """Return a table with one run for each model, number of tokens, learning rate and batch.

    Log losses are averaged over seeds, and are inf if a seed diverged. Of several weight decays the
    one with the lowest mean is kept. FLOPs are dropped if there are parameters and tokens.

    Args:
        digest: sha256 of the file.
        values: Numbers of all rows by name [rows].
        lines: Line of each row in the file, for messages [rows].

    Raises:
        TableError: Two rows of one run have different losses (`_rows_of_seeds`).
    """
    values = dict(values)
    loss = values.pop("loss")
    seeds = values.pop("seed", None)
    decay = values.pop("weight_decay", None)
    if "parameters" in values and "tokens" in values:
        # The law of size and length needs no FLOPs.
        values.pop("flops", None)

    runs = []
    variances: list[float] = []
    num_repeats = 0
    for rows_of_run in _rows_by_setting(values, len(loss)):
        rows_by_decay: dict[float, list[int]] = {}
        for row in rows_of_run:
            key = 0.0 if decay is None else float(decay[row])
            rows_by_decay.setdefault(key, []).append(row)

        candidates = []
        for rows in rows_by_decay.values():
            distinct = _rows_of_seeds(path, rows, loss, seeds, lines)
            num_repeats += len(rows) - len(distinct)
            logs = np.log(loss[distinct])
            # inf and not NaN, so that `min` never picks a diverged run over a finite one.
            logs = np.where(np.isfinite(logs), logs, math.inf)
            if len(logs) > 1 and np.isfinite(logs).all():
                variances.append(float(np.var(logs, ddof=1)))
            candidates.append(_Run(float(np.mean(logs)), distinct[0], len(distinct)))
        # Of runs that differ only in weight decay the best counts, because the law has no such
        # axis.
        runs.append(min(candidates))

    notes = []
    if num_repeats:
        notes.append(
            f"{counted(num_repeats, 'row says', plural='rows say')} again what another one says"
        )
    num_diverged = sum(not math.isfinite(run.log_loss) for run in runs)
    if num_diverged:
        singular = "run without a finite loss counts"
        plural = "runs without a finite loss count"
        notes.append(f"{counted(num_diverged, singular, plural=plural)} as diverged")
    first_rows = np.array([run.first_row for run in runs])
    first_values = {}
    for name, column in values.items():
        first_values[name] = column[first_rows]
    return RunTable(
        source=path.name,
        digest=digest,
        values=first_values,
        log_loss=np.array([run.log_loss for run in runs]),
        seeds=np.array([run.seeds for run in runs]),
        seed_deviation=math.sqrt(float(np.mean(variances))) if variances else None,
        decay=None if decay is None else decay[first_rows],
        rows=len(loss),
        notes=tuple(notes),
    )


def _rows_by_setting(values: Mapping[str, np.ndarray], num_rows: int) -> list[list[int]]:
    """Group rows by model, tokens, learning rate and batch, and return each group's row indices.

    Learning rates that round to the same 1/16 octave count as equal.

    Args:
        values: Numbers of all rows by name [rows], without loss, seed and weight decay.
    """
    columns = dict(values)
    if "peak_lr" in columns:
        # A rate of one sweep may be written with more or fewer digits from row to row.
        columns["peak_lr"] = np.round(np.log2(columns["peak_lr"]) / SAME_RATE)
    groups: dict[tuple[float, ...], list[int]] = {}
    for row in range(num_rows):
        key = tuple(float(column[row]) for column in columns.values())
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def _rows_of_seeds(
    path: Path,
    rows: Sequence[int],
    loss: np.ndarray,
    seeds: np.ndarray | None,
    lines: Sequence[int],
) -> list[int]:
    """Return the index of the first row of each seed, among rows that may differ in seed alone.

    Args:
        rows: Indices of rows with the same model, tokens, learning rate, batch and weight decay.
        loss: Losses of all rows [rows].
        seeds: Seeds of all rows [rows]; without the column, all have one seed.
        lines: Line of each row in the file, for messages [rows].

    Raises:
        TableError: Two rows of one seed have different losses.
    """
    row_of_seed: dict[float, int] = {}
    for row in rows:
        seed = 0.0 if seeds is None else float(seeds[row])
        first = row_of_seed.setdefault(seed, row)
        if first == row:
            continue
        # A row that a script wrote twice may have been rounded differently.
        is_same = math.isclose(loss[first], loss[row], rel_tol=SAME_LOSS)
        both_diverged = math.isnan(loss[first]) and math.isnan(loss[row])
        if not (is_same or both_diverged):
            raise TableError(
                f"{path}, lines {lines[first]} and {lines[row]} are one run with the losses "
                f"{loss[first]:g} and {loss[row]:g}; name the column in which they differ with "
                "--columns seed=COLUMN, or take one of them out"
            )
    return list(row_of_seed.values())
