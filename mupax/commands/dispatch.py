"""Dispatch of `mupax COMMAND`, with the overview of all commands and the examples below each help.

`mupax.__main__` calls `run`. Commands and their order come from `mupax.commands.table`.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from mupax import command_line, memory, plugins, process, terminal
from mupax.commands import table
from mupax.commands.table import Command

_HELP = {"-h", "--help"}


def run(argv: Sequence[str]) -> int:
    """Import the plug-ins of a command line, run its command and return the exit code.

    Without words, or with `--help` as the first one, print the overview of all commands.

    Args:
        argv: Words after `mupax`. If they begin with an old spelling, the new one is printed on
            standard error.

    Raises:
        SystemExit: Code 0, after help was printed.
        UsageError: No command has that name, or its words do not fit.
        PluginError: A module of `--plugin` cannot be imported.
    """
    modules, words = plugins.split(argv)
    old = terminal.old_spelling(words)
    if old is not None:
        words = terminal.current_words(words)
        # The command runs even if standard error is closed or full.
        with contextlib.suppress(OSError, ValueError):
            terminal.note(f"note: `mupax {old}` is now `mupax {terminal.OLD_SPELLINGS[old]}`")
    if not words or words[0] in _HELP:
        print(overview())
        return 0

    commands = table.commands()
    if words[0] not in commands:
        _refuse_command(words[0], commands)
    command = commands[words[0]]
    prog = f"mupax {words[0]}"
    words = words[1:]

    # Imported late: the overview and a misspelt command need no config.
    from mupax.train.config import record

    # Before words are parsed, because a plug-in may bring the preset or model that they name.
    record.load(modules)
    try:
        if command.subcommands:
            row, words = _subcommand(command, words)
            if row is not command:
                prog = f"{prog} {row.name}"
            command = row
        return _run(command, prog, words, modules)
    except SystemExit as stop:
        if stop.code == 0:  # the command's help was printed
            # Help ends by SystemExit, so the example is printed on the way out.
            print(f"\n{_appendix(command)}")
        raise


def overview() -> str:
    """Return the text of `mupax --help`: every command by group."""
    parts = ["usage: mupax COMMAND [--FLAG VALUE ...]"]
    names = table.commands()
    width = max(map(len, names))
    for group, commands in table.GROUPS.items():
        rows = [(command.name.ljust(width), command.summary) for command in commands]
        parts.append(f"{group}:\n{terminal.table(rows, indent=2)}")
    notes = [
        "`mupax COMMAND --help` prints the flags of one and an example.",
        "`mupax --version` prints the version.",
        "`mupax --completion bash`, `zsh` or `fish` prints a script that completes commands and "
        "recipes.",
    ]
    parts.append("\n".join(map(terminal.wrapped, notes)))
    return "\n\n".join(parts)


def _appendix(command: Command) -> str:
    """Return the text below a command's help: an example, and subcommands that help leaves out."""
    parts = []
    # A command without a run of its own prints its subcommands as its help.
    if command.run is not None and command.subcommands:
        rows = [(row.name, row.summary) for row in command.subcommands]
        parts.append(f"subcommands:\n{terminal.table(rows, indent=2)}\n")
    parts.append(f"example:\n{terminal.command(f'mupax {command.example}')}")
    return "\n".join(parts)


def _subcommand(command: Command, words: list[str]) -> tuple[Command, list[str]]:
    """Return the row that the first word names, and the words after it.

    If the first word names no row, return the command itself with all words if it runs without a
    subcommand, otherwise its default subcommand.

    Raises:
        SystemExit: Code 0, after the subcommands were printed, for `--help` or if there is neither
            a word nor a default.
        UsageError: The first word is no subcommand, or nearly the name of one.
    """
    rows = {row.name: row for row in command.subcommands}
    if words and words[0] in rows:
        return rows[words[0]], words[1:]
    prog = f"mupax {command.name}"
    if command.run is not None:
        _refuse_misspelt(prog, words, list(rows))
        return command, words
    if words and not words[0].startswith("-"):
        _refuse_name(prog, words[0])
    summaries = {row.name: row.summary for row in command.subcommands}
    name, words = command_line.first_word(prog, "command", summaries, words, command.default)
    return rows[name], words


def _refuse_misspelt(prog: str, words: list[str], names: list[str]) -> None:
    """Raise UsageError if the first word is nearly a subcommand's name and is no file or folder."""
    if not words or words[0].startswith("-") or Path(words[0]).exists():
        return
    word = words[0]
    # A high cutoff, because the word may be a recipe or a folder that the command itself takes.
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.75)
    if near:
        raise command_line.UsageError(f"{prog} has no {word!r}; did you mean `{prog} {near[0]}`?")


def _run(command: Command, prog: str, words: list[str], modules: Sequence[str]) -> int:
    """Check paths, memory and JAX's variables as the command's row says, then run the command.

    Return the exit code. If memory runs out, the row's advice is added to the message, except for a
    training run.

    Args:
        modules: Names of the modules of `--plugin`.

    Raises:
        UsageError: The command needs modules of mupax that mupax-presets does not install.
    """
    try:
        if command.prepared == "nothing":
            return _call(command, prog, words)
        _prepare(command, words)
        if command.prepared == "run":
            # A child process that continues a crashed run needs the plugins again.
            return _call(command, prog, [*_plugin_words(modules), *words])
        # A training run is not wrapped here, because its own advice knows the model.
        with memory.explained(command.less_memory):
            return _call(command, prog, words)
    except ImportError as error:
        # The package mupax-presets has all presets, but not the folder train/data.
        is_complete = importlib.util.find_spec("mupax.train.data") is not None
        if is_complete or not (error.name or "").startswith("mupax."):
            raise
        raise command_line.UsageError(
            f"{command.name} needs {error.name}, which does not come with mupax-presets; install "
            "mupax"
        ) from error


def _call(command: Command, prog: str, words: list[str]) -> int:
    """Import a command, run it with the words after its name, and return the exit code."""
    assert command.run is not None
    main = command.run()
    if not isinstance(main, type):
        return main(words)
    from mupax.train.config.preset import with_group_constants

    if command.takes_recipe:
        from mupax.train.config.cli import with_file_first

        words = with_file_first(words)
    return command_line.parse(main, prog, with_group_constants(words)).run()


def _prepare(command: Command, words: list[str]) -> None:
    """Raise an error if paths, `ulimit -v` or JAX's variables do not permit the command.

    Also make the C library keep freed memory for reuse, except for commands of kind "weights". The
    variables are not checked for a training run or `--help`.
    """
    from mupax.train.config.checks import check_words
    from mupax.train.data import cache
    from mupax.train.parallel import hardware

    # Without enough address space, JAX's compiler ends the process and no message says why.
    memory.check_compiler()
    if command.prepared != "weights":
        # The options of the C library must be set before JAX is imported.
        hardware.keep_freed_memory()
    check_words(words, is_local=command.is_local)
    # A run checks JAX's settings itself, because its --print-config does not need JAX.
    if command.prepared != "run" and not _HELP & set(words):
        process.check(cache.remembered)


def _plugin_words(modules: Sequence[str]) -> list[str]:
    """Return the words `--plugin MODULE` for every module."""
    words: list[str] = []
    for module in modules:
        words += [plugins.FLAG, module]
    return words


def _refuse_command(word: str, commands: dict[str, Command]) -> NoReturn:
    """Raise UsageError for a first word that is no command.

    The message has the right command for a recipe or subcommand, otherwise the nearest name.
    """
    from mupax.train.config.recipes import RECIPES

    if word in RECIPES:
        raise command_line.UsageError(
            f"{word} is a recipe, not a command; write `mupax train {word}`"
        )
    for command in commands.values():
        if word in {row.name for row in command.subcommands}:
            raise command_line.UsageError(
                f"{word} comes after {command.name}; write `mupax {command.name} {word}`"
            )
    summaries = {command.name: command.summary for command in commands.values()}
    command_line.first_word("mupax", "command", summaries, [word])  # raises
    raise AssertionError(word)


def _refuse_name(prog: str, word: str) -> None:
    """Raise UsageError if the word after `presets` or `models` names a preset or a model.

    Do nothing for any other word. The message has the command to write instead.

    Args:
        prog: Words before `word`. Only after `mupax presets` and `mupax models` can it be refused.
    """
    from mupax.presets import PRESETS
    from mupax.zoo.configs import CONFIGS

    if prog == "mupax presets" and word in PRESETS:
        raise command_line.UsageError(
            f"{word} is a preset, not a command; write `mupax presets constants {word}`, or table, "
            "limits or desiderata in its place"
        )
    if prog == "mupax models" and word in CONFIGS:
        raise command_line.UsageError(
            f"{word} is a model, not a command; write `mupax models describe {word}`"
        )
