"""Every public function of the product with two or more arguments says in its docstring what each of them is. Read by `ast`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("presets", "zoo", "train")

pytestmark = pytest.mark.core


def functions(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef, bool]]:
    """Public functions and methods of public classes, and whether a class that it derives from may have said it before."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node, False
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
                    yield method, bool(node.bases)


def arguments(function: ast.FunctionDef) -> list[str]:
    """The names of a function's arguments, but for the object or class itself."""
    args = function.args
    names = [arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
    return [name for name in names if name not in ("self", "cls")]


def unsaid(function: ast.FunctionDef, derived: bool) -> list[str]:
    """The arguments that the section `Args:` lacks; none of a function of one argument, or whose base class has the docstring."""
    names, text = arguments(function), ast.get_docstring(function)
    if len(names) < 2 or (derived and text is None):
        return []
    _, _, section = (text or "").partition("Args:\n")
    entries = {
        name.lstrip("*") for line in re.findall(r"^ {4}([\w*, ]+):", section, re.MULTILINE) for name in line.split(", ")
    }
    return [name for name in names if name not in entries]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_argument_is_said(package: str) -> None:
    lacking = [
        f"{path.relative_to(ROOT)}:{function.lineno} {function.name}: {', '.join(names)}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for function, derived in functions(ast.parse(path.read_text()))
        if (names := unsaid(function, derived))
    ]
    assert not lacking, "\n".join(lacking)


@pytest.mark.parametrize(
    ("source", "lacking"),
    [
        ("def f(a, b): 'Short.'", ["a", "b"]),
        ("def f(a): 'Short.'", []),
        ('def f(a, *, b):\n    """Short.\n\n    Args:\n        a: the first.\n    """', ["b"]),
        ('def f(a, b):\n    """Short.\n\n    Args:\n        a, b: both.\n    """', []),
        ('class C(B):\n    def f(self, a, b): ...', []),
        ('class C:\n    def f(self, a, b): ...', ["a", "b"]),
        ('class C(B):\n    def f(self, a, b): "Short."', ["a", "b"]),
    ],
)  # fmt: skip
def test_control_what_is_not_said_is_seen(source: str, lacking: list[str]) -> None:
    ((function, derived),) = functions(ast.parse(source))
    assert unsaid(function, derived) == lacking
