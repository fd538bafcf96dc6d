"""The run that is asked for, before a study has said anything of its rate: a recipe's, or the study's on another model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mupax import command_line
from mupax.presets import PresetError
from mupax.train.config import cli, joint, sizes
from mupax.train.config.preset import rules_of
from mupax.train.config.recipes import RECIPES
from mupax.train.config.run import Config
from mupax.train.studies.forecast.points import Points
from mupax.train.studies.plan.flags import Plan
from mupax.train.studies.transfer.planned import label_of
from mupax.zoo.configs import CONFIGS, ConfigError


@dataclasses.dataclass(frozen=True)
class Request:
    """A run, and where what nobody wrote a flag for is from.

    Attributes:
        config: of the run.
        source: the recipe or the study, for a person.
    """

    config: Config
    source: str


def with_name(argv: Sequence[str]) -> list[str]:
    """The words with the name behind `--model` as their first, where no recipe or model is named by itself.

    Args:
        argv: the words after `plan`.
    """
    model = model_of(argv)
    before = ["", *argv]
    alone = any(
        (word in RECIPES or word in CONFIGS or cli.is_file(word)) and (not last.startswith("--") or "=" in last)
        for last, word in zip(before, argv, strict=False)
    )
    first = bool(argv) and not argv[0].startswith("-")
    return [*argv] if model is None or alone or first else [model, *argv]


def model_of(argv: Sequence[str]) -> str | None:
    """The last name behind `--model`; None without one."""
    name = None
    for word, after in zip(argv, [*argv, ""][1:], strict=True):
        flag, equals, value = word.partition("=")
        if flag == "--model":
            name = value if equals else after
    return name or None


def run_of(args: Plan, rest: Sequence[str], studies: Sequence[Points]) -> Request:
    """The run that is asked for.

    Args:
        args: flags of the command.
        rest: flags of the recipe.
        studies: of which the first with the run's preset lends its settings to a command that names a model.

    Raises:
        ConfigError, UsageError, PresetError: what does not fit, or a word that is neither recipe nor model.
    """
    if args.tokens and any(word.partition("=")[0] == "--steps" for word in rest):
        raise ConfigError("--tokens and --steps both say how long the run is; write one of them")
    name, words, flag = args.recipe, [*rest], model_of(rest)
    if flag in RECIPES and flag not in CONFIGS:  # `--model gpt2-c4`: cli knows models alone
        if flag != name:
            raise ConfigError(f"{name} and --model {flag}: {flag} is a recipe; write one of them")
        words = _without_model(words)
    if name in CONFIGS and flag not in (None, name) and name not in RECIPES:
        raise ConfigError(f"{name} and --model {flag} are two models; write one of them")
    named = name in CONFIGS and (name not in RECIPES or (flag == name and bool(studies)))
    if named and not studies:
        raise ConfigError(
            f"{name} is a model; write a recipe and --model {name}, or the study to plan from behind --from"
        )
    if not named:
        return Request(_parsed(args, name, None, words), f"recipe {name}")
    words = words if flag else ["--model", name, *words]
    runs = ((_lent(args, study, words), study) for study in studies)
    first = None
    for config, study in runs:
        first = first or Request(config, f"study {' and '.join(study.folders)}")
        if rules_of(config) == rules_of(study.settings[-1].config):
            return dataclasses.replace(first, config=config)
    assert first is not None  # there are studies
    return first


def _parsed(args: Plan, recipe: str, study: Points | None, words: Sequence[str]) -> Config:
    """The recipe, or the study's run, with flags, at the tokens that are asked for."""
    durations = [
        flag
        for flag in joint.DURATIONS
        if any(word.partition("=")[0].replace("_", "-").endswith(flag) for word in words)
    ]
    if args.tokens and durations:
        raise ConfigError(
            f"--optimizer.{durations[0]} is of the run's steps, which --tokens changes; write --steps N in place of --tokens"
        )
    start = cli.recipe(recipe)
    make = start if study is None else lambda: _of_study(start(), study.settings[-1].config)
    config = dataclasses.replace(cli.parse(recipe, make, words, command_line.flags(Plan)).config, workdir=None)
    if not args.tokens:
        return config
    each = config.data.batch_size * config.model.units
    steps = max(1, round(joint.amount("--tokens", args.tokens) / each))
    longer = sizes.grown_run(config, "tokens", steps * each)
    own = config.preset.joint != "none" or any(word.startswith("--optimizer.warmup") for word in words)
    return dataclasses.replace(longer, optimizer=config.optimizer) if own else longer


def _lent(args: Plan, study: Points, words: Sequence[str]) -> Config:
    """The study's run with flags; its preset may not be for the model that these name."""
    setting = study.settings[-1].config
    try:
        return _parsed(args, setting.recipe, study, words)
    except PresetError as error:
        raise PresetError(
            f"under the settings of the study ({label_of(setting.preset)}): {error}; write --preset.constants with those to keep, or "
            "a recipe first, whose own preset then stays"
        ) from error


def _of_study(recipe: Config, setting: Config) -> Config:
    """The recipe with all that a rate and a loss were measured at; its own rate, seeds, and how and where it runs.

    Args:
        recipe: of the study.
        setting: a run of it.
    """
    data = dataclasses.replace(setting.data, seed=recipe.data.seed, eval_batch_size=recipe.data.eval_batch_size)
    return dataclasses.replace(
        recipe,
        model=dataclasses.replace(setting.model, compute=recipe.model.compute),
        data=data,
        preset=setting.preset,
        optimizer=dataclasses.replace(setting.optimizer, peak_lr=recipe.optimizer.peak_lr),
        ema=setting.ema,
        freeze=setting.freeze,
        train_only=setting.train_only,
        steps=setting.steps,
    )


def _without_model(words: Sequence[str]) -> list[str]:
    left, words = [], [*words]
    while words:
        word = words.pop(0)
        if word == "--model":
            del words[:1]
        elif not word.startswith("--model="):
            left.append(word)
    return left
