"""Many runs that differ in numbers, trained with one compilation per shape, a row on disk as each finishes.

Complete configs -> groups of one program -> packs (trainer.py, work.py) -> rows (rows.py). command.py is the
command line; transfer studies ask for points as they learn from them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from mupax.train.checkpoints.workdir import locked
from mupax.train.config.run import Config, FaultsConfig, PresetConfig
from mupax.train.core.costs import fit
from mupax.train.core.program import Program, assemble
from mupax.train.parallel.processes import Processes
from mupax.train.studies.sweep.choose import Chooser, Mode
from mupax.train.studies.sweep.keys import key_of, without_reports
from mupax.train.studies.sweep.rows import Row, Rows
from mupax.train.studies.sweep.surroundings import note_changes
from mupax.train.studies.sweep.trainer import Batches
from mupax.train.studies.sweep.work import Member, Stopped, Watcher, Work, one_at_a_time
from mupax.zoo.configs import ConfigError

__all__ = ["Mode", "Row", "Stopped", "Sweep", "Watcher", "grouped", "run"]


def grouped(
    configs: Sequence[Config], programs: dict[str, Program], devices: Sequence[Any] | None = None
) -> dict[object, list[Member]]:
    """The points in groups of one program each, by a key of it, in the order in which the first of each comes.

    Nothing is compiled or allocated, and a definition is built once per shape.

    Args:
        configs: the points.
        programs: by shape, those of earlier points; new ones are added.
        devices: all there are by default.

    Raises:
        ConfigError, PresetError, MeshError: what does not fit.
    """
    groups: dict[object, list[Member]] = {}
    for index, config in enumerate(configs):
        if config.stop.patience is not None or config.data.evaluate:
            flag = "stop.patience" if config.data.evaluate == () else "data.evaluate"
            raise ConfigError(
                f"{flag} is of a run by itself: points train all their steps, or their losses would not compare, and are evaluated "
                "on their own data; leave it out"
            )
        shape = repr(shape_of(config))
        if shape not in programs:
            programs[shape] = assemble(config, devices, swept=True)
            fit.check_state(programs[shape], fit.limit_of(programs[shape]), saves=False)
        program = programs[shape].renumbered(config)
        structure = repr(jax.tree.map(jax.typeof, program.inputs))  # a preset may have a factor that others do not
        groups.setdefault((shape, structure), []).append((index, program))
    return groups


def shape_of(config: Config) -> Config:
    """The config with every number that is data to the step at one value: equal shapes are one program."""
    same = dict.fromkeys(("peak_lr", "weight_decay", "eps"), 0.0)
    schedule = {"schedule": "constant", "warmup_steps": 0, "decay_steps": None, "final_lr_fraction": 0.0}
    return dataclasses.replace(
        without_reports(config),
        preset=PresetConfig(),
        optimizer=dataclasses.replace(config.scaled_optimizer, **same, **schedule),
        ema=dataclasses.replace(config.ema, decay=None if config.ema.decay is None else 0.5),
        data=dataclasses.replace(config.data, seed=config.data_seed),
        faults=FaultsConfig(),
        seed=0,
    )


class Sweep:
    """Trains points as they are asked for, and keeps what it has compiled.

    Args:
        folder: where rows and unfinished points go, created if missing.
        how: all points of a program at once, one after another, or whichever a short trial shows to be faster.
        evaluated: whether each point is evaluated after its last step.
        stop: called between steps; True ends the sweep.
        saving: makes a context manager, entered while points train. Their state is saved if `stop`
            returns True.
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
        saving: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
        devices: Sequence[Any] | None = None,
    ) -> None:
        if jax.process_count() > 1:
            raise ConfigError(
                "a sweep runs in one process over its devices; start one sweep per host, each in its own folder"
            )
        self._folder, self._evaluated, self._stop = folder.absolute(), evaluated, stop
        self._saving = saving
        self._devices, self._programs, self._batches = devices, {}, Batches()
        self._chooser = Chooser(how, self._batches, evaluated)
        self._folder.mkdir(parents=True, exist_ok=True)

    def has_rows(self, configs: Sequence[Config]) -> bool:
        """Return whether the folder has a row of every point, so that `run` would train nothing."""
        groups = grouped(configs, self._programs, self._devices)
        members = [member for group in groups.values() for member in group]
        rows = Rows(self._folder, lambda line: None)
        keys = [key_of(program.config, self._batches.of(program).facts["digest"]) for _, program in members]
        return all(rows.has(key, evaluated=self._evaluated) for key in keys)

    def run(self, configs: Sequence[Config], watcher: Watcher | None = None) -> list[Row]:
        """Train every point that the folder has no row of.

        Args:
            configs: the points; those that differ only in numbers (`shape_of`) share a program.
            watcher: shows progress.

        Returns:
            A row per config, in their order.

        Raises:
            ConfigError, PresetError, MeshError, DataError: bad input, before the first step.
            WorkdirError: another sweep is at work in the folder.
            RowsError: the folder's rows are not as they were written.
            Stopped: `stop` returned True.
        """
        watcher = one_at_a_time(watcher or Watcher())
        self._batches.note = watcher.note
        with locked(self._folder, Processes()):
            rows, groups = Rows(self._folder, watcher.note), grouped(configs, self._programs, self._devices)
            members = [member for group in groups.values() for member in group]
            keys = {i: key_of(p.config, self._batches.of(p).facts["digest"]) for i, p in members}
            done = {i: rows[key] for i, key in keys.items() if rows.has(key, evaluated=self._evaluated)}
            watcher.begin(configs, done)
            unrecorded = True
            for key, group in groups.items():
                unique = list({keys[i]: (i, p) for i, p in reversed(group)}.values())[::-1]  # of equal points the first
                if todo := [(i, p) for i, p in unique if i not in done]:
                    if unrecorded:
                        goes_on = bool(rows) or (self._folder / "unfinished").exists()
                        note_changes(self._folder, todo[0][1], watcher.note, goes_on=goes_on)
                        unrecorded = False
                    trainer = self._chooser.trainer(key, [p for _, p in todo], watcher.note)
                    work = Work(trainer, self._batches, self._folder, keys, watcher, self._stop)
                    packs = [todo[start : start + trainer.count] for start in range(0, len(todo), trainer.count)]
                    with self._saving():
                        for pack, finished in work.trained(packs):
                            for i, row in finished:
                                rows.add(row)
                                watcher.finished(i, row)
                            shutil.rmtree(work.unfinished(pack), ignore_errors=True)
                    if self._stop():
                        raise Stopped
            return [rows[keys[i]] for i in range(len(configs))]


def run(configs: Sequence[Config], folder: Path, *, watcher: Watcher | None = None, **how: Any) -> list[Row]:
    """The rows of one sweep over these points, in their order; raises as `Sweep` and its `run`.

    Args:
        configs: the points.
        folder: where rows and unfinished points go, made if missing.
        watcher: shows progress; None shows nothing.
        **how: other arguments of `Sweep`.
    """
    return Sweep(folder, **how).run(configs, watcher)
