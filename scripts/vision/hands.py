"""Digits of other hands, 20 degrees askew: the task of `scripts.vision.finetune` whose classes the source knows.

The source is `vit-digits` on scikit-learn's digits but those of the last three forms (`mupax.train.data.sources.digits`). Of these forms four
images a class are labelled, others for every seed, and all others are scored, both turned by 20 degrees as a sheet that lies askew.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from mupax.train.data.sources.digits import FIRST_TEST_FORM

TASK = "the same digits of other hands, 20 degrees askew"
SOURCE = "vit-digits --data.split writer --model.width 32 --model.depth 2 --model.num-heads 4 --steps 200"
ARMS: dict[str, tuple[float | None, ...]] = {"linear probe": (9e-2, 3e-2, 9e-3, 3e-3, 1e-3), "adapters": (None,)}
"""Rates of arms that are others here: the probe starts with the source's readout."""
DEGREES, EACH = 20, 4
"""How far images are turned, and labelled ones of a class."""


def source(workdir: Path) -> Path:
    """The run that the others go on from, trained if it is not there.

    Args:
        workdir: that it is kept in.
    """
    run = workdir / "source-digits"
    if not (run / "checkpoints" / "200").exists():
        subprocess.run(
            [sys.executable, "-m", "mupax.train", *SOURCE.split(), "--workdir", str(run), "--resume"], check=True
        )
    return run


def few_images(workdir: Path, seed: int) -> Path:
    """A folder of images per class: few to train on, drawn by the seed, and all others to test.

    Args:
        workdir: that it is made in.
        seed: of the draw.
    """
    folder, digits = workdir / f"askew-digits-{seed}", cast("Any", load_digits())
    for label in range(10):
        here = FIRST_TEST_FORM + np.flatnonzero(digits.target[FIRST_TEST_FORM:] == label)
        chosen, remainder = np.split(np.random.default_rng([seed, label, 9]).permutation(here), [EACH])
        for side, places in (("train", chosen), ("val", np.sort(remainder))):
            path = folder / side / f"{label}"
            path.mkdir(parents=True, exist_ok=True)
            for i in places:
                _turned(digits.images[i]).save(path / f"{i}.png")
    return folder


def _turned(image: np.ndarray) -> Image.Image:
    """An image of 8x8 numbers from 0 to 16, turned at four times its size."""
    flat = Image.fromarray(np.round(image * 255 / 16).astype(np.uint8))
    large = flat.resize((32, 32), Image.Resampling.BICUBIC).rotate(DEGREES, Image.Resampling.BICUBIC)
    return large.resize((8, 8), Image.Resampling.BICUBIC)
