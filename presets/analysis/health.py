"""Whether a table is any good: what every row of it does to a model as sizes grow, against what training needs, whoever wrote it.

`limits` says what a table leads to, and a program that follows a wrong table agrees with it. Here each row is held against what
does not depend on the table: activations neither grow nor fade at initialization, the steps of every parameter alone move the
stream (the readout's the output) by as much at every size, and Adam's eps follows its gradient. What a source lets vanish on
purpose is in `Preset.vanishing`. Derived here, after the conditions of Tensor Programs V and of 2405.15712.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Literal

from mupax.presets.analysis.limits import Limit
from mupax.presets.analysis.model import SPECS
from mupax.presets.preset import Preset
from mupax.presets.roles import BIASES, EMBEDDINGS, ROUTED, VECTORS, ParamSpec, Role

Column = Literal["init_std", "lr", "eps"]
"""Of a row: initial size (multiplier and std), steps (multiplier and rate), Adam's eps."""

ALONE = ("embed", "memory", "mlp", "heads", "kv_heads", "head_dim")
"""Axes that a limit grows together: a fan-in of the wrong one shows where one grows alone."""

_TOLERANCE = 0.01
"""An exponent beyond this is not zero."""

Gradient = Callable[[ParamSpec, Limit], float | None]
"""Exponent of a parameter's gradient as stored; None where theory has no word for it."""


@dataclasses.dataclass(frozen=True)
class Trouble:
    """What is wrong with a column of a row.

    Attributes:
        word: explodes, vanishes, frozen, lazy, "eps dominates" or "eps fades".
        exponent: of what should not depend on the size.
        axis: that has to grow alone for it to show; None where it shows in the limit asked about.
    """

    word: str
    exponent: float
    axis: str | None = None

    def __str__(self) -> str:
        return self.word if self.axis is None else f"{self.word} where {self.axis} grows alone"


@dataclasses.dataclass(frozen=True)
class Health:
    """Judges a table's rows in one limit.

    Attributes:
        preset: the table, in any form.
        limit: of this preset.
        gradient: of a parameter, in any limit of this preset.
    """

    preset: Preset
    limit: Limit
    gradient: Gradient

    def troubles(self, specs: Iterable[ParamSpec]) -> dict[tuple[str, Column], Trouble]:
        """(`ParamSpec.group`, column) to what is wrong with it."""
        specs = list({spec.group: spec for spec in specs}.values())
        moves = {spec.group: self._moves(spec) for spec in specs}
        weights = [moves[spec.group] for spec in specs if spec.role not in VECTORS | {Role.READOUT}]
        lazy = max((move for move in weights if move is not None), default=0.0) < -_TOLERANCE
        verdicts: dict[tuple[str, Column], Trouble | None] = {}
        for spec in specs:
            verdicts[spec.group, "init_std"] = self._initial(spec)
            verdicts[spec.group, "lr"] = self._movement(spec, moves[spec.group], lazy)
            verdicts[spec.group, "eps"] = self._eps(spec)
        return {key: trouble for key, trouble in verdicts.items() if trouble is not None}

    def _initial(self, spec: ParamSpec) -> Trouble | None:
        limit, start = self.limit, self._effective(spec, self.limit)
        if spec.role in EMBEDDINGS:
            start -= 0.0 if limit.layers else limit.stream
        elif spec.role in (
            Role.READOUT,
            *ROUTED,
        ):  # vanishing as D^-1/2 it starts at zero, as anything between may
            start = max(start, 0.0) + min(start + 0.5, 0.0)
        if spec.role in BIASES or abs(start) > _TOLERANCE:
            return (
                None
                if spec.role in BIASES
                else Trouble("explodes" if start > 0 else "vanishes", start)
            )
        if _bounded(spec):
            return self._alone(lambda alone: max(0.0, self._effective(spec, alone)), "explodes")
        return None

    def _effective(self, spec: ParamSpec, limit: Limit) -> float:
        """W x at initialization for an x of entries Theta(1); a vector's own entries."""
        row = self.preset.row(spec)
        return limit.x(row.multiplier * row.init_std) + _axes(spec.fan_in, limit) / 2

    def _movement(self, spec: ParamSpec, move: float | None, lazy: bool) -> Trouble | None:
        if move is None:
            return None
        if move > _TOLERANCE:
            return Trouble("explodes", move)
        if move < min(-_TOLERANCE, self._lets("movement", spec) - _TOLERANCE):
            source = self._lets("features")
            slower = source < 0 and move < source - _TOLERANCE
            return Trouble("lazy" if (lazy or source < 0) and not slower else "frozen", move)
        if _bounded(spec):
            return self._alone(lambda alone: max(0.0, self._acts(spec, alone)), "explodes")
        return None

    def _acts(self, spec: ParamSpec, limit: Limit) -> float:
        """dW x for an x of entries Theta(1) that made the update; 0 where right tables grow too: embed or, of SGD, key heads alone."""
        if "embed" in limit.growth and not self.preset.uneven:
            return 0.0
        change = self._rate(spec, limit)
        if (
            self.limit.family == "muon" and self.preset.row(spec).muon is not None
        ):  # orthogonal: a spectral norm of 1
            return change + (_axes(spec.fan_in, limit) - _axes(spec.fan_out, limit)) / 2
        if self.limit.family == "sgd":
            gradient = self.gradient(spec, limit)
            if gradient is None or {"embed", "kv_heads"} & limit.growth.keys():
                return 0.0  # there the steps of right tables grow too, as D^1/2 and G^1/2, but nowhere else
            change += gradient
        return change + _axes(spec.fan_in, limit)

    def _eps(self, spec: ParamSpec) -> Trouble | None:
        over = self._over_eps(spec, self.limit)
        if over is None:
            return None
        lets = self._lets("eps", spec)
        if over < min(lets, 0.0) - _TOLERANCE or over > max(lets, 0.0) + _TOLERANCE:
            return Trouble("eps dominates" if over < 0 else "eps fades", over)
        if self.preset.uneven and _bounded(spec):
            return self._alone(
                lambda alone: self._over_eps(spec, alone) or 0.0, "eps dominates", "eps fades"
            )
        return None

    def _over_eps(self, spec: ParamSpec, limit: Limit) -> float | None:
        """Exponent of gradient / eps; None where the optimizer has none, or theory no gradient."""
        on_adam = limit.family == "adam" or (
            limit.family == "muon" and self.preset.row(spec).muon is None
        )
        gradient = self.gradient(spec, limit) if on_adam else None
        return None if gradient is None else gradient - limit.x(self.preset.row(spec).eps)

    def _alone(self, exponent: Callable[[Limit], float], *words: str) -> Trouble | None:
        """The trouble of one axis growing alone; of two words the first is for what falls."""
        for axis, alone in self._limits.items():
            x = exponent(alone)
            if abs(x) > _TOLERANCE:
                return Trouble(words[0] if x < 0 else words[-1], x, axis)
        return None

    @functools.cached_property
    def _limits(self) -> dict[str, Limit]:
        """Every axis of `ALONE` growing alone."""
        family, tied = self.limit.family, self.limit.tied
        return {axis: Limit(self.preset, family, {axis: 1.0}, tied=tied) for axis in ALONE}

    def _lets(self, what: str, spec: ParamSpec | None = None) -> float:
        """Exponent of what the preset's source lets vanish: of a parameter, the same in all parts of an encoder-decoder."""
        key = what if spec is None else f"{what}/{dataclasses.replace(spec, part='').group}"
        return self.limit.x(self.preset.vanishing[key]) if key in self.preset.vanishing else 0.0

    def _rate(self, spec: ParamSpec, limit: Limit) -> float:
        row = self.preset.row(spec)
        return limit.x(row.multiplier) + limit.x(row.lr(limit.family))

    def _moves(self, spec: ParamSpec) -> float | None:
        """What the steps of this parameter alone do to the stream, or the readout's to the output: 0 in a good table."""
        limit = self.limit.of(spec.part)
        name = limit.names.get(spec.role)
        if spec.role is Role.READOUT:
            return limit.acts("readout")
        if name is not None and spec.in_block:
            attention = limit.parts["attention logits"].get(name, -math.inf)
            return max(attention, 0.0) or limit.parts["stream"][name] - limit.stream
        change = self._rate(spec, limit)
        if limit.family == "sgd":
            gradient = self.gradient(spec, limit)
            if gradient is None:
                return None
            change += gradient
        if spec.role in EMBEDDINGS:
            return change - (limit.embedded if limit.layers else limit.stream)
        if spec.role not in VECTORS:
            change += _axes(spec.fan_in, limit)
            return (
                None
                if limit.family == "muon"
                else change + (limit.branch + limit.layers) * spec.in_block
            )
        return self._vector(spec, change, limit)

    def _vector(self, spec: ParamSpec, change: float, limit: Limit) -> float | None:
        """The same of a gain or bias whose entries move by this: as the product of its matrix would by a change so large.

        None of what goes through both matrices of an MLP that grows alone: their norms are no bound that is ever reached.
        """
        branches = limit.branch + limit.layers - limit.stream

        def through_logits(change: float) -> float:
            return (
                max(change, 0.0)
                or min(change, 0.0) + limit.random("attention out", limit.v) + branches
            )

        match spec.of or spec.role:
            case Role.QUERY | Role.KEY:
                other = limit.k if spec.of is Role.QUERY else limit.q
                return through_logits(limit.logits + limit.n + change + other)
            case Role.RELATIVE_BIAS:
                return through_logits(change)
            case Role.NORM_GAIN if spec.part == "cross":  # queries alone read it
                return through_logits(
                    limit.logits + limit.n + limit.carried("query", change) + limit.k
                )
            case Role.VALUE:
                return limit.carried("attention out", change) + branches
            case Role.MLP_IN | Role.EXPERT_IN as role:
                after = limit.names[Role.MLP_OUT if role is Role.MLP_IN else Role.EXPERT_OUT]
                return limit.carried(after, change) + branches
            case Role.READOUT:
                return change
            case Role.HIDDEN if not spec.in_block:
                return change
            case role if role in EMBEDDINGS:
                return change - limit.stream
            case Role.ATTENTION_OUT | Role.MLP_OUT | Role.EXPERT_OUT | Role.HIDDEN:
                return change + branches
        if spec.in_block:
            readers = [
                spec for spec in limit.specs.values() if spec.role in (Role.MLP_IN, Role.EXPERT_IN)
            ]
            if any(
                _axes(spec.fan_out, limit) != limit.growth.get("embed", 0.0) for spec in readers
            ):
                return None
            return limit.carried("MLP out", limit.carried("MLP in", change)) + branches
        return limit.carried("readout", change)


def _bounded(spec: ParamSpec) -> bool:
    """Whether its steps and start are bounded where one axis grows alone: matrices of a block, but experts, whose m/D is in them."""
    return spec.in_block and any(spec.role is one.role for one in SPECS.values())


def _axes(names: Iterable[str], limit: Limit) -> float:
    return sum(limit.growth.get(name, 0.0) for name in names)
