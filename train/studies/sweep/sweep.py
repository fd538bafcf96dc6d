"""Many runs that differ in numbers, trained with one compilation per shape, a row on disk as each finishes.

Complete configs -> groups of one program -> packs (trainer.py, work.py) -> rows (rows.py). command.py is the
command line; transfer studies ask for points as they learn from them.

A point's name is a digest of the config fields that decide what it trains.

A point's name never changes, or every committed study would train again. Fields of `_FIRST` are part of every name. A newer field is
part of a name only if its effect is on what is trained (`mupax.config_fields`) and it does not have its default, so a new
field needs no entry here.

environment.json says in which environment the points were trained.

A trial of a few steps chooses how the points of one program train: all at once, in turn, or several side by side.
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
from typing import Any, Literal

import jax

from mupax import disk, terminal
from mupax.config_fields import config_fields, with_defaults
from mupax.train.checkpoints.workdir import locked, surroundings
from mupax.train.config.data import PixelsConfig, TransformsConfig, source
from mupax.train.config.record import OLDER_PIXELS, to_json
from mupax.train.config.run import Config, FaultsConfig, PresetConfig, check_extras
from mupax.train.core.costs import fit
from mupax.train.core.program import Program, assemble
from mupax.train.parallel import environment
from mupax.train.parallel.processes import Processes, StopRequest, lasting
from mupax.train.studies.sweep import trainer as sweep_pack
from mupax.train.studies.sweep.rows import Row, Rows
from mupax.train.studies.sweep.trainer import Batches, Trainer
from mupax.train.studies.sweep.work import Point, Stopped, SweepCallback, Work, one_at_a_time
from mupax.zoo.configs import ConfigError
from mupax.zoo.transformer import LoraConfig, RoutingConfig

Mode = Literal["auto", "together", "in-turn"]
STEPS = 3
GAIN = 0.95
"""More points side by side must take at most this share of the time."""
FEW = 40
"""Steps of all points together that are not worth a trial."""
PAYS = 20
"""A trial costs a compilation; in turn must need so many of those to make it worth one, on a CPU, where it seldom wins."""

FILE_NAME = "environment.json"

_FIRST = {
    "": "recipe steps seed freeze train_only accumulation_steps workdir resume resume_change xla_flags",
    "model": "centered width depth num_heads head_dim num_kv_heads mlp_ratio activation norm norm_eps norm_gain bias qk_norm vocab_size "
    "seq_len positions rope_theta tied image_size patch_size channels num_classes pool encoder_depth target_len distance_buckets "
    "longest_distance shared embedding_norm",
    "model.compute": "layers remat attention projections cross_entropy param_dtype dtype",
    "model.routing": "gate capacity_factor balance balance_weight z_weight",
    "model.lora": "rank alpha on",
    "data": "name batch_size seed eval_batch_size eval_examples data_dir tokenizer augment split",
    "data.transforms": "crop randaug_layers randaug_magnitude mixup cutmix label_smoothing repeats",
    "data.pixels": "fit resize interpolation mean std background",
    "preset": "name base form alpha_a alpha_l gamma0 beta0 constants zero_readout",
    "optimizer": "name peak_lr weight_decay decay b1 b2 eps momentum clip_norm schedule warmup_steps decay_steps final_lr_fraction",
    "ema": "decay",
    "init": "init_from init_optimizer init_ema init_new init_resize init_drop init_change",
    "mesh": "data fsdp sequence tensor sweep rules slices",
    "distributed": "coordinator processes process timeout_seconds heartbeat_seconds",
    "checkpoint": "every_steps keep",
    "faults": "bad_numbers most_in_a_row spike_deviations skip_spikes watchdog_seconds",
    "log": "eval_every_steps tensorboard wandb progress samples profile",
}  # fmt: skip
"""Section to its fields that were there when points got their names. This list is closed: no new field belongs here."""
_FIRST_PATHS = {
    f"{section}.{name}".lstrip(".") for section, names in _FIRST.items() for name in names.split()
}

__all__ = ["Mode", "Row", "Stopped", "Sweep", "SweepCallback", "engine", "grouped", "run"]


class ExecutionTrial:
    """Trial of whether points train faster together or in turn, with each program compiled once.

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

    def trainer(
        self, key: object, points: Sequence[Program], note: Callable[[str], None]
    ) -> Trainer:
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
        if (
            self._how == "together"
            or ways > 1
            or (self._how == "auto" and not on_cpu and count > 1)
        ):
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
        note(
            f"{'in turn' if self._slower else 'together'}: {text}, {of_many * 1000:.0f} ms together"
        )
        return self._fastest[key]

    def _compiled(self, key: object, program: Program, count: int) -> Trainer:
        if (key, count) not in self._trainers:
            began = time.monotonic()
            trainer = sweep_pack.trainer(program, count, self._evaluated)
            self._trainers[key, count] = dataclasses.replace(
                trainer, compile_seconds=time.monotonic() - began
            )
        return self._trainers[key, count]

    def _side_by_side(self, one: Trainer, points: Sequence[Program]) -> tuple[Trainer, float, str]:
        """The trainer with how many to train at the same time, the seconds of a step and point, and the timings in words."""
        times, program, best = {1: self._seconds(one, points[:1])}, one.program, 1
        if program.mesh.size == 1:  # programs of many devices would wait for each other
            cores = (
                len(os.sched_getaffinity(0))
                if hasattr(os, "sched_getaffinity")
                else os.cpu_count() or 1
            )
            most = min(cores, len(points), sweep_pack.fitting(program, len(points), one))
            while 2 * best <= most:
                times[2 * best] = self._seconds(one, points[:1], 2 * best)
                if times[2 * best] > GAIN * times[best]:
                    break
                best *= 2
        words = (
            f"{1000 * s:.0f} ms {f'by {n} side by side' if n > 1 else 'one by one'}"
            for n, s in times.items()
        )
        return (
            dataclasses.replace(one, concurrent=best),
            times[best],
            f"a step takes {', '.join(words)}",
        )

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
            return (
                max(future.result() for future in [pool.submit(median) for _ in range(concurrent)])
                / concurrent
            )


def note_changes(
    folder: Path, program: Program, note: Callable[[str], None], *, goes_on: bool
) -> None:
    """Say what has changed since the last points of a folder were trained, and record the environment of the next ones.

    Rows of two environments may differ in bits. They stay comparable as far as seeds are.

    Args:
        program: of the next point.
        note: told a line for every change.
        goes_on: whether points of the folder are done or in training.
    """
    path = folder / FILE_NAME
    now = surroundings(program.compiler_options(), environment.facts(program.mesh))
    if goes_on and disk.status(path) is not None:
        try:
            changed = environment.changes(disk.read_json(path), now)
        except disk.JsonError as error:
            changed = None
            note(f"{error}; it is written again")
        if changed == []:
            return
        for change in changed or ():
            note(f"changed since the last points: {change}")
    disk.write_whole(path, json.dumps(now, indent=2) + "\n")


def key_of(config: Config, data_digest: str) -> str:
    """Return the name of what a config trains: equal for configs that differ in where they run and what they report.

    Args:
        config: of the point.
        data_digest: of the data it sees.
    """
    bare = with_defaults(without_reports(config.resolved()), ("layout", "processes"))
    fields = to_json(bare)
    for path in _unnamed_fields(bare):
        _delete(fields, path)
    for section in _unnamed_sections(bare):
        _delete(fields, section)
    return hashlib.sha256(json.dumps([fields, data_digest], sort_keys=True).encode()).hexdigest()[
        :16
    ]


def without_reports(config: Config) -> Config:
    """Return the config without where it is kept and what it reports."""
    return with_defaults(config, ("session", "reports", "course"))


def _unnamed_fields(config: Config) -> Iterator[str]:
    """Yield the fields that are not part of a point's name."""
    for field in config_fields(config):
        # A model of a plugin declares nothing: all its fields are part of the name.
        if field.affects is None or field.path in _FIRST_PATHS:
            continue
        if field.value == field.default or not field.affects.consequence.names_point:
            yield field.path
    # The background became a field of its own after points of images had their names.
    if config.data.pixels.background == OLDER_PIXELS.background or not config.data.name.startswith(
        "images:"
    ):
        yield "data.pixels.background"


def _unnamed_sections(config: Config) -> Iterator[str]:
    """Yield the sections that are not part of a point's name, because all their fields have the values of before they existed."""
    yield from ("stop", "data.limits")
    model = config.model
    if getattr(model, "routing", None) == RoutingConfig():
        yield "model.routing"
    if getattr(model, "lora", None) == LoraConfig():
        yield "model.lora"
    if config.data.transforms == TransformsConfig():
        yield "data.transforms"
    is_unread = (
        "pixels" not in source(config.data.name).reads and config.data.pixels == PixelsConfig()
    )
    if is_unread or config.data.pixels == OLDER_PIXELS:
        yield "data.pixels"


def _delete(fields: dict[str, Any], path: str) -> None:
    """Delete a field or section of a config as JSON."""
    *sections, name = path.split(".")
    for section in sections:
        fields = fields.get(section, {})
    fields.pop(name, None)


def grouped(
    configs: Sequence[Config], programs: dict[str, Program], devices: Sequence[Any] | None = None
) -> dict[object, list[Point]]:
    """The points in groups of one program each, by a key of it, in the order in which the first of each comes.

    Nothing is compiled or allocated, and a definition is built once per shape.

    Args:
        configs: the points.
        programs: by shape, those of earlier points; new ones are added.
        devices: all there are by default.

    Raises:
        ConfigError, PresetError, MeshError: what does not fit.
    """
    groups: dict[object, list[Point]] = {}
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
        program = programs[shape].with_config(config)
        structure = repr(
            jax.tree.map(jax.typeof, program.inputs)
        )  # a preset may have a factor that others do not
        groups.setdefault((shape, structure), []).append((index, program))
    return groups


def shape_of(config: Config) -> Config:
    """The config with every number that is data to the step at one value: equal shapes are one program."""
    same = {"peak_lr": 0.0, "adam_lr": None, "weight_decay": 0.0, "eps": 0.0}
    schedule = {
        "schedule": "constant",
        "warmup_steps": 0,
        "decay_steps": None,
        "final_lr_fraction": 0.0,
    }
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
        folder: where rows and unfinished points go; `run` creates it if missing.
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
        self._chooser = ExecutionTrial(how, self._batches, evaluated)

    def has_rows(self, configs: Sequence[Config]) -> bool:
        """Return whether the folder has a row of every point, so that `run` would train nothing."""
        groups = grouped(configs, self._programs, self._devices)
        members = [member for group in groups.values() for member in group]
        rows = Rows(self._folder, lambda line: None)
        keys = [
            key_of(program.config, self._batches.of(program).facts["digest"])
            for _, program in members
        ]
        return all(rows.has(key, evaluated=self._evaluated) for key in keys)

    def run(self, configs: Sequence[Config], watcher: SweepCallback | None = None) -> list[Row]:
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
        watcher = one_at_a_time(watcher or SweepCallback())
        self._batches.note = watcher.note
        for config in configs:
            check_extras(config)
        self._folder.mkdir(parents=True, exist_ok=True)
        with locked(self._folder, Processes()):
            rows, groups = (
                Rows(self._folder, watcher.note),
                grouped(configs, self._programs, self._devices),
            )
            members = [member for group in groups.values() for member in group]
            keys = {i: key_of(p.config, self._batches.of(p).facts["digest"]) for i, p in members}
            done = {
                i: rows[key] for i, key in keys.items() if rows.has(key, evaluated=self._evaluated)
            }
            watcher.begin(configs, done)
            unrecorded = True
            for key, group in groups.items():
                unique = list({keys[i]: (i, p) for i, p in reversed(group)}.values())[
                    ::-1
                ]  # of equal points the first
                if todo := [(i, p) for i, p in unique if i not in done]:
                    if unrecorded:
                        goes_on = bool(rows) or (self._folder / "unfinished").exists()
                        note_changes(self._folder, todo[0][1], watcher.note, goes_on=goes_on)
                        unrecorded = False
                    trainer = self._chooser.trainer(key, [p for _, p in todo], watcher.note)
                    work = Work(trainer, self._batches, self._folder, keys, watcher, self._stop)
                    packs = [
                        todo[start : start + trainer.count]
                        for start in range(0, len(todo), trainer.count)
                    ]
                    with self._saving():
                        for pack, finished in work.trained(packs):
                            for i, row in finished:
                                rows.add(row)
                                watcher.finished(i, row)
                            shutil.rmtree(work.unfinished(pack), ignore_errors=True)
                    if self._stop():
                        raise Stopped
            return [rows[keys[i]] for i in range(len(configs))]


@contextlib.contextmanager
def engine(folder: Path, how: Mode, *, evaluated: bool) -> Iterator[Sweep]:
    """Context manager of a command that trains points: a signal saves what is in training and ends the command.

    Args:
        folder: where rows and unfinished points go.
        how: as `Sweep`.
        evaluated: as `Sweep`.

    Raises:
        SystemExit: a signal came; its code is that of the signal.
    """
    with lasting(), StopRequest() as stop:
        try:
            yield Sweep(
                folder,
                how=how,
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
    configs: Sequence[Config], folder: Path, *, watcher: SweepCallback | None = None, **how: Any
) -> list[Row]:
    """The rows of one sweep over these points, in their order; raises as `Sweep` and its `run`.

    Args:
        configs: the points.
        folder: where rows and unfinished points go, made if missing.
        watcher: shows progress; None shows nothing.
        **how: other arguments of `Sweep`.
    """
    return Sweep(folder, **how).run(configs, watcher)
