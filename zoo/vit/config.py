"""Vision transformers as data: sizes, parameters, FLOPs. Imports no JAX."""

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
"""Pixels under the kernel of every convolution but the first."""


class Convolution(NamedTuple):
    """One convolution of a stem, with zeros around the image so that a stride of s makes a side s times shorter."""

    name: str
    stride: int
    output: str
    """Axis of the channels that it writes."""
    side: int
    """Pixels on a side of what it writes."""

    @property
    def kernel(self) -> int:
        """Pixels on a side of the kernel: three, or so many that neighbours overlap."""
        return 3 if self.stride <= 2 else 2 * self.stride - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTConfig(ImageModel, TransformerConfig):
    """Vision transformer: images [B, height, width, channels] to logits [B, classes]. Pre-norm."""

    family: ClassVar[str] = "vit"

    stem: Annotated[int | None, Affects("model", 2)] = None
    """Convolutions, 2 or 3, that make patches, each with a norm and a GELU after it, in place of one matrix per patch; none unless
    given. Their strides multiply to patch_size. Three write a quarter, a half and all of the width, two a half and all."""
    pool: Annotated[Literal["mean", "cls", "cls-mean"], Affects("model", "cls")] = "mean"
    """What the classifier reads: the mean of all patches, the CLS token, or both side by side (DINOv2)."""
    registers: Annotated[int | None, Affects("model", 2)] = None
    """Tokens without an image's content beside the patches (Darcet et al. 2024): rows of the positions alone."""
    pre_logits: Annotated[bool, Affects("model", True)] = False
    """A layer of the width and tanh before the readout, as in pre-training (Dosovitskiy et al. 2021, section 3.1)."""
    layer_scale: Annotated[float | None, Affects("model", 0.5)] = None
    """What trainable gains of each branch's output start at (LayerScale, Touvron et al. 2021); without them unless given."""
    sincos: Annotated[bool, Affects("model", True)] = False
    """Positions of patches are sines and cosines of their row and column, fixed (Chen et al. 2021), in place of learned ones."""
    distribution: Annotated[Literal["normal", "flax"], Affects("start", "flax")] = "normal"
    """What matrices' numbers are drawn from, at the preset's deviations: normal ones, or as Flax's Glorot and LeCun initializers
    have them, uniform in blocks and normal cut at two deviations elsewhere."""
    drop_path: Annotated[float, Affects("model", 0.1)] = 0.0
    """Chance that training leaves out a branch of the last block, rising evenly from 0 at the first (Huang et al. 2016)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stem not in (None, 2, 3):
            raise ConfigError(f"model.stem is {self.stem}; write 2 or 3 convolutions, or none")
        if self.stem is not None and self.width % 2 ** (self.stem - 1):
            raise ConfigError(
                f"model.stem {self.stem} begins with a {2 ** (self.stem - 1)}th of the width, and model.width is "
                f"{self.width}; write a multiple of {2 ** (self.stem - 1)}"
            )
        if self.sincos and self.width % 4:
            raise ConfigError(
                f"model.sincos has a quarter of the width for each sine and cosine, and model.width is {self.width}; write a multiple of 4"
            )
        if self.sincos and self.registers is not None:
            raise ConfigError(
                "model.registers are rows of learned positions, and model.sincos has none; write one of them"
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
        """Positions before those of the patches: the CLS token, then registers."""
        return (self.pool != "mean") + (self.registers or 0)

    @property
    def seq_len(self) -> int:
        """Positions in the residual stream: patches, and what leads them."""
        return self.num_patches + self.leading

    @property
    def convolutions(self) -> tuple[Convolution, ...]:
        """The convolutions of the stem, in order; none without one.

        The later ones take a stride of 2 while it divides what is left of patch_size, and the first takes the rest.
        """
        if self.stem is None:
            return ()
        left = self.patch_size
        strides = []
        for _ in range(self.stem - 1):
            stride = 2 if left % 2 == 0 else 1
            strides.insert(0, stride)
            left //= stride
        strides.insert(0, left)
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
        """Chance that training leaves out a branch, of every block."""
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
        for index, convolution in enumerate(self.convolutions[:-1]):
            sizes[convolution.output] = self.width // 2 ** (len(self.convolutions) - 1 - index)
        return sizes

    def applications(self, spec: ParamSpec) -> float:
        """A convolution is applied once per pixel that it writes, what is between the stream and the readout once per image."""
        for convolution in self.convolutions:
            if (
                spec.fan_in
                and spec.axes[-1] == convolution.output
                and spec.axes[0] in ("patch", "taps")
            ):
                return convolution.side**2
        return 1 if spec.role is Role.HIDDEN else super().applications(spec)

    def _stem(self) -> dict[str, ParamSpec]:
        """Parameters of the stem: the first convolution reads pixels, every other reads what grows with the width."""
        specs: dict[str, ParamSpec] = {}
        first, *later = self.convolutions
        specs[f"stem.{first.name}"] = ParamSpec(
            role=Role.PATCH_EMBEDDING, axes=("patch", first.output), fan_in=("patch",)
        )
        before = first.output
        for convolution in later:
            axes = ("taps", before, convolution.output)
            specs[f"stem.{convolution.name}"] = ParamSpec(
                role=Role.HIDDEN, axes=axes, fan_in=axes[:2]
            )
            before = convolution.output
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
        patch = ParamSpec(role=Role.PATCH_EMBEDDING, axes=("patch", "embed"), fan_in=("patch",))
        read = ("embed", "pooled") if self.pool == "cls-mean" else ("embed",)
        before = ParamSpec(role=Role.HIDDEN, axes=(*read, "representation"), fan_in=read)
        read = ("representation",) if self.pre_logits else read
        readout = ParamSpec(role=Role.READOUT, axes=(*read, "classes"), fan_in=read)
        cls = ParamSpec(role=Role.TOKEN_EMBEDDING, axes=("embed",))
        read_in = self._stem() if self.convolutions else {"patch": patch}
        if self.bias and not self.convolutions:
            read_in["patch_bias"] = patch.bias
        specs = {
            **read_in,
            **({"cls": cls} if self.pool != "mean" else {}),
            **(
                {}
                if self.sincos
                else {"position": ParamSpec(role=Role.POSITION, axes=("position", "embed"))}
            ),
            **self.stack(),
            **({"pre_logits": before} if self.pre_logits else {}),
            **({"pre_logits_bias": before.bias} if self.pre_logits and self.bias else {}),
            "readout": readout,
            **({"readout_bias": readout.bias} if self.bias else {}),
        }
        return (
            specs
            if self.distribution == "normal"
            else {name: _as_flax(spec) for name, spec in specs.items()}
        )

    def splitting_hint(self, ways: int) -> tuple[str, str]:
        patches, instead = super().splitting_hint(ways)
        tokens = [
            *["the CLS token"] * (self.pool != "mean"),
            *([f"{self.registers} registers"] if self.registers else []),
        ]
        if not tokens:
            return patches, instead
        plain = (
            "--model.pool mean"
            if self.registers is None
            else "--model.pool mean --model.registers none"
        )
        return patches.replace(
            ")", f" and {' and '.join(tokens)})"
        ), instead if self.num_patches % ways else plain

    def module(self, rngs: Any) -> Any:
        from mupax.zoo.vit.model import ViT

        return ViT(self, rngs)


def _as_flax(spec: ParamSpec) -> ParamSpec:
    """The declaration with the distribution that Flax's initializers give its matrix; of a vector as it is."""
    if not spec.fan_in or spec.role in ADAPTERS:
        return spec
    return dataclasses.replace(spec, distribution="uniform" if spec.in_block else "truncated")
