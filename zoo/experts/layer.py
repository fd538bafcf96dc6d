"""A layer of experts: every token goes to the few that its router chooses, and their outputs are added up by its gates.

B batch, T positions, D width, E experts (of a product its groups), A that a token goes to, C tokens that an expert takes, R rows, one per
token and expert of its own, I inputs, O outputs, N blocks of rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from mupax.zoo.definition import Init
from mupax.zoo.experts import parallel
from mupax.zoo.experts.routing import Choice, Routing, route, to_one
from mupax.zoo.layers.linear import GATES, project
from mupax.zoo.partition import LANES, ONE_DEVICE, Layout

if TYPE_CHECKING:
    from collections.abc import Callable

    from mupax.zoo.transformer import TransformerConfig


BLOCK = 64
"""Rows of one group that a CPU multiplies at once."""
TILE, SIDE_BYTES = 512, 2048
"""Rows, and bytes of inputs or outputs of a row, that a TPU's kernel multiplies at once."""


class Experts(nnx.Module):
    """sum over a token's experts of weight_i W_out_i act(W_in_i x), with the gate of an MLP where the model has one."""

    layout: Layout = ONE_DEVICE

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
        config, experts = self.config, self.router[...].shape[-1]
        capacity = None if dropless else config.routing.capacity(x_BTD.shape[1], experts, config.active)
        if experts == 1 and config.routing.gate != "sigmoid" and capacity is None:
            # A softmax of one score is 1 whatever x is: the router reads nothing, and this is the dense model bitwise.
            weights = self._weights(x_BTD.dtype)
            y_BTD = self._expert(
                x_BTD,
                lambda x, w: project(x, w[0], layout=self.layout),
                lambda y, b: y + b[0],
                weights,
                hidden=(),
            )
            return y_BTD, to_one()
        bias_E = None if self.balance is None else self.balance[...]
        choice, routing = route(
            x_BTD, self.router[...], bias_E, config.routing, config.active, capacity, layout=self.layout
        )
        y_BTD = self._dropless(x_BTD, choice) if capacity is None else self._within(x_BTD, choice, capacity)
        return self.layout.constrain(y_BTD, ("batch", "sequence", None)), routing

    def _dropless(self, x_BTD: jax.Array, choice: Choice) -> jax.Array:
        """Return what its experts make of a token, weighed and added up, by products of rows in the order of experts."""
        layout = parallel.over_examples(self.layout, len(x_BTD))

        def expert(x_RD: jax.Array, weights: parallel.Weights, sizes_E: jax.Array) -> jax.Array:
            last = len(weights["up"]) - 1
            of_R = jnp.repeat(jnp.minimum(jnp.arange(len(sizes_E)), last), sizes_E, total_repeat_length=len(x_RD))
            return self._expert(
                x_RD,
                lambda x, w: in_groups(x, w, sizes_E, platform=layout.platform),
                lambda y, b: y + b[of_R],
                weights,
                hidden=layout.mesh_axes("expert_dim"),
            )

        return parallel.by_rows(expert, x_BTD, choice, self._weights(x_BTD.dtype), layout=layout)

    def _within(self, x_BTD: jax.Array, choice: Choice, capacity: int) -> jax.Array:
        """Return the same of tokens in experts' slots, of which every expert has as many of every example; 0 where there is no room.

        Gates weigh the hidden layer, before the last matrix: their gradient then asks for no output again, nor for its way back.
        """
        layout = parallel.over_examples(self.layout, len(x_BTD))

        def expert(x_NECD: jax.Array, gates_NEC: jax.Array, weights: parallel.Weights) -> jax.Array:
            def product(x: jax.Array, w: jax.Array) -> jax.Array:
                return jnp.einsum("neci,eio->neco", x, w)

            return self._expert(
                x_NECD,
                product,
                lambda y, b: y + b[:, None],
                weights,
                hidden=layout.mesh_axes("expert_dim"),
                gates=gates_NEC[..., None],
            )

        return parallel.by_slots(expert, x_BTD, choice, capacity, self._weights(x_BTD.dtype), layout=layout)

    def _weights(self, dtype: Any) -> parallel.Weights:
        """By name, in the type of products."""
        variables = {name: getattr(self, name) for name in parallel.AXES}
        return {name: w[...].astype(dtype) for name, w in variables.items() if w is not None}

    def _expert(
        self,
        x: jax.Array,
        product: Callable[[jax.Array, jax.Array], jax.Array],
        plus: Callable[[jax.Array, jax.Array], jax.Array],
        weights: parallel.Weights,
        *,
        hidden: tuple[str, ...],
        gates: jax.Array | None = None,
    ) -> jax.Array:
        """Return the output of experts.

        Args:
            x: tokens, as `product` takes them.
            product: of tokens and a matrix of every expert.
            plus: adds a bias of every expert.
            weights: of the experts, by name.
            hidden: mesh axes that split their hidden layer, over whose devices outputs are summed.
            gates: what the hidden layer is multiplied by.
        """

        def projected(x: jax.Array, name: str) -> jax.Array:
            y, bias = product(x, weights[name]), weights.get(f"{name}_bias")
            y = parallel.summed(y, hidden) if name == "down" else y
            return y if bias is None else plus(y, bias)

        h, kind = projected(x, "up"), self.config.activation
        if "gate" in weights:
            h = GATES[kind](projected(x, "gate")) * h
        else:
            h = jax.nn.relu(h) if kind == "relu" else jax.nn.gelu(h, approximate=kind != "gelu_exact")
        if gates is None:
            return projected(h, "down")
        y, bias = parallel.summed(product(h * gates, weights["down"]), hidden), weights.get("down_bias")
        return y if bias is None else y + plus(jnp.zeros_like(y), bias) * gates


# Products of rows in groups with a matrix a group.


def in_groups(x_RI: jax.Array, w_EIO: jax.Array, sizes_E: jax.Array, *, platform: str) -> jax.Array:
    """Return the product of every row with its group's matrix, [R, O].

    On TPU by megablox: of `jax.lax.ragged_dot` the compiler of libtpu 0.0.42 multiplies all rows with all groups for the gradient of
    the matrices (of both gradients 18 times the FLOPs of one product, 16 groups, where megablox has 2). Elsewhere by `ragged_dot`, but
    on CPU, where jax 0.10 does the same forward too (12 times as long as one product of as many rows, 8 groups of 512 rows): there
    by blocks of rows of one group each, the last one of a group filled up with zeros.

    Args:
        x_RI: rows, those of the first group first.
        w_EIO: matrices.
        sizes_E: int32, rows of every group, or [E + 1] with those of no group last, whose product is any finite number.
        platform: that is compiled for.
    """
    sizes_E = sizes_E.astype(jnp.int32)
    if platform == "tpu":
        return _megablox(x_RI, w_EIO, sizes_E)
    sizes_E = sizes_E[: w_EIO.shape[0]]
    return _in_blocks(x_RI, w_EIO, sizes_E) if platform == "cpu" else jax.lax.ragged_dot(x_RI, w_EIO, sizes_E)


def _megablox(x_RI: jax.Array, w_EIO: jax.Array, sizes_E: jax.Array, *, interpret: bool = False) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.megablox import gmm

    rows, itemsize = x_RI.shape[0], x_RI.dtype.itemsize
    x_RI = jnp.pad(x_RI, ((0, -rows % LANES), (0, 0)))
    if x_RI.shape[0] > rows:
        last = jnp.zeros(len(sizes_E), jnp.int32).at[-1].set(x_RI.shape[0] - rows)
        sizes_E = sizes_E + last

    def tiles(rows: int, inputs: int, outputs: int) -> tuple[int, int, int]:
        return TILE if rows % TILE == 0 else LANES, _side(inputs, itemsize), _side(outputs, itemsize)

    return gmm(x_RI, w_EIO, sizes_E, x_RI.dtype, tiles, None, None, False, interpret)[:rows]  # pyright: ignore[reportArgumentType]


def _side(size: int, itemsize: int) -> int:
    """Inputs or outputs at once: the largest part of them, in whole vectors, that is not too large; all with some to spare otherwise."""
    most = SIDE_BYTES // itemsize
    parts = (part for part in range(most, 0, -LANES) if size % part == 0)
    return next(parts, min(most, -(-size // LANES) * LANES))


def _in_blocks(x_RI: jax.Array, w_EIO: jax.Array, sizes_E: jax.Array) -> jax.Array:
    rows, groups = x_RI.shape[0], w_EIO.shape[0]
    blocks = rows // BLOCK + groups  # as many as there can be
    of_E = -(-sizes_E // BLOCK)
    # Where a group begins among rows, and among blocks.
    start_E, block_E = jnp.cumsum(sizes_E) - sizes_E, jnp.cumsum(of_E) - of_E
    group_R = jnp.repeat(jnp.arange(groups), sizes_E, total_repeat_length=rows)
    place_R = block_E[group_R] * BLOCK + jnp.arange(rows) - start_E[group_R]
    filled = jnp.zeros((blocks * BLOCK, x_RI.shape[1]), x_RI.dtype).at[place_R].set(x_RI, unique_indices=True)
    group_N = jnp.repeat(jnp.arange(groups), of_E, total_repeat_length=blocks)
    y = jnp.einsum("nri,nio->nro", filled.reshape(blocks, BLOCK, -1), w_EIO[group_N])
    return y.reshape(blocks * BLOCK, -1)[place_R]
