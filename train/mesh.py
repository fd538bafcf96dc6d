"""The device mesh, and the one table from logical axes to mesh axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from presets import ParamSpec
from train.config import MeshConfig
from zoo.definition import Definition

AXES = ("data", "fsdp", "sequence", "tensor", "sweep")

BATCH = ("data", "fsdp")
"""Mesh axes that split the batch."""

RULES: dict[str, str | tuple[str, ...]] = {
    "batch": BATCH,
    "sequence": "sequence",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "classes": "tensor",
}
"""Mesh axis or axes that split each logical axis of a parameter or activation; one not named is whole on every device."""

MAY_STAY_WHOLE = {"vocab", "classes", "kv_heads"}
"""Logical axes kept whole where the mesh axis does not divide them: rarely round, and not worth refusing a run."""


class MeshError(ValueError):
    """A mesh that these devices, this model or this batch do not fit. The text says what divides."""


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The named mesh of a config over all devices.

    Raises:
        MeshError: sizes whose product is not the number of devices, more than one -1, or an axis not built yet.
    """
    devices = jax.devices() if devices is None else devices
    sizes = {axis: getattr(config, axis) for axis in AXES}
    for axis in ("sequence", "sweep"):
        if sizes[axis] != 1:
            raise MeshError(f"mesh.{axis} is {sizes[axis]}; this version splits only data, fsdp and tensor, write 1")
    unknown = [axis for axis, size in sizes.items() if size == -1]
    for axis, size in sizes.items():
        if size < 1 and size != -1:
            raise MeshError(f"mesh.{axis} is {size}; write a number of devices, or -1 for what is left")
    if len(unknown) > 1:
        raise MeshError(f"mesh.{' and mesh.'.join(unknown)} are both -1; leave at most one to be inferred")
    known = math.prod(size for size in sizes.values() if size != -1)
    if unknown:
        if len(devices) % known:
            raise MeshError(
                f"the mesh needs a multiple of {known} devices ({_named(sizes)}); there are {len(devices)}. "
                "Write smaller axes, or --mesh.data -1 alone to use what there is"
            )
        sizes[unknown[0]] = len(devices) // known
    elif known != len(devices):
        raise MeshError(
            f"the mesh needs {known} devices ({_named(sizes)}); there are {len(devices)}. "
            "Write axes whose product is that, or --mesh.data -1 to use what is left"
        )
    shape = tuple(sizes.values())
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def param_sharding(mesh: Mesh, spec: ParamSpec, shape: tuple[int, ...], name: str) -> NamedSharding:
    """How one parameter lies on the mesh.

    Raises:
        MeshError: an axis that must be split and is not divisible.
    """
    parts: list[str | None] = []
    for axis, size in zip(spec.axes, shape, strict=True):
        target = RULES.get(axis)
        assert not isinstance(target, tuple), f"{axis} is an axis of activations"
        ways = mesh.shape[target] if target else 1
        if ways > 1 and size % ways:
            if axis not in MAY_STAY_WHOLE:
                fits = [n for n in range(1, ways + 1) if size % n == 0]
                raise MeshError(
                    f"mesh.{target} {ways} does not divide axis {axis!r} of size {size} ({name}); "
                    f"write mesh.{target} {fits[-1]}, or a model whose {axis} is a multiple of {ways}"
                )
            ways = 1
        # Two axes of one array may share a mesh axis (an MLP of a user's own); the first one takes it.
        parts.append(target if ways > 1 and target not in parts else None)
    return NamedSharding(mesh, PartitionSpec(*parts))


def param_shardings(mesh: Mesh, definition: Definition) -> dict[str, NamedSharding]:
    """Name to sharding of every parameter."""
    return {
        name: param_sharding(mesh, spec, definition.abstract[name].shape, name)
        for name, spec in definition.specs.items()
    }


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The leading axis of every batch array, split over data and fsdp."""
    return NamedSharding(mesh, PartitionSpec(BATCH))


def replicated(mesh: Mesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def check_batch(mesh: Mesh, batch_size: int, accumulation_steps: int, name: str = "data.batch_size") -> None:
    """Refuse a batch that does not split evenly.

    Raises:
        MeshError: the batch is not a multiple of devices x microbatches; the text says which multiple.
    """
    ways = math.prod(mesh.shape[axis] for axis in BATCH)
    if batch_size % (ways * accumulation_steps):
        needed = ways * accumulation_steps
        raise MeshError(
            f"{name} {batch_size} does not split over {ways} devices (data {mesh.shape['data']} x fsdp {mesh.shape['fsdp']}) "
            f"and {accumulation_steps} microbatches; write a multiple of {needed}, such as {max(needed, batch_size // needed * needed)}"
        )


def _named(sizes: dict[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size not in (1, -1)) or "a mesh of one device"
