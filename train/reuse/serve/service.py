"""What a request gets: its prompts in tokens, the texts as the worker makes them, and the JSON of OpenAI's API around them.

Probabilities of the tokens of a text come in the forms of completions and of chats.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import dataclasses
import functools
import time
import uuid
from collections.abc import AsyncIterator, Collection
from typing import Any, NamedTuple

import numpy as np

from mupax.train.data import DataError
from mupax.train.data.chats.answers import ChatTokens, prompt_encoder
from mupax.train.data.chats.templates import Template
from mupax.train.data.text.detokenizer import Detokenizer, token_bytes
from mupax.train.reuse.generate.decode import Generator, Scores
from mupax.train.reuse.generate.sampling import DecodingError
from mupax.train.reuse.generate.slots import Text
from mupax.train.reuse.generate.writing import (
    AnswerEnd,
    StreamingText,
    answer_end,
    check_known,
    prompt_of,
)
from mupax.train.reuse.serve.fields import LARGEST_SEED, LONGEST, MOST_LIKELY, ApiError, Request
from mupax.train.reuse.serve.worker import (
    BusyError,
    Event,
    Job,
    Progress,
    Scored,
    ScoreJob,
    Worker,
    WorkerError,
)

RETRY_S = 5
"""What a client is told to wait where there is no room for its request."""
_BYTES_PER_TOKEN = 64
"""A prompt with more bytes for each token of the context is refused before it is encoded, which takes time and memory."""
_SHORT_PROMPT = 1 << 16
"""Bytes of a prompt that is always encoded, so that the message has its number of tokens."""


class _Entry(NamedTuple):
    """A token at a place of a text."""

    token: str
    """Its text; of a special token its name, of part of a character its bytes as `\\xNN`."""
    bytes: bytes
    """What it adds to the text. Of all tokens, joined, they are the text."""
    logprob: float | None


class Probabilities:
    """Writes natural logarithms of probabilities as JSON.

    Args:
        tokenizer: tokenizer of the model.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def of_text(
        self, request: Request, ids: list[int], prompt: int, scores: Scores
    ) -> dict[str, Any]:
        """Return the probabilities of one text.

        Args:
            request: says how many likeliest tokens are named, and if the prompt counts too.
            ids: token ids of the prompt and of the text.
            prompt: number of ids of the prompt.
            scores: of the ids after the first, without an axis of texts.
        """
        first = 0 if request.echo else prompt
        chosen: list[_Entry] = []
        likeliest: list[list[_Entry] | None] = []
        before = None
        for place, token in enumerate(ids):
            if place >= first:
                logprob = float(scores.chosen_BT[place - 1]) if place else None
                chosen.append(self._entry(token, before, logprob))
                likeliest.append(self._likeliest(request, scores, place, before))
            if not self._tokenizer.is_skipped(token):
                before = token
        if request.chat:
            return {"content": [_chat_form(*pair) for pair in zip(chosen, likeliest, strict=True)]}
        tops = [None if top is None else _by_token(top) for top in likeliest]
        return {
            "tokens": [_legacy_token(entry) for entry in chosen],
            "token_logprobs": [entry.logprob for entry in chosen],
            "top_logprobs": tops if request.logprobs else None,
            "text_offset": _offsets(chosen),
        }

    def _likeliest(
        self, request: Request, scores: Scores, place: int, before: int | None
    ) -> list[_Entry] | None:
        """Return the likeliest tokens at a place, the likeliest first. The first has none."""
        if place == 0:
            return None
        top = request.logprobs or 0
        tokens = scores.ids_BTK[place - 1][:top]
        values = scores.top_BTK[place - 1][:top]
        pairs = zip(tokens, values, strict=True)
        return [self._entry(int(token), before, float(value)) for token, value in pairs]

    def _entry(self, token: int, before: int | None, logprob: float | None) -> _Entry:
        data = token_bytes(self._tokenizer, token, before)
        if not data:
            return _Entry(self._tokenizer.name_of(token), data, logprob)
        try:
            return _Entry(data.decode(), data, logprob)
        except UnicodeDecodeError:  # part of a character, written as OpenAI's API does
            return _Entry("".join(f"\\x{byte:02x}" for byte in data), data, logprob)


def _chat_form(entry: _Entry, likeliest: list[_Entry] | None) -> dict[str, Any]:
    return {**_fields(entry), "top_logprobs": [_fields(other) for other in likeliest or []]}


def _fields(entry: _Entry) -> dict[str, Any]:
    return {"token": entry.token, "logprob": entry.logprob, "bytes": [*entry.bytes]}


def _by_token(entries: list[_Entry]) -> dict[str, float | None]:
    by_token: dict[str, float | None] = {}
    for entry in entries:
        by_token.setdefault(_legacy_token(entry), entry.logprob)  # the likelier of equal texts
    return by_token


def _legacy_token(entry: _Entry) -> str:
    """Return a token as completions name it, which have no field for bytes."""
    is_part = entry.bytes and entry.bytes != entry.token.encode()
    return f"bytes:{entry.token}" if is_part else entry.token


def _offsets(entries: list[_Entry]) -> list[int]:
    """Return the number of characters before each token. A part of a character is not one."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    count = 0
    offsets = []
    for entry in entries:
        offsets.append(count)
        count += len(decoder.decode(entry.bytes))
    return offsets


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of requests."""

    slots: int = 8
    """Texts that are written at once."""
    max_tokens: int = LONGEST
    """Tokens that a request may ask for in each text."""
    max_seconds: float = 600.0
    """Time of a request, from its queueing on."""
    max_waiting: int = 64
    """Requests that may wait for a slot."""


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt, and the texts that go on from it."""

    text: str
    ids: np.ndarray
    """int32 [P]."""
    writings: list[StreamingText]


class Answer:
    """The texts of one request, which the worker makes.

    Args:
        request: what is asked for.
        prompts: prompts of the request.
        worker: where they are queued.
        client: address of who asks.
        max_seconds: time that the request may take.

    Raises:
        ApiError: 503 where too many requests wait.
    """

    def __init__(
        self,
        request: Request,
        prompts: list[Prompt],
        worker: Worker,
        client: str,
        max_seconds: float,
    ) -> None:
        self.request = request
        self.prompts = prompts
        self._worker = worker
        self._deadline = time.monotonic() + max_seconds
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self.writings = [writing for prompt in prompts for writing in prompt.writings]
        texts = []
        self._indices = []
        """Number of the writing of each text of the job. A writing of no tokens has no text."""
        for place, prompt in enumerate(prompts):
            for row, writing in enumerate(prompt.writings):
                if not writing.finish:
                    texts.append(
                        Text(
                            prompt.ids, writing.length, request.seed + place, row, request.sampling
                        )
                    )
                    self._indices.append(place * request.n + row)
        self._jobs: list[Job | ScoreJob] = []
        self._texts = texts
        if texts:
            job = Job(texts=texts, client=client, deadline=self._deadline, deliver=self._deliver)
            self._submit(job)

    def cancel(self) -> None:
        """Need nothing more: the worker drops the texts."""
        for job in self._jobs:
            job.cancel()

    async def pieces(self) -> AsyncIterator[tuple[int, str]]:
        """Yield (number of the text, what comes out of it) until all have ended. An ended one comes at least once more, with ''.

        Raises:
            ApiError: 500 or 503 where the worker failed.
        """
        while not all(writing.finish for writing in self.writings):
            event = await self._next_event()
            if not isinstance(event, Progress):
                continue
            index = self._indices[event.index]
            writing = self.writings[index]
            if writing.finish:
                continue
            piece = writing.add(event.tokens)
            if event.is_last and not writing.finish:
                piece += writing.cut()
            if writing.finish:
                self._texts[event.index].done = True
            if piece or writing.finish:
                yield index, piece

    async def scores(self, top: int) -> list[Scores]:
        """Return the probabilities of every token after the first of each prompt with each of its texts.

        Args:
            top: likeliest tokens that are named at each place.
        """
        rows = []
        for prompt in self.prompts:
            for writing in prompt.writings:
                rows.append(np.concatenate([prompt.ids, writing.ids]).astype(np.int32))
        self._submit(ScoreJob(rows=rows, top=top, deadline=self._deadline, deliver=self._deliver))
        scores: dict[int, Scores] = {}
        while len(scores) < len(rows):
            event = await self._next_event()
            if isinstance(event, Scored):
                scores[event.index] = event.scores
        return [scores[index] for index in range(len(rows))]

    def _submit(self, job: Job | ScoreJob) -> None:
        try:
            self._worker.submit(job)
        except BusyError:
            raise ApiError(
                503, "too many requests wait; ask again later", retry_s=RETRY_S
            ) from None
        except WorkerError as error:
            raise _api_error(error) from error
        self._jobs.append(job)

    def _deliver(self, event: Event) -> None:
        """Take an event in the worker's thread."""
        with contextlib.suppress(RuntimeError):  # the server is closing, and its loop is closed
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def _next_event(self) -> Event:
        event = await self._events.get()
        if isinstance(event, Exception):
            raise _api_error(event) from event
        return event


def _api_error(error: Exception) -> ApiError:
    status = error.status if isinstance(error, WorkerError) else 500
    return ApiError(status, str(error), retry_s=RETRY_S if status == 503 else None)


class Service:
    """A model that answers requests.

    Args:
        name: of the model, as requests write it.
        run: the model, opened.
        tokenizer: its own.
        template: of its chats; None where it has none.
        ends: tokens that end a text, of its tokenizer and of files beside it.
        generator: of the model, made without a sampling.
        limits: limits of requests.
    """

    def __init__(
        self,
        name: str,
        run: Any,
        tokenizer: Any,
        template: Template | None,
        ends: Collection[int],
        generator: Generator,
        limits: Limits = Limits(),
    ) -> None:
        self.name = name
        self.template = template
        self.limits = limits
        self.limit = run.config.model.sizes()["position"]
        self._run, self._tokenizer, self._ends = run, tokenizer, frozenset(ends)
        self._probabilities = Probabilities(tokenizer)
        self._created = int(time.time())
        self.worker = Worker(generator, limits.slots, limits.max_waiting)

    def close(self) -> None:
        """Ends the worker."""
        self.worker.stop()

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

    @property
    def is_well(self) -> bool:
        """False if the worker is dead or stuck."""
        return self.worker.is_well

    def begin(self, request: Request) -> list[Prompt]:
        """Return the prompts of a request in tokens. Encoding them may take long.

        Raises:
            ApiError: 400 for what the model cannot do or a prompt that is too long, 404 another model.
        """
        if request.model is not None:
            self._check_name(request.model)
        if request.max_tokens is not None and request.max_tokens > self.limits.max_tokens:
            raise ApiError(
                400,
                f"this server writes at most {self.limits.max_tokens} tokens; ask for fewer",
                "max_tokens",
            )
        if request.seed + len(request.prompts) - 1 > LARGEST_SEED:
            raise ApiError(
                400,
                f"prompt number i has the seed + i, which is at most {LARGEST_SEED}; write less",
                "seed",
            )
        texts = [self._chat_text(request)] if request.chat else request.prompts
        ends = frozenset() if request.ignore_eos else self._ends
        stops = request.stops
        if request.chat and self.template and not request.ignore_eos:
            ends |= self._answer_end.ids
            stops += self._answer_end.stops
        prompts = []
        for prompt in texts:
            text, ids = self._tokens(prompt, request)
            length = self._length(request, ids)
            writings = [
                StreamingText(self._tokenizer, ids.tolist(), length, stops, ends)
                for _ in range(request.n)
            ]
            prompts.append(Prompt(text, ids, writings))
        return prompts

    def queue(self, request: Request, prompts: list[Prompt], client: str) -> Answer:
        """Queue the texts of a request. To be called in the loop that reads the answer.

        Raises:
            ApiError: 503 where too many requests wait.
        """
        return Answer(request, prompts, self.worker, client, self.limits.max_seconds)

    def _length(self, request: Request, ids: np.ndarray) -> int:
        """Return the tokens of a text at most."""
        if request.max_tokens is None:
            length = min(max(1, self.limit - ids.size), self.limits.max_tokens)
        else:
            length = request.max_tokens
        if request.logprobs is not None and ids.size + length > self.limit + 1:
            raise ApiError(
                400,
                f"logprobs are of at most {self.limit + 1} tokens, and these are {ids.size} and {length} more; "
                "ask for fewer",
                "logprobs",
            )
        return length

    async def complete(self, answer: Answer) -> dict[str, Any]:
        """Return the whole answer of a request that is not streamed.

        Raises:
            ApiError: 500 or 503 where the worker failed, or the model has diverged.
        """
        async for _ in answer.pieces():
            pass
        request = answer.request
        scores = None
        if request.logprobs is not None:
            scores = await answer.scores(min(MOST_LIKELY, self._run.config.model.sizes()["vocab"]))
        choices = []
        for prompt in answer.prompts:
            for writing in prompt.writings:
                index = len(choices)
                text = prompt.text * request.echo + writing.text
                logprobs = None
                if scores is not None:
                    ids = [*prompt.ids.tolist(), *writing.ids]
                    logprobs = self._probabilities.of_text(
                        request, ids, prompt.ids.size, scores[index]
                    )
                body = (
                    {"message": {"role": "assistant", "content": text}}
                    if request.chat
                    else {"text": text}
                )
                choices.append(
                    {"index": index, **body, "logprobs": logprobs, "finish_reason": writing.finish}
                )
        return {**self._head(request), "choices": choices, "usage": usage(answer.prompts)}

    async def stream(self, answer: Answer) -> AsyncIterator[dict[str, Any]]:
        """Yield the answer in chunks. Chunks of several texts come as they are made.

        Raises:
            ApiError: as `complete`.
        """
        request = answer.request
        head = self._head(request, ".chunk" if request.chat else "")

        def chunk(
            index: int, text: str | None, finish: str | None = None, **delta: str
        ) -> dict[str, Any]:
            content = delta | ({} if text is None else {"content": text})
            body = {"delta": content} if request.chat else {"text": text or ""}
            choice = {"index": index, **body, "logprobs": None, "finish_reason": finish}
            used = {}
            if request.usage != "never":
                used = {"usage": usage(answer.prompts) if request.usage == "always" else None}
            return {**head, "choices": [choice], **used}

        for index, writing in enumerate(answer.writings):
            if request.chat:
                yield chunk(index, "", role="assistant")
            elif request.echo:
                yield chunk(index, answer.prompts[index // request.n].text)
            if writing.finish:  # no tokens are asked for
                yield chunk(index, None, writing.finish)
        async for index, piece in answer.pieces():
            if piece:
                yield chunk(index, piece)
            if finish := answer.writings[index].finish:
                yield chunk(index, None, finish)
        if request.usage != "never":
            yield {**head, "choices": [], "usage": usage(answer.prompts)}

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
        self._check_size(prompt, param)
        try:
            if isinstance(prompt, list):
                ids = np.array(prompt, np.int64)
                check_known(ids, self._run)
                text = self._echo(prompt, request)
            elif request.chat:  # the template has what begins a text
                text, ids = self._chat_encoder.prompt(request.messages)
            else:
                text, ids = prompt, prompt_of(self._run, self._tokenizer, prompt.encode())
        except (DecodingError, DataError, UnicodeEncodeError, OverflowError) as error:
            raise ApiError(400, str(error), param) from error
        if ids.size == 0:
            raise ApiError(400, "the chat template makes an empty prompt of these messages", param)
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

    def _check_size(self, prompt: str | list[int], param: str) -> None:
        """Refuse a prompt that cannot fit, before it is encoded."""
        size = len(prompt) if isinstance(prompt, str) else 0
        if size > max(_SHORT_PROMPT, _BYTES_PER_TOKEN * self.limit):
            raise ApiError(
                400,
                f"the prompt has {size} characters, and the model reads {self.limit} tokens; shorten it",
                param,
                "context_length_exceeded",
            )

    def _head(self, request: Request, more: str = "") -> dict[str, Any]:
        kind, prefix = (
            (f"chat.completion{more}", "chatcmpl") if request.chat else ("text_completion", "cmpl")
        )
        return {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": self.name,
        }


def usage(prompts: list[Prompt]) -> dict[str, int]:
    """Return the number of tokens read and made, in OpenAI's form."""
    prompt_tokens = sum(prompt.ids.size for prompt in prompts)
    completion_tokens = sum(writing.count for prompt in prompts for writing in prompt.writings)
    total = prompt_tokens + completion_tokens
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": total,
    }
