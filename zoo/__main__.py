"""`python -m zoo` in a checkout: the old spelling of `mupax models`, `mupax import` and `mupax export`."""

from __future__ import annotations

import sys

from mupax import terminal
from mupax.commands import dispatch


@terminal.entry_point
def main(argv: list[str]) -> int:
    """Return the exit code of a command line, which is the words after `zoo`."""
    return dispatch.run(["zoo", *argv])


if __name__ == "__main__":
    sys.exit(main())
