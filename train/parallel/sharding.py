"""The device mesh of a run, and how every array lies on it: parameters by their specs, batches, and each process' part of every batch.

Its axes have names and cover all devices, the slow network outside and the fast one inside.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from mupax.errors import MupaxError
from mupax.train.config.data import DataConfig
from mupax.train.config.run import (
    DEFAULT,
    MAY_STAY_WHOLE,
    MESH_AXES,
    MeshConfig,
    Rules,
    parse_slices,
)
from mupax.zoo.definition import Definition
from mupax.zoo.families import ModelConfig
from mupax.zoo.partition import Layout
from mupax.zoo.transformer import TransformerConfig


class MeshError(MupaxError):
    """A mesh that these devices, this model or this batch do not fit. The text says what divides."""


def make_mesh(
    config: MeshConfig,
    devices: Sequence[Any] | None = None,
    *,
    swept: bool = True,
    rings: bool = False,
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
        raise MeshError(
            f"mesh.sweep is {sizes['sweep']} and a run of its own is one point; write 1, or `mupax sweep`"
        )
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
        grid = arranged(
            split=devices[0].device_kind in ("TPU v5 lite", "TPU v5e")
        )  # as jax.make_mesh does
    except NotImplementedError:  # no whole dimensions have these sizes
        grid = arranged(split=True)
    return Mesh(
        grid.reshape(tuple(sizes.values())), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES)
    )


def _islands(devices: Sequence[Any]) -> tuple[str, Counter[int]]:
    """What tells islands of devices apart, and how many devices each has."""
    # TPU and GPU devices know their slice, which may hold many processes (TPU) or be one host (GPU).
    attribute = (
        "slice_index" if getattr(devices[0], "slice_index", None) is not None else "process_index"
    )
    if attribute == "process_index" and devices[0].platform == "tpu":
        return "slice_index", Counter(
            {0: len(devices)}
        )  # a topology of one slice, compiled for from outside
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
                raise MeshError(
                    f"mesh.slices has {axis}={number}, which does not divide mesh.{axis} {sizes[axis]}"
                )
        if (total := math.prod(slices.values())) != count:
            raise MeshError(
                f"mesh.slices {' '.join(config.slices)} means {total} slices; there are {count}"
            )
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
            raise MeshError(
                f"mesh.{axis} is {size}; write a number of devices, or -1 for what is left"
            )
    unknown = [axis for axis, size in sizes.items() if size == -1]
    if len(unknown) > 1:
        raise MeshError(
            f"mesh.{' and mesh.'.join(unknown)} are both -1; leave at most one to be inferred"
        )
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


class MeshLayout(Layout):
    """A mesh and the rules from logical axes to mesh axes."""

    def __init__(
        self,
        mesh: Mesh,
        rules: Rules = DEFAULT,
        *,
        rings: bool = False,
        gradient_dtype: str | None = None,
    ) -> None:
        super().__init__(mesh, rules)
        self.per_axis_reduce_scatter, self.gradient_dtype = rings, gradient_dtype

    @property
    def replicated(self) -> NamedSharding:
        """Return the sharding of what is whole on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    def batch(self, batch: Mapping[str, Any]) -> dict[str, NamedSharding]:
        """Shardings of a batch (`mupax.train.core.state.Batch`): what is [B, T] is split along both, anything else along B."""

        def second(name: str, x: Any) -> str | None:
            return "sequence" if x.ndim == 2 and name != "labels" else None

        return {
            name: self.sharding(("batch", *[second(name, x)] * (x.ndim - 1)), x.shape)
            for name, x in batch.items()
        }

    def parameters(self, definition: Definition) -> dict[str, NamedSharding]:
        """The sharding of every parameter, by name.

        Raises:
            MeshError: an axis that must be split and is not divisible.
        """
        shardings: dict[str, NamedSharding] = {}
        for name, spec in definition.specs.items():
            shape = definition.abstract[name].shape
            for axis, size in zip(spec.axes, shape, strict=True):
                if size % self.num_shards(axis) and axis not in MAY_STAY_WHOLE:
                    raise MeshError(
                        f"{self._named(axis)} does not divide axis {axis!r} of size {size} ({name}); "
                        f"write {self._fitting(axis, size)}, or a model whose {axis} is a multiple of {self.num_shards(axis)}"
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
        if factor is not None and self.num_shards("sequence") > 1:
            raise MeshError(
                f"model.routing.capacity_factor {factor} gives room to an example's first tokens, which no device has in order "
                f"under {self._named('sequence')}; leave it out (no token is dropped), or write mesh.sequence 1"
            )
        sizes, ways = model.sizes(), self.num_shards("sequence")
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
        if not (names := self.mesh_axes("experts")):
            return
        if "experts" not in model.sizes():
            raise MeshError(
                f"{self._named('experts')} splits experts and the model has none; write --model.experts too, or --mesh.fsdp for more devices"
            )
        if other := set(names) - set(self.mesh_axes("batch")):
            raise MeshError(
                f"mesh.rules splits experts over {', '.join(sorted(other))}, over which the batch is not split, and tokens are "
                f"sent to experts from where they are; write batch={','.join((*self.rules['batch'], *sorted(other)))} too"
            )

    def check_batch(
        self, batch_size: int, accumulation_steps: int, name: str = "data.batch_size"
    ) -> None:
        """Refuse a batch that does not split evenly.

        Args:
            batch_size: examples over all devices.
            accumulation_steps: microbatches that it is cut into.
            name: the field that an error says to change.

        Raises:
            MeshError: the batch is not a multiple of devices x microbatches; the text says which multiple.
        """
        needed = self.num_shards("batch") * accumulation_steps
        if batch_size % needed:
            over = described({axis: self.mesh.shape[axis] for axis in self.rules["batch"]})
            raise MeshError(
                f"{name} {batch_size} does not split over {self.num_shards('batch')} devices ({over}) and {accumulation_steps} "
                f"microbatches; write a multiple of {needed}, such as {max(needed, batch_size // needed * needed)}"
            )

    def _named(self, axis: str) -> str:
        """The mesh axes of a logical axis with their sizes, as they are written: mesh.data 2 x mesh.fsdp 4."""
        return " x ".join(f"mesh.{name} {self.mesh.shape[name]}" for name in self.mesh_axes(axis))

    def _fitting(self, axis: str, size: int) -> str:
        """What to write so that a logical axis of this size is divided."""
        first, *rest = self.mesh_axes(axis)
        if rest:
            return f"sizes of {' and '.join(self.mesh_axes(axis))} whose product divides {size}"
        return (
            f"mesh.{first} {max(n for n in range(1, self.num_shards(axis) + 1) if size % n == 0)}"
        )


class BatchSharding:
    """Sharding of batches of one shape on a mesh.

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
        for start, stop in sorted(
            {index[0].indices(leaf.shape[0])[:2] for index in indices if index is not None}
        ):
            self._offsets[start] = count
            count += stop - start
            if rows and rows[-1].stop == start:
                start = rows.pop().start
            rows.append(slice(start, stop))
        self.rows = tuple(rows)
        """Rows of the global batch that this process makes, in this order."""

    def shard_batch(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """Return the global batch on the mesh, made from this process' rows of it."""
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


def abstract_batch(
    model: ModelConfig, batch_size: int, data: DataConfig | None = None
) -> dict[str, Any]:
    """Shapes and dtypes of a batch of the model's examples.

    Args:
        model: says what one example is.
        batch_size: examples over all devices.
        data: what else it says of an example (`DataConfig.more_of`); nothing unless given.
    """
    example = model.example()
    example = example if data is None else example | data.more_of(example["inputs"])
    arrays = example.items()
    return {
        name: jax.ShapeDtypeStruct((batch_size, *of.shape), jax.numpy.dtype(of.dtype))
        for name, of in arrays
    }  # pyright: ignore
