"""Change of a ViT in its first step of AdamW as the width grows, under the effective theory.

The presets are the family of Dinan, Yaida and Zhang 2023.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mupax import presets
from mupax.zoo import configs
from scripts.figures import panels
from scripts.figures.result import Data, Figure, Row, Settings, exponent, settings_of

if TYPE_CHECKING:
    import matplotlib.figure

OBSERVED = {
    "change residual": "change of the residual stream",
    "change logits": "change of the output",
}
"""Observable of the check to its name in rows."""


def measure(settings: Settings, work: Path) -> dict[str, Any]:
    """Measure how much one step of AdamW changes the residual stream and the output.

    Returns:
        `measured`: {preset: {observable: root mean squares of the change [widths, seeds]}}.
        `theory`: {preset: {observable: predicted exponent of the width}}.
    """
    del work
    from mupax.train.config.run import OptimizerConfig
    from mupax.train.studies.check import check
    from mupax.train.studies.check import theory as expectation
    from mupax.zoo.definition import definition

    grown = check.grow(configs.get("vit-tiny"), "heads", len(settings["width"]))
    widths = [model.width for model in grown]
    assert widths == settings["width"], f"the check's models have the widths {widths}"
    definitions = [definition(model) for model in grown]
    config = OptimizerConfig(
        name="adamw", peak_lr=settings["peak_lr"], schedule="constant", eps=1e-12
    )
    series = check.Series(definitions, config, 1)
    data: dict[str, Any] = {"measured": {}, "theory": {}}
    for name in settings["presets"]:
        preset = presets.get(name, base=grown[0].base_sizes())
        observables = series.measure(preset, check.batch(grown[0]), settings["seeds"])
        theory = expectation.of(preset, definitions[0], definitions[-1], config.name, strict=True)
        measured = {}
        slopes = {}
        for observed in OBSERVED:
            measured[observed] = observables[observed][:, :, 1]
            slopes[observed] = theory[observed, 1].slope
        data["measured"][name] = measured
        data["theory"][name] = slopes
    return data


def rows(settings: Settings, data: Data) -> list[Row]:
    """Compare the exponents of the width with theory, a row for each observable and preset."""
    table = []
    for observed, description in OBSERVED.items():
        for name in settings["presets"]:
            table.append(
                exponent(
                    f"{description} in the first step of AdamW against the width, {name}",
                    settings["width"],
                    data["measured"][name][observed],
                    predicted=data["theory"][name][observed],
                    tolerance=0.15,
                    source="`mupax.presets.analysis.limits` from the member's rules",
                )
            )
    return table


def draw(settings: Settings, data: Data) -> matplotlib.figure.Figure:
    """Draw a panel for each observable against the width, with a line for every preset."""
    figure, axes = panels.row(2, "A ViT's first step under the effective theory's presets")
    for panel, (observed, description) in zip(axes, OBSERVED.items(), strict=True):
        for color, name in zip(panels.COLORS, settings["presets"], strict=False):
            panels.power_law(
                panel,
                settings["width"],
                np.asarray(data["measured"][name][observed]),
                name,
                color=color,
                predicted=data["theory"][name][observed],
            )
        title = f"{description.capitalize()}; dashed: theory"
        panels.label(panel, title, "width", "root mean square", legend=True)
    return figure


FIGURE = Figure(
    title="The effective theory's family on a ViT: what the first step moves",
    source="Dinan, Yaida and Zhang 2023 (arXiv 2304.02034), the family from neural tangent (`ntk`) "
    "to maximal update",
    about="Change of the residual stream and the output of a ViT of depth 2 in the first step of "
    "AdamW, as heads and width grow together. `mupax.presets.analysis.limits` predicts the "
    "exponents.\n\n"
    "The learning rate is so small that the change is proportional to it. At the smallest "
    "width the three members of the family are one model; `standard` starts with variances "
    "of its own.",
    **settings_of(__name__),
    measure=measure,
    rows=rows,
    draw=draw,
)
