"""Model configs in the form of Hugging Face's `transformers`: GPT-2, Llama, ViT, MBart and T5, both ways.

A decoder with learned positions is a GPT-2, one with rotary positions a Llama; an encoder-decoder with learned positions is an
MBart, one with relative positions a T5. What a family's code cannot compute is refused with its reason, in both directions.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from mupax.disk import shown
from mupax.zoo.configs import ConfigError, DecoderConfig, ViTConfig
from mupax.zoo.encoder_decoder.config import EncoderDecoderConfig
from mupax.zoo.families import ImageModel
from mupax.zoo.fields import Fields
from mupax.zoo.huggingface import encoder_decoder
from mupax.zoo.huggingface.architectures import (
    ACTIVATIONS,
    ARCHITECTURES,
    DEFAULTS,
    DROPOUTS,
    FIELDS,
    STACK,
    Family,
    Published,
    family_of,
)
from mupax.zoo.transformer import TransformerConfig

_QKV = tuple(f"block.attention.{name}_bias" for name in ("query", "key", "value"))
_ATTENTION = (*_QKV, "block.attention.out_bias")
_MLP = tuple(f"block.mlp.{name}_bias" for name in ("up", "gate", "down"))


def to_huggingface(
    model: TransformerConfig, *, dtype: str = "float32", tokens: Mapping[str, int | None] | None = None
) -> dict[str, Any]:
    """config.json of a model.

    Args:
        model: the model.
        dtype: type of the stored weights.
        tokens: ids by config.json's names of them, such as eos_token_id, where generation stops; the others are none.

    Raises:
        ConfigError: the family's code cannot compute this model; the text has every reason.
    """
    family = family_of(model)
    if reasons := _reasons(model):
        raise ConfigError(f"transformers' {family} cannot hold this model: {'; '.join(reasons)}")
    sizes = model.sizes()
    shared = {
        "model_type": family,
        "architectures": [ARCHITECTURES[family]],
        "dtype": dtype,
        **{theirs: getattr(model, ours) for theirs, ours in zip(FIELDS[family], STACK, strict=False)},
        **dict.fromkeys(DROPOUTS[family], 0.0),
    }
    tied = {"vocab_size": sizes.get("vocab"), "tie_word_embeddings": model.tied_readout is not None}
    if isinstance(model, EncoderDecoderConfig):
        return {
            **shared,
            **tied,
            **encoder_decoder.fields_of(model),
            **_ids("decoder_start", "forced_eos"),
            **(tokens or {}),
        }
    activation = "silu" if model.gated else next(name for name, ours in ACTIVATIONS.items() if ours == model.activation)
    if isinstance(model, ImageModel):
        labels = range(model.num_classes)
        return {
            **shared,
            "image_size": model.image_size,
            "patch_size": model.patch_size,
            "num_channels": model.channels,
            "hidden_act": activation,
            "qkv_bias": True,
            "id2label": {str(i): f"LABEL_{i}" for i in labels},
            "label2id": {f"LABEL_{i}": i for i in labels},
        }
    text = {**shared, **tied, **_ids(), **(tokens or {})}
    if family == "gpt2":
        return {**text, "n_positions": sizes["position"], "activation_function": activation}
    return {
        **text,
        "head_dim": model.heads_dim,
        "num_key_value_heads": model.kv_heads,
        "hidden_act": activation,
        "max_position_embeddings": sizes["position"],
        "attention_bias": model.bias,
        "mlp_bias": model.bias,
        # The first is read by transformers 5, the second by those before.
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rotary_theta},
        "rope_theta": model.rotary_theta,
    }


def from_huggingface(fields: Mapping[str, Any]) -> Published:
    """The model that a config.json describes. Fields left out have the defaults of `transformers`.

    Raises:
        ConfigError: another architecture, a feature that our models lack, or a value of the wrong kind.
    """
    kind = fields.get("model_type")
    if kind == "bart":
        raise ConfigError(f"config.json: {encoder_decoder.POST_NORM}")
    if not isinstance(kind, str) or kind not in _READ:
        raise ConfigError(f"config.json: model_type is {shown(kind)}; only {', '.join(_READ)} are read")
    published = _READ[kind](Fields(fields))
    if reasons := _reasons(published.model):
        raise ConfigError(f"config.json: {'; '.join(reasons)}")
    return published


def _reasons(model: TransformerConfig) -> list[str]:
    """Why the code of the model's family would compute another function; empty where it would not."""
    family = family_of(model)
    width, heads, kv_heads, size = model.width, model.num_heads, model.kv_heads, model.heads_dim
    refused = {
        "model.centered trains the difference of two networks, and a file holds one": model.centered,
        "model.qk_norm normalizes queries and keys, which it does not": model.qk_norm,
        "model.value_dim makes values of another size than queries, which it does not": model.value_dim is not None,
        "model.branch_activation acts on what branches read, which it does not": model.branch_activation != "none",
        "model.readout_bias adds to the logits, which it does not": family != "vit"
        and "readout_bias" in model.parameters(),
    }
    if isinstance(model, EncoderDecoderConfig):
        refused |= encoder_decoder.reasons(model)
    elif family == "llama":
        kinds = f"with rotary positions it needs rmsnorm and swiglu, not {model.norm} and {model.activation}"
        refused[kinds] = model.norm != "rmsnorm" or model.activation != "swiglu"
        refused[f"it needs model.width {width} to be a multiple of model.num_heads {heads}"] = bool(width % heads)
    else:
        refused |= {
            "it has LayerNorm, which subtracts the mean, and model.norm is rmsnorm": model.norm != "layernorm",
            f"its MLP has no gate, and model.activation is {model.activation}": model.gated,
            f"it has no grouped queries, and model.num_kv_heads is {kv_heads} of {heads} heads": kv_heads != heads,
            f"its heads fill the width, and {heads} heads of {size} are not {width}": heads * size != width,
            "it classifies by the CLS token, and model.pool is mean; train with --model.pool cls to export": (
                family == "vit" and "cls" not in model.parameters()
            ),
        }
    return [reason for reason, holds in refused.items() if holds]


def _stack(read: Fields, family: Family) -> dict[str, Any]:
    """Our fields of the residual stack."""
    stack: dict[str, Any] = {}
    for ours, theirs, default in zip(STACK, FIELDS[family], DEFAULTS[family], strict=True):
        stack[ours] = read.read(theirs, default or 4 * stack["width"])
    stack["mlp_ratio"] = stack.pop("mlp_dim") / stack["width"]
    return stack


def _gpt2(read: Fields) -> Published:
    read.refuse("scale_attn_weights", True, "attention logits without head_dim^-1/2")
    read.refuse("scale_attn_by_inverse_layer_idx", False, "attention logits divided by the layer's number")
    read.refuse("add_cross_attention", False, "attention to an encoder")
    model = DecoderConfig(
        **_stack(read, "gpt2"),
        activation=read.choice("activation_function", "gelu_new", ACTIVATIONS),
        vocab_size=read.read("vocab_size", 50257),
        seq_len=read.read("n_positions", 1024),
        tied=read.read("tie_word_embeddings", True),
    )
    return Published(model, frozenset())


def _llama(read: Fields) -> Published:
    if read.read("hidden_act", "silu") not in ("silu", "swish"):
        raise ConfigError(f"config.json: hidden_act is {shown(read.fields['hidden_act'])}, and our gated MLP has silu")
    stack = _stack(read, "llama")
    width, heads = stack["width"], stack["num_heads"]
    head_dim, kv_heads = read.read("head_dim", max(1, width // heads)), read.read("num_key_value_heads", heads)
    attention, mlp = read.read("attention_bias", False), read.read("mlp_bias", False)
    model = DecoderConfig(
        **stack,
        head_dim=None if heads * head_dim == width else head_dim,
        num_kv_heads=None if kv_heads == heads else kv_heads,
        activation="swiglu",
        norm="rmsnorm",
        bias=attention or mlp,
        positions="rotary",
        rope_theta=_rope_theta(read),
        vocab_size=read.read("vocab_size", 32000),
        seq_len=read.read("max_position_embeddings", 2048),
        tied=read.read("tie_word_embeddings", False),
    )
    zeros = () if attention == mlp else _MLP if attention else _ATTENTION
    return Published(model, frozenset(zeros))


def _vit(read: Fields) -> Published:
    labels = read.fields.get("id2label")
    model = ViTConfig(
        **_stack(read, "vit"),
        activation=read.choice("hidden_act", "gelu", ACTIVATIONS),
        image_size=read.side("image_size", 224),
        patch_size=read.side("patch_size", 16),
        channels=read.read("num_channels", 3),
        num_classes=len(labels) if isinstance(labels, dict) and labels else read.read("num_labels", 2),
        pool="cls",
    )
    return Published(model, frozenset() if read.read("qkv_bias", True) else frozenset(_QKV))


_READ = {
    "gpt2": _gpt2, "llama": _llama, "vit": _vit, "mbart": encoder_decoder.mbart,
    "t5": functools.partial(encoder_decoder.t5, newer=False), "mt5": functools.partial(encoder_decoder.t5, newer=True),
}  # fmt: skip
"""Every model_type that is read."""


def _ids(*others: str) -> dict[str, None]:
    return dict.fromkeys(f"{name}_token_id" for name in ("bos", "eos", "pad", *others))


def _rope_theta(read: Fields) -> float:
    """The base of rotary positions; other kinds than the plain one are refused."""
    parameters, scaling = read.fields.get("rope_parameters"), read.fields.get("rope_scaling")
    for rope in (parameters, scaling):
        if rope is None:
            continue
        if not isinstance(rope, dict):
            raise ConfigError(f"config.json: rotary parameters are {shown(rope)}, not an object")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise ConfigError(
                f"config.json: rotary positions of type {shown(kind)} change the frequencies with the context; "
                "our models have the plain ones (type default) only"
            )
    if any(holder.get("partial_rotary_factor", 1) != 1 for holder in (parameters or {}, scaling or {}, read.fields)):
        raise ConfigError("config.json: partial_rotary_factor turns only a part of each head; ours turn all of it")
    return Fields({**read.fields, **(parameters or {})}).read("rope_theta", 10_000.0)
