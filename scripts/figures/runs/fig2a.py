"""Figure 2a: the best learning rate as the head dimension N grows, at alpha_A = 1 and 1/2."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.figures import rates
from scripts.figures.result import Data, Figure, Row, Settings, settings_of

if TYPE_CHECKING:
    import matplotlib.figure

    from mupax.train.config.run import Config


def measure(settings: Settings, work: Path) -> dict[str, Any]:
    """Train at many learning rates and head dimensions under every rule of the settings.

    Returns:
        Result of `rates.measure`, with a study for each rule.
    """
    configs = {}
    for name, rule in settings["rules"].items():
        configs[name] = [_config(settings, rule, size) for size in settings["head_dim"]]
    return rates.measure(configs, settings["head_dim"], settings["limits"], work)


def _config(settings: Settings, rule: Settings, head_dim: int) -> Config:
    """Return a run config of the paper's ViT.

    Args:
        rule: Arguments of `training.vit` such as `alpha_a`. An empty rule is the control, which has
            the preset `sp`.
    """
    from mupax.train.config.run import PresetConfig
    from scripts.figures import training

    config = training.vit(head_dim=head_dim, **settings["model"], **rule)
    return config if rule else replace(config, preset=PresetConfig(name="sp", base=None))


def rows(settings: Settings, data: Data) -> list[Row]:
    """Return a row for each rule: octaves that its best learning rate moves per doubling of N.

    The prediction is 0, and `sp` is a control.
    """
    table = []
    for name, rule in settings["rules"].items():
        description = f"octaves that the best learning rate moves per doubling of N, {name}"
        table.append(
            rates.row(description, settings["head_dim"], data[name], predicted=0, control=not rule)
        )
    return table


def draw(settings: Settings, data: Data) -> matplotlib.figure.Figure:
    """Draw a panel for every rule with a curve for every N."""
    title = "Figure 2a: loss against learning rate as the head dimension N grows"
    return rates.draw(title, "N", settings["head_dim"], data)


FIGURE = Figure(
    title="Figure 2a: transfer of the learning rate over N",
    source="figure 2a of Bordelon, Chaudhry and Pehlevan 2024 (arXiv 2405.15712)",
    about="Training loss of Bordelon et al.'s ViT with eight heads on scikit-learn's digits "
    "(theirs: CIFAR-5M) as the head dimension N grows. With attention logits "
    "q.k/N or q.k/N^(1/2), the best learning rate is predicted not to move. The control is `sp`.\n\n"
    "The loss is the mean over the last tenth of the steps. The output is centred, the "
    "learning rate is constant, and the optimizer is SGD with momentum. The grid has half "
    "octaves. Seeds are paired, and all runs see the same batches. The optimum is `mupax "
    "transfer`'s fit. Studies of a language model under Adam are in "
    "[transfer.md](transfer.md).",
    **settings_of(__name__),
    measure=measure,
    rows=rows,
    draw=draw,
    keeps_runs=True,
)
