"""Streaming decoder of token ids, and the bytes of single tokens, for generation and serving.

A decoder may treat the first token of a text differently: SentencePiece removes a space there. So a
continuation is never decoded alone. It is decoded together with the last tokens before it.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

_LONGEST_WINDOW = 32
"""Largest number of tokens in the window before its oldest tokens are dropped.

The window has the last tokens, which are decoded again with every new token.
"""
_TAIL_TOKENS = 12
"""Number of tokens that stay in the window when the oldest are dropped, about.

All known decoders treat only a text's first token specially.
"""
_CUTS = 6
"""Number of neighbouring places at which cutting the window is tried.

A cut must not split a character, which has at most 4 tokens.
"""
_LONGEST_RUN = 32
"""Largest number of consecutive byte tokens that are held back until their text is certain."""


class Detokenizer:
    """Streaming decoder of the tokens that follow a prompt.

    `add` returns text as soon as later tokens cannot change it. All texts that `add` and `finish`
    return, joined, are `decode(prompt + tokens)` without `prompt_text` at its start. `prompt_text`
    is `decode(prompt)` without an incomplete character at its end, which belongs to the
    continuation. Work per token does not grow with the length.

    An incomplete character is held back until it is complete. Consecutive tokens that are decoded
    only together (`in_byte_run`) are held back until another token follows, up to 32 of them.

    Args:
        tokenizer: Tokenizer with `decode`, `is_skipped`, `raw_bytes` and `in_byte_run`.
        prompt: Token ids before the first added token. Default: none.
    """

    def __init__(self, tokenizer: Any, prompt: Iterable[int] = ()) -> None:
        self._tokenizer = tokenizer
        # Skipped tokens are left out, so that every token of the window has text.
        visible = []
        for token in prompt:
            if not tokenizer.is_skipped(int(token)):
                visible.append(int(token))
        self._window = visible
        self._limit = _LONGEST_WINDOW
        # Number of byte tokens at the end of the window.
        self._run = 0
        for token in reversed(self._window):
            if not tokenizer.in_byte_run(token):
                break
            self._run += 1
        if self._run and _is_utf8(self._bytes(self._window[-self._run :])):
            text = tokenizer.decode(self._window)
        else:
            text = self._settled(self._window)
        self.prompt_text = text
        """Text of the prompt, without an incomplete character at its end.

        If the prompt ends in a byte run of at most 32 tokens that is no UTF-8, all of this run is
        left out.
        """
        self._shown = len(text)
        """Number of characters of the window's text that were returned."""
        self._shorten()

    def add(self, tokens: Iterable[int]) -> str:
        """Add tokens. Return the new text that later tokens cannot change, perhaps empty."""
        new = []
        for token in tokens:
            if not self._tokenizer.is_skipped(token):
                new.append(token)
                self._run = self._run + 1 if self._tokenizer.in_byte_run(token) else 0
        if not new:
            return ""
        self._window = (
            self._window + new
        )  # not in place, since a copy of the decoder shares the list
        text = self._settled(self._window)
        piece = text[self._shown :]
        self._shown = max(self._shown, len(text))
        if len(self._window) > self._limit:
            self._shorten()
        return piece

    def finish(self) -> str:
        """Return the text that is still held back. No tokens may be added afterwards.

        An incomplete character is decoded as U+FFFD.
        """
        return self._tokenizer.decode(self._window)[self._shown :]

    def _bytes(self, tokens: Sequence[int]) -> bytes:
        """Return the joined bytes of tokens, to find an incomplete character at their end.

        A token whose bytes depend on the text counts as a space.
        """
        # A space ends an incomplete character, as a token without bytes of its own does.
        return b"".join(self._tokenizer.raw_bytes(token) or b" " for token in tokens)

    def _settled(self, tokens: list[int]) -> str:
        """Return the beginning of the tokens' text that no later token can change."""
        decode = self._tokenizer.decode
        if 0 < self._run <= _LONGEST_RUN:
            # One wrong byte would turn every byte of the run into U+FFFD.
            return decode(tokens[: -self._run])
        last = self._tokenizer.raw_bytes(tokens[-1]) if tokens else None
        if last is None or last.isascii():
            return decode(tokens)
        num_begun = _begun_bytes(self._bytes(tokens[-4:]))
        if not num_begun:
            return decode(tokens)
        if self._run:
            return decode(tokens[:-num_begun])
        return decode(tokens)[:-1]  # the incomplete character is decoded as one U+FFFD

    def _shorten(self) -> None:
        """Drop old tokens from the window, at a place where the remaining tokens keep their text.

        If there is no such place, raise the length of the window at which this is tried again.
        """
        text = self._settled(self._window)
        unsettled = self._run if self._run <= _LONGEST_RUN else 0
        newest = len(self._window) - unsettled - _TAIL_TOKENS
        for start in range(newest, max(newest - _CUTS, 0), -1):
            tail = self._window[start:]
            tail_text = self._settled(tail)
            # The text differs if the cut is within a character, or splits two dependent tokens.
            if tail_text and text.endswith(tail_text):
                self._window = tail
                self._shown -= len(text) - len(tail_text)
                self._limit = _LONGEST_WINDOW
                return
        self._limit = max(_LONGEST_WINDOW, 2 * len(self._window))


def token_bytes(tokenizer: Any, token: int, previous: int | None) -> bytes:
    """Return the UTF-8 bytes that one token adds to a text.

    A token that decoding leaves out (`is_skipped`) adds none.

    Args:
        tokenizer: Tokenizer with `decode`, `is_skipped` and `raw_bytes`.
        previous: Id of the last token before `token` that is not skipped. `None` at the start of a
            text.
    """
    if tokenizer.is_skipped(token):
        return b""
    raw = tokenizer.raw_bytes(token)
    if raw is not None and (previous is not None or not _is_utf8(raw)):
        return raw
    if previous is None:
        return tokenizer.decode([token]).encode()
    start = len(tokenizer.decode([previous]))
    return tokenizer.decode([previous, token])[start:].encode()


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _begun_bytes(data: bytes) -> int:
    """Return how many bytes at the end of UTF-8 data belong to an incomplete character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return len(decoder.getstate()[0])
