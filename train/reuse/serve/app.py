"""Routes of the server, and what stands before all of them."""

from __future__ import annotations

import asyncio
import importlib.resources
import json
import time
import urllib.parse
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from mupax import memory, terminal
from mupax.train.reuse.serve import bodies, fields
from mupax.train.reuse.serve.addresses import is_local
from mupax.train.reuse.serve.bodies import Bodies, ClientLeft
from mupax.train.reuse.serve.fields import ApiError
from mupax.train.reuse.serve.logs import one_line
from mupax.train.reuse.serve.protocol import LARGEST_HEAD
from mupax.train.reuse.serve.service import RETRY_S, Answer, Service, usage

_POLICY = "; ".join(
    (
        "default-src 'none'",
        "style-src 'unsafe-inline'",
        "script-src 'unsafe-inline'",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""What the page may load: nothing but itself and this server's answers."""
_COMPLETIONS = "/v1/completions"
_CHAT = "/v1/chat/completions"
_MODELS = "/v1/models"
_PATHS = ("/", "/health", _MODELS, f"{_MODELS}/NAME", _COMPLETIONS, _CHAT)
_BODY_READ = "mupax.body_read"
"""Set in a request's scope when all of its body has been read."""
_SAFE = {"X-Content-Type-Options": "nosniff"}


class App:
    """The application of ASGI.

    Requests that a proxy may read otherwise, or that a page of another site may have sent, are refused before they are routed.

    Args:
        is_local: whether only this machine is answered.
    """

    def __init__(self, service: Service, *, is_local: bool) -> None:
        self._service = service
        self._is_local = is_local
        self._bodies = Bodies()
        routes = [
            Route("/", self._page, methods=["GET"]),
            Route("/health", self._health, methods=["GET"]),
            Route(_MODELS, self._models, methods=["GET"]),
            Route(f"{_MODELS}/{{name:path}}", self._model, methods=["GET"]),
            Route(_COMPLETIONS, self._completions, methods=["POST"]),
            Route(_CHAT, self._completions, methods=["POST"]),
        ]
        self._routes = Starlette(routes=routes, exception_handlers={ApiError: _refused, HTTPException: _not_routed})
        self._routes.router.redirect_slashes = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        has_begun = False

        async def watched_send(message: Any) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        async def watched_receive() -> Any:
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body", False):
                scope[_BODY_READ] = True
            return message

        try:
            self._check(scope)
            await self._routes(scope, watched_receive, watched_send)
        except ApiError as error:
            await _ClosingRefusal(error)(scope, receive, send)
        except ClientLeft:
            return
        except Exception as error:
            terminal.note(f"error: {one_line(scope['path'])[:80]}: {one_line(repr(error))[:300]}")
            if not has_begun:
                failed = ApiError(500, "the server failed; its log says how")
                if memory.exhausted(error):
                    failed = ApiError(503, "the server ran out of memory; ask for less, or later", retry_s=RETRY_S)
                await _ClosingRefusal(failed)(scope, receive, send)

    def _check(self, scope: Any) -> None:
        """Refuse a request by its headers alone."""
        names = [name for name, _ in scope["headers"]]
        if scope["http_version"] not in ("1.0", "1.1"):
            raise ApiError(505, "this server speaks HTTP/1.1")
        size = len(scope["raw_path"]) + len(scope["query_string"])
        # A line of the head has four bytes more than its name and value.
        size += sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        if size > LARGEST_HEAD:
            raise ApiError(431, f"the head of the request has more than {LARGEST_HEAD} bytes")
        if b"transfer-encoding" in names and (b"content-length" in names or scope["http_version"] == "1.0"):
            # A proxy that goes by the other header would see another request in this body.
            raise ApiError(400, "Transfer-Encoding is no header of a request with Content-Length or of HTTP/1.0")
        if self._is_local:
            # A page of another site, whose name leads here, must not use the model.
            host = dict(scope["headers"]).get(b"host", b"localhost").decode("latin-1")
            name = host.rpartition(":" if "]" not in host else "]:")
            if not is_local((name[0] or name[2]).strip("[]")):
                raise ApiError(403, "this server is for its own machine; ask for localhost")

    async def _page(self, request: Request) -> Response:
        page = importlib.resources.files(__name__.rpartition(".")[0]).joinpath("page.html").read_bytes()
        headers = {**_SAFE, "Content-Security-Policy": _POLICY}
        return Response(page, media_type="text/html", headers=headers)

    async def _health(self, request: Request) -> Response:
        if self._service.is_well:
            return _json({"status": "ok"})
        return _json({"status": "the worker is dead or makes no progress"}, 503, {"Retry-After": str(RETRY_S)})

    async def _models(self, request: Request) -> Response:
        return _json(self._service.models())

    async def _model(self, request: Request) -> Response:
        written = request.scope["raw_path"].decode("ascii").removeprefix(f"{_MODELS}/")
        if not written:
            raise HTTPException(404)
        is_plain = written == self._service.name  # a client may send a percent sign as it is
        return _json(self._service.model(written if is_plain else urllib.parse.unquote(written)))

    async def _completions(self, request: Request) -> Response:
        began = time.monotonic()
        path = request.url.path
        async with self._bodies.read(request.scope, request.receive) as body:
            prompts, parsed = await asyncio.to_thread(self._parsed, body, path == _CHAT)
        client = request.client.host if request.client else ""
        answer = self._service.queue(parsed, prompts, client)
        if parsed.stream:
            return _Stream(self._events(answer, path, began), answer)
        completed = await self._complete_or_leave(answer, request)
        _log(path, completed["usage"], began)
        return _json(completed)

    def _parsed(self, body: bytearray, is_chat: bool) -> tuple[Any, fields.Request]:
        parsed = fields.request(body, is_chat=is_chat)
        return self._service.begin(parsed), parsed

    async def _complete_or_leave(self, answer: Answer, request: Request) -> dict[str, Any]:
        """Return the whole answer, or end its work when the client leaves."""
        left = asyncio.create_task(_left(request))
        completed = asyncio.create_task(self._service.complete(answer))
        try:
            await asyncio.wait((left, completed), return_when=asyncio.FIRST_COMPLETED)
            if not completed.done():
                raise ClientLeft
            return completed.result()
        finally:
            answer.cancel()
            left.cancel()
            completed.cancel()

    async def _events(self, answer: Answer, path: str, began: float) -> AsyncIterator[str]:
        """Yield the events of a stream."""
        try:
            async for chunk in self._service.stream(answer):
                yield f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"
        except ApiError as error:
            yield f"data: {json.dumps(error.body(), ensure_ascii=False)}\n\n"
        yield "data: [DONE]\n\n"
        _log(path, usage(answer.prompts), began)


class _Stream(StreamingResponse):
    """A stream of events whose work ends with it, also when its client leaves."""

    def __init__(self, events: AsyncIterator[str], answer: Answer) -> None:
        super().__init__(events, headers={**_SAFE, "Cache-Control": "no-cache"}, media_type="text/event-stream")
        self._answer = answer

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.cancel()


async def _left(request: Request) -> None:
    """Return when the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _log(path: str, used: dict[str, int], began: float) -> None:
    seconds = time.monotonic() - began
    terminal.note(f"{path}: {used['prompt_tokens']} tokens read, {used['completion_tokens']} made in {seconds:.2f} s")


def _json(answer: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    body = json.dumps(answer, ensure_ascii=False).encode("utf-8", "replace")
    return Response(body, status, {**_SAFE, **(headers or {})}, "application/json")


def _refused(request: Request, error: Any) -> Response:
    """Return a refusal. Where a body has not been read the connection is closed after it."""
    if request.method == "POST" and _BODY_READ not in request.scope:
        return _ClosingRefusal(error)
    return _json(error.body(), error.status, _retry(error))


def _not_routed(request: Request, error: Any) -> Response:
    path = request.url.path
    if error.status_code == 405:
        allowed = "POST" if path in (_COMPLETIONS, _CHAT) else "GET"
        return _refused(request, ApiError(405, f"{path[:80]} takes {allowed}"))
    return _refused(request, ApiError(404, f"no {path[:80]!r}; there are {', '.join(_PATHS)}"))


def _retry(error: ApiError) -> dict[str, str]:
    return {} if error.retry_s is None else {"Retry-After": str(error.retry_s)}


class _ClosingRefusal(Response):
    """A refusal after which the connection is closed. What still comes of the body is thrown away for a short time.

    If the connection were closed at once, a client that still sends would see a broken pipe and no answer.
    """

    def __init__(self, error: ApiError) -> None:
        answer = _json(error.body(), error.status, {"Connection": "close", **_retry(error)})
        super().__init__(answer.body, answer.status_code)
        self.raw_headers = answer.raw_headers

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        if scope["method"] == "POST":
            await bodies.discard(receive)
        await send({"type": "http.response.body", "body": b""})
