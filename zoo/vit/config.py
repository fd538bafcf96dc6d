"""Vision transformers as data: sizes, parameters, FLOPs. Imports no JAX."""

from __future__ import annotations

import dataclasses
import math
from importlib import import_module
from typing import Any, ClassVar, Literal

from mupax.presets.roles import ADAPTERS, ParamSpec, Role
from mupax.zoo.families import ConfigError, ImageModel
from mupax.zoo.transformer import TransformerConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTConfig(ImageModel, TransformerConfig):
    """Vision transformer: images [B, height, width, channels] to logits [B, classes]. Pre-norm."""

    family: ClassVar[str] = "vit"

    pool: Literal["mean", "cls", "cls-mean"] = "mean"
    """What the classifier reads: the mean of all patches, the CLS token, or both side by side (DINOv2)."""
    registers: int | None = None
    """Tokens without an image's content beside the patches (Darcet et al. 2024): rows of the positions alone."""
    pre_logits: bool = False
    """A layer of the width and tanh before the readout, as in pre-training (Dosovitskiy et al. 2021, section 3.1)."""
    layer_scale: float | None = None
    """What trainable gains of each branch's output start at (LayerScale, Touvron et al. 2021); without them unless given."""
    sincos: bool = False
    """Positions of patches are sines and cosines of their row and column, fixed (Chen et al. 2021), in place of learned ones."""
    distribution: Literal["normal", "flax"] = "normal"
    """What matrices' numbers are drawn from, at the preset's deviations: normal ones, or as Flax's Glorot and LeCun initializers
    have them, uniform in blocks and normal cut at two deviations elsewhere."""
    drop_path: float = 0.0
    """Chance that training leaves out a branch of the last block, rising evenly from 0 at the first (Huang et al. 2016)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sincos and self.width % 4:
            raise ConfigError(
                f"model.sincos has a quarter of the width for each sine and cosine, and model.width is {self.width}; write a multiple of 4"
            )
        if self.sincos and self.registers is not None:
            raise ConfigError(
                "model.registers are rows of learned positions, and model.sincos has none; write one of them"
            )
        if not 0 <= self.drop_path < 1:
            raise ConfigError(f"model.drop_path is {self.drop_path}; write a number in [0, 1), such as 0.1")
        if self.layer_scale is not None and not 0 < self.layer_scale < math.inf:
            raise ConfigError(f"model.layer_scale is {self.layer_scale}; write a number above 0, such as 1e-5")

    @property
    def leading(self) -> int:
        """Positions before those of the patches: the CLS token, then registers."""
        return (self.pool != "mean") + (self.registers or 0)

    @property
    def seq_len(self) -> int:
        """Positions in the residual stream: patches, and what leads them."""
        return self.num_patches + self.leading

    @property
    def branch_gains(self) -> float | None:
        return self.layer_scale

    @property
    def drop_rates(self) -> tuple[float, ...]:
        """Chance that training leaves out a branch, of every block."""
        return tuple(self.drop_path * i / max(1, self.depth - 1) for i in range(self.depth))

    def sizes(self) -> dict[str, int]:
        pooled = {"pooled": 2} if self.pool == "cls-mean" else {}
        return {**super().sizes(), **pooled, **({"representation": self.width} if self.pre_logits else {})}

    def applications(self, spec: ParamSpec) -> float:
        return 1 if spec.role is Role.HIDDEN else super().applications(spec)

    def parameters(self) -> dict[str, ParamSpec]:
        patch = ParamSpec(role=Role.PATCH_EMBEDDING, axes=("patch", "embed"), fan_in=("patch",))
        read = ("embed", "pooled") if self.pool == "cls-mean" else ("embed",)
        before = ParamSpec(role=Role.HIDDEN, axes=(*read, "representation"), fan_in=read)
        read = ("representation",) if self.pre_logits else read
        readout = ParamSpec(role=Role.READOUT, axes=(*read, "classes"), fan_in=read)
        cls = ParamSpec(role=Role.TOKEN_EMBEDDING, axes=("embed",))
        specs = {
            "patch": patch,
            **({"patch_bias": patch.bias} if self.bias else {}),
            **({"cls": cls} if self.pool != "mean" else {}),
            **({} if self.sincos else {"position": ParamSpec(role=Role.POSITION, axes=("position", "embed"))}),
            **self.stack(),
            **({"pre_logits": before} if self.pre_logits else {}),
            **({"pre_logits_bias": before.bias} if self.pre_logits and self.bias else {}),
            "readout": readout,
            **({"readout_bias": readout.bias} if self.bias else {}),
        }
        return specs if self.distribution == "normal" else {name: _as_flax(spec) for name, spec in specs.items()}

    def splitting_hint(self, ways: int) -> tuple[str, str]:
        patches, instead = super().splitting_hint(ways)
        tokens = [
            *["the CLS token"] * (self.pool != "mean"),
            *([f"{self.registers} registers"] if self.registers else []),
        ]
        if not tokens:
            return patches, instead
        plain = "--model.pool mean" if self.registers is None else "--model.pool mean --model.registers none"
        return patches.replace(")", f" and {' and '.join(tokens)})"), instead if self.num_patches % ways else plain

    def module(self, rngs: Any) -> Any:
        return import_module("mupax.zoo.vit.model").ViT(self, rngs)


def _as_flax(spec: ParamSpec) -> ParamSpec:
    """The declaration with the distribution that Flax's initializers give its matrix; of a vector as it is."""
    if not spec.fan_in or spec.role in ADAPTERS:
        return spec
    return dataclasses.replace(spec, distribution="uniform" if spec.in_block else "truncated")
