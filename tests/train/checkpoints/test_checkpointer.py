"""Stopping, continuing, and refusing to continue something else: checkpoints, workdirs and signals of real runs."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mupax.__main__ import main
from mupax.disk import path_of
from mupax.train.checkpoints import layout, workdir
from mupax.train.checkpoints.folder import steps
from mupax.train.parallel.processes import Processes
from mupax.train.run import loop
from mupax.train.run.report import metrics
from tests.fixtures.programs import shared_programs

__all__ = ["shared_programs"]  # a fixture

ROOT = Path(__file__).resolve().parents[3]
STEPS = 7
TINY = (
    "lm-tiny --data.name text:text.txt --model.width 16 --model.depth 1 --model.num-heads 2 --model.seq-len 16 --data.batch-size 16 "
    "--data.eval-examples 64 --data.eval-batch-size 64 --optimizer.warmup-steps 2 --checkpoint.every-steps 2 --log.no-samples"
)


@dataclasses.dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


def write_text(path: Path, seed: int) -> None:
    words, choose = (
        ("def", "return", "import", "class", "self", "value", "lambda", "yield"),
        random.Random(seed),
    )
    path.write_text("\n".join(" ".join(choose.choice(words) for _ in range(9)) for _ in range(600)))


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An empty folder with a small text; prepared data lies in it too."""
    path = tmp_path_factory.mktemp("run")
    write_text(path / "text.txt", 0)
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(path):
        patch.setenv("MUPAX_DATA", str(path / "cache"))
        yield path


def train(*words: str) -> Done:
    """A run in this process, on its eight devices."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["train", *TINY.split(), "--steps", str(STEPS), *words])
    return Done(code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def whole(folder: Path) -> Done:
    """A run that nothing interrupts."""
    return train("--workdir", "whole")


@pytest.fixture
def untrained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int | None]]:
    """Runs end before their first step; what they would start from: the state's step and the step restored."""
    starts: list[tuple[int, int | None]] = []

    def end_at_once(session: Any, position: Any) -> Any:
        assert int(position.state.step) == position.step
        starts.append((position.step, position.step if position.keep_metrics else None))
        return position.state

    monkeypatch.setattr(loop, "train_with_rollbacks", end_at_once)
    monkeypatch.setattr(loop.finish, "leave", lambda *_: None)
    return starts


def checkpoints(workdir: Path | str) -> list[int]:
    return sorted(int(path.name) for path in (Path(workdir) / "checkpoints").iterdir())


def rows(workdir: Path | str) -> list[dict[str, Any]]:
    """The metrics without what a clock says."""
    records = metrics.read(path_of(workdir) / "metrics.jsonl")
    return [
        {k: v for k, v in row.items() if k != "seconds"}
        for row in records
        if "perf_data_wait" not in row
    ]


def interrupted(source: str, name: str, step: int) -> Path:
    """A copy of a finished run as a kill after so many steps would have left it: later checkpoints gone, a row too many."""
    copy = Path(name)
    shutil.copytree(source, copy)
    for later in checkpoints(copy):
        if later > step:
            shutil.rmtree(copy / "checkpoints" / str(later))
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(lines[: step + 1]) + '{"step": 6, "lo')
    return copy


# Continuing


@pytest.mark.core
def test_the_newest_checkpoints_are_kept_and_the_last_step_is_one(whole: Done) -> None:
    assert whole.code == 0, whole.err
    assert checkpoints("whole") == [6, STEPS]


@pytest.mark.core
def test_a_resumed_run_is_the_run_that_was_not_interrupted(whole: Done) -> None:
    copy = interrupted("whole", "resumed", 6)
    done = train("--workdir", "resumed", "--resume")
    assert done.code == 0, done.err
    assert f"resuming lm-tiny at step 6 of {STEPS}" in done.out
    # Every loss, gradient norm and evaluation to the bit: state, data order and schedule are all restored.
    assert rows(copy) == rows("whole")
    assert checkpoints(copy) == [6, STEPS]


@pytest.mark.core
def test_how_many_checkpoints_are_kept_is_a_choice(folder: Path) -> None:
    done = train("--workdir", "kept", "--checkpoint.keep", "3", "--checkpoint.every-steps", "1")
    assert done.code == 0, done.err
    assert checkpoints("kept") == [5, 6, 7]
    # From far back, over several saves, on a mesh of another shape.
    copy = interrupted("kept", "far", 5)
    assert train("--workdir", "far", "--resume", "--mesh.data", "2", "--mesh.fsdp", "4").code == 0
    for got, want in zip(rows(copy), rows("kept"), strict=True):
        # Two steps later the sums over devices, in another order, are all that differs.
        assert got == pytest.approx(want, rel=1e-5)


@pytest.mark.core
def test_what_a_smaller_keep_deletes_is_said_when_the_run_goes_on(
    whole: Done, untrained: list[tuple[int, int | None]], capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree("whole", "fewer")
    words = [
        *TINY.split(),
        "--steps",
        str(STEPS + 3),
        "--workdir",
        "fewer",
        "--resume",
        "--resume-change",
        "schedule",
    ]
    assert main(["train", *words, "--checkpoint.keep", "1"]) == 0
    printed = capsys.readouterr().out
    assert "changed since: checkpoint.keep 2 -> 1" in printed
    assert "the checkpoints 6 are deleted" in printed
    assert main(["train", *words, "--checkpoint.keep", "2"]) == 0
    printed = capsys.readouterr().out
    assert "changed since: checkpoint.keep 1 -> 2" in printed
    assert "deleted" not in printed
    assert checkpoints("fewer") == [6, STEPS]


@pytest.mark.core
def test_a_finished_run_is_not_trained_again(whole: Done) -> None:
    shutil.copytree("whole", "finished")
    done = train("--workdir", "finished", "--resume")
    assert done.code == 0, done.err
    assert f"{STEPS} steps done" in done.out
    assert rows("finished") == rows("whole")
    assert checkpoints("finished") == [6, STEPS]


@pytest.mark.core
def test_neither_a_picture_nor_a_pipe_that_cannot_be_written_makes_an_error_of_a_finished_run(
    whole: Done,
) -> None:
    copy = Path(shutil.copytree("whole", "unseen"))
    (copy / "loss.png").unlink()
    (copy / "loss.png").mkdir()
    done = train("--workdir", "unseen", "--resume")
    assert done.code == 0, done.err
    assert "loss.png is left out: IsADirectoryError" in done.out
    assert f"{STEPS} steps done" in done.out
    reader, writer = os.pipe()
    os.close(reader)
    with (
        os.fdopen(writer, "w") as out,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        assert (
            main(["train", *TINY.split(), "--steps", str(STEPS), "--workdir", "unseen", "--resume"])
            == 0
        )
    (line,) = err.getvalue().splitlines()
    assert line.startswith(
        "standard output takes nothing any more ([Errno 32] Broken pipe); the run goes on"
    )


def test_a_finished_run_can_go_further(whole: Done) -> None:
    shutil.copytree("whole", "further")
    done = train("--workdir", "further", "--resume", "--steps", "9", "--resume-change", "schedule")
    assert done.code == 0, done.err
    assert [row["step"] for row in rows("further") if "loss" in row] == list(range(1, 10))
    assert checkpoints("further") == [8, 9]


@pytest.mark.core
@pytest.mark.parametrize("exists", [True, False])
def test_resume_without_a_run_starts_one_and_says_so(
    exists: bool, tmp_path: Path, untrained: list
) -> None:
    workdir = tmp_path / "new"
    if exists:
        workdir.mkdir()
    done = train("--workdir", str(workdir), "--resume")
    assert done.code == 0, done.err
    assert "nothing to resume in new: starting at step 0" in done.out
    assert untrained == [(0, None)]


@pytest.mark.core
def test_resume_before_the_first_checkpoint_starts_again_and_says_so(
    whole: Done, untrained: list
) -> None:
    copy = Path("early")
    shutil.copytree("whole", copy)
    shutil.rmtree(copy / "checkpoints")
    done = train("--workdir", "early", "--resume")
    assert done.code == 0, done.err
    assert "nothing to resume in early: no checkpoint yet, starting at step 0" in done.out
    assert untrained == [(0, 0)]


def test_an_unfinished_checkpoint_is_not_used(whole: Done, untrained: list) -> None:
    copy = interrupted("whole", "torn", 6)
    torn = copy / "checkpoints" / f"{STEPS}.orbax-checkpoint-tmp"
    shutil.copytree(copy / "checkpoints" / "6", torn)
    (torn / "commit_success.txt").unlink(missing_ok=True)
    assert train("--workdir", "torn", "--resume").code == 0
    assert untrained == [(6, 6)]


def test_restored_arrays_lie_where_this_run_wants_them(
    whole: Done, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(
        loop,
        "train_with_rollbacks",
        lambda *arguments: calls.append(arguments) or arguments[1].state,
    )
    monkeypatch.setattr(loop.finish, "leave", lambda *_: None)
    assert (
        train(
            "--workdir",
            "whole",
            "--resume",
            "--mesh.data",
            "1",
            "--mesh.fsdp",
            "4",
            "--mesh.tensor",
            "2",
        ).code
        == 0
    )
    (session, position), = calls  # fmt: skip
    state = position.state
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == jax.tree.map(
        lambda leaf: leaf.sharding, session.program.abstract
    )
    assert int(state.step) == STEPS
    assert not np.array_equal(
        state.params["token"], session.program.initial_state().params["token"]
    )


# Damage and failing disks, seen from a run


def flip_a_bit(workdir: Path, step: int) -> None:
    file = max(
        (workdir / "checkpoints" / str(step)).rglob("d/*"), key=lambda path: path.stat().st_size
    )
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


@pytest.mark.core
def test_a_damaged_checkpoint_costs_its_steps_and_nothing_else(whole: Done) -> None:
    copy = Path(shutil.copytree("whole", "damaged"))
    flip_a_bit(copy, STEPS)
    done = train("--workdir", "damaged", "--resume")
    assert done.code == 0, done.err
    output = " ".join(done.out.split())
    assert f"checkpoint {STEPS} is damaged: " in output
    assert f"set aside as checkpoints/set-aside/{STEPS}, going back to checkpoint 6" in output
    assert f"resuming lm-tiny at step 6 of {STEPS}" in output
    assert rows(copy) == rows("whole")
    assert steps(copy / "checkpoints") == [6, STEPS]


@pytest.mark.core
def test_where_no_checkpoint_is_good_nothing_is_overwritten(whole: Done, untrained: list) -> None:
    copy = Path(shutil.copytree("whole", "spoilt"))
    for step in checkpoints(copy):
        flip_a_bit(copy, step)
    before = (copy / "config.json").read_bytes(), (copy / "metrics.jsonl").read_bytes()
    for _ in range(2):
        done = train("--workdir", "spoilt", "--resume")
        assert done.code == 2
        assert "no good checkpoint is left" in done.err
        assert len(done.err.splitlines()) <= 10
    assert ((copy / "config.json").read_bytes(), (copy / "metrics.jsonl").read_bytes()) == before
    assert not untrained


@pytest.mark.core
@pytest.mark.parametrize("lasts", [True, False])
def test_a_full_disk_does_not_end_training(
    lasts: bool, whole: Done, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, name = layout.write, f"full-{lasts}"

    def full(folder: Path, listing: layout.Manifest) -> None:
        if lasts or listing.step < 5:
            raise OSError(28, "No space left on device")
        write(folder, listing)

    monkeypatch.setattr(layout, "write", full)
    done = train("--workdir", name)
    assert done.code == int(lasts), done.err
    assert rows(name) == rows("whole")  # every step was trained, and told
    output = " ".join(done.out.split())
    for step in (2, 4):
        assert (
            f"checkpoint {step} could not be saved: No space left on device; there is no other yet"
            in output
        )
    assert checkpoints(name) == ([] if lasts else [6, STEPS])
    assert (f"error: checkpoint {STEPS} could not be saved" in " ".join(done.err.split())) == lasts


@pytest.mark.core
def test_a_second_run_on_the_workdir_is_refused(whole: Done, untrained: list) -> None:
    with workdir.locked(Path("whole"), Processes()):
        done = train("--workdir", "whole", "--resume")
    assert done.code == 2
    assert f"the workdir whole is in use by another run (process {os.getpid()} on" in " ".join(
        done.err.split()
    )
    assert not untrained


# Refusing


@pytest.mark.core
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
    before = Path("whole/config.json").read_text()
    done = train("--workdir", "whole", "--resume", *words.split())
    assert done.code == 2
    assert message in done.err
    assert "Traceback" not in done.err
    assert len(done.err.splitlines()) <= 10
    assert not untrained
    assert Path("whole/config.json").read_text() == before


@pytest.mark.core
def test_control_what_may_change_on_the_way(whole: Done, untrained: list) -> None:
    shutil.copytree("whole", "changed")
    words = "--optimizer.peak-lr 0.1 --accumulation-steps 2 --model.compute.layers unrolled --mesh.fsdp 2 --log.no-tensorboard"
    assert train("--workdir", "changed", "--resume", *words.split()).code == 0
    assert untrained == [(STEPS, STEPS)]
    assert (
        json.loads(Path("changed/config.json").read_text())["config"]["optimizer"]["peak_lr"] == 0.1
    )


@pytest.mark.core
def test_another_text_is_not_continued_and_leaves_the_record(
    whole: Done, folder: Path, untrained: list
) -> None:
    before = Path("whole/config.json").read_text()
    write_text(folder / "text.txt", 1)
    try:
        done = train("--workdir", "whole", "--resume")
    finally:
        write_text(folder / "text.txt", 0)
    assert done.code == 2
    assert json.loads(before)["data"]["digest"] in done.err
    assert (
        "restore that data, or go on with these by --resume-change data, or start again with another --workdir"
        in done.err
    )
    assert len(done.err.splitlines()) <= 10
    assert not untrained
    assert Path("whole/config.json").read_text() == before


@pytest.mark.core
@pytest.mark.parametrize("left", [".writable", ".config.json.partial", ".shared", ".lock"])
@pytest.mark.parametrize("words", [[], ["--resume"]], ids=["again", "resume"])
def test_what_a_run_leaves_in_its_first_moments_does_not_keep_it_out(
    left: str, words: list[str], tmp_path: Path, untrained: list
) -> None:
    (tmp_path / left).write_text('{"conf')
    done = train("--workdir", str(tmp_path), *words)
    assert done.code == 0, done.err
    assert untrained == [(0, None)]
    assert {".writable", ".config.json.partial"}.isdisjoint(
        path.name for path in tmp_path.iterdir()
    )


@pytest.mark.core
def test_a_used_folder_is_not_trained_into(whole: Done, tmp_path: Path, untrained: list) -> None:
    done = train("--workdir", "whole")
    assert done.code == 2
    assert "the workdir whole is not empty; add --resume to continue the run in it" in done.err
    (tmp_path / "thesis.txt").write_text("not a run")
    for words in ([], ["--resume"]):
        done = train("--workdir", str(tmp_path), *words)
        assert done.code == 2
        assert ("holds files but no run" if words else "is not empty") in done.err
    done = train("--workdir", str(tmp_path / "thesis.txt"))
    assert done.code == 2
    assert "is a file; write --workdir with the name of a folder" in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    assert not untrained
