"""Configs of Gemma 2 and 3 in the form of `transformers`: norms after the branches too, windows in some layers, a gated GELU.

Gemma 2 has caps of logits; Gemma 3 has norms of queries and keys, and positions that turn at other rates in layers with a window.

Its code takes gains as 1 + w, looked-up embeddings times width^1/2 and attention logits times query_pre_attn_scalar^-1/2, all of
which `names` and `weights` fold into what they read.
"""

from __future__ import annotations

from typing import Any

from mupax.disk import shown
from mupax.zoo.configs import ConfigError, DecoderConfig
from mupax.zoo.fields import Fields
from mupax.zoo.huggingface.architectures import DEFAULTS, FIELDS, STACK, Family, Published
from mupax.zoo.huggingface.decoders import FULL, SLIDING, Defaults, rope, rope_fields

DEFAULT: dict[Family, Defaults] = {
    "gemma2": Defaults(256000, 8192, 4, 256, 4096),
    "gemma3_text": Defaults(262208, 131072, 4, 256, 4096),
}
GELUS = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")


def reasons(model: DecoderConfig, family: Family) -> dict[str, bool]:
    """Why transformers' code would compute another function, and whether it holds of the model.

    Args:
        model: a decoder with rotary positions.
        family: gemma2 or gemma3_text.
    """
    kinds = f"it needs rmsnorm and geglu, not {model.norm} and {model.activation}"
    width, heads = model.width, model.num_heads
    return {
        kinds: model.norm != "rmsnorm" or model.activation != "geglu",
        "it normalizes what branches write, and model.post_norm does not": not model.post_norm,
        "model.window_theta is of layers with a window alone, and it has one wavelength": model.window_theta
        is not None
        and family == "gemma2",
        "model.attention_softcap bounds attention logits, which it does not": model.attention_softcap
        is not None
        and family == "gemma3_text",
        "model.qk_norm_kind layernorm subtracts the mean of queries and keys, which it does not": model.qk_norm_kind
        != "rmsnorm",
        "model.bias adds to every product, which it does not": model.bias,
        "model.qkv_bias adds to queries, keys and values, which it does not": model.qkv_bias,
        f"it needs model.width {width} to be a multiple of model.num_heads {heads}": bool(
            width % heads
        ),
    }


def fields_of(model: DecoderConfig, family: Family) -> dict[str, Any]:
    """What config.json says of a model beside what all families have.

    Args:
        model: a decoder with rotary positions.
        family: gemma2 or gemma3_text.
    """
    rope: dict[str, Any] = {"rope_parameters": rope_fields(model), "rope_theta": model.rotary_theta}
    if model.rotary_scaling is not None:
        rope["rope_scaling"] = rope_fields(model)
    if family == "gemma3_text":
        windowed = (
            {"rope_type": "default", "rope_theta": model.window_theta}
            if model.window_theta
            else rope_fields(model)
        )
        rope = {"rope_parameters": {SLIDING: windowed, FULL: rope_fields(model)}}
    return {
        **rope,
        "head_dim": model.heads_dim,
        "query_pre_attn_scalar": model.heads_dim,
        "num_key_value_heads": model.kv_heads,
        "hidden_activation": GELUS[0],
        "max_position_embeddings": model.seq_len,
        "sliding_window": model.window,
        "layer_types": [
            _kind(model.attention_specs[i % len(model.attention_specs)].window)
            for i in range(model.depth)
        ],
        "attn_logit_softcapping": model.attention_softcap,
        "final_logit_softcapping": model.logit_softcap,
        "attention_bias": False,
    }


def gemma(read: Fields, family: Family) -> Published:
    """The model of a config.json.

    Args:
        read: its fields.
        family: gemma2 or gemma3_text.
    """
    defaults, newer = DEFAULT[family], family == "gemma3_text"
    if newer and read.fields.get("attn_logit_softcapping") is not None:
        raise ConfigError(
            "config.json: attn_logit_softcapping is given, and Gemma 3's code does not read it"
        )
    for name in ("hidden_activation", "hidden_act"):
        if (value := read.read(name, GELUS[0])) not in GELUS:
            raise ConfigError(
                f"config.json: {name} is {shown(value)}, and its gated MLP has {GELUS[0]} in our models"
            )
    read.refuse("attention_bias", False, "biases of attention")
    read.refuse("use_bidirectional_attention", False, "attention to later tokens")
    stack: dict[str, Any] = {}
    for ours, theirs, default in zip(STACK, FIELDS[family], DEFAULTS[family], strict=True):
        stack[ours] = read.read(theirs, default)
    width, heads, depth = stack["width"], stack["num_heads"], stack["depth"]
    stack["mlp_ratio"] = stack.pop("mlp_dim") / width
    head_dim = read.read("head_dim", defaults.head_dim or 0)
    kv_heads = read.read("num_key_value_heads", defaults.kv_heads or heads)
    windows = _windows(read, depth, 6 if newer else 2)
    model = DecoderConfig(
        **stack,
        **(_rope_of_layers(read, windows) if newer else rope(read)),
        **windows,
        head_dim=None if heads * head_dim == width else head_dim,
        num_kv_heads=None if kv_heads == heads else kv_heads,
        activation="geglu",
        norm="rmsnorm",
        bias=False,
        post_norm=True,
        qk_norm=newer,
        positions="rotary",
        attention_softcap=None if newer else read.optional("attn_logit_softcapping", 50.0),
        logit_softcap=_cap(read) if newer else read.optional("final_logit_softcapping", 30.0),
        vocab_size=read.read("vocab_size", defaults.vocab_size),
        seq_len=read.read("max_position_embeddings", defaults.seq_len),
        tied=read.read("tie_word_embeddings", True),
    )
    query = read.read("query_pre_attn_scalar", 256.0)
    return Published(model, query_scale=(head_dim / query) ** 0.5)


def _kind(window: int | None) -> str:
    return FULL if window is None else SLIDING


def _cap(read: Fields) -> float | None:
    """Gemma 3's cap of logits: none where it is left out."""
    return (
        None
        if read.fields.get("final_logit_softcapping") is None
        else read.read("final_logit_softcapping", 1.0)
    )


def _rope_of_layers(read: Fields, windows: dict[str, Any]) -> dict[str, Any]:
    """Our fields of rotary positions where layers with a window may have their own.

    Args:
        read: fields of the config.
        windows: ours of what each layer sees.
    """
    parameters = read.fields.get("rope_parameters")
    if parameters is None:
        local = {"rope_theta": read.read("rope_local_base_freq", 1e4)}
        scaling = read.fields.get("rope_scaling") or {}
        parameters = {FULL: {"rope_theta": read.read("rope_theta", 1e6), **scaling}, SLIDING: local}
    if not isinstance(parameters, dict) or not all(
        isinstance(parameters.get(kind), dict) for kind in (FULL, SLIDING)
    ):
        raise ConfigError(
            f"config.json: rope_parameters is {shown(parameters)}, not objects {FULL} and {SLIDING}"
        )
    full, local = (
        rope(Fields({"rope_parameters": {"rope_theta": theta, **parameters[kind]}}))
        for kind, theta in ((FULL, 1e6), (SLIDING, 1e4))
    )
    if windows["window"] is None or local == full:
        return full
    if windows.get("full_every") is None:
        return local
    if "rope_scaling" in local:
        raise ConfigError(
            f"config.json: rope_parameters of {SLIDING} scale frequencies, which in our models only blocks without a window may"
        )
    return {**full, "window_theta": local["rope_theta"]}


def _windows(read: Fields, depth: int, pattern: int) -> dict[str, Any]:
    """Our fields of what each layer sees; every so-many-th has no window unless layer_types says."""
    window = read.optional("sliding_window", 4096)
    kinds = read.fields.get("layer_types")
    if kinds is None:
        pattern = read.read("sliding_window_pattern", pattern)
        kinds = [(SLIDING, FULL)[(i + 1) % pattern == 0] for i in range(depth)]
    if (
        not isinstance(kinds, list)
        or len(kinds) != depth
        or not {FULL, SLIDING}.issuperset(map(str, kinds))
    ):
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
