"""What a run can be on a pod, mesh, remat, microbatches, batch, loss and blocks, and what each is expected to take."""

from __future__ import annotations

import dataclasses
import itertools
import typing
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from mupax.train.config.run import Config, MeshConfig
from mupax.train.core.costs import memory
from mupax.train.core.program import Program, assemble
from mupax.train.parallel.chips import Chip
from mupax.train.parallel.mesh import MeshError
from mupax.train.pods import estimates
from mupax.zoo import flops
from mupax.zoo.configs import ComputeConfig
from mupax.zoo.layers.flash import block_of

AXES = ("data", "fsdp", "experts", "sequence", "tensor")
"""Mesh axes that a run is split over; experts as the run has them."""

MOST_TENSOR = 16
"""Widest tensor axis tried: beyond it a layer's sums over activations take longer than its products on every chip here."""

MICROBATCHES, BATCHES = (1, 2, 4, 8), (0.5, 1, 2)
"""Numbers of microbatches tried, and batches, over the run's own."""

BLOCKS = (512, 1024, 2048)
"""Sides of attention blocks tried beside the chip's own, where positions divide into them and a core's own memory holds them."""

BLOCK_BYTES = 5
"""Of a core's own memory for each pair of positions of a block: logits in float32 and, beside them, queries, keys, values and sums; the
compiler of v5e asked for 20 MiB for blocks of 2048."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A configuration with what is expected of it, before anything is compiled."""

    config: Config
    seconds: float
    bytes: int

    @property
    def kinds(self) -> dict[str, Any]:
        """What it decides, by name."""
        config, compute = self.config, self.config.model.compute
        return {
            "axes": tuple(axis for axis in AXES if getattr(config.mesh, axis) > 1),
            "fsdp": config.mesh.fsdp,
            "remat": compute.remat,
            "microbatches": config.accumulation_steps,
            "batch": config.data.batch_size,
            "loss": compute.cross_entropy,
            "block": compute.attention_block,
        }

    @property
    def pace(self) -> float:
        """Seconds an example: what candidates of different batches are compared by."""
        return self.seconds / self.config.data.batch_size

    @property
    def words(self) -> str:
        """What it changes, as flags."""
        kinds = self.kinds
        sizes = {axis: getattr(self.config.mesh, axis) for axis in AXES}
        axes = " ".join(f"--mesh.{axis} {size}" for axis, size in sizes.items() if size > 1 or axis == "data")
        block = f" --model.compute.attention-block {kinds['block']}" if kinds["block"] else ""
        return (
            f"{axes} --model.compute.remat {kinds['remat']} --accumulation-steps {kinds['microbatches']} "
            f"--data.batch-size {kinds['batch']} --model.compute.cross-entropy {kinds['loss']}{block}"
        )


def candidates(
    config: Config, chip: Chip, devices: Any, slices: int, batches: Sequence[float] = BATCHES
) -> Iterator[Candidate]:
    """Every configuration that splits over the devices.

    Args:
        config: the run.
        chip: what the devices are.
        devices: of a topology.
        slices: how many of it.
        batches: that are tried, as multiples of the run's own.
    """
    fields = typing.get_type_hints(ComputeConfig)
    policies, losses = (typing.get_args(fields[name]) for name in ("remat", "cross_entropy"))
    losses = [loss for loss in losses if loss != "auto"]  # which is one of the others
    length, causal = config.model.sizes()["position"], config.model.causal
    usual = block_of(length, chip.device_kind, causal=causal)
    room = 2**10 * estimates.operation_kib(config, chip)
    sides = [block for block in BLOCKS if BLOCK_BYTES * block**2 <= room]
    blocks = [None, *(block for block in sides if length % block == 0 and block != usual)]
    sizes = [int(config.data.batch_size * factor) for factor in batches]
    for mesh in _meshes(len(devices), slices, config.mesh):
        try:
            program = assemble(dataclasses.replace(config, mesh=mesh, accumulation_steps=1), devices)
        except MeshError:
            continue
        for remat, parts, size, loss in itertools.product(policies, MICROBATCHES, sizes, losses):
            if size % (parts * program.layout.ways("batch")):
                continue
            peak = 0
            for block in blocks:
                how = {"remat": remat, "cross_entropy": loss, "attention_block": block}
                model = dataclasses.replace(config.model, compute=dataclasses.replace(config.model.compute, **how))
                data = dataclasses.replace(program.config.data, batch_size=size)
                changed = dataclasses.replace(program.config, model=model, data=data, accumulation_steps=parts)
                # The arrays of the state lie as before.
                estimated = dataclasses.replace(program, config=changed)
                peak = peak or sum(estimates.expected(estimated).values())
                yield Candidate(changed, estimate(estimated, chip, slices), peak)


def candidate(config: Config, chip: Chip, devices: Any, slices: int) -> Candidate:
    """A configuration as a candidate, its mesh filled in.

    Args:
        config: of the run.
        chip: what the devices are.
        devices: of a topology.
        slices: how many of it.
    """
    program = assemble(config, devices)
    mesh = dataclasses.replace(config.mesh, **{axis: program.mesh.shape[axis] for axis in AXES})
    config = dataclasses.replace(program.config, mesh=mesh)
    return Candidate(config, estimate(program, chip, slices), sum(estimates.expected(program).values()))


def _meshes(devices: int, slices: int, mesh: MeshConfig) -> Iterator[MeshConfig]:
    """Every way to split the devices over data, fsdp, sequence and tensor; slices lie along data."""
    devices //= mesh.experts
    sizes = [n for n in range(1, devices + 1) if devices % n == 0]
    for data, fsdp, sequence, tensor in itertools.product(sizes, repeat=4):
        if data * fsdp * sequence * tensor == devices and tensor <= MOST_TENSOR and data % slices == 0:
            yield dataclasses.replace(mesh, data=data, fsdp=fsdp, sequence=sequence, tensor=tensor)


def estimate(program: Program, chip: Chip, slices: int) -> float:
    """Seconds of a step: products, and parameters sent, where the two do not overlap by a tenth; then what is waited for.

    Args:
        program: whose step.
        chip: that it runs on.
        slices: of the slow network.
    """
    config, mesh = program.config, program.mesh.shape
    again = memory.FORWARD_AGAIN[config.model.compute.remat]
    products = estimates.model_flops(config) * (1 + again / 3) / program.mesh.size
    compute = (products + estimates.attention_waste(program, chip)) / chip.peak_flops
    weights = 2 * program.definition.count() / mesh["tensor"]
    rows = config.data.batch_size / program.layout.ways("batch")
    sizes = defaultdict(int, program.definition.sizes)
    stacks = flops.stacks(config.model)
    summed = sum(blocks.depth * (len(blocks.stack.branches) * blocks.length + blocks.memory) for blocks in stacks)
    read = sum(blocks.depth * (blocks.length + blocks.memory) for blocks in stacks)
    stream = 2 * rows * summed / mesh["sequence"] * sizes["embed"]
    keys = 4 * rows * read * sizes["kv_heads"] * sizes["head_dim"] / mesh["tensor"]
    ring = {axis: (size - 1) / size for axis, size in mesh.items()}
    # Of experts a device gathers and sums its own; tokens are sent to them and back.
    weights -= 2 * estimates.expert_weights(program.definition) / mesh["tensor"] * ring["experts"]
    gathered = (2 + again) * weights * config.accumulation_steps
    network = (ring["fsdp"] * (gathered + 2 * weights) + ring["data"] * 4 * weights / mesh["fsdp"]) / chip.ici_bandwidth
    # What activations are summed or exchanged by is waited for, over one dimension of the torus.
    copies = sizes["active"] * stream  # of a block's stream, there and back; it is counted for two branches
    waited = ring["tensor"] * 2 * (2 + again) * stream + ring["sequence"] * (2 + again) * keys
    waited += ring["experts"] * (2 + again) * copies
    waits = waited * chip.torus / chip.ici_bandwidth
    if slices > 1 and chip.dcn_bandwidth:
        network += 2 * 2 * weights / mesh["fsdp"] / chip.dcn_bandwidth
    loss = memory.loss(config, program.definition, program.layout)
    waits += config.accumulation_steps * (loss.traffic / chip.hbm_bandwidth + loss.again / chip.peak_flops)
    return max(compute, network) + 0.1 * min(compute, network) + waits
