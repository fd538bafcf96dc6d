"""Image classifier from any trained model: class probabilities of image files.

`mupax predict` and `mupax.train.reuse.model` use it.
"""

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
    """Class probabilities of one file, or the reason why there are none."""

    path: Path
    probabilities: np.ndarray | None
    """float64 [classes]. `None` if the file cannot be read or the logits are not finite."""
    error: str = ""


class Classifier:
    """Image classifier on one device, which yields class probabilities of image files.

    Args:
        program: Program of the model. Its evaluation batch size is the number of images that are
            classified at once.
        params: Parameters of the model as they are stored, without their multipliers.
        images: Names of the classes, and the preprocessing.
        described: Description of the weights for messages, such as `TrainedModel.described`.
    """

    def __init__(
        self, program: Program, params: Arrays, images: ImageInput, described: str
    ) -> None:
        assert isinstance(program.config.model, ImageModel)
        self.model = program.config.model
        self.images = images
        self.described = described
        self._params = params
        self._inputs = program.step_inputs()
        self._batch_size = program.config.eval_batch_size
        self._logits = program.compile_logits()

    def predictions(self, paths: Sequence[Path]) -> Iterator[Prediction]:
        """Yield the prediction of each file, in order.

        A file that cannot be read, or whose logits are not finite, has an error and no
        probabilities.
        Threads decode the next files while a batch is classified.
        """
        with ThreadPool(folders.decoding_threads()) as pool:
            # Threads are enough, because Pillow decodes without holding Python's global lock.
            decoded = pool.imap(self._read, paths)
            for first in range(0, len(paths), self._batch_size):
                batch_paths = paths[first : first + self._batch_size]
                batch = [next(decoded) for _ in batch_paths]
                yield from self._predict_batch(batch_paths, batch)

    def _predict_batch(
        self, paths: Sequence[Path], batch: Sequence[np.ndarray | DataError]
    ) -> Iterator[Prediction]:
        """Yield the predictions of a batch of decoded files."""
        arrays = [image for image in batch if isinstance(image, np.ndarray)]
        rows = iter(self._probabilities(np.stack(arrays)) if arrays else ())
        for path, image in zip(paths, batch, strict=True):
            if isinstance(image, DataError):
                yield Prediction(path, None, str(image))
                continue
            probabilities = next(rows)
            if np.isfinite(probabilities).all():
                yield Prediction(path, probabilities)
            else:
                error = f"the model has no answer for {path}: its logits are not finite"
                yield Prediction(path, None, error)

    def _read(self, path: Path) -> np.ndarray | DataError:
        """Return a file's pixels for the model, float32 [H, W, C], or the error of reading it."""
        pixels = self.images.pixels
        try:
            image = folders.decoded(path, self.model.channels, str(path), pixels.background)
        except DataError as error:
            # Returned, because an exception would also end the predictions of all other files.
            return error
        fit = crops.fitted(pixels, self.model.image_size)
        # Evaluation uses none of the random numbers of an augmentation.
        raw = fit([image], np.zeros((1, images.NUMBERS)))
        return images.normalized(raw, pixels)[0]

    def _probabilities(self, inputs: np.ndarray) -> np.ndarray:
        """Return class probabilities, float64 [b, classes].

        Args:
            inputs: Images, float32 [b, H, W, C], with b up to the batch size.
        """
        count = len(inputs)
        # The program has one shape, so zeros fill the batch.
        padding = np.zeros((self._batch_size - count, *inputs.shape[1:]), np.float32)
        batch = {
            "inputs": np.concatenate([inputs, padding]),
            "targets": np.zeros(self._batch_size, np.int32),
            "weights": np.zeros(self._batch_size, np.float32),
        }
        logits = self._logits(self._params, self._inputs, batch)
        return softmax(np.asarray(jax.device_get(logits))[:count])


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return the probabilities of logits [b, classes], float64.

    A row with a logit that is not finite becomes NaN.
    """
    finite = np.isfinite(logits).all(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):  # NumPy would warn about inf - inf
        exp = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
        probabilities = exp / exp.sum(axis=1, keepdims=True)
    # A logit of -inf would be a probability of 0, and the model would look certain.
    return np.where(finite, probabilities, np.nan)


def classifier(trained: TrainedModel, batch_size: int) -> Classifier:
    """Load the weights of a trained model and return its classifier, on one device.

    Args:
        batch_size: Number of images that are classified at once.

    Raises:
        WeightsError: The model is one of text.
        DataError: The model reads neither 1 nor 3 channels.
        WorkdirError, TensorFileError: The weights are damaged.
    """
    trained.check_images()
    assert isinstance(trained.model, ImageModel)
    assert trained.images is not None
    folders.check_channels(str(trained.path), trained.model.channels)
    data = dataclasses.replace(trained.config.data, eval_batch_size=batch_size)
    program = runs.on_one_device(dataclasses.replace(trained.config, data=data))
    return Classifier(program, trained.params(program.abstract), trained.images, trained.described)
