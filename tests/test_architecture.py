"""The architecture page's drawing has the arrows of the code, and its walks follow imports.

`python -m tests.test_architecture` draws it anew.
"""

from __future__ import annotations

import itertools
import re
import string

import pytest

from tests.test_floors import FLOORS, ROOT, import_graph, room

ARCHITECTURE = ROOT / "docs" / "concepts" / "architecture.md"

pytestmark = pytest.mark.core


def arrows() -> set[tuple[str, str]]:
    """Return pairs of a room and a room that one of its files imports from."""
    pairs: set[tuple[str, str]] = set()
    for path, targets in import_graph().items():
        pairs.update((room(path), room(target)) for target in targets)
    return {(importer, imported) for importer, imported in pairs if importer != imported}


def drawing(floors: tuple[tuple[str, ...], ...], arrows: set[tuple[str, str]]) -> str:
    """Return a line for each room, the highest floor first, with letters of its imports."""
    letters = dict(zip(itertools.chain(*floors), string.ascii_letters, strict=False))
    width = max(map(len, [*letters, "room"]))
    lines = []
    for number, floor in reversed(list(enumerate(floors))):
        for name in reversed(floor):
            below = ""
            for peer, letter in letters.items():
                below += letter if (name, peer) in arrows else "·"
            lines.append(f"{number:>5}  {letters[name]}  {name:<{width}}  {below}".rstrip())
    return "\n".join([f"floor     {'room':<{width}}  imports from", *lines])


def page(text: str) -> str:
    """Return the text of docs/concepts/architecture.md with the drawing of today."""
    begin = "<!-- rooms: begin -->\n"
    end = "<!-- rooms: end -->"
    before = text.partition(begin)[0]
    after = text.partition(end)[2]
    return f"{before}{begin}```text\n{drawing(FLOORS, arrows())}\n```\n{end}{after}"


def test_the_drawing_has_the_arrows_of_the_code_and_no_others():
    text = ARCHITECTURE.read_text()
    assert page(text) == text, "python -m tests.test_architecture draws it anew"


def test_control_another_arrow_is_another_drawing():
    floors = (("a",), ("b", "c"), ("d",))
    drawn = drawing(floors, {("b", "a"), ("d", "c")})
    assert drawn.splitlines() == [
        "floor     room  imports from",
        "    2  d  d     ··c·",
        "    1  c  c     ····",
        "    1  b  b     a···",
        "    0  a  a     ····",
    ]
    assert drawn != drawing(floors, {("b", "a"), ("d", "c"), ("d", "a")})


def through_packages(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the graph with arrows also to what an imported package exports."""
    reached = {path: set(targets) for path, targets in graph.items()}
    for targets in reached.values():
        packages = {target for target in targets if target.endswith("__init__.py")}
        while packages:
            exported = graph[packages.pop()] - targets
            targets |= exported
            packages |= {target for target in exported if target.endswith("__init__.py")}
    return reached


def walks(text: str) -> dict[str, list[tuple[str, str]]]:
    """Return the numbered lists of files by their heading: each file with its description."""
    link = r"\[`([\w/]+\.py)`\]\(\.\./\.\./\1\)"
    item = re.compile(rf"^\d+\. {link}(.*?)(?=^\d+\. |^## |\Z)", re.MULTILINE | re.DOTALL)
    parts = re.split(r"^## (.*)$", text, flags=re.MULTILINE)[1:]
    lists = {title: item.findall(body) for title, body in zip(parts[::2], parts[1::2], strict=True)}
    return {title: items for title, items in lists.items() if items}


def unsound(walk: list[tuple[str, str]], graph: dict[str, set[str]]) -> list[str]:
    """Return files of a walk that no import joins to it, and names that they do not have."""
    wrong: list[str] = []
    before: set[str] = set()
    for path, description in walk:
        reachable = before.union(*(graph[peer] for peer in before))
        if before and not (graph[path] & before or path in reachable):
            wrong.append(f"{path} has no import to or from what stands before it")
        words = set(re.findall(r"\w+", (ROOT / path).read_text()))
        names = re.findall(r"`(?:\w+\.)*(\w+)(?:\(\))?`", description)
        wrong += [f"{path} has no {name}" for name in names if name not in words]
        before.add(path)
    return wrong


@pytest.mark.parametrize("title", walks(ARCHITECTURE.read_text()))
def test_a_walk_follows_the_imports(title: str):
    walk = walks(ARCHITECTURE.read_text())[title]
    assert unsound(walk, through_packages(import_graph(entries=True))) == []


def test_the_walks_are_there_and_short():
    lengths = {title: len(walk) for title, walk in walks(ARCHITECTURE.read_text()).items()}
    assert len(lengths) == 4
    spine = {title: length for title, length in lengths.items() if "walk" not in title}
    assert spine == {"The spine": 8}


def test_control_a_stale_walk_is_seen():
    walk = [("train/run/loop.py", " `run` and `no_such_name`"), ("presets/rule.py", " `Power`")]
    assert unsound(walk, through_packages(import_graph())) == [
        "train/run/loop.py has no no_such_name",
        "presets/rule.py has no import to or from what stands before it",
    ]


if __name__ == "__main__":
    ARCHITECTURE.write_text(page(ARCHITECTURE.read_text()))
