"""The study of Muon: what its runs differ in, and its section of the page."""

from __future__ import annotations

import dataclasses
import json

import pytest

from scripts.pages.markdown import parts
from scripts.studies import muon
from scripts.studies.muon import DECAY_STEPS, SIZES, STEPS, Point


def test_runs_of_both_optimizers_differ_in_optimizer_and_constants_alone():
    ours = Point("muon", 8, STEPS, None, 3).config()
    theirs = Point("adamw", 8, STEPS, None, 3).config()
    assert ours.optimizer.name == "muon"
    assert theirs.optimizer.name == "adamw"
    preset = dataclasses.replace(theirs.preset, constants=ours.preset.constants)
    assert ours == dataclasses.replace(theirs, optimizer=ours.optimizer, preset=preset)
    assert ours.seed == 3
    assert ours.data.seed == Point("muon", 8, STEPS, None, 0).config().data.seed


@pytest.mark.parametrize("optimizer", muon.OPTIMIZERS)
def test_all_sizes_have_the_smallest_as_their_base(optimizer: str):
    runs = [Point(optimizer, heads, STEPS, None, 0).config() for heads in SIZES]
    assert [run.model.width for run in runs] == [32, 64, 128, 256]
    assert {run.preset.base for run in runs} == {
        "embed=32,heads=2,kv_heads=2,head_dim=16,mlp=80,layers=1"
    }
    assert len({run.optimizer for run in runs}) == 1


def test_a_decay_replaces_that_of_the_optimizer():
    run = Point("muon", 2, DECAY_STEPS, 0.25, 0).config()
    assert run.optimizer.weight_decay == 0.25
    assert run.optimizer.warmup_steps * 5 == run.steps == DECAY_STEPS


def losses(mean: float) -> list[float]:
    return [mean - 0.001, mean, mean + 0.001]


def test_the_section_compares_each_rule_with_the_lowest_of_the_search():
    result = {
        "optimizers": [{"heads": 2, "losses": {"muon": losses(1.8), "adamw": losses(1.9)}}],
        "decay": {
            "rules": {"0": 0.016, "-1": 0.004, "-2": 0.001},
            "sizes": [
                {"heads": 2, "rows": []},
                {
                    "heads": 8,
                    "rows": [
                        {"decay": decay, "losses": losses(loss)}
                        for decay, loss in ((0.0, 2.0), (0.001, 1.5), (0.004, 1.25), (0.016, 1.75))
                    ],
                },
            ],
        },
    }
    text = muon.markdown(result)
    assert "| 2 | 1.8000 | 1.9000 | -0.1000 ± 0.0000 |" in text
    assert "| as at 2 heads | 0.016 | 1.7500 | +0.5000 ± 0.0000 |" in text
    assert "| times 1/m | 0.004 | 1.2500 | +0.0000 ± 0.0000 |" in text
    assert "lowest of the search" not in text


def test_the_lowest_of_the_search_has_a_row_if_no_rule_gives_it():
    rows = [{"decay": decay, "losses": losses(1 + decay)} for decay in (0.0, 0.25, 0.5)]
    rows[1]["losses"] = losses(0.5)
    result = {
        "optimizers": [],
        "decay": {"rules": {"0": 0.5}, "sizes": [{}, {"heads": 8, "rows": rows}]},
    }
    assert "| lowest of the search | 0.25 | 0.5000 |  |" in muon.markdown(result)


def test_the_committed_section_is_what_its_record_says():
    result = json.loads((muon.OUT / "result.json").read_text())
    _, section, _ = parts(muon.PAGE.read_text(), "muon")
    assert section.strip() == muon.markdown(result)
