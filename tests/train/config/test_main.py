"""How a command line ends: exit codes, whole processes, signals, and no heavy import on the way."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import types

import pytest

from mupax import MupaxError, MupaxFailure
from mupax.__main__ import main
from mupax.presets import PresetError
from mupax.train import run as train_run
from mupax.train.config.run import Config
from tests.fixtures.calls import calls_of_process
from tests.fixtures.command_line import HEAVY, Capture, started

__all__ = ["started"]  # fixture

pytestmark = pytest.mark.core


# Exit codes


@pytest.mark.parametrize(
    ("error", "code", "traced"),
    [
        (MupaxError("write 8 instead"), 2, False),
        (PresetError("write 8 instead"), 2, False),
        (MupaxError("\n".join(["write 8 instead"] * 40)), 2, False),
        (MupaxFailure("the disk is full"), 1, False),
        (ValueError("shapes differ"), 1, True),
        (RuntimeError("no memory"), 1, True),
        (KeyboardInterrupt(), 130, False),
        (SystemExit(143), 143, False),
        (SystemExit("stopped"), 1, False),
    ],
)
def test_exit_codes(
    error: BaseException,
    code: int,
    traced: bool,
    monkeypatch: pytest.MonkeyPatch,
    started: list[Config],
    capsys: Capture,
) -> None:
    def run(config: Config) -> int:
        raise error

    monkeypatch.setattr(sys.modules["mupax.train.run.loop"], "run", run)
    assert main(["train", "lm-tiny"]) == code
    err = capsys.readouterr().err
    assert ("Traceback" in err) == traced
    if code == 2:
        assert err.startswith("error: write 8 instead")
        assert len(err.splitlines()) <= 10


def test_the_code_of_a_run_is_passed_on(
    monkeypatch: pytest.MonkeyPatch, started: list[Config]
) -> None:
    monkeypatch.setattr(sys.modules["mupax.train.run.loop"], "run", lambda config: 1)
    assert main(["train", "lm-tiny"]) == 1


def test_dry_run_starts_no_run(monkeypatch: pytest.MonkeyPatch, started: list[Config]) -> None:
    configs: list[Config] = []
    dryrun = types.SimpleNamespace(run=lambda config, published_use: configs.append(config) or 0)
    monkeypatch.setitem(sys.modules, "mupax.train.run.dry_run", dryrun)
    monkeypatch.setattr(train_run, "dry_run", dryrun, raising=False)
    assert main(["train", "vit-digits", "--dry-run", "--steps", "7"]) == 0
    assert [config.steps for config in configs] == [7]
    assert not started


# Whole processes


@pytest.mark.parametrize(
    ("flag", "code"), [("--help", 0), ("--print-config", 0), ("--optimizer.peak-lrr=1", 2)]
)
def test_answers_come_at_once_and_import_nothing_heavy(flag: str, code: int) -> None:
    command = [sys.executable, "-m", "train", "lm-tiny", flag]
    assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == code
    count, modules = calls_of_process(
        f"from mupax.train.__main__ import main; main(['lm-tiny', {flag!r}])"
    )
    assert not modules & set(HEAVY)
    # An idle core makes 700,000 calls in 0.5 s. --help makes 610,000; --print-config 96,000 on
    # Python 3.13. A process whose calls were not counted makes fewer than 1,000.
    assert 10_000 < count < 700_000


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_the_run_with_its_code(number: signal.Signals, code: int) -> None:
    # The children of a shell's background job ignore SIGINT.
    program = """
import signal, sys, time, types
import mupax.train.run
signal.signal(signal.SIGINT, signal.default_int_handler)
def run(config):
    try:
        print("running", flush=True)
        time.sleep(60)
    finally:
        print("left in order", flush=True)
mupax.train.run.loop = sys.modules["mupax.train.run.loop"] = types.SimpleNamespace(run=run)
from mupax.train.__main__ import main
sys.argv[1:] = ["lm-tiny"]
sys.exit(main())
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "running\n"
        child.send_signal(number)
        out, err = child.communicate(timeout=30)
    assert child.returncode == code
    assert out == "left in order\n"
    assert "Traceback" not in err


def test_a_process_whose_command_is_done_ends_though_a_thread_of_a_library_does_not() -> None:
    program = """
import threading, time
from mupax import terminal
terminal._EXIT_S = 0.5
threading.Thread(target=time.sleep, args=(60,)).start()
main = terminal.entry_point(lambda argv: print("done", end="") or 3)
raise SystemExit(main())
"""
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "done", "")
    assert time.perf_counter() - began < 20


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m train lm-tiny --help | head -n 1"
    done = subprocess.run(
        command, shell=True, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith("usage: mupax train lm-tiny")
    assert not done.stderr
