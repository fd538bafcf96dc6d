"""The studies that a `mupax transfer` asks for: every axis under every preset, and which of their points are one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro import conf

from mupax import command_line
from mupax.command_line import Repeated
from mupax.presets import PresetError, horizon
from mupax.presets.papers import CONSTANT_FLAGS
from mupax.presets.roles import RUN_AXES
from mupax.train.config import cli, sizes
from mupax.train.config.preset import preset_of
from mupax.train.config.record import words_of
from mupax.train.config.run import Config, PresetConfig
from mupax.zoo.configs import ConfigError

if TYPE_CHECKING:
    import numpy as np

    from mupax.train.studies.transfer.study import Study

PROG = "mupax transfer"


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
    """frugal: every size's best rate alone, without a verdict, for about 0.4 of the training (docs/evidence/transfer.md)."""
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
            raise ConfigError(
                f"--seeds {self.seeds} and --max-seeds {self.max_seeds}: write 1 <= seeds <= max-seeds"
            )
        if self.search == "frugal" and (self.control or self.predict):
            flag = "--control" if self.control else "--predict"
            raise ConfigError(
                f"{flag} needs the verdict of a whole study, which --search frugal has not; leave one out"
            )
        if self.search == "frugal" and self.seeds < 2:
            raise ConfigError(
                "--search frugal needs two seeds to know their noise; write --seeds 3"
            )
        if not self.minutes > 0:
            raise ConfigError(f"--minutes is {self.minutes}; write a number above 0")


def replanned(command: str) -> list[Study]:
    """The studies of a command as its transfer.json has it.

    Args:
        command: as it was written.

    Raises:
        UsageError, ConfigError, PresetError: it is no such command, or not one of this version.
    """
    name, *argv = words_of(command) or [""]
    if name != "transfer":
        raise command_line.UsageError(f"a recorded command is no `{PROG}`: {command[:60]}")
    args, rest = command_line.parse_known(Transfer, PROG, cli.with_file_first(argv))
    config, relative = parsed(args, rest)
    return planned(args, config.config, config.config.preset.base if relative else None)[0]


def parsed(args: Transfer, rest: Sequence[str]) -> tuple[cli.Command, bool]:
    """The recipe with its flags and no workdir, and whether these name the preset's base.

    Args:
        args: flags of the command.
        rest: flags of the recipe.
    """
    recipe = cli.parse(
        args.recipe, cli.recipe_of_points(args.recipe), rest, command_line.flags(Transfer)
    )
    relative = any(word.partition("=")[0] == "--preset.base" for word in rest)
    return dataclasses.replace(
        recipe, config=dataclasses.replace(recipe.config, workdir=None)
    ), relative


def shared(studies: Sequence[Study]) -> list[Study]:
    """The studies, their points under `sp`, or under the preset of an earlier study, where that changes no number.

    Every relative preset is `sp` at its base, a preset without a depth rule is `sp` at every depth, and `mup` and `mup-half` are
    one rule where heads grow. Such a point is trained once, under the name that comes first, and serves all.
    """
    import jax
    import numpy as np

    from mupax.train.core.factors import init_stds, resolve
    from mupax.zoo.definition import definition

    entries: list[tuple[Config, list[np.ndarray]]] = []

    def numbers(config: Config) -> list[np.ndarray]:
        """All that a preset decides in a run, and its optimizer; none where it has no rule for this one."""
        try:
            preset, model = preset_of(config), definition(config.model)
            factors = resolve(preset, model, config.optimizer.name, config.optimizer.decay)
        except PresetError:
            return []
        decided = (factors, init_stds(preset, model), repr(config.scaled_optimizer))
        return [np.asarray(leaf) for leaf in jax.tree.leaves(decided)]

    def first(config: Config) -> Config:
        """The first of `sp`, `entries` and the config itself that trains as it does; is added to `entries`."""
        plain = dataclasses.replace(config, preset=PresetConfig(name="sp", base=config.preset.base))
        ours = numbers(config)
        for other, its in [(plain, numbers(plain)), *entries] if ours else ():
            same_run = (
                dataclasses.replace(other, preset=config.preset, optimizer=config.optimizer)
                == config
            )
            if same_run and len(ours) == len(its) and all(map(np.array_equal, ours, its)):
                return other
        entries.append((config, ours))
        return config

    return [
        dataclasses.replace(study, trained=tuple(map(first, study.configs))) for study in studies
    ]


def planned(args: Transfer, config: Config, base: str | None) -> tuple[list[Study], str | None]:
    """The studies, axis by axis and preset by preset, and the control's label.

    Args:
        args: flags of the command.
        config: the recipe's run, with its own flags.
        base: what every preset is relative to; each study's smallest size where it is None.

    Raises:
        ConfigError, PresetError: an axis, size or preset that there is not.
    """
    from mupax.train.studies.transfer import study as transfer

    main = dataclasses.replace(config.preset, base=base)

    def preset(text: str) -> PresetConfig:
        if text in horizon.RULES:
            return dataclasses.replace(main, joint=horizon.rule(text).name)
        name, *values = (part.strip() for part in text.split(","))
        return PresetConfig(name=name, base=base, constants=tuple(values), joint=main.joint)

    presets = {label_of(other): other for other in map(preset, args.compare)}
    if label_of(main) not in presets:
        presets = {label_of(main): main, **presets}
    control = preset(args.control) if args.control else None
    if control is not None:
        presets.setdefault(label_of(control), control)
    axes = [sizes.parse(text, (*sizes.AXES, *RUN_AXES)) for text in args.grow]
    if len({axis for axis, _ in axes}) < len(axes):
        raise ConfigError(
            "--grow names an axis twice; write all its sizes at once, as head_dim=16,32,64"
        )
    studies = [
        transfer.plan(config, axis, grown, one, name)
        for axis, grown in axes
        for name, one in presets.items()
    ]
    return studies, None if control is None else label_of(control)


def label_of(preset: PresetConfig) -> str:
    """A preset in a word, with what was said of it."""
    flags = [
        f"{name}={getattr(preset, name):g}"
        for name in CONSTANT_FLAGS
        if getattr(preset, name) is not None
    ]
    rule = [f"joint={preset.joint}"] if preset.joint != "none" else []
    return " ".join([preset.name, *flags, *preset.constants, *rule])
