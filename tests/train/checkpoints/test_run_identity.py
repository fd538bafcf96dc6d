"""A run and its checkpoints know each other by a name and by the config.json that each keeps."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mupax.train.checkpoints import layout
from mupax.train.checkpoints.folder import steps
from mupax.train.config.record import run_config
from mupax.train.run.report import metrics
from mupax.zoo.configs import ConfigError
from tests.fixtures.commands import Done, command, refusal, succeeded
from tests.fixtures.programs import shared_programs
from tests.fixtures.small_runs import (
    STEPS,
    completed,
    finished_run,
    folder,
    record_of,
    rows,
    train,
    untrained,
    whole,
)

__all__ = ["finished_run", "folder", "shared_programs", "untrained", "whole"]  # fixtures

pytestmark = pytest.mark.core


def edit_manifest(workdir: Path, step: int, **changes: Any) -> None:
    """Write a manifest as another run or version would have written it, with a right digest."""
    path = workdir / "checkpoints" / str(step) / layout.MANIFEST
    content = json.loads(path.read_text())
    content["manifest"]["record"] |= changes.pop("record", {})
    content |= changes
    content["digest"] = layout._digest_of(content["manifest"])
    path.write_text(json.dumps(content))


def test_a_run_has_a_name_which_its_checkpoints_bear(whole: Done, untrained: list) -> None:
    copy = Path(shutil.copytree("whole", "named"))
    record = record_of(copy)
    assert len(record["run"]) == 16
    for step in steps(copy / "checkpoints"):
        checkpoint_record = layout.read(copy / "checkpoints" / str(step)).record
        assert checkpoint_record["run"] == record["run"]
        assert checkpoint_record["config"]["model"] == record["config"]["model"]
    completed("--workdir named --resume")
    assert record_of(copy)["run"] == record["run"]
    completed("--workdir other")
    assert record_of("other")["run"] != record["run"]


@pytest.mark.parametrize("entry", ["data", "xla", "versions"])
def test_an_entry_of_another_kind_is_named_and_the_copy_of_a_checkpoint_is_used(
    entry: str, whole: Done, untrained: list, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree("whole", tmp_path / "run"))
    record = record_of(copy)
    (copy / "config.json").write_text(json.dumps({**record, entry: ["of", "another", "kind"]}))
    done = completed(f"--workdir {copy} --resume")
    reason = f"config.json is not one of a run: its entry {entry} is of another kind"
    assert reason in " ".join(done.err.split())
    assert record_of(copy)[entry] == record[entry]


def test_a_foreign_record_in_every_manifest_is_no_run(
    whole: Done, untrained: list, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree("whole", tmp_path / "run"))
    (copy / "config.json").unlink()
    for step in steps(copy / "checkpoints"):
        path = copy / "checkpoints" / str(step) / layout.MANIFEST
        content = json.loads(path.read_text())
        content["manifest"]["record"] = {"model": "of another tool"}
        content["digest"] = layout._digest_of(content["manifest"])
        path.write_text(json.dumps(content))
    for words in (f"train --resume --workdir {copy}", f"eval {copy}", f"checkpoints {copy}"):
        assert "config.json" in refusal(words)
    with pytest.raises(ConfigError, match="the config is None, not an object"):
        run_config({"model": "of another tool"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"record": {"run": "f" * 16}}, f"is of another run ({'f' * 16}; the one in this workdir"),
        (
            {"format": "mupax-checkpoint-9"},
            "has the format mupax-checkpoint-9, and this version reads",
        ),
    ],
    ids=["another-run", "a-newer-version"],
)
def test_a_checkpoint_of_another_run_or_version_is_refused_and_stays(
    changes: dict[str, Any], message: str, whole: Done, untrained: list, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree("whole", tmp_path / "run"))
    edit_manifest(copy, STEPS, **changes)
    before = sorted(copy.rglob("*"))
    for done in (
        train(f"--workdir {copy} --resume"),
        command(f"eval {copy}"),
        command(f"generate --prompt a {copy}"),
        train(f"--workdir {tmp_path}/from --init-from {copy}"),
    ):
        assert done.code == 2
        assert message in done.err
        assert len(done.err.splitlines()) == 1
    assert command(f"checkpoints {copy} --verify").code == 1
    assert sorted(copy.rglob("*")) == before
    assert not untrained


@pytest.mark.parametrize(
    "left", [b"", b'{"run": "a", "conf', b"[1]", b'{"config": 3}', None], ids=repr
)
def test_half_a_config_json_is_written_again_as_the_newest_checkpoint_has_it(
    left: bytes | None, whole: Done, untrained: list, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree("whole", tmp_path / "run"))
    file = copy / "config.json"

    def damage() -> None:
        file.unlink()
        if left is not None:
            file.write_bytes(left)

    record = record_of(copy)
    damage()
    shown = succeeded(f"checkpoints {copy}")
    assert "going by what the newest checkpoint kept of it" in shown.err
    done = completed(f"--workdir {copy} --resume")
    assert "written again as the newest checkpoint has it" in done.err
    assert untrained == [(STEPS, STEPS)]
    after = record_of(copy)
    assert after["run"] == record["run"]
    assert after["config"]["model"] == record["config"]["model"]
    # Control: without a checkpoint that kept it, it is refused in a line.
    shutil.rmtree(copy / "checkpoints")
    damage()
    done = train(f"--workdir {copy} --resume")
    assert done.code == 2
    assert "config.json" in done.err
    assert len(done.err.splitlines()) == 1


def test_a_workdir_that_is_moved_under_a_run_ends_it_with_a_message(
    whole: Done, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = metrics.MetricsWriter.write

    def move_after_step_3(writer: metrics.MetricsWriter, row: dict[str, Any]) -> None:
        write(writer, row)
        if row["step"] == 3 and Path("moves").exists():
            Path("moves").rename("moved")

    monkeypatch.setattr(metrics.MetricsWriter, "write", move_after_step_3)
    done = train("--workdir moves")
    assert done.code == 1
    assert "its workdir was moved or emptied" in done.err
    assert len(done.err.splitlines()) == 1
    # What the message says works, and nothing is lost.
    monkeypatch.undo()
    completed("--workdir moved --resume")
    assert rows("moved") == rows("whole")
