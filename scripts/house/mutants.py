"""Seeded mutants of product code, one in a module, judged by the tests of the module.

    python -m scripts.house.mutants OUT [--first N]         # goes on where OUT ends
    python -m scripts.house.mutants OUT --like BEFORE       # the mutants of an older record
    python -m scripts.house.mutants AFTER --against BEFORE  # which are no longer killed

* **Modules** are those of presets, zoo and train that have tests and something to mutate. Every
  path has a number that the seed decides, and the modules with the least numbers are taken: a
  module that comes or goes changes one choice, not all.
* **A mutant** is one change of the syntax tree: a comparison flipped, an arithmetic operator
  changed, a number or a truth value changed, a `not` dropped, or a function that returns None at
  once. The kind is drawn first, then the place among all of that kind. Only the text of that
  expression changes in the file.
* **Tests of a module** are the files in the folder of the same name below tests/, or in a folder of
  that folder, that import the module or are called test_NAME.py or test_NAME_*.py. Modules
  without such a file are not chosen. Where there are more than `MOST_FILES`, those called after the
  module come first, then those that tests/costs.json records as the cheapest.
* **Killed** means that pytest ends with another code than 0, or not in time, where it ended with 0
  without the mutant. The tests run as in `make test`, with `-x`, in one process.
* **Nothing in the checkout changes.** All runs are in a copy in a temporary folder. Prepared data
  that a mutant may have spoilt is replaced after each.

A mutant is identified by path, function, and text before and after, not by its line. After code has
moved, `--like` looks for the same text in the same function of the same file; then for the same
text in the same statement, in a function of that name in any file; then for the same but for all
names in it, likewise; then for the same text and statement anywhere. It takes a place only if there
is one. The row keeps the old name, so two records are compared name by name. A mutant without a
place is recorded as `gone`: then the code was rewritten, and a person has to judge.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from scripts import harness
from scripts.house.sizes import MODULES, ROOT, imported_modules, python_files

SEED = 38
COUNT = 60
MOST_FILES = 3
"""Largest number of test files for one module. Some modules are imported by a dozen."""
MARKS = "not parity and not tpu and not gpu and not schedulers and not release"
"""Expression that selects the tests of the first command of `make test`."""
UNJUDGED = "tests fail without it"
"""Outcome of a mutant whose tests did not pass in the unchanged copy."""
BASELINE_S = 1800
"""Longest time for the tests of a module without a mutant."""

# Each comparison has its negation, which differs for every pair of operands.
_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Add,
    ast.Pow: ast.Mult,
}


@dataclass(frozen=True)
class Span:
    """Part of a file. Lines count from 1, columns are bytes from 0."""

    line: int
    column: int
    end_line: int
    end_column: int


@dataclass(frozen=True)
class Mutant:
    """Change at one place of one file.

    Attributes:
        path: File from the root.
        function: Qualified name of the function or class around the place, "" at the module's
            level.
        kind: Kind of change: `comparison`, `arithmetic`, `constant`, `not` or `return`.
        before: Text that is changed, as `ast.unparse` writes it.
        after: Text in its place.
        statement: First line of the statement that the place is in.
        number: Index among changes with the same texts in the same function, from 0.
        span: Place in the file.
    """

    path: str
    function: str
    kind: str
    before: str
    after: str
    statement: str
    number: int
    span: Span

    @property
    def name(self) -> str:
        """Name in a record: path, function and texts, but no line, which changes too often."""
        suffix = f" #{self.number}" if self.number else ""
        return f'{self.path}:{self.function} "{self.before}" -> "{self.after}"{suffix}'

    @property
    def shapes(self) -> tuple[str, str, str]:
        """Text before, text after and statement, with every name replaced by `_`."""
        return _shape(self.before), _shape(self.after), _shape(self.statement)

    @property
    def last_name(self) -> str:
        """Name of the function without the classes and functions around it."""
        return self.function.rpartition(".")[2]

    def __str__(self) -> str:
        return f'{self.path}:{self.span.line} "{self.before}" -> "{self.after}"'

    def apply(self, source: str) -> str:
        """Return a file's text with this change in it."""
        lines = source.encode().splitlines(keepends=True)
        first = self.span.line - 1
        last = self.span.end_line - 1
        head = lines[first][: self.span.column]
        tail = lines[last][self.span.end_column :]
        if self.kind == "return":
            # A body on the line of its `def` has to stay on that line.
            separator = "; " if head.strip() else f"\n{head.decode()}"
            text = f"{self.after}{separator}".encode()
        else:
            # In brackets, so that operators around the place do not take the change apart.
            text = f"({self.after})".encode()
        changed = b"".join((*lines[:first], head, text, tail, *lines[last + 1 :])).decode()
        ast.parse(changed)  # a mutant that is no Python would be killed by all tests
        return changed


class _Places(ast.NodeVisitor):
    """Visitor that collects all mutants of a file."""

    def __init__(self, path: str) -> None:
        self.mutants: list[Mutant] = []
        self._path = path
        self._names: list[str] = []
        self._statement: ast.stmt | None = None
        self._heads: dict[ast.stmt | None, str] = {None: ""}
        self._numbers: Counter[tuple[str, str, str]] = Counter()

    def visit(self, node: ast.AST) -> None:
        """Visit a node, and remember the statement that it is in."""
        outer = self._statement
        if isinstance(node, ast.stmt):
            self._statement = node
        super().visit(node)
        self._statement = outer

    def _add(self, kind: str, span: Span, before: str, after: str) -> None:
        """Add a mutant in the present function and statement."""
        scope = ".".join(self._names)
        statement = self._head(self._statement)
        key = scope, before, after
        number = self._numbers[key]
        self.mutants.append(Mutant(self._path, scope, kind, before, after, statement, number, span))
        self._numbers[key] += 1

    def _head(self, statement: ast.stmt | None) -> str:
        """Return the first line of a statement, cached, because unparsing a long one takes time."""
        if statement is not None and statement not in self._heads:
            self._heads[statement] = _first_line(statement)
        return self._heads[statement]

    def _visit_scope(self, name: str, body: Sequence[ast.stmt], returns: bool) -> None:
        """Visit the statements of a class or function.

        Args:
            returns: Also add the mutant in which the function returns None at once.
        """
        self._names.append(name)
        if _is_docstring(body[0]):
            body = body[1:]
        if returns and body and not _does_nothing(body):
            self._add("return", _start(body[0]), _first_line(body[0]), "return None")
        for statement in body:
            self.visit(statement)
        self._names.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self.visit(default)
        self._visit_scope(node.name, node.body, returns=True)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._visit_scope(node.name, node.body, returns=False)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Skip f-strings, because Python 3.11 has wrong places for the expressions in them."""

    def visit_If(self, node: ast.If) -> None:
        # Only the type checker reads that code.
        if ast.unparse(node.test) != "TYPE_CHECKING":
            self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        replacement = _COMPARISONS.get(type(node.ops[0]))
        if len(node.ops) == 1 and replacement is not None:
            changed = ast.Compare(node.left, [replacement()], node.comparators)
            self._add("comparison", _span(node), ast.unparse(node), ast.unparse(changed))
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        replacement = _OPERATORS.get(type(node.op))
        if replacement is not None and not _is_text(node.left) and not _is_text(node.right):
            changed = ast.BinOp(node.left, replacement(), node.right)
            self._add("arithmetic", _span(node), ast.unparse(node), ast.unparse(changed))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._add("not", _span(node), ast.unparse(node), ast.unparse(node.operand))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        # First, because a bool is an int, too.
        if isinstance(value, bool):
            replacement = not value
        elif isinstance(value, int):
            replacement = value + 1
        elif isinstance(value, float):
            # Twice 0 would be no change.
            replacement = 2 * value if value else 1.0
        else:
            return
        self._add("constant", _span(node), repr(value), repr(replacement))


def _span(node: ast.expr) -> Span:
    """Return the place of an expression in its file."""
    return Span(node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0)


def _start(node: ast.stmt) -> Span:
    """Return the empty place before a statement and its decorators."""
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    line = min((node.lineno, *(decorator.lineno for decorator in decorators)))
    return Span(line, node.col_offset, line, node.col_offset)


def _is_docstring(node: ast.stmt) -> bool:
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
        return False
    return isinstance(node.value.value, str)


def _does_nothing(body: Sequence[ast.stmt]) -> bool:
    """Return whether a function only raises, passes, or returns None already."""
    first = body[0]
    if isinstance(first, ast.Return):
        return first.value is None or ast.unparse(first.value) == "None"
    return isinstance(first, ast.Pass | ast.Raise) or ast.unparse(first) == "..."


def _first_line(node: ast.stmt) -> str:
    return ast.unparse(node).splitlines()[0]


def _is_text(node: ast.expr) -> bool:
    """Return whether an operand is a string, for which no other operator makes sense."""
    is_string = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return is_string or isinstance(node, ast.JoinedStr)


def mutants_of(path: str, source: str) -> list[Mutant]:
    """Return every mutant of a file, in the order of its text."""
    places = _Places(path)
    places.visit(ast.parse(source))
    return places.mutants


def drawn(path: str, source: str, seed: int = SEED) -> Mutant | None:
    """Draw one mutant of a module: first its kind, then its place. `None` if there are none.

    Args:
        path: Path of the module from the root, from which the random numbers are seeded.
    """
    by_kind: dict[str, list[Mutant]] = {}
    for mutant in mutants_of(path, source):
        by_kind.setdefault(mutant.kind, []).append(mutant)
    if not by_kind:
        return None
    draw = random.Random(f"{seed}:{path}")
    return draw.choice(by_kind[draw.choice(sorted(by_kind))])


def tests_of(root: Path, path: str) -> list[str]:
    """Return at most `MOST_FILES` test files that import a module or have its name in theirs.

    Paths are from the root.
    """
    module = Path(path)
    called = re.compile(rf"test_{re.escape(module.stem)}(_.*)?\.py")
    dotted = ".".join(("mupax", *module.with_suffix("").parts))
    costs_file = root / "tests" / "costs.json"
    costs = {}
    if costs_file.is_file():
        costs = json.loads(costs_file.read_text(encoding="utf-8"))
    ranked: list[tuple[bool, float, str]] = []
    for file in python_files(root / "tests" / module.parent):
        if not file.name.startswith("test_"):
            continue
        has_name = called.fullmatch(file.name) is not None
        if has_name or dotted in imported_modules(file.read_text(encoding="utf-8")):
            name = file.relative_to(root).as_posix()
            ranked.append((not has_name, costs.get(name, float("inf")), name))
    return sorted(name for _, _, name in sorted(ranked)[:MOST_FILES])


def chosen(root: Path, count: int = COUNT, seed: int = SEED) -> list[Mutant]:
    """Return the mutants of a checkout, one in each of `count` randomly chosen modules."""
    names: list[str] = []
    for folder in MODULES:
        for path in python_files(root / folder):
            if not path.stem.startswith("__"):
                names.append(path.relative_to(root).as_posix())
    mutants: list[Mutant] = []
    for name in sorted(names, key=lambda name: random.Random(f"{seed} {name}").random()):
        if len(mutants) == count:
            break
        mutant = drawn(name, (root / name).read_text(encoding="utf-8"), seed)
        if mutant is not None and tests_of(root, name):
            mutants.append(mutant)
    return mutants


class Tree:
    """All mutants of a checkout, to find those that were recorded in an older checkout."""

    def __init__(self, root: Path) -> None:
        self._by_text: dict[tuple[str, str], list[Mutant]] = {}
        self._by_shapes: dict[tuple[str, str, str], list[Mutant]] = {}
        for folder in MODULES:
            for file in python_files(root / folder):
                source = file.read_text(encoding="utf-8")
                for place in mutants_of(file.relative_to(root).as_posix(), source):
                    self._by_text.setdefault((place.before, place.after), []).append(place)
                    self._by_shapes.setdefault(place.shapes, []).append(place)

    def find(self, row: dict[str, Any]) -> Mutant | None:
        """Return the mutant of this checkout that is the recorded one, although code has moved.

        The module's docstring has the rules. `None` if no place, or more than one, fits.

        Args:
            row: Row of a record, with the fields of `Mutant`.
        """
        same_text = self._by_text.get((row["before"], row["after"]), [])
        function = row["path"], row["function"]
        unmoved = [place for place in same_text if (place.path, place.function) == function]
        # Many functions are called __exit__, and many texts are 0. Elsewhere the statement decides.
        moved = [place for place in same_text if place.statement == row["statement"]]
        shapes = _shape(row["before"]), _shape(row["after"]), _shape(row["statement"])
        renamed = self._by_shapes.get(shapes, [])
        last_name = row["function"].rpartition(".")[2]
        for places in (
            unmoved,
            [place for place in moved if place.last_name == last_name],
            [place for place in renamed if function == (place.path, place.function)],
            [place for place in renamed if place.last_name == last_name],
            moved,
        ):
            numbered = [place for place in places if place.number == row["number"]]
            for candidates in (places, numbered):
                if len(candidates) == 1:
                    return candidates[0]
        return None


def _shape(text: str) -> str:
    """Return a text with every name replaced by `_`, so that renaming does not change it."""
    return re.sub(r"[A-Za-z_]\w*", "_", text)


class Bench:
    """Copy of a checkout in which tests run without and with a mutant.

    Args:
        folder: Folder of the copy, which does not exist yet.
    """

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder = folder
        self._baselines: dict[tuple[str, ...], Outcome] = {}
        copy_checkout(root, folder)
        self._check_imports()
        self._data = folder / ".cache" / "data"
        self._good_data = folder / ".cache" / "good-data"
        for name in ("data", "jax"):
            # Prepared data and compiled programs cost minutes.
            if (root / ".cache" / name).is_dir():
                shutil.copytree(root / ".cache" / name, folder / ".cache" / name)

    def _check_imports(self) -> None:
        """Refuse a copy whose tests would import an installed mupax instead of the copy's.

        Raises:
            RuntimeError: Python imports mupax from outside of the copy.
        """
        if not (self.folder / "mupax").is_dir():
            return
        command = [sys.executable, "-c", "import mupax; print(mupax.__file__)"]
        done = subprocess.run(
            command,
            cwd=self.folder.parent,  # tests start commands in folders of their own
            env=self._variables(),
            capture_output=True,
            text=True,
            check=True,
        )
        if not Path(done.stdout.strip()).is_relative_to(self.folder):
            raise RuntimeError(f"Python imports {done.stdout.strip()}, which is not in the copy")

    def _variables(self) -> dict[str, str]:
        """Return the environment of commands in the copy."""
        return {**os.environ, "PYTHONPATH": str(self.folder)}

    def judge(self, mutant: Mutant, tests: Sequence[str]) -> dict[str, Any]:
        """Run tests without and with a mutant, and return the outcome as fields for the record.

        `outcome` is `killed`, `timeout`, `survived`, `no tests` or `UNJUDGED`.
        """
        if not tests:
            return {"outcome": "no tests"}
        baseline = self.baseline(tests)
        if baseline.code != 0:
            reason = {"code": baseline.code, "output": baseline.output}
            return {"outcome": UNJUDGED, **reason}
        shutil.rmtree(self._good_data, ignore_errors=True)
        if self._data.is_dir():
            shutil.copytree(self._data, self._good_data)
        # The machine may be busier now than it was for the baseline.
        limit = 60 + 5 * baseline.seconds
        with self.mutated(mutant):
            outcome = self.run(tests, limit)
        shutil.rmtree(self._data, ignore_errors=True)
        if self._good_data.is_dir():
            self._good_data.rename(self._data)
        names = {None: "timeout", 0: "survived"}
        return {
            "outcome": names.get(outcome.code, "killed"),
            "code": outcome.code,
            "failed": outcome.failed,
            "seconds": outcome.seconds,
            "baseline seconds": baseline.seconds,
        }

    def baseline(self, tests: Sequence[str]) -> Outcome:
        """Return the result of tests without a mutant. Each set of files is run only once."""
        key = tuple(tests)
        if key not in self._baselines:
            self._baselines[key] = self.run(tests, BASELINE_S)
        return self._baselines[key]

    @contextmanager
    def mutated(self, mutant: Mutant) -> Iterator[None]:
        """Context manager that applies a mutant to the copy, and restores the file on exit."""
        file = self.folder / mutant.path
        source = file.read_bytes()
        times = file.stat()
        try:
            file.write_text(mutant.apply(source.decode()), encoding="utf-8")
            # Python finds a compiled file stale by the second and the size of its source.
            os.utime(file, (times.st_atime + 2, times.st_mtime + 2))
            yield
        finally:
            file.write_bytes(source)
            os.utime(file, (times.st_atime, times.st_mtime))

    def run(self, tests: Sequence[str], limit: float) -> Outcome:
        """Run test files by pytest until the first test fails.

        Args:
            limit: Time after which the run is ended, in seconds.
        """
        options = ("-q", "-x", "-m", MARKS, "-p", "no:cacheprovider", "-p", "no:xdist")
        command = [sys.executable, "-m", "pytest", *options, *tests]
        began = time.monotonic()
        # A pipe that nobody reads meanwhile would stop the tests when it is full.
        with tempfile.TemporaryFile("w+") as text:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self._variables(),
                stdout=text,
                stderr=text,
                stdin=subprocess.DEVNULL,
                # A group of its own, so that processes of the tests can be ended with pytest.
                start_new_session=True,
            )
            code: int | None = None
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                pass
            finally:
                # Tests may have left processes running.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            text.seek(0)
            output = text.read()
        return Outcome(code, round(time.monotonic() - began, 1), output[-2000:])


@dataclass(frozen=True)
class Outcome:
    """Result of one run of tests.

    Attributes:
        code: Exit code of pytest, or `None` after the time limit.
        seconds: Time of the run, in seconds.
        output: Last 2,000 characters of the output.
    """

    code: int | None
    seconds: float
    output: str

    @property
    def failed(self) -> str:
        """Name of the first failed test, "" if pytest names none."""
        match = re.search(r"^(?:FAILED|ERROR) (\S+)", self.output, re.MULTILINE)
        return match[1] if match else ""


def copy_checkout(root: Path, folder: Path) -> None:
    """Copy the files of a checkout that git does not ignore; without git, copy all files.

    Args:
        folder: Folder of the copy, which does not exist yet.
    """
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        shutil.copytree(root, folder, symlinks=True)
        return
    for name in sorted(set(filter(None, listed.stdout.split("\0")))):
        source = root / name
        target = folder / name
        if source.is_symlink() or source.is_file():  # a deleted file is still listed
            target.parent.mkdir(parents=True, exist_ok=True)
            # mupax/presets, mupax/zoo and mupax/train must stay links to the copied folders.
            shutil.copy2(source, target, follow_symlinks=False)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the newest row of each mutant in a record, without an incomplete last line."""
    if not path.is_file():
        return []
    rows: dict[str, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            row = json.loads(line)
            rows[row["mutant"]] = row
    return list(rows.values())


def write_row(path: Path, row: dict[str, Any]) -> None:
    """Append a row to a record, and first remove an incomplete line of a killed process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        file.seek(0)
        complete = file.read().rfind(b"\n") + 1
        file.truncate(complete)
        file.write(json.dumps(row).encode() + b"\n")
        file.flush()
        # A row takes minutes, so it must outlive a crash of the machine.
        os.fsync(file.fileno())


def measure(out: Path, mutants: Sequence[tuple[str, Mutant | None]], root: Path = ROOT) -> None:
    """Judge the mutants that a record does not have, and append a row after each.

    Args:
        out: Path of the record, a file of JSON lines that may not exist yet.
        mutants: Name in the record and place of each mutant; the place is `None` if it is gone.
    """
    recorded = set()
    for row in read_rows(out):
        # Tests that failed without the mutant may have met a busy machine: they are tried again.
        if row["outcome"] != UNJUDGED:
            recorded.add(row["mutant"])
    missing = [pair for pair in mutants if pair[0] not in recorded]
    if not missing:
        return
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        bench = Bench(root, Path(folder).resolve() / "tree")
        for name, mutant in missing:
            if mutant is None:
                row = {"mutant": name, "outcome": "gone"}
            else:
                tests = tests_of(root, mutant.path)
                fields = dataclasses.asdict(mutant)
                line = fields.pop("span")["line"]
                row = {"mutant": name, **fields, "line": line, "tests": tests}
                row |= bench.judge(mutant, tests)
            write_row(out, row)
            print(f"{row['outcome']:22s} {mutant or name}", flush=True)


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Summarize a record.

    Returns:
        `counts`: outcome to number of mutants. `outcomes`: name of a mutant to its outcome.
    """
    outcomes = {row["mutant"]: row["outcome"] for row in rows}
    return {"counts": dict(sorted(Counter(outcomes.values()).items())), "outcomes": outcomes}


def record(out: Path, root: Path = ROOT) -> dict[str, Any]:
    """Judge all chosen mutants that a record does not have, and return the record's summary."""
    measure(out, [(mutant.name, mutant) for mutant in chosen(root)], root)
    return summary(read_rows(out))


def differences(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each mutant that tests killed before and do not kill now."""
    dead = ("killed", "timeout")
    outcomes = {row["mutant"]: row["outcome"] for row in after}
    lines: list[str] = []
    for row in before:
        outcome = outcomes.get(row["mutant"], "not measured")
        if row["outcome"] in dead and outcome not in dead:
            lines.append(f"{row['outcome']} before, {outcome} now: {row['mutant']}")
    return lines


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    out: Positional[Path]
    """Record, a file of JSON lines."""
    first: int | None = None
    """Number of mutants to judge; all by default."""
    like: Path | None = None
    """Older record whose mutants are judged in this checkout."""
    against: Path | None = None
    """Older record to compare with; runs nothing."""


def main() -> int:
    """Judge mutants and return 0, or compare two records and return 1 if they differ."""
    words = harness.parse(Options)
    # SIGTERM ends the command as Ctrl-C does: running tests are ended and the copy is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if words.against:
        lines = differences(read_rows(words.against), read_rows(words.out))
        print("\n".join(lines) or "every mutant that was killed still is")
        return int(bool(lines))
    mutants: list[tuple[str, Mutant | None]]
    if words.like:
        tree = Tree(ROOT)
        mutants = []
        for row in read_rows(words.like):
            if row["outcome"] != "gone":
                mutants.append((row["mutant"], tree.find(row)))
    else:
        mutants = [(mutant.name, mutant) for mutant in chosen(ROOT)]
    measure(words.out, mutants[: words.first])
    print(json.dumps(summary(read_rows(words.out))["counts"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
