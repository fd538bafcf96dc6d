"""Figure 2b: the variance over heads of attention logits after training, against the head dimension N."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scripts.figures import panels
from scripts.figures.result import Data, Figure, Row, Settings, exponent, slope, settings_of

if TYPE_CHECKING:
    import matplotlib.figure

CAPTION = {1.0: -2.0, 0.5: 0.0}
CENTRAL_LIMIT = {1.0: -1.0, 0.5: 0.0}
TOLERANCE = 0.15


def measure(settings: Settings, work: Path) -> dict[str, Any]:
    """Variance [gamma0, alpha_A, step, N, seeds] over heads, mean over layers, images and positions; losses likewise."""
    del work
    import dataclasses

    from scripts.figures import training

    gammas, alphas, steps = settings["gamma0"], settings["alpha_a"], settings["at"]
    shape = (len(gammas), len(alphas), len(steps), len(settings["head_dim"]), settings["seeds"])
    variance, loss = np.zeros(shape), np.zeros(shape[:2] + shape[3:])
    batches = None
    for n, head_dim in enumerate(settings["head_dim"]):
        trainer = None
        for g, rule in enumerate(gammas):
            for a, alpha in enumerate(alphas):
                config = training.vit(
                    head_dim=head_dim, alpha_a=alpha, steps=max(steps), **rule, **settings["model"]
                )
                trainer = trainer or training.Trainer(config, batches)
                batches = trainer.batches
                images = batches.probe(settings["images"])

                def spread(
                    snapshot: training.Snapshot,
                    trainer: training.Trainer = trainer,
                    images: Any = images,
                ) -> float:
                    logits = trainer.internals(snapshot, images)["attention"]  # [L, B, H, T, S]
                    return float(logits.var(axis=2, ddof=1).mean())

                for seed in range(settings["seeds"]):
                    run = dataclasses.replace(config, seed=seed)
                    losses, variance[g, a, :, n, seed] = trainer.train(run, at=steps, look=spread)
                    loss[g, a, n, seed] = losses[-20:].mean()
    return {"variance": variance, "loss": loss}


def rows(settings: Settings, data: Data) -> list[Row]:
    """A slope per gamma0, alpha_A and training time, against the caption and against the central limit theorem."""
    table = []
    for rule, of_gamma in zip(settings["gamma0"], np.asarray(data["variance"]), strict=True):
        for alpha, of_alpha in zip(settings["alpha_a"], of_gamma, strict=True):
            for step, variance in zip(settings["at"], of_alpha, strict=True):
                what = f"variance over heads against N, alpha_A = {alpha:g}, gamma0 = {rule['gamma0']:g}, after {step} steps"
                sources = {"central limit theorem": CENTRAL_LIMIT[alpha]}
                if step and CAPTION[alpha] != CENTRAL_LIMIT[alpha]:
                    sources["the figure's caption"] = CAPTION[alpha]
                for source, predicted in sources.items():
                    table.append(
                        exponent(
                            what,
                            settings["head_dim"],
                            variance,
                            predicted=predicted,
                            tolerance=TOLERANCE,
                            source=source,
                            note=_verdict(settings, variance, alpha) if step else "",
                        )
                    )
    return table


def _verdict(settings: Settings, variance: np.ndarray, alpha: float) -> str:
    """Which of the two predictions a slope is nearer to, in words."""
    if CAPTION[alpha] == CENTRAL_LIMIT[alpha]:
        return "Both predict the same."
    measured, low, high = slope(settings["head_dim"], variance)
    distances = {
        "the central limit theorem's": abs(measured - CENTRAL_LIMIT[alpha]),
        "the caption's": abs(measured - CAPTION[alpha]),
    }
    near, far = sorted(distances, key=lambda name: distances[name])
    inside = {
        name: low <= value <= high
        for name, value in (("near", _value(near, alpha)), ("far", _value(far, alpha)))
    }
    if inside["far"]:
        return f"Nearer to {near} exponent, but the interval holds {far} too."
    return f"Nearer to {near} exponent; {far} is outside the interval."


def _value(name: str, alpha: float) -> float:
    return CAPTION[alpha] if "caption" in name else CENTRAL_LIMIT[alpha]


def draw(settings: Settings, data: Data) -> matplotlib.figure.Figure:
    """A panel per gamma0 and alpha_A, a line per training time; the two predictions for alpha_A = 1."""
    variance = np.asarray(data["variance"])
    count = len(settings["gamma0"]) * len(settings["alpha_a"])
    figure, axes = panels.row(
        count, "Figure 2b: variance of attention logits over heads, in training"
    )
    x = np.asarray(settings["head_dim"], float)
    for g, rule in enumerate(settings["gamma0"]):
        for a, alpha in enumerate(settings["alpha_a"]):
            one = axes[g * len(settings["alpha_a"]) + a]
            for color, step, values in zip(
                panels.COLORS, settings["at"], variance[g, a], strict=False
            ):
                panels.power_law(one, x, values, f"{step} steps", color=color)
            start = np.exp(np.log(variance[g, a, -1, 0]).mean())
            for name, style, exponents in (
                ("central limit theorem", "--", CENTRAL_LIMIT),
                ("caption", ":", CAPTION),
            ):
                one.plot(
                    x, start * (x / x[0]) ** exponents[alpha], style, color=panels.GREY, label=name
                )
            title = rf"$\alpha_A$ = {alpha:g}, $\gamma_0$ = {rule['gamma0']:g}"
            panels.label(
                one,
                title,
                "head dimension N",
                "variance over heads" if g + a == 0 else "",
                legend=True,
            )
    return figure


FIGURE = Figure(
    title="Figure 2b: variance of attention logits over heads after training",
    source="figure 2b of Bordelon, Chaudhry and Pehlevan 2024 (arXiv 2405.15712)",
    about="Variance over heads of the attention logits of the paper's ViT, before and during training "
    "by SGD with momentum, as N grows with the number of heads fixed. The variance is averaged "
    "over layers, images and pairs of positions. The data are the endless image set (the paper: "
    "CIFAR-5M).",
    **settings_of(__name__),
    measure=measure,
    rows=rows,
    draw=draw,
)
