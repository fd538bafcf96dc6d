"""The search for settings and the page of what a tuned preset is worth; the runs themselves are a command."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from mupax.train.studies.sweep.rows import Row, Rows, has_rows
from scripts.quality import cells, page
from scripts.quality.__main__ import without_curves
from scripts.quality.cells import CELLS
from scripts.quality.descent import Setting, descend, descend_in_turn, neighbours, setting

pytestmark = pytest.mark.core


def bowl(lr: float, readout: float, noise: float = 0.0):
    """Losses with their minimum there, correlated as a rate and a multiplier are; and the points that were asked for."""
    points: set[tuple[Setting, int]] = set()
    rng = np.random.default_rng(0)

    def losses(settings: Sequence[Setting], seeds: int) -> np.ndarray:
        points.update((one, seed) for one in settings for seed in range(seeds))
        at = np.array(
            [
                [dict(one).get("lr", 0) - lr, dict(one).get("readout", 0) - readout]
                for one in settings
            ]
        )
        return ((at**2).sum(1) + 0.5 * at[:, 0] * at[:, 1])[:, None] + noise * rng.standard_normal(
            (len(settings), seeds)
        )

    return losses, points


@pytest.mark.parametrize("where", [(0, 0), (3, -2), (-4, 5)])
def test_the_search_ends_at_the_least_of_its_neighbours(where: tuple[int, int]):
    losses, points = bowl(*where)
    best = descend(losses, (), ("lr", "readout"), seeds=2, final=4)
    assert best == setting({"lr": where[0], "readout": where[1]})
    everywhere = {one for one, _ in points}
    assert {
        one for one, seed in points if seed == 3
    } <= everywhere  # only the last comparison took all seeds
    assert (
        len([one for one, seed in points if seed == 3]) <= 5 < len(everywhere) + (where == (0, 0))
    )


def test_a_loss_that_falls_forever_is_said():
    with pytest.raises(ValueError, match="no minimum within"):
        descend(
            lambda settings, seeds: np.array(
                [[-dict(one).get("lr", 0)] * seeds for one in settings]
            ),
            (),
            ("lr",),
            1,
            1,
        )


def test_noise_ends_the_search_too():
    losses, points = bowl(1, 1, noise=3.0)
    best = descend(losses, (), ("lr", "readout"), seeds=2, final=4)
    assert (best, 3) in points  # it was in the last comparison, which takes all seeds


def test_finalists_alone_have_all_seeds():
    losses, points = bowl(3, -2)
    best = descend(losses, (), ("lr", "readout"), seeds=2, final=4, finalists=2)
    assert best == setting({"lr": 3, "readout": -2})
    assert len({one for one, seed in points if seed == 3}) == 2


@pytest.mark.parametrize("where", [(0, 0), (3, -2), (-4, 5)])
def test_one_constant_after_another_ends_at_the_same_setting_with_fewer_runs(
    where: tuple[int, int],
):
    losses, points = bowl(*where)
    best = descend_in_turn(losses, (), ("lr", "readout"), 2, 4, 2)
    assert best == setting({"lr": where[0], "readout": where[1]})
    assert {one for one, _ in points} >= set(neighbours(best, ("lr", "readout")))
    assert len({one for one, seed in points if seed == 3}) == 2
    losses, crosses = bowl(*where)
    descend(losses, (), ("lr", "readout"), seeds=2, final=4, finalists=2)
    assert len(points) <= len(crosses)


def test_one_constant_that_falls_forever_is_said():
    def losses(settings: Sequence[Setting], seeds: int) -> np.ndarray:
        return np.array([[-dict(one).get("x", 0)] * seeds for one in settings])

    with pytest.raises(ValueError, match="no minimum of x within"):
        descend_in_turn(losses, (), ("lr", "x"), 1, 1, 1)


def test_neighbours_move_one_constant_each():
    assert neighbours((("lr", 1),), ("lr", "x"))[0] == (("lr", 1),)
    assert {(), (("lr", 2),), (("lr", 1), ("x", 1)), (("lr", 1), ("x", -1))} == set(
        neighbours((("lr", 1),), ("lr", "x"))[1:]
    )


@pytest.mark.parametrize("name", CELLS)
def test_at_the_base_all_arms_are_one_model_and_larger_ones_differ_and_keep_it_as_their_base(
    name: str,
):
    cell, runs = CELLS[name], []
    for arm in cell.arms:
        first, last = (
            cell.config(arm, size, {"lr": 1, "rates.readout": 2}, seed=3)
            for size in (cell.sizes[0], cell.sizes[-1])
        )
        assert first.preset.base == last.preset.base
        assert "rates.readout=4" in last.preset.constants
        assert last.seed == 3
        assert cells.rate(last) == cells.rate(first)
        assert (last.preset, arm.tuned, arm.searches, arm.ablation) not in runs
        runs.append((last.preset, arm.tuned, arm.searches, arm.ablation))
    assert len({arm.label for arm in cell.arms}) == len(runs)  # results are kept by it


def test_rows_are_kept_without_their_curves(tmp_path: Path):
    row = Row("key", "", 2.5, None, None, (3.0, 2.5), 100, 0.5, "in turn")
    Rows(tmp_path).add(row)
    without_curves(tmp_path)
    assert Rows(tmp_path) == {"key": dataclasses.replace(row, curve=())}
    assert [path.name for path in tmp_path.iterdir()] == ["points.jsonl"]


def test_a_difference_has_its_interval():
    mean, error, half = page.difference([0.1, 0.3])
    assert mean == pytest.approx(0.2)
    assert half == pytest.approx(12.706 * error, rel=1e-4)


def record(apart: list[float]) -> dict:
    """`mup` and `sp` at two sizes; at the second `mup`'s losses less `sp`'s are these."""
    base = {
        "size": 16,
        "octaves": {"lr": 0.5},
        "losses": [2.0, 2.0, 2.0],
        "reference_minus_this": None,
    }
    theirs, ours = (
        [2.5, 1.9, 2.2],
        [loss + d for loss, d in zip([2.5, 1.9, 2.2], apart, strict=True)],
    )
    arms = [
        {
            "label": label,
            "tuned": tuned,
            "ablation": False,
            "reference": "mup",
            "sizes": [base, {**base, "size": 32, "losses": losses, "reference_minus_this": None}],
        }
        for label, tuned, losses in (("mup", [], ours), ("sp", ["lr"], theirs))
    ]
    return {
        "cell": "c", "axis": "head_dim", "recipe": "lm-tiny", "searched": ["lr"], "tuning_seconds": 60, "train_seconds": 60, "arms": arms,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("apart", "row"),
    [
        ([-0.010, -0.011, -0.012], "-0.0110 ± 0.0025 | yes |"),
        ([0.010, 0.011, 0.012], "+0.0110 ± 0.0025 | no |"),
        ([-0.100, 0.1, -0.012], "-0.0040 ± 0.2490 | no |"),
    ],
)
def test_the_page_says_not_worse_only_where_the_interval_ends_below_the_goal(
    apart: list[float], row: str
):
    assert f"| c | mup | {row}" in page.markdown([record(apart)])


def test_the_committed_page_is_what_its_records_say():
    records = page.records()
    assert records
    assert page.markdown(records) == cells.OUT.with_suffix(".md").read_text()
    for one in records:
        assert has_rows(cells.OUT / one["cell"])
