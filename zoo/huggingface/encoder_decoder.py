"""Configs of encoder-decoders in the form of `transformers`: MBart, which is BART with its norms before the branches, and T5.

T5's code has no scale of attention logits and divides a tied readout by width^1/2, which `names` folds into queries and last norm.
"""

from __future__ import annotations

import math
from typing import Any

from mupax.zoo.configs import ConfigError
from mupax.zoo.encoder_decoder.config import EncoderDecoderConfig
from mupax.zoo.fields import Fields
from mupax.zoo.huggingface.architectures import ACTIVATIONS, DEFAULTS, FIELDS, STACK, Published

POST_NORM = (
    "bart has a norm after every branch, and our blocks have it before; mbart is the same model with our order (its code reads "
    "what is exported here)"
)
"""Why a BART is refused."""

PROJECTIONS = {
    "relu": "relu",
    "gelu": "gelu_exact",
    "gelu_new": "gelu",
    "gated-gelu": "geglu",
    "gated-silu": "swiglu",
}
"""T5's feed_forward_proj to our activations; gated-gelu is the tanh form, whatever its name says."""

_EPS = 1e-5
"""Of MBart's norms: its config has no field for it."""


def reasons(model: EncoderDecoderConfig) -> dict[str, bool]:
    """Why transformers' code would compute another function, and whether it holds of the model."""
    heads, size = model.num_heads, model.heads_dim
    common = {
        f"it has no grouped queries, and model.num_kv_heads is {model.kv_heads} of {heads} heads": model.kv_heads
        != heads,
        "encoder and decoder read one table of embeddings; train with --model.shared to export": not model.shared,
    }
    if model.positions == "relative":
        return common | {
            f"it has rmsnorm, and model.norm is {model.norm}": model.norm != "rmsnorm",
            "it has no biases; train with --model.no-bias to export": model.bias or model.qkv_bias,
            "it has no norms after the embeddings; train with --model.no-embedding-norm to export": model.embedding_norm,
        }
    return common | {
        "it has no rotary positions; train with --model.positions learned --model.norm layernorm, which is an MBart, or with "
        "--model.positions relative --model.norm rmsnorm --model.no-embedding-norm, which is a T5, to export": model.positions
        == "rotary",
        f"it has LayerNorm, which subtracts the mean, and model.norm is {model.norm}": model.norm
        != "layernorm",
        f"its norms add 1e-05, and model.norm_eps is {model.norm_eps:g}": model.norm_eps != _EPS,
        f"its MLP has no gate, and model.activation is {model.activation}": model.gated,
        f"its heads fill the width, and {heads} heads of {size} are not {model.width}": heads * size
        != model.width,
        "it has norms after the embeddings; train with --model.embedding-norm to export": not model.embedding_norm,
        f"it has as many positions in both stacks, not {model.seq_len} and {model.targets}": model.targets
        != model.seq_len,
    }


def fields_of(model: EncoderDecoderConfig) -> dict[str, Any]:
    """What config.json says of a model beside what all families have."""
    if model.positions == "relative":
        return {
            "is_encoder_decoder": True,
            "num_layers": model.encoder_blocks,
            "d_kv": model.heads_dim,
            "feed_forward_proj": next(
                name for name, ours in PROJECTIONS.items() if ours == model.activation
            ),
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
        "activation_function": next(
            name for name, ours in ACTIVATIONS.items() if ours == model.activation
        ),
        "max_position_embeddings": model.seq_len,
        "scale_embedding": False,
    }


def mbart(read: Fields) -> Published:
    """The model of an MBart's config.json."""
    stack = _stack(read, "mbart")
    sizes = {
        "attention_heads": stack["num_heads"],
        "ffn_dim": round(stack["mlp_ratio"] * stack["width"]),
    }
    for (name, size), default in zip(sizes.items(), DEFAULTS["mbart"][2:], strict=True):
        if (other := read.read(f"encoder_{name}", int(default))) != size:
            raise ConfigError(
                f"config.json: encoder_{name} is {other} and decoder_{name} {size}; our stacks have one size"
            )
    model = EncoderDecoderConfig(
        **stack,
        encoder_depth=_unlike(read.read("encoder_layers", 12), stack["depth"]),
        activation=read.choice("activation_function", "gelu", ACTIVATIONS),
        norm_eps=_EPS,
        vocab_size=read.read("vocab_size", 50265),
        seq_len=read.read("max_position_embeddings", 1024),
        tied=read.read("tie_word_embeddings", True),
    )
    scale = math.sqrt(model.width) if read.read("scale_embedding", False) else 1.0
    return Published(model, embedding_scale=scale)


def t5(read: Fields, *, newer: bool) -> Published:
    """The model of a T5's config.json.

    Args:
        read: its fields.
        newer: of an mT5, whose fields left out are those of T5 v1.1.
    """
    read.refuse("is_encoder_decoder", True, "an encoder alone")
    stack, longest = _stack(read, "t5"), read.read("n_positions", 512)
    model = EncoderDecoderConfig(
        **stack,
        encoder_depth=_unlike(read.read("num_layers", 6), stack["depth"]),
        head_dim=None
        if (size := read.read("d_kv", 64)) * stack["num_heads"] == stack["width"]
        else size,
        activation=read.choice("feed_forward_proj", "gated-gelu" if newer else "relu", PROJECTIONS),
        norm="rmsnorm",
        bias=False,
        positions="relative",
        distance_buckets=read.read("relative_attention_num_buckets", 32),
        longest_distance=read.read("relative_attention_max_distance", 128),
        embedding_norm=False,
        vocab_size=read.read("vocab_size", 32128),
        seq_len=longest,
        target_len=_unlike(read.read("n_target_positions", longest), longest),
        # A readout that is not divided by width^1/2 has a table of its own (v1.1), though later files say of both that they are tied.
        tied=not newer
        and read.read("scale_decoder_outputs", read.read("tie_word_embeddings", True)),
    )
    return Published(model)


def _stack(read: Fields, family: Any) -> dict[str, Any]:
    """Our fields of the decoder's stack; of T5 its depth is the encoder's unless said."""
    names, defaults = FIELDS[family], list(DEFAULTS[family])
    if family == "t5":
        defaults[1] = read.read("num_layers", int(defaults[1]))
    fields = zip(STACK[: len(names)], names, defaults, strict=True)
    stack: dict[str, Any] = {ours: read.read(name, default) for ours, name, default in fields}
    stack["mlp_ratio"] = stack.pop("mlp_dim") / stack["width"]
    return stack


def _unlike(size: int, usual: int) -> int | None:
    """A size as our configs have it, None where it is the usual one."""
    return None if size == usual else size
