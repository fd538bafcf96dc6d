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

from mupax.errors import MupaxError
from mupax.presets.optimizers import OPTIMIZERS
from mupax.train.config.run import OptimizerConfig
from mupax.train.reuse import plain
from mupax.train.reuse.forms import powers_of
from mupax.zoo.huggingface.weights import Params

Index = np.ndarray
"""For every index along a new axis, the old index that it comes from; -1 where there is none."""


class CarryError(MupaxError):
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
        moved = self._times(_taken(self._lying(self.prepared(_plain(old))), self.along), 1)
        if fresh is None:
            return moved
        return np.where(self.carried(), moved, np.asarray(fresh).astype(np.float32))

    def carried(self) -> Any:
        """Whether an entry comes from the source, bool, broadcasting against the new parameter."""
        return functools.reduce(np.logical_and, sides(self.along), np.True_)

    def moment(self, old: Any, power: int) -> np.ndarray:
        """A moment of gradients to some power; 0 where entries are new (see `overshoot`)."""
        along = self.along if self.moments_along is None else self.moments_along
        taken = _taken(self._lying(_plain(old)), along)
        # Gradients of copies add up to that of the original; of squares the sum is kept too, as for independent ones.
        return self._times(taken / self.copies if self.copies > 1 else taken, -power)

    def _lying(self, array: np.ndarray) -> np.ndarray:
        return array.T if self.transposed else array

    def _times(self, array: np.ndarray, power: int) -> np.ndarray:
        return plain.times(array, self.scale**power)


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
    """there / here, where either may be per layer; what it is for a new layer says nothing."""
    if layers is not None and there.ndim:
        there = there[np.maximum(layers, 0)]
    return np.asarray(there, np.float64) / np.asarray(here, np.float64)


def parameters(moves: Mapping[str, Move], old: Mapping[str, Any], fresh: Params, names: list[str]) -> Params:
    """Every new parameter, float32; those without a move are the fresh ones."""
    return {
        name: moves[name].weights(old[moves[name].source], fresh.get(name))
        if name in moves
        else np.asarray(fresh[name]).astype(np.float32)
        for name in names
    }


def overshoot(b1: float, b2: float) -> float:
    """How many times too far Adam's first steps on new entries go, at most, where moments start at 0 and the count does not.

    After t steps the mean of gradients g is (1-b1^t) g and that of squares (1-b2^t) g^2; bias correction believes both are
    whole. A second moment borrowed from old entries instead would hold new ones back until it is forgotten: gradients of units
    that write nothing yet are far smaller.
    """
    t = np.arange(1, 1000)
    return float(((1 - b1**t) / np.sqrt(1 - b2**t)).max())


def overshoot_notes(config: OptimizerConfig) -> list[str]:
    """What to say where entries are new in a state that goes on; nothing where `overshoot` is small."""
    times = overshoot(config.b1, config.b2) if "nu" in OPTIMIZERS[config.name].moments else 1.0
    if times < 1.2:
        return []
    return [
        f"new entries start without moments among old ones, and with b2 {config.b2} Adam's first steps on them go up to "
        f"{times:.1f} times too far; 0.95 does not"
    ]


def optimizer_state(moves: Mapping[str, Move], old: Any, new: Any, optimizer: str) -> Any:
    """The optimizer state of a new model.

    Args:
        moves: by new name.
        old: the source's state.
        new: a state of the new model, or its shapes, for the form of the result. Moments of parameters without a move are 0.
        optimizer: the name of both.

    Raises:
        CarryError: the two are of other optimizers.
    """
    if type(old) is not type(new):
        raise CarryError(
            f"the optimizer's state there is a {type(old).__name__} and here a {type(new).__name__}: the moments of one "
            "optimizer mean nothing to another; take the same optimizer, or start its state anew"
        )
    if powers := powers_of(new, optimizer):
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
        parts = [optimizer_state(moves, before, after, optimizer) for before, after in zip(old, new, strict=True)]
        return type(new)(*parts) if hasattr(new, "_fields") else tuple(parts)
    return old


def _moment(move: Move | None, old: Mapping[str, Any], power: int, leaf: Any) -> np.ndarray:
    there = None if move is None else old.get(move.source)
    if move is None or there is None or isinstance(there, optax.MaskedNode):
        return np.zeros(leaf.shape, np.float32)
    return move.moment(there, power)


def _taken(array: np.ndarray, along: tuple[Index, ...]) -> np.ndarray:
    """The entries along every axis; 0 where there is none."""
    for axis, index in enumerate(along):
        if not np.array_equal(index, same(array.shape[axis])):
            array = np.take(array, np.maximum(index, 0), axis)
    return (
        array
        if all((index >= 0).all() for index in along)
        else np.where(functools.reduce(np.logical_and, sides(along)), array, np.float32(0))
    )


def _plain(array: Any) -> np.ndarray:
    return np.asarray(array).astype(np.float32)
