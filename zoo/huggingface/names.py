"""Names and shapes of tensors in Hugging Face's files of GPT-2, Llama and ViT, beside ours.

D width, H heads, K key heads, N head dimension, F MLP hidden, V vocabulary, T positions, P patch size, C channels.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, NamedTuple

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


def tensors(model: TransformerConfig) -> list[Tensor]:
    """Every tensor of a model's file, without the prefix."""
    match family_of(model):
        case "gpt2":
            return _gpt2(model)
        case "llama":
            return _llama(model)
        case _:
            return _vit(model)


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


def _gpt2(model: TransformerConfig) -> list[Tensor]:
    qkv = tuple(f"block.attention.{name}" for name in ("query", "key", "value"))
    block = "h.{i}."
    found = [
        Tensor("wte.weight", ("token",), "same"),
        Tensor("wpe.weight", ("position",), "same"),
        *_norm(block + "ln_1", "block.attention_norm"),
        Tensor(block + "attn.c_attn.weight", qkv, "conv1d"),
        Tensor(block + "attn.c_attn.bias", tuple(f"{name}_bias" for name in qkv), "flat"),
        *_matrix(block + "attn.c_proj", "block.attention.out", "conv1d"),
        *_norm(block + "ln_2", "block.mlp_norm"),
        *_matrix(block + "mlp.c_fc", "block.mlp.up", "conv1d"),
        *_matrix(block + "mlp.c_proj", "block.mlp.down", "conv1d"),
        *_norm("ln_f", "norm"),
    ]
    return [*found, *_lm_head(model)]


def _llama(model: TransformerConfig) -> list[Tensor]:
    block, attention, mlp = "layers.{i}.", "block.attention.", "block.mlp."
    matrices = {
        "self_attn.q_proj": f"{attention}query",
        "self_attn.k_proj": f"{attention}key",
        "self_attn.v_proj": f"{attention}value",
        "self_attn.o_proj": f"{attention}out",
        "mlp.gate_proj": f"{mlp}gate",
        "mlp.up_proj": f"{mlp}up",
        "mlp.down_proj": f"{mlp}down",
    }
    return [
        Tensor("embed_tokens.weight", ("token",), "same"),
        *[
            tensor
            for theirs, ours in matrices.items()
            for tensor in _matrix(block + theirs, ours, "linear")[: 1 + model.bias]
        ],
        Tensor(block + "input_layernorm.weight", ("block.attention_norm.gain",), "flat"),
        Tensor(block + "post_attention_layernorm.weight", ("block.mlp_norm.gain",), "flat"),
        Tensor("norm.weight", ("norm.gain",), "flat"),
        *_lm_head(model),
    ]


def _vit(model: TransformerConfig) -> list[Tensor]:
    block, attention = "encoder.layer.{i}.", "block.attention."
    return [
        Tensor("embeddings.cls_token", ("cls",), "led"),
        Tensor("embeddings.position_embeddings", ("position",), "led"),
        Tensor("embeddings.patch_embeddings.projection.weight", ("patch",), "conv2d"),
        Tensor("embeddings.patch_embeddings.projection.bias", ("patch_bias",), "flat"),
        *_norm(block + "layernorm_before", "block.attention_norm"),
        *_matrix(block + "attention.attention.query", f"{attention}query", "linear"),
        *_matrix(block + "attention.attention.key", f"{attention}key", "linear"),
        *_matrix(block + "attention.attention.value", f"{attention}value", "linear"),
        *_matrix(block + "attention.output.dense", f"{attention}out", "linear"),
        *_norm(block + "layernorm_after", "block.mlp_norm"),
        *_matrix(block + "intermediate.dense", "block.mlp.up", "linear"),
        *_matrix(block + "output.dense", "block.mlp.down", "linear"),
        *_norm("layernorm", "norm"),
        *_matrix("classifier", "readout", "linear"),
    ]


def _norm(theirs: str, ours: str) -> list[Tensor]:
    return [Tensor(f"{theirs}.weight", (f"{ours}.gain",), "flat"), Tensor(f"{theirs}.bias", (f"{ours}.bias",), "flat")]


def _matrix(theirs: str, ours: str, layout: Layout) -> list[Tensor]:
    return [Tensor(f"{theirs}.weight", (ours,), layout), Tensor(f"{theirs}.bias", (f"{ours}_bias",), "flat")]


def _lm_head(model: TransformerConfig) -> list[Tensor]:
    return [] if model.tied_readout else [Tensor("lm_head.weight", ("readout",), "linear")]
