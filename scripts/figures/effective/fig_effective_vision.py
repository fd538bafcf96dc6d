"""Figures 1 and 2 of Dinan, Yaida and Zhang 2023 on a ViT that a CPU can train: the search over learning rate and weight decay."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
"""Octaves that count as the same place: half a step of the grid."""
PAPER = {
    "hidden rate": {"ntk": -0.1, "hybrid": 0.0, "maximal-update": -0.9},
    "decay": {"ntk": 0.1, "hybrid": 0.0, "maximal-update": -0.1},
}
"""The same from the paper's best (lr, wd), at n = 768, on a grid of about an octave: (1e-3, .8), (20, 4e-5), (4, 2e-4), (.4, 1e-3)."""
SHOWN = 0.6
"""Nats above a strategy's least loss at which the colours of its panel end."""


def config(settings: Settings, strategy: str, hidden: float, decay: float, seed: int) -> Config:
    """The run of one point.

    Args:
        settings: of the figure.
        strategy: a key of `strategies.MAP`.
        hidden: rate of hidden matrices.
        decay: weight decay over that rate, as `standard` has it.
        seed: of the initialization; all points see the same batches.
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
    """Per strategy rates `x` and decays, both as log2, and the losses on test images [decays][rates][seeds]."""
    from mupax.train.studies.sweep.sweep import Sweep

    engine, by_strategy = Sweep(work), {}
    for strategy, (low, high) in settings["grid"].items():
        x, seeds = [float(one) for one in range(low, high + 1)], range(settings["seeds"])
        points = [(decay, one, seed) for decay in settings["decay"] for one in x for seed in seeds]
        rows = engine.run(
            [config(settings, strategy, 2.0**one, 2.0**decay, seed) for decay, one, seed in points]
        )
        losses = [
            rates.kept_loss(math.inf if row.eval_loss is None else row.eval_loss) for row in rows
        ]
        shape = len(settings["decay"]), len(x), len(seeds)
        by_strategy[strategy] = {"x": x, "losses": np.array(losses, object).reshape(shape).tolist()}
    return by_strategy


def surface(of_strategy: Data) -> np.ndarray:
    """Losses [decays, rates, seeds], inf where a run diverged."""
    losses = np.array(of_strategy["losses"], float)
    return np.where(losses == rates.DIVERGED, np.inf, losses)


def through_best(settings: Settings, of_strategy: Data) -> dict[str, Curve]:
    """Loss against the hidden rate at the best decay, and against the decay at the best rate, by the seeds' means.

    Args:
        settings: of the figure.
        of_strategy: what `measure` kept of it.
    """
    losses, seeds = surface(of_strategy), settings["seeds"]
    decay, rate = np.unravel_index(np.argmin(losses.mean(axis=2)), losses.shape[:2])
    return {
        "hidden rate": Curve(np.array(of_strategy["x"], float), losses[decay], seeds),
        "decay": Curve(np.array(settings["decay"], float), losses[:, rate], seeds),
    }


def rows(settings: Settings, data: Data) -> list[Row]:
    """Where each strategy's best rate and decay lie beside standard's, through the paper's map; what the map costs; how sharp they are."""
    curves = {
        strategy: through_best(settings, of_strategy) for strategy, of_strategy in data.items()
    }
    alternatives = [strategy for strategy in data if strategy != "standard"]
    table = [_apart(settings, curves, strategy, of) for of in NEAR for strategy in alternatives]
    table.append(_through_wrong_map(settings, curves))
    for strategy in alternatives:
        table.append(_price(settings, data, strategy))
    least = {strategy: excess.least(of["hidden rate"]) for strategy, of in curves.items()}
    paper = {"standard": 80.7, "ntk": 80.9, "hybrid": 81.0, "maximal-update": 80.5}
    for strategy in alternatives:
        note = f"{least[strategy].mean():.3f} and {least['standard'].mean():.3f} nats; the paper's top-1: {paper[strategy]} and 80.7 %."
        table.append(
            excess.value(
                f"least loss, {strategy} minus standard",
                least[strategy] - least["standard"],
                note=note,
            )
        )
    for strategy, of in curves.items():
        for which, curve in of.items():
            octaves = curve.gap
            below, above = (excess.excess(curve, sign * octaves) for sign in (1, -1))
            table.append(
                excess.value(
                    f"loss {octaves:g} octaves below the best {which} less the least, {strategy}",
                    below,
                    note=f"As far above it: {above.mean():.3f} nats.",
                )
            )
    return [row for row in table if math.isfinite(row.measured)]


def _apart(settings: Settings, curves: Any, strategy: str, of: str) -> Row:
    """Octaves from standard's best hidden rate, or decay, to a strategy's."""
    analysis = analyse((1, 2), [curves["standard"][of], curves[strategy][of]])
    trouble = next((fit.trouble for fit in analysis.fits if fit.trouble), "")
    paper_best = PAPER[of][strategy]
    return Row(
        what=f"octaves from the best {of} of standard to that of {strategy}, through the paper's map",
        measured=analysis.drift.value,
        low=analysis.drift.low,
        high=analysis.drift.high,
        predicted=0.0,
        tolerance=NEAR[of],
        note=f"{trouble.capitalize()}. " * bool(trouble)
        + f"The paper's own best: {paper_best:+.1f}.",
    )


def _through_wrong_map(settings: Settings, curves: Any) -> Row:
    """The same of ntk through the map of maximal update, whose power of n is lower by 1/2: it must be elsewhere."""
    standard, ntk = (curves[strategy]["hidden rate"] for strategy in ("standard", "ntk"))
    octaves = (strategies.MAP["ntk"] - strategies.MAP["maximal-update"]) * math.log2(
        settings["model"]["width"]
    )
    analysis = analyse((1, 2), [standard, replace(ntk, x=ntk.x + octaves)])
    return Row(
        what="octaves from the best hidden rate of standard to that of ntk, through maximal update's map",
        measured=analysis.drift.value,
        low=analysis.drift.low,
        high=analysis.drift.high,
        predicted=0.0,
        tolerance=NEAR["hidden rate"],
        control=True,
    )


def _price(settings: Settings, data: Data, strategy: str) -> Row:
    """What standard's best (rate, decay), taken through the map, costs under a strategy over its own best."""
    losses = surface(data[strategy])
    what = f"loss of {strategy} at the best rate and decay of standard, through the map, less its least"
    (rate, decay), own = (_least_at(settings, data[name]) for name in ("standard", strategy))
    if rate not in data[strategy]["x"]:
        return Row(
            what=what,
            measured=math.nan,
            low=math.nan,
            high=math.nan,
            kind="value",
            note="Outside its grid.",
        )
    mapped, best = (
        losses[settings["decay"].index(at[1]), data[strategy]["x"].index(at[0])]
        for at in ((rate, decay), own)
    )
    return excess.value(what, mapped - best)


def draw(settings: Settings, data: Data) -> matplotlib.figure.Figure:
    """A map of losses per strategy over hidden rate and decay; a ring on its least, a dashed one on standard's best."""
    figure, axes = panels.row(
        len(data), "A ViT on digits: loss above each strategy's least", height=3.9
    )
    best = {strategy: _least_at(settings, of_strategy) for strategy, of_strategy in data.items()}
    for one, (strategy, of_strategy) in zip(axes, data.items(), strict=True):
        _draw_surface(one, settings, of_strategy, best[strategy], best["standard"])
        least = surface(of_strategy).mean(axis=2).min()
        panels.label(
            one,
            f"{strategy}: least {least:.2f} nats",
            "hidden rate h",
            "decay over h" if one is axes[0] else "",
        )
    return figure


def _least_at(settings: Settings, of_strategy: Data) -> tuple[float, float]:
    """log2 of the hidden rate and the decay with the least mean loss."""
    losses = surface(of_strategy).mean(axis=2)
    decay, rate = np.unravel_index(np.argmin(losses), losses.shape)
    return of_strategy["x"][rate], settings["decay"][decay]


def _draw_surface(
    axes: Axes,
    settings: Settings,
    of_strategy: Data,
    own: Sequence[float],
    standard: Sequence[float],
) -> None:
    from matplotlib.patches import Rectangle

    x, decay, losses = of_strategy["x"], settings["decay"], surface(of_strategy).mean(axis=2)
    above = losses - losses.min()
    half, step = 0.5, (decay[1] - decay[0]) / 2
    sides = (x[0] - half, x[-1] + half, decay[0] - step, decay[-1] + step)
    axes.grid(False)
    axes.imshow(
        above, origin="lower", extent=sides, aspect="auto", cmap="Blues", vmin=0, vmax=SHOWN
    )
    for (row, column), value in np.ndenumerate(above):
        text = f"{value:.2f}" if np.isfinite(value) else "div."
        color = "white" if value > SHOWN * 0.6 else "#222222"
        axes.text(x[column], decay[row], text, ha="center", va="center", fontsize=7, color=color)
    for place, style in ((own, "-"), (standard, "--")):
        if x[0] <= place[0] <= x[-1]:
            corner = (place[0] - half * 0.94, place[1] - step * 0.94)
            axes.add_patch(
                Rectangle(
                    corner,
                    1.88 * half,
                    1.88 * step,
                    fill=False,
                    lw=1.8,
                    ls=style,
                    ec=panels.COLORS[1],
                )
            )
    axes.set_xticks(x, [f"$2^{{{one:g}}}$" for one in x])
    axes.set_yticks(decay, [f"$2^{{{one:g}}}$" for one in decay])


FIGURE = Figure(
    title="The effective theory's figures 1 and 2: learning rate and weight decay of a ViT",
    source="figures 1 and 2 of Dinan, Yaida and Zhang 2023 (arXiv 2304.02034): ViT-B/16 on ImageNet-1k under four strategies",
    about="Loss on test images of a ViT of width 64 and depth 2 after 4.5 epochs of scikit-learn's "
    "digits under AdamW, on one grid of hidden rate h and decay d for all strategies. The "
    "grid's point (h, d) is (lr, wd) under standard, and (lr, wd) = (h n^(3/2 - s/2), d n^-(3/2 "
    "- s/2)) under the others. Hidden matrices, patches and positions start alike everywhere. "
    "The paper found the best of standard, ntk and hybrid at one point of the grid, and the "
    "best of maximal update an octave of h lower. Here 4.5 epochs need no decay: except under "
    "standard, the least loss is at the lowest decay of the grid, and a best decay at the end "
    "of the grid has no row.",
    **settings_of(__name__),
    measure=measure,
    rows=rows,
    draw=draw,
)  # fmt: skip
