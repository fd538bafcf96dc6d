"""Configs of decoders with experts in the form of `transformers`: Mixtral and Qwen3-MoE.

They are Llamas and Qwen3s but for their MLPs. The code of `transformers` drops no token. It weighs
a token's experts by a softmax over their scores, or over all scores if `norm_topk_prob` is false.
"""

from __future__ import annotations

from typing import Any

from mupax.disk import shown
from mupax.zoo.configs import ConfigError, DecoderConfig
from mupax.zoo.fields import Fields
from mupax.zoo.huggingface.architectures import Family
from mupax.zoo.transformer import RoutingConfig

FAMILIES: tuple[Family, ...] = ("mixtral", "qwen3_moe")


def reasons(model: DecoderConfig, family: Family) -> list[str]:
    """Return the reasons why the code of `transformers` cannot compute a model's experts.

    The list is empty for a model without experts, and for one that the code can compute.
    """
    if model.experts is None:
        return []
    routing = model.routing
    problems = []
    gates = ("softmax",) if family == "mixtral" else ("softmax", "softmax-all")
    if routing.gate not in gates:
        problems.append(
            f"its router is a softmax, and model.routing.gate is {routing.gate}; "
            f"write {' or '.join(gates)}"
        )
    if routing.capacity_factor is not None:
        problems.append("model.routing.capacity_factor drops tokens, which it does not")
    if routing.balance == "bias":
        problems.append(
            "model.routing.balance bias adds to scores where experts are chosen, which it does not"
        )
    if model.shared_experts is not None:
        problems.append(
            "model.shared_experts are experts that every token goes to, which it does not have"
        )
    return problems


def fields_of(model: DecoderConfig, family: Family) -> dict[str, Any]:
    """Return the fields of config.json that describe a model's experts, `{}` without experts."""
    if model.experts is None:
        return {}
    weight = 0.0
    if model.routing.balance == "loss":
        # The balance loss of transformers is ours times the number of active experts.
        weight = model.routing.balance_weight / model.active
    fields = {
        "num_experts_per_tok": model.active,
        "router_aux_loss_coef": weight,
        "output_router_logits": False,
    }
    if family == "mixtral":
        fields["num_local_experts"] = model.experts
        fields["intermediate_size"] = model.expert_size
    else:
        fields["num_experts"] = model.experts
        fields["moe_intermediate_size"] = model.expert_size
        fields["norm_topk_prob"] = model.routing.gate == "softmax"
        # Every layer has experts.
        fields["decoder_sparse_step"] = 1
        fields["mlp_only_layers"] = []
    return fields


def read_experts(config: Fields, family: Family, width: int, mlp_dim: int) -> dict[str, Any]:
    """Return the fields of our config for experts and the MLP, `{}` for a family without experts.

    Args:
        width: Size of the residual stream, by which `mlp_ratio` is computed.
        mlp_dim: `intermediate_size` of config.json. In a Mixtral it is the size of one expert.

    Raises:
        ConfigError: Some layers have no experts, or a field is wrong.
    """
    if family not in FAMILIES:
        return {}
    if family == "mixtral":
        active = config.read("num_experts_per_tok", 2)
        gate = "softmax"
        num_experts = config.read("num_local_experts", 8)
        expert_dim = mlp_dim
        mlp_dim *= active
    else:
        active = config.read("num_experts_per_tok", 8)
        expert_dim = config.read("moe_intermediate_size", 768)
        # transformers 5 writes num_local_experts, which is Mixtral's name.
        default = config.read("num_local_experts", 128)
        num_experts = config.read("num_experts", default)
        gate = "softmax" if config.read("norm_topk_prob", False) else "softmax-all"
        _check_every_layer(config)
    return {
        "experts": num_experts,
        "active_experts": active,
        "expert_dim": expert_dim,
        "routing": RoutingConfig(gate=gate),
        "mlp_ratio": mlp_dim / width,
    }


def _check_every_layer(config: Fields) -> None:
    """Raise ConfigError if a Qwen3-MoE has layers without experts."""
    dense_layers = config.fields.get("mlp_only_layers") or []
    if config.read("decoder_sparse_step", 1) != 1 or dense_layers:
        step = config.fields.get("decoder_sparse_step", 1)
        raise ConfigError(
            f"config.json: decoder_sparse_step {shown(step)} and mlp_only_layers "
            f"{shown(dense_layers)} have layers without experts among those with, "
            "which our models do not have"
        )
