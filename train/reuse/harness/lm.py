"""Adapter of a mupax model to the lm-eval harness (extra `eval`).

`mupax eval --tasks` uses it, and so can a script that calls the harness itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]

from mupax.train.config.sections import Step
from mupax.train.reuse.generate.sampling import Sampling
from mupax.train.reuse.generate.texts import MAX_TOKENS, Texts


class Harness(LM):
    """Decoder with the interface of a language model of the lm-eval harness.

        lm_eval.simple_evaluate(model=Harness("runs/lm-laptop"), tasks=["lambada_openai"])

    Args:
        path: a run, one of its steps, or weights.
        step: step of a run's checkpoint, by default the newest.
        average: whether to use the moving average, by default if the run keeps one.
        tokenizer: data.tokenizer of weights without a tokenizer beside them.
    """

    def __init__(
        self,
        path: Path | str,
        step: Step | None = None,
        average: bool | None = None,
        tokenizer: str | None = None,
    ) -> None:
        super().__init__()
        self._texts = Texts(Path(path), step, average, tokenizer)

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation, and whether greedy decoding writes it.

        Args:
            requests: requests of the harness, with arguments (context, continuation).

        Raises:
            TextError: a continuation has no token, or is longer than the model's context.
        """
        scores = self._texts.likelihoods([request.args for request in requests])
        return [(score.logprob, score.greedy) for score in scores]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Return the natural log-probability of each complete text at the start of a document.

        Args:
            requests: requests of the harness, with arguments (text,).
        """
        return self._texts.rolling([request.args[0] for request in requests])

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Return the text generated after each context, by default the likeliest tokens.

        The text ends before the first of the strings `until`, where a document ends, or at the
        largest number of tokens.

        Args:
            requests: requests of the harness, with arguments (context, options). Options are
                `until`, `max_gen_toks` or `max_new_tokens` (256 by default), `do_sample`,
                `temperature`, `top_k` and `top_p`. Tokens are drawn only with a temperature above
                0 and without `do_sample` False.
        """
        return [self._continued(*request.args) for request in requests]

    @property
    def tokenizer_name(self) -> str:
        """Key of the tokenizer, which changes with its content."""
        return self._texts.tokenizer.key

    def _continued(self, context: str, options: dict[str, Any]) -> str:
        until = options.get("until") or []
        if isinstance(until, str):
            until = [until]
        temperature = 0.0
        if options.get("do_sample", True):
            temperature = float(options.get("temperature") or 0.0)
        sampling = None
        if temperature:
            # A top_k of 0 means that there is no limit, as in `transformers`.
            sampling = Sampling(temperature, options.get("top_k") or None, options.get("top_p"))
        # The YAML files of tasks use either of these two names.
        max_tokens = options.get("max_gen_toks") or options.get("max_new_tokens") or MAX_TOKENS
        return self._texts.continued(context, until, max_tokens=int(max_tokens), sampling=sampling)
