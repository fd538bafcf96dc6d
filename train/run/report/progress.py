"""What a person sees of a run: what begins, then a live bar in a terminal, plain lines anywhere else.

It says how fast the run goes: step times, arithmetic rate, waiting for data, memory, and an XProf trace of what the devices did.

`train/run/report/metrics.py` says what each key is.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from mupax.train.config.metrics import row_name, shown_everywhere
from mupax.train.parallel.sharding import described

if TYPE_CHECKING:
    from mupax.train.core.program import Program
    from mupax.train.data import Data

INTERVAL_S = 10.0
"""Seconds of a run that one row of metrics covers."""
PERCENTILES = (50, 90, 99)
_RECENT_S = 10.0
"""Seconds of training after which a step counts e times less in the rate that is shown."""

_PLAIN_LINE_S = 10.0
_PLAIN_LINES = 20
"""A short run prints at most this many plain lines, at round steps; a long one a line every `_PLAIN_LINE_S`."""
_BAR_WIDTH = (8, 40)
_WORTH_SAYING = 0.05
"""Waiting for data is shown from this share of the time on."""


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
        row = {
            f"perf_step_seconds_p{percent}": value
            for percent, value in _percentiles(seconds).items()
        }
        row |= {
            "perf_data_wait": window.data_wait,
            "perf_flops_per_second": window.rate * self._flops_per_unit,
        }
        if (utilization := self.utilization(window)) is not None:
            row["perf_mfu"] = utilization
        if (memory := self._memory()) is not None:
            row["perf_memory_peak_bytes"] = memory
        if self._compile_pending:
            row["perf_compile_seconds"], self._compile_pending = self._compile_seconds, False
        return {
            name: float(f"{value:.5g}") if isinstance(value, float) else value
            for name, value in row.items()
        }

    def facts(self) -> dict[str, str]:
        """Lines for a person about the whole session, by their label; empty where no step was counted."""
        if not self._seconds:
            return {}
        percentiles = {
            percent: _short(seconds) for percent, seconds in _percentiles(self._seconds).items()
        }
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
        self._steps, self._folder, self._paused, self._note = (
            steps or range(0),
            folder,
            paused,
            note,
        )
        self._tracing = False

    def step(self, number: int) -> AbstractContextManager[object]:
        """To be entered around the dispatch of a step: the trace begins before its first one and ends after its last."""
        active = number in self._steps
        if active != self._tracing:
            with self._paused():
                jax.profiler.start_trace(self._folder) if active else self.close()
            self._tracing = active
        return (
            jax.profiler.StepTraceAnnotation("train", step_num=number)
            if active
            else contextlib.nullcontext()
        )

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
    return {
        percent: ordered[math.ceil(percent / 100 * len(ordered)) - 1] for percent in PERCENTILES
    }


def _short(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


class Progress:
    """Progress of one run, as a context manager around its loop.

    The rate and the time left leave out the first step of the session, which may compile. Text printed by others while
    the bar is live appears above it.

    Args:
        total_steps: step at which the run is done.
        start_step: last step done before this session; 0 for a new run.
        timing: adds up the steps, each before it is shown here.
        console: where to draw. Processes but the first pass `Console(quiet=True)`.
        enabled: draw the bar or its plain lines. Without, only evaluations and notes are printed.
        clock: seconds, for tests.
    """

    def __init__(
        self,
        total_steps: int,
        start_step: int,
        timing: Timing,
        console: Console,
        enabled: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console, self.total_steps, self.step = console, total_steps, start_step
        self._timing, self._clock = timing, clock
        self._began = self._updated = clock()
        self._compiled: float | None = None
        """When the first step of the session was done."""
        self._ended: float | None = None
        self._loss = self._lr = math.nan
        self._loss_per_byte: float | None = None
        # Live takes over standard output, so a quiet console must not have one: it would swallow what others print.
        live = (
            enabled and console.is_terminal and not console.is_dumb_terminal and not console.quiet
        )
        self._live = Live(self, console=console, refresh_per_second=4) if live else None
        self._plain = enabled and not live
        round_steps = (lead * 10**power for power in range(18) for lead in (1, 2, 5))
        self._plain_every = next(
            steps for steps in round_steps if steps * _PLAIN_LINES >= total_steps
        )
        self._plain_last = (start_step, -math.inf)

    def __enter__(self) -> Progress:
        if self._live:
            self._live.start(refresh=True)
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended = self._clock()
        if self._live:
            self._live.stop()
        elif self._plain and self._compiled and self._plain_last[0] != self.step:
            self._print_line()

    def update(self, step: int, loss: float, lr: float, loss_per_byte: float | None = None) -> None:
        """Show a finished optimizer step.

        Args:
            step: steps done, counting this one.
            loss: mean loss of the step's batch, in nats.
            lr: learning rate of the step, at base size.
            loss_per_byte: the loss in nats per byte of text, where it has one.
        """
        self._loss_per_byte = loss_per_byte
        now = self._updated = self._clock()
        self._compiled = self._compiled or now
        self.step, self._loss, self._lr = step, loss, lr
        if self._plain:
            waited = now - self._plain_last[1] >= _PLAIN_LINE_S
            at_round = (
                step % self._plain_every == 0 and self._plain_every * self._per_step < _PLAIN_LINE_S
            )
            if waited or at_round or step == self.total_steps:
                self._print_line()

    def evaluated(self, row: Mapping[str, Any]) -> None:
        """Print an evaluation above the bar: its step and every metric that its row has."""
        width = len(str(self.total_steps))
        text = Text.assemble(("eval", "bold cyan"), f"  step {row['step']:>{width}}")
        for name, metric in shown_everywhere().items():
            value = row.get(row_name(name))
            if value is None:
                continue
            text.append(f"  {metric.label} {metric.text(value)}", "bold" if name == "loss" else "")
            if name == "loss":
                text.append(_per_byte(value, row.get("eval_loss_per_byte")))
        for name in (name for name in row if name.startswith("eval/") and name.endswith("/loss")):
            text.append(f"  {name.split('/')[1]} {row[name]:.4f}")
            text.append(_per_byte(row[name], row.get(f"{name}_per_byte")))
        if row.get("eval_weights"):
            text.append(f"  ({row['eval_weights']} weights)")
        text.append(f"  after {duration(self._clock() - self._began)}", "dim")
        self.note(text)

    def note(self, text: str | Text) -> None:
        """Print a line above the bar, exactly as given."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    @property
    def seconds_left(self) -> float | None:
        """Time to the last step at the recent rate, evaluations included; None before the second step of the session."""
        if self._compiled is None or not self._timing.whole.seconds:
            return None
        other_work = max(1.0, (self._updated - self._compiled) / self._timing.whole.seconds)
        left = (self.total_steps - self.step) * self._per_step * other_work
        return max(0.0, left - (self._clock() - self._updated))

    @property
    def _per_step(self) -> float:
        recent = self._timing.recent
        return recent.seconds / recent.steps if recent.steps else 0.0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        count = Text(self._count(), "bold")
        fields = self._fields()
        # What a narrow terminal has no room for goes, the least needed first.
        for name in ("lr", "MFU", "bar", "rate", "wait", "eta"):
            bar = _BAR_WIDTH[0] + 2 if name in ("lr", "MFU", "bar") else 0
            room = (
                options.max_width
                - count.cell_len
                - bar
                - sum(text.cell_len + 2 for text in fields.values())
            )
            if room >= 0:
                break
            fields.pop(name, None)
        else:
            bar, room = 0, 0
        yield Text.assemble(count, "  " if bar else "", end="")
        if bar:
            width = min(_BAR_WIDTH[1], _BAR_WIDTH[0] + room)
            yield ProgressBar(total=self.total_steps, completed=self.step, width=width)
        line = Text("  ") + Text("  ").join(fields.values())
        line.truncate(max(0, options.max_width - count.cell_len - (width + 2 if bar else 0)))
        yield line

    def _count(self) -> str:
        return f"{self.step:>{len(str(self.total_steps))}}/{self.total_steps}"

    def _fields(self) -> dict[str, Text]:
        """What is known by now, in the order shown."""
        if self._compiled is None:
            if self.step >= self.total_steps:
                return {"state": Text("nothing left to do")}
            return {
                "state": Text(
                    f"waiting for the first step, {duration(self._clock() - self._began)}", "dim"
                )
            }
        fields = {
            "loss": Text(
                f"loss {self._loss:.4f}{_per_byte(self._loss, self._loss_per_byte)}",
                "bold" if math.isfinite(self._loss) else "bold red",
            ),
            "lr": Text(f"lr {self._lr:.2e}"),
        }
        recent = self._timing.recent
        if recent.seconds:
            fields["rate"] = Text(f"{quantity(recent.rate):>5} {self._timing.unit}/s")
            if (utilization := self._timing.utilization(recent)) is not None:
                fields["MFU"] = Text(f"MFU {100 * utilization:.0f}%")
            if recent.data_wait >= _WORTH_SAYING:
                fields["wait"] = Text(f"data wait {100 * recent.data_wait:.0f}%", "yellow")
        if self.seconds_left is not None and self.step < self.total_steps:
            fields["eta"] = Text(f"eta {duration(self.seconds_left)}", "cyan")
        elif self._ended is not None and self.step >= self.total_steps:
            fields["eta"] = Text(f"took {duration(self._ended - self._began)}", "green")
        return fields

    def _print_line(self) -> None:
        self._plain_last = (self.step, self._updated)
        self.note(
            "  ".join(["step " + self._count(), *(text.plain for text in self._fields().values())])
        )


def _per_byte(loss: float, loss_per_byte: float | None) -> str:
    """Return the loss in nats per byte, to stand behind the loss per token; nothing where a token is a byte."""
    if loss_per_byte is None or not math.isfinite(loss_per_byte) or loss_per_byte == loss:
        return ""
    return f" ({loss_per_byte:.4f}/byte)"


def announce(program: Program, data: Data, console: Console) -> None:
    """Say what begins: the model, its preset and optimizer, the data, the devices, and what to be careful of.

    Args:
        program: of the run.
        data: of the run.
        console: where it is said.
    """
    config = program.config
    console.print(
        f"[bold]{config.recipe}[/bold]: {program.definition.count():,} parameters"
        + (f" ({program.frozen:,} frozen)" if program.frozen else "")
        + f" under {program.preset.name}"
        + (f" relative to {config.preset.base}" if config.preset.base else " in absolute form")
        + f", {config.optimizer.name} at {config.optimizer.peak_lr:g}",
        highlight=False,
    )
    examples = "sequences" if data.kind == "tokens" else "images"
    training = "a stream of" if data.train_size is None else f"{data.train_size:,}"
    console.print(
        f"{data.facts['name']}: {training} training and {data.eval_size:,} evaluation {examples}; "
        f"{described(program.mesh.shape)} ({jax.devices()[0].device_kind})",
        highlight=False,
    )
    cautions = program.preset.cautions(program.definition.sizes, config.optimizer.name)
    if config.preset.joint != "none":
        from mupax.train.config import joint

        console.print(joint.described(config), highlight=False)
        cautions += joint.cautions(config)
    for caution in cautions:
        console.print(f"caution: {caution}", style="yellow", highlight=False)
