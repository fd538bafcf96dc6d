"""Choice of experts for every token, the experts' weights, and the router's losses.

`layer.Experts` uses this file. Scores and everything made from them are float32. Gates and the
balance bias follow Jiang et al. 2026 (2601.20205, section 4), with top-k token choice:
A(h) = top_a(g_i + b_i), g = sigmoid(r), r = W h, and the output is 1/a times the sum of g_i E_i.

Shape suffixes: B batch, T positions, D width, E experts, A experts that a token goes to.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mupax.zoo.partition import ONE_DEVICE, Layout
from mupax.zoo.transformer import RoutingConfig


class Routing(NamedTuple):
    """Routing statistics, float32 [], or [blocks] with one entry per block."""

    penalty: jax.Array
    """Weighted sum of the router's losses, added to the training loss.

    The other fields have no gradient.
    """
    balance: jax.Array
    """Balance loss of Switch: E / A times the sum over experts of load times share.

    The load of an expert is the fraction of tokens that chose it. Its share is the mean over tokens
    of its gate, divided by the sum of the token's gates. The value is 1 if all experts are used
    alike, and grows up to E / A with the imbalance.
    """
    z: jax.Array
    """Mean over tokens of the squared log-sum-exp of the router's scores, the z-loss of ST-MoE."""
    dropped: jax.Array
    """Number of times that a chosen expert had no room for a token, among this device's tokens."""

    def over_blocks(self) -> Routing:
        """Return the statistics averaged over blocks, with dropped tokens summed."""
        return Routing(
            penalty=jnp.mean(self.penalty),
            balance=jnp.mean(self.balance),
            z=jnp.mean(self.z),
            dropped=jnp.sum(self.dropped),
        )

    def weighed(self, weight: jax.Array) -> Routing:
        """Return the statistics with all fields but `dropped` multiplied by the number of targets.

        The results of several batches can then be added up.

        Args:
            weight: Number of targets that the statistics are means over, float32 [].
        """
        return Routing(
            penalty=weight * self.penalty,
            balance=weight * self.balance,
            z=weight * self.z,
            dropped=self.dropped,
        )

    def metrics(self, weight: jax.Array) -> dict[str, jax.Array]:
        """Return the metrics balance_loss, z_loss and dropped_tokens of several batches.

        The losses are not multiplied by their weights in the training loss.

        Args:
            weight: Number of targets of all batches whose `weighed` statistics were added up.
        """
        return {
            "balance_loss": self.balance / weight,
            "z_loss": self.z / weight,
            "dropped_tokens": self.dropped,
        }


class Choice(NamedTuple):
    """Experts chosen for every token, with the weights of their outputs."""

    experts_BTA: jax.Array
    """Index of each expert, int32, the one with the highest score first."""
    weights_BTA: jax.Array
    """Factor on the output of each expert. It is 0 where the expert has no room for the token."""
    slots_BTA: jax.Array | None
    """Number of earlier tokens of the example that chose the same expert.

    The expert has no room for the token if this is its capacity or more. `None` if experts take all
    tokens.
    """


def single_expert_routing() -> Routing:
    """Return the statistics of a layer with one expert: `balance` is 1, all other fields are 0."""
    zero = jnp.zeros(())
    one = jnp.ones(())
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
    """Choose the experts of every token. Return them and the routing statistics.

    Args:
        x_BTD: Tokens as the experts read them, [B, T, D].
        router_DE: Router matrix. Scores are computed in float32 whatever the type of x.
        bias_E: Balance bias, added to the scores for the choice only. `None` without one.
        config: Kind of the gates, and weights of the router's losses.
        active: Number of experts A that a token goes to.
        capacity: Largest number of tokens of an example that an expert takes, the earliest ones.
            `None` takes all tokens.
        layout: Layout over whose devices the loads of experts are averaged.
    """
    logits_BTE = jnp.matmul(
        x_BTD.astype(jnp.float32), router_DE.astype(jnp.float32), precision="highest"
    )
    num_experts = logits_BTE.shape[-1]
    is_sigmoid = config.gate == "sigmoid"
    if is_sigmoid:
        gates_BTE = jax.nn.sigmoid(logits_BTE)
        scores_BTE = gates_BTE
    else:
        gates_BTE = jax.nn.softmax(logits_BTE)
        scores_BTE = logits_BTE
    if bias_E is not None:
        scores_BTE = scores_BTE + bias_E.astype(jnp.float32)
    _, experts_BTA = jax.lax.top_k(jax.lax.stop_gradient(scores_BTE), active)

    # The bias moves the choice, but not the weights of the chosen experts.
    if config.gate == "softmax":
        weights_BTA = jax.nn.softmax(jnp.take_along_axis(logits_BTE, experts_BTA, -1))
    else:
        divisor = active if is_sigmoid else 1
        weights_BTA = jnp.take_along_axis(gates_BTE, experts_BTA, -1) / divisor

    # Entries are 0 or 1, because top_k chooses an expert at most once per token.
    chosen_BTE = jnp.sum(jax.nn.one_hot(experts_BTA, num_experts, dtype=jnp.int32), axis=-2)
    slots_BTA = None
    dropped = jnp.zeros((), jnp.int32)
    if capacity is not None:
        # Slots are given in the order of positions, so that no token changes the output of an
        # earlier one.
        earlier_BTE = jnp.cumsum(chosen_BTE, axis=1) - chosen_BTE
        slots_BTA = jnp.take_along_axis(earlier_BTE, experts_BTA, -1)
        weights_BTA = jnp.where(slots_BTA < capacity, weights_BTA, 0.0)
        dropped = jnp.sum(slots_BTA >= capacity)

    load_E = layout.mean(jnp.mean(chosen_BTE.astype(jnp.float32), axis=(0, 1)))
    share_BTE = gates_BTE / jnp.sum(gates_BTE, axis=-1, keepdims=True)
    share_E = jnp.mean(share_BTE, axis=(0, 1))
    # Balance loss of Switch (Fedus et al. 2021): only the shares have a gradient, loads are counts.
    balance = num_experts / active * jnp.sum(jax.lax.stop_gradient(load_E) * share_E)
    z = jnp.mean(jnp.square(jax.nn.logsumexp(logits_BTE, axis=-1)))

    if config.z_weight:
        penalty = config.z_weight * z
    else:
        penalty = jnp.zeros(())
    if config.balance == "loss" and config.balance_weight:
        penalty += config.balance_weight * balance
    if bias_E is not None:
        # The value is 0. Its gradient with respect to the bias is load - a/E, the excess load by
        # which the method of 2601.20205 lowers the bias.
        excess_E = jax.lax.stop_gradient(load_E) - active / num_experts
        zero_E = (bias_E - jax.lax.stop_gradient(bias_E)).astype(jnp.float32)
        penalty += jnp.sum(excess_E * zero_E)

    # Only the penalty trains the router. The other statistics are reported.
    balance, z, dropped = jax.lax.stop_gradient((balance, z, dropped.astype(jnp.float32)))
    choice = Choice(experts_BTA, weights_BTA, slots_BTA)
    return choice, Routing(penalty=penalty, balance=balance, z=z, dropped=dropped)
