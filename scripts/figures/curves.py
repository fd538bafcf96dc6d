"""Losses, kernels and attention of whole runs of models that grow from one base along N, H and L.

Figures 5b, 6, 7 and 12 use this. Every run has a file of its own, so a measurement that was stopped
continues, and figures that need the same run share its file.

Shapes: S sizes, P points of a loss curve, Q examples of a kernel.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from scripts.figures import panels
from scripts.figures.result import Row, estimate, mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from mupax.train.config.run import Config
    from scripts.figures import training

AXES = {"head_dim": "N", "heads": "H", "depth": "L"}
"""Size of a model to its letter in the paper."""
EXAMPLES = 24
"""Number Q of examples of a kernel."""
BINS = np.linspace(-2, 2, 42)
"""Edges of the histogram of attention logits."""
POINTS = 50
"""Number P of points of a loss curve."""
_FIELDS = ("loss", "kernel", "attention")


class GrownModel(NamedTuple):
    """Sizes of one model of a figure."""

    axis: str
    """Size that grows, a key of `AXES`."""
    size: int
    """Value of the axis."""
    sizes: dict[str, int]
    """Values of all three sizes, by the keys of `AXES`."""


def grown(settings: Mapping[str, Any]) -> list[GrownModel]:
    """Return a figure's models: along each axis, the base with that size times each factor.

    Args:
        settings: Settings of the figure, with `base` (sizes by the keys of `AXES`), `axes` and
            `factors`.
    """
    base = settings["base"]
    models = []
    for axis in settings["axes"]:
        for factor in settings["factors"]:
            size = base[axis] * factor
            models.append(GrownModel(axis, size, {**base, axis: size}))
    return models


def measure(
    kind: str, settings: Mapping[str, Any], folder: Path, *, ends: float = 4.0, **rule: Any
) -> dict[str, Any]:
    """Train models of all sizes of `grown` and return their losses, kernels and attention.

    Args:
        kind: `"vit"` or `"lm"`.
        folder: Folder with one file for each run. Runs that are there are not trained again.
        ends: Factor on the learning rates of embeddings, positions and the readout.
        rule: Arguments of `training.vit` or `training.lm` that replace the settings' `model`.

    Returns:
        Axis to a dictionary with `size` [S], the training FLOPs of a step `flops` [S], the `steps`
        [P] of the loss curve and its `loss` [S, seeds, P]. After the last step, `kernel`
        [S, seeds, Q, Q] has inner products of the last layer's features between examples, and
        `attention` [S, seeds, bins] the density of its attention logits.
    """
    from mupax.zoo import families
    from scripts.figures import training

    folder.mkdir(parents=True, exist_ok=True)
    make = {"vit": training.vit, "lm": training.lm}[kind]
    by_axis: dict[str, Any] = {}
    batches = None
    trainer = None
    compiled_model = None
    for axis, size, sizes in grown(settings):
        config = make(**sizes, **{**settings["model"], **rule})
        runs = []
        for seed in range(settings["seeds"]):
            run = replace(config, seed=seed)
            path = folder / f"{_key(run, ends)}.json"
            if not path.exists():
                # Only the last trainer is kept, because compiled programs take memory.
                if trainer is None or compiled_model != config.model:
                    trainer = training.Trainer(config, batches)
                    batches = trainer.batches
                    compiled_model = config.model
                trainer.ends = ends
                path.write_text(json.dumps(_trained(trainer, run, kind)))
            runs.append(json.loads(path.read_text()))

        if axis not in by_axis:
            by_axis[axis] = {
                "size": [],
                "flops": [],
                "steps": runs[0]["steps"],
                "loss": [],
                "kernel": [],
                "attention": [],
            }
        of_axis = by_axis[axis]
        of_axis["size"].append(size)
        of_axis["flops"].append(
            families.train_flops(config.model) * config.data.batch_size * config.model.units
        )
        for name in _FIELDS:
            of_axis[name].append([run[name] for run in runs])
    return by_axis


def _key(config: Config, ends: float) -> str:
    """Return the name of a run's file, which changes with the configuration and the image set."""
    from mupax.train.data import cache
    from mupax.train.data.sources import shapes

    return cache.digest(repr(config), f"{ends}", shapes.VERSION)


def _trained(trainer: training.Trainer, config: Config, kind: str) -> dict[str, Any]:
    """Train a run and return its loss curve, and the last layer's kernel and attention logits.

    Shapes: B examples, T query and S key positions, H heads, D width, Q examples of the kernel.
    """
    from scripts.figures import training

    probe = trainer.batches.probe(EXAMPLES if kind == "vit" else 2)
    losses, (last,) = trainer.train(
        config, at=[config.steps], look=lambda snapshot: trainer.internals(snapshot, probe)
    )

    # The features are what the last LayerNorm gives: of an image the mean over positions, of a
    # text the last positions.
    h_BTD = last["residual"][-1]
    h_BTD = h_BTD - h_BTD.mean(-1, keepdims=True)
    # 1e-5 is the eps of the models' LayerNorm.
    h_BTD = h_BTD / np.sqrt((h_BTD**2).mean(-1, keepdims=True) + 1e-5)
    features_QD = h_BTD.mean(1) if kind == "vit" else h_BTD[0, -EXAMPLES:]

    logits_BHTS = last["attention"][-1]
    if kind == "lm":
        causal = np.tril(np.ones(logits_BHTS.shape[-2:], bool))
        logits_BHTS = logits_BHTS[..., causal]
    # Logits beyond the bins count in the outermost ones.
    density, _ = np.histogram(np.clip(logits_BHTS, -1.999, 1.999), BINS, density=True)

    windows = np.array_split(losses, min(POINTS, len(losses)))
    ends = np.cumsum([len(window) for window in windows])
    return {
        "steps": ends.tolist(),
        "loss": training.smoothed(losses, POINTS).round(5).tolist(),
        "kernel": (features_QD @ features_QD.T / features_QD.shape[1]).round(4).tolist(),
        "attention": density.round(4).tolist(),
    }


def alignment(a: Any, b: Any) -> float:
    """Return the correlation of two kernels [Q, Q] over pairs of different examples.

    The correlation is 1 for kernels that are equal up to scale and mean.
    """
    # Without the diagonal, which is large in any kernel and would make all kernels alike.
    pairs = np.triu_indices(len(a), 1)
    return float(np.corrcoef(np.asarray(a)[pairs], np.asarray(b)[pairs])[0, 1])


def gap(of_axis: Mapping[str, Any]) -> np.ndarray:
    """Return the mean absolute difference [seeds] of the two largest sizes' losses, in nats."""
    loss = np.asarray(of_axis["loss"])
    return np.abs(loss[-1] - loss[-2]).mean(-1)


def likeness(data: Mapping[str, Any]) -> list[Row]:
    """Return rows that compare the two largest models of each axis.

    There are two rows for an axis: the mean difference of the loss curves, and the correlation of
    the final kernels (`alignment`).
    """
    rows = []
    for axis, of_axis in data.items():
        sizes = f"{AXES[axis]} = {of_axis['size'][-2]} and {of_axis['size'][-1]}"
        rows.append(
            estimate(f"mean difference of loss curves in nats, {sizes}", mean(gap(of_axis)))
        )
        kernels = np.asarray(of_axis["kernel"])
        aligned = []
        for largest, second_largest in zip(kernels[-1], kernels[-2], strict=True):
            aligned.append(alignment(largest, second_largest))
        across_seeds = alignment(kernels[-1][0], kernels[-1][1])
        note = f"Two seeds of the larger one: {across_seeds:.3f}."
        rows.append(estimate(f"alignment of final kernels, {sizes}", mean(aligned), note=note))
    return rows


def at_compute(of_axis: Mapping[str, Any], index: int, flops: float) -> np.ndarray:
    """Return a size's loss [seeds] after `flops` training FLOPs, interpolated between its points.

    Args:
        of_axis: What `measure` returned for the axis.
    """
    compute = np.asarray(of_axis["steps"], float) * of_axis["flops"][index]
    return np.array([np.interp(flops, compute, loss) for loss in of_axis["loss"][index]])


def slim(by_axis: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `measure` returned without kernels and attention, to keep a record small."""
    slim_by_axis = {}
    for axis, of_axis in by_axis.items():
        slim_by_axis[axis] = {name: of_axis[name] for name in ("size", "flops", "steps", "loss")}
    return slim_by_axis


def draw_losses(
    axes: Axes,
    axis: str,
    of_axis: Mapping[str, Any],
    *,
    compute: bool = False,
    style: str = "-",
    suffix: str = "",
    alpha: float = 1,
) -> None:
    """Draw loss curves, means over seeds, against steps or training FLOPs.

    Args:
        axis: Size that grows, a key of `AXES`.
        of_axis: What `measure` returned for the axis.
        compute: Whether to draw against training FLOPs instead of steps.
        suffix: Text that follows a size in the legend.
    """
    steps = np.asarray(of_axis["steps"], float)
    for color, size, flops, loss in zip(
        panels.COLORS, of_axis["size"], of_axis["flops"], of_axis["loss"], strict=False
    ):
        x = steps * flops if compute else steps
        label = f"{AXES[axis]} = {size}{suffix}"
        axes.plot(x, np.mean(loss, 0), style, color=color, linewidth=1.4, label=label, alpha=alpha)
    if compute:
        axes.set_xscale("log")


def draw_attention(axes: Axes, axis: str, of_axis: Mapping[str, Any]) -> None:
    """Draw the distributions of the last layer's attention logits, a line for each size.

    A distribution is over heads, examples and pairs of positions.
    """
    centers = (BINS[1:] + BINS[:-1]) / 2
    for color, size, density in zip(
        panels.COLORS, of_axis["size"], of_axis["attention"], strict=False
    ):
        label = f"{AXES[axis]} = {size}"
        axes.plot(centers, np.mean(density, 0), color=color, linewidth=1.4, label=label)


def draw_kernels(axes: Axes, axis: str, of_axis: Mapping[str, Any]) -> None:
    """Draw the kernels of the smallest and the largest model next to each other."""
    small = np.asarray(of_axis["kernel"][0][0])
    large = np.asarray(of_axis["kernel"][-1][0])
    # NaN leaves a blank column between both kernels.
    gap_column = np.full((len(small), 1), np.nan)
    image = np.concatenate([small, gap_column, large], axis=1)
    axes.imshow(image, cmap="viridis", aspect="equal")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(visible=False)
    title = f"Kernels, {AXES[axis]} = {of_axis['size'][0]} | {of_axis['size'][-1]}"
    panels.label(axes, title, "", "")


def panels_of(title: str, data: Mapping[str, Any], axes: Sequence[str]) -> Any:
    """Draw a picture with a column for each axis and three rows: losses, kernels and attention."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.0 * len(axes), 8.4), dpi=100, layout="constrained")
    figure.suptitle(title, fontsize=12, x=0.01, ha="left")
    for column, axis in enumerate(axes):
        column_panels = []
        for row in range(3):
            panel = figure.add_subplot(3, len(axes), 1 + column + row * len(axes))
            panels.quiet(panel)
            column_panels.append(panel)
        top, middle, bottom = column_panels
        # Only the first column names its y axes.
        loss_name = "nats" if column == 0 else ""
        density_name = "density" if column == 0 else ""

        draw_losses(top, axis, data[axis])
        panels.label(top, f"Training loss, {AXES[axis]} growing", "step", loss_name, legend=True)
        draw_kernels(middle, axis, data[axis])
        draw_attention(bottom, axis, data[axis])
        attention_title = "Attention logits of the last layer"
        panels.label(bottom, attention_title, "A", density_name, legend=True)
    return figure
