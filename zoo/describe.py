"""Models as rows: the list of named configs, counted without building; and the parameter tree of one. Needs no JAX."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from mupax.zoo import flops
from mupax.zoo.configs import CONFIGS, ModelConfig


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
    """One row per parameter: path, role, shape, axes, fan_in, count. Needs no JAX."""
    sizes, rows = model.sizes(), []
    for path, spec in sorted(model.parameters().items()):
        shape = [sizes[axis] for axis in spec.axes]
        rows.append(
            {
                "path": path,
                "role": f"{spec.of.value} {spec.role.value}" if spec.of else spec.role.value,
                "shape": shape,
                "axes": list(spec.axes),
                "fan_in": list(spec.fan_in),
                "count": math.prod(shape),
            }
        )
    return rows


def si(number: float) -> str:
    """A count with three digits and its thousand's letter: 124 M."""
    for letter in ("", "k", "M", "G", "T"):
        if abs(number) < 999.5 or letter == "T":
            break
        number /= 1000
    digits = max(0, 3 - len(f"{abs(number):.0f}")) if letter else 0
    return f"{number:.{digits}f}{' ' if letter else ''}{letter}"


def gib(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"
