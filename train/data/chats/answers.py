"""Conversations in tokens, each of which says whether it is trained on: by a chat template, and what of it is an answer.

V tokens of the tokenizer. Id i stands for a token that is read and no target, V + i for the same token as a target, 2 V and
2 V + 1 for the end of a conversation, read or a target too. So the packed file, its digests and its resumption are those of text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from mupax.train.data.chats.templates import MARKS, Template
from mupax.train.data.interface import DataError

Span = tuple[int, int]
LossOn = Literal["answers", "all"]


class ChatTokens:
    """What makes tokens of conversations, in the place of a tokenizer.

    Args:
        encoder: of their text.
        template: makes text of them.
        loss_on: which tokens are trained on.
    """

    def __init__(self, encoder: Any, template: Template, loss_on: LossOn) -> None:
        self.encoder, self.template, self.loss_on = encoder, template, loss_on
        named = json.dumps([template.source, dict(template.tokens), loss_on], sort_keys=True)
        self.key = f"{encoder.key}-chat-{hashlib.sha256(named.encode()).hexdigest()[:16]}"
        self.vocab_size = 2 * encoder.vocab_size + 2
        # Where the template writes nothing after an answer, its end is learned by what ends a conversation.
        ends_by_itself = template.marks_answers or template.ending
        self.separator = 2 * encoder.vocab_size + (loss_on == "all" or not ends_by_itself)

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Ids of each conversation, int32 [length].

        Args:
            texts: JSON of messages.

        Raises:
            DataError: the template refuses them, or does not tell which part is an answer.
        """
        rendered = [self.rendered(json.loads(text)) for text in texts]
        tokens = self.encoder.spans([text for text, _ in rendered])
        return [
            ids + self.encoder.vocab_size * self._targets(ids.size, places, spans)
            for (ids, places), (_, spans) in zip(tokens, rendered, strict=True)
        ]

    def rendered(self, messages: Sequence[Any]) -> tuple[str, list[Span] | None]:
        """The text of a conversation, and its answers as characters [start, stop); None where all of it is trained on.

        Raises:
            DataError: as `encode`.
        """
        if self.loss_on == "all":
            return self.template.render(messages, prompt=False), None
        if self.template.marks_answers:
            return _unmarked(self.template.marked(messages))
        text, spans = self.template.render(messages, prompt=False), []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.template.render(messages[:i], prompt=True)
            after = self.template.render(messages[: i + 1], prompt=False)
            if not (text.startswith(after) and after.startswith(before)):
                raise DataError(
                    f"the chat template {self.template.name} writes the beginning of a conversation otherwise than the whole, so an "
                    "answer in it cannot be told from the rest; put {% generation %} and {% endgeneration %} around answers in a copy, "
                    "for --data.chat-template, or write --data.loss-on all"
                )
            # What an answer ends with is its last word; the line end after it is the template's.
            spans.append((len(before), len(after.rstrip() if self.template.ending else after)))
        return text, spans

    def _targets(self, count: int, places: np.ndarray, spans: list[Span] | None) -> np.ndarray:
        """Which tokens have a character of an answer, bool [count]."""
        if spans is None:
            return np.ones(count, bool)
        starts, stops = places[:, 0], np.maximum(places[:, 1], places[:, 0] + 1)
        targets = np.zeros(count, bool)
        for start, stop in spans:
            targets |= (starts < stop) & (stops > start)
        return targets


def _unmarked(marked: str) -> tuple[str, list[Span]]:
    """A marked text without its marks, and where they stood."""
    parts, spans, length = [], [], 0
    for i, part in enumerate(marked.split(MARKS[0])):
        answer, mark, rest = part.partition(MARKS[1]) if i else ("", "", part)
        if i and mark:
            spans.append((length, length + len(answer)))
        parts += [answer, rest]
        length += len(answer) + len(rest)
    return "".join(parts), spans
