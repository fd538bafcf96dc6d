"""Handwritten digits, split at random or by writer, with logistic regression as the reference.

Every writer filled the same form: 130 digits in a fixed order, in the data as 14 runs of it with a few digits missing.
The runs are therefore known from the labels alone. The split by writer tests on the last three forms: image 1415, where
the twelfth form begins (it starts 0123456789 three times, as each does), to the end; 382 of 1,797 images. UCI counts 13
writers for 14 forms, so two forms may be of one hand; which, is not recorded.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from mupax.train.data import cache, images
from mupax.train.data.interface import DataError, Reference
from mupax.zoo.configs import ModelConfig

if TYPE_CHECKING:
    from mupax.train.config.run import DataConfig

CLASSES = [str(digit) for digit in range(10)]
FIRST_TEST_FORM = 1415
_SIZE, _WHITE = 8, 16


class DigitData(images.ImageData):
    """Digits, with logistic regression on the same split beside them."""

    def references(self) -> list[Reference]:
        chosen = self.eval_positions(range(self.eval_size))
        key = cache.digest(str(self.facts["digest"]), np.sort(chosen).tobytes())
        train, test = (
            [self.train[i] for i in range(len(self.train))],
            [self.eval[i] for i in chosen],
        )
        score = cache.remembered(
            f"digits-{key}", lambda: {"accuracy": logistic_accuracy(train, test)}
        )
        return [Reference("logistic regression", score["accuracy"], "accuracy")]


def logistic_accuracy(
    train: Iterable[tuple[np.ndarray, int]], test: Iterable[tuple[np.ndarray, int]]
) -> float:
    """Accuracy on test images of multinomial logistic regression on pixels in [0, 1], L2 with C = 10.

    Args:
        train, test: (pixels [8, 8, 1] from 0 to 16, label) each.
    """
    (x, y), (x_test, y_test) = (map(np.array, zip(*pairs, strict=True)) for pairs in (train, test))
    weights = images.fit_logistic(
        x.reshape(len(x), -1) / _WHITE, y, inverse_penalty=10, iterations=2000
    )
    predicted = images.predict_logistic(weights, x_test.reshape(len(x_test), -1) / _WHITE)
    return float((predicted == y_test).mean())


def digits(config: DataConfig, model: ModelConfig, seed: int, note: cache.Note) -> DigitData:
    """The digits as batches, split as data.split says: at random but always alike (builders.py), or by writer.

    Args:
        config, model, seed, note: as `mupax.train.data.load` takes them.
    """
    images.check_size("digits", images.vision_model("digits", model, CLASSES), _SIZE, channels=1)
    from mupax.train.data.records import builders

    source = builders.Source(builders.embedded(builders.Digits, config.data_dir, note), "train")
    records = [source[i] for i in range(len(source))]
    x, y, held_out = (
        np.array([record[key] for record in records]) for key in ("image", "label", "held_out")
    )
    y = y.astype(np.int32)
    test = by_writer(y) if config.split == "writer" else held_out
    digest = cache.digest(x.tobytes(), y.tobytes(), test.tobytes())
    return DigitData(
        config,
        [(x[i], int(y[i])) for i in np.flatnonzero(~test)],
        [(x[i], int(y[i])) for i in np.flatnonzero(test)],
        views=(images.jitter, images.as_is),
        white=_WHITE,
        seed=seed,
        class_names=CLASSES,
        facts={"digest": digest, "split": config.split},
    )


def by_writer(labels: np.ndarray) -> np.ndarray:
    """Test images of the split by writer, bool [N]: the last three forms.

    Raises:
        DataError: no form starts there, so these are not the digits this was written for.
    """
    if not np.array_equal(labels[FIRST_TEST_FORM : FIRST_TEST_FORM + 30], np.arange(30) % 10):
        raise DataError("these digits are in another order; use data.split random")
    return np.arange(len(labels)) >= FIRST_TEST_FORM
