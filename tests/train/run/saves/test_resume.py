"""A run that goes on with other settings than before: what is shown, refused and recorded."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from mupax.train.config import record
from mupax.train.config.recipes import RECIPES
from mupax.train.run import resume
from tests.fixtures.commands import Done, refusal, succeeded
from tests.fixtures.programs import shared_programs
from tests.fixtures.small_runs import (
    STEPS,
    completed,
    finished_run,
    folder,
    interrupted,
    losses,
    record_of,
    refused,
    rows,
    train,
    untrained,
    whole,
)

__all__ = ["finished_run", "folder", "shared_programs", "untrained", "whole"]  # fixtures

WARMUP = 2
PEAK = RECIPES["lm-tiny"]().optimizer.peak_lr


@pytest.fixture
def copy(whole: Done, tmp_path: Path) -> Path:
    """The run as it was after step 6, in a folder of the test's own."""
    return interrupted("whole", str(tmp_path / "run"), 6)


def rewrite(workdir: Path, record: dict[str, Any]) -> None:
    """Write another content of config.json."""
    (workdir / "config.json").write_text(json.dumps(record))


def changes(done: Done) -> list[str]:
    """Return the changes that a resumed run announces."""
    announced = [line for line in done.out.splitlines() if line.startswith("changed since: ")]
    return [line.removeprefix("changed since: ") for line in announced]


def cosine(step: int, steps: int) -> float:
    return PEAK * 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (steps - WARMUP)))


@pytest.mark.core
@pytest.mark.parametrize(("earlier", "steps"), [(300, 10), (STEPS, 20)], ids=["shorter", "longer"])
def test_a_schedule_that_jumps_is_refused_unless_it_is_meant(
    earlier: int, steps: int, copy: Path, untrained: list
) -> None:
    before = record_of(copy)
    before["config"]["steps"] = earlier
    rewrite(copy, before)
    words = f"--workdir {copy} --resume --steps {steps}"
    refused = train(words)
    assert refused.code == 2
    assert f"with steps {earlier} -> {steps} the learning rate of step 7 jumps" in refused.err
    assert f"from {cosine(6, earlier):.3g} to {cosine(6, steps):.3g}" in refused.err
    assert "write --resume-change schedule if that is meant" in refused.err
    assert len(refused.err.splitlines()) == 1
    assert not untrained
    assert record_of(copy) == before

    done = completed(words, "--resume-change schedule")
    assert untrained == [(6, 6)]
    assert f"resuming lm-tiny at step 6 of {steps}" in done.out
    assert f"changed since: steps {earlier} -> {steps}" in done.text
    after = record_of(copy)
    assert after["config"]["steps"] == steps
    (first,) = after["segments"]
    assert {"run": after["run"], **first} == {"until_step": 6, **before}


CONSTANT = {"schedule": "constant"}
LATE_DECAY = "--steps 100 --optimizer.schedule wsd --optimizer.decay-steps 20"


@pytest.mark.core
@pytest.mark.parametrize(
    ("before", "words", "refused"),
    [
        (CONSTANT, "--steps 100 --optimizer.schedule constant", False),
        ({"schedule": "wsd", "decay_steps": 1}, LATE_DECAY, False),
        ({"schedule": "wsd", "decay_steps": 4}, LATE_DECAY, True),
        (CONSTANT, "--optimizer.schedule cosine", True),
        (CONSTANT, f"--optimizer.schedule constant --optimizer.peak-lr {PEAK * 1.2}", False),
        (CONSTANT, f"--optimizer.schedule constant --optimizer.peak-lr {PEAK * 2}", True),
        ({}, "--optimizer.warmup-steps 1", False),
    ],
    ids=[
        "constant",
        "wsd-before-decay",
        "wsd-in-decay",
        "another-shape",
        "rate-a-little",
        "rate-twice",
        "warm-up-is-over",
    ],
)
def test_a_schedule_may_change_where_the_rate_hardly_does(
    before: dict[str, Any], words: str, refused: bool, copy: Path, untrained: list
) -> None:
    recorded = record_of(copy)
    recorded["config"]["optimizer"] |= before
    rewrite(copy, recorded)
    done = train(f"--workdir {copy} --resume", words)
    assert done.code == (2 if refused else 0), done.err
    assert ("the learning rate of step 7 jumps" in done.err) == refused
    assert untrained == ([] if refused else [(6, 6)])


@pytest.mark.core
def test_fewer_steps_than_are_done_are_refused(whole: Done, untrained: list) -> None:
    before = record_of("whole")
    for words in ("", "--resume-change schedule"):
        done = train("--workdir whole --resume --steps 2", words)
        assert done.code == 2
        advice = f"write --steps {STEPS} to end it there"
        assert f"the run has done {STEPS} steps and --steps is 2; {advice}" in done.err
        assert "resuming" not in done.out
    assert not untrained
    assert record_of("whole") == before


@pytest.mark.core
def test_every_change_is_shown_by_name_and_every_record_stays(copy: Path, untrained: list) -> None:
    words = f"--workdir {copy} --resume --optimizer.clip-norm 0.5 --accumulation-steps 2"
    more = "--log.no-tensorboard --checkpoint.keep 3"
    done = completed(words, more, "--mesh.fsdp 2")
    assert changes(done) == [
        "accumulation_steps 1 -> 2",
        "checkpoint.keep 2 -> 3",
        "mesh.fsdp 1 -> 2",
        "optimizer.clip_norm 1.0 -> 0.5",
        "mesh: data=8 -> data=4 fsdp=2 (bits can differ)",
    ]
    assert len(record_of(copy)["segments"]) == 1

    again = completed(words, more, "--mesh.fsdp 2")
    assert "changed since" not in again.out
    assert len(record_of(copy)["segments"]) == 1, "nothing has changed"

    third = completed(words, "--mesh.fsdp 4")
    assert "changed since: mesh.fsdp 2 -> 4" in third.out
    parts = [*record_of(copy)["segments"], record_of(copy)]
    assert [part["config"]["mesh"]["fsdp"] for part in parts] == [1, 2, 4]
    assert untrained == [(6, 6)] * 3


OLD_FLAGS = "--xla_cpu_max_isa=SSE4_2"


@pytest.mark.core
@pytest.mark.parametrize(
    ("group", "name", "before", "line"),
    [
        ("options", "jax_enable_x64", True, "jax_enable_x64: True -> False (bits can differ)"),
        ("variables", "XLA_FLAGS", OLD_FLAGS, f"XLA_FLAGS: {OLD_FLAGS} -> "),
        ("devices", "devices", 4, "devices: 4 -> 8 (bits can differ)"),
        ("processor", "instructions", ["avx_of_old"], "processor's instructions: avx_of_old -> "),
    ],
)
def test_another_environment_is_told_and_refused_where_the_run_is_to_go_on_exactly(
    group: str, name: str, before: Any, line: str, copy: Path, untrained: list
) -> None:
    recorded = record_of(copy)
    recorded["environment"][group][name] = before
    rewrite(copy, recorded)
    words = f"--workdir {copy} --resume"
    assert line in refused(words, "--resume-exact")
    assert record_of(copy) == recorded
    assert not untrained

    done = completed(words)
    (change,) = changes(done)
    assert line in change
    assert "bits can differ" in change
    assert record_of(copy)["segments"][0]["environment"][group][name] == before

    again = completed(words, "--resume-exact")
    assert "changed since" not in again.out
    assert untrained == [(6, 6)] * 2


@pytest.mark.core
def test_a_run_that_recorded_no_environment_goes_on_with_one_line(
    copy: Path, untrained: list
) -> None:
    recorded = record_of(copy)
    del recorded["environment"]
    recorded["versions"]["jax"] = "0.1"
    rewrite(copy, recorded)
    words = f"--workdir {copy} --resume"
    assert "--resume-exact" in refused(words, "--resume-exact")
    done = completed(words)
    lines = [row for row in done.out.splitlines() if "environment" in row or "changed since" in row]
    assert len(lines) == 1


@pytest.mark.core
def test_exact_goes_with_other_steps_and_not_with_other_rounding(
    copy: Path, untrained: list, tmp_path: Path
) -> None:
    words = f"--workdir {copy} --resume --resume-exact"
    assert "accumulation_steps 1 -> 2" in refused(words, "--accumulation-steps 2")
    completed(words, "--steps 8 --resume-change schedule")
    assert untrained == [(6, 6)]
    assert "add --resume" in refused(f"--workdir {tmp_path}/new --resume-exact")


def test_a_run_of_a_constant_rate_goes_further(folder: Path) -> None:
    words = "--optimizer.schedule constant --log.no-tensorboard"
    completed(words, "--workdir level --steps 3")
    done = completed(words, "--workdir level --steps 4 --resume")
    assert "changed since: steps 3 -> 4" in done.out
    completed(words, "--workdir level-at-once --steps 4")
    assert losses("level") == losses("level-at-once")


@pytest.mark.core
def test_what_may_change_is_named_and_only_on_resume(folder: Path, tmp_path: Path) -> None:
    workdir = tmp_path / "new"
    assert "--resume-change schedule is for a run that goes on; add --resume" in refused(
        f"--workdir {workdir} --resume-change schedule"
    )
    answer = refused(f"--workdir {workdir} --resume --resume-change rate")
    assert "'data', 'schedule'" in answer or "write schedule or data" in answer
    assert not workdir.exists()


@pytest.mark.core
def test_a_record_of_another_version_is_read_as_far_as_it_goes(
    whole: Done, untrained: list
) -> None:
    """Fields that it does not have yet take this run's value; fields that are gone do not matter."""
    copy = Path(shutil.copytree("whole", "older"))
    recorded = record_of(copy)
    del recorded["config"]["resume_change"], recorded["config"]["faults"]
    recorded["config"]["optimizer"]["gone"] = 1
    rewrite(copy, recorded)
    done = completed("--workdir older --resume --steps 12 --resume-change schedule data")
    assert changes(done) == [f"steps {STEPS} -> 12"]
    assert record_of(copy)["segments"][0]["config"]["optimizer"]["gone"] == 1


@pytest.mark.core
def test_a_run_with_experts_goes_on_as_if_it_had_not_stopped(folder: Path) -> None:
    """With a bias that moves by loads, of state no optimizer has, and tokens that find no room."""
    experts = "--model.experts 4 --model.mlp-ratio 2 --model.routing.capacity-factor 0.75"
    words = f"{experts} --model.routing.balance bias --steps 3"
    completed("--workdir experts", words)
    copy = interrupted("experts", "experts-resumed", 2)
    completed("--workdir experts-resumed --resume", words)
    assert rows(copy) == rows("experts")
    assert rows(copy)[-2]["dropped_tokens"] > 0


@pytest.mark.core
def test_a_run_goes_on_by_its_workdir_alone(whole: Done, untrained: list) -> None:
    workdir = "my run [1]"
    copy = interrupted("whole", workdir, 6)
    record = record_of(copy)
    # Fine-tuned runs have the name of a command, those of a user's own script any.
    record["config"] |= {
        "recipe": "finetune",
        "workdir": "elsewhere",
        "resume_change": ["data"],
        "resume_from": 2,
        "resume": True,
    }
    record["config"]["distributed"]["coordinator"] = "10.0.0.1:1234"
    rewrite(copy, record)
    for words in (f"--resume --workdir '{workdir}'", f"'--workdir={workdir}' --resume"):
        done = succeeded("train", words)
        assert f"resuming finetune at step 6 of {STEPS}" in done.out
        assert "changed since" not in done.text
    assert untrained == [(6, 6), (6, 6)]
    after = record_of(copy)["config"]
    assert after["workdir"] == workdir
    assert after["resume_from"] is None
    # Flags stand above the record, and are checked as after a recipe.
    resume = f"--resume --workdir '{workdir}'"
    further = succeeded("train", resume, "--steps 9 --resume-change schedule")
    assert f"changed since: steps {STEPS} -> 9" in further.text
    assert "--steps" in refusal("train", resume, "--stepz 9")
    # A recipe that does not fit is refused as it was.
    refusal("train vit-digits", resume)


@pytest.mark.core
@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--resume", "--workdir"),
        ("--resume --workdir", "--workdir"),
        ("--resume --workdir nothing-here", "nothing-here"),
        ("--resume --workdir text.txt", "text.txt"),
        ("--workdir nothing-here", "nothing-here"),
        ("--workdir whole", "--resume"),
        ("--steps 3", "recipe"),
    ],
)
def test_a_command_line_without_recipe_or_run_is_refused(
    words: str, named: str, whole: Done, untrained: list
) -> None:
    answer = refusal("train", words)
    assert answer.startswith("error: ")
    assert named in answer
    assert not untrained


@pytest.mark.core
@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        ({"adam_lr": 0.2}, "Adam "),
        ({"adam_lr": None}, "Adam "),
        ({"peak_lr": 0.5}, ""),
        ({"adam_lr": 0.0025}, None),
    ],
)
def test_both_learning_rates_of_muon_may_not_jump(
    changed: dict[str, float | None], kind: str | None
) -> None:
    config = RECIPES["lm-laptop"]()
    muon = dataclasses.replace(config.optimizer, peak_lr=0.05, adam_lr=0.002)
    run = dataclasses.replace(config, optimizer=muon, resume=True)
    resumed = dataclasses.replace(run, optimizer=dataclasses.replace(muon, **changed))
    recorded = record.to_json(run)
    if kind is None:
        resume.check(recorded, resumed, 300)
        return
    with pytest.raises(resume.ResumeError, match=rf"the {kind}learning rate of step 301 jumps"):
        resume.check(recorded, resumed, 300)
    resume.check(recorded, dataclasses.replace(resumed, resume_change=("schedule",)), 300)


@pytest.mark.core
def test_classes_with_other_names_are_refused() -> None:
    """Folders that were renamed have another order, and the readout keeps its own."""
    recorded = {"class_names": ["left", "mid", "up"]}
    with pytest.raises(resume.ResumeError, match=r"the classes left, mid, up, .* has above, left"):
        resume.check_classes(recorded, {"class_names": ["above", "left", "mid"]})
    resume.check_classes(recorded, {"class_names": ["left", "mid", "up"]})
    # Text has no classes, and older records have no names.
    resume.check_classes({}, {"class_names": ["above", "left", "mid"]})
    resume.check_classes(recorded, {})
