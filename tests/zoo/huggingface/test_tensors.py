"""Tensors in the layout of Hugging Face: names, shapes, what is left out, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mupax.zoo.configs import ModelConfig, ViTConfig
from mupax.zoo.huggingface import tables, weights
from mupax.zoo.huggingface.config import to_huggingface
from mupax.zoo.huggingface.names import family_of
from mupax.zoo.huggingface.tensorfile import TensorFileError, write_tensors
from tests.zoo.huggingface.layouts import (
    GPT2,
    LLAMA,
    MIXTRAL,
    MODELS,
    QWEN3_MOE,
    VIT,
    every_model,
    random_params,
    read,
    written,
)

pytestmark = pytest.mark.core


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
        token = (
            f"{prefix}embeddings.{'distillation_token' if name == 'deit' else 'register_tokens'}"
        )
        rows = tensors[token].shape[1]
        assert tensors[f"{prefix}embeddings.position_embeddings"].shape == (
            1,
            11 if name == "deit" else 10,
            6,
        )
        assert tensors[token].any() == (name != "deit")
        position = read(
            written(model, folder, **{token: tensors[token] + 1}), to_huggingface(model)
        ).params["position"]
        expected = random_params(model)["position"]
        expected[1 : 1 + rows] += 1
        np.testing.assert_array_equal(position, expected)


def test_an_image_model_with_a_table_of_tokens_is_refused_by_its_name(tmp_path: Path) -> None:
    table = {"encoder.embed_tokens.weight": np.zeros((8, 6), np.float32)}
    with pytest.raises(TensorFileError, match=r"such as encoder\.embed_tokens\.weight; the model"):
        read(written(VIT, tmp_path, **table), to_huggingface(VIT))


def test_names_are_those_of_the_files() -> None:
    llama = [
        name for name, _ in weights.to_huggingface(LLAMA, random_params(LLAMA)) if ".1." not in name
    ]
    layer = [f"self_attn.{name}_proj" for name in "qkvo"] + [
        f"mlp.{name}_proj" for name in ("gate", "up", "down")
    ]
    layer += ["input_layernorm", "post_attention_layernorm"]
    outside = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    assert sorted(llama) == sorted([f"model.layers.0.{name}.weight" for name in layer] + outside)
    mixtral = {
        name: value.shape for name, value in weights.to_huggingface(MIXTRAL, random_params(MIXTRAL))
    }
    assert mixtral["model.layers.1.block_sparse_moe.gate.weight"] == (3, 12)  # [out, in]
    assert [
        mixtral[f"model.layers.0.block_sparse_moe.experts.2.w{n}.weight"] for n in (1, 2, 3)
    ] == [
        (5, 12),
        (12, 5),
        (5, 12),
    ]
    assert not any(".mlp." in name or "experts.3." in name for name in mixtral)
    qwen3 = {
        name: value.shape
        for name, value in weights.to_huggingface(QWEN3_MOE, random_params(QWEN3_MOE))
    }
    assert qwen3["model.layers.1.mlp.experts.0.down_proj.weight"] == (12, 7)
    gpt2 = {name: value.shape for name, value in weights.to_huggingface(GPT2, random_params(GPT2))}
    assert gpt2["transformer.h.1.attn.c_attn.weight"] == (
        6,
        18,
    )  # [in, out], query, key and value side by side
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
    loaded = read(
        written(GPT2, tmp_path, **{"transformer.h.0.attn.c_attn.bias": bias + 1}),
        to_huggingface(GPT2),
    )
    assert "block.attention.key_bias" not in loaded.params


def test_gains_and_biases_that_a_model_lacks_are_ones_and_zeros() -> None:
    bare = dataclasses.replace(GPT2, bias=False, norm_gain=False)
    tensors = dict(weights.to_huggingface(bare, random_params(bare)))
    assert set(tensors) == {name for name, _ in weights.to_huggingface(GPT2, random_params(GPT2))}
    assert (tensors["transformer.ln_f.weight"] == 1).all()
    assert (tensors["transformer.h.0.mlp.c_fc.bias"] == 0).all()


@pytest.mark.parametrize(
    "model", [GPT2, dataclasses.replace(LLAMA, tied=True), VIT], ids=["gpt2", "llama", "vit"]
)
def test_files_of_the_model_without_its_head_have_no_prefix(
    model: ModelConfig, tmp_path: Path
) -> None:
    prefix = tables.PREFIX[family_of(model)]
    tensors = weights.to_huggingface(model, random_params(model))
    bare = [
        (name.removeprefix(prefix), value)
        for name, value in tensors
        if not name.startswith("classifier")
    ]
    write_tensors(tmp_path, bare)
    loaded = read(tmp_path, to_huggingface(model))
    assert loaded.zeros == (["readout", "readout_bias"] if isinstance(model, ViTConfig) else [])
    np.testing.assert_array_equal(
        loaded.params["block.mlp.up"], random_params(model)["block.mlp.up"]
    )


def test_masks_and_tables_of_older_files_are_dropped(tmp_path: Path) -> None:
    old = {
        "transformer.h.0.attn.bias": np.ones((1, 1, 5, 5)),
        "transformer.h.0.attn.masked_bias": np.float32([-1e4]),
    }
    loaded = read(written(GPT2, tmp_path, **old), to_huggingface(GPT2))
    assert loaded.dropped == ["h.0.attn.bias", "h.0.attn.masked_bias"]


def test_a_readout_said_to_be_the_embedding_must_be_it(tmp_path: Path) -> None:
    token = random_params(GPT2)["token"]
    (tmp_path / "same").mkdir()
    loaded = read(
        written(GPT2, tmp_path / "same", **{"lm_head.weight": token}), to_huggingface(GPT2)
    )
    assert loaded.dropped == ["lm_head.weight"]
    (tmp_path / "other").mkdir()
    with pytest.raises(TensorFileError, match="tie_word_embeddings"):
        read(
            written(GPT2, tmp_path / "other", **{"lm_head.weight": token + 1}), to_huggingface(GPT2)
        )


@pytest.mark.parametrize(
    ("changes", "fields", "message"),
    [
        ({"transformer.h.1.ln_2.weight": None}, {}, r"h\.1\.ln_2\.weight \(6,\) is missing"),
        (
            {"transformer.wte.weight": np.ones((12, 6))},
            {},
            r"shape \(12, 6\); by config.json it would be \(13, 6\)",
        ),
        (
            {"transformer.h.0.attn.q_norm.weight": np.ones(2)},
            {},
            "1 tensors that a gpt2 .* such as h.0.attn.q_norm.weight",
        ),
        ({"wte.weight": np.ones((13, 6))}, {}, "are one tensor"),
        ({}, {"n_layer": 2_000_000_000}, "cannot be the 2000000000 layers"),
        (
            {},
            {**to_huggingface(MIXTRAL), "num_local_experts": 10**9},
            "the 2 layers of 1000000000 experts",
        ),
        ({}, {"n_layer": 3}, r"h\.2\.ln_1\.weight .* is missing"),
        ({}, {"n_layer": 1}, "12 tensors that a gpt2"),
        ({}, {"vocab_size": 2_000_000_000}, "by config.json"),
        ({}, {"tie_word_embeddings": False}, "lm_head.weight .* is missing"),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_refused(
    changes: dict[str, Any], fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(TensorFileError, match=message):
        read(written(GPT2, tmp_path, **changes), {**to_huggingface(GPT2), **fields})
