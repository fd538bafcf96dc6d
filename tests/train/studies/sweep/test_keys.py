"""Names of a sweep's points stay those of rows on disk as configs get more fields."""

from __future__ import annotations

import dataclasses

import pytest

from mupax.train.config.recipes import RECIPES
from mupax.train.studies.sweep.sweep import key_of

NAMES = {
    "lm-tiny": "1dd3b540d82cc580",
    "vit-digits": "cfe807e46705381a",
    "vit-endless": "1614eb3ee207ef94",
    "ed-tiny": "7d55e483c27cf266",
    "bordelon-vit": "2cccf7ffa4187388",
    "vit-s16-imagenet": "ad26339407af9358",
    "gpt2-c4": "53a0f7edae484cac",
    "lm-8b": "1c0daea0d7c1fdd4",
    "lm-30b-a3b": "333129f5ca2d54df",
}
"""Names of runs on data with the digest "data", by recipe, as in rows of committed studies."""


@pytest.mark.core
@pytest.mark.parametrize("recipe", NAMES)
def test_a_run_is_named_as_its_row_on_disk_is(recipe: str) -> None:
    # A new field changes a name only where its value is new, or every study would train again.
    assert key_of(RECIPES[recipe](), "data") == NAMES[recipe]


@pytest.mark.core
def test_control_what_changes_training_changes_the_name() -> None:
    config = RECIPES["lm-tiny"]()
    variants = [
        dataclasses.replace(config, seed=1),
        dataclasses.replace(config, z_loss=1e-4),
        dataclasses.replace(config, vmem_kib=16384),
        dataclasses.replace(config, model=dataclasses.replace(config.model, window=8)),
        dataclasses.replace(
            config, optimizer=dataclasses.replace(config.optimizer, moment_dtype="bfloat16")
        ),
    ]
    names = {key_of(each, "data") for each in (config, *variants)}
    assert len(names | {key_of(config, "other data")}) == len(variants) + 2
