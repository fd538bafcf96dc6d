"""What the figures of whole runs share: models grown along N, H and L from one base, their losses, kernels and attention.

Each run's numbers are kept in a file of its own, so a measurement that was stopped goes on, and figures that ask for the
same run share it.

Shapes: S sizes, seeds, P points of a curve, Q examples of a kernel.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scripts.figures import panels
from scripts.figures.result import Row, estimate, mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from mupax.train.config.run import Config
    from scripts.figures import training

AXES = {"head_dim": "N", "heads": "H", "depth": "L"}
EXAMPLES = 24
BINS = np.linspace(-2, 2, 42)
POINTS = 50


def grown(settings: Mapping[str, Any]) -> list[tuple[str, int, dict[str, int]]]:
    """(axis, size, all three sizes), the base once per axis as its first."""
    return [
        (
            axis,
            settings["base"][axis] * factor,
            {**settings["base"], axis: settings["base"][axis] * factor},
        )
        for axis in settings["axes"]
        for factor in settings["factors"]
    ]


def measure(
    kind: str, settings: Mapping[str, Any], folder: Path, *, ends: float = 4.0, **rule: Any
) -> dict[str, Any]:
    """Runs at every size of `grown`, vit or lm, with `rule` over the settings of the runs, `ends` as for a `Trainer`.

    Returns:
        Per axis `size` [S], `flops` of a step [S], `loss` [S, seeds, P] and the `steps` it is at [P], `kernel`
        [S, seeds, Q, Q] and `attention` [S, seeds, bins] after the last step.
    """
    from mupax.zoo import families
    from scripts.figures import training

    folder.mkdir(parents=True, exist_ok=True)
    make = {"vit": training.vit, "lm": training.lm}[kind]
    by_axis: dict[str, Any] = {}
    batches, trainers = None, {}
    for axis, size, sizes in grown(settings):
        config = make(**sizes, **{**settings["model"], **rule})
        runs = []
        for seed in range(settings["seeds"]):
            run = replace(config, seed=seed)
            path = folder / f"{_key(run, ends)}.json"
            if not path.exists():
                if config.model not in trainers:  # the last one only: compiled programs take memory
                    trainers = {config.model: training.Trainer(config, batches)}
                trainer = trainers[config.model]
                batches, trainer.ends = trainer.batches, ends
                path.write_text(json.dumps(_one(trainer, run, kind)))
            runs.append(json.loads(path.read_text()))
        here = by_axis.setdefault(
            axis, {"size": [], "flops": [], "steps": runs[0]["steps"], **{n: [] for n in _FIELDS}}
        )
        here["size"].append(size)
        here["flops"].append(
            families.train_flops(config.model) * config.data.batch_size * _units(config)
        )
        for name in _FIELDS:
            here[name].append([one[name] for one in runs])
    return by_axis


_FIELDS = ("loss", "kernel", "attention")


def _units(config: Config) -> int:
    return config.model.units


def _key(config: Config, ends: float) -> str:
    from mupax.train.data import cache
    from mupax.train.data.sources import shapes

    return cache.digest(repr(config), f"{ends}", shapes.VERSION)


def _one(trainer: training.Trainer, config: Config, kind: str) -> dict[str, Any]:
    from scripts.figures import training

    probe = trainer.batches.probe(EXAMPLES if kind == "vit" else 2)
    losses, (last,) = trainer.train(
        config, at=[config.steps], look=lambda snapshot: trainer.internals(snapshot, probe)
    )
    h_BTD = last["residual"][-1]
    h_BTD = h_BTD - h_BTD.mean(-1, keepdims=True)
    h_BTD = h_BTD / np.sqrt((h_BTD**2).mean(-1, keepdims=True) + 1e-5)
    features_QD = h_BTD.mean(1) if kind == "vit" else h_BTD[0, -EXAMPLES:]
    logits_BHTS = last["attention"][-1]
    if kind == "lm":
        logits_BHTS = logits_BHTS[..., np.tril(np.ones(logits_BHTS.shape[-2:], bool))]
    density, _ = np.histogram(np.clip(logits_BHTS, -1.999, 1.999), BINS, density=True)
    ends = np.cumsum([len(part) for part in np.array_split(losses, min(POINTS, len(losses)))])
    return {
        "steps": ends.tolist(),
        "loss": training.smoothed(losses, POINTS).round(5).tolist(),
        "kernel": (features_QD @ features_QD.T / features_QD.shape[1]).round(4).tolist(),
        "attention": density.round(4).tolist(),
    }


def alignment(a: Any, b: Any) -> float:
    """Correlation between two kernels [Q, Q] over pairs of different examples: 1 where they are equal up to scale and mean.

    Without the diagonal, which is large in any kernel and would make all of them alike.
    """
    pairs = np.triu_indices(len(a), 1)
    return float(np.corrcoef(np.asarray(a)[pairs], np.asarray(b)[pairs])[0, 1])


def gap(of_axis: Mapping[str, Any]) -> np.ndarray:
    """Per seed [seeds], mean absolute difference in nats of the two largest sizes' loss curves."""
    loss = np.asarray(of_axis["loss"])
    return np.abs(loss[-1] - loss[-2]).mean(-1)


def likeness(data: Mapping[str, Any], about: str) -> list[Row]:
    """How alike the two largest models along each axis are: loss curves, kernels, and the kernels of two seeds beside."""
    rows = []
    for axis, of_axis in data.items():
        two = f"{AXES[axis]} = {of_axis['size'][-2]} and {of_axis['size'][-1]}"
        kernels = np.asarray(of_axis["kernel"])
        aligned = [alignment(big, less) for big, less in zip(kernels[-1], kernels[-2], strict=True)]
        rows.append(
            estimate(f"mean difference of loss curves in nats, {two}{about}", mean(gap(of_axis)))
        )
        across_seeds = alignment(kernels[-1][0], kernels[-1][1])
        note = f"Two seeds of the larger one: {across_seeds:.3f}."
        rows.append(estimate(f"alignment of final kernels, {two}{about}", mean(aligned), note=note))
    return rows


def at_compute(of_axis: Mapping[str, Any], which: int, flops: float) -> np.ndarray:
    """Loss [seeds] of one size after so many training FLOPs, between the points of its curves."""
    compute = np.asarray(of_axis["steps"], float) * of_axis["flops"][which]
    return np.array([np.interp(flops, compute, loss) for loss in of_axis["loss"][which]])


def slim(by_axis: Mapping[str, Any]) -> dict[str, Any]:
    """Without kernels and attention."""
    return {
        axis: {
            name: value for name, value in of_axis.items() if name not in ("kernel", "attention")
        }
        for axis, of_axis in by_axis.items()
    }


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
        of_axis: sizes and losses along it.
        compute: whether x is training FLOPs.
        suffix: behind a size in the legend.
        alpha: opacity of the lines.
    """
    for color, size, flops, loss in zip(
        panels.COLORS, of_axis["size"], of_axis["flops"], of_axis["loss"], strict=False
    ):
        x = np.asarray(of_axis["steps"], float) * (flops if compute else 1)
        label = f"{AXES[axis]} = {size}{suffix}"
        axes.plot(x, np.mean(loss, 0), style, color=color, linewidth=1.4, label=label, alpha=alpha)
    if compute:
        axes.set_xscale("log")


def draw_attention(axes: Axes, axis: str, of_axis: Mapping[str, Any]) -> None:
    """Distributions of attention logits of the last layer, over heads, examples and pairs of positions."""
    middle = (BINS[1:] + BINS[:-1]) / 2
    for color, size, density in zip(
        panels.COLORS, of_axis["size"], of_axis["attention"], strict=False
    ):
        axes.plot(
            middle, np.mean(density, 0), color=color, linewidth=1.4, label=f"{AXES[axis]} = {size}"
        )


def draw_kernels(axes: Axes, axis: str, of_axis: Mapping[str, Any]) -> None:
    """The kernel of the smallest model beside the largest one's."""
    small, large = (np.asarray(of_axis["kernel"][i][0]) for i in (0, -1))
    image = np.concatenate([small, np.full((len(small), 1), np.nan), large], axis=1)
    axes.imshow(image, cmap="viridis", aspect="equal")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(visible=False)
    panels.label(
        axes, f"Kernels, {AXES[axis]} = {of_axis['size'][0]} | {of_axis['size'][-1]}", "", ""
    )


def panels_of(title: str, data: Mapping[str, Any], axes: Sequence[str]) -> Any:
    """Three rows (losses, kernels, attention), a column per axis."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.0 * len(axes), 8.4), dpi=100, layout="constrained")
    figure.suptitle(title, fontsize=12, x=0.01, ha="left")
    for column, axis in enumerate(axes):
        top, middle, bottom = (
            figure.add_subplot(3, len(axes), 1 + column + row * len(axes)) for row in range(3)
        )
        for one in (top, middle, bottom):
            panels.quiet(one)
        draw_losses(top, axis, data[axis])
        panels.label(
            top,
            f"Training loss, {AXES[axis]} growing",
            "step",
            "nats" if column == 0 else "",
            legend=True,
        )
        draw_kernels(middle, axis, data[axis])
        draw_attention(bottom, axis, data[axis])
        panels.label(
            bottom,
            "Attention logits of the last layer",
            "A",
            "density" if column == 0 else "",
            legend=True,
        )
    return figure
