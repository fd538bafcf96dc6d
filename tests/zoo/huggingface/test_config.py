"""Configs in the layout of Hugging Face: what comes back, what is refused, and what published models need of ours. Numbers against
`transformers` itself are compared in test_parity.py."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from mupax.zoo.configs import ConfigError, DecoderConfig, ModelConfig, ViTConfig
from mupax.zoo.huggingface.architectures import Published
from mupax.zoo.huggingface.config import from_huggingface, to_huggingface
from mupax.zoo.transformer import RoutingConfig
from tests.zoo.huggingface.layouts import (
    GEMMA,
    GEMMA3,
    GPT2,
    LLAMA,
    MBART,
    MIXTRAL,
    NEOX,
    QWEN3_MOE,
    T5,
    VIT,
    every_model,
)

pytestmark = pytest.mark.core


@every_model
def test_a_config_comes_back(model: ModelConfig) -> None:
    published = from_huggingface(json.loads(json.dumps(to_huggingface(model))))
    assert published == Published(model)


def test_fields_left_out_have_the_defaults_of_transformers() -> None:
    gpt2, llama, vit = (
        from_huggingface({"model_type": kind}).model for kind in ("gpt2", "llama", "vit")
    )
    assert gpt2 == DecoderConfig(
        width=768, depth=12, num_heads=12, vocab_size=50257, seq_len=1024, tied=True
    )
    assert isinstance(llama, DecoderConfig)
    assert (llama.mlp_dim, llama.norm_eps, llama.tied, llama.rope_theta) == (
        11008,
        1e-6,
        False,
        10_000,
    )
    assert isinstance(vit, ViTConfig)
    assert (vit.norm_eps, vit.activation, vit.seq_len, vit.num_classes) == (
        1e-12,
        "gelu_exact",
        197,
        2,
    )


def test_older_files_of_gemma_say_wavelengths_and_windows_in_other_words() -> None:
    old = {
        "rope_theta": 1e6,
        "rope_local_base_freq": 500.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    model = from_huggingface(
        {"model_type": "gemma3_text", "sliding_window_pattern": 4, **old}
    ).model
    assert isinstance(model, DecoderConfig)
    assert (model.rope_theta, model.window_theta, model.rope_scaling, model.rope_factor) == (
        1e6,
        500.0,
        "linear",
        8.0,
    )
    assert (model.full_every, model.window) == (4, 4096)
    older = from_huggingface({"model_type": "gemma2"}).model
    assert isinstance(older, DecoderConfig)
    assert (older.full_every, older.window, older.tied, older.attention_softcap) == (
        2,
        4096,
        True,
        50.0,
    )


def test_older_files_say_rope_theta_at_the_top() -> None:
    for fields in (
        {"rope_theta": 7e5},
        {"rope_parameters": {"rope_theta": 7e5, "rope_type": "default"}},
    ):
        model = from_huggingface({"model_type": "llama", **fields}).model
        assert isinstance(model, DecoderConfig)
        assert model.rope_theta == 7e5


def test_a_llama_with_some_biases_has_the_others_at_zero() -> None:
    published = from_huggingface({"model_type": "llama", "attention_bias": True})
    assert published.model.bias
    assert published.zeros == {f"block.mlp.{name}_bias" for name in ("up", "gate", "down")}


def test_fields_that_a_t5_or_mt5_leaves_out_have_its_own_defaults() -> None:
    t5 = from_huggingface({"model_type": "t5"}).model
    assert (t5.depth, t5.num_heads, t5.mlp_dim, t5.activation) == (6, 8, 2048, "relu")
    assert t5.sizes()["vocab"] == 32128
    # Those of mT5-small (MT5Config in transformers), whose heads do not fill the width.
    mt5 = from_huggingface({"model_type": "mt5"}).model
    assert (mt5.depth, mt5.num_heads, mt5.mlp_dim, mt5.activation) == (8, 6, 1024, "geglu")
    assert (mt5.width, mt5.heads_dim) == (512, 64)
    assert mt5.sizes()["vocab"] == 250112


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "mamba"}, "only gpt2, .*llama, .*vit, deit, siglip, .*mbart, t5, mt5"),
        ({"model_type": ["gpt2"]}, "only gpt2, llama, "),
        ({}, "only gpt2, llama, "),
        ({"model_type": "gemma2", "hidden_activation": "silu"}, "hidden_activation is 'silu'"),
        ({"model_type": "gemma2", "attention_bias": True}, "attention_bias is True"),
        (
            {"model_type": "gemma2", "use_bidirectional_attention": True},
            "use_bidirectional_attention is True",
        ),
        (
            {"model_type": "gemma2", "final_logit_softcapping": -1.0},
            "final_logit_softcapping is -1.0",
        ),
        ({"model_type": "gemma2", "query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        ({"model_type": "gemma2", "layer_types": ["full_attention"]}, "layer_types is"),
        (
            {"model_type": "gemma2", "layer_types": ["full_attention", "sliding_attention"] * 13},
            "every so-many-th layer",
        ),
        (
            {"model_type": "gemma2", "rope_scaling": {"rope_type": "yarn", "factor": 2}},
            "of type 'yarn'",
        ),
        ({"model_type": "gemma3"}, "vision_config"),
        (
            {"model_type": "gemma3_text", "attn_logit_softcapping": 50.0},
            "attn_logit_softcapping is 50.0, and Gemma 3's code in transformers ignores it; write null",
        ),
        (
            {"model_type": "gemma3_text", "rope_parameters": {"rope_theta": 5.0}},
            "not objects full_attention and",
        ),
        ({"model_type": "gemma3_text", "rope_scaling": "linear"}, "rope_scaling is 'linear'"),
        (
            {"model_type": "gemma3_text", "sliding_window_pattern": "six"},
            "sliding_window_pattern is 'six'",
        ),
        (
            {
                "model_type": "gemma3_text",
                "rope_parameters": {
                    "full_attention": {},
                    "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
                },
            },
            "rope_parameters of sliding_attention scale",
        ),
        ({"model_type": "dinov2", "use_swiglu_ffn": True}, "use_swiglu_ffn is True"),
        ({"model_type": "dinov2", "layerscale_value": 0.0}, "layerscale_value is 0"),
        (
            {"model_type": "dinov2_with_registers", "num_register_tokens": "4"},
            "num_register_tokens is '4'",
        ),
        (
            {"model_type": "deit", "architectures": ["DeiTForImageClassificationWithTeacher"]},
            "distillation_classifier",
        ),
        ({"model_type": "siglip_vision_model"}, "vision_use_head"),
        ({"model_type": "siglip"}, "vision_config is None"),
        (
            {
                "model_type": "gpt_neox",
                "rotary_pct": 0.2,
                "hidden_size": 64,
                "num_attention_heads": 4,
            },
            "rotary_fraction 0.2 of 16",
        ),
        ({"model_type": "gpt_neox", "hidden_act": "silu"}, "hidden_act is 'silu'"),
        ({"model_type": "bart"}, "norm after every branch"),
        (
            {"model_type": "mbart", "encoder_ffn_dim": 2048},
            "encoder_ffn_dim is 2048 and decoder_ffn_dim 4096",
        ),
        ({"model_type": "mbart", "activation_function": "silu"}, "activation_function is 'silu'"),
        (
            {"model_type": "t5", "feed_forward_proj": "gated-relu"},
            "feed_forward_proj is 'gated-relu'",
        ),
        ({"model_type": "t5", "is_encoder_decoder": False}, "an encoder alone"),
        (
            {"model_type": "llama", "rope_parameters": {"rope_type": "llama3"}},
            "type llama3 need factor",
        ),
        (
            {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 0.5}},
            "rope_factor is 0.5",
        ),
        ({"model_type": "llama", "rope_scaling": {"type": "yarn", "factor": 2}}, "of type 'yarn'"),
        (
            {"model_type": "qwen2", "rope_scaling": {"rope_type": "dynamic", "factor": 2}},
            "of type 'dynamic'",
        ),
        ({"model_type": "qwen2", "use_sliding_window": True}, "layer_types has both"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": "x"},
            "max_window_layers is 'x'",
        ),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["chunked"]},
            "layer_types is",
        ),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias is True"),
        ({"model_type": "qwen3_moe", "attention_bias": True}, "attention_bias is True"),
        (
            {"model_type": "qwen3_moe", "decoder_sparse_step": 2},
            "decoder_sparse_step 2 and mlp_only_layers .* without experts",
        ),
        (
            {"model_type": "qwen3_moe", "mlp_only_layers": [0]},
            "mlp_only_layers .0. have layers without experts",
        ),
        (
            {"model_type": "mixtral", "num_experts_per_tok": 9},
            "active_experts 9 is more than the 8 experts",
        ),
        ({"model_type": "mixtral", "num_local_experts": 0}, "num_local_experts is 0"),
        ({"model_type": "llama", "partial_rotary_factor": 0.5}, "a part of each head"),
        ({"model_type": "llama", "partial_rotary_factor": "x"}, "partial_rotary_factor is 'x'"),
        ({"model_type": "llama", "hidden_act": "gelu"}, "our gated MLP has silu"),
        ({"model_type": "gpt2", "activation_function": "tanh"}, "activation_function is 'tanh'"),
        ({"model_type": "gpt2", "scale_attn_weights": False}, "without head_dim"),
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "layer's number"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "encoder"),
        ({"model_type": "gpt2", "n_embd": 770}, "not divisible by model.num_heads"),
        ({"model_type": "gpt2", "n_layer": 0}, "n_layer is 0"),
        ({"model_type": "gpt2", "n_layer": 1e3}, "n_layer is 1000.0"),
        ({"model_type": "gpt2", "n_embd": 10**40}, "n_embd is 1000"),
        ({"model_type": "gpt2", "n_embd": True}, "n_embd is True"),
        ({"model_type": "gpt2", "layer_norm_epsilon": float("nan")}, "layer_norm_epsilon is nan"),
        ({"model_type": "gpt2", "tie_word_embeddings": "yes"}, "not true or false"),
        ({"model_type": "vit", "image_size": [224, 196]}, "square"),
        ({"model_type": "vit", "image_size": 225}, "not divisible by model.patch_size"),
    ],
)
def test_what_our_models_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_huggingface(fields)


def test_a_null_field_means_its_default() -> None:
    llama = {"model_type": "llama"}
    assert from_huggingface({**llama, "partial_rotary_factor": None}) == from_huggingface(llama)
    qwen = {"model_type": "qwen2", "use_sliding_window": True, "num_hidden_layers": 28}
    default = from_huggingface(qwen).model
    assert isinstance(default, DecoderConfig)
    assert default.window is None
    assert from_huggingface({**qwen, "max_window_layers": None}).model == default
    everywhere = from_huggingface({**qwen, "max_window_layers": 0}).model
    assert isinstance(everywhere, DecoderConfig)
    assert everywhere.window == 4096


@pytest.mark.parametrize(
    ("model", "change", "message"),
    [
        (GPT2, {"centered": True}, "difference of two networks"),
        (GPT2, {"qk_norm": True}, "normalizes queries and keys"),
        (GPT2, {"window": 3}, "model.window hides"),
        (LLAMA, {"qk_norm": True, "bias": True}, "model.bias adds"),
        (LLAMA, {"qk_norm": True, "norm_gain": False}, "model.qk_norm has no gains"),
        (LLAMA, {"qk_norm": True, "qkv_bias": True}, "two families in one"),
        (
            MIXTRAL,
            {"routing": RoutingConfig()},
            "its router is a softmax, and model.routing.gate is sigmoid",
        ),
        (
            MIXTRAL,
            {"routing": RoutingConfig(gate="softmax-all")},
            "gate is softmax-all; write softmax",
        ),
        (
            MIXTRAL,
            {"routing": RoutingConfig(gate="softmax", capacity_factor=1.5)},
            "capacity_factor drops tokens",
        ),
        (
            QWEN3_MOE,
            {"routing": RoutingConfig(gate="softmax", balance="bias")},
            "adds to scores where experts are chosen",
        ),
        (MIXTRAL, {"shared_experts": 1}, "experts that every token goes to"),
        (MIXTRAL, {"qkv_bias": True}, "model.qkv_bias adds to queries"),
        (MIXTRAL, {"bias": True}, "model.bias adds"),
        (MIXTRAL, {"positions": "learned"}, "model.experts routes tokens"),
        (VIT, {"experts": 2, "expert_dim": 3}, "model.experts routes tokens"),
        (T5, {"qkv_bias": True}, "it has no biases"),
        (LLAMA, {"branch_activation": "gelu"}, "acts on what branches read"),
        (GPT2, {"readout_bias": True}, "adds to the logits"),
        (LLAMA, {"post_norm": True}, "needs rmsnorm and geglu, not rmsnorm and swiglu"),
        (LLAMA, {"logit_softcap": 2.0}, "model.post_norm does not"),
        (GEMMA, {"bias": True}, "model.bias adds"),
        (GEMMA, {"qkv_bias": True}, "model.qkv_bias adds"),
        (GEMMA, {"qk_norm": True}, "model.attention_softcap bounds"),
        (GEMMA, {"window_theta": 5.0}, "model.window_theta is another for some"),
        (GEMMA, {"experts": 2, "expert_dim": 6}, "model.experts routes"),
        (GEMMA3, {"norm_eps": 1e-6, "qk_norm_kind": "layernorm"}, "model.qk_norm_kind layernorm"),
        (GEMMA, {"parallel": True}, "model.post_norm normalizes"),
        (GPT2, {"post_norm": True}, "model.post_norm normalizes"),
        (GPT2, {"attention_softcap": 2.0}, "model.attention_softcap, model.logit_softcap"),
        (LLAMA, {"norm": "layernorm"}, "needs rmsnorm and swiglu, not layernorm"),
        (LLAMA, {"activation": "gelu"}, "needs rmsnorm and swiglu, not rmsnorm and gelu"),
        (LLAMA, {"num_heads": 8}, "multiple of model.num_heads 8"),
        (GPT2, {"norm": "rmsnorm"}, "subtracts the mean"),
        (GPT2, {"activation": "swiglu"}, "no gate"),
        (GPT2, {"num_kv_heads": 1}, "no grouped queries"),
        (GPT2, {"head_dim": 4}, "3 heads of 4 are not 6"),
        (NEOX, {"num_kv_heads": 1}, "no grouped queries"),
        (NEOX, {"window": 3}, "model.window hides"),
        (NEOX, {"qk_norm": True}, "normalizes queries and keys"),
        (GPT2, {"parallel": True}, "model.parallel has the MLP read"),
        (LLAMA, {"parallel": True}, "it has LayerNorm"),
        (MBART, {"positions": "rotary"}, "no rotary positions"),
        (MBART, {"target_len": 4}, "as many positions in both stacks, not 5 and 4"),
        (
            MBART,
            {"embedding_norm": False, "norm_eps": 1e-6},
            "its norms add 1e-05.*--model.embedding-norm",
        ),
        (MBART, {"shared": False}, "one table of embeddings"),
        (T5, {"bias": True, "norm": "layernorm"}, "it has rmsnorm.*--model.no-bias"),
        (T5, {"embedding_norm": True}, "--model.no-embedding-norm"),
        (VIT, {"layer_scale": 0.1}, "model.layer_scale multiplies"),
        (VIT, {"stem": 2}, "model.stem makes patches by convolutions"),
        (VIT, {"registers": 2}, "model.registers is 2"),
        (VIT, {"pool": "mean", "registers": 2}, "model.registers are tokens"),
        (VIT, {"pool": "cls-mean"}, "model.mlp_ratio is 1.83"),
        (
            VIT,
            {"norm": "rmsnorm", "qk_norm": True},
            "normalizes queries and keys.*; .*subtracts the mean",
        ),
    ],
)
def test_what_their_code_cannot_be_is_refused(
    model: ModelConfig, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        to_huggingface(dataclasses.replace(model, **change))


# What published models need of ours


def test_the_exact_gelu_is_another_than_the_tanh_form() -> None:
    from scipy.special import erf

    hidden = {}
    for activation in ("gelu", "gelu_exact"):
        graph, stacked = nnx.split(
            dataclasses.replace(GPT2, activation=activation).module(nnx.Rngs(0)).block.mlp
        )
        mlp = nnx.merge(graph, jax.tree.map(lambda array: array[0], stacked))
        x = np.random.default_rng(0).standard_normal((2, 3, GPT2.width)).astype(np.float32)
        hidden[activation] = np.asarray(mlp(x))
        up, down = np.asarray(mlp.up[...], np.float64), np.asarray(mlp.down[...], np.float64)
        exact = (x @ up) * 0.5 * (1 + erf(x @ up / np.sqrt(2))) @ down
        assert (np.abs(hidden[activation] - exact).max() < 1e-5) == (activation == "gelu_exact")
    assert 1e-5 < np.abs(hidden["gelu"] - hidden["gelu_exact"]).max() < 1e-2


def test_norms_add_the_models_eps() -> None:
    x = np.random.default_rng(0).standard_normal((3, 6)).astype(np.float32)
    for eps in (1e-12, 0.5):
        norm = dataclasses.replace(GPT2, norm="rmsnorm", norm_eps=eps).module(nnx.Rngs(0)).norm
        np.testing.assert_allclose(
            norm(x), x / np.sqrt((x**2).mean(-1, keepdims=True) + eps), atol=1e-6
        )
    with pytest.raises(ConfigError, match="norm_eps is 0"):
        dataclasses.replace(GPT2, norm_eps=0.0)
