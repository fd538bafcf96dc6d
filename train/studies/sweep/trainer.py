"""Points of a sweep that are one program: trained all at once along a stacked axis, or one after another.

Both are a `Trainer`: a compiled step over `count` points. In turn `count` is 1 and the step is the very one of a run alone,
so that its losses are bitwise the same; together every array of state and step inputs has a first axis [count].
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mupax.train.core.program import Program
from mupax.train.core.state import TrainState
from mupax.train.core.step import Batch, StepInputs, batch_sums, make_train_step
from mupax.zoo import partition

_OF_MEMORY = 0.8
"""Share of what a device has left that a pack may fill."""


@dataclasses.dataclass(frozen=True)
class Trainer:
    """A compiled program for points of one shape.

    Attributes:
        program: of any one of the points.
        count: points that it trains at once.
        abstract: shapes and shardings of its state.
        step: (state, step inputs, batch) -> (state, metrics).
        begin: programs of the points -> (state, step inputs) at step 0.
        placed: a restored state in the layout that the step takes.
        score: (parameters, step inputs, batch) -> `Sums`.
        temporary: bytes per device while a step runs, all points together; 0 where the backend does not say.
        compile_seconds: what its step took to compile.
        concurrent: packs to train at the same time, in threads.
    """

    program: Program
    count: int
    abstract: TrainState
    step: Callable[[TrainState, StepInputs, Batch], tuple[TrainState, dict[str, jax.Array]]]
    begin: Callable[[Sequence[Program]], tuple[TrainState, StepInputs]]
    placed: Callable[[TrainState], TrainState]
    score: Callable[..., Any]
    temporary: int
    compile_seconds: float = 0.0
    concurrent: int = 1


def alone(program: Program) -> Trainer:
    """One point at a time, by the step of a run alone."""
    compiled = program.compile_train()

    def placed(state: TrainState) -> TrainState:
        return program.placed(state, compiled)

    def begin(points: Sequence[Program]) -> tuple[TrainState, StepInputs]:
        (point,) = points
        return placed(point.initial_state()), point.step_inputs()

    score = _once(lambda: program.compile_eval(compiled))
    return Trainer(program, 1, program.abstract, compiled, begin, placed, score, _bytes(compiled))


def together(program: Program, count: int) -> Trainer:
    """`count` points at once: the step mapped over a first axis, which the mesh axis `sweep` splits.

    Args:
        program: of any one of the points.
        count: a multiple of the mesh axis `sweep`.
    """
    mesh, config = program.mesh, program.config
    split = "sweep" if mesh.shape["sweep"] > 1 else None
    over = NamedSharding(mesh, PartitionSpec(split))

    def stacked(leaf: Any) -> jax.ShapeDtypeStruct:
        sharding = getattr(leaf, "sharding", None)
        spec = sharding.spec if isinstance(sharding, NamedSharding) else ()
        placed = NamedSharding(mesh, PartitionSpec(split, *spec))
        return jax.ShapeDtypeStruct((count, *np.shape(leaf)), leaf.dtype, sharding=placed)

    abstract, step_inputs = jax.tree.map(stacked, (program.abstract, program.abstract_inputs()))
    taken: Any = jax.tree.map(lambda leaf: leaf.sharding, (abstract, step_inputs))
    feed = program.train_feed().abstract
    one = make_train_step(program.definition, program.tx, config.accumulation_steps, program.layout)
    many = jax.jit(
        jax.vmap(one, in_axes=(0, 0, None), spmd_axis_name=split),
        in_shardings=(*taken, program.layout.batch(feed)),
        out_shardings=(taken[0], over),
        donate_argnums=0,
    )
    compiled = many.lower(abstract, step_inputs, feed).compile(compiler_options=program.compiler_options())

    def sums(params: Any, run: StepInputs, batch: Batch) -> Any:
        with partition.using(program.layout):
            return batch_sums(program.definition, params, run, batch)

    evaluate = jax.jit(jax.vmap(sums, in_axes=(0, 0, None), spmd_axis_name=split), out_shardings=over)
    births = jax.jit(jax.vmap(program.definition.initialize), out_shardings=taken[0].params)
    begins = jax.jit(jax.vmap(program.initializer.beside), out_shardings=taken[0])

    def begin(points: Sequence[Program]) -> tuple[TrainState, StepInputs]:
        seeds = np.array([point.config.seed for point in points], np.uint32)
        stds, runs = jax.tree.map(lambda *each: np.stack(each), *((point.stds, point.inputs) for point in points))
        if config.model.centered:
            runs = runs._replace(reference=births(seeds, stds))
        return begins(births(seeds, stds)), jax.device_put(runs, taken[1])

    return Trainer(program, count, abstract, compiled, begin, lambda state: state, evaluate, _bytes(compiled))


def fitting(program: Program, points: int, one: Trainer | None = None) -> int:
    """How many of the points fit into a device's memory at once, as a multiple of the mesh axis `sweep`.

    Args:
        program: of any one of them.
        points: their number.
        one: the trainer of one point, if it is compiled, whose memory says more than the state's size.
    """
    ways = program.mesh.shape["sweep"]
    most = math.ceil(points / ways) * ways
    state = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(program.abstract))
    each = max(one.temporary if one is not None else 0, 3 * state)
    free = _free_bytes(program.mesh.devices.flat[0])
    if free is None or not each:
        return most
    packs = math.ceil(most / max(ways, int(_OF_MEMORY * free / each) * ways))
    return math.ceil(points / packs / ways) * ways  # packs of one size, so that one program serves them all


def _free_bytes(device: Any) -> int | None:
    """Memory that a device has left; None where nobody says."""
    if device.platform != "cpu":
        stats = device.memory_stats() or {}
        return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0)) if "bytes_limit" in stats else None
    try:  # virtual devices share the machine's memory
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // jax.local_device_count()
    except (ValueError, OSError):
        return None


def _bytes(compiled: jax.stages.Compiled) -> int:
    if (stats := compiled.memory_analysis()) is None:
        return 0
    sizes = stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes
    return int(sizes - stats.alias_size_in_bytes)


def _once(compile_: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """A program that is compiled where it is first called: a sweep that never evaluates compiles no evaluation."""
    lock, cached = threading.Lock(), functools.cache(compile_)

    def call(*args: Any) -> Any:
        with lock:
            program = cached()
        return program(*args)

    return call
