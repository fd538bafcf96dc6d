"""Which mesh, remat policy and number of microbatches a run should use on a pod: estimated, then the best few compiled."""

from __future__ import annotations

import dataclasses
import itertools
import math
import typing
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from mupax import terminal
from mupax.terminal import gib
from mupax.train.config.run import Config, MeshConfig
from mupax.train.core.program import Program, assemble
from mupax.train.parallel.mesh import MeshError
from mupax.train.pods import estimates, topology
from mupax.train.pods.compiled import compile_for
from mupax.train.pods.topology import Chip
from mupax.zoo.configs import ComputeConfig

MOST_TENSOR = 16
"""Widest tensor axis tried: beyond it a layer's sums over activations take longer than its products on every chip here."""

MICROBATCHES = (1, 2, 4, 8)
"""Numbers of microbatches tried."""

_RECOMPUTED = {"none": 0.0, "dots": 0.0, "block": 1.0, "offload": 1.0}
"""Forward passes of the blocks that a remat policy computes again."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A configuration with what is expected of it, before anything is compiled."""

    config: Config
    seconds: float
    bytes: int

    @property
    def words(self) -> str:
        """What it changes, as flags."""
        config, mesh = self.config, dataclasses.asdict(self.config.mesh)
        split = [axis for axis in ("data", "fsdp", "sequence", "tensor") if mesh[axis] > 1 or axis == "data"]
        remat, parts = config.model.compute.remat, config.accumulation_steps
        axes = " ".join(f"--mesh.{axis} {mesh[axis]}" for axis in split)
        return f"{axes} --model.compute.remat {remat} --accumulation-steps {parts}"


def search(config: Config, name: str, slices: int, limit: int) -> list[dict[str, Any]]:
    """Reports of the most promising configurations, compiled one by one; how it goes is printed.

    Args:
        config: the run; its mesh, remat policy and microbatches are replaced.
        name: topology.
        slices: how many of them.
        limit: programs to compile; the others are only estimated.

    Returns:
        Reports of `mupax.train.pods.compiled.Compiled`, those that fit first, fastest first, with the flags that make them.

    Raises:
        MeshError: no mesh of these axes fits the model and batch.
    """
    chip, devices = topology.chip_of(name), topology.devices(name, slices)
    tried = list(_candidates(config, chip, devices, slices))
    if not tried:
        raise MeshError(f"no mesh of {len(devices)} chips fits this model and batch; write another --data.batch-size")
    room = [one for one in tried if one.bytes <= chip.hbm_bytes]
    # Where nothing is expected to fit, the smallest are tried: the estimate may be wrong.
    chosen = sorted(room or tried, key=lambda one: one.seconds if room else one.bytes)[:limit]
    print(f"{len(tried)} configurations, {len(room)} expected to fit; compiling {len(chosen)}", flush=True)
    reports = []
    for number, one in enumerate(chosen, 1):
        expected = f"(expected {one.seconds:.3g} s, {gib(one.bytes)})"
        print(f"{number}/{len(chosen)}  {one.words}  {expected}", flush=True)
        report = compile_for(one.config, name, slices).report()
        reports.append({"flags": one.words, "topology": name, "slices": slices, **report})
    return sorted(reports, key=lambda r: (not r["fits"], (r["roofline"] or {}).get("step_seconds", math.inf)))


def table(reports: list[dict[str, Any]], title: str) -> str:
    """The reports of `search` as text, best first.

    Args:
        reports: of `search`.
        title: line above them.
    """
    rows = [("flags", "fits", "memory", "step", "bound", "MFU")]
    for report in reports:
        line = report["roofline"] or {}
        step, bound, mfu = (f"{line['step_seconds']:.3g} s", line["bound"], f"{line['mfu']:.1%}") if line else "---"
        fits, memory = "yes" if report["fits"] else "no", gib(report["peak_bytes_per_device"])
        rows.append((report["flags"], fits, memory, step, bound.replace("_", " "), mfu))
    return f"{title}\n{terminal.table(rows, left=('flags', 'bound'))}"


def _candidates(config: Config, chip: Chip, devices: Any, slices: int) -> Iterator[Candidate]:
    policies = typing.get_args(typing.get_type_hints(ComputeConfig)["remat"])
    for mesh in _meshes(len(devices), slices, config.mesh):
        try:
            program = assemble(dataclasses.replace(config, mesh=mesh, accumulation_steps=1), devices)
        except MeshError:
            continue
        for remat, parts in itertools.product(policies, MICROBATCHES):
            if config.data.batch_size % (parts * program.layout.ways("batch")):
                continue
            compute = dataclasses.replace(config.model.compute, remat=remat)
            model = dataclasses.replace(config.model, compute=compute)
            changed = dataclasses.replace(program.config, model=model, accumulation_steps=parts)
            # The arrays of the state lie as before.
            estimated = dataclasses.replace(program, config=changed)
            yield Candidate(changed, _estimate(estimated, chip, slices), sum(estimates.expected(estimated).values()))


def _meshes(devices: int, slices: int, mesh: MeshConfig) -> Iterator[MeshConfig]:
    """Every way to split the devices over data, fsdp, sequence and tensor; slices lie along data."""
    sizes = [n for n in range(1, devices + 1) if devices % n == 0]
    for data, fsdp, sequence, tensor in itertools.product(sizes, repeat=4):
        if data * fsdp * sequence * tensor == devices and tensor <= MOST_TENSOR and data % slices == 0:
            yield dataclasses.replace(mesh, data=data, fsdp=fsdp, sequence=sequence, tensor=tensor)


def _estimate(program: Program, chip: Chip, slices: int) -> float:
    """Seconds of a step: products, and what the mesh must send, where the two do not overlap by a tenth."""
    config, mesh = program.config, program.mesh.shape
    again = _RECOMPUTED[config.model.compute.remat]
    compute = estimates.model_flops(config) * (1 + again / 3) / program.mesh.size / chip.peak_flops
    weights = 2 * program.definition.count() / mesh["tensor"]
    gathered = (2 + again) * weights * config.accumulation_steps
    rows = config.data.batch_size / (mesh["data"] * mesh["fsdp"])
    sizes = defaultdict(int, program.definition.sizes)
    positions = rows * sizes["position"] * sizes["layers"]
    stream = 2 * positions / mesh["sequence"] * sizes["embed"]
    keys = 4 * positions * sizes["kv_heads"] * sizes["head_dim"] / mesh["tensor"]
    ring = {axis: (size - 1) / size for axis, size in mesh.items()}
    sent = (
        ring["fsdp"] * (gathered + 2 * weights)
        + ring["data"] * 2 * 2 * weights / mesh["fsdp"]
        + ring["tensor"] * 2 * (4 + 2 * again) * stream
        + ring["sequence"] * (2 + again) * keys
    )
    network = sent / chip.ici_bandwidth
    if slices > 1 and chip.dcn_bandwidth:
        network += 2 * 2 * weights / mesh["fsdp"] / chip.dcn_bandwidth
    return max(compute, network) + 0.1 * min(compute, network)
