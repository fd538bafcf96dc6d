"""Markdown that commands write: a table, and the part of a page between two markers, whose other text is written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def table(rows: Sequence[Sequence[str]]) -> str:
    """A table of a heading row and the rest."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def parts(text: str, name: str) -> tuple[str, str, str]:
    """A page before, between and after the lines `<!-- NAME: begin -->` and `<!-- NAME: end -->`, without these.

    Args:
        text: of the page.
        name: of the part between.

    Raises:
        ValueError: the page has not both markers, once and in this order.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, opened, rest = text.partition(begin)
    part, closed, after = rest.partition(end)
    if not (opened and closed) or begin in part + after or end in before + after:
        raise ValueError(
            f"the page needs one line {begin} and after it one line {end}, and the part is written between"
        )
    return before, part, after


def replaced(text: str, name: str, content: str) -> str:
    """The page with other content between the markers of a part.

    Args:
        text: of the page.
        name: of the part (`parts`).
        content: what stands there, on lines of its own.
    """
    before, _, after = parts(text, name)
    return f"{before}<!-- {name}: begin -->\n{content}\n<!-- {name}: end -->{after}"


def write_section(page: Path, name: str, section: str) -> None:
    """Write `section` between the markers of `name`; a page without these markers is written anew."""
    text = page.read_text() if page.exists() else ""
    if f"<!-- {name}: begin -->" in text:
        section = replaced(text, name, f"\n{section}")
    page.write_text(section)
