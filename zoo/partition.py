"""How activations lie on devices. Models name logical axes; whoever runs them says, by a `Layout`, what the names mean.

Logical axes of activations: batch, sequence, and those that parameters have too (heads, kv_heads, mlp, vocab, classes);
None is an axis that no device splits.

A layout is passed on as an argument: `definition.model(params, multipliers, factors, layout=layout)` sets it on every module
that has a static field `layout`, and functions take it as a keyword. The default is `ONE_DEVICE`, for which a module of your
own without the field is written.
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

LANES = 128
"""Numbers in a row of a TPU's vectors, and positions that its kernels work on at least at once."""


class Layout:
    """A mesh, and which of its axes split each logical axis.

    A layout is equal to itself alone and has the hash of its identity, so that modules can keep it as a static field.

    Args:
        mesh: the devices, which need not be this machine's. None is the first device of the default backend, looked up when it is
            first asked for.
        rules: logical axis to mesh axes, the first one outermost; an axis without any is whole on every device. Where two
            dimensions of one array want the same mesh axis, the first one takes it.
    """

    per_axis_reduce_scatter = False
    """Whether sums that are scattered go along one dimension of a torus at a time (`--xla-flags scatter`)."""

    zigzag = False
    """Whether positions lie as a ring has them (`zoo.layers.ring`): of twice as many parts as devices d and 2D-1-d on device d."""

    gradient_dtype: str | None = None
    """`mesh.gradient_dtype`; where there is one, sums are scattered by `exchange`."""
    exchange: Callable[..., jax.Array]
    room: int | None = None
    """Bytes of a device that a loss may take while the step's peak stays as it is."""
    policy: Callable[..., bool] | None = None
    """What the backward pass of a layer that recomputes nothing may keep, where that is not everything."""

    def __init__(self, mesh: Mesh | None, rules: Mapping[str, tuple[str, ...]]) -> None:
        self.rules = rules
        if mesh is not None:
            self.mesh = mesh

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The devices."""
        return Mesh(np.array(jax.devices()[:1]), "data")

    @functools.cached_property
    def platform(self) -> str:
        """Platform of the devices: cpu, gpu or tpu."""
        return self.mesh.devices.flat[0].platform

    @functools.cached_property
    def device_kind(self) -> str:
        """The name that JAX gives to this kind of device."""
        return self.mesh.devices.flat[0].device_kind

    def mesh_axes(self, axis: str | None) -> tuple[str, ...]:
        """Return the mesh axes that split a logical axis, for collectives inside `local`; empty where nothing does."""
        return tuple(name for name in self.rules.get(axis or "", ()) if self.mesh.shape[name] > 1)

    def num_shards(self, axis: str | None) -> int:
        """Return the number of parts that a logical axis is split into."""
        return math.prod(self.mesh.shape[name] for name in self.mesh_axes(axis))

    def sharding(self, axes: Axes, shape: tuple[int, ...]) -> NamedSharding:
        """The sharding of an array; a dimension that its mesh axes do not divide stays whole.

        Args:
            axes: logical axis of every dimension; None where no device splits it.
            shape: of the whole array.
        """
        return NamedSharding(self.mesh, self._spec(axes, shape))

    def constrain(self, x: jax.Array, axes: Axes) -> jax.Array:
        """x, laid out by `sharding`.

        Args:
            x: inside a function that is being compiled.
            axes: as `sharding`.
        """
        return (
            x
            if self.mesh.size == 1
            else jax.lax.with_sharding_constraint(x, self.sharding(axes, x.shape))
        )

    def positions(self, length: int) -> jax.Array:
        """The position that lies at every place, int32 [length]."""
        places = jnp.arange(length)
        if not self.zigzag:
            return places
        parts = 2 * self.num_shards("sequence")
        part, within = jnp.divmod(places, length // parts)
        return jnp.where(part % 2, parts - 1 - part // 2, part // 2) * (length // parts) + within

    def local(
        self, function: Callable[..., Any], inputs: tuple[Any, ...], outputs: Any
    ) -> Callable[..., Any]:
        """`function` on every device's own part, by `jax.shard_map`: for kernels that the compiler cannot split.

        Args:
            function: of arrays or pytrees of them, which it gets as one device's parts.
            inputs: logical axes of every argument, or a pytree of them; each must divide its dimension.
            outputs: those of the result, or a pytree of them.
        """
        if self.mesh.size == 1:
            return function
        in_specs, out_specs = jax.tree.map(self._spec, (inputs, outputs), is_leaf=_is_axes)
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def mean(self, x: jax.Array) -> jax.Array:
        """Return the mean of x over the devices that split examples.

        That is x itself, except inside of `manual.ManualFsdpLayout`, where x is of this device's examples alone.
        """
        return x

    def gather(self, w: jax.Array, axes: Axes) -> jax.Array:
        """A parameter as a product takes it: w. Inside of `manual.ManualFsdpLayout`, which has all that follows by hand, w is a part.

        Args:
            w: as it is stored.
            axes: logical axis of every dimension.
        """
        del axes
        return w

    def layer(self, state: Any, dtype: Any) -> Any:
        """One layer of a stack, as its module takes it.

        Args:
            state: an `nnx.State` of the layer.
            dtype: of its products.
        """
        del dtype
        return state

    def by_layer(self, spec: Any) -> bool:
        """Whether a stack's parameter is read by `layer` alone, so that what is done to it can wait for its layer.

        Args:
            spec: its declaration.
        """
        del spec
        return False

    def gather_outside_layers(
        self, params: Mapping[str, Any], specs: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Parameters by name, those gathered that are not where they are read: all but tables, readouts and a stack's matrices.

        Args:
            params: as they are stored.
            specs: their declarations.
        """
        del specs
        return params

    def lookup(self, table: jax.Array, index: jax.Array, axes: Axes) -> jax.Array:
        """Rows of an embedding's table, [*index, D].

        Args:
            table: as w of `gather`, [V, D].
            index: int32, its first dimension split as the batch is.
            axes: of the table.
        """
        del axes
        return table[index]

    def readout(
        self, axes: Axes, width: int, tokens: tuple[str, ...]
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Mesh axes over which the gradient of a readout is summed: those that split its rows, of which a device keeps its own, and the others.

        Args:
            axes: logical axes of the readout.
            width: rows of it.
            tokens: mesh axes that split what it reads.
        """
        rows = self.mesh_axes(axes[0])
        rows = rows if set(rows) <= set(tokens) and width % self.num_shards(axes[0]) == 0 else ()
        return rows, tuple(name for name in tokens if name not in rows)

    def _spec(self, axes: Axes, shape: tuple[int, ...] | None = None) -> PartitionSpec:
        parts: list[str | tuple[str, ...] | None] = []
        used: set[str] = set()
        for index, axis in enumerate(axes):
            names = tuple(name for name in self.mesh_axes(axis) if name not in used)
            if shape is not None and shape[index] % math.prod(
                self.mesh.shape[name] for name in names
            ):
                names = ()
            used.update(names)
            parts.append(names if len(names) > 1 else next(iter(names), None))
        return PartitionSpec(*parts)


def _is_axes(node: Any) -> bool:
    """Return whether a node of a pytree is the logical axes of one array. A named tuple is a node with children."""
    return type(node) is tuple and all(axis is None or isinstance(axis, str) for axis in node)


ONE_DEVICE = Layout(None, {})
"""Layout of one device of the default backend, which splits nothing."""


def place(module: nnx.Module, layout: Layout) -> None:
    """Set the field `layout` of a module, and of every module in it that has the field.

    Args:
        module: may be one that was merged while a function is traced.
        layout: how its activations lie on devices.
    """
    for _, part in nnx.iter_modules(module):
        if has_layout(part):
            setattr(part, "layout", layout)  # noqa: B010  # not every module declares the field


def has_layout(module: Any) -> bool:
    """Return whether a module, or a class of modules, reads its parameters through a field `layout`."""
    return isinstance(getattr(module, "layout", None), Layout)


def current() -> Layout:
    """Return `ONE_DEVICE`, as a module without a layout of its own sees the devices.

    Deprecated: give the module a field, `layout: Layout = ONE_DEVICE`, and read that.
    """
    warnings.warn(
        "mupax.zoo.partition.current() is deprecated and always gives ONE_DEVICE; write `layout: Layout = ONE_DEVICE` in the "
        "module's class and read self.layout",
        DeprecationWarning,
        stacklevel=2,
    )
    return ONE_DEVICE
