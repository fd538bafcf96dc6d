"""Studies of a `mupax transfer`: its flags, every axis under every preset, and shared points."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from tyro import conf

from mupax import command_line
from mupax.command_line import Repeated
from mupax.presets import CONSTANT_FLAGS, PresetError, horizon
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
    """Measure whether the best learning rate stays as the model grows.

    Trains the recipe's model at each size over a grid of learning rates, half octaves apart, from
    several seeds on the same batches. Fits each size's best rate. Says whether to keep the rate,
    how far it drifts as the size doubles, what not retuning the larger sizes costs, and whether
    bigger is better near the transferred rate. --compare adds other presets, --control one that
    should drift. The grid grows until every minimum lies inside. Seeds are added until the verdict
    is decided or --max-seeds or --minutes of training end. The preset is relative to the smallest
    size unless --preset.base is given.

    A rate transfers where its drift is within 0.15 octaves per doubling and the 95 % interval
    inside 0.30; it drifts where the interval lies wholly outside 0.15; else, or where noise hides
    the curves of most sizes, it is undecided. Before --max-seeds a study ends only if an interval
    of 98 % decides too.

    FOLDER gets points.jsonl, transfer.json, transfer.html and a PNG per axis; the same command goes
    on where it was stopped. What is not listed here is a flag of the recipe (`mupax train RECIPE
    --help`) and holds for every point.
    """

    recipe: Annotated[conf.Positional[str], conf.arg(metavar="RECIPE|FILE")]
    """A recipe of `mupax train --help`, or a config file; `--config FILE` says the same."""
    grow: Annotated[Repeated, conf.arg(metavar="AXIS=N,N,...")]
    """Size that grows, with its values; each axis is a study. One of head_dim, heads, width, depth,
    encoder_depth, mlp, kv_heads, batch (at the same tokens) or tokens."""
    compare: Annotated[tuple[str, ...], conf.arg(metavar="PRESET ...")] = ()
    """Other presets, with constants after commas: depth-mup,alpha_l=1. A joint rule means the
    recipe's preset under that rule."""
    control: Annotated[str | None, conf.arg(metavar="PRESET")] = None
    """A preset that should drift, for comparison; where batch or tokens grow, none."""
    search: Literal["grid", "frugal"] = "grid"
    """frugal: only every size's best rate, without a verdict, for about 0.4 of the training
    (docs/evidence/transfer.md)."""
    seeds: Annotated[int, conf.arg(metavar="N")] = 3
    """Number of initializations at every rate."""
    max_seeds: Annotated[int, conf.arg(metavar="N")] = 8
    """Most initializations near the minima, added one by one while the verdict is undecided."""
    minutes: Annotated[float, conf.arg(metavar="M")] = 20.0
    """Most minutes of training per study."""
    out: Annotated[Path | None, conf.arg(metavar="FOLDER")] = None
    """Folder for all files; runs/transfer-RECIPE unless given."""
    predict: Annotated[Repeated, conf.arg(metavar="AXIS=N,...|RECIPE")] = ()
    """Forecast loss and best rate of a larger run, such as head_dim=256 or depth=8,tokens=409600.
    The forecast is written into FOLDER before the run."""
    how: Literal["auto", "together", "in-turn"] = "auto"
    """Training of points together or one after another, as in `mupax sweep`."""
    save_tuned: Annotated[str | None, conf.arg(metavar="NAME")] = None
    """Save the smallest size's best rate as --preset PRESET:NAME; NAME may be a path of a .json."""

    def __post_init__(self) -> None:
        if self.seeds < 1 or self.max_seeds < self.seeds:
            raise ConfigError(
                f"--seeds {self.seeds} and --max-seeds {self.max_seeds}: "
                f"write 1 <= seeds <= max-seeds"
            )
        if self.search == "frugal" and (self.control or self.predict):
            flag = "--control" if self.control else "--predict"
            raise ConfigError(
                f"{flag} needs the verdict of a whole study, which --search frugal has not; "
                f"leave one out"
            )
        if self.search == "frugal" and self.seeds < 2:
            raise ConfigError(
                "--search frugal needs two seeds to know their noise; write --seeds 3"
            )
        if not self.minutes > 0:
            raise ConfigError(f"--minutes is {self.minutes}; write a number above 0")


def replanned(command: str) -> list[Study]:
    """Return the studies that a `mupax transfer` command plans, such as one from transfer.json.

    Args:
        command: Whole command line, which begins with `mupax transfer`.

    Raises:
        UsageError: The command is no `mupax transfer`, or has flags that this version has not.
        ConfigError: A value of the command does not fit this version.
        PresetError: A preset of the command does not fit this version.
    """
    name, *argv = words_of(command) or [""]
    if name != "transfer":
        raise command_line.UsageError(f"a recorded command is no `{PROG}`: {command[:60]}")
    args, rest = command_line.parse_known(Transfer, PROG, cli.with_file_first(argv))
    recipe, is_relative = parsed(args, rest)
    base = recipe.config.preset.base if is_relative else None
    studies, _ = planned(args, recipe.config, base)
    return studies


def parsed(args: Transfer, rest: Sequence[str]) -> tuple[cli.Command, bool]:
    """Parse the flags of the recipe. Return its command, and whether they set `--preset.base`.

    A workdir of the recipe is removed, because a study has a folder of its own.

    Args:
        rest: Further words of the command line, the flags of the recipe.

    Raises:
        UsageError: A flag is unknown, or is `--print-config` or `--restart`.
        ConfigError: Values do not fit together.
    """
    start = cli.recipe_of_points(args.recipe)
    recipe = cli.parse(args.recipe, start, rest, command_line.flags(Transfer))
    cli.refuse_session_flags(PROG, recipe, ("dry_run",))
    # Read from the command line, because a base that only the recipe has does not count.
    names_base = any(word.partition("=")[0] == "--preset.base" for word in rest)
    # A config file may have a workdir, and a study has its own folder.
    config = dataclasses.replace(recipe.config, workdir=None)
    return dataclasses.replace(recipe, config=config), names_base


def shared(studies: Sequence[Study]) -> list[Study]:
    """Return studies in which a run that several presets train identically is trained only once.

    Different presets may give a run the same initial stds, learning rates and multipliers. Every
    relative preset is `sp` at its base, a preset without a depth rule is `sp` at every depth, and
    `mup` and `mup-half` are one rule if heads grow. The field `trained` of each study gets the runs
    to train in place of its `configs`. Such a run is under `sp`, or under the preset of an earlier
    study, and its losses serve all studies.
    """
    distinct: list[_NumberedRun] = []
    shared_studies = []
    for study in studies:
        trained = tuple(_first_with_same_numbers(config, distinct) for config in study.configs)
        shared_studies.append(dataclasses.replace(study, trained=trained))
    return shared_studies


class _NumberedRun(NamedTuple):
    """Run with the values that its preset sets, by which runs are compared.

    Attributes:
        config: The run.
        numbers: Arrays of `_numbers`. Empty if the preset has no rule for the run.
    """

    config: Config
    numbers: list[np.ndarray]


def _first_with_same_numbers(config: Config, distinct: list[_NumberedRun]) -> Config:
    """Return the first run whose training is numerically identical to that of `config`.

    The candidates are the run under `sp`, and then `distinct`. If none is equal, the run itself is
    returned and added to `distinct`. A run that the preset has no rule for equals none.
    """
    import numpy as np

    numbers = _numbers(config)
    candidates: list[_NumberedRun] = []
    if numbers:
        sp = PresetConfig(name="sp", base=config.preset.base)
        plain = dataclasses.replace(config, preset=sp)
        candidates = [_NumberedRun(plain, _numbers(plain)), *distinct]

    for candidate in candidates:
        # Presets and optimizers are compared by their numbers, all else by the fields.
        same_preset = dataclasses.replace(
            candidate.config, preset=config.preset, optimizer=config.optimizer
        )
        is_same_run = same_preset == config
        has_as_many = len(numbers) == len(candidate.numbers)
        if is_same_run and has_as_many and all(map(np.array_equal, numbers, candidate.numbers)):
            return candidate.config
    distinct.append(_NumberedRun(config, numbers))
    return config


def _numbers(config: Config) -> list[np.ndarray]:
    """Return everything that a run's preset and optimizer decide, as arrays to compare.

    The arrays are the factors and initial stds of all parameters, and, as texts, the steps of Muon
    and the optimizer after a joint rule. The list is empty if the preset has no rule for the run.
    """
    import jax
    import numpy as np

    # Compared by numbers and not by names, because different rules may give equal factors.
    from mupax.train.core.factors import init_stds, resolve
    from mupax.zoo.definition import definition

    try:
        preset = preset_of(config)
        model = definition(config.model)
        factors = resolve(preset, model, config.optimizer.name, config.optimizer.decay)
        matrix_steps = preset.matrix_steps(model.specs, model.sizes, config.optimizer.name)
    except PresetError:
        return []
    # Muon's blocks and its measured norms change a step, but no factor. They and the optimizer are
    # compared as text, which becomes one more array.
    decided = (factors, init_stds(preset, model), repr(matrix_steps), repr(config.scaled_optimizer))
    return [np.asarray(leaf) for leaf in jax.tree.leaves(decided)]


def planned(args: Transfer, config: Config, base: str | None) -> tuple[list[Study], str | None]:
    """Return a study for each axis of --grow and each preset, and the control's label or `None`.

    The presets are the recipe's, those of --compare and that of --control. Nothing is trained.

    Args:
        config: Run of the recipe with its own flags.
        base: Base of every preset. `None` stands for the smallest size of each study.

    Raises:
        ConfigError: An axis or size does not exist, an axis is named twice, or the control is the
            recipe's own preset.
        PresetError: A preset does not exist or does not fit.
    """
    from mupax.train.studies.transfer import study as transfer

    main = dataclasses.replace(config.preset, base=base)
    presets = {}
    for text in args.compare:
        preset = _preset_of_flag(text, main)
        presets[label_of(preset)] = preset
    # The recipe's own preset comes first, unless `--compare` names it elsewhere.
    if label_of(main) not in presets:
        presets = {label_of(main): main, **presets}
    control_label = None
    # Without a joint rule there is none to leave out, so that "none" means no control.
    if args.control and not (args.control == main.joint == "none"):
        control = _preset_of_flag(args.control, main)
        control_label = label_of(control)
        if control_label == label_of(main):
            raise ConfigError(
                f"--control {args.control} is the preset of the study itself, and a control is one "
                "whose best rate should drift; write another, such as --control sp, or "
                "--control none"
            )
        # The control may be one of the compared presets, and is then planned once.
        presets.setdefault(control_label, control)

    if not args.grow:
        raise ConfigError("say what grows: write --grow AXIS=N,N,..., such as --grow heads=2,4,8")
    axes = [sizes.parse(text, (*sizes.AXES, *RUN_AXES)) for text in args.grow]
    if len({axis for axis, _ in axes}) < len(axes):
        raise ConfigError(
            "--grow names an axis twice; write all its sizes at once, as head_dim=16,32,64"
        )
    studies = []
    for axis, grown_sizes in axes:
        for label, preset in presets.items():
            studies.append(transfer.plan(config, axis, grown_sizes, preset, label))
    return studies, control_label


def _preset_of_flag(text: str, main: PresetConfig) -> PresetConfig:
    """Return the preset of `--compare` or `--control`. Whether it exists is not checked.

    Args:
        text: Preset with constants after commas, or a joint rule.
        main: Preset of the recipe. It gives the base and the joint rule of a named preset, and
            everything but the joint rule if `text` is a joint rule.
    """
    if text in horizon.RULES:
        return dataclasses.replace(main, joint=horizon.rule(text).name)
    name, *constants = (part.strip() for part in text.split(","))
    return PresetConfig(name=name, base=main.base, constants=tuple(constants), joint=main.joint)


def label_of(preset: PresetConfig) -> str:
    """Return the name of a preset, followed by its constants and its joint rule."""
    words = [preset.name]
    for name in CONSTANT_FLAGS:
        value = getattr(preset, name)
        if value is not None:
            words.append(f"{name}={value:g}")
    words += preset.constants
    if preset.joint != "none":
        words.append(f"joint={preset.joint}")
    return " ".join(words)
