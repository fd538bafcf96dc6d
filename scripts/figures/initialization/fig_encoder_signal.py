"""Gradients of an encoder at initialization, when only its decoder gets deeper."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scripts.figures import models, panels
from scripts.figures.result import Data, Figure, Row, Settings, exponent, settings_of

if TYPE_CHECKING:
    import matplotlib.figure

ENCODER = (
    "encoder.block.query",
    "encoder.block.key",
    "encoder.block.value",
    "encoder.block.attention_out",
    "encoder.block.mlp_in",
    "encoder.block.mlp_out",
)
"""Parameter groups of the encoder's matrices."""
CROSS = ("block.cross.key", "block.cross.value")
"""Parameter groups of the decoder's cross-attention: its keys and values."""


def measure(settings: Settings, work: Path) -> dict[str, Any]:
    """Measure gradients at initialization, as root mean squares.

    Returns:
        Nested dictionary {alpha_l: {group: gradients [depths, seeds]}} of root mean squares over
        all layers of a parameter group. The key `constant` is a control, in which the factor on
        branches does not change with the depth.
    """
    del work
    from mupax.presets.rule import ONE
    from mupax.train.config.run import OptimizerConfig
    from mupax.train.core import factors
    from mupax.train.studies.check import check
    from mupax.zoo.definition import definition

    size = {
        "head_dim": settings["head_dim"],
        "heads": settings["heads"],
        "encoder_depth": settings["encoder_depth"],
    }
    lengths = {"seq_len": settings["positions"], "target_len": settings["positions"]}
    grown = [models.encoder_decoder(**size, **lengths, depth=depth) for depth in settings["depth"]]
    definitions = [definition(replace(model, tied=False)) for model in grown]
    config = OptimizerConfig(name="adam", peak_lr=1e-3, schedule="constant")
    series = check.Series(definitions, config, 0)
    presets = {}
    for alpha_l in settings["alpha_l"]:
        presets[f"{alpha_l:g}"] = models.absolute(alpha_a=1.0, alpha_l=alpha_l, beta0=1.0)
    presets["constant"] = replace(presets["1"], branch=ONE)
    parameter_of = {spec.group: name for name, spec in definitions[0].specs.items()}
    by_preset: dict[str, Any] = {}
    for name, preset in presets.items():
        observables = series.measure(preset, check.batch(grown[0]), settings["seeds"])
        eps_by_depth = [factors.resolve(preset, model).eps for model in definitions]
        by_group = {}
        for group in (*ENCODER, *CROSS):
            # The check's gradients are divided by the factor on Adam's eps.
            eps = []
            for of_depth in eps_by_depth:
                eps.append([np.mean(of_depth[parameter_of[group]])])
            by_group[group] = observables[f"gradient/{group}"][:, :, 0] * eps
        by_preset[name] = by_group
    return by_preset


def rows(settings: Settings, data: Data) -> list[Row]:
    """Compare the exponents of gradients in the decoder's depth with theory.

    Predicted are 1/2 - alpha_L for the encoder's matrices, and -alpha_L for the keys and values of
    cross-attention. A control has branches whose factor does not change with the depth.
    """
    table = []
    for name, by_group in data.items():
        is_control = name == "constant"
        alpha_l = 1.0 if is_control else float(name)
        rule = "branches the same at every depth" if is_control else f"alpha_L = {alpha_l:g}"
        matrices = f"the encoder's {len(ENCODER)} matrices (geometric mean)"
        table.append(
            exponent(
                f"gradients of {matrices} against the decoder's depth, {rule}",
                settings["depth"],
                _encoder_mean(by_group),
                predicted=0.5 - alpha_l,
                tolerance=0.15,
                control=is_control,
            )
        )
        if is_control:
            continue
        for group in CROSS:
            description = f"gradient of {group}, one layer's, against the decoder's depth, {rule}"
            gradients = by_group[group]
            table.append(
                exponent(
                    description, settings["depth"], gradients, predicted=-alpha_l, tolerance=0.15
                )
            )
    return table


def _encoder_mean(by_group: Data) -> np.ndarray:
    """Return the geometric mean [depths, seeds] of the gradients of the encoder's matrices."""
    return np.exp(np.mean([np.log(by_group[group]) for group in ENCODER], axis=0))


def draw(settings: Settings, data: Data) -> matplotlib.figure.Figure:
    """Draw gradients against the decoder's depth, in a panel for each alpha_L and the control."""
    figure, axes = panels.row(len(data), "What comes back to an encoder as its decoder gets deeper")
    depths = settings["depth"]
    for panel, (name, by_group) in zip(axes, data.items(), strict=True):
        is_control = name == "constant"
        alpha_l = 1.0 if is_control else float(name)
        encoder = _encoder_mean(by_group)
        panels.power_law(panel, depths, encoder, "encoder's matrices", predicted=0.5 - alpha_l)
        for color, group in zip(panels.COLORS[1:], CROSS, strict=False):
            gradients = by_group[group]
            panels.power_law(panel, depths, gradients, group, color=color, predicted=-alpha_l)
        title = "control: constant branches" if is_control else rf"$\alpha_L$ = {name}"
        panels.label(
            panel,
            f"{title}, dashed: theory",
            "blocks of the decoder",
            "gradient, root mean square",
            legend=True,
        )
    return figure


FIGURE = Figure(
    title="The encoder's first gradients as its decoder gets deeper",
    source="derived here",
    about="Gradients at initialization in an encoder-decoder with 4 encoder blocks, as the number "
    "L of decoder blocks grows, with the decoder's branches times 1/L^alpha_L. The gradients are "
    "predicted to scale as L^(1/2 - alpha_L) in the encoder, and as L^-alpha_L in one layer's keys "
    "and values of cross-attention.\n\n"
    "The model is BART's layout with a readout of its own, under `depth-mup` in absolute "
    "form. Tokens and labels are random.",
    **settings_of(__name__),
    measure=measure,
    rows=rows,
    draw=draw,
)
