"""Trainer of a cell's runs, and the file of their rows.

Each run is trained once, whichever arm or search needs it.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mupax.train.parallel.processes import StopRequest
from mupax.train.studies.sweep.rows import COMPRESSED_NAME, Rows
from mupax.train.studies.sweep.sweep import Sweep
from scripts.quality.cells import Arm, Cell, octaves
from scripts.quality.descent import Setting, descend, descend_in_turn

FIRST = 2
"""Number of seeds by which a search chooses each move."""
FIRST_OF_LARGE = 1
"""Seeds of the moves of a search in turn at sizes above `Cell.probe_size`.

A run there takes three times as long as at the size before. The last comparison is on `FINAL` seeds
at every size."""
FINAL = 5
"""Seeds of a search's last comparison, and the least number of seeds of every arm."""


class RunKey(NamedTuple):
    """One run of a cell."""

    label: str
    """Label of the arm."""
    size: int
    setting: Setting
    seed: int


class Measuring:
    """Trainer of one cell's runs, which keeps their losses.

    Attributes:
        cell: The cell.
        seconds: Training time of all runs that were asked for, in seconds.
    """

    def __init__(self, cell: Cell, stop: StopRequest) -> None:
        self.cell = cell
        self.seconds = 0.0
        self._sweep = Sweep(cell.folder, evaluated=False, stop=lambda: stop.received is not None)
        self._losses: dict[RunKey, float] = {}

    def losses(self, arm: Arm, size: int, settings: Sequence[Setting], seeds: int) -> np.ndarray:
        """Train what is missing and return final training losses [settings, seeds].

        The loss is infinite where a run diverged.
        """
        arm = self._trained_arm(arm, size)
        keys = []
        for setting in settings:
            keys += [RunKey(arm.label, size, setting, seed) for seed in range(seeds)]
        missing = [key for key in dict.fromkeys(keys) if key not in self._losses]
        if missing:
            rows = self._sweep.run(
                [self.cell.config(arm, size, dict(key.setting), key.seed) for key in missing]
            )
            for key, row in zip(missing, rows, strict=True):
                self._losses[key] = row.loss
                self.seconds += row.seconds
        return np.array([self._losses[key] for key in keys]).reshape(len(settings), seeds)

    def trained(self, arm: Arm, size: int, setting: Setting) -> np.ndarray:
        """Return final training losses [seeds] of a setting, for all seeds trained so far."""
        label = self._trained_arm(arm, size).label
        seeds = 0
        for seeds in itertools.count():
            if RunKey(label, size, setting, seeds) not in self._losses:
                break
        return self.losses(arm, size, [setting], seeds)[0]

    def searched(
        self,
        arm: Arm,
        size: int,
        start: Setting,
        constants: Sequence[str],
        *,
        in_turn: bool = False,
    ) -> Setting:
        """Search an arm's best setting at a size and return it.

        Args:
            in_turn: True to search one constant after another, which is cheaper for many constants.
        """

        def losses(settings: Sequence[Setting], seeds: int) -> np.ndarray:
            return self.losses(arm, size, settings, seeds)

        finalists = self.cell.finalists
        if in_turn and finalists is not None:
            seeds = FIRST if size <= self.cell.probe_size else FIRST_OF_LARGE
            optimum = descend_in_turn(losses, start, constants, seeds, FINAL, finalists)
        else:
            optimum = descend(losses, start, constants, FIRST, FINAL, finalists)
        print(
            f"  {self.cell.name} {arm.label}, {self.cell.axis} {size}: "
            f"{octaves(dict(optimum)) or 'as the recipe'}",
            flush=True,
        )
        return optimum

    def _trained_arm(self, arm: Arm, size: int) -> Arm:
        """Return the arm whose runs stand for `arm` at a size: at the base the cell's first arm."""
        return self.cell.arms[0] if size == self.cell.sizes[0] else arm


def without_curves(folder: Path) -> None:
    """Rewrite a cell's rows without their loss curves, which are three quarters of the file.

    Nothing in the study reads the curves.
    """
    rows = Rows(folder)
    if not any(row.curve for row in rows.values()):
        return
    with tempfile.TemporaryDirectory(dir=folder) as name:
        bare = Rows(Path(name))
        for row in rows.values():
            bare.add(replace(row, curve=()))
        bare.path.replace(rows.path)
        (folder / COMPRESSED_NAME).unlink(missing_ok=True)
