"""Configs and tensors in the layout of Hugging Face: names, shapes, what is refused. Numbers against `transformers` itself are
compared in test_parity.py."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from mupax.zoo.configs import ConfigError, DecoderConfig, ModelConfig, ViTConfig
from mupax.zoo.definition import definition
from mupax.zoo.encoder_decoder.config import EncoderDecoderConfig
from mupax.zoo.experts.config import RoutingConfig
from mupax.zoo.huggingface import tables, weights
from mupax.zoo.huggingface.architectures import Published
from mupax.zoo.huggingface.config import from_huggingface, to_huggingface
from mupax.zoo.huggingface.names import family_of
from mupax.zoo.huggingface.tensorfile import TensorFileError, Tensors, write_tensors

pytestmark = pytest.mark.core

GPT2 = DecoderConfig(width=6, depth=2, num_heads=3, mlp_ratio=11 / 6, vocab_size=13, seq_len=5, tied=True)
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
NEOX = dataclasses.replace(GPT2, width=12, positions="rotary", parallel=True, rotary_fraction=0.5, tied=False)
VIT = ViTConfig(
    width=6, depth=2, num_heads=3, mlp_ratio=11 / 6, image_size=9, patch_size=3, channels=2, num_classes=7, pool="cls",
    activation="gelu_exact", norm_eps=1e-12,
)  # fmt: skip
MBART = EncoderDecoderConfig(
    width=6, depth=2, encoder_depth=3, num_heads=3, mlp_ratio=11 / 6, vocab_size=13, seq_len=5, activation="gelu_exact"
)
T5 = EncoderDecoderConfig(
    width=6, depth=2, num_heads=3, head_dim=4, mlp_ratio=11 / 6, vocab_size=13, seq_len=5, target_len=4, activation="relu",
    norm="rmsnorm", norm_eps=1e-6, bias=False, positions="relative", distance_buckets=8, longest_distance=16,
    embedding_norm=False,
)  # fmt: skip
MIXTRAL = dataclasses.replace(
    LLAMA, mlp_ratio=10 / 12, experts=3, active_experts=2, expert_dim=5, routing=RoutingConfig(gate="softmax")
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
    "gemma2, untied": dataclasses.replace(GEMMA, tied=False, full_every=None, logit_softcap=None, num_kv_heads=None),
    "gemma3": GEMMA3,
    "gemma3, one wavelength": dataclasses.replace(GEMMA3, window_theta=None, rope_scaling="linear", logit_softcap=30.0),
    "gemma3, windows alone": dataclasses.replace(GEMMA3, window_theta=None, full_every=None, tied=False),
    "gemma2, no window": dataclasses.replace(GEMMA, window=None, full_every=None, attention_softcap=None),
    "mixtral": dataclasses.replace(MIXTRAL, window=3),
    "qwen3-moe": QWEN3_MOE,
    "qwen3-moe, not normalized": dataclasses.replace(QWEN3_MOE, routing=RoutingConfig(gate="softmax-all"), window=2),
    "gpt-neox": NEOX,
    "gpt-neox, one after the other": dataclasses.replace(NEOX, parallel=False, tied=True),
    "siglip": dataclasses.replace(VIT, pool="mean"),
    "vit": VIT,
    "deit": dataclasses.replace(VIT, registers=1),
    "dinov2": dataclasses.replace(VIT, pool="cls-mean", layer_scale=0.5, mlp_ratio=2.0),
    "dinov2, registers": dataclasses.replace(VIT, pool="cls-mean", layer_scale=1.0, mlp_ratio=2.0, registers=3),
    "mbart": MBART,
    "mbart untied": dataclasses.replace(MBART, tied=False, activation="relu", encoder_depth=None),
    "t5": T5,
    "t5 v1.1": dataclasses.replace(T5, tied=False, activation="geglu", target_len=None),
}
every_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)


def random_params(model: ModelConfig) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {name: random.standard_normal(leaf.shape, np.float32) for name, leaf in definition(model).abstract.items()}


def written(model: ModelConfig, folder: Path, **changes: np.ndarray | None) -> Path:
    """A file of the model's random parameters; some of its tensors changed, added or (None) left out."""
    tensors = {**dict(weights.to_huggingface(model, random_params(model))), **changes}
    write_tensors(folder, [(name, value) for name, value in tensors.items() if value is not None])
    return folder


def read(folder: Path, fields: dict[str, Any]) -> weights.Loaded:
    return weights.from_huggingface(Tensors(folder), from_huggingface(json.loads(json.dumps(fields))))


# Configs


@every_model
def test_a_config_comes_back(model: ModelConfig) -> None:
    published = from_huggingface(json.loads(json.dumps(to_huggingface(model))))
    assert published == Published(model)


def test_fields_left_out_have_the_defaults_of_transformers() -> None:
    gpt2, llama, vit = (from_huggingface({"model_type": kind}).model for kind in ("gpt2", "llama", "vit"))
    assert gpt2 == DecoderConfig(width=768, depth=12, num_heads=12, vocab_size=50257, seq_len=1024, tied=True)
    assert isinstance(llama, DecoderConfig)
    assert (llama.mlp_dim, llama.norm_eps, llama.tied, llama.rope_theta) == (11008, 1e-6, False, 10_000)
    assert isinstance(vit, ViTConfig)
    assert (vit.norm_eps, vit.activation, vit.seq_len, vit.num_classes) == (1e-12, "gelu_exact", 197, 2)


def test_older_files_of_gemma_say_wavelengths_and_windows_in_other_words() -> None:
    old = {"rope_theta": 1e6, "rope_local_base_freq": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    model = from_huggingface({"model_type": "gemma3_text", "sliding_window_pattern": 4, **old}).model
    assert isinstance(model, DecoderConfig)
    assert (model.rope_theta, model.window_theta, model.rope_scaling, model.rope_factor) == (1e6, 500.0, "linear", 8.0)
    assert (model.full_every, model.window) == (4, 4096)
    older = from_huggingface({"model_type": "gemma2"}).model
    assert isinstance(older, DecoderConfig)
    assert (older.full_every, older.window, older.tied, older.attention_softcap) == (2, 4096, True, 50.0)


def test_older_files_say_rope_theta_at_the_top() -> None:
    for fields in ({"rope_theta": 7e5}, {"rope_parameters": {"rope_theta": 7e5, "rope_type": "default"}}):
        model = from_huggingface({"model_type": "llama", **fields}).model
        assert isinstance(model, DecoderConfig)
        assert model.rope_theta == 7e5


def test_a_llama_with_some_biases_has_the_others_at_zero() -> None:
    published = from_huggingface({"model_type": "llama", "attention_bias": True})
    assert published.model.bias
    assert published.zeros == {f"block.mlp.{name}_bias" for name in ("up", "gate", "down")}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model_type": "mamba"}, "only gpt2, .*llama, .*vit, deit, siglip, .*mbart, t5, mt5"),
        ({"model_type": ["gpt2"]}, "only gpt2, llama, "),
        ({}, "only gpt2, llama, "),
        ({"model_type": "gemma2", "hidden_activation": "silu"}, "hidden_activation is 'silu'"),
        ({"model_type": "gemma2", "attention_bias": True}, "attention_bias is True"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ({"model_type": "gemma2", "final_logit_softcapping": -1.0}, "final_logit_softcapping is -1.0"),
        ({"model_type": "gemma2", "query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        ({"model_type": "gemma2", "layer_types": ["full_attention"]}, "layer_types is"),
        (
            {"model_type": "gemma2", "layer_types": ["full_attention", "sliding_attention"] * 13},
            "every so-many-th layer",
        ),
        ({"model_type": "gemma2", "rope_scaling": {"rope_type": "yarn", "factor": 2}}, "of type 'yarn'"),
        ({"model_type": "gemma3"}, "vision_config"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping is given"),
        ({"model_type": "gemma3_text", "rope_parameters": {"rope_theta": 5.0}}, "not objects full_attention and"),
        ({"model_type": "gemma3_text", "sliding_window_pattern": "six"}, "sliding_window_pattern is 'six'"),
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
        ({"model_type": "dinov2_with_registers", "num_register_tokens": "4"}, "num_register_tokens is '4'"),
        ({"model_type": "deit", "architectures": ["DeiTForImageClassificationWithTeacher"]}, "distillation_classifier"),
        ({"model_type": "siglip_vision_model"}, "vision_use_head"),
        ({"model_type": "siglip"}, "vision_config is None"),
        (
            {"model_type": "gpt_neox", "rotary_pct": 0.2, "hidden_size": 64, "num_attention_heads": 4},
            "rotary_fraction 0.2 of 16",
        ),
        ({"model_type": "gpt_neox", "hidden_act": "silu"}, "hidden_act is 'silu'"),
        ({"model_type": "bart"}, "norm after every branch"),
        ({"model_type": "mbart", "encoder_ffn_dim": 2048}, "encoder_ffn_dim is 2048 and decoder_ffn_dim 4096"),
        ({"model_type": "mbart", "activation_function": "silu"}, "activation_function is 'silu'"),
        ({"model_type": "t5", "feed_forward_proj": "gated-relu"}, "feed_forward_proj is 'gated-relu'"),
        ({"model_type": "t5", "is_encoder_decoder": False}, "an encoder alone"),
        ({"model_type": "llama", "rope_parameters": {"rope_type": "llama3"}}, "type llama3 need factor"),
        ({"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 0.5}}, "rope_factor is 0.5"),
        ({"model_type": "llama", "rope_scaling": {"type": "yarn", "factor": 2}}, "of type 'yarn'"),
        ({"model_type": "qwen2", "rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "of type 'dynamic'"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "layer_types has both"),
        ({"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["chunked"]}, "layer_types is"),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias is True"),
        ({"model_type": "qwen3_moe", "attention_bias": True}, "attention_bias is True"),
        (
            {"model_type": "qwen3_moe", "decoder_sparse_step": 2},
            "decoder_sparse_step 2 and mlp_only_layers .* without experts",
        ),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, "mlp_only_layers .0. have layers without experts"),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "active_experts 9 is more than the 8 experts"),
        ({"model_type": "mixtral", "num_local_experts": 0}, "num_local_experts is 0"),
        ({"model_type": "llama", "partial_rotary_factor": 0.5}, "a part of each head"),
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
def test_what_our_models_cannot_be_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        from_huggingface(fields)


@pytest.mark.parametrize(
    ("model", "change", "said"),
    [
        (GPT2, {"centered": True}, "difference of two networks"),
        (GPT2, {"qk_norm": True}, "normalizes queries and keys"),
        (GPT2, {"window": 3}, "model.window hides"),
        (LLAMA, {"qk_norm": True, "bias": True}, "model.bias adds"),
        (LLAMA, {"qk_norm": True, "qkv_bias": True}, "two families in one"),
        (MIXTRAL, {"routing": RoutingConfig()}, "its router is a softmax, and model.routing.gate is sigmoid"),
        (MIXTRAL, {"routing": RoutingConfig(gate="softmax-all")}, "gate is softmax-all; write softmax"),
        (MIXTRAL, {"routing": RoutingConfig(gate="softmax", capacity_factor=1.5)}, "capacity_factor drops tokens"),
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
        (GEMMA, {"window_theta": 5.0}, "model.window_theta is of layers"),
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
        (MBART, {"embedding_norm": False, "norm_eps": 1e-6}, "its norms add 1e-05.*--model.embedding-norm"),
        (MBART, {"shared": False}, "one table of embeddings"),
        (T5, {"bias": True, "norm": "layernorm"}, "it has rmsnorm.*--model.no-bias"),
        (T5, {"embedding_norm": True}, "--model.no-embedding-norm"),
        (VIT, {"layer_scale": 0.1}, "model.layer_scale multiplies"),
        (VIT, {"registers": 2}, "model.registers is 2"),
        (VIT, {"pool": "mean", "registers": 2}, "model.registers are tokens"),
        (VIT, {"pool": "cls-mean"}, "model.mlp_ratio is 1.83"),
        (VIT, {"norm": "rmsnorm", "qk_norm": True}, "normalizes queries and keys.*; .*subtracts the mean"),
    ],
)
def test_what_their_code_cannot_be_is_refused(model: ModelConfig, change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        to_huggingface(dataclasses.replace(model, **change))


# Tensors


@every_model
def test_parameters_come_back(model: ModelConfig, tmp_path: Path) -> None:
    params = random_params(model)
    loaded = read(written(model, tmp_path), to_huggingface(model))
    assert loaded.dropped == loaded.zeros == []
    assert set(loaded.params) == set(params)
    for name, value in params.items():
        # Gemma's gains are 1 + w and its embeddings times width^1/2.
        compared = (
            np.testing.assert_array_almost_equal
            if "softcap" in str(model) and family_of(model).startswith("gemma")
            else np.testing.assert_array_equal
        )
        compared(loaded.params[name], value, err_msg=name)


def test_tokens_beside_the_patches_are_rows_of_the_positions(tmp_path: Path) -> None:
    """A distillation token and its position are one vector; registers have no position of their own."""
    for name in ("deit", "dinov2, registers"):
        (folder := tmp_path / name).mkdir()
        model = MODELS[name]
        tensors = dict(weights.to_huggingface(model, random_params(model)))
        prefix = tables.PREFIX[family_of(model)]
        token = f"{prefix}embeddings.{'distillation_token' if name == 'deit' else 'register_tokens'}"
        rows = tensors[token].shape[1]
        assert tensors[f"{prefix}embeddings.position_embeddings"].shape == (1, 11 if name == "deit" else 10, 6)
        assert tensors[token].any() == (name != "deit")
        position = read(written(model, folder, **{token: tensors[token] + 1}), to_huggingface(model)).params["position"]
        expected = random_params(model)["position"]
        expected[1 : 1 + rows] += 1
        np.testing.assert_array_equal(position, expected)


def test_names_are_those_of_the_files() -> None:
    llama = [name for name, _ in weights.to_huggingface(LLAMA, random_params(LLAMA)) if ".1." not in name]
    layer = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    layer += ["input_layernorm", "post_attention_layernorm"]
    outside = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    assert sorted(llama) == sorted([f"model.layers.0.{name}.weight" for name in layer] + outside)
    mixtral = {name: value.shape for name, value in weights.to_huggingface(MIXTRAL, random_params(MIXTRAL))}
    assert mixtral["model.layers.1.block_sparse_moe.gate.weight"] == (3, 12)  # [out, in]
    assert [mixtral[f"model.layers.0.block_sparse_moe.experts.2.w{n}.weight"] for n in (1, 2, 3)] == [
        (5, 12),
        (12, 5),
        (5, 12),
    ]
    assert not any(".mlp." in name or "experts.3." in name for name in mixtral)
    qwen3 = {name: value.shape for name, value in weights.to_huggingface(QWEN3_MOE, random_params(QWEN3_MOE))}
    assert qwen3["model.layers.1.mlp.experts.0.down_proj.weight"] == (12, 7)
    gpt2 = {name: value.shape for name, value in weights.to_huggingface(GPT2, random_params(GPT2))}
    assert gpt2["transformer.h.1.attn.c_attn.weight"] == (6, 18)  # [in, out], query, key and value side by side
    assert gpt2["transformer.h.1.attn.c_attn.bias"] == (18,)
    assert "lm_head.weight" not in gpt2
    vit = {name: value.shape for name, value in weights.to_huggingface(VIT, random_params(VIT))}
    assert vit["vit.embeddings.patch_embeddings.projection.weight"] == (6, 2, 3, 3)
    assert vit["vit.embeddings.position_embeddings"] == (1, 10, 6)
    assert vit["vit.embeddings.cls_token"] == (1, 1, 6)
    assert vit["vit.encoder.layer.1.intermediate.dense.weight"] == (11, 6)  # [out, in]
    assert vit["classifier.weight"] == (7, 6)


def test_a_key_bias_that_softmax_ignores_is_zero_out_and_dropped_in(tmp_path: Path) -> None:
    tensors = dict(weights.to_huggingface(GPT2, random_params(GPT2)))
    bias = tensors["transformer.h.0.attn.c_attn.bias"]
    assert (bias[6:12] == 0).all()
    assert (bias[:6] != 0).all()
    loaded = read(written(GPT2, tmp_path, **{"transformer.h.0.attn.c_attn.bias": bias + 1}), to_huggingface(GPT2))
    assert "block.attention.key_bias" not in loaded.params


def test_gains_and_biases_that_a_model_lacks_are_ones_and_zeros() -> None:
    bare = dataclasses.replace(GPT2, bias=False, norm_gain=False)
    tensors = dict(weights.to_huggingface(bare, random_params(bare)))
    assert set(tensors) == {name for name, _ in weights.to_huggingface(GPT2, random_params(GPT2))}
    assert (tensors["transformer.ln_f.weight"] == 1).all()
    assert (tensors["transformer.h.0.mlp.c_fc.bias"] == 0).all()


@pytest.mark.parametrize("model", [GPT2, dataclasses.replace(LLAMA, tied=True), VIT], ids=["gpt2", "llama", "vit"])
def test_files_of_the_model_without_its_head_have_no_prefix(model: ModelConfig, tmp_path: Path) -> None:
    prefix = tables.PREFIX[family_of(model)]
    tensors = weights.to_huggingface(model, random_params(model))
    bare = [(name.removeprefix(prefix), value) for name, value in tensors if not name.startswith("classifier")]
    write_tensors(tmp_path, bare)
    loaded = read(tmp_path, to_huggingface(model))
    assert loaded.zeros == (["readout", "readout_bias"] if isinstance(model, ViTConfig) else [])
    np.testing.assert_array_equal(loaded.params["block.mlp.up"], random_params(model)["block.mlp.up"])


def test_masks_and_tables_of_older_files_are_dropped(tmp_path: Path) -> None:
    old = {"transformer.h.0.attn.bias": np.ones((1, 1, 5, 5)), "transformer.h.0.attn.masked_bias": np.float32([-1e4])}
    loaded = read(written(GPT2, tmp_path, **old), to_huggingface(GPT2))
    assert loaded.dropped == ["h.0.attn.bias", "h.0.attn.masked_bias"]


def test_a_readout_said_to_be_the_embedding_must_be_it(tmp_path: Path) -> None:
    token = random_params(GPT2)["token"]
    (tmp_path / "same").mkdir()
    loaded = read(written(GPT2, tmp_path / "same", **{"lm_head.weight": token}), to_huggingface(GPT2))
    assert loaded.dropped == ["lm_head.weight"]
    (tmp_path / "other").mkdir()
    with pytest.raises(TensorFileError, match="tie_word_embeddings"):
        read(written(GPT2, tmp_path / "other", **{"lm_head.weight": token + 1}), to_huggingface(GPT2))


@pytest.mark.parametrize(
    ("changes", "fields", "said"),
    [
        ({"transformer.h.1.ln_2.weight": None}, {}, r"h\.1\.ln_2\.weight \(6,\) is missing"),
        ({"transformer.wte.weight": np.ones((12, 6))}, {}, r"shape \(12, 6\); by config.json it would be \(13, 6\)"),
        (
            {"transformer.h.0.attn.q_norm.weight": np.ones(2)},
            {},
            "1 tensors that a gpt2 .* such as h.0.attn.q_norm.weight",
        ),
        ({"wte.weight": np.ones((13, 6))}, {}, "are one tensor"),
        ({}, {"n_layer": 2_000_000_000}, "cannot be the 2000000000 layers"),
        ({}, {**to_huggingface(MIXTRAL), "num_local_experts": 10**9}, "the 2 layers of 1000000000 experts"),
        ({}, {"n_layer": 3}, r"h\.2\.ln_1\.weight .* is missing"),
        ({}, {"n_layer": 1}, "12 tensors that a gpt2"),
        ({}, {"vocab_size": 2_000_000_000}, "by config.json"),
        ({}, {"tie_word_embeddings": False}, "lm_head.weight .* is missing"),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_refused(
    changes: dict[str, Any], fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(TensorFileError, match=said):
        read(written(GPT2, tmp_path, **changes), {**to_huggingface(GPT2), **fields})


# What published models need of ours


def test_the_exact_gelu_is_another_than_the_tanh_form() -> None:
    from scipy.special import erf

    hidden = {}
    for activation in ("gelu", "gelu_exact"):
        graph, stacked = nnx.split(dataclasses.replace(GPT2, activation=activation).module(nnx.Rngs(0)).block.mlp)
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
        np.testing.assert_allclose(norm(x), x / np.sqrt((x**2).mean(-1, keepdims=True) + eps), atol=1e-6)
    with pytest.raises(ConfigError, match="norm_eps is 0"):
        dataclasses.replace(GPT2, norm_eps=0.0)
