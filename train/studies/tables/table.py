"""Training runs of a CSV or JSONL file, whoever trained them: sizes, tokens, learning rates, batches and losses.

Columns are found by name, or by `--columns parameters=N tokens=D*1e9`. An export of Weights & Biases has this form: a row a run,
a column for each field of its config and for each number of its summary.
"""

from __future__ import annotations

import csv
import dataclasses
import difflib
import hashlib
import io
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mupax import disk
from mupax.errors import MupaxError

ENDINGS = (".csv", ".tsv", ".jsonl", ".ndjson")
"""Ends of the names of files that are tables."""
SAME_RATE = 1 / 16
"""Octaves within which two learning rates are one that was rounded in two ways."""
SAME_LOSS = 1e-6
"""Share of the loss within which two rows of one run say the same."""
SUFFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
"""Of a number such as 22.7B."""


class TableError(MupaxError):
    """A table that no law can be fitted to. The text says where and what to write instead."""


@dataclasses.dataclass(frozen=True)
class Column:
    """A number of a run that a table may have.

    Attributes:
        name: in `--columns`.
        meaning: with its unit.
        least: smallest median that it can have in this unit.
        most: largest median.
        required: without it there is no law.
        hint: what a median outside of these bounds usually means.
    """

    name: str
    meaning: str
    least: float
    most: float
    required: bool = False
    hint: str = ""


COLUMNS = {
    column.name: column
    for column in (
        Column("parameters", "trainable numbers of the model, without embeddings where its source counts so", 1e4, 1e13,
               hint="a count in millions or billions is written parameters=NAME*1e6 or *1e9"),
        Column("tokens", "tokens that the run saw", 1e5, 1e16,
               hint="a count in millions or billions is written tokens=NAME*1e6 or *1e9"),
        Column("flops", "training FLOPs, in place of parameters and tokens", 1e12, 1e30,
               hint="petaFLOP/s-days are written flops=NAME*8.64e19"),
        Column("peak_lr", "peak learning rate", 1e-7, 1e2,
               hint="a log2 or log10 of the rate is not read; write the rate itself"),
        Column("batch_sequences", "sequences of a batch", 1, 3e4,
               hint="a batch in tokens is written batch_sequences=NAME/LENGTH, with the length of a sequence"),
        Column("loss", "loss at the end in nats per token", 1e-3, 15, required=True,
               hint="a loss in bits is written loss=NAME*0.6931; a perplexity is not read"),
        Column("weight_decay", "weight decay; the lowest loss over its values counts", 0, 1e3),
        Column("seed", "seed of the run; runs that differ in nothing else are averaged", -math.inf, math.inf),
    )
}  # fmt: skip
"""What is read of a row."""


@dataclasses.dataclass(frozen=True)
class RunTable:
    """Runs, one for each model, length, rate and batch: seeds are averaged, and the best weight decay counts.

    Attributes:
        source: the file's name.
        digest: sha256 of the file.
        values: name of `COLUMNS` to one number a run [M]; the columns that the table has, without loss, seed and decay.
        log_loss: mean over seeds of the log of the loss [M].
        seeds: runs behind each of these [M].
        seed_deviation: standard deviation of the log of the loss from seed to seed; None where no run has two.
        decay: weight decay of each run [M]; None without that column.
        rows: lines that were read.
        notes: what was left out or put together, a sentence each.
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
        """Return the table with the runs for which `chosen` [M] is true."""
        values = {name: column[chosen] for name, column in self.values.items()}
        decay = None if self.decay is None else self.decay[chosen]
        return dataclasses.replace(
            self,
            values=values,
            log_loss=self.log_loss[chosen],
            seeds=self.seeds[chosen],
            decay=decay,
        )


def is_table(path: str | Path) -> bool:
    """Return whether a path names a table, by its ending."""
    return str(path).lower().endswith(ENDINGS)


def read(path: Path, columns: Sequence[str] = ()) -> RunTable:
    """Return the runs of a file.

    Args:
        path: CSV (a line of names first), TSV, or JSONL (an object a line).
        columns: words such as `tokens=D*1e9`: a name of `COLUMNS`, the file's name for it, and a factor to its unit.

    Raises:
        TableError: no such column, a text that is no number, a unit that cannot be right, two rows of one run with two losses, no
            finite loss, or no row at all.
        DiskError: the file cannot be read.
    """
    content = disk.read_bytes(path)
    names, rows = _parsed(path, content)
    if not rows:
        raise TableError(f"{path} has no row behind its line of names; write a row for each run")
    mapping = _mapping(path, names, columns)
    values = {name: _numbers(path, rows, name, source) for name, source in mapping.items()}
    for name, column in values.items():
        _check_unit(path, COLUMNS[name], column, mapping[name].text)
    return _without_repeats(path, hashlib.sha256(content).hexdigest(), values)


@dataclasses.dataclass(frozen=True)
class _Source:
    """Where a number comes from: a column of the file and what it is multiplied by."""

    text: str
    factor: float


def _parsed(path: Path, content: bytes) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the names of the columns and the rows."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TableError(
            f"{path} is not UTF-8 text at byte {error.start}; write it as CSV or JSONL"
        ) from error
    if path.suffix.lower() in (".jsonl", ".ndjson"):
        rows = [
            disk.json_object(line.encode(), f"{path}, line {number}")
            for number, line in enumerate(text.splitlines(), 1)
            if line.strip()
        ]
        names = list(dict.fromkeys(name for row in rows for name in row))
        return names, rows
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        rows = list(reader)
    except csv.Error as error:
        raise TableError(
            f"{path}, line {reader.line_num}: {error}; write a CSV file with a line of names"
        ) from error
    names = list(reader.fieldnames or ())
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise TableError(f"{path} has two columns {repeated[0]!r}; rename one of them")
    for number, row in enumerate(rows, 2):
        if None in row or None in row.values():
            raise TableError(
                f"{path}, line {number} has not the {len(names)} fields of the line of names"
            )
    return names, rows


def _mapping(path: Path, names: Sequence[str], words: Sequence[str]) -> dict[str, _Source]:
    """Return the source of each number: those of `words`, else the column of the same name."""
    mapping = {name: _Source(name, 1.0) for name in COLUMNS if name in names}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or name not in COLUMNS:
            near = difflib.get_close_matches(name, COLUMNS, 1)
            better = f"; did you mean {near[0]}?" if near else ""
            raise TableError(
                f"--columns {word}: write NAME=COLUMN with a NAME of {', '.join(COLUMNS)}{better}"
            )
        mapping[name] = _source(word, text, names)
    if "flops" in mapping and not {"parameters", "tokens"} & mapping.keys():
        needed = ("loss",)
    else:
        needed = ("parameters", "tokens", "loss")
    absent = [name for name in needed if name not in mapping]
    if absent:
        raise TableError(
            f"{path} has no column {absent[0]} ({COLUMNS[absent[0]].meaning}); name it with "
            f"--columns {absent[0]}=COLUMN, of: {', '.join(names)}"
        )
    for name, source in mapping.items():
        if source.text not in names:
            near = difflib.get_close_matches(source.text, names, 1)
            better = f"; did you mean {near[0]}?" if near else ""
            raise TableError(
                f"--columns {name}={source.text}: {path} has no column {source.text!r}, only {', '.join(names)}{better}"
            )
    return mapping


def _source(word: str, text: str, names: Sequence[str]) -> _Source:
    """Return the source that a text such as `D*1e9` or `batch_tokens/2048` names; a column may have these signs in its name."""
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


def _numbers(
    path: Path, rows: Sequence[Mapping[str, Any]], name: str, source: _Source
) -> np.ndarray:
    """Return a column in its unit [rows]; only a loss may be nan, of a run that diverged."""
    numbers = [_number(row.get(source.text)) for row in rows]
    for place, number in enumerate(numbers):
        wrong = number is None or (name != "loss" and not math.isfinite(number))
        if (
            name in ("parameters", "tokens", "flops", "peak_lr", "batch_sequences")
            and number is not None
        ):
            wrong = wrong or number <= 0
        if wrong:
            raise TableError(
                f"{path}, line {_line(path, place)}: {source.text} is {rows[place].get(source.text)!r}, which is no {COLUMNS[name].meaning}; "
                "mend the row or leave it out"
            )
    return np.array(numbers, float) * source.factor


def _line(path: Path, place: int) -> int:
    """Return the line of a row in its file, which has a line of names first unless it is JSONL."""
    return place + 1 if path.suffix.lower() in (".jsonl", ".ndjson") else place + 2


def _number(value: Any) -> float | None:
    """Return the number that a cell means, as 1e9, 22.7B or nan; None where it means none."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return float(value)
    if value is None:
        return None
    text = str(value).strip().replace(",", "").replace("_", "").lower()
    if text in ("nan", "inf", "-inf", "infinity", "diverged"):
        return math.nan
    match = re.fullmatch(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)([kmbt]?)", text)
    if match is None:
        return None
    return float(match[1]) * SUFFIXES[match[2]]


def _check_unit(path: Path, column: Column, numbers: np.ndarray, text: str) -> None:
    """Refuse a column whose numbers cannot be in its unit."""
    finite = numbers[np.isfinite(numbers)]
    if column.name == "loss" and not finite.size:
        raise TableError(
            f"{path}: no loss in {text} is finite; write the loss at the end of each run"
        )
    if column.name == "loss" and not (finite > 0).all():
        raise TableError(f"{path}: {text} has a loss that is not above 0; write nats per token")
    middle = float(np.median(finite))
    if not column.least <= middle <= column.most:
        raise TableError(
            f"{path}: the median of {text} is {middle:.4g}, which cannot be {column.meaning}; {column.hint}"
        )


def _without_repeats(path: Path, digest: str, values: dict[str, np.ndarray]) -> RunTable:
    """Return a table of one run for each model, length, rate and batch."""
    loss = values.pop("loss")
    seeds = values.pop("seed", None)
    decay = values.pop("weight_decay", None)
    if "parameters" in values and "tokens" in values:
        values.pop("flops", None)
    rows = len(loss)
    notes = []
    keys = dict(values)
    if "peak_lr" in keys:
        keys["peak_lr"] = np.round(np.log2(keys["peak_lr"]) / SAME_RATE)
    groups: dict[tuple[float, ...], list[int]] = {}
    for place in range(rows):
        key = tuple(float(column[place]) for column in keys.values())
        groups.setdefault(key, []).append(place)
    repeats = 0
    merged: list[tuple[int, float, int]] = []  # first row, mean log loss, runs
    variances: list[float] = []
    for members in groups.values():
        by_decay: dict[float, list[int]] = {}
        for place in members:
            by_decay.setdefault(0.0 if decay is None else float(decay[place]), []).append(place)
        candidates: list[tuple[float, int, int]] = []
        for places in by_decay.values():
            distinct, again = _distinct(path, places, loss, seeds)
            repeats += again
            logs = np.log(loss[distinct])
            logs = np.where(np.isfinite(logs), logs, math.inf)
            if len(logs) > 1 and np.isfinite(logs).all():
                variances.append(float(np.var(logs, ddof=1)))
            candidates.append((float(np.mean(logs)), distinct[0], len(distinct)))
        mean, first, count = min(candidates)
        merged.append((first, mean, count))
    if repeats:
        notes.append(f"{repeats} rows say again what another one says")
    diverged = sum(not math.isfinite(mean) for _, mean, _ in merged)
    if diverged:
        notes.append(f"{diverged} runs without a finite loss count as diverged")
    order = np.array([first for first, _, _ in merged])
    return RunTable(
        source=path.name,
        digest=digest,
        values={name: column[order] for name, column in values.items()},
        log_loss=np.array([mean for _, mean, _ in merged]),
        seeds=np.array([count for _, _, count in merged]),
        seed_deviation=math.sqrt(float(np.mean(variances))) if variances else None,
        decay=None if decay is None else decay[order],
        rows=rows,
        notes=tuple(notes),
    )


def _distinct(
    path: Path, places: Sequence[int], loss: np.ndarray, seeds: np.ndarray | None
) -> tuple[list[int], int]:
    """Return the rows of one run and decay that are of different seeds, and how many others repeat one of these."""
    by_seed: dict[float, int] = {}
    for place in places:
        seed = 0.0 if seeds is None else float(seeds[place])
        if seed not in by_seed:
            by_seed[seed] = place
            continue
        first = by_seed[seed]
        same = math.isclose(loss[first], loss[place], rel_tol=SAME_LOSS)
        if not (same or (math.isnan(loss[first]) and math.isnan(loss[place]))):
            lines = f"lines {_line(path, first)} and {_line(path, place)}"
            raise TableError(
                f"{path}, {lines} are one run with the losses {loss[first]:g} and {loss[place]:g}; name the column in which they "
                "differ with --columns seed=COLUMN, or take one of them out"
            )
    return list(by_seed.values()), len(places) - len(by_seed)
