"""What a step's peak memory must be, from sizes alone, and the FLOPs of its matrix products, from its trace.

Compared with what the compiler allocates (`train/pods/compiled.py`), so that neither is believed alone. Bytes on one device.
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
"""Of a core's own memory for one operation where nothing sets it, in KiB, by kind of device; 16384 on others."""

_COMPILE_SECONDS = {16384: 120.0, 32768: 340.0, 98304: 580.0}
"""That setting to processor seconds of the compiler for each MiB of traced program: of steps of about 1 MiB, lm-1b's at 16384 and lm-8b's on
v5e and v5p at 32768 (5.6 and 5.7 min) and on v6e at 98304 (9.7 min), as docs/evidence/performance.md has them."""


def operation_kib(config: Config, chip: Chip, environment: Mapping[str, str] = os.environ) -> int:
    """KiB of a core's own memory that one operation of a step may take: the user's flag, ours, or the compiler's.

    Args:
        config: of the run: `vmem_kib` and `xla_flags`.
        chip: that it is compiled for.
        environment: where the user's flags are looked up.
    """
    text = " ".join(environment.get(name, "") for name in hardware.VARIABLES)
    if set_by_user := re.findall(rf"--{hardware.VMEM}=(\d+)", text):
        return int(set_by_user[-1])
    flags = hardware.compiler_options(
        "tpu", config.xla_flags, environment, kind=chip.device_kind, vmem_kib=config.vmem_kib
    )
    return flags.get(hardware.VMEM, _COMPILERS_KIB.get(chip.device_kind, 16384))


def compile_seconds(program_bytes: int, kib: int) -> float:
    """Processor seconds that the TPU compiler takes for a step, as measured and between the measured settings in proportion.

    Args:
        program_bytes: of the traced program (StableHLO).
        kib: of `operation_kib`.
    """
    return (
        program_bytes
        / 2**20
        * float(np.interp(kib, [*_COMPILE_SECONDS], [*_COMPILE_SECONDS.values()]))
    )


def expected(program: Program) -> dict[str, int]:
    """Bytes by what they hold at the fuller of two moments, the loss and the backward pass of one layer: in sum the peak.

    Args:
        program: whose step.
    """
    config, layout, definition = program.config, program.layout, program.definition
    itemsize, batch = jnp.dtype(config.model.compute.dtype).itemsize, program.train_feed().abstract
    params, specs = program.abstract.params, definition.specs
    inside = manual.inside(layout, definition) or layout
    stacks = [
        leaf
        for n, leaf in params.items()
        if specs[n].in_block and leaf.ndim > 2 and not inside.by_layer(specs[n])
    ]
    held = {
        "state": sum(
            memory.bytes_of(leaf, leaf.sharding) for leaf in jax.tree.leaves(program.abstract)
        ),
        "batch": sum(
            memory.bytes_of(batch[name], sharding) for name, sharding in layout.batch(batch).items()
        ),
        # Every block parameter times its multiplier, once, where it lies; but not where a layer's are taken in the loop.
        "weights in compute type": sum(
            memory.bytes_of(leaf, leaf.sharding, itemsize) for leaf in stacks
        ),
        "saved activations": memory.activations(config, definition, layout)[0],
    }
    way = memory.loss(config, definition, layout)
    backward = {**memory.layer(config, definition, layout), "readout's gradient, whole": way.after}
    return max({**held, **way.memory}, {**held, **backward}, key=lambda terms: sum(terms.values()))


def model_flops(config: Config) -> float:
    """FLOPs that the model needs for a step, counted from its sizes (see `mupax.zoo.families`): what utilization is of."""
    return families.train_flops(config.model) * config.data.batch_size * config.model.units


def expert_weights(definition: Definition) -> int:
    """Numbers of a model's experts, of which a device along the mesh axis `experts` has its own alone."""
    specs = definition.specs
    return sum(
        leaf.size for name, leaf in definition.abstract.items() if "experts" in specs[name].copies
    )


def expert_slots(config: Config, devices: int) -> float:
    """Copies of a token of an example that are sent to experts, and as many back; 0 where no mesh axis splits them.

    Args:
        config: of the run.
        devices: that split experts; dropless every one of them has all tokens.
    """
    model = config.model
    if devices == 1 or not isinstance(model, TransformerConfig) or model.experts is None:
        return 0.0
    length = model.sizes()["position"]
    capacity = model.routing.capacity(length, model.experts, model.active)
    return devices if capacity is None else model.experts * capacity / length


def attention_waste(program: Program, chip: Chip) -> float:
    """FLOPs of one device for which a splash kernel computes what its mask hides, computes again, or waits for keys and values.

    Args:
        program: whose attention it is.
        chip: what it would run on.
    """
    model, sizes, mesh = (
        program.config.model,
        defaultdict(int, program.definition.sizes),
        program.mesh.shape,
    )
    length, again = sizes["position"], memory.FORWARD_AGAIN[model.compute.remat]
    kernel_again = memory.KERNEL_AGAIN[model.compute.remat]
    block = block_of(length, chip.device_kind, model.compute.attention_block, causal=model.causal)
    share, counted = attention_share(program, block), 0.5 if model.causal else 1.0
    rows = (
        program.config.data.batch_size
        / program.layout.num_shards("batch")
        / mesh["sequence"]
        / mesh["tensor"]
    )
    forward = 4.0 * length**2 * sizes["heads"] * sizes["head_dim"] * sizes["layers"] * rows
    backward = 2.5 if block >= FUSED else 3.5
    waits = max(1.0, chip.peak_flops / chip.hbm_bandwidth / block)
    return forward * ((1 + kernel_again + backward) * share * waits - (3 + again) * counted)


def attention_share(program: Program, block: int, *, of_grid: bool = False) -> float:
    """Share of the pairs of positions that the slowest device computes of its own, in (0, 1].

    Args:
        program: whose attention it is.
        block: positions on a side of the kernel's blocks.
        of_grid: of a kernel's grid as traced; a ring has none for pairs of parts that its mask hides.
    """
    length, ways = program.definition.sizes["position"], program.layout.num_shards("sequence")
    if not program.config.model.causal:
        return 1.0
    if (
        ways > 1
        and memory.attention_of(program.config, program.definition, program.layout) == "ring"
    ):
        # Its own two parts with the mask, and half as many pairs of each other device.
        return (2 * causal_share(length // ways, block) + ways - 1) / (
            (ways + 1) if of_grid else 2 * ways
        )
    return 1 - (1 - causal_share(length // ways, block)) / ways


def matmul_flops(jaxpr: Any, visited: float = 1.0) -> float:
    """FLOPs (two per multiply-add) of one run of a jaxpr, with whatever it computes again and without what is elementwise.

    Args:
        jaxpr: from `jax.stages.Traced.jaxpr` or `jax.make_jaxpr`.
        visited: share of a kernel's grid that it does not skip; of attention with a mask less than 1 (see `causal_share`).

    Raises:
        ValueError: a loop of unknown length.
    """
    # Where a remat policy keeps all that a call gives, the trace has it again, giving nothing: no compiler runs it.
    return sum(
        _flops(equation, visited)
        for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns
        if equation.outvars
    )


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
        return (
            2.0
            * math.prod(equation.outvars[0].aval.shape)
            * math.prod(shape[i] for i in contracted)
        )
    if name == "pallas_call":
        if (estimate := params.get("cost_estimate")) is not None:
            return float(estimate.flops)
        return (
            visited
            * math.prod(params["grid_mapping"].grid)
            * matmul_flops(params["jaxpr"], visited)
        )
    jaxprs = [
        leaf for leaf in jax.tree.leaves(params) if hasattr(getattr(leaf, "jaxpr", leaf), "eqns")
    ]
    inner = sum(matmul_flops(jaxpr, visited) for jaxpr in jaxprs)
    match name:
        case "scan":
            return params["length"] * inner
        case "cond":
            return max(matmul_flops(branch, visited) for branch in params["branches"])
        case "while":
            if inner:
                raise ValueError(
                    "a while loop of unknown length holds matrix products; write it as a scan"
                )
            return 0.0
        case "shard_map":
            # Seen from one device. What stays whole over an axis is computed by every device along it.
            return inner * params["mesh"].size
        case _:
            return inner
