"""Memory of a training step from sizes alone: activations, the backward pass of a layer, the loss.

The loss is chosen by the memory that it may take (`loss`), and the checks of a run
(`mupax.train.core.costs.fit`) and of a pod (`mupax.train.pods.estimates`) add the terms up.
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
"""Axes of activations that may be split over devices."""

FORWARD_AGAIN: dict[Remat, float] = {
    "none": 0.0,
    "dots": 0.0,
    "attention": 1.0,
    "block": 1.0,
    "offload": 1.0,
}
"""Forward passes of the blocks' matrix products that a remat policy recomputes."""

KERNEL_AGAIN: dict[Remat, float] = {**FORWARD_AGAIN, "attention": 0.0}
"""Forward passes of the attention kernel that a remat policy recomputes."""

ONCE = ("splash", "ring", "cudnn")
"""Attention kernels whose outputs and softmax sums the policies of `zoo.layers.stack.REMAT` save.

Under such a policy the kernel's forward pass runs only once.
"""


def loss(config: Config, definition: Definition, layout: Layout) -> core_loss.LossImplementation:
    """Return the loss implementation of a run, with estimates of its memory and time.

    For `auto` it is the first of `loss.options`.
    """
    kind = config.model.compute.cross_entropy
    readout = work(config, definition, layout)
    if kind == "auto":
        return core_loss.options(readout)[0]
    return core_loss.way(readout, kind)


def work(config: Config, definition: Definition, layout: Layout) -> core_loss.ReadoutShape:
    """Return the sizes of the readout and targets of one microbatch on one device."""
    num_outputs = definition.sizes[config.model.output_axis]
    num_shards = layout.num_shards(config.model.output_axis)
    # Outputs that do not divide over the devices are replicated.
    columns = num_outputs // num_shards if num_outputs % num_shards == 0 else num_outputs
    targets = _rows(config, layout) * config.model.units
    return core_loss.ReadoutShape(
        rows=targets // layout.num_shards("sequence"),
        columns=columns,
        width=definition.sizes["embed"],
        itemsize=jnp.dtype(config.model.compute.dtype).itemsize,
        platform=layout.platform,
        device_kind=layout.device_kind,
        room=room(config, definition, layout),
    )


def room(config: Config, definition: Definition, layout: Layout) -> int | None:
    """Return the bytes that a loss may take without raising the step's peak.

    The backward pass of a layer, which comes after the loss, takes as many. `None` on other
    platforms than TPU, and for a model that is no transformer.
    """
    is_transformer = {"embed", "position"} <= definition.sizes.keys()
    if layout.platform != "tpu" or not is_transformer:
        return None
    return sum(layer(config, definition, layout).values())


def layer(config: Config, definition: Definition, layout: Layout) -> dict[str, int]:
    """Estimate the memory of one device while the backward pass is in the MLP of the largest layer.

    Returns:
        Bytes of each of three kinds of arrays: "gradients", those of the parameters of all blocks,
        which are all in memory at that time; "one layer", the layer's activations; and "one layer's
        weights, whole", its matrices in the dtype of the computation, gathered from the devices
        that store parts of them. The last two are the largest of any stack.
    """
    itemsize = jnp.dtype(config.model.compute.dtype).itemsize
    gradients = 0
    matrix_sizes: dict[str, int] = defaultdict(int)  # size of the matrices of one block, by stack
    for name, spec in definition.specs.items():
        if not spec.in_block:
            continue
        leaf = definition.abstract[name]
        gradients += bytes_of(leaf, layout.sharding(spec.axes, leaf.shape))
        # Experts are never gathered: a device only has its own.
        num_shards = layout.num_shards("experts") if "experts" in spec.copies else 1
        is_matrix = leaf.ndim > 2
        size = leaf.size // leaf.shape[0] // num_shards if is_matrix else 0
        matrix_sizes[spec.blocks] += size

    largest = max(matrix_sizes.values(), default=0)
    _, one_layer = activations(config, definition, layout)
    return {
        "gradients": gradients,
        "one layer": one_layer,
        "one layer's weights, whole": largest * itemsize // layout.num_shards("mlp"),
    }


def _rows(config: Config, layout: Layout) -> int:
    """Return the number of examples of one microbatch on one device."""
    return config.data.batch_size // config.accumulation_steps // layout.num_shards("batch")


def bytes_of(leaf: Any, sharding: Any, itemsize: int | None = None) -> int:
    """Return the bytes of an array's shard on one device.

    On TPU they include padding, in the layout with the least (`padded`).

    Args:
        leaf: Array or its shape and dtype, not split.
        itemsize: Bytes of one number. The default is that of the array's dtype.
    """
    shape = sharding.shard_shape(leaf.shape)
    on_tpu = sharding.mesh.devices.flat[0].platform == "tpu"
    count = padded(shape) if on_tpu else math.prod(shape)
    return count * (itemsize or leaf.dtype.itemsize)


def padded(shape: Sequence[int]) -> int:
    """Return the count of numbers, padding included, that an array takes in a TPU's memory.

    Two dimensions are padded to multiples of 8 and 128, in the layout with the least padding. An
    array of fewer than two dimensions is not padded. `shape` is one device's shard.
    """
    count = math.prod(shape)
    if len(shape) < 2:
        return count

    sizes = []
    for outer, inner in itertools.permutations(shape, 2):
        tiled_outer = math.ceil(outer / 8) * 8
        tiled_inner = math.ceil(inner / LANES) * LANES
        sizes.append(count // (outer * inner) * (tiled_outer * tiled_inner))
    return min(sizes)


def activations(config: Config, definition: Definition, layout: Layout) -> tuple[int, int]:
    """Return the bytes of a microbatch's activations on one device.

    Returns:
        Bytes that all blocks save for the backward pass, and bytes that the backward pass of the
        largest layer has.
    """
    remat = config.model.compute.remat
    saved = []
    layers = []
    for blocks in families.stacks(config.model):
        saved_by_remat, one_layer = _stack_numbers(config, definition, layout, blocks)
        saved.append(saved_by_remat[remat])
        layers.append(one_layer)
    itemsize = jnp.dtype(config.model.compute.dtype).itemsize
    return int(sum(saved) * itemsize), int(max(layers) * itemsize)


def attention_of(config: Config, definition: Definition, layout: Layout) -> AttentionName:
    """Return the name of the attention kernel that the layers of a run's model use.

    For a transformer, the kernel is that of layers with the mask, window and softcap `model.sight`.
    """
    model = config.model
    sizes = defaultdict(int, definition.sizes)
    length = sizes["position"]
    head_dim = sizes["head_dim"]
    dtype = jnp.dtype(model.compute.dtype)
    q_BTHN = jax.ShapeDtypeStruct((1, length, sizes["heads"], head_dim), dtype)
    k_BSKN = jax.ShapeDtypeStruct((1, length, sizes["kv_heads"], head_dim), dtype)
    spec = model.sight if isinstance(model, TransformerConfig) else AttentionSpec(model.causal)
    return chosen(
        model.compute.attention,
        q_BTHN,
        k_BSKN,
        *spec,
        apart=config.data.document_mask,
        layout=layout,
    )


def _stack_numbers(
    config: Config, definition: Definition, layout: Layout, blocks: families.Blocks
) -> tuple[dict[str, float], float]:
    """Count the numbers (not bytes) of a stack's activations on one device.

    Returns:
        Numbers that all blocks save, by remat policy, and numbers that the backward pass of one
        layer has.
    """
    sizes = definition.sizes
    num_branches = len(blocks.stack.branches)
    length = _rows(config, layout) * blocks.length // layout.num_shards("sequence")
    memory = _rows(config, layout) * blocks.memory // layout.num_shards("sequence")

    def per_device(axes: Iterable[str]) -> float:
        """Return the size of one position's activations along `axes` on one device."""
        return math.prod(
            sizes[axis] / (layout.num_shards(axis) if axis in _SPLIT else 1) for axis in axes
        )

    fan_in = defaultdict(float)
    fan_out = defaultdict(float)
    for spec in blocks.specs:
        fan_in[spec.role] += length * per_device(spec.fan_in)
        outputs = memory if "memory" in spec.fan_in else length
        fan_out[spec.role] += outputs * per_device(spec.fan_out)

    stream = length * sizes["embed"]
    attended = fan_in[Role.ATTENTION_OUT]
    activated = fan_in[Role.MLP_OUT]
    products = sum(fan_out[role] for role in (Role.QUERY, Role.KEY, Role.VALUE, Role.MLP_IN))
    active = sizes.get("active", 0)  # experts that get a copy of each token
    activated += active * fan_in[Role.EXPERT_OUT]
    products += active * (fan_out[Role.EXPERT_IN] + 2 * stream * (active > 0))
    # Also saved are the residual stream before every branch and the output of attention.
    products += num_branches * stream + attended
    # The second stream per branch is the norm's output.
    everything = products + num_branches * stream + activated
    saved = {
        "none": everything,
        # Only products are saved: neither their activations nor norms.
        "dots": products + attended,
        "attention": stream,
        "block": stream,
        "offload": 0.0,
    }
    # The backward pass also holds the gradient of the hidden layer.
    backward = everything + activated

    itemsize = jnp.dtype(config.model.compute.dtype).itemsize
    num_head_shards = layout.num_shards("heads")
    if blocks.stack == OWN and config.model.compute.remat == "attention":
        # `norms` are softmax statistics in float32, one per query and head.
        norms = length * sizes["heads"] / num_head_shards * 4 / itemsize
        if tiled(config.model.causal, blocks.length, layout=layout):
            saved["attention"] += attended * 4 / itemsize + 2 * norms
        elif attention_of(config, definition, layout) in ONCE:
            saved["attention"] += attended + norms
    if blocks.stack != OWN:
        # In an encoder-decoder, attention with a mask or a bias is XLA's. Its weights and their
        # gradient are float32 matrices.
        longest = max(blocks.length, blocks.memory)
        weights = sizes["heads"] / num_head_shards * length * longest
        backward += 2 * weights * 4 / itemsize
    return {remat: blocks.depth * count for remat, count in saved.items()}, backward
