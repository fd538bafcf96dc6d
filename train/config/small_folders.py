"""A recipe for a small folder of images, chosen by how many images and classes it has and how large they are.

The recipes for a laptop are made for data of their own, and read larger pictures at 128 pixels: 20 steps in 84 CPU seconds.
Images of 32 pixels and a convolutional stem take 400 steps in 79 (docs/howto/own_images.md has the figures, and what beats them).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import NamedTuple

from mupax.train.config.data import DataConfig, TransformsConfig
from mupax.train.config.preset import PresetConfig
from mupax.train.config.run import CheckpointConfig, Config, LogConfig, OptimizerConfig
from mupax.zoo import configs
from mupax.zoo.vit.config import ViTConfig

MOST_IMAGES = 20_000
"""Training images of the largest folder that is small."""
RECIPES = ("vit-digits", "vit-endless", "vit-fashion")
"""Recipes of a laptop, made for other images, in whose place one is chosen for a small folder."""
MODEL = "vit-folder"
BASE = "vit-folder-proxy"
"""Model that the preset of the recipe is relative to."""
_TINY_SIDE = 16
_SMALL_SIDE = 40
_LARGE_SIDE = 32
_EPOCHS = 25
_FEWEST_STEPS = 300
_MOST_STEPS = 2_000
_LEAST_SIDE = 4
_BATCH = 64
_JITTER = 0.4


class FolderFacts(NamedTuple):
    """Sizes of a folder of images, by which its recipe is chosen."""

    images: int
    """Images to train on."""
    classes: int
    channels: int
    """1 for grey, 3 for colour."""
    side: int
    """Pixels on the shorter side of the median image."""


class FolderRecipe(NamedTuple):
    """Fields of a run that are chosen for a folder."""

    image_size: int
    patch_size: int
    stem: int
    """Convolutions that make patches."""
    jitter: float
    mirror: bool
    steps: int


def choose(facts: FolderFacts) -> FolderRecipe | None:
    """Return the recipe for a folder; None for one that is not small.

    * Tiny drawings (up to 16 pixels) keep their size, in patches of 2; small images (up to 40) keep theirs, in patches of 4;
      larger ones are scaled to 32 pixels, in patches of 8, since most of a minute on two cores is spent per pixel.
    * Grey images are not mirrored: they are often letters and digits.
    * 25 epochs are trained, 300 steps at least and 2,000 at most.
    """
    if facts.images > MOST_IMAGES:
        return None
    if facts.side <= _TINY_SIDE:
        patch_size = 2
        stem = 2
        side = max(facts.side, _LEAST_SIDE)
    elif facts.side <= _SMALL_SIDE:
        patch_size = 4
        stem = 3
        side = facts.side
    else:
        patch_size = 8
        stem = 3
        side = _LARGE_SIDE
    steps = _EPOCHS * facts.images // _BATCH
    return FolderRecipe(
        image_size=side - side % patch_size,
        patch_size=patch_size,
        stem=stem,
        jitter=_JITTER,
        mirror=facts.channels == 3,
        steps=min(max(steps, _FEWEST_STEPS), _MOST_STEPS),
    )


def finetuning_transforms(facts: FolderFacts) -> TransformsConfig:
    """Return how fine-tuning shows the images of a folder: a small folder of small images by a light jitter, else by crops.

    A random crop may hold a twelfth of an image, and of a drawing of 30 pixels that says little.
    """
    if facts.images > MOST_IMAGES or facts.side > _SMALL_SIDE:
        return TransformsConfig()
    return TransformsConfig(jitter=_JITTER, mirror=facts.channels == 3)


def recipe_config(recipe: FolderRecipe, facts: FolderFacts, name: str, data_name: str) -> Config:
    """Return the run of a chosen recipe.

    Args:
        name: of the recipe that the user wrote, which names the run.
        data_name: images:FOLDER.
    """
    model = configs.get(MODEL)
    assert isinstance(model, ViTConfig)
    model = dataclasses.replace(
        model,
        image_size=recipe.image_size,
        patch_size=recipe.patch_size,
        stem=recipe.stem,
        channels=facts.channels,
        num_classes=facts.classes,
    )
    data = DataConfig(name=data_name, batch_size=_BATCH, eval_batch_size=200)
    transforms = dataclasses.replace(
        data.transforms, jitter=recipe.jitter, mirror=recipe.mirror, label_smoothing=0.1
    )
    # The whole image: at 32 pixels what lies at the border of a picture counts.
    pixels = dataclasses.replace(data.pixels, fit="squash")
    return Config(
        recipe=name,
        model=model,
        data=dataclasses.replace(data, transforms=transforms, pixels=pixels),
        preset=PresetConfig(name="mup", base=BASE),
        optimizer=OptimizerConfig(
            peak_lr=3e-3, warmup_steps=recipe.steps // 10, weight_decay=0.05, clip_norm=1.0
        ),
        log=LogConfig(eval_every_steps=None),
        checkpoint=CheckpointConfig(every_steps=500),
        steps=recipe.steps,
    )


OWN_FLAGS = ("model", "preset", "init-from", "optimizer.name", "optimizer.peak-lr", "joint", "base")
"""Flags that design a run: where a user writes one, the recipe stays the one that was named."""
_SIZES = frozenset({"model.num-classes", "model.channels", "model.image-size", "model.patch-size"})


def designs(flags: Collection[str]) -> str | None:
    """Return the first flag with which a user designs the run, so that no recipe is chosen; None without one.

    Args:
        flags: of a command line, with hyphens and without values.
    """
    for flag in sorted(flags):
        name = flag.removeprefix("--")
        if name in OWN_FLAGS or name.startswith("preset."):
            return flag
        if (
            name.startswith("model.")
            and name not in _SIZES
            and not name.startswith("model.compute.")
        ):
            return flag
    return None


def line(facts: FolderFacts, recipe: FolderRecipe) -> str:
    """Return what a command prints of a chosen recipe."""
    mirrored = "mirrored" if recipe.mirror else "not mirrored"
    return (
        f"small folder: {facts.images:,} training images in {facts.classes} classes, {facts.side} pixels: {MODEL}, images of "
        f"{recipe.image_size} x {recipe.image_size} in patches of {recipe.patch_size} x {recipe.patch_size} by {recipe.stem} "
        f"convolutions, jitter {recipe.jitter:g}, {mirrored}, {recipe.steps} steps; flags change any of it, and --model vit-tiny "
        "keeps the recipe as it is"
    )
