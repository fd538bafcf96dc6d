"""A run whose evaluations have stopped improving ends early, and so again when resumed."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from mupax.train.config.recipes import RECIPES
from mupax.train.config.run import LogConfig, StopConfig
from mupax.train.run.report import metrics
from mupax.train.run.report.metrics import Evaluations
from tests.fixtures.devices import one_device
from tests.fixtures.programs import shared_programs
from tests.fixtures.small_runs import STEPS, checkpoints, completed, folder, refused, rows
from tests.train.run.saves.test_best_checkpoint import scripted

__all__ = ["folder", "one_device", "shared_programs"]  # fixtures

WORDS = "--log.eval-every-steps 1 --checkpoint.every-steps 3 --log.no-tensorboard"


def stopped(
    losses: list[float], steps: int = 100, name: str = "eval_loss", **stop: Any
) -> tuple[int | None, str]:
    """The evaluation, from 1, at which a run ends, and why."""
    log = LogConfig(eval_every_steps=1)
    config = dataclasses.replace(
        RECIPES["lm-tiny"](), stop=StopConfig(**stop), log=log, steps=steps
    )
    evaluations = Evaluations(config)
    for step, loss in enumerate(losses, start=1):
        evaluations.add({"step": step, "eval_loss": 1.0, name: loss})
        if evaluations.stopped:
            return step, evaluations.stopped
    return None, ""


@pytest.mark.core
@pytest.mark.parametrize(
    ("losses", "stop", "end"),
    [
        ([3, 2, 2, 2, 1], {"patience": 2}, 4),  # an equal one is no improvement
        ([3, 2, 2.5, 1.9, 2, 2], {"patience": 2}, 6),
        ([3, 2, 2, 2, 1], {"patience": 3}, None),
        ([3, 2.9, 2.8, 2.7], {"patience": 2, "min_delta": 0.5}, 3),
        ([3, 2.4, 1.8, 1.2], {"patience": 1, "min_delta": 0.5}, None),
        ([3, 2.8, 2.4, 2.3], {"patience": 2, "min_delta": 0.5}, None),  # small steps add up
        ([math.nan, math.inf], {"patience": 2}, 2),
        ([math.nan, 5, math.nan, 4], {"patience": 2}, None),
        ([3, -math.inf, 2.9, 2.8], {"patience": 1}, 2),
        ([3, 2, 2, 2], {}, None),
    ],
)
def test_a_run_ends_after_so_many_evaluations_without_an_improvement(
    losses: list[float], stop: dict[str, Any], end: int | None
) -> None:
    assert stopped(losses, **stop)[0] == end


@pytest.mark.core
def test_of_accuracies_more_is_better_and_the_last_step_is_the_end_anyway() -> None:
    by = {"patience": 1, "metric": "eval_accuracy", "name": "eval_accuracy"}
    assert stopped([0.1, 0.2, 0.3], **by) == (None, "")
    assert stopped([0.3, 0.2], **by) == (
        2,
        "eval_accuracy has not improved in 1 evaluation, the best is 0.3 at step 1",
    )
    assert stopped([1, 1], steps=2, patience=1) == (None, "")
    assert (
        stopped([math.nan], patience=1)[1]
        == "eval_loss has not improved in 1 evaluation, and was never finite"
    )


def timed_rows(workdir: str) -> list[dict[str, Any]]:
    """Return all rows but those about speed, with the seconds of every step."""
    records = metrics.read(f"{workdir}/metrics.jsonl")
    return [row for row in records if "perf_data_wait" not in row]


def test_a_stopped_run_is_done_and_stays_so_unless_asked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = {1: 5.0, 2: 3.0, 3: 2.9, 4: 2.8, 5: 2.0, 6: 1.9, 7: 1.8}
    evaluations = scripted(monkeypatch, losses)
    words = f"--workdir stopped {WORDS} --stop.min-delta 0.5"
    done = completed(words, "--stop.patience 2")
    reason = "eval_loss has not improved by more than 0.5 in 2 evaluations, the best is 3 at step 2"
    assert f"stopped early at step 4 of {STEPS}: {reason}" in done.out
    assert checkpoints("stopped") == [3, 4], "one of the step at which it ended"
    assert [row for row in rows("stopped") if "stopped" in row] == [{"step": 4, "stopped": reason}]

    before = timed_rows("stopped")
    again = completed(words, "--stop.patience 2 --resume")
    assert f"stopped early at step 4 of {STEPS}: {reason}" in again.out
    assert "--stop.patience" in again.out
    assert timed_rows("stopped") == before
    assert evaluations == [1, 2, 3, 4]

    longer = completed(words, "--stop.patience 3 --resume")
    assert evaluations == [*range(1, STEPS + 1)], "the count goes on: step 5 is an improvement"
    assert "stopped early" not in longer.out


def test_evaluations_from_before_a_set_was_added_do_not_end_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluations = scripted(monkeypatch, {1: 5.0, 2: 4.0, 3: 3.0, 4: 2.0})
    words = f"--workdir added {WORDS} --optimizer.schedule constant"
    completed(words, "--steps 2")
    other = "--data.evaluate other=text:text.txt --stop.metric eval/other/loss --stop.patience 2"
    done = completed(words, "--steps 4 --resume", other)
    assert "stopped early" not in done.out
    # Step 2 is evaluated once more, on the set that was added.
    assert evaluations == [1, 2, 2, 3, 4]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--stop.patience 0", "stop.patience is 0; write a number of at least 1"),
        (
            "--stop.patience 2 --stop.min-delta -0.1",
            "stop.min_delta is -0.1; write a number of at least 0",
        ),
        ("--stop.min-delta 0.1", "add --stop.patience"),
        ("--stop.patience 2 --log.eval-every-steps None", "stop.patience 2 goes by evaluations"),
        ("--stop.patience 2 --stop.metric accuracy", "did you mean eval_accuracy?"),
    ],
)
def test_what_makes_no_sense_is_refused(
    flags: str, message: str, folder: Path, tmp_path: Path
) -> None:
    assert message in refused(f"--workdir {tmp_path}/run", WORDS, flags)
