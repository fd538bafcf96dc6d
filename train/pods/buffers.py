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


def read(folder: Path, module: hlo.Module) -> tuple[int, int, list[Buffer]] | None:
    """Bytes of temporaries and of all in main memory, and the temporaries at the peak, largest first.

    Of the largest program dumped into `folder`; None where no file says so.

    Args:
        folder: where the compiler wrote its buffer assignment (`xla_dump_to`).
        module: the optimized program.
    """
    assignment = max(folder.glob("*buffer-assignment.txt"), key=lambda file: file.stat().st_size, default=None)
    if assignment is None:
        return None
    size, total, values = _values(assignment.read_text())
    text = assignment.with_name(assignment.name.replace("buffer-assignment", "live-range")).read_text()
    lines = map(_RANGE.match, text.partition("\n  Live ranges at")[0].splitlines())
    ranges = {match[1].removesuffix("{}"): range(int(match[2]), int(match[3]) + 1) for match in lines if match}

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
            op_name, source = (origin.op_name, module.source(origin)) if origin is not None else ("", "")
            named[offset, bytes_] = Buffer(name, bytes_, re.sub(r"\{[^}]*\}", "", shape), op_name, source)
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
    result: hlo.Instruction | None, instructions: dict[str, hlo.Instruction], module: hlo.Module, steps: int = 8
) -> hlo.Instruction | None:
    """The instruction whose metadata says where an array comes from: its own, or that of what it wraps or copies."""
    if result is None or result.op_name or not steps:
        return result
    if result.opcode == "fusion":
        inside = [i for computation in result.called() for i in module.computations[computation].values() if i.op_name]
        return max(inside, key=lambda i: i.bytes, default=result)
    if result.opcode == "parameter":
        # State of a loop: the loop.
        body = next(name for name, c in module.computations.items() if c.get(result.name) is result)
        return next((i for i in instructions.values() if i.opcode == "while" and body in i.called()), result)
    if not result.operands:
        # Room for a loop to fill: the loop, which takes it in a tuple.
        user = next((i for i in instructions.values() if result.name in i.operands), result)
        return next((i for i in instructions.values() if user.name in i.operands), user)
    for operand in result.operands:
        origin = _origin(instructions.get(operand), instructions, module, steps - 1)
        if origin is not None and origin.op_name:
            return origin
    return result
