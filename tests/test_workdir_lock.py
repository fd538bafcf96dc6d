"""One run at a time on a workdir."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from train.processes import Processes
from train.workdir import WorkdirError, locked


@pytest.mark.core
def test_a_second_run_on_a_workdir_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from train.processes import Processes; from train.workdir import locked\n"
        "with locked(Path(sys.argv[1]), Processes()):\n    print('held', flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    root = str(Path(__file__).resolve().parent.parent)
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
