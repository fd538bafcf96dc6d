"""`python -m presets` in a checkout is `mupax presets`."""

from __future__ import annotations

import sys

from mupax import terminal
from mupax.commands import dispatch


@terminal.entry_point
def main(argv: list[str]) -> int:
    """Run `mupax presets` and return its exit code.

    Args:
        argv: Words after `mupax presets`.
    """
    return dispatch.run(["presets", *argv])


if __name__ == "__main__":
    sys.exit(main())
