"""A picture of what an image model takes test images for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mupax.train.data import Data
from mupax.train.run.report import plotting

_GRID = (8, 5)
"""Columns and rows of the picture of predictions."""
_CELL = 1.28
"""Height of its cells over their width."""
_IMAGES = 512
"""Test images that are looked at."""


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
        for parts, array in zip(shown.values(), (batch["inputs"], batch["targets"], predictions), strict=True):
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

    images, targets, predictions = np.asarray(images, np.float32), np.asarray(targets), np.asarray(predictions)
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
        axes.imshow(picture, extent=extent, cmap="gray", vmin=0, vmax=1, interpolation="nearest", aspect="equal")
        label, color, weight = _class_name(class_names, int(predictions[index])), plotting.INK, "normal"
        if not right[index]:
            truth = _class_name(class_names, int(targets[index]))
            label = f"{label}, is {truth}" if len(label + truth) <= 8 else f"{label},\nis {truth}"
            color, weight = plotting.ORANGE, "bold"
            axes.add_patch(Rectangle((left + 0.06, top + 0.06), 0.88, 0.88, fill=False, edgecolor=color, linewidth=2.5))
        axes.text(left + 0.5, top + 1.0, label, ha="center", va="top", fontsize=7.5, color=color, fontweight=weight)
    axes.set(xlim=(0, width), ylim=(height - 0.4, -0.4))  # After imshow, which moves them.
    marked = "; framed: wrong, with the true class" if len(wrong_first) else ""
    heading = f"{right.sum():,} of {len(right):,} right ({100 * right.mean():.1f} %){marked}"
    axes.text(0.06, -0.14, heading, va="center", fontsize=9, color=plotting.INK)
    figure.savefig(out_png)


def _class_name(names: Sequence[str] | None, index: int) -> str:
    # ImageNet's names are lists of synonyms.
    name = str(index) if names is None else names[index].split(",")[0]
    return name if len(name) <= 12 else f"{name[:11]}…"
