"""What a request gets: its prompts in tokens, the texts as the worker makes them, and the JSON of OpenAI's API around them."""

from __future__ import annotations

import dataclasses
import functools
import time
import uuid
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from mupax.train.data import DataError
from mupax.train.data.chats.answers import ChatTokens, prompt_encoder
from mupax.train.data.chats.templates import Template
from mupax.train.data.text.detokenizer import Detokenizer
from mupax.train.reuse.generate import opened
from mupax.train.reuse.generate.decode import Generator, Scores
from mupax.train.reuse.generate.sampling import DecodingError
from mupax.train.reuse.serve.fields import MOST_LIKELY, ApiError, Request
from mupax.train.reuse.serve.probabilities import Probabilities
from mupax.train.reuse.serve.worker import BusyError, Job, Worker
from mupax.train.reuse.serve.writing import AnswerEnd, StreamingText, answer_end


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt, and the texts that go on from it."""

    text: str
    ids: np.ndarray
    """int32 [P]."""
    writings: list[StreamingText]
    job: Job

    def pieces(self) -> Iterator[tuple[int, str]]:
        """(number of the text, what comes out of it) until all have ended; an ended one comes at least once more, with ''."""
        for part in self.job.parts():
            for number, writing in enumerate(self.writings):
                if not writing.finish:
                    piece = writing.add(part[number].tolist())
                    if piece or writing.finish:
                        yield number, piece
            if all(writing.finish for writing in self.writings):
                return


class Service:
    """A model that answers requests.

    Args:
        name: of the model, as requests write it.
        run: the model, opened.
        tokenizer: its own.
        template: of its chats; None where it has none.
        ends: tokens that end a text, of its tokenizer and of files beside it.
        generator: of the model, made without a sampling.
    """

    def __init__(
        self,
        name: str,
        run: Any,
        tokenizer: Any,
        template: Template | None,
        ends: Collection[int],
        generator: Generator,
    ) -> None:
        self.name, self.template, self.limit = name, template, run.config.model.sizes()["position"]
        self._run, self._tokenizer, self._ends = run, tokenizer, frozenset(ends)
        self._probabilities = Probabilities(tokenizer)
        self._created, self._worker = int(time.time()), Worker(generator)

    def close(self) -> None:
        """Ends the worker."""
        self._worker.stop()

    def models(self) -> dict[str, Any]:
        """Return the list of models, which has one."""
        return {"object": "list", "data": [self.model(self.name)]}

    def model(self, name: str) -> dict[str, Any]:
        """Describe a model: its longest prompt, and if it chats.

        Raises:
            ApiError: 404 for another name than that of this model.
        """
        self._check_name(name)
        return {
            "id": self.name,
            "object": "model",
            "created": self._created,
            "owned_by": "mupax",
            "max_model_len": self.limit,
            "chat": self.template is not None,
        }

    def _check_name(self, name: str) -> None:
        if name != self.name:
            raise ApiError(
                404,
                f"no model {name[:80]!r}; this server has {self.name!r}",
                "model",
                "model_not_found",
            )

    def answer(self, request: Request) -> dict[str, Any]:
        """The whole answer.

        Args:
            request: one that is not streamed.

        Raises:
            ApiError: 400, 404 or 503, as `begin`; 500 where the model has diverged.
        """
        prompts = self.begin(request)
        for prompt in prompts:
            self._finished(prompt)
        choices = []
        for prompt in prompts:
            scores = self._scores(prompt) if request.logprobs is not None else None
            for row, writing in enumerate(prompt.writings):
                text, logprobs = prompt.text * request.echo + writing.text, None
                if scores is not None:
                    ids = [*prompt.ids.tolist(), *writing.ids]
                    logprobs = self._probabilities.of_text(
                        request, ids, prompt.ids.size, Scores(*(x[row] for x in scores))
                    )
                body = {"message": {"role": "assistant", "content": text}} if request.chat else {"text": text}
                end = {"logprobs": logprobs, "finish_reason": writing.finish}
                choices.append({"index": len(choices), **body, **end})
        return {**self._head(request), "choices": choices, "usage": self._usage(prompts)}

    def stream(self, request: Request, prompts: list[Prompt]) -> Iterator[dict[str, Any]]:
        """The answer in chunks.

        Args:
            request: one that is streamed.
            prompts: of `begin`.

        Raises:
            ApiError: 500 where the model has diverged.
        """
        head = self._head(request, ".chunk" if request.chat else "")

        def chunk(index: int, text: str | None, finish: str | None = None, **delta: str) -> dict[str, Any]:
            content = delta | ({} if text is None else {"content": text})
            body = {"delta": content} if request.chat else {"text": text or ""}
            usage = {} if request.usage == "never" else {"usage": None}
            usage = {"usage": self._usage(prompts)} if request.usage == "always" else usage
            return {**head, "choices": [{"index": index, **body, "logprobs": None, "finish_reason": finish}], **usage}

        for place, prompt in enumerate(prompts):
            first = place * request.n
            for number, writing in enumerate(prompt.writings):
                if request.chat:
                    yield chunk(first + number, "", role="assistant")
                elif request.echo:
                    yield chunk(first + number, prompt.text)
                if writing.finish:  # no tokens are asked for
                    yield chunk(first + number, None, writing.finish)
            try:
                for number, piece in prompt.pieces():
                    if piece:
                        yield chunk(first + number, piece)
                    if finish := prompt.writings[number].finish:
                        yield chunk(first + number, None, finish)
            except DecodingError as error:
                raise ApiError(500, str(error)) from error
        if request.usage != "never":
            yield {**head, "choices": [], "usage": self._usage(prompts)}

    def begin(self, request: Request) -> list[Prompt]:
        """The prompts of a request, queued.

        Args:
            request: any.

        Raises:
            ApiError: 400 for what the model cannot do or a prompt that is too long, 404 another model, 503 too many wait.
        """
        if request.model is not None:
            self._check_name(request.model)
        texts = [self._chat_text(request)] if request.chat else request.prompts
        tokens = [self._tokens(text, request) for text in texts]
        ends, stops = (frozenset() if request.ignore_eos else self._ends), request.stops
        if request.chat and self.template and not request.ignore_eos:
            ends |= self._answer_end.ids
            stops += self._answer_end.stops
        prompts = []
        for (text, ids), seed in zip(tokens, range(request.seed, request.seed + len(tokens)), strict=True):
            length = max(1, self.limit - ids.size) if request.max_tokens is None else request.max_tokens
            if request.logprobs is not None and ids.size + length > self.limit + 1:
                raise ApiError(
                    400,
                    f"logprobs are of at most {self.limit + 1} tokens, and these are {ids.size} and {length} more; "
                    "ask for fewer",
                    "logprobs",
                )
            writings = [StreamingText(self._tokenizer, ids.tolist(), length, stops, ends) for _ in range(request.n)]
            prompts.append(Prompt(text, ids, writings, self._job(ids, length, seed, request)))
        try:
            for prompt in prompts:
                self._worker.submit(prompt.job)
        except BusyError:
            for prompt in prompts:
                prompt.job.done.set()
            raise ApiError(503, "too many requests wait; ask again later") from None
        return prompts

    def _job(self, ids: np.ndarray, length: int, seed: int, request: Request) -> Job:
        # To a power of two of texts: what is drawn of one does not depend on how many there are.
        samples = 1 << (request.n - 1).bit_length()
        return Job(lambda generator: generator.stream(ids, length, seed, sampling=request.sampling, samples=samples))

    def _chat_text(self, request: Request) -> str:
        if self.template is None:
            raise ApiError(
                400,
                f"{self.name} has no chat template; use /v1/completions, or start the server with --data.chat-template FILE",
                "messages",
            )
        try:
            return self.template.render(request.messages, prompt=True)
        except DataError as error:
            raise ApiError(400, str(error), "messages") from error

    @functools.cached_property
    def _chat_encoder(self) -> ChatTokens:
        assert self.template is not None
        return prompt_encoder(self._tokenizer, self.template, self._run.config.data)

    def _tokens(self, prompt: str | list[int], request: Request) -> tuple[str, np.ndarray]:
        """A prompt as text and in tokens."""
        param = "messages" if request.chat else "prompt"
        try:
            if isinstance(prompt, list):
                ids = np.array(prompt, np.int64)
                opened.check_known(ids, self._run)
                text = self._echo(prompt, request)
            elif request.chat:  # the template has what begins a text
                text, ids = self._chat_encoder.prompt(request.messages)
            else:
                text, ids = prompt, opened.prompt_of(self._run, self._tokenizer, prompt.encode())
        except (DecodingError, DataError, UnicodeEncodeError, OverflowError) as error:
            raise ApiError(400, str(error), param) from error
        if ids.size > self.limit:
            raise ApiError(
                400,
                f"the prompt has {ids.size} tokens, and the model reads {self.limit}; shorten it",
                param,
                "context_length_exceeded",
            )
        return text, ids.astype(np.int32)

    @functools.cached_property
    def _answer_end(self) -> AnswerEnd:
        assert self.template is not None
        return answer_end(self.template, self._tokenizer)

    def _echo(self, ids: list[int], request: Request) -> str:
        """Return the text of a prompt in tokens. A character that it begins comes with the text."""
        if not request.echo:
            return ""
        if request.max_tokens == 0:
            return self._tokenizer.decode(ids)
        return Detokenizer(self._tokenizer, ids).prompt_text

    def _finished(self, prompt: Prompt) -> None:
        try:
            for _ in prompt.pieces():
                pass
        except DecodingError as error:
            raise ApiError(500, str(error)) from error

    def _scores(self, prompt: Prompt) -> Scores:
        """Of every token after the first of the prompt and each text."""
        rows = [np.concatenate([prompt.ids, writing.ids]).astype(np.int32) for writing in prompt.writings]
        tokens = np.zeros((len(rows), max(map(len, rows))), np.int32)
        for row, ids in zip(tokens, rows, strict=True):
            row[: ids.size] = ids
        top = min(MOST_LIKELY, self._run.config.model.sizes()["vocab"])
        try:
            job = self._worker.submit(Job(lambda generator: iter([generator.logprobs(tokens, top)])))
        except BusyError:
            raise ApiError(503, "too many requests wait; ask again later") from None
        (scores,) = job.parts()
        return scores

    def _head(self, request: Request, more: str = "") -> dict[str, Any]:
        kind, prefix = (f"chat.completion{more}", "chatcmpl") if request.chat else ("text_completion", "cmpl")
        return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": self.name}

    @staticmethod
    def _usage(prompts: list[Prompt]) -> dict[str, int]:
        prompt_tokens = sum(prompt.ids.size for prompt in prompts)
        completion_tokens = sum(writing.count for prompt in prompts for writing in prompt.writings)
        total = prompt_tokens + completion_tokens
        return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}
