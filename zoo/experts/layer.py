"""A layer of experts: every token goes to the few that its router chooses, and their outputs are added up by its gates.

B batch, T positions, D width, E experts, A that a token goes to, C tokens that an expert takes of an example, F hidden of an expert.
R rows, one per token and expert of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from mupax.zoo import partition
from mupax.zoo.definition import Init
from mupax.zoo.experts.products import in_groups
from mupax.zoo.experts.routing import Choice, Routing, route, to_one
from mupax.zoo.layers.linear import GATES, biased, project

if TYPE_CHECKING:
    from collections.abc import Callable

    from mupax.zoo.transformer import TransformerConfig


class Experts(nnx.Module):
    """sum over a token's experts of weight_i W_out_i act(W_in_i x), with the gate of an MLP where the model has one."""

    def __init__(self, config: TransformerConfig, init: Init) -> None:
        self.config = config
        self.router, self.balance = init.param("router"), init.maybe("balance")
        self.up, self.gate, self.down = init.param("up"), init.maybe("gate"), init.param("down")
        self.up_bias, self.gate_bias = init.maybe("up_bias"), init.maybe("gate_bias")
        self.down_bias = init.maybe("down_bias")

    def __call__(self, x_BTD: jax.Array, *, dropless: bool = False) -> tuple[jax.Array, Routing]:
        """[B, T, D], and what the router did.

        Args:
            x_BTD: the stream after its norm.
            dropless: whatever the capacity: of a text that is written token by token.
        """
        config, experts = self.config, self.up[...].shape[0]
        capacity = None if dropless else config.routing.capacity(x_BTD.shape[1], experts, config.active)
        if experts == 1 and config.routing.gate != "sigmoid" and capacity is None:
            # A softmax of one score is 1 whatever x is: the router reads nothing, and this is the dense model bitwise.
            return self._expert(
                x_BTD, lambda x, w: project(x, w[...][0]), lambda y, b: biased(y, b and b[...][0])
            ), to_one()
        bias_E = None if self.balance is None else self.balance[...]
        choice, routing = route(x_BTD, self.router[...], bias_E, config.routing, config.active, capacity)
        parts_BTAD = self._dropless(x_BTD, choice) if capacity is None else self._within(x_BTD, choice, capacity)
        y_BTD = jnp.einsum("btad,bta->btd", parts_BTAD, choice.weights_BTA.astype(x_BTD.dtype))
        return partition.constrain(y_BTD, "batch", "sequence", None), routing

    def _dropless(self, x_BTD: jax.Array, choice: Choice) -> jax.Array:
        """What each of its experts makes of a token, [B, T, A, D], by products of rows in the order of experts."""
        shape, experts = (*choice.experts_BTA.shape, x_BTD.shape[-1]), self.up[...].shape[0]
        of_R = choice.experts_BTA.reshape(-1)
        order_R = jnp.argsort(of_R, stable=True)
        sorted_R, sizes_E = of_R[order_R], jnp.bincount(of_R, length=experts)
        x_RD = x_BTD.reshape(-1, shape[-1])[order_R // shape[-2]]

        def product(x: jax.Array, w: Any) -> jax.Array:
            return in_groups(x, w[...].astype(x.dtype), sizes_E)

        def plus(y: jax.Array, b: Any) -> jax.Array:
            return y if b is None else y + b[...].astype(y.dtype)[sorted_R]

        y_RD = self._expert(x_RD, product, plus)
        return y_RD[jnp.argsort(order_R)].reshape(shape)

    def _within(self, x_BTD: jax.Array, choice: Choice, capacity: int) -> jax.Array:
        """The same of tokens in their experts' slots, of which every expert has as many of every example; any number where there is no room."""
        batch, length, active = choice.experts_BTA.shape
        experts, width, b_B1 = self.up[...].shape[0], x_BTD.shape[-1], jnp.arange(batch)[:, None]
        assert choice.slots_BTA is not None
        room = choice.slots_BTA < capacity
        place_BR = jnp.where(room, choice.experts_BTA * capacity + choice.slots_BTA, experts * capacity).reshape(
            batch, -1
        )
        token_BR = jnp.broadcast_to(jnp.repeat(jnp.arange(length), active), place_BR.shape)
        tokens_BEC = jnp.zeros((batch, experts * capacity), jnp.int32).at[b_B1, place_BR].set(token_BR, mode="drop")
        x_BECD = x_BTD[b_B1, tokens_BEC].reshape(batch, experts, capacity, width)

        def product(x: jax.Array, w: Any) -> jax.Array:
            return jnp.einsum("beci,eio->beco", x, w[...].astype(x.dtype))

        def plus(y: jax.Array, b: Any) -> jax.Array:
            return y if b is None else y + b[...].astype(y.dtype)[:, None]

        y_BECD = self._expert(x_BECD, product, plus).reshape(batch, experts * capacity, width)
        y_BRD = y_BECD[b_B1, jnp.minimum(place_BR, experts * capacity - 1)]
        return y_BRD.reshape(batch, length, active, width)

    def _expert(self, x: jax.Array, product: Callable[..., jax.Array], plus: Callable[..., jax.Array]) -> jax.Array:
        h, kind = plus(product(x, self.up), self.up_bias), self.config.activation
        if self.gate is not None:
            h = GATES[kind](plus(product(x, self.gate), self.gate_bias)) * h
        else:
            h = jax.nn.relu(h) if kind == "relu" else jax.nn.gelu(h, approximate=kind != "gelu_exact")
        return plus(product(h, self.down), self.down_bias)
