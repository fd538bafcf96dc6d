"""Command line of a recipe: its config as flags, by tyro; and one clear message for whatever does not fit.

Imports no JAX: `--help`, `--print-config` and every error found here answer within a second.

`mupax train RECIPE --help` lists the flags in use. `--help all` and `--help SECTION` list the others.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Annotated

from tyro import conf

from mupax import command_line, terminal
from mupax.command_line import FlagField, FlagHelp, Switch, UsageError
from mupax.config_fields import Listed, affects_of
from mupax.disk import path_of
from mupax.presets.optimizers import OPTIMIZERS
from mupax.train.config.checks import at_least
from mupax.train.config.data import fields_of_kinds, source
from mupax.train.config.preset import preset_of, with_group_constants
from mupax.train.config.recipes import RECIPES
from mupax.train.config.run import Config
from mupax.train.config.sections import METRIC, StopConfig
from mupax.zoo import configs
from mupax.zoo.configs import ConfigError

RUN = "run"
"""Section of the flags that have no dot in their name."""


def section_of(flag: str) -> str:
    """Return the section that a flag is listed in: `model` of `--model.compute.dtype`."""
    owner, dot, _ = flag.removeprefix("--").partition(".")
    return owner if dot else RUN


def is_listed(field: FlagField) -> bool:
    """Return whether the short help of a recipe lists a flag, which its field declares."""
    return isinstance(affects_of(field.hint), Listed)


def flag_help(argv: Sequence[str], fields: Sequence[FlagField], prog: str) -> FlagHelp | None:
    """Return what the help that the words ask for lists; None for all flags, or where no help is asked for.

    Args:
        argv: words of the command line.
        fields: every flag.
        prog: what stands before the flags.

    Raises:
        UsageError: the word after `--help` is no section.
    """
    places = [place for place, word in enumerate(argv) if word in ("-h", "--help")]
    if not places:
        return None
    section = next(iter(argv[places[0] + 1 :]), "")
    sections = list(dict.fromkeys([RUN, *(section_of(field.names[0]) for field in fields)]))
    if section == "all":
        return None
    if not section or section.startswith("-"):
        shown = [field.names for field in fields if is_listed(field)]
        lists = f"These are the flags in use. `{prog} --help all` lists all {len(fields)}"
    elif section in sections:
        shown = [field.names for field in fields if section_of(field.names[0]) == section]
        lists = f"`{prog} --help all` lists all {len(fields)} flags"
    else:
        raise UsageError(f"--help {section}: write all, or one of {', '.join(sections)}")
    listed = frozenset(itertools.chain.from_iterable(shown))
    return FlagHelp(listed, f"{lists}, `--help SECTION` those of one: {', '.join(sections)}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """A recipe's config, and what to do with it."""

    config: Annotated[Config, conf.arg(name="")]
    model: Annotated[str | None, conf.arg(metavar="NAME"), Listed("model")] = None
    """Train another model of `mupax models`, of the recipe's family; --model.* change the one chosen."""
    dry_run: Annotated[Switch, Listed("session")] = False
    """Print shapes, the preset's table, memory, FLOPs and the time of a save; train nothing."""
    print_config: Annotated[Switch, Listed("session")] = False
    """Print the resolved config as JSON and stop."""
    restart: Annotated[int, conf.arg(metavar="N"), Listed("session")] = 0
    """Train in a child process and start it again after a crash, from its newest good checkpoint, at most so many times."""
    compilation_cache: Annotated[str | None, conf.arg(metavar="DIR|none")] = None
    """Where compiled programs are kept for the next start (or MUPAX_COMPILATION_CACHE); the user cache folder unless given."""

    warmup_tokens: Annotated[
        str | None, conf.arg(aliases=("--optimizer.warmup-tokens",), metavar="N[k|m|b|t]")
    ] = None
    """optimizer.warmup_steps in tokens (of images: images), such as 500k; under --joint of the base's run."""
    decay_timescale: Annotated[
        float | None, conf.arg(aliases=("--optimizer.decay-timescale",), metavar="TAU")
    ] = None
    """optimizer.weight_decay as the share of the run that decayed weights average over; under --joint of the base's run."""

    published: conf.Suppress[conf.Fixed[str | None]] = None
    """The tuned preset that the words name, where others have published its numbers."""

    def __post_init__(self) -> None:
        at_least("", self, 0, "restart")


FILES = (".json", ".yaml", ".yml")
"""How the path of a config file ends."""


def parse(
    name: str,
    recipe: Callable[[], Config],
    argv: Sequence[str],
    more_flags: Sequence[str] = (),
    infers_sizes: bool = True,
) -> Command:
    """The recipe with the flags of `argv` applied and checked, as far as can be known without JAX.

    Args:
        name: the recipe's name, for messages.
        recipe: makes the config that flags change.
        argv: the words after the recipe's name.
        more_flags: of a command that takes a recipe's too and has read its own, for a near match.
        infers_sizes: whether a model of images takes its sizes from other data than the recipe's, as far as no flag sets them.

    Raises:
        SystemExit: code 0, after `--help` was printed.
        UsageError: a flag or word that does not exist or a value of the wrong kind.
        ConfigError: values that do not fit together, or a flag that the chosen optimizer or data never reads.
        PresetError: no such preset, tuned or not, or a constant out of its range.
    """
    prog = f"mupax train {name}"
    default, preset = _with_mix(_with_model(recipe(), argv), argv), None
    if infers_sizes:
        default = _with_sizes_of_data(default, name, argv)
    if any(":" in word for word in argv):  # perhaps --preset PRESET:NAME
        from mupax.train.config import tuned

        default, argv, preset = tuned.applied(default, argv, value_of("--steps", argv))
    argv = with_group_constants(argv, default.preset.constants)
    start = Command(config=default)
    argv = command_line.with_dashed_values(argv, start)
    listing = None
    if {"-h", "--help"} & set(argv):
        listing = flag_help(argv, list(command_line.flag_fields(start)), prog)
    command, rest = command_line.parse_known(
        Command, prog, argv, start, inspect.getdoc(recipe), listing
    )
    command_line.refuse(rest, [*command_line.flags(start), *more_flags], prog, "--help all")
    if preset:
        from mupax.train.config import tuned

        published = preset.use if preset.is_published else None
        command = dataclasses.replace(
            command, config=tuned.fitted(command.config, preset), published=published
        )
    if command.config.preset.joint != "none":
        from mupax.train.config import tuned

        command = dataclasses.replace(
            command, config=tuned.with_run_base(command.config, recipe(), preset)
        )
    _check_read(command.config, argv)
    if command.warmup_tokens is not None or command.decay_timescale is not None:
        from mupax.train.config import joint

        flags = {word.partition("=")[0].replace("_", "-") for word in argv}
        optimizer = joint.with_durations(
            command.config, command.warmup_tokens, command.decay_timescale, flags
        )
        command = dataclasses.replace(
            command, config=dataclasses.replace(command.config, optimizer=optimizer)
        )
    preset_of(command.config)
    if command.compilation_cache is not None:
        # Of the process and its children, not of a run: no config records it.
        os.environ["MUPAX_COMPILATION_CACHE"] = command.compilation_cache
    if preset:
        from mupax.train.config import tuned

        tuned.check(preset, command.config)
    return dataclasses.replace(command, config=command.config.resolved())


def is_file(word: str) -> bool:
    """Whether a word is a config file's path rather than a recipe's name."""
    return word.lower().endswith(FILES)


def with_file_first(argv: Sequence[str]) -> list[str]:
    """Return a command line with the path of `--config PATH` in a recipe's place, which is first.

    Raises:
        UsageError: no config file follows, or something else says what to train too.
    """
    words = list(argv)
    for index, word in enumerate(words):
        flag, equals, path = word.partition("=")
        if flag != "--config":
            continue
        end = index + 1 if equals else index + 2
        path = path if equals else "".join(words[index + 1 : end])
        _check_config_file(path)
        remaining = words[:index] + words[end:]
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
    """Raise UsageError where a path is a run's folder, whose config.json is meant."""
    record = path_of(path) / "config.json"
    if record.is_file():
        raise command_line.UsageError(
            f"{path} is a folder; write --config {shlex.quote(str(record))}"
        )


def recipe(name: str) -> Callable[[], Config]:
    """The recipe of that name, or of a config file's path; raises UsageError where there is none, ConfigError for a wrong file."""
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
    """Return the model of the zoo that has the name, or that of a recipe or config file.

    Raises:
        ConfigError: nothing has the name, or the file is wrong.
    """
    if name not in configs.CONFIGS and is_recipe(name):
        return recipe(name)().model
    return configs.get(name)


def recipe_of_points(name: str) -> Callable[[], Config]:
    """Return what makes the config of a study's points: the recipe, without what a file has for a run by itself.

    A file that trains a run can be swept so as it is. What is left out is a line on standard error.
    """
    start = recipe(name)

    def load() -> Config:
        config = start()
        alone = {"data.evaluate": config.data.evaluate, "stop.patience": config.stop.patience}
        names = [field for field, value in alone.items() if value]
        if not names:
            return config
        terminal.note(
            f"note: {name}: {' and '.join(names)} left out: points train all their steps, on their own data"
        )
        data = dataclasses.replace(config.data, evaluate=())
        checkpoint = dataclasses.replace(config.checkpoint, keep_best=None, best_metric=METRIC)
        return dataclasses.replace(config, data=data, checkpoint=checkpoint, stop=StopConfig())

    load.__doc__ = start.__doc__
    return load


def name_of(word: str) -> str:
    """Return a recipe's name as a part of a folder's name; a config file's own name, or its folder's for a run's config.json."""
    if not is_file(word):
        return word
    path = PurePath(word)
    return path.parent.name or path.stem if path.name == "config.json" else path.stem


def value_of(flag: str, argv: Sequence[str]) -> str | None:
    """Return the word after the last of a flag, or after its `=`; None without the flag."""
    value = None
    for word, after in zip(argv, [*argv, None][1:], strict=True):
        if word == flag:
            value = after
        elif word.startswith(f"{flag}="):
            value = word.partition("=")[2]
    return value


def _with_model(config: Config, argv: Sequence[str]) -> Config:
    """The recipe on the model that `--model NAME` names: read before the flags, whose defaults are its sizes."""
    name = value_of("--model", argv)
    if name is None or name.startswith("-"):
        return config
    model = dataclasses.replace(configs.get(name), compute=config.model.compute)
    data = dataclasses.replace(config.data, name=value_of("--data.name", argv) or config.data.name)
    return dataclasses.replace(config, model=model, data=data)


def _with_mix(config: Config, argv: Sequence[str]) -> Config:
    """Return the recipe with a data.name that fits its mixture: `--data.mix` names mix, another `--data.name` ends a file's."""
    name = value_of("--data.name", argv)
    mixes = any(word.partition("=")[0] == "--data.mix" for word in argv)
    if mixes and name is None:
        return dataclasses.replace(config, data=dataclasses.replace(config.data, name="mix"))
    if not mixes and config.data.mix and name not in (None, "mix"):
        return dataclasses.replace(config, data=dataclasses.replace(config.data, mix=()))
    return config


def _with_sizes_of_data(config: Config, name: str, argv: Sequence[str]) -> Config:
    """The recipe with classes, channels and image size of its data, where no flag and no file sets them."""
    if config.model.task != "images":
        return config
    from mupax.train.config import data_sizes

    in_file: frozenset[str] = frozenset()
    if is_file(name):
        from mupax.train.config.recipes import files

        in_file = files.model_fields(name)
    return data_sizes.applied(config, argv, in_file)


def _check_read(config: Config, argv: Sequence[str]) -> None:
    """A flag that the run would silently ignore is an error; a recipe's own value of it is not."""
    flags = {word.partition("=")[0].replace("_", "-") for word in argv if word.startswith("--")}
    opt, data = config.optimizer, config.data
    readers = {
        field: name for name, optimizer in reversed(OPTIMIZERS.items()) for field in optimizer.reads
    }
    instead = {
        field: f"name {name}"
        for field, name in readers.items()
        if field not in OPTIMIZERS[opt.name].reads
    }
    if opt.schedule != "wsd":
        instead["decay_steps"] = "schedule wsd"
    if opt.schedule == "constant":
        instead["final_lr_fraction"] = "schedule cosine"
    if "trace" in OPTIMIZERS[opt.name].moments and opt.momentum == 0:
        instead["moment_dtype"] = "momentum 0.9"
    if not opt.warmup_steps:
        instead["warmup_from_zero"] = "warmup-steps 100"
    for field, choice in instead.items():
        flag = f"--optimizer.{field.replace('_', '-')}"
        if flag in flags:
            by = f"schedule {opt.schedule}" if choice.startswith("schedule") else opt.name
            by = "a run without warm-up" if choice.startswith("warmup") else by
            raise ConfigError(
                f"{flag} is not read by {by}; leave it out, or write --optimizer.{choice}"
            )
    places = [data.name, *data.evaluation_sets.values()]
    unread = fields_of_kinds().difference(*(source(place).reads for place in places))
    for flag in sorted(flags):
        field = flag.removeprefix("--data.").removeprefix("no-").partition(".")[0].replace("-", "_")
        if flag.startswith("--data.") and field in unread:
            raise ConfigError(f"{flag} is not read with the data {data.name}; leave it out")
