"""Models as rows: the list of named configs, counted without building; and the parameter tree of one, as it is built."""

from __future__ import annotations

import dataclasses
from typing import Any

from zoo import flops
from zoo.configs import CONFIGS, DecoderConfig, ModelConfig


def summary(name: str, model: ModelConfig) -> dict[str, Any]:
    """Sizes, parameters and FLOPs of a model, plain values. Needs no JAX."""
    return {
        "name": name,
        "family": model.family,
        "sizes": model.sizes(),
        "parameters": flops.params(model),
        "forward_flops": flops.forward_flops(model),
        "per": model.unit,
        "config": dataclasses.asdict(model),
    }


def summaries() -> list[dict[str, Any]]:
    """`summary` of every named model."""
    return [summary(name, model) for name, model in CONFIGS.items()]


def tree(model: ModelConfig) -> list[dict[str, Any]]:
    """One row per parameter of the built model: path, role, shape, axes, fan_in, count. Allocates nothing."""
    from zoo.build import definition

    built = definition(model)
    return [
        {
            "path": path,
            "role": f"{spec.of.value} {spec.role.value}" if spec.of else spec.role.value,
            "shape": list(built.abstract[path].shape),
            "axes": list(spec.axes),
            "fan_in": list(spec.fan_in),
            "count": built.abstract[path].size,
        }
        for path, spec in built.specs.items()
    ]


def input_of(model: ModelConfig) -> str:
    """What the model reads, in a few words."""
    if isinstance(model, DecoderConfig):
        return f"{model.seq_len} of {model.vocab_size} tokens"
    return f"{model.image_size}x{model.image_size}x{model.channels}, patch {model.patch_size}"


def si(number: float) -> str:
    """A count with three digits and its thousand's letter: 124 M."""
    for letter in ("", "k", "M", "G", "T"):
        if abs(number) < 999.5 or letter == "T":
            break
        number /= 1000
    digits = max(0, 3 - len(f"{abs(number):.0f}")) if letter else 0
    return f"{number:.{digits}f}{' ' if letter else ''}{letter}"
