"""Models of one structure at growing sizes, and how a command line names them: head_dim=16,32,64,128."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mupax.presets.roles import RUN_AXES
from mupax.zoo.configs import ConfigError, ModelConfig
from mupax.zoo.transformer import TransformerConfig, transformer

if TYPE_CHECKING:
    from mupax.train.config.run import Config

AXES = (
    "head_dim",
    "heads",
    "width",
    "depth",
    "encoder_depth",
    "mlp",
    "experts",
    "expert_dim",
    "kv_heads",
)
"""What can grow alone. Width follows head_dim and heads, the MLP and experts' hidden follow width, active experts the experts, key
heads follow heads unless they grow alone, and an encoder's depth its decoder's unless it is written."""


def parse(text: str, axes: Sequence[str] = AXES) -> tuple[str, tuple[int, ...]]:
    """The axis and the sizes, smallest first, of a text such as head_dim=16,32,64.

    Args:
        text: AXIS=N,N,...
        axes: those that there are.

    Raises:
        ConfigError: no such axis, or a size that is not a whole number of at least 1 or comes twice.
    """
    axis, _, sizes = (part.strip() for part in text.partition("="))
    axis = axis.replace("-", "_")
    if axis not in axes:
        raise ConfigError(
            f"sizes {text!r}: no size is named {axis!r}; write one of {', '.join(axes)}, as width=64,128,256"
        )
    words = [word.strip() for word in sizes.split(",")]
    if not all(word.isascii() and word.isdigit() and int(word) for word in words) or len(
        set(words)
    ) < len(words):
        raise ConfigError(
            f"sizes {text!r}: write different whole numbers of at least 1, as {axis}=64,128,256"
        )
    return axis, tuple(sorted(map(int, words)))


def grown_run(config: Config, axis: str, size: int) -> Config:
    """The run at one size of an axis of `AXES`, or at another batch and the same tokens, or at other tokens and the same batch.

    Warm-up stays the same fraction of a run of any length: a fixed number of steps would be measured too.

    Args:
        config: of the run to change.
        axis: what grows.
        size: of it; batch counts examples, tokens all that the run sees.

    Raises:
        ConfigError: as `grown`, or tokens that are no whole number of steps.
    """
    if axis not in RUN_AXES:
        return dataclasses.replace(config, model=grown(config.model, axis, size))
    each, opt = config.model.units, config.optimizer
    batch, tokens = (config.data.batch_size, size)
    if axis == "batch":
        batch, tokens = size, config.steps * config.data.batch_size * each
    steps, rest = divmod(tokens, batch * each)
    if rest or not steps:
        raise ConfigError(
            f"{axis}={size}: {tokens} tokens are no whole number of steps of {batch} x {each}; write another"
        )
    lengths = {name: getattr(opt, name) for name in ("warmup_steps", "decay_steps")}
    scaled = {name: max(1, round(n * steps / config.steps)) for name, n in lengths.items() if n}
    data = dataclasses.replace(config.data, batch_size=batch)
    return dataclasses.replace(
        config, data=data, steps=steps, optimizer=dataclasses.replace(opt, **scaled)
    )


def of(model: ModelConfig, axis: str) -> int:
    """The model's size along an axis.

    Args:
        model: of any family.
        axis: of `AXES`.

    Raises:
        ConfigError: an encoder's depth, of a model without one.
    """
    _refuse_encoder(model, axis)
    if axis in ("experts", "expert_dim") and axis not in model.sizes():
        raise ConfigError(
            f"the model has no experts, so no {axis}; write model.experts too, or another size"
        )
    return model.sizes()[
        {"width": "embed", "depth": "layers", "encoder_depth": "encoder_layers"}.get(axis, axis)
    ]


def grown(model: ModelConfig, axis: str, size: int) -> TransformerConfig:
    """The model with one size changed, and with it what must follow.

    Args:
        model: whose structure, and whose other sizes.
        axis: head_dim (at so many heads), heads (of this dimension), width (more heads of this dimension), depth, encoder_depth, mlp,
            or kv_heads (of so many heads).
        size: of the axis; width must be a multiple of the head dimension.

    Raises:
        ConfigError: a model that cannot have that size.
    """
    model = transformer(model, f"growing {axis}")
    _refuse_encoder(model, axis)
    if axis in ("depth", "encoder_depth"):
        return dataclasses.replace(model, **{axis: size})
    if axis in ("experts", "expert_dim"):
        return _with_experts(model, axis, size)
    if axis == "mlp":
        return dataclasses.replace(model, mlp_ratio=size / model.width)
    if axis == "kv_heads":
        return dataclasses.replace(model, num_kv_heads=size)
    if axis == "width" and size % model.heads_dim:
        near = max(1, size // model.heads_dim) * model.heads_dim
        raise ConfigError(
            f"width {size} is no multiple of the head dimension {model.heads_dim}; write width {near}"
        )
    head_dim = size if axis == "head_dim" else model.heads_dim
    heads = {"head_dim": model.num_heads, "heads": size, "width": size // head_dim}[axis]
    if heads * model.kv_heads % model.num_heads:
        raise ConfigError(
            f"{heads} heads do not share keys as {model.num_heads} share {model.kv_heads}; "
            f"write a multiple of {model.num_heads // model.kv_heads} heads"
        )
    width = round(model.width * (heads * head_dim) / (model.num_heads * model.heads_dim))
    return dataclasses.replace(
        model,
        width=width,
        num_heads=heads,
        expert_dim=None
        if model.expert_dim is None
        else round(model.expert_dim * width / model.width),
        head_dim=None if model.head_dim is None else head_dim,
        num_kv_heads=None
        if model.num_kv_heads is None
        else heads * model.kv_heads // model.num_heads,
    )


def _with_experts(model: TransformerConfig, axis: str, size: int) -> TransformerConfig:
    """The model with so many experts, a token going to the same share of them, or with experts of another hidden size."""
    if model.experts is None:
        raise ConfigError(
            f"the model has no experts, so no {axis}; write model.experts too, or another size"
        )
    if axis == "expert_dim":
        return dataclasses.replace(model, expert_dim=size)
    active, rest = divmod(size * model.active, model.experts)
    if rest or not active:
        raise ConfigError(
            f"experts={size}: a token goes to {model.active} of {model.experts}, and no whole number of {size} is that share; "
            f"write a multiple of {model.experts // math.gcd(model.active, model.experts)}"
        )
    return dataclasses.replace(
        model, experts=size, active_experts=active, expert_dim=model.expert_size
    )


def _refuse_encoder(model: ModelConfig, axis: str) -> None:
    if axis == "encoder_depth" and "encoder_layers" not in model.sizes():
        raise ConfigError(
            f"a {model.family} has no encoder, so no encoder_depth; write depth, or an encoder-decoder"
        )
