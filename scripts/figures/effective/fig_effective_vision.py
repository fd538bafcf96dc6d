"""Figures 1 and 2 of Dinan, Yaida and Zhang 2023 on a ViT that a CPU can train.

The figures search the learning rate and the weight decay of every strategy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mupax.train.studies.transfer.drift import analyse
from mupax.train.studies.transfer.fit import Curve
from scripts.figures import panels, rates
from scripts.figures.effective import excess, strategies
from scripts.figures.result import Data, Figure, Row, Settings, settings_of

if TYPE_CHECKING:
    import matplotlib.figure
    from matplotlib.axes import Axes

    from mupax.train.config.run import Config

NEAR = {"hidden rate": 0.5, "decay": 1.0}
"""Axis of the grid to half a step of it in octaves. Smaller differences count as none."""
PAPER = {
    "hidden rate": {"ntk": -0.1, "hybrid": 0.0, "maximal-update": -0.9},
    "decay": {"ntk": 0.1, "hybrid": 0.0, "maximal-update": -0.1},
}
"""Axis of the grid to the octaves from standard's best to a strategy's best in the paper.

They follow from the paper's best (lr, wd) at n = 768 on a grid of about an octave: (1e-3, 0.8),
(20, 4e-5), (4, 2e-4) and (0.4, 1e-3).
"""
PAPER_TOP_1 = {"standard": 80.7, "ntk": 80.9, "hybrid": 81.0, "maximal-update": 80.5}
"""Top-1 accuracy of every strategy in the paper, in percent."""
SHOWN = 0.6
"""Nats above a strategy's least loss at which the colours of its panel end."""


def config(settings: Settings, strategy: str, hidden: float, decay: float, seed: int) -> Config:
    """Return the run config of one point of the grid.

    Args:
        strategy: Name in `strategies.MAP`.
        hidden: Hidden rate `h`, see `strategies`.
        decay: Weight decay under `standard`. Other strategies have the weight decay that keeps the
            product of learning rate and weight decay.
        seed: Seed of the initialization. All points see the same batches.
    """
    from mupax.train.config.run import Config, DataConfig, OptimizerConfig
    from mupax.zoo import configs

    model = replace(configs.get("vit-tiny"), **settings["model"])
    assert isinstance(model, configs.ViTConfig)
    lr = strategies.peak_lr(strategy, model.width, hidden)
    return Config(
        recipe="figure",
        model=model,
        data=DataConfig(seed=0, **settings["data"]),
        preset=strategies.vision(strategy, model.sizes()["patch"]),
        optimizer=OptimizerConfig(
            name="adamw", peak_lr=lr, weight_decay=decay * hidden / lr, **settings["optimizer"]
        ),
        steps=settings["steps"],
        seed=seed,
    )


def measure(settings: Settings, work: Path) -> dict[str, Any]:
    """Train the grid of every strategy.

    Returns:
        Strategy to a dictionary with log2 of the hidden rates `x` [rates] and the `losses` on test
        images [decays][rates][seeds], in nats.
    """
    from mupax.train.studies.sweep.sweep import Sweep

    engine = Sweep(work)
    seeds = range(settings["seeds"])
    by_strategy = {}
    for strategy, (low, high) in settings["grid"].items():
        log2_rates = [float(rate) for rate in range(low, high + 1)]
        configs = []
        for decay, rate, seed in itertools.product(settings["decay"], log2_rates, seeds):
            configs.append(config(settings, strategy, 2.0**rate, 2.0**decay, seed))
        losses = []
        for row in engine.run(configs):
            # A run that diverged has no evaluation.
            loss = math.inf if row.eval_loss is None else row.eval_loss
            losses.append(rates.kept_loss(loss))
        shape = (len(settings["decay"]), len(log2_rates), len(seeds))
        by_strategy[strategy] = {
            "x": log2_rates,
            # An array of objects keeps the `None` of a run that was not made.
            "losses": np.array(losses, object).reshape(shape).tolist(),
        }
    return by_strategy


def surface(of_strategy: Data) -> np.ndarray:
    """Return losses [decays, rates, seeds] of a strategy, infinite where a run diverged."""
    losses = np.array(of_strategy["losses"], float)
    return np.where(losses == rates.DIVERGED, np.inf, losses)


def through_best(settings: Settings, of_strategy: Data) -> dict[str, Curve]:
    """Return the curves of loss through a strategy's best point, by the axes of `NEAR`.

    One curve is against the hidden rate at the best decay, the other against the decay at the best
    rate. The best point has the least mean loss over seeds.

    Args:
        of_strategy: What `measure` returned for the strategy.
    """
    losses = surface(of_strategy)
    seeds = settings["seeds"]
    decay, rate = np.unravel_index(np.argmin(losses.mean(axis=2)), losses.shape[:2])
    return {
        "hidden rate": Curve(np.array(of_strategy["x"], float), losses[decay], seeds),
        "decay": Curve(np.array(settings["decay"], float), losses[:, rate], seeds),
    }


def rows(settings: Settings, data: Data) -> list[Row]:
    """Compare the strategies' best learning rates, decays and losses with those of `standard`.

    A control uses a wrong map between learning rates. The last rows have what the next lower value
    of the grid costs. Rows without a finite estimate are left out.
    """
    curves = {}
    for strategy, of_strategy in data.items():
        curves[strategy] = through_best(settings, of_strategy)
    alternatives = [strategy for strategy in data if strategy != "standard"]
    table = []
    for axis in NEAR:
        table += [_best_apart(curves, strategy, axis) for strategy in alternatives]
    table.append(_through_wrong_map(settings, curves))
    table += [_price(settings, data, strategy) for strategy in alternatives]
    table += [_least_loss(curves, strategy) for strategy in alternatives]
    for strategy, by_axis in curves.items():
        table += [_sharpness(strategy, axis, curve) for axis, curve in by_axis.items()]
    return [row for row in table if math.isfinite(row.measured)]


Curves = Mapping[str, Mapping[str, Curve]]
"""Strategy to its curves of `through_best`."""


def _best_apart(curves: Curves, strategy: str, axis: str) -> Row:
    """Return the row of the octaves from standard's best value to a strategy's, predicted as 0.

    Args:
        axis: Axis of the grid, `hidden rate` or `decay`.
    """
    analysis = analyse((1, 2), [curves["standard"][axis], curves[strategy][axis]])
    trouble = next((fit.trouble for fit in analysis.fits if fit.trouble), "")
    note = f"The paper's own best: {PAPER[axis][strategy]:+.1f}."
    if trouble:
        note = f"{trouble.capitalize()}. {note}"
    octaves = f"octaves from the best {axis} of standard to that of {strategy}"
    return Row(
        what=f"{octaves}, through the paper's map",
        measured=analysis.drift.value,
        low=analysis.drift.low,
        high=analysis.drift.high,
        predicted=0.0,
        tolerance=NEAR[axis],
        note=note,
    )


def _least_loss(curves: Curves, strategy: str) -> Row:
    """Return the row of a strategy's least loss less standard's."""
    standard = excess.least(curves["standard"]["hidden rate"])
    least = excess.least(curves[strategy]["hidden rate"])
    note = (
        f"{least.mean():.3f} and {standard.mean():.3f} nats; the paper's top-1: "
        f"{PAPER_TOP_1[strategy]} and {PAPER_TOP_1['standard']} %."
    )
    return excess.value(f"least loss, {strategy} minus standard", least - standard, note=note)


def _sharpness(strategy: str, axis: str, curve: Curve) -> Row:
    """Return the row of the loss one step of the grid below the best value, less the least loss.

    Args:
        axis: Axis of the grid, `hidden rate` or `decay`.
        curve: Losses along this axis, through the strategy's best point.
    """
    octaves = curve.gap
    below = excess.excess(curve, octaves)
    above = excess.excess(curve, -octaves)
    return excess.value(
        f"loss {octaves:g} octaves below the best {axis} less the least, {strategy}",
        below,
        note=f"As far above it: {above.mean():.3f} nats.",
    )


def _through_wrong_map(settings: Settings, curves: Curves) -> Row:
    """Return the row of a control: octaves from standard's best hidden rate to ntk's.

    Here ntk's hidden rate is wrong on purpose: it follows from its learning rate by the rule of
    maximal update. So the octaves must not be 0.
    """
    standard = curves["standard"]["hidden rate"]
    ntk = curves["ntk"]["hidden rate"]
    # That map's power of n is lower by 1/2, so the best rate must lie elsewhere.
    power = strategies.MAP["ntk"] - strategies.MAP["maximal-update"]
    octaves = power * math.log2(settings["model"]["width"])
    analysis = analyse((1, 2), [standard, replace(ntk, x=ntk.x + octaves)])
    return Row(
        what="octaves from the best hidden rate of standard to that of ntk, "
        "through maximal update's map",
        measured=analysis.drift.value,
        low=analysis.drift.low,
        high=analysis.drift.high,
        predicted=0.0,
        tolerance=NEAR["hidden rate"],
        control=True,
    )


def _price(settings: Settings, data: Data, strategy: str) -> Row:
    """Return the row of a strategy's loss at standard's best point, less its loss at its own best.

    A point is a hidden rate and a decay. The estimate is NaN if the strategy's grid does not have
    standard's best point.
    """
    losses = surface(data[strategy])
    log2_rates = data[strategy]["x"]
    place = "the best rate and decay of standard, through the map"
    description = f"loss of {strategy} at {place}, less its least"
    standard_rate, standard_decay = _best_point(settings, data["standard"])
    own_rate, own_decay = _best_point(settings, data[strategy])
    if standard_rate not in log2_rates:
        return Row(
            what=description,
            measured=math.nan,
            low=math.nan,
            high=math.nan,
            kind="value",
            note="Outside its grid.",
        )
    # A point of the grid is the same (h, d) for all strategies, so the map needs no arithmetic.
    mapped = losses[settings["decay"].index(standard_decay), log2_rates.index(standard_rate)]
    best = losses[settings["decay"].index(own_decay), log2_rates.index(own_rate)]
    return excess.value(description, mapped - best)


def draw(settings: Settings, data: Data) -> matplotlib.figure.Figure:
    """Draw a map of losses over hidden rate and decay for every strategy.

    A frame marks the strategy's best point, and a dashed frame marks standard's.
    """
    figure, axes = panels.row(
        len(data), "A ViT on digits: loss above each strategy's least", height=3.9
    )
    standard = _best_point(settings, data["standard"])
    for panel, (strategy, of_strategy) in zip(axes, data.items(), strict=True):
        own_best = _best_point(settings, of_strategy)
        _draw_surface(panel, settings, of_strategy, own_best, standard)
        least = surface(of_strategy).mean(axis=2).min()
        title = f"{strategy}: least {least:.2f} nats"
        panels.label(panel, title, "hidden rate h", "decay over h" if panel is axes[0] else "")
    return figure


def _best_point(settings: Settings, of_strategy: Data) -> tuple[float, float]:
    """Return log2 of the hidden rate and of the decay with the least mean loss over seeds."""
    losses = surface(of_strategy).mean(axis=2)
    decay, rate = np.unravel_index(np.argmin(losses), losses.shape)
    return of_strategy["x"][rate], settings["decay"][decay]


def _draw_surface(
    axes: Axes,
    settings: Settings,
    of_strategy: Data,
    own_best: Sequence[float],
    standard: Sequence[float],
) -> None:
    """Draw a strategy's map of mean losses above its least, with both best points.

    Args:
        own_best: log2 of the hidden rate and the decay of the strategy's best point.
        standard: log2 of the hidden rate and the decay of standard's best point.
    """
    from matplotlib.patches import Rectangle

    x = of_strategy["x"]
    decays = settings["decay"]
    losses = surface(of_strategy).mean(axis=2)
    above = losses - losses.min()
    # Half the size of a cell of the map.
    half_x = 0.5
    half_y = (decays[1] - decays[0]) / 2
    extent = (x[0] - half_x, x[-1] + half_x, decays[0] - half_y, decays[-1] + half_y)
    axes.grid(False)
    axes.imshow(
        above, origin="lower", extent=extent, aspect="auto", cmap="Blues", vmin=0, vmax=SHOWN
    )
    for (row, column), value in np.ndenumerate(above):
        text = f"{value:.2f}" if np.isfinite(value) else "div."
        color = "white" if value > SHOWN * 0.6 else "#222222"
        axes.text(x[column], decays[row], text, ha="center", va="center", fontsize=7, color=color)
    for (rate, decay), style in ((own_best, "-"), (standard, "--")):
        if x[0] <= rate <= x[-1]:
            # Frames are a little smaller than the cell, so that neighbours do not overlap.
            frame = Rectangle(
                (rate - half_x * 0.94, decay - half_y * 0.94),
                1.88 * half_x,
                1.88 * half_y,
                fill=False,
                lw=1.8,
                ls=style,
                ec=panels.COLORS[1],
            )
            axes.add_patch(frame)
    axes.set_xticks(x, [f"$2^{{{rate:g}}}$" for rate in x])
    axes.set_yticks(decays, [f"$2^{{{decay:g}}}$" for decay in decays])


FIGURE = Figure(
    title="The effective theory's figures 1 and 2: learning rate and weight decay of a ViT",
    source="figures 1 and 2 of Dinan, Yaida and Zhang 2023 (arXiv 2304.02034)",
    about="Loss on test images of a ViT of width 64 and depth 2 after 4.5 epochs of scikit-learn's "
    "digits under AdamW (the paper: ViT-B/16). The paper maps learning rates of `standard` to "
    "those of three other strategies. This map is predicted to take the best rate of `standard` to "
    "the best of each strategy.\n\n"
    "The grid's point (h, d) is (lr, wd) under standard, and (lr, wd) = (h n^(3/2 - s/2), d "
    "n^-(3/2 - s/2)) under the others. Hidden matrices, patches and positions start alike "
    "everywhere. The paper found the best of standard, ntk and hybrid at one point of the "
    "grid, and the best of maximal update an octave of h lower. Here 4.5 epochs need no "
    "decay: except under standard, the least loss is at the lowest decay of the grid, and a "
    "best decay at the end of the grid has no row.",
    **settings_of(__name__),
    measure=measure,
    rows=rows,
    draw=draw,
    keeps_runs=True,
)
