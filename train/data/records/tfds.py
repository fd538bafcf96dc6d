"""Finds, opens and prepares TFDS data sets in array_record. Whatever is missing is said at once.

A prepared data set is looked for as a folder, DATA_DIR/NAME[/CONFIG]/VERSION; no registry and no network is asked.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mupax.train.config.sections import SOURCES
from mupax.train.data import cache
from mupax.train.data.interface import DataError

CONFIGS = {"c4": "c4/en"}
"""The configuration meant where a data set has several and none is named."""
_NOT_LISTED = ("c4",)  # TFDS has it, in a module that its list leaves out
_VERSION = re.compile(r"\d+\.\d+\.\d+")


def data_dir(given: str | None) -> Path:
    """data.data_dir, or the folder of data sets in the cache."""
    return Path(given).expanduser() if given else cache.root() / "tfds"


def embedded(name: str, given: str | None, note: cache.Note, **arguments: Any) -> Any:
    """The TFDS builder of a data set in builders.py, prepared if it is not.

    Args:
        name: the builder's class.
        given: data.data_dir.
        note: told what takes time.
        **arguments: of the builder.

    Raises:
        DataError: the folder cannot be written.
    """
    base = data_dir(given)
    from mupax.train.data.records import builders

    kind: Any = {"PythonCorpus": builders.PythonCorpus, "Digits": builders.Digits, "Cifar5m": builders.Cifar5m}[name]
    if isinstance(config := arguments.get("config"), str) and name == "PythonCorpus":
        arguments["config"] = builders.content_config(config)
    arguments = {"data_dir": base, "file_format": "array_record", **arguments}
    with builders.quiet():
        builder = kind(**arguments)
        ready = builder.is_prepared()
    if ready:
        return builder
    cache.folder(base=base)
    with cache.lock(base / f"{name}.lock", note):
        with builders.quiet():
            builder = kind(**arguments)  # another process may have prepared it while this one waited
            ready = builder.is_prepared()
        if not ready:
            note(f"preparing {builder.name} in {builder.data_path}")
            with builders.quiet():
                builder.download_and_prepare(file_format="array_record")
    return builder


class Source(Sequence[dict[str, Any]]):
    """The records of one split, read at random; array_record has checksums, so what is read is what was written.

    Args:
        builder: of a prepared data set.
        split: name of the split, or a slice of it.
        decoders: how to decode features, if not as they are.
    """

    def __init__(self, builder: Any, split: str, decoders: Any = None) -> None:
        self._folder = Path(builder.data_path)
        self._records = self._checked(lambda: builder.as_data_source(split=split, decoders=decoders))
        self._length = self._checked(lambda: len(self._records))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, i: int) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._checked(lambda: self._records[i])

    def _checked(self, read: Callable[[], Any]) -> Any:
        """What `read` returns.

        Raises:
            DataError: a file is missing or damaged.
        """
        try:
            return read()
        except (OSError, RuntimeError, ValueError) as error:  # what array_record and protobuf raise
            reason = str(error).splitlines()[0][:200]
            raise DataError(f"{self._folder} is damaged: {reason}. {_prepare_again(self._folder)}") from error


@dataclasses.dataclass(frozen=True)
class Found:
    """A prepared data set.

    Attributes:
        folder: of its files.
        digest: of its description.
        train: name of the training split.
        eval: name of the evaluation split, or a slice of the training split that `train` leaves out.
    """

    folder: Path
    digest: str
    train: str
    eval: str

    def builder(self) -> Any:
        """Opens it, as a TFDS builder."""
        import importlib_resources  # noqa: F401  tensorflow_datasets uses it and does not ask for it
        import tensorflow_datasets as tfds

        return tfds.builder_from_directory(self.folder)


def find(name: str, given: str | None) -> Found:
    """The prepared TFDS data set `name` ("c4", "c4/en", "mnist:3.0.1") in `given` or the cache.

    Raises:
        DataError: it is not there, or not in array_record; the text has the command that prepares it.
    """
    base = data_dir(given)
    dataset, _, version = name.partition(":")
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.+-]*)?", dataset):
        raise DataError(unknown(name, base))
    folder = base / dataset
    if not _versions(folder) and dataset in CONFIGS:
        folder = base / CONFIGS[dataset]
    versions = _versions(folder)
    if not versions:
        configs = sorted(sub.name for sub in folder.iterdir() if _versions(sub)) if folder.is_dir() else []
        if configs:
            raise DataError(f"{folder} has several configurations; write data.name as {dataset}/{configs[0]}")
        raise DataError(_missing(name, dataset, base, given))
    if version and version not in versions:
        raise DataError(f"{folder} has no version {version}, only {', '.join(versions)}")
    return _described(folder / (version or versions[-1]))


def _described(folder: Path) -> Found:
    content = cache.read_json(folder / "dataset_info.json")
    splits = [split.get("name") for split in (content or {}).get("splits", [])]
    if content is None or not (folder / "features.json").exists():
        raise DataError(f"{folder} has no whole dataset_info.json and features.json. {_prepare_again(folder)}")
    formats = [content.get("fileFormat"), *content.get("alternativeFileFormats", [])]
    if "array_record" not in formats:
        raise DataError(
            f"{folder} is in {formats[0] or 'tfrecord'}, which only TensorFlow reads; prepare it with "
            "file_format='array_record', or convert it: "
            f"python -m tensorflow_datasets.scripts.convert_format --dataset_dir={folder} --out_file_format=array_record"
        )
    if "train" not in splits:
        raise DataError(f"{folder} has no split train, only {', '.join(map(str, splits))}")
    digest = cache.digest((folder / "dataset_info.json").read_bytes(), (folder / "features.json").read_bytes())
    held_out = next((split for split in ("validation", "test") if split in splits), None)
    train, eval_ = ("train", held_out) if held_out else ("train[:95%]", "train[95%:]")
    return Found(folder, digest, train, eval_)


def _versions(folder: Path) -> list[str]:
    """Versions prepared in a folder, oldest first."""
    if not folder.is_dir():
        return []
    found = [
        sub.name for sub in folder.iterdir() if _VERSION.fullmatch(sub.name) and (sub / "dataset_info.json").exists()
    ]
    return sorted(found, key=lambda version: tuple(map(int, version.split("."))))


def _missing(name: str, dataset: str, base: Path, given: str | None) -> str:
    """Why there is no such data: a known one that is not prepared, or an unknown name."""
    if dataset.split("/")[0] not in known():
        return unknown(name, base)
    where = f" --data-dir {given}" if given else ""
    return f"{name} is not prepared in {base}; run `python -m mupax.train.data prepare {name}{where}`, or set data.data_dir"


def unknown(name: str, base: Path) -> str:
    """What to say of a name that is no data set's."""
    names: Sequence[str] = [*SOURCES, *known(), *(sub.name for sub in base.glob("*") if sub.is_dir())]
    near = difflib.get_close_matches(name, list(dict.fromkeys(names)), n=3)  # a prepared one is there twice
    hint = f"did you mean {', '.join(near)}?" if near else f"write one of {', '.join(SOURCES)} or a TFDS name"
    return f"no data is named {name!r}; {hint}"


def known() -> list[str]:
    """Names of the data sets that TFDS can prepare."""
    import importlib_resources  # noqa: F401
    import tensorflow_datasets as tfds

    return [*tfds.list_builders(with_community_datasets=False), *_NOT_LISTED]


def _prepare_again(folder: Path) -> str:
    return f"Delete that folder and prepare it again (python -m mupax.train.data prepare {folder.parent.name})"
