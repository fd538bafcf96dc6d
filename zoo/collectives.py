"""Collectives of manual FSDP: gather a sharded array, and sum and shard a gradient.

They send data over one mesh axis, or one dimension of a torus, at a time where that is faster.
"""

from __future__ import annotations

import math

import jax
import numpy as np
from jax.sharding import Mesh

from mupax.zoo.partition import ONE_DEVICE, Layout


def all_gather(x: jax.Array, names: tuple[str, ...], dimension: int) -> jax.Array:
    """Return an array gathered along a dimension that mesh axes split. Call inside `shard_map`.

    Args:
        x: Part of the array on this device, of full size along all other dimensions.
        names: Mesh axes that split the dimension, the outermost first. For `()` the result is x.
        dimension: Index of the dimension that these mesh axes split.
    """
    # One collective per mesh axis. The TPU compiler turns an all-gather over several axes into an
    # all-reduce of full-size arrays. That sends twice the bytes, and does not overlap with other
    # work.
    for name in reversed(names):
        x = jax.lax.all_gather(x, name, axis=dimension, tiled=True)
    return x


def reduce_scatter(
    x: jax.Array, names: tuple[str, ...], dimension: int, *, layout: Layout = ONE_DEVICE
) -> jax.Array:
    """Sum an array over mesh axes, and return this device's part of the sum.

    This is the transpose of `all_gather`. With `Layout.gradient_dtype`, summands are rounded to
    that type (`Layout.exchange`). Call inside `shard_map`.

    Args:
        x: Summand of this device, of full size along the dimension.
        names: Mesh axes to sum over, the outermost first. For `()` the result is x.
        dimension: Index of the dimension that is split. The number of devices along the mesh axes
            must divide its size.
        layout: Layout whose mesh has these axes. It also chooses the type that is sent.
    """
    if names and layout.gradient_dtype:
        return layout.exchange(x, names, dimension)

    # A step is (mesh axes to sum over, groups). The groups, or None, are `axis_index_groups` of
    # `psum_scatter`: they restrict the sum to one ring of the torus.
    if layout.per_axis_reduce_scatter:
        # Sum over one dimension of the torus at a time. Over several at once, the TPU compiler does
        # an all-reduce, which sends twice the bytes, and then takes a slice.
        steps = _rings(layout.mesh, names)
    elif layout.platform == "tpu":
        # The TPU compiler does not overlap a sum over several mesh axes with other work.
        steps = [(name, None) for name in names]
    elif names:
        steps = [(names, None)]
    else:
        steps = []
    for axis_names, groups in steps:
        x = jax.lax.psum_scatter(
            x, axis_names, scatter_dimension=dimension, tiled=True, axis_index_groups=groups
        )
    return x


def _rings(mesh: Mesh, names: tuple[str, ...]) -> list[tuple[str, list[list[int]] | None]]:
    """Split mesh axes into the dimensions of the torus that they span, the outermost first.

    Each entry is a mesh axis with the groups of its indices that form rings along one dimension, or
    with `None` if the axis is a single ring.
    """
    rings = []
    for name in names:
        size = mesh.shape[name]
        rows = np.moveaxis(mesh.devices, mesh.axis_names.index(name), -1).reshape(-1, size)
        torus_sizes = torus(rows[0])
        indices = np.arange(size).reshape(torus_sizes)
        # Groups are not needed on one ring: the mesh axis itself is the ring.
        if len(torus_sizes) == 1:
            rings.append((name, None))
            continue
        for dimension, ring_size in enumerate(torus_sizes):
            groups = np.moveaxis(indices, dimension, -1).reshape(-1, ring_size).tolist()
            rings.append((name, groups))
    return rings


def torus(devices: np.ndarray) -> tuple[int, ...]:
    """Return the sizes of the torus of chips that a row of devices fills, in row-major order.

    The first size is of the torus dimension along which the coordinate changes last. The result is
    (len(devices),) if the devices have no coordinates, or do not fill a torus in this order.

    Args:
        devices: Devices along one mesh axis, [n].
    """
    coordinates = np.array(
        [getattr(device, "coords", (index,)) for index, device in enumerate(devices)]
    )
    # Rank of every device along each torus dimension in which the devices differ.
    ranks = []
    for coordinate in coordinates.T:
        if np.ptp(coordinate):
            _, rank = np.unique(coordinate, return_inverse=True)
            ranks.append(rank)
    # Sort the dimensions from the slowest to the fastest. The slower a dimension, the later its
    # rank changes for the first time.
    ranks.sort(key=lambda rank: -int(np.argmax(rank != rank[0])))

    sizes = tuple(int(rank.max()) + 1 for rank in ranks)
    if math.prod(sizes) != len(devices):
        return (len(devices),)
    in_order = np.array_equal(ranks, np.indices(sizes).reshape(len(sizes), -1))
    if not in_order:
        return (len(devices),)
    return sizes
