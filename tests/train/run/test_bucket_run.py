"""A run whose workdir is a bucket, as a user starts it: killed, resumed, read by the other commands."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from mupax.paths import path_of
from mupax.train.checkpoints.folder import verified
from mupax.train.checkpoints.layout import counts
from mupax.train.run.report import metrics
from tests.emulator import bucket, emulator
from tests.train.checkpoints.test_checkpointer import STEPS, TINY, folder, rows, train

__all__ = ["bucket", "emulator", "folder"]  # fixtures

KILLED = """
import os, signal, sys
from mupax.train.__main__ import main
from mupax.train.checkpoints import manifest

write = manifest.write
def killed_between_arrays_and_manifest(folder, content):
    os.kill(os.getpid(), signal.SIGKILL) if content.step == 4 else write(folder, content)

manifest.write = killed_between_arrays_and_manifest
main(sys.argv[1:])
"""


def test_a_run_in_a_bucket_killed_before_a_manifest_ends_as_the_one_on_a_disk(bucket: str, folder: Path) -> None:
    assert train("--workdir", "whole").code == 0
    root, path = Path(__file__).resolve().parents[3], os.environ.get("PYTHONPATH", "")
    environ = {**os.environ, "PYTHONPATH": f"{root}:{path}"}
    command = [sys.executable, "-c", KILLED, *TINY.split(), "--steps", str(STEPS), "--workdir", f"{bucket}/run"]
    died = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr[-2000:]
    workdir = path_of(f"{bucket}/run")
    assert counts(workdir / "checkpoints" / "2")
    assert {path.name for path in (workdir / "checkpoints").iterdir()} == {"2", "4", "4.saving"}
    assert max(row["step"] for row in metrics.read(workdir / "metrics.jsonl")) >= 4, "rows come before a checkpoint"

    refused = train("--workdir", f"{bucket}/run")
    assert (refused.code, "is not empty; add --resume" in refused.err) == (2, True)
    done = train("--workdir", f"{bucket}/run", "--resume")
    assert done.code == 0, done.err
    assert f"resuming lm-tiny at step 2 of {STEPS}" in done.out
    assert f"{bucket}/run/metrics.jsonl" in done.out.replace("\n", "")
    assert rows(workdir) == rows("whole")
    assert {path.name for path in workdir.iterdir()} >= {
        "checkpoints",
        "config.json",
        "loss.png",
        "metrics.jsonl",
        "tensorboard",
    }
    one, other = (verified(place / "checkpoints" / str(STEPS)) for place in (workdir, Path("whole")))
    assert one.arrays == other.arrays
