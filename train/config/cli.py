"""Command line of a recipe: tyro makes a flag of each field of its config.

`mupax train RECIPE --help` lists the flags in use. `--help all` and `--help SECTION` list the
others. Words that do not fit end in one message that says what to write. This file imports no JAX,
so `--help`, `--print-config` and its errors answer within a second.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Annotated, NamedTuple

from tyro import conf

from mupax import command_line, terminal
from mupax.command_line import FlagField, FlagHelp, Switch, UsageError
from mupax.config_fields import Listed, affects_of
from mupax.disk import path_of
from mupax.presets.optimizers import OPTIMIZERS
from mupax.train.config.checks import at_least
from mupax.train.config.data import CACHE_HINT, unread_fields
from mupax.train.config.preset import preset_of, unnamed_axes, with_group_constants
from mupax.train.config.recipes import RECIPES
from mupax.train.config.run import Config
from mupax.train.config.sections import METRIC, StopConfig
from mupax.zoo import configs
from mupax.zoo.configs import ConfigError

RUN = "run"
"""Section of the flags that have no dot in their name."""
_SIZE_FLAGS = ("--data.name", "--model", "--resume")
"""Flags that may change a recipe's data or model, so that the model's sizes must be set again.

Without any of them, a recipe's model already has the sizes of the recipe's data.
"""


def section_of(flag: str) -> str:
    """Return the section that lists a flag, such as `model` for `--model.compute.dtype`.

    A flag without a dot is in the section `run`.
    """
    owner, dot, _ = flag.removeprefix("--").partition(".")
    return owner if dot else RUN


def is_listed(field: FlagField) -> bool:
    """Return whether `mupax train RECIPE --help`, the short help, lists the flag of a config field.

    The field's annotation says so: it is `Listed` and not a plain `Affects`.
    """
    return isinstance(affects_of(field.hint), Listed)


def flag_help(argv: Sequence[str], fields: Sequence[FlagField], prog: str) -> FlagHelp | None:
    """Return the flags that `--help`, if it is among the words, lists for a recipe.

    `--help` alone lists the common flags (`is_listed`). `--help SECTION` lists all of a section.

    Args:
        argv: Words after the name of the recipe.
        fields: All flags of the recipe (`command_line.flag_fields`).
        prog: Words before the flags, such as "mupax train lm-tiny".

    Returns:
        Flags to list and a line about the others. `None` for `--help all`, or without `--help` or
        `-h`.

    Raises:
        UsageError: The word after `--help` is neither `all`, a flag nor a section.
    """
    positions = [index for index, word in enumerate(argv) if word in ("-h", "--help")]
    if not positions:
        return None
    section = next(iter(argv[positions[0] + 1 :]), "")
    if section == "all":
        return None

    section_of_field = {field.names[0]: section_of(field.names[0]) for field in fields}
    # Not a set, whose order would change from process to process.
    sections = list(dict.fromkeys([RUN, *section_of_field.values()]))
    # The word after `--help` may be another flag, which names no section.
    if not section or section.startswith("-"):
        shown = []
        for field in fields:
            if is_listed(field):
                shown.append(field.names)
        lists = f"These are the flags in use. `{prog} --help all` lists all {len(fields)}"
    elif section in sections:
        shown = []
        for field in fields:
            if section_of_field[field.names[0]] == section:
                shown.append(field.names)
        lists = f"`{prog} --help all` lists all {len(fields)} flags"
    else:
        raise UsageError(f"--help {section}: write all, or one of {', '.join(sections)}")
    flags = frozenset(itertools.chain.from_iterable(shown))
    return FlagHelp(flags, f"{lists}, `--help SECTION` those of one: {', '.join(sections)}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """Config of a recipe with all flags applied, and what to do with it."""

    config: Annotated[Config, conf.arg(name="")]
    model: Annotated[str | None, conf.arg(metavar="NAME"), Listed("model")] = None
    """Train another model of the recipe's family (`mupax models` lists them). --model.* flags
    change that model."""
    dry_run: Annotated[Switch, Listed("session")] = False
    """Print shapes, the preset's table, memory, FLOPs and the time of a save, and train nothing."""
    print_config: Annotated[Switch, Listed("session")] = False
    """Print the resolved config as JSON, and train nothing."""
    restart: Annotated[int, conf.arg(metavar="N"), Listed("session")] = 0
    """Train in a child process, and start it again after a crash from its newest good checkpoint,
    at most N times."""
    compilation_cache: Annotated[str | None, conf.arg(metavar="DIR|none")] = None
    """Folder that keeps compiled programs for the next start (or MUPAX_COMPILATION_CACHE). None:
    the user cache folder."""

    warmup_tokens: Annotated[
        str | None, conf.arg(aliases=("--optimizer.warmup-tokens",), metavar="N[k|m|b|t]")
    ] = None
    """optimizer.warmup_steps in tokens (or images), such as 500k. With --joint, in tokens of the
    base's run."""
    decay_timescale: Annotated[
        float | None, conf.arg(aliases=("--optimizer.decay-timescale",), metavar="TAU")
    ] = None
    """optimizer.weight_decay as the share of the run that decayed weights average over. With
    --joint, of the base's run."""

    published: conf.Suppress[conf.Fixed[str | None]] = None
    """Tuned preset PRESET:NAME of the command line, if others have published its values.

    `None` without a tuned preset, and for one with values that mupax has measured.
    """

    def __post_init__(self) -> None:
        at_least("", self, 0, "restart")


class FlagReader(NamedTuple):
    """Command that takes flags of a run and trains none, such as `mupax check`."""

    name: str
    """Words of the command, such as `check`."""
    own_flags: Sequence[str]
    """Flags of the command itself, which it has read."""
    read: tuple[str, ...]
    """Beginnings of the run's flags that it reads, such as `--model`."""

    def help_line(self, name: str, model: configs.ModelConfig) -> str:
        """Return the line of a message that tells how to list the flags.

        Args:
            name: First word of the command, which may be no recipe.
            model: Model of the run, for a recipe of the same family.
        """
        command_help = f"`mupax {self.name} --help` says what it reads"
        recipe = name if is_recipe(name) else _RECIPE_OF_FAMILY.get(model.family)
        if recipe is None:
            return command_help
        return f"{command_help}; `mupax train {shlex.quote(recipe)} --help all` lists a run's flags"


_RECIPE_OF_FAMILY = {"decoder": "lm-tiny", "encoder-decoder": "ed-tiny", "vit": "vit-digits"}
"""Family of a model to a small recipe, whose help lists the flags for a model without a recipe."""

FILES = (".json", ".yaml", ".yml")
"""Endings of a config file's path."""


def parse(
    name: str,
    recipe: Callable[[], Config],
    argv: Sequence[str],
    more_flags: Sequence[str] = (),
    infers_sizes: bool = True,
    reader: FlagReader | None = None,
) -> Command:
    """Return the recipe with the flags of `argv` applied, checked as far as JAX is not needed.

    Notes, such as sizes that come from the data, are printed on standard error. The flag
    `--compilation-cache` sets the environment variable MUPAX_COMPILATION_CACHE of this process.

    Args:
        name: Name of the recipe or path of the config file, for messages.
        recipe: Function that makes the config that the flags change.
        argv: Words after the name of the recipe.
        more_flags: Flags that the calling command has read itself. The message about an unknown
            flag may suggest one of them.
        infers_sizes: Let data other than the recipe's set the classes, channels and image size of
            a model of images, unless a flag sets them.
        reader: Command for the message about a wrong flag, if its flags are not those of
            `mupax train NAME`.

    Raises:
        SystemExit: With code 0, after `--help` was printed.
        UsageError: A flag or word that does not exist, or a value of the wrong kind.
        ConfigError: Values that do not fit together, or a flag that the chosen optimizer or data
            never reads.
        PresetError: The preset, tuned or not, does not exist, or a constant is out of range.
    """
    prog = f"mupax train {shlex.quote(name)}"
    # Models and mixtures before tyro: they change the defaults that `--help` prints.
    default = _with_mix(_with_model(recipe(), argv), argv)
    if infers_sizes:
        default = _with_sizes_of_data(default, name, argv)

    tuned_preset = None
    if any(":" in word for word in argv):  # a colon may be that of --preset PRESET:NAME
        from mupax.train.config import tuned

        default, argv, tuned_preset = tuned.applied(default, argv, value_of("--steps", argv))
    # tyro has no flags for the constants of a parameter group, because the groups depend on the
    # model.
    argv = with_group_constants(argv, default.preset.constants)
    start = Command(config=default)
    argv = command_line.with_dashed_values(argv, start)

    listing = None
    if {"-h", "--help"} & set(argv):
        listing = flag_help(argv, list(command_line.flag_fields(start)), prog)
    help_line = command_line.help_line(prog, "--help all")
    if reader is not None:
        help_line = reader.help_line(name, default.model)
    command, unread = command_line.parse_known(
        Command, prog, argv, start, inspect.getdoc(recipe), listing, help_line
    )
    known_flags = [*command_line.flags(start), *more_flags]
    if reader is not None:
        known_flags = [flag for flag in known_flags if flag.startswith(reader.read)]
        known_flags += reader.own_flags
    # tyro's own error would not name the nearest flag.
    command_line.refuse(unread, known_flags, help_line)

    config = command.config
    if tuned_preset is not None:
        from mupax.train.config import tuned

        # After all flags, because only then is the model known.
        config = tuned.fitted(config, tuned_preset)
    if config.preset.joint != "none":
        from mupax.train.config import tuned

        config = tuned.with_run_base(config, recipe(), tuned_preset)
    _check_read(config, argv)
    # After all flags, because durations depend on the batch size, the steps and the learning rate.
    config = _with_durations(config, command, argv)
    preset_of(config)  # refuses a wrong preset before anything runs
    if value_of("--preset.base", argv) is not None and (unnamed := unnamed_axes(config)):
        terminal.note(
            f"note: --preset.base {config.preset.base} leaves out {', '.join(unnamed)}; "
            "no rule changes with a size that the base does not name"
        )

    if command.compilation_cache is not None:
        # The folder belongs to the process and its children, not to a run: no config records it.
        os.environ["MUPAX_COMPILATION_CACHE"] = command.compilation_cache
    published = None
    if tuned_preset is not None:
        from mupax.train.config import tuned

        if tuned_preset.is_published:
            published = tuned_preset.use
        tuned.check(tuned_preset, config)
    return dataclasses.replace(command, config=config.resolved(), published=published)


def refuse_session_flags(prog: str, command: Command, read: Sequence[str] = ()) -> None:
    """Refuse flags of `mupax train` that say what to do with a run, for commands that train none.

    These are `--print-config`, `--dry-run` and `--restart`. Without this, a command that takes the
    other flags of a recipe would ignore them: a study with `--print-config` would train.

    Args:
        prog: Command for the message, such as `mupax sweep`.
        command: The command's flags, as `parse` returned them.
        read: Fields of `command` that the command reads, such as `dry_run`.

    Raises:
        UsageError: One of the flags is set and not in `read`.
    """
    chosen = {
        "print_config": command.print_config,
        "dry_run": command.dry_run,
        "restart": command.restart > 0,
    }
    for name, is_chosen in chosen.items():
        if is_chosen and name not in read:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"`{prog}` does not read {flag}; `mupax train` does")


def _with_durations(config: Config, command: Command, argv: Sequence[str]) -> Config:
    """Return the config with `--warmup-tokens` and `--decay-timescale` applied to its optimizer.

    They set `warmup_steps` and `weight_decay`. Without them the config is unchanged.
    """
    if command.warmup_tokens is None and command.decay_timescale is None:
        return config
    from mupax.train.config import joint

    flags = {word.partition("=")[0].replace("_", "-") for word in argv}
    optimizer = joint.with_durations(config, command.warmup_tokens, command.decay_timescale, flags)
    return dataclasses.replace(config, optimizer=optimizer)


def is_file(word: str) -> bool:
    """Return whether a word is the path of a config file and not the name of a recipe.

    Only its ending counts (`FILES`). The file need not exist.
    """
    return word.lower().endswith(FILES)


def with_file_first(argv: Sequence[str]) -> list[str]:
    """Return a command line with the path of `--config PATH` first, where a recipe's name stands.

    The flag itself is left out. A command line without it is returned as a copy.

    Raises:
        UsageError: No config file follows `--config`, or another word also says what to train.
    """
    words = list(argv)
    for index, word in enumerate(words):
        flag, equals, path = word.partition("=")
        if flag != "--config":
            continue
        end = index + 1
        if not equals:
            end = index + 2
            path = "".join(words[index + 1 : end])
        _check_config_file(path)

        remaining = words[:index] + words[end:]
        # Otherwise the first file would be read and the second silently ignored.
        if any(later.partition("=")[0] == "--config" for later in remaining):
            raise command_line.UsageError("--config comes twice; write one of the files")
        if remaining and (is_file(remaining[0]) or remaining[0] in RECIPES):
            raise command_line.UsageError(
                f"{remaining[0]} and --config {path} both say what to train; leave one of them out"
            )
        return [path, *remaining]
    return words


def _check_config_file(path: str) -> None:
    if is_file(path):
        return
    if path and not path.startswith("-"):
        _refuse_folder(path)
    raise command_line.UsageError(
        f"--config {path or 'PATH'}: write a file that ends in {', '.join(FILES)}"
    )


def _refuse_folder(path: str) -> None:
    """Raise UsageError if a path is a folder with a config.json. The text names that file."""
    record = path_of(path) / "config.json"
    if record.is_file():
        raise command_line.UsageError(
            f"{path} is a folder; write --config {shlex.quote(str(record))}"
        )


def recipe(name: str) -> Callable[[], Config]:
    """Return the recipe that has a name, or a function that makes the config of a file.

    Args:
        name: Name of a recipe, or path of a config file.

    Raises:
        UsageError: No recipe has the name, or it is the folder of a run.
        ConfigError: The file does not exist, or holds no named fields. The returned function raises
            it, too, if the fields make no config.
        PluginError: A plugin of a run's record may not be imported, or is gone.
    """
    if is_file(name):
        from mupax.train.config.recipes import files

        return files.recipe(name)
    if name not in RECIPES and not name.startswith("-"):
        _refuse_folder(name)
    return RECIPES[command_line.first_word("", "recipe", RECIPES, [name])[0]]


def is_recipe(name: str) -> bool:
    """Return whether a word names a recipe or a config file, and not a model of the zoo."""
    return is_file(name) or name in RECIPES


def model_of(name: str) -> configs.ModelConfig:
    """Return the model of the zoo that has the name, or the model of a recipe or config file.

    Raises:
        ConfigError: Nothing has the name, or the file is wrong.
    """
    if name not in configs.CONFIGS and is_recipe(name):
        return recipe(name)().model
    return configs.get(name)


def recipe_of_points(name: str) -> Callable[[], Config]:
    """Return the function that makes the config of a study's points (the runs that it compares).

    The config is that of the recipe or config file `name`. If it has further evaluation sets or
    early stopping, these are left out, and so is `checkpoint.keep_best`. Each call of the function
    then prints a line about this on standard error.
    """
    start = recipe(name)

    def load() -> Config:
        config = start()
        settings = {"data.evaluate": config.data.evaluate, "stop.patience": config.stop.patience}
        names = [field for field, value in settings.items() if value]
        if not names:
            return config
        terminal.note(
            f"note: {name}: {' and '.join(names)} left out: "
            "points train all their steps, on their own data"
        )
        data = dataclasses.replace(config.data, evaluate=())
        checkpoint = dataclasses.replace(config.checkpoint, keep_best=None, best_metric=METRIC)
        return dataclasses.replace(config, data=data, checkpoint=checkpoint, stop=StopConfig())

    # `--help` prints the docstring of a recipe.
    load.__doc__ = start.__doc__
    return load


def name_of(word: str) -> str:
    """Return the name by which a study's output folder calls a recipe or config file.

    A recipe has its own name, and a config file its name without the ending. For the config.json of
    a run it is the name of the run's folder.

    Args:
        word: Name of a recipe, or path of a config file.
    """
    if not is_file(word):
        return word
    path = PurePath(word)
    # The record of every run is named config.json, so its stem would be the same for all runs.
    if path.name == "config.json" and path.parent.name:
        return path.parent.name
    return path.stem


def value_of(flag: str, argv: Sequence[str]) -> str | None:
    """Return the value of the last `flag` among the words, or `None` without it or its value."""
    value = None
    # The last word has no word after it, so `None` follows.
    followers = [*argv, None][1:]
    for word, follower in zip(argv, followers, strict=True):
        if word == flag:
            value = follower
        elif word.startswith(f"{flag}="):
            value = word.partition("=")[2]
    return value


def _with_model(config: Config, argv: Sequence[str]) -> Config:
    """Return the recipe's config with the model of `--model` and the data of `--data.name`.

    The model keeps the recipe's dtype and kernels. Without `--model` the config is unchanged, even
    if there is a `--data.name`. The two flags are read before all others, because the sizes of the
    model are the defaults of the flags `--model.*`.
    """
    name = value_of("--model", argv)
    # tyro refuses the missing name with a message of its own.
    if name is None or name.startswith("-"):
        return config
    # Keep the recipe's dtype and kernels: they set how a model is computed, not which model it is.
    model = dataclasses.replace(configs.get(name), compute=config.model.compute)
    # Set together, because a config refuses a model that cannot read its data.
    data = dataclasses.replace(config.data, name=value_of("--data.name", argv) or config.data.name)
    return dataclasses.replace(config, model=model, data=data)


def _with_mix(config: Config, argv: Sequence[str]) -> Config:
    """Return the config with `data.name` and `data.mix` made to agree with the flags.

    With `--data.mix` and without `--data.name`, the name becomes `mix`, the name of mixtures. With
    a `--data.name` other than `mix` and without `--data.mix`, a mixture of the config is dropped.
    """
    name = value_of("--data.name", argv)
    data = config.data
    mixes = any(word.partition("=")[0] == "--data.mix" for word in argv)
    if mixes and name is None:
        return dataclasses.replace(config, data=dataclasses.replace(data, name="mix"))
    if not mixes and data.mix and name not in (None, "mix"):
        return dataclasses.replace(config, data=dataclasses.replace(data, mix=()))
    return config


def _with_sizes_of_data(config: Config, name: str, argv: Sequence[str]) -> Config:
    """Return the config with its model's classes, channels and image size set from its data.

    A size that a flag or a config file sets stays. A config for text is unchanged. So is a recipe
    if the command line has none of the flags `--data.name`, `--model` and `--resume`, because its
    model already has the sizes of its data.

    Args:
        config: Config of a recipe or config file, before the flags other than `--model`.
        name: Name of the recipe, or path of the config file.
        argv: Words after that name on the command line.
    """
    from_file = is_file(name)
    may_differ = from_file or any(word.partition("=")[0] in _SIZE_FLAGS for word in argv)
    # The model of a recipe already has the sizes of the recipe's own data.
    if config.model.task != "images" or not may_differ:
        return config
    from mupax.train.config import data_sizes

    in_file: frozenset[str] = frozenset()
    if from_file:
        from mupax.train.config.recipes import files

        in_file = files.model_fields(name)
    return data_sizes.applied(config, argv, in_file)


def _check_read(config: Config, argv: Sequence[str]) -> None:
    """Raise ConfigError for a flag that the chosen optimizer, schedule or data do not read.

    A value in the recipe that the run ignores is no error.
    """
    flags = set()
    for word in argv:
        if word.startswith("--"):
            flags.add(word.partition("=")[0].replace("_", "-"))
    opt = config.optimizer
    for field, choice in _unread_optimizer_fields(config).items():
        flag = f"--optimizer.{field.replace('_', '-')}"
        if flag not in flags:
            continue
        if choice.startswith("warmup"):
            reader = "a run without warm-up"
        elif choice.startswith("schedule"):
            reader = f"schedule {opt.schedule}"
        else:
            reader = opt.name
        raise ConfigError(
            f"{flag} is not read by {reader}; leave it out, or write --optimizer.{choice}"
        )

    data = config.data
    # Training data and evaluation sets share these fields. It is enough if one of them reads a
    # field.
    places = [data.name, *data.evaluation_sets.values()]
    unread = unread_fields(places)
    for flag in sorted(flags):
        if not flag.startswith("--data."):
            continue
        name = flag.removeprefix("--data.").removeprefix("no-")
        field = name.partition(".")[0].replace("-", "_")
        if field in unread:
            hint = CACHE_HINT if field == "data_dir" else ""
            raise ConfigError(f"{flag} is not read with the data {data.name}; leave it out{hint}")


def _unread_optimizer_fields(config: Config) -> dict[str, str]:
    """Return the fields of the optimizer's config that a run ignores.

    Returns:
        Name of each ignored field to another setting with which the field is read. The setting is a
        text such as `schedule wsd`, which stands for `--optimizer.schedule wsd`.
    """
    opt = config.optimizer
    optimizer = OPTIMIZERS[opt.name]
    # Reversed, so that a field that several optimizers read names the first of the table.
    readers: dict[str, str] = {}
    for name, candidate in reversed(OPTIMIZERS.items()):
        for field in candidate.reads:
            readers[field] = name

    choices: dict[str, str] = {}
    for field, name in readers.items():
        if field not in optimizer.reads:
            choices[field] = f"name {name}"
    if opt.schedule != "wsd":
        choices["decay_steps"] = "schedule wsd"
    if opt.schedule == "constant":
        choices["final_lr_fraction"] = "schedule cosine"
    if "trace" in optimizer.moments and opt.momentum == 0:
        choices["moment_dtype"] = "momentum 0.9"
    if not opt.warmup_steps:
        choices["warmup_from_zero"] = "warmup-steps 100"
    return choices
