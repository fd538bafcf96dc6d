"""Packs of a sweep's points from the first step to their rows, saved on the way where it takes long.

On a CPU a small model's step leaves cores idle that another point's can use: packs may train side by side, a thread each.
The program is the same, so a point's losses are bitwise those that it has alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mupax.train.checkpoints import layout
from mupax.train.checkpoints.checkpointer import Checkpoints
from mupax.train.config import record
from mupax.train.config.run import Config
from mupax.train.config.sections import CheckpointConfig
from mupax.train.core.program import Program
from mupax.train.core.state import TrainState
from mupax.train.data import Data, cache
from mupax.train.studies.sweep.losses import save_losses, saved_losses, summarized
from mupax.train.studies.sweep.rows import Row
from mupax.train.studies.sweep.trainer import Batches, Trainer

SAVE_EVERY_S = 300.0
"""Points in training are saved so often, in seconds: what a crash can cost."""
FETCH_EVERY = 16
"""Steps between looks at the losses: a point that diverged in turn is given up that late."""

Point = tuple[int, Program]
"""A point: its place among the sweep's configs, and its program."""
PointBatch = Sequence[Point]
Save = Callable[[int, TrainState], None]


class SweepCallback:
    """Callbacks on the progress of a sweep. It shows nothing itself (`mupax.train.studies.sweep.table.LiveTable` does)."""

    def begin(self, configs: Sequence[Config], done: dict[int, Row]) -> None:
        """Called once, before anything is trained.

        Args:
            configs: all points.
            done: index of a point to its row, of those that have one already.
        """

    def note(self, text: str) -> None:
        """Called with a line for a person."""

    def training(self, points: Sequence[int], step: int, losses: np.ndarray) -> None:
        """Called every few steps.

        Args:
            points: indices of those in training together.
            step: steps that they have done.
            losses: of that step [points], nan of one that diverged.
        """

    def finished(self, point: int, row: Row) -> None:
        """Called when a point has its row.

        Args:
            point: its index.
            row: of it.
        """


def one_at_a_time(watcher: SweepCallback) -> SweepCallback:
    """The watcher, for several threads to call."""
    lock = threading.Lock()
    shared: Any = SweepCallback()

    def locked(call: Callable[..., None], *args: Any) -> None:
        with lock:
            call(*args)

    shared.begin, shared.note = partial(locked, watcher.begin), partial(locked, watcher.note)
    shared.training, shared.finished = (
        partial(locked, watcher.training),
        partial(locked, watcher.finished),
    )
    return shared


class Stopped(Exception):
    """A signal came: the points in training are saved, and the same sweep goes on from there."""


@dataclasses.dataclass(frozen=True)
class Work:
    """Trains the packs of one group, `concurrent` of them at the same time."""

    trainer: Trainer
    batches: Batches
    folder: Path
    keys: dict[int, str]
    watcher: SweepCallback
    stop: Callable[[], bool]
    concurrent: int = 1

    def unfinished(self, pack: PointBatch) -> Path:
        """Folder of a pack while it trains."""
        return (
            self.folder
            / "unfinished"
            / cache.digest(str(self.trainer.count), *(self.keys[i] for i, _ in pack))
        )

    def train(self, pack: PointBatch) -> list[tuple[int, Row]]:
        """The rows of a pack, whose places past the last point repeat it."""
        trainer, points, places = (
            self.trainer,
            [program for _, program in pack],
            [i for i, _ in pack],
        )
        points += [points[-1]] * (trainer.count - len(points))
        folder, steps, data = (
            self.unfinished(pack),
            points[0].config.steps,
            self.batches.of(points[0]),
        )
        losses, done = np.full((steps, trainer.count), np.nan), 0
        with Checkpoints(folder, CheckpointConfig(keep=1), log=self.watcher.note) as saves:
            state, step_inputs = trainer.begin(points)
            if saves.latest is not None:
                restored = saves.restore(trainer.abstract, data.facts)
                step = int(np.ravel(jax.device_get(restored.step))[0])
                digest = layout.read(saves.folder / str(step)).data.get("losses")
                before, what = (
                    saved_losses(folder, step, trainer.count, digest),
                    f"{len(pack)} point{'s' * (len(pack) > 1)}",
                )
                if before is None:
                    self.watcher.note(
                        f"the losses of {what} up to step {step} are lost or damaged: beginning again"
                    )
                else:
                    state, done, losses[:step] = (
                        trainer.program.placed(restored, trainer.step),
                        step,
                        before,
                    )
                    self.watcher.note(f"going on at step {done} with {what}")

            def save(step: int, state: TrainState) -> None:
                digest = save_losses(folder, losses[:step])
                saves.save(step, state, {**data.facts, "losses": digest}, last=True)

            began = time.monotonic()
            state = self._steps(state, step_inputs, done, losses, places, save)
            seconds = (time.monotonic() - began) / len(pack) / self.concurrent
            finite = np.isfinite(losses)
            scores = self._scores(state, step_inputs, data) if finite.all(axis=0).any() else None
        rows, how = [], "in turn" if trainer.count == 1 else "together"
        for place, (i, program) in enumerate(pack):
            first = None if finite[:, place].all() else int(np.argmin(finite[:, place])) + 1
            loss, curve = summarized(np.where(finite[:, place], losses[:, place], np.inf))
            score = None if scores is None or first else float(scores[place])
            command = record.command_of(program.config)
            rows.append(
                (
                    i,
                    Row(
                        self.keys[i],
                        command,
                        loss,
                        score,
                        first,
                        curve,
                        steps,
                        round(seconds, 3),
                        how,
                    ),
                )
            )
        return rows

    def _steps(
        self,
        state: TrainState,
        step_inputs: Any,
        done: int,
        losses: np.ndarray,
        places: Sequence[int],
        save: Save,
    ) -> TrainState:
        """The state after the last step; fills losses [steps, count], not a number from where a point diverged."""
        pending: list[dict[str, jax.Array]] = []
        steps, saved, program = len(losses), time.monotonic(), self.trainer.program
        batches = self.batches.train(program, done)
        for step, batch in zip(range(done + 1, steps + 1), batches, strict=False):
            state, metrics = self.trainer.step(state, step_inputs, batch)
            pending.append({name: metrics[name] for name in ("loss", "grad_norm")})
            leave = self.stop()
            if step % FETCH_EVERY and step != steps and not leave:
                continue
            for k, fetched in enumerate(jax.device_get(pending), step - len(pending)):
                finite = np.isfinite(fetched["loss"]) & np.isfinite(fetched["grad_norm"])
                losses[k] = np.where(
                    finite & ((k == 0) | np.isfinite(losses[k - 1])), fetched["loss"], np.nan
                )
            pending.clear()
            self.watcher.training(places, step, losses[step - 1, : len(places)])
            if not np.isfinite(losses[step - 1]).any():
                break
            if step < steps and (leave or time.monotonic() - saved > SAVE_EVERY_S):
                save(step, state)
                saved = time.monotonic()
                if leave:
                    raise Stopped
        return state

    def _scores(self, state: TrainState, step_inputs: Any, data: Data) -> np.ndarray | None:
        """Evaluation loss of every point, float [count]; None where nothing is evaluated."""
        if self.trainer.score is None:
            return None
        score, feed = self.trainer.score, self.trainer.program.eval_feed()
        with contextlib.closing(data.eval_batches(*feed.rows)) as batches:
            sums = [
                jax.device_get(score(state.evaluated, step_inputs, feed.shard_batch(batch)))
                for batch in batches
            ]
        total = jax.tree.map(lambda *each: sum(each), *sums)
        return np.atleast_1d(
            np.asarray(total.loss, np.float64) / np.asarray(total.weight, np.float64)
        )

    def trained(
        self, packs: Sequence[PointBatch]
    ) -> Iterator[tuple[PointBatch, list[tuple[int, Row]]]]:
        """Every pack with its rows, as it is done; so many at a time as the trainer says.

        Raises:
            Stopped: after every pack in training is saved and all finished rows are yielded; an error of any comes first.
        """
        threads = min(self.trainer.concurrent, len(packs))
        if threads == 1:
            yield from ((pack, self.train(pack)) for pack in packs)
            return
        leave = threading.Event()
        each = dataclasses.replace(
            self, stop=lambda: leave.is_set() or self.stop(), concurrent=threads
        )
        error: BaseException | None = None

        def end() -> None:
            """Those that train save and leave, the others never begin."""
            leave.set()
            for future in running:
                future.cancel()

        with ThreadPoolExecutor(threads) as pool:
            running = {pool.submit(each.train, pack): pack for pack in packs}
            try:
                for future in as_completed(running):
                    if future.cancelled():
                        continue
                    if raised := future.exception():
                        error = raised if error is None or isinstance(error, Stopped) else error
                        end()
                    else:
                        yield running[future], future.result()
            finally:
                end()
        if error is not None:
            raise error
