"""Batches of labelled images: each image once an epoch, seen through a view that training varies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mupax.train.data import order
from mupax.train.data.images import augment
from mupax.train.data.interface import ALL_ROWS, Batch, Data, DataError
from mupax.zoo.families import ImageModel, ModelConfig

if TYPE_CHECKING:
    from mupax.train.config.sections import DataConfig


class Images(Protocol):
    """Labelled images, fetched by index from any thread."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> tuple[np.ndarray, int]:
        """(uint8 [h, w, C], label)."""
        ...


class ImageData(Data):
    """Labelled images as batches in [-1, 1].

    Args:
        config: sizes of batches, and whether to augment.
        train: training images.
        eval_: evaluation images, of which the first so many of a fixed shuffled order may be used.
        views: what training shows of them, and what evaluation shows; that of evaluation for both where data.augment is off.
        white: the raw value that becomes 1; 0 becomes -1.
        seed: seed of the order and of the views.
        threads: how many make batches; decoding image files keeps many busy.
        class_names: a name per label.
        facts: what to record.
    """

    kind = "images"

    def __init__(
        self,
        config: DataConfig,
        train: Images,
        eval_: Images,
        *,
        views: tuple[augment.View, augment.View],
        white: float = 255.0,
        seed: int,
        threads: int = 2,
        class_names: list[str],
        facts: dict[str, Any],
    ) -> None:
        super().__init__(
            config,
            facts={**facts, "train_images": len(train), "eval_images": len(eval_), "classes": len(class_names)},
            train_size=len(train),
            eval_size=len(eval_),
            threads=threads,
            class_names=class_names,
        )
        self.train, self.eval = train, eval_
        self._train_view, self._eval_view = views if config.augment else (views[1], views[1])
        self._white, self._seed = white, seed
        self._shuffle = order.Shuffle(len(train), seed)
        self._eval_shuffle = order.Shuffle(len(eval_), 0, order.EVALUATION)

    def train_batch(self, k: int, rows: slice = ALL_ROWS) -> Batch:
        _, positions = self._shuffle(order.batch_indices(k, self.batch_size, rows))
        numbers = order.rng(self._seed, order.AUGMENTATION, k).random((self.batch_size, augment.NUMBERS))
        inputs, targets = self._seen(self.train, positions, self._train_view, numbers[rows])
        return {"inputs": inputs, "targets": targets, "weights": np.ones(len(targets), np.float32)}

    def eval_batch(self, j: int, rows: slice = ALL_ROWS) -> Batch:
        indices = np.array(order.batch_indices(j, self.eval_batch_size, rows))
        # A row past the end shows the first image again, at weight 0.
        positions = self.eval_positions(np.where(indices < self.eval_size, indices, 0))
        inputs, targets = self._seen(self.eval, positions, self._eval_view, np.zeros((len(positions), augment.NUMBERS)))
        return {"inputs": inputs, "targets": targets, "weights": (indices < self.eval_size).astype(np.float32)}

    def eval_positions(self, indices: np.ndarray | range) -> np.ndarray:
        """Which evaluation images the examples `indices` are, int64: the fixed shuffled order."""
        return self._eval_shuffle(indices)[1]

    def _seen(
        self, source: Images, positions: np.ndarray, view: augment.View, numbers: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """float32 [b, H, W, C] in [-1, 1] and int32 [b] of the images at `positions`."""
        found = [source[int(i)] for i in positions]
        raw = view([image for image, _ in found], numbers)
        return raw * np.float32(2 / self._white) - np.float32(1), np.array([label for _, label in found], np.int32)


def vision_model(name: str, model: ModelConfig, class_names: Sequence[str]) -> ImageModel:
    """The model, if it reads images and has one output per class.

    Raises:
        DataError: it does not.
    """
    if not isinstance(model, ImageModel):
        raise DataError(f"data {name!r} is images, and the model reads text; write a vision model such as vit-tiny")
    if model.num_classes != len(class_names):
        raise DataError(
            f"data {name!r} has {len(class_names)} classes and the model {model.num_classes}; "
            f"write --model.num-classes {len(class_names)}"
        )
    return model


def check_size(name: str, model: ImageModel, size: int, channels: int) -> None:
    """Raises DataError unless the model reads size x size images of so many channels."""
    if (model.image_size, model.channels) != (size, channels):
        raise DataError(
            f"data {name!r} has images of {size} x {size} pixels with {channels} channels, the model reads "
            f"{model.image_size} x {model.image_size} with {model.channels}; "
            f"write --model.image-size {size} --model.channels {channels}"
        )
