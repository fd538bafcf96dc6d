"""How every array of a run lies on its mesh: the mesh, and the rules from logical axes to mesh axes.

Models see it as a `mupax.zoo.partition.Layout` and name the logical axes of activations; parameters name theirs in their specs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mupax.presets import ParamSpec
from mupax.train.config.devices import DEFAULT, MAY_STAY_WHOLE, Rules
from mupax.train.parallel.mesh import MeshError
from mupax.zoo.definition import Definition
from mupax.zoo.families import ModelConfig
from mupax.zoo.partition import Axes


class MeshLayout:
    """A mesh and its rules.

    Args:
        mesh: the devices.
        rules: which mesh axes split each logical axis. Where two dimensions of one array want the same mesh axis, the
            first one takes it.
    """

    def __init__(self, mesh: Mesh, rules: Rules = DEFAULT) -> None:
        self.mesh, self.rules = mesh, rules
        self.platform = mesh.devices.flat[0].platform

    def splits(self, axis: str) -> bool:
        """Whether a logical axis is split over more than one device."""
        return self.ways(axis) > 1

    def names(self, axis: str | None) -> tuple[str, ...]:
        """The mesh axes that split a logical axis, for collectives inside `local`; empty where nothing does."""
        return tuple(name for name in self._names(axis) if self.mesh.shape[name] > 1)

    def ways(self, axis: str | None) -> int:
        """Parts that a logical axis is split into."""
        return math.prod(self.mesh.shape[name] for name in self._names(axis))

    def constrain(self, x: jax.Array, axes: Axes) -> jax.Array:
        """x, laid out by the rules; a dimension that its mesh axes do not divide stays whole."""
        if self.mesh.size == 1:
            return x
        return jax.lax.with_sharding_constraint(x, self._sharding(axes, x.shape))

    def local(self, function: Callable[..., Any], inputs: tuple[Axes, ...], outputs: Any) -> Callable[..., Any]:
        """`function` of every device's own parts, by `jax.shard_map`; every axis must divide its dimension."""
        if self.mesh.size == 1:
            return function
        several = bool(outputs) and isinstance(outputs[0], tuple)
        out_specs = tuple(map(self._spec, outputs)) if several else self._spec(outputs)
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=tuple(map(self._spec, inputs)), out_specs=out_specs, check_vma=False
        )

    @property
    def replicated(self) -> NamedSharding:
        """Whole on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    def batch(self, batch: Mapping[str, Any]) -> dict[str, NamedSharding]:
        """Of the arrays of a batch (see `mupax.train.core.step`): what is [B, T] is split along both, anything else along B."""
        return {
            name: self._sharding(("batch", *["sequence" if x.ndim == 2 else None] * (x.ndim - 1)), x.shape)
            for name, x in batch.items()
        }

    def parameters(self, definition: Definition) -> dict[str, NamedSharding]:
        """Of every parameter.

        Raises:
            MeshError: an axis that must be split and is not divisible.
        """
        return {
            name: self.parameter(spec, definition.abstract[name].shape, name) for name, spec in definition.specs.items()
        }

    def parameter(self, spec: ParamSpec, shape: tuple[int, ...], name: str) -> NamedSharding:
        """Of one parameter; `name` is for the message.

        Raises:
            MeshError: an axis that must be split and is not divisible.
        """
        for axis, size in zip(spec.axes, shape, strict=True):
            if size % self.ways(axis) and axis not in MAY_STAY_WHOLE:
                raise MeshError(
                    f"{self._named(axis)} does not divide axis {axis!r} of size {size} ({name}); "
                    f"write {self._fitting(axis, size)}, or a model whose {axis} is a multiple of {self.ways(axis)}"
                )
        return self._sharding(spec.axes, shape)

    def check_positions(self, model: ModelConfig) -> None:
        """Refuse positions that do not split evenly.

        Padding them would put a mask into every attention kernel, into the mean over patches and into every FLOP count,
        to serve a CLS token that a model trained on split positions can do without.

        Raises:
            MeshError: the positions are not a multiple of the devices that split them.
        """
        length = model.sizes()["position"]
        if not length % self.ways("sequence"):
            return
        made_of, instead = model.splitting_hint(self.ways("sequence"))
        raise MeshError(
            f"{self._named('sequence')} does not divide the {length} positions{made_of}; "
            f"write {self._fitting('sequence', length)}, or {instead}"
        )

    def check_batch(self, batch_size: int, accumulation_steps: int, name: str = "data.batch_size") -> None:
        """Refuse a batch that does not split evenly.

        Raises:
            MeshError: the batch is not a multiple of devices x microbatches; the text says which multiple.
        """
        needed = self.ways("batch") * accumulation_steps
        if batch_size % needed:
            over = " x ".join(f"{axis} {self.mesh.shape[axis]}" for axis in self._names("batch"))
            raise MeshError(
                f"{name} {batch_size} does not split over {self.ways('batch')} devices ({over}) and {accumulation_steps} "
                f"microbatches; write a multiple of {needed}, such as {max(needed, batch_size // needed * needed)}"
            )

    def _names(self, axis: str | None) -> tuple[str, ...]:
        return self.rules.get(axis, ()) if axis else ()

    def _sharding(self, axes: Axes, shape: tuple[int, ...]) -> NamedSharding:
        return NamedSharding(self.mesh, self._spec(axes, shape))

    def _spec(self, axes: Axes, shape: tuple[int, ...] | None = None) -> PartitionSpec:
        parts: list[str | tuple[str, ...] | None] = []
        taken: set[str] = set()
        for index, axis in enumerate(axes):
            names = tuple(name for name in self.names(axis) if name not in taken)
            if shape is not None and shape[index] % math.prod(self.mesh.shape[name] for name in names):
                names = ()
            taken.update(names)
            parts.append(names if len(names) > 1 else next(iter(names), None))
        return PartitionSpec(*parts)

    def _named(self, axis: str) -> str:
        """The mesh axes of a logical axis with their sizes, as they are written: mesh.data 2 x mesh.fsdp 4."""
        return " x ".join(f"mesh.{name} {self.mesh.shape[name]}" for name in self._names(axis))

    def _fitting(self, axis: str, size: int) -> str:
        """What to write so that a logical axis of this size is divided."""
        names, ways = self._names(axis), self.ways(axis)
        if len(names) > 1:
            return f"sizes of {' and '.join(names)} whose product divides {size}"
        return f"mesh.{next(iter(names))} {max(n for n in range(1, ways + 1) if size % n == 0)}"
