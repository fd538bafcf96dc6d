"""The numbers that parameters start with: each parameter's drawn from its own key, by themselves or all in one loop.

A CPU's compiler takes 0.4 s for every draw of its own, so there the loop makes the random bits of all of them: integers, the same
however they are computed. Normal numbers are then made of them parameter by parameter, as `jax.random.normal` does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry_2x32

from mupax.presets.roles import VECTORS, Distribution, ParamSpec

_BLOCK_BITS = 14
_BLOCK = 1 << _BLOCK_BITS
"""Numbers of a turn of the loop."""


def initial_value(
    key: jax.Array,
    spec: ParamSpec,
    shape: tuple[int, ...],
    std: jax.Array | float,
    dtype: jnp.dtype,
    normal: jax.Array | None = None,
) -> jax.Array:
    """A parameter as it starts: std times numbers of deviation 1 from the declared distribution, of gains and biases exactly std.

    With a leading "layers" axis every layer draws from its own key, folded from `key` by its index, and std may be
    per layer: a stacked parameter starts as the separate layers would, on any mesh. (With jax 0.12 on CPU to the last
    bit only if made whole: how a row is split decides which numbers its vector instructions leave over.)

    Args:
        key: of this parameter alone.
        spec: its declaration.
        shape: a size for every axis of the spec.
        std: [], or [layers] for a stacked parameter; 0 for a bias.
        dtype: that it is stored in; numbers are drawn in float32.
        normal: the numbers, where they are drawn already (`normals`).
    """
    if spec.stacked:
        std = jnp.broadcast_to(jnp.asarray(std, jnp.float32), shape[:1]).reshape(-1, *[1] * (len(shape) - 1))
    if spec.role in VECTORS:
        return jnp.broadcast_to(jnp.asarray(std, dtype), shape)
    if normal is None and spec.stacked:
        normal = jax.vmap(lambda layer_key: jax.random.normal(layer_key, shape[1:]))(_layer_keys(key, shape[0]))
    elif normal is None:
        normal = jax.random.normal(key, shape)
    return (std * _spread(normal, spec.distribution)).astype(dtype)


_CUT = 2.0
"""Deviations of a normal distribution beyond which a truncated one has nothing, and by what that leaves it narrower: 0.8796."""
_CUT_DEVIATION = math.sqrt(
    1 - 2 * _CUT * math.exp(-(_CUT**2) / 2) / math.sqrt(2 * math.pi) / math.erf(_CUT / math.sqrt(2))
)


def _spread(normal: jax.Array, distribution: Distribution) -> jax.Array:
    """Numbers of another distribution with deviation 1, by the shares of a normal one that lie below them.

    uniform: in +-3^1/2, as Glorot and Bengio 2010. truncated: what Flax's truncated initializers draw.
    """
    if distribution == "normal":
        return normal
    share = jax.lax.erf(normal / math.sqrt(2))  # even in (-1, 1)
    if distribution == "uniform":
        return math.sqrt(3) * share
    return math.sqrt(2) / _CUT_DEVIATION * jax.lax.erf_inv(share * math.erf(_CUT / math.sqrt(2)))


def _layer_keys(key: jax.Array, layers: int) -> jax.Array:
    return jax.vmap(lambda layer: jax.random.fold_in(key, layer))(jnp.arange(layers))


def normals(
    keys: Mapping[str, jax.Array], specs: Mapping[str, ParamSpec], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, jax.Array]:
    """What `initial_value` would draw for each parameter, bit for bit, by name, float32.

    None of them where JAX's random bits are not Threefry's of every position, its default.

    Args:
        keys: of the parameters.
        specs: their declarations.
        shapes: a size for every axis of the spec.
    """
    names = [name for name, spec in specs.items() if spec.role not in VECTORS]
    if not (names and jax.config.jax_default_prng_impl == "threefry2x32" and jax.config.jax_threefry_partitionable):  # pyright: ignore
        return {}
    stacked = [name for name in names if specs[name].stacked]
    rows = {name: keys[name][None] for name in names}
    if stacked:
        most = max(shapes[name][0] for name in stacked)
        each = jax.vmap(_layer_keys, (0, None))(jnp.stack([keys[name] for name in stacked]), most)
        rows |= {name: of[: shapes[name][0]] for name, of in zip(stacked, each, strict=True)}
    sizes = {name: math.prod(shapes[name]) // len(rows[name]) for name in names}
    blocks = {name: -(-sizes[name] // _BLOCK) for name in names}
    data = jax.random.key_data(jnp.concatenate([rows[name] for name in names]))
    data = data[np.repeat(np.arange(len(data)), [blocks[name] for name in names for _ in rows[name]])]
    numbers = np.concatenate([np.tile(np.arange(blocks[name], dtype=np.uint32), len(rows[name])) for name in names])

    def block(of: tuple[jax.Array, jax.Array]) -> jax.Array:
        key, number = of  # the position of a number has 64 bits
        high = jnp.full(_BLOCK, number >> (32 - _BLOCK_BITS))
        low = (number << _BLOCK_BITS) | jnp.arange(_BLOCK, dtype=jnp.uint32)
        first, second = threefry_2x32((key[0], key[1]), jnp.concatenate([high, low])).reshape(2, _BLOCK)
        return first ^ second

    bits, start, drawn = jax.lax.map(block, (data, numbers)), 0, {}
    for name in names:
        stop = start + len(rows[name]) * blocks[name]
        drawn[name] = _normal(bits[start:stop].reshape(len(rows[name]), -1)[:, : sizes[name]].reshape(shapes[name]))
        start = stop
    return drawn


def _normal(bits: jax.Array) -> jax.Array:
    """uint32 to Normal(0, 1) as in `jax.random.normal`: 23 bits to (-1, 1), and sqrt(2) times the inverse of erf."""
    low, one = np.nextafter(np.float32(-1), np.float32(0)), np.float32(1)
    uniform = jax.lax.bitcast_convert_type((bits >> 9) | one.view(np.uint32), jnp.float32) - one
    return np.float32(np.sqrt(2)) * jax.lax.erf_inv(jnp.maximum(low, uniform * (one - low) + low))
