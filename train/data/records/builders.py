"""TFDS builders of the embedded data sets, written and read as array_record without TensorFlow.

This module imports tensorflow_datasets, so only functions that prepare or open a data set import it.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import importlib_resources  # noqa: F401  tensorflow_datasets uses it and does not ask for it
import numpy as np
import tensorflow_datasets as tfds
from absl import logging

from mupax.train.data.records import cifar5m


class PythonCorpus(tfds.core.GeneratorBasedBuilder):
    """The Python standard library's sources, a document per module; the builder config is the content's digest."""

    VERSION = tfds.core.Version("1.0.0")
    pkg_dir_path: Any = Path(__file__).parent

    def _info(self) -> tfds.core.DatasetInfo:
        features = tfds.features.FeaturesDict({"path": tfds.features.Text(), "text": tfds.features.Text()})
        return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        return {side: self._generate_examples(side) for side in ("train", "eval")}

    def _generate_examples(self, side: str) -> Iterator[tuple[int, dict[str, Any]]]:
        from mupax.train.data.records import corpus

        files = [(name, path) for name, path in corpus.python_files() if corpus.side(name) == side]
        for i, (name, path) in enumerate(files):
            yield i, {"path": name, "text": path.read_bytes()}


class Digits(tfds.core.GeneratorBasedBuilder):
    """scikit-learn's handwritten digits in their own order: 8 x 8 pixels of 17 grey levels, 1,797 of them.

    They are the test part of UCI's "optical recognition of handwritten digits" (Alpaydin and Kaynak 1998). `held_out`
    marks the usual stratified fifth, scikit-learn's `train_test_split` from state 0.
    """

    VERSION = tfds.core.Version("1.0.0")
    pkg_dir_path: Any = Path(__file__).parent

    def _info(self) -> tfds.core.DatasetInfo:
        features = {
            "image": tfds.features.Tensor(shape=(8, 8, 1), dtype=np.uint8),
            "label": tfds.features.ClassLabel(num_classes=10),
            "held_out": np.bool_,
        }
        return tfds.core.DatasetInfo(
            builder=self, features=tfds.features.FeaturesDict(features), disable_shuffling=True
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        return {"train": self._generate_examples()}

    def _generate_examples(self) -> Iterator[tuple[int, dict[str, Any]]]:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        digits: Any = load_digits()
        indices = np.arange(len(digits.target))
        _, test = train_test_split(indices, test_size=0.2, stratify=digits.target, random_state=0)
        for i in map(int, indices):
            image = digits.images[i][..., None].astype(np.uint8)
            yield i, {"image": image, "label": int(digits.target[i]), "held_out": bool(np.isin(i, test))}


class Cifar5m(tfds.core.GeneratorBasedBuilder):
    """One part of CIFAR-5M (Nakkiran et al. 2021), 32 x 32 colour images of CIFAR-10's classes made by a diffusion model.

    A builder config per part: TFDS prepares a config in full or not at all, so a preparation that was stopped goes on
    with the part it was at.

    Args:
        source: the part's npz; only preparing needs it.
        **kwargs: of a TFDS builder.
    """

    VERSION = tfds.core.Version("1.0.0")
    pkg_dir_path: Any = Path(__file__).parent
    BUILDER_CONFIGS: ClassVar = [tfds.core.BuilderConfig(name=name) for name in cifar5m.PARTS]

    def __init__(self, *, source: Path | None = None, **kwargs: Any) -> None:
        self._source = source
        super().__init__(**kwargs)

    def _info(self) -> tfds.core.DatasetInfo:
        features = {
            "image": tfds.features.Tensor(shape=cifar5m.IMAGE_SHAPE, dtype=np.uint8),
            "label": tfds.features.ClassLabel(names=cifar5m.CLASSES),
        }
        return tfds.core.DatasetInfo(
            builder=self, features=tfds.features.FeaturesDict(features), disable_shuffling=True
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        return {"train": self._generate_examples()}

    def _generate_examples(self) -> Iterator[tuple[int, dict[str, Any]]]:
        assert self._source is not None
        for i, (image, label) in enumerate(cifar5m.examples(self._source)):
            yield i, {"image": image, "label": label}


def content_config(digest: str) -> tfds.core.BuilderConfig:
    """The builder config of a corpus of this digest."""
    return tfds.core.BuilderConfig(name=digest)


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
