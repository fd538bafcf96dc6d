"""A server of a small model with random weights, and requests to it."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from typing import Any, NamedTuple

from mupax.train.reuse.serve import command
from mupax.train.reuse.serve.server import Server
from mupax.train.reuse.serve.service import Service
from mupax.zoo.configs import DecoderConfig

MODEL = DecoderConfig(width=16, depth=1, num_heads=2, mlp_ratio=2, vocab_size=128, seq_len=32)
"""A model that writes ASCII."""
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


@contextlib.contextmanager
def serving(folder: Path, tokenizer: str | None = "bytes", **options: Any) -> Iterator[Server]:
    """Serve a model in a thread."""
    args = command.Serve(workdir=folder, port=0, tokenizer=tokenizer, **options)
    with Server(args.host, args.port) as server:
        server.service = command.opened_service(args)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
            server.service.close()


def service_of(server: Server) -> Service:
    assert server.service is not None
    return server.service


class Response(NamedTuple):
    """Answer of a server. The body is parsed if it is JSON."""

    status: int
    body: Any
    headers: Message


def request(
    server: Server, fields: Any = None, path: str = COMPLETIONS, **headers: str
) -> Response:
    """Send a GET, or a POST with fields or bytes. Content_Type is the header Content-Type."""
    method = "GET" if fields is None else "POST"
    content = fields
    if fields is not None and not isinstance(fields, bytes):
        content = json.dumps(fields).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request(method, path, content, {"Content-Type": "application/json", **named})
    answer = connection.getresponse()
    body: Any = answer.read().decode()  # strict: every answer is UTF-8
    connection.close()
    if answer.headers.get_content_type() == "application/json":
        body = json.loads(body)
    return Response(answer.status, body, answer.headers)
