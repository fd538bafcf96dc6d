"""How fast a run goes: step times, arithmetic rate, waiting for data, memory, and an XProf trace of what the devices did.

`train/run/report/metrics.py` says what each key is.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal

import jax

INTERVAL_S = 10.0
"""Seconds of a run that one row of metrics covers."""
PERCENTILES = (50, 90, 99)
_RECENT_S = 10.0
"""Seconds of training after which a step counts e times less in the rate that is shown."""


@dataclasses.dataclass
class Total:
    """Sums over steps, where each second of training leaves e^(-1/fading) of what was there before."""

    fading: float = math.inf
    steps: float = 0.0
    units: float = 0.0
    seconds: float = 0.0
    waited: float = 0.0

    def add(self, seconds: float, units: int, waited: float) -> None:
        """Count a step.

        Args:
            seconds: its duration.
            units: tokens or images of it.
            waited: seconds of it in which the devices had nothing to do.
        """
        keep = math.exp(-seconds / self.fading)
        self.steps = keep * self.steps + 1
        self.units = keep * self.units + units
        self.seconds = keep * self.seconds + seconds
        self.waited = keep * self.waited + min(waited, seconds)

    @property
    def rate(self) -> float:
        """Units per second."""
        return self.units / self.seconds

    @property
    def data_wait(self) -> float:
        """Share of the time in which the devices waited for data, in [0, 1]."""
        return self.waited / self.seconds


class Timing:
    """Adds up the steps of one session, and since the last row of it. Its first step, which warms up, counts nowhere.

    Args:
        unit: what `step` is told the number of.
        flops_per_unit: FLOPs that training takes per unit, forward and backward, counted from the model's sizes.
        peak_flops: FLOPs per second of all devices together, None where unknown: then no utilization is given.
        compile_seconds: what compiling took; in the first row only.
        memory: peak bytes in use on the fullest device of this process, None where it does not say.
        clock: seconds, for tests.

    Attributes:
        whole: sums over the session.
        recent: over its last seconds.
    """

    def __init__(
        self,
        unit: Literal["tokens", "images"],
        flops_per_unit: float,
        peak_flops: float | None,
        compile_seconds: float = 0.0,
        memory: Callable[[], int | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.unit, self._flops_per_unit, self._peak_flops = unit, flops_per_unit, peak_flops
        self._compile_seconds, self._memory, self._clock = compile_seconds, memory, clock
        self._warm, self._compile_pending = False, True
        self.whole, self.recent, self._window = Total(), Total(_RECENT_S), Total()
        self._seconds, self._row_from, self._row_at = array.array("d"), 0, clock()

    def step(self, seconds: float, units: int, waited: float = 0.0) -> None:
        """Count a finished step.

        Args:
            seconds: its duration.
            units: tokens or images of it.
            waited: how long of it the devices had nothing to do, because no batch was there.
        """
        if self._warm:
            self._seconds.append(seconds)
            for total in (self.whole, self.recent, self._window):
                total.add(seconds, units, waited)
        self._warm = True

    def utilization(self, total: Total) -> float | None:
        """Model FLOPs utilization in [0, 1], None where the peak is unknown."""
        return total.rate * self._flops_per_unit / self._peak_flops if self._peak_flops else None

    @property
    def due(self) -> bool:
        """Whether it is time for a row."""
        return self._clock() - self._row_at >= INTERVAL_S

    def row(self) -> dict[str, float]:
        """The numbers since the last row, which start again at zero; empty where no step was counted."""
        window, self._window, self._row_at = self._window, Total(), self._clock()
        seconds, self._row_from = self._seconds[self._row_from :], len(self._seconds)
        if not seconds:
            return {}
        row = {f"perf_step_seconds_p{percent}": value for percent, value in _percentiles(seconds).items()}
        row |= {"perf_data_wait": window.data_wait, "perf_flops_per_second": window.rate * self._flops_per_unit}
        if (utilization := self.utilization(window)) is not None:
            row["perf_mfu"] = utilization
        if (memory := self._memory()) is not None:
            row["perf_memory_peak_bytes"] = memory
        if self._compile_pending:
            row["perf_compile_seconds"], self._compile_pending = self._compile_seconds, False
        return {name: float(f"{value:.5g}") if isinstance(value, float) else value for name, value in row.items()}

    def facts(self) -> dict[str, str]:
        """Lines for a person about the whole session, by their label; empty where no step was counted."""
        if not self._seconds:
            return {}
        percentiles = {percent: _short(seconds) for percent, seconds in _percentiles(self._seconds).items()}
        slow = ", ".join(f"p{percent} {percentiles[percent]}" for percent in PERCENTILES[1:])
        device = f"{quantity(self.whole.rate * self._flops_per_unit)} FLOP/s"
        if (utilization := self.utilization(self.whole)) is not None:
            device += f", MFU {100 * utilization:.1f} %"
        if (memory := self._memory()) is not None:
            device += f", at most {memory / 2**30:.2f} GiB in use"
        return {
            "step": f"{percentiles[50]} median, {slow}; waiting for data {100 * self.whole.data_wait:.1f} %",
            "device": device,
            "compile": _short(self._compile_seconds),
        }


class Profile:
    """Traces the steps asked for into a folder, until closed.

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
        active = number in self._steps
        if active != self._tracing:
            with self._paused():
                jax.profiler.start_trace(self._folder) if active else self.close()
            self._tracing = active
        return jax.profiler.StepTraceAnnotation("train", step_num=number) if active else contextlib.nullcontext()

    def close(self) -> None:
        """End the trace, if one is going on."""
        if self._tracing:
            self._tracing = False
            jax.profiler.stop_trace()
            self._note(
                f"profile from step {self._steps[0]} in {self._folder}; "
                f"see it with: pip install xprof; xprof --port 8791 {self._folder}"
            )


def quantity(value: float) -> str:
    """A positive number in three digits and a letter: 0.123, 45.2, 45.2k, 1.23M, 12.3G, 4.56T."""
    for suffix in ("", "k", "M", "G", "T"):
        if value < 999.5:
            digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2 if value >= 0.9995 else 3
            return f"{value:.{digits}f}{suffix}"
        value /= 1000
    return f"{value:.0f}P"


def duration(seconds: float) -> str:
    """A time as people write it: 0:42, 3:12, 1:02:03, 2d 03:14."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _percentiles(seconds: Sequence[float]) -> dict[int, float]:
    """Step times that so many percent of the steps do not exceed."""
    ordered = sorted(seconds)
    return {percent: ordered[math.ceil(percent / 100 * len(ordered)) - 1] for percent in PERCENTILES}


def _short(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
