"""Transfer studies of the figures, judged and drawn as `mupax transfer` does."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mupax.train.studies.transfer.drift import TOLERANCE, Analysis, analyse
from mupax.train.studies.transfer.fit import Curve
from scripts.figures import panels
from scripts.figures.result import Data, Row

if TYPE_CHECKING:
    import matplotlib.figure

    from mupax.train.config.run import Config

AROUND = 1.5
"""Octaves to each side of a curve's best learning rate that a panel's loss axis must show."""
DIVERGED = -1.0
"""Loss of a diverged run in a record, because JSON has no infinity.

A run that was not made has null.
"""


def measure(
    configs: Mapping[str, Sequence[Config]],
    sizes: Sequence[int],
    limits: Mapping[str, Any],
    work: Path,
) -> dict[str, Any]:
    """Train every study at many learning rates, as `mupax transfer` does.

    A study is a set of runs that differ in one size, such as the runs under one preset.

    Args:
        configs: Name of a study to the run config of each size.
        sizes: Sizes [sizes], ascending.
        limits: Keyword arguments of `mupax.train.studies.transfer.study.measure`, such as `seeds`.
        work: Folder in which finished runs are kept.

    Returns:
        Name of a study to a dictionary: the reason why it `stopped`, and lists over sizes with log2
        of the learning rates `x` [rates], the training `losses` [rates][seeds], and the number of
        seeds `first` that the rates were chosen on.
    """
    from mupax.train.studies.sweep import sweep
    from mupax.train.studies.transfer import study as transfer

    studies = []
    for name, grown in configs.items():
        studies.append(
            transfer.Study(label=name, axis="size", sizes=tuple(sizes), configs=tuple(grown))
        )
    # The figures compare training losses.
    engine = sweep.Sweep(work, evaluated=False)
    records = {}
    for measured in transfer.measure(studies, engine.run, **limits):
        records[measured.study.label] = {
            "stopped": measured.stopped,
            **_record(measured, len(sizes)),
        }
    return records


def _record(measured: Any, num_sizes: int) -> dict[str, Any]:
    """Return `x`, `losses` and `first` of a measured study for the record (see `measure`)."""
    log2_rates = []
    losses = []
    first = []
    for index in range(num_sizes):
        curve = measured.curve(index)
        by_rate = []
        for of_seeds in curve.losses:
            by_rate.append([kept_loss(loss) for loss in of_seeds])
        log2_rates.append(curve.x)
        losses.append(by_rate)
        first.append(curve.first)
    return {"x": log2_rates, "losses": losses, "first": first}


def kept_loss(loss: float) -> float | None:
    """Return a loss for a record: `None` if it was not measured, `DIVERGED` if it is infinite."""
    if math.isnan(loss):
        return None
    return loss if math.isfinite(loss) else DIVERGED


def curves(of_study: Data) -> list[Curve]:
    """Return the loss curves of a study, one per size.

    Args:
        of_study: Dictionary that `measure` returned for the study.
    """
    by_size = []
    for x, losses, first in zip(of_study["x"], of_study["losses"], of_study["first"], strict=True):
        stored = np.array(losses, float)
        with_infinity = np.where(stored == DIVERGED, math.inf, stored)
        by_size.append(Curve(np.array(x, float), with_infinity, first))
    return by_size


def row(description: str, sizes: Sequence[int], of_study: Data, **fields: Any) -> Row:
    """Return the row of the drift of a study's best learning rate.

    The drift is in octaves per doubling of the size.

    Args:
        of_study: What `measure` returned for the study.
        fields: Further fields of `Row`.
    """
    analysis = analyse(sizes, curves(of_study))
    note = (
        f"From {analysis.seeds} paired seeds; at {sizes[-1]} the best learning rate of {sizes[0]} "
        f"{price_words(analysis)}."
    )
    drift = analysis.drift
    band = {"tolerance": TOLERANCE, "note": note, **fields}
    return Row(what=description, measured=drift.value, low=drift.low, high=drift.high, **band)


def price_words(analysis: Analysis) -> str:
    """Return in words how much loss the smallest size's best rate costs at the largest size."""
    price = analysis.prices[-1].value
    if math.isfinite(price):
        return f"costs {price:.2g} nats"
    return "diverges or lies outside the grid"


def draw(title: str, size: str, sizes: Sequence[int], data: Data) -> matplotlib.figure.Figure:
    """Draw a panel for every study with a curve for every size, all on the same loss axis.

    Args:
        size: Name of the size that grows, which titles the legend.
        sizes: Sizes [sizes], ascending.
        data: What `measure` returned.
    """
    from mupax.train.studies.transfer import figure as transfer_figure

    figure, axes = panels.row(len(data), title)
    every_curve: list[Curve] = []
    for panel, (name, of_study) in zip(axes, data.items(), strict=True):
        study_curves = curves(of_study)
        every_curve += study_curves
        analysis = analyse(sizes, study_curves)
        transfer_figure.draw_study(panel, analysis, study_curves)
        panel_title = f"{name}\n{transfer_figure.drift_words(analysis)}"
        loss_name = "training loss (nats)" if panel is axes[0] else ""
        panels.label(panel, panel_title, "learning rate", loss_name)
    low, high = near(every_curve)
    for panel in axes:
        panel.set_ylim(low, high)
    axes[-1].legend(title=size, frameon=False, fontsize=9)
    return figure


def near(curves: Sequence[Curve]) -> tuple[float, float]:
    """Return limits of a loss axis that show every curve within `AROUND` octaves of its minimum."""
    near_losses = []
    for curve in curves:
        mean = np.nanmean(curve.losses, axis=1)
        is_finite = np.isfinite(mean)
        best = curve.x[int(np.argmin(np.where(is_finite, mean, np.inf)))]
        near_losses.extend(mean[is_finite & (np.abs(curve.x - best) <= AROUND)])
    low = 0.0
    high = 1.0
    if near_losses:
        low = min(near_losses)
        high = max(near_losses)
    # Equal losses need some room around them, too.
    pad = 0.06 * (high - low) or 0.1
    return low - pad, high + pad
