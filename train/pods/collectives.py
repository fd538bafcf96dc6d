"""The collectives of a compiled program: kind, bytes, how often, and the mesh axes they run on."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from mupax.train.pods import hlo

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast",
         "ragged-all-to-all")  # fmt: skip

_LISTS = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)")
_MESH = re.compile(
    r"replica_groups=@?\w*mesh\[([^\]]*)\](?:, device_ids=\((\[[\d,]+\](?:T\([\d,]+\))?|[\d,]+)\))?\s*\{([^}]*)\}"
)
_PRODUCTS = ("dot", "convolution", "custom-call")
_BETWEEN = re.compile(r'_xla_megascale_transfer_type="(\w+)"')


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
        return (2 if self.kind == "all-reduce" else 1) * self.bytes * (self.group_size - 1) / self.group_size


def collectives(
    module: hlo.Module, mesh: Mapping[str, int], across: Mapping[str, int] | None = None
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
            sent = sum(where[name].bytes for name in instruction.operands if where[name].opcode != "after-all")
            # The parts of a collective that several fusions hold have one chain; a channel may be that of many collectives.
            chain = re.search(r'chain_id="(\d+)"', instruction.attributes)
            collective = Collective(
                kind=kind,
                bytes=sent * size if kind == "all-gather" else sent,
                axes=axes,
                group_size=size,
                times=executed.times,
                trips=executed.trips,
                results=tuple(hlo.array_dims(instruction.shape)),
                name=instruction.name,
                op_name=instruction.op_name or holder.op_name,
                source=module.source(instruction) or module.source(holder),
                overlapped=between
                or chain is not None
                or _hidden(module, where, instruction)
                or _hidden(module, module.computations[executed.computation], holder),
                between_slices=between,
                gathers=kind == "all-reduce" and all(_in_zeros(module, where, name) for name in instruction.operands),
            )
            by_name.setdefault((executed.computation, chain[0] if chain else instruction.name), collective)
    return list(by_name.values())


def _hidden(module: hlo.Module, where: Mapping[str, hlo.Instruction], start: hlo.Instruction) -> bool:
    """Whether products or kernels run between a collective's start and its end, in the order that the compiler gave them."""
    if not start.opcode.endswith("-start"):
        return False
    for one in itertools.islice(where.values(), [*where].index(start.name) + 1, None):
        if start.name in one.operands:
            return False
        if one.opcode in _PRODUCTS or any(
            inner.opcode in _PRODUCTS for name in one.called() for inner in module.computations[name].values()
        ):
            return True
    return False


def _in_zeros(module: hlo.Module, where: Mapping[str, hlo.Instruction], name: str) -> bool:
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
    module: hlo.Module, instruction: hlo.Instruction, computation: str
) -> Iterator[tuple[str, hlo.Instruction, str]]:
    """The collectives that an instruction is or that its fusion holds: computation, instruction and kind of each."""
    kind = instruction.opcode.removesuffix("-start")
    if kind in KINDS:
        # A sum of which every device keeps its own part is one operation on TPU.
        scattered = kind == "all-reduce" and "reduce-scatter" in computation
        yield computation, instruction, "reduce-scatter" if scattered else kind
    elif kind == "send" and (transfer := _BETWEEN.search(instruction.attributes)):
        yield computation, instruction, transfer[1].lower().replace("_", "-")
    elif instruction.opcode in ("fusion", "call-start"):  # the latter on v7x, whose other cores send
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
        return [_ints(group) for group in re.findall(r"\{([\d, ]+)\}", match[1])]
    if match := _IOTA.search(attributes):
        return _iota(match[2]).reshape(_ints(match[1])).tolist()
    if match := _MESH.search(attributes):
        return _mesh_groups(match[1], match[2], match[3])
    if "replica_groups={}" in attributes:
        return [list(range(devices))]
    raise ValueError(f"replica groups in a form that is not known: {attributes[:200]}")


def _iota(text: str) -> np.ndarray:
    """`[2,4]T(1,0)`: the numbers from 0 in that shape, transposed."""
    dims, _, order = text.partition("T")
    ids = np.arange(math.prod(_ints(dims))).reshape(_ints(dims))
    return ids.transpose(_ints(order)) if order else ids


def _mesh_groups(mesh: str, device_ids: str | None, named: str) -> list[list[int]]:
    """`mesh['a'=2,'b'=4] {'a', 'b':(2)2}`: a group is what varies over the named axes, or over parts (before)size of them."""
    sizes = {name: int(size) for name, size in re.findall(r"'?([\w.]+)'?=(\d+)", mesh)}
    ids = device_ids or f"[{math.prod(sizes.values())}]"
    devices = _iota(ids).ravel().tolist() if ids.startswith("[") else _ints(ids)
    fixed = dict(zip(sizes, np.unravel_index(range(len(devices)), tuple(sizes.values())), strict=True))
    for name, before, size in re.findall(r"'?([A-Za-z_][\w.]*)'?(?::\((\d+)\)(\d+))?", named):
        after = sizes[name] // (int(before or 1) * int(size or sizes[name]))
        fixed[name] = fixed[name] // (int(size or sizes[name]) * after) * after + fixed[name] % after
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for device, *place in zip(devices, *fixed.values(), strict=True):
        groups[tuple(map(int, place))].append(device)
    return list(groups.values())


def _ints(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def axes_of(groups: list[list[int]], mesh: Mapping[str, int], *, pairs: bool = False) -> tuple[tuple[str, ...], int]:
    """Mesh axes along which a group's devices differ, and the group's size (of a permute, that of these axes).

    Args:
        groups: of partition numbers, which count through the mesh in C order; those of one device are passed over.
        mesh: axis name to size, in the order of the mesh's dimensions.
        pairs: whether the groups are the (source, target) pairs of a permute.
    """
    shape = tuple(mesh.values())
    coordinates = [np.array(np.unravel_index(group, shape)) for group in groups if len(set(group)) > 1]
    names = tuple(name for i, name in enumerate(mesh) if any(len(set(where[i].tolist())) > 1 for where in coordinates))
    if not names:
        return (), 1
    return names, math.prod(mesh[name] for name in names) if pairs else max(map(len, groups))


def table(collectives: Iterable[Collective]) -> list[dict[str, Any]]:
    """Sums by kind, axes and loop, largest total first: what a report shows. `alone_bytes` are those sent beside nothing."""
    rows: dict[Any, dict[str, Any]] = {}
    for one in collectives:
        where = {"kind": one.kind, "axes": [*one.axes], "group_size": one.group_size, "loop_trips": [*one.trips]}
        where |= {"between_slices": one.between_slices, "gathers": one.gathers}
        sent = one.wire_bytes * one.times
        more = {"count": 1, "executions": one.times, "bytes": one.bytes * one.times, "wire_bytes": sent}
        more |= {"alone_bytes": 0.0 if one.overlapped else sent}
        row = rows.setdefault(tuple(map(str, where.values())), {**where, **dict.fromkeys(more, 0)})
        for name, number in more.items():
            row[name] += number
    return sorted(rows.values(), key=lambda row: -row["wire_bytes"])
