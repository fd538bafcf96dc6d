"""Views of images of any size: a random crop for training, and what `data.pixels` says for everything else."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from mupax.train.config.data import DataConfig, Interpolation, PixelsConfig
from mupax.train.data.images import View

_CROP_AREA = (0.08, 1.0)
_CROP_RATIO = (3 / 4, 4 / 3)
_INCEPTION_AREA = (0.05, 1.0)
_INCEPTION_RATIO = (0.75, 1.33)
_EVAL_CROP = 224 / 256
_MAX_ANGLE = math.radians(20)
_MAX_LOG_SCALE = 0.2
_MAX_LOG_STRETCH = 0.15
_MAX_SHIFT = 0.125
"""Share of a side."""
_LONGEST = 32
"""Times the model's size that an image is scaled to as a whole; of a longer one only the middle is."""


class RandomCrop:
    """View of a random-resized crop (Szegedy et al. 2015), mirrored half of the time.

    Args:
        size: pixels on a side of what comes out.
        interpolation: how the crop is scaled to it.
    """

    def __init__(self, size: int, interpolation: Interpolation = "bilinear") -> None:
        self._size = size
        self._interpolation: Interpolation = interpolation

    def __call__(self, images: Sequence[np.ndarray], uniforms: np.ndarray) -> np.ndarray:
        """Return the crops, float32 [B, size, size, C]; the arguments are those of a `View`."""
        return np.stack(
            [self._crop(image, *row) for image, row in zip(images, uniforms, strict=True)]
        )

    def least_side(self, uniforms: np.ndarray) -> int:
        """Return how many pixels the shorter side of an image needs for its crop to be scaled down and not up.

        Args:
            uniforms: of the image, float64 [NUMBERS].
        """
        area, ratio = _area_and_ratio(*uniforms[3:5])
        # Of a square image, the least favourable, the crop's shorter side is this share of the side.
        share = math.sqrt(area * min(ratio, 1 / ratio))
        return math.ceil(self._size / share)

    def _crop(
        self, image: np.ndarray, u: float, v: float, mirror: float, a: float, r: float
    ) -> np.ndarray:
        H, W, _ = image.shape
        share, ratio = _area_and_ratio(a, r)
        area = H * W * share
        h, w = min(H, round(math.sqrt(area / ratio))), min(W, round(math.sqrt(area * ratio)))
        h, w = max(1, h), max(1, w)
        top, left = int(u * (H - h + 1)), int(v * (W - w + 1))
        crop = _resized(
            image, (left, top, left + w, top + h), (self._size, self._size), self._interpolation
        )
        return crop[:, ::-1] if mirror < 0.5 else crop


def _area_and_ratio(a: float, r: float) -> tuple[float, float]:
    """Return a crop's share of the image's area, and its width over its height, from two uniforms."""
    share = _CROP_AREA[0] + a * (_CROP_AREA[1] - _CROP_AREA[0])
    ratio = math.exp(math.log(_CROP_RATIO[0]) + r * math.log(_CROP_RATIO[1] / _CROP_RATIO[0]))
    return share, ratio


class Jitter:
    """View of images of one square size, turned, scaled, stretched, moved and perhaps mirrored; the border goes on outside.

    Args:
        strength: times the largest angle, scale, stretch and shift.
        mirror: whether half of the images are mirrored.
    """

    def __init__(self, strength: float, mirror: bool) -> None:
        self._strength = strength
        self._mirror = mirror

    def __call__(self, images: Sequence[np.ndarray], uniforms: np.ndarray) -> np.ndarray:
        """Return the images, float32 [B, size, size, C]; the arguments are those of a `View`.

        Numbers 0 and 1 are down and right, 2 the mirror, 3 the angle and 4 the scale. The stretch takes digits of the angle's
        number that the angle does not show.
        """
        x_BHWC = np.stack(images)
        side = x_BHWC.shape[1]
        down, right, _, turn, log_scale = (2 * uniforms.T - 1) * self._strength
        stretch = (2 * np.modf(uniforms[:, 3] * 2**20)[0] - 1) * self._strength
        flip = np.where((uniforms[:, 2] < 0.5) & self._mirror, -1.0, 1.0)
        angle = _MAX_ANGLE * turn
        tall = np.exp(_MAX_LOG_SCALE * log_scale + _MAX_LOG_STRETCH * stretch)
        wide = np.exp(_MAX_LOG_SCALE * log_scale - _MAX_LOG_STRETCH * stretch)
        centre = (side - 1) / 2
        y_N = (np.arange(side) - centre).astype(np.float32)

        def along(number: np.ndarray) -> np.ndarray:
            return number.astype(np.float32)[:, None, None]

        y_BHW = along(tall * np.cos(angle)) * y_N[:, None] - along(wide * np.sin(angle)) * y_N
        x_BHW = (
            along(flip * tall * np.sin(angle)) * y_N[:, None]
            + along(flip * wide * np.cos(angle)) * y_N
        )
        shift = _MAX_SHIFT * side
        return _at_points(
            x_BHWC, y_BHW + along(centre + shift * down), x_BHW + along(centre + shift * right)
        )


def _at_points(images: np.ndarray, y_BHW: np.ndarray, x_BHW: np.ndarray) -> np.ndarray:
    """Return square images between their pixels, float32 [B, H, W, C]; outside is the nearest pixel of the border."""
    last = images.shape[1] - 1
    y_BHW = np.clip(y_BHW, 0, last)
    x_BHW = np.clip(x_BHW, 0, last)
    top = np.minimum(y_BHW.astype(np.int32), max(0, last - 1))
    left = np.minimum(x_BHW.astype(np.int32), max(0, last - 1))
    bottom = np.minimum(top + 1, last)
    right = np.minimum(left + 1, last)
    down = (y_BHW - top)[..., None].astype(np.float32)
    along = (x_BHW - left)[..., None].astype(np.float32)
    row = np.arange(len(images))[:, None, None]
    upper = images[row, top, left] * (1 - along) + images[row, top, right] * along
    lower = images[row, bottom, left] * (1 - along) + images[row, bottom, right] * along
    return upper * (1 - down) + lower * down


def _unmirrored(view: View) -> View:
    """Return a random crop that never mirrors."""

    def unmirrored(images: Sequence[np.ndarray], uniforms: np.ndarray) -> np.ndarray:
        uniforms = uniforms.copy()
        uniforms[:, 2] = 1.0
        return view(images, uniforms)

    return unmirrored


def training(config: DataConfig, size: int) -> View:
    """What data.transforms shows of training images of any size.

    Args:
        config: has it, and how images are scaled.
        size: pixels on a side of what comes out.
    """
    transforms = config.transforms
    if transforms.jitter is None:
        crop = _random_crop(config, size)
        return crop if transforms.mirror else _unmirrored(crop)
    fit = fitted(config.pixels, size)
    jitter = Jitter(transforms.jitter, transforms.mirror)
    return lambda images, uniforms: jitter([*fit(images, uniforms)], uniforms)


def _random_crop(config: DataConfig, size: int) -> View:
    """The random crop that data.transforms asks for.

    Args:
        config: has it, and how images are scaled.
        size: pixels on a side of what comes out.
    """
    return (
        inception_crop(size)
        if config.transforms.crop == "inception"
        else RandomCrop(size, config.pixels.interpolation)
    )


def inception_crop(size: int) -> View:
    """The random crop of big_vision's `decode_jpeg_and_inception_crop`, mirrored half of the time.

    TensorFlow's `sample_distorted_bounding_box`: an aspect ratio, width over height, drawn evenly from 3/4 to 1.33; then a height,
    evenly among whole numbers that leave 5 to 100 % of the area and fit, and one more or less where its rounded width does not; then a
    place, of which the last is never taken. It is scaled by bilinear interpolation of the four nearest pixels, whatever the scale
    (TensorFlow's without antialias). Where no such crop fits (of images a few pixels wide) TensorFlow draws again, up to a hundred
    times; here the image stays whole.

    Args:
        size: pixels on a side of what comes out.
    """

    def view(images: Sequence[np.ndarray], uniforms: np.ndarray) -> np.ndarray:
        return np.stack([one(image, *row) for image, row in zip(images, uniforms, strict=True)])

    def one(image: np.ndarray, u: float, v: float, mirror: float, a: float, r: float) -> np.ndarray:
        H, W, _ = image.shape
        h, w = _inception_size(H, W, a, r)
        top, left = int(u * (H - h)), int(v * (W - w))
        crop = _pointwise(image[top : top + h, left : left + w], size)
        return crop[:, ::-1] if mirror < 0.5 else crop

    return view


def _inception_size(H: int, W: int, a: float, r: float) -> tuple[int, int]:
    """Height and width of a crop of an image of H x W, from two uniforms."""
    ratio = _INCEPTION_RATIO[0] + r * (_INCEPTION_RATIO[1] - _INCEPTION_RATIO[0])
    least, most = (share * H * W for share in _INCEPTION_AREA)
    highest = min(H, round(math.sqrt(most / ratio)), int((W + 0.5) / ratio))
    lowest = min(round(math.sqrt(least / ratio)), highest)
    h = lowest + int(a * (highest - lowest + 1))
    h += h * round(h * ratio) < least
    h -= h * round(h * ratio) > most
    w = round(h * ratio)
    return (h, w) if least <= h * w <= most and 0 < h <= H and 0 < w <= W else (H, W)


def _pointwise(image: np.ndarray, size: int) -> np.ndarray:
    """The image at size x size, each pixel between the four nearest of its place, float32 in whole levels (rounded down)."""

    def places(length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        at = np.maximum((np.arange(size) + 0.5) * (length / size) - 0.5, 0)
        low = np.minimum(at.astype(int), length - 1)
        return low, np.minimum(low + 1, length - 1), (at - low).astype(np.float32)

    top, bottom, down = places(image.shape[0])
    left, right, along = places(image.shape[1])
    rows = image[top] * (1 - down)[:, None, None] + image[bottom] * down[:, None, None]
    return np.floor(rows[:, left] * (1 - along)[:, None] + rows[:, right] * along[:, None]).astype(
        np.float32
    )


def fitted(pixels: PixelsConfig, size: int) -> View:
    """Each image made a square by the fit of `data.pixels`, the same each time.

    Args:
        pixels: how.
        size: pixels on a side of what comes out.
    """
    fit: Callable[[np.ndarray], np.ndarray]
    pixels = pixels.resolved(size)

    def centre(image: np.ndarray) -> np.ndarray:
        H, W, _ = image.shape
        side = max(1, round(_EVAL_CROP * min(H, W)))
        top, left = (H - side) // 2, (W - side) // 2
        return _resized(
            image, (left, top, left + side, top + side), (size, size), pixels.interpolation
        )

    def scaled(image: np.ndarray) -> np.ndarray:
        H, W, _ = image.shape
        height = width = pixels.resize or size
        if pixels.fit == "edge":
            # Rounded down, as torchvision and transformers have it; big_vision rounds to the nearest.
            whole_number = round if pixels.interpolation == "area" else int
            height, width = (
                (height, whole_number(width * W / H))
                if H <= W
                else (whole_number(height * H / W), width)
            )
        top, left = (height - size) // 2, (width - size) // 2
        if max(height, width) > _LONGEST * size:
            # Scaled as a whole, a line of a million pixels would fill the memory.
            box = (
                left * W / width,
                top * H / height,
                (left + size) * W / width,
                (top + size) * H / height,
            )
            return _resized(image, box, (size, size), pixels.interpolation)
        resized = _resized(image, (0, 0, W, H), (height, width), pixels.interpolation)
        return resized[top : top + size, left : left + size]

    fit = centre if pixels.fit == "centre" else scaled
    return lambda images, uniforms: np.stack([fit(image) for image in images])


def _resized(
    image: np.ndarray,
    box: tuple[float, float, float, float],
    size: tuple[int, int],
    interpolation: Interpolation,
) -> np.ndarray:
    """The box (left, top, right, bottom) of image [H, W, C] as float32 [*size, C]."""
    if interpolation == "area":
        left, top, right, bottom = (round(edge) for edge in box)
        return _by_area(image[top:bottom, left:right], size)
    from PIL import Image

    flat = image[..., 0] if image.shape[-1] == 1 else image
    how = Image.Resampling[interpolation.upper()]
    resized = Image.fromarray(flat).resize((size[1], size[0]), how, box=box)
    return np.asarray(resized, np.float32).reshape(*size, image.shape[-1])


def _by_area(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """The image as float32 [*size, C], each pixel the mean of the area that it covers, in whole levels (rounded down).

    TensorFlow's `tf.image.resize` by area: a pixel of which a part is covered counts as that part.
    """

    def shares(length: int, count: int) -> np.ndarray:
        start = np.arange(count)[:, None] * (length / count)
        pixel = np.arange(length)
        covered = np.minimum(pixel + 1, start + length / count) - np.maximum(pixel, start)
        return (np.maximum(covered, 0) * (count / length)).astype(np.float32)

    down, along = (
        shares(length, count) for length, count in zip(image.shape[:2], size, strict=True)
    )
    rows = np.tensordot(down, image.astype(np.float32), axes=(1, 0))
    # What a sum of float32 leaves below a whole number is that number.
    return np.floor(np.einsum("xw,hwc->hxc", along, rows, optimize=True) + np.float32(1e-3))
