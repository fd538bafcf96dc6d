"""Answers to requests: prompts in tokens, texts from the worker, and the JSON of OpenAI's API.

The server (`mupax.train.reuse.serve.server`) calls `Service`.
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
"""Time after which a refused client may ask again, in seconds."""
_BYTES_PER_TOKEN = 64
"""Largest number of characters of a prompt per token of the context.

A longer prompt is refused before it is encoded, because encoding takes time and memory.
"""
_SHORT_PROMPT = 1 << 16
"""Size of prompts that are always encoded, in characters.

The refusal of a prompt that is too long can then name its number of tokens.
"""


class _Entry(NamedTuple):
    """Token at a position of a text."""

    token: str
    """Text of the token, the name of a special token, or part of a character as `\\xNN`."""
    bytes: bytes
    """Bytes that the token adds to the text. The bytes of all tokens, joined, are the text."""
    logprob: float | None
    """Natural logarithm of the probability. `None` for the first token of a text."""


class Probabilities:
    """Writer of log-probabilities as JSON, in the forms of completions and of chats."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def of_text(
        self, request: Request, ids: list[int], prompt: int, scores: Scores
    ) -> dict[str, Any]:
        """Return the field `logprobs` of one text, in the form of chats or of completions.

        Args:
            request: Request with the number of likeliest tokens, and `echo` to include the prompt.
            ids: Token ids of the prompt and of the text after it.
            prompt: Number of tokens of the prompt.
            scores: Scores of the tokens after the first, `[T]` and `[T, K]` without an axis B.
        """
        first = 0 if request.echo else prompt
        chosen: list[_Entry] = []
        likeliest: list[list[_Entry] | None] = []
        previous = None
        for position, token in enumerate(ids):
            if position >= first:
                logprob = float(scores.chosen_BT[position - 1]) if position else None
                chosen.append(self._entry(token, previous, logprob))
                likeliest.append(self._likeliest(request, scores, position, previous))
            # A special token is left out of the text, so the next token joins the one before it.
            if not self._tokenizer.is_skipped(token):
                previous = token
        if request.chat:
            pairs = zip(chosen, likeliest, strict=True)
            return {"content": [_chat_form(entry, entries) for entry, entries in pairs]}
        top_logprobs = None
        if request.logprobs:
            top_logprobs = [
                None if entries is None else _by_token(entries) for entries in likeliest
            ]
        return {
            "tokens": [_legacy_token(entry) for entry in chosen],
            "token_logprobs": [entry.logprob for entry in chosen],
            "top_logprobs": top_logprobs,
            "text_offset": _offsets(chosen),
        }

    def _likeliest(
        self, request: Request, scores: Scores, position: int, previous: int | None
    ) -> list[_Entry] | None:
        """Return the likeliest tokens at a position, the likeliest first. `None` at position 0."""
        if position == 0:
            return None
        top = request.logprobs or 0
        tokens = scores.ids_BTK[position - 1][:top]
        values = scores.top_BTK[position - 1][:top]
        pairs = zip(tokens, values, strict=True)
        return [self._entry(int(token), previous, float(value)) for token, value in pairs]

    def _entry(self, token: int, previous: int | None, logprob: float | None) -> _Entry:
        """Return the entry of a token. Its bytes can depend on `previous`, the token before it."""
        data = token_bytes(self._tokenizer, token, previous)
        if not data:
            return _Entry(self._tokenizer.name_of(token), data, logprob)
        try:
            return _Entry(data.decode(), data, logprob)
        except UnicodeDecodeError:
            # A part of a character is written as OpenAI's API writes it.
            escaped = "".join(f"\\x{byte:02x}" for byte in data)
            return _Entry(escaped, data, logprob)


def _chat_form(entry: _Entry, likeliest: list[_Entry] | None) -> dict[str, Any]:
    """Return a token with its likeliest alternatives, as chats name them."""
    alternatives = [_fields(alternative) for alternative in likeliest or []]
    return {**_fields(entry), "top_logprobs": alternatives}


def _fields(entry: _Entry) -> dict[str, Any]:
    return {"token": entry.token, "logprob": entry.logprob, "bytes": [*entry.bytes]}


def _by_token(entries: list[_Entry]) -> dict[str, float | None]:
    """Return log-probabilities by the text of the token. Of equal texts, the first token counts."""
    by_token: dict[str, float | None] = {}
    for entry in entries:
        # Two tokens can have one text. The first is the likelier.
        by_token.setdefault(_legacy_token(entry), entry.logprob)
    return by_token


def _legacy_token(entry: _Entry) -> str:
    """Return the text of a token. A part of a character, in escapes, gets the prefix `bytes:`."""
    is_part = entry.bytes and entry.bytes != entry.token.encode()
    return f"bytes:{entry.token}" if is_part else entry.token


def _offsets(entries: list[_Entry]) -> list[int]:
    """Return the number of complete characters before each token."""
    # Incremental, because the bytes of one character may be spread over several tokens.
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
    """Number of texts that are written at once."""
    max_tokens: int = LONGEST
    """Largest number of tokens that a request may ask for in each text."""
    max_seconds: float = 600.0
    """Time limit of a request after it is queued."""
    max_waiting: int = 64
    """Largest number of requests that wait for a slot."""


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Prompt, and the texts that continue it."""

    text: str
    ids: np.ndarray
    """int32 [P]."""
    writings: list[StreamingText]


class Answer:
    """Texts of one request while the worker writes them. The constructor queues the texts.

    Make it inside the running event loop that reads the answer. Texts of no tokens are not queued.

    Args:
        client: Address of the client. The queue shares slots fairly between addresses.
        max_seconds: Time limit of the request, from now on.

    Raises:
        ApiError: 503 if too many requests wait, 500 if the worker is dead.
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
        # Kept, because the worker delivers events from another thread.
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self.writings = [writing for prompt in prompts for writing in prompt.writings]
        texts = []
        self._indices = []
        """Index in `writings` of each text of the job. A writing of no tokens has no text."""
        for number, prompt in enumerate(prompts):
            # Each prompt has its own seed, or equal prompts of one request would get equal answers.
            seed = request.seed + number
            for row, writing in enumerate(prompt.writings):
                if not writing.finish:
                    texts.append(Text(prompt.ids, writing.length, seed, row, request.sampling))
                    self._indices.append(number * request.n + row)
        self._jobs: list[Job | ScoreJob] = []
        self._texts = texts
        if texts:
            job = Job(texts=texts, client=client, deadline=self._deadline, deliver=self._deliver)
            self._submit(job)

    def cancel(self) -> None:
        """Mark the request as cancelled. The worker then drops its texts, without an error."""
        for job in self._jobs:
            job.cancel()

    async def pieces(self) -> AsyncIterator[tuple[int, str]]:
        """Yield (index of a text in `writings`, new piece of its text) until all texts have ended.

        When a text ends, a last piece of it is yielded, which may be empty.

        Raises:
            ApiError: 500 or 503 if the worker failed, 500 if the model has diverged, 503 if no slot
                came free in time.
        """
        while not all(writing.finish for writing in self.writings):
            event = await self._next_event()
            if not isinstance(event, Progress):
                continue
            index = self._indices[event.index]
            writing = self.writings[index]
            if writing.finish:
                # Tokens that the worker made before it saw that the text is done.
                continue
            piece = writing.add(event.tokens)
            # If the last event does not end the text, the worker has stopped at the time limit.
            if event.is_last and not writing.finish:
                piece += writing.cut()
            if writing.finish:
                self._texts[event.index].done = True
            if piece or writing.finish:
                yield index, piece

    async def scores(self, top: int) -> list[Scores]:
        """Let the worker score every text with its prompt, and return the scores.

        There is one `Scores` per text, in the order of `writings`. Its arrays have no axis of
        texts, and have no row for the first token, which nothing predicts. Call this method when
        all texts have ended.

        Args:
            top: Number of likeliest tokens at each position.

        Raises:
            ApiError: 500 or 503 if the worker failed, or if the time of the request is over.
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
        """Queue a job. Raises ApiError if the worker does not take it."""
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
        """Pass an event from the worker's thread to the server's event loop."""
        # RuntimeError means that the event loop is closed, because the server is closing.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def _next_event(self) -> Event:
        """Wait for the next event of the worker. Raises ApiError if it is an error."""
        event = await self._events.get()
        if isinstance(event, Exception):
            raise _api_error(event) from event
        return event


def _api_error(error: Exception) -> ApiError:
    """Return the refusal for an error of the worker.

    The status is that of a `WorkerError`, and 500 for any other error. A client may retry a 503.
    """
    status = error.status if isinstance(error, WorkerError) else 500
    return ApiError(status, str(error), retry_s=RETRY_S if status == 503 else None)


class Service:
    """Model that answers requests. Making a `Service` starts its worker thread.

    Args:
        name: Name of the model, which requests can give in the field `model`.
        run: Opened model, a `TrainedModel`.
        template: Chat template, or `None` if the model does not chat.
        ends: Ids of tokens that end a text, from the tokenizer and the files beside it.
        generator: Generator of the model, made with `sampling=None`.
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
        self._run = run
        self._tokenizer = tokenizer
        self._ends = frozenset(ends)
        self._probabilities = Probabilities(tokenizer)
        self._created = int(time.time())
        self.worker = Worker(generator, limits.slots, limits.max_waiting)

    def close(self) -> None:
        """Stop the worker. Open requests get an error."""
        self.worker.stop()

    def models(self) -> dict[str, Any]:
        """Return the list of models in OpenAI's form. It has one model."""
        return {"object": "list", "data": [self.model(self.name)]}

    def model(self, name: str) -> dict[str, Any]:
        """Describe the model in OpenAI's form, with its longest prompt and whether it chats.

        Raises:
            ApiError: 404 for any other name than that of this model.
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
    def is_alive(self) -> bool:
        """True unless the worker is dead. A dead worker never answers again."""
        return self.worker.is_alive

    @property
    def is_well(self) -> bool:
        """True unless the worker is dead or stuck."""
        return self.worker.is_well

    def begin(self, request: Request) -> list[Prompt]:
        """Check a request and return its prompts in tokens, each with `n` empty texts to write.

        Nothing is queued yet. Encoding a long prompt can take long.

        Raises:
            ApiError: 400 if a prompt is too long or cannot be encoded, `max_tokens` or a seed is
                too large, log-probabilities are requested of too many tokens, or a chat has no
                template that accepts its messages; 404 for another model.
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
        # A model of chats learns nothing to write after the end of an answer, so that a plain
        # completion ends there, too.
        has_answers = request.chat or self._is_of_chats
        if has_answers and self.template and not request.ignore_eos:
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
        """Queue the texts of a request and return their `Answer`.

        Call it in the event loop that reads the answer.

        Args:
            client: Address of the client. A free slot goes to the client with the fewest texts.

        Raises:
            ApiError: 503 if too many requests wait, 500 if the worker is dead.
        """
        return Answer(request, prompts, self.worker, client, self.limits.max_seconds)

    def _length(self, request: Request, ids: np.ndarray) -> int:
        """Return the largest number of tokens of a text.

        By default the texts fill the context, up to the limit of the server.

        Args:
            ids: Prompt, int32 [P].

        Raises:
            ApiError: 400 if log-probabilities are requested of more tokens than the model reads.
        """
        if request.max_tokens is None:
            # A prompt that fills the context leaves one token, which is drawn and never read.
            length = min(max(1, self.limit - ids.size), self.limits.max_tokens)
        else:
            length = request.max_tokens
        if request.logprobs is not None and ids.size + length > self.limit + 1:
            raise ApiError(
                400,
                f"logprobs are of at most {self.limit + 1} tokens, and these are {ids.size} and "
                f"{length} more; ask for fewer",
                "logprobs",
            )
        return length

    async def complete(self, answer: Answer) -> dict[str, Any]:
        """Wait until all texts are written. Return the answer of the request in OpenAI's form.

        If the request has `logprobs`, also wait until the worker has scored all texts.

        Raises:
            ApiError: 500 if the worker failed or the model has diverged, 503 if the worker failed
                or the time of the request is over before a slot is free or the scores are made.
        """
        async for _ in answer.pieces():
            pass
        request = answer.request
        scores = None
        if request.logprobs is not None:
            # One number for all requests, so that one program serves them.
            top = min(MOST_LIKELY, self._run.config.model.sizes()["vocab"])
            scores = await answer.scores(top)
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
                choice: dict[str, Any] = {"index": index}
                if request.chat:
                    choice["message"] = {"role": "assistant", "content": text}
                else:
                    choice["text"] = text
                choice["logprobs"] = logprobs
                choice["finish_reason"] = writing.finish
                choices.append(choice)
        return {**self._head(request), "choices": choices, "usage": usage(answer.prompts)}

    async def stream(self, answer: Answer) -> AsyncIterator[dict[str, Any]]:
        """Yield the answer in OpenAI's chunks, while the worker writes the texts.

        The last chunk has the token counts, unless `request.usage` is "never".

        Raises:
            ApiError: 500 or 503 if the worker failed, 500 if the model has diverged, 503 if no slot
                came free in time.
        """
        request = answer.request
        head = self._head(request, ".chunk" if request.chat else "")

        def chunk(
            index: int, text: str | None, finish: str | None = None, **delta: str
        ) -> dict[str, Any]:
            choice: dict[str, Any] = {"index": index}
            if not request.chat:
                choice["text"] = text or ""
            elif text is None:
                choice["delta"] = delta
            else:
                choice["delta"] = {**delta, "content": text}
            choice["logprobs"] = None
            choice["finish_reason"] = finish

            content = {**head, "choices": [choice]}
            if request.usage == "always":
                content["usage"] = usage(answer.prompts)
            elif request.usage == "end":
                content["usage"] = None
            return content

        for index, writing in enumerate(answer.writings):
            if request.chat:
                yield chunk(index, "", role="assistant")
            elif request.echo:
                yield chunk(index, answer.prompts[index // request.n].text)
            if writing.finish:  # no tokens are requested
                yield chunk(index, None, writing.finish)
        async for index, piece in answer.pieces():
            if piece:
                yield chunk(index, piece)
            finish = answer.writings[index].finish
            if finish:
                yield chunk(index, None, finish)
        if request.usage != "never":
            yield {**head, "choices": [], "usage": usage(answer.prompts)}

    def _chat_text(self, request: Request) -> str:
        """Return the messages of a chat as text, rendered by the chat template.

        Raises:
            ApiError: 400 if there is no template, or if it refuses the messages.
        """
        if self.template is None:
            raise ApiError(
                400,
                f"{self.name} has no chat template; use /v1/completions, or start the server with "
                "--data.chat-template FILE",
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
        """Return a prompt as text and in tokens, int32 [P].

        The text is needed only for echo. For a prompt in token ids it is '' without echo.

        Raises:
            ApiError: 400 if the prompt cannot be encoded, is empty, or is longer than the context.
        """
        param = "messages" if request.chat else "prompt"
        self._check_size(prompt, param)
        try:
            if isinstance(prompt, list):
                ids = np.array(prompt, np.int64)
                check_known(ids, self._run)
                text = self._echo(prompt, request)
            elif request.chat:
                # The template writes the tokens that begin a text.
                text, ids = self._chat_encoder.prompt(request.messages)
            else:
                text = prompt
                ids = prompt_of(self._run, self._tokenizer, prompt.encode())
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
    def _is_of_chats(self) -> bool:
        """True for a run that was trained on chats, alone or in a mixture."""
        data = self._run.config.data
        sources = [data.name]
        for word in data.mix:
            sources.append(word.partition("=")[2])
        return any(source.startswith("chat:") for source in sources)

    @functools.cached_property
    def _answer_end(self) -> AnswerEnd:
        assert self.template is not None
        return answer_end(self.template, self._tokenizer)

    def _echo(self, ids: list[int], request: Request) -> str:
        """Return the text of a prompt in tokens, or '' without echo.

        An incomplete character at its end belongs to the text that follows.
        """
        if not request.echo:
            return ""
        if request.max_tokens == 0:
            return self._tokenizer.decode(ids)
        return Detokenizer(self._tokenizer, ids).prompt_text

    def _check_size(self, prompt: str | list[int], param: str) -> None:
        """Raise ApiError (400) for a text with too many characters for the model's context.

        The limit is 64 characters per token, and at least 65,536. Shorter texts are checked when
        they are encoded. Token ids are not checked here.

        Args:
            param: Field of the request that the error names.
        """
        # A prompt in token ids needs no encoding, so its length is checked later.
        size = len(prompt) if isinstance(prompt, str) else 0
        if size > max(_SHORT_PROMPT, _BYTES_PER_TOKEN * self.limit):
            raise ApiError(
                400,
                f"the prompt has {size} characters, and the model reads {self.limit} tokens; "
                "shorten it",
                param,
                "context_length_exceeded",
            )

    def _head(self, request: Request, suffix: str = "") -> dict[str, Any]:
        """Return the first fields of an answer or chunk.

        Args:
            suffix: Suffix of a chat's object type, such as ".chunk".
        """
        object_type = "text_completion"
        id_prefix = "cmpl"
        if request.chat:
            object_type = f"chat.completion{suffix}"
            id_prefix = "chatcmpl"
        return {
            "id": f"{id_prefix}-{uuid.uuid4().hex}",
            "object": object_type,
            "created": int(time.time()),
            "model": self.name,
        }


def usage(prompts: list[Prompt]) -> dict[str, int]:
    """Return the numbers of prompt tokens and written tokens, in OpenAI's form."""
    prompt_tokens = 0
    completion_tokens = 0
    for prompt in prompts:
        prompt_tokens += prompt.ids.size
        completion_tokens += sum(writing.count for writing in prompt.writings)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
