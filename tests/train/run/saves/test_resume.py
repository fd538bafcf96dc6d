"""A run that goes on with other settings than before: what is shown, what is refused, and what the record holds of both."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from mupax.__main__ import main
from mupax.train.config.recipes import RECIPES
from tests.fixtures.programs import shared_programs
from tests.train.checkpoints.test_checkpointer import (
    STEPS,
    Done,
    folder,
    interrupted,
    rows,
    train,
    untrained,
    whole,
)

__all__ = ["folder", "shared_programs", "untrained", "whole"]  # fixtures

WARMUP, PEAK = 2, RECIPES["lm-tiny"]().optimizer.peak_lr


def record_of(workdir: Path | str) -> dict[str, Any]:
    return json.loads(Path(workdir, "config.json").read_text())


def cosine(step: int, steps: int) -> float:
    return PEAK * 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (steps - WARMUP)))


def plain(text: str) -> str:
    """As one line, however it was broken."""
    return " ".join(text.split())


@pytest.mark.core
@pytest.mark.parametrize(("earlier", "steps"), [(300, 10), (STEPS, 20)], ids=["shorter", "longer"])
def test_a_schedule_that_jumps_is_refused_unless_it_is_meant(
    earlier: int, steps: int, whole: Done, untrained: list
) -> None:
    copy = interrupted("whole", f"jump-{earlier}", 6)
    before = record_of(copy)
    before["config"]["steps"] = earlier
    (copy / "config.json").write_text(json.dumps(before))
    words = ("--workdir", str(copy), "--resume", "--steps", str(steps))
    refused = train(*words)
    assert refused.code == 2
    assert f"with steps {earlier} -> {steps} the learning rate of step 7 jumps" in refused.err
    assert f"from {cosine(6, earlier):.3g} to {cosine(6, steps):.3g}" in refused.err
    assert "write --resume-change schedule if that is meant" in refused.err
    assert len(refused.err.splitlines()) == 1
    assert not untrained
    assert record_of(copy) == before

    done = train(*words, "--resume-change", "schedule")
    assert done.code == 0, done.err
    assert untrained == [(6, 6)]
    assert f"resuming lm-tiny at step 6 of {steps}" in done.out
    assert f"changed since: steps {earlier} -> {steps}" in plain(done.out)
    after = record_of(copy)
    assert after["config"]["steps"] == steps
    (first,) = after["segments"]
    assert {"run": after["run"], **first} == {"until_step": 6, **before}


@pytest.mark.core
@pytest.mark.parametrize(
    ("before", "words", "refused"),
    [
        ({"schedule": "constant"}, "--steps 100 --optimizer.schedule constant", False),
        (
            {"schedule": "wsd", "decay_steps": 1},
            "--steps 100 --optimizer.schedule wsd --optimizer.decay-steps 20",
            False,
        ),
        (
            {"schedule": "wsd", "decay_steps": 4},
            "--steps 100 --optimizer.schedule wsd --optimizer.decay-steps 20",
            True,
        ),
        ({"schedule": "constant"}, "--optimizer.schedule cosine", True),
        (
            {"schedule": "constant"},
            f"--optimizer.schedule constant --optimizer.peak-lr {PEAK * 1.2}",
            False,
        ),
        (
            {"schedule": "constant"},
            f"--optimizer.schedule constant --optimizer.peak-lr {PEAK * 2}",
            True,
        ),
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
    before: dict[str, Any], words: str, refused: bool, whole: Done, untrained: list, tmp_path: Path
) -> None:
    copy = tmp_path / "run"
    interrupted("whole", str(copy), 6)
    recorded = record_of(copy)
    recorded["config"]["optimizer"] |= before
    (copy / "config.json").write_text(json.dumps(recorded))
    done = train("--workdir", str(copy), "--resume", *words.split())
    assert done.code == (2 if refused else 0), done.err
    assert ("the learning rate of step 7 jumps" in done.err) == refused
    assert untrained == ([] if refused else [(6, 6)])


@pytest.mark.core
def test_fewer_steps_than_are_done_are_refused(whole: Done, untrained: list) -> None:
    before = record_of("whole")
    for words in (["--steps", "2"], ["--steps", "2", "--resume-change", "schedule"]):
        done = train("--workdir", "whole", "--resume", *words)
        assert done.code == 2
        assert (
            f"the run has done {STEPS} steps and --steps is 2; write --steps {STEPS} to end it there"
            in done.err
        )
        assert "resuming" not in done.out
    assert not untrained
    assert record_of("whole") == before


@pytest.mark.core
def test_every_change_is_shown_by_name_and_every_record_stays(whole: Done, untrained: list) -> None:
    copy = interrupted("whole", "changes", 6)
    words = (
        "--workdir",
        str(copy),
        "--resume",
        "--optimizer.clip-norm",
        "0.5",
        "--accumulation-steps",
        "2",
    )
    done = train(*words, "--mesh.fsdp", "2", "--log.no-tensorboard", "--checkpoint.keep", "3")
    assert done.code == 0, done.err
    changes = [line for line in done.out.splitlines() if line.startswith("changed since: ")]
    assert changes == [
        "changed since: accumulation_steps 1 -> 2",
        "changed since: checkpoint.keep 2 -> 3",
        "changed since: mesh.fsdp 1 -> 2",
        "changed since: optimizer.clip_norm 1.0 -> 0.5",
        "changed since: mesh: data=8 -> data=4 fsdp=2 (bits can differ)",
    ]
    assert len(record_of(copy)["segments"]) == 1

    again = train(*words, "--mesh.fsdp", "2", "--log.no-tensorboard", "--checkpoint.keep", "3")
    assert again.code == 0, again.err
    assert "changed since" not in again.out
    assert len(record_of(copy)["segments"]) == 1, "nothing has changed"

    third = train(*words, "--mesh.fsdp", "4")
    assert third.code == 0, third.err
    assert "changed since: mesh.fsdp 2 -> 4" in third.out
    fsdp = [
        part["config"]["mesh"]["fsdp"] for part in (*record_of(copy)["segments"], record_of(copy))
    ]
    assert fsdp == [1, 2, 4]
    assert untrained == [(6, 6)] * 3


@pytest.mark.core
@pytest.mark.parametrize(
    ("group", "name", "before", "line"),
    [
        ("options", "jax_enable_x64", True, "jax_enable_x64: True -> False (bits can differ)"),
        (
            "variables",
            "XLA_FLAGS",
            "--xla_cpu_max_isa=SSE4_2",
            "XLA_FLAGS: --xla_cpu_max_isa=SSE4_2 -> ",
        ),
        ("devices", "devices", 4, "devices: 4 -> 8 (bits can differ)"),
        ("processor", "instructions", ["avx_of_old"], "processor's instructions: avx_of_old -> "),
    ],
)
def test_another_environment_is_told_and_refused_where_the_run_is_to_go_on_exactly(
    group: str, name: str, before: Any, line: str, whole: Done, untrained: list, tmp_path: Path
) -> None:
    copy = interrupted("whole", str(tmp_path / "run"), 6)
    recorded = record_of(copy)
    recorded["environment"][group][name] = before
    (copy / "config.json").write_text(json.dumps(recorded))
    refused = train("--workdir", str(copy), "--resume", "--resume-exact")
    assert refused.code == 2
    assert line in refused.err
    assert record_of(copy) == recorded
    assert not untrained

    done = train("--workdir", str(copy), "--resume")
    assert done.code == 0, done.err
    (told,) = [row for row in done.out.splitlines() if row.startswith("changed since: ")]
    assert line in told
    assert "bits can differ" in told
    assert record_of(copy)["segments"][0]["environment"][group][name] == before

    again = train("--workdir", str(copy), "--resume", "--resume-exact")
    assert again.code == 0, again.err
    assert "changed since" not in again.out
    assert untrained == [(6, 6)] * 2


@pytest.mark.core
def test_a_run_that_recorded_no_environment_goes_on_with_one_line(
    whole: Done, untrained: list, tmp_path: Path
) -> None:
    copy = interrupted("whole", str(tmp_path / "run"), 6)
    recorded = record_of(copy)
    del recorded["environment"]
    recorded["versions"]["jax"] = "0.1"
    (copy / "config.json").write_text(json.dumps(recorded))
    refused = train("--workdir", str(copy), "--resume", "--resume-exact")
    assert refused.code == 2
    assert "--resume-exact" in refused.err
    done = train("--workdir", str(copy), "--resume")
    assert done.code == 0, done.err
    lines = [row for row in done.out.splitlines() if "environment" in row or "changed since" in row]
    assert len(lines) == 1


@pytest.mark.core
def test_exact_goes_with_other_steps_and_not_with_other_rounding(
    whole: Done, untrained: list, tmp_path: Path
) -> None:
    copy = interrupted("whole", str(tmp_path / "run"), 6)
    words = ("--workdir", str(copy), "--resume", "--resume-exact")
    refused = train(*words, "--accumulation-steps", "2")
    assert refused.code == 2
    assert "accumulation_steps 1 -> 2" in refused.err
    assert train(*words, "--steps", "8", "--resume-change", "schedule").code == 0
    assert untrained == [(6, 6)]
    alone = train("--workdir", str(tmp_path / "new"), "--resume-exact")
    assert alone.code == 2
    assert "add --resume" in alone.err


def test_a_run_of_a_constant_rate_goes_further(whole: Done) -> None:
    words = ("--optimizer.schedule", "constant", "--log.no-samples", "--log.no-tensorboard")
    assert train("--workdir", "level", *words, "--steps", "4").code == 0
    done = train("--workdir", "level", *words, "--steps", "6", "--resume")
    assert done.code == 0, done.err
    assert "changed since: steps 4 -> 6" in done.out
    assert train("--workdir", "level-at-once", *words, "--steps", "6").code == 0
    losses = [
        [row["loss"] for row in rows(name) if "loss" in row] for name in ("level", "level-at-once")
    ]
    assert losses[0] == losses[1]


@pytest.mark.core
def test_what_may_change_is_named_and_only_on_resume(folder: Path, tmp_path: Path) -> None:
    done = train("--workdir", str(tmp_path / "new"), "--resume-change", "schedule")
    assert done.code == 2
    assert "--resume-change schedule is for a run that goes on; add --resume" in done.err
    done = train("--workdir", str(tmp_path / "new"), "--resume", "--resume-change", "rate")
    assert done.code == 2
    assert "'data', 'schedule'" in done.err or "write schedule or data" in done.err
    assert not (tmp_path / "new").exists()


@pytest.mark.core
def test_a_record_of_another_version_is_read_as_far_as_it_goes(
    whole: Done, untrained: list
) -> None:
    """Fields that it does not have yet take this run's value; fields that are gone do not matter."""
    copy = Path("older")
    shutil.copytree("whole", copy)
    recorded = record_of(copy)
    del recorded["config"]["resume_change"], recorded["config"]["faults"]
    recorded["config"]["optimizer"]["gone"] = 1
    (copy / "config.json").write_text(json.dumps(recorded))
    done = train(
        "--workdir", str(copy), "--resume", "--steps", "12", "--resume-change", "schedule", "data"
    )
    assert done.code == 0, done.err
    assert [line for line in done.out.splitlines() if line.startswith("changed since")] == [
        f"changed since: steps {STEPS} -> 12"
    ]
    assert record_of(copy)["segments"][0]["config"]["optimizer"]["gone"] == 1


@pytest.mark.core
def test_a_run_with_experts_goes_on_as_if_it_had_not_stopped(folder: Path) -> None:
    """With a bias that moves by loads, of state no optimizer has, and tokens that find no room."""
    routing = "--model.routing.balance bias --model.routing.capacity-factor 0.75"
    words = (*f"--model.experts 4 --model.mlp-ratio 2 {routing}".split(), "--steps", "4")
    done = train("--workdir", "experts", *words)
    assert done.code == 0, done.err
    copy = interrupted("experts", "experts-resumed", 2)
    assert train("--workdir", str(copy), "--resume", *words).code == 0
    assert rows(copy) == rows("experts")
    assert rows(copy)[-2]["dropped_tokens"] > 0


@pytest.mark.core
def test_a_run_goes_on_by_its_workdir_alone(
    whole: Done, untrained: list, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = interrupted("whole", "my run [1]", 6)
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
    (copy / "config.json").write_text(json.dumps(record))
    for words in (["--resume", "--workdir", str(copy)], [f"--workdir={copy}", "--resume"]):
        assert main(["train", *words]) == 0, words
        out = capsys.readouterr().out
        assert f"resuming finetune at step 6 of {STEPS}" in out
        assert "changed since" not in plain(out)
    assert untrained == [(6, 6), (6, 6)]
    after = record_of(copy)["config"]
    assert after["workdir"] == str(copy)
    assert after["resume_from"] is None
    # Flags stand above the record, and are checked as after a recipe.
    assert (
        main(
            [
                "train",
                "--resume",
                "--workdir",
                str(copy),
                "--steps",
                "9",
                "--resume-change",
                "schedule",
            ]
        )
        == 0
    )
    assert f"changed since: steps {STEPS} -> 9" in plain(capsys.readouterr().out)
    assert main(["train", "--resume", "--workdir", str(copy), "--stepz", "9"]) == 2
    assert "--steps" in capsys.readouterr().err
    # A recipe that does not fit is refused as it was.
    assert main(["train", "vit-digits", "--resume", "--workdir", str(copy)]) == 2


@pytest.mark.core
@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--resume"], "--workdir"),
        (["--resume", "--workdir"], "--workdir"),
        (["--resume", "--workdir", "nothing-here"], "nothing-here"),
        (["--resume", "--workdir", "text.txt"], "text.txt"),
        (["--workdir", "nothing-here"], "nothing-here"),
        (["--workdir", "whole"], "--resume"),
        (["--steps", "3"], "recipe"),
    ],
)
def test_a_command_line_without_recipe_or_run_is_refused(
    words: list[str], named: str, whole: Done, untrained: list, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert named in err
    assert not untrained
