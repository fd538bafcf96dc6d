"""`Harness`: a model of ours as the lm-eval harness takes one (extra `eval`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]

from mupax.train.config.sections import Step
from mupax.train.reuse.generate.sampling import Sampling
from mupax.train.reuse.harness.texts import MOST, Texts


class Harness(LM):
    """A decoder under the tasks of the lm-eval harness.

        lm_eval.simple_evaluate(model=Harness("runs/lm-laptop"), tasks=["lambada_openai"])

    Args:
        path: a run, one of its steps, or weights.
        step: of a run, which checkpoint; the newest unless given.
        average: whether the moving average is meant; where the run has one, unless given.
        tokenizer: data.tokenizer of weights that have none beside them.
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
        """(log-probability, whether greedy decoding would write it) of each request's (context, continuation)."""
        return [
            (score.logprob, score.greedy)
            for score in self._texts.likelihoods([of.args for of in requests])
        ]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Log-probability of each request's whole text."""
        return self._texts.rolling([of.args[0] for of in requests])

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """What is written after each request's context, as its `until`, `max_gen_toks`, `temperature`, `top_k` and `top_p` say."""
        return [self._continued(*of.args) for of in requests]

    @property
    def tokenizer_name(self) -> str:
        """What names the tokenizer and its content."""
        return self._texts.tokenizer.key

    def _continued(self, context: str, words: dict[str, Any]) -> str:
        until = words.get("until") or []
        heat = float(words.get("temperature") or 0.0) if words.get("do_sample", True) else 0.0
        sampling = Sampling(heat, words.get("top_k"), words.get("top_p")) if heat else None
        most = int(words.get("max_gen_toks") or words.get("max_new_tokens") or MOST)
        return self._texts.continued(
            context, [until] if isinstance(until, str) else until, most=most, sampling=sampling
        )
