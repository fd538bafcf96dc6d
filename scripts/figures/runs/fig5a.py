"""Figure 5a: how far query and key weights move in training, against depth, at alpha_L = 1/2 and 1."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scripts.figures import panels
from scripts.figures.result import Data, Figure, Row, Settings, exponent, settings_of

if TYPE_CHECKING:
    import matplotlib.figure


def measure(settings: Settings, work: Path) -> dict[str, Any]:
    """Root mean square change of query and key entries [alpha_L, step, depth, seeds], of all layers together."""
    del work
    import dataclasses

    from mupax.presets import Role
    from scripts.figures import training

    rules, steps, depths = settings["rules"], settings["at"], settings["depth"]
    moved = np.zeros((len(rules), len(steps), len(depths), settings["seeds"]))
    batches = None
    for column, depth in enumerate(depths):
        trainer = None
        for row, rule in enumerate(rules):
            ends = 2 ** (2 * rule["alpha_l"] - 1)
            config = training.vit(depth=depth, steps=max(steps), **settings["model"], **rule)
            if trainer is None or trainer.program.config.model != config.model:
                trainer = training.Trainer(config, batches)
                batches = trainer.batches
            trainer.ends = ends
            names = trainer.names(Role.QUERY, Role.KEY)

            def change(snapshot: training.Snapshot, names: list[str] = names) -> float:
                squares = [
                    np.mean(np.square(np.asarray(snapshot.params[name] - snapshot.start[name])))
                    for name in names
                ]
                return float(np.sqrt(np.mean(squares)))

            for seed in range(settings["seeds"]):
                run = dataclasses.replace(config, seed=seed)
                moved[row, :, column, seed] = trainer.train(run, at=steps, look=change)[1]
    return {"moved": moved}


def rows(settings: Settings, data: Data) -> list[Row]:
    """A slope per alpha_L and training time."""
    table = []
    for rule, moved in zip(settings["rules"], np.asarray(data["moved"]), strict=True):
        for step, one in zip(settings["at"], moved, strict=True):
            table.append(
                exponent(
                    f"change of query and key entries against L after {step} steps, {_name(rule)}",
                    settings["depth"],
                    one,
                    predicted=rule["alpha_l"] - 1,
                    tolerance=0.15,
                )
            )
    return table


def _name(rule: Settings) -> str:
    return f"alpha_L = {rule['alpha_l']:g}, beta0 = {rule['beta0']:g}"


def draw(settings: Settings, data: Data) -> matplotlib.figure.Figure:
    """A panel per training time."""
    moved = np.asarray(data["moved"])
    figure, axes = panels.row(
        len(settings["at"]), "Figure 5a: movement of query and key weights against depth"
    )
    for index, (one, step) in enumerate(zip(axes, settings["at"], strict=True)):
        for color, rule, values in zip(
            panels.COLORS, settings["rules"], moved[:, index], strict=False
        ):
            slope = rule["alpha_l"] - 1
            name = rf"$\alpha_L$ = {rule['alpha_l']:g}, $\beta_0$ = {rule['beta0']:g} (predicted {slope:+g})"
            panels.power_law(one, settings["depth"], values, name, color=color, predicted=slope)
        panels.label(one, f"After {step} steps", "depth L", "root mean square change", legend=True)
    return figure


FIGURE = Figure(
    title="Figure 5a: movement of query and key weights against depth",
    source="figure 5 of Bordelon, Chaudhry and Pehlevan 2024 (arXiv 2405.15712)",
    about="Root mean square change of query and key entries of the paper's ViT as depth grows at "
    "fixed width. The mean is over all layers together. The models are trained by SGD with "
    "momentum on the endless image set (the paper: CIFAR-5M). At alpha_L = 1 the limit needs L "
    "well above beta0 squared: before training, independent layers add about beta0²/L to the "
    "variance of the residual stream, and LayerNorm divides all gradients by the root of this "
    "variance. So beta0 = 2 is measured in addition to the paper's 12.",
    **settings_of(__name__),
    measure=measure,
    rows=rows,
    draw=draw,
)
