"""The two kinds of error whose text is for a person: it says what is wrong, where, and what to write instead."""

from __future__ import annotations


class MupaxError(ValueError):
    """Bad input. An entry point prints the text as one message and ends with 2, without a traceback."""


class MupaxFailure(RuntimeError):
    """A failure of the machine, such as a full disk. An entry point prints the text and ends with 1, without a traceback."""
