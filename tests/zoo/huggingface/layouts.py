"""A small model of every layout of Hugging Face that is read, and its files with random parameters."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mupax.zoo.configs import DecoderConfig, ModelConfig, ViTConfig
from mupax.zoo.definition import definition
from mupax.zoo.encoder_decoder.config import EncoderDecoderConfig
from mupax.zoo.huggingface import weights
from mupax.zoo.huggingface.config import from_huggingface
from mupax.zoo.huggingface.tensorfile import Tensors, write_tensors
from mupax.zoo.transformer import RoutingConfig

GPT2 = DecoderConfig(
    width=6, depth=2, num_heads=3, mlp_ratio=11 / 6, vocab_size=13, seq_len=5, tied=True
)
LLAMA = DecoderConfig(
    width=12, depth=2, num_heads=6, num_kv_heads=2, head_dim=4, mlp_ratio=11 / 12, vocab_size=13, seq_len=5,
    positions="rotary", rope_theta=5e5, norm="rmsnorm", norm_eps=1e-6, activation="swiglu", bias=False,
)  # fmt: skip
GEMMA = dataclasses.replace(
    LLAMA, depth=3, activation="geglu", tied=True, post_norm=True, window=3, full_every=2, attention_softcap=50.0,
    logit_softcap=30.0,
)  # fmt: skip
GEMMA3 = dataclasses.replace(
    GEMMA, qk_norm=True, window_theta=1e4, attention_softcap=None, logit_softcap=None, full_every=3
)
NEOX = dataclasses.replace(
    GPT2, width=12, positions="rotary", parallel=True, rotary_fraction=0.5, tied=False
)
VIT = ViTConfig(
    width=6, depth=2, num_heads=3, mlp_ratio=11 / 6, image_size=9, patch_size=3, channels=2, num_classes=7, pool="cls",
    activation="gelu_exact", norm_eps=1e-12,
)  # fmt: skip
MBART = EncoderDecoderConfig(
    width=6,
    depth=2,
    encoder_depth=3,
    num_heads=3,
    mlp_ratio=11 / 6,
    vocab_size=13,
    seq_len=5,
    activation="gelu_exact",
)
T5 = EncoderDecoderConfig(
    width=6, depth=2, num_heads=3, head_dim=4, mlp_ratio=11 / 6, vocab_size=13, seq_len=5, target_len=4, activation="relu",
    norm="rmsnorm", norm_eps=1e-6, bias=False, positions="relative", distance_buckets=8, longest_distance=16,
    embedding_norm=False,
)  # fmt: skip
MIXTRAL = dataclasses.replace(
    LLAMA,
    mlp_ratio=10 / 12,
    experts=3,
    active_experts=2,
    expert_dim=5,
    routing=RoutingConfig(gate="softmax"),
)
QWEN3_MOE = dataclasses.replace(MIXTRAL, qk_norm=True, expert_dim=7)
MODELS: dict[str, ModelConfig] = {
    "gpt2": GPT2,
    "gpt2 untied": dataclasses.replace(GPT2, tied=False, activation="relu"),
    "llama": LLAMA,
    "llama tied, biases": dataclasses.replace(LLAMA, tied=True, bias=True, num_kv_heads=None),
    "llama 3.1": dataclasses.replace(LLAMA, rope_scaling="llama3", rope_original_len=3),
    "llama, linear positions": dataclasses.replace(LLAMA, rope_scaling="linear", rope_factor=2.0),
    "mistral": dataclasses.replace(LLAMA, window=3),
    "qwen2": dataclasses.replace(LLAMA, qkv_bias=True),
    "qwen2, window": dataclasses.replace(LLAMA, qkv_bias=True, window=3, tied=True),
    "qwen3": dataclasses.replace(LLAMA, qk_norm=True),
    "gemma2": GEMMA,
    "gemma2, untied": dataclasses.replace(
        GEMMA, tied=False, full_every=None, logit_softcap=None, num_kv_heads=None
    ),
    "gemma3": GEMMA3,
    "gemma3, one wavelength": dataclasses.replace(
        GEMMA3, window_theta=None, rope_scaling="linear", logit_softcap=30.0
    ),
    "gemma3, windows alone": dataclasses.replace(
        GEMMA3, window_theta=None, full_every=None, tied=False
    ),
    "gemma2, no window": dataclasses.replace(
        GEMMA, window=None, full_every=None, attention_softcap=None
    ),
    "mixtral": dataclasses.replace(MIXTRAL, window=3),
    "qwen3-moe": QWEN3_MOE,
    "qwen3-moe, not normalized": dataclasses.replace(
        QWEN3_MOE, routing=RoutingConfig(gate="softmax-all"), window=2
    ),
    "gpt-neox": NEOX,
    "gpt-neox, one after the other": dataclasses.replace(NEOX, parallel=False, tied=True),
    "siglip": dataclasses.replace(VIT, pool="mean"),
    "vit": VIT,
    "deit": dataclasses.replace(VIT, registers=1),
    "dinov2": dataclasses.replace(VIT, pool="cls-mean", layer_scale=0.5, mlp_ratio=2.0),
    "dinov2, registers": dataclasses.replace(
        VIT, pool="cls-mean", layer_scale=1.0, mlp_ratio=2.0, registers=3
    ),
    "mbart": MBART,
    "mbart untied": dataclasses.replace(MBART, tied=False, activation="relu", encoder_depth=None),
    "t5": T5,
    "t5 v1.1": dataclasses.replace(T5, tied=False, activation="geglu", target_len=None),
}
every_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)


def random_params(model: ModelConfig) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        name: random.standard_normal(leaf.shape, np.float32)
        for name, leaf in definition(model).abstract.items()
    }


def written(model: ModelConfig, folder: Path, **changes: np.ndarray | None) -> Path:
    """A file of the model's random parameters; some of its tensors changed, added or (None) left out."""
    tensors = {**dict(weights.to_huggingface(model, random_params(model))), **changes}
    write_tensors(folder, [(name, value) for name, value in tensors.items() if value is not None])
    return folder


def read(folder: Path, fields: dict[str, Any]) -> weights.Loaded:
    return weights.from_huggingface(
        Tensors(folder), from_huggingface(json.loads(json.dumps(fields)))
    )
