"""A run whose workdir is a bucket: killed, resumed, and read by every other command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mupax.disk import path_of
from mupax.train import load
from mupax.train.checkpoints import saved_run
from mupax.train.checkpoints.folder import verified
from mupax.train.checkpoints.layout import counts
from mupax.train.reuse import trained
from mupax.train.run.report import metrics
from scripts.campaigns.injection.emulator import new_bucket
from tests.fixtures.commands import Done, command, refusal, succeeded
from tests.fixtures.emulator import emulator
from tests.fixtures.programs import shared_programs
from tests.fixtures.small_runs import (
    RUN,
    STEPS,
    completed,
    finished_run,
    folder,
    refused,
    rows,
    train,
    untrained,
    whole,
)

__all__ = [  # fixtures
    "emulator",
    "finished_run",
    "folder",
    "shared_programs",
    "untrained",
    "whole",
]

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

EVERY = "--checkpoint.keep-every 2"


@pytest.fixture(scope="module")
def address(emulator: str) -> str:
    return f"gs://{new_bucket(emulator)}/run"


@pytest.fixture(scope="module")
def resumed(address: str, whole: Done) -> Done:
    """The second part of a run in a bucket that was killed between the arrays and the manifest of step 4.

    The first part alone was asked to keep every second checkpoint.
    """
    root = Path(__file__).resolve().parents[4]
    path = f"{root}:{os.environ.get('PYTHONPATH', '')}"
    died = subprocess.run(
        [sys.executable, "-c", KILLED, *RUN.split(), *EVERY.split(), "--workdir", address],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert died.returncode == -signal.SIGKILL, died.stderr[-2000:]
    workdir = path_of(address)
    assert counts(workdir / "checkpoints" / "2")
    assert saved(address) == {"2", "4", "4.saving"}
    written = metrics.read(workdir / "metrics.jsonl")
    assert max(row["step"] for row in written) >= 4, "rows come before a checkpoint"
    assert "is not empty; add --resume" in refused("--workdir", address, EVERY)
    return train(f"--workdir {address} --resume")


def saved(address: str) -> set[str]:
    return {path.name for path in (path_of(address) / "checkpoints").iterdir()}


def test_a_run_killed_before_a_manifest_ends_as_the_one_on_a_disk(
    resumed: Done, address: str
) -> None:
    assert resumed.code == 0, resumed.err
    assert f"which held {address}, has ended; its lock is taken over" in resumed.err
    assert f"resuming lm-tiny at step 2 of {STEPS}" in resumed.out
    assert f"{address}/metrics.jsonl" in resumed.out.replace("\n", "")
    assert f"{address}/config.json" in resumed.out.replace("\n", "")
    workdir = path_of(address)
    assert rows(workdir) == rows("whole")
    left = {path.name for path in workdir.iterdir()}
    files = {"config.json", "loss.png", "metrics.jsonl"}
    assert left == {"assets", "checkpoints", "tensorboard", *files}
    in_bucket = verified(workdir / "checkpoints" / str(STEPS))
    on_disk = verified(Path("whole", "checkpoints", str(STEPS)))
    assert in_bucket.arrays == on_disk.arrays


def test_multiples_stay_in_a_bucket_when_the_run_goes_on_without_the_flag(
    resumed: Done, address: str
) -> None:
    assert "changed since: checkpoint.keep_every 2 -> None" in resumed.text
    assert saved(address) == {"2", "6", str(STEPS)}, "2 of the first part, 4 of the second is gone"


def test_the_other_commands_read_it(resumed: Done, address: str) -> None:
    checked = succeeded(f"checkpoints {address} --verify")
    assert checked.out.count("good, every bit") == 3
    scores: list[tuple[float, float]] = []
    for workdir in (address, "whole"):
        succeeded(f"eval {workdir} --json scores.json")
        record = json.loads(Path("scores.json").read_text())
        scores.append((record["loss"], record["accuracy"]))
    assert scores[0] == scores[1]
    generated = succeeded(f"generate {address} --prompt 'def ' --tokens 3 --step 6")
    assert f"step 6 of {address}" in generated.err
    assert load(address, step=6).step == 6


def test_it_goes_on_by_its_address_and_its_parameters_start_another_run(
    resumed: Done, address: str, untrained: list
) -> None:
    done = command(f"train --resume --workdir {address}")  # recipe and config are read there
    assert done.code == 0
    assert f"resuming lm-tiny at step {STEPS} of {STEPS}" in done.out
    done = completed(f"--init-from {address} --workdir {address}-tuned")
    assert f"starting from {address}/checkpoints/{STEPS}" in done.out.replace("\n", "")
    recorded = json.loads((path_of(f"{address}-tuned") / "config.json").read_bytes())
    assert recorded["config"]["init"]["init_from"] == f"{address}/checkpoints/{STEPS}"


def test_its_state_is_carried_into_another_form(resumed: Done, address: str) -> None:
    words = f"convert {address} --form plain --out {address}-plain"
    succeeded(words)
    assert saved_run.find(path_of(f"{address}-plain")).step == STEPS
    assert f"--out {address}-plain is complete" in refusal(words)


def test_weights_go_out_and_come_in(resumed: Done, address: str) -> None:
    succeeded(f"grow {address} --set depth=2 --out {address}-grown")
    run = saved_run.find(path_of(f"{address}-grown"))
    assert run.step == STEPS
    assert run.config.model.sizes()["layers"] == 2
    succeeded(f"export {address} --out {address}-exported")
    words = f"import {address}-exported --preset sp --out {address}-imported"
    succeeded(words)
    params = trained.read(path_of(address)).params
    imported = trained.read(path_of(f"{address}-imported")).params
    assert all(np.allclose(params[name], imported[name], rtol=1e-6) for name in params)
