"""Model configs in the form of Hugging Face's `transformers`: GPT-2, Llama and its like, ViT, MBart and T5, both ways.

A decoder with learned positions is a GPT-2, one with rotary positions a Llama or like one (`decoders`); an encoder-decoder with
learned positions is an MBart, one with relative positions a T5. What a family's code cannot compute is refused with its reason,
in both directions.
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
from mupax.zoo.huggingface import decoders, encoder_decoder, experts, gemma
from mupax.zoo.huggingface.architectures import (
    ACTIVATIONS,
    ARCHITECTURES,
    DEFAULTS,
    DINO,
    DROPOUTS,
    FIELDS,
    GEMMA,
    STACK,
    Family,
    Published,
)
from mupax.zoo.huggingface.names import family_of
from mupax.zoo.transformer import TransformerConfig

_QKV = tuple(f"block.attention.{name}_bias" for name in ("query", "key", "value"))


UNLIKE = {
    "gemma3": "an image tower (vision_config); its text model alone is Gemma3ForCausalLM, of model_type gemma3_text",
    "siglip_vision_model": "no classifier, and pools by attention (vision_use_head); SiglipForImageClassification, of model_type siglip, "
    "has the mean",
}
"""Architectures that are refused, and what of theirs."""

DISTILLED = "DeiTForImageClassificationWithTeacher"


def to_huggingface(
    model: TransformerConfig,
    *,
    dtype: str = "float32",
    tokens: Mapping[str, int | list[int] | None] | None = None,
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
        **{
            theirs: getattr(model, ours)
            for theirs, ours in zip(FIELDS[family], STACK, strict=False)
        },
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
    activation = (
        "silu"
        if model.gated
        else next(name for name, ours in ACTIVATIONS.items() if ours == model.activation)
    )
    if isinstance(model, ImageModel):
        labels = range(model.num_classes)
        pixels: dict[str, Any] = {
            "image_size": model.image_size,
            "patch_size": model.patch_size,
            "num_channels": model.channels,
        }
        pixels["hidden_act"] = activation
        if family == "siglip":
            tower = {name: shared.pop(name) for name in (*FIELDS[family], *DROPOUTS[family])}
            pixels = {"vision_config": {**tower, **pixels, "vision_use_head": False}}
        elif family in DINO:
            assert isinstance(model, ViTConfig)
            pixels |= {
                "mlp_ratio": int(model.mlp_ratio),
                "layerscale_value": model.layer_scale or 1.0,
                "use_swiglu_ffn": False,
            }
            pixels |= (
                {"use_mask_token": False}
                if family == "dinov2"
                else {"num_register_tokens": model.registers}
            )
        return {
            **shared,
            **pixels,
            **({"qkv_bias": True} if family != "siglip" else {}),
            "id2label": {str(i): f"LABEL_{i}" for i in labels},
            "label2id": {f"LABEL_{i}": i for i in labels},
        }
    text = {**shared, **tied, **_ids(), **(tokens or {})}
    if family == "gpt2":
        return {**text, "n_positions": sizes["position"], "activation_function": activation}
    assert isinstance(model, DecoderConfig)
    return {
        **text,
        **(
            gemma.fields_of(model, family) if family in GEMMA else decoders.fields_of(model, family)
        ),
    }


def from_huggingface(fields: Mapping[str, Any]) -> Published:
    """The model that a config.json describes. Fields left out have the defaults of `transformers`.

    Raises:
        ConfigError: another architecture, a feature that our models lack, or a value of the wrong kind.
    """
    kind = fields.get("model_type")
    if isinstance(kind, str) and kind in UNLIKE:
        raise ConfigError(
            f"config.json: model_type {kind} has {UNLIKE[kind]}, which our models do not have"
        )
    if quantized := fields.get("quantization_config"):
        method = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized
        raise ConfigError(
            f"config.json: quantization_config is {shown(method)}, and quantized weights are not read; take the weights before it"
        )
    if kind == "bart":
        raise ConfigError(f"config.json: {encoder_decoder.POST_NORM}")
    if not isinstance(kind, str) or kind not in _READ:
        raise ConfigError(
            f"config.json: model_type is {shown(kind)}; only {', '.join(_READ)} are read"
        )
    published = _READ[kind](Fields(fields))
    if reasons := _reasons(published.model):
        raise ConfigError(f"config.json: {'; '.join(reasons)}")
    return published


def _reasons(model: TransformerConfig) -> list[str]:
    """Why the code of the model's family would compute another function; empty where it would not."""
    family = family_of(model)
    width, heads, kv_heads, size = model.width, model.num_heads, model.kv_heads, model.heads_dim
    refused = {
        "model.centered trains the difference of two networks, and a file holds one; train with --model.no-centered to export": model.centered,
        "model.qk_norm normalizes queries and keys, which it does not; train with --model.no-qk-norm "
        "--model.qk-norm-kind rmsnorm to export": model.qk_norm
        and family not in ("qwen3", "gemma3_text", "qwen3_moe"),
        "model.experts routes tokens to MLPs of their own, which it does not": model.experts
        is not None
        and family not in experts.FAMILIES,
        "model.value_dim makes values of another size than queries, which it does not": model.value_dim
        is not None,
        "model.branch_activation acts on what branches read, which it does not; train with "
        "--model.branch-activation none to export": model.branch_activation != "none",
        "model.readout_bias adds to the logits, which it does not; train with --model.no-readout-bias to export": not isinstance(
            model, ImageModel
        )
        and "readout_bias" in model.parameters(),
        "model.parallel has the MLP read what attention reads, which it does not": model.parallel_branches
        and family != "gpt_neox",
        "model.post_norm normalizes what branches write, which it does not": model.post_norms
        and family not in GEMMA,
        "a soft cap bounds logits, which it does not (model.attention_softcap, model.logit_softcap)": isinstance(
            model, DecoderConfig
        )
        and (model.attention_softcap or model.logit_softcap) is not None
        and family not in GEMMA,
    }
    if isinstance(model, EncoderDecoderConfig):
        refused |= encoder_decoder.reasons(model)
    elif isinstance(model, DecoderConfig) and family in GEMMA:
        refused |= gemma.reasons(model, family)
    elif isinstance(model, DecoderConfig) and model.rotary_theta is not None:
        refused |= decoders.reasons(model, family)
    else:
        if isinstance(model, ViTConfig):
            refused |= _image_reasons(model, family)
        refused |= {
            "model.window hides all but the last positions, which it does not": model.sight.window
            is not None,
            "it has LayerNorm, which subtracts the mean, and model.norm is rmsnorm": model.norm
            != "layernorm",
            f"its MLP has no gate, and model.activation is {model.activation}": model.gated,
            f"it has no grouped queries, and model.num_kv_heads is {kv_heads} of {heads} heads": kv_heads
            != heads,
            f"its heads fill the width, and {heads} heads of {size} are not {width}": heads * size
            != width,
        }
    return [reason for reason, holds in refused.items() if holds]


def _image_reasons(model: ViTConfig, family: Family) -> dict[str, bool]:
    """The same of what ViTs alone have, and whether it holds."""
    ratio = model.mlp_dim / model.width
    return {
        "model.sincos has positions that are not learned, and its are; `equivalent` writes them as learned ones": model.sincos,
        "model.stem makes patches by convolutions, and it by one matrix; train with --model.stem none to export": model.stem
        is not None,
        "model.pre_logits is a layer before the readout, which it does not have; train with --model.no-pre-logits to export": model.pre_logits,
        "model.layer_scale multiplies what branches write, which it does not": model.layer_scale
        is not None
        and family not in DINO,
        "model.registers are tokens beside the patches, which it does not have": model.registers
        is not None
        and family == "siglip",
        f"it has one token beside the CLS token, and model.registers is {model.registers}": model.registers
        != 1
        and family == "deit",
        f"its mlp_ratio is a whole number, and model.mlp_ratio is {model.mlp_ratio}": ratio
        != int(ratio)
        and family in DINO,
    }


def _stack(read: Fields, family: Family) -> dict[str, Any]:
    """Our fields of the residual stack."""
    stack: dict[str, Any] = {}
    for ours, theirs, default in zip(STACK, FIELDS[family], DEFAULTS[family], strict=True):
        stack[ours] = read.read(theirs, default or 4 * stack["width"])
    size = stack.pop("mlp_dim")
    stack["mlp_ratio"] = size if family in DINO else size / stack["width"]
    return stack


def _gpt2(read: Fields) -> Published:
    read.refuse("scale_attn_weights", True, "attention logits without head_dim^-1/2")
    read.refuse(
        "scale_attn_by_inverse_layer_idx", False, "attention logits divided by the layer's number"
    )
    read.refuse("add_cross_attention", False, "attention to an encoder")
    model = DecoderConfig(
        **_stack(read, "gpt2"),
        activation=read.choice("activation_function", "gelu_new", ACTIVATIONS),
        vocab_size=read.read("vocab_size", 50257),
        seq_len=read.read("n_positions", 1024),
        tied=read.read("tie_word_embeddings", True),
    )
    return Published(model, frozenset())


def _vit(read: Fields, family: Family) -> Published:
    labels, dino = read.fields.get("id2label"), family in DINO
    named = read.fields.get("architectures")
    if isinstance(named, list) and DISTILLED in named:
        raise ConfigError(
            f"config.json: {DISTILLED} takes the mean of two classifiers (distillation_classifier), which our models do not have; "
            "DeiTForImageClassification reads the CLS token's alone"
        )
    read.refuse(
        "use_swiglu_ffn", False, "a gate of the MLP whose hidden size is two thirds of mlp_ratio"
    )
    if family == "siglip":
        tower = read.fields.get("vision_config")
        if not isinstance(tower, dict):
            raise ConfigError(f"config.json: vision_config is {shown(tower)}, not an object")
        read = Fields({"num_labels": read.fields.get("num_labels"), **tower})
    model = ViTConfig(
        **_stack(read, family),
        activation=read.choice(
            "hidden_act", "gelu_pytorch_tanh" if family == "siglip" else "gelu", ACTIVATIONS
        ),
        image_size=read.side("image_size", 224),
        patch_size=read.side("patch_size", 14 if family == "dinov2" else 16),
        channels=read.read("num_channels", 3),
        num_classes=len(labels)
        if isinstance(labels, dict) and labels
        else read.read("num_labels", 2),
        pool="mean" if family == "siglip" else "cls-mean" if dino else "cls",
        registers=1
        if family == "deit"
        else read.read("num_register_tokens", 4)
        if family == DINO[1]
        else None,
        layer_scale=read.read("layerscale_value", 1.0) if dino else None,
    )
    return Published(
        model, frozenset() if family == "siglip" or read.read("qkv_bias", True) else frozenset(_QKV)
    )


_READ = {
    "gpt2": _gpt2,
    **{family: functools.partial(decoders.like_llama, family=family) for family in decoders.LIKE},
    "gpt_neox": decoders.gpt_neox,
    **{family: functools.partial(gemma.gemma, family=family) for family in GEMMA},
    **{
        family: functools.partial(_vit, family=family)
        for family in ("vit", "deit", "siglip", *DINO)
    },
    "mbart": encoder_decoder.mbart,
    "t5": functools.partial(encoder_decoder.t5, newer=False),
    "mt5": functools.partial(encoder_decoder.t5, newer=True),
}
"""Every model_type that is read."""


def _ids(*tokens: str) -> dict[str, None]:
    return dict.fromkeys(f"{name}_token_id" for name in ("bos", "eos", "pad", *tokens))
