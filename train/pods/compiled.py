"""One configuration compiled for a topology, with everything that the compiled program tells.

Temporaries at the peak come from the compiler's own buffer assignment, by name. `problems` lists
what a compiled step must not do: gather all layers at once, replicate optimizer state, or send more
than its mesh asks for.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mupax import MupaxError
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
"""Factor by which a layer loop may send more bytes than `required` says.

The rest is for norms, losses and other small sums.
"""

_RECOMPUTED: dict[Remat, int] = {"none": 0, "dots": 1, "attention": 1, "block": 1, "offload": 1}
"""Number of times that a block's forward pass may be recomputed, by remat policy.

Each time the block's parameters are gathered from other devices again.
"""

EIGHT_BIT_SPEEDUP = 2
"""Largest ratio of a chip's peak rate for int8 or float8 to that for bfloat16. TPU v4 has 1.

The least time of a step counts all products at this rate, those that stay in bfloat16 too."""
MOST_ARGUMENTS = 1.05
"""Largest ratio of a step's argument bytes to the bytes of state and batch. More is padding."""
NUMBERS = 2**17
"""Bytes that `padding` allows for a step's scalar arguments, each of which takes a whole tile."""

_ALLOCATION = re.compile(r"^allocation \d+: size (\d+)(?:, color (\d+))?, (.*?):?$")
_VALUE = re.compile(r"^ value: <\d+ ([^@]*?)(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)$")
_RANGE = re.compile(r"^    ([^:]+):(\d+)-(\d+)$")

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)"
_USED = re.compile(rf"Used {_SIZE} of {_SIZE} hbm")
_TEMPORARIES = re.compile(rf"temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)")
NAMED_SHARE = 0.01
"""Smallest share of the peak at which a report names a temporary."""


WITHOUT_A_GPU = {
    # The autotuner times kernels to choose one for each product, which needs a GPU. With these
    # flags every product is a call of cuBLASLt instead, and not a Triton kernel with untuned tiles.
    "xla_gpu_autotune_level": 0,
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_enable_cublaslt": True,
    # This pass makes one Triton kernel of a norm or a softmax. Choosing tiles for the fusions
    # around such kernels takes more than half of the compile time. Without the pass, temporaries
    # are up to 3 % and memory traffic up to 4 % smaller for vit-b16 and gpt2-c4, and equal for
    # lm-1b and lm-8b.
    "xla_disable_hlo_passes": "triton-softmax-rewriter",
}
"""XLA flags with which a step is compiled for GPUs on a machine without them.

A real run does not set these flags.
"""
MEM_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""Environment variable with the share of a GPU's memory that JAX takes for arrays."""
_DEFAULT_MEM_FRACTION = 0.75
NCCL_BYTES = 2 * 32 * 2**22
"""Bytes of NCCL's buffers for one set of devices that communicate.

Up to 32 channels have a buffer of NCCL_BUFFSIZE, 4 MiB, for each of two neighbours in a ring
(docs.nvidia.com/deeplearning/nccl, environment variables).
"""
_BACKWARD_KERNEL = "__cudnn$fmhaSoftmaxBackward"


def problems(
    program: Program, collectives: Sequence[Collective], state_shardings: Any, arguments: int
) -> list[str]:
    """Return one line per fault of a compiled step.

    Faults are gathers of all layers at once, optimizer state that is less split than its parameter,
    unnecessary traffic in the layer loop, and padded arguments.

    Args:
        state_shardings: Shardings with which the compiled step takes its state.
        arguments: Bytes of the step's arguments on a device.
    """
    abstract = program.definition.abstract
    stacks = {}
    for name, spec in program.definition.specs.items():
        # Gains and biases of all layers are small, and the compiler may gather them together.
        if spec.in_block and spec.fan_in and len(spec.axes) > 2:
            stacks[name] = abstract[name].shape
    expected = estimates.expected(program)
    return [
        *whole_stacks(collectives, stacks, program.mesh.shape["tensor"]),
        *whole_moments(program, state_shardings),
        *unrequired(program, collectives),
        *padding(arguments, expected["state"] + expected["batch"]),
    ]


def padding(arguments: int, needed: int) -> list[str]:
    """Return a list of one line if a step's arguments take more memory than their contents.

    The list is empty if they take at most 5 % and `NUMBERS` bytes more.

    Args:
        arguments: Bytes of the compiled step's arguments on a device.
        needed: Bytes of state and batch on a device.
    """
    if arguments <= MOST_ARGUMENTS * needed + NUMBERS:
        return []
    return [
        f"arguments are {gib(arguments)} for {gib(needed)} of state and batch: layouts are padded"
    ]


def whole_stacks(
    collectives: Iterable[Collective], stacks: Mapping[str, tuple[int, ...]], ways: int = 1
) -> list[str]:
    """Return a line per all-gather that gathers a parameter of all layers at once.

    A loop over layers should gather one layer at a time, which takes less memory.

    Args:
        stacks: Shape of each parameter by name, with the layers as dimension 0.
        ways: Number of shards that a gathered matrix is still split into (tensor parallelism), 1 by
            default.
    """
    wrong = []
    for collective in collectives:
        if collective.kind != "all-gather":
            continue
        for dims in collective.results:
            # Under tensor parallelism a gathered matrix stays split, so the result is a part of it.
            size = math.prod(dims) * ways
            for name, shape in stacks.items():
                if shape[0] in dims and size == math.prod(shape):
                    wrong.append(f"{collective.name} gathers all layers of {name} at once: {dims}")
    return wrong


def whole_moments(program: Program, state_shardings: Any) -> list[str]:
    """Return a line per array of optimizer state that is less split than its parameter.

    Args:
        program: Compiled program, whose `abstract` has the parameters' shardings.
        state_shardings: Shardings with which the compiled step takes its state.
    """
    params = program.abstract.params
    leaves = jax.tree_util.tree_leaves_with_path(program.abstract.opt_state)
    shardings = jax.tree.leaves(state_shardings.opt_state)
    wrong = []
    for (path, leaf), sharding in zip(leaves, shardings, strict=True):
        name = getattr(path[-1], "key", None)
        if name not in params or params[name].shape != leaf.shape:
            continue
        shape = sharding.shard_shape(leaf.shape)
        param_shape = params[name].sharding.shard_shape(leaf.shape)
        if math.prod(shape) > math.prod(param_shape):
            moment = jax.tree_util.keystr(path)
            wrong.append(
                f"the optimizer's {moment} is {shape} on a device, its parameter {param_shape}"
            )
    return wrong


def unrequired(program: Program, collectives: Iterable[Collective]) -> list[str]:
    """Return a line per set of mesh axes over which loops over layers send too many bytes.

    Too many are more than `required` returns for these axes, with an allowance for small arrays.

    Args:
        collectives: Collectives of the compiled step. Those outside loops over layers are ignored.
    """
    allowed = required(program)
    config = program.config
    stacks = families.stacks(config.model)
    layer_counts = set()
    for blocks in stacks:
        # The compiler may peel one layer off the loop, which then runs depth - 1 times.
        layer_counts |= {blocks.depth, blocks.depth - 1}

    # Allowance for norm gains, biases and row statistics, which `required` leaves out: 64 bytes per
    # feature and per position of every layer.
    rows = config.data.batch_size / program.mesh.size
    width = program.definition.sizes["embed"]
    vectors = sum(
        blocks.depth * (width + rows * (blocks.length + blocks.memory)) for blocks in stacks
    )
    small = 64.0 * config.accumulation_steps * vectors

    by_axes: dict[tuple[str, ...], list[Collective]] = defaultdict(list)
    for collective in collectives:
        if layer_counts & set(collective.trips):
            by_axes[collective.axes].append(collective)
    wrong = []
    for axes, inside in by_axes.items():
        size = sum(collective.bytes * collective.times for collective in inside)
        needed = allowed.get(axes, 0.0)
        if size <= SLACK * needed + small:
            continue
        names = ", ".join(collective.name for collective in inside[:5])
        wrong.append(
            f"over {' x '.join(axes)} the layer loop sends {size:.3g} bytes, "
            f"and needs {needed:.3g} ({names})"
        )
    return wrong


def required(program: Program) -> dict[tuple[str, ...], float]:
    """Return an upper bound on the bytes that one step has to send in loops over layers.

    `unrequired` reports a compiled step that sends more.

    Returns:
        Bytes by the set of mesh axes that a collective is over. Complete arrays are counted, as in
        `Collective.bytes`.
    """
    config = program.config
    mesh = program.mesh.shape
    model = config.model
    steps = config.accumulation_steps
    itemsize = jnp.dtype(model.compute.dtype).itemsize
    again = _RECOMPUTED[model.compute.remat]
    specs = program.definition.specs
    abstract = program.definition.abstract
    block_size = sum(abstract[name].size for name, spec in specs.items() if spec.in_block)
    count = block_size / mesh["tensor"]
    # A device has only its own experts. All other parameters are split by the experts axis, too.
    expert_count = estimates.expert_weights(program.definition) / mesh["tensor"]
    expert_shard = expert_count / mesh["experts"]
    remaining = count - expert_count
    # Gradients of all layers may be summed in float32, 4 bytes each, once per microbatch.
    gradients = count * 4 * steps
    expert_bytes = expert_shard * ((2 + again) * itemsize + 4) * steps
    remaining_bytes = remaining * ((2 + again) * itemsize + 4) * steps

    rows = config.data.batch_size / program.layout.num_shards("batch")
    sizes = defaultdict(int, program.definition.sizes)
    stacks = families.stacks(model)
    positions = rows * itemsize * sum(blocks.depth * blocks.length for blocks in stacks)
    memory = rows * itemsize * sum(blocks.depth * blocks.memory for blocks in stacks)
    branch_positions = sum(
        blocks.depth * len(blocks.stack.branches) * blocks.length for blocks in stacks
    )
    branches = rows * itemsize * branch_positions
    keys = 2 * (positions + memory) * sizes["kv_heads"] * sizes["head_dim"]
    all_heads = sizes["heads"] + sizes["kv_heads"]
    exchanged = 2 * positions / mesh["sequence"] * all_heads * sizes["head_dim"]

    allowed: dict[tuple[str, ...], float] = {
        ("fsdp",): expert_bytes,
        # Per branch: one all-reduce in the forward pass, one in its recomputation and one in the
        # backward pass.
        ("tensor",): (2 + again) * (branches + memory) / mesh["sequence"] * sizes["embed"],
        # Keys and values are gathered, and their gradients reduce-scattered. A ring instead passes
        # keys and values around, and exchanges queries, keys, values and outputs to balance the
        # causal mask.
        ("sequence",): (2 + again) * (keys + exchanged) + 2 * keys + gradients,
    }
    splitting = []
    for axis in ("fsdp", "experts"):
        if mesh[axis] > 1:
            splitting.append(axis)
    shared = tuple(splitting) or ("fsdp",)
    allowed[shared] = allowed.get(shared, 0.0) + remaining_bytes
    # Tokens are sent to their experts and back, in every pass.
    slots = estimates.expert_slots(config, mesh["experts"])
    sent = 2 * (2 + again) * positions * slots * sizes["embed"]
    allowed["experts",] = allowed.get(("experts",), 0.0) + sent + gradients
    # One all-reduce may sum gradients over several adjacent mesh axes at once.
    summed = []
    for axis in ("data", "fsdp", "experts", "sequence"):
        if mesh[axis] > 1:
            summed.append(axis)
    for first, last in itertools.combinations_with_replacement(range(len(summed)), 2):
        allowed.setdefault(tuple(summed[first : last + 1]), gradients)
    return allowed


@dataclasses.dataclass(frozen=True)
class Buffer:
    """Array in temporary memory at the moment of the peak.

    Attributes:
        name: Name of the HLO instruction.
        bytes: Allocated bytes, with the padding of the array's layout.
        shape: Text of the array's type.
        op_name: Place in the traced program.
        source: Place in the source, file:line.
    """

    name: str
    bytes: int
    shape: str
    op_name: str
    source: str


class Value(NamedTuple):
    """Value in temporary memory: its name, bytes, offset and type."""

    name: str
    bytes: int
    offset: int
    shape: str


def read(folder: Path, module: hlo.Module) -> tuple[int, int, list[Buffer]] | None:
    """Read the compiler's buffer assignment.

    Args:
        folder: Folder into which the compiler dumped its files (`xla_dump_to`). The largest program
            is read.
        module: Parsed program, whose metadata give the place of each temporary in trace and source.

    Returns:
        Bytes of temporaries, bytes of everything in main memory, and the temporaries at the peak,
        largest first. `None` if there is no such file.
    """
    files = folder.glob("*buffer-assignment.txt")
    # The folder also has small programs that JAX compiles besides the step. The step is the
    # largest.
    assignment = max(files, key=lambda file: file.stat().st_size, default=None)
    if assignment is None:
        return None
    size, total, values = _values(assignment.read_text())
    name = assignment.name.replace("buffer-assignment", "live-range")
    ranges = _live_ranges(assignment.with_name(name).read_text())

    def alive(moment: int) -> list[Value]:
        """Return the values that are alive at a moment, an index in the order of instructions."""
        return [value for value in values if moment in ranges.get(value.name, ())]

    def live_bytes(moment: int) -> int:
        """Return the bytes that are alive at a moment.

        Values that share memory are counted once.
        """
        places: dict[int, int] = {}
        for value in alive(moment):
            places[value.offset] = max(value.bytes, places.get(value.offset, 0))
        return sum(places.values())

    instructions = {}
    for computation in module.computations.values():
        instructions |= computation
    # Memory grows only where a value begins, so the peak is at the start of some value's range.
    starts = set()
    for value in values:
        if value.name in ranges:
            starts.add(ranges[value.name].start)
    moments = sorted(starts)
    buffers: dict[tuple[int, int], Buffer] = {}
    for value in alive(max(moments, key=live_bytes, default=0)):
        place = (value.offset, value.bytes)
        # Values at the same place are one buffer, named by the first value with an op_name.
        if place in buffers and buffers[place].op_name:
            continue
        op_name = ""
        source = ""
        instruction = instructions.get(value.name.partition("{")[0])
        origin = _origin(instruction, instructions, module)
        if origin is not None:
            op_name = origin.op_name
            source = module.source(origin)
        # Layouts and tiles say nothing to a reader of the report.
        shape = re.sub(r"\{[^}]*\}", "", value.shape)
        buffers[place] = Buffer(value.name, value.bytes, shape, op_name, source)
    return size, total, sorted(buffers.values(), key=lambda buffer: -buffer.bytes)


def _live_ranges(text: str) -> dict[str, range]:
    """Return the moments at which values are alive, by name, from the compiler's live ranges.

    A moment is a position in the order in which the compiler runs instructions.
    """
    ranges = {}
    for line in text.partition("\n  Live ranges at")[0].splitlines():
        match = _RANGE.match(line)
        if match:
            name = match[1].removesuffix("{}")
            # The compiler writes both ends of a range, and the last moment is a part of it.
            ranges[name] = range(int(match[2]), int(match[3]) + 1)
    return ranges


def _values(assignment: str) -> tuple[int, int, list[Value]]:
    """Return bytes of temporaries, bytes of everything in main memory, and temporary values.

    Args:
        assignment: Text of the compiler's file `*buffer-assignment.txt`.
    """
    size = 0
    total = 0
    values = []
    is_temporary = False
    for line in assignment.splitlines():
        allocation = _ALLOCATION.match(line)
        if allocation:
            # XLA's color of an allocation is its memory space. Main memory has color 0, or none is
            # written.
            is_main = allocation[2] in (None, "0")
            is_temporary = is_main and "preallocated-temp" in allocation[3]
            if is_temporary:
                size += int(allocation[1])
            if is_main and "thread-local" not in allocation[3]:
                total += int(allocation[1])
        elif is_temporary:
            value = _VALUE.match(line)
            if value:
                name = value[1].removesuffix("{}")
                values.append(Value(name, int(value[2]), int(value[3]), value[4]))
    return size, total, values


def _origin(
    result: hlo.Instruction | None,
    instructions: dict[str, hlo.Instruction],
    module: hlo.Module,
    steps: int = 8,
) -> hlo.Instruction | None:
    """Return the instruction whose metadata (`op_name`) says where an array comes from.

    If the array's own instruction has no metadata, the function looks at an instruction inside its
    fusion, at its operands, or at the loop that carries the array.

    Args:
        result: Instruction that makes the array. `None` is returned as it is.
        instructions: Instructions of all computations of the module, by name.
        steps: Largest number of operands to follow in a row, 8 by default.
    """
    if result is None or result.op_name or not steps:
        return result
    if result.opcode == "fusion":
        inside = []
        for computation in result.called():
            for instruction in module.computations[computation].values():
                if instruction.op_name:
                    inside.append(instruction)
        return max(inside, key=lambda instruction: instruction.bytes, default=result)
    if result.opcode == "parameter":
        # A loop's body takes its state as a parameter without metadata. The `while` has metadata.
        body = _computation_of(result, module)
        for instruction in instructions.values():
            if instruction.opcode == "while" and body in instruction.called():
                return instruction
        return result
    if not result.operands:
        # An array without operands is filled by a loop: its user is a tuple, and the tuple's user
        # is the loop.
        user = _first_user(result, instructions)
        return _first_user(user, instructions)
    for operand in result.operands:
        origin = _origin(instructions.get(operand), instructions, module, steps - 1)
        if origin is not None and origin.op_name:
            return origin
    return result


def _computation_of(instruction: hlo.Instruction, module: hlo.Module) -> str:
    """Return the name of the computation that has an instruction.

    Raises:
        ValueError: No computation of the module has the instruction.
    """
    for name, computation in module.computations.items():
        if computation.get(instruction.name) is instruction:
            return name
    raise ValueError(f"no computation of the module has {instruction.name}")


def _first_user(
    result: hlo.Instruction, instructions: dict[str, hlo.Instruction]
) -> hlo.Instruction:
    """Return the first instruction that has `result` as an operand, otherwise `result` itself."""
    for instruction in instructions.values():
        if result.name in instruction.operands:
            return instruction
    return result


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
    """Least time of a step by each resource, in seconds, as if every other resource were free.

    Attributes:
        compute: Matrix products at the chip's peak, of 8-bit products if the run has them.
        memory: Traffic of main memory.
        network: Collectives within slices, or within hosts of GPUs.
        slow_network: Transfers between slices or hosts.
        cycles: Compiler's estimated clock cycles over the chip's clock, without collectives. `None`
            if the clock is not known, and on GPUs.
        alone: Part of the network's time that computation waits for, because the compiler overlaps
            the collectives with nothing.
        slow_alone: The same part of the slow network's time.
    """

    compute: float
    memory: float
    network: float
    slow_network: float
    cycles: float | None
    alone: float = 0.0
    slow_alone: float = 0.0

    @property
    def bound(self) -> str:
        """Resource that takes longest."""
        resources = self._resources()
        return max(resources, key=resources.__getitem__)

    @property
    def seconds(self) -> float:
        """Step time if everything overlaps except collectives that run alone.

        It is a lower bound, so the utilization is an upper bound.
        """
        waiting = 0.0
        if self.bound != "network":
            waiting += self.alone
        if self.bound != "slow_network":
            waiting += self.slow_alone
        return self._resources()[self.bound] + waiting

    def _resources(self) -> dict[str, float]:
        """Return the seconds by resource, 0 for unknown ones."""
        resources = {}
        for name, value in dataclasses.asdict(self).items():
            if name not in ("alone", "slow_alone"):
                resources[name] = value or 0.0
        return resources

    def utilization(self, model_flops: float, chip: Chip) -> float:
        """Return the MFU: the model's FLOPs, over the chip's peak FLOPs in the step's time.

        Args:
            model_flops: FLOPs that the model needs in one step on one device, without
                recomputation.
        """
        return model_flops / (self.seconds * chip.peak_flops)

    def to_json(self, model_flops: float, chip: Chip) -> dict[str, Any]:
        """Return the times by field, and `bound`, `step_seconds` and `mfu`.

        Args:
            model_flops: FLOPs of the model in one step on one device.
        """
        return {
            **dataclasses.asdict(self),
            "bound": self.bound,
            "step_seconds": self.seconds,
            "mfu": self.utilization(model_flops, chip),
        }


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Step compiled for a topology. Bytes are per device, FLOPs are over all devices.

    Attributes:
        program: Program of the step.
        chip: Chip that the step is compiled for.
        seconds: Time to compile.
        traced_flops: FLOPs of all matrix products as traced, with recomputation.
        used_bytes: Main memory that a device needs at the peak, as the compiler allocates it. On
            GPUs also the workspace of attention, which the compiler does not know.
        limit_bytes: Main memory that arrays of a device can take.
        workspace_bytes: Part of `used_bytes` for the workspace of attention on GPUs.
        module: Optimized program. `module` and all fields after it are empty if the compiler found
            that the step does not fit. Programs for GPUs are compiled even then.
        text: HLO text of the optimized program.
        memory: Bytes by kind: `argument`, `output`, `alias` (outputs in place of arguments),
            `temporary` and `code`.
        live: Temporaries at the peak, largest first.
        state_shardings: Shardings with which the program takes its state.
    """

    program: Program
    chip: Chip
    seconds: float
    traced_flops: float
    used_bytes: int
    limit_bytes: int
    workspace_bytes: int = 0
    module: hlo.Module | None = None
    text: str = ""
    memory: Mapping[str, int] = dataclasses.field(default_factory=dict)
    live: Sequence[Buffer] = ()
    state_shardings: Any = None

    @property
    def fits(self) -> bool:
        """True if the step compiled and `used_bytes` is at most `limit_bytes`."""
        return self.module is not None and self.used_bytes <= self.limit_bytes

    @cached_property
    def collectives(self) -> list[Collective]:
        """Every collective of a step. Empty without a compiled program."""
        if self.module is None:
            return []
        mesh = self.program.mesh
        hosts = []
        if self.chip.gpu is not None:
            hosts = topology.islands(mesh.devices.flat)
        return collectives(self.module, dict(mesh.shape), topology.across(mesh), hosts)

    def roofline(self) -> Roofline | None:
        """Return the least times of a step, or `None` without a compiled program.

        A TPU step that does not fit has no program.
        """
        if self.module is None:
            return None
        chip = self.chip
        peak_flops = chip.peak_flops
        if self.program.config.model.compute.product_dtype is not None:
            peak_flops *= EIGHT_BIT_SPEEDUP
        network = 0.0
        slow_network = 0.0
        alone = 0.0
        slow_alone = 0.0
        for collective in self.collectives:
            if collective.between_slices:
                bandwidth = chip.dcn_bandwidth
            else:
                bandwidth = _bandwidth(self.program.mesh, collective.axes, chip)
            seconds = 0.0
            if bandwidth:
                seconds = collective.wire_bytes * collective.times / bandwidth
            waited = 0.0 if collective.overlapped else seconds
            if collective.between_slices:
                slow_network += seconds
                slow_alone += waited
            else:
                network += seconds
                alone += waited
        return Roofline(
            compute=self.traced_flops / self.program.mesh.size / peak_flops,
            memory=self.module.hbm_bytes / chip.hbm_bandwidth,
            network=network,
            slow_network=slow_network,
            cycles=self.module.cycles / chip.clock_hz if chip.clock_hz else None,
            alone=alone,
            slow_alone=slow_alone,
        )

    def _loss(self) -> dict[str, Any]:
        """Return how the loss is computed.

        The keys are `kind`, `parts`, `kept` (`exp_parts` of `LossImplementation`) and
        `raises_peak_by`. For `auto`, the last has the bytes by which each implementation would
        raise the peak, the selected one first. For other losses it is empty.
        """
        config = self.program.config
        definition = self.program.definition
        layout = self.program.layout
        implementation = memory.loss(config, definition, layout)
        readout = memory.work(config, definition, layout)
        raises_peak_by = {}
        if config.model.compute.cross_entropy == "auto":
            for option in loss.options(readout):
                raises_peak_by[option.kind] = loss.above(readout, option)
        return {
            "kind": implementation.kind,
            "parts": implementation.parts,
            "kept": implementation.exp_parts,
            "raises_peak_by": raises_peak_by,
        }

    def report(self) -> dict[str, Any]:
        """Return everything about the step as values that JSON can hold.

        Without a compiled program, entries that need one are `None`, empty or 0, and those of
        `memory` (`argument_bytes_per_device` and so on) are missing.
        """
        config = self.program.config
        module = self.module
        devices = self.program.mesh.size
        expected = estimates.expected(self.program)
        model_flops = estimates.model_flops(config)
        arguments = self.memory.get("argument", 0)
        faults = []
        if module:
            faults = problems(self.program, self.collectives, self.state_shardings, arguments)
        roofline = self.roofline()
        times = roofline.to_json(model_flops / devices, self.chip) if roofline else None
        temporaries = []
        for buffer in self.live:
            if buffer.bytes >= NAMED_SHARE * self.used_bytes:
                temporaries.append(dataclasses.asdict(buffer))
        memory = {}
        for name, size in self.memory.items():
            memory[f"{name}_bytes_per_device"] = size
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
            "flags_without_a_gpu": dict(WITHOUT_A_GPU) if self.chip.gpu else {},
            "platform": "gpu" if self.chip.gpu else "tpu",
            "parameters": self.program.definition.count(),
            "hbm_bytes_per_device": self.limit_bytes,
            "peak_bytes_per_device": self.used_bytes,
            "spare_bytes_per_device": self.limit_bytes - self.used_bytes,
            "memory_bytes_per_device": self.chip.hbm_bytes,
            "workspace_bytes_per_device": self.workspace_bytes,
            **memory,
            "expected_bytes_per_device": expected,
            "peak_over_expected": self.used_bytes / sum(expected.values()),
            "arguments_over_expected": arguments / (expected["state"] + expected["batch"]),
            "flops_per_step": model_flops,
            "traced_flops_per_step": self.traced_flops,
            "hbm_traffic_per_device": module.hbm_bytes if module else None,
            "estimated_cycles": module.cycles if module else None,
            "loops_of_unknown_length": module.unknown_loops if module else None,
            "collectives": table(self.collectives),
            "problems": faults,
            "roofline": times,
            "temporaries": temporaries,
            "compile_seconds": round(self.seconds, 1),
            "jax": jax.__version__,
        }


def compile_for(config: Config, name: str, slices: int = 1) -> Compiled:
    """Compile a config's training step for a topology of devices that are not here.

    A step that exceeds a chip's memory is no error: the result has `fits` False.

    Args:
        name: Topology, such as v5e:16x16.
        slices: Number of slices that the slow network joins, 1 by default.

    Raises:
        TopologyError: There is no such topology, or no compiler for it.
        RefusedError: The compiler refuses the step for another reason than a chip's memory.
        ConfigError, PresetError, MeshError: The run itself would be refused.
    """
    program = assemble(config, topology.devices(name, slices))
    chip = topology.chip_of(name)
    # While it traces, JAX asks the local GPU which attention kernels it has. There is none here.
    with topology.kernels_of(chip):
        traced = program.trace_train()
    flops = _traced_flops(program, traced)
    lowered = traced.lower()

    start_time = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        # The dump has the buffer assignment, from which `read` takes the temporaries at the peak.
        dump = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        options = program.compiler_options() | dump
        if chip.gpu is not None:
            options |= WITHOUT_A_GPU
        try:
            with topology.quiet():
                executable = lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            sizes = _sizes_of_error(str(error), program)
            if sizes is None:
                block = config.model.compute.attention_block
                raise refused(name, str(error), block) from None
            # A step that does not fit is a result of the search and no error.
            needed, limit = sizes
            return Compiled(program, chip, time.monotonic() - start_time, flops, needed, limit)
        seconds = time.monotonic() - start_time
        text = executable.as_text() or ""
        module = hlo.parse(text)
        assignment = read(Path(folder), module)

    stats: Any = executable.memory_analysis()
    sizes_by_kind = {
        "argument": stats.argument_size_in_bytes,
        "output": stats.output_size_in_bytes,
        "alias": stats.alias_size_in_bytes,
        "temporary": stats.temp_size_in_bytes,
        "code": stats.generated_code_size_in_bytes,
    }
    # Aliased arrays are arguments and outputs in the same memory, so the sum has them three times.
    needed = sum(sizes_by_kind.values()) - 2 * sizes_by_kind["alias"]
    live = []
    if assignment is not None:
        # The statistics count some buffers of loops twice; the buffer assignment has what is
        # allocated.
        sizes_by_kind["temporary"], total, live = assignment
        needed = total + sizes_by_kind["code"]
    limit = chip.hbm_bytes
    workspace = 0
    if chip.gpu is not None:
        workspace = attention_workspace(module)
        needed += workspace
        limit = array_bytes_of_gpu(chip, communicators(module, program.mesh.size))
    return Compiled(
        program,
        chip,
        seconds,
        flops,
        needed,
        limit,
        workspace_bytes=workspace,
        module=module,
        text=text,
        memory=sizes_by_kind,
        live=live,
        state_shardings=executable.input_shardings[0][0],
    )


def attention_workspace(module: hlo.Module) -> int:
    """Return the bytes of the workspace of cuDNN's attention on one GPU, 0 without it.

    The backward kernel sums the gradient of the queries in float32, in a workspace. Without a GPU
    the compiler cannot ask cuDNN for the size of the workspace, and counts 0 bytes. The kernels run
    one after the other, so the result is the largest workspace.
    """
    largest = 0
    for executed in module.executed:
        instruction = executed.instruction
        if f'custom_call_target="{_BACKWARD_KERNEL}"' in instruction.attributes:
            gradient = hlo.array_dims(instruction.shape)[0]
            largest = max(largest, 4 * math.prod(gradient))
    return largest


def communicators(module: hlo.Module, devices: int) -> int:
    """Return the number of sets of devices for which NCCL keeps buffers on one GPU.

    Raises:
        ValueError: Replica groups are in an unknown form.
    """
    sets = set()
    for executed in module.executed:
        instruction = executed.instruction
        if instruction.opcode.removesuffix("-start") in hlo.KINDS:
            groups = hlo.replica_groups(instruction.attributes, devices)
            sets.add(str(groups))
    return len(sets)


def array_bytes_of_gpu(
    chip: Chip, num_communicators: int, environment: Mapping[str, str] = os.environ
) -> int:
    """Estimate the bytes of a GPU's memory that arrays can take.

    JAX takes a share of the memory at its start. NCCL's buffers are outside that share if they fit
    there, and otherwise leave less of it.

    Args:
        num_communicators: Result of `communicators`.
        environment: Variables with `XLA_PYTHON_CLIENT_MEM_FRACTION`, by default the process's.

    Raises:
        MupaxError: The variable is no number above 0 and at most 1.
    """
    text = environment.get(MEM_FRACTION, "")
    try:
        share = float(text) if text else _DEFAULT_MEM_FRACTION
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise MupaxError(
            f"{MEM_FRACTION} is {text!r}; write a share of a GPU's memory, above 0 and at most 1, "
            f"such as {_DEFAULT_MEM_FRACTION}"
        )
    share_bytes = int(share * chip.hbm_bytes)
    return min(share_bytes, chip.hbm_bytes - num_communicators * NCCL_BYTES)


def _traced_flops(program: Program, traced: Any) -> float:
    """Return the FLOPs of all matrix products of a traced step, over all devices."""
    model = program.config.model
    device_kind = program.mesh.devices.flat[0].device_kind
    length = model.sizes()["position"]
    block = block_of(length, device_kind, model.compute.attention_block, causal=model.causal)
    visited = estimates.attention_share(program, block, of_grid=True)
    return estimates.matmul_flops(traced.jaxpr, visited)


def _sizes_of_error(message: str, program: Program) -> tuple[int, int] | None:
    """Return the needed bytes and the limit of a step that exceeds a chip's memory.

    `None` if the compiler's message is about something else.
    """
    temporaries = _TEMPORARIES.search(message)
    used = _USED.search(message) or temporaries
    if used is None:
        return None
    needed = int(float(used[1]) * _UNITS[used[2]])
    limit = int(float(used[3]) * _UNITS[used[4]])
    if used is temporaries:
        # The state is in memory besides the temporaries.
        needed += estimates.expected(program)["state"]
    return needed, limit


def _bandwidth(mesh: jax.sharding.Mesh, axes: tuple[str, ...], chip: Chip) -> float:
    """Return the bytes per second that a chip can send to its neighbors along mesh axes."""
    if not chip.torus:
        return chip.ici_bandwidth
    # One group stands for all: the groups along the same axes are wired alike.
    index: list[Any] = []
    for axis in mesh.shape:
        index.append(slice(None) if axis in axes else 0)
    group: Any = np.ravel(mesh.devices[tuple(index)])
    places = np.array([device.coords for device in group])
    # A chip's bandwidth is divided over the dimensions of the torus. A group uses those along which
    # its devices differ.
    wired = 0
    for column in places.T.tolist():
        wired += len(set(column)) > 1
    return chip.ici_bandwidth * max(1, wired) / chip.torus
