"""Uvicorn's protocol with limits on time, and errors in OpenAI's form."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from mupax.train.reuse.serve.fields import ApiError

HEAD_S = 15.0
"""How long the head of a request may take."""
WRITE_S = 60.0
"""How long a client may read nothing of what is sent to it."""
LINGER_S = 2.0
"""How long what comes after a refusal is read and thrown away."""
LARGEST_HEAD = 1 << 15
"""Bytes of the head of a request."""


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
        for event in (h11.Response(status_code=error.status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
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
