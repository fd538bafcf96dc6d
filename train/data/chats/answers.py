"""Conversations in tokens, each of which says whether it is trained on: by a chat template, and what of it is an answer.

V tokens of the tokenizer. Id i stands for a token that is read and no target, V + i for the same token as a target, 2 V and
2 V + 1 for the end of a conversation, read or a target too. So the packed file, its digests and its resumption are those of text.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from mupax.train.data.chats.templates import MARKS, PARTS, QUOTE, Template
from mupax.train.data.interface import DataError
from mupax.train.data.text import quoting
from mupax.train.data.text.tokenizer import Subwords

if TYPE_CHECKING:
    from mupax.train.config.data import DataConfig

Span = tuple[int, int]
"""Characters [start, stop)."""
LossOn = Literal["answers", "all"]
_UNSEEN = frozenset(("weight", PARTS))
"""Fields that say what is trained on, as `templates.checked` leaves them. The template does not see them."""


class Rendered(NamedTuple):
    """A conversation as text."""

    text: str
    special: list[int]
    """Where the template's special tokens begin, if those that messages quote are plain text."""
    trained: list[Span] | None
    """Characters that are trained on; None if all are."""


class ChatTokens:
    """What makes tokens of conversations, in the place of a tokenizer.

    Args:
        encoder: of their text.
        template: makes text of them.
        loss_on: which tokens are trained on.
    """

    def __init__(self, encoder: Any, template: Template, loss_on: LossOn) -> None:
        self.encoder, self.template, self.loss_on = encoder, template, loss_on
        fields = [template.source, dict(template.tokens), loss_on]
        if encoder.variant:
            fields.append(encoder.variant)
        named = json.dumps(fields, sort_keys=True)
        self.key = f"{encoder.key}-chat-{hashlib.sha256(named.encode()).hexdigest()[:16]}"
        self.variant = encoder.variant
        self._special = quoting.pattern(encoder.special)
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
        tokens = self.encoder.spans(
            [one.text for one in rendered], [one.special for one in rendered]
        )
        return [
            ids + self.encoder.vocab_size * self._targets(ids.size, places, one.trained)
            for (ids, places), one in zip(tokens, rendered, strict=True)
        ]

    def prompt(self, messages: Sequence[Any]) -> tuple[str, np.ndarray]:
        """Return a conversation with the beginning of the next answer, as text and as ids, int32 [length].

        Args:
            messages: as `templates.checked` gives them.

        Raises:
            DataError: the template refuses them, or the text cannot be encoded.
        """
        shown = [self._quoted(message) for message in shown_to_template(messages)]
        text, special, _ = self._read(self.template.render(shown, prompt=True), [])
        ((ids, _),) = self.encoder.spans([text], [special])
        return text, ids

    def quoted(self, text: bytes) -> dict[str, int]:
        """Return how often each special token stands in the content of messages.

        Args:
            text: JSON of messages.
        """
        contents = [message["content"] for message in json.loads(text)] if text else []
        return self.encoder.quoted("\n".join(contents).encode())

    def rendered(self, messages: Sequence[Any]) -> Rendered:
        """Return the text of a conversation, and the parts of it that are trained on.

        Raises:
            DataError: as `encode`.
        """
        shown = [self._quoted(message) for message in shown_to_template(messages)]
        masked = [i for i, message in enumerate(messages) if not _UNSEEN.isdisjoint(message)]
        if self.loss_on == "all" and not masked:
            text, special, _ = self._read(self.template.render(shown, prompt=False), [])
            return Rendered(text, special, None)
        quoted_text, quoted_answers = self._answers(shown, bool(masked) or self.loss_on == "all")
        text, special, spans = self._read(quoted_text, [span for _, span in quoted_answers])
        answers = [(i, span) for (i, _), span in zip(quoted_answers, spans, strict=True)]
        if self.loss_on == "answers":
            trained = [
                part for i, answer in answers for part in self._trained(messages[i], answer, text)
            ]
            return Rendered(text, special, trained)
        by_message = dict(answers)
        context: list[Span] = []
        for i in masked:
            if i in by_message:
                span = by_message[i]
            else:
                _, _, (span,) = self._read(quoted_text, [self._message(shown, i, quoted_text)])
            context += _without([span], self._trained(messages[i], span, text))
        return Rendered(text, special, _without([(0, len(text))], context))

    def _quoted(self, value: Any) -> Any:
        """Return a message with `QUOTE` in every special token of its strings, where these are plain text."""
        if not self.variant:
            return value
        if isinstance(value, str):
            return self._special.sub(lambda token: f"{token[0][0]}{QUOTE}{token[0][1:]}", value)
        if isinstance(value, list):
            return [self._quoted(item) for item in value]
        if isinstance(value, dict):
            return {name: self._quoted(item) for name, item in value.items()}
        return value

    def _read(self, text: str, spans: Sequence[Span]) -> tuple[str, list[int], list[Span]]:
        """Return a rendered text without `QUOTE`, where its special tokens begin, and spans of it.

        Args:
            text: rendered from messages that are `_quoted`.
            spans: of its characters.
        """
        quotes = np.array([match.start() for match in re.finditer(QUOTE, text)], np.int64)

        def place(i: int) -> int:
            return i - int(np.searchsorted(quotes, i))

        special = (
            [place(token.start()) for token in self._special.finditer(text)] if self.variant else []
        )
        return (
            text.replace(QUOTE, ""),
            special,
            [(place(start), place(stop)) for start, stop in spans],
        )

    def _answers(
        self, messages: Sequence[Any], by_message: bool
    ) -> tuple[str, list[tuple[int, Span]]]:
        """Return the text, and each answer's message and characters.

        Args:
            messages: as the template sees them.
            by_message: whether the number of an answer's message must be right.
        """
        indices = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if self.template.marks_answers:
            text, marked = _unmarked(self.template.marked(messages))
            if len(marked) == len(indices):
                return text, [*zip(indices, marked, strict=True)]
            if by_message:
                raise DataError(
                    f"the chat template {self.template.name} marks {len(marked)} answers of {len(indices)} messages, so one "
                    "that is not trained on cannot be told; put {% generation %} around every answer in a copy, for "
                    "--data.chat-template"
                )
            return text, [(0, span) for span in marked]
        text = self.template.render(messages, prompt=False)
        answers = []
        for i in indices:
            before = self.template.render(messages[:i], prompt=True)
            after = self.template.render(messages[: i + 1], prompt=False)
            self._check_beginnings(before, after, text)
            # What an answer ends with is its last word; the line end after it is the template's.
            answers.append(
                (i, (len(before), len(after.rstrip() if self.template.ending else after)))
            )
        return text, answers

    def _message(self, messages: Sequence[Any], i: int, text: str) -> Span:
        """Return the characters of message `i`, which is no answer."""
        before = self.template.render(messages[:i], prompt=False) if i else ""
        after = self.template.render(messages[: i + 1], prompt=False)
        self._check_beginnings(before, after, text)
        return len(before), len(after)

    def _check_beginnings(self, before: str, after: str, text: str) -> None:
        if not (text.startswith(after) and after.startswith(before)):
            raise DataError(
                f"the chat template {self.template.name} writes the beginning of a conversation otherwise than the whole, so an "
                "answer in it cannot be told from the rest; put {% generation %} and {% endgeneration %} around answers in a copy, "
                "for --data.chat-template, or write --data.loss-on all"
            )

    def _trained(self, message: Any, span: Span, text: str) -> list[Span]:
        """Return the parts of a message's characters that are trained on."""
        if message.get("weight") == 0:
            return []
        context = [part for part in message.get(PARTS, []) if not part["train"]]
        if not context:
            return [span]
        content = message["content"]
        start = text.find(content, *span)
        if start < 0:  # most templates take white space off
            content = content.strip()
            start = text.find(content, *span) - message["content"].find(content)
            if content not in text[slice(*span)]:
                raise DataError(
                    f"the chat template {self.template.name} changes a content that has {PARTS}, so its parts cannot be told; "
                    f"take {PARTS} out of the record"
                )
        return _without(
            [span],
            [(start + part["begin_offset"], start + part["end_offset"] + 1) for part in context],
        )

    def _targets(self, count: int, places: np.ndarray, spans: list[Span] | None) -> np.ndarray:
        """Which tokens have a character of an answer, bool [count]."""
        if spans is None:
            return np.ones(count, bool)
        starts, stops = places[:, 0], np.maximum(places[:, 1], places[:, 0] + 1)
        targets = np.zeros(count, bool)
        for start, stop in spans:
            targets |= (starts < stop) & (stops > start)
        return targets


def prompt_encoder(tokenizer: Any, template: Template, config: DataConfig) -> ChatTokens:
    """Return what encodes the prompts of chats as a model was trained on them.

    Args:
        tokenizer: the model's, opened.
        template: of the chat.
        config: data of the run, whose `special_tokens` says what a message that quotes `<|im_end|>` means.
    """
    if (
        config.special_tokens == "text"
        and isinstance(tokenizer, Subwords)
        and not tokenizer.variant
    ):
        tokenizer = Subwords(
            tokenizer.path, config.separator, "text", template.special_tokens_at_end
        )
    return ChatTokens(tokenizer, template, "answers")


def shown_to_template(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Return messages without the fields that say what is trained on.

    Args:
        messages: as `templates.checked` gives them.
    """
    return [
        {name: value for name, value in message.items() if name not in _UNSEEN}
        for message in messages
    ]


def _without(spans: Sequence[Span], cut: Sequence[Span]) -> list[Span]:
    """Return the spans without the characters of other spans."""
    left = [*spans]
    for first, last in cut:
        parts = [
            part
            for start, stop in left
            for part in ((start, min(stop, first)), (max(start, last), stop))
        ]
        left = [(start, stop) for start, stop in parts if start < stop]
    return left


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
