"""Tiny data sets prepared by TFDS."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds

from mupax.train.data.records import builders

TEXT = {"text": tfds.features.Text()}


class Tiny(tfds.core.GeneratorBasedBuilder):
    """Records of a stranger's data set. This class is not needed to read them."""

    VERSION = tfds.core.Version("1.2.3")
    pkg_dir_path = Path(__file__).parent  # pyright: ignore

    def __init__(self, *, features: Any, splits: dict[str, list[Any]], **options: Any) -> None:
        self._features = features
        self._splits = splits
        super().__init__(**options)

    def _info(self) -> tfds.core.DatasetInfo:
        features = tfds.features.FeaturesDict(self._features)
        return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        return {name: enumerate(records) for name, records in self._splits.items()}

    def _generate_examples(self) -> None:
        raise NotImplementedError


def prepare(folder: Path, features: Any, splits: dict[str, list[Any]], **options: Any) -> Path:
    """Prepare a data set of these records. Return the folder of its version."""
    options = {"data_dir": folder, "file_format": "array_record", **options}
    with builders.quiet():
        builder = Tiny(features=features, splits=splits, **options)
        builder.download_and_prepare(file_format="array_record")
    return Path(builder.data_path)


def sentences(first: int, last: int) -> list[dict[str, str]]:
    return [{"text": f"sentence number {i}"} for i in range(first, last)]


def write_text_set(folder: Path, **options: Any) -> Path:
    """Prepare 20 sentences to train on and 5 to evaluate on."""
    splits = {"train": sentences(0, 20), "validation": sentences(20, 25)}
    return prepare(folder, TEXT, splits, **options)
