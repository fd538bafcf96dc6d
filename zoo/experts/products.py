"""Products of rows in groups with a matrix a group. R rows, I inputs, O outputs, E groups."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mupax.zoo.partition import LANES

BLOCK = 64
"""Rows of one group that a CPU multiplies at once."""
TILE, SIDE_BYTES = 512, 2048
"""Rows, and bytes of inputs or outputs of a row, that a TPU's kernel multiplies at once."""


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
