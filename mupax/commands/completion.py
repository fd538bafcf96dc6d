"""`mupax --completion SHELL`: scripts that complete commands, subcommands and recipes in a shell.

All other words are completed as names of files.
"""

from __future__ import annotations

from collections.abc import Sequence

from mupax import command_line
from mupax.commands import table

# `-o default` completes names of files where the function finds no word.
_BASH = """\
_mupax() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" words=""
    case "$COMP_CWORD:${{COMP_WORDS[1]}}" in
        1:*) words="{commands}" ;;
{second}
    esac
    case "$COMP_CWORD:${{COMP_WORDS[1]}} ${{COMP_WORDS[2]}}" in
{third}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _mupax mupax
"""
_ZSH = "autoload -U +X bashcompinit && bashcompinit\n"
# Without `-f`, fish offers names of files besides these words.
_FISH_LINE = "complete -c mupax -n {condition} -a {words}"
SHELLS = {
    "bash": 'eval "$(mupax --completion bash)" in ~/.bashrc',
    "zsh": 'eval "$(mupax --completion zsh)" in ~/.zshrc, after compinit',
    "fish": "mupax --completion fish | source in ~/.config/fish/config.fish",
}
"""Shell to the line that turns completion on, and the file for that line."""


def run(words: Sequence[str]) -> int:
    """Print the completion script of a shell and return exit code 0.

    Args:
        words: Words after `--completion`. The first one names the shell.

    Raises:
        SystemExit: Code 0, after the list of shells was printed, for `--help` or no words.
        UsageError: The first word is no shell of `SHELLS`.
    """
    shell, _ = command_line.first_word("mupax --completion", "shell", SHELLS, words)
    print(script(shell), end="")
    return 0


def completions() -> dict[tuple[str, ...], list[str]]:
    """Return the words that can follow `mupax` and a command, by the words typed after `mupax`.

    The key `()` has all commands, `(command,)` its subcommands and recipes, and `(command,
    subcommand)` recipes. Keys without any words are left out.
    """
    from mupax.train.config.recipes import RECIPES

    commands = table.commands()
    following: dict[tuple[str, ...], list[str]] = {(): list(commands)}
    for command in commands.values():
        names = [row.name for row in command.subcommands]
        if command.takes_recipe:
            names += RECIPES
        if names:
            following[(command.name,)] = names
        for row in command.subcommands:
            if row.takes_recipe:
                following[(command.name, row.name)] = list(RECIPES)
    return following


def script(shell: str) -> str:
    """Return the completion script of a shell.

    Args:
        shell: Key of `SHELLS`.
    """
    following = completions()
    if shell == "fish":
        return "".join(f"{line}\n" for line in _fish_lines(following))

    # Branches of bash's `case`: the number of the word to complete, then the words before it.
    second = []
    third = []
    # The commands, which have the empty key, are no branch: the template has a place of their own
    # for them.
    for typed, names in following.items():
        words = " ".join(names)
        if len(typed) == 1:
            second.append(f'        2:{typed[0]}) words="{words}" ;;')
        elif typed:
            third.append(f'        3:"{" ".join(typed)}") words="{words}" ;;')

    commands = " ".join(following[()])
    text = _BASH.format(commands=commands, second="\n".join(second), third="\n".join(third))
    if shell == "zsh":
        # zsh runs the script of bash through bashcompinit.
        return _ZSH + text
    return text


def _fish_lines(following: dict[tuple[str, ...], list[str]]) -> list[str]:
    """Return the lines of fish's script: one for each list of words that `completions` has."""
    lines = []
    for typed, names in following.items():
        tokens = " ".join(["mupax", *typed])
        # `commandline -opc` has the words before the cursor, without the one that is being typed.
        condition = f'\'test (commandline -opc | string join " ") = "{tokens}"\''
        words = f"'{' '.join(names)}'"
        lines.append(_FISH_LINE.format(condition=condition, words=words))
    return lines
