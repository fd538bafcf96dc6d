"""The search for settings, and the page on the worth of a tuned preset."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from mupax.train.config.recipes import RECIPES
from mupax.train.parallel.processes import StopRequest
from mupax.train.studies.sweep.rows import Row, Rows, has_rows
from scripts import ROOT
from scripts.quality import __main__ as quality
from scripts.quality import cells, page, rates
from scripts.quality.__main__ import PICTURED
from scripts.quality.cells import CELLS, MORE, MUP, RETUNED, Arm, Cell
from scripts.quality.descent import Setting, descend, descend_in_turn, neighbours, setting
from scripts.quality.measuring import without_curves

pytestmark = pytest.mark.core


def bowl(lr: float, readout: float, noise: float = 0.0):
    """Return losses with a minimum, correlated as rate and multiplier are, and the points asked for."""
    points: set[tuple[Setting, int]] = set()
    rng = np.random.default_rng(0)

    def losses(settings: Sequence[Setting], seeds: int) -> np.ndarray:
        points.update((chosen, seed) for chosen in settings for seed in range(seeds))
        x = np.array([dict(chosen).get("lr", 0) - lr for chosen in settings])
        y = np.array([dict(chosen).get("readout", 0) - readout for chosen in settings])
        means = x**2 + y**2 + 0.5 * x * y
        return means[:, None] + noise * rng.standard_normal((len(settings), seeds))

    return losses, points


@pytest.mark.parametrize("minimum", [(0, 0), (3, -2), (-4, 5)])
def test_the_search_ends_at_the_least_of_its_neighbours(minimum: tuple[int, int]):
    losses, points = bowl(*minimum)
    best = descend(losses, (), ("lr", "readout"), seeds=2, final=4)
    assert best == setting({"lr": minimum[0], "readout": minimum[1]})
    # Only the last comparison, of a setting and its four neighbours, took all seeds.
    everywhere = {chosen for chosen, _ in points}
    last = [chosen for chosen, seed in points if seed == 3]
    assert len(last) <= 5 < len(everywhere) + (minimum == (0, 0))


def falling(settings: Sequence[Setting], seeds: int) -> np.ndarray:
    return np.array([[-dict(chosen).get("x", 0)] * seeds for chosen in settings])


def test_a_loss_that_falls_forever_is_said():
    with pytest.raises(ValueError, match="no minimum within"):
        descend(falling, (), ("x",), 1, 1)
    with pytest.raises(ValueError, match="no minimum of x within"):
        descend_in_turn(falling, (), ("lr", "x"), 1, 1, 1)


def test_noise_ends_the_search_too():
    losses, points = bowl(1, 1, noise=3.0)
    best = descend(losses, (), ("lr", "readout"), seeds=2, final=4)
    assert (best, 3) in points  # it was in the last comparison, which takes all seeds


def test_finalists_alone_have_all_seeds():
    losses, points = bowl(3, -2)
    best = descend(losses, (), ("lr", "readout"), seeds=2, final=4, finalists=2)
    assert best == setting({"lr": 3, "readout": -2})
    assert len({chosen for chosen, seed in points if seed == 3}) == 2


@pytest.mark.parametrize("minimum", [(0, 0), (3, -2), (-4, 5)])
def test_one_constant_after_another_ends_at_the_same_setting_with_fewer_runs(
    minimum: tuple[int, int],
):
    losses, points = bowl(*minimum)
    best = descend_in_turn(losses, (), ("lr", "readout"), 2, 4, 2)
    assert best == setting({"lr": minimum[0], "readout": minimum[1]})
    assert {chosen for chosen, _ in points} >= set(neighbours(best, ("lr", "readout")))
    assert len({chosen for chosen, seed in points if seed == 3}) == 2
    losses, crosses = bowl(*minimum)
    descend(losses, (), ("lr", "readout"), seeds=2, final=4, finalists=2)
    assert len(points) <= len(crosses)


def test_neighbours_move_one_constant_each():
    first, *moved = neighbours((("lr", 1),), ("lr", "x"))
    assert first == (("lr", 1),)
    assert set(moved) == {(), (("lr", 2),), (*first, ("x", 1)), (*first, ("x", -1))}


@pytest.mark.parametrize("name", CELLS)
def test_at_the_base_all_arms_are_one_model_and_larger_ones_differ_and_keep_it_as_their_base(
    name: str,
):
    cell = CELLS[name]
    runs = []
    for arm in cell.arms:
        first, last = (
            cell.config(arm, size, {"lr": 1, "rates.readout": 2}, seed=3)
            for size in (cell.sizes[0], cell.sizes[-1])
        )
        assert first.preset.base == last.preset.base
        own_constants = arm.constants(cell.sizes[-1] / cell.sizes[0])
        readout = 4 * dict(cell.constants).get("rates.readout", 1)
        readout *= own_constants.get("rates.readout", 1)
        assert f"rates.readout={readout:.10g}" in last.preset.constants
        assert last.seed == 3
        assert cells.rate(last) == cells.rate(first)
        run = (last.preset, arm.tuned, arm.searches, arm.ablation, arm.base_search_like)
        assert run not in runs
        runs.append(run)
    assert len({arm.label for arm in cell.arms}) == len(runs)  # results are kept by it


class Bowls:
    """Trainer without runs: losses have their minimum two steps from a setting's zero.

    The rate of `block.key` counts at every size, so a search at the base finds it.
    """

    seconds = 1.0

    def __init__(self, cell: Cell, stop: object) -> None:
        self.cell = cell
        self.searches: list[tuple[str, int, Sequence[str]]] = []

    def losses(self, arm: Arm, size: int, settings: Sequence[Setting], seeds: int) -> np.ndarray:
        means = [abs(dict(chosen).get("rates.block.key", 0) - 2.0) for chosen in settings]
        return np.repeat(np.array(means)[:, None], seeds, axis=1)

    def trained(self, arm: Arm, size: int, chosen: Setting) -> np.ndarray:
        return self.losses(arm, size, [chosen], 5)[0]

    def searched(
        self,
        arm: Arm,
        size: int,
        start: Setting,
        constants: Sequence[str],
        *,
        in_turn: bool = False,
    ) -> Setting:
        self.searches.append((arm.label, size, constants))
        return descend(
            lambda settings, seeds: self.losses(arm, size, settings, seeds), start, constants, 2, 5
        )


def test_groups_that_join_the_search_of_sp_are_tuned_at_the_base_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[Bowls] = []

    def measuring(cell: Cell, stop: object) -> Bowls:
        trained.append(Bowls(cell, stop))
        return trained[0]

    monkeypatch.setattr(quality, "Measuring", measuring)
    monkeypatch.setattr(cells, "OUT", tmp_path)
    cell = CELLS["vit-800"]
    cell.folder.mkdir()
    with StopRequest() as stop:
        quality.measure(cell, stop)
    arms = {
        arm["label"]: arm for arm in json.loads((cell.folder / "result.json").read_text())["arms"]
    }
    more = f"{MUP}, {MORE}"
    key_rates = {}
    for label in (MUP, more):
        sizes = arms[label]["sizes"]
        key_rates[label] = [row["octaves"].get("rates.block.key") for row in sizes]
    # The control, `mup`, tunes four constants at the base and has the recipe's rate of keys.
    assert key_rates == {MUP: [None] * 4, more: [2.0] * 4}
    at_base = [
        (label, names) for label, size, names in trained[0].searches if size == cell.sizes[0]
    ]
    assert (more, (*cell.searched, "rates.block.key")) in at_base


@pytest.mark.parametrize("name", ["muon-100", "muon-shipped-100"])
def test_a_setting_moves_both_peak_rates_of_muon(name: str):
    cell = CELLS[name]
    for arm in cell.arms:
        before, after = (
            cell.config(arm, cell.sizes[-1], setting, seed=0).optimizer
            for setting in ({}, {"lr": 1, "adam_lr": -2})
        )
        assert after.peak_lr == pytest.approx(before.peak_lr * 2**0.5)
        assert after.adam_lr == pytest.approx(before.adam_lr / 4)


@pytest.mark.parametrize(("name", "at_base"), [("muon-100", 1), ("muon-shipped-100", 2.48372)])
def test_the_readout_rate_falls_twice_as_fast_as_under_mup(name: str, at_base: float):
    cell = CELLS[name]
    arms = {arm.label: arm for arm in cell.arms}

    def readout_rate(label: str, size: int) -> float:
        constants = cell.config(arms[label], size, {}, 0).preset.constants
        return float(dict(constant.split("=") for constant in constants).get("rates.readout", 1))

    for size in cell.sizes:
        growth = size / cell.sizes[0]
        rate = readout_rate("mup, readout's rate m^-2", size)
        assert rate == pytest.approx(at_base / growth)
        # `mup`, the control, multiplies its own rule's rate by the same number at every size.
        assert readout_rate(MUP, size) == pytest.approx(at_base)


def test_the_shipped_constants_are_those_of_the_recipe():
    shipped = dict(value.split("=") for value in RECIPES["lm-laptop"]().preset.constants)
    logits = shipped.pop("c_a")
    ours = {name: f"{value:g}" for name, value in cells.SHIPPED}
    assert ours.pop("multipliers.block.query") == logits
    assert ours == shipped


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


def record(gaps: list[float]) -> dict:
    """`mup` and `sp` at two sizes; at the second `mup`'s losses less `sp`'s are these."""
    row = {"octaves": {"lr": 0.5}, "reference_minus_this": None}
    base = {**row, "size": 16, "losses": [2.0, 2.0, 2.0]}
    theirs = [2.5, 1.9, 2.2]
    ours = [loss + gap for loss, gap in zip(theirs, gaps, strict=True)]
    arms = []
    for label, tuned, losses in (("mup", [], ours), ("sp", ["lr"], theirs)):
        sizes = [base, {**row, "size": 32, "losses": losses}]
        arm = {"label": label, "tuned": tuned, "ablation": False, "reference": "mup"}
        arms.append({**arm, "sizes": sizes})
    return {
        "cell": "c", "axis": "head_dim", "recipe": "lm-tiny", "searched": ["lr"], "tuning_seconds": 60, "train_seconds": 60, "arms": arms,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("gaps", "row"),
    [
        ([-0.010, -0.011, -0.012], "-0.0110 ± 0.0025 | yes |"),
        ([0.010, 0.011, 0.012], "+0.0110 ± 0.0025 | no |"),
        ([-0.100, 0.1, -0.012], "-0.0040 ± 0.2490 | no |"),
    ],
)
def test_the_page_says_not_worse_only_where_the_interval_ends_below_the_goal(
    gaps: list[float], row: str
):
    assert f"| c | mup | {row}" in page.markdown([record(gaps)])


def test_the_page_says_where_a_seed_diverged():
    cell = record([-0.010, -0.011, -0.012])
    cell["arms"][0]["sizes"][1]["losses"][1] = None
    assert "| c | mup |  | no, a seed diverged |" in page.markdown([cell])


@pytest.mark.parametrize(("gain", "rows"), [(0.0, 0), (1.0, 2)])
def test_a_search_of_more_constants_that_ends_at_the_same_setting_has_no_rows(
    gain: float, rows: int
):
    cell = record([-0.010, -0.011, -0.012])
    longer = copy.deepcopy(cell["arms"][0])
    longer["label"] = f"mup, {cells.MORE}"
    longer["sizes"][1]["octaves"]["rates.block.norm_gain"] = gain
    cell["arms"].append(longer)
    assert page.markdown([cell]).count("| mup, more constants |") == rows


def test_the_committed_page_is_what_its_records_say():
    records = page.records()
    assert records
    assert page.markdown(records) == cells.OUT.with_suffix(".md").read_text()
    for chosen in records:
        assert has_rows(cells.OUT / chosen["cell"])


class RecordedRuns:
    """Stand-in for `Measuring` whose losses are a parabola of the rate's distance from the base's."""

    def __init__(self) -> None:
        self.cell = dataclasses.replace(CELLS["muon-100"], sizes=(2, 4))

    def losses(
        self, arm: cells.Arm, size: int, settings: Sequence[Setting], seeds: int
    ) -> np.ndarray:
        del arm, size
        steps = np.array([dict(chosen).get("lr", 0) for chosen in settings])
        losses = np.where(steps > 2, np.inf, 2 + 0.01 * steps**2)
        return np.repeat(losses[:, None], seeds, axis=1)


def test_a_rate_curve_marks_the_mean_over_all_seeds_of_the_comparison(tmp_path: Path):
    """The curve's points have two seeds, and the marked one has all that result.json has."""
    work = RecordedRuns()
    row = {"octaves": {"lr": -0.5, "rates.readout": 1.0}, "losses": [2.0, 2.2, 2.4]}
    curves = rates.measure(work, work.cell.arms[0], [row, row])  # pyright: ignore[reportArgumentType]
    for curve in curves:
        distances = np.array(curve.log2_rates) - curve.marked_rate
        assert distances == pytest.approx(rates.OFFSETS, abs=2e-4)
        assert curve.marked_loss == pytest.approx(2.2)
        assert curve.losses[rates.OFFSETS.index(0.0)] == pytest.approx(2.01)
        # Only the highest rate, 1.5 octaves above the base's, diverges.
        assert [loss is None for loss in curve.losses] == [False] * 6 + [True]
    path = tmp_path / "rates.json"
    rates.write(path, work.cell, {MUP: curves})
    assert rates.read(path) == {MUP: curves}


def test_the_readme_picture_has_the_losses_of_its_section():
    folder = CELLS[PICTURED].folder
    chosen = next(record for record in page.records() if record["cell"] == PICTURED)
    curves = rates.read(folder / "rates.json")
    for label in (MUP, RETUNED):
        rows = rates.sizes_of(chosen, label)
        for curve, row in zip(curves[label], rows, strict=True):
            assert curve.size == row["size"]
            assert curve.marked_loss == pytest.approx(np.mean(row["losses"]), rel=1e-5)
            # Two of the same seeds are at the curve's centre, so that curve and mark agree.
            centre = curve.losses[rates.OFFSETS.index(0.0)]
            assert centre == pytest.approx(np.mean(row["losses"][: rates.SEEDS]), rel=1e-5)
    assert f"({folder.relative_to(ROOT)}/rates.png)" in (ROOT / "README.md").read_text()


def test_an_arm_that_a_cell_has_not_is_named() -> None:
    record = {"cell": "c", "arms": [{"label": "sp", "sizes": []}]}
    with pytest.raises(LookupError, match=r"cell c has no arm 'nup'; its arms are sp"):
        rates.sizes_of(record, "nup")
    cell = CELLS[PICTURED]
    ablation = Arm("another", "mup", ("lr",), ablation=True)
    assert cells.reference_of(cell, ablation).label == MUP
    without_mup = dataclasses.replace(cell, arms=(ablation,))
    with pytest.raises(LookupError, match=f"needs an arm 'mup' beside it, not {ablation.label}"):
        cells.reference_of(without_mup, ablation)
