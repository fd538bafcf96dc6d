"""Config of vision transformers: sizes, parameters and FLOPs. Imports no JAX."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from mupax.config_fields import Affects
from mupax.presets.roles import ADAPTERS, ParamSpec, Role
from mupax.zoo.families import ConfigError, ImageModel
from mupax.zoo.transformer import TransformerConfig

_CONVOLUTIONS = ("first", "second", "third")
_TAPS = 9
"""Number of pixels that a kernel covers, 3 x 3, in every convolution of a stem but the first."""


class Convolution(NamedTuple):
    """One convolution of a stem. Zero padding makes its output's side 1/stride of its input's."""

    name: str
    stride: int
    output: str
    """Logical axis of the output channels."""
    side: int
    """Height and width of the output, in pixels."""

    @property
    def kernel(self) -> int:
        """Height and width of the kernel, in pixels.

        3 for strides up to 2. Beyond, 2 * stride - 1, so that neighboring kernels overlap.
        """
        if self.stride <= 2:
            return 3
        return 2 * self.stride - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTConfig(ImageModel, TransformerConfig):
    """Pre-norm vision transformer: images [B, height, width, channels] to logits [B, classes]."""

    family: ClassVar[str] = "vit"

    stem: Annotated[int | None, Affects("model", 2)] = None
    """Number of convolutions, 2 or 3, that make patches, each followed by a norm and a GELU. Their
    strides multiply to patch_size. Three have 1/4, 1/2 and 1 times the width as output channels,
    two have 1/2 and 1. By default one matrix per patch makes them."""
    pool: Annotated[Literal["mean", "cls", "cls-mean"], Affects("model", "cls")] = "mean"
    """Input of the classifier: the mean over patches, the CLS token, or both concatenated
    (DINOv2)."""
    registers: Annotated[int | None, Affects("model", 2)] = None
    """Number of register tokens (Darcet et al. 2024), which carry no image content: each is just a
    row of the position embeddings. None by default."""
    pre_logits: Annotated[bool, Affects("model", True)] = False
    """Put a layer of the model's width and a tanh before the readout, as in pre-training
    (Dosovitskiy et al. 2021, section 3.1)."""
    layer_scale: Annotated[float | None, Affects("model", 0.5)] = None
    """Initial value of trainable gains on each branch's output (LayerScale, Touvron et al. 2021).
    No gains by default."""
    sincos: Annotated[bool, Affects("model", True)] = False
    """Use fixed sines and cosines of a patch's row and column as position embeddings (Chen et al.
    2021) instead of learned ones."""
    distribution: Annotated[Literal["normal", "flax"], Affects("start", "flax")] = "normal"
    """Distribution that matrices are drawn from. Their standard deviations are the preset's in both
    cases. flax: as in Flax's Glorot and LeCun initializers, uniform in blocks and elsewhere normal
    truncated at two standard deviations."""
    drop_path: Annotated[float, Affects("model", 0.1)] = 0.0
    """Probability that training drops a branch of the last block (Huang et al. 2016). It rises
    linearly with depth, from 0 in the first block."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stem not in (None, 2, 3):
            raise ConfigError(f"model.stem is {self.stem}; write 2 or 3 convolutions, or none")
        if self.stem is not None and self.width % 2 ** (self.stem - 1):
            divisor = 2 ** (self.stem - 1)
            raise ConfigError(
                f"model.stem {self.stem} begins with a {divisor}th of the width, and model.width "
                f"is {self.width}; write a multiple of {divisor}"
            )
        if self.sincos and self.width % 4:
            raise ConfigError(
                "model.sincos has a quarter of the width for each sine and cosine, and model.width "
                f"is {self.width}; write a multiple of 4"
            )
        if self.sincos and self.registers is not None:
            raise ConfigError(
                "model.registers are rows of learned positions, and model.sincos has none; write "
                "one of them"
            )
        if not 0 <= self.drop_path < 1:
            raise ConfigError(
                f"model.drop_path is {self.drop_path}; write a number in [0, 1), such as 0.1"
            )
        if self.layer_scale is not None and not 0 < self.layer_scale < math.inf:
            raise ConfigError(
                f"model.layer_scale is {self.layer_scale}; write a number above 0, such as 1e-5"
            )

    @property
    def leading(self) -> int:
        """Number of positions before the patches: the CLS token, then registers."""
        cls_tokens = 0 if self.pool == "mean" else 1
        return cls_tokens + (self.registers or 0)

    @property
    def seq_len(self) -> int:
        """Number of positions in the residual stream: leading tokens and patches."""
        return self.num_patches + self.leading

    @property
    def convolutions(self) -> tuple[Convolution, ...]:
        """Convolutions of the stem in order. Empty for a model without a stem.

        The product of their strides is patch_size. From the last convolution back to the second,
        the stride is 2 if the factor that remains is even, otherwise 1. The first convolution has
        the stride that remains.
        """
        if self.stem is None:
            return ()
        remaining = self.patch_size
        strides = []
        for _ in range(self.stem - 1):
            stride = 2 if remaining % 2 == 0 else 1
            strides.insert(0, stride)
            remaining //= stride
        strides.insert(0, remaining)

        outputs = ("stem", "stem_next", "embed") if self.stem == 3 else ("stem", "embed")
        side = self.image_size
        convolutions = []
        for name, stride, output in zip(_CONVOLUTIONS, strides, outputs, strict=False):
            side //= stride
            convolutions.append(Convolution(name, stride, output, side))
        return tuple(convolutions)

    @property
    def branch_gains(self) -> float | None:
        return self.layer_scale

    @property
    def drop_rates(self) -> tuple[float, ...]:
        """Probability that training drops a branch, for every block."""
        return tuple(self.drop_path * i / max(1, self.depth - 1) for i in range(self.depth))

    def sizes(self) -> dict[str, int]:
        sizes = super().sizes()
        if self.convolutions:
            sizes["patch"] = self.convolutions[0].kernel ** 2 * self.channels
            sizes["taps"] = _TAPS
        if self.pool == "cls-mean":
            sizes["pooled"] = 2
        if self.pre_logits:
            sizes["representation"] = self.width
        return sizes

    def base_sizes(self) -> dict[str, int]:
        sizes = super().base_sizes()
        # Channels double from one convolution to the next, up to the width.
        for index, convolution in enumerate(self.convolutions[:-1]):
            sizes[convolution.output] = self.width // 2 ** (len(self.convolutions) - 1 - index)
        return sizes

    def applications(self, spec: ParamSpec) -> float:
        """Return how often one image goes through a matrix.

        A convolution is applied once per output pixel. A layer between the residual stream and the
        readout is applied once.
        """
        for convolution in self.convolutions:
            writes_output = bool(spec.fan_in) and spec.axes[-1] == convolution.output
            if writes_output and spec.axes[0] in ("patch", "taps"):
                return convolution.side**2
        return 1 if spec.role is Role.HIDDEN else super().applications(spec)

    def _stem(self) -> dict[str, ParamSpec]:
        """Return the declarations of the stem's parameters: convolutions first, then norms."""
        specs: dict[str, ParamSpec] = {}
        # The first convolution reads pixels, whose number does not depend on the width. Later ones
        # read channels, whose number grows with the width.
        first, *later = self.convolutions
        specs[f"stem.{first.name}"] = ParamSpec(
            role=Role.PATCH_EMBEDDING, axes=("patch", first.output), fan_in=("patch",)
        )
        input_axis = first.output
        for convolution in later:
            axes = ("taps", input_axis, convolution.output)
            specs[f"stem.{convolution.name}"] = ParamSpec(
                role=Role.HIDDEN, axes=axes, fan_in=axes[:2]
            )
            input_axis = convolution.output
        for convolution in self.convolutions:
            norm = f"stem.{convolution.name}_norm"
            if self.norm_gain:
                specs[f"{norm}.gain"] = ParamSpec(role=Role.NORM_GAIN, axes=(convolution.output,))
            if self.bias and self.norm == "layernorm":
                specs[f"{norm}.bias"] = ParamSpec(
                    role=Role.BIAS, axes=(convolution.output,), of=Role.NORM_GAIN
                )
        return specs

    def parameters(self) -> dict[str, ParamSpec]:
        specs = self._read_in()
        if self.pool != "mean":
            specs["cls"] = ParamSpec(role=Role.TOKEN_EMBEDDING, axes=("embed",))
        if not self.sincos:
            specs["position"] = ParamSpec(role=Role.POSITION, axes=("position", "embed"))
        specs.update(self.stack())
        specs.update(self._head())
        if self.distribution == "flax":
            return {name: _as_flax(spec) for name, spec in specs.items()}
        return specs

    def _read_in(self) -> dict[str, ParamSpec]:
        """Return the declarations that turn pixels into patch embeddings: a stem, or one matrix."""
        if self.convolutions:
            return self._stem()
        patch = ParamSpec(role=Role.PATCH_EMBEDDING, axes=("patch", "embed"), fan_in=("patch",))
        if not self.bias:
            return {"patch": patch}
        return {"patch": patch, "patch_bias": patch.bias}

    def _head(self) -> dict[str, ParamSpec]:
        """Return the declarations of the readout, and of the layer before it if there is one."""
        specs: dict[str, ParamSpec] = {}
        features = ("embed", "pooled") if self.pool == "cls-mean" else ("embed",)
        if self.pre_logits:
            pre_logits = ParamSpec(
                role=Role.HIDDEN, axes=(*features, "representation"), fan_in=features
            )
            specs["pre_logits"] = pre_logits
            if self.bias:
                specs["pre_logits_bias"] = pre_logits.bias
            features = ("representation",)
        readout = ParamSpec(role=Role.READOUT, axes=(*features, "classes"), fan_in=features)
        specs["readout"] = readout
        if self.bias:
            specs["readout_bias"] = readout.bias
        return specs

    def splitting_hint(self, num_shards: int) -> tuple[str, str]:
        patches, flags = super().splitting_hint(num_shards)
        tokens = []
        if self.pool != "mean":
            tokens.append("the CLS token")
        if self.registers:
            tokens.append(f"{self.registers} registers")
        if not tokens:
            return patches, flags
        positions = patches.replace(")", f" and {' and '.join(tokens)})")
        if self.num_patches % num_shards == 0:
            # Without the extra tokens, the patches divide evenly among the devices.
            flags = "--model.pool mean"
            if self.registers is not None:
                flags += " --model.registers none"
        return positions, flags

    def module(self, rngs: Any) -> Any:
        # Imported here, because this module imports JAX and configs must load without it.
        from mupax.zoo.vit.model import ViT

        return ViT(self, rngs)


def _as_flax(spec: ParamSpec) -> ParamSpec:
    """Return a parameter's declaration with the distribution of Flax's initializers.

    The distribution is uniform for matrices in residual blocks, and truncated normal for other
    matrices. Declarations of vectors, embeddings and adapters are returned unchanged.
    """
    if not spec.fan_in or spec.role in ADAPTERS:
        return spec
    return dataclasses.replace(spec, distribution="uniform" if spec.in_block else "truncated")
