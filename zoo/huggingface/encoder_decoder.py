"""Configs of encoder-decoders in the form of `transformers`: MBart and T5.

MBart is BART with its norms before the branches. T5's code does not scale attention logits, and
divides a tied readout by width^1/2. `names` folds both factors into queries and the last norm.
"""

from __future__ import annotations

import math
from typing import Any

from mupax.zoo.configs import ConfigError
from mupax.zoo.encoder_decoder.config import EncoderDecoderConfig
from mupax.zoo.fields import Fields
from mupax.zoo.huggingface.architectures import (
    ACTIVATION_NAMES,
    ACTIVATIONS,
    DEFAULTS,
    MT5_DEFAULTS,
    Family,
    Published,
    StackDefaults,
    read_stack,
)

POST_NORM = (
    "bart has a norm after every branch, and our blocks have it before; mbart is the same model "
    "with our order (its code reads what is exported here)"
)
"""Reason why a BART is refused."""

PROJECTIONS = {
    "relu": "relu",
    "gelu": "gelu_exact",
    "gelu_new": "gelu",
    "gated-gelu": "geglu",
    "gated-silu": "swiglu",
}
"""Our activation by T5's feed_forward_proj. In gated-gelu the GELU has the tanh form."""
_PROJECTION_NAMES = {activation: name for name, activation in PROJECTIONS.items()}

_EPS = 1e-5
"""Number that MBart's norms add to the variance. Its config.json has no field for it."""


def reasons(model: EncoderDecoderConfig) -> list[str]:
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


def fields_of(model: EncoderDecoderConfig) -> dict[str, Any]:
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


def read_mbart(config: Fields) -> Published:
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


def read_t5(config: Fields, *, is_mt5: bool) -> Published:
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
    activation = config.choice("feed_forward_proj", "gated-gelu" if is_mt5 else "relu", PROJECTIONS)
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
        family: "mbart" or "t5".
        defaults: Values of fields that are left out. `None` is those of the family.
    """
    stack = read_stack(config, family, defaults)
    stack["mlp_ratio"] = stack.pop("mlp_dim") / stack["width"]
    return stack


def _none_if_equal(size: int, default: int) -> int | None:
    """Return `None` if the size equals our config's default, otherwise the size."""
    return None if size == default else size
