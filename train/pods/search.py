"""Search for the best configuration of a run on a pod.

All candidates are estimated, then a few that differ are compiled. A candidate is a mesh, remat
policy, number of microbatches, batch, loss and attention block, with its estimated time and memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import typing
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mupax import terminal
from mupax.terminal import counted, gib
from mupax.train.config.run import Config, MeshConfig
from mupax.train.core.costs import memory
from mupax.train.core.program import Program, assemble
from mupax.train.parallel.chips import Chip
from mupax.train.parallel.sharding import MeshError
from mupax.train.pods import estimates, topology
from mupax.train.pods.compiled import array_bytes_of_gpu, compile_for
from mupax.train.pods.refusals import RefusedError
from mupax.zoo import families
from mupax.zoo.configs import ComputeConfig
from mupax.zoo.layers.flash import block_of

AXES = ("data", "fsdp", "experts", "sequence", "tensor")
"""Mesh axes that a run is split over. The experts axis is not searched."""

MOST_TENSOR = 16
"""Widest tensor axis that is tried.

Beyond it, on every chip, a layer's sums over activations take longer than its matrix products.
"""

MICROBATCHES = (1, 2, 4, 8)
"""Numbers of microbatches that are tried."""

BATCHES = (0.5, 1, 2)
"""Batch sizes that are tried, as multiples of the run's own."""

BLOCKS = (512, 1024, 2048)
"""Sides of attention blocks that are tried in addition to the default for the chip.

A side must divide the number of positions, and a core's own memory must hold a block.
"""

BLOCK_BYTES = 5
"""Bytes of a core's own memory per pair of positions of an attention block.

They hold logits in float32, and queries, keys, values and sums. For blocks of 2048, the compiler of
v5e asked for 20 MiB.
"""

MOST_HOSTS = 128
"""Largest number of GPU hosts that `smallest_that_fits` tries."""

TIE = 0.1
"""Relative difference of two step times on GPUs that is a tie. Without a GPU nothing is timed, and
estimates are not closer than that."""

MOST_ROWS = 1000
"""Largest number of rows in a search's record for candidates that were only estimated.

Large pods have tens of thousands of candidates.
"""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Configuration with its estimates, before anything is compiled.

    Attributes:
        config: Config with every searched field set.
        seconds: Estimated time of a step.
        bytes: Estimated peak memory of one device.
    """

    config: Config
    seconds: float
    bytes: int

    @property
    def kinds(self) -> dict[str, Any]:
        """Values of the searched fields, by which `different` compares candidates.

        The keys are `axes` (mesh axes of more than one device), `fsdp`, `remat`, `microbatches`,
        `batch`, `loss`, `block` (`None` is the default for the chip) and `xla_flags`.
        """
        config = self.config
        compute = config.model.compute
        return {
            "axes": tuple(axis for axis in AXES if getattr(config.mesh, axis) > 1),
            "fsdp": config.mesh.fsdp,
            "remat": compute.remat,
            "microbatches": config.accumulation_steps,
            "batch": config.data.batch_size,
            "loss": compute.cross_entropy,
            "block": compute.attention_block,
            "xla_flags": config.xla_flags,
        }

    @property
    def pace(self) -> float:
        """Seconds per example, by which candidates of different batches are compared."""
        return self.seconds / self.config.data.batch_size

    @property
    def words(self) -> str:
        """Flags that make this configuration."""
        kinds = self.kinds
        flags = []
        for axis in AXES:
            size = getattr(self.config.mesh, axis)
            if size > 1 or axis == "data":
                flags.append(f"--mesh.{axis} {size}")
        flags += [
            f"--model.compute.remat {kinds['remat']}",
            f"--accumulation-steps {kinds['microbatches']}",
            f"--data.batch-size {kinds['batch']}",
            f"--model.compute.cross-entropy {kinds['loss']}",
        ]
        if kinds["block"]:
            flags.append(f"--model.compute.attention-block {kinds['block']}")
        if kinds["xla_flags"] != "auto":
            flags.append(f"--xla-flags {kinds['xla_flags']}")
        return " ".join(flags)


def candidates(
    config: Config, chip: Chip, devices: Any, slices: int, batches: Sequence[float] = BATCHES
) -> Iterator[Candidate]:
    """Yield every configuration that splits over the devices, with its estimates.

    The mesh, remat policy, microbatches, batch size, loss and attention block vary, on GPUs also
    the compiler flags. Configurations that do not divide evenly are left out.

    Args:
        devices: Result of `topology.devices`.
        slices: Number of slices, joined by the slow network.
        batches: Batch sizes to try, as multiples of the run's own.
    """
    fields = typing.get_type_hints(ComputeConfig)
    policies = typing.get_args(fields["remat"])
    # "auto" chooses one of the other losses, so it would be a second candidate of the same step.
    losses = []
    for loss in typing.get_args(fields["cross_entropy"]):
        if loss != "auto":
            losses.append(loss)
    blocks = _blocks(config, chip)
    batch_sizes = [int(config.data.batch_size * factor) for factor in batches]
    # Compiler flags are compared on GPUs, whose step they change more than that of a TPU.
    flag_choices = [config.xla_flags]
    if chip.gpu is not None and config.xla_flags == "auto":
        flag_choices.append("none")
    for mesh in _meshes(len(devices), slices, config.mesh):
        split = dataclasses.replace(config, mesh=mesh, accumulation_steps=1)
        try:
            program = assemble(split, devices)
        except MeshError:
            continue

        num_shards = program.layout.num_shards("batch")
        choices = itertools.product(policies, MICROBATCHES, batch_sizes, losses)
        for remat, num_microbatches, batch_size, loss in choices:
            if batch_size % (num_microbatches * num_shards):
                continue
            data = dataclasses.replace(program.config.data, batch_size=batch_size)
            peak = 0
            for block in blocks:
                compute = dataclasses.replace(
                    config.model.compute, remat=remat, cross_entropy=loss, attention_block=block
                )
                changed = dataclasses.replace(
                    program.config,
                    model=dataclasses.replace(config.model, compute=compute),
                    data=data,
                    accumulation_steps=num_microbatches,
                )
                # The arrays of the state have the same shardings, so the program is reused.
                estimated = dataclasses.replace(program, config=changed)
                # The estimate of memory does not depend on attention blocks.
                peak = peak or sum(estimates.expected(estimated).values())
                for flags in flag_choices:
                    flagged = dataclasses.replace(changed, xla_flags=flags)
                    estimated = dataclasses.replace(program, config=flagged)
                    yield Candidate(flagged, estimate(estimated, chip, slices), peak)


def _blocks(config: Config, chip: Chip) -> list[int | None]:
    """Return the sides of attention blocks to try, in positions.

    `None` among them is the kernel's default for the chip. On GPUs it is the only one.
    """
    # Only the TPU's attention kernel has a block size that can be set.
    if chip.gpu is not None:
        return [None]
    length = config.model.sizes()["position"]
    usual = block_of(length, chip.device_kind, causal=config.model.causal)
    core_bytes = 2**10 * estimates.operation_kib(config, chip)
    blocks: list[int | None] = [None]
    for block in BLOCKS:
        fits = BLOCK_BYTES * block**2 <= core_bytes
        if fits and length % block == 0 and block != usual:
            blocks.append(block)
    return blocks


def candidate(config: Config, chip: Chip, devices: Any, slices: int) -> Candidate:
    """Return a config with its estimates, and with open axes (-1) of its mesh filled in.

    Args:
        devices: Result of `topology.devices`.
        slices: Number of slices, joined by the slow network.

    Raises:
        ConfigError, PresetError, MeshError: `assemble` refuses the config.
    """
    program = assemble(config, devices)
    sizes = {axis: program.mesh.shape[axis] for axis in AXES}
    mesh = dataclasses.replace(config.mesh, **sizes)
    seconds = estimate(program, chip, slices)
    peak = sum(estimates.expected(program).values())
    return Candidate(dataclasses.replace(program.config, mesh=mesh), seconds, peak)


def _meshes(devices: int, slices: int, mesh: MeshConfig) -> Iterator[MeshConfig]:
    """Yield every split of the devices over data, fsdp, sequence and tensor.

    The experts axis keeps its size, which must divide the number of devices. Slices are along data,
    whose size they divide. The tensor axis is at most `MOST_TENSOR`.
    """
    devices //= mesh.experts
    sizes = [size for size in range(1, devices + 1) if devices % size == 0]
    for data, fsdp, sequence, tensor in itertools.product(sizes, repeat=4):
        if data * fsdp * sequence * tensor != devices or data % slices:
            continue
        if tensor <= MOST_TENSOR:
            yield dataclasses.replace(mesh, data=data, fsdp=fsdp, sequence=sequence, tensor=tensor)


def estimate(program: Program, chip: Chip, slices: int) -> float:
    """Estimate the seconds of a step.

    Matrix products and the sending of parameters overlap, except for a tenth of the shorter. Sums
    and exchanges of activations, and the loss, are waited for.

    Args:
        slices: Number of slices, joined by the slow network.
    """
    config = program.config
    mesh = program.mesh.shape
    again = memory.FORWARD_AGAIN[config.model.compute.remat]
    # Model FLOPs are three forward passes: one forward, and two for the backward pass.
    products = estimates.model_flops(config) * (1 + again / 3) / program.mesh.size
    compute = (products + estimates.attention_waste(program, chip)) / chip.peak_flops

    # All sizes are bytes on one device, 2 per number. `keys` has both keys and values.
    weights = 2 * program.definition.count() / mesh["tensor"]
    rows = config.data.batch_size / program.layout.num_shards("batch")
    sizes = defaultdict(int, program.definition.sizes)
    summed = 0
    read = 0
    for blocks in families.stacks(config.model):
        num_branches = len(blocks.stack.branches)
        summed += blocks.depth * (num_branches * blocks.length + blocks.memory)
        read += blocks.depth * (blocks.length + blocks.memory)
    stream = 2 * rows * summed / mesh["sequence"] * sizes["embed"]
    keys = 4 * rows * read * sizes["kv_heads"] * sizes["head_dim"] / mesh["tensor"]

    # A ring of n devices sends (n - 1) / n of an array.
    ring = {}
    for axis, size in mesh.items():
        ring[axis] = (size - 1) / size
    # A device gathers and sums only its own experts; tokens are sent to experts and back.
    weights -= 2 * estimates.expert_weights(program.definition) / mesh["tensor"] * ring["experts"]
    gathered = (2 + again) * weights * config.accumulation_steps
    over_fsdp = ring["fsdp"] * (gathered + 2 * weights)
    over_data = ring["data"] * 4 * weights / mesh["fsdp"]
    speeds = _bandwidths(program, chip)
    network = over_fsdp / speeds["fsdp"] + over_data / speeds["data"]

    # Each token goes to `active` experts and back. `stream` counts two branches per block, so it
    # already has both directions.
    copies = sizes["active"] * stream
    waited = {
        "tensor": ring["tensor"] * 2 * (2 + again) * stream,
        "sequence": ring["sequence"] * (2 + again) * keys,
        "experts": ring["experts"] * (2 + again) * copies,
    }
    # Activations are sent along one dimension of the torus, if there is one.
    dimensions = max(1, chip.torus)
    waiting_seconds = []
    for axis, size in waited.items():
        waiting_seconds.append(size * dimensions / speeds[axis])
    waits = sum(waiting_seconds)
    if slices > 1 and chip.dcn_bandwidth:
        network += 2 * 2 * weights / mesh["fsdp"] / chip.dcn_bandwidth
    loss = memory.loss(config, program.definition, program.layout)
    loss_seconds = loss.traffic / chip.hbm_bandwidth + loss.again / chip.peak_flops
    waits += config.accumulation_steps * loss_seconds
    if chip.gpu is not None and config.xla_flags == "none":
        # Without XLA's flags for overlap, a GPU runs collectives between products, so times add up.
        return compute + network + waits
    return max(compute, network) + 0.1 * min(compute, network) + waits


def smallest_that_fits(config: Config, chip: Chip) -> tuple[str, Candidate] | None:
    """Return the smallest topology of GPUs that a run is expected to fit, with its configuration.

    All parameters and optimizer state are split over all GPUs (fsdp). A run is expected to fit if
    the estimate of its memory is at most `ROOM` of what JAX leaves arrays. Parts of one host are
    tried first, then 2, 4, 8 and more complete hosts. Nothing is compiled.

    Args:
        chip: GPU. Chips of TPUs are not accepted.

    Returns:
        Topology such as h100:2x8 and the candidate, or `None` if `MOST_HOSTS` hosts are too few.
    """
    assert chip.gpu is not None
    memory_budget = topology.ROOM * array_bytes_of_gpu(chip, num_communicators=1)
    full = chip.gpu.per_host
    shapes = []
    for gpus in range(1, full + 1):
        if full % gpus == 0:
            shapes.append(str(gpus))
    hosts = 2
    while hosts <= MOST_HOSTS:
        shapes.append(f"{hosts}x{full}")
        hosts *= 2
    split = dataclasses.replace(
        config, mesh=dataclasses.replace(config.mesh, data=1, fsdp=-1, sequence=1, tensor=1)
    )
    for shape in shapes:
        name = f"{chip.name}:{shape}"
        try:
            plan = candidate(split, chip, topology.devices(name), 1)
        except MeshError:
            continue
        if plan.bytes <= memory_budget:
            return name, plan
    return None


def _bandwidths(program: Program, chip: Chip) -> dict[str, float]:
    """Return the bytes per second that a device sends along each mesh axis.

    The axes of GPUs that cross hosts use the slow network. For axes that cross TPU slices, the
    result is the speed within a slice.
    """
    slow = {}
    if chip.gpu is not None:
        slow = topology.across(program.mesh)
    speeds = {}
    for axis in program.mesh.shape:
        speeds[axis] = chip.ici_bandwidth
        if axis in slow and chip.dcn_bandwidth:
            speeds[axis] = chip.dcn_bandwidth
    return speeds


def search(
    config: Config,
    name: str,
    slices: int,
    limit: int,
    batches: Sequence[float] = BATCHES,
    keep: Callable[[dict[str, Any]], object] = lambda record: None,
) -> list[dict[str, Any]]:
    """Compile promising configurations of several kinds, and return their reports.

    Progress is printed. The run as configured is compiled first, for comparison, if its own mesh
    divides its batch.

    Args:
        config: Config of the run. Its mesh, batch, remat policy, microbatches, loss and attention
            blocks are replaced.
        name: Topology, such as v5e:16x16.
        slices: Number of slices, joined by the slow network.
        limit: Most programs to compile, at least 2. The other candidates are only estimated.
        batches: Batch sizes to try, as multiples of the run's own.
        keep: Function that gets the record of what was tried, before the first compilation and
            after each. It is one dict, which changes in place, with the keys `recipe`, `topology`,
            `slices`, `estimated` (the number of candidates) and `rows` (see `record`).

    Returns:
        Reports of `mupax.train.pods.compiled.Compiled`, in which `flags` are the command's and
        `compiler_flags` the compiler's. Those that fit come first, the least time per example
        first. Configurations that the compiler refuses have none.

    Raises:
        MeshError: No mesh of these axes fits the model and batch, or `mesh.experts` fits neither.
        RefusedError: The compiler refuses all configurations that were tried.
    """
    chip = topology.chip_of(name)
    devices = topology.devices(name, slices)
    _check_experts(config, len(devices) // slices)
    tried = list(candidates(config, chip, devices, slices, batches))
    if not tried:
        raise MeshError(
            f"no mesh of {counted(len(devices), 'chip')} fits this model and batch; "
            "write another --data.batch-size"
        )
    memory_budget = topology.ROOM * chip.hbm_bytes
    if chip.gpu is not None:
        # NCCL's buffers depend on the mesh, which differs by candidate, so none are subtracted
        # here.
        memory_budget = topology.ROOM * array_bytes_of_gpu(chip, num_communicators=0)
    fitting = [plan for plan in tried if plan.bytes <= memory_budget]
    if fitting:
        ranked = sorted(fitting, key=lambda plan: plan.pace)
    else:
        # The smallest are tried all the same, because the estimate may be wrong.
        ranked = sorted(tried, key=lambda plan: plan.bytes)
    chosen = different(ranked, limit)
    # The run's own mesh may not divide its batch. Then it is left out.
    with contextlib.suppress(MeshError):
        chosen = [candidate(config, chip, devices, slices), *chosen][:limit]

    minutes = max(1, round(_compile_seconds(chosen, chip, devices) / 60))
    terminal.say(
        f"{len(tried)} configurations, {len(fitting)} expected to fit; "
        f"compiling {len(chosen)}: about {minutes} min of one core"
    )
    rows = record(tried, chosen, memory_budget)
    contents = {
        "recipe": config.recipe,
        "topology": name,
        "slices": slices,
        "estimated": len(tried),
        "rows": rows,
    }
    # Keep the record before compiling, which takes long and may be interrupted.
    keep(contents)

    reports = []
    refusal = None
    for index, plan in enumerate(chosen):
        expected = f"(expected {plan.seconds:.3g} s, {gib(plan.bytes)})"
        terminal.say(f"{index + 1}/{len(chosen)}  {plan.words}  {expected}")
        try:
            report = compile_for(plan.config, name, slices).report()
        except RefusedError as error:
            terminal.say(f"     {error}")
            refusal = error
            rows[index] |= {"outcome": "refused", "reason": str(error)}
            keep(contents)
            continue

        roofline = report["roofline"]
        result = f", {roofline['step_seconds']:.3g} s" if roofline else ", does not fit"
        terminal.say(f"     {gib(report['peak_bytes_per_device'])}{result}")
        figures = {figure: report.get(figure) for figure in FIGURES}
        rows[index] |= {"outcome": "compiled", **figures}
        keep(contents)
        # `flags` of the report are those of the compiler. The command's flags replace them below.
        report["compiler_flags"] = report.get("flags")
        plan_entries = {
            "flags": plan.words,
            "kinds": plan.kinds,
            "expected_seconds": plan.seconds,
            "topology": name,
            "slices": slices,
        }
        reports.append({**report, **plan_entries})
    if not reports:
        assert refusal is not None
        raise refusal
    return sorted(reports, key=_rank)


def _check_experts(config: Config, num_chips: int) -> None:
    """Raise `MeshError` if the experts axis, which is not searched, fits no mesh of a slice."""
    size = config.mesh.experts
    if size == 1:
        return
    common = num_chips
    divided = counted(num_chips, "chip")
    # Rules of the user may split something else along this axis.
    if not config.mesh.rules:
        num_experts = config.model.sizes().get("experts")
        if num_experts is None:
            raise MeshError(
                f"mesh.experts is {size} and the model has no experts; write --mesh.experts 1, or "
                "--model.experts too"
            )
        common = math.gcd(num_chips, num_experts)
        divided += f" and the model's {num_experts} experts"
    if size < 1 or common % size:
        fitting = [str(part) for part in range(1, common + 1) if common % part == 0]
        raise MeshError(
            f"the search keeps mesh.experts, and {size} does not divide {divided}; "
            f"write --mesh.experts {' or '.join(fitting)}"
        )


def _compile_seconds(chosen: Sequence[Candidate], chip: Chip, devices: Any) -> float:
    """Estimate the processor seconds for compiling the candidates, from the first one's size."""
    if chip.gpu is not None:
        return len(chosen) * estimates.GPU_COMPILE_SECONDS
    first = chosen[0].config
    program_bytes = len(assemble(first, devices).trace_train().lower().as_text())
    kib = estimates.operation_kib(first, chip)
    return len(chosen) * estimates.compile_seconds(program_bytes, kib)


def _rank(report: dict[str, Any]) -> tuple[bool, float]:
    """Return the key that sorts reports: those that fit first, then by seconds per example."""
    roofline = report["roofline"] or {}
    seconds = roofline.get("step_seconds", math.inf)
    return not report["fits"], seconds / report["batch_size"]


FIGURES = (
    "fits",
    "problems",
    "roofline",
    "peak_bytes_per_device",
    "argument_bytes_per_device",
    "temporary_bytes_per_device",
    "estimated_cycles",
    "hbm_traffic_per_device",
    "compile_seconds",
)
"""Keys of a compiled step's report that `search` copies into its record."""


def record(
    tried: Sequence[Candidate], chosen: Sequence[Candidate], room: float
) -> list[dict[str, Any]]:
    """Return a row per candidate: those to compile in their order, then the best of the others.

    A row has the command's `flags`, `expected_seconds` of a step, `expected_bytes` of a device,
    `expected_to_fit`, and `outcome`, which is "estimated" until `search` has compiled it.

    Args:
        tried: All candidates that were estimated. At most `MOST_ROWS` of those not chosen get a
            row.
        room: Bytes of a chip that an estimate may take.
    """
    chosen_ids = {id(plan) for plan in chosen}
    remaining = [plan for plan in tried if id(plan) not in chosen_ids]
    remaining.sort(key=lambda plan: (plan.bytes > room, plan.pace))
    rows = []
    for plan in (*chosen, *remaining[:MOST_ROWS]):
        rows.append(
            {
                "flags": plan.words,
                "expected_seconds": plan.seconds,
                "expected_bytes": plan.bytes,
                "expected_to_fit": plan.bytes <= room,
                "outcome": "estimated",
            }
        )
    return rows


def different(ranked: list[Candidate], limit: int) -> list[Candidate]:
    """Return up to `limit` candidates of `ranked`, which has the best first and is not empty.

    They are the best, then for each setting the best that differs in it, then the next best.

    Near copies of the best differ by less than the error of the estimates. Candidates that differ
    show in which direction the estimates are wrong.
    """
    best = ranked[0].kinds
    variants = []
    for name in best:
        for plan in ranked:
            if plan.kinds[name] != best[name]:
                variants.append(plan)
                break
    # One variant may differ in several settings, and counts once.
    chosen = {id(plan): plan for plan in (ranked[0], *variants, *ranked)}
    return list(chosen.values())[:limit]


def table(reports: list[dict[str, Any]], title: str) -> str:
    """Return the reports of `search` as a table, in their order.

    A line below says how many of the best reports of GPUs are a tie.

    Args:
        reports: Result of `search`, best first.
    """
    rows = [("flags", "fits", "memory", "expected", "step", "alone", "bound", "MFU")]
    for report in reports:
        step = alone = bound = mfu = "-"
        roofline = report["roofline"]
        if roofline:
            step = f"{roofline['step_seconds']:.3g} s"
            alone = f"{roofline['alone']:.3g} s"
            bound = roofline["bound"].replace("_", " ")
            mfu = f"{roofline['mfu']:.1%}"
        fits = "yes" if report["fits"] else "no"
        peak = gib(report["peak_bytes_per_device"])
        expected = f"{report['expected_seconds']:.3g} s"
        rows.append((report["flags"], fits, peak, expected, step, alone, bound, mfu))
    text = f"{title}\n{terminal.table(rows, left=('flags', 'bound'))}"
    num_ties = _num_ties(reports)
    if num_ties > 1:
        text += (
            f"\nthe first {num_ties} are a tie: within {TIE:.0%} of each other, and none was timed"
        )
    return text


def _num_ties(reports: list[dict[str, Any]]) -> int:
    """Return the number of GPU reports that fit and are within `TIE` of the best time per example.

    The best report, the first one, is counted if it fits. The result is 0 for TPUs.
    """
    _, best = _rank(reports[0])
    num_ties = 0
    for report in reports:
        is_worse, pace = _rank(report)
        if report["platform"] == "gpu" and not is_worse and pace <= (1 + TIE) * best:
            num_ties += 1
    return num_ties
