"""Data sets as the package `datasets` has them: of the Hugging Face hub, streamed, or a folder of Parquet or JSON lines in its layout."""

from __future__ import annotations

import contextlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mupax.train.data import cache
from mupax.train.data.interface import DataError, ReadError
from mupax.train.data.records import corpus
from mupax.train.data.records.lines import content_of
from mupax.train.data.streams.lanes import Chunk

_EVAL = ("validation", "valid", "val", "dev", "eval", "test")
_CHUNK_BYTES, _CHUNK_ROWS = 1 << 18, 1000
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


def opened(name: str) -> DataSet:
    """The data set of a data.name, hf:NAME[@REVISION][:SUBSET] or hf:FOLDER[:SUBSET].

    Raises:
        DataError: the package is missing, there is no such data set or subset, or it cannot be reached.
    """
    place, subset = _place(name)
    where = str(place) if isinstance(place, Path) else place[0]
    if importlib.util.find_spec("datasets") is None:
        raise DataError(f"data.name {name} needs the package datasets; run `pip install 'mupax[hf]'`")
    import datasets  # pyright: ignore[reportMissingImports]

    datasets.disable_progress_bars()
    if isinstance(place, Path):
        files = [(file.relative_to(place).as_posix(), file) for file in sorted(place.rglob("*")) if file.is_file()]
        revision = cache.digest(*(f"{each} {file.stat().st_size}" for each, file in files))
        key, pinned = corpus.stat_digest(files), None
    else:
        revision = pinned = _commit(name, *place)
        key = revision
    with _asking(name):
        every = datasets.load_dataset(where, subset, revision=pinned, streaming=True)
    assert isinstance(every, datasets.IterableDatasetDict)
    train = "train" if "train" in every else next(iter(every)) if len(every) == 1 else None
    if train is None:
        raise DataError(f"{name} has no split train, only {', '.join(map(str, every))}")
    held_out = next((split for split in _EVAL if split in every and split != train), None)
    splits = {"train": every[train]} | ({"eval": every[held_out]} if held_out else {})
    return DataSet(name, splits, revision, cache.digest(where, subset or "", key))


class HubDocuments:
    """The documents of a share of a data set. A position is what `IterableDataset.state_dict` says.

    Args:
        data_set: opened.
        split: `train` or `eval`.
        field: that has the text.
        shard: number of the share, and of how many; of whole files, which are those with the numbers shard[0], shard[0] + shard[1], ….
    """

    def __init__(self, data_set: DataSet, split: str, field: str, shard: tuple[int, int] = (0, 1)) -> None:
        self._data_set, self._field, self._shard = data_set, field, shard
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
        chunk, size, row_count = [], 0, 0
        with _asking(self._data_set.name, ReadError):
            for row in rows:
                text, row_count = self._text(row), row_count + 1
                if text and (self._side is None or corpus.side(text) == self._side):
                    chunk.append((text, True))
                    size += len(text)
                if size >= _CHUNK_BYTES or row_count >= _CHUNK_ROWS:
                    yield chunk, rows.state_dict()
                    chunk, size, row_count = [], 0, 0
        yield chunk, rows.state_dict()

    def _text(self, row: dict[str, Any]) -> bytes:
        """The text of a record, without NUL characters, which separate documents; nothing where the field is empty."""
        value = row.get(self._field)
        if value is None and self._field in row:
            return b""
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
        raise DataError(f"{rest} is a file; write records:{rest}, or hf: with the folder that it is in")
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
        if kinds & {"RepositoryNotFoundError", "GatedRepoError", "RevisionNotFoundError", "DatasetNotFoundError"}:
            raise DataError(
                f"the hub has no data set of {name} that may be read: {reason}. Look up its name; if it asks for "
                "an account, run `hf auth login`"
            ) from error
        if isinstance(error, OSError) or kinds & {"HTTPError", "HfHubHTTPError", "TransportError", "ClientError"}:
            raise unreachable(
                f"{name} cannot be read: {reason}. Is there a network? Otherwise run `hf download NAME --repo-type dataset "
                "--local-dir FOLDER` where there is one, and write data.name as hf:FOLDER"
            ) from error
        raise DataError(f"`datasets` cannot read {name}: {reason}") from error
