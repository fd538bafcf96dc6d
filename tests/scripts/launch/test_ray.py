"""`scripts/launch/ray_train.py` on a local Ray: one of two workers is lost and restarted."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.scripts.launch.conftest import TINY, rows

pytestmark = pytest.mark.schedulers

SHORT = 20
# In every process of the run: process 1 is killed after its step 16, once. When 15 is being saved, 10 is there.
KILL = """
import os, sys
from pathlib import Path
if "mupax.train" in sys.orig_argv and sys.orig_argv[-1] == "1" and not Path({mark!r}).exists():
    import mupax.train.run.runtime as runtime
    add = runtime.Report.add
    def watched(self, step, metrics):
        add(self, step, metrics)
        if step == 16:
            Path({mark!r}).touch()
            os.kill(os.getpid(), 9)
    runtime.Report.add = watched
"""


def ray(checkout: Path, environment: dict[str, str], packages: Path, words: str, *more: str) -> Any:
    variables = {
        **environment,
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": os.pathsep.join([*more, str(packages)]),
    }
    command = [
        sys.executable,
        str(checkout / "scripts/launch/ray_train.py"),
        "--workers",
        "2",
        "--",
        *words.split(),
    ]
    return subprocess.run(
        command, cwd=checkout, env=variables, capture_output=True, text=True, timeout=300
    )


def test_two_workers_train_and_a_lost_one_is_started_again(
    checkout: Path,
    environment: dict[str, str],
    whole: list[dict[str, Any]],
    tool: Callable[..., Path],
    tmp_path: Path,
) -> None:
    packages = tool("ray")
    (tmp_path / "sitecustomize.py").write_text(KILL.format(mark=str(tmp_path / "killed")))
    words = TINY.replace("text.txt", str(checkout / "text.txt")).replace(
        "every-steps 100000", "every-steps 5"
    )
    words += f" --steps {SHORT} --workdir {checkout / 'ray'}"
    done = ray(checkout, environment, packages, words, str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    assert (tmp_path / "killed").exists()
    assert re.search(r"resuming lm-tiny at step 1[05] of 20", done.stdout)
    trained = [row for row in rows(checkout / "ray") if "loss" in row]
    assert len(trained) == SHORT
    assert trained == whole[:SHORT]


def test_bad_input_starts_no_worker(
    checkout: Path, environment: dict[str, str], tool: Callable[..., Path]
) -> None:
    done = ray(checkout, environment, tool("ray"), "lm-tiny --no-such-flag")
    assert done.returncode == 2, done.stderr
    assert "error: no flag is named --no-such-flag" in done.stderr
    assert "Started a local Ray instance" not in done.stderr
