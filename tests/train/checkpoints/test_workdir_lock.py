"""One run at a time on a workdir, and none kept out by what it left when it was killed in its first moments."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from mupax.disk import path_of
from mupax.train.checkpoints import lock, workdir
from mupax.train.checkpoints.workdir import WorkdirError, locked
from mupax.train.config.recipes import RECIPES
from mupax.train.parallel.processes import Processes
from tests.fixtures.emulator import bucket, emulator

__all__ = ["bucket", "emulator"]  # fixtures
Capture = pytest.CaptureFixture[str]


@pytest.mark.core
def test_a_second_run_on_a_workdir_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from mupax.train.parallel.processes import Processes; "
        "from mupax.train.checkpoints.workdir import locked\n"
        "with locked(Path(sys.argv[1]), Processes()):\n    print('held', flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    root = str(Path(__file__).resolve().parents[3])
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": root}
    ) as other:
        assert other.stdout is not None
        try:
            assert other.stdout.readline() == b"held\n"
            with (
                pytest.raises(
                    WorkdirError, match=rf"in use by another run \(process {other.pid} on"
                ),
                locked(tmp_path, Processes()),
            ):
                pass
        finally:
            other.kill()  # a crash leaves the file and no lock
    with locked(tmp_path, Processes()):
        pass


MOMENTS = """
import os, signal, sys
from pathlib import Path
from mupax.train.checkpoints import workdir
from mupax.train.config import recipes
from mupax.train.parallel.processes import Processes
import dataclasses

folder, alone = Path(sys.argv[1]), Processes()
config = dataclasses.replace(recipes.RECIPES["lm-tiny"](), workdir=str(folder))

def begin(config):
    path, held = workdir.claim(config, alone)
    with workdir.locked(path, alone):
        workdir.record(path, config, {}, "mup", {})
    return held

def code_of_child(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

for last in range(100):
    if not (pid := os.fork()):
        done = 0
        def hook(event, details):
            global done
            if event in ("open", "os.mkdir", "os.rename", "os.remove") and str(details[0]).startswith(str(folder)):
                if done == last:
                    os.kill(os.getpid(), signal.SIGKILL)
                done += 1
        sys.addaudithook(hook)
        begin(config)
        os._exit(0)
    if code_of_child(pid) == 0:
        break
    left = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    begun = (folder / workdir.RECORD).exists()
    print(last, *left, flush=True)
    for resume in (False, True) if not begun else (True,):
        again = dataclasses.replace(config, workdir=str(folder) + "-again", resume=resume)
        os.system(f"rm -rf {again.workdir}; [ ! -e {folder} ] || cp -r {folder} {again.workdir}")
        if not (pid := os.fork()):  # tensorstore, which `claim` uses, must not have run where one forks
            os._exit(0 if begin(again) == begun else 3)
        assert code_of_child(pid) == 0, "a run that has recorded nothing is a new one"
    os.system(f"rm -rf {folder}")
"""


@pytest.mark.core
def test_a_run_killed_at_any_of_its_first_file_operations_starts_again(tmp_path: Path) -> None:
    root = str(Path(__file__).resolve().parents[3])
    command = [sys.executable, "-c", MOMENTS, str(tmp_path / "run")]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=root, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    left = [set(line.split()[1:]) for line in done.stdout.splitlines()]
    assert len(left) >= 6, "the kills did not come between file operations"
    assert {".writable"} in left
    assert {".lock", ".config.json.partial"} in left


# Where files cannot be locked


@pytest.fixture(params=["bucket", "folder"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bucket, or a folder of a file system without locks."""
    monkeypatch.setattr(lock, "BEAT_S", 0.1)
    monkeypatch.setattr(lock, "STALE_S", 1.0)
    if request.param == "bucket":
        return path_of(f"{request.getfixturevalue('bucket')}/run")

    def flock(file: object, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    return tmp_path


def owner_of(place: Path) -> Path:
    return next(
        place / name
        for name in (".lock", ".owner")
        if (place / name).exists() and (place / name).read_bytes()
    )


def content_of(owner: Path) -> dict[str, Any]:
    """Read an owner that may be written at the same time.

    A bucket is asked for the size first and for that many bytes then. If the owner is written
    between the two and is longer now, its end is missing. The next read has it.
    """
    for _ in range(9):
        with contextlib.suppress(json.JSONDecodeError):
            return dict(json.loads(owner.read_bytes()))
    return dict(json.loads(owner.read_bytes()))


def test_a_living_owner_is_refused_and_one_that_has_left_is_forgotten(
    place: Path, capsys: Capture
) -> None:
    with locked(place, Processes()):
        with (
            pytest.raises(WorkdirError, match=rf"in use by another run \(process {os.getpid()} on"),
            locked(place, Processes()),
        ):
            pass
        assert f"was last held by process {os.getpid()}" in capsys.readouterr().err
    with locked(place, Processes()):
        pass
    assert capsys.readouterr().err == ""


def test_an_owner_that_gives_no_sign_of_life_is_taken_over(place: Path, capsys: Capture) -> None:
    with locked(place, Processes()):
        other = {
            **content_of(owner_of(place)),
            "machine": "elsewhere",
            "token": "a",
            "who": "process 7 on other",
        }
        path = owner_of(place)
    path.write_text(json.dumps(other))
    with locked(place, Processes()):
        err = capsys.readouterr().err
        assert "waiting up to 1 s for a sign of life" in err
        assert "process 7 on other, which held" in err
        assert "gives no sign of life; its lock is taken over" in err
        assert content_of(owner_of(place))["token"] != "a"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"pid": "x"}', b'{"at": 1e400}', b"\xff"])
def test_half_an_owner_keeps_nobody_out(content: bytes, place: Path) -> None:
    owner = place / (".owner" if isinstance(place, Path) else ".lock")
    owner.write_bytes(content)
    with locked(place, Processes()):
        assert content_of(owner)["pid"] == os.getpid()


def test_a_process_of_this_machine_that_has_ended_is_not_waited_for(
    place: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with locked(place, Processes()):
        path = owner_of(place)
        content = content_of(path)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    path.write_text(json.dumps({**content, "pid": ended.pid}))
    monkeypatch.setattr(lock, "STALE_S", 60.0)
    with locked(place, Processes()):
        assert "has ended; its lock is taken over" in capsys.readouterr().err


def test_a_number_that_is_no_process_id_is_of_no_process_that_has_ended() -> None:
    owner = {"machine": lock._machine(), "pid": 10**30}
    assert not lock._has_ended(owner)


def test_a_run_that_was_thought_dead_ends_when_it_comes_back(place: Path) -> None:
    messages: list[str] = []
    with lock.workdir_lock(place, "owner", messages.append):
        (place / "owner").write_text(json.dumps({"token": "b", "who": "process 7 on other"}))
        for _ in range(50):
            time.sleep(0.1)
            if messages:
                break
    assert "was taken over by process 7 on other" in messages[0]
    assert content_of(place / "owner")["token"] == "b", "what is another's is not given back"


def test_of_two_that_see_a_free_folder_one_gets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "BEAT_S", 10.0)
    barrier, free, outcomes = threading.Barrier(2), lock.Owned._free, []

    def seen_together(self: lock.Owned) -> object:
        entry = free(self)
        barrier.wait(10)
        return entry

    def start() -> None:
        try:
            lock.Owned(tmp_path, "owner", print)
            outcomes.append("has it")
        except WorkdirError:
            outcomes.append("refused")

    monkeypatch.setattr(lock.Owned, "_free", seen_together)
    threads = [threading.Thread(target=start) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["has it", "refused"]


def test_a_folder_without_locks_is_said_at_the_start(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(file: object, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    config = dataclasses.replace(RECIPES["lm-tiny"](), workdir=str(tmp_path / "run"))
    assert workdir.claim(config, Processes())[1] is False
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(fcntl, "flock", flock)
    assert workdir.claim(config, Processes())[1] is False
    assert "does without file locks (an owner file keeps other runs out" in capsys.readouterr().err
