"""Batches of labelled images: each image once an epoch, seen through a view, which training varies and evaluation does not.

A view takes raw uint8 images and, per image, uniform random numbers in [0, 1), and returns float32 images of the
model's size in the raw range. It draws nothing itself, so a row's augmentation is a function of (seed, batch, row).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from mupax.train.data import interface
from mupax.train.data.interface import ALL_ROWS, Batch, DataError
from mupax.train.data.labelled import WHOLE, LabelledData, normalized
from mupax.zoo.families import ImageModel, ModelConfig

if TYPE_CHECKING:
    from mupax.train.config.data import DataConfig, PixelsConfig

View = Callable[[Sequence["np.ndarray"], "np.ndarray"], "np.ndarray"]
"""(B images uint8 [h, w, C], uniforms float64 [B, NUMBERS]) -> float32 [B, H, W, C]."""

NUMBERS = 5
_MAX_ROTATION = math.radians(6)
_MAX_LOG_SCALE = 0.06
_MAX_SHIFT = 0.05  # of the image's size
_PAD = 0.125  # of the image's size


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

    def shown(self, k: int, rows: np.ndarray, examples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        _, positions = self._shuffle(examples)
        uniforms = interface.rng(self.seed, interface.AUGMENTATION, k).random((self.batch_size, NUMBERS))
        return self._batch(self.train, positions, self._train_view, uniforms[rows])

    def eval_batch(self, j: int, rows: slice = ALL_ROWS) -> Batch:
        indices = np.array(interface.batch_indices(j, self.eval_batch_size, rows))
        # A row past the end shows the first image again, at weight 0.
        positions = self.eval_positions(np.where(indices < self.eval_size, indices, 0))
        raw, targets = self._batch(self.eval, positions, self._eval_view, np.zeros((len(positions), NUMBERS)))
        inputs = normalized(raw, self.pixels, self.white)
        return {"inputs": inputs, "targets": targets, "weights": (indices < self.eval_size).astype(np.float32)}

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
        raise DataError(f"data {name!r} is images, and the model reads text; write a vision model such as vit-tiny")
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
    return _bilinear(x_BHWC, cos * y_BHW - sin * x_BHW + (H - 1) / 2, sin * y_BHW + cos * x_BHW + (W - 1) / 2)


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


def fit_logistic(x: np.ndarray, y: np.ndarray, *, inverse_penalty: float, iterations: int) -> np.ndarray:
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
