"""Messages of a process that a library aborts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.core

ROOT = Path(__file__).resolve().parents[3]
ABORTED = """
import os, socket, sys
from mupax.train.parallel import distributed
here = socket.create_server(("localhost", 0))
address = f"localhost:{here.getsockname()[1]}"
if sys.argv[1] == "gone":
    here.close()
distributed.listen(address, lambda reason: print("told", reason, flush=True))
os.abort()
"""


@pytest.mark.parametrize(("coordinator", "code"), [("gone", 1), ("there", 1)])
def test_an_abort_says_that_process_0_is_gone_and_is_told_where_it_is_not(
    coordinator: str, code: int
) -> None:
    command = [sys.executable, "-c", ABORTED, coordinator]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == code, done.stderr
    if coordinator == "gone":
        assert re.fullmatch(
            r"error: process 0 \(localhost:\d+\) failed: killed or cut off, .*\n", done.stderr
        )
        assert not done.stdout
    else:
        assert done.stdout == "told aborted by a library; its own screen has more\n"
        assert re.fullmatch(
            r"error: a library has aborted this process; .* --resume .*\n", done.stderr
        )
