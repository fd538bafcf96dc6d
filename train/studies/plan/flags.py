"""Flags of `mupax plan`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

from tyro import conf

from mupax.command_line import Repeated
from mupax.train.config.checks import at_least
from mupax.zoo.configs import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A run's whole config, its memory, time, cost and loss, each with the rule or study that it comes from.

    The learning rate and the loss are those of a law fitted to the rows of studies (--from), with 90 % intervals, and cautions
    where it goes beyond what was measured or where published rules contradict each other. A model is planned as the study's run was:
    its data, batch, optimizer, clip, preset and base, where no flag says otherwise. A recipe has its own, and a caution names
    what in them keeps the study's rate from being used. With --chips mesh and remat are those
    that the TPU compiler finds to fit. What is not listed here is a flag of the recipe (`mupax train RECIPE --help`).
    `mupax plan score FORECAST PLACE` holds a forecast, or a plan, against the run that came.
    """

    recipe: Annotated[conf.Positional[str], conf.arg(metavar="RECIPE|FILE|MODEL")]
    """A recipe of `mupax train`, or a config file (also `--config FILE`); or a model of `mupax models`, for the run of the study.
    `--model NAME` alone says the same."""
    tokens: Annotated[str | None, conf.arg(metavar="N")] = None
    """Tokens, or images, to see: 10b, 300m, 2e9; the recipe's own unless given. Warm-up stays the same fraction of the run."""
    studies: Annotated[Repeated, conf.arg(aliases=("--from",), metavar="FOLDER")] = ()
    """A folder of `mupax transfer` or `sweep`; may come several times. Without one the recipe's numbers stay."""
    chips: Annotated[str | None, conf.arg(metavar="CHIP:AxB")] = None
    """v5e:16x16, v5p:4x4x4, ...; this machine unless given."""
    slices: Annotated[int, conf.arg(metavar="N")] = 1
    """So many of them, joined by the slow network."""
    limit: Annotated[int, conf.arg(metavar="N")] = 3
    """With --chips: compile at most so many meshes, remat policies and microbatches; 0 compiles the recipe's own."""
    price: Annotated[float | None, conf.arg(metavar="X")] = None
    """Of a chip, or of this machine, for an hour."""
    mfu: Annotated[float | None, conf.arg(metavar="X")] = None
    """Utilization to count with, as 0.4; the compiler's upper bound, or the study's own speed, unless given."""
    tokens_per_second: Annotated[float | None, conf.arg(metavar="X")] = None
    """Throughput of all devices, where it has been measured."""
    out: Annotated[Path | None, conf.arg(metavar="PATH")] = None
    """Write the plan, and the forecast in it, as JSON."""

    def __post_init__(self) -> None:
        at_least("--", self, 1, "slices")
        at_least("--", self, 0, "limit", "price")
        if self.mfu is not None and not 0 < self.mfu <= 1:
            raise ConfigError(f"--mfu is {self.mfu}; write a share in (0, 1], as 0.4")
        if self.tokens_per_second is not None and not self.tokens_per_second > 0:
            raise ConfigError(f"--tokens-per-second is {self.tokens_per_second}; write a number above 0")
