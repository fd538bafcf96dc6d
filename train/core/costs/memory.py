"""What a layer's backward pass takes of a device beside what stands all the time, from sizes alone, and so what a loss may take."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mupax.presets import Role
from mupax.presets.roles import OWN
from mupax.train.config.run import Config
from mupax.train.core import loss as core_loss
from mupax.zoo import families
from mupax.zoo.definition import Definition
from mupax.zoo.families import AttentionName, Remat
from mupax.zoo.layers.kernels import chosen, tiled
from mupax.zoo.partition import LANES, Layout
from mupax.zoo.transformer import AttentionSpec, TransformerConfig

_SPLIT = ("heads", "kv_heads", "mlp", "expert_dim")
"""Axes of activations that a device may have a part of."""

FORWARD_AGAIN: dict[Remat, float] = {
    "none": 0.0,
    "dots": 0.0,
    "attention": 1.0,
    "block": 1.0,
    "offload": 1.0,
}
"""Forward passes of the blocks' products that a remat policy computes again."""

KERNEL_AGAIN: dict[Remat, float] = {**FORWARD_AGAIN, "attention": 0.0}
"""Those of attention's kernel."""

ONCE = ("splash", "ring", "cudnn")
"""Attention by a kernel whose outputs and softmax's norm a remat policy can keep (`zoo.layers.stack.REMAT`)."""


def loss(config: Config, definition: Definition, layout: Layout) -> core_loss.LossImplementation:
    """Return how a run computes its loss, with its memory and time.

    Args:
        config: of the run.
        definition: its model.
        layout: how arrays lie on the mesh.
    """
    how, readout = config.model.compute.cross_entropy, work(config, definition, layout)
    return core_loss.options(readout)[0] if how == "auto" else core_loss.way(readout, how)


def work(config: Config, definition: Definition, layout: Layout) -> core_loss.ReadoutShape:
    """The readout of one microbatch on one device.

    Args:
        config, definition, layout: as `loss`.
    """
    outputs, ways = (
        definition.sizes[config.model.output_axis],
        layout.num_shards(config.model.output_axis),
    )
    return core_loss.ReadoutShape(
        rows=_rows(config, layout) * config.model.units // layout.num_shards("sequence"),
        columns=outputs // ways if outputs % ways == 0 else outputs,
        width=definition.sizes["embed"],
        itemsize=jnp.dtype(config.model.compute.dtype).itemsize,
        platform=layout.platform,
        device_kind=layout.device_kind,
        room=room(config, definition, layout),
    )


def room(config: Config, definition: Definition, layout: Layout) -> int | None:
    """Bytes that a loss may take while the step's peak stays as it is: what the backward pass of a layer takes after it.

    None off TPU, and of a model that is no transformer.

    Args:
        config, definition, layout: as `loss`.
    """
    transformer = {"embed", "position"} <= definition.sizes.keys()
    return (
        sum(layer(config, definition, layout).values())
        if layout.platform == "tpu" and transformer
        else None
    )


def layer(config: Config, definition: Definition, layout: Layout) -> dict[str, int]:
    """Bytes while the backward pass is in a layer's MLP, with the gradients of the layers behind it, by what they hold.

    Args:
        config, definition, layout: as `loss`.
    """
    itemsize = jnp.dtype(config.model.compute.dtype).itemsize
    block = {
        name: definition.abstract[name] for name, spec in definition.specs.items() if spec.in_block
    }
    gradients = (
        bytes_of(leaf, layout.sharding(definition.specs[name].axes, leaf.shape))
        for name, leaf in block.items()
    )
    matrices: dict[str, int] = defaultdict(int)  # of one block, by the stack
    for name, leaf in block.items():
        spec = definition.specs[name]
        # A device never has the experts of others.
        devices = layout.num_shards("experts") if "experts" in spec.copies else 1
        matrices[spec.blocks] += leaf.size // leaf.shape[0] // devices if leaf.ndim > 2 else 0
    return {
        "gradients": sum(gradients),
        "one layer": activations(config, definition, layout)[1],
        "one layer's weights, whole": max(matrices.values(), default=0)
        * itemsize
        // layout.num_shards("mlp"),
    }


def _rows(config: Config, layout: Layout) -> int:
    """Examples of one microbatch on one device."""
    return config.data.batch_size // config.accumulation_steps // layout.num_shards("batch")


def bytes_of(leaf: Any, sharding: Any, itemsize: int | None = None) -> int:
    """Bytes of an array's part on one device, with padding in the smallest layout.

    Args:
        leaf: the whole array, or its shape.
        sharding: how it lies.
        itemsize: bytes of a number, where it is stored in another type.
    """
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


def activations(config: Config, definition: Definition, layout: Layout) -> tuple[int, int]:
    """Bytes of a microbatch on one device: what all blocks save for their backward pass, and what this then has of the largest.

    Args:
        config, definition, layout: as `loss`.
    """
    compute, stacks = config.model.compute, families.stacks(config.model)
    saved, layers = zip(
        *(_numbers(config, definition, layout, blocks) for blocks in stacks), strict=True
    )
    itemsize = jnp.dtype(compute.dtype).itemsize
    return int(sum(each[compute.remat] for each in saved) * itemsize), int(max(layers) * itemsize)


def attention_of(config: Config, definition: Definition, layout: Layout) -> AttentionName:
    """The attention that a run takes where nothing is hidden but what is behind.

    Args:
        config, definition, layout: as `loss`.
    """
    sizes, model = defaultdict(int, definition.sizes), config.model
    q_BTHN, k_BSKN = (
        jax.ShapeDtypeStruct(
            (1, sizes["position"], sizes[heads], sizes["head_dim"]), jnp.dtype(model.compute.dtype)
        )
        for heads in ("heads", "kv_heads")
    )
    sight = model.sight if isinstance(model, TransformerConfig) else AttentionSpec(model.causal)
    apart = config.data.document_mask
    return chosen(model.compute.attention, q_BTHN, k_BSKN, *sight, apart=apart, layout=layout)


def _numbers(
    config: Config, definition: Definition, layout: Layout, blocks: families.Blocks
) -> tuple[dict[str, float], float]:
    """What a stack saves by remat policy, and what the backward pass has of one of its layers."""
    sizes, branches = definition.sizes, len(blocks.stack.branches)
    length, memory = (
        _rows(config, layout) * n // layout.num_shards("sequence")
        for n in (blocks.length, blocks.memory)
    )

    def per_device(axes: Iterable[str]) -> float:
        return math.prod(
            sizes[axis] / (layout.num_shards(axis) if axis in _SPLIT else 1) for axis in axes
        )

    fan_in, fan_out = defaultdict(float), defaultdict(float)
    for spec in blocks.specs:
        fan_in[spec.role] += length * per_device(spec.fan_in)
        fan_out[spec.role] += (memory if "memory" in spec.fan_in else length) * per_device(
            spec.fan_out
        )
    stream, attended, activated = (
        length * sizes["embed"],
        fan_in[Role.ATTENTION_OUT],
        fan_in[Role.MLP_OUT],
    )
    products = sum(fan_out[role] for role in (Role.QUERY, Role.KEY, Role.VALUE, Role.MLP_IN))
    active = sizes.get("active", 0)  # copies of every token
    activated += active * fan_in[Role.EXPERT_OUT]
    products += active * (fan_out[Role.EXPERT_IN] + 2 * stream * (active > 0))
    products += branches * stream + attended  # the stream before every branch
    whole = products + branches * stream + activated  # norms
    # dots keeps products alone: not their activations, nor norms.
    saved = {
        "none": whole,
        "dots": products + attended,
        "attention": stream,
        "block": stream,
        "offload": 0.0,
    }
    backward = whole + activated  # the hidden layer's gradient beside it
    itemsize = jnp.dtype(config.model.compute.dtype).itemsize
    if blocks.stack == OWN and config.model.compute.remat == "attention":
        norms = (
            length * sizes["heads"] / layout.num_shards("heads") * 4 / itemsize
        )  # of the softmax, in float32
        if tiled(config.model.causal, blocks.length, layout=layout):
            saved["attention"] += attended * 4 / itemsize + 2 * norms
        elif attention_of(config, definition, layout) in ONCE:
            saved["attention"] += attended + norms
    if (
        blocks.stack != OWN
    ):  # with a mask attention is XLA's, whose weights and their gradient are matrices of float32
        weights = (
            sizes["heads"] / layout.num_shards("heads") * length * max(blocks.length, blocks.memory)
        )
        backward += 2 * weights * 4 / itemsize
    return {remat: blocks.depth * numbers for remat, numbers in saved.items()}, backward
