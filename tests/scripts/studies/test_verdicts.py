"""Simulated studies: the record of the verdict and its intervals can be made again."""

from __future__ import annotations

import numpy as np
import pytest

from mupax import disk
from scripts.studies import verdicts

CELLS = sorted(disk.read_json(verdicts.OUT)["cells"], key=lambda cell: cell["noise"])
MEDIAN = CELLS[len(CELLS) // 2]


def test_the_middle_cell_is_decided() -> None:
    assert MEDIAN["trials"] >= 400
    assert MEDIAN["verdicts"]["0"]["transfers"] >= 0.9
    assert MEDIAN["verdicts"]["0.5"]["drifts"] >= 0.9


def test_a_drift_of_a_third_of_an_octave_hardly_ever_transfers() -> None:
    assert max(cell["verdicts"]["0.3"]["transfers"] for cell in CELLS) <= 0.05


@pytest.mark.parametrize("seeds", verdicts.SEEDS)
def test_intervals_hold_the_truth_as_often_as_they_say(seeds: int) -> None:
    rows = [cell["coverage"][f"{seeds}"] for cell in CELLS]
    covered = np.average([row["covered"] for row in rows], weights=[row["fitted"] for row in rows])
    assert 0.93 <= covered <= 0.97


def test_a_simulated_study_is_judged_by_the_command() -> None:
    cell = verdicts.cells()[0]
    still = verdicts.outcomes(cell, 0.0, 6, 3, 8)
    moving = verdicts.outcomes(cell, 0.5, 6, 3, 8)
    assert (still["transfers"], moving["drifts"]) == (1.0, 1.0)
    # The control: the noisiest cell decides nothing from three seeds.
    noisy = verdicts.outcomes(verdicts.cells()[-1], 0.0, 6, 3, 3)
    assert noisy["undecided"] > 0.5
