"""Manual FSDP: a `Layout` that gathers parameters and scatters their gradients by collectives.

It is for parameters that the devices of the batch split. A step takes its gradients inside
`jax.shard_map` over the mesh axes of the batch. There a parameter is this device's part, and each
use gathers the part first. The gradient is summed and split again in the backward pass of that
gather, inside the loop over layers, where it can overlap with the rest of the backward pass.
`zoo.collectives.reduce_scatter` chooses the collectives for the network.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from mupax.presets.roles import VECTORS, ParamSpec, Role
from mupax.zoo.collectives import all_gather, reduce_scatter
from mupax.zoo.definition import Definition, ScaledParam
from mupax.zoo.layers.linear import readout_method
from mupax.zoo.partition import Axes, Layout, has_layout

Splits = tuple[tuple[str, ...], ...]
"""Mesh axes that split each dimension of an array, the outermost first."""


def inside(layout: Layout, definition: Definition) -> ManualFsdpLayout | None:
    """Return the layout for manual FSDP, or `None` if the compiler must shard the gradients.

    The result is `None` if the devices that split the batch split no parameter, if devices split
    anything besides examples (such as positions or heads), or if the module lacks the field
    `layout` or the method `readout_inputs`. A deprecation warning is issued for a module that has
    the attribute `gathers` instead.

    Args:
        layout: Layout outside of `shard_map`.
        definition: Model whose gradients are taken, with its module's class in `graph`.
    """
    manual = ManualFsdpLayout(layout, definition.sizes)
    mesh_axes = set()
    for axis in layout.rules:
        mesh_axes.update(layout.mesh_axes(axis))
    splits_more = not mesh_axes <= set(manual.batch)
    splits_params = any(any(manual.partition(spec.axes)) for spec in definition.specs.values())
    if splits_more or not splits_params:
        return None

    # The first node of a graph is the model itself. Its class is read without making a module.
    module: Any = getattr(definition.graph.nodes[0], "type", None)
    # Manual FSDP needs modules that read their parameters through `layout`, and a `readout_inputs`
    # method, so that the loss can gather the readout matrix.
    if has_layout(module) and readout_method(module) is not None:
        return manual
    if getattr(module, "gathers", False):
        warnings.warn(
            f"{module.__name__}.gathers is deprecated and the compiler gathers the model's "
            "parameters; write `layout: Layout = ONE_DEVICE` in the class instead, and a method "
            "`readout_inputs` that returns ReadoutInputs",
            DeprecationWarning,
            stacklevel=2,
        )
    return None


class ManualFsdpLayout(Layout):
    """Layout inside of `shard_map`, where every array is one device's part.

    Its methods call collectives, and leave nothing for the compiler to split.

    Args:
        outer: Layout outside of `shard_map`.
        sizes: Size of every logical axis over all devices.
    """

    def __init__(self, outer: Layout, sizes: Mapping[str, int]) -> None:
        super().__init__(outer.mesh, outer.rules)
        self.outer = outer
        self.sizes = sizes
        self.per_axis_reduce_scatter = outer.per_axis_reduce_scatter
        self.gradient_dtype = outer.gradient_dtype
        self.room = outer.room
        self.batch = outer.mesh_axes("batch")
        """Mesh axes that split examples."""

    def mesh_axes(self, axis: str | None) -> tuple[str, ...]:
        # Only the layer of experts exchanges tokens between devices. Other modules compute on local
        # arrays, as on one device.
        if axis != "experts":
            return ()
        return self.outer.mesh_axes(axis)

    def partition(self, axes: Axes) -> Splits:
        """Return the mesh axes that split each dimension of a parameter.

        A dimension that is not split, also because its size is not divisible, has `()`.

        Args:
            axes: Logical axis of every dimension, as in `sharding`.
        """
        shape = tuple(self.sizes[axis or ""] for axis in axes)
        splits = []
        for names in self.outer.sharding(axes, shape).spec:
            # A `PartitionSpec` holds a name, a tuple of names or `None` for a dimension.
            if isinstance(names, str):
                names = (names,)
            splits.append(names or ())
        return tuple(splits)

    def spec(self, axes: Axes) -> PartitionSpec:
        """Return the mesh axes that `partition` returns for a parameter, as a `PartitionSpec`."""
        return PartitionSpec(*(names or None for names in self.partition(axes)))

    def constrain(self, x: jax.Array, axes: Axes) -> jax.Array:
        return x

    def local(
        self, function: Callable[..., Any], inputs: tuple[Axes, ...], outputs: Any
    ) -> Callable[..., Any]:
        return function

    def mean(self, x: jax.Array) -> jax.Array:
        return jax.lax.pmean(x, self.batch)

    def gather(self, w: jax.Array, axes: Axes, copies: tuple[str, ...] = ()) -> jax.Array:
        """Return a parameter of full size, gathered from the devices that split it.

        Its gradient is summed over the batch's devices, and split like the parameter.

        Args:
            w: Part of the parameter on this device.
            axes: Logical axis of every dimension, as in `sharding`.
            copies: Axes that count separate matrices (`ParamSpec.copies`), such as "experts". They
                are not gathered: a device keeps its own experts, and others send their tokens.
        """
        kept_names: set[str] = set()
        splits = []
        for axis, names in zip(axes, self.partition(axes), strict=True):
            if axis in copies:
                kept_names.update(names)
                splits.append(())
            else:
                splits.append(names)
        summed = tuple(name for name in self.batch if name not in kept_names)
        return _gather(self, tuple(splits), summed, w)

    def layer(self, state: Any, dtype: Any) -> Any:
        """Return the state of one layer with its matrices multiplied, cast and gathered.

        A matrix is multiplied by its multiplier first, if it is a `ScaledParam`. Vectors are not
        changed, because `gather_outside_layers` gathered them.

        Args:
            state: `nnx.State` of the layer, whose arrays are this device's parts.
            dtype: Type that matrices are gathered in, `ComputeConfig.dtype`.
        """

        def gathered(variable: nnx.Variable) -> nnx.Variable:
            spec = variable.get_metadata("spec", None)
            if not isinstance(variable, nnx.Param) or not self.by_layer(spec):
                return variable
            part = variable.get_value()
            if isinstance(part, ScaledParam):
                part = part.array()
            # The first axis, "layers", is gone: this is one layer.
            weight = self.gather(part.astype(dtype), spec.axes[1:], spec.copies)
            return nnx.Param(weight, spec=spec)

        return jax.tree.map(gathered, state, is_leaf=lambda node: isinstance(node, nnx.Variable))

    def by_layer(self, spec: ParamSpec) -> bool:
        return spec.stacked and spec.role not in VECTORS

    def gather_outside_layers(
        self, params: Mapping[str, Any], specs: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        gathered = {}
        for name, w in params.items():
            spec = specs[name]
            # `layer` gathers stacked matrices, the loss a readout and `lookup` a token table.
            if self.by_layer(spec) or spec.role is Role.READOUT or "vocab" in spec.axes:
                gathered[name] = w
            else:
                gathered[name] = self.gather(w, spec.axes, spec.copies)
        return gathered

    @staticmethod
    def policy(primitive: Any, *_: Any, **__: Any) -> bool:
        """Return whether `jax.checkpoint` keeps the result of a primitive for the backward pass.

        It is False for gathers, reshapes and transposes, so that no layer's gathered matrices are
        kept, and True for everything else.
        """
        return primitive.name not in ("all_gather", "reshape", "transpose")

    def lookup(self, table: jax.Array, index: jax.Array, axes: Axes) -> jax.Array:
        """Look up rows of an embedding table. Return [*index.shape, D].

        If devices split columns only, each device looks up its columns for all examples, and sends
        every other device the entries of that device's examples.

        Args:
            table: Part of the table on this device.
            index: Rows to return for this device's examples, int32.
            axes: Logical axes of the table, such as ("vocab", "embed").
        """
        rows, columns = self.partition(axes)
        if rows or not columns:
            return self.gather(table, axes)[index]
        # This `_gather` returns the table unchanged. Its purpose is the gradient, which is summed
        # over the mesh axes that do not split columns.
        summed = tuple(name for name in self.batch if name not in columns)
        table = _gather(self, ((), ()), summed, table)
        entries = table[jax.lax.all_gather(index, columns, tiled=True)]
        return jax.lax.all_to_all(
            entries, columns, split_axis=0, concat_axis=entries.ndim - 1, tiled=True
        )

    def exchange(self, x: jax.Array, names: tuple[str, ...], dimension: int) -> jax.Array:
        """Sum an array over mesh axes in float32, with summands sent in `gradient_dtype`.

        Return this device's part of the sum, as `zoo.collectives.reduce_scatter` does.

        Args:
            x: Summand of this device, of full size along the dimension.
            names: Mesh axes to sum over, the outermost first.
            dimension: Index of the dimension that is split. The devices must divide its size.
        """
        # Every device receives all summands of its part, which is as many bytes as a ring sends.
        # The float32 sum is then local.
        parts = jax.lax.all_to_all(
            x.astype(self.gradient_dtype), names, dimension, dimension, tiled=True
        )
        parts = parts.reshape(
            *x.shape[:dimension], jax.lax.axis_size(names), -1, *x.shape[dimension + 1 :]
        )
        return jnp.sum(parts, axis=dimension, dtype=jnp.float32).astype(x.dtype)

    def readout(
        self, axes: Axes, width: int, tokens: tuple[str, ...]
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        rows, columns = self.partition(axes)
        if columns or not rows:
            # The loss then gathers the matrix before its products. `gather` sums the gradient.
            return (), tokens
        not_rows = [name for name in self.batch if name not in rows]
        return rows, (*tokens, *not_rows)

    def shard_mapped(
        self, function: Callable[..., Any], inputs: Any, outputs: Any
    ) -> Callable[..., Any]:
        """Return `function` mapped over devices by `jax.shard_map`.

        The function must pass this layout to what it calls.

        Args:
            function: Function of arrays that are one device's parts.
            inputs: Pytree of `PartitionSpec` for the arguments.
            outputs: Pytree of `PartitionSpec` for the results.
        """
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=inputs, out_specs=outputs, check_vma=False
        )


def _gather_primal(
    layout: Layout, splits: Splits, batch: tuple[str, ...], w: jax.Array
) -> jax.Array:
    """Return w with every dimension gathered over its mesh axes in `splits`.

    `_gather` is this function with a backward pass that sums and splits the gradient.

    Args:
        batch: Mesh axes over which the backward pass sums the gradient of w.
    """
    del layout, batch  # Only the gradient needs them.
    for dimension, names in enumerate(splits):
        w = all_gather(w, names, dimension)
    return w


# The gradient is summed over `batch` and split again, by the collectives of `reduce_scatter`.
_gather = jax.custom_vjp(_gather_primal, nondiff_argnums=(0, 1, 2))


def _gather_forward(
    layout: Layout, splits: Splits, batch: tuple[str, ...], w: jax.Array
) -> tuple[jax.Array, None]:
    return _gather_primal(layout, splits, batch, w), None


def _gather_backward(
    layout: Layout, splits: Splits, batch: tuple[str, ...], _: None, g: jax.Array
) -> tuple[jax.Array]:
    for dimension, names in enumerate(splits):
        g = reduce_scatter(g, names, dimension, layout=layout)
    # The parameter is replicated over the other mesh axes of the batch, so the gradient is summed
    # there.
    scattered = set().union(*splits)
    rest = tuple(name for name in batch if name not in scattered)
    if rest:
        g = jax.lax.psum(g, rest)
    return (g,)


_gather.defvjp(_gather_forward, _gather_backward)
