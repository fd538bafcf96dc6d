"""scikit-learn's handwritten digits, split at random or by writer, with logistic regression as the reference.

Every writer filled the same form: 130 digits in a fixed order, in the data as 14 runs of it with a few digits missing.
The runs are therefore known from the labels alone. The split by writer tests on the last three forms: image 1415, where
the twelfth form begins (it starts 0123456789 three times, as each does), to the end; 382 of 1,797 images. UCI counts 13
writers for 14 forms, so two forms may be of one hand; which, is not recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mupax.train.data import cache
from mupax.train.data.images import augment, batches
from mupax.train.data.interface import DataError, Reference
from mupax.zoo.configs import ModelConfig

if TYPE_CHECKING:
    from mupax.train.config.run import DataConfig

CLASSES = [str(digit) for digit in range(10)]
FIRST_TEST_FORM = 1415
_SIZE, _WHITE = 8, 16


class Arrays:
    """Images in memory: uint8 [N, H, W, C] and labels [N]."""

    def __init__(self, images_NHWC: np.ndarray, labels_N: np.ndarray) -> None:
        self.images, self.labels = images_NHWC, labels_N

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        return self.images[i], int(self.labels[i])


class DigitData(batches.ImageData):
    """Digits, with logistic regression on the same split beside them."""

    train: Arrays
    eval: Arrays

    def references(self) -> list[Reference]:
        chosen = self.eval_positions(range(self.eval_size))
        key = cache.digest(str(self.facts["digest"]), np.sort(chosen).tobytes())
        found = cache.remembered(
            f"digits-{key}", lambda: {"accuracy": logistic_accuracy(self.train, self.eval, chosen)}
        )
        return [Reference("logistic regression", found["accuracy"], "accuracy")]


def logistic_accuracy(train: Arrays, test: Arrays, chosen: np.ndarray) -> float:
    """Accuracy on the chosen test images of multinomial logistic regression on pixels in [0, 1], L2 with C = 10."""
    from sklearn.linear_model import LogisticRegression

    def flat(x: np.ndarray) -> np.ndarray:
        return x.reshape(len(x), -1) / _WHITE

    model = LogisticRegression(C=10, max_iter=2000).fit(flat(train.images), train.labels)
    return float(model.score(flat(test.images[chosen]), test.labels[chosen]))


def digits(config: DataConfig, model: ModelConfig, seed: int, note: cache.Note) -> DigitData:
    """The digits, split as data.split says: at random but always alike (builders.py), or by writer.

    Raises:
        DataError: a model that does not fit, or a cache that cannot be written.
    """
    batches.check_size("digits", batches.vision_model("digits", model, CLASSES), _SIZE, channels=1)
    from mupax.train.data.records import builders

    x, y, held_out = _read(builders.Source(builders.embedded(builders.Digits, config.data_dir, note), "train"))
    test = by_writer(y) if config.split == "writer" else held_out
    digest = cache.digest(x.tobytes(), y.tobytes(), test.tobytes())
    return DigitData(
        config,
        Arrays(x[~test], y[~test]),
        Arrays(x[test], y[test]),
        views=(augment.jitter, augment.as_is),
        white=_WHITE,
        seed=seed,
        class_names=CLASSES,
        facts={"digest": digest, "split": config.split},
    )


def _read(source: Sequence) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All images uint8 [N, 8, 8, 1], their labels int32 [N], and which the random split tests on, bool [N]."""
    records = [source[i] for i in range(len(source))]
    x, y, held_out = (np.array([r[key] for r in records]) for key in ("image", "label", "held_out"))
    return x, y.astype(np.int32), held_out


def by_writer(labels: np.ndarray) -> np.ndarray:
    """Test images of the split by writer, bool [N]: the last three forms.

    Raises:
        DataError: no form starts there, so these are not the digits this was written for.
    """
    if not np.array_equal(labels[FIRST_TEST_FORM : FIRST_TEST_FORM + 30], np.arange(30) % 10):
        raise DataError("this scikit-learn's digits are in another order; use data.split random")
    return np.arange(len(labels)) >= FIRST_TEST_FORM
