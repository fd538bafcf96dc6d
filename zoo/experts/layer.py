"""A layer of experts: every token goes to the few that its router chooses, and their outputs are added up by its gates.

On a mesh, devices that split examples send each other what goes to the experts that they split too.

B batch, T positions, D width, E experts (of a product its groups), A that a token goes to, C tokens that an expert takes of an example,
R rows, one per token and expert of its own, I inputs, O outputs, N blocks of rows, S slots of all experts. In `Slots` T counts the
tokens of all examples.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Layout as MemoryLayout
from jax.experimental.layout import with_layout_constraint

from mupax.zoo.collectives import all_gather
from mupax.zoo.definition import Init
from mupax.zoo.experts.routing import Choice, Routing, route, to_one
from mupax.zoo.layers.linear import GATES, project
from mupax.zoo.partition import LANES, ONE_DEVICE, Axes, Layout

if TYPE_CHECKING:
    from mupax.zoo.transformer import TransformerConfig

Weights = dict[str, jax.Array]
"""Of experts, by name; the first dimension counts them."""

_OUT = ("experts", None, "expert_dim")
AXES = {
    "up": _OUT, "gate": _OUT, "down": ("experts", "expert_dim", None),
    "up_bias": ("experts", "expert_dim"), "gate_bias": ("experts", "expert_dim"), "down_bias": ("experts", None),
}  # fmt: skip
"""How weights are split where products are taken; whole over the devices of fsdp."""

BLOCK = 64
"""Rows of one group that a CPU multiplies at once."""
TILE, SIDE_BYTES = 512, 2048
"""Rows, and bytes of inputs or outputs of a row, that a TPU's kernel multiplies at once."""


def over_examples(layout: Layout, examples: int) -> Layout:
    """Return the layout, or `ONE_DEVICE` if its devices do not split so many examples, as when text is written."""
    return ONE_DEVICE if examples % layout.num_shards("batch") else layout


def by_slots(
    expert: Callable[[jax.Array, jax.Array, Weights], jax.Array],
    x_BTD: jax.Array,
    choice: Choice,
    capacity: int,
    weights: Weights,
    *,
    layout: Layout,
) -> jax.Array:
    """Return what experts make of their tokens, weighed and added up, [B, T, D].

    Slots lie by the device that they go to, by its experts, then by this device's examples. So an all-to-all there and one back
    leave every slot where it is in memory, and experts multiply what came as it lies: [N, E, C, D] of N devices, E experts of one,
    C slots that an expert has of all examples of a device.

    Args:
        expert: of tokens in slots, what each counts, and as many experts' weights; what it returns lacks nothing, where devices split
            the hidden layer either.
        x_BTD: tokens.
        choice: their experts, and places among those that these take of an example.
        capacity: places of an example and expert.
        weights: of all experts.
        layout: from `over_examples`.
    """

    def part(
        x_BTD: jax.Array,
        experts_BTA: jax.Array,
        slots_BTA: jax.Array,
        gates_BTA: jax.Array,
        *parts: jax.Array,
    ):
        here, (batch, _, active) = dict(zip(weights, parts, strict=True)), experts_BTA.shape
        shape = layout.num_shards("experts"), len(here["up"]), batch * capacity
        example_B11 = jnp.arange(batch)[:, None, None]
        place_BTA = (experts_BTA * batch + example_B11) * capacity + slots_BTA
        place_BTA = jnp.where(slots_BTA < capacity, place_BTA, math.prod(shape))
        slots = Slots.of(place_BTA.reshape(-1, active), math.prod(shape))
        x_SD, gates_S = (
            slots.filled(x_BTD.reshape(-1, x_BTD.shape[-1])),
            slots.weights(gates_BTA.reshape(-1, active)),
        )
        names = layout.mesh_axes("experts")
        x_NECD, gates_NEC = (
            _exchanged(names, one.reshape(*shape, *one.shape[1:])) for one in (x_SD, gates_S)
        )
        y_NECD = _exchanged(names, expert(x_NECD, gates_NEC, here))
        return slots.collected(y_NECD.reshape(math.prod(shape), -1)).reshape(x_BTD.shape)

    assert choice.slots_BTA is not None
    tokens = x_BTD, choice.experts_BTA, choice.slots_BTA, choice.weights_BTA.astype(x_BTD.dtype)
    return _local(layout, part, ("batch", None, None), *tokens, weights=weights)


def _exchanged(names: tuple[str, ...], x: jax.Array) -> jax.Array:
    """Return [N, ...], what the N devices of the mesh axes have for this one, of what each has for all."""
    return _sent(names, x) if names else x


def _all_to_all(names: tuple[str, ...], x: jax.Array) -> jax.Array:
    """Rows in memory in the order of the array's: where the compiler chooses, it turns all around on both sides of an exchange."""
    rows = MemoryLayout(major_to_minor=tuple(range(x.ndim)))
    x = jax.lax.all_to_all(with_layout_constraint(x, rows), names, 0, 0, tiled=True)
    return with_layout_constraint(x, rows)


_sent = jax.custom_vjp(_all_to_all, nondiff_argnums=(0,))
_sent.defvjp(lambda names, x: (_sent(names, x), None), lambda names, _, g: (_sent(names, g),))


def by_rows(
    expert: Callable[[jax.Array, Weights, jax.Array], jax.Array],
    x_BTD: jax.Array,
    choice: Choice,
    weights: Weights,
    *,
    layout: Layout,
) -> jax.Array:
    """Return what all of its experts make of a token, weighed and added up, [B, T, D]; none is dropped.

    How many rows a device has for its experts is known on the way only, so along the mesh axis `experts` all tokens are gathered and
    sums of outputs scattered: (n - 1) copies of a token for n devices, where an all-to-all would send A (n - 1) / n.

    Args:
        expert: of rows in the order of experts, weights, and how many rows every expert has (`products.in_groups`).
        x_BTD: tokens.
        choice: their experts.
        weights: of all experts.
        layout: from `over_examples`.
    """

    def part(
        x_BTD: jax.Array, experts_BTA: jax.Array, weights_BTA: jax.Array, *parts: jax.Array
    ) -> jax.Array:
        names, here = layout.mesh_axes("experts"), dict(zip(weights, parts, strict=True))
        x_BTD, experts_BTA, weights_BTA = (
            all_gather(x, names, 0) for x in (x_BTD, experts_BTA, weights_BTA)
        )
        first, experts = (jax.lax.axis_index(names) if names else 0), here["up"].shape[0]
        of_R = (experts_BTA.reshape(-1) - first * experts) % (
            experts * layout.num_shards("experts")
        )  # its own first
        order_R = jnp.argsort(of_R, stable=True)
        rows_RD = x_BTD.reshape(-1, x_BTD.shape[-1])[order_R // experts_BTA.shape[-1]]
        own_R = of_R < experts
        sizes_E = (
            jnp.bincount(jnp.where(own_R, of_R, experts), length=experts + 1)
            if names
            else jnp.bincount(of_R, length=experts)
        )
        y_RD = expert(rows_RD, here, sizes_E)
        y_BTAD = y_RD[jnp.argsort(order_R)].reshape(*experts_BTA.shape, -1)
        weights_BTA = (
            jnp.where(own_R.reshape(experts_BTA.shape), weights_BTA, 0) if names else weights_BTA
        )
        y_BTD = jnp.einsum("btad,bta->btd", y_BTAD, weights_BTA.astype(y_BTAD.dtype))
        return (
            jax.lax.psum_scatter(y_BTD, names, scatter_dimension=0, tiled=True) if names else y_BTD
        )

    axes = ("batch", "sequence", None)
    return _local(
        layout, part, axes, x_BTD, choice.experts_BTA, choice.weights_BTA, weights=weights
    )


def _local(
    layout: Layout, part: Callable[..., jax.Array], axes: Axes, *tokens: jax.Array, weights: Weights
) -> jax.Array:
    """Apply `part` to tokens and weights on every device.

    Args:
        layout: how they lie on devices.
        part: of this device's tokens and weights.
        axes: of every array of tokens, and of the result.
        tokens: arrays of them.
        weights: of all experts.
    """
    inputs = (*[axes] * len(tokens), *(AXES[name] for name in weights))
    return layout.local(part, inputs, axes)(*tokens, *weights.values())


def summed(y: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """Return the sum of y over devices along mesh axes, or y if there are none."""
    return jax.lax.psum(y, names) if names else y


# Tokens on their way into experts' slots and back, by lookups alone: no gradient is scattered.


class Slots(NamedTuple):
    """Which slot a row is in, and which row a slot has, int32."""

    of_TA: jax.Array
    """S where there is no room."""
    rows_S: jax.Array
    """R where a slot is empty."""

    @staticmethod
    def of(place_TA: jax.Array, slots: int) -> Slots:
        """From the slot of every row.

        Args:
            place_TA: slot of a row; `slots` where there is no room.
            slots: S.
        """
        rows = place_TA.size
        empty_S = jnp.full(slots, rows, jnp.int32)
        return Slots(place_TA, empty_S.at[place_TA.reshape(-1)].set(jnp.arange(rows), mode="drop"))

    def filled(self, x_TD: jax.Array) -> jax.Array:
        """[S, D]: the token of every slot; of an empty one any token, which `weights` of 0 leave without effect and gradient."""
        return _summed(("clip", "fill"), x_TD, self._tokens(), self.of_TA)

    def weights(self, weights_TA: jax.Array) -> jax.Array:
        """[S]: what the output of every slot counts, 0 in empty ones."""
        of_R1, weights_R1 = self.of_TA.reshape(-1, 1), weights_TA.reshape(-1, 1)
        return _summed(("fill", "fill"), weights_R1, self.rows_S[:, None], of_R1)[:, 0]

    def collected(self, y_SD: jax.Array) -> jax.Array:
        """[T, D]: the sum of a token's slots; the gradient of an empty one is that of any token."""
        return _summed(("fill", "clip"), y_SD, self.of_TA, self._tokens())

    def _tokens(self) -> jax.Array:
        return (self.rows_S // self.of_TA.shape[1])[:, None]


def _sums(modes: tuple[str, str], x_ID: jax.Array, of_OK: jax.Array, of_IK: jax.Array) -> jax.Array:
    """[O, D]: sums of K rows of x each.

    Args:
        modes: what an index past the last row is of, here and for the gradient: of none (fill), which takes a pass of its own over a
            result of one row each, or of the last row (clip).
        x_ID: rows.
        of_OK: those that a row of the result sums.
        of_IK: rows of the result that a row of x is in, which has the gradient of x as the same kind of sum.
    """
    return jnp.sum(x_ID.at[of_OK].get(mode=modes[0], fill_value=0), axis=1)


_summed = jax.custom_vjp(_sums, nondiff_argnums=(0,))


def _forward(
    modes: tuple[str, str], x_ID: jax.Array, of_OK: jax.Array, of_IK: jax.Array
) -> tuple[jax.Array, Any]:
    return _summed(modes, x_ID, of_OK, of_IK), (of_OK, of_IK)


def _backward(modes: tuple[str, str], of: Any, g_OD: jax.Array) -> tuple[jax.Array, None, None]:
    of_OK, of_IK = of
    return _summed(modes[::-1], g_OD, of_IK, of_OK), None, None


_summed.defvjp(_forward, _backward)


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
        capacity = (
            None if dropless else config.routing.capacity(x_BTD.shape[1], experts, config.active)
        )
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
            x_BTD,
            self.router[...],
            bias_E,
            config.routing,
            config.active,
            capacity,
            layout=self.layout,
        )
        y_BTD = (
            self._dropless(x_BTD, choice)
            if capacity is None
            else self._within(x_BTD, choice, capacity)
        )
        return self.layout.constrain(y_BTD, ("batch", "sequence", None)), routing

    def _dropless(self, x_BTD: jax.Array, choice: Choice) -> jax.Array:
        """Return what its experts make of a token, weighed and added up, by products of rows in the order of experts."""
        layout = over_examples(self.layout, len(x_BTD))

        def expert(x_RD: jax.Array, weights: Weights, sizes_E: jax.Array) -> jax.Array:
            last = len(weights["up"]) - 1
            of_R = jnp.repeat(
                jnp.minimum(jnp.arange(len(sizes_E)), last), sizes_E, total_repeat_length=len(x_RD)
            )
            return self._expert(
                x_RD,
                lambda x, w: in_groups(x, w, sizes_E, platform=layout.platform),
                lambda y, b: y + b[of_R],
                weights,
                hidden=layout.mesh_axes("expert_dim"),
            )

        return by_rows(expert, x_BTD, choice, self._weights(x_BTD.dtype), layout=layout)

    def _within(self, x_BTD: jax.Array, choice: Choice, capacity: int) -> jax.Array:
        """Return the same of tokens in experts' slots, of which every expert has as many of every example; 0 where there is no room.

        Gates weigh the hidden layer, before the last matrix: their gradient then asks for no output again, nor for its way back.
        """
        layout = over_examples(self.layout, len(x_BTD))

        def expert(x_NECD: jax.Array, gates_NEC: jax.Array, weights: Weights) -> jax.Array:
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

        return by_slots(expert, x_BTD, choice, capacity, self._weights(x_BTD.dtype), layout=layout)

    def _weights(self, dtype: Any) -> Weights:
        """By name, in the type of products."""
        variables = {name: getattr(self, name) for name in AXES}
        return {name: w[...].astype(dtype) for name, w in variables.items() if w is not None}

    def _expert(
        self,
        x: jax.Array,
        product: Callable[[jax.Array, jax.Array], jax.Array],
        plus: Callable[[jax.Array, jax.Array], jax.Array],
        weights: Weights,
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
            y = summed(y, hidden) if name == "down" else y
            return y if bias is None else plus(y, bias)

        h, kind = projected(x, "up"), self.config.activation
        if "gate" in weights:
            h = GATES[kind](projected(x, "gate")) * h
        else:
            h = (
                jax.nn.relu(h)
                if kind == "relu"
                else jax.nn.gelu(h, approximate=kind != "gelu_exact")
            )
        if gates is None:
            return projected(h, "down")
        y, bias = summed(product(h * gates, weights["down"]), hidden), weights.get("down_bias")
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
    return (
        _in_blocks(x_RI, w_EIO, sizes_E)
        if platform == "cpu"
        else jax.lax.ragged_dot(x_RI, w_EIO, sizes_E)
    )


def _megablox(
    x_RI: jax.Array, w_EIO: jax.Array, sizes_E: jax.Array, *, interpret: bool = False
) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.megablox import gmm

    rows, itemsize = x_RI.shape[0], x_RI.dtype.itemsize
    x_RI = jnp.pad(x_RI, ((0, -rows % LANES), (0, 0)))
    if x_RI.shape[0] > rows:
        last = jnp.zeros(len(sizes_E), jnp.int32).at[-1].set(x_RI.shape[0] - rows)
        sizes_E = sizes_E + last

    def tiles(rows: int, inputs: int, outputs: int) -> tuple[int, int, int]:
        return (
            TILE if rows % TILE == 0 else LANES,
            _side(inputs, itemsize),
            _side(outputs, itemsize),
        )

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
    filled = (
        jnp.zeros((blocks * BLOCK, x_RI.shape[1]), x_RI.dtype)
        .at[place_R]
        .set(x_RI, unique_indices=True)
    )
    group_N = jnp.repeat(jnp.arange(groups), of_E, total_repeat_length=blocks)
    y = jnp.einsum("nri,nio->nro", filled.reshape(blocks, BLOCK, -1), w_EIO[group_N])
    return y.reshape(blocks * BLOCK, -1)[place_R]
