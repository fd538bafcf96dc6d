"""The recipe for a small folder of images: what is chosen at the bounds of its rules, and that what a user writes stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mupax.train.config import cli
from mupax.train.config.recipes import RECIPES
from mupax.train.config.record import to_json
from mupax.train.config.small_folders import (
    MOST_IMAGES,
    FolderFacts,
    FolderRecipe,
    choose,
    finetuning_transforms,
)
from mupax.zoo.configs import ConfigError

FACTS = FolderFacts(images=1_500, classes=9, channels=3, side=128)


def chosen(**changes: int) -> FolderRecipe:
    recipe = choose(FACTS._replace(**changes))
    assert recipe is not None
    return recipe


@pytest.mark.parametrize(
    ("side", "sizes"),
    [
        (1, (4, 2, 2)), (8, (8, 2, 2)), (15, (14, 2, 2)), (16, (16, 2, 2)), (17, (32, 8, 3)), (28, (32, 8, 3)),
        (5_000, (32, 8, 3)),
    ],
)  # fmt: skip
def test_sizes_are_chosen_by_the_side_of_the_images(side: int, sizes: tuple[int, int, int]) -> None:
    recipe = chosen(side=side)
    assert (recipe.image_size, recipe.patch_size, recipe.stem) == sizes
    assert recipe.image_size % recipe.patch_size == 0


def test_a_folder_is_small_up_to_a_number_of_images() -> None:
    assert choose(FACTS._replace(images=MOST_IMAGES)) is not None
    assert choose(FACTS._replace(images=MOST_IMAGES + 1)) is None


def test_steps_grow_with_the_images_between_two_bounds() -> None:
    steps = [chosen(images=images).steps for images in (2, 768, 770, 1_500, 5_120, MOST_IMAGES)]
    assert steps == [300, 300, 300, 585, 2_000, 2_000]


def test_cutmix_begins_at_25_epochs() -> None:
    assert [chosen(images=images).cutmix for images in (2, 1_501, 5_120, 5_300)] == [1, 1, 1, 0]
    # 1,500 images in batches of 64: 585 steps are one batch less than 25 epochs.
    for steps, cutmix in ((100, 0), (584, 0), (585, 1), (2_000, 1)):
        recipe = choose(FACTS, steps)
        assert recipe is not None
        assert (recipe.steps, recipe.cutmix) == (steps, cutmix)


def test_grey_images_are_not_mirrored() -> None:
    assert chosen(channels=3).mirror
    assert not chosen(channels=1).mirror


@pytest.mark.parametrize(
    ("facts", "jitter", "mirror"),
    [
        (FolderFacts(1_500, 9, 1, 40), 0.4, False),
        (FolderFacts(1_500, 9, 3, 40), 0.4, True),
        (FolderFacts(1_500, 9, 3, 41), None, True),
        (FolderFacts(MOST_IMAGES + 1, 9, 1, 28), None, True),
    ],
)
def test_fine_tuning_jitters_small_images(
    facts: FolderFacts, jitter: float | None, mirror: bool
) -> None:
    transforms = finetuning_transforms(facts)
    assert (transforms.jitter, transforms.mirror) == (jitter, mirror)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Forty colour images of 64 pixels in two classes, as images:FOLDER."""
    rng = np.random.default_rng(0)
    for label in "ab":
        (tmp_path / "pictures" / label).mkdir(parents=True)
        for index in range(20):
            pixels = rng.integers(0, 256, (64, 70, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "pictures" / label / f"{index}.png")
    return f"images:{tmp_path / 'pictures'}"


def parsed(*words: str, recipe: str = "vit-digits") -> Any:
    return cli.parse(recipe, RECIPES[recipe], words).config


def test_the_command_says_what_it_chose(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = parsed("--data.name", folder)
    line = " ".join(capsys.readouterr().err.split())
    assert "small folder: 36 training images in 2 classes, 64 pixels: vit-folder" in line
    assert config.recipe == "vit-digits"  # so that the run lies where it did
    assert (config.model.stem, config.model.image_size, config.model.num_classes) == (3, 32, 2)
    assert (config.data.transforms.jitter, config.data.transforms.cutmix) == (0.4, 1.0)
    assert (config.optimizer.name, config.optimizer.peak_lr) == ("muon", 0.012)
    assert "jitter 0.4, mirrored, cutmix, 300 steps" in line
    assert (config.optimizer.warmup_steps, config.steps) == (30, 300)


def test_the_choice_knows_a_length_that_the_user_sets(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = parsed("--data.name", folder, "--steps", "7")
    assert "no cutmix, 7 steps" in " ".join(capsys.readouterr().err.split())
    assert (config.data.transforms.cutmix, config.optimizer.warmup_steps, config.steps) == (0, 1, 7)


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (("--steps", "7"), "steps", 7),
        (("--steps", "1_000"), "optimizer.warmup_steps", 100),
        # 36 images, so 320 steps are 18 epochs in batches of 2 and 36 in batches of 4.
        (("--data.batch-size", "2", "--steps", "320"), "data.transforms.cutmix", 0.0),
        (("--data.batch-size", "4", "--steps", "320"), "data.transforms.cutmix", 1.0),
        (("--data.batch-size", "2"), "steps", 450),
        (("--data.transforms.jitter", "1"), "data.transforms.jitter", 1.0),
        (("--data.transforms.cutmix", "0"), "data.transforms.cutmix", 0.0),
        (("--optimizer.warmup-steps", "5"), "optimizer.warmup_steps", 5),
        (("--data.transforms.no-mirror",), "data.transforms.mirror", False),
        (("--data.pixels.fit", "edge"), "data.pixels.fit", "edge"),
        (("--model.image-size", "48"), "model.image_size", 48),
        (("--model.image-size", "28"), "model.patch_size", 4),
        (("--model.patch-size", "4"), "model.patch_size", 4),
        (("--model.channels", "1"), "data.transforms.mirror", False),
        (("--optimizer.weight-decay", "0"), "optimizer.weight_decay", 0.0),
    ],
)
def test_a_flag_wins_over_what_is_chosen(
    folder: str, words: tuple[str, ...], field: str, value: object
) -> None:
    config = parsed("--data.name", folder, *words)
    assert config.model.stem == 3
    for name in field.split("."):
        config = getattr(config, name)
    assert config == value


@pytest.mark.parametrize(
    "words",
    ["--model vit-tiny", "--model.width 64", "--model.no-bias", "--preset sp", "--preset.base vit-proxy",
     "--optimizer.peak-lr 0.01", "--optimizer.name muon"],
)  # fmt: skip
def test_a_run_that_the_user_designs_stays_as_it_was(folder: str, words: str) -> None:
    config = parsed("--data.name", folder, *words.split())
    assert config.model.stem is None
    assert config.data.transforms.jitter is None
    assert config.steps == RECIPES["vit-digits"]().steps


def test_a_recipe_of_a_pod_and_other_data_stay_as_they_were(folder: str) -> None:
    assert parsed("--data.name", folder, recipe="vit-s16-imagenet").model.stem is None
    assert parsed("--data.name", "fashion").model.stem is None
    assert parsed().model.stem is None


def test_a_run_goes_on_as_it_was_chosen_though_the_folder_has_grown(
    folder: str, tmp_path: Path
) -> None:
    before = parsed("--data.name", folder)
    place = Path(folder.removeprefix("images:"))
    for label in "ab":
        for index in range(20):
            source = place / label / f"{index}.png"
            for copy in range(40):
                (place / label / f"{index}-{copy}.png").hardlink_to(source)
    assert parsed("--data.name", folder).steps > before.steps
    (tmp_path / "config.json").write_text(json.dumps({"config": to_json(before)}))
    again = parsed("--data.name", folder, "--resume", "--workdir", str(tmp_path))
    assert (again.model, again.data, again.steps) == (before.model, before.data, before.steps)


@pytest.mark.parametrize("words", ["--data.transforms.jitter 1", "--data.transforms.no-mirror"])
def test_data_with_a_view_of_their_own_take_neither(words: str) -> None:
    with pytest.raises(ConfigError, match="augments in its own way"):
        parsed(*words.split())
