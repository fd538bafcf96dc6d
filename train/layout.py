"""A mesh as the models see it: logical axes of activations to mesh axes (`zoo.partition.Layout`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from train.mesh import RULES
from zoo.partition import Axes


class MeshLayout:
    """Constrains activations to a mesh by the one table of rules."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.platform = mesh.devices.flat[0].platform

    def splits(self, axis: str) -> bool:
        """Whether a logical axis is split over more than one device."""
        return self._ways(axis) > 1

    def constrain(self, x: jax.Array, axes: Axes) -> jax.Array:
        """x, laid out by the rules; a dimension that its mesh axis does not divide stays whole."""
        if self.mesh.size == 1:
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, self._spec(axes, x.shape)))

    def local(self, function: Callable[..., Any], inputs: tuple[Axes, ...], outputs: Any) -> Callable[..., Any]:
        """`function` of every device's own parts, by `jax.shard_map`; every axis must divide its dimension."""
        if self.mesh.size == 1:
            return function
        several = bool(outputs) and isinstance(outputs[0], tuple)
        out_specs = tuple(map(self._spec, outputs)) if several else self._spec(outputs)
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=tuple(map(self._spec, inputs)), out_specs=out_specs, check_vma=False
        )

    def _spec(self, axes: Axes, shape: tuple[int, ...] | None = None) -> PartitionSpec:
        parts = [RULES.get(axis) if axis else None for axis in axes]
        if shape is not None:
            divides = [size % self._ways(axis) == 0 for axis, size in zip(axes, shape, strict=True)]
            parts = [part if even else None for part, even in zip(parts, divides, strict=True)]
        return PartitionSpec(*parts)

    def _ways(self, axis: str | None) -> int:
        target = RULES.get(axis) if axis else None
        names = (target,) if isinstance(target, str) else target or ()
        return math.prod(self.mesh.shape[name] for name in names)
