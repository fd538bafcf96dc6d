"""A signal saves, ends the run, and the run goes on from there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mupax.train.parallel.processes import StopRequest
from mupax.train.run.restart.supervisor import Listener
from tests.fixtures.programs import shared_programs
from tests.fixtures.small_runs import RUN, checkpoints, completed, folder, rows

__all__ = ["folder", "shared_programs"]  # fixtures

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_saves_and_the_run_goes_on(
    number: signal.Signals, code: int, folder: Path
) -> None:
    """SIGHUP as a closed ssh session sends it: the terminal is gone, and whatever is written to it fails."""
    workdir = Path(number.name)
    endless = "--steps 1000000 --checkpoint.every-steps 1000000 --log.no-tensorboard --resume"
    words = f"train {RUN} {endless} --workdir {workdir}"
    environment = {
        **os.environ,
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", *words.split()]
    file = workdir / "metrics.jsonl"
    terminal, inside = os.openpty()
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    if number == signal.SIGHUP:
        streams = {"stdin": inside, "stdout": inside, "stderr": inside, "start_new_session": True}
    with subprocess.Popen(command, env=environment, **streams) as child:
        try:
            until = time.monotonic() + 200
            while not file.exists() or not file.stat().st_size:
                assert child.poll() is None, child.communicate()
                assert time.monotonic() < until
                time.sleep(0.05)
            os.close(inside)
            os.close(terminal)
            child.send_signal(number)
            out, err = child.communicate(timeout=100)
        finally:
            child.kill()
    assert child.returncode == code, err
    (step,) = checkpoints(workdir)
    if number == signal.SIGTERM:
        assert "Traceback" not in err
        message = f"stopped by {number.name} at step {step} of 1000000, saved"
        assert f"{message}; the same command goes on" in " ".join(out.split())
    assert rows(workdir)[-1]["step"] == step
    # One device saved it, eight go on.
    resume = f"--workdir {workdir} --resume --resume-change schedule"
    done = completed(resume, f"--steps {step + 2}")
    assert f"resuming lm-tiny at step {step} of {step + 2}" in done.out
    assert [row["step"] for row in rows(workdir) if "loss" in row] == list(range(1, step + 3))


# What is no exception: one raised inside XLA ends the process with a segmentation fault, and orbax makes an error of it.
LISTEN = """
import os, signal, sys, time
from mupax.train.parallel.processes import StopRequest
def listen(words):
    if "notebook" in words:
        sys.ps1 = "In : "
    with StopRequest() as stop:
        if "defer" in words:
            stop.defer()
        if "deferred" in words:  # what a study does between the points that it trains
            with stop.deferring():
                pass
        try:
            for word in words:
                if word.startswith("SIG"):
                    time.sleep(0.4 if "apart" in words else 0)
                    os.kill(os.getpid(), signal.Signals[word])
            time.sleep(1.5)  # what the main thread is at
        except BaseException as error:
            print("raised", type(error).__name__, end=" ")
        print("saved")
    sys.exit(stop.exit_code)
"""
IN_FORKS = """
def fork(number, line):
    pid = os.fork()
    if not pid:
        for stream in (1, 2):
            os.dup2(os.open(f"{number}.{stream}", os.O_WRONLY | os.O_CREAT), stream)
        listen(line.split())
    return pid
pids = [fork(number, line) for number, line in enumerate(sys.argv[1:])]
print(*[os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids])
"""
"""Every case is a process of its own, and they wait at the same time."""
LISTENED = [
    ("defer SIGTERM", 143, "saved", ""),
    ("defer SIGHUP SIGHUP apart", 129, "saved", ""),  # of the terminal and of the shell in it
    ("defer SIGUSR1 SIGTERM apart", 138, "saved", ""),
    ("defer SIGTERM SIGTERM", 143, "saved", ""),  # as `timeout` sends them
    ("defer SIGTERM SIGINT apart", 143, "saved", "SIGINT again: the run ends once it is saved; a third signal ends it at once"),
    ("defer SIGTERM SIGTERM apart", 143, "saved", "SIGTERM again: the run ends once it is saved"),
    ("defer SIGTERM SIGINT SIGTERM apart", 143, "", "SIGINT again: the run ends once it is saved"),
    ("notebook defer SIGINT SIGINT apart", 130, "saved", ""),
    ("notebook defer SIGINT SIGINT SIGINT apart", 130, "raised KeyboardInterrupt saved", ""),
    ("SIGTERM", 143, "", "stopped by SIGTERM with nothing to save: checkpoints are as they were"),
    ("notebook defer SIGINT", 130, "saved", ""),
    ("notebook SIGINT", 0, "raised KeyboardInterrupt saved", ""),
    ("deferred SIGINT", 130, "", "stopped by SIGINT with nothing to save: checkpoints are as they were"),
    ("SIGHUP", 129, "", "stopped by SIGHUP with nothing to save: checkpoints are as they were"),
]  # fmt: skip


@pytest.fixture(scope="module")
def listened(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str]]:
    """Words of each case to the exit code and both outputs."""
    folder = tmp_path_factory.mktemp("listened")
    lines = [words for words, *_ in LISTENED]
    done = subprocess.run(
        [sys.executable, "-c", LISTEN + IN_FORKS, *lines],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    ended: dict[str, tuple[int, str, str]] = {}
    for number, (line, code) in enumerate(zip(lines, done.stdout.split(), strict=True)):
        out, err = [(folder / f"{number}.{stream}").read_text() for stream in (1, 2)]
        ended[line] = int(code), out.strip(), err
    return ended


@pytest.mark.core
@pytest.mark.parametrize(("words", "code", "out", "err"), LISTENED)
def test_two_signals_are_noted_and_a_third_one_ends_at_once(
    words: str, code: int, out: str, err: str, listened: dict[str, tuple[int, str, str]]
) -> None:
    returncode, stdout, stderr = listened[words]
    assert (returncode, stdout) == (code, out), stderr
    assert stderr.startswith(err)
    is_cut = "at once by one more SIGTERM: what was being saved is lost, earlier" in stderr
    assert is_cut == (words == "defer SIGTERM SIGINT SIGTERM apart")
    assert len(stderr.splitlines()) == bool(err) + is_cut


def test_a_third_signal_ends_a_run_whose_output_nobody_reads() -> None:
    """Ctrl-C in `mupax train ... 2>&1 | tee log` ends tee, so that the line on the second fails."""
    words = ["defer", "SIGINT", "SIGINT", "SIGINT", "apart"]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"{LISTEN}listen(sys.argv)", *words],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=writer,
            timeout=60,
            check=False,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stdout) == (130, b"")


def test_a_signal_while_xla_compiles_ends_the_process_at_once() -> None:
    program = """
import jax, jax.numpy as jnp
from mupax.train.parallel.processes import StopRequest
def deep(x):
    for i in range(300):
        x = jnp.tanh(x @ x.T) + jnp.sin(x * i)
    return x
with StopRequest():
    lowered = jax.jit(deep).lower(jnp.ones((9, 9)))
    print("compiling", flush=True)
    lowered.compile()  # for seconds
    print("compiled")
"""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, **pipes) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "compiling\n"
        time.sleep(0.2)
        child.send_signal(signal.SIGTERM)
        out, err = child.communicate(timeout=60)
    assert (child.returncode, out) == (143, "")
    assert err == "stopped by SIGTERM with nothing to save: checkpoints are as they were\n"


@pytest.mark.core
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_what_nohup_or_a_background_job_ignores_stays_ignored(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with StopRequest():
            assert signal.getsignal(number) == signal.SIG_IGN
        with Listener() as listener:
            assert signal.getsignal(number) == signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) == listener._handle
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)


@pytest.mark.core
def test_handlers_are_those_from_before() -> None:
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` does
    with StopRequest() as stop:
        assert signal.getsignal(signal.SIGTERM) == stop._note
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    signal.signal(signal.SIGHUP, before[1])
    assert [signal.getsignal(number) for number in numbers] == before
