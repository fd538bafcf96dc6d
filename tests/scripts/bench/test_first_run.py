"""The page on the first run: what its data give, rows that had no more time than the first, and commands that exist."""

from __future__ import annotations

import json
import re
from unittest.mock import ANY

import pytest

from mupax.train.config import cli
from mupax.train.config.recipes import RECIPES
from scripts import ROOT
from scripts.bench.recipes import first_images, first_run
from scripts.bench.recipes.equal_seconds import tuned
from scripts.figures.result import mean

RECORD = json.loads(first_run.OUT.read_text())

pytestmark = pytest.mark.core


def test_the_page_is_what_its_data_give():
    assert first_run.OUT.with_suffix(".md").read_text() == first_run.markdown(RECORD)


def test_rows_had_equal_seconds_and_the_recipe_that_ships_is_the_best():
    first, *rest = RECORD["rows"].values()
    assert all(0.8 < row["cpu_seconds"] / first["cpu_seconds"] < 1.15 for row in rest)
    losses = {name: row["loss"] for name, row in RECORD["rows"].items()}
    assert min(losses, key=lambda name: losses[name]) == next(name for name in losses if name.endswith("lm-laptop"))


def test_what_make_train_runs_is_the_recipe_of_the_page():
    match = re.search(r"^RECIPE \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert match is not None
    assert match[1] == "lm-laptop"


@pytest.mark.parametrize("name", first_run.OURS)
def test_the_commands_of_rows_exist(name: str):
    recipe, *words = first_run.words_of(name, 400)
    assert cli.parse(recipe, RECIPES[recipe], words).config.steps == 400


def test_a_rate_is_doubled_until_the_loss_rises():
    tried: list[float] = []

    def train(rate: float) -> dict[str, float]:
        tried.append(rate)
        return {"rate": rate, "loss": abs(rate - 0.004)}

    assert tuned(train) == {
        "rate": 0.004,
        "loss": 0.0,
        "rates": dict.fromkeys(("0.001", "0.002", "0.004", "0.008"), ANY),
    }
    assert tried == [0.001, 0.002, 0.004, 0.008]
    # Controls: no best rate that has one on both sides.
    with pytest.raises(SystemExit, match=r"rises from the lowest rate, 0\.001"):
        tuned(lambda rate: {"rate": rate, "loss": rate})
    with pytest.raises(SystemExit, match=r"still falls at a rate of 0\.128"):
        tuned(lambda rate: {"rate": rate, "loss": -rate})


def test_the_best_rates_of_the_page_have_a_rate_on_both_sides():
    rows = {name: row for name, row in RECORD["rows"].items() if "rates" in row}
    assert set(rows) == {first_run.ADAMW, *first_run.PYTORCH}
    for row in rows.values():
        first, *_, last = row["rates"].values()
        assert row["loss"] == min(row["rates"].values()) < min(first, last)


def test_on_fresh_seeds_no_optimizer_of_the_images_wins():
    """What the page says; were it otherwise, the recipe would have to change."""
    fresh = json.loads(first_images.OUT.read_text())["fresh"]
    _, low, high = mean([a - b for a, b in zip(fresh["muon"], fresh["vit-digits"], strict=True)])
    assert len(fresh["muon"]) == 8
    assert low < 0 < high
    assert RECIPES["vit-digits"]().steps == first_images.STEPS
