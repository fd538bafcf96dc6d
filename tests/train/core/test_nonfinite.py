"""Runs whose losses or gradients are no numbers, that hear a signal, or hang: named, and exact under kill and resume."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import random
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from mupax.__main__ import main
from mupax.train.data.interface import Prefetch
from mupax.train.data.text.batches import TokenData
from mupax.train.parallel.processes import StopRequest
from mupax.train.run import loop
from mupax.train.run.report import metrics
from mupax.train.run.runtime import Watchdog
from tests.fixtures.programs import shared_programs

__all__ = ["shared_programs"]  # a fixture

# Runs


STEPS = 12
TINY = (
    "lm-tiny --data.name text:text.txt --model.width 16 --model.depth 1 --model.num-heads 2 --model.seq-len 16 --data.batch-size 16 "
    "--data.eval-examples 64 --data.eval-batch-size 32 --optimizer.warmup-steps 2 --checkpoint.every-steps 4 --log.no-samples "
    f"--log.no-tensorboard --log.eval-every-steps 4 --checkpoint.keep 9 --steps {STEPS}"
)


@dataclasses.dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path, choose = tmp_path_factory.mktemp("bad"), random.Random(0)
    words = ("def", "return", "import", "class", "self", "value", "lambda", "yield")
    (path / "text.txt").write_text(
        "\n".join(" ".join(choose.choice(words) for _ in range(9)) for _ in range(600))
    )
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(path):
        patch.setenv("MUPAX_DATA", str(path / "cache"))
        yield path


def train(*words: str) -> Done:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["train", *TINY.split(), *words])
    return Done(code, out.getvalue(), err.getvalue())


def rows(workdir: Path | str) -> list[dict[str, Any]]:
    records = metrics.read(Path(workdir) / "metrics.jsonl")
    return [
        {k: v for k, v in row.items() if k != "seconds"}
        for row in records
        if "perf_data_wait" not in row
    ]


def interrupted(source: str, name: str, step: int, lines: int) -> Path:
    """A copy of a finished run as a kill would have left it: only checkpoints up to a step, so many rows, one torn."""
    copy = Path(name)
    shutil.copytree(source, copy)
    for path in (copy / "checkpoints").iterdir():
        if path.name.isdigit() and int(path.name) > step:
            shutil.rmtree(path)
    written = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(written[:lines]) + '{"step": 6, "lo')
    return copy


@pytest.fixture
def spoilt(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Numbers of batches in which no target counts, so that their mean loss is not a number."""
    bad: set[int] = set()
    make = TokenData.train_batch

    def train_batch(data: TokenData, k: int, rows: slice = slice(None)) -> Any:
        batch = make(data, k, rows)
        return {**batch, "weights": 0 * batch["weights"]} if k in bad else batch

    monkeypatch.setattr(TokenData, "train_batch", train_batch)
    return bad


def test_raise_stops_and_says_where(spoilt: set[int]) -> None:
    spoilt.add(6)
    done = train("--workdir", "raised")
    assert done.code == 1
    stderr = " ".join(done.err.split())
    assert "is not finite at step 7 (loss nan, gradient norm nan)" in stderr
    assert "(role " in stderr
    assert "the last good checkpoint is step 4" in stderr
    assert "--resume --bad-numbers skip" in stderr
    assert len(done.err.splitlines()) <= 10
    assert "Traceback" not in done.err
    assert rows("raised")[-1]["step"] == 7
    # What it advises works.
    assert train("--workdir", "raised", "--resume", "--bad-numbers", "skip").code == 0
    assert [row["step"] for row in rows("raised") if "loss" in row] == list(range(1, STEPS + 1))


def test_the_culprit_is_one_of_the_trained_parameters_where_others_are_frozen(
    spoilt: set[int],
) -> None:
    spoilt.add(1)
    done = train("--workdir", "frozen", "--freeze", "token_embedding", "block.attention.*")
    assert done.code == 1, done.err
    assert (
        "the gradient of block.attention_norm.gain (role norm_gain, layer 0), the first of"
        in " ".join(done.err.split())
    )


def test_skip_counts_and_is_exact_under_resume(spoilt: set[int]) -> None:
    spoilt |= {2, 6, 7}
    done = train("--workdir", "skipped", "--bad-numbers", "skip")
    assert done.code == 0, done.err
    records = rows("skipped")
    assert [row["step"] for row in records if row.get("skipped")] == [3, 7, 8]
    assert all(row["loss"] is None for row in records if row.get("skipped"))
    interrupted("skipped", "skipped-on", 4, 9)
    assert train("--workdir", "skipped-on", "--bad-numbers", "skip", "--resume").code == 0
    assert rows("skipped-on") == records
    done = train("--workdir", "too-many", "--bad-numbers", "skip", "--faults.most-in-a-row", "2")
    assert done.code == 1
    assert "2 steps in a row were left out" in " ".join(done.err.split())
    assert rows("too-many")[-1]["step"] == 8


def test_rollback_passes_over_the_batches_since_the_checkpoint_and_is_exact_under_resume(
    spoilt: set[int],
) -> None:
    spoilt |= {1, 8}
    done = train("--workdir", "back", "--bad-numbers", "rollback")
    assert done.code == 0, done.err
    output = " ".join(done.out.split())
    assert "back to step 0, going on 2 batches later" in output
    assert "back to step 4, going on 3 batches later" in output
    records = [row for row in rows("back") if "loss" in row]
    assert [row["step"] for row in records] == list(range(1, STEPS + 1))
    # Batches 0 and 1 for the first; at step 7, batch 8, three later: 6, 7 and 8.
    assert [row["batch"] for row in records] == [2, 3, 4, 5, *range(9, 9 + STEPS - 4)]
    assert not any(row.get("skipped") for row in records)
    for step, lines in ((4, 8), (0, 3), (8, 11)):
        copy = f"back-{step}"
        interrupted("back", copy, step, lines)
        assert train("--workdir", copy, "--bad-numbers", "rollback", "--resume").code == 0
        assert rows(copy) == rows("back")
    spoilt |= set(range(9, 99))
    interrupted("back", "hopeless", 8, 3)
    done = train(
        "--workdir",
        "hopeless",
        "--bad-numbers",
        "rollback",
        "--resume",
        "--faults.most-in-a-row",
        "3",
    )
    assert done.code == 1
    assert "3 rollbacks to one checkpoint did not help" in " ".join(done.err.split())


# Signals, where a run may be


@pytest.fixture(scope="module")
def whole(folder: Path) -> list[dict[str, Any]]:
    assert train("--workdir", "whole").code == 0
    return rows("whole")


def goes_on(workdir: str, whole: list[dict[str, Any]]) -> None:
    assert train("--workdir", workdir, "--resume").code == 0
    assert rows(workdir) == whole


def test_a_signal_ends_an_evaluation_and_resuming_does_it_again(
    whole: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate, batches = TokenData.eval_batches, []

    def eval_batches(data: TokenData, *rows: slice) -> Any:
        for batch in evaluate(data, *rows):
            batches.append(1)
            if len(batches) == 4:  # of the second evaluation, at step 8, the second batch
                signal.raise_signal(signal.SIGTERM)
                time.sleep(0.2)
            yield batch

    with monkeypatch.context() as patch:
        patch.setattr(TokenData, "eval_batches", eval_batches)
        done = train("--workdir", "evaluating")
    assert done.code == 143, done.err
    assert "stopped by SIGTERM at step 8 of 12, saved; add --resume" in " ".join(done.out.split())
    assert rows("evaluating") == [
        row for row in whole if row["step"] <= 8 and (row["step"] < 8 or "loss" in row)
    ]
    goes_on("evaluating", whole)


def test_a_signal_ends_a_wait_for_data(
    whole: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, look = TokenData.train_batch, Prefetch.ready
    hangs, released = threading.Event(), threading.Event()

    def train_batch(data: TokenData, k: int, rows: slice = slice(None)) -> Any:
        if k == 6:
            hangs.set()
            released.wait(20)
        return make(data, k, rows)

    def ready(batches: Prefetch[Any, Any], seconds: float = 0.0) -> bool:
        # Batch 5 was queued before batch 6 was begun: once the queue is empty, the loop waits for batch 6.
        queued_to_5 = hangs.is_set()
        is_ready = look(batches, seconds)
        if queued_to_5 and not is_ready:
            signal.raise_signal(signal.SIGINT)
        return is_ready

    with monkeypatch.context() as patch:
        patch.setattr(TokenData, "train_batch", train_batch)
        patch.setattr(Prefetch, "ready", ready)
        patch.setattr("mupax.train.data.interface._PATIENCE_S", 0.2)
        done = train("--workdir", "waiting")
    released.set()
    assert done.code == 130, done.err
    assert "stopped by SIGINT at step 6 of 12, saved" in " ".join(done.out.split())
    goes_on("waiting", whole)


def test_rows_are_on_disk_before_the_checkpoint_after_them(monkeypatch: pytest.MonkeyPatch) -> None:
    saves: list[tuple[int, int]] = []
    save = loop.Checkpoints.save

    def watched(checkpoints: Any, step: int, *rest: Any, **more: Any) -> None:
        saves.append((step, max(row["step"] for row in rows("flushed"))))
        save(checkpoints, step, *rest, **more)

    monkeypatch.setattr(loop.Checkpoints, "save", watched)
    monkeypatch.setattr(metrics, "_DRAIN_SECONDS", 60.0)  # the writer's thread alone would be late
    assert train("--workdir", "flushed").code == 0
    assert saves == [(4, 4), (8, 8), (12, 12)]


# The watchdog


@pytest.mark.core
def test_the_watchdog_speaks_after_a_silence_and_says_what_it_waits_for(tmp_path: Path) -> None:
    with (tmp_path / "said").open("w+") as file:
        with Watchdog(0.2, file) as watchdog:
            time.sleep(
                0.5
            )  # before the first word it does not watch: compiling takes as long as it takes
            for _ in range(20):
                watchdog.waiting("nothing much")
                time.sleep(0.02)
            file.flush()
            assert (tmp_path / "said").read_text() == ""
            watchdog.waiting("the batch of step 7")
            time.sleep(0.9)
        report = (tmp_path / "said").read_text()
    assert (
        2
        <= report.count(
            "without anything finished; waiting for the batch of step 7. The threads are at:"
        )
        <= 4
    )
    assert "test_the_watchdog_speaks_after_a_silence" in report
    with (tmp_path / "off").open("w+") as file, Watchdog(None, file) as watchdog:
        watchdog.waiting("nothing")
        time.sleep(0.2)
    assert (tmp_path / "off").read_text() == ""


# Where the main thread cannot hear


@pytest.mark.core
def test_a_signal_while_the_main_thread_is_deaf_ends_the_process(tmp_path: Path) -> None:
    import subprocess
    import sys

    # Native code that no signal interrupts, as the compiler is.
    program = """
import hashlib, sys
from mupax.train.parallel.processes import StopRequest
with StopRequest() as stop:
    if sys.argv[1] == "training":
        stop.defer()
    print("deaf", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 60_000_000)
"""
    for phase, signals, code in (
        ("compiling", [signal.SIGTERM], 143),
        ("training", [signal.SIGINT] * 2, 130),
    ):
        with subprocess.Popen(
            [sys.executable, "-c", program, phase], stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "deaf\n"
            for number in signals:
                began = time.monotonic()
                child.send_signal(number)
                time.sleep(0.4)
            assert child.wait(timeout=20) == code
            assert time.monotonic() - began < 5


def test_control_a_first_signal_in_training_is_only_noted() -> None:
    with StopRequest() as stop:
        stop.defer()
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.1)
        assert stop.received == signal.SIGINT
        with pytest.raises(SystemExit):
            stop.release()


@pytest.mark.parametrize("policy", ["raise", "skip", "rollback"])
def test_a_weight_that_is_no_number_is_judged_as_a_loss_that_is_none(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = TokenData.train_batch

    def train_batch(data: TokenData, k: int, rows: slice = slice(None)) -> Any:
        batch = make(data, k, rows)
        return {**batch, "weights": float("nan") * batch["weights"]} if k == 6 else batch

    monkeypatch.setattr(TokenData, "train_batch", train_batch)
    done = train("--workdir", f"weights {policy}", "--bad-numbers", policy)
    assert "Traceback" not in done.err
    assert done.code == (1 if policy == "raise" else 0), done.err
    if policy == "raise":
        assert "is not finite at step 7" in " ".join(done.err.split())
    else:
        losses = [row for row in rows(f"weights {policy}") if "loss" in row]
        assert [row["step"] for row in losses] == list(range(1, STEPS + 1))
        assert [row["step"] for row in losses if row["tokens"] == 0] == (
            [7] if policy == "skip" else []
        )
