"""Configs of Gemma 2 and 3 in the form of `transformers`.

Both have norms after the branches, windows in some layers and a gated GELU. Gemma 2 caps logits.
Gemma 3 has norms of queries and keys, and another wavelength of positions in layers with a window.

Gemma's code takes gains as 1 + w, multiplies looked-up embeddings by width^1/2, and multiplies
attention logits by query_pre_attn_scalar^-1/2. `names` and `weights` fold these factors into the
parameters.
"""

from __future__ import annotations

from typing import Any

from mupax.disk import shown
from mupax.zoo.configs import ConfigError, DecoderConfig
from mupax.zoo.fields import Fields
from mupax.zoo.huggingface.architectures import Family, Published, read_stack
from mupax.zoo.huggingface.decoders import (
    FULL,
    SLIDING,
    Defaults,
    check_layer_types,
    read_rope,
    rope_fields,
)

DEFAULTS: dict[Family, Defaults] = {
    "gemma2": Defaults(256000, 8192, 4, 256, 4096),
    "gemma3_text": Defaults(262208, 131072, 4, 256, 4096),
}
GELUS = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")
"""Names in config.json of the GELU in tanh form. The first one is written."""


def reasons(model: DecoderConfig, family: Family) -> list[str]:
    """Return the reasons why Gemma's code cannot compute a model, `[]` if it can.

    Args:
        family: "gemma2" or "gemma3_text".
    """
    problems = []
    if model.norm != "rmsnorm" or model.activation != "geglu":
        problems.append(f"it needs rmsnorm and geglu, not {model.norm} and {model.activation}")
    if not model.post_norm:
        problems.append("it normalizes what branches write, and model.post_norm does not")
    if model.window_theta is not None and family == "gemma2":
        problems.append(
            "model.window_theta is of layers with a window alone, and it has one wavelength"
        )
    if model.attention_softcap is not None and family == "gemma3_text":
        problems.append("model.attention_softcap bounds attention logits, which it does not")
    if model.qk_norm_kind != "rmsnorm":
        problems.append(
            "model.qk_norm_kind layernorm subtracts the mean of queries and keys, which it does not"
        )
    if model.bias:
        problems.append("model.bias adds to every product, which it does not")
    if model.qkv_bias:
        problems.append("model.qkv_bias adds to queries, keys and values, which it does not")
    if model.width % model.num_heads:
        problems.append(
            f"it needs model.width {model.width} to be a multiple of "
            f"model.num_heads {model.num_heads}"
        )
    return problems


def fields_of(model: DecoderConfig, family: Family) -> dict[str, Any]:
    """Return the fields of a Gemma's config.json that not all families have.

    Args:
        family: "gemma2" or "gemma3_text".
    """
    rope = rope_fields(model)
    fields: dict[str, Any] = {}
    # Gemma 3 has an object of rope parameters for each type of layer, Gemma 2 one for all layers.
    if family == "gemma3_text":
        windowed_rope = rope
        if model.window_theta:
            windowed_rope = {"rope_type": "default", "rope_theta": model.window_theta}
        fields["rope_parameters"] = {SLIDING: windowed_rope, FULL: rope}
    else:
        fields["rope_parameters"] = rope
        fields["rope_theta"] = model.rotary_theta
        if model.rotary_scaling is not None:
            fields["rope_scaling"] = rope

    layer_types = []
    specs = model.attention_specs
    for layer in range(model.depth):
        window = specs[layer % len(specs)].window
        layer_types.append(FULL if window is None else SLIDING)
    return {
        **fields,
        "head_dim": model.heads_dim,
        "query_pre_attn_scalar": model.heads_dim,
        "num_key_value_heads": model.kv_heads,
        "hidden_activation": GELUS[0],
        "max_position_embeddings": model.seq_len,
        "sliding_window": model.window,
        "layer_types": layer_types,
        "attn_logit_softcapping": model.attention_softcap,
        "final_logit_softcapping": model.logit_softcap,
        "attention_bias": False,
    }


def read_gemma(config: Fields, family: Family) -> Published:
    """Return the model that the config.json of a Gemma 2 or 3 describes.

    `Published.query_scale` has the factor by which Gemma's attention logits differ from ours.

    Args:
        family: "gemma2" or "gemma3_text".

    Raises:
        ConfigError: The model has a feature that ours lack, or a field is wrong.
    """
    defaults = DEFAULTS[family]
    is_gemma3 = family == "gemma3_text"
    _check_supported(config, family)
    stack = read_stack(config, family)
    width = stack["width"]
    heads = stack["num_heads"]
    depth = stack["depth"]
    stack["mlp_ratio"] = stack.pop("mlp_dim") / width
    head_dim = config.read("head_dim", defaults.head_dim or 0)
    kv_heads = config.read("num_key_value_heads", defaults.kv_heads or heads)

    windows = _read_windows(config, depth, 6 if is_gemma3 else 2)
    if is_gemma3:
        rope = _read_rope_by_layer_type(config, windows)
        attention_softcap = None
        logit_softcap = None
        # A missing or null field means no soft cap. The default is never used and only fixes the
        # type.
        if config.fields.get("final_logit_softcapping") is not None:
            logit_softcap = config.read("final_logit_softcapping", 1.0)
    else:
        rope = read_rope(config)
        attention_softcap = config.optional("attn_logit_softcapping", 50.0)
        logit_softcap = config.optional("final_logit_softcapping", 30.0)

    model = DecoderConfig(
        **stack,
        **rope,
        **windows,
        head_dim=None if heads * head_dim == width else head_dim,
        num_kv_heads=None if kv_heads == heads else kv_heads,
        activation="geglu",
        norm="rmsnorm",
        bias=False,
        post_norm=True,
        qk_norm=is_gemma3,
        positions="rotary",
        attention_softcap=attention_softcap,
        logit_softcap=logit_softcap,
        vocab_size=config.read("vocab_size", defaults.vocab_size),
        seq_len=config.read("max_position_embeddings", defaults.seq_len),
        tied=config.read("tie_word_embeddings", True),
    )
    # Gemma's code scales logits by query_pre_attn_scalar^-1/2, other attention by head_dim^-1/2.
    query_scalar = config.read("query_pre_attn_scalar", 256.0)
    return Published(model, query_scale=(head_dim / query_scalar) ** 0.5)


def _check_supported(config: Fields, family: Family) -> None:
    """Raise ConfigError if config.json has a feature that Gemma's code or our models lack.

    These are a soft cap of attention logits in Gemma 3, another activation than GELU in tanh form,
    biases of attention, and attention to later tokens.
    """
    if family == "gemma3_text" and config.fields.get("attn_logit_softcapping") is not None:
        raise ConfigError(
            "config.json: attn_logit_softcapping is given, and Gemma 3's code does not read it"
        )
    for name in ("hidden_activation", "hidden_act"):
        activation = config.read(name, GELUS[0])
        if activation not in GELUS:
            raise ConfigError(
                f"config.json: {name} is {shown(activation)}, "
                f"and its gated MLP has {GELUS[0]} in our models"
            )
    config.refuse("attention_bias", False, "biases of attention")
    config.refuse("use_bidirectional_attention", False, "attention to later tokens")


def _read_rope_by_layer_type(config: Fields, windows: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of our config that describe Gemma 3's rotary positions.

    Layers with a window may have a wavelength of their own.

    Args:
        windows: Fields of our config that say which layers have a window (`_read_windows`).

    Raises:
        ConfigError: The object for a type of layer is missing or wrong, or our config cannot hold
            both.
    """
    parameters = config.fields.get("rope_parameters")
    if parameters is None:
        # Before transformers 5, the fields are at the top level of config.json.
        local_theta = config.read("rope_local_base_freq", 1e4)
        scaling = config.fields.get("rope_scaling") or {}
        if not isinstance(scaling, dict):
            raise ConfigError(f"config.json: rope_scaling is {shown(scaling)}, not an object")
        parameters = {
            FULL: {"rope_theta": config.read("rope_theta", 1e6), **scaling},
            SLIDING: {"rope_theta": local_theta},
        }
    has_both = isinstance(parameters, dict) and all(
        isinstance(parameters.get(layer_type), dict) for layer_type in (FULL, SLIDING)
    )
    if not has_both:
        raise ConfigError(
            f"config.json: rope_parameters is {shown(parameters)}, not objects {FULL} and {SLIDING}"
        )
    full = _read_rope_parameters(parameters[FULL], default_theta=1e6)
    local = _read_rope_parameters(parameters[SLIDING], default_theta=1e4)
    # Our config has one set of rotary fields, and a separate base (`window_theta`) for layers with
    # a window.
    if windows["window"] is None or local == full:
        return full
    if windows.get("full_every") is None:
        return local
    if "rope_scaling" in local:
        raise ConfigError(
            f"config.json: rope_parameters of {SLIDING} scale frequencies, "
            "which in our models only blocks without a window may"
        )
    return {**full, "window_theta": local["rope_theta"]}


def _read_rope_parameters(parameters: dict[str, Any], default_theta: float) -> dict[str, Any]:
    """Return the fields of our config for one object of `rope_parameters`.

    Args:
        default_theta: Base wavelength if the object has no `rope_theta`.
    """
    return read_rope(Fields({"rope_parameters": {"rope_theta": default_theta, **parameters}}))


def _read_windows(config: Fields, depth: int, default_period: int) -> dict[str, Any]:
    """Return the fields of our config that say which layers have a window.

    These are `window`, in positions or `None`, and `full_every` if some layers have no window.

    Args:
        default_period: Every so many layers, one has no window. `sliding_window_pattern` overrides
            the number, and `layer_types` overrides both.

    Raises:
        ConfigError: The layers without a window are not every n-th layer.
    """
    window = config.optional("sliding_window", 4096)
    layer_types = config.fields.get("layer_types")
    if layer_types is None:
        period = config.read("sliding_window_pattern", default_period)
        layer_types = _periodic_layer_types(depth, period)
    check_layer_types(layer_types, depth)
    if window is None or SLIDING not in layer_types:
        return {"window": None}
    if FULL not in layer_types:
        return {"window": window}
    # Our models allow one order only: full attention in every n-th layer, a window in the others.
    full_every = layer_types.index(FULL) + 1
    if full_every < 2 or layer_types != _periodic_layer_types(depth, full_every):
        raise ConfigError(
            f"config.json: layer_types has {FULL} in an order that our models do not have, "
            "in which it is every so-many-th layer"
        )
    return {"window": window, "full_every": full_every}


def _periodic_layer_types(depth: int, period: int) -> list[str]:
    """Return `FULL` for every `period`-th of `depth` layers, and `SLIDING` for the others."""
    return [FULL if (layer + 1) % period == 0 else SLIDING for layer in range(depth)]
