"""Arrays that a step reads and writes: training state, batch, step inputs and sums over targets.

The state is created on the devices where it stays.

Losses and gradients that are not finite, and losses that jump, are detected inside the step. A step
whose loss or gradient is not finite leaves the state as it was, whatever the policy, so a bad state
never exists and no device waits for the host. The host reads the verdict some steps later and then
stops, goes on, or rolls back (`train/run/loop.py`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from mupax.presets.roles import ParamSpec
from mupax.train.config.metrics import Metric, MetricError, TokenStatistics
from mupax.train.config.run import FaultsConfig
from mupax.train.core.factors import Factors
from mupax.train.core.optimizer import OptimizerHyperparams
from mupax.train.parallel.sharding import MeshLayout
from mupax.zoo.definition import SHARED_INIT, Arrays, Definition, normals

if TYPE_CHECKING:
    from mupax.zoo.experts.routing import Routing
    from mupax.zoo.layers.drop_path import Drop

SPIKE_WARM_UP = 50
"""Number of finite losses before a loss can count as a spike.

It is also about the number of steps that the running mean looks back.
"""
_LEAST_DEVIATION = 1e-3
"""Smallest standard deviation of the loss, relative to its mean.

The losses of repeated data hardly vary, and would otherwise count as spikes.
"""

Batch = dict[str, jax.Array]
"""Arrays of a batch, by name.

Every batch has:

* inputs: int32 tokens [B, T] or float32 images [B, H, W, C].
* targets: int32 [B, T] or [B].
* weights: float32 of the targets' shape, 0 where a target does not count.

Some batches have labels, float32 [B, classes]: distributions over classes that an image is trained
on. Its target is then the most likely class.

A model reads other arrays by name:

* input_mask: int32 [B, S], 0 at padding, for an encoder-decoder.
* decoder_inputs: int32 [B, T], for an encoder-decoder.
* segments and positions: int32 [B, T], under data.document_mask.
* scales: Factors of residual branches, with drop path (`mupax.zoo.layers.drop_path`).
"""


class Health(NamedTuple):
    """Counters of skipped steps and spikes, and running mean and variance of the loss, all [].

    Every checkpoint has them, so a resumed run counts on.
    """

    skipped: Any = np.int32(0)
    """Number of steps whose update was skipped."""
    in_a_row: Any = np.int32(0)
    """Number of skipped steps since the last one that was applied."""
    spikes: Any = np.int32(0)
    left_out: Any = np.int32(0)
    """Number of batches that rollbacks passed over. The data position is the step plus this."""
    seen: Any = np.int32(0)
    """Number of finite losses in the running mean and variance."""
    mean: Any = np.float32(0)
    variance: Any = np.float32(0)


class Limits(NamedTuple):
    """Limit from which on a loss is a spike, and whether to skip the spike's update.

    Both are inputs of the compiled step, so other values need no new compilation.
    """

    deviations: Any = np.float32(np.inf)
    """Running standard deviations above the running mean from which a loss is a spike."""
    skip_spikes: Any = np.bool_(False)
    """Whether the update of a spike is skipped."""


def check_step(
    health: Health, limits: Limits, loss: jax.Array, grad_norm: jax.Array
) -> tuple[jax.Array, jax.Array, Health]:
    """Return whether to apply the update and whether the loss is a spike, bool [], and counters.

    The update is not applied if loss or gradient norm is not finite, or if the loss is a spike and
    `limits.skip_spikes` is set. A finite loss is a spike if it exceeds the running mean by more
    than `limits.deviations` running standard deviations, and `SPIKE_WARM_UP` losses came before.
    Mean and variance are plain ones at first, exponential ones later (West 1979). A spike enters
    them as if it were at that limit, and a loss that is not finite does not enter them.

    Args:
        loss: Mean over the batch's targets in nats, float32 [].
        grad_norm: Norm of the whole gradient before clipping, float32 [].
    """
    # Both, because a backward pass can overflow where the loss is still finite.
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    deviation = jnp.maximum(jnp.sqrt(health.variance), _LEAST_DEVIATION * jnp.abs(health.mean))
    bound = health.mean + limits.deviations * deviation
    spike = finite & (health.seen >= SPIKE_WARM_UP) & (loss > bound)
    keep = finite & ~(spike & limits.skip_spikes)

    # A spike enters the mean as if it were at the bound: one spike does not widen the bound for the
    # next, and a loss that stays high becomes the new mean.
    rate = 1 / jnp.minimum(health.seen + 1, SPIKE_WARM_UP).astype(jnp.float32)
    away = jnp.where(spike, bound, loss) - health.mean
    after = Health(
        skipped=health.skipped + ~keep,
        in_a_row=jnp.where(keep, 0, health.in_a_row + 1),
        spikes=health.spikes + spike,
        # Only the host rolls back, so a step never changes this counter.
        left_out=health.left_out,
        seen=health.seen + finite,
        mean=jnp.where(finite, health.mean + rate * away, health.mean),
        variance=jnp.where(
            finite, (1 - rate) * (health.variance + rate * away**2), health.variance
        ),
    )
    counters = (jnp.asarray(new, old.dtype) for new, old in zip(after, health, strict=True))
    return keep, spike, Health(*counters)


def apply_if(
    keep: jax.Array, update: Callable[..., tuple], before: tuple, *, platform: str
) -> tuple:
    """Return `update(*before)` if `keep`, else `before`.

    On CPU the update runs only if `keep`. On other platforms it always runs, and its result is
    selected or dropped.

    Args:
        keep: Verdict of `check_step`, bool [].
        update: Function of the parts of the state that returns these parts after the step.
        before: Parts of the state before the step.
    """
    # On CPU a branch writes every array in place. With `where`, the old values that the update
    # reads after its first write are copied, and the update took six times as long.
    if platform == "cpu":
        return jax.lax.cond(keep, update, lambda *state: state, *before)
    # Accelerators fuse `where` into the update. With a branch the host (GPU) or every collective
    # (TPU) would wait for the verdict.
    return jax.tree.map(lambda new, old: jnp.where(keep, new, old), update(*before), before)


def squares(grads: Arrays, specs: Mapping[str, ParamSpec]) -> jax.Array:
    """Return squared gradient norms, float32 [n], one per parameter or, if stacked, per layer.

    Their sum is the squared norm of the whole gradient. The bias of a router that is updated by
    expert loads has 0, because its update is no gradient of the loss.

    Args:
        grads: Gradients of the trained parameters by name, [layers, ...] if layers are stacked.
        specs: Specs in the order of the result. Those without a gradient are passed over.
    """
    sums = []
    # The order is that of `specs`, because `grads` has another order inside a jitted function.
    for name, spec in specs.items():
        if name not in grads:
            continue
        axes = tuple(range(int(spec.stacked), grads[name].ndim))
        # In bfloat16 a sum of equal terms stops growing after 256 of them.
        layer_sums = jnp.sum(jnp.square(grads[name].astype(jnp.float32)), axis=axes)
        layer_sums = jnp.ravel(layer_sums)
        # 0 times a sum that is not finite is not finite either, so `culprit` still finds it.
        sums.append(0 * layer_sums if spec.moved_by_loads else layer_sums)
    # Without the barrier the compiler computes the total norm by a second reduction of every g * g
    # instead of a sum of these sums. g * g then has two readers and is written to memory, which
    # took a third of the time of AdamW on a CPU.
    return jax.lax.optimization_barrier(jnp.concatenate(sums))


def culprit(
    squares: np.ndarray, specs: Mapping[str, ParamSpec], shapes: Mapping[str, Any]
) -> str | None:
    """Return a description of the first parameter with a gradient that is not finite.

    The description has name, role, layer and the number of such parameters. Return `None` if all
    gradients are finite.

    Args:
        squares: Result of the function `squares`.
        specs: Specs of the trained parameters, by name.
        shapes: Arrays or other objects with the `shape` of every parameter, by name.
    """
    entries: list[tuple[str, int | None]] = []
    for name, spec in specs.items():
        if spec.stacked:
            entries += [(name, layer) for layer in range(shapes[name].shape[0])]
        else:
            entries.append((name, None))
    bad = []
    for entry, value in zip(entries, squares, strict=True):
        if not np.isfinite(value):
            bad.append(entry)
    if not bad:
        return None

    name, layer = bad[0]
    role = specs[name].role.value
    position = "" if layer is None else f", layer {layer}"
    description = f"{name} (role {role}{position})"
    num_bad = len({name for name, _ in bad})
    if num_bad == 1:
        return description
    return f"{description}, the first of {num_bad} parameters of {len(specs)}"


class RejectedStep(Exception):
    """Exception about a skipped step that stops the run or causes a rollback (`FaultsConfig`).

    Args:
        culprit: Description of the parameter whose gradient is not finite (`culprit`), if any.
        in_a_row: Number of skipped steps in a row, with this one.

    Attributes:
        what: Text that names what is wrong, the step, its loss and its gradient norm.
    """

    def __init__(
        self, step: int, loss: float, grad_norm: float, culprit: str | None, in_a_row: int
    ) -> None:
        self.step = step
        self.in_a_row = in_a_row
        subject = "the loss" if culprit is None else f"the gradient of {culprit}"
        finite = np.isfinite(loss) and np.isfinite(grad_norm)
        verdict = "is a spike" if finite else "is not finite"
        values = f"loss {loss:g}, gradient norm {grad_norm:g}"
        self.what = f"{subject} {verdict} at step {step} ({values})"
        super().__init__(self.what)

    def message(self, checkpoint: int | None, faults: FaultsConfig) -> str:
        """Return a message for the user in two or three lines.

        The first line says what is wrong with the step, and which checkpoint is the last good one.
        The others say what to do: which flags make training more stable and, if the run stopped at
        its first such step, how to pass over it.

        Args:
            checkpoint: Step of the newest good checkpoint, or `None` if there is none.
            faults: Policy of the run. It decides whether the message is about too many such steps
                in a row, about rollbacks that did not help, or about a single step.
        """
        if checkpoint is None:
            note = "there is no checkpoint yet"
        else:
            note = f"the last good checkpoint is step {checkpoint}"
        first = f"{self.what}. Its update was not applied; {note}."
        advice = (
            "Lower --optimizer.peak-lr (under Muon also --optimizer.adam-lr), "
            "lengthen --optimizer.warmup-steps, or set --optimizer.clip-norm 1."
        )
        if self.in_a_row >= faults.most_in_a_row:
            lines = [f"{self.in_a_row} steps in a row were left out. {first}", advice]
        elif faults.bad_numbers == "rollback":
            rollbacks = f"{faults.most_in_a_row} rollbacks to one checkpoint did not help."
            lines = [f"{rollbacks} {first}", advice]
        else:
            skip = "To pass over single bad batches, add --resume --bad-numbers skip, or rollback."
            lines = [first, skip, advice]
        return "\n".join(lines)


class LossSums(NamedTuple):
    """Sums over the targets that count, float32 []. Those of batches or devices add up (`plus`)."""

    loss: jax.Array
    """Cross-entropy in nats, with the z-loss. It alone has a gradient."""
    weight: jax.Array
    """Sum of the targets' weights."""
    metrics: dict[str, jax.Array]
    """Total of each metric that was asked for, by name."""
    routing: Routing | None = None
    """Routing statistics times the weight, except counts. `None` without experts."""
    z: jax.Array | None = None
    """Squared log-partitions, before their weight in the loss. `None` without a z-loss.

    No gradient flows through them, because the loss already has them.
    """
    attention_logits: dict[str, jax.Array] | None = None
    """Largest attention logits (`ReadoutInputs.attention_logits`). `None` if not measured.

    They are maxima and no sums: `plus` and `over_devices` keep the larger ones.
    """

    def plus(self, other: LossSums) -> LossSums:
        """Return the sums over the targets of both, and the larger of their attention logits."""
        total = jax.tree.map(jnp.add, self._without_logits(), other._without_logits())
        largest = jax.tree.map(jnp.maximum, self.attention_logits, other.attention_logits)
        return total._replace(attention_logits=largest)

    def over_devices(self, mesh_axes: tuple[str, ...]) -> LossSums:
        """Return the sums over the devices along mesh axes, and the largest attention logits.

        Call this inside `shard_map`.
        """
        total = jax.lax.psum(self._without_logits(), mesh_axes)
        if self.attention_logits is None:
            return total
        return total._replace(attention_logits=jax.lax.pmax(self.attention_logits, mesh_axes))

    def _without_logits(self) -> LossSums:
        return self._replace(attention_logits=None)


def sums_of(
    statistics: TokenStatistics,
    weights: jax.Array,
    metrics: Mapping[str, Metric],
    z_loss: jax.Array | None = None,
) -> LossSums:
    """Return the loss, the weights and the metrics summed over targets, each times its weight.

    Args:
        weights: float32 of the targets' shape, 0 where a target does not count.
        metrics: Metrics to sum, by name. Each has a `total`.
        z_loss: Weight of the squared log-partition in the loss, float32 []. `None` adds nothing.

    Raises:
        MetricError: The total of a metric is not a single number.
    """
    chex.assert_equal_shape([x for x in statistics if x is not None] + [weights])
    loss = jnp.sum(statistics.loss * weights)
    z = None
    if z_loss is not None:
        z = jnp.sum(jnp.square(statistics.log_partition) * weights)
        loss = loss + z_loss * z
        z = jax.lax.stop_gradient(z)
    totals = {}
    for name, metric in metrics.items():
        totals[name] = _total(name, metric, statistics, weights)
    return LossSums(loss, jnp.sum(weights), totals, z=z)


def no_sums(metrics: Mapping[str, Metric], z_loss: jax.Array | None) -> LossSums:
    """Return the sums over no targets: zeros with the structure of `sums_of`."""
    zero = jnp.float32(0)
    totals: dict[str, Any] = dict.fromkeys(metrics, zero)
    return LossSums(zero, zero, totals, z=None if z_loss is None else zero)


def reads_ranks(metrics: Mapping[str, Metric]) -> bool:
    """Return whether any metric needs the ranks of targets, which take a pass over all logits."""
    return any(metric.needs_rank for metric in metrics.values())


def count_ranks(
    logits_NV: jax.Array, label_N: jax.Array, column_NV: jax.Array, targets_N: jax.Array
) -> jax.Array:
    """Count the classes that come before each target in the order of argmax, int32 [N].

    N may stand for several dimensions. V may be a part of the classes: counts of parts add up.

    Args:
        label_N: Logits of the targets, also of those that are not among these classes.
        column_NV: Indices of the classes, int32 [V] or [N, V].
        targets_N: Indices of the targets, int32.
    """
    # argmax takes NaN for the largest number, and the first of equal numbers.
    ordered_NV = jnp.where(jnp.isnan(logits_NV), jnp.inf, logits_NV)
    own_N = jnp.where(jnp.isnan(label_N), jnp.inf, label_N)
    own_NV = own_N[..., None]
    target_NV = targets_N[..., None]
    earlier_NV = (column_NV < target_NV) & (ordered_NV >= own_NV)
    # The target itself never counts: a compiler that computes its logit twice may round it twice.
    later_NV = (column_NV > target_NV) & (ordered_NV > own_NV)
    return jnp.sum(earlier_NV | later_NV, axis=-1, dtype=jnp.int32)


def _total(name: str, metric: Metric, statistics: TokenStatistics, weights: jax.Array) -> jax.Array:
    """Return the total of a metric over targets, float32 [].

    Raises:
        MetricError: The metric's `total` returns no scalar.
    """
    assert metric.total is not None, name
    if not metric.needs_rank:
        # The rank that another metric needs is hidden, so that a missing `needs_rank` always fails.
        statistics = statistics._replace(counted_rank=None)
    total = jnp.asarray(metric.total(statistics, weights))
    if total.shape:
        raise MetricError(
            f"the metric {name} is an array of the shape {total.shape}; "
            "return one number, jnp.sum(values * weights)"
        )
    return total.astype(jnp.float32)


class StepInputs(NamedTuple):
    """Inputs of a step besides state and batch.

    They are arguments of the compiled step, so other values need no new compilation.
    """

    factors: Factors
    hyper: OptimizerHyperparams
    reference: Arrays | None = None
    """Initial parameters, whose logits are subtracted. `None` if the output is not centred."""
    ema_decay: Any = None
    """Decay of the parameters' moving average, float32 []. `None` if there is no average."""
    limits: Limits = Limits()
    drop: Drop | None = None
    """Seed and rates of drop path. `None` without drop path."""
    z_loss: Any = None
    """Weight of the squared log-partition in the loss, float32 []. `None` without a z-loss."""
    rounding_seed: Any = None
    """Seed of stochastic rounding (`mupax.train.core.optimizer`), uint32 [].

    `None` if all parameters are float32.
    """
    qk_clip: Any = None
    """Largest attention logit that a head keeps (`mupax.train.core.qk_clip`), float32 [].

    `None` clips nothing.
    """


class TrainState(NamedTuple):
    """Arrays that a step reads and writes, and that a checkpoint holds."""

    step: Any
    """Number of optimizer steps done, int32 []."""
    params: Arrays
    opt_state: Any
    ema: Arrays | None = None
    """Moving average of the parameters, float32 (`averaged`). `None` if there is no average."""
    health: Health = Health()

    @property
    def evaluated(self) -> Arrays:
        """Parameters that an evaluation uses: the moving average if there is one."""
        return self.params if self.ema is None else self.ema

    def arrays(self) -> dict[str, Any]:
        """Return the fields that are not `None`, by name."""
        return {name: array for name, array in self._asdict().items() if array is not None}


def abstract_state(
    definition: Definition,
    tx: optax.GradientTransformation,
    layout: MeshLayout,
    *,
    averaged: bool = False,
    trained: Collection[str] | None = None,
) -> TrainState:
    """Return shapes, dtypes and shardings of the state.

    Moments and the moving average have the sharding of their parameter.

    Args:
        tx: Optimizer (`optimizer.build`).
        averaged: The state has a moving average of the parameters.
        trained: Names of the parameters that the optimizer moves. Default: all.
    """
    replicated = layout.replicated
    shardings = layout.parameters(definition)

    def placed(leaf: Any, sharding: NamedSharding) -> Any:
        if isinstance(leaf, optax.MaskedNode):
            return leaf  # a moment that this parameter does not have
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    params = {}
    for name, leaf in definition.abstract.items():
        params[name] = placed(leaf, shardings[name])
    trained_params = _only_trained(params, trained)
    # Written out, because `jax.jit(tx.init)` of sharded parameters silently replicates the moments.
    opt_state = optax.tree.map_params(
        tx,
        lambda leaf, param: placed(leaf, param.sharding),
        jax.eval_shape(tx.init, trained_params),
        trained_params,
        transform_non_params=lambda leaf: placed(leaf, replicated),
        is_leaf=lambda node: isinstance(node, optax.MaskedNode),
    )
    ema = None
    if averaged:
        ema = {}
        for name, param in params.items():
            ema[name] = jax.ShapeDtypeStruct(param.shape, jnp.float32, sharding=param.sharding)
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated)
    health = Health(*(placed(counter, replicated) for counter in Health()))
    return TrainState(step, params, opt_state, ema, health)


def shardings_of(abstract: TrainState) -> TrainState:
    """Return the sharding of every leaf, with the structure of the state."""
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)


class Initializer:
    """Jitted initialization of parameters and states, with their final shardings.

    The bits do not depend on the mesh, and one program serves all seeds.

    Args:
        tx: Optimizer (`optimizer.build`).
        abstract: Shapes, dtypes and shardings of the state.
        trained: Names of the parameters that the optimizer moves. Default: all.
    """

    def __init__(
        self,
        definition: Definition,
        tx: optax.GradientTransformation,
        abstract: TrainState,
        trained: Collection[str] | None = None,
    ) -> None:
        shardings = shardings_of(abstract)
        mesh = abstract.step.sharding.mesh
        device = mesh.devices.flat[0]

        # On a CPU mesh parameters are initialized unsplit and then split. Since jax 0.12 the
        # numbers that a CPU's vector instructions leave over at the end of a row may differ in the
        # last bit, and which numbers are left over depends on how the row is split.
        self._split = device.platform == "cpu"
        initial_shardings = shardings.params
        if self._split:
            initial_shardings = NamedSharding(mesh, PartitionSpec())
        # Always under jit: an eager initialization differs in the last bits.
        self._params = jax.jit(
            functools.partial(definition.initialize, draw=_draw(device)),
            out_shardings=initial_shardings,
        )
        self._spread = jax.jit(lambda params: params, out_shardings=shardings.params)

        def state_of(params: Arrays) -> TrainState:
            ema = None if abstract.ema is None else average_of(params)
            opt_state = tx.init(_only_trained(params, trained))
            return TrainState(jnp.zeros([], jnp.int32), params, opt_state, ema)

        self.state_of = state_of
        """Function params -> state at step 0, without jit, so that it can be transformed."""
        self.started = jax.jit(state_of, out_shardings=shardings, donate_argnums=0)
        """Jitted function params -> state at step 0. The parameters are donated."""

    def params(self, seed: int, stds: dict[str, np.ndarray]) -> Arrays:
        """Return initial parameters on the mesh.

        A model with a centred output gets them as the reference whose logits are subtracted.

        Args:
            seed: Seed from 0 to 2**32 - 1.
            stds: Standard deviations by name, float32 [] or [layers] (`factors.init_stds`).
        """
        params = self._params(np.uint32(seed), stds)
        return self._spread(params) if self._split else params

    def state(self, seed: int, stds: dict[str, np.ndarray]) -> TrainState:
        """Return a fresh state on the mesh, at step 0.

        Args:
            seed: Seed from 0 to 2**32 - 1.
            stds: Standard deviations by name, float32 [] or [layers] (`factors.init_stds`).
        """
        return self.started(self.params(seed, stds))


def fresh_params(
    definition: Definition, seed: int, stds: dict[str, np.ndarray], names: set[str]
) -> dict[str, np.ndarray]:
    """Return some of the initial parameters on the host, the same numbers in every process.

    Args:
        seed: Seed from 0 to 2**32 - 1.
        stds: Standard deviations by name, float32 [] or [layers] (`factors.init_stds`).
        names: Names of the parameters to initialize. The others take no memory.
    """
    # Sorted, because a set has another order in each process, and all must trace one program.
    specs = {name: definition.specs[name] for name in sorted(names)}
    abstract = {name: definition.abstract[name] for name in sorted(names)}
    partial_model = dataclasses.replace(definition, specs=specs, abstract=abstract)
    device = jax.local_devices()[0]
    with jax.default_device(device):
        initialize = jax.jit(functools.partial(partial_model.initialize, draw=_draw(device)))
        # Key parameters that copy the draw of a query have a second entry, under the prefix
        # `SHARED_INIT`.
        kept_stds = {}
        for name, std in stds.items():
            if name.removeprefix(SHARED_INIT) in names:
                kept_stds[name] = std
        return jax.device_get(initialize(np.uint32(seed), kept_stds))


def _draw(device: Any) -> Any:
    """Return the argument `draw` of `Definition.initialize` for a device.

    It is `normals`, which draws all numbers in one loop, on CPU, and `None` on other platforms.
    """
    return normals if device.platform == "cpu" else None


def _only_trained(params: Arrays, trained: Collection[str] | None) -> Arrays:
    """Return the parameters named in `trained`, or all parameters if it is `None`."""
    if trained is None:
        return params
    return {name: param for name, param in params.items() if name in trained}


def average_of(params: Arrays) -> Arrays:
    """Return the moving average before the first step: a copy of the parameters in float32."""
    # The average is float32, because bfloat16 would round its small moves away.
    copies = {}
    for name, w in params.items():
        copies[name] = jnp.array(w, jnp.float32, copy=True)
    return copies


def averaged(average: Arrays, params: Arrays, decay: jax.Array, step: jax.Array) -> Arrays:
    """Return the exponential moving average after a step (Polyak and Juditsky 1992).

        average + (1 - d_t) (params - average),    d_t = min(decay, (1 + t) / (10 + t))

    The decay warms up as in TensorFlow's `ExponentialMovingAverage(num_updates)` and diffusers'
    `EMAModel`, so that the average forgets where it starts. After t steps the average looks back
    about a tenth of the run so far, until `decay` is the smaller of the two.

    Args:
        average: Average before the step, float32, by name.
        params: Parameters after the step, by name, of which those in `average` are read.
        decay: float32 [].
        step: Number of steps done before this one, t, int32 [].
    """
    rest = 1 - jnp.minimum(decay, (1.0 + step) / (10.0 + step))
    # In this form the average of a parameter that never moves is the parameter, to the last bit.
    moved = {}
    for name, old in average.items():
        moved[name] = old + rest * (params[name] - old)
    return moved
