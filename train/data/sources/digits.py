"""Handwritten digits, split at random or by writer, with logistic regression as the reference.

Every writer filled in the same form of 130 digits in a fixed order. The data has 14 of these forms
in a row, with a few digits missing. Every form starts with 0123456789 three times, so the labels
tell where a form begins. The split by writer tests on the last three forms, which are images 1415
to 1796: 382 of 1,797. UCI counts 13 writers for 14 forms, so two forms may be by one writer. Which
two is not recorded.
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
_SIZE = 8
_WHITE = 16


class DigitData(images.ImageData):
    """Batches of the handwritten digits. The reference is logistic regression on the same split."""

    def references(self) -> list[Reference]:
        chosen = self.eval_positions(range(self.eval_size))
        # Sorted, because the accuracy does not depend on the order of the test images.
        key = cache.digest(str(self.facts["digest"]), np.sort(chosen).tobytes())
        train = [self.train[i] for i in range(len(self.train))]
        test = [self.eval[i] for i in chosen]
        score = cache.remembered(
            f"digits-{key}", lambda: {"accuracy": logistic_accuracy(train, test)}
        )
        return [Reference("logistic regression", score["accuracy"], "accuracy")]


def logistic_accuracy(
    train: Iterable[tuple[np.ndarray, int]], test: Iterable[tuple[np.ndarray, int]]
) -> float:
    """Return the accuracy of multinomial logistic regression on test images.

    Features are pixels in [0, 1]. The penalty is L2 with C = 10.

    Args:
        train: Pairs of pixels [8, 8, 1] from 0 to 16 and a label.
        test: Pairs of pixels [8, 8, 1] from 0 to 16 and a label.
    """
    x, y = _stacked(train)
    x_test, y_test = _stacked(test)
    weights = images.fit_logistic(
        x.reshape(len(x), -1) / _WHITE, y, inverse_penalty=10, iterations=2000
    )
    predicted = images.predict_logistic(weights, x_test.reshape(len(x_test), -1) / _WHITE)
    return float((predicted == y_test).mean())


def _stacked(pairs: Iterable[tuple[np.ndarray, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the pixels [N, 8, 8, 1] and the labels [N] of pairs."""
    pixels, labels = zip(*pairs, strict=True)
    return np.array(pixels), np.array(labels)


def digits(config: DataConfig, model: ModelConfig, seed: int, note: cache.Note) -> DigitData:
    """Load the digits as batches, split at random or by writer as data.split says.

    The data set is prepared on disk if needed. The random split is the same for all seeds
    (`records/builders.py`). The arguments are those of `mupax.train.data.load`.
    """
    images.check_size("digits", images.vision_model("digits", model, CLASSES), _SIZE, channels=1)
    from mupax.train.data.records import builders

    builder = builders.embedded(builders.Digits, config.data_dir, note)
    source = builders.Source(builder, "train")
    records = [source[i] for i in range(len(source))]
    x = np.array([record["image"] for record in records])
    y = np.array([record["label"] for record in records]).astype(np.int32)
    held_out = np.array([record["held_out"] for record in records])
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
    """Return a mask of the test images of the split by writer, bool [N].

    The test images are the last three forms, each filled in by one writer.

    Args:
        labels: Labels in the order of the data, int [N].

    Raises:
        DataError: No form begins at `FIRST_TEST_FORM`, so the digits are in another order.
    """
    # Every form begins with 0123456789 three times, so other labels show another order.
    if not np.array_equal(labels[FIRST_TEST_FORM : FIRST_TEST_FORM + 30], np.arange(30) % 10):
        raise DataError("these digits are in another order; use data.split random")
    return np.arange(len(labels)) >= FIRST_TEST_FORM
