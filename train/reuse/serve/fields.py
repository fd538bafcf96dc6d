"""Requests of OpenAI's API: reading and checking their fields, and errors in OpenAI's form."""

from __future__ import annotations

import dataclasses
import json
import os
import reprlib
from collections.abc import Mapping
from typing import Any, Literal

from mupax.train.data import DataError
from mupax.train.data.chats import templates
from mupax.train.reuse.generate.sampling import Sampling

Usage = Literal["never", "end", "always"]
LONGEST = 100_000
"""Largest number of tokens that one request may ask for in each text."""
MOST_TEXTS = 32
"""Largest number of texts of one request, over all its prompts."""
MOST_STOPS = 4
"""Largest number of stop strings."""
MOST_LIKELY = 20
"""Largest number of likeliest tokens that are named at each position."""
LARGEST_SEED = 2**63 - 1
DEEPEST = 64
"""Largest nesting of lists and objects in a request."""
_SAMPLED = {
    "model",
    "max_tokens",
    "temperature",
    "top_p",
    "n",
    "stop",
    "seed",
    "stream",
    "stream_options",
    "ignore_eos",
}
FIELDS = {
    False: {*_SAMPLED, "prompt", "echo", "logprobs"},
    True: {*_SAMPLED, "messages", "max_completion_tokens", "logprobs", "top_logprobs"},
}
"""Fields that are read. The key says whether the request is one of chat."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tools": ([],),
}
"""Values of unsupported fields that change nothing, and so are accepted."""
IGNORED = (
    "metadata",
    "parallel_tool_calls",
    "safety_identifier",
    "service_tier",
    "store",
    "tool_choice",
    "user",
)
"""Fields that are accepted with any value and have no effect."""


class ApiError(Exception):
    """Refusal of a request.

    Args:
        status: HTTP status, such as 400.
        message: Description of the mistake and of what to write instead.
        param: Name of the field, if the mistake is in one. `None` otherwise.
        code: OpenAI's name of this kind of error, or `None` if there is none.
        retry_s: Time after which the client may ask again, in seconds.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_s = retry_s

    def body(self) -> dict[str, Any]:
        """Return the error in OpenAI's JSON form."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """Request with checked fields. Its prompts are not encoded yet."""

    chat: bool
    prompts: list[str | list[int]]
    """Prompts of a completion, texts or token ids. Empty for a chat."""
    messages: list[dict[str, Any]]
    """Messages of a chat. Empty for a completion."""
    model: str | None
    max_tokens: int | None
    """Largest number of tokens of each text. `None` fills the context."""
    sampling: Sampling
    n: int
    """Number of texts for each prompt."""
    stops: tuple[str, ...]
    seed: int
    logprobs: int | None
    """Number of likeliest tokens named at each position. `None` requests no probabilities."""
    echo: bool
    stream: bool
    usage: Usage
    """Chunks of a stream that have the numbers of tokens: none, an extra one at the end, or all."""
    ignore_eos: bool


def request(body: bytes | bytearray, *, is_chat: bool) -> Request:
    """Parse a JSON body and return its request with checked fields.

    A request without `seed` gets a random seed.

    Args:
        is_chat: Whether the request came to /v1/chat/completions.

    Raises:
        ApiError: 400 if the body is no JSON object, or for the first field that is unknown or has
            an unusable value.
    """
    try:
        fields = json.loads(body.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON in UTF-8: {error!s:.200}") from error
    if not isinstance(fields, dict):
        raise ApiError(400, "the body is no JSON object; write {...}")
    _check_values(fields)
    # In OpenAI's API, null means the same as a field that is left out.
    fields = {name: value for name, value in fields.items() if value is not None}
    _refuse_others(fields, is_chat)
    reader = _Reader(fields)
    n = reader.whole("n", 1, 1, MOST_TEXTS)
    stream = reader.switch("stream")
    prompts = []
    messages = []
    if is_chat:
        messages = _messages(fields)
    else:
        prompts = _prompts(fields)
    if n * len(prompts) > MOST_TEXTS:
        raise ApiError(
            400,
            f"n {n} times {len(prompts)} prompts is more than {MOST_TEXTS} texts; ask in parts",
            "n",
        )
    logprobs = _logprobs(reader, is_chat)
    if logprobs is not None and stream:
        raise ApiError(400, "logprobs are not streamed; leave out stream or logprobs", "logprobs")
    echo = reader.switch("echo")

    # If a request has several mistakes, the order of these checks decides which one is reported.
    model = reader.text("model")
    max_tokens = _max_tokens(reader, is_chat, echo)
    temperature = reader.number("temperature", 1.0, 0, 100)
    # `Sampling` refuses a top_p of 0. A tiny top_p has the same effect: the likeliest token.
    top_p = reader.number("top_p", 1.0, 0, 1) or 1e-9
    stops = _stops(fields)
    random_seed = int.from_bytes(os.urandom(4)) >> 1
    return Request(
        chat=is_chat,
        prompts=prompts,
        messages=messages,
        model=model,
        max_tokens=max_tokens,
        sampling=Sampling(temperature, None, top_p),
        n=n,
        stops=stops,
        seed=reader.whole("seed", random_seed, 0, LARGEST_SEED),
        logprobs=logprobs,
        echo=echo,
        stream=stream,
        usage=_usage(fields),
        ignore_eos=reader.switch("ignore_eos"),
    )


def _logprobs(reader: _Reader, is_chat: bool) -> int | None:
    """Return the number of likeliest tokens to name, or `None` without probabilities.

    In completions, the field logprobs is that number. In chats, logprobs is true or false and
    top_logprobs the number, 0 by default.

    Raises:
        ApiError: 400 for an unusable value, or for a top_logprobs above 0 without logprobs true.
    """
    if not is_chat:
        return reader.whole("logprobs", None, 0, MOST_LIKELY)
    top = reader.whole("top_logprobs", 0, 0, MOST_LIKELY)
    if reader.switch("logprobs"):
        return top
    if top:
        raise ApiError(400, "top_logprobs needs logprobs true", "top_logprobs")
    return None


def _max_tokens(reader: _Reader, is_chat: bool, echo: bool) -> int | None:
    """Return the largest number of tokens of a text, or `None` to fill the context.

    In chats, the field max_completion_tokens replaces max_tokens. Without a field, the number is 16
    for completions and `None` for chats. 0 is allowed only with echo.

    Raises:
        ApiError: 400 for an unusable value.
    """
    name = "max_tokens"
    if is_chat and reader.has("max_completion_tokens"):
        name = "max_completion_tokens"
    # 16 is the default of OpenAI's completions. An answer in a chat ends by itself.
    default = None if is_chat else 16
    # With echo, a client can ask for the probabilities of its prompt alone.
    least = 0 if echo else 1
    return reader.whole(name, default, least, LONGEST)


def _refuse_constant(name: str) -> Any:
    """Raise `ValueError` for NaN and Infinity, which JSON lacks but `json.loads` accepts."""
    raise ValueError(f"{name} is no number of JSON")


def _check_values(fields: dict[str, Any]) -> None:
    """Refuse nesting deeper than 64 levels, and strings with half of a surrogate pair.

    Raises:
        ApiError: 400, with a message that says what to change.
    """
    level: list[Any] = [fields]
    for _ in range(DEEPEST):
        texts: list[str] = []
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                texts += value
                value = value.values()
            texts += [item for item in value if isinstance(item, str)]
            inner += [item for item in value if isinstance(item, dict | list)]
        for text in texts:
            if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
                raise ApiError(
                    400, "a string has half of a surrogate pair, which is no text; remove it"
                )
        if not inner:
            return
        level = inner
    raise ApiError(400, f"lists and objects are more than {DEEPEST} deep; write a flat request")


def _shown(value: Any) -> str:
    """Return the repr of a value for a message, at most 40 characters."""
    # `repr` would write out a value of megabytes before the message cuts it.
    short = reprlib.Repr()
    short.maxstring = 40
    short.maxother = 40
    return short.repr(value)[:40]


class _Reader:
    """Reader of a request's fields, with one method per type.

    The methods return a default for a field that is left out. All but `has` raise ApiError (400)
    for a value of another type or out of its range.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields

    def has(self, name: str) -> bool:
        return name in self._fields

    def whole(self, name: str, default: Any, least: int, most: int) -> Any:
        value = self._fields.get(name, default)
        # type() and not isinstance(), because True is an int.
        if name in self._fields and (type(value) is not int or not least <= value <= most):
            raise ApiError(
                400, f"{name} is {_shown(value)}; write a whole number from {least} to {most}", name
            )
        return value

    def number(self, name: str, default: float, least: float, most: float) -> float:
        value = self._fields.get(name, default)
        # The comparison is false for nan and inf, and exact for integers too large for a float.
        if type(value) not in (int, float) or not least <= value <= most:
            raise ApiError(
                400, f"{name} is {_shown(value)}; write a number from {least} to {most}", name
            )
        return float(value)

    def switch(self, name: str) -> bool:
        value = self._fields.get(name, False)
        if type(value) is not bool:
            raise ApiError(400, f"{name} is {_shown(value)}; write true or false", name)
        return value

    def text(self, name: str) -> str | None:
        value = self._fields.get(name)
        if value is not None and not isinstance(value, str):
            raise ApiError(400, f"{name} is {_shown(value)}; write a string", name)
        return value


def _refuse_others(fields: Mapping[str, Any], is_chat: bool) -> None:
    """Raise ApiError (400) for unknown fields, and unsupported ones with an effect."""
    for name, value in fields.items():
        if name in FIELDS[is_chat] or name in IGNORED:
            continue
        if name in NEUTRAL:
            if value in NEUTRAL[name]:
                continue
            raise ApiError(
                400, f"{name} is not supported here; leave it out", name, "unsupported_parameter"
            )
        raise ApiError(
            400,
            f"unrecognized field: {name[:60]!r}; there are {', '.join(sorted(FIELDS[is_chat]))}",
            name[:60],
        )


def _prompts(fields: Mapping[str, Any]) -> list[str | list[int]]:
    """Return the prompts in the field `prompt`, each a string or token ids. By default one, "".

    Raises:
        ApiError: 400 for another type, an empty list, or a NUL character.
    """
    value = fields.get("prompt", "")
    # A list of integers is one prompt in tokens, any other list has several prompts.
    is_several = isinstance(value, list) and (not value or type(value[0]) is not int)
    prompts = value if is_several else [value]
    for prompt in prompts:
        if not isinstance(prompt, str) and not _is_token_ids(prompt):
            raise ApiError(
                400, "prompt is a string, a list of token ids from 0, or a list of such", "prompt"
            )
        if isinstance(prompt, str) and "\0" in prompt:
            raise ApiError(400, "prompt has a NUL character; remove it", "prompt")
    if not prompts:
        raise ApiError(400, "prompt is an empty list; write at least one", "prompt")
    return prompts


def _is_token_ids(prompt: Any) -> bool:
    if not isinstance(prompt, list) or not prompt:
        return False
    return all(type(token) is int and token >= 0 for token in prompt)


def _messages(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    try:
        return templates.checked(fields.get("messages"))
    except DataError as error:
        raise ApiError(400, str(error), "messages") from error


def _stops(fields: Mapping[str, Any]) -> tuple[str, ...]:
    value = fields.get("stop", [])
    stops = [value] if isinstance(value, str) else value
    is_short_list = isinstance(stops, list) and len(stops) <= MOST_STOPS
    if not is_short_list or not all(isinstance(stop, str) and stop for stop in stops):
        raise ApiError(
            400, f"stop is a string or a list of at most {MOST_STOPS}, none of them empty", "stop"
        )
    return tuple(stops)


def _usage(fields: Mapping[str, Any]) -> Usage:
    options = fields.get("stream_options", {})
    flags = ("include_usage", "continuous_usage_stats", "include_obfuscation")
    if not isinstance(options, dict) or options.keys() - {*flags}:
        raise ApiError(
            400, 'stream_options is {"include_usage": true} or left out', "stream_options"
        )
    if options and not fields.get("stream"):
        raise ApiError(400, "stream_options needs stream true", "stream_options")
    if not options.get("include_usage"):
        return "never"
    return "always" if options.get("continuous_usage_stats") else "end"
