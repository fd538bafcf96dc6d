"""Roles of parameters by their names in PyTorch, JAX and mupax, and names without meaning."""

from __future__ import annotations

import pytest

from mupax.presets.roles import PresetError
from mupax.presets.verify import names
from mupax.zoo.configs import CONFIGS, get

pytestmark = pytest.mark.core

NAMES_BY_ROLE = {
    "token_embedding": "transformer.wte.weight model.embed_tokens.weight gpt_neox.embed_in.weight embedding.word_embeddings.weight "
    "bert.embeddings.word_embeddings.weight shared.weight encoder.weight vit.embeddings.cls_token "
    "params/MAPHead_0/probe attn_pool.latent perceiver.embeddings.latents query_tokens",
    "position": "transformer.wpe.weight bert.embeddings.position_embeddings.weight Transformer/posembed_input/pos_embedding pos_embed",
    "patch_embedding": "vit.embeddings.patch_embeddings.projection.weight patch_embed.proj.weight conv_proj.weight",
    "qkv": "transformer.h.0.attn.c_attn.weight decoder.layers.0.self_attention.linear_qkv.weight blocks.0.attn.qkv.weight "
    "gpt_neox.layers.1.attention.query_key_value.weight transformer.blocks.0.att_proj.weight e.layers.0.self_attn.in_proj_weight",
    "query": "model.layers.3.self_attn.q_proj.weight bert.encoder.layer.0.attention.self.query.weight "
    "params/encoderblock_0/MultiHeadDotProductAttention_0/query/kernel encoder.block.0.layer.0.SelfAttention.q.weight "
    "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight",
    "attention_out": "transformer.h.0.attn.c_proj.weight model.layers.3.self_attn.o_proj.weight gpt_neox.layers.1.attention.dense.weight "
    "bert.encoder.layer.0.attention.output.dense.weight blocks.0.attn.proj.weight encoder.block.0.layer.0.SelfAttention.o.weight",
    "mlp_in": "transformer.h.0.mlp.c_fc.weight model.layers.3.mlp.gate_proj.weight gpt_neox.layers.1.mlp.dense_h_to_4h.weight "
    "bert.encoder.layer.0.intermediate.dense.weight params/encoderblock_0/MlpBlock_0/Dense_0/kernel transformer.blocks.0.ff_proj.weight",
    "mlp_out": "transformer.h.0.mlp.c_proj.weight model.layers.3.mlp.down_proj.weight bert.encoder.layer.0.output.dense.weight "
    "params/encoderblock_0/MlpBlock_0/Dense_1/kernel encoder.block.0.layer.1.DenseReluDense.wo.weight transformer.blocks.0.ff_out.weight",
    "norm_gain": "transformer.h.0.ln_1.weight model.norm.weight model.layers.3.input_layernorm.weight blocks.0.ls1.gamma "
    "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight params/encoderblock_0/LayerNorm_0/scale layer1.0.bn1.weight",
    "query.norm_gain": "model.layers.0.self_attn.q_norm.weight block.attention.query_norm.gain",
    "relative_bias": "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight encoder.relative_bias",
    "readout": "lm_head.weight embed_out.weight output_layer.weight transformer.ff_out.weight head.weight classifier.weight decoder.weight",
    "none": "model.layers.0.mlp.experts.3.w1.weight model.layers.0.mamba.conv1d.weight model.layers.0.block_sparse_moe.gate.weight "
    "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight decoder.layers.0.mlp.router.weight model.layers.0.mlp.router.bias "
    "model.layers.0.mlp.shared_experts.up_proj.weight model.layers.0.mlp.shared_expert_gate.weight model.layers.0.mlp.experts.gate_up_proj "
    "backbone.layers.0.mixer.in_proj.weight backbone.layers.0.mixer.out_proj.weight backbone.layers.0.mixer.A_log backbone.layers.0.mixer.D "
    "model.layers.0.self_attn.q_proj.lora_A.default.weight model.layers.0.mlp.up_proj.lora_B.weight block.attention.query_lora.a "
    "encoder.block.0.layer.1.mlp.router.classifier.weight transformer.blocks.0.ffn.experts.mlp.w1 transformer.blocks.0.ffn.router.layer.weight",
    "": "probe.weight model.head.probe.kernel blocks.0.attn.latent.weight "
    "fc_1.weight layer1.0.conv1.weight linear.weight something.weight t_embedder.mlp.0.weight member_proj.weight",
    "embedding": "params/embedding/kernel params/Embed_0/embedding params/items/embedding embedding.weight emb.weight src_embedding.weight "
    "bert.embeddings.token_type_embeddings.weight value_embeds.0.weight y_embedder.embedding_table.weight time_embed.2.weight char_embs.weight",
}  # fmt: skip


@pytest.mark.parametrize(
    ("role", "name"),
    [(role, name) for role, paths in NAMES_BY_ROLE.items() for name in paths.split()],
)
def test_a_name_says_what_a_parameter_is(role: str, name: str):
    assert names.label(names.merged(name)).role == role


def test_a_gate_beside_experts_is_a_router_and_elsewhere_a_matrix():
    paths = ["mlp.gate.weight", "mlp.gate.e_score_correction_bias", "mlp.experts.0.up_proj.weight"]
    moe = [names.merged(f"model.layers.3.{path}") for path in paths]
    with_experts = names.modules_of_experts(moe)
    assert {names.label(name, with_experts=with_experts).role for name in moe} == {"none"}
    # DeepSeek's first layers have no experts. Their names end in gate_proj.
    dense = names.merged("model.layers.0.mlp.gate_proj.weight")
    assert names.label(dense, with_experts=with_experts).role == "mlp_in"
    assert names.label("blocks.*.mlp.gate.weight").role == "mlp_in"


def test_a_model_that_is_called_moe_or_mamba_is_judged():
    for name in ("qwen_moe.layers.0.self_attn.q_proj.weight", "mamba.blocks.0.attn.wq.weight"):
        assert names.label(names.merged(name)).role == "query"
    assert names.label("mamba.embed_tokens.weight").role == "token_embedding"
    assert names.label("qwen_moe.lm_head.weight").role == "readout"
    assert names.label("model.rotary_emb.inv_freq").role == "none"


@pytest.mark.parametrize("model", CONFIGS)
def test_every_parameter_of_the_zoo_is_known(model: str):
    specs = get(model).parameters()
    has_encoder = any(name.startswith("encoder.") for name in specs)
    for name, spec in specs.items():
        label = names.label(name, has_encoder)
        role = spec.role if spec.of is None or label.leaf != "bias" else spec.of
        if spec.role.value.startswith("expert") or "router" in name:
            assert label.role == "none", name
        elif spec.of is not None and spec.role.value == "norm_gain" and label.role == "norm_gain":
            # Of what a branch writes, whose row is that of other gains.
            assert label.leaf == "gain", name
        else:
            assert label.role.split(".")[0] in (role.value, spec.of.value if spec.of else ""), name
        assert label.in_block == spec.in_block, name
        assert label.part == spec.part, name


def test_layers_are_merged_by_their_number():
    assert names.merged("model.layers.11.mlp.weight") == "model.layers.*.mlp.weight"
    assert names.merged("layer1.0.conv1.weight") == "layer1.0.conv1.weight"


@pytest.mark.parametrize("text", ["readout", "=readout", "*.out=readot", "*.out="])
def test_a_role_that_is_none_is_refused(text: str):
    with pytest.raises(
        PresetError,
        match=r"write PATTERN=ROLE, such as '\*\.out\.weight=readout'; roles are token_embedding",
    ):
        names.read_overrides([text])
