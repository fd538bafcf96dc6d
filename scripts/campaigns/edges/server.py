"""Trials of `mupax serve`: odd requests, hostile heads, load, clients that leave, missing memory.

Most trials share one server of a tiny model. After each of them the server must answer an ordinary
request with the same text as at first, and must not have printed a traceback.
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
VOCABULARY = 128
CONTEXT = 64
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] ~ m.content ~ '|' }}{% endfor %}"
    "{{ 'a' if add_generation_prompt }}"
)
ORDINARY = {"prompt": "to be", "max_tokens": 12, "temperature": 1, "seed": 5, "ignore_eos": True}
ENDLESS = {"prompt": "ab", "max_tokens": 100_000, "temperature": 1, "seed": 1, "ignore_eos": True}
REQUESTS = 2000
"""Number of ordinary requests in the trial of memory."""
WARM = 500
"""Number of requests after which memory must stay flat."""
FLAT = 1.05
"""Largest ratio of the server's memory to its memory after `WARM` requests."""
BODIES_MIB = 400
"""Largest growth of a server's memory by 40 bodies of 15 MB: four in memory, and one parsed."""


def trials(shared: Path, seed: int) -> list[Trial]:
    """Return the trials of the shared server, of failures and of the command itself."""
    server = Shared(shared)
    bodies = {}
    for name, (body, status) in BODIES.items():
        bodies[name] = partial(posted, fields=body, codes=(status,))
    paths = {}
    for name, request in PATHS.items():
        paths[name] = partial(path_outcome, request=request)
    leaving = {}
    for name, options in LEAVING.items():
        leaving[name] = partial(leaving_outcome, **options)
    groups = {
        "values": value_runs(),
        "bodies": bodies,
        "heads": head_runs(),
        "paths": paths,
        "texts": text_runs(seed),
        "clients that leave": leaving,
        "load": LOADS,
    }
    listed = []
    for group, runs in groups.items():
        for name, run in runs.items():
            listed.append(shared_trial(server, group, name, run))
    listed.append(Trial(f"load: {REQUESTS} requests", "load", partial(memory_outcome, server)))
    return [*listed, *failure_trials(server), *command_trials(server)]


class Running:
    """A `mupax serve` process that serves `model` on a free port.

    Args:
        *flags: Further flags of the command, one word each, such as `"--slots", "1"`.
    """

    def __init__(self, model: Path, *flags: str) -> None:
        words = ["serve", str(model), "--port", "0", *flags]
        self.process = start(words)
        # No trial stops the server that trials share.
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
            text = line.decode(errors="replace")
            self._lines.append(text)
            address = re.search(r"http://[^:]+:(\d+)/", text)
            if address:
                self.port = int(address[1])
                self._is_ready.set()
        # A server that ends without an address must not be waited for.
        self._is_ready.set()

    @property
    def output(self) -> str:
        """Text that the server has printed, on both outputs."""
        return "".join(self._lines)

    def memory_mib(self) -> float:
        """Return the resident memory of the server in MiB."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1024

    def post(
        self,
        fields: Any,
        path: str = COMPLETIONS,
        timeout: float = 60,
        kind: str = "application/json",
    ) -> tuple[int, Any]:
        """Send a POST request, and return the status and the answer.

        Args:
            fields: Body: bytes as they are, anything else as JSON.
        """
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
        """Send a request of any method, and return the status and the answer.

        The answer is decoded if it is JSON, and text otherwise.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request(method, path, content, headers or {})
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        if text and answer.headers.get_content_type() == "application/json":
            return answer.status, json.loads(text)
        return answer.status, text

    def raw(self, sent: bytes, timeout: float = 30) -> bytes:
        """Send bytes, and return the bytes received until the server closes the connection."""
        received = b""
        with (
            socket.create_connection(("127.0.0.1", self.port), timeout=timeout) as client,
            # The server may reset a connection that it refuses.
            suppress(ConnectionError),
        ):
            client.sendall(sent)
            part = client.recv(1 << 16)
            while part:
                received += part
                part = client.recv(1 << 16)
        return received

    @contextmanager
    def asking(self, fields: Any, sent: slice = slice(None)) -> Iterator[socket.socket]:
        """Context manager of a client that has sent a request, and disconnects at the end.

        Args:
            sent: Part of the request's bytes that is sent. Default: all of them.
        """
        content = json.dumps(fields).encode()
        request = head(f"Content-Length: {len(content)}") + content
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as client:
            client.sendall(request[sent])
            yield client

    def stop(self, number: int = signal.SIGINT) -> int | None:
        """Send a signal. Return the exit code, or None if the server did not end within 10 s."""
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
        """Choices in the first answer to the ordinary request."""

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
        """The running server. Its first use starts it."""
        running = Running(self.model, *self.flags)
        self.expected = running.post(ORDINARY)[1]["choices"]
        return running

    @contextmanager
    def started(self, *flags: str) -> Iterator[Running]:
        """Context manager of a server of the same model for one trial alone."""
        running = Running(self.model, *self.flags, *flags)
        try:
            yield running
        finally:
            running.stop()

    def check(self, running: Running, outcome: Outcome) -> Outcome:
        """Check the server after a trial with an ordinary request and a request to `/health`.

        Returns:
            `outcome` if the server works and the ordinary request gets the same text as before,
            otherwise a fault.
        """
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
    """Return the head of an HTTP POST request with a JSON body.

    Args:
        *lines: Further header lines, such as `Connection: close`.
    """
    first = f"POST {path} HTTP/{version}"
    return "\r\n".join(
        [first, "Host: localhost", "Content-Type: application/json", *lines, "", ""]
    ).encode("latin-1")


def shared_trial(server: Shared, group: str, name: str, run: Callable[[Running], Outcome]) -> Trial:
    """Return a trial on the shared server, which is checked after the trial."""

    def run_trial(folder: Path) -> Outcome:
        running = server.running
        try:
            outcome = run(running)
        except TimeoutError:
            outcome = Outcome("hung", "no answer in time")
        return outcome if outcome.verdict != "ok" else server.check(running, outcome)

    return Trial(f"{group}: {name}", group, run_trial)


def status_outcome(status: int, answer: Any, expected: Iterable[int]) -> Outcome:
    """Judge the HTTP status of an answer. From 400 on, the body must be an error as OpenAI's."""
    text = json.dumps(answer)[:120]
    if status not in expected:
        return Outcome("wrong", f"{status} {text}")
    if status < 400:
        return Outcome("ok", f"{status} {text}")
    message = answer.get("error", {}).get("message") if isinstance(answer, dict) else None
    if not message:
        return Outcome("wrong", f"{status} without an error in JSON: {text}")
    return Outcome("ok", f"{status} {message[:120]}")


# Values of fields

# No float holds it.
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
    """Return trials of requests in which one field has a wrong or an extreme value."""
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
    # The second prompt would have the next seed, which no int64 holds.
    several = {**ORDINARY, "prompt": ["a", "b"], "seed": 2**63 - 1}
    runs["seed largest with two prompts"] = partial(posted, fields=several, codes=(400,))
    return runs


def posted(running: Running, fields: Any, codes: Sequence[int], path: str = COMPLETIONS) -> Outcome:
    """Send a POST request, and judge the status of the answer.

    Args:
        fields: Body: bytes as they are, anything else as JSON.
    """
    return status_outcome(*running.post(fields, path), codes)


# Bodies

BODIES: dict[str, tuple[bytes, int]] = {
    "empty": (b"", 400),
    "null": (b"null", 400),
    "list": (b"[]", 400),
    "half": (b'{"prompt": "a', 400),
    "NaN": (b'{"temperature": NaN}', 400),
    "Infinity": (b'{"top_p": Infinity}', 400),
    # Python reads it as infinity.
    "1e400": (b'{"temperature": 1e400}', 400),
    # Python converts at most 4,300 digits to a number.
    "5,000 digits": (b'{"n": 1' + b"0" * 5000 + b"}", 400),
    "bytes that are not UTF-8": (b'{"prompt": "\xff\xfe"}', 400),
    # RFC 3629 allows no surrogates.
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
    # Python's parser takes the last one.
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
    # RFC 9112, section 6.1: two servers that disagree on the body's end can be tricked.
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
    # RFC 9112, section 6.1: chunks in a request of HTTP/1.0 count as faulty.
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
    # RFC 9112, section 5.1: a server must refuse it.
    "a space before the colon": (head("Transfer-Encoding : chunked", SIZED) + SMALL, (400,)),
    "a tab in Transfer-Encoding": (head("Transfer-Encoding:\tchunked", SIZED) + CHUNKED, (400,)),
    # RFC 9112, section 6.3: different lengths cannot be recovered from.
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
    # RFC 9112, section 5.2: a server refuses a folded line or joins it.
    "a folded line": (head("X: a\r\n b", SIZED, "Connection: close") + SMALL, (200, 400)),
    "a NUL in a header": (head("X: a\0b", SIZED) + SMALL, (400,)),
    "an escape in a header": (head("X: \x1b[2J", SIZED, "Connection: close") + SMALL, (200, 400)),
    "a header of 40 kB": (head("X: " + "a" * 40_000, SIZED) + SMALL, (431,)),
    "a header of 1 MB": (head("X: " + "a" * 1_000_000, SIZED) + SMALL, (431,)),
    "4,000 headers": (head(*[f"X{number}: a" for number in range(4000)], SIZED) + SMALL, (431,)),
    "a path of 100 kB": (head(SIZED, path="/" + "a" * 100_000) + SMALL, (431,)),
    "a path with an escape": (b"GET /\x1b[2J HTTP/1.1\r\nHost: localhost\r\n\r\n", (400,)),
    # The first bytes of a client that was told https:// instead of http://.
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"a" * 200, (400,)),
    # The preface of a client that assumes HTTP/2 (RFC 9113, section 3.4).
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", (400, 505)),
    "HTTP/0.9": (b"GET /\r\n\r\n", (400,)),
    # RFC 9112, section 3.2: no Host, or two, must be refused.
    "no Host": (b"POST /v1/completions HTTP/1.1\r\n\r\n", (400,)),
    "two Hosts": (b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\n\r\n", (400,)),
    # A page of another site whose name is made to resolve to this machine.
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
    """Return trials of requests whose heads are wrong, ambiguous or unusual but right."""
    runs: dict[str, Callable[[Running], Outcome]] = {}
    for name, (sent, codes) in HEADS.items():
        runs[name] = partial(head_outcome, sent=sent, codes=codes)
    for name, sent in RIGHT_HEADS.items():
        runs[name] = partial(right_head_outcome, sent=sent)
    return runs


def head_outcome(running: Running, sent: bytes, codes: Sequence[int]) -> Outcome:
    """Send a request with a wrong head, directly followed by a second request.

    If the first is refused, the second must not be answered: its bytes may belong to the first.

    Args:
        codes: HTTP statuses that are right for the first answer, such as 400.
    """
    received = running.raw(sent + SMUGGLED)
    # The status stands behind `HTTP/1.1 `.
    status = int(received[9:12] or b"0")
    if status not in codes:
        return Outcome("wrong", repr(received[:100]))
    # A second answer means that the bytes of one body were read as another request.
    if status >= 400 and received.count(b"HTTP/1.1 ") > 1:
        return Outcome("wrong", f"the request behind it was answered: {received[-100:]!r}")
    return Outcome("ok", str(status))


def right_head_outcome(running: Running, sent: bytes) -> Outcome:
    """Send an unusual request that is right. It must be answered with 200."""
    received = running.raw(sent)
    after_continue = received.partition(b"HTTP/1.1 100 Continue\r\n\r\n")[2]
    is_right = b" 200 " in after_continue[:20] or b" 200 " in received[:20]
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
    """Send a request without a body, and compare the status.

    Args:
        request: Method and path of the request, and the expected status.
    """
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
    """Return a trial for each request of `KINDS` among the other clients of each of `CROWDS`.

    The generated text must be the same as without other clients.
    """
    runs = {}
    for name, fields in KINDS.items():
        for crowd in CROWDS:
            runs[f"{name}, {crowd}"] = partial(text_outcome, fields=fields, crowd=crowd, seed=seed)
    return runs


def text_outcome(running: Running, fields: dict[str, Any], crowd: str, seed: int) -> Outcome:
    """Send a request alone, then while other clients send requests, and compare the texts.

    Args:
        fields: Fields of the request that differ from `ORDINARY`.
        crowd: Kind of the other clients, a key of `CROWDS`.
        seed: Number from which the request's own seed is made.
    """
    path = CHAT if "messages" in fields else COMPLETIONS
    fields_sent = {**ORDINARY, "seed": seed + 11, **fields}
    if path == CHAT:
        del fields_sent["prompt"]
    alone = texts_of(running.post(fields_sent, path))
    count = CROWDS[crowd]
    with ExitStack() as clients:
        if crowd == "8 of the same":
            with concurrent.futures.ThreadPoolExecutor(count) as pool:
                answers = pool.map(lambda _: running.post(fields_sent, path), range(count))
                together = [texts_of(answer) for answer in answers]
        else:
            for number in range(count):
                clients.enter_context(
                    running.asking({**ENDLESS, "seed": number, "top_p": 0.5 + 0.1 * number})
                )
            if crowd == "clients that leave":
                clients.close()
            together = [texts_of(running.post(fields_sent, path))]
    if not alone or any(texts != alone for texts in together):
        return Outcome("silent", f"alone {alone!r:.80}, together {together!r:.120}")
    return Outcome("ok", f"{len(together)} texts as alone")


def texts_of(answer: tuple[int, Any]) -> Any:
    """Return the choices of an answer or the texts of a stream; `None` if the status is not 200."""
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
"""Clients that close their connection at some moment: name to options of `leaving_outcome`."""


def leaving_outcome(
    running: Running,
    fields: Any = LONG,
    sent: int | None = None,
    wait_s: float = 0.0,
    read: int = 0,
    reset: bool = False,
    count: int = 1,
) -> Outcome:
    """Let clients send a request and disconnect. Another client must then get two tokens in 20 s.

    Args:
        sent: End of the sent part of the request in bytes, negative from its end. Default: all.
        wait_s: Seconds until the clients disconnect. Default: 0.
        read: Number of bytes of the answer that each client reads before it disconnects.
        reset: Disconnect by a TCP reset, and not by closing the connection in order.
        count: Number of clients. Default: 1.
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
                # With a linger of 0 s, closing sends a reset.
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
    """Send a request from many clients at once. Each must get the right text, or 503."""
    fields_sent = {**ORDINARY, **(fields or {})}
    alone = running.post(fields_sent)[1]["choices"]
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        answers = list(pool.map(lambda _: running.post(fields_sent), range(count)))
    good = []
    unexpected = set()
    for status, answer in answers:
        if status == 200:
            good.append(answer)
        elif status != 503:
            unexpected.add(status)
    if unexpected or not good:
        return Outcome("wrong", f"{len(good)} of {count} answered, others {unexpected}")
    if any(answer["choices"] != alone for answer in good):
        return Outcome("silent", "a text differs from the one alone")
    return Outcome("ok", f"{len(good)} of {count} answered, the others 503")


def among_endless_outcome(
    running: Running, count: int, fields: Any = None, health: bool = False
) -> Outcome:
    """Ask for two tokens while other clients ask for endless texts.

    Args:
        count: Number of the clients that ask for endless texts.
        fields: Fields of the endless requests that differ from `ENDLESS`.
        health: Ask for `/health` instead of two tokens.
    """
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
    """Open 600 connections. The server must answer 503, and work again when they are closed."""
    with ExitStack() as clients:
        for _ in range(600):
            clients.enter_context(socket.create_connection(("127.0.0.1", running.port), timeout=30))
        status, _ = running.ask("GET", "/health")
    time.sleep(1)
    after, _ = running.ask("GET", "/health")
    return right((status, after) == (503, 200), f"{status}, and {after} after they had left")


def reading_nothing_outcome(running: Running) -> Outcome:
    """Ask for a long stream and read nothing of it. Another client must be answered."""
    with running.asking({**ENDLESS, "stream": True}):
        time.sleep(2)
        status, _ = running.post(ORDINARY)
    return right(status == 200, str(status))


def slow_heads_outcome(running: Running) -> Outcome:
    """Begin 50 heads and send nothing more. The server must cut them off and answer others."""
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
    """Declare ten bodies of 16 MB and send one byte of each. Another client must be answered."""
    with ExitStack() as clients:
        for _ in range(10):
            client = clients.enter_context(
                socket.create_connection(("127.0.0.1", running.port), timeout=60)
            )
            client.sendall(head("Content-Length: 16000000") + b"{")
        status, _ = running.post(ORDINARY)
    return right(status == 200, str(status))


def bodies_outcome(running: Running) -> Outcome:
    """Send 40 bodies of 15 MB at once. Memory must stay bounded, and must be freed."""
    idle = running.memory_mib()
    body = b'{"prompt": "' + b"a" * 15_000_000 + b'"}'
    peak = idle
    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        answers = [pool.submit(large_status, running, body) for _ in range(40)]
        while not all(answer.done() for answer in answers):
            peak = max(peak, running.memory_mib())
            time.sleep(0.02)
    codes = {answer.result() for answer in answers}
    time.sleep(1)
    after = running.memory_mib()
    detail = f"{idle:.0f} MiB before, {peak:.0f} at most, {after:.0f} after; {sorted(codes)}"
    is_bounded = peak - idle < BODIES_MIB and after - idle < BODIES_MIB / 4
    return right(is_bounded and codes <= {400, 503}, detail)


def large_status(running: Running, body: bytes) -> int:
    """Send a large body, and return the status; 503 if the connection breaks while it is sent."""
    try:
        return running.post(body)[0]
    except ConnectionError:
        return 503


def one_connection_outcome(running: Running) -> Outcome:
    """Send 200 requests one after the other on one connection. Every second one is wrong."""
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
    """Send 20 requests on one connection without waiting for the answers."""
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
"""Trials of load by their name."""


def memory_outcome(server: Shared, folder: Path) -> Outcome:
    """Send `REQUESTS` ordinary requests to a new server. Its memory must stay flat after `WARM`."""
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
        warm = 0.0
        peak = 0.0
        for count, mib in memory:
            if count == WARM:
                warm = mib
            if count >= WARM:
                peak = max(peak, mib)
        detail = (
            f"{warm:.1f} MiB after {WARM}, {memory[-1][1]:.1f} after {REQUESTS}, "
            f"at most {peak:.1f}: {peak / warm - 1:+.1%}"
        )
        outcome = right(peak <= FLAT * warm, detail)
        return server.check(running, outcome)


def ordinary(random: np.random.Generator, number: int) -> dict[str, Any]:
    """Return the fields of a request with a random prompt, length and seed.

    Args:
        number: Seed of the request. It also decides whether the request streams, asks for log
            probabilities, or asks for several texts.
    """
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
    for spare_mib in (0, 2, 8, 32):
        for name, fields in {
            "logprobs": {**ORDINARY, "n": 32, "logprobs": 20},
            "32 texts": {**ORDINARY, "n": 32},
            "a body of 15 MB": b'{"prompt": "' + b"a" * 15_000_000 + b'"}',
        }.items():
            run = partial(no_memory_outcome, server, spare_mib=spare_mib, fields=fields)
            listed.append(Trial(f"failures: {name} with {spare_mib} MiB left", "failures", run))
    listed.append(Trial("failures: stopped for 15 s", "failures", partial(stopped_outcome, server)))
    return listed


def no_memory_outcome(server: Shared, folder: Path, spare_mib: int, fields: Any) -> Outcome:
    """Limit the server's memory during a request. The server must answer it, and others after it.

    Args:
        spare_mib: Address space in MiB that the server may still take.
        fields: Body of the request: bytes as they are, anything else as JSON.
    """
    with server.started() as running:
        server.expected = running.post(ORDINARY)[1]["choices"]
        # Compile the program of 32 texts while there is memory for it.
        running.post({**ORDINARY, "n": 32, "logprobs": 20})
        status = Path(f"/proc/{running.process.pid}/status").read_text()
        size = int(re.findall(r"VmSize:\s+(\d+)", status)[0]) << 10
        # The hard limit stays open, so that the soft one can be lifted again.
        resource.prlimit(running.process.pid, resource.RLIMIT_AS, (size + (spare_mib << 20), -1))
        try:
            if isinstance(fields, bytes):
                code = large_status(running, fields)
            else:
                code = running.post(fields)[0]
        except (TimeoutError, http.client.HTTPException, ConnectionError) as error:
            code = repr(error)
        finally:
            resource.prlimit(running.process.pid, resource.RLIMIT_AS, (-1, -1))
        verdict = "ok" if code in (200, 400, 500, 503) else "wrong"
        return server.check(running, Outcome(verdict, f"{code} without memory"))


def stopped_outcome(server: Shared, folder: Path) -> Outcome:
    """Stop the server's process for 15 s while it streams, and let it go on."""
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
    """Return trials of wrong flags, of signals and of limits."""
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
    """Start the command with a wrong flag. It must end with exit code 2."""
    tokenizer = ["--data.tokenizer", "bytes"]
    return judge(mupax(["serve", str(server.model), *tokenizer, "--port", "0", *flags]), (2,))


def signal_outcome(server: Shared, folder: Path, number: signal.Signals, load: str) -> Outcome:
    """Send a signal to a server. It must end within 8 s with 128 and the signal's number.

    Args:
        load: Work of the server at the time: idle, compiling, generating or streaming.
    """
    with server.started() as running, ExitStack() as clients:
        if load != "idle":
            running.post(ORDINARY)
            # A prompt of another length needs a program that is not compiled yet.
            prompt = "ab" if load == "compiling" else "to be"
            fields = {**ENDLESS, "prompt": prompt, "stream": load == "streaming"}
            client = clients.enter_context(running.asking(fields))
            if load == "streaming":
                client.recv(100)
            time.sleep(0.5 if load == "compiling" else 8)
        began = time.monotonic()
        code = running.stop(number)
        seconds = time.monotonic() - began
    # The last lines may still be in the pipe.
    time.sleep(0.2)
    if "Traceback" in running.output or "Exception ignored" in running.output:
        return Outcome("traceback", running.output[-200:])
    # An idle machine takes 2 s.
    is_right = code == 128 + number and seconds < 8
    return right(is_right, f"exit {code} after {seconds:.1f} s")


def limited_outcome(server: Shared, folder: Path, flags: Sequence[str]) -> Outcome:
    """Ask a server with `--max-seconds 5` for eight endless texts and then for another one.

    The last text must be cut off by the limit or refused with 503, within 15 s.

    Args:
        flags: Further flags of the server, which may replace the limit.
    """
    with server.started("--max-seconds", "5", *flags) as running:
        running.post({**ENDLESS, "max_tokens": 2})  # compiles the program
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
