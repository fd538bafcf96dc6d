"""Which entries of a larger model's axes come from a smaller model's, and whether there is such a way at all."""

from __future__ import annotations

import dataclasses

import numpy as np

from mupax.errors import MupaxError
from mupax.presets import ParamSpec, Role
from mupax.presets.roles import ENCODER
from mupax.train.reuse.transplant import Index, first
from mupax.zoo.transformer import TransformerConfig

SIZES = {
    "width": "embed", "depth": "layers", "num_heads": "heads", "kv_heads": "kv_heads", "heads_dim": "head_dim",
}  # fmt: skip
"""What grows: a property of the model, and the axis. Hidden sizes beside them, of which a model has one or two (`hidden`)."""

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
"""Fields that growth may change; norm_eps and rope_theta to go with a wider stream and wider heads."""

EXPERTS = {"experts", "active_experts", "shared_experts", "routing"}
"""Fields of experts, which growth may change where there were none (`upcycled`); the first two also where there were (`copied`)."""


class GrowError(MupaxError):
    """A model that a checkpoint cannot grow into. The text says why and what to write."""


@dataclasses.dataclass(frozen=True)
class Axes:
    """Index of every axis that grows."""

    along: dict[str, Index]
    rotated: Index
    """Of head_dim where rotary positions turn it: queries and keys."""
    copies: int
    """Key heads that one old key head becomes."""
    expert_copies: int
    """Experts that one old expert becomes, side by side."""
    notes: list[str]

    def of(self, spec: ParamSpec, axis: str, size: int) -> Index:
        """Where the entries along a parameter's axis come from.

        Args:
            spec: of the parameter.
            axis: one of its logical axes.
            size: of it in the larger model.
        """
        if axis == "head_dim" and (spec.of or spec.role) in (Role.QUERY, Role.KEY):
            return self.rotated
        return self.along.get(axis, np.arange(size))


def upcycled(before: TransformerConfig, after: TransformerConfig) -> bool:
    """Whether every expert of the larger model is a copy of the smaller one's MLP (Komatsuzaki et al. 2022, arXiv 2212.05055).

    Args:
        before: the smaller model.
        after: the larger one.
    """
    return before.experts is None and after.experts is not None


def copied(before: TransformerConfig, after: TransformerConfig) -> int:
    """Experts of the larger model that each of the smaller one's becomes, 1 where their number stays.

    Args:
        before: the smaller model.
        after: the larger one.

    Raises:
        GrowError: no whole number, or a token would not go to all copies of its experts, and to no other.
    """
    if before.experts is None or after.experts is None:
        return 1
    copies, rest = divmod(after.experts, before.experts)
    if not rest and after.active == copies * before.active:
        return copies
    more = max(2, copies)
    raise GrowError(
        f"{before.experts} experts, {before.active} of them a token's, would become {after.experts} and {after.active}: every expert "
        "becomes the same number of copies, all of which a token goes to where it went to one, or its best experts' copies crowd out "
        f"the next ones; write --set experts={more * before.experts} active_experts={more * before.active}, or keep both"
    )


def hidden(before: TransformerConfig, after: TransformerConfig) -> dict[str, tuple[str, int, int]]:
    """Field, old and new size of every hidden layer, by axis.

    Args:
        before: the smaller model.
        after: the larger one.
    """
    if upcycled(before, after):
        return {"expert_dim": ("expert_dim", before.mlp_dim, after.expert_size)}
    experts = (
        {"expert_dim": ("expert_dim", before.expert_size, after.expert_size)}
        if before.experts
        else {}
    )
    return {**experts, "mlp": ("mlp_dim", before.dense_dim, after.dense_dim)}


def axes(before: TransformerConfig, after: TransformerConfig) -> Axes:
    """How the axes of two models correspond.

    Args:
        before: the smaller model.
        after: the larger one.

    Raises:
        GrowError: something shrinks or differs that growth does not change, or has no way that keeps the function.
    """
    _check(before, after)
    heads, kv_heads, copies = _heads(before, after)
    along = {
        axis: first(getattr(before, size), getattr(after, size)) for size, axis in SIZES.items()
    }
    along |= {axis: first(was, now) for axis, (_, was, now) in hidden(before, after).items()}
    along["memory"] = along["representation"] = along["embed"]
    if before.denoises:
        along[ENCODER.axis] = first(*(side.sizes()[ENCODER.axis] for side in (before, after)))
    if (expert_copies := copied(before, after)) > 1:
        along["experts"] = np.repeat(np.arange(before.experts or 1), expert_copies)
    rotated, notes = _rotated(before, after)
    return Axes(
        {**along, "heads": heads, "kv_heads": kv_heads}, rotated, copies, expert_copies, notes
    )


def _check(before: TransformerConfig, after: TransformerConfig) -> None:
    if before.family != after.family:
        raise GrowError(
            f"the checkpoint is a {before.family} and --to a {after.family}; name a model of its family"
        )
    if before.centered:
        raise GrowError(
            "a centred model is its network minus that of its first step, which the checkpoint does not hold"
        )
    for field in dataclasses.fields(before):
        name, was, now = field.name, getattr(before, field.name), getattr(after, field.name)
        if name in ("experts", "active_experts") and before.experts and after.experts:
            continue  # `copied`
        if name not in FREE and was != now and not (name in EXPERTS and upcycled(before, after)):
            raise GrowError(
                f"model.{name} is {was} in the checkpoint and {now} in --to; growth keeps it: add "
                f"--set {name}={was} (and change it with --init-from afterwards)"
            )
    _check_routing(before, after)
    sizes = [(size, getattr(before, size), getattr(after, size)) for size in SIZES]
    for size, was, now in [*sizes, *hidden(before, after).values()]:
        if now < was:
            # Without head_dim a head is the width over the heads, and more heads are smaller ones; so are more active experts.
            field = {"heads_dim": "head_dim", "expert_dim": "expert_dim"}.get(size)
            instead = f"; add {field}={was} to --set" if field else ""
            raise GrowError(f"{size} would shrink from {was} to {now}; growth only adds{instead}")
    if before.denoises and after.sizes()[ENCODER.axis] < (was := before.sizes()[ENCODER.axis]):
        raise GrowError(f"encoder_depth would shrink from {was}; growth only adds")
    if (
        after.width != before.width
        and getattr(before, "embedding_norm", False)
        and not before.norm_gain
    ):
        raise GrowError(
            "a wider stream needs a gain of the norm after the embeddings, and this model has none; keep its width"
        )
    if before.qk_norm and after.heads_dim != before.heads_dim:
        raise GrowError(
            "queries and keys are normalized (qk_norm) over the head dimension, and new entries of a head would change what "
            f"the old ones are divided by; keep head_dim {before.heads_dim} and add heads"
        )
    if before.rotary_size != before.heads_dim and after.heads_dim != before.heads_dim:
        raise GrowError(
            f"rotary positions turn a part of each head (rotary_fraction); keep head_dim {before.heads_dim} and add heads"
        )
    if (
        len({before.rotary_of(sight) for sight in before.attention_specs}) > 1
        and after.heads_dim != before.heads_dim
    ):
        raise GrowError(
            f"layers turn positions at different rates (window_theta); keep head_dim {before.heads_dim} and add heads"
        )
    if before.post_norms and (after.width, after.depth) != (before.width, before.depth):
        raise GrowError(
            "norms after the branches (post_norm) divide by the size of what is written, whatever new entries and layers start at; "
            f"keep width {before.width} and depth {before.depth}, and add heads or mlp_ratio"
        )
    if (
        after.width != before.width
        and before.branch_gains is not None
        and before.norm == "layernorm"
    ):
        raise GrowError(
            "a wider stream under LayerNorm needs branches of mean 0, and gains after them (layer_scale) leave none; keep its width"
        )
    if after.width != before.width and "representation" in before.sizes():
        raise GrowError(
            "a wider stream would need another readout after the layer before it (pre_logits), whose tanh is of what has grown; keep its width"
        )
    if after.width != before.width and before.tied_readout and not before.norm_gain:
        raise GrowError(
            "a wider stream needs a norm gain before a tied readout, and this model has none; keep its width"
        )


def _check_routing(before: TransformerConfig, after: TransformerConfig) -> None:
    """Refuses experts whose weights do not add up to 1, as those of copies of one MLP must."""
    if not upcycled(before, after):
        return
    if (gate := after.routing.gate) != "softmax":
        why = (
            "sigmoids of scores over their number"
            if gate == "sigmoid"
            else "shares of a softmax over all experts"
        )
        raise GrowError(
            f"every expert starts as the MLP, and under model.routing.gate {gate} a token's are weighed by {why}, which do not "
            "add up to 1: the function would be another; add routing.gate=softmax to --set"
        )
    if after.shared_experts is not None:
        raise GrowError(
            "experts that every token goes to would add the MLP once more to experts that start as the MLP; "
            "leave shared_experts out of --set"
        )


def _heads(before: TransformerConfig, after: TransformerConfig) -> tuple[Index, Index, int]:
    """Indices of query and key heads, each query head with its own key head as before."""
    there, here = before.num_heads // before.kv_heads, after.num_heads // after.kv_heads
    copies = max(1, there // here)
    if (here < there and there % here) or after.kv_heads < before.kv_heads * copies:
        raise GrowError(
            f"{before.num_heads} query heads over {before.kv_heads} key heads cannot become {after.num_heads} over "
            f"{after.kv_heads}: a key head serves {there} query heads and would serve {here}; make it more, or a divisor of "
            f"{there} with at least {before.kv_heads * copies} key heads"
        )
    kv_heads, heads = np.full(after.kv_heads, -1), np.full(after.num_heads, -1)
    for old in range(before.kv_heads):
        for copy in range(copies):
            kv_heads[old * copies + copy] = old
        for query in range(there):
            at = (
                (old * copies + query // here) * here + query % here
                if copies > 1
                else old * here + query
            )
            heads[at] = old * there + query
    return heads, kv_heads, copies


def _rotated(before: TransformerConfig, after: TransformerConfig) -> tuple[Index, list[str]]:
    """Index of a head's entries that positions turn: pair i of N/2 turns theta^(-2i/N) a position, and keeps doing so."""
    small, large = before.heads_dim, after.heads_dim
    theta, new_theta = before.rotary_theta, after.rotary_theta
    if theta is None or new_theta is None:
        return first(small, large), []
    turns, grown = (
        -np.arange(n // 2) / (n // 2) * np.log(base)
        for n, base in ((small, theta), (large, new_theta))
    )
    pairs = np.abs(turns[:, None] - grown[None]).argmin(1)
    if len(set(pairs)) < len(pairs):
        raise GrowError(
            f"rope_theta {new_theta} has no {small // 2} frequencies near those of {theta}; keep it"
        )
    index = np.full(large, -1)
    index[pairs], index[pairs + large // 2] = (
        np.arange(small // 2),
        np.arange(small // 2) + small // 2,
    )
    if np.allclose(turns, grown[pairs], atol=1e-6):
        return index, []
    fitting = theta ** (large / small)
    return index, [
        f"rotary pairs of head_dim {large} turn at other frequencies than those of {small}: the function changes "
        f"(a multiple of {small}, or --set rope_theta={fitting:.10g}, keeps it)"
    ]
