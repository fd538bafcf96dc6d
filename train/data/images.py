"""Batches of labelled images: each image once an epoch, seen through a view, which training varies and evaluation does not.

A view takes raw uint8 images and, per image, uniform random numbers in [0, 1), and returns float32 images of the
model's size in the raw range. It draws nothing itself, so a row's augmentation is a function of (seed, batch, row).

Training may vary the images further, by RandAugment, mixup and cutmix, and soften their labels.

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
import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from mupax.train.config.data import PixelsConfig, TransformsConfig
from mupax.train.data import interface
from mupax.train.data.interface import ALL_ROWS, Batch, Data, DataError
from mupax.zoo.families import ImageModel, ModelConfig

if TYPE_CHECKING:
    from mupax.train.config.data import DataConfig

GREY = 128
RANDAUG_NUMBERS = 3
"""Uniform numbers that a layer takes: which operation, and its two."""
_SIDE = 224
_ROTATION, _SHEAR, _SHIFT, _HOLE = math.radians(30), 0.3, 100 / _SIDE, 40 / _SIDE
_ADDITION, _CONTRAST = 110, _SIDE**2 // 256
_LUMA = (0.2989, 0.5870, 0.1140)

WHOLE = PixelsConfig(fit="squash")
"""What becomes of images of other sizes where all of a data set have one."""

View = Callable[[Sequence["np.ndarray"], "np.ndarray"], "np.ndarray"]
"""(B images uint8 [h, w, C], uniforms float64 [B, NUMBERS]) -> float32 [B, H, W, C]."""

NUMBERS = 5
_MAX_ROTATION = math.radians(6)
_MAX_LOG_SCALE = 0.06
_MAX_SHIFT = 0.05  # of the image's size
_PAD = 0.125  # of the image's size


def randaugmented(
    images: np.ndarray, uniforms: np.ndarray, magnitude: float, white: float = 255.0
) -> np.ndarray:
    """Images after RandAugment, float32 [B, H, W, C] in their own range.

    Args:
        images: float32 [B, H, W, C] from 0 to white, rounded to 256 levels here.
        uniforms: [B, layers, RANDAUG_NUMBERS] in [0, 1).
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
    return np.clip(degenerate + factor * (image.astype(np.float32) - degenerate), 0, 255).astype(
        np.uint8
    )


def moved(image: np.ndarray, matrix: tuple[float, ...]) -> np.ndarray:
    """The image whose pixel (x, y) is the nearest to (a x + b y + c, d x + e y + f) of this one, grey where there is none.

    Args:
        image: uint8 [H, W, C].
        matrix: a to f.
    """
    H, W, _ = image.shape
    y, x = np.mgrid[:H, :W]
    a, b, c, d, e, f = matrix
    columns, rows = (
        np.trunc(at + np.copysign(0.5, at)).astype(int)
        for at in (a * x + b * y + c, d * x + e * y + f)
    )
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
    cos, sin, x, y = (
        math.cos(angle),
        math.sin(angle),
        (image.shape[1] - 1) / 2,
        (image.shape[0] - 1) / 2,
    )
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
    "shear_x": lambda image, strength, u: moved(
        image, (1, _signed(_SHEAR * strength, u), 0, 0, 1, 0)
    ),
    "shear_y": lambda image, strength, u: moved(
        image, (1, 0, 0, _signed(_SHEAR * strength, u), 1, 0)
    ),
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
    def shown(
        self, k: int, rows: np.ndarray, examples: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
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
            return {
                "inputs": inputs,
                "targets": targets,
                "weights": np.ones(len(targets), np.float32),
            }
        group = transforms.mix_group or self.batch_size
        before = own - own % group + (own - 1) % group
        positions, places = np.unique(np.concatenate([own, before]), return_inverse=True)
        inputs, targets = self._transformed(k, positions)
        labels = soft_labels(targets, len(self.class_names or ()), transforms.label_smoothing)
        first, second = places[: len(own)], places[len(own) :]
        targets = targets[first]
        if transforms.mixup or transforms.cutmix:
            mix = drawn(
                transforms, interface.rng(self.seed, interface.MIXING, k), *inputs.shape[1:3]
            )
            inputs, labels = (
                mix.image(inputs[first], inputs[second]),
                mix.label(labels[first], labels[second]),
            )
        else:
            inputs, labels = inputs[first], labels[first]
        return {
            "inputs": inputs,
            "targets": targets,
            "weights": np.ones(len(targets), np.float32),
            "labels": labels,
        }

    def _transformed(self, k: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """float32 [b, H, W, C] as a model reads them, and int32 [b]."""
        transforms = self.config.transforms
        different = self.batch_size // transforms.repeats
        raw, targets = self.shown(k, rows, k * different + rows % different)
        if transforms.randaug_layers is not None:
            shape = (self.batch_size, transforms.randaug_layers, RANDAUG_NUMBERS)
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


class Images(Protocol):
    """Labelled images, fetched by index from any thread."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> tuple[np.ndarray, int]:
        """(uint8 [h, w, C], label)."""
        ...


@runtime_checkable
class ScalableImages(Images, Protocol):
    """Labelled images that can be decoded at less than their full size, which is quicker."""

    def at_least(self, i: int, side: int | None, /) -> tuple[np.ndarray, int]:
        """Return an image whose sides both have so many pixels at least, and its label; the full image where `side` is None."""
        ...


@runtime_checkable
class ScaledView(Protocol):
    """A view that scales images down, and says how large they have to be for that."""

    def __call__(self, images: Sequence[np.ndarray], uniforms: np.ndarray, /) -> np.ndarray: ...

    def least_side(self, uniforms: np.ndarray, /) -> int:
        """Return the pixels that the shorter side of an image needs, by its uniforms."""
        ...


class ImageData(LabelledData):
    """Labelled images as batches, in [-1, 1] unless data.pixels says otherwise.

    Args:
        config: sizes of batches, and whether to augment.
        train: training images.
        eval_: evaluation images, of which the first so many of a fixed shuffled order may be used.
        views: what training shows of them, and what evaluation shows; that of evaluation for both where data.augment is off.
        white: the raw value that counts as 1; 0 is 0.
        seed: seed of the order and of the views.
        threads: how many make batches; decoding image files keeps many busy.
        class_names: a name per label.
        pixels: what becomes of an image of another size or range, as a record has it for those who use the model; where all
            images are of one size, squashing is what no image of the data needs.
        facts: what to record.
    """

    def __init__(
        self,
        config: DataConfig,
        train: Images,
        eval_: Images,
        *,
        views: tuple[View, View],
        white: float = 255.0,
        seed: int,
        threads: int = 2,
        class_names: list[str],
        pixels: PixelsConfig = WHOLE,
        facts: dict[str, Any],
    ) -> None:
        sizes = {"train_images": len(train), "eval_images": len(eval_), "classes": len(class_names)}
        super().__init__(
            config,
            facts={**facts, **sizes, "pixels": dataclasses.asdict(pixels)},
            train_size=len(train),
            eval_size=len(eval_),
            threads=threads,
            class_names=class_names,
        )
        self.train, self.eval = train, eval_
        self._train_view, self._eval_view = views if config.augment else (views[1], views[1])
        self.pixels, self.white, self.seed = pixels, white, seed
        self._shuffle = interface.Shuffle(len(train), seed)
        self._eval_shuffle = interface.Shuffle(len(eval_), 0, interface.EVALUATION)

    def shown(
        self, k: int, rows: np.ndarray, examples: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        _, positions = self._shuffle(examples)
        uniforms = interface.rng(self.seed, interface.AUGMENTATION, k).random(
            (self.batch_size, NUMBERS)
        )
        return self._batch(self.train, positions, self._train_view, uniforms[rows])

    def eval_batch(self, j: int, rows: slice = ALL_ROWS) -> Batch:
        indices = np.array(interface.batch_indices(j, self.eval_batch_size, rows))
        # A row past the end shows the first image again, at weight 0.
        positions = self.eval_positions(np.where(indices < self.eval_size, indices, 0))
        raw, targets = self._batch(
            self.eval, positions, self._eval_view, np.zeros((len(positions), NUMBERS))
        )
        inputs = normalized(raw, self.pixels, self.white)
        return {
            "inputs": inputs,
            "targets": targets,
            "weights": (indices < self.eval_size).astype(np.float32),
        }

    def eval_positions(self, indices: np.ndarray | range) -> np.ndarray:
        """Which evaluation images the examples `indices` are, int64: the fixed shuffled order."""
        return self._eval_shuffle(indices)[1]

    def _batch(
        self, source: Images, positions: np.ndarray, view: View, uniforms: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Raw float32 [b, H, W, C] and int32 [b] of the images at `positions`."""
        if isinstance(source, ScalableImages):
            # One by one: photographs of 100 megapixels do not fit into memory together.
            shown = []
            labels = []
            for position, row in zip(positions, uniforms, strict=True):
                side = view.least_side(row) if isinstance(view, ScaledView) else None
                image, label = source.at_least(int(position), side)
                shown.append(view([image], row[None]))
                labels.append(label)
            return np.concatenate(shown), np.array(labels, np.int32)
        examples = [source[int(i)] for i in positions]
        labels = np.array([label for _, label in examples], np.int32)
        return view([image for image, _ in examples], uniforms), labels


def vision_model(name: str, model: ModelConfig, class_names: Sequence[str]) -> ImageModel:
    """The model, if it reads images and has one output per class.

    Args:
        name, model: what an error calls the data, and the model of the run.
        class_names: of the data, one per label.

    Raises:
        DataError: it does not.
    """
    if not isinstance(model, ImageModel):
        raise DataError(
            f"data {name!r} is images, and the model reads text; write a vision model such as vit-tiny"
        )
    if model.num_classes != len(class_names):
        raise DataError(
            f"data {name!r} has {len(class_names)} classes and the model {model.num_classes}; "
            f"write --model.num-classes {len(class_names)}"
        )
    return model


def check_size(name: str, model: ImageModel, size: int, channels: int) -> None:
    """Refuse images of another size than the model reads.

    Args:
        name, model: what an error calls the data, and the model of the run.
        size, channels: of the data's images: pixels on a side, and 1 for grey or 3 for colour.

    Raises:
        DataError: it reads another size or number of channels; the text says what to write.
    """
    if (model.image_size, model.channels) != (size, channels):
        raise DataError(
            f"data {name!r} has images of {size} x {size} pixels with {channels} channels, the model reads "
            f"{model.image_size} x {model.image_size} with {model.channels}; "
            f"write --model.image-size {size} --model.channels {channels}"
        )


def as_is(images: Sequence[np.ndarray], uniforms: np.ndarray) -> np.ndarray:
    """Images that have the model's size already, unchanged.

    Args:
        images, uniforms: as a `View` takes them; no number is used.
    """
    return np.stack(images).astype(np.float32)


def jitter(images: Sequence[np.ndarray], uniforms: np.ndarray) -> np.ndarray:
    """A small rotation, scale and shift about the centre, bilinear, black outside: for small drawings like digits.

    Args:
        images, uniforms: as a `View` takes them, images of one size; numbers 0 to 3 are angle, scale, down and right.
    """
    x_BHWC = np.stack(images).astype(np.float32)
    _, H, W, _ = x_BHWC.shape
    angle, log_scale, down, right = (2 * uniforms[:, :4].T - 1) * np.array(
        [_MAX_ROTATION, _MAX_LOG_SCALE, _MAX_SHIFT * H, _MAX_SHIFT * W]
    )[:, None]
    scale = np.exp(log_scale)
    y, x = np.arange(H) - (H - 1) / 2, np.arange(W) - (W - 1) / 2
    cos, sin = (np.cos(angle) / scale)[:, None, None], (np.sin(angle) / scale)[:, None, None]
    y_BHW, x_BHW = y[None, :, None] - down[:, None, None], x[None, None, :] - right[:, None, None]
    return _bilinear(
        x_BHWC, cos * y_BHW - sin * x_BHW + (H - 1) / 2, sin * y_BHW + cos * x_BHW + (W - 1) / 2
    )


def _bilinear(images: np.ndarray, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """images [B, H, W, C] at the points (y, x) [B, h, w], zero outside."""
    B, H, W, _ = images.shape
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    y, x = np.clip(y + 1, 0, H + 1 - 1e-6), np.clip(x + 1, 0, W + 1 - 1e-6)
    top, left = np.floor(y).astype(int), np.floor(x).astype(int)
    dy, dx = (y - top)[..., None], (x - left)[..., None]
    row = np.arange(B)[:, None, None]
    upper = padded[row, top, left] * (1 - dx) + padded[row, top, left + 1] * dx
    lower = padded[row, top + 1, left] * (1 - dx) + padded[row, top + 1, left + 1] * dx
    return (upper * (1 - dy) + lower * dy).astype(np.float32)


def shift_and_flip(images: Sequence[np.ndarray], uniforms: np.ndarray) -> np.ndarray:
    """A crop of the mirror-padded image at a random place, and a mirror image half of the time: CIFAR's usual view.

    Args:
        images, uniforms: as a `View` takes them, images of one size; numbers 0 to 2 are down, right and the mirror.
    """
    x_BHWC = np.stack(images)
    B, H, W, _ = x_BHWC.shape
    p, q = round(_PAD * H), round(_PAD * W)
    padded = np.pad(x_BHWC, ((0, 0), (p, p), (q, q), (0, 0)), mode="reflect")
    u, v, mirror, *_ = uniforms.T
    columns = np.where(mirror[:, None] < 0.5, np.arange(W)[::-1], np.arange(W))
    y = (u * (2 * p + 1)).astype(int)[:, None] + np.arange(H)
    x = (v * (2 * q + 1)).astype(int)[:, None] + columns
    return padded[np.arange(B)[:, None, None], y[:, :, None], x[:, None, :]].astype(np.float32)


class DigitImages(NamedTuple):
    """The test part of UCI's "optical recognition of handwritten digits" (Alpaydin and Kaynak 1998, CC BY 4.0).

    The order is that in which scikit-learn ships them.

    Attributes:
        pixels: uint8 [1797, 8, 8], from 0 (white) to 16.
        labels: uint8 [1797].
        held_out: bool [1797], the usual stratified fifth: scikit-learn's `train_test_split` from state 0.
    """

    pixels: np.ndarray
    labels: np.ndarray
    held_out: np.ndarray


def read_digits() -> DigitImages:
    """Read the handwritten digits that come with this package."""
    with np.load(Path(__file__).with_name("digits.npz")) as arrays:
        return DigitImages(arrays["pixels"], arrays["labels"], arrays["held_out"])


def fit_logistic(
    x: np.ndarray, y: np.ndarray, *, inverse_penalty: float, iterations: int
) -> np.ndarray:
    """Fit logistic regression by L-BFGS and return its weights, float [features + 1, classes]; the last row is the biases.

    Args:
        x: features [examples, features].
        y: classes from 0, all of them present [examples].
        inverse_penalty: C, where squared weights but biases cost 1 / (2 C) beside the summed loss.
        iterations: of L-BFGS at most.
    """
    from scipy.optimize import minimize
    from scipy.special import log_softmax

    features = _with_ones(x)
    targets = np.eye(int(y.max()) + 1, dtype=features.dtype)[y]
    penalty = np.full((features.shape[1], 1), 1 / inverse_penalty, features.dtype)
    penalty[-1] = 0

    def loss_and_gradient(flat: np.ndarray) -> tuple[float, np.ndarray]:
        # NumPy would widen float32 features to float64 at every product.
        weights = flat.reshape(features.shape[1], -1).astype(features.dtype)
        log_probs = log_softmax(features @ weights, axis=1)
        loss = (penalty * weights**2).sum() / 2 - (targets * log_probs).sum()
        gradient = features.T @ (np.exp(log_probs) - targets) + penalty * weights
        return float(loss) / len(x), gradient.ravel().astype(float) / len(x)

    start = np.zeros(features.shape[1] * targets.shape[1])
    limits = {"maxiter": iterations, "gtol": 1e-4, "maxls": 50, "ftol": 64 * np.finfo(float).eps}
    fitted = minimize(loss_and_gradient, start, jac=True, method="L-BFGS-B", options=limits)
    return fitted.x.reshape(features.shape[1], -1)


def predict_logistic(weights: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return the likeliest class of every example.

    Args:
        weights: as `fit_logistic` returns them.
        x: features [examples, features].
    """
    return (_with_ones(x) @ weights).argmax(1)


def _with_ones(x: np.ndarray) -> np.ndarray:
    return np.hstack([x, np.ones((len(x), 1), x.dtype)])
