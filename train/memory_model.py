"""What a step's peak memory must be, from sizes alone: state, saved activations, logits and what one layer needs.

Compared with what the compiler allocates (`train/compiled.py`), so that neither is believed alone. Bytes on one device.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from train.loss import CHUNK_LOGITS, LEAST_ROWS
from train.program import Program, abstract_batch
from zoo.configs import DecoderConfig

Terms = dict[str, int]


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
    return rows * config.model.seq_len // layout.ways("sequence")


def _itemsize(program: Program) -> int:
    return jnp.dtype(program.config.model.compute.dtype).itemsize


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
    hidden = made["hidden"] * (2 / 3 if model.gated else 1 / 2)
    kept = {
        "none": sum(made.values()),
        # Products alone: not their activations, nor norms.
        "dots": made["stream"] + made["qkv"] + 2 * made["attended"] + made["middle"] + hidden,
        "block": made["stream"],
        "offload": 0.0,
    }
    return int(model.depth * _positions(program) * kept[model.compute.remat] * _itemsize(program))


def _loss(program: Program) -> Terms:
    """While logits exist: those of a chunk and their gradient, the readout gathered, and its gradient as it is summed."""
    columns = _outputs(program)
    positions = _positions(program)
    model, itemsize = program.config.model, _itemsize(program)
    rows = positions if isinstance(model, DecoderConfig) else positions // model.seq_len
    chunks = math.ceil(rows / max(CHUNK_LOGITS[program.layout.platform] // columns, LEAST_ROWS))
    if model.compute.cross_entropy == "plain":
        chunks = 1
    return {
        "logits": math.ceil(rows / chunks) * columns * (4 + itemsize),
        "gradient of the features": positions * model.width * itemsize,
        "readout, whole": model.width * columns * itemsize,
        "readout's gradient, whole": model.width * columns * 4,
    }


def _outputs(program: Program) -> int:
    """Vocabulary or classes on one device."""
    model, layout = program.config.model, program.layout
    outputs, axis = (model.vocab_size, "vocab") if isinstance(model, DecoderConfig) else (model.num_classes, "classes")
    return outputs // layout.ways(axis) if outputs % layout.ways(axis) == 0 else outputs


def _backward(program: Program) -> Terms:
    """While the backward pass is in a layer's MLP, with the gradients of the layers behind it."""
    model, specs = program.config.model, program.definition.specs
    made = _per_position(program)
    # The hidden layer's gradient lies beside it, as does the stream's.
    layer = sum(made.values()) + made["hidden"] * (1 / 3 if model.gated else 1 / 2) + model.width - made["norms"] / 2
    block = {name: leaf for name, leaf in program.abstract.params.items() if specs[name].in_block}
    whole = sum(leaf.size // leaf.shape[0] for leaf in block.values() if leaf.ndim > 2)
    return {
        "gradients": sum(map(_shard_bytes, block.values())),
        "readout's gradient, whole": model.width * _outputs(program) * 4,
        "one layer": int(layer * _positions(program) * _itemsize(program)),
        "one layer's weights, whole": whole * _itemsize(program) // program.layout.ways("mlp"),
    }
