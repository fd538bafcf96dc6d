"""Limits of the server: hostile requests, clients that leave, a worker that fails, and order."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mupax.train.data.chats.templates import Template
from mupax.train.reuse.serve import server as serve_server
from mupax.train.reuse.serve import worker
from mupax.train.reuse.serve.logs import one_line
from mupax.train.reuse.serve.server import Server
from tests.train.reuse.commands import refuse
from tests.train.reuse.random_weights import imported
from tests.train.reuse.serve.serving import CHAT, MODEL, Response, request, service_of, serving

ENDLESS = {"prompt": "ab", "max_tokens": 100_000, "temperature": 1, "seed": 1, "ignore_eos": True}
SHORT = {"prompt": "ab", "max_tokens": 2, "temperature": 0, "ignore_eos": True}
USER = [{"role": "user", "content": "a"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = imported(tmp_path_factory.mktemp("serve") / "tiny", MODEL)
    with serving(folder, slots=2, max_waiting=3) as http_server:
        yield http_server


def choices_of(answer: Response) -> Any:
    return answer.body["choices"]


def raw(server: Server, sent: bytes) -> bytes:
    """Return everything that comes back until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as client:
        client.sendall(sent)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while part := client.recv(65536):
                received += part
        return received


def head(*lines: str) -> bytes:
    words = [
        "POST /v1/completions HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        *lines,
    ]
    return "\r\n".join([*words, "", ""]).encode()


def until(condition: Any, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextlib.contextmanager
def asking(server: Server, fields: Any) -> Iterator[socket.socket]:
    """A client that has asked and does not read; it leaves at the end."""
    content = json.dumps(fields).encode()
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=30) as client:
        client.sendall(head(f"Content-Length: {len(content)}") + content)
        yield client


# Requests


DEEP = b'{"prompt": "a", "stop": ' + b"[" * 900 + b"]" * 900 + b"}"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"prompt": "a", "temperature": 1' + b"0" * 400 + b"}", "temperature"),
        (b'{"prompt": "a", "top_p": 1' + b"0" * 400 + b"}", "top_p"),
        (b'{"prompt": "a", "temperature": 1e400}', "temperature"),
        (b'{"prompt": "a", "temperature": NaN}', None),
        (b'{"prompt": "a", "top_p": -Infinity}', None),
        (b'{"prompt": "a", "n": 1' + b"0" * 5000 + b"}", None),
        ({"prompt": ["a", "b"], "seed": 2**63 - 1}, "seed"),
        ({"prompt": "a", "max_tokens": 100_001}, "max_tokens"),
        ({"prompt": "a" * 70_000}, "prompt"),
        ({"prompt": [2**70]}, "prompt"),
        (b"[" * 100_000, None),
        (DEEP, None),
        (b'{"prompt": "\xff\xfe"}', None),
        (b'{"prompt": "\\ud800"}', None),
        (b'{"stop": "\\udfff", "prompt": "a"}', None),
        (b'{"prompt": "\xed\xa0\x80"}', None),
        (b'{"temperature": ' + b"[" * 50 + b"]" * 50 + b"}", "temperature"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_values_that_no_request_has_are_400(server: Server, body: Any, param: str | None) -> None:
    status, answer, headers = request(server, body)
    assert (status, answer["error"]["param"]) == (400, param)
    assert headers["Connection"] is None  # the body was read: the connection may be used again
    assert request(server, {**SHORT, "prompt": ["a", "b"], "seed": 2**63 - 2})[0] == 200  # Control.


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (head("Content-Length: 5", "Transfer-Encoding: chunked") + b"0\r\n\r\n", 400),
        (head("Transfer-Encoding: chunked").replace(b"HTTP/1.1", b"HTTP/1.0") + b"0\r\n\r\n", 400),
        (head("Content-Length: 5", "Content-Length: 6") + b"hello!", 400),
        (head("Content-Length: " + "9" * 5000), 400),
        (head("Content-Length: 99999999999"), 413),
        (head("Content-Length: -1"), 400),
        (head(), 411),
        (head("X: " + "a" * 40_000), 431),
        (head("X: " + "a" * 400_000), 431),
        (head(*(f"X{number}: a" for number in range(4000))), 431),
        (head().replace(b"/v1", b"/" + b"a" * 40_000), 431),
        (b"\x16\x03\x01\x00\xa5\x01\x00", 400),
        (b"GET /health HTTP/2.0\r\nHost: localhost\r\nConnection: close\r\n\r\n", 505),
        (head("Transfer-Encoding: chunked") + b"zz\r\n", 400),
        (head("Transfer-Encoding: chunked", "Connection: close") + b"2\r\n{}\r\n0\r\n\r\n", 200),
    ],
    ids=lambda value: repr(value)[-30:],
)
def test_heads_that_a_proxy_may_read_otherwise_are_refused(
    server: Server, sent: bytes, status: int
) -> None:
    smuggled = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    received = raw(server, sent + smuggled)
    assert received.startswith(b"HTTP/1.1 %d " % status), received[:100]
    assert (
        received.count(b"HTTP/1.1 ") == 1
    )  # the connection is closed, and what follows is no request
    assert json.loads(received.partition(b"\r\n\r\n")[2])


def test_bodies_are_bounded_together_and_forgotten(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_server, "LARGEST", 4000)
    monkeypatch.setattr(serve_server, "LARGEST_TOTAL", 5000)
    assert request(server, {"prompt": "a" * 5000})[0] == 413
    chunked = (
        head("Transfer-Encoding: chunked", "Connection: close")
        + b"1388\r\n"
        + b"a" * 5000
        + b"\r\n0\r\n\r\n"
    )
    assert raw(server, chunked).startswith(b"HTTP/1.1 413 ")
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=30) as slow:
        slow.sendall(head("Content-Length: 3900") + b"a" * 3500)
        time.sleep(0.1)
        status, answer, headers = request(server, {"prompt": "a" * 3000})
        assert (status, headers["Retry-After"]) == (503, "5")
        assert "large bodies" in answer["error"]["message"]
        assert request(server, SHORT).status == 200
    until(lambda: request(server, {"prompt": "a" * 3000})[0] == 400)  # the slow client has left


def test_a_client_that_sends_slowly_is_cut_off(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_server, "HEAD_S", 0.1)
    monkeypatch.setattr(serve_server, "BODY_S", 0.1)
    assert raw(server, b"POST /v1/comple") == b""
    assert raw(server, b"") == b""
    assert raw(server, head("Content-Length: 100") + b"{").startswith(b"HTTP/1.1 408 ")


def test_an_empty_template_is_refused(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_of(server), "template", Template("", "empty.jinja"))
    status, answer, _ = request(server, {"messages": USER}, CHAT)
    assert (status, answer["error"]["param"]) == (400, "messages")


def test_control_characters_do_not_reach_the_log() -> None:
    assert one_line("a\x1b[2J\r\nb\u202e\x85é") == "a\\x1b[2J\\r\\nb\\u202e\\x85é"


# Clients that leave, and limits


def test_clients_that_left_block_nobody(server: Server) -> None:
    slots = service_of(server).worker.slots
    with contextlib.ExitStack() as clients:
        for _ in range(2):
            clients.enter_context(asking(server, ENDLESS))
        until(lambda: len(slots.active) == 2)
        for _ in range(2):  # in the queue
            clients.enter_context(asking(server, ENDLESS))
        until(lambda: len(service_of(server).worker._jobs) == 4)
        clients.enter_context(asking(server, {**ENDLESS, "stream": True}))
    until(lambda: not slots.active and not service_of(server).worker._jobs)
    assert request(server, SHORT).status == 200


def test_a_request_ends_when_its_time_is_over(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = service_of(server)
    limits = dataclasses.replace(service.limits, max_seconds=0.3)
    monkeypatch.setattr(service, "limits", limits)
    status, answer, _ = request(server, ENDLESS)
    assert status == 200
    assert answer["choices"][0]["finish_reason"] == "length"
    assert 0 < answer["usage"]["completion_tokens"] < ENDLESS["max_tokens"]


def test_a_full_queue_is_503_and_a_short_request_does_not_wait_for_long_ones(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "TURN_S", 3600.0)
    with contextlib.ExitStack() as clients:
        for _ in range(2):
            clients.enter_context(asking(server, ENDLESS))
        until(lambda: len(service_of(server).worker.slots.active) == 2)
        for _ in range(3):
            clients.enter_context(asking(server, ENDLESS))
        until(lambda: len(service_of(server).worker._jobs) == 5)
        status, _, headers = request(server, SHORT)
        assert (status, headers["Retry-After"]) == (503, "5")
    until(lambda: not service_of(server).worker._jobs)
    longer = {**SHORT, "max_tokens": 40}
    alone = choices_of(request(server, longer))
    monkeypatch.setattr(worker, "TURN_S", 0.05)
    with asking(server, ENDLESS), asking(server, ENDLESS), asking(server, ENDLESS):
        until(lambda: len(service_of(server).worker._jobs) == 3)
        assert choices_of(request(server, longer)) == alone
        # The three go on. The worker drops the short one at its next turn.
        until(lambda: len(service_of(server).worker._jobs) == 3)


def test_a_request_of_many_texts_leaves_slots_for_others(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "TURN_S", 0.05)
    with asking(server, {**ENDLESS, "n": 8}):
        until(lambda: len(service_of(server).worker.slots.active) == 2)
        assert request(server, SHORT).status == 200


# A worker that fails


def failing(message: str) -> Any:
    def program(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError(message)

    return program


@pytest.mark.parametrize(
    "name", ["_read", "_draw", "_insert", "_step", "join", "step", "_fill_slots"]
)
@pytest.mark.parametrize(
    ("message", "status"), [("RESOURCE_EXHAUSTED: no memory", 503), ("no such thing", 500)]
)
def test_a_failure_answers_its_request_and_the_worker_lives_on(
    server: Server, monkeypatch: pytest.MonkeyPatch, name: str, message: str, status: int
) -> None:
    slots = service_of(server).worker.slots
    expected = choices_of(request(server, SHORT))
    with monkeypatch.context() as patch:
        owner: Any = slots if hasattr(slots, name) else service_of(server).worker
        patch.setattr(owner, name, failing(message))
        assert request(server, SHORT).status == status
    assert choices_of(request(server, SHORT)) == expected


def test_logprobs_without_memory_are_503_and_the_worker_lives_on(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = service_of(server).worker.generator
    with monkeypatch.context() as patch:
        patch.setattr(generator, "logprobs", failing("Out of memory allocating 9 bytes"))
        assert request(server, {**SHORT, "logprobs": 2})[0] == 503
    assert request(server, {**SHORT, "logprobs": 2})[0] == 200


def test_health_tells_a_stuck_and_a_dead_worker(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answered() -> Response:
        return request(server, path="/health")

    def health() -> int:
        return answered().status

    # A worker that compiles counts as well, so that the programs are compiled before.
    assert request(server, SHORT).status == 200
    slots = service_of(server).worker.slots
    going_on = threading.Event()
    step = slots._step

    def slow(*arguments: Any) -> Any:
        going_on.wait(20)
        return step(*arguments)

    monkeypatch.setattr(worker, "STALL_S", 0.1)
    monkeypatch.setattr(slots, "longest_call_s", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(slots, "_step", slow)
        with asking(server, SHORT):
            until(lambda: health() == 503)
            assert answered().headers["Retry-After"] == "5"
            patch.setattr(slots, "compiling", True)
            assert health() == 200
            patch.setattr(slots, "compiling", False)
            going_on.set()
            until(lambda: health() == 200)

    def die() -> None:
        raise SystemExit

    dying = worker.Worker(service_of(server).worker.generator, 1, 1)
    monkeypatch.setattr(dying, "_turn", die)
    monkeypatch.setattr(service_of(server), "worker", dying)
    assert health() == 200
    # The first request was queued when the thread died, and the second comes after that.
    for _ in range(2):
        status, answer, headers = request(server, SHORT)
        assert (status, answer["error"]["type"]) == (500, "server_error")
        assert "Restart the server" in answer["error"]["message"]
        assert headers["Retry-After"] is None, "a dead thread does not come back"
        until(lambda: health() == 503)
    assert answered().headers["Retry-After"] is None
    assert "restart the server" in answered().body["status"]


# The command


@pytest.mark.parametrize(
    "words",
    ["--slots 0", "--max-tokens 0", "--max-seconds nan", "--max-seconds 0", "--max-waiting 0"],
)
def test_limits_out_of_range_are_refused(tmp_path: Path, words: str) -> None:
    assert words.split()[0] in refuse("serve", tmp_path, words)
