"""A run of two processes, one of which is killed, goes on and ends as if nothing had been."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.fixtures.commands import command
from tests.fixtures.devices import one_device
from tests.fixtures.small_runs import working_folder, write_text

__all__ = ["one_device"]  # a fixture

ROOT = Path(__file__).resolve().parents[4]
WORDS = (
    "lm-tiny --model.width 16 --model.depth 1 --model.num-heads 2 --model.seq-len 16 "
    "--model.no-norm-gain --data.batch-size 16 "
    "--data.eval-batch-size 64 --data.eval-examples 64 --optimizer.warmup-steps 2 --checkpoint.every-steps 2 --steps 6 "
    "--data.name text:text.txt --log.no-tensorboard --log.no-progress --log.no-samples --distributed.heartbeat-seconds 3"
)
# The command line, with a window: a process is killed after its step 5, once. Only an attempt has
# the window, since its import takes two seconds. Drawing loss.png would take one more.
DRIVER = """
import os, sys
from pathlib import Path
if "MUPAX_ATTEMPT" in os.environ:
    from mupax.train.run.report import finish
    from mupax.train.run.runtime import Report
    add, mark = Report.add, Path("killed")
    def watched(self, step, metrics):
        add(self, step, metrics)
        if step == 5 and "KILL" in os.environ and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), 9)
    Report.add = watched
    finish.loss_plot = lambda metrics, image, *_, **__: Path(image).touch()
from mupax.train.__main__ import main
if __name__ == "__main__":
    sys.exit(main())
"""


class Done(NamedTuple):
    """Exit codes of the processes of one run, and all that they printed."""

    codes: list[int]
    output: str


def run_two(folder: Path, words: str, killed: int) -> Done:
    """Run two processes of one device, of which one is killed."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1",
        "MUPAX_DATA": str(folder / "cache"),
    }
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    line = f"{WORDS} {words} --distributed.coordinator {address} --distributed.processes 2"
    running = []
    with (folder / "said").open("w+") as log:
        for index in range(2):
            flags = f"{line} --distributed.process {index}"
            command_line = [sys.executable, "-c", DRIVER, *flags.split()]
            variables = environment | ({"KILL": "yes"} if index == killed else {})
            running.append(
                subprocess.Popen(command_line, cwd=folder, env=variables, stdout=log, stderr=log)
            )
        try:
            codes = [process.wait(500) for process in running]
        finally:
            for process in running:
                process.kill()
        log.seek(0)
        return Done(codes, log.read())


def rows(workdir: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl without times."""
    records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{**row, "seconds": 0} for row in records if "perf_data_wait" not in row]


@pytest.mark.slow
def test_a_killed_process_ends_all_and_all_go_on(tmp_path: Path) -> None:
    write_text(tmp_path / "text.txt")
    # Sums over two devices do not depend on which processes have them.
    with working_folder(tmp_path):
        done = command(f"train {WORDS} --workdir whole --mesh.data 2")
    assert done.code == 0, done.err
    done = run_two(tmp_path, "--workdir killed-once --restart 3 --mesh.data 2", killed=1)
    assert done.codes == [0, 0], done.output
    for index in range(2):
        assert f"process {index}: attempt 1 ended after step" in done.output
    killer = "killed by SIGKILL (by a person, a scheduler or the kernel)"
    assert f"{killer}; starting again in 1 s (1 of 3)" in done.output
    for name, code in (("attempts", 1), ("attempts-1", -9)):
        lines = (tmp_path / "killed-once" / f"{name}.jsonl").read_text().splitlines()
        first, second = (json.loads(line) for line in lines)
        assert (first["attempt"], first["code"]) == (1, code)
        assert (second["attempt"], second["code"], second["step"]) == (2, 0, 6)
        assert second["start"] > 0  # from a checkpoint
    assert rows(tmp_path / "killed-once") == rows(tmp_path / "whole")
