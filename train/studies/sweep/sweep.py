"""Many runs that differ in numbers, trained with one compilation per shape.

Complete configs become groups of one program each, groups become batches of points (trainer.py,
work.py), and each finished point becomes a row on disk (rows.py). command.py is the command line.
Transfer studies and tunings ask for points as they learn from them.

The name of a point (`key_of`) is a digest of the config fields that decide what it trains. A name
must never change, or every committed study would train again. Fields of `_FIRST` are part of every
name. A newer field is part of a name only if it affects what is trained (`mupax.config_fields`) and
does not have its default, so a new field needs no entry here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax

from mupax import disk, terminal
from mupax.config_fields import config_fields, with_defaults
from mupax.train.checkpoints.workdir import locked, surroundings
from mupax.train.config.data import PixelsConfig, TransformsConfig, source
from mupax.train.config.preset import preset_of_step
from mupax.train.config.record import OLDER_PIXELS, to_json
from mupax.train.config.run import Config, FaultsConfig, check_extras
from mupax.train.core.costs import fit
from mupax.train.core.program import Program, assemble
from mupax.train.parallel import environment
from mupax.train.parallel.processes import Processes, StopRequest, lasting
from mupax.train.studies.sweep import trainer as trainers
from mupax.train.studies.sweep.rows import Row, Rows
from mupax.train.studies.sweep.trainer import Batches, Trainer
from mupax.train.studies.sweep.work import LockedCallback, Point, Stopped, SweepCallback, Work
from mupax.zoo.configs import ConfigError
from mupax.zoo.transformer import LoraConfig, RoutingConfig

Mode = Literal["auto", "together", "in-turn"]
"""Execution of points that share a compiled program.

`together` trains all at once, and `in-turn` one after another. `auto` is together on GPU and TPU,
and what a short trial shows to be faster on CPU.
"""
TRIAL_STEPS = 3
"""Number of steps that a trial times, after one that it does not count."""
MAX_TIME_RATIO = 0.95
"""Ratio of the times per point up to which twice as many threads count as faster."""
MIN_TRIAL_STEPS = 40
"""Steps of all points of a program together below which a trial is not worth its time."""
MIN_COMPILATIONS = 20
"""Duration of training in turn, in compilations, below which training together is not tried.

A trial costs one compilation, and on a CPU it seldom shows that together is faster.
"""

FILE_NAME = "environment.json"
"""Name of the file with the environment in which the last points were trained."""

_FIRST = {
    "": "recipe steps seed freeze train_only accumulation_steps workdir resume resume_change "
    "xla_flags",
    "model": "centered width depth num_heads head_dim num_kv_heads mlp_ratio activation norm "
    "norm_eps norm_gain bias qk_norm vocab_size seq_len positions rope_theta tied image_size "
    "patch_size channels num_classes pool encoder_depth target_len distance_buckets "
    "longest_distance shared embedding_norm",
    "model.compute": "layers remat attention projections cross_entropy param_dtype dtype",
    "model.routing": "gate capacity_factor balance balance_weight z_weight",
    "model.lora": "rank alpha on",
    "data": "name batch_size seed eval_batch_size eval_examples data_dir tokenizer augment split",
    "data.transforms": "crop randaug_layers randaug_magnitude mixup cutmix label_smoothing repeats",
    "data.pixels": "fit resize interpolation mean std background",
    "preset": "name base form alpha_a alpha_l gamma0 beta0 constants zero_readout",
    "optimizer": "name peak_lr weight_decay decay b1 b2 eps momentum clip_norm schedule "
    "warmup_steps decay_steps final_lr_fraction",
    "ema": "decay",
    "init": "init_from init_optimizer init_ema init_new init_resize init_drop init_change",
    "mesh": "data fsdp sequence tensor sweep rules slices",
    "distributed": "coordinator processes process timeout_seconds heartbeat_seconds",
    "checkpoint": "every_steps keep",
    "faults": "bad_numbers most_in_a_row spike_deviations skip_spikes watchdog_seconds",
    "log": "eval_every_steps tensorboard wandb progress samples profile",
}
"""Config fields, by section, that are part of the name (`key_of`) of every point.

They are the fields that existed when points got names. No new field belongs here. Sections of
`_unnamed_sections` are left out of a name.
"""

__all__ = ["Mode", "Row", "Stopped", "Sweep", "SweepCallback", "engine", "grouped", "run"]


def _first_paths() -> frozenset[str]:
    """Return the dotted paths of the fields in `_FIRST`."""
    paths = set()
    for section, names in _FIRST.items():
        for name in names.split():
            paths.add(f"{section}.{name}".lstrip("."))
    return frozenset(paths)


_FIRST_PATHS = _first_paths()


class _Timing(NamedTuple):
    """Result of a trial that trains points in turn.

    Attributes:
        trainer: Trainer of one point, with the fastest number of threads.
        seconds: Time of a step per point, with that many threads.
        text: Times of all numbers of threads, for a person.
    """

    trainer: Trainer
    seconds: float
    text: str


class ExecutionTrial:
    """Chooser between training points together and in turn, by timing a few steps of each.

    A trial finds out whether points train faster together or in turn. In turn, on one CPU device,
    it also finds out how many threads should train at the same time. Every program is compiled
    once.

    Args:
        mode: `auto` to time both; `together` or `in-turn` to use that one without a trial.
        batches: Data of the points. A trial trains on their first batches.
        evaluated: True if the trainers also evaluate points.
    """

    def __init__(self, mode: Mode, batches: Batches, evaluated: bool) -> None:
        self._mode = mode
        self._batches = batches
        self._evaluated = evaluated
        self._trainers: dict[tuple[object, int], Trainer] = {}
        """Compiled trainers by program and number of points at once."""
        self._fastest: dict[object, Trainer] = {}
        """Results of trials by program."""
        self._together_is_slower = False
        """True if a trial found that. A larger program is slower together, too."""

    def trainer(
        self, key: object, points: Sequence[Program], log: Callable[[str], None]
    ) -> Trainer:
        """Return a compiled trainer for points of one program, after a timing trial if needed.

        A trial is made only in mode `auto` on CPU, for several points with enough steps, and once
        per program. On other devices `auto` trains as many points together as fit into memory.

        Args:
            key: Key of the program (`grouped`).
            points: Programs of all points that are left to train.
            log: Called with a line about what was chosen.

        Raises:
            ConfigError: The mesh axis `sweep` is split, and the mode is `in-turn`.
        """
        program = points[0]
        count = len(points)
        num_shards = program.mesh.shape["sweep"]
        on_cpu = program.mesh.devices.flat[0].platform == "cpu"
        if self._mode == "in-turn" and num_shards > 1:
            raise ConfigError(
                f"in turn uses no mesh axis sweep, which is {num_shards}; write --mesh.sweep 1, or "
                "--how together"
            )

        # Trials are only for CPUs. Elsewhere `auto` trains several points together.
        is_together = self._mode == "together" or num_shards > 1
        if self._mode == "auto" and not on_cpu and count > 1:
            is_together = True
        if is_together:
            together = self._together(key, points, log)
            if together is not None:
                return together

        single = self._compiled(key, program, 1)
        # A later round of the same program needs no second trial.
        if key in self._fastest:
            fastest = self._fastest[key]
            return fastest if fastest.count <= count else single
        has_choice = self._mode == "auto" and on_cpu and count > 1
        if not has_choice or count * program.config.steps < MIN_TRIAL_STEPS:
            return single
        return self._try(key, single, points, log)

    def _together(
        self, key: object, points: Sequence[Program], log: Callable[[str], None]
    ) -> Trainer | None:
        """Return a compiled trainer of as many points at once as fit into memory.

        A larger trainer of the program that is compiled already, of at most twice as many points,
        is returned instead. Return `None` if the number is 1: only one point fits, or there is only
        one point, and the mesh axis `sweep` is not split.
        """
        count = len(points)
        batch_size = trainers.points_per_batch(points[0], count)
        if batch_size == 1:
            if count > 1:
                log("in turn: two points do not fit into memory at once")
            return None

        if batch_size < count:
            log(f"{batch_size} points at a time fit into memory")
        # A later round of fewer points uses a larger trainer that is compiled already, if at most
        # half of its places repeat a point.
        compiled_sizes = []
        for program_key, size in self._trainers:
            if program_key == key and batch_size < size <= 2 * batch_size:
                compiled_sizes.append(size)
        return self._compiled(key, points[0], min(compiled_sizes, default=batch_size))

    def _try(
        self, key: object, single: Trainer, points: Sequence[Program], log: Callable[[str], None]
    ) -> Trainer:
        """Time steps of points in turn and all at once. Return and keep the faster trainer.

        Training all at once is timed only if several points fit into memory, training in turn would
        last for `MIN_COMPILATIONS` compilations, and no earlier trial found it slower. The choice
        is logged.

        Args:
            key: Key of the program (`grouped`).
            single: Compiled trainer of one point at a time.
        """
        count = len(points)
        in_turn = self._time_in_turn(single, points)
        self._trainers[key, 1] = in_turn.trainer
        self._fastest[key] = in_turn.trainer
        batch_size = trainers.points_per_batch(points[0], count, in_turn.trainer)
        total_seconds = in_turn.seconds * points[0].config.steps * count
        is_short = total_seconds < MIN_COMPILATIONS * in_turn.trainer.compile_seconds
        if self._together_is_slower or is_short or batch_size == 1:
            log(f"in turn: {in_turn.text}")
            return in_turn.trainer

        together = self._compiled(key, points[0], batch_size)
        batch = list(points[:batch_size])
        # The compiled program takes exactly `batch_size` points, so a trial repeats the last one.
        batch += [batch[-1]] * (batch_size - len(batch))
        seconds = self._step_seconds(together, batch) / batch_size
        self._together_is_slower = seconds >= in_turn.seconds
        if self._together_is_slower:
            # Dropped, because a compiled program holds memory.
            del self._trainers[key, batch_size]
        else:
            self._fastest[key] = together
        choice = "in turn" if self._together_is_slower else "together"
        log(f"{choice}: {in_turn.text}, {seconds * 1000:.0f} ms together")
        return self._fastest[key]

    def _compiled(self, key: object, program: Program, count: int) -> Trainer:
        """Return the trainer of `count` points at once, which is compiled at the first call.

        Later calls with the same key and count return the same trainer.
        """
        if (key, count) not in self._trainers:
            began = time.monotonic()
            trainer = trainers.compile_trainer(program, count, self._evaluated)
            seconds = time.monotonic() - began
            self._trainers[key, count] = dataclasses.replace(trainer, compile_seconds=seconds)
        return self._trainers[key, count]

    def _time_in_turn(self, single: Trainer, points: Sequence[Program]) -> _Timing:
        """Time a step of one point at a time with 1, 2, 4, ... threads until more are not faster.

        The number of threads is limited by cores, points and memory. A mesh of several devices is
        timed with one thread only.
        """
        program = single.program
        times = {1: self._step_seconds(single, points[:1])}
        threads = 1
        # Programs of several devices would wait for each other.
        if program.mesh.size == 1:
            fitting = trainers.points_per_batch(program, len(points), single)
            max_threads = min(_num_cores(), len(points), fitting)
            while 2 * threads <= max_threads:
                times[2 * threads] = self._step_seconds(single, points[:1], 2 * threads)
                if times[2 * threads] > MAX_TIME_RATIO * times[threads]:
                    break
                threads *= 2

        texts = []
        for number, seconds in times.items():
            name = f"by {number} side by side" if number > 1 else "one by one"
            texts.append(f"{1000 * seconds:.0f} ms {name}")
        return _Timing(
            trainer=dataclasses.replace(single, concurrent=threads),
            seconds=times[threads],
            text=f"a step takes {', '.join(texts)}",
        )

    def _step_seconds(self, trainer: Trainer, points: Sequence[Program], threads: int = 1) -> float:
        """Return the seconds of a step per thread, if so many threads train at the same time.

        All threads train the same points with the trainer. The result is the time of a step in the
        slowest thread, divided by `threads`.
        """
        # All threads begin together, or the first would be timed while others still compile or
        # load.
        barrier = threading.Barrier(threads)
        with ThreadPoolExecutor(threads) as pool:
            futures = []
            for _ in range(threads):
                futures.append(pool.submit(self._median_seconds, trainer, points, barrier))
            # The slowest thread, because a round ends when all points are done.
            return max(future.result() for future in futures) / threads

    def _median_seconds(
        self, trainer: Trainer, points: Sequence[Program], barrier: threading.Barrier
    ) -> float:
        """Train a few steps, drop their result, and return the median time of a step.

        The first step is not counted, unless the run has no other. The result is 0 if another
        thread failed, which raises its error itself.

        Args:
            points: Points that the trainer trains at once.
            barrier: Barrier at which all threads wait before the first step that is counted.
        """
        try:
            state, step_inputs = trainer.begin(points)
            times = []
            # Closed, because the loop ends before the generator, whose stream may hold open files.
            with contextlib.closing(self._batches.train(trainer.program, 0)) as batches:
                for step, batch in zip(range(TRIAL_STEPS + 1), batches, strict=False):
                    if step == 1:
                        barrier.wait()
                    began = time.monotonic()
                    state, metrics = trainer.step(state, step_inputs, batch)
                    # Dispatch is asynchronous; without this only the enqueueing would be timed.
                    jax.block_until_ready(metrics)
                    times.append(time.monotonic() - began)
        except threading.BrokenBarrierError:
            return 0.0  # another thread raises the error that broke the barrier
        except BaseException:
            # Otherwise the other threads would wait at the barrier for ever.
            barrier.abort()
            raise
        # The first step may include loading, so its time counts only if the run has no other step.
        return statistics.median(times[1:] or times)


def _num_cores() -> int:
    """Return the number of cores that this process may use."""
    # A container may allow fewer cores than the machine has. macOS lacks the call.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def note_changes(
    folder: Path, program: Program, log: Callable[[str], None], *, goes_on: bool
) -> None:
    """Log changes of the environment since a folder's last points, and write it to `FILE_NAME`.

    The environment is the machine, packages, mesh and compiler options. Rows of two environments
    may differ by rounding errors, and are still used together. The file is not written if nothing
    changed.

    Args:
        program: Program of the next point, whose mesh and compiler options are recorded.
        log: Called with a line for every change.
        goes_on: True if points of the folder are finished or in training. If it is False, the file
            is written without a comparison.
    """
    path = folder / FILE_NAME
    current = surroundings(program.compiler_options(), environment.facts(program.mesh))
    if goes_on and disk.status(path) is not None:
        try:
            changes = environment.changes(disk.read_json(path), current)
        except disk.JsonError as error:
            changes = None
            log(f"{error}; it is written again")
        # `None` means an old record without an environment, or a damaged file. Both are written
        # again.
        if changes == []:
            return
        for change in changes or ():
            log(f"changed since the last points: {change}")
    disk.write_whole(path, json.dumps(current, indent=2) + "\n")


def key_of(config: Config, data_digest: str) -> str:
    """Return the name of a point: a digest of its config and its data, 16 hex characters.

    Fields without an effect on what is trained, such as workdir, logging and mesh, do not count.

    Args:
        data_digest: Digest of the data that the point sees.
    """
    # Resolved first, so that a default and the same value written out have one name.
    bare = with_defaults(without_reports(config.resolved()), ("layout", "processes"))
    fields = to_json(bare)
    for path in _unnamed_fields(bare):
        _delete(fields, path)
    for section in _unnamed_sections(bare):
        _delete(fields, section)
    # Sorted, because a moved field in the config must not rename a point.
    content = json.dumps([fields, data_digest], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def without_reports(config: Config) -> Config:
    """Return the config with defaults for workdir and resume, checkpoints, logs and evaluations.

    Early stopping gets its default, too. Configs that differ in these fields alone become equal.
    """
    return with_defaults(config, ("session", "reports", "course"))


def _unnamed_fields(config: Config) -> Iterator[str]:
    """Yield the dotted paths of config fields that are not part of a point's name.

    These are fields newer than `_FIRST` that have their default or do not change what is trained.
    """
    for field in config_fields(config):
        # A plugin's model need not declare what its fields affect. Undeclared fields are part of
        # the name.
        if field.affects is None or field.path in _FIRST_PATHS:
            continue
        if field.value == field.default or not field.affects.consequence.names_point:
            yield field.path

    # The background became a field of its own after points of images had their names.
    has_images = config.data.name.startswith("images:")
    if not has_images or config.data.pixels.background == OLDER_PIXELS.background:
        yield "data.pixels.background"


def _unnamed_sections(config: Config) -> Iterator[str]:
    """Yield the dotted paths of sections that are not part of a point's name.

    They have the values that all runs had before the section existed.
    """
    yield from ("stop", "data.limits")
    model = config.model
    if getattr(model, "routing", None) == RoutingConfig():
        yield "model.routing"
    if getattr(model, "lora", None) == LoraConfig():
        yield "model.lora"
    if config.data.transforms == TransformsConfig():
        yield "data.transforms"
    reads_pixels = "pixels" in source(config.data.name).reads
    is_unread_default = config.data.pixels == PixelsConfig() and not reads_pixels
    if is_unread_default or config.data.pixels == OLDER_PIXELS:
        yield "data.pixels"


def _delete(fields: dict[str, Any], path: str) -> None:
    """Delete a field or section of a config as JSON in place, if it is there.

    Args:
        fields: Config as nested dicts, which is changed.
        path: Dotted path, such as "data.pixels".
    """
    *sections, name = path.split(".")
    for section in sections:
        fields = fields.get(section, {})
    fields.pop(name, None)


def grouped(
    configs: Sequence[Config], programs: dict[str, Program], devices: Sequence[Any] | None = None
) -> dict[object, list[Point]]:
    """Group points that can share a compiled program, in the order of each group's first point.

    Nothing is compiled or allocated, and a model definition is built once per shape.

    Args:
        configs: Config of every point. A point's index is its position here.
        programs: Programs of earlier points by their shape. New ones are added in place.
        devices: JAX devices of the mesh; all of them by default.

    Returns:
        Points of each program by a key of the program.

    Raises:
        ConfigError, PresetError, MeshError: A config has parts that do not fit together, or has
            `stop.patience`, `data.evaluate` or `init.init_from`, which are for single runs.
        MemoryLimitError: The state of a point does not fit into a device's memory.
    """
    groups: dict[object, list[Point]] = {}
    for index, config in enumerate(configs):
        if config.stop.patience is not None or config.data.evaluate:
            flag = "stop.patience" if config.data.evaluate == () else "data.evaluate"
            raise ConfigError(
                f"{flag} is for single runs: so that losses compare, the points of a sweep train "
                "all their steps and are evaluated on their own data; leave it out"
            )
        if config.init.init_from is not None:
            # Points would silently start from fresh parameters, and be named as if they had not.
            raise ConfigError(
                "init.init_from is for single runs: the points of a study start from fresh "
                "parameters; leave out --init-from"
            )
        shape = repr(shape_of(config))
        if shape not in programs:
            programs[shape] = assemble(config, devices, swept=True)
            # A state that does not fit is refused before anything is compiled.
            fit.check_state(programs[shape], fit.limit_of(programs[shape]), saves=False)
        program = programs[shape].with_config(config)
        # A preset may have a factor that others do not have.
        structure = repr(jax.tree.map(jax.typeof, program.inputs))
        # Another structure of inputs is another compilation, even at one shape.
        groups.setdefault((shape, structure), []).append((index, program))
    return groups


def shape_of(config: Config) -> Config:
    """Return the config with fixed values for the fields that need no new compilation.

    Such fields are seed, learning rate, schedule, weight decay, eps and the preset's numbers, which
    are inputs of the compiled step, and fields of logging and saving. Configs for which the result
    is equal share a program.
    """
    # Without a limit of attention logits the step has no input for it, so `None` stays.
    qk_clip = None if config.optimizer.qk_clip is None else 1.0
    optimizer = dataclasses.replace(
        config.scaled_optimizer,
        qk_clip=qk_clip,
        peak_lr=0.0,
        adam_lr=None,
        weight_decay=0.0,
        eps=0.0,
        schedule="constant",
        warmup_steps=0,
        decay_steps=None,
        final_lr_fraction=0.0,
    )
    # Without an average the state has no array for it, so `None` stays.
    ema_decay = None if config.ema.decay is None else 0.5
    return dataclasses.replace(
        without_reports(config),
        preset=preset_of_step(config),
        optimizer=optimizer,
        ema=dataclasses.replace(config.ema, decay=ema_decay),
        data=dataclasses.replace(config.data, seed=config.data_seed),
        faults=FaultsConfig(),
        seed=0,
    )


class Sweep:
    """Engine that trains runs, keeps their results as rows in a folder, and reuses programs.

    Each run is called a point. A program is compiled for all points that differ only in numbers,
    such as learning rate and seed.

    Args:
        folder: Folder of rows and unfinished points; created if it is missing.
        how: Execution of points that share a program, all at once or one after another, as in
            `Mode`. `auto` by default.
        evaluated: True to evaluate each point after its last step.
        stop: Function called between steps. If it returns True, the points in training are saved
            and the sweep ends.
        saving: Function that makes a context manager, which is entered while points train. The
            command's one lets a first signal wait until they are saved.
        devices: JAX devices of the mesh; all of them by default.

    Raises:
        ConfigError: There are several processes.
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
                "a sweep runs in one process over its devices; start one sweep per host, each in "
                "its own folder"
            )
        self._folder = folder.absolute()
        self._evaluated = evaluated
        self._stop = stop
        self._saving = saving
        self._devices = devices
        self._programs: dict[str, Program] = {}
        self._batches = Batches()
        self._trial = ExecutionTrial(how, self._batches, evaluated)

    def has_rows(self, configs: Sequence[Config]) -> bool:
        """Return True if the folder has a row of every point, so that `run` would train nothing.

        A row without an evaluation loss does not count if the sweep evaluates, unless its point
        diverged. The data of all points are loaded for their names, but nothing is compiled.

        Raises:
            ConfigError, PresetError, MeshError, DataError: A config or its data do not fit.
            MemoryLimitError: The state of a point does not fit into a device's memory.
            RowsError: The folder's rows are not as they were written.
        """
        groups = grouped(configs, self._programs, self._devices)
        rows = Rows(self._folder, lambda line: None)
        keys = self._keys(groups)
        return all(rows.has(key, evaluated=self._evaluated) for key in keys.values())

    def run(self, configs: Sequence[Config], watcher: SweepCallback | None = None) -> list[Row]:
        """Train every point that has no row in the folder, and write its row when it is finished.

        Points that were saved in training are resumed.

        Args:
            configs: Points. Those that differ only in numbers (`shape_of`) share a program.
            watcher: Callbacks that show the progress; none by default.

        Returns:
            A row per config, in their order.

        Raises:
            ConfigError, PresetError, MeshError, DataError: A config or its data do not fit. This is
                raised before the first step.
            MemoryLimitError: A point does not fit into a device's memory.
            WorkdirError: Another sweep trains in the folder.
            RowsError: The folder's rows are not as they were written.
            Stopped: The sweep's argument `stop` returned True. Points in training are saved.
        """
        watcher = LockedCallback(watcher or SweepCallback())
        self._batches.note = watcher.note
        # Before the folder is made, so that a missing package leaves no empty folder.
        for config in configs:
            check_extras(config)
        self._folder.mkdir(parents=True, exist_ok=True)
        # Two sweeps in one folder would train the same points and write the same rows.
        with locked(self._folder, Processes()):
            rows = Rows(self._folder, watcher.note)
            groups = grouped(configs, self._programs, self._devices)
            keys = self._keys(groups)
            done = {}
            for index, key in keys.items():
                if rows.has(key, evaluated=self._evaluated):
                    done[index] = rows[key]
            watcher.begin(configs, done)

            is_recorded = False
            for program_key, group in groups.items():
                points = [point for point in _unique(group, keys) if point[0] not in done]
                if not points:
                    continue
                if not is_recorded:
                    _, program = points[0]
                    goes_on = bool(rows) or (self._folder / "unfinished").exists()
                    note_changes(self._folder, program, watcher.note, goes_on=goes_on)
                    is_recorded = True
                self._train(program_key, points, keys, rows, watcher)
            return [rows[keys[index]] for index in range(len(configs))]

    def _keys(self, groups: dict[object, list[Point]]) -> dict[int, str]:
        """Return the name (`key_of`) of each point by its index, and load the data for it."""
        keys = {}
        for group in groups.values():
            for index, program in group:
                data = self._batches.data_of(program)
                keys[index] = key_of(program.config, data.facts["digest"])
        return keys

    def _train(
        self,
        program_key: object,
        points: Sequence[Point],
        keys: dict[int, str],
        rows: Rows,
        watcher: SweepCallback,
    ) -> None:
        """Train points of one program, write a row as each is finished, and delete its saved state.

        Args:
            program_key: Key of the program (`grouped`).
            keys: Name of each point by its index.
            rows: Rows of the folder, to which the new rows are added.

        Raises:
            Stopped: The sweep's `stop` returned True. The points in training are saved.
        """
        programs = [program for _, program in points]
        trainer = self._trial.trainer(program_key, programs, watcher.note)
        work = Work(trainer, self._batches, self._folder, keys, watcher, self._stop)
        point_batches = []
        for start in range(0, len(points), trainer.count):
            point_batches.append(points[start : start + trainer.count])
        with self._saving():
            for batch, finished_rows in work.train_all(point_batches):
                for index, row in finished_rows:
                    rows.add(row)
                    watcher.finished(index, row)
                # Only now, because the rows replace what is saved there.
                shutil.rmtree(work.unfinished_folder(batch), ignore_errors=True)
        if self._stop():
            raise Stopped


def _unique(points: Sequence[Point], keys: dict[int, str]) -> list[Point]:
    """Return the points without duplicates, the first of each name.

    Args:
        keys: Name (`key_of`) of each point by its index.
    """
    by_key: dict[str, Point] = {}
    for index, program in points:
        by_key.setdefault(keys[index], (index, program))
    return list(by_key.values())


@contextlib.contextmanager
def engine(folder: Path, mode: Mode, *, evaluated: bool) -> Iterator[Sweep]:
    """Context manager that yields a `Sweep` which saves its points in training when a signal comes.

    After the points are saved, the context manager prints a message and ends the command.

    Args:
        folder: Folder of rows and unfinished points; created if it is missing.
        mode: Argument `how` of `Sweep`.
        evaluated: True to evaluate each point after its last step.

    Raises:
        SystemExit: A signal came. The code is 128 plus the number of the signal.
    """
    with lasting(), StopRequest() as stop:
        try:
            yield Sweep(
                folder,
                how=mode,
                evaluated=evaluated,
                stop=lambda: stop.received is not None,
                saving=stop.deferring,
            )
        except Stopped:
            name = stop.received.name if stop.received else "a signal"
            terminal.say(
                f"stopped by {name}; what was in training is saved, and the same command goes on"
            )
            raise SystemExit(stop.exit_code) from None


def run(
    configs: Sequence[Config],
    folder: Path,
    *,
    watcher: SweepCallback | None = None,
    **options: Any,
) -> list[Row]:
    """Train the points that have no row in a folder yet, and return a row per config.

    It makes a new `Sweep`, so nothing compiled is kept for another call.

    Args:
        configs: Configs of the points, one row of the result each.
        folder: Folder of rows and unfinished points; created if it is missing.
        watcher: Callbacks that show the progress; none by default.
        **options: Other arguments of `Sweep`.

    Raises:
        MupaxError, Stopped: As `Sweep` and `Sweep.run`.
    """
    return Sweep(folder, **options).run(configs, watcher)
