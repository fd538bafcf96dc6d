"""A signal saves, ends the run, and the run goes on from there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mupax.train.parallel.signals import StopRequest
from tests.train.checkpoints.test_checkpointer import ROOT, TINY, checkpoints, folder, rows, train

__all__ = ["folder"]  # fixtures


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_the_run_goes_on(number: signal.Signals, code: int, folder: Path) -> None:
    workdir = Path(number.name)
    command = [sys.executable, "-m", "train", *TINY.split(), "--workdir", str(workdir), "--steps", "1000000"]
    command += ["--checkpoint.every-steps", "1000000", "--log.no-tensorboard"]
    environment = {
        **os.environ,
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1",
        "PYTHONPATH": str(ROOT),
    }
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            until = time.monotonic() + 200
            while not (workdir / "metrics.jsonl").exists() or not (workdir / "metrics.jsonl").stat().st_size:
                assert child.poll() is None, child.communicate()
                assert time.monotonic() < until
                time.sleep(0.05)
            child.send_signal(number)
            out, err = child.communicate(timeout=100)
        finally:
            child.kill()
    assert child.returncode == code, err
    assert "Traceback" not in err
    (step,) = checkpoints(workdir)
    assert f"stopped by {number.name} at step {step} of 1000000, saved" in " ".join(out.split())
    assert rows(workdir)[-1]["step"] == step
    # One device saved it, eight go on.
    done = train("--workdir", str(workdir), "--resume", "--steps", str(step + 2), "--resume-change", "schedule")
    assert done.code == 0, done.err
    assert f"resuming lm-tiny at step {step} of {step + 2}" in done.out
    assert [row["step"] for row in rows(workdir) if "loss" in row] == list(range(1, step + 3))


@pytest.mark.core
def test_the_first_signal_is_noted_and_the_second_stops() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        stop.defer()
        assert (stop.received, stop.exit_code) == (None, 0)
        signal.raise_signal(signal.SIGTERM)
        assert (stop.received, stop.exit_code) == (signal.SIGTERM, 143)
        with pytest.raises(SystemExit) as stopped:
            signal.raise_signal(signal.SIGINT)
        assert stopped.value.code == 130
    with StopRequest() as stop, pytest.raises(SystemExit) as stopped:  # nothing to save: the first one ends it
        signal.raise_signal(signal.SIGTERM)
    assert stopped.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before
