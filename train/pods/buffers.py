"""What lies in a compiled program's temporary memory when it is fullest, by name: from the compiler's own buffer assignment."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from mupax.train.pods import hlo

_ALLOCATION = re.compile(r"^allocation \d+: size (\d+)(?:, color (\d+))?, (.*?):?$")
_VALUE = re.compile(r"^ value: <\d+ ([^@]*?)(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)$")
_RANGE = re.compile(r"^    ([^:]+):(\d+)-(\d+)$")


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


@dataclasses.dataclass(frozen=True)
class Temporaries:
    """The temporary allocation in main memory."""

    bytes: int
    total_bytes: int
    """Of all allocations in main memory: arguments, outputs, constants and temporaries."""
    live: tuple[Buffer, ...]
    """What is alive when most of it is, largest first."""


def dump_options(folder: Path) -> dict[str, str | bool]:
    """Compiler options that make it write its buffer assignment into a folder."""
    return {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}


def read(folder: Path, module: hlo.Module) -> Temporaries | None:
    """The temporaries of the largest program dumped into `folder`; None where the compiler wrote nothing to read."""
    files = [file for file in folder.glob("*buffer-assignment.txt") if "before" not in file.name]
    if not files:
        return None
    assignment = max(files, key=lambda file: file.stat().st_size)
    ranges = assignment.with_name(assignment.name.replace("buffer-assignment", "live-range"))
    return of(assignment.read_text(), ranges.read_text() if ranges.exists() else "", module)


def of(assignment: str, live_ranges: str, module: hlo.Module) -> Temporaries | None:
    """The same from the two files' texts."""
    size, values = _values(assignment)
    if not values:
        return None
    ranges = {}
    for line in live_ranges.splitlines():
        if line.startswith("  Live ranges at"):
            break
        if found := _RANGE.match(line):
            ranges[found[1].removesuffix("{}")] = (int(found[2]), int(found[3]))
    timed = [(value, *ranges[value[0]]) for value in values if value[0] in ranges]
    moments = sorted({start for _, start, _ in timed})
    best = max(moments, key=lambda t: sum(_distinct(_alive(timed, t)).values()), default=0)
    instructions = {name: i for c in module.computations.values() for name, i in c.items()}
    named: dict[tuple[int, int], tuple[str, str]] = {}
    for name, bytes_, offset, shape in _alive(timed, best):
        known = named.get((offset, bytes_))
        # Of several names of one place, one that says where it comes from.
        if known is None or not _says(known[0], instructions, module):
            named[offset, bytes_] = (name, shape)
    live = [_buffer(name, bytes_, shape, instructions, module) for (_, bytes_), (name, shape) in named.items()]
    return Temporaries(size, _total(assignment), tuple(sorted(live, key=lambda buffer: -buffer.bytes)))


Value = tuple[str, int, int, str]


def _values(assignment: str) -> tuple[int, list[Value]]:
    """Size of the temporary allocation in main memory (color 0), and name, bytes, offset and type of its values."""
    size, values, inside = 0, [], False
    for line in assignment.splitlines():
        if found := _ALLOCATION.match(line):
            inside = found[2] in (None, "0") and "preallocated-temp" in found[3]
            size += int(found[1]) if inside else 0
        elif inside and (found := _VALUE.match(line)):
            values.append((found[1].removesuffix("{}"), int(found[2]), int(found[3]), found[4]))
    return size, values


def _total(assignment: str) -> int:
    found = filter(None, map(_ALLOCATION.match, assignment.splitlines()))
    return sum(int(one[1]) for one in found if one[2] in (None, "0") and "thread-local" not in one[3])


def _alive(timed: list[tuple[Value, int, int]], moment: int) -> list[Value]:
    return [value for value, start, stop in timed if start <= moment <= stop]


def _distinct(values: list[Value]) -> dict[int, int]:
    """Offset to bytes: values that share a place are counted once."""
    places: dict[int, int] = {}
    for _, bytes_, offset, _ in values:
        places[offset] = max(bytes_, places.get(offset, 0))
    return places


def _instruction(name: str, instructions: dict[str, hlo.Instruction]) -> hlo.Instruction | None:
    return instructions.get(name.partition("{")[0])


def _says(name: str, instructions: dict[str, hlo.Instruction], module: hlo.Module) -> bool:
    found = _origin(_instruction(name, instructions), instructions, module)
    return found is not None and bool(found.op_name)


def _buffer(name: str, bytes_: int, shape: str, instructions: dict[str, hlo.Instruction], module: hlo.Module) -> Buffer:
    found = _origin(_instruction(name, instructions), instructions, module)
    op_name, source = (found.op_name, module.source(found)) if found is not None else ("", "")
    return Buffer(name, bytes_, re.sub(r"\{[^}]*\}", "", shape), op_name, source)


def _origin(
    made: hlo.Instruction | None, instructions: dict[str, hlo.Instruction], module: hlo.Module, steps: int = 8
) -> hlo.Instruction | None:
    """The instruction whose metadata says where an array comes from: its own, or that of what it wraps or copies."""
    if made is None or made.op_name or not steps:
        return made
    if made.opcode == "fusion":
        inside = [i for computation in made.called() for i in module.computations[computation].values() if i.op_name]
        return max(inside, key=lambda i: i.bytes, default=made)
    if made.opcode == "parameter":
        # What a loop carries: the loop.
        body = next(name for name, c in module.computations.items() if c.get(made.name) is made)
        return next((i for i in instructions.values() if i.opcode == "while" and body in i.called()), made)
    if not made.operands:
        # Room that is made for a loop to fill: the loop, which takes it in a tuple.
        user = next((i for i in instructions.values() if made.name in i.operands), made)
        return next((i for i in instructions.values() if user.name in i.operands), user)
    for operand in made.operands:
        origin = _origin(instructions.get(operand), instructions, module, steps - 1)
        if origin is not None and origin.op_name:
            return origin
    return made
