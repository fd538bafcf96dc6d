"""Text of clients in the server's log."""

from __future__ import annotations


def one_line(text: str) -> str:
    """Return a text in which characters that a terminal obeys, and line ends, are written as escapes."""
    return "".join(map(_visible, text))


def _visible(character: str) -> str:
    if character.isprintable():
        return character
    return character.encode("unicode_escape").decode()
