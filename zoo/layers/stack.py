"""The residual stack: one block, its parameters stacked over depth, run as a scan or unrolled.

Storage does not depend on how the stack runs, so checkpoints serve both. B batch, T positions, D width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from mupax.zoo.families import ComputeConfig
from mupax.zoo.layers.cpu_attention import SAVED
from mupax.zoo.partition import ONE_DEVICE, Layout

if TYPE_CHECKING:
    from mupax.zoo.experts.routing import Routing
    from mupax.zoo.layers.block import Block

BLOCK_INPUT = "block_input"
UNROLLED_DEPTH = 16
"""Deepest stack that auto unrolls on CPU: compile time grows with every block."""

CUDNN = "dot_product_attention_fwd_wrapper"
"""Name of the primitive of cuDNN's forward kernel in JAX, which names none of its outputs."""

_policies = jax.checkpoint_policies


def _of_cudnn(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name == CUDNN


_attended = _policies.save_from_both_policies(_policies.save_only_these_names(SAVED), _of_cudnn)
REMAT = {
    "none": None,
    "dots": _policies.save_from_both_policies(_policies.dots_with_no_batch_dims_saveable, _attended),
    "attention": _attended,
    "block": _policies.nothing_saveable,
    "offload": _policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[BLOCK_INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}
"""What the backward pass may keep of a block; everything else it recomputes.

none: everything. dots: matrix products, and what a flash kernel's gradient needs: its outputs and the softmax's norm. attention: the
latter and the block's input, so that the kernel runs forward once. block: nothing but its input, which lies in the host's memory with
offload.
"""


def runs_as_scan(compute: ComputeConfig, depth: int, *, layout: Layout = ONE_DEVICE) -> bool:
    """Return whether the stack is a loop.

    auto: not on CPU, where a loop copies every layer's weights and gradients out of and into the stack, a tenth to a
    quarter of a step (`python -m scripts.bench.step.layers`); elsewhere it is one, for the compile time of deep models.

    Args:
        compute: whose `layers` says auto, scan or unrolled.
        depth: blocks in the stack.
        layout: of the devices that the stack is compiled for.
    """
    if compute.layers == "auto":
        return layout.platform != "cpu" or depth > UNROLLED_DEPTH
    return compute.layers == "scan"


def over_layers(
    layer: Callable[[Any, Any, int], tuple[Any, Any]], first: Any, stacked: Any, depth: int, period: int = 1
) -> tuple[Any, Any]:
    """What comes out of the last layer, and what each gives, stacked.

    A loop whose body is `period` layers, each with its own program; layers that are left over follow it.

    Args:
        layer: (what comes in, its part of `stacked`, its place in the period) to what comes out, and what it gives.
        first: what comes into the first layer.
        stacked: arrays with a leading axis of layers.
        depth: size of that axis.
        period: layers after which programs begin anew.
    """
    if period == 1:
        return jax.lax.scan(lambda x, of: layer(x, of, 0), first, stacked)

    def several(x: Any, of: Any, count: int) -> tuple[Any, Any]:
        outputs = []
        for place in range(count):
            x, y = layer(x, jax.tree.map(lambda array, i=place: array[i], of), place)
            outputs.append(y)
        return x, jax.tree.map(lambda *each: jnp.stack(each), *outputs)

    whole, parts = depth // period * period, []
    if whole:
        groups = jax.tree.map(lambda array: array[:whole].reshape(-1, period, *array.shape[1:]), stacked)
        first, of_groups = jax.lax.scan(lambda x, of: several(x, of, period), first, groups)
        parts.append(jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:]), of_groups))
    if whole < depth:
        first, rest = several(first, jax.tree.map(lambda array: array[whole:], stacked), depth - whole)
        parts.append(rest)
    return first, jax.tree.map(lambda *each: jnp.concatenate(each), *parts)


def residual_stack(
    block: nnx.Module,
    h_BTD: jax.Array,
    depth: int,
    compute: ComputeConfig,
    *context: Any,
    layout: Layout = ONE_DEVICE,
) -> jax.Array:
    """Return the residual stream after `depth` blocks, [B, T, D].

    Args:
        block: one module, its parameters stacked along a leading "layers" axis.
        h_BTD: the stream before the first block.
        depth: size of that axis.
        compute: whether the stack is a loop, and what its backward pass keeps.
        *context: what every block takes beside the stream.
        layout: how arrays lie on devices; a block with a field `layout` has it there already.
    """
    return _stack(block, lambda block, h_BTD: (block(h_BTD, *context), None), h_BTD, depth, compute, layout)[0]


def run_stack(
    block: Block,
    h_BTD: jax.Array,
    depth: int,
    compute: ComputeConfig,
    *context: Any,
    scale_BL2: jax.Array | None = None,
    layout: Layout = ONE_DEVICE,
) -> tuple[jax.Array, Routing | None]:
    """Apply all blocks.

    Return the residual stream and the routing statistics (averaged over blocks, counts summed), None without experts.

    Args:
        block, h_BTD, depth, compute, *context, layout: as `residual_stack`.
        scale_BL2: what every branch is taken times, of an example, a block and its two branches; each as it is unless given.
    """
    each = () if scale_BL2 is None else (jnp.swapaxes(scale_BL2, 0, 1),)

    def call(block: Block, h_BTD: jax.Array, scale_B2: jax.Array | None = None) -> tuple[jax.Array, Routing | None]:
        return block.routed(h_BTD, *context, scale_B2=scale_B2)

    return _stack(block, call, h_BTD, depth, compute, layout, block.period, *each)


def _stack(
    block: nnx.Module,
    call: Callable,
    h_BTD: jax.Array,
    depth: int,
    compute: ComputeConfig,
    layout: Layout,
    period: int = 1,
    *each_layer: jax.Array,
) -> tuple:
    """The stream after all blocks, and what they give beside it; of a period each is called as `Block.at` its place.

    What is in `each_layer` has a first axis of layers, and every block takes its own.
    """
    graph, state = nnx.split(block)
    stacked = (state, *each_layer)
    scan = runs_as_scan(compute, depth, layout=layout)

    def layer(place: int, h_BTD: jax.Array, of_layer: tuple[nnx.State, ...]) -> tuple[jax.Array, Routing | None]:
        state, *inputs = of_layer
        own: Any = nnx.merge(graph, layout.layer(state, compute.dtype))
        return call(own if period == 1 else own.at(place), checkpoint_name(h_BTD, BLOCK_INPUT), *inputs)

    layers = [functools.partial(layer, place) for place in range(period)]
    if (policy := REMAT[compute.remat] or layout.policy) is not None:
        # Inside a scan the loop already keeps XLA from merging the recomputation with the forward pass.
        layers = [jax.checkpoint(one, policy=policy, prevent_cse=not scan) for one in layers]
    if scan:
        h_BTD, each = over_layers(lambda x, of, place: layers[place](x, of), h_BTD, stacked, depth, period)
        return h_BTD, each and each.over_blocks()
    # Split at once, so that gradients are written side by side at once: of a slice each, every one is added into a whole stack.
    leaves, structure = jax.tree.flatten(stacked)
    each = [jax.lax.split(jnp.asarray(leaf), [1] * depth) for leaf in leaves]
    routings = []
    for i, slices in enumerate(zip(*each, strict=True)):
        of_layer = jax.tree.unflatten(structure, [jnp.squeeze(array, 0) for array in slices])
        h_BTD, routing = layers[i % period](h_BTD, of_layer)
        routings += [] if routing is None else [routing]
    return h_BTD, jax.tree.map(lambda *numbers: jnp.stack(numbers), *routings).over_blocks() if routings else None
