"""Data that cannot be read in mid-run: the state is saved, and the run goes on with whole data."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mupax.train.data import DataError
from mupax.train.data.sources import folders
from mupax.train.data.text.batches import TokenData
from tests.fixtures.commands import Done, command, refusal, succeeded
from tests.fixtures.programs import shared_programs
from tests.fixtures.small_runs import (
    STEPS,
    completed,
    evaluations,
    finished_run,
    folder,
    losses,
    refused,
    rows,
    train,
    whole,
)

__all__ = ["finished_run", "folder", "shared_programs", "whole"]  # fixtures

pytestmark = pytest.mark.core

VIT = (
    "vit-digits --model.width 16 --model.depth 1 --model.num-heads 2 --model.no-bias --model.num-classes 2 "
    "--data.batch-size 8 --data.eval-batch-size 8 --optimizer.warmup-steps 2 --steps 4 "
    "--checkpoint.every-steps 2 --log.no-samples --log.no-tensorboard"
)
GONE = "shard 3 is gone; copy it again"


def write_images(root: Path) -> None:
    draw = np.random.default_rng(0)
    for side, count in (("train", 8), ("val", 4)):
        for label in ("dark", "light"):
            (root / side / label).mkdir(parents=True)
            for i in range(count):
                shade = 128 if label == "light" else 0
                pixels = (draw.integers(0, 128, (48, 48)) + shade).astype(np.uint8)
                Image.fromarray(pixels).save(root / side / label / f"{i}.jpg")


def checkpoints(workdir: Path) -> list[int]:
    return sorted(int(path.name) for path in Path(workdir, "checkpoints").glob("[0-9]*"))


@pytest.mark.parametrize(
    ("every", "step", "due"),
    [("None", 4, [4]), ("2", 2, [2, 4]), ("3", 3, [3, 4])],
    ids=["last", "both-due", "evaluation-due"],
)
def test_an_image_that_is_torn_after_the_scan_loses_no_step(
    every: str,
    step: int,
    due: list[int],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    images = tmp_path / "images"
    workdir = tmp_path / "run"
    words = f"train {VIT} --data.name images:{images} --workdir {workdir}"
    words += f" --log.eval-every-steps {every}"
    write_images(images)
    torn = images / "val" / "dark" / "1.jpg"
    content = torn.read_bytes()
    scanned = folders._scanned

    def torn_then(*files: Any) -> Any:
        broken = scanned(*files)
        torn.write_bytes(content[: len(content) // 2])
        return broken

    monkeypatch.setattr(folders, "_scanned", torn_then)
    answer = refusal(words)
    assert str(torn) in answer
    assert f"stopped at step {step} of 4, saved; " in answer
    assert "with --resume to go on" in answer
    assert checkpoints(workdir)[-1] == step
    assert len(losses(workdir)) == step
    assert not evaluations(workdir)

    monkeypatch.setattr(folders, "_scanned", scanned)
    again = command(words, "--resume")
    assert again.code == 2, "the image is still torn, and is found before a step now"
    assert str(torn) in again.err
    assert "1 of 24 are broken" in again.err
    assert checkpoints(workdir)[-1] == step

    torn.write_bytes(content)  # of another size, so these are other data than the run began with
    assert "or go on with these by --resume-change data" in refusal(words, "--resume")
    done = succeeded(words, "--resume --resume-change data")
    assert f"resuming vit-digits at step {step} of 4" in done.out
    assert [row["step"] for row in rows(workdir) if "loss" in row] == [1, 2, 3, 4]
    # An evaluation that failed is made up.
    assert [row["step"] for row in evaluations(workdir)] == due
    assert checkpoints(workdir)[-1] == 4


def fail_from(batch: int, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise an error for all training batches from one on, counted from 0."""
    read = TokenData.train_batch

    def train_batch(data: TokenData, k: int, rows: slice = slice(None)) -> Any:
        if k >= batch:
            raise error
        return read(data, k, rows)

    monkeypatch.setattr(TokenData, "train_batch", train_batch)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (DataError(GONE), 2, GONE),
        (OSError(116, "Stale file handle", "/data/shard3"), 1, "/data/shard3"),
    ],
    ids=["data", "disk"],
)
def test_a_batch_that_cannot_be_read_loses_no_step(
    error: Exception,
    code: int,
    message: str,
    whole: Done,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    workdir = tmp_path / "run"
    words = f"--workdir {workdir} --log.no-tensorboard"
    with monkeypatch.context() as patch:
        fail_from(3, error, patch)
        failed = train(words)
    assert failed.code == code
    assert message in failed.err
    assert f"stopped at step 3 of {STEPS}, saved; " in failed.err
    assert "Traceback" not in failed.err
    assert len(failed.err.splitlines()) <= 10
    assert len(losses(workdir)) == 3
    assert checkpoints(workdir) == [2, 3]
    assert "prefetch" not in [thread.name for thread in threading.enumerate()]
    done = completed(words, "--resume")
    assert f"resuming lm-tiny at step 3 of {STEPS}" in done.out
    assert losses(workdir) == losses("whole")
    assert evaluations(workdir) == evaluations("whole")


def test_data_that_cannot_be_read_at_all_leave_nothing_to_save(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fail_from(0, DataError(GONE), monkeypatch)
    answer = refused(f"--workdir {tmp_path}/run --log.no-tensorboard")
    assert GONE in answer
    assert f"stopped at step 0 of {STEPS}, nothing to save" in answer


def test_control_a_failure_that_is_not_of_the_data_is_not_taken_for_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fail_from(3, ZeroDivisionError("a defect"), monkeypatch)
    failed = train(f"--workdir {tmp_path}/run --log.no-tensorboard")
    assert failed.code == 1
    assert "Traceback" in failed.err
    assert "a defect" in failed.err
