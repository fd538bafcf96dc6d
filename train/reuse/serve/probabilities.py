"""How likely the tokens of a text are, in the forms of completions and of chats."""

from __future__ import annotations

import codecs
from typing import Any, NamedTuple

from mupax.train.data.text.detokenizer import token_bytes
from mupax.train.reuse.generate.decode import Scores
from mupax.train.reuse.serve.fields import Request


class _Entry(NamedTuple):
    """A token at a place of a text."""

    token: str
    """Its text; of a special token its name, of part of a character its bytes as `\\xNN`."""
    bytes: bytes
    """What it adds to the text. Of all tokens, joined, they are the text."""
    logprob: float | None


class Probabilities:
    """Writes natural logarithms of probabilities as JSON.

    Args:
        tokenizer: tokenizer of the model.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def of_text(self, request: Request, ids: list[int], prompt: int, scores: Scores) -> dict[str, Any]:
        """Return the probabilities of one text.

        Args:
            request: says how many likeliest tokens are named, and if the prompt counts too.
            ids: token ids of the prompt and of the text.
            prompt: number of ids of the prompt.
            scores: of the ids after the first, without an axis of texts.
        """
        first = 0 if request.echo else prompt
        chosen: list[_Entry] = []
        likeliest: list[list[_Entry] | None] = []
        before = None
        for place, token in enumerate(ids):
            if place >= first:
                logprob = float(scores.chosen_BT[place - 1]) if place else None
                chosen.append(self._entry(token, before, logprob))
                likeliest.append(self._likeliest(request, scores, place, before))
            if not self._tokenizer.is_skipped(token):
                before = token
        if request.chat:
            return {"content": [_chat_form(*pair) for pair in zip(chosen, likeliest, strict=True)]}
        tops = [None if top is None else _by_token(top) for top in likeliest]
        return {
            "tokens": [_legacy_token(entry) for entry in chosen],
            "token_logprobs": [entry.logprob for entry in chosen],
            "top_logprobs": tops if request.logprobs else None,
            "text_offset": _offsets(chosen),
        }

    def _likeliest(self, request: Request, scores: Scores, place: int, before: int | None) -> list[_Entry] | None:
        """Return the likeliest tokens at a place, the likeliest first. The first has none."""
        if place == 0:
            return None
        top = request.logprobs or 0
        tokens = scores.ids_BTK[place - 1][:top]
        values = scores.top_BTK[place - 1][:top]
        pairs = zip(tokens, values, strict=True)
        return [self._entry(int(token), before, float(value)) for token, value in pairs]

    def _entry(self, token: int, before: int | None, logprob: float | None) -> _Entry:
        data = token_bytes(self._tokenizer, token, before)
        if not data:
            return _Entry(self._tokenizer.name_of(token), data, logprob)
        try:
            return _Entry(data.decode(), data, logprob)
        except UnicodeDecodeError:  # part of a character, written as OpenAI's API does
            return _Entry("".join(f"\\x{byte:02x}" for byte in data), data, logprob)


def _chat_form(entry: _Entry, likeliest: list[_Entry] | None) -> dict[str, Any]:
    return {**_fields(entry), "top_logprobs": [_fields(other) for other in likeliest or []]}


def _fields(entry: _Entry) -> dict[str, Any]:
    return {"token": entry.token, "logprob": entry.logprob, "bytes": [*entry.bytes]}


def _by_token(entries: list[_Entry]) -> dict[str, float | None]:
    by_token: dict[str, float | None] = {}
    for entry in entries:
        by_token.setdefault(_legacy_token(entry), entry.logprob)  # the likelier of equal texts
    return by_token


def _legacy_token(entry: _Entry) -> str:
    """Return a token as completions name it, which have no field for bytes."""
    is_part = entry.bytes and entry.bytes != entry.token.encode()
    return f"bytes:{entry.token}" if is_part else entry.token


def _offsets(entries: list[_Entry]) -> list[int]:
    """Return the number of characters before each token. A part of a character is not one."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    count = 0
    offsets = []
    for entry in entries:
        offsets.append(count)
        count += len(decoder.decode(entry.bytes))
    return offsets
