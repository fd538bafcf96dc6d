"""Judgement of every row of a preset's table in one limit, whoever wrote the table.

`limits` says what a table leads to, and a program that follows a wrong table agrees with it. Here
each row is held against conditions that do not depend on the table:

| column    | condition                                                                           |
|-----------|-------------------------------------------------------------------------------------|
| init_std  | Activations neither grow nor vanish at initialization.                              |
| lr        | The steps of this parameter alone move the stream by as much at every size. The     |
|           | steps of a readout move the output by as much.                                      |
| eps       | Adam's eps follows the gradient.                                                    |

`Preset.vanishing` has what a source lets vanish on purpose. The conditions are derived here, after
those of Tensor Programs V and of 2405.15712. `mupax check` reports the troubles.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Literal

from mupax.presets.analysis.limits import Limit
from mupax.presets.analysis.model import SPECS
from mupax.presets.preset import Preset
from mupax.presets.roles import BIASES, EMBEDDINGS, ROUTED, VECTORS, ParamSpec, Role

Column = Literal["init_std", "lr", "eps"]
"""Part of a row: initial size (multiplier, std), steps (multiplier, learning rate), Adam's eps."""

ALONE = ("embed", "memory", "mlp", "heads", "kv_heads", "head_dim")
"""Axes that limits grow together. A fan-in of the wrong axis shows if one of them grows alone."""

_TOLERANCE = 0.01
"""Exponents up to this size count as 0."""

_BOUNDED_ROLES = frozenset(spec.role for spec in SPECS.values())

Gradient = Callable[[ParamSpec, Limit], float | None]
"""Function that returns the exponent of a stored parameter's gradient, or `None` if unknown."""


@dataclasses.dataclass(frozen=True)
class Trouble:
    """Fault in one column of a row.

    Attributes:
        word: "explodes", "vanishes", "frozen", "lazy", "eps dominates" or "eps fades".
        exponent: Exponent of a quantity that should not depend on the size.
        axis: Axis that has to grow alone for the fault to show. `None` if the fault shows in the
            limit that was judged.
    """

    word: str
    exponent: float
    axis: str | None = None

    def __str__(self) -> str:
        if self.axis is None:
            return self.word
        return f"{self.word} where {self.axis} grows alone"


@dataclasses.dataclass(frozen=True)
class Health:
    """Checks of the initial size, steps and eps of a preset's rows in one limit.

    Exponents are powers of the size t that goes to infinity, as in `Limit`.

    Attributes:
        preset: Table to judge, in any form.
        limit: Limit of this preset.
        gradient: Function that returns exponents of gradients in any limit of this preset.
    """

    preset: Preset
    limit: Limit
    gradient: Gradient

    def troubles(self, specs: Iterable[ParamSpec]) -> dict[tuple[str, Column], Trouble]:
        """Return the faults by (`ParamSpec.group`, column). Right columns have no entry.

        Args:
            specs: Parameters of the model. The last one of a group stands for its group.
        """
        by_group = {spec.group: spec for spec in specs}
        moves = {}
        for group, spec in by_group.items():
            moves[group] = self._movement(spec)
        weight_moves = []
        for group, spec in by_group.items():
            # A lazy model is one whose matrices stop moving; its vectors and readout may go on.
            if spec.role in VECTORS or spec.role is Role.READOUT:
                continue
            move = moves[group]
            if move is not None:
                weight_moves.append(move)
        lazy = max(weight_moves, default=0.0) < -_TOLERANCE

        faults: dict[tuple[str, Column], Trouble] = {}
        for group, spec in by_group.items():
            verdicts: dict[Column, Trouble | None] = {
                "init_std": self._judge_init_std(spec),
                "lr": self._judge_lr(spec, moves[group], lazy),
                "eps": self._judge_eps(spec),
            }
            for column, trouble in verdicts.items():
                if trouble is not None:
                    faults[group, column] = trouble
        return faults

    def _judge_init_std(self, spec: ParamSpec) -> Trouble | None:
        """Return the fault in a parameter's initial size, or `None`. Biases have none.

        The initial output must neither grow nor vanish in the limit. That of a readout, a router or
        an expert may vanish down to the exponent -1/2. The output of a dense block's matrix must
        not grow if one axis grows alone, either.
        """
        # A bias starts at zero in every table, so it has no size to judge.
        if spec.role in BIASES:
            return None
        exponent = self._initial_output(spec, self.limit)
        if spec.role in EMBEDDINGS:
            # With depth the stream may grow by the blocks, which is no fault of the embedding.
            if not self.limit.layers:
                exponent -= self.limit.stream
        elif spec.role is Role.READOUT or spec.role in ROUTED:
            # An output of D^-1/2 is as good as a start at zero. Everything between D^-1/2 and order
            # one is right, too.
            exponent = max(exponent, 0.0) + min(exponent + 0.5, 0.0)
        if abs(exponent) > _TOLERANCE:
            word = "explodes" if exponent > 0 else "vanishes"
            return Trouble(word, exponent)
        if not _bounded(spec):
            return None
        for axis, alone in self._limits.items():
            exponent = self._initial_output(spec, alone)
            if exponent > _TOLERANCE:
                return Trouble("explodes", exponent, axis)
        return None

    def _initial_output(self, spec: ParamSpec, limit: Limit) -> float:
        """Return the exponent of W x at initialization for entries of x of order one.

        For a gain this is the exponent of its own entries.
        """
        row = self.preset.row(spec)
        return limit.x(row.multiplier * row.init_std) + _product(spec.fan_in, limit) / 2

    def _judge_lr(self, spec: ParamSpec, move: float | None, lazy: bool) -> Trouble | None:
        """Return the fault in a parameter's steps, or `None`.

        In the limit, steps must not move the stream more and more ("explodes"), nor vanish faster
        than the preset's source concedes ("lazy" or "frozen"). Steps of a dense block's matrix must
        not grow if one axis grows alone, either.

        Args:
            move: Result of `_movement`. `None`, an unknown movement, is no fault.
            lazy: Whether the steps of all matrices and embeddings before the readout move the
                stream less and less.
        """
        if move is None:
            return None
        if move > _TOLERANCE:
            return Trouble("explodes", move)
        if move < min(-_TOLERANCE, self._conceded("movement", spec) - _TOLERANCE):
            features = self._conceded("features")
            slower_than_conceded = features < 0 and move < features - _TOLERANCE
            if (lazy or features < 0) and not slower_than_conceded:
                return Trouble("lazy", move)
            return Trouble("frozen", move)
        if not _bounded(spec):
            return None
        for axis, alone in self._limits.items():
            exponent = self._step_output(spec, alone)
            if exponent > _TOLERANCE:
                return Trouble("explodes", exponent, axis)
        return None

    def _step_output(self, spec: ParamSpec, limit: Limit) -> float:
        """Return the exponent of dW x for one step dW and the x of order one that made the step.

        Args:
            limit: Limit in which one axis grows alone. The result is 0 for the axes along which the
                steps of right tables grow, too.
        """
        # A preset whose eps does not follow uneven growth makes no claim for a width alone.
        if "embed" in limit.growth and not self.preset.uneven:
            return 0.0
        exponent = self._rate(spec, limit)
        if self.limit.family == "muon" and self.preset.row(spec).muon is not None:
            # The step, or each of its blocks, is orthogonal and has spectral norm 1.
            fan_in = _product(spec.fan_in, limit)
            fan_out = _product(spec.fan_out, limit)
            return exponent + limit.coherence(spec) + (fan_in - fan_out) / 2
        if self.limit.family == "sgd":
            gradient = self.gradient(spec, limit)
            if gradient is None or {"embed", "kv_heads"} & limit.growth.keys():
                # In correct tables SGD's steps grow as D^1/2 and G^1/2 along these two axes, and
                # along no other.
                return 0.0
            exponent += gradient
        return exponent + _product(spec.fan_in, limit)

    def _judge_eps(self, spec: ParamSpec) -> Trouble | None:
        """Return the fault in a parameter's eps, or `None`.

        Gradient over eps must have the exponent 0, or lie between 0 and the exponent that the
        preset's source concedes. With `Preset.uneven` a dense block's matrix must have the exponent
        0 also if one axis grows alone. Without eps or a known gradient there is no fault.
        """
        exponent = self._gradient_over_eps(spec, self.limit)
        if exponent is None:
            return None
        conceded = self._conceded("eps", spec)
        # The source allows gradient over eps to change by the exponent `conceded`. A table may use
        # only a part of that, so every exponent from 0 to `conceded` is right.
        least = min(conceded, 0.0) - _TOLERANCE
        most = max(conceded, 0.0) + _TOLERANCE
        if exponent < least or exponent > most:
            word = "eps dominates" if exponent < 0 else "eps fades"
            return Trouble(word, exponent)
        if not self.preset.uneven or not _bounded(spec):
            return None
        for axis, alone in self._limits.items():
            exponent = self._gradient_over_eps(spec, alone)
            if exponent is not None and abs(exponent) > _TOLERANCE:
                word = "eps dominates" if exponent < 0 else "eps fades"
                return Trouble(word, exponent, axis)
        return None

    def _gradient_over_eps(self, spec: ParamSpec, limit: Limit) -> float | None:
        """Return the exponent of gradient over eps.

        `None` means that the optimizer has no eps for this parameter, or that its gradient is
        unknown.
        """
        row = self.preset.row(spec)
        left_to_adam = limit.family == "muon" and row.muon is None
        if limit.family != "adam" and not left_to_adam:
            return None
        gradient = self.gradient(spec, limit)
        return None if gradient is None else gradient - limit.x(row.eps)

    @functools.cached_property
    def _limits(self) -> dict[str, Limit]:
        """Limits in which one axis of `ALONE` grows and no other, by axis."""
        family = self.limit.family
        tied = self.limit.tied
        return {axis: Limit(self.preset, family, {axis: 1.0}, tied=tied) for axis in ALONE}

    def _conceded(self, what: str, spec: ParamSpec | None = None) -> float:
        """Return the exponent of what the preset's source lets vanish; 0 if it lets nothing vanish.

        Args:
            what: Key of `Preset.vanishing` without a group: "features", "movement" or "eps".
            spec: Declaration of a parameter, for "movement" and "eps". All parts of an
                encoder-decoder share one concession.
        """
        key = what
        if spec is not None:
            group = dataclasses.replace(spec, part="").group
            key = f"{what}/{group}"
        if key not in self.preset.vanishing:
            return 0.0
        return self.limit.x(self.preset.vanishing[key])

    def _rate(self, spec: ParamSpec, limit: Limit) -> float:
        """Return the exponent of the learning rate of multiplier * stored parameter."""
        row = self.preset.row(spec)
        return limit.x(row.multiplier) + limit.x(row.lr(limit.family))

    def _movement(self, spec: ParamSpec) -> float | None:
        """Return the exponent by which the steps of one parameter alone move the stream.

        The result is relative to the stream. For a readout it is the movement of the output. It is
        0 in a good table, and `None` if it is unknown.
        """
        limit = self.limit.of(spec.part)
        name = limit.names.get(spec.role)
        if spec.role is Role.READOUT:
            return limit.acts("readout")
        if name is not None and spec.in_block:
            attention = limit.parts["attention logits"].get(name, 0.0)
            # Logits must not explode, although softmax bounds what the stream sees of them.
            if attention > 0:
                return attention
            return limit.parts["stream"][name] - limit.stream
        change = self._rate(spec, limit)
        if limit.family == "sgd":
            gradient = self.gradient(spec, limit)
            if gradient is None:
                return None
            change += gradient
        if spec.role in EMBEDDINGS:
            return change - (limit.embedded if limit.layers else limit.stream)
        if spec.role in VECTORS:
            return _vector_movement(spec, change, limit)
        if limit.family == "muon":
            return None
        change += _product(spec.fan_in, limit)
        if spec.in_block:
            change += limit.branch + limit.layers
        return change


def _vector_movement(spec: ParamSpec, change: float, limit: Limit) -> float | None:
    """Return the exponent by which a change of a gain or bias moves the stream.

    A vector moves the stream as the product of its matrix does if it changes by as much.

    Args:
        change: Exponent of the change of its entries.
        limit: Limit of the part that the vector is in.

    Returns:
        The exponent relative to the stream. `None` for a change that goes through both matrices of
        an MLP that grows alone, because the bound by the product of their norms is never reached.
    """
    branches = limit.branch + limit.layers - limit.stream
    match spec.of or spec.role:
        case Role.QUERY | Role.KEY:
            # In q.k the bias of queries meets keys, and the bias of keys meets queries.
            factor = limit.k if spec.of is Role.QUERY else limit.q
            return _through_logits(limit.logits + limit.n + change + factor, limit)
        case Role.RELATIVE_BIAS:
            return _through_logits(change, limit)
        case Role.NORM_GAIN if spec.part == "cross":
            # Only queries read the norm before cross-attention.
            query = limit.carried("query", change)
            return _through_logits(limit.logits + limit.n + query + limit.k, limit)
        case Role.VALUE:
            return limit.carried("attention out", change) + branches
        case Role.MLP_IN:
            return limit.carried(limit.names[Role.MLP_OUT], change) + branches
        case Role.EXPERT_IN:
            return limit.carried(limit.names[Role.EXPERT_OUT], change) + branches
        case Role.READOUT:
            return change
        case Role.HIDDEN if not spec.in_block:
            return change
        case role if role in EMBEDDINGS:
            return change - limit.stream
        case Role.ATTENTION_OUT | Role.MLP_OUT | Role.EXPERT_OUT | Role.HIDDEN:
            return change + branches
    if not spec.in_block:
        return limit.carried("readout", change)
    for reader in limit.specs.values():
        if reader.role in (Role.MLP_IN, Role.EXPERT_IN):
            hidden = _product(reader.fan_out, limit)
            if hidden != limit.growth.get("embed", 0.0):
                return None
    return limit.carried("MLP out", limit.carried("MLP in", change)) + branches


def _through_logits(change: float, limit: Limit) -> float:
    """Return the exponent by which a change of attention logits moves the stream.

    The result is relative to the stream. A `change` above 0 is returned unchanged, because logits
    must not explode.
    """
    if change > 0:
        return change
    branches = limit.branch + limit.layers - limit.stream
    return change + limit.random("attention out", limit.v) + branches


def _bounded(spec: ParamSpec) -> bool:
    """Return whether a parameter is a matrix of a dense block.

    The initial size and the steps of such a matrix stay bounded if one axis grows alone. Those of
    experts do not: their rules have m/D, which grows without bound.
    """
    return spec.in_block and spec.role in _BOUNDED_ROLES


def _product(axes: Iterable[str], limit: Limit) -> float:
    """Return the exponent of a product of axes: the sum of the powers with which they grow."""
    return sum(limit.growth.get(axis, 0.0) for axis in axes)
