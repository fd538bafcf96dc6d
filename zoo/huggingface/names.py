"""Names and shapes of tensors in Hugging Face's files of GPT-2, Llama and ViT, beside ours.

D width, H heads, K key heads, N head dimension, F MLP hidden, V vocabulary, T positions, P patch size, C channels.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from mupax.zoo.families import ImageModel
from mupax.zoo.huggingface.config import Family, family_of
from mupax.zoo.transformer import TransformerConfig

PREFIX: dict[Family, str] = {"gpt2": "transformer.", "llama": "model.", "vit": "vit."}

HEADS = ("lm_head.weight", "classifier.weight", "classifier.bias")
"""Tensors outside the prefix."""


class Part(NamedTuple):
    """A parameter of ours, of one layer, in a tensor of theirs."""

    name: str
    shape: tuple[int, ...]
    matrix: tuple[int, ...]
    """What it is reshaped to, to lie as theirs does but for the order of its axes."""
    axes: tuple[int, ...]
    """The order of those in theirs."""

    def theirs(self, value: np.ndarray) -> np.ndarray:
        return value.reshape(self.matrix).transpose(self.axes)

    def ours(self, value: np.ndarray) -> np.ndarray:
        return value.transpose(np.argsort(self.axes)).reshape(self.shape)


class Tensor(NamedTuple):
    """One tensor of theirs (per layer, where its name has {i}) and what it holds side by side along its last axis."""

    name: str
    parts: tuple[Part, ...]

    @property
    def stacked(self) -> bool:
        return "{i}" in self.name

    @property
    def widths(self) -> list[int]:
        """Size of the last axis of each part."""
        return [part.matrix[part.axes[-1]] for part in self.parts]

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.parts[0]
        return (*(first.matrix[axis] for axis in first.axes[:-1]), sum(self.widths))


def _part(model: TransformerConfig, name: str, layout: str) -> Part:
    """A parameter of ours in a layout: same (as ours), linear [out, in], conv1d [in, out], flat, led or conv2d [D, C, P, P].

    Flat has one axis, and led has axes of size 1 in front, 3 in all. Our model may lack the parameter: a bias is then as
    its matrix' output, and what belongs to a norm as the residual stream.
    """
    specs, sizes = model.parameters(), model.sizes()
    matrix = specs.get(name.removesuffix("_bias"))
    spec = specs.get(name) or (matrix.bias if matrix else None)
    inputs, outputs = (spec.fan_in, spec.fan_out) if spec else ((), ("embed",))
    inputs, outputs = (tuple(sizes[axis] for axis in axes) for axes in (inputs, outputs))
    shape, product = inputs + outputs, (math.prod(inputs), math.prod(outputs))
    match layout:
        case "linear":
            return Part(name, shape, product, (1, 0))
        case "conv1d":
            return Part(name, shape, product, (0, 1))
        case "flat":
            return Part(name, shape, (math.prod(shape),), (0,))
        case "led":
            return Part(name, shape, (1,) * (3 - len(shape)) + shape, (0, 1, 2))
        case "conv2d":
            assert isinstance(model, ImageModel)
            return Part(name, shape, (model.patch_size, model.patch_size, model.channels, model.width), (3, 2, 0, 1))
    return Part(name, shape, shape, tuple(range(len(shape))))


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
    family, every = family_of(model), []

    def add(theirs: str, layout: str, *ours: str) -> None:
        every.append(Tensor(theirs, tuple(_part(model, name, layout) for name in ours)))

    for line in _TABLES[family].strip().splitlines():
        theirs, layout, *ours = line.split()
        if layout == "norm":
            add(f"{theirs}.weight", "flat", f"{ours[0]}.gain")
            if family != "llama" or model.bias:
                add(f"{theirs}.bias", "flat", f"{ours[0]}.bias")
        elif theirs.endswith((".weight", ".bias", "_token", "_embeddings")):
            add(theirs, layout, *ours)
        else:
            add(f"{theirs}.weight", layout, *ours)
            if family != "llama" or model.bias:
                add(f"{theirs}.bias", "flat", f"{ours[0]}_bias")
    if family != "vit" and not model.tied_readout:
        add("lm_head.weight", "linear", "readout")
    return every
