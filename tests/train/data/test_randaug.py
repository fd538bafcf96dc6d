"""RandAugment: every operation against PIL's own or a formula written out pixel by pixel, and which image goes through which."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from mupax.train.data.images import GREY, OPERATIONS, randaugmented

pytestmark = pytest.mark.core

FIRST, SECOND = [0.2, 0.6], [0.7, 0.6]
"""Uniforms of a positive and a negative sign; a cutout's centre at 0.2 of the rows and 0.6 of the columns."""


@pytest.fixture(scope="module")
def image() -> np.ndarray:
    """Every value from 20 to 230, unevenly often."""
    random = np.random.default_rng(0)
    return (20 + 210 * random.beta(0.7, 1.3, (29, 23, 3))).astype(np.uint8)


def of_pil(function: Callable[[Image.Image], Image.Image], image: np.ndarray) -> np.ndarray:
    return np.asarray(function(Image.fromarray(image)))


EXACT: dict[str, Callable[[Image.Image], Image.Image]] = {
    "autocontrast": ImageOps.autocontrast,
    "equalize": ImageOps.equalize,
    "invert": ImageOps.invert,
    "posterize": lambda image: ImageOps.posterize(image, 2),
    "solarize": lambda image: ImageOps.solarize(image, 128),
    "brightness": lambda image: ImageEnhance.Brightness(image).enhance(1.0),
    "translate_x": lambda image: image.transform(image.size, Image.Transform.AFFINE, (1, 0, 5, 0, 1, 0), fillcolor=(GREY,) * 3),
    "translate_y": lambda image: image.transform(image.size, Image.Transform.AFFINE, (1, 0, 0, 0, 1, 6), fillcolor=(GREY,) * 3),
}  # fmt: skip
"""At half strength. PIL takes the pixel at the middle of where one lands, which is ours where it lands on whole pixels."""


@pytest.mark.parametrize("name", EXACT)
def test_an_operation_is_pils(name: str, image: np.ndarray) -> None:
    np.testing.assert_array_equal(OPERATIONS[name](image, 0.5, FIRST), of_pil(EXACT[name], image))


@pytest.mark.parametrize(
    ("name", "enhanced", "levels"),
    [("color", ImageEnhance.Color, 2), ("sharpness", ImageEnhance.Sharpness, 1), ("brightness", ImageEnhance.Brightness, 1)],
)  # fmt: skip
def test_an_enhancement_is_pils_to_a_few_levels_of_rounding(
    name: str, enhanced: type, levels: int, image: np.ndarray
) -> None:
    """PIL rounds the grey image and the smooth one, which are rounded down here; 0.9 of that is left at full strength."""
    for strength in (0.1, 1.0):
        ours = OPERATIONS[name](image, strength, FIRST).astype(int)
        theirs = of_pil(lambda pil, s=strength: enhanced(pil).enhance(0.1 + 1.8 * s), image).astype(
            int
        )
        assert np.abs(ours - theirs).max() <= levels
        assert np.abs(ours - image).max() > 10


def test_the_smooth_image_is_the_filters(image: np.ndarray) -> None:
    """Away from the image by 0.1 of the distance: the factor of no strength."""
    smooth = of_pil(lambda pil: pil.filter(ImageFilter.SMOOTH), image).astype(float)
    want = np.where(
        np.pad(np.ones((27, 21, 1), bool), ((1, 1), (1, 1), (0, 0))),
        smooth + 0.1 * (image - smooth),
        image,
    )
    assert np.abs(OPERATIONS["sharpness"](image, 0.0, FIRST) - want).max() <= 2


def test_contrast_pulls_away_from_196(image: np.ndarray) -> None:
    want = np.clip(196 + 1.9 * (image.astype(float) - 196), 0, 255)
    assert np.abs(OPERATIONS["contrast"](image, 1.0, FIRST) - want).max() <= 1
    np.testing.assert_array_equal(OPERATIONS["contrast"](image, 0.5, FIRST), image)


def test_solarize_add_lifts_what_is_dark(image: np.ndarray) -> None:
    want = [v if v >= 128 else min(255, v + 55) for v in image.ravel().tolist()]
    np.testing.assert_array_equal(OPERATIONS["solarize_add"](image, 0.5, FIRST).ravel(), want)


def test_at_full_strength_solarize_spares_all_and_posterize_keeps_four_bits(
    image: np.ndarray,
) -> None:
    np.testing.assert_array_equal(OPERATIONS["solarize"](image, 1.0, FIRST), image)
    np.testing.assert_array_equal(OPERATIONS["posterize"](image, 1.0, FIRST), image // 16 * 16)


def nearest(image: np.ndarray, at: Callable[[int, int], tuple[float, float]]) -> np.ndarray:
    """The image whose pixel (x, y) is the one nearest to at(x, y), pixel by pixel."""
    H, W, _ = image.shape
    out = np.full_like(image, GREY)
    for y in range(H):
        for x in range(W):
            column, row = (math.floor(value + 0.5) for value in at(x, y))
            if 0 <= row < H and 0 <= column < W:
                out[y, x] = image[row, column]
    return out


@pytest.mark.parametrize(("uniforms", "sign"), [(FIRST, 1), (SECOND, -1)])
def test_what_moves_is_the_nearest_pixel_of_the_formula(
    uniforms: list[float], sign: int, image: np.ndarray
) -> None:
    angle = sign * math.radians(30) * 0.7
    cos, sin = math.cos(angle), math.sin(angle)
    places = {
        "rotate": lambda x, y: (
            11 + cos * (x - 11) - sin * (y - 14),
            14 + sin * (x - 11) + cos * (y - 14),
        ),
        "shear_x": lambda x, y: (x + sign * 0.21 * y, y),
        "shear_y": lambda x, y: (x, y + sign * 0.21 * x),
        "translate_x": lambda x, y: (x + sign * 0.7 * 23 * 100 / 224, y),
        "translate_y": lambda x, y: (x, y + sign * 0.7 * 29 * 100 / 224),
    }
    for name, at in places.items():
        np.testing.assert_array_equal(
            OPERATIONS[name](image, 0.7, uniforms), nearest(image, at), err_msg=name
        )


def test_cutout_is_a_grey_square_about_its_centre(image: np.ndarray) -> None:
    want = image.copy()
    want[0:10, 8:18] = GREY  # 5 rows on either side of row 5, and of column 13
    np.testing.assert_array_equal(OPERATIONS["cutout"](image, 1.0, FIRST), want)


def test_a_layer_is_drawn_for_each_image_and_grey_ones_go_through_all() -> None:
    names = list(OPERATIONS)
    assert len(names) == 16
    images = np.random.default_rng(1).integers(0, 17, (16, 8, 8, 1)).astype(np.float32)
    uniforms = np.array([[[(i + 0.5) / 16, *FIRST]] for i in range(16)])
    ours = randaugmented(images, uniforms, 7.0, white=16)
    for name, image, output in zip(names, images, ours, strict=True):
        levels = np.rint(image * (255 / 16)).astype(np.uint8)
        np.testing.assert_allclose(
            output, OPERATIONS[name](levels, 0.7, FIRST) * (16 / 255), rtol=1e-6, err_msg=name
        )
    twice = randaugmented(images, np.concatenate([uniforms, uniforms[::-1]], axis=1), 7.0, white=16)
    once = randaugmented(ours, uniforms[::-1], 7.0, white=16)
    np.testing.assert_array_equal(twice, once)
