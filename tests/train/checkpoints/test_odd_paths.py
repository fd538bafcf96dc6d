"""Folders of any name: a run in them saves, resumes and is read, bitwise as under a plain name."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore

from mupax import disk
from mupax.disk import plainly_named, storage_url
from mupax.train.checkpoints import folder as checkpoints_folder
from mupax.train.checkpoints import layout, lock
from mupax.train.checkpoints.checkpointer import Checkpoints
from mupax.train.config.sections import CheckpointConfig
from mupax.train.core.state import TrainState
from tests.fixtures.commands import Done, succeeded
from tests.fixtures.devices import one_device
from tests.fixtures.programs import shared_programs
from tests.fixtures.small_runs import folder, losses
from tests.fixtures.small_runs import train as train_small

__all__ = ["folder", "one_device", "shared_programs"]  # fixtures

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


@dataclasses.dataclass
class Arrays:
    """The part of a state that saving and restoring use."""

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


def entries(checkpoint: Path) -> list[str]:
    """Return the paths of all entries but those of arrays, whose names are drawn."""
    paths = [path for path in checkpoint.rglob("*") if path.parent.name != "d"]
    return sorted(str(path.relative_to(checkpoint)) for path in paths)


@pytest.fixture(scope="module")
def plain_entries(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return entries(save(tmp_path_factory.mktemp("plainly")))


@pytest.mark.core
@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_checkpoint_is_saved_under_any_name_and_moves_to_any_other(
    name: str, plain_entries: list[str], tmp_path: Path
) -> None:
    checkpoint = save(tmp_path / name / "run")
    assert entries(checkpoint) == plain_entries
    assert os.listdir(tmp_path) == [name]
    (tmp_path / name).rename(tmp_path / "]moved[")
    assert loaded(tmp_path / "]moved[" / "run" / "checkpoints" / "3") == [0.0, 1.0, 2.0]
    (tmp_path / "]moved[").rename(tmp_path / name)
    assert loaded(checkpoint) == [0.0, 1.0, 2.0]
    assert checkpoints_folder.metadata(checkpoint)["a"].shape == (3,)
    assert checkpoints_folder.damaged_arrays(checkpoint, layout.read(checkpoint).arrays) == []


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


def train(workdir: Path | str, *words: str) -> Done:
    quoted = shlex.quote(str(workdir))
    settings = "--optimizer.schedule constant --log.no-tensorboard --steps 4"
    return train_small(settings, "--workdir", quoted, *words)


def test_a_run_in_an_odd_folder_resumes_bitwise(folder: Path) -> None:
    plain = train("plain")
    assert plain.code == 0
    assert not plain.err
    odd = folder / "gs:" / ALL_AT_ONCE
    for words in ("--steps 2", "--steps 4"):
        done = train(odd, "--resume", words)
        assert done.code == 0, done.err
    assert losses(odd) == losses("plain")
    arrays = [layout.read(path / "checkpoints" / "4").arrays for path in (odd, Path("plain"))]
    assert arrays[0] == arrays[1]
    succeeded(f"checkpoints --verify {shlex.quote(str(odd))}")


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
    done = train("refused")
    assert done.code == 2
    assert "--workdir" in done.err
    assert len(done.err.splitlines()) == 1
    assert not [name for name in os.listdir("refused") if name != ".lock"]
