"""Markdown that commands write: tables, and the part of a page between two markers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, whose first row is the heading."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def parts(text: str, name: str) -> tuple[str, str, str]:
    """Split a page at the lines `<!-- NAME: begin -->` and `<!-- NAME: end -->`.

    Returns:
        Text before, between and after the two markers, without the markers.

    Raises:
        ValueError: The page does not have both markers, once and in this order.
    """
    begin = f"<!-- {name}: begin -->"
    end = f"<!-- {name}: end -->"
    before, opened, rest = text.partition(begin)
    part, closed, after = rest.partition(end)
    if not (opened and closed) or begin in part + after or end in before + after:
        raise ValueError(
            f"the page needs one line {begin} and after it one line {end}, "
            "and the part is written between"
        )
    return before, part, after


def replaced(text: str, name: str, content: str) -> str:
    """Return a page with new content between the markers of a part.

    Args:
        name: Name in the markers, as in `parts`.
        content: New content, without a newline at either end.
    """
    before, _, after = parts(text, name)
    return f"{before}<!-- {name}: begin -->\n{content}\n<!-- {name}: end -->{after}"


def write_section(page: Path, name: str, section: str) -> None:
    """Write a section between its markers; without markers the section becomes the whole page."""
    text = page.read_text() if page.exists() else ""
    if f"<!-- {name}: begin -->" in text:
        section = replaced(text, name, f"\n{section}")
    page.write_text(section)
