"""The best checkpoints by an evaluation stay beside the newest, and a run can go back to them."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from mupax.train.checkpoints import checkpointer, saved_run
from mupax.train.checkpoints.workdir import WorkdirError
from mupax.train.reuse import trained
from mupax.train.run import loop
from mupax.train.run.restart import supervisor
from tests.fixtures.commands import Done, command, succeeded
from tests.fixtures.devices import one_device
from tests.fixtures.programs import shared_programs
from tests.fixtures.small_runs import (
    checkpoints,
    completed,
    folder,
    record_of,
    refused,
    rows,
    untrained,
)

__all__ = ["folder", "one_device", "shared_programs", "untrained"]  # fixtures

LAST = 5
LOSSES = {1: 5.0, 2: 3.0, 3: math.nan, 4: 3.0, 5: 6.0}
"""Of step 4 as good as of step 2, and later; of step 3 none."""
NEWEST = (
    "--log.eval-every-steps 1 --checkpoint.every-steps 100 --checkpoint.keep 1 "
    f"--log.no-tensorboard --steps {LAST}"
)
BEST = f"{NEWEST} --checkpoint.keep-best 2"


def scripted(patch: pytest.MonkeyPatch, losses: dict[int, float]) -> list[int]:
    """Let evaluations measure these losses, and return the steps of those that were done."""
    steps: list[int] = []
    evaluation = loop.evaluation

    def noted(session: Any, report: Any, state: Any, step: int) -> None:
        steps.append(step)
        evaluation(session, report, state, step)

    def measured(*_: Any, **__: Any) -> loop.Scores:
        accuracy = 0.5 if steps[-1] == 4 else 0.25
        return loop.Scores({"loss": losses[steps[-1]], "accuracy": accuracy}, 1)

    patch.setattr(loop, "evaluation", noted)
    patch.setattr(loop, "evaluate", measured)
    patch.setattr(loop.finish, "leave", lambda *_: None)
    return steps


@pytest.fixture(scope="module")
def best_run(folder: Path) -> Done:
    """A run whose best two checkpoints are those of steps 2 and 4."""
    bests: list[int] = []
    prune = checkpointer.CheckpointFolder.prune

    def watched(self: Any) -> None:
        bests.extend(checkpointer.ranked(self.folder, "eval_loss")[:1])
        prune(self)
        bests.extend(checkpointer.ranked(self.folder, "eval_loss")[:1])

    with pytest.MonkeyPatch.context() as patch:
        scripted(patch, LOSSES)
        patch.setattr(checkpointer.CheckpointFolder, "prune", watched)
        done = completed("--workdir kept", BEST)
    # Whenever a kill comes: what is better has its evaluation on disk before anything is deleted.
    assert list(dict.fromkeys(bests)) == [1, 2]
    return done


def test_the_best_checkpoints_stay_beside_the_newest(best_run: Done) -> None:
    assert checkpoints("kept") == [2, 4, LAST]
    assert checkpointer.ranked(Path("kept/checkpoints"), "eval_loss") == [2, 4, LAST], (
        "of equal ones the first"
    )
    assert checkpointer.ranked(Path("kept/checkpoints"), "eval_accuracy") == [4, 2, LAST]


def test_control_without_it_the_newest_alone_stay(
    best_run: Done, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, LOSSES)
    completed("--workdir newest", NEWEST)
    assert checkpoints("newest") == [LAST]
    assert not list(Path("newest").rglob(checkpointer.FILE))
    with pytest.raises(
        WorkdirError,
        match=rf"no checkpoint of .* was saved with a finite eval_loss.*There are the steps {LAST}",
    ):
        saved_run.find(Path("newest"), "best")


def test_the_highest_accuracy_is_the_best(best_run: Done, untrained: list, tmp_path: Path) -> None:
    copy = shutil.copytree("kept", tmp_path / "run")
    words = f"{NEWEST} --checkpoint.keep-best 1 --checkpoint.best-metric eval_accuracy"
    completed(words, f"--workdir {copy} --resume")
    assert checkpoints(copy) == [4, LAST]
    assert saved_run.find(copy, "best").step == 4


def test_the_best_is_named_wherever_a_step_is(best_run: Done) -> None:
    best = Path("kept/checkpoints/best")
    assert saved_run.find(Path("kept"), "best").step == saved_run.find(best).step == 2
    assert trained.describe(best).exact_path == Path("kept/checkpoints/2").absolute()
    assert trained.read(best).preset["step"] == 2
    assert trained.read(Path("kept"), "best").preset["step"] == 2
    with pytest.raises(WorkdirError, match="is step best, and --step says 4"):
        saved_run.find(best, 4)


@pytest.mark.parametrize("lost", [None, "kill", "damage"])
def test_what_is_best_is_read_from_what_is_saved(
    lost: str | None, best_run: Done, untrained: list, tmp_path: Path
) -> None:
    """A kill before an evaluation was kept in its checkpoint, or a damaged file, takes no checkpoint from the best."""
    copy = tmp_path / "run"
    shutil.copytree("kept", copy)
    file = copy / "checkpoints" / "2" / checkpointer.FILE
    before = file.read_text()
    if lost == "kill":
        file.unlink()
    elif lost == "damage":
        file.write_text(before.replace("3.0", "9.0"))
    assert checkpointer.ranked(copy / "checkpoints", "eval_loss")[0] == (2 if lost is None else 4)
    completed(f"--workdir {copy} --resume", BEST)
    assert untrained == [(LAST, LAST)]
    assert file.read_text() == before
    assert checkpoints(copy) == [2, 4, LAST]


# Going back


def test_a_run_goes_on_from_any_step_and_what_came_after_is_a_run_of_its_own(
    best_run: Done, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    copy = tmp_path / "run"
    shutil.copytree("kept", copy)
    before = rows(copy)
    scripted(monkeypatch, LOSSES)
    done = completed(f"--workdir {copy} --resume --resume-from best", BEST)
    assert f"resuming lm-tiny at step 2 of {LAST}" in done.out
    assert f"set aside as a run of its own in branches/{LAST}: steps 4, {LAST}" in done.out
    assert str(rows(copy)) == str(before), "bitwise the same steps again"
    assert checkpoints(copy) == [2, 4, LAST]
    branch = copy / "branches" / str(LAST)
    assert checkpoints(branch) == [4, LAST]
    assert str(rows(branch)) == str(before)
    assert saved_run.find(branch).verified()
    assert saved_run.find(branch, "best").step == 4
    assert record_of(copy)["run"] == record_of(branch)["run"]

    monkeypatch.setattr(loop, "train_with_rollbacks", lambda session, position: position.state)
    completed(f"--workdir {copy} --resume --resume-from 4", BEST)
    assert sorted(path.name for path in (copy / "branches").iterdir()) == [str(LAST), f"{LAST}.1"]
    assert checkpoints(copy) == [2, 4]


@pytest.mark.parametrize(
    ("flags", "harm", "message"),
    [
        ("--resume-from 3", None, "has no checkpoint of step 3; there are 2, 4, 5"),
        ("--resume-from 2", "2", "checkpoint 2 is damaged"),
        ("--resume-from 2 --steps 1", None, "the run has done 2 steps and --steps is 1"),
    ],
)
def test_a_step_that_cannot_be_gone_back_to_changes_nothing(
    flags: str, harm: str | None, message: str, best_run: Done, untrained: list, tmp_path: Path
) -> None:
    copy = tmp_path / "run"
    shutil.copytree("kept", copy)
    if harm:
        files = (copy / "checkpoints" / harm).rglob("d/*")
        data = max(files, key=lambda path: path.stat().st_size)
        data.write_bytes(b"\0" * data.stat().st_size)
    assert message in refused(f"--workdir {copy} --resume", BEST, flags)
    assert checkpoints(copy) == [2, 4, LAST]
    assert not untrained
    assert not (copy / "branches").exists()


def test_a_run_that_is_started_again_does_not_go_back_again() -> None:
    words = ["lm-tiny", "--resume", "--resume-from", "4", "--steps", "8"]
    assert supervisor._without(words, "--resume-from") == ["lm-tiny", "--resume", "--steps", "8"]
    words = ["--resume-from=4", "--seed", "4"]
    assert supervisor._without(words, "--resume-from") == ["--seed", "4"]


# Refusals


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--checkpoint.keep-best 0", "checkpoint.keep_best is 0; write a number of at least 1"),
        ("--checkpoint.keep-best -1", "checkpoint.keep_best is -1; write a number of at least 1"),
        (
            "--checkpoint.keep-best 1 --log.eval-every-steps None",
            "checkpoint.keep_best 1 goes by evaluations",
        ),
        ("--checkpoint.best-metric eval_accuracy", "add --checkpoint.keep-best 1"),
        ("--checkpoint.keep-best 1 --checkpoint.best-metric eval_los", "did you mean eval_loss?"),
        (
            "--checkpoint.keep-best 1 --checkpoint.best-metric eval/cod/loss --data.evaluate code=text:text.txt",
            "did you mean eval/code/loss?",
        ),
        ("--resume-from 2", "--resume-from 2 is for a run that goes on; add --resume"),
        ("--resume --resume-from 0", "resume_from is 0; write a number of at least 1"),
        ("--resume --resume-from best", "has no checkpoint yet"),
    ],
)
def test_what_makes_no_sense_is_refused(
    flags: str, message: str, folder: Path, untrained: list, tmp_path: Path
) -> None:
    assert message in refused(f"--workdir {tmp_path}/run --log.eval-every-steps 1", flags)
    assert not untrained


@pytest.mark.parametrize("without", ["nothing", "metrics.jsonl", "evaluation.json"])
def test_the_list_of_checkpoints_has_losses_and_marks_the_best(
    best_run: Done, without: str, tmp_path: Path
) -> None:
    copy = shutil.copytree("kept", tmp_path / "copy")
    for file in copy.rglob(without):
        file.unlink()
    done = succeeded(f"checkpoints {copy} --json {tmp_path}/list.json")
    listed = {row["step"]: row for row in json.loads((tmp_path / "list.json").read_text())}
    measured = {step: row["metrics"] for step, row in listed.items() if row["metrics"]}
    eval_losses = {step: metrics["eval_loss"] for step, metrics in measured.items()}
    assert eval_losses == {step: LOSSES[step] for step in (2, 4, LAST)}
    assert [step for step, row in listed.items() if row["best"]] == [2]
    if without != "metrics.jsonl":
        assert all(row["metrics"]["loss"] > 0 for row in listed.values())
    head, *lines = done.out.splitlines()
    assert "eval_loss" in head
    # The mark stands between the losses and the size; behind the age stands why each of them stays.
    assert [line.split()[0] for line in lines if re.search(r"\d +best +\d", line)] == ["2"]
    assert [line.split()[0] for line in lines if re.search(r":\d\d +best", line)] == ["2", "4"]
    assert "--step 2" in lines[-1]
    # An accuracy is better where it is more.
    record = record_of(copy)
    record["config"]["checkpoint"]["best_metric"] = "eval_accuracy"
    (copy / "config.json").write_text(json.dumps(record))
    assert "--step 4" in command(f"checkpoints {copy}").out


def test_a_run_that_was_not_evaluated_has_losses_and_no_best(
    best_run: Done, tmp_path: Path
) -> None:
    copy = shutil.copytree("kept", tmp_path / "copy")
    for file in copy.rglob("evaluation.json"):
        file.unlink()
    file = copy / "metrics.jsonl"
    trained_rows = [row for row in file.read_text().splitlines() if "eval_" not in row]
    file.write_text("\n".join(trained_rows) + '\n{"step": 5, "lo')
    out = command(f"checkpoints {copy}").out
    assert "loss" in out.splitlines()[0]
    assert "best" not in out
    file.unlink()
    assert "loss" not in command(f"checkpoints {copy}").out
