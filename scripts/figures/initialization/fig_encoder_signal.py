"""The gradients that a first backward pass brings to an encoder, as its decoder alone gets deeper."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scripts.figures import models, panels
from scripts.figures.result import Data, Figure, Row, Settings, exponent, settings_of

if TYPE_CHECKING:
    import matplotlib.figure

ENCODER = tuple(
    f"encoder.block.{role}"
    for role in ("query", "key", "value", "attention_out", "mlp_in", "mlp_out")
)
CROSS = ("block.cross.key", "block.cross.value")


def measure(settings: Settings, work: Path) -> dict[str, Any]:
    """Root mean square gradients {alpha_l: {group: [depths, seeds]}}, of cross-attention's keys and values over all layers.

    `constant` in place of alpha_l has branches that are the same at every depth.
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
    definitions = [definition(replace(one, tied=False)) for one in grown]
    config = OptimizerConfig(name="adam", peak_lr=1e-3, schedule="constant")
    series = check.Series(definitions, config, 0)
    presets = {
        f"{one:g}": models.absolute(alpha_a=1.0, alpha_l=one, beta0=1.0)
        for one in settings["alpha_l"]
    }
    presets["constant"] = replace(presets["1"], branch=ONE)
    by_preset: dict[str, Any] = {}
    for name, preset in presets.items():
        observables = series.measure(preset, check.batch(grown[0]), settings["seeds"])
        # The check looks at gradients over the factor of Adam's eps.
        of = [factors.resolve(preset, one).eps for one in definitions]
        groups = {spec.group: parameter for parameter, spec in definitions[0].specs.items()}
        by_preset[name] = {
            group: observables[f"gradient/{group}"][:, :, 0]
            * [[np.mean(eps[groups[group]])] for eps in of]
            for group in (*ENCODER, *CROSS)
        }
    return by_preset


def rows(settings: Settings, data: Data) -> list[Row]:
    """A slope in the decoder's depth of the encoder's matrices together, and of cross-attention's keys and values."""
    table = []
    for name, of in data.items():
        control = name == "constant"
        alpha_l = 1.0 if control else float(name)
        rule = "branches the same at every depth" if control else f"alpha_L = {alpha_l:g}"
        together = np.exp(np.mean([np.log(of[group]) for group in ENCODER], axis=0))
        what = f"gradients of the encoder's {len(ENCODER)} matrices (geometric mean) against the decoder's depth, {rule}"
        signal = {"predicted": 0.5 - alpha_l, "tolerance": 0.15, "control": control}
        table.append(exponent(what, settings["depth"], together, **signal))
        for group in () if control else CROSS:
            what = f"gradient of {group}, one layer's, against the decoder's depth, {rule}"
            table.append(
                exponent(what, settings["depth"], of[group], predicted=-alpha_l, tolerance=0.15)
            )
    return table


def draw(settings: Settings, data: Data) -> matplotlib.figure.Figure:
    """A panel per rule: the encoder's matrices, and cross-attention's keys and values."""
    figure, axes = panels.row(len(data), "What comes back to an encoder as its decoder gets deeper")
    for one, (name, of) in zip(axes, data.items(), strict=True):
        alpha_l = 1.0 if name == "constant" else float(name)
        together = np.exp(np.mean([np.log(of[group]) for group in ENCODER], axis=0))
        panels.power_law(
            one, settings["depth"], together, "encoder's matrices", predicted=0.5 - alpha_l
        )
        for color, group in zip(panels.COLORS[1:], CROSS, strict=False):
            panels.power_law(
                one, settings["depth"], of[group], group, color=color, predicted=-alpha_l
            )
        title = "control: constant branches" if name == "constant" else rf"$\alpha_L$ = {name}"
        panels.label(
            one,
            f"{title}, dashed: theory",
            "blocks of the decoder",
            "gradient, root mean square",
            legend=True,
        )
    return figure


FIGURE = Figure(
    title="The encoder's first gradients as its decoder gets deeper",
    source="derived here: a sum over the decoder's blocks of branches that are independent at initialization",
    about="Gradients at initialization in an encoder of 4 blocks, and of cross-attention's keys and "
    "values in each layer, as the decoder alone gets deeper. The model is BART's layout with a "
    "readout of its own, under `depth-mup` in absolute form. Tokens and labels are random.",
    **settings_of(__name__),
    measure=measure,
    rows=rows,
    draw=draw,
)  # fmt: skip
