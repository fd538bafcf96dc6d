"""Context of a run around its steps: processes, signals, workdir, watchdog, console and report.

`loop.run` enters `runtime` for all of a run, and a `Report` for each attempt at its steps.
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
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TextIO

import jax
import numpy as np
from rich.console import Console

from mupax import MupaxFailure
from mupax.disk import is_remote
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
    """Exception that ends training after a signal, after the same step on all processes."""


class HookError(MupaxFailure):
    """Error of a run whose user hook raised an exception, which is the cause of this one.

    Processes on which the hook did not fail have no cause.
    """


class Watchdog:
    """Context manager that prints what the run waits for after a long silence.

    It also prints the stack of every thread. It begins with the first call of `waiting`, because
    compiling for a pod may take longer than any other silence. It ends nothing: a run that hangs
    may wait for a slow disk, and only its user knows what its hours cost.

    Args:
        seconds: Silence after which it prints, and prints again; `None` to print nothing.
        file: Open file with a file descriptor. Default standard error.
    """

    def __init__(self, seconds: float | None, file: TextIO | None = None) -> None:
        self._seconds = seconds
        self._file = file
        # Infinite until the first call of `waiting`, so that compiling does not count as silence.
        self._since = math.inf
        self._awaited = ""
        self._ended = threading.Event()

    def waiting(self, awaited: str) -> None:
        """Restart the time of silence, and set the text on what the run waits for next."""
        self._since = time.monotonic()
        self._awaited = awaited

    def __enter__(self) -> Watchdog:
        if self._seconds is not None:
            thread = threading.Thread(
                target=self._watch, args=(self._seconds,), name="watchdog", daemon=True
            )
            thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._ended.set()

    def _watch(self, seconds: float) -> None:
        """Print the awaited text and all stacks after each `seconds` of silence, in a thread.

        Check ten times in `seconds`, until the context manager is left.
        """
        last_report = 0.0
        while not self._ended.wait(seconds / 10):
            now = time.monotonic()
            silent_since = self._since
            file = self._file or sys.stderr
            if now - max(silent_since, last_report) < seconds:
                continue
            last_report = now
            print(
                f"watchdog: {now - silent_since:.0f} s without anything finished; "
                f"waiting for {self._awaited}. The threads are at:",
                file=file,
                flush=True,
            )
            try:
                faulthandler.dump_traceback(file)
            except (AttributeError, OSError, ValueError):  # a stream without a descriptor
                faulthandler.dump_traceback(sys.__stderr__ or 2)


STEP = "step"
EVALUATION = "evaluation"
"""Kinds of programs that run on all devices and are compiled before they are dispatched."""


class Patience:
    """Clock of this process's waits for programs on all devices, compared with the longest wait.

    A program waits in a collective operation if the network between processes is cut. Only the
    time inside of `program` counts. Compiling, reading data and saving do not.
    """

    def __init__(self) -> None:
        self._kind = ""
        self._since = math.inf
        self._longest: dict[str, float] = {}

    @contextlib.contextmanager
    def program(self, kind: str) -> Iterator[None]:
        """Context manager that counts the time inside as a wait.

        At its end the time is recorded (`took`), unless an exception was raised inside.

        Args:
            kind: Kind of program. A wait is compared with the longest wait of its kind.
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
        """Record how long a program took, if it is the longest of its kind so far.

        Args:
            seconds: Time from its beginning, or from the end of the program before it.
        """
        self._longest[kind] = max(self._longest.get(kind, 0.0), seconds)

    def beyond(self) -> float:
        """Return the seconds by which the present wait exceeds the longest one of its kind so far.

        The result is 0 or less while the wait is shorter. It is -inf while there is no wait.
        """
        return time.monotonic() - self._since - self._longest.get(self._kind, 0.0)


@dataclasses.dataclass(frozen=True)
class RunContext:
    """Context of a run in one process: config, processes, workdir and output (`runtime` makes it).

    Attributes:
        config: Config of the run. A resumed run has its recorded `init`.
        folder: Workdir, locked for this run.
        spool: Local folder whose files are uploaded to a workdir in a bucket. Only on process 0.
        resumed: Whether an earlier part of the run is in the workdir.
        processes: Processes of the run. Process 0 prints and writes.
        stop: Receives signals.
        watchdog: Prints after a long silence.
        console: Prints on process 0 alone.
        patience: Measures how long this process waits for a program on all devices.
        attempt: Memory that tells the supervisor (`--restart`) how far the run has come.
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
        """Folder for rows, pictures and traces: the workdir, or a local one before upload."""
        return self.spool.folder if self.spool else self.folder

    def send(self) -> None:
        """Upload changed files, such as metrics.jsonl, if the workdir is in a bucket.

        Only process 0 uploads. On other processes nothing happens.

        Raises:
            OSError: The rows of metrics cannot be uploaded.
        """
        if self.spool:
            self.spool.send()

    @contextlib.contextmanager
    def dispatching(self, awaited: str, kind: str | None = None) -> Iterator[None]:
        """Context manager for dispatching a program that all processes run, or none of them.

        Args:
            awaited: Text for the watchdog on what the run waits for from now on.
            kind: `STEP` or `EVALUATION`, to compare the wait for the program with earlier waits
                (`Patience`). `None` for a program whose wait is not limited, because it may first
                be compiled.

        Raises:
            Interrupted: A signal came first.
        """
        if not self.stop.claim():
            raise Interrupted
        self.watchdog.waiting(awaited)
        with self.patience.program(kind) if kind else contextlib.nullcontext():
            yield
        self.stop.done()

    def fail(self, text: str) -> int:
        """Print an error on this process' standard error, and return the exit code 1."""
        # `self.console` is quiet except on process 0, and an error belongs on its own process.
        rich_console(stderr=True).print(
            f"error: {text}", style="red", highlight=False, markup=False, soft_wrap=True
        )
        return 1


@contextlib.contextmanager
def runtime(config: Config) -> Iterator[RunContext]:
    """Context manager that joins the processes, receives signals, and makes and locks the workdir.

    It yields the `RunContext`, whose config has the recorded `init` if the run is resumed. What is
    left of a run that ended before its first step is deleted from the workdir. While entered, the
    watchdog prints after a long silence, and all processes are ended if each of them waits for
    another for too long (`faults.collective_seconds`).

    Raises:
        AgreementError, DistributedError: Processes differ, or cannot find one another.
        WorkdirError: The workdir cannot be used.
        MupaxError: The source that a new run starts from (`init.init_from`) cannot be read.
        SystemExit: A signal came with nothing to save.
    """
    address = place(config.distributed)
    # Signals are received before the processes join, which may wait long for a host.
    with lasting(), StopRequest() as stop, _joined(address, config) as processes:
        stop.join(processes)
        if processes.count > 1:
            from mupax.train.core import program as core_program
            from mupax.train.data import cache
            from mupax.train.parallel import agreement

            # Before anything is written: processes that differ would wait for each other later.
            agreement.check(config, processes)
            core_program.use(cache.root, processes)
        folder, resumed = workdir.claim(config, processes)
        with (
            workdir.locked(folder, processes),
            _spool(folder, processes) as spool,
            Watchdog(config.faults.watchdog_seconds) as watchdog,
        ):
            # Delete what an earlier run left only now that the folder is locked.
            if not resumed and processes.leader:
                workdir.start_anew(folder)
            if resumed or config.init.init_from is not None:
                from mupax.train.reuse.start import init_from

                # A resumed run keeps the source that it has recorded.
                config = init_from.settled(config, folder, resumed, processes)
            patience = Patience()
            processes.end_stalled(patience.beyond, config.faults.collective_seconds)
            attempt = None
            # Set by the supervisor of `--restart`.
            if "MUPAX_ATTEMPT" in os.environ:
                from mupax.train.run.restart import memory

                attempt = memory.of_this_process(processes.index, processes.count)
            yield RunContext(
                config=config,
                folder=folder,
                spool=spool,
                resumed=resumed,
                processes=processes,
                stop=stop,
                watchdog=watchdog,
                console=rich_console(quiet=not processes.leader),
                patience=patience,
                attempt=attempt,
            )


def _spool(
    folder: Path, processes: Processes
) -> contextlib.AbstractContextManager[UploadBuffer | None]:
    """Return a context manager that yields the upload buffer of a workdir in a bucket.

    It yields `None` for other workdirs, and on processes other than 0.
    """
    if not processes.leader or not is_remote(folder):
        return contextlib.nullcontext()
    from mupax.train.run.report import spool

    return spool.UploadBuffer(folder)


def _joined(
    address: dict[str, Any] | None, config: Config
) -> contextlib.AbstractContextManager[Processes]:
    """Return a context manager that connects this process to the other processes of the run.

    It yields the `Processes` through which they communicate.

    Args:
        address: Arguments of `jax.distributed.initialize`, or `None` if this process is alone.
    """
    if address is None:
        return contextlib.nullcontext(Processes())
    from mupax.train.parallel import distributed

    return distributed.joined(address, config.distributed)


@dataclasses.dataclass(frozen=True)
class StartState:
    """State from which training starts, with its step.

    Attributes:
        state: State on the devices. Its arrays are donated to the first step.
        step: Optimizer steps done.
        keep_metrics: Whether metrics.jsonl has rows up to that step, which are kept.
        evaluated: Whether the evaluation of that step is done, or none is due.
    """

    state: TrainState
    step: int
    keep_metrics: bool
    evaluated: bool = True


class _PendingStep(NamedTuple):
    """Step that was dispatched, and whose metrics may still be on their way to the host."""

    step: int
    metrics: dict[str, jax.Array]
    waited: float
    """Seconds in which the devices had nothing to do before the step."""


class Report(contextlib.ExitStack):
    """Context manager that reports the steps of one attempt at a run, on screen and in files.

    Steps may still be on the devices while the next ones are dispatched. `add` takes a step when
    it is dispatched, `fetch` reports a step when its metrics are on the host.

    Args:
        context: Context of the run. Only process 0 writes and draws.
        start: State from which the attempt starts. It says which earlier rows are kept.
        compile_seconds: Time that compiling took, for the first row about speed.
        skipped_batches: Number of batches that rollbacks have skipped before this attempt.

    Attributes:
        timing: Speed of this attempt, measured from its second step on.
        progress: Live bar or plain lines on the screen of process 0.
        profile: Trace of the steps that `log.profile` names.
    """

    def __init__(
        self,
        program: Program,
        data: Data,
        context: RunContext,
        start: StartState,
        compile_seconds: float,
        skipped_batches: int,
    ) -> None:
        super().__init__()
        config = context.config
        log = config.log
        is_leader = context.processes.leader
        console = context.console
        self._program = program
        self._data = data
        self._faults = config.faults
        self._skipped_batches = skipped_batches
        self._patience = context.patience
        self._spool = context.spool
        self._writer: MetricsWriter | None = None
        if is_leader:
            self._writer = MetricsWriter(
                context.files,
                log=log,
                resume_step=start.step if start.keep_metrics else None,
                note=console.print,
            )

        peak = hardware.peak_flops(jax.devices()[0].device_kind, config.model.compute.dtype)
        if peak is not None:
            peak *= program.mesh.size
        self.timing = Timing(
            data.kind,
            families.train_flops(config.model),
            peak,
            compile_seconds,
            partial(hardware.memory_peak, jax.local_devices()),
        )
        self.progress = Progress(config.steps, start.step, self.timing, console, log.progress)
        profiled_steps = log.profile_steps if is_leader else None
        self.profile = Profile(
            profiled_steps, context.files / "profile", self.paused, self.progress.note
        )

        self._pending: collections.deque[_PendingStep] = collections.deque()
        self._rejected: RejectedStep | None = None
        self._newest = start.step
        self._attempt = context.attempt
        if self._attempt is not None:
            self._attempt.note(start=start.step, step=start.step)
        self._waited = 0.0
        self._clock = time.monotonic()

    def __enter__(self) -> Self:
        if self._writer is not None:
            self.enter_context(self._writer)
        self.enter_context(self.progress)
        # Closed before the live bar ends, because closing prints a line above the bar.
        self.callback(self.profile.close)
        return self

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager that waits for all steps in flight before the work inside of it.

        The time of the work is not counted in step times.

        Raises:
            RejectedStep: A step that was added ends the run under its policy.
        """
        self.fetch()
        self.check(self._newest)
        yield
        self._clock = time.monotonic()

    def waited(self, seconds: float) -> None:
        """Count seconds in which the devices had nothing to do before the next step."""
        self._waited += seconds

    def add(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Add a step that was dispatched, and start the transfer of its metrics to the host.

        Args:
            step: Number of the step, from 1.
            metrics: Metrics of the training step by name, still on the devices.
        """
        for name, value in metrics.items():
            # The squares of all gradients are fetched only to find the culprit of a bad step.
            if name != "squares":
                value.copy_to_host_async()
        self._pending.append(_PendingStep(step, metrics, self._waited))
        self._newest = step
        self._waited = 0.0

    def check(self, step: int) -> None:
        """Raise the error of a bad step up to `step`, if there is one.

        `fetch` may have seen more steps on one process than on another. All processes stop at the
        same step, because all ask for the same step.

        Raises:
            RejectedStep: A step up to this one ends the run under its policy.
        """
        if self._rejected is not None and self._rejected.step <= step:
            raise self._rejected

    def fetch(self, keep: int = 0) -> None:
        """Report finished steps, waiting until at most `keep` steps are still on the devices.

        Steps after a step that ends the run are dropped. `check` raises the error of that step.
        """
        while len(self._pending) > keep:
            pending = self._pending.popleft()
            # Steps after a bad one are dropped: the run goes back or ends.
            if self._rejected is None:
                self._finish_step(pending)

    def _finish_step(self, pending: _PendingStep) -> None:
        """Wait for a step, write its row, and show it. Keep its error if it ends the attempt."""
        step = pending.step
        metrics = pending.metrics
        # Without the squares, which stay on the devices unless the step is bad.
        squares = metrics.pop("squares")
        with self._patience.program(STEP):
            fetched = jax.device_get(metrics)
        now = time.monotonic()
        seconds = now - self._clock
        self._clock = now
        # `device_get` above may have waited for only a part of the step.
        self._patience.took(STEP, seconds - pending.waited)

        skipped, spike, in_a_row = fetched.pop("verdict").tolist()
        values = {name: float(value) for name, value in fetched.items()}
        weight = values.pop("weight")
        # If the weight is not finite, neither is the loss, and `_ends_run` checks the loss.
        count = int(weight) if math.isfinite(weight) else 0
        bytes_per_target = self._data.bytes_per_target
        measured = metric_values(values["loss"], values, bytes_per_target, training=True)
        row = {"step": step, **values, **measured, self._data.kind: count}
        if spike:
            row["spike"] = True
        if skipped:
            row["skipped"] = True
        if self._skipped_batches:
            # After a rollback, the batch of a step no longer follows from its number.
            row["batch"] = step - 1 + self._skipped_batches
        row["seconds"] = round(seconds, 6)
        self._write(row)
        if self._attempt is not None:
            self._attempt.note(step=step)

        if skipped and self._ends_run(values, in_a_row):
            culprit_name = self._culprit(squares)
            self._rejected = RejectedStep(
                step, values["loss"], values["grad_norm"], culprit_name, in_a_row
            )
            return
        self.timing.step(seconds, count, pending.waited)
        self.progress.update(
            step,
            values["loss"],
            values["lr"],
            measured.get("loss_per_byte"),
            values.get("attention_logit_max"),
        )
        if self.timing.due:
            self._write_speed(step)

    def _culprit(self, squares: jax.Array) -> str | None:
        """Return a description of the first parameter whose gradient is not finite, or `None`.

        Args:
            squares: Squared gradient norms of the trained parameters, still on the devices.
        """
        definition = self._program.definition
        trained = self._program.trained
        specs = {name: spec for name, spec in definition.specs.items() if name in trained}
        return culprit(np.asarray(jax.device_get(squares)), specs, definition.abstract)

    def evaluated(self, row: dict[str, Any]) -> None:
        """Write and print the row of an evaluation, on process 0 alone.

        If the workdir is in a bucket, the upload of the row is started, too.

        Args:
            row: Values by metric, with the `step`.
        """
        self._write(row)
        if self._spool is not None:
            self.flush()
            # In a thread, so that training does not wait for a slow bucket.
            self._spool.send_later()
        self.progress.evaluated(row)

    def logged(self, step: int, values: Mapping[str, float]) -> None:
        """Write the row of values that hooks logged, on process 0 alone.

        The row goes to metrics.jsonl, TensorBoard and the trackers.

        Args:
            step: Number of steps done.
        """
        self._write({"step": step, **values})

    def show(self, step: int, media: Media) -> None:
        """Show images and histograms of an evaluation in TensorBoard, on process 0 alone.

        Nothing happens if the config asks for no TensorBoard.

        Args:
            step: Number of steps done.
        """
        if self._writer is not None:
            self._writer.show(step, media)

    def stopped(self, step: int, reason: str) -> None:
        """Write the row of a run that ends before its last step, on process 0 alone.

        Args:
            step: Number of steps done.
            reason: Reason why the run ends, as metrics.jsonl shows it.
        """
        self._write({"step": step, "stopped": reason})

    def flush(self) -> None:
        """Wait until all rows that were written are on disk. Do nothing on processes other than 0.

        Then wait at most 10 seconds for TensorBoard and trackers.

        Raises:
            DiskError, RuntimeError: A row could not be written.
        """
        if self._writer is not None:
            self._writer.flush()

    def finish(self) -> None:
        """Wait for all steps, write their rows, end an open trace, and write the last speed row.

        Raises:
            RejectedStep: A step that was added ends the run under its policy.
        """
        # A trace that is open is closed while the devices are idle, so that it holds whole steps.
        with self.paused():
            self.profile.close()
        self._write_speed(self._newest)

    def _ends_run(self, values: Mapping[str, float], in_a_row: int) -> bool:
        """Return whether a skipped step ends this attempt.

        It does after `faults.most_in_a_row` skipped steps in a row, or if loss or gradient is not
        finite and `faults.bad_numbers` is not "skip".

        Args:
            values: Metrics of the step, with `loss` and `grad_norm`.
        """
        if in_a_row >= self._faults.most_in_a_row:
            return True
        finite = math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])
        return not finite and self._faults.bad_numbers != "skip"

    def _write_speed(self, step: int) -> None:
        """Write a row about the speed since the last such row, if a step was finished since."""
        row = self.timing.row()
        if row:
            self._write({"step": step, **row})

    def _write(self, row: Mapping[str, Any]) -> None:
        if self._writer is not None:
            self._writer.write(row)
