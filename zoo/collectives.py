"""What devices send each other where a model is split by hand: a part made whole, and a sum made parts, in the way that suits the network."""

from __future__ import annotations

import math

import jax
import numpy as np
from jax.sharding import Mesh

from mupax.zoo.partition import ONE_DEVICE, Layout


def all_gather(x: jax.Array, names: tuple[str, ...], dimension: int) -> jax.Array:
    """x whole along a dimension that mesh axes split; inside of `shard_map`.

    One axis after another: of several at once the TPU compiler makes a sum of whole arrays, twice the bytes, beside nothing.

    Args:
        x: this device's part.
        names: of the mesh axes, the first one outermost; none: x as it is.
        dimension: that they split.
    """
    for name in reversed(names):
        x = jax.lax.all_gather(x, name, axis=dimension, tiled=True)
    return x


def reduce_scatter(
    x: jax.Array, names: tuple[str, ...], dimension: int, *, layout: Layout = ONE_DEVICE
) -> jax.Array:
    """Return this device's part, along a dimension, of the sum of x over mesh axes: the inverse of `all_gather`.

    With `Layout.per_axis_reduce_scatter` the sum goes over one dimension of a torus at a time. Over several at once the TPU
    compiler sums everything everywhere, which is twice the bytes, and then takes a part. On TPU the sum also goes over one mesh
    axis at a time, since the compiler does not overlap a sum over several axes with other work.

    Args:
        x: whole along the dimension, on every device.
        names: of the mesh axes, the first one outermost; none: x as it is.
        dimension: that is split.
        layout: of the mesh that has these axes.
    """
    if names and layout.gradient_dtype:
        return layout.exchange(x, names, dimension)
    if layout.per_axis_reduce_scatter:
        rings = _rings(layout.mesh, names)
    elif layout.platform == "tpu":
        rings = [(name, None) for name in names]
    else:
        rings = [(names, None)] if names else []
    for name, groups in rings:
        x = jax.lax.psum_scatter(
            x, name, scatter_dimension=dimension, tiled=True, axis_index_groups=groups
        )
    return x


def _rings(mesh: Mesh, names: tuple[str, ...]) -> list[tuple[str, list[list[int]] | None]]:
    """Mesh axes, outermost first, each cut into the dimensions of the torus that it spans: groups of indices along it."""
    rings = []
    for name in names:
        sizes = torus(
            np.moveaxis(mesh.devices, mesh.axis_names.index(name), -1).reshape(
                -1, mesh.shape[name]
            )[0]
        )
        places = np.arange(mesh.shape[name]).reshape(sizes)
        for dimension, size in enumerate(sizes):
            groups = np.moveaxis(places, dimension, -1).reshape(-1, size).tolist()
            rings.append((name, groups if len(sizes) > 1 else None))
    return rings


def torus(devices: np.ndarray) -> tuple[int, ...]:
    """Sizes of the torus' dimensions that devices in a row fill, the slowest first; their number where they do not.

    Args:
        devices: along one mesh axis.
    """
    places = np.array(
        [getattr(device, "coords", (index,)) for index, device in enumerate(devices)]
    ).T
    ranks = [np.unique(place, return_inverse=True)[1] for place in places if np.ptp(place)]
    ranks.sort(key=lambda rank: -int(np.argmax(rank != rank[0])))
    sizes = tuple(int(rank.max()) + 1 for rank in ranks)
    filled = math.prod(sizes) == len(devices) and np.array_equal(
        ranks, np.indices(sizes).reshape(len(sizes), -1)
    )
    return sizes if filled else (len(devices),)
