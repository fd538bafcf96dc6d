"""Flags of `mupax transfer`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

from tyro import conf

from mupax.command_line import Repeated
from mupax.zoo.configs import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transfer:
    """Whether the best learning rate stays as the model grows.

    Trains the recipe's model at each size over a grid of learning rates, half octaves apart, from several seeds on the same
    batches; fits each size's best rate, and says whether to keep the rate, how far it drifts as the size doubles, what not
    retuning the larger sizes costs, and whether bigger is better near the transferred rate. --compare puts other presets beside,
    --control one that should drift. The grid grows until every minimum lies inside, seeds are added until the verdict is decided
    or --max-seeds or --minutes of training end. The preset is relative to the smallest size unless --preset.base is given.

    A rate transfers where its drift is within 0.15 octaves per doubling and the 95 % interval inside 0.30; it drifts where the
    interval lies wholly outside 0.15; else it is undecided. Before --max-seeds a study ends only if an interval of 98 % decides too.

    FOLDER gets points.jsonl, transfer.json, transfer.html and a PNG per axis; the same command goes on where it was stopped.
    What is not listed here is a flag of the recipe (`mupax train RECIPE --help`) and holds for every point.
    """

    recipe: Annotated[conf.Positional[str], conf.arg(metavar="RECIPE|FILE")]
    """A recipe of `mupax train --help`, or a config file; `--config FILE` says the same."""
    grow: Annotated[Repeated, conf.arg(metavar="AXIS=N,N,...")]
    """What grows alone: head_dim, heads, width, depth, encoder_depth, mlp, kv_heads, batch (at the same tokens) or tokens; each is a study."""
    compare: Annotated[tuple[str, ...], conf.arg(metavar="PRESET ...")] = ()
    """Other presets side by side; constants after commas: depth-mup,alpha_l=1. A joint rule is the recipe's preset under it."""
    control: Annotated[str | None, conf.arg(metavar="PRESET")] = None
    """A preset that should drift, to hold the others against; where batch or tokens grow, none."""
    search: Literal["grid", "frugal"] = "grid"
    """frugal: every size's best rate alone, without a verdict, for about 0.4 of the training (docs/transfer.md)."""
    seeds: Annotated[int, conf.arg(metavar="N")] = 3
    """Initializations at every rate."""
    max_seeds: Annotated[int, conf.arg(metavar="N")] = 8
    """Initializations near the minima, at most: one after another while the verdict is undecided."""
    minutes: Annotated[float, conf.arg(metavar="M")] = 20.0
    """Training time of one study."""
    out: Annotated[Path | None, conf.arg(metavar="FOLDER")] = None
    """Where everything goes; runs/transfer-RECIPE unless given."""
    predict: Annotated[Repeated, conf.arg(metavar="AXIS=N,...|RECIPE")] = ()
    """Forecast loss and best rate of a larger run, as head_dim=256 or depth=8,tokens=409600; written into FOLDER before it runs."""
    how: Literal["auto", "together", "in-turn"] = "auto"
    """As `mupax sweep`."""
    save_tuned: Annotated[str | None, conf.arg(metavar="NAME")] = None
    """Save the smallest size's best rate as --preset PRESET:NAME; NAME may be the path of a .json."""

    def __post_init__(self) -> None:
        if self.seeds < 1 or self.max_seeds < self.seeds:
            raise ConfigError(f"--seeds {self.seeds} and --max-seeds {self.max_seeds}: write 1 <= seeds <= max-seeds")
        if self.search == "frugal" and (self.control or self.predict):
            flag = "--control" if self.control else "--predict"
            raise ConfigError(
                f"{flag} needs the verdict of a whole study, which --search frugal has not; leave one out"
            )
        if self.search == "frugal" and self.seeds < 2:
            raise ConfigError("--search frugal needs two seeds to know their noise; write --seeds 3")
        if not self.minutes > 0:
            raise ConfigError(f"--minutes is {self.minutes}; write a number above 0")
