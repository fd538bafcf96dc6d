"""The studies that a `mupax transfer` asks for: every axis under every preset, and which of their points are one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mupax import command_line
from mupax.presets import PresetError, horizon
from mupax.presets.papers import CONSTANT_FLAGS
from mupax.presets.roles import RUN_AXES
from mupax.train.config import cli, sizes
from mupax.train.config.preset import preset_of
from mupax.train.config.record import words_of
from mupax.train.config.run import Config, PresetConfig
from mupax.train.studies.transfer.flags import Transfer
from mupax.zoo.configs import ConfigError

if TYPE_CHECKING:
    import numpy as np

    from mupax.train.studies.transfer.study import Study

PROG = "mupax transfer"


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
    recipe = cli.parse(args.recipe, cli.recipe_of_points(args.recipe), rest, command_line.flags(Transfer))
    relative = any(word.partition("=")[0] == "--preset.base" for word in rest)
    return dataclasses.replace(recipe, config=dataclasses.replace(recipe.config, workdir=None)), relative


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
            same_run = dataclasses.replace(other, preset=config.preset, optimizer=config.optimizer) == config
            if same_run and len(ours) == len(its) and all(map(np.array_equal, ours, its)):
                return other
        entries.append((config, ours))
        return config

    return [dataclasses.replace(study, trained=tuple(map(first, study.configs))) for study in studies]


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
        raise ConfigError("--grow names an axis twice; write all its sizes at once, as head_dim=16,32,64")
    studies = [transfer.plan(config, axis, grown, one, name) for axis, grown in axes for name, one in presets.items()]
    return studies, None if control is None else label_of(control)


def label_of(preset: PresetConfig) -> str:
    """A preset in a word, with what was said of it."""
    flags = [f"{name}={getattr(preset, name):g}" for name in CONSTANT_FLAGS if getattr(preset, name) is not None]
    rule = [f"joint={preset.joint}"] if preset.joint != "none" else []
    return " ".join([preset.name, *flags, *preset.constants, *rule])
