"""Pictures of a run: colours, axes that suit loss curves, names beside the lines they name, and what an image model takes test images for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from mupax.train.data import Data

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GRID = (8, 5)
"""Columns and rows of the picture of predictions."""
_CELL = 1.28
"""Height of its cells over their width."""
_IMAGES = 512
"""Test images that are looked at."""

# From Okabe and Ito's palette: told apart by colour-blind readers.
BLUE, ORANGE = "#0072B2", "#D55E00"
GREY, INK = "#6E6E6E", "#222222"
MORE = (("#009E73", "s"), ("#CC79A7", "^"), ("#56B4E9", "D"), ("#E69F00", "v"), ("#000000", "X"))
"""Colours and markers of further lines in one panel; a sixth line has those of the first again."""
LOG_STEPS = 100
"""Runs of at least so many steps are drawn over log(step); on a linear axis the first drop is all there is to see."""


def guesses(data: Data, logits: Callable[[np.ndarray], Any]) -> dict[str, np.ndarray]:
    """Test images, their classes and what the model takes them for, by the names that `prediction_picture` has for them.

    Args:
        data: of images.
        logits: [B, H, W, C] to [B, classes]; every process of a run calls it alike.
    """
    shown: dict[str, list[np.ndarray]] = {"images": [], "targets": [], "predictions": []}
    for batch in data.eval_batches():
        real = batch["weights"] > 0
        predictions = np.asarray(logits(batch["inputs"])).argmax(axis=-1)
        for parts, array in zip(
            shown.values(), (batch["inputs"], batch["targets"], predictions), strict=True
        ):
            parts.append(array[real])
        if sum(map(len, shown["targets"])) >= _IMAGES:
            break
    return {name: np.concatenate(parts) for name, parts in shown.items()}


def prediction_picture(
    images: np.ndarray,
    targets: np.ndarray,
    predictions: np.ndarray,
    class_names: Sequence[str] | None,
    out_png: Path | str,
) -> None:
    """Draw test images with the predicted label: the wrong ones first, marked with the truth, at most half the grid.

    Args:
        images: float [N, H, W, C], C = 1 or 3, in any normalization per channel: the smallest value of a channel over
            all images is drawn black and the largest at full strength.
        targets: true classes, int [N].
        predictions: predicted classes, int [N].
        class_names: names of the classes; their numbers unless given.
        out_png: picture to write.

    Raises:
        ValueError: no images, images of another shape, or counts that differ.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    images, targets, predictions = (
        np.asarray(images, np.float32),
        np.asarray(targets),
        np.asarray(predictions),
    )
    if images.ndim != 4 or images.shape[-1] not in (1, 3) or not len(images):
        raise ValueError(f"images are {images.shape}; give [N, H, W, C] with N >= 1 and C = 1 or 3")
    if targets.shape != images.shape[:1] or predictions.shape != images.shape[:1]:
        raise ValueError(
            f"{len(images)} images need as many targets and predictions, not {targets.shape}, {predictions.shape}"
        )
    low, high = images.min((0, 1, 2)), images.max((0, 1, 2))
    pixels = (images - low) / np.where(high > low, high - low, 1)
    right = targets == predictions
    wrong_first = np.flatnonzero(~right)[: _GRID[0] * _GRID[1] // 2]
    shown = np.concatenate([wrong_first, np.flatnonzero(right)])[: _GRID[0] * _GRID[1]]
    columns = min(_GRID[0], len(shown))
    rows = math.ceil(len(shown) / columns)
    # Inches, and so are the coordinates: a cell is 1 wide and _CELL high, the image above and its label below.
    width, height = max(4.5, columns), _CELL * rows + 0.4
    figure = Figure(figsize=(width, height), dpi=150)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    for cell, index in enumerate(shown):
        left, top = cell % columns, _CELL * (cell // columns)
        extent = (left + 0.06, left + 0.94, top + 0.94, top + 0.06)
        picture = pixels[index] if images.shape[-1] == 3 else pixels[index, ..., 0]
        axes.imshow(
            picture,
            extent=extent,
            cmap="gray",
            vmin=0,
            vmax=1,
            interpolation="nearest",
            aspect="equal",
        )
        label, color, weight = _class_name(class_names, int(predictions[index])), INK, "normal"
        if not right[index]:
            truth = _class_name(class_names, int(targets[index]))
            label = f"{label}, is {truth}" if len(label + truth) <= 8 else f"{label},\nis {truth}"
            color, weight = ORANGE, "bold"
            axes.add_patch(
                Rectangle(
                    (left + 0.06, top + 0.06),
                    0.88,
                    0.88,
                    fill=False,
                    edgecolor=color,
                    linewidth=2.5,
                )
            )
        axes.text(
            left + 0.5,
            top + 1.0,
            label,
            ha="center",
            va="top",
            fontsize=7.5,
            color=color,
            fontweight=weight,
        )
    axes.set(xlim=(0, width), ylim=(height - 0.4, -0.4))  # After imshow, which moves them.
    marked = "; framed: wrong, with the true class" if len(wrong_first) else ""
    heading = f"{right.sum():,} of {len(right):,} right ({100 * right.mean():.1f} %){marked}"
    axes.text(0.06, -0.14, heading, va="center", fontsize=9, color=INK)
    figure.savefig(out_png)


def _class_name(names: Sequence[str] | None, index: int) -> str:
    # ImageNet's names are lists of synonyms.
    name = str(index) if names is None else names[index].split(",")[0]
    return name if len(name) <= 12 else f"{name[:11]}…"


def smoothed(values: np.ndarray) -> np.ndarray:
    """Centred means of values [N], nan where a value is not finite.

    The window grows with the step up to a 25th of the run: there is no lag, and a steep start stays steep.
    """
    index = np.arange(len(values))
    half = np.minimum(index // 10, len(values) // 50)
    start, stop = index - half, np.minimum(index + half + 1, len(values))
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    means = (sums[stop] - sums[start]) / np.maximum(counts[stop] - counts[start], 1)
    return np.where(finite, means, math.nan)


def style(axes: Axes, first: int, last: int) -> None:
    """Quiet a panel's axes, with steps on x.

    Args:
        axes: of the panel.
        first: step at the left.
        last: step at the right; x is logarithmic where it is at least `LOG_STEPS`.
    """
    if last >= LOG_STEPS:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda step, _: f"{step:,.0f}")
        axes.set_xlim(max(first, 1) * 0.9, last * 1.1)
    else:
        axes.set_xlim(first - 0.02 * (last - first) - 0.5, last + 0.02 * (last - first) + 0.5)
    axes.grid(color="#E6E6E6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#999999")
    axes.tick_params(which="both", colors="#444444", labelsize=9)


def limits(axes: Axes, values: np.ndarray, *, log: bool) -> None:
    """Fit y to the finite values, on a log axis to the positive ones, with round numbers as its ticks.

    Args:
        axes: of the panel.
        values: all that is drawn in it, of any shape.
        log: whether y is logarithmic.
    """
    from matplotlib.ticker import FixedLocator, NullLocator

    values = values[np.isfinite(values) & ((values > 0) | (not log))]
    low, high = (values.min(), values.max()) if values.size else (1.0, 2.0)
    if not log:
        pad = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
        axes.set_ylim(low - pad, high + pad)
        return
    pad = max((high / low) ** 0.05, 1.02)
    axes.set_yscale("log")
    axes.set_ylim(low / pad, high * pad)
    # Round numbers, few enough to read: the coarsest list that has five of them in sight. Matplotlib lays out what is out of sight, too.
    powers = range(math.floor(math.log10(low / pad)), math.ceil(math.log10(high * pad)) + 1)
    coarse = (
        (1,),
        (1, 3),
        (1, 2, 5),
        (1, 1.5, 2, 3, 4, 5, 7),
        (1, 1.2, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9),
    )
    for leads in (*coarse, np.arange(10, 100) / 10):
        ticks = [lead * 10.0**power for power in powers for lead in leads]
        ticks = [tick for tick in ticks if low / pad <= tick <= high * pad]
        if len(ticks) >= 5:
            break
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda tick, _: f"{tick:g}")


def second_scale(axes: Axes, factor: float, label: str) -> None:
    """Draw the y axis a second time, further left, with the numbers of its ticks in another unit.

    Args:
        axes: panel whose ticks are set.
        factor: numbers in the other unit over those in the panel's.
        label: name of the other unit.
    """
    from matplotlib.ticker import FixedLocator, NullLocator

    second = axes.secondary_yaxis(
        -0.13, functions=(lambda y: np.asarray(y) * factor, lambda y: np.asarray(y) / factor)
    )
    second.yaxis.set_major_locator(FixedLocator([tick * factor for tick in axes.get_yticks()]))
    second.yaxis.set_minor_locator(NullLocator())
    second.yaxis.set_major_formatter(lambda tick, _: f"{tick:.3g}")
    second.set_ylabel(label, color=INK)
    second.tick_params(colors=INK, labelsize=8)
    second.spines["left"].set_color(GREY)


def margin_labels(axes: Axes, labels: Sequence[tuple[float, str, str]], gap: float) -> None:
    """Name values in the right margin of the panel, each tied to its value by a line.

    Args:
        axes: panel whose limits are set.
        labels: y, text and colour of each. One that the axis cannot show (0 on a log axis) is left out.
        gap: least distance of two names, as a fraction of the panel's height.
    """
    placed = []
    for value, text, color in sorted(labels):
        height = axes.transAxes.inverted().transform(axes.transData.transform((1, value)))[1]
        if math.isfinite(height):
            placed.append((float(height), text, color))
    heights = spread([height for height, _, _ in placed], gap)
    for (height, text, color), room in zip(placed, heights, strict=True):
        axes.annotate(
            text,
            xy=(1.0, height),
            xytext=(1.035, room),
            xycoords="axes fraction",
            textcoords="axes fraction",
            va="center",
            fontsize=9,
            color=color,
            arrowprops={
                "arrowstyle": "-",
                "color": color,
                "lw": 0.8,
                "shrinkA": 0,
                "shrinkB": 0,
                "relpos": (0, 0.5),
            },
        )


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """The nearest heights (least squares) that keep a gap: isotonic regression by its min-max formula.

    scipy.optimize has it too, which takes half a second to load.

    Args:
        heights: rising.
        gap: least distance of two.
    """
    count, low = len(heights), [height - rank * gap for rank, height in enumerate(heights)]
    return [
        rank * gap
        + max(min(fmean(low[i:j]) for j in range(rank + 1, count + 1)) for i in range(rank + 1))
        for rank in range(count)
    ]
