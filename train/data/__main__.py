"""Entry point of `python -m mupax.train.data`, which is `mupax data`."""

from __future__ import annotations

import sys

from mupax import terminal
from mupax.commands import dispatch


@terminal.entry_point
def main(argv: list[str]) -> int:
    """Run `mupax data` with these words after it, and return the exit code."""
    return dispatch.run(["data", *argv])


if __name__ == "__main__":
    sys.exit(main())
