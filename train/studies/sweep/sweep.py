"""Many runs that differ in numbers, trained with one compilation per shape, a row on disk as each finishes.

Complete configs -> groups of one program (groups.py) -> packs (trainer.py, work.py) -> rows (rows.py). command.py is the
command line; transfer studies ask for points as they learn from them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from mupax.train.checkpoints.workdir import locked
from mupax.train.config.run import Config
from mupax.train.parallel.processes import Processes
from mupax.train.studies.sweep import work
from mupax.train.studies.sweep.choose import Chooser, Mode
from mupax.train.studies.sweep.groups import Batches, Groups, Member
from mupax.train.studies.sweep.rows import Row, Rows, key_of
from mupax.train.studies.sweep.work import OneAtATime, Stopped, Watcher, Work
from mupax.zoo.configs import ConfigError

__all__ = ["Mode", "Row", "Stopped", "Sweep", "Watcher", "run"]


class Sweep:
    """Trains points as they are asked for, and keeps what it has compiled.

    Args:
        folder: where rows and unfinished points go, created if missing.
        how: all points of a program at once, one after another, or whichever a short trial shows to be faster.
        evaluated: whether each point is evaluated after its last step.
        stop: called between steps; True ends the sweep.
        devices: all there are by default.

    Raises:
        ConfigError: several processes; a sweep has one.
    """

    def __init__(
        self,
        folder: Path,
        *,
        how: Mode = "auto",
        evaluated: bool = True,
        stop: Callable[[], bool] = lambda: False,
        devices: Sequence[Any] | None = None,
    ) -> None:
        if jax.process_count() > 1:
            raise ConfigError(
                "a sweep runs in one process over its devices; start one sweep per host, each in its own folder"
            )
        self._folder, self._evaluated, self._stop = folder.absolute(), evaluated, stop
        self._groups, self._batches = Groups(devices), Batches()
        self._chooser = Chooser(how, self._batches)
        self._folder.mkdir(parents=True, exist_ok=True)

    def run(self, configs: Sequence[Config], watcher: Watcher | None = None) -> list[Row]:
        """Train every point that the folder has no row of.

        Args:
            configs: the points; those that differ only in numbers (`groups.shape_of`) share a program.
            watcher: shows progress.

        Returns:
            A row per config, in their order.

        Raises:
            ConfigError, PresetError, MeshError, DataError: bad input, before the first step.
            WorkdirError: another sweep is at work in the folder.
            Stopped: `stop` returned True.
        """
        watcher = OneAtATime(watcher or Watcher())
        self._batches.note = watcher.note
        with locked(self._folder, Processes()):
            rows, groups = Rows(self._folder), self._groups.of(configs)
            digests = {i: self._batches.of(p).facts["digest"] for group in groups.values() for i, p in group}
            keys = {i: key_of(config, digests[i]) for i, config in enumerate(configs)}
            done = {i: rows[key] for i, key in keys.items() if rows.has(key, evaluated=self._evaluated)}
            watcher.begin(configs, done)
            for key, group in groups.items():
                unique = list({keys[i]: (i, p) for i, p in reversed(group)}.values())[::-1]  # of equal points the first
                if todo := [(i, p) for i, p in unique if i not in done]:
                    self._train(key, todo, keys, rows, watcher)
            return [rows[keys[i]] for i in range(len(configs))]

    def _train(self, key: object, todo: list[Member], keys: dict[int, str], rows: Rows, watcher: Watcher) -> None:
        trainer = self._chooser.trainer(key, [p for _, p in todo], watcher.note)
        one = Work(trainer, self._batches, self._folder, keys, self._evaluated, watcher, self._stop)
        packs = [todo[start : start + trainer.count] for start in range(0, len(todo), trainer.count)]
        for pack, finished in work.trained(one, packs, trainer.concurrent):
            for i, row in finished:
                rows.add(row)
                watcher.finished(i, row)
            shutil.rmtree(one.unfinished(pack), ignore_errors=True)


def run(configs: Sequence[Config], folder: Path, *, watcher: Watcher | None = None, **how: Any) -> list[Row]:
    """The rows of one sweep over these points; arguments as `Sweep` and its `run`."""
    return Sweep(folder, **how).run(configs, watcher)
