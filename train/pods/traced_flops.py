"""FLOPs of the matrix products in a traced program, over all devices: loops times their length, kernels times their grid."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any


def matmul_flops(jaxpr: Any, visited: float = 1.0) -> float:
    """FLOPs (two per multiply-add) of one run of a jaxpr, with whatever it computes again and without what is elementwise.

    Args:
        jaxpr: from `jax.stages.Traced.jaxpr` or `jax.make_jaxpr`.
        visited: share of a kernel's grid that it does not skip; of attention with a mask less than 1 (see `causal_share`).

    Raises:
        ValueError: a loop of unknown length.
    """
    return sum(_flops(equation, visited) for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns)


def causal_share(length: int, block: int) -> float:
    """Share of the blocks of a causal mask that have anything to compute."""
    blocks = max(1, length // block)
    return (1 + 1 / blocks) / 2


def _flops(equation: Any, visited: float) -> float:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        shape = equation.invars[0].aval.shape
        return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(shape[i] for i in contracted)
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval.shape
        features = kernel[params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(kernel) / features
    if name == "pallas_call":
        if (estimate := params.get("cost_estimate")) is not None:
            return float(estimate.flops)
        return visited * math.prod(params["grid_mapping"].grid) * matmul_flops(params["jaxpr"], visited)
    inner = sum(matmul_flops(one, visited) for one in _inner(params))
    match name:
        case "scan":
            return params["length"] * inner
        case "cond":
            return max(matmul_flops(branch, visited) for branch in params["branches"])
        case "while":
            if inner:
                raise ValueError("a while loop of unknown length holds matrix products; write it as a scan")
            return 0.0
        case "shard_map":
            # Seen from one device. What stays whole over an axis is computed by every device along it.
            return inner * math.prod(params["mesh"].shape[axis] for axis in _manual(params))
        case _:
            return inner


def _manual(params: Any) -> list[str]:
    named = params.get("manual_axes")
    return list(named) if named else list(params["mesh"].shape)


def _inner(params: Any) -> Iterator[Any]:
    for value in params.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(getattr(one, "jaxpr", one), "eqns"):
                yield one
