"""Devices that a mesh has and this machine has not: their shapes are those of stand-ins, and a step's memory is an estimate.

The estimate is of programs of the CPU compiler on 16 devices, from what one device takes of the same rows: `lm-tiny` and `lm-8b`, with and
without remat and accumulation, were at most 1.02 of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax

from mupax.train.config.devices import MESH_AXES, MeshConfig
from mupax.train.config.run import Config
from mupax.train.core.costs import memory
from mupax.train.core.program import Program, assemble

_LESS_FUSED = 2.0
"""Times the activations of one device's step that a step split over devices keeps, where a layer's backward pass has all of them."""
_COPIES = 3
"""Copies of what is whole for a moment: as it is sent, as a product takes it, and its gradient."""


@dataclasses.dataclass(frozen=True)
class StandIn:
    """A device like one that is here, for the places of a mesh that no device of this machine takes.

    Attributes:
        like: a `jax.Device`.
        id: beyond those of the devices there are.
    """

    like: Any
    id: int

    def __getattr__(self, name: str) -> Any:
        return getattr(self.like, name)


def stand_ins(config: MeshConfig) -> Sequence[Any] | None:
    """As many devices as a mesh needs, where that is more than there are; None where it is not, and on TPU, whose chips have places.

    Args:
        config: of the mesh; an axis left open is then one device.
    """
    present = jax.devices()
    needed = math.prod(size for axis in MESH_AXES if (size := getattr(config, axis)) > 0)
    if needed <= len(present) or present[0].platform == "tpu":
        return None
    return [*present, *(StandIn(present[0], id) for id in range(len(present), needed))]


def here(program: Program) -> bool:
    """Whether all devices of a program are this machine's, so that it can be compiled."""
    return not any(isinstance(device, StandIn) for device in program.mesh.devices.flat)


def per_row(config: Config) -> int | None:
    """Bytes of activations and their gradients of one example in one device's step; None where the compiler does not say.

    It is compiled twice on one device, with one example and with two: what they differ in is of the example.

    Args:
        config: of the run; its own mesh, batch and accumulation do not count.
    """
    sizes = []
    for rows in (1, 2):
        data = dataclasses.replace(config.data, batch_size=rows, eval_batch_size=None)
        alone = dataclasses.replace(config, mesh=MeshConfig(), accumulation_steps=1, data=data)
        analysis = assemble(alone, jax.devices()[:1]).compile_train().memory_analysis()
        if analysis is None:
            return None
        sizes.append(analysis.temp_size_in_bytes)
    return max(0, sizes[1] - sizes[0])


def temporary(program: Program, row: int) -> int:
    """Bytes of activations and gradients of one device of a mesh that is not here, estimated.

    Args:
        program: of the run.
        row: from `per_row`.
    """
    config, layout = program.config, program.layout
    rows = config.data.batch_size // config.accumulation_steps // layout.ways("batch")
    less_fused = _LESS_FUSED if config.model.compute.remat in ("none", "dots") else 1.0
    gradients = sum(memory.bytes_of(leaf, leaf.sharding) for leaf in program.abstract.params.values())
    split = math.prod(layout.ways(axis) for axis in ("sequence", "heads"))
    more = config.accumulation_steps > 1
    return int(row * rows * less_fused / split + gradients * (2 + more) + buffers(program))


def buffers(program: Program) -> int:
    """Bytes of parameters that a device has whole for a moment, where they are split by rows.

    Args:
        program: of the run.
    """
    if program.layout.ways("embed") == 1:
        return 0
    params, specs = program.abstract.params, program.definition.specs
    whole = {name: leaf.size * leaf.dtype.itemsize for name, leaf in params.items()}
    # One layer of every stack's matrices, and all of what is in none.
    return _COPIES * sum(size // (params[n].shape[0] if specs[n].in_block else 1) for n, size in whole.items())
