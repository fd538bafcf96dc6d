"""Measure how plain the code and its docstrings are, folder by folder.

    python -m scripts.house.style [FOLDER ...]

prints a row for each folder and one for all of them, by default for every folder of the product.
`--lines` also prints where the first lines, `Args:` entries and long lines are that count.

The columns, for a folder's Python files without those behind links:

* **tokens**: code tokens per statement. Docstrings and comments do not count.
* **tuples, conditions, comprehensions**: per 1,000 statements, assignments of a written tuple to
  several names, conditional expressions, and comprehensions with generator expressions.
* **two loops**: comprehensions with more than one `for`.
* **long**: share of lines over 100 columns, in percent.
* **first lines**: share of docstrings whose first line begins with one of `WRONG_BEGINNINGS`.
* **hollow**: share of `Args:` entries of six words or fewer that name no value, unit or default.
* **names**: share of assigned names and parameters that are function words.
* **comments**: share of lines that have a comment, in percent.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

from tyro.conf import Positional

from mupax.command_line import Switch
from scripts import ROOT, harness
from scripts.house.sizes import PRODUCT, count_tokens, python_files

MAX_COLUMNS = 100
"""Longest line that is not counted."""
WRONG_BEGINNINGS = ("What", "Whether", "The same", "Of", "As", "Where", "How", "Those")
"""Words that no first line of a docstring begins with: they make neither a sentence nor a noun."""
_FUNCTION_WORDS = """
all also any apart as at back before beside beyond both by each every for from given here
how into it its like more most much no now of off on once one only or other others out
over own rest same since so some such that the their them then there these they this those
though to too under until up upon what when where which while who whole whose with within
without yet
"""
FUNCTION_WORDS = frozenset(_FUNCTION_WORDS.split())
"""Words such as `each` or `of`, which as names do not say what a value is."""
HOLLOW_WORDS = 6
"""Number of words up to which an entry of `Args:` counts as hollow if it names no value."""

_ENTRY = re.compile(r"^(\*{0,2}\w+)(?: \([^)]*\))?:\s*(.*)$")
_SECTION = re.compile(r"^(Args|Arguments):\s*$")
_CONCRETE = re.compile(
    r"[\d\[\]`]|default|\b(nats|tokens|steps|seconds|bytes|octaves|degrees|pixels|bits|hertz|GiB|"
    r"MiB|FLOPs|microseconds|milliseconds|examples)\b"
)


class Finding(NamedTuple):
    """One line that counts against a file.

    Attributes:
        line: Number of the line, from 1.
        text: The line itself, or the part that counts.
    """

    line: int
    text: str


@dataclass
class Counts:
    """Sums over files. `row` turns them into the columns of the table."""

    tokens: int = 0
    statements: int = 0
    tuples: int = 0
    conditions: int = 0
    comprehensions: int = 0
    two_loops: int = 0
    lines: int = 0
    long_lines: int = 0
    comments: int = 0
    docstrings: int = 0
    wrong_beginnings: int = 0
    entries: int = 0
    hollow_entries: int = 0
    names: int = 0
    function_words: int = 0

    def add(self, other: Counts) -> None:
        """Add the counts of another file or folder."""
        for field in fields(self):
            total = getattr(self, field.name) + getattr(other, field.name)
            setattr(self, field.name, total)

    def row(self) -> dict[str, float]:
        """Return the columns by name. An empty folder has zeros."""
        return {
            "tokens": _ratio(self.tokens, self.statements),
            "tuples": 1000 * _ratio(self.tuples, self.statements),
            "conditions": 1000 * _ratio(self.conditions, self.statements),
            "comprehensions": 1000 * _ratio(self.comprehensions, self.statements),
            "two loops": self.two_loops,
            "long %": 100 * _ratio(self.long_lines, self.lines),
            "first lines %": 100 * _ratio(self.wrong_beginnings, self.docstrings),
            "hollow %": 100 * _ratio(self.hollow_entries, self.entries),
            "names %": 100 * _ratio(self.function_words, self.names),
            "comments %": 100 * _ratio(self.comments, self.lines),
        }


def counts(source: str) -> Counts:
    """Measure one file.

    Args:
        source: Python text that `ast.parse` takes.
    """
    tree = ast.parse(source)
    result = Counts(tokens=count_tokens(source))
    result.lines = len(source.splitlines())
    result.long_lines = len(long_lines(source))
    result.comments = _comment_lines(source)
    result.docstrings = sum(1 for _ in docstrings(tree))
    result.wrong_beginnings = len(wrong_beginnings(tree))
    entries = list(argument_entries(tree))
    result.entries = len(entries)
    result.hollow_entries = sum(is_hollow(entry.text) for entry in entries)
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and not _is_string(node):
            result.statements += 1
        if isinstance(node, ast.Assign) and _assigns_a_written_tuple(node):
            result.tuples += 1
        elif isinstance(node, ast.IfExp):
            result.conditions += 1
        elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            result.comprehensions += 1
            result.two_loops += len(node.generators) > 1
        if (name := _defined_name(node)) is not None:
            result.names += 1
            result.function_words += name in FUNCTION_WORDS
    return result


def long_lines(source: str) -> list[Finding]:
    """Return the lines of over `MAX_COLUMNS` columns. A line with an address that long is none."""
    findings = []
    for number, line in enumerate(source.splitlines(), 1):
        if len(line) > MAX_COLUMNS and "http" not in line:
            findings.append(Finding(number, line.strip()))
    return findings


def docstrings(tree: ast.Module) -> Iterator[Finding]:
    """Yield the docstrings of a module and its classes and functions, with their first line."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node)
        if text is not None:
            yield Finding(node.body[0].lineno, text)


def wrong_beginnings(tree: ast.Module) -> list[Finding]:
    """Return first lines of docstrings that begin with one of `WRONG_BEGINNINGS`."""
    findings = []
    for line, text in docstrings(tree):
        first = text.splitlines()[0] if text else ""
        if any(re.match(rf"{words}\b", first) for words in WRONG_BEGINNINGS):
            findings.append(Finding(line, first))
    return findings


def argument_entries(tree: ast.Module) -> Iterator[Finding]:
    """Yield the descriptions under `Args:` of all docstrings, each without its name."""
    for line, text in docstrings(tree):
        inside = False
        indent = 0
        entry: str | None = None
        # The line without indentation ends the last entry.
        for row in [*text.splitlines(), "End:"]:
            depth = len(row) - len(row.lstrip())
            if _SECTION.match(row):
                inside = True
                indent = 0
                continue
            if not inside or not row.strip():
                continue
            if depth == 0:
                inside = False
            indent = indent or depth
            if entry is not None and (depth == 0 or depth == indent):
                yield Finding(line, entry)
                entry = None
            if depth == indent and inside:
                matched = _ENTRY.match(row.strip())
                entry = matched.group(2) if matched else None
            elif entry is not None:
                entry = f"{entry} {row.strip()}"


def is_hollow(entry: str) -> bool:
    """Return whether a description under `Args:` is hollow: short, without value, unit or default.

    Such an entry usually repeats the name and type of the argument.
    """
    return len(entry.split()) <= HOLLOW_WORDS and not _CONCRETE.search(entry)


def hollow_entries(tree: ast.Module) -> list[Finding]:
    """Return the hollow entries of `Args:`."""
    return [entry for entry in argument_entries(tree) if is_hollow(entry.text)]


def folder_counts(folder: Path) -> Counts:
    """Measure all Python files below a folder, without those behind links."""
    total = Counts()
    for path in python_files(folder):
        total.add(counts(path.read_text(encoding="utf-8")))
    return total


def _ratio(part: int, all_of_it: int) -> float:
    return part / all_of_it if all_of_it else 0.0


def _comment_lines(source: str) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return len({item.start[0] for item in tokens if item.type == tokenize.COMMENT})


def _is_string(node: ast.stmt) -> bool:
    """Return whether a statement is a docstring of a module, class, function or field."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _assigns_a_written_tuple(node: ast.Assign) -> bool:
    return isinstance(node.value, ast.Tuple) and isinstance(node.targets[0], ast.Tuple)


def _defined_name(node: ast.AST) -> str | None:
    """Return the name that a node defines: a variable, a parameter or a loop's variable."""
    if isinstance(node, ast.arg):
        return node.arg
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    return None


@dataclass(frozen=True)
class Options:
    """Flags of the command."""

    folders: Positional[tuple[str, ...]] = PRODUCT
    """Folders or files, relative to the checkout."""
    lines: Switch = False
    """Also print the first lines, entries and long lines that count."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, and return 0."""
    options = harness.parse(Options, argv)
    total = Counts()
    table: dict[str, dict[str, float]] = {}
    for name in options.folders:
        path = ROOT / name
        if path.is_file():
            measured = counts(path.read_text(encoding="utf-8"))
        else:
            measured = folder_counts(path)
        table[name] = measured.row()
        total.add(measured)
    table["all"] = total.row()
    columns = list(table["all"])
    width = max(len(name) for name in table)
    print(" " * width, *(f"{column:>14}" for column in columns))
    for name, row in table.items():
        print(f"{name:{width}}", *(f"{row[column]:14.1f}" for column in columns))
    if options.lines:
        for name in options.folders:
            print_findings(ROOT / name)
    return 0


def print_findings(path: Path) -> None:
    """Print wrong first lines, hollow `Args:` entries and long lines, as FILE:LINE: KIND: TEXT."""
    files = [path] if path.is_file() else list(python_files(path))
    for file in files:
        source = file.read_text(encoding="utf-8")
        tree = ast.parse(source)
        place = file.relative_to(ROOT)
        for kind, findings in (
            ("first line", wrong_beginnings(tree)),
            ("hollow", hollow_entries(tree)),
            ("long", long_lines(source)),
        ):
            for finding in findings:
                print(f"{place}:{finding.line}: {kind}: {finding.text}")


if __name__ == "__main__":
    raise SystemExit(main())
