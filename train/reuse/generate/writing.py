"""A text on its way into tokens and out of them: the prompt, what can be shown of what is written, and where it ends."""

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
    """Return a text to continue in the model's tokens, int32 [P], P >= 1: an empty one begins a document.

    Args:
        model: the model.
        tokenizer: its own.
        text: in UTF-8.

    Raises:
        DecodingError: a token that the model does not know.
        DataError: the text cannot be encoded.
    """
    prompt = tokenizer.encode([text])[0]
    if model.run is None:  # as their own library has it
        prompt = np.concatenate([tokenizer.start, prompt])
    check_known(prompt, model)
    return prompt if prompt.size else np.array([tokenizer.separator], np.int32)


def check_known(prompt: np.ndarray, model: TrainedModel) -> None:
    """Raise DecodingError if a prompt, integers [P], has tokens that the model does not know."""
    vocab = model.model.sizes()["vocab"]
    if (prompt >= vocab).any():
        raise DecodingError(
            f"the prompt has the token {prompt.max()}, and the model knows those below {vocab}; "
            "the tokenizer is another model's"
        )


class StreamingText:
    """One text that a model writes after a prompt.

    Two things are held back: a character whose bytes are not all there yet, and what may be the
    beginning of a stop.

    Args:
        tokenizer: tokenizer of the model.
        prompt: token ids that the text follows.
        length: number of tokens that are asked for.
        stops: strings that end the text and are not part of it.
        ends: token ids that end the text and are not part of it.
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
        """Certain text that may be the beginning of a stop."""
        self.ids: list[int] = []
        """Tokens of the text, without the one that ended it."""
        self.text = ""
        """Text that is out."""
        self.count = 0
        """Number of tokens made, with the one that ended the text."""
        self.finish: Finish | None = None if length else "length"

    def add(self, ids: Sequence[int]) -> str:
        """Return the text that comes out after more tokens. Those after the end are left out."""
        if self.finish:
            return ""
        before = copy.copy(self._decoder)
        held = self._held
        new = self._until_end(ids)
        text = held + self._decoder.add(new)
        if self.finish:
            text += self._decoder.finish()
        stop = self._first_stop(text)
        if stop is not None:
            self.finish = "stop"
            new = new[: self._tokens_to_stop(before, held, new)]
            self.count = len(self.ids) + len(new)
            text = text[:stop]
        waits = 0 if self.finish else self._begun(text)
        certain = len(text) - waits
        self._held = text[certain:]
        self.ids += new
        self.text += text[:certain]
        return text[:certain]

    def cut(self) -> str:
        """End the text where it is, because its time is over. Return what was held back."""
        text = self._held + self._decoder.finish()
        self._held = ""
        self.text += text
        self.finish = "length"
        return text

    def _until_end(self, ids: Sequence[int]) -> list[int]:
        """Return the tokens before the one that ends the text, and note how the text ends."""
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
        """Return how many tokens it took until a stop was complete.

        Args:
            decoder: decoder as it was before these tokens.
            text: text that was held back then.
            ids: tokens, with which a stop is complete.
        """
        for count, token in enumerate(ids, start=1):
            text += decoder.add([token])
            if self._first_stop(text) is not None:
                return count
        return len(ids)

    def _first_stop(self, text: str) -> int | None:
        """Return where the first stop begins, or None if there is none."""
        places = [text.find(stop) for stop in self._stops]
        return min((place for place in places if place >= 0), default=None)

    def _begun(self, text: str) -> int:
        """Return how many characters at the end may be the beginning of a stop."""
        if not self._stops:
            return 0
        longest = max(map(len, self._stops))
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
    """Return what the template puts after an answer.

    A special token is left out of every text, so it cannot be a stop. It is matched by its id.
    """
    ending = template.ending
    if not ending:
        return AnswerEnd(frozenset(), ())
    first = int(tokenizer.encode([ending.encode()])[0][0])
    name = tokenizer.name_of(first)
    # Not the id of <unk>, which stands for any text that the vocabulary lacks.
    if name and tokenizer.is_skipped(first) and ending.startswith(name):
        return AnswerEnd(frozenset([first]), ())
    return AnswerEnd(frozenset(), (ending,))
