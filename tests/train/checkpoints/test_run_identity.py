"""A run and its checkpoints know each other: by a name, and by the config.json that each of them keeps."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mupax.__main__ import main
from mupax.train.checkpoints import layout
from mupax.train.checkpoints.folder import steps
from mupax.train.run.report import metrics
from tests.fixtures.programs import shared_programs
from tests.train.checkpoints.test_checkpointer import (
    STEPS,
    Done,
    folder,
    rows,
    train,
    untrained,
    whole,
)

__all__ = ["folder", "shared_programs", "untrained", "whole"]  # fixtures


def edit_manifest(workdir: Path, step: int, **changes: Any) -> None:
    """A manifest as another would have written it, with the digest that it names."""
    path = workdir / "checkpoints" / str(step) / layout.MANIFEST
    content = json.loads(path.read_text())
    content["manifest"]["record"] |= changes.pop("record", {})
    content |= changes
    content["digest"] = layout._digest_of(content["manifest"])
    path.write_text(json.dumps(content))


@pytest.mark.core
def test_a_run_has_a_name_which_its_checkpoints_bear(whole: Done, untrained: list) -> None:
    copy = Path(shutil.copytree("whole", "named"))
    record = json.loads((copy / "config.json").read_text())
    assert len(record["run"]) == 16
    for step in steps(copy / "checkpoints"):
        checkpoint_record = layout.read(copy / "checkpoints" / str(step)).record
        assert (checkpoint_record["run"], checkpoint_record["config"]["model"]) == (
            record["run"],
            record["config"]["model"],
        )
    assert train("--workdir", "named", "--resume").code == 0
    assert json.loads((copy / "config.json").read_text())["run"] == record["run"]
    assert train("--workdir", "other").code == 0
    assert json.loads(Path("other", "config.json").read_text())["run"] != record["run"]


REFUSED = {
    "another run": (
        {"record": {"run": "f" * 16}},
        "is of another run (ffffffffffffffff; the one in this workdir is",
    ),
    "a newer version": (
        {"format": "mupax-checkpoint-9"},
        "has the format mupax-checkpoint-9, and this version reads",
    ),
}


@pytest.mark.core
@pytest.mark.parametrize("case", REFUSED)
def test_a_checkpoint_of_another_run_or_version_is_refused_and_stays(
    case: str, whole: Done, untrained: list
) -> None:
    changes, message = REFUSED[case]
    copy = Path(shutil.copytree("whole", case))
    edit_manifest(copy, STEPS, **changes)
    before = sorted(copy.rglob("*"))
    for words in (["lm-tiny"], ["eval"], ["generate", "--prompt", "a"], ["--init-from"]):
        if words[0] == "lm-tiny":
            done = train("--workdir", case, "--resume")
        elif words[0] == "--init-from":
            done = train("--workdir", f"from {case}", "--init-from", case)
        else:
            done = command(*words, case)
        assert done.code == 2, words
        assert message in done.err, words
        assert len(done.err.splitlines()) == 1, words
    assert command("checkpoints", case, "--verify").code == 1
    assert sorted(copy.rglob("*")) == before
    assert not untrained


def command(*words: str) -> Done:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    return Done(code, out.getvalue(), err.getvalue())


@pytest.mark.core
@pytest.mark.parametrize(
    "left", [b"", b'{"run": "a", "conf', b"[1]", b'{"config": 3}', None], ids=repr
)
def test_half_a_config_json_is_written_again_as_the_newest_checkpoint_has_it(
    left: bytes | None, whole: Done, untrained: list
) -> None:
    copy = Path(shutil.copytree("whole", f"half {left!r}"))
    record = json.loads((copy / "config.json").read_text())
    (copy / "config.json").unlink() if left is None else (copy / "config.json").write_bytes(left)
    shown = command("checkpoints", str(copy))
    assert shown.code == 0
    assert "going by what the newest checkpoint kept of it" in shown.err
    done = train("--workdir", str(copy), "--resume")
    assert done.code == 0, done.err
    assert "written again as the newest checkpoint has it" in done.err
    assert untrained == [(STEPS, STEPS)]
    after = json.loads((copy / "config.json").read_text())
    assert after["run"] == record["run"]
    assert after["config"]["model"] == record["config"]["model"]
    # Control: without a checkpoint that kept it, it is refused in a line.
    shutil.rmtree(copy / "checkpoints")
    (copy / "config.json").unlink() if left is None else (copy / "config.json").write_bytes(left)
    done = train("--workdir", str(copy), "--resume")
    assert done.code == 2
    assert "config.json" in done.err
    assert len(done.err.splitlines()) == 1


@pytest.mark.core
def test_a_workdir_that_is_moved_under_a_run_ends_it_with_a_message(
    whole: Done, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = metrics.MetricsWriter.write

    def move_after_step_3(writer: metrics.MetricsWriter, row: dict[str, Any]) -> None:
        write(writer, row)
        if row["step"] == 3 and Path("moves").exists():
            Path("moves").rename("moved")

    monkeypatch.setattr(metrics.MetricsWriter, "write", move_after_step_3)
    done = train("--workdir", "moves")
    assert done.code == 1
    assert "its workdir was moved or emptied" in done.err
    assert len(done.err.splitlines()) == 1
    # What the message says works, and nothing is lost.
    monkeypatch.undo()
    assert train("--workdir", "moved", "--resume").code == 0
    assert rows("moved") == rows("whole")
