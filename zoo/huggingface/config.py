"""Model configs in the form of Hugging Face's `transformers`, both ways.

Read and written are GPT-2, decoders with rotary positions (`decoders`), ViTs and
encoder-decoders. A decoder with learned positions is a GPT-2. An encoder-decoder with learned
positions is an MBart, and one with relative positions a T5. If a family's code cannot compute a
model, or our code cannot compute theirs, the config is refused with the reasons.

MBart is BART with its norms before the branches. T5's code does not scale attention logits, and
divides a tied readout by width^1/2. `names` folds both factors into queries and the last norm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from mupax.disk import shown
from mupax.zoo.configs import ConfigError, DecoderConfig, ViTConfig
from mupax.zoo.encoder_decoder.config import EncoderDecoderConfig
from mupax.zoo.families import ImageModel
from mupax.zoo.fields import Fields
from mupax.zoo.huggingface import decoders, experts
from mupax.zoo.huggingface.architectures import (
    ACTIVATION_NAMES,
    ACTIVATIONS,
    ARCHITECTURES,
    DEFAULTS,
    DINO,
    DROPOUTS,
    FIELDS,
    GEMMA,
    MT5_DEFAULTS,
    Family,
    Published,
    StackDefaults,
    read_stack,
)
from mupax.zoo.huggingface.names import family_of
from mupax.zoo.transformer import TransformerConfig

_QKV_BIASES = frozenset(f"block.attention.{name}_bias" for name in ("query", "key", "value"))

UNLIKE = {
    "gemma3": "an image tower (vision_config); its text model alone is Gemma3ForCausalLM, "
    "of model_type gemma3_text",
    "siglip_vision_model": "no classifier, and pools by attention (vision_use_head); "
    "SiglipForImageClassification, of model_type siglip, has the mean",
}
"""Reason why a model_type is refused, such as a missing or additional feature, by model_type."""

DISTILLED = "DeiTForImageClassificationWithTeacher"

_VITS: tuple[Family, ...] = ("vit", "deit", "siglip", *DINO)
_READABLE = ("gpt2", *decoders.LIKE_LLAMA, "gpt_neox", *GEMMA, *_VITS, "mbart", "t5", "mt5")
"""Every model_type that is read."""


def to_huggingface(
    model: TransformerConfig,
    *,
    dtype: str = "float32",
    tokens: Mapping[str, int | list[int] | None] | None = None,
) -> dict[str, Any]:
    """Return the content of config.json for a model, as a dict.

    Args:
        model: Model whose parameters are written beside the config.json.
        dtype: Type of the stored weights, by default "float32".
        tokens: Ids of special tokens by their names in config.json, such as eos_token_id, where
            generation stops. Ids that are left out are written as null. Not read for image models.

    Raises:
        ConfigError: The family's code cannot compute this model. The text has every reason.
    """
    family = family_of(model)
    problems = _reasons(model)
    if problems:
        raise ConfigError(f"transformers' {family} cannot hold this model: {'; '.join(problems)}")
    fields: dict[str, Any] = {
        "model_type": family,
        "architectures": [ARCHITECTURES[family]],
        "dtype": dtype,
        **_stack_fields(model, family),
    }
    if isinstance(model, ImageModel):
        return _with_image_fields(fields, model, family)

    fields["vocab_size"] = model.sizes().get("vocab")
    fields["tie_word_embeddings"] = model.tied_readout is not None
    if isinstance(model, EncoderDecoderConfig):
        fields |= _encoder_decoder_fields(model)
        fields |= _no_token_ids("bos", "eos", "pad", "decoder_start", "forced_eos")
        return fields | dict(tokens or {})

    # Null overrides the ids that `transformers` has by default for each family.
    fields |= _no_token_ids("bos", "eos", "pad")
    fields |= dict(tokens or {})
    if family == "gpt2":
        fields["n_positions"] = model.sizes()["position"]
        fields["activation_function"] = ACTIVATION_NAMES[model.activation]
        return fields
    assert isinstance(model, DecoderConfig)
    if family in GEMMA:
        return fields | decoders.fields_of_gemma(model, family)
    return fields | decoders.fields_of(model, family)


def _stack_fields(model: TransformerConfig, family: Family) -> dict[str, Any]:
    """Return the fields of config.json that describe the residual stack, with dropouts of 0."""
    fields: dict[str, Any] = {}
    for name, field in FIELDS[family]._asdict().items():
        if field is not None:
            fields[field] = getattr(model, name)
    fields |= dict.fromkeys(DROPOUTS[family], 0.0)
    # The loop wrote the hidden size of the MLP into mlp_ratio, where a DINO has its ratio to the
    # width.
    if family in DINO:
        fields["mlp_ratio"] = int(model.mlp_ratio)
    return fields


def _with_image_fields(fields: dict[str, Any], model: ImageModel, family: Family) -> dict[str, Any]:
    """Add the fields of config.json that only ViTs have to `fields`, in place, and return it.

    For a SigLIP, the fields of the stack are moved into `vision_config`.

    Args:
        fields: Fields of config.json that all families have. The dict is changed.
        model: Model of one of the families in `_VITS`.
        family: Result of `family_of`.
    """
    assert isinstance(model, ViTConfig)
    pixels: dict[str, Any] = {
        "image_size": model.image_size,
        "patch_size": model.patch_size,
        "num_channels": model.channels,
        "hidden_act": ACTIVATION_NAMES[model.activation],
    }
    if family == "siglip":
        # SigLIP has two towers. The fields of the one that is read are in an object of their own.
        tower = {name: fields.pop(name) for name in _stack_fields(model, family)}
        fields["vision_config"] = {**tower, **pixels, "vision_use_head": False}
    else:
        fields |= pixels
    if family in DINO:
        fields["layerscale_value"] = model.layer_scale or 1.0
        fields["use_swiglu_ffn"] = False
    if family == "dinov2":
        fields["use_mask_token"] = False
    if family == "dinov2_with_registers":
        fields["num_register_tokens"] = model.registers
    if family != "siglip":
        fields["qkv_bias"] = True
    # The names that `transformers` gives to classes without names of their own.
    labels = [f"LABEL_{index}" for index in range(model.num_classes)]
    fields["id2label"] = {str(index): label for index, label in enumerate(labels)}
    fields["label2id"] = {label: index for index, label in enumerate(labels)}
    return fields


def _no_token_ids(*tokens: str) -> dict[str, None]:
    """Return the fields of special tokens' ids, all null: {"bos_token_id": None} for "bos".

    A field that is left out would have the default of `transformers`.
    """
    return {f"{token}_token_id": None for token in tokens}


def from_huggingface(fields: Mapping[str, Any]) -> Published:
    """Return the config of the model that a config.json describes, and how its code differs.

    Args:
        fields: Content of config.json. Fields left out have the defaults of `transformers`.

    Raises:
        ConfigError: The architecture is not read, our models lack one of its features, or a value
            is of the wrong kind.
    """
    model_type = fields.get("model_type")
    if isinstance(model_type, str) and model_type in UNLIKE:
        raise ConfigError(
            f"config.json: model_type {model_type} has {UNLIKE[model_type]}, "
            "which our models do not have"
        )
    quantized = fields.get("quantization_config")
    if quantized:
        method = quantized
        if isinstance(quantized, Mapping):
            method = quantized.get("quant_method")
        raise ConfigError(
            f"config.json: quantization_config is {shown(method)}, and quantized weights are "
            "not read; take the weights before it"
        )
    if model_type == "bart":
        raise ConfigError(f"config.json: {_POST_NORM}")
    if not isinstance(model_type, str) or model_type not in _READABLE:
        raise ConfigError(
            f"config.json: model_type is {shown(model_type)}; only {', '.join(_READABLE)} are read"
        )
    published = _read(Fields(fields), model_type)
    problems = _reasons(published.model)
    if problems:
        raise ConfigError(f"config.json: {'; '.join(problems)}")
    return published


def _read(config: Fields, model_type: str) -> Published:
    """Read a config.json with the function for its `model_type`.

    Args:
        model_type: One of `_READABLE`.
    """
    if model_type in ("t5", "mt5"):
        return _read_t5(config, is_mt5=model_type == "mt5")
    # Apart from T5 and mT5, the model_type is the name of the family.
    family = cast("Family", model_type)
    if family == "gpt2":
        return _read_gpt2(config)
    if family in decoders.LIKE_LLAMA:
        return decoders.read_llama(config, family)
    if family == "gpt_neox":
        return decoders.read_gpt_neox(config)
    if family in GEMMA:
        return decoders.read_gemma(config, family)
    if family in _VITS:
        return _read_vit(config, family)
    assert family == "mbart"
    return _read_mbart(config)


def _reasons(model: TransformerConfig) -> list[str]:
    """Return the reasons why the code of the model's family cannot compute it, `[]` if it can.

    A reason is a part of a sentence, in which "it" is the code of `transformers`.
    """
    family = family_of(model)
    problems = _common_reasons(model, family)
    if isinstance(model, EncoderDecoderConfig):
        return problems + _encoder_decoder_reasons(model)
    if isinstance(model, DecoderConfig) and family in GEMMA:
        return problems + decoders.reasons_of_gemma(model, family)
    if isinstance(model, DecoderConfig) and model.rotary_theta is not None:
        return problems + decoders.reasons(model, family)
    if isinstance(model, ViTConfig):
        problems += _image_reasons(model, family)
    return problems + _gpt2_and_vit_reasons(model)


def _common_reasons(model: TransformerConfig, family: Family) -> list[str]:
    """Return the reasons why a family's code cannot compute a model, from fields of all models.

    They are about options such as `centered`, `qk_norm`, `experts` and soft caps.
    """
    problems = []
    if model.centered:
        problems.append(
            "model.centered trains the difference of two networks, and a file holds one; "
            "train with --model.no-centered to export"
        )
    if model.qk_norm and family not in ("qwen3", "gemma3_text", "qwen3_moe"):
        problems.append(
            "model.qk_norm normalizes queries and keys, which it does not; train with "
            "--model.no-qk-norm --model.qk-norm-kind rmsnorm to export"
        )
    elif not model.absorbs_logit_scale:
        problems.append(
            "model.qk_norm has no gains, which would carry the preset's scale of attention logits; "
            "train with --model.norm-gain to export"
        )
    if model.experts is not None and family not in experts.FAMILIES:
        problems.append("model.experts routes tokens to MLPs of their own, which it does not")
    if model.value_dim is not None:
        problems.append(
            "model.value_dim makes values of another size than queries, which it does not"
        )
    if model.branch_activation != "none":
        problems.append(
            "model.branch_activation acts on what branches read, which it does not; train with "
            "--model.branch-activation none to export"
        )
    if not isinstance(model, ImageModel) and "readout_bias" in model.parameters():
        problems.append(
            "model.readout_bias adds to the logits, which it does not; "
            "train with --model.no-readout-bias to export"
        )
    if model.parallel_branches and family != "gpt_neox":
        problems.append("model.parallel has the MLP read what attention reads, which it does not")
    if model.post_norms and family not in GEMMA:
        problems.append("model.post_norm normalizes what branches write, which it does not")
    has_softcap = isinstance(model, DecoderConfig) and (
        model.attention_softcap is not None or model.logit_softcap is not None
    )
    if has_softcap and family not in GEMMA:
        problems.append(
            "a soft cap bounds logits, which it does not "
            "(model.attention_softcap, model.logit_softcap)"
        )
    return problems


def _gpt2_and_vit_reasons(model: TransformerConfig) -> list[str]:
    """Return the reasons why the code of GPT-2 or a ViT cannot compute a model, `[]` if it can.

    Reasons that `_common_reasons` and `_image_reasons` return are left out.
    """
    width = model.width
    heads = model.num_heads
    size = model.heads_dim
    problems = []
    if model.sight.window is not None:
        problems.append("model.window hides all but the last positions, which it does not")
    if model.norm != "layernorm":
        problems.append("it has LayerNorm, which subtracts the mean, and model.norm is rmsnorm")
    if model.gated:
        problems.append(f"its MLP has no gate, and model.activation is {model.activation}")
    if model.kv_heads != heads:
        problems.append(
            "it has no grouped queries, and model.num_kv_heads is "
            f"{model.kv_heads} of {heads} heads"
        )
    if heads * size != width:
        problems.append(f"its heads fill the width, and {heads} heads of {size} are not {width}")
    return problems


def _image_reasons(model: ViTConfig, family: Family) -> list[str]:
    """Return the reasons, from fields that only ViTs have, why a family cannot compute a ViT."""
    problems = []
    if model.sincos:
        problems.append(
            "model.sincos has positions that are not learned, and its are; "
            "`equivalent` writes them as learned ones"
        )
    if model.stem is not None:
        problems.append(
            "model.stem makes patches by convolutions, and it by one matrix; "
            "train with --model.stem none to export"
        )
    if model.pre_logits:
        problems.append(
            "model.pre_logits is a layer before the readout, which it does not have; "
            "train with --model.no-pre-logits to export"
        )
    if model.layer_scale is not None and family not in DINO:
        problems.append("model.layer_scale multiplies what branches write, which it does not")
    if model.registers is not None and family == "siglip":
        problems.append("model.registers are tokens beside the patches, which it does not have")
    if model.registers != 1 and family == "deit":
        problems.append(
            f"it has one token beside the CLS token, and model.registers is {model.registers}"
        )
    ratio = model.mlp_dim / model.width
    if ratio != int(ratio) and family in DINO:
        problems.append(
            f"its mlp_ratio is a whole number, and model.mlp_ratio is {model.mlp_ratio}"
        )
    return problems


def _read_gpt2(config: Fields) -> Published:
    """Return the model that the config.json of a GPT-2 describes.

    Raises:
        ConfigError: A field is on that our models lack, such as cross-attention, or is wrong.
    """
    config.refuse("scale_attn_weights", True, "attention logits without head_dim^-1/2")
    config.refuse(
        "scale_attn_by_inverse_layer_idx", False, "attention logits divided by the layer's number"
    )
    config.refuse("add_cross_attention", False, "attention to an encoder")
    stack = read_stack(config, "gpt2")
    stack["mlp_ratio"] = stack.pop("mlp_dim") / stack["width"]
    # GPT-2's code has biases and LayerNorm, which are the defaults of our config.
    model = DecoderConfig(
        **stack,
        activation=config.choice("activation_function", "gelu_new", ACTIVATIONS),
        vocab_size=config.read("vocab_size", 50257),
        seq_len=config.read("n_positions", 1024),
        tied=config.read("tie_word_embeddings", True),
    )
    return Published(model)


def _read_vit(config: Fields, family: Family) -> Published:
    """Return the model that the config.json of a ViT, DeiT, SigLIP or DINOv2 describes.

    Args:
        family: One of `_VITS`.

    Raises:
        ConfigError: The model has a feature that ours lack, such as a second classifier, or a field
            is wrong.
    """
    labels = config.fields.get("id2label")
    architectures = config.fields.get("architectures")
    if isinstance(architectures, list) and DISTILLED in architectures:
        raise ConfigError(
            f"config.json: {DISTILLED} takes the mean of two classifiers "
            "(distillation_classifier), which our models do not have; "
            "DeiTForImageClassification reads the CLS token's alone"
        )
    config.refuse(
        "use_swiglu_ffn", False, "a gate of the MLP whose hidden size is two thirds of mlp_ratio"
    )
    if family == "siglip":
        tower = config.fields.get("vision_config")
        if not isinstance(tower, dict):
            raise ConfigError(f"config.json: vision_config is {shown(tower)}, not an object")
        config = Fields({"num_labels": config.fields.get("num_labels"), **tower})

    stack = read_stack(config, family)
    mlp_dim = stack.pop("mlp_dim")
    # A DINO's field already holds the ratio to the width.
    stack["mlp_ratio"] = mlp_dim
    if family not in DINO:
        stack["mlp_ratio"] /= stack["width"]
    default_activation = "gelu_pytorch_tanh" if family == "siglip" else "gelu"
    activation = config.choice("hidden_act", default_activation, ACTIVATIONS)
    image_size = config.side("image_size", 224)
    # The default patch size in transformers is 14 for DINOv2 and 16 for DINOv2 with registers.
    default_patch_size = 14 if family == "dinov2" else 16
    patch_size = config.side("patch_size", default_patch_size)
    channels = config.read("num_channels", 3)
    if isinstance(labels, dict) and labels:
        num_classes = len(labels)
    else:
        num_classes = config.read("num_labels", 2)

    pool = "cls"
    if family == "siglip":
        pool = "mean"
    elif family in DINO:
        pool = "cls-mean"
    registers = None
    if family == "deit":
        # The distillation token, which DeiT's classifier does not read.
        registers = 1
    elif family == "dinov2_with_registers":
        registers = config.read("num_register_tokens", 4)
    layer_scale = config.read("layerscale_value", 1.0) if family in DINO else None
    model = ViTConfig(
        **stack,
        activation=activation,
        image_size=image_size,
        patch_size=patch_size,
        channels=channels,
        num_classes=num_classes,
        pool=pool,
        registers=registers,
        layer_scale=layer_scale,
    )
    # SigLIP always has biases of queries, keys and values.
    has_qkv_bias = family == "siglip" or config.read("qkv_bias", True)
    return Published(model, frozenset() if has_qkv_bias else _QKV_BIASES)


_POST_NORM = (
    "bart has a norm after every branch, and our blocks have it before; mbart is the same model "
    "with our order (its code reads what is exported here)"
)
"""Reason why a BART is refused."""

_PROJECTIONS = {
    "relu": "relu",
    "gelu": "gelu_exact",
    "gelu_new": "gelu",
    "gated-gelu": "geglu",
    "gated-silu": "swiglu",
}
"""Our activation by T5's feed_forward_proj. In gated-gelu the GELU has the tanh form."""
_PROJECTION_NAMES = {activation: name for name, activation in _PROJECTIONS.items()}

_EPS = 1e-5
"""Number that MBart's norms add to the variance. Its config.json has no field for it."""


def _encoder_decoder_reasons(model: EncoderDecoderConfig) -> list[str]:
    """Return the reasons why the code of MBart or T5 cannot compute a model, `[]` if it can.

    A model with relative positions is compared with T5, any other with MBart.
    """
    problems = []
    if model.kv_heads != model.num_heads:
        problems.append(
            "it has no grouped queries, and model.num_kv_heads is "
            f"{model.kv_heads} of {model.num_heads} heads"
        )
    if not model.shared:
        problems.append(
            "encoder and decoder read one table of embeddings; train with --model.shared to export"
        )
    if model.positions == "relative":
        return problems + _reasons_of_t5(model)
    return problems + _reasons_of_mbart(model)


def _reasons_of_t5(model: EncoderDecoderConfig) -> list[str]:
    """Return the reasons why T5's code cannot compute a model, `[]` if it can."""
    problems = []
    if model.norm != "rmsnorm":
        problems.append(f"it has rmsnorm, and model.norm is {model.norm}")
    if model.bias or model.qkv_bias:
        problems.append("it has no biases; train with --model.no-bias to export")
    if model.embedding_norm:
        problems.append(
            "it has no norms after the embeddings; train with --model.no-embedding-norm to export"
        )
    return problems


def _reasons_of_mbart(model: EncoderDecoderConfig) -> list[str]:
    """Return the reasons why MBart's code cannot compute a model, `[]` if it can."""
    width = model.width
    heads = model.num_heads
    size = model.heads_dim
    problems = []
    if model.positions == "rotary":
        problems.append(
            "it has no rotary positions; train with --model.positions learned "
            "--model.norm layernorm, which is an MBart, or with --model.positions relative "
            "--model.norm rmsnorm --model.no-embedding-norm, which is a T5, to export"
        )
    if model.norm != "layernorm":
        problems.append(
            f"it has LayerNorm, which subtracts the mean, and model.norm is {model.norm}"
        )
    if model.norm_eps != _EPS:
        problems.append(f"its norms add 1e-05, and model.norm_eps is {model.norm_eps:g}")
    if model.gated:
        problems.append(f"its MLP has no gate, and model.activation is {model.activation}")
    if heads * size != width:
        problems.append(f"its heads fill the width, and {heads} heads of {size} are not {width}")
    if not model.embedding_norm:
        problems.append(
            "it has norms after the embeddings; train with --model.embedding-norm to export"
        )
    if model.targets != model.seq_len:
        problems.append(
            f"it has as many positions in both stacks, not {model.seq_len} and {model.targets}"
        )
    return problems


def _encoder_decoder_fields(model: EncoderDecoderConfig) -> dict[str, Any]:
    """Return the fields of config.json that only T5 (relative positions) or MBart (others) has."""
    if model.positions == "relative":
        return {
            "is_encoder_decoder": True,
            "num_layers": model.encoder_blocks,
            "d_kv": model.heads_dim,
            "feed_forward_proj": _PROJECTION_NAMES[model.activation],
            "relative_attention_num_buckets": model.distance_buckets,
            "relative_attention_max_distance": model.longest_distance,
            "n_positions": model.seq_len,
            "n_target_positions": model.targets,
        }
    return {
        "is_encoder_decoder": True,
        "encoder_layers": model.encoder_blocks,
        "encoder_attention_heads": model.num_heads,
        "encoder_ffn_dim": model.mlp_dim,
        "activation_function": ACTIVATION_NAMES[model.activation],
        "max_position_embeddings": model.seq_len,
        "scale_embedding": False,
    }


def _read_mbart(config: Fields) -> Published:
    """Return the model that the config.json of an MBart describes.

    Raises:
        ConfigError: Encoder and decoder have different sizes, or a field is wrong.
    """
    stack = _read_stack(config, "mbart")
    # In our models, encoder and decoder may differ in depth only.
    defaults = DEFAULTS["mbart"]
    mlp_dim = round(stack["mlp_ratio"] * stack["width"])
    _check_encoder_size(config, "attention_heads", stack["num_heads"], defaults.num_heads)
    _check_encoder_size(config, "ffn_dim", mlp_dim, int(defaults.mlp_dim))
    encoder_depth = config.read("encoder_layers", 12)
    model = EncoderDecoderConfig(
        **stack,
        encoder_depth=_none_if_equal(encoder_depth, stack["depth"]),
        activation=config.choice("activation_function", "gelu", ACTIVATIONS),
        norm_eps=_EPS,
        vocab_size=config.read("vocab_size", 50265),
        seq_len=config.read("max_position_embeddings", 1024),
        tied=config.read("tie_word_embeddings", True),
    )
    # With scale_embedding, the code of MBart multiplies looked-up embeddings by width^1/2.
    scales_embeddings = config.read("scale_embedding", False)
    return Published(model, embedding_scale=math.sqrt(model.width) if scales_embeddings else 1.0)


def _check_encoder_size(config: Fields, field: str, decoder_size: int, default: int) -> None:
    """Raise ConfigError if an MBart's encoder has another size than its decoder.

    Args:
        field: Name of the field without `encoder_` or `decoder_`.
        decoder_size: Value that the decoder's field has, for comparison.
        default: Value of the encoder's field if config.json leaves it out.
    """
    encoder_size = config.read(f"encoder_{field}", default)
    if encoder_size != decoder_size:
        raise ConfigError(
            f"config.json: encoder_{field} is {encoder_size} and decoder_{field} {decoder_size}; "
            "our stacks have one size"
        )


def _read_t5(config: Fields, *, is_mt5: bool) -> Published:
    """Return the model that the config.json of a T5 or an mT5 describes.

    Args:
        is_mt5: `True` for an mT5, whose fields have other defaults, and whose readout never shares
            the embedding's table.

    Raises:
        ConfigError: The file is of an encoder alone, or a field is wrong.
    """
    config.refuse("is_encoder_decoder", True, "an encoder alone")
    defaults = MT5_DEFAULTS if is_mt5 else DEFAULTS["t5"]
    encoder_depth = config.read("num_layers", defaults.depth)
    # The decoder has the depth of the encoder unless a field says otherwise.
    stack = _read_stack(config, "t5", defaults._replace(depth=encoder_depth))
    seq_len = config.read("n_positions", 512)
    head_dim = config.read("d_kv", 64)
    heads_fill_width = head_dim * stack["num_heads"] == stack["width"]
    activation = config.choice(
        "feed_forward_proj", "gated-gelu" if is_mt5 else "relu", _PROJECTIONS
    )
    distance_buckets = config.read("relative_attention_num_buckets", 32)
    longest_distance = config.read("relative_attention_max_distance", 128)
    vocab_size = config.read("vocab_size", 250112 if is_mt5 else 32128)
    target_len = config.read("n_target_positions", seq_len)
    tied = False
    if not is_mt5:
        # T5 v1.1 does not scale the decoder output by width^-1/2, and its readout is a table of its
        # own. transformers 5 sets tie_word_embeddings in both versions, so `scale_decoder_outputs`
        # decides if it is there.
        default = config.read("tie_word_embeddings", True)
        tied = config.read("scale_decoder_outputs", default)
    model = EncoderDecoderConfig(
        **stack,
        encoder_depth=_none_if_equal(encoder_depth, stack["depth"]),
        head_dim=None if heads_fill_width else head_dim,
        activation=activation,
        norm="rmsnorm",
        bias=False,
        positions="relative",
        distance_buckets=distance_buckets,
        longest_distance=longest_distance,
        embedding_norm=False,
        vocab_size=vocab_size,
        seq_len=seq_len,
        target_len=_none_if_equal(target_len, seq_len),
        tied=tied,
    )
    return Published(model)


def _read_stack(
    config: Fields, family: Family, defaults: StackDefaults | None = None
) -> dict[str, Any]:
    """Return the fields of our config that describe the decoder's stack.

    The hidden size of the MLP is returned as its ratio to the width, `mlp_ratio`.

    Args:
        family: "mbart" or "t5", whose names of fields are read.
        defaults: Values of fields that config.json leaves out. `None` takes those of the family.
    """
    stack = read_stack(config, family, defaults)
    stack["mlp_ratio"] = stack.pop("mlp_dim") / stack["width"]
    return stack


def _none_if_equal(size: int, default: int) -> int | None:
    """Return `None` if the size equals our config's default, otherwise the size."""
    return None if size == default else size
