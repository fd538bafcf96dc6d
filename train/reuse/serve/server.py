"""HTTP around a `Service`, by the standard library: a thread per connection, which waits for the one that has the device."""

from __future__ import annotations

import http.server
import importlib.resources
import ipaddress
import json
import socket
import sys
import time
import urllib.parse
from collections.abc import Mapping
from typing import Any

from mupax import command_line, terminal
from mupax.train.reuse.serve import fields
from mupax.train.reuse.serve.fields import ApiError
from mupax.train.reuse.serve.service import Service

LARGEST = 1 << 24
"""Bytes of a request."""
_IDLE_S = 60.0
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
_POSTS = {"/v1/completions": False, "/v1/chat/completions": True}
_GETS = ("/", "/health", "/v1/models")
_MODEL = "/v1/models/"
"""Beginning of a path that names a model; its name may have slashes, and is percent-encoded."""


class Server(http.server.ThreadingHTTPServer):
    """The server; it has its address at once, and takes requests in `serve_forever`.

    Args:
        host: address to listen at.
        port: 0 for any.

    Raises:
        UsageError: no such address here, or the port is taken.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int) -> None:
        self.service: Service | None = None
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.local, self._host = is_local(host), host
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            raise command_line.UsageError(
                f"cannot listen at {host} port {port}: {getattr(error, 'strerror', None) or error}; write another --port "
                "(0 takes any), or an address of this machine as --host"
            ) from error

    def server_bind(self) -> None:
        # HTTPServer's own asks a name server what this machine is called.
        super(http.server.HTTPServer, self).server_bind()
        self.server_name, self.server_port = self._host, self.server_address[1]

    @property
    def url(self) -> str:
        """Where a browser finds it."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A client that is gone is no error; of others the message.
        error = sys.exc_info()[1]
        if not isinstance(error, ConnectionError | TimeoutError):
            terminal.note(f"error: of a request: {error!r}")


def is_local(host: str) -> bool:
    """Whether only this machine reaches the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "mupax", ""
    timeout = _IDLE_S

    def do_GET(self) -> None:
        self._answered(self._get)

    def do_POST(self) -> None:
        self._answered(self._post)

    def _get(self) -> None:
        path = self._path()
        if path in _POSTS:
            raise ApiError(405, f"{path} takes POST")
        if path.startswith(_MODEL):
            written = path.removeprefix(_MODEL)
            name = urllib.parse.unquote(written)
            if written == self._service().name:  # a client may send a percent sign as it is
                name = written
            self._send_json(200, self._service().model(name))
        elif path == "/":
            page = importlib.resources.files(__name__.rpartition(".")[0]).joinpath("page.html").read_bytes()
            self._send(200, page, "text/html; charset=utf-8", {"Content-Security-Policy": _POLICY})
        elif path == "/health":
            self._send_json(200, {"status": "ok"})
        else:
            self._send_json(200, self._service().models())

    def _post(self) -> None:
        path = self._path()
        if path not in _POSTS:
            self.close_connection = True  # the body is not read
            raise ApiError(405, f"{path} takes GET")
        began, body = time.monotonic(), self._body()
        service, request = self._service(), fields.request(body, is_chat=_POSTS[path])
        if request.stream:
            self._stream(request)
            return
        answer = service.answer(request)
        self._send_json(200, answer)
        usage = answer["usage"]
        terminal.note(
            f"{path}: {usage['prompt_tokens']} tokens read, {usage['completion_tokens']} made in {time.monotonic() - began:.2f} s"
        )

    def _stream(self, request: fields.Request) -> None:
        prompts = self._service().begin(request)  # what is wrong is said before the stream begins
        self.close_connection = True  # its end is that of the stream
        try:
            self._head(200, "text/event-stream; charset=utf-8", {"Cache-Control": "no-cache", "Connection": "close"})
            try:
                for chunk in self._service().stream(request, prompts):
                    self._event(json.dumps(chunk, ensure_ascii=False))
            except ApiError as error:
                self._event(json.dumps(error.body(), ensure_ascii=False))
            self._event("[DONE]")
        finally:
            for prompt in prompts:
                prompt.job.done.set()

    def _event(self, text: str) -> None:
        self.wfile.write(f"data: {text}\n\n".encode())
        self.wfile.flush()

    def _answered(self, method: Any) -> None:
        """Runs a method; what it refuses goes back as JSON."""
        try:
            method()
        except ApiError as error:
            self._send_json(error.status, error.body())
        except (ConnectionError, TimeoutError):
            self.close_connection = True  # the client is gone
        except Exception as error:
            terminal.note(f"error: {self.path}: {error!r}")
            self._send_json(500, ApiError(500, "the server failed; its log says how").body())

    def _service(self) -> Service:
        assert self.server.service is not None
        return self.server.service

    def _path(self) -> str:
        """The path, of a request that may come here. Raises ApiError for another."""
        if self.server.local:
            # A page of another site, whose name leads here, must not use the model.
            name = self.headers.get("Host", "localhost").rpartition(
                ":" if "]" not in self.headers.get("Host", "") else "]:"
            )
            if not is_local((name[0] or name[2]).strip("[]")):
                self.close_connection = True
                raise ApiError(403, "this server is for its own machine; ask for localhost")
        path = self.path.partition("?")[0]
        names_model = path.startswith(_MODEL) and path != _MODEL
        if path not in _POSTS and path not in _GETS and not names_model:
            self.close_connection = True
            there = (*_GETS, f"{_MODEL}NAME", *_POSTS)
            raise ApiError(404, f"no {path[:80]!r}; there are {', '.join(there)}")
        return path

    def _body(self) -> bytes:
        self.close_connection, keep = True, self.close_connection  # unless the body is read whole
        kind = self.headers.get_content_type()
        if kind != "application/json":  # which a page of another site cannot send unasked
            raise ApiError(415, f"the body is {kind}; send JSON with the header Content-Type: application/json")
        size = self.headers.get("Content-Length", "")
        if not (size.isascii() and size.isdigit()):
            raise ApiError(411, "the header Content-Length is missing")
        if int(size) > LARGEST:
            raise ApiError(413, f"the body has {size} bytes; at most {LARGEST} are read")
        body = self.rfile.read(int(size))
        self.close_connection = keep
        return body

    def _send_json(self, status: int, answer: dict[str, Any]) -> None:
        self._send(status, json.dumps(answer, ensure_ascii=False).encode("utf-8", "replace"), "application/json")

    def _send(self, status: int, body: bytes, kind: str, more: Mapping[str, str] | None = None) -> None:
        self._head(status, kind, {"Content-Length": str(len(body)), **(more or {})})
        self.wfile.write(body)

    def _head(self, status: int, kind: str, more: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "X-Content-Type-Options": "nosniff", **more}.items():
            self.send_header(name, value)
        if self.close_connection and "Connection" not in more:
            self.send_header("Connection", "close")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: a line of its own says what a request took."""
