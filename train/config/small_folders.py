"""Recipe for a small folder of images, chosen by its number of images and classes and their size.

The recipes for a laptop are made for data of their own. They read larger pictures at 128 pixels,
where 84 CPU seconds are 20 steps. Images of 32 pixels and a convolutional stem take 1,250 steps in
57 seconds (`python -m scripts.bench.recipes.small_folders` compares them with other classifiers).

Muon, its rate and cutmix were chosen by accuracy on splits that the comparison does not use: two of
emoji, icons and digits, and one of Fashion-MNIST.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import NamedTuple

from mupax.terminal import counted
from mupax.train.config.data import DataConfig, TransformsConfig
from mupax.train.config.preset import PresetConfig
from mupax.train.config.run import CheckpointConfig, Config, LogConfig, OptimizerConfig
from mupax.zoo import configs
from mupax.zoo.vit.config import ViTConfig

MOST_IMAGES = 20_000
"""Largest number of training images of a folder that counts as small."""
RECIPES = ("vit-digits", "vit-endless", "vit-fashion")
"""Recipes that are replaced by the chosen one if their data are a small folder."""
MODEL = "vit-folder"
BASE = "vit-folder-proxy"
"""Model that the preset of the chosen recipe is relative to."""
_TINY_SIDE = 16
"""Largest side of a tiny drawing, in pixels."""
_SMALL_SIDE = 40
"""Largest side of a small image, in pixels. Fine-tuning shows these without crops."""
_SCALED_SIDE = 32
"""Side that all but tiny drawings are scaled to, in pixels."""
_EPOCHS = 25
_FEWEST_STEPS = 300
_MOST_STEPS = 2_000
_LEAST_SIDE = 4
_CUTMIX_EPOCHS = 25
"""Least number of epochs for cutmix.

At 12 epochs of Fashion-MNIST it cost 0.6 points of accuracy under Muon (one split).
"""
BATCH_SIZE = 64
"""Images of a step, unless a flag sets another number."""
_JITTER = 0.4


class FolderFacts(NamedTuple):
    """Sizes of a folder of images by which its recipe is chosen."""

    images: int
    """Number of training images."""
    classes: int
    channels: int
    """1 for grey, 3 for colour."""
    side: int
    """Pixels on the shorter side of the median image."""


class FolderRecipe(NamedTuple):
    """Fields of a run that are chosen for a folder.

    The sizes are those of the model. `jitter`, `mirror` and `cutmix` are fields of
    `data.transforms`.
    """

    image_size: int
    patch_size: int
    stem: int
    """Number of convolutions that make patches."""
    jitter: float
    mirror: bool
    cutmix: float
    steps: int


def choose(
    facts: FolderFacts, steps: int | None = None, batch_size: int = BATCH_SIZE
) -> FolderRecipe | None:
    """Return the recipe for a folder, or `None` if it has more than `MOST_IMAGES` images.

    * Tiny drawings (up to 16 pixels) keep their size, rounded down to whole patches of 2. All
      others are scaled to 32 pixels, in patches of 8, because most of a minute on two cores is
      spent per patch.
    * Grey images are not mirrored: they are often letters and digits.
    * 25 epochs are trained, at least 300 steps and at most 2,000.
    * Cutmix begins at 25 epochs.

    Args:
        steps: Length of the run if the user sets it. By default it is chosen.
        batch_size: Images of a step, by which epochs are counted.
    """
    if facts.images > MOST_IMAGES:
        return None
    if facts.side <= _TINY_SIDE:
        patch_size = 2
        stem = 2
        side = max(facts.side, _LEAST_SIDE)
    else:
        patch_size = 8
        stem = 3
        side = _SCALED_SIDE
    if steps is None:
        steps = min(max(_EPOCHS * facts.images // batch_size, _FEWEST_STEPS), _MOST_STEPS)
    # The steps above are rounded down, which must not end cutmix: hence one step more.
    has_many_epochs = (steps + 1) * batch_size >= _CUTMIX_EPOCHS * facts.images
    return FolderRecipe(
        # The patch size must divide the side. Images are scaled to the side, so rounding cuts
        # nothing off.
        image_size=side - side % patch_size,
        patch_size=patch_size,
        stem=stem,
        jitter=_JITTER,
        mirror=facts.channels == 3,
        cutmix=1.0 if has_many_epochs else 0.0,
        steps=steps,
    )


def finetuning_transforms(facts: FolderFacts) -> TransformsConfig:
    """Return the transforms by which fine-tuning shows the images of a folder.

    A small folder of small images gets a light jitter, and mirroring only if they have colours. Any
    other folder gets random crops and mirroring, the defaults of `TransformsConfig`. A random crop
    may hold a twelfth of an image, and a twelfth of a drawing of 30 pixels says little.
    """
    if facts.images > MOST_IMAGES or facts.side > _SMALL_SIDE:
        return TransformsConfig()
    return TransformsConfig(jitter=_JITTER, mirror=facts.channels == 3)


def recipe_config(recipe: FolderRecipe, facts: FolderFacts, name: str, data_name: str) -> Config:
    """Return the config of a chosen recipe.

    Args:
        recipe: Sizes, transforms and steps of the run.
        facts: Number of classes and channels of the folder.
        name: Name of the recipe that the user wrote, which the run keeps.
        data_name: Value of `data.name`, images:FOLDER.
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
    data = DataConfig(name=data_name, batch_size=BATCH_SIZE, eval_batch_size=200)
    transforms = dataclasses.replace(
        data.transforms,
        jitter=recipe.jitter,
        mirror=recipe.mirror,
        cutmix=recipe.cutmix,
        label_smoothing=0.1,
    )
    # `squash` keeps the border of an image, which `edge` and `centre` may cut off.
    pixels = dataclasses.replace(data.pixels, fit="squash")
    return Config(
        recipe=name,
        model=model,
        data=dataclasses.replace(data, transforms=transforms, pixels=pixels),
        preset=PresetConfig(name="mup", base=BASE),
        optimizer=OptimizerConfig(
            name="muon",
            peak_lr=1.2e-2,
            warmup_steps=max(1, recipe.steps // 10),
            weight_decay=0.05,
            clip_norm=1.0,
        ),
        # Evaluating would take a good part of a run that lasts a minute.
        log=LogConfig(eval_every_steps=None),
        checkpoint=CheckpointConfig(every_steps=500),
        steps=recipe.steps,
    )


OWN_FLAGS = ("model", "preset", "init-from", "optimizer.name", "optimizer.peak-lr", "joint", "base")
"""Flags by which a user chooses the model, its initial weights, the preset or the optimizer.

If one of them is written, mupax chooses no recipe for a small folder.
"""
_SIZES = frozenset({"model.num-classes", "model.channels", "model.image-size", "model.patch-size"})


def designs(flags: Collection[str]) -> str | None:
    """Return the alphabetically first flag by which a user designs the run, or `None` without one.

    With such a flag mupax chooses no recipe for a small folder. These flags are `OWN_FLAGS`,
    `--preset.*`, and `--model.*` except `--model.compute.*` and the sizes of images (classes,
    channels, image size and patch size).

    Args:
        flags: Flags of a command line as `--model.mlp-ratio`: with leading dashes, with hyphens in
            place of underscores, without values.
    """
    # Sorted, because the flags are a set and the first one is named in a message.
    for flag in sorted(flags):
        name = flag.removeprefix("--")
        if name in OWN_FLAGS or name.startswith("preset."):
            return flag
        is_size = name in _SIZES
        is_compute = name.startswith("model.compute.")
        if name.startswith("model.") and not is_size and not is_compute:
            return flag
    return None


def line(facts: FolderFacts, recipe: FolderRecipe) -> str:
    """Return the line that a command prints about a chosen recipe."""
    mirrored = "mirrored" if recipe.mirror else "not mirrored"
    cutmix = "cutmix" if recipe.cutmix else "no cutmix"
    image_size = recipe.image_size
    patch_size = recipe.patch_size
    return (
        f"small folder: {facts.images:,} training images in {facts.classes} classes, "
        f"{facts.side} pixels: {MODEL}, images of {image_size} x {image_size} "
        f"in patches of {patch_size} x {patch_size} by {recipe.stem} convolutions, "
        f"jitter {recipe.jitter:g}, {mirrored}, {cutmix}, {counted(recipe.steps, 'step')}; "
        "flags change any of it, and --model vit-tiny keeps the recipe as it is"
    )
