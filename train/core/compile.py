"""The step on a mesh: shardings, memory layouts, lowering. One executable per run, for training and for evaluation."""

from __future__ import annotations

from typing import Any

import jax
import optax
from jax.experimental.layout import Format, Layout

from mupax.train.config.metrics import on_devices
from mupax.train.core.cross_entropy.sums import LossSums
from mupax.train.core.state import Batch, StepInputs, TrainState, shardings_of
from mupax.train.core.step import batch_sums, logits_of, make_train_step
from mupax.train.parallel.sharding import MeshLayout
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

    Args:
        definition, tx: the model, and the optimizer of those of its parameters that are trained.
        abstract: shapes, dtypes and shardings of the state (`state.abstract_state`).
        layout: how arrays lie on the mesh that the step is for.
        run, batch: arrays or their shapes; the batch is the global one.
        accumulation_steps: microbatches of a step, which its batch divides into.
        free: the compiler chooses how the state lies in memory; `input_formats` of the compiled step says how.
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
    """(params, run, batch) -> `LossSums` of the batch with all metrics, for the parameters that `TrainState.evaluated` gives.

    Args:
        definition: the model.
        abstract: shapes, dtypes and shardings of the state.
        layout: how arrays lie on the mesh that the step is for.
        run, batch: arrays or their shapes; the batch is the global one.
        formats: how the training step takes its state, for parameters that lie in memory so; None: the default layouts.
    """
    placed = shardings_of(abstract) if formats is None else formats
    params = abstract.evaluated if formats is None else _unplaced(abstract.evaluated)

    def evaluate(params: Arrays, run: StepInputs, batch: Batch) -> LossSums:
        return batch_sums(definition, params, run, batch, metrics=on_devices(training=False), layout=layout)

    jitted = jax.jit(
        evaluate,
        in_shardings=(placed.evaluated, _shardings_of_inputs(run, abstract, layout), layout.batch(batch)),
        out_shardings=layout.replicated,
    )
    return jitted.lower(params, run, batch).compile()


def compile_logits(
    definition: Definition, abstract: TrainState, layout: MeshLayout, run: StepInputs, batch: Batch
) -> jax.stages.Compiled:
    """(params, run, batch) -> logits of the batch's inputs, float32 [B, classes], on every device.

    Args:
        definition, abstract, layout, run, batch: as `compile_eval_step` takes them.
    """

    def logits(params: Arrays, run: StepInputs, batch: Batch) -> jax.Array:
        return logits_of(definition, params, run, batch["inputs"], layout=layout)

    jitted = jax.jit(
        logits,
        in_shardings=(
            shardings_of(abstract).evaluated,
            _shardings_of_inputs(run, abstract, layout),
            layout.batch(batch),
        ),
        out_shardings=layout.replicated,
    )
    return jitted.lower(abstract.evaluated, run, batch).compile()


def _shardings_of_inputs(run: StepInputs, abstract: TrainState, layout: MeshLayout) -> StepInputs:
    shardings: Any = jax.tree.map(lambda _: layout.replicated, run._replace(reference=None))
    return shardings if run.reference is None else shardings._replace(reference=shardings_of(abstract).params)


def _unplaced(abstract: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), abstract)
