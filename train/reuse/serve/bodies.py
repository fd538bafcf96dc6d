"""Bodies of requests, with a bound on each and on all together."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
from collections.abc import AsyncIterator
from typing import Any

from mupax.train.reuse.serve.fields import ApiError
from mupax.train.reuse.serve.protocol import LINGER_S

LARGEST = 1 << 24
"""Bytes of one body."""
LARGEST_TOTAL = 1 << 26
"""Bytes of all bodies that are read or parsed at a time."""
BODY_S = 60.0
"""How long a body may take to come."""
_BIG = 1 << 20
"""Bytes of a body that is parsed alone: what Python makes of JSON can take twenty times its size."""


class ClientLeft(Exception):
    """A client that closed its connection."""


class Bodies:
    """Bodies that are in memory."""

    def __init__(self) -> None:
        self._total = 0
        self._one_big = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def read(self, scope: Any, receive: Any) -> AsyncIterator[bytearray]:
        """Read a body, which counts as being in memory while entered.

        Raises:
            ApiError: 408, 411, 413, 415 or 503.
            ClientLeft: the client closed its connection.
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
            async with self._one_big if is_big else contextlib.nullcontext():
                yield body
        finally:
            self._release(body)
            if is_big:
                _give_back_memory()

    async def _fill(self, body: bytearray, receive: Any) -> None:
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            part = message.get("body", b"")
            if len(body) + len(part) > LARGEST:
                raise ApiError(413, f"the body has more than {LARGEST} bytes")
            # Bytes count when they come. A client that only says that it will send many takes nothing from others.
            if self._total + len(part) > LARGEST_TOTAL:
                raise ApiError(503, "too many large bodies at a time; ask again later", retry_s=5)
            self._total += len(part)
            body += part
            more = message.get("more_body", False)

    def _release(self, body: bytearray) -> None:
        self._total -= len(body)
        body.clear()


def _check_headers(headers: dict[bytes, bytes]) -> None:
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")
    if kind != "application/json":  # which a page of another site cannot send unasked
        raise ApiError(
            415, f"the body is {kind or 'of no type'}; send JSON with the header Content-Type: application/json"
        )
    size = headers.get(b"content-length")
    if size is None:
        if b"transfer-encoding" not in headers:
            raise ApiError(411, "the header Content-Length is missing")
        return
    if int(size) > LARGEST:
        raise ApiError(413, f"the body has {int(size)} bytes; at most {LARGEST} are read")


async def discard(receive: Any) -> None:
    """Read the rest of a body and throw it away, for a short time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            message = await receive()
            while message["type"] == "http.request" and message.get("more_body", False):
                message = await receive()


def _give_back_memory() -> None:
    """Return free memory to the system. The C library keeps it otherwise (`mupax.train.parallel.hardware`)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
