"""How fast a run goes: step times, arithmetic rate, waiting for data, memory, and an XProf trace of what the devices did.

`train/run/report/metrics.py` says what each key is.
"""

from __future__ import annotations

import array
import contextlib
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Literal

import jax

from mupax.train.run.report.progress import quantity

INTERVAL_S = 10.0
"""Seconds of a run that one row of metrics covers."""
PERCENTILES = (50, 90, 99)


class Timing:
    """Adds up the steps of one session, and since the last row of it. Its first step, which warms up, counts nowhere.

    Args:
        unit: what `step` is told the number of.
        flops_per_unit: FLOPs that training takes per unit, forward and backward, counted from the model's sizes.
        peak_flops: FLOPs per second of all devices together, None where unknown: then no utilization is given.
        compile_seconds: what compiling took; in the first row only.
        memory: peak bytes in use on the fullest device of this process, None where it does not say.
        clock: seconds, for tests.
    """

    def __init__(
        self,
        unit: Literal["tokens", "images"],
        flops_per_unit: float,
        peak_flops: float | None,
        compile_seconds: float,
        memory: Callable[[], int | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._unit, self._flops_per_unit, self._peak_flops = unit, flops_per_unit, peak_flops
        self._compile_seconds, self._memory, self._clock = compile_seconds, memory, clock
        self._compile_pending = True
        self._steps = 0
        self._all, self._window = _Total(), _Total()
        self._row_at = clock()

    def step(self, seconds: float, units: int, waited: float) -> None:
        """Count a finished step.

        Args:
            seconds: its duration.
            units: tokens or images of it.
            waited: how long of it the devices had nothing to do, because no batch was there.
        """
        self._steps += 1
        if self._steps > 1:
            self._all.add(seconds, units, waited)
            self._window.add(seconds, units, waited)

    @property
    def due(self) -> bool:
        """Whether it is time for a row."""
        return self._clock() - self._row_at >= INTERVAL_S

    def row(self) -> dict[str, float]:
        """The numbers since the last row, which start again at zero; empty where no step was counted."""
        window, self._window, self._row_at = self._window, _Total(), self._clock()
        if not window.steps:
            return {}
        row = window.percentiles() | {"perf_data_wait": window.waited / window.seconds}
        rate = window.rate * self._flops_per_unit
        row["perf_flops_per_second"] = rate
        if self._peak_flops:
            row["perf_mfu"] = rate / self._peak_flops
        if (memory := self._memory()) is not None:
            row["perf_memory_peak_bytes"] = memory
        if self._compile_pending:
            row["perf_compile_seconds"], self._compile_pending = self._compile_seconds, False
        return {name: float(f"{value:.5g}") if isinstance(value, float) else value for name, value in row.items()}

    def facts(self) -> dict[str, str]:
        """Lines for a person about the whole session, by their label; empty where no step was counted."""
        total = self._all
        if not total.steps:
            return {}
        median, *tail = (_duration(seconds) for seconds in total.percentiles().values())
        slow = [f"p{percent} {seconds}" for percent, seconds in zip(PERCENTILES[1:], tail, strict=True)]
        rate = total.rate * self._flops_per_unit
        device = f"{quantity(rate)} FLOP/s"
        if self._peak_flops:
            device += f", MFU {100 * rate / self._peak_flops:.1f} %"
        if (memory := self._memory()) is not None:
            device += f", at most {memory / 2**30:.2f} GiB in use"
        return {
            "step": f"{median} median, {', '.join(slow)}; waiting for data {100 * total.waited / total.seconds:.1f} %",
            "device": device,
            "compile": _duration(self._compile_seconds),
        }


class Profile:
    """Traces the steps asked for into a folder, as a context manager around the loop.

    Only one process of a run should have steps: the files are named by host, so two on one host would write the same.

    Args:
        steps: numbers of the steps to trace, without gaps; None traces nothing.
        folder: gets `plugins/profile/TIME/HOST.xplane.pb` and a `.trace.json.gz` beside it.
        paused: entered while the trace is started or ended: the devices are idle then, and no step is being timed.
        note: told where the trace is.
    """

    def __init__(
        self,
        steps: range | None,
        folder: Path,
        paused: Callable[[], AbstractContextManager[None]],
        note: Callable[[str], None],
    ) -> None:
        self._steps, self._folder, self._paused, self._note = steps or range(0), folder, paused, note
        self._tracing = False

    def step(self, number: int) -> AbstractContextManager[object]:
        """To be entered around the dispatch of a step: the trace begins before its first one and ends after its last."""
        wanted = number in self._steps
        if wanted != self._tracing:
            with self._paused():
                self._start() if wanted else self._end()
        return jax.profiler.StepTraceAnnotation("train", step_num=number) if wanted else contextlib.nullcontext()

    def __enter__(self) -> Profile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._tracing:
            self._end()

    def _start(self) -> None:
        jax.profiler.start_trace(self._folder)
        self._tracing = True

    def _end(self) -> None:
        self._tracing = False
        jax.profiler.stop_trace()
        self._note(
            f"profile from step {self._steps[0]} in {self._folder}; "
            f"see it with: pip install xprof; xprof --port 8791 {self._folder}"
        )


class _Total:
    """Sums and step times of some steps."""

    def __init__(self) -> None:
        self._each = array.array("d")
        self.seconds = self.waited = 0.0
        self.units = 0

    def add(self, seconds: float, units: int, waited: float) -> None:
        self._each.append(seconds)
        self.seconds += seconds
        self.waited += min(waited, seconds)
        self.units += units

    @property
    def steps(self) -> int:
        return len(self._each)

    @property
    def rate(self) -> float:
        """Units per second."""
        return self.units / self.seconds

    def percentiles(self) -> dict[str, float]:
        """Step times that so many percent of the steps do not exceed."""
        ordered = sorted(self._each)
        rank = {percent: math.ceil(percent / 100 * len(ordered)) for percent in PERCENTILES}
        return {f"perf_step_seconds_p{percent}": ordered[rank[percent] - 1] for percent in PERCENTILES}


def _duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
