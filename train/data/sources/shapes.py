"""Batches of an image set that never ends: no epochs, no order to shuffle, nothing to prepare."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mupax.train.data import cache, order
from mupax.train.data.images import batches
from mupax.train.data.interface import ALL_ROWS, Batch, Data, Reference
from mupax.train.data.records import shapes
from mupax.zoo.configs import ModelConfig

if TYPE_CHECKING:
    import numpy as np

    from mupax.train.config.run import DataConfig

EVAL_IMAGES = 10_000
"""Evaluation images, the same for every seed; data.eval_examples takes the first so many, or more."""
_EVAL_SEED = 0
LINEAR_IMAGES = 20_000
"""Images that the linear model beside a run is fitted to."""


class EndlessData(Data):
    """Striped shapes (shapes.py): image i of a run is image i of its seed's stream, and no image comes twice.

    Args:
        seed: seed of the training stream.
        batch_size: images per batch.
        eval_batch_size: images per evaluation batch; batch_size unless given.
        eval_examples: evaluation images.
    """

    kind = "images"

    def __init__(self, *, seed: int, batch_size: int, eval_batch_size: int | None, eval_examples: int | None) -> None:
        eval_size = eval_examples or EVAL_IMAGES
        facts = {"name": "shapes", "digest": cache.digest(shapes.VERSION), "classes": len(shapes.CLASSES)}
        super().__init__(
            facts={**facts, "train_images": shapes.LENGTH, "eval_images": eval_size},
            train_size=shapes.LENGTH,
            eval_size=eval_size,
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            class_names=shapes.CLASSES,
        )
        self._seed = seed

    def train_batch(self, k: int, rows: slice = ALL_ROWS) -> Batch:
        import numpy as np

        inputs, targets = _seen(self._seed, shapes.TRAIN, np.array(order.batch_indices(k, self.batch_size, rows)))
        return {"inputs": inputs, "targets": targets, "weights": np.ones(len(targets), np.float32)}

    def eval_batch(self, j: int, rows: slice = ALL_ROWS) -> Batch:
        import numpy as np

        indices = np.array(order.batch_indices(j, self.eval_batch_size, rows))
        counts = indices < self.eval_size
        # A row past the end shows the first image again, at weight 0.
        inputs, targets = _seen(_EVAL_SEED, shapes.EVAL, np.where(counts, indices, 0))
        return {"inputs": inputs, "targets": targets, "weights": counts.astype(np.float32)}

    def references(self) -> list[Reference]:
        key = cache.digest(shapes.VERSION, f"{LINEAR_IMAGES} {self.eval_size}")
        found = cache.remembered(f"shapes-{key}", lambda: {"accuracy": linear_accuracy(LINEAR_IMAGES, self.eval_size)})
        return [Reference("logistic regression", found["accuracy"], "accuracy")]


def linear_accuracy(train_images: int, eval_images: int) -> float:
    """Accuracy on the evaluation images of multinomial logistic regression on pixels, fitted to so many of seed 0."""
    import numpy as np
    from sklearn.linear_model import LogisticRegression

    x, y = _seen(0, shapes.TRAIN, np.arange(train_images))
    # Weak pixels want a strong penalty: without one the many weights fit chance alone.
    model = LogisticRegression(C=1e-4, max_iter=100).fit(x.reshape(len(x), -1), y)
    correct = 0.0
    for start in range(0, eval_images, 5000):
        x, y = _seen(_EVAL_SEED, shapes.EVAL, np.arange(start, min(start + 5000, eval_images)))
        correct += float((model.predict(x.reshape(len(x), -1)) == y).sum())
    return correct / eval_images


def striped_shapes(config: DataConfig, model: ModelConfig, seed: int, note: cache.Note) -> EndlessData:
    """The endless set of striped shapes; there is nothing to augment.

    Raises:
        DataError: a model that does not fit.
    """
    vision = batches.vision_model("shapes", model, shapes.CLASSES)
    batches.check_size("shapes", vision, shapes.SIZE, channels=3)
    return EndlessData(
        seed=seed,
        batch_size=config.batch_size,
        eval_batch_size=config.eval_batch_size,
        eval_examples=config.eval_examples,
    )


def _seen(seed: int, stream: int, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32 [b, H, W, C] in [-1, 1] and int32 [b]."""
    import numpy as np

    raw, labels = shapes.render(seed, stream, indices)
    return raw.astype(np.float32) * np.float32(2 / 255) - np.float32(1), labels
