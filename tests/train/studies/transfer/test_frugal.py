"""Frugal search for the best rates, on made-up curves and on the committed rows."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from mupax.train.config.recipes import RECIPES
from mupax.train.config.run import PresetConfig
from mupax.train.studies.sweep.rows import Row
from mupax.train.studies.transfer.fit import STEP
from mupax.train.studies.transfer.frugal import AGREE, ONE_SEED, TWO_SEEDS, Frugal
from mupax.train.studies.transfer.study import Point, plan
from tests.fixtures import frugal_replay
from tests.train.studies.transfer.test_command import command

SIZES = (16, 32, 64, 128)
DOCS = Path(__file__).parents[4] / "docs" / "evidence"
RECORD = json.loads((DOCS / "frugal.json").read_text())


class Curves:
    """Made-up losses of a study whose best rate drifts, steeper above it."""

    def __init__(self, drift: float, noise: tuple[float, ...], seed: int = 0) -> None:
        recipe = RECIPES["lm-tiny"]()
        config = dataclasses.replace(
            recipe, optimizer=dataclasses.replace(recipe.optimizer, peak_lr=2.0**-7)
        )
        self.study = plan(config, "head_dim", SIZES, PresetConfig(name="mup"), "mup")
        self.drift, self.noise, self.rng, self.cache = (
            drift,
            noise,
            np.random.default_rng(seed),
            dict[Point, Row](),
        )

    def best(self, at: int) -> float:
        return -5.7 + self.drift * at

    def __call__(self, point: Point) -> Row:
        at, rate, seed = point
        if point not in self.cache:
            u = rate * STEP - self.best(at)
            shared = np.random.default_rng([at, seed]).normal(0, 0.05)
            loss = (
                2.4
                - 0.05 * at
                + 0.035 * u * u * (1 + 0.15 * u)
                + shared
                + self.rng.normal(0, self.noise[at])
            )
            loss, diverged = (loss, None) if u < 3 else (math.inf, 3)
            self.cache[point] = Row("", "", loss, None, diverged, (), 100, 1.0, "in turn")
        return self.cache[point]


def searched(curves: Curves) -> Frugal:
    search = Frugal(curves.study, 3)
    while points := search.next_points(8, math.inf):
        assert not set(points) & set(search.rows)
        search.rows |= {point: curves(point) for point in points}
    _, optima = search.state()
    unknown = sum(math.isnan(optimum.value) for optimum in optima)
    reason = "every size has its best rate"
    if unknown:
        reason = f"{unknown} of {len(optima)} sizes have no best rate"
    assert search.stopped == reason
    return search


@pytest.mark.parametrize("drift", [0.0, -1.0, 0.5])
def test_best_rates_are_found_from_few_runs_wherever_they_go(drift: float) -> None:
    errors, runs = [], []
    for seed in range(5):
        curves = Curves(drift, (0.006,) * 4, seed)
        search = searched(curves)
        errors += [optimum.value - curves.best(at) for at, optimum in enumerate(search.state()[1])]
        runs.append([sum(p[0] == at for p in search.rows) for at in range(4)])
    assert (
        np.mean(np.abs(errors) < 0.3) >= 0.95
    )  # the fit's own bias on a curve that is steeper above is a tenth
    assert np.mean(runs, axis=0)[3] <= 5  # of fifteen, were it searched in full
    assert max(each[0] for each in runs) <= 25


def test_a_size_too_noisy_for_it_is_searched_in_full_and_the_others_are_not() -> None:
    search = searched(Curves(0.0, (0.006, 0.006, 0.15, 0.006)))
    full = [optimum.full for optimum in search.state()[1]]
    assert full == [True, False, True, False]
    noisy = [point for point in search.rows if point[0] == 2]
    assert {seed for _, _, seed in noisy} == {0, 1, 2}
    assert all(
        optimum.deviation <= TWO_SEEDS
        for optimum, whole in zip(search.state()[1], full, strict=True)
        if not whole
    )


def test_a_second_seed_comes_where_one_leaves_the_best_rate_uncertain() -> None:
    quiet, noisy = (searched(Curves(0.0, (noise,) * 4)) for noise in (0.002, 0.02))
    assert {seed for at, _, seed in quiet.rows if at} == {0}
    assert all(optimum.deviation <= ONE_SEED for optimum in quiet.state()[1])
    assert {seed for at, _, seed in noisy.rows if at} >= {0, 1}


def test_where_the_smallest_size_has_no_minimum_the_next_is_searched_in_full() -> None:
    curves = Curves(0.0, (0.006,) * 4)
    curves.cache = {
        (0, rate, seed): Row("", "", 9.0 - rate * 0.01, None, None, (), 100, 1.0, "in turn")
        for rate in range(-60, 60)
        for seed in range(3)
    }
    search = searched(curves)
    assert math.isnan(search.state()[1][0].value)
    assert [optimum.full for optimum in search.state()[1]] == [True, True, False, False]
    assert [optimum.value for optimum in search.state()[1][1:]] == pytest.approx(
        [-5.7] * 3, abs=0.3
    )


def test_the_record_is_what_the_committed_rows_give_and_the_control_loses() -> None:
    shipped = RECORD["shipped"]
    assert [shipped[name] for name in ("ONE_SEED", "TWO_SEEDS", "AGREE")] == [
        ONE_SEED,
        TWO_SEEDS,
        AGREE,
    ]
    summary = frugal_replay.summary(list(shipped["by_study"]))
    assert summary == shipped["all"]
    assert summary["within_a_quarter_octave"] >= 0.95
    assert summary["cost"] <= 0.4
    assert RECORD["one_seed_on_the_whole_grid"]["within_a_quarter_octave"] < 0.8
    assert (
        RECORD["two_seeds_on_the_whole_grid"]["within_a_quarter_octave"]
        < summary["within_a_quarter_octave"]
    )


def test_numbers_chosen_elsewhere_find_nearly_as_many_for_as_little() -> None:
    # Chosen on ten studies and shown on the eleventh. The page says that 95 % are not found so.
    alone = [each for each in RECORD["held_out"] if len(each["held_out"]) == 1]
    assert {each["held_out"][0] for each in alone} == set(RECORD["shipped"]["by_study"])
    weights = [each["settings"] for each in alone]
    hit, cost = (
        np.average([e["shown_on"][n] for e in alone], weights=weights)
        for n in ("within_a_quarter_octave", "cost")
    )
    assert (hit, cost) == pytest.approx((0.944, 0.371), abs=0.002)


def test_the_command_says_the_best_rate_of_every_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path, "--search", "frugal", "--dry-run") == 0
    assert (
        "3 seeds at the smallest size, else 3 rates and 1 seed or more, 800 steps"
        in capsys.readouterr().out
    )
    preset = tmp_path / "mup.quick.json"
    assert command(tmp_path, "--search", "frugal", "--save-tuned", str(preset)) == 0
    out = capsys.readouterr().out
    assert "mup, growing head_dim: every size has its best rate" in out
    assert "no verdict on transfer" in out
    record = json.loads((tmp_path / "frugal.json").read_text())
    (study,) = record["studies"]
    assert [size["size"] for size in study["sizes"]] == [16, 32, 64]
    assert study["cost"] < 0.6
    assert not (tmp_path / "transfer.json").exists()
    saved = json.loads(preset.read_text())
    assert saved["provenance"]["transfer"] == []
    assert math.log2(saved["optimizer"]["peak_lr"]) == pytest.approx(
        study["sizes"][0]["log2_optimum"], abs=0.01
    )


def test_a_size_that_the_minutes_did_not_reach_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path, "--search", "frugal", "--minutes", "0.3") == 1
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert "the same command with more --minutes" in out
    assert any("mup, growing head_dim: the 0.3 minutes ended" in line for line in lines)
    assert any("not reached" in line and line.split()[0] == "64" for line in lines)
    (study,) = json.loads((tmp_path / "frugal.json").read_text())["studies"]
    assert [size["size"] for size in study["sizes"]] == [16, 32, 64]
    assert [size["log2_optimum"] is not None for size in study["sizes"]] == [True, True, False]
    assert [size["reached"] for size in study["sizes"]] == [True, True, False]


@pytest.mark.core
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--control", "sp"], "--control needs the verdict"),
        (["--predict", "head_dim=128"], "--predict needs the verdict"),
        (["--seeds", "1"], "needs two seeds"),
    ],
)
def test_what_needs_a_verdict_is_refused(tmp_path: Path, words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        command(tmp_path, "--search", "frugal", *words)
