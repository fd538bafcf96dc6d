"""Tables of the tensors in Hugging Face's files: name, layout and our parameters in each.

`names` reads the tables. A line is a name without the prefix, a layout, and the names of one or
more of our parameters. {i} is the index of a layer, {j} that of an expert. A name without an ending
such as .weight or .bias stands for two tensors, the matrix and its bias.

| layout         | shape in the file                                                       |
|----------------|-------------------------------------------------------------------------|
| same           | shape of our parameter                                                  |
| linear         | [out, in], heads and their dimensions in one axis                       |
| conv1d         | [in, out], several parameters side by side along the last axis          |
| flat           | one axis                                                                |
| norm           | gain (.weight) and bias (.bias) of a norm, both flat                    |
| fused          | query, key and value side by side within each head, [out, in]           |
| conv2d         | [D, C, P, P] for patches of C channels and P x P pixels                 |
| rank3          | leading axes of size 1, such that there are three axes                  |
| registers      | [1, registers, D]                                                       |
| not_registers  | [1, positions, D], our rows of positions without those of the registers |
| after_two_rows | two rows that nothing reads, then the rows of ours                      |
| row            | [1, V]                                                                  |
| pooled         | [out, in] for inputs that are several vectors side by side              |
"""

from __future__ import annotations

from mupax.zoo.huggingface.architectures import Family
from mupax.zoo.transformer import TransformerConfig

PREFIX: dict[Family, str] = {
    "gpt2": "transformer.",
    "llama": "model.",
    "mistral": "model.",
    "qwen2": "model.",
    "qwen3": "model.",
    "gemma2": "model.",
    "gemma3_text": "model.",
    "mixtral": "model.",
    "qwen3_moe": "model.",
    "mbart": "model.",
    "vit": "vit.",
    "gpt_neox": "gpt_neox.",
    "siglip": "vision_model.",
    "deit": "deit.",
    "dinov2": "dinov2.",
    "dinov2_with_registers": "dinov2_with_registers.",
    "t5": "",
}
"""Prefix of all names but those in `names.HEADS`, in files of a model with its head."""

_GPT2 = """
wte.weight same token
wpe.weight same position
h.{i}.ln_1 norm block.attention_norm
h.{i}.attn.c_attn.weight conv1d block.attention.query block.attention.key block.attention.value
h.{i}.attn.c_attn.bias flat block.attention.query_bias \
    block.attention.key_bias block.attention.value_bias
h.{i}.attn.c_proj conv1d block.attention.out
h.{i}.ln_2 norm block.mlp_norm
h.{i}.mlp.c_fc conv1d block.mlp.up
h.{i}.mlp.c_proj conv1d block.mlp.down
ln_f norm norm
"""
_LLAMA = """
embed_tokens.weight same token
layers.{i}.self_attn.q_proj linear block.attention.query
layers.{i}.self_attn.k_proj linear block.attention.key
layers.{i}.self_attn.v_proj linear block.attention.value
layers.{i}.self_attn.o_proj linear block.attention.out
layers.{i}.mlp.gate_proj linear block.mlp.gate
layers.{i}.mlp.up_proj linear block.mlp.up
layers.{i}.mlp.down_proj linear block.mlp.down
layers.{i}.input_layernorm.weight flat block.attention_norm.gain
layers.{i}.post_attention_layernorm.weight flat block.mlp_norm.gain
norm.weight flat norm.gain
"""
_MIXTRAL_EXPERTS = """
layers.{i}.block_sparse_moe.gate.weight linear block.experts.router
layers.{i}.block_sparse_moe.experts.{j}.w1.weight linear block.experts.gate
layers.{i}.block_sparse_moe.experts.{j}.w3.weight linear block.experts.up
layers.{i}.block_sparse_moe.experts.{j}.w2.weight linear block.experts.down
"""
_QWEN3_EXPERTS = """
layers.{i}.mlp.gate.weight linear block.experts.router
layers.{i}.mlp.experts.{j}.gate_proj.weight linear block.experts.gate
layers.{i}.mlp.experts.{j}.up_proj.weight linear block.experts.up
layers.{i}.mlp.experts.{j}.down_proj.weight linear block.experts.down
"""
_QK_NORM = """
layers.{i}.self_attn.q_norm.weight flat block.attention.query_norm.gain
layers.{i}.self_attn.k_norm.weight flat block.attention.key_norm.gain
"""
_SANDWICH = """
layers.{i}.post_attention_layernorm.weight flat block.attention_gain
layers.{i}.pre_feedforward_layernorm.weight flat block.mlp_norm.gain
layers.{i}.post_feedforward_layernorm.weight flat block.mlp_gain
"""
# In Gemma, post_attention_layernorm is a norm of the attention branch's output. In Llama it is the
# norm before the MLP.
_GEMMA2 = _LLAMA.replace(
    "layers.{i}.post_attention_layernorm.weight flat block.mlp_norm.gain\n", _SANDWICH.lstrip()
)
_VIT = """
embeddings.cls_token rank3 cls
embeddings.position_embeddings rank3 position
embeddings.patch_embeddings.projection.weight conv2d patch
embeddings.patch_embeddings.projection.bias flat patch_bias
encoder.layer.{i}.layernorm_before norm block.attention_norm
encoder.layer.{i}.attention.attention.query linear block.attention.query
encoder.layer.{i}.attention.attention.key linear block.attention.key
encoder.layer.{i}.attention.attention.value linear block.attention.value
encoder.layer.{i}.attention.output.dense linear block.attention.out
encoder.layer.{i}.layernorm_after norm block.mlp_norm
encoder.layer.{i}.intermediate.dense linear block.mlp.up
encoder.layer.{i}.output.dense linear block.mlp.down
layernorm norm norm
classifier linear readout
"""
_DISTILLED = "embeddings.distillation_token registers registers\n"
_DINOV2 = """
embeddings.cls_token rank3 cls
embeddings.position_embeddings not_registers position
embeddings.patch_embeddings.projection.weight conv2d patch
embeddings.patch_embeddings.projection.bias flat patch_bias
encoder.layer.{i}.norm1 norm block.attention_norm
encoder.layer.{i}.attention.attention.query linear block.attention.query
encoder.layer.{i}.attention.attention.key linear block.attention.key
encoder.layer.{i}.attention.attention.value linear block.attention.value
encoder.layer.{i}.attention.output.dense linear block.attention.out
encoder.layer.{i}.layer_scale1.lambda1 flat block.attention_gain
encoder.layer.{i}.norm2 norm block.mlp_norm
encoder.layer.{i}.mlp.fc1 linear block.mlp.up
encoder.layer.{i}.mlp.fc2 linear block.mlp.down
encoder.layer.{i}.layer_scale2.lambda1 flat block.mlp_gain
layernorm norm norm
classifier.weight pooled readout
classifier.bias flat readout_bias
"""
_REGISTERS = "embeddings.register_tokens registers registers\n"
_SIGLIP = """
embeddings.position_embedding.weight same position
embeddings.patch_embedding.weight conv2d patch
embeddings.patch_embedding.bias flat patch_bias
encoder.layers.{i}.layer_norm1 norm block.attention_norm
encoder.layers.{i}.self_attn.q_proj linear block.attention.query
encoder.layers.{i}.self_attn.k_proj linear block.attention.key
encoder.layers.{i}.self_attn.v_proj linear block.attention.value
encoder.layers.{i}.self_attn.out_proj linear block.attention.out
encoder.layers.{i}.layer_norm2 norm block.mlp_norm
encoder.layers.{i}.mlp.fc1 linear block.mlp.up
encoder.layers.{i}.mlp.fc2 linear block.mlp.down
post_layernorm norm norm
classifier linear readout
"""
_GPT_NEOX = """
embed_in.weight same token
layers.{i}.input_layernorm norm block.attention_norm
layers.{i}.attention.query_key_value.weight fused block.attention.query \
    block.attention.key block.attention.value
layers.{i}.attention.query_key_value.bias fused block.attention.query_bias \
    block.attention.key_bias block.attention.value_bias
layers.{i}.attention.dense linear block.attention.out
layers.{i}.post_attention_layernorm norm block.mlp_norm
layers.{i}.mlp.dense_h_to_4h linear block.mlp.up
layers.{i}.mlp.dense_4h_to_h linear block.mlp.down
final_layer_norm norm norm
"""
# The stacks of an encoder-decoder differ in their names only. `table` fills in the placeholders.
_MBART_STACK = """
{stack}.embed_positions.weight after_two_rows {prefix}position
{stack}.layernorm_embedding norm {prefix}embedding_norm
{stack}.layers.{i}.self_attn.q_proj linear {prefix}block.attention.query
{stack}.layers.{i}.self_attn.k_proj linear {prefix}block.attention.key
{stack}.layers.{i}.self_attn.v_proj linear {prefix}block.attention.value
{stack}.layers.{i}.self_attn.out_proj linear {prefix}block.attention.out
{stack}.layers.{i}.self_attn_layer_norm norm {prefix}block.attention_norm
{stack}.layers.{i}.fc1 linear {prefix}block.mlp.up
{stack}.layers.{i}.fc2 linear {prefix}block.mlp.down
{stack}.layers.{i}.final_layer_norm norm {prefix}block.mlp_norm
{stack}.layer_norm norm {prefix}norm
"""
_MBART_CROSS = """
decoder.layers.{i}.encoder_attn.q_proj linear block.cross.query
decoder.layers.{i}.encoder_attn.k_proj linear block.cross.key
decoder.layers.{i}.encoder_attn.v_proj linear block.cross.value
decoder.layers.{i}.encoder_attn.out_proj linear block.cross.out
decoder.layers.{i}.encoder_attn_layer_norm norm block.cross_norm
final_logits_bias row readout_bias
"""
# The first block of a stack holds the table of relative positions for all its blocks.
_T5_STACK = """
{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight same {prefix}relative_bias
{stack}.block.{i}.layer.0.SelfAttention.q.weight linear {prefix}block.attention.query
{stack}.block.{i}.layer.0.SelfAttention.k.weight linear {prefix}block.attention.key
{stack}.block.{i}.layer.0.SelfAttention.v.weight linear {prefix}block.attention.value
{stack}.block.{i}.layer.0.SelfAttention.o.weight linear {prefix}block.attention.out
{stack}.block.{i}.layer.0.layer_norm.weight flat {prefix}block.attention_norm.gain
{stack}.block.{i}.layer.{mlp_layer}.DenseReluDense.{up_name}.weight linear {prefix}block.mlp.up
{stack}.block.{i}.layer.{mlp_layer}.DenseReluDense.wo.weight linear {prefix}block.mlp.down
{stack}.block.{i}.layer.{mlp_layer}.layer_norm.weight flat {prefix}block.mlp_norm.gain
{stack}.final_layer_norm.weight flat {prefix}norm.gain
"""
# T5 v1.1 has a gate, wi_0. The other matrix into the MLP is then wi_1 instead of wi.
_T5_GATE = (
    "{stack}.block.{i}.layer.{mlp_layer}.DenseReluDense.wi_0.weight linear {prefix}block.mlp.gate\n"
)
_T5_CROSS = """
decoder.block.{i}.layer.1.EncDecAttention.q.weight linear block.cross.query
decoder.block.{i}.layer.1.EncDecAttention.k.weight linear block.cross.key
decoder.block.{i}.layer.1.EncDecAttention.v.weight linear block.cross.value
decoder.block.{i}.layer.1.EncDecAttention.o.weight linear block.cross.out
decoder.block.{i}.layer.1.layer_norm.weight flat block.cross_norm.gain
"""
# For models in which experts take the place of the MLP.
_WITHOUT_MLP = "\n".join(line for line in _LLAMA.splitlines() if ".mlp." not in line)
_TABLES: dict[Family, str] = {
    "gpt2": _GPT2,
    "vit": _VIT,
    "deit": _VIT + _DISTILLED,
    "dinov2": _DINOV2,
    "dinov2_with_registers": _DINOV2 + _REGISTERS,
    "siglip": _SIGLIP,
    "gpt_neox": _GPT_NEOX,
    **dict.fromkeys(("llama", "mistral", "qwen2"), _LLAMA),
    "qwen3": _LLAMA + _QK_NORM,
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA2 + _QK_NORM,
    "mixtral": _WITHOUT_MLP + _MIXTRAL_EXPERTS,
    "qwen3_moe": _WITHOUT_MLP + _QK_NORM + _QWEN3_EXPERTS,
}


def table(model: TransformerConfig, family: Family) -> str:
    """Return the table of a model's tensors: lines with a name, a layout and our parameters.

    The readout of a language model is not in the table.

    Args:
        model: Model whose MLP, in a T5, has a gate or not.
        family: Architecture of the file, from `names.family_of`.
    """
    if family in _TABLES:
        return _TABLES[family]
    if family == "mbart":
        stack = _MBART_STACK
        cross = _MBART_CROSS
    else:
        stack = _T5_STACK
        cross = _T5_CROSS
    up_name = "wi"
    if model.gated:
        stack += _T5_GATE
        up_name = "wi_1"
    # In a T5 block the MLP is layer 1 of the encoder and, after cross-attention, 2 of the decoder.
    encoder = _filled(
        stack, stack_name="encoder", prefix="encoder.", mlp_layer="1", up_name=up_name
    )
    decoder = _filled(stack, stack_name="decoder", prefix="", mlp_layer="2", up_name=up_name)
    return "\n".join(["shared.weight same token\n", cross, encoder, decoder])


def _filled(stack: str, *, stack_name: str, prefix: str, mlp_layer: str, up_name: str) -> str:
    """Return the table of one stack of an encoder-decoder, with its placeholders filled in.

    The placeholder {i} for the index of a layer stays.

    Args:
        stack: Table with the placeholders {stack}, {prefix}, {mlp_layer} and {up_name}.
        prefix: Prefix of our parameters, "encoder." or empty.
        mlp_layer: Number of the MLP within a T5 block.
        up_name: Name of a T5's matrix into the MLP, "wi" or "wi_1".
    """
    # Not str.format: {i} stays for the index of a layer.
    stack = stack.replace("{stack}", stack_name)
    stack = stack.replace("{prefix}", prefix)
    stack = stack.replace("{mlp_layer}", mlp_layer)
    return stack.replace("{up_name}", up_name)
