"""What a step reads and writes: the training state, a batch, numbers, sums over targets. The state is born on the devices it will live on.

Losses and gradients that are no numbers, and losses that jump, are judged on the devices, inside the step.

A step whose loss or gradient is not finite leaves the state as it was, whatever the policy: a bad state never exists, and
nobody waits for a verdict. The host reads it some steps later and then stops, goes on, or goes back (`train/run/loop.py`).
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
"""Finite losses seen before one can count as a spike; also about how many the running mean looks back on."""
_LEAST_DEVIATION = 1e-3
"""Standard deviation of the loss, relative to its mean, below which it is taken for this: repeated data hardly vary."""

Batch = dict[str, jax.Array]
"""`inputs`, int32 tokens [B, T] or float32 images [B, H, W, C]; `targets`, int32 [B, T] or [B]; and `weights` of the same shape,
float32, 0 where a target does not count. `labels`, float32 [B, classes], are what an image is trained on where that is no one
class; its target is then the largest of them. What else there is a model reads beside its inputs, by name: of an encoder-decoder
`input_mask` int32 [B, S], 0 at padding, and `decoder_inputs` int32 [B, T]; under data.document_mask `segments`
and `positions`, int32 [B, T]; where branches are dropped, `scales` (`mupax.zoo.layers.drop_path`)."""


class Health(NamedTuple):
    """Counters of the state, all []. They are in every checkpoint, so that a resumed run counts as the whole one does."""

    skipped: Any = np.int32(0)
    """Steps whose update was left out."""
    in_a_row: Any = np.int32(0)
    """How many of them came last, one after another."""
    spikes: Any = np.int32(0)
    left_out: Any = np.int32(0)
    """Batches passed over by rollbacks: the data position is the step plus this."""
    seen: Any = np.int32(0)
    """Finite losses that are in the running mean and variance."""
    mean: Any = np.float32(0)
    variance: Any = np.float32(0)


class Limits(NamedTuple):
    """What counts as a spike and what becomes of it: numbers of the step, not its program."""

    deviations: Any = np.float32(np.inf)
    skip_spikes: Any = np.bool_(False)


def check_step(
    health: Health, limits: Limits, loss: jax.Array, grad_norm: jax.Array
) -> tuple[jax.Array, jax.Array, Health]:
    """Return whether a step's update is applied (bool []), whether its loss is a spike (bool []), and the counters after it.

    A loss is a spike where it exceeds the running mean by so many running standard deviations. Mean and variance are
    plain ones at first, later exponential (West 1979), and see a spike as if it were at the bound: one does not widen the
    bound for the next, and a loss that stays high becomes the new mean.

    Args:
        health: the counters before the step.
        limits: how many deviations a spike is above the mean, and whether its update is left out.
        loss: mean over the batch's targets, nats, float32 [].
        grad_norm: of the whole gradient, before clipping, float32 [].
    """
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    deviation = jnp.maximum(jnp.sqrt(health.variance), _LEAST_DEVIATION * jnp.abs(health.mean))
    bound = health.mean + limits.deviations * deviation
    spike = finite & (health.seen >= SPIKE_WARM_UP) & (loss > bound)
    keep = finite & ~(spike & limits.skip_spikes)

    rate = 1 / jnp.minimum(health.seen + 1, SPIKE_WARM_UP).astype(jnp.float32)
    away = jnp.where(spike, bound, loss) - health.mean
    after = Health(
        skipped=health.skipped + ~keep,
        in_a_row=jnp.where(keep, 0, health.in_a_row + 1),
        spikes=health.spikes + spike,
        left_out=health.left_out,
        seen=health.seen + finite,
        mean=jnp.where(finite, health.mean + rate * away, health.mean),
        variance=jnp.where(
            finite, (1 - rate) * (health.variance + rate * away**2), health.variance
        ),
    )
    return (
        keep,
        spike,
        Health(*(jnp.asarray(new, old.dtype) for new, old in zip(after, health, strict=True))),
    )


def apply_if(
    keep: jax.Array, update: Callable[..., tuple], before: tuple, *, platform: str
) -> tuple:
    """Return `update(*before)` if a step is kept, else `before`; the same bits either way it is done.

    On CPU by a branch, which writes every array where it lay. Chosen there element by element, what an update reads of the
    old state after its first write is copied, and it took six times as long. Accelerators fuse the choice into the
    update, and a branch would have the host (GPU) or every collective (TPU) wait for the verdict.

    Args:
        keep: the verdict, bool [].
        update: the parts of the state to the same after the step.
        before: those parts.
        platform: that is compiled for.
    """
    if platform == "cpu":
        return jax.lax.cond(keep, update, lambda *same: same, *before)
    return jax.tree.map(lambda new, old: jnp.where(keep, new, old), update(*before), before)


def squares(grads: Arrays, specs: Mapping[str, ParamSpec]) -> jax.Array:
    """Sums of squared gradients, float32 [n]: one of every parameter, one of every layer where layers are stacked.

    Their sum is the squared norm of the whole gradient, so that they cost nothing beside it. What moves by loads is 0 in it.

    Args:
        grads: of the parameters that are trained, by name; [layers, ...] where layers are stacked.
        specs: declarations, in the order that the sums have; those without a gradient are passed over.
    """
    sums = []
    for name in [
        name for name in specs if name in grads
    ]:  # `grads` has another order inside a jitted function
        axes = tuple(range(int(specs[name].stacked), grads[name].ndim))
        of_layers = jnp.ravel(jnp.sum(jnp.square(grads[name].astype(jnp.float32)), axis=axes))
        sums.append(
            0 * of_layers if specs[name].moved_by_loads else of_layers
        )  # not finite where it is not
    # Summed in sight of the compiler, they would be summed anew from every g * g, which would then have two readers and be
    # written to memory whole: a third of AdamW's time on a CPU.
    return jax.lax.optimization_barrier(jnp.concatenate(sums))


def culprit(
    squares: np.ndarray, specs: Mapping[str, ParamSpec], shapes: Mapping[str, Any]
) -> str | None:
    """The first parameter whose gradient is not finite, in words; None where every one is.

    Args:
        squares: what `squares` gave.
        specs: declarations of the parameters that are trained, by name.
        shapes: anything with the parameters' shapes, by name.
    """
    places = [
        (name, layer)
        for name, spec in specs.items()
        for layer in (range(shapes[name].shape[0]) if spec.stacked else (None,))
    ]
    bad = [place for place, value in zip(places, squares, strict=True) if not np.isfinite(value)]
    if not bad:
        return None
    name, layer = bad[0]
    where = f"{name} (role {specs[name].role.value}" + (
        ")" if layer is None else f", layer {layer})"
    )
    count = len({name for name, _ in bad})
    return where if count == 1 else f"{where}, the first of {count} parameters of {len(specs)}"


class RejectedStep(Exception):
    """A step that ends the run, or sends it back, under its policy."""

    def __init__(
        self, step: int, loss: float, grad_norm: float, culprit: str | None, in_a_row: int
    ) -> None:
        self.step, self.in_a_row = step, in_a_row
        what = "the loss" if culprit is None else f"the gradient of {culprit}"
        says = (
            "is not finite" if not (np.isfinite(loss) and np.isfinite(grad_norm)) else "is a spike"
        )
        self.what = f"{what} {says} at step {step} (loss {loss:g}, gradient norm {grad_norm:g})"
        super().__init__(self.what)

    def message(self, checkpoint: int | None, faults: FaultsConfig) -> str:
        """What happened, what is left and what to do about it, a line each.

        Args:
            checkpoint: the newest good one.
            faults: the policy of the run.
        """
        note = (
            "there is no checkpoint yet"
            if checkpoint is None
            else f"the last good checkpoint is step {checkpoint}"
        )
        lines = [f"{self.what}. Its update was not applied; {note}."]
        if self.in_a_row >= faults.most_in_a_row:
            lines[0] = f"{self.in_a_row} steps in a row were left out. {lines[0]}"
        elif faults.bad_numbers == "rollback":
            lines[0] = (
                f"{faults.most_in_a_row} rollbacks to one checkpoint did not help. {lines[0]}"
            )
        else:
            lines.append(
                "To pass over single bad batches, add --resume --bad-numbers skip, or rollback."
            )
        lines.append(
            "Lower --optimizer.peak-lr, lengthen --optimizer.warmup-steps, or set --optimizer.clip-norm 1."
        )
        return "\n".join(lines)


class LossSums(NamedTuple):
    """Sums over the targets that count, float32 []. Those of several batches, or of several devices, add up."""

    loss: jax.Array
    """Cross-entropy in nats, with the z-loss. A gradient flows through it alone."""
    weight: jax.Array
    metrics: dict[str, jax.Array]
    """Total of each metric that was asked for, by name."""
    routing: Routing | None = None
    """What routers did, times the weight but for counts; None without experts."""
    z: jax.Array | None = None
    """Squared log-partitions, before their weight; None without a z-loss. No gradient flows through it: the loss has them, too."""


def sums_of(
    statistics: TokenStatistics,
    weights: jax.Array,
    metrics: Mapping[str, Metric],
    z_loss: jax.Array | None = None,
) -> LossSums:
    """Return the sums over the targets of some statistics.

    Args:
        statistics: of any number of targets.
        weights: float32, of the targets' shape; 0 where a target does not count.
        metrics: those to sum, each with a `total`.
        z_loss: float32 [], weight in the loss of the squared log-partition; None adds nothing.

    Raises:
        MetricError: A metric is no single number.
    """
    chex.assert_equal_shape([x for x in statistics if x is not None] + [weights])
    loss = jnp.sum(statistics.loss * weights)
    z = None
    if z_loss is not None:
        z = jnp.sum(jnp.square(statistics.log_partition) * weights)
        loss = loss + z_loss * z
        z = jax.lax.stop_gradient(z)
    totals = {name: _total(name, metric, statistics, weights) for name, metric in metrics.items()}
    return LossSums(loss, jnp.sum(weights), totals, z=z)


def no_sums(metrics: Mapping[str, Metric], z_loss: jax.Array | None) -> LossSums:
    """Return the sums over no targets."""
    zero = jnp.float32(0)
    totals: dict[str, Any] = dict.fromkeys(metrics, zero)
    return LossSums(zero, zero, totals, z=None if z_loss is None else zero)


def reads_ranks(metrics: Mapping[str, Metric]) -> bool:
    """Return whether the ranks of targets have to be counted, which takes another pass over all logits."""
    return any(metric.needs_rank for metric in metrics.values())


def count_ranks(
    logits_NV: jax.Array, label_N: jax.Array, column_NV: jax.Array, targets_N: jax.Array
) -> jax.Array:
    """Count the classes that come before each target, int32 [N], in the order that argmax goes by.

    N may be several dimensions. The classes may be a part of all: counts of the parts add up.

    Args:
        logits_NV: of the classes.
        label_N: logits of the targets.
        column_NV: indices of the classes, int32 [V] or [N, V].
        targets_N: indices of the targets, int32.
    """
    # argmax takes NaN for the largest number and the first of equal ones.
    ordered_NV = jnp.where(jnp.isnan(logits_NV), jnp.inf, logits_NV)
    own_N = jnp.where(jnp.isnan(label_N), jnp.inf, label_N)
    own_NV = own_N[..., None]
    target_NV = targets_N[..., None]
    earlier_NV = (column_NV < target_NV) & (ordered_NV >= own_NV)
    # The target itself never counts: a compiler that computes its logit twice may round it twice.
    later_NV = (column_NV > target_NV) & (ordered_NV > own_NV)
    return jnp.sum(earlier_NV | later_NV, axis=-1, dtype=jnp.int32)


def _total(name: str, metric: Metric, statistics: TokenStatistics, weights: jax.Array) -> jax.Array:
    assert metric.total is not None, name
    if not metric.needs_rank:
        # Another metric's rank is hidden, so that a missing declaration shows with either.
        statistics = statistics._replace(counted_rank=None)
    total = jnp.asarray(metric.total(statistics, weights))
    if total.shape:
        raise MetricError(
            f"the metric {name} is an array of the shape {total.shape}; return one number, jnp.sum(values * weights)"
        )
    return total.astype(jnp.float32)


class StepInputs(NamedTuple):
    """What a step reads besides state and batch: numbers that are data to the compiled program, never constants in it."""

    factors: Factors
    hyper: OptimizerHyperparams
    reference: Arrays | None = None
    """Initial parameters where the output is centred, whose logits are subtracted; else None."""
    ema_decay: Any = None
    """float32 []; None where no average is kept."""
    limits: Limits = Limits()
    """What counts as a spike of the loss."""
    drop: Drop | None = None
    """What training leaves out of the residual stack; None where nothing is."""
    z_loss: Any = None
    """Weight of the squared log-partition of the readout's logits, float32 []; None where training has no such term."""
    rounding_seed: Any = None
    """Seed of stochastic rounding (`mupax.train.core.optimizer`), uint32 []; None where all parameters are float32."""


class TrainState(NamedTuple):
    """What a step reads and writes, and what a checkpoint holds."""

    step: Any
    """Optimizer steps done, int32 []."""
    params: Arrays
    opt_state: Any
    ema: Arrays | None = None
    """Moving average of the parameters, float32 (`averaged`); None where the run keeps none."""
    health: Health = Health()
    """Counters of steps left out and of spikes, and what else it takes to count on."""

    @property
    def evaluated(self) -> Arrays:
        """What an evaluation takes as parameters: their average where there is one."""
        return self.params if self.ema is None else self.ema

    def arrays(self) -> dict[str, Any]:
        """The parts there are, by name: what a checkpoint holds."""
        return {name: part for name, part in self._asdict().items() if part is not None}


def abstract_state(
    definition: Definition,
    tx: optax.GradientTransformation,
    layout: MeshLayout,
    *,
    averaged: bool = False,
    trained: Collection[str] | None = None,
) -> TrainState:
    """Shapes, dtypes and shardings of the state; an optimizer moment, and an average, lie where their parameter does.

    Args:
        definition: the model.
        tx: the optimizer.
        layout: how parameters lie on the mesh.
        averaged: whether the state has a moving average.
        trained: names of the parameters that the optimizer moves; all unless given.
    """
    replicated, shardings = layout.replicated, layout.parameters(definition)

    def placed(leaf: Any, sharding: NamedSharding) -> Any:
        missing = isinstance(leaf, optax.MaskedNode)  # a moment that this parameter does not have
        return leaf if missing else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    params = {n: placed(leaf, shardings[n]) for n, leaf in definition.abstract.items()}
    moving = _moving(params, trained)
    opt_state = optax.tree.map_params(
        tx,
        lambda leaf, like: placed(leaf, like.sharding),
        jax.eval_shape(tx.init, moving),
        moving,
        transform_non_params=lambda leaf: placed(leaf, replicated),
        is_leaf=lambda node: isinstance(node, optax.MaskedNode),
    )
    average = {
        n: jax.ShapeDtypeStruct(p.shape, jnp.float32, sharding=p.sharding)
        for n, p in params.items()
    }
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated)
    health = Health(*(placed(number, replicated) for number in Health()))
    return TrainState(step, params, opt_state, average if averaged else None, health)


def shardings_of(abstract: TrainState) -> TrainState:
    """The sharding of every leaf, in the shape of the state."""
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)


class Initializer:
    """Fresh parameters and states, under jit with their final shardings: the same bits on every mesh, one program for all seeds.

    On a CPU mesh parameters are made whole and then split. Since jax 0.12 the numbers that a CPU's vector instructions leave
    over at the end of a row may differ in the last bit, and which ones are left over depends on how the row is split.

    Args:
        definition: the model.
        tx: the optimizer.
        abstract: of the state.
        trained: names of the parameters that the optimizer moves; all unless given.
    """

    def __init__(
        self,
        definition: Definition,
        tx: optax.GradientTransformation,
        abstract: TrainState,
        trained: Collection[str] | None = None,
    ) -> None:
        shardings, mesh = shardings_of(abstract), abstract.step.sharding.mesh
        device = mesh.devices.flat[0]
        self._split = device.platform == "cpu"
        born = NamedSharding(mesh, PartitionSpec()) if self._split else shardings.params
        self._params = jax.jit(
            functools.partial(definition.initialize, draw=_draw(device)), out_shardings=born
        )
        self._spread = jax.jit(lambda params: params, out_shardings=shardings.params)

        def state_of(params: Arrays) -> TrainState:
            average = None if abstract.ema is None else average_of(params)
            return TrainState(
                jnp.zeros([], jnp.int32), params, tx.init(_moving(params, trained)), average
            )

        self.state_of = state_of
        """Parameters to the state at step 0, as a plain function to be transformed."""
        self.started = jax.jit(state_of, out_shardings=shardings, donate_argnums=0)
        """Parameters, whose memory it takes, to the state at step 0 of a run that starts with them."""

    def params(self, seed: int, stds: dict[str, np.ndarray]) -> Arrays:
        """The parameters alone, on the mesh: also the frozen reference of a centred output.

        Args:
            seed: from 0 to 2**32 - 1.
            stds: standard deviation by name, float32 [] or [layers] (`factors.init_stds`).
        """
        params = self._params(np.uint32(seed), stds)
        return self._spread(params) if self._split else params

    def state(self, seed: int, stds: dict[str, np.ndarray]) -> TrainState:
        """A fresh state on the mesh, at step 0.

        Args:
            seed, stds: as in `params`.
        """
        return self.started(self.params(seed, stds))


def fresh_params(
    definition: Definition, seed: int, stds: dict[str, np.ndarray], names: set[str]
) -> dict[str, np.ndarray]:
    """Some of the initial parameters, whole and on the host: the same numbers in every process.

    Args:
        definition: the model.
        seed, stds: as in `Initializer.params`.
        names: which parameters to make; the others take no memory.
    """
    only = dataclasses.replace(
        definition,
        **{
            field: {n: getattr(definition, field)[n] for n in sorted(names)}
            for field in ("specs", "abstract")
        },
    )
    device = jax.local_devices()[0]
    with jax.default_device(device):
        make = jax.jit(functools.partial(only.initialize, draw=_draw(device)))
        theirs = {
            name: number for name, number in stds.items() if name.removeprefix(SHARED_INIT) in names
        }
        return jax.device_get(make(np.uint32(seed), theirs))


def _draw(device: Any) -> Any:
    return normals if device.platform == "cpu" else None


def _moving(params: Arrays, trained: Collection[str] | None) -> Arrays:
    return params if trained is None else {name: w for name, w in params.items() if name in trained}


def average_of(params: Arrays) -> Arrays:
    """The moving average before the first step, float32 whatever parameters are stored in: bfloat16 would round small moves away."""
    return {name: jnp.array(w, jnp.float32, copy=True) for name, w in params.items()}


def averaged(average: Arrays, params: Arrays, decay: jax.Array, step: jax.Array) -> Arrays:
    """The exponential moving average of the parameters (Polyak and Juditsky 1992) after a step.

        average + (1 - d_t) (params - average),    d_t = min(decay, (1 + t) / (10 + t))

    The warm-up of the decay, that of TensorFlow's `ExponentialMovingAverage(num_updates)` and of diffusers' `EMAModel`, lets the
    average forget where it starts: after t steps it reaches about a tenth of the run so far back, until `decay` is less. A
    parameter that never moves is its average to the last bit.

    Args:
        average: before the step.
        params: after it.
        decay: float32 [].
        step: steps done before it, t, int32 [].
    """
    rest = 1 - jnp.minimum(decay, (1.0 + step) / (10.0 + step))
    return {name: old + rest * (params[name] - old) for name, old in average.items()}
