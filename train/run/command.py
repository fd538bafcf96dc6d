"""Train a recipe: `mupax train RECIPE [--FLAG VALUE ...]`.

The first word is a recipe. `mupax train RECIPE --help all` lists its flags, which are the fields of
its config. A file in place of the recipe (`--config PATH`, JSON or YAML) gives the config, such as
config.json of another run. `mupax train --resume --workdir W` goes on with the run in W, whose
config is read from there.

Exit codes: 0 when done, 1 if the run failed, 2 for bad input (one message on stderr), 128 + signal
number if a signal stopped the run. With `--restart` it is the exit code of the last attempt.
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
    """Train, or print what `--help`, `--print-config` or `--dry-run` ask for. Return the exit code.

    Args:
        argv: Words after `mupax train`. The modules of `--plugin` words are imported already.

    Raises:
        UsageError, ConfigError, PresetError: Words are wrong, or do not fit together.
        WorkdirError: The workdir of a run to resume holds no run.
    """
    # Plugins are imported already, so only the other words are parsed.
    _, words = plugins.split(argv)
    words = cli.with_file_first(words)
    start_config: Callable[[], Config] | None = None
    if words and cli.is_file(words[0]):
        name, *words = words
    elif words and words[0].startswith("-") and words[0] not in ("-h", "--help"):
        name, start_config = _run_to_resume(words)
    else:
        name, words = command_line.first_word("mupax train", "recipe", RECIPES, words)
    if start_config is None:
        start_config, words = _recipe_or_record(name, words)
    return start(cli.parse(name, start_config, words), ["train", *argv])


def start(command: cli.Command, words: Sequence[str]) -> int:
    """Do what a parsed command asks for: print its config, dry-run it, or train.

    Args:
        command: Config, and what to do with it (`print_config`, `dry_run`, `restart`).
        words: Command line after `mupax`. With `--restart`, a supervisor starts it again.

    Returns:
        Exit code.
    """
    if command.print_config:
        from mupax.train.config.record import to_json

        print(json.dumps(to_json(command.config), indent=2))
        return 0
    # Checked before JAX is imported: XLA ends the process if a flag in XLA_FLAGS is wrong.
    process.check(cache.remembered)
    if command.dry_run:
        from mupax.train.run import dry_run

        return dry_run.run(command.config, command.published)
    if command.restart:
        from mupax.train.run.restart import supervisor

        return supervisor.run(command.config, words, command.restart)
    note_warmup(command.config.steps, command.config.scaled_optimizer.warmup_steps)
    # Imported here, because `--print-config` and a supervisor do without JAX.
    from mupax.train.run import loop

    return loop.run(command.config)


def _recipe_or_record(
    name: str, words: Sequence[str]
) -> tuple[Callable[[], Config], Sequence[str]]:
    """Return a function that makes the config before flags are applied, and the flags.

    The function makes the config of the recipe, and the flags are `words`. Only if a resumed run
    names a tuned preset that no longer comes with mupax, the function makes the recorded config of
    the run, which has the preset's values. Then a note is printed, and the flags are without the
    preset.
    """
    recipe = cli.recipe(name)
    # A tuned preset is written PRESET:NAME, so words without a colon name none.
    if "--resume" not in words or not any(":" in word for word in words):
        return recipe, words

    from mupax.train.checkpoints import workdir
    from mupax.train.config import tuned
    from mupax.train.config.recipes import files

    moved_preset = tuned.named_moved(words)
    folder = cli.value_of("--workdir", words) or str(recipe().resolved().workdir)
    record = workdir.recorded(path_of(folder)) if moved_preset else {}
    if moved_preset is None or not record:
        return recipe, words
    terminal.note(
        f"note: {moved_preset} no longer comes with mupax; "
        f"its numbers are those that {folder} has recorded"
    )
    make_config = files.of_one_record(record["config"], f"{folder}/config.json")
    return make_config, tuned.without_preset(words)


def _run_to_resume(argv: Sequence[str]) -> tuple[str, Callable[[], Config]]:
    """Return the recipe's name of the run in `--workdir`, and a function that makes its config.

    This is for a command line that names no recipe. The config is the recorded one.

    Raises:
        UsageError: The flags do not say which run to resume.
        WorkdirError: The workdir holds no run.
        PluginError: A module that the run needs may not be imported on this account.
    """
    from mupax.train.checkpoints import workdir
    from mupax.train.config.recipes import files
    from mupax.train.config.record import restore

    folder = cli.value_of("--workdir", argv)
    wrong = f"the first word is a recipe, not a flag such as {argv[0].partition('=')[0]}"
    advice = "`mupax train --help` lists the recipes"
    # If the value of `--workdir` is missing, the next flag is taken for the value.
    if folder is None or folder.startswith("--"):
        raise command_line.UsageError(
            f"{wrong}; to go on with a run write --resume --workdir FOLDER; {advice}"
        )
    record = workdir.read_record(path_of(folder))
    if "--resume" not in argv:
        raise command_line.UsageError(
            f"{wrong}; {folder} holds a run: add --resume to go on with it; {advice}"
        )
    # Before the fields are read, which may name an extension of the run's own.
    restore(record)
    make_config = files.of_one_record(record["config"], f"{folder}/config.json")
    return str(record["config"].get("recipe")), make_config
