"""Figure 2b: variance over heads of attention logits after training, against N."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scripts.figures import panels
from scripts.figures.result import Data, Figure, Row, Settings, exponent, settings_of, slope

if TYPE_CHECKING:
    import matplotlib.figure

CAPTION = {1.0: -2.0, 0.5: 0.0}
"""alpha_A to the exponent of N in the figure's caption."""
CENTRAL_LIMIT = {1.0: -1.0, 0.5: 0.0}
"""alpha_A to the exponent of N by the central limit theorem."""
TOLERANCE = 0.15


def measure(settings: Settings, work: Path) -> dict[str, Any]:
    """Train models and measure the variance of attention logits over heads.

    Returns:
        `variance` [gamma0, alpha_A, step, N, seeds]: variance over heads, averaged over layers,
        images and pairs of positions. `loss` [gamma0, alpha_A, N, seeds]: mean loss of the last 20
        steps.
    """
    del work
    import dataclasses

    from scripts.figures import training

    gammas = settings["gamma0"]
    alphas = settings["alpha_a"]
    steps = settings["at"]
    shape = (len(gammas), len(alphas), len(steps), len(settings["head_dim"]), settings["seeds"])
    variance = np.zeros(shape)
    loss = np.zeros(shape[:2] + shape[3:])
    batches = None
    for n, head_dim in enumerate(settings["head_dim"]):
        trainer = None
        for g, rule in enumerate(gammas):
            for a, alpha in enumerate(alphas):
                config = training.vit(
                    head_dim=head_dim, alpha_a=alpha, steps=max(steps), **rule, **settings["model"]
                )
                if trainer is None:
                    trainer = training.Trainer(config, batches)
                    batches = trainer.batches
                images = trainer.batches.probe(settings["images"])

                # The loop's names change before a later call, so the values are bound as defaults.
                def spread(
                    snapshot: training.Snapshot,
                    trainer: training.Trainer = trainer,
                    images: Any = images,
                ) -> float:
                    logits_LBHTS = trainer.internals(snapshot, images)["attention"]
                    return float(logits_LBHTS.var(axis=2, ddof=1).mean())

                for seed in range(settings["seeds"]):
                    run = dataclasses.replace(config, seed=seed)
                    losses, observed = trainer.train(run, at=steps, look=spread)
                    variance[g, a, :, n, seed] = observed
                    loss[g, a, n, seed] = losses[-20:].mean()
    return {"variance": variance, "loss": loss}


def rows(settings: Settings, data: Data) -> list[Row]:
    """Compare the variance's exponent in N with predictions, at all gamma0, alpha_A and steps.

    Predictions are those of `CAPTION` and `CENTRAL_LIMIT`, each with a row of its own.
    """
    table = []
    for rule, of_gamma in zip(settings["gamma0"], np.asarray(data["variance"]), strict=True):
        for alpha, of_alpha in zip(settings["alpha_a"], of_gamma, strict=True):
            models = f"alpha_A = {alpha:g}, gamma0 = {rule['gamma0']:g}"
            for step, variance in zip(settings["at"], of_alpha, strict=True):
                sources = {"central limit theorem": CENTRAL_LIMIT[alpha]}
                if step and CAPTION[alpha] != CENTRAL_LIMIT[alpha]:
                    sources["the figure's caption"] = CAPTION[alpha]
                note = ""
                if step:
                    note = _nearer_prediction(settings, variance, alpha)
                for source, predicted in sources.items():
                    table.append(
                        exponent(
                            f"variance over heads against N, {models}, after {step} steps",
                            settings["head_dim"],
                            variance,
                            predicted=predicted,
                            tolerance=TOLERANCE,
                            source=source,
                            note=note,
                        )
                    )
    return table


def _nearer_prediction(settings: Settings, variance: np.ndarray, alpha: float) -> str:
    """Return in words which of the two predictions the measured exponent in N is nearer to.

    Args:
        variance: Variance over heads [N, seeds].
    """
    caption = CAPTION[alpha]
    central_limit = CENTRAL_LIMIT[alpha]
    if caption == central_limit:
        return "Both predict the same."
    measured, low, high = slope(settings["head_dim"], variance)
    if abs(measured - central_limit) <= abs(measured - caption):
        near = "the central limit theorem's"
        far = "the caption's"
        far_value = caption
    else:
        near = "the caption's"
        far = "the central limit theorem's"
        far_value = central_limit
    if low <= far_value <= high:
        return f"The exponent is nearer to {near} exponent, but its interval holds {far} too."
    return f"The exponent is nearer to {near} exponent. Its interval does not hold {far}."


def draw(settings: Settings, data: Data) -> matplotlib.figure.Figure:
    """Draw a panel for every gamma0 and alpha_A, with a line for every training time.

    The two predictions start at the last training time's first point.
    """
    variance = np.asarray(data["variance"])
    x = np.asarray(settings["head_dim"], float)
    models = list(itertools.product(range(len(settings["gamma0"])), settings["alpha_a"]))
    title = "Figure 2b: variance of attention logits over heads, in training"
    figure, axes = panels.row(len(models), title)
    for panel, (g, alpha) in zip(axes, models, strict=True):
        by_step = variance[g, settings["alpha_a"].index(alpha)]
        for color, step, values in zip(panels.COLORS, settings["at"], by_step, strict=False):
            panels.power_law(panel, x, values, f"{step} steps", color=color)
        start = np.exp(np.log(by_step[-1, 0]).mean())
        growth = x / x[0]
        theorem = start * growth ** CENTRAL_LIMIT[alpha]
        panel.plot(x, theorem, "--", color=panels.GREY, label="central limit theorem")
        panel.plot(x, start * growth ** CAPTION[alpha], ":", color=panels.GREY, label="caption")
        gamma0 = settings["gamma0"][g]["gamma0"]
        title = rf"$\alpha_A$ = {alpha:g}, $\gamma_0$ = {gamma0:g}"
        variance_name = "variance over heads" if panel is axes[0] else ""
        panels.label(panel, title, "head dimension N", variance_name, legend=True)
    return figure


FIGURE = Figure(
    title="Figure 2b: variance of attention logits over heads after training",
    source="figure 2b of Bordelon, Chaudhry and Pehlevan 2024 (arXiv 2405.15712)",
    about="Variance over heads of the attention logits q.k/N^alpha_A of Bordelon et al.'s ViT with "
    "four heads, before, during and after training by SGD with momentum, as the head dimension N "
    "grows. With alpha_A = 1 the central limit theorem predicts N^-1. During and after training, the "
    "figure's caption predicts N^-2 instead.\n\n"
    "The variance is averaged over layers, images and pairs of positions. The data are the "
    "endless image set (the paper: CIFAR-5M).",
    **settings_of(__name__),
    measure=measure,
    rows=rows,
    draw=draw,
)
