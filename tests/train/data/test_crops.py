"""big_vision's random crop: what TensorFlow's sampling allows, and bilinear interpolation at points."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from mupax.train.config.data import DataConfig, TransformsConfig
from mupax.train.data import crops, images

pytestmark = pytest.mark.core


def test_crops_have_the_shares_and_ratios_of_tensorflows_sampling() -> None:
    random = np.random.default_rng(0)
    for H, W in ((300, 400), (400, 300), (500, 120)):
        sizes = np.array([crops._inception_size(H, W, *random.random(2)) for _ in range(2000)])
        cut = sizes[(sizes != (H, W)).any(axis=1)]
        area, ratio = cut.prod(1) / (H * W), cut[:, 1] / cut[:, 0]
        assert len(cut) > 1900
        assert 0.05 <= area.min() < 0.08
        assert area.max() > 0.9 * min(1, W / H / 0.75)
        assert 0.74 < ratio.min() < 0.78
        assert 1.27 < ratio.max() < 1.36
    # Of a square at ratio 1 heights are even from 0.05^1/2 to 1 of it: their mean is half of the sum.
    heights = [crops._inception_size(1000, 1000, a, (1 - 0.75) / 0.58)[0] for a in (np.arange(1000) + 0.5) / 1000]
    assert np.mean(heights) == pytest.approx((1000 * 0.05**0.5 + 1000) / 2, abs=1)


def test_a_crop_is_scaled_by_its_four_nearest_pixels() -> None:
    """PIL's transform takes points, without its resize's antialias, and rounds where TensorFlow's cast rounds down."""
    random = np.random.default_rng(1)
    for shape in ((37, 23, 3), (5, 9, 3)):
        image = random.integers(0, 256, shape).astype(np.uint8)
        extent = (0, 0, shape[1], shape[0])
        theirs = Image.fromarray(image).transform((16, 16), Image.Transform.EXTENT, extent, Image.Resampling.BILINEAR)
        apart = np.asarray(theirs, float) - crops._pointwise(image, 16)
        assert apart.min() >= 0
        assert apart.max() <= 1
    np.testing.assert_array_equal(crops._pointwise(image[:5, :5], 5), image[:5, :5])


def test_the_crop_of_a_config() -> None:
    config = DataConfig(name="images:x", batch_size=2, transforms=TransformsConfig(crop="inception"))
    image = np.random.default_rng(2).integers(0, 256, (40, 30, 3)).astype(np.uint8)
    uniforms = np.random.default_rng(3).random((2, images.NUMBERS))
    ours, plain = crops.training(config, 8), crops.training(DataConfig(name="images:x", batch_size=2), 8)
    assert ours([image, image], uniforms).shape == (2, 8, 8, 3)
    assert not np.array_equal(ours([image, image], uniforms), plain([image, image], uniforms))
    mirrored = uniforms.copy()
    mirrored[:, 2] = 1 - mirrored[:, 2]
    np.testing.assert_array_equal(ours([image], uniforms[:1]), ours([image], mirrored[:1])[:, :, ::-1])
