"""What steps gave back: fetched from the devices while later steps run there, and told to files and the terminal."""

from __future__ import annotations

import collections
import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Protocol

import jax

from train.progress import Progress
from train.timing import Timing


class Diverged(Exception):
    """The loss is not a number. Carries the text for a person."""


class Writer(Protocol):
    """Where rows go: a `MetricsWriter`, or nowhere."""

    def write(self, row: Mapping[str, Any], /) -> None: ...


class NoWriter:
    """The metrics of a process that is not the first: nowhere."""

    def write(self, row: Mapping[str, Any], /) -> None:
        pass

    def __enter__(self) -> NoWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


class Results:
    """Metrics of the steps that are still on the devices, oldest first.

    Args:
        unit: what a step's weight counts.
        writer: gets a row per finished step.
        progress: shows it.
        timing: adds it up.
    """

    def __init__(self, unit: Literal["tokens", "images"], writer: Writer, progress: Progress, timing: Timing) -> None:
        self._unit, self._writer, self._progress, self._timing = unit, writer, progress, timing
        self._pending: collections.deque[tuple[int, dict[str, jax.Array], float]] = collections.deque()
        self._waited = 0.0
        self._clock = time.monotonic()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time in which the devices have no steps to do, and that counts to none."""
        self.report()
        yield
        self._clock = time.monotonic()

    def waited(self, seconds: float) -> None:
        """The devices had nothing to do for so long before the next step."""
        self._waited += seconds

    def add(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """A step was dispatched. Its metrics start their way to the host as soon as they are known."""
        for value in metrics.values():
            value.copy_to_host_async()
        self._pending.append((step, metrics, self._waited))
        self._waited = 0.0

    def report(self, keep: int = 0) -> None:
        """Write the rows of finished steps, waiting until at most `keep` are still on the devices.

        Raises:
            Diverged: a loss or gradient is not a number.
        """
        while len(self._pending) > keep:
            step, metrics, waited = self._pending.popleft()
            values = {name: float(value) for name, value in jax.device_get(metrics).items()}
            now = time.monotonic()
            seconds, self._clock = now - self._clock, now
            count = int(values.pop("weight"))
            self._writer.write({"step": step, **values, self._unit: count, "seconds": round(seconds, 6)})
            # A gradient that is not a number has already spoiled the parameters, one step before the loss shows it.
            if not (math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])):
                raise Diverged(
                    f"the loss is {values['loss']:g} and the gradient norm {values['grad_norm']:g} at step {step}; "
                    "nothing after the last checkpoint is kept. "
                    "Lower --optimizer.peak-lr, lengthen --optimizer.warmup-steps, or set --optimizer.clip-norm 1"
                )
            self._timing.step(seconds, count, waited)
            self._progress.update(
                step=step, loss=values["loss"], lr=values["lr"], units=count, seconds=seconds, waited=waited
            )
            if self._timing.due:
                self.report_speed(step)

    def report_speed(self, step: int) -> None:
        """Write the row about speed since the last one, if a step was finished in it."""
        if row := self._timing.row():
            self._writer.write({"step": step, **row})
