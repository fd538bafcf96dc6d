"""What a layer's backward pass takes of a device beside what stands all the time, from sizes alone, and so what a loss may take."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp

from mupax.presets import Role
from mupax.train.config.run import Config
from mupax.train.core.costs import losses
from mupax.zoo.definition import Definition
from mupax.zoo.partition import LANES, Layout

_SPLIT = ("heads", "kv_heads", "mlp")
"""Axes of activations that a device may have a part of."""

FORWARD_AGAIN = {"none": 0.0, "dots": 0.0, "block": 1.0, "offload": 1.0}
"""Forward passes of the blocks that a remat policy computes again."""


def loss(config: Config, definition: Definition, layout: Layout) -> losses.Way:
    """How a run computes its loss, and what that takes.

    Args:
        config: of the run.
        definition: its model.
        layout: how arrays lie on the mesh.
    """
    how, readout = config.model.compute.cross_entropy, work(config, definition, layout)
    return losses.options(readout)[0] if how == "auto" else losses.way(readout, how)


def work(config: Config, definition: Definition, layout: Layout) -> losses.Work:
    """The readout of one microbatch on one device.

    Args:
        config, definition, layout: as `loss`.
    """
    outputs, ways = definition.sizes[config.model.output_axis], layout.ways(config.model.output_axis)
    return losses.Work(
        rows=_rows(config, layout) * config.model.units // layout.ways("sequence"),
        columns=outputs // ways if outputs % ways == 0 else outputs,
        width=definition.sizes["embed"],
        itemsize=jnp.dtype(config.model.compute.dtype).itemsize,
        platform=layout.platform,
        kind=layout.kind,
        room=room(config, definition, layout),
    )


def room(config: Config, definition: Definition, layout: Layout) -> int | None:
    """Bytes that a loss may take while the step's peak stays as it is: what the backward pass of a layer takes after it; None if unknown.

    Args:
        config, definition, layout: as `loss`.
    """
    known = layout.platform == "tpu" and {"embed", "position"} <= definition.sizes.keys()
    return sum(layer(config, definition, layout).values()) if known else None


def layer(config: Config, definition: Definition, layout: Layout) -> dict[str, int]:
    """Bytes while the backward pass is in a layer's MLP, with the gradients of the layers behind it, by what they hold.

    Args:
        config, definition, layout: as `loss`.
    """
    each, itemsize = per_position(definition, layout), jnp.dtype(config.model.compute.dtype).itemsize
    block = {name: definition.abstract[name] for name, spec in definition.specs.items() if spec.in_block}
    gradients = (
        bytes_of(leaf, layout.sharding(definition.specs[name].axes, leaf.shape)) for name, leaf in block.items()
    )
    matrices = sum(leaf.size // leaf.shape[0] for leaf in block.values() if leaf.ndim > 2)
    # The hidden layer's gradient lies beside it, as does the stream's.
    numbers = sum(each.values()) + each["activated"] + each["stream"] - each["norms"] / 2
    return {
        "gradients": sum(gradients),
        "one layer": int(numbers * positions(config, definition, layout) * itemsize),
        "one layer's weights, whole": matrices * itemsize // layout.ways("mlp"),
    }


def _rows(config: Config, layout: Layout) -> int:
    """Examples of one microbatch on one device."""
    return config.data.batch_size // config.accumulation_steps // layout.ways("batch")


def positions(config: Config, definition: Definition, layout: Layout) -> int:
    """Those of one microbatch on one device.

    Args:
        config, definition, layout: as `loss`.
    """
    return _rows(config, layout) * definition.sizes["position"] // layout.ways("sequence")


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


def per_position(definition: Definition, layout: Layout) -> dict[str, float]:
    """Numbers that one block makes per position on one device, by what they are.

    Args:
        definition, layout: as `loss`.
    """
    sizes, specs = definition.sizes, definition.specs.values()

    def per_device(axes: Iterable[str]) -> float:
        return math.prod(sizes[axis] / (layout.ways(axis) if axis in _SPLIT else 1) for axis in axes)

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
