"""Points of a sweep that are one program: trained all at once along a stacked axis, or one after another, on the same batches.

Both are a `Trainer`: a compiled step over `count` points. In turn `count` is 1 and the step is the very one of a run alone,
so that its losses are bitwise the same; together every array of state and step inputs has a first axis [count].
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
from mupax.train.core.factors import draw_of
from mupax.train.core.program import Program
from mupax.train.core.state import TrainState
from mupax.train.core.step import Batch, StepInputs, batch_sums, make_train_step
from mupax.train.data import Data
from mupax.zoo.definition import SHARED_INIT

_OF_MEMORY = 0.8
"""Share of what a device has left that a pack may fill."""
CACHED_BYTES = 2**28
"""Batches kept in memory, for the points that train after the first."""


@dataclasses.dataclass(frozen=True)
class Trainer:
    """A compiled program for points of one shape.

    Attributes:
        program: of any one of the points.
        count: points that it trains at once.
        abstract: shapes and shardings of its state.
        step: (state, step inputs, batch) -> (state, metrics).
        begin: programs of the points -> (state, step inputs) at step 0.
        score: (parameters, step inputs, batch) -> `LossSums`; None where nothing is evaluated.
        temporary: bytes per device while a step runs, all points together; 0 where the backend does not say.
        compile_seconds: what its step took to compile.
        concurrent: packs to train at the same time, in threads.
    """

    program: Program
    count: int
    abstract: TrainState
    step: jax.stages.Compiled
    begin: Callable[[Sequence[Program]], tuple[TrainState, StepInputs]]
    score: Callable[..., Any] | None
    temporary: int
    compile_seconds: float = 0.0
    concurrent: int = 1


def trainer(program: Program, count: int, evaluated: bool) -> Trainer:
    """What trains one point at a time, by the step of a run alone, or several at once.

    Args:
        program: of any one of the points.
        count: a multiple of the mesh axis `sweep`.
        evaluated: whether it is to score them.
    """
    if count > 1:
        return _together(program, count, evaluated)
    limit = fit.limit_of(program)
    compiled = program.compile_train()
    fit.check_step(program, compiled, limit, saves=False)

    def begin(points: Sequence[Program]) -> tuple[TrainState, StepInputs]:
        (point,) = points
        return program.placed(point.initial_state(), compiled), point.step_inputs()

    score = program.compile_eval(compiled) if evaluated else None
    return Trainer(program, 1, program.abstract, compiled, begin, score, _bytes(compiled))


def _together(program: Program, count: int, evaluated: bool) -> Trainer:
    """The step mapped over a first axis, which the mesh axis `sweep` splits."""
    mesh, config = program.mesh, program.config
    split = "sweep" if mesh.shape["sweep"] > 1 else None
    over = NamedSharding(mesh, PartitionSpec(split))

    def stacked(leaf: Any) -> jax.ShapeDtypeStruct:
        sharding = getattr(leaf, "sharding", None)
        spec = sharding.spec if isinstance(sharding, NamedSharding) else ()
        placed = NamedSharding(mesh, PartitionSpec(split, *spec))
        return jax.ShapeDtypeStruct((count, *np.shape(leaf)), leaf.dtype, sharding=placed)

    abstract, step_inputs = jax.tree.map(stacked, (program.abstract, program.abstract_inputs()))
    shardings: Any = jax.tree.map(lambda leaf: leaf.sharding, (abstract, step_inputs))
    feed = program.train_feed().abstract
    one = make_train_step(program.definition, program.tx, config.accumulation_steps, program.layout)
    mapped, places = (
        jax.vmap(one, in_axes=(0, 0, None), spmd_axis_name=split),
        (*shardings, program.layout.batch(feed)),
    )
    many = jax.jit(
        mapped, in_shardings=places, out_shardings=(shardings[0], over), donate_argnums=0
    )
    compiled = many.lower(abstract, step_inputs, feed).compile(
        compiler_options=program.compiler_options()
    )

    def sums(params: Any, run: StepInputs, batch: Batch) -> Any:
        return batch_sums(program.definition, params, run, batch, layout=program.layout)

    score = jax.jit(jax.vmap(sums, in_axes=(0, 0, None), spmd_axis_name=split), out_shardings=over)
    births = jax.jit(jax.vmap(program.definition.initialize), out_shardings=shardings[0].params)
    begins = jax.jit(jax.vmap(program.initializer.state_of), out_shardings=shardings[0])

    def begin(points: Sequence[Program]) -> tuple[TrainState, StepInputs]:
        seeds = np.array([point.config.seed for point in points], np.uint32)
        names = {name for point in points for name in point.stds}
        each = [
            {
                n: point.stds[n] if n in point.stds else draw_of(n.removeprefix(SHARED_INIT))
                for n in names
            }
            for point in points
        ]
        stds, runs = jax.tree.map(
            lambda *one: np.stack(one), *zip(each, (point.inputs for point in points), strict=True)
        )
        if config.model.centered:
            runs = runs._replace(reference=births(seeds, stds))
        return begins(births(seeds, stds)), jax.device_put(runs, shardings[1])

    return Trainer(
        program, count, abstract, compiled, begin, score if evaluated else None, _bytes(compiled)
    )


def fitting(program: Program, points: int, one: Trainer | None = None) -> int:
    """How many of the points fit into a device's memory at once, as a multiple of the mesh axis `sweep`.

    Args:
        program: of any one of them.
        points: their number.
        one: the trainer of one point, if it is compiled, whose memory says more than the state's size.
    """
    ways = program.mesh.shape["sweep"]
    most = math.ceil(points / ways) * ways
    state = sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(program.abstract)
    )
    each = max(one.temporary if one is not None else 0, 3 * state)
    free = fit.room(program.mesh.devices.flat[0])
    if free is None or not each:
        return most
    packs = math.ceil(most / max(ways, int(_OF_MEMORY * free / each) * ways))
    return (
        math.ceil(points / packs / ways) * ways
    )  # packs of one size, so that one program serves them all


def _bytes(compiled: jax.stages.Compiled) -> int:
    if (stats := compiled.memory_analysis()) is None:
        return 0
    sizes = stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes
    return int(sizes - stats.alias_size_in_bytes)


class Batches:
    """Training batches on the host, read once and cached where they are few, and the data they come from."""

    def __init__(self) -> None:
        self.note: Callable[[str], None] = lambda text: None
        """Called with a line about what takes time."""
        self._data: dict[Any, Data] = {}
        self._cached: dict[Any, list[Any]] = {}
        self._lock = threading.RLock()

    def of(self, program: Program) -> Data:
        """The data of a program."""
        config, key = program.config, self._key(program)
        with self._lock:
            if key not in self._data:
                self._data[key] = data_sources.load(
                    config.data,
                    config.model,
                    seed=config.data_seed,
                    note=lambda text: self.note(text),
                )
            return self._data[key]

    def train(self, program: Program, start: int) -> Generator[Batch, None, None]:
        """Batches start, start + 1, ... of a program's data on its devices.

        Args:
            program: whose data, on whose devices.
            start: number of the first batch, from 0: steps done.
        """
        feed, steps = program.train_feed(), program.config.steps
        cached = self._cached.setdefault(self._key(program), [])
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in feed.abstract.values())
        if size * steps > CACHED_BYTES:
            with contextlib.closing(self.of(program).train_batches(start, *feed.rows)) as batches:
                yield from map(feed.shard_batch, batches)
            return
        with self._lock:
            if len(cached) < steps:
                with contextlib.closing(
                    self.of(program).train_batches(len(cached), *feed.rows)
                ) as batches:
                    cached.extend(next(batches) for _ in range(len(cached), steps))
        yield from map(feed.shard_batch, cached[start:steps])

    @staticmethod
    def _key(program: Program) -> Any:
        shapes = tuple((name, leaf.shape) for name, leaf in program.train_feed().abstract.items())
        data = dataclasses.replace(program.config.data, seed=program.config.data_seed)
        return data, shapes, getattr(program.config.model, "vocab_size", None)
