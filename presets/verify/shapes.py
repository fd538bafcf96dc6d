"""Shapes at two sizes that cannot be of one model: other ranks, tables beside another width, axes that grow on their own.

A width that is read from the wrong array makes every exponent wrong, so such files are refused and the parameter is named.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from mupax.presets.roles import PresetError, Role
from mupax.presets.verify.names import Label
from mupax.presets.verify.sizes import Parameter

Shape = tuple[int, ...]
ROUNDING = 0.01
"""Relative difference between two growth factors up to which they are equal: hidden sizes are rounded."""
TABLES = ("token_embedding", "position")
"""Roles whose last dimension is the width, in PyTorch and in JAX."""
UNTOLD = frozenset({Role.HIDDEN, Role.READOUT, Role.TOKEN_EMBEDDING, Role.PATCH_EMBEDDING, Role.POSITION})
"""Roles with an axis that no other parameter has, so that its growth cannot be held against theirs."""


def check_ranks(sources: Sequence[str], shapes: Mapping[str, Sequence[Shape]]) -> None:
    """Refuse a parameter that has another number of dimensions in one of the files.

    Args:
        sources: the files, for the message.
        shapes: parameter to its shape in every file.

    Raises:
        PresetError: names the parameter and both shapes.
    """
    for name, in_files in shapes.items():
        for source, shape in zip(sources[1:], in_files[1:], strict=True):
            if len(shape) != len(in_files[0]):
                raise PresetError(
                    f"{name} has the shape {list(in_files[0])} in {sources[0]} and {list(shape)} in {source}, "
                    "which is another number of dimensions; write the shape of the same array of one model into both"
                )


def check_widths(sources: Sequence[str], shapes: Mapping[str, Sequence[Shape]], labels: Mapping[str, Label]) -> None:
    """Refuse a table whose width is no dimension of any block's parameter.

    Args:
        sources: the files, for the message.
        shapes: parameter to its shape in every file.
        labels: parameter to what its name says.

    Raises:
        PresetError: names the table and both shapes.
    """
    blocks = [in_files for name, in_files in shapes.items() if labels[name].in_block]
    tables = [name for name, label in labels.items() if label.role in TABLES and not label.in_block and shapes[name][0]]
    for index in range(1, len(sources)):
        # Sizes in pairs: 64 beside 256 is the width of both, and 256 beside 256 may be a vocabulary.
        dimensions = {pair for in_files in blocks for pair in zip(in_files[0], in_files[index], strict=True)}
        for name in tables if dimensions else ():
            first = shapes[name][0]
            other = shapes[name][index]
            if (first[-1], other[-1]) not in dimensions:
                raise PresetError(
                    f"{name} has the shape {list(first)} in {sources[0]} and {list(other)} in {sources[index]}, and no "
                    f"parameter of a block has a dimension of {first[-1]} and then {other[-1]}; write shapes of one "
                    "model, with the width last in a table"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sized:
    """One file's parameters and the sizes that they have together.

    Attributes:
        source: the file, for messages.
        parameters: by name.
        sizes: of every logical axis.
    """

    source: str
    parameters: Mapping[str, Parameter]
    sizes: Mapping[str, int]

    def entries(self, name: str) -> float:
        """Return the number of entries that a layer's parameter has by its axes."""
        parameter = self.parameters[name]
        sizes = {**self.sizes, "layers": 1, "encoder_layers": 1}
        count = math.prod(sizes.get(axis, 1) for axis in parameter.spec.axes)
        if parameter.fused:  # its declaration is that of the values
            return count * (sizes["heads"] / sizes["kv_heads"] + 2)
        return count


def check_growth(base: Sized, other: Sized) -> None:
    """Refuse a block's parameter that does not grow as its axes do by the other parameters.

    Raises:
        PresetError: names the parameter, both shapes and its axes.
    """
    for name, parameter in other.parameters.items():
        spec = parameter.spec
        if spec.role in UNTOLD or not spec.in_block:
            continue
        first = base.parameters[name].entry.shape
        growth = math.prod(parameter.entry.shape) / math.prod(first)
        expected = other.entries(name) / base.entries(name)
        if not _alike(growth, expected):
            axes = " x ".join(axis for axis in spec.axes if axis not in ("layers", "encoder_layers"))
            raise PresetError(
                f"{name} has the shape {list(first)} in {base.source} and {list(parameter.entry.shape)} in "
                f"{other.source}: it is {growth:.3g} times as large, and {axes} of the other parameters {expected:.3g} "
                f"times; write shapes of one model, or --role '{name}=ROLE' if it is no {spec.role.value}"
            )


def _alike(ratio: float, other: float) -> bool:
    return abs(ratio / other - 1) < ROUNDING
