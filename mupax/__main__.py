"""The `mupax` command. In a checkout `python -m train lm-tiny` is `mupax train lm-tiny`, where no train.py hides ours."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from mupax import __version__
from mupax.process import Interrupts, open_closed_streams

COMMANDS = {
    "train": "train a recipe, or run one of its commands",
    "presets": "list parameterizations and print their tables",
    "zoo": "list and describe models, import and export weights",
    "data": "prepare data, show text with noise, train a tokenizer",
    "--version": "the version of what is installed",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code of a command line, which is that of the process where it is left out."""
    if argv is not None:
        from mupax import terminal

        return terminal.exit_code(_command, argv)
    open_closed_streams()
    interrupts = Interrupts()
    try:
        interrupts.listen()  # before all that takes time to import
        from mupax import terminal
    except KeyboardInterrupt:
        os._exit(interrupts.exit_code or 128 + signal.SIGINT)
    return terminal.whole_process(_command, interrupts)


def _command(argv: list[str]) -> int:
    """Run the command that the first word names, and return its exit code."""
    from mupax import command_line

    if argv and argv[0] not in COMMANDS:
        from mupax.train.__main__ import COMMANDS as OF_TRAIN
        from mupax.train.config.recipes import RECIPES
        from mupax.train.data.__main__ import COMMANDS as OF_DATA

        if argv[0] in (*OF_TRAIN, *RECIPES):
            raise command_line.UsageError(f"{argv[0]} comes after train; write `mupax train {argv[0]}`")
        if argv[0] in OF_DATA:
            raise command_line.UsageError(f"{argv[0]} comes after data; write `mupax data {argv[0]}`")
    command, words = command_line.first_word("mupax", {"command": COMMANDS}, argv)
    # The one place outside tests that imports entry points, each only when it is asked for.
    if command == "train":
        from mupax.train.__main__ import main as train_main

        return train_main.command(words)
    if command == "presets":
        from mupax.presets.__main__ import main as presets_main

        return presets_main.command(words)
    if command == "zoo":
        from mupax.zoo.__main__ import main as zoo_main

        return zoo_main.command(words)
    if command == "data":
        from mupax.train.data.__main__ import main as data_main

        return data_main.command(words)
    print(f"mupax {__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
