"""How likely the tokens of a text are, in the forms of completions and of chats."""

from __future__ import annotations

import functools
from typing import Any

from mupax.train.reuse.generate.decode import Scores
from mupax.train.reuse.serve.fields import Request


class Probabilities:
    """Writes natural logarithms of probabilities as JSON.

    Args:
        tokenizer: says what each token stands for.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def of_text(self, request: Request, ids: list[int], prompt: int, scores: Scores) -> dict[str, Any]:
        """Probabilities of one text.

        Args:
            request: says how many likeliest are named, and whether the prompt counts too.
            ids: of the prompt and of the text.
            prompt: how many are of the prompt.
            scores: of the ids after the first, without an axis of texts.
        """
        first, top = 0 if request.echo else prompt, request.logprobs or 0
        chosen: list[Any] = [None, *map(float, scores.chosen_BT[: len(ids) - 1])]
        likely: list[Any] = [None]
        for values, numbers in zip(scores.top_BTK[: len(ids) - 1], scores.ids_BTK[: len(ids) - 1], strict=True):
            likely.append([(self._piece(i), float(v)) for v, i in zip(values[:top], numbers[:top], strict=True)])
        places = range(first, len(ids))
        if request.chat:

            def one(piece: str, logprob: float) -> dict[str, Any]:
                return {"token": piece, "logprob": logprob, "bytes": [*piece.encode()]}

            content = [
                {**one(self._piece(ids[i]), chosen[i]), "top_logprobs": [one(*each) for each in likely[i]]}
                for i in places
            ]
            return {"content": content}
        return {
            "tokens": [self._piece(ids[i]) for i in places],
            "token_logprobs": [chosen[i] for i in places],
            "top_logprobs": [likely[i] and dict(likely[i]) for i in places] if top else None,
            "text_offset": [len(self._tokenizer.decode(ids[first:i])) for i in places],
        }

    def _piece(self, token: int) -> str:
        return self._pieces[token] if token < len(self._pieces) else ""

    @functools.cached_property
    def _pieces(self) -> list[str]:
        return self._tokenizer.pieces()
