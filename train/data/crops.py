"""Views that bring images of any size to the model's size, by a random crop or by a fixed fit.

A view is a function of raw images and uniform random numbers (`images.View`). Random crops are for
training. The fit is set by `data.pixels`, has no randomness, and is for evaluation and predictions.
`sources/folders.py` and `sources/published.py` use these views.
"""

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
"""Largest shift, as a share of a side."""
_LONGEST = 32
"""Longest side of a scaled image, as a multiple of the model's image size.

An image that would be longer is cropped before it is scaled, so that it fits into memory.
"""


class RandomCrop:
    """View of a random resized crop (Szegedy et al. 2015), mirrored half of the time.

    The crop has 8 to 100 % of the image's area, and an aspect ratio from 3/4 to 4/3.

    Args:
        size: Pixels on a side of the result.
        interpolation: Method that scales the crop to `size`.
    """

    def __init__(self, size: int, interpolation: Interpolation = "bilinear") -> None:
        self._size = size
        self._interpolation: Interpolation = interpolation

    def __call__(self, images: Sequence[np.ndarray], uniforms: np.ndarray) -> np.ndarray:
        """Return one random crop of each image, scaled, float32 [B, size, size, C].

        Args:
            images: B images, uint8 [h, w, C] each.
            uniforms: float64 [B, 5] in [0, 1). The columns choose the vertical place, the
                horizontal place, mirroring (below a half), the area and the aspect ratio.
        """
        crops = []
        for image, row in zip(images, uniforms, strict=True):
            crops.append(self._crop(image, *row))
        return np.stack(crops)

    def least_side(self, uniforms: np.ndarray) -> int:
        """Return how long an image's shorter side must be, in pixels, for a crop of full quality.

        With at least this many pixels, the crop is never scaled up to `size`. So a large JPEG may
        be decoded at a smaller size first.

        Args:
            uniforms: float64 [5], the image's row of `uniforms` in `__call__`.
        """
        area, ratio = _area_and_ratio(*uniforms[3:5])
        # A square image is the worst case. There the crop's shorter side is this share of the side.
        share = math.sqrt(area * min(ratio, 1 / ratio))
        return math.ceil(self._size / share)

    def _crop(
        self, image: np.ndarray, u: float, v: float, mirror: float, a: float, r: float
    ) -> np.ndarray:
        """Return one crop of an image, scaled to float32 [size, size, C] and perhaps mirrored.

        Args:
            u: Uniform number in [0, 1) that chooses the vertical place. So do `v` the horizontal
                place, `a` the area and `r` the aspect ratio. The crop is mirrored if `mirror` is
                below a half.
        """
        H, W, _ = image.shape
        share, ratio = _area_and_ratio(a, r)
        area = H * W * share
        height = max(1, min(H, round(math.sqrt(area / ratio))))
        width = max(1, min(W, round(math.sqrt(area * ratio))))

        # + 1, so that a crop may also lie at the lower or right edge. TensorFlow never draws this
        # last place.
        top = int(u * (H - height + 1))
        left = int(v * (W - width + 1))
        box = (left, top, left + width, top + height)
        crop = _resized(image, box, (self._size, self._size), self._interpolation)
        return crop[:, ::-1] if mirror < 0.5 else crop


def _area_and_ratio(a: float, r: float) -> tuple[float, float]:
    """Return a random crop's share of the image's area, and its aspect ratio (width / height).

    Args:
        a: Uniform number in [0, 1) for the area, which is uniform in `_CROP_AREA`.
        r: Uniform number in [0, 1) for the aspect ratio, which is log-uniform in `_CROP_RATIO`.
    """
    share = _CROP_AREA[0] + a * (_CROP_AREA[1] - _CROP_AREA[0])
    # The ratio is log-uniform, so that wide and tall crops are equally likely.
    ratio = math.exp(math.log(_CROP_RATIO[0]) + r * math.log(_CROP_RATIO[1] / _CROP_RATIO[0]))
    return share, ratio


class Jitter:
    """View that turns, scales, stretches, moves and perhaps mirrors square images of one size.

    Pixels outside of the image repeat its border.

    Args:
        strength: Factor of the largest angle, scale, stretch and shift. At 1 they are 20 degrees,
            about 22 % and 16 %, and an eighth of a side.
        mirror: True mirrors half of the images left to right.
    """

    def __init__(self, strength: float, mirror: bool) -> None:
        self._strength = strength
        self._mirror = mirror

    def __call__(self, images: Sequence[np.ndarray], uniforms: np.ndarray) -> np.ndarray:
        """Return the transformed images, float32 [B, size, size, C].

        Args:
            images: B square images of one size, [size, size, C] each.
            uniforms: float64 [B, 5] in [0, 1). The columns choose the shift down, the shift right,
                mirroring (below a half), the angle with the stretch, and the scale.
        """
        x_BHWC = np.stack(images)
        side = x_BHWC.shape[1]
        down, right, _, turn, log_scale = (2 * uniforms.T - 1) * self._strength
        # A view has five random numbers, all in use. The stretch takes the low bits of the angle's
        # number, which move the angle by less than 2^-20 of its range.
        stretch = (2 * np.modf(uniforms[:, 3] * 2**20)[0] - 1) * self._strength
        flip = np.where((uniforms[:, 2] < 0.5) & self._mirror, -1.0, 1.0)
        angle = _MAX_ANGLE * turn
        tall = np.exp(_MAX_LOG_SCALE * log_scale + _MAX_LOG_STRETCH * stretch)
        wide = np.exp(_MAX_LOG_SCALE * log_scale - _MAX_LOG_STRETCH * stretch)
        centre = (side - 1) / 2
        y_N = (np.arange(side) - centre).astype(np.float32)

        cos_y = _per_image(tall * np.cos(angle))
        sin_y = _per_image(wide * np.sin(angle))
        sin_x = _per_image(flip * tall * np.sin(angle))
        cos_x = _per_image(flip * wide * np.cos(angle))
        y_BHW = cos_y * y_N[:, None] - sin_y * y_N
        x_BHW = sin_x * y_N[:, None] + cos_x * y_N

        shift = _MAX_SHIFT * side
        centre_y = _per_image(centre + shift * down)
        centre_x = _per_image(centre + shift * right)
        return _at_points(x_BHWC, y_BHW + centre_y, x_BHW + centre_x)


def _per_image(values_B: np.ndarray) -> np.ndarray:
    """Return one value per image as float32 [B, 1, 1]."""
    return values_B.astype(np.float32)[:, None, None]


def _at_points(images: np.ndarray, y_BHW: np.ndarray, x_BHW: np.ndarray) -> np.ndarray:
    """Sample square images at points by bilinear interpolation, float32 [B, H, W, C].

    Points outside of an image get the nearest pixel of its border.

    Args:
        images: [B, side, side, C].
        y_BHW: Row of each point in pixels. 0 is the first row, and fractions lie between rows.
        x_BHW: Column of each point in pixels, counted likewise.
    """
    last = images.shape[1] - 1
    y_BHW = np.clip(y_BHW, 0, last)
    x_BHW = np.clip(x_BHW, 0, last)
    top = np.minimum(y_BHW.astype(np.int32), max(0, last - 1))
    left = np.minimum(x_BHW.astype(np.int32), max(0, last - 1))
    # `bottom` differs from top + 1 only in an image of one pixel.
    bottom = np.minimum(top + 1, last)
    right = np.minimum(left + 1, last)
    down = (y_BHW - top)[..., None].astype(np.float32)
    along = (x_BHW - left)[..., None].astype(np.float32)

    row = np.arange(len(images))[:, None, None]
    upper = images[row, top, left] * (1 - along) + images[row, top, right] * along
    lower = images[row, bottom, left] * (1 - along) + images[row, bottom, right] * along
    return upper * (1 - down) + lower * down


def _unmirrored(view: View) -> View:
    """Return a view with the same random crops as `view`, but none of them mirrored."""

    def unmirrored(images: Sequence[np.ndarray], uniforms: np.ndarray) -> np.ndarray:
        uniforms = uniforms.copy()
        uniforms[:, 2] = 1.0  # A crop is mirrored if this number is below a half.
        return view(images, uniforms)

    return unmirrored


def training(config: DataConfig, size: int) -> View:
    """Return the view that brings training images of any size to the model's size.

    It is a random crop if `transforms.jitter` is None. Otherwise each image is fitted as in
    evaluation (`fitted`), and then rotated, scaled, stretched and shifted a little (`Jitter`).
    Either way half of the images are mirrored if `transforms.mirror` is set.

    Args:
        config: Data settings, of which `transforms` and `pixels` are used.
        size: Pixels on a side of the result.
    """
    transforms = config.transforms
    if transforms.jitter is None:
        crop = _random_crop(config, size)
        return crop if transforms.mirror else _unmirrored(crop)

    fit = fitted(config.pixels, size)
    jitter = Jitter(transforms.jitter, transforms.mirror)
    return lambda images, uniforms: jitter([*fit(images, uniforms)], uniforms)


def _random_crop(config: DataConfig, size: int) -> View:
    """Return the view for the setting data.transforms.crop: `inception_crop` or `RandomCrop`."""
    if config.transforms.crop == "inception":
        return inception_crop(size)
    return RandomCrop(size, config.pixels.interpolation)


def inception_crop(size: int) -> View:
    """Return the view of a random crop as in big_vision's `decode_jpeg_and_inception_crop`.

    The crop is mirrored half of the time. It is drawn as in TensorFlow's
    `sample_distorted_bounding_box`:

    1. The aspect ratio, width over height, is uniform from 3/4 to 1.33.
    2. The height is uniform among whole numbers for which the crop fits and has 5 to 100 % of the
       area. The height becomes one more or one less if the area of the rounded crop is not in this
       range.
    3. The place is uniform, except that the crop never lies at the lower or right edge of the
       image, unless it is as high or as wide as the image.

    The crop is scaled by bilinear interpolation of the four nearest pixels at any scale, as
    TensorFlow does without antialias. If no such crop fits, as in images a few pixels wide,
    TensorFlow draws again, up to a hundred times. Here the crop is then the complete image.

    Args:
        size: Pixels on a side of the result.
    """

    def view(images: Sequence[np.ndarray], uniforms: np.ndarray) -> np.ndarray:
        crops = []
        for image, row in zip(images, uniforms, strict=True):
            crops.append(_inception_crop(image, size, *row))
        return np.stack(crops)

    return view


def _inception_crop(
    image: np.ndarray, size: int, u: float, v: float, mirror: float, a: float, r: float
) -> np.ndarray:
    """Return one crop of an image, scaled to float32 [size, size, C] and perhaps mirrored.

    Args:
        u: Uniform number in [0, 1) that chooses the vertical place. So do `v` the horizontal place,
            `a` the height and `r` the aspect ratio. The crop is mirrored if `mirror` is below a
            half.
    """
    H, W, _ = image.shape
    height, width = _inception_size(H, W, a, r)
    top = int(u * (H - height))
    left = int(v * (W - width))
    crop = _pointwise(image[top : top + height, left : left + width], size)
    return crop[:, ::-1] if mirror < 0.5 else crop


def _inception_size(H: int, W: int, a: float, r: float) -> tuple[int, int]:
    """Return the height and the width of a random crop of an image of H x W pixels.

    The crop is the complete image, (H, W), if no crop has the drawn aspect ratio and 5 to 100 % of
    the area.

    Args:
        a: Uniform number in [0, 1) for the height.
        r: Uniform number in [0, 1) for the aspect ratio (width / height).
    """
    ratio = _INCEPTION_RATIO[0] + r * (_INCEPTION_RATIO[1] - _INCEPTION_RATIO[0])
    least = _INCEPTION_AREA[0] * H * W
    most = _INCEPTION_AREA[1] * H * W
    highest = min(H, round(math.sqrt(most / ratio)), int((W + 0.5) / ratio))
    lowest = min(round(math.sqrt(least / ratio)), highest)

    height = lowest + int(a * (highest - lowest + 1))
    # With the rounded width the area may leave its range. Then the height changes by 1.
    height += height * round(height * ratio) < least
    height -= height * round(height * ratio) > most
    width = round(height * ratio)

    has_area = least <= height * width <= most
    fits = 0 < height <= H and 0 < width <= W
    return (height, width) if has_area and fits else (H, W)


def _pointwise(image: np.ndarray, size: int) -> np.ndarray:
    """Resize an image [H, W, C] to [size, size, C] by bilinear interpolation without antialias.

    Each new pixel is interpolated from the four nearest pixels. The result is float32, with values
    rounded down to whole numbers.
    """
    top, bottom, down = _neighbours(image.shape[0], size)
    left, right, along = _neighbours(image.shape[1], size)
    rows = image[top] * (1 - down)[:, None, None] + image[bottom] * down[:, None, None]
    pixels = rows[:, left] * (1 - along)[:, None] + rows[:, right] * along[:, None]
    return np.floor(pixels).astype(np.float32)


def _neighbours(length: int, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the two neighbouring pixels of each of `size` evenly spread points along one axis.

    Args:
        length: Number of pixels of the image along the axis.

    Returns:
        Index of the pixel before each point, index of the pixel after it, and the weight of the
        pixel after it in a linear interpolation, [size] each.
    """
    # Half-pixel centres, as TensorFlow's resize has them since version 2.
    points = np.maximum((np.arange(size) + 0.5) * (length / size) - 0.5, 0)
    low = np.minimum(points.astype(int), length - 1)
    high = np.minimum(low + 1, length - 1)
    return low, high, (points - low).astype(np.float32)


def fitted(pixels: PixelsConfig, size: int) -> View:
    """Return the view that makes each image a square of the model's size, for evaluation.

    The setting `pixels.fit` says how: "edge" scales the shorter edge and cuts out the centre,
    "squash" scales both sides, "centre" cuts out the central 7/8 before it scales. The view uses no
    random numbers.

    Args:
        pixels: Settings, of which `fit`, `resize` and `interpolation` are used. A `resize` must be
            at least `size`, which `PixelsConfig.check` tests and this function does not.
        size: Pixels on a side of the result.
    """
    fit: Callable[[np.ndarray, int, PixelsConfig], np.ndarray]
    pixels = pixels.resolved(size)
    fit = _centre if pixels.fit == "centre" else _scaled
    return lambda images, uniforms: np.stack([fit(image, size, pixels) for image in images])


def _centre(image: np.ndarray, size: int, pixels: PixelsConfig) -> np.ndarray:
    """Return the central square of 7/8 of the shorter side, scaled to float32 [size, size, C]."""
    H, W, _ = image.shape
    side = max(1, round(_EVAL_CROP * min(H, W)))
    top = (H - side) // 2
    left = (W - side) // 2
    box = (left, top, left + side, top + side)
    return _resized(image, box, (size, size), pixels.interpolation)


def _scaled(image: np.ndarray, size: int, pixels: PixelsConfig) -> np.ndarray:
    """Resize an image by the fit "edge" or "squash", and cut out its middle.

    "edge" scales the shorter edge to `pixels.resize` and keeps the proportions. "squash" scales
    both edges to `pixels.resize`, or to `size` if that is None.

    Args:
        image: Image [H, W, C].
        size: Pixels on a side of the result.
        pixels: Settings, in which `resize` is set for the fit "edge" (`PixelsConfig.resolved`).

    Returns:
        The central pixels, float32 [size, size, C].
    """
    H, W, _ = image.shape
    height = pixels.resize or size
    width = height
    if pixels.fit == "edge":
        # torchvision and transformers round down. big_vision, which resizes by `area`, rounds to
        # nearest.
        whole_number = round if pixels.interpolation == "area" else int
        if H <= W:
            width = whole_number(width * W / H)
        else:
            height = whole_number(height * H / W)

    top = (height - size) // 2
    left = (width - size) // 2
    if max(height, width) > _LONGEST * size:
        # An image of 1 x 1,000,000 pixels would fill the memory if it were scaled before it is
        # cropped.
        box = (
            left * W / width,
            top * H / height,
            (left + size) * W / width,
            (top + size) * H / height,
        )
        return _resized(image, box, (size, size), pixels.interpolation)
    resized = _resized(image, (0, 0, W, H), (height, width), pixels.interpolation)
    return resized[top : top + size, left : left + size]


def _resized(
    image: np.ndarray,
    box: tuple[float, float, float, float],
    size: tuple[int, int],
    interpolation: Interpolation,
) -> np.ndarray:
    """Cut a box out of an image and resize the box to float32 [height, width, C].

    Args:
        image: uint8 [H, W, C].
        box: Edges (left, top, right, bottom) in pixels of the image. They may have fractions. The
            interpolation "area" rounds them.
        size: (height, width) of the result in pixels.
        interpolation: "area" for the mean of covered pixels, otherwise a method of PIL.
    """
    if interpolation == "area":
        left, top, right, bottom = (round(edge) for edge in box)
        return _by_area(image[top:bottom, left:right], size)

    from PIL import Image

    height, width = size
    # PIL takes grey images without an axis of channels.
    pil_pixels = image[..., 0] if image.shape[-1] == 1 else image
    resampling = Image.Resampling[interpolation.upper()]
    resized = Image.fromarray(pil_pixels).resize((width, height), resampling, box=box)
    return np.asarray(resized, np.float32).reshape(height, width, image.shape[-1])


def _by_area(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Resize an image so that each new pixel is the mean of the area that it covers.

    As in TensorFlow's `tf.image.resize` by area, an old pixel that is covered in part has the
    weight of this part. The result is float32 [height, width, C], with values rounded down to whole
    numbers.

    Args:
        image: [H, W, C].
        size: (height, width) of the result in pixels.
    """
    down = _area_shares(image.shape[0], size[0])
    along = _area_shares(image.shape[1], size[1])
    rows = np.tensordot(down, image.astype(np.float32), axes=(1, 0))
    means = np.einsum("xw,hwc->hxc", along, rows, optimize=True)
    # A float32 sum may be a little below a whole number, which must not be rounded down.
    return np.floor(means + np.float32(1e-3))


def _area_shares(length: int, count: int) -> np.ndarray:
    """Return the matrix that resizes one axis by area, from `length` to `count` pixels.

    Entry [i, j] is the share of new pixel i that old pixel j covers, float32 [count, length]. Each
    row adds up to 1.
    """
    start = np.arange(count)[:, None] * (length / count)
    pixel = np.arange(length)
    covered = np.minimum(pixel + 1, start + length / count) - np.maximum(pixel, start)
    return (np.maximum(covered, 0) * (count / length)).astype(np.float32)
