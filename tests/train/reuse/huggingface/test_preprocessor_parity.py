"""Images as a model reads them, and as the processor of its exported folder in `transformers`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mupax.train.config.data import PixelsConfig
from mupax.train.data import crops, images
from mupax.train.reuse.huggingface import preprocessor
from mupax.zoo.configs import ViTConfig
from tests.train.reuse.huggingface.parity_marks import needs_transformers

pytestmark = [pytest.mark.parity, needs_transformers]

MODEL = ViTConfig(
    width=8,
    depth=1,
    num_heads=2,
    image_size=28,
    patch_size=4,
    channels=3,
    num_classes=3,
    pool="cls",
)
COLOUR = PixelsConfig(
    fit="squash", interpolation="bicubic", mean=(0.48, 0.45, 0.4), std=(0.23, 0.22, 0.25)
)
CASES = {
    "squash": COLOUR,
    "squash, then cut": PixelsConfig(fit="squash", resize=32, interpolation="lanczos"),
    "edge": PixelsConfig(fit="edge", resize=32),
    "edge of the model's size": PixelsConfig(fit="edge", resize=28, interpolation="hamming"),
    "the default": PixelsConfig(),
}


def theirs(pixels: PixelsConfig, model: ViTConfig, folder: Path) -> Any:
    """Return a function from an image to the array that the exported processor makes of it."""
    import transformers

    fields = preprocessor.to_huggingface(pixels, model, "vit")
    (folder / "preprocessor_config.json").write_text(json.dumps(fields))
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")

    def process(image: np.ndarray, **options: bool) -> np.ndarray:
        read = processor(Image.fromarray(image), return_tensors="np", **options)
        return read["pixel_values"].transpose(0, 2, 3, 1)

    return process


def ours(pixels: PixelsConfig, size: int, image: np.ndarray) -> np.ndarray:
    return crops.fitted(pixels, size)([image], np.zeros((1, images.NUMBERS)))


def largest_difference(pixels: PixelsConfig, folder: Path) -> float:
    """Return the largest difference of normalized values, over random images of several shapes."""
    process = theirs(pixels, MODEL, folder)
    draw = np.random.default_rng(0)
    worst = 0.0
    for shape in ((40, 64), (61, 37), (28, 28), (20, 31), (64, 64)):
        image = draw.integers(0, 256, (*shape, 3), dtype=np.uint8)
        normalized = images.normalized(ours(pixels, 28, image), pixels)
        expected = process(image)
        assert normalized.shape == expected.shape == (1, 28, 28, 3)
        worst = max(worst, float(np.abs(normalized - expected).max()))
    return worst


@pytest.mark.parametrize("case", CASES)
def test_images_are_the_same(case: str, tmp_path: Path) -> None:
    assert largest_difference(CASES[case], tmp_path) < 1e-5


@pytest.mark.parametrize("size", [8, 24, 28, 33, 64, 224])
def test_levels_of_a_shorter_edge_of_eight_sevenths_are_the_same_to_the_bit(
    size: int, tmp_path: Path
) -> None:
    """The default of runs on images, for files of any size and shape."""
    pixels = PixelsConfig(fit="edge", resize=round(8 / 7 * size))
    model = dataclasses.replace(MODEL, image_size=size, patch_size=1)
    process = theirs(pixels, model, tmp_path)
    draw = np.random.default_rng(0)
    shapes = [
        (size, size),
        (size + 1, 3 * size),
        (2 * size + 1, size + 2),
        (max(1, size // 3), size),
        (97, 61),
        (101, 350),
    ]
    for shape in shapes:
        image = draw.integers(0, 256, (*shape, 3), dtype=np.uint8)
        expected = process(image, do_rescale=False, do_normalize=False)
        np.testing.assert_array_equal(ours(pixels, size, image), expected, err_msg=str(shape))


def test_control_our_own_crop_is_not_theirs_and_says_so(tmp_path: Path) -> None:
    centre = PixelsConfig(fit="centre")
    assert largest_difference(centre, tmp_path) > 0.01
    assert "cuts 28 out" in (preprocessor.note(centre, MODEL) or "")
    assert preprocessor.note(COLOUR, MODEL) is None
    assert preprocessor.note(PixelsConfig(), MODEL) is None
