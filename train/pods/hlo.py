"""Reading the compiler's optimized program (HLO text): instructions, what runs how often, bytes and estimated cycles.

The compiler's own cost analysis counts the body of a loop once; here every loop is followed with its trip count.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from functools import cached_property

_COMPUTATION = re.compile(r"^(ENTRY )?%([\w.\-]+) \([^\n]*\{\n(.*?)\n\}(?:, \w+=\S*)?$", re.MULTILINE | re.DOTALL)
_NEXT = re.compile(r"\n(?=\s+(?:ROOT )?%[\w.\-]+ = )")  # the attributes of a kernel hold line breaks
_INSTRUCTION = re.compile(r"\s+(ROOT )?%([\w.\-]+) = (.+?) ([\w\-]+)\(([^)]*)\)(.*)", re.DOTALL)
_ARRAY = re.compile(r"\b[a-z]+(\d*)\w*\[([\d,]*)\](\{[^}]*\})?")
_CALLED = re.compile(r"\b(?:calls|to_apply|true_computation|false_computation|async_computation)=%([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRANSPARENT = ("bitcast", "copy", "convert", "reshape", "broadcast", "copy-start", "copy-done")
_CALLING = ("while", "call", "conditional", "async-start")
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "while", "call", "conditional"}


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
                called = [max(called, key=lambda name: dataclasses.replace(self, entry=name).cycles)]
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
        outside, condition = self.computations[computation], self.computations[loop.called("condition")[0]]
        test = next(i for i in condition.values() if i.root)
        if test.opcode != "compare" or "direction=LT" not in test.attributes:
            return None
        bounds = [_origin(condition, name) for name in test.operands]
        for k, bound in enumerate(bounds):
            entered = outside[loop.operands[0]]
            if bound.opcode == "get-tuple-element" and entered.opcode == "tuple":
                index = int(_group(r"index=(\d+)", bound.attributes))
                bounds[k] = _origin(outside, entered.operands[index])
        if not all(bound.opcode == "constant" and bound.arguments.lstrip("-").isdigit() for bound in bounds):
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
        return sum(self._cycles(i) for name in instruction.called() for i in self.computations[name].values())

    @property
    def hbm_bytes(self) -> int:
        """Bytes that one run reads from and writes to main memory, times trip counts."""
        return sum(self._moved(e.instruction, e.computation) * e.times for e in self.executed)

    def _moved(self, instruction: Instruction, computation: str) -> int:
        if instruction.opcode in _FREE or instruction.opcode.endswith(("-done", "-update")):
            return 0
        operands = [self.computations[computation][name] for name in instruction.operands]
        written, *read = (sum(array_bytes(i.shape, hbm_only=True)) for i in (instruction, *operands))
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
            elif users and all(i.opcode == "dynamic-update-slice" and i.operands[0] == name for i in users):
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
    names = dict(re.findall(r'^(\d+) "(.*)"$', _group(r"(?m)^FileNames\n((?:\d.*\n)*)", text), re.MULTILINE))
    lines = {
        number: f"{_place(names[file])}:{line}"
        for number, file, line in re.findall(r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)", text, re.MULTILINE)
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
