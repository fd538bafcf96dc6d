"""Figures of loss against learning rate: transfer studies, kept as numbers, judged and drawn as `mupax transfer` does."""

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
"""Octaves around each curve's best learning rate that a figure's axis of losses shows; its subject is where the minima lie."""
DIVERGED = -1.0
"""Stands in a record for the loss of a run that diverged, which JSON has no number for; null for a run that was not made."""


def measure(
    configs: Mapping[str, Sequence[Config]],
    sizes: Sequence[int],
    limits: Mapping[str, Any],
    work: Path,
) -> dict[str, Any]:
    """Find the best learning rate of every size.

    Args:
        configs: name of a study to a run per size.
        sizes: increasing.
        limits: as `mupax.train.studies.transfer.study.measure` has them.
        work: folder where points stay.

    Returns:
        Per study why it `stopped`, and per size the rates `x` (log2), the `losses` [rates][seeds] and how many seeds chose the
        rates, `first`.
    """
    from mupax.train.studies.sweep import sweep
    from mupax.train.studies.transfer import study as transfer

    studies = [
        transfer.Study(label=name, axis="size", sizes=tuple(sizes), configs=tuple(grown))
        for name, grown in configs.items()
    ]
    engine = sweep.Sweep(work, evaluated=False)
    measured = transfer.measure(studies, engine.run, **limits)
    return {
        one.study.label: {"stopped": one.stopped, **_record(one, len(sizes))} for one in measured
    }


def _record(measured: Any, sizes: int) -> dict[str, Any]:
    curves = [measured.curve(at) for at in range(sizes)]
    losses = [[[kept_loss(loss) for loss in rate] for rate in curve.losses] for curve in curves]
    return {
        "x": [curve.x for curve in curves],
        "losses": losses,
        "first": [curve.first for curve in curves],
    }


def kept_loss(loss: float) -> float | None:
    """A loss as a record has it: null where it was not measured, `DIVERGED` where it is not finite."""
    if math.isnan(loss):
        return None
    return loss if math.isfinite(loss) else DIVERGED


def curves(of_study: Data) -> list[Curve]:
    """What `measure` kept of a study."""
    by_size = []
    for x, losses, first in zip(of_study["x"], of_study["losses"], of_study["first"], strict=True):
        table = np.array(losses, float)
        by_size.append(
            Curve(np.array(x, float), np.where(table == DIVERGED, math.inf, table), first)
        )
    return by_size


def row(what: str, sizes: Sequence[int], of_study: Data, **more: Any) -> Row:
    """The drift of a study's best learning rate in octaves per doubling; `more` are fields of `Row`."""
    analysis = analyse(sizes, curves(of_study))
    price = analysis.prices[-1].value
    cost = (
        f"costs {price:.2g} nats" if math.isfinite(price) else "diverges or lies outside the grid"
    )
    note = f"From {analysis.seeds} paired seeds; at {sizes[-1]} the best learning rate of {sizes[0]} {cost}."
    drift = analysis.drift
    band = {"tolerance": TOLERANCE, "note": note, **more}
    return Row(what=what, measured=drift.value, low=drift.low, high=drift.high, **band)


def draw(title: str, size: str, sizes: Sequence[int], data: Data) -> matplotlib.figure.Figure:
    """A panel per study with shared axes, a curve per size; `size` is what grows."""
    from mupax.train.studies.transfer import figure as transfer_figure

    all_curves = {name: curves(of_study) for name, of_study in data.items()}
    analyses: dict[str, Analysis] = {
        name: analyse(sizes, some) for name, some in all_curves.items()
    }
    figure, axes = panels.row(len(analyses), title)
    for one, (name, analysis) in zip(axes, analyses.items(), strict=True):
        transfer_figure.draw_study(one, analysis, all_curves[name])
        words = f"{name}\n{transfer_figure.drift_words(analysis)}"
        panels.label(one, words, "learning rate", "training loss (nats)" if one is axes[0] else "")
    low, high = near([curve for some in all_curves.values() for curve in some])
    for one in axes:
        one.set_ylim(low, high)
    axes[-1].legend(title=size, frameon=False, fontsize=9)
    return figure


def near(curves: Sequence[Curve]) -> tuple[float, float]:
    """Limits of the losses near the minima."""
    near = []
    for curve in curves:
        mean = np.nanmean(curve.losses, axis=1)
        best = curve.x[int(np.argmin(np.where(np.isfinite(mean), mean, np.inf)))]
        near.extend(mean[np.isfinite(mean) & (np.abs(curve.x - best) <= AROUND)])
    low, high = (min(near), max(near)) if near else (0.0, 1.0)
    pad = 0.06 * (high - low) or 0.1
    return low - pad, high + pad
