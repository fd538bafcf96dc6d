"""Training batches of labelled images: which of them a batch shows, RandAugment, mixup and cutmix, and labels that are soft.

Everything is a function of (seed, batch, row), so a resumed run and any number of processes see the same; a process whose rows
are mixed with another's makes that one too.

RandAugment (Cubuk et al. 2019, arXiv 1909.13719) is 16 operations on images, each as strong as one magnitude says.
Operations, strengths and their quirks are those of big_vision's `randaug`, itself that of Google's EfficientNet: an image goes
through so many, drawn from all with equal chance; what moves out of sight leaves grey (128) behind; contrast pulls away from the
constant 196 (there the number of pixels of a 224 x 224 image over 256, where PIL has the mean). Lengths, which it has in
pixels, are here in proportion to a side of 224. `tests/train/data/test_randaug.py` holds each against PIL or a formula.

Images are uint8 [H, W, C]; a strength is in [0, 1], the magnitude over 10; uniforms u are two numbers in [0, 1).
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mupax.train.config.data import PixelsConfig, TransformsConfig
from mupax.train.data import interface
from mupax.train.data.interface import ALL_ROWS, Batch, Data

GREY = 128
NUMBERS = 3
"""Uniform numbers that a layer takes: which operation, and its two."""
_SIDE = 224
_ROTATION, _SHEAR, _SHIFT, _HOLE = math.radians(30), 0.3, 100 / _SIDE, 40 / _SIDE
_ADDITION, _CONTRAST = 110, _SIDE**2 // 256
_LUMA = (0.2989, 0.5870, 0.1140)

WHOLE = PixelsConfig(fit="squash")
"""What becomes of images of other sizes where all of a data set have one."""


def randaugmented(images: np.ndarray, uniforms: np.ndarray, magnitude: float, white: float = 255.0) -> np.ndarray:
    """Images after RandAugment, float32 [B, H, W, C] in their own range.

    Args:
        images: float32 [B, H, W, C] from 0 to white, rounded to 256 levels here.
        uniforms: [B, layers, NUMBERS] in [0, 1).
        magnitude: from 0 to 10.
        white: the value that counts as 1.
    """
    levels = np.clip(np.rint(images * (255 / white)), 0, 255).astype(np.uint8)
    operations = list(OPERATIONS.values())
    for image, layers in zip(levels, uniforms, strict=True):
        for which, *u in layers:
            image[...] = operations[int(which * len(operations))](image, magnitude / 10, u)
    return levels.astype(np.float32) * np.float32(white / 255)


def blended(degenerate: np.ndarray | float, image: np.ndarray, strength: float) -> np.ndarray:
    """The image away from a degenerate one: degenerate + factor (image - degenerate), cut to 0..255 and rounded down.

    Args:
        degenerate: of the image's shape, or one number.
        image: uint8.
        strength: 0 to 1, a factor of 0.1 to 1.9.
    """
    factor = 1.8 * strength + 0.1
    return np.clip(degenerate + factor * (image.astype(np.float32) - degenerate), 0, 255).astype(np.uint8)


def moved(image: np.ndarray, matrix: tuple[float, ...]) -> np.ndarray:
    """The image whose pixel (x, y) is the nearest to (a x + b y + c, d x + e y + f) of this one, grey where there is none.

    Args:
        image: uint8 [H, W, C].
        matrix: a to f.
    """
    H, W, _ = image.shape
    y, x = np.mgrid[:H, :W]
    a, b, c, d, e, f = matrix
    columns, rows = (np.trunc(at + np.copysign(0.5, at)).astype(int) for at in (a * x + b * y + c, d * x + e * y + f))
    inside = (rows >= 0) & (rows < H) & (columns >= 0) & (columns < W)
    pixels = image[np.clip(rows, 0, H - 1), np.clip(columns, 0, W - 1)]
    return np.where(inside[..., None], pixels, np.uint8(GREY))


def _signed(size: float, u: list[float]) -> float:
    return size if u[0] < 0.5 else -size


def _autocontrast(image: np.ndarray, strength: float, u: list[float]) -> np.ndarray:
    low, high = (of(image, axis=(0, 1)).astype(float) for of in (np.min, np.max))
    scale = 255 / np.where(high > low, high - low, 255)
    stretched = np.clip(image * scale - np.where(high > low, low, 0) * scale, 0, 255)
    return stretched.astype(np.uint8)


def _equalize(image: np.ndarray, strength: float, u: list[float]) -> np.ndarray:
    return np.stack([_equalized(image[..., c]) for c in range(image.shape[-1])], axis=-1)


def _equalized(channel: np.ndarray) -> np.ndarray:
    counts = np.bincount(channel.ravel(), minlength=256)
    step = (channel.size - counts[channel.max()]) // 255
    if step == 0:
        return channel
    below = np.cumsum(counts) - counts
    return np.clip((below + step // 2) // step, 0, 255).astype(np.uint8)[channel]


def _rotate(image: np.ndarray, strength: float, u: list[float]) -> np.ndarray:
    angle = _signed(_ROTATION * strength, u)
    cos, sin, x, y = math.cos(angle), math.sin(angle), (image.shape[1] - 1) / 2, (image.shape[0] - 1) / 2
    return moved(image, (cos, -sin, x - cos * x + sin * y, sin, cos, y - sin * x - cos * y))


def _posterize(image: np.ndarray, strength: float, u: list[float]) -> np.ndarray:
    shift = 8 - int(strength * 4)
    return (image.astype(int) >> shift << shift).astype(np.uint8)


def _solarize(image: np.ndarray, strength: float, u: list[float]) -> np.ndarray:
    return np.where(image.astype(int) < int(strength * 256), image, 255 - image)


def _solarize_add(image: np.ndarray, strength: float, u: list[float]) -> np.ndarray:
    added = np.minimum(image.astype(int) + int(strength * _ADDITION), 255).astype(np.uint8)
    return np.where(image < 128, added, image)


def _color(image: np.ndarray, strength: float, u: list[float]) -> np.ndarray:
    if image.shape[-1] == 1:
        return image
    grey = np.floor(image @ np.array(_LUMA) * (255.5 / 255))
    return blended(grey[..., None].astype(np.float32), image, strength)


def _sharpness(image: np.ndarray, strength: float, u: list[float]) -> np.ndarray:
    x, (H, W, _) = image.astype(np.float32), image.shape
    window = sum(x[i : H - 2 + i, j : W - 2 + j] for i in range(3) for j in range(3))
    smooth = x.copy()  # as it is along the edge
    smooth[1:-1, 1:-1] = np.floor((window + 4 * x[1:-1, 1:-1]) / 13)
    return blended(smooth, image, strength)


def _cutout(image: np.ndarray, strength: float, u: list[float]) -> np.ndarray:
    (H, W, _), out = image.shape, image.copy()
    row, column, half = int(u[0] * H), int(u[1] * W), int(strength * _HOLE * H)
    out[max(0, row - half) : row + half, max(0, column - half) : column + half] = GREY
    return out


OPERATIONS: dict[str, Callable[[np.ndarray, float, list[float]], np.ndarray]] = {
    "autocontrast": _autocontrast,
    "equalize": _equalize,
    "invert": lambda image, strength, u: 255 - image,
    "rotate": _rotate,
    "posterize": _posterize,
    "solarize": _solarize,
    "solarize_add": _solarize_add,
    "color": _color,
    "contrast": lambda image, strength, u: blended(_CONTRAST, image, strength),
    "brightness": lambda image, strength, u: blended(0, image, strength),
    "sharpness": _sharpness,
    "shear_x": lambda image, strength, u: moved(image, (1, _signed(_SHEAR * strength, u), 0, 0, 1, 0)),
    "shear_y": lambda image, strength, u: moved(image, (1, 0, 0, _signed(_SHEAR * strength, u), 1, 0)),
    "translate_x": lambda image, strength, u: moved(
        image, (1, 0, _signed(_SHIFT * strength * image.shape[1], u), 0, 1, 0)
    ),
    "translate_y": lambda image, strength, u: moved(
        image, (1, 0, 0, 0, 1, _signed(_SHIFT * strength * image.shape[0], u))
    ),
    "cutout": _cutout,
}
"""Name to (image, strength, uniforms) -> image. Solarize spares every pixel at full strength, as its threshold is then 256."""


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
            mix = drawn(transforms, interface.rng(self.seed, interface.MIXING, k), *inputs.shape[1:3])
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
            shape = (self.batch_size, transforms.randaug_layers, NUMBERS)
            uniforms = interface.rng(self.seed, interface.RANDAUG, k).random(shape)[rows]
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
