"""How every array of a run lies on its mesh: parameters by their specs, batches, and each process' part of every batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mupax.train.config.data import DataConfig
from mupax.train.config.devices import DEFAULT, MAY_STAY_WHOLE, Rules
from mupax.train.parallel.mesh import MeshError, described
from mupax.zoo.definition import Definition
from mupax.zoo.families import ModelConfig
from mupax.zoo.partition import Layout
from mupax.zoo.transformer import TransformerConfig


class MeshLayout(Layout):
    """A mesh and the rules from logical axes to mesh axes."""

    def __init__(
        self, mesh: Mesh, rules: Rules = DEFAULT, *, rings: bool = False, gradient_dtype: str | None = None
    ) -> None:
        super().__init__(mesh, rules)
        self.rings, self.gradient_dtype = rings, gradient_dtype

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of what is whole on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    def batch(self, batch: Mapping[str, Any]) -> dict[str, NamedSharding]:
        """Shardings of a batch (`mupax.train.core.state.Batch`): what is [B, T] is split along both, anything else along B."""

        def second(name: str, x: Any) -> str | None:
            return "sequence" if x.ndim == 2 and name != "labels" else None

        return {name: self.sharding(("batch", *[second(name, x)] * (x.ndim - 1)), x.shape) for name, x in batch.items()}

    def parameters(self, definition: Definition) -> dict[str, NamedSharding]:
        """The sharding of every parameter, by name.

        Raises:
            MeshError: an axis that must be split and is not divisible.
        """
        shardings: dict[str, NamedSharding] = {}
        for name, spec in definition.specs.items():
            shape = definition.abstract[name].shape
            for axis, size in zip(spec.axes, shape, strict=True):
                if size % self.ways(axis) and axis not in MAY_STAY_WHOLE:
                    raise MeshError(
                        f"{self._named(axis)} does not divide axis {axis!r} of size {size} ({name}); "
                        f"write {self._fitting(axis, size)}, or a model whose {axis} is a multiple of {self.ways(axis)}"
                    )
            shardings[name] = self.sharding(spec.axes, shape)
        return shardings

    def check_positions(self, model: ModelConfig) -> None:
        """Refuse a model whose positions do not split evenly, or whose experts take the first tokens of an example.

        Padding them would put a mask into every attention kernel, into the mean over patches and into every FLOP count,
        to serve a CLS token that a model trained on split positions can do without.

        Raises:
            MeshError: the positions are not a multiple of the devices that split them, or experts have a capacity.
        """
        factor = model.routing.capacity_factor if isinstance(model, TransformerConfig) else None
        if factor is not None and self.ways("sequence") > 1:
            raise MeshError(
                f"model.routing.capacity_factor {factor} gives room to an example's first tokens, which no device has in order "
                f"under {self._named('sequence')}; leave it out (no token is dropped), or write mesh.sequence 1"
            )
        sizes, ways = model.sizes(), self.ways("sequence")
        for length in (sizes[axis] for axis in ("position", "source") if sizes.get(axis, 0) % ways):
            made_of, instead = model.splitting_hint(ways)
            raise MeshError(
                f"{self._named('sequence')} does not divide the {length} positions{made_of}; "
                f"write {self._fitting('sequence', length)}, or {instead}"
            )

    def check_experts(self, model: ModelConfig) -> None:
        """Refuse a mesh that splits experts of a model without any, or experts but not the examples that are sent to them.

        Raises:
            MeshError: either; that experts do not split evenly is said by `parameters`.
        """
        if not (names := self.names("experts")):
            return
        if "experts" not in model.sizes():
            raise MeshError(
                f"{self._named('experts')} splits experts and the model has none; write --model.experts too, or --mesh.fsdp for more devices"
            )
        if other := set(names) - set(self.names("batch")):
            raise MeshError(
                f"mesh.rules splits experts over {', '.join(sorted(other))}, over which the batch is not split, and tokens are "
                f"sent to experts from where they are; write batch={','.join((*self.rules['batch'], *sorted(other)))} too"
            )

    def check_batch(self, batch_size: int, accumulation_steps: int, name: str = "data.batch_size") -> None:
        """Refuse a batch that does not split evenly.

        Args:
            batch_size: examples over all devices.
            accumulation_steps: microbatches that it is cut into.
            name: the field that an error says to change.

        Raises:
            MeshError: the batch is not a multiple of devices x microbatches; the text says which multiple.
        """
        needed = self.ways("batch") * accumulation_steps
        if batch_size % needed:
            over = described({axis: self.mesh.shape[axis] for axis in self.rules["batch"]})
            raise MeshError(
                f"{name} {batch_size} does not split over {self.ways('batch')} devices ({over}) and {accumulation_steps} "
                f"microbatches; write a multiple of {needed}, such as {max(needed, batch_size // needed * needed)}"
            )

    def _named(self, axis: str) -> str:
        """The mesh axes of a logical axis with their sizes, as they are written: mesh.data 2 x mesh.fsdp 4."""
        return " x ".join(f"mesh.{name} {self.mesh.shape[name]}" for name in self.names(axis))

    def _fitting(self, axis: str, size: int) -> str:
        """What to write so that a logical axis of this size is divided."""
        first, *rest = self.names(axis)
        if rest:
            return f"sizes of {' and '.join(self.names(axis))} whose product divides {size}"
        return f"mesh.{first} {max(n for n in range(1, self.ways(axis) + 1) if size % n == 0)}"


class Feed:
    """Batches of one shape on their way to a mesh.

    A process makes the rows that its own devices hold, and no others: one run of rows or several, depending on where its
    devices lie in the mesh. Processes that split positions or heads make the same rows.

    Args:
        abstract: shapes of the global batch.
        layout: how it lies on the mesh.
    """

    def __init__(self, abstract: Mapping[str, Any], layout: MeshLayout) -> None:
        self.abstract = dict(abstract)
        """Shapes of the global batch."""
        self._shardings = layout.batch(abstract)
        name, leaf = next(iter(abstract.items()))
        indices = self._shardings[name].addressable_devices_indices_map(leaf.shape).values()
        self._offsets: dict[int, int] = {}
        """Where a run of rows of the global batch begins among this process' rows."""
        rows: list[slice] = []
        count = 0
        for start, stop in sorted({index[0].indices(leaf.shape[0])[:2] for index in indices if index is not None}):
            self._offsets[start] = count
            count += stop - start
            if rows and rows[-1].stop == start:
                start = rows.pop().start
            rows.append(slice(start, stop))
        self.rows = tuple(rows)
        """Rows of the global batch that this process makes, in this order."""

    def put(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """The global batch on the mesh, from this process' rows of it."""
        if jax.process_count() == 1:
            return jax.device_put(dict(batch), self._shardings)
        return {name: self._global(name, array) for name, array in batch.items()}

    def _global(self, name: str, array: np.ndarray) -> jax.Array:
        shape = self.abstract[name].shape

        def part(index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(shape[0])
            first = self._offsets[start]
            return array[first : first + stop - start][(slice(None), *index[1:])]

        return jax.make_array_from_callback(shape, self._shardings[name], part)


def abstract_batch(model: ModelConfig, batch_size: int, data: DataConfig | None = None) -> dict[str, Any]:
    """Shapes and dtypes of a batch of the model's examples.

    Args:
        model: says what one example is.
        batch_size: examples over all devices.
        data: what else it says of an example (`DataConfig.more_of`); nothing unless given.
    """
    example = model.example()
    example = example if data is None else example | data.more_of(example["inputs"])
    arrays = example.items()
    return {name: jax.ShapeDtypeStruct((batch_size, *of.shape), jax.numpy.dtype(of.dtype)) for name, of in arrays}  # pyright: ignore
