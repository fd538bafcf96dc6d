"""A pack of a sweep's points from its first step to its rows, saved on the way where it takes long."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from mupax.train.checkpoints.checkpointer import Checkpoints
from mupax.train.config import flags
from mupax.train.config.run import Config
from mupax.train.core.program import Program
from mupax.train.core.state import TrainState
from mupax.train.data import Data
from mupax.train.studies.sweep.groups import Batches, Member
from mupax.train.studies.sweep.rows import How, Row, summarized
from mupax.train.studies.sweep.trainer import Trainer

SAVE_EVERY_S = 300.0
"""Points in training are saved so often, in seconds: what a crash can cost."""
FETCH_EVERY = 16
"""Steps between looks at the losses: a point that diverged in turn is given up that late."""


class Watcher(Protocol):
    """Told how a sweep goes; `mupax.train.studies.sweep.table.Table` shows it."""

    def begin(self, configs: Sequence[Config], done: dict[int, Row]) -> None: ...

    def note(self, text: str) -> None: ...

    def training(self, points: Sequence[int], step: int, losses: np.ndarray) -> None: ...

    def finished(self, point: int, row: Row) -> None: ...


class Quiet:
    """A watcher that shows nothing."""

    def begin(self, configs: Sequence[Config], done: dict[int, Row]) -> None: ...

    def note(self, text: str) -> None: ...

    def training(self, points: Sequence[int], step: int, losses: np.ndarray) -> None: ...

    def finished(self, point: int, row: Row) -> None: ...


class Stopped(Exception):
    """A signal came: the points in training are saved, and the same sweep goes on from there."""


@dataclasses.dataclass(frozen=True)
class Work:
    """Trains the packs of one group.

    Attributes:
        beside: packs that train at the same time.
    """

    trainer: Trainer
    feeds: Batches
    folder: Path
    keys: dict[int, str]
    evaluated: bool
    watcher: Watcher
    stop: Callable[[], bool]
    beside: int = 1

    def unfinished(self, members: Sequence[Member]) -> Path:
        """Where a pack is kept while it trains."""
        return self.folder / "unfinished" / "-".join((self.keys[members[0][0]], str(self.trainer.count)))

    def train(self, members: Sequence[Member]) -> list[tuple[int, Row]]:
        """The rows of a pack, whose places past the last point repeat it."""
        trainer, places = self.trainer, [i for i, _ in members]
        points = [program for _, program in members]
        points += [points[-1]] * (trainer.count - len(points))
        folder, steps = self.unfinished(members), points[0].config.steps
        data = self.feeds.of(points[0])
        facts = {**data.facts, "points": [self.keys[i] for i in places]}
        with Checkpoints(folder, 1, note=self.watcher.note) as saves:
            state, numbers = trainer.begin(points)
            losses, done = np.full((steps, trainer.count), np.nan), 0
            if saves.latest is not None:
                state = trainer.placed(saves.restore(trainer.abstract, facts))
                done = int(np.ravel(jax.device_get(state.step))[0])
                losses[:done] = np.load(folder / f"losses-{done}.npy")
                self.watcher.note(f"going on at step {done} with {len(members)} point{'s' * (len(members) > 1)}")
            began = time.monotonic()
            state = self._steps(state, numbers, done, losses, places, saves, folder, facts)
            seconds = (time.monotonic() - began) / len(members) / self.beside
            bad = np.logical_not(np.isfinite(losses).all(axis=0))
            scores = self._scores(state, numbers, points[0], data) if self.evaluated and not bad.all() else None
        how: How = "in turn" if trainer.count == 1 else "together"
        found = []
        for place, (i, program) in enumerate(members):
            first = int(np.argmin(np.isfinite(losses[:, place]))) + 1 if bad[place] else None
            loss, curve = summarized(np.where(np.arange(steps) + 1 < (first or steps + 1), losses[:, place], np.inf))
            score = None if scores is None or bad[place] else float(scores[place])
            words = flags.words(program.config)
            command = " ".join(["python -m train", program.config.recipe, *words]) if words is not None else ""
            row = Row(self.keys[i], command, loss, score, first, curve, steps, round(seconds, 3), how)
            found.append((i, row))
        return found

    def _steps(
        self,
        state: TrainState,
        numbers: Any,
        done: int,
        losses: np.ndarray,
        places: Sequence[int],
        saves: Checkpoints,
        folder: Path,
        facts: dict[str, Any],
    ) -> TrainState:
        """The state after the last step; fills losses [steps, count], not a number from where a point diverged."""
        pending: list[dict[str, jax.Array]] = []
        steps, saved, feed = len(losses), time.monotonic(), self.trainer.program.train_feed()

        def fetch(step: int) -> bool:
            """Take in what is pending; whether any point still trains."""
            for k, metrics in enumerate(jax.device_get(pending), step - len(pending)):
                finite = np.isfinite(metrics["loss"]) & np.isfinite(metrics["grad_norm"])
                losses[k] = np.where(finite & ((k == 0) | np.isfinite(losses[k - 1])), metrics["loss"], np.nan)
            pending.clear()
            self.watcher.training(places, step, losses[step - 1, : len(places)])
            return bool(np.isfinite(losses[step - 1]).any())

        def save(step: int) -> None:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / f"losses-{step}.npy").open("wb") as file:
                np.save(file, losses[:step])
                file.flush()
                os.fsync(file.fileno())
            saves.save(step, state, facts, last=True)
            kept = {f"losses-{k}.npy" for k in (step, *saves.steps)}  # the one before counts until this one is whole
            for old in folder.glob("losses-*.npy"):
                if old.name not in kept:
                    old.unlink()

        for step, batch in enumerate(self.feeds.train(self.trainer.program, done, feed), done + 1):
            if step > steps:
                break
            state, metrics = self.trainer.step(state, numbers, batch)
            pending.append({name: metrics[name] for name in ("loss", "grad_norm")})
            leave = self.stop()
            if step % FETCH_EVERY and step != steps and not leave:
                continue
            if not fetch(step):
                break
            if step < steps and (leave or time.monotonic() - saved > SAVE_EVERY_S):
                save(step)
                saved = time.monotonic()
                if leave:
                    raise Stopped
        return state

    def _scores(self, state: TrainState, numbers: Any, program: Program, data: Data) -> np.ndarray:
        """Evaluation loss of every point, float [count]."""
        total: Any = None
        feed = program.eval_feed()
        with contextlib.closing(data.eval_batches(*feed.rows)) as batches:
            for batch in batches:
                sums = jax.device_get(self.trainer.score(state.evaluated, numbers, feed.put(batch)))
                total = sums if total is None else jax.tree.map(np.add, total, sums)
        return np.atleast_1d(np.asarray(total.loss, np.float64) / np.asarray(total.weight, np.float64))
