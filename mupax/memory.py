"""Memory that this process can still allocate: checks before work, messages when it runs out."""

from __future__ import annotations

import contextlib
import os
import re
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mupax import MupaxError, MupaxFailure

VARIABLE = "MUPAX_MEMORY_CHECK"
"""Environment variable. `off` turns the checks of this module off."""
_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_THREADS = 320 * 2**20
"""Address space in bytes for threads and the compiler. 250 MB were measured on two cores."""
_COMPILER = 1650 * 2**20
"""Address space in bytes that JAX and its compiler need to start.

With less, C++ ends the process without an exception in Python.
"""
_UNLIMITED = 2**60
"""Limit of a version 1 cgroup, in bytes, from which on it means "no limit"."""
_ASKED = re.compile(
    r"(?:allocate|allocating|Allocation of|tried to allocate) ([\d,]+) ?bytes", re.IGNORECASE
)
"""Number of bytes in a message about a failed allocation."""
_WORDS = (
    "RESOURCE_EXHAUSTED",
    "bad_alloc",
    "Cannot allocate memory",
    "can't allocate memory",
    "out of memory",
)
"""Words in a message about a failed allocation, of Python, C++ or XLA."""


class Room(NamedTuple):
    """Memory that one limit leaves to this process."""

    bytes: int
    limit: str
    """Name of the limit for messages, such as `this machine`."""


class MemoryLimitError(MupaxError):
    """Error about work that was refused because it needs too much memory. The text has advice."""


class OutOfMemory(MupaxFailure):
    """Error about work that failed because memory ran out. The text says what to do."""


def room() -> Room:
    """Return the memory that this process can still allocate, under the strictest limit.

    The limits are the memory of the machine, of containers (cgroups), and `ulimit`. The result
    counts host memory, and its `bytes` can be negative.
    """
    rooms = [_machine(), *_ulimits(), *_containers()]
    return min(rooms, key=lambda left: left.bytes)


def device_room(device: Any, local_devices: int) -> int | None:
    """Return the free memory of a device in bytes, or `None` if it is unknown.

    Args:
        device: A `jax.Device`.
        local_devices: Number of devices of this process. A CPU device gets an equal part of the
            host's free memory.
    """
    if device.platform == "cpu":
        return max(0, room().bytes) // local_devices
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit")
    if limit is None:
        return None
    return limit - stats.get("bytes_in_use", 0)


def check(needed: int, purpose: str, advice: str) -> None:
    """Raise an error if work needs more host memory than is left, unless checks are off.

    Args:
        needed: Host memory that the work needs, in bytes.
        purpose: Plural subject of the message, such as "the weights".
        advice: Sentence that says what to write instead.

    Raises:
        MemoryLimitError: More memory is needed than is left. The text ends with `advice`.
    """
    left = room()
    if needed > left.bytes and checks():
        raise MemoryLimitError(
            f"out of memory: {purpose} need {gib(needed)}, and {left.limit} leaves "
            f"{gib(max(0, left.bytes))}. {advice}"
        )


@contextlib.contextmanager
def explained(advice: str) -> Iterator[None]:
    """Turn an exception that says that memory ran out, while entered, into `OutOfMemory`.

    Other exceptions, and mupax's own, are raised unchanged.

    Args:
        advice: Sentence that says what to write instead. It ends the message.

    Raises:
        OutOfMemory: Memory ran out.
    """
    try:
        yield
    except Exception as error:
        described = exhausted(error)
        if described is None:
            raise
        raise OutOfMemory(f"{described}. {advice}") from error


def check_compiler() -> None:
    """Raise an error if `ulimit -v` leaves too little address space for JAX and its compiler.

    Nothing is checked without such a limit, on systems without /proc, or if `MUPAX_MEMORY_CHECK`
    turns checks off.

    Raises:
        MemoryLimitError: Less than 1.6 GiB of address space are left.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY or not checks():
        return
    left = _COMPILER
    with contextlib.suppress(OSError, KeyError, ValueError):
        left = limit - _fields(_PROC / "self" / "status")["VmSize"] * 1024
    if left < _COMPILER:
        raise MemoryLimitError(
            f"out of memory: `ulimit -v` leaves {gib(max(0, left))}, and JAX and its compiler need "
            f"{gib(_COMPILER)} to start. Raise the limit; {VARIABLE}=off tries all the same"
        )


def checks() -> bool:
    """Return whether memory is checked: True unless `MUPAX_MEMORY_CHECK` is off, 0, false or no."""
    return os.environ.get(VARIABLE, "").lower() not in ("off", "0", "false", "no")


def exhausted(error: BaseException) -> str | None:
    """Return a message for an exception that says that memory ran out, with the memory left.

    The result is `None` for other exceptions, and for mupax's own, whose text is complete.
    """
    # Errors of mupax have a complete message of their own.
    if isinstance(error, (MupaxError, MupaxFailure)):
        return None
    text = str(error)
    lower_text = text.lower()
    names_memory = any(word.lower() in lower_text for word in _WORDS)
    if not names_memory and not isinstance(error, MemoryError):
        return None

    size = ""
    request = _ASKED.search(text)
    if request is not None:
        count = int(request[1].replace(",", ""))
        size = f" where {gib(count)} more were asked for"
    with contextlib.suppress(OSError, ValueError):
        left = room()
        return f"out of memory{size}; {left.limit} leaves {gib(max(0, left.bytes))}"
    return f"out of memory{size}"


def gib(count: float) -> str:
    """Return a number of bytes as text with three digits and a unit from B to GiB."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    if count >= 1000:
        return f"{count:,.0f} GiB"
    return f"{count:.3g} GiB"


def _machine() -> Room:
    """Return the free memory of the machine, or its total memory on systems without /proc."""
    with contextlib.suppress(OSError, KeyError, ValueError):
        return Room(_fields(_PROC / "meminfo")["MemAvailable"] * 1024, "this machine")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # macOS, which has no /proc
    return Room(total, "this machine")


def _ulimits() -> Iterator[Room]:
    """Yield the memory that `ulimit -v` and `ulimit -d` leave, less 320 MiB for threads.

    Limits that are not set are left out. Without /proc nothing is yielded.
    """
    # Both limits count memory that is allocated, used or not.
    with contextlib.suppress(OSError, KeyError, ValueError):
        used = _fields(_PROC / "self" / "status")
        kinds = (
            (resource.RLIMIT_AS, "VmSize", "ulimit -v"),
            (resource.RLIMIT_DATA, "VmData", "ulimit -d"),
        )
        for kind, field, name in kinds:
            limit, _ = resource.getrlimit(kind)
            if limit != resource.RLIM_INFINITY:
                yield Room(limit - used[field] * 1024 - _THREADS, f"`{name}`")


def _containers() -> Iterator[Room]:
    """Yield the memory that the process's cgroup and its parents leave, in version 1 or 2."""
    with contextlib.suppress(OSError, ValueError):
        for line in (_PROC / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:  # version 2 lists no controllers
                yield from _nested(_CGROUPS, path, _version_2)
            elif "memory" in controllers.split(","):
                yield from _nested(_CGROUPS / "memory", path, _version_1)


def _nested(root: Path, path: str, read: Callable[[Path], Room | None]) -> Iterator[Room]:
    """Yield the memory that a cgroup and each of its parents leaves.

    Args:
        root: Folder below which the system shows cgroups.
        path: Path of the cgroup below the root.
        read: Function that reads one cgroup's folder. It returns `None` without a limit.
    """
    # In a container, the root may already be the cgroup of the container. The path then begins with
    # `..`, or does not exist below the root.
    parts = [part for part in Path(path).parts if part not in ("/", "..")]
    for depth in range(len(parts), -1, -1):
        with contextlib.suppress(OSError, ValueError, KeyError):
            left = read(root.joinpath(*parts[:depth]))
            if left is not None:
                yield left


def _version_2(folder: Path) -> Room | None:
    """Return the memory that a version 2 cgroup leaves, or `None` if it has no limit.

    That is the limit less what is used, in bytes. Files in the cache do not count as used.

    Raises:
        OSError, ValueError: A file of the used memory is missing, or a file has no number.
    """
    limits = []
    # Above `high`, the kernel slows a process down until it seems to hang.
    for name in ("memory.max", "memory.high"):
        with contextlib.suppress(OSError):
            text = (folder / name).read_text().strip()
            if text != "max":
                limits.append(int(text))
    if not limits:
        return None
    used = int((folder / "memory.current").read_text())
    stat = _fields(folder / "memory.stat")
    return Room(min(limits) - used + _cached(stat, ""), "the container")


def _version_1(folder: Path) -> Room | None:
    """Return the memory that a version 1 cgroup leaves, or `None` if it has no limit.

    That is the limit less what is used, in bytes. Files in the cache do not count as used.

    Raises:
        OSError, ValueError: A file is missing or has no number.
    """
    limit = int((folder / "memory.limit_in_bytes").read_text())
    if limit >= _UNLIMITED:
        return None
    used = int((folder / "memory.usage_in_bytes").read_text())
    stat = _fields(folder / "memory.stat")
    return Room(limit - used + _cached(stat, "total_"), "the container")


def _cached(stat: dict[str, int], prefix: str) -> int:
    """Return the bytes of cached files, which the kernel frees if memory is short.

    Args:
        stat: Fields of a cgroup's `memory.stat`.
        prefix: Beginning of the fields' names: "total_" for version 1, empty for version 2.
    """
    return stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)


def _fields(path: Path) -> dict[str, int]:
    """Return the number after the name on each line of a file such as /proc/meminfo, by name.

    Lines without a whole number after the name are left out.
    """
    fields = {}
    for line in path.read_text().splitlines():
        words = line.replace(":", " ").split()
        if len(words) > 1 and words[1].isdecimal():
            fields[words[0]] = int(words[1])
    return fields
