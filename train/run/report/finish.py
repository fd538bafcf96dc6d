"""What a finished run leaves: a loss curve, a sample or a picture, and a summary beside reference models."""

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

_LONGEST_NAME = 28
"""Characters of an evaluation set's name in a picture."""

_PROMPT, _WORDS, _LONGEST = "def ", 3, 40
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
    """Draw the training loss, the evaluations and the reference models over steps.

    A language model's loss is drawn in nats per byte, so that tokenizers compare. An image model gets a second panel
    with its accuracy. Other metrics have a panel each, where rows have them and `Metric.pictures` names the kind of data.

    Args:
        metrics_path: a metrics.jsonl with at least one row.
        out_png: picture to write.
        references: drawn as horizontal lines in the panel of their unit.
        title: shown above the panels.
        bytes_per_token: mean bytes of text per token; divides a language model's losses; None: they are per target.
        sets: further evaluation sets by name, each with its own bytes per token. Each is a line of its own.

    Raises:
        metrics.MetricsError: the file has no rows, or a line of it is not a metrics row.
    """
    # Figure without pyplot: it touches nothing global and needs no screen.
    from matplotlib.figure import Figure

    rows, unit = _rows(metrics_path)
    scale, per = _scale(unit, bytes_per_token)
    steps, losses = _series(rows, "loss", scale)
    metric_panels = _metric_panels(rows, unit)
    panels = 1 + len(metric_panels)
    further_losses = [
        _further(rows, name, "loss", *_scale(unit, each), per)
        for name, each in (sets or {}).items()
    ]
    # Names stand in the right margin: beyond eight they need more height than a panel has.
    least_height = 4.4 + 1.8 * len(metric_panels)
    height = least_height + 0.27 * panels * max(0, len(further_losses) - 8)
    figure = Figure(figsize=(7.6, height), dpi=150, layout="constrained")
    upper, *lower = figure.subplots(panels, 1, sharex=True, squeeze=False)[:, 0]
    for axes in (upper, *lower):
        plotting.style(axes, min(row["step"] for row in rows), max(row["step"] for row in rows))

    smooth = _training(upper, steps, losses)
    upper.set_ylabel(f"loss ({per.replace('/', ' per ')})", color=plotting.INK)
    upper.set_title(title, loc="left", fontsize=12, fontweight="bold", color=plotting.INK, pad=26)
    lines = [(r.value, f"{r.name} {r.value:.3f}") for r in references if r.unit == per]
    evaluations = _series(rows, "eval_loss", scale)
    extremes = np.nanquantile(losses, [0.002, 0.998]) if np.isfinite(losses).any() else []
    around = np.array([*smooth, *extremes])
    gap = 0.06 * panels**0.5 * least_height / height
    _evaluations(
        upper,
        evaluations,
        lines,
        "{:.3f}",
        gap=gap,
        log=True,
        around=around,
        further=further_losses,
    )
    if per == "nats/byte" and scale != 1:
        plotting.second_scale(upper, scale, "nats per token")
    above = {"loc": "lower left", "bbox_to_anchor": (-0.01, 1)}  # where no line runs
    upper.legend(**above, ncols=2, frameon=False, labelcolor=plotting.INK, fontsize=9)
    for axes, name in zip(lower, metric_panels, strict=True):
        gap = 0.0425 * panels * least_height / height
        _metric_panel(axes, rows, name, references, list(sets or {}), gap)
    per_step = {row[unit] for row in rows if unit in row}
    each = f" ({per_step.pop():,} {unit} each)" if len(per_step) == 1 else ""
    (upper, *lower)[-1].set_xlabel(f"optimizer step{each}", color=plotting.INK)
    figure.savefig(out_png)


def _metric_panels(rows: Sequence[Mapping[str, Any]], unit: str) -> list[str]:
    """Return the names of the metrics that have a panel of their own, besides the loss."""
    return [
        name
        for name, metric in shown_everywhere().items()
        if name != "loss" and unit in metric.pictures and _series(rows, row_name(name))[0].size
    ]


def _metric_panel(
    axes: Axes,
    rows: Sequence[Mapping[str, Any]],
    name: str,
    references: Sequence[Reference],
    sets: Sequence[str],
    gap: float,
) -> None:
    """Draw a metric over steps: training batches where they have it, evaluations, further sets and reference models."""
    metric = METRICS[name]
    scale = 0.01 if metric.share else 1.0
    form = "{:.2f}" if metric.share else f"{{:{metric.form}}}"
    axes.set_ylabel(
        f"{metric.label} ({metric.unit})" if metric.unit else metric.label, color=plotting.INK
    )
    smooth = np.array([])
    if any(name in row for row in rows):
        smooth = _training(axes, *_series(rows, name, scale))
    values = [
        (reference.value / scale, reference.name)
        for reference in references
        if reference.unit == name
    ]
    lines = [(value, f"{label} {form.format(value)}") for value, label in values]
    further = [_further(rows, data_set, name, scale, "", "") for data_set in sets]
    evaluations = _series(rows, row_name(name), scale)
    _evaluations(axes, evaluations, lines, form, gap=gap, log=False, around=smooth, further=further)


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
    """Print how a run ended: its results beside the reference models, its cost, where its files are, and what to type next.

    Args:
        console: where to print.
        metrics_path: the run's metrics.jsonl.
        name: of the run, for the title.
        seconds: wall-clock time of the session.
        facts: lines about the model and the session, by their label.
        references: compared with the last evaluation where it has their unit.
        bytes_per_token: mean bytes of text per token; divides a language model's losses; None: they are per target.
        sets: further evaluation sets, each with its own bytes per token.
        files: what was written, shown relative to the current folder.
        then: a command that uses the run.
    """
    rows, unit = _rows(metrics_path)
    scale, per = _scale(unit, bytes_per_token)
    label_column, right, folded = (
        Column(no_wrap=True),
        Column(justify="right", no_wrap=True),
        Column(overflow="fold"),
    )
    table = Table.grid(label_column, right, folded, padding=(0, 3, 0, 0))
    per_token = scale if per == "nats/byte" else None
    losses_of_text = _series(rows, "eval_loss", scale)[1]
    remark = f"{per}{_per_token(losses_of_text[-1], per_token)}" if losses_of_text.size else per
    for metric_name in _by_importance(unit):
        metric = METRICS[metric_name]
        values = (
            losses_of_text if metric_name == "loss" else _series(rows, row_name(metric_name))[1]
        )
        if not values.size:
            continue
        ours = float(values[-1])
        remark_of_metric = remark if metric_name == "loss" else ""
        text = metric.text(ours) if metric_name == "loss" else metric.text_with_unit(ours)
        table.add_row(
            Text(f"evaluation {metric.label}", "bold"), Text(text, "bold"), remark_of_metric
        )
        # The loss of images has no reference: theirs are of the accuracy.
        reference_unit = metric_name
        if metric_name == "loss":
            reference_unit = per if unit == "tokens" else None
        for reference in references:
            if reference.unit == reference_unit:
                compared = _compared(console, ours, reference, metric)
                table.add_row(f"  {reference.name}", metric.text(reference.value), compared)
    for further, each in (sets or {}).items():
        divisor, unit_of_set = _scale(unit, each)
        values = _series(rows, row_name("loss", further))[1]
        if values.size:
            remark = unit_of_set
            remark += _per_token(
                values[-1] / divisor, divisor if unit_of_set == "nats/byte" else None
            )
            for metric_name, metric in shown_everywhere().items():
                metric_values = _series(rows, row_name(metric_name, further))[1]
                if metric_name != "loss" and metric_values.size:
                    remark += f", {metric.label} {metric.text_with_unit(float(metric_values[-1]))}"
            table.add_row(f"  on {further}", f"{values[-1] / divisor:.4f}", remark)
    steps, losses = _series(rows, "loss")
    if len(steps):
        count = max(1, min(100, len(steps) // 20))
        mean = losses[-count:].mean() / scale
        units = f"{per}{_per_token(mean, per_token)}"
        table.add_row(
            "training loss",
            f"{mean:.4f}",
            f"{units}, mean of the last {count} steps" if count > 1 else units,
        )

    rates = [row[unit] / row["seconds"] for row in rows if row.get("seconds") and unit in row]
    rate = f", {quantity(float(np.median(rates)))} {unit}/s while training" if rates else ""
    below = Table.grid(Column(no_wrap=True), Column(overflow="fold"), padding=(0, 3, 0, 0))
    for label, line in {"time": f"{duration(seconds)}{rate}", **facts}.items():
        below.add_row(label, Text(line))
    if files:
        below.add_row("files", Text("\n".join(map(relative, files))))
    heading = Text(f"{name}: {rows[-1]['step']:,} steps done", "bold")
    console.print(
        Panel(
            Group(table, "", below), title=heading, title_align="left", padding=(1, 2), expand=False
        )
    )
    if then:  # below the panel and in one line, whose frame and line breaks would be copied with the command
        console.print(Text.assemble(("next  ", "dim"), then), soft_wrap=True)


def _rows(path: Path | str) -> tuple[list[dict[str, Any]], str]:
    """The rows of a file, and the unit that they count."""
    rows = metrics.read(path)
    if not rows:
        raise metrics.MetricsError(
            f"{path} has no rows, there is nothing to report; train at least one step"
        )
    return rows, "images" if any("images" in row for row in rows) else "tokens"


def _scale(unit: str, bytes_per_token: float | None) -> tuple[float, str]:
    """What losses are divided by, and their unit then."""
    if unit != "tokens":
        return 1.0, "nats/image"
    return (1.0, "nats/target") if bytes_per_token is None else (bytes_per_token, "nats/byte")


def _per_token(loss_per_byte: float, bytes_per_token: float | None) -> str:
    """Return a loss in nats per token, to stand behind the loss per byte; nothing where a token is a byte or there are none."""
    if bytes_per_token is None or bytes_per_token == 1:
        return ""
    return f", {loss_per_byte * bytes_per_token:.4f} nats/token"


def _series(
    rows: Sequence[Mapping[str, Any]], key: str, scale: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values / scale of one column; what was not finite is nan."""
    points = [(row["step"], row[key] / scale) for row in rows if row.get(key) is not None]
    points += [(row["step"], math.nan) for row in rows if key in row.get("nonfinite", ())]
    points.sort(key=lambda point: point[0])
    return np.array([step for step, _ in points]), np.array(
        [value for _, value in points], np.float64
    )


class _Further(NamedTuple):
    """Evaluations of a further set, as a line of a panel."""

    name: str
    steps: np.ndarray
    values: np.ndarray
    unit: str
    """Unit of the values where it is not that of the panel; else empty."""


def _further(
    rows: Sequence[Mapping[str, Any]],
    name: str,
    measure: str,
    scale: float,
    unit: str,
    panel_unit: str,
) -> _Further:
    """Return the line of a further evaluation set; a long name is cut, so that it fits into the margin."""
    short = name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"
    return _Further(
        short, *_series(rows, row_name(measure, name), scale), unit if unit != panel_unit else ""
    )


def _training(axes: Axes, steps: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Every step in a light line and their smoothed course, which is returned."""
    smooth = plotting.smoothed(values)
    axes.plot(steps, values, color=plotting.BLUE, alpha=0.25, linewidth=0.8)
    axes.plot(steps, smooth, color=plotting.BLUE, linewidth=1.8, label="training (smoothed)")
    return smooth


def _evaluations(
    axes: Axes,
    points: tuple[np.ndarray, np.ndarray],
    lines: Sequence[tuple[float, str]],
    form: str,
    *,
    gap: float,
    log: bool,
    around: np.ndarray,
    further: Sequence[_Further] = (),
) -> None:
    """Evaluations and reference lines, named in the right margin. Sets the limits of y to hold them and `around`."""
    steps, values = points
    inside = [values, [value for value, _ in lines], around, *(line.values for line in further)]
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
    for line, (colour, marker) in zip(further, itertools.cycle(plotting.MORE), strict=False):
        axes.plot(
            line.steps,
            line.values,
            color=colour,
            marker=marker,
            markersize=3.5,
            linewidth=1.2,
            zorder=1.9,
        )
        if line.values.size and math.isfinite(line.values[-1]):
            text = f"{line.name} {form.format(line.values[-1])} {line.unit}".rstrip()
            labels.append((float(line.values[-1]), text, colour))
    if values.size and math.isfinite(values[-1]):
        labels.append((float(values[-1]), f"evaluation {form.format(values[-1])}", plotting.ORANGE))
    plotting.margin_labels(axes, labels, gap)


def _by_importance(unit: str) -> list[str]:
    """Return the names of the metrics of a summary: of images the loss comes last."""
    names = list(shown_everywhere())
    return sorted(names, key=lambda name: unit == "images" and name == "loss")


def _compared(console: Console, ours: float, reference: Reference, metric: Metric) -> Text:
    good, bad = ("+", "x") if console.options.ascii_only else ("✓", "✗")
    if math.isnan(ours):
        return Text(f"{bad} diverged", "red")
    gain = ours - reference.value if metric.better == "higher" else reference.value - ours
    size = f"{100 * abs(gain):.2f} points" if metric.share else metric.text(abs(gain))
    return (
        Text(f"{good} better by {size}", "green")
        if gain >= 0
        else Text(f"{bad} worse by {size}", "red")
    )


def relative(path: Path | str) -> str:
    """Relative to the current folder where it lies below it."""
    if not isinstance(path, str) and is_remote(path):
        return str(path)
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def leave(session: CompiledRun, params: Arrays) -> None:
    """Write loss.png, sample.txt or predictions.png into the run's folder, and print the summary.

    Every process of the run calls this, since each holds a part of the parameters; one of them writes.

    Args:
        session: of the run that is done.
        params: the trained parameters.
    """
    program, data, inputs, rt = session.program, session.data, session.inputs, session.context
    config, folder, leader, count = (
        program.config,
        rt.files,
        rt.processes.leader,
        program.definition.count(),
    )
    form = f"relative to {config.preset.base}" if config.preset.base else "in absolute form"
    files = [folder / metrics.FILE_NAME]
    if config.log.samples and (config.model.generates or config.model.denoises):
        files.append(folder / "sample.txt")
        text = _sample(program, data, params, inputs)
        if leader:
            with _extra(rt, "sample.txt"):
                files[-1].write_text(text, encoding="utf-8")
                if config.log.tensorboard:
                    _show(rt, metrics.read(files[0])[-1]["step"], text)
            rt.console.rule("sample", style="dim")
            rt.console.print(text, markup=False, highlight=False, style="dim")
    elif config.log.samples and config.model.task == "images":
        from mupax.train.run.report import plotting

        files.append(folder / "predictions.png")
        logits = jax.jit(
            partial(logits_of, program.definition), out_shardings=program.layout.replicated
        )
        shown = plotting.guesses(data, lambda images: logits(params, inputs, images))
        if leader:
            with _extra(rt, "predictions.png"):
                plotting.prediction_picture(
                    **shown, class_names=data.class_names, out_png=files[-1]
                )
    if not leader:
        return
    references, curve = data.references(), folder / "loss.png"
    title = f"{config.recipe}: {count:,} parameters, {program.preset.name}"
    sets = {name: one.bytes_per_token for name, one in session.sets.items()}
    with _extra(rt, "loss.png"):
        loss_plot(
            files[0], curve, references, title, bytes_per_token=data.bytes_per_token, sets=sets
        )
    facts = {"model": f"{count:,} parameters", "preset": f"{program.preset.label}, {form}"}
    facts |= {"stopped early": session.evaluations.stopped} if session.evaluations.stopped else {}
    with _extra(rt, "the summary"):
        summary(
            rt.console,
            files[0],
            name=config.recipe,
            seconds=time.monotonic() - session.began,
            facts={**facts, **session.speed},
            references=references,
            bytes_per_token=data.bytes_per_token,
            sets=sets,
            files=[
                rt.folder / file.relative_to(folder).as_posix()
                for file in (*files, curve, folder / "config.json")
            ],
            then=_use(config, data, relative(rt.folder)),
        )


def _show(rt: RunContext, step: int, text: str) -> None:
    """The sample in TensorBoard, in a file of its own: that of the rows is closed."""
    from mupax.train.run.report.mirrors.trackers import Media, TensorBoard

    board = TensorBoard(rt.files / "tensorboard", None, "sample")
    fenced = "".join(
        f"    {line}\n" for line in text.splitlines()
    )  # as code: no character of it is markup
    board.show(step, Media(texts={"sample": fenced}), time.time())
    board.close()


def _use(config: Config, data: Data, folder: str) -> str:
    """Return the command that has a run's model do what the model is for. It can be copied."""
    if folder.startswith("-"):  # it would be read as a flag
        folder = f"./{folder}"
    kind, _, place = config.data.name.partition(":")
    words = ["eval", folder]
    chats = kind == "chat" or config.data.chat_template is not None
    if chats and config.model.generates:
        words = ["generate", folder, "--chat"]
    elif config.model.generates:
        words = ["generate", folder, *_prompt_words(_prompt(config, data).strip())]
    elif config.model.denoises and config.data.name == "python_corpus":
        words = ["generate", folder, *_prompt_words(f"{_PROMPT}{_MASKS[config.data.noise]}(self):")]
    elif kind == "images":
        words = ["predict", folder, f"./{place}" if place.startswith("-") else place]
    return terminal.typed("mupax", *words)


def _prompt_words(text: str) -> list[str]:
    """Return the flag of a prompt. A text that looks like a flag is joined to it."""
    if text == "-":  # which reads standard input
        text = _PROMPT.strip()
    return [f"--prompt={text}"] if text.startswith("-") else ["--prompt", text]


def _prompt(config: Config, data: Data) -> str:
    """What a sample goes on with: of Python's sources a definition, of other text words of the first evaluation example."""
    if config.data.name == "python_corpus":
        return _PROMPT
    text = data.tokenizer.decode(data.eval_batch(0, slice(0, 1))["inputs"][0])
    words = text.split()[1:-1] or text.split()  # a window cuts its first and last
    whole = [word for word in words if word.isprintable() and "\ufffd" not in word]
    return " ".join(whole[:_WORDS])[:_LONGEST] or _PROMPT


@contextlib.contextmanager
def _extra(rt: RunContext, what: str) -> Iterator[None]:
    """Something without which the run is whole: where it fails, a line says so."""
    try:
        yield
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        rt.console.print(
            f"{what} is left out: {reason[:300]}", style="yellow", markup=False, highlight=False
        )


def _sample(program: Program, data: Data, params: Arrays, inputs: StepInputs) -> str:
    """A short prompt, continued; of an encoder-decoder texts with noise, and what it makes of them."""
    if program.config.model.denoises:
        from mupax.train.reuse.generate import denoised

        return denoised.examples_text(program, data, params, inputs)
    from mupax.train.reuse.generate.decode import Generator

    prompt = data.tokenizer.encode([_prompt(program.config, data).encode()])[0]
    new = Generator(program, params, inputs).complete(prompt, _SAMPLE_TOKENS, program.config.seed)[
        0
    ]
    return data.tokenizer.decode(np.concatenate([prompt, new]))
