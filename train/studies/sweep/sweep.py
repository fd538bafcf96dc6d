"""Many runs that differ in numbers, trained with one compilation per shape, a row on disk as each finishes.

A sweep is a list of complete configs. configs → groups of one program (sweep_groups.py) → packs (sweep_pack.py) → rows
(sweep_rows.py); `train/studies/sweep/command.py` is its command line, `train/studies/transfer/study.py` asks for points as it learns from them.
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
from mupax.train.studies.sweep import threads
from mupax.train.studies.sweep.choose import Chooser, Mode
from mupax.train.studies.sweep.groups import Batches, Groups, Member
from mupax.train.studies.sweep.rows import Row, Rows, key_of
from mupax.train.studies.sweep.work import Quiet, Stopped, Watcher, Work
from mupax.zoo.configs import ConfigError

__all__ = ["Mode", "Quiet", "Row", "Stopped", "Sweep", "Watcher", "run"]


class Sweep:
    """Trains points as they are asked for; what it has compiled it keeps.

    Args:
        folder: where rows and unfinished points are kept, made if missing.
        how: all points of a program at once, one after another, or whichever a short trial shows to be faster.
        evaluated: whether each point is evaluated after its last step.
        stop: asked between steps whether to leave.
        devices: all there are unless given.

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
        folder = folder.absolute()
        self._folder, self._evaluated, self._stop = folder, evaluated, stop
        self._groups, self._feeds = Groups(devices), Batches()
        self._chooser = Chooser(how, self._feeds)
        folder.mkdir(parents=True, exist_ok=True)

    def run(self, configs: Sequence[Config], watcher: Watcher | None = None) -> list[Row]:
        """Train every point that the folder has no row of.

        Args:
            configs: the points; those that differ only in numbers (`sweep_groups.shape_of`) share a program.
            watcher: told how it goes.

        Returns:
            A row per config, in their order.

        Raises:
            ConfigError, PresetError, MeshError, DataError: bad input, before the first step.
            WorkdirError: another sweep is at work in the folder.
            Stopped: `stop` said so.
        """
        watcher = threads.OneAtATime(watcher or Quiet())
        self._feeds.note = watcher.note
        with locked(self._folder, Processes()):
            rows = Rows(self._folder)
            groups = self._groups.of(configs)
            digests = {i: self._feeds.of(p).facts["digest"] for group in groups.values() for i, p in group}
            keys = {i: key_of(config, digests[i]) for i, config in enumerate(configs)}
            done = {i: rows[key] for i, key in keys.items() if rows.has(key, evaluated=self._evaluated)}
            watcher.begin(configs, done)
            for key, group in groups.items():
                if todo := [(i, p) for i, p in _unique(group, keys) if i not in done]:
                    self._train(key, todo, keys, rows, watcher)
            return [rows[keys[i]] for i in range(len(configs))]

    def _train(self, key: object, todo: list[Member], keys: dict[int, str], rows: Rows, watcher: Watcher) -> None:
        trainer = self._chooser.trainer(key, [p for _, p in todo], watcher.note)
        work = Work(trainer, self._feeds, self._folder, keys, self._evaluated, watcher, self._stop)
        packs = [todo[start : start + trainer.count] for start in range(0, len(todo), trainer.count)]
        for pack, found in threads.trained(work, packs, trainer.beside):
            for i, row in found:
                rows.add(row)
                watcher.finished(i, row)
            shutil.rmtree(work.unfinished(pack), ignore_errors=True)


def run(configs: Sequence[Config], folder: Path, *, watcher: Watcher | None = None, **how: Any) -> list[Row]:
    """One sweep of these points; arguments as `Sweep` and its `run`."""
    return Sweep(folder, **how).run(configs, watcher)


def _unique(group: Sequence[Member], keys: dict[int, str]) -> list[Member]:
    """The points of a group, of equal ones the first."""
    return list({keys[i]: (i, program) for i, program in reversed(group)}.values())[::-1]
