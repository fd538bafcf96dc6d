"""What a step's peak memory must be, from sizes alone: state, saved activations, logits and what one layer needs.

Compared with what the compiler allocates (`train/compiled.py`), so that neither is believed alone. Bytes on one device.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from train.program import Program, abstract_batch
from zoo.configs import DecoderConfig, ModelConfig

Terms = dict[str, int]


def expected(program: Program) -> Terms:
    """Bytes by what they hold at the fuller of two moments: the loss, and the backward pass of one layer.

    Returns:
        term to bytes; their sum is the expected peak.
    """
    held = {
        "state": sum(map(_shard_bytes, jax.tree.leaves(program.abstract))),
        "batch": _batch_bytes(program),
        "weights in compute type": _weights(program, jnp.dtype(program.config.model.compute.dtype).itemsize),
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
    return rows * config.model.seq_len // layout.ways("sequence")


def _per_position(program: Program) -> dict[str, float]:
    """Numbers that one block makes per position on one device, by what they are."""
    model, layout = program.config.model, program.layout
    heads = model.num_heads * model.heads_dim / layout.ways("heads")
    keys = model.kv_heads * model.heads_dim / layout.ways("kv_heads")
    hidden = model.mlp_dim / layout.ways("mlp")
    return {
        "stream": model.width,
        "norms": 2 * model.width,
        "qkv": heads + 2 * keys,
        "attended": heads,
        "middle": model.width,
        "hidden": (3 if model.gated else 2) * hidden,
    }


def _saved(program: Program) -> int:
    """What the forward pass keeps for the backward pass, of all layers."""
    model, made = program.config.model, _per_position(program)
    kept = {"none": sum(made.values()), "block": made["stream"], "offload": made["stream"]}
    kept["dots"] = made["stream"] + made["qkv"] + made["attended"] + made["hidden"] + made["middle"]
    itemsize = jnp.dtype(model.compute.dtype).itemsize
    return int(model.depth * _positions(program) * kept[model.compute.remat] * itemsize)


def _loss(program: Program) -> Terms:
    model = program.config.model
    outputs = model.vocab_size if isinstance(model, DecoderConfig) else model.num_classes
    axis = "vocab" if isinstance(model, DecoderConfig) else "classes"
    columns = outputs / (program.layout.ways(axis) if outputs % program.layout.ways(axis) == 0 else 1)
    rows = _positions(program) if isinstance(model, DecoderConfig) else _positions(program) / model.seq_len
    return {
        "logits": int(rows * columns * 4),
        "readout, whole": int(model.width * columns * jnp.dtype(model.compute.dtype).itemsize),
        "readout's gradient, whole": int(model.width * columns * 4),
    }


def _backward(program: Program) -> Terms:
    model = program.config.model
    itemsize = jnp.dtype(model.compute.dtype).itemsize
    gradients = sum(
        _shard_bytes(leaf) for name, leaf in program.abstract.params.items() if program.definition.specs[name].in_block
    )
    layer = sum(_per_position(program).values()) * _positions(program) * itemsize
    return {
        "gradients": gradients,
        "one layer": int(layer),
        "one layer's weights, whole": _layer_weights(model, program),
    }


def _layer_weights(model: ModelConfig, program: Program) -> int:
    itemsize = jnp.dtype(model.compute.dtype).itemsize
    whole = sum(
        leaf.size // leaf.shape[0]
        for name, leaf in program.abstract.params.items()
        if program.definition.specs[name].in_block and leaf.ndim > 2
    )
    return whole * itemsize // program.layout.ways("mlp")
