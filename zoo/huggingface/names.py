"""Names and shapes of tensors in Hugging Face's files of GPT-2, Llama and ViT, beside ours.

D width, H heads, K key heads, N head dimension, F MLP hidden, V vocabulary, T positions, P patch size, C channels.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, NamedTuple, cast

from mupax.zoo.huggingface.config import Family, family_of
from mupax.zoo.transformer import TransformerConfig

Layout = Literal["same", "linear", "conv1d", "flat", "led", "conv2d"]
"""How a tensor of theirs lies: as ours; [out, in]; [in, out]; one axis; with axes of size 1 in front; [D, C, P, P]."""

PREFIX: dict[Family, str] = {"gpt2": "transformer.", "llama": "model.", "vit": "vit."}

HEADS = ("lm_head.weight", "classifier.weight", "classifier.bias")
"""Tensors outside the prefix."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of theirs (per layer, where its name has {i}) and the parameters of ours that it holds side by side."""

    name: str
    ours: tuple[str, ...]
    layout: Layout

    @property
    def stacked(self) -> bool:
        return "{i}" in self.name


class Shape(NamedTuple):
    """Shape of a parameter of one layer: the axes that a product sums over, then the others."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def whole(self) -> tuple[int, ...]:
        return self.inputs + self.outputs

    @property
    def matrix(self) -> tuple[int, int]:
        """[in, out]."""
        return math.prod(self.inputs), math.prod(self.outputs)


def our_shapes(model: TransformerConfig) -> dict[str, Shape]:
    """Shape of every parameter that a model's file holds, from its declaration.

    Our model may lack some: a bias is then as its matrix' output, and what belongs to a norm as the residual stream.
    """
    specs, sizes = model.parameters(), model.sizes()

    def shape(name: str) -> Shape:
        matrix = specs.get(name.removesuffix("_bias"), None)
        spec = specs.get(name) or (matrix.bias if matrix else None)
        if spec is None:
            return Shape((), (model.width,))
        return Shape(tuple(sizes[axis] for axis in spec.fan_in), tuple(sizes[axis] for axis in spec.fan_out))

    return {name: shape(name) for tensor in tensors(model) for name in tensor.ours}


_GPT2 = """
wte.weight same token
wpe.weight same position
h.{i}.ln_1 norm block.attention_norm
h.{i}.attn.c_attn.weight conv1d block.attention.query block.attention.key block.attention.value
h.{i}.attn.c_attn.bias flat block.attention.query_bias block.attention.key_bias block.attention.value_bias
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
_VIT = """
embeddings.cls_token led cls
embeddings.position_embeddings led position
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
_TABLES: dict[Family, str] = {"gpt2": _GPT2, "llama": _LLAMA, "vit": _VIT}
"""Their name, the layout and our names. A name without .weight or .bias is both: those of a matrix, or gain and bias of a norm."""


def tensors(model: TransformerConfig) -> list[Tensor]:
    """Every tensor of a model's file, without the prefix."""
    family, tensors = family_of(model), []
    for line in _TABLES[family].strip().splitlines():
        theirs, layout, *ours = line.split()
        if layout != "norm" and theirs.endswith((".weight", ".bias", "_token", "_embeddings")):
            tensors.append(Tensor(theirs, tuple(ours), cast("Layout", layout)))
            continue
        weight = (f"{ours[0]}.gain", "flat") if layout == "norm" else (ours[0], layout)
        tensors.append(Tensor(f"{theirs}.weight", weight[:1], cast("Layout", weight[1])))
        if family != "llama" or model.bias:
            tensors.append(Tensor(f"{theirs}.bias", (ours[0] + (".bias" if layout == "norm" else "_bias"),), "flat"))
    if family == "vit" or model.tied_readout:
        return tensors
    return [*tensors, Tensor("lm_head.weight", ("readout",), "linear")]
