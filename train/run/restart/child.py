"""The process that a supervisor starts: signals and standard error are passed on, and it does not outlive its parent."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from mupax.train.run.restart.attempt import Attempt
from mupax.train.run.restart.memory import VARIABLE, Memory

SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGTERM)
"""Passed on to the run, which saves and ends by them."""
_TAIL = 16 * 2**10
"""Bytes of standard error that are searched for the run's last words."""
_AT_ONCE_S = 10.0
"""How long a run may take to end after a second signal."""


class Listener:
    """Hears the signals of this process while entered, in the main thread, and ends its waits by them."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._ear, self._mouth = socket.socketpair()
        self._handlers: dict[signal.Signals, Any] = {}
        self._wakeup = -1

    def __enter__(self) -> Listener:
        for end in (self._ear, self._mouth):
            end.setblocking(False)
        self._wakeup = signal.set_wakeup_fd(self._mouth.fileno(), warn_on_full_buffer=False)
        # What `nohup` or a background job has ignored, this process and its child ignore.
        heard = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        self._handlers = {number: signal.signal(number, self._handle) for number in heard}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        self._ear.close()
        self._mouth.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)

    def wait(self, seconds: float, *files: int) -> bool:
        """Wait until a signal comes or one of the files can be read, not for longer; whether there was a signal, now or before."""
        with selectors.DefaultSelector() as selector:
            for file in (self._ear.fileno(), *files):
                selector.register(file, selectors.EVENT_READ)
            selector.select(seconds)
        with contextlib.suppress(BlockingIOError):
            self._ear.recv(64)
        return bool(self.received)


def attempt(number: int, command: Sequence[str], listener: Listener) -> Attempt:
    """How a command went, run to its end.

    Args:
        number: of the attempt.
        command: words of the run.
        listener: whose signals are passed on; after the second one the run ends soon, whatever it is at.
    """
    began, kills, memory, last = time.time(), _kills_for_memory(), Memory(), b""
    try:
        with subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            env={**os.environ, VARIABLE: str(memory.descriptor)},
            pass_fds=[memory.descriptor],
            process_group=0,  # Ctrl-C then comes once: from here
            preexec_fn=_ends_with_parent() if sys.platform == "linux" else None,
        ) as child:
            assert child.stderr is not None
            pipe, passed, kill_at = child.stderr.fileno(), 0, float("inf")
            files = [pipe]
            os.set_blocking(pipe, False)
            while child.poll() is None:
                listener.wait(0.5, *files)
                for signal_number in listener.received[passed:]:
                    child.send_signal(signal_number)
                    passed += 1
                    kill_at = time.monotonic() + _AT_ONCE_S if passed > 1 else kill_at
                if time.monotonic() > kill_at:
                    child.kill()
                text, more = _passed_on(pipe)
                last = (last + text)[-_TAIL:]
                files = files if more else []
                if not more:
                    time.sleep(0.02)  # it has closed its standard error, mostly because it ends
            last = (last + _passed_on(pipe)[0])[-_TAIL:]
        reached = memory.reached
    finally:
        memory.close()
    words = _last_words(last.decode(errors="replace"))
    return Attempt(number, child.returncode, _kills_for_memory() > kills, reached, words, began, time.time())


@functools.cache
def _ends_with_parent() -> Callable[[], object]:
    """What a child calls before it becomes the run: the kernel then sends it SIGTERM when this process has died in whatever way."""
    prctl, death_signal = ctypes.CDLL(None).prctl, 1  # PR_SET_PDEATHSIG
    return lambda: prctl(death_signal, int(signal.SIGTERM))


def _passed_on(pipe: int) -> tuple[bytes, bool]:
    """What could be read, and was written to standard error; and whether more may come."""
    text = b""
    try:
        while piece := os.read(pipe, 65536):
            text += piece
            with contextlib.suppress(OSError, ValueError):  # a terminal that was closed must not end the run
                sys.stderr.write(piece.decode(errors="replace"))
                sys.stderr.flush()
    except BlockingIOError:
        return text, True
    return text, False


def _last_words(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if line.startswith("error:")), lines[-1] if lines else "")[:300]


def _kills_for_memory() -> int:
    """How often the kernel has killed a process for memory; 0 where it does not say."""
    with contextlib.suppress(OSError):
        words = Path("/proc/vmstat").read_text().split()
        return int(words[words.index("oom_kill") + 1]) if "oom_kill" in words else 0
    return 0
