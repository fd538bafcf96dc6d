"""What a request asks for: the fields of OpenAI's API, each checked, and its errors in OpenAI's form."""

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
"""Tokens that one request may ask for."""
MOST_TEXTS = 32
"""Texts of one request, over all its prompts."""
MOST_STOPS = 4
MOST_LIKELY = 20
"""Of likeliest tokens that are named at a place."""
LARGEST_SEED = 2**63 - 1
DEEPEST = 64
"""Lists and objects within one another in a request."""
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
"""Fields that are read, of completions and of chat."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tools": ([],),
}
"""Fields of the API that are not read here: their values that change nothing."""
IGNORED = (
    "metadata",
    "parallel_tool_calls",
    "safety_identifier",
    "service_tier",
    "store",
    "tool_choice",
    "user",
)


class ApiError(Exception):
    """A request that is refused.

    Args:
        status: of HTTP.
        message: what is wrong, and what to write instead.
        param: the field.
        code: OpenAI's name of the kind of error, where it has one.
        retry_s: seconds after which the client may ask again.
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
        """OpenAI's JSON form."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A request whose fields are checked; its prompts are as they were written."""

    chat: bool
    prompts: list[str | list[int]]
    """Of completions."""
    messages: list[dict[str, Any]]
    """Of a chat."""
    model: str | None
    max_tokens: int | None
    """None leaves it to what the context has room for."""
    sampling: Sampling
    n: int
    """Texts of each prompt."""
    stops: tuple[str, ...]
    seed: int
    logprobs: int | None
    """How many of the likeliest tokens are named beside each; None asks for no probabilities."""
    echo: bool
    stream: bool
    usage: Usage
    """When a stream says what it took: never, at its end, or in every chunk."""
    ignore_eos: bool


def request(body: bytes | bytearray, *, is_chat: bool) -> Request:
    """A request from its JSON.

    Args:
        is_chat: whether it came to /v1/chat/completions.

    Raises:
        ApiError: 400 for what is no JSON object, and for the first field that is unknown or has no usable value.
    """
    try:
        fields = json.loads(body.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON in UTF-8: {error!s:.200}") from error
    if not isinstance(fields, dict):
        raise ApiError(400, "the body is no JSON object; write {...}")
    _check_values(fields)
    fields = {name: value for name, value in fields.items() if value is not None}
    _refuse_others(fields, is_chat)
    read = _Reader(fields)
    n, stream = read.whole("n", 1, 1, MOST_TEXTS), read.switch("stream")
    prompts, messages = ([], _messages(fields)) if is_chat else (_prompts(fields), [])
    if n * len(prompts) > MOST_TEXTS:
        raise ApiError(
            400,
            f"n {n} times {len(prompts)} prompts is more than {MOST_TEXTS} texts; ask in parts",
            "n",
        )
    if is_chat:
        top = read.whole("top_logprobs", 0, 0, MOST_LIKELY)
        length_field, logprobs = "max_completion_tokens", top if read.switch("logprobs") else None
        if top and logprobs is None:
            raise ApiError(400, "top_logprobs needs logprobs true", "top_logprobs")
    else:
        length_field, logprobs = "max_tokens", read.whole("logprobs", None, 0, MOST_LIKELY)
    if logprobs is not None and stream:
        raise ApiError(400, "logprobs are not streamed; leave out stream or logprobs", "logprobs")
    length_field = length_field if length_field in fields else "max_tokens"
    echo = read.switch("echo")
    return Request(
        chat=is_chat,
        prompts=prompts,
        messages=messages,
        model=read.text("model"),
        max_tokens=read.whole(length_field, None if is_chat else 16, 0 if echo else 1, LONGEST),
        sampling=Sampling(
            read.number("temperature", 1.0, 0, 100), None, read.number("top_p", 1.0, 0, 1) or 1e-9
        ),
        n=n,
        stops=_stops(fields),
        seed=read.whole("seed", int.from_bytes(os.urandom(4)) >> 1, 0, LARGEST_SEED),
        logprobs=logprobs,
        echo=echo,
        stream=stream,
        usage=_usage(fields),
        ignore_eos=read.switch("ignore_eos"),
    )


def _refuse_constant(name: str) -> Any:
    """Refuse NaN and Infinity, which Python reads though JSON has none."""
    raise ValueError(f"{name} is no number of JSON")


def _check_values(fields: dict[str, Any]) -> None:
    """Refuse values that later code or other programs cannot handle: deep ones, and halves of a surrogate pair.

    Raises:
        ApiError: 400.
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
    """Return a value for a message, cut where it is long."""
    short = reprlib.Repr()
    short.maxstring = 40
    short.maxother = 40
    return short.repr(value)[:40]


class _Reader:
    """The fields by kind; each method raises ApiError for a value of another kind or out of its range."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields

    def whole(self, name: str, default: Any, least: int, most: int) -> Any:
        value = self._fields.get(name, default)
        if name in self._fields and (type(value) is not int or not least <= value <= most):
            raise ApiError(
                400, f"{name} is {_shown(value)}; write a whole number from {least} to {most}", name
            )
        return value

    def number(self, name: str, default: float, least: float, most: float) -> float:
        value = self._fields.get(name, default)
        # The comparison is false for nan and inf. It holds for integers that no float can represent.
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
    """One prompt or several, each a string or token ids."""
    value = fields.get("prompt", "")
    several = isinstance(value, list) and (not value or type(value[0]) is not int)
    prompts = value if several else [value]
    for prompt in prompts:
        ids = isinstance(prompt, list) and prompt and all(type(i) is int and i >= 0 for i in prompt)
        if not (ids or isinstance(prompt, str)):
            raise ApiError(
                400, "prompt is a string, a list of token ids from 0, or a list of such", "prompt"
            )
        if isinstance(prompt, str) and "\0" in prompt:
            raise ApiError(400, "prompt has a NUL character; remove it", "prompt")
    if not prompts:
        raise ApiError(400, "prompt is an empty list; write at least one", "prompt")
    return prompts


def _messages(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    try:
        return templates.checked(fields.get("messages"))
    except DataError as error:
        raise ApiError(400, str(error), "messages") from error


def _stops(fields: Mapping[str, Any]) -> tuple[str, ...]:
    value = fields.get("stop", [])
    stops = [value] if isinstance(value, str) else value
    if (
        not isinstance(stops, list)
        or len(stops) > MOST_STOPS
        or not all(isinstance(s, str) and s for s in stops)
    ):
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
