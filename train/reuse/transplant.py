"""Transfer parameters, moments and averages into a model of other sizes or another preset.

Every new entry is s * the old entry that it comes from, or is initialized. The network computes the
same with s * w as with w before, so gradients are the former ones over s: first moments (and
momentum) move by 1/s, second moments by 1/s^2.

A form (`forms`), a larger model (`grow`) and the start of a run (`start`) each list in a `Plan`
where entries come from.
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

from mupax import MupaxError, terminal
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
"""Source position of each position along one axis of a new parameter, or -1.

-1 marks new entries, which do not come from the source and are initialized."""


class TransplantError(MupaxError):
    """A state that cannot become the state of another run. The message says why."""


Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParamTransfer:
    """Rule that makes one new parameter, and its moments, from one parameter of the source."""

    source: str
    """Name of the source's parameter."""
    along: tuple[Index, ...]
    """One `Index` per dimension of the new parameter: where its entries come from, or -1."""
    scale: np.ndarray
    """Factor of transferred entries, float64 [], or [new layers] for a stack of layers.

    First moments are divided by the factor, second moments by its square.
    """
    prepare: Callable[[np.ndarray], np.ndarray] = np.asarray
    """Function applied to the source's weights first, such as a resize. Moments do not pass it."""
    moments_along: tuple[Index, ...] | None = None
    """One `Index` per dimension for the optimizer's moments, by default `along`."""
    transposed: bool = False
    copies: int = 1
    """Number of new entries made from one old entry, which share its gradient equally."""
    inserted_axis: int | None = None
    """Dimension of the new parameter that the source's parameter lacks."""
    copies_axis: int | None = None
    """Dimension along which copies of an entry are adjacent, if they must not stay equal.

    Initial values are then added to the copies.
    """

    def weights(self, old: Any, fresh: np.ndarray | None) -> np.ndarray:
        """Return the new parameter, float32, with initial values where no old entry is transferred.

        With `copies_axis`, initial values are also added to the transferred entries.

        Args:
            old: parameter of the source, an array of any dtype.
            fresh: initial values in the new shape. `None` if every entry comes from the source.
        """
        prepared = self.prepare(_float32(old))
        moved = plain.times(self._entries(prepared, self.along), self.scale)
        if fresh is None:
            return moved
        if self.copies_axis is not None:
            # `Growth.silenced` made the initial values of the copies sum to zero. So the sum of the
            # copies does not change.
            return np.where(self.transplanted(), moved, np.float32(0)) + _float32(fresh)
        return np.where(self.transplanted(), moved, _float32(fresh))

    def transplanted(self, along: tuple[Index, ...] | None = None) -> Any:
        """Return a bool mask of the entries that come from the source.

        The mask broadcasts against the new parameter.

        Args:
            along: indices to use in place of the transfer's own, such as `moments_along`.
        """
        return functools.reduce(np.logical_and, in_source(along or self.along), np.True_)

    def moment(self, old: Any, power: int) -> np.ndarray:
        """Return the moment of the new parameter, float32, with 0 for new entries.

        Transferred entries are divided by `copies` and by `scale**power`.

        Args:
            old: moment of the source's parameter, an array of any dtype.
            power: power of the gradient in the moment, 1 or 2.
        """
        along = self.moments_along or self.along
        entries = self._entries(_float32(old), along)
        values = np.where(self.transplanted(along), entries, np.float32(0))
        # The copies' gradients add up to the original's gradient. Second moments are divided by the
        # same number, as if the gradients of the copies were independent.
        if self.copies > 1:
            values = values / self.copies
        # w' = s w has the gradient g / s, and its square g^2 / s^2.
        return plain.times(values, self.scale**-power)

    def _entries(self, array: np.ndarray, along: tuple[Index, ...]) -> np.ndarray:
        """Return the old values in the new shape. Entries without an old value are arbitrary."""
        if self.transposed:
            array = array.T
        if self.inserted_axis is not None:
            array = np.expand_dims(array, self.inserted_axis)
        for axis, index in enumerate(along):
            # An unchanged axis needs no copy of the array.
            if not np.array_equal(index, np.arange(array.shape[axis])):
                # New entries have index -1, and any old entry stands in: the caller masks them.
                array = np.take(array, np.maximum(index, 0), axis)
        return array

    @property
    def times(self) -> str:
        """Scale in words, such as "x 0.5 to 2". Empty for a scale of 1."""
        low = float(np.min(self.scale))
        high = float(np.max(self.scale))
        if low == high == 1:
            return ""
        if low == high:
            return f"x {low:.4g}"
        return f"x {low:.4g} to {high:.4g}"


class Row(NamedTuple):
    """Row of the table that shows a user how each parameter of a new run is made."""

    name: str
    role: str
    old_shape: Shape | None
    """Shape in the source. `None` for a parameter that the source lacks."""
    new_shape: Shape | None
    """Shape in the new model. `None` for a dropped parameter."""
    action: str
    """One of "kept", "converted", "resized", "grown", "new" and "dropped"."""
    reason: str


@dataclasses.dataclass(frozen=True)
class ScaledModel:
    """Source or target of a transfer: a model, and the scales of its parameters under a preset.

    `scales` is the result of `plain.scales`: the factors that absorb the preset's multipliers.
    """

    model: ModelConfig
    definition: Definition
    scales: plain.Scales
    logits: Any
    """Scale of the attention logits: a number, or one per layer."""

    @classmethod
    def of(cls, program: Program) -> ScaledModel:
        """Return a run's model, with the scales of its parameters under the run's preset."""
        definition = program.definition
        factors = program.inputs.factors
        return cls(
            program.config.model,
            definition,
            plain.scales(definition, factors),
            plain.logits_of(definition, factors),
        )


@dataclasses.dataclass(frozen=True)
class Plan:
    """Plan of how each parameter of a new run is made from those of its source.

    Attributes:
        moves: transfers by name of the new parameter. A parameter without one is initialized.
        rows: table for the user, with a row per parameter.
    """

    moves: dict[str, ParamTransfer]
    rows: list[Row]

    def fresh(self) -> set[str]:
        """Return the names of parameters that need initial values for some or all entries.

        Copies that must be told apart (`copies_axis`) need initial values, too.
        """
        transferred = set()
        for name, move in self.moves.items():
            if np.all(move.transplanted()) and move.copies_axis is None:
                transferred.add(name)
        return {row.name for row in self.rows if row.new_shape is not None} - transferred


def check_unmovable(source: ScaledModel, target: ScaledModel) -> None:
    """Refuse a transfer that would change the scale of attention logits or of a tied readout.

    Parameters absorb most differences between presets. No parameter can do so for the logits if
    queries are normalized without gains, or for a tied readout if the last norm has no gain.

    Raises:
        TransplantError: the message says which scale differs.
    """
    if not target.model.absorbs_logit_scale and source.logits != target.logits:
        raise TransplantError(
            f"the source multiplies attention logits by {source.logits!r:.60} and this model by "
            f"{target.logits!r:.60}, and as queries are normalized without gains (model.qk_norm) no "
            "parameter can absorb the difference; write the source's --preset and --preset.base"
        )
    has_gain = plain.GAIN in source.definition.specs or plain.GAIN in target.definition.specs
    old_scale = source.scales.get(plain.GAIN, np.ones(()))
    new_scale = target.scales.get(plain.GAIN, np.ones(()))
    # Norm gains before the readout can carry a difference of its scale.
    if not has_gain and old_scale != new_scale:
        raise TransplantError(
            f"the source multiplies its tied readout by {old_scale:g} and this model by "
            f"{new_scale:g}, and without norm gains no parameter can absorb the difference; write "
            "the source's --preset and --preset.base"
        )


def role_of(spec: ParamSpec) -> str:
    """Return a parameter's role as text for the table. A bias or gain also names its matrix's."""
    if spec.of:
        return f"{spec.of.value} {spec.role.value}"
    return spec.role.value


def in_source(along: Sequence[Index]) -> list[np.ndarray]:
    """Return a bool array per axis, true for indices that come from the source.

    The arrays broadcast against the parameter.
    """
    masks = []
    for axis, index in enumerate(along):
        trailing = [1] * (len(along) - axis - 1)
        masks.append((index >= 0).reshape(-1, *trailing))
    return masks


def first_entries(old_size: int, new_size: int) -> Index:
    """Return the index of an axis that keeps its first entries, [new_size].

    Entries after the first `old_size` are -1 (new). A smaller new axis cuts old entries off.
    """
    return np.where(np.arange(new_size) < old_size, np.arange(new_size), -1)


def ratio(source: np.ndarray, target: np.ndarray, layers: Index | None = None) -> np.ndarray:
    """Return `source / target`, where either may be per layer. It is arbitrary for new layers.

    A weight takes this factor when it moves from one preset's scales to another's.

    Args:
        source: scale of the source's parameter, [] or [layers].
        target: scale of the new parameter, [] or [new layers].
        layers: source layer of each new layer, or -1. `None` if the number of layers stays.
    """
    # New layers have index -1. Any scale will do for them, because their weights are initialized.
    if layers is not None and source.ndim:
        source = source[np.maximum(layers, 0)]
    return np.asarray(source, np.float64) / np.asarray(target, np.float64)


def resized(position_TD: np.ndarray, source: ModelConfig, target: ModelConfig) -> np.ndarray:
    """Return an image model's position embeddings for another grid of patches, float32 [T', D].

    Positions of patches are resampled bicubically; a grid of the same size stays unchanged. Of the
    tokens before the patches (class token and registers), those that only `target` has get zeros,
    and those that only `source` has are dropped.

    Args:
        position_TD: position embeddings of `source`, [T, D].
    """
    old_side = source.position_grid
    new_side = target.position_grid
    # Rows of the class token and registers come first.
    num_leading = position_TD.shape[0] - old_side**2
    width = position_TD.shape[1]

    grid_GGD = position_TD[num_leading:].astype(np.float32).reshape(old_side, old_side, width)
    if old_side != new_side:
        # Smaller grids are filtered before they are sampled (antialias), as timm does.
        new_shape = (new_side, new_side, width)
        grid_GGD = np.asarray(jax.image.resize(grid_GGD, new_shape, "bicubic", antialias=True))

    num_new_leading = target.sizes()["position"] - new_side**2
    leading_RD = np.zeros_like(position_TD, shape=(num_new_leading, width))
    # The model with fewer class tokens and registers decides how many of these rows are kept.
    leading_RD[:num_leading] = position_TD[:num_leading][:num_new_leading]
    return np.concatenate([leading_RD, grid_GGD.reshape(-1, width)]).astype(np.float32)


def state(
    moves: Mapping[str, ParamTransfer],
    old: TrainState,
    fresh: Params,
    opt_state: Any,
    optimizer: str,
) -> TrainState:
    """Return the training state of the new run, made from the source's state.

    Parameters, moments and moving average are transferred, as float32 NumPy arrays. Step counts
    are kept. A source without a moving average gives a state without one.

    Args:
        moves: transfers by name of the new parameter.
        fresh: initial parameters for new entries (see `parameters`).
        opt_state: optimizer state, or its shapes, in the form of the result.
        optimizer: name of the optimizer of both runs.

    Raises:
        TransplantError: the two states are of different optimizers.
    """
    params = parameters(moves, old.params, fresh)
    average = None if old.ema is None else parameters(moves, old.ema, fresh)
    moments = optimizer_state(moves, old.opt_state, opt_state, optimizer)
    return old._replace(params=params, opt_state=moments, ema=average)


def parameters(moves: Mapping[str, ParamTransfer], old: Mapping[str, Any], fresh: Params) -> Params:
    """Return the parameters named in `moves` or `fresh`, float32: transferred, or initial values.

    Args:
        moves: transfers by name of the new parameter.
        old: parameters of the source, or their moving average, by the source's names.
        fresh: initial values of new parameters and of parameters with new entries (`Plan.fresh`).

    Raises:
        TransplantError: a parameter with new entries has no initial values.
    """
    params: Params = {}
    for name in {**moves, **fresh}:
        if name in moves:
            move = moves[name]
            # Any old values would stand in for the new entries.
            if name not in fresh and not np.all(move.transplanted()):
                raise TransplantError(
                    f"{name} has new entries and no initial values; give them for all of "
                    "`Plan.fresh()`"
                )
            params[name] = move.weights(old[move.source], fresh.get(name))
        else:
            params[name] = _float32(fresh[name])
    return params


OLD_STEPS = 20_000
"""Number of steps that `overshoot` trains an old entry alone, as in a long run."""
NEW_STEPS = 1000
"""Number of further steps that `overshoot` trains a new entry, too.

For decays up to 0.999 the new entry takes its largest step within them."""


def overshoot(config: OptimizerConfig) -> float:
    """Return the largest optimizer update of a new entry, divided by that of an old entry.

    New entries of a grown parameter start with moments of 0, while the count of steps goes on from
    the source. Adam's moments after t more steps are then (1-b1^t) g and (1-b2^t) g^2, but its bias
    correction treats them as complete, so first updates are too large. A second moment borrowed
    from old entries would hold new entries back, because gradients of units that write nothing are
    smaller.

    The ratio is measured: the optimizer itself runs on an old entry and a new one, both with a
    gradient of 1, so that nothing is assumed about its update rule.
    """
    # Clipping, weight decay and the schedule would act on both entries alike.
    constant = dataclasses.replace(
        config, clip_norm=None, weight_decay=0.0, schedule="constant", warmup_steps=0
    )
    tx = build(constant, {"gain": ParamSpec(role=Role.NORM_GAIN, axes=("embed",))})
    ones = {"gain": jnp.float32(1)}
    factors = Factors(multiplier=ones, lr=ones, eps=ones, weight_decay=ones, forward={})
    hyper = hyperparams(constant, 1).at(jnp.int32(0))
    params = {"gain": jnp.zeros(2)}

    def step(state: Any, new_gradient: jax.Array) -> tuple[Any, jax.Array]:
        grads = {"gain": jnp.stack([jnp.float32(1), new_gradient])}
        updates: Any
        updates, state = tx.update(grads, state, params, factors=factors, hyper=hyper)
        return state, updates["gain"]

    @jax.jit
    def largest() -> jax.Array:
        # The old entry has a gradient of 1 at every step, the new one only after `OLD_STEPS`.
        new_gradients = jnp.concatenate([jnp.zeros(OLD_STEPS), jnp.ones(NEW_STEPS)])
        _, updates = jax.lax.scan(step, tx.init(params), new_gradients)
        old, new = updates[OLD_STEPS:].T
        return jnp.max(jnp.abs(new)) / jnp.max(jnp.abs(old))

    return float(largest())


def overshoot_notes(config: OptimizerConfig) -> list[str]:
    """Return a list with a warning if first updates of new entries are 1.2 times too large or more.

    The list is empty otherwise. `overshoot` measures the factor.
    """
    times = overshoot(config)
    if times < 1.2:
        return []
    note = (
        "new entries start without moments among old ones, and the first steps of "
        f"{config.name} on them go up to {times:.1f} times too far"
    )
    if "b2" in OPTIMIZERS[config.name].reads:
        note += f" with b2 {config.b2}; 0.95 does not"
    return [note]


def powers_of(opt_state: Any, optimizer: str) -> dict[str, int]:
    """Return the fields of an optimizer state that hold moments, with their power of the gradient.

    The power is 1 for a running mean or sum of gradients, such as Adam's mu, and 2 for one of
    their squares, such as nu. The result is empty for a state without moments.

    Args:
        opt_state: State of one transformation of the optimizer's chain.
        optimizer: Name of the optimizer, a key of `OPTIMIZERS`.
    """
    fields = getattr(opt_state, "_fields", ())
    moments = OPTIMIZERS[optimizer].moments
    return {field: power for field, power in moments.items() if field in fields}


def optimizer_state(moves: Mapping[str, ParamTransfer], old: Any, new: Any, optimizer: str) -> Any:
    """Return the optimizer state of the new model, with the source's moments transferred.

    Moments of parameters without a transfer are 0. Step counts are those of the source.

    Args:
        moves: transfers by name of the new parameter.
        new: optimizer state of the new model, or its shapes, in the form of the result.

    Raises:
        TransplantError: the two states are of different optimizers.
    """
    if type(old) is not type(new):
        raise TransplantError(
            f"the source has the optimizer state {type(old).__name__} and this run "
            f"{type(new).__name__}: the moments of one optimizer mean nothing to another; write "
            "the source's --optimizer.name, or start a new state (without --init-optimizer)"
        )

    powers = powers_of(new, optimizer)
    if powers:
        moments: dict[str, Any] = {}
        for field, power in powers.items():
            old_moments = getattr(old, field)
            moments[field] = {
                name: _moment(moves.get(name), old_moments, power, leaf)
                for name, leaf in getattr(new, field).items()
            }
        if "vectors" in new._fields:
            moments["vectors"] = _vectors(moves, old.vectors, new.vectors)
        return old._replace(**moments)

    # State without moments, such as the count of steps, goes on as it is.
    if not isinstance(new, tuple):
        return old
    if len(old) != len(new):
        raise TransplantError(
            "the optimizers' chains differ in length; take the same optimizer, or start its state "
            "anew"
        )
    parts = [
        optimizer_state(moves, old_part, new_part, optimizer)
        for old_part, new_part in zip(old, new, strict=True)
    ]
    # A NamedTuple takes its fields as arguments, a tuple takes one iterable.
    return type(new)(*parts) if hasattr(new, "_fields") else tuple(parts)


def _vectors(
    moves: Mapping[str, ParamTransfer], old: Mapping[str, Any], new: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the vectors of Muon's power iterations by parameter name.

    Vectors of the source are kept. A parameter without one, or with another size, gets the initial
    vector.

    Args:
        old: vectors of the source by the source's names.
        new: vectors of the new run, or their shapes, by its own names.
    """
    # Imported only here, because most runs have no such vectors.
    from mupax.train.core.muon import first_vector

    vectors = {}
    for name, leaf in new.items():
        old_vector = None
        if name in moves:
            old_vector = old.get(moves[name].source)
        if old_vector is not None and old_vector.shape == leaf.shape:
            vectors[name] = old_vector
        else:
            vectors[name] = first_vector(leaf.shape)
    return vectors


def _moment(move: ParamTransfer | None, old: Mapping[str, Any], power: int, leaf: Any) -> Any:
    """Return one parameter's moment, or zeros if the source has none to transfer.

    A `MaskedNode` is returned unchanged: the optimizer keeps no such moment of this parameter.

    Args:
        move: transfer of the parameter. `None` if no parameter of the source becomes it.
        old: moments of the source by the source's names.
        power: power of the gradient in the moment, 1 or 2.
        leaf: moment of the new run, of which the shape is read.
    """
    if isinstance(leaf, optax.MaskedNode):
        return leaf
    old_moment = None if move is None else old.get(move.source)
    if move is None or old_moment is None or isinstance(old_moment, optax.MaskedNode):
        return np.zeros(leaf.shape, np.float32)
    return move.moment(old_moment, power)


def _float32(array: Any) -> np.ndarray:
    return np.asarray(array).astype(np.float32)


def place(source: WeightsSource, definition: Definition, factors: Factors) -> dict[str, np.ndarray]:
    """Return a model's parameters as a preset stores them, from weights stored under any preset.

    Every array has the dtype of the model's parameter.

    Args:
        definition: the model. The caller makes sure that settings without parameters (activation,
            eps, positions) agree with `source.model`.
        factors: multipliers and forward factors of the preset for this model.

    Raises:
        WeightsError: the weights are of another model. The message names the parameters.
        TransplantError: no parameter can absorb a scale of the preset.
    """
    scales = plain.scales(definition, factors)
    logits = plain.logits_of(definition, factors)
    stored = ScaledModel(source.model, definition, source.scales, source.logits)
    # Both ends have the same architecture here. Only scales can differ.
    check_unmovable(stored, ScaledModel(source.model, definition, scales, logits))

    params = dict(source.params)
    gain = plain.GAIN
    is_added = gain in params and gain not in definition.abstract
    if is_added and (params[gain] == np.float32(scales.get(gain, 1))).all():
        # This gain is the readout's multiplier alone, which the preset has as a factor.
        del params[gain]
    shapes = {name: value.shape for name, value in params.items()}
    check_shapes(shapes, definition, "the weights are of another model")

    restored = plain.restore_multipliers(params, scales)
    return {
        name: np.asarray(restored[name], leaf.dtype) for name, leaf in definition.abstract.items()
    }


def placed(value: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Place an array of the host onto devices and return it. Every process places its own shards.

    Args:
        value: the complete array, equal on every process of the run.
        leaf: shape, dtype and sharding of the result.
    """
    host = np.asarray(value).astype(leaf.dtype)
    assert leaf.sharding is not None
    return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: host[index])


def show(console: Console, title: str, rows: list[Row], notes: list[str]) -> None:
    """Print the table of parameters under a title, with counts of the actions and notes below."""
    table = [("parameter", "role", "there", "here", "", "why")]
    for row in rows:
        old_shape = _shape_text(row.old_shape)
        new_shape = _shape_text(row.new_shape)
        table.append((row.name, row.role, old_shape, new_shape, row.action, row.reason))

    actions = [row.action for row in rows]
    counts = ", ".join(f"{actions.count(action)} {action}" for action in dict.fromkeys(actions))
    lines = [
        terminal.wrapped(title),
        terminal.table(terminal.filled(table)),
        terminal.wrapped(counts),
    ]
    lines += [terminal.wrapped(f"note: {note}") for note in notes]
    for line in lines:
        # Rich would wrap the table's rows, colour its numbers and read brackets as markup.
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _shape_text(shape: Shape | None) -> str:
    if shape is None:
        return ""
    return "x".join(map(str, shape))
