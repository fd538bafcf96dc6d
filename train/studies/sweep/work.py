"""Packs of a sweep's points from the first step to their rows, saved on the way where it takes long.

On a CPU a small model's step leaves cores idle that another point's can use: packs may train side by side, a thread each.
The program is the same, so a point's losses are bitwise those that it has alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mupax.train.checkpoints.checkpointer import Checkpoints
from mupax.train.checkpoints.folder import steps
from mupax.train.config import record
from mupax.train.config.run import Config
from mupax.train.core.program import Program
from mupax.train.core.state import TrainState
from mupax.train.data import Data
from mupax.train.studies.sweep.groups import Batches, Member
from mupax.train.studies.sweep.rows import Row, summarized
from mupax.train.studies.sweep.trainer import Trainer

SAVE_EVERY_S = 300.0
"""Points in training are saved so often, in seconds: what a crash can cost."""
FETCH_EVERY = 16
"""Steps between looks at the losses: a point that diverged in turn is given up that late."""

Pack = Sequence[Member]


class Watcher:
    """Called with how a sweep goes; shows nothing itself (`mupax.train.studies.sweep.table.Table` does)."""

    def begin(self, configs: Sequence[Config], done: dict[int, Row]) -> None: ...

    def note(self, text: str) -> None: ...

    def training(self, points: Sequence[int], step: int, losses: np.ndarray) -> None: ...

    def finished(self, point: int, row: Row) -> None: ...


class OneAtATime(Watcher):
    """A watcher that several threads may call."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher, self._lock = watcher, threading.Lock()

    def begin(self, configs: Sequence[Config], done: dict[int, Row]) -> None:
        with self._lock:
            self._watcher.begin(configs, done)

    def note(self, text: str) -> None:
        with self._lock:
            self._watcher.note(text)

    def training(self, points: Sequence[int], step: int, losses: np.ndarray) -> None:
        with self._lock:
            self._watcher.training(points, step, losses)

    def finished(self, point: int, row: Row) -> None:
        with self._lock:
            self._watcher.finished(point, row)


class Stopped(Exception):
    """A signal came: the points in training are saved, and the same sweep goes on from there."""


@dataclasses.dataclass(frozen=True)
class Work:
    """Trains the packs of one group.

    Attributes:
        concurrent: packs that train at the same time.
    """

    trainer: Trainer
    batches: Batches
    folder: Path
    keys: dict[int, str]
    evaluated: bool
    watcher: Watcher
    stop: Callable[[], bool]
    concurrent: int = 1

    def unfinished(self, pack: Pack) -> Path:
        """Folder of a pack while it trains."""
        return self.folder / "unfinished" / "-".join((self.keys[pack[0][0]], str(self.trainer.count)))

    def train(self, pack: Pack) -> list[tuple[int, Row]]:
        """The rows of a pack, whose places past the last point repeat it."""
        trainer, points = self.trainer, [program for _, program in pack]
        points += [points[-1]] * (trainer.count - len(points))
        folder, steps, data = self.unfinished(pack), points[0].config.steps, self.batches.of(points[0])
        facts = {**data.facts, "points": [self.keys[i] for i, _ in pack]}
        with Checkpoints(folder, 1, note=self.watcher.note) as saves:
            start, step_inputs = trainer.begin(points)
            losses, done = np.full((steps, trainer.count), np.nan), 0
            if saves.latest is not None:
                start = trainer.placed(saves.restore(trainer.abstract, facts))
                done = int(np.ravel(jax.device_get(start.step))[0])
                losses[:done] = np.load(folder / f"losses-{done}.npy")
                self.watcher.note(f"going on at step {done} with {len(pack)} point{'s' * (len(pack) > 1)}")
            began = time.monotonic()
            state = start
            for state, step in self._steps(start, step_inputs, done, losses, [i for i, _ in pack]):
                if step is not None:
                    _save(saves, folder, step, state, losses, facts)
            seconds = (time.monotonic() - began) / len(pack) / self.concurrent
            diverged = np.logical_not(np.isfinite(losses).all(axis=0))
            evaluated = self.evaluated and not diverged.all()
            scores = self._scores(state, step_inputs, points[0], data) if evaluated else None
        rows = []
        for place, (i, program) in enumerate(pack):
            first = int(np.argmin(np.isfinite(losses[:, place]))) + 1 if diverged[place] else None
            loss, curve = summarized(np.where(np.arange(steps) + 1 < (first or steps + 1), losses[:, place], np.inf))
            score = None if scores is None or first else float(scores[place])
            words = record.words(program.config)
            command = " ".join(["python -m train", program.config.recipe, *words]) if words is not None else ""
            how = "in turn" if trainer.count == 1 else "together"
            rows.append((i, Row(self.keys[i], command, loss, score, first, curve, steps, round(seconds, 3), how)))
        return rows

    def _steps(
        self, state: TrainState, step_inputs: Any, done: int, losses: np.ndarray, places: Sequence[int]
    ) -> Iterator[tuple[TrainState, int | None]]:
        """The state with its step where it is to be saved, and after the last step.

        Fills losses [steps, count], not a number from where a point diverged.

        Raises:
            Stopped: after a save that `stop` asked for.
        """
        pending: list[dict[str, jax.Array]] = []
        steps, saved, feed = len(losses), time.monotonic(), self.trainer.program.train_feed()
        for step, batch in enumerate(self.batches.train(self.trainer.program, done, feed), done + 1):
            if step > steps:
                break
            state, metrics = self.trainer.step(state, step_inputs, batch)
            pending.append({name: metrics[name] for name in ("loss", "grad_norm")})
            leave = self.stop()
            if step % FETCH_EVERY and step != steps and not leave:
                continue
            for k, fetched in enumerate(jax.device_get(pending), step - len(pending)):
                finite = np.isfinite(fetched["loss"]) & np.isfinite(fetched["grad_norm"])
                losses[k] = np.where(finite & ((k == 0) | np.isfinite(losses[k - 1])), fetched["loss"], np.nan)
            pending.clear()
            self.watcher.training(places, step, losses[step - 1, : len(places)])
            if not np.isfinite(losses[step - 1]).any():
                break
            if step < steps and (leave or time.monotonic() - saved > SAVE_EVERY_S):
                yield state, step
                saved = time.monotonic()
                if leave:
                    raise Stopped
        yield state, None

    def _scores(self, state: TrainState, step_inputs: Any, program: Program, data: Data) -> np.ndarray:
        """Evaluation loss of every point, float [count]."""
        total: Any = None
        feed = program.eval_feed()
        with contextlib.closing(data.eval_batches(*feed.rows)) as batches:
            for batch in batches:
                sums = jax.device_get(self.trainer.score(state.evaluated, step_inputs, feed.put(batch)))
                total = sums if total is None else jax.tree.map(np.add, total, sums)
        return np.atleast_1d(np.asarray(total.loss, np.float64) / np.asarray(total.weight, np.float64))


def _save(saves: Checkpoints, folder: Path, step: int, state: TrainState, losses: np.ndarray, facts: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"losses-{step}.npy").open("wb") as file:
        np.save(file, losses[:step])
        file.flush()
        os.fsync(file.fileno())
    saves.save(step, state, facts, last=True)
    current = {f"losses-{k}.npy" for k in (step, *steps(saves.folder))}  # the one before counts until this one is whole
    for old in folder.glob("losses-*.npy"):
        if old.name not in current:
            old.unlink()


def trained(work: Work, packs: Sequence[Pack], threads: int) -> Iterator[tuple[Pack, list[tuple[int, Row]]]]:
    """Every pack with its rows, as it is done.

    Args:
        work: trains a pack; its watcher is called from several threads (`OneAtATime`).
        packs: in the order in which they begin.
        threads: packs at a time, where there are so many.

    Raises:
        Stopped: after every pack in training is saved and all finished rows are yielded; an error of any pack comes first.
    """
    threads = min(threads, len(packs))
    if threads == 1:
        yield from ((pack, work.train(pack)) for pack in packs)
        return
    leave = threading.Event()
    each = dataclasses.replace(work, stop=lambda: leave.is_set() or work.stop(), concurrent=threads)
    error: BaseException | None = None

    def end() -> None:
        """Those that train save and leave, the others never begin."""
        leave.set()
        for future in running:
            future.cancel()

    with ThreadPoolExecutor(threads, thread_name_prefix="points") as pool:
        running = {pool.submit(each.train, pack): pack for pack in packs}
        try:
            for future in as_completed(running):
                try:
                    rows = future.result()
                except CancelledError:
                    continue
                except BaseException as raised:
                    error = raised if error is None or isinstance(error, Stopped) else error
                    end()
                    continue
                yield running[future], rows
        finally:
            end()
    if error is not None:
        raise error
