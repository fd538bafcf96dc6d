"""Entry point of the `mupax` command: signal handlers, exit code and `--version`.

`mupax.commands` has the commands.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Sequence

from mupax import __version__
from mupax.process import Interrupts, open_closed_streams


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code.

    Args:
        argv: Words after `mupax`. `None` reads `sys.argv` and installs signal handlers. The process
            then ends 5 seconds after the return at the latest. After a signal or a closed pipe it
            ends at once, and this function does not return.
    """
    if argv is not None:
        from mupax import terminal

        return terminal.exit_code(_command, argv)
    # Imports and tracing make hundreds of thousands of objects that stay alive. With Python's own
    # thresholds, searching them for cycles takes a tenth of a short run.
    gc.set_threshold(20_000, 20, 50)
    open_closed_streams()
    interrupts = Interrupts()
    try:
        interrupts.listen()  # before slow imports
        from mupax import terminal
    except KeyboardInterrupt:
        os._exit(interrupts.exit_code or 128 + signal.SIGINT)
    return terminal.whole_process(_command, interrupts)


def _command(argv: list[str]) -> int:
    """Run the command that the words after `mupax` name, and return its exit code.

    `--version` prints the version, and `--completion SHELL` a shell's completion script. Exceptions
    of a command are raised.
    """
    if argv == ["--version"]:
        print(f"mupax {__version__}")
        return 0
    if argv[:1] == ["--completion"]:
        from mupax.commands import completion

        return completion.run(argv[1:])
    from mupax.commands import dispatch

    return dispatch.run(argv)


if __name__ == "__main__":
    sys.exit(main())
