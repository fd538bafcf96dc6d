"""Judgement of every row of a preset's table in one limit, whoever wrote the table.

A preset's table has one row per kind of parameter (`Rule`): a power law for each of initial std,
learning rate and eps. `limits` computes what a table leads to, but it takes the table as given.
Here each row is held against conditions that do not depend on the table:

| column    | condition                                                                           |
|-----------|-------------------------------------------------------------------------------------|
| init_std  | Activations neither grow nor vanish at initialization.                              |
| lr        | The steps of this parameter alone move the residual stream by as much at every size.|
|           | The steps of a readout move the output by as much.                                  |
| eps       | Adam's eps follows the gradient.                                                    |

`Preset.vanishing` lists what the paper behind a preset lets vanish on purpose. The conditions are
derived here, after those of Tensor Programs V and of 2405.15712. `mupax check` reports the
troubles.
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
"""Judged part of a row: initial size (multiplier * std), step (multiplier, lr) or Adam's eps."""

ALONE = ("embed", "memory", "mlp", "heads", "kv_heads", "head_dim")
"""Axes of width, which health checks also grow one at a time.

A rule whose fan-in names the wrong axis shows only if one of these axes grows alone.
"""

_TOLERANCE = 0.01
"""Exponents up to this size count as 0."""

_BOUNDED_ROLES = frozenset(spec.role for spec in SPECS.values())

Gradient = Callable[[ParamSpec, Limit], float | None]
"""Function from a parameter and a limit to the exponent of the parameter's gradient.

The gradient is that of the stored parameter, before its multiplier. The exponent is the power of
the growing size. `None` means that it is unknown.
"""


@dataclasses.dataclass(frozen=True)
class Trouble:
    """Fault in one column (`Column`) of one row of a preset's table.

    Attributes:
        word: Kind of the fault: "explodes", "vanishes", "frozen", "lazy", "eps dominates" (over the
            gradient) or "eps fades" (next to the gradient).
        exponent: Power of the growing size with which the judged quantity goes. It should be 0.
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
    """Judge of a preset's table in one limit: of initial size, steps and eps of each parameter.

    A limit lets some sizes of the model, such as the widths, go to infinity as powers of one size
    t. A quantity with the growth exponent x goes as t^x.

    Attributes:
        preset: Preset whose table is judged, in any form.
        limit: Limit in which the preset is judged, made from the same preset.
        gradient: Function that returns the exponent of a parameter's gradient in any limit of this
            preset.
    """

    preset: Preset
    limit: Limit
    gradient: Gradient

    def troubles(self, specs: Iterable[ParamSpec]) -> dict[tuple[str, Column], Trouble]:
        """Return the faults by (`ParamSpec.group`, column). Columns that are right have no entry.

        Args:
            specs: Declarations of the model's parameters. Of several in one group the last one is
                judged, and the fault counts for the group.
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

        The output W x of the initial weight W must neither grow nor vanish in the limit. For a
        readout, a router or an expert, exponents from -1/2 to 0 are right. For a matrix of a dense
        block (`_bounded`), the output must also not grow if a single axis of `ALONE` grows.
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
        """Return the growth exponent of W x at initialization, for a parameter W.

        Entries of x are of order one and independent of W. For a gain this is the exponent of its
        own entries.
        """
        row = self.preset.row(spec)
        return limit.x(row.multiplier * row.init_std) + _product(spec.fan_in, limit) / 2

    def _judge_lr(self, spec: ParamSpec, move: float | None, lazy: bool) -> Trouble | None:
        """Return the fault in a parameter's steps, or `None`.

        In the limit, steps of this parameter must not move the residual stream more and more
        ("explodes"). They must not move it less and less ("lazy" or "frozen"), unless the paper
        behind the preset accepts this (`_conceded`). Steps of a dense block's matrix must also not
        grow if a single axis of `ALONE` grows.

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
        """Return the growth exponent of dW x, for one step dW of W and an x that made the step.

        Entries of x are of order one.

        Args:
            limit: Limit in which one axis grows alone. The result is 0, which is no fault, for axes
                along which steps grow even under right rules.
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

        The ratio of a gradient to Adam's eps goes as a power of the growing size. The exponent must
        be 0 (a constant ratio), or lie between 0 and the exponent that the paper behind the preset
        accepts. If `Preset.uneven` is set, a dense block's matrix must also have the exponent 0 if
        a single axis of `ALONE` grows. There is no fault if the optimizer has no eps or the
        gradient is unknown.
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
        """Return the growth exponent of the ratio of a parameter's gradient to Adam's eps.

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
        """Limit for each axis of `ALONE` in which only this axis grows, by axis."""
        family = self.limit.family
        tied = self.limit.tied
        return {axis: Limit(self.preset, family, {axis: 1.0}, tied=tied) for axis in ALONE}

    def _conceded(self, what: str, spec: ParamSpec | None = None) -> float:
        """Return the exponent with which a quantity may vanish, as the preset's paper accepts it.

        `Preset.vanishing` has these quantities. The result is 0 for a quantity that must not
        vanish.

        Args:
            what: Kind of the quantity, the first part of a key of `Preset.vanishing`: "features",
                "movement" or "eps".
            spec: Declaration of the parameter, for "movement" and "eps". The same law holds in all
                parts of an encoder-decoder.
        """
        key = what
        if spec is not None:
            group = dataclasses.replace(spec, part="").group
            key = f"{what}/{group}"
        if key not in self.preset.vanishing:
            return 0.0
        return self.limit.x(self.preset.vanishing[key])

    def _rate(self, spec: ParamSpec, limit: Limit) -> float:
        """Return the growth exponent of the learning rate of an effective weight, multiplier * w.

        A step of multiplier * w is multiplier * lr times the optimizer's direction for w.
        """
        row = self.preset.row(spec)
        return limit.x(row.multiplier) + limit.x(row.lr(limit.family))

    def _movement(self, spec: ParamSpec) -> float | None:
        """Return the growth exponent of the stream's change by steps of one parameter alone.

        The change of the residual stream is relative to its size. For a readout it is the change of
        the output. The exponent is 0 if the learning rate scales as it should. `None` means that it
        is unknown.
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
    """Return the exponent by which a change of a gain or bias moves the residual stream.

    A gain or bias (a "vector") moves the stream like the output of its matrix, if both change by as
    much.

    Args:
        change: Exponent of the change of its entries.
        limit: Limit of the part of the model that the vector is in.

    Returns:
        The exponent, relative to the stream. `None` for the norm of a block whose MLP's hidden size
        does not grow as the width does. The product of the norms of the MLP's two matrices then
        bounds the change but is never reached.
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
    """Return the exponent by which a change of attention logits moves the residual stream.

    The result is relative to the stream. A `change` above 0 is returned unchanged, because logits
    must not explode.

    Args:
        change: Exponent of the change of the logits.
    """
    if change > 0:
        return change
    branches = limit.branch + limit.layers - limit.stream
    return change + limit.random("attention out", limit.v) + branches


def _bounded(spec: ParamSpec) -> bool:
    """Return whether a parameter is a matrix in an attention or a dense MLP branch.

    Under right rules the initial size and the steps of such a matrix do not grow if one axis grows
    alone, so `Health` also checks them axis by axis. Matrices of experts fail this check: their
    rules contain the ratio of expert size to width, which grows without bound.
    """
    return spec.in_block and spec.role in _BOUNDED_ROLES


def _product(axes: Iterable[str], limit: Limit) -> float:
    """Return the growth exponent of a product of axes: the sum of the powers with which they grow.

    Args:
        axes: Names of the axes, such as a parameter's fan-in.
    """
    return sum(limit.growth.get(axis, 0.0) for axis in axes)
