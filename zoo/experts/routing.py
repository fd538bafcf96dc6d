"""Which experts a token goes to, how much each counts, and what its router costs. Scores and all made of them are float32.

B batch, T positions, D width, E experts, A that a token goes to. Top-k token choice: gates and biases as Jiang et al. 2026
(2601.20205, section 4): A(h) = top_a(g_i + b_i), g = sigmoid(r), r = W h, and the layer's output is 1/a times the sum of g_i E_i.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mupax.zoo.partition import ONE_DEVICE, Layout
from mupax.zoo.transformer import RoutingConfig


class Routing(NamedTuple):
    """What routers did, float32 [], or [blocks] of every block."""

    penalty: jax.Array
    """What they add to the loss, weights included; the others have no gradient."""
    balance: jax.Array
    """E times the sum over experts of load and mean gate's share: 1 where all are used alike, E where all take one (Switch)."""
    z: jax.Array
    """Mean square of the log-sum-exp of a token's scores."""
    dropped: jax.Array
    """How often a token did not find room with an expert it chose; a count, of this device's tokens."""

    def over_blocks(self) -> Routing:
        """The mean over blocks, of counts the sum."""
        return Routing(
            jnp.mean(self.penalty),
            jnp.mean(self.balance),
            jnp.mean(self.z),
            dropped=jnp.sum(self.dropped),
        )

    def weighed(self, weight: jax.Array) -> Routing:
        """All but counts times the weight, float32 [], of the targets that they are a mean over, so that they add up over batches."""
        return Routing(weight * self.penalty, weight * self.balance, weight * self.z, self.dropped)

    def metrics(self, weight: jax.Array) -> dict[str, jax.Array]:
        """balance_loss and z_loss, before their weights, and dropped_tokens, in all blocks; of sums that have the weight in all."""
        return {
            "balance_loss": self.balance / weight,
            "z_loss": self.z / weight,
            "dropped_tokens": self.dropped,
        }


class Choice(NamedTuple):
    """Every token's experts."""

    experts_BTA: jax.Array
    """int32, the best first."""
    weights_BTA: jax.Array
    """What each expert's output counts; 0 where it has no room."""
    slots_BTA: jax.Array | None
    """Place of the token among those that an expert takes of an example; its capacity and more where there is no room; None: dropless."""


def to_one() -> Routing:
    """What a router did that has one expert for all: nothing, evenly."""
    zero, one = jnp.zeros(()), jnp.ones(())
    return Routing(penalty=zero, balance=one, z=zero, dropped=zero)


def route(
    x_BTD: jax.Array,
    router_DE: jax.Array,
    bias_E: jax.Array | None,
    config: RoutingConfig,
    active: int,
    capacity: int | None,
    *,
    layout: Layout = ONE_DEVICE,
) -> tuple[Choice, Routing]:
    """Return every token's experts, and the routing statistics.

    Args:
        x_BTD: what experts read.
        router_DE: scores are its products, in float32 whatever x is.
        bias_E: moves with loads (balance bias); None without.
        config: gates and weights of losses.
        active: A.
        capacity: tokens of an example that an expert takes; None: all.
        layout: over whose devices loads are averaged.
    """
    logits_BTE = jnp.matmul(
        x_BTD.astype(jnp.float32), router_DE.astype(jnp.float32), precision="highest"
    )
    experts = logits_BTE.shape[-1]
    sigmoid = config.gate == "sigmoid"
    gates_BTE = jax.nn.sigmoid(logits_BTE) if sigmoid else jax.nn.softmax(logits_BTE)
    scores_BTE = gates_BTE if sigmoid else logits_BTE
    scores_BTE = scores_BTE if bias_E is None else scores_BTE + bias_E.astype(jnp.float32)
    chosen_BTA = jax.lax.top_k(jax.lax.stop_gradient(scores_BTE), active)[1]
    if config.gate == "softmax":
        weights_BTA = jax.nn.softmax(jnp.take_along_axis(logits_BTE, chosen_BTA, -1))
    else:
        weights_BTA = jnp.take_along_axis(gates_BTE, chosen_BTA, -1) / (active if sigmoid else 1)
    picked_BTE = jnp.sum(jax.nn.one_hot(chosen_BTA, experts, dtype=jnp.int32), axis=-2)
    slots_BTA, dropped = None, jnp.zeros((), jnp.int32)
    if capacity is not None:
        # The first tokens of an example have room: what comes later changes nothing before it.
        before_BTE = jnp.cumsum(picked_BTE, axis=1) - picked_BTE
        slots_BTA = jnp.take_along_axis(before_BTE, chosen_BTA, -1)
        weights_BTA = jnp.where(slots_BTA < capacity, weights_BTA, 0.0)
        dropped = jnp.sum(slots_BTA >= capacity)
    load_E = layout.mean(jnp.mean(picked_BTE.astype(jnp.float32), axis=(0, 1)))
    share_E = jnp.mean(gates_BTE / jnp.sum(gates_BTE, axis=-1, keepdims=True), axis=(0, 1))
    balance = experts / active * jnp.sum(jax.lax.stop_gradient(load_E) * share_E)
    z = jnp.mean(jnp.square(jax.nn.logsumexp(logits_BTE, axis=-1)))
    penalty = config.z_weight * z if config.z_weight else jnp.zeros(())
    if config.balance == "loss" and config.balance_weight:
        penalty += config.balance_weight * balance
    if bias_E is not None:
        # 0, and its gradient is what moves the bias: load - a/E, by which 2601.20205 lowers it at every step.
        excess_E = jax.lax.stop_gradient(load_E) - active / experts
        penalty += jnp.sum(excess_E * (bias_E - jax.lax.stop_gradient(bias_E)).astype(jnp.float32))
    statistics = jax.lax.stop_gradient((balance, z, dropped.astype(jnp.float32)))
    return Choice(chosen_BTA, weights_BTA, slots_BTA), Routing(penalty, *statistics)
