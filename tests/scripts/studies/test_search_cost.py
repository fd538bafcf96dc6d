"""What the searches cost beside the full grid: commands that can run, how runs are counted, and what the record shows."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from mupax.train.studies.sweep.rows import Row, Rows
from mupax.zoo import flops
from scripts.studies import search_cost

RECORD = json.loads(search_cost.OUT.read_text())
COMMAND = f"python -m train {search_cost.RUN}"
ROW = Row(
    key="", command=COMMAND, loss=1.0, eval_loss=None, diverged_at=None, curve=(), steps=100, seconds=1.0, how="in turn"
)


def rows(folder: Path, points: dict[str, list[float]]) -> Path:
    """Rows of a sweep: flags to the losses of its seeds."""
    added = Rows(folder)
    for flags, losses in points.items():
        for seed, loss in enumerate(losses):
            words = [COMMAND, flags, *([f"--seed {seed}"] if seed else [])]
            added.add(dataclasses.replace(ROW, key=f"{flags}{seed}", command=" ".join(words), loss=loss))
    return folder


@pytest.mark.parametrize("name", search_cost.commands(Path("runs")))
def test_the_commands_can_run(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    search_cost.train([*search_cost.commands(tmp_path)[name], "--dry-run"])
    assert "error" not in capsys.readouterr().out


def test_the_best_point_has_all_seeds(tmp_path: Path):
    low, once, high = "--optimizer.peak-lr 0.01", "--optimizer.peak-lr 0.02", "--optimizer.peak-lr 0.04"
    folder = rows(tmp_path, {low: [2.0, 2.2, 2.1], once: [1.0], high: [3.0, 3.0, 3.0]})
    words, runs = search_cost.least(folder)
    assert (words[-1], runs) == ("0.01", 7)  # what one seed found is no point
    (setting,) = search_cost.settings(folder)
    assert search_cost.cost(folder) == 7 * flops.train_flops(setting.config.model) * 100 * 8


def test_both_searches_find_what_the_grids_find_for_less():
    assert all(abs(row["frugal"] - row["grid"]) <= 0.25 for row in RECORD["frugal"]["rates"])
    assert RECORD["frugal"]["ratio"] <= 0.4
    tuned = RECORD["tune"]
    assert tuned["ratio"] == pytest.approx(tuned["runs"] / tuned["grid_runs"], abs=1e-4)
    assert tuned["ratio"] <= 0.4
    mean, half = tuned["less_grid"]
    assert mean + half < 0.005
