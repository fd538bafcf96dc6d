"""A text as its tokens come: what of it can be shown, and where and why it ends."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal

from mupax.train.reuse.generate.command import UNFINISHED

Finish = Literal["stop", "length"]


class Writing:
    """One text. A character whose bytes are not all there yet waits for them, and so does what may begin a stop.

    Args:
        tokenizer: whose `decode` makes text of tokens.
        length: tokens that are asked for.
        stops: texts that end it, and do not come out.
        ends: tokens that do.
    """

    def __init__(self, tokenizer: Any, length: int, stops: Sequence[str], ends: Collection[int]) -> None:
        self._tokenizer, self._length, self._stops, self._ends = tokenizer, length, stops, ends
        self.ids: list[int] = []
        """Without the token that ended it."""
        self.text = ""
        """What came out."""
        self.count = 0
        """Tokens made, with what ended it."""
        self.finish: Finish | None = None if length else "length"

    def add(self, ids: Sequence[int]) -> str:
        """What comes out after these tokens more.

        Args:
            ids: at least one; those after the end are left out.
        """
        if self.finish:
            return ""
        end = next((i for i, token in enumerate(ids) if token in self._ends), None)
        before = len(self.ids)
        self.ids += ids[:end]
        self.count += len(ids) if end is None else end + 1
        text = self._tokenizer.decode(self.ids)
        stop = self._stop(text)
        if stop is not None:
            self.finish = "stop"
            # The first token with which the stop was whole.
            whole = next(n for n in range(before, len(self.ids) + 1) if self._stop(self._decoded(n)) is not None)
            self.ids, self.count = self.ids[:whole], whole
            text = text[:stop]
        elif end is not None:
            self.finish = "stop"
        elif self.count >= self._length:
            self.finish = "length"
        else:
            text = text.rstrip(UNFINISHED)
            text = text[: len(text) - self._begun(text)]
        if not text.startswith(self.text):  # a decoder that changes its mind; what is out stays
            return ""
        piece, self.text = text[len(self.text) :], text
        return piece

    def _decoded(self, count: int) -> str:
        return self._tokenizer.decode(self.ids[:count])

    def _stop(self, text: str) -> int | None:
        """Where the first stop begins."""
        return min((at for stop in self._stops if (at := text.find(stop)) >= 0), default=None)

    def _begun(self, text: str) -> int:
        """How many characters at the end may be of a stop that is not whole yet."""
        longest = max(map(len, self._stops), default=0)
        sizes = range(min(longest - 1, len(text)), 0, -1)
        return next((n for n in sizes if any(stop.startswith(text[-n:]) for stop in self._stops)), 0)
