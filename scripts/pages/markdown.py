"""Markdown that commands write: a table, and the part of a page between two markers, whose other text is written by hand."""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]]) -> str:
    """A table of a heading row and the rest."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def replaced(text: str, part: str, content: str) -> str:
    """The page with the content between `<!-- PART: begin -->` and `<!-- PART: end -->`.

    Args:
        text: of the page.
        part: its name in the markers.
        content: what stands between them, on lines of its own.

    Raises:
        ValueError: the page has not both markers, once and in this order.
    """
    begin, end = f"<!-- {part}: begin -->", f"<!-- {part}: end -->"
    before, found, rest = text.partition(begin)
    old, closed, after = rest.partition(end)
    if not (found and closed) or begin in old + after or end in before + after:
        raise ValueError(
            f"the page needs one line {begin} and after it one line {end}, and the part is written between"
        )
    return f"{before}{begin}\n{content}\n{end}{after}"
