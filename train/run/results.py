"""The two ends of a run's loop: batches on their way to the devices, and results of steps on their way back, while other steps run.

Results are written to files and the terminal.
"""

from __future__ import annotations

import collections
import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import jax
import numpy as np

from mupax.train.config.metrics import metric_values
from mupax.train.core.program import Program
from mupax.train.core.state import RejectedStep, culprit
from mupax.train.data import Data
from mupax.train.parallel import hardware
from mupax.train.run.report.metrics import MetricsWriter
from mupax.train.run.report.progress import Profile, Progress, Timing
from mupax.train.run.runtime import STEP, RunContext
from mupax.train.run.start import StartState
from mupax.zoo import flops

if TYPE_CHECKING:
    from mupax.train.run.report.mirrors.trackers import Media

S = TypeVar("S")
T = TypeVar("T")

DEPTH = 2
"""Batches kept on the devices beside the one in use."""
_PATIENCE_S = 5.0
"""How long `close` waits for a source that is stuck, in a file system that hangs say."""


class Prefetch(Generic[S, T]):
    """The batches of a source in its order, each put on the devices by a thread before it is asked for.

    What goes wrong in the thread is raised by `next`, after the batches before it, as it was raised there. Close it, or
    use it as a context manager: then the source is closed too, by the thread.

    Args:
        source: batches on the host.
        put: sends one to the devices.
        depth: batches that may wait there, at least 1. The thread has one more in its hands.
    """

    def __init__(self, source: Generator[S, None, None], put: Callable[[S], T], depth: int = DEPTH) -> None:
        self._source, self._put = source, put
        self._queue: queue.Queue[tuple[T] | Exception] = queue.Queue(depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def ready(self, seconds: float = 0.0) -> bool:
        """Whether `next` answers at once, after waiting at most so long for it."""
        with self._queue.not_empty:
            return self._queue.not_empty.wait_for(lambda: bool(self._queue.queue), seconds)

    def __iter__(self) -> Prefetch[S, T]:
        return self

    def __next__(self) -> T:
        item = self._queue.get()
        if isinstance(item, Exception):
            self._queue.put(item)  # Nothing comes after it: the next call ends in the same way.
            raise item
        return item[0]

    def close(self) -> None:
        """End the thread and the source. Closing twice does nothing more."""
        self._stop.set()
        until = time.monotonic() + _PATIENCE_S
        while self._thread.is_alive() and time.monotonic() < until:
            with contextlib.suppress(queue.Empty):  # The thread may wait for room.
                self._queue.get_nowait()
            self._thread.join(0.01)

    def __enter__(self) -> Prefetch[S, T]:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(self) -> None:
        last: Exception = StopIteration()
        try:
            with contextlib.closing(self._source):
                for batch in self._source:
                    if self._stop.is_set():
                        return
                    self._queue.put((self._put(batch),))
        except Exception as error:
            last = error
        self._queue.put(last)


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
        self, program: Program, data: Data, rt: RunContext, position: StartState, compile_seconds: float, left_out: int
    ) -> None:
        super().__init__()
        config, log = rt.config, rt.config.log
        self._unit, self._program, self._faults, self._left_out = data.kind, program, config.faults, left_out
        self._data = data
        self._writer: MetricsWriter | None = None
        self._spool = rt.spool
        if rt.processes.leader:
            step = position.step if position.keep_metrics else None
            self._writer = MetricsWriter(rt.files, log=log, resume_step=step, note=rt.console.print)
        peak = hardware.peak_flops(jax.devices()[0].device_kind, config.model.compute.dtype)
        peak = None if peak is None else peak * program.mesh.size
        memory = partial(hardware.memory_peak, jax.local_devices())
        self.timing = Timing(data.kind, flops.train_flops(config.model), peak, compile_seconds, memory)
        self.progress = Progress(config.steps, position.step, self.timing, rt.console, log.progress)
        steps = log.profile_steps if rt.processes.leader else None
        self.profile = Profile(steps, rt.files / "profile", self.paused, self.progress.note)
        self._pending: collections.deque[tuple[int, dict[str, jax.Array], float]] = collections.deque()
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
            count = int(weight) if math.isfinite(weight) else 0  # judged by the loss, which is no number then either
            measured = metric_values(values["loss"], values, self._data.bytes_per_target, training=True)
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
        return (not finite and self._faults.bad_numbers != "skip") or in_a_row >= self._faults.most_in_a_row

    def _write_speed(self, step: int) -> None:
        """The row about speed since the last one, if a step was finished in it."""
        if row := self.timing.row():
            self._write({"step": step, **row})

    def _write(self, row: Mapping[str, Any]) -> None:
        if self._writer is not None:
            self._writer.write(row)
