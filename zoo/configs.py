"""Model sizes as data: frozen configs and the named ones. Imports no JAX, so `--help` and `--dry-run` errors are instant.

A config is the one place that knows a model's sizes. `sizes()` gives them under the logical axis names that parameters
and presets use; `base_sizes()` the subset a preset compares against (the sizes that can grow without bound).
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from typing import ClassVar, Literal

Norm = Literal["layernorm", "rmsnorm"]
Activation = Literal["gelu", "gelu_exact", "relu", "swiglu"]
AttentionName = Literal["auto", "xla", "cudnn", "splash"]
CrossEntropy = Literal["auto", "plain", "chunked"]


class ConfigError(ValueError):
    """A model config that cannot be built. The text says what to write instead."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComputeConfig:
    """How a model runs: same function, different speed, memory and rounding."""

    layers: Literal["auto", "scan", "unrolled"] = "auto"
    """One compiled block looped over depth (compile time constant in depth), or every block compiled (faster on CPU)."""
    remat: Literal["none", "dots", "block", "offload"] = "none"
    """What the backward pass recomputes: nothing, all but matrix products, or whole blocks, whose inputs offload keeps in the host's memory."""
    attention: AttentionName = "auto"
    """auto takes a flash kernel where there is one that can: splash on TPU, cudnn on GPU."""
    projections: Literal["auto", "separate", "fused"] = "auto"
    """Queries, keys and values, and an MLP's gate and up, by a product each or by one; they stay parameters of their own."""
    cross_entropy: CrossEntropy = "auto"
    """All logits at once, or those of a few tokens at a time; auto takes chunks where logits would be large."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Storage of parameters and optimizer state."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Matrix products and activations; norms, softmax and the loss stay in float32."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackConfig:
    """The residual stack that every model shares. Sizes are counts; `head_dim` defaults to width / num_heads."""

    family: ClassVar[str]
    """vit or decoder."""
    unit: ClassVar[str]
    """What one example is made of and rates count: token or image."""

    width: int
    """Residual stream size D."""
    depth: int
    """Residual blocks L (one block = attention + MLP)."""
    num_heads: int
    """Query heads H."""
    head_dim: int | None = None
    """Dimension per head N; width / num_heads unless given."""
    num_kv_heads: int | None = None
    """Key and value heads (grouped-query attention); num_heads unless given."""
    mlp_ratio: float = 4.0
    """MLP hidden size F = mlp_ratio * width, which must be a whole number."""
    activation: Activation = "gelu"
    """gelu is the tanh form, as in GPT-2; gelu_exact the one with erf, 1e-3 away."""
    norm: Norm = "layernorm"
    norm_eps: float = 1e-5
    """Added to the variance (rmsnorm: the mean square) that a norm divides by."""
    norm_gain: bool = True
    """Trainable norm gains."""
    bias: bool = True
    """Trainable biases of matrices and of LayerNorm. A key bias exists only where it has a gradient (rotary, QK-norm)."""
    qk_norm: bool = False
    """RMS-normalize queries and keys per head, with a gain shared by heads."""
    centered: bool = False
    """Train f - f at initialization (Bordelon et al. 2024), not f."""
    compute: ComputeConfig = ComputeConfig()

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if type(value) is int and value < 1:
                raise ConfigError(f"model.{field.name} is {value}; write a whole number of at least 1")
        if self.head_dim is None and self.width % self.num_heads:
            near = max(h for h in range(1, self.num_heads + 1) if self.width % h == 0)
            raise ConfigError(
                f"model.width {self.width} is not divisible by model.num_heads {self.num_heads}; "
                f"write num_heads {near}, or give head_dim to have heads of another size than width / num_heads"
            )
        if self.num_heads % self.kv_heads:
            near = max(k for k in range(1, self.kv_heads + 1) if self.num_heads % k == 0)
            raise ConfigError(
                f"model.num_heads {self.num_heads} is not a multiple of model.num_kv_heads {self.kv_heads}; "
                f"write num_kv_heads {near}"
            )
        if not (0 < self.mlp_ratio < math.inf):
            raise ConfigError(f"model.mlp_ratio is {self.mlp_ratio}; write a number above 0")
        if not (0 < self.norm_eps < math.inf):
            raise ConfigError(f"model.norm_eps is {self.norm_eps}; write a number above 0, such as 1e-5")
        if self.mlp_dim < 1 or not math.isclose(self.mlp_dim, self.mlp_ratio * self.width, rel_tol=1e-6):
            near = max(1, self.mlp_dim) / self.width
            raise ConfigError(
                f"model.mlp_ratio {self.mlp_ratio} times model.width {self.width} is not a whole number; write mlp_ratio {near:.10g}"
            )

    @property
    def mlp_dim(self) -> int:
        """MLP hidden size F."""
        return round(self.mlp_ratio * self.width)

    @property
    def heads_dim(self) -> int:
        """Dimension per head N."""
        return self.head_dim if self.head_dim is not None else self.width // self.num_heads

    @property
    def kv_heads(self) -> int:
        """Key and value heads K."""
        return self.num_kv_heads if self.num_kv_heads is not None else self.num_heads

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate beside its up projection."""
        return self.activation == "swiglu"

    def base_sizes(self) -> dict[str, int]:
        """Sizes that a parameterization takes to infinity, by logical axis name."""
        return {
            "embed": self.width,
            "heads": self.num_heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.heads_dim,
            "mlp": self.mlp_dim,
            "layers": self.depth,
        }

    def sizes(self) -> dict[str, int]:
        """Every logical axis of this model and its size."""
        return self.base_sizes()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTConfig(StackConfig):
    """Vision transformer: images [B, height, width, channels] to logits [B, classes]. Pre-norm, learned positions."""

    family: ClassVar[str] = "vit"
    unit: ClassVar[str] = "image"

    image_size: int
    """Height and width of the square input, in pixels."""
    patch_size: int
    channels: int = 3
    num_classes: int = 1000
    pool: Literal["mean", "cls"] = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.image_size % self.patch_size:
            near = max(p for p in range(1, self.patch_size + 1) if self.image_size % p == 0)
            raise ConfigError(
                f"model.image_size {self.image_size} is not divisible by model.patch_size {self.patch_size}; write patch_size {near}"
            )

    @property
    def num_patches(self) -> int:
        """Patches of one image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def seq_len(self) -> int:
        """Positions in the residual stream: patches, and the CLS token where there is one."""
        return self.num_patches + (self.pool == "cls")

    def sizes(self) -> dict[str, int]:
        """Every logical axis of this model and its size."""
        patch = self.patch_size**2 * self.channels
        return {**self.base_sizes(), "patch": patch, "position": self.seq_len, "classes": self.num_classes}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig(StackConfig):
    """Causal decoder language model: tokens [B, T] to logits [B, T, vocab]."""

    family: ClassVar[str] = "decoder"
    unit: ClassVar[str] = "token"

    vocab_size: int
    seq_len: int
    """Longest context, and the number of learned positions."""
    positions: Literal["learned", "rotary"] = "learned"
    rope_theta: float = 10_000.0
    """Base wavelength of rotary positions."""
    tied: bool = False
    """Read out with the token embedding."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.positions == "rotary" and self.heads_dim % 2:
            raise ConfigError(
                f"rotary positions need an even head dimension, not {self.heads_dim}; write head_dim {self.heads_dim + 1}"
            )

    def sizes(self) -> dict[str, int]:
        """Every logical axis of this model and its size."""
        return {**self.base_sizes(), "vocab": self.vocab_size, "position": self.seq_len}


ModelConfig = ViTConfig | DecoderConfig


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
    # The smallest models of Bordelon et al. 2024: figures 6, 8-10 (CIFAR-5M) and 7, 12 (C4); (N, H, L) = (16, 16, 4), (8, 8, 4).
    "bordelon-vit": ViTConfig(
        width=256, depth=4, num_heads=16, image_size=32, patch_size=4, num_classes=10, **_BARE
    ),
    "bordelon-lm": DecoderConfig(width=64, depth=4, num_heads=8, vocab_size=50257, seq_len=256, **_BARE),
}  # fmt: skip


def get(name: str) -> ModelConfig:
    """The named config.

    Raises:
        ConfigError: no model has this name; the text has the nearest names.
    """
    if name in CONFIGS:
        return CONFIGS[name]
    near = difflib.get_close_matches(name, CONFIGS, n=3) or list(CONFIGS)
    raise ConfigError(f"no model is named {name!r}; did you mean {', '.join(near)}? `python -m zoo` lists them all")
