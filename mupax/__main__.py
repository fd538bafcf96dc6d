"""The `mupax` command: `mupax train lm-tiny` is `python -m train lm-tiny` where a train.py of yours hides ours."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence

from mupax import __version__

COMMANDS = {
    "train": "train a recipe, or run one of its commands",
    "presets": "list parameterizations and print their tables",
    "zoo": "list and describe models, import and export weights",
    "--version": "the version of what is installed",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `python -m COMMAND ARGUMENTS` for the COMMAND named first.

    Args:
        argv: words after `mupax`; those of the process unless given.

    Returns:
        The exit code of the command, 2 where there is no such command.
    """
    command, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    # The one place outside tests that imports entry points, each only when it is asked for.
    if command == "train":
        from mupax.train.__main__ import main as train_main

        return train_main(rest)
    if command == "presets":
        from mupax.presets.__main__ import main as presets_main

        return presets_main(rest)
    if command == "zoo":
        from mupax.zoo.__main__ import main as zoo_main

        return zoo_main(rest)
    usage = "\n".join(["usage: mupax COMMAND ...", *(f"  {name:<9} {line}" for name, line in COMMANDS.items())])
    if command == "--version":
        print(f"mupax {__version__}")
        return 0
    if command in ("-h", "--help"):
        print(usage)
        return 0
    near = difflib.get_close_matches(command, COMMANDS, n=1)
    hint = f"; did you mean `mupax {near[0]}`?" if near else ""
    print(f"mupax has no command {command!r}{hint}\n{usage}", file=sys.stderr)
    return 2
