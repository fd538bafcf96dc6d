"""RandAugment (Cubuk et al. 2019, arXiv 1909.13719): 16 operations on images, each as strong as one magnitude says.

Operations, strengths and their quirks are those of big_vision's `randaug`, itself that of Google's EfficientNet: an image goes
through so many, drawn from all with equal chance; what moves out of sight leaves grey (128) behind; contrast pulls away from the
constant 196 (there the number of pixels of a 224 x 224 image over 256, where PIL has the mean). Lengths, which it has in
pixels, are here in proportion to a side of 224. `tests/train/data/test_randaug.py` holds each against PIL or a formula.

Images are uint8 [H, W, C]; a strength is in [0, 1], the magnitude over 10; uniforms u are two numbers in [0, 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

GREY = 128
NUMBERS = 3
"""Uniform numbers that a layer takes: which operation, and its two."""
_SIDE = 224
_ROTATION, _SHEAR, _SHIFT, _HOLE = math.radians(30), 0.3, 100 / _SIDE, 40 / _SIDE
_ADDITION, _CONTRAST = 110, _SIDE**2 // 256
_LUMA = (0.2989, 0.5870, 0.1140)


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
