"""The images that a model reads here, and what the processor of an exported folder makes of the same files in `transformers`."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mupax.train.config.data import PixelsConfig
from mupax.train.data import crops, images
from mupax.train.reuse.huggingface import preprocessor
from mupax.zoo.configs import ViTConfig

MISSING = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.parity,
    pytest.mark.skipif(
        bool(MISSING), reason=f"{' and '.join(MISSING)} not installed; `make parity` does it"
    ),
]

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


def largest_difference(pixels: PixelsConfig, folder: Path) -> float:
    """Over random images of several shapes, in normalized values."""
    import transformers

    (folder / "preprocessor_config.json").write_text(
        json.dumps(preprocessor.to_huggingface(pixels, MODEL, "vit"))
    )
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    draw, worst = np.random.default_rng(0), 0.0
    for shape in ((40, 64), (61, 37), (28, 28), (20, 31), (64, 64)):
        image = draw.integers(0, 256, (*shape, 3), dtype=np.uint8)
        ours = images.normalized(
            crops.fitted(pixels, 28)([image], np.zeros((1, images.NUMBERS))), pixels
        )
        theirs = processor(Image.fromarray(image), return_tensors="np")["pixel_values"].transpose(
            0, 2, 3, 1
        )
        assert ours.shape == theirs.shape == (1, 28, 28, 3)
        worst = max(worst, float(np.abs(ours - theirs).max()))
    return worst


@pytest.mark.parametrize("case", CASES)
def test_images_are_the_same(case: str, tmp_path: Path) -> None:
    assert largest_difference(CASES[case], tmp_path) < 1e-5


@pytest.mark.parametrize("size", [8, 24, 28, 33, 64, 224])
def test_levels_of_a_shorter_edge_of_eight_sevenths_are_the_same_to_the_bit(
    size: int, tmp_path: Path
) -> None:
    """What runs on images have unless told: files of any size and shape."""
    import transformers

    pixels, model = (
        PixelsConfig(fit="edge", resize=round(8 / 7 * size)),
        dataclasses.replace(MODEL, image_size=size, patch_size=1),
    )
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps(preprocessor.to_huggingface(pixels, model, "vit"))
    )
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
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
        ours = crops.fitted(pixels, size)([image], np.zeros((1, images.NUMBERS)))
        read = processor(
            Image.fromarray(image), do_rescale=False, do_normalize=False, return_tensors="np"
        )
        theirs = read["pixel_values"].transpose(0, 2, 3, 1)
        np.testing.assert_array_equal(ours, theirs, err_msg=str(shape))


def test_control_our_own_crop_is_not_theirs_and_says_so(tmp_path: Path) -> None:
    centre = PixelsConfig(fit="centre")
    assert largest_difference(centre, tmp_path) > 0.01
    assert "cuts 28 out" in (preprocessor.note(centre, MODEL) or "")
    assert preprocessor.note(COLOUR, MODEL) is None
    assert preprocessor.note(PixelsConfig(), MODEL) is None
