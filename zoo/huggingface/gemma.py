"""Configs of Gemma 2 in the form of `transformers`: norms after the branches too, caps of logits, windows in some layers, a gated GELU.

Its code takes gains as 1 + w, looked-up embeddings times width^1/2 and attention logits times query_pre_attn_scalar^-1/2, all of
which `names` and `weights` fold into what they read.
"""

from __future__ import annotations

from typing import Any

from mupax.disk import shown
from mupax.zoo.configs import ConfigError, DecoderConfig
from mupax.zoo.fields import Fields
from mupax.zoo.huggingface.architectures import DEFAULTS, FIELDS, STACK, Published
from mupax.zoo.huggingface.decoders import FULL, SLIDING, Defaults, rope, rope_fields

DEFAULT = Defaults(256000, 8192, 4, 256, 4096)
GELUS = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")


def reasons(model: DecoderConfig) -> dict[str, bool]:
    """Why transformers' code would compute another function, and whether it holds of the model."""
    kinds = f"it needs rmsnorm and geglu, not {model.norm} and {model.activation}"
    width, heads = model.width, model.num_heads
    return {
        kinds: model.norm != "rmsnorm" or model.activation != "geglu",
        "it normalizes what branches write, and model.post_norm does not": not model.post_norm,
        "model.bias adds to every product, which it does not": model.bias,
        "model.qkv_bias adds to queries, keys and values, which it does not": model.qkv_bias,
        f"it needs model.width {width} to be a multiple of model.num_heads {heads}": bool(width % heads),
    }


def fields_of(model: DecoderConfig) -> dict[str, Any]:
    """What config.json says of a model beside what all families have."""
    return {
        "head_dim": model.heads_dim,
        "query_pre_attn_scalar": model.heads_dim,
        "num_key_value_heads": model.kv_heads,
        "hidden_activation": GELUS[0],
        "max_position_embeddings": model.seq_len,
        "rope_parameters": rope_fields(model),
        "rope_theta": model.rotary_theta,
        **({"rope_scaling": rope_fields(model)} if model.rotary_scaling is not None else {}),
        "sliding_window": model.window,
        "layer_types": [_kind(model.sights[i % len(model.sights)].window) for i in range(model.depth)],
        "attn_logit_softcapping": model.attention_softcap,
        "final_logit_softcapping": model.logit_softcap,
        "attention_bias": False,
    }


def gemma2(read: Fields) -> Published:
    """The model of a config.json."""
    for name in ("hidden_activation", "hidden_act"):
        if (value := read.read(name, GELUS[0])) not in GELUS:
            raise ConfigError(f"config.json: {name} is {shown(value)}, and its gated MLP has {GELUS[0]} in our models")
    read.refuse("attention_bias", False, "biases of attention")
    read.refuse("use_bidirectional_attention", False, "attention to later tokens")
    stack: dict[str, Any] = {}
    for ours, theirs, default in zip(STACK, FIELDS["gemma2"], DEFAULTS["gemma2"], strict=True):
        stack[ours] = read.read(theirs, default)
    width, heads, depth = stack["width"], stack["num_heads"], stack["depth"]
    stack["mlp_ratio"] = stack.pop("mlp_dim") / width
    head_dim = read.read("head_dim", DEFAULT.head_dim or 0)
    kv_heads = read.read("num_key_value_heads", DEFAULT.kv_heads or heads)
    model = DecoderConfig(
        **stack,
        **rope(read),
        **_windows(read, depth),
        head_dim=None if heads * head_dim == width else head_dim,
        num_kv_heads=None if kv_heads == heads else kv_heads,
        activation="geglu",
        norm="rmsnorm",
        bias=False,
        post_norm=True,
        positions="rotary",
        attention_softcap=read.optional("attn_logit_softcapping", 50.0),
        logit_softcap=read.optional("final_logit_softcapping", 30.0),
        vocab_size=read.read("vocab_size", DEFAULT.vocab_size),
        seq_len=read.read("max_position_embeddings", DEFAULT.seq_len),
        tied=read.read("tie_word_embeddings", True),
    )
    query = read.read("query_pre_attn_scalar", 256.0)
    return Published(model, query_scale=(head_dim / query) ** 0.5)


def _kind(window: int | None) -> str:
    return FULL if window is None else SLIDING


def _windows(read: Fields, depth: int) -> dict[str, Any]:
    """Our fields of what each layer sees."""
    window = read.optional("sliding_window", DEFAULT.window)
    kinds = read.fields.get("layer_types")
    if kinds is None:
        kinds = [(SLIDING, FULL)[i % 2] for i in range(min(depth, 2))] * depth
        kinds = kinds[:depth]
    if not isinstance(kinds, list) or len(kinds) != depth or not {FULL, SLIDING}.issuperset(map(str, kinds)):
        raise ConfigError(
            f"config.json: layer_types is {shown(kinds)}, not {FULL} or {SLIDING} for each of {depth} layers"
        )
    if window is None or SLIDING not in kinds:
        return {"window": None}
    if FULL not in kinds:
        return {"window": window}
    every = kinds.index(FULL) + 1
    if every < 2 or kinds != [(SLIDING, FULL)[(i + 1) % every == 0] for i in range(depth)]:
        raise ConfigError(
            f"config.json: layer_types has {FULL} in an order that our models do not have, in which it is every so-many-th layer"
        )
    return {"window": window, "full_every": every}
