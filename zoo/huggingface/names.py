"""Names and shapes of tensors in Hugging Face's files, beside ours.

D width, H heads, K key heads, N head dimension, F MLP hidden, V vocabulary, T positions, P patch size, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mupax.zoo.configs import DecoderConfig, ViTConfig
from mupax.zoo.encoder_decoder.config import EncoderDecoderConfig
from mupax.zoo.families import ImageModel
from mupax.zoo.huggingface import decoders
from mupax.zoo.huggingface.architectures import GEMMA, Family
from mupax.zoo.huggingface.decoders import LIKE_LLAMA
from mupax.zoo.huggingface.tables import table
from mupax.zoo.transformer import TransformerConfig

HEADS = (
    "lm_head.weight",
    "embed_out.weight",
    "final_logits_bias",
    "classifier.weight",
    "classifier.bias",
)
"""Tensors outside the prefix."""


def family_of(model: TransformerConfig) -> Family:
    """The architecture whose files can hold such a model."""
    if isinstance(model, ImageModel):
        assert isinstance(model, ViTConfig)
        if model.pool == "cls-mean":
            return "dinov2" if model.registers is None else "dinov2_with_registers"
        return "siglip" if model.pool == "mean" else "vit" if model.registers is None else "deit"
    if model.denoises:
        return "t5" if "relative_bias" in model.parameters() else "mbart"
    assert isinstance(model, DecoderConfig)
    return "gpt2" if model.rotary_theta is None else decoders.family_of(model)


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
    shift: float = 0.0
    """What their code adds to theirs, before that."""
    joined: bool = False
    """Whether all axes but the first are one in theirs."""

    def theirs(self, value: np.ndarray) -> np.ndarray:
        value = value.reshape(self.matrix).transpose(self.axes)
        value = value.reshape(len(value), -1) if self.joined else value
        value = value if self.times == 1 else (value / self.times).astype(value.dtype)
        value = value - np.float32(self.shift) if self.shift else value
        return np.pad(value, ((self.rows, 0), (0, 0))) if self.rows else value

    def ours(self, value: np.ndarray) -> np.ndarray:
        value = value[self.rows :].reshape([self.matrix[axis] for axis in self.axes])
        value = value.transpose(np.argsort(self.axes)).reshape(self.shape)
        value = value + np.float32(self.shift) if self.shift else value
        return value if self.times == 1 else (value * self.times).astype(value.dtype)


class Tensor(NamedTuple):
    """One tensor of theirs (per layer, where its name has {i}, and expert: {j}) and what it holds side by side along its last axis."""

    name: str
    parts: tuple[Part, ...]
    fused: bool = False
    """Whether they lie side by side head by head (GPT-NeoX), and heads and inputs in theirs as [out, in]."""

    def theirs(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """The tensor of one layer, from the parts' values."""
        each = [part.theirs(value) for part, value in zip(self.parts, values, strict=True)]
        whole = np.concatenate(each, -1) if each[1:] else each[0]
        if not self.fused:
            return whole
        return (
            np.moveaxis(whole, 0, -1).reshape(self.shape)
            if whole.ndim == 3
            else whole.reshape(self.shape)
        )

    def ours(self, value: np.ndarray) -> list[np.ndarray]:
        """The parts' values, from the tensor of one layer."""
        if self.fused:
            heads, size = self.parts[0].shape[-2], sum(self.widths)
            value = value.reshape(heads, size, *value.shape[1:])
            value = np.moveaxis(value, -1, 0) if value.ndim == 3 else value
        each = np.split(value, np.cumsum(self.widths)[:-1], axis=-1)
        return [part.ours(one) for part, one in zip(self.parts, each, strict=True)]

    @property
    def stacked(self) -> bool:
        return "{i}" in self.name

    @property
    def widths(self) -> list[int]:
        """Size of the last axis of each part."""
        return [
            math.prod(part.matrix[axis] for axis in part.axes[1 if part.joined else -1 :])
            for part in self.parts
        ]

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.parts[0]
        if self.fused:
            *inputs, heads, _ = first.shape
            return (heads * sum(self.widths), *inputs)
        sizes = [first.matrix[axis] for axis in first.axes[: 2 if first.joined else None]]
        sizes[0], sizes[-1] = sizes[0] + first.rows, sum(self.widths)
        return tuple(sizes)

    def layers(self, model: TransformerConfig) -> int:
        """How many there are of it in a file."""
        if not self.stacked:
            return 1
        if isinstance(model, EncoderDecoderConfig) and self.parts[0].name.startswith("encoder."):
            return model.encoder_blocks
        return model.depth

    def sizes(self, model: TransformerConfig) -> tuple[int, ...]:
        """How many layers and experts there are of it in a file, the sizes in front of its parts' in our parameters."""
        experts = (model.experts,) if model.experts and "{j}" in self.name else ()
        return ((self.layers(model),) if self.stacked else ()) + experts

    def named(self, index: Sequence[int]) -> str:
        """Its name in a file.

        Args:
            index: of the layer and the expert, as many as `sizes`.
        """
        return self.name.format(**dict(zip("ij", index, strict=False)))


def _part(model: TransformerConfig, specs: Mapping[str, Any], name: str, layout: str) -> Part:
    """A parameter of ours in a layout: same (as ours), linear [out, in], conv1d [in, out], flat, led, behind or conv2d [D, C, P, P].

    Flat has one axis, led has axes of size 1 in front, 3 in all, and behind has two rows in front. Pooled is linear of several vectors,
    registers are led, and so is beside, the positions but those of registers. The model's `specs` may lack the parameter: a
    bias is then as its matrix' output, and what belongs to a norm as the residual stream.
    """
    sizes = model.sizes()
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
        case "pooled":
            return Part(name, shape, shape, (2, 1, 0), joined=True)
        case "registers" | "beside":
            assert isinstance(model, ViTConfig)
            rows = (
                (model.registers or 0)
                if layout == "registers"
                else shape[0] - (model.registers or 0)
            )
            return Part(name, (rows, model.width), (1, rows, model.width), (0, 1, 2))
        case "led":
            return Part(name, shape, (1,) * (3 - len(shape)) + shape, (0, 1, 2))
        case "conv2d":
            assert isinstance(model, ImageModel)
            return Part(
                name,
                shape,
                (model.patch_size, model.patch_size, model.channels, model.width),
                (3, 2, 0, 1),
            )
    return Part(name, shape, shape, tuple(range(len(shape))))


def _times(model: TransformerConfig, family: Family, name: str) -> float:
    """T5's code has no scale of attention logits, and divides a tied readout by width^1/2; Gemma's takes looked-up embeddings times it."""
    if family not in ("t5", *GEMMA):
        return 1.0
    if name == "token":
        return model.width**0.5 if family in GEMMA else 1.0
    if name.endswith(".query"):
        return model.heads_dim**0.5 if family == "t5" else 1.0
    return model.width**-0.5 if model.tied_readout and name == "norm.gain" else 1.0


def tensors(model: TransformerConfig) -> list[Tensor]:
    """Every tensor of a model's file, without the prefix."""
    family, specs, every = family_of(model), model.parameters(), []

    def add(theirs: str, layout: str, *ours: str) -> None:
        shift = float(family in GEMMA and ours[0].endswith("gain"))
        parts = (
            _part(model, specs, name, layout)._replace(
                times=_times(model, family, name), shift=shift
            )
            for name in ours
        )
        every.append(Tensor(theirs, tuple(parts), fused=layout == "fused"))

    for line in filter(None, table(model, family).splitlines()):
        theirs, layout, *ours = line.split()
        if layout == "norm":
            add(f"{theirs}.weight", "flat", f"{ours[0]}.gain")
            add(f"{theirs}.bias", "flat", f"{ours[0]}.bias")
        elif theirs.endswith(
            (".weight", ".bias", ".lambda1", "_token", "_tokens", "_embeddings", "_logits_bias")
        ):
            add(theirs, layout, *ours)
        else:
            add(f"{theirs}.weight", layout, *ours)
            if family not in (*LIKE_LLAMA, *GEMMA) or f"{ours[0]}_bias" in specs:
                add(f"{theirs}.bias", "flat", f"{ours[0]}_bias")
    if not isinstance(model, ImageModel) and not model.tied_readout:
        add("lm_head.weight", "linear", "readout")
    return every
