"""Names and shapes of tensors in Hugging Face's files of GPT-2, Llama, ViT, MBart and T5, beside ours.

D width, H heads, K key heads, N head dimension, F MLP hidden, V vocabulary, T positions, P patch size, C channels.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from mupax.zoo.encoder_decoder.config import EncoderDecoderConfig
from mupax.zoo.families import ImageModel
from mupax.zoo.huggingface.architectures import Family, family_of
from mupax.zoo.transformer import TransformerConfig

PREFIX: dict[Family, str] = {"gpt2": "transformer.", "llama": "model.", "vit": "vit.", "mbart": "model.", "t5": ""}

HEADS = ("lm_head.weight", "final_logits_bias", "classifier.weight", "classifier.bias")
"""Tensors outside the prefix."""


class Part(NamedTuple):
    """A parameter of ours, of one layer, in a tensor of theirs."""

    name: str
    shape: tuple[int, ...]
    matrix: tuple[int, ...]
    """What it is reshaped to, to lie as theirs does but for the order of its axes."""
    axes: tuple[int, ...]
    """The order of those in theirs."""
    rows: int = 0
    """Rows in front of theirs that nothing reads."""
    times: float = 1.0
    """How many times as large ours is, where their code has a factor that ours has not."""

    def theirs(self, value: np.ndarray) -> np.ndarray:
        value = value.reshape(self.matrix).transpose(self.axes)
        value = value if self.times == 1 else (value / self.times).astype(value.dtype)
        return np.pad(value, ((self.rows, 0), (0, 0))) if self.rows else value

    def ours(self, value: np.ndarray) -> np.ndarray:
        value = value[self.rows :].transpose(np.argsort(self.axes)).reshape(self.shape)
        return value if self.times == 1 else (value * self.times).astype(value.dtype)


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
        sizes = [first.matrix[axis] for axis in first.axes]
        sizes[0], sizes[-1] = sizes[0] + first.rows, sum(self.widths)
        return tuple(sizes)

    def layers(self, model: TransformerConfig) -> int:
        """How many there are of it in a file."""
        if not self.stacked:
            return 1
        if isinstance(model, EncoderDecoderConfig) and self.parts[0].name.startswith("encoder."):
            return model.encoder_blocks
        return model.depth


def _part(model: TransformerConfig, name: str, layout: str) -> Part:
    """A parameter of ours in a layout: same (as ours), linear [out, in], conv1d [in, out], flat, led, behind or conv2d [D, C, P, P].

    Flat has one axis, led has axes of size 1 in front, 3 in all, and behind has two rows in front. Our model may lack the parameter: a
    bias is then as its matrix' output, and what belongs to a norm as the residual stream.
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
        case "behind":
            return Part(name, shape, shape, (0, 1), rows=2)
        case "logits":
            return Part(name, (sizes["vocab"],), (1, sizes["vocab"]), (0, 1))
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
_MBART_STACK = """
{stack}.embed_positions.weight behind {ours}position
{stack}.layernorm_embedding norm {ours}embedding_norm
{stack}.layers.{i}.self_attn.q_proj linear {ours}block.attention.query
{stack}.layers.{i}.self_attn.k_proj linear {ours}block.attention.key
{stack}.layers.{i}.self_attn.v_proj linear {ours}block.attention.value
{stack}.layers.{i}.self_attn.out_proj linear {ours}block.attention.out
{stack}.layers.{i}.self_attn_layer_norm norm {ours}block.attention_norm
{stack}.layers.{i}.fc1 linear {ours}block.mlp.up
{stack}.layers.{i}.fc2 linear {ours}block.mlp.down
{stack}.layers.{i}.final_layer_norm norm {ours}block.mlp_norm
{stack}.layer_norm norm {ours}norm
"""
_MBART_CROSS = """
decoder.layers.{i}.encoder_attn.q_proj linear block.cross.query
decoder.layers.{i}.encoder_attn.k_proj linear block.cross.key
decoder.layers.{i}.encoder_attn.v_proj linear block.cross.value
decoder.layers.{i}.encoder_attn.out_proj linear block.cross.out
decoder.layers.{i}.encoder_attn_layer_norm norm block.cross_norm
final_logits_bias logits readout_bias
"""
_T5_STACK = """
{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight same {ours}relative_bias
{stack}.block.{i}.layer.0.SelfAttention.q.weight linear {ours}block.attention.query
{stack}.block.{i}.layer.0.SelfAttention.k.weight linear {ours}block.attention.key
{stack}.block.{i}.layer.0.SelfAttention.v.weight linear {ours}block.attention.value
{stack}.block.{i}.layer.0.SelfAttention.o.weight linear {ours}block.attention.out
{stack}.block.{i}.layer.0.layer_norm.weight flat {ours}block.attention_norm.gain
{stack}.block.{i}.layer.{last}.DenseReluDense.{up}.weight linear {ours}block.mlp.up
{stack}.block.{i}.layer.{last}.DenseReluDense.wo.weight linear {ours}block.mlp.down
{stack}.block.{i}.layer.{last}.layer_norm.weight flat {ours}block.mlp_norm.gain
{stack}.final_layer_norm.weight flat {ours}norm.gain
"""
_T5_GATE = "{stack}.block.{i}.layer.{last}.DenseReluDense.wi_0.weight linear {ours}block.mlp.gate\n"
_T5_CROSS = """
decoder.block.{i}.layer.1.EncDecAttention.q.weight linear block.cross.query
decoder.block.{i}.layer.1.EncDecAttention.k.weight linear block.cross.key
decoder.block.{i}.layer.1.EncDecAttention.v.weight linear block.cross.value
decoder.block.{i}.layer.1.EncDecAttention.o.weight linear block.cross.out
decoder.block.{i}.layer.1.layer_norm.weight flat block.cross_norm.gain
"""


def _table(model: TransformerConfig, family: Family) -> str:
    """Lines of their name, the layout and our names. A name without .weight or .bias is both: a matrix', or gain and bias of a norm."""
    if family in _TABLES:
        return _TABLES[family]
    stack, cross = (_MBART_STACK, _MBART_CROSS) if family == "mbart" else (_T5_STACK, _T5_CROSS)
    gate, up = (_T5_GATE, "wi_1") if model.gated else ("", "wi")
    lines = ["shared.weight same token\n", cross]
    for name, ours, last in (("encoder", "encoder.", "1"), ("decoder", "", "2")):
        lines += [
            (stack + gate).replace("{stack}", name).replace("{ours}", ours).replace("{last}", last).replace("{up}", up)
        ]
    return "\n".join(lines)


_TABLES: dict[Family, str] = {"gpt2": _GPT2, "llama": _LLAMA, "vit": _VIT}


def _times(model: TransformerConfig, family: Family, name: str) -> float:
    """T5's code has no scale of attention logits, and divides a tied readout by width^1/2."""
    if family != "t5":
        return 1.0
    if name.endswith(".query"):
        return model.heads_dim**0.5
    return model.width**-0.5 if model.tied_readout and name == "norm.gain" else 1.0


def tensors(model: TransformerConfig) -> list[Tensor]:
    """Every tensor of a model's file, without the prefix."""
    family, every = family_of(model), []

    def add(theirs: str, layout: str, *ours: str) -> None:
        parts = (_part(model, name, layout)._replace(times=_times(model, family, name)) for name in ours)
        every.append(Tensor(theirs, tuple(parts)))

    for line in filter(None, _table(model, family).splitlines()):
        theirs, layout, *ours = line.split()
        if layout == "norm":
            add(f"{theirs}.weight", "flat", f"{ours[0]}.gain")
            if family != "llama" or model.bias:
                add(f"{theirs}.bias", "flat", f"{ours[0]}.bias")
        elif theirs.endswith((".weight", ".bias", "_token", "_embeddings", "_logits_bias")):
            add(theirs, layout, *ours)
        else:
            add(f"{theirs}.weight", layout, *ours)
            if family != "llama" or model.bias:
                add(f"{theirs}.bias", "flat", f"{ours[0]}_bias")
    if family != "vit" and not model.tied_readout:
        add("lm_head.weight", "linear", "readout")
    return every
