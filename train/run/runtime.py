"""A run beside its steps: its processes, the signals that stop it, its folder, a watchdog, a console, and the report of its steps.

Steps may still be on the devices while the next ones are sent there: `Report` writes what came of them to files and the terminal.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import faulthandler
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO

import jax
import numpy as np
from rich.console import Console

from mupax.disk import is_remote
from mupax.errors import MupaxFailure
from mupax.terminal import rich_console
from mupax.train.checkpoints import workdir
from mupax.train.config.metrics import metric_values
from mupax.train.config.run import Config
from mupax.train.core.program import Program
from mupax.train.core.state import RejectedStep, TrainState, culprit
from mupax.train.data import Data
from mupax.train.parallel import hardware
from mupax.train.parallel.processes import Processes, StopRequest, lasting, place
from mupax.train.run.report.metrics import MetricsWriter
from mupax.train.run.report.progress import Profile, Progress, Timing
from mupax.zoo import families

if TYPE_CHECKING:
    from mupax.train.run.report.mirrors.trackers import Media
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
            threading.Thread(
                target=self._watch, args=(self._seconds,), name="watchdog", daemon=True
            ).start()
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
        rich_console(stderr=True).print(
            f"error: {text}", style="red", highlight=False, markup=False, soft_wrap=True
        )
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
            yield RunContext(
                config,
                folder,
                spool,
                resumed,
                processes,
                stop,
                watchdog,
                console,
                patience,
                attempt,
            )


def _spool(
    folder: Path, processes: Processes
) -> contextlib.AbstractContextManager[UploadBuffer | None]:
    if not processes.leader or not is_remote(folder):
        return contextlib.nullcontext()
    from mupax.train.run.report import spool

    return spool.UploadBuffer(folder)


def _joined(
    address: dict[str, Any] | None, config: Config
) -> contextlib.AbstractContextManager[Processes]:
    if address is None:
        return contextlib.nullcontext(Processes())
    from mupax.train.parallel import distributed

    return distributed.joined(address, config.distributed)


@dataclasses.dataclass(frozen=True)
class StartState:
    """State from which training starts, with its step.

    Attributes:
        state: whose arrays the first step takes over.
        step: optimizer steps done.
        keep_metrics: whether metrics up to that step are there already, and kept.
        evaluated: whether nothing is left to evaluate at that step.
    """

    state: TrainState
    step: int
    keep_metrics: bool
    evaluated: bool = True


class Report(contextlib.ExitStack):
    """What one attempt at a run tells, of steps that may still be on the devices; a context manager.

    Args:
        program: of the run.
        data: of the run.
        rt: the run's surroundings; only the first process writes and draws.
        position: where the attempt starts.
        compile_seconds: what compiling took.
        left_out: batches that rollbacks passed over.
    """

    def __init__(
        self,
        program: Program,
        data: Data,
        rt: RunContext,
        position: StartState,
        compile_seconds: float,
        left_out: int,
    ) -> None:
        super().__init__()
        config, log = rt.config, rt.config.log
        self._unit, self._program, self._faults, self._left_out = (
            data.kind,
            program,
            config.faults,
            left_out,
        )
        self._data = data
        self._writer: MetricsWriter | None = None
        self._spool = rt.spool
        if rt.processes.leader:
            step = position.step if position.keep_metrics else None
            self._writer = MetricsWriter(rt.files, log=log, resume_step=step, note=rt.console.print)
        peak = hardware.peak_flops(jax.devices()[0].device_kind, config.model.compute.dtype)
        peak = None if peak is None else peak * program.mesh.size
        memory = partial(hardware.memory_peak, jax.local_devices())
        self.timing = Timing(
            data.kind, families.train_flops(config.model), peak, compile_seconds, memory
        )
        self.progress = Progress(config.steps, position.step, self.timing, rt.console, log.progress)
        steps = log.profile_steps if rt.processes.leader else None
        self.profile = Profile(steps, rt.files / "profile", self.paused, self.progress.note)
        self._pending: collections.deque[tuple[int, dict[str, jax.Array], float]] = (
            collections.deque()
        )
        self._bad: RejectedStep | None = None
        self._newest, self._attempt = position.step, rt.attempt
        self._patience = rt.patience
        if self._attempt is not None:
            self._attempt.note(start=position.step, step=position.step)
        self._waited = 0.0
        self._clock = time.monotonic()

    def __enter__(self) -> Self:
        if self._writer is not None:
            self.enter_context(self._writer)
        self.enter_context(self.progress)
        self.callback(self.profile.close)
        return self

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time in which the devices have no steps to do, and that counts to none. Raises as `check`."""
        self.fetch()
        self.check(self._newest)
        yield
        self._clock = time.monotonic()

    def waited(self, seconds: float) -> None:
        """Count seconds in which the devices had nothing to do before the next step."""
        self._waited += seconds

    def add(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Take in a step that was dispatched. Its metrics start their way to the host as soon as they are known.

        Args:
            step: its number, from 1.
            metrics: of the train step by name, still on the devices.
        """
        for name, value in metrics.items():
            if name != "squares":  # fetched only where they say something
                value.copy_to_host_async()
        self._pending.append((step, metrics, self._waited))
        self._newest, self._waited = step, 0.0

    def check(self, step: int) -> None:
        """Stop at a bad step up to this one.

        `fetch` may have seen further on one process than on another: all stop at the same step by asking for the same.

        Raises:
            RejectedStep: a step up to this one ends the run under its policy.
        """
        if self._bad is not None and self._bad.step <= step:
            raise self._bad

    def fetch(self, keep: int = 0) -> None:
        """Write the rows of finished steps, waiting until at most `keep` are still on the devices."""
        while len(self._pending) > keep:
            step, metrics, waited = self._pending.popleft()
            if self._bad is not None:
                continue  # Nothing after it is kept.
            squares = metrics.pop("squares")
            with self._patience.program(STEP):
                values = jax.device_get(metrics)
            now = time.monotonic()
            seconds, self._clock = now - self._clock, now
            self._patience.took(STEP, seconds - waited)
            skipped, spike, in_a_row = values.pop("verdict").tolist()
            values = {name: float(value) for name, value in values.items()}
            weight = values.pop("weight")
            count = (
                int(weight) if math.isfinite(weight) else 0
            )  # judged by the loss, which is no number then either
            measured = metric_values(
                values["loss"], values, self._data.bytes_per_target, training=True
            )
            row = {"step": step, **values, **measured, self._unit: count}
            row |= {"spike": True} if spike else {}
            row |= {"skipped": True} if skipped else {}
            row |= {"batch": step - 1 + self._left_out} if self._left_out else {}
            self._write({**row, "seconds": round(seconds, 6)})
            if self._attempt is not None:
                self._attempt.note(step=step)
            if skipped and self._ends_the_run(values, in_a_row):
                definition, trained = self._program.definition, self._program.trained
                specs = {name: spec for name, spec in definition.specs.items() if name in trained}
                where = culprit(np.asarray(jax.device_get(squares)), specs, definition.abstract)
                self._bad = RejectedStep(step, values["loss"], values["grad_norm"], where, in_a_row)
                continue
            self.timing.step(seconds, count, waited)
            self.progress.update(step, values["loss"], values["lr"], measured.get("loss_per_byte"))
            if self.timing.due:
                self._write_speed(step)

    def evaluated(self, row: dict[str, Any]) -> None:
        """Write and show the row of an evaluation."""
        self._write(row)
        if self._spool is not None:
            self.flush()
            self._spool.send_later()
        self.progress.evaluated(row)

    def logged(self, step: int, values: Mapping[str, float]) -> None:
        """Write the row of what hooks logged.

        Args:
            step: steps done.
            values: numbers by name.
        """
        self._write({"step": step, **values})

    def show(self, step: int, media: Media) -> None:
        """Show images and histograms of an evaluation.

        Args:
            step: steps done.
            media: of that step.
        """
        if self._writer is not None:
            self._writer.show(step, media)

    def stopped(self, step: int, reason: str) -> None:
        """Write the row of a run that ends before its last step.

        Args:
            step: steps done.
            reason: what ends it.
        """
        self._write({"step": step, "stopped": reason})

    def flush(self) -> None:
        """Return when every row so far is on disk."""
        if self._writer is not None:
            self._writer.flush()

    def finish(self) -> None:
        """Write what is left of all steps, waiting for the devices. Raises as `check`."""
        with self.paused():
            self.profile.close()
        self._write_speed(self._newest)

    def _ends_the_run(self, values: Mapping[str, float], in_a_row: int) -> bool:
        finite = math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])
        return (
            not finite and self._faults.bad_numbers != "skip"
        ) or in_a_row >= self._faults.most_in_a_row

    def _write_speed(self, step: int) -> None:
        """The row about speed since the last one, if a step was finished in it."""
        if row := self.timing.row():
            self._write({"step": step, **row})

    def _write(self, row: Mapping[str, Any]) -> None:
        if self._writer is not None:
            self._writer.write(row)
