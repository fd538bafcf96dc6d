"""Badges say what pyproject.toml declares, and README.md shows them with the same words."""

from __future__ import annotations

import re
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from scripts.pages import badges
from tests.test_project import PROJECT, ROOT

pytestmark = pytest.mark.core


def test_every_badge_is_what_pyproject_declares() -> None:
    files = {path.name: path.read_text() for path in badges.FOLDER.iterdir()}
    assert files == badges.badges(), "python -m scripts.pages.badges writes them anew"


def test_the_readme_shows_every_badge_in_its_words() -> None:
    shown = dict(
        re.findall(
            r"!\[([^\]]*)\]\(docs/images/badges/(\w+)\.svg\)", (ROOT / "README.md").read_text()
        )
    )
    texts = badges.texts(PROJECT["project"])
    assert sorted(shown.values()) == sorted(texts)
    for words, name in shown.items():
        assert re.findall(r"[\d.]+\d|Apache\S*|pyright", words) == texts[name][1].split(" | ")


def test_what_they_say_is_so() -> None:
    declared = {
        version
        for _, value in badges.texts(PROJECT["project"]).values()
        for version in value.split(" | ")
    }
    (supported,) = re.findall(
        r"^supported=\((.*)\)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE
    )
    assert set(supported.split()) < declared
    assert (
        PROJECT["project"]["requires-python"]
        == f">={min(supported.split(), key=lambda v: int(v[2:]))}"
    )
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert (ROOT / "mupax" / "py.typed").exists()
    assert "pyright" in declared
    assert PROJECT["tool"]["pyright"]["include"]


CHANGES = {
    '"Programming Language :: Python :: 3.13"': '"Programming Language :: Python :: 3.14"',
    'license = "Apache-2.0"': 'license = "MIT"',
}


@pytest.mark.parametrize("text", CHANGES)
def test_control_another_pyproject_has_other_badges(text: str, tmp_path: Path) -> None:
    before = (ROOT / "pyproject.toml").read_text()
    assert before.count(text) == 1
    (tmp_path / "pyproject.toml").write_text(before.replace(text, CHANGES[text]))
    changed = badges.badges(tmp_path / "pyproject.toml")
    assert len(changed.items() - badges.badges().items()) == 1


@pytest.mark.parametrize(
    "text", ["Programming Language :: Python", 'license = "Apache-2.0"', "Typing :: Typed"]
)
def test_what_is_not_declared_gets_no_badge(text: str) -> None:
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    project = tomllib.loads("\n".join(line for line in lines if text not in line))["project"]
    with pytest.raises(ValueError, match=r"pyproject\.toml declares no .*; (add|write)"):
        badges.texts(project)


def test_a_badge_is_as_wide_as_its_text() -> None:
    widths = []
    for value in ("iiii", "mmmm", "mm & <m"):
        root = ET.fromstring(badges.badge("python", value))
        label, text = root.iter("{http://www.w3.org/2000/svg}text")
        assert (label.text, text.text) == ("python", value)
        lengths = [float(part.attrib["textLength"]) for part in (label, text)]
        assert float(root.attrib["width"]) == sum(lengths) + 4 * badges.PADDING
        widths.append(lengths[1])
    assert widths[0] < widths[1] / 2
