"""docs/concepts/architecture.md: its drawing of rooms and floors has the arrows of the code, and its walks follow the imports.

`python -m tests.test_architecture` draws it anew.
"""

from __future__ import annotations

import re
import string

import pytest

from tests.test_floors import FLOORS, ROOT, import_graph, room

ARCHITECTURE = ROOT / "docs" / "concepts" / "architecture.md"

pytestmark = pytest.mark.core


def arrows() -> set[tuple[str, str]]:
    """(room, room that one of its files imports from), wherever in the file."""
    return {
        (room(path), room(target))
        for path, targets in import_graph().items()
        for target in targets
        if room(target) != room(path)
    }


def drawing(floors: tuple[tuple[str, ...], ...], arrows: set[tuple[str, str]]) -> str:
    """Rooms as lines, the highest floor first, each with the letters of the rooms that it imports from."""
    letters = dict(
        zip([name for floor in floors for name in floor], string.ascii_letters, strict=False)
    )
    width = max(map(len, [*letters, "room"]))
    lines = []
    for number, floor in reversed(list(enumerate(floors))):
        for name in reversed(floor):
            below = [
                letter if (name, other) in arrows else "·" for other, letter in letters.items()
            ]
            lines.append(
                f"{number:>5}  {letters[name]}  {name:<{width}}  {''.join(below)}".rstrip()
            )
    return "\n".join([f"floor     {'room':<{width}}  imports from", *lines])


def page(text: str) -> str:
    """The text of docs/concepts/architecture.md with the drawing as the code has it."""
    begin, end = "<!-- rooms: begin -->\n", "<!-- rooms: end -->"
    before, after = text.partition(begin)[0], text.partition(end)[2]
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
    """The graph with arrows to what an imported package exports, as to the package."""
    reached = {path: set(targets) for path, targets in graph.items()}
    for targets in reached.values():
        packages = {target for target in targets if target.endswith("__init__.py")}
        while packages:
            more = graph[packages.pop()] - targets
            targets |= more
            packages |= {target for target in more if target.endswith("__init__.py")}
    return reached


def walks(text: str) -> dict[str, list[tuple[str, str]]]:
    """Heading to (file, what is said of it): the numbered lists of a text whose items begin with a file."""
    link = r"\[`([\w/]+\.py)`\]\(\.\./\.\./\1\)"
    item = re.compile(rf"^\d+\. {link}(.*?)(?=^\d+\. |^## |\Z)", re.MULTILINE | re.DOTALL)
    parts = re.split(r"^## (.*)$", text, flags=re.MULTILINE)[1:]
    return {
        title: items
        for title, body in zip(parts[::2], parts[1::2], strict=True)
        if (items := item.findall(body))
    }


def unsound(walk: list[tuple[str, str]], graph: dict[str, set[str]]) -> list[str]:
    """Files of a walk that neither import nor are imported by one before them, and names that their file does not have."""
    wrong, before = [], set[str]()
    for path, description in walk:
        reachable = before.union(*(graph[other] for other in before))
        if before and not (graph[path] & before or path in reachable):
            wrong.append(f"{path} has no import to or from what stands before it")
        words = set(re.findall(r"\w+", (ROOT / path).read_text()))
        names = re.findall(r"`(?:\w+\.)*(\w+)(?:\(\))?`", description)
        wrong += [f"{path} has no {name}" for name in names if name not in words]
        before.add(path)
    return wrong


@pytest.mark.parametrize("title", walks(ARCHITECTURE.read_text()))
def test_a_walk_follows_the_imports(title: str):
    assert (
        unsound(
            walks(ARCHITECTURE.read_text())[title], through_packages(import_graph(entries=True))
        )
        == []
    )


def test_the_walks_are_there_and_short():
    lengths = {title: len(walk) for title, walk in walks(ARCHITECTURE.read_text()).items()}
    assert {title: length for title, length in lengths.items() if "walk" not in title} == {
        "The spine": 8
    }
    assert len(lengths) == 4


def test_control_a_stale_walk_is_seen():
    walk = [("train/run/loop.py", " `run` and `no_such_name`"), ("presets/rule.py", " `Power`")]
    assert unsound(walk, through_packages(import_graph())) == [
        "train/run/loop.py has no no_such_name",
        "presets/rule.py has no import to or from what stands before it",
    ]


if __name__ == "__main__":
    ARCHITECTURE.write_text(page(ARCHITECTURE.read_text()))
