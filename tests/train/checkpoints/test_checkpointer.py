"""Stopping, continuing, and refusing to continue something else: checkpoints of real runs."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mupax.train.checkpoints import layout, workdir
from mupax.train.checkpoints.folder import steps
from mupax.train.parallel.processes import Processes
from mupax.train.reuse import trained
from mupax.train.run import loop
from tests.fixtures.commands import Done
from tests.fixtures.programs import shared_programs
from tests.fixtures.small_runs import (
    STEPS,
    checkpoints,
    completed,
    finished_run,
    folder,
    interrupted,
    record_of,
    refused,
    rows,
    train,
    untrained,
    whole,
    write_text,
)

__all__ = ["finished_run", "folder", "shared_programs", "untrained", "whole"]  # fixtures

pytestmark = pytest.mark.core


# Continuing


def test_the_newest_checkpoints_are_kept_and_the_last_step_is_one(whole: Done) -> None:
    assert checkpoints("whole") == [6, STEPS]


def test_a_resumed_run_is_the_run_that_was_not_interrupted(whole: Done) -> None:
    copy = interrupted("whole", "resumed", 6)
    done = completed("--workdir resumed --resume")
    assert f"resuming lm-tiny at step 6 of {STEPS}" in done.out
    # Every loss, gradient norm and evaluation to the bit: state, data order and schedule are all
    # restored.
    assert rows(copy) == rows("whole")
    assert checkpoints(copy) == [6, STEPS]


def test_a_run_resumes_on_a_mesh_of_another_shape(whole: Done) -> None:
    copy = interrupted("whole", "far", 6)
    completed("--workdir far --resume --mesh.data 2 --mesh.fsdp 4")
    for row, expected in zip(rows(copy), rows("whole"), strict=True):
        # Sums over devices, in another order, are all that differs.
        assert row == pytest.approx(expected, rel=1e-5)


def test_what_a_smaller_keep_deletes_is_said_when_the_run_goes_on(
    whole: Done, untrained: list
) -> None:
    shutil.copytree("whole", "fewer")
    resume = f"--workdir fewer --resume --resume-change schedule --steps {STEPS + 3}"
    done = completed(resume, "--checkpoint.keep 1")
    assert "changed since: checkpoint.keep 2 -> 1" in done.out
    assert "the checkpoints 6 are deleted" in done.out
    done = completed(resume, "--checkpoint.keep 2")
    assert "changed since: checkpoint.keep 1 -> 2" in done.out
    assert "deleted" not in done.out
    assert checkpoints("fewer") == [6, STEPS]


def test_a_finished_run_is_not_trained_again_even_if_its_picture_cannot_be_written(
    whole: Done,
) -> None:
    copy = Path(shutil.copytree("whole", "finished"))
    (copy / "loss.png").unlink()
    (copy / "loss.png").mkdir()
    done = completed("--workdir finished --resume")
    assert "loss.png is left out: IsADirectoryError" in done.out
    assert f"{STEPS} steps done" in done.out
    assert rows("finished") == rows("whole")
    assert checkpoints("finished") == [6, STEPS]


def test_a_run_goes_further_though_nobody_reads_what_it_prints(whole: Done) -> None:
    shutil.copytree("whole", "further")
    reader, writer = os.pipe()
    os.close(reader)
    further = "--workdir further --resume --resume-change schedule --steps 9 --checkpoint.keep 3"
    with os.fdopen(writer, "w") as pipe:
        done = completed(further, stdout=pipe)
    (line,) = done.err.splitlines()
    broken = "standard output takes nothing any more ([Errno 32] Broken pipe); the run goes on"
    assert line.startswith(broken)
    assert [row["step"] for row in rows("further") if "loss" in row] == list(range(1, 10))
    assert checkpoints("further") == [7, 8, 9]


@pytest.mark.parametrize("exists", [True, False])
def test_resume_without_a_run_starts_one_and_says_so(
    exists: bool, tmp_path: Path, untrained: list
) -> None:
    workdir = tmp_path / "new"
    if exists:
        workdir.mkdir()
    done = completed(f"--workdir {workdir} --resume")
    assert "nothing to resume in new: starting at step 0" in done.out
    assert untrained == [(0, None)]


def test_resume_before_the_first_checkpoint_starts_again_and_says_so(
    whole: Done, untrained: list
) -> None:
    shutil.copytree("whole", "early")
    shutil.rmtree("early/checkpoints")
    done = completed("--workdir early --resume")
    assert "nothing to resume in early: no checkpoint yet, starting at step 0" in done.out
    assert untrained == [(0, 0)]


def test_an_unfinished_checkpoint_is_not_used(whole: Done, untrained: list) -> None:
    copy = interrupted("whole", "torn", 6)
    torn = copy / "checkpoints" / f"{STEPS}.orbax-checkpoint-tmp"
    shutil.copytree(copy / "checkpoints" / "6", torn)
    (torn / "commit_success.txt").unlink(missing_ok=True)
    completed("--workdir torn --resume")
    assert untrained == [(6, 6)]


def test_restored_arrays_lie_where_this_run_wants_them(
    whole: Done, untrained: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def end_at_once(session: Any, position: Any) -> Any:
        calls.append((session.program, position.state))
        return position.state

    monkeypatch.setattr(loop, "train_with_rollbacks", end_at_once)
    mesh = "--mesh.data 1 --mesh.fsdp 4 --mesh.tensor 2"
    completed("--workdir whole --resume", mesh)
    ((program, state),) = calls
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    assert shardings == jax.tree.map(lambda leaf: leaf.sharding, program.abstract)
    assert int(state.step) == STEPS
    saved = trained.read(Path("whole"), part="params").stored["token"]
    np.testing.assert_array_equal(state.params["token"], saved)


# Damage and failing disks, seen from a run


def flip_a_bit(workdir: Path, step: int) -> None:
    """Flip one bit in the middle of the largest file of arrays."""
    files = (workdir / "checkpoints" / str(step)).rglob("d/*")
    file = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def test_a_damaged_checkpoint_costs_its_steps_and_nothing_else(whole: Done) -> None:
    copy = Path(shutil.copytree("whole", "damaged"))
    flip_a_bit(copy, STEPS)
    done = completed("--workdir damaged --resume")
    assert f"checkpoint {STEPS} is damaged: " in done.text
    quarantine = f"set aside as checkpoints/set-aside/{STEPS}, going back to checkpoint 6"
    assert quarantine in done.text
    assert f"resuming lm-tiny at step 6 of {STEPS}" in done.text
    assert rows(copy) == rows("whole")
    assert steps(copy / "checkpoints") == [6, STEPS]


def test_where_no_checkpoint_is_good_nothing_is_overwritten(whole: Done, untrained: list) -> None:
    copy = Path(shutil.copytree("whole", "spoilt"))
    for step in checkpoints(copy):
        flip_a_bit(copy, step)
    files = [copy / "config.json", copy / "metrics.jsonl"]
    before = [file.read_bytes() for file in files]
    for _ in range(2):
        assert "no good checkpoint is left" in refused("--workdir spoilt --resume")
    assert [file.read_bytes() for file in files] == before
    assert not untrained


@pytest.mark.parametrize("lasts", [True, False])
def test_a_full_disk_does_not_end_training(
    lasts: bool, whole: Done, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = layout.write

    def full(folder: Path, listing: layout.Manifest) -> None:
        if lasts or listing.step < 5:
            raise OSError(28, "No space left on device")
        write(folder, listing)

    monkeypatch.setattr(layout, "write", full)
    workdir = f"full-{lasts}"
    done = train("--workdir", workdir)
    assert done.code == int(lasts), done.err
    assert rows(workdir) == rows("whole")  # every step was trained, and told
    for step in (2, 4):
        failure = f"checkpoint {step} could not be saved: No space left on device"
        assert f"{failure}; there is no other yet" in done.text
    assert checkpoints(workdir) == ([] if lasts else [6, STEPS])
    assert (f"error: checkpoint {STEPS} could not be saved" in done.message) == lasts


def test_a_second_run_on_the_workdir_is_refused(whole: Done, untrained: list) -> None:
    with workdir.locked(Path("whole"), Processes()):
        answer = refused("--workdir whole --resume")
    owner = f"the workdir whole is in use by another run (process {os.getpid()} on"
    assert owner in answer
    assert not untrained


# Refusing


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--seed 1", "has seed 0, not 1; continue it with --seed 0, or start another"),
        ("--model.width 32", "has model.width 16, not 32; continue it with --model.width 16"),
        ("--model.num-kv-heads 1", "has model.num_kv_heads None, not 1"),
        ("--preset sp", "has preset.name mup, not sp"),
        ("--preset.gamma0 0.5", "has preset.gamma0 None, not 0.5"),
        ("--preset.rates.readout 2", "has preset.constants nothing, not rates.readout=2"),
        ("--preset.base lm-tiny", "has preset.base lm-proxy, not lm-tiny"),
        ("--optimizer.name sgd", "has optimizer.name adamw, not sgd"),
        ("--data.batch-size 32", "has data.batch_size 16, not 32"),
    ],
)
def test_another_run_is_not_continued(
    words: str, message: str, whole: Done, untrained: list
) -> None:
    record = Path("whole/config.json")
    before = record.read_bytes()
    answer = refused("--workdir whole --resume", words)
    assert message in answer
    # The way out if the difference is not in the words, but in a recipe that has changed.
    assert "`mupax train --resume --workdir whole` continues it as it was" in answer
    assert not untrained
    assert record.read_bytes() == before


def test_control_what_may_change_on_the_way(whole: Done, untrained: list) -> None:
    shutil.copytree("whole", "changed")
    settings = "--optimizer.peak-lr 0.1 --accumulation-steps 2 --mesh.fsdp 2"
    more = "--model.compute.layers unrolled --log.no-tensorboard"
    completed("--workdir changed --resume", settings, more)
    assert untrained == [(STEPS, STEPS)]
    assert record_of("changed")["config"]["optimizer"]["peak_lr"] == 0.1


def test_another_text_is_not_continued_and_leaves_the_record(
    whole: Done, folder: Path, untrained: list
) -> None:
    record = Path("whole/config.json")
    before = record.read_bytes()
    write_text(folder / "text.txt", seed=1)
    try:
        done = train("--workdir whole --resume")
    finally:
        write_text(folder / "text.txt")
    assert done.code == 2
    assert json.loads(before)["data"]["digest"] in done.err
    advice = "restore that data, or go on with these by --resume-change data"
    assert f"{advice}, or start again with another --workdir" in done.err
    assert len(done.err.splitlines()) <= 10
    assert not untrained
    assert record.read_bytes() == before


@pytest.mark.parametrize("words", ["", "--resume"], ids=["again", "resume"])
def test_what_a_run_leaves_in_its_first_moments_does_not_keep_it_out(
    words: str, tmp_path: Path, untrained: list
) -> None:
    partial = {".writable", ".config.json.partial"}
    # All at once: a folder is refused for any one entry that is not known to be left over.
    for name in (*partial, ".shared", ".lock"):
        (tmp_path / name).write_text('{"conf')
    completed("--workdir", str(tmp_path), words)
    assert untrained == [(0, None)]
    assert partial.isdisjoint(path.name for path in tmp_path.iterdir())


def test_a_used_folder_is_not_trained_into(whole: Done, tmp_path: Path, untrained: list) -> None:
    assert "the workdir whole is not empty; add --resume to continue the run in it" in refused(
        "--workdir whole"
    )
    notes = tmp_path / "thesis.txt"
    notes.write_text("not a run")
    refusals = {
        f"{tmp_path}": "is not empty",
        f"{tmp_path} --resume": "holds files but no run",
        f"{notes}": "is a file; write --workdir with the name of a folder",
    }
    for words, message in refusals.items():
        assert message in refused("--workdir", words)
    assert list(tmp_path.iterdir()) == [notes]
    assert not untrained
