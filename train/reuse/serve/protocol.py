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
LARGEST_HEAD = 1 << 15
"""Bytes of the head of a request."""


class LimitedProtocol(H11Protocol):
    """A connection that is closed if its client sends a head, or reads an answer, too slowly.

    Uvicorn itself limits only the time between requests.
    """

    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(HEAD_S, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_timer = _cancelled(self._head_timer)
        self._write_timer = _cancelled(self._write_timer)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
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
        if self.conn.our_state is not h11.IDLE:  # an answer has begun: nothing can be said any more
            self.transport.close()
            return
        body = json.dumps(ApiError(400, "this is no request of HTTP/1.1, or its head is too long").body()).encode()
        headers: list[tuple[bytes, Any]] = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            self.transport.abort()


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
