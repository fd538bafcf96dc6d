"""Badges of README.md, from what pyproject.toml says: writes docs/images/badges.

    python -m scripts.pages.badges

They are files of the repository, so that no page waits for another host to draw them, and a test holds each to pyproject.toml.
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

from scripts import ROOT

FOLDER = ROOT / "docs" / "images" / "badges"
FONT, PADDING, HEIGHT = 11, 7, 20
"""Pixels: size of the text, the space on either side of it, and a badge's height."""
SVG = """<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" role="img" aria-label="{label}: {value}">
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
    """File name without suffix to label and value, of what the `project` table of a pyproject.toml declares.

    Raises:
        ValueError: it lacks a classifier or a licence that a badge would say.
    """
    classifiers = project.get("classifiers", ())
    versions = [
        version
        for line in classifiers
        if (version := re.fullmatch(r"Programming .* :: (3\.\d+)", line))
    ]
    if not versions:
        raise ValueError(
            "pyproject.toml declares no Python; add classifiers `Programming Language :: Python :: 3.N`"
        )
    if not isinstance(project.get("license"), str):
        raise ValueError(
            'pyproject.toml declares no licence; write its SPDX name: license = "Apache-2.0"'
        )
    if "Typing :: Typed" not in classifiers:
        raise ValueError("pyproject.toml declares no types; add the classifier `Typing :: Typed`")
    return {
        "python": ("python", " | ".join(version[1] for version in versions)),
        "licence": ("licence", project["license"]),
        "typed": ("types", "pyright"),
    }


def _width(text: str) -> int:
    """Pixels of a text in the font that matplotlib brings, which is as wide as the one that browsers have."""
    return round(
        TextPath((0, 0), text, size=FONT, prop=FontProperties("DejaVu Sans")).get_extents().width
    )


def badge(label: str, value: str) -> str:
    """SVG of a label on grey and its value on blue."""
    lengths = [_width(text) for text in (label, value)]
    left, right = (length + 2 * PADDING for length in lengths)
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
        label_length=lengths[0],
        value_length=lengths[1],
    )


def badges(pyproject: Path = ROOT / "pyproject.toml") -> dict[str, str]:
    """File name to content, of every badge."""
    project = tomllib.loads(pyproject.read_text())["project"]
    return {f"{name}.svg": badge(*words) for name, words in texts(project).items()}


def main() -> None:
    """Writes them."""
    FOLDER.mkdir(exist_ok=True)
    for name, content in badges().items():
        (FOLDER / name).write_text(content)


if __name__ == "__main__":
    main()
