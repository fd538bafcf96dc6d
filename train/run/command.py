"""Train a recipe: `mupax train RECIPE [--FLAG VALUE ...]`.

The first word is a recipe; `mupax train RECIPE --help all` lists its flags, which are the fields of its config. A file stands
in its place with `--config PATH`: JSON or YAML, such as the config.json of another run. `mupax train --resume --workdir W`
goes on with the run in W, whose config is read from there.

Exit codes: 0 done, 1 the run failed, 2 bad input (one message on stderr), 128 + its number stopped by a signal.
With `--restart` it is that of the last attempt, 128 and the signal's number where it was killed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from mupax import command_line, plugins, process, terminal
from mupax.disk import path_of
from mupax.train.config import cli
from mupax.train.config.checks import note_warmup
from mupax.train.config.recipes import RECIPES
from mupax.train.config.run import Config
from mupax.train.data import cache


def main(argv: Sequence[str]) -> int:
    """Train, or print what `--help`, `--print-config` and `--dry-run` ask for. Return the exit code.

    Args:
        argv: the words after `mupax train`, with every `--plugin`, whose modules are imported already.

    Raises:
        UsageError, ConfigError, PresetError: words that are wrong, or do not fit together.
        WorkdirError: no run is where one is to go on.
    """
    _, words = plugins.split(argv)
    words = cli.with_file_first(words)
    start_config: Callable[[], Config] | None = None
    if words and cli.is_file(words[0]):
        name, *words = words
    elif words and words[0].startswith("-") and words[0] not in ("-h", "--help"):
        name, start_config = _run_to_go_on_with(words)
    else:
        name, words = command_line.first_word("mupax train", "recipe", RECIPES, words)
    if start_config is None:
        start_config, words = _recipe_or_record(name, words)
    return start(cli.parse(name, start_config, words), ["train", *argv])


def start(command: cli.Command, words: Sequence[str]) -> int:
    """Do what a parsed command asks for: print its config, dry-run it, or train. Return the exit code.

    Args:
        command: config and what to do with it.
        words: its command line after `mupax`, for a process that starts it again.
    """
    if command.print_config:
        from mupax.train.config.record import to_json

        print(json.dumps(to_json(command.config), indent=2))
        return 0
    process.check(cache.remembered)
    if command.dry_run:
        from mupax.train.run import dry_run

        return dry_run.run(command.config, command.published)
    if command.restart:
        from mupax.train.run.restart import supervisor

        return supervisor.run(command.config, words, command.restart)
    note_warmup(command.config.steps, command.config.scaled_optimizer.warmup_steps)
    from mupax.train.run import loop

    return loop.run(command.config)


def _recipe_or_record(
    name: str, words: Sequence[str]
) -> tuple[Callable[[], Config], Sequence[str]]:
    """Return what makes the config that the words change, and the words.

    A run that goes on and whose tuned preset no longer comes with mupax starts from its own
    record, which has the numbers of that preset, and not from the recipe.
    """
    recipe = cli.recipe(name)
    if "--resume" not in words or not any(":" in word for word in words):
        return recipe, words

    from mupax.train.checkpoints import workdir
    from mupax.train.config import tuned
    from mupax.train.config.recipes import files

    moved = tuned.named_moved(words)
    place = cli.value_of("--workdir", words) or str(recipe().resolved().workdir)
    fields = workdir.recorded(path_of(place)) if moved else {}
    if moved is None or not fields:
        return recipe, words
    terminal.note(
        f"note: {moved} no longer comes with mupax; its numbers are those that {place} has recorded"
    )
    return files.of_one_record(fields["config"], f"{place}/config.json"), tuned.without_preset(
        words
    )


def _run_to_go_on_with(argv: Sequence[str]) -> tuple[str, Callable[[], Config]]:
    """Return the recipe's name and the recorded config of the run in `--workdir`, for a command line that names no recipe.

    Raises:
        UsageError: the flags do not say which run to resume.
        WorkdirError: no run is there.
    """
    from mupax.train.checkpoints import workdir
    from mupax.train.config.recipes import files

    place = cli.value_of("--workdir", argv)
    wrong = f"the first word is a recipe, not a flag such as {argv[0].partition('=')[0]}"
    lists = "`mupax train --help` lists the recipes"
    if place is None or place.startswith("--"):
        raise command_line.UsageError(
            f"{wrong}; to go on with a run write --resume --workdir FOLDER; {lists}"
        )
    fields = workdir.read_record(path_of(place))
    if "--resume" not in argv:
        raise command_line.UsageError(
            f"{wrong}; {place} holds a run: add --resume to go on with it; {lists}"
        )
    record = files.of_one_record(fields["config"], f"{place}/config.json")
    return str(fields["config"].get("recipe")), record
