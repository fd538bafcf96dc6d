"""Command line of a recipe: its config as flags, by tyro; and one clear message for whatever does not fit.

Imports no JAX: `--help`, `--print-config` and every error found here answer within a second.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
import io
import re
from collections.abc import Callable, Sequence
from typing import Annotated

import tyro
from tyro import conf

from mupax.train.config import tuned
from mupax.train.config.run import Config, preset_of
from mupax.zoo import configs
from mupax.zoo.configs import ConfigError

BOX = "│╭╮╰╯─ "
"""What tyro draws around its messages."""

COLOUR = re.compile(r"\x1b\[[\d;]*m")


def _choices(said: re.Match[str]) -> str:
    # tyro holds the choices in a set, whose order differs from one process to the next.
    names = sorted(set(re.findall(r"'([^']*)'", said[3])) - {"None"})
    return f"{said[2]} needs one of {', '.join(map(repr, names))}, not {said[1]}"


PLAIN = (
    (r"Error parsing (\S+): invalid literal for int\(\) with base 10: ('.*')", r"\1 needs a whole number, not \2"),
    (r"Error parsing (\S+): could not convert string to float: ('.*')", r"\1 needs a number, not \2"),
    (r"Error parsing (\S+): no type matching \{None\}\|INT .* \[(.*)\]\.", r"\1 needs a whole number or None, not \2"),
    (r"Error parsing (\S+): no type matching \{None\}\|FLOAT .* \[(.*)\]\.", r"\1 needs a number or None, not \2"),
    (r"invalid choice ('.*') for argument '(\S+)'\. Expected one of \((.*)\)\.", _choices),
    (r"Missing value for argument '(\S+)'\..*", r"\1 needs a value after it"),
)
"""tyro's message, and ours that says what to write. A message not listed is shown as tyro has it."""


class UsageError(ValueError):
    """A command line that says nothing this project understands."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """A recipe's config, and what to do with it."""

    config: Annotated[Config, conf.arg(name="")]
    model: Annotated[str | None, conf.arg(metavar="NAME")] = None
    """Train another model of `python -m zoo`, of the recipe's family; --model.* change the one chosen."""
    dry_run: Annotated[bool, conf.FlagCreatePairsOff] = False
    """Print shapes, the preset's table, memory and FLOPs; allocate and train nothing."""
    print_config: Annotated[bool, conf.FlagCreatePairsOff] = False
    """Print the resolved config as JSON and stop."""


def parse(name: str, recipe: Callable[[], Config], argv: Sequence[str], beside: Sequence[str] = ()) -> Command:
    """The recipe with the flags of `argv` applied and checked, as far as can be known without JAX.

    Args:
        name: the recipe's name, for messages.
        recipe: makes the config that flags change.
        argv: the words after the recipe's name.
        beside: flags of a command that takes a recipe's too and has read its own, for a near match.

    Raises:
        SystemExit: code 0, after `--help` was printed.
        UsageError: a flag or word that does not exist or a value of the wrong kind.
        ConfigError: values that do not fit together, or a flag that the chosen optimizer or data never reads.
        PresetError: no such preset, tuned or not, or a constant out of its range.
    """
    prog = f"python -m train {name}"
    argv = list(argv)
    default, argv, found = tuned.applied(_with_model(recipe(), argv), argv, _value_of("--steps", argv))
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            command, rest = tyro.cli(
                conf.AvoidSubcommands[Command],
                prog=prog,
                description=inspect.getdoc(recipe),
                default=Command(config=default),
                args=argv,
                return_unknown_args=True,
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise _own_error(stop) or UsageError(f"{_unboxed(said.getvalue())}\n`{prog} --help` lists all flags") from None
    if rest:
        raise UsageError(f"{_unknown(rest, [*flags(default), *beside])}\n`{prog} --help` lists all flags")
    _check_read(command.config, argv)
    preset_of(command.config)
    if found:
        tuned.check(found, command.config)
    return dataclasses.replace(command, config=command.config.resolved())


def recipe(name: str) -> Callable[[], Config]:
    """The recipe of that name, for a command that takes one.

    Raises:
        ConfigError: there is none.
    """
    from mupax.train.config.recipes import RECIPES

    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"no recipe is named {name!r}; {hint}the recipes are {', '.join(RECIPES)}")
    return RECIPES[name]


def flags(config: Config) -> list[str]:
    """Every flag of a recipe with this config, as it is written."""

    def walk(owner: object, prefix: str) -> list[str]:
        found = []
        for field in dataclasses.fields(owner):  # pyright: ignore[reportArgumentType]
            value, words = getattr(owner, field.name), field.name.replace("_", "-")
            if dataclasses.is_dataclass(value):
                found += walk(value, prefix if words == "init" else f"{prefix}{words}.")
            elif field.name != "recipe":
                found.append(f"--{prefix}{words}")
                found += [f"--{prefix}no-{words}"] if isinstance(value, bool) else []
        return found

    return [
        *walk(config, ""),
        "--model",
        "--preset",
        "--profile",
        "--bad-numbers",
        "--dry-run",
        "--print-config",
        "--help",
    ]


def _value_of(flag: str, argv: Sequence[str]) -> str | None:
    found = None
    for index, word in enumerate(argv):
        if word == flag:
            found = argv[index + 1] if index + 1 < len(argv) else None
        elif word.startswith(f"{flag}="):
            found = word.partition("=")[2]
    return found


def _with_model(config: Config, argv: Sequence[str]) -> Config:
    """The recipe on the model that `--model NAME` names: read before the flags, whose defaults are its sizes."""
    name = _value_of("--model", argv)
    if name is None or name.startswith("-"):
        return config
    model = dataclasses.replace(configs.get(name), compute=config.model.compute)
    data = dataclasses.replace(config.data, name=_value_of("--data.name", argv) or config.data.name)
    return dataclasses.replace(config, model=model, data=data)


def _own_error(stop: BaseException) -> ValueError | None:
    """The error of a config that tyro caught and turned into `stop`: its text is complete, tyro's box cuts it up."""
    error = stop.__cause__ or stop.__context__
    while error is not None and not isinstance(error, ConfigError):
        error = error.__cause__ or error.__context__
    return error


def _unboxed(text: str) -> str:
    """What tyro says above its first rule, as one line of plain words."""
    paragraph = []
    for line in COLOUR.sub("", text).splitlines()[1:]:
        words = line.strip(BOX)
        if not words.strip("-+|"):  # a rule; of ASCII where the terminal cannot draw
            if paragraph:
                break
            continue
        paragraph.append(words)
    message = " ".join(paragraph) or COLOUR.sub("", text).strip()
    for said, plain in PLAIN:
        message = re.sub(said, plain, message)
    return message


def _unknown(rest: Sequence[str], known: Sequence[str]) -> str:
    word = next((word for word in rest if word.startswith("-")), rest[0])
    if not word.startswith("-"):
        return f"nothing takes the word {word!r}; write flags as --NAME VALUE, and switches such as --resume without a value"
    flag = word.partition("=")[0].replace("_", "-")
    best = sorted(known, key=lambda other: _likeness(flag, other), reverse=True)
    near = [other for other in best[:2] if _likeness(flag, other) > max(0.6, _likeness(flag, best[0]) - 0.1)]
    return f"no flag is named {flag}; " + (f"did you mean {' or '.join(near)}?" if near else "none is like it")


def _likeness(flag: str, other: str) -> float:
    """How near two flags are, mostly by what follows the last dot: people leave out or mistake the owner."""
    owner, _, name = flag.lstrip("-").rpartition(".")
    other_owner, _, other_name = other.lstrip("-").rpartition(".")
    alike = difflib.SequenceMatcher(None, name, other_name).ratio()
    if set(name.split("-")) <= set(other_name.split("-")):
        alike = max(alike, 0.9)
    return 0.8 * alike + 0.2 * difflib.SequenceMatcher(None, owner, other_owner).ratio()


def _check_read(config: Config, argv: Sequence[str]) -> None:
    """A flag that the run would silently ignore is an error; a recipe's own value of it is not."""
    given = {word.partition("=")[0].replace("_", "-") for word in argv if word.startswith("--")}
    opt, data = config.optimizer, config.data
    adam, heavy_ball = opt.name in ("adam", "adamw", "muon"), opt.name in ("sgd", "momentum", "muon")
    tokens = data.task == "tokens"
    unread = {
        "b1": (not adam and opt.name != "lion", "--optimizer.name adamw"),
        "b2": (not adam and opt.name != "lion", "--optimizer.name adamw"),
        "eps": (not adam, "--optimizer.name adamw"),
        "momentum": (not heavy_ball, "--optimizer.name sgd"),
        "weight-decay": (opt.name == "adam", "--optimizer.name adamw"),
        "decay": (opt.name == "adam", "--optimizer.name adamw"),
        "decay-steps": (opt.schedule != "wsd", "--optimizer.schedule wsd"),
        "final-lr-fraction": (opt.schedule == "constant", "--optimizer.schedule cosine"),
    }
    for name, (ignored, instead) in unread.items():
        flag = f"--optimizer.{name}"
        if ignored and flag in given:
            by = f"schedule {opt.schedule}" if "schedule" in instead else opt.name
            raise ConfigError(f"{flag} is not read by {by}; leave it out, or write {instead}")
    for flag, ignored in {
        "--data.split": data.name != "digits",
        "--data.tokenizer": data.task == "images",
        "--data.augment": tokens or data.name == "shapes",
        "--data.no-augment": tokens or data.name == "shapes",
    }.items():
        if ignored and flag in given:
            raise ConfigError(f"{flag} is not read with the data {data.name}; leave it out")
