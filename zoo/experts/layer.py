"""Layer of experts: a router sends every token to a few experts, whose weighted outputs are summed.

On a mesh that splits experts, devices exchange the tokens that go to each other's experts.

Shape suffixes: B batch, T positions, D width, E experts (in a product, groups of rows), A experts
that a token goes to, C slots of an expert, R rows (one per token and chosen expert), I inputs, O
outputs, N devices that split experts (in `_in_blocks`, blocks of rows), S slots of all experts. In
`Slots`, T counts the tokens of all examples, and in `_sum_rows` K counts the rows of a sum.
"""

from __future__ import annotations

import functools
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
from mupax.zoo.experts.routing import Choice, Routing, route, single_expert_routing
from mupax.zoo.layers.linear import GATES, project
from mupax.zoo.partition import LANES, ONE_DEVICE, Axes, Layout

if TYPE_CHECKING:
    from mupax.zoo.transformer import TransformerConfig

Weights = dict[str, jax.Array]
"""Weights of experts by name. The first dimension counts experts."""

_IN_AXES = ("experts", None, "expert_dim")
AXES = {
    "up": _IN_AXES,
    "gate": _IN_AXES,
    "down": ("experts", "expert_dim", None),
    "up_bias": ("experts", "expert_dim"),
    "gate_bias": ("experts", "expert_dim"),
    "down_bias": ("experts", None),
}
"""Logical axes that split each weight where a product reads it. `None` is an axis of full size."""

BLOCK = 64
"""Number of rows of one group (tokens of one expert) that a CPU multiplies at once."""
TILE = 512
"""Number of rows that a TPU kernel multiplies at once, if their number is a multiple of it."""
SIDE_BYTES = 2048
"""Largest part of a row's inputs or outputs that a TPU kernel multiplies at once, in bytes."""


class Experts(nnx.Module):
    """Layer of experts: the sum over a token's experts i of weight_i W_out_i act(W_in_i x).

    The hidden layer of an expert has a gate if the model's activation has one.

    Attributes:
        balance: Bias that is added to the router's scores when experts are chosen, but not to the
            weights of their outputs. `None` for a model without it.
    """

    layout: Layout = ONE_DEVICE

    def __init__(self, config: TransformerConfig, init: Init) -> None:
        self.config = config
        self.router = init.param("router")
        self.balance = init.maybe("balance")
        self.up = init.param("up")
        self.gate = init.maybe("gate")
        self.down = init.param("down")
        self.up_bias = init.maybe("up_bias")
        self.gate_bias = init.maybe("gate_bias")
        self.down_bias = init.maybe("down_bias")

    def __call__(self, x_BTD: jax.Array, *, dropless: bool = False) -> tuple[jax.Array, Routing]:
        """Return the output of the layer, [B, T, D], and the routing statistics.

        A single expert without a capacity is applied without the router, unless the gate is a
        sigmoid. The statistics are then those of `single_expert_routing`.

        Args:
            x_BTD: Residual stream after the block's norm, [B, T, D].
            dropless: Ignore the capacity of experts. Generation does, because it reads a text
                token by token.
        """
        config = self.config
        num_experts = self.router[...].shape[-1]
        capacity = None
        if not dropless:
            capacity = config.routing.capacity(x_BTD.shape[1], num_experts, config.active)
        if num_experts == 1 and config.routing.gate != "sigmoid" and capacity is None:
            # A softmax of one score is 1 whatever x is, so that the router has no effect. This path
            # computes the dense model bit for bit.
            return self._single_expert(x_BTD), single_expert_routing()

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
        if capacity is None:
            y_BTD = self._dropless(x_BTD, choice)
        else:
            y_BTD = self._with_capacity(x_BTD, choice, capacity)
        return self.layout.constrain(y_BTD, ("batch", "sequence", None)), routing

    def _single_expert(self, x_BTD: jax.Array) -> jax.Array:
        """Return the output of the only expert for all tokens, [B, T, D], without a router."""

        def multiply(x: jax.Array, w_1IO: jax.Array) -> jax.Array:
            return project(x, w_1IO[0], layout=self.layout)

        def add_bias(y: jax.Array, bias_1O: jax.Array) -> jax.Array:
            return y + bias_1O[0]

        weights = self._weights(x_BTD.dtype)
        return self._expert(x_BTD, multiply, add_bias, weights, hidden_axes=())

    def _dropless(self, x_BTD: jax.Array, choice: Choice) -> jax.Array:
        """Return the weighted sum of the outputs of each token's experts. No token is dropped.

        The rows of all tokens are sorted by expert and multiplied in groups.

        Args:
            choice: Experts of every token and weights of their outputs, from `route`.
        """
        layout = _layout_for_batch(self.layout, len(x_BTD))

        def expert(x_RD: jax.Array, weights: Weights, sizes_E: jax.Array) -> jax.Array:
            # On a mesh, the last entry of `sizes_E` counts rows of other devices' experts. The
            # outputs of these rows get weight 0, so any bias will do for them.
            last_expert = len(weights["up"]) - 1
            expert_E = jnp.minimum(jnp.arange(len(sizes_E)), last_expert)
            expert_R = jnp.repeat(expert_E, sizes_E, total_repeat_length=len(x_RD))

            def multiply(x_RI: jax.Array, w_EIO: jax.Array) -> jax.Array:
                return in_groups(x_RI, w_EIO, sizes_E, platform=layout.platform)

            def add_bias(y_RO: jax.Array, bias_EO: jax.Array) -> jax.Array:
                return y_RO + bias_EO[expert_R]

            hidden_axes = layout.mesh_axes("expert_dim")
            return self._expert(x_RD, multiply, add_bias, weights, hidden_axes=hidden_axes)

        return by_rows(expert, x_BTD, choice, self._weights(x_BTD.dtype), layout=layout)

    def _with_capacity(self, x_BTD: jax.Array, choice: Choice, capacity: int) -> jax.Array:
        """Return the weighted sum of the outputs of each token's experts that have room for it.

        Every expert takes at most `capacity` tokens of every example. The output is 0 for a token
        that none of its experts takes.

        Args:
            choice: Experts of every token, weights of their outputs and slots, from `route`.
        """
        layout = _layout_for_batch(self.layout, len(x_BTD))

        def multiply(x_NECI: jax.Array, w_EIO: jax.Array) -> jax.Array:
            return jnp.einsum("neci,eio->neco", x_NECI, w_EIO)

        def add_bias(y_NECO: jax.Array, bias_EO: jax.Array) -> jax.Array:
            return y_NECO + bias_EO[:, None]

        def expert(x_NECD: jax.Array, gates_NEC: jax.Array, weights: Weights) -> jax.Array:
            # The gates multiply the hidden layer, before the last matrix. The gradient of the gates
            # then needs neither a recomputed output nor another exchange.
            return self._expert(
                x_NECD,
                multiply,
                add_bias,
                weights,
                hidden_axes=layout.mesh_axes("expert_dim"),
                gates=gates_NEC[..., None],
            )

        return by_slots(expert, x_BTD, choice, capacity, self._weights(x_BTD.dtype), layout=layout)

    def _weights(self, dtype: Any) -> Weights:
        """Return the weights and biases that the experts have, by name, cast to `dtype`."""
        weights = {}
        for name in AXES:
            variable = getattr(self, name)
            if variable is not None:
                weights[name] = variable[...].astype(dtype)
        return weights

    def _expert(
        self,
        x: jax.Array,
        multiply: Callable[[jax.Array, jax.Array], jax.Array],
        add_bias: Callable[[jax.Array, jax.Array], jax.Array],
        weights: Weights,
        *,
        hidden_axes: tuple[str, ...],
        gates: jax.Array | None = None,
    ) -> jax.Array:
        """Apply experts to their tokens. Return the outputs in the shape of x.

        Args:
            x: Tokens, in any shape that `multiply` takes.
            multiply: Function of tokens and a matrix per expert [E, I, O], which returns products.
            add_bias: Function of products and a bias per expert [E, O], which returns their sum.
            weights: Weights of the experts that x goes to, by name.
            hidden_axes: Mesh axes that split the hidden layers. Outputs are summed over them.
            gates: Factors on the outputs, which broadcast over x. `None` is 1.
        """

        def linear(x: jax.Array, name: str) -> jax.Array:
            y = multiply(x, weights[name])
            bias = weights.get(f"{name}_bias")
            return y if bias is None else add_bias(y, bias)

        activation = self.config.activation
        h = linear(x, "up")
        if "gate" in weights:
            h = GATES[activation](linear(x, "gate")) * h
        elif activation == "relu":
            h = jax.nn.relu(h)
        else:
            h = jax.nn.gelu(h, approximate=activation != "gelu_exact")

        if gates is not None:
            h = h * gates
        y = _sum_over_devices(multiply(h, weights["down"]), hidden_axes)
        bias = weights.get("down_bias")
        if bias is None:
            return y
        if gates is None:
            return add_bias(y, bias)
        # y already contains the gates, which multiplied the hidden layer. The bias does not.
        return y + add_bias(jnp.zeros_like(y), bias) * gates


# Experts with a capacity: tokens go into slots.


def by_slots(
    expert: Callable[[jax.Array, jax.Array, Weights], jax.Array],
    x_BTD: jax.Array,
    choice: Choice,
    capacity: int,
    weights: Weights,
    *,
    layout: Layout,
) -> jax.Array:
    """Put tokens into slots of experts, apply the experts, and sum the outputs of every token.

    Every expert has `capacity` slots for each example. A slot holds one token. An expert that has
    no slot left for a token adds nothing to the token's sum.

    Args:
        expert: Function of tokens in slots [N, E, C, D], their gates [N, E, C] and the weights of E
            experts. It returns gated outputs [N, E, C, D], summed over the devices that split the
            hidden layer.
        x_BTD: Tokens, [B, T, D].
        choice: Experts of the tokens, their gates and their slots within the example. It must have
            slots (`slots_BTA`), as `route` gives them with a capacity.
        capacity: Number of slots that an expert has for each example.
        weights: Weights of all experts, [E, ...] by name.
        layout: Layout whose devices split B examples (`_layout_for_batch`).

    Returns:
        The sums, [B, T, D].
    """

    def on_device(
        x_BTD: jax.Array,
        experts_BTA: jax.Array,
        slots_BTA: jax.Array,
        gates_BTA: jax.Array,
        *device_arrays: jax.Array,
    ) -> jax.Array:
        device_weights = dict(zip(weights, device_arrays, strict=True))
        batch_size, _, active = experts_BTA.shape
        # Slots are ordered by target device, then by that device's experts, then by this device's
        # examples. The all-to-all there and back then needs no transpose, and the experts multiply
        # what they receive without reordering it.
        shape = (
            layout.num_shards("experts"),
            len(device_weights["up"]),
            batch_size * capacity,
        )
        num_slots = math.prod(shape)
        example_B11 = jnp.arange(batch_size)[:, None, None]
        place_BTA = (experts_BTA * batch_size + example_B11) * capacity + slots_BTA
        place_BTA = jnp.where(slots_BTA < capacity, place_BTA, num_slots)
        slots = Slots.from_places(place_BTA.reshape(-1, active), num_slots)

        width = x_BTD.shape[-1]
        x_SD = slots.filled(x_BTD.reshape(-1, width))
        gates_S = slots.weights(gates_BTA.reshape(-1, active))
        mesh_axes = layout.mesh_axes("experts")
        x_NECD = _exchange(mesh_axes, x_SD.reshape(*shape, width))
        gates_NEC = _exchange(mesh_axes, gates_S.reshape(shape))
        y_NECD = _exchange(mesh_axes, expert(x_NECD, gates_NEC, device_weights))
        y_SD = y_NECD.reshape(num_slots, -1)
        return slots.collected(y_SD).reshape(x_BTD.shape)

    assert choice.slots_BTA is not None
    gates_BTA = choice.weights_BTA.astype(x_BTD.dtype)
    return _on_every_device(
        layout,
        on_device,
        ("batch", None, None),
        x_BTD,
        choice.experts_BTA,
        choice.slots_BTA,
        gates_BTA,
        weights=weights,
    )


def _exchange(mesh_axes: tuple[str, ...], x: jax.Array) -> jax.Array:
    """Send part n of x to device n along mesh axes. Return the parts that this device receives.

    Call inside `shard_map`, on all devices along these axes.

    Args:
        mesh_axes: Axes whose N devices exchange parts. Without any, x is returned.
        x: Parts for all devices, [N, ...].
    """
    return _all_to_all(mesh_axes, x) if mesh_axes else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _all_to_all(mesh_axes: tuple[str, ...], x: jax.Array) -> jax.Array:
    # Keep the memory layout row-major. If the compiler chooses the layout, it transposes the arrays
    # before and after each all-to-all.
    in_order = MemoryLayout(major_to_minor=tuple(range(x.ndim)))
    x = with_layout_constraint(x, in_order)
    x = jax.lax.all_to_all(x, mesh_axes, 0, 0, tiled=True)
    return with_layout_constraint(x, in_order)


def _all_to_all_forward(mesh_axes: tuple[str, ...], x: jax.Array) -> tuple[jax.Array, None]:
    return _all_to_all(mesh_axes, x), None


def _all_to_all_backward(
    mesh_axes: tuple[str, ...], _residuals: None, gradient: jax.Array
) -> tuple[jax.Array]:
    return (_all_to_all(mesh_axes, gradient),)


# This all-to-all splits and joins dimension 0, so it is its own transpose. The rule makes the
# gradient row-major, too.
_all_to_all.defvjp(_all_to_all_forward, _all_to_all_backward)


class Slots(NamedTuple):
    """Assignment of rows to slots, and its inverse, both int32.

    A row is a pair of a token and one of its A experts. A slot is a place for one token at one
    expert. Tokens go into slots and back by lookups only, in both passes: no gradient is scattered.
    """

    slots_TA: jax.Array
    """Slot of every row. The value S, the number of slots, marks a row that has no slot."""
    rows_S: jax.Array
    """Row in every slot. The value R, the number of rows, marks an empty slot."""

    @staticmethod
    def from_places(slots_TA: jax.Array, num_slots: int) -> Slots:
        """Return the assignment in both directions, computed from the slot of every row.

        Args:
            slots_TA: Slot of every row, `num_slots` for a row that has no slot. No two other rows
                have the same slot.
            num_slots: Number of slots S of all experts, including experts of other devices.
        """
        num_rows = slots_TA.size
        empty_S = jnp.full(num_slots, num_rows, jnp.int32)
        rows_S = empty_S.at[slots_TA.reshape(-1)].set(jnp.arange(num_rows), mode="drop")
        return Slots(slots_TA, rows_S)

    def filled(self, x_TD: jax.Array) -> jax.Array:
        """Return the token in every slot, [S, D].

        Empty slots hold the last token, and pass no gradient to it. Outputs must be multiplied by
        `weights`, which are 0 for empty slots.
        """
        return _sum_rows(("clip", "fill"), x_TD, self._tokens(), self.slots_TA)

    def weights(self, weights_TA: jax.Array) -> jax.Array:
        """Return the weight of every slot, [S], which is 0 for empty slots."""
        slots_R1 = self.slots_TA.reshape(-1, 1)
        weights_R1 = weights_TA.reshape(-1, 1)
        modes = ("fill", "fill")
        weights_S1: Any = _sum_rows(modes, weights_R1, self.rows_S[:, None], slots_R1)
        return weights_S1[:, 0]

    def collected(self, y_SD: jax.Array) -> jax.Array:
        """Return the sum of the outputs in every token's slots, [T, D].

        An empty slot gets the gradient of the last token instead of 0.

        Args:
            y_SD: Outputs of experts in every slot, multiplied by `weights` already.
        """
        return _sum_rows(("fill", "clip"), y_SD, self.slots_TA, self._tokens())

    def _tokens(self) -> jax.Array:
        """Return the index of the token in every slot, int32 [S, 1]. It is T for an empty slot."""
        active = self.slots_TA.shape[1]
        return (self.rows_S // active)[:, None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum_rows(
    modes: tuple[str, str], x_ID: jax.Array, rows_OK: jax.Array, sums_IK: jax.Array
) -> jax.Array:
    """Return O sums of K rows of x each, [O, D], with a gradient that is no scatter.

    Args:
        modes: Treatment of an index past the last row, in this function and in its gradient. "fill"
            adds nothing, and for K = 1 takes a pass of its own over the result. "clip" adds the
            last row.
        x_ID: Rows to sum, [I, D].
        rows_OK: Indices of the rows in each sum, [O, K].
        sums_IK: Indices of the sums that each row of x is in. The gradient of x is the sum of the
            gradients of these sums. Its K can differ from that of `rows_OK`.
    """
    return jnp.sum(x_ID.at[rows_OK].get(mode=modes[0], fill_value=0), axis=1)


def _sum_rows_forward(
    modes: tuple[str, str], x_ID: jax.Array, rows_OK: jax.Array, sums_IK: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _sum_rows(modes, x_ID, rows_OK, sums_IK), (rows_OK, sums_IK)


def _sum_rows_backward(
    modes: tuple[str, str], indices: tuple[jax.Array, jax.Array], gradient_OD: jax.Array
) -> tuple[jax.Array, None, None]:
    rows_OK, sums_IK = indices
    forward_mode, backward_mode = modes
    gradient_ID: Any = _sum_rows((backward_mode, forward_mode), gradient_OD, sums_IK, rows_OK)
    return gradient_ID, None, None


_sum_rows.defvjp(_sum_rows_forward, _sum_rows_backward)


# Experts without a capacity: rows are sorted by expert.


def by_rows(
    expert: Callable[[jax.Array, Weights, jax.Array], jax.Array],
    x_BTD: jax.Array,
    choice: Choice,
    weights: Weights,
    *,
    layout: Layout,
) -> jax.Array:
    """Sort tokens by expert, apply the experts, and sum the outputs of every token.

    No token is dropped. A token has one row for each of its A experts.

    Args:
        expert: Function of rows sorted by expert [R, D], the weights of a device's experts, and the
            number of rows of each expert (`sizes_E` of `in_groups`). It returns outputs [R, D].
        x_BTD: Tokens, [B, T, D].
        choice: Experts of the tokens and weights of their outputs.
        weights: Weights of all experts, [E, ...] by name.
        layout: Layout whose devices split B examples (`_layout_for_batch`).

    Returns:
        The sums, weighted by `choice.weights_BTA`, [B, T, D].
    """

    def on_device(
        x_BTD: jax.Array,
        experts_BTA: jax.Array,
        weights_BTA: jax.Array,
        *device_arrays: jax.Array,
    ) -> jax.Array:
        mesh_axes = layout.mesh_axes("experts")
        device_weights = dict(zip(weights, device_arrays, strict=True))
        # The number of rows for a device's experts is known only at run time. All tokens are
        # therefore gathered along the mesh axis, and the sums of outputs are scattered. With n
        # devices this sends n - 1 copies of a token. An all-to-all would send A (n - 1) / n for A
        # active experts.
        x_BTD = all_gather(x_BTD, mesh_axes, 0)
        experts_BTA = all_gather(experts_BTA, mesh_axes, 0)
        weights_BTA = all_gather(weights_BTA, mesh_axes, 0)

        # Number experts from this device's first one, so that its own rows are sorted to the front.
        num_own = device_weights["up"].shape[0]
        num_experts = num_own * layout.num_shards("experts")
        device = jax.lax.axis_index(mesh_axes) if mesh_axes else 0
        expert_R = (experts_BTA.reshape(-1) - device * num_own) % num_experts
        order_R = jnp.argsort(expert_R, stable=True)
        active = experts_BTA.shape[-1]
        rows_RD = x_BTD.reshape(-1, x_BTD.shape[-1])[order_R // active]

        is_own_R = expert_R < num_own
        if mesh_axes:
            # One more group at the end counts the rows of other devices' experts.
            group_R = jnp.where(is_own_R, expert_R, num_own)
            sizes_E = jnp.bincount(group_R, length=num_own + 1)
        else:
            sizes_E = jnp.bincount(expert_R, length=num_own)

        y_RD = expert(rows_RD, device_weights, sizes_E)
        y_BTAD = y_RD[jnp.argsort(order_R)].reshape(*experts_BTA.shape, -1)
        if mesh_axes:
            weights_BTA = jnp.where(is_own_R.reshape(experts_BTA.shape), weights_BTA, 0)
        y_BTD = jnp.einsum("btad,bta->btd", y_BTAD, weights_BTA.astype(y_BTAD.dtype))
        if not mesh_axes:
            return y_BTD
        return jax.lax.psum_scatter(y_BTD, mesh_axes, scatter_dimension=0, tiled=True)

    return _on_every_device(
        layout,
        on_device,
        ("batch", "sequence", None),
        x_BTD,
        choice.experts_BTA,
        choice.weights_BTA,
        weights=weights,
    )


def _layout_for_batch(layout: Layout, batch_size: int) -> Layout:
    """Return the layout, or `ONE_DEVICE` if its devices do not divide the batch evenly.

    The batch size in text generation need not be a multiple of the number of devices.
    """
    if batch_size % layout.num_shards("batch"):
        return ONE_DEVICE
    return layout


def _on_every_device(
    layout: Layout,
    on_device: Callable[..., jax.Array],
    axes: Axes,
    *tokens: jax.Array,
    weights: Weights,
) -> jax.Array:
    """Call a function on every device with its part of the tokens and of the experts' weights.

    Args:
        layout: Layout of tokens and weights on the devices.
        on_device: Function of a device's part of each array of `tokens`, then of each of `weights`.
        axes: Logical axes of every array of tokens, and of the result.
        tokens: Arrays that have an entry for every token.
        weights: Weights of all experts, [E, ...] by name.
    """
    input_axes = [axes] * len(tokens)
    input_axes += [AXES[name] for name in weights]
    on_devices = layout.local(on_device, tuple(input_axes), axes)
    return on_devices(*tokens, *weights.values())


def _sum_over_devices(y: jax.Array, mesh_axes: tuple[str, ...]) -> jax.Array:
    """Return the sum of y over devices along mesh axes, or y if there are no axes."""
    return jax.lax.psum(y, mesh_axes) if mesh_axes else y


# Products of rows in groups, with one matrix per group.


def in_groups(x_RI: jax.Array, w_EIO: jax.Array, sizes_E: jax.Array, *, platform: str) -> jax.Array:
    """Return the product of every row with its group's matrix, [R, O].

    In a layer of experts, rows are tokens, and a group is the rows of one expert.

    Args:
        x_RI: Rows sorted by group, [R, I].
        w_EIO: Matrices of the groups, [E, I, O].
        sizes_E: Number of rows of every group, [E]. With [E + 1], the last entry counts rows of no
            group, whose products may be any finite number. The entries sum to R.
        platform: Platform that the product is compiled for: "cpu", "gpu" or "tpu".
    """
    sizes_E = sizes_E.astype(jnp.int32)
    if platform == "tpu":
        # For the gradient of the matrices, libtpu 0.0.42 compiles `ragged_dot` to a product of all
        # rows with all groups. With 16 groups, both gradients take 18 times the FLOPs of one
        # product, where megablox takes 2 times.
        return _megablox(x_RI, w_EIO, sizes_E)

    sizes_E = sizes_E[: w_EIO.shape[0]]
    if platform == "cpu":
        # On CPU, jax 0.10 compiles the forward pass of `ragged_dot` like that, too: with 8 groups
        # of 512 rows it takes 12 times as long as one product of as many rows.
        return _in_blocks(x_RI, w_EIO, sizes_E)
    return jax.lax.ragged_dot(x_RI, w_EIO, sizes_E)


def _megablox(
    x_RI: jax.Array, w_EIO: jax.Array, sizes_E: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """Compute `in_groups` by JAX's TPU kernel megablox.

    Args:
        x_RI: Rows sorted by group, [R, I].
        w_EIO: Matrices of the groups, [E, I, O].
        sizes_E: Number of rows of every group, int32 [E] or [E + 1].
        interpret: Run the kernel without a TPU, for tests. The default is False.
    """
    from jax.experimental.pallas.ops.tpu.megablox import gmm

    num_rows = x_RI.shape[0]
    itemsize = x_RI.dtype.itemsize
    # The kernel needs a multiple of `LANES` rows. The padding goes to the last group.
    x_RI = jnp.pad(x_RI, ((0, -num_rows % LANES), (0, 0)))
    padding = x_RI.shape[0] - num_rows
    if padding > 0:
        padding_E = jnp.zeros(len(sizes_E), jnp.int32).at[-1].set(padding)
        sizes_E = sizes_E + padding_E

    def tile_sizes(rows: int, inputs: int, outputs: int) -> tuple[int, int, int]:
        row_tile = TILE if rows % TILE == 0 else LANES
        return row_tile, _side_tile(inputs, itemsize), _side_tile(outputs, itemsize)

    product_RO = gmm(
        x_RI,
        w_EIO,
        sizes_E,
        x_RI.dtype,
        tile_sizes,  # pyright: ignore[reportArgumentType]
        # group_offset, existing_out and transpose_rhs.
        None,
        None,
        False,
        interpret,
    )
    return product_RO[:num_rows]


def _side_tile(size: int, itemsize: int) -> int:
    """Return the number of inputs or outputs of a row that a TPU kernel multiplies at once.

    The number is the largest multiple of `LANES` (128) that divides `size` and takes at most
    `SIDE_BYTES`. If none divides `size`, the last tile is only partly used.

    Args:
        size: Number of inputs or outputs of a row.
        itemsize: Size of one number in bytes.
    """
    largest = SIDE_BYTES // itemsize
    for tile in range(largest, 0, -LANES):
        if size % tile == 0:
            return tile
    padded_size = -(-size // LANES) * LANES
    return min(largest, padded_size)


def _in_blocks(x_RI: jax.Array, w_EIO: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Compute `in_groups` for a CPU, by blocks of `BLOCK` rows that belong to one group each.

    The last block of a group is filled up with rows of zeros.

    Args:
        x_RI: Rows sorted by group, [R, I].
        w_EIO: Matrices of the groups, [E, I, O].
        sizes_E: Number of rows of every group, int32 [E].
    """
    num_rows = x_RI.shape[0]
    num_groups = w_EIO.shape[0]
    # Shapes under jit must not depend on `sizes_E`, so this is the upper bound: rounding up adds at
    # most one block per group.
    num_blocks = num_rows // BLOCK + num_groups
    blocks_E = -(-sizes_E // BLOCK)
    first_row_E = jnp.cumsum(sizes_E) - sizes_E
    first_block_E = jnp.cumsum(blocks_E) - blocks_E

    group_R = jnp.repeat(jnp.arange(num_groups), sizes_E, total_repeat_length=num_rows)
    place_R = first_block_E[group_R] * BLOCK + jnp.arange(num_rows) - first_row_E[group_R]
    zeros = jnp.zeros((num_blocks * BLOCK, x_RI.shape[1]), x_RI.dtype)
    filled = zeros.at[place_R].set(x_RI, unique_indices=True)

    group_N = jnp.repeat(jnp.arange(num_groups), blocks_E, total_repeat_length=num_blocks)
    blocks_NBI = filled.reshape(num_blocks, BLOCK, -1)
    y = jnp.einsum("nri,nio->nro", blocks_NBI, w_EIO[group_N])
    return y.reshape(num_blocks * BLOCK, -1)[place_R]
