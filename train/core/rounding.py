"""Stochastic rounding to bfloat16 (Gupta et al. 2015, Zamirai et al. 2020), so that small updates of stored parameters count.

bfloat16 keeps 8 bits of a number. An update of less than 2^-9 of a parameter is lost if the sum is rounded to the nearest
number, at every step anew. Rounded up or down by chance, in proportion to the distance, the sum is right on average.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

_STREAM = 0x726F756E
"""Keeps these random numbers apart from those that other parts of a run draw from the same seed."""
_GOLDEN = 0x9E3779B9
"""2^32 divided by the golden ratio: its multiples are spread evenly."""
_LOW_BITS = 0xFFFF


class Rounding(NamedTuple):
    """Source of the random bits of one step."""

    seed: Any
    """uint32 []."""
    step: Any = 0
    """Optimizer steps done, int32 []."""


def widened(tree: Any) -> Any:
    """Return a tree whose bfloat16 arrays are float32; other leaves stay as they are."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if _is_narrow(leaf) else leaf, tree)


def narrowed(tree: Any, like: Any, rounding: Rounding) -> Any:
    """Round float32 arrays stochastically where they are stored in bfloat16.

    The result is a function of the numbers, the seed, the step, and each array's place in the tree. It does not depend on the
    mesh, and a resumed run rounds as an uninterrupted one.

    Args:
        tree: computed in float32.
        like: tree of the same structure, in the types that are stored.
        rounding: source of the random bits.
    """
    key = _mixed(_mixed(_uint(rounding.seed) ^ _uint(_STREAM)) + _uint(rounding.step) * _uint(_GOLDEN))
    leaves, structure = jax.tree.flatten(tree)
    stored = []
    for number, (leaf, before) in enumerate(zip(leaves, jax.tree.leaves(like), strict=True)):
        if _is_narrow(before) and leaf.dtype == jnp.float32:
            leaf_key = _mixed(key + _uint(number) * _uint(_GOLDEN))
            stored.append(stochastically_rounded(leaf, leaf_key))
        else:
            stored.append(leaf)
    return jax.tree.unflatten(structure, stored)


def stochastically_rounded(x: jax.Array, key: jax.Array) -> jax.Array:
    """Round to bfloat16, up or down by chance, such that the expectation is `x`.

    Args:
        x: float32, of any shape.
        key: uint32 [].
    """
    # A hash of each number's position, not `jax.random`: a CPU's compiler takes 0.4 s for every array that Threefry draws.
    position = jnp.zeros(x.shape, jnp.uint32)
    for axis, size in enumerate(x.shape):
        position = position * _uint(size) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    noise = _mixed(_mixed(position * _uint(_GOLDEN) + key) ^ key) & _uint(_LOW_BITS)
    # The low half is what bfloat16 cuts off. Added to 16 random bits, it carries with a chance in proportion to its size.
    bits = (jax.lax.bitcast_convert_type(x, jnp.uint32) + noise) & ~_uint(_LOW_BITS)
    rounded = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)


def _mixed(bits: jax.Array) -> jax.Array:
    """Hash uint32 numbers (the finalizer of MurmurHash3, Appleby 2011)."""
    bits = (bits ^ (bits >> 16)) * _uint(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * _uint(0xC2B2AE35)
    return bits ^ (bits >> 16)


def _uint(number: Any) -> jax.Array:
    return jnp.asarray(number, jnp.uint32)


def _is_narrow(leaf: Any) -> bool:
    return getattr(leaf, "dtype", None) == jnp.bfloat16
