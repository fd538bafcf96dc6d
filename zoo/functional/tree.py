"""Named arrays of any pytree, and how each is read by the axes of its declaration.

A name is the path in the tree, joined by dots: `params.block_0.attention.query.kernel` of linen,
`blocks.0.attention.query_proj.weight` of Equinox, `blocks.0.attention.query.kernel` of an
`nnx.State`. A declaration can have more axes than the array has dimensions, or fewer: heads *
head_dim can be one dimension, and a patch of height, width and channels three.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
from flax import nnx

from mupax.presets.roles import ParamSpec, PresetError

Specs = Mapping[str, ParamSpec] | Callable[[str], ParamSpec | None]
"""Declarations of arrays: a mapping from names or patterns, or a function of the name.

Patterns are those of `fnmatch`, such as `block_*.query.kernel`.
"""


class _AxisSize(NamedTuple):
    """Size of an axis, and where it was first seen."""

    size: int
    source: str
    """Name of an array, or "the sizes given"."""


def is_bare_shape(leaf: Any) -> bool:
    """Return whether a leaf is a tuple or list of integers, such as (12, 32), without a dtype."""
    is_sequence = type(leaf) in (tuple, list) and bool(leaf)
    return is_sequence and all(type(size) is int for size in leaf)


def shape_hint(shape: Iterable[int]) -> str:
    """Return the end of a message about a bare shape: what it is, and what to write instead."""
    sizes = tuple(shape)
    return f"the bare shape {sizes}; write jax.ShapeDtypeStruct({sizes}, jnp.float32)"


def named_leaves(tree: Any) -> dict[str, Any]:
    """Return the arrays (or shapes) of a tree by name, in the tree's order.

    An `nnx.Variable` stands for its value.

    Raises:
        PresetError: If a leaf is not an array, or if two leaves have the same name.
    """
    leaves: dict[str, Any] = {}
    paths_and_leaves = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable) or is_bare_shape(leaf)
    )
    for path, leaf in paths_and_leaves:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        value = leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
        if is_bare_shape(value):
            raise PresetError(f"{name} is {shape_hint(value)}")
        if not hasattr(value, "shape") or not hasattr(value, "dtype"):
            raise PresetError(
                f"{name} is no array but a {type(value).__name__}; give the arrays alone: "
                "eqx.filter(model, eqx.is_inexact_array), nnx.state(model, nnx.Param), or "
                'variables["params"]'
            )
        # A key with a dot may spell the path of another leaf: {"a.b": x, "a": {"b": y}}.
        if name in leaves:
            raise PresetError(f"two arrays of the tree are named {name!r}; rename one of them")
        leaves[name] = value
    return leaves


def declarations(names: Iterable[str], specs: Specs) -> dict[str, ParamSpec]:
    """Return the declaration of every name.

    A declaration under the name itself comes before those under patterns.

    Args:
        names: Names of all arrays, as `named_leaves` returns them.
        specs: Declarations, of which every name and pattern must match an array.

    Raises:
        PresetError: If a name is not declared, if two patterns declare it differently, or if a name
            or pattern of `specs` matches no array.
    """
    names = list(names)
    by_name: dict[str, ParamSpec] = {}
    used_patterns: set[str] = set()
    for name in names:
        if callable(specs):
            spec = specs(name)
        else:
            patterns = _matching_patterns(name, specs)
            if len({specs[pattern] for pattern in patterns}) > 1:
                raise PresetError(
                    f"{name} is declared by {' and '.join(patterns)}, differently; narrow one of "
                    "them"
                )
            used_patterns.update(patterns)
            spec = specs[patterns[0]] if patterns else None
        if not isinstance(spec, ParamSpec):
            raise _undeclared(name, specs)
        by_name[name] = spec

    if not callable(specs):
        unused = [pattern for pattern in specs if pattern not in used_patterns]
        if unused:
            raise _unused(unused[0], names)
    return by_name


def _matching_patterns(name: str, specs: Mapping[str, ParamSpec]) -> list[str]:
    """Return the keys of `specs` that declare a name: the name itself, or else every pattern."""
    # An exact name wins. Otherwise a pattern such as "*" would match, too, and the declaration of
    # the array would be ambiguous.
    if name in specs:
        return [name]
    return [pattern for pattern in specs if fnmatch.fnmatchcase(name, pattern)]


def _undeclared(name: str, specs: Specs) -> PresetError:
    """Return the error for an array without a declaration. It suggests the nearest key."""
    hint = ""
    if not callable(specs):
        nearest = difflib.get_close_matches(name, specs, n=1)
        if nearest:
            hint = f"the nearest declared is {nearest[0]!r}; "
    return PresetError(
        f"parameter {name} has no declaration; {hint}write one: {name!r}: "
        "ParamSpec(role=..., axes=..., fan_in=...)"
    )


def _unused(pattern: str, names: list[str]) -> PresetError:
    """Return the error for a declaration that matches no array. It suggests the nearest name."""
    nearest = difflib.get_close_matches(pattern, names, n=1, cutoff=0)
    if not nearest:
        return PresetError("the tree is empty")
    return PresetError(f"no parameter is named {pattern!r}; did you mean {nearest[0]!r}?")


def sizes(
    shapes: Mapping[str, tuple[int, ...]],
    specs: Mapping[str, ParamSpec],
    extra_sizes: Mapping[str, int],
) -> dict[str, int]:
    """Return the size of every axis, from the shapes of arrays and the extra sizes.

    An array with one dimension per axis gives the sizes of all of its axes. Any other array, such
    as one with heads * head_dim in one dimension, gives the size of one axis if those of its other
    axes are known: the product of its axes is its number of entries.

    Args:
        extra_sizes: Sizes by axis. They must include every axis whose size no array gives.

    Raises:
        PresetError: If an axis has two sizes or none, or if the axes of an array do not multiply to
            its dimensions.
    """
    axes: dict[str, _AxisSize] = {}
    for axis, size in extra_sizes.items():
        axes[axis] = _AxisSize(size, "the sizes given")

    # Arrays with one dimension per axis come first, because they show every size directly.
    regrouped = []
    for name, spec in specs.items():
        if len(spec.axes) != len(shapes[name]):
            regrouped.append(name)
            continue
        for axis, size in zip(spec.axes, shapes[name], strict=True):
            _learn(axes, axis, size, name)

    # The size found from one array may be what another array needs. One pass per array is enough
    # for any order.
    for _ in regrouped:
        for name in regrouped:
            unknown = _unknown_axes(specs[name], axes)
            known_product = math.prod(axes[axis].size for axis in specs[name].axes if axis in axes)
            entries = math.prod(shapes[name])
            if len(unknown) == 1 and entries % known_product == 0:
                _learn(axes, unknown[0], entries // known_product, name)
    for name in regrouped:
        unknown = _unknown_axes(specs[name], axes)
        if unknown:
            raise PresetError(
                f"{name} {shapes[name]} is declared as {specs[name].axes}, and no other array "
                f"shows the size of {' and '.join(unknown)}; write sizes={{{unknown[0]!r}: ...}}"
            )

    by_axis = {axis: axis_size.size for axis, axis_size in axes.items()}
    for name, spec in specs.items():
        axis_sizes = tuple(by_axis[axis] for axis in spec.axes)
        if not _regroups(shapes[name], axis_sizes):
            raise PresetError(
                f"{name} has shape {shapes[name]}, and its axes {spec.axes} are {axis_sizes}; "
                "name the axes in the order of its dimensions, one for each or several that make "
                "one"
            )
    return by_axis


def _learn(axes: dict[str, _AxisSize], axis: str, size: int, name: str) -> None:
    """Record in `axes` an axis size that was found in an array, or compare it with a known one.

    Args:
        name: Name of the array in which the size was found, for messages.

    Raises:
        PresetError: If the axis has another size already.
    """
    first = axes.setdefault(axis, _AxisSize(size, name))
    if first.size != size:
        raise PresetError(f"axis {axis!r} is {size} in {name} but {first.size} in {first.source}")


def _unknown_axes(spec: ParamSpec, axes: Mapping[str, _AxisSize]) -> list[str]:
    """Return the axes of a declaration whose size is not known yet."""
    return [axis for axis in spec.axes if axis not in axes]


def _regroups(dimensions: tuple[int, ...], axes: tuple[int, ...]) -> bool:
    """Return whether merging or splitting neighbouring dimensions gives the sizes of the axes.

    Several axes may make one dimension, as in (512,) for axes of 8 and 64. Several dimensions may
    make one axis. A group with several dimensions and several axes is not allowed.
    """
    i = 0
    j = 0
    while i < len(dimensions) and j < len(axes):
        dimension_product = dimensions[i]
        axis_product = axes[j]
        num_dimensions = 1
        num_axes = 1
        while dimension_product != axis_product:
            if dimension_product < axis_product and i + 1 < len(dimensions):
                i += 1
                num_dimensions += 1
                dimension_product *= dimensions[i]
            elif axis_product < dimension_product and j + 1 < len(axes):
                j += 1
                num_axes += 1
                axis_product *= axes[j]
            else:
                return False
        if num_dimensions > 1 and num_axes > 1:
            return False
        i += 1
        j += 1
    # Dimensions of size 1 at the end change no entry, so they are allowed.
    return math.prod(dimensions[i:]) == 1 and math.prod(axes[j:]) == 1
