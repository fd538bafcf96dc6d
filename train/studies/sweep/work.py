"""Training of a sweep's points from their first step to their rows, with saves in between.

On a CPU a small model's step leaves cores idle that another point can use, so several groups of
points may train at the same time, in a thread each. All use one program, so the losses of a point
are bitwise the same as if the point trained alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from mupax.terminal import counted
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
"""Seconds between saves of points in training: the time that a crash can cost."""
FETCH_EVERY = 16
"""Number of steps between reads of the losses, because a read waits for the device.

Training ends up to this many steps late if all points have diverged.
"""

Point = tuple[int, Program]
"""Index of a point among the sweep's configs, and its program."""
PointBatch = Sequence[Point]
"""Points that train at once, with one trainer."""


class SweepCallback:
    """Base class of callbacks on the progress of a sweep. Its methods do nothing.

    `Sweep.run` calls the methods one at a time, but some of them from the threads that train.
    `mupax.train.studies.sweep.table.LiveTable` shows the progress.
    """

    def begin(self, configs: Sequence[Config], done: dict[int, Row]) -> None:
        """Receive all points of a `Sweep.run`, once before any of them is trained.

        Args:
            configs: Config of every point, in the order of their indices.
            done: Index of a point to its row, for points that have one already.
        """

    def note(self, text: str) -> None:
        """Receive a line of text for the user, such as a choice or a problem."""

    def training(self, points: Sequence[int], step: int, losses: np.ndarray) -> None:
        """Receive the progress of points in training, every `FETCH_EVERY` steps and at the end.

        Args:
            points: Indices of the points that train at once.
            step: Number of steps that they have done.
            losses: Losses of that step [points], nan for a point that has diverged.
        """

    def finished(self, point: int, row: Row) -> None:
        """Receive the row of a finished point, which is on disk by then.

        Of points with one name (`key_of`) only the first is received.

        Args:
            point: Index of the point among all configs of the sweep.
        """


class LockedCallback(SweepCallback):
    """Callbacks that forward each call to other callbacks under a lock, for use by several threads.

    Args:
        callback: Callbacks to forward to, which need not be thread-safe.
    """

    def __init__(self, callback: SweepCallback) -> None:
        self._callback = callback
        self._lock = threading.Lock()

    def begin(self, configs: Sequence[Config], done: dict[int, Row]) -> None:
        with self._lock:
            self._callback.begin(configs, done)

    def note(self, text: str) -> None:
        with self._lock:
            self._callback.note(text)

    def training(self, points: Sequence[int], step: int, losses: np.ndarray) -> None:
        with self._lock:
            self._callback.training(points, step, losses)

    def finished(self, point: int, row: Row) -> None:
        with self._lock:
            self._callback.finished(point, row)


class Stopped(Exception):
    """Exception of a stopped sweep. Its points in training are saved and can be resumed."""


class _Restored(NamedTuple):
    """State and losses of points in training, restored from their checkpoint.

    Attributes:
        state: State on the devices of the trainer.
        step: Number of steps that the points have done.
        losses: Losses of these steps, float64 [step, count].
    """

    state: TrainState
    step: int
    losses: np.ndarray


@dataclasses.dataclass(frozen=True)
class _Progress:
    """Losses of points in training, and the folder in which their state and losses are saved.

    Attributes:
        indices: Indices of the points among all configs of the sweep.
        losses: float64 [steps, count]. nan for steps that are not done, and from the step at which
            a point diverged.
        data: Data that the points see. A checkpoint records its facts.
    """

    indices: Sequence[int]
    losses: np.ndarray
    folder: Path
    checkpoints: Checkpoints
    data: Data

    def save(self, step: int, state: TrainState) -> None:
        """Save the state as a checkpoint and the losses as a file, after `step` steps."""
        # Losses first: a checkpoint names their digest, so it must never be newer than they are.
        digest = save_losses(self.folder, self.losses[:step])
        self.checkpoints.save(step, state, {**self.data.facts, "losses": digest}, last=True)

    def record(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Write the losses of a step into `losses`, nan for points that have diverged.

        A point that diverged once stays diverged, even if later losses are finite again.

        Args:
            step: Number of steps before this one.
            metrics: Arrays "loss" and "grad_norm" of the step, on the host; [count] or scalar.
        """
        finite = np.isfinite(metrics["loss"]) & np.isfinite(metrics["grad_norm"])
        if step > 0:
            finite = finite & np.isfinite(self.losses[step - 1])
        self.losses[step] = np.where(finite, metrics["loss"], np.nan)


@dataclasses.dataclass(frozen=True)
class Work:
    """Training loop for points that share a program, with saves and restores.

    Attributes:
        trainer: Compiled program, for `trainer.count` points at once.
        batches: Batches on the host, which all groups of the sweep share.
        folder: Folder of the sweep.
        keys: Name (`key_of`) of each point by its index.
        watcher: Callbacks on the progress, called from the threads.
        stop: Function that returns True to end the sweep, called after every step.
        concurrent: Number of threads that train at the same time.
    """

    trainer: Trainer
    batches: Batches
    folder: Path
    keys: dict[int, str]
    watcher: SweepCallback
    stop: Callable[[], bool]
    concurrent: int = 1

    def unfinished_folder(self, points: PointBatch) -> Path:
        """Return the folder in which state and losses of these points are saved while they train.

        It depends on the points' names and on the trainer's count. It is not created here.
        """
        keys = [self.keys[index] for index, _ in points]
        # By count, too: a state of several points does not fit a trainer of one.
        return self.folder / "unfinished" / cache.digest(str(self.trainer.count), *keys)

    def train(self, points: PointBatch) -> list[tuple[int, Row]]:
        """Train points at once, and return the index and the row of each.

        Training continues from the points' saved state if there is one. After the last step the
        points are evaluated, if the trainer evaluates and any of them did not diverge. Rows are not
        written to disk here.

        Args:
            points: At most `trainer.count` points.

        Raises:
            Stopped: `stop` returned True before the last step. The points are saved.
        """
        trainer = self.trainer
        programs = [program for _, program in points]
        # The trainer takes exactly `count` points, so the last one is repeated.
        programs += [programs[-1]] * (trainer.count - len(programs))
        folder = self.unfinished_folder(points)
        data = self.batches.data_of(programs[0])
        losses = np.full((programs[0].config.steps, trainer.count), np.nan)

        with Checkpoints(folder, CheckpointConfig(keep=1), log=self.watcher.note) as checkpoints:
            indices = [index for index, _ in points]
            progress = _Progress(indices, losses, folder, checkpoints, data)
            steps_done = 0
            state, step_inputs = trainer.begin(programs)
            if checkpoints.latest is not None:
                restored = self._restored(progress)
                if restored is not None:
                    state = restored.state
                    steps_done = restored.step
                    losses[:steps_done] = restored.losses

            began = time.monotonic()
            state = self._run_steps(state, step_inputs, steps_done, progress)
            # Divided among the points and threads that trained at once, so that the seconds of all
            # rows add up to the training time.
            seconds = (time.monotonic() - began) / len(points) / self.concurrent
            scores = None
            # An evaluation scores all points at once, even if some of them have diverged.
            if np.isfinite(losses).all(axis=0).any():
                scores = self._scores(state, step_inputs, data)

        rows = []
        for place, (index, program) in enumerate(points):
            score = None if scores is None else float(scores[place])
            rows.append((index, self._row(index, program, losses[:, place], score, seconds)))
        return rows

    def _row(
        self, index: int, program: Program, losses: np.ndarray, score: float | None, seconds: float
    ) -> Row:
        """Return the row of a finished point, in which losses after a divergence are inf.

        Args:
            losses: float64 [steps], nan from the step at which the point diverged.
            score: Evaluation loss, which a point that diverged does not get. A point whose score is
                not finite has diverged at its last step.
        """
        finite = np.isfinite(losses)
        if score is not None and not math.isfinite(score):
            finite[-1] = False
        diverged_at = None
        if not finite.all():
            diverged_at = int(np.argmin(finite)) + 1
            score = None
        # inf and not NaN, so that a diverged point compares as worse than any other.
        loss, curve = summarized(np.where(finite, losses, np.inf))
        return Row(
            key=self.keys[index],
            command=record.command_of(program.config),
            loss=loss,
            eval_loss=score,
            diverged_at=diverged_at,
            curve=curve,
            steps=len(losses),
            seconds=round(seconds, 3),
            how="in turn" if self.trainer.count == 1 else "together",
        )

    def _restored(self, progress: _Progress) -> _Restored | None:
        """Restore points from their checkpoint, or return `None` if their losses are lost.

        The watcher is told of the restore or of the loss. The points must have a checkpoint.
        """
        trainer = self.trainer
        checkpoints = progress.checkpoints
        state = checkpoints.restore(trainer.abstract, progress.data.facts)
        # If points train together, `step` has an entry per point, and all are equal.
        step = int(np.ravel(jax.device_get(state.step))[0])
        digest = layout.read(checkpoints.folder / str(step)).data.get("losses")
        losses = saved_losses(progress.folder, step, trainer.count, digest)

        count = len(progress.indices)
        description = counted(count, "point")
        if losses is None:
            self.watcher.note(
                f"the losses of {description} up to step {step} are lost or damaged: "
                "beginning again"
            )
            return None
        # The compiled step refuses arrays in another layout than the one it was compiled for.
        state = trainer.program.placed(state, trainer.step)
        self.watcher.note(f"going on at step {step} with {description}")
        return _Restored(state, step, losses)

    def _run_steps(
        self, state: TrainState, step_inputs: Any, steps_done: int, progress: _Progress
    ) -> TrainState:
        """Run the steps that are left, fill in `progress.losses`, and return the last state.

        It saves every `SAVE_EVERY_S` seconds, and ends early if all points have diverged.

        Args:
            steps_done: Number of steps that are done.

        Raises:
            Stopped: `stop` returned True before the last step. The points are saved.
        """
        losses = progress.losses
        steps = len(losses)
        count = len(progress.indices)
        saved_at = time.monotonic()
        pending: list[dict[str, jax.Array]] = []
        batches = self.batches.train(self.trainer.program, steps_done)
        for step, batch in zip(range(steps_done + 1, steps + 1), batches, strict=False):
            state, metrics = self.trainer.step(state, step_inputs, batch)
            # Kept on the device, so that the next step starts without a wait.
            pending.append({name: metrics[name] for name in ("loss", "grad_norm")})
            stopping = self.stop()
            if step % FETCH_EVERY and step != steps and not stopping:
                continue

            first_pending = step - len(pending)
            for offset, fetched in enumerate(jax.device_get(pending)):
                progress.record(first_pending + offset, fetched)
            pending.clear()
            last_losses = losses[step - 1]
            self.watcher.training(progress.indices, step, last_losses[:count])
            # All points have diverged. Their other losses stay nan.
            if not np.isfinite(last_losses).any():
                break
            save_is_due = stopping or time.monotonic() - saved_at > SAVE_EVERY_S
            if step < steps and save_is_due:
                progress.save(step, state)
                saved_at = time.monotonic()
                if stopping:
                    raise Stopped
        return state

    def _scores(self, state: TrainState, step_inputs: Any, data: Data) -> np.ndarray | None:
        """Return the evaluation loss of every point, float64 [count].

        Return `None` if the trainer does not evaluate.
        """
        score = self.trainer.score
        if score is None:
            return None
        feed = self.trainer.program.eval_feed()
        batch_sums = []
        with contextlib.closing(data.eval_batches(*feed.rows)) as batches:
            for batch in batches:
                sums = score(state.evaluated, step_inputs, feed.shard_batch(batch))
                batch_sums.append(jax.device_get(sums))
        # Sums and weights, because batches may count different numbers of targets.
        total = jax.tree.map(lambda *leaves: sum(leaves), *batch_sums)
        loss = np.asarray(total.loss, np.float64)
        weight = np.asarray(total.weight, np.float64)
        return np.atleast_1d(loss / weight)

    def train_all(
        self, point_batches: Sequence[PointBatch]
    ) -> Iterator[tuple[PointBatch, list[tuple[int, Row]]]]:
        """Train all batches of points, and yield each with its rows when it is done.

        `trainer.concurrent` batches train at the same time.

        Raises:
            Stopped: `stop` returned True. Before that, all points in training are saved and all
                finished rows are yielded. If a thread has another error, that one is raised.
        """
        threads = min(self.trainer.concurrent, len(point_batches))
        if threads == 1:
            for points in point_batches:
                yield points, self.train(points)
            return

        stopping = threading.Event()
        worker = dataclasses.replace(
            self, stop=lambda: stopping.is_set() or self.stop(), concurrent=threads
        )
        # Raised at the end, so that the other threads can save their points first.
        error: BaseException | None = None
        with ThreadPoolExecutor(threads) as pool:
            futures = {}
            for points in point_batches:
                futures[pool.submit(worker.train, points)] = points
            try:
                for future in as_completed(futures):
                    if future.cancelled():
                        continue
                    raised = future.exception()
                    if raised is None:
                        yield futures[future], future.result()
                        continue
                    # The first error is raised, but `Stopped` only without another one.
                    if error is None or isinstance(error, Stopped):
                        error = raised
                    _stop_all(stopping, futures)
            finally:
                # Also runs if the caller closes this generator before its end.
                _stop_all(stopping, futures)
        if error is not None:
            raise error


def _stop_all(stopping: threading.Event, futures: Iterable[Future[Any]]) -> None:
    """Tell running threads to save their points and stop, and cancel futures not yet started.

    It does not wait for the threads.
    """
    stopping.set()
    for future in futures:
        future.cancel()
