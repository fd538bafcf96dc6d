"""The training step as a pure function over plain dicts (loss, gradients, update), and the step on a mesh.

On a mesh it has shardings, memory layouts and a lowering: one executable per run, for training and for evaluation.

Shapes: B batch, T positions, V vocabulary or classes. What a batch holds is said at `mupax.train.core.state.Batch`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import chex
import jax
import jax.numpy as jnp
import optax
from jax.experimental.layout import Format
from jax.experimental.layout import Layout as MemoryLayout
from jax.sharding import PartitionSpec

from mupax.train.config.metrics import NO_METRICS, Metric, on_devices
from mupax.train.core import state as core_state
from mupax.train.core.factors import Factors
from mupax.train.core.loss import cross_entropy, cross_entropy_from_logits
from mupax.train.core.optimizer import apply_gradients
from mupax.train.core.state import Batch, LossSums, StepInputs, TrainState, averaged, shardings_of
from mupax.train.parallel.sharding import MeshLayout
from mupax.zoo.definition import Arrays, Definition
from mupax.zoo.layers.linear import readout_method
from mupax.zoo.partition import ONE_DEVICE, Layout

if TYPE_CHECKING:
    from mupax.zoo.manual import ManualFsdpLayout


def free_format(leaf: jax.ShapeDtypeStruct) -> Format:
    """A leaf of the state where it is to lie, in whatever layout the compiler likes best."""
    return Format(MemoryLayout.AUTO, leaf.sharding)


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
        return batch_sums(
            definition, params, run, batch, metrics=on_devices(training=False), layout=layout
        )

    jitted = jax.jit(
        evaluate,
        in_shardings=(
            placed.evaluated,
            _shardings_of_inputs(run, abstract, layout),
            layout.batch(batch),
        ),
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
    return (
        shardings
        if run.reference is None
        else shardings._replace(reference=shardings_of(abstract).params)
    )


def _unplaced(abstract: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), abstract)


def logits_of(
    definition: Definition,
    params: Arrays,
    run: StepInputs,
    inputs: jax.Array,
    *,
    layout: Layout = ONE_DEVICE,
    **context: jax.Array,
) -> jax.Array:
    """Return logits, float32 [B, T, V] or [B, V], less those of the reference if there is one (no gradient flows through it).

    Args:
        definition, params, run, inputs: model, parameters as stored, factors of the forward pass, a batch's inputs.
        layout: how arrays lie on devices.
        **context: what else of a batch the model reads.
    """
    multiplier, forward = run.factors.multiplier, run.factors.forward
    model = definition.model(params, multiplier, forward, layout=layout)
    logits = model(inputs, **context)
    if run.reference is None:
        return logits
    initial = definition.model(run.reference, multiplier, forward, layout=layout)
    return logits - jax.lax.stop_gradient(initial(inputs, **context))


def batch_sums(
    definition: Definition,
    params: Arrays,
    run: StepInputs,
    batch: Batch,
    *,
    z_loss: jax.Array | None = None,
    metrics: Mapping[str, Metric] = NO_METRICS,
    layout: Layout = ONE_DEVICE,
) -> LossSums:
    """Return the summed cross-entropy (nats), and the sums of metrics, of one (micro)batch.

    Args:
        definition, params, run, batch: as in `gradients`; whether a parameter is trained makes no difference.
        z_loss, metrics: as `cross_entropy` takes them; an evaluation has no z-loss.
        layout: how arrays lie on devices.
    """
    inputs, targets, weights, labels = (
        batch["inputs"],
        batch["targets"],
        batch["weights"],
        batch.get("labels"),
    )
    context = {
        name: x
        for name, x in batch.items()
        if name not in ("inputs", "targets", "weights", "labels")
    }
    chex.assert_equal_shape([targets, weights])
    model = definition.model(params, run.factors.multiplier, run.factors.forward, layout=layout)
    read = readout_method(model)
    if read is None:  # not one of the zoo's
        logits = logits_of(definition, params, run, inputs, layout=layout, **context)
        chex.assert_shape(logits, (*targets.shape, None))
        return cross_entropy_from_logits(logits, targets, weights, labels, z_loss, metrics)
    reference = None
    if run.reference is not None:
        whole = {name: x for name, x in context.items() if name != "scales"}
        initial = definition.model(
            run.reference, run.factors.multiplier, run.factors.forward, layout=layout
        )
        read_initial = readout_method(initial)
        assert read_initial is not None  # it is of the same class
        reference = read_initial(inputs, **whole)._replace(routing=None)
    readout_inputs = read(inputs, **context)
    routing = readout_inputs.routing
    sums = cross_entropy(
        readout_inputs._replace(routing=None),
        targets,
        weights,
        how=model.config.compute.cross_entropy,
        reference=reference,
        labels=labels,
        z_loss=z_loss,
        metrics=metrics,
        layout=layout,
    )
    if routing is None:
        return sums
    # Of the mean weight, so that every device's tokens count alike.
    return sums._replace(routing=routing.weighed(layout.mean(sums.weight)))


def gradients(
    definition: Definition,
    params: Arrays,
    run: StepInputs,
    batch: Batch,
    accumulation_steps: int,
    *,
    layout: Layout = ONE_DEVICE,
) -> tuple[Arrays, LossSums]:
    """Return the gradient of the mean loss over the batch's targets, of the parameters that have a learning rate, and its `LossSums`.

    Args:
        definition, params, run: as in `logits_of`; the names in `run.factors.lr` are trained.
        batch, accumulation_steps: the global batch, and into how many microbatches, taken one after another, it is cut.
        layout: how arrays lie on devices.
    """
    manual = _manual_layout(definition, layout)
    if manual is None:
        grads, sums = _summed_gradients(definition, params, run, batch, accumulation_steps, layout)
    else:
        specs = {name: manual.spec(spec.axes) for name, spec in definition.specs.items()}
        whole = PartitionSpec()

        def local(
            params: Arrays, factors: Factors, reference: Arrays | None, z_loss: Any, batch: Batch
        ) -> tuple[Arrays, LossSums]:
            own = run._replace(factors=factors, reference=reference, z_loss=z_loss)
            grads, sums = _summed_gradients(
                definition, params, own, batch, accumulation_steps, manual
            )
            return grads, jax.lax.psum(sums, manual.batch)

        inputs = (
            specs,
            whole,
            specs if run.reference else whole,
            whole,
            PartitionSpec(manual.batch),
        )
        outputs = ({name: spec for name, spec in specs.items() if name in run.factors.lr}, whole)
        mapped = manual.shard_mapped(local, inputs, outputs)
        grads, sums = mapped(params, run.factors, run.reference, run.z_loss, batch)
    return jax.tree.map(lambda g: (g / sums.weight).astype(g.dtype), grads), sums


def _manual_layout(definition: Definition, layout: Layout) -> ManualFsdpLayout | None:
    """Return the layout inside of which gradients are summed by hand, or None if no parameter is split by the batch's devices."""
    if not {name for axis in definition.sizes for name in layout.mesh_axes(axis)} & set(
        layout.mesh_axes("batch")
    ):
        return None
    from mupax.zoo import manual

    return manual.inside(layout, definition)


def _summed_gradients(
    definition: Definition,
    params: Arrays,
    run: StepInputs,
    batch: Batch,
    accumulation_steps: int,
    layout: Layout,
) -> tuple[Arrays, LossSums]:
    """Return gradients of the summed loss, not yet divided by the number of targets, and the sums.

    Under a `ManualFsdpLayout` the gradients are already summed over devices; the sums are of this device's examples.
    """
    trained = {name: w for name, w in params.items() if name in run.factors.lr}
    metrics = on_devices(training=True)

    def summed(trained: Arrays, micro: Batch) -> tuple[jax.Array, LossSums]:
        merged = {**params, **trained}
        sums = batch_sums(
            definition, merged, run, micro, z_loss=run.z_loss, metrics=metrics, layout=layout
        )
        total = sums.loss if sums.routing is None else sums.loss + sums.routing.penalty
        return total, sums if sums.z is None else sums._replace(
            loss=sums.loss - run.z_loss * sums.z
        )

    grad = jax.grad(summed, has_aux=True)
    if accumulation_steps == 1:
        grads, sums = grad(trained, batch)
    else:
        # Microbatch i takes every accumulation_steps-th row, so that each device splits the rows it already holds.
        micros = jax.tree.map(
            lambda x: x.reshape(-1, accumulation_steps, *x.shape[1:]).swapaxes(0, 1), batch
        )
        shapes = jax.eval_shape(grad, trained, jax.tree.map(lambda x: x[0], micros))
        zeros = jax.tree.map(_zeros, shapes)

        def add(total: Any, micro: Batch) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, grad(trained, micro)), None

        (grads, sums), _ = jax.lax.scan(add, zeros, micros)
    return grads, sums


def _zeros(shape: jax.ShapeDtypeStruct) -> jax.Array:
    # Sums of many microbatches are float32: bfloat16 would lose the small ones.
    return jnp.zeros(shape.shape, jnp.float32 if shape.dtype == jnp.bfloat16 else shape.dtype)


def make_train_step(
    definition: Definition,
    tx: optax.GradientTransformationExtraArgs,
    accumulation_steps: int = 1,
    layout: Layout = ONE_DEVICE,
) -> Callable[[TrainState, StepInputs, Batch], tuple[TrainState, dict[str, jax.Array]]]:
    """(state, inputs, batch) -> (state, metrics). A step that `check_step` rejects leaves all but its counters as they were.

    metrics: loss (mean nats per target, before the update), means over the targets of `METRICS` that are measured in training
    (accuracy), grad_norm (before clipping), lr (peak x schedule), weight (targets counted), float32 []; of a model with experts
    `Routing.metrics`; with a z-loss logit_z_loss, before its weight; verdict (left out, spike, left out in a row) int32 [3];
    `squares`.

    Args:
        definition, tx: the model, and the chain that turns gradients into updates (`optimizer.build`).
        accumulation_steps: microbatches of a step; the loss stays the mean over all their targets.
        layout: how arrays lie on devices.
    """

    def step(
        state: TrainState, run: StepInputs, batch: Batch
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        if run.drop is not None:
            from mupax.zoo.layers import drop_path

            scales = drop_path.scales(run.drop, state.step, len(batch["targets"]))
            batch = {**batch, "scales": layout.constrain(scales, ("batch", None, None))}
        grads, sums = gradients(
            definition, state.params, run, batch, accumulation_steps, layout=layout
        )
        squares = core_state.squares(grads, definition.specs)
        loss, grad_norm = sums.loss / sums.weight, jnp.sqrt(jnp.sum(squares))
        keep, spike, health = core_state.check_step(state.health, run.limits, loss, grad_norm)
        hyper = run.hyper.at(state.step)

        def update(
            trained: Arrays, opt_state: Any, average: Arrays | None
        ) -> tuple[Arrays, Any, Arrays | None]:
            moved, opt_state = apply_gradients(
                tx,
                grads,
                opt_state,
                trained,
                factors=run.factors,
                hyper=hyper,
                rounding_seed=run.rounding_seed,
                step=state.step,
            )
            if average is not None:
                average = averaged(average, {**state.params, **moved}, run.ema_decay, state.step)
            return moved, opt_state, average

        before = {name: state.params[name] for name in grads}, state.opt_state, state.ema
        trained, opt_state, average = core_state.apply_if(
            keep, update, before, platform=layout.platform
        )
        params = {**state.params, **trained}
        flags = [1 - keep.astype(jnp.int32), spike.astype(jnp.int32), health.in_a_row]
        metrics = {"loss": loss, "grad_norm": grad_norm, "weight": sums.weight}
        metrics |= {name: total / sums.weight for name, total in sums.metrics.items()}
        metrics |= {} if sums.routing is None else sums.routing.metrics(sums.weight)
        metrics |= {} if sums.z is None else {"logit_z_loss": sums.z / sums.weight}
        metrics |= {
            "lr": hyper.peak_lr * hyper.schedule,
            "verdict": jnp.stack(flags),
            "squares": squares,
        }
        return TrainState(state.step + 1, params, opt_state, average, health), metrics

    return step
