"""`mupax --completion SHELL`: a script that completes commands, subcommands and recipes. Other words are files."""

from __future__ import annotations

from collections.abc import Sequence

from mupax import command_line
from mupax.commands import table

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
_FISH_LINE = "complete -c mupax -n {condition} -a {words}"
SHELLS = {
    "bash": 'eval "$(mupax --completion bash)" in ~/.bashrc',
    "zsh": 'eval "$(mupax --completion zsh)" in ~/.zshrc, after compinit',
    "fish": "mupax --completion fish | source in ~/.config/fish/config.fish",
}
"""Shells, and the line that turns completion on."""


def run(words: Sequence[str]) -> int:
    """Print the script of a shell, and return the exit code.

    Raises:
        UsageError: the word is no shell.
    """
    shell, _ = command_line.first_word("mupax --completion", "shell", SHELLS, words)
    print(script(shell), end="")
    return 0


def completions() -> dict[tuple[str, ...], list[str]]:
    """Return the words that may follow the words after `mupax`."""
    from mupax.train.config.recipes import RECIPES

    commands = table.commands()
    following: dict[tuple[str, ...], list[str]] = {(): list(commands)}
    for command in commands.values():
        names = [row.name for row in command.subcommands]
        if command.takes_recipe:
            names += RECIPES
        if names:
            following[command.name,] = names
        for row in command.subcommands:
            if row.takes_recipe:
                following[command.name, row.name] = list(RECIPES)
    return following


def script(shell: str) -> str:
    """Return the completion script of a shell, which is to be evaluated."""
    following = completions()
    if shell == "fish":
        return "".join(f"{line}\n" for line in _fish_lines(following))
    second = []
    third = []
    for typed, names in following.items():
        if len(typed) == 1:
            second.append(f'        2:{typed[0]}) words="{" ".join(names)}" ;;')
        elif typed:
            third.append(f'        3:"{" ".join(typed)}") words="{" ".join(names)}" ;;')
    text = _BASH.format(
        commands=" ".join(following[()]), second="\n".join(second), third="\n".join(third)
    )
    return _ZSH + text if shell == "zsh" else text


def _fish_lines(following: dict[tuple[str, ...], list[str]]) -> list[str]:
    lines = []
    for typed, names in following.items():
        tokens = " ".join(["mupax", *typed])
        condition = f'\'test (commandline -opc | string join " ") = "{tokens}"\''
        lines.append(_FISH_LINE.format(condition=condition, words=f"'{' '.join(names)}'"))
    return lines
