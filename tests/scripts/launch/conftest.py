"""The run of two processes that every scheduler trains, and its rows from two shells."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.small_runs import write_text

ROOT = Path(__file__).resolve().parents[3]
TOOLS = Path(os.environ.get("MUPAX_SCHEDULERS", ROOT / ".cache" / "schedulers"))
"""Where `make schedulers` puts the wheels."""
STEPS = 300
TINY = (
    "lm-tiny --model.width 16 --model.depth 1 --model.num-heads 2 --model.seq-len 16 --data.batch-size 16 "
    "--data.eval-batch-size 64 --data.eval-examples 64 --optimizer.warmup-steps 2 --optimizer.schedule constant "
    f"--checkpoint.every-steps 100000 --steps {STEPS} --data.name text:text.txt --log.no-tensorboard --log.no-progress --log.no-samples "
    "--log.eval-every-steps None --distributed.heartbeat-seconds 5"
)


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a checkout with links to these packages and this environment, and a text."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("mupax", "presets", "scripts", "train", "zoo"):
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").symlink_to(sys.prefix)
    write_text(folder / "text.txt")
    return folder


@pytest.fixture(scope="session")
def environment(checkout: Path) -> dict[str, str]:
    """Variables of every run: one CPU device a process, programs compiled once for all runs."""
    return {
        **os.environ,
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1",
        "MUPAX_DATA": str(checkout / "data"),
        "JAX_COMPILATION_CACHE_DIR": str(checkout / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


@pytest.fixture(scope="session")
def whole(checkout: Path, environment: dict[str, str]) -> list[dict[str, Any]]:
    """The rows of the run that nobody disturbs."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    train = shlex.split(
        f"{sys.executable} -m train {TINY} --workdir whole --distributed.coordinator localhost:{port}"
    )
    count = ["--distributed.processes", "2", "--distributed.process"]
    running = [
        subprocess.Popen([*train, *count, index], cwd=checkout, env=environment) for index in "01"
    ]
    try:
        assert [process.wait(300) for process in running] == [0, 0]
    finally:
        for process in running:
            process.kill()
    return rows(checkout / "whole")


def rows(workdir: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl without times."""
    text = (workdir / "metrics.jsonl").read_text() if (workdir / "metrics.jsonl").exists() else ""
    metrics = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [{**row, "seconds": 0} for row in metrics if "perf_data_wait" not in row]


@pytest.fixture(scope="session")
def tool() -> Callable[[str, str], Path]:
    """Return the place of a program of `make schedulers`; skip the test if it is absent."""

    def find(name: str, inside: str = "") -> Path:
        if not (path := TOOLS / name / inside).exists():
            pytest.skip(f"{name} is not installed in {TOOLS}: `make schedulers` says why")
        return path

    return find
