"""Figure 4: distance of loss and logits from those of a model with many more heads, in training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scripts.figures import panels
from scripts.figures.result import Data, Figure, Row, Settings, exponent, settings_of

if TYPE_CHECKING:
    import matplotlib.figure


def measure(settings: Settings, work: Path) -> dict[str, Any]:
    """Train models, and measure their distance from models with many more heads.

    The reference is the mean over seeds of models with `limit` heads (from the settings).

    Returns:
        `logits` [step, H, seeds]: squared error of the logits, relative to the reference's mean
        square. `loss` [step, H, seeds]: squared error of the loss on the same images.
    """
    del work
    import dataclasses

    from scripts.figures import training

    steps = settings["at"]
    batches = None
    logits: dict[int, np.ndarray] = {}  # H to [seeds, step, B, classes]
    labels = np.zeros(0, int)
    for heads in [*settings["heads"], settings["limit"]]:
        config = training.vit(heads=heads, steps=max(steps), **settings["model"])
        trainer = training.Trainer(config, batches)
        batches = trainer.batches
        images = batches.probe(settings["images"])
        labels = batches.probe_targets(settings["images"])

        # The loop's names change before a later call, so the values are bound as defaults.
        def look(
            snapshot: training.Snapshot, trainer: training.Trainer = trainer, images: Any = images
        ) -> np.ndarray:
            return trainer.logits(snapshot, images)

        by_seed = []
        for seed in range(settings["seeds"]):
            run = dataclasses.replace(config, seed=seed)
            _, observed = trainer.train(run, at=steps, look=look)
            by_seed.append(observed)
        logits[heads] = np.array(by_seed)

    limit = logits[settings["limit"]].mean(0)  # [step, B, classes]
    logit_errors = []
    loss_errors = []
    for heads in settings["heads"]:
        squares = ((logits[heads] - limit) ** 2).mean((2, 3)) / (limit**2).mean((1, 2))
        logit_errors.append(squares.T)
        loss_difference = _loss(logits[heads], labels) - _loss(limit, labels)
        loss_errors.append((loss_difference**2).T)
    return {
        "logits": np.array(logit_errors).swapaxes(0, 1),
        "loss": np.array(loss_errors).swapaxes(0, 1),
    }


def _loss(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the mean cross-entropy [...] of logits [..., B, classes] and labels [B]."""
    top = logits.max(-1, keepdims=True)
    log_sum = np.log(np.exp(logits - top).sum(-1)) + top[..., 0]
    indices = np.broadcast_to(labels, logits.shape[:-1])[..., None]
    label_logits = np.take_along_axis(logits, indices, -1)[..., 0]
    return (log_sum - label_logits).mean(-1)


def rows(settings: Settings, data: Data) -> list[Row]:
    """Return rows with the exponents of the squared errors in H at every training time.

    Only the one of the logits at the first time has a prediction: -1.
    """
    table = []
    for index, step in enumerate(settings["at"]):
        for name in ("logits", "loss"):
            is_predicted = index == 0 and name == "logits"
            note = "" if is_predicted else "The paper has it fall more slowly later in training."
            table.append(
                exponent(
                    f"squared error of the {name} against H after {step} steps",
                    settings["heads"],
                    data[name][index],
                    predicted=-1.0 if is_predicted else None,
                    tolerance=0.15,
                    note=note,
                )
            )
    return table


def draw(settings: Settings, data: Data) -> matplotlib.figure.Figure:
    """Draw a panel for logits and one for the loss, with a line for every training time."""
    figure, (left, right) = panels.row(2, "Figure 4: errors against the number of heads")
    for panel, name, unit in (
        (left, "logits", "relative squared error"),
        (right, "loss", "squared error, nats²"),
    ):
        for color, step, values in zip(panels.COLORS, settings["at"], data[name], strict=False):
            panels.power_law(
                panel, settings["heads"], values, f"{step} steps", color=color, predicted=-1.0
            )
        title = f"{name.capitalize()}; dashed: slope -1"
        panels.label(panel, title, "heads H", unit, legend=True)
    return figure


FIGURE = Figure(
    title="Figure 4: errors of loss and logits against the number of heads",
    source="figure 4 of Bordelon, Chaudhry and Pehlevan 2024 (arXiv 2405.15712)",
    about="Squared error on new images of the centred outputs (outputs less initial outputs) of "
    "Bordelon et al.'s ViT with 4 to 32 heads, against the mean over seeds with 96 heads. After 5 "
    "steps the error is predicted to fall as 1/heads.\n\n"
    "The models are trained on the endless image set (the paper: CIFAR-5M). The limit "
    "itself can be computed ([presets.md](../concepts/presets.md#the-infinite-model)), but "
    "not at this size: every step has 64 new images of 16 positions, and the centred output "
    "reads them twice. These are 64 x 16 x (2 x 40 - 1) directions of a matrix in 40 steps, "
    "83,968 with the two looks, and their record needs a width of 336,000. [The infinite "
    "limit in time](#the-infinite-limit-in-time) compares with the limit itself on one "
    "batch of few images, and its slopes are near -1, too.",
    **settings_of(__name__),
    measure=measure,
    rows=rows,
    draw=draw,
)
