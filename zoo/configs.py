"""Families of the zoo and named model configs. Imports no JAX, so that `--help` answers at once."""

from __future__ import annotations

import dataclasses
import difflib

from mupax.mappings import function_of
from mupax.plugins import loaded_module
from mupax.zoo.decoder.config import DecoderConfig
from mupax.zoo.encoder_decoder.config import NAMED, EncoderDecoderConfig
from mupax.zoo.families import ComputeConfig, ConfigError, ModelConfig
from mupax.zoo.transformer import RoutingConfig
from mupax.zoo.vit.config import ViTConfig

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

FAMILIES: dict[str, type[ModelConfig] | str] = {
    "vit": ViTConfig,
    "decoder": DecoderConfig,
    "encoder-decoder": EncoderDecoderConfig,
}
"""Config class of each family of models by name, or its import path as MODULE:CLASS.

A family without an entry is named by its import path.
"""


def _vit(
    width: int, depth: int, num_heads: int, patch_size: int, image_size: int = 224
) -> ViTConfig:
    return ViTConfig(
        width=width, depth=depth, num_heads=num_heads, patch_size=patch_size, image_size=image_size
    )


def _gpt2(width: int, depth: int, num_heads: int) -> DecoderConfig:
    return DecoderConfig(
        width=width, depth=depth, num_heads=num_heads, vocab_size=50257, seq_len=1024, tied=True
    )


_BYTE_LM = DecoderConfig(
    width=128,
    depth=4,
    num_heads=4,
    vocab_size=256,
    seq_len=128,
    positions="rotary",
    norm="rmsnorm",
    activation="swiglu",
    bias=False,
    mlp_ratio=2.5,
)
_LLAMA = DecoderConfig(
    width=4096,
    depth=32,
    num_heads=32,
    num_kv_heads=8,
    vocab_size=128256,
    seq_len=8192,
    mlp_ratio=3.5,
    positions="rotary",
    rope_theta=500_000.0,
    norm="rmsnorm",
    activation="swiglu",
    bias=False,
)
_DIGITS = ViTConfig(
    width=64, depth=4, num_heads=4, image_size=8, patch_size=2, channels=1, num_classes=10
)
_FOLDER = ViTConfig(
    width=128,
    depth=1,
    num_heads=4,
    image_size=32,
    patch_size=8,
    stem=3,
    num_classes=10,
    norm="rmsnorm",
    bias=False,
)
_BARE = {"norm_gain": False, "bias": False, "mlp_ratio": 1.0, "centered": True}

CONFIGS: dict[str, ModelConfig] = {
    # Models of the default runs, and the small base models (proxy) of their presets.
    "lm-proxy": dataclasses.replace(_BYTE_LM, width=64, depth=2, num_heads=2),
    "lm-tiny": _BYTE_LM,
    "vit-proxy": dataclasses.replace(_DIGITS, width=32, depth=2, num_heads=2),
    "vit-tiny": _DIGITS,
    # For small folders of images, with a convolutional stem.
    "vit-folder-proxy": dataclasses.replace(_FOLDER, width=64, num_heads=2),
    "vit-folder": _FOLDER,
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
    # For pods: the shape of Llama 3 8B (Dubey et al. 2024, table 3), and a smaller model with the
    # same head dimension.
    "lm-1b": dataclasses.replace(
        _LLAMA,
        width=2048,
        depth=16,
        num_heads=16,
        num_kv_heads=8,
        seq_len=2048,
        mlp_ratio=4.0,
        tied=True,
    ),
    "lm-8b": _LLAMA,
    # Mixture of experts in the shape of Qwen3-30B-A3B (Yang et al. 2025). Unlike Qwen3, this config
    # limits the tokens per expert (capacity_factor). A token uses 3.3 B parameters.
    "lm-30b-a3b": dataclasses.replace(
        _LLAMA,
        width=2048,
        depth=48,
        num_heads=32,
        head_dim=128,
        num_kv_heads=4,
        vocab_size=151936,
        seq_len=4096,
        mlp_ratio=3.0,
        rope_theta=1e6,
        norm_eps=1e-6,
        qk_norm=True,
        experts=128,
        active_experts=8,
        expert_dim=768,
        routing=RoutingConfig(gate="softmax", capacity_factor=1.25),
    ),
    **NAMED,
    # The smallest models of Bordelon et al. 2024, as in the paper's code: figures 6 and 8-10
    # (CIFAR-5M) with (N, H, L) = (16, 16, 4), figures 7 and 12 (C4) with (8, 8, 4). N is the head
    # size, H the number of heads and L the depth.
    "bordelon-vit": ViTConfig(
        width=256,
        depth=4,
        num_heads=16,
        image_size=32,
        patch_size=4,
        num_classes=10,
        norm_eps=1e-6,
        **_BARE,
    ),
    "bordelon-lm": DecoderConfig(
        width=64,
        depth=4,
        num_heads=8,
        vocab_size=50257,
        seq_len=256,
        norm_eps=1e-6,
        branch_activation="gelu",
        qk_norm=True,
        qk_norm_kind="layernorm",
        readout_bias=True,
        **_BARE,
    ),
}


def get(name: str) -> ModelConfig:
    """Return the config of a named model (`CONFIGS`).

    Raises:
        ConfigError: If no model has this name, or if a plug-in gave the name to an object that is
            no `ModelConfig`. In the first case the message suggests similar names.
    """
    if name in CONFIGS:
        model = CONFIGS[name]
        # A plug-in may have put anything there.
        if not isinstance(model, ModelConfig):
            raise ConfigError(
                f"the model {name!r} is of the type {type(model).__name__}; extend TokenModel or ImageModel "
                "of mupax.zoo.families, and put an instance into CONFIGS"
            )
        return model
    near = difflib.get_close_matches(name, CONFIGS, n=3)
    hint = f"did you mean {', '.join(near)}? " if near else ""
    raise ConfigError(
        f"no model is named {name!r}; {hint}`mupax models` lists them all, and --plugin MODULE "
        "adds yours"
    )


def family_class(name: str) -> type[ModelConfig]:
    """Return the config class of a family.

    Args:
        name: Key of `FAMILIES`, or module:Class in a module that this process has imported.

    Raises:
        ConfigError: If there is no such class, or its module is not imported.
    """
    if name in FAMILIES:
        return function_of(FAMILIES[name])
    module_name, _, attribute = name.partition(":")
    is_place = all(part.isidentifier() for part in [*module_name.split("."), attribute])
    if is_place:
        # The name may come from an untrusted file. Importing a module runs its code, so only a
        # module that is already imported is used.
        module = loaded_module(module_name)
        config = getattr(module, attribute, None)
        if isinstance(config, type) and issubclass(config, ModelConfig):
            return config
        if module is None:
            raise ConfigError(
                f"model.family {name!r:.80} is of a module that is not imported; add --plugin "
                f"{module_name:.80} if you trust it, or import it before"
            )
    raise ConfigError(
        f"model.family is {name!r:.80}; write one of {', '.join(FAMILIES)}, or module:Class of a "
        "config that is imported here"
    )
