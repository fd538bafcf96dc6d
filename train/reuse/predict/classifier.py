"""A classifier of images from a run, an imported folder or one of Hugging Face: probabilities of its classes for image files."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from mupax.train.core.program import Program
from mupax.train.data import DataError, crops, images
from mupax.train.data.sources import folders
from mupax.train.reuse import runs
from mupax.train.reuse.image_input import ImageInput
from mupax.train.reuse.trained import TrainedModel
from mupax.zoo.definition import Arrays
from mupax.zoo.families import ImageModel


class Prediction(NamedTuple):
    """What a model says of one file."""

    path: Path
    probabilities: np.ndarray | None
    """float64 [classes]; None of a file that cannot be read."""
    error: str = ""


class Classifier:
    """A model of images on one device.

    Args:
        program: of the model, whose evaluation batch is what it takes at once.
        params: the model's.
        images: names of its classes, and preprocessing.
        described: which weights they are, in words.
    """

    def __init__(
        self, program: Program, params: Arrays, images: ImageInput, described: str
    ) -> None:
        assert isinstance(program.config.model, ImageModel)
        self.model, self.images, self.described = program.config.model, images, described
        self._params, self._inputs = params, program.step_inputs()
        self._batch, self._logits = program.config.eval_batch_size, program.compile_logits()

    def predictions(self, paths: Sequence[Path]) -> Iterator[Prediction]:
        """What the model says of each file, in their order. Files are decoded in threads while others are classified."""
        with ThreadPool(folders.decoding_threads()) as pool:
            pixels = pool.imap(self._read, paths)
            for first in range(0, len(paths), self._batch):
                part = paths[first : first + self._batch]
                read = [next(pixels) for _ in part]
                whole = [image for image in read if isinstance(image, np.ndarray)]
                rows = iter(self._probabilities(np.stack(whole)) if whole else ())
                for path, image in zip(part, read, strict=True):
                    if isinstance(image, np.ndarray):
                        probabilities = next(rows)
                        if np.isfinite(probabilities).all():
                            yield Prediction(path, probabilities)
                        else:
                            yield Prediction(
                                path,
                                None,
                                f"the model has no answer for {path}: its logits are not finite",
                            )
                    else:
                        yield Prediction(path, None, str(image))

    def _read(self, path: Path) -> np.ndarray | DataError:
        """A file as the model reads it, float32 [H, W, C], or what is wrong with it."""
        try:
            image = folders.decoded(
                path, self.model.channels, str(path), self.images.pixels.background
            )
        except DataError as error:
            return error
        raw = crops.fitted(self.images.pixels, self.model.image_size)(
            [image], np.zeros((1, images.NUMBERS))
        )
        return images.normalized(raw, self.images.pixels)[0]

    def _probabilities(self, inputs: np.ndarray) -> np.ndarray:
        """float64 [b, classes] of at most a batch of images [b, H, W, C]; the rest of the batch is zeros."""
        count = len(inputs)
        batch = np.concatenate(
            [inputs, np.zeros((self._batch - count, *inputs.shape[1:]), np.float32)]
        )
        unread = {
            "targets": np.zeros(self._batch, np.int32),
            "weights": np.zeros(self._batch, np.float32),
        }
        logits = self._logits(self._params, self._inputs, {"inputs": batch, **unread})
        return softmax(np.asarray(jax.device_get(logits))[:count])


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities, float64 [b, classes], of logits [b, classes]."""
    with np.errstate(invalid="ignore"):  # rows that are not finite have no probabilities, but NaN
        exp = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
        return exp / exp.sum(axis=1, keepdims=True)


def classifier(trained: TrainedModel, batch_size: int) -> Classifier:
    """Return the classifier of a trained model.

    Args:
        trained: the model.
        batch_size: images that it takes at once.

    Raises:
        WeightsError: it is a model of text.
        WorkdirError, TensorFileError: damaged weights.
    """
    trained.check_images("predict")
    assert isinstance(trained.model, ImageModel)
    assert trained.images is not None
    folders.check_channels(str(trained.path), trained.model.channels)
    data = dataclasses.replace(trained.config.data, eval_batch_size=batch_size)
    program = runs.on_one_device(dataclasses.replace(trained.config, data=data))
    return Classifier(program, trained.params(program.abstract), trained.images, trained.described)
