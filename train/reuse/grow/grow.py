"""Grow a network and keep its function: more and wider heads, a wider MLP, a wider stream, more layers.

New units start at the preset's initialization and write nothing yet: what would carry their output into the stream is zero.
So gradients reach what is zero at once, and the units themselves a step later; no two are alike (Chen et al. 2016, Net2Net,
split units instead, whose copies Adam keeps equal). In the plain network of `train/reuse/plain.py`, where a preset has no
multipliers, with D width and N head dimension before, D' and N' after:

| grown     | zero, where new                          | so that the function stays                                      |
|-----------|------------------------------------------|-----------------------------------------------------------------|
| layers    | their attention out and MLP out          | a new layer, on top, adds nothing                               |
| MLP       | rows of MLP out                          |                                                                 |
| heads     | rows of attention out                    | a key head that serves fewer query heads is copied              |
| head_dim  | columns of key, rows of attention out    | queries x (N'/N)^1/2; rotary pairs keep their frequencies       |
| experts   |                                          | each is the MLP, and a token's weights add up to 1; or copies   |
|           |                                          | of an expert, which a token goes to together                    |
| embed     | columns of all that writes the stream    | norm gains (else what reads the norm) x (D/D')^1/2; a LayerNorm |
|           |                                          | needs a stream of mean 0: what writes it is centred             |

Copies of an expert see the same tokens with the same weights, and would stay equal for ever: to their last matrices fresh numbers are
added that sum to zero over the copies (antisymmetric for two), so that their sum stays and all else in them gets its own gradient.

What is left is the norms' eps under a wider stream, which counts D'/D times (model.norm_eps x D/D' is exact). Then the
preset of the new size takes out its own multipliers. Gradients of old entries are as before, and moments move with them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from mupax.presets import VECTORS, ParamSpec, Role
from mupax.train.reuse import transplant
from mupax.train.reuse.grow import axes as grow_axes
from mupax.train.reuse.transplant import (
    ParamTransfer,
    Plan,
    Row,
    ScaledModel,
    Shape,
    check_unmovable,
    role_of,
)
from mupax.zoo.huggingface.weights import Params
from mupax.zoo.transformer import TransformerConfig, transformer

_MLP, _EXPERTS = "block.mlp.", "block.experts."
EMBEDS = (Role.TOKEN_EMBEDDING, Role.PATCH_EMBEDDING, Role.POSITION)
OUTS = (Role.ATTENTION_OUT, Role.MLP_OUT, Role.EXPERT_OUT)
READS = (Role.QUERY, Role.KEY, Role.VALUE, Role.MLP_IN, Role.ROUTER, Role.EXPERT_IN, Role.READOUT)


@dataclasses.dataclass(frozen=True)
class Growth(Plan):
    """How every parameter of the larger model comes from the smaller one's."""

    notes: list[str]
    """Why the function is not exactly the one before; empty where it is, but for rounding."""
    silent: dict[str, np.ndarray]
    """Where a new entry is zero, by name; it broadcasts against the parameter."""

    def silenced(self, fresh: Params) -> Params:
        """Initial parameters with what writes for new units at zero, and what tells copies apart adding up to zero."""
        return {
            name: self._silenced(name, w) if name in self.silent else w for name, w in fresh.items()
        }

    def _silenced(self, name: str, w: np.ndarray) -> np.ndarray:
        silent = np.where(self.silent[name], 0, w)
        if (move := self.moves.get(name)) is None or move.apart is None:
            return silent
        split = (*w.shape[: move.apart], -1, move.copies, *w.shape[move.apart + 1 :])
        each = w.reshape(split)
        return np.where(
            move.transplanted(),
            (each - each.mean(move.apart + 1, keepdims=True)).reshape(w.shape),
            silent,
        )


def plan(there: ScaledModel, here: ScaledModel) -> Growth:
    """How one model grows into another, and what that does to its function.

    Args:
        there: the smaller model, under its preset.
        here: the larger one, under its own.

    Raises:
        GrowError: the other is no larger form of it, or the function could not be kept and need not be lost; the text says
            which field, and what to write.
    """
    before, after = (transformer(side.model, "growth") for side in (there, here))
    if before.lora.rank is not None:
        raise grow_axes.GrowError(
            "it holds adapters beside its matrices; start a run from it (--init-from merges them), and grow that"
        )
    axes = grow_axes.axes(before, after)
    check_unmovable(there, here)
    exact, notes = _notes(before, after, axes)
    moves: dict[str, ParamTransfer] = {}
    rows: list[Row] = []
    silent: dict[str, np.ndarray] = {}
    for name, spec in here.definition.specs.items():
        new = here.definition.abstract[name].shape
        source, inserted = name, None
        if grow_axes.upcycled(before, after) and name.startswith(_EXPERTS):
            source = name.replace(_EXPERTS, _MLP)
            if source not in there.definition.specs:  # the router, and the bias of its choice
                rows.append(Row(name, role_of(spec), None, new, "grown", "new: initialized"))
                continue
            inserted = spec.axes.index("experts")
        old = there.definition.abstract[source].shape
        old = old if inserted is None else (*old[:inserted], 1, *old[inserted:])
        along = tuple(axes.of(spec, axis, size) for axis, size in zip(spec.axes, new, strict=True))
        if inserted is not None:
            along = (*along[:inserted], np.zeros(new[inserted], int), *along[inserted + 1 :])
        layers = along[0] if spec.stacked else None
        scale = _scale(spec, before, after) * transplant.ratio(
            there.scales[source], here.scales[name], layers
        )
        prepared = _centred(spec, before, after) if exact else np.asarray
        copies = (
            axes.copies if "kv_heads" in spec.axes else 1 if inserted is None else new[inserted]
        )
        if (
            "experts" in spec.axes and axes.expert_copies > 1 and not spec.moved_by_loads
        ):  # of which each copy has the whole
            copies = axes.expert_copies
        apart = (
            spec.axes.index("experts")
            if spec.role is Role.EXPERT_OUT and axes.expert_copies > 1
            else None
        )
        moves[name] = ParamTransfer(
            source=source,
            along=along,
            scale=scale,
            prepared=prepared,
            copies=copies,
            inserted=inserted,
            apart=apart,
        )
        if (zero := _silent(spec, along)) is not None:
            silent[name] = zero
        rows.append(
            Row(
                name,
                role_of(spec),
                there.definition.abstract[source].shape,
                new,
                *_action(spec, moves[name], old, new, zero),
            )
        )
    return Growth(moves, rows, notes, silent)


def _scale(spec: ParamSpec, before: TransformerConfig, after: TransformerConfig) -> float:
    """What an entry is taken times in the plain network."""
    wider, of_query = (before.width / after.width) ** 0.5, Role.QUERY in (spec.role, spec.of)
    scale = (
        (after.heads_dim / before.heads_dim) ** 0.5
        if of_query and spec.role is not Role.NORM_GAIN
        else 1.0
    )
    if before.norm_gain:
        return scale * wider if spec.role is Role.NORM_GAIN and spec.of is None else scale
    if spec.role in READS:
        return scale * wider
    return scale / wider if spec.role is Role.BIAS and spec.of is Role.NORM_GAIN else scale


def _centred(spec: ParamSpec, before: TransformerConfig, after: TransformerConfig):
    """Takes the mean over the stream out of what writes it, which no LayerNorm sees, nor any gradient."""
    role = spec.of or spec.role
    writes = role in (*EMBEDS, *OUTS) and spec.axes[-1] == "embed"
    if before.norm != "layernorm" or before.width == after.width or not writes:
        return np.asarray
    return lambda w: w - w.mean(-1, keepdims=True, dtype=np.float64).astype(np.float32)


def _silent(spec: ParamSpec, along: Sequence[np.ndarray]) -> np.ndarray | None:
    """Where new entries are zero; None where they start as the preset has it."""
    if spec.role in (*EMBEDS, *OUTS):
        return np.ones([1] * len(along), bool)
    if spec.role is not Role.KEY:
        return None
    # Only in heads and layers that are not new themselves: there the output is silent.
    sides = dict(zip(spec.axes, transplant.sides(along), strict=True))
    return sides[spec.blocks] & sides["kv_heads"] & ~sides["head_dim"]


def _notes(
    before: TransformerConfig, after: TransformerConfig, axes: grow_axes.Axes
) -> tuple[bool, list[str]]:
    """Return whether a wider stream keeps the function exactly, and notes on what does not."""
    notes, ratio = list(axes.notes), after.width / before.width
    if grow_axes.upcycled(before, after) and after.routing.capacity_factor is not None:
        notes.append(
            f"tokens beyond an expert's capacity (routing.capacity_factor {after.routing.capacity_factor:g}) lose what the MLP "
            "added: the function changes where there are any (routing.capacity_factor=null drops none)"
        )
    if ratio > 1 and before.tied_readout and before.norm == "layernorm":
        notes.append(
            "a wider stream under LayerNorm needs token embeddings of mean 0, and as a tied readout these need their mean: "
            "the function changes (an untied model, or one with rmsnorm, keeps it)"
        )
        return False, notes
    if ratio > 1 and not np.isclose(after.norm_eps, before.norm_eps / ratio, rtol=1e-3):
        notes.append(
            f"the norms' eps counts {ratio:g} times: of a norm's output about {after.norm_eps * (ratio - 1) / 2:.1g} where the "
            f"stream's variance is 1 (--set norm_eps={before.norm_eps / ratio:g} is exact)"
        )
    return True, notes


def _action(
    spec: ParamSpec, move: ParamTransfer, old: Shape, new: Shape, zero: np.ndarray | None
) -> tuple[str, str]:
    """Action and reason."""
    unit = (
        "MLP" if move.inserted is not None else "expert" if "experts" in spec.axes else "key head"
    )
    words = [f"every {unit} {move.copies} times"] if move.copies > 1 else []
    words += [move.times] if move.times else []
    grown = [f"{axis} {a} to {b}" for axis, a, b in zip(spec.axes, old, new, strict=True) if a != b]
    if not grown:
        return ("converted", ", ".join(words)) if words else ("kept", "")
    if (
        not np.all(move.transplanted()) and spec.role not in VECTORS
    ):  # gains start at 1 and biases at 0
        start = (
            "initialized" if zero is None else "0" if zero.all() else "initialized, 0 in old heads"
        )
        words.append(f"new: {start}")
    return "grown", ", ".join([*grown, *words])
