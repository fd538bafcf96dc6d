"""Parameters and factors of a module, made from their declaration.

    self.query = init.param("query")

makes the `nnx.Param` that the config declares under this name, in the scope of the module. A `Factor` is a number the forward
pass multiplies by (attention logits, branches); a parameterization sets it, nothing trains or saves it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mupax.presets.roles import ParamSpec, Role
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
    if spec.stacked:
        std = jnp.broadcast_to(jnp.asarray(std, jnp.float32), shape[:1]).reshape(-1, *[1] * (len(shape) - 1))
    if spec.role in (Role.NORM_GAIN, Role.BIAS):
        return jnp.broadcast_to(jnp.asarray(std, dtype), shape)
    if not spec.stacked:
        return (std * jax.random.normal(key, shape)).astype(dtype)
    keys = jax.vmap(lambda layer: jax.random.fold_in(key, layer))(jnp.arange(shape[0]))
    return (std * jax.vmap(lambda layer_key: jax.random.normal(layer_key, shape[1:]))(keys)).astype(dtype)


class Init:
    """Makes what a config declares, in one scope of its module tree.

    Args:
        config: declares parameters, factors and sizes.
        rngs: source of the `params` stream.
        prefix: the scope's path, with a dot at its end.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, prefix: str = "") -> None:
        self._config, self._rngs, self._prefix = config, rngs, prefix
        self._specs, self._sizes = config.parameters(), config.sizes()

    def scope(self, name: str) -> Init:
        """For the module kept as `name`."""
        return Init(self._config, self._rngs, f"{self._prefix}{name}.")

    def param(self, name: str) -> nnx.Param:
        """The parameter of this name as it starts without a preset: at fan_in^-1/2 (1 where there is none), biases at 0."""
        spec = self._specs[self._prefix + name]
        shape, dtype = tuple(self._sizes[axis] for axis in spec.axes), jnp.dtype(self._config.compute.param_dtype)
        std = 0.0 if spec.role is Role.BIAS else math.prod(self._sizes[axis] for axis in spec.fan_in) ** -0.5
        return nnx.Param(initial_value(self._rngs.params(), spec, shape, std, dtype), spec=spec)

    def maybe(self, name: str) -> nnx.Param | None:
        """The same, None where the config declares none."""
        return self.param(name) if self._prefix + name in self._specs else None

    def factor(self, name: str) -> Factor:
        """The multiplier of this name, at its value without a preset."""
        spec = self._config.factors()[self._prefix + name]
        return Factor(jnp.full(spec.shape, spec.value, jnp.float32), kind=spec.kind, spec=spec.spec)


def multiplied(params: Mapping[str, Any], multipliers: Mapping[str, Any]) -> dict[str, jax.Array]:
    """a * w for every parameter; a multiplier is a scalar or one number per layer of a stacked parameter."""

    def product(w: jax.Array, a: jax.Array) -> jax.Array:
        return (w * a.reshape(a.shape + (1,) * (w.ndim - a.ndim))).astype(w.dtype)

    return {name: product(w, multipliers[name]) for name, w in params.items()}
