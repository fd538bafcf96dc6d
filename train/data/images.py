"""Batches of labelled images: views, RandAugment, mixup, cutmix and soft labels.

Every epoch has each image once, seen through a view. A view takes raw uint8 images and uniform
random numbers in [0, 1) for each image. It returns float32 images of the model's size in the raw
range. A view draws nothing itself, so a row is a function of (seed, batch, row): a resumed run and
any number of processes see the same images. A process whose rows are mixed with rows of another
process makes those rows, too. Evaluation uses a view that does not vary.

RandAugment (Cubuk et al. 2019, arXiv 1909.13719) has 16 operations with one common magnitude. The
operations and their quirks are those of big_vision's `randaug`, which has them from Google's
EfficientNet. Each image goes through a number of layers, and each layer draws one operation with
equal chance. Pixels that move in from outside of the image are grey (128). Contrast pulls away from
the constant 196, where PIL has the mean: 196 is the number of pixels of a 224 x 224 image over 256.
Lengths in pixels are scaled from a side of 224. `tests/train/data/test_randaug.py` checks each
operation against PIL or a formula. Operations take images uint8 [H, W, C], a strength in [0, 1]
(the magnitude over 10) and two uniform numbers u in [0, 1).

Shapes: B batch, b rows of a batch, H height, W width, C channels.
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
"""Number of uniform numbers per RandAugment layer: one for the operation and two for its use."""
_SIDE = 224
_ROTATION = math.radians(30)
_SHEAR = 0.3
_SHIFT = 100 / _SIDE
_HOLE = 40 / _SIDE
_ADDITION = 110
_CONTRAST = _SIDE**2 // 256
_LUMA = (0.2989, 0.5870, 0.1140)

WHOLE = PixelsConfig(fit="squash")
"""Pixel settings that a data set records if all of its images already have the model's size.

Predictions of the trained model then scale an image of another size to this size, without a crop.
"""

View = Callable[[Sequence["np.ndarray"], "np.ndarray"], "np.ndarray"]
"""Function that shows raw images at the model's size H x W, cropped, scaled or moved at random.

It maps B images, uint8 [h, w, C] each, and uniform numbers in [0, 1), float64 [B, NUMBERS], to
float32 [B, H, W, C] in the raw range. It draws no random numbers of its own.
"""

NUMBERS = 5
"""Number of uniform random numbers that a view takes per image."""
_MAX_ROTATION = math.radians(6)
_MAX_LOG_SCALE = 0.06
_MAX_SHIFT = 0.05  # share of the image's size
_PAD = 0.125  # share of the image's size


def randaugmented(
    images: np.ndarray, uniforms: np.ndarray, magnitude: float, white: float = 255.0
) -> np.ndarray:
    """Return images after RandAugment, float32 [B, H, W, C] in the range of the input.

    Each image goes through `layers` operations, one after the other.

    Args:
        images: float32 [B, H, W, C] from 0 to `white`. They are rounded to 256 levels.
        uniforms: Uniform numbers in [0, 1), [B, layers, RANDAUG_NUMBERS].
        magnitude: Strength of the operations, from 0 to 10.
        white: Value of white. The default is 255.
    """
    # The operations are defined on 8-bit levels, as in PIL.
    levels = np.clip(np.rint(images * (255 / white)), 0, 255).astype(np.uint8)
    operations = list(OPERATIONS.values())
    for image, layers in zip(levels, uniforms, strict=True):
        for choice, *u in layers:
            operation = operations[int(choice * len(operations))]
            # In place, so that the next layer works on the result of this one.
            image[...] = operation(image, magnitude / 10, u)
    return levels.astype(np.float32) * np.float32(white / 255)


def blended(degenerate: np.ndarray | float, image: np.ndarray, strength: float) -> np.ndarray:
    """Blend an image with a degenerate one, such as its grey version, as PIL's `ImageEnhance` does.

    The result is degenerate + factor * (image - degenerate), clipped to 0..255 and rounded down,
    with a factor of 1.8 * strength + 0.1. A factor above 1 moves the image away from the degenerate
    one.

    Args:
        degenerate: Array of the image's shape, or one number for all pixels.
        image: uint8 [H, W, C].
        strength: Number from 0 to 1.
    """
    factor = 1.8 * strength + 0.1
    values = degenerate + factor * (image.astype(np.float32) - degenerate)
    return np.clip(values, 0, 255).astype(np.uint8)


def moved(image: np.ndarray, matrix: tuple[float, ...]) -> np.ndarray:
    """Transform an image by an affine map, with nearest-neighbour sampling as in PIL.

    Pixel (x, y) of the result is the pixel of the image nearest to (a x + b y + c, d x + e y + f).
    It is grey where that point is outside of the image.

    Args:
        image: uint8 [H, W, C].
        matrix: Six numbers (a, b, c, d, e, f).
    """
    H, W, _ = image.shape
    y, x = np.mgrid[:H, :W]
    a, b, c, d, e, f = matrix
    columns = _nearest(a * x + b * y + c)
    rows = _nearest(d * x + e * y + f)

    inside = (rows >= 0) & (rows < H) & (columns >= 0) & (columns < W)
    pixels = image[np.clip(rows, 0, H - 1), np.clip(columns, 0, W - 1)]
    return np.where(inside[..., None], pixels, np.uint8(GREY))


def _nearest(coordinates: np.ndarray) -> np.ndarray:
    """Round coordinates to whole numbers, halves away from zero."""
    # np.rint rounds halves to even, PIL does not.
    return np.trunc(coordinates + np.copysign(0.5, coordinates)).astype(int)


def _signed(size: float, u: list[float]) -> float:
    """Return `size` with a random sign, which is positive if `u[0]` is below a half."""
    return size if u[0] < 0.5 else -size


def _autocontrast(image: np.ndarray, strength: float, u: list[float]) -> np.ndarray:
    low = np.min(image, axis=(0, 1)).astype(float)
    high = np.max(image, axis=(0, 1)).astype(float)
    # In a channel with a single value the scale is 1, so the channel stays as it is.
    scale = 255 / np.where(high > low, high - low, 255)
    stretched = np.clip(image * scale - np.where(high > low, low, 0) * scale, 0, 255)
    return stretched.astype(np.uint8)


def _equalize(image: np.ndarray, strength: float, u: list[float]) -> np.ndarray:
    return np.stack([_equalized(image[..., c]) for c in range(image.shape[-1])], axis=-1)


def _equalized(channel: np.ndarray) -> np.ndarray:
    """Return a channel uint8 [H, W] with an equalized histogram, as PIL does it.

    The channel is returned unchanged if fewer than 255 pixels are below its largest level.
    """
    counts = np.bincount(channel.ravel(), minlength=256)
    # As in PIL, pixels of the largest level do not count.
    step = (channel.size - counts[channel.max()]) // 255
    if step == 0:
        return channel
    below = np.cumsum(counts) - counts
    levels = np.clip((below + step // 2) // step, 0, 255).astype(np.uint8)
    return levels[channel]


def _rotate(image: np.ndarray, strength: float, u: list[float]) -> np.ndarray:
    angle = _signed(_ROTATION * strength, u)
    cos = math.cos(angle)
    sin = math.sin(angle)
    # The constant terms keep the centre (x, y) in place.
    x = (image.shape[1] - 1) / 2
    y = (image.shape[0] - 1) / 2
    return moved(image, (cos, -sin, x - cos * x + sin * y, sin, cos, y - sin * x - cos * y))


def _posterize(image: np.ndarray, strength: float, u: list[float]) -> np.ndarray:
    shift = 8 - int(strength * 4)
    return (image.astype(int) >> shift << shift).astype(np.uint8)


def _solarize(image: np.ndarray, strength: float, u: list[float]) -> np.ndarray:
    return np.where(image.astype(int) < int(strength * 256), image, 255 - image)


def _solarize_add(image: np.ndarray, strength: float, u: list[float]) -> np.ndarray:
    # Added as int, because uint8 would wrap around at 256.
    added = np.minimum(image.astype(int) + int(strength * _ADDITION), 255).astype(np.uint8)
    return np.where(image < 128, added, image)


def _color(image: np.ndarray, strength: float, u: list[float]) -> np.ndarray:
    if image.shape[-1] == 1:
        return image
    # The weights add up to 0.9999, and without the factor white would round down to 254.
    grey = np.floor(image @ np.array(_LUMA) * (255.5 / 255))
    return blended(grey[..., None].astype(np.float32), image, strength)


def _sharpness(image: np.ndarray, strength: float, u: list[float]) -> np.ndarray:
    x = image.astype(np.float32)
    H, W, _ = image.shape
    # PIL's SMOOTH kernel: 5 in the centre and eight 1s around it, divided by their sum of 13.
    window = sum(x[i : H - 2 + i, j : W - 2 + j] for i in range(3) for j in range(3))
    smooth = x.copy()  # The kernel does not fit along the edge, which stays as it is.
    smooth[1:-1, 1:-1] = np.floor((window + 4 * x[1:-1, 1:-1]) / 13)
    return blended(smooth, image, strength)


def _cutout(image: np.ndarray, strength: float, u: list[float]) -> np.ndarray:
    H, W, _ = image.shape
    row = int(u[0] * H)
    column = int(u[1] * W)
    half = int(strength * _HOLE * H)
    cut = image.copy()
    cut[max(0, row - half) : row + half, max(0, column - half) : column + half] = GREY
    return cut


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
"""RandAugment operations (image, strength, uniforms) -> image by name.

Solarize changes no pixel at full strength, because its threshold is then 256.
"""


class Mix(NamedTuple):
    """Random choices of mixup or cutmix for one batch, whose images are mixed in pairs."""

    share: float
    """Weight of a row's own label. In mixup it is the weight of the row's own image, too."""
    box: tuple[slice, slice] | None = None
    """Rows and columns of pixels that cutmix takes from the other image. None for mixup."""

    def image(self, own: np.ndarray, other: np.ndarray) -> np.ndarray:
        """Return images mixed from two arrays of images.

        mixup returns share * own + (1 - share) * other. cutmix returns `own` with the pixels of
        `other` inside the box.

        Args:
            own: Images of the batch's rows, float32 [b, H, W, C].
            other: Image that is mixed into each row, float32 [b, H, W, C].
        """
        if self.box is None:
            return np.float32(self.share) * own + np.float32(1 - self.share) * other
        mixed = own.copy()
        mixed[:, *self.box] = other[:, *self.box]
        return mixed

    def label(self, own: np.ndarray, other: np.ndarray) -> np.ndarray:
        """Return the labels of the mixed images, share * own + (1 - share) * other.

        Args:
            own: Label distribution of each row, float32 [b, classes].
            other: Label distribution of the image mixed into each row, float32 [b, classes].
        """
        return np.float32(self.share) * own + np.float32(1 - self.share) * other


def drawn(transforms: TransformsConfig, rng: np.random.Generator, height: int, width: int) -> Mix:
    """Draw the mixup or cutmix of one batch. If both are on, each has a chance of one half.

    * mixup: the share is max(l, 1 - l) with l ~ Beta(alpha, alpha), so that a row's own label has
      the larger share (big_vision).
    * cutmix (Yun et al. 2019, algorithm 1): a box with the share 1 - l of the image's area, with
      l ~ Beta(alpha, alpha), is centred on a random pixel and cut off at the image's edge. The
      share is the part of the image outside of the box.
    * both off: the share is 1, and there is no box.

    Args:
        transforms: Settings, of which `mixup` and `cutmix` (each an alpha, 0 is off) are used.
        height: Height of the images in pixels.
        width: Width of the images in pixels.
    """
    use_cutmix = transforms.cutmix and (not transforms.mixup or rng.random() < 0.5)
    if not use_cutmix:
        share = rng.beta(transforms.mixup, transforms.mixup) if transforms.mixup else 1.0
        return Mix(float(max(share, 1 - share)))

    # A box with the share 1 - lambda of the area has sqrt(1 - lambda) of each side.
    side = np.sqrt(1 - rng.beta(transforms.cutmix, transforms.cutmix))
    y = rng.integers(height)
    x = rng.integers(width)
    half_height = int(height * side) // 2
    half_width = int(width * side) // 2

    top = max(0, y - half_height)
    left = max(0, x - half_width)
    bottom = min(height, y + half_height)
    right = min(width, x + half_width)
    area = (bottom - top) * (right - left)
    # The share is computed after the box is cut at the image's edge, as in the paper's code.
    return Mix(1 - area / (height * width), (slice(top, bottom), slice(left, right)))


def soft_labels(targets: np.ndarray, classes: int, smoothing: float) -> np.ndarray:
    """Return labels as smoothed distributions, float32 [b, classes].

    Every class gets smoothing / classes, and the class of the row gets 1 - smoothing in addition.

    Args:
        targets: int32 [b], class of each row.
        smoothing: Share in [0, 1).
    """
    labels = np.full((len(targets), classes), smoothing / classes, np.float32)
    # Added, because the class also has its even share of the smoothing.
    labels[np.arange(len(targets)), targets] += np.float32(1 - smoothing)
    return labels


class LabelledData(Data):
    """Base class of labelled images whose training batches are augmented.

    A training batch also has `labels`, float32 [B, classes], if `config.transforms.soft`.
    """

    kind = "images"
    seed: int
    """Seed of the order and of all random numbers."""
    white: float = 255.0
    """Raw value of white. Black is 0."""
    pixels: PixelsConfig = WHOLE
    """Settings whose `mean` and `std` normalize the images."""

    @abc.abstractmethod
    def shown(
        self, k: int, rows: np.ndarray, examples: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return rows of training batch k before RandAugment and normalization.

        The view, such as a random crop, is already applied.

        Args:
            k: Number of the batch, from 0 at the start of the run.
            rows: Rows of the global batch, int64 [b].
            examples: Index of each row's example, counted from the start of the run, int64 [b].

        Returns:
            Images float32 [b, H, W, C] from 0 to `white`, and classes int32 [b].
        """

    def train_batch(self, k: int, rows: slice = ALL_ROWS) -> Batch:
        transforms = self.config.transforms
        own = np.arange(self.batch_size)[rows]
        if not transforms.soft:
            inputs, targets = self._transformed(k, own)
            weights = np.ones(len(targets), np.float32)
            return {"inputs": inputs, "targets": targets, "weights": weights}

        # A row is mixed with the row before it. The first row of a group is mixed with the last.
        group = transforms.mix_group or self.batch_size
        before = own - own % group + (own - 1) % group
        needed = np.concatenate([own, before])
        # Most rows are needed twice, as themselves and by the row after, but are decoded once.
        unique_rows, places = np.unique(needed, return_inverse=True)
        inputs, targets = self._transformed(k, unique_rows)
        labels = soft_labels(targets, len(self.class_names or ()), transforms.label_smoothing)

        own_places = places[: len(own)]
        before_places = places[len(own) :]
        targets = targets[own_places]
        if transforms.mixup or transforms.cutmix:
            rng = interface.rng(self.seed, interface.MIXING, k)
            height, width = inputs.shape[1:3]
            mix = drawn(transforms, rng, height, width)
            inputs = mix.image(inputs[own_places], inputs[before_places])
            labels = mix.label(labels[own_places], labels[before_places])
        else:
            inputs = inputs[own_places]
            labels = labels[own_places]
        weights = np.ones(len(targets), np.float32)
        return {"inputs": inputs, "targets": targets, "weights": weights, "labels": labels}

    def _transformed(self, k: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return rows of training batch k after the view, RandAugment and normalization.

        Args:
            rows: int64 [b], rows of the global batch.

        Returns:
            Images float32 [b, H, W, C], and classes int32 [b].
        """
        transforms = self.config.transforms
        # With repeats, a batch shows each of its distinct examples several times.
        distinct = self.batch_size // transforms.repeats
        raw, targets = self.shown(k, rows, k * distinct + rows % distinct)

        if transforms.randaug_layers is not None:
            shape = (self.batch_size, transforms.randaug_layers, RANDAUG_NUMBERS)
            # Drawn for the global batch: a row's numbers must not depend on how many processes run.
            uniforms = interface.rng(self.seed, interface.RANDAUG, k).random(shape)[rows]
            raw = randaugmented(raw, uniforms, transforms.randaug_magnitude, self.white)
        return normalized(raw, self.pixels, self.white), targets


def normalized(raw: np.ndarray, pixels: PixelsConfig, white: float = 255.0) -> np.ndarray:
    """Return images as a model reads them, (raw / white - mean) / std, float32.

    This is 2 * raw / white - 1 if mean and std are a half.

    Args:
        raw: float32 [B, H, W, C], from 0 to `white`.
        pixels: Settings, of which `mean` and `std` are used.
        white: Raw value of white. The default is 255.
    """
    mean = np.array(pixels.mean)
    std = np.array(pixels.std)
    # Compute in float64, so that each factor is rounded to float32 only once.
    scale = (1 / (white * std)).astype(np.float32)
    return raw * scale - (mean / std).astype(np.float32)


class Images(Protocol):
    """Labelled images, fetched by index from any thread."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> tuple[np.ndarray, int]:
        """Return image i, uint8 [h, w, C], and its label."""
        ...


@runtime_checkable
class ScalableImages(Images, Protocol):
    """Labelled images that can be decoded at less than their full size, which is quicker."""

    def at_least(self, i: int, side: int | None, /) -> tuple[np.ndarray, int]:
        """Return image i, perhaps scaled down, uint8 [h, w, C], and its label.

        Args:
            i: Index of the image, from 0.
            side: Fewest pixels that both sides keep. None returns the full image.
        """
        ...


@runtime_checkable
class ScaledView(Protocol):
    """View (`View`) that also tells how small an image may be without a loss of quality.

    A large JPEG can then be decoded at a smaller size, which is quicker.
    """

    def __call__(self, images: Sequence[np.ndarray], uniforms: np.ndarray, /) -> np.ndarray: ...

    def least_side(self, uniforms: np.ndarray, /) -> int:
        """Return how many pixels an image's shorter side needs, so that the view scales nothing up.

        Args:
            uniforms: Uniform numbers that the view gets for the image, float64 [NUMBERS].
        """
        ...


class ImageData(LabelledData):
    """Batches of labelled images. Values are in [-1, 1] unless data.pixels says otherwise.

    Args:
        config: Data settings: sizes of batches, and whether to augment.
        eval_: Evaluation images with labels. They have a fixed shuffled order. With
            data.eval_examples, only the first ones of this order are used.
        views: View for training and view for evaluation. If data.augment is off, training uses the
            view for evaluation.
        white: Raw value of white. The default is 255.
        seed: Seed of the order and of the views.
        threads: Number of threads that make batches. Decoding image files keeps many threads busy.
        pixels: Fit and normalization of images, which is recorded for users of the model.
        facts: Facts to record in addition to the sizes, `digest` among them.
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
        self.train = train
        self.eval = eval_
        train_view, eval_view = views
        self._train_view = train_view if config.augment else eval_view
        self._eval_view = eval_view
        self.pixels = pixels
        self.white = white
        self.seed = seed
        self._shuffle = interface.Shuffle(len(train), seed)
        # Seed 0: the evaluation examples must not depend on the run's seed.
        self._eval_shuffle = interface.Shuffle(len(eval_), 0, interface.EVALUATION)

    def shown(
        self, k: int, rows: np.ndarray, examples: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        _, positions = self._shuffle(examples)
        # Drawn for the global batch: a row's numbers must not depend on how many processes run.
        rng = interface.rng(self.seed, interface.AUGMENTATION, k)
        uniforms = rng.random((self.batch_size, NUMBERS))
        return self._batch(self.train, positions, self._train_view, uniforms[rows])

    def eval_batch(self, j: int, rows: slice = ALL_ROWS) -> Batch:
        indices = np.array(interface.batch_indices(j, self.eval_batch_size, rows))
        exists = indices < self.eval_size
        # A row past the end shows the first image again, with weight 0.
        positions = self.eval_positions(np.where(exists, indices, 0))
        # The evaluation view uses no random numbers. Zeros fill the argument that every view has.
        uniforms = np.zeros((len(positions), NUMBERS))
        raw, targets = self._batch(self.eval, positions, self._eval_view, uniforms)
        inputs = normalized(raw, self.pixels, self.white)
        return {"inputs": inputs, "targets": targets, "weights": exists.astype(np.float32)}

    def eval_positions(self, indices: np.ndarray | range) -> np.ndarray:
        """Return the position of evaluation examples in the image sequence `eval`, int64.

        Evaluation examples are in a shuffled order, which is the same in every run.

        Args:
            indices: Numbers of the evaluation examples in this order, from 0.
        """
        _, positions = self._eval_shuffle(indices)
        return positions

    def _batch(
        self, source: Images, positions: np.ndarray, view: View, uniforms: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return images after a view, float32 [b, H, W, C], and their classes int32 [b].

        The images are not normalized yet.

        Args:
            positions: Positions of the images in `source`, int64 [b].
            uniforms: Random numbers of the view, float64 [b, NUMBERS].
        """
        if isinstance(source, ScalableImages):
            # One image at a time: photographs of 100 megapixels do not fit into memory together.
            viewed = []
            labels = []
            for position, row in zip(positions, uniforms, strict=True):
                side = view.least_side(row) if isinstance(view, ScaledView) else None
                image, label = source.at_least(int(position), side)
                viewed.append(view([image], row[None]))
                labels.append(label)
            return np.concatenate(viewed), np.array(labels, np.int32)

        examples = [source[int(position)] for position in positions]
        labels = np.array([label for _, label in examples], np.int32)
        return view([image for image, _ in examples], uniforms), labels


def vision_model(name: str, model: ModelConfig, class_names: Sequence[str]) -> ImageModel:
    """Return the model settings if the model reads images and has one output per class.

    Args:
        name: Name of the data for error messages.
        class_names: Name of each label of the data.

    Raises:
        DataError: The model reads text, or has another number of classes.
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
    """Raise an error if the images have another size than the model reads.

    Args:
        name: Name of the data for error messages.
        size: Pixels on a side of the data's images.
        channels: 1 for grey, 3 for colour.

    Raises:
        DataError: The model reads another size or number of channels. The message says what to
            write.
    """
    if (model.image_size, model.channels) != (size, channels):
        raise DataError(
            f"data {name!r} has images of {size} x {size} pixels with {channels} channels, the model reads "
            f"{model.image_size} x {model.image_size} with {model.channels}; "
            f"write --model.image-size {size} --model.channels {channels}"
        )


def as_is(images: Sequence[np.ndarray], uniforms: np.ndarray) -> np.ndarray:
    """Return images of the model's size unchanged, float32 [B, H, W, C]. This is a `View`."""
    return np.stack(images).astype(np.float32)


def jitter(images: Sequence[np.ndarray], uniforms: np.ndarray) -> np.ndarray:
    """Rotate, scale and shift images a little about their centre. This is a `View`.

    The largest changes are 6 degrees, 6 % in size, and a shift by 5 % of a side. Pixels are
    interpolated bilinearly. Pixels from outside of the image are 0. The view is for small drawings
    like digits.

    Args:
        images: B images of one size, [H, W, C] each.
        uniforms: Random numbers in [0, 1). Columns 0 to 3 choose the angle, the scale, the shift
            down and the shift right.
    """
    x_BHWC = np.stack(images).astype(np.float32)
    _, H, W, _ = x_BHWC.shape
    largest = np.array([_MAX_ROTATION, _MAX_LOG_SCALE, _MAX_SHIFT * H, _MAX_SHIFT * W])
    angle, log_scale, down, right = (2 * uniforms[:, :4].T - 1) * largest[:, None]
    scale = np.exp(log_scale)
    cos = (np.cos(angle) / scale)[:, None, None]
    sin = (np.sin(angle) / scale)[:, None, None]

    y = np.arange(H) - (H - 1) / 2
    x = np.arange(W) - (W - 1) / 2
    y_BHW = y[None, :, None] - down[:, None, None]
    x_BHW = x[None, None, :] - right[:, None, None]
    rotated_y_BHW = cos * y_BHW - sin * x_BHW + (H - 1) / 2
    rotated_x_BHW = sin * y_BHW + cos * x_BHW + (W - 1) / 2
    return _bilinear(x_BHWC, rotated_y_BHW, rotated_x_BHW)


def _bilinear(images: np.ndarray, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Sample images at points by bilinear interpolation, float32 [B, h, w, C].

    Pixels outside of an image count as 0.

    Args:
        images: [B, H, W, C].
        y: Row of each point in pixels, [B, h, w]. 0 is the first row.
        x: Column of each point in pixels, [B, h, w]. 0 is the first column.
    """
    B, H, W, _ = images.shape
    # A border of zeros, so that points outside blend into black without a test.
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    # The upper bound is just below the last index, so that index top + 1 exists.
    y = np.clip(y + 1, 0, H + 1 - 1e-6)
    x = np.clip(x + 1, 0, W + 1 - 1e-6)
    top = np.floor(y).astype(int)
    left = np.floor(x).astype(int)
    dy = (y - top)[..., None]
    dx = (x - left)[..., None]

    row = np.arange(B)[:, None, None]
    upper = padded[row, top, left] * (1 - dx) + padded[row, top, left + 1] * dx
    lower = padded[row, top + 1, left] * (1 - dx) + padded[row, top + 1, left + 1] * dx
    return (upper * (1 - dy) + lower * dy).astype(np.float32)


def shift_and_flip(images: Sequence[np.ndarray], uniforms: np.ndarray) -> np.ndarray:
    """Shift images at random and mirror half of them. This is a `View`.

    It is the usual augmentation of CIFAR: images are padded by reflection, and cropped at a random
    place. The largest shift is an eighth of a side.

    Args:
        images: B images of one size, [H, W, C] each.
        uniforms: Random numbers in [0, 1). Columns 0 to 2 choose the shift down, the shift right
            and the mirroring, which happens below a half.
    """
    x_BHWC = np.stack(images)
    B, H, W, _ = x_BHWC.shape
    pad_H = round(_PAD * H)
    pad_W = round(_PAD * W)
    padded = np.pad(x_BHWC, ((0, 0), (pad_H, pad_H), (pad_W, pad_W), (0, 0)), mode="reflect")

    down, right, mirror, *_ = uniforms.T
    # The mirror is in the indices, so one lookup crops and mirrors at once.
    columns = np.where(mirror[:, None] < 0.5, np.arange(W)[::-1], np.arange(W))
    y = (down * (2 * pad_H + 1)).astype(int)[:, None] + np.arange(H)
    x = (right * (2 * pad_W + 1)).astype(int)[:, None] + columns
    return padded[np.arange(B)[:, None, None], y[:, :, None], x[:, None, :]].astype(np.float32)


class DigitImages(NamedTuple):
    """Test part of UCI's "optical recognition of handwritten digits" data set.

    The images are from Alpaydin and Kaynak (1998), CC BY 4.0, in the order of scikit-learn.

    Attributes:
        pixels: uint8 [1797, 8, 8], from 0 (background) to 16 (ink).
        labels: Digit of each image, uint8 [1797].
        held_out: Mask of the evaluation images, bool [1797]. They are the stratified fifth that
            scikit-learn's `train_test_split` draws with `random_state=0`.
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
    """Fit logistic regression by L-BFGS and return its weights, float [features + 1, classes].

    The last row has the biases.

    Args:
        x: Features [examples, features].
        y: Classes [examples], from 0. Each class must occur.
        inverse_penalty: C of the penalty ||w||^2 / (2 C), which is added to the summed loss. The
            biases are not penalized.
        iterations: Largest number of iterations of L-BFGS. Fewer are done if the fit converges.
    """
    from scipy.optimize import minimize
    from scipy.special import log_softmax

    features = _with_ones(x)
    targets = np.eye(int(y.max()) + 1, dtype=features.dtype)[y]
    penalty = np.full((features.shape[1], 1), 1 / inverse_penalty, features.dtype)
    # The last row has the biases, which are not penalized.
    penalty[-1] = 0

    def loss_and_gradient(flat: np.ndarray) -> tuple[float, np.ndarray]:
        # NumPy would widen float32 features to float64 at every product.
        weights = flat.reshape(features.shape[1], -1).astype(features.dtype)
        log_probs = log_softmax(features @ weights, axis=1)
        loss = (penalty * weights**2).sum() / 2 - (targets * log_probs).sum()
        gradient = features.T @ (np.exp(log_probs) - targets) + penalty * weights
        # Means over examples, so that the tolerance `gtol` does not depend on their number.
        return float(loss) / len(x), gradient.ravel().astype(float) / len(x)

    start = np.zeros(features.shape[1] * targets.shape[1])
    limits = {"maxiter": iterations, "gtol": 1e-4, "maxls": 50, "ftol": 64 * np.finfo(float).eps}
    fitted = minimize(loss_and_gradient, start, jac=True, method="L-BFGS-B", options=limits)
    return fitted.x.reshape(features.shape[1], -1)


def predict_logistic(weights: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return the most likely class of every example, int [examples].

    Args:
        weights: Result of `fit_logistic`, [features + 1, classes].
        x: Features [examples, features].
    """
    return (_with_ones(x) @ weights).argmax(1)


def _with_ones(x: np.ndarray) -> np.ndarray:
    """Return the features with a column of ones for the biases."""
    return np.hstack([x, np.ones((len(x), 1), x.dtype)])
