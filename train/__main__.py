"""Train a recipe: `python -m train RECIPE [--FLAG VALUE ...]`.

The first word is a recipe; `python -m train RECIPE --help` lists its flags, which are the fields of its config.

Exit codes: 0 done, 1 the run failed, 2 bad input (one message on stderr), 130 and 143 stopped by a signal.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import json
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence

from mupax import terminal

MESSAGE_LINES = 10
"""Longest message for bad input."""

OWN = "mupax"

COMMANDS = {
    "check": ("studies.check.command", "measure what a preset does as one size grows, and hold it against theory"),
    "sweep": (
        "studies.sweep.command",
        "train many points of rates, seeds, constants and sizes, with one compilation per shape",
    ),
    "transfer": (
        "studies.transfer.command",
        "whether the best learning rate stays as the model grows: fits, drift, price, a report",
    ),
    "compile": ("pods.command", "compile a recipe for a TPU pod, without a TPU: memory, collectives, least step time"),
    "balance": (
        "studies.check.balance_command",
        "derive rates per layer from one batch, as a preset, for where none has a rule",
    ),
    "checkpoints": ("checkpoints.command", "list a run's checkpoints, their sizes and health, and verify them"),
    "grow": (
        "reuse.grow.command",
        "make a larger model of a checkpoint, with the same function and the optimizer's state",
    ),
    "eval": ("run.eval_command", "loss and accuracy of any checkpoint, on its data or on other data"),
    "generate": ("reuse.generate.command", "text from any checkpoint of a language model"),
    "convert": ("reuse.forms_command", "carry a run's checkpoint into another form of its preset"),
}
"""First words that are not recipes: the module of each under `mupax.train`, whose `main` runs it, and what it does."""


class _Stopped(BaseException):
    """SIGTERM arrived. Not an Exception, so that nothing below takes it for a failure of its own."""


@terminal.quiet_in_pipes
def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code.

    Args:
        argv: the words after `python -m train`; those of the process unless given.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        with _terminable():
            return _command(argv)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except _Stopped:
        return 128 + signal.SIGTERM
    except BrokenPipeError:  # no failure of the run
        raise
    except Exception as error:
        if _bad_input(error):
            lines = f"error: {error}".splitlines()
            print("\n".join(lines[:MESSAGE_LINES]), file=sys.stderr)
            return 2
        if _told(error):
            print(f"error: {error}", file=sys.stderr)
        else:
            traceback.print_exc()
        return 1


def _bad_input(error: Exception) -> bool:
    """A subclass of ValueError that this project defines: every such error's text says what to write instead."""
    return isinstance(error, ValueError) and type(error).__module__.partition(".")[0] == OWN


def _told(error: Exception) -> bool:
    """A failure of the machine that this project has a class for: its text says what to do, a traceback would hide it."""
    return isinstance(error, RuntimeError) and type(error).__module__.partition(".")[0] == OWN


def _command(argv: list[str]) -> int:
    from mupax.train.config.devices import check_words
    from mupax.train.config.recipes import RECIPES

    check_words(argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(_overview())
        return 0
    name = argv[0]
    if name in COMMANDS:
        return importlib.import_module(f"mupax.train.{COMMANDS[name][0]}").main(argv[1:])
    if name not in RECIPES:
        near = difflib.get_close_matches(name, [*RECIPES, *COMMANDS], n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        kind = "the first word is a recipe, not a flag" if name.startswith("-") else f"no recipe is named {name!r}"
        print(
            f"error: {kind}; {hint}the recipes are {', '.join(RECIPES)}, the commands {', '.join(COMMANDS)}",
            file=sys.stderr,
        )
        return 2

    from mupax.train.config import cli

    command = cli.parse(name, RECIPES[name], argv[1:])
    if command.print_config:
        from mupax.train.config.record import to_json

        print(json.dumps(to_json(command.config), indent=2))
        return 0
    if command.dry_run:
        from mupax.train.run import dry_run as dryrun

        return dryrun.run(command.config)

    steps, warmup = command.config.steps, command.config.optimizer.warmup_steps
    if steps < warmup:
        print(
            f"note: all {steps} steps are warm-up, which has {warmup} in this config; see --optimizer.warmup-steps",
            file=sys.stderr,
        )

    from mupax.train.run import loop

    return loop.run(command.config)


def _overview() -> str:
    from mupax.train.config.recipes import RECIPES

    recipes = [[name, (inspect.getdoc(recipe) or "").splitlines()[0]] for name, recipe in RECIPES.items()]
    parts = [
        "usage: python -m train RECIPE [--FLAG VALUE ...]",
        f"recipes:\n{terminal.table(recipes, indent=2)}",
        f"commands:\n{terminal.table([[name, line] for name, (_, line) in COMMANDS.items()], indent=2)}",
        terminal.wrapped("`python -m train RECIPE --help` lists the flags of one, `--dry-run` shows what it would do."),
    ]
    return "\n\n".join(parts)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM unwinds the run, so that files and the terminal are left in order."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise _Stopped

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
