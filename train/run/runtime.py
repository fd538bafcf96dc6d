"""What a run stands on while it trains: its processes, the signals that stop it, its folder, a watchdog and a console."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console

from mupax.errors import MupaxFailure
from mupax.paths import is_remote
from mupax.terminal import lasting, rich_console
from mupax.train.checkpoints import workdir
from mupax.train.config.run import Config
from mupax.train.parallel.processes import Processes, StopRequest, place

if TYPE_CHECKING:
    from mupax.train.run.report.spool import UploadBuffer
    from mupax.train.run.restart.memory import Memory


class Interrupted(Exception):
    """A signal has asked the run to stop; all its processes have run the same programs."""


class HookError(MupaxFailure):
    """A user's hook that raised an exception, which is the cause of this one."""


class Watchdog:
    """After a long silence of the run it says what the run waits for and what every thread is at.

    It watches while entered, from the first call of `waiting` on: compiling for a pod may take longer than any silence. It
    ends nothing: what hangs may be a slow disk, and whoever starts the run knows better what its hours cost.

    Args:
        seconds: silence after which it speaks, and again after each further one; None never does.
        file: where to, with a file descriptor; standard error unless given.
    """

    def __init__(self, seconds: float | None, file: TextIO | None = None) -> None:
        self._seconds, self._file = seconds, file
        self._at, self._for = math.inf, ""
        self._ended = threading.Event()

    def waiting(self, what: str) -> None:
        """Something was finished; next comes this."""
        self._at, self._for = time.monotonic(), what

    def __enter__(self) -> Watchdog:
        if self._seconds is not None:
            threading.Thread(target=self._watch, args=(self._seconds,), name="watchdog", daemon=True).start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._ended.set()

    def _watch(self, seconds: float) -> None:
        reported = 0.0
        while not self._ended.wait(seconds / 10):
            now, at, file = time.monotonic(), self._at, self._file or sys.stderr
            if now - max(at, reported) < seconds:
                continue
            reported = now
            text = f"{now - at:.0f} s without anything finished; waiting for {self._for}. The threads are at:"
            print(f"watchdog: {text}", file=file, flush=True)
            try:
                faulthandler.dump_traceback(file)
            except (AttributeError, OSError, ValueError):  # a stream without a descriptor
                faulthandler.dump_traceback(sys.__stderr__ or 2)


STEP = "step"
EVALUATION = "evaluation"
"""Kinds of programs that run on all devices and are compiled before."""


class Patience:
    """Clock of this process's waits for programs on all devices, compared with the longest wait so far.

    A program waits in a collective operation where the network between processes is cut. Only the time inside of `program`
    counts: compiling, reading data and saving do not.
    """

    def __init__(self) -> None:
        self._kind = ""
        self._since = math.inf
        self._longest: dict[str, float] = {}

    @contextlib.contextmanager
    def program(self, kind: str) -> Iterator[None]:
        """Count the time inside as a wait.

        Args:
            kind: of the program; waits of one kind are compared.
        """
        began = time.monotonic()
        self._kind = kind
        self._since = began
        try:
            yield
        finally:
            self._since = math.inf
        self.took(kind, time.monotonic() - began)

    def took(self, kind: str, seconds: float) -> None:
        """Note how long a program took.

        Args:
            seconds: from its beginning, or from the end of the one before it.
        """
        self._longest[kind] = max(self._longest.get(kind, 0.0), seconds)

    def beyond(self) -> float:
        """Return the seconds of the present wait beyond the longest one so far; 0 or less while there is nothing to wait for."""
        return time.monotonic() - self._since - self._longest.get(self._kind, 0.0)


@dataclasses.dataclass(frozen=True)
class RunContext:
    """Context of a run in one process: its config, devices, workdir and output (`runtime` makes it).

    Attributes:
        config: of the run; its `init` is the recorded one where the run goes on.
        folder: the work folder, locked for this run.
        spool: where the files of a run are written whose folder is a bucket, on process 0.
        resumed: whether an earlier part of the run lies in the folder.
        processes: of the run; process 0 prints and writes.
        stop: hears signals.
        watchdog: speaks after a long silence.
        console: prints on process 0 alone.
        patience: knows how long this process waits for a program on all devices.
        attempt: tells the supervisor (`--restart`) how far the run has come; None without one.
    """

    config: Config
    folder: Path
    spool: UploadBuffer | None
    resumed: bool
    processes: Processes
    stop: StopRequest
    watchdog: Watchdog
    console: Console
    patience: Patience
    attempt: Memory | None = None

    @property
    def files(self) -> Path:
        """Folder of this machine for rows, pictures and traces."""
        return self.spool.folder if self.spool else self.folder

    def send(self) -> None:
        """Return when the rows are where the checkpoints are; raises OSError where they cannot get there."""
        if self.spool:
            self.spool.send()

    @contextlib.contextmanager
    def dispatching(self, awaited: str, kind: str | None = None) -> Iterator[None]:
        """One more program on all devices, which every process runs or none.

        Args:
            awaited: what the run waits for from now on, for the watchdog.
            kind: of the program, where waits for it are limited; `None` if it may be compiled first.

        Raises:
            Interrupted: a signal came first.
        """
        if not self.stop.claim():
            raise Interrupted
        self.watchdog.waiting(awaited)
        with self.patience.program(kind) if kind else contextlib.nullcontext():
            yield
        self.stop.done()

    def fail(self, text: str) -> int:
        """The exit code 1, after saying what went wrong, on the screen of every process."""
        rich_console(stderr=True).print(f"error: {text}", style="red", highlight=False, markup=False, soft_wrap=True)
        return 1


@contextlib.contextmanager
def runtime(config: Config) -> Iterator[RunContext]:
    """The surroundings of a run while entered.

    Raises:
        AgreementError, DistributedError: of processes that differ. WorkdirError: a folder that cannot be used.
        SystemExit: a signal came with nothing to save.
    """
    address = place(config.distributed)
    with lasting(), StopRequest() as stop, _joined(address, config) as processes:
        stop.join(processes)
        if processes.count > 1:
            from mupax.train.core import program as core_program
            from mupax.train.data import cache
            from mupax.train.parallel import agreement

            agreement.check(config, processes)
            core_program.use(cache.root, processes)
        folder, resumed = workdir.claim(config, processes)
        with (
            workdir.locked(folder, processes),
            _spool(folder, processes) as spool,
            Watchdog(config.faults.watchdog_seconds) as watchdog,
        ):
            if not resumed and processes.leader:
                workdir.start_anew(folder)
            if resumed or config.init.init_from is not None:
                from mupax.train.reuse.start import init_from

                config = init_from.settled(config, folder, resumed, processes)
            patience = Patience()
            processes.end_stalled(patience.beyond, config.faults.collective_seconds)
            console = rich_console(quiet=not processes.leader)
            attempt = None
            if "MUPAX_ATTEMPT" in os.environ:
                from mupax.train.run.restart import memory

                attempt = memory.of_this_process(processes.index, processes.count)
            yield RunContext(config, folder, spool, resumed, processes, stop, watchdog, console, patience, attempt)


def _spool(folder: Path, processes: Processes) -> contextlib.AbstractContextManager[UploadBuffer | None]:
    if not processes.leader or not is_remote(folder):
        return contextlib.nullcontext()
    from mupax.train.run.report import spool

    return spool.UploadBuffer(folder)


def _joined(address: dict[str, Any] | None, config: Config) -> contextlib.AbstractContextManager[Processes]:
    if address is None:
        return contextlib.nullcontext(Processes())
    from mupax.train.parallel import distributed

    return distributed.joined(address, config.distributed)
