"""Models of one structure at growing sizes, and their text on a command line, head_dim=16,32,64."""

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
"""Sizes that can grow alone. Width follows head_dim and heads. The MLP and the experts' hidden size
follow width, active experts follow the experts, and key heads follow heads, unless they grow
themselves. An encoder's depth follows its decoder's unless it is written."""


def parse(text: str, axes: Sequence[str] = AXES) -> tuple[str, tuple[int, ...]]:
    """Return the axis and the sizes of a text such as head_dim=16,32,64, smallest first.

    Args:
        text: Words of the form `AXIS=N,N,...`.
        axes: Axes that the text may name, by default `AXES`.

    Raises:
        ConfigError: The axis does not exist, or a size is no whole number of at least 1 or comes
            twice.
    """
    axis, _, sizes_text = (part.strip() for part in text.partition("="))
    # Flags are written with hyphens, and an axis is often copied from one.
    axis = axis.replace("-", "_")
    if axis not in axes:
        raise ConfigError(
            f"sizes {text!r}: no size is named {axis!r}; "
            f"write one of {', '.join(axes)}, as width=64,128,256"
        )
    words = [word.strip() for word in sizes_text.split(",")]
    # `isdigit` alone accepts digits such as superscripts, which `int` refuses.
    are_numbers = all(word.isascii() and word.isdigit() and int(word) for word in words)
    if not are_numbers or len(set(words)) < len(words):
        raise ConfigError(
            f"sizes {text!r}: write different whole numbers of at least 1, as {axis}=64,128,256"
        )
    return axis, tuple(sorted(map(int, words)))


def grown_run(config: Config, axis: str, size: int) -> Config:
    """Return the run at one size of an axis of `AXES`, or with another batch or other tokens.

    Another batch keeps the tokens, and other tokens keep the batch. Warm-up and decay stay the
    same fraction of the run: a fixed number of steps would be a second difference between sizes.

    Args:
        axis: Axis of `AXES`, or "batch" or "tokens".
        size: Size along the axis. A batch counts examples, tokens all that the run sees.

    Raises:
        ConfigError: The model cannot have that size (`grown`), or the tokens are no whole number
            of steps.
    """
    if axis not in RUN_AXES:
        return dataclasses.replace(config, model=grown(config.model, axis, size))

    opt = config.optimizer
    units = config.model.units
    if axis == "batch":
        batch = size
        tokens = config.steps * config.data.batch_size * units
    else:
        batch = config.data.batch_size
        tokens = size
    steps, remainder = divmod(tokens, batch * units)
    if remainder or not steps:
        raise ConfigError(
            f"{axis}={size}: {tokens} tokens are no whole number of steps of {batch} x {units}; "
            "write another"
        )

    durations = {}
    for name in ("warmup_steps", "decay_steps"):
        duration = getattr(opt, name)
        if duration:
            # Rounding must not switch off a warm-up or decay that the run has.
            durations[name] = max(1, round(duration * steps / config.steps))
    data = dataclasses.replace(config.data, batch_size=batch)
    optimizer = dataclasses.replace(opt, **durations)
    return dataclasses.replace(config, data=data, steps=steps, optimizer=optimizer)


def of(model: ModelConfig, axis: str) -> int:
    """Return the model's size along an axis of `AXES`.

    Raises:
        ConfigError: The model has no encoder, no experts or no MLP, and the axis is one of theirs.
    """
    _refuse_missing(model, axis)
    logical_axes = {"width": "embed", "depth": "layers", "encoder_depth": "encoder_layers"}
    return model.sizes()[logical_axes.get(axis, axis)]


def grown(model: ModelConfig, axis: str, size: int) -> TransformerConfig:
    """Return the model with one size changed, and with it the sizes that follow (`AXES`).

    Args:
        axis: Axis of `AXES`. head_dim keeps the number of heads. heads and width keep the head
            dimension, and grow in proportion.
        size: Size along the axis. A width must give a whole number of heads.

    Raises:
        ConfigError: The model is no transformer, or cannot have that size.
    """
    model = transformer(model, f"growing {axis}")
    _refuse_missing(model, axis)
    if axis in ("depth", "encoder_depth"):
        return dataclasses.replace(model, **{axis: size})
    if axis in ("experts", "expert_dim"):
        return _with_experts(model, axis, size)
    if axis == "mlp":
        # The config has no hidden size of its own, only its ratio to the width.
        return dataclasses.replace(model, mlp_ratio=size / model.width)
    if axis == "kv_heads":
        return dataclasses.replace(model, num_kv_heads=size)

    # The number of heads keeps its ratio to the width, even if the width is not heads x head_dim.
    # It must be whole.
    if axis == "width" and size * model.num_heads % model.width:
        step = model.width // math.gcd(model.width, model.num_heads)
        raise ConfigError(
            f"width {size} gives no whole number of heads, where width {model.width} has "
            f"{model.num_heads}; write width {max(1, size // step) * step}"
        )
    head_dim = model.heads_dim
    heads = model.num_heads
    if axis == "head_dim":
        head_dim = size
    elif axis == "heads":
        heads = size
    else:
        heads = size * model.num_heads // model.width
    if heads * model.kv_heads % model.num_heads:
        raise ConfigError(
            f"{heads} heads do not share keys as {model.num_heads} share {model.kv_heads}; "
            f"write a multiple of {model.num_heads // model.kv_heads} heads"
        )
    width = round(model.width * (heads * head_dim) / (model.num_heads * model.heads_dim))

    # A field that is None has a default that follows from the other fields.
    derived: dict[str, int] = {}
    if model.expert_dim is not None:
        derived["expert_dim"] = round(model.expert_dim * width / model.width)
    if model.head_dim is not None:
        derived["head_dim"] = head_dim
    if model.num_kv_heads is not None:
        derived["num_kv_heads"] = heads * model.kv_heads // model.num_heads
    return dataclasses.replace(model, width=width, num_heads=heads, **derived)


def _with_experts(model: TransformerConfig, axis: str, size: int) -> TransformerConfig:
    """Return a model of experts with `size` of them, or with experts of that hidden size.

    Each token still goes to the same share of the experts.

    Args:
        axis: "experts" if `size` is their number, "expert_dim" if it is their hidden size.

    Raises:
        ConfigError: That share of `size` experts is no whole number.
    """
    assert model.experts is not None
    if axis == "expert_dim":
        return dataclasses.replace(model, expert_dim=size)
    # A token goes to the same share of the experts, so its cost grows with the number of experts.
    active, remainder = divmod(size * model.active, model.experts)
    if remainder or not active:
        raise ConfigError(
            f"experts={size}: a token goes to {model.active} of {model.experts}, "
            f"and no whole number of {size} is that share; "
            f"write a multiple of {model.experts // math.gcd(model.active, model.experts)}"
        )
    # Write `expert_dim` out: its default is mlp_dim / active experts, which would change.
    return dataclasses.replace(
        model, experts=size, active_experts=active, expert_dim=model.expert_size
    )


def _refuse_missing(model: ModelConfig, axis: str) -> None:
    """Raise ConfigError for a size that the model does not have."""
    sizes = model.sizes()
    if axis == "encoder_depth" and "encoder_layers" not in sizes:
        raise ConfigError(
            f"a {model.family} has no encoder, so no encoder_depth; "
            "write depth, or an encoder-decoder"
        )
    if axis in ("experts", "expert_dim") and "experts" not in sizes:
        raise ConfigError(
            f"the model has no experts, so no {axis}; write model.experts too, or another size"
        )
    # `sizes` has `mlp` if there are shared experts, but it follows from `expert_dim`.
    if axis == "mlp" and "experts" in sizes:
        raise ConfigError(
            "the model has experts in place of an MLP, so no mlp; write expert_dim, the hidden "
            "size of an expert"
        )
