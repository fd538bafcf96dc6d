"""One run at a time on a workdir, and none kept out by what it left when it was killed in its first moments."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mupax.train.checkpoints.workdir import WorkdirError, locked
from mupax.train.parallel.processes import Processes


@pytest.mark.core
def test_a_second_run_on_a_workdir_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from mupax.train.parallel.processes import Processes; "
        "from mupax.train.checkpoints.workdir import locked\n"
        "with locked(Path(sys.argv[1]), Processes()):\n    print('held', flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    root = str(Path(__file__).resolve().parents[3])
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": root}) as other:
        assert other.stdout is not None
        try:
            assert other.stdout.readline() == b"held\n"
            with (
                pytest.raises(WorkdirError, match=rf"in use by another run \(process {other.pid} on"),
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
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0:
        break
    left = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    begun = (folder / workdir.RECORD).exists()
    print(last, *left, flush=True)
    for resume in (False, True) if not begun else (True,):
        again = dataclasses.replace(config, workdir=str(folder) + "-again", resume=resume)
        os.system(f"rm -rf {again.workdir}; [ ! -e {folder} ] || cp -r {folder} {again.workdir}")
        assert begin(again) == begun, "a run that has recorded nothing is a new one"
    os.system(f"rm -rf {folder}")
"""


@pytest.mark.core
def test_a_run_killed_at_any_of_its_first_file_operations_starts_again(tmp_path: Path) -> None:
    root = str(Path(__file__).resolve().parents[3])
    command = [sys.executable, "-c", MOMENTS, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    left = [set(line.split()[1:]) for line in done.stdout.splitlines()]
    assert len(left) >= 6, "the kills did not come between file operations"
    assert {".writable"} in left
    assert {".lock", ".config.json.partial"} in left
