"""Screen of a run and its speed: the announcement, a live bar or plain lines, and a profile.

`Timing` measures step times, FLOPs, waits for data and memory. Keys of its rows are explained in
`metrics.py`.
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
"""Seconds of a run that one row about speed covers."""
PERCENTILES = (50, 90, 99)
_RECENT_S = 10.0
"""Seconds of training after which a step counts e times less in the rate that is shown."""

_PLAIN_LINE_S = 10.0
"""Seconds between the plain lines of a long run."""
_PLAIN_LINES = 20
"""Most plain lines of a short run, which prints them at round steps."""
_MIN_BAR_WIDTH = 8
_MAX_BAR_WIDTH = 40
_SHOWN_DATA_WAIT = 0.05
"""Smallest share of the time spent waiting for data at which the screen shows it."""


@dataclasses.dataclass
class Total:
    """Sums over steps, in which recent steps may weigh more.

    Each second of training multiplies the earlier sums by e^(-1/fading). The default `fading` is
    infinite, which gives plain sums.

    Attributes:
        units: Tokens or images of the steps (`Timing.unit`).
        waited: Part of `seconds` in which the devices had nothing to do.
    """

    fading: float = math.inf
    steps: float = 0.0
    units: float = 0.0
    seconds: float = 0.0
    waited: float = 0.0

    def add(self, seconds: float, units: int, waited: float) -> None:
        """Add a step to the sums, after multiplying them by e^(-seconds/fading).

        Args:
            waited: Seconds of the step in which the devices had nothing to do. More than `seconds`
                counts as `seconds`.
        """
        # With an infinite `fading` this is 1 and the sums are plain ones.
        keep = math.exp(-seconds / self.fading)
        self.steps = keep * self.steps + 1
        self.units = keep * self.units + units
        self.seconds = keep * self.seconds + seconds
        self.waited = keep * self.waited + min(waited, seconds)

    @property
    def rate(self) -> float:
        """Units (tokens or images) per second, after at least one step."""
        return self.units / self.seconds

    @property
    def data_wait(self) -> float:
        """Share of the time in which the devices waited for data, in [0, 1], after a step."""
        return self.waited / self.seconds


class Timing:
    """Speed of one session of a run. The first step, which warms up, is left out.

    Args:
        unit: Unit of the counts that `step` gets.
        flops_per_unit: FLOPs of training per unit, forward and backward, counted from the model's
            sizes.
        peak_flops: FLOPs per second of all devices together, or `None` if unknown. Utilization is
            then unknown, too.
        compile_seconds: Time that compiling took. Only the first row has it.
        memory: Function that returns the peak bytes in use on the fullest device of this process,
            or `None` if the device does not say.
        clock: Function that returns seconds. Tests replace it.

    Attributes:
        overall: Sums over the session.
        recent: Sums in which older steps fade, with `_RECENT_S` seconds as `fading`.
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
        self.unit = unit
        self._flops_per_unit = flops_per_unit
        self._peak_flops = peak_flops
        self._compile_seconds = compile_seconds
        self._memory = memory
        self._clock = clock
        self._warm = False
        self._compile_pending = True
        self.overall = Total()
        self.recent = Total(_RECENT_S)
        self._window = Total()
        # `array` takes 8 bytes per step, a list of floats 32. A long run has millions of steps.
        self._step_seconds = array.array("d")
        self._row_start = 0
        """Index in `_step_seconds` of the first step of the next row."""
        self._row_time = clock()

    def step(self, seconds: float, units: int, waited: float = 0.0) -> None:
        """Add a finished step to all sums. The first step of the session is left out.

        Args:
            units: Tokens or images of the step (`unit`) that count.
            waited: Seconds of the step in which the devices waited for its batch. Default 0.
        """
        # The first step of a session warms up and is no measure of speed.
        if self._warm:
            self._step_seconds.append(seconds)
            for total in (self.overall, self.recent, self._window):
                total.add(seconds, units, waited)
        self._warm = True

    def utilization(self, total: Total) -> float | None:
        """Return the model FLOPs utilization in [0, 1], or `None` if the peak is unknown.

        Args:
            total: Sums over at least one step, such as `overall` or `recent`.
        """
        if not self._peak_flops:
            return None
        return total.rate * self._flops_per_unit / self._peak_flops

    @property
    def due(self) -> bool:
        """True if `INTERVAL_S` seconds have passed since the last row."""
        return self._clock() - self._row_time >= INTERVAL_S

    def row(self) -> dict[str, float]:
        """Return the row about the steps since the last row, and begin the next row.

        Returns:
            Values in five digits by key (`perf_...`), or an empty dictionary if no step was
            finished since.
        """
        window = self._window
        self._window = Total()
        self._row_time = self._clock()
        seconds = self._step_seconds[self._row_start :]
        self._row_start = len(self._step_seconds)
        if not seconds:
            return {}
        row: dict[str, float] = {}
        for percent, value in _percentiles(seconds).items():
            row[f"perf_step_seconds_p{percent}"] = value
        row["perf_data_wait"] = window.data_wait
        row["perf_flops_per_second"] = window.rate * self._flops_per_unit
        utilization = self.utilization(window)
        if utilization is not None:
            row["perf_mfu"] = utilization
        memory = self._memory()
        if memory is not None:
            row["perf_memory_peak_bytes"] = memory
        # A session compiles once, so only its first row has the time.
        if self._compile_pending:
            row["perf_compile_seconds"] = self._compile_seconds
            self._compile_pending = False
        for name, value in row.items():
            if isinstance(value, float):
                row[name] = float(f"{value:.5g}")
        return row

    def facts(self) -> dict[str, str]:
        """Return lines of the summary by label: step times, FLOP/s and memory, compile time.

        Empty if no step of the session was finished after the first.
        """
        if not self._step_seconds:
            return {}
        median, *slower = (
            _duration_text(seconds) for seconds in _percentiles(self._step_seconds).values()
        )
        slow = ", ".join(
            f"p{percent} {text}" for percent, text in zip(PERCENTILES[1:], slower, strict=True)
        )
        device = f"{quantity(self.overall.rate * self._flops_per_unit)} FLOP/s"
        utilization = self.utilization(self.overall)
        if utilization is not None:
            device += f", MFU {100 * utilization:.1f} %"
        memory = self._memory()
        if memory is not None:
            device += f", at most {memory / 2**30:.2f} GiB in use"
        wait = f"waiting for data {100 * self.overall.data_wait:.1f} %"
        return {
            "step": f"{median} median, {slow}; {wait}",
            "device": device,
            "compile": _duration_text(self._compile_seconds),
        }


class Profile:
    """XProf trace of a range of steps.

    Only one process of a run should have steps. The files are named by host, so two processes on
    one host would write the same file.

    Args:
        steps: Numbers of the steps to trace, without gaps; `None` to trace nothing.
        folder: Folder that gets `plugins/profile/TIME/HOST.xplane.pb` and a `.trace.json.gz`.
        paused: Context manager to enter while a trace is started or ended, in which the devices
            are idle and no step is timed.
        note: Function that prints where the trace is.
    """

    def __init__(
        self,
        steps: range | None,
        folder: Path,
        paused: Callable[[], AbstractContextManager[None]],
        note: Callable[[str], None],
    ) -> None:
        self._steps = steps or range(0)
        self._folder = folder
        self._paused = paused
        self._note = note
        self._tracing = False

    def step(self, number: int) -> AbstractContextManager[object]:
        """Start or end the trace before a step if it is time, and name the step in the trace.

        Args:
            number: Number of the step, from 1.

        Returns:
            Context manager to enter around the dispatch of the step.
        """
        traced = number in self._steps
        if traced != self._tracing:
            # Without steps in flight, so that the trace has the requested steps and no others.
            with self._paused():
                if traced:
                    jax.profiler.start_trace(self._folder)
                else:
                    self.close()
            self._tracing = traced
        if traced:
            return jax.profiler.StepTraceAnnotation("train", step_num=number)
        return contextlib.nullcontext()

    def close(self) -> None:
        """End the trace, if there is one under way, and print where it is."""
        if self._tracing:
            self._tracing = False
            jax.profiler.stop_trace()
            self._note(
                f"profile from step {self._steps[0]} in {self._folder}; "
                f"see it with: pip install xprof; xprof --port 8791 {self._folder}"
            )


def quantity(value: float) -> str:
    """Return a positive number in three digits and a letter: 0.123, 45.2, 45.2k, 1.23M, 12.3G."""
    for suffix in ("", "k", "M", "G", "T"):
        # Rounded to three digits, 999.5 would be 1000, which the next letter writes as 1.00.
        if value < 999.5:
            if value >= 99.95:
                digits = 0
            elif value >= 9.995:
                digits = 1
            elif value >= 0.9995:
                digits = 2
            else:
                digits = 3
            return f"{value:.{digits}f}{suffix}"
        value /= 1000
    return f"{value:.0f}P"


def duration(seconds: float) -> str:
    """Return a time such as 0:42, 3:12, 1:02:03 or 2d 03:14."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _percentiles(seconds: Sequence[float]) -> dict[int, float]:
    """Return the 50th, 90th and 99th percentile (nearest rank) of step times, by percentage."""
    ordered = sorted(seconds)
    percentiles = {}
    for percent in PERCENTILES:
        # The nearest rank, so that a percentile is a time that a step really took.
        rank = math.ceil(percent / 100 * len(ordered))
        percentiles[percent] = ordered[rank - 1]
    return percentiles


def _duration_text(seconds: float) -> str:
    """Return a short time in three digits, such as 1.23 s or 456 ms."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


class Progress:
    """Context manager that shows a run's progress: a live bar in a terminal, otherwise plain lines.

    The rate and the time left are computed without the first step of the session, which may
    compile. Text that others print while the bar is live appears above it.

    Args:
        total_steps: Step at which the run is done.
        start_step: Last step done before this session; 0 for a new run.
        timing: Speed of the session. Each step is added to it before it is shown here.
        console: Console to draw on. Processes other than process 0 pass `Console(quiet=True)`.
        enabled: Whether to show steps. If not, only evaluations and notes are printed.
        clock: Function that returns seconds. Tests replace it.
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
        self.console = console
        self.total_steps = total_steps
        self.step = start_step
        self._timing = timing
        self._clock = clock
        self._began = clock()
        self._updated = self._began
        self._warmed_up: float | None = None
        """Time at which the first step of the session was done."""
        self._ended: float | None = None
        self._loss = math.nan
        self._lr = math.nan
        self._loss_per_byte: float | None = None
        self._attention_logit: float | None = None
        # Live takes over standard output. A quiet console would swallow what others print there.
        is_live = (
            enabled and console.is_terminal and not console.is_dumb_terminal and not console.quiet
        )
        self._live = Live(self, console=console, refresh_per_second=4) if is_live else None
        self._plain = enabled and not is_live
        self._plain_every = _round_steps(total_steps)
        self._plain_step = start_step
        """Step of the last plain line."""
        self._plain_time = -math.inf
        """Time of the last plain line."""

    def __enter__(self) -> Progress:
        if self._live:
            self._live.start(refresh=True)
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended = self._clock()
        if self._live:
            self._live.stop()
        elif self._plain and self._warmed_up and self._plain_step != self.step:
            self._print_line()

    def update(
        self,
        step: int,
        loss: float,
        lr: float,
        loss_per_byte: float | None = None,
        attention_logit: float | None = None,
    ) -> None:
        """Show a finished optimizer step on the live bar or, if it is due, in a plain line.

        Plain lines come at round steps or every `_PLAIN_LINE_S` seconds, and at the last step.

        Args:
            step: Number of steps done, with this one.
            loss: Mean loss of the step's batch, in nats per target.
            lr: Learning rate of the step, at base size.
            loss_per_byte: Loss in nats per byte of text; `None` if the targets are no text.
            attention_logit: Largest attention logit of the step; `None` if it is not measured.
        """
        now = self._clock()
        self._updated = now
        self._warmed_up = self._warmed_up or now
        self.step = step
        self._loss = loss
        self._lr = lr
        self._loss_per_byte = loss_per_byte
        self._attention_logit = attention_logit
        if not self._plain:
            return
        is_late = now - self._plain_time >= _PLAIN_LINE_S
        # A run whose round steps are far apart prints by time alone.
        is_quick = self._plain_every * self._seconds_per_step < _PLAIN_LINE_S
        is_round = step % self._plain_every == 0 and is_quick
        if is_late or is_round or step == self.total_steps:
            self._print_line()

    def evaluated(self, row: Mapping[str, Any]) -> None:
        """Print a line with the metrics of an evaluation, above the bar if there is one.

        Args:
            row: Row of metrics.jsonl, with the step and every metric of the evaluation.
        """
        width = len(str(self.total_steps))
        text = Text.assemble(("eval", "bold cyan"), f"  step {row['step']:>{width}}")
        for name, metric in shown_everywhere().items():
            value = row.get(row_name(name))
            if value is None:
                continue
            text.append(f"  {metric.label} {metric.text(value)}", "bold" if name == "loss" else "")
            if name == "loss":
                text.append(_per_byte(value, row.get("eval_loss_per_byte")))
        for key in row:
            if key.startswith("eval/") and key.endswith("/loss"):
                set_name = key.split("/")[1]
                text.append(f"  {set_name} {row[key]:.4f}")
                text.append(_per_byte(row[key], row.get(f"{key}_per_byte")))
        if row.get("eval_weights"):
            text.append(f"  ({row['eval_weights']} weights)")
        text.append(f"  after {duration(self._clock() - self._began)}", "dim")
        self.note(text)

    def note(self, text: str | Text) -> None:
        """Print a line above the bar, if there is one. Markup in the text is not interpreted."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds to the last step at the recent speed, with evaluations and checkpoints.

        `None` before the second step of the session is done.
        """
        stepping = self._timing.overall.seconds
        if self._warmed_up is None or not stepping:
            return None
        # Assumes that evaluations and checkpoints keep the share of the time that they had so far.
        slowdown = max(1.0, (self._updated - self._warmed_up) / stepping)
        left = (self.total_steps - self.step) * self._seconds_per_step * slowdown
        return max(0.0, left - (self._clock() - self._updated))

    @property
    def _seconds_per_step(self) -> float:
        recent = self._timing.recent
        return recent.seconds / recent.steps if recent.steps else 0.0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        count = Text(self._count(), "bold")
        fields = self._fields()
        # A narrow terminal loses fields, the least needed first. "bar" is no field: the bar itself
        # goes then.
        for name in ("attention", "lr", "MFU", "bar", "rate", "wait", "eta"):
            has_bar = name in ("attention", "lr", "MFU", "bar")
            bar_columns = _MIN_BAR_WIDTH + 2 if has_bar else 0
            field_columns = sum(text.cell_len + 2 for text in fields.values())
            spare = options.max_width - count.cell_len - bar_columns - field_columns
            if spare >= 0:
                break
            fields.pop(name, None)
        else:
            has_bar = False
            spare = 0
        used = count.cell_len
        yield Text.assemble(count, "  " if has_bar else "", end="")
        if has_bar:
            width = min(_MAX_BAR_WIDTH, _MIN_BAR_WIDTH + spare)
            used += width + 2
            yield ProgressBar(total=self.total_steps, completed=self.step, width=width)
        line = Text("  ") + Text("  ").join(fields.values())
        line.truncate(max(0, options.max_width - used))
        yield line

    def _count(self) -> str:
        """Return the steps done and their total, such as `  12/1000`."""
        return f"{self.step:>{len(str(self.total_steps))}}/{self.total_steps}"

    def _fields(self) -> dict[str, Text]:
        """Return the fields of the bar or of a plain line by name, in the order shown."""
        if self._warmed_up is None:
            if self.step >= self.total_steps:
                return {"state": Text("nothing left to do")}
            waited = duration(self._clock() - self._began)
            return {"state": Text(f"waiting for the first step, {waited}", "dim")}
        loss_style = "bold" if math.isfinite(self._loss) else "bold red"
        per_byte = _per_byte(self._loss, self._loss_per_byte)
        fields = {
            "loss": Text(f"loss {self._loss:.4f}{per_byte}", loss_style),
            "lr": Text(f"lr {self._lr:.2e}"),
        }
        if self._attention_logit is not None:
            fields["attention"] = Text(f"attention logit {self._attention_logit:.4g}")
        recent = self._timing.recent
        if recent.seconds:
            fields["rate"] = Text(f"{quantity(recent.rate):>5} {self._timing.unit}/s")
            utilization = self._timing.utilization(recent)
            if utilization is not None:
                fields["MFU"] = Text(f"MFU {100 * utilization:.0f}%")
            if recent.data_wait >= _SHOWN_DATA_WAIT:
                fields["wait"] = Text(f"data wait {100 * recent.data_wait:.0f}%", "yellow")
        is_done = self.step >= self.total_steps
        seconds_left = self.seconds_left
        if seconds_left is not None and not is_done:
            fields["eta"] = Text(f"eta {duration(seconds_left)}", "cyan")
        elif self._ended is not None and is_done:
            fields["eta"] = Text(f"took {duration(self._ended - self._began)}", "green")
        return fields

    def _print_line(self) -> None:
        self._plain_step = self.step
        self._plain_time = self._updated
        texts = [text.plain for text in self._fields().values()]
        self.note("  ".join([f"step {self._count()}", *texts]))


def _round_steps(total_steps: int) -> int:
    """Return the steps between plain lines of a run: 1, 2, 5, 10, 20, 50, ...

    The smallest of these is returned with which the run prints at most `_PLAIN_LINES` lines.
    """
    for power in range(18):
        for lead in (1, 2, 5):
            steps = lead * 10**power
            if steps * _PLAIN_LINES >= total_steps:
                return steps
    raise AssertionError(f"{total_steps} steps are more than a run can have")


def _per_byte(loss: float, loss_per_byte: float | None) -> str:
    """Return the loss per byte as ` (0.6400/byte)`.

    Return "" if it is `None`, not finite or equal to the loss.
    """
    if loss_per_byte is None or not math.isfinite(loss_per_byte) or loss_per_byte == loss:
        return ""
    return f" ({loss_per_byte:.4f}/byte)"


def announce(program: Program, data: Data, console: Console) -> None:
    """Print the model, its preset and optimizer, the data, the devices, and cautions."""
    config = program.config
    frozen = f" ({program.frozen:,} frozen)" if program.frozen else ""
    base = config.preset.base
    form = f" relative to {base}" if base else " in absolute form"
    optimizer = config.optimizer
    rates = f"{optimizer.name} at {optimizer.peak_lr:g}"
    if optimizer.adam_peak is not None:
        rates += f" and Adam at {optimizer.adam_peak:g}"
    console.print(
        f"[bold]{config.recipe}[/bold]: {program.definition.count():,} parameters{frozen} under "
        f"{program.preset.name}{form}, {rates}",
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
