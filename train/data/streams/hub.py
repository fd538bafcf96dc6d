"""Data sets as the package `datasets` has them: of the Hugging Face hub, streamed, or a folder of Parquet or JSON lines in its layout."""

from __future__ import annotations

import contextlib
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mupax import extras
from mupax.train.config.data import DEFAULT_LIMITS, LimitsConfig
from mupax.train.data import cache
from mupax.train.data.interface import DataError, ReadError
from mupax.train.data.records import bounds, corpus, listing, split_names, tables
from mupax.train.data.records.broken import BrokenLog
from mupax.train.data.records.lines import Lines, content_of
from mupax.train.data.streams.lanes import Chunk

_DATA_SUFFIXES = {
    ".jsonl",
    ".json",
    ".ndjson",
    ".parquet",
    ".csv",
    ".tsv",
    ".txt",
    ".text",
    ".arrow",
}
_ABOUT = {
    "config.json",
    "dataset_info.json",
    "dataset_infos.json",
    "dataset_dict.json",
    "state.json",
}
"""Files that `datasets` keeps beside data."""
_CHUNK_BYTES, _CHUNK_ROWS = 1 << 18, 1000
_PACKED = (".gz", ".zst", ".bz2", ".xz")
_CHECKED_BYTES = 64 * 2**20
"""Of a file on disk, which is read once before `datasets` reads it. To read larger ones twice would take long."""
_TIMEOUT_S = 10.0
_SHOWN = 300


class DataSet(NamedTuple):
    """An opened data set."""

    name: str
    """As data.name has it."""
    splits: dict[str, Any]
    """`train` and `eval`, each a `datasets.IterableDataset`; without `eval` a record's text tells its side."""
    revision: str
    """The commit of the hub, or a digest of the names and sizes of a folder's files: the same on every host."""
    key: str
    """Names the content in the cache."""
    line: str
    """What is trained on, evaluated on and not used, for the user."""


def opened(name: str, limits: LimitsConfig = DEFAULT_LIMITS) -> DataSet:
    """The data set of a data.name, hf:NAME[@REVISION][:SUBSET] or hf:FOLDER[:SUBSET].

    Args:
        limits: bounds on what files of a folder unpack to.

    Raises:
        LimitError: a file of the folder unpacks to much more than its size.
        DataError: the package is missing, there is no such data set or subset, or it cannot be reached.
    """
    place, subset = _place(name)
    where = str(place) if isinstance(place, Path) else place[0]
    extras.require("hf", f"data.name {name}", DataError)
    import datasets  # pyright: ignore[reportMissingImports]

    datasets.disable_progress_bars()
    options: dict[str, Any] = {"streaming": True}
    split = None
    if isinstance(place, Path):
        hidden_too = {
            file.relative_to(place).as_posix(): file for file in place.rglob("*") if file.is_file()
        }
        visible = dict(listing.files_below(place).files)
        files = sorted((hidden_too | visible).items())
        revision = cache.digest(
            *(f"{file_name} {file.stat().st_size}" for file_name, file in files)
        )
        key = corpus.stat_digest(files)
        _check_files([file for _, file in files], limits)
        split = None if subset or _declares_splits(place) else _file_split(visible, name)
        if split is not None:
            options["data_files"] = _files_by_split(split, visible)
    else:
        revision = key = _commit(name, *place)
        options["revision"] = revision
    with _asking(name):
        every = datasets.load_dataset(where, subset, **options)
    assert isinstance(every, datasets.IterableDatasetDict)
    if split is not None:
        train = "train"
        held_out = "eval"
        line = split.line
        reading = ["split by file names"]
    else:
        train, held_out = _chosen([*map(str, every)], name)
        unused = [other for other in map(str, every) if other not in (train, held_out)]
        line = split_names.SplitNames(
            [train], [held_out or "a part of it by hash"], unused
        ).describe()
        usual = train == "train" and held_out in ("validation", "test", None)
        reading = (
            [] if usual else [f"{train}, {held_out}"]
        )  # earlier versions evaluated on another split
    splits = {"train": every[train]} | ({"eval": every[held_out]} if held_out else {})
    return DataSet(
        name, splits, revision, cache.digest(where, subset or "", key, *reading), f"{name}: {line}"
    )


def _check_files(files: list[Path], limits: LimitsConfig) -> None:
    """Refuse small files that unpack to much: `datasets` holds a row group or a line in memory, whatever its size."""
    for file in files:
        suffix = file.suffix.lower()
        if file.stat().st_size > _CHECKED_BYTES:
            continue
        if suffix == ".parquet":
            tables.check_columns(file, limits)
        elif suffix in _PACKED:
            for _ in Lines(file, "", BrokenLog(limits=limits)).parts():
                pass
        elif suffix == ".zip":
            _check_archive(file, limits)


def _check_archive(file: Path, limits: LimitsConfig) -> None:
    try:
        with zipfile.ZipFile(file) as archive:
            size = sum(member.file_size for member in archive.infolist())
    except (OSError, zipfile.BadZipFile, ValueError) as error:
        raise DataError(
            f"cannot read {file}: {error}. It may be damaged or cut off; fetch it again"
        ) from error
    bounds.check_ratio(str(file), size, file.stat().st_size, limits)


def _files_by_split(split: split_names.FileSplit, files: dict[str, Path]) -> dict[str, list[str]]:
    """Return the files of each split, as `datasets` takes them."""
    by_split: dict[str, list[str]] = {"train": [], "eval": []}
    for file_name, side in split.sides.items():
        by_split[side].append(
            str(files[file_name].absolute())
        )  # `datasets` takes others from FOLDER
    return by_split


def _declares_splits(folder: Path) -> bool:
    """Return whether the folder says by itself which files are which split: in its README.md, or as a saved data set."""
    readme = folder / "README.md"
    names_files = readme.is_file() and bool(
        re.search(r"(?m)^\s*-?\s*(configs|data_files)\s*:", readme.read_text("utf-8", "replace"))
    )
    return (
        names_files
        or (folder / "dataset_dict.json").is_file()
        or (folder / "dataset_info.json").is_file()
    )


def _file_split(files: dict[str, Path], name: str) -> split_names.FileSplit | None:
    """Return the split of the data files of a folder by their names, or `None` if `datasets` is to find it."""
    data_files = [
        file_name
        for file_name, file in files.items()
        if file.name not in _ABOUT and _DATA_SUFFIXES & {suffix.lower() for suffix in file.suffixes}
    ]
    return split_names.file_split(data_files, name)


def _chosen(splits: list[str], name: str) -> tuple[str, str | None]:
    """Return the split that is trained on and the one that is evaluated on, `None` where no name tells one.

    A data set of the hub has splits that its user cannot rename, so the usual name comes first, and no name is refused.

    Args:
        splits: all names.
        name: of the data set, for the message.

    Raises:
        DataError: several splits may be the training part, or none.
    """
    train = splits[0] if len(splits) == 1 else _named(splits, "train")
    if train is None:
        raise DataError(f"{name} has no split train, only {', '.join(splits)}")
    remaining = [split for split in splits if split != train]
    return train, _named(remaining, "validation") or _named(remaining, "test")


def _named(splits: list[str], part: split_names.Split) -> str | None:
    """Return the split of a part: the usual name, another word for it, or the only name that has such a word in it."""
    words = [part, *(word for word, word_part in split_names.WORDS.items() if word_part == part)]
    for word in words:
        if word in splits:
            return word
    named = [split for split in splits if split_names.split_of(split) == part]
    return named[0] if len(named) == 1 else None


class HubDocuments:
    """The documents of a share of a data set. A position is what `IterableDataset.state_dict` says.

    Args:
        data_set: opened.
        split: `train` or `eval`.
        field: that has the text.
        shard: number of the share, and of how many; of whole files, which are those with the numbers shard[0], shard[0] + shard[1], ….
        broken: counts records without text. All records have fields of one type, so there are no other broken ones.
    """

    def __init__(
        self,
        data_set: DataSet,
        split: str,
        field: str,
        shard: tuple[int, int] = (0, 1),
        broken: BrokenLog | None = None,
    ) -> None:
        self._data_set, self._field, self._shard = data_set, field, shard
        self._broken = broken or BrokenLog()
        if split == "eval" and "eval" not in data_set.splits:
            self._broken = BrokenLog()  # who reads the training side counts these records
        self._side = None if "eval" in data_set.splits else split
        self._split = split if self._side is None else "train"

    def after(self, position: Any) -> Iterator[tuple[Chunk, Any]]:
        """Chunks of the documents behind a position, and the position after each.

        Args:
            position: as the chunk before has it; None at the beginning.
        """
        number, count = self._shard
        rows = self._data_set.splits[self._split].shard(count, number, contiguous=False)
        if position is not None:
            rows.load_state_dict(position)
        with _asking(self._data_set.name, ReadError):
            yield from self._chunks(rows, position)

    def _chunks(self, rows: Any, position: Any) -> Iterator[tuple[Chunk, Any]]:
        """Yield the documents of rows in chunks, each with the position after it."""
        number, count = self._shard
        place = f"{self._data_set.name} {self._split}, share {number} of {count}"
        rows_left = iter(rows)
        ended = False
        while not ended:
            chunk: Chunk = []
            size = row_count = 0
            ended = True
            with self._broken.part(f"{place} {position}", "record") as tally:
                for row in rows_left:
                    row_count += 1
                    text = b""
                    if self._field in row and row[self._field] is None:
                        tally.leave_out(place, f"has null in {self._field!r}")
                    else:
                        text = self._text(row)
                    if text and (self._side is None or corpus.side(text) == self._side):
                        chunk.append((text, True))
                        size += len(text)
                    if size >= _CHUNK_BYTES or row_count >= _CHUNK_ROWS:
                        ended = False
                        break
            position = rows.state_dict()
            yield chunk, position

    def _text(self, row: dict[str, Any]) -> bytes:
        """Return the text of a record, without NUL characters, which separate documents."""
        value = row.get(self._field)
        texts = [name for name in row if isinstance(row[name], str)]
        value = value.replace("\0", "") if isinstance(value, str) else value
        return content_of(value, f"a record of {self._data_set.name}", self._field, texts)


def _place(name: str) -> tuple[Path | tuple[str, str | None], str | None]:
    """A folder of this machine, or (name, revision) on the hub; and the subset."""
    rest = name.partition(":")[2]
    before, _, after = rest.rpartition(":")
    for word, subset in ((rest, None), (before, after)):
        if word and (path := Path(word).expanduser()).is_dir():
            return path, subset
    if Path(rest).expanduser().is_file():
        raise DataError(
            f"{rest} is a file; write records:{rest}, or hf: with the folder that it is in"
        )
    named = re.fullmatch(r"([\w.-]+(?:/[\w.-]+)?)(?:@([\w./-]+))?(?::(.+))?", rest)
    if not named or rest.startswith("."):
        raise DataError(
            f"no folder {rest or name}; write data.name as hf:NAME[:SUBSET] of the Hugging Face hub, or hf:FOLDER"
        )
    return (named[1], named[2]), named[3]


def _commit(name: str, repository: str, revision: str | None) -> str:
    """The commit that a revision of a data set on the hub is now, so that all hosts read the same."""
    from huggingface_hub import HfApi

    with _asking(name):
        commit = HfApi().dataset_info(repository, revision=revision, timeout=_TIMEOUT_S).sha
    assert commit is not None
    return commit


@contextlib.contextmanager
def _asking(name: str, unreachable: type[DataError | ReadError] = DataError) -> Iterator[None]:
    """Turns what `datasets` and the hub raise into an error of the data.

    Args:
        name: of the data set, as data.name has it.
        unreachable: raised where the network or the disk does not answer.
    """
    try:
        yield
    except (DataError, ReadError):
        raise
    except Exception as error:  # each of their parts raises what it likes
        reason = " ".join(str(error).split())[:_SHOWN] or type(error).__name__
        kinds = {kind.__name__ for kind in type(error).__mro__}
        if kinds & {
            "RepositoryNotFoundError",
            "GatedRepoError",
            "RevisionNotFoundError",
            "DatasetNotFoundError",
        }:
            raise DataError(
                f"the hub has no data set of {name} that may be read: {reason}. Look up its name; if it asks for "
                "an account, run `hf auth login`"
            ) from error
        if isinstance(error, OSError) or kinds & {
            "HTTPError",
            "HfHubHTTPError",
            "TransportError",
            "ClientError",
        }:
            raise unreachable(
                f"{name} cannot be read: {reason}. Is there a network? Otherwise run `hf download NAME --repo-type dataset "
                "--local-dir FOLDER` where there is one, and write data.name as hf:FOLDER"
            ) from error
        folder = Path(name.removeprefix("hf:")).expanduser()
        advice = (
            f". Write data.name as records:{folder}, which names the file and line"
            if folder.is_dir()
            else ""
        )
        raise DataError(f"`datasets` cannot read {name}: {reason}{advice}") from error
