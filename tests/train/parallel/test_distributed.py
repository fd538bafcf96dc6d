"""Processes that find and inform each other, with a made-up environment and store."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from mupax import MupaxError
from mupax.train.checkpoints import workdir
from mupax.train.config.recipes import lm_tiny
from mupax.train.config.run import Config, DataConfig, DistributedConfig
from mupax.train.data import Data, DataError
from mupax.train.data.interface import ALL_ROWS, Batch
from mupax.train.parallel import distributed
from mupax.train.parallel.agreement import AgreementError
from mupax.train.parallel.distributed import Cluster
from mupax.train.parallel.processes import DistributedError, Processes, StopRequest, place
from mupax.train.run import resume, runtime, start

pytestmark = pytest.mark.core

ROOT = Path(__file__).resolve().parents[3]
ALONE = DistributedConfig()
MPI_5 = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "PMIX_NAMESPACE": "prterun-node-a-8191@1",
}
BY_MPI_5 = {
    "coordinator_address": "node-a:65535",
    "num_processes": 4,
    "process_id": 3,
    "local_device_ids": [1],
}
BY_HAND = DistributedConfig(coordinator="a:1", processes=2, process=1)
TOLD = {"coordinator_address": "a:1", "num_processes": 2, "process_id": 1}
BY_JAX = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2"}
SLURM = {
    "SLURM_STEP_NODELIST": "n[1-4]",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_GPUS_ON_NODE": "8",
}


@pytest.mark.parametrize(
    ("config", "environ", "tpu", "expected"),
    [
        (ALONE, {}, False, None),
        (BY_HAND, {}, False, TOLD),
        (BY_HAND, SLURM, True, TOLD),
        (ALONE, {**BY_JAX, "JAX_PROCESS_ID": "1"}, False, TOLD),
        (DistributedConfig(process=1), BY_JAX, False, TOLD),
        (ALONE, {}, True, {}),
        (ALONE, SLURM, False, {"local_device_ids": list(range(8))}),
        (ALONE, {**SLURM, "SLURM_NTASKS": "32"}, False, {"local_device_ids": None}),
        (ALONE, {**SLURM, "SLURM_NTASKS": "1"}, False, None),
        # A batch script outside srun is one process, however many tasks its job has.
        (ALONE, {"SLURM_NTASKS": "4"}, False, None),
        (ALONE, {"OMPI_COMM_WORLD_SIZE": "2"}, False, {}),
        (ALONE, {**MPI_5, "OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:3"}, False, {}),
        (ALONE, MPI_5, False, BY_MPI_5),
        (DistributedConfig(processes=1), SLURM, True, None),
    ],
)
def test_a_process_knows_whether_there_are_others(
    config: DistributedConfig, environ: dict[str, str], tpu: bool, expected: dict[str, Any] | None
) -> None:
    assert place(config, environ, tpu) == expected


@pytest.mark.parametrize(
    ("config", "environ", "message"),
    [
        (
            DistributedConfig(process=1), {},
            "to join other processes by hand, --distributed.coordinator (JAX_COORDINATOR_ADDRESS) "
            "--distributed.processes (JAX_NUM_PROCESSES) must be given too, or none of them",
        ),
        (DistributedConfig(coordinator="a", processes=2, process=1), {}, "distributed.coordinator is 'a'; write HOST:PORT of process 0"),
        (DistributedConfig(coordinator="a:1", processes=2, process=2), {}, "distributed.process is 2 of 2; write a number from 0 to 1"),
        (ALONE, {"JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES is 'two'; write a whole number"),
    ],
)  # fmt: skip
def test_a_part_of_what_it_takes_is_refused(
    config: DistributedConfig, environ: dict[str, str], message: str
) -> None:
    with pytest.raises(DistributedError, match=f"^{re.escape(message)}$"):
        place(config, environ, tpu=False)


def test_a_plain_process_joins_nobody() -> None:
    with runtime._joined(place(ALONE, {}, tpu=False), lm_tiny()) as processes:
        assert (processes.index, processes.count, processes.leader) == (0, 1, True)
        assert processes.broadcast("x", lambda: 3) == 3
        with processes.leader_first("y"):
            processes.barrier("z")
    assert not jax.distributed.is_initialized()


def test_who_waits_too_long_says_for_whom() -> None:
    # In a process of its own: the library would end this one.
    code = (
        "from mupax.train.config.run import DistributedConfig; from mupax.train.parallel import distributed, processes\n"
        "c = DistributedConfig(coordinator='localhost:9', processes=2, process=1, timeout_seconds=1)\n"
        "with distributed.joined(processes.place(c), c): pass"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert (
        "error: process 1 of 2 waited 1 s for process 0 at localhost:9 and the others; start all of"
        in done.stderr
    )


class Store:
    """The coordination service, in this process."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.changed = threading.Condition()

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        with self.changed:
            if key in self.values and not allow_overwrite:
                raise RuntimeError(f"{key} is there")
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key: str, timeout_ms: int) -> str:
        with self.changed:
            if not self.changed.wait_for(
                lambda: key in self.values, timeout=min(20, timeout_ms / 1000)
            ):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
            return self.values[key]

    def key_value_delete(self, key: str) -> None:
        with self.changed:
            del self.values[key]

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        return [(name, value) for name, value in self.values.items() if name.startswith(f"{key}/")]

    def wait_at_barrier(self, name: str, timeout_ms: int) -> None:
        with self.changed:
            self.values[name] = str(int(self.values.get(name, "0")) + 1)
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: self.values[name] == "2", timeout=20)


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Exit codes of processes that leave, after which their threads do nothing."""
    codes: list[int] = []

    def leave(code: int) -> None:
        codes.append(code)
        threading.Event().wait()

    monkeypatch.setattr(distributed, "leave", leave)
    return codes


def wait_until(condition: Callable[[], bool], seconds: float = 15.0) -> bool:
    """Wait until a condition holds, for some seconds at most. Return whether it does."""
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    return condition()


def on_two_processes(work: Any) -> list[Any]:
    """Run `work` as two processes, each a thread. Return its results or exceptions."""
    store, results = Store(), [None, None]

    def one(index: int) -> None:
        processes = Cluster(index, 2, store)
        try:
            results[index] = work(processes)
        except Exception as error:
            results[index] = error
        processes._done.set()

    threads = [threading.Thread(target=one, args=(index,)) for index in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_all_are_told_what_process_0_knows_and_it_goes_first() -> None:
    order: list[int] = []

    def work(processes: Processes) -> Any:
        with processes.leader_first("work"):
            order.append(processes.index)
        return processes.broadcast("x", lambda: {"from": processes.index})

    assert on_two_processes(work) == [{"from": 0}, {"from": 0}]
    assert order == [0, 1]


def test_a_process_that_never_says_what_it_is_is_named() -> None:
    leader = Cluster(0, 2, Store())
    with pytest.raises(
        DistributedError,
        match=r"^process 0 has waited 0 s for a word of process 1; run the same version",
    ):
        leader.gather("agreement", {}, 0.1)
    leader._done.set()


def test_the_longest_wait_ends_with_the_same_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "_FOREVER_MS", 100)
    leader = Cluster(0, 2, Store())
    with pytest.raises(DistributedError, match="process 0 has waited 0 s for a word of process 1"):
        leader._wait_for("mupax/never", 1, None)
    leader._done.set()


def test_other_data_is_refused_by_name() -> None:
    def work(processes: Processes) -> None:
        facts = {"name": "x", "digest": f"d{processes.index}"}
        data: Any = SimpleNamespace(facts=facts)
        start.check_data(data, processes)

    first, second = on_two_processes(work)
    assert first is None
    assert isinstance(second, DataError)
    assert "process 1 has x with digest d1, process 0 with d0; copy" in str(second)


def test_one_process_claims_the_folder_and_the_others_must_see_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def claim(processes: Processes) -> Any:
        config: Config = dataclasses.replace(
            lm_tiny(), workdir=str(tmp_path / f"run{processes.index}")
        )
        return workdir.claim(config, processes)

    assert on_two_processes(claim) == [(tmp_path / "run0", False)] * 2
    assert {path.name for path in (tmp_path / "run0").iterdir()} <= {".lock"}
    assert not (tmp_path / "run1").exists()

    monkeypatch.setattr(workdir.time, "sleep", lambda seconds: None)
    lost = Store()
    lost.values["mupax/broadcast/workdir"] = '["/nowhere", false]'
    with pytest.raises(
        workdir.WorkdirError,
        match=r"^process 1 does not see the workdir /nowhere of process 0, where all",
    ):
        workdir.claim(lm_tiny(), other := Cluster(1, 2, lost))
    other._done.set()


def test_processes_agree_on_how_many_programs_they_run_before_a_stop() -> None:
    ran: list[tuple[int, int]] = []

    def work(processes: Processes) -> int:
        with StopRequest() as stop:
            stop.join(processes)
            stop.defer()
            programs = 0
            while stop.claim():
                programs += 1
                stop.done()
                time.sleep(0.02 if processes.index else 0.002)  # one runs ahead
                if (processes.index, programs) == (1, 7):
                    stop._hear(signal.SIGINT)
            ran.append((processes.index, programs))
            return stop.exit_code

    assert on_two_processes(work) == [130, 130]
    (_, first), (_, second) = ran
    assert first == second > 7


def test_control_alone_a_process_stops_at_the_next_program() -> None:
    with StopRequest() as stop:
        stop.defer()
        assert stop.claim()
        stop.done()
        assert not stop.now()
        stop._hear(signal.SIGTERM)
        assert stop.now()
        assert not stop.claim()
    assert stop.exit_code == 143


@pytest.mark.parametrize("hangs", [True, False])
def test_a_coordinator_that_does_not_answer_ends_a_process(
    hangs: bool, left: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    class Stopped(Store):
        def key_value_set(self, *arguments: Any) -> None:
            if not hangs:
                raise jax.errors.JaxRuntimeError("UNAVAILABLE")
            wait_until(lambda: bool(left), 60)  # as where process 0 was sent SIGSTOP

    began, processes = time.monotonic(), Cluster(1, 2, Stopped(), heartbeat_seconds=1)
    assert wait_until(lambda: bool(left), 30)
    processes._done.set()
    assert left[0] == 1
    assert 1 < time.monotonic() - began < 10
    assert "error: process 0 (the coordinator) failed: no answer for 1 s" in capsys.readouterr().err


def test_a_save_that_end_all_is_told_of_ends_every_process(left: list[int]) -> None:
    def work(processes: Processes) -> None:
        if processes.index:
            processes.end_all("the disk is full")
        wait_until(lambda: len(left) >= 2)

    on_two_processes(work)
    assert left[:2] == [1, 1]


@pytest.mark.parametrize(
    ("waits", "asks", "ends"),
    [
        ((9.0, 9.0), None, True),
        ((9.0, -1.0), None, False),
        ((9.0, -1.0), 1, True),
        ((2.0, 2.0), None, False),
    ],
    ids=["both in a step", "one reads data", "one waits for the other's word", "not long enough"],
)
def test_processes_that_all_wait_for_another_end(
    waits: tuple[float, float],
    asks: int | None,
    ends: bool,
    left: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(distributed, "_POLL_S", 0.05)

    def work(processes: Cluster) -> None:
        processes.end_stalled(lambda: waits[processes.index], 5.0)
        if asks == processes.index:
            processes._wait_began = time.monotonic() - 4.0
        wait_until(lambda: len(left) >= 2, 15 if ends else 0.6)

    on_two_processes(work)
    assert left == ([1, 1] if ends else [])
    assert ("--faults.collective-seconds" in capsys.readouterr().err) == ends


def test_a_wait_counts_from_the_longest_of_its_kind() -> None:
    patience = runtime.Patience()
    assert patience.beyond() < 0
    patience.took("step", 100.0)
    with patience.program("step"):
        assert -100 <= patience.beyond() < -90
    with patience.program("evaluation"):
        assert 0 <= patience.beyond() < 10
    assert patience.beyond() < 0


class Fixed:
    """Data whose batches are numbers of the process that reads them."""

    batch_size, train_size, facts = 4, 100, {"name": "x"}

    def __init__(self, value: int) -> None:
        self.value = value

    def train_batch(self, k: int, rows: slice = ALL_ROWS) -> Batch:
        return {"inputs": np.arange(4)[rows] + self.value + k}


def compare_as(difference: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes find a difference between copies of the state, or none."""
    monkeypatch.setattr(resume.replicas, "by_name", lambda tree: {})
    monkeypatch.setattr(resume.replicas, "checksums", lambda arrays: [])
    monkeypatch.setattr(resume.replicas, "difference", lambda arrays, parts: difference)


def test_another_first_batch_or_state_is_refused_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def start_with(values: tuple[int, int], difference: str) -> list[Any]:
        compare_as(difference, monkeypatch)

        def work(processes: Processes) -> None:
            data: Any = Fixed(values[processes.index])
            state: Any = SimpleNamespace(health=SimpleNamespace(left_out=np.int32(2)))
            resume.CopyCheck(processes).check_start(state, data, 3)

        return on_two_processes(work)

    assert start_with((1, 1), "") == [None, None]
    batches = start_with((1, 2), "")
    assert [type(error) for error in batches] == [DataError] * 2
    assert re.search("process 1.*batch 5|batch 5.*process 1", str(batches[0]))
    errors = start_with((1, 1), "x differs")
    assert [type(error) for error in errors] == [AgreementError] * 2


@pytest.mark.parametrize(
    ("newest", "saved"), [(8, "the newest checkpoint is 8"), (None, "there is no checkpoint yet")]
)
def test_a_state_that_a_host_computed_otherwise_is_not_saved(
    newest: int | None, saved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(difference: str) -> list[Any]:
        compare_as(difference, monkeypatch)

        def work(processes: Processes) -> None:
            state: Any = {}
            checkpoints: Any = SimpleNamespace(latest_of_all=lambda: newest)
            resume.CopyCheck(processes).check_save(state, 12, checkpoints)

        return on_two_processes(work)

    assert save("") == [None, None]
    for error in save("kernel of process 1 differs"):
        assert isinstance(error, resume.DriftError)
        for words in ("after step 12 kernel of process 1", "step 12 is not saved", saved):
            assert words in str(error)


def test_a_process_that_is_not_heard_of_is_dead(
    left: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    processes = Cluster(0, 2, Store(), heartbeat_seconds=1)
    assert wait_until(lambda: bool(left), 30)
    processes._done.set()
    message = "error: process 1 (host unknown) failed: killed or cut off, not heard of for 1 s\n"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"), [(OSError("no disk"), 1), (MupaxError("--model.width 3 is odd"), 2)]
)
def test_bad_input_of_one_is_bad_input_of_all(
    error: Exception,
    code: int,
    left: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    at_exit: list[int] = []
    monkeypatch.setattr(distributed.atexit, "register", lambda leave, code: at_exit.append(code))

    def work(processes: Processes) -> None:
        if processes.index:
            processes.fail(error)
        wait_until(lambda: bool(left))

    on_two_processes(work)
    assert [*left, *at_exit] == [code, code]
    message = f"process 1 ({socket.gethostname()}) failed: {type(error).__name__}: {error}"
    assert message in capsys.readouterr().err


class Table(Data):
    """A data set whose every batch is the same table."""

    def __init__(self, whole: Batch) -> None:
        super().__init__(
            DataConfig(name="table", batch_size=8), facts={}, train_size=8, eval_size=8
        )
        self.whole = whole

    def train_batch(self, k: int, rows: slice = ALL_ROWS) -> Batch:
        return {name: x[rows] for name, x in self.whole.items()}

    def eval_batch(self, j: int, rows: slice = ALL_ROWS) -> Batch:
        return self.train_batch(j, rows)


def test_rows_of_a_process_are_those_that_its_devices_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    from mupax.train.config.run import MeshConfig
    from mupax.train.parallel.sharding import BatchSharding, MeshLayout, make_mesh

    layout = MeshLayout(make_mesh(MeshConfig(data=4, sequence=2)))
    shapes = {
        "inputs": jax.ShapeDtypeStruct((8, 6), np.int32),
        "targets": jax.ShapeDtypeStruct((8,), np.int32),
    }
    whole = {"inputs": np.arange(48).reshape(8, 6), "targets": np.arange(8)}
    assert BatchSharding(shapes, layout).rows == (slice(0, 8),)
    # As in a process that holds the first and the last quarter of the batch, and one half of the positions.
    indices = layout.batch(shapes)["inputs"].devices_indices_map((8, 6))
    mine = {device: index for device, index in indices.items() if device.id in (1, 7)}
    monkeypatch.setattr(
        jax.sharding.NamedSharding, "addressable_devices_indices_map", lambda *_: mine
    )
    feed = BatchSharding(shapes, layout)
    assert feed.rows == (slice(0, 2), slice(6, 8))
    got: list[np.ndarray] = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(
        jax,
        "make_array_from_callback",
        lambda shape, sharding, part: got.extend(map(part, mine.values())),
    )
    with contextlib.closing(Table(whole).train_batches(0, *feed.rows)) as batches:
        feed.shard_batch({"inputs": next(batches)["inputs"]})
    for index, part in zip(mine.values(), got, strict=True):
        np.testing.assert_array_equal(part, whole["inputs"][index])
        assert part.shape == (2, 3)
