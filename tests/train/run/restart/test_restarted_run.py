"""A run of two processes, one of which is killed: both end, both supervisors start again, and the run ends as if nothing had been."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[4]
WORDS = (
    "lm-tiny --model.width 16 --model.depth 1 --model.num-heads 2 --model.seq-len 16 --data.batch-size 16 "
    "--data.eval-batch-size 64 --data.eval-examples 64 --optimizer.warmup-steps 2 --checkpoint.every-steps 2 --steps 6 "
    "--data.name text:text.txt --log.no-tensorboard --log.no-progress --log.no-samples --distributed.heartbeat-seconds 3"
)
# The command line, with a window: a process is killed after its step 5, once.
DRIVER = """
import os, sys
from pathlib import Path
from mupax.train.run.runtime import Report
add, mark = Report.add, Path("killed")
def watched(self, step, metrics):
    add(self, step, metrics)
    if step == 5 and "KILL" in os.environ and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), 9)
Report.add = watched
from mupax.train.__main__ import main
if __name__ == "__main__":
    sys.exit(main())
"""


def run(folder: Path, words: str, killed: int | None = None) -> tuple[list[int], str]:
    """Exit codes and standard error of two processes of one run, of which one may be killed."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1",
        "MUPAX_DATA": str(folder / "cache"),
    }
    running = []
    with (folder / "said").open("w+") as log:
        for index in range(2):
            joined = f"--distributed.coordinator localhost:{port} --distributed.processes 2 --distributed.process {index}"
            command = [sys.executable, "-c", DRIVER, *f"{WORDS} {words} {joined}".split()]
            variables = environment | ({"KILL": "yes"} if index == killed else {})
            running.append(
                subprocess.Popen(command, cwd=folder, env=variables, stdout=log, stderr=log)
            )
        try:
            codes = [process.wait(200) for process in running]
        finally:
            for process in running:
                process.kill()
        log.seek(0)
        return codes, log.read()


def rows(workdir: Path) -> list[dict[str, Any]]:
    """Of metrics.jsonl, without times."""
    records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{**row, "seconds": 0} for row in records if "perf_data_wait" not in row]


@pytest.mark.slow
def test_a_killed_process_ends_all_and_all_go_on(tmp_path: Path) -> None:
    choose, words = (
        random.Random(0),
        ("def", "return", "import", "class", "self", "value", "lambda", "yield", "while"),
    )
    (tmp_path / "text.txt").write_text(
        "\n".join(" ".join(choose.choice(words) for _ in range(9)) for _ in range(600))
    )
    codes, output = run(tmp_path, "--workdir whole")
    assert codes == [0, 0], output
    codes, output = run(tmp_path, "--workdir killed-once --restart 3", killed=1)
    assert codes == [0, 0], output
    assert "process 1: attempt 1 ended after step" in output
    assert (
        "killed by SIGKILL (by a person, a scheduler or the kernel); starting again in 1 s (1 of 3)"
        in output
    )
    assert "process 0: attempt 1 ended after step" in output
    for name in ("attempts", "attempts-1"):
        attempts = [
            json.loads(line)
            for line in (tmp_path / "killed-once" / f"{name}.jsonl").read_text().splitlines()
        ]
        assert [row["attempt"] for row in attempts] == [1, 2]
        assert (attempts[0]["code"], attempts[1]["code"], attempts[1]["step"]) == (
            1 if name == "attempts" else -9,
            0,
            6,
        )
        assert attempts[1]["start"] > 0  # from a checkpoint
    assert rows(tmp_path / "killed-once") == rows(tmp_path / "whole")
