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
from typing import NamedTuple

import numpy as np

from mupax import MupaxError
from mupax.presets import VECTORS, ParamSpec, Role
from mupax.presets.roles import ENCODER
from mupax.train.reuse import transplant
from mupax.train.reuse.transplant import (
    Index,
    ParamTransfer,
    Plan,
    Row,
    ScaledModel,
    Shape,
    check_unmovable,
    first_entries,
    role_of,
)
from mupax.zoo.huggingface.weights import Params
from mupax.zoo.transformer import TransformerConfig, transformer

SIZES = {
    "width": "embed",
    "depth": "layers",
    "num_heads": "heads",
    "kv_heads": "kv_heads",
    "heads_dim": "head_dim",
}
"""Logical axis of each size of a model that can grow, by name of the model's property.

Sizes of hidden layers are left out (`hidden`)."""

FREE = {
    "width",
    "depth",
    "encoder_depth",
    "num_heads",
    "head_dim",
    "num_kv_heads",
    "mlp_ratio",
    "norm_eps",
    "rope_theta",
    "expert_dim",
    "compute",
}
"""Fields of a model's config that may differ between the smaller and the larger model.

norm_eps and rope_theta are among them, because a wider stream and wider heads can need new values.
"""

EXPERTS = {"experts", "active_experts", "shared_experts", "routing"}
"""Fields of experts that may differ if the smaller model has no experts (`upcycled`).

`experts` and `active_experts` may also differ between two models with experts (`copied`).
"""


class GrowError(MupaxError):
    """A model that a checkpoint cannot grow into. The message says why and what to write."""


class HiddenSize(NamedTuple):
    """Size of a model, such as that of a hidden layer, before and after growth.

    `field` is the name of the size in messages, such as `mlp_dim`.
    """

    field: str
    old: int
    new: int


@dataclasses.dataclass(frozen=True)
class Axes:
    """Correspondence between the axes of a larger model and those of the smaller one.

    An `Index` has the old position of each new position along an axis, or -1 for a new one. `notes`
    has a sentence if the rotary frequencies of wider heads change the function.
    """

    along: dict[str, Index]
    """`Index` by logical axis, for every axis that may grow."""
    rotated: Index
    """`Index` of the axis head_dim for queries and keys, to which rotary positions apply."""
    copies: int
    """Number of key heads that one old key head becomes."""
    expert_copies: int
    """Number of adjacent experts that one old expert becomes."""
    notes: list[str]

    def index(self, spec: ParamSpec, axis: str, size: int) -> Index:
        """Return the old position of each new position along an axis of a parameter, or -1.

        -1 marks a new entry. An axis that does not grow gets 0 to `size` - 1.

        Args:
            axis: logical axis of the parameter, such as "embed".
            size: size of the axis in the larger model.
        """
        if axis == "head_dim" and (spec.of or spec.role) in (Role.QUERY, Role.KEY):
            return self.rotated
        return self.along.get(axis, np.arange(size))


def upcycled(small: TransformerConfig, large: TransformerConfig) -> bool:
    """Return whether only the larger model has experts. Each expert then is a copy of the MLP.

    Source: Komatsuzaki et al. 2022, arXiv 2212.05055.
    """
    return small.experts is None and large.experts is not None


def copied(small: TransformerConfig, large: TransformerConfig) -> int:
    """Return the number of experts of the larger model that each expert of the smaller one becomes.

    The result is 1 if the number of experts stays, or if either model has no experts.

    Raises:
        GrowError: the number is not whole, or a token would not go to exactly all copies of its
            experts.
    """
    if small.experts is None or large.experts is None:
        return 1
    copies, remainder = divmod(large.experts, small.experts)
    if not remainder and large.active == copies * small.active:
        return copies
    suggested = max(2, copies)
    raise GrowError(
        f"{small.experts} experts, {small.active} of them a token's, would become "
        f"{large.experts} and {large.active}: every expert becomes the same number of copies, all "
        "of which a token goes to where it went to one, or its best experts' copies crowd out the "
        f"next ones; write --set experts={suggested * small.experts} "
        f"active_experts={suggested * small.active}, or keep both"
    )


def hidden(small: TransformerConfig, large: TransformerConfig) -> dict[str, HiddenSize]:
    """Return the old and new size of every hidden layer, by logical axis.

    If only the larger model has experts, the result has one entry, `expert_dim`, whose old size is
    that of the MLP.
    """
    if upcycled(small, large):
        return {"expert_dim": HiddenSize("expert_dim", small.mlp_dim, large.expert_size)}
    sizes = {}
    if small.experts:
        sizes["expert_dim"] = HiddenSize("expert_dim", small.expert_size, large.expert_size)
    sizes["mlp"] = HiddenSize("mlp_dim", small.dense_dim, large.dense_dim)
    return sizes


def grown_axes(small: TransformerConfig, large: TransformerConfig) -> Axes:
    """Return the correspondence between the axes of a smaller and a larger model.

    The two configs are checked first.

    Raises:
        GrowError: a size shrinks, a field differs that growth does not change, or the function
            cannot be kept.
    """
    _check(small, large)
    heads, kv_heads, copies = _heads(small, large)
    along = {}
    for size, axis in SIZES.items():
        along[axis] = first_entries(getattr(small, size), getattr(large, size))
    for axis, hidden_size in hidden(small, large).items():
        along[axis] = first_entries(hidden_size.old, hidden_size.new)
    # The encoder's output and the layer before the readout are as wide as the stream.
    along["memory"] = along["embed"]
    along["representation"] = along["embed"]
    if small.denoises:
        old_depth = small.sizes()[ENCODER.axis]
        along[ENCODER.axis] = first_entries(old_depth, large.sizes()[ENCODER.axis])
    expert_copies = copied(small, large)
    if expert_copies > 1:
        # Copies of an expert are adjacent, because their initial values are centred group by group.
        along["experts"] = np.repeat(np.arange(small.experts or 1), expert_copies)
    along["heads"] = heads
    along["kv_heads"] = kv_heads

    rotated, notes = _rotated(small, large)
    return Axes(along, rotated, copies, expert_copies, notes)


def _check(small: TransformerConfig, large: TransformerConfig) -> None:
    """Raise `GrowError` if `small` cannot grow into `large`.

    This is so if a field changes that growth keeps, a size shrinks, or the function would change.
    """
    if small.family != large.family:
        raise GrowError(
            f"the checkpoint is a {small.family} and --to a {large.family}; "
            "name a model of its family"
        )
    if small.centered:
        raise GrowError(
            "a centred model is its network minus that of its first step, which the checkpoint "
            "does not hold"
        )
    _check_fields(small, large)
    _check_routing(small, large)
    _check_sizes(small, large)
    lacks_gain = getattr(small, "embedding_norm", False) and not small.norm_gain
    if large.width != small.width and lacks_gain:
        raise GrowError(
            "a wider stream needs a gain of the norm after the embeddings, and this model has "
            "none; keep its width"
        )
    if large.heads_dim != small.heads_dim:
        _check_wider_heads(small)
    if small.post_norms and (large.width, large.depth) != (small.width, small.depth):
        raise GrowError(
            "norms after the branches (post_norm) divide by the size of what is written, whatever "
            f"new entries and layers start at; keep width {small.width} and depth "
            f"{small.depth}, and add heads or mlp_ratio"
        )
    if large.width != small.width:
        _check_wider_stream(small)


def _check_fields(small: TransformerConfig, large: TransformerConfig) -> None:
    """Raise `GrowError` if a field differs that is not in `FREE`.

    The fields in `EXPERTS` may also differ if only the larger model has experts.
    """
    for field in dataclasses.fields(small):
        name = field.name
        old_value = getattr(small, name)
        new_value = getattr(large, name)
        if name in ("experts", "active_experts") and small.experts and large.experts:
            # `copied` checks these two fields.
            continue
        if name in FREE or old_value == new_value:
            continue
        if name in EXPERTS and upcycled(small, large):
            continue
        raise GrowError(
            f"model.{name} is {old_value} in the checkpoint and {new_value} in --to; growth keeps "
            f"it: add --set {name}={old_value} (and change it with --init-from afterwards)"
        )


def _check_sizes(small: TransformerConfig, large: TransformerConfig) -> None:
    """Raise `GrowError` if a size of the model or of a hidden layer shrinks."""
    sizes = [HiddenSize(size, getattr(small, size), getattr(large, size)) for size in SIZES]
    sizes += hidden(small, large).values()
    for size, old, new in sizes:
        if new < old:
            # If head_dim is not set, it is width / num_heads, so more heads are smaller. If
            # expert_dim is not set, it is mlp_dim / active_experts, so more active experts are
            # smaller.
            field = {"heads_dim": "head_dim", "expert_dim": "expert_dim"}.get(size)
            hint = f"; add {field}={old} to --set" if field else ""
            raise GrowError(f"{size} would shrink from {old} to {new}; growth only adds{hint}")
    if small.denoises:
        encoder_depth = small.sizes()[ENCODER.axis]
        if large.sizes()[ENCODER.axis] < encoder_depth:
            raise GrowError(f"encoder_depth would shrink from {encoder_depth}; growth only adds")


def _check_wider_heads(small: TransformerConfig) -> None:
    """Raise `GrowError` for a model whose function would change with wider heads.

    There are three such kinds of models: those with qk_norm, those whose rotary positions turn only
    a part of each head, and those whose rotary positions differ between layers.
    """
    if small.qk_norm:
        raise GrowError(
            "queries and keys are normalized (qk_norm) over the head dimension, and new entries "
            "of a head would change what the old ones are divided by; keep head_dim "
            f"{small.heads_dim} and add heads"
        )
    if small.rotary_size != small.heads_dim:
        raise GrowError(
            "rotary positions turn a part of each head (rotary_fraction); keep head_dim "
            f"{small.heads_dim} and add heads"
        )
    rotations = {small.rotary_of(spec) for spec in small.attention_specs}
    if len(rotations) > 1:
        raise GrowError(
            "layers turn positions at different rates (window_theta); keep head_dim "
            f"{small.heads_dim} and add heads"
        )


def _check_wider_stream(small: TransformerConfig) -> None:
    """Raise `GrowError` for a model whose function would change with a wider stream.

    There are three such kinds of models: those with both LayerNorm and gains after the branches
    (layer_scale), those with a layer before the readout (pre_logits), and those with a tied readout
    but no norm gain.
    """
    if small.branch_gains is not None and small.norm == "layernorm":
        raise GrowError(
            "a wider stream under LayerNorm needs branches of mean 0, and gains after them "
            "(layer_scale) leave none; keep its width"
        )
    if "representation" in small.sizes():
        raise GrowError(
            "a wider stream would need another readout after the layer before it (pre_logits), "
            "whose tanh is of what has grown; keep its width"
        )
    if small.tied_readout and not small.norm_gain:
        raise GrowError(
            "a wider stream needs a norm gain before a tied readout, and this model has none; "
            "keep its width"
        )


def _check_routing(small: TransformerConfig, large: TransformerConfig) -> None:
    """Raise `GrowError` if experts that are copies of one MLP would not compute what the MLP does.

    The weights of a token's experts must add up to 1 (a softmax gate), and there must be no shared
    experts. Nothing is checked if both models have experts, or none has.
    """
    if not upcycled(small, large):
        return
    gate = large.routing.gate
    if gate != "softmax":
        formula = "shares of a softmax over all experts"
        if gate == "sigmoid":
            formula = "sigmoids of scores over their number"
        raise GrowError(
            f"every expert starts as the MLP, and under model.routing.gate {gate} a token's are "
            f"weighed by {formula}, which do not add up to 1: the function would be another; add "
            "routing.gate=softmax to --set"
        )
    if large.shared_experts is not None:
        raise GrowError(
            "experts that every token goes to would add the MLP once more to experts that start "
            "as the MLP; leave shared_experts out of --set"
        )


def _heads(small: TransformerConfig, large: TransformerConfig) -> tuple[Index, Index, int]:
    """Return how query and key heads of the larger model come from those of the smaller one.

    Each old query head keeps its own key head. A key head that would serve fewer query heads than
    before is copied.

    Returns:
        Three values: the old query head of each query head, the old key head of each key head (-1
        for new heads), and the number of copies of each old key head.

    Raises:
        GrowError: the numbers of heads do not allow that every query head keeps its key head.
    """
    old_group = small.num_heads // small.kv_heads
    new_group = large.num_heads // large.kv_heads
    # A key head that would serve fewer queries is copied, so that every query keeps its keys.
    copies = max(1, old_group // new_group)
    is_split_unevenly = new_group < old_group and old_group % new_group
    if is_split_unevenly or large.kv_heads < small.kv_heads * copies:
        raise GrowError(
            f"{small.num_heads} query heads over {small.kv_heads} key heads cannot become "
            f"{large.num_heads} over {large.kv_heads}: a key head serves {old_group} query heads "
            f"and would serve {new_group}; make it more, or a divisor of {old_group} with at "
            f"least {small.kv_heads * copies} key heads"
        )
    kv_heads = np.full(large.kv_heads, -1)
    heads = np.full(large.num_heads, -1)
    for old_head in range(small.kv_heads):
        first_head = old_head * copies
        kv_heads[first_head : first_head + copies] = old_head
        for query in range(old_group):
            # Without copies, all queries of a group keep their one key head. With copies, each copy
            # of the key head gets `new_group` of the queries.
            if copies > 1:
                head = (first_head + query // new_group) * new_group + query % new_group
            else:
                head = old_head * new_group + query
            heads[head] = old_head * old_group + query
    return heads, kv_heads, copies


def _rotated(small: TransformerConfig, large: TransformerConfig) -> tuple[Index, list[str]]:
    """Return the `Index` of head_dim under rotary positions, and notes on changed frequencies.

    With N entries in a head, pair i of N/2 turns by theta^(-2i/N) per position. Each old pair goes
    to the new pair with the nearest frequency. There is a note if the frequencies are not equal.
    Without rotary positions the first entries are kept.

    Raises:
        GrowError: two old pairs would go to one new pair.
    """
    old_dim = small.heads_dim
    new_dim = large.heads_dim
    old_theta = small.rotary_theta
    new_theta = large.rotary_theta
    if old_theta is None or new_theta is None:
        return first_entries(old_dim, new_dim), []

    old_log_frequencies = _log_frequencies(old_dim, old_theta)
    new_log_frequencies = _log_frequencies(new_dim, new_theta)
    distances = np.abs(old_log_frequencies[:, None] - new_log_frequencies[None])
    pairs = distances.argmin(1)
    num_pairs = old_dim // 2
    if len(set(pairs)) < len(pairs):
        raise GrowError(
            f"rope_theta {new_theta} has no {num_pairs} frequencies near those of {old_theta}; "
            "keep it"
        )
    index = np.full(new_dim, -1)
    # The two entries of pair i are i and i + N/2.
    index[pairs] = np.arange(num_pairs)
    index[pairs + new_dim // 2] = np.arange(num_pairs) + num_pairs
    if np.allclose(old_log_frequencies, new_log_frequencies[pairs], atol=1e-6):
        return index, []
    # Pair i turns by theta^(-2i/N) per position. A head dimension N' with the base theta^(N'/N)
    # gives pair i the same angle.
    exact_theta = old_theta ** (new_dim / old_dim)
    return index, [
        f"rotary pairs of head_dim {new_dim} turn at other frequencies than those of {old_dim}: "
        f"the function changes (a multiple of {old_dim}, or --set rope_theta={exact_theta:.10g}, "
        "keeps it)"
    ]


def _log_frequencies(head_dim: int, theta: float) -> np.ndarray:
    num_pairs = head_dim // 2
    return -np.arange(num_pairs) / num_pairs * np.log(theta)


_MLP = "block.mlp."
_EXPERTS = "block.experts."
EMBEDS = (Role.TOKEN_EMBEDDING, Role.PATCH_EMBEDDING, Role.POSITION)
"""Roles of the embeddings, which write the first values of the residual stream."""
OUTS = (Role.ATTENTION_OUT, Role.MLP_OUT, Role.EXPERT_OUT)
"""Roles of the matrices that write a branch's output into the residual stream."""
READS = (
    Role.QUERY,
    Role.KEY,
    Role.VALUE,
    Role.MLP_IN,
    Role.ROUTER,
    Role.EXPERT_IN,
    Role.READOUT,
)
"""Roles of the matrices that read the normalized residual stream."""


@dataclasses.dataclass(frozen=True)
class Growth(Plan):
    """Plan of how every parameter of the larger model is made from the smaller one's."""

    notes: list[str]
    """Reasons why the function changes. Empty if it stays, except for rounding."""
    silent: dict[str, np.ndarray]
    """Bool mask, by parameter name, of initial values that are set to zero.

    It broadcasts against the parameter. Entries from the smaller model replace the initial values.
    """

    def silenced(self, fresh: Params) -> Params:
        """Return initial parameters with zeros where new units would write into the stream.

        Initial values that are added to copies of an expert, so that the copies differ, are made to
        sum to zero over the copies.
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
        raise GrowError(
            "the checkpoint holds adapters beside its matrices; start a run from it (--init-from "
            "merges them), and grow that run"
        )
    axes = grown_axes(small, large)
    check_unmovable(source, target)
    is_exact, notes = _notes(small, large, axes)

    moves: dict[str, ParamTransfer] = {}
    rows: list[Row] = []
    silent: dict[str, np.ndarray] = {}
    is_upcycled = upcycled(small, large)
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
    """Return the factor of a parameter's old entries that keeps the function of a grown network.

    The network is the plain one (`train/reuse/plain.py`), in which presets have no multipliers.
    """
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
    """Return a mask of the initial values to set to zero, or `None` if none are.

    For embeddings and output matrices the mask covers all initial values, for keys only those in
    new entries of old heads.
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
    small: TransformerConfig, large: TransformerConfig, axes: Axes
) -> tuple[bool, list[str]]:
    """Return whether old weights may be centred, and notes on why the function changes.

    A wider stream under LayerNorm needs weights of mean 0. The first value is False if the readout
    is tied, too: as a readout the embedding needs its mean.
    """
    notes = list(axes.notes)
    ratio = large.width / small.width
    capacity_factor = large.routing.capacity_factor
    if upcycled(small, large) and capacity_factor is not None:
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
    """Return `action` and `reason` of a parameter's row in the table for the user (`Row`).

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
