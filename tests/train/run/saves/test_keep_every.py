"""`--checkpoint.keep-every`: what stays through a run, kills, resumes without the flag and going back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mupax.train.checkpoints import checkpointer
from tests.fixtures.commands import Done, command, succeeded
from tests.fixtures.devices import one_device
from tests.fixtures.programs import shared_programs
from tests.fixtures.small_runs import checkpoints, completed, folder, refused
from tests.train.run.saves.test_best_checkpoint import LOSSES, scripted

__all__ = ["folder", "one_device", "shared_programs"]  # fixtures

LAST = 7
MEASURED = {**LOSSES, **dict.fromkeys(range(5, 20), 6.0)}
"""Loss of every evaluation; the one of step 2 is the best."""
ALL = (
    "--checkpoint.every-steps 1 --checkpoint.keep 1 --log.eval-every-steps 1 "
    f"--log.no-tensorboard --steps {LAST}"
)
EVERY = "--checkpoint.keep-every 3"
BEST = "--checkpoint.keep-best 1"


@pytest.fixture(scope="module")
def every_run(folder: Path) -> Done:
    """A run that was never asked about what it does not keep: the best is 2, every third stays, and the last is the newest."""
    with pytest.MonkeyPatch.context() as patch:
        scripted(patch, MEASURED)
        done = completed("--workdir every", ALL, EVERY, BEST)
    return done


def listed(workdir: Path) -> dict[int, str | None]:
    """Step to the reason that `mupax checkpoints` gives."""
    file = workdir / "list.json"
    succeeded(f"checkpoints {workdir} --json {file}")
    return {row["step"]: row["stays_as"] for row in json.loads(file.read_text())}


def longer(steps: int) -> str:
    return f"{ALL} --steps {steps} --resume --resume-change schedule"


def test_multiples_stay_beside_the_newest_and_the_best(every_run: Done) -> None:
    assert checkpoints("every") == [2, 3, 6, LAST]
    assert listed(Path("every")) == {2: "best", 3: "every 3", 6: "every 3", LAST: "newest"}
    head, *lines = command("checkpoints every").out.splitlines()
    assert "stays as" in head
    assert [line.split()[0] for line in lines if " every 3 " in line] == ["3", "6"]


def test_a_run_whose_metric_is_of_a_missing_plugin_is_listed_all_the_same(
    every_run: Done, tmp_path: Path
) -> None:
    shutil.copytree("every", tmp_path / "run")
    file = tmp_path / "run" / "config.json"
    record = json.loads(file.read_text())
    record["plugins"] = ["no_such_module"]
    record["config"]["checkpoint"]["best_metric"] = "eval_median"
    file.write_text(json.dumps(record))
    assert listed(tmp_path / "run") == {2: "unknown", 3: "every 3", 6: "every 3", LAST: "newest"}


def test_control_without_the_flag_they_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, MEASURED)
    completed("--workdir without", ALL, "--steps 4")
    assert checkpoints("without") == [4]


def test_a_multiple_is_saved_where_nothing_else_is_due(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, MEASURED)
    completed("--workdir rare", ALL, EVERY, "--checkpoint.every-steps 100")
    assert checkpoints("rare") == [3, 6, LAST]


def test_a_resume_without_the_flag_deletes_none_and_keeps_no_more(
    every_run: Done, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree("every", tmp_path / "run")
    scripted(monkeypatch, MEASURED)
    done = completed(f"--workdir {copy}", longer(10))
    assert "changed since: checkpoint.keep_every 3 -> None" in done.out
    assert "the checkpoints 2 are deleted" in done.out, "the best one, and no other"
    assert checkpoints(copy) == [3, 6, 10]
    assert listed(copy) == {3: "every 3", 6: "every 3", 10: "newest"}

    # Back to 6 and on, without the flag or with another interval: what was kept before 6 still stays.
    completed(f"--workdir {copy} --resume-from 6 --checkpoint.keep-every 4", longer(9))
    assert checkpoints(copy) == [3, 6, 8, 9]
    assert checkpoints(copy / "branches" / "10") == [10]


def test_what_a_kill_left_undeleted_goes_at_the_next_save(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill between a save and the deletion after it leaves the checkpoint that was to go."""
    scripted(monkeypatch, MEASURED)
    with monkeypatch.context() as patch:
        patch.setattr(checkpointer.CheckpointFolder, "prune", lambda self: None)
        completed("--workdir killed", ALL, EVERY, "--steps 5")
    assert checkpoints("killed") == [1, 2, 3, 4, 5]
    undeleted = {step for step, reason in listed(Path("killed")).items() if reason is None}
    assert undeleted == {1, 2, 4}
    # config.json is lost, too: the newest checkpoint has what was recorded.
    Path("killed/config.json").unlink()
    completed("--workdir killed", longer(7))
    assert checkpoints("killed") == [3, 7]


@pytest.mark.parametrize("value", ["0", "-3"])
def test_an_interval_below_one_is_refused(value: str, folder: Path) -> None:
    assert f"checkpoint.keep_every is {value}; write a number of at least 1" in refused(
        f"--workdir refused --checkpoint.keep-every {value}"
    )
