"""`python -m zoo`, the old spelling of `mupax models`, `mupax import` and `mupax export`."""

from __future__ import annotations

import sys

from mupax import terminal
from mupax.commands import dispatch


@terminal.entry_point
def main(argv: list[str]) -> int:
    """Run `mupax models`, `import` or `export` by its old spelling, and return its exit code.

    The present spelling is printed on standard error.

    Args:
        argv: Words after `python -m zoo`, such as ["models"].
    """
    return dispatch.run(["zoo", *argv])


if __name__ == "__main__":
    sys.exit(main())
