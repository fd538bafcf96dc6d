"""The step on a mesh: shardings, memory layouts, lowering. One executable per run, for training and for evaluation."""

from __future__ import annotations

from typing import Any

import jax
import optax
from jax.experimental.layout import Format, Layout

from mupax.train.core.loss import Sums
from mupax.train.core.state import TrainState, shardings_of
from mupax.train.core.step import Batch, StepInputs, batch_sums, make_train_step
from mupax.train.parallel.sharding import MeshLayout
from mupax.zoo import partition
from mupax.zoo.definition import Arrays, Definition


def free_format(leaf: jax.ShapeDtypeStruct) -> Format:
    """A leaf of the state where it is to lie, in whatever layout the compiler likes best."""
    return Format(Layout.AUTO, leaf.sharding)


def trace_train_step(
    definition: Definition,
    tx: optax.GradientTransformationExtraArgs,
    abstract: TrainState,
    layout: MeshLayout,
    run: StepInputs,
    batch: Batch,
    accumulation_steps: int = 1,
    *,
    free: bool = False,
) -> jax.stages.Traced:
    """The step traced for a mesh: state donated, batch split by the layout, numbers replicated.

    `run` and `batch` (the global one) may be arrays or their shapes. With `free` the compiler chooses how the state's
    arrays lie in memory: `input_formats` of the compiled step says how it takes them.
    """
    placed = jax.tree.map(free_format, abstract) if free else shardings_of(abstract)
    jitted = jax.jit(
        make_train_step(definition, tx, accumulation_steps, layout),
        in_shardings=(placed, _shardings_of_inputs(run, abstract, layout), layout.batch(batch)),
        out_shardings=(placed, layout.replicated),
        donate_argnums=0,
    )
    return jitted.trace(_unplaced(abstract) if free else abstract, run, batch)


def compile_eval_step(
    definition: Definition,
    abstract: TrainState,
    layout: MeshLayout,
    run: StepInputs,
    batch: Batch,
    formats: TrainState | None = None,
) -> jax.stages.Compiled:
    """(params, run, batch) -> `Sums` of the batch, for the parameters that `TrainState.evaluated` gives.

    With `formats` the parameters lie in memory as they say, those of the training step.
    """
    placed = shardings_of(abstract) if formats is None else formats
    params = abstract.evaluated if formats is None else _unplaced(abstract.evaluated)

    def evaluate(params: Arrays, run: StepInputs, batch: Batch) -> Sums:
        with partition.using(layout):
            return batch_sums(definition, params, run, batch)

    jitted = jax.jit(
        evaluate,
        in_shardings=(placed.evaluated, _shardings_of_inputs(run, abstract, layout), layout.batch(batch)),
        out_shardings=layout.replicated,
    )
    return jitted.lower(params, run, batch).compile()


def _shardings_of_inputs(run: StepInputs, abstract: TrainState, layout: MeshLayout) -> StepInputs:
    shardings: Any = jax.tree.map(lambda _: layout.replicated, run._replace(reference=None))
    return shardings if run.reference is None else shardings._replace(reference=shardings_of(abstract).params)


def _unplaced(abstract: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), abstract)
