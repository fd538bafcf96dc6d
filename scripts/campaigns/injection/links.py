"""Data links of a process, cut as a firewall cuts them: arriving bytes are dropped silently.

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

# Constants of <asm-generic/socket.h>, which the module `socket` lacks.
_ATTACH_FILTER = 26
_DETACH_FILTER = 27
_DROP_ALL = struct.pack("HBBI", 6, 0, 0, 0)
"""Program of the packet filter that returns 0: no byte of a packet is kept."""


def coordinator_port() -> int:
    """Return the port of the coordinator, from the command line of this process."""
    place = sys.argv[sys.argv.index("--distributed.coordinator") + 1]
    return int(place.rpartition(":")[2])


def data_sockets(spared: int) -> Iterator[socket.socket]:
    """Yield a copy of every connected TCP socket of this process.

    Args:
        spared: Port of the coordinator, whose sockets are left out.
    """
    for name in os.listdir("/proc/self/fd"):
        # A descriptor may be closed meanwhile, and a socket need not be connected.
        with suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            # A socket object closes its descriptor, and the process still needs its own.
            with socket.socket(fileno=os.dup(int(name))) as link:
                if link.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                ends = link.getsockname()[1], link.getpeername()[1]
                if spared not in ends:
                    yield link


def cut(seconds: float | None = None) -> None:
    """Drop everything that arrives at the data sockets from now on, new sockets included.

    Args:
        seconds: Time after which the sockets work again; `None` for never.
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

    # Cut before this function returns. The thread looks for new sockets from then on.
    for link in data_sockets(spared):
        _drop(link)
    threading.Thread(target=keep_cut, daemon=True).start()


def _drop(link: socket.socket) -> None:
    """Attach the filter that drops every packet to a socket."""
    code = ctypes.create_string_buffer(_DROP_ALL)
    # `struct sock_fprog`: the number of instructions and their address.
    link.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(code)))


def reset() -> None:
    """Shut the data sockets down in both directions. The other end sees the end of the stream."""
    for link in data_sockets(coordinator_port()):
        link.shutdown(socket.SHUT_RDWR)
