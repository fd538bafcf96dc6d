"""Configs of decoders with experts in the form of `transformers`: Mixtral and Qwen3-MoE, Llamas and Qwen3s but for their MLPs, both ways.

Their code drops no token, and weighs a token's experts by a softmax: over their scores, or, with `norm_topk_prob` false, over all.
"""

from __future__ import annotations

from typing import Any

from mupax.disk import shown
from mupax.zoo.configs import ConfigError, DecoderConfig
from mupax.zoo.fields import Fields
from mupax.zoo.huggingface.architectures import Family
from mupax.zoo.transformer import RoutingConfig

FAMILIES: tuple[Family, ...] = ("mixtral", "qwen3_moe")


def reasons(model: DecoderConfig, family: Family) -> dict[str, bool]:
    """Why transformers' code would compute another function of experts, and whether it holds of the model.

    Args:
        model: a decoder with rotary positions.
        family: of the model.
    """
    if model.experts is None:
        return {}
    routing = model.routing
    softmax = "softmax" if family == "mixtral" else "softmax or softmax-all"
    return {
        f"its router is a softmax, and model.routing.gate is {routing.gate}; write {softmax}": routing.gate
        == "sigmoid"
        or (family == "mixtral" and routing.gate == "softmax-all"),
        "model.routing.capacity_factor drops tokens, which it does not": routing.capacity_factor
        is not None,
        "model.routing.balance bias adds to scores where experts are chosen, which it does not": routing.balance
        == "bias",
        "model.shared_experts are experts that every token goes to, which it does not have": model.shared_experts
        is not None,
    }


def fields_of(model: DecoderConfig, family: Family) -> dict[str, Any]:
    """What config.json says of experts; {} without any.

    Args:
        model: a decoder with rotary positions.
        family: of the model.
    """
    if model.experts is None:
        return {}
    # Their balance loss is ours times the experts of a token.
    weight = model.routing.balance_weight / model.active if model.routing.balance == "loss" else 0.0
    shared = {
        "num_experts_per_tok": model.active,
        "router_aux_loss_coef": weight,
        "output_router_logits": False,
    }
    if family == "mixtral":
        return {
            **shared,
            "num_local_experts": model.experts,
            "intermediate_size": model.expert_size,
        }
    return {
        **shared,
        "num_experts": model.experts,
        "moe_intermediate_size": model.expert_size,
        "norm_topk_prob": model.routing.gate == "softmax",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def of(read: Fields, family: Family, width: int, mlp_dim: int) -> dict[str, Any]:
    """Our fields of experts; {} of a family without.

    Args:
        read: fields of config.json.
        family: its architecture.
        width: of the model.
        mlp_dim: its intermediate_size, which of a Mixtral is an expert's.
    """
    if family not in FAMILIES:
        return {}
    if family == "mixtral":
        active, gate = read.read("num_experts_per_tok", 2), "softmax"
        experts, size = read.read("num_local_experts", 8), mlp_dim
        mlp_dim *= active
    else:
        active, size = read.read("num_experts_per_tok", 8), read.read("moe_intermediate_size", 768)
        # transformers 5 writes the name that Mixtral has.
        experts = read.read("num_experts", read.read("num_local_experts", 128))
        gate = "softmax" if read.read("norm_topk_prob", False) else "softmax-all"
        dense = read.fields.get("mlp_only_layers") or []
        if read.read("decoder_sparse_step", 1) != 1 or dense:
            raise ConfigError(
                f"config.json: decoder_sparse_step {shown(read.fields.get('decoder_sparse_step', 1))} and mlp_only_layers "
                f"{shown(dense)} have layers without experts among those with, which our models do not have"
            )
    routing = RoutingConfig(gate=gate)
    return {
        "experts": experts,
        "active_experts": active,
        "expert_dim": size,
        "routing": routing,
        "mlp_ratio": mlp_dim / width,
    }
