"""Results of a finished run: a loss curve, a sample or a picture, and a summary with references.

`loop.run` calls `leave` at the end of a run.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from mupax import terminal
from mupax.disk import is_remote
from mupax.terminal import counted
from mupax.train.config.metrics import METRICS, Metric, row_name, shown_everywhere
from mupax.train.config.run import Config
from mupax.train.core.program import Program
from mupax.train.core.step import StepInputs, logits_of
from mupax.train.data import Data
from mupax.train.run.report import metrics, plotting
from mupax.train.run.report.progress import duration, quantity
from mupax.train.run.runtime import RunContext
from mupax.train.run.start import CompiledRun
from mupax.zoo.definition import Arrays

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from mupax.train.data.interface import Reference

_MAX_NAME_LENGTH = 28
"""Most characters of an evaluation set's name in a picture."""

_PROMPT = "def "
"""Prompt for a model of Python code, and for text without printable words."""
_PROMPT_WORDS = 3
_MAX_PROMPT_LENGTH = 40
"""Most characters of a prompt that is taken from the evaluation text."""
_SAMPLE_TOKENS = 400
_MASKS = {None: "", "infilling": "<mask>", "sentinels": "<0>"}
"""Word that stands for a gap in a prompt, by data.noise."""


def loss_plot(
    metrics_path: Path | str,
    out_png: Path | str,
    references: Sequence[Reference] = (),
    title: str = "",
    *,
    bytes_per_token: float | None = 1.0,
    sets: Mapping[str, float | None] | None = None,
) -> None:
    """Draw the training loss, evaluations and reference models over steps into a PNG file.

    A language model's loss is drawn in nats per byte, so that tokenizers compare. An image model
    gets a second panel with its accuracy. Other metrics have a panel each if rows have them and
    `Metric.pictures` names the kind of data.

    Args:
        references: Reference models. Each is a horizontal line in the panel of its unit.
        bytes_per_token: Mean bytes of text per token, by which a language model's losses are
            divided. `None` draws losses per target.
        sets: Bytes per token of each further evaluation set, by name. Each set is a line.

    Raises:
        metrics.MetricsError: The file has no rows, or a line of it is not a metrics row.
    """
    # `Figure` needs neither pyplot's global state nor a display.
    from matplotlib.figure import Figure

    set_bytes_per_token = sets or {}
    rows, unit = _rows(metrics_path)
    panel_metrics = _panel_metrics(rows, unit)
    num_panels = 1 + len(panel_metrics)
    # The names of sets stand in the right margin. More than eight do not fit into the usual height.
    base_height = 4.4 + 1.8 * len(panel_metrics)
    height = base_height + 0.27 * num_panels * max(0, len(set_bytes_per_token) - 8)
    figure = Figure(figsize=(7.6, height), dpi=150, layout="constrained")
    panels = list(figure.subplots(num_panels, 1, sharex=True, squeeze=False)[:, 0])
    all_steps = [row["step"] for row in rows]
    for axes in panels:
        plotting.style(axes, min(all_steps), max(all_steps))

    loss_gap = 0.06 * num_panels**0.5 * base_height / height
    _loss_panel(
        panels[0],
        rows,
        _loss_scale(unit, bytes_per_token),
        references,
        set_bytes_per_token,
        loss_gap,
    )
    panels[0].set_title(
        title, loc="left", fontsize=12, fontweight="bold", color=plotting.INK, pad=26
    )
    metric_gap = 0.0425 * num_panels * base_height / height
    for axes, name in zip(panels[1:], panel_metrics, strict=True):
        _metric_panel(axes, rows, name, references, list(set_bytes_per_token), metric_gap)

    counts = {row[unit] for row in rows if unit in row}
    step_label = "optimizer step"
    if len(counts) == 1:
        step_label += f" ({counts.pop():,} {unit} each)"
    panels[-1].set_xlabel(step_label, color=plotting.INK)
    figure.savefig(out_png)


class _LossScale(NamedTuple):
    """Unit in which losses of one data set are shown."""

    unit: str
    """Unit of rows: "tokens" or "images"."""
    divisor: float
    """Number by which losses of rows are divided."""
    name: str
    """Name of the unit of the quotient: "nats/byte", "nats/target" or "nats/image"."""

    @property
    def tokens_per_unit(self) -> float | None:
        """Factor from nats per byte to nats per token, or `None` if losses are not per byte."""
        return self.divisor if self.name == "nats/byte" else None


def _loss_scale(unit: str, bytes_per_token: float | None) -> _LossScale:
    """Return the unit in which losses are shown.

    Args:
        unit: "tokens" or "images".
        bytes_per_token: Mean bytes of text per token, or `None` for losses per target.
    """
    if unit != "tokens":
        return _LossScale(unit, 1.0, "nats/image")
    if bytes_per_token is None:
        return _LossScale(unit, 1.0, "nats/target")
    return _LossScale(unit, bytes_per_token, "nats/byte")


def _loss_panel(
    axes: Axes,
    rows: Sequence[Mapping[str, Any]],
    scale: _LossScale,
    references: Sequence[Reference],
    set_bytes_per_token: Mapping[str, float | None],
    gap: float,
) -> None:
    """Draw the loss over steps: training, evaluations, further sets and reference models.

    Args:
        set_bytes_per_token: Mean bytes of text per token of each further set, by name. `None` draws
            the set's losses per target.
        gap: Least distance of two names in the margin, as a fraction of the panel's height.
    """
    steps, losses = _series(rows, "loss", scale.divisor)
    further = []
    for name, bytes_per_token in set_bytes_per_token.items():
        set_scale = _loss_scale(scale.unit, bytes_per_token)
        series = _series(rows, row_name("loss", name), set_scale.divisor)
        other_unit = set_scale.name if set_scale.name != scale.name else ""
        further.append(_FurtherSet(_shortened(name), *series, other_unit))

    smooth = _draw_training(axes, steps, losses)
    axes.set_ylabel(f"loss ({scale.name.replace('/', ' per ')})", color=plotting.INK)
    lines = [
        (reference.value, f"{reference.name} {reference.value:.3f}")
        for reference in references
        if reference.unit == scale.name
    ]
    around = [*smooth]
    if np.isfinite(losses).any():
        # Without the few largest and smallest losses, so that one spike does not flatten the curve.
        around += [*np.nanquantile(losses, [0.002, 0.998])]
    _draw_evaluations(
        axes,
        _series(rows, "eval_loss", scale.divisor),
        lines,
        "{:.3f}",
        gap=gap,
        log=True,
        around=np.array(around),
        further=further,
    )
    if scale.name == "nats/byte" and scale.divisor != 1:
        plotting.second_scale(axes, scale.divisor, "nats per token")
    # Above the panel, where no line runs.
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(-0.01, 1),
        ncols=2,
        frameon=False,
        labelcolor=plotting.INK,
        fontsize=9,
    )


def _panel_metrics(rows: Sequence[Mapping[str, Any]], unit: str) -> list[str]:
    """Return the names of the metrics, besides the loss, that get a panel of their own in loss.png.

    These are the metrics shown everywhere that an evaluation in the rows has, and whose
    `Metric.pictures` names the kind of data.

    Args:
        unit: Kind of data, "tokens" or "images".
    """
    names = []
    for name, metric in shown_everywhere().items():
        if name != "loss" and unit in metric.pictures:
            steps, _ = _series(rows, row_name(name))
            if steps.size:
                names.append(name)
    return names


def _metric_panel(
    axes: Axes,
    rows: Sequence[Mapping[str, Any]],
    name: str,
    references: Sequence[Reference],
    sets: Sequence[str],
    gap: float,
) -> None:
    """Draw a metric over steps: training, if rows have it, evaluations, sets and references.

    Args:
        references: Reference models, of which those whose unit is `name` are drawn.
        gap: Least distance of two names in the margin, as a fraction of the panel's height.
    """
    metric = METRICS[name]
    # Shares are drawn in percent.
    scale = 0.01 if metric.share else 1.0
    form = "{:.2f}" if metric.share else f"{{:{metric.form}}}"
    label = f"{metric.label} ({metric.unit})" if metric.unit else metric.label
    axes.set_ylabel(label, color=plotting.INK)
    smooth = np.array([])
    if any(name in row for row in rows):
        smooth = _draw_training(axes, *_series(rows, name, scale))
    lines = []
    for reference in references:
        if reference.unit == name:
            value = reference.value / scale
            lines.append((value, f"{reference.name} {form.format(value)}"))
    further = []
    for set_name in sets:
        series = _series(rows, row_name(name, set_name), scale)
        further.append(_FurtherSet(_shortened(set_name), *series, unit=""))
    evaluations = _series(rows, row_name(name), scale)
    _draw_evaluations(
        axes, evaluations, lines, form, gap=gap, log=False, around=smooth, further=further
    )


def summary(
    console: Console,
    metrics_path: Path | str,
    *,
    name: str,
    seconds: float,
    facts: Mapping[str, str],
    references: Sequence[Reference] = (),
    bytes_per_token: float | None = 1.0,
    sets: Mapping[str, float | None] | None = None,
    files: Sequence[Path | str] = (),
    then: str | None = None,
) -> None:
    """Print the results of a run, its cost, where its files are, and what to type next.

    Results stand beside those of the reference models.

    Args:
        metrics_path: metrics.jsonl of the run, with at least one row.
        name: Name of the run, for the title.
        seconds: Time since this session began to compile its steps.
        facts: Lines about the model and the session, by their label.
        references: Reference models. Each is compared with the last evaluation in its unit.
        bytes_per_token: Mean bytes of text per token, by which a language model's losses are
            divided. `None` prints losses per target.
        sets: Bytes per token of each further evaluation set, by name.
        files: Files of the run, shown relative to the current folder.
        then: Command that uses the run. Default none.
    """
    rows, unit = _rows(metrics_path)
    scale = _loss_scale(unit, bytes_per_token)
    table = Table.grid(
        Column(no_wrap=True),
        Column(justify="right", no_wrap=True),
        Column(overflow="fold"),
        padding=(0, 3, 0, 0),
    )
    _add_metrics(table, console, rows, scale, references)
    for set_name, set_bytes_per_token in (sets or {}).items():
        _add_set(table, rows, set_name, _loss_scale(unit, set_bytes_per_token))
    _add_training_loss(table, rows, scale)
    _add_attention_logit(table, rows)

    rates = [row[unit] / row["seconds"] for row in rows if row.get("seconds") and unit in row]
    # The median, because the first step and single slow ones would pull a mean down.
    rate = f", {quantity(float(np.median(rates)))} {unit}/s while training" if rates else ""
    below = Table.grid(Column(no_wrap=True), Column(overflow="fold"), padding=(0, 3, 0, 0))
    for label, line in {"time": f"{duration(seconds)}{rate}", **facts}.items():
        below.add_row(label, Text(line))
    if files:
        below.add_row("files", Text("\n".join(map(relative, files))))
    heading = Text(f"{name}: {counted(rows[-1]['step'], 'step', ',')} done", "bold")
    content = Group(table, "", below)
    console.print(Panel(content, title=heading, title_align="left", padding=(1, 2), expand=False))
    if then:
        # Below the panel and in one line, so that users can copy the command without frame and line
        # breaks.
        console.print(Text.assemble(("next  ", "dim"), then), soft_wrap=True)


def _add_metrics(
    table: Table,
    console: Console,
    rows: Sequence[Mapping[str, Any]],
    scale: _LossScale,
    references: Sequence[Reference],
) -> None:
    """Add a row with the last evaluation of each metric, followed by reference models in its unit.

    Metrics that are not shown everywhere, or were never evaluated, have no row.
    """
    names = list(shown_everywhere())
    # The loss of image models comes last: their accuracy matters more.
    names.sort(key=lambda name: scale.unit == "images" and name == "loss")
    for name in names:
        metric = METRICS[name]
        is_loss = name == "loss"
        _, values = _series(rows, row_name(name), scale.divisor if is_loss else 1.0)
        if not values.size:
            continue
        value = float(values[-1])
        if is_loss:
            text = metric.text(value)
            remark = f"{scale.name}{_per_token(values[-1], scale.tokens_per_unit)}"
        else:
            text = metric.text_with_unit(value)
            remark = ""
        table.add_row(Text(f"evaluation {metric.label}", "bold"), Text(text, "bold"), remark)
        reference_unit: str | None = name
        if is_loss:
            # Reference models of images state accuracies alone, so their loss is not compared.
            reference_unit = scale.name if scale.unit == "tokens" else None
        for reference in references:
            if reference.unit == reference_unit:
                compared = _compared(console, value, reference, metric)
                table.add_row(f"  {reference.name}", metric.text(reference.value), compared)


def _add_set(
    table: Table, rows: Sequence[Mapping[str, Any]], set_name: str, scale: _LossScale
) -> None:
    """Add a row with the last evaluation on a further set: its loss, then its other metrics.

    No row is added if the set was never evaluated.
    """
    _, losses = _series(rows, row_name("loss", set_name))
    if not losses.size:
        return
    loss = losses[-1] / scale.divisor
    remark = scale.name + _per_token(loss, scale.tokens_per_unit)
    for name, metric in shown_everywhere().items():
        _, values = _series(rows, row_name(name, set_name))
        if name != "loss" and values.size:
            remark += f", {metric.label} {metric.text_with_unit(float(values[-1]))}"
    table.add_row(f"  on {set_name}", f"{loss:.4f}", remark)


def _add_training_loss(table: Table, rows: Sequence[Mapping[str, Any]], scale: _LossScale) -> None:
    """Add a row with the training loss averaged over the last steps: 5 % of them, at most 100.

    At least one step is averaged. No row is added if there are no training steps.
    """
    steps, losses = _series(rows, "loss")
    if not len(steps):
        return
    # The loss of a single batch is too noisy to compare.
    count = max(1, min(100, len(steps) // 20))
    mean = losses[-count:].mean() / scale.divisor
    remark = f"{scale.name}{_per_token(mean, scale.tokens_per_unit)}"
    if count > 1:
        remark += f", mean of the last {count} steps"
    table.add_row("training loss", f"{mean:.4f}", remark)


def _add_attention_logit(table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Add a row with the largest attention logit of the last step, and of all steps.

    No row is added if the run has not measured them, or none is finite.
    """
    steps, values = _series(rows, "attention_logit_max")
    if not np.isfinite(values).any():
        return
    index = int(np.nanargmax(np.where(np.isfinite(values), values, np.nan)))
    remark = f"at most {values[index]:.4g}, at step {steps[index]:,}"
    table.add_row("attention logit", f"{values[-1]:.4g}", remark)


def _rows(path: Path | str) -> tuple[list[dict[str, Any]], str]:
    """Return the rows of a metrics.jsonl, and their unit: "tokens" or "images".

    Raises:
        metrics.MetricsError: The file has no rows, or a line of it is not a metrics row.
    """
    rows = metrics.read(path)
    if not rows:
        raise metrics.MetricsError(
            f"{path} has no rows, there is nothing to report; train at least one step"
        )
    has_images = any("images" in row for row in rows)
    return rows, "images" if has_images else "tokens"


def _per_token(loss_per_byte: float, bytes_per_token: float | None) -> str:
    """Return a text such as `, 1.6200 nats/token`, to print after the loss per byte.

    Return "" if a token is one byte, or if the loss is not per byte (`bytes_per_token` is `None`).
    """
    if bytes_per_token is None or bytes_per_token == 1:
        return ""
    return f", {loss_per_byte * bytes_per_token:.4f} nats/token"


def _series(
    rows: Sequence[Mapping[str, Any]], key: str, scale: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps and values / scale of one key, sorted by step.

    Both are [N]. Rows without the key are left out, and a value that was not finite is NaN.
    """
    points = [(row["step"], row[key] / scale) for row in rows if row.get(key) is not None]
    # The key itself is null in such a row, because JSON has no NaN.
    points += [(row["step"], math.nan) for row in rows if key in row.get("nonfinite", ())]
    # Values that were not finite were added behind all others.
    points.sort(key=lambda point: point[0])
    steps = np.array([step for step, _ in points])
    values = np.array([value for _, value in points], np.float64)
    return steps, values


class _FurtherSet(NamedTuple):
    """Evaluations of a further set, as a line of a panel."""

    name: str
    steps: np.ndarray
    values: np.ndarray
    unit: str
    """Unit of the values if it is not that of the panel, otherwise ""."""


def _shortened(name: str) -> str:
    """Return the name of an evaluation set, cut to `_MAX_NAME_LENGTH` characters."""
    if len(name) <= _MAX_NAME_LENGTH:
        return name
    return f"{name[: _MAX_NAME_LENGTH - 1]}…"


def _draw_training(axes: Axes, steps: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Draw the values of all steps as a light line, and smoothed. Return the smoothed values."""
    smooth = plotting.smoothed(values)
    axes.plot(steps, values, color=plotting.BLUE, alpha=0.25, linewidth=0.8)
    axes.plot(steps, smooth, color=plotting.BLUE, linewidth=1.8, label="training (smoothed)")
    return smooth


def _draw_evaluations(
    axes: Axes,
    points: tuple[np.ndarray, np.ndarray],
    lines: Sequence[tuple[float, str]],
    form: str,
    *,
    gap: float,
    log: bool,
    around: np.ndarray,
    further: Sequence[_FurtherSet] = (),
) -> None:
    """Draw evaluations, further sets and reference lines, and set the limits of y.

    Args:
        points: Steps and values of the evaluations (`_series`).
        lines: Value and name of each reference model.
        form: Format string of values in the margin.
        gap: Least distance of two names in the margin, as a fraction of the panel's height.
        log: `True` makes the y axis logarithmic.
        around: Other values, such as the smoothed training loss, that must lie within the limits.
    """
    steps, values = points
    inside = [values, [value for value, _ in lines], around]
    inside += [evaluated_set.values for evaluated_set in further]
    axes.plot(
        steps,
        values,
        color=plotting.ORANGE,
        marker="o",
        markersize=3.5,
        linewidth=1.2,
        label="evaluation",
    )
    for value, _ in lines:
        axes.axhline(value, color=plotting.GREY, linestyle=(0, (5, 3)), linewidth=1.0, zorder=1)
    plotting.limits(axes, np.concatenate(inside), log=log)
    labels = [(value, text, plotting.GREY) for value, text in lines]
    styles = itertools.cycle(plotting.MORE)
    for evaluated_set, (color, marker) in zip(further, styles, strict=False):
        axes.plot(
            evaluated_set.steps,
            evaluated_set.values,
            color=color,
            marker=marker,
            markersize=3.5,
            linewidth=1.2,
            zorder=1.9,
        )
        if evaluated_set.values.size and math.isfinite(evaluated_set.values[-1]):
            last = float(evaluated_set.values[-1])
            text = f"{evaluated_set.name} {form.format(last)} {evaluated_set.unit}".rstrip()
            labels.append((last, text, color))
    if values.size and math.isfinite(values[-1]):
        labels.append((float(values[-1]), f"evaluation {form.format(values[-1])}", plotting.ORANGE))
    plotting.margin_labels(axes, labels, gap)


def _compared(console: Console, value: float, reference: Reference, metric: Metric) -> Text:
    """Return a colored text on how much a value is better or worse than a reference model's.

    The text is "diverged" if the value is NaN.
    """
    good, bad = ("+", "x") if console.options.ascii_only else ("✓", "✗")
    if math.isnan(value):
        return Text(f"{bad} diverged", "red")
    gain = reference.value - value
    if metric.better == "higher":
        gain = value - reference.value
    size = f"{100 * abs(gain):.2f} points" if metric.share else metric.text(abs(gain))
    if gain >= 0:
        return Text(f"{good} better by {size}", "green")
    return Text(f"{bad} worse by {size}", "red")


def relative(path: Path | str) -> str:
    """Return a path relative to the current folder if it lies below it, otherwise as it is."""
    if not isinstance(path, str) and is_remote(path):
        return str(path)
    # `relpath` and not `Path.relative_to`, which refuses a path outside of the folder.
    shown = os.path.relpath(path)
    return str(path) if shown.startswith("..") else shown


def leave(session: CompiledRun, params: Arrays) -> None:
    """Write loss.png and sample.txt or predictions.png into the workdir, and print the summary.

    A sample or predictions are made only with `log.samples`. Every process of the run calls this,
    since each holds a part of the parameters. Process 0 writes and prints. If it cannot write a
    file or the summary, it prints a line and makes the rest.
    """
    program = session.program
    data = session.data
    context = session.context
    config = program.config
    folder = context.files
    metrics_path = folder / metrics.FILE_NAME
    files = [metrics_path]
    if config.log.samples and (config.model.generates or config.model.denoises):
        files.append(folder / "sample.txt")
        _leave_sample(session, params, files[-1])
    elif config.log.samples and config.model.task == "images":
        files.append(folder / "predictions.png")
        _leave_predictions(session, params, files[-1])
    if not context.processes.leader:
        return

    references = data.references()
    count = program.definition.count()
    sets = {name: loaded.bytes_per_token for name, loaded in session.sets.items()}
    curve_path = folder / "loss.png"
    with _optional(context, "loss.png"):
        title = f"{config.recipe}: {count:,} parameters, {program.preset.name}"
        loss_plot(
            metrics_path,
            curve_path,
            references,
            title,
            bytes_per_token=data.bytes_per_token,
            sets=sets,
        )
    form = f"relative to {config.preset.base}" if config.preset.base else "in absolute form"
    facts = {"model": f"{count:,} parameters", "preset": f"{program.preset.label}, {form}"}
    if session.evaluations.stopped:
        facts["stopped early"] = session.evaluations.stopped
    with _optional(context, "the summary"):
        # Files in a bucket are shown at their place there, and not in the upload buffer.
        written = [file for file in (*files, curve_path) if file.exists()]
        # config.json is added without a test: a run writes it into the bucket, not into the buffer.
        shown_files = [
            context.folder / file.relative_to(folder).as_posix()
            for file in (*written, folder / "config.json")
        ]
        summary(
            context.console,
            metrics_path,
            name=config.recipe,
            seconds=time.monotonic() - session.began,
            facts={**facts, **session.speed},
            references=references,
            bytes_per_token=data.bytes_per_token,
            sets=sets,
            files=shown_files,
            then=_next_command(config, data, relative(context.folder)),
        )


def _leave_sample(session: CompiledRun, params: Arrays, path: Path) -> None:
    """Generate a sample text on all processes. Write it to `path` and print it on process 0.

    It is shown in TensorBoard, too, if `log.tensorboard` is set.
    """
    context = session.context
    text = None
    with _optional(context, "the sample"):
        text = _sample(session.program, session.data, params, session.inputs)
    if text is None or not context.processes.leader:
        return
    with _optional(context, "sample.txt"):
        path.write_text(text, encoding="utf-8")
        if session.program.config.log.tensorboard:
            last_row = metrics.read(context.files / metrics.FILE_NAME)[-1]
            _show_sample(context, last_row["step"], text)
    context.console.rule("sample", style="dim")
    context.console.print(text, markup=False, highlight=False, style="dim")


def _leave_predictions(session: CompiledRun, params: Arrays, path: Path) -> None:
    """Predict test images on all processes, and draw them into a PNG file on process 0."""
    program = session.program
    data = session.data
    # Replicated, so that every process can read the predictions.
    logits = jax.jit(
        partial(logits_of, program.definition), out_shardings=program.layout.replicated
    )
    with _optional(session.context, "predictions.png"):
        shown = plotting.guesses(data, lambda images: logits(params, session.inputs, images))
        if session.context.processes.leader:
            plotting.prediction_picture(**shown, class_names=data.class_names, out_png=path)


def _show_sample(context: RunContext, step: int, text: str) -> None:
    """Write a run's sample text to TensorBoard, after the run's last step.

    It goes to an event file of its own, because the file with the metrics is already closed.
    """
    from mupax.train.run.report.mirrors.trackers import Media, TensorBoard

    board = TensorBoard(context.files / "tensorboard", None, "sample")
    # Indented as code, so that TensorBoard takes no character for Markdown.
    fenced = "".join(f"    {line}\n" for line in text.splitlines())
    board.show(step, Media(texts={"sample": fenced}), time.time())
    board.close()


def _next_command(config: Config, data: Data, folder: str) -> str:
    """Return the command that uses a run's model: generate, predict or eval. It can be copied."""
    if folder.startswith("-"):  # it would be read as a flag
        folder = f"./{folder}"
    kind, _, place = config.data.name.partition(":")
    words = ["eval", folder]
    chats = kind == "chat" or config.data.chat_template is not None
    if chats and config.model.generates:
        words = ["generate", folder, "--chat"]
    elif config.model.generates:
        words = ["generate", folder, *_prompt_flag(_prompt(config, data).strip())]
    elif config.model.denoises and config.data.name == "python_corpus":
        words = ["generate", folder, *_prompt_flag(f"{_PROMPT}{_MASKS[config.data.noise]}(self):")]
    elif kind == "images":
        words = ["predict", folder, f"./{place}" if place.startswith("-") else place]
    return terminal.typed("mupax", *words)


def _prompt_flag(text: str) -> list[str]:
    """Return `--prompt` and a text as two words, or as `--prompt=TEXT` if it begins with a dash.

    The text `-`, which would read standard input, is replaced by `def`.
    """
    if text == "-":  # which reads standard input
        text = _PROMPT.strip()
    return [f"--prompt={text}"] if text.startswith("-") else ["--prompt", text]


def _prompt(config: Config, data: Data) -> str:
    """Return a prompt: up to three words of the first evaluation example, or `def ` for Python.

    Text without printable words also gets `def `.
    """
    if config.data.name == "python_corpus":
        return _PROMPT
    text = data.tokenizer.decode(data.eval_batch(0, slice(0, 1))["inputs"][0])
    # An example may begin and end within a word.
    words = text.split()[1:-1] or text.split()
    readable = [word for word in words if word.isprintable() and "\ufffd" not in word]
    return " ".join(readable[:_PROMPT_WORDS])[:_MAX_PROMPT_LENGTH] or _PROMPT


@contextlib.contextmanager
def _optional(context: RunContext, name: str) -> Iterator[None]:
    """Context manager that prints an exception inside of it as a line, and does not raise it.

    Args:
        name: Name of the file or other result that is then missing.
    """
    try:
        yield
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        context.console.print(
            f"{name} is left out: {reason[:300]}", style="yellow", markup=False, highlight=False
        )


def _sample(program: Program, data: Data, params: Arrays, inputs: StepInputs) -> str:
    """Return a prompt with its continuation of `_SAMPLE_TOKENS` tokens.

    For an encoder-decoder, return two corrupted evaluation texts with the model's restorations and
    the targets.
    """
    if program.config.model.denoises:
        from mupax.train.reuse.generate import denoised

        return denoised.examples_text(program, data, params, inputs)
    from mupax.train.reuse.generate.decode import Generator

    prompt = data.tokenizer.encode([_prompt(program.config, data).encode()])[0]
    generator = Generator(program, params, inputs)
    completions = generator.complete(prompt, _SAMPLE_TOKENS, program.config.seed)
    return data.tokenizer.decode(np.concatenate([prompt, completions[0]]))
