"""How a run should lie on a pod: mesh, remat, microbatches, batch, loss and blocks estimated, then a few that differ compiled."""

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
from mupax.train.core import vocabulary
from mupax.train.core.program import Program, assemble
from mupax.train.parallel.mesh import MeshError
from mupax.train.pods import estimates, topology
from mupax.train.pods.compiled import compile_for
from mupax.train.pods.topology import Chip
from mupax.zoo.configs import ComputeConfig
from mupax.zoo.layers.flash import block_of

AXES = ("data", "fsdp", "sequence", "tensor")
"""Mesh axes that a run is split over."""

MOST_TENSOR = 16
"""Widest tensor axis tried: beyond it a layer's sums over activations take longer than its products on every chip here."""

MICROBATCHES, BATCHES = (1, 2, 4, 8), (0.5, 1, 2)
"""Numbers of microbatches tried, and batches, over the run's own."""

BLOCKS = (512, 1024)
"""Sides of attention blocks tried beside the chip's own, where positions divide into them: those of 2048 take 20 MiB of 16 on v5e."""

ROOM = 0.75
"""Share of a chip's memory that may be expected to be taken: of lm-8b on v5e:8x8 the compiler took 1.1 to 1.4 times as much."""

SECONDS_PER_MEBIBYTE = 120.0
"""Time to compile for each MiB of traced program (StableHLO): 120 s of one core for lm-8b's and lm-1b's of about 1 MiB."""


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


def search(config: Config, name: str, slices: int, limit: int) -> list[dict[str, Any]]:
    """Reports of promising configurations of several kinds, compiled one by one; how it goes is printed.

    Args:
        config: the run; its mesh, batch, remat policy, microbatches, loss and attention blocks are replaced.
        name: topology.
        slices: how many of them.
        limit: programs to compile, one of them the run's own; the others are only estimated.

    Returns:
        Reports of `mupax.train.pods.compiled.Compiled`, those that fit first, fastest first, with the flags that make them.

    Raises:
        MeshError: no mesh of these axes fits the model and batch.
    """
    chip, devices = topology.chip_of(name), topology.devices(name, slices)
    tried = list(_candidates(config, chip, devices, slices))
    if not tried:
        raise MeshError(f"no mesh of {len(devices)} chips fits this model and batch; write another --data.batch-size")
    room = [one for one in tried if one.bytes <= ROOM * chip.hbm_bytes]
    # Where nothing is expected to fit, the smallest are tried: the estimate may be wrong.
    chosen = different(sorted(room or tried, key=lambda one: one.pace if room else one.bytes), limit)
    chosen = [candidate(config, chip, devices, slices), *chosen][: max(2, limit)]  # beside the run as it stands
    lowered = assemble(chosen[0].config, devices).trace_train().lower().as_text()
    minutes = max(1, round(len(chosen) * len(lowered) / 2**20 * SECONDS_PER_MEBIBYTE / 60))
    print(
        f"{len(tried)} configurations, {len(room)} expected to fit; compiling {len(chosen)}: about {minutes} min of one core",
        flush=True,
    )
    reports = []
    for number, one in enumerate(chosen, 1):
        expected = f"(expected {one.seconds:.3g} s, {gib(one.bytes)})"
        print(f"{number}/{len(chosen)}  {one.words}  {expected}", flush=True)
        report = compile_for(one.config, name, slices).report()
        step = report["roofline"] and f", {report['roofline']['step_seconds']:.3g} s"
        print(f"     {gib(report['peak_bytes_per_device'])}{step or ', does not fit'}", flush=True)
        mine = {"flags": one.words, "kinds": one.kinds, "expected_seconds": one.seconds, "topology": name}
        reports.append({**mine, "slices": slices, **report})
    return sorted(reports, key=lambda r: (not r["fits"], _pace(r)))


def different(ranked: list[Candidate], limit: int) -> list[Candidate]:
    """The best candidate, then of each thing it decides the best that decides it otherwise, then the best of what is left.

    Near copies of the best would differ by less than the estimates are wrong; these show in which direction they are.

    Args:
        ranked: candidates, the best first.
        limit: most that are returned.
    """
    best = ranked[0].kinds
    others = (next((one for one in ranked if one.kinds[name] != best[name]), None) for name in best)
    chosen = {id(one): one for one in (ranked[0], *others, *ranked) if one is not None}
    return list(chosen.values())[:limit]


def _pace(report: dict[str, Any]) -> float:
    line = report["roofline"] or {}
    return line.get("step_seconds", math.inf) / report["batch_size"]


def table(reports: list[dict[str, Any]], title: str) -> str:
    """The reports of `search` as text, best first.

    Args:
        reports: of `search`.
        title: line above them.
    """
    rows = [("flags", "fits", "memory", "expected", "step", "alone", "bound", "MFU")]
    for report in reports:
        line = report["roofline"] or {}
        step, alone, bound, mfu = "----"
        if line:
            step, alone = (f"{line[name]:.3g} s" for name in ("step_seconds", "alone"))
            bound, mfu = line["bound"], f"{line['mfu']:.1%}"
        fits, memory = "yes" if report["fits"] else "no", gib(report["peak_bytes_per_device"])
        expected = f"{report['expected_seconds']:.3g} s"
        rows.append((report["flags"], fits, memory, expected, step, alone, bound.replace("_", " "), mfu))
    return f"{title}\n{terminal.table(rows, left=('flags', 'bound'))}"


def _candidates(config: Config, chip: Chip, devices: Any, slices: int) -> Iterator[Candidate]:
    fields = typing.get_type_hints(ComputeConfig)
    policies, losses = (typing.get_args(fields[name]) for name in ("remat", "cross_entropy"))
    losses = [loss for loss in losses if loss != "auto"]  # which is one of the others
    length, causal = config.model.sizes()["position"], config.model.causal
    usual = block_of(length, chip.device_kind, causal=causal)
    blocks = [None, *(block for block in BLOCKS if length % block == 0 and block != usual)]
    sizes = [int(config.data.batch_size * factor) for factor in BATCHES]
    for mesh in _meshes(len(devices), slices, config.mesh):
        try:
            program = assemble(dataclasses.replace(config, mesh=mesh, accumulation_steps=1), devices)
        except MeshError:
            continue
        for remat, parts, size, loss in itertools.product(policies, MICROBATCHES, sizes, losses):
            if size % (parts * program.layout.ways("batch")):
                continue
            room = 0
            for block in blocks:
                how = {"remat": remat, "cross_entropy": loss, "attention_block": block}
                model = dataclasses.replace(config.model, compute=dataclasses.replace(config.model.compute, **how))
                data = dataclasses.replace(program.config.data, batch_size=size)
                changed = dataclasses.replace(program.config, model=model, data=data, accumulation_steps=parts)
                # The arrays of the state lie as before.
                estimated = dataclasses.replace(program, config=changed)
                room = room or sum(estimates.expected(estimated).values())
                yield Candidate(changed, _estimate(estimated, chip, slices), room)


def candidate(config: Config, chip: Chip, devices: Any, slices: int) -> Candidate:
    """A configuration as a candidate, its mesh filled in."""
    program = assemble(config, devices)
    mesh = dataclasses.replace(config.mesh, **{axis: program.mesh.shape[axis] for axis in AXES})
    made = dataclasses.replace(program.config, mesh=mesh)
    return Candidate(made, _estimate(program, chip, slices), sum(estimates.expected(program).values()))


def _meshes(devices: int, slices: int, mesh: MeshConfig) -> Iterator[MeshConfig]:
    """Every way to split the devices over data, fsdp, sequence and tensor; slices lie along data."""
    sizes = [n for n in range(1, devices + 1) if devices % n == 0]
    for data, fsdp, sequence, tensor in itertools.product(sizes, repeat=len(AXES)):
        if data * fsdp * sequence * tensor == devices and tensor <= MOST_TENSOR and data % slices == 0:
            yield dataclasses.replace(mesh, data=data, fsdp=fsdp, sequence=sequence, tensor=tensor)


def _estimate(program: Program, chip: Chip, slices: int) -> float:
    """Seconds of a step: products, and parameters sent, where the two do not overlap by a tenth; then what is waited for."""
    config, mesh = program.config, program.mesh.shape
    again = estimates.FORWARD_AGAIN[config.model.compute.remat]
    flops = estimates.model_flops(config) * (1 + again / 3) / program.mesh.size
    flops += estimates.attention_waste(program, chip)
    compute = flops / chip.peak_flops
    weights = 2 * program.definition.count() / mesh["tensor"]
    gathered = (2 + again) * weights * config.accumulation_steps
    rows = config.data.batch_size / (mesh["data"] * mesh["fsdp"])
    sizes = defaultdict(int, program.definition.sizes)
    positions = rows * sizes["position"] * sizes["layers"]
    stream = 2 * positions / mesh["sequence"] * sizes["embed"]
    keys = 4 * positions * sizes["kv_heads"] * sizes["head_dim"] / mesh["tensor"]
    ring = {axis: (size - 1) / size for axis, size in mesh.items()}
    network = (ring["fsdp"] * (gathered + 2 * weights) + ring["data"] * 4 * weights / mesh["fsdp"]) / chip.ici_bandwidth
    # What activations are summed or exchanged by is waited for, over one dimension of the torus.
    waited = ring["tensor"] * 2 * (4 + 2 * again) * stream + ring["sequence"] * (2 + again) * keys
    waits = waited * chip.torus / chip.ici_bandwidth
    if slices > 1 and chip.dcn_bandwidth:
        network += 2 * 2 * weights / mesh["fsdp"] / chip.dcn_bandwidth
    waits += loss_traffic(program) / chip.hbm_bandwidth
    return max(compute, network) + 0.1 * min(compute, network) + waits


def loss_traffic(program: Program) -> float:
    """Bytes of main memory that readout and loss read and write on one device, beside no product.

    Logits are written and read in both passes, the readout read and its gradient added to once a chunk: 16.9 GB plain and 41 GB
    chunked of lm-8b at 1 x 4096 tokens, by the TPU compiler. By parts of the vocabulary exponentials are kept, too, and the
    features and their gradient read for every part: 8 M cycles more than plain there, at 1.5 GHz 4.4 GB.
    """
    config, sizes, layout = program.config, program.definition.sizes, program.layout
    parts, width = config.accumulation_steps, sizes["embed"]
    outputs = sizes[config.model.output_axis] / layout.ways(config.model.output_axis)
    tokens = config.data.batch_size * config.model.units / layout.ways("batch") / layout.ways("sequence")
    traffic = 20 * tokens * outputs + 12 * estimates.loss_chunks(program) * parts * width * outputs
    if config.model.compute.cross_entropy != "vocab":
        return traffic
    return (
        traffic + 6 * tokens * outputs + 10 * tokens * width * len(vocabulary.parts(int(tokens) // parts, int(outputs)))
    )
