"""Carry parameters, optimizer moments and averages into a model of other sizes or another preset, entry by entry.

A new entry is s * the old one that it comes from, or has none. The network computes the same with s * w as with w
before, so that gradients are those of before over s: first moments (and momentum) move by 1/s, second ones by 1/s^2.

A form (`forms`), a larger model (`grow`) and the start of a run (`start`) each say in a `Plan` where entries come from.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console

from mupax import terminal
from mupax.errors import MupaxError
from mupax.presets import ParamSpec, Role
from mupax.presets.optimizers import OPTIMIZERS
from mupax.train.config.run import OptimizerConfig
from mupax.train.core.factors import Factors, hyperparams
from mupax.train.core.optimizer import build
from mupax.train.core.program import Program
from mupax.train.core.state import TrainState
from mupax.train.reuse import plain
from mupax.train.reuse.source import WeightsSource, check_shapes
from mupax.zoo.definition import Definition
from mupax.zoo.families import ModelConfig
from mupax.zoo.huggingface.weights import Params

Index = np.ndarray
"""For every index along a new axis, the old index that it comes from; -1 where there is none."""


class TransplantError(MupaxError):
    """A state that cannot become another's. The text says why."""


Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParamTransfer:
    """Transfer of one parameter from one of the source."""

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
    inserted: int | None = None
    """A dimension of the new parameter, of size 1 in the source, that the source's does not have."""
    apart: int | None = None
    """A dimension along which copies lie side by side and start apart: fresh numbers are added to them."""

    def weights(self, old: Any, fresh: np.ndarray | None) -> np.ndarray:
        """The new parameter, float32: what comes from the old one, and fresh numbers elsewhere.

        Args:
            old: the source's parameter.
            fresh: of the new shape; None where every entry comes from the source.
        """
        moved = plain.times(self._entries(self.prepared(_float32(old)), self.along), self.scale)
        if self.apart is not None and fresh is not None:
            return np.where(self.transplanted(), moved, np.float32(0)) + _float32(fresh)
        return moved if fresh is None else np.where(self.transplanted(), moved, _float32(fresh))

    def transplanted(self, along: tuple[Index, ...] | None = None) -> Any:
        """Whether an entry comes from the source, bool, broadcasting against the new parameter."""
        return functools.reduce(np.logical_and, sides(along or self.along), np.True_)

    def moment(self, old: Any, power: int) -> np.ndarray:
        """The new parameter's moment, float32; 0 where entries are new (see `overshoot`).

        Args:
            old: of the source's parameter.
            power: of the gradients in it: 1 or, of squares, 2.
        """
        along = self.moments_along or self.along
        values = np.where(
            self.transplanted(along), self._entries(_float32(old), along), np.float32(0)
        )
        # Gradients of copies add up to that of the original; of squares the sum stays too, as for independent ones.
        return plain.times(values / self.copies if self.copies > 1 else values, self.scale**-power)

    def _entries(self, array: np.ndarray, along: tuple[Index, ...]) -> np.ndarray:
        """The entries along every axis; any, where there is none."""
        array = array.T if self.transposed else array
        array = array if self.inserted is None else np.expand_dims(array, self.inserted)
        for axis, index in enumerate(along):
            if not np.array_equal(index, np.arange(array.shape[axis])):
                array = np.take(array, np.maximum(index, 0), axis)
        return array

    @property
    def times(self) -> str:
        """The scale in words; empty where it is 1."""
        low, high = float(np.min(self.scale)), float(np.max(self.scale))
        return (
            "" if low == high == 1 else f"x {low:.4g}" + ("" if low == high else f" to {high:.4g}")
        )


class Row(NamedTuple):
    """One parameter of the table."""

    name: str
    role: str
    there: Shape | None
    here: Shape | None
    action: str
    """kept, converted, resized, new or dropped."""
    reason: str


@dataclasses.dataclass(frozen=True)
class ScaledModel:
    """A model with the scales that its preset gives every parameter."""

    model: ModelConfig
    definition: Definition
    scales: plain.Scales
    logits: Any
    """What it takes the attention logits times: a number, or one per layer."""

    @classmethod
    def of(cls, program: Program) -> ScaledModel:
        """A run's model under its preset."""
        model, factors = program.definition, program.inputs.factors
        return cls(
            program.config.model,
            model,
            plain.scales(model, factors),
            plain.logits_of(model, factors),
        )


@dataclasses.dataclass(frozen=True)
class Plan:
    """Moves by name, and the table. A parameter without a move is new."""

    moves: dict[str, ParamTransfer]
    rows: list[Row]

    def fresh(self) -> set[str]:
        """Parameters with entries that do not come from the source alone."""
        moved = {
            name
            for name, move in self.moves.items()
            if np.all(move.transplanted()) and move.apart is None
        }
        return {row.name for row in self.rows if row.here is not None} - moved


def check_unmovable(there: ScaledModel, here: ScaledModel) -> None:
    """Raise TransplantError for what no parameter can make up for: other scales of logits or readout.

    Args:
        there: the source.
        here: the run.
    """
    if not here.model.absorbs_logit_scale and there.logits != here.logits:
        raise TransplantError(
            f"attention logits are taken times {there.logits!r:.60} there and {here.logits!r:.60} here, and where queries are "
            "normalized without gains (model.qk_norm) no parameter can carry the difference; take the source's preset and base"
        )
    gains = any(plain.GAIN in side.definition.specs for side in (there, here))
    before, after = (side.scales.get(plain.GAIN, np.ones(())) for side in (there, here))
    if not gains and before != after:
        raise TransplantError(
            f"the tied readout is taken times {before:g} there and {after:g} here, and without norm gains no parameter can "
            "carry the difference; take the source's preset and base"
        )


def role_of(spec: ParamSpec) -> str:
    """A role as the table says it: a bias with its matrix."""
    return f"{spec.of.value} {spec.role.value}" if spec.of else spec.role.value


def sides(along: Sequence[Index]) -> list[np.ndarray]:
    """Whether the indices of each axis come from the source; they broadcast against the array."""
    return [
        (index >= 0).reshape(-1, *[1] * (len(along) - axis - 1)) for axis, index in enumerate(along)
    ]


def first(before: int, after: int) -> Index:
    """Index of an axis whose first entries are kept, and whose further ones are cut off or new.

    Args:
        before: its old size.
        after: its new size.
    """
    return np.where(np.arange(after) < before, np.arange(after), -1)


def ratio(there: np.ndarray, here: np.ndarray, layers: Index | None = None) -> np.ndarray:
    """there / here, where either may be per layer; of a new layer it is arbitrary.

    Args:
        there: scale of the source's parameter.
        here: of the new one.
        layers: index of the layers, where they grow.
    """
    if layers is not None and there.ndim:
        there = there[np.maximum(layers, 0)]
    return np.asarray(there, np.float64) / np.asarray(here, np.float64)


def resized(position_TD: np.ndarray, before: ModelConfig, after: ModelConfig) -> np.ndarray:
    """Positions for another grid, float32 [T', D]; those of one of the same size keep their numbers.

    Args:
        position_TD: of `before`, [T, D].
        before: the model that they are of.
        after: the model that they are for. Tokens before the patches that only it has get rows of zeros.
    """
    old, new = before.position_grid, after.position_grid
    own, width = (
        position_TD.shape[0] - old**2,
        position_TD.shape[1],
    )  # rows of the class token and registers, first
    grid_GGD = position_TD[own:].astype(np.float32).reshape(old, old, width)
    if old != new:
        # Smaller grids are filtered before they are sampled (antialias), as timm does it.
        grid_GGD = np.asarray(
            jax.image.resize(grid_GGD, (new, new, width), "bicubic", antialias=True)
        )
    leading_RD = np.zeros_like(position_TD, shape=(after.sizes()["position"] - new**2, width))
    leading_RD[:own] = position_TD[:own][: len(leading_RD)]
    return np.concatenate([leading_RD, grid_GGD.reshape(-1, width)]).astype(np.float32)


def state(
    moves: Mapping[str, ParamTransfer],
    old: TrainState,
    fresh: Params,
    opt_state: Any,
    optimizer: str,
) -> TrainState:
    """The whole state of a run as another's; raises as `optimizer_state`.

    Args:
        moves: by new name.
        old: the source's state.
        fresh: as `parameters`.
        opt_state: as `new` of `optimizer_state`.
        optimizer: the name of both.
    """
    params, average = (
        None if w is None else parameters(moves, w, fresh) for w in (old.params, old.ema)
    )
    moments = optimizer_state(moves, old.opt_state, opt_state, optimizer)
    return old._replace(params=params, opt_state=moments, ema=average)


def parameters(moves: Mapping[str, ParamTransfer], old: Mapping[str, Any], fresh: Params) -> Params:
    """Every new parameter, float32.

    Args:
        moves: by new name.
        old: the source's parameters.
        fresh: initial ones, for those without a move and for new entries.
    """
    return {
        name: moves[name].weights(old[moves[name].source], fresh.get(name))
        if name in moves
        else _float32(fresh[name])
        for name in {**moves, **fresh}
    }


OLD_STEPS = 20_000
"""Steps after which the state of an old entry is that of a long run."""
NEW_STEPS = 1000
"""Steps in which a new entry's largest step comes, for decays up to 0.999."""


def overshoot(config: OptimizerConfig) -> float:
    """Return how many times too far the first steps on new entries go, at most, relative to those on old entries.

    A new entry's moments start at 0 in a state whose count of steps does not. Adam's moments after t steps are then
    (1-b1^t) g and (1-b2^t) g^2, and its bias correction takes both to be complete. A second moment borrowed from old entries
    would hold new ones back: gradients of units that write nothing are smaller.

    The optimizer's own direction is run on an old entry and a new one, both with a gradient of 1, so that nothing is assumed of it.

    Args:
        config: the optimizer.
    """
    constant = dataclasses.replace(
        config, clip_norm=None, weight_decay=0.0, schedule="constant", warmup_steps=0
    )
    tx = build(constant, {"gain": ParamSpec(role=Role.NORM_GAIN, axes=("embed",))})
    one = {"gain": jnp.float32(1)}
    factors = Factors(multiplier=one, lr=one, eps=one, weight_decay=one, forward={})
    numbers = hyperparams(constant, 1).at(jnp.int32(0))
    params = {"gain": jnp.zeros(2)}

    def step(state: Any, new_gradient: jax.Array) -> tuple[Any, jax.Array]:
        grads = {"gain": jnp.stack([jnp.float32(1), new_gradient])}
        updates: Any
        updates, state = tx.update(grads, state, params, factors=factors, hyper=numbers)
        return state, updates["gain"]

    @jax.jit
    def largest() -> jax.Array:
        new_gradients = jnp.concatenate([jnp.zeros(OLD_STEPS), jnp.ones(NEW_STEPS)])
        _, updates = jax.lax.scan(step, tx.init(params), new_gradients)
        old, new = updates[OLD_STEPS:].T
        return jnp.max(jnp.abs(new)) / jnp.max(jnp.abs(old))

    return float(largest())


def overshoot_notes(config: OptimizerConfig) -> list[str]:
    """Return a line of warning where entries are new in a state that goes on, or none where `overshoot` is small."""
    times = overshoot(config)
    if times < 1.2:
        return []
    note = f"new entries start without moments among old ones, and the first steps of {config.name} on them go up to "
    note += f"{times:.1f} times too far"
    if "b2" in OPTIMIZERS[config.name].reads:
        note += f" with b2 {config.b2}; 0.95 does not"
    return [note]


def powers_of(opt_state: Any, optimizer: str) -> dict[str, int]:
    """The power of the gradient in each field of an optimizer's state that holds a moment; empty for another part of a chain.

    Args:
        opt_state: the state of a part of the chain.
        optimizer: name of the whole.
    """
    fields = getattr(opt_state, "_fields", ())
    return {
        field: power for field, power in OPTIMIZERS[optimizer].moments.items() if field in fields
    }


def optimizer_state(moves: Mapping[str, ParamTransfer], old: Any, new: Any, optimizer: str) -> Any:
    """The optimizer state of a new model.

    Args:
        moves: by new name.
        old: the source's state.
        new: a state of the new model, or its shapes, for the form of the result. Moments of parameters without a move are 0.
        optimizer: the name of both.

    Raises:
        TransplantError: the two are of other optimizers.
    """
    if type(old) is not type(new):
        raise TransplantError(
            f"the optimizer's state there is a {type(old).__name__} and here a {type(new).__name__}: the moments of one "
            "optimizer mean nothing to another; take the same optimizer, or start its state anew"
        )
    if powers := powers_of(new, optimizer):
        moved = {
            field: {
                name: _moment(moves.get(name), getattr(old, field), power, leaf)
                for name, leaf in getattr(new, field).items()
            }
            for field, power in powers.items()
        }
        return old._replace(**moved)
    if isinstance(new, tuple):
        if len(old) != len(new):
            raise TransplantError(
                "the optimizers' chains differ in length; take the same optimizer, or start its state anew"
            )
        parts = [
            optimizer_state(moves, before, after, optimizer)
            for before, after in zip(old, new, strict=True)
        ]
        return type(new)(*parts) if hasattr(new, "_fields") else tuple(parts)
    return old


def _moment(move: ParamTransfer | None, old: Mapping[str, Any], power: int, leaf: Any) -> Any:
    if isinstance(leaf, optax.MaskedNode):
        return leaf
    there = None if move is None else old.get(move.source)
    if move is None or there is None or isinstance(there, optax.MaskedNode):
        return np.zeros(leaf.shape, np.float32)
    return move.moment(there, power)


def _float32(array: Any) -> np.ndarray:
    return np.asarray(array).astype(np.float32)


def place(source: WeightsSource, definition: Definition, factors: Factors) -> dict[str, np.ndarray]:
    """Return the parameters of a model under a preset, one array per parameter in its type, from weights in any form.

    Args:
        source: the weights.
        definition: the model; its activation, eps and positions are the caller's to match (`source.model`).
        factors: of the preset the parameters are for.

    Raises:
        WeightsError: the weights are of another model; the text names what differs.
        TransplantError: no parameter can carry what the preset asks for.
    """
    scales = plain.scales(definition, factors)
    before = ScaledModel(source.model, definition, source.scales, source.logits)
    check_unmovable(
        before, ScaledModel(source.model, definition, scales, plain.logits_of(definition, factors))
    )
    params = dict(source.params)
    gain = plain.GAIN
    if (
        gain in params
        and gain not in definition.abstract
        and (params[gain] == np.float32(scales.get(gain, 1))).all()
    ):
        del params[gain]  # the readout's multiplier alone, which this model has as such
    shapes = {name: value.shape for name, value in params.items()}
    check_shapes(shapes, definition, "the weights are of another model")
    restored = plain.restore_multipliers(params, scales)
    return {
        name: np.asarray(restored[name], leaf.dtype) for name, leaf in definition.abstract.items()
    }


def placed(value: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """An array of the host on its devices and in its type; every process puts its part.

    Args:
        value: the whole array, on every process.
        leaf: shape, dtype and sharding that it is to have.
    """
    host = np.asarray(value).astype(leaf.dtype)
    assert leaf.sharding is not None
    return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: host[index])


def show(console: Console, title: str, rows: list[Row], notes: list[str]) -> None:
    """Print the table of what became of every parameter.

    Args:
        console: where.
        title: above the table.
        rows: of the table.
        notes: below it.
    """
    table = [("parameter", "role", "there", "here", "", "why")]
    for row in rows:
        there, here = (
            "x".join(map(str, shape)) if shape is not None else ""
            for shape in (row.there, row.here)
        )
        table.append((row.name, row.role, there, here, row.action, row.reason))
    actions = [row.action for row in rows]
    counts = ", ".join(f"{actions.count(action)} {action}" for action in dict.fromkeys(actions))
    prose = map(terminal.wrapped, (title, counts, *(f"note: {note}" for note in notes)))
    for line in (next(prose), terminal.table(terminal.filled(table)), *prose):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
