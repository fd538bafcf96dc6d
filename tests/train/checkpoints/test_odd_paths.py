"""Folders of any name: a run in them saves, resumes and is read, bitwise as under a plain name."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore

from mupax import disk
from mupax.__main__ import main
from mupax.disk import plainly_named, storage_url
from mupax.train.checkpoints import folder as checkpoints_folder
from mupax.train.checkpoints import layout, lock
from mupax.train.checkpoints.checkpointer import Checkpoints
from mupax.train.config.sections import CheckpointConfig
from mupax.train.core.state import TrainState
from mupax.train.run.report import metrics
from tests.fixtures.programs import shared_programs

__all__ = ["shared_programs"]  # a fixture

NAMES = [
    "plain",
    "50%",
    "%41%2F",
    "a#b",
    "a?b",
    "[a]",
    "[!a",
    "a\\b",
    "a|b",
    "lr=1e-3,[d=2]",
    "gs:",
    "*",
    "a\nb",
    "caf\u00e9",
    "cafe\u0301",
    "n" * 255,
    os.fsdecode(b"caf\xe9\xff"),
]
ALL_AT_ONCE = os.fsdecode("%41 [a]*?#|\\~'\"`;&=,:@{}\n\u00e9".encode() + b"\xff")
TINY = (
    "lm-tiny --data.name text:text.txt --model.width 16 --model.depth 1 --model.num-heads 2 --model.seq-len 16 --data.batch-size 16 "
    "--data.eval-examples 64 --data.eval-batch-size 64 --optimizer.warmup-steps 2 --optimizer.schedule constant "
    "--checkpoint.every-steps 2 --log.no-samples --log.no-tensorboard"
)


@dataclasses.dataclass
class Arrays:
    """What saving and restoring ask of a state."""

    values: dict[str, Any]

    def arrays(self) -> dict[str, Any]:
        """Return the arrays by name."""
        return self.values


def save(workdir: Path) -> Path:
    """Save three numbers as checkpoint 3 of a workdir, and return its folder."""
    notes: list[str] = []
    with Checkpoints(workdir, CheckpointConfig(keep=2), log=notes.append) as checkpoints:
        state = cast("TrainState", Arrays({"a": jnp.arange(3.0)}))
        checkpoints.save(3, state, {}, last=True)
        assert checkpoints.wait() is None
    assert not notes
    return workdir / "checkpoints" / "3"


def loaded(checkpoint: Path) -> list[float]:
    """Return the numbers of a checkpoint."""
    return checkpoints_folder.loaded(checkpoint, {"a": jnp.zeros(3)})["a"].tolist()


@pytest.mark.core
@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_checkpoint_is_saved_under_any_name_and_moves_to_any_other(
    name: str, tmp_path: Path
) -> None:
    checkpoint = save(tmp_path / name / "run")
    names = sorted(
        str(path.relative_to(checkpoint))
        for path in checkpoint.rglob("*")
        if path.parent.name != "d"
    )
    assert [entry for entry in os.listdir(tmp_path) if entry != name] == []
    (tmp_path / name).rename(tmp_path / "]moved[")
    moved = tmp_path / "]moved[" / "run" / "checkpoints" / "3"
    assert loaded(moved) == [0.0, 1.0, 2.0]
    (tmp_path / "]moved[").rename(tmp_path / name)
    assert loaded(checkpoint) == [0.0, 1.0, 2.0]
    assert checkpoints_folder.metadata(checkpoint)["a"].shape == (3,)
    assert checkpoints_folder.damaged_arrays(checkpoint, layout.read(checkpoint).arrays) == []
    plain = save(tmp_path / "plainly")
    assert names == sorted(
        str(path.relative_to(plain)) for path in plain.rglob("*") if path.parent.name != "d"
    )


def test_without_open_folders_a_link_is_another_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_OPEN_FOLDERS", tmp_path / "none")
    with plainly_named(tmp_path / "[a]" / "b") as name:
        assert "[a]" not in name
        link = Path(name).parent
        assert link.readlink() == tmp_path / "[a]"
    assert not link.is_symlink()
    assert loaded(save(tmp_path / "[a]")) == [0.0, 1.0, 2.0]


def test_every_process_of_a_run_gets_the_same_name(tmp_path: Path) -> None:
    """Orbax refuses a save whose processes name its folder in different ways."""
    (tmp_path / "[a]").mkdir()
    with plainly_named(tmp_path / "[a]" / "b") as name:
        pass
    with Path(os.devnull).open(), plainly_named(tmp_path / "[a]" / "b") as again:
        assert again == name


def test_up_from_a_link_is_where_the_link_leads(tmp_path: Path) -> None:
    (tmp_path / "far" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "deep")
    save(tmp_path / "link" / ".." / "run")
    assert loaded(tmp_path / "far" / "run" / "checkpoints" / "3") == [0.0, 1.0, 2.0]
    assert sorted(os.listdir(tmp_path)) == ["far", "link"]


def test_a_lock_that_is_a_file_lies_in_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "a\\[b]"
    folder.mkdir()
    with lock.workdir_lock(folder, ".owner"):
        assert [path.name for path in folder.iterdir()] == [".owner"]
    assert os.listdir(tmp_path) == [folder.name]


@pytest.mark.core
@pytest.mark.parametrize(
    "name", ["50%", "%41", "a#b", "a?b", "[a]", "a|b", "a\\b", "a b", "caf\u00e9"]
)
def test_a_bucket_has_percent_encoded_urls(name: str) -> None:
    spec = tensorstore.KvStore.Spec(storage_url(f"gs://bucket/{name}/")).to_json()
    assert spec == {"driver": "gcs", "bucket": "bucket", "path": f"{name}/"}


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty folder with a small text; prepared data lies in it too."""
    path = tmp_path_factory.mktemp("run")
    (path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 600)
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(path):
        patch.setenv("MUPAX_DATA", str(path / "cache"))
        yield path


def train(*words: str) -> tuple[int, str]:
    """Return the exit code of a run, and its errors."""
    err = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        code = main(["train", *TINY.split(), *words])
    return code, err.getvalue()


def left(workdir: Path) -> Any:
    """Return the training losses and the digests of all arrays of a run of four steps."""
    losses = [row["loss"] for row in metrics.read(workdir / metrics.FILE_NAME) if "loss" in row]
    return losses, layout.read(workdir / "checkpoints" / "4").arrays


def test_a_run_in_an_odd_folder_resumes_bitwise(folder: Path) -> None:
    assert train("--steps", "4", "--workdir", "plain") == (0, "")
    odd = folder / "gs:" / ALL_AT_ONCE
    for steps in ("2", "4"):
        code, err = train("--resume", "--steps", steps, "--workdir", str(odd))
        assert code == 0, err
    assert left(odd) == left(folder / "plain")
    assert main(["checkpoints", str(odd), "--verify"]) == 0


@pytest.mark.parametrize("fault", ["elsewhere", "other bytes", "refused"])
def test_a_folder_where_nothing_can_be_saved_is_refused_before_work(
    fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def elsewhere(path: Path) -> Iterator[str]:
        yield str(folder / "elsewhere" / path.name)

    def refused(*arguments: object, **options: object) -> Any:
        raise ValueError("PERMISSION_DENIED: no locks here")

    if fault == "elsewhere":
        monkeypatch.setattr(checkpoints_folder, "plainly_named", elsewhere)
    elif fault == "other bytes":
        monkeypatch.setattr(np, "array_equal", lambda a, b: False)
    else:
        monkeypatch.setattr(tensorstore, "open", refused)
    code, err = train("--steps", "4", "--workdir", "refused")
    assert code == 2
    assert "--workdir" in err
    assert len(err.splitlines()) == 1
    assert not [name for name in os.listdir("refused") if name != ".lock"]
