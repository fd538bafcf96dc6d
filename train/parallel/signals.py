"""Signals: a run in training stops at the next boundary and saves; before and after that it leaves at once.

SIGINT and SIGTERM do so, SIGHUP (a terminal that was closed) and SIGUSR1 (SLURM's `--signal=USR1@120`). A second SIGINT or
SIGTERM ends the process at once, whatever it waits for.

A thread of its own hears the signals, through the wake-up descriptor that Python's handlers write to: the main thread may be
inside the compiler or a collective operation, where no handler runs, and where one that raised would end in a segmentation fault.

Where there are several processes, one that hears a signal tells the others through the coordination service, and all agree
on how many programs (steps, batches of an evaluation) each of them runs before it stops.
"""

from __future__ import annotations

import contextlib
import math
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from mupax import terminal
from mupax.terminal import leave
from mupax.train.parallel.processes import Processes

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_INSISTING = (signal.SIGINT, signal.SIGTERM)
"""Of which a second one ends the process. A closed terminal sends SIGHUP twice, and USR1 is a notice before SIGTERM."""
_ONE_S = 0.3
"""Signals so close together are one: `timeout` sends its own twice, srun and the step's daemon one each."""
_POLL_S = 0.25
"""How often a process of several looks whether another was told to stop."""
_TOGETHER_S = 2.0
"""How long process 0 waits for the others to leave before it."""
_STOP = "mupax/stop"


class StopRequest:
    """Listens while entered, in the main thread; elsewhere it never hears a signal itself."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        """The signal that the run stops by, on every process; None while there is none."""
        self._processes = Processes()
        self._saves = self._going = False
        self._interactive = hasattr(sys, "ps1")  # a notebook outlives Ctrl-C, as it does elsewhere
        self._done, self._insisted = 0, math.inf
        self._bound: int | None = None
        """Programs after which this process has promised to wait until all agree."""
        self._agreed: int | None = None
        self._changed = threading.Condition()
        self._handlers_before: dict[signal.Signals, Any] = {}
        self._wakeup_before = -1
        self._ear, self._mouth = socket.socketpair()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)

    @property
    def exit_code(self) -> int:
        """128 and the number of the signal, 143 for SIGTERM say; 0 when nothing was received."""
        return 0 if self.received is None else 128 + self.received

    def join(self, processes: Processes) -> None:
        """From now on the run has these processes, which stop together."""
        self._processes = processes
        if processes.count > 1:
            threading.Thread(target=self._talk, name="stopping", daemon=True).start()

    def defer(self) -> None:
        """From now on a first signal is only noted: there is something to save."""
        self._saves = True

    def release(self) -> None:
        """Everything is saved, on all processes: a signal, also one that was just noted, ends the process again."""
        with self._changed:
            self._saves, self._bound = False, None
        if self.received is not None and self._processes.count == 1:
            raise SystemExit(self.exit_code)

    @contextlib.contextmanager
    def deferring(self) -> Iterator[None]:
        """Context manager of work that saves: a first signal is only noted.

        Before and after it a signal ends the process.
        """
        self.defer()
        try:
            yield
        finally:
            self._saves = False

    def now(self) -> bool:
        """Whether to stop here, with as many programs done as were claimed."""
        if self._processes.count == 1:
            return self.received is not None
        with self._changed:
            return self._agreed is not None and self._done >= self._agreed

    def claim(self) -> bool:
        """Whether this process may run one more program; `done` follows when it was dispatched.

        All processes claim the same programs in the same order. Where a stop is being agreed on, this waits for the others.
        """
        if self._processes.count == 1:
            return self.received is None
        with self._changed:
            while self._bound is not None and self._done >= self._bound and self._agreed is None:
                self._changed.wait()
            self._going = self._agreed is None or self._done < self._agreed
            return self._going

    def done(self) -> None:
        """The program that was claimed is on its way."""
        with self._changed:
            self._done, self._going = self._done + 1, False

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._mouth.setblocking(False)
            self._wakeup_before = signal.set_wakeup_fd(self._mouth.fileno(), warn_on_full_buffer=False)
            # `nohup` ignores SIGHUP, and a shell ignores SIGINT in the background jobs of a script.
            heard = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
            self._handlers_before = {number: signal.signal(number, self._note) for number in heard}
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._ended.set()
        if self._handlers_before:
            for number, handler in self._handlers_before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._wakeup_before)
        self._mouth.send(b"\0")
        self._thread.join()
        self._ear.close()
        self._mouth.close()

    # In the main thread, as soon as it is back in Python

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._interactive and (self.received or not self._saves):
            raise KeyboardInterrupt
        self.received = self.received or signal.Signals(number)  # the thread may have noted it before

    # In the thread that listens

    def _listen(self) -> None:
        while not self._ended.is_set():
            for number in self._ear.recv(64):
                if number in _SIGNALS:
                    self._hear(signal.Signals(number))

    def _hear(self, number: signal.Signals) -> None:
        if number == signal.SIGINT and self._interactive:
            return
        self.received = self.received or number
        now = time.monotonic()
        if number in _INSISTING:
            if now - self._insisted > _ONE_S:
                self._leave_at_once(number)
            self._insisted = min(self._insisted, now)
        if not self._saves:
            text = f"stopped by {number.name} with nothing to save: checkpoints are as they were"
            if self._processes.closed:  # alone, or not joined yet, or not any more
                leave(self.exit_code, text)
            terminal.note(text)  # the other thread leaves with all processes, unless the network holds it
            late = threading.Timer(2 * _TOGETHER_S, leave, (self.exit_code,))
            late.daemon = True
            late.start()

    def _leave_at_once(self, number: signal.Signals) -> None:
        text = f"stopped at once by a second {number.name}"
        if not self._processes.closed:
            tell = threading.Thread(target=self._processes.post_failure, args=(text,), daemon=True)
            tell.start()
            tell.join(_TOGETHER_S)
            if self._processes.leader:
                time.sleep(_TOGETHER_S)  # until the others have read it: process 0 takes the store with it
        leave(self.exit_code, f"{text}: what was being saved is lost, earlier checkpoints are as they were")

    # In the thread that talks to the other processes

    def _talk(self) -> None:
        while not (self._ended.wait(_POLL_S) or self._processes.closed):
            with contextlib.suppress(Exception):  # of the network; `Processes` sees to a lost coordinator
                self._confer()

    def _confer(self) -> None:
        """Ask, promise, and learn what was agreed on."""
        processes, posts = self._processes, self._processes.posts(_STOP)
        if self.received is not None and "by" not in posts:
            processes.post(f"{_STOP}/by", str(int(self.received)))
            posts = processes.posts(_STOP)
        if "by" not in posts:
            return
        self.received = signal.Signals(int(posts["by"]))
        with self._changed:
            if not self._saves:
                processes.post(f"{_STOP}/leave", str(processes.index))
            elif self._bound is None:
                self._bound = self._done + self._going
                processes.post(f"{_STOP}/at/{processes.index}", str(self._bound))
        posts = processes.posts(_STOP)
        bounds = [int(value) for key, value in posts.items() if key.startswith("at/")]
        if "leave" in posts:
            self._leave_together()
        elif len(bounds) == processes.count:
            with self._changed:
                self._agreed = max(bounds)
                self._changed.notify_all()

    def _leave_together(self) -> None:
        """One process has nothing to save, so that no program of all of them can follow. Process 0 goes last."""
        processes, until = self._processes, time.monotonic() + _TOGETHER_S
        processes.post(f"{_STOP}/left/{processes.index}", "")
        while processes.leader and time.monotonic() < until:
            if sum(key.startswith("left/") for key in processes.posts(_STOP)) == processes.count:
                break
            time.sleep(_POLL_S / 4)
        leave(self.exit_code)
