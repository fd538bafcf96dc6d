"""Training batches of labelled images: which of them a batch shows, RandAugment, mixup and cutmix, and labels that are soft.

Everything is a function of (seed, batch, row), so a resumed run and any number of processes see the same; a process whose rows
are mixed with another's makes that one too.
"""

from __future__ import annotations

import abc
from typing import NamedTuple

import numpy as np

from mupax.train.config.data import PixelsConfig, TransformsConfig
from mupax.train.data import order
from mupax.train.data.interface import ALL_ROWS, Batch, Data

WHOLE = PixelsConfig(fit="squash")
"""What becomes of images of other sizes where all of a data set have one."""


class Mix(NamedTuple):
    """How a batch is mixed: every image with the one before it, the first (of a group) with the last."""

    share: float
    """Of a row's own label, and in mixup of its image."""
    box: tuple[slice, slice] | None = None
    """cutmix: rows and columns that are the other image's; mixup where there is none."""

    def image(self, own: np.ndarray, other: np.ndarray) -> np.ndarray:
        """Mixed images of two.

        Args:
            own, other: float32 [b, H, W, C] of the rows and of those before them.
        """
        if self.box is None:
            return np.float32(self.share) * own + np.float32(1 - self.share) * other
        mixed = own.copy()
        mixed[:, *self.box] = other[:, *self.box]
        return mixed

    def label(self, own: np.ndarray, other: np.ndarray) -> np.ndarray:
        """Mixed labels of two.

        Args:
            own, other: float32 [b, classes] of the rows and of those before them.
        """
        return np.float32(self.share) * own + np.float32(1 - self.share) * other


def drawn(transforms: TransformsConfig, rng: np.random.Generator, height: int, width: int) -> Mix:
    """How one batch is mixed; where both mixup and cutmix are asked for, by one of them with equal chance.

    mixup: a share of max(l, 1 - l), l ~ Beta(alpha, alpha), so that a row's own label is the larger one (big_vision). cutmix: a box
    about a point drawn evenly, of area 1 - l before it is cut at the image's edge, l ~ Beta(alpha, alpha) (Yun et al. 2019, their
    algorithm 1); the share is what is left of the image.

    Args:
        transforms: have mixup and cutmix.
        rng: of the batch.
        height, width: of the images.
    """
    boxed = transforms.cutmix and (not transforms.mixup or rng.random() < 0.5)
    if not boxed:
        share = rng.beta(transforms.mixup, transforms.mixup) if transforms.mixup else 1.0
        return Mix(float(max(share, 1 - share)))
    side = np.sqrt(1 - rng.beta(transforms.cutmix, transforms.cutmix))
    y, x = rng.integers(height), rng.integers(width)
    half_y, half_x = int(height * side) // 2, int(width * side) // 2
    top, left = max(0, y - half_y), max(0, x - half_x)
    bottom, right = min(height, y + half_y), min(width, x + half_x)
    area = (bottom - top) * (right - left)
    return Mix(1 - area / (height * width), (slice(top, bottom), slice(left, right)))


def soft_labels(targets: np.ndarray, classes: int, smoothing: float) -> np.ndarray:
    """Labels as distributions, float32 [b, classes]: 1 - smoothing on the class, and smoothing shared by all alike.

    Args:
        targets: int32 [b].
        classes: how many.
        smoothing: in [0, 1).
    """
    labels = np.full((len(targets), classes), smoothing / classes, np.float32)
    labels[np.arange(len(targets)), targets] += np.float32(1 - smoothing)
    return labels


class LabelledData(Data):
    """Labelled images of which training shows transformed ones. `labels`, float32 [B, classes], are in a batch where they are soft."""

    kind = "images"
    seed: int
    """Of the order and of all that is drawn."""
    white: float = 255.0
    """The raw value that counts as 1; 0 is 0."""
    pixels: PixelsConfig = WHOLE
    """What becomes of values."""

    @abc.abstractmethod
    def shown(self, k: int, rows: np.ndarray, examples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Raw images float32 [b, H, W, C] from 0 to white, and classes int32 [b].

        Args:
            k: number of the batch.
            rows: of it, int64 [b].
            examples: which example of the run each row is, int64 [b].
        """

    def train_batch(self, k: int, rows: slice = ALL_ROWS) -> Batch:
        transforms, own = self.config.transforms, np.arange(self.batch_size)[rows]
        if not transforms.soft:
            inputs, targets = self._transformed(k, own)
            return {"inputs": inputs, "targets": targets, "weights": np.ones(len(targets), np.float32)}
        group = transforms.mix_group or self.batch_size
        before = own - own % group + (own - 1) % group
        positions, places = np.unique(np.concatenate([own, before]), return_inverse=True)
        inputs, targets = self._transformed(k, positions)
        labels = soft_labels(targets, len(self.class_names or ()), transforms.label_smoothing)
        first, second = places[: len(own)], places[len(own) :]
        targets = targets[first]
        if transforms.mixup or transforms.cutmix:
            mix = drawn(transforms, order.rng(self.seed, order.MIXING, k), *inputs.shape[1:3])
            inputs, labels = mix.image(inputs[first], inputs[second]), mix.label(labels[first], labels[second])
        else:
            inputs, labels = inputs[first], labels[first]
        return {"inputs": inputs, "targets": targets, "weights": np.ones(len(targets), np.float32), "labels": labels}

    def _transformed(self, k: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """float32 [b, H, W, C] as a model reads them, and int32 [b]."""
        transforms = self.config.transforms
        different = self.batch_size // transforms.repeats
        raw, targets = self.shown(k, rows, k * different + rows % different)
        if transforms.randaug_layers is not None:
            from mupax.train.data.randaug import NUMBERS, randaugmented

            shape = (self.batch_size, transforms.randaug_layers, NUMBERS)
            uniforms = order.rng(self.seed, order.RANDAUG, k).random(shape)[rows]
            raw = randaugmented(raw, uniforms, transforms.randaug_magnitude, self.white)
        return normalized(raw, self.pixels, self.white), targets


def normalized(raw: np.ndarray, pixels: PixelsConfig, white: float = 255.0) -> np.ndarray:
    """Images as a model reads them: (raw / white - mean) / std, float32; 2 * raw / white - 1 where both are a half.

    Args:
        raw: float32 [B, H, W, C].
        pixels: has mean and std.
        white: the raw value that counts as 1.
    """
    mean, std = np.array(pixels.mean), np.array(pixels.std)
    return raw * (1 / (white * std)).astype(np.float32) - (mean / std).astype(np.float32)
