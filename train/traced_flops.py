"""FLOPs of the matrix products in a traced program, over all devices: loops times their length, kernels by their estimate."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any


def matmul_flops(jaxpr: Any) -> float:
    """FLOPs (two per multiply-add) of one run of a jaxpr, with whatever it computes again and without what is elementwise.

    Args:
        jaxpr: from `jax.stages.Traced.jaxpr` or `jax.make_jaxpr`.

    Raises:
        ValueError: a loop of unknown length, or a kernel that does not say what it costs.
    """
    return sum(_flops(equation) for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns)


def _flops(equation: Any) -> float:
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
        estimate = params.get("cost_estimate")
        if estimate is None:
            raise ValueError(f"the kernel {params.get('name', '')} says no cost_estimate, so its FLOPs are not known")
        return float(estimate.flops)
    inner = sum(map(matmul_flops, _inner(params)))
    match name:
        case "scan":
            return params["length"] * inner
        case "cond":
            return max(map(matmul_flops, params["branches"]))
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
