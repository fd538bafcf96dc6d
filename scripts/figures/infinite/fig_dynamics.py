"""The infinite limit in time: finite nets come to it as 1/H while they train, and not to the one without response terms."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mupax.train.studies.infinite.command import patches
from scripts.figures import models, panels
from scripts.figures.result import Data, Figure, Row, Settings, exponent, settings_of

if TYPE_CHECKING:
    import matplotlib.figure

    from mupax.train.config.run import Config


def measure(settings: Settings, work: Path) -> dict[str, Any]:
    """Per case the numbers of `compared`, for one block and whole stacks; and of the deepest stack the curves that are drawn."""
    del work
    one = [_one_block(settings, **case) for case in settings["one_block"]["cases"]]
    stacks = [_stack(settings, depth) for depth in settings["stack"]["depth"]]
    return {"one_block": one, "stack": [errors for errors, _ in stacks], "curves": stacks[-1][1]}


def _one_block(
    settings: Settings, *, head_dim: int, alpha_a: float, heads: list[int]
) -> dict[str, Any]:
    """Nets with all their matrices, written apart from the solver (`scripts/figures/infinite/one_block.py`)."""
    from mupax.presets.infinite.heads import OneBlock, train
    from scripts.figures.infinite import one_block

    own = settings["one_block"]
    block, steps = (
        OneBlock(head_dim=head_dim, alpha_a=alpha_a, rate=own["rate"]),
        max(settings["at"]) + 1,
    )
    images, classes = digits(own["images"])
    inputs, targets = (
        patches(images, own["patch_size"]).astype(float),
        np.where(classes % 2, 1.0, -1.0),
    )
    kernel = np.einsum("psi,qti->psqt", inputs, inputs) / inputs.shape[-1]

    def limits(draws: int, *, responses: bool) -> np.ndarray | Any:
        rngs = np.random.default_rng([1, responses]).spawn(draws)
        sampled = {"steps": steps, "heads": own["sampled"], "responses": responses}
        return [train(block, kernel, targets, rng=rng, **sampled) for rng in rngs]

    right, wrong = limits(own["draws"], responses=True), limits(1, responses=False)
    nets = []
    for count in heads:
        rngs = np.random.default_rng(count).spawn(own["parts"])
        parts = [
            one_block.train(
                block, inputs, targets, steps=steps, heads=count, seeds=own["seeds"], rng=rng
            )
            for rng in rngs
        ]
        nets.append(
            tuple(
                np.concatenate([getattr(part, x) for part in parts]) for x in ("outputs", "kernels")
            )
        )
    return compared(
        settings["at"],
        nets,
        (np.stack([x.outputs for x in right]), np.stack([x.kernels for x in right])),
        np.stack([x.outputs for x in wrong]),
    )


def _stack(settings: Settings, depth: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The zoo's ViT trained by our own step."""
    from mupax.train.studies.infinite import command as dynamics

    own = settings["stack"]
    config = run(settings, depth)
    images, targets = digits(own["images"])
    wide = {"heads": own["limit"], "draws": own["draws"]}
    right = dynamics.limit(config, images, targets, **wide, seed=1)
    wrong = dynamics.limit(config, images, targets, **{**wide, "draws": 1}, seed=2, responses=False)
    nets = [
        dynamics.finite(dynamics.with_heads(config, count), images, targets, seeds=own["seeds"])
        for count in own["heads"]
    ]
    curves = {
        "limit": right.losses, "without_response": wrong.losses, "nets": nets[0].losses, "memory": right.memory.mean(0),
        "memory_of_nets": nets[0].memory.mean(0), "attention": right.attention.mean(0),
    }  # fmt: skip
    distances = compared(
        settings["at"],
        [(net.logits, net.kernels) for net in nets],
        (right.logits, right.kernels),
        wrong.logits,
    )
    return distances, curves


def run(settings: Settings, depth: int) -> Config:
    """The paper's ViT on patches of digits, plain gradient descent on one batch, in the absolute form of `depth-mup`."""
    from mupax.train.config.run import Config, DataConfig, OptimizerConfig, PresetConfig

    own = settings["stack"]
    model = models.vit(head_dim=own["head_dim"], heads=own["heads"][0], depth=depth)
    constants = {name: own[name] for name in ("alpha_a", "alpha_l", "gamma0", "beta0")}
    return Config(
        recipe="figure",
        model=replace(
            model,
            patch_size=own["patch_size"],
            centered=True,
            compute=replace(model.compute, layers="auto"),
        ),
        data=DataConfig(name="digits", batch_size=own["images"], augment=False),
        preset=PresetConfig(name="depth-mup", base=None, **constants),
        optimizer=OptimizerConfig(
            name="sgd", peak_lr=own["rate"], momentum=own["momentum"], schedule="constant"
        ),
        steps=max(settings["at"]),
    )


def digits(count: int) -> tuple[np.ndarray, np.ndarray]:
    """The first images and their classes."""
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    return models.images(count), np.asarray(digits.target[:count], np.int32)


def compared(
    at: Any,
    nets: list[tuple[np.ndarray, np.ndarray]],
    limit: tuple[np.ndarray, np.ndarray],
    wrong: np.ndarray,
) -> dict[str, Any]:
    """How far nets are from the limit.

    Args:
        at: steps that are looked at.
        nets: outputs [seeds, steps, ...] and kernels [seeds, steps, ...] by H, the largest last.
        limit: the same of its draws.
        wrong: outputs without responses.

    Returns:
        Mean squares of the differences to the mean of the limit's draws, `outputs` and `kernels` [at, H, seeds], and by how many
        standard errors the mean of the largest nets is from the limit and from the wrong one, along what those differ in, at
        the last of the steps.
    """
    distances: dict[str, Any] = {}
    for index, name in enumerate(("outputs", "kernels")):
        middle = limit[index].mean(0)
        squares = [((x[index] - middle) ** 2)[:, at] for x in nets]
        distances[name] = np.array(
            [x.reshape(*x.shape[:2], -1).mean(-1) for x in squares]
        ).transpose(2, 0, 1)
    last = at[-1]
    along = (wrong - limit[0].mean(0)).mean(0)[last].ravel()
    largest, draws, other = (
        x[:, last].reshape(len(x), -1) @ along for x in (nets[-1][0], limit[0], wrong)
    )
    error = np.sqrt(largest.var(ddof=1) / len(largest) + draws.var(ddof=1) / len(draws))
    wide = np.sqrt(largest.var(ddof=1) / len(largest) + draws.var(ddof=1) / len(other))
    distances["apart"] = [
        (largest.mean() - draws.mean()) / error,
        (largest.mean() - other.mean()) / wide,
    ]
    return distances


def rows(settings: Settings, data: Data) -> list[Row]:
    """Slopes at every time of every case, and the distances in standard errors."""
    table = []
    cases = [
        f"one block, N = {x['head_dim']}, alpha_A = {x['alpha_a']:g}"
        for x in settings["one_block"]["cases"]
    ]
    stacks = [f"stack of L = {depth}" for depth in settings["stack"]["depth"]]
    sizes = (
        [x["heads"] for x in settings["one_block"]["cases"]],
        [settings["stack"]["heads"]] * len(stacks),
    )
    for kind, names, all_heads in zip(("one_block", "stack"), (cases, stacks), sizes, strict=True):
        for name, heads, errors in zip(names, all_heads, data[kind], strict=True):
            for what in ("outputs", "kernels"):
                for step, values in zip(settings["at"], errors[what], strict=True):
                    about = f"squared error of the {what} against H after {step} steps, {name}"
                    table.append(exponent(about, heads, values, predicted=-1.0, tolerance=0.15))
            for control, apart in zip((False, True), errors["apart"], strict=True):
                about = f"standard errors between nets of H = {heads[-1]} and the limit{' without response terms' * control}, {name}"
                about += f", after {settings['at'][-1]} steps"
                z = abs(apart)
                table.append(
                    Row(
                        what=about, measured=z, low=z - 1.96, high=z + 1.96, predicted=0.0, tolerance=5.0, kind="value", control=control
                    )
                )  # fmt: skip
    return table


def draw(settings: Settings, data: Data) -> matplotlib.figure.Figure:
    """Loss and memory of the deepest stack, and errors of the outputs against H."""
    figure, (left, second, third, right) = panels.row(
        4, "The infinite limit in time, and nets that come to it"
    )
    curves = {name: np.asarray(x) for name, x in data["curves"].items()}
    steps, own = np.arange(curves["limit"].shape[-1]), settings["stack"]
    left.plot(steps, curves["nets"].T, color=panels.SKY, alpha=0.35, linewidth=0.8)
    left.plot([], [], color=panels.SKY, label=f"our step, H = {own['heads'][0]}, by seed")
    left.plot(
        steps,
        curves["without_response"].mean(0),
        ":",
        color=panels.ORANGE,
        label="without response terms",
    )
    left.plot(steps, curves["limit"].mean(0), "--", color=panels.INK, label="limit")
    panels.label(
        left, f"Loss, N = {own['head_dim']}, L = {own['depth'][-1]}", "step", "nats", legend=True
    )
    for color, step in zip(panels.COLORS, (0, *settings["at"]), strict=False):
        second.plot(steps, curves["memory"][step], color=color, label=f"s = {step}")
        second.plot(steps, curves["memory_of_nets"][step], "o", color=color, markersize=3)
    panels.label(
        second,
        f"C(t, s): limit, and nets of H = {own['heads'][0]} (dots)",
        "step t",
        "",
        legend=True,
    )
    for color, case, errors in zip(
        panels.COLORS, settings["one_block"]["cases"], data["one_block"], strict=False
    ):
        name = rf"N = {case['head_dim']}, $\\alpha_A$ = {case['alpha_a']:g}".replace("\\\\", "\\")
        panels.power_law(
            third, case["heads"], errors["outputs"][-1], name, color=color, predicted=-1.0
        )
    for color, depth, errors in zip(panels.COLORS, own["depth"], data["stack"], strict=False):
        panels.power_law(
            right, own["heads"], errors["outputs"][-1], f"L = {depth}", color=color, predicted=-1.0
        )
    last = settings["at"][-1]
    for one, title in ((third, "One block"), (right, "Whole stack, our step")):
        panels.label(
            one,
            f"{title}, after {last} steps; dashed: slope -1",
            "heads H",
            "squared error of the output",
            legend=True,
        )
    return figure


def _cases(*heads: int) -> list[dict[str, Any]]:
    """N and alpha_A, and H by which widths are the same at every N."""
    return [
        {"head_dim": n, "alpha_a": alpha_a, "heads": [4 * count // n for count in heads]}
        for n, alpha_a in ((4, 0.5), (4, 1.0), (1, 0.5))
    ]


FIGURE = Figure(
    title="The infinite limit in time",
    source="the dynamical mean field theory of Bordelon, Chaudhry and Pehlevan 2024 (arXiv 2405.15712), solved here by conditioning "
    "initial matrices on what they have acted on (Lu 2021, arXiv 2101.07464)",
    about="Training on one batch of digits with centred output. One block is attention alone with a "
    "frozen read-in and squared error. The limit of one block is "
    "`mupax.presets.infinite.heads`, and its nets are written in NumPy with all their matrices "
    "(`scripts/figures/infinite/one_block.py`). The stack is the paper's ViT (F = D, both "
    "norms, trained read-in) with cross-entropy. The limit of the stack is "
    "`mupax.presets.infinite.stack` at a width that stands for infinity, and its nets are the "
    "zoo's, trained by mupax's own step. Controls have no response terms: they treat W and its "
    "transpose as unrelated.",
    **settings_of(__name__),
    measure=measure,
    rows=rows,
    draw=draw,
)  # fmt: skip
