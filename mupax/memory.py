"""Memory that this process may still take, and errors that say that there was none left."""

from __future__ import annotations

import contextlib
import os
import re
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mupax.errors import MupaxError, MupaxFailure

VARIABLE = "MUPAX_MEMORY_CHECK"
"""Environment variable; `off` lets every command start that the checks would refuse."""
_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_THREADS = 320 * 2**20
"""Address space that threads and the compiler take while a run trains: 250 MB were seen with two cores."""
_COMPILER = 1650 * 2**20
"""Address space that JAX and its compiler need to start: with less, C++ ends the process without a word to Python."""
_UNLIMITED = 2**60
"""From here on a limit of a version 1 cgroup stands for none."""
_ASKED = re.compile(
    r"(?:allocate|allocating|Allocation of|tried to allocate) ([\d,]+) ?bytes", re.IGNORECASE
)
_WORDS = (
    "RESOURCE_EXHAUSTED",
    "bad_alloc",
    "Cannot allocate memory",
    "can't allocate memory",
    "out of memory",
)


class Room(NamedTuple):
    """Memory that is left, in bytes, and the limit that leaves it."""

    bytes: int
    limit: str


class MemoryLimitError(MupaxError):
    """Work that needs more memory than there is. It was refused before it began; the text names what would fit."""


class OutOfMemory(MupaxFailure):
    """Work that ended because memory ran out. The text names what would fit."""


def room() -> Room:
    """Return the memory that this process may still take: the least of what the machine, containers and `ulimit` leave."""
    rooms = [_machine(), *_ulimits(), *_containers()]
    return min(rooms, key=lambda one: one.bytes)


def device_room(device: Any, local_devices: int) -> int | None:
    """Return the bytes that a device has left, or None where that is not known.

    Args:
        device: a `jax.Device`. A CPU device has its share of the host's memory.
        local_devices: number of devices of this process, which share its host's memory on a CPU.
    """
    if device.platform == "cpu":
        return max(0, room().bytes) // local_devices
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit")
    return None if limit is None else limit - stats.get("bytes_in_use", 0)


def check(needed: int, purpose: str, advice: str) -> None:
    """Refuse work that needs more of the host's memory than there is.

    Args:
        needed: bytes of host memory.
        purpose: subject of the message, such as "the weights".
        advice: sentence that says what to write instead.

    Raises:
        MemoryLimitError: more is needed than is left; the text has `advice`.
    """
    left = room()
    if needed > left.bytes and checks():
        raise MemoryLimitError(
            f"out of memory: {purpose} need {gib(needed)}, and {left.limit} leaves {gib(max(0, left.bytes))}. {advice}"
        )


@contextlib.contextmanager
def explained(advice: str) -> Iterator[None]:
    """Turn an error that says that memory ran out into one message.

    Args:
        advice: sentence that says what to write instead.

    Raises:
        OutOfMemory: in place of such an error.
    """
    try:
        yield
    except Exception as error:
        described = exhausted(error)
        if described is None:
            raise
        raise OutOfMemory(f"{described}. {advice}") from error


def check_compiler() -> None:
    """Refuse to start where `ulimit -v` leaves too little address space for JAX itself.

    Raises:
        MemoryLimitError: it leaves less.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY or not checks():
        return
    left = _COMPILER
    with contextlib.suppress(OSError, KeyError, ValueError):
        left = limit - _fields(_PROC / "self" / "status")["VmSize"] * 1024
    if left < _COMPILER:
        raise MemoryLimitError(
            f"out of memory: `ulimit -v` leaves {gib(max(0, left))}, and JAX and its compiler need {gib(_COMPILER)} to start. "
            f"Raise the limit; {VARIABLE}=off tries all the same"
        )


def checks() -> bool:
    """Return whether memory is checked before work starts: `MUPAX_MEMORY_CHECK=off` turns the checks off."""
    return os.environ.get(VARIABLE, "").lower() not in ("off", "0", "false", "no")


def exhausted(error: BaseException) -> str | None:
    """Describe an error that says that memory ran out; return None for any other error."""
    text = str(error)
    known = isinstance(error, MemoryError) or any(word.lower() in text.lower() for word in _WORDS)
    if not known or isinstance(error, (MupaxError, MupaxFailure)):
        return None
    asked = _ASKED.search(text)
    size = f" where {gib(int(asked[1].replace(',', '')))} more were asked for" if asked else ""
    with contextlib.suppress(OSError, ValueError):
        left = room()
        return f"out of memory{size}; {left.limit} leaves {gib(max(0, left.bytes))}"
    return f"out of memory{size}"


def gib(count: float) -> str:
    """Return bytes as text for people."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:,.0f} GiB" if count >= 1000 else f"{count:.3g} GiB"


def _machine() -> Room:
    with contextlib.suppress(OSError, KeyError, ValueError):
        return Room(_fields(_PROC / "meminfo")["MemAvailable"] * 1024, "this machine")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # macOS, which has no /proc
    return Room(total, "this machine")


def _ulimits() -> Iterator[Room]:
    """Yield what limits of address space and of data leave; both count memory that is asked for, used or not."""
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
    """Yield what the process' cgroup and those around it leave, under version 1 or 2."""
    with contextlib.suppress(OSError, ValueError):
        for line in (_PROC / "self" / "cgroup").read_text().splitlines():
            _, controllers, place = line.split(":", 2)
            if not controllers:
                yield from _nested(_CGROUPS, place, _version_2)
            elif "memory" in controllers.split(","):
                yield from _nested(_CGROUPS / "memory", place, _version_1)


def _nested(root: Path, place: str, read: Callable[[Path], Room | None]) -> Iterator[Room]:
    """Yield the room of a cgroup and of every cgroup around it. Inside a container its own may be shown as the root."""
    parts = [part for part in Path(place).parts if part not in ("/", "..")]
    for depth in range(len(parts), -1, -1):
        with contextlib.suppress(OSError, ValueError, KeyError):
            left = read(root.joinpath(*parts[:depth]))
            if left is not None:
                yield left


def _version_2(folder: Path) -> Room | None:
    limits = []
    for name in (
        "memory.max",
        "memory.high",
    ):  # above `high` a process is slowed down until it seems to hang
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
    limit = int((folder / "memory.limit_in_bytes").read_text())
    if limit >= _UNLIMITED:
        return None
    used = int((folder / "memory.usage_in_bytes").read_text())
    stat = _fields(folder / "memory.stat")
    return Room(limit - used + _cached(stat, "total_"), "the container")


def _cached(stat: dict[str, int], prefix: str) -> int:
    """Return bytes of files that are cached: the kernel drops them where memory is short."""
    return stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)


def _fields(path: Path) -> dict[str, int]:
    """Read lines of a name and a number."""
    fields = {}
    for line in path.read_text().splitlines():
        words = line.replace(":", " ").split()
        if len(words) > 1 and words[1].isdecimal():
            fields[words[0]] = int(words[1])
    return fields
