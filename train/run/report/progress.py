"""What a person sees of a run: what begins, then a live bar in a terminal, plain lines anywhere else."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from mupax.train.config.metrics import row_name, shown_everywhere
from mupax.train.parallel.mesh import described
from mupax.train.run.report.timing import Timing, duration, quantity

if TYPE_CHECKING:
    from mupax.train.core.program import Program
    from mupax.train.data import Data

_PLAIN_LINE_S = 10.0
_PLAIN_LINES = 20
"""A short run prints at most this many plain lines, at round steps; a long one a line every `_PLAIN_LINE_S`."""
_BAR_WIDTH = (8, 40)
_WORTH_SAYING = 0.05
"""Waiting for data is shown from this share of the time on."""


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
        live = enabled and console.is_terminal and not console.is_dumb_terminal and not console.quiet
        self._live = Live(self, console=console, refresh_per_second=4) if live else None
        self._plain = enabled and not live
        round_steps = (lead * 10**power for power in range(18) for lead in (1, 2, 5))
        self._plain_every = next(steps for steps in round_steps if steps * _PLAIN_LINES >= total_steps)
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
            at_round = step % self._plain_every == 0 and self._plain_every * self._per_step < _PLAIN_LINE_S
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
            room = options.max_width - count.cell_len - bar - sum(text.cell_len + 2 for text in fields.values())
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
            return {"state": Text(f"waiting for the first step, {duration(self._clock() - self._began)}", "dim")}
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
        self.note("  ".join(["step " + self._count(), *(text.plain for text in self._fields().values())]))


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
