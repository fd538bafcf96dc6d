"""Device mesh of a run, and the shardings of its parameters and batches.

The axes of the mesh have names and cover all devices. The outer ones cross the slow network between
hosts or slices, the inner ones stay inside.
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

from mupax import MupaxError
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
    """Mesh that does not fit the devices, the model or the batch. The text says what divides."""


def make_mesh(
    config: MeshConfig,
    devices: Sequence[Any] | None = None,
    *,
    swept: bool = True,
    rings: bool = False,
) -> Mesh:
    """Return the mesh of a config over all devices, with named axes.

    Devices joined by a fast network (one TPU slice, one host of GPUs) are an island. Only the
    outermost axes cross the slow network between islands: data and then fsdp, or the axes that
    `config.slices` names.

    Args:
        config: Devices along each axis, at most one of them -1 for all that are left.
        devices: Devices, each of which gets a place; by default all that JAX sees.
        swept: Whether the mesh is of a sweep. The axis `sweep` of any other mesh has size 1.
        rings: Lay fsdp, if it is alone on a torus, along the dimensions of the torus in turn, and
            not in one ring (`zoo.collectives.torus`).

    Raises:
        MeshError: The product of the sizes is not the number of devices, more than one size is -1,
            a size is 0 or below -1, a mesh without a sweep has a sweep axis, islands differ in
            their number of devices, or the axes do not divide over the islands.
    """
    devices = jax.devices() if devices is None else devices
    sizes = _sizes(config, len(devices))
    if sizes["sweep"] > 1 and not swept:
        raise MeshError(
            f"mesh.sweep is {sizes['sweep']} and a run of its own is one point; write 1, or "
            "`mupax sweep`"
        )
    attribute, islands = _islands(devices)
    across = _across(config, sizes, len(islands))
    if len(set(islands.values())) > 1:
        counts = ", ".join(f"{count} in {island}" for island, count in sorted(islands.items()))
        name = attribute.removesuffix("_index")
        raise MeshError(f"every {name} must have as many devices as the others; there are {counts}")

    # `create_hybrid_device_mesh` of JAX takes two shapes: the one inside of an island, and the
    # number of islands along each dimension.
    inner_shape = [size // across[axis] for axis, size in sizes.items()]
    outer_shape = list(across.values())
    torus = _torus(devices)
    fsdp = MESH_AXES.index("fsdp")
    if rings and math.prod(torus) == inner_shape[fsdp] > 1:
        # Devices are placed with one mesh dimension per dimension of the torus. The reshape at the
        # end joins these into fsdp.
        inner_shape[fsdp : fsdp + 1] = torus
        outer_shape[fsdp + 1 : fsdp + 1] = [1] * (len(torus) - 1)

    def arrange(split: bool) -> np.ndarray:
        """Return the devices such that neighbours in the mesh are neighbours in the network.

        Args:
            split: Whether a mesh axis may take a part of a torus' dimension.
        """
        if len(islands) == 1:
            return mesh_utils.create_device_mesh(
                tuple(inner_shape), devices, allow_split_physical_axes=split
            )
        return mesh_utils.create_hybrid_device_mesh(
            tuple(inner_shape),
            tuple(outer_shape),
            devices,
            process_is_granule=attribute == "process_index",
            allow_split_physical_axes=split,
        )

    # `jax.make_mesh` splits physical axes on the same chips.
    may_split = devices[0].device_kind in ("TPU v5 lite", "TPU v5e")
    try:
        grid = arrange(may_split)
    except NotImplementedError:  # no product of complete dimensions has these sizes
        grid = arrange(split=True)
    # The axes are Auto: the compiler chooses the shardings in between. `jax.make_mesh` makes
    # Explicit axes by default since jax 0.9.
    axis_types = (AxisType.Auto,) * len(MESH_AXES)
    return Mesh(grid.reshape(tuple(sizes.values())), MESH_AXES, axis_types=axis_types)


def _islands(devices: Sequence[Any]) -> tuple[str, Counter[int]]:
    """Return the attribute of a device that names its island, and each island's device count.

    An island is a set of devices that a fast network joins: a TPU slice or a host of GPUs. The
    attribute is `slice_index` or, if devices have none, `process_index`. A TPU topology without
    slices is one island.
    """
    # A slice has many processes on TPU and is one host on GPU. In a topology for ahead-of-time
    # compilation, every GPU has slice_index 0, whatever its host.
    client = type(getattr(devices[0], "client", None)).__name__
    knows_slice = devices[0].platform != "gpu" or client != "CompileOnlyPyClient"
    if knows_slice and getattr(devices[0], "slice_index", None) is not None:
        attribute = "slice_index"
    elif devices[0].platform == "tpu":
        # In a topology for ahead-of-time compilation, TPUs of a single slice have no slice_index.
        return "slice_index", Counter({0: len(devices)})
    else:
        attribute = "process_index"
    return attribute, Counter(getattr(device, attribute) for device in devices)


def crosses_islands(mesh: Mesh, axis: str) -> bool:
    """Return True if devices along a mesh axis are on different TPU slices or hosts of GPUs.

    The network between them is slow, so that repeating some work may be faster than sharing it.
    Hosts of CPUs count as one island.
    """
    if mesh.devices.flat[0].platform == "cpu":
        return False
    attribute, _ = _islands(list(mesh.devices.flat))
    dimension = mesh.axis_names.index(axis)
    first = mesh.devices.take(0, dimension).flat[0]
    last = mesh.devices.take(-1, dimension).flat[0]
    # TPUs of a single slice may have no `slice_index`.
    return getattr(first, attribute, None) != getattr(last, attribute, None)


def _torus(devices: Sequence[Any]) -> tuple[int, ...]:
    """Return the sizes of the torus in which the TPU chips of a slice are wired, such as (16, 16).

    Dimensions of size 1 are left out. The result is empty if the devices have no coordinates.
    """
    coordinates = np.array([getattr(device, "coords", ()) for device in devices])
    extents = np.ptp(coordinates, axis=0) + 1
    sizes = []
    for size in extents:
        if size > 1:
            sizes.append(int(size))
    return tuple(sizes)


def _across(config: MeshConfig, sizes: dict[str, int], num_islands: int) -> dict[str, int]:
    """Return the number of islands along every mesh axis. The product is `num_islands`.

    An island is a set of devices that a fast network joins: a TPU slice or a host of GPUs.
    Without `config.slices`, as many islands as possible are along data and the rest along fsdp.

    Args:
        sizes: Number of devices along each mesh axis (`_sizes`).

    Raises:
        MeshError: The islands do not fit `config.slices`, or do not divide data and fsdp.
    """
    slices = parse_slices(config.slices)
    across = {axis: slices.get(axis, 1) for axis in MESH_AXES}
    if slices:
        for axis, number in slices.items():
            if sizes[axis] % number:
                raise MeshError(
                    f"mesh.slices has {axis}={number}, which does not divide mesh.{axis} "
                    f"{sizes[axis]}"
                )
        total = math.prod(slices.values())
        if total != num_islands:
            raise MeshError(
                f"mesh.slices {' '.join(config.slices)} means {total} slices; there are "
                f"{num_islands}"
            )
        return across

    remaining = num_islands
    for axis in ("data", "fsdp"):
        # As many islands as possible along data, whose gradients are sent once per step.
        across[axis] = math.gcd(remaining, sizes[axis])
        remaining //= across[axis]
    if remaining > 1:
        raise MeshError(
            f"mesh.data {sizes['data']} and mesh.fsdp {sizes['fsdp']} do not spread over "
            f"{num_islands} slices or hosts, and other axes cross the slow network only where you "
            f"say so; write --mesh.data {num_islands}, or --mesh.slices tensor={num_islands}"
        )
    return across


def _sizes(config: MeshConfig, devices: int) -> dict[str, int]:
    """Return the number of devices along every mesh axis, with -1 replaced.

    Raises:
        MeshError: Several sizes are -1, a size is 0 or below -1, or the product does not match the
            number of devices.
    """
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
                f"the mesh needs a multiple of {product} devices ({described(sizes)}); there are "
                f"{devices}. Write smaller axes, or --mesh.data -1 alone to use what there is"
            )
        sizes[unknown[0]] = devices // product
    elif product != devices:
        raise MeshError(
            f"the mesh needs {product} devices ({described(sizes)}); there are {devices}. "
            "Write axes whose product is that, or --mesh.data -1 to use what is left"
        )
    return sizes


def described(sizes: Mapping[str, int]) -> str:
    """Return the mesh axes of more than one device as a text such as `data 2 x fsdp 4`."""
    split = []
    for axis, size in sizes.items():
        if size > 1:
            split.append(f"{axis} {size}")
    return " x ".join(split) or "one device"


class MeshLayout(Layout):
    """Layout of a run: its mesh, and the rules from logical axes to mesh axes.

    Args:
        rules: Mesh axes by logical axis (`Layout`).
        rings: Scatter sums along one dimension of a torus at a time (`--xla-flags scatter`).
        gradient_dtype: Type in which gradients are sent, such as "bfloat16"; by default their own.
    """

    def __init__(
        self,
        mesh: Mesh,
        rules: Rules = DEFAULT,
        *,
        rings: bool = False,
        gradient_dtype: str | None = None,
    ) -> None:
        super().__init__(mesh, rules)
        self.per_axis_reduce_scatter = rings
        self.gradient_dtype = gradient_dtype

    @property
    def replicated(self) -> NamedSharding:
        """Sharding of arrays that are complete on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    def batch(self, batch: Mapping[str, Any]) -> dict[str, NamedSharding]:
        """Return the shardings of a batch (`mupax.train.core.state.Batch`), by name.

        Every array is split along B, its first axis. Arrays [B, T] are also split along T, except
        labels. An axis that its devices do not divide is not split.

        Args:
            batch: Arrays of the global batch, or their shapes.
        """
        shardings: dict[str, NamedSharding] = {}
        for name, array in batch.items():
            has_positions = array.ndim == 2 and name != "labels"
            second = "sequence" if has_positions else None
            axes = ("batch", *[second] * (array.ndim - 1))
            shardings[name] = self.sharding(axes, array.shape)
        return shardings

    def parameters(self, definition: Definition) -> dict[str, NamedSharding]:
        """Return the sharding of every parameter by name.

        An axis in `MAY_STAY_WHOLE` that the mesh does not divide is replicated.

        Raises:
            MeshError: The mesh does not divide an axis that must be split.
        """
        shardings: dict[str, NamedSharding] = {}
        for name, spec in definition.specs.items():
            shape = definition.abstract[name].shape
            for axis, size in zip(spec.axes, shape, strict=True):
                if size % self.num_shards(axis) and axis not in MAY_STAY_WHOLE:
                    raise MeshError(
                        f"{self._named(axis)} does not divide axis {axis!r} of size {size} "
                        f"({name}); write {self._fitting(axis, size)}, or a model whose {axis} is "
                        f"a multiple of {self.num_shards(axis)}"
                    )
            shardings[name] = self.sharding(spec.axes, shape)
        return shardings

    def check_positions(self, model: ModelConfig) -> None:
        """Refuse a model that cannot be split along its positions as the mesh says.

        Experts with a capacity take the first tokens of an example, which no device has in order if
        positions are split.

        Raises:
            MeshError: The number of positions is not a multiple of the devices that split them, or
                positions are split and experts have a capacity.
        """
        factor = None
        if isinstance(model, TransformerConfig):
            factor = model.routing.capacity_factor
        num_parts = self.num_shards("sequence")
        if factor is not None and num_parts > 1:
            raise MeshError(
                f"model.routing.capacity_factor {factor} gives room to an example's first tokens, "
                f"which no device has in order under {self._named('sequence')}; leave it out (no "
                "token is dropped), or write mesh.sequence 1"
            )
        # Padding would put a mask into every attention kernel, into the mean over patches and into
        # every FLOP count, for a CLS token that a model trained on split positions can do without.
        sizes = model.sizes()
        for axis in ("position", "source"):
            length = sizes.get(axis, 0)
            if length % num_parts:
                made_of, alternative = model.splitting_hint(num_parts)
                raise MeshError(
                    f"{self._named('sequence')} does not divide the {length} positions{made_of}; "
                    f"write {self._fitting('sequence', length)}, or {alternative}"
                )

    def check_experts(self, model: ModelConfig) -> None:
        """Refuse a split of experts that the model or the split of the batch does not allow.

        Raises:
            MeshError: The model has no experts, or a mesh axis splits experts and not the batch.
                `parameters` refuses experts that do not divide.
        """
        names = self.mesh_axes("experts")
        if not names:
            return
        if "experts" not in model.sizes():
            raise MeshError(
                f"{self._named('experts')} splits experts and the model has none; write "
                "--model.experts too, or --mesh.fsdp for more devices"
            )
        unsplit = sorted(set(names) - set(self.mesh_axes("batch")))
        if unsplit:
            raise MeshError(
                f"mesh.rules splits experts over {', '.join(unsplit)}, over which the batch is not "
                "split, and tokens are sent to experts from where they are; write "
                f"batch={','.join((*self.rules['batch'], *unsplit))} too"
            )

    def check_batch(
        self, batch_size: int, accumulation_steps: int, name: str = "data.batch_size"
    ) -> None:
        """Refuse a batch that devices and microbatches do not divide.

        Args:
            batch_size: Number of examples over all devices.
            name: Field that the error tells the user to change.

        Raises:
            MeshError: The batch is not a multiple of devices x microbatches. The text names a
                multiple.
        """
        num_shards = self.num_shards("batch")
        needed = num_shards * accumulation_steps
        if batch_size % needed:
            mesh = described({axis: self.mesh.shape[axis] for axis in self.rules["batch"]})
            nearest = max(needed, batch_size // needed * needed)
            raise MeshError(
                f"{name} {batch_size} does not split over {num_shards} devices ({mesh}) and "
                f"{accumulation_steps} microbatches; write a multiple of {needed}, such as "
                f"{nearest}"
            )

    def _named(self, axis: str) -> str:
        """Return the mesh axes of a logical axis as a text: mesh.data 2 x mesh.fsdp 4."""
        factors = []
        for name in self.mesh_axes(axis):
            factors.append(f"mesh.{name} {self.mesh.shape[name]}")
        return " x ".join(factors)

    def _fitting(self, axis: str, size: int) -> str:
        """Return a text that names a mesh size which divides a logical axis of this size.

        If several mesh axes split it, the text asks for sizes whose product divides it.
        """
        first, *further = self.mesh_axes(axis)
        if further:
            return f"sizes of {' and '.join([first, *further])} whose product divides {size}"
        divisors = [n for n in range(1, self.num_shards(axis) + 1) if size % n == 0]
        return f"mesh.{first} {max(divisors)}"


class BatchSharding:
    """Sharding of batches of one shape on a mesh, and the rows that each process makes.

    A process makes the rows that its own devices hold, and no others. Depending on where its
    devices lie in the mesh, these are one block of consecutive rows or several (`rows`). Processes
    whose devices split the positions or the heads of the same examples make the same rows.

    Args:
        abstract: Shapes and dtypes of the global batch by name.
    """

    def __init__(self, abstract: Mapping[str, Any], layout: MeshLayout) -> None:
        self.abstract = dict(abstract)
        """Shapes of the global batch."""
        self._shardings = layout.batch(abstract)
        # All arrays of a batch have the same rows, so the first one stands for all.
        name, leaf = next(iter(abstract.items()))
        indices = self._shardings[name].addressable_devices_indices_map(leaf.shape).values()
        bounds = set()
        for index in indices:
            if index is not None:
                bounds.add(index[0].indices(leaf.shape[0])[:2])
        self._offsets: dict[int, int] = {}
        """First row of a block in the global batch, to its index in this process' own rows."""
        rows: list[slice] = []
        count = 0
        for start, stop in sorted(bounds):
            self._offsets[start] = count
            count += stop - start
            # Join neighbouring blocks of rows, so that the data are made in fewer parts.
            if rows and rows[-1].stop == start:
                rows[-1] = slice(rows[-1].start, stop)
            else:
                rows.append(slice(start, stop))
        self.rows = tuple(rows)
        """Rows of the global batch that this process makes, in this order."""

    def shard_batch(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """Return the global batch on the mesh, made from the rows of all processes.

        Args:
            batch: Arrays by name with the rows of this process alone, in the order of `rows`.
        """
        if jax.process_count() == 1:
            return jax.device_put(dict(batch), self._shardings)
        arrays = {}
        for name, array in batch.items():
            arrays[name] = self._global(name, array)
        return arrays

    def _global(self, name: str, array: np.ndarray) -> jax.Array:
        """Return one array of the global batch, made from this process' rows of the array."""
        shape = self.abstract[name].shape

        def part(index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(shape[0])
            first = self._offsets[start]
            return array[first : first + stop - start][(slice(None), *index[1:])]

        return jax.make_array_from_callback(shape, self._shardings[name], part)


def abstract_batch(
    model: ModelConfig, batch_size: int, data: DataConfig | None = None
) -> dict[str, Any]:
    """Return the shapes and dtypes of a batch of a model's examples.

    Args:
        model: Config of the model, which says what one example is.
        batch_size: Number of examples over all devices.
        data: Settings that add arrays to an example (`DataConfig.more_of`); by default none.
    """
    example = model.example()
    if data is not None:
        example = example | data.more_of(example["inputs"])
    batch: dict[str, Any] = {}
    for name, spec in example.items():
        dtype = jax.numpy.dtype(spec.dtype)  # pyright: ignore
        batch[name] = jax.ShapeDtypeStruct((batch_size, *spec.shape), dtype)
    return batch
