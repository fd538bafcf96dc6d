"""For notebooks that type commands, in a hidden first cell: an empty folder, and a `%%bash` that shows all output and stops at a failure."""

from __future__ import annotations

import os
import subprocess
import tempfile

from IPython.core.magic import register_cell_magic

os.chdir(tempfile.mkdtemp())
os.environ |= {"COLUMNS": "80", "MPLBACKEND": "agg", "TERM": "dumb"}
os.environ.pop("FORCE_COLOR", None)


@register_cell_magic
def bash(_: str, cell: str) -> None:
    """Prints both streams in their order, and raises where a command fails; IPython's own hands them on a hundred bytes at a time."""
    words = ["bash", "-eo", "pipefail", "-c", cell]
    done = subprocess.run(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    print(done.stdout, end="")
    done.check_returncode()
