"""Addresses that a server listens at."""

from __future__ import annotations

import ipaddress
import socket

from mupax import command_line


def is_local(host: str) -> bool:
    """Return True if only this machine reaches the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listening(host: str, port: int, backlog: int) -> socket.socket:
    """Return a socket that listens.

    Args:
        host: address to listen at.
        port: 0 for any.
        backlog: connections that may wait to be accepted.

    Raises:
        UsageError: this machine has no such address, or the port is taken.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(backlog)
    except (OSError, OverflowError) as error:
        listener.close()
        raise command_line.UsageError(
            f"cannot listen at {host} port {port}: {getattr(error, 'strerror', None) or error}; write another --port "
            "(0 takes any), or an address of this machine as --host"
        ) from error
    return listener
