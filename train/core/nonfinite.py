"""Losses and gradients that are no numbers, and losses that jump: judged on the devices, inside the step.

A step whose loss or gradient is not finite leaves the state as it was, whatever the policy: a bad state never exists, and
nobody waits for a verdict. The host reads it some steps later and then stops, goes on, or goes back (`train/run/loop.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mupax.presets.roles import ParamSpec
from mupax.train.config.run import FaultsConfig
from mupax.zoo.definition import Arrays

SPIKE_WARM_UP = 50
"""Finite losses seen before one can count as a spike; also about how many the running mean looks back on."""
_LEAST_DEVIATION = 1e-3
"""Standard deviation of the loss, relative to its mean, below which it is taken for this: repeated data hardly vary."""


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


def limits(config: FaultsConfig) -> Limits:
    """What counts as a spike in a run, on the host: nothing does where it names no deviations."""
    deviations = np.inf if config.spike_deviations is None else config.spike_deviations
    return Limits(np.float32(deviations), np.bool_(config.skip_spikes))


def judge(health: Health, limits: Limits, loss: jax.Array, grad_norm: jax.Array) -> tuple[jax.Array, jax.Array, Health]:
    """Whether a step's update is applied (bool []), whether its loss is a spike (bool []), and the counters after it.

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
        variance=jnp.where(finite, (1 - rate) * (health.variance + rate * away**2), health.variance),
    )
    return keep, spike, Health(*(jnp.asarray(new, old.dtype) for new, old in zip(after, health, strict=True)))


def applied(keep: jax.Array, update: Callable[..., tuple], before: tuple, *, platform: str) -> tuple:
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
    for name in [name for name in specs if name in grads]:  # `grads` has another order inside a jitted function
        axes = tuple(range(int(specs[name].stacked), grads[name].ndim))
        of_layers = jnp.ravel(jnp.sum(jnp.square(grads[name].astype(jnp.float32)), axis=axes))
        sums.append(0 * of_layers if specs[name].moved_by_loads else of_layers)  # not finite where it is not
    # Summed in sight of the compiler, they would be summed anew from every g * g, which would then have two readers and be
    # written to memory whole: a third of AdamW's time on a CPU.
    return jax.lax.optimization_barrier(jnp.concatenate(sums))


def culprit(squares: np.ndarray, specs: Mapping[str, ParamSpec], shapes: Mapping[str, Any]) -> str | None:
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
    where = f"{name} (role {specs[name].role.value}" + (")" if layer is None else f", layer {layer})")
    count = len({name for name, _ in bad})
    return where if count == 1 else f"{where}, the first of {count} parameters of {len(specs)}"


class RejectedStep(Exception):
    """A step that ends the run, or sends it back, under its policy."""

    def __init__(self, step: int, loss: float, grad_norm: float, culprit: str | None, in_a_row: int) -> None:
        self.step, self.in_a_row = step, in_a_row
        what = "the loss" if culprit is None else f"the gradient of {culprit}"
        says = "is not finite" if not (np.isfinite(loss) and np.isfinite(grad_norm)) else "is a spike"
        self.what = f"{what} {says} at step {step} (loss {loss:g}, gradient norm {grad_norm:g})"
        super().__init__(self.what)

    def message(self, checkpoint: int | None, faults: FaultsConfig) -> str:
        """What happened, what is left and what to do about it, a line each.

        Args:
            checkpoint: the newest good one.
            faults: the policy of the run.
        """
        note = "there is no checkpoint yet" if checkpoint is None else f"the last good checkpoint is step {checkpoint}"
        lines = [f"{self.what}. Its update was not applied; {note}."]
        if self.in_a_row >= faults.most_in_a_row:
            lines[0] = f"{self.in_a_row} steps in a row were left out. {lines[0]}"
        elif faults.bad_numbers == "rollback":
            lines[0] = f"{faults.most_in_a_row} rollbacks to one checkpoint did not help. {lines[0]}"
        else:
            lines.append("To pass over single bad batches, add --resume --bad-numbers skip, or rollback.")
        lines.append("Lower --optimizer.peak-lr, lengthen --optimizer.warmup-steps, or set --optimizer.clip-norm 1.")
        return "\n".join(lines)
