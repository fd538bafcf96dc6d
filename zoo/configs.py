"""The zoo's models: vision transformer and decoder as data, and the named ones. Imports no JAX, so `--help` answers at once."""

from __future__ import annotations

import dataclasses
import difflib
import math
from importlib import import_module
from typing import Any, ClassVar, Literal

from mupax.presets.roles import MATRICES, FactorSpec, ParamSpec, Role
from mupax.zoo.encoder_decoder.config import NAMED, EncoderDecoderConfig
from mupax.zoo.experts.config import RoutingConfig
from mupax.zoo.families import ComputeConfig, ConfigError, ImageModel, ModelConfig, TokenModel
from mupax.zoo.transformer import RopeScaling, Sight, TransformerConfig

__all__ = [
    "CONFIGS",
    "ComputeConfig",
    "ConfigError",
    "DecoderConfig",
    "EncoderDecoderConfig",
    "ModelConfig",
    "ViTConfig",
    "get",
]

FAMILIES = {
    "vit": f"{__name__}:ViTConfig",
    "decoder": f"{__name__}:DecoderConfig",
    "encoder-decoder": f"{__name__}:EncoderDecoderConfig",
}
"""Family to where its config is. A family that is not listed is called by that place itself, module:Class."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTConfig(ImageModel, TransformerConfig):
    """Vision transformer: images [B, height, width, channels] to logits [B, classes]. Pre-norm."""

    family: ClassVar[str] = "vit"

    pool: Literal["mean", "cls", "cls-mean"] = "mean"
    """What the classifier reads: the mean of all patches, the CLS token, or both side by side (DINOv2)."""
    registers: int | None = None
    """Tokens without an image's content beside the patches (Darcet et al. 2024): rows of the positions alone."""
    layer_scale: float | None = None
    """What trainable gains of each branch's output start at (LayerScale, Touvron et al. 2021); without them unless given."""
    sincos: bool = False
    """Positions of patches are sines and cosines of their row and column, fixed (Chen et al. 2021), in place of learned ones."""
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
        return {**super().sizes(), **({"pooled": 2} if self.pool == "cls-mean" else {})}

    def parameters(self) -> dict[str, ParamSpec]:
        patch = ParamSpec(role=Role.PATCH_EMBEDDING, axes=("patch", "embed"), fan_in=("patch",))
        read = ("embed", "pooled") if self.pool == "cls-mean" else ("embed",)
        readout = ParamSpec(role=Role.READOUT, axes=(*read, "classes"), fan_in=read)
        cls = ParamSpec(role=Role.TOKEN_EMBEDDING, axes=("embed",))
        return {
            "patch": patch,
            **({"patch_bias": patch.bias} if self.bias else {}),
            **({"cls": cls} if self.pool != "mean" else {}),
            **({} if self.sincos else {"position": ParamSpec(role=Role.POSITION, axes=("position", "embed"))}),
            **self.stack(),
            "readout": readout,
            **({"readout_bias": readout.bias} if self.bias else {}),
        }

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
        return import_module("mupax.zoo.vit").ViT(self, rngs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig(TokenModel, TransformerConfig):
    """Causal decoder language model: tokens [B, T] to logits [B, T, vocab]."""

    family: ClassVar[str] = "decoder"
    causal: ClassVar[bool] = True
    generates: ClassVar[bool] = True

    positions: Literal["learned", "rotary"] = "learned"
    rope_theta: float = 10_000.0
    """Base wavelength of rotary positions."""
    rope_scaling: Literal["none", "linear", "llama3"] = "none"
    """Frequencies for a context longer than the one first trained on: all divided, or (Llama 3.1) those of few turns within it."""
    rope_factor: float = 8.0
    """What scaled frequencies are divided by."""
    rope_low_freq_factor: float = 1.0
    """llama3: turns within the first context below which a frequency is divided."""
    rope_high_freq_factor: float = 4.0
    """llama3: turns within the first context above which it is left alone."""
    rope_original_len: int = 8192
    """llama3: the first context, in positions."""
    rotary_fraction: float = 1.0
    """Share of each head that rotary positions turn, its first entries."""
    parallel: bool = False
    """A block's MLP reads the stream as its attention does, not after it (GPT-J, GPT-NeoX)."""
    window: int | None = None
    """Positions that a query sees, its own and those before it (sliding window); all before it unless given."""
    full_every: int | None = None
    """Every so-many-th block has no window; each has it unless given."""
    window_theta: float | None = None
    """Base wavelength of rotary positions in blocks with a window, whose frequencies are not scaled; as in the others unless given."""
    post_norm: bool = False
    """Normalize what each branch writes, too, with a gain (Gemma 2)."""
    attention_softcap: float | None = None
    """Attention logits x are cap * tanh(x / cap); as they are unless given."""
    logit_softcap: float | None = None
    """The same of the model's logits."""
    tied: bool = False
    """Read out with the token embedding."""
    readout_bias: bool = False
    """Trainable bias of the logits."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.positions == "rotary" and self.heads_dim % 2:
            raise ConfigError(
                f"rotary positions need an even head dimension, not {self.heads_dim}; write head_dim {self.heads_dim + 1}"
            )
        if self.rotary_fraction != 1 and not (
            0 < self.rotary_fraction < 1 and self.rotary_size and self.rotary_size % 2 == 0
        ):
            raise ConfigError(
                f"model.rotary_fraction {self.rotary_fraction} of {self.heads_dim} is {self.rotary_size} entries of a head; write a share "
                "of at most 1 that makes an even number"
            )
        if self.full_every is not None and (self.window is None or self.full_every < 2):
            raise ConfigError(
                f"model.full_every is {self.full_every} with window {self.window}; it says which blocks have no window: write window "
                "too, and at least 2"
            )
        if self.window_theta is not None and (
            self.window is None or self.positions != "rotary" or self.window_theta <= 0
        ):
            raise ConfigError(
                f"model.window_theta is {self.window_theta}; it is a wavelength above 0 of rotary positions, in blocks with a window: "
                "write window and positions rotary too"
            )
        for name in ("attention_softcap", "logit_softcap"):
            if (cap := getattr(self, name)) is not None and not 0 < cap < math.inf:
                raise ConfigError(f"model.{name} is {cap}; write a number above 0, such as 50")
        if self.rotary_fraction != 1 and self.positions != "rotary":
            raise ConfigError("model.rotary_fraction is of rotary positions; write positions rotary")
        if self.rope_scaling == "none":
            plain = {of.name: of.default for of in dataclasses.fields(self)}
            for name in ("rope_factor", "rope_low_freq_factor", "rope_high_freq_factor", "rope_original_len"):
                if (value := getattr(self, name)) != plain[name]:
                    raise ConfigError(
                        f"model.{name} {value} is of scaled frequencies; write rope_scaling llama3 or linear"
                    )
            return
        if self.positions != "rotary":
            raise ConfigError(f"model.rope_scaling {self.rope_scaling} is of rotary positions; write positions rotary")
        if not 1 <= self.rope_factor < math.inf:
            raise ConfigError(f"model.rope_factor is {self.rope_factor}; write a number of at least 1")
        if not 0 < self.rope_low_freq_factor < self.rope_high_freq_factor < math.inf:
            raise ConfigError(
                f"model.rope_low_freq_factor {self.rope_low_freq_factor} is not between 0 and model.rope_high_freq_factor "
                f"{self.rope_high_freq_factor}; write 1 and 4, as Llama 3.1 has"
            )

    @property
    def rotary_theta(self) -> float | None:
        return self.rope_theta if self.positions == "rotary" else None

    def rotary_of(self, sight: Sight) -> tuple[float | None, RopeScaling | None]:
        if self.window_theta is None or sight.window is None:
            return super().rotary_of(sight)
        return self.window_theta, None

    @property
    def rotary_size(self) -> int:
        return int(self.rotary_fraction * self.heads_dim) if self.rotary_fraction != 1 else self.heads_dim

    @property
    def parallel_branches(self) -> bool:
        return self.parallel

    @property
    def rotary_scaling(self) -> RopeScaling | None:
        if self.rope_scaling == "none":
            return None
        turns = self.rope_low_freq_factor, self.rope_high_freq_factor
        return RopeScaling(self.rope_scaling, self.rope_factor, *turns, self.rope_original_len)

    @property
    def sight(self) -> Sight:
        return Sight(self.causal, self.window, self.attention_softcap)

    @property
    def sights(self) -> tuple[Sight, ...]:
        if self.full_every is None:
            return (self.sight,)
        return (*[self.sight] * (self.full_every - 1), self.sight._replace(window=None))

    @property
    def branch_gains(self) -> float | None:
        return 1.0 if self.post_norm else None

    @property
    def post_norms(self) -> bool:
        return self.post_norm

    def parameters(self) -> dict[str, ParamSpec]:
        learned = {"position": ParamSpec(role=Role.POSITION, axes=("position", "embed"))}
        return {
            "token": MATRICES["token"],
            **(learned if self.positions == "learned" else {}),
            **self.stack(),
            **({} if self.tied else {"readout": MATRICES["readout"]}),
            **({"readout_bias": MATRICES["readout"].bias} if self.readout_bias else {}),
        }

    def factors(self) -> dict[str, FactorSpec]:
        tied = ParamSpec(role=Role.READOUT, axes=("vocab", "embed"), fan_in=("embed",), tied=True)
        factor = FactorSpec(kind="readout", shape=(), value=self.width**-0.5, spec=tied)
        return {**super().factors(), **({"tied_readout": factor} if self.tied else {})}

    def module(self, rngs: Any) -> Any:
        return import_module("mupax.zoo.decoder").Decoder(self, rngs)


def _vit(width: int, depth: int, num_heads: int, patch_size: int, image_size: int = 224) -> ViTConfig:
    return ViTConfig(width=width, depth=depth, num_heads=num_heads, patch_size=patch_size, image_size=image_size)


def _gpt2(width: int, depth: int, num_heads: int) -> DecoderConfig:
    return DecoderConfig(width=width, depth=depth, num_heads=num_heads, vocab_size=50257, seq_len=1024, tied=True)


_BYTE_LM = DecoderConfig(
    width=128, depth=4, num_heads=4, vocab_size=256, seq_len=128,
    positions="rotary", norm="rmsnorm", activation="swiglu", bias=False, mlp_ratio=2.5,
)  # fmt: skip
_LLAMA = DecoderConfig(
    width=4096, depth=32, num_heads=32, num_kv_heads=8, vocab_size=128256, seq_len=8192, mlp_ratio=3.5,
    positions="rotary", rope_theta=500_000.0, norm="rmsnorm", activation="swiglu", bias=False,
)  # fmt: skip
_DIGITS = ViTConfig(width=64, depth=4, num_heads=4, image_size=8, patch_size=2, channels=1, num_classes=10)
_BARE = {"norm_gain": False, "bias": False, "mlp_ratio": 1.0, "centered": True}

CONFIGS: dict[str, ModelConfig] = {
    # The default runs, and the small models their presets are relative to.
    "lm-proxy": dataclasses.replace(_BYTE_LM, width=64, depth=2, num_heads=2),
    "lm-tiny": _BYTE_LM,
    "vit-proxy": dataclasses.replace(_DIGITS, width=32, depth=2, num_heads=2),
    "vit-tiny": _DIGITS,
    # Vision transformers (Dosovitskiy et al. 2021; Ti and S from Touvron et al. 2021).
    "vit-ti16": _vit(192, 12, 3, 16),
    "vit-s16": _vit(384, 12, 6, 16),
    "vit-s32": _vit(384, 12, 6, 32),
    "vit-b16": _vit(768, 12, 12, 16),
    "vit-b32": _vit(768, 12, 12, 32),
    "vit-l16": _vit(1024, 24, 16, 16),
    "vit-h14": _vit(1280, 32, 16, 14),
    # The GPT-2 family (Radford et al. 2019).
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    # For pods: the shape of Llama 3 8B (Dubey et al. 2024, table 3), and a smaller model with the same head dimension.
    "lm-1b": dataclasses.replace(
        _LLAMA, width=2048, depth=16, num_heads=16, num_kv_heads=8, seq_len=2048, mlp_ratio=4.0, tied=True
    ),
    "lm-8b": _LLAMA,
    # Of experts: the shape of Qwen3-30B-A3B (Yang et al. 2025), which has no capacity; a token goes through 3.3 B of its parameters.
    "lm-30b-a3b": dataclasses.replace(
        _LLAMA, width=2048, depth=48, num_heads=32, head_dim=128, num_kv_heads=4, vocab_size=151936, seq_len=4096, mlp_ratio=3.0,
        rope_theta=1e6, norm_eps=1e-6, qk_norm=True,
        experts=128, active_experts=8, expert_dim=768, routing=RoutingConfig(gate="softmax", capacity_factor=1.25),
    ),
    **NAMED,
    # The smallest models of Bordelon et al. 2024, as in its code: figures 6, 8-10 (CIFAR-5M) and 7, 12 (C4);
    # (N, H, L) = (16, 16, 4), (8, 8, 4).
    "bordelon-vit": ViTConfig(
        width=256, depth=4, num_heads=16, image_size=32, patch_size=4, num_classes=10, norm_eps=1e-6, **_BARE
    ),
    "bordelon-lm": DecoderConfig(
        width=64, depth=4, num_heads=8, vocab_size=50257, seq_len=256, norm_eps=1e-6,
        branch_activation="gelu", qk_norm=True, qk_norm_kind="layernorm", readout_bias=True, **_BARE,
    ),
}  # fmt: skip


def get(name: str) -> ModelConfig:
    """The named config.

    Raises:
        ConfigError: no model has this name; the text has the nearest names.
    """
    if name in CONFIGS:
        return CONFIGS[name]
    near = difflib.get_close_matches(name, CONFIGS, n=3)
    hint = f"did you mean {', '.join(near)}? " if near else ""
    raise ConfigError(f"no model is named {name!r}; {hint}`python -m zoo` lists them all")


def family_class(name: str) -> type[ModelConfig]:
    """The config class of a family.

    Args:
        name: one of `FAMILIES`, or module:Class. Such a module is imported.

    Raises:
        ConfigError: there is none of that name.
    """
    module, _, attribute = FAMILIES.get(name, name).partition(":")
    if all(part.isidentifier() for part in [*module.split("."), attribute]):
        try:
            config = getattr(import_module(module), attribute, None)
        except ImportError:
            config = None
        if isinstance(config, type) and issubclass(config, ModelConfig):
            return config
    raise ConfigError(
        f"model.family is {name!r:.80}; write one of {', '.join(FAMILIES)}, or module:Class of a config that can be imported here"
    )
