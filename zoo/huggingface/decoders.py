"""Configs of decoders with rotary positions in the form of `transformers`.

Llama is the plainest of them. Mistral has a window, Qwen2 biases of queries, keys and values, Qwen3
norms of queries and keys, and GPT-NeoX parallel branches. A decoder of ours is written as the
plainest family that has all its features. `experts` has the fields of Mixtral and Qwen3-MoE.

Gemma 2 and 3 have norms after the branches, windows in some layers and a gated GELU. Gemma 2 caps
logits. Gemma 3 has norms of queries and keys, and another wavelength of positions in layers with a
window. Gemma's code takes gains as 1 + w, multiplies looked-up embeddings by width^1/2, and
multiplies attention logits by query_pre_attn_scalar^-1/2. `names` and `weights` fold these factors
into the parameters.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from mupax.disk import shown
from mupax.zoo.configs import ConfigError, DecoderConfig
from mupax.zoo.fields import Fields
from mupax.zoo.huggingface import experts
from mupax.zoo.huggingface.architectures import (
    ACTIVATION_NAMES,
    ACTIVATIONS,
    Family,
    Published,
    read_stack,
)

ATTENTION_BIASES = frozenset(
    f"block.attention.{name}_bias" for name in ("query", "key", "value", "out")
)
MLP_BIASES = frozenset(f"block.mlp.{name}_bias" for name in ("up", "gate", "down"))

SLIDING = "sliding_attention"
FULL = "full_attention"


class Defaults(NamedTuple):
    """Values of a decoder's fields that a config.json leaves out."""

    vocab_size: int
    seq_len: int
    kv_heads: int | None = None
    """`None` is as many as query heads."""
    head_dim: int | None = None
    """`None` is such that the heads fill the width."""
    window: int | None = None


LIKE_LLAMA: dict[Family, Defaults] = {
    "llama": Defaults(32000, 2048),
    "mistral": Defaults(32000, 131072, 8, window=4096),
    "qwen2": Defaults(151936, 32768, 32),
    "qwen3": Defaults(151936, 32768, 32, 128),
    "mixtral": Defaults(32000, 131072, 8),
    "qwen3_moe": Defaults(151936, 32768, 4),
}
"""Families that `read_llama` reads, with their defaults."""


def family_of(model: DecoderConfig) -> Family:
    """Return the family in whose layout a decoder with rotary positions is written.

    It is the plainest family that has the decoder's main features. It may lack other features of
    the decoder, which `reasons` then names.
    """
    is_layernorm_without_gate = model.norm == "layernorm" and not model.gated
    if model.parallel or model.rotary_fraction != 1 or is_layernorm_without_gate:
        return "gpt_neox"
    # Of the supported families, only Gemma has soft caps, norms after branches, or full attention
    # in every n-th layer.
    has_softcap = model.attention_softcap or model.logit_softcap
    if model.post_norm or has_softcap or model.full_every or model.window_theta:
        return "gemma3_text" if model.qk_norm else "gemma2"
    if model.experts is not None:
        return "qwen3_moe" if model.qk_norm else "mixtral"
    if model.qk_norm:
        return "qwen3"
    if model.qkv_bias:
        return "qwen2"
    return "llama" if model.window is None else "mistral"


def reasons(model: DecoderConfig, family: Family) -> list[str]:
    """Return the reasons why the code of `transformers` cannot compute a decoder, `[]` if it can.

    Args:
        family: Result of `family_of`.
    """
    if family == "gpt_neox":
        return _reasons_of_gpt_neox(model)
    problems = []
    if model.norm != "rmsnorm" or model.activation != "swiglu":
        problems.append(
            "with rotary positions it needs rmsnorm and swiglu, "
            f"not {model.norm} and {model.activation}"
        )
    if family == "llama" and model.width % model.num_heads:
        problems.append(
            f"it needs model.width {model.width} to be a multiple of "
            f"model.num_heads {model.num_heads}"
        )
    if family != "llama" and model.bias:
        problems.append(
            "model.bias adds to every product, which only llama does, "
            "without a window and without model.qk_norm"
        )
    if model.qk_norm and model.qkv_bias:
        problems.append("model.qk_norm with model.qkv_bias is two families in one")
    if model.qk_norm_kind != "rmsnorm":
        problems.append(
            "model.qk_norm_kind layernorm subtracts the mean of queries and keys, which it does not"
        )
    if family == "mixtral" and model.qkv_bias:
        problems.append("model.qkv_bias adds to queries, keys and values, which it does not")
    return problems + experts.reasons(model, family)


def _reasons_of_gpt_neox(model: DecoderConfig) -> list[str]:
    """Return the reasons why GPT-NeoX's code cannot compute a model, `[]` if it can."""
    width = model.width
    num_heads = model.num_heads
    problems = []
    if model.norm != "layernorm":
        problems.append(
            f"it has LayerNorm, which subtracts the mean, and model.norm is {model.norm}"
        )
    if model.gated:
        problems.append(f"its MLP has no gate, and model.activation is {model.activation}")
    if model.kv_heads != num_heads:
        problems.append(
            "it has no grouped queries, and model.num_kv_heads is "
            f"{model.kv_heads} of {num_heads} heads"
        )
    if num_heads * model.heads_dim != width:
        problems.append(
            f"its heads fill the width, and {num_heads} heads of {model.heads_dim} are not {width}"
        )
    if model.window is not None:
        problems.append("model.window hides all but the last positions, which it does not")
    return problems


def fields_of(model: DecoderConfig, family: Family) -> dict[str, Any]:
    """Return the fields of a decoder's config.json that not all families have.

    Args:
        family: Result of `family_of`.
    """
    if family == "gpt_neox":
        return _fields_of_gpt_neox(model)
    rope = rope_fields(model)
    fields = {
        "head_dim": model.heads_dim,
        "num_key_value_heads": model.kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": model.seq_len,
        # transformers 5 reads rope_parameters. Older versions read rope_theta and rope_scaling.
        "rope_parameters": rope,
        "rope_theta": model.rotary_theta,
    }
    if model.rotary_scaling is not None:
        fields["rope_scaling"] = rope
    if family == "llama":
        fields["attention_bias"] = model.bias
        fields["mlp_bias"] = model.bias
        return fields

    fields["sliding_window"] = model.window
    fields |= experts.fields_of(model, family)
    if family in ("qwen2", "qwen3", "qwen3_moe"):
        fields["use_sliding_window"] = model.window is not None
        fields["max_window_layers"] = 0
    if family in ("qwen2", "qwen3"):
        layer_type = FULL if model.window is None else SLIDING
        fields["layer_types"] = [layer_type] * model.depth
    if family in ("qwen3", "qwen3_moe"):
        fields["attention_bias"] = False
    return fields


def _fields_of_gpt_neox(model: DecoderConfig) -> dict[str, Any]:
    """Return the fields of config.json that are GPT-NeoX's alone."""
    rope = rope_fields(model)
    rope["partial_rotary_factor"] = model.rotary_fraction
    fields = {
        "hidden_act": ACTIVATION_NAMES[model.activation],
        "max_position_embeddings": model.seq_len,
        "use_parallel_residual": model.parallel,
        "attention_bias": True,
        "rope_parameters": rope,
        "rotary_pct": model.rotary_fraction,
        "rotary_emb_base": model.rotary_theta,
    }
    if model.rotary_scaling is not None:
        fields["rope_scaling"] = rope
    return fields


def rope_fields(model: DecoderConfig) -> dict[str, Any]:
    """Return the object `rope_parameters` of config.json, which describes rotary positions."""
    fields: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rotary_theta}
    if model.rotary_scaling is not None:
        fields["rope_type"] = model.rope_scaling
        fields["factor"] = model.rope_factor
    if model.rope_scaling == "llama3":
        fields["low_freq_factor"] = model.rope_low_freq_factor
        fields["high_freq_factor"] = model.rope_high_freq_factor
        fields["original_max_position_embeddings"] = model.rope_original_len
    return fields


def read_llama(config: Fields, family: Family) -> Published:
    """Return the model that the config.json of a Llama, or of a family like Llama, describes.

    Args:
        family: Key of `LIKE_LLAMA`.

    Raises:
        ConfigError: The model has a feature that ours lack, or a field is wrong.
    """
    if config.read("hidden_act", "silu") not in ("silu", "swish"):
        raise ConfigError(
            f"config.json: hidden_act is {shown(config.fields['hidden_act'])}, "
            "and our gated MLP has silu"
        )
    defaults = LIKE_LLAMA[family]
    stack = read_stack(config, family)
    width = stack["width"]
    heads = stack["num_heads"]
    mlp_dim = stack.pop("mlp_dim")
    stack["mlp_ratio"] = mlp_dim / width
    stack |= experts.read_experts(config, family, width, mlp_dim)
    head_dim = config.read("head_dim", defaults.head_dim or max(1, width // heads))
    # null means one key head per query head.
    kv_heads = config.optional("num_key_value_heads", defaults.kv_heads or heads) or heads

    attention_bias = False
    mlp_bias = False
    has_qk_norm = family in ("qwen3", "qwen3_moe")
    if family == "llama":
        attention_bias = config.read("attention_bias", False)
        mlp_bias = config.read("mlp_bias", False)
    elif has_qk_norm:
        config.refuse(
            "attention_bias", False, "biases of attention beside norms of queries and keys"
        )

    rope_config = config
    if family == "mixtral":
        rope_config = Fields({"rope_theta": 1e6, **config.fields})
    rope = read_rope(rope_config)
    window = _read_window(config, family, stack["depth"])
    model = DecoderConfig(
        **stack,
        **rope,
        head_dim=None if heads * head_dim == width else head_dim,
        num_kv_heads=None if kv_heads == heads else kv_heads,
        activation="swiglu",
        norm="rmsnorm",
        bias=attention_bias or mlp_bias,
        qkv_bias=family == "qwen2",
        qk_norm=has_qk_norm,
        positions="rotary",
        window=window,
        vocab_size=config.read("vocab_size", defaults.vocab_size),
        seq_len=config.read("max_position_embeddings", defaults.seq_len),
        tied=config.read("tie_word_embeddings", False),
    )
    # Our models have the biases of both branches or none. Biases that the file lacks are set to
    # zero.
    zeros = frozenset()
    if attention_bias and not mlp_bias:
        zeros = MLP_BIASES
    elif mlp_bias and not attention_bias:
        zeros = ATTENTION_BIASES
    return Published(model, zeros)


def read_gpt_neox(config: Fields) -> Published:
    """Return the model that the config.json of a GPT-NeoX describes.

    Raises:
        ConfigError: The model has a feature that ours lack, or a field is wrong.
    """
    stack = read_stack(config, "gpt_neox")
    stack["mlp_ratio"] = stack.pop("mlp_dim") / stack["width"]
    # The versions of transformers write the rotated share of a head to different fields.
    fraction = config.read("rotary_pct", 0.25)
    places = [config.fields]
    for name in ("rope_parameters", "rope_scaling"):
        places.append(config.fields.get(name) or {})
    for place in places:
        if isinstance(place, dict):
            fraction = Fields(place).read("partial_rotary_factor", fraction)
    rope_config = Fields(
        {
            # Older versions call it rotary_emb_base. `rope_theta` in config.json overrides that
            # name.
            "rope_theta": config.fields.get("rotary_emb_base"),
            **config.fields,
            "partial_rotary_factor": None,
        }
    )
    rope = read_rope(rope_config, partial=True)
    model = DecoderConfig(
        **stack,
        **rope,
        rotary_fraction=fraction,
        parallel=config.read("use_parallel_residual", True),
        activation=config.choice("hidden_act", "gelu", ACTIVATIONS),
        positions="rotary",
        vocab_size=config.read("vocab_size", 50432),
        seq_len=config.read("max_position_embeddings", 2048),
        tied=config.read("tie_word_embeddings", False),
    )
    has_attention_bias = config.read("attention_bias", True)
    return Published(model, frozenset() if has_attention_bias else ATTENTION_BIASES)


def _read_window(config: Fields, family: Family, depth: int) -> int | None:
    """Return the window that every block has, in positions, or `None` if no block has one.

    Raises:
        ConfigError: Some blocks have a window and others have none, or a field is wrong.
    """
    if family == "llama":
        return None
    if family in ("mistral", "mixtral"):
        return config.optional("sliding_window", LIKE_LLAMA[family].window)
    if not config.read("use_sliding_window", False):
        return None
    window = config.optional("sliding_window", 4096)
    if family == "qwen3_moe":
        # Qwen3-MoE's code applies the window in every layer.
        return window

    # Qwen's code has no window in the first `max_window_layers` layers.
    num_full = depth
    if window:
        # 0 is allowed and gives every layer the window, but `read` accepts only positive numbers.
        has_zero = config.fields.get("max_window_layers") == 0
        num_full = 0 if has_zero else min(depth, config.read("max_window_layers", 28))
    default_types = [FULL] * num_full + [SLIDING] * (depth - num_full)
    layer_types = config.fields.get("layer_types") or default_types
    check_layer_types(layer_types, depth)
    if len(set(layer_types)) > 1:
        raise ConfigError(
            f"config.json: layer_types has both {FULL} and {SLIDING} in an order "
            "that our models do not have"
        )
    return window if layer_types[0] == SLIDING else None


def check_layer_types(layer_types: Any, depth: int) -> None:
    """Raise ConfigError unless `layer_types` is a list of `FULL` or `SLIDING` for every layer."""
    is_list = isinstance(layer_types, list) and len(layer_types) == depth
    if not is_list or not {FULL, SLIDING}.issuperset(map(str, layer_types)):
        raise ConfigError(
            f"config.json: layer_types is {shown(layer_types)}, "
            f"not {FULL} or {SLIDING} for each of {depth} layers"
        )


def read_rope(config: Fields, *, partial: bool = False) -> dict[str, Any]:
    """Return the fields of `DecoderConfig` for rotary positions: theta and any scaling.

    The share of a head that is rotated is not among them.

    Args:
        partial: Accept an architecture that rotates a part of each head. The default is False.

    Raises:
        ConfigError: The type of the positions is not default, linear or llama3, or a field is
            missing or has a wrong value.
    """
    parameters = config.fields.get("rope_parameters")
    scaling = config.fields.get("rope_scaling")
    for value in (parameters, scaling):
        if value is not None and not isinstance(value, dict):
            raise ConfigError(f"config.json: rotary parameters are {shown(value)}, not an object")
    merged = {**(parameters or {}), **(scaling or {})}
    rope_type = merged.get("rope_type", merged.get("type", "default"))
    factors = [fields.read("partial_rotary_factor", 1.0) for fields in (Fields(merged), config)]
    if factors != [1.0, 1.0] and not partial:
        raise ConfigError(
            "config.json: partial_rotary_factor turns only a part of each head; ours turn all of it"
        )
    if rope_type not in ("default", "linear", "llama3"):
        raise ConfigError(
            f"config.json: rotary positions of type {shown(rope_type)} change frequencies or "
            "logits with the context; our models have the types default, linear and llama3"
        )

    theta = Fields({**config.fields, **merged}).read("rope_theta", 10_000.0)
    rope: dict[str, Any] = {"rope_theta": theta}
    if rope_type == "default":
        return rope
    needed = {"rope_factor": "factor"}
    if rope_type == "llama3":
        needed["rope_low_freq_factor"] = "low_freq_factor"
        needed["rope_high_freq_factor"] = "high_freq_factor"
        needed["rope_original_len"] = "original_max_position_embeddings"
    for name, field in needed.items():
        if merged.get(field) is None:
            raise ConfigError(
                f"config.json: rotary positions of type {rope_type} need {field}, which is missing"
            )
        # The field is present, so the default is never used. It only fixes the type.
        default = 8192 if name == "rope_original_len" else 8.0
        rope[name] = Fields(merged).read(field, default)
    rope["rope_scaling"] = rope_type
    return rope


_GEMMA_DEFAULTS: dict[Family, Defaults] = {
    "gemma2": Defaults(256000, 8192, 4, 256, 4096),
    "gemma3_text": Defaults(262208, 131072, 4, 256, 4096),
}
_GEMMA_GELUS = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")
"""Names in config.json of the GELU in tanh form. The first one is written."""


def reasons_of_gemma(model: DecoderConfig, family: Family) -> list[str]:
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
            "it has one wavelength for all layers, and model.window_theta is another for some"
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


def fields_of_gemma(model: DecoderConfig, family: Family) -> dict[str, Any]:
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
        "hidden_activation": _GEMMA_GELUS[0],
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
    defaults = _GEMMA_DEFAULTS[family]
    is_gemma3 = family == "gemma3_text"
    _check_gemma(config, family)
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


def _check_gemma(config: Fields, family: Family) -> None:
    """Raise ConfigError if config.json has a feature that Gemma's code or our models lack.

    These are a soft cap of attention logits in Gemma 3, another activation than GELU in tanh form,
    biases of attention, and attention to later tokens.
    """
    softcap = config.fields.get("attn_logit_softcapping")
    if family == "gemma3_text" and softcap is not None:
        raise ConfigError(
            f"config.json: attn_logit_softcapping is {shown(softcap)}, and Gemma 3's code in "
            "transformers ignores it; write null, or remove it"
        )
    for name in ("hidden_activation", "hidden_act"):
        activation = config.read(name, _GEMMA_GELUS[0])
        if activation not in _GEMMA_GELUS:
            raise ConfigError(
                f"config.json: {name} is {shown(activation)}, "
                f"and its gated MLP has {_GEMMA_GELUS[0]} in our models"
            )
    config.refuse("attention_bias", False, "biases of attention")
    config.refuse("use_bidirectional_attention", False, "attention to later tokens")


def _read_rope_by_layer_type(config: Fields, windows: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of our config that describe Gemma 3's rotary positions.

    Layers with a window may have a wavelength of their own.

    Args:
        windows: Fields of our config that say which layers have a window (`_read_windows`).

    Raises:
        ConfigError: The object for a type of layer is missing or wrong, or layers with a window
            have scaled frequencies, which our config cannot express.
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
        default_period: Number n, if every n-th layer has no window. `sliding_window_pattern` of
            config.json overrides it, and `layer_types` overrides both.

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
