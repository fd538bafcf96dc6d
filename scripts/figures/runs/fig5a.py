"""Figure 5a: movement of query and key weights in training, against depth, at two alpha_L."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scripts.figures import panels
from scripts.figures.result import Data, Figure, Row, Settings, exponent, settings_of

if TYPE_CHECKING:
    import matplotlib.figure


def measure(settings: Settings, work: Path) -> dict[str, Any]:
    """Train models and measure how far their query and key weights move.

    Returns:
        `moved` [rule, step, depth, seeds], the root mean square change of query and key entries of
        all layers together.
    """
    del work
    import dataclasses

    from mupax.presets import Role
    from scripts.figures import training

    rules = settings["rules"]
    steps = settings["at"]
    depths = settings["depth"]
    moved = np.zeros((len(rules), len(steps), len(depths), settings["seeds"]))
    batches = None
    for column, depth in enumerate(depths):
        trainer = None
        for row, rule in enumerate(rules):
            config = training.vit(depth=depth, steps=max(steps), **settings["model"], **rule)
            if trainer is None or trainer.program.config.model != config.model:
                trainer = training.Trainer(config, batches)
                batches = trainer.batches
            trainer.ends = 2 ** (2 * rule["alpha_l"] - 1)
            names = trainer.names(Role.QUERY, Role.KEY)

            def change(snapshot: training.Snapshot, names: list[str] = names) -> float:
                squares = []
                for name in names:
                    difference = np.asarray(snapshot.params[name] - snapshot.start[name])
                    squares.append(np.mean(np.square(difference)))
                return float(np.sqrt(np.mean(squares)))

            for seed in range(settings["seeds"]):
                run = dataclasses.replace(config, seed=seed)
                _, observed = trainer.train(run, at=steps, look=change)
                moved[row, :, column, seed] = observed
    return {"moved": moved}


def rows(settings: Settings, data: Data) -> list[Row]:
    """Compare the movement's exponent in the depth with alpha_L - 1, for all rules and times."""
    table = []
    for rule, of_rule in zip(settings["rules"], np.asarray(data["moved"]), strict=True):
        name = f"alpha_L = {rule['alpha_l']:g}, beta0 = {rule['beta0']:g}"
        for step, moved in zip(settings["at"], of_rule, strict=True):
            table.append(
                exponent(
                    f"change of query and key entries against L after {step} steps, {name}",
                    settings["depth"],
                    moved,
                    predicted=rule["alpha_l"] - 1,
                    tolerance=0.15,
                )
            )
    return table


def draw(settings: Settings, data: Data) -> matplotlib.figure.Figure:
    """Draw a panel for every training time with a line for every rule."""
    moved = np.asarray(data["moved"])
    title = "Figure 5a: movement of query and key weights against depth"
    figure, axes = panels.row(len(settings["at"]), title)
    for index, (panel, step) in enumerate(zip(axes, settings["at"], strict=True)):
        of_step = moved[:, index]
        for color, rule, values in zip(panels.COLORS, settings["rules"], of_step, strict=False):
            slope = rule["alpha_l"] - 1
            exponents = rf"$\alpha_L$ = {rule['alpha_l']:g}, $\beta_0$ = {rule['beta0']:g}"
            name = f"{exponents} (predicted {slope:+g})"
            panels.power_law(panel, settings["depth"], values, name, color=color, predicted=slope)
        title = f"After {step} steps"
        panels.label(panel, title, "depth L", "root mean square change", legend=True)
    return figure


FIGURE = Figure(
    title="Figure 5a: movement of query and key weights against depth",
    source="figure 5 of Bordelon, Chaudhry and Pehlevan 2024 (arXiv 2405.15712)",
    about="Root mean square change of the query and key weights of Bordelon et al.'s ViT with L "
    "blocks under SGD with momentum. With branches times beta0/L^alpha_L the change is "
    "predicted to scale as L^(alpha_L - 1).\n\n"
    "The mean is over all layers together. The models are trained by SGD with momentum on "
    "the endless image set (the paper: CIFAR-5M). At alpha_L = 1 the limit needs L well "
    "above beta0 squared: before training, independent layers add about beta0²/L to the "
    "variance of the residual stream, and LayerNorm divides all gradients by the root of "
    "this variance. So beta0 = 2 is measured in addition to the paper's 12.",
    **settings_of(__name__),
    measure=measure,
    rows=rows,
    draw=draw,
)
