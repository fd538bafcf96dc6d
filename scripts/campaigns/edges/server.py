"""Requests and load on `mupax serve`: odd values, hostile heads and bodies, clients that leave, a worker without memory.

Most trials share one server of a tiny model. A trial is right only if the server also answers an ordinary request afterwards,
with the text that it had at first, and has printed no traceback.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import functools
import http.client
import json
import re
import resource
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from scripts.campaigns.edges.trial import Outcome, Trial, judge, mupax, right, start

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
VOCABULARY, CONTEXT = 128, 64
TEMPLATE = "{% for m in messages %}{{ m.role[0] ~ m.content ~ '|' }}{% endfor %}{{ 'a' if add_generation_prompt }}"
ORDINARY = {"prompt": "to be", "max_tokens": 12, "temperature": 1, "seed": 5, "ignore_eos": True}
ENDLESS = {"prompt": "ab", "max_tokens": 100_000, "temperature": 1, "seed": 1, "ignore_eos": True}
REQUESTS, WARM = 2000, 500
"""Ordinary requests of the trial of memory, and after how many of them memory must be flat."""
FLAT = 1.05
BODIES_MIB = 400
"""Most that 40 bodies of 15 MB may add to a server's memory: four of them in memory, and one parsed."""


def trials(shared: Path, seed: int) -> list[Trial]:
    """Return the trials: values, bodies, heads, paths, texts, clients that leave, load, failures, and the command itself."""
    server = Shared(shared)
    groups = {
        "values": value_runs(),
        "bodies": {
            name: partial(posted, fields=body, codes=(status,))
            for name, (body, status) in BODIES.items()
        },
        "heads": head_runs(),
        "paths": {name: partial(path_outcome, request=request) for name, request in PATHS.items()},
        "texts": text_runs(seed),
        "clients that leave": {
            name: partial(leaving_outcome, **how) for name, how in LEAVING.items()
        },
        "load": LOADS,
    }
    listed = [
        shared_trial(server, group, name, run)
        for group, runs in groups.items()
        for name, run in runs.items()
    ]
    listed.append(Trial(f"load: {REQUESTS} requests", "load", partial(memory_outcome, server)))
    return [*listed, *failure_trials(server), *command_trials(server)]


class Running:
    """A server in a process of its own.

    Args:
        *flags: of `mupax serve`.
    """

    def __init__(self, model: Path, *flags: str) -> None:
        words = ["serve", str(model), "--port", "0", *flags]
        self.process = start(words)
        atexit.register(self.process.kill)
        self._lines: list[str] = []
        self._is_ready = threading.Event()
        self.port = 0
        threading.Thread(target=self._listen, daemon=True).start()
        if not self._is_ready.wait(120) or not self.port:
            raise RuntimeError("the server did not start: " + self.output[-300:])

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line.decode(errors="replace"))
            if address := re.search(r"http://[^:]+:(\d+)/", self._lines[-1]):
                self.port = int(address[1])
                self._is_ready.set()
        self._is_ready.set()

    @property
    def output(self) -> str:
        """Everything that it has printed."""
        return "".join(self._lines)

    def memory_mib(self) -> float:
        """Return its resident memory."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1024

    def post(
        self,
        fields: Any,
        path: str = COMPLETIONS,
        timeout: float = 60,
        kind: str = "application/json",
    ) -> tuple[int, Any]:
        """Return status and answer of a request."""
        content = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
        return self.ask("POST", path, content, {"Content-Type": kind}, timeout)

    def ask(
        self,
        method: str,
        path: str,
        content: bytes | None = None,
        headers: Any = None,
        timeout: float = 60,
    ) -> tuple[int, Any]:
        """Return status and answer of any request. An answer that is no JSON is text."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request(method, path, content, headers or {})
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        is_json = answer.headers.get_content_type() == "application/json" and text
        return answer.status, json.loads(text) if is_json else text

    def raw(self, sent: bytes, timeout: float = 30) -> bytes:
        """Send bytes, and return all that comes until the server closes the connection."""
        received = b""
        with (
            socket.create_connection(("127.0.0.1", self.port), timeout=timeout) as client,
            suppress(ConnectionError),
        ):
            client.sendall(sent)
            while part := client.recv(1 << 16):
                received += part
        return received

    @contextmanager
    def asking(self, fields: Any, sent: slice = slice(None)) -> Iterator[socket.socket]:
        """A client that has sent a request, or a part of it, and that leaves at the end."""
        content = json.dumps(fields).encode()
        request = head(f"Content-Length: {len(content)}") + content
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as client:
            client.sendall(request[sent])
            yield client

    def stop(self, number: int = signal.SIGINT) -> int | None:
        """Send a signal. Return the exit code, or None if it did not end within 10 s."""
        self.process.send_signal(number)
        try:
            return self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return None


class Shared:
    """The server that most trials share, started by the first of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.expected: Any = None
        """Choices of the ordinary request, as it was answered first."""

    @functools.cached_property
    def model(self) -> Path:
        """Folder of a tiny model that writes ASCII, with a chat template."""
        folder = self._folder / "tiny"
        write_model(folder)
        return folder

    @functools.cached_property
    def flags(self) -> list[str]:
        """Flags that serve the model."""
        return ["--data.tokenizer", "bytes", "--data.chat-template", str(self.model / "chat.jinja")]

    @functools.cached_property
    def running(self) -> Running:
        """The server."""
        running = Running(self.model, *self.flags)
        self.expected = running.post(ORDINARY)[1]["choices"]
        return running

    @contextmanager
    def started(self, *flags: str) -> Iterator[Running]:
        """Run a server of the same model for one trial alone."""
        running = Running(self.model, *self.flags, *flags)
        try:
            yield running
        finally:
            running.stop()

    def check(self, running: Running, outcome: Outcome) -> Outcome:
        """Return the outcome, or what is wrong with the server after it."""
        if "Traceback" in running.output:
            return Outcome("traceback", running.output[-200:])
        if running.process.poll() is not None:
            return Outcome("crash", f"the server ended with {running.process.returncode}")
        try:
            status, answer = running.post(ORDINARY)
            health = running.ask("GET", "/health")[0]
        except TimeoutError:
            return Outcome(
                "hung", f"an ordinary request was not answered after it; {outcome.detail}"
            )
        if (status, health) != (200, 200):
            return Outcome(
                "wrong",
                f"an ordinary request was {status} after it, /health {health}; {outcome.detail}",
            )
        if self.expected is not None and answer["choices"] != self.expected:
            return Outcome(
                "silent", f"an ordinary request had another text after it; {outcome.detail}"
            )
        return outcome


def write_model(folder: Path) -> None:
    """Write weights of a tiny model as `mupax import` does."""
    from mupax.train.config.run import PresetConfig
    from mupax.train.reuse.huggingface import files
    from mupax.train.reuse.source import WeightsSource
    from mupax.zoo.configs import DecoderConfig
    from mupax.zoo.definition import definition

    model = DecoderConfig(
        width=16,
        depth=1,
        num_heads=2,
        mlp_ratio=2,
        vocab_size=VOCABULARY,
        seq_len=CONTEXT,
        positions="rotary",
    )
    noise = np.random.default_rng(3)
    params: Any = {}
    for name, leaf in definition(model).abstract.items():
        params[name] = noise.standard_normal(leaf.shape).astype(np.float32)
    source = WeightsSource(model, params, dict.fromkeys(params, np.ones(())), {}, [])
    files.write_imported(source, PresetConfig(name="sp"), folder, "a campaign")
    (folder / "chat.jinja").write_text(TEMPLATE)


def head(*lines: str, path: str = COMPLETIONS, version: str = "1.1") -> bytes:
    """Return the head of a request."""
    first = f"POST {path} HTTP/{version}"
    return "\r\n".join(
        [first, "Host: localhost", "Content-Type: application/json", *lines, "", ""]
    ).encode("latin-1")


def shared_trial(server: Shared, group: str, name: str, run: Callable[[Running], Outcome]) -> Trial:
    """Return a trial on the shared server, which must be well after it."""

    def tried(folder: Path) -> Outcome:
        running = server.running
        try:
            outcome = run(running)
        except TimeoutError:
            outcome = Outcome("hung", "no answer in time")
        return outcome if outcome.verdict != "ok" else server.check(running, outcome)

    return Trial(f"{group}: {name}", group, tried)


def status_outcome(status: int, answer: Any, expected: Iterable[int]) -> Outcome:
    """Judge a status. A refusal must be an error in OpenAI's form."""
    text = json.dumps(answer)[:120]
    if status not in expected:
        return Outcome("wrong", f"{status} {text}")
    if status >= 400 and not (isinstance(answer, dict) and answer.get("error", {}).get("message")):
        return Outcome("wrong", f"{status} without an error in JSON: {text}")
    return Outcome("ok", f"{status} {answer['error']['message'][:120] if status >= 400 else text}")


# Values of fields

HUGE = 10**400
NUMBERS = {
    "huge": HUGE,
    "negative": -1,
    "string": "1",
    "list": [1],
    "object": {},
    "true": True,
    "above": 1e30,
}
VALUES: dict[str, dict[str, Any]] = {
    "temperature": NUMBERS,
    "top_p": NUMBERS,
    "n": {**NUMBERS, "zero": 0, "fraction": 1.5},
    "max_tokens": {**NUMBERS, "zero": 0, "fraction": 1.5},
    "seed": {**NUMBERS, "past int64": 2**63},
    "logprobs": {**NUMBERS, "many": 21},
    "stop": {"number": 1, "empty": "", "many": ["a"] * 5, "nested": [["a"]], "object": {}},
    "stream": {"number": 1, "string": "true", "list": []},
    "echo": {"number": 1, "string": "true"},
    "prompt": {
        "number": 1,
        "object": {},
        "empty list": [],
        "negative id": [-1],
        "unknown id": [VOCABULARY],
        "huge id": [HUGE],
        "mixed": ["a", 1],
        "nested": [[["a"]]],
        "long": "a" * (CONTEXT + 1),
        "longer": "a" * 200_000,
        "NUL": "a\0b",
        "not in the vocabulary": "é",
        "many": ["a"] * 33,
    },
    "stream_options": {"list": [], "without stream": {"include_usage": True}, "unknown": {"x": 1}},
    "best_of": {"two": 2},
    "tools": {"one": [{"type": "function"}]},
    "response_format": {"json": {"type": "json_object"}},
    "nonsense": {"one": 1},
    "control\x1b[31m": {"one": 1},
    "model": {"other": "gpt-4", "number": 1, "control": "\x1b[2J"},
}
RIGHT_VALUES: dict[str, dict[str, Any]] = {
    "temperature": {"zero": 0, "tiny": 1e-30, "hundred": 100},
    "top_p": {"zero": 0, "tiny": 1e-30, "one": 1},
    "seed": {"zero": 0, "largest": 2**63 - 1},
    "stop": {"text": "zz", "four": ["zz", "yy", "xx", "ww"]},
    "prompt": {"empty": "", "ids": [1, 2], "several": ["a", "b"], "lists of ids": [[1], [2, 3]]},
    "n": {"32": 32},
    "user": {"any": "somebody"},
    "best_of": {"one": 1},
}
MESSAGES: dict[str, Any] = {
    "none": [],
    "string": "hi",
    "unknown role": [{"role": "nobody", "content": "a"}],
    "no content": [{"role": "user"}],
    "number": [{"role": "user", "content": 1}],
    "list of numbers": [1, 2],
    "an image": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    "too long": [{"role": "user", "content": "a" * 1000}],
    "marks": [{"role": "user", "content": "\ufdd0"}],
}


def value_runs() -> dict[str, Callable[[Running], Outcome]]:
    """Return requests of one field each that has a wrong or an extreme value, by the names of their trials."""
    runs = {}
    for codes, values in (((400, 404), VALUES), ((200,), RIGHT_VALUES)):
        for field, by_name in values.items():
            shown = field.encode("unicode_escape").decode()
            for name, value in by_name.items():
                runs[f"{shown} {name}"] = partial(
                    posted, fields={**ORDINARY, field: value}, codes=codes
                )
    for name, messages in MESSAGES.items():
        fields = {"messages": messages, "max_tokens": 4}
        runs[f"messages {name}"] = partial(posted, fields=fields, codes=(400,), path=CHAT)
    several = {**ORDINARY, "prompt": ["a", "b"], "seed": 2**63 - 1}
    runs["seed largest with two prompts"] = partial(posted, fields=several, codes=(400,))
    return runs


def posted(running: Running, fields: Any, codes: Sequence[int], path: str = COMPLETIONS) -> Outcome:
    """Send a body, and judge its status."""
    return status_outcome(*running.post(fields, path), codes)


# Bodies

BODIES: dict[str, tuple[bytes, int]] = {
    "empty": (b"", 400),
    "null": (b"null", 400),
    "list": (b"[]", 400),
    "half": (b'{"prompt": "a', 400),
    "NaN": (b'{"temperature": NaN}', 400),
    "Infinity": (b'{"top_p": Infinity}', 400),
    "1e400": (b'{"temperature": 1e400}', 400),
    "5,000 digits": (b'{"n": 1' + b"0" * 5000 + b"}", 400),
    "bytes that are not UTF-8": (b'{"prompt": "\xff\xfe"}', 400),
    "a surrogate in UTF-8": (b'{"prompt": "\xed\xa0\x80"}', 400),
    "a surrogate as an escape": (b'{"prompt": "\\ud800"}', 400),
    "a surrogate in a field's name": (b'{"\\udc00": 1}', 400),
    "a surrogate in a stop": (b'{"prompt": "a", "stop": "\\ud83d"}', 400),
    "UTF-16": ('{"prompt": "a"}'.encode("utf-16"), 400),
    "100,000 brackets": (b"[" * 100_000, 400),
    "100,000 objects": (b'{"a":' * 100_000, 400),
    "900 levels": (b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}", 400),
    "65 levels": (b'{"prompt": ' + b"[" * 65 + b"]" * 65 + b"}", 400),
    "50 levels": (b'{"prompt": ' + b"[" * 50 + b"]" * 50 + b"}", 400),
    "a field twice": (b'{"prompt": "a", "prompt": "b", "max_tokens": 1}', 200),
    "spaces around": (b' \n {"prompt": "a", "max_tokens": 1} \n', 200),
    "a byte order mark": (b'\xef\xbb\xbf{"prompt": "a", "max_tokens": 1}', 200),
    "two objects": (b"{}{}", 400),
    "16 MB of lists": (b'{"prompt": [' + b"[]," * 5_000_000 + b"[]]}", 400),
    "16 MB of ids": (b'{"prompt": [' + b"1," * 8_000_000 + b"1]}", 400),
    "16 MB of text": (b'{"prompt": "' + b"a" * 16_000_000 + b'"}', 400),
    "17 MB": (b" " * ((1 << 24) + 1), 413),
}


# Heads

SMUGGLED = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
SMALL = b'{"prompt": "a", "max_tokens": 1}'
CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(SMALL), SMALL)
SIZED = f"Content-Length: {len(SMALL)}"
HEADS: dict[str, tuple[bytes, tuple[int, ...]]] = {
    "Content-Length and Transfer-Encoding": (
        head(SIZED, "Transfer-Encoding: chunked") + CHUNKED,
        (400,),
    ),
    "Transfer-Encoding and Content-Length": (
        head("Transfer-Encoding: chunked", SIZED) + CHUNKED,
        (400,),
    ),
    "Content-Length 0 and Transfer-Encoding": (
        head("Content-Length: 0", "Transfer-Encoding: chunked") + CHUNKED,
        (400,),
    ),
    "Transfer-Encoding of HTTP/1.0": (
        head("Transfer-Encoding: chunked", version="1.0") + CHUNKED,
        (400,),
    ),
    "Transfer-Encoding gzip": (head("Transfer-Encoding: gzip, chunked") + CHUNKED, (400, 501)),
    "Transfer-Encoding twice": (
        head("Transfer-Encoding: chunked", "Transfer-Encoding: chunked") + CHUNKED,
        (400, 501),
    ),
    "Transfer-Encoding of another name": (
        head("Transfer-Encoding: xchunked") + CHUNKED,
        (400, 501),
    ),
    "a space before the colon": (head("Transfer-Encoding : chunked", SIZED) + SMALL, (400,)),
    "a tab in Transfer-Encoding": (head("Transfer-Encoding:\tchunked", SIZED) + CHUNKED, (400,)),
    "two Content-Lengths": (head(SIZED, "Content-Length: 9") + SMALL, (400,)),
    "Content-Length with a plus": (head("Content-Length: +5") + SMALL, (400,)),
    "Content-Length -1": (head("Content-Length: -1") + SMALL, (400,)),
    "Content-Length 0x10": (head("Content-Length: 0x10") + SMALL, (400,)),
    "Content-Length 5,000 digits": (head("Content-Length: " + "1" * 5000) + SMALL, (400, 413)),
    "Content-Length 20 digits": (head("Content-Length: " + "9" * 20), (400, 413)),
    "Content-Length 17 MB": (head("Content-Length: 17000000"), (413,)),
    "Content-Length list": (head("Content-Length: 5, 6") + SMALL, (400,)),
    "no Content-Length": (head(), (411,)),
    "a bare line feed": (
        head(SIZED, "Connection: close").replace(b"\r\n", b"\n", 2) + SMALL,
        (200, 400),
    ),
    "a folded line": (head("X: a\r\n b", SIZED, "Connection: close") + SMALL, (200, 400)),
    "a NUL in a header": (head("X: a\0b", SIZED) + SMALL, (400,)),
    "an escape in a header": (head("X: \x1b[2J", SIZED, "Connection: close") + SMALL, (200, 400)),
    "a header of 40 kB": (head("X: " + "a" * 40_000, SIZED) + SMALL, (431,)),
    "a header of 1 MB": (head("X: " + "a" * 1_000_000, SIZED) + SMALL, (431,)),
    "4,000 headers": (head(*[f"X{number}: a" for number in range(4000)], SIZED) + SMALL, (431,)),
    "a path of 100 kB": (head(SIZED, path="/" + "a" * 100_000) + SMALL, (431,)),
    "a path with an escape": (b"GET /\x1b[2J HTTP/1.1\r\nHost: localhost\r\n\r\n", (400,)),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"a" * 200, (400,)),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", (400, 505)),
    "HTTP/0.9": (b"GET /\r\n\r\n", (400,)),
    "no Host": (b"POST /v1/completions HTTP/1.1\r\n\r\n", (400,)),
    "two Hosts": (b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\n\r\n", (400,)),
    "a foreign Host": (b"GET /health HTTP/1.1\r\nHost: evil.example\r\n\r\n", (403,)),
    "an unknown type": (head(SIZED).replace(b"application/json", b"text/plain") + SMALL, (415,)),
    "a bad chunk size": (head("Transfer-Encoding: chunked") + b"zz\r\n", (400,)),
    "a chunk size of 30 digits": (
        head("Transfer-Encoding: chunked") + b"f" * 30 + b"\r\n",
        (400, 413),
    ),
    "chunks past the limit": (
        head("Transfer-Encoding: chunked") + (b"100000\r\n" + b" " * 0x100000 + b"\r\n") * 17,
        (413,),
    ),
    "random bytes": (bytes(np.random.default_rng(0).integers(0, 256, 3000, np.uint8)), (400,)),
}
RIGHT_HEADS: dict[str, bytes] = {
    "chunked": head("Transfer-Encoding: chunked", "Connection: close") + CHUNKED,
    "byte by byte chunks": head("Transfer-Encoding: chunked", "Connection: close")
    + b"".join(b"1\r\n%c\r\n" % byte for byte in SMALL)
    + b"0\r\n\r\n",
    "HTTP/1.0": head(SIZED, version="1.0") + SMALL,
    "Expect: 100-continue": head(SIZED, "Expect: 100-continue", "Connection: close") + SMALL,
    "a charset": head(SIZED, "Connection: close").replace(
        b"application/json", b"application/json; charset=utf-8"
    )
    + SMALL,
    "an upgrade that is not known": head(SIZED, "Upgrade: h2c", "Connection: Upgrade, close")
    + SMALL,
}


def head_runs() -> dict[str, Callable[[Running], Outcome]]:
    """Return requests whose heads are wrong, or that two readers may read in two ways, by the names of their trials."""
    wrong = {
        name: partial(head_outcome, sent=sent, codes=codes) for name, (sent, codes) in HEADS.items()
    }
    return wrong | {
        name: partial(right_head_outcome, sent=sent) for name, sent in RIGHT_HEADS.items()
    }


def head_outcome(running: Running, sent: bytes, codes: Sequence[int]) -> Outcome:
    """Send a head and another request behind it, which must not be answered."""
    received = running.raw(sent + SMUGGLED)
    status = int(received[9:12] or b"0")
    if status not in codes:
        return Outcome("wrong", repr(received[:100]))
    if status >= 400 and received.count(b"HTTP/1.1 ") > 1:
        return Outcome("wrong", f"the request behind it was answered: {received[-100:]!r}")
    return Outcome("ok", str(status))


def right_head_outcome(running: Running, sent: bytes) -> Outcome:
    """Send a request that is right."""
    received = running.raw(sent)
    is_right = (
        b" 200 " in received.partition(b"HTTP/1.1 100 Continue\r\n\r\n")[2][:20]
        or b" 200 " in received[:20]
    )
    return right(is_right, repr(received[:100]))


# Paths and methods

PATHS: dict[str, tuple[str, str, int]] = {
    "nothing": ("GET", "/nothing", 404),
    "GET completions": ("GET", COMPLETIONS, 405),
    "POST health": ("POST", "/health", 405),
    "DELETE models": ("DELETE", "/v1/models", 405),
    "PUT completions": ("PUT", COMPLETIONS, 405),
    "OPTIONS completions": ("OPTIONS", COMPLETIONS, 405),
    "HEAD health": ("HEAD", "/health", 200),
    "the page": ("GET", "/", 200),
    "models": ("GET", "/v1/models", 200),
    "the model": ("GET", "/v1/models/tiny", 200),
    "the model percent-encoded": ("GET", "/v1/models/%74iny", 200),
    "another model": ("GET", "/v1/models/other", 404),
    "a model that is not UTF-8": ("GET", "/v1/models/%FF", 404),
    "a model with an escape": ("GET", "/v1/models/%1b%5b2J", 404),
    "no model": ("GET", "/v1/models/", 404),
    "dots": ("GET", "/../../etc/passwd", 404),
    "encoded dots": ("GET", "/%2e%2e/%2e%2e/etc/passwd", 404),
    "a query": ("GET", "/health?x=%00", 200),
    "a slash behind": ("GET", "/health/", 404),
    "a trace": ("TRACE", "/health", 405),
}


def path_outcome(running: Running, request: tuple[str, str, int]) -> Outcome:
    """Ask for a path without a body."""
    method, path, expected = request
    status, _ = running.ask(method, path)
    return right(status == expected, str(status))


# Texts alone and among others

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "warm": {"temperature": 1},
    "hot": {"temperature": 3},
    "top_p": {"temperature": 1, "top_p": 0.7},
    "n": {"n": 4},
    "prompts": {"prompt": ["a", "bc", "def"]},
    "stop": {"stop": ["e", "a"], "max_tokens": 40},
    "echo": {"echo": True},
    "logprobs": {"logprobs": 3},
    "past the context": {"max_tokens": 2 * CONTEXT + 9},
    "a full prompt": {"prompt": "a" * CONTEXT},
    "one token": {"max_tokens": 1},
    "stream": {"stream": True},
    "stream of n": {"stream": True, "n": 3, "stream_options": {"include_usage": True}},
    "chat": {"messages": [{"role": "user", "content": "hi"}]},
    "chat with logprobs": {
        "messages": [{"role": "user", "content": "hi"}],
        "logprobs": True,
        "top_logprobs": 2,
    },
}
CROWDS = {"8 of the same": 8, "3 endless texts": 3, "clients that leave": 4}


def text_runs(seed: int) -> dict[str, Callable[[Running], Outcome]]:
    """Return requests that get the text that they get alone, whatever others ask for at the time."""
    runs = {}
    for name, fields in KINDS.items():
        for crowd in CROWDS:
            runs[f"{name}, {crowd}"] = partial(text_outcome, fields=fields, crowd=crowd, seed=seed)
    return runs


def text_outcome(running: Running, fields: dict[str, Any], crowd: str, seed: int) -> Outcome:
    """Compare what a request gets alone with what it gets in a crowd."""
    path = CHAT if "messages" in fields else COMPLETIONS
    fields_sent = {**ORDINARY, "seed": seed + 11, **fields}
    if path == CHAT:
        del fields_sent["prompt"]
    alone = texts_of(running.post(fields_sent, path))
    count = CROWDS[crowd]
    with ExitStack() as clients:
        if crowd == "8 of the same":
            with concurrent.futures.ThreadPoolExecutor(count) as pool:
                together = [
                    texts_of(answer)
                    for answer in pool.map(lambda _: running.post(fields_sent, path), range(count))
                ]
        else:
            for number in range(count):
                clients.enter_context(
                    running.asking({**ENDLESS, "seed": number, "top_p": 0.5 + 0.1 * number})
                )
            if crowd == "clients that leave":
                clients.close()
            together = [texts_of(running.post(fields_sent, path))]
    if not alone or any(other != alone for other in together):
        return Outcome("silent", f"alone {alone!r:.80}, together {together!r:.120}")
    return Outcome("ok", f"{len(together)} texts as alone")


def texts_of(answer: tuple[int, Any]) -> Any:
    """Return the texts of an answer, with their probabilities; nothing for one that is no success."""
    status, body = answer
    if status != 200:
        return None
    if isinstance(body, dict):
        return body["choices"]
    texts: dict[int, str] = {}
    for line in body.split("\n\n"):
        if line in ("", "data: [DONE]"):
            continue
        for choice in json.loads(line.removeprefix("data: ")).get("choices", []):
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


# Clients that leave


LONG = {**ENDLESS, "prompt": "ab"}
STREAMED = {**LONG, "stream": True}
LEAVING: dict[str, dict[str, Any]] = {
    "before a byte": {"sent": 0},
    "in the head": {"sent": 40},
    "in the body": {"sent": -10},
    "at once": {},
    "while generating": {"wait_s": 0.3},
    "by a reset": {"wait_s": 0.3, "reset": True},
    "while streaming": {"fields": STREAMED, "read": 2000},
    "streaming, by a reset": {"fields": STREAMED, "read": 2000, "reset": True},
    "before a stream is read": {"fields": STREAMED},
    "with 32 texts": {"fields": {**LONG, "n": 32}, "wait_s": 0.3},
    "with 32 prompts": {"fields": {**LONG, "prompt": ["a"] * 32}, "wait_s": 0.3},
    "before logprobs": {"fields": {**ORDINARY, "n": 32, "logprobs": 5}, "wait_s": 0.05},
    "four at once": {"wait_s": 0.3, "count": 4},
    "forty, most of them in the queue": {"wait_s": 0.5, "count": 40},
    "a hundred at once": {"count": 100},
}
"""Clients that close their connection at some moment: name to what `leaving_outcome` takes."""


def leaving_outcome(
    running: Running,
    fields: Any = LONG,
    sent: int | None = None,
    wait_s: float = 0.0,
    read: int = 0,
    reset: bool = False,
    count: int = 1,
) -> Outcome:
    """Let clients ask and leave, and measure how long two tokens then take.

    Args:
        sent: bytes of the request that are sent; all unless given.
        wait_s: time until the client leaves.
        read: bytes that it reads before.
        reset: leave by a reset of the connection.
        count: clients that do so at once.
    """
    with ExitStack() as clients:
        asking = [clients.enter_context(running.asking(fields, slice(sent))) for _ in range(count)]
        for client in asking:
            received = 0
            while received < read:
                received += len(client.recv(1 << 12))
        time.sleep(wait_s)
        for client in asking:
            if reset:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    began = time.monotonic()
    status, _ = running.post({**ORDINARY, "max_tokens": 2})
    while status == 503 and time.monotonic() - began < 20:
        time.sleep(0.1)
        status, _ = running.post({**ORDINARY, "max_tokens": 2})
    seconds = time.monotonic() - began
    if status != 200 or seconds > 20:
        return Outcome("hung", f"{status} after {seconds:.1f} s")
    return Outcome("ok", f"two tokens after {seconds:.1f} s")


# Load


def clients_outcome(running: Running, count: int, fields: Any = None) -> Outcome:
    """Let clients ask at once. Each is answered: with the text, or with 503."""
    fields_sent = {**ORDINARY, **(fields or {})}
    alone = running.post(fields_sent)[1]["choices"]
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        answers = list(pool.map(lambda _: running.post(fields_sent), range(count)))
    good = [answer for status, answer in answers if status == 200]
    unexpected = {status for status, _ in answers} - {200, 503}
    if unexpected or not good:
        return Outcome("wrong", f"{len(good)} of {count} answered, others {unexpected}")
    if any(answer["choices"] != alone for answer in good):
        return Outcome("silent", "a text differs from the one alone")
    return Outcome("ok", f"{len(good)} of {count} answered, the others 503")


def among_endless_outcome(
    running: Running, count: int, fields: Any = None, health: bool = False
) -> Outcome:
    """Ask for two tokens while others ask for texts without an end."""
    with ExitStack() as clients:
        for _ in range(count):
            clients.enter_context(running.asking({**ENDLESS, **(fields or {})}))
        time.sleep(0.5)
        began = time.monotonic()
        if health:
            status, _ = running.ask("GET", "/health")
        else:
            status, _ = running.post({**ORDINARY, "max_tokens": 2})
        seconds = time.monotonic() - began
    is_right = status == 200 and seconds < 30
    return Outcome("ok" if is_right else "hung", f"{status} after {seconds:.1f} s")


def connections_outcome(running: Running) -> Outcome:
    """Open more connections than the server takes. It answers 503, and goes on when they are closed."""
    with ExitStack() as clients:
        for _ in range(600):
            clients.enter_context(socket.create_connection(("127.0.0.1", running.port), timeout=30))
        status, _ = running.ask("GET", "/health")
    time.sleep(1)
    after, _ = running.ask("GET", "/health")
    return right((status, after) == (503, 200), f"{status}, and {after} after they had left")


def reading_nothing_outcome(running: Running) -> Outcome:
    """Ask for a long stream and read nothing of it, while others are answered."""
    with running.asking({**ENDLESS, "stream": True}):
        time.sleep(2)
        status, _ = running.post(ORDINARY)
    return right(status == 200, str(status))


def slow_heads_outcome(running: Running) -> Outcome:
    """Begin 50 heads and send nothing more. The server closes the connections, and answers others meanwhile."""
    with ExitStack() as clients:
        slow = [clients.enter_context(running.asking(ORDINARY, slice(30))) for _ in range(50)]
        status, _ = running.post(ORDINARY)
        began = time.monotonic()
        for client in slow:
            client.settimeout(40)
            if client.recv(10) != b"":
                return Outcome("wrong", "a head that is not complete was answered")
        seconds = time.monotonic() - began
    return right(status == 200, f"cut off after {seconds:.0f} s; others were {status}")


def slow_bodies_outcome(running: Running) -> Outcome:
    """Declare ten bodies of 16 MB and send little of them, while others are answered."""
    with ExitStack() as clients:
        for _ in range(10):
            client = clients.enter_context(
                socket.create_connection(("127.0.0.1", running.port), timeout=60)
            )
            client.sendall(head("Content-Length: 16000000") + b"{")
        status, _ = running.post(ORDINARY)
    return right(status == 200, str(status))


def bodies_outcome(running: Running) -> Outcome:
    """Send 40 bodies of 15 MB at once. Memory stays bounded, and is given back."""
    before = running.memory_mib()
    body = b'{"prompt": "' + b"a" * 15_000_000 + b'"}'
    peak = before
    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        answers = [pool.submit(large_status, running, body) for _ in range(40)]
        while not all(answer.done() for answer in answers):
            peak = max(peak, running.memory_mib())
            time.sleep(0.02)
    codes = {answer.result() for answer in answers}
    time.sleep(1)
    after = running.memory_mib()
    detail = f"{before:.0f} MiB before, {peak:.0f} at most, {after:.0f} after; {sorted(codes)}"
    is_right = (
        codes <= {400, 503} and peak - before < BODIES_MIB and after - before < BODIES_MIB / 4
    )
    return right(is_right, detail)


def large_status(running: Running, body: bytes) -> int:
    """Return the status of a large body, which may be answered before all of it is sent."""
    try:
        return running.post(body)[0]
    except ConnectionError:
        return 503


def one_connection_outcome(running: Running) -> Outcome:
    """Send requests one after the other on one connection, wrong ones among them."""
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=60)
    counts = {200: 0, 400: 0}
    for number in range(200):
        fields = ORDINARY if number % 2 else {**ORDINARY, "n": 0}
        connection.request(
            "POST", COMPLETIONS, json.dumps(fields), {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        answer.read()
        counts[answer.status] = counts.get(answer.status, 0) + 1
    connection.close()
    return right(counts == {200: 100, 400: 100}, str(counts))


def pipelined_outcome(running: Running) -> Outcome:
    """Send requests on one connection without waiting for answers."""
    content = json.dumps({**ORDINARY, "max_tokens": 1}).encode()
    request = head(f"Content-Length: {len(content)}") + content
    last = head(f"Content-Length: {len(content)}", "Connection: close") + content
    received = running.raw(request * 19 + last)
    count = received.count(b"HTTP/1.1 200 ")
    return right(count == 20, f"{count} of 20 answered")


LOADS: dict[str, Callable[[Running], Outcome]] = {
    "8 clients": partial(clients_outcome, count=8),
    "40 clients": partial(clients_outcome, count=40),
    "200 clients": partial(clients_outcome, count=200),
    "8 clients of 32 texts": partial(clients_outcome, count=8, fields={"n": 32}),
    "a short request among 8 endless ones": partial(among_endless_outcome, count=8),
    "a short request among 30 endless ones": partial(among_endless_outcome, count=30),
    "a short request beside 32 endless texts": partial(
        among_endless_outcome, count=1, fields={"n": 32}
    ),
    "health among 60 endless ones": partial(among_endless_outcome, count=60, health=True),
    "more connections than there may be": connections_outcome,
    "a client that reads nothing": reading_nothing_outcome,
    "heads that come slowly": slow_heads_outcome,
    "bodies that come slowly": slow_bodies_outcome,
    "40 bodies of 15 MB": bodies_outcome,
    "200 requests on one connection": one_connection_outcome,
    "20 requests sent at once on one connection": pipelined_outcome,
}
"""Many clients at once, slow ones, and memory."""


def memory_outcome(server: Shared, folder: Path) -> Outcome:
    """Ask a new server for many ordinary texts. Its memory is flat after the first ones."""
    with server.started() as running:
        random = np.random.default_rng(0)
        memory = []
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            for begin in range(0, REQUESTS, 50):
                fields_sent = [ordinary(random, begin + number) for number in range(50)]
                codes = set(pool.map(lambda fields: running.post(fields)[0], fields_sent))
                if codes != {200}:
                    return Outcome("wrong", f"{codes} at request {begin}")
                memory.append((begin + 50, running.memory_mib()))
        warm = next(mib for count, mib in memory if count == WARM)
        most = max(mib for count, mib in memory if count >= WARM)
        detail = f"{warm:.1f} MiB after {WARM}, {memory[-1][1]:.1f} after {REQUESTS}, at most {most:.1f}: {most / warm - 1:+.1%}"
        outcome = right(most <= FLAT * warm, detail)
        return server.check(running, outcome)


def ordinary(random: np.random.Generator, number: int) -> dict[str, Any]:
    """Return a request as clients send them: one of several kinds, and of any length."""
    size = int(random.integers(1, CONTEXT))
    prompt = "".join(map(chr, random.integers(97, 123, size)))
    fields = {
        **ORDINARY,
        "prompt": prompt,
        "seed": number,
        "max_tokens": int(random.integers(1, 40)),
    }
    if number % 5 == 0:
        fields["stream"] = True
    elif number % 7 == 0:
        fields |= {"logprobs": 2, "max_tokens": 1}
    elif number % 11 == 0:
        fields["n"] = 3
    return fields


# A worker without memory


def failure_trials(server: Shared) -> list[Trial]:
    """Return trials of a server that runs out of memory, or is stopped for a while."""
    listed = []
    for room_mib in (0, 2, 8, 32):
        for name, fields in {
            "logprobs": {**ORDINARY, "n": 32, "logprobs": 20},
            "32 texts": {**ORDINARY, "n": 32},
            "a body of 15 MB": b'{"prompt": "' + b"a" * 15_000_000 + b'"}',
        }.items():
            run = partial(no_memory_outcome, server, room_mib=room_mib, fields=fields)
            listed.append(Trial(f"failures: {name} with {room_mib} MiB left", "failures", run))
    listed.append(Trial("failures: stopped for 15 s", "failures", partial(stopped_outcome, server)))
    return listed


def no_memory_outcome(server: Shared, folder: Path, room_mib: int, fields: Any) -> Outcome:
    """Take memory away while a request runs, and give it back. The request is answered, and the server lives on."""
    with server.started() as running:
        server.expected = running.post(ORDINARY)[1]["choices"]
        running.post({**ORDINARY, "n": 32, "logprobs": 20})  # compiled before
        status = Path(f"/proc/{running.process.pid}/status").read_text()
        size = int(re.findall(r"VmSize:\s+(\d+)", status)[0]) << 10
        resource.prlimit(running.process.pid, resource.RLIMIT_AS, (size + (room_mib << 20), -1))
        try:
            code = (
                large_status(running, fields)
                if isinstance(fields, bytes)
                else running.post(fields)[0]
            )
        except (TimeoutError, http.client.HTTPException, ConnectionError) as error:
            code = repr(error)
        finally:
            resource.prlimit(running.process.pid, resource.RLIMIT_AS, (-1, -1))
        verdict = "ok" if code in (200, 400, 500, 503) else "wrong"
        return server.check(running, Outcome(verdict, f"{code} without memory"))


def stopped_outcome(server: Shared, folder: Path) -> Outcome:
    """Stop the server's process while it writes, and let it go on."""
    with server.started() as running:
        with running.asking({**ENDLESS, "stream": True}) as client:
            client.recv(100)
            running.process.send_signal(signal.SIGSTOP)
            time.sleep(15)
            running.process.send_signal(signal.SIGCONT)
            client.recv(100)
        return server.check(running, Outcome("ok", "goes on"))


# The command


def command_trials(server: Shared) -> list[Trial]:
    """Return trials of the command line, and of its end."""
    listed = []
    wrong = {
        "port": ["--port", "70000"],
        "host": ["--host", "192.0.2.1"],
        "slots": ["--slots", "0"],
        "max-tokens": ["--max-tokens", "-1"],
        "max-seconds": ["--max-seconds", "nan"],
        "max-waiting": ["--max-waiting", "0"],
        "chat-template": ["--data.chat-template", "none.jinja"],
    }
    for name, flags in wrong.items():
        listed.append(
            Trial(
                f"command: a wrong --{name}",
                "command",
                partial(refused_outcome, server, flags=flags),
            )
        )
    for number in (signal.SIGINT, signal.SIGTERM):
        for load in ("idle", "generating", "streaming", "compiling"):
            run = partial(signal_outcome, server, number=number, load=load)
            listed.append(Trial(f"command: {number.name} while {load}", "command", run))
    for name, flags in {
        "--max-seconds 1": ["--max-seconds", "1"],
        "--slots 1": ["--slots", "1"],
    }.items():
        listed.append(
            Trial(f"command: {name}", "command", partial(limited_outcome, server, flags=flags))
        )
    return listed


def refused_outcome(server: Shared, folder: Path, flags: Sequence[str]) -> Outcome:
    """Start the command with a wrong flag."""
    tokenizer = ["--data.tokenizer", "bytes"]
    return judge(mupax(["serve", str(server.model), *tokenizer, "--port", "0", *flags]), (2,))


def signal_outcome(server: Shared, folder: Path, number: signal.Signals, load: str) -> Outcome:
    """Send a signal to a server."""
    with server.started() as running, ExitStack() as clients:
        if load != "idle":
            running.post(ORDINARY)
            fields = {
                **ENDLESS,
                "prompt": "ab" if load == "compiling" else "to be",
                "stream": load == "streaming",
            }
            client = clients.enter_context(running.asking(fields))
            if load == "streaming":
                client.recv(100)
            time.sleep(0.5 if load == "compiling" else 8)
        began = time.monotonic()
        code = running.stop(number)
        seconds = time.monotonic() - began
    time.sleep(0.2)
    if "Traceback" in running.output or "Exception ignored" in running.output:
        return Outcome("traceback", running.output[-200:])
    is_right = (
        code == 128 + number and seconds < 8
    )  # on a machine with nothing else to do it takes 2 s
    return right(is_right, f"exit {code} after {seconds:.1f} s")


def limited_outcome(server: Shared, folder: Path, flags: Sequence[str]) -> Outcome:
    """Ask a server with a limit for eight texts without an end and one short text."""
    with server.started("--max-seconds", "5", *flags) as running:
        running.post({**ENDLESS, "max_tokens": 2})  # which compiles
        with ExitStack() as clients:
            for _ in range(8):
                clients.enter_context(running.asking(ENDLESS))
            began = time.monotonic()
            status, answer = running.post({**ENDLESS, "seed": 5})
            seconds = time.monotonic() - began
        finish = answer["choices"][0]["finish_reason"] if status == 200 else ""
        is_right = (status, finish) == (200, "length") or status == 503
        outcome = right(is_right and seconds < 15, f"{status} {finish} after {seconds:.1f} s")
        return server.check(running, outcome)
