"""Runs and commands that need more memory than there is: one message with a flag, exit codes, and what is left behind."""

from __future__ import annotations

import contextlib
import io
import json
import random
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from mupax import memory
from mupax.__main__ import main
from mupax.memory import Room
from mupax.train.config import cli
from mupax.train.config.recipes import RECIPES
from mupax.train.core.costs import fit
from mupax.train.core.program import Program, assemble
from mupax.train.run import loop, start
from tests.fixtures.programs import shared_programs

__all__ = ["shared_programs"]  # a fixture

TINY = (
    "--data.name text:text.txt --model.width 16 --model.depth 1 --model.num-heads 2 --model.seq-len 16 --data.batch-size 64 "
    "--data.eval-batch-size 64 --data.eval-examples 64 --optimizer.warmup-steps 1 --steps 3 --log.no-samples --log.no-tensorboard"
)
DEVICES = 8
"""Devices of a test, which share the memory of the machine."""


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a text, and prepared data."""
    path = tmp_path_factory.mktemp("memory")
    choose = random.Random(0)
    lines = (" ".join(choose.choices(("def", "self", "None"), k=9)) for _ in range(300))
    (path / "text.txt").write_text("\n".join(lines))
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(path):
        patch.setenv("MUPAX_DATA", str(path / "cache"))
        yield path


def called(*words: str) -> tuple[int, str]:
    """Exit code and standard error of a command."""
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        code = main(words)
    assert "Traceback" not in err.getvalue()
    return code, " ".join(err.getvalue().split())


def train(*words: str) -> tuple[int, str]:
    return called("train", "lm-tiny", *TINY.split(), *words)


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
        assert train("--workdir", "trained") == (0, "")
    return "trained"


def test_rows_have_nats_per_byte_beside_nats_per_token(trained: str) -> None:
    rows = [json.loads(line) for line in (Path(trained) / "metrics.jsonl").read_text().splitlines()]
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
    code, err = train(*words.split(), "--workdir", str(tmp_path / "run"))
    assert code == 2, err
    assert flag in err
    assert "--faults.no-memory-check" in err
    assert {path.name for path in (tmp_path / "run").iterdir()} <= {".lock"}


def test_optimizer_state_is_counted(
    usage: fit.MemoryEstimate, limited: Callable[[float], None], tmp_path: Path
) -> None:
    limited(usage.state)  # with gradients it is more
    code, err = train("--workdir", str(tmp_path / "run"))
    assert (code, "out of memory" in err) == (2, True)


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
    workdir = ("--workdir", str(tmp_path / "run"))
    limited(usage.state + usage.saved + share * usage.temporary)
    code, err = train(*words.split(), *workdir)
    assert code == 2, err
    assert flag in err
    values = err.split(f"{flag} ")[1].split()
    assert train(*words.split(), flag, values[0], *workdir) == (
        0,
        f"{tmp_path / 'run'} holds a run that ended before its first step; starting it anew",
    )
    assert "segments" not in json.loads((tmp_path / "run" / "config.json").read_text())


def test_the_check_can_be_turned_off(
    usage: fit.MemoryEstimate,
    limited: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    limited(0.5 * usage.peak)
    assert train("--workdir", str(tmp_path / "one"))[0] == 2
    assert train("--workdir", str(tmp_path / "two"), "--faults.no-memory-check")[0] == 0
    monkeypatch.setenv("MUPAX_MEMORY_CHECK", "off")
    assert not memory.checks()


@pytest.mark.parametrize(
    "words",
    [
        "eval trained",
        "generate trained --prompt def --tokens 2",
        "export trained --out exported",
        "train lm-tiny --init-from trained --workdir started",
        "sweep lm-tiny --lr 2^-8:2^-7:2 --out swept",
        "check lm-tiny --grow width --sizes 3 --seeds 1",
        "noise trained",
        "convert trained --form mean-field --out converted",
    ],
)
def test_every_command_that_takes_memory_refuses_to_start_without(
    words: str, trained: str, limited: Callable[[float], None]
) -> None:
    typed = words.split()
    limited(1000)
    flags = (
        TINY.replace("--workdir", "").split()
        if {"lm-tiny"} & {*typed} and "check" not in typed
        else []
    )
    code, err = called(*typed, *flags)
    assert (code, "out of memory" in err) == (2, True), err


def test_an_import_and_many_samples_are_refused(
    trained: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert called("export", trained, "--out", "weights")[0] == 0
    monkeypatch.setattr(memory, "room", lambda: Room(10_000, "`ulimit -v`"))
    code, err = called("import", "weights", "--out", "imported")
    assert (code, "`ulimit -v`" in err) == (2, True), err
    monkeypatch.setattr(memory, "room", lambda: Room(10_000_000, "`ulimit -v`"))
    code, err = called("generate", trained, "--prompt", "def", "--samples", "100000")
    assert (code, "--samples" in err) == (2, True), err


@pytest.mark.parametrize(
    "error",
    [
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 123456789 bytes."),
        MemoryError(),
        RuntimeError("std::bad_alloc"),
    ],
)
def test_memory_that_runs_out_in_a_run_is_one_message(
    error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = loop.next_batch

    def batch(batches: Any, report: Any, rt: Any, step: int) -> Any:
        if step == 5:
            raise error
        return real(batches, report, rt, step)

    monkeypatch.setattr(loop, "next_batch", batch)
    code, err = train("--workdir", str(tmp_path / "run"), "--steps", "6")
    assert code == 1, err
    assert "out of memory" in err
    assert "--accumulation-steps" in err
    monkeypatch.undo()
    code, err = train("--workdir", str(tmp_path / "run"))
    assert (code, "--resume" in err) == (2, True), "a run that has done a step is not begun anew"


def test_errors_of_other_kinds_are_none_of_memory() -> None:
    assert memory.exhausted(ValueError("INVALID_ARGUMENT: shapes differ")) is None
    assert memory.exhausted(FileNotFoundError(2, "No such file")) is None


@pytest.mark.parametrize("left", ["notes.txt", "loss.png"])
def test_a_workdir_with_anything_else_is_not_begun_anew(
    left: str, usage: fit.MemoryEstimate, limited: Callable[[float], None], tmp_path: Path
) -> None:
    limited(usage.state + usage.saved + 0.7 * usage.temporary)
    assert train("--workdir", str(tmp_path))[0] == 2
    (tmp_path / left).write_text("mine")
    limited(1e12)
    code, err = train("--workdir", str(tmp_path), "--steps", "2")
    assert (code, "--resume" in err) == (2, True)
    (tmp_path / left).unlink()
    assert train("--workdir", str(tmp_path), "--steps", "2")[0] == 0


def test_fewer_steps_are_queued_where_memory_is_short(
    usage: fit.MemoryEstimate, folder: Path
) -> None:
    config = cli.parse("lm-tiny", RECIPES["lm-tiny"], TINY.split()).config
    program = assemble(config)
    sizes = SimpleNamespace(argument_size_in_bytes=usage.state, temp_size_in_bytes=10 * usage.state)
    step: Any = SimpleNamespace(memory_analysis=lambda: sizes)
    queued = [
        start._steps_in_flight(program, step, limit and limit * usage.state)
        for limit in (None, 100, 50, 20)
    ]
    assert queued == [2, 2, 1, 0]


MIB = 2**20


def cgroup(folder: Path, **files: int | str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("_dot_", ".")).write_text(f"{value}\n")


def test_memory_that_is_left_is_the_least_of_machine_containers_and_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: {16 * 2**20} kB\nMemAvailable: {8 * 2**20} kB\n")
    (proc / "self" / "status").write_text(f"VmSize: {2**20} kB\nVmData: {2**19} kB\n")
    (proc / "self" / "cgroup").write_text("0::/pods/mine\n")
    monkeypatch.setattr(memory, "_PROC", proc)
    monkeypatch.setattr(memory, "_CGROUPS", groups)
    limits = {
        resource.RLIMIT_AS: resource.RLIM_INFINITY,
        resource.RLIMIT_DATA: resource.RLIM_INFINITY,
    }
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[kind], limits[kind]))
    assert memory.room() == Room(8 * 2**30, "this machine")

    stat = f"anon 5\ninactive_file {100 * MIB}\nactive_file {MIB}"
    cgroup(groups / "pods" / "mine", memory_dot_max="max", memory_dot_current=0, memory_dot_stat="")
    cgroup(
        groups / "pods",
        memory_dot_max=1000 * MIB,
        memory_dot_current=400 * MIB,
        memory_dot_stat=stat,
    )
    assert memory.room() == Room(701 * MIB, "the container"), (
        "a limit around its own counts, cached files do not"
    )
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
    assert (left.limit, left.bytes < 2 * 2**30) == ("`ulimit -v`", True)
    limits[resource.RLIMIT_AS], limits[resource.RLIMIT_DATA] = resource.RLIM_INFINITY, 2**30
    assert memory.room().limit == "`ulimit -d`"
