"""How a run should lie on a pod: candidates by what is expected of them, then a few that differ compiled.

A candidate is a mesh, remat, microbatches, batch, loss and blocks, with what it is expected to take.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import typing
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mupax import terminal
from mupax.terminal import gib
from mupax.train.config.run import Config, MeshConfig
from mupax.train.core.costs import memory
from mupax.train.core.program import Program, assemble
from mupax.train.parallel.chips import Chip
from mupax.train.parallel.sharding import MeshError
from mupax.train.pods import estimates, topology
from mupax.train.pods.compiled import compile_for
from mupax.train.pods.refusals import RefusedError
from mupax.zoo import families
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

ROOM = 0.75
"""Share of a chip's memory that may be expected to be taken: of lm-8b on v5e:8x8 the compiler took 1.1 to 1.4 times as much."""

MOST_ROWS = 1000
"""Configurations of a record that were estimated alone, the best first: there are tens of thousands for hundreds of chips."""


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
        axes = " ".join(
            f"--mesh.{axis} {size}" for axis, size in sizes.items() if size > 1 or axis == "data"
        )
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
            program = assemble(
                dataclasses.replace(config, mesh=mesh, accumulation_steps=1), devices
            )
        except MeshError:
            continue
        for remat, parts, size, loss in itertools.product(policies, MICROBATCHES, sizes, losses):
            if size % (parts * program.layout.num_shards("batch")):
                continue
            peak = 0
            for block in blocks:
                how = {"remat": remat, "cross_entropy": loss, "attention_block": block}
                model = dataclasses.replace(
                    config.model, compute=dataclasses.replace(config.model.compute, **how)
                )
                data = dataclasses.replace(program.config.data, batch_size=size)
                changed = dataclasses.replace(
                    program.config, model=model, data=data, accumulation_steps=parts
                )
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
    return Candidate(
        config, estimate(program, chip, slices), sum(estimates.expected(program).values())
    )


def _meshes(devices: int, slices: int, mesh: MeshConfig) -> Iterator[MeshConfig]:
    """Every way to split the devices over data, fsdp, sequence and tensor; slices lie along data."""
    devices //= mesh.experts
    sizes = [n for n in range(1, devices + 1) if devices % n == 0]
    for data, fsdp, sequence, tensor in itertools.product(sizes, repeat=4):
        if (
            data * fsdp * sequence * tensor == devices
            and tensor <= MOST_TENSOR
            and data % slices == 0
        ):
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
    rows = config.data.batch_size / program.layout.num_shards("batch")
    sizes = defaultdict(int, program.definition.sizes)
    stacks = families.stacks(config.model)
    summed = sum(
        blocks.depth * (len(blocks.stack.branches) * blocks.length + blocks.memory)
        for blocks in stacks
    )
    read = sum(blocks.depth * (blocks.length + blocks.memory) for blocks in stacks)
    stream = 2 * rows * summed / mesh["sequence"] * sizes["embed"]
    keys = 4 * rows * read * sizes["kv_heads"] * sizes["head_dim"] / mesh["tensor"]
    ring = {axis: (size - 1) / size for axis, size in mesh.items()}
    # Of experts a device gathers and sums its own; tokens are sent to them and back.
    weights -= 2 * estimates.expert_weights(program.definition) / mesh["tensor"] * ring["experts"]
    gathered = (2 + again) * weights * config.accumulation_steps
    network = (
        ring["fsdp"] * (gathered + 2 * weights) + ring["data"] * 4 * weights / mesh["fsdp"]
    ) / chip.ici_bandwidth
    # What activations are summed or exchanged by is waited for, over one dimension of the torus.
    copies = (
        sizes["active"] * stream
    )  # of a block's stream, there and back; it is counted for two branches
    waited = ring["tensor"] * 2 * (2 + again) * stream + ring["sequence"] * (2 + again) * keys
    waited += ring["experts"] * (2 + again) * copies
    waits = waited * chip.torus / chip.ici_bandwidth
    if slices > 1 and chip.dcn_bandwidth:
        network += 2 * 2 * weights / mesh["fsdp"] / chip.dcn_bandwidth
    loss = memory.loss(config, program.definition, program.layout)
    waits += config.accumulation_steps * (
        loss.traffic / chip.hbm_bandwidth + loss.again / chip.peak_flops
    )
    return max(compute, network) + 0.1 * min(compute, network) + waits


def search(
    config: Config,
    name: str,
    slices: int,
    limit: int,
    batches: Sequence[float] = BATCHES,
    keep: Callable[[dict[str, Any]], object] = lambda record: None,
) -> list[dict[str, Any]]:
    """Reports of promising configurations of several kinds, compiled one by one; how it goes is printed.

    Args:
        config: the run; its mesh, batch, remat policy, microbatches, loss and attention blocks are replaced.
        name: topology.
        slices: how many of them.
        limit: programs to compile, one of them the run's own; the others are only estimated.
        batches: that are tried, as multiples of the run's own.
        keep: told the record of what was tried, before the first is compiled and after each.

    Returns:
        Reports of `mupax.train.pods.compiled.Compiled`, those that fit first, fastest first, with the flags that make them.

    Raises:
        MeshError: no mesh of these axes fits the model and batch.
        RefusedError: the compiler refuses all that were tried.
    """
    chip, devices = topology.chip_of(name), topology.devices(name, slices)
    tried = list(candidates(config, chip, devices, slices, batches))
    if not tried:
        raise MeshError(
            f"no mesh of {len(devices)} chips fits this model and batch; write another --data.batch-size"
        )
    room = [one for one in tried if one.bytes <= ROOM * chip.hbm_bytes]
    # Where nothing is expected to fit, the smallest are tried: the estimate may be wrong.
    chosen = different(
        sorted(room or tried, key=lambda one: one.pace if room else one.bytes), limit
    )
    chosen = [candidate(config, chip, devices, slices), *chosen][
        : max(2, limit)
    ]  # beside the run as it stands
    lowered = assemble(chosen[0].config, devices).trace_train().lower().as_text()
    seconds = len(chosen) * estimates.compile_seconds(
        len(lowered), estimates.operation_kib(config, chip)
    )
    minutes = max(1, round(seconds / 60))
    terminal.say(
        f"{len(tried)} configurations, {len(room)} expected to fit; compiling {len(chosen)}: about {minutes} min of one core"
    )
    reports, refusals = [], []
    rows = record(tried, chosen, ROOM * chip.hbm_bytes)
    about = {
        "recipe": config.recipe,
        "topology": name,
        "slices": slices,
        "estimated": len(tried),
        "rows": rows,
    }
    keep(about)
    for number, one in enumerate(chosen, 1):
        expected = f"(expected {one.seconds:.3g} s, {gib(one.bytes)})"
        terminal.say(f"{number}/{len(chosen)}  {one.words}  {expected}")
        try:
            report = compile_for(one.config, name, slices).report()
        except RefusedError as error:
            terminal.say(f"     {error}")
            refusals.append(error)
            rows[number - 1] |= {"outcome": "refused", "reason": str(error)}
            keep(about)
            continue
        step = report["roofline"] and f", {report['roofline']['step_seconds']:.3g} s"
        terminal.say(f"     {gib(report['peak_bytes_per_device'])}{step or ', does not fit'}")
        # Its own `flags` are the compiler's.
        report["compiler_flags"] = report.get("flags")
        mine = {
            "flags": one.words,
            "kinds": one.kinds,
            "expected_seconds": one.seconds,
            "topology": name,
        }
        reports.append({**report, **mine, "slices": slices})
        figures = {name: report.get(name) for name in FIGURES}
        rows[number - 1] |= {"outcome": "compiled", **figures}
        keep(about)
    if not reports:
        raise refusals[-1]

    def pace(report: dict[str, Any]) -> float:
        return (report["roofline"] or {}).get("step_seconds", math.inf) / report["batch_size"]

    return sorted(reports, key=lambda report: (not report["fits"], pace(report)))


FIGURES = (
    *(
        "fits",
        "problems",
        "roofline",
        "peak_bytes_per_device",
        "argument_bytes_per_device",
        "temporary_bytes_per_device",
    ),
    *("estimated_cycles", "hbm_traffic_per_device", "compile_seconds"),
)
"""What a record has of a report."""


def record(
    tried: Sequence[Candidate], chosen: Sequence[Candidate], room: float
) -> list[dict[str, Any]]:
    """A row of each candidate, those to be compiled first and in their order, then the `MOST_ROWS` best of the others.

    Args:
        tried: all that were estimated.
        chosen: those that are compiled.
        room: bytes of a chip that may be expected to be taken.
    """
    compiled = {id(one) for one in chosen}
    rest = sorted(
        (one for one in tried if id(one) not in compiled),
        key=lambda one: (one.bytes > room, one.pace),
    )
    return [
        {
            "flags": one.words,
            "expected_seconds": one.seconds,
            "expected_bytes": one.bytes,
            "expected_to_fit": one.bytes <= room,
            "outcome": "estimated",
        }
        for one in (*chosen, *rest[:MOST_ROWS])
    ]


def different(ranked: list[Candidate], limit: int) -> list[Candidate]:
    """The best candidate, then of each thing it decides the best that decides it otherwise, then the best of what is left.

    Near copies of the best would differ by less than the estimates are wrong; these show in which direction they are.

    Args:
        ranked: candidates, the best first.
        limit: most that are returned.
    """
    best = ranked[0].kinds
    variants = (
        next((one for one in ranked if one.kinds[name] != best[name]), None) for name in best
    )
    chosen = {id(one): one for one in (ranked[0], *variants, *ranked) if one is not None}
    return list(chosen.values())[:limit]


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
        rows.append(
            (report["flags"], fits, memory, expected, step, alone, bound.replace("_", " "), mfu)
        )
    return f"{title}\n{terminal.table(rows, left=('flags', 'bound'))}"
