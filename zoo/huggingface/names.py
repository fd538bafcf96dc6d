"""Names, shapes and memory order of tensors in Hugging Face's files, with our parameters in them.

`weights` reads and writes by them. The names themselves are in `tables`.
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
"""Tensors whose names in files have no prefix (`tables.PREFIX`): readouts and their biases."""

_COMPLETE_ENDINGS = (
    ".weight",
    ".bias",
    ".lambda1",
    "_token",
    "_tokens",
    "_embeddings",
    "_logits_bias",
)
"""Ends of complete names in `tables`. Any other name there stands for a .weight and a .bias."""


def family_of(model: TransformerConfig) -> Family:
    """Return the family of `transformers` in whose layout a model is written.

    Its code may still lack a feature of the model, which `config.to_huggingface` then refuses.
    """
    if isinstance(model, ImageModel):
        assert isinstance(model, ViTConfig)
        if model.pool == "cls-mean":
            return "dinov2" if model.registers is None else "dinov2_with_registers"
        if model.pool == "mean":
            return "siglip"
        return "vit" if model.registers is None else "deit"
    if model.denoises:
        return "t5" if "relative_bias" in model.parameters() else "mbart"
    assert isinstance(model, DecoderConfig)
    return "gpt2" if model.rotary_theta is None else decoders.family_of(model)


class Part(NamedTuple):
    """Conversion between one layer of a parameter of ours and the tensor of a file that holds it.

    With W in the file, our parameter is scale * (W + shift), reshaped and transposed.
    """

    name: str
    """Name of our parameter."""
    shape: tuple[int, ...]
    """Shape of our parameter, in one layer."""
    matrix: tuple[int, ...]
    """Shape to which our parameter is reshaped before its dimensions are transposed."""
    axes: tuple[int, ...]
    """Permutation by which `matrix` is then transposed to the order of the tensor."""
    skipped_rows: int = 0
    """Number of rows at the start of the tensor that nothing reads."""
    scale: float = 1.0
    """Factor that is in the forward pass of `transformers`, and in our parameter instead."""
    shift: float = 0.0
    """Number that the code of `transformers` adds to the tensor, 1 for the gains of a Gemma."""
    joined: bool = False
    """Whether all dimensions but the first are merged into one after the transposition."""

    def to_huggingface(self, value: np.ndarray) -> np.ndarray:
        """Convert a value of our parameter, of one layer, to the tensor that holds it in a file.

        It is reordered and divided by `scale`, then `shift` is subtracted. Rows that nothing reads
        are 0.
        """
        value = value.reshape(self.matrix).transpose(self.axes)
        if self.joined:
            value = value.reshape(len(value), -1)
        if self.scale != 1:
            value = (value / self.scale).astype(value.dtype)
        if self.shift:
            value = value - np.float32(self.shift)
        if self.skipped_rows:
            value = np.pad(value, ((self.skipped_rows, 0), (0, 0)))
        return value

    def from_huggingface(self, value: np.ndarray) -> np.ndarray:
        """Convert a tensor of a file to our parameter, the inverse of `to_huggingface`."""
        value = value[self.skipped_rows :].reshape([self.matrix[axis] for axis in self.axes])
        value = value.transpose(np.argsort(self.axes)).reshape(self.shape)
        if self.shift:
            value = value + np.float32(self.shift)
        if self.scale != 1:
            value = (value * self.scale).astype(value.dtype)
        return value


class Tensor(NamedTuple):
    """Tensor of a file, and the parameters of ours that it holds, one after another in an axis."""

    name: str
    """Name with {i} for the index of the layer and {j} for that of the expert, if there are any."""
    parts: tuple[Part, ...]
    """Our parameters in the tensor."""
    fused: bool = False
    """Whether the parts lie side by side within each head, as in GPT-NeoX.

    The tensor is then [out, in], and its first axis is ordered by head. Otherwise the parts lie
    along the last axis.
    """

    def to_huggingface(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """Return the tensor of one layer, with the values of all parts side by side.

        Args:
            values: Value of every entry of `parts`, in our shapes.
        """
        arrays = []
        for part, value in zip(self.parts, values, strict=True):
            arrays.append(part.to_huggingface(value))
        tensor = arrays[0] if len(arrays) == 1 else np.concatenate(arrays, -1)
        if not self.fused:
            return tensor
        if tensor.ndim == 3:
            # A matrix [in, heads, out of a head] becomes [heads, out of a head, in]. Biases have no
            # inputs.
            tensor = np.moveaxis(tensor, 0, -1)
        return tensor.reshape(self.shape)

    def from_huggingface(self, value: np.ndarray) -> list[np.ndarray]:
        """Split the tensor of one layer into our parameters, in the order of `parts`."""
        if self.fused:
            heads = self.parts[0].shape[-2]
            value = value.reshape(heads, sum(self.widths), *value.shape[1:])
            if value.ndim == 3:
                value = np.moveaxis(value, -1, 0)
        arrays = np.split(value, np.cumsum(self.widths)[:-1], axis=-1)
        return [
            part.from_huggingface(array) for part, array in zip(self.parts, arrays, strict=True)
        ]

    @property
    def stacked(self) -> bool:
        """True if every layer has a tensor of its own."""
        return "{i}" in self.name

    @property
    def widths(self) -> list[int]:
        """Number of entries that each part takes along the axis in which the parts lie."""
        widths = []
        for part in self.parts:
            last_axes = part.axes[1:] if part.joined else part.axes[-1:]
            widths.append(math.prod(part.matrix[axis] for axis in last_axes))
        return widths

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor in a file."""
        part = self.parts[0]
        if self.fused:
            # `inputs` is empty for a bias.
            *inputs, heads, _ = part.shape
            return (heads * sum(self.widths), *inputs)
        axes = part.axes[:2] if part.joined else part.axes
        sizes = [part.matrix[axis] for axis in axes]
        sizes[0] += part.skipped_rows
        sizes[-1] = sum(self.widths)
        return tuple(sizes)

    def layers(self, model: TransformerConfig) -> int:
        """Return the number of layers that have a tensor of this name, 1 for one without {i}."""
        if not self.stacked:
            return 1
        if isinstance(model, EncoderDecoderConfig) and self.parts[0].name.startswith("encoder."):
            return model.encoder_blocks
        return model.depth

    def sizes(self, model: TransformerConfig) -> tuple[int, ...]:
        """Return the numbers of layers and of experts for which a file has a tensor of this name.

        They are the leading dimensions of our stacked parameter, in front of `Part.shape`. The
        number of layers is left out if the name has no {i}, that of experts if it has no {j}.
        """
        sizes = []
        if self.stacked:
            sizes.append(self.layers(model))
        if model.experts and "{j}" in self.name:
            sizes.append(model.experts)
        return tuple(sizes)

    def named(self, index: Sequence[int]) -> str:
        """Return the name in a file of the tensor of one layer and expert.

        Args:
            index: Index of the layer and of the expert, with as many numbers as `sizes` returns.
        """
        # Tensors outside of layers have an empty index, and format() leaves their names as they
        # are.
        return self.name.format(**dict(zip("ij", index, strict=False)))


def _part(model: TransformerConfig, specs: Mapping[str, Any], name: str, layout: str) -> Part:
    """Return the `Part` for a parameter of ours in a layout of `tables`, without scale and shift.

    Args:
        specs: Declarations of the model's parameters. If they lack the parameter, a bias has the
            shape of its matrix's output, and a parameter of a norm is [D].
        name: Name of our parameter, without an index of the layer.
        layout: Name of the layout, such as "linear", from the table in the docstring of `tables`.
    """
    sizes = model.sizes()
    spec = specs.get(name)
    matrix_spec = specs.get(name.removesuffix("_bias"))
    if spec is None and matrix_spec is not None:
        spec = matrix_spec.bias
    input_axes = spec.fan_in if spec else ()
    output_axes = spec.fan_out if spec else ("embed",)
    inputs = tuple(sizes[axis] for axis in input_axes)
    outputs = tuple(sizes[axis] for axis in output_axes)
    shape = inputs + outputs
    # Heads and their dimensions are one axis in the files.
    product = (math.prod(inputs), math.prod(outputs))

    match layout:
        case "linear":
            return Part(name, shape, product, (1, 0))
        case "conv1d":
            return Part(name, shape, product, (0, 1))
        case "flat":
            return Part(name, shape, (math.prod(shape),), (0,))
        case "after_two_rows":
            # MBart's code adds 2 to positions, so the first two rows of its table are unused.
            return Part(name, shape, shape, (0, 1), skipped_rows=2)
        case "row":
            # The bias of logits, which the files have as one row.
            return Part(name, (sizes["vocab"],), (1, sizes["vocab"]), (0, 1))
        case "pooled":
            # A DINO's classifier reads the CLS token and the mean over patches side by side.
            return Part(name, shape, shape, (2, 1, 0), joined=True)
        case "rank3":
            return Part(name, shape, (1,) * (3 - len(shape)) + shape, (0, 1, 2))
        case "registers" | "not_registers":
            assert isinstance(model, ViTConfig)
            rows = model.registers or 0
            if layout == "not_registers":
                rows = shape[0] - rows
            return Part(name, (rows, model.width), (1, rows, model.width), (0, 1, 2))
        case "conv2d":
            assert isinstance(model, ImageModel)
            patch = model.patch_size
            return Part(name, shape, (patch, patch, model.channels, model.width), (3, 2, 0, 1))
    # The layouts "same" and "fused" keep the order of axes.
    return Part(name, shape, shape, tuple(range(len(shape))))


def _scale(model: TransformerConfig, family: Family, name: str) -> float:
    """Return the factor by which our parameter must be larger than the one in a file.

    It makes up for factors in the forward pass that `transformers` and our code do not share. T5's
    code does not scale attention logits, and divides a tied readout by width^1/2. Gemma's code
    multiplies looked-up embeddings by width^1/2.

    Args:
        name: Name of our parameter, such as "norm.gain".
    """
    if family == "t5" and name.endswith(".query"):
        # Our logits are multiplied by head_dim^-1/2.
        return model.heads_dim**0.5
    if family in GEMMA and name == "token":
        return model.width**0.5
    if family in ("t5", *GEMMA) and name == "norm.gain" and model.tied_readout:
        # The factor of a tied readout goes into the norm before it. Gemma's readout uses the same
        # table as its embeddings, without their factor.
        return model.width**-0.5
    return 1.0


def tensors(model: TransformerConfig) -> list[Tensor]:
    """Return a `Tensor` for every name in a model's file, such as "layers.{i}.mlp.up_proj.weight".

    Names are without the family's prefix. One entry stands for the tensors of all layers.
    """
    family = family_of(model)
    specs = model.parameters()
    file_tensors = []

    def add(name: str, layout: str, *params: str) -> None:
        # Gemma's code takes gains as 1 + w.
        shift = float(family in GEMMA and params[0].endswith("gain"))
        parts = []
        for param in params:
            part = _part(model, specs, param, layout)
            parts.append(part._replace(scale=_scale(model, family, param), shift=shift))
        file_tensors.append(Tensor(name, tuple(parts), fused=layout == "fused"))

    for line in table(model, family).splitlines():
        if not line:
            continue
        name, layout, *params = line.split()
        if layout == "norm":
            add(f"{name}.weight", "flat", f"{params[0]}.gain")
            add(f"{name}.bias", "flat", f"{params[0]}.bias")
        elif name.endswith(_COMPLETE_ENDINGS):
            add(name, layout, *params)
        else:
            add(f"{name}.weight", layout, *params)
            bias = f"{params[0]}_bias"
            # Llama and its like have no tensors for biases that a model lacks.
            if family not in (*LIKE_LLAMA, *GEMMA) or bias in specs:
                add(f"{name}.bias", "flat", bias)
    if not isinstance(model, ImageModel) and not model.tied_readout:
        add("lm_head.weight", "linear", "readout")
    return file_tensors
