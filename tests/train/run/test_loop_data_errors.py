"""Data that cannot be read in mid-run: the state is saved as on Ctrl-C, and the run goes on when the data are whole again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mupax.train.data import DataError
from mupax.train.data.sources import folders
from mupax.train.data.text.batches import TokenData
from tests.fixtures.programs import shared_programs
from tests.train.run.test_loop import STEPS, Done, evaluations, folder, rows, train

__all__ = ["folder", "shared_programs"]  # fixtures

VIT = (
    "--model.width 16 --model.depth 1 --model.num-heads 2 --model.num-classes 2 --data.batch-size 8 --data.eval-batch-size 8 "
    "--optimizer.warmup-steps 2 --checkpoint.every-steps 2 --log.no-samples --log.no-tensorboard --steps 4"
)
GONE = "shard 3 is gone; copy it again"


def write_images(root: Path) -> None:
    draw = np.random.default_rng(0)
    for side, count in (("train", 8), ("val", 4)):
        for label in ("dark", "light"):
            (root / side / label).mkdir(parents=True)
            for i in range(count):
                pixels = draw.integers(0, 128, (48, 48), np.uint8) + (
                    128 if label == "light" else 0
                )
                Image.fromarray(pixels.astype(np.uint8)).save(root / side / label / f"{i}.jpg")


def on_images(images: Path, workdir: str, *words: str) -> Done:
    return train(
        "--data.name",
        f"images:{images}",
        "--workdir",
        workdir,
        *words,
        recipe="vit-digits",
        tiny=VIT,
    )


def checkpoints(workdir: str) -> list[int]:
    return sorted(int(path.name) for path in Path(workdir, "checkpoints").glob("[0-9]*"))


@pytest.mark.core
@pytest.mark.parametrize(
    ("every", "step"), [("None", 4), ("2", 2), ("3", 3)], ids=["last", "both-due", "evaluation-due"]
)
def test_an_image_that_is_torn_after_the_scan_loses_no_step(
    every: str, step: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, workdir = tmp_path / "images", str(tmp_path / "run")
    write_images(images)
    torn = images / "val" / "dark" / "1.jpg"
    whole, scanned = torn.read_bytes(), folders._scanned

    def torn_then(*files: Any) -> Any:
        broken = scanned(*files)
        torn.write_bytes(whole[: len(whole) // 2])
        return broken

    monkeypatch.setattr(folders, "_scanned", torn_then)
    failed = on_images(images, workdir, "--log.eval-every-steps", every)
    assert failed.code == 2
    assert str(torn) in failed.err
    assert f"stopped at step {step} of 4, saved; " in failed.err
    assert "with --resume to go on" in failed.err
    assert len(failed.err.splitlines()) <= 10
    assert checkpoints(workdir)[-1] == step
    assert [row["step"] for row in rows(workdir)] == list(range(1, step + 1))
    assert not evaluations(workdir)

    monkeypatch.setattr(folders, "_scanned", scanned)
    again = on_images(images, workdir, "--log.eval-every-steps", every, "--resume")
    assert again.code == 2, "the image is still torn, and is found before a step now"
    assert f"{torn}" in again.err
    assert "1 of 24 are broken" in again.err
    assert checkpoints(workdir)[-1] == step

    torn.write_bytes(whole)  # of another size, so these are other data than the run began with
    refused = on_images(images, workdir, "--log.eval-every-steps", every, "--resume")
    assert refused.code == 2
    assert "or go on with these by --resume-change data" in refused.err
    done = on_images(
        images, workdir, "--log.eval-every-steps", every, "--resume", "--resume-change", "data"
    )
    assert done.code == 0, done.err
    assert f"resuming vit-digits at step {step} of 4" in done.out
    assert [row["step"] for row in rows(workdir)] == [1, 2, 3, 4]
    due = {"None": [4], "2": [2, 4], "3": [3, 4]}[every]
    assert [row["step"] for row in evaluations(workdir)] == due, (
        "an evaluation that failed is made up"
    )
    assert checkpoints(workdir)[-1] == 4


def fail_from(batch: int, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training batch `batch`, counted from 0, cannot be read."""
    read = TokenData.train_batch

    def train_batch(data: TokenData, k: int, rows: slice = slice(None)) -> Any:
        if k >= batch:
            raise error
        return read(data, k, rows)

    monkeypatch.setattr(TokenData, "train_batch", train_batch)


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Done:
    return train("--workdir", "undisturbed", "--log.no-tensorboard")


@pytest.mark.core
@pytest.mark.parametrize(
    ("error", "code"),
    [(DataError(GONE), 2), (OSError(116, "Stale file handle", "/data/shard3"), 1)],
    ids=["data", "disk"],
)
def test_a_batch_that_cannot_be_read_loses_no_step(
    error: Exception, code: int, undisturbed: Done, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    workdir, words = str(tmp_path / "run"), ("--log.no-samples", "--log.no-tensorboard")
    with monkeypatch.context() as patch:
        fail_from(3, error, patch)
        failed = train("--workdir", workdir, *words)
    assert failed.code == code
    assert ("/data/shard3" if code == 1 else GONE) in failed.err
    assert f"stopped at step 3 of {STEPS}, saved; " in failed.err
    assert "Traceback" not in failed.err
    assert checkpoints(workdir) == [2, 3]
    done = train("--workdir", workdir, "--resume", *words)
    assert done.code == 0, done.err
    assert f"resuming lm-tiny at step 3 of {STEPS}" in done.out
    assert [row["loss"] for row in rows(workdir)] == [row["loss"] for row in rows("undisturbed")]
    assert evaluations(workdir) == evaluations("undisturbed")


@pytest.mark.core
def test_data_that_cannot_be_read_at_all_leave_nothing_to_save(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fail_from(0, DataError(GONE), monkeypatch)
    failed = train("--workdir", str(tmp_path / "run"), "--log.no-tensorboard")
    assert failed.code == 2
    assert GONE in failed.err
    assert f"stopped at step 0 of {STEPS}, nothing to save" in failed.err


@pytest.mark.core
def test_control_a_failure_that_is_not_of_the_data_is_not_taken_for_one(
    undisturbed: Done, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fail_from(3, ZeroDivisionError("a defect"), monkeypatch)
    failed = train("--workdir", str(tmp_path / "run"), "--log.no-tensorboard")
    assert failed.code == 1
    assert "Traceback" in failed.err
    assert "a defect" in failed.err
