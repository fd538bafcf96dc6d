"""Training step as a pure function over plain dicts, and its form on a mesh.

The step computes loss and gradients and applies the update.

`train/core/program.py` compiles one executable per run for training and one for evaluation. The
arrays of a batch are described at `mupax.train.core.state.Batch`.

Shapes: B batch, T positions, V vocabulary or classes.
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
    from mupax.zoo.layers.drop_path import Drop
    from mupax.zoo.manual import ManualFsdpLayout

_NOT_CONTEXT = ("inputs", "targets", "weights", "labels")
"""Arrays of a batch that are not passed to the model by name."""


def free_layout_format(leaf: jax.ShapeDtypeStruct) -> Format:
    """Return a format with the leaf's sharding and a memory layout that the compiler chooses."""
    return Format(MemoryLayout.AUTO, leaf.sharding)


def trace_train_step(
    definition: Definition,
    tx: optax.GradientTransformationExtraArgs,
    abstract: TrainState,
    layout: MeshLayout,
    step_inputs: StepInputs,
    batch: Batch,
    accumulation_steps: int = 1,
    *,
    free_layout: bool = False,
    measure_logits: bool = False,
) -> jax.stages.Traced:
    """Trace the training step of `make_train_step` for a mesh, without compiling it.

    The state is donated and keeps its shardings. The batch is sharded as the layout says. Step
    inputs and metrics are replicated. Only the initial parameters, which the step inputs hold if
    the model's output is centred, are sharded as parameters.

    Args:
        tx: Optimizer of the parameters that are trained (`optimizer.build`).
        abstract: Shapes, dtypes and shardings of the state (`state.abstract_state`).
        layout: Layout of arrays on the mesh that the step is compiled for.
        batch: Arrays of the global batch, or their shapes.
        accumulation_steps: Number of microbatches per step. It divides the batch size.
        free_layout: Let the compiler choose the memory layout of the state. The attribute
            `input_formats` of the compiled step then has the layouts.
        measure_logits: Also measure the largest attention logit (`make_train_step`).
    """
    if free_layout:
        state_formats = jax.tree.map(free_layout_format, abstract)
        state_shapes = _unplaced(abstract)
    else:
        state_formats = shardings_of(abstract)
        state_shapes = abstract

    # Factors are arguments of the program, not constants, so every preset shares one executable.
    input_shardings = _shardings_of_inputs(step_inputs, abstract, layout)
    jitted = jax.jit(
        make_train_step(definition, tx, accumulation_steps, layout, measure_logits=measure_logits),
        in_shardings=(state_formats, input_shardings, layout.batch(batch)),
        out_shardings=(state_formats, layout.replicated),
        # The new state takes the memory of the old one, so a step holds one state and not two.
        donate_argnums=0,
    )
    return jitted.trace(state_shapes, step_inputs, batch)


def compile_eval_step(
    definition: Definition,
    abstract: TrainState,
    layout: MeshLayout,
    step_inputs: StepInputs,
    batch: Batch,
    formats: TrainState | None = None,
) -> jax.stages.Compiled:
    """Compile the evaluation step, (params, step_inputs, batch) -> `LossSums`.

    The step takes the parameters that `TrainState.evaluated` returns. The sums cover the global
    batch, include the metrics of evaluations, leave out the z-loss, and are replicated.

    Args:
        abstract: Shapes, dtypes and shardings of the state.
        layout: Layout of arrays on the mesh that the step is compiled for.
        batch: Arrays of the global batch, or their shapes.
        formats: Memory layouts in which the training step takes its state. `None` stands for the
            default layouts.
    """
    if formats is None:
        param_formats = shardings_of(abstract).evaluated
        param_shapes = abstract.evaluated
    else:
        param_formats = formats.evaluated
        param_shapes = _unplaced(abstract.evaluated)

    def evaluate(params: Arrays, step_inputs: StepInputs, batch: Batch) -> LossSums:
        metrics = on_devices(training=False)
        return batch_sums(definition, params, step_inputs, batch, metrics=metrics, layout=layout)

    input_shardings = _shardings_of_inputs(step_inputs, abstract, layout)
    jitted = jax.jit(
        evaluate,
        in_shardings=(param_formats, input_shardings, layout.batch(batch)),
        out_shardings=layout.replicated,
    )
    return jitted.lower(param_shapes, step_inputs, batch).compile()


def compile_logits(
    definition: Definition,
    abstract: TrainState,
    layout: MeshLayout,
    step_inputs: StepInputs,
    batch: Batch,
) -> jax.stages.Compiled:
    """Compile a function (params, step_inputs, batch) -> logits, float32 [B, classes].

    The model gets the array `inputs` of the batch and no other. It has the parameters that
    `TrainState.evaluated` returns. The logits are replicated on all devices.

    Args:
        abstract: Shapes, dtypes and shardings of the state.
        layout: Layout of arrays on the mesh that the function is compiled for.
        batch: Arrays of the global batch, or their shapes.
    """

    def logits(params: Arrays, step_inputs: StepInputs, batch: Batch) -> jax.Array:
        return logits_of(definition, params, step_inputs, batch["inputs"], layout=layout)

    param_shardings = shardings_of(abstract).evaluated
    input_shardings = _shardings_of_inputs(step_inputs, abstract, layout)
    jitted = jax.jit(
        logits,
        in_shardings=(param_shardings, input_shardings, layout.batch(batch)),
        out_shardings=layout.replicated,
    )
    return jitted.lower(abstract.evaluated, step_inputs, batch).compile()


def _shardings_of_inputs(
    step_inputs: StepInputs, abstract: TrainState, layout: MeshLayout
) -> StepInputs:
    """Return the sharding of every step input.

    All inputs are replicated, except the initial parameters (`reference`), which a model with a
    centred output needs. They are sharded as the parameters.
    """
    without_reference = step_inputs._replace(reference=None)
    shardings: Any = jax.tree.map(lambda _: layout.replicated, without_reference)
    if step_inputs.reference is None:
        return shardings
    return shardings._replace(reference=shardings_of(abstract).params)


def _unplaced(abstract: Any) -> Any:
    """Return the tree with each leaf replaced by its shape and dtype, without a sharding."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), abstract)


def logits_of(
    definition: Definition,
    params: Arrays,
    step_inputs: StepInputs,
    inputs: jax.Array,
    *,
    layout: Layout = ONE_DEVICE,
    **context: jax.Array,
) -> jax.Array:
    """Return logits, float32 [B, T, V] or [B, V].

    With a centred output, the logits of the reference, the initial parameters, are subtracted. No
    gradient flows through them.

    Args:
        step_inputs: Has the multipliers and the reference parameters.
        **context: Other arrays of a batch that the model reads, by name.
    """
    multiplier = step_inputs.factors.multiplier
    forward = step_inputs.factors.forward
    model = definition.model(params, multiplier, forward, layout=layout)
    logits = model(inputs, **context)
    if step_inputs.reference is None:
        return logits

    reference_model = definition.model(step_inputs.reference, multiplier, forward, layout=layout)
    reference_logits = reference_model(inputs, **context)
    return logits - jax.lax.stop_gradient(reference_logits)


def batch_sums(
    definition: Definition,
    params: Arrays,
    step_inputs: StepInputs,
    batch: Batch,
    *,
    z_loss: jax.Array | None = None,
    metrics: Mapping[str, Metric] = NO_METRICS,
    measure_logits: bool = False,
    layout: Layout = ONE_DEVICE,
) -> LossSums:
    """Return the summed cross-entropy (nats) of a batch or microbatch, and sums of metrics.

    With a centred output, the logits of the reference, the initial parameters, are subtracted
    first. For a model with experts the sums include routing statistics. Under manual FSDP they
    cover the examples of this device only. If the batch has `labels`, they replace the targets in
    the loss.

    Args:
        params: All parameters as stored, frozen ones too.
        step_inputs: Has the multipliers and the reference parameters.
        z_loss: Weight of the squared log-partition (`cross_entropy`), float32 []. `None` leaves the
            z-loss out, as evaluations do.
        metrics: Metrics to sum in addition to the loss, by name. Each has a `total`.
        measure_logits: `True` fills the sums' `attention_logits`. The model's `readout_inputs`
            must then take this argument too. A model that has only logits ignores it.
    """
    inputs = batch["inputs"]
    targets = batch["targets"]
    weights = batch["weights"]
    labels = batch.get("labels")
    context = {key: array for key, array in batch.items() if key not in _NOT_CONTEXT}
    chex.assert_equal_shape([targets, weights])

    multiplier = step_inputs.factors.multiplier
    forward = step_inputs.factors.forward
    model = definition.model(params, multiplier, forward, layout=layout)
    read = readout_method(model)
    if read is None:
        # A model from outside the zoo may have logits only.
        logits = logits_of(definition, params, step_inputs, inputs, layout=layout, **context)
        chex.assert_shape(logits, (*targets.shape, None))
        return cross_entropy_from_logits(logits, targets, weights, labels, z_loss, metrics)

    reference = None
    if step_inputs.reference is not None:
        # Drop path ("scales") does not apply to the reference.
        reference_context = dict(context)
        reference_context.pop("scales", None)
        reference_model = definition.model(
            step_inputs.reference, multiplier, forward, layout=layout
        )
        read_reference = readout_method(reference_model)
        assert read_reference is not None  # both models are of one class
        reference = read_reference(inputs, **reference_context)
        # Nothing of the reference is trained, so the load of its experts has no penalty.
        reference = reference._replace(routing=None)

    if measure_logits:
        readout_inputs = read(inputs, measure_logits=True, **context)
    else:
        readout_inputs = read(inputs, **context)
    routing = readout_inputs.routing
    sums = cross_entropy(
        readout_inputs._replace(routing=None, attention_logits=None),
        targets,
        weights,
        how=model.config.compute.cross_entropy,
        reference=reference,
        labels=labels,
        z_loss=z_loss,
        metrics=metrics,
        layout=layout,
    )
    sums = sums._replace(attention_logits=readout_inputs.attention_logits)
    if routing is None:
        return sums

    # Under manual FSDP, routing statistics are means over this device's tokens, while `sums.weight`
    # counts its targets. Devices have equally many tokens, but not equally many targets, so all use
    # the mean weight.
    mean_weight = layout.mean(sums.weight)
    return sums._replace(routing=routing.weighed(mean_weight))


def gradients(
    definition: Definition,
    params: Arrays,
    step_inputs: StepInputs,
    batch: Batch,
    accumulation_steps: int,
    *,
    measure_logits: bool = False,
    layout: Layout = ONE_DEVICE,
) -> tuple[Arrays, LossSums]:
    """Return gradients of the mean loss over the batch's targets, and the sums over the batch.

    The differentiated loss includes the z-loss and the balance losses of experts. The `loss` of the
    sums includes neither.

    Args:
        params: All parameters as stored. Gradients are taken for those with a learning rate
            (`step_inputs.factors.lr`).
        step_inputs: Has the multipliers, the z-loss weight and, for a model with a centred output,
            the reference (initial) parameters.
        accumulation_steps: Number of microbatches, which run one after another. It divides the
            batch size.
        measure_logits: `True` fills the sums' `attention_logits`.
    """
    manual_layout = _manual_layout(definition, layout)
    if manual_layout is None:
        grads, sums = _summed_gradients(
            definition, params, step_inputs, batch, accumulation_steps, measure_logits, layout
        )
    else:
        grads, sums = _sharded_gradients(
            definition,
            params,
            step_inputs,
            batch,
            accumulation_steps,
            measure_logits,
            manual_layout,
        )
    # Divided once at the end by the weight of all targets, so that the gradients are the same
    # however the batch is split.
    mean_grads = jax.tree.map(lambda grad: (grad / sums.weight).astype(grad.dtype), grads)
    return mean_grads, sums


def _manual_layout(definition: Definition, layout: Layout) -> ManualFsdpLayout | None:
    """Return the layout for manual FSDP, or `None` if the compiler is to shard the gradients.

    It is `None` if the devices that split the batch split no parameter, or if manual FSDP does not
    support the layout or the model (`mupax.zoo.manual.inside`).
    """
    batch_axes = set(layout.mesh_axes("batch"))
    if not any(batch_axes.intersection(layout.mesh_axes(axis)) for axis in definition.sizes):
        return None

    # Imported only here, because runs without FSDP do not need it.
    from mupax.zoo import manual

    return manual.inside(layout, definition)


def _sharded_gradients(
    definition: Definition,
    params: Arrays,
    step_inputs: StepInputs,
    batch: Batch,
    accumulation_steps: int,
    measure_logits: bool,
    layout: ManualFsdpLayout,
) -> tuple[Arrays, LossSums]:
    """Return the gradients and sums of `_summed_gradients` over all devices, under manual FSDP.

    Inside `shard_map`, a device has its shard of every parameter and its examples of the batch.
    """
    replicated = PartitionSpec()
    by_example = PartitionSpec(layout.batch)
    param_specs = {}
    for name, spec in definition.specs.items():
        param_specs[name] = layout.spec(spec.axes)
    # Frozen parameters have no learning rate (`Factors.moving`).
    trained_names = step_inputs.factors.lr
    grad_specs = {}
    for name, spec in param_specs.items():
        if name in trained_names:
            grad_specs[name] = spec
    reference_specs = param_specs if step_inputs.reference else replicated

    def on_device(
        params: Arrays, factors: Factors, reference: Arrays | None, z_loss: Any, batch: Batch
    ) -> tuple[Arrays, LossSums]:
        local_inputs = step_inputs._replace(factors=factors, reference=reference, z_loss=z_loss)
        grads, sums = _summed_gradients(
            definition, params, local_inputs, batch, accumulation_steps, measure_logits, layout
        )
        # Gradients are summed over devices already, each where its parameter was gathered.
        return grads, sums.over_devices(layout.batch)

    on_all_devices = layout.shard_mapped(
        on_device,
        (param_specs, replicated, reference_specs, replicated, by_example),
        (grad_specs, replicated),
    )
    return on_all_devices(
        params, step_inputs.factors, step_inputs.reference, step_inputs.z_loss, batch
    )


def _summed_gradients(
    definition: Definition,
    params: Arrays,
    step_inputs: StepInputs,
    batch: Batch,
    accumulation_steps: int,
    measure_logits: bool,
    layout: Layout,
) -> tuple[Arrays, LossSums]:
    """Return gradients of the summed loss, not yet divided by the targets' weight, and the sums.

    Only trained parameters have gradients. Microbatches run one after another, and their gradients
    and sums are added. The differentiated loss includes the z-loss and the balance losses of
    experts, but the `loss` of the sums does not. Under a `ManualFsdpLayout` the gradients are
    already summed over devices, and the sums cover this device's examples only. The arguments are
    those of `gradients`.
    """
    trained = step_inputs.factors.lr
    trained_params = {name: param for name, param in params.items() if name in trained}
    metrics = on_devices(training=True)

    def objective(trained_params: Arrays, microbatch: Batch) -> tuple[jax.Array, LossSums]:
        # `jax.grad` differentiates its first argument: frozen parameters must not be in it.
        all_params = {**params, **trained_params}
        sums = batch_sums(
            definition,
            all_params,
            step_inputs,
            microbatch,
            z_loss=step_inputs.z_loss,
            metrics=metrics,
            measure_logits=measure_logits,
            layout=layout,
        )
        total = sums.loss
        if sums.routing is not None:
            # Balance losses of experts are trained on, but are no part of the reported
            # cross-entropy.
            total = total + sums.routing.penalty
        if sums.z is not None:
            # Train on the z-loss, but report the loss without it.
            sums = sums._replace(loss=sums.loss - step_inputs.z_loss * sums.z)
        return total, sums

    grad = jax.grad(objective, has_aux=True)
    if accumulation_steps == 1:
        return grad(trained_params, batch)

    # Microbatch i has every accumulation_steps-th row, starting at row i. Each device can then cut
    # the rows that it already holds.
    def split_rows(array: jax.Array) -> jax.Array:
        return array.reshape(-1, accumulation_steps, *array.shape[1:]).swapaxes(0, 1)

    def add_microbatch(
        total: tuple[Arrays, LossSums], microbatch: Batch
    ) -> tuple[tuple[Arrays, LossSums], None]:
        total_grads, total_sums = total
        grads, sums = grad(trained_params, microbatch)
        total_grads = jax.tree.map(jnp.add, total_grads, grads)
        return (total_grads, total_sums.plus(sums)), None

    microbatches = jax.tree.map(split_rows, batch)
    # Only shapes: the scan needs the structure of its carry before any microbatch has run.
    first_microbatch = jax.tree.map(lambda array: array[0], microbatches)
    result_shapes = jax.eval_shape(grad, trained_params, first_microbatch)
    zero_grads, zero_sums = jax.tree.map(_zeros, result_shapes)
    # The maximum of no logits is -inf.
    no_logits = jax.tree.map(lambda zero: zero - jnp.inf, zero_sums.attention_logits)
    zero_sums = zero_sums._replace(attention_logits=no_logits)
    (grads, sums), _ = jax.lax.scan(add_microbatch, (zero_grads, zero_sums), microbatches)
    return grads, sums


def _zeros(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Return zeros to which the results of microbatches are added.

    They are float32 in place of bfloat16, and otherwise have the dtype of the result.

    Args:
        shape: Shape and dtype of a result of one microbatch.
    """
    # Sums of many microbatches are float32: in bfloat16 a large sum would absorb small gradients.
    dtype = jnp.float32 if shape.dtype == jnp.bfloat16 else shape.dtype
    return jnp.zeros(shape.shape, dtype)


def make_train_step(
    definition: Definition,
    tx: optax.GradientTransformationExtraArgs,
    accumulation_steps: int = 1,
    layout: Layout = ONE_DEVICE,
    *,
    measure_logits: bool = False,
) -> Callable[[TrainState, StepInputs, Batch], tuple[TrainState, dict[str, jax.Array]]]:
    """Return the training step, a function (state, step_inputs, batch) -> (state, metrics).

    The function is not jitted. A step that `check_step` rejects changes only `step` and `health` of
    the state.

    Metrics, float32 [] unless stated otherwise:

    * loss: Mean cross-entropy per target in nats, before the update and without the z-loss.
    * grad_norm: Global norm of the gradient, before clipping.
    * weight: Sum of the targets' weights.
    * Means over the targets of those `METRICS` that are measured in training (accuracy).
    * `Routing.metrics`, for a model with experts.
    * logit_z_loss: Mean squared log-partition, if there is a z-loss.
    * attention_logit_max: Largest attention logit over batch, heads and layers, before the update,
      if it is measured (`mupax.zoo.layers.kernels`).
    * lr: Peak learning rate times the schedule.
    * verdict: int32 [3]: whether the update was skipped, whether the loss is a spike, and the
      number of skipped updates in a row.
    * squares: Squared gradient norms, one per parameter or layer, [n] (`state.squares`).

    Args:
        tx: Optimizer (`optimizer.build`).
        accumulation_steps: Number of microbatches per step. It divides the batch size. The loss is
            the mean over the targets of all microbatches.
        measure_logits: Also measure attention_logit_max. It is always measured if
            `step_inputs.qk_clip` is given.
    """

    def step(
        state: TrainState, step_inputs: StepInputs, batch: Batch
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        if step_inputs.drop is not None:
            batch = _with_drop_path(batch, step_inputs.drop, state.step, layout)
        grads, sums = gradients(
            definition,
            state.params,
            step_inputs,
            batch,
            accumulation_steps,
            measure_logits=measure_logits or step_inputs.qk_clip is not None,
            layout=layout,
        )
        # One pass serves the norm and the search for the parameter that is not finite.
        squares = core_state.squares(grads, definition.specs)
        loss = sums.loss / sums.weight
        grad_norm = jnp.sqrt(jnp.sum(squares))
        keep, spike, health = core_state.check_step(
            state.health, step_inputs.limits, loss, grad_norm
        )
        hyper = step_inputs.hyper.at(state.step)
        param_scales = None
        if step_inputs.qk_clip is not None:
            # Imported only here, because most runs do not clip.
            from mupax.train.core import qk_clip

            assert sums.attention_logits is not None  # measured above
            param_scales = qk_clip.param_scales(
                sums.attention_logits, step_inputs.qk_clip, definition
            )

        def update(
            params: Arrays, opt_state: Any, ema: Arrays | None
        ) -> tuple[Arrays, Any, Arrays | None]:
            new_params, opt_state = apply_gradients(
                tx,
                grads,
                opt_state,
                params,
                factors=step_inputs.factors,
                hyper=hyper,
                rounding_seed=step_inputs.rounding_seed,
                step=state.step,
                param_scales=param_scales,
                layout=layout,
            )
            if ema is not None:
                all_params = {**state.params, **new_params}
                ema = averaged(ema, all_params, step_inputs.ema_decay, state.step)
            return new_params, opt_state, ema

        trained_params = {name: state.params[name] for name in grads}
        before = (trained_params, state.opt_state, state.ema)
        trained_params, opt_state, ema = core_state.apply_if(
            keep, update, before, platform=layout.platform
        )

        skipped = 1 - keep.astype(jnp.int32)
        spiked = spike.astype(jnp.int32)
        metrics = {"loss": loss, "grad_norm": grad_norm, **_metrics_of_sums(sums)}
        metrics["lr"] = hyper.peak_lr * hyper.schedule
        metrics["verdict"] = jnp.stack([skipped, spiked, health.in_a_row])
        metrics["squares"] = squares

        params = {**state.params, **trained_params}
        # A rejected step counts too: its batch is used up, and the schedule goes on.
        new_state = TrainState(state.step + 1, params, opt_state, ema, health)
        return new_state, metrics

    return step


def _with_drop_path(batch: Batch, drop: Drop, step: jax.Array, layout: Layout) -> Batch:
    """Return the batch with "scales" added: a factor for every residual branch of every example.

    A factor is 0 for a branch that is dropped, otherwise 1 / (1 - rate). Seed and step alone
    determine which are dropped.
    """
    # Imported only here, because most runs have no drop path.
    from mupax.zoo.layers import drop_path

    batch_size = len(batch["targets"])
    # A function of seed and step alone, so that a resumed run drops the same branches.
    scales = drop_path.scales(drop, step, batch_size)
    return {**batch, "scales": layout.constrain(scales, ("batch", None, None))}


def _metrics_of_sums(sums: LossSums) -> dict[str, jax.Array]:
    """Return the metrics of a step that follow from its sums, except the loss, by name.

    They are the targets' weight, means of the metrics and, if the sums have them, routing metrics,
    the mean squared log-partition and the largest attention logit.
    """
    metrics = {"weight": sums.weight}
    for name, total in sums.metrics.items():
        metrics[name] = total / sums.weight
    if sums.routing is not None:
        metrics |= sums.routing.metrics(sums.weight)
    if sums.z is not None:
        metrics["logit_z_loss"] = sums.z / sums.weight
    if sums.attention_logits is not None:
        largest = [jnp.max(logits) for logits in sums.attention_logits.values()]
        metrics["attention_logit_max"] = jnp.max(jnp.stack(largest))
    return metrics
