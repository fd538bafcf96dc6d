"""Configs of decoders with rotary positions in the form of `transformers`: Llama, those that are like it, and GPT-NeoX, both ways.

Mistral has a window, Qwen2 biases of queries, keys and values, Qwen3 norms of queries and keys, GPT-NeoX branches side by side.
A decoder of ours is written as the plainest of them that has what it has.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from mupax.disk import shown
from mupax.zoo.configs import ConfigError, DecoderConfig
from mupax.zoo.fields import Fields
from mupax.zoo.huggingface import experts
from mupax.zoo.huggingface.architectures import (
    ACTIVATIONS,
    DEFAULTS,
    FIELDS,
    STACK,
    Family,
    Published,
)

ATTENTION = tuple(f"block.attention.{name}_bias" for name in ("query", "key", "value", "out"))
MLP = tuple(f"block.mlp.{name}_bias" for name in ("up", "gate", "down"))

SLIDING, FULL = "sliding_attention", "full_attention"


class Defaults(NamedTuple):
    """What fields are that a config.json leaves out."""

    vocab_size: int
    seq_len: int
    kv_heads: int | None = None
    """None: as many as heads."""
    head_dim: int | None = None
    """None: heads fill the width."""
    window: int | None = None


LIKE: dict[Family, Defaults] = {
    "llama": Defaults(32000, 2048),
    "mistral": Defaults(32000, 131072, 8, window=4096),
    "qwen2": Defaults(151936, 32768, 32),
    "qwen3": Defaults(151936, 32768, 32, 128),
    "mixtral": Defaults(32000, 131072, 8),
    "qwen3_moe": Defaults(151936, 32768, 4),
}
"""Families like Llama."""


def family_of(model: DecoderConfig) -> Family:
    """The plainest family that has what a decoder with rotary positions has."""
    if (
        model.parallel
        or model.rotary_fraction != 1
        or (model.norm == "layernorm" and not model.gated)
    ):
        return "gpt_neox"
    if (
        model.post_norm
        or model.attention_softcap
        or model.logit_softcap
        or model.full_every
        or model.window_theta
    ):
        return "gemma3_text" if model.qk_norm else "gemma2"
    if model.experts is not None:
        return "qwen3_moe" if model.qk_norm else "mixtral"
    if model.qk_norm:
        return "qwen3"
    if model.qkv_bias:
        return "qwen2"
    return "llama" if model.window is None else "mistral"


def reasons(model: DecoderConfig, family: Family) -> dict[str, bool]:
    """Why transformers' code would compute another function, and whether it holds of the model.

    Args:
        model: a decoder with rotary positions.
        family: of `family_of`.
    """
    width, heads = model.width, model.num_heads
    if family == "gpt_neox":
        return {
            f"it has LayerNorm, which subtracts the mean, and model.norm is {model.norm}": model.norm
            != "layernorm",
            f"its MLP has no gate, and model.activation is {model.activation}": model.gated,
            f"it has no grouped queries, and model.num_kv_heads is {model.kv_heads} of {heads} heads": model.kv_heads
            != heads,
            f"its heads fill the width, and {heads} heads of {model.heads_dim} are not {width}": heads
            * model.heads_dim
            != width,
            "model.window hides all but the last positions, which it does not": model.window
            is not None,
        }
    kinds = f"with rotary positions it needs rmsnorm and swiglu, not {model.norm} and {model.activation}"
    return {
        kinds: model.norm != "rmsnorm" or model.activation != "swiglu",
        f"it needs model.width {width} to be a multiple of model.num_heads {heads}": family
        == "llama"
        and bool(width % heads),
        "model.bias adds to every product, which only llama does, without a window and without model.qk_norm": family
        != "llama"
        and model.bias,
        "model.qk_norm with model.qkv_bias is two families in one": model.qk_norm
        and model.qkv_bias,
        "model.qk_norm_kind layernorm subtracts the mean of queries and keys, which it does not": model.qk_norm_kind
        != "rmsnorm",
        "model.qkv_bias adds to queries, keys and values, which it does not": family == "mixtral"
        and model.qkv_bias,
        **experts.reasons(model, family),
    }


def fields_of(model: DecoderConfig, family: Family) -> dict[str, Any]:
    """What config.json says of a model beside what all families have.

    Args:
        model: a decoder with rotary positions.
        family: of `family_of`.
    """
    rope = rope_fields(model)
    if family == "gpt_neox":
        rope |= {"partial_rotary_factor": model.rotary_fraction}
        return {
            "hidden_act": next(
                name for name, ours in ACTIVATIONS.items() if ours == model.activation
            ),
            "max_position_embeddings": model.seq_len,
            "use_parallel_residual": model.parallel,
            "attention_bias": True,
            "rope_parameters": rope,
            "rotary_pct": model.rotary_fraction,
            "rotary_emb_base": model.rotary_theta,
            **({"rope_scaling": rope} if model.rotary_scaling is not None else {}),
        }
    fields = {
        "head_dim": model.heads_dim,
        "num_key_value_heads": model.kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": model.seq_len,
        # The first is read by transformers 5, the others by those before.
        "rope_parameters": rope,
        "rope_theta": model.rotary_theta,
        **({"rope_scaling": rope} if model.rotary_scaling is not None else {}),
    }
    if family == "llama":
        return {**fields, "attention_bias": model.bias, "mlp_bias": model.bias}
    fields |= {"sliding_window": model.window, **experts.fields_of(model, family)}
    if family in ("qwen2", "qwen3", "qwen3_moe"):
        fields |= {"use_sliding_window": model.window is not None, "max_window_layers": 0}
    if family in ("qwen2", "qwen3"):
        fields["layer_types"] = [FULL if model.window is None else SLIDING] * model.depth
    return {**fields, "attention_bias": False} if family in ("qwen3", "qwen3_moe") else fields


def rope_fields(model: DecoderConfig) -> dict[str, Any]:
    """What config.json says of rotary positions."""
    fields: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rotary_theta}
    if model.rotary_scaling is not None:
        fields |= {"rope_type": model.rope_scaling, "factor": model.rope_factor}
    if model.rope_scaling == "llama3":
        fields["low_freq_factor"], fields["high_freq_factor"] = (
            model.rope_low_freq_factor,
            model.rope_high_freq_factor,
        )
        fields["original_max_position_embeddings"] = model.rope_original_len
    return fields


def like_llama(read: Fields, family: Family) -> Published:
    """The model of a config.json.

    Args:
        read: its fields.
        family: its architecture.
    """
    if read.read("hidden_act", "silu") not in ("silu", "swish"):
        raise ConfigError(
            f"config.json: hidden_act is {shown(read.fields['hidden_act'])}, and our gated MLP has silu"
        )
    defaults = LIKE[family]
    stack: dict[str, Any] = {}
    for ours, theirs, default in zip(STACK, FIELDS[family], DEFAULTS[family], strict=True):
        stack[ours] = read.read(theirs, default)
    width, heads = stack["width"], stack["num_heads"]
    mlp_dim = stack.pop("mlp_dim")
    stack |= {"mlp_ratio": mlp_dim / width, **experts.of(read, family, width, mlp_dim)}
    head_dim = read.read("head_dim", defaults.head_dim or max(1, width // heads))
    kv_heads = read.optional("num_key_value_heads", defaults.kv_heads or heads) or heads
    attention = mlp = False
    if family == "llama":
        attention, mlp = read.read("attention_bias", False), read.read("mlp_bias", False)
    elif family in ("qwen3", "qwen3_moe"):
        read.refuse("attention_bias", False, "biases of attention beside norms of queries and keys")
    model = DecoderConfig(
        **stack,
        **rope(Fields({"rope_theta": 1e6, **read.fields}) if family == "mixtral" else read),
        head_dim=None if heads * head_dim == width else head_dim,
        num_kv_heads=None if kv_heads == heads else kv_heads,
        activation="swiglu",
        norm="rmsnorm",
        bias=attention or mlp,
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "qwen3_moe"),
        positions="rotary",
        window=_window(read, family, stack["depth"]),
        vocab_size=read.read("vocab_size", defaults.vocab_size),
        seq_len=read.read("max_position_embeddings", defaults.seq_len),
        tied=read.read("tie_word_embeddings", False),
    )
    zeros = () if attention == mlp else MLP if attention else ATTENTION
    return Published(model, frozenset(zeros))


def gpt_neox(read: Fields) -> Published:
    """The model of a GPT-NeoX' config.json."""
    stack: dict[str, Any] = {}
    for ours, theirs, default in zip(STACK, FIELDS["gpt_neox"], DEFAULTS["gpt_neox"], strict=True):
        stack[ours] = read.read(theirs, default)
    stack["mlp_ratio"] = stack.pop("mlp_dim") / stack["width"]
    fraction = read.read("rotary_pct", 0.25)
    holders = [
        read.fields,
        *(read.fields.get(name) or {} for name in ("rope_parameters", "rope_scaling")),
    ]
    for holder in holders:
        if isinstance(holder, dict):
            fraction = Fields(holder).read("partial_rotary_factor", fraction)
    older = Fields(
        {
            "rope_theta": read.fields.get("rotary_emb_base"),
            **read.fields,
            "partial_rotary_factor": None,
        }
    )
    model = DecoderConfig(
        **stack,
        **rope(older, partial=True),
        rotary_fraction=fraction,
        parallel=read.read("use_parallel_residual", True),
        activation=read.choice("hidden_act", "gelu", ACTIVATIONS),
        positions="rotary",
        vocab_size=read.read("vocab_size", 50432),
        seq_len=read.read("max_position_embeddings", 2048),
        tied=read.read("tie_word_embeddings", False),
    )
    return Published(
        model, frozenset() if read.read("attention_bias", True) else frozenset(ATTENTION)
    )


def _window(read: Fields, family: Family, depth: int) -> int | None:
    """The window of every block; None where they have none."""
    if family == "llama":
        return None
    if family in ("mistral", "mixtral"):
        return read.optional("sliding_window", LIKE[family].window)
    if not read.read("use_sliding_window", False):
        return None
    window = read.optional("sliding_window", 4096)
    if family == "qwen3_moe":  # whose code has it in every layer
        return window
    first = min(depth, read.fields.get("max_window_layers", 28)) if window else depth
    kinds = read.fields.get("layer_types") or [FULL] * first + [SLIDING] * (depth - first)
    if (
        not isinstance(kinds, list)
        or len(kinds) != depth
        or not {FULL, SLIDING}.issuperset(map(str, kinds))
    ):
        raise ConfigError(
            f"config.json: layer_types is {shown(kinds)}, not {FULL} or {SLIDING} for each of {depth} layers"
        )
    if len(set(kinds)) > 1:
        raise ConfigError(
            f"config.json: layer_types has both {FULL} and {SLIDING} in an order that our models do not have"
        )
    return window if kinds[0] == SLIDING else None


def rope(read: Fields, *, partial: bool = False) -> dict[str, Any]:
    """Our fields of rotary positions; other kinds than default, linear and llama3 are refused.

    Args:
        read: fields of the config.
        partial: the architecture may turn a part of each head.
    """
    parameters, scaling = read.fields.get("rope_parameters"), read.fields.get("rope_scaling")
    for holder in (parameters, scaling):
        if holder is not None and not isinstance(holder, dict):
            raise ConfigError(f"config.json: rotary parameters are {shown(holder)}, not an object")
    merged = {**(parameters or {}), **(scaling or {})}
    kind = merged.get("rope_type", merged.get("type", "default"))
    if not partial and any(
        holder.get("partial_rotary_factor", 1) != 1 for holder in (merged, read.fields)
    ):
        raise ConfigError(
            "config.json: partial_rotary_factor turns only a part of each head; ours turn all of it"
        )
    if kind not in ("default", "linear", "llama3"):
        raise ConfigError(
            f"config.json: rotary positions of type {shown(kind)} change frequencies or logits with the context; "
            "our models have the types default, linear and llama3"
        )
    fields = Fields({**read.fields, **merged})
    ours: dict[str, Any] = {"rope_theta": fields.read("rope_theta", 10_000.0)}
    if kind == "default":
        return ours
    needed = {"rope_factor": "factor"}
    if kind == "llama3":
        needed |= {
            "rope_low_freq_factor": "low_freq_factor",
            "rope_high_freq_factor": "high_freq_factor",
        }
        needed |= {"rope_original_len": "original_max_position_embeddings"}
    for name, theirs in needed.items():
        if merged.get(theirs) is None:
            raise ConfigError(
                f"config.json: rotary positions of type {kind} need {theirs}, which is missing"
            )
        ours[name] = Fields(merged).read(theirs, 8192 if name == "rope_original_len" else 8.0)
    return {**ours, "rope_scaling": kind}
