"""A release is of one version and one day everywhere; what is not says what to write instead."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from mupax import __version__
from scripts import release

TODAY = datetime.date(2031, 5, 7)
FILES = {
    "pyproject.toml": '[tool.hatch.version]\npath = "mupax/__init__.py"\n',
    "packaging/presets/pyproject.toml": '[tool.hatch.version]\npath = "../../mupax/__init__.py"\n',
    "mupax/__init__.py": '__version__ = "0.3.0"\n',
    "CHANGELOG.md": "# Changelog\n\n## Unreleased\n\n## 0.3.0 - 2031-05-06\n\n- New.\n\n## 0.2.0 - 2031-01-02\n\n- Old.\n",
    "CITATION.cff": "version: 0.3.0\ndate-released: 2031-05-06\n",
}

pytestmark = pytest.mark.core


def checkout(root: Path, name: str = "", before: str = "", after: str = "") -> Path:
    """One that can be released, but for `before` in a file, which is `after` there."""
    for path, text in FILES.items():
        assert path != name or before in text
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text.replace(before, after) if path == name else text)
    return root


def test_the_repository_has_one_version_and_no_day_before_its_release() -> None:
    assert release.version() == release.version(pyproject=release.DISTRIBUTIONS[1]) == __version__
    assert release.citation()["version"] == __version__
    assert release.citation().get("date-released") == release.released().get(__version__)
    assert release.sections().keys() - {
        f"{name} - {day}" for name, day in release.released().items()
    } <= {"Unreleased"}


def test_what_agrees_can_be_released(tmp_path: Path) -> None:
    assert release.problems(checkout(tmp_path), TODAY) == []
    assert (
        release.problems(checkout(tmp_path, "CHANGELOG.md", "## Unreleased\n\n", ""), TODAY) == []
    )


WRONG = {
    ("CHANGELOG.md", "Unreleased\n\n## 0.3.0 - 2031-05-06", "Unreleased"): [
        "CHANGELOG.md has no section of 0.3.0 with its day; in place of `## Unreleased` write `## 0.3.0 - 2031-05-07`",
        "CITATION.cff has date-released 2031-05-06; write `date-released: 2031-05-07`",
    ],
    ("CHANGELOG.md", "0.3.0 - 2031-05-06", "0.3.0"): [
        "in place of `## 0.3.0` write `## 0.3.0 - 2031-05-07`",
        "write `date-released: 2031-05-07`",
    ],
    ("CHANGELOG.md", "## Unreleased\n", "## Unreleased\n\n- Newer.\n"): [
        "CHANGELOG.md has entries under `## Unreleased`, which 0.3.0 would hold and not name"
    ],
    ("CHANGELOG.md", "2031-05-06", "2031-05-08"): [
        "0.3.0 is of 2031-05-08, and today is 2031-05-07; write `## 0.3.0 - 2031-05-07`",
        "write `date-released: 2031-05-08`",
    ],
    ("CHANGELOG.md", "2031-05-06", "2031-02-30"): [
        "2031-02-30 is no day",
        "write `date-released: 2031-02-30`",
    ],
    ("CHANGELOG.md", "## 0.3.0", "## 0.4.0 - 2031-05-07\n\n## 0.3.0"): [
        'begins with 0.4.0 and mupax is 0.3.0; write `__version__ = "0.4.0"`, or a section of 0.3.0 above it'
    ],
    ("CITATION.cff", "date-released: 2031-05-06\n", ""): [
        "CITATION.cff has no date-released; write `date-released: 2031-05-06`"
    ],
    ("CITATION.cff", "2031-05-06", "2031-05-05"): [
        "has date-released 2031-05-05; write `date-released: 2031-05-06`"
    ],
    ("CITATION.cff", "0.3.0", "0.2.0"): ["CITATION.cff has version 0.2.0; write `version: 0.3.0`"],
    ("mupax/__init__.py", "0.3.0", "0.3.0.dev1"): [
        "version 0.3.0.dev1 is not of the form X.Y.Z",
        "CHANGELOG.md has no section of 0.3.0.dev1",
        "write `version: 0.3.0.dev1`",
        "write `date-released: 2031-05-07`",
    ],
    ("mupax/__init__.py", "0.3.0", "0.2.0"): [
        "begins with 0.3.0 and mupax is 0.2.0",
        "write `version: 0.2.0`",
        "write `date-released: 2031-01-02`",
    ],
}


@pytest.mark.parametrize("change", WRONG, ids=lambda change: f"{change[0]}: {change[2]}")
def test_what_disagrees_is_said_with_what_to_write(
    change: tuple[str, str, str], tmp_path: Path
) -> None:
    wrong = release.problems(checkout(tmp_path, *change), TODAY)
    assert len(wrong) == len(WRONG[change])
    for line, part in zip(wrong, WRONG[change], strict=True):
        assert part in line


def test_distributions_of_two_versions_are_seen(tmp_path: Path) -> None:
    root = checkout(
        tmp_path, "packaging/presets/pyproject.toml", "../../mupax/__init__.py", "version.py"
    )
    (root / "packaging" / "presets" / "version.py").write_text('__version__ = "0.2.9"\n')
    (line,) = release.problems(root, TODAY)
    assert line.startswith(
        "packaging/presets/pyproject.toml is of version 0.2.9 and mupax of 0.3.0"
    )
    (root / "packaging" / "presets" / "version.py").write_text("")
    with pytest.raises(ValueError, match=r"assigns no version; write"):
        release.problems(root, TODAY)
