"""Compiled program that trains points of a sweep, all at once or one after another.

Both are a `Trainer`, with a step over `count` points. In turn, `count` is 1 and the step is that of
a run alone, so the losses are bitwise the same. Together, every array of state and step inputs has
a first axis [count], and all points see the same batches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mupax.train import data as data_sources
from mupax.train.core.costs import fit
from mupax.train.core.factors import name_hash
from mupax.train.core.program import Program
from mupax.train.core.state import TrainState
from mupax.train.core.step import Batch, StepInputs, batch_sums, make_train_step
from mupax.train.data import Data
from mupax.zoo.definition import SHARED_INIT

_MEMORY_SHARE = 0.8
"""Share of a device's free memory that points may fill."""
CACHED_BYTES = 2**28
"""Total bytes of a run's batches up to which they are kept in host memory for later points."""


@dataclasses.dataclass(frozen=True)
class Trainer:
    """Compiled program for points of one shape.

    Attributes:
        program: Program of any one of the points.
        count: Number of points that train at once.
        abstract: Shapes and shardings of the state.
        step: Compiled step, (state, step inputs, batch) -> (state, metrics). The state is donated.
        begin: Function from the programs of exactly `count` points to (state, step inputs) at step
            0.
        score: Function (parameters, step inputs, batch) -> `LossSums`; `None` without evaluation.
        step_bytes: Bytes per device while a step runs, for all points together; 0 if the backend
            does not tell.
        compile_seconds: Time that the compilation of the step took.
        concurrent: Number of threads that use this trainer at the same time.
    """

    program: Program
    count: int
    abstract: TrainState
    step: jax.stages.Compiled
    begin: Callable[[Sequence[Program]], tuple[TrainState, StepInputs]]
    score: Callable[..., Any] | None
    step_bytes: int
    compile_seconds: float = 0.0
    concurrent: int = 1


def compile_trainer(program: Program, count: int, evaluated: bool) -> Trainer:
    """Compile a trainer of one point, with the step of a run alone, or of several points at once.

    Args:
        program: Program of any one of the points.
        count: Number of points at once: 1, or a multiple of the mesh axis `sweep`.
        evaluated: True if the trainer also evaluates points.

    Raises:
        MemoryLimitError: `count` is 1 and the compiled step does not fit into memory.
    """
    if count > 1:
        return _compile_together(program, count, evaluated)
    # `limit_of` reads the free memory, so it comes before anything is allocated.
    limit = fit.limit_of(program)
    compiled = program.compile_train()
    fit.check_step(program, compiled, limit, saves=False)

    def begin(points: Sequence[Program]) -> tuple[TrainState, StepInputs]:
        (point,) = points
        return program.placed(point.initial_state(), compiled), point.step_inputs()

    return Trainer(
        program=program,
        count=1,
        abstract=program.abstract,
        step=compiled,
        begin=begin,
        score=program.compile_eval(compiled) if evaluated else None,
        step_bytes=_step_bytes(compiled),
    )


def _compile_together(program: Program, count: int, evaluated: bool) -> Trainer:
    """Compile a trainer of `count` points at once, with `jax.vmap` over a first axis [count].

    The mesh axis `sweep` splits that axis. All points see the same batches.
    """
    mesh = program.mesh
    axis_name = "sweep" if mesh.shape["sweep"] > 1 else None
    over_points = NamedSharding(mesh, PartitionSpec(axis_name))

    def stacked(leaf: Any) -> jax.ShapeDtypeStruct:
        sharding = getattr(leaf, "sharding", None)
        spec = sharding.spec if isinstance(sharding, NamedSharding) else ()
        # The axes of one point's array stay split as they are.
        stacked_sharding = NamedSharding(mesh, PartitionSpec(axis_name, *spec))
        return jax.ShapeDtypeStruct((count, *np.shape(leaf)), leaf.dtype, sharding=stacked_sharding)

    abstract_state = jax.tree.map(stacked, program.abstract)
    abstract_inputs = jax.tree.map(stacked, program.abstract_inputs())
    state_shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state)
    inputs_shardings: Any = jax.tree.map(lambda leaf: leaf.sharding, abstract_inputs)

    # All points see the same batches, so a batch has no axis of points.
    abstract_batch = program.train_feed().abstract
    step_of_one = make_train_step(
        program.definition,
        program.tx,
        program.config.accumulation_steps,
        program.layout,
        measure_logits=program.config.measures_attention_logits,
    )
    step = jax.jit(
        jax.vmap(step_of_one, in_axes=(0, 0, None), spmd_axis_name=axis_name),
        in_shardings=(state_shardings, inputs_shardings, program.layout.batch(abstract_batch)),
        out_shardings=(state_shardings, over_points),
        # The old state is given up, or two states would have to fit in memory.
        donate_argnums=0,
    )
    compiled = step.lower(abstract_state, abstract_inputs, abstract_batch).compile(
        compiler_options=program.compiler_options()
    )

    def sums(params: Any, step_inputs: StepInputs, batch: Batch) -> Any:
        return batch_sums(program.definition, params, step_inputs, batch, layout=program.layout)

    score = jax.jit(
        jax.vmap(sums, in_axes=(0, 0, None), spmd_axis_name=axis_name), out_shardings=over_points
    )
    initialize = jax.jit(
        jax.vmap(program.definition.initialize), out_shardings=state_shardings.params
    )
    state_of = jax.jit(jax.vmap(program.initializer.state_of), out_shardings=state_shardings)

    # Random numbers of a point depend on its seed alone, so training one by one starts from the
    # same parameters.
    def begin(points: Sequence[Program]) -> tuple[TrainState, StepInputs]:
        seeds = np.array([point.config.seed for point in points], np.uint32)
        stds = _stacked_stds(points)
        step_inputs = _stack([point.inputs for point in points])
        if program.config.model.centered:
            # Initialized twice, because the step donates the arrays of the state, and the reference
            # must not share them.
            step_inputs = step_inputs._replace(reference=initialize(seeds, stds))
        state = state_of(initialize(seeds, stds))
        return state, jax.device_put(step_inputs, inputs_shardings)

    return Trainer(
        program=program,
        count=count,
        abstract=abstract_state,
        step=compiled,
        begin=begin,
        score=score if evaluated else None,
        step_bytes=_step_bytes(compiled),
    )


def _stack(trees: Sequence[Any]) -> Any:
    """Stack pytrees of numbers along a new first axis, on the host."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def _stacked_stds(points: Sequence[Program]) -> dict[str, np.ndarray]:
    """Return the initial standard deviations of points by parameter, with a first axis [points].

    Some presets give the weights of attention keys the random draws of the queries' weights. They
    have an entry `SHARED_INIT` + name, the hash of the name whose draws are used. Points without
    such an entry get the hash of the parameter's own name, so that all points have equal entries.
    """
    names = set()
    for point in points:
        names.update(point.stds)

    stds_of_points = []
    for point in points:
        stds = dict(point.stds)
        for name in names - stds.keys():
            # The parameter's own draw, which `Definition.initialize` uses without an entry.
            stds[name] = name_hash(name.removeprefix(SHARED_INIT))
        stds_of_points.append(stds)
    return _stack(stds_of_points)


def points_per_batch(program: Program, points: int, single: Trainer | None = None) -> int:
    """Return the number of points to train at once, so that they fit a device's memory.

    If they do not all fit, they are spread over batches of one size, which one program can train.
    If the free memory is unknown, all points train at once.

    Args:
        program: Program of any one of the points.
        points: Number of points that are left to train.
        single: Compiled trainer of one point. Its memory is a better bound than the size of the
            state, which is used by default.

    Returns:
        Multiple of the mesh axis `sweep`.
    """
    num_shards = program.mesh.shape["sweep"]
    all_points = math.ceil(points / num_shards) * num_shards
    sizes = []
    for leaf in jax.tree.leaves(program.abstract):
        sizes.append(math.prod(leaf.shape) * leaf.dtype.itemsize)
    state_bytes = sum(sizes)
    # A step is assumed to take at least three times the state.
    point_bytes = max(single.step_bytes if single is not None else 0, 3 * state_bytes)
    free_bytes = fit.room(program.mesh.devices.flat[0])
    if free_bytes is None or not point_bytes:
        return all_points
    # Each shard of the axis has memory of its own, and at least one point.
    max_points = max(num_shards, int(_MEMORY_SHARE * free_bytes / point_bytes) * num_shards)
    num_batches = math.ceil(all_points / max_points)
    return math.ceil(points / num_batches / num_shards) * num_shards


def _step_bytes(compiled: jax.stages.Compiled) -> int:
    """Return the bytes per device while a step runs, or 0 if the backend does not tell."""
    stats = compiled.memory_analysis()
    if stats is None:
        return 0
    sizes = stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes
    # Donated arguments share their memory with outputs.
    return int(sizes - stats.alias_size_in_bytes)


class Batches:
    """Data of a sweep's points, and their training batches on the host.

    Batches are read once and kept for the next points if all of a run take at most `CACHED_BYTES`.
    Threads may use one object.
    """

    def __init__(self) -> None:
        self.note: Callable[[str], None] = lambda line: None
        """Function that prints a line about work that takes time."""
        self._data: dict[Any, Data] = {}
        self._cached: dict[Any, list[Any]] = {}
        # Reentrant: `train` holds the lock while it asks for `data_of`.
        self._lock = threading.RLock()

    def data_of(self, program: Program) -> Data:
        """Return the data of a program, loaded at the first call and shared by later ones."""
        config = program.config
        key = self._key(program)
        with self._lock:
            if key not in self._data:
                self._data[key] = data_sources.load(
                    config.data,
                    config.model,
                    seed=config.data_seed,
                    # `note` may be another function by the time that the data print a line.
                    note=lambda line: self.note(line),
                )
            return self._data[key]

    def train(self, program: Program, start: int) -> Generator[Batch, None, None]:
        """Yield training batches of a program's data as arrays on its devices, from batch `start`.

        If the batches of the whole run fit into `CACHED_BYTES`, they are kept in host memory for
        later calls, and the iterator ends with the run's last step. Otherwise they are read anew,
        for as long as the data have batches.

        Args:
            start: Number of the first batch, from 0. It is the number of steps that are done.
        """
        feed = program.train_feed()
        steps = program.config.steps
        batch_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in feed.abstract.values())
        if batch_bytes * steps > CACHED_BYTES:
            stream = self.data_of(program).train_batches(start, *feed.rows)
            with contextlib.closing(stream) as batches:
                yield from map(feed.shard_batch, batches)
            return

        with self._lock:
            cached = self._cached.setdefault(self._key(program), [])
            # A longer run of the same data goes on where a shorter one ended.
            if len(cached) < steps:
                stream = self.data_of(program).train_batches(len(cached), *feed.rows)
                with contextlib.closing(stream) as batches:
                    for _ in range(len(cached), steps):
                        cached.append(next(batches))
        yield from map(feed.shard_batch, cached[start:steps])

    @staticmethod
    def _key(program: Program) -> Any:
        """Return a key of data config, data seed and batch shapes, equal for equal batches."""
        config = program.config
        shapes = []
        for name, leaf in program.train_feed().abstract.items():
            shapes.append((name, leaf.shape))
        # `config.data_seed` is a number even if the data seed follows the run's seed, so equal
        # batches have equal keys.
        data = dataclasses.replace(config.data, seed=config.data_seed)
        return data, tuple(shapes), getattr(config.model, "vocab_size", None)
