"""A run's config as the numbers of its infinite limit (`mupax.presets.infinite.stack`), or one message that says why it has none here.

The forward pass has a parameter as multiplier * w; SGD moves that by the square of the multiplier times w's rate.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from mupax.presets.infinite.block import BLOCK, Numbers
from mupax.train.config.preset import preset_of
from mupax.train.config.run import Config
from mupax.zoo.configs import ConfigError, ViTConfig

PATHS = {
    **{name: f"block.{'mlp' if name in ('up', 'down') else 'attention'}.{name}" for name in BLOCK},
    **{name: name for name in ("patch", "position", "readout")},
}
"""What `Numbers` calls a parameter to its name in the zoo."""
SHARE = 4
"""A matrix is revealed along at most one in so many of its directions: its record of them is then as large as the matrix."""


def with_heads(config: Config, heads: int) -> Config:
    """The same run with so many heads of the same dimension, and the width with them.

    Args:
        config: the run.
        heads: H.
    """
    model = _vit(config)
    return dataclasses.replace(
        config, model=dataclasses.replace(model, num_heads=heads, width=heads * model.heads_dim, head_dim=None)
    )


def numbers(config: Config) -> Numbers:
    """Everything that the limit needs of a run, at the run's own sizes.

    Raises:
        ConfigError: what of the model or optimizer has no limit here, why, and what to write.
        PresetError: as `mupax.train.config.preset.preset_of`.
    """
    check(config)
    model, preset, optimizer = _vit(config), preset_of(config), config.scaled_optimizer
    sizes, specs, depth = model.sizes(), model.parameters(), model.depth
    stds, rates = {}, {}
    for name, path in PATHS.items():
        scales = preset.scales(specs[path], sizes, "sgd")
        shape = (depth,) if name in BLOCK else ()
        multiplier = np.broadcast_to(np.asarray(scales.multiplier, float), shape)
        stds[name] = multiplier * scales.init_std
        rates[name] = optimizer.peak_lr * multiplier**2 * scales.lr
    factors = np.array(
        [[preset.residual_scale(sizes, layer, branch) for branch in ("attention", "mlp")] for layer in range(depth)]
    )
    return Numbers(
        head_dim=model.heads_dim,
        heads=model.num_heads,
        depth=depth,
        mlp=model.mlp_dim,
        stds=stds,
        rates=rates,
        logit_scale=preset.logit_scale(sizes),
        skip=factors[..., 0],
        branch=factors[..., 1],
        momentum=optimizer.momentum,
        eps=model.norm_eps,
        centred_norm=model.norm == "layernorm",
        centred=model.centered,
        activation=model.activation,
    )


def check(config: Config) -> None:
    """Raises ConfigError for a run whose updates are not of low rank, or whose model is none that the limit knows."""
    model, optimizer = _vit(config), config.scaled_optimizer
    if optimizer.name not in ("sgd", "momentum"):
        raise ConfigError(
            f"the infinite limit follows updates of low rank, those of SGD with or without momentum; {optimizer.name} acts on every "
            "entry alone, which makes them full; write --optimizer.name sgd and a rate of its own"
        )
    plain = {
        "model.norm_gain": (model.norm_gain, False),
        "model.bias": (model.bias, False),
        "model.qk_norm": (model.qk_norm, False),
        "model.pool": (model.pool, "mean"),
        "model.registers": (model.registers, None),
        "model.sincos": (model.sincos, False),
        "model.distribution": (model.distribution, "normal"),
        "model.pre_logits": (model.pre_logits, False),
        "model.layer_scale": (model.layer_scale, None),
        "model.value_dim": (model.value_dim, None),
        "model.branch_activation": (model.branch_activation, "none"),
        "model.num_kv_heads": (model.kv_heads, model.num_heads),
        "model.width": (model.width, model.num_heads * model.heads_dim),
        "optimizer.schedule": (optimizer.schedule, "constant"),
        "optimizer.warmup_steps": (optimizer.warmup_steps, 0),
        "optimizer.weight_decay": (optimizer.weight_decay, 0),
        "optimizer.clip_norm": (optimizer.clip_norm, None),
        "ema.decay": (config.ema.decay, None),
        "z_loss": (config.z_loss, 0.0),
        "freeze": (config.freeze, ()),
        "train_only": (config.train_only, ()),
    }
    for name, (value, needed) in plain.items():
        if value != needed:
            flag = name.replace("_", "-")
            raise ConfigError(
                f"{name} is {value}; the infinite limit is written for {needed}: --{flag} {_word(needed)}"
            )
    if model.activation not in ("gelu", "relu"):
        raise ConfigError(f"model.activation is {model.activation}; the infinite limit has gelu and relu")


def check_rank(config: Config, images: int) -> int:
    """Directions that every matrix is looked at along, by so many steps and a last look.

    Args:
        config: has the steps, the positions of an image and the width of the matrices.
        images: of every step.

    Raises:
        ConfigError: they are more than are worth recording; the text says what fits.
    """
    model = _vit(config)
    looks, positions, most = config.steps + 1, model.seq_len, model.width // SHARE
    rank = looks * images * positions
    if rank > most:
        steps, fits = most // (images * positions) - 1, most // (looks * positions)
        fitting = [f"--heads {-(-rank * SHARE // model.heads_dim)}"]
        fitting += [f"--steps {steps}"] if steps > 0 else []
        fitting += [f"--images {fits}"] if fits else []
        raise ConfigError(
            f"{config.steps} steps on {images} images of {positions} positions look at {rank} directions of every matrix, and of "
            f"width {model.width} at most {most} are worth recording: a {SHARE}th takes the memory of the matrix itself; write "
            f"{', or '.join(fitting)}"
        )
    return rank


def patches(images_BHWC: np.ndarray, size: int) -> np.ndarray:
    """What the patch embedding reads, [B, T, size * size * C], in the order of the zoo's ViT.

    Args:
        images_BHWC: images.
        size: side of a patch.
    """
    batch, side, _, channels = images_BHWC.shape
    grid = side // size
    x = images_BHWC.reshape(batch, grid, size, grid, size, channels).swapaxes(2, 3)
    return x.reshape(batch, grid * grid, size * size * channels)


def _vit(config: Config) -> ViTConfig:
    if not isinstance(config.model, ViTConfig):
        raise ConfigError(f"the infinite limit is of vision transformers, and the model is a {config.model.family}")
    return config.model


def _word(value: Any) -> str:
    return "''" if value == () else str(value)
