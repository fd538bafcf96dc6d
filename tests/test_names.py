"""No variable, argument, attribute, function or class is called by a participle or pronoun."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("presets", "zoo", "train", "scripts", "examples", "tests")
VAGUE = frozenset(
    [
        "found",
        "given",
        "beside",
        "wanted",
        "kept",
        "made",
        "said",
        "taken",
        "seen",
        "known",
        "others",
        "asked",
        "those",
        "them",
        "it",
        "both",
    ]
)
"""What says how a value came about, or points at it, in place of what it is."""
SAVED = {("train/core/state.py", "seen")}
"""Leaves of checkpoints: another name would be another format."""

pytestmark = pytest.mark.core


def bound(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of all that a module binds."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.ExceptHandler(name=str() as name):
                yield node.lineno, name


def vague(name: str) -> bool:
    """Whether a name, or the stem of one with a shape behind it (`x_BTD`), is in `VAGUE`."""
    stem, _, shape = name.strip("_").rpartition("_")
    return (stem if stem and shape.isupper() else name.strip("_")).lower() in VAGUE


@pytest.mark.parametrize("folder", FOLDERS)
def test_names_say_what_they_hold(folder: str) -> None:
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths
    places = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in paths
        for line, name in bound(ast.parse(path.read_text()))
        if vague(name) and (path.relative_to(ROOT).as_posix(), name) not in SAVED
    ]
    assert not places, "call it by the field's term for what it holds:\n" + "\n".join(places)


@pytest.mark.parametrize(
    "source",
    [
        "found = 1",
        "def rows(given): ...",
        "def _made(): ...",
        "class Seen: ...",
        "self.kept = 1",
        "[x for wanted in rows]",
        "if (said := text()): ...",
        "taken_EBTA = mask",
        "try: ...\nexcept OSError as it: ...",
        "first, *others = rows",
    ],
)
def test_control_a_vague_name_is_found(source: str) -> None:
    assert [name for _, name in bound(ast.parse(source)) if vague(name)]


@pytest.mark.parametrize(
    "source",
    [
        "founder = 1",
        "given_name = 1",
        "known_values = found",
        "row['said'] = 1",
        "x_BTD = 1",
        "made.model()",
    ],
)
def test_control_other_names_pass(source: str) -> None:
    assert not [name for _, name in bound(ast.parse(source)) if vague(name)]
