"""Data sets of the package `datasets`: streamed from the Hugging Face hub, or in a folder.

A folder has Parquet, JSON lines or other files in the layout of the hub. `sources/streams.py` makes
a stream of batches from a data set.
"""

from __future__ import annotations

import contextlib
import lzma
import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from mupax import extras
from mupax.train.config.data import DEFAULT_LIMITS, LimitsConfig
from mupax.train.data import cache
from mupax.train.data.interface import DataError, ReadError, is_system_error, unreadable
from mupax.train.data.records import bounds, corpus, listing, split_names, tables
from mupax.train.data.records.broken import BrokenLog
from mupax.train.data.records.lines import Lines, content_of, unpacked_stream
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
"""Names of JSON files that describe a data set and contain none of its data."""
_CHUNK_BYTES = 1 << 18
_CHUNK_ROWS = 1000
_TAR = re.compile(r"\.tar(\.(gz|bz2|xz|zst))?$")
_PACKED = (".gz", ".zst", ".bz2", ".xz")
_CHECKED_BYTES = 64 * 2**20
"""Largest file in bytes whose unpacked size is checked. The check reads the file."""
_TIMEOUT_S = 10.0
# Errors by name, because the packages that define them are optional and load slowly.
_NOT_FOUND = {
    "RepositoryNotFoundError",
    "GatedRepoError",
    "RevisionNotFoundError",
    "DatasetNotFoundError",
}
_UNREACHABLE = {"HTTPError", "HfHubHTTPError", "TransportError", "ClientError"}
_SHOWN = 300
"""Number of characters of an error that a message shows."""


class DataSet(NamedTuple):
    """Data set of the package `datasets`, opened for streaming."""

    name: str
    """Value of data.name."""
    splits: dict[str, Any]
    """`datasets.IterableDataset` for the key "train", and perhaps for the key "eval".

    Without "eval", the hash of its text decides whether a record is for training or evaluation.
    """
    revision: str
    """Commit on the hub, or a digest of the paths and sizes of a folder's files.

    It is the same on all hosts.
    """
    key: str
    """Key of the content in the cache."""
    line: str
    """Line for the user that says which splits are trained on, evaluated on and not used."""


def opened(name: str, limits: LimitsConfig = DEFAULT_LIMITS) -> DataSet:
    """Open the data set that `data.name` names for streaming.

    The hub is asked for the current commit, so that all hosts read the same one. Small files of a
    folder are checked against the limits.

    Args:
        name: hf:NAME[@REVISION][:SUBSET] or hf:FOLDER[:SUBSET].
        limits: Bounds on the unpacked size of files of a folder.

    Raises:
        DataError: The package is missing, the data set or the subset does not exist, the hub does
            not answer, or a file of the folder is damaged or unpacks to much more than its size.
    """
    place, subset = _place(name)
    extras.require("hf", f"data.name {name}", DataError)
    import datasets  # pyright: ignore[reportMissingImports]

    # The progress bars of `datasets` would overwrite the lines that a run prints.
    datasets.disable_progress_bars()
    # Without streaming the package first downloads and converts everything.
    options: dict[str, Any] = {"streaming": True}
    file_split = None
    if isinstance(place, Path):
        path = str(place)
        visible = dict(listing.files_below(place).files)
        all_files = _all_files(place) | visible
        files = sorted(all_files.items())
        # No times of change: they differ between the hosts that have copies of the folder.
        sizes = (f"{file_name} {file.stat().st_size}" for file_name, file in files)
        revision = cache.digest(*sizes)
        key = corpus.stat_digest(files)
        _check_files([file for _, file in files], limits)
        if not subset and not _declares_splits(place):
            file_split = _file_split(visible, name)
        if file_split is not None:
            options["data_files"] = _files_by_split(file_split, visible)
    else:
        path, hub_revision = place
        # All hosts must read the same commit.
        revision = _commit(name, path, hub_revision)
        key = revision
        options["revision"] = revision
    with _asking(name):
        loaded = datasets.load_dataset(path, subset, **options)
    assert isinstance(loaded, datasets.IterableDatasetDict)

    if file_split is not None:
        train = "train"
        held_out = "eval"
        line = file_split.line
        reading = ["split by file names"]
    else:
        names = [*map(str, loaded)]
        train, held_out = _chosen(names, name)
        unused = [split for split in names if split not in (train, held_out)]
        eval_names = [held_out or "a part of it by hash"]
        line = split_names.SplitNames([train], eval_names, unused).describe()
        # With unusual splits, earlier versions evaluated on another split. The key then names the
        # splits, so that their caches are not reused.
        is_usual = train == "train" and held_out in ("validation", "test", None)
        reading = [] if is_usual else [f"{train}, {held_out}"]

    splits = {"train": loaded[train]}
    if held_out:
        splits["eval"] = loaded[held_out]
    cache_key = cache.digest(path, subset or "", key, *reading)
    return DataSet(name, splits, revision, cache_key, f"{name}: {line}")


def _all_files(folder: Path) -> dict[str, Path]:
    """Return all files of a folder by their relative paths, hidden ones included."""
    files: dict[str, Path] = {}
    for file in folder.rglob("*"):
        if file.is_file():
            files[file.relative_to(folder).as_posix()] = file
    return files


def _check_files(files: list[Path], limits: LimitsConfig) -> None:
    """Raise an error if a file of at most 64 MiB unpacks to much more than its size.

    Only Parquet, zip, tar and compressed files are checked, and compressed files in a tar. Without
    the check such a file could fill the memory, because `datasets` holds a complete row group or
    line in memory.

    Raises:
        LimitError: A Parquet, zip or tar file unpacks to more than the limits allow.
        DataError: A compressed file unpacks to too much or has a line that is too long, or a file
            is damaged.
    """
    for file in files:
        suffix = file.suffix.lower()
        if file.stat().st_size > _CHECKED_BYTES:
            continue
        if suffix == ".parquet":
            tables.check_columns(file, limits)
        elif suffix in _PACKED:
            # `datasets` reads this file later and cannot leave out a bad line, so a bad line is an
            # error.
            for _ in Lines(file, "", BrokenLog(limits=limits, names_flag=False)).parts():
                pass
        if _TAR.search(file.name.lower()):
            _check_members(file, limits)
        elif suffix == ".zip":
            _check_archive(file, limits)


def _check_archive(file: Path, limits: LimitsConfig) -> None:
    """Raise an error if a zip file unpacks to much more than its size. Only its index is read.

    Raises:
        LimitError: The archive unpacks to more than the limits allow.
        DataError: The archive is damaged, missing or may not be read.
        ReadError: The disk does not answer.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            # The directory of the archive has the sizes, so nothing is unpacked.
            size = sum(member.file_size for member in archive.infolist())
    except (OSError, zipfile.BadZipFile, ValueError) as error:
        if is_system_error(error):
            raise unreadable(f"cannot read {file}: {error.strerror}", error) from error
        raise DataError(
            f"cannot read {file}: {error}. It may be damaged or cut off; fetch it again"
        ) from error
    bounds.check_ratio(str(file), size, file.stat().st_size, limits)


def _check_members(file: Path, limits: LimitsConfig) -> None:
    """Raise an error if a tar file, or a compressed file in it, unpacks to much more than its size.

    Raises:
        LimitError: The archive or a member unpacks to more than the limits allow.
        DataError: The archive or a member is damaged.
    """
    try:
        with contextlib.ExitStack() as stack:
            # `tarfile` of the oldest Python does not unpack zst itself.
            stream = unpacked_stream(stack.enter_context(file.open("rb")), file.suffix.lower())
            archive = stack.enter_context(tarfile.open(fileobj=stream, mode="r|"))
            # A sparse member declares bytes that the archive does not have.
            size = 0
            for member in archive:
                size += member.size
                bounds.check_ratio(str(file), size, file.stat().st_size, limits)
                suffix = PurePath(member.name).suffix.lower()
                packed = archive.extractfile(member) if suffix in _PACKED else None
                if packed is None:
                    continue
                content = unpacked_stream(packed, suffix)
                place = f"{member.name} in {file}"
                bounded = bounds.BoundedStream(content, packed, place, limits)
                while bounded.read(_CHUNK_BYTES):
                    pass
    except DataError:
        raise
    except (OSError, EOFError, tarfile.TarError, lzma.LZMAError, zlib.error, ValueError) as error:
        if is_system_error(error):
            raise unreadable(f"cannot read {file}: {error.strerror}", error) from error
        raise DataError(
            f"cannot read {file}: {error}. It may be damaged or cut off; fetch it again"
        ) from error


def _files_by_split(split: split_names.FileSplit, files: dict[str, Path]) -> dict[str, list[str]]:
    """Return the absolute paths of the files for "train" and "eval", as `datasets` takes them.

    Args:
        split: Split of the files by their names.
        files: Paths of the files by relative path.
    """
    by_split: dict[str, list[str]] = {"train": [], "eval": []}
    for file_name, side in split.sides.items():
        # `datasets` would look for a relative path below the folder of the data set.
        by_split[side].append(str(files[file_name].absolute()))
    return by_split


def _declares_splits(folder: Path) -> bool:
    """Return whether a folder says itself which files its splits have.

    It does so in the README.md, or if it was written by `save_to_disk` of `datasets`.
    """
    readme = folder / "README.md"
    if readme.is_file():
        text = readme.read_text("utf-8", "replace")
        if re.search(r"(?m)^\s*-?\s*(configs|data_files)\s*:", text):
            return True
    return (folder / "dataset_dict.json").is_file() or (folder / "dataset_info.json").is_file()


def _file_split(files: dict[str, Path], name: str) -> split_names.FileSplit | None:
    """Split data files by their names (`split_names`). Return None to let `datasets` find splits.

    Args:
        files: Visible files of the folder by relative path. Files without data are ignored.
        name: Value of data.name, such as `hf:FOLDER`, for the message.

    Raises:
        DataError: Names have different words for the same part, such as `val` and `dev`.
    """
    data_files = []
    for file_name, file in files.items():
        suffixes = {suffix.lower() for suffix in file.suffixes}
        if file.name not in _ABOUT and _DATA_SUFFIXES & suffixes:
            data_files.append(file_name)
    return split_names.file_split(data_files, name)


def _chosen(splits: list[str], name: str) -> tuple[str, str | None]:
    """Choose the splits of a data set to train on and to evaluate on. Return their names.

    A single split is for training, whatever its name. Evaluation is on a validation split, or else
    on a test split. The second result is None if there is neither. Users cannot rename the splits
    of a data set on the hub, so splits with an unknown name are no error, but are not used.

    Args:
        name: Name of the data set for the message.

    Raises:
        DataError: Several splits exist, and none or more than one has the name of a training split.
    """
    train = splits[0] if len(splits) == 1 else _named(splits, "train")
    if train is None:
        raise DataError(f"{name} has no split train, only {', '.join(splits)}")
    remaining = [split for split in splits if split != train]
    return train, _named(remaining, "validation") or _named(remaining, "test")


def _named(splits: list[str], part: split_names.Split) -> str | None:
    """Return the name of the split that is a given part of the data, or None if there is none.

    A split that has the usual name of the part is preferred, such as "validation". A split whose
    name is another word for the part comes second, such as "dev". A name that contains such a word
    comes last, and only if it is the only one.

    Args:
        part: Part of the data: "train", "validation" or "test".
    """
    words: list[str] = [part]
    words += [word for word, word_part in split_names.WORDS.items() if word_part == part]
    for word in words:
        if word in splits:
            return word
    named = [split for split in splits if split_names.split_of(split) == part]
    return named[0] if len(named) == 1 else None


class HubDocuments:
    """Training or evaluation documents of a data set, or of a share of its files.

    A position in them is a value of `IterableDataset.state_dict`.

    Args:
        split: "train" for the training documents, "eval" for the evaluation documents.
        field: Name of the field of a record that has the text.
        shard: (index of the share, number of shares). Share i of n has the files i, i + n, i + 2 n
            and so on. The default is all files.
        broken: Log that counts records with null in the field, which are left out. No other record
            can be broken, because a field has the same type in all records.
    """

    def __init__(
        self,
        data_set: DataSet,
        split: str,
        field: str,
        shard: tuple[int, int] = (0, 1),
        broken: BrokenLog | None = None,
    ) -> None:
        self._data_set = data_set
        self._field = field
        self._shard = shard
        self._broken = broken or BrokenLog()
        if "eval" in data_set.splits:
            self._split = split
            self._side = None
        else:
            # Both sides read the split `train`, and a hash of the text tells the side.
            self._split = "train"
            self._side = split
            if split == "eval":
                # The training side already counts these records.
                self._broken = BrokenLog()

    def after(self, position: Any) -> Iterator[tuple[Chunk, Any]]:
        """Yield lists of the documents after a position, each with the position at its end.

        Args:
            position: Position that an earlier call yielded. None is the beginning.

        Raises:
            DataError: A record has no text in the field, or the data set cannot be parsed.
            ReadError: The network or the disk does not answer.
        """
        number, count = self._shard
        rows = self._data_set.splits[self._split].shard(count, number, contiguous=False)
        if position is not None:
            rows.load_state_dict(position)
        with _asking(self._data_set.name, ReadError):
            yield from self._chunks(rows, position)

    def _chunks(self, rows: Any, position: Any) -> Iterator[tuple[Chunk, Any]]:
        """Yield the documents of records in lists, each with the position at its end.

        Empty texts are left out, and so are texts that are for evaluation while training documents
        are read, or the other way round. Records with null are logged as broken. A list may be
        empty.

        Args:
            rows: `IterableDataset` of the records, set to the position.
            position: Position of the first record, which identifies the first list in the log.

        Raises:
            DataError: A record has no text in the field.
        """
        number, count = self._shard
        place = f"{self._data_set.name} {self._split}, share {number} of {count}"
        rows_left = iter(rows)
        ended = False
        while not ended:
            chunk: Chunk = []
            size = 0
            row_count = 0
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
                    # Rows count, too: if a filter drops nearly all rows, a chunk would hardly reach
                    # its bytes.
                    if size >= _CHUNK_BYTES or row_count >= _CHUNK_ROWS:
                        ended = False
                        break

            # Read after the chunk is full, so the position is behind all of its rows.
            position = rows.state_dict()
            yield chunk, position

    def _text(self, row: dict[str, Any]) -> bytes:
        """Return the text of a record in UTF-8, without NUL characters, which separate documents.

        Raises:
            DataError: The record has no text in the field.
        """
        value = row.get(self._field)
        if isinstance(value, str):
            value = value.replace("\0", "")
        text_fields = [name for name in row if isinstance(row[name], str)]
        return content_of(value, f"a record of {self._data_set.name}", self._field, text_fields)


def _place(name: str) -> tuple[Path | tuple[str, str | None], str | None]:
    """Parse a data.name hf:... into the place of the data set and the name of the subset.

    Returns:
        Folder on this machine, or (name, revision) of a data set on the hub. And the subset.
        Revision and subset are `None` if they are not given.

    Raises:
        DataError: The name is that of a file, or has another form.
    """
    rest = name.partition(":")[2]
    # A folder's name may have a colon, so the complete text is tried first.
    before, _, after = rest.rpartition(":")
    for word, subset in ((rest, None), (before, after)):
        path = Path(word).expanduser()
        if word and path.is_dir():
            return path, subset
    if Path(rest).expanduser().is_file():
        raise DataError(
            f"{rest} is a file; write records:{rest}, or hf: with the folder that it is in"
        )

    matched = re.fullmatch(r"([\w.-]+(?:/[\w.-]+)?)(?:@([\w./-]+))?(?::(.+))?", rest)
    if not matched or rest.startswith("."):
        raise DataError(
            f"no folder {rest or name}; write data.name as hf:NAME[:SUBSET] of the Hugging Face "
            "hub, or hf:FOLDER"
        )
    return (matched[1], matched[2]), matched[3]


def _commit(name: str, repository: str, revision: str | None) -> str:
    """Ask the hub for the commit to which a revision of a data set points now, and return it.

    Args:
        repository: Name of the data set on the hub.
        revision: Branch, tag or commit. None is the default branch.

    Raises:
        DataError: The hub does not answer, or has no such data set or revision.
    """
    # An optional package, of the extra "hf".
    from huggingface_hub import HfApi

    with _asking(name):
        # A branch may move while a run is stopped, and a resumed run must read the same data.
        commit = HfApi().dataset_info(repository, revision=revision, timeout=_TIMEOUT_S).sha
    assert commit is not None
    return commit


@contextlib.contextmanager
def _asking(name: str, unreachable: type[DataError | ReadError] = DataError) -> Iterator[None]:
    """Context manager that turns errors of `datasets` and the hub into a DataError with advice.

    A `DataError` or `ReadError` in the `with` block passes unchanged.

    Args:
        unreachable: Class of the error that is raised if the network or the disk does not answer.

    Raises:
        DataError: The data set does not exist, may not be read, or cannot be parsed.
    """
    try:
        yield
    except (DataError, ReadError):
        raise
    # The libraries behind `datasets` raise errors of many classes.
    except Exception as error:
        reason = " ".join(str(error).split())[:_SHOWN] or type(error).__name__
        class_names = {base.__name__ for base in type(error).__mro__}
        if class_names & _NOT_FOUND:
            raise DataError(
                f"the hub has no data set of {name} that may be read: {reason}. Look up its name; if "
                "it asks for an account, run `hf auth login`"
            ) from error

        is_unreachable = isinstance(error, OSError) or bool(class_names & _UNREACHABLE)
        folder = Path(name.removeprefix("hf:")).expanduser()
        advice = ""
        if folder.is_dir():
            advice = f". Write data.name as records:{folder}, which names the file and line"
        elif is_unreachable:
            advice = (
                ". Is there a network? Otherwise run `hf download NAME --repo-type dataset "
                "--local-dir FOLDER` where there is one, and write data.name as hf:FOLDER"
            )
        if is_unreachable:
            raise unreachable(f"{name} cannot be read: {reason}{advice}") from error
        raise DataError(f"`datasets` cannot read {name}: {reason}{advice}") from error
