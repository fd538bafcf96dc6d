"""A small model of every family and layout that `transformers` has, too.

Used by `scripts.parity` and by tests of the export.
"""

from __future__ import annotations

from dataclasses import replace

from mupax.zoo.configs import DecoderConfig, ViTConfig
from mupax.zoo.encoder_decoder.config import EncoderDecoderConfig
from mupax.zoo.transformer import RoutingConfig, TransformerConfig

GPT2 = DecoderConfig(width=48, depth=3, num_heads=6, vocab_size=97, seq_len=29, tied=True)
LLAMA = DecoderConfig(
    width=48,
    depth=3,
    num_heads=6,
    head_dim=10,
    vocab_size=97,
    seq_len=29,
    mlp_ratio=2.5,
    norm_eps=1e-6,
    positions="rotary",
    rope_theta=500_000.0,
    norm="rmsnorm",
    activation="swiglu",
    bias=False,
)
NEOX = replace(
    GPT2,
    positions="rotary",
    parallel=True,
    rotary_fraction=0.25,
    activation="gelu_exact",
    tied=False,
    bias=True,
)
GEMMA = replace(
    LLAMA,
    num_kv_heads=3,
    activation="geglu",
    tied=True,
    post_norm=True,
    window=5,
    full_every=2,
    attention_softcap=2.0,
    logit_softcap=3.0,
)
VIT = ViTConfig(
    width=48,
    depth=3,
    num_heads=6,
    image_size=12,
    patch_size=4,
    num_classes=11,
    pool="cls",
    activation="gelu_exact",
    norm_eps=1e-12,
)
MBART = EncoderDecoderConfig(
    width=48,
    depth=3,
    encoder_depth=2,
    num_heads=6,
    vocab_size=97,
    seq_len=23,
    activation="gelu_exact",
)
T5 = EncoderDecoderConfig(
    width=48,
    depth=3,
    encoder_depth=2,
    num_heads=6,
    head_dim=10,
    vocab_size=97,
    seq_len=23,
    target_len=17,
    mlp_ratio=2.5,
    activation="relu",
    norm="rmsnorm",
    norm_eps=1e-6,
    bias=False,
    positions="relative",
    distance_buckets=16,
    longest_distance=20,
    embedding_norm=False,
)

VARIANTS: dict[str, TransformerConfig] = {
    "Llama 3.1": replace(
        LLAMA, num_kv_heads=2, rope_scaling="llama3", rope_theta=50.0, rope_original_len=16
    ),
    "Llama, linear positions": replace(LLAMA, rope_scaling="linear", rope_factor=3.0),
    "Mistral": replace(LLAMA, num_kv_heads=3, window=5),
    "Qwen2": replace(LLAMA, num_kv_heads=2, head_dim=None, qkv_bias=True),
    "Qwen2, window": replace(LLAMA, qkv_bias=True, tied=True, window=7),
    "GPT-NeoX": NEOX,
    "GPT-NeoX, one after the other": replace(
        NEOX, parallel=False, rotary_fraction=0.5, activation="relu"
    ),
    "SigLIP": replace(VIT, pool="mean", activation="gelu", norm_eps=1e-6),
    "DeiT": replace(VIT, registers=1),
    "DINOv2": replace(VIT, pool="cls-mean", layer_scale=1.0, norm_eps=1e-6),
    "DINOv2, registers": replace(
        VIT, pool="cls-mean", layer_scale=0.125, registers=3, mlp_ratio=2.0
    ),
    "Qwen3": replace(LLAMA, num_kv_heads=2, qk_norm=True),
    "Gemma 2": GEMMA,
    "Gemma 3": replace(
        GEMMA,
        qk_norm=True,
        attention_softcap=None,
        logit_softcap=None,
        window_theta=50.0,
        rope_scaling="linear",
    ),
    "Gemma 2, untied": replace(GEMMA, tied=False, full_every=None, attention_softcap=None),
    "Mixtral": replace(
        LLAMA,
        num_kv_heads=3,
        experts=5,
        active_experts=2,
        expert_dim=24,
        mlp_ratio=1.0,
        routing=RoutingConfig(gate="softmax"),
    ),
    "Qwen3-MoE": replace(
        LLAMA,
        num_kv_heads=2,
        qk_norm=True,
        experts=7,
        active_experts=3,
        expert_dim=20,
        routing=RoutingConfig(gate="softmax"),
    ),
    "Qwen3-MoE, weights not normalized": replace(
        LLAMA,
        num_kv_heads=2,
        qk_norm=True,
        experts=5,
        active_experts=2,
        expert_dim=20,
        window=5,
        routing=RoutingConfig(gate="softmax-all"),
    ),
}
"""Models that differ from one of `MODELS` in a few fields."""

MODELS: dict[str, TransformerConfig] = {
    "GPT-2, tied": GPT2,
    "GPT-2, untied": replace(GPT2, tied=False, activation="relu", mlp_ratio=3.0),
    "Llama, untied": LLAMA,
    "Llama, tied": replace(LLAMA, tied=True, norm_eps=1e-5),
    "Llama, grouped queries": replace(LLAMA, num_kv_heads=2, head_dim=None),
    "Llama, biases": replace(LLAMA, bias=True, num_kv_heads=3),
    "ViT": VIT,
    "MBart, tied": MBART,
    "MBart, untied": replace(MBART, tied=False, activation="relu"),
    "T5": T5,
    "T5 v1.1": replace(T5, tied=False, activation="geglu", target_len=None),
    **VARIANTS,
}
"""Models by the name in the table.

Sizes differ between any two axes that could be mistaken for each other.
"""

WRITTEN: dict[str, TransformerConfig] = {
    "SigLIP, fixed positions": replace(
        VIT, pool="mean", activation="gelu", norm_eps=1e-6, sincos=True
    ),
    "ViT, fixed positions": replace(VIT, sincos=True),
    "Qwen3-MoE, a capacity that drops none": replace(
        VARIANTS["Qwen3-MoE"], routing=RoutingConfig(gate="softmax", capacity_factor=7.0)
    ),
}
"""Models that are written as another model of the same logits, and read as that other model.

`mupax.zoo.huggingface.equivalent` has the other model.
"""
