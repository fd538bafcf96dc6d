"""The infinite limit in time: convergence of finite nets in training to the limit as 1/H.

A control is the limit without response terms, to which nets do not converge.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """Train finite nets, compute their limits of infinitely many heads, and compare both.

    Returns:
        `one_block`: a result of `compared` for each case of the settings. `stack`: one for each
        depth. `curves`: curves over steps of the deepest stack, for the picture.
    """
    del work
    cases = [_one_block(settings, **case) for case in settings["one_block"]["cases"]]
    stacks = []
    curves = {}
    for depth in settings["stack"]["depth"]:
        distances, curves = _stack(settings, depth)
        stacks.append(distances)
    return {"one_block": cases, "stack": stacks, "curves": curves}


def _one_block(
    settings: Settings, *, head_dim: int, alpha_a: float, heads: list[int]
) -> dict[str, Any]:
    """Train finite nets of one attention block, and compare them with the block's limit.

    Args:
        heads: Numbers of heads H of the nets, ascending.

    Returns:
        Result of `compared`.
    """
    from mupax.presets.infinite.heads import OneBlock, train
    from scripts.figures.infinite import one_block

    block_settings = settings["one_block"]
    block = OneBlock(head_dim=head_dim, alpha_a=alpha_a, rate=block_settings["rate"])
    steps = max(settings["at"]) + 1
    images, classes = digits(block_settings["images"])
    inputs = patches(images, block_settings["patch_size"]).astype(float)
    targets = np.where(classes % 2, 1.0, -1.0)
    kernel = np.einsum("psi,qti->psqt", inputs, inputs) / inputs.shape[-1]

    def limits(draws: int, *, responses: bool) -> list[Any]:
        rngs = np.random.default_rng([1, responses]).spawn(draws)
        sampled = {"steps": steps, "heads": block_settings["sampled"], "responses": responses}
        return [train(block, kernel, targets, rng=rng, **sampled) for rng in rngs]

    right = limits(block_settings["draws"], responses=True)
    wrong = limits(1, responses=False)
    nets = []
    for count in heads:
        rngs = np.random.default_rng(count).spawn(block_settings["parts"])
        # Parts of the seeds one after another take less memory.
        parts = []
        for rng in rngs:
            part = one_block.train(
                block,
                inputs,
                targets,
                steps=steps,
                heads=count,
                seeds=block_settings["seeds"],
                rng=rng,
            )
            parts.append(part)
        outputs = np.concatenate([part.outputs for part in parts])
        kernels = np.concatenate([part.kernels for part in parts])
        nets.append((outputs, kernels))
    right_outputs = np.stack([draw.outputs for draw in right])
    right_kernels = np.stack([draw.kernels for draw in right])
    wrong_outputs = np.stack([draw.outputs for draw in wrong])
    return compared(settings["at"], nets, (right_outputs, right_kernels), wrong_outputs)


def _stack(settings: Settings, depth: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Compare the zoo's ViT, trained by mupax's own step, with the limit of a stack.

    Returns:
        The result of `compared`, and curves for the picture.
    """
    from mupax.train.studies.infinite import command as dynamics

    stack_settings = settings["stack"]
    config = run(settings, depth)
    images, targets = digits(stack_settings["images"])
    heads = stack_settings["limit"]
    right = dynamics.limit(
        config, images, targets, heads=heads, draws=stack_settings["draws"], seed=1
    )
    wrong = dynamics.limit(config, images, targets, heads=heads, draws=1, seed=2, responses=False)
    nets = []
    for count in stack_settings["heads"]:
        finite_config = dynamics.with_heads(config, count)
        nets.append(dynamics.finite(finite_config, images, targets, seeds=stack_settings["seeds"]))
    curves = {
        "limit": right.losses,
        "without_response": wrong.losses,
        "nets": nets[0].losses,
        "memory": right.memory.mean(0),
        "memory_of_nets": nets[0].memory.mean(0),
        "attention": right.attention.mean(0),
    }
    distances = compared(
        settings["at"],
        [(net.logits, net.kernels) for net in nets],
        (right.logits, right.kernels),
        wrong.logits,
    )
    return distances, curves


def run(settings: Settings, depth: int) -> Config:
    """Return a run of the paper's ViT on one batch of digits by gradient descent.

    The preset is the absolute form of `depth-mup`.
    """
    from mupax.train.config.run import Config, DataConfig, OptimizerConfig, PresetConfig

    stack_settings = settings["stack"]
    model = models.vit(
        head_dim=stack_settings["head_dim"], heads=stack_settings["heads"][0], depth=depth
    )
    constants = {name: stack_settings[name] for name in ("alpha_a", "alpha_l", "gamma0", "beta0")}
    return Config(
        recipe="figure",
        model=replace(
            model,
            patch_size=stack_settings["patch_size"],
            centered=True,
            compute=replace(model.compute, layers="auto"),
        ),
        data=DataConfig(name="digits", batch_size=stack_settings["images"], augment=False),
        preset=PresetConfig(name="depth-mup", base=None, **constants),
        optimizer=OptimizerConfig(
            name="sgd",
            peak_lr=stack_settings["rate"],
            momentum=stack_settings["momentum"],
            schedule="constant",
        ),
        steps=max(settings["at"]),
    )


def digits(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the first digits of scikit-learn: images and classes int32 [count]."""
    from sklearn.datasets import load_digits

    dataset: Any = load_digits()
    return models.images(count), np.asarray(dataset.target[:count], np.int32)


def compared(
    steps_at: Any,
    nets: list[tuple[np.ndarray, np.ndarray]],
    limit: tuple[np.ndarray, np.ndarray],
    wrong: np.ndarray,
) -> dict[str, Any]:
    """Return the distances of finite nets from their limit of infinitely many heads.

    Args:
        steps_at: Indices of the steps at which to compare, ascending.
        nets: Outputs [seeds, steps, ...] and kernels [seeds, steps, ...] for each number of heads
            H, ascending.
        limit: Outputs and kernels [draws, steps, ...] of the limit.
        wrong: Outputs [draws, steps, ...] of the limit without response terms.

    Returns:
        `outputs` and `kernels`: mean squared differences [compared steps, H, seeds] from the mean
        of the limit's draws. `apart`: distance of the largest nets' mean from the limit, and from
        the wrong limit, each in standard errors. These two are of outputs at the last compared
        step, along the direction in which both limits differ.
    """
    distances: dict[str, Any] = {}
    for index, name in enumerate(("outputs", "kernels")):
        center = limit[index].mean(0)
        by_heads = []
        for net in nets:
            squares = ((net[index] - center) ** 2)[:, steps_at]
            by_heads.append(squares.reshape(*squares.shape[:2], -1).mean(-1))
        distances[name] = np.array(by_heads).transpose(2, 0, 1)

    last = steps_at[-1]
    direction = (wrong - limit[0].mean(0)).mean(0)[last].ravel()

    def projected(outputs: np.ndarray) -> np.ndarray:
        return outputs[:, last].reshape(len(outputs), -1) @ direction

    largest = projected(nets[-1][0])
    draws = projected(limit[0])
    wrong_draws = projected(wrong)
    largest_variance = largest.var(ddof=1) / len(largest)
    error = np.sqrt(largest_variance + draws.var(ddof=1) / len(draws))
    # The wrong limit may have one draw, so its variance is taken from the draws of the limit.
    wrong_error = np.sqrt(largest_variance + draws.var(ddof=1) / len(wrong_draws))
    distances["apart"] = [
        (largest.mean() - draws.mean()) / error,
        (largest.mean() - wrong_draws.mean()) / wrong_error,
    ]
    return distances


def rows(settings: Settings, data: Data) -> list[Row]:
    """Compare nets with their limits in every case.

    Rows have the exponent of the squared error in H, predicted as -1, and the distance of the
    largest nets from the limit and from a wrong one (control), in standard errors.
    """
    steps = settings["at"]
    table = []
    for case, distances in zip(settings["one_block"]["cases"], data["one_block"], strict=True):
        name = f"one block, N = {case['head_dim']}, alpha_A = {case['alpha_a']:g}"
        table += _case_rows(name, steps, case["heads"], distances)
    stack = settings["stack"]
    for depth, distances in zip(stack["depth"], data["stack"], strict=True):
        table += _case_rows(f"stack of L = {depth}", steps, stack["heads"], distances)
    return table


def _case_rows(name: str, steps: Sequence[int], heads: Sequence[int], distances: Data) -> list[Row]:
    """Return the rows of one case, as in `rows`.

    Args:
        name: Name of the case in its rows.
        distances: Result of `compared`.
        steps: Steps at which nets and limit were compared.
        heads: Numbers of heads `H` of the nets.
    """
    table = []
    for description in ("outputs", "kernels"):
        for step, values in zip(steps, distances[description], strict=True):
            title = f"squared error of the {description} against H after {step} steps, {name}"
            table.append(exponent(title, heads, values, predicted=-1.0, tolerance=0.15))
    for control, errors_apart in zip((False, True), distances["apart"], strict=True):
        limit = "the limit without response terms" if control else "the limit"
        z = abs(errors_apart)
        table.append(
            Row(
                what=f"standard errors between nets of H = {heads[-1]} and {limit}, {name}, "
                f"after {steps[-1]} steps",
                measured=z,
                low=z - 1.96,
                high=z + 1.96,
                predicted=0.0,
                tolerance=5.0,
                kind="value",
                control=control,
            )
        )
    return table


def draw(settings: Settings, data: Data) -> matplotlib.figure.Figure:
    """Draw loss and memory of the deepest stack, and errors of the outputs against H."""
    title = "The infinite limit in time, and nets that come to it"
    figure, (left, second, third, right) = panels.row(4, title)
    curves = {name: np.asarray(values) for name, values in data["curves"].items()}
    steps = np.arange(curves["limit"].shape[-1])
    stack_settings = settings["stack"]
    left.plot(steps, curves["nets"].T, color=panels.SKY, alpha=0.35, linewidth=0.8)
    left.plot(
        [], [], color=panels.SKY, label=f"our step, H = {stack_settings['heads'][0]}, by seed"
    )
    wrong = curves["without_response"].mean(0)
    left.plot(steps, wrong, ":", color=panels.ORANGE, label="without response terms")
    left.plot(steps, curves["limit"].mean(0), "--", color=panels.INK, label="limit")
    title = f"Loss, N = {stack_settings['head_dim']}, L = {stack_settings['depth'][-1]}"
    panels.label(left, title, "step", "nats", legend=True)
    for color, step in zip(panels.COLORS, (0, *settings["at"]), strict=False):
        second.plot(steps, curves["memory"][step], color=color, label=f"s = {step}")
        second.plot(steps, curves["memory_of_nets"][step], "o", color=color, markersize=3)
    title = f"C(t, s): limit, and nets of H = {stack_settings['heads'][0]} (dots)"
    panels.label(second, title, "step t", "", legend=True)

    cases = settings["one_block"]["cases"]
    for color, case, errors in zip(panels.COLORS, cases, data["one_block"], strict=False):
        name = rf"N = {case['head_dim']}, $\alpha_A$ = {case['alpha_a']:g}"
        values = errors["outputs"][-1]
        panels.power_law(third, case["heads"], values, name, color=color, predicted=-1.0)
    for color, depth, errors in zip(
        panels.COLORS, stack_settings["depth"], data["stack"], strict=False
    ):
        values = errors["outputs"][-1]
        name = f"L = {depth}"
        panels.power_law(right, stack_settings["heads"], values, name, color=color, predicted=-1.0)
    last = settings["at"][-1]
    for panel, title in ((third, "One block"), (right, "Whole stack, our step")):
        panels.label(
            panel,
            f"{title}, after {last} steps; dashed: slope -1",
            "heads H",
            "squared error of the output",
            legend=True,
        )
    return figure


FIGURE = Figure(
    title="The infinite limit in time",
    source="the dynamical mean field theory of Bordelon, Chaudhry and Pehlevan 2024 (arXiv "
    "2405.15712), solved as in Lu 2021 (arXiv 2101.07464)",
    about="Outputs and kernels of one attention block, and of the paper's ViT, after 2, 4 and 8 "
    "steps on one batch of digits. Their squared error against the limit of infinitely many "
    "heads is predicted to fall as 1/heads.\n\n"
    "One block is attention alone with a frozen read-in and squared error. The limit of one "
    "block is `mupax.presets.infinite.heads`, and its nets are written in NumPy with all "
    "their matrices (`scripts/figures/infinite/one_block.py`). The stack is the paper's ViT "
    "(F = D, both norms, trained read-in) with cross-entropy. The limit of the stack is "
    "`mupax.presets.infinite.stack` at a width that stands for infinity, and its nets are "
    "the zoo's, trained by mupax's own step. Controls have no response terms: they treat W "
    "and its transpose as unrelated.",
    **settings_of(__name__),
    measure=measure,
    rows=rows,
    draw=draw,
)
