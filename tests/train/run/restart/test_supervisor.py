"""Runs that a supervisor starts again or not, and its words and records of each attempt."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mupax.train.config import cli
from mupax.train.config.recipes import RECIPES
from mupax.train.run.restart import supervisor

ROOT = Path(__file__).resolve().parents[4]

# A supervisor never has JAX beside it; a test may.
pytestmark = [
    pytest.mark.core,
    pytest.mark.filterwarnings("ignore:.*fork\\(\\):RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.*fork\\(\\):DeprecationWarning"),
]

# A run that does what a line of the file `plan` says: reaches a step, says something, and ends with a code or by a signal.
RUN = """
import os, signal, sys, time
from pathlib import Path
from mupax.train.run.restart import memory
step, said, code, *_ = Path("plan").read_text().splitlines()[(number := len(list(Path().glob("words-*"))))].split("|")
Path(f"words-{number}").write_text(" ".join(sys.argv[1:]))
if step == "refused":
    sys.exit(print(said, file=sys.stderr) or int(code))
attempt = memory.of_this_process(0, 1)
assert memory.VARIABLE not in os.environ
if int(step) >= 0:
    attempt.note(start=0, step=int(step))
print(said, file=sys.stderr, flush=True)
if code == "wait":
    for name in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(name, lambda number, frame: (Path("heard").write_text(str(number)), os._exit(128 + number)))
    Path("ready").touch()
    time.sleep(60)
elif int(code) < 0:
    os.kill(os.getpid(), -int(code))
sys.exit(int(code))
"""
# What `python -m train` does with --restart.
PARENT = """
import sys
from mupax.train.config import cli
from mupax.train.config.recipes import RECIPES
from mupax.train.run.restart import supervisor
sys.orig_argv[1:] = ["run.py", *sys.argv[1:]]
words = sys.argv[1:]
code = supervisor.run(cli.parse(words[0], RECIPES[words[0]], words[1:]).config, words, 2)
assert "jax" not in sys.modules
sys.exit(code)
"""
WORDS = ["vit-digits", "--workdir", "run", "--restart", "3"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(supervisor, "_MAX_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "run.py", *WORDS])
    (tmp_path / "run").mkdir()
    (tmp_path / "run.py").write_text(RUN)
    return tmp_path


def supervised(*plan: str, most: int = 3) -> int:
    Path("plan").write_text("\n".join(plan))
    return supervisor.run(cli.parse(WORDS[0], RECIPES[WORDS[0]], WORDS[1:]).config, WORDS, most)


def rows() -> list[dict[str, object]]:
    return [json.loads(line) for line in Path("run/attempts.jsonl").read_text().splitlines()]


def started() -> list[str]:
    return [path.read_text() for path in sorted(Path().glob("words-*"))]


def test_a_crash_is_followed_by_another_attempt_from_the_newest_checkpoint(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert supervised("7|so far so good|-9", "20|error: no memory|1", "30||0") == 0
    assert started() == ["vit-digits --workdir run", *["vit-digits --workdir run --resume"] * 2]
    assert [(row["attempt"], row["code"], row["step"], row["last"]) for row in rows()] == [
        (1, -9, 7, "so far so good"),
        (2, 1, 20, "error: no memory"),
        (3, 0, 30, ""),
    ]
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "so far so good"
    assert lines[1].startswith("attempt 1 ended after step 7 and 0:00:0")
    killer = "killed by SIGKILL (by a person, a scheduler or the kernel)"
    assert f"{killer}; starting again in 0 s (1 of 3)" in lines[1]
    assert lines[2] == "error: no memory"
    assert lines[3].endswith("exit code 1; starting again in 0 s (2 of 3)")


@pytest.mark.parametrize(
    ("plan", "code", "message"),
    [
        (
            ["7||1", "9||-11"],
            139,
            "killed by SIGSEGV (a segmentation fault); attempt 1 ended there too, so it is not",
        ),
        (["-1|x|1", "-1|x|1"], 1, "ended before its first step and"),
        (
            ["1||1", "5||1", "9||1", "20||1"],
            1,
            "--restart 3 allows no other; see attempts.jsonl in the workdir",
        ),
    ],
)
def test_it_stops_where_the_same_step_fails_twice_or_no_attempt_is_left(
    plan: list[str], code: int, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert supervised(*plan, "30||0") == code
    assert len(started()) == len(plan)
    assert message in capfd.readouterr().err.splitlines()[-1]


def test_another_failure_before_the_first_step_is_another_failure() -> None:
    assert supervised("-1|the disk is away|1", "-1|the disk is here and slow|1", "30||0") == 0


@pytest.mark.parametrize("code", [0, 2, 129, 130, 138, 143])
def test_what_asks_for_nothing_more_is_not_started_again(code: int) -> None:
    assert supervised(f"7||{code}", "30||0") == code
    assert len(started()) == 1
    assert Path("run/attempts.jsonl").exists() == (
        code != 2
    )  # a folder that was refused may be another run's


def test_a_folder_that_was_refused_is_neither_written_nor_gone_on_in() -> None:
    """One process of several that has bad input ends all of them with 1."""
    assert supervised("refused|error: not empty|1", "refused|error: not empty|1", "30||0") == 1
    assert started() == ["vit-digits --workdir run"] * 2
    assert not Path("run/attempts.jsonl").exists()
    assert supervised("", "", "refused|the network is away|1", "30||0") == 0
    assert started()[2:] == ["vit-digits --workdir run"] * 2


def test_a_kill_for_memory_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    counts = iter((3, 4, 4, 4))
    monkeypatch.setattr(supervisor, "_kills_for_memory", lambda: next(counts))
    assert supervised("7||-9", "30||-9", most=1) == 137
    err = capfd.readouterr().err
    assert "attempt 1 ended after step 7" in err
    assert err.count("killed by SIGKILL (out of memory)") == 1


def test_an_unwritable_file_of_attempts_ends_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    Path("run/attempts.jsonl").mkdir()
    assert supervised("7||1", "30||0") == 0
    assert "caution: attempts.jsonl is not written or read" in capfd.readouterr().err


def parent(folder: Path) -> subprocess.Popen[bytes]:
    """A supervisor whose run waits for a signal."""
    Path("plan").write_text("7||wait\n9||0")
    command = [sys.executable, "-c", PARENT, *WORDS[:3]]
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while not (folder / "ready").exists():
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.02)
    return process


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_is_passed_on_and_nothing_starts_again(
    number: signal.Signals, folder: Path
) -> None:
    process = parent(folder)
    process.send_signal(number)
    assert process.wait(20) == 128 + number
    assert (Path("heard").read_text(), len(started())) == (str(int(number)), 1)


SAVING = """
import signal, time
signal.signal(signal.SIGTERM, lambda number, frame: None)
until = time.monotonic() + 4
while time.monotonic() < until:  # a signal would cut a single sleep
    time.sleep(0.1)
raise SystemExit(143)
"""


@pytest.mark.parametrize(("count", "code"), [(2, 143), (3, -signal.SIGKILL)])
def test_a_run_that_saves_is_killed_after_three_signals_and_not_two(
    count: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_KILL_SECONDS", 0.2)

    def insist() -> None:
        time.sleep(1)
        for _ in range(count):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)

    with supervisor.Listener() as listener:
        sender = threading.Thread(target=insist)
        sender.start()
        attempt = supervisor.attempt(1, [sys.executable, "-c", SAVING], listener)
        sender.join()
    assert attempt.code == code


@pytest.mark.skipif(
    sys.platform != "linux", reason="the kernel says that a parent has died on Linux alone"
)
def test_a_run_whose_supervisor_is_killed_is_told_to_stop(folder: Path) -> None:
    process = parent(folder)
    process.kill()
    process.wait(20)
    until = time.monotonic() + 20
    while not (Path("heard").exists() and Path("heard").read_text()):
        assert time.monotonic() < until
        time.sleep(0.02)
    assert Path("heard").read_text() == str(int(signal.SIGTERM))
