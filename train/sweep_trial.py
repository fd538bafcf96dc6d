"""Whether the points of one program train faster all at once or in turn: known, or measured on a few steps."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Literal

import jax

from train import sweep_pack
from train.program import Program
from train.sweep_batches import Batches
from train.sweep_pack import Trainer
from zoo.configs import ConfigError

Mode = Literal["auto", "together", "in-turn"]
STEPS = 3
PAYS = 20
"""A trial costs a compilation; in turn must need so many of those to make it worth one, on a CPU, where it seldom wins."""


class Chooser:
    """Trainers of a sweep's programs, each compiled once.

    Args:
        how: all points of a program at once, one after another, or whichever a trial shows to be faster.
        feeds: batches for the trial.
    """

    def __init__(self, how: Mode, feeds: Batches) -> None:
        self._how, self._feeds = how, feeds
        self._made: dict[tuple[object, int], Trainer] = {}
        self._slower = False
        """Whether a smaller program was seen to be slower together: a larger one is too."""

    def trainer(self, key: object, points: Sequence[Program], note: Callable[[str], None]) -> Trainer:
        """What trains these points.

        Args:
            key: of their program (`train.sweep_groups`).
            points: all that are to be trained.
            note: told what was chosen.

        Raises:
            ConfigError: in turn is asked for on a mesh that splits a sweep.
        """
        program, count = points[0], len(points)
        ways = program.mesh.shape["sweep"]
        on_cpu = program.mesh.devices.flat[0].platform == "cpu"
        if self._how == "in-turn" and ways > 1:
            raise ConfigError(
                f"in turn uses no mesh axis sweep, which is {ways}; write --mesh.sweep 1, or --how together"
            )
        if self._how == "together" or ways > 1 or (self._how == "auto" and not on_cpu and count > 1):
            fits = sweep_pack.fitting(program, count)
            if fits > 1:
                if fits < count:
                    note(f"{fits} points at a time fit into memory")
                return self._together(key, program, fits)
            note("in turn: two points do not fit into memory at once")
        if (key, 1) in self._made:
            return self._made[key, 1]
        began = time.monotonic()
        one = self._made[key, 1] = sweep_pack.alone(program)
        if self._how != "auto" or self._slower or count == 1:
            return one
        compiling = time.monotonic() - began
        each = self._seconds(one, points[:1])
        if each * program.config.steps * count < PAYS * compiling:
            note(f"in turn: {each * 1000:.0f} ms a step; too little work to try all at once")
            return one
        fits = sweep_pack.fitting(program, count, one)
        many = self._together(key, program, fits)
        of_many = self._seconds(many, [*points, *[points[-1]] * fits][:fits]) / fits
        self._slower = of_many >= each
        text = f"{each * 1000:.0f} ms a step in turn, {of_many * 1000:.0f} ms together"
        note(f"{'in turn' if self._slower else 'together'}: {text}")
        return one if self._slower else many

    def _together(self, key: object, program: Program, count: int) -> Trainer:
        if (key, count) not in self._made:
            self._made[key, count] = sweep_pack.together(program, count)
        return self._made[key, count]

    def _seconds(self, trainer: Trainer, points: Sequence[Program]) -> float:
        """Of the fastest of a few steps, which go nowhere."""
        state, numbers = trainer.begin(points)
        times = []
        with contextlib.closing(self._feeds.train(trainer.program, 0, trainer.program.train_feed())) as batches:
            for _, batch in zip(range(STEPS + 1), batches, strict=False):
                began = time.monotonic()
                state, metrics = trainer.step(state, numbers, batch)
                jax.block_until_ready(metrics)
                times.append(time.monotonic() - began)
        return min(times[1:] or times)
