"""TFDS builders of the data sets that mupax makes itself: Python's standard library and digits.

They are written and read as array_record files, without TensorFlow.
The import of tensorflow_datasets is slow, so only functions that prepare or open a data set import
this module.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import importlib_resources  # noqa: F401  tensorflow_datasets uses it and does not ask for it
import numpy as np
import tensorflow_datasets as tfds
from absl import logging

from mupax import disk
from mupax.disk import lasting_name
from mupax.train.data import cache, images
from mupax.train.data.interface import DataError


class Source(Sequence[dict[str, Any]]):
    """Sequence of the records of one split of a prepared TFDS data set, with random access.

    A record is a dict of features. The files have checksums, so a damaged record raises an error.

    Args:
        builder: TFDS builder of a prepared data set.
        split: Name of the split, or a slice of it such as "train[:10%]".
        decoders: TFDS decoders by feature, in place of the features' own, which are the default.

    Raises:
        DataError: A file is missing or damaged. Reading a record may raise it, too.
    """

    def __init__(self, builder: Any, split: str, decoders: Any = None) -> None:
        self._folder = Path(builder.data_path)
        self._name = builder.name
        with cache.whole(self._folder, self._name):
            self._records = builder.as_data_source(split=split, decoders=decoders)
            self._length = len(self._records)

    def __len__(self) -> int:
        return self._length

    def __getitem__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, i: int
    ) -> dict[str, Any]:
        with cache.whole(self._folder, self._name):
            return self._records[i]


class PythonCorpus(tfds.core.GeneratorBasedBuilder):
    """TFDS builder of the Python standard library's sources, with a document for each module.

    The name of the builder config is the digest of the sources.
    """

    VERSION = tfds.core.Version("1.0.0")
    pkg_dir_path: Any = Path(__file__).parent

    def _info(self) -> tfds.core.DatasetInfo:
        return info(self, {"path": tfds.features.Text(), "text": tfds.features.Text()})

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        return {side: self._generate_examples(side) for side in ("train", "eval")}

    def _generate_examples(self, side: str) -> Iterator[tuple[int, dict[str, Any]]]:
        from mupax.train.data.records import corpus

        files = []
        for name, path in corpus.python_files():
            if corpus.side(name) == side:
                files.append((name, path))
        for i, (name, path) in enumerate(files):
            yield i, {"path": name, "text": path.read_bytes()}


class Digits(tfds.core.GeneratorBasedBuilder):
    """TFDS builder of the handwritten digits, in the order of `data.images.read_digits`."""

    VERSION = tfds.core.Version("1.0.0")
    pkg_dir_path: Any = Path(__file__).parent

    def _info(self) -> tfds.core.DatasetInfo:
        features = {
            "image": tfds.features.Tensor(shape=(8, 8, 1), dtype=np.uint8),
            "label": tfds.features.ClassLabel(num_classes=10),
            "held_out": np.bool_,
        }
        return info(self, features)

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        return {"train": self._generate_examples()}

    def _generate_examples(self) -> Iterator[tuple[int, dict[str, Any]]]:
        digits = images.read_digits()
        for i in range(len(digits.labels)):
            record = {
                "image": digits.pixels[i][..., None],
                "label": int(digits.labels[i]),
                "held_out": bool(digits.held_out[i]),
            }
            yield i, record


def from_folder(folder: Path) -> Any:
    """Return a TFDS builder that reads a prepared data set, without the code that prepared it.

    The class names in its features.json are checked first, because TFDS would import the classes
    and so run code of whoever wrote the file.

    Args:
        folder: Folder of one version, DATA_DIR/NAME[/CONFIG]/VERSION.

    Raises:
        DataError: The features.json is damaged, or names a class that is no feature of TFDS.
    """
    check_features(folder / "features.json")
    return tfds.builder_from_directory(lasting_name(folder))


def check_features(file: Path) -> None:
    """Raise an error for a features.json that names a class outside of TFDS and plugins.

    Args:
        file: Path of the features.json of a prepared data set.

    Raises:
        DataError: The file is damaged, or names another class.
    """
    # TFDS would import any module that the file names.
    try:
        fields = disk.read_json(file)
    except disk.JsonError as error:
        raise DataError(str(error)) from error
    allowed = set()
    for feature in vars(tfds.features).values():
        if isinstance(feature, type):
            allowed.add(f"{feature.__module__}.{feature.__name__}")
    # Classes that are registered in this process are allowed: the user has already run their code.
    allowed |= set(tfds.features.FeatureConnector._registered_features)
    for name in _class_names(fields):
        if name not in allowed:
            raise DataError(
                f"{file} names the class {disk.shown(name)}, which is no feature of TFDS, and no "
                "code of a data set's is run. "
                "If it is yours, add --plugin MODULE with the module that has it"
            )


def _class_names(fields: Any) -> Iterator[str]:
    """Yield the name of every class in a features.json of the current or of an older format."""
    waiting = [fields]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        if not isinstance(value, dict):
            continue
        waiting += value.values()
        for key in ("pythonClassName", "python_class_name"):
            if isinstance(value.get(key), str):
                yield value[key]
        if "content" in value and isinstance(value.get("type"), str):
            yield value["type"]


def info(builder: tfds.core.DatasetBuilder, features: dict[str, Any]) -> tfds.core.DatasetInfo:
    """Return the TFDS info of a data set whose records stay in the order in which they are made.

    Args:
        features: TFDS feature or dtype of each field, by name.
    """
    features_dict = tfds.features.FeaturesDict(features)
    return tfds.core.DatasetInfo(builder=builder, features=features_dict, disable_shuffling=True)


def embedded(
    kind: type[Any],
    data_dir: str | None,
    note: cache.Note,
    *,
    config: str | None = None,
    **arguments: Any,
) -> Any:
    """Return the TFDS builder of a data set that mupax makes itself. Prepare the data if needed.

    If another process is preparing it, this process waits.

    Args:
        kind: Class of the TFDS builder, such as `Digits`.
        data_dir: Value of `data.data_dir`. None is the folder in the cache.
        note: Function that prints a line for the user before the data set is prepared.
        config: Name of the TFDS builder config. Default: no config.
        **arguments: Further arguments of the constructor of `kind`.

    Raises:
        DataError: The folder cannot be written, or the prepared data set is damaged.
    """
    base = cache.data_sets(data_dir)
    builder_config = tfds.core.BuilderConfig(name=config) if config else None

    if not base.is_dir():
        cache.folder(base)
    # TFDS reads brackets in a path as a glob pattern, and array_record needs a path in UTF-8.
    data_path = lasting_name(base)

    def opened() -> tuple[Any, bool]:
        with quiet(), cache.whole(base / kind.name, kind.name):
            builder = kind(
                data_dir=data_path, file_format="array_record", config=builder_config, **arguments
            )
            return builder, builder.is_prepared()

    builder, ready = opened()
    if not ready:
        with cache.lock(base, kind.__name__, note):
            # Another process may have prepared the data set while this one waited.
            builder, ready = opened()
            if not ready:
                folder = base / builder.data_path.relative_to(data_path)
                note(f"preparing {builder.name} in {folder}")
                cache.delete_incomplete(Path(builder.data_path))
                with quiet():
                    builder.download_and_prepare(file_format="array_record")
    return builder


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Context manager that silences the log, the progress bars and the standard output of TFDS.

    The progress bars stay off afterwards.
    """
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    tfds.disable_progress_bar()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)


def prepare_python_corpus(data_dir: str | None, note: cache.Note) -> None:
    """Write the Python standard library to disk as a TFDS data set, unless it is there.

    Args:
        data_dir: Folder of prepared data sets. None is the folder in the cache.
    """
    from mupax.train.data.records import corpus

    digest = corpus.content_digest(corpus.python_files())
    embedded(PythonCorpus, data_dir, note, config=digest)


def prepare_digits(data_dir: str | None, note: cache.Note) -> None:
    """Write the handwritten digits to disk as a TFDS data set, unless it is there.

    Args:
        data_dir: Folder of prepared data sets. None is the folder in the cache.
    """
    embedded(Digits, data_dir, note)
