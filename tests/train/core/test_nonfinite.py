"""Runs that meet a loss or gradient that is no number, a signal, or a hang."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mupax.train.data.interface import Prefetch
from mupax.train.data.text.batches import TokenData
from mupax.train.parallel.processes import StopRequest
from mupax.train.run import loop
from mupax.train.run.report import metrics
from mupax.train.run.runtime import Watchdog
from tests.fixtures import small_runs
from tests.fixtures.commands import Done
from tests.fixtures.devices import one_device
from tests.fixtures.programs import shared_programs
from tests.fixtures.small_runs import folder, interrupted, rows

__all__ = ["folder", "one_device", "shared_programs"]  # fixtures

# Runs


STEPS = 12


def train(*words: str) -> Done:
    """Train with a checkpoint and an evaluation after every fourth step."""
    return small_runs.train(
        f"--steps {STEPS} --checkpoint.every-steps 4 --checkpoint.keep 9",
        "--log.eval-every-steps 4 --log.no-tensorboard --data.eval-batch-size 32",
        *words,
    )


def steps(workdir: str) -> list[int]:
    """Return the steps whose loss is recorded."""
    return [row["step"] for row in rows(workdir) if "loss" in row]


@pytest.fixture
def spoilt(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Factors on the weights of batches, by number: 0 or NaN makes their mean loss not a number."""
    factors: dict[int, float] = {}
    make = TokenData.train_batch

    def train_batch(data: TokenData, k: int, rows: slice = slice(None)) -> Any:
        batch = make(data, k, rows)
        return {**batch, "weights": factors.get(k, 1) * batch["weights"]}

    monkeypatch.setattr(TokenData, "train_batch", train_batch)
    return factors


NAN = float("nan")


def test_raise_stops_and_says_where(spoilt: dict[int, float]) -> None:
    spoilt[6] = NAN
    done = train("--workdir raised")
    assert done.code == 1
    for words in (
        "is not finite at step 7 (loss nan, gradient norm nan)", "(role ",
        "the last good checkpoint is step 4", "--resume --bad-numbers skip",
    ):  # fmt: skip
        assert words in done.message
    assert len(done.err.splitlines()) <= 10
    assert "Traceback" not in done.err
    assert rows("raised")[-1]["step"] == 7
    # The advice works.
    assert train("--workdir raised --resume --bad-numbers skip").code == 0
    assert steps("raised") == [*range(1, STEPS + 1)]


def test_the_culprit_is_one_of_the_trained_parameters_where_others_are_frozen(
    spoilt: dict[int, float],
) -> None:
    spoilt[1] = 0
    done = train("--workdir frozen --freeze token_embedding block.attention.*")
    assert done.code == 1, done.err
    culprit = "the gradient of block.attention_norm.gain (role norm_gain, layer 0), the first of"
    assert culprit in done.message


def test_skip_counts_and_is_exact_under_resume(spoilt: dict[int, float]) -> None:
    spoilt.update({2: 0, 6: NAN, 7: 0})
    done = train("--workdir skipped --bad-numbers skip")
    assert done.code == 0, done.err
    records = rows("skipped")
    assert steps("skipped") == [*range(1, STEPS + 1)]
    skipped = [row for row in records if row.get("skipped")]
    assert [row["step"] for row in skipped] == [3, 7, 8]
    assert all(row["loss"] is None for row in skipped)
    assert [row["step"] for row in records if row.get("tokens") == 0] == [3, 7, 8]
    interrupted("skipped", "skipped-on", 4, 9)
    assert train("--workdir skipped-on --bad-numbers skip --resume").code == 0
    assert rows("skipped-on") == records

    interrupted("skipped", "too-many", 4, 9)
    done = train("--workdir too-many --bad-numbers skip --resume --faults.most-in-a-row 2")
    assert done.code == 1
    assert "2 steps in a row were left out" in done.message
    assert rows("too-many")[-1]["step"] == 8


def test_rollback_passes_over_the_batches_since_the_checkpoint_and_is_exact_under_resume(
    spoilt: dict[int, float],
) -> None:
    spoilt.update({1: 0, 8: NAN})
    done = train("--workdir back --bad-numbers rollback")
    assert done.code == 0, done.err
    assert "back to step 0, going on 2 batches later" in done.text
    assert "back to step 4, going on 3 batches later" in done.text
    records = [row for row in rows("back") if "loss" in row]
    assert steps("back") == [*range(1, STEPS + 1)]
    # Batches 0 and 1 for the first; at step 7, batch 8, three later: 6, 7 and 8.
    assert [row["batch"] for row in records] == [2, 3, 4, 5, *range(9, 9 + STEPS - 4)]
    assert not any(row.get("skipped") or row["tokens"] == 0 for row in records)
    for step, lines in ((4, 8), (0, 3), (8, 11)):
        name = f"back-{step}"
        interrupted("back", name, step, lines)
        assert train(f"--workdir {name} --bad-numbers rollback --resume").code == 0
        assert rows(name) == rows("back")

    spoilt.update(dict.fromkeys(range(9, 99), 0.0))
    interrupted("back", "hopeless", 8, 3)
    done = train("--workdir hopeless --bad-numbers rollback --resume --faults.most-in-a-row 3")
    assert done.code == 1
    assert "3 rollbacks to one checkpoint did not help" in done.message


# Signals, where a run may be


@pytest.fixture(scope="module")
def saves() -> list[tuple[int, int]]:
    """Steps that the undisturbed run saves, each with the last step that is on disk then."""
    saved_steps: list[tuple[int, int]] = []
    save = loop.Checkpoints.save

    def watched(checkpoints: Any, step: int, *rest: Any, **more: Any) -> None:
        saved_steps.append((step, max(row["step"] for row in rows("undisturbed"))))
        save(checkpoints, step, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Checkpoints, "save", watched)
        patch.setattr(metrics, "_DRAIN_SECONDS", 60.0)  # the writer's thread alone would be late
        assert train("--workdir undisturbed").code == 0
    return saved_steps


@pytest.fixture(scope="module")
def undisturbed(saves: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Rows of a run that nothing disturbs."""
    return rows("undisturbed")


def test_rows_are_on_disk_before_the_checkpoint_after_them(saves: list[tuple[int, int]]) -> None:
    assert saves == [(4, 4), (8, 8), (12, 12)]


def test_a_signal_ends_an_evaluation_and_resuming_does_it_again(
    undisturbed: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = TokenData.eval_batches
    batches = []

    def eval_batches(data: TokenData, *parts: slice) -> Any:
        for batch in evaluate(data, *parts):
            batches.append(1)
            if len(batches) == 4:  # of the second evaluation, at step 8, the second batch
                signal.raise_signal(signal.SIGTERM)
                time.sleep(0.2)
            yield batch

    with monkeypatch.context() as patch:
        patch.setattr(TokenData, "eval_batches", eval_batches)
        done = train("--workdir evaluating")
    assert done.code == 143, done.err
    assert "stopped by SIGTERM at step 8 of 12, saved; add --resume" in done.text
    expected = [row for row in undisturbed if row["step"] < 8]
    expected += [row for row in undisturbed if row["step"] == 8 and "loss" in row]
    assert rows("evaluating") == expected
    assert train("--workdir evaluating --resume").code == 0
    assert rows("evaluating") == undisturbed


def test_a_signal_ends_a_wait_for_data(
    undisturbed: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    make = TokenData.train_batch
    look = Prefetch.ready
    take = Prefetch.__next__
    released = threading.Event()
    sent = threading.Event()
    num_taken: Counter[Prefetch[Any, Any]] = Counter()

    def train_batch(data: TokenData, k: int, rows: slice = slice(None)) -> Any:
        if k == 6:
            released.wait(20)
        return make(data, k, rows)

    def next_batch(batches: Prefetch[Any, Any]) -> Any:
        batch = take(batches)
        num_taken[batches] += 1
        return batch

    def ready(batches: Prefetch[Any, Any], seconds: float = 0.0) -> bool:
        # On a busy machine the loop waits for earlier batches and for those of an evaluation, too.
        # An evaluation has only 2.
        waits_for_batch_6 = num_taken[batches] == 6
        is_ready = look(batches, seconds)
        # Once: a second signal would end the process at once.
        if waits_for_batch_6 and not is_ready and not sent.is_set():
            sent.set()
            signal.raise_signal(signal.SIGINT)
        return is_ready

    with monkeypatch.context() as patch:
        patch.setattr(TokenData, "train_batch", train_batch)
        patch.setattr(Prefetch, "__next__", next_batch)
        patch.setattr(Prefetch, "ready", ready)
        patch.setattr("mupax.train.data.interface._PATIENCE_S", 0.2)
        done = train("--workdir waiting")
    released.set()
    assert done.code == 130, done.err
    assert "stopped by SIGINT at step 6 of 12, saved" in done.text
    assert train("--workdir waiting --resume").code == 0
    assert rows("waiting") == undisturbed


# The watchdog


@pytest.mark.core
def test_the_watchdog_speaks_after_a_silence_and_says_what_it_waits_for(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("w+") as file:
        with Watchdog(0.2, file) as watchdog:
            time.sleep(0.5)  # before the first word it does not watch: compiling may take long
            for _ in range(20):
                watchdog.waiting("nothing much")
                time.sleep(0.02)
            file.flush()
            assert log.read_text() == ""
            watchdog.waiting("the batch of step 7")
            time.sleep(0.9)
        report = log.read_text()
    message = "without anything finished; waiting for the batch of step 7. The threads are at:"
    assert 2 <= report.count(message) <= 4
    assert "test_the_watchdog_speaks_after_a_silence" in report
    with log.open("w+") as file, Watchdog(None, file) as watchdog:
        watchdog.waiting("nothing")
        time.sleep(0.2)
    assert log.read_text() == ""


# Where the main thread cannot hear


@pytest.mark.core
def test_a_signal_while_the_main_thread_is_deaf_ends_the_process(tmp_path: Path) -> None:
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
        ("training", [signal.SIGINT] * 3, 130),
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
