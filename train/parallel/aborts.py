"""Where a library of a process of several aborts it: the others are told, and the end is a message.

JAX's client aborts its process as soon as the coordinator, which is process 0, is gone. It has a callback for that, which
jaxlib 0.10 to 0.12 cannot call (its argument has no form in Python): the attempt ends in an abort too, but without the trace of the
stack. Python's own handlers only note a signal, and an abort goes on after them; so this one is called by the C library.
JAX's coordinator aborts too when the wall clock of its machine jumps: it then takes every process for dead.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from jax._src import distributed as _distributed

from mupax.terminal import leave

_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)
_ANSWER_S = 2.0
"""How long the coordinator may take to accept a connection."""
_handlers: list[Any] = []
"""Kept: the C library has their addresses."""


def listen(coordinator: str | None, tell: Callable[[str], object]) -> None:
    """From now on an abort of this process says why, to the others and on the screen.

    Args:
        coordinator: its address, HOST:PORT; None where this process is it.
        tell: the others.
    """

    def aborted(number: int) -> None:
        if coordinator is not None and not _answers(coordinator):
            leave(1, f"error: process 0 ({coordinator}) failed: killed or cut off, it does not answer any more")
        # In another thread: this one may be of the client itself, which waits for it.
        told = threading.Thread(target=tell, args=("aborted by a library; its own screen has more",), daemon=True)
        told.start()
        told.join(_ANSWER_S)
        if coordinator is None:
            time.sleep(_ANSWER_S)  # until the others have read it: this process takes the store with it
        leave(
            1,
            "error: a library has aborted this process; its own lines above say why. The same command with --resume goes on from "
            "the newest checkpoint",
        )

    library = ctypes.CDLL(None)
    library.signal.argtypes, library.signal.restype = [ctypes.c_int, _HANDLER], ctypes.c_void_p
    _handlers.append(_HANDLER(aborted))
    library.signal(signal.SIGABRT, _handlers[-1])


@contextlib.contextmanager
def without_trace() -> Iterator[None]:
    """JAX's clients that are made meanwhile print no stack when they abort the process."""
    library: Any = _distributed._jax  # pyright: ignore[reportPrivateImportUsage]
    make: Callable[..., Any] = library.get_distributed_runtime_client
    gone = functools.partial(leave, 1, "error: process 0 failed: killed or cut off, it does not answer any more")
    library.get_distributed_runtime_client = functools.partial(make, missed_heartbeat_callback=lambda *status: gone())
    try:
        yield
    finally:
        library.get_distributed_runtime_client = make


def _answers(address: str) -> bool:
    """Whether something listens there, and still does: a process that dies closes one connection after another."""
    host, _, port = address.rpartition(":")
    for _ in range(4):
        time.sleep(_ANSWER_S / 8)
        try:
            socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S).close()
        except OSError:
            return False
    return True
