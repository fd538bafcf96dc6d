"""Train a recipe: `mupax train RECIPE [--FLAG VALUE ...]`.

The first word is a recipe; `mupax train RECIPE --help all` lists its flags, which are the fields of its config. A file stands
in its place with `--config PATH`: JSON or YAML, such as the config.json of another run. `mupax train --resume --workdir W`
goes on with the run in W, whose config is read from there.

Exit codes: 0 done, 1 the run failed, 2 bad input (one message on stderr), 128 + its number stopped by a signal.
With `--restart` it is that of the last attempt, 128 and the signal's number where it was killed.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mupax import jax_variables, memory, terminal

if TYPE_CHECKING:
    from mupax.train.config.run import Config

COMMANDS = {
    "check": ("studies.check.command", "measure what a preset does as one size grows, and hold it against theory"),
    "sweep": (
        "studies.sweep.command",
        "train many learning rates, seeds, constants and sizes; one compilation a shape",
    ),
    "tune": ("studies.tune.command", "search many constants together: rates, stds, multipliers and decays by group"),
    "transfer": (
        "studies.transfer.command",
        "whether the best learning rate stays as the model grows: drift, price, report",
    ),
    "plan": (
        "studies.plan.command",
        "a run's whole config, cost and loss before it is run; `plan score` holds it to what came",
    ),
    "compile": ("pods.command", "compile a recipe for a TPU pod, without a TPU: memory, collectives, least step time"),
    "roles": ("studies.roles.command", "what every parameter is, found in the loss, and whether it is declared so"),
    "balance": (
        "studies.check.balance_command",
        "derive learning rates per layer from one batch, where none has a rule",
    ),
    "checkpoints": ("checkpoints.command", "list a run's checkpoints, their sizes and health, and verify them"),
    "grow": ("reuse.grow.command", "make a larger model of a checkpoint, with the same function"),
    "eval": ("run.eval_command", "loss and accuracy of any checkpoint, on its data or on other data"),
    "finetune": (
        "reuse.start.finetune",
        "train on a folder of one's own from a run or imported weights; flags as of a recipe",
    ),
    "predict": ("reuse.predict.command", "the likeliest classes of image files, by any checkpoint or imported weights"),
    "noise": ("run.noise", "the gradient noise scale at a checkpoint, below which joint rules for the batch hold"),
    "generate": ("reuse.generate.command", "text from any checkpoint of a language model"),
    "serve": ("reuse.serve.command", "a language model behind OpenAI's API, and a page to try it in a browser"),
    "push": (
        "reuse.huggingface.push",
        "a run or a folder of weights to a repository of Hugging Face, private unless asked",
    ),
    "convert": ("reuse.forms", "carry a run's checkpoint into another form of its preset"),
}
"""First words that are not recipes: the module of each under `mupax.train`, and what it does. Its `main` runs it; finetune's
`command` makes a run, which goes on as a recipe's does."""


_LESS_MEMORY = {
    "check": "Write fewer --sizes, or a smaller --model.seq-len",
    "sweep": "Write a smaller --data.batch-size, or more --accumulation-steps",
    "tune": "Write a smaller --data.batch-size, or more --accumulation-steps",
    "transfer": "Write a smaller --data.batch-size, or fewer sizes",
    "eval": "Write a smaller --data.eval-batch-size",
    "noise": "Write a smaller --data.batch-size, or fewer --batches",
    "predict": "Name fewer images at a time",
    "generate": "Write fewer --samples or a shorter --prompt",
    "serve": "Ask for fewer samples at a time, or serve a smaller model",
}
"""What takes less memory in a command where it ran out."""


@terminal.entry_point
def main(argv: list[str]) -> int:
    """The exit code of a command line, which is the words after `mupax train`."""
    from mupax import command_line
    from mupax.train.config import cli, plugins
    from mupax.train.config.checks import check_words, note_warmup
    from mupax.train.config.recipes import RECIPES
    from mupax.train.data import cache
    from mupax.train.parallel import hardware

    memory.check_compiler()
    hardware.keep_freed_memory()
    check_words(argv)
    modules, argv = plugins.split(argv)
    plugins.load(modules)
    commands = {name: line for name, (_, line) in COMMANDS.items()}
    kinds = {"recipe": RECIPES, "command": commands}
    if argv and argv[0] not in COMMANDS:
        argv = cli.with_file_first(argv)
    start: Callable[[], Config] | None = None
    if argv and cli.is_file(argv[0]):
        name, *words = argv
    elif argv and argv[0].startswith("-") and argv[0] not in ("-h", "--help"):
        words = argv
        name, start = _run_to_go_on_with(argv)
    else:
        name, words = command_line.first_word("mupax train", kinds, argv)
    if start is not None:  # whatever its recipe is called: a fine-tuned run's is finetune
        command = cli.parse(name, start, words)
    elif name == "finetune":
        from mupax.train.reuse.start import finetune

        command = finetune.command(words)
    elif name in COMMANDS:
        if not {"-h", "--help"} & set(words):
            jax_variables.check(cache.remembered)
        with memory.explained(_LESS_MEMORY.get(name, "Take a smaller model, or a machine with more memory")):
            return importlib.import_module(f"mupax.train.{COMMANDS[name][0]}").main(words)
    else:
        start, words = _recipe_or_record(name, words)
        command = cli.parse(name, start, words)
    if command.print_config:
        from mupax.train.config.record import to_json

        print(json.dumps(to_json(command.config), indent=2))
        return 0
    jax_variables.check(cache.remembered)
    if command.dry_run:
        from mupax.train.run import dry_run

        return dry_run.run(command.config)
    if command.restart:
        from mupax.train.run.restart import supervisor

        again = [word for module in modules for word in (plugins.FLAG, module)]
        return supervisor.run(command.config, [*again, *argv], command.restart)

    note_warmup(command.config.steps, command.config.scaled_optimizer.warmup_steps)
    from mupax.train.run import loop

    return loop.run(command.config)


def _recipe_or_record(name: str, words: Sequence[str]) -> tuple[Callable[[], Config], Sequence[str]]:
    """Return what makes the config that the words change, and the words.

    A run that goes on and whose tuned preset no longer comes with mupax starts from its own
    record, which has the numbers of that preset, and not from the recipe.
    """
    from mupax.train.config import cli

    recipe = cli.recipe(name)
    if "--resume" not in words or not any(":" in word for word in words):
        return recipe, words
    from mupax.paths import path_of
    from mupax.train.checkpoints import workdir
    from mupax.train.config import tuned
    from mupax.train.config.recipes import files

    moved = tuned.named_moved(words)
    place = cli.value_of("--workdir", words) or str(recipe().resolved().workdir)
    fields = workdir.recorded(path_of(place)) if moved else {}
    if moved is None or not fields:
        return recipe, words
    terminal.note(f"note: {moved} no longer comes with mupax; its numbers are those that {place} has recorded")
    return files.of_one_record(fields["config"], f"{place}/config.json"), tuned.without_preset(words)


def _run_to_go_on_with(argv: Sequence[str]) -> tuple[str, Callable[[], Config]]:
    """Return the recipe's name and the recorded config of the run in `--workdir`, for a command line that names no recipe.

    Raises:
        UsageError: the flags do not say which run to resume.
        WorkdirError: no run is there.
    """
    from mupax.command_line import UsageError
    from mupax.paths import path_of
    from mupax.train.checkpoints import workdir
    from mupax.train.config import cli
    from mupax.train.config.recipes import files

    place = cli.value_of("--workdir", argv)
    wrong = f"the first word is a recipe, not a flag such as {argv[0].partition('=')[0]}"
    lists = "`mupax train --help` lists the recipes"
    if place is None or place.startswith("--"):
        raise UsageError(f"{wrong}; to go on with a run write --resume --workdir FOLDER; {lists}")
    fields = workdir.read_record(path_of(place))
    if "--resume" not in argv:
        raise UsageError(f"{wrong}; {place} holds a run: add --resume to go on with it; {lists}")
    record = files.of_one_record(fields["config"], f"{place}/config.json")
    return str(fields["config"].get("recipe")), record


if __name__ == "__main__":
    sys.exit(main())
