"""Command line of a recipe: its config as flags, by tyro; and one clear message for whatever does not fit.

Imports no JAX: `--help`, `--print-config` and every error found here answer within a second.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Sequence
from typing import Annotated

from tyro import conf

from mupax import command_line
from mupax.command_line import Switch
from mupax.presets.optimizers import OPTIMIZERS
from mupax.train.config.checks import at_least
from mupax.train.config.data import source
from mupax.train.config.preset import preset_of, with_group_constants
from mupax.train.config.run import Config
from mupax.zoo import configs
from mupax.zoo.configs import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """A recipe's config, and what to do with it."""

    config: Annotated[Config, conf.arg(name="")]
    model: Annotated[str | None, conf.arg(metavar="NAME")] = None
    """Train another model of `python -m zoo`, of the recipe's family; --model.* change the one chosen."""
    dry_run: Switch = False
    """Print shapes, the preset's table, memory, FLOPs and the time of a save; train nothing."""
    print_config: Switch = False
    """Print the resolved config as JSON and stop."""
    restart: Annotated[int, conf.arg(metavar="N")] = 0
    """Train in a child process and start it again after a crash, from its newest good checkpoint, at most so many times."""
    compilation_cache: Annotated[str | None, conf.arg(metavar="DIR|none")] = None
    """Where compiled programs are kept for the next start (or MUPAX_COMPILATION_CACHE); the user cache folder unless given."""

    warmup_tokens: Annotated[str | None, conf.arg(aliases=("--optimizer.warmup-tokens",), metavar="N[k|m|b|t]")] = None
    """optimizer.warmup_steps in tokens (of images: images), such as 500k; under --joint of the base's run."""
    decay_timescale: Annotated[float | None, conf.arg(aliases=("--optimizer.decay-timescale",), metavar="TAU")] = None
    """optimizer.weight_decay as the share of the run that decayed weights average over; under --joint of the base's run."""

    def __post_init__(self) -> None:
        at_least("", self, 0, "restart")


FILES = (".json", ".yaml", ".yml")
"""How the path of a config file ends."""


def parse(name: str, recipe: Callable[[], Config], argv: Sequence[str], more_flags: Sequence[str] = ()) -> Command:
    """The recipe with the flags of `argv` applied and checked, as far as can be known without JAX.

    Args:
        name: the recipe's name, for messages.
        recipe: makes the config that flags change.
        argv: the words after the recipe's name.
        more_flags: of a command that takes a recipe's too and has read its own, for a near match.

    Raises:
        SystemExit: code 0, after `--help` was printed.
        UsageError: a flag or word that does not exist or a value of the wrong kind.
        ConfigError: values that do not fit together, or a flag that the chosen optimizer or data never reads.
        PresetError: no such preset, tuned or not, or a constant out of its range.
    """
    prog = f"python -m train {name}"
    default, preset = _with_mix(_with_model(recipe(), argv), argv), None
    if any(":" in word for word in argv):  # perhaps --preset PRESET:NAME
        from mupax.train.config import tuned

        default, argv, preset = tuned.applied(default, argv, _value_of("--steps", argv))
    argv = with_group_constants(argv, default.preset.constants)
    start = Command(config=default)
    argv = command_line.with_dashed_values(argv, start)
    command, rest = command_line.parse_known(Command, prog, argv, start, inspect.getdoc(recipe))
    command_line.refuse(rest, [*command_line.flags(start), *more_flags], prog)
    if command.config.preset.joint != "none":
        from mupax.train.config import tuned

        command = dataclasses.replace(command, config=tuned.with_run_base(command.config, recipe(), preset))
    _check_read(command.config, argv)
    if command.warmup_tokens is not None or command.decay_timescale is not None:
        from mupax.train.config import joint

        flags = {word.partition("=")[0].replace("_", "-") for word in argv}
        optimizer = joint.with_durations(command.config, command.warmup_tokens, command.decay_timescale, flags)
        command = dataclasses.replace(command, config=dataclasses.replace(command.config, optimizer=optimizer))
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
    return word.endswith(FILES)


def with_file_first(argv: Sequence[str]) -> list[str]:
    """A command line that begins with `--config PATH` as one that begins with the path; raises UsageError for no such path."""
    flag, equals, path = (argv or [""])[0].partition("=")
    if flag != "--config":
        return [*argv]
    words = [path, *argv[1:]] if equals else [*argv[1:]]
    if not (words and is_file(words[0])):
        raise command_line.UsageError(
            f"--config {(words or ['PATH'])[0]}: write a file that ends in {', '.join(FILES)}"
        )
    return words


def recipe(name: str) -> Callable[[], Config]:
    """The recipe of that name, or of a config file's path; raises UsageError where there is none, ConfigError for a wrong file."""
    from mupax.train.config.recipes import RECIPES

    if is_file(name):
        from mupax.train.config.recipes import files

        return files.recipe(name)
    return RECIPES[command_line.first_word("", {"recipe": RECIPES}, [name])[0]]


def _value_of(flag: str, argv: Sequence[str]) -> str | None:
    value = None
    for word, after in zip(argv, [*argv, None][1:], strict=True):
        if word == flag:
            value = after
        elif word.startswith(f"{flag}="):
            value = word.partition("=")[2]
    return value


def _with_model(config: Config, argv: Sequence[str]) -> Config:
    """The recipe on the model that `--model NAME` names: read before the flags, whose defaults are its sizes."""
    name = _value_of("--model", argv)
    if name is None or name.startswith("-"):
        return config
    model = dataclasses.replace(configs.get(name), compute=config.model.compute)
    data = dataclasses.replace(config.data, name=_value_of("--data.name", argv) or config.data.name)
    return dataclasses.replace(config, model=model, data=data)


def _with_mix(config: Config, argv: Sequence[str]) -> Config:
    """The recipe on the texts that `--data.mix` names, whose data.name goes without saying."""
    if not any(word.partition("=")[0] == "--data.mix" for word in argv) or _value_of("--data.name", argv) is not None:
        return config
    return dataclasses.replace(config, data=dataclasses.replace(config.data, name="mix"))


def _check_read(config: Config, argv: Sequence[str]) -> None:
    """A flag that the run would silently ignore is an error; a recipe's own value of it is not."""
    flags = {word.partition("=")[0].replace("_", "-") for word in argv if word.startswith("--")}
    opt, data = config.optimizer, config.data
    readers = {field: name for name, optimizer in reversed(OPTIMIZERS.items()) for field in optimizer.reads}
    instead = {field: f"name {name}" for field, name in readers.items() if field not in OPTIMIZERS[opt.name].reads}
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
            raise ConfigError(f"{flag} is not read by {by}; leave it out, or write --optimizer.{choice}")
    fields = ("mix", "split", "tokenizer", "separator", "document-mask", "no-document-mask", "reset-positions", "field")
    fields += ("augment", "no-augment", "on-broken", "chat-template", "loss-on", "stream", "no-stream", "train-percent")
    nested = {flag for flag in flags if flag.startswith(("--data.pixels.", "--data.transforms."))}
    for flag in (*(f"--data.{name}" for name in fields), *sorted(nested)):
        field = flag.removeprefix("--data.").removeprefix("no-").partition(".")[0].replace("-", "_")
        if flag in flags and field not in source(data.name).reads:
            raise ConfigError(f"{flag} is not read with the data {data.name}; leave it out")
