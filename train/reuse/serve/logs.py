"""Escaping of client text for the server's log."""

from __future__ import annotations


def one_line(text: str) -> str:
    """Return a text with escapes in place of line ends and other unprintable characters."""
    return "".join(map(_visible, text))


def _visible(character: str) -> str:
    if character.isprintable():
        return character
    return character.encode("unicode_escape").decode()
