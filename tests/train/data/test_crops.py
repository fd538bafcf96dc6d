"""big_vision's crops: what TensorFlow's sampling allows, bilinear interpolation at points, and means of areas."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from mupax.train.config.data import DataConfig, PixelsConfig, TransformsConfig
from mupax.train.data import crops, images

pytestmark = pytest.mark.core


def test_crops_have_the_shares_and_ratios_of_tensorflows_sampling() -> None:
    random = np.random.default_rng(0)
    for H, W in ((300, 400), (400, 300), (500, 120)):
        sizes = np.array([crops._inception_size(H, W, *random.random(2)) for _ in range(2000)])
        cut = sizes[(sizes != (H, W)).any(axis=1)]
        area, ratio = cut.prod(1) / (H * W), cut[:, 1] / cut[:, 0]
        assert (
            len(cut) == 2000
        )  # a height at an end of its range is mended by one: no image is left whole
        assert 0.05 <= area.min() < 0.08
        assert area.max() > 0.9 * min(1, W / H / 0.75)
        assert 0.74 < ratio.min() < 0.78
        assert 1.27 < ratio.max() < 1.36
    # Of a square at ratio 1 heights are even from 0.05^1/2 to 1 of it: their mean is half of the sum.
    heights = [
        crops._inception_size(1000, 1000, a, (1 - 0.75) / 0.58)[0]
        for a in (np.arange(1000) + 0.5) / 1000
    ]
    assert np.mean(heights) == pytest.approx((1000 * 0.05**0.5 + 1000) / 2, abs=1)


def test_a_crop_lies_where_tensorflow_puts_it() -> None:
    """A place is one of H - h, and the last one, which would touch the far edge, is never drawn."""
    image = np.arange(40 * 60, dtype=np.float64).reshape(40, 60, 1) // 60
    last = np.nextafter(1, 0)
    for a in (0.1, 0.5, 0.9):
        h, _ = crops._inception_size(40, 60, a, 0.4)
        view = crops.inception_crop(h)
        rows = [view([image], np.array([[u, 0.5, 0.9, a, 0.4]]))[0][:, 0, 0] for u in (0, last)]
        np.testing.assert_array_equal(rows[0], np.arange(h))
        np.testing.assert_array_equal(rows[1], np.arange(39 - h, 39))


def test_a_crop_is_scaled_by_its_four_nearest_pixels() -> None:
    """PIL's transform takes points, without its resize's antialias, and rounds where TensorFlow's cast rounds down."""
    random = np.random.default_rng(1)
    for shape in ((37, 23, 3), (5, 9, 3)):
        image = random.integers(0, 256, shape).astype(np.uint8)
        extent = (0, 0, shape[1], shape[0])
        theirs = Image.fromarray(image).transform(
            (16, 16), Image.Transform.EXTENT, extent, Image.Resampling.BILINEAR
        )
        apart = np.asarray(theirs, float) - crops._pointwise(image, 16)
        assert apart.min() >= 0
        assert apart.max() <= 1
    np.testing.assert_array_equal(crops._pointwise(image[:5, :5], 5), image[:5, :5])


def test_the_crop_of_a_config() -> None:
    config = DataConfig(
        name="images:x", batch_size=2, transforms=TransformsConfig(crop="inception")
    )
    image = np.random.default_rng(2).integers(0, 256, (40, 30, 3)).astype(np.uint8)
    uniforms = np.random.default_rng(3).random((2, images.NUMBERS))
    ours, plain = (
        crops.training(config, 8),
        crops.training(DataConfig(name="images:x", batch_size=2), 8),
    )
    assert ours([image, image], uniforms).shape == (2, 8, 8, 3)
    assert not np.array_equal(ours([image, image], uniforms), plain([image, image], uniforms))
    mirrored = uniforms.copy()
    mirrored[:, 2] = 1 - mirrored[:, 2]
    np.testing.assert_array_equal(
        ours([image], uniforms[:1]), ours([image], mirrored[:1])[:, :, ::-1]
    )


@pytest.mark.parametrize(
    ("shape", "size"), [((6, 9, 3), (4, 6)), ((5, 7, 1), (5, 3)), ((3, 4, 3), (7, 5))]
)
def test_an_area_is_the_mean_of_what_it_covers(
    shape: tuple[int, ...], size: tuple[int, int]
) -> None:
    """As `tf.image.resize` by area: here by copies of every pixel, of which each of the output's covers a whole number."""
    image = np.random.default_rng(4).integers(0, 256, shape).astype(np.uint8)
    copies = np.repeat(np.repeat(image, size[0], axis=0), size[1], axis=1).astype(float)
    means = copies.reshape(size[0], shape[0], size[1], shape[1], shape[2]).mean((1, 3))
    exact = np.floor(np.round(means, 9))
    ours = crops._resized(image, (0, 0, shape[1], shape[0]), size, "area")
    np.testing.assert_array_equal(ours, exact)
    box = crops._resized(image, (0, 0, shape[1], shape[0]), size, "box")
    assert np.abs(box - exact).max() > 2  # the control: PIL's box counts whole pixels


def test_an_image_is_scaled_and_cut_as_big_vision_evaluates() -> None:
    """resize_small(24) and central_crop(16): the longer side to the nearest whole number, the cut's corner rounded down."""
    image = np.random.default_rng(5).integers(0, 256, (30, 47, 3)).astype(np.uint8)
    whole = crops._resized(image, (0, 0, 47, 30), (24, 38), "area")  # 47 * 24 / 30 is 37.6
    view = crops.fitted(PixelsConfig(fit="edge", resize=24, interpolation="area"), 16)
    np.testing.assert_array_equal(
        view([image], np.zeros((1, images.NUMBERS)))[0], whole[4:20, 11:27]
    )
