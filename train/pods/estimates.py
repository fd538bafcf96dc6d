"""What a step's peak memory must be, from sizes alone: state, saved activations, logits and what one layer needs.

Compared with what the compiler allocates (`train/pods/compiled.py`), so that neither is believed alone. Bytes on one device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from mupax.presets import Role
from mupax.train.core.loss import CHUNK_LOGITS, LEAST_ROWS
from mupax.train.core.program import Program, abstract_batch

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
    model, made = program.config.model, _per_position(program)
    kept = {
        "none": sum(made.values()),
        # Products alone: not their activations, nor norms.
        "dots": made["stream"] + made["qkv"] + 2 * made["attended"] + made["middle"] + made["hidden"],
        "block": made["stream"],
        "offload": 0.0,
    }
    return int(
        program.definition.sizes["layers"] * _positions(program) * kept[model.compute.remat] * _itemsize(program)
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
    made = _per_position(program)
    # The hidden layer's gradient lies beside it, as does the stream's.
    layer = sum(made.values()) + made["activated"] + made["stream"] - made["norms"] / 2
    block = {name: leaf for name, leaf in program.abstract.params.items() if specs[name].in_block}
    whole = sum(leaf.size // leaf.shape[0] for leaf in block.values() if leaf.ndim > 2)
    return {
        "gradients": sum(map(_shard_bytes, block.values())),
        "readout's gradient, whole": program.definition.sizes["embed"] * _outputs(program) * 4,
        "one layer": int(layer * _positions(program) * _itemsize(program)),
        "one layer's weights, whole": whole * _itemsize(program) // program.layout.ways("mlp"),
    }
