"""Finished rooms keep their style: docstrings that begin with a verb or a noun, no hollow `Args:`.

`make check` holds the same rooms to ruff's D401 (an imperative first line). The list of rooms is the
pattern in pyproject.toml and only grows. `python -m scripts.house.style --lines ROOM` prints what
a room still has.
"""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

from scripts.house import style

ROOT = Path(__file__).resolve().parent.parent


def finished_rooms() -> list[str]:
    """Return the folders and files that ruff's exception for unfinished rooms leaves out."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    ignored = settings["tool"]["ruff"]["lint"]["per-file-ignores"]
    (pattern,) = [name for name, rules in ignored.items() if "D401" in rules]
    assert pattern.startswith("!{")
    assert pattern.endswith("}")
    return pattern[2:-1].split(",")


def finished_files() -> list[Path]:
    files = sorted(path for pattern in finished_rooms() for path in ROOT.glob(pattern))
    assert len(files) >= len(finished_rooms())
    return files


@pytest.mark.parametrize("pattern", finished_rooms())
def test_finished_rooms_exist(pattern: str) -> None:
    assert any(ROOT.glob(pattern))


def test_first_lines_begin_with_a_verb_or_a_noun() -> None:
    assert _findings(style.wrong_beginnings) == []


def test_entries_of_args_say_more_than_name_and_type() -> None:
    assert _findings(style.hollow_entries) == []


def _findings(find: object) -> list[str]:
    assert callable(find)
    lines = []
    for path in finished_files():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for finding in find(tree):
            lines.append(f"{path.relative_to(ROOT)}:{finding.line}: {finding.text}")
    return lines


HOLLOW = '''
def save(session, seconds, state):
    """What is saved.

    Args:
        session: of the run.
        seconds: to wait, at most 30.
        state: that the last step
            left on the devices.

    Returns:
        path: of it.
    """
'''


def test_control_a_wrong_first_line_and_hollow_entries_are_found() -> None:
    tree = ast.parse(HOLLOW)
    assert [finding.text for finding in style.wrong_beginnings(tree)] == ["What is saved."]
    hollow = [finding.text for finding in style.hollow_entries(tree)]
    assert hollow == ["of the run."]
    entries = [finding.text for finding in style.argument_entries(tree)]
    assert entries[2] == "that the last step left on the devices."


def test_counts_of_one_file() -> None:
    source = "a, b = 1, 2\nc = a if b else 3  # why\nd = [x for x in y for y in z]\n"
    row = style.counts(source).row()
    assert row["tuples"] == pytest.approx(1000 / 3)
    assert row["conditions"] == pytest.approx(1000 / 3)
    assert row["comprehensions"] == pytest.approx(1000 / 3)
    assert row["two loops"] == 1
    assert row["comments %"] == pytest.approx(100 / 3)
