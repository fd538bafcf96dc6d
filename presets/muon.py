"""Choices of Muon's steps: their size, and the blocks of a matrix that are orthogonalized apart.

A step of Muon is a matrix of spectral norm 1, times the learning rate. If blocks of the matrix are
orthogonalized apart, each block has norm 1, and the norm of the matrix is larger. Gradients of all
blocks share their best input and output directions, so the blocks add up coherently. The norm is
then the root of their number, and the learning rate is divided by this root. (Derived.) With m =
size / base size, and H the number of heads of the matrix:

| blocks                     | number of blocks | learning rate         |
|----------------------------|------------------|-----------------------|
| the matrix                 | 1                | (out/in)^1/2          |
| heads of q, k, v and o     | H                | (out/in)^1/2 H^-1/2   |
| tiles of the base's size   | m_in m_out       | 1/m_in                |

A step that is divided by its measured norm has the learning rate of the whole matrix.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Literal

from mupax.presets.roles import ParamSpec, PresetError, Role
from mupax.presets.rule import ONE, Power, product

Scale = Literal["spectral", "rms", "measured"]
Blocks = Literal["matrix", "heads", "heads-unscaled", "tiles"]
Shape = Literal["base", "absolute"]

_ATTENTION = frozenset({Role.QUERY, Role.KEY, Role.VALUE, Role.ATTENTION_OUT})
_HEADS = ("heads", "kv_heads")
_MOONLIGHT_RMS = 0.2
"""Root mean square of the entries of Adam's steps (Moonlight, Liu et al. 2025, 2502.16982)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MuonRule:
    """Choices of a preset about Muon's steps. They are constants of the preset, `muon_...`.

    Attributes:
        scale: Size of a step at the base. "spectral" is a spectral norm of 1 if the matrix is one
            block, "rms" is entries with root mean square 0.2, and "measured" is a spectral norm
            that is measured and divided out.
        blocks: Parts that are orthogonalized apart. "heads-unscaled" has no H^-1/2.
        shape: Whether the factor (out/in)^1/2 is relative to the base, where it is then 1, or
            absolute.
    """

    scale: Scale = "spectral"
    blocks: Blocks = "matrix"
    shape: Shape = "base"

    def check(self, name: str) -> None:
        """Raise an error for choices that contradict each other.

        Args:
            name: Name of the preset, for the message.

        Raises:
            PresetError: Two choices set one factor.
        """
        if self.scale == "rms" and self.shape == "absolute":
            raise PresetError(
                f"{name}: muon_scale=rms sets the size of steps at the base, and so does "
                "muon_shape=absolute; leave one of them out"
            )
        if self.scale == "measured" and self.blocks == "heads-unscaled":
            raise PresetError(
                f"{name}: muon_scale=measured divides by the norm, whatever the factor of heads; "
                "write muon_blocks=heads"
            )

    @property
    def changes_steps(self) -> bool:
        """True if Muon's compiled step differs from the default: measured norms, or blocks."""
        return self.scale == "measured" or self.blocks != "matrix"

    def block_axes(self, spec: ParamSpec) -> tuple[str, ...]:
        """Return the axes of a hidden matrix that are cut into blocks, empty for a single block.

        Under "tiles" they are all axes of inputs and outputs. Under "heads" they are the axes of
        heads, and only attention's matrices have them.
        """
        if self.blocks == "tiles":
            return (*spec.fan_in, *spec.fan_out)
        if self.blocks == "matrix" or spec.role not in _ATTENTION:
            return ()
        return tuple(axis for axis in (*spec.fan_in, *spec.fan_out) if axis in _HEADS)

    def coherence(self, spec: ParamSpec) -> Power:
        """Return the spectral norm of a step of learning rate 1 whose blocks all agree.

        It is the root of the number of blocks, relative to the base. It is 1 if steps are divided
        by their measured norm.
        """
        if self.scale == "measured":
            return ONE
        return product(self.block_axes(spec)) ** 0.5

    def lr(self, spec: ParamSpec) -> Power:
        """Return the factor on the learning rate for blocks that are orthogonalized separately.

        It is 1 / `coherence` (the root of the number of blocks), or 1 for "heads-unscaled".
        """
        if self.blocks == "heads-unscaled":
            return ONE
        return ONE / self.coherence(spec)

    def base_lr(self, spec: ParamSpec, base_size: Callable[[str], int]) -> float:
        """Return the learning rate of a hidden matrix at the base, relative to the peak.

        It differs from 1 only with the scale "rms" or the shape "absolute".

        Args:
            base_size: Function that returns the base size of an axis.
        """
        sizes = {axis: base_size(axis) for axis in (*spec.fan_in, *spec.fan_out)}
        head_axes: tuple[str, ...] = ()
        # At the base a tile is the whole matrix.
        if self.blocks != "tiles":
            head_axes = self.block_axes(spec)
        num_heads = math.prod(sizes[axis] for axis in head_axes)
        if self.scale == "rms":
            sizes |= dict.fromkeys(head_axes, 1)
        fan_in = math.prod(sizes[axis] for axis in spec.fan_in)
        fan_out = math.prod(sizes[axis] for axis in spec.fan_out)

        if self.scale == "rms":
            # Entries of an orthogonal block have root mean square max(fan_in, fan_out)^-1/2.
            return _MOONLIGHT_RMS * max(fan_in, fan_out) ** 0.5
        if self.shape == "base":
            return 1.0
        lr = (fan_out / fan_in) ** 0.5
        if self.blocks == "heads" and self.scale != "measured":
            lr /= num_heads**0.5
        return lr

    def block(
        self, spec: ParamSpec, sizes: Mapping[str, int], base_size: Callable[[str], int]
    ) -> tuple[int, ...] | None:
        """Return the size of a block along each axis of a matrix, or `None` for the whole matrix.

        Axes that count separate matrices, such as layers, have size 1.

        Args:
            sizes: Size of every logical axis of the model.
            base_size: Function that returns the base size of an axis.

        Raises:
            PresetError: The matrix is not made of whole tiles.
        """
        axes = self.block_axes(spec)
        if not axes:
            return None
        block = []
        for axis in spec.axes:
            size = 1 if axis in spec.copies else sizes[axis]
            if axis in axes:
                size = 1
                if self.blocks == "tiles":
                    size = base_size(axis)
            if axis in axes and sizes[axis] % size:
                raise PresetError(
                    f"muon_blocks=tiles: {axis} is {sizes[axis]}, which is no multiple of the "
                    f"base's {size}; write sizes that are, or muon_blocks=matrix"
                )
            block.append(size)
        return tuple(block)


@dataclasses.dataclass(frozen=True)
class MatrixSteps:
    """Blocks of a model's matrices and division by measured norms, as the optimizer reads them.

    Attributes:
        measured: Whether every step is divided by its measured spectral norm.
        blocks: Size of a block along each axis, by parameter name. Matrices that are not in it are
            one block.
        sizes: Size of every logical axis of the model, if `measured`.
    """

    measured: bool = False
    blocks: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)


WHOLE_MATRICES = MatrixSteps()
"""Muon as it is by default."""
