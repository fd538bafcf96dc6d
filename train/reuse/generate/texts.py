"""Log-probabilities and continuations of texts under a decoder, for the lm-eval harness.

Texts are strings. Log-probabilities are computed in batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mupax import MupaxError
from mupax.disk import path_of
from mupax.terminal import counted
from mupax.train.config.sections import Step
from mupax.train.reuse import runs, trained
from mupax.train.reuse.generate.decode import Generator
from mupax.train.reuse.generate.sampling import Sampling
from mupax.train.reuse.generate.writing import StreamingText, check_known, prompt_of
from mupax.train.reuse.huggingface import tokenizer_files

BATCH = 8
"""Number of texts in a batch."""
MAX_TOKENS = 256
"""Largest number of tokens of a continuation, if a task does not set it."""


class TextError(MupaxError):
    """A text whose probability cannot be computed. The message says why."""


class Likelihood(NamedTuple):
    """Probability of a continuation after its context."""

    logprob: float
    """Natural logarithm of the probability."""
    greedy: bool
    """Whether every token of the continuation is the likeliest one."""


class Window(NamedTuple):
    """Tokens of one forward pass. Only the last `scored` tokens are predicted."""

    tokens: np.ndarray
    """Token ids, int32 [count]."""
    scored: int


class Texts:
    """Decoder that scores and continues texts.

    Args:
        path: Path of a run, of one of its steps, or of weights.
        step: Step of a run's checkpoint, by default the newest.
        average: Whether to use the moving average, by default if the run keeps one.
        tokenizer: Tokenizer of weights, by default the one beside them.

    Raises:
        UsageError: A tokenizer is given for a run.
        WeightsError: The model is not a decoder.
        MupaxError: No model is at the path, or its tokenizer is lost.
    """

    def __init__(
        self,
        path: Path,
        step: Step | None = None,
        average: bool | None = None,
        tokenizer: str | None = None,
    ) -> None:
        self._run = trained.open_model(path, step, average, tokenizer=tokenizer)
        self._run.check_decoder("eval --tasks")
        self.tokenizer: Any = self._run.tokenizer()
        self.context = self._run.model.sizes()["position"]
        """Largest number of tokens that the model reads."""
        self._begin = self._begin_tokens()
        self._program = runs.on_one_device(self._run.config)
        self._params = self._run.params(self._program.abstract)
        # Tasks differ in temperature. Without a fixed sampling, one program serves all of them.
        self._generator = self._generator_of(None)
        self._generators: dict[Sampling, Generator] = {}
        """Generators of samplings with top_k, which is fixed in a compiled program."""

    def likelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[Likelihood]:
        """Return the probability of each continuation.

        A context that is too long loses tokens at its start. Spaces at the end of a context are
        moved to the continuation, because tokenizers join them with its first word.

        Args:
            pairs: One tuple of (context, continuation) per request.

        Raises:
            TextError: A continuation is longer than the model's context, or has no token.
        """
        return self._scored([self._window(*pair) for pair in pairs])

    def rolling(self, texts: Sequence[str]) -> list[float]:
        """Return the log-probability of each text (natural logarithm) at the start of a document.

        Every token is predicted once. The first window of a text has only the tokens that begin a
        document as context, the last one has as many as fit. A text without tokens gets 0.
        """
        windows: list[Window] = []
        counts = []
        for text in texts:
            text_windows = list(self._windows(self._encoded(text)))
            windows += text_windows
            counts.append(len(text_windows))

        # All windows are scored together, so that batches are full.
        scores = iter(self._scored(windows))
        return [sum(next(scores).logprob for _ in range(count)) for count in counts]

    def continued(
        self,
        context: str,
        until: Sequence[str],
        *,
        max_tokens: int = MAX_TOKENS,
        sampling: Sampling | None = None,
        seed: int = 0,
    ) -> str:
        """Return the text that the model writes after a context.

        The text ends before the first of the strings `until`, where a document ends, or after
        `max_tokens` tokens.

        Args:
            context: Prompt. If it is too long, its start is left out.
            until: Strings that end the text. Empty strings are ignored.
            max_tokens: Largest number of tokens to write, `MAX_TOKENS` by default.
            sampling: Settings of the draws, by default the likeliest token.
            seed: Seed of the draws, 0 by default. The same seed gives the same text.
        """
        context_bytes = context.encode("utf-8", "surrogateescape")
        prompt = prompt_of(self._run, self.tokenizer, context_bytes)
        # An empty string would end every text at once.
        stops = [stop for stop in until if stop]
        ends = {int(self.tokenizer.separator)}
        text = StreamingText(self.tokenizer, prompt.tolist(), max_tokens, stops, ends)
        sampling = sampling or Sampling(0.0)
        if sampling.top_k is None:
            stream = self._generator.stream(prompt, max_tokens, seed, sampling=sampling)
        else:
            if sampling not in self._generators:
                self._generators[sampling] = self._generator_of(sampling)
            stream = self._generators[sampling].stream(prompt, max_tokens, seed)
        for new_BT in stream:
            text.add(new_BT[0].tolist())
            if text.finish:
                break
        return text.text

    def _generator_of(self, sampling: Sampling | None) -> Generator:
        """Return a generator of one text with a fixed sampling.

        With `None`, every call of `stream` names its sampling.
        """
        return Generator(
            self._program, self._params, self._program.step_inputs(), sampling=sampling
        )

    def _begin_tokens(self) -> np.ndarray:
        """Return the tokens before the first token of a document, int32 [count].

        For a run this is the separator. For weights these are the tokens that their tokenizer adds,
        or else its begin token, as in the lm-eval harness. Without either it is the separator.
        """
        separator = np.array([self.tokenizer.separator], np.int32)
        if self._run.step is not None:
            return separator
        if len(self.tokenizer.start):
            return self.tokenizer.start
        name = self._run.config.data.tokenizer
        special_tokens = {}
        if name.endswith(".json"):
            special_tokens = tokenizer_files.special_tokens(path_of(name).parent)
        begin = self.tokenizer.find(special_tokens.get("bos_token", ""))
        if begin is None:
            return separator
        return np.array([begin], np.int32)

    def _encoded(self, text: str) -> np.ndarray:
        """Return the token ids of a text, int32 [count]. Raises DecodingError for unknown ids."""
        ids = self.tokenizer.encode([text.encode("utf-8", "surrogateescape")])[0]
        check_known(ids, self._run)
        return ids

    def _window(self, context: str, continuation: str) -> Window:
        """Return the last tokens of a context with its continuation, which alone is scored.

        Raises:
            TextError: The continuation is longer than the model's context, or has no token.
        """
        stripped = context.rstrip(" ")
        num_spaces = len(context) - len(stripped)
        if num_spaces and stripped:
            context = stripped
            continuation = " " * num_spaces + continuation

        # Both are encoded together: a token may reach over the end of the context.
        context_ids = self._encoded(context)
        ids = self._encoded(context + continuation)
        count = len(ids) - len(context_ids)
        if not 0 < count <= self.context:
            raise TextError(
                f"the continuation {continuation[:40]!r} has "
                f"{counted(count, 'token')}, and from 1 to "
                f"{self.context} can be scored"
            )

        begin = np.zeros(0, np.int32)
        if not len(context_ids):
            begin = self._begin
        elif self._run.step is None:
            begin = self.tokenizer.start
        tokens = np.concatenate([begin, ids])
        # One more than the model reads: the last token is only predicted.
        return Window(tokens[-self.context - 1 :], count)

    def _windows(self, ids: np.ndarray) -> Iterator[Window]:
        """Yield windows of at most `context` + 1 tokens that together predict every token once.

        Args:
            ids: Token ids of a text, int32 [count].
        """
        tokens = np.concatenate([self._begin, ids])
        for start in range(0, len(ids), self.context):
            end = min(start + self.context, len(ids))
            stop = len(self._begin) + end
            window_start = max(0, stop - 1 - self.context)
            yield Window(tokens[window_start:stop], end - start)

    def _scored(self, windows: Sequence[Window]) -> list[Likelihood]:
        """Return the probability of each window's scored tokens, in the order of the windows."""
        # Windows of similar length share a batch, so that few tokens are padding.
        order = sorted(range(len(windows)), key=lambda index: -len(windows[index].tokens))
        likelihoods: dict[int, Likelihood] = {}
        for start in range(0, len(order), BATCH):
            batch = order[start : start + BATCH]
            longest = len(windows[batch[0]].tokens)
            # The last batch is padded to `BATCH` rows. With fewer rows the program would be
            # compiled once more.
            tokens_BT = np.zeros((BATCH, longest), np.int32)
            for row, index in enumerate(batch):
                tokens = windows[index].tokens
                tokens_BT[row, : len(tokens)] = tokens

            scores = self._generator.logprobs(tokens_BT, 1)
            for row, index in enumerate(batch):
                window = windows[index]
                # Position t of the scores predicts token t + 1.
                stop = len(window.tokens) - 1
                scored = slice(stop - window.scored, stop)
                is_likeliest = scores.ids_BTK[row, scored, 0] == tokens_BT[row, 1:][scored]
                logprob = float(np.sum(scores.chosen_BT[row, scored], dtype=np.float64))
                likelihoods[index] = Likelihood(logprob, bool(is_likeliest.all()))
        return [likelihoods[index] for index in range(len(windows))]
