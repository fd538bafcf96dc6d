"""Figure 4: how far loss and logits of a model with H heads are from those of one with many more, in training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scripts.figures import panels
from scripts.figures.result import Data, Figure, Row, Settings, exponent, settings_of

if TYPE_CHECKING:
    import matplotlib.figure


def measure(settings: Settings, work: Path) -> dict[str, Any]:
    """Squared errors [step, H, seeds] of logits, relative to those of the many heads, and of the loss of the images.

    The limit is the mean over seeds of the logits with `limit` heads.
    """
    del work
    import dataclasses

    from scripts.figures import training

    steps, batches = settings["at"], None
    logits: dict[int, np.ndarray] = {}  # H to [seeds, step, B, classes]
    labels = np.zeros(0, int)
    for heads in [*settings["heads"], settings["limit"]]:
        config = training.vit(heads=heads, steps=max(steps), **settings["model"])
        trainer = training.Trainer(config, batches)
        batches = trainer.batches
        images, labels = (
            batches.probe(settings["images"]),
            batches.probe_targets(settings["images"]),
        )

        def look(
            snapshot: training.Snapshot, trainer: training.Trainer = trainer, images: Any = images
        ) -> np.ndarray:
            return trainer.logits(snapshot, images)

        runs = [dataclasses.replace(config, seed=seed) for seed in range(settings["seeds"])]
        logits[heads] = np.array([trainer.train(run, at=steps, look=look)[1] for run in runs])
    limit = logits[settings["limit"]].mean(0)  # [step, B, classes]
    logit_error, loss_error = [], []
    for heads in settings["heads"]:
        squares = ((logits[heads] - limit) ** 2).mean((2, 3)) / (limit**2).mean((1, 2))
        logit_error.append(squares.T)
        loss_error.append(((_loss(logits[heads], labels) - _loss(limit, labels)) ** 2).T)
    return {
        "logits": np.array(logit_error).swapaxes(0, 1),
        "loss": np.array(loss_error).swapaxes(0, 1),
    }


def _loss(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Mean cross-entropy of logits [..., B, classes]."""
    top = logits.max(-1, keepdims=True)
    log_sum = np.log(np.exp(logits - top).sum(-1)) + top[..., 0]
    return (
        log_sum
        - np.take_along_axis(logits, np.broadcast_to(labels, logits.shape[:-1])[..., None], -1)[
            ..., 0
        ]
    ).mean(-1)


def rows(settings: Settings, data: Data) -> list[Row]:
    """A slope of the logits per training time; the first is early."""
    table = []
    for index, step in enumerate(settings["at"]):
        for name in ("logits", "loss"):
            early = index == 0 and name == "logits"
            table.append(
                exponent(
                    f"squared error of the {name} against H after {step} steps",
                    settings["heads"],
                    data[name][index],
                    predicted=-1.0 if early else None,
                    tolerance=0.15,
                    note="" if early else "The paper has it fall more slowly later in training.",
                )
            )
    return table


def draw(settings: Settings, data: Data) -> matplotlib.figure.Figure:
    """Logits and loss, a line per training time."""
    figure, axes = panels.row(2, "Figure 4: errors against the number of heads")
    for one, name, unit in zip(
        axes, ("logits", "loss"), ("relative squared error", "squared error, nats²"), strict=True
    ):
        for color, step, values in zip(panels.COLORS, settings["at"], data[name], strict=False):
            panels.power_law(
                one, settings["heads"], values, f"{step} steps", color=color, predicted=-1.0
            )
        panels.label(one, f"{name.capitalize()}; dashed: slope -1", "heads H", unit, legend=True)
    return figure


FIGURE = Figure(
    title="Figure 4: errors of loss and logits against the number of heads",
    source="figure 4 of Bordelon, Chaudhry and Pehlevan 2024 (arXiv 2405.15712)",
    about="Errors of the centred logits of the paper's ViT with (L, N) = (2, 4), alpha_A = 1/2 and "
    "alpha_L = 1 on new images, against the mean over seeds with many more heads. The models "
    "are trained on the endless image set (the paper: CIFAR-5M). The limit itself can be "
    "computed ([dynamics.md](../concepts/dynamics.md)), but not at this size: every step has 64 "
    "new images of 16 positions, and the centred output reads them twice. These are 64 x 16 x "
    "(2 x 40 - 1) directions of a matrix in 40 steps, 83,968 with the two looks, and their "
    "record needs a width of 336,000. [The infinite limit in time](#the-infinite-limit-in-time) "
    "compares with the limit itself on one batch of few images, and its slopes are near -1, "
    "too.",
    **settings_of(__name__),
    measure=measure,
    rows=rows,
    draw=draw,
)  # fmt: skip
