"""Reading the compiler's optimized program (HLO text): instructions, what runs how often, bytes and estimated cycles.

The compiler's own cost analysis counts the body of a loop once; here every loop is followed with its trip count.

Its collectives have a kind, bytes, how often they run, and the mesh axes they run on.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast",
         "ragged-all-to-all")  # fmt: skip

_LISTS = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)")
_MESH = re.compile(
    r"replica_groups=@?\w*mesh\[([^\]]*)\](?:, device_ids=\((\[[\d,]+\](?:T\([\d,]+\))?|[\d,]+)\))?\s*\{([^}]*)\}"
)
_PRODUCTS = ("dot", "convolution", "custom-call")
_BETWEEN = re.compile(r'_xla_megascale_transfer_type="(\w+)"')

_COMPUTATION = re.compile(
    r"^(ENTRY )?%([\w.\-]+) \([^\n]*\{\n(.*?)\n\}(?:, \w+=\S*)?$", re.MULTILINE | re.DOTALL
)
_NEXT = re.compile(
    r"\n(?=\s+(?:ROOT )?%[\w.\-]+ = )"
)  # the attributes of a kernel hold line breaks
_INSTRUCTION = re.compile(r"\s+(ROOT )?%([\w.\-]+) = (.+?) ([\w\-]+)\(([^)]*)\)(.*)", re.DOTALL)
_ARRAY = re.compile(r"\b[a-z]+(\d*)\w*\[([\d,]*)\](\{[^}]*\})?")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|true_computation|false_computation|async_computation)=%([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRANSPARENT = ("bitcast", "copy", "convert", "reshape", "broadcast", "copy-start", "copy-done")
_CALLING = ("while", "call", "conditional", "async-start")
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
    """One collective of a program, as every device of its group takes part in it."""

    kind: str
    bytes: int
    """Of the whole array that is gathered, summed, scattered or sent, on one execution, in one group."""
    axes: tuple[str, ...]
    """Mesh axes along which the devices of a group differ."""
    group_size: int
    times: int
    """Executions in one run of the program."""
    trips: tuple[int, ...]
    """Trip counts of the loops around it, outermost first; empty outside every loop."""
    results: tuple[tuple[int, ...], ...]
    """Dimensions of what it makes on a device."""
    name: str
    op_name: str
    source: str
    overlapped: bool = False
    """Whether it runs beside products: inside fusions with them, or begun before and ended after them."""
    between_slices: bool = False
    """Whether it is sent over the slow network, by the hosts."""
    gathers: bool = False
    """Whether it is a sum of parts, each in an array of zeros: what the TPU compiler makes of some gathers, at twice the bytes."""

    @property
    def wire_bytes(self) -> float:
        """Bytes that a device sends in one execution, by the ring algorithm (all-to-all: to every other directly)."""
        if self.kind in ("collective-permute", "collective-broadcast"):
            return self.bytes
        return (
            (2 if self.kind == "all-reduce" else 1)
            * self.bytes
            * (self.group_size - 1)
            / self.group_size
        )


def collectives(
    module: Module, mesh: Mapping[str, int], across: Mapping[str, int] | None = None
) -> list[Collective]:
    """Every collective that moves something, once each however the compiler cuts it up.

    Args:
        module: the optimized program.
        mesh: axis name to size, in the order of the mesh's dimensions.
        across: of those that cross slices, the number of slices along them.
    """
    across, by_name = across or {}, {}
    for executed in module.executed:
        holder = executed.instruction
        for computation, instruction, kind in _within(module, holder, executed.computation):
            between = instruction.opcode == "send"
            if between:
                axes, size = tuple(across), math.prod(across.values())
            else:
                groups = replica_groups(instruction.attributes, math.prod(mesh.values()))
                axes, size = axes_of(groups, mesh, pairs=kind == "collective-permute")
            if size < 2:
                continue
            where = module.computations[computation]
            sent = sum(
                where[name].bytes
                for name in instruction.operands
                if where[name].opcode != "after-all"
            )
            # The parts of a collective that several fusions hold have one chain; a channel may be that of many collectives.
            chain = re.search(r'chain_id="(\d+)"', instruction.attributes)
            collective = Collective(
                kind=kind,
                bytes=sent * size if kind == "all-gather" else sent,
                axes=axes,
                group_size=size,
                times=executed.times,
                trips=executed.trips,
                results=tuple(array_dims(instruction.shape)),
                name=instruction.name,
                op_name=instruction.op_name or holder.op_name,
                source=module.source(instruction) or module.source(holder),
                overlapped=between
                or chain is not None
                or _hidden(module, where, instruction)
                or _hidden(module, module.computations[executed.computation], holder),
                between_slices=between,
                gathers=kind == "all-reduce"
                and all(_in_zeros(module, where, name) for name in instruction.operands),
            )
            by_name.setdefault(
                (executed.computation, chain[0] if chain else instruction.name), collective
            )
    return list(by_name.values())


def _hidden(module: Module, where: Mapping[str, Instruction], start: Instruction) -> bool:
    """Whether products or kernels run between a collective's start and its end, in the order that the compiler gave them."""
    if not start.opcode.endswith("-start"):
        return False
    for one in itertools.islice(where.values(), [*where].index(start.name) + 1, None):
        if start.name in one.operands:
            return False
        if one.opcode in _PRODUCTS or any(
            inner.opcode in _PRODUCTS
            for name in one.called()
            for inner in module.computations[name].values()
        ):
            return True
    return False


def _in_zeros(module: Module, where: Mapping[str, Instruction], name: str) -> bool:
    """Whether an array is one part, written into zeros: into what is one number everywhere."""
    one = where[name]
    while one.opcode in ("copy", "bitcast"):
        one = where[one.operands[0]]
    outside, operands = where, one.operands
    if one.opcode == "fusion":
        where = module.computations[one.called()[0]]
        one = next(inner for inner in where.values() if inner.root)
    if one.opcode != "dynamic-update-slice":
        return False
    base = where[one.operands[0]]
    if base.opcode == "parameter" and where is not outside:
        base = outside[operands[int(base.arguments)]]
    return base.opcode == "broadcast"


def _within(
    module: Module, instruction: Instruction, computation: str
) -> Iterator[tuple[str, Instruction, str]]:
    """The collectives that an instruction is or that its fusion holds: computation, instruction and kind of each."""
    kind = instruction.opcode.removesuffix("-start")
    if kind in KINDS:
        # A sum of which every device keeps its own part is one operation on TPU.
        scattered = kind == "all-reduce" and "reduce-scatter" in computation
        yield computation, instruction, "reduce-scatter" if scattered else kind
    elif kind == "send" and (transfer := _BETWEEN.search(instruction.attributes)):
        yield computation, instruction, transfer[1].lower().replace("_", "-")
    elif instruction.opcode in (
        "fusion",
        "call-start",
    ):  # the latter on v7x, whose other cores send
        for name in instruction.called():
            for one in module.computations[name].values():
                yield from _within(module, one, name)


def replica_groups(attributes: str, devices: int) -> list[list[int]]:
    """Groups of partition numbers, from any of the forms that HLO writes them in; of a permute its (source, target) pairs.

    Args:
        attributes: the instruction's text after its operands.
        devices: partitions of the program, all in one group where the text names none.

    Raises:
        ValueError: a form that is not known.
    """
    if match := _LISTS.search(attributes):
        return [_numbers(group) for group in re.findall(r"\{([\d, ]+)\}", match[1])]
    if match := _IOTA.search(attributes):
        return _iota(match[2]).reshape(_numbers(match[1])).tolist()
    if match := _MESH.search(attributes):
        return _mesh_groups(match[1], match[2], match[3])
    if "replica_groups={}" in attributes:
        return [list(range(devices))]
    raise ValueError(f"replica groups in a form that is not known: {attributes[:200]}")


def _iota(text: str) -> np.ndarray:
    """`[2,4]T(1,0)`: the numbers from 0 in that shape, transposed."""
    dims, _, order = text.partition("T")
    ids = np.arange(math.prod(_numbers(dims))).reshape(_numbers(dims))
    return ids.transpose(_numbers(order)) if order else ids


def _mesh_groups(mesh: str, device_ids: str | None, named: str) -> list[list[int]]:
    """`mesh['a'=2,'b'=4] {'a', 'b':(2)2}`: a group is what varies over the named axes, or over parts (before)size of them."""
    sizes = {name: int(size) for name, size in re.findall(r"'?([\w.]+)'?=(\d+)", mesh)}
    ids = device_ids or f"[{math.prod(sizes.values())}]"
    devices = _iota(ids).ravel().tolist() if ids.startswith("[") else _numbers(ids)
    fixed = dict(
        zip(sizes, np.unravel_index(range(len(devices)), tuple(sizes.values())), strict=True)
    )
    for name, before, size in re.findall(r"'?([A-Za-z_][\w.]*)'?(?::\((\d+)\)(\d+))?", named):
        after = sizes[name] // (int(before or 1) * int(size or sizes[name]))
        fixed[name] = (
            fixed[name] // (int(size or sizes[name]) * after) * after + fixed[name] % after
        )
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for device, *place in zip(devices, *fixed.values(), strict=True):
        groups[tuple(map(int, place))].append(device)
    return list(groups.values())


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def axes_of(
    groups: list[list[int]], mesh: Mapping[str, int], *, pairs: bool = False
) -> tuple[tuple[str, ...], int]:
    """Mesh axes along which a group's devices differ, and the group's size (of a permute, that of these axes).

    Args:
        groups: of partition numbers, which count through the mesh in C order; those of one device are passed over.
        mesh: axis name to size, in the order of the mesh's dimensions.
        pairs: whether the groups are the (source, target) pairs of a permute.
    """
    shape = tuple(mesh.values())
    coordinates = [
        np.array(np.unravel_index(group, shape)) for group in groups if len(set(group)) > 1
    ]
    names = tuple(
        name
        for i, name in enumerate(mesh)
        if any(len(set(where[i].tolist())) > 1 for where in coordinates)
    )
    if not names:
        return (), 1
    return names, math.prod(mesh[name] for name in names) if pairs else max(map(len, groups))


def table(collectives: Iterable[Collective]) -> list[dict[str, Any]]:
    """Sums by kind, axes and loop, largest total first: what a report shows. `alone_bytes` are those sent beside nothing."""
    rows: dict[Any, dict[str, Any]] = {}
    for one in collectives:
        where = {
            "kind": one.kind,
            "axes": [*one.axes],
            "group_size": one.group_size,
            "loop_trips": [*one.trips],
        }
        where |= {"between_slices": one.between_slices, "gathers": one.gathers}
        sent = one.wire_bytes * one.times
        more = {
            "count": 1,
            "executions": one.times,
            "bytes": one.bytes * one.times,
            "wire_bytes": sent,
        }
        more |= {"alone_bytes": 0.0 if one.overlapped else sent}
        row = rows.setdefault(tuple(map(str, where.values())), {**where, **dict.fromkeys(more, 0)})
        for name, number in more.items():
            row[name] += number
    return sorted(rows.values(), key=lambda row: -row["wire_bytes"])


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    shape: str
    """Text of the result's type, with layouts; a tuple in brackets."""
    operands: tuple[str, ...]
    attributes: str
    """What follows the operands."""
    arguments: str
    """Text between the operands' brackets: a constant's value, a parameter's number."""
    root: bool

    @property
    def bytes(self) -> int:
        """Size of the result, without padding."""
        return sum(array_bytes(self.shape))

    @property
    def op_name(self) -> str:
        """Where in the traced program it comes from, such as jit(step)/jvp()/while/body/dot_general."""
        return _group(r'op_name="([^"]*)"', self.attributes)

    @property
    def cycles(self) -> int:
        """Clock cycles the compiler expects; 0 where it says nothing."""
        return int(_group(r'"estimated_cycles":"(\d+)"', self.attributes) or 0)

    def called(self, part: str = "body") -> list[str]:
        """Names of the computations that it runs; of a loop the body alone, or the condition."""
        if self.opcode == "while":
            return re.findall(rf"{part}=%([\w.\-]+)", self.attributes)
        if branches := _BRANCHES.search(self.attributes):
            return re.findall(r"[\w.\-]+", branches[1])
        return _CALLED.findall(self.attributes)


@dataclasses.dataclass(frozen=True)
class Executed:
    """An instruction that the entry reaches outside fusions."""

    instruction: Instruction
    computation: str
    trips: tuple[int, ...]
    """Trip counts of the loops around it, outermost first."""

    @property
    def times(self) -> int:
        """Executions in one run of the program."""
        return math.prod(self.trips)


@dataclasses.dataclass(frozen=True)
class Module:
    """An HLO module: name of every computation to its instructions."""

    computations: dict[str, dict[str, Instruction]]
    entry: str
    sources: dict[str, str]
    """Stack frame number to file:line."""

    def source(self, instruction: Instruction) -> str:
        """file:line in this project that the instruction comes from, or ''."""
        return self.sources.get(_group(r"stack_frame_id=(\d+)", instruction.attributes), "")

    @cached_property
    def executed(self) -> list[Executed]:
        """Everything one run executes, in order, with how often."""
        return list(self._walk(self.entry, ()))

    def _walk(self, computation: str, trips: tuple[int, ...]) -> Iterator[Executed]:
        for instruction in self.computations[computation].values():
            yield Executed(instruction, computation, trips)
            called = instruction.called() if instruction.opcode in _CALLING else []
            if instruction.opcode == "conditional":  # one branch runs: at worst the longest
                called = [
                    max(called, key=lambda name: dataclasses.replace(self, entry=name).cycles)
                ]
            loop = instruction.opcode == "while"
            inner = (*trips, self.trip_count(computation, instruction) or 1) if loop else trips
            for name in called:
                yield from self._walk(name, inner)

    def trip_count(self, computation: str, loop: Instruction) -> int | None:
        """How often a loop's body runs, or None where the program does not say.

        Args:
            computation: name of the one that the loop is in, where its counter starts.
            loop: an instruction of opcode `while`.
        """
        if trips := _group(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes):
            return int(trips)
        outside, condition = (
            self.computations[computation],
            self.computations[loop.called("condition")[0]],
        )
        test = next(i for i in condition.values() if i.root)
        if test.opcode != "compare" or "direction=LT" not in test.attributes:
            return None
        bounds = [_origin(condition, name) for name in test.operands]
        for k, bound in enumerate(bounds):
            entered = outside[loop.operands[0]]
            if bound.opcode == "get-tuple-element" and entered.opcode == "tuple":
                index = int(_group(r"index=(\d+)", bound.attributes))
                bounds[k] = _origin(outside, entered.operands[index])
        if not all(
            bound.opcode == "constant" and bound.arguments.lstrip("-").isdigit() for bound in bounds
        ):
            return None
        start, stop = (int(bound.arguments) for bound in bounds)
        return max(0, stop - start)

    @property
    def unknown_loops(self) -> int:
        """Loops whose trip count is not known, and are counted once."""
        loops = (e for e in self.executed if e.instruction.opcode == "while")
        return sum(self.trip_count(loop.computation, loop.instruction) is None for loop in loops)

    @property
    def cycles(self) -> int:
        """Clock cycles of one run: the compiler's estimates, times trip counts. Collectives have none."""
        return sum(self._cycles(e.instruction) * e.times for e in self.executed)

    def _cycles(self, instruction: Instruction) -> int:
        if instruction.cycles or instruction.opcode != "fusion":
            return instruction.cycles
        # A fusion that also holds a part of a collective has its estimates inside.
        return sum(
            self._cycles(i)
            for name in instruction.called()
            for i in self.computations[name].values()
        )

    @property
    def hbm_bytes(self) -> int:
        """Bytes that one run reads from and writes to main memory, times trip counts."""
        return sum(self._moved(e.instruction, e.computation) * e.times for e in self.executed)

    def _moved(self, instruction: Instruction, computation: str) -> int:
        if instruction.opcode in _FREE or instruction.opcode.endswith(("-done", "-update")):
            return 0
        operands = [self.computations[computation][name] for name in instruction.operands]
        written, *read = (
            sum(array_bytes(i.shape, hbm_only=True)) for i in (instruction, *operands)
        )
        if instruction.opcode in ("dynamic-slice", "slice", "gather"):
            return written + min(written, read[0])
        if instruction.opcode == "dynamic-update-slice":
            return 2 * read[1]
        if instruction.opcode == "copy-start":
            return written
        if instruction.opcode != "fusion":
            return written + sum(read)
        inner = self.computations[instruction.called()[0]]
        parameters = {int(i.arguments): i for i in inner.values() if i.opcode == "parameter"}
        for index, size in enumerate(read):
            name = parameters[index].name
            users = [i for i in inner.values() if name in i.operands] if size else []
            if users and all(i.opcode in ("dynamic-slice", "gather") for i in users):
                # One layer of a stack is read, not the stack.
                read[index] = min(size, sum(i.bytes for i in users))
            elif users and all(
                i.opcode == "dynamic-update-slice" and i.operands[0] == name for i in users
            ):
                # One layer of a stack is written in place.
                update = sum(inner[i.operands[1]].bytes for i in users if i.operands[1] in inner)
                read[index], written = 0, max(0, written - size) + update
        return written + sum(read)


def array_bytes(shape: str, *, hbm_only: bool = False) -> list[int]:
    """Bytes of every array in a type's text, without padding.

    Args:
        shape: a type as HLO writes it, such as `f32[8,128]{1,0}`; a tuple has several arrays.
        hbm_only: leave out arrays that lie on the chip, outside main memory.
    """
    return [
        math.ceil(math.prod(_ints(dims)) * int(bits or 8) / 8)  # pred is a byte
        for bits, dims, layout in _ARRAY.findall(shape)
        if not (hbm_only and re.search(r"S\([1-9]", layout))
    ]


def array_dims(shape: str) -> list[tuple[int, ...]]:
    """Dimensions of every array in a type's text."""
    return [_ints(dims) for _, dims, _ in _ARRAY.findall(shape)]


def _ints(dims: str) -> tuple[int, ...]:
    return tuple(int(d) for d in dims.split(",") if d)


def parse(text: str) -> Module:
    """The module that `jax.stages.Compiled.as_text()` prints.

    Raises:
        ValueError: text without an entry computation.
    """
    computations, entry = {}, ""
    for mark, name, body in _COMPUTATION.findall(text):
        computations[name] = {i.name: i for i in map(_instruction, _NEXT.split(body))}
        entry = name if mark else entry
    if not entry:
        raise ValueError("the text is not an optimized HLO module: it has no ENTRY computation")
    return Module(computations, entry, _sources(text))


def _instruction(line: str) -> Instruction:
    match = _INSTRUCTION.match(line)
    assert match is not None, line[:200]
    root, name, shape, opcode, arguments, attributes = match.groups()
    operands = tuple(re.findall(r"%([\w.\-]+)", arguments))
    return Instruction(name, opcode, shape, operands, attributes, arguments, bool(root))


def _origin(computation: dict[str, Instruction], name: str) -> Instruction:
    """What makes the value that an instruction only passes on."""
    instruction = computation[name]
    while instruction.opcode in _TRANSPARENT:
        instruction = computation[instruction.operands[0]]
    return instruction


def _sources(text: str) -> dict[str, str]:
    """Stack frame number to the innermost file:line of this project, from the tables at the module's head."""
    names = dict(
        re.findall(r'^(\d+) "(.*)"$', _group(r"(?m)^FileNames\n((?:\d.*\n)*)", text), re.MULTILINE)
    )
    lines = {
        number: f"{_place(names[file])}:{line}"
        for number, file, line in re.findall(
            r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)", text, re.MULTILINE
        )
    }
    frames = re.findall(r"^(\d+) \{file_location_id=(\d+)", text, re.MULTILINE)
    return {number: lines[place] for number, place in frames if place in lines}


def _place(path: str) -> str:
    """A file from the project's folder on, another's by its own folder and name."""
    before, _, inside = path.rpartition("/mupax/")
    return inside if before else "/".join(path.split("/")[-2:])


def _group(pattern: str, text: str) -> str:
    """The first group of the first match, or ''."""
    match = re.search(pattern, text)
    return match[1] if match else ""
