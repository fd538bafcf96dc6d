"""The arrays of any pytree by name, and each read by the axes of its declaration.

A name is the path in the tree, joined by dots: `params.block_0.attention.query.kernel` of linen, `blocks.0.attention.query_proj.weight`
of Equinox, `blocks.0.attention.query.kernel` of an `nnx.State`. A declaration may have more axes than the array has dimensions, or
fewer: heads * head_dim in one dimension, a patch of height, width and channels in three.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from flax import nnx

from mupax.presets.roles import ParamSpec, PresetError

Specs = Mapping[str, ParamSpec] | Callable[[str], ParamSpec | None]
"""Declarations by name or pattern (`fnmatch`: `block_*.query.kernel`), or a function from a name to one."""


def named_leaves(tree: Any) -> dict[str, Any]:
    """Every array (or shape) of the tree by its name, in the tree's order; of an `nnx.Variable` its value.

    Raises:
        PresetError: a leaf that is no array, or two of one name.
    """
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)
    ):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        value = leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
        if not hasattr(value, "shape") or not hasattr(value, "dtype"):
            raise PresetError(
                f"{name} is no array but a {type(value).__name__}; give the arrays alone: eqx.filter(model, eqx.is_inexact_array), "
                'nnx.state(model, nnx.Param), or variables["params"]'
            )
        if name in leaves:
            raise PresetError(f"two arrays of the tree are named {name!r}; rename one of them")
        leaves[name] = value
    return leaves


def declarations(of: Iterable[str], specs: Specs) -> dict[str, ParamSpec]:
    """The declaration of every name: by itself, else by the pattern that matches.

    Args:
        of: the names.
        specs: what declares them.

    Raises:
        PresetError: a name that nothing declares or that two patterns declare differently, or a pattern that matches none.
    """
    by_name, used = {}, set()
    for name in (of := list(of)):
        if callable(specs):
            spec = specs(name)
        else:
            matching = (
                [name] if name in specs else [p for p in specs if fnmatch.fnmatchcase(name, p)]
            )
            if len({specs[pattern] for pattern in matching}) > 1:
                raise PresetError(
                    f"{name} is declared by {' and '.join(matching)}, differently; narrow one of them"
                )
            used.update(matching)
            spec = specs[matching[0]] if matching else None
        if not isinstance(spec, ParamSpec):
            near = [] if callable(specs) else difflib.get_close_matches(name, specs, n=1)
            hint = f"the nearest declared is {near[0]!r}; " if near else ""
            raise PresetError(
                f"parameter {name} has no declaration; {hint}write one: {name!r}: ParamSpec(role=..., axes=..., fan_in=...)"
            )
        by_name[name] = spec
    if not callable(specs) and (idle := [pattern for pattern in specs if pattern not in used]):
        near = difflib.get_close_matches(idle[0], of, n=1, cutoff=0)
        raise PresetError(
            f"no parameter is named {idle[0]!r}; did you mean {near[0]!r}?"
            if near
            else "the tree is empty"
        )
    return by_name


def sizes(
    shapes: Mapping[str, tuple[int, ...]], specs: Mapping[str, ParamSpec], more: Mapping[str, int]
) -> dict[str, int]:
    """Size of every axis: those given, and those that arrays show.

    Args:
        shapes: of the arrays, by name.
        specs: their declarations.
        more: sizes that no array shows by itself.

    Raises:
        PresetError: an axis of two sizes or of none, or an array that its axes do not make.
    """
    axes: dict[str, tuple[int, str]] = {
        axis: (size, "the sizes given") for axis, size in more.items()
    }

    def learn(axis: str, size: int, name: str) -> None:
        first, where = axes.setdefault(axis, (size, name))
        if first != size:
            raise PresetError(f"axis {axis!r} is {size} in {name} but {first} in {where}")

    merged = []
    for name, spec in specs.items():
        if len(spec.axes) != len(shapes[name]):
            merged.append(name)
            continue
        for axis, size in zip(spec.axes, shapes[name], strict=True):
            learn(axis, size, name)
    for _ in merged:  # what one array shows may be what another lacks
        for name in merged:
            rest = math.prod(axes[axis][0] for axis in specs[name].axes if axis in axes)
            unknown = [axis for axis in specs[name].axes if axis not in axes]
            if len(unknown) == 1 and math.prod(shapes[name]) % rest == 0:
                learn(unknown[0], math.prod(shapes[name]) // rest, name)
    for name in merged:
        if unknown := [axis for axis in specs[name].axes if axis not in axes]:
            raise PresetError(
                f"{name} {shapes[name]} is declared as {specs[name].axes}, and no other array shows the size of "
                f"{' and '.join(unknown)}; write sizes={{{unknown[0]!r}: ...}}"
            )
    by_axis = {axis: size for axis, (size, _) in axes.items()}
    for name, spec in specs.items():
        if not _regroups(shapes[name], by := tuple(by_axis[axis] for axis in spec.axes)):
            raise PresetError(
                f"{name} has shape {shapes[name]}, and its axes {spec.axes} are {by}; name the axes in the order of its "
                "dimensions, one for each or several that make one"
            )
    return by_axis


def _regroups(dimensions: tuple[int, ...], axes: tuple[int, ...]) -> bool:
    """Whether one is the other with neighbours multiplied together, each group one number on either side."""
    i, j = 0, 0
    while i < len(dimensions) and j < len(axes):
        left, right, groups = dimensions[i], axes[j], (1, 1)
        while left != right:
            if left < right and i + 1 < len(dimensions):
                i, groups = i + 1, (groups[0] + 1, groups[1])
                left *= dimensions[i]
            elif right < left and j + 1 < len(axes):
                j, groups = j + 1, (groups[0], groups[1] + 1)
                right *= axes[j]
            else:
                return False
        if min(groups) > 1:
            return False
        i, j = i + 1, j + 1
    return math.prod(dimensions[i:]) == 1 and math.prod(axes[j:]) == 1
