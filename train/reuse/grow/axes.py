"""Correspondence between the axes of a smaller and a larger model, and the models that can grow."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from mupax.errors import MupaxError
from mupax.presets import ParamSpec, Role
from mupax.presets.roles import ENCODER
from mupax.train.reuse.transplant import Index, first_entries
from mupax.zoo.transformer import TransformerConfig

SIZES = {
    "width": "embed",
    "depth": "layers",
    "num_heads": "heads",
    "kv_heads": "kv_heads",
    "heads_dim": "head_dim",
}
"""Logical axis by property of the model, for all that grows except hidden sizes (`hidden`)."""

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
"""Fields that growth may change.

norm_eps and rope_theta are among them to go with a wider stream and wider heads.
"""

EXPERTS = {"experts", "active_experts", "shared_experts", "routing"}
"""Fields of experts, which growth may change in a model without experts (`upcycled`).

The first two it may change in a model with experts, too (`copied`).
"""


class GrowError(MupaxError):
    """A model that a checkpoint cannot grow into. The message says why and what to write."""


class HiddenSize(NamedTuple):
    """Size of a model, such as that of a hidden layer, before and after growth.

    `field` is its name for messages, such as `mlp_dim`.
    """

    field: str
    old: int
    new: int


@dataclasses.dataclass(frozen=True)
class Axes:
    """For every axis that grows, the old index of each new index, or -1 for a new entry.

    The `notes` say if the rotary frequencies of wider heads change the function.
    """

    along: dict[str, Index]
    """Index by logical axis."""
    rotated: Index
    """Index of head_dim for queries and keys, which rotary positions turn."""
    copies: int
    """Number of key heads that one old key head becomes."""
    expert_copies: int
    """Number of adjacent experts that one old expert becomes."""
    notes: list[str]

    def index(self, spec: ParamSpec, axis: str, size: int) -> Index:
        """Return the old index of each index of one axis of a parameter, or -1 for new entries.

        An axis that does not grow gets 0 to `size` - 1.

        Args:
            size: size of the axis in the larger model.
        """
        if axis == "head_dim" and (spec.of or spec.role) in (Role.QUERY, Role.KEY):
            return self.rotated
        return self.along.get(axis, np.arange(size))


def upcycled(small: TransformerConfig, large: TransformerConfig) -> bool:
    """Return whether only the larger model has experts, which then are copies of the MLP.

    Source: Komatsuzaki et al. 2022, arXiv 2212.05055.
    """
    return small.experts is None and large.experts is not None


def copied(small: TransformerConfig, large: TransformerConfig) -> int:
    """Return the number of copies that each expert becomes.

    The result is 1 if their number stays, or if either model has no experts.

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

    If only the larger model has experts, the one entry is theirs, and the old size is the MLP's.
    """
    if upcycled(small, large):
        return {"expert_dim": HiddenSize("expert_dim", small.mlp_dim, large.expert_size)}
    sizes = {}
    if small.experts:
        sizes["expert_dim"] = HiddenSize("expert_dim", small.expert_size, large.expert_size)
    sizes["mlp"] = HiddenSize("mlp_dim", small.dense_dim, large.dense_dim)
    return sizes


def axes(small: TransformerConfig, large: TransformerConfig) -> Axes:
    """Return the correspondence between the axes of a smaller and a larger model.

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
    """Raise `GrowError` if other fields change, a size shrinks, or the function cannot stay."""
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

    These are models with qk_norm, and with rotary positions that turn only a part of each head or
    differ between layers.
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

    These are models with LayerNorm and gains after the branches, with a layer before the readout,
    and with a tied readout but no norm gain.
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
    """Raise `GrowError` if experts made of one MLP would not compute what the MLP does.

    Their weights must add up to 1 (a softmax gate), and there must be no shared experts. Models of
    which both or none have experts pass.
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
    """Return the indices of query and key heads, -1 for new heads, and the copies of a key head.

    Each query head keeps its own key head.

    Raises:
        GrowError: the numbers of heads do not allow that.
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
    """Return the index of a head's entries under rotary positions, and notes on changes.

    Pair i of N/2 turns by theta^(-2i/N) per position. Old pairs go to the new pairs of the nearest
    frequencies. There is a note if these are not equal. Without rotary positions the first entries
    are kept.

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
