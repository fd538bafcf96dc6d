"""Sums over the targets of a batch: what the ways of computing a loss return, made of the statistics of their targets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from mupax.train.config.metrics import Metric, MetricError, TokenStatistics

if TYPE_CHECKING:
    from mupax.zoo.experts.routing import Routing


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


def count_ranks(logits_NV: jax.Array, label_N: jax.Array, column_NV: jax.Array, targets_N: jax.Array) -> jax.Array:
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
