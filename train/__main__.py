"""Entry point of `python -m train` in a checkout, which is `mupax train`."""

from __future__ import annotations

import sys

from mupax import terminal
from mupax.commands import dispatch


@terminal.entry_point
def main(argv: list[str]) -> int:
    """Run `mupax train` and return its exit code.

    Args:
        argv: Words after `mupax train`.
    """
    return dispatch.run(["train", *argv])


if __name__ == "__main__":
    sys.exit(main())
