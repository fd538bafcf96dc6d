"""Where tokens meet experts on a mesh: devices that split examples send each other what goes to the experts that they split too.

B batch, T positions, D width, E experts, A that a token goes to, C tokens that an expert takes of an example, R rows, one per token
and expert of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from mupax.zoo import partition
from mupax.zoo.experts.routing import Choice

Weights = dict[str, jax.Array]
"""Of experts, by name; the first dimension counts them."""

_OUT = ("experts", None, "expert_dim")
AXES = {
    "up": _OUT, "gate": _OUT, "down": ("experts", "expert_dim", None),
    "up_bias": ("experts", "expert_dim"), "gate_bias": ("experts", "expert_dim"), "down_bias": ("experts", None),
}  # fmt: skip
"""How weights are split where products are taken; whole over the devices of fsdp."""


def by_slots(
    expert: Callable[[jax.Array, jax.Array | None, Weights], jax.Array],
    x_BECD: jax.Array,
    gates_BEC: jax.Array | None,
    weights: Weights,
) -> jax.Array:
    """What experts make of the tokens in their slots, [B, E, C, D], split by examples as they are.

    Between an all-to-all there and one back a device has its own experts' tokens of all examples of the mesh axis `experts`.

    Args:
        expert: of tokens, their gates and as many experts' weights; what it returns lacks nothing, where devices split the hidden
            layer either.
        x_BECD: tokens.
        gates_BEC: what each counts; None where that is not experts' to weigh.
        weights: of all experts.
    """
    slots = (x_BECD,) if gates_BEC is None else (x_BECD, gates_BEC)

    def part(*parts: jax.Array) -> jax.Array:
        names, here = partition.current().names("experts"), dict(zip(weights, parts[len(slots) :], strict=True))
        there = [jax.lax.all_to_all(x, names, 1, 0, tiled=True) if names else x for x in parts[: len(slots)]]
        y_BECD = expert(there[0], there[1] if there[1:] else None, here)
        return jax.lax.all_to_all(y_BECD, names, 0, 1, tiled=True) if names else y_BECD

    return _local(part, tuple(("batch", *[None] * (x.ndim - 1)) for x in slots), *slots, weights=weights)


def by_rows(
    expert: Callable[[jax.Array, Weights, jax.Array], jax.Array], x_BTD: jax.Array, choice: Choice, weights: Weights
) -> jax.Array:
    """What all of its experts make of a token, weighed and added up, [B, T, D]; none is dropped.

    How many rows a device has for its experts is known on the way only, so along the mesh axis `experts` all tokens are gathered and
    sums of outputs scattered: (n - 1) copies of a token for n devices, where an all-to-all would send A (n - 1) / n.

    Args:
        expert: of rows in the order of experts, weights, and how many rows every expert has (`products.in_groups`).
        x_BTD: tokens.
        choice: their experts.
        weights: of all experts.
    """

    def part(x_BTD: jax.Array, experts_BTA: jax.Array, weights_BTA: jax.Array, *parts: jax.Array) -> jax.Array:
        names, here = partition.current().names("experts"), dict(zip(weights, parts, strict=True))
        x_BTD, experts_BTA, weights_BTA = (partition.all_gather(x, names, 0) for x in (x_BTD, experts_BTA, weights_BTA))
        first, experts = (jax.lax.axis_index(names) if names else 0), here["up"].shape[0]
        of_R = (experts_BTA.reshape(-1) - first * experts) % (
            experts * partition.current().ways("experts")
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
        weights_BTA = jnp.where(own_R.reshape(experts_BTA.shape), weights_BTA, 0) if names else weights_BTA
        y_BTD = jnp.einsum("btad,bta->btd", y_BTAD, weights_BTA.astype(y_BTAD.dtype))
        return jax.lax.psum_scatter(y_BTD, names, scatter_dimension=0, tiled=True) if names else y_BTD

    axes = ("batch", "sequence", None)
    return _local(part, (axes, axes, axes), x_BTD, choice.experts_BTA, choice.weights_BTA, weights=weights)


def _local(
    part: Callable[..., jax.Array], axes: tuple[partition.Axes, ...], *tokens: jax.Array, weights: Weights
) -> jax.Array:
    """`part` of tokens and weights on every device; of all at once where examples do not split, as when text is written."""
    layout = partition.current()
    if tokens[0].shape[0] % layout.ways("batch"):
        with partition.using(None):
            return part(*tokens, *weights.values())
    return layout.local(part, (*axes, *(AXES[name] for name in weights)), axes[0])(*tokens, *weights.values())


def summed(y: jax.Array) -> jax.Array:
    """The sum over devices that split experts' hidden layer."""
    names = partition.current().names("expert_dim")
    return jax.lax.psum(y, names) if names else y
