"""A run whose workdir is a bucket, as a user starts it: killed, resumed, and read by every other command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mupax.__main__ import main
from mupax.disk import path_of
from mupax.train import load
from mupax.train.checkpoints import saved_run
from mupax.train.checkpoints.folder import verified
from mupax.train.checkpoints.layout import counts
from mupax.train.reuse import trained
from mupax.train.run.report import metrics
from scripts.campaigns.injection.emulator import new_bucket
from tests.fixtures.emulator import emulator
from tests.fixtures.programs import shared_programs
from tests.train.checkpoints.test_checkpointer import STEPS, TINY, Done, folder, rows, train

__all__ = ["emulator", "folder", "shared_programs"]  # fixtures
Capture = pytest.CaptureFixture[str]

KILLED = """
import os, signal, sys
from mupax.train.__main__ import main
from mupax.train.checkpoints import layout

write = layout.write
def killed_between_arrays_and_manifest(folder, content):
    os.kill(os.getpid(), signal.SIGKILL) if content.step == 4 else write(folder, content)

layout.write = killed_between_arrays_and_manifest
main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def address(emulator: str) -> str:
    return f"gs://{new_bucket(emulator)}/run"


@pytest.fixture(scope="module")
def resumed(address: str, folder: Path) -> Done:
    """The second part of a run in a bucket that was killed between the arrays and the manifest of step 4."""
    assert train("--workdir", "whole").code == 0
    root, path = Path(__file__).resolve().parents[4], os.environ.get("PYTHONPATH", "")
    environ = {**os.environ, "PYTHONPATH": f"{root}:{path}"}
    command = [
        sys.executable,
        "-c",
        KILLED,
        *TINY.split(),
        "--steps",
        str(STEPS),
        "--workdir",
        address,
    ]
    died = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert died.returncode == -signal.SIGKILL, died.stderr[-2000:]
    workdir = path_of(address)
    assert counts(workdir / "checkpoints" / "2")
    assert {path.name for path in (workdir / "checkpoints").iterdir()} == {"2", "4", "4.saving"}
    written = metrics.read(workdir / "metrics.jsonl")
    assert max(row["step"] for row in written) >= 4, "rows come before a checkpoint"
    refused = train("--workdir", address)
    assert (refused.code, "is not empty; add --resume" in refused.err) == (2, True)
    return train("--workdir", address, "--resume")


def test_a_run_killed_before_a_manifest_ends_as_the_one_on_a_disk(
    resumed: Done, address: str
) -> None:
    assert resumed.code == 0, resumed.err
    assert f"which held {address}, has ended; its lock is taken over" in resumed.err
    assert f"resuming lm-tiny at step 2 of {STEPS}" in resumed.out
    assert f"{address}/metrics.jsonl" in resumed.out.replace("\n", "")
    workdir = path_of(address)
    assert rows(workdir) == rows("whole")
    left = {path.name for path in workdir.iterdir()}
    assert left == {
        "assets",
        "checkpoints",
        "config.json",
        "loss.png",
        "metrics.jsonl",
        "tensorboard",
    }
    one, other = (
        verified(place / "checkpoints" / str(STEPS)) for place in (workdir, Path("whole"))
    )
    assert one.arrays == other.arrays


def test_the_other_commands_read_it(resumed: Done, address: str, capsys: Capture) -> None:
    assert main(["checkpoints", address, "--verify"]) == 0
    assert capsys.readouterr().out.count("good, every bit") == 2
    for place, name in ((address, "there.json"), ("whole", "here.json")):
        assert main(["eval", place, "--json", name]) == 0
    there, here = (json.loads(Path(name).read_text()) for name in ("there.json", "here.json"))
    assert (there["loss"], there["accuracy"]) == (here["loss"], here["accuracy"])
    capsys.readouterr()
    assert main(["generate", address, "--prompt", "def ", "--tokens", "3", "--step", "6"]) == 0
    assert f"step 6 of {address}" in capsys.readouterr().err
    assert load(address, step=6).step == 6
    assert (
        main(["train", "--resume", "--workdir", address]) == 0
    )  # recipe and config are read there
    assert f"resuming lm-tiny at step {STEPS} of {STEPS}" in capsys.readouterr().out


def test_its_parameters_start_another_run(resumed: Done, address: str) -> None:
    done = train("--init-from", address, "--workdir", f"{address}-tuned", "--log.no-tensorboard")
    assert done.code == 0, done.err
    assert f"starting from {address}/checkpoints/{STEPS}" in done.out.replace("\n", "")
    recorded = json.loads((path_of(f"{address}-tuned") / "config.json").read_bytes())
    assert recorded["config"]["init"]["init_from"] == f"{address}/checkpoints/{STEPS}"


def test_its_state_is_carried_into_another_form(
    resumed: Done, address: str, capsys: Capture
) -> None:
    assert main(["convert", address, "--form", "plain", "--out", f"{address}-plain"]) == 0
    assert saved_run.find(path_of(f"{address}-plain")).step == STEPS
    assert main(["convert", address, "--form", "plain", "--out", f"{address}-plain"]) == 2
    assert f"--out {address}-plain is complete" in capsys.readouterr().err


def test_weights_go_out_and_come_in(resumed: Done, address: str) -> None:
    grown = ["grow", address, "--set", "depth=2", "--out", f"{address}-grown"]
    assert main(grown) == 0
    run = saved_run.find(path_of(f"{address}-grown"))
    assert (run.step, run.config.model.depth) == (STEPS, 2)
    assert main(["export", address, "--out", f"{address}-exported"]) == 0
    assert (
        main(["import", f"{address}-exported", "--preset", "sp", "--out", f"{address}-imported"])
        == 0
    )
    one, other = (trained.read(path_of(f"{address}{end}")).params for end in ("", "-imported"))
    assert all(np.allclose(one[name], other[name], rtol=1e-6) for name in one)


def test_multiples_stay_in_a_bucket_when_the_run_goes_on_without_the_flag(
    emulator: str, folder: Path
) -> None:
    address = f"gs://{new_bucket(emulator)}/every"
    words = ("--workdir", address, "--checkpoint.keep", "1", "--checkpoint.every-steps", "1")
    done = train(*words, "--steps", "4", "--checkpoint.keep-every", "2")
    assert done.code == 0, done.err
    done = train(*words, "--steps", "6", "--resume", "--resume-change", "schedule")
    assert done.code == 0, done.err
    saved = {path.name for path in (path_of(address) / "checkpoints").iterdir()}
    assert saved == {"2", "4", "6"}, "4 of the first part, 6 as the newest"
    assert train(*words, "--steps", "7", "--resume", "--resume-change", "schedule").code == 0
    saved = {path.name for path in (path_of(address) / "checkpoints").iterdir()}
    assert saved == {"2", "4", "7"}
