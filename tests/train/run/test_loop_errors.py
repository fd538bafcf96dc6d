"""Runs that cannot start or cannot go on, and a dry run: what they say, and what they leave behind."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from mupax.train.data import DataError
from mupax.train.data.text.batches import TokenData
from mupax.train.run.report import metrics
from mupax.zoo import configs
from mupax.zoo.definition import definition
from tests.train.run.test_loop import STEPS, TINY, folder, rows, train

__all__ = ["folder"]  # a fixture


@pytest.mark.core
def test_a_run_that_diverges_fails_and_says_what_to_try(folder: Path) -> None:
    done = train(
        "--workdir", "diverged", "--optimizer.peak-lr", "1e30", "--optimizer.clip-norm", "None"
    )
    assert done.code == 1
    assert "Lower --optimizer.peak-lr" in done.err
    assert "Traceback" not in done.err
    assert len(done.err.splitlines()) <= 10
    last = metrics.read(Path("diverged/metrics.jsonl"))[-1]
    assert {"loss", "grad_norm"} & last["nonfinite"].keys()
    assert last["step"] < STEPS
    steps = [int(path.name) for path in Path("diverged/checkpoints").glob("[0-9]*")]
    assert all(step < last["step"] for step in steps)


@pytest.mark.core
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--data.name text:nowhere.txt", "nowhere.txt"),
        (
            "--data.name cifar5m --model vit-tiny --preset.base vit-proxy --model.image-size 32 --model.channels 3 "
            "--optimizer.warmup-steps 1",
            "part0.npz",
        ),
        ("--mesh.data 3", "the mesh needs 3 devices"),
        ("--mesh.fsdp 3", "a multiple of 3 devices"),
        ("--mesh.tensor 4", "mesh.tensor 4 does not divide axis 'heads' of size 2"),
        ("--data.batch-size 12", "write a multiple of 8"),
        ("--data.eval-batch-size 12", "data.eval_batch_size 12 does not split over 8 devices"),
        ("--mesh.sweep 2", "write 1"),
        ("--no-such-flag 3", "no flag is named --no-such-flag"),
        ("--preset depth-mup --preset.alpha-l 0.3", "write a value from 0.5 to 1"),
        ("--preset mop", "did you mean 'mup'?"),
        ("--model.vocab-size 7", "vocab"),
        ("--profile 5:5", "write START:STOP with 1 <= START < STOP"),
        (
            "--profile 5:9",
            "log.profile 5:9 ends after the last step, which is 6; write a STOP of at most 7",
        ),
    ],
)
def test_bad_input_is_answered_shortly_and_leaves_nothing(
    words: str, message: str, folder: Path, tmp_path: Path
) -> None:
    workdir = tmp_path / "new"
    tiny = TINY if "vit" not in words else "--steps 2"
    done = train("--workdir", str(workdir), *words.split(), tiny=tiny)
    assert done.code == 2
    assert message in done.err
    assert "Traceback" not in done.err
    assert len(done.err.splitlines()) <= 10
    left = {path.name for path in workdir.iterdir()} if workdir.exists() else set()
    assert left <= {".lock"}, "a second try would be refused"


@pytest.mark.core
def test_what_the_data_say_while_the_run_goes_on_reaches_the_user(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_batch = TokenData.train_batch

    def gone(data: TokenData, k: int, rows: slice = slice(None)) -> Any:
        if k >= 3:
            raise DataError("shard 3 is gone; copy it again")
        return train_batch(data, k, rows)

    monkeypatch.setattr(TokenData, "train_batch", gone)
    done = train("--workdir", "torn", "--log.no-tensorboard")
    assert done.code == 2
    assert "shard 3 is gone; copy it again" in done.err
    assert len(done.err.splitlines()) <= 10
    assert [row["step"] for row in rows("torn")] == [1, 2, 3]
    assert "prefetch" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.core
def test_dry_run_writes_nothing(folder: Path) -> None:
    done = train("--workdir", "dry", "--dry-run", "--mesh.fsdp", "2")
    assert done.code == 0, done.err
    for words in ("parameters", "FLOPs", "state per device", "data 4 x fsdp 2", "1x16/2x2x8"):
        assert words in done.out
    for name in definition(configs.get("lm-tiny")).specs:
        assert f"{name} " in done.out, "a name is cut at 80 columns"
    assert not Path("dry").exists()
