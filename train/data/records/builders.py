"""TFDS builders of the embedded data sets, written and read as array_record without TensorFlow.

This module imports tensorflow_datasets, so only functions that prepare or open a data set import it.
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
    """The records of one split, read at random; array_record has checksums, so what is read is what was written.

    Args:
        builder: of a prepared data set.
        split: name of the split, or a slice of it.
        decoders: how to decode features, if not as they are.

    Raises:
        DataError: when it is made or read, where a file is missing or damaged.
    """

    def __init__(self, builder: Any, split: str, decoders: Any = None) -> None:
        self._folder, self._name = Path(builder.data_path), builder.name
        with cache.whole(self._folder, self._name):
            self._records = builder.as_data_source(split=split, decoders=decoders)
            self._length = len(self._records)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, i: int) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        with cache.whole(self._folder, self._name):
            return self._records[i]


class PythonCorpus(tfds.core.GeneratorBasedBuilder):
    """The Python standard library's sources, a document per module; the builder config is the content's digest."""

    VERSION = tfds.core.Version("1.0.0")
    pkg_dir_path: Any = Path(__file__).parent

    def _info(self) -> tfds.core.DatasetInfo:
        return info(self, {"path": tfds.features.Text(), "text": tfds.features.Text()})

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        return {side: self._generate_examples(side) for side in ("train", "eval")}

    def _generate_examples(self, side: str) -> Iterator[tuple[int, dict[str, Any]]]:
        from mupax.train.data.records import corpus

        files = [(name, path) for name, path in corpus.python_files() if corpus.side(name) == side]
        for i, (name, path) in enumerate(files):
            yield i, {"path": name, "text": path.read_bytes()}


class Digits(tfds.core.GeneratorBasedBuilder):
    """Handwritten digits (`mupax.train.data.images.read_digits`) in their own order."""

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
            image = digits.pixels[i][..., None]
            yield (
                i,
                {
                    "image": image,
                    "label": int(digits.labels[i]),
                    "held_out": bool(digits.held_out[i]),
                },
            )


def from_folder(folder: Path) -> Any:
    """Return the TFDS builder of a prepared data set, without the code that prepared it.

    Args:
        folder: of one version, DATA_DIR/NAME[/CONFIG]/VERSION.

    Raises:
        DataError: its features.json names code that is none of TFDS's own features.
    """
    check_features(folder / "features.json")
    return tfds.builder_from_directory(lasting_name(folder))


def check_features(file: Path) -> None:
    """Refuse a features.json that names other classes than TFDS's own, or than a plugin has made: TFDS would import any module.

    Args:
        file: of a prepared data set.

    Raises:
        DataError: it is damaged, or names another class.
    """
    try:
        fields = disk.read_json(file)
    except disk.JsonError as error:
        raise DataError(str(error)) from error
    connector = tfds.features.FeatureConnector
    tfds_classes = {
        f"{kind.__module__}.{kind.__name__}"
        for kind in vars(tfds.features).values()
        if isinstance(kind, type)
    }
    # Classes that were defined in this process; their code was run on the user's word.
    allowed = tfds_classes | set(connector._registered_features)
    for name in _class_names(fields):
        if name not in allowed:
            raise DataError(
                f"{file} names the class {disk.shown(name)}, which is no feature of TFDS, and no code of a data set's is run. If it "
                "is yours, add --plugin MODULE with the module that has it"
            )


def _class_names(fields: Any) -> Iterator[str]:
    """Yield every class that a features.json names, in its form of today and in that of older versions."""
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
    """What a builder says of its data set: records with these features, in the order they are made in.

    Args:
        builder: of the data set.
        features: name to TFDS feature or dtype.
    """
    return tfds.core.DatasetInfo(
        builder=builder, features=tfds.features.FeaturesDict(features), disable_shuffling=True
    )


def embedded(
    kind: type[Any],
    data_dir: str | None,
    note: cache.Note,
    *,
    config: str | None = None,
    **arguments: Any,
) -> Any:
    """The TFDS builder of an embedded data set, prepared if it is not.

    Args:
        kind: its class.
        data_dir: data.data_dir.
        note: told what takes time.
        config: name of the builder config.
        **arguments: of the builder.

    Raises:
        DataError: the folder cannot be written, or what is prepared in it is damaged.
    """
    base = cache.data_sets(data_dir)
    builder_config = tfds.core.BuilderConfig(name=config) if config else None

    if not base.is_dir():
        cache.folder(base)
    named = lasting_name(base)  # TFDS takes brackets for a pattern, and array_record only UTF-8

    def opened() -> tuple[Any, bool]:
        with quiet(), cache.whole(base / kind.name, kind.name):
            builder = kind(
                data_dir=named, file_format="array_record", config=builder_config, **arguments
            )
            return builder, builder.is_prepared()

    builder, ready = opened()
    if not ready:
        with cache.lock(base, kind.__name__, note):
            builder, ready = opened()  # another process may have prepared it while this one waited
            if not ready:
                note(f"preparing {builder.name} in {base / builder.data_path.relative_to(named)}")
                cache.delete_incomplete(Path(builder.data_path))
                with quiet():
                    builder.download_and_prepare(file_format="array_record")
    return builder


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps TFDS from telling the user about its own workings."""
    before = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    tfds.disable_progress_bar()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(before)


def prepare_python_corpus(data_dir: str | None, note: cache.Note) -> None:
    """Write the text of the Python standard library to disk, unless it is there."""
    from mupax.train.data.records import corpus

    embedded(PythonCorpus, data_dir, note, config=corpus.content_digest(corpus.python_files()))


def prepare_digits(data_dir: str | None, note: cache.Note) -> None:
    """Write the handwritten digits to disk, unless they are there."""
    embedded(Digits, data_dir, note)
