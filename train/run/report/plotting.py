"""Parts of a run's pictures: colors, axes that suit loss curves, labels, and predictions.

`finish.py` draws with them. Figures of studies use the colors and axes, too.
"""

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

_GRID_COLUMNS = 8
_GRID_ROWS = 5
"""Largest numbers of columns and rows of images in predictions.png."""
_CELL_HEIGHT = 1.28
"""Height over width of a cell in predictions.png, which has an image above and its label below."""
_NUM_IMAGES = 512
"""Test images that are predicted, at least, if there are so many."""

# BLUE, ORANGE and MORE are Okabe and Ito's palette, which color-blind readers can tell apart.
BLUE = "#0072B2"
ORANGE = "#D55E00"
GREY = "#6E6E6E"
INK = "#222222"
MORE = (("#009E73", "s"), ("#CC79A7", "^"), ("#56B4E9", "D"), ("#E69F00", "v"), ("#000000", "X"))
"""Colors and markers of further lines in one panel. A sixth line has those of the first again."""
LOG_STEPS = 100
"""Runs of at least so many steps are drawn over log(step). On a linear axis only the first drop of
the loss could be seen."""


def guesses(data: Data, logits: Callable[[np.ndarray], Any]) -> dict[str, np.ndarray]:
    """Predict the first test images. Return `images`, `targets` and `predictions` as arrays.

    They are NumPy arrays [N, H, W, C], [N] and [N]. N is at least `_NUM_IMAGES`, in whole batches,
    or all images if there are fewer.

    Args:
        logits: Function from images [B, H, W, C] to logits [B, classes]. Every process of a run
            calls it alike.
    """
    images = []
    targets = []
    predictions = []
    num_images = 0
    for batch in data.eval_batches():
        real = batch["weights"] > 0  # without the padding of the last batch
        predicted = np.asarray(logits(batch["inputs"])).argmax(axis=-1)
        images.append(batch["inputs"][real])
        targets.append(batch["targets"][real])
        predictions.append(predicted[real])
        num_images += len(targets[-1])
        if num_images >= _NUM_IMAGES:
            break
    return {
        "images": np.concatenate(images),
        "targets": np.concatenate(targets),
        "predictions": np.concatenate(predictions),
    }


def prediction_picture(
    images: np.ndarray,
    targets: np.ndarray,
    predictions: np.ndarray,
    class_names: Sequence[str] | None,
    out_png: Path | str,
) -> None:
    """Draw up to 40 test images with their predicted labels into a PNG file.

    Wrong predictions come first, framed and with the true class. They fill at most half of the
    grid. The heading has the share of right ones among all images given.

    Args:
        images: Images, float [N, H, W, C] with C = 1 or 3, in any normalization per channel. The
            smallest value of a channel over all images is drawn black, the largest at full
            strength.
        targets: True classes, int [N].
        predictions: Predicted classes, int [N].
        class_names: Names of the classes by label. `None` shows the labels.

    Raises:
        ValueError: There are no images, they have another shape, or the counts differ.
    """
    from matplotlib.figure import Figure

    images = np.asarray(images, np.float32)
    targets = np.asarray(targets)
    predictions = np.asarray(predictions)
    if images.ndim != 4 or images.shape[-1] not in (1, 3) or not len(images):
        raise ValueError(f"images are {images.shape}; give [N, H, W, C] with N >= 1 and C = 1 or 3")
    if targets.shape != images.shape[:1] or predictions.shape != images.shape[:1]:
        raise ValueError(
            f"{len(images)} images need as many targets and predictions, "
            f"not {targets.shape}, {predictions.shape}"
        )
    low = images.min((0, 1, 2))
    high = images.max((0, 1, 2))
    # A channel without contrast is drawn black.
    pixels = (images - low) / np.where(high > low, high - low, 1)

    num_cells = _GRID_COLUMNS * _GRID_ROWS
    is_right = targets == predictions
    wrong_first = np.flatnonzero(~is_right)[: num_cells // 2]
    shown = np.concatenate([wrong_first, np.flatnonzero(is_right)])[:num_cells]
    columns = min(_GRID_COLUMNS, len(shown))
    rows = math.ceil(len(shown) / columns)
    # Inches, which are also the coordinates: a cell is 1 wide.
    width = max(4.5, columns)
    height = _CELL_HEIGHT * rows + 0.4
    figure = Figure(figsize=(width, height), dpi=150)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    for cell, index in enumerate(shown):
        left = cell % columns
        top = _CELL_HEIGHT * (cell // columns)
        prediction = _class_name(class_names, int(predictions[index]))
        truth = None
        if not is_right[index]:
            truth = _class_name(class_names, int(targets[index]))
        _draw_cell(axes, pixels[index], left, top, prediction, truth)
    axes.set(xlim=(0, width), ylim=(height - 0.4, -0.4))  # after imshow, which moves the limits
    marked = "; framed: wrong, with the true class" if len(wrong_first) else ""
    heading = (
        f"{is_right.sum():,} of {len(is_right):,} right ({100 * is_right.mean():.1f} %){marked}"
    )
    axes.text(0.06, -0.14, heading, va="center", fontsize=9, color=INK)
    figure.savefig(out_png)


def _draw_cell(
    axes: Axes, pixels: np.ndarray, left: int, top: float, prediction: str, truth: str | None
) -> None:
    """Draw one image with its predicted class; frame it and add the truth if that differs.

    Args:
        pixels: Image in [0, 1], float [H, W, C].
        left: Left edge of the cell, in units of the width of a cell.
        top: Upper edge of the cell in the same unit, counted downwards.
        truth: True class, or `None` if the prediction is right.
    """
    from matplotlib.patches import Rectangle

    is_gray = pixels.shape[-1] == 1
    axes.imshow(
        pixels[..., 0] if is_gray else pixels,
        extent=(left + 0.06, left + 0.94, top + 0.94, top + 0.06),
        cmap="gray",
        vmin=0,
        vmax=1,
        # Other filters would blur small images, and hide the pixels that the model sees.
        interpolation="nearest",
        aspect="equal",
    )
    label = prediction
    color = INK
    weight = "normal"
    if truth is not None:
        color = ORANGE
        weight = "bold"
        # Two short names fit into one line.
        separator = ", is " if len(prediction + truth) <= 8 else ",\nis "
        label = f"{prediction}{separator}{truth}"
        frame = Rectangle(
            (left + 0.06, top + 0.06), 0.88, 0.88, fill=False, edgecolor=ORANGE, linewidth=2.5
        )
        axes.add_patch(frame)
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


def _class_name(names: Sequence[str] | None, label: int) -> str:
    """Return the name of a class in at most twelve characters, or its label without names."""
    # ImageNet's names are lists of synonyms.
    name = str(label) if names is None else names[label].split(",")[0]
    return name if len(name) <= 12 else f"{name[:11]}…"


def smoothed(values: np.ndarray) -> np.ndarray:
    """Return centered means of values [N], NaN where a value is not finite.

    The window grows with the step up to a 25th of the run. So there is no lag, and a steep start
    stays steep. The window is cut off at the last value.
    """
    index = np.arange(len(values))
    half_window = np.minimum(index // 10, len(values) // 50)
    start = index - half_window
    stop = np.minimum(index + half_window + 1, len(values))
    finite = np.isfinite(values)
    # Differences of running sums are the sums of all windows in one pass.
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    means = (sums[stop] - sums[start]) / np.maximum(counts[stop] - counts[start], 1)
    return np.where(finite, means, math.nan)


def style(axes: Axes, first: int, last: int) -> None:
    """Give a panel light grid lines and few spines, and set its x axis to steps.

    Args:
        first: Step at the left end of the axis, apart from a small margin.
        last: Step at the right. x is logarithmic from `LOG_STEPS` steps on.
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
    """Fit the y axis to the finite values. A log axis gets round numbers as its ticks.

    Args:
        values: All values that are drawn, of any shape. A log axis leaves out those of 0 or less.
    """
    from matplotlib.ticker import FixedLocator, NullLocator

    drawable = np.isfinite(values) & ((values > 0) | (not log))
    values = values[drawable]
    low = 1.0
    high = 2.0
    if values.size:
        low = values.min()
        high = values.max()
    if not log:
        # Equal values have no range, and an axis needs limits that differ.
        margin = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
        axes.set_ylim(low - margin, high + margin)
        return
    factor = max((high / low) ** 0.05, 1.02)
    axes.set_yscale("log")
    axes.set_ylim(low / factor, high * factor)
    ticks = _log_ticks(low / factor, high * factor)
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda tick, _: f"{tick:g}")


def _log_ticks(low: float, high: float) -> list[float]:
    """Return round numbers in [low, high] as the ticks of a log axis, five or more if possible.

    `low` must be above 0. The coarsest list that has five numbers inside is used, such as 1, 2, 5
    per decade, or else the finest. Numbers outside are left out, because matplotlib lays out labels
    out of sight, too.
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    lists_of_leads = (
        (1,),
        (1, 3),
        (1, 2, 5),
        (1, 1.5, 2, 3, 4, 5, 7),
        (1, 1.2, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9),
        np.arange(10, 100) / 10,
    )
    ticks: list[float] = []
    for leads in lists_of_leads:
        ticks = []
        for power in powers:
            ticks += [lead * 10.0**power for lead in leads]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) >= 5:
            break
    return ticks


def second_scale(axes: Axes, factor: float, label: str) -> None:
    """Draw the y axis a second time, further left, with its ticks in another unit.

    Args:
        axes: Axes of a panel whose ticks are set.
        factor: Factor from the unit of the panel to the other unit.
        label: Name of the other unit, such as "nats per token".
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
    """Write labels of values into the right margin of a panel, each tied to its value by a line.

    Args:
        axes: Axes of a panel whose limits are set.
        labels: y, text and color of each label. A label that the axis cannot show (0 on a log axis)
            is left out.
        gap: Least distance of two labels, as a fraction of the panel's height.
    """
    placed = []
    for value, text, color in sorted(labels):
        on_screen = axes.transData.transform((1, value))
        height = axes.transAxes.inverted().transform(on_screen)[1]
        if math.isfinite(height):
            placed.append((float(height), text, color))
    label_heights = spread([height for height, _, _ in placed], gap)
    for (height, text, color), label_height in zip(placed, label_heights, strict=True):
        axes.annotate(
            text,
            xy=(1.0, height),
            xytext=(1.035, label_height),
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
    """Return the nearest heights (least squares) that are at least `gap` apart.

    `heights` must be in ascending order, which the result keeps.
    """
    # Heights minus rank * gap must not decrease, which is isotonic regression. Its min-max formula
    # is used, because scipy.optimize takes half a second to load.
    count = len(heights)
    offsets = [height - rank * gap for rank, height in enumerate(heights)]
    results = []
    for rank in range(count):
        highest = -math.inf
        for first in range(rank + 1):
            means = [fmean(offsets[first:stop]) for stop in range(rank + 1, count + 1)]
            highest = max(highest, min(means))
        results.append(rank * gap + highest)
    return results
