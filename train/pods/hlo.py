"""Reading the compiler's optimized program (HLO text): instructions, what runs how often, bytes and estimated cycles.

The compiler's own cost analysis counts the body of a loop once; here every loop is followed with its trip count.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from functools import cached_property

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_END = re.compile(r"^\}(, \w+=\S*)?$")
_NAME = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"([\w\-]+)\(")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\](\{[^}]*\})?")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation|async_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRANSPARENT = ("bitcast", "copy", "convert", "reshape", "broadcast", "copy-start", "copy-done")
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

    def called(self) -> list[str]:
        """Names of the computations that it runs; of a loop the body alone."""
        if self.opcode == "while":
            return re.findall(r"body=%?([\w.\-]+)", self.attributes)
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
        match = re.search(r"stack_frame_id=(\d+)", instruction.attributes)
        if match:
            return self.sources.get(match[1], "")
        match = re.search(r'source_file="([^"]*)" source_line=(\d+)', instruction.attributes)
        return f"{_short(match[1])}:{match[2]}" if match else ""

    @cached_property
    def executed(self) -> list[Executed]:
        """Everything one run executes, in order, with how often."""
        return list(self._walk(self.entry, ()))

    def _walk(self, computation: str, trips: tuple[int, ...]) -> Iterator[Executed]:
        for instruction in self.computations[computation].values():
            yield Executed(instruction, computation, trips)
            inner = trips
            if instruction.opcode == "while":
                inner = (*trips, self.trip_count(computation, instruction) or 1)
            elif instruction.opcode not in ("call", "conditional", "async-start"):
                continue
            for name in instruction.called():
                yield from self._walk(name, inner)

    def trip_count(self, computation: str, loop: Instruction) -> int | None:
        """How often a loop's body runs, or None where the program does not say."""
        if trips := _group(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes):
            return int(trips)
        if not (name := _group(r"condition=%?([\w.\-]+)", loop.attributes)):
            return None
        condition = self.computations[name]
        test = next(i for i in condition.values() if i.root)
        if test.opcode == "fusion":
            # The comparison alone, of the condition's own values.
            inner = next(i for i in self.computations[test.called()[0]].values() if i.root)
            test = dataclasses.replace(test, opcode=inner.opcode, attributes=inner.attributes)
        if test.opcode != "compare" or "direction=LT" not in test.attributes or len(test.operands) != 2:
            return None
        start, stop = (self._value(condition, name, computation, loop) for name in test.operands)
        return None if start is None or stop is None else max(0, stop - start)

    def _value(self, where: dict[str, Instruction], name: str, outer: str = "", loop: Instruction | None = None):
        """The integer that a scalar is, None if unknown; of a loop's own values, the one it enters with."""
        source = where.get(name)
        while source is not None and source.opcode in _TRANSPARENT and source.operands:
            source = where.get(source.operands[0])
        if source is not None and source.opcode == "constant":
            return int(source.arguments) if re.fullmatch(r"-?\d+", source.arguments) else None
        if source is not None and source.opcode == "get-tuple-element" and loop is not None:
            index = re.search(r"index=(\d+)", source.attributes)
            entered = self.computations[outer].get(loop.operands[0])
            if index and entered is not None and entered.opcode == "tuple":
                return self._value(self.computations[outer], entered.operands[int(index[1])])
        return None

    @property
    def unknown_loops(self) -> int:
        """Loops whose trip count is not known, and are counted once."""
        return sum(
            e.instruction.opcode == "while" and self.trip_count(e.computation, e.instruction) is None
            for e in self.executed
        )

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
        where = self.computations[computation]
        operands = [where.get(name) for name in instruction.operands]
        written = sum(array_bytes(instruction.shape, hbm_only=True))
        read = [sum(array_bytes(o.shape, hbm_only=True)) if o is not None else 0 for o in operands]
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
    """Bytes of every array in a type's text, without padding; optionally only those in main memory, not on the chip."""
    arrays = [(re.search(r"\d+", a), b, c) for a, b, c in _ARRAY.findall(shape)]
    return [
        math.ceil(math.prod(_ints(dims)) * (int(bits[0]) if bits else 8) / 8)  # pred is a byte
        for bits, dims, layout in arrays
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
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current, lines = "", "", []
    for line in text.splitlines():
        if not current:
            if line.endswith("{") and (head := _COMPUTATION.match(line)):
                current, lines = head[2], []
                entry = current if head[1] else entry
        elif _END.match(line):
            computations[current] = {i.name: i for i in map(_instruction, lines)}
            current = ""
        elif _NAME.match(line):
            lines.append(line)
        else:
            # The attributes of a kernel hold line breaks.
            lines[-1] += line
    if not entry:
        raise ValueError("the text is not an optimized HLO module: it has no ENTRY computation")
    return Module(computations, entry, _sources(text))


def _instruction(line: str) -> Instruction:
    head = _NAME.match(line)
    assert head is not None, line[:200]
    start = head.end()
    end = _closing(line, start) + 1 if line[start] == "(" else line.index(" ", start)
    opcode = _OPCODE.match(line, end + 1)
    assert opcode is not None, line[:200]
    last = _closing(line, opcode.end() - 1)
    inside = line[opcode.end() : last]
    operands = tuple(re.findall(r"%([\w.\-]+)", inside))
    if not operands and opcode[1] not in ("constant", "parameter", "iota"):
        operands = tuple(re.findall(r"([A-Za-z_][\w.\-]*)(?:,|$)", re.sub(r"/\*.*?\*/", "", inside)))
    return Instruction(head[2], opcode[1], line[start:end], operands, line[last + 1 :], inside.strip(), bool(head[1]))


def _closing(line: str, start: int) -> int:
    depth = 0
    for match in re.compile(r"[()]").finditer(line, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    raise ValueError(f"brackets do not close in {line[:200]}")


def _sources(text: str) -> dict[str, str]:
    """Stack frame number to the innermost file:line of this project, from the tables at the module's head."""
    head = re.split(r"^(?:ENTRY )?%?[\w.\-]+ \(.*\{$", text, maxsplit=1, flags=re.MULTILINE)[0]
    tables = {
        name: dict(re.findall(r"^(\d+) (.*)$", part, re.MULTILINE))
        for name, part in re.findall(r"^(FileNames|FileLocations|StackFrames)\n((?:\d+ .*\n)*)", head, re.MULTILINE)
    }
    frames = {}
    for number, frame in tables.get("StackFrames", {}).items():
        where = tables.get("FileLocations", {}).get(_group(r"file_location_id=(\d+)", frame), "")
        file, line = _group(r"file_name_id=(\d+)", where), _group(r"\bline=(\d+)", where)
        if file and line:
            frames[number] = f"{_short(tables.get('FileNames', {}).get(file, '').strip(chr(34)))}:{line}"
    return frames


def _group(pattern: str, text: str) -> str:
    """The first group of the first match, or ''."""
    match = re.search(pattern, text)
    return match[1] if match else ""


def _short(path: str) -> str:
    return "/".join(path.split("/")[-2:])
