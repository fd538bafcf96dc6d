"""What steps gave back: fetched from the devices while later steps run there, and told to files and the terminal."""

from __future__ import annotations

import collections
import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Literal

import jax
import numpy as np

from mupax.train.config.run import FaultsConfig
from mupax.train.core.nonfinite import RejectedStep, culprit
from mupax.train.core.program import Program
from mupax.train.data import Data
from mupax.train.parallel import hardware
from mupax.train.run.report.metrics import MetricsWriter
from mupax.train.run.report.progress import Progress
from mupax.train.run.report.timing import Profile, Timing
from mupax.train.run.runtime import Runtime
from mupax.train.run.start import Position
from mupax.zoo import flops


class NoWriter:
    """The metrics of a process that is not the first: nowhere."""

    def write(self, row: Mapping[str, Any]) -> None:
        """Forget a row."""

    def flush(self) -> None:
        """Nothing to do."""

    def __enter__(self) -> NoWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


class Report:
    """What one attempt at a run tells files and the terminal; a context manager.

    Args:
        program: of the run.
        data: of the run.
        rt: the run's surroundings.
        position: where the attempt starts.
        compile_seconds: what compiling took.
        left_out: batches that rollbacks passed over.
    """

    def __init__(
        self, program: Program, data: Data, rt: Runtime, position: Position, compile_seconds: float, left_out: int
    ) -> None:
        config, log = rt.config, rt.config.log
        flops_per_unit = flops.train_flops(config.model)
        peak = hardware.peak_flops(jax.devices()[0].device_kind, config.model.compute.dtype)
        peak = None if peak is None else peak * program.mesh.size
        self.writer: MetricsWriter | NoWriter = NoWriter()
        if rt.leader:
            step = position.step if position.keeps_rows else None
            self.writer = MetricsWriter(rt.folder, tensorboard=log.tensorboard, wandb=log.wandb, resume_step=step)
        self.progress = Progress(config.steps, position.step, data.kind, peak, flops_per_unit, rt.console, log.progress)
        self.timing = Timing(
            data.kind, flops_per_unit, peak, compile_seconds, lambda: hardware.memory_peak(jax.local_devices())
        )
        trained = {name: spec for name, spec in program.definition.specs.items() if name in program.trained}
        self.results = Results(
            data.kind,
            self.writer,
            self.progress,
            self.timing,
            config.faults,
            lambda squares: culprit(squares, trained, program.definition.abstract),
            left_out,
        )
        steps = log.profile_steps if rt.leader else None
        self.profile = Profile(steps, rt.folder / "profile", self.results.paused, self.progress.note)
        self._entered, self._profiling = contextlib.ExitStack(), contextlib.ExitStack()

    def evaluated(self, row: dict[str, Any]) -> None:
        """Write and show the row of an evaluation."""
        self.writer.write(row)
        self.progress.evaluated(row)

    def finish(self, step: int) -> None:
        """Write what is left of all steps up to this one, waiting for the devices.

        Raises:
            RejectedStep: one of them ends the run under its policy.
        """
        self.results.finish()
        self._profiling.close()
        self.results.report_speed(step)

    def __enter__(self) -> Report:
        self._entered.enter_context(self.writer)
        self._entered.enter_context(self.progress)
        self._entered.enter_context(self._profiling)
        self._profiling.enter_context(self.profile)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.__exit__(kind, error, trace)


class Results:
    """Metrics of the steps that are still on the devices, oldest first.

    Args:
        unit: what a step's weight counts.
        writer: gets a row per finished step.
        progress: shows it.
        timing: adds it up.
        faults: which steps end the run.
        culprit: says in words which gradient is not finite, from the `squares` of a step's metrics.
        left_out: batches that rollbacks passed over.
    """

    def __init__(
        self,
        unit: Literal["tokens", "images"],
        writer: MetricsWriter | NoWriter,
        progress: Progress,
        timing: Timing,
        faults: FaultsConfig,
        culprit: Callable[[np.ndarray], str | None],
        left_out: int = 0,
    ) -> None:
        self._unit, self._writer, self._progress, self._timing = unit, writer, progress, timing
        self._faults, self._culprit, self._left_out = faults, culprit, left_out
        self._pending: collections.deque[tuple[int, dict[str, jax.Array], float]] = collections.deque()
        self._bad: RejectedStep | None = None
        self._newest = 0
        self._waited = 0.0
        self._clock = time.monotonic()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time in which the devices have no steps to do, and that counts to none."""
        self.finish()
        yield
        self._clock = time.monotonic()

    def waited(self, seconds: float) -> None:
        """The devices had nothing to do for so long before the next step."""
        self._waited += seconds

    def add(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """A step was dispatched. Its metrics start their way to the host as soon as they are known."""
        for name, value in metrics.items():
            if name != "squares":  # fetched only where they say something
                value.copy_to_host_async()
        self._pending.append((step, metrics, self._waited))
        self._newest, self._waited = step, 0.0

    def finish(self) -> None:
        """Write the rows of all steps, waiting for the devices. Raises as `check`."""
        self.report()
        self.check(self._newest)

    def check(self, step: int) -> None:
        """Stop at a bad step up to this one.

        `report` may have seen further on one process than on another: all stop at the same step by asking for the same.

        Raises:
            RejectedStep: a step up to this one ends the run under its policy.
        """
        if self._bad is not None and self._bad.step <= step:
            raise self._bad

    def report(self, keep: int = 0) -> None:
        """Write the rows of finished steps, waiting until at most `keep` are still on the devices."""
        while len(self._pending) > keep:
            step, metrics, waited = self._pending.popleft()
            if self._bad is not None:
                continue  # Nothing after it is kept.
            squares = metrics.pop("squares")
            values = jax.device_get(metrics)
            now = time.monotonic()
            seconds, self._clock = now - self._clock, now
            skipped, spike, in_a_row = values.pop("verdict").tolist()
            values = {name: float(value) for name, value in values.items()}
            count = int(values.pop("weight"))
            row = {"step": step, **values, self._unit: count}
            row |= {"spike": True} if spike else {}
            row |= {"skipped": True} if skipped else {}
            row |= {"batch": step - 1 + self._left_out} if self._left_out else {}
            self._writer.write({**row, "seconds": round(seconds, 6)})
            if skipped and self._ends_the_run(values, in_a_row):
                where = self._culprit(np.asarray(jax.device_get(squares)))
                self._bad = RejectedStep(step, values["loss"], values["grad_norm"], where, in_a_row)
                continue
            self._timing.step(seconds, count, waited)
            self._progress.update(
                step=step, loss=values["loss"], lr=values["lr"], units=count, seconds=seconds, waited=waited
            )
            if self._timing.due:
                self.report_speed(step)

    def _ends_the_run(self, values: Mapping[str, float], in_a_row: int) -> bool:
        finite = math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])
        return (not finite and self._faults.bad_numbers != "skip") or in_a_row >= self._faults.most_in_a_row

    def report_speed(self, step: int) -> None:
        """Write the row about speed since the last one, if a step was finished in it."""
        if row := self._timing.row():
            self._writer.write({"step": step, **row})
