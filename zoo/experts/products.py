"""Products of rows in groups with a matrix a group. R rows, I inputs, O outputs, E groups."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mupax.zoo import partition

BLOCK = 64
"""Rows of one group that a CPU multiplies at once."""


def in_groups(x_RI: jax.Array, w_EIO: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """The product of every row with its group's matrix, [R, O].

    `jax.lax.ragged_dot`, but on CPU, where jax 0.10 multiplies all rows with all matrices (12 times as long as one product of as
    many rows, 8 groups of 512 rows): there by blocks of rows of one group each, the last one of a group filled up with zeros.

    Args:
        x_RI: rows, those of the first group first.
        w_EIO: matrices.
        sizes_E: int32, rows of every group; they add up to R.
    """
    if partition.current().platform != "cpu":
        return jax.lax.ragged_dot(x_RI, w_EIO, sizes_E.astype(jnp.int32))
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
