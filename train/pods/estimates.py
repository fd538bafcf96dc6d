"""What a step's peak memory must be, from sizes alone, and the FLOPs of its matrix products, from its trace.

Compared with what the compiler allocates (`train/pods/compiled.py`), so that neither is believed alone. Bytes on one device.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mupax.presets import Role
from mupax.train.config.run import Config
from mupax.train.core.loss import CHUNK_LOGITS, LEAST_ROWS
from mupax.train.core.program import Program
from mupax.train.core.vocabulary import parts
from mupax.train.pods.topology import Chip
from mupax.zoo import flops, partition
from mupax.zoo.families import AttentionName
from mupax.zoo.layers.flash import FUSED, block_of
from mupax.zoo.layers.kernels import chosen
from mupax.zoo.partition import LANES

_SPLIT = ("heads", "kv_heads", "mlp")
"""Axes of activations that a device may have a part of."""

FORWARD_AGAIN = {"none": 0.0, "dots": 0.0, "block": 1.0, "offload": 1.0}
"""Forward passes of the blocks that a remat policy computes again."""


def model_flops(config: Config) -> float:
    """FLOPs that the model needs for a step, counted from its sizes (see `mupax.zoo.flops`): what utilization is of."""
    return flops.train_flops(config.model) * config.data.batch_size * config.model.units


def expected(program: Program) -> dict[str, int]:
    """Bytes by what they hold at the fuller of two moments, the loss and the backward pass of one layer: in sum the peak."""
    config, layout, sizes = program.config, program.layout, program.definition.sizes
    itemsize, each = jnp.dtype(config.model.compute.dtype).itemsize, _per_position(program)
    rows = config.data.batch_size // config.accumulation_steps // layout.ways("batch")
    positions = rows * sizes["position"] // layout.ways("sequence")  # of one microbatch on one device
    outputs, ways = sizes[config.model.output_axis], layout.ways(config.model.output_axis)
    columns = outputs // ways if outputs % ways == 0 else outputs
    params, specs, batch = program.abstract.params, program.definition.specs, program.train_feed().abstract
    block = {name: leaf for name, leaf in params.items() if specs[name].in_block}
    stacks = [leaf for leaf in block.values() if leaf.ndim > 2]
    saved = {
        "none": sum(each.values()),
        # Products alone: not their activations, nor norms.
        "dots": each["stream"] + each["qkv"] + 2 * each["attended"] + each["middle"] + each["hidden"],
        "block": each["stream"],
        "offload": 0.0,
    }
    held = {
        "state": sum(_bytes(leaf, leaf.sharding) for leaf in jax.tree.leaves(program.abstract)),
        "batch": sum(_bytes(batch[name], sharding) for name, sharding in layout.batch(batch).items()),
        # Every block parameter times its multiplier, once, where it lies.
        "weights in compute type": sum(_bytes(leaf, leaf.sharding, itemsize) for leaf in stacks),
        "saved activations": int(sizes["layers"] * positions * saved[config.model.compute.remat] * itemsize),
    }
    # While logits exist: those of a chunk and their gradient, the readout gathered, and its gradient as it is summed.
    targets, chunks = positions * config.model.units // sizes["position"], loss_chunks(program)
    loss = {
        "logits": math.ceil(targets / chunks) * columns * (4 + itemsize),
        "gradient of the features": positions * sizes["embed"] * itemsize,
        "readout, whole": sizes["embed"] * columns * itemsize,
        "readout's gradient, whole": sizes["embed"] * columns * 4,
    }
    how = config.model.compute.cross_entropy
    if by_vocab := how == "vocab" or (how == "auto" and chunks > 1 and layout.platform == "tpu"):
        part = parts(targets, columns)[0].stop
        loss = {
            "logits of a part": targets * part * 4,
            "exponentials": targets * columns * itemsize,
            "gradient of the features": positions * sizes["embed"] * 4,
            "readout, a part and its gradient": sizes["embed"] * part * (4 + itemsize),
        }
    # While the backward pass is in a layer's MLP, with the gradients of the layers behind it: the hidden layer's gradient
    # lies beside it, as does the stream's.
    layer = sum(each.values()) + each["activated"] + each["stream"] - each["norms"] / 2
    backward = {
        "gradients": sum(_bytes(leaf, leaf.sharding) for leaf in block.values()),
        "readout's gradient, whole": 0 if by_vocab else loss["readout's gradient, whole"],
        "one layer": int(layer * positions * itemsize),
        "one layer's weights, whole": sum(leaf.size // leaf.shape[0] for leaf in stacks)
        * itemsize
        // layout.ways("mlp"),
    }
    return max({**held, **loss}, {**held, **backward}, key=lambda terms: sum(terms.values()))


def loss_chunks(program: Program) -> int:
    """Parts that the tokens of a microbatch on one device are taken in by its cross-entropy."""
    config, layout, sizes = program.config, program.layout, program.definition.sizes
    if config.model.compute.cross_entropy in ("plain", "vocab"):
        return 1
    rows = config.data.batch_size // config.accumulation_steps // layout.ways("batch")
    targets = rows * config.model.units // layout.ways("sequence")
    outputs, ways = sizes[config.model.output_axis], layout.ways(config.model.output_axis)
    columns = outputs // ways if outputs % ways == 0 else outputs
    return math.ceil(targets / max(CHUNK_LOGITS[layout.platform] // columns, LEAST_ROWS))


def _bytes(leaf: Any, sharding: Any, itemsize: int | None = None) -> int:
    """Bytes of an array's part on one device, in another type where `itemsize` says so, with padding in the smallest layout."""
    shape = sharding.shard_shape(leaf.shape)
    numbers = padded(shape) if sharding.mesh.devices.flat[0].platform == "tpu" else math.prod(shape)
    return numbers * (itemsize or leaf.dtype.itemsize)


def padded(shape: Sequence[int]) -> int:
    """Numbers that an array takes in a TPU's memory: in tiles of 8 x 128 over the two dimensions that are filled up least.

    Args:
        shape: of the part on one device.
    """
    if len(shape) < 2:
        return math.prod(shape)

    def with_tiles(outer: int, inner: int) -> int:
        tile = math.ceil(shape[outer] / 8) * 8 * math.ceil(shape[inner] / LANES) * LANES
        return math.prod(shape) // (shape[outer] * shape[inner]) * tile

    return min(itertools.starmap(with_tiles, itertools.permutations(range(len(shape)), 2)))


def _per_position(program: Program) -> dict[str, float]:
    """Numbers that one block makes per position on one device, by what they are."""
    sizes, specs, ways = program.definition.sizes, program.definition.specs.values(), program.layout.ways

    def per_device(axes: Iterable[str]) -> float:
        return math.prod(sizes[axis] / (ways(axis) if axis in _SPLIT else 1) for axis in axes)

    fan_in, fan_out = defaultdict(float), defaultdict(float)
    for spec in specs:
        fan_in[spec.role] += per_device(spec.fan_in)
        fan_out[spec.role] += per_device(spec.fan_out)
    return {
        "stream": sizes["embed"],
        "norms": 2 * sizes["embed"],
        "qkv": fan_out[Role.QUERY] + fan_out[Role.KEY] + fan_out[Role.VALUE],
        "attended": fan_in[Role.ATTENTION_OUT],
        "middle": sizes["embed"],
        "hidden": fan_out[Role.MLP_IN],
        "activated": fan_in[Role.MLP_OUT],
    }


def attention_waste(program: Program, chip: Chip) -> float:
    """FLOPs of one device for which a splash kernel computes what its mask hides, computes again, or waits for keys and values.

    Args:
        program: whose attention it is.
        chip: what it would run on.
    """
    model, sizes, mesh = program.config.model, defaultdict(int, program.definition.sizes), program.mesh.shape
    length, again = sizes["position"], FORWARD_AGAIN[model.compute.remat]
    block = block_of(length, chip.device_kind, model.compute.attention_block, causal=model.causal)
    share, counted = attention_share(program, block), 0.5 if model.causal else 1.0
    rows = program.config.data.batch_size / (mesh["data"] * mesh["fsdp"]) / mesh["sequence"] / mesh["tensor"]
    forward = 4.0 * length**2 * sizes["heads"] * sizes["head_dim"] * sizes["layers"] * rows
    backward = 2.5 if block >= FUSED else 3.5
    waits = max(1.0, chip.peak_flops / chip.hbm_bandwidth / block)
    return forward * ((1 + again + backward) * share * waits - (3 + again) * counted)


def attention_share(program: Program, block: int, *, of_grid: bool = False) -> float:
    """Share of the pairs of positions that the slowest device computes of its own, in (0, 1].

    Args:
        program: whose attention it is.
        block: positions on a side of the kernel's blocks.
        of_grid: of a kernel's grid as traced; a ring has none for pairs of parts that its mask hides.
    """
    length, ways = program.definition.sizes["position"], program.layout.ways("sequence")
    if not program.config.model.causal:
        return 1.0
    if ways > 1 and attention_of(program) == "ring":
        # Its own two parts with the mask, and half as many pairs of each other device.
        return (2 * causal_share(length // ways, block) + ways - 1) / ((ways + 1) if of_grid else 2 * ways)
    return 1 - (1 - causal_share(length // ways, block)) / ways


def attention_of(program: Program) -> AttentionName:
    """The attention that a program takes."""
    sizes, compute = defaultdict(int, program.definition.sizes), program.config.model.compute
    q_BTHN, k_BSKN = (
        jax.ShapeDtypeStruct((1, sizes["position"], sizes[heads], sizes["head_dim"]), jnp.dtype(compute.dtype))
        for heads in ("heads", "kv_heads")
    )
    with partition.using(program.layout):
        return chosen(compute.attention, q_BTHN, k_BSKN, program.config.model.causal)


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
    """Share of the blocks of a causal mask that have anything to compute, in (1/2, 1].

    Args:
        length: positions.
        block: positions on a side of the kernel's blocks; 1 block where there are fewer.
    """
    blocks = max(1, length // block)
    return (1 + 1 / blocks) / 2


def _flops(equation: Any, visited: float) -> float:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        shape = equation.invars[0].aval.shape
        return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(shape[i] for i in contracted)
    if name == "pallas_call":
        if (estimate := params.get("cost_estimate")) is not None:
            return float(estimate.flops)
        return visited * math.prod(params["grid_mapping"].grid) * matmul_flops(params["jaxpr"], visited)
    jaxprs = [leaf for leaf in jax.tree.leaves(params) if hasattr(getattr(leaf, "jaxpr", leaf), "eqns")]
    inner = sum(matmul_flops(jaxpr, visited) for jaxpr in jaxprs)
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
            return inner * params["mesh"].size
        case _:
            return inner
