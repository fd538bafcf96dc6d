"""Badges of README.md, made from pyproject.toml: writes docs/images/badges.

    python -m scripts.pages.badges

The badges are files of the repository, so that no page waits for another host. A test compares them
with pyproject.toml.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

from scripts import ROOT, harness

FOLDER = ROOT / "docs" / "images" / "badges"
FONT = 11
"""Size of the text, in pixels."""
PADDING = 7
"""Space on either side of the text, in pixels."""
HEIGHT = 20
"""Height of a badge, in pixels."""
SVG = """<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" role="img" \
aria-label="{label}: {value}">
<title>{label}: {value}</title>
<clipPath id="corners"><rect width="{width}" height="{height}" rx="3"/></clipPath>
<g clip-path="url(#corners)">
<rect width="{left}" height="{height}" fill="#555"/>
<rect x="{left}" width="{right}" height="{height}" fill="#0b69a3"/>
</g>
<g fill="#fff" text-anchor="middle" font-family="Verdana,DejaVu Sans,sans-serif" font-size="{font}">
<text x="{label_x}" y="14" textLength="{label_length}">{label}</text>
<text x="{value_x}" y="14" textLength="{value_length}">{value}</text>
</g>
</svg>
"""


def texts(project: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return file name without suffix to label and value of each badge.

    Args:
        project: `project` table of a pyproject.toml.

    Raises:
        ValueError: A classifier or the licence that a badge shows is not declared.
    """
    classifiers = project.get("classifiers", ())
    versions = []
    for line in classifiers:
        match = re.fullmatch(r"Programming .* :: (3\.\d+)", line)
        if match:
            versions.append(match[1])
    if not versions:
        raise ValueError(
            "pyproject.toml declares no Python; add classifiers "
            "`Programming Language :: Python :: 3.N`"
        )
    if not isinstance(project.get("license"), str):
        raise ValueError(
            'pyproject.toml declares no licence; write its SPDX name: license = "Apache-2.0"'
        )
    if "Typing :: Typed" not in classifiers:
        raise ValueError("pyproject.toml declares no types; add the classifier `Typing :: Typed`")
    return {
        "python": ("python", " | ".join(versions)),
        "licence": ("licence", project["license"]),
        "typed": ("types", "pyright"),
    }


def _width(text: str) -> int:
    """Return the width of a text, in pixels."""
    # matplotlib's own font is as wide as the browsers' Verdana.
    path = TextPath((0, 0), text, size=FONT, prop=FontProperties("DejaVu Sans"))
    return round(path.get_extents().width)


def badge(label: str, value: str) -> str:
    """Return the SVG of a label on grey and a value on blue."""
    label_length = _width(label)
    value_length = _width(value)
    left = label_length + 2 * PADDING
    right = value_length + 2 * PADDING
    return SVG.format(
        width=left + right,
        height=HEIGHT,
        font=FONT,
        left=left,
        right=right,
        label=escape(label),
        value=escape(value),
        label_x=left / 2,
        value_x=left + right / 2,
        label_length=label_length,
        value_length=value_length,
    )


def badges(pyproject: Path = ROOT / "pyproject.toml") -> dict[str, str]:
    """Return file name to content of every badge."""
    project = tomllib.loads(pyproject.read_text())["project"]
    return {f"{name}.svg": badge(*words) for name, words in texts(project).items()}


def main() -> None:
    """Write all badges to docs/images/badges."""
    FOLDER.mkdir(exist_ok=True)
    for name, content in badges().items():
        (FOLDER / name).write_text(content)


if __name__ == "__main__":
    harness.refuse_words()
    main()
