"""HTTP around a `Service`: uvicorn has the connections, starlette the routes.

Bodies of requests have a bound on each and on all together.

Uvicorn's protocol has limits on time, and errors in OpenAI's form.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib.resources
import ipaddress
import json
import socket
import time
import types
import urllib.parse
from collections.abc import AsyncIterator
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from mupax import command_line, memory, terminal
from mupax.train.reuse.serve import fields
from mupax.train.reuse.serve.fields import ApiError
from mupax.train.reuse.serve.logs import one_line
from mupax.train.reuse.serve.service import RETRY_S, Answer, Service, usage

HEAD_S = 15.0
"""How long the head of a request may take."""
WRITE_S = 60.0
"""How long a client may read nothing of what is sent to it."""
LINGER_S = 2.0
"""How long what comes after a refusal is read and thrown away."""
LARGEST_HEAD = 1 << 15
"""Bytes of the head of a request."""

LARGEST = 1 << 24
"""Bytes of one body."""
LARGEST_TOTAL = 1 << 26
"""Bytes of all bodies that are read or parsed at a time."""
BODY_S = 60.0
"""How long a body may take to come."""
_BIG = 1 << 20
"""Bytes of a body that is parsed alone: what Python makes of JSON can take twenty times its size."""

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

_BACKLOG = 128
_CONNECTIONS = 512
"""Connections at a time. Further ones are answered 503."""
_IDLE_S = 60
"""How long a connection may be open between requests."""
_SHUTDOWN_S = 1
"""How long answers may go on after Ctrl-C."""


class LimitedProtocol(H11Protocol):
    """A connection that is closed if its client sends a head, or reads an answer, too slowly.

    Uvicorn itself limits only the time between requests.
    """

    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _head_bytes = 0
    """Bytes of a head that is not complete."""
    _is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(HEAD_S, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_timer = _cancelled(self._head_timer)
        self._write_timer = _cancelled(self._write_timer)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self.conn.their_state is h11.IDLE:
            self._head_bytes += len(data)
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._head_bytes = 0
            self._head_timer = _cancelled(self._head_timer)
        elif self._head_timer is None and not self.transport.is_closing():
            # The head of another request has begun on this connection.
            self._head_timer = self.loop.call_later(HEAD_S, self._give_up)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(WRITE_S, self._give_up)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._write_timer = _cancelled(self._write_timer)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, or has a head that is too long."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # who answers this request reads and writes no more
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # an answer has begun
            self.transport.close()
            return
        error = ApiError(400, "this is no request of HTTP/1.1")
        if self._head_bytes > LARGEST_HEAD:
            error = ApiError(431, f"the head of the request has more than {LARGEST_HEAD} bytes")
        body = json.dumps(error.body()).encode()
        headers: list[tuple[bytes, Any]] = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        for event in (
            h11.Response(status_code=error.status, headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        # What still comes is thrown away for a moment: closed at once, its sender would see no answer.
        self._is_refused = True
        self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            self.transport.abort()


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def is_local(host: str) -> bool:
    """Return True if only this machine reaches the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listening(host: str, port: int, backlog: int) -> socket.socket:
    """Return a socket that listens.

    Args:
        host: address to listen at.
        port: 0 for any.
        backlog: connections that may wait to be accepted.

    Raises:
        UsageError: this machine has no such address, or the port is taken.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(backlog)
    except (OSError, OverflowError) as error:
        listener.close()
        raise command_line.UsageError(
            f"cannot listen at {host} port {port}: {getattr(error, 'strerror', None) or error}; write another --port "
            "(0 takes any), or an address of this machine as --host"
        ) from error
    return listener


class ClientLeft(Exception):
    """A client that closed its connection."""


class Bodies:
    """Bodies that are in memory."""

    def __init__(self) -> None:
        self._total = 0
        self._one_big = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def read(self, scope: Any, receive: Any) -> AsyncIterator[bytearray]:
        """Read a body, which counts as being in memory while entered.

        Raises:
            ApiError: 408, 411, 413, 415 or 503.
            ClientLeft: the client closed its connection.
        """
        headers = dict(scope["headers"])
        _check_headers(headers)
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                await self._fill(body, receive)
        except TimeoutError:
            self._release(body)
            raise ApiError(408, f"the body did not come within {BODY_S:.0f} s") from None
        except BaseException:
            self._release(body)
            raise
        is_big = len(body) > _BIG
        try:
            async with self._one_big if is_big else contextlib.nullcontext():
                yield body
        finally:
            self._release(body)
            if is_big:
                _give_back_memory()

    async def _fill(self, body: bytearray, receive: Any) -> None:
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            part = message.get("body", b"")
            if len(body) + len(part) > LARGEST:
                raise ApiError(413, f"the body has more than {LARGEST} bytes")
            # Bytes count when they come. A client that only says that it will send many takes nothing from others.
            if self._total + len(part) > LARGEST_TOTAL:
                raise ApiError(503, "too many large bodies at a time; ask again later", retry_s=5)
            self._total += len(part)
            body += part
            more = message.get("more_body", False)

    def _release(self, body: bytearray) -> None:
        self._total -= len(body)
        body.clear()


def _check_headers(headers: dict[bytes, bytes]) -> None:
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")
    if kind != "application/json":  # which a page of another site cannot send unasked
        raise ApiError(
            415,
            f"the body is {kind or 'of no type'}; send JSON with the header Content-Type: application/json",
        )
    size = headers.get(b"content-length")
    if size is None:
        if b"transfer-encoding" not in headers:
            raise ApiError(411, "the header Content-Length is missing")
        return
    if int(size) > LARGEST:
        raise ApiError(413, f"the body has {int(size)} bytes; at most {LARGEST} are read")


async def discard(receive: Any) -> None:
    """Read the rest of a body and throw it away, for a short time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            message = await receive()
            while message["type"] == "http.request" and message.get("more_body", False):
                message = await receive()


def _give_back_memory() -> None:
    """Return free memory to the system. The C library keeps it otherwise (`mupax.train.parallel.hardware`)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


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
        self._routes = Starlette(
            routes=routes, exception_handlers={ApiError: _refused, HTTPException: _not_routed}
        )
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
                    failed = ApiError(
                        503, "the server ran out of memory; ask for less, or later", retry_s=RETRY_S
                    )
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
        if b"transfer-encoding" in names and (
            b"content-length" in names or scope["http_version"] == "1.0"
        ):
            # A proxy that goes by the other header would see another request in this body.
            raise ApiError(
                400,
                "Transfer-Encoding is no header of a request with Content-Length or of HTTP/1.0",
            )
        if self._is_local:
            # A page of another site, whose name leads here, must not use the model.
            host = dict(scope["headers"]).get(b"host", b"localhost").decode("latin-1")
            name = host.rpartition(":" if "]" not in host else "]:")
            if not is_local((name[0] or name[2]).strip("[]")):
                raise ApiError(403, "this server is for its own machine; ask for localhost")

    async def _page(self, request: Request) -> Response:
        page = (
            importlib.resources.files(__name__.rpartition(".")[0])
            .joinpath("page.html")
            .read_bytes()
        )
        headers = {**_SAFE, "Content-Security-Policy": _POLICY}
        return Response(page, media_type="text/html", headers=headers)

    async def _health(self, request: Request) -> Response:
        if self._service.is_well:
            return _json({"status": "ok"})
        return _json(
            {"status": "the worker is dead or makes no progress"},
            503,
            {"Retry-After": str(RETRY_S)},
        )

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
        super().__init__(
            events, headers={**_SAFE, "Cache-Control": "no-cache"}, media_type="text/event-stream"
        )
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
    terminal.note(
        f"{path}: {used['prompt_tokens']} tokens read, {used['completion_tokens']} made in {seconds:.2f} s"
    )


def _json(
    answer: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None
) -> Response:
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
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        if scope["method"] == "POST":
            await discard(receive)
        await send({"type": "http.response.body", "body": b""})


class Server:
    """The server. It listens at once, so that a taken port is noticed before weights are read; `serve_forever` answers.

    Args:
        host: address to listen at.
        port: 0 for any.

    Raises:
        UsageError: this machine has no such address, or the port is taken.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._listener = listening(host, port, _BACKLOG)
        self._uvicorn: uvicorn.Server | None = None
        self._is_stopping = False
        self.local = is_local(host)
        """True if only this machine is answered."""
        self.server_port: int = self._listener.getsockname()[1]
        self.service: Service | None = None

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self._listener.close()

    @property
    def url(self) -> str:
        """Address for a browser."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self.server_port}/"

    def serve_forever(self) -> None:
        """Answer requests until `shutdown`, or a signal."""
        assert self.service is not None
        config = uvicorn.Config(
            App(self.service, is_local=self.local),
            loop="asyncio",
            http=LimitedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # what a client does wrong is no news for the log
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=_CONNECTIONS,
            backlog=_BACKLOG,
            timeout_keep_alive=_IDLE_S,
            timeout_graceful_shutdown=_SHUTDOWN_S,
            h11_max_incomplete_event_size=LARGEST_HEAD,
        )
        self._uvicorn = uvicorn.Server(config)
        self._uvicorn.should_exit = self._is_stopping
        self._uvicorn.run(sockets=[self._listener])

    def shutdown(self) -> None:
        """Let `serve_forever` return. To be called from another thread."""
        self._is_stopping = True
        if self._uvicorn is not None:
            self._uvicorn.should_exit = True
