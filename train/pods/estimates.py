"""Estimates of a step on a pod: peak memory from sizes alone, and FLOPs from its trace.

They are compared with what the compiler allocates (`mupax.train.pods.compiled`), so that neither is
believed alone. Bytes are on one device.
"""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mupax.train.config.run import Config
from mupax.train.core.costs import memory
from mupax.train.core.program import Program
from mupax.train.parallel import hardware
from mupax.train.parallel.chips import Chip
from mupax.zoo import families, manual
from mupax.zoo.definition import Definition
from mupax.zoo.layers.flash import FUSED, block_of
from mupax.zoo.transformer import TransformerConfig

_COMPILERS_KIB = {"TPU v6 lite": 32768}
"""Default of the TPU compiler for the KiB of a core's own memory that one operation may take.

It is listed by device kind. The default is 16384 on other devices.
"""

GPU_COMPILE_SECONDS = 25.0
"""Processor seconds of the GPU compiler for one step of gpt2-c4, vit-b16-imagenet or lm-1b."""

_ATTENTION_KERNELS = {
    "dot_product_attention_fwd_wrapper": 2,
    "dot_product_attention_bwd_wrapper": 5,
}
"""Number of matrix products over all pairs of a query and a key in cuDNN's attention.

The keys are the names of JAX's primitives.

Forward: logits and outputs. Backward: the logits again, and the gradients of weights, values,
queries and keys.
"""

_COMPILE_SECONDS = {16384: 120.0, 32768: 340.0, 98304: 580.0}
"""Processor seconds of the compiler per MiB of traced program, by `operation_kib`.

Measured on steps of about 1 MiB: lm-1b's at 16384; lm-8b's on v5e and v5p at 32768 (5.6 and 5.7
min) and on v6e at 98304 (9.7 min). See docs/evidence/performance.md.
"""


def operation_kib(config: Config, chip: Chip, environment: Mapping[str, str] = os.environ) -> int:
    """Return the KiB of a core's own memory that one operation of a step may take.

    The user's flag comes first, then mupax's setting, then the compiler's default.

    Args:
        config: Config of the run, whose `vmem_kib` and `xla_flags` are read.
        chip: Chip that the step is compiled for.
        environment: Environment variables with the user's flags, by default the process's.
    """
    text = " ".join(environment.get(name, "") for name in hardware.VARIABLES)
    set_by_user = re.findall(rf"--{hardware.VMEM}=(\d+)", text)
    if set_by_user:
        # Of a flag that is given twice, the last one counts.
        return int(set_by_user[-1])
    flags = hardware.compiler_options(
        "tpu", config.xla_flags, environment, kind=chip.device_kind, vmem_kib=config.vmem_kib
    )
    default = _COMPILERS_KIB.get(chip.device_kind, 16384)
    return flags.get(hardware.VMEM, default)


def compile_seconds(program_bytes: int, kib: int) -> float:
    """Estimate the processor seconds that the TPU compiler takes for a step.

    Between measured settings, the seconds are interpolated. Beyond them, the nearest counts.

    Args:
        program_bytes: Bytes of the traced program as StableHLO text.
        kib: Result of `operation_kib`, in KiB.
    """
    settings = list(_COMPILE_SECONDS)
    seconds = list(_COMPILE_SECONDS.values())
    seconds_per_mib = float(np.interp(kib, settings, seconds))
    return program_bytes / 2**20 * seconds_per_mib


def expected(program: Program) -> dict[str, int]:
    """Estimate the bytes on one device at a step's peak, by content. Nothing is compiled.

    The peak is the fuller of two moments: the loss, or the backward pass of one layer.

    Returns:
        Bytes by the name of a table's row. Four are always there: `state` (parameters, optimizer
        state and moving average), `batch`, "weights in compute type" and "saved activations". The
        others depend on the moment.
    """
    config = program.config
    layout = program.layout
    definition = program.definition
    specs = definition.specs
    batch = program.train_feed().abstract
    itemsize = jnp.dtype(config.model.compute.dtype).itemsize

    inside = manual.inside(layout, definition) or layout
    weights = 0
    for name, leaf in program.abstract.params.items():
        # Multipliers are applied to all layers before the loop, which makes a copy of the stacked
        # matrices in the compute type. A layout that reads one layer at a time applies them inside
        # the loop.
        is_stack = specs[name].in_block and leaf.ndim > 2
        if is_stack and not inside.by_layer(specs[name]):
            weights += memory.bytes_of(leaf, leaf.sharding, itemsize)
    batch_shardings = layout.batch(batch).items()
    saved_activations, _ = memory.activations(config, definition, layout)
    state_bytes = 0
    for leaf in jax.tree.leaves(program.abstract):
        state_bytes += memory.bytes_of(leaf, leaf.sharding)
    held = {
        "state": state_bytes,
        "batch": sum(memory.bytes_of(batch[name], sharding) for name, sharding in batch_shardings),
        "weights in compute type": weights,
        "saved activations": saved_activations,
    }

    loss = memory.loss(config, definition, layout)
    at_loss = {**held, **loss.memory}
    at_backward = {
        **held,
        **memory.layer(config, definition, layout),
        "readout's gradient, whole": loss.after,
    }
    if sum(at_backward.values()) > sum(at_loss.values()):
        return at_backward
    return at_loss


def model_flops(config: Config) -> float:
    """Return the FLOPs that the model needs for a step, counted from sizes (`mupax.zoo.families`).

    They are of the global batch on all devices, without recomputation.

    Utilization (MFU) is relative to them.
    """
    return families.train_flops(config.model) * config.data.batch_size * config.model.units


def expert_weights(definition: Definition) -> int:
    """Return the number of a model's expert weights.

    A device along the mesh axis `experts` has only the weights of its own experts.
    """
    total = 0
    for name, leaf in definition.abstract.items():
        if "experts" in definition.specs[name].copies:
            total += leaf.size
    return total


def expert_slots(config: Config, devices: int) -> float:
    """Return how many copies of each token are sent to experts on other devices.

    As many are sent back. The result is 0 if no mesh axis splits the experts.

    Args:
        devices: Size of the mesh axis that splits experts. If experts have no capacity, each device
            along this axis gets all tokens, so the result is `devices`.
    """
    model = config.model
    if devices == 1 or not isinstance(model, TransformerConfig) or model.experts is None:
        return 0.0
    length = model.sizes()["position"]
    capacity = model.routing.capacity(length, model.experts, model.active)
    if capacity is None:
        return devices
    return model.experts * capacity / length


def attention_waste(program: Program, chip: Chip) -> float:
    """Return the FLOPs that splash attention takes in addition to the counted ones, on one device.

    Counted are the model's FLOPs (`model_flops`) and those of remat. In addition, the kernel
    computes pairs of positions that its mask hides, recomputes its forward pass in the backward
    pass, and waits for keys and values. Waiting is converted to FLOPs at the chip's peak rate. The
    result is 0 on GPUs, which do not use this kernel.
    """
    if chip.gpu is not None:
        return 0.0
    model = program.config.model
    mesh = program.mesh.shape
    sizes = defaultdict(int, program.definition.sizes)
    length = sizes["position"]
    again = memory.FORWARD_AGAIN[model.compute.remat]
    kernel_again = memory.KERNEL_AGAIN[model.compute.remat]
    block = block_of(length, chip.device_kind, model.compute.attention_block, causal=model.causal)
    share = attention_share(program, block)
    # Model FLOPs count half of the pairs under a causal mask.
    counted_share = 0.5 if model.causal else 1.0
    batch_rows = program.config.data.batch_size / program.layout.num_shards("batch")
    rows = batch_rows / mesh["sequence"] / mesh["tensor"]
    forward = 4.0 * length**2 * sizes["heads"] * sizes["head_dim"] * sizes["layers"] * rows
    # Cost of the kernel's backward pass, in forward passes of 2 products each: 5 products if one
    # kernel computes all gradients, 7 if two kernels do.
    backward = 2.5 if block >= FUSED else 3.5
    # Every element of keys and values, of 2 bytes, is read once per `block` queries and takes 2
    # FLOPs for each. So a byte that is read is used for `block` FLOPs.
    waits = max(1.0, chip.peak_flops / chip.hbm_bandwidth / block)
    kernel = (1 + kernel_again + backward) * share * waits
    counted = (3 + again) * counted_share
    return forward * (kernel - counted)


def attention_share(program: Program, block: int, *, of_grid: bool = False) -> float:
    """Return the share of query-key pairs that an attention kernel computes, in (0, 1].

    The other pairs are in blocks that the causal mask hides. The share is that of the device with
    the most work, of all pairs of its queries. Without a causal mask it is 1.

    Args:
        block: Side of the kernel's blocks, in positions.
        of_grid: `True` returns the share of the kernel's grid as traced. The grid of ring attention
            already leaves out some of the hidden pairs.
    """
    if not program.config.model.causal:
        return 1.0
    length = program.definition.sizes["position"]
    num_shards = program.layout.num_shards("sequence")
    share = causal_share(length // num_shards, block)
    is_ring = (
        num_shards > 1
        and memory.attention_of(program.config, program.definition, program.layout) == "ring"
    )
    if not is_ring:
        return 1 - (1 - share) / num_shards
    # The device's own two parts with the mask, and half of the pairs with each other device.
    computed = 2 * share + num_shards - 1
    total = num_shards + 1 if of_grid else 2 * num_shards
    return computed / total


def matmul_flops(jaxpr: Any, visited: float = 1.0) -> float:
    """Return the FLOPs (two per multiply-add) of the matrix products in one run of a jaxpr.

    They are over all devices. Recomputation is counted. Elementwise operations are not. Of a
    `cond`, the branch with the most FLOPs counts.

    Args:
        jaxpr: Jaxpr from `jax.stages.Traced.jaxpr` or `jax.make_jaxpr`.
        visited: Share of a kernel's grid that it does not skip, 1 by default. With an attention
            mask it is less (`causal_share`).

    Raises:
        ValueError: A loop of unknown length has matrix products.
    """
    total = 0
    # Some primitives hold a ClosedJaxpr and some a plain Jaxpr.
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        # If a remat policy saves all results of a call, the backward pass still has a copy of the
        # call without outputs. The compiler removes it.
        if equation.outvars:
            total += _flops(equation, visited)
    return total


def causal_share(length: int, block: int) -> float:
    """Return the share of a causal mask's blocks that have anything to compute, in (1/2, 1].

    Args:
        length: Number of query positions, and of key positions.
        block: Side of the kernel's blocks, in positions. Fewer positions are 1 block.
    """
    blocks = max(1, length // block)
    return (1 + 1 / blocks) / 2


def _kernel_product_flops(equation: Any) -> float:
    """Return the FLOPs of one product of queries with keys in cuDNN's attention kernel.

    The kernel skips blocks of pairs that the causal mask hides, about half.
    """
    # B batch, T query and S key positions, H heads, N head dimension.
    batch, queries, heads, size = equation.invars[0].aval.shape
    keys = equation.invars[1].aval.shape[1]
    share = 0.5 if "CAUSAL" in str(equation.params["mask_type"]) else 1.0
    return 2.0 * batch * heads * queries * keys * size * share


def _flops(equation: Any, visited: float) -> float:
    """Return the FLOPs of the matrix products of one equation of a jaxpr, with those inside it.

    The arguments are those of `matmul_flops`.

    Raises:
        ValueError: A loop of unknown length has matrix products.
    """
    name = equation.primitive.name
    params = equation.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        shape = equation.invars[0].aval.shape
        num_outputs = math.prod(equation.outvars[0].aval.shape)
        return 2.0 * num_outputs * math.prod(shape[axis] for axis in contracted)
    if name == "pallas_call":
        estimate = params.get("cost_estimate")
        if estimate is not None:
            return float(estimate.flops)
        num_programs = math.prod(params["grid_mapping"].grid)
        return visited * num_programs * matmul_flops(params["jaxpr"], visited)
    if name in _ATTENTION_KERNELS:
        return _ATTENTION_KERNELS[name] * _kernel_product_flops(equation)
    if name == "cond":
        # Only one branch runs. The one with the most FLOPs is assumed.
        return max(matmul_flops(branch, visited) for branch in params["branches"])

    inner = 0
    for leaf in jax.tree.leaves(params):
        if hasattr(getattr(leaf, "jaxpr", leaf), "eqns"):
            inner += matmul_flops(leaf, visited)
    if name == "scan":
        return params["length"] * inner
    if name == "while":
        if inner:
            raise ValueError(
                "a while loop of unknown length holds matrix products; write it as a scan"
            )
        return 0.0
    if name == "shard_map":
        # The jaxpr inside is one device's. An array that is replicated along an axis is computed
        # by every device along it.
        return inner * params["mesh"].size
    return inner
