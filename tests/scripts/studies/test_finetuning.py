"""The study of fine-tuning rates: its page is what its rows say, its rows are whole, and it asks for what is missing alone."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mupax.train.config import cli
from mupax.train.config.recipes import RECIPES
from mupax.train.core.program import Program, assemble
from mupax.train.studies.transfer.drift import TOLERANCE
from scripts.studies.finetuning import page as finetuning_page
from scripts.studies.finetuning import study as finetuning

STUDY = json.loads(finetuning.OUT.read_text())


def test_the_page_is_what_was_measured() -> None:
    assert finetuning_page.PAGE.read_text() == finetuning_page.page(STUDY), (
        "write it again: python -m scripts.studies.finetuning.page"
    )


def test_what_the_page_says_of_shifts_and_rates_is_what_its_table_says() -> None:
    analyses = finetuning_page.analyses(STUDY["rows"])
    for arm in finetuning.ARMS:
        assert analyses["mup", arm].drift.meets(-TOLERANCE, TOLERANCE)
        assert analyses["mup", arm].verdict != "drifts"
        assert analyses["sp", arm].drift.high < 0
        assert analyses["sp", arm].verdict == "drifts"
    full, adapters = (analyses["mup", arm].optima for arm in finetuning.ARMS)
    assert all(1 <= each.value <= 2 for each in full)
    assert all(abs(each.value) < 1 for each in adapters)
    assert analyses["mup", "full"].drift.low < 0 < analyses["mup", "full"].drift.high
    assert analyses["mup", "adapters"].drift.meets(0, 0)
    assert analyses["sp", "full"].drift.value < analyses["sp", "adapters"].drift.value


def test_the_rows_are_whole_and_nothing_is_wanted() -> None:
    keys = [tuple(row[name] for name in ("preset", "width", "arm", "seed", "octaves")) for row in STUDY["rows"]]
    assert len(keys) == len(set(keys))
    seeds = 1 + max(row["seed"] for row in STUDY["rows"])
    assert seeds >= 2
    assert next(finetuning.missing_runs(STUDY["rows"], seeds), None) is None
    without = [row for row in STUDY["rows"] if (row["width"], row["octaves"], row["seed"]) != (64, 0, 1)]
    missing = [(("mup", 64, "full"), 1, 0), (("mup", 64, "adapters"), 1, 0)]  # the control: what was taken out
    assert [point for point in finetuning.missing_runs(without, seeds) if point[2] == 0] == missing


def rows(losses: dict[int, list[float]]) -> list[dict[str, Any]]:
    """Rows of every setting that have these losses by octave and seed."""
    return [
        {"preset": preset, "width": width, "arm": arm, "seed": seed, "octaves": k, "loss": loss}
        for preset, width, arm in finetuning.SETTINGS
        for k, of_seeds in {**losses, None: [9.0, 9.0]}.items()
        for seed, loss in enumerate(of_seeds)
    ]


def test_rates_are_added_where_the_best_is_at_an_end_and_not_far_away() -> None:
    falling = {k: [2.0 - 0.1 * k] * 2 for k in finetuning.GRID}
    runs = list(finetuning.missing_runs(rows(falling), 2))
    assert runs == [(setting, seed, 4) for setting in finetuning.SETTINGS for seed in (0, 1)]
    partial = rows(falling | {4: [1.0]})  # by one seed alone
    assert list(finetuning.missing_runs(partial, 2)) == [(setting, 1, 4) for setting in finetuning.SETTINGS]
    bowl = {k: [2.0 + 0.1 * k**2] * 2 for k in finetuning.GRID}
    assert not list(finetuning.missing_runs(rows(bowl), 2))
    far = {k: [2.0 - 0.1 * k] * 2 for k in range(-2, 7)}
    assert not list(finetuning.missing_runs(rows(far), 2))


def test_a_file_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def measured(workdir: Path, setting: finetuning.Setting, seed: int, octaves: int | None) -> dict[str, Any]:
        calls.append((setting, seed, octaves))
        if len(calls) == 8:
            raise KeyboardInterrupt
        row = dict(zip(("preset", "width", "arm"), setting, strict=True))
        return {**row, "seed": seed, "octaves": octaves, "loss": 2.0 + (octaves or 0) ** 2}

    monkeypatch.setattr(finetuning, "measured", measured)
    words = ["--workdir", str(tmp_path), "--json", str(tmp_path / "rows.json"), "--seeds", "2"]
    with pytest.raises(KeyboardInterrupt):
        finetuning.main(words)
    assert len(json.loads((tmp_path / "rows.json").read_text())["rows"]) == 7
    assert finetuning.main(words) == 0
    assert len(calls) == 1 + len(set(calls)), "only what was stopped is made again"
    count = len(calls)
    assert finetuning.main(words) == 0
    assert len(calls) == count


def assembled(width: int, preset: str) -> Program:
    words = [*finetuning.SOURCE.split()[1:], *finetuning.PRESETS[preset], "--model.width", str(width)]
    return assemble(cli.parse("lm-tiny", RECIPES["lm-tiny"], words).config)


def test_at_the_base_both_presets_are_one_model() -> None:
    same = []
    for width in finetuning.WIDTHS:
        one, other = (assembled(width, preset) for preset in finetuning.PRESETS)
        pairs = itertools.chain(
            zip(*(jax.tree.leaves(each.inputs.factors) for each in (one, other)), strict=True),
            zip(*(jax.tree.leaves(each.initial_state().params) for each in (one, other)), strict=True),
        )
        same.append(all(np.array_equal(a, b) for a, b in pairs))
    assert same == [False, True]
