"""Loss of a ViT against learning rate at two widths, under the effective theory's presets.

The presets are the family of Dinan, Yaida and Zhang 2023.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.figures import rates
from scripts.figures.result import Data, Figure, Row, Settings, settings_of

if TYPE_CHECKING:
    import matplotlib.figure

PREDICTED = {"maximal-update": 0.0}
"""Preset to the predicted drift of its best learning rate. Theory predicts none for the others."""


def measure(settings: Settings, work: Path) -> dict[str, Any]:
    """Search the best learning rate of both widths under every preset.

    Returns:
        Result of `rates.measure`, with one more number for each preset: `kept_step` is the exponent
        of the width by which the learning rate would have to change, so that the first step changes
        the residual stream equally at all widths.
    """
    from mupax.train.config import recipes
    from mupax.train.config.preset import PresetConfig, preset_of
    from mupax.train.studies.check import theory as expectation
    from mupax.train.studies.transfer import study as transfer
    from mupax.zoo.definition import definition

    config = recipes.RECIPES[settings["recipe"]]()
    model = replace(config.model, **settings["model"])
    optimizer = replace(config.optimizer, **settings["optimizer"])
    data = replace(config.data, seed=0, **settings["data"])
    config = replace(config, model=model, data=data, optimizer=optimizer, steps=settings["steps"])
    configs = {}
    for name in settings["presets"]:
        preset = PresetConfig(name=name, base=None)
        configs[name] = transfer.plan(config, "heads", settings["heads"], preset, name).configs
    studies = rates.measure(configs, _widths(settings), settings["limits"], work)
    for name, grown in configs.items():
        smallest = definition(grown[0].model)
        largest = definition(grown[-1].model)
        theory = expectation.of(preset_of(grown[0]), smallest, largest, optimizer.name)
        studies[name]["kept_step"] = 0.0 - theory["change residual", 1].slope
    return studies


def _widths(settings: Settings) -> list[int]:
    """Return the widths of the models."""
    head_dim = settings["model"]["width"] // settings["model"]["num_heads"]
    return [heads * head_dim for heads in settings["heads"]]


def rows(settings: Settings, data: Data) -> list[Row]:
    """Return a row for each preset: octaves that its best learning rate moves per doubling."""
    table = []
    for name, of_preset in data.items():
        description = (
            f"octaves that the best learning rate of AdamW moves per doubling of the width, {name}"
        )
        row = rates.row(description, _widths(settings), of_preset, predicted=PREDICTED.get(name))
        kept_step = of_preset["kept_step"]
        prediction = (
            f"To first order the residual stream's first step would stay at {kept_step:+g}."
        )
        table.append(replace(row, note=f"{row.note} {prediction}"))
    return table


def draw(settings: Settings, data: Data) -> matplotlib.figure.Figure:
    """Draw a panel for every preset with a curve for every width."""
    title = "A ViT trained under the effective theory's presets: loss against learning rate"
    return rates.draw(title, "width", _widths(settings), data)


FIGURE = Figure(
    title="The effective theory's family on a ViT: trained at two widths",
    source="Dinan, Yaida and Zhang 2023 (arXiv 2304.02034)",
    about="Training loss of a ViT of depth 2 on scikit-learn's digits under AdamW, at widths 64 "
    "and 256. The best learning rate under `maximal-update` is predicted not to move.\n\n"
    "Heads have one size. "
    "The loss is the mean over the last tenth of the steps. Seeds are paired, and all runs "
    "see the same batches. The presets are relative to the smaller width.",
    **settings_of(__name__),
    measure=measure,
    rows=rows,
    draw=draw,
    keeps_runs=True,
)
