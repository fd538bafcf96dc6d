"""Conversion between text and tokens: the prompt's tokens, the text to show, and its end.

`mupax generate` and `mupax serve` use it.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from mupax.train.data.chats.templates import Template
from mupax.train.data.text.detokenizer import Detokenizer
from mupax.train.reuse.generate.sampling import DecodingError
from mupax.train.reuse.trained import TrainedModel

Finish = Literal["stop", "length"]


def prompt_of(model: TrainedModel, tokenizer: Any, text: bytes) -> np.ndarray:
    """Return the tokens of a text to continue, int32 [P], P >= 1.

    For weights without a run, the tokens that their tokenizer puts before every text come first.
    A prompt without tokens becomes the separator, after which a document begins.

    Args:
        text: Text in UTF-8.

    Raises:
        DecodingError: The text has a token that the model does not know.
        DataError: The text cannot be encoded.
    """
    prompt = tokenizer.encode([text])[0]
    if model.run is None:
        # Published weights: their own library puts these tokens before every text.
        prompt = np.concatenate([tokenizer.start, prompt])
    check_known(prompt, model)
    if not prompt.size:
        return np.array([tokenizer.separator], np.int32)
    return prompt


def check_known(prompt: np.ndarray, model: TrainedModel) -> None:
    """Raise DecodingError if a prompt, integers [P], has ids beyond the model's vocabulary."""
    vocab = model.model.sizes()["vocab"]
    if (prompt >= vocab).any():
        raise DecodingError(
            f"the prompt has the token {prompt.max()}, and the model knows those below {vocab}; "
            "the tokenizer is another model's"
        )


class StreamingText:
    """Text that a model writes after a prompt, decoded token by token.

    Two things are held back: a character whose bytes are not all there yet, and characters that may
    be the beginning of a stop string.

    Args:
        prompt: Token ids before the text, on which its first character can depend.
        length: Number of requested tokens.
        stops: Strings that end the text and are not part of it.
        ends: Token ids that end the text and are not part of it.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt: Iterable[int],
        length: int,
        stops: Sequence[str],
        ends: Collection[int],
    ) -> None:
        self._decoder = Detokenizer(tokenizer, prompt)
        self.length = length
        self._stops = stops
        self._ends = ends
        self._held = ""
        """Decoded text that may be the beginning of a stop string."""
        self.ids: list[int] = []
        """Tokens of the text, without the one that ended it."""
        self.text = ""
        """Text that was returned so far."""
        self.count = 0
        """Number of tokens so far, including the one that ended the text."""
        # A text of no tokens has ended before it begins, as when only a prompt is to be scored.
        self.finish: Finish | None = None if length else "length"

    def add(self, ids: Sequence[int]) -> str:
        """Append tokens and return the new text, without characters that are held back.

        `finish` is set at an end token, a stop string or the last requested token. Tokens after the
        end of the text are ignored.
        """
        if self.finish:
            return ""
        # A stop string can end inside these tokens. They are then decoded again to count them.
        decoder_before = copy.copy(self._decoder)
        held = self._held
        new = self._until_end(ids)
        text = held + self._decoder.add(new)
        if self.finish:
            # No further bytes come, so an incomplete character becomes U+FFFD.
            text += self._decoder.finish()
        stop = self._first_stop(text)
        if stop is not None:
            self.finish = "stop"
            new = new[: self._tokens_to_stop(decoder_before, held, new)]
            self.count = len(self.ids) + len(new)
            text = text[:stop]
        num_held = 0 if self.finish else self._possible_stop(text)
        num_shown = len(text) - num_held
        self._held = text[num_shown:]
        self.ids += new
        self.text += text[:num_shown]
        return text[:num_shown]

    def cut(self) -> str:
        """End the text now, with finish "length". Return the text that was held back."""
        text = self._held + self._decoder.finish()
        self._held = ""
        self.text += text
        self.finish = "length"
        return text

    def _until_end(self, ids: Sequence[int]) -> list[int]:
        """Return the tokens up to an end token, which is left out, or up to `length`.

        `count` is increased. `finish` is set if the text ends.
        """
        new = []
        for token in ids:
            self.count += 1
            if token in self._ends:
                self.finish = "stop"
                break
            new.append(int(token))
            if self.count >= self.length:
                self.finish = "length"
                break
        return new

    def _tokens_to_stop(self, decoder: Detokenizer, text: str, ids: Sequence[int]) -> int:
        """Return the number of tokens after which a stop string is complete, at most all tokens.

        Args:
            decoder: Decoder before these tokens. It is changed.
            text: Text that was held back before these tokens.
        """
        for count, token in enumerate(ids, start=1):
            text += decoder.add([token])
            if self._first_stop(text) is not None:
                return count
        return len(ids)

    def _first_stop(self, text: str) -> int | None:
        """Return the index at which the first stop string begins, or `None` without one."""
        indices = [text.find(stop) for stop in self._stops]
        return min((index for index in indices if index >= 0), default=None)

    def _possible_stop(self, text: str) -> int:
        """Return the number of last characters that may be the beginning of a stop string."""
        if not self._stops:
            return 0
        longest = max(map(len, self._stops))
        # The longest match first, because a shorter one would release characters of a stop string.
        for size in range(min(longest - 1, len(text)), 0, -1):
            end = text[-size:]
            if any(stop.startswith(end) for stop in self._stops):
                return size
        return 0


class AnswerEnd(NamedTuple):
    """End of an answer by a chat template: a token, a string, or neither."""

    ids: frozenset[int]
    stops: tuple[str, ...]


def answer_end(template: Template, tokenizer: Any) -> AnswerEnd:
    """Return the token or string that the template puts after an answer, or neither.

    A special token is matched by its id: it is left out of every text, so it cannot be a stop
    string.
    """
    ending = template.ending
    if not ending:
        return AnswerEnd(frozenset(), ())
    first = int(tokenizer.encode([ending.encode()])[0][0])
    name = tokenizer.name_of(first)
    # Not the id of <unk>, which stands for any text that the vocabulary lacks.
    if name and tokenizer.is_skipped(first) and ending.startswith(name):
        return AnswerEnd(frozenset([first]), ())
    # The first token of an ending in ordinary words could also stand inside an answer.
    return AnswerEnd(frozenset(), (ending,))
