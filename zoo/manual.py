"""Parameters that the batch's own devices split (fsdp), gathered by hand, and their gradients scattered by hand.

A step's gradients are taken inside of `jax.shard_map` over the mesh axes of the batch, where a parameter is this device's
part: what reads it gathers it first, and its gradient is summed and split again where it was gathered, in a loop over
layers beside the rest of the backward pass, in the way that suits the network (`zoo.collectives.reduce_scatter`).
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
"""Mesh axes of every dimension."""


def inside(layout: Layout, definition: Definition) -> ManualFsdpLayout | None:
    """Return the layout inside of which a model's gradients are taken, or None if no parameter is split by the batch's devices.

    The layout is also None in two other cases, which are left to the compiler: devices split anything but examples (positions,
    heads), or the module lacks the field `layout`, through which the zoo's models read their parameters, or a method
    `readout_inputs`, whose weight the loss gathers.

    Args:
        layout: the one outside.
        definition: the model.
    """
    manual = ManualFsdpLayout(layout, definition.sizes)
    other_axes = {name for axis in layout.rules for name in layout.mesh_axes(axis)} - set(
        manual.batch
    )
    split = any(part for spec in definition.specs.values() for part in manual.partition(spec.axes))
    if not split or other_axes:
        return None
    module: Any = getattr(definition.graph.nodes[0], "type", None)
    if has_layout(module) and readout_method(module) is not None:
        return manual
    if getattr(module, "gathers", False):
        warnings.warn(
            f"{module.__name__}.gathers is deprecated and the compiler gathers the model's parameters; write "
            "`layout: Layout = ONE_DEVICE` in the class instead, and a method `readout_inputs` that returns ReadoutInputs",
            DeprecationWarning,
            stacklevel=2,
        )
    return None


class ManualFsdpLayout(Layout):
    """A layout as it is inside of `shard_map`: every array is one device's part, and nothing is left for the compiler to split.

    Args:
        whole: The layout outside of `shard_map`.
        sizes: Size of every logical axis over all devices.
    """

    def __init__(self, whole: Layout, sizes: Mapping[str, int]) -> None:
        super().__init__(whole.mesh, whole.rules)
        self.outer = whole
        self.sizes = sizes
        self.per_axis_reduce_scatter = whole.per_axis_reduce_scatter
        self.gradient_dtype = whole.gradient_dtype
        self.room = whole.room
        self.batch = whole.mesh_axes("batch")
        """Mesh axes that split examples."""

    def mesh_axes(self, axis: str | None) -> tuple[str, ...]:
        return self.outer.mesh_axes(axis) if axis == "experts" else ()

    def partition(self, axes: Axes) -> Splits:
        """Return the mesh axes of the batch that split each dimension of a parameter."""
        spec = self.outer.sharding(axes, tuple(self.sizes[axis or ""] for axis in axes)).spec
        parts = [(part,) if isinstance(part, str) else part or () for part in spec]
        return tuple(parts)

    def spec(self, axes: Axes) -> PartitionSpec:
        """The same, as `shard_map` takes it."""
        return PartitionSpec(*(part or None for part in self.partition(axes)))

    def constrain(self, x: jax.Array, axes: Axes) -> jax.Array:
        return x

    def local(
        self, function: Callable[..., Any], inputs: tuple[Axes, ...], outputs: Any
    ) -> Callable[..., Any]:
        return function

    def mean(self, x: jax.Array) -> jax.Array:
        return jax.lax.pmean(x, self.batch)

    def gather(self, w: jax.Array, axes: Axes, copies: tuple[str, ...] = ()) -> jax.Array:
        """A parameter whole; its gradient is summed over the batch's devices, and this device's part of it returned.

        Args:
            w: this device's part.
            axes: logical axes of its dimensions.
            copies: those of them that count matrices of their own (`ParamSpec.copies`): of experts a device keeps its own, to which
                the others send their tokens.
        """
        splits = self.partition(axes)
        own = {
            name
            for axis, names in zip(axes, splits, strict=True)
            if axis in copies
            for name in names
        }
        splits = tuple(
            () if axis in copies else names for axis, names in zip(axes, splits, strict=True)
        )
        return _gather(self, splits, tuple(name for name in self.batch if name not in own), w)

    def layer(self, state: Any, dtype: Any) -> Any:
        """Its matrices times their multipliers, gathered, in the type of their products; vectors are whole already.

        Args:
            state: of one layer, parts.
            dtype: of its products.
        """

        def whole(variable: nnx.Variable) -> nnx.Variable:
            spec = variable.get_metadata("spec", None)
            if not isinstance(variable, nnx.Param) or not self.by_layer(spec):
                return variable
            part = variable.get_value()
            part = part.array() if isinstance(part, ScaledParam) else part
            return nnx.Param(self.gather(part.astype(dtype), spec.axes[1:], spec.copies), spec=spec)

        return jax.tree.map(whole, state, is_leaf=lambda node: isinstance(node, nnx.Variable))

    def by_layer(self, spec: ParamSpec) -> bool:
        return spec.stacked and spec.role not in VECTORS

    def gather_outside_layers(
        self, params: Mapping[str, Any], specs: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        def later(spec: ParamSpec) -> bool:
            return self.by_layer(spec) or spec.role is Role.READOUT or "vocab" in spec.axes

        return {
            n: w if later(specs[n]) else self.gather(w, specs[n].axes, specs[n].copies)
            for n, w in params.items()
        }

    @staticmethod
    def policy(primitive: Any, *_: Any, **__: Any) -> bool:
        """Never the gathered matrices of every layer."""
        return primitive.name not in ("all_gather", "reshape", "transpose")

    def lookup(self, table: jax.Array, index: jax.Array, axes: Axes) -> jax.Array:
        """Rows of an embedding's table: every device looks up its columns for all, and sends each its rows.

        Args:
            table: this device's part of it.
            index: of the rows, of this device's examples.
            axes: logical axes of the table.
        """
        rows, columns = self.partition(axes)
        if rows or not columns:
            return self.gather(table, axes)[index]
        table = _gather(
            self, ((), ()), tuple(name for name in self.batch if name not in columns), table
        )
        entries = table[jax.lax.all_gather(index, columns, tiled=True)]
        return jax.lax.all_to_all(
            entries, columns, split_axis=0, concat_axis=entries.ndim - 1, tiled=True
        )

    def exchange(self, x: jax.Array, names: tuple[str, ...], dimension: int) -> jax.Array:
        """`zoo.collectives.reduce_scatter` of numbers rounded to `gradient_dtype` and summed in float32.

        Every device is sent all summands of its part, as many bytes as their sum on its way would be.

        Args:
            x, names, dimension: as there.
        """
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
            return (), tokens  # gathered before
        return rows, (*tokens, *(name for name in self.batch if name not in rows))

    def shard_mapped(
        self, function: Callable[..., Any], inputs: Any, outputs: Any
    ) -> Callable[..., Any]:
        """Return `function` inside of `shard_map`; it passes this layout to what it calls.

        Args:
            function: of parts.
            inputs, outputs: specs of its arguments and results.
        """
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=inputs, out_specs=outputs, check_vma=False
        )


def _whole(layout: Layout, splits: Splits, batch: tuple[str, ...], w: jax.Array) -> jax.Array:
    del layout, batch  # of the gradient alone
    for dimension, names in enumerate(splits):
        w = all_gather(w, names, dimension)
    return w


_gather = jax.custom_vjp(_whole, nondiff_argnums=(0, 1, 2))


def _forward(
    layout: Layout, splits: Splits, batch: tuple[str, ...], w: jax.Array
) -> tuple[jax.Array, None]:
    return _whole(layout, splits, batch, w), None


def _backward(
    layout: Layout, splits: Splits, batch: tuple[str, ...], _: None, g: jax.Array
) -> tuple[jax.Array]:
    for dimension, names in enumerate(splits):
        g = reduce_scatter(g, names, dimension, layout=layout)
    rest = tuple(name for name in batch if not any(name in names for names in splits))
    return (jax.lax.psum(g, rest) if rest else g,)


_gather.defvjp(_forward, _backward)
