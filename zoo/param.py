"""Parameters and factors of a module, made from their declaration.

    self.query = init.param("query")

makes the `nnx.Param` that the config declares under this name, in the scope of the module. A `Factor` is a number the forward
pass multiplies by (attention logits, branches); a parameterization sets it, nothing trains or saves it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mupax.presets.roles import FactorSpec, ParamSpec, Role
from mupax.zoo.families import ModelConfig


class Factor(nnx.Variable):
    """A forward multiplier, float32, with the `kind` and `spec` of its `FactorSpec` as metadata."""


def initial_value(
    key: jax.Array, spec: ParamSpec, shape: tuple[int, ...], std: jax.Array | float, dtype: jnp.dtype
) -> jax.Array:
    """std * Normal(0, 1), biases 0, gains exactly std.

    With a leading "layers" axis every layer draws from its own key, folded from `key` by its index, and std may be
    per layer: a stacked parameter starts as the separate layers would, on any mesh. (With jax 0.12 on CPU to the last
    bit only if made whole: how a row is split decides which numbers its vector instructions leave over.)
    """
    if spec.role in (Role.NORM_GAIN, Role.BIAS):
        std = jnp.broadcast_to(jnp.asarray(std, dtype), shape[:1]) if spec.stacked else jnp.asarray(std, dtype)
        return jnp.broadcast_to(std.reshape(std.shape + (1,) * (len(shape) - std.ndim)), shape)
    if not spec.stacked:
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
    """Makes what a config declares, in one scope of its module tree.

    Attributes:
        rngs: source of the `params` stream.
        specs: name to declaration.
        factors: name to forward multiplier.
        sizes: size of every logical axis.
        dtype: storage type.
        prefix: the scope's path, with a dot at its end.
    """

    rngs: nnx.Rngs
    specs: Mapping[str, ParamSpec]
    factors: Mapping[str, FactorSpec]
    sizes: Mapping[str, int]
    dtype: jnp.dtype
    prefix: str = ""

    @classmethod
    def of(cls, config: ModelConfig, rngs: nnx.Rngs) -> Init:
        """For the root of a config's module."""
        dtype = jnp.dtype(config.compute.param_dtype)
        return cls(rngs, config.parameters(), config.factors(), config.sizes(), dtype)

    def scope(self, name: str) -> Init:
        """For the module kept as `name`."""
        return dataclasses.replace(self, prefix=f"{self.prefix}{name}.")

    def param(self, name: str) -> nnx.Param:
        """The parameter of this name, at `fan_in_std`."""
        spec = self.specs[self.prefix + name]
        shape = tuple(self.sizes[axis] for axis in spec.axes)
        value = initial_value(self.rngs.params(), spec, shape, fan_in_std(spec, self.sizes), self.dtype)
        return nnx.Param(value, spec=spec)

    def maybe(self, name: str) -> nnx.Param | None:
        """The same, None where the config declares none."""
        return self.param(name) if self.prefix + name in self.specs else None

    def factor(self, name: str) -> Factor:
        """The multiplier of this name, at its value without a preset."""
        spec = self.factors[self.prefix + name]
        return Factor(jnp.full(spec.shape, spec.value, jnp.float32), kind=spec.kind, spec=spec.spec)


def multiplied(params: Mapping[str, Any], multipliers: Mapping[str, Any]) -> dict[str, jax.Array]:
    """a * w for every parameter; a multiplier is a scalar or one number per layer of a stacked parameter."""

    def one(w: jax.Array, a: jax.Array) -> jax.Array:
        a = a.reshape(a.shape + (1,) * (w.ndim - a.ndim))
        return (w * a).astype(w.dtype)

    return {name: one(w, multipliers[name]) for name, w in params.items()}
