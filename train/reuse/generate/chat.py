"""`mupax generate RUN --chat`: a conversation with a model, in a terminal or through a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from mupax import terminal
from mupax.train.data import DataError
from mupax.train.data.assets import end_ids
from mupax.train.data.chats import templates
from mupax.train.data.chats.answers import prompt_encoder
from mupax.train.data.chats.templates import Template
from mupax.train.reuse import runs
from mupax.train.reuse.generate.decode import Generator
from mupax.train.reuse.generate.sampling import DecodingError, Sampling
from mupax.train.reuse.generate.writing import StreamingText, answer_end, check_known
from mupax.train.reuse.trained import TrainedModel

_ANSWER_SHARE = 4
"""The context keeps 1 / 4 of its tokens free for an answer, unless --tokens asks for fewer."""


def main(args: Any, run: TrainedModel, sampling: Sampling) -> int:
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
        self._template = _template(run, args.chat_template)
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

        The message and its complete answer are kept for later calls, and `cut_by` is set. If the
        context is full, the oldest messages are left out for good. The system message stays. A
        message that is refused or gets no complete answer is forgotten.

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
            # Random keys depend on the seed and a token's number, so every answer gets its own seed.
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


def _template(run: TrainedModel, file: str | None) -> Template:
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
