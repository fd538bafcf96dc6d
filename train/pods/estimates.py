"""What a step's peak memory must be, from sizes alone, and the FLOPs of its matrix products, from its trace.

Compared with what the compiler allocates (`train/pods/compiled.py`), so that neither is believed alone. Bytes on one device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from mupax.presets import Role
from mupax.train.core.loss import CHUNK_LOGITS, LEAST_ROWS
from mupax.train.core.program import Program
from mupax.train.parallel.feed import abstract_batch

Terms = dict[str, int]

_SPLIT = ("heads", "kv_heads", "mlp")
"""Axes of activations that a device may have a part of."""


def expected(program: Program) -> Terms:
    """Bytes by what they hold at the fuller of two moments: the loss, and the backward pass of one layer.

    Returns:
        term to bytes; their sum is the expected peak.
    """
    held = {
        "state": sum(map(_shard_bytes, jax.tree.leaves(program.abstract))),
        "batch": _batch_bytes(program),
        "weights in compute type": _weights(program, _itemsize(program)),
        "saved activations": _saved(program),
    }
    return max(({**held, **_loss(program)}, {**held, **_backward(program)}), key=lambda terms: sum(terms.values()))


def _shard_bytes(leaf: Any) -> int:
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _batch_bytes(program: Program) -> int:
    batch = abstract_batch(program.config.model, program.config.data.batch_size)
    placed = program.layout.batch(batch)
    return sum(math.prod(placed[n].shard_shape(x.shape)) * x.dtype.itemsize for n, x in batch.items())


def _weights(program: Program, itemsize: int) -> int:
    """Every block parameter times its multiplier, once, where it lies."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * itemsize
        for name, leaf in program.abstract.params.items()
        if program.definition.specs[name].in_block and leaf.ndim > 2
    )


def _positions(program: Program) -> int:
    """Positions of one microbatch on one device."""
    config, layout = program.config, program.layout
    rows = config.data.batch_size // config.accumulation_steps // layout.ways("batch")
    return rows * program.definition.sizes["position"] // layout.ways("sequence")


def _itemsize(program: Program) -> int:
    return jnp.dtype(program.config.model.compute.dtype).itemsize


def _per_position(program: Program) -> dict[str, float]:
    """Numbers that one block makes per position on one device, by what they are."""
    sizes, specs = program.definition.sizes, program.definition.specs.values()

    def numbers(axes: Iterable[str]) -> float:
        return math.prod(sizes[axis] / (program.layout.ways(axis) if axis in _SPLIT else 1) for axis in axes)

    def outputs(*roles: Role) -> float:
        return sum(numbers(spec.fan_out) for spec in specs if spec.role in roles)

    def inputs(role: Role) -> float:
        return sum(numbers(spec.fan_in) for spec in specs if spec.role is role)

    return {
        "stream": sizes["embed"],
        "norms": 2 * sizes["embed"],
        "qkv": outputs(Role.QUERY, Role.KEY, Role.VALUE),
        "attended": inputs(Role.ATTENTION_OUT),
        "middle": sizes["embed"],
        "hidden": outputs(Role.MLP_IN),
        "activated": inputs(Role.MLP_OUT),
    }


def _saved(program: Program) -> int:
    """What the forward pass keeps for the backward pass, of all layers."""
    model, each = program.config.model, _per_position(program)
    stored = {
        "none": sum(each.values()),
        # Products alone: not their activations, nor norms.
        "dots": each["stream"] + each["qkv"] + 2 * each["attended"] + each["middle"] + each["hidden"],
        "block": each["stream"],
        "offload": 0.0,
    }
    return int(
        program.definition.sizes["layers"] * _positions(program) * stored[model.compute.remat] * _itemsize(program)
    )


def _loss(program: Program) -> Terms:
    """While logits exist: those of a chunk and their gradient, the readout gathered, and its gradient as it is summed."""
    columns = _outputs(program)
    positions = _positions(program)
    model, itemsize = program.config.model, _itemsize(program)
    width = program.definition.sizes["embed"]
    rows = positions * model.units // model.sizes()["position"]
    chunks = math.ceil(rows / max(CHUNK_LOGITS[program.layout.platform] // columns, LEAST_ROWS))
    if model.compute.cross_entropy == "plain":
        chunks = 1
    return {
        "logits": math.ceil(rows / chunks) * columns * (4 + itemsize),
        "gradient of the features": positions * width * itemsize,
        "readout, whole": width * columns * itemsize,
        "readout's gradient, whole": width * columns * 4,
    }


def _outputs(program: Program) -> int:
    """Vocabulary or classes on one device."""
    model, layout = program.config.model, program.layout
    axis = model.output_axis
    outputs = model.sizes()[axis]
    return outputs // layout.ways(axis) if outputs % layout.ways(axis) == 0 else outputs


def _backward(program: Program) -> Terms:
    """While the backward pass is in a layer's MLP, with the gradients of the layers behind it."""
    specs = program.definition.specs
    each = _per_position(program)
    # The hidden layer's gradient lies beside it, as does the stream's.
    layer = sum(each.values()) + each["activated"] + each["stream"] - each["norms"] / 2
    block = {name: leaf for name, leaf in program.abstract.params.items() if specs[name].in_block}
    whole = sum(leaf.size // leaf.shape[0] for leaf in block.values() if leaf.ndim > 2)
    return {
        "gradients": sum(map(_shard_bytes, block.values())),
        "readout's gradient, whole": program.definition.sizes["embed"] * _outputs(program) * 4,
        "one layer": int(layer * _positions(program) * _itemsize(program)),
        "one layer's weights, whole": whole * _itemsize(program) // program.layout.ways("mlp"),
    }


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
