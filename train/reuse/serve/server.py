"""HTTP server around a `Service`: uvicorn handles the connections, starlette the routes.

On top of them, this file limits the size of request bodies and the time of slow clients, and gives
errors in OpenAI's form.
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
from mupax.terminal import counted
from mupax.train.reuse.serve import fields
from mupax.train.reuse.serve.fields import ApiError
from mupax.train.reuse.serve.logs import one_line
from mupax.train.reuse.serve.service import RETRY_S, Answer, Service, usage

HEAD_S = 15.0
"""Time limit for the head of a request, in seconds."""
WRITE_S = 60.0
"""Longest time, in seconds, in which a client may read nothing of its answer."""
LINGER_S = 2.0
"""Time in seconds after a refusal during which further bytes are read and thrown away."""
LARGEST_HEAD = 1 << 15
"""Largest head of a request, in bytes."""

LARGEST = 1 << 24
"""Largest body of a request, in bytes."""
LARGEST_TOTAL = 1 << 26
"""Largest total of all bodies in memory at a time, in bytes."""
BODY_S = 60.0
"""Time limit for the body of a request, in seconds."""
_BIG = 1 << 20
"""Size above which bodies are parsed one at a time, in bytes.

Parsed JSON can take twenty times its size in Python.
"""

# The page may load nothing but itself and this server's answers.
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
"""Content security policy of the page."""
_COMPLETIONS = "/v1/completions"
_CHAT = "/v1/chat/completions"
_MODELS = "/v1/models"
_PATHS = ("/", "/health", _MODELS, f"{_MODELS}/NAME", _COMPLETIONS, _CHAT)
_BODY_READ = "mupax.body_read"
"""Key in a request's scope. It is set when the complete body has been read."""
_SAFE = {"X-Content-Type-Options": "nosniff"}

_BACKLOG = 128
_CONNECTIONS = 512
"""Largest number of connections. Further ones are answered 503."""
_IDLE_S = 60
"""Time limit for a connection between two requests, in seconds."""
_SHUTDOWN_S = 1
"""Time limit for open answers after Ctrl-C, in seconds."""


class LimitedProtocol(H11Protocol):
    """Connection that is closed if its client sends a head, or reads an answer, too slowly.

    Uvicorn itself limits only the time between requests.
    """

    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _head_bytes = 0
    """Number of bytes of an incomplete head."""
    _is_refused = False

    def connection_made(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, transport: asyncio.Transport
    ) -> None:
        super().connection_made(transport)
        # Clients that connect and send nothing would otherwise use up all connections.
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
        """Answer 400 to bytes that are no HTTP, or 431 to a head that is too long, and disconnect.

        The connection is closed after `LINGER_S`, or at once if an answer has already begun. `msg`
        is not used.
        """
        if self.cycle is not None and not self.cycle.response_complete:
            # The request before this one is still answered. Its answer is given up.
            self.cycle.disconnected = True
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
        events = (
            h11.Response(status_code=error.status, headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        )
        for event in events:
            self.transport.write(self.conn.send(event) or b"")
        # If the connection were closed at once, a client that still sends would see no answer.
        self._is_refused = True
        self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)

    def _give_up(self) -> None:
        """Close the connection without sending the rest of an answer."""
        if not self.transport.is_closing():
            # `close` would wait until the client has read what is buffered. This client may never
            # read it.
            self.transport.abort()


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    """Cancel a timer. Return `None` to assign in its place."""
    if timer is not None:
        timer.cancel()


def is_local(host: str) -> bool:
    """Return whether an address is a loopback address or `localhost`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listening(host: str, port: int, backlog: int) -> socket.socket:
    """Return a listening socket.

    Args:
        host: IP address or name of this machine. An address with a colon is one of IPv6.
        port: 0 takes any free port.
        backlog: Largest number of connections that wait to be accepted.

    Raises:
        UsageError: This machine has no such address, or the port is in use, not permitted or
            above 65535.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = None
    try:
        # On a machine without IPv6, making the socket already raises OSError.
        listener = socket.socket(family)
        # Without this, a server that is soon started again could find its port in TIME_WAIT.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(backlog)
    except (OSError, OverflowError) as error:
        if listener is not None:
            listener.close()
        # An OverflowError, of a port beyond 65535, has no strerror.
        reason = getattr(error, "strerror", None) or error
        raise command_line.UsageError(
            f"cannot listen at {host} port {port}: {reason}; write another --port "
            "(0 takes any), or an address of this machine as --host"
        ) from error
    return listener


class ClientLeft(Exception):
    """Exception for a client that closed its connection."""


class Bodies:
    """Reader of request bodies that limits their total size in memory."""

    def __init__(self) -> None:
        self._total = 0
        """Size of all bodies in memory, in bytes."""
        self._big_lock = asyncio.Lock()
        """Lock held while a big body is parsed."""

    @contextlib.asynccontextmanager
    async def read(self, scope: Any, receive: Any) -> AsyncIterator[bytearray]:
        """Context manager that reads a body and empties it on exit, to free its memory.

        Bodies above 1 MiB wait until no other such body is in use.

        Raises:
            ApiError: 408 too slow, 411 or 415 a wrong header, 413 too large, 503 too many bodies.
            ClientLeft: The client closed its connection.
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
            async with self._big_lock if is_big else contextlib.nullcontext():
                yield body
        finally:
            self._release(body)
            if is_big:
                _give_back_memory()

    async def _fill(self, body: bytearray, receive: Any) -> None:
        """Append the parts of a request's body until it is complete.

        Raises:
            ApiError: 413 if the body is too large, 503 if all bodies together are.
            ClientLeft: The client closed its connection.
        """
        is_complete = False
        while not is_complete:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            part = message.get("body", b"")
            if len(body) + len(part) > LARGEST:
                raise ApiError(413, f"the body has more than {LARGEST} bytes")
            # Bytes count when they come, not when a header announces them. A client that announces
            # a large body and sends nothing would otherwise block other clients.
            if self._total + len(part) > LARGEST_TOTAL:
                raise ApiError(503, "too many large bodies at a time; ask again later", retry_s=5)
            self._total += len(part)
            body += part
            is_complete = not message.get("more_body", False)

    def _release(self, body: bytearray) -> None:
        self._total -= len(body)
        body.clear()


def _check_headers(headers: dict[bytes, bytes]) -> None:
    """Raise ApiError for headers of a body that is not JSON, or is too large.

    A body without Content-Length and Transfer-Encoding is refused, too.
    """
    content_type, _, _ = headers.get(b"content-type", b"").partition(b";")
    media_type = content_type.strip().lower().decode("latin-1")
    # A page of another site cannot send this type without asking this server first (CORS).
    if media_type != "application/json":
        raise ApiError(
            415,
            f"the body is {media_type or 'of no type'}; send JSON with the header "
            "Content-Type: application/json",
        )
    size = headers.get(b"content-length")
    if size is None:
        if b"transfer-encoding" not in headers:
            raise ApiError(411, "the header Content-Length is missing")
        return
    if int(size) > LARGEST:
        raise ApiError(413, f"the body has {int(size)} bytes; at most {LARGEST} are read")


async def discard(receive: Any) -> None:
    """Read the rest of a body and throw it away, for at most `LINGER_S` seconds."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            message = await receive()
            while message["type"] == "http.request" and message.get("more_body", False):
                message = await receive()


def _give_back_memory() -> None:
    """Let glibc return freed memory to the system. Does nothing with other C libraries."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
    if trim is not None:
        trim(0)


class App:
    """ASGI application: routes of the API, and errors in OpenAI's form.

    Before routing, it refuses requests that a proxy may read differently or that a page of another
    site may have sent.

    Args:
        is_local: Whether only this machine is answered, so that other host names are refused.
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
        # Starlette would redirect a path that has a slash too many, where the API has an error.
        self._routes.router.redirect_slashes = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one HTTP request. See the ASGI specification for the arguments.

        An unexpected error is logged. If no answer has begun, it is answered 500, or 503 if memory
        ran out.
        """
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
                # The body is complete, so a later refusal can keep the connection (`_refused`).
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
        """Raise ApiError if the head of a request is not acceptable.

        This holds for another version of HTTP, a head that is too large, and two different lengths
        of the body. If only this machine is answered, the header Host must name it.
        """
        names = [name for name, _ in scope["headers"]]
        if scope["http_version"] not in ("1.0", "1.1"):
            raise ApiError(505, "this server speaks HTTP/1.1")
        size = len(scope["raw_path"]) + len(scope["query_string"])
        # A line of the head has four bytes more than its name and value.
        size += sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        if size > LARGEST_HEAD:
            raise ApiError(431, f"the head of the request has more than {LARGEST_HEAD} bytes")
        # With both headers, a proxy that goes by the other one would see another request in this
        # body (request smuggling). HTTP/1.0 has no Transfer-Encoding.
        is_ambiguous = b"content-length" in names or scope["http_version"] == "1.0"
        if b"transfer-encoding" in names and is_ambiguous:
            raise ApiError(
                400,
                "Transfer-Encoding is no header of a request with Content-Length or of HTTP/1.0",
            )
        if self._is_local:
            # A page of another site can point its own name to this machine (DNS rebinding). It
            # must not use the model.
            host = dict(scope["headers"]).get(b"host", b"localhost").decode("latin-1")
            port_separator = "]:" if "]" in host else ":"
            before, _, after = host.rpartition(port_separator)
            # Without a port, all of the host is in the last part.
            name = before or after
            if not is_local(name.strip("[]")):
                raise ApiError(403, "this server is for its own machine; ask for localhost")

    async def _page(self, request: Request) -> Response:
        package = __name__.rpartition(".")[0]
        page = importlib.resources.files(package).joinpath("page.html").read_bytes()
        headers = {**_SAFE, "Content-Security-Policy": _POLICY}
        return Response(page, media_type="text/html", headers=headers)

    async def _health(self, request: Request) -> Response:
        if self._service.is_well:
            return _json({"status": "ok"})
        if not self._service.is_alive:
            return _json({"status": "the model's thread is dead; restart the server"}, 503)
        return _json(
            {"status": "the model's thread makes no progress"}, 503, {"Retry-After": str(RETRY_S)}
        )

    async def _models(self, request: Request) -> Response:
        return _json(self._service.models())

    async def _model(self, request: Request) -> Response:
        name = request.scope["raw_path"].decode("ascii").removeprefix(f"{_MODELS}/")
        if not name:
            raise HTTPException(404)
        # A percent sign in the name may come unescaped, so the raw path is compared first.
        if name != self._service.name:
            name = urllib.parse.unquote(name)
        return _json(self._service.model(name))

    async def _completions(self, request: Request) -> Response:
        began = time.monotonic()
        path = request.url.path
        async with self._bodies.read(request.scope, request.receive) as body:
            # In a thread, because encoding a long prompt would hold up all other connections.
            prompts, parsed = await asyncio.to_thread(self._parsed, body, path == _CHAT)
        client = request.client.host if request.client else ""
        # The memory of the body is free from here on, while the answer may take minutes.
        answer = self._service.queue(parsed, prompts, client)
        if parsed.stream:
            return _Stream(self._events(answer, path, began), answer)
        completed = await self._complete_or_leave(answer, request)
        _log(path, completed["usage"], began)
        return _json(completed)

    def _parsed(self, body: bytearray, is_chat: bool) -> tuple[Any, fields.Request]:
        """Parse a body. Return its prompts in tokens and its request. Call it in a thread."""
        parsed = fields.request(body, is_chat=is_chat)
        return self._service.begin(parsed), parsed

    async def _complete_or_leave(self, answer: Answer, request: Request) -> dict[str, Any]:
        """Wait for the complete answer and return it. Raise `ClientLeft` if the client leaves."""
        disconnection = asyncio.create_task(_wait_for_disconnection(request))
        completion = asyncio.create_task(self._service.complete(answer))
        try:
            tasks = (disconnection, completion)
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not completion.done():
                raise ClientLeft
            return completion.result()
        finally:
            answer.cancel()
            disconnection.cancel()
            completion.cancel()

    async def _events(self, answer: Answer, path: str, began: float) -> AsyncIterator[str]:
        """Yield the server-sent events of a streamed answer, and log the request at its end.

        An error of the worker becomes an event. The last event is always `[DONE]`.
        """
        try:
            async for chunk in self._service.stream(answer):
                yield f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"
        except ApiError as error:
            yield f"data: {json.dumps(error.body(), ensure_ascii=False)}\n\n"
        yield "data: [DONE]\n\n"
        _log(path, usage(answer.prompts), began)


class _Stream(StreamingResponse):
    """Response that streams events. When it ends or the client leaves, its texts are cancelled."""

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


async def _wait_for_disconnection(request: Request) -> None:
    """Wait until the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _log(path: str, token_counts: dict[str, int], began: float) -> None:
    """Print a line for an answered request: its token counts (of `usage`) and seconds.

    Args:
        path: Route of the request, such as `/v1/completions`.
        began: `time.monotonic()` when the request came.
    """
    num_read = token_counts["prompt_tokens"]
    num_made = token_counts["completion_tokens"]
    seconds = time.monotonic() - began
    terminal.note(f"{path}: {counted(num_read, 'token')} read, {num_made} made in {seconds:.2f} s")


def _json(
    answer: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    # The model's name is that of a folder, which may have bytes that are no UTF-8.
    body = json.dumps(answer, ensure_ascii=False).encode("utf-8", "replace")
    return Response(body, status, {**_SAFE, **(headers or {})}, "application/json")


def _refused(request: Request, error: Any) -> Response:
    """Return a refusal. It closes the connection if the request's body has not been read."""
    if request.method == "POST" and _BODY_READ not in request.scope:
        return _ClosingRefusal(error)
    return _json(error.body(), error.status, _retry(error))


def _not_routed(request: Request, error: Any) -> Response:
    """Return the refusal of an unknown path, or of a wrong method on a known one."""
    path = request.url.path
    if error.status_code == 405:
        allowed = "POST" if path in (_COMPLETIONS, _CHAT) else "GET"
        return _refused(request, ApiError(405, f"{path[:80]} takes {allowed}"))
    return _refused(request, ApiError(404, f"no {path[:80]!r}; there are {', '.join(_PATHS)}"))


def _retry(error: ApiError) -> dict[str, str]:
    """Return the header `Retry-After`, or no header if the error has no `retry_s`."""
    return {} if error.retry_s is None else {"Retry-After": str(error.retry_s)}


class _ClosingRefusal(Response):
    """Refusal after which the connection is closed.

    The rest of the request's body is read and thrown away for a short time. If the connection were
    closed at once, a client that still sends would see a broken pipe and no answer.
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
    """HTTP server. It listens when it is made, and `serve_forever` answers.

    A port that is in use is therefore noticed before weights are read.

    Args:
        host: IP address or name of this machine. An address with a colon is one of IPv6.
        port: 0 takes any free port.

    Raises:
        UsageError: This machine has no such address, or the port is in use.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._listener = listening(host, port, _BACKLOG)
        self._uvicorn: uvicorn.Server | None = None
        self._is_stopping = False
        self.local = is_local(host)
        """Whether only this machine is answered."""
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
        """Answer requests until `shutdown` or a signal. `service` must be set before."""
        assert self.service is not None
        config = uvicorn.Config(
            App(self.service, is_local=self.local),
            loop="asyncio",
            http=LimitedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # mistakes of clients do not belong in the log
            access_log=False,
            # The queue shares slots by client address. With these headers a client could claim any
            # address in X-Forwarded-For.
            proxy_headers=False,
            server_header=False,
            limit_concurrency=_CONNECTIONS,
            backlog=_BACKLOG,
            timeout_keep_alive=_IDLE_S,
            timeout_graceful_shutdown=_SHUTDOWN_S,
            h11_max_incomplete_event_size=LARGEST_HEAD,
        )
        self._uvicorn = uvicorn.Server(config)
        # `shutdown` may have been called before `_uvicorn` existed.
        self._uvicorn.should_exit = self._is_stopping
        self._uvicorn.run(sockets=[self._listener])

    def shutdown(self) -> None:
        """Let `serve_forever` return. Call it from another thread."""
        self._is_stopping = True
        if self._uvicorn is not None:
            self._uvicorn.should_exit = True
