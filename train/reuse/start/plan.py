"""What becomes of every parameter of a checkpoint in a run that starts from it: kept, converted, resized, new or dropped.

The function of the source is kept wherever the two models have the same parameters, whatever their presets: both are the
plain network of `train/reuse/plain.py`, and a parameter moves by the ratio of what the two presets take it times. Everything else
is refused unless the command line names it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mupax.errors import MupaxError
from mupax.presets import ParamSpec
from mupax.train.checkpoints.folder import first_of
from mupax.train.config.checks import chosen
from mupax.train.config.run import InitConfig
from mupax.train.core.program import Program
from mupax.train.reuse import plain, transplant
from mupax.train.reuse.transplant import ParamTransfer
from mupax.zoo.definition import Definition
from mupax.zoo.families import ModelConfig

RESIZABLE = ("position", "source", "vocab", "classes")
"""Axes whose first entries can be kept (of images' positions: the grid interpolated)."""

UNSEEN = (
    "activation", "branch_activation", "norm", "norm_eps", "positions", "rope_theta", "rope_scaling", "rope_factor",
    "rope_low_freq_factor", "rope_high_freq_factor", "rope_original_len", "window", "full_every", "window_theta",
    "post_norm", "attention_softcap",
    "logit_softcap", "parallel", "rotary_fraction", "embedding_norm", "shared",
    "longest_distance", "qk_norm", "qk_norm_kind", "pool", "registers", "active_experts", "routing",
    "patch_size", "channels",
)  # fmt: skip
"""Fields of a model that change its function and that the shapes of parameters need not show."""

GROWING = ("embed", "heads", "kv_heads", "head_dim", "mlp", "layers", "memory", "encoder_layers")


Shape = tuple[int, ...]


class InitError(MupaxError):
    """A checkpoint that a run cannot start from, as asked. The text says what differs and what to write."""


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
        return cls(program.config.model, model, plain.scales(model, factors), plain.logits_of(model, factors))


@dataclasses.dataclass(frozen=True)
class Plan:
    """Moves by name, and the table. A parameter without a move is new."""

    moves: dict[str, ParamTransfer]
    rows: list[Row]

    def fresh(self) -> set[str]:
        """Parameters with entries that do not come from the source alone."""
        moved = {name for name, move in self.moves.items() if np.all(move.transplanted()) and move.apart is None}
        return {row.name for row in self.rows if row.here is not None} - moved


def plan(there: ScaledModel, here: ScaledModel, init: InitConfig) -> Plan:
    """How a run starts from a source.

    Args:
        there: the source.
        here: the run.
        init: what may be new, resized, dropped, or differ.

    Raises:
        InitError: the two differ in something that was not named; the text has the flags that name it.
        ConfigError: a pattern that means no parameter.
    """
    _check_models(there.model, here.model, init.init_change)
    check_unmovable(there, here)
    specs, before = here.definition.specs, there.definition
    new = chosen(init.init_new, specs, "--init-new")
    resize = chosen(init.init_resize, specs, "--init-resize")
    drop = chosen(init.init_drop, before.specs, "--init-drop")
    moves: dict[str, ParamTransfer] = {}
    rows: list[Row] = []
    refused: list[tuple[str, str, str]] = []
    for name, spec in specs.items():
        role, shape = role_of(spec), here.definition.abstract[name].shape
        source = "token" if name == "readout" and there.model.tied_readout else name
        old = before.abstract[source].shape if source in before.specs else None
        old = old[::-1] if old is not None and source != name else old
        if name in new:
            rows.append(Row(name, role, old, shape, "new", "asked for"))
        elif old is None:
            refused.append((f"{name} {shape} is not there", "--init-new", name))
        elif old == shape or (name in resize and _differing(spec, old, shape) <= set(RESIZABLE)):
            moves[name] = _move(name, source, old, shape, there, here)
            rows.append(Row(name, role, old, shape, *_action(moves[name], old, shape, there, here)))
        else:
            flag = "--init-resize" if _differing(spec, old, shape) <= {"position", "vocab"} else "--init-new"
            refused.append((f"{name} is {old} there and {shape} here", flag, name))
    for name, spec in before.specs.items():
        if name not in specs and name in drop:
            rows.append(Row(name, role_of(spec), before.abstract[name].shape, None, "dropped", "asked for"))
        elif name not in specs:
            refused.append((f"{name} {before.abstract[name].shape} is not here", "--init-drop", name))
    if refused:
        raise InitError(_refusal(refused, there.model, here.model))
    return Plan(moves, rows)


def _check_models(there: ModelConfig, here: ModelConfig, allowed: Sequence[str]) -> None:
    if there.family != here.family:
        raise InitError(f"it is a {there.family}, and this run trains a {here.family}; give --model one of its family")
    if there.centered or here.centered:
        raise InitError(
            "a centred model is its network minus that of its first step, which no checkpoint holds; "
            "write --model.no-centered, and give a source that is not centred"
        )
    if unknown := [field for field in allowed if field not in UNSEEN]:
        raise InitError(f"--init-change {unknown[0]}: write one of {', '.join(UNSEEN)}")
    learned = getattr(here, "positions", None) == "learned" == getattr(there, "positions", None)
    free = {*allowed, "rope_theta"} if here.sizes().get("position") and learned else allowed
    if wrong := [f for f in UNSEEN if f not in free and getattr(there, f, None) != getattr(here, f, None)]:
        fields = [f"model.{f} is {getattr(there, f)} there and {getattr(here, f)} here" for f in wrong]
        flags = " ".join(f"--model.{f.replace('_', '-')} {getattr(there, f)}" for f in wrong)
        raise InitError(
            f"{'; '.join(fields)}\nthe same weights are another function then; write {flags}, or to start from them all the "
            f"same --init-change {' '.join(wrong)}"
        )


def check_unmovable(there: ScaledModel, here: ScaledModel) -> None:
    """Raises InitError for what no parameter can make up for: other scales of logits or readout.

    Args:
        there: the source.
        here: the run.
    """
    if not here.model.absorbs_logit_scale and there.logits != here.logits:
        raise InitError(
            f"attention logits are taken times {there.logits!r:.60} there and {here.logits!r:.60} here, and where queries are "
            "normalized without gains (model.qk_norm) no parameter can carry the difference; take the source's preset and base"
        )
    gains = any(plain.GAIN in side.definition.specs for side in (there, here))
    before, after = (side.scales.get(plain.GAIN, np.ones(())) for side in (there, here))
    if not gains and before != after:
        raise InitError(
            f"the tied readout is taken times {before:g} there and {after:g} here, and without norm gains no parameter can "
            "carry the difference; take the source's preset and base"
        )


def _move(name: str, source: str, old: Shape, shape: Shape, there: ScaledModel, here: ScaledModel) -> ParamTransfer:
    """A parameter that comes from the source's, resized where the shapes differ."""
    along = tuple(transplant.first(a, b) for a, b in zip(old, shape, strict=True))
    scale = transplant.ratio(there.scales[source], here.scales[name])
    move = ParamTransfer(source=source, along=along, scale=scale, transposed=source != name)
    before, after = there.model, here.model
    if old == shape or name != "position" or not (before.position_grid and after.position_grid):
        return move
    return dataclasses.replace(
        move,
        along=tuple(map(np.arange, shape)),
        prepared=lambda position: transplant.resized(position, before, after),
        moments_along=(np.full(shape[0], -1), np.arange(shape[1])),
    )


def _action(move: ParamTransfer, old: Shape, shape: Shape, there: ScaledModel, here: ScaledModel) -> tuple[str, str]:
    """Action and reason."""
    if move.moments_along is not None:
        sides = [f"{model.position_grid}^2" for model in (there.model, here.model)]
        action, reason = "resized", [f"bicubic, {' to '.join(sides)} patches"]
    elif old != shape:
        sizes = [(a, b) for a, b in zip(old, shape, strict=True) if a != b]
        reason = [f"first {min(a, b)} kept, {b - a} new" if b > a else f"first {b} of {a} kept" for a, b in sizes]
        action = "resized"
    elif move.transposed:
        action, reason = "converted", ["the embedding it was tied to"]
    else:
        return ("converted", f"{move.times}, the presets' multipliers") if move.times else ("kept", "")
    return action, ", ".join([*reason, move.times] if move.times else reason)


def role_of(spec: ParamSpec) -> str:
    """A role as the table says it: a bias with its matrix."""
    return f"{spec.of.value} {spec.role.value}" if spec.of else spec.role.value


def _differing(spec: ParamSpec, old: Shape, shape: Shape) -> set[str]:
    if len(old) != len(shape):
        return {"rank"}
    return {axis for axis, a, b in zip(spec.axes, old, shape, strict=True) if a != b}


def _refusal(refused: list[tuple[str, str, str]], there: ModelConfig, here: ModelConfig) -> str:
    text = first_of([differs for differs, _, _ in refused], "; ")
    growth = [here.sizes().get(axis, 0) - there.sizes().get(axis, 0) for axis in GROWING]
    if min(growth) >= 0 < max(growth):
        return f"{text}\nthis model is larger: `mupax grow` makes the checkpoint one of it, with the same function"
    flags = {flag: [n for _, f, n in refused if f == flag] for flag in ("--init-new", "--init-resize", "--init-drop")}
    words = " ".join(f"{flag} {' '.join(names)}" for flag, names in flags.items() if names)
    return f"{text}\nto start all the same, add {words}"
