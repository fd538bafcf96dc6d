"""Grow a network and keep its function: more and wider heads, wider MLP and stream, more layers.

New units start at the preset's initialization and write nothing yet: the weights that would carry
their output into the stream are zero. So gradients reach these zero weights at once, and the units
themselves a step later; no two units are alike (Chen et al. 2016, Net2Net, split units instead,
whose copies Adam keeps equal). In the plain network of `train/reuse/plain.py`, where a preset has
no multipliers, with D width and N head dimension before, D' and N' after:

| grown    | zero, where new                       | so that the function stays           |
|----------|---------------------------------------|--------------------------------------|
| layers   | their attention out and MLP out       | a new layer, on top, adds nothing    |
| MLP      | rows of MLP out                       |                                      |
| heads    | rows of attention out                 | a key head that serves fewer query   |
|          |                                       | heads is copied                      |
| head_dim | columns of key, rows of attention out | queries x (N'/N)^1/2; rotary pairs   |
|          |                                       | keep their frequencies               |
| experts  |                                       | each is the MLP, and a token's       |
|          |                                       | weights add up to 1; or copies of an |
|          |                                       | expert, which a token goes to        |
|          |                                       | together                             |
| embed    | columns of all that writes the stream | norm gains (else what reads the      |
|          |                                       | norm) x (D/D')^1/2; a LayerNorm      |
|          |                                       | needs a stream of mean 0: what       |
|          |                                       | writes it is centred                 |

Copies of an expert see the same tokens with the same weights, and would stay equal for ever. To
their last matrices initial values are added that sum to zero over the copies (antisymmetric for
two), so that the sum of the copies stays and all their other weights get gradients of their own.

One part is inexact: the norms' eps under a wider stream, which counts D'/D times (model.norm_eps x
D/D' is exact). Then the preset of the new size takes out its own multipliers. Gradients of old
entries are as before, and moments move with them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from mupax.presets import VECTORS, ParamSpec, Role
from mupax.train.reuse import transplant
from mupax.train.reuse.grow import axes as grow_axes
from mupax.train.reuse.transplant import (
    Index,
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

_MLP = "block.mlp."
_EXPERTS = "block.experts."
EMBEDS = (Role.TOKEN_EMBEDDING, Role.PATCH_EMBEDDING, Role.POSITION)
"""Roles of the embeddings, which start the stream."""
OUTS = (Role.ATTENTION_OUT, Role.MLP_OUT, Role.EXPERT_OUT)
"""Roles of the matrices that write a branch's output into the stream."""
READS = (
    Role.QUERY,
    Role.KEY,
    Role.VALUE,
    Role.MLP_IN,
    Role.ROUTER,
    Role.EXPERT_IN,
    Role.READOUT,
)
"""Roles of the matrices that read a norm of the stream."""


@dataclasses.dataclass(frozen=True)
class Growth(Plan):
    """Plan of how every parameter of the larger model is made from the smaller one's."""

    notes: list[str]
    """Reasons why the function changes. Empty if it stays, except for rounding."""
    silent: dict[str, np.ndarray]
    """Bool mask by parameter name of the new entries that are zero. It broadcasts."""

    def silenced(self, fresh: Params) -> Params:
        """Return initial parameters with zeros where new units would write into the stream.

        Initial values that tell copies of an expert apart are made to sum to zero over the copies.
        """
        params: Params = {}
        for name, weight in fresh.items():
            if name in self.silent:
                weight = self._silenced(name, weight)
            params[name] = weight
        return params

    def _silenced(self, name: str, weight: np.ndarray) -> np.ndarray:
        silent = np.where(self.silent[name], 0, weight)
        move = self.moves.get(name)
        if move is None or move.copies_axis is None:
            return silent
        # Split the axis of the experts into [old experts, copies], and subtract the copies' mean.
        axis = move.copies_axis
        split_shape = (*weight.shape[:axis], -1, move.copies, *weight.shape[axis + 1 :])
        experts = weight.reshape(split_shape)
        # Differences of sum zero leave the mean of the copies, and so the function, as it was.
        centred = experts - experts.mean(axis + 1, keepdims=True)
        return np.where(move.transplanted(), centred.reshape(weight.shape), silent)


def plan(source: ScaledModel, target: ScaledModel) -> Growth:
    """Return the plan by which one model grows into another, with notes on its function.

    Raises:
        GrowError: the target is no larger form of the source, or the function cannot be kept. The
            message says which field, and what to write.
        TransplantError: no parameter can absorb a scale of the preset.
        ConfigError: one of the models is no transformer of the zoo.
    """
    small = transformer(source.model, "growth")
    large = transformer(target.model, "growth")
    if small.lora.rank is not None:
        raise grow_axes.GrowError(
            "it holds adapters beside its matrices; start a run from it (--init-from merges them), "
            "and grow that"
        )
    axes = grow_axes.axes(small, large)
    check_unmovable(source, target)
    is_exact, notes = _notes(small, large, axes)

    moves: dict[str, ParamTransfer] = {}
    rows: list[Row] = []
    silent: dict[str, np.ndarray] = {}
    is_upcycled = grow_axes.upcycled(small, large)
    for name, spec in target.definition.specs.items():
        shape = target.definition.abstract[name].shape
        source_name = name
        inserted_axis = None
        if is_upcycled and name.startswith(_EXPERTS):
            source_name = name.replace(_EXPERTS, _MLP)
            if source_name not in source.definition.specs:
                # The router and the bias of its choice have no counterpart in an MLP.
                rows.append(Row(name, role_of(spec), None, shape, "grown", "new: initialized"))
                continue
            inserted_axis = spec.axes.index("experts")

        old_shape = source.definition.abstract[source_name].shape
        along = [axes.index(spec, axis, size) for axis, size in zip(spec.axes, shape, strict=True)]
        copies = axes.copies if "kv_heads" in spec.axes else 1
        aligned_shape = old_shape
        if inserted_axis is not None:
            aligned_shape = (*old_shape[:inserted_axis], 1, *old_shape[inserted_axis:])
            along[inserted_axis] = np.zeros(shape[inserted_axis], int)
            if "kv_heads" not in spec.axes:
                copies = shape[inserted_axis]
        copies_axis = None
        if axes.expert_copies > 1:
            # The router's selection bias is moved by expert loads. It has no gradient to share.
            if "experts" in spec.axes and not spec.moved_by_loads:
                copies = axes.expert_copies
            # Copies that differ in their last matrix get different gradients in all others, too.
            if spec.role is Role.EXPERT_OUT:
                copies_axis = spec.axes.index("experts")

        layers = along[0] if spec.stacked else None
        ratio = transplant.ratio(source.scales[source_name], target.scales[name], layers)
        centres = is_exact and _needs_centring(spec, small, large)
        move = ParamTransfer(
            source=source_name,
            along=tuple(along),
            scale=_scale(spec, small, large) * ratio,
            prepare=_centre if centres else np.asarray,
            copies=copies,
            inserted_axis=inserted_axis,
            copies_axis=copies_axis,
        )
        moves[name] = move
        zero = _silent(spec, move.along)
        if zero is not None:
            silent[name] = zero
        action, reason = _action(spec, move, aligned_shape, shape, zero)
        rows.append(Row(name, role_of(spec), old_shape, shape, action, reason))
    return Growth(moves, rows, notes, silent)


def _scale(spec: ParamSpec, small: TransformerConfig, large: TransformerConfig) -> float:
    """Return the factor of old entries in the plain network that keeps the function."""
    # New entries of the stream are 0, so the mean square over D' entries is D/D' times the old one,
    # and the output of a norm is (D'/D)^1/2 times as large.
    width_factor = (small.width / large.width) ** 0.5
    scale = 1.0
    is_query = Role.QUERY in (spec.role, spec.of)
    if is_query and spec.role is not Role.NORM_GAIN:
        # Logits are q.k over head_dim^1/2, so queries make up for the larger divisor.
        scale = (large.heads_dim / small.heads_dim) ** 0.5

    if small.norm_gain:
        if spec.role is Role.NORM_GAIN and spec.of is None:
            return scale * width_factor
        return scale
    if spec.role in READS:
        return scale * width_factor
    if spec.role is Role.BIAS and spec.of is Role.NORM_GAIN:
        # The matrix that reads the norm takes `width_factor`, which the norm's bias must cancel.
        return scale / width_factor
    return scale


def _needs_centring(spec: ParamSpec, small: TransformerConfig, large: TransformerConfig) -> bool:
    """Return whether a parameter writes a stream that must keep mean 0 while it gets wider."""
    role = spec.of or spec.role
    writes = role in (*EMBEDS, *OUTS) and spec.axes[-1] == "embed"
    return small.norm == "layernorm" and small.width != large.width and writes


def _centre(weight: np.ndarray) -> np.ndarray:
    """Return a weight minus its mean over the last axis, the width of the stream.

    No LayerNorm sees that mean, so it gets no gradient.
    """
    return weight - weight.mean(-1, keepdims=True, dtype=np.float64).astype(np.float32)


def _silent(spec: ParamSpec, along: Sequence[Index]) -> np.ndarray | None:
    """Return a mask of the initial values to set to zero, or `None` if the preset's values stay.

    Embeddings and output matrices have only zeros in new entries, keys only in new entries of old
    heads.
    """
    if spec.role in (*EMBEDS, *OUTS):
        # Zeros, so that new units do not change the stream. These weights still get gradients.
        return np.ones([1] * len(along), bool)
    if spec.role is not Role.KEY:
        return None
    # Keys need zeros only in heads and layers that are not new themselves. In new ones the output
    # matrix is zero.
    in_source = dict(zip(spec.axes, transplant.in_source(along), strict=True))
    return in_source[spec.blocks] & in_source["kv_heads"] & ~in_source["head_dim"]


def _notes(
    small: TransformerConfig, large: TransformerConfig, axes: grow_axes.Axes
) -> tuple[bool, list[str]]:
    """Return whether old weights may be centred to keep the function, and notes on its changes.

    The result is False for a wider stream under LayerNorm with a tied readout.
    """
    notes = list(axes.notes)
    ratio = large.width / small.width
    capacity_factor = large.routing.capacity_factor
    if grow_axes.upcycled(small, large) and capacity_factor is not None:
        notes.append(
            f"tokens beyond an expert's capacity (routing.capacity_factor {capacity_factor:g}) "
            "lose what the MLP added: the function changes where there are any "
            "(routing.capacity_factor=null drops none)"
        )
    if ratio > 1 and small.tied_readout and small.norm == "layernorm":
        notes.append(
            "a wider stream under LayerNorm needs token embeddings of mean 0, and as a tied "
            "readout these need their mean: the function changes (an untied model, or one with "
            "rmsnorm, keeps it)"
        )
        return False, notes
    # The mean square falls by the ratio if new entries are 0, and eps must fall with it.
    exact_eps = small.norm_eps / ratio
    if ratio > 1 and not np.isclose(large.norm_eps, exact_eps, rtol=1e-3):
        error = large.norm_eps * (ratio - 1) / 2
        notes.append(
            f"the norms' eps counts {ratio:g} times: of a norm's output about {error:.1g} where "
            f"the stream's variance is 1 (--set norm_eps={exact_eps:g} is exact)"
        )
    return True, notes


def _action(
    spec: ParamSpec,
    move: ParamTransfer,
    old_shape: Shape,
    shape: Shape,
    zero: np.ndarray | None,
) -> tuple[str, str]:
    """Return action and reason of a parameter's row.

    Args:
        old_shape: shape in the source, with size 1 along an inserted axis.
        zero: mask of `_silent`.
    """
    words = []
    if move.copies > 1:
        if move.inserted_axis is not None:
            unit = "MLP"
        elif "experts" in spec.axes:
            unit = "expert"
        else:
            unit = "key head"
        words.append(f"every {unit} {move.copies} times")
    if move.times:
        words.append(move.times)

    growth = []
    for axis, old_size, size in zip(spec.axes, old_shape, shape, strict=True):
        if old_size != size:
            growth.append(f"{axis} {old_size} to {size}")
    if not growth:
        if words:
            return "converted", ", ".join(words)
        return "kept", ""

    # New entries of vectors need no remark: gains start at 1 and biases at 0.
    if not np.all(move.transplanted()) and spec.role not in VECTORS:
        if zero is None:
            words.append("new: initialized")
        elif zero.all():
            words.append("new: 0")
        else:
            words.append("new: initialized, 0 in old heads")
    return "grown", ", ".join([*growth, *words])
