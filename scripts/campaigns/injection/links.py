"""The data links of a process, cut as a firewall cuts them: what arrives at its sockets is dropped, and no end is told.

The link to the coordinator stays. A socket needs no privilege to filter what it receives.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

_ATTACH_FILTER, _DETACH_FILTER = 26, 27
_DROP_ALL = struct.pack("HBBI", 6, 0, 0, 0)
"""A program of the packet filter that returns 0: no byte of a packet is kept."""


def coordinator_port() -> int:
    """Return the port of the coordinator that this process' command line names."""
    place = sys.argv[sys.argv.index("--distributed.coordinator") + 1]
    return int(place.rpartition(":")[2])


def data_sockets(spared: int) -> Iterator[socket.socket]:
    """Yield a copy of every TCP socket of this process that is connected, but for those of one port."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as link:
                if link.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                ends = link.getsockname()[1], link.getpeername()[1]
                if spared not in ends:
                    yield link


def cut(seconds: float | None = None) -> None:
    """Drop what arrives at the data sockets from now on, also at those that are connected later.

    Args:
        seconds: after which they work again; None never.
    """
    began = time.monotonic()
    spared = coordinator_port()

    def keep_cut() -> None:
        while seconds is None or time.monotonic() - began < seconds:
            for link in data_sockets(spared):
                _drop(link)
            time.sleep(0.02)
        for link in data_sockets(spared):
            link.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)

    for link in data_sockets(spared):
        _drop(link)
    threading.Thread(target=keep_cut, daemon=True).start()


def _drop(link: socket.socket) -> None:
    code = ctypes.create_string_buffer(_DROP_ALL)
    link.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(code)))


def reset() -> None:
    """Close the data sockets in both directions, which the other end is told."""
    for link in data_sockets(coordinator_port()):
        link.shutdown(socket.SHUT_RDWR)
