"""Runs and commands that need more memory than there is: their messages and what is left behind."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from mupax import memory
from mupax.memory import Room
from mupax.train.config import cli
from mupax.train.config.recipes import RECIPES
from mupax.train.core.costs import fit
from mupax.train.core.program import Program, assemble
from mupax.train.run import loop, start
from tests.fixtures.commands import Done, command, last_of_each_flag
from tests.fixtures.programs import shared_programs
from tests.fixtures.small_runs import MODEL, folder, record_of

__all__ = ["folder", "shared_programs"]  # fixtures

TINY = (
    f"--data.name text:text.txt {MODEL} --data.batch-size 64 --data.eval-batch-size 64 --data.eval-examples 64 "
    "--optimizer.warmup-steps 1 --steps 3 --log.no-samples --log.no-tensorboard"
)
DEVICES = 8
"""Devices of a test, which share the memory of the machine."""


def train(*words: str) -> Done:
    return command(last_of_each_flag("train lm-tiny", TINY, *words))


def check_refused(done: Done, message: str = "out of memory") -> None:
    """Check that a command ended as for bad input, with a message that has some words."""
    assert done.code == 2, done.err
    assert "Traceback" not in done.err
    assert message in done.message


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Pretend that each device has so many bytes left."""
    return lambda count: monkeypatch.setattr(
        memory, "room", lambda: Room(int(DEVICES * count), "the container")
    )


@pytest.fixture(scope="module")
def usage(folder: Path) -> fit.MemoryEstimate:
    """Bytes that a tiny run takes."""
    config = cli.parse("lm-tiny", RECIPES["lm-tiny"], TINY.split()).config
    estimate = fit.needs(assemble(config))
    assert estimate is not None
    return estimate


@pytest.fixture(scope="module")
def trained(folder: Path, usage: fit.MemoryEstimate) -> str:
    """A finished run. Eighty-five hundredths of the memory are enough to make it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            memory, "room", lambda: Room(int(DEVICES * usage.peak / 0.85), "this machine")
        )
        done = train("--workdir trained")
    assert done.code == 0
    assert not done.err
    return "trained"


def test_rows_have_nats_per_byte_beside_nats_per_token(trained: str) -> None:
    rows = [json.loads(line) for line in Path(trained, "metrics.jsonl").read_text().splitlines()]
    (evaluation,) = [row for row in rows if "eval_loss" in row]
    assert evaluation["eval_loss_per_byte"] == pytest.approx(evaluation["eval_loss"])
    steps = [row for row in rows if "loss" in row]
    assert [row["loss_per_byte"] for row in steps] == pytest.approx([row["loss"] for row in steps])


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        ("--model.width 16384 --model.depth 48", "--model.width"),
        ("--model.vocab-size 1000000000", "--model.vocab-size"),
        ("--model.width 1024 --model.depth 400", "--model.depth"),
    ],
)
def test_parameters_are_refused_before_anything_is_compiled_or_written(
    words: str,
    flag: str,
    limited: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def compiled(program: Program) -> Any:
        raise AssertionError("nothing is compiled")

    monkeypatch.setattr(Program, "compile_train", compiled)
    limited(3e9)
    done = train(words, f"--workdir {tmp_path}/run")
    check_refused(done, flag)
    assert "--faults.no-memory-check" in done.message
    assert {path.name for path in (tmp_path / "run").iterdir()} <= {".lock"}


def test_optimizer_state_is_counted(
    usage: fit.MemoryEstimate, limited: Callable[[float], None], tmp_path: Path
) -> None:
    limited(usage.state)  # with gradients it is more
    check_refused(train(f"--workdir {tmp_path}/run"))


@pytest.mark.parametrize(
    ("words", "share", "flag"),
    [
        ("", 0.7, "--accumulation-steps"),
        ("--data.eval-batch-size 4096", 2.5, "--data.eval-batch-size"),
    ],
)
def test_a_step_and_an_evaluation_are_refused_with_flags_that_then_start(
    words: str,
    share: float,
    flag: str,
    usage: fit.MemoryEstimate,
    limited: Callable[[float], None],
    tmp_path: Path,
) -> None:
    workdir = tmp_path / "run"
    limited(usage.state + usage.saved + share * usage.temporary)
    refused = train(words, f"--workdir {workdir}")
    check_refused(refused, flag)
    value = refused.message.split(f"{flag} ")[1].split()[0]
    done = train(words, flag, value, f"--workdir {workdir}")
    assert done.code == 0
    restart = f"{workdir} holds a run that ended before its first step; starting it anew"
    assert done.message == restart
    assert "segments" not in record_of(workdir)


def test_the_check_can_be_turned_off(
    usage: fit.MemoryEstimate,
    limited: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    limited(usage.state)  # too little for the state, and for the steps that are checked later
    check_refused(train(f"--workdir {tmp_path}/checked"))
    assert train(f"--workdir {tmp_path}/unchecked --faults.no-memory-check").code == 0
    monkeypatch.setenv("MUPAX_MEMORY_CHECK", "off")
    assert not memory.checks()


@pytest.mark.parametrize(
    "words",
    [
        "eval trained",
        "generate trained --prompt def --tokens 2",
        "export trained --out exported",
        f"train lm-tiny --init-from trained --workdir started {TINY}",
        f"sweep lm-tiny --lr 2^-8:2^-7:2 --out swept {TINY}",
        "check lm-tiny --grow width --sizes 3 --seeds 1",
        "noise trained",
        "convert trained --form mean-field --out converted",
    ],
)
def test_every_command_that_takes_memory_refuses_to_start_without(
    words: str, trained: str, limited: Callable[[float], None]
) -> None:
    limited(1000)
    check_refused(command(words))


def test_an_import_and_many_samples_are_refused(
    trained: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command(f"export {trained} --out weights").code == 0
    monkeypatch.setattr(memory, "room", lambda: Room(10_000, "`ulimit -v`"))
    check_refused(command("import weights --out imported"), "`ulimit -v`")
    monkeypatch.setattr(memory, "room", lambda: Room(10_000_000, "`ulimit -v`"))
    check_refused(command(f"generate {trained} --prompt def --samples 100000"), "--samples")


EXHAUSTED = [
    jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 123456789 bytes."),
    MemoryError(),
    RuntimeError("std::bad_alloc"),
]


@pytest.mark.parametrize("error", EXHAUSTED)
def test_errors_of_memory_are_known(error: Exception) -> None:
    assert "out of memory" in (memory.exhausted(error) or "")


def test_memory_that_runs_out_in_a_run_is_one_message(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = loop.next_batch

    def batch(batches: Any, report: Any, context: Any, step: int) -> Any:
        if step == 3:
            # The rows of both steps are written, however fast the next batch is there.
            report.fetch()
            raise EXHAUSTED[0]
        return real(batches, report, context, step)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "next_batch", batch)
        done = train(f"--workdir {tmp_path}/run")
    assert done.code == 1, done.err
    assert "Traceback" not in done.err
    assert "out of memory" in done.message
    assert "--accumulation-steps" in done.message
    # A run that has done a step is not begun anew.
    check_refused(train(f"--workdir {tmp_path}/run"), "--resume")


def test_errors_of_other_kinds_are_none_of_memory() -> None:
    assert memory.exhausted(ValueError("INVALID_ARGUMENT: shapes differ")) is None
    assert memory.exhausted(FileNotFoundError(2, "No such file")) is None


def test_a_workdir_with_anything_else_is_not_begun_anew(
    usage: fit.MemoryEstimate, limited: Callable[[float], None], tmp_path: Path
) -> None:
    limited(usage.state + usage.saved + 0.7 * usage.temporary)
    words = f"--workdir {tmp_path} --steps 2"
    check_refused(train(words))
    limited(1e12)
    for left in ("notes.txt", "loss.png"):
        (tmp_path / left).write_text("mine")
        check_refused(train(words), "--resume")
        (tmp_path / left).unlink()
    assert train(words).code == 0


def test_fewer_steps_are_queued_where_memory_is_short(
    usage: fit.MemoryEstimate, folder: Path
) -> None:
    config = cli.parse("lm-tiny", RECIPES["lm-tiny"], TINY.split()).config
    program = assemble(config)
    sizes = SimpleNamespace(argument_size_in_bytes=usage.state, temp_size_in_bytes=10 * usage.state)
    step: Any = SimpleNamespace(memory_analysis=lambda: sizes)
    limits = [None, 100 * usage.state, 50 * usage.state, 20 * usage.state]
    queued = [start._steps_in_flight(program, step, limit) for limit in limits]
    assert queued == [2, 2, 1, 0]


MIB = 2**20


def cgroup(folder: Path, **files: int | str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("_dot_", ".")).write_text(f"{value}\n")


def test_memory_that_is_left_is_the_least_of_machine_containers_and_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proc = tmp_path / "proc"
    groups = tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: {16 * 2**20} kB\nMemAvailable: {8 * 2**20} kB\n")
    (proc / "self" / "status").write_text(f"VmSize: {2**20} kB\nVmData: {2**19} kB\n")
    (proc / "self" / "cgroup").write_text("0::/pods/mine\n")
    monkeypatch.setattr(memory, "_PROC", proc)
    monkeypatch.setattr(memory, "_CGROUPS", groups)
    unlimited = resource.RLIM_INFINITY
    limits = {resource.RLIMIT_AS: unlimited, resource.RLIMIT_DATA: unlimited}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[kind], limits[kind]))
    assert memory.room() == Room(8 * 2**30, "this machine")

    stat = f"anon 5\ninactive_file {100 * MIB}\nactive_file {MIB}"
    cgroup(groups / "pods" / "mine", memory_dot_max="max", memory_dot_current=0, memory_dot_stat="")
    used = {"memory_dot_current": 400 * MIB, "memory_dot_stat": stat}
    cgroup(groups / "pods", memory_dot_max=1000 * MIB, **used)
    # A limit around its own counts, cached files do not.
    assert memory.room() == Room(701 * MIB, "the container")
    cgroup(groups / "pods" / "mine", memory_dot_max="max", memory_dot_high=300 * MIB)
    assert memory.room().bytes == 300 * MIB, "above `high` it would be slowed down until it hangs"

    (proc / "self" / "cgroup").write_text("4:memory:/docker/abc\n1:cpu:/\n0::/\n")
    v1 = groups / "memory"
    cgroup(v1, memory_dot_limit_in_bytes=500 * MIB, memory_dot_usage_in_bytes=450 * MIB)
    cgroup(v1, memory_dot_stat=f"total_inactive_file {50 * MIB}")
    assert memory.room().bytes == 100 * MIB, "inside of a container its cgroup is shown as the root"
    cgroup(v1, memory_dot_limit_in_bytes=2**63 - 4096)
    assert memory.room().limit == "this machine"

    limits[resource.RLIMIT_AS] = 3 * 2**30
    left = memory.room()
    assert left.limit == "`ulimit -v`"
    assert left.bytes < 2 * 2**30
    limits[resource.RLIMIT_AS] = unlimited
    limits[resource.RLIMIT_DATA] = 2**30
    assert memory.room().limit == "`ulimit -d`"
