"""Encoder of conversations: a chat template makes text, and each id says whether it is a target.

A target is a token that the loss counts. All other tokens are only read, as context. With a
vocabulary of V tokens, id i is token i as context, and id V + i is token i as a target. A
conversation ends with id 2 V (context) or 2 V + 1 (target). So conversations are packed, digested
and resumed in the same way as text.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from mupax.mappings import drop_keys
from mupax.train.data.chats.templates import MARKS, PARTS, QUOTE, Template
from mupax.train.data.interface import DataError
from mupax.train.data.text import quoting
from mupax.train.data.text.tokenizer import Subwords

if TYPE_CHECKING:
    from mupax.train.config.data import DataConfig

Span = tuple[int, int]
"""Range of characters of a text: the first character, and the character after the last."""
LossOn = Literal["answers", "all"]
_UNSEEN = frozenset(("weight", PARTS))
"""Fields of checked messages that say what is trained on. The template does not see them."""


class Rendered(NamedTuple):
    """Conversation as text, with the parts that are trained on."""

    text: str
    special: list[int]
    """First character of each special token that the template wrote, such as `<|im_end|>`.

    Empty unless special tokens that a message quotes are encoded as plain text.
    """
    trained: list[Span] | None
    """Ranges of characters that are trained on. None if all characters are."""


class ChatTokens:
    """Encoder of conversations, used in place of a tokenizer.

    Ids say whether a token is a target, which the loss counts, or is only read as context. With a
    tokenizer of V tokens, id i is token i as context, and id V + i is token i as a target. A
    conversation ends with id 2 V (context) or 2 V + 1 (target).

    Args:
        encoder: Tokenizer of the rendered text (`Bytes` or `Subwords`).
        template: Chat template that makes text of messages.
        loss_on: `answers` trains on the answers of assistants, `all` on every token.
    """

    def __init__(self, encoder: Any, template: Template, loss_on: LossOn) -> None:
        self.encoder = encoder
        self.template = template
        self.loss_on = loss_on
        fields = [template.source, dict(template.tokens), loss_on]
        if encoder.variant:
            fields.append(encoder.variant)
        described = json.dumps(fields, sort_keys=True)
        digest = hashlib.sha256(described.encode()).hexdigest()
        self.key = f"{encoder.key}-chat-{digest[:16]}"
        self.variant = encoder.variant
        self._special = quoting.pattern(encoder.special)
        self.vocab_size = 2 * encoder.vocab_size + 2
        # If the template writes nothing after an answer, the end of a conversation is a target, so
        # that a model learns to end.
        ends_by_itself = template.marks_answers or template.ending
        self.separator = 2 * encoder.vocab_size + (loss_on == "all" or not ends_by_itself)

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Return the ids of each conversation, int32 [length], without the end of a conversation.

        The id of a target is the tokenizer's id plus V, the vocabulary size of the tokenizer.

        Args:
            texts: JSON of each conversation: a list of messages, as `templates.checked` returns it.

        Raises:
            DataError: The template refuses the messages, or does not tell which part is an answer.
        """
        all_rendered = [self.rendered(json.loads(text)) for text in texts]
        encoded = self.encoder.spans(
            [rendered.text for rendered in all_rendered],
            [rendered.special for rendered in all_rendered],
        )
        conversations = []
        for (ids, places), rendered in zip(encoded, all_rendered, strict=True):
            is_target = self._targets(ids.size, places, rendered.trained)
            conversations.append(ids + self.encoder.vocab_size * is_target)
        return conversations

    def prompt(self, messages: Sequence[Any]) -> tuple[str, np.ndarray]:
        """Return the prompt for the next answer of a conversation, as text and as int32 ids.

        The prompt ends with what the template writes before an answer, such as
        `<|im_start|>assistant`. The ids are those of the tokenizer, below V.

        Args:
            messages: Result of `templates.checked`.

        Raises:
            DataError: The template refuses the messages, or the text cannot be encoded.
        """
        shown = [self._quoted(message) for message in shown_to_template(messages)]
        text, special, _ = self._read(self.template.render(shown, prompt=True), [])
        ((ids, _),) = self.encoder.spans([text], [special])
        return text, ids

    def quoted(self, text: bytes) -> dict[str, int]:
        """Return how often the contents of messages quote each special token, by token.

        Args:
            text: JSON of the messages of a conversation. Empty text has no counts.
        """
        contents = [message["content"] for message in json.loads(text)] if text else []
        return self.encoder.quoted("\n".join(contents).encode())

    def rendered(self, messages: Sequence[Any]) -> Rendered:
        """Return a conversation as text, with the parts of it that are trained on.

        Args:
            messages: Result of `templates.checked`.

        Raises:
            DataError: The template refuses the messages, or does not tell which part is an answer.
        """
        shown = [self._quoted(message) for message in shown_to_template(messages)]
        masked = []
        for i, message in enumerate(messages):
            if not _UNSEEN.isdisjoint(message):
                masked.append(i)
        if self.loss_on == "all" and not masked:
            text, special, _ = self._read(self.template.render(shown, prompt=False), [])
            return Rendered(text, special, None)

        quoted_text, quoted_answers = self._answers(shown, bool(masked) or self.loss_on == "all")
        text, special, spans = self._read(quoted_text, [span for _, span in quoted_answers])
        answers = [(i, span) for (i, _), span in zip(quoted_answers, spans, strict=True)]
        if self.loss_on == "answers":
            trained: list[Span] = []
            for i, answer in answers:
                trained += self._trained(messages[i], answer, text)
            return Rendered(text, special, trained)

        # `loss_on` is "all": every character is trained on, except the untrained parts of masked
        # messages.
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
        """Return a copy of a message with the character `QUOTE` inside of every special token.

        So a special token that a user quotes, such as `<|im_end|>`, can be told from one that the
        template writes. `_read` removes the character after rendering. The message is returned
        unchanged unless quoted special tokens are encoded as plain text.

        Args:
            value: Message, or a value inside of a message.
        """
        if not self.variant:
            return value
        if isinstance(value, str):
            return self._special.sub(lambda token: f"{token[0][0]}{QUOTE}{token[0][1:]}", value)
        if isinstance(value, list):
            return [self._quoted(item) for item in value]
        if isinstance(value, dict):
            quoted = {}
            for name, item in value.items():
                quoted[name] = self._quoted(item)
            return quoted
        return value

    def _read(self, text: str, spans: Sequence[Span]) -> tuple[str, list[int], list[Span]]:
        """Remove the character `QUOTE` from a rendered text.

        Args:
            text: Text rendered from results of `_quoted`.
            spans: Ranges of characters of `text`.

        Returns:
            The text without `QUOTE`; the first character of each special token that the template
            wrote; and the spans as ranges of the text without `QUOTE`. The second list is empty
            unless quoted special tokens are encoded as plain text.
        """
        quotes = np.array([match.start() for match in re.finditer(QUOTE, text)], np.int64)

        def place(i: int) -> int:
            return i - int(np.searchsorted(quotes, i))

        special = []
        if self.variant:
            special = [place(token.start()) for token in self._special.finditer(text)]
        moved_spans = [(place(start), place(stop)) for start, stop in spans]
        return text.replace(QUOTE, ""), special, moved_spans

    def _answers(
        self, messages: Sequence[Any], by_message: bool
    ) -> tuple[str, list[tuple[int, Span]]]:
        """Render messages. Return the text, and (index of the message, characters) of each answer.

        Args:
            messages: Messages as the template sees them (`shown_to_template`).
            by_message: True if the index of each answer's message must be right. Otherwise the
                indices may all be 0.

        Raises:
            DataError: The template does not tell which part of the text is an answer.
        """
        indices = []
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                indices.append(i)
        if self.template.marks_answers:
            text, marked = _unmarked(self.template.marked(messages))
            if len(marked) == len(indices):
                return text, [*zip(indices, marked, strict=True)]
            if by_message:
                raise DataError(
                    f"the chat template {self.template.name} marks {len(marked)} answers of "
                    f"{len(indices)} messages, so one that is not trained on cannot be told; put "
                    "{% generation %} around every answer in a copy, for --data.chat-template"
                )
            return text, [(0, span) for span in marked]

        # Without marks, an answer is the text that rendering adds if the message is included.
        text = self.template.render(messages, prompt=False)
        answers = []
        for i in indices:
            # `prompt=True` includes the header of the answer, which a model gets as input and does
            # not write.
            before = self.template.render(messages[:i], prompt=True)
            after = self.template.render(messages[: i + 1], prompt=False)
            self._check_beginnings(before, after, text)
            # If the template ends an answer with a token, the white space after it is no target.
            answer_end = len(after.rstrip()) if self.template.ending else len(after)
            answers.append((i, (len(before), answer_end)))
        return text, answers

    def _message(self, messages: Sequence[Any], i: int, text: str) -> Span:
        """Return the range of characters that message i, which is no answer, has in a text.

        Args:
            text: Text rendered from all of `messages`.

        Raises:
            DataError: The text of the first messages alone is not a beginning of `text`.
        """
        before = self.template.render(messages[:i], prompt=False) if i else ""
        after = self.template.render(messages[: i + 1], prompt=False)
        self._check_beginnings(before, after, text)
        return len(before), len(after)

    def _check_beginnings(self, before: str, after: str, text: str) -> None:
        """Raise `DataError` unless `after` starts with `before`, and `text` starts with `after`.

        Args:
            before: Rendered text of the messages before a message.
            after: Rendered text of the messages up to this message.
            text: Text rendered from all of `messages`.
        """
        if not (text.startswith(after) and after.startswith(before)):
            raise DataError(
                f"the chat template {self.template.name} writes the beginning of a conversation "
                "otherwise than the whole, so an answer in it cannot be told from the rest; put "
                "{% generation %} and {% endgeneration %} around answers in a copy, for "
                "--data.chat-template, or write --data.loss-on all"
            )

    def _trained(self, message: Any, span: Span, text: str) -> list[Span]:
        """Return the ranges of a message's characters that are trained on.

        A message of weight 0 has none. Any other message has all of its characters, except the
        parts of its content that its field `train_detail` excludes.

        Args:
            message: One message of a result of `templates.checked`.
            span: Characters of `text` that belong to the message.
            text: Rendered text of the complete conversation, without `QUOTE`.

        Raises:
            DataError: The template changes a content that has `train_detail`.
        """
        if message.get("weight") == 0:
            return []
        context = [part for part in message.get(PARTS, []) if not part["train"]]
        if not context:
            return [span]
        content = message["content"]
        start = text.find(content, *span)
        if start < 0:
            # Most templates strip the white space around a content.
            content = content.strip()
            start = text.find(content, *span) - message["content"].find(content)
            if content not in text[slice(*span)]:
                raise DataError(
                    f"the chat template {self.template.name} changes a content that has {PARTS}, so "
                    f"its parts cannot be told; take {PARTS} out of the record"
                )
        cut = []
        for part in context:
            cut.append((start + part["begin_offset"], start + part["end_offset"] + 1))
        return _without([span], cut)

    def _targets(self, count: int, places: np.ndarray, spans: list[Span] | None) -> np.ndarray:
        """Return a mask of the tokens that are targets, bool [count].

        A token is a target if at least one of its characters is trained on.

        Args:
            count: Number of tokens.
            places: First character of each token and the character after its last, int [count, 2].
            spans: Ranges of characters that are trained on. None if all characters are.
        """
        if spans is None:
            return np.ones(count, bool)
        starts = places[:, 0]
        # A token without characters would overlap no span, so it counts as one character.
        stops = np.maximum(places[:, 1], places[:, 0] + 1)
        targets = np.zeros(count, bool)
        for start, stop in spans:
            targets |= (starts < stop) & (stops > start)
        return targets


def prompt_encoder(tokenizer: Any, template: Template, config: DataConfig) -> ChatTokens:
    """Return an encoder of prompts that treats quoted special tokens as the model's training did.

    If training encoded quoted special tokens as plain text, the tokenizer is opened again in this
    mode.

    Args:
        config: Data settings of the run. `special_tokens` says whether a quoted `<|im_end|>` in a
            message is plain text.
    """
    quotes_are_text = config.special_tokens == "text"
    if quotes_are_text and isinstance(tokenizer, Subwords) and not tokenizer.variant:
        ending = template.special_tokens_at_end
        tokenizer = Subwords(tokenizer.path, config.separator, "text", ending)
    return ChatTokens(tokenizer, template, "answers")


def shown_to_template(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Return messages without the fields `weight` and `train_detail`, for the chat template.

    These two fields say which parts are trained on.

    Args:
        messages: Result of `templates.checked`.
    """
    shown = []
    for message in messages:
        shown.append(drop_keys(message, _UNSEEN))
    return shown


def _without(spans: Sequence[Span], cut: Sequence[Span]) -> list[Span]:
    """Return the ranges of `spans` without the characters that are in a range of `cut`."""
    remaining = [*spans]
    for first, last in cut:
        parts: list[Span] = []
        for start, stop in remaining:
            parts.append((start, min(stop, first)))
            parts.append((max(start, last), stop))
        remaining = []
        for start, stop in parts:
            if start < stop:
                remaining.append((start, stop))
    return remaining


def _unmarked(marked: str) -> tuple[str, list[Span]]:
    """Remove the `MARKS` around answers. Return the text, and each answer's characters in it."""
    before_first, *marked_parts = marked.split(MARKS[0])
    texts = [before_first]
    spans: list[Span] = []
    length = len(before_first)
    for part in marked_parts:
        answer, mark, text_after = part.partition(MARKS[1])
        if mark:
            spans.append((length, length + len(answer)))
        texts += [answer, text_after]
        length += len(answer) + len(text_after)
    return "".join(texts), spans
