"""How likely a model finds texts, and how it goes on with them: strings in, numbers and strings out, many at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mupax.disk import path_of
from mupax.errors import MupaxError
from mupax.train.config.sections import Step
from mupax.train.reuse import runs, trained
from mupax.train.reuse.generate.decode import Generator
from mupax.train.reuse.generate.sampling import Sampling
from mupax.train.reuse.generate.writing import StreamingText, check_known, prompt_of
from mupax.train.reuse.huggingface import tokenizer_files

BATCH = 8
"""Texts that are read at once."""
MOST = 256
"""Tokens of a continuation, where a task does not say how many."""


class TextError(MupaxError):
    """A text that cannot be scored. The message says why."""


class Likelihood(NamedTuple):
    """Of a continuation of a context."""

    logprob: float
    """Natural logarithm of its probability."""
    greedy: bool
    """Whether every token of it is the likeliest there."""


class Window(NamedTuple):
    """Tokens that are read at once, of which the last `scored` count."""

    tokens: np.ndarray
    scored: int


class Texts:
    """One decoder, opened.

    Args:
        path: a run, one of its steps, or weights.
        step: of a run, which checkpoint; the newest unless given.
        average: whether the moving average is meant; where the run has one, unless given.
        tokenizer: data.tokenizer of weights that have none beside them.

    Raises:
        WeightsError: a model that does not continue a text.
        MupaxError: no model there, or a tokenizer that is not here.
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
        """Tokens before the last that is predicted, at most."""
        self._begin = self._begin_tokens()
        program = runs.on_one_device(self._run.config)
        self._generator = Generator(
            program, self._run.params(program.abstract), program.step_inputs(), sampling=None
        )

    def likelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[Likelihood]:
        """Of each (context, continuation), the context cut at its start where both are too long.

        Spaces that end a context count to the continuation, as they are one token with its first word.

        Raises:
            TextError: a continuation that is longer than the model's context, or has no token.
        """
        return self._scored([self._window(*pair) for pair in pairs])

    def rolling(self, texts: Sequence[str]) -> list[float]:
        """Return the logarithm of the probability of each text, after the token that begins a document.

        Every token is predicted once: the first windows have one token of context before them, the last as many as fit.
        """
        cut = [list(self._windows(self._encoded(text))) for text in texts]
        scores = iter(self._scored([window for windows in cut for window in windows]))
        return [sum(next(scores).logprob for _ in windows) for windows in cut]

    def continued(
        self,
        context: str,
        until: Sequence[str],
        *,
        most: int = MOST,
        sampling: Sampling | None = None,
        seed: int = 0,
    ) -> str:
        """What the model writes after a context, to the first of the texts `until`, without it.

        Args:
            context: read to its end; its start is left out where it is too long.
            until: texts that end it, beside the end of a document.
            most: tokens, at most.
            sampling: how tokens are drawn; the likeliest unless given.
            seed: of the draws.
        """
        prompt = prompt_of(self._run, self.tokenizer, context.encode("utf-8", "surrogateescape"))
        stops = [stop for stop in until if stop]  # an empty one would end every text at once
        ends = {int(self.tokenizer.separator)}
        text = StreamingText(self.tokenizer, prompt.tolist(), most, stops, ends)
        sampling = sampling or Sampling(0.0)
        for new_BT in self._generator.stream(prompt, most, seed, sampling=sampling, samples=1):
            text.add(new_BT[0].tolist())
            if text.finish:
                break
        return text.text

    def _begin_tokens(self) -> np.ndarray:
        """Return what stands before the first token of a document, int32 [count].

        A run has the separator there. Weights have what their tokenizer puts there, else the begin token that it names, as the
        lm-eval harness does.
        """
        separator = np.array([self.tokenizer.separator], np.int32)
        if self._run.step is not None:
            return separator
        if len(self.tokenizer.start):
            return self.tokenizer.start
        name = self._run.config.data.tokenizer
        named = (
            tokenizer_files.special_tokens(path_of(name).parent) if name.endswith(".json") else {}
        )
        begin = self.tokenizer.find(named.get("bos_token", ""))
        return separator if begin is None else np.array([begin], np.int32)

    def _encoded(self, text: str) -> np.ndarray:
        ids = self.tokenizer.encode([text.encode("utf-8", "surrogateescape")])[0]
        check_known(ids, self._run)
        return ids

    def _window(self, context: str, continuation: str) -> Window:
        spaces = len(context) - len(context.rstrip(" "))
        if spaces and context.rstrip(" "):
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        before = self._encoded(context)
        whole = self._encoded(context + continuation)
        count = len(whole) - len(before)
        if not 0 < count <= self.context:
            raise TextError(
                f"the continuation {continuation[:40]!r} has {count} tokens, and from 1 to {self.context} can be scored"
            )
        begins = self.tokenizer.start if self._run.step is None else np.zeros(0, np.int32)
        begins = self._begin if not len(before) else begins
        return Window(np.concatenate([begins, whole])[-self.context - 1 :], count)

    def _windows(self, ids: np.ndarray) -> Iterator[Window]:
        tokens = np.concatenate([self._begin, ids])
        for done in range(0, len(ids), self.context):
            end = min(done + self.context, len(ids))
            stop = len(self._begin) + end
            yield Window(tokens[max(0, stop - 1 - self.context) : stop], end - done)

    def _scored(self, windows: Sequence[Window]) -> list[Likelihood]:
        """In the order of the windows, read in that of their lengths, so that few tokens are padding."""
        order = sorted(range(len(windows)), key=lambda i: -len(windows[i].tokens))
        likelihoods: dict[int, Likelihood] = {}
        for start in range(0, len(order), BATCH):
            batch = order[start : start + BATCH]
            tokens_BT = np.zeros((BATCH, len(windows[batch[0]].tokens)), np.int32)
            for row, i in enumerate(batch):
                tokens_BT[row, : len(windows[i].tokens)] = windows[i].tokens
            scores = self._generator.logprobs(tokens_BT, 1)
            for row, i in enumerate(batch):
                stop = len(windows[i].tokens) - 1
                places = slice(stop - windows[i].scored, stop)
                likeliest = scores.ids_BTK[row, places, 0] == tokens_BT[row, 1:][places]
                logprob = float(np.sum(scores.chosen_BT[row, places], dtype=np.float64))
                likelihoods[i] = Likelihood(logprob, bool(likeliest.all()))
        return [likelihoods[i] for i in range(len(windows))]
