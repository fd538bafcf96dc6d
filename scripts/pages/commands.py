"""Reference of commands: writes docs/reference/commands.md from the table that dispatch reads.

python -m scripts.pages.commands
"""

from __future__ import annotations

from mupax import spellings
from mupax.commands import completion, table
from mupax.commands.table import Command
from scripts import ROOT

PAGE = ROOT / "docs" / "reference" / "commands.md"
HEAD = """# Commands

`mupax COMMAND --help` prints the flags of a command and an example. `mupax train RECIPE --help`
prints the common flags of a recipe, and `--help all` prints every flag. Instead of a recipe, a
command takes `--config FILE`: YAML or JSON, such as the `config.json` of a run. `--plugin MODULE`
first imports a module with presets, models, data or optimizers of your own
([how](../howto/extend.md)). In a checkout `python -m train RECIPE` is `mupax train RECIPE`. Made by
`python -m scripts.pages.commands`.

"""
EXIT_CODES = """## Exit codes

0: done. 1: it failed, or a check does not hold. 2: bad input, with one message on standard error.
128 plus a signal's number: stopped by that signal. `tests/train/inputs.md` has 300 right and wrong
command lines with their messages.

"""
OLD = """## Old spellings

These still run, with the same output and exit code, and print a line on standard error that names
the new spelling.

| old | now |
|---|---|
"""


def document() -> str:
    """Return the page: a table for each group, completion, exit codes and old spellings."""
    parts = [HEAD]
    for group, commands in table.GROUPS.items():
        parts.append(f"## {group}\n\n")
        parts.append("| command | what it does | example | recipe |\n|---|---|---|---|\n")
        for command in commands:
            parts.append(_row(command.name, command))
            parts += [_row(f"{command.name} {row.name}", row) for row in command.subcommands]
        parts.append("\n")
    parts.append("## Completion\n\n")
    parts.append("One line turns on completion of commands, subcommands and recipes:\n\n")
    parts.append("| shell | line |\n|---|---|\n")
    for shell, line in completion.SHELLS.items():
        code, _, place = line.partition(" in ")
        # A bar inside of a table's cell needs a backslash.
        code = code.replace("|", "\\|")
        parts.append(f"| {shell} | `{code}` in {place} |\n")
    parts += ["\n", EXIT_CODES, OLD]
    for typed, spelling in spellings.OLD.items():
        parts.append(f"| `mupax {typed}` | `mupax {spelling}` |\n")
    return "".join(parts)


def _row(typed: str, command: Command) -> str:
    """Return the table row of a command.

    Args:
        typed: Words of the command after `mupax`.
    """
    takes_recipe = "`--config`" if command.takes_recipe else ""
    return f"| `{typed}` | {command.summary} | `mupax {command.example}` | {takes_recipe} |\n"


if __name__ == "__main__":
    PAGE.write_text(document())
