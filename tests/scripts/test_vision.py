"""The studies of vision transforms and of fine-tuning: their page is what they measured, and every arm is a run that can be."""

from __future__ import annotations

import pytest

from mupax.train.config import cli
from mupax.train.config.recipes import RECIPES
from scripts.vision import finetune, larger, page, rows, transforms


def test_the_page_is_what_was_measured() -> None:
    assert page.OUT.read_text() == page.page(*(rows.read(study.OUT) for study in (transforms, larger, finetune)))


@pytest.mark.parametrize("task", transforms.TASKS)
def test_every_arm_is_a_config_of_its_own(task: str) -> None:
    words = [f"{transforms.TASKS[task]} {flags}".split() for flags in transforms.ARMS.values()]
    configs = [cli.parse(of[0], RECIPES[of[0]], of[1:]).config for of in words]
    assert len(set(configs)) == len(transforms.ARMS)


def test_differences_are_paired_by_seed_and_the_best_rate_is_that_of_the_least_mean_loss() -> None:
    rows = [
        {"task": "digits", "arm": "from scratch", "seed": seed, "rate": rate, "loss": loss, "accuracy": 0.5}
        for rate, losses in {1e-3: (1.0, 3.0), 3e-3: (2.0, 1.0)}.items()
        for seed, loss in enumerate(losses)
    ]
    assert page.best(rows, "digits", "from scratch") == 3e-3
    assert page._apart({0: 1.0, 1: 2.0, 5: 9.0}, {0: 0.5, 1: 1.0}, 1, 2) == "+0.75 ± 3.18"
    assert page._apart({0: 1.0}, {0: 0.5}, 100, 1) == "+50.0 (one seed)"


def test_every_run_of_the_larger_model_has_its_row_and_no_other() -> None:
    table = [(row["arm"], row["model"], row["seed"]) for row in rows.read(larger.OUT)]
    assert sorted(table) == sorted(set(larger.runs(3)))
