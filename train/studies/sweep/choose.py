"""Whether the points of one program train faster all at once, in turn, or several side by side: by a trial of a few steps."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import jax

from mupax.train.core.program import Program
from mupax.train.studies.sweep import trainer as sweep_pack
from mupax.train.studies.sweep.trainer import Batches, Trainer
from mupax.zoo.configs import ConfigError

Mode = Literal["auto", "together", "in-turn"]
STEPS = 3
GAIN = 0.95
"""More points side by side must take at most this share of the time."""
FEW = 40
"""Steps of all points together that are not worth a trial."""
PAYS = 20
"""A trial costs a compilation; in turn must need so many of those to make it worth one, on a CPU, where it seldom wins."""


class Chooser:
    """Trainers of a sweep's programs, each compiled once.

    Args:
        how: all points of a program at once, one after another, or whichever a trial shows to be faster; on one CPU device a
            trial also finds how many to train side by side.
        batches: for the trial.
        evaluated: whether the trainers are to score points.
    """

    def __init__(self, how: Mode, batches: Batches, evaluated: bool) -> None:
        self._how, self._batches, self._evaluated = how, batches, evaluated
        self._trainers: dict[tuple[object, int], Trainer] = {}
        self._fastest: dict[object, Trainer] = {}
        self._slower = False
        """Whether a smaller program was seen to be slower together: a larger one is too."""

    def trainer(self, key: object, points: Sequence[Program], note: Callable[[str], None]) -> Trainer:
        """What trains these points.

        Args:
            key: of their program (`mupax.train.studies.sweep.sweep.grouped`).
            points: all that are to be trained.
            note: called with what was chosen.
        """
        program, count, ways = points[0], len(points), points[0].mesh.shape["sweep"]
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
                # A later round of fewer points repeats one in the places of a pack that is compiled, if half of it is used.
                larger = [n for of, n in self._trainers if of == key and fits < n <= 2 * fits]
                return self._compiled(key, program, min(larger, default=fits))
            if count > 1:
                note("in turn: two points do not fit into memory at once")
        one = self._compiled(key, program, 1)
        if key in self._fastest:
            return self._fastest[key] if self._fastest[key].count <= count else one
        if self._how != "auto" or not on_cpu or count == 1 or count * program.config.steps < FEW:
            return one
        one, each, text = self._side_by_side(one, points)
        self._trainers[key, 1] = self._fastest[key] = one
        fits = sweep_pack.fitting(program, count, one)
        little = each * program.config.steps * count < PAYS * one.compile_seconds
        if self._slower or little or fits == 1:
            note(f"in turn: {text}")
            return one
        many = self._compiled(key, program, fits)
        of_many = self._seconds(many, [*points, *[points[-1]] * fits][:fits]) / fits
        self._slower = of_many >= each
        if self._slower:
            del self._trainers[key, fits]
        else:
            self._fastest[key] = many
        note(f"{'in turn' if self._slower else 'together'}: {text}, {of_many * 1000:.0f} ms together")
        return self._fastest[key]

    def _compiled(self, key: object, program: Program, count: int) -> Trainer:
        if (key, count) not in self._trainers:
            began = time.monotonic()
            trainer = sweep_pack.trainer(program, count, self._evaluated)
            self._trainers[key, count] = dataclasses.replace(trainer, compile_seconds=time.monotonic() - began)
        return self._trainers[key, count]

    def _side_by_side(self, one: Trainer, points: Sequence[Program]) -> tuple[Trainer, float, str]:
        """The trainer with how many to train at the same time, the seconds of a step and point, and the timings in words."""
        times, program, best = {1: self._seconds(one, points[:1])}, one.program, 1
        if program.mesh.size == 1:  # programs of many devices would wait for each other
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            most = min(cores, len(points), sweep_pack.fitting(program, len(points), one))
            while 2 * best <= most:
                times[2 * best] = self._seconds(one, points[:1], 2 * best)
                if times[2 * best] > GAIN * times[best]:
                    break
                best *= 2
        words = (f"{1000 * s:.0f} ms {f'by {n} side by side' if n > 1 else 'one by one'}" for n, s in times.items())
        return dataclasses.replace(one, concurrent=best), times[best], f"a step takes {', '.join(words)}"

    def _seconds(self, trainer: Trainer, points: Sequence[Program], concurrent: int = 1) -> float:
        """Median of a few steps of a pack, which go nowhere; of so many packs side by side the share of one."""
        start = threading.Barrier(concurrent)

        def median() -> float:
            try:
                state, step_inputs = trainer.begin(points)
                times = []
                with contextlib.closing(self._batches.train(trainer.program, 0)) as batches:
                    for k, batch in zip(range(STEPS + 1), batches, strict=False):
                        if k == 1:
                            start.wait()
                        began = time.monotonic()
                        state, metrics = trainer.step(state, step_inputs, batch)
                        jax.block_until_ready(metrics)
                        times.append(time.monotonic() - began)
            except threading.BrokenBarrierError:
                return 0.0  # another thread raises what went wrong
            except BaseException:
                start.abort()
                raise
            return statistics.median(times[1:] or times)

        with ThreadPoolExecutor(concurrent) as pool:
            return max(future.result() for future in [pool.submit(median) for _ in range(concurrent)]) / concurrent
