"""Emulated bucket behind a proxy that counts requests, and kills a client at a chosen one.

`Bucket` starts the emulator and, in a process of its own, the proxy. Its variables `environ` lead
gcsfs and tensorstore to the proxy. Requests below /-/ are orders to the proxy itself.
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
"""Headers that belong to one connection, and are not passed on."""
_NAME = "bucket"


class Bucket:
    """Context manager of an emulated bucket behind the proxy.

    The methods are those of `scripts.campaigns.operations.Place`.
    """

    kinds: tuple[str, ...] = KINDS[:2]
    """Kinds of requests that change something."""

    def __init__(self) -> None:
        self._emulator = emulator.free_port()
        self._proxy = emulator.free_port()
        self._servers = ExitStack()
        self._url = f"http://127.0.0.1:{self._proxy}"
        self.environ = emulator.environ(self._url)

    def __enter__(self) -> Bucket:
        module = "scripts.campaigns.injection.object_faults"
        proxy = [sys.executable, "-m", module, str(self._proxy), str(self._emulator)]
        words = emulator.command(self._emulator, self._url)
        self._servers.enter_context(emulator.serving(words, self._emulator))
        self._servers.enter_context(emulator.serving(proxy, self._proxy))
        emulator.new_bucket(self._url, _NAME)
        return self

    def __exit__(self, *exception: object) -> None:
        self._servers.close()

    def place(self, name: str) -> str:
        """Return the path of the work folder of a run."""
        return f"gs://{_NAME}/{name}"

    def watch(self, place: str) -> None:
        """Count all requests to the bucket from 0, and forget what was armed.

        `place` is not used: a request in the middle of an upload names no place.
        """
        self._ask("-/watch", {})

    def arm(self, kind: str, moment: str, first: int) -> None:
        """Choose the request at which the process set by `victim` is killed.

        Args:
            kind: Kind of the request, one of `KINDS`.
            moment: `killed` before the request is passed on, or `killed after` it.
            first: Number of the request among those of its kind, counted from 0 since `watch`.
        """
        self._ask("-/arm", {"kind": kind, "moment": moment, "first": first})

    def victim(self, pid: int) -> None:
        """Set the process that is killed."""
        self._ask("-/victim", {"pid": pid})

    def calls(self) -> dict[str, int]:
        """Return the number of requests of each kind since `watch`."""
        return self._ask("-/calls", {})["calls"]

    @property
    def fired(self) -> int:
        """Number of requests at which the victim was killed since `watch`."""
        return self._ask("-/calls", {})["fired"]

    def _ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send an order to the proxy, and return its answer."""
        headers = {"Content-Type": "application/json"}
        url = f"http://127.0.0.1:{self._proxy}/{path}"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read())


class _State:
    """Counters of the proxy, and the armed request."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        """Set all counters to 0, and forget the victim and what was armed."""
        self.pid = 0
        self.fired = 0
        self.calls: Counter[str] = Counter()
        self.armed: dict[str, Any] | None = None

    def order(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """Carry out an order that `Bucket` sent to the proxy, and return the counters.

        Args:
            name: `watch`, `arm`, `victim` or `calls`. The last one only returns the counters.
            body: Arguments of the method of `Bucket` that has this name.
        """
        with self.lock:
            if name == "watch":
                self._reset()
            elif name == "arm":
                self.armed = body
            elif name == "victim":
                self.pid = body["pid"]
            return {"calls": {kind: self.calls[kind] for kind in KINDS}, "fired": self.fired}

    @contextmanager
    def passing(self, kind: str) -> Iterator[bool]:
        """Context manager held open while the proxy passes a request on. It counts the request.

        At the request that `arm` chose, the client is killed on entry (`killed`) or on exit
        (`killed after`).

        Yields:
            False if the client was killed and the request must not be passed on, otherwise true.
        """
        moment = ""
        with self.lock:
            if self.pid and self.armed is not None:
                armed_request = (self.armed["kind"], self.armed["first"])
                if armed_request == (kind, self.calls[kind]):
                    moment = self.armed["moment"]
                    self.fired += 1
            self.calls[kind] += 1
        if moment == "killed":
            os.kill(self.pid, signal.SIGKILL)
        yield moment != "killed"
        if moment == "killed after":
            os.kill(self.pid, signal.SIGKILL)


def serve(port: int, upstream: int) -> None:
    """Run the proxy on `port` until it is killed. Requests go to the emulator on `upstream`."""
    state = _State()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            """Follow an order, or pass a request on and answer it."""
            body = self._body()
            if self.path.startswith("/-/"):
                content = json.dumps(state.order(self.path[3:], json.loads(body))).encode()
                self._answer(200, [("Content-Type", "application/json")], content)
                return
            kind = self._kind()
            with state.passing(kind) as passed:
                if not passed:
                    self.close_connection = True
                    return
                client = http.client.HTTPConnection("127.0.0.1", upstream, timeout=60)
                headers = {}
                for name, value in self.headers.items():
                    if name.lower() not in _HOP:
                        headers[name] = value
                client.request(self.command, self.path, body, headers)
                answer = client.getresponse()
                content = answer.read()
            # A victim that is killed after its request must not get the answer.
            self._answer(answer.status, answer.getheaders(), content)
            client.close()

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = handle_any

        def _kind(self) -> str:
            """Return the kind of this request, one of `KINDS`."""
            path = self.path.partition("?")[0]
            if self.command == "GET" and path.rstrip("/").endswith("/o"):
                return "list"
            return _METHODS.get(self.command, "read")

        def _body(self) -> bytes:
            """Read the body of this request, which may come in chunks."""
            if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = []
            size = self._chunk_size()
            while size:
                parts.append(self.rfile.read(size))
                self.rfile.readline()
                size = self._chunk_size()
            self.rfile.readline()
            return b"".join(parts)

        def _chunk_size(self) -> int:
            """Read the line before a chunk, and return the number of its bytes."""
            return int(self.rfile.readline().split(b";")[0], 16)

        def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
            """Answer this request."""
            # The client may have been killed.
            with suppress(OSError):
                self.send_response(status)
                for name, value in headers:
                    if name.lower() not in _HOP:
                        self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                # The answer to HEAD has no body.
                if self.command != "HEAD":
                    self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    serve(*map(int, sys.argv[1:]))
