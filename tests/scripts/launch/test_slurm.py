"""`scripts/launch/slurm.sh` on a real SLURM: stopped, requeued, killed, and bitwise the run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.scripts.launch.conftest import ROOT, STEPS, TINY, rows
from tests.scripts.launch.slurm_cluster import Cluster, cluster

pytestmark = pytest.mark.schedulers

STOPPED = ("FAILED", "COMPLETED", "CANCELLED")


def test_a_job_is_stopped_and_requeued_and_killed_and_ends_as_if_it_had_not(
    checkout: Path, environment: dict[str, str], whole: list[dict[str, Any]], tmp_path: Path
) -> None:
    workdir = checkout / "slurm"
    with cluster(tmp_path, environment) as slurm:
        script = [
            str(ROOT / "scripts/launch/slurm.sh"),
            "--nodes",
            "2",
            "--gpus",
            "0",
            "--time",
            "10",
            "--",
        ]
        submitted = subprocess.run(
            [*script, *TINY.split(), "--workdir", "slurm"],
            cwd=checkout, env=slurm.environment, capture_output=True, text=True, check=True,
        )  # fmt: skip
        (job,) = re.findall(r"Submitted batch job (\d+)", submitted.stdout)
        log = checkout / f"mupax-lm-tiny-{job}.log"

        first = stopped(slurm, job, workdir, log, "TERM", 10)
        slurm.requeue(job)
        second = stopped(slurm, job, workdir, log, "USR1", first + 10)
        slurm.requeue(job)
        trains(slurm, job, workdir, log, second + 10)
        kill_one(workdir)
        assert slurm.wait(job, STOPPED) == "COMPLETED", log.read_text()[-3000:]
    output = log.read_text()
    assert f"resuming lm-tiny at step {first} of {STEPS}" in output
    assert (
        output.count(f"resuming lm-tiny at step {second} of {STEPS}") == 2
    )  # requeued, and after the kill
    assert rows(workdir) == whole
    attempts = [
        json.loads(line)
        for path in workdir.glob("attempts*")
        for line in path.read_text().splitlines()
    ]
    assert {row["code"] for row in attempts} >= {143, 138, 1, -9, 0}
    assert (
        "killed by SIGKILL (by a person, a scheduler or the kernel); starting again in 1 s (1 of 5)"
        in output
    )


def trains(slurm: Cluster, job: str, workdir: Path, log: Path, step: int) -> None:
    """Wait until the job has done a step."""
    deadline = time.monotonic() + 240
    while len(rows(workdir)) < step:
        assert time.monotonic() < deadline, (
            log.read_text()[-3000:] if log.exists() else slurm.state(job)
        )
        assert slurm.state(job) not in STOPPED, log.read_text()[-3000:]
        time.sleep(0.05)


def stopped(slurm: Cluster, job: str, workdir: Path, log: Path, name: str, step: int) -> int:
    """Signal the job when it has done a step; the step that it has saved."""
    trains(slurm, job, workdir, log, step)
    slurm.output("scancel", f"--signal={name}", job)
    assert slurm.wait(job, STOPPED) == "FAILED", log.read_text()[-3000:]
    (saved,) = re.findall(rf"stopped by SIG{name} at step (\d+) of {STEPS}, saved", log.read_text())
    assert max(
        int(path.name) for path in (workdir / "checkpoints").iterdir() if path.name.isdigit()
    ) == int(saved)
    return int(saved)


def kill_one(workdir: Path) -> None:
    """SIGKILL for one process of the run; its supervisor stays."""
    words = [
        (path, path.read_bytes().split(b"\0"))
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if readable(path)
    ]
    mine = [
        path
        for path, command in words
        if workdir.name.encode() in command and b"--restart" not in command
    ]
    assert len(mine) == 2, mine
    os.kill(int(mine[1].parent.name), signal.SIGKILL)


def readable(path: Path) -> bool:
    try:
        return bool(path.read_bytes())
    except OSError:  # it has ended
        return False
