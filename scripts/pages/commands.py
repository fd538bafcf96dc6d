"""The reference of commands: writes docs/reference/commands.md from the table that dispatch reads.

python -m scripts.pages.commands
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from mupax import terminal
from mupax.commands import completion, table
from mupax.commands.table import Command
from scripts import ROOT, harness

PAGE = ROOT / "docs" / "reference" / "commands.md"
HEAD = """# Commands

`mupax COMMAND --help` prints an example and the command's flags; `mupax train --help` prints the
recipes. `mupax train RECIPE --help` prints the common flags of a recipe, and `--help all` prints
every flag. `--plugin MODULE` first imports your Python module that extends mupax
([how](../howto/extend.md)).
`python -m scripts.pages.commands` makes this page.

"""
RECIPES = """Instead of a recipe, these commands take `--config FILE` (YAML or JSON, such as a run's
`config.json`): {commands}.

"""
EXIT_CODES = """[Exit codes](../howto/running.md#exit-codes) are the same for every command.
`tests/train/inputs.md` has right and wrong command lines with their messages.

"""
OLD = """## Old spellings

Old spellings still run, and print new ones on standard error.

| old | now |
|---|---|
"""


def document() -> str:
    """Return the page: a table for each group, completion and old spellings."""
    names = []
    for name, row in _rows():
        if row.takes_recipe:
            names.append(f"`{name}`")
    takes_recipe = ", ".join(names)
    parts = [HEAD, RECIPES.format(commands=takes_recipe), EXIT_CODES]
    for group, commands in table.GROUPS.items():
        parts.append(f"## {group}\n\n| command | what it does | example |\n|---|---|---|\n")
        parts += [_row(name, row) for name, row in _rows(commands)]
        parts.append("\n")
    parts.append("## Completion\n\n")
    parts.append("One line turns on completion of commands, subcommands and recipes:\n\n")
    parts.append("| shell | line |\n|---|---|\n")
    for shell, line in completion.SHELLS.items():
        code, _, place = line.partition(" in ")
        # A bar inside of a table's cell needs a backslash.
        code = code.replace("|", "\\|")
        parts.append(f"| {shell} | `{code}` in {place} |\n")
    parts += ["\n", OLD]
    shortened = []
    for typed, spelling in terminal.OLD_SPELLINGS.items():
        if typed == f"train {spelling}":
            shortened.append(spelling)
    parts.append(f"| `mupax train` and {', '.join(shortened)} | `mupax` and the same word |\n")
    for typed, spelling in terminal.OLD_SPELLINGS.items():
        if spelling not in shortened:
            parts.append(f"| `mupax {typed}` | `mupax {spelling}` |\n")
    return "".join(parts)


def _rows(commands: Iterable[Command] | None = None) -> Iterator[tuple[str, Command]]:
    """Yield each command as it is typed, and its row.

    A command whose example is one of its subcommands has no line of its own.
    """
    if commands is None:
        commands = itertools.chain.from_iterable(table.GROUPS.values())
    for command in commands:
        names = [row.name for row in command.subcommands]
        if command.example.split()[1] not in names:
            yield command.name, command
        for row in command.subcommands:
            yield f"{command.name} {row.name}", row


def _row(typed: str, command: Command) -> str:
    """Return the table row of a command.

    Args:
        typed: Words of the command after `mupax`.
    """
    return f"| `{typed}` | {command.summary} | `mupax {command.example}` |\n"


if __name__ == "__main__":
    harness.refuse_words()
    PAGE.write_text(document())
