"""Reader of the compiler's optimized program (HLO text): instructions, bytes, cycles, collectives.

The compiler's own cost analysis counts the body of a loop once. Here every loop is followed with
its trip count. A collective has a kind, its bytes, its number of executions and its mesh axes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
)
"""Opcodes of collectives."""

_LISTS = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)")
_MESH = re.compile(
    r"replica_groups=@?\w*mesh\[([^\]]*)\]"
    r"(?:, device_ids=\((\[[\d,]+\](?:T\([\d,]+\))?|[\d,]+)\))?"
    r"\s*\{([^}]*)\}"
)
_PRODUCTS = ("dot", "convolution", "custom-call")
_BETWEEN = re.compile(r'_xla_megascale_transfer_type="(\w+)"')

_COMPUTATION = re.compile(
    r"^(ENTRY )?%([\w.\-]+) \([^\n]*\{\n(.*?)\n\}(?:, \w+=\S*)?$", re.MULTILINE | re.DOTALL
)
# A line break alone does not end an instruction: the attributes of a kernel hold line breaks.
_NEXT = re.compile(r"\n(?=\s+(?:ROOT )?%[\w.\-]+ = )")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%([\w.\-]+) = (.+?) ([\w\-]+)\(([^)]*)\)(.*)", re.DOTALL)
_ARRAY = re.compile(r"\b[a-z]+(\d*)\w*\[([\d,]*)\](\{[^}]*\})?")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|true_computation|false_computation|async_computation)=%([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
# `_origin` looks through these opcodes to the instruction that made a value.
_TRANSPARENT = ("bitcast", "copy", "convert", "reshape", "broadcast", "copy-start", "copy-done")
# `_walk` enters the computations that these opcodes call. Those of a fusion run as one kernel.
_CALLING = ("while", "call", "conditional", "async-start")
# Opcodes that move no bytes themselves.
_FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "while",
    "call",
    "conditional",
}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program.

    Attributes:
        kind: Member of `KINDS`, or the kind of a transfer between slices.
        bytes: Bytes of the complete array that one group gathers, sums, scatters or sends in one
            execution.
        axes: Mesh axes along which the devices of a group differ.
        group_size: Number of devices of a group.
        times: Executions in one run of the program.
        trips: Trip counts of the loops around the collective, outermost first.
        results: Shapes of the results on one device.
        name: Name of the HLO instruction.
        op_name: Place in the traced program.
        source: Place in the source, file:line.
        overlapped: `True` if matrix products run at the same time: in a fusion with the collective,
            or between its start and its end.
        between_slices: `True` if it crosses the slow network between slices or hosts.
        gathers: `True` for a sum of parts that are each in an array of zeros. The TPU compiler
            makes such sums of some gathers, at twice the bytes.
    """

    kind: str
    bytes: int
    axes: tuple[str, ...]
    group_size: int
    times: int
    trips: tuple[int, ...]
    results: tuple[tuple[int, ...], ...]
    name: str
    op_name: str
    source: str
    overlapped: bool = False
    between_slices: bool = False
    gathers: bool = False

    @property
    def wire_bytes(self) -> float:
        """Bytes that a device sends in one execution, by the ring algorithm.

        In an all-to-all a device sends to every other one directly.
        """
        if self.kind in ("collective-permute", "collective-broadcast"):
            return self.bytes
        # A ring all-reduce is a reduce-scatter followed by an all-gather.
        num_passes = 2 if self.kind == "all-reduce" else 1
        return num_passes * self.bytes * (self.group_size - 1) / self.group_size


def collectives(
    module: Module,
    mesh: Mapping[str, int],
    across: Mapping[str, int] | None = None,
    islands: Sequence[int] = (),
) -> list[Collective]:
    """Return every collective of a program that sends data between devices.

    A collective that the compiler has cut into several instructions is returned once.

    Args:
        module: Program, as `parse` returns it.
        mesh: Size by axis name, in the order of the mesh's dimensions.
        across: Number of slices by axis, for axes that cross slices. By default none does.
        islands: Number of the host of every GPU, by which collectives that cross hosts are found.
            By default none, as for TPUs, where only the opcode `send` crosses slices.

    Raises:
        ValueError: Replica groups are in an unknown form.
    """
    across = across or {}
    by_name: dict[tuple[str, str], Collective] = {}
    for executed in module.executed:
        for part in _parts(module, executed.instruction, executed.computation):
            collective = _collective(module, executed, part, mesh, across, islands)
            if collective is None:
                continue
            # A collective may be cut into parts in several fusions. All parts have the same
            # chain_id. The channel id is no key, because many collectives may share one.
            chain = _chain(part.instruction)
            key = (executed.computation, chain or part.instruction.name)
            by_name.setdefault(key, collective)
    return list(by_name.values())


class _Part(NamedTuple):
    """Instruction that is a collective, or a part of one inside a fusion."""

    computation: str
    instruction: Instruction
    kind: str


def _collective(
    module: Module,
    executed: Executed,
    part: _Part,
    mesh: Mapping[str, int],
    across: Mapping[str, int],
    islands: Sequence[int],
) -> Collective | None:
    """Return the collective of an instruction, or `None` if it stays on one device.

    Args:
        executed: Instruction outside fusions that is the collective, or a fusion that holds it.
        part: The collective's own instruction, which is `executed` or inside its fusion.
        mesh: Size by axis name, in the order of the mesh's dimensions.
        across: Number of slices by axis, for axes that cross slices.
        islands: Number of the host of every GPU. Empty for TPUs, where only the opcode `send`
            crosses slices.
    """
    instruction = part.instruction
    kind = part.kind
    # Only transfers between slices of TPUs are sends.
    is_send = instruction.opcode == "send"
    between_slices = is_send
    if is_send:
        axes = tuple(across)
        size = math.prod(across.values())
    else:
        groups = replica_groups(instruction.attributes, math.prod(mesh.values()))
        axes, size = axes_of(groups, mesh, pairs=kind == "collective-permute")
        if islands:
            for group in groups:
                group_islands = {islands[partition] for partition in group}
                between_slices = between_slices or len(group_islands) > 1
    # A mesh axis of size 1 leaves collectives in the program that send nothing.
    if size < 2:
        return None

    computation = module.computations[part.computation]
    sent = 0
    for name in instruction.operands:
        # A token orders transfers and holds no data, but its type would count as one byte.
        if computation[name].opcode != "after-all":
            sent += computation[name].bytes
    holder = executed.instruction
    overlapped = (
        is_send
        or _chain(instruction) is not None
        or _hidden(module, computation, instruction)
        or _hidden(module, module.computations[executed.computation], holder)
    )
    gathers = kind == "all-reduce" and all(
        _in_zeros(module, computation, name) for name in instruction.operands
    )
    return Collective(
        kind=kind,
        # `sent` has the bytes of the operands. An operand of an all-gather is one shard of the
        # result.
        bytes=sent * size if kind == "all-gather" else sent,
        axes=axes,
        group_size=size,
        times=executed.times,
        trips=executed.trips,
        results=tuple(array_dims(instruction.shape)),
        name=instruction.name,
        op_name=instruction.op_name or holder.op_name,
        source=module.source(instruction) or module.source(holder),
        overlapped=overlapped,
        between_slices=between_slices,
        gathers=gathers,
    )


def _chain(instruction: Instruction) -> str | None:
    """Return the text `chain_id="N"` of an instruction, or `None` if it has none.

    All instructions into which the compiler has cut one collective have the same text.
    """
    match = re.search(r'chain_id="(\d+)"', instruction.attributes)
    return match[0] if match else None


def _hidden(module: Module, computation: Mapping[str, Instruction], start: Instruction) -> bool:
    """Return whether products or kernels run between a collective's start and its end.

    Instructions run in the order of the text. A collective without a start of its own (an opcode
    that ends with "-start") is never hidden.
    """
    # A collective without a -start is synchronous: nothing runs at the same time.
    if not start.opcode.endswith("-start"):
        return False
    index = list(computation).index(start.name)
    for instruction in itertools.islice(computation.values(), index + 1, None):
        if start.name in instruction.operands:
            return False
        if instruction.opcode in _PRODUCTS:
            return True
        for name in instruction.called():
            if any(inner.opcode in _PRODUCTS for inner in module.computations[name].values()):
                return True
    return False


def _in_zeros(module: Module, computation: Mapping[str, Instruction], name: str) -> bool:
    """Return whether an array is one part that was written into an array of zeros.

    The TPU compiler makes all-reduces of such arrays in place of some all-gathers. An array that
    repeats any one number is taken for zeros.

    Args:
        computation: Instructions by name, of the computation that has the array.
        name: Name of the instruction whose result the array is.
    """
    instruction = computation[name]
    while instruction.opcode in ("copy", "bitcast"):
        instruction = computation[instruction.operands[0]]

    inside = computation
    fusion = instruction
    if fusion.opcode == "fusion":
        inside = module.computations[fusion.called()[0]]
        instruction = next(inner for inner in inside.values() if inner.root)
    if instruction.opcode != "dynamic-update-slice":
        return False
    base = inside[instruction.operands[0]]
    if base.opcode == "parameter" and inside is not computation:
        base = computation[fusion.operands[int(base.arguments)]]
    # Any broadcast is assumed to be one of zeros. Its number is not looked up.
    return base.opcode == "broadcast"


def _parts(module: Module, instruction: Instruction, computation: str) -> Iterator[_Part]:
    """Yield the collectives that an instruction is or that its fusion holds."""
    kind = instruction.opcode.removesuffix("-start")
    if kind in KINDS:
        # On TPU, a reduce-scatter is an all-reduce in a computation with `reduce-scatter` in its
        # name.
        if kind == "all-reduce" and "reduce-scatter" in computation:
            kind = "reduce-scatter"
        yield _Part(computation, instruction, kind)
        return
    if kind == "send":
        transfer = _BETWEEN.search(instruction.attributes)
        if transfer:
            yield _Part(computation, instruction, transfer[1].lower().replace("_", "-"))
            return
    # On TPU v7x other cores of the chip send. The opcode "call-start" starts their work.
    if instruction.opcode in ("fusion", "call-start"):
        for name in instruction.called():
            for inner in module.computations[name].values():
                yield from _parts(module, inner, name)


def replica_groups(attributes: str, devices: int) -> list[list[int]]:
    """Return the groups of partition numbers that take part in a collective.

    For a permute, the groups are its (source, target) pairs.

    Args:
        attributes: Text of the instruction after its operands, in any of HLO's forms.
        devices: Number of partitions. They are one group if the text has `replica_groups={}`.

    Raises:
        ValueError: The text has no groups, or has them in an unknown form.
    """
    lists = _LISTS.search(attributes)
    if lists:
        return [_numbers(group) for group in re.findall(r"\{([\d, ]+)\}", lists[1])]
    iota = _IOTA.search(attributes)
    if iota:
        return _iota(iota[2]).reshape(_numbers(iota[1])).tolist()
    mesh = _MESH.search(attributes)
    if mesh:
        return _mesh_groups(mesh[1], mesh[2], mesh[3])
    if "replica_groups={}" in attributes:
        return [list(range(devices))]
    raise ValueError(f"replica groups in a form that is not known: {attributes[:200]}")


def _iota(text: str) -> np.ndarray:
    """Return the array of a text such as `[2,4]T(1,0)`: numbers from 0 in a shape, transposed."""
    dims, _, order = text.partition("T")
    shape = _numbers(dims)
    ids = np.arange(math.prod(shape)).reshape(shape)
    if order:
        return ids.transpose(_numbers(order))
    return ids


def _mesh_groups(mesh: str, device_ids: str | None, axes: str) -> list[list[int]]:
    """Return the groups of a text such as `mesh['a'=2,'b'=4] {'a', 'b':(2)2}`.

    A group varies over the named axes, or, for `'b':(before)size`, over a part of an axis.

    Args:
        mesh: Axes with their sizes, such as `'a'=2,'b'=4`.
        device_ids: Partition numbers, as a list or as `_iota` reads them. By default they count
            through the mesh.
        axes: Axes or parts of axes over which a group varies.
    """
    sizes = {}
    for name, size in re.findall(r"'?([\w.]+)'?=(\d+)", mesh):
        sizes[name] = int(size)
    ids = device_ids or f"[{math.prod(sizes.values())}]"
    devices = _iota(ids).ravel().tolist() if ids.startswith("[") else _numbers(ids)
    coordinates = np.unravel_index(range(len(devices)), tuple(sizes.values()))
    # After the loop: the coordinates that all devices of a group share, by axis.
    fixed = dict(zip(sizes, coordinates, strict=True))
    for name, preceding, size in re.findall(r"'?([A-Za-z_][\w.]*)'?(?::\((\d+)\)(\d+))?", axes):
        num_before = int(preceding or 1)
        num_varying = int(size or sizes[name])
        num_after = sizes[name] // (num_before * num_varying)
        coordinate = fixed[name]
        outer = coordinate // (num_varying * num_after) * num_after
        fixed[name] = outer + coordinate % num_after

    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for device, *place in zip(devices, *fixed.values(), strict=True):
        groups[tuple(map(int, place))].append(device)
    return list(groups.values())


def _numbers(text: str) -> list[int]:
    """Return all whole numbers of a text."""
    return [int(digits) for digits in re.findall(r"\d+", text)]


def axes_of(
    groups: list[list[int]], mesh: Mapping[str, int], *, pairs: bool = False
) -> tuple[tuple[str, ...], int]:
    """Return the mesh axes along which a group's devices differ, and the group's size.

    For a permute, the size is the number of devices along these axes. If no group has two devices,
    the result is `((), 1)`.

    Args:
        groups: Partition numbers, which count through the mesh in C order. Groups of one device
            are ignored.
        mesh: Size by axis name, in the order of the mesh's dimensions.
        pairs: `True` if the groups are the (source, target) pairs of a permute.
    """
    shape = tuple(mesh.values())
    differing = set()
    for group in groups:
        if len(set(group)) < 2:
            continue
        for index, coordinates in enumerate(np.unravel_index(group, shape)):
            if len(set(coordinates.tolist())) > 1:
                differing.add(index)
    names = tuple(name for index, name in enumerate(mesh) if index in differing)
    if not names:
        return (), 1
    if pairs:
        return names, math.prod(mesh[name] for name in names)
    return names, max(len(group) for group in groups)


def table(collectives: Iterable[Collective]) -> list[dict[str, Any]]:
    """Return sums by kind, axes and loop as rows of a report, the most bytes sent first.

    A row has `count` collectives and, over one run of the program, their `executions`, `bytes` (of
    complete arrays), `wire_bytes` (sent by one device) and `alone_bytes`, those of `wire_bytes`
    that are not overlapped with matrix products.
    """
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for collective in collectives:
        labels = {
            "kind": collective.kind,
            "axes": [*collective.axes],
            "group_size": collective.group_size,
            "loop_trips": [*collective.trips],
            "between_slices": collective.between_slices,
            "gathers": collective.gathers,
        }
        sent = collective.wire_bytes * collective.times
        amounts = {
            "count": 1,
            "executions": collective.times,
            "bytes": collective.bytes * collective.times,
            "wire_bytes": sent,
            "alone_bytes": 0.0 if collective.overlapped else sent,
        }
        key = tuple(str(label) for label in labels.values())
        row = rows.setdefault(key, {**labels, **dict.fromkeys(amounts, 0)})
        for name, amount in amounts.items():
            row[name] += amount
    return sorted(rows.values(), key=lambda row: -row["wire_bytes"])


@dataclasses.dataclass(frozen=True)
class Instruction:
    """Instruction of a computation.

    Attributes:
        name: Name within the program.
        opcode: Operation, such as "dot".
        shape: Text of the result's type with layouts. A tuple is in brackets.
        operands: Names of the operands.
        attributes: Text after the operands.
        arguments: Text between the operands' brackets: a constant's value, a parameter's number.
        root: `True` for the result of the computation.
    """

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    attributes: str
    arguments: str
    root: bool

    @property
    def bytes(self) -> int:
        """Bytes of the result, without padding."""
        return sum(array_bytes(self.shape))

    @property
    def op_name(self) -> str:
        """Place in the traced program, such as jit(step)/jvp()/while/body/dot_general."""
        return _group(r'op_name="([^"]*)"', self.attributes)

    @property
    def cycles(self) -> int:
        """Clock cycles that the compiler expects. 0 if it does not say."""
        return int(_group(r'"estimated_cycles":"(\d+)"', self.attributes) or 0)

    def called(self, part: str = "body") -> list[str]:
        """Return the names of the computations that the instruction runs.

        Args:
            part: Part of a loop, "body" or "condition". By default the body.
        """
        if self.opcode == "while":
            return re.findall(rf"{part}=%([\w.\-]+)", self.attributes)
        branches = _BRANCHES.search(self.attributes)
        if branches:
            return re.findall(r"[\w.\-]+", branches[1])
        return _CALLED.findall(self.attributes)


@dataclasses.dataclass(frozen=True)
class Executed:
    """Instruction that the entry computation reaches outside fusions.

    Attributes:
        instruction: Instruction itself.
        computation: Name of the computation that has the instruction.
        trips: Trip counts of the loops around the instruction, outermost first.
    """

    instruction: Instruction
    computation: str
    trips: tuple[int, ...]

    @property
    def times(self) -> int:
        """Executions in one run of the program."""
        return math.prod(self.trips)


@dataclasses.dataclass(frozen=True)
class Module:
    """HLO module, an optimized program.

    Attributes:
        computations: Instructions by name, by name of the computation.
        entry: Name of the computation that a run starts with.
        sources: Place in the source (file:line) by number of a stack frame.
    """

    computations: dict[str, dict[str, Instruction]]
    entry: str
    sources: dict[str, str]

    def source(self, instruction: Instruction) -> str:
        """Return the place in the source (file:line) that made the instruction, or ''."""
        return self.sources.get(_group(r"stack_frame_id=(\d+)", instruction.attributes), "")

    @cached_property
    def executed(self) -> list[Executed]:
        """Instructions that one run executes, in order, once each with their loops' trip counts.

        Instructions inside fusions are left out. Of a conditional, only the branch with the most
        clock cycles is followed.
        """
        return list(self._walk(self.entry, ()))

    def _walk(self, computation: str, trips: tuple[int, ...]) -> Iterator[Executed]:
        """Yield the instructions of a computation and of those that it calls outside fusions.

        Args:
            trips: Trip counts of the loops around the computation, outermost first.
        """
        for instruction in self.computations[computation].values():
            yield Executed(instruction, computation, trips)
            if instruction.opcode not in _CALLING:
                continue
            called = instruction.called()
            inner_trips = trips
            if instruction.opcode == "conditional":
                # Only one branch runs. The one with the most cycles is assumed.
                called = [max(called, key=self._cycles_of)]
            if instruction.opcode == "while":
                inner_trips = (*trips, self.trip_count(computation, instruction) or 1)
            for name in called:
                yield from self._walk(name, inner_trips)

    def _cycles_of(self, computation: str) -> int:
        """Return the clock cycles of a computation and of those that it calls."""
        return dataclasses.replace(self, entry=computation).cycles

    def trip_count(self, computation: str, loop: Instruction) -> int | None:
        """Return the number of runs of a loop's body, or `None` if the program does not say.

        Without a count by the compiler, the loop must run while a counter is less than a constant.
        The counter is taken to grow by 1.

        Args:
            computation: Name of the computation that has the loop and starts its counter.
            loop: Instruction of opcode `while`.
        """
        trips = _group(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes)
        if trips:
            return int(trips)

        # Without a count by the compiler, read the condition, which must be counter < constant.
        outside = self.computations[computation]
        condition = self.computations[loop.called("condition")[0]]
        test = next(instruction for instruction in condition.values() if instruction.root)
        if test.opcode != "compare" or "direction=LT" not in test.attributes:
            return None
        bounds = []
        for name in test.operands:
            bound = _origin(condition, name)
            entered = outside[loop.operands[0]]
            if bound.opcode == "get-tuple-element" and entered.opcode == "tuple":
                index = int(_group(r"index=(\d+)", bound.attributes))
                bound = _origin(outside, entered.operands[index])
            is_integer = bound.arguments.lstrip("-").isdigit()
            if bound.opcode != "constant" or not is_integer:
                return None
            bounds.append(int(bound.arguments))
        # With LT the counter is the first operand. It is taken to grow by 1, as in loops of JAX.
        start, stop = bounds
        return max(0, stop - start)

    @property
    def unknown_loops(self) -> int:
        """Number of loops whose trip count is not known. They are counted once."""
        count = 0
        for executed in self.executed:
            if executed.instruction.opcode == "while":
                trips = self.trip_count(executed.computation, executed.instruction)
                count += trips is None
        return count

    @property
    def cycles(self) -> int:
        """Clock cycles of one run: the compiler's estimates times trip counts.

        Collectives have no estimates.
        """
        return sum(
            self._cycles(executed.instruction) * executed.times for executed in self.executed
        )

    def _cycles(self, instruction: Instruction) -> int:
        """Return the clock cycles of one execution of an instruction."""
        if instruction.cycles or instruction.opcode != "fusion":
            return instruction.cycles
        # A fusion with a part of a collective has no estimate itself. Its inner instructions have
        # some.
        total = 0
        for name in instruction.called():
            for inner in self.computations[name].values():
                total += self._cycles(inner)
        return total

    @property
    def hbm_bytes(self) -> int:
        """Bytes that one run reads from and writes to one device's main memory.

        Those inside loops count as often as the loop runs. They are computed at each access.
        """
        total = 0
        for executed in self.executed:
            moved = self._moved(executed.instruction, executed.computation)
            total += moved * executed.times
        return total

    def _moved(self, instruction: Instruction, computation: str) -> int:
        """Return the bytes of main memory that one execution of an instruction reads and writes."""
        # The bytes of an asynchronous operation are counted at its -start.
        if instruction.opcode in _FREE or instruction.opcode.endswith(("-done", "-update")):
            return 0
        written = sum(array_bytes(instruction.shape, hbm_only=True))
        read = []
        for name in instruction.operands:
            operand = self.computations[computation][name]
            read.append(sum(array_bytes(operand.shape, hbm_only=True)))
        if instruction.opcode in ("dynamic-slice", "slice", "gather"):
            # The operand may be a stack of all layers, of which only the result's bytes are read.
            return written + min(written, read[0])
        if instruction.opcode == "dynamic-update-slice":
            # Only the slice is read and written: the array around it stays in its place.
            return 2 * read[1]
        # The type of copy-start has both target and source, so `written` includes the bytes read.
        if instruction.opcode == "copy-start":
            return written
        if instruction.opcode == "fusion-start":
            # The type of fusion-start has the operands, too, so take the type of the fusion's
            # result.
            inner = self.computations[instruction.called()[0]].values()
            results = [value for value in inner if value.root]
            written = sum(array_bytes(results[0].shape, hbm_only=True))
            return self._moved_by_fusion(instruction, written, read)
        if instruction.opcode != "fusion":
            return written + sum(read)
        return self._moved_by_fusion(instruction, written, read)

    def _moved_by_fusion(self, fusion: Instruction, written: int, read: list[int]) -> int:
        """Return the bytes of main memory that one execution of a fusion reads and writes.

        If an operand is only sliced, or updated in place, only the bytes of the slices are counted.

        Args:
            fusion: Instruction of opcode `fusion` or `fusion-start`.
            written: Bytes of the result in main memory.
            read: Bytes of each operand in main memory, 0 for operands on the chip.
        """
        inner = self.computations[fusion.called()[0]]
        parameters = {}
        for instruction in inner.values():
            if instruction.opcode == "parameter":
                parameters[int(instruction.arguments)] = instruction

        total_read = 0
        for index, size in enumerate(read):
            names, users = _users(inner, parameters[index].name)
            if not size:
                users = []
            is_sliced = all(user.opcode in ("dynamic-slice", "gather") for user in users)
            is_updated = all(
                user.opcode == "dynamic-update-slice" and user.operands[0] in names
                for user in users
            )
            if users and is_sliced:
                # One layer of a stack is read, not the stack.
                total_read += min(size, sum(user.bytes for user in users))
            elif users and is_updated:
                # One layer of a stack is written in place.
                written = max(0, written - size)
                for user in users:
                    if user.operands[1] in inner:
                        written += inner[user.operands[1]].bytes
            else:
                total_read += size
        return written + total_read


def _users(computation: dict[str, Instruction], name: str) -> tuple[set[str], list[Instruction]]:
    """Return the names of a value and the instructions that use it.

    A bitcast gives the same bytes another name, and its users are the value's users. jax 0.12
    has bitcasts before most slices of stacks.
    """
    names = {name}
    users = []
    # HLO defines a value before its users, so one pass also finds the users of its bitcasts.
    for instruction in computation.values():
        if names.isdisjoint(instruction.operands):
            continue
        if instruction.opcode == "bitcast":
            names.add(instruction.name)
        else:
            users.append(instruction)
    return names, users


def array_bytes(shape: str, *, hbm_only: bool = False) -> list[int]:
    """Return the bytes of every array in a type's text, without padding.

    Args:
        shape: Type as HLO writes it, such as `f32[8,128]{1,0}`. A tuple has several arrays.
        hbm_only: `True` leaves out arrays that are on the chip, outside main memory.
    """
    sizes = []
    for bits, dims, layout in _ARRAY.findall(shape):
        # A layout with S(n) is in memory space n, and space 0 is main memory.
        if hbm_only and re.search(r"S\([1-9]", layout):
            continue
        # The type pred names no bits and takes a byte.
        num_bits = math.prod(_ints(dims)) * int(bits or 8)
        sizes.append(math.ceil(num_bits / 8))
    return sizes


def array_dims(shape: str) -> list[tuple[int, ...]]:
    """Return the shape of every array in a type's text."""
    return [_ints(dims) for _, dims, _ in _ARRAY.findall(shape)]


def _ints(dims: str) -> tuple[int, ...]:
    """Return the numbers of a text such as "8,128"."""
    extents = []
    for size in dims.split(","):
        if size:
            extents.append(int(size))
    return tuple(extents)


def parse(text: str) -> Module:
    """Return the module of a text that `jax.stages.Compiled.as_text()` prints.

    Raises:
        ValueError: The text has no entry computation.
    """
    computations = {}
    entry = ""
    for mark, name, body in _COMPUTATION.findall(text):
        instructions = [_instruction(line) for line in _NEXT.split(body)]
        computations[name] = {instruction.name: instruction for instruction in instructions}
        if mark:
            entry = name
    if not entry:
        raise ValueError("the text is not an optimized HLO module: it has no ENTRY computation")
    return Module(computations, entry, _sources(text))


def _instruction(line: str) -> Instruction:
    """Parse the HLO text of one instruction, such as `%x = f32[8]{0} add(%a, %b)`."""
    match = _INSTRUCTION.match(line)
    assert match is not None, line[:200]
    root, name, shape, opcode, arguments, attributes = match.groups()
    operands = tuple(re.findall(r"%([\w.\-]+)", arguments))
    return Instruction(name, opcode, shape, operands, attributes, arguments, bool(root))


def _origin(computation: dict[str, Instruction], name: str) -> Instruction:
    """Return the instruction that computes a value, before copies, casts and reshapes of the value.

    Args:
        computation: Instructions by name, of the computation that has the instruction `name`.
        name: Instruction to start from. It is followed back to the first operand as long as its
            opcode is in `_TRANSPARENT`.
    """
    instruction = computation[name]
    while instruction.opcode in _TRANSPARENT:
        instruction = computation[instruction.operands[0]]
    return instruction


def _sources(text: str) -> dict[str, str]:
    """Return the place in the source (file:line) by number of a stack frame.

    The tables at the head of the module's text have them.
    """
    table = _group(r"(?m)^FileNames\n((?:\d.*\n)*)", text)
    files = dict(re.findall(r'^(\d+) "(.*)"$', table, re.MULTILINE))
    locations = re.findall(r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)", text, re.MULTILINE)
    places = {}
    for number, file, line in locations:
        places[number] = f"{_place(files[file])}:{line}"
    frames = re.findall(r"^(\d+) \{file_location_id=(\d+)", text, re.MULTILINE)
    place_of_frame = {}
    for number, location in frames:
        if location in places:
            place_of_frame[number] = places[location]
    return place_of_frame


def _place(path: str) -> str:
    """Return a short form of a source file's path, for reports.

    A file of mupax is written from mupax's folder on. Any other file is written as FOLDER/NAME.
    """
    folders, _, inside = path.rpartition("/mupax/")
    if folders:
        return inside
    return "/".join(path.split("/")[-2:])


def _group(pattern: str, text: str) -> str:
    """Return the first group of the first match, or ''."""
    match = re.search(pattern, text)
    return match[1] if match else ""
