"""Training of a cell's points: each is trained once, whichever arm or search asks for it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from mupax.train.parallel.processes import StopRequest
from mupax.train.studies.sweep.sweep import Sweep
from scripts.quality.cells import Arm, Cell, octaves
from scripts.quality.descent import Setting, descend

FIRST = 2
FINAL = 5
"""Seeds of a search's moves, and of its last comparison and of every arm; an arm whose difference is not known yet has more."""


class Measuring:
    """Trainer of one cell's points."""

    def __init__(self, cell: Cell, stop: StopRequest) -> None:
        self.cell = cell
        self._sweep = Sweep(cell.folder, evaluated=False, stop=lambda: stop.received is not None)
        self._losses: dict[tuple[str, int, Setting, int], float] = {}
        self.seconds = 0.0

    def losses(self, arm: Arm, size: int, settings: Sequence[Setting], seeds: int) -> np.ndarray:
        """Final training losses [settings, seeds], inf where a point diverged."""
        arm = (
            self.cell.arms[0] if size == self.cell.sizes[0] else arm
        )  # at the base all are one model
        keys = [(arm.label, size, one, seed) for one in settings for seed in range(seeds)]
        if todo := [key for key in dict.fromkeys(keys) if key not in self._losses]:
            rows = self._sweep.run(
                [self.cell.config(arm, size, dict(one), seed) for *_, one, seed in todo]
            )
            for key, row in zip(todo, rows, strict=True):
                self._losses[key] = row.loss
                self.seconds += row.seconds
        return np.array([self._losses[key] for key in keys]).reshape(len(settings), seeds)

    def trained(self, arm: Arm, size: int, one: Setting) -> np.ndarray:
        """Final training losses of the seeds that have been trained so, from the first on."""
        arm = self.cell.arms[0] if size == self.cell.sizes[0] else arm
        seeds = next(n for n in itertools.count() if (arm.label, size, one, n) not in self._losses)
        return self.losses(arm, size, [one], seeds)[0]

    def searched(self, arm: Arm, size: int, start: Setting, constants: Sequence[str]) -> Setting:
        """The best setting of an arm at a size."""
        optimum = descend(
            lambda settings, seeds: self.losses(arm, size, settings, seeds),
            start,
            constants,
            FIRST,
            FINAL,
            self.cell.finalists,
        )
        print(
            f"  {self.cell.name} {arm.label}, {self.cell.axis} {size}: {octaves(dict(optimum)) or 'as the recipe'}",
            flush=True,
        )
        return optimum
