"""The training and evaluation steps: pure functions over plain dicts, compiled once by `jax.jit` with shardings.

Shapes: B batch, then what the task has (T positions for tokens). A batch is a dict of
    inputs  [B, T] int32 tokens or [B, H, W, C] float32 images
    targets [B, T] or [B] int32
    weights [B, T] or [B] float32, 0 where a target does not count
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.experimental.layout import Format, Layout

from mupax.train.core import ema, nonfinite
from mupax.train.core.factors import Factors
from mupax.train.core.loss import Sums, cross_entropy, of_logits
from mupax.train.core.nonfinite import Limits
from mupax.train.core.optimizer import Hyper
from mupax.train.core.state import TrainState, shardings_of
from mupax.train.parallel.sharding import MeshLayout
from mupax.zoo import partition
from mupax.zoo.definition import Arrays, Definition

Batch = dict[str, jax.Array]


class Run(NamedTuple):
    """What a step is given besides state and batch: numbers that are data, not program."""

    factors: Factors
    hyper: Hyper
    reference: Arrays | None = None
    """Initial parameters where the output is centred, else None."""
    ema_decay: Any = None
    """float32 []; None where no average is kept."""
    limits: Limits = Limits()
    """What counts as a spike of the loss."""


def logits_of(definition: Definition, params: Arrays, run: Run, inputs: jax.Array) -> jax.Array:
    """float32 logits; f - f at initialization where there is a reference, without gradient through the latter."""
    factors = run.factors
    logits = definition.apply(params, factors.multiplier, factors.forward, inputs)
    if run.reference is not None:
        start = definition.apply(run.reference, factors.multiplier, factors.forward, inputs)
        logits = logits - jax.lax.stop_gradient(start)
    return logits


def batch_sums(definition: Definition, params: Arrays, run: Run, batch: Batch) -> Sums:
    """Summed cross-entropy (nats), number correct and number of targets of one (micro)batch."""
    inputs, targets, weights = batch["inputs"], batch["targets"], batch["weights"]
    model = definition.model(params, run.factors.multiplier, run.factors.forward)
    if not hasattr(model, "reading"):  # not one of the zoo's
        return of_logits(logits_of(definition, params, run, inputs), targets, weights)
    reference = None
    if run.reference is not None:
        reference = definition.model(run.reference, run.factors.multiplier, run.factors.forward).reading(inputs)
    how = model.config.compute.cross_entropy
    return cross_entropy(model.reading(inputs), targets, weights, how=how, reference=reference)


def gradients(
    definition: Definition, params: Arrays, run: Run, batch: Batch, accumulation_steps: int
) -> tuple[Arrays, Sums]:
    """Gradient of the mean loss over all targets of the batch, whatever the number of microbatches.

    It has the parameters that have a rate; those that have none are frozen, and nothing is computed for them.
    """
    frozen = {name: w for name, w in params.items() if name not in run.factors.lr}
    params = {name: w for name, w in params.items() if name in run.factors.lr}

    def summed(params: Arrays, micro: Batch) -> tuple[jax.Array, Sums]:
        sums = batch_sums(definition, {**params, **frozen}, run, micro)
        return sums.loss, sums

    grad = jax.grad(summed, has_aux=True)
    if accumulation_steps == 1:
        grads, sums = grad(params, batch)
    else:
        # Microbatch i takes every accumulation_steps-th row, so that each device splits the rows it already holds.
        micros = jax.tree.map(lambda x: x.reshape(-1, accumulation_steps, *x.shape[1:]).swapaxes(0, 1), batch)

        def add(total: tuple[Arrays, Sums], micro: Batch) -> tuple[tuple[Arrays, Sums], None]:
            return jax.tree.map(jnp.add, total, grad(params, micro)), None

        zeros = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(grad, params, _first(micros))
        )
        (grads, sums), _ = jax.lax.scan(add, zeros, micros)
    return jax.tree.map(lambda g: (g / sums.weight).astype(g.dtype), grads), sums


def _first(micros: Batch) -> Batch:
    return jax.tree.map(lambda x: x[0], micros)


def make_train_step(
    definition: Definition,
    tx: optax.GradientTransformationExtraArgs,
    accumulation_steps: int = 1,
    layout: partition.Layout | None = None,
) -> Callable[[TrainState, Run, Batch], tuple[TrainState, dict[str, jax.Array]]]:
    """The training step as a plain function: (state, run, batch) -> (state, metrics).

    A step that `mupax.train.core.nonfinite` rejects leaves parameters, optimizer and average as they were.

    metrics: loss (mean nats per target, before the update), accuracy, grad_norm (global, before clipping), lr (peak x
    schedule), weight (targets counted), all float32 []; verdict (whether it was left out, whether it is a spike, how many
    were left out in a row) int32 [3]; squares (`bad_numbers.squares`) float32 [n], for whoever wants to know more.
    """

    def step(state: TrainState, run: Run, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        with partition.using(layout):
            grads, sums = gradients(definition, state.params, run, batch, accumulation_steps)
        hyper = run.hyper.at(state.step)
        moving = {name: state.params[name] for name in grads}
        updates, opt_state = tx.update(grads, state.opt_state, moving, factors=run.factors, hyper=hyper)
        moved: Any = optax.apply_updates(moving, updates)
        params = {**state.params, **moved}
        average = None if state.ema is None else ema.update(state.ema, params, run.ema_decay, state.step)
        still = {name: jnp.zeros_like(w) for name, w in state.params.items() if name not in grads}
        squares = nonfinite.squares({**still, **grads}, definition.specs)
        loss, grad_norm = sums.loss / sums.weight, jnp.sqrt(jnp.sum(squares))
        verdict, health = nonfinite.judge(state.health, run.limits, loss, grad_norm)
        before, after = (state.params, state.opt_state, state.ema), (params, opt_state, average)
        params, opt_state, average = nonfinite.kept(verdict.keep, after, before)
        metrics = {
            "loss": loss,
            "accuracy": sums.correct / sums.weight,
            "grad_norm": grad_norm,
            "lr": hyper.peak_lr * hyper.schedule,
            "weight": sums.weight,
            "verdict": jnp.stack(
                [1 - verdict.keep.astype(jnp.int32), verdict.spike.astype(jnp.int32), health.in_a_row]
            ),
            "squares": squares,
        }
        return TrainState(state.step + 1, params, opt_state, average, health), metrics

    return step


def free_format(leaf: jax.ShapeDtypeStruct) -> Format:
    """A leaf of the state where it is to lie, in whatever layout the compiler likes best."""
    return Format(Layout.AUTO, leaf.sharding)


def trace_train_step(
    definition: Definition,
    tx: optax.GradientTransformationExtraArgs,
    abstract: TrainState,
    layout: MeshLayout,
    run: Run,
    batch: Batch,
    accumulation_steps: int = 1,
    *,
    free: bool = False,
) -> jax.stages.Traced:
    """The step traced for a mesh: state donated, batch split by the layout, numbers replicated.

    `run` and `batch` (the global one) may be arrays or their shapes. With `free` the compiler chooses how the state's
    arrays lie in memory: `input_formats` of the compiled step says how it takes them.
    """
    whole, shardings = layout.whole, shardings_of(abstract)
    run_shardings = _run_shardings(run, shardings, layout)
    placed = jax.tree.map(free_format, abstract) if free else shardings
    jitted = jax.jit(
        make_train_step(definition, tx, accumulation_steps, layout),
        in_shardings=(placed, run_shardings, layout.batch(batch)),
        out_shardings=(placed, whole),
        donate_argnums=0,
    )
    state: Any = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), abstract) if free else abstract
    return jitted.trace(state, run, batch)


def _run_shardings(run: Run, shardings: TrainState, layout: MeshLayout) -> Run:
    whole: Any = layout.whole
    return Run(whole, whole, None if run.reference is None else shardings.params, whole, whole)


def compile_train_step(
    definition: Definition,
    tx: optax.GradientTransformationExtraArgs,
    abstract: TrainState,
    layout: MeshLayout,
    run: Run,
    batch: Batch,
    accumulation_steps: int = 1,
) -> jax.stages.Compiled:
    """The step of `trace_train_step` as one executable.

    A compiled executable cannot retrace: a shape that changed during a run is an error, never a second compilation.
    """
    return trace_train_step(definition, tx, abstract, layout, run, batch, accumulation_steps).lower().compile()


def compile_eval_step(
    definition: Definition,
    abstract: TrainState,
    layout: MeshLayout,
    run: Run,
    batch: Batch,
    formats: TrainState | None = None,
) -> jax.stages.Compiled:
    """(params, run, batch) -> `Sums` of the batch, for the parameters that `TrainState.evaluated` gives.

    With `formats` the parameters lie in memory as they say, those of the training step.
    """
    whole, shardings = layout.whole, shardings_of(abstract)
    run_shardings = _run_shardings(run, shardings, layout)
    placed: Any = shardings if formats is None else formats
    params = abstract.evaluated
    if formats is not None:
        params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)

    def evaluate(params: Arrays, run: Run, batch: Batch) -> Sums:
        with partition.using(layout):
            return batch_sums(definition, params, run, batch)

    jitted = jax.jit(
        evaluate,
        in_shardings=(placed.evaluated, run_shardings, layout.batch(batch)),
        out_shardings=whole,
    )
    return jitted.lower(params, run, batch).compile()
