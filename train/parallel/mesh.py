"""The device mesh of a run: named axes over all devices, the slow network outside and the fast one inside."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from mupax.errors import MupaxError
from mupax.train.config.devices import MESH_AXES, parse_slices
from mupax.train.config.run import MeshConfig


class MeshError(MupaxError):
    """A mesh that these devices, this model or this batch do not fit. The text says what divides."""


def make_mesh(
    config: MeshConfig, devices: Sequence[Any] | None = None, *, swept: bool = True, rings: bool = False
) -> Mesh:
    """The named mesh of a config over all devices.

    Devices joined by a fast network (one TPU slice, one host of GPUs) stay together: the slow network between such
    islands is crossed by the outermost axes only, data and then fsdp, unless `config.slices` says which.

    Args:
        config: devices along each axis, one of them -1 for what is left, and which axes cross islands.
        devices: all that JAX sees unless given; every one gets a place.
        swept: whether the mesh is of a sweep; the axis `sweep` of any other has size 1.
        rings: fsdp alone on a torus goes along its dimensions in turn, as `zoo.collectives.torus` finds them, not in one ring.

    Raises:
        MeshError: sizes whose product is not the number of devices, more than one -1, a sweep axis where no sweep is, or
            axes that cannot be laid over the islands.
    """
    devices = jax.devices() if devices is None else devices
    sizes = _sizes(config, len(devices))
    if sizes["sweep"] > 1 and not swept:
        raise MeshError(f"mesh.sweep is {sizes['sweep']} and a run of its own is one point; write 1, or `mupax sweep`")
    attribute, islands = _islands(devices)
    across = _across(config, sizes, len(islands))
    if len(set(islands.values())) > 1:
        counts = ", ".join(f"{count} in {island}" for island, count in sorted(islands.items()))
        name = attribute.removesuffix("_index")
        raise MeshError(f"every {name} must have as many devices as the others; there are {counts}")
    inside = tuple(size // across[axis] for axis, size in sizes.items())

    torus, fsdp = _torus(devices), MESH_AXES.index("fsdp")
    if rings and math.prod(torus) == inside[fsdp] > 1:
        inside = (*inside[:fsdp], *torus, *inside[fsdp + 1 :])
    outside = (*across.values(),)
    outside = (*outside[: fsdp + 1], *[1] * (len(inside) - len(outside)), *outside[fsdp + 1 :])

    def arranged(split: bool) -> np.ndarray:
        """Neighbours in the mesh are neighbours in the network; `split`: also along a part of a torus' dimension."""
        if len(islands) == 1:
            return mesh_utils.create_device_mesh(inside, devices, allow_split_physical_axes=split)
        by_process = attribute == "process_index"
        return mesh_utils.create_hybrid_device_mesh(
            inside, outside, devices, process_is_granule=by_process, allow_split_physical_axes=split
        )

    try:
        grid = arranged(split=devices[0].device_kind in ("TPU v5 lite", "TPU v5e"))  # as jax.make_mesh does
    except NotImplementedError:  # no whole dimensions have these sizes
        grid = arranged(split=True)
    return Mesh(grid.reshape(tuple(sizes.values())), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def _islands(devices: Sequence[Any]) -> tuple[str, Counter[int]]:
    """What tells islands of devices apart, and how many devices each has."""
    # TPU and GPU devices know their slice, which may hold many processes (TPU) or be one host (GPU).
    attribute = "slice_index" if getattr(devices[0], "slice_index", None) is not None else "process_index"
    if attribute == "process_index" and devices[0].platform == "tpu":
        return "slice_index", Counter({0: len(devices)})  # a topology of one slice, compiled for from outside
    return attribute, Counter(getattr(device, attribute) for device in devices)


def _torus(devices: Sequence[Any]) -> tuple[int, ...]:
    """Sizes of the dimensions that the devices of an island are wired in; none where they do not say."""
    places = np.array([getattr(device, "coords", ()) for device in devices])
    return tuple(int(size) for size in np.ptp(places, axis=0) + 1 if size > 1)


def _across(config: MeshConfig, sizes: dict[str, int], count: int) -> dict[str, int]:
    """Islands along every mesh axis; their product is `count`, the number of islands."""
    slices = parse_slices(config.slices)
    across = {axis: slices.get(axis, 1) for axis in MESH_AXES}
    if slices:
        for axis, number in slices.items():
            if sizes[axis] % number:
                raise MeshError(f"mesh.slices has {axis}={number}, which does not divide mesh.{axis} {sizes[axis]}")
        if (total := math.prod(slices.values())) != count:
            raise MeshError(f"mesh.slices {' '.join(config.slices)} means {total} slices; there are {count}")
        return across
    left = count
    for axis in ("data", "fsdp"):
        across[axis] = math.gcd(left, sizes[axis])
        left //= across[axis]
    if left > 1:
        raise MeshError(
            f"mesh.data {sizes['data']} and mesh.fsdp {sizes['fsdp']} do not spread over {count} slices or hosts, and other "
            f"axes cross the slow network only where you say so; write --mesh.data {count}, or --mesh.slices tensor={count}"
        )
    return across


def _sizes(config: MeshConfig, devices: int) -> dict[str, int]:
    """Devices along every mesh axis, the one left open filled in."""
    sizes = {axis: getattr(config, axis) for axis in MESH_AXES}
    for axis, size in sizes.items():
        if size < 1 and size != -1:
            raise MeshError(f"mesh.{axis} is {size}; write a number of devices, or -1 for what is left")
    unknown = [axis for axis, size in sizes.items() if size == -1]
    if len(unknown) > 1:
        raise MeshError(f"mesh.{' and mesh.'.join(unknown)} are both -1; leave at most one to be inferred")
    product = math.prod(size for size in sizes.values() if size != -1)
    if unknown:
        if devices % product:
            raise MeshError(
                f"the mesh needs a multiple of {product} devices ({described(sizes)}); there are {devices}. "
                "Write smaller axes, or --mesh.data -1 alone to use what there is"
            )
        sizes[unknown[0]] = devices // product
    elif product != devices:
        raise MeshError(
            f"the mesh needs {product} devices ({described(sizes)}); there are {devices}. "
            "Write axes whose product is that, or --mesh.data -1 to use what is left"
        )
    return sizes


def described(sizes: Mapping[str, int]) -> str:
    """The mesh axes that split something, for people: `data 2 x fsdp 4`."""
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one device"
