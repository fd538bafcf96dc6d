"""Many runs that differ in numbers, trained with one compilation per shape, a row on disk as each finishes.

A sweep is a list of complete configs. configs → groups of one program (sweep_groups.py) → packs (sweep_pack.py) → rows
(sweep_rows.py); `train/sweep_command.py` is its command line, `train/transfer.py` asks for points as it learns from them.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax

from train import sweep_groups, sweep_pack
from train.config import Config
from train.processes import Processes
from train.program import Program
from train.sweep_batches import Batches
from train.sweep_groups import Member
from train.sweep_pack import Trainer
from train.sweep_rows import Row, Rows, key_of
from train.sweep_work import Quiet, Stopped, Watcher, Work
from train.workdir import locked
from zoo.configs import ConfigError

__all__ = ["Mode", "Quiet", "Row", "Stopped", "Watcher", "run"]

Mode = Literal["auto", "together", "in-turn"]
TRIAL_STEPS = 3
TRIAL_PAYS = 20
"""A trial costs a compilation; in turn must need so many of those to make it worth one, on a CPU, where it seldom wins."""


def run(
    configs: Sequence[Config],
    folder: Path,
    *,
    how: Mode = "auto",
    evaluated: bool = True,
    watcher: Watcher | None = None,
    stop: Callable[[], bool] = lambda: False,
    devices: Sequence[Any] | None = None,
) -> list[Row]:
    """Train every point that the folder has no row of.

    Args:
        configs: the points; those that differ only in numbers (`sweep_groups.shape_of`) share a program.
        folder: where rows and unfinished points are kept, made if missing.
        how: all of a program at once, one after another, or whichever a short trial shows to be faster.
        evaluated: whether each point is evaluated after its last step.
        watcher: told how it goes.
        stop: asked between steps whether to leave.
        devices: all there are unless given.

    Returns:
        A row per config, in their order.

    Raises:
        ConfigError, PresetError, MeshError, DataError: bad input, before the first step.
        WorkdirError: another sweep is at work in the folder.
        Stopped: `stop` said so.
    """
    if jax.process_count() > 1:
        raise ConfigError(
            "a sweep runs in one process over its devices; start one sweep per host, each in its own folder"
        )
    watcher = watcher or Quiet()
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, Processes()):
        feeds = Batches(watcher.note)
        rows = Rows(folder)
        groups = sweep_groups.programs(configs, devices)
        keys = {i: key_of(p.config, feeds.of(p).facts["digest"]) for group in groups for i, p in group}
        watcher.begin(configs, {i: rows[key] for i, key in keys.items() if rows.has(key, evaluated=evaluated)})
        slower = False  # whether a smaller shape was seen to be slower together: a larger one is too
        for group in groups:
            todo = [(i, p) for i, p in _unique(group, keys) if not rows.has(keys[i], evaluated=evaluated)]
            if not todo:
                continue
            trainer, slower = _chosen([p for _, p in todo], feeds, how, slower, watcher)
            work = Work(trainer, feeds, folder, keys, evaluated, watcher, stop)
            for start in range(0, len(todo), trainer.count):
                for i, row in work.train(todo[start : start + trainer.count]):
                    rows.add(row)
                    watcher.finished(i, row)
                shutil.rmtree(work.unfinished(todo[start : start + trainer.count]), ignore_errors=True)
        return [rows[keys[i]] for i in range(len(configs))]


def _unique(group: Sequence[Member], keys: dict[int, str]) -> list[Member]:
    """The points of a group, of equal ones the first."""
    return list({keys[i]: (i, program) for i, program in reversed(group)}.values())[::-1]


def _chosen(
    points: Sequence[Program], feeds: Batches, how: Mode, slower: bool, watcher: Watcher
) -> tuple[Trainer, bool]:
    """The trainer of a group, and whether training together was seen to be slower."""
    program, count = points[0], len(points)
    ways = program.mesh.shape["sweep"]
    on_cpu = program.mesh.devices.flat[0].platform == "cpu"
    if how == "in-turn" and ways > 1:
        raise ConfigError(f"in turn uses no mesh axis sweep, which is {ways}; write --mesh.sweep 1, or --how together")
    if how == "together" or ways > 1 or (how == "auto" and not on_cpu and count > 1):
        fits = sweep_pack.fitting(program, count)
        if fits > 1:
            if fits < count:
                watcher.note(f"{fits} points at a time fit into memory")
            return sweep_pack.together(program, fits), slower
        watcher.note("in turn: two points do not fit into memory at once")
    began = time.monotonic()
    one = sweep_pack.alone(program)
    compiling = time.monotonic() - began
    if how != "auto" or slower or count == 1:
        return one, slower
    each = _seconds(one, points[:1], feeds)
    if each * program.config.steps * count < TRIAL_PAYS * compiling:
        watcher.note(f"in turn: {each * 1000:.0f} ms a step; too little work to try all at once")
        return one, slower
    fits = sweep_pack.fitting(program, count, one)
    many = sweep_pack.together(program, fits)
    of_many = _seconds(many, [*points, *[points[-1]] * fits][:fits], feeds) / fits
    text = f"{each * 1000:.0f} ms a step in turn, {of_many * 1000:.0f} ms together"
    watcher.note(f"{'together' if of_many < each else 'in turn'}: {text}")
    return (many, False) if of_many < each else (one, True)


def _seconds(trainer: Trainer, points: Sequence[Program], feeds: Batches) -> float:
    """Of the fastest of a few steps, which go nowhere."""
    state, numbers = trainer.begin(points)
    times = []
    feed = trainer.program.train_feed()
    with contextlib.closing(feeds.train(trainer.program, 0, feed)) as batches:
        for _, batch in zip(range(TRIAL_STEPS + 1), batches, strict=False):
            began = time.monotonic()
            state, metrics = trainer.step(state, numbers, batch)
            jax.block_until_ready(metrics)
            times.append(time.monotonic() - began)
    return min(times[1:] or times)
