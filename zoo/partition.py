"""Placement of activations on devices: models name logical axes, a `Layout` maps them to a mesh.

Logical axes of activations are "batch", "sequence" and those that parameters also have ("heads",
"kv_heads", "mlp", "vocab", "classes"). `None` is an axis that no device splits.

A layout is an argument: `definition.model(params, multipliers, factors, layout=layout)` sets it on
every module that has a static field `layout`, and functions take it as a keyword. The default is
`ONE_DEVICE`. A module of your own without the field computes as on one device.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Axes = tuple[str | None, ...]
"""Logical axis of every dimension of an array."""

LANES = 128
"""Entries in a row of a TPU's vector registers. Its kernels take at least so many positions."""


class Layout:
    """Mesh of devices, and the mesh axes that split each logical axis.

    A layout equals only itself and is hashed by identity, so that modules can keep it as a static
    field.

    Args:
        mesh: Mesh of devices, which need not be on this machine. `None` is the first device of the
            default backend, looked up when it is first needed.
        rules: Mesh axes that split each logical axis, the outermost first. An axis without a rule
            is not split. If two dimensions of an array want the same mesh axis, the first one has
            it.
    """

    per_axis_reduce_scatter = False
    """True to scatter sums along one dimension of a torus at a time (`--xla-flags scatter`)."""

    zigzag = False
    """True if positions are in the order of ring attention (`zoo.layers.ring`).

    The sequence then has twice as many parts as there are devices D, and device d holds parts d and
    2D-1-d.
    """

    gradient_dtype: str | None = None
    """Type in which gradients are sent (`mesh.gradient_dtype`). `None` does not convert them."""
    exchange: Callable[..., jax.Array]
    matrix_dtype: Any = None
    """Type in which Muon exchanges and orthogonalizes matrices. `None` keeps the matrices' type."""
    room: int | None = None
    """Bytes per device that the loss may take without raising the step's peak. `None`: unknown."""
    policy: Callable[..., bool] | None = None
    """Checkpoint policy of layers if `compute.remat` is none. `None` keeps every activation."""

    def __init__(self, mesh: Mesh | None, rules: Mapping[str, tuple[str, ...]]) -> None:
        self.rules = rules
        if mesh is not None:
            self.mesh = mesh

    @functools.cached_property
    def mesh(self) -> Mesh:
        """Mesh of devices. Without one in the constructor, only the default backend's first one."""
        return Mesh(np.array(jax.devices()[:1]), "data")

    @functools.cached_property
    def platform(self) -> str:
        """Platform of the devices: cpu, gpu or tpu."""
        return self.mesh.devices.flat[0].platform

    @functools.cached_property
    def device_kind(self) -> str:
        """Name of the kind of device in JAX, such as "NVIDIA H100 80GB HBM3"."""
        return self.mesh.devices.flat[0].device_kind

    @functools.cached_property
    def capabilities(self) -> frozenset[str]:
        """Compute capabilities of the mesh's GPUs, such as "9.0". Empty on other platforms.

        GPUs of other vendors report names such as gfx90a.
        """
        if self.platform != "gpu":
            return frozenset()
        return frozenset(
            str(device.compute_capability)
            for device in self.mesh.devices.flat
            if hasattr(device, "compute_capability")
        )

    def mesh_axes(self, axis: str | None) -> tuple[str, ...]:
        """Return the mesh axes that split a logical axis, without those of size 1."""
        return tuple(name for name in self.rules.get(axis or "", ()) if self.mesh.shape[name] > 1)

    def num_shards(self, axis: str | None) -> int:
        """Return the number of parts that a logical axis is split into."""
        return math.prod(self.mesh.shape[name] for name in self.mesh_axes(axis))

    def sharding(self, axes: Axes, shape: tuple[int, ...]) -> NamedSharding:
        """Return the sharding of an array.

        A dimension whose size its mesh axes do not divide is not split. A mesh axis that splits an
        earlier dimension is not used again.

        Args:
            axes: Logical axis of every dimension, or `None` for one that is not split.
            shape: Shape of the array over all devices.
        """
        return NamedSharding(self.mesh, self._spec(axes, shape))

    def constrain(self, x: jax.Array, axes: Axes) -> jax.Array:
        """Return the array with its sharding constrained, in a function that is being compiled.

        On one device, and under manual FSDP, x is returned unchanged.

        Args:
            x: Array in global view, with the shape over all devices.
            axes: Logical axis of every dimension, as in `sharding`.
        """
        if self.mesh.size == 1:
            return x
        return jax.lax.with_sharding_constraint(x, self.sharding(axes, x.shape))

    def positions(self, length: int) -> jax.Array:
        """Return the position of every entry along the sequence, int32 [length].

        Entries are in the order of positions, except in the zig-zag order of a ring. Twice the
        number of devices that split the sequence must then divide `length`.
        """
        entries_T = jnp.arange(length)
        if not self.zigzag:
            return entries_T
        num_parts = 2 * self.num_shards("sequence")
        part_size = length // num_parts
        part_T, offset_T = jnp.divmod(entries_T, part_size)
        # Device d holds entries of parts 2d and 2d+1, at the positions of parts d and 2D-1-d.
        zigzag_T = jnp.where(part_T % 2, num_parts - 1 - part_T // 2, part_T // 2)
        return zigzag_T * part_size + offset_T

    def local(
        self, function: Callable[..., Any], inputs: tuple[Any, ...], outputs: Any
    ) -> Callable[..., Any]:
        """Return `function` mapped over devices by `jax.shard_map`.

        This is for kernels that the compiler cannot split. On one device the result is `function`.

        Args:
            function: Function of arrays or pytrees of arrays, which are one device's parts.
            inputs: Logical axes of every argument, or a pytree of them. The mesh axes must divide
                every dimension that they split.
            outputs: Logical axes of the result, or a pytree of them.
        """
        if self.mesh.size == 1:
            return function
        in_specs, out_specs = jax.tree.map(self._spec, (inputs, outputs), is_leaf=_is_axes)
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    # The methods below do nothing here. `manual.ManualFsdpLayout`, in which arrays are one device's
    # parts, overrides them with collectives.

    def mean(self, x: jax.Array) -> jax.Array:
        """Return x unchanged, because it covers the examples of all devices.

        `manual.ManualFsdpLayout`, in which x covers this device's examples only, returns the mean
        over the devices that split examples.
        """
        return x

    def gather(self, w: jax.Array, axes: Axes) -> jax.Array:
        """Return a parameter with all of its entries.

        It is w itself here. `manual.ManualFsdpLayout` gathers it from all devices.

        Args:
            w: Parameter as it is stored. Under manual FSDP it is this device's part.
            axes: Logical axis of every dimension, as in `sharding`.
        """
        del axes
        return w

    def layer(self, state: Any, dtype: Any) -> Any:
        """Return the state of one layer unchanged.

        `manual.ManualFsdpLayout` multiplies its matrices by their multipliers and gathers them.

        Args:
            state: `nnx.State` of the layer.
            dtype: Type that matrices are gathered in, `ComputeConfig.dtype`.
        """
        del dtype
        return state

    def by_layer(self, spec: Any) -> bool:
        """Return whether `layer` applies the parameter's multiplier, one layer at a time.

        The result is False here, where multipliers are applied before the loop over layers.
        `manual.ManualFsdpLayout` returns True for stacked matrices.

        Args:
            spec: Declaration of the parameter (`ParamSpec`).
        """
        del spec
        return False

    def gather_outside_layers(
        self, params: Mapping[str, Any], specs: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Return the parameters unchanged.

        `manual.ManualFsdpLayout` gathers all of them except stacked matrices, tables with a
        vocabulary axis and readouts, which it gathers where they are used.

        Args:
            params: Parameters by name as they are stored. Under manual FSDP they are parts.
            specs: `ParamSpec` of every parameter, by the same names.
        """
        del specs
        return params

    def lookup(self, table: jax.Array, index: jax.Array, axes: Axes) -> jax.Array:
        """Look up rows of an embedding table. Return [*index.shape, D].

        Args:
            table: Table [V, D] as it is stored. Under manual FSDP it is this device's part.
            index: Rows to return, int32. Its first dimension is split like the batch.
            axes: Logical axes of the table, such as ("vocab", "embed").
        """
        del axes
        return table[index]

    def readout(
        self, axes: Axes, width: int, tokens: tuple[str, ...]
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the mesh axes over which the gradient of a readout matrix is summed.

        The first tuple has the axes that also split the matrix's rows, so that a device keeps only
        its part of the sum. The second one has all others.

        Args:
            axes: Logical axes of the readout matrix, such as ("embed", "vocab").
            width: Number of rows of the matrix, `D`.
            tokens: Mesh axes that split the readout's inputs along "batch" and "sequence".
        """
        rows = self.mesh_axes(axes[0])
        if not set(rows) <= set(tokens) or width % self.num_shards(axes[0]):
            rows = ()
        return rows, tuple(name for name in tokens if name not in rows)

    def _spec(self, axes: Axes, shape: tuple[int, ...] | None = None) -> PartitionSpec:
        """Return the partition spec of an array.

        With a shape, dimensions that their mesh axes do not divide are not split. Without one, they
        are split all the same.
        """
        parts: list[str | tuple[str, ...] | None] = []
        used: set[str] = set()
        for index, axis in enumerate(axes):
            names = tuple(name for name in self.mesh_axes(axis) if name not in used)
            num_parts = math.prod(self.mesh.shape[name] for name in names)
            if shape is not None and shape[index] % num_parts:
                names = ()
            used.update(names)
            if len(names) > 1:
                parts.append(names)
            else:
                parts.append(names[0] if names else None)
        return PartitionSpec(*parts)


def _is_axes(node: Any) -> bool:
    """Return True for a plain tuple of axis names and `None`, the logical axes of one array.

    A named tuple is not one: it is a node of the pytree with children.
    """
    return type(node) is tuple and all(axis is None or isinstance(axis, str) for axis in node)


ONE_DEVICE = Layout(None, {})
"""Layout of one device of the default backend, which splits nothing."""


def place(module: nnx.Module, layout: Layout) -> None:
    """Set the field `layout` of a module and of all its submodules that have the field.

    Args:
        module: Module, which may have been merged while a function is traced.
        layout: Layout of the activations of all these modules.
    """
    for _, submodule in nnx.iter_modules(module):
        if has_layout(submodule):
            # setattr, because the type `nnx.Module` declares no `layout`.
            setattr(submodule, "layout", layout)  # noqa: B010


def has_layout(module: Any) -> bool:
    """Return True if a module, or a class of modules, has a field `layout`.

    Such a module reads its parameters through the layout.
    """
    return isinstance(getattr(module, "layout", None), Layout)


def current() -> Layout:
    """Return `ONE_DEVICE`, the layout of a module without a field `layout`, and warn.

    Deprecated: give the module a field, `layout: Layout = ONE_DEVICE`, and read that.
    """
    warnings.warn(
        "mupax.zoo.partition.current() is deprecated and always gives ONE_DEVICE; write "
        "`layout: Layout = ONE_DEVICE` in the module's class and read self.layout",
        DeprecationWarning,
        stacklevel=2,
    )
    return ONE_DEVICE
