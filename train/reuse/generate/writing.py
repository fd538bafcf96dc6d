"""Conversion between text and tokens: the prompt's tokens, the text to show, and its end.

`mupax generate` and `mupax serve` use it. `converse` is `mupax generate RUN --chat`: a conversation
with a model, in a terminal or through a pipe.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from mupax import terminal
from mupax.train.checkpoints.assets import end_ids
from mupax.train.data import DataError
from mupax.train.data.chats import templates
from mupax.train.data.chats.answers import prompt_encoder
from mupax.train.data.chats.templates import Template
from mupax.train.data.text.detokenizer import Detokenizer
from mupax.train.reuse import runs
from mupax.train.reuse.generate.decode import Generator
from mupax.train.reuse.generate.sampling import DecodingError, Sampling
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
        """End the text now, and set `finish` to "length". Return the text that was held back."""
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
    """End that a chat template puts after an answer: token ids, strings, or neither."""

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


_ANSWER_SHARE = 4
"""Divisor of the context: 1 / 4 of it is kept free for an answer, or --tokens if that is less."""


def converse(args: Any, run: TrainedModel, sampling: Sampling) -> int:
    """Print an answer to every line of standard input, until it ends. Return exit code 0.

    In a terminal, a note says if an answer was cut at a limit or if a message is refused.

    Args:
        args: Flags of the command, a `Generate`.

    Raises:
        DataError: The run has no chat template, or the template refuses the system message or a
            message from a pipe.
        DecodingError: A message from a pipe is longer than the model reads. In a terminal a note
            says so, and the conversation goes on.
    """
    conversation = Conversation(args, run, sampling)
    in_terminal = sys.stdin.isatty()
    if in_terminal:
        terminal.note(f"{run.described}: write a message; Ctrl-D ends the conversation")
    try:
        for message in _lines(in_terminal):
            try:
                for piece in conversation.answer(message):
                    terminal.show(piece)
            except (DataError, DecodingError) as error:
                if not in_terminal:
                    raise
                terminal.note(f"error: {error}")
                continue
            terminal.show("\n")
            if conversation.cut_by:
                terminal.note(f"note: the answer was cut by {conversation.cut_by}")
    except KeyboardInterrupt:
        # The shell's prompt would follow the cut answer on the same line.
        terminal.show("\n")
        raise
    return 0


class Conversation:
    """Conversation with a model: the messages so far, and the generator that answers them.

    Making a `Conversation` loads the weights onto one device.

    Args:
        args: Object with the fields tokens, seed, system and chat_template of `Generate`.

    Raises:
        DataError: The run has no chat template, or the template refuses the system message.
    """

    def __init__(self, args: Any, run: TrainedModel, sampling: Sampling) -> None:
        self._run = run
        self._tokens = args.tokens
        self._seed = args.seed
        self._tokenizer = run.tokenizer()
        self._template = _chat_template(run, args.chat_template)
        self._encoder = prompt_encoder(self._tokenizer, self._template, run.config.data)
        self._messages: list[dict[str, Any]] = []
        if args.system is not None:
            self._messages.append({"role": "system", "content": args.system})
        self._first = len(self._messages)
        """Index of the first message that may be left out, after the system message."""
        question = {"role": "user", "content": "?"}
        # Rendered once before the weights are read, so that a template that refuses the system
        # message is reported at once.
        self._template.render(templates.checked([*self._messages, question]), prompt=True)

        self._context = run.config.model.sizes()["position"]
        ending = answer_end(self._template, self._tokenizer)
        self._stops = ending.stops
        self._ends = ending.ids | end_ids(run.config.data.tokenizer, self._tokenizer)
        program = runs.on_one_device(run.config)
        params = run.params(program.abstract)
        self._generator = Generator(program, params, program.step_inputs(), sampling=sampling)
        self.cut_by: str | None = None
        """Limit that cut the last answer, in words. `None` if the answer came to its own end."""

    def answer(self, message: str) -> Iterator[str]:
        """Yield the answer to a message while it is generated.

        The message and its complete answer are kept for later calls. `cut_by` is set to the limit
        that cut the answer, or to `None`. If the context is full, the oldest messages are left out
        for good, but not the system message. If an error is raised, the message is forgotten.

        Raises:
            DataError: The template refuses the message.
            DecodingError: The message is longer than the model reads, or the model has diverged.
        """
        before = [*self._messages]
        try:
            self._messages += templates.checked([{"role": "user", "content": message}])
            prompt = self._fitted()
            max_length = self._context - prompt.size + 1  # the last new token is not fed back
            length = min(self._tokens, max_length)
            text = StreamingText(self._tokenizer, prompt.tolist(), length, self._stops, self._ends)
            # Random keys depend on seed and token number only, so every answer gets its own seed.
            seed = self._seed + len(self._messages)
            for part in self._generator.stream(prompt, length, seed):
                yield text.add(part[0].tolist())
                if text.finish:
                    break
        except (DataError, DecodingError):
            # The message without an answer goes, because templates want users and assistants to
            # alternate. Messages that `_fitted` left out for it come back.
            self._messages = before
            raise
        self._messages.append({"role": "assistant", "content": text.text})
        self.cut_by = None
        if text.finish == "length":
            is_end_of_context = length == max_length
            self.cut_by = "the end of the context" if is_end_of_context else f"--tokens {length}"

    def _fitted(self) -> np.ndarray:
        """Drop old messages that do not fit. Return the conversation in tokens, int32 [P].

        A quarter of the context, or `--tokens` if fewer, is kept free for the answer while there
        are old messages to drop. A note says how many were dropped.

        Raises:
            DecodingError: The newest message alone is longer than the context.
        """
        free = min(self._tokens, self._context // _ANSWER_SHARE)
        count = len(self._messages)
        prompt = self._encoded()
        while prompt.size > self._context - free and len(self._messages) > self._first + 1:
            # Drop a question with its answer: many templates refuse roles that do not alternate.
            del self._messages[self._first : self._first + 2]
            prompt = self._encoded()
        if prompt.size > self._context:
            raise DecodingError(
                f"the message has {prompt.size} tokens with its template, and the model reads "
                f"{self._context}; write a shorter one"
            )
        dropped = count - len(self._messages)
        if dropped:
            terminal.note(f"note: the context is full; the oldest {dropped} messages are left out")
        return prompt

    def _encoded(self) -> np.ndarray:
        """Return the conversation in tokens, int32 [P], with the start of an answer."""
        _, ids = self._encoder.prompt(self._messages)
        prompt = np.asarray(ids, np.int32)
        check_known(prompt, self._run)
        return prompt


def _chat_template(run: TrainedModel, file: str | None) -> Template:
    """Return the chat template of a file or of the run. Raises DataError if there is none."""
    template = run.template(file)
    if template is None:
        raise DataError(
            f"{run.path} has no chat template, so it cannot chat; write --prompt TEXT in place of "
            "--chat, or name a template by --chat-template FILE"
        )
    return template


def _lines(in_terminal: bool) -> Iterator[str]:
    """Yield the lines of standard input that are not blank, with U+FFFD for invalid UTF-8."""
    if in_terminal:
        import contextlib
        import importlib

        with contextlib.suppress(ImportError):  # lets input() edit a line
            importlib.import_module("readline")
    while True:
        try:
            line = _line(in_terminal)
        except EOFError:
            if in_terminal:
                terminal.show("\n")
            return
        if line.strip():
            # Python may hold invalid bytes as surrogates, which cannot be encoded as UTF-8 again.
            yield line.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _line(in_terminal: bool) -> str:
    """Return a line of standard input without its end. In a terminal, prompt for it by "> ".

    Raises:
        EOFError: Standard input has ended.
    """
    if in_terminal and sys.stdout.isatty():
        return input("> ")
    if in_terminal:  # `input` would write its prompt into the redirected answers
        sys.stderr.write("> ")
        sys.stderr.flush()
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    # On Linux and macOS, Python leaves the carriage return of a file from Windows in the line.
    return line.removesuffix("\n").removesuffix("\r")
