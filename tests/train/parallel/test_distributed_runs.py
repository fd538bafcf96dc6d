"""Runs of 2 and 4 real processes on this machine: they train as one process, and end together.

One history is shared by all tests. Two processes of four devices begin and end by SIGTERM; four
processes of one device go on, meet a bad batch and end; and one process does the first steps alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import random
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mupax.__main__ import main
from tests.train.parallel.watched_run import Settings, watch

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
STEPS = 12
"""Steps of the run that is alone."""
BAD_BATCH = 6
"""Number of the batch, of those after the resume, that one of four processes makes NaN."""
TINY = (
    "lm-tiny --data.name text:texts --model.width 16 --model.depth 1 --model.num-heads 2 "
    "--model.no-bias --model.no-norm-gain --model.activation relu --model.seq-len 16 "
    "--data.batch-size 16 --data.eval-batch-size 64 --data.eval-examples 100 "
    "--optimizer.warmup-steps 2 --optimizer.schedule constant --checkpoint.every-steps 5 "
    "--checkpoint.keep 1 --faults.bad-numbers rollback --log.eval-every-steps 1 "
    "--log.no-tensorboard --distributed.heartbeat-seconds 4"
)
# What gloo's threads write to standard output, in pieces that run into each other.
GLOO = (
    r"(\[Gloo\] Rank |\d+| is connected to | peer ranks\. |"
    r"Expected number of connected peer ranks is : |\n)*"
)
Batch = dict[str, str]
"""Content of each row of a global batch, by its position."""


class Done(NamedTuple):
    """A process that has ended. Lines of `words` are joined."""

    code: int
    out: str
    err: str
    record: str

    @property
    def words(self) -> str:
        return " ".join(self.out.split())

    @property
    def batches(self) -> list[Batch]:
        """Rows that the process made of every training batch, in the order of making."""
        return [json.loads(line) for line in re.findall("^rows (.*)$", self.record, re.M)]

    @property
    def digest(self) -> str:
        """Digest of the process's shards of the last parameters."""
        return re.findall("^digest (.*)$", self.record, re.M)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("joined")
    choose = random.Random(0)
    words = ("def", "return", "import", "class", "self", "value", "lambda", "yield", "while")
    (path / "texts").mkdir()
    for index in range(60):
        lines = [" ".join(choose.choices(words, k=9)) for _ in range(10)]
        (path / "texts" / f"{index}.txt").write_text("\n".join(lines))
    return path


def start(
    folder: Path, count: int, words: str, settings: list[Settings], *, devices: int, data: str
) -> list[Done]:
    """Run `count` processes to their end.

    Args:
        settings: Settings of each process.
        devices: Number of devices of each process.
        data: Folder of prepared data.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "MUPAX_DATA": str(folder / data),
        "XLA_FLAGS": (
            f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
        ),
    }
    joined = f"--distributed.coordinator localhost:{port} --distributed.processes {count}"
    running = []
    for index in range(count):
        command = [sys.executable, "-m", "tests.train.parallel.watched_run"]
        command.append(json.dumps(dataclasses.asdict(settings[index])))
        command += f"{TINY} {words} {joined} --distributed.process {index}".split()
        out = (folder / f"out{index}").open("w")
        err = (folder / f"err{index}").open("w")
        with out, err:
            running.append(
                subprocess.Popen(command, cwd=folder, env=environ, stdout=out, stderr=err)
            )
    try:
        codes = [process.wait(timeout=600) for process in running]
    finally:
        for process in running:
            process.kill()
    done = []
    for index, code in enumerate(codes):
        out = (folder / f"out{index}").read_text()
        err = (folder / f"err{index}").read_text()
        done.append(Done(code, out, err, Path(settings[index].record).read_text()))
    return done


@pytest.fixture(scope="module")
def alone(folder: Path) -> Done:
    """Run of one process, in the workdir `one`."""
    out = io.StringIO()
    record = folder / "record alone"
    words = f"train {TINY} --workdir one --steps {STEPS} --log.no-samples"
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(folder):
        patch.setenv("MUPAX_DATA", str(folder / "cache"))
        watch(Settings(record=str(record)), patch.setattr)
        with contextlib.redirect_stdout(out):
            code = main(words.split())
    assert code == 0
    return Done(code, out.getvalue(), "", record.read_text())


@pytest.fixture(scope="module")
def two(folder: Path) -> list[Done]:
    """Two processes of four devices, in the workdir `many`. The second gets SIGTERM.

    Heads are split inside each process, and each has every other rows.
    """
    settings = []
    for index in range(2):
        record = str(folder / f"record two {index}")
        sigterm_batch = 2 if index == 1 else None
        settings.append(
            Settings(record=record, sigterm_batch=sigterm_batch, alternate=True, shares_text=True)
        )
    words = "--workdir many --steps 100000 --mesh.data 2 --mesh.fsdp 2 --mesh.tensor 2"
    done = start(folder, 2, words, settings, devices=4, data="shared")
    assert [process.code for process in done] == [143, 143], done[0].err + done[1].err
    return done


@pytest.fixture(scope="module")
def stop_step(folder: Path, two: list[Done]) -> int:
    """Step at which the two processes stopped."""
    saved = [int(path.name) for path in (folder / "many" / "checkpoints").iterdir()]
    assert len(saved) == 1
    assert f"stopped by SIGTERM at step {saved[0]} of 100000, saved; add --resume" in two[0].words
    assert [*losses(folder / "many", "loss")] == [*range(1, saved[0] + 1)]
    assert saved[0] + BAD_BATCH <= STEPS
    return saved[0]


@pytest.fixture(scope="module")
def four(folder: Path, alone: Done, stop_step: int) -> list[Done]:
    """Four processes of one device that go on. The second meets a bad batch.

    Positions are split over two pairs of the processes. The run that is alone has prepared the data.
    """
    assert alone.code == 0
    settings = []
    for index in range(4):
        record = str(folder / f"record four {index}")
        settings.append(Settings(record=record, bad_batch=BAD_BATCH if index == 1 else None))
    words = f"--workdir many --steps {stop_step + 9} --resume --mesh.data 2 --mesh.sequence 2"
    done = start(folder, 4, words, settings, devices=1, data="cache")
    assert [process.code for process in done] == [0] * 4, "".join(one.err for one in done)
    return done


def losses(workdir: Path, name: str) -> dict[int, float]:
    """Return a loss or norm by step."""
    rows: list[dict[str, Any]] = []
    for line in (workdir / "metrics.jsonl").read_text().splitlines():
        rows.append(json.loads(line))
    return {row["step"]: row[name] for row in rows if name in row}


def last_good_step(stop_step: int) -> int:
    """Return the step of the checkpoint before the bad batch: every fifth step is saved."""
    before_bad = stop_step + BAD_BATCH - 1
    return max(stop_step, before_bad - before_bad % 5)


def global_batches(processes: list[Done]) -> list[Batch]:
    """Join the rows of all processes. Rows that two processes make must be the same."""
    batches = []
    for parts in zip(*(process.batches for process in processes), strict=False):
        batch: Batch = {}
        for part in parts:
            for row, content in part.items():
                assert batch.setdefault(row, content) == content
        batches.append(batch)
    return batches


def test_sigterm_to_one_stops_all_at_one_step(stop_step: int) -> None:
    assert stop_step > 0


def test_a_bad_step_of_one_leads_all_back(folder: Path, stop_step: int, four: list[Done]) -> None:
    good = last_good_step(stop_step)
    bad = stop_step + BAD_BATCH
    message = rf"is not finite at step {bad} .*; back to step {good}, going on {bad - good} batches"
    assert re.search(message, four[0].words), four[0].out
    assert [*losses(folder / "many", "loss")] == [*range(1, stop_step + 10)]
    # All four have the same parameters at the end.
    assert len({process.digest for process in four}) == 1


@pytest.mark.parametrize("name", ["loss", "eval_loss", "grad_norm"])
def test_two_and_four_processes_train_as_one(
    folder: Path, alone: Done, stop_step: int, four: list[Done], name: str
) -> None:
    expected = losses(folder / "one", name)
    actual = losses(folder / "many", name)
    common = range(1, last_good_step(stop_step) + 1)
    assert {*common} <= {*expected}
    # An evaluation that a stop leaves out is done by none.
    steps = [step for step in common if step in actual]
    assert len(steps) >= len(common) - 1
    assert max(steps) > stop_step
    for step in steps:
        assert actual[step] == pytest.approx(expected[step], rel=3e-6)
    # The control: after other steps, parameters are others.
    assert alone.digest != four[0].digest


def test_two_and_four_processes_make_the_batches_of_one(
    alone: Done, two: list[Done], stop_step: int, four: list[Done]
) -> None:
    order = alone.batches[:STEPS]
    assert len({json.dumps(batch) for batch in order}) == STEPS
    assert global_batches(two)[:stop_step] == order[:stop_step]
    rest = order[stop_step : stop_step + BAD_BATCH]
    assert global_batches(four)[: len(rest)] == rest
    # Each of the two makes every other pair of the devices' rows.
    for process, first in zip(two, (0, 4), strict=True):
        rows = [*range(first, first + 4), *range(first + 8, first + 12)]
        for batch in process.batches[:stop_step]:
            assert sorted(map(int, batch)) == rows


def test_two_processes_pack_the_text_side_by_side_to_the_bytes_of_one(
    folder: Path, alone: Done, two: list[Done]
) -> None:
    message = r"other processes tokenized \d+ of \d+ parts of train"
    assert re.search(message, two[0].words)
    assert "other processes" not in alone.out
    shared = sorted((folder / "shared").glob("packed/*/*.*"))
    single = sorted((folder / "cache").glob("packed/*/*.*"))
    assert [path.name for path in shared] == ["eval.bin", "manifest.json", "train.bin"]
    for index in (0, 2):
        assert shared[index].read_bytes() == single[index].read_bytes()


def test_one_process_alone_speaks_and_writes(
    folder: Path, two: list[Done], four: list[Done]
) -> None:
    assert "compiled in" in two[0].out
    assert re.fullmatch(GLOO, two[0].out) is None  # the control
    for silent in (two[1], *four[1:]):
        assert re.fullmatch(GLOO, silent.out)
    assert (folder / "many" / "sample.txt").is_file()
    assert not (folder / "many" / ".shared").exists()
