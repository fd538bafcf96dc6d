"""One configuration compiled for a topology, and everything that the compiled program says about itself.

Its buffers come from the compiler's own buffer assignment: contents of temporary memory when it is fullest, by name. Its problems
are what a compiled step must not do: gather a whole stack of layers, replicate optimizer state, or send more than its mesh asks.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mupax.terminal import gib
from mupax.train.config.run import Config
from mupax.train.core import loss
from mupax.train.core.costs import memory
from mupax.train.core.program import Program, assemble
from mupax.train.parallel.chips import Chip
from mupax.train.pods import estimates, hlo, topology
from mupax.train.pods.hlo import Collective, collectives, table
from mupax.train.pods.refusals import refused
from mupax.zoo import families
from mupax.zoo.families import Remat
from mupax.zoo.layers.flash import block_of

SLACK = 1.02
"""Bytes sent inside the layer loop over those required: norms, losses and other small sums."""

_RECOMPUTED: dict[Remat, int] = {"none": 0, "dots": 1, "attention": 1, "block": 1, "offload": 1}
"""Forward passes of a block that the backward pass may need again, and then its parameters too."""


MOST_ARGUMENTS, NUMBERS = 1.05, 2**17
"""Bytes of a step's arguments over those of state and batch, and those of its numbers (a tile each): what is more is padding."""

_ALLOCATION = re.compile(r"^allocation \d+: size (\d+)(?:, color (\d+))?, (.*?):?$")
_VALUE = re.compile(r"^ value: <\d+ ([^@]*?)(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)$")
_RANGE = re.compile(r"^    ([^:]+):(\d+)-(\d+)$")

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)"
_USED = re.compile(rf"Used {_SIZE} of {_SIZE} hbm")
_TEMPORARIES = re.compile(rf"temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)")
NAMED_SHARE = 0.01
"""Temporaries of at least this share of the peak are named in a report."""


def problems(
    program: Program, collectives: Sequence[Collective], state_shardings: Any, arguments: int
) -> list[str]:
    """Everything wrong with a compiled step, in words; empty where nothing is.

    Args:
        program: what was compiled.
        collectives: its.
        state_shardings: how the compiled step takes its state, in the state's structure.
        arguments: bytes that it takes on a device.
    """
    specs, abstract = program.definition.specs, program.definition.abstract
    stacks = {
        n: abstract[n].shape
        for n, spec in specs.items()
        if spec.in_block and spec.fan_in and len(spec.axes) > 2
    }
    stacked = whole_stacks(collectives, stacks, program.mesh.shape["tensor"])
    expected = estimates.expected(program)
    return [
        *stacked,
        *whole_moments(program, state_shardings),
        *unrequired(program, collectives),
        *padding(arguments, expected["state"] + expected["batch"]),
    ]


def padding(arguments: int, needed: int) -> list[str]:
    """A line where a step's arguments take more memory than what is in them.

    Args:
        arguments: bytes that the compiled step takes on a device.
        needed: bytes of its state and batch there.
    """
    if arguments <= MOST_ARGUMENTS * needed + NUMBERS:
        return []
    return [
        f"arguments are {gib(arguments)} for {gib(needed)} of state and batch: layouts are padded"
    ]


def whole_stacks(
    collectives: Iterable[Collective], stacks: Mapping[str, tuple[int, ...]], ways: int = 1
) -> list[str]:
    """All-gathers of the parameters of all layers at once: memory that scanning over layers is there to save.

    Args:
        collectives: of a program.
        stacks: parameter to shape, layers first.
        ways: parts that a matrix stays split into.
    """
    return [
        f"{one.name} gathers all layers of {name} at once: {dims}"
        for one in collectives
        if one.kind == "all-gather"
        for dims in one.results
        for name, shape in stacks.items()
        if shape[0] in dims and math.prod(dims) * ways == math.prod(shape)
    ]


def whole_moments(program: Program, state_shardings: Any) -> list[str]:
    """Optimizer state of which a device holds more than of the parameter it belongs to, a line each.

    Args:
        program: what was compiled: its `abstract` says how parameters lie.
        state_shardings: how the compiled step takes its state, in the state's structure.
    """
    params = program.abstract.params
    leaves = jax.tree_util.tree_leaves_with_path(program.abstract.opt_state)
    placed = jax.tree.leaves(state_shardings.opt_state)
    wrong = []
    for (path, leaf), sharding in zip(leaves, placed, strict=True):
        name = getattr(path[-1], "key", None)
        if name not in params or params[name].shape != leaf.shape:
            continue
        held, split = (each.shard_shape(leaf.shape) for each in (sharding, params[name].sharding))
        if math.prod(held) > math.prod(split):
            wrong.append(
                f"the optimizer's {jax.tree_util.keystr(path)} is {held} on a device, its parameter {split}"
            )
    return wrong


def unrequired(program: Program, collectives: Iterable[Collective]) -> list[str]:
    """Mesh axes over which the layer loop sends more than it must, a line each.

    Args:
        program: what was compiled; `required` says what it must send.
        collectives: of its compiled step; those outside loops over layers are passed over.
    """
    allowed, config, sizes = required(program), program.config, program.definition.sizes
    stacks = families.stacks(config.model)
    layers = {
        blocks.depth - out for blocks in stacks for out in (0, 1)
    }  # the compiler may take one layer out of the loop
    # Norm gains, biases and row statistics: a few vectors per layer and position.
    each = config.data.batch_size / program.mesh.size
    vectors = sum(
        blocks.depth * (sizes["embed"] + each * (blocks.length + blocks.memory))
        for blocks in stacks
    )
    small = 64.0 * config.accumulation_steps * vectors
    inside: dict[tuple[str, ...], list[Collective]] = defaultdict(list)
    for one in collectives:
        if layers & set(one.trips):
            inside[one.axes].append(one)
    return [
        f"over {' x '.join(axes)} the layer loop sends {size:.3g} bytes, and needs {allowed.get(axes, 0.0):.3g} "
        f"({', '.join(one.name for one in sent[:5])})"
        for axes, sent in inside.items()
        if (size := sum(one.bytes * one.times for one in sent))
        > SLACK * allowed.get(axes, 0.0) + small
    ]


def required(program: Program) -> dict[tuple[str, ...], float]:
    """Bytes that the layer loop of one step must send at most, by the mesh axes they are sent over, whole arrays counted."""
    config, mesh, model = program.config, program.mesh.shape, program.config.model
    itemsize = jnp.dtype(model.compute.dtype).itemsize
    again = _RECOMPUTED[model.compute.remat]
    specs, abstract = program.definition.specs, program.definition.abstract
    count = (
        sum(abstract[name].size for name, spec in specs.items() if spec.in_block) / mesh["tensor"]
    )
    # Of experts a device has its own alone; all else is split by their axis too.
    own = estimates.expert_weights(program.definition) / mesh["tensor"]
    split = {"own": own / mesh["experts"], "others": count - own}
    # Every device of a group sums its own gradient, which may be in float32.
    gradients = count * 4 * config.accumulation_steps
    each = {
        name: n * ((2 + again) * itemsize + 4) * config.accumulation_steps
        for name, n in split.items()
    }
    shared = tuple(axis for axis in ("fsdp", "experts") if mesh[axis] > 1) or ("fsdp",)
    rows = config.data.batch_size / program.layout.num_shards("batch")
    sizes = defaultdict(int, program.definition.sizes)
    stacks = families.stacks(model)
    positions = rows * itemsize * sum(blocks.depth * blocks.length for blocks in stacks)
    memory = rows * itemsize * sum(blocks.depth * blocks.memory for blocks in stacks)
    branches = (
        rows
        * itemsize
        * sum(blocks.depth * len(blocks.stack.branches) * blocks.length for blocks in stacks)
    )
    keys = 2 * (positions + memory) * sizes["kv_heads"] * sizes["head_dim"]
    exchanged = (
        2 * positions / mesh["sequence"] * (sizes["heads"] + sizes["kv_heads"]) * sizes["head_dim"]
    )
    allowed: dict[tuple[str, ...], float] = {
        ("fsdp",): each["own"],
        # A branch's sum forward and one backward; heads that do not divide the axis cost a gather more each.
        ("tensor",): (2 + again) * (branches + memory) / mesh["sequence"] * sizes["embed"],
        # Keys and values gathered, their gradients scattered; or both sent round, and a device's own queries, keys, values and
        # outputs of the whole layer exchanged so that all have as much to do.
        ("sequence",): (2 + again) * (keys + exchanged) + 2 * keys + gradients,
    }
    allowed[shared] = allowed.get(shared, 0.0) + each["others"]
    # Tokens to their experts and back, in every pass.
    sent = (
        2
        * (2 + again)
        * positions
        * estimates.expert_slots(config, mesh["experts"])
        * sizes["embed"]
    )
    allowed["experts",] = allowed.get(("experts",), 0.0) + sent + gradients
    summed = [axis for axis in ("data", "fsdp", "experts", "sequence") if mesh[axis] > 1]
    for first, last in itertools.combinations_with_replacement(range(len(summed)), 2):
        allowed.setdefault(tuple(summed[first : last + 1]), gradients)
    return allowed


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One array in temporary memory at the moment of the peak."""

    name: str
    """HLO instruction."""
    bytes: int
    """As allocated, with the padding of its layout."""
    shape: str
    op_name: str
    """What it was in the traced program."""
    source: str


def read(folder: Path, module: hlo.Module) -> tuple[int, int, list[Buffer]] | None:
    """Bytes of temporaries and of all in main memory, and the temporaries at the peak, largest first.

    Of the largest program dumped into `folder`; None where no file says so.

    Args:
        folder: where the compiler wrote its buffer assignment (`xla_dump_to`).
        module: the optimized program.
    """
    assignment = max(
        folder.glob("*buffer-assignment.txt"), key=lambda file: file.stat().st_size, default=None
    )
    if assignment is None:
        return None
    size, total, values = _values(assignment.read_text())
    text = assignment.with_name(
        assignment.name.replace("buffer-assignment", "live-range")
    ).read_text()
    lines = map(_RANGE.match, text.partition("\n  Live ranges at")[0].splitlines())
    ranges = {
        match[1].removesuffix("{}"): range(int(match[2]), int(match[3]) + 1)
        for match in lines
        if match
    }

    def alive(moment: int) -> list[Value]:
        """Values at a moment."""
        return [value for value in values if moment in ranges.get(value[0], ())]

    def live_bytes(moment: int) -> int:
        """Bytes of the values at a moment; those that share a place are counted once."""
        places: dict[int, int] = {}
        for _, bytes_, offset, _ in alive(moment):
            places[offset] = max(bytes_, places.get(offset, 0))
        return sum(places.values())

    instructions = {name: i for c in module.computations.values() for name, i in c.items()}
    named: dict[tuple[int, int], Buffer] = {}
    moments = sorted({ranges[name].start for name, *_ in values if name in ranges})
    for name, bytes_, offset, shape in alive(max(moments, key=live_bytes, default=0)):
        # Of several names of one place, one that says where it comes from.
        if (offset, bytes_) not in named or not named[offset, bytes_].op_name:
            origin = _origin(instructions.get(name.partition("{")[0]), instructions, module)
            op_name, source = (
                (origin.op_name, module.source(origin)) if origin is not None else ("", "")
            )
            named[offset, bytes_] = Buffer(
                name, bytes_, re.sub(r"\{[^}]*\}", "", shape), op_name, source
            )
    return size, total, sorted(named.values(), key=lambda buffer: -buffer.bytes)


Value = tuple[str, int, int, str]


def _values(assignment: str) -> tuple[int, int, list[Value]]:
    """Bytes of temporaries and of all in main memory (color 0), and name, bytes, offset and type of the temporaries' values."""
    size, total, values, inside = 0, 0, [], False
    for line in assignment.splitlines():
        if match := _ALLOCATION.match(line):
            main = match[2] in (None, "0")
            inside = main and "preallocated-temp" in match[3]
            size += int(match[1]) if inside else 0
            total += int(match[1]) if main and "thread-local" not in match[3] else 0
        elif inside and (match := _VALUE.match(line)):
            values.append((match[1].removesuffix("{}"), int(match[2]), int(match[3]), match[4]))
    return size, total, values


def _origin(
    result: hlo.Instruction | None,
    instructions: dict[str, hlo.Instruction],
    module: hlo.Module,
    steps: int = 8,
) -> hlo.Instruction | None:
    """The instruction whose metadata says where an array comes from: its own, or that of what it wraps or copies."""
    if result is None or result.op_name or not steps:
        return result
    if result.opcode == "fusion":
        inside = [
            i
            for computation in result.called()
            for i in module.computations[computation].values()
            if i.op_name
        ]
        return max(inside, key=lambda i: i.bytes, default=result)
    if result.opcode == "parameter":
        # State of a loop: the loop.
        body = next(name for name, c in module.computations.items() if c.get(result.name) is result)
        return next(
            (i for i in instructions.values() if i.opcode == "while" and body in i.called()), result
        )
    if not result.operands:
        # Room for a loop to fill: the loop, which takes it in a tuple.
        user = next((i for i in instructions.values() if result.name in i.operands), result)
        return next((i for i in instructions.values() if user.name in i.operands), user)
    for operand in result.operands:
        origin = _origin(instructions.get(operand), instructions, module, steps - 1)
        if origin is not None and origin.op_name:
            return origin
    return result


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
    """The least time of a step by each resource, in seconds, if every other one were free."""

    compute: float
    memory: float
    network: float
    slow_network: float
    cycles: float | None
    """Of the compiler's estimated cycles, where the clock is known. Has no collectives, and no overlap between chips."""
    alone: float = 0.0
    """Of the network's, what computation waits for: collectives that the compiler runs beside nothing."""

    @property
    def bound(self) -> str:
        """The resource that takes longest."""
        return max(self._resources(), key=self._resources().__getitem__)

    @property
    def seconds(self) -> float:
        """Step time with everything overlapped but what runs alone: a bound from below, so that the utilization is one from above."""
        waiting = self.alone if self.bound != "network" else 0.0
        return self._resources()[self.bound] + waiting

    def _resources(self) -> dict[str, float]:
        return {
            name: value or 0.0
            for name, value in dataclasses.asdict(self).items()
            if name != "alone"
        }

    def utilization(self, model_flops: float, chip: Chip) -> float:
        """MFU: FLOPs that the model needs on this chip (no recomputation), over what it could do in the step's time.

        Args:
            model_flops: of one step, on one device.
            chip: what it could do at its peak.
        """
        return model_flops / (self.seconds * chip.peak_flops)

    def to_json(self, model_flops: float, chip: Chip) -> dict[str, Any]:
        """The times, what bounds them, the step time in seconds and the MFU.

        Args:
            model_flops, chip: as in `utilization`.
        """
        mfu = self.utilization(model_flops, chip)
        return {
            **dataclasses.asdict(self),
            "bound": self.bound,
            "step_seconds": self.seconds,
            "mfu": mfu,
        }


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A step compiled for a topology. Bytes are per device, FLOPs of the whole step over all devices.

    Attributes:
        program: the step's.
        chip: what it is compiled for.
        seconds: time to compile.
        traced_flops: of all matrix products as traced, recomputation included.
        used_bytes: main memory that a device needs at the peak, as the compiler allocates it.
        limit_bytes: main memory that a device offers.
        module: the optimized program; this and what follows are empty where it does not fit.
        text: the same as HLO text.
        memory: bytes of arguments, outputs, aliased, temporaries and code.
        live: temporaries at the peak, largest first.
        state_shardings: how the program takes its state.
    """

    program: Program
    chip: Chip
    seconds: float
    traced_flops: float
    used_bytes: int
    limit_bytes: int
    module: hlo.Module | None = None
    text: str = ""
    memory: Mapping[str, int] = dataclasses.field(default_factory=dict)
    live: Sequence[Buffer] = ()
    state_shardings: Any = None

    @property
    def fits(self) -> bool:
        """Whether the compiler found room."""
        return self.module is not None and self.used_bytes <= self.limit_bytes

    @cached_property
    def collectives(self) -> list[Collective]:
        """Every collective of a step."""
        mesh = self.program.mesh
        return (
            []
            if self.module is None
            else collectives(self.module, dict(mesh.shape), topology.across(mesh))
        )

    def roofline(self) -> Roofline | None:
        """Least time of a step; None where the program does not fit."""
        if self.module is None:
            return None
        chip, network, alone = self.chip, {True: 0.0, False: 0.0}, 0.0
        for one in self.collectives:
            within = not one.between_slices
            bandwidth = (
                _bandwidth(self.program.mesh, one.axes, chip) if within else chip.dcn_bandwidth
            )
            seconds = one.wire_bytes * one.times / bandwidth if bandwidth else 0.0
            network[within] += seconds
            alone += 0.0 if one.overlapped else seconds
        compute = self.traced_flops / self.program.mesh.size / chip.peak_flops
        cycles = self.module.cycles / chip.clock_hz if chip.clock_hz else None
        return Roofline(
            compute=compute,
            memory=self.module.hbm_bytes / chip.hbm_bandwidth,
            network=network[True],
            slow_network=network[False],
            cycles=cycles,
            alone=alone,
        )

    def _loss(self) -> dict[str, Any]:
        """How the loss is computed, and of `auto` the bytes by which each way would raise the peak, the one taken first."""
        config, definition, layout = (
            self.program.config,
            self.program.definition,
            self.program.layout,
        )
        way, work = memory.loss(config, definition, layout), memory.work(config, definition, layout)
        ways = loss.options(work) if config.model.compute.cross_entropy == "auto" else []
        above = {one.kind: loss.above(work, one) for one in ways}
        return {
            "kind": way.kind,
            "parts": way.parts,
            "kept": way.exp_parts,
            "raises_peak_by": above,
        }

    def report(self) -> dict[str, Any]:
        """Everything as JSON."""
        config, roofline, module = self.program.config, self.roofline(), self.module
        expected, devices = estimates.expected(self.program), self.program.mesh.size
        model_flops = estimates.model_flops(config)
        arguments = self.memory.get("argument", 0)
        violations = (
            problems(self.program, self.collectives, self.state_shardings, arguments)
            if module
            else []
        )
        return {
            "recipe": config.recipe,
            "fits": self.fits,
            "chip": self.chip.name,
            "devices": devices,
            "mesh": {axis: size for axis, size in self.program.mesh.shape.items() if size > 1},
            "batch_size": config.data.batch_size,
            "accumulation_steps": config.accumulation_steps,
            "compute": dataclasses.asdict(config.model.compute),
            "loss": self._loss(),
            "flags": self.program.compiler_options(),
            "parameters": self.program.definition.count(),
            "hbm_bytes_per_device": self.limit_bytes,
            "peak_bytes_per_device": self.used_bytes,
            "spare_bytes_per_device": self.limit_bytes - self.used_bytes,
            **{f"{name}_bytes_per_device": size for name, size in self.memory.items()},
            "expected_bytes_per_device": expected,
            "peak_over_expected": self.used_bytes / sum(expected.values()),
            "arguments_over_expected": arguments / (expected["state"] + expected["batch"]),
            "flops_per_step": model_flops,
            "traced_flops_per_step": self.traced_flops,
            "hbm_traffic_per_device": module.hbm_bytes if module else None,
            "estimated_cycles": module.cycles if module else None,
            "loops_of_unknown_length": module.unknown_loops if module else None,
            "collectives": table(self.collectives),
            "problems": violations,
            "roofline": roofline and roofline.to_json(model_flops / devices, self.chip),
            "temporaries": [
                dataclasses.asdict(b) for b in self.live if b.bytes >= NAMED_SHARE * self.used_bytes
            ],
            "compile_seconds": round(self.seconds, 1),
            "jax": jax.__version__,
        }


def compile_for(config: Config, name: str, slices: int = 1) -> Compiled:
    """A config's training step, compiled for a topology.

    Args:
        config: of the run.
        name: the topology, such as v5e:16x16.
        slices: how many of them, joined by the slow network.

    Raises:
        TopologyError: no such topology, or no compiler for it.
        RefusedError: the compiler refuses the step for another reason than its size in a chip's memory.
        ConfigError, PresetError, MeshError: as the run itself would say.
    """
    program, chip = assemble(config, topology.devices(name, slices)), topology.chip_of(name)
    traced, model, kind = (
        program.trace_train(),
        config.model,
        program.mesh.devices.flat[0].device_kind,
    )
    block = block_of(
        model.sizes()["position"], kind, model.compute.attention_block, causal=model.causal
    )
    visited = estimates.attention_share(program, block, of_grid=True)
    flops = estimates.matmul_flops(traced.jaxpr, visited)
    lowered, began = traced.lower(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        options = program.compiler_options() | {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        try:
            with topology.quiet():
                executable = lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            temporaries = _TEMPORARIES.search(str(error))
            used = _USED.search(str(error)) or temporaries
            if used is None:
                raise refused(name, str(error), model.compute.attention_block) from None
            need, limit = (int(float(used[i]) * _UNITS[used[i + 1]]) for i in (1, 3))
            if used is temporaries:
                need += estimates.expected(program)["state"]  # which stands beside the temporaries
            return Compiled(program, chip, time.monotonic() - began, flops, need, limit)
        seconds = time.monotonic() - began
        module = hlo.parse(text := executable.as_text() or "")
        assigned = read(Path(folder), module)
    stats: Any = executable.memory_analysis()
    sizes = {
        "argument": stats.argument_size_in_bytes,
        "output": stats.output_size_in_bytes,
        "alias": stats.alias_size_in_bytes,
        "temporary": stats.temp_size_in_bytes,
        "code": stats.generated_code_size_in_bytes,
    }
    need, live, state = (
        sum(sizes.values()) - 2 * sizes["alias"],
        [],
        executable.input_shardings[0][0],
    )
    if assigned is not None:
        # The statistics count some buffers of loops twice; what is allocated is in the buffer assignment.
        sizes["temporary"], total, live = assigned
        need = total + sizes["code"]
    return Compiled(
        program, chip, seconds, flops, need, chip.hbm_bytes, module, text, sizes, live, state
    )


def _bandwidth(mesh: jax.sharding.Mesh, axes: tuple[str, ...], chip: Chip) -> float:
    """Bytes a second that a chip can send to its neighbours along mesh axes."""
    index = tuple(slice(None) if axis in axes else 0 for axis in mesh.shape)
    group: Any = np.ravel(mesh.devices[index])
    places = np.array([device.coords for device in group])
    wired = sum(len(set(column)) > 1 for column in places.T.tolist())
    return chip.ici_bandwidth * max(1, wired) / chip.torus
