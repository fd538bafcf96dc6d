"""Carry parameters, optimizer moments and averages into a model of other sizes or another preset, entry by entry.

A new entry is s * the old one that it comes from, or has none. The network computes the same with s * w as with w
before, so that gradients are those of before over s: first moments (and momentum) move by 1/s, second ones by 1/s^2.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import optax

from train import fold
from train.convert import POWERS
from zoo.weights import Params

Index = np.ndarray
"""For every index along a new axis, the old index that it comes from; -1 where there is none."""


class CarryError(ValueError):
    """A state that cannot become another's. The text says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Move:
    """How one parameter comes from one of the source."""

    source: str
    along: tuple[Index, ...]
    """One index per dimension."""
    scale: np.ndarray
    """s, float64 [] or, for a parameter stacked over layers, [new layers]."""
    prepared: Callable[[np.ndarray], np.ndarray] = np.asarray
    """Applied to the source's weights first: something linear that gradients do not see, or a resize."""
    moments_along: tuple[Index, ...] | None = None
    """Where it is not `along`."""
    transposed: bool = False
    copies: int = 1
    """New entries that one old entry went to, all with the same gradient's share."""

    def weights(self, old: Any, fresh: np.ndarray | None) -> np.ndarray:
        """The new parameter: what comes from the old one, and the fresh numbers elsewhere (None: all comes from it)."""
        moved = self._times(_taken(self._lying(self.prepared(_plain(old))), self.along, mean=False), 1)
        if fresh is None:
            return moved
        return np.where(self.carried(), moved, np.asarray(fresh).astype(np.float32))

    def carried(self) -> Any:
        """Whether an entry comes from the source, bool, broadcasting against the new parameter."""
        return functools.reduce(np.logical_and, sides(self.along), np.True_)

    def moment(self, old: Any, power: int) -> np.ndarray:
        """A moment of gradients to some power.

        Of entries that are new, a first moment is 0 and a second one the mean of the old entries along their axis: with 0, and
        the step count of the others in Adam's bias correction, their first steps would be up to (1-b1) / (1-b2)^1/2 too large.
        """
        along = self.along if self.moments_along is None else self.moments_along
        taken = _taken(self._lying(_plain(old)), along, mean=power == 2)
        # Gradients of copies add up to that of the original; of squares the sum is kept too, as for independent ones.
        return self._times(taken / self.copies if self.copies > 1 else taken, -power)

    def _lying(self, array: np.ndarray) -> np.ndarray:
        return array.T if self.transposed else array

    def _times(self, array: np.ndarray, power: int) -> np.ndarray:
        return fold.times(array, self.scale**power)


def sides(along: Sequence[Index]) -> list[np.ndarray]:
    """Whether the indices of each axis come from the source; they broadcast against the array."""
    return [(index >= 0).reshape(-1, *[1] * (len(along) - axis - 1)) for axis, index in enumerate(along)]


def same(size: int) -> Index:
    """An axis that is as before."""
    return np.arange(size)


def first(before: int, after: int) -> Index:
    """An axis whose first entries are kept, and whose further ones are cut off or new."""
    return np.where(np.arange(after) < before, np.arange(after), -1)


def ratio(there: np.ndarray, here: np.ndarray, layers: Index | None = None) -> np.ndarray:
    """there / here, where either may be per layer. A new layer takes the mean of `there`: only moments' fill sees it."""
    if layers is not None and there.ndim:
        there = np.where(layers < 0, there.mean(), there[np.maximum(layers, 0)])
    return np.asarray(there, np.float64) / np.asarray(here, np.float64)


def parameters(moves: Mapping[str, Move], old: Mapping[str, Any], fresh: Params, names: list[str]) -> Params:
    """Every new parameter, float32; those without a move are the fresh ones."""
    return {
        name: moves[name].weights(old[moves[name].source], fresh.get(name))
        if name in moves
        else np.asarray(fresh[name]).astype(np.float32)
        for name in names
    }


def optimizer_state(moves: Mapping[str, Move], old: Any, new: Any) -> Any:
    """The optimizer state of a new model.

    Args:
        moves: by new name.
        old: the source's state.
        new: a state of the new model, or its shapes, for the form of the result. Moments of parameters without a move are 0.

    Raises:
        CarryError: the two are of other optimizers.
    """
    if type(old) is not type(new):
        raise CarryError(
            f"the optimizer's state there is a {type(old).__name__} and here a {type(new).__name__}: the moments of one "
            "optimizer mean nothing to another; take the same optimizer, or start its state anew"
        )
    if (powers := POWERS.get(type(new))) is not None:
        moved = {
            field: {
                name: leaf
                if isinstance(leaf, optax.MaskedNode)
                else _moment(moves.get(name), getattr(old, field), powers[field], leaf)
                for name, leaf in getattr(new, field).items()
            }
            for field in powers
        }
        kept = {field: getattr(old, field) for field in new._fields if field not in powers}
        return new._replace(**kept, **moved)
    if isinstance(new, tuple):
        if len(old) != len(new):
            raise CarryError(
                "the optimizers' chains differ in length; take the same optimizer, or start its state anew"
            )
        parts = [optimizer_state(moves, before, after) for before, after in zip(old, new, strict=True)]
        return type(new)(*parts) if hasattr(new, "_fields") else tuple(parts)
    return old


def _moment(move: Move | None, old: Mapping[str, Any], power: int, leaf: Any) -> np.ndarray:
    there = None if move is None else old.get(move.source)
    if move is None or there is None or isinstance(there, optax.MaskedNode):
        return np.zeros(leaf.shape, np.float32)
    return move.moment(there, power)


def _taken(array: np.ndarray, along: tuple[Index, ...], *, mean: bool) -> np.ndarray:
    """The entries along every axis; where there is none, 0 or the mean of all along that axis."""
    for axis, index in enumerate(along):
        if np.array_equal(index, same(array.shape[axis])):
            continue
        taken = np.take(array, np.maximum(index, 0), axis)
        rest = array.mean(axis, keepdims=True) if mean else np.float32(0)
        side = (index >= 0).reshape(-1, *[1] * (array.ndim - axis - 1))
        array = np.where(side, taken, rest)
    return array


def _plain(array: Any) -> np.ndarray:
    return np.asarray(array).astype(np.float32)
