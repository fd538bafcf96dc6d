"""A command's own process: signals end it within seconds, and its three streams are open.

At Ctrl-C Python raises KeyboardInterrupt wherever the main thread happens to be. Inside JAX that is
often a callback from C++, which drops the exception, or ends the process with a segmentation fault.
So the exception is raised only where no frame of JAX is on the stack. A thread ends the process if
the main one does not come to such a place, or does not end afterwards.

This module imports little: a signal that comes while the rest is imported is heard too.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any, NoReturn

_STREAMS = ("stdin", "stdout", "stderr")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_INSISTING = (signal.SIGINT, signal.SIGTERM)
"""A second one ends the process. A closed terminal sends SIGHUP twice."""
ONE_S = 0.3
"""Signals so close together are one: `timeout` sends its own twice."""
_REACH_S = 1.0
"""How long the main thread may take to come out of JAX. Compiling takes longer, and can be cut off anywhere."""
_CLEAN_UP_S = 2.5
"""How long the command may take to end after the exception was raised."""
_NUDGE_S = 0.02
_WORDS_S = 0.5
"""How long the last words may take: a terminal may be stopped, or a pipe full."""
_SHOW_CURSOR = b"\x1b[?25h"
_NO_UNWINDING = frozenset(
    (
        "jax",
        "jaxlib",
        "flax",
        "optax",
        "orbax",
        "chex",
        "tensorstore",
        "grain",
        "array_record",
        "weakref",
        "_weakrefset",
    )
)
"""Packages called from C++, or by the garbage collector, which drop an exception."""


def open_closed_streams() -> None:
    """Open standard input, output and error to nowhere if this process was started without (`>&-`).

    Python has None in their place. The next file that is opened would get the number of the closed
    one, so that a library which prints would write into a checkpoint.
    """
    for number, name in enumerate(_STREAMS):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
        if getattr(sys, name) is None:
            stream = os.fdopen(number, "w" if number else "r", encoding="utf-8", errors="replace", closefd=False)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


class Interrupts:
    """Handlers of this process' signals, and the thread that sees to its end.

    A run that saves when it is stopped has its own while it trains (`train/parallel/signals.py`).
    So does a web server.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        """Number of the first signal; None before."""
        self._main = threading.get_ident()
        self._heard_at = 0.0
        self._raised_at: float | None = None
        self._is_over = False
        self._nudged = False
        """A signal of this object's own is on its way to the main thread."""
        self._ear, self._mouth = os.pipe()
        os.set_blocking(self._mouth, False)

    @property
    def exit_code(self) -> int | None:
        """128 and the number of the signal, as a shell has it; None when nothing was received."""
        return None if self.received is None else 128 + self.received

    def listen(self) -> None:
        """Install the handlers, in the main thread. A signal that is ignored stays ignored.

        `nohup` ignores SIGHUP, and a shell ignores SIGINT in the background jobs of a script.
        """
        signal.set_wakeup_fd(self._mouth, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="interrupts", daemon=True).start()
        for number in _SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._handle)
        # An error that follows from the signal, in a callback or another thread, is no news.
        sys.unraisablehook = self._unless_interrupted(sys.unraisablehook)
        threading.excepthook = self._unless_interrupted(threading.excepthook)

    def finish(self) -> None:
        """From now on a signal ends the process at once: the command is done."""
        self._is_over = True

    # In the main thread, as soon as it is back in Python

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._note(number)
        if self._is_over:
            self._leave()
        if self._raised_at is None and _can_unwind(frame):
            self._raised_at = time.monotonic()
            raise KeyboardInterrupt

    def _note(self, number: int) -> None:
        if self.received is None:
            self.received = number
            self._heard_at = time.monotonic()

    # In the thread that watches

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._ear, select.POLLIN)
        while True:
            if poll.poll(None if self.received is None else 1000 * _NUDGE_S):
                for number in os.read(self._ear, 64):
                    self._hear(number)
            if self.received is not None:
                self._see_to_the_end()

    def _hear(self, number: int) -> None:
        if number == self.received and self._nudged:
            self._nudged = False
            return
        if number not in _SIGNALS or signal.getsignal(number) != self._handle:
            return  # somebody else's now: a web server ends in its own way
        insists = number in _INSISTING and self.received is not None
        if insists and time.monotonic() - self._heard_at > ONE_S:
            self._leave()
        self._note(number)

    def _see_to_the_end(self) -> None:
        assert self.received is not None
        now = time.monotonic()
        if self._raised_at is not None:
            if now - self._raised_at > _CLEAN_UP_S:
                self._leave()
        elif now - self._heard_at > _REACH_S or self._is_over:
            self._leave()
        elif not self._nudged and signal.getsignal(self.received) == self._handle:
            self._nudged = True
            # The handler looks again where the main thread is, also if that waits for the system.
            signal.pthread_kill(self._main, self.received)

    def _leave(self) -> None:
        # The main thread may go on writing there, or the disk hang.
        cleaning = threading.Thread(target=_remove_temporary_folders, daemon=True)
        cleaning.start()
        cleaning.join(_WORDS_S)
        leave(128 + (self.received or signal.SIGINT))

    def _unless_interrupted(self, hook: Any) -> Any:
        def show(report: Any) -> None:
            if self.received is None:
                hook(report)
            elif report.exc_type is KeyboardInterrupt:
                self._raised_at = None  # a callback has dropped it: it is raised again

        return show


def _remove_temporary_folders() -> None:
    """Remove the folders of this process that the interpreter would remove as it ends."""
    if "tempfile" not in sys.modules:
        return
    from tempfile import TemporaryDirectory

    for item in gc.get_objects():
        if issubclass(type(item), TemporaryDirectory):  # a proxy's __class__ may be anything
            with contextlib.suppress(OSError):
                item.cleanup()


def leave(code: int, text: str = "") -> NoReturn:
    """End the process at once, from any thread: the main one may be where no exception reaches it.

    Args:
        text: printed on standard error, as far as that takes what is written to it.
    """

    def speak() -> None:
        with contextlib.suppress(Exception):
            print(text, end="\n" if text else "", file=sys.stderr, flush=True)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        with contextlib.suppress(OSError):
            for stream in filter(os.isatty, (1, 2)):
                os.write(stream, _SHOW_CURSOR)  # which a live bar has hidden

    words = threading.Thread(target=speak, daemon=True)
    with contextlib.suppress(RuntimeError):  # the interpreter is ending and starts no thread any more
        words.start()
        words.join(_WORDS_S)
    os._exit(code)


def _can_unwind(frame: FrameType | None) -> bool:
    """Return True if an exception gets through to the command: nothing was called from C++."""
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package in _NO_UNWINDING or frame.f_code.co_name == "__del__":
            return False
        frame = frame.f_back
    return True
