"""Parameters and factors: how a module declares what it trains and what it multiplies by.

    self.query = init.param(Role.QUERY, ("embed", "heads", "head_dim"), fan_in=("embed",))

makes an `nnx.Param` whose shape follows from its axes and which carries a `presets.ParamSpec`. A `Factor` is a number
the forward pass multiplies by (attention logits, branches); a parameterization sets it, nothing trains or saves it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from presets.roles import ParamSpec, Role

Kind = Literal["logits", "skip", "branch", "readout"]


class Factor(nnx.Variable):
    """A forward multiplier, with metadata `kind` (and `spec` for a tied readout).

    kind "logits": attention logits, float32 [layers]. "skip" and "branch": residual stack, float32 [layers, 2 (attention, mlp)].
    "readout": a readout that shares the embedding's table, float32 [].
    """


def initial_value(
    key: jax.Array, spec: ParamSpec, shape: tuple[int, ...], std: jax.Array | float, dtype: jnp.dtype
) -> jax.Array:
    """std * Normal(0, 1), biases 0, gains exactly std.

    With a leading "layers" axis every layer draws from its own key, folded from `key` by its index, and std may be
    per layer: a stacked parameter starts as the separate layers would, on any mesh. (With jax 0.12 on CPU to the last
    bit only if made whole: how a row is split decides which numbers its vector instructions leave over.)
    """
    if spec.role in (Role.NORM_GAIN, Role.BIAS):
        std = (
            jnp.broadcast_to(jnp.asarray(std, dtype), shape[:1])
            if spec.axes[:1] == ("layers",)
            else jnp.asarray(std, dtype)
        )
        return jnp.broadcast_to(std.reshape(std.shape + (1,) * (len(shape) - std.ndim)), shape)
    if spec.axes[:1] != ("layers",):
        return (std * jax.random.normal(key, shape)).astype(dtype)
    keys = jax.vmap(lambda layer: jax.random.fold_in(key, layer))(jnp.arange(shape[0]))
    normal = jax.vmap(lambda layer_key: jax.random.normal(layer_key, shape[1:]))(keys)
    std = jnp.broadcast_to(jnp.asarray(std, jnp.float32), shape[:1])
    return (std.reshape(-1, *[1] * (len(shape) - 1)) * normal).astype(dtype)


def fan_in_std(spec: ParamSpec, sizes: Mapping[str, int]) -> float:
    """fan_in^-1/2, 1 for embeddings looked up and gains, 0 for biases: how a model starts when no preset is used."""
    return 0.0 if spec.role is Role.BIAS else math.prod(sizes[axis] for axis in spec.fan_in) ** -0.5


@dataclasses.dataclass(frozen=True)
class Init:
    """Makes the parameters of one module tree.

    Attributes:
        rngs: source of the `params` stream.
        sizes: size of every logical axis.
        dtype: storage type.
        in_block: whether what is made sits in the residual stack; it is then stacked along "layers".
    """

    rngs: nnx.Rngs
    sizes: Mapping[str, int]
    dtype: jnp.dtype = jnp.float32
    in_block: bool = False

    def stacked(self) -> Init:
        """For modules of the residual stack: every parameter gets a leading "layers" axis."""
        return dataclasses.replace(self, in_block=True)

    def param(
        self, role: Role, axes: tuple[str, ...], *, fan_in: tuple[str, ...] = (), of: Role | None = None
    ) -> nnx.Param:
        """A parameter of shape [sizes[a] for a in axes], with its spec, at `fan_in_std`."""
        axes = ("layers", *axes) if self.in_block else axes
        spec = ParamSpec(role=role, axes=axes, fan_in=fan_in, in_block=self.in_block, of=of)
        shape = tuple(self.sizes[axis] for axis in axes)
        return nnx.Param(
            initial_value(self.rngs.params(), spec, shape, fan_in_std(spec, self.sizes), self.dtype), spec=spec
        )

    def logit_factor(self) -> Factor:
        """Scale of attention logits, head_dim^-1/2 until a preset sets it."""
        return Factor(jnp.full((self.sizes["layers"],), self.sizes["head_dim"] ** -0.5), kind="logits")

    def branch_factor(self) -> Factor:
        """Scales of what both residual additions of every block add, 1 until a preset sets them."""
        return Factor(jnp.ones((self.sizes["layers"], 2)), kind="branch")

    def skip_factor(self) -> Factor:
        """Scales of what they add to; a preset that leaves it at 1 pays nothing (see `Definition.bind`)."""
        return Factor(jnp.ones((self.sizes["layers"], 2)), kind="skip")

    def tied_readout_factor(self, axes: tuple[str, ...], fan_in: tuple[str, ...]) -> Factor:
        """Multiplier of a readout through the token embedding."""
        spec = ParamSpec(role=Role.READOUT, axes=axes, fan_in=fan_in, tied=True)
        return Factor(jnp.float32(fan_in_std(spec, self.sizes)), kind="readout", spec=spec)


def multiplied(params: Mapping[str, Any], multipliers: Mapping[str, Any]) -> dict[str, jax.Array]:
    """a * w for every parameter; a multiplier is a scalar or one number per layer of a stacked parameter."""

    def one(w: jax.Array, a: jax.Array) -> jax.Array:
        a = a.reshape(a.shape + (1,) * (w.ndim - a.ndim))
        return (w * a).astype(w.dtype)

    return {name: one(w, multipliers[name]) for name, w in params.items()}
